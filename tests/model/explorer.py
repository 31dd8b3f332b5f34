"""Explorer: random walks over the pure rules, by instances whose messages are delayed, repeated and lost.

A walk has a few instances, one job, a few slots and one clock. An instance sends what an instance may send: claims of
slots, takeovers of attempts that it was told of, and heartbeats, finishes and releases with every token that it was
ever told `won` for (a slow one doesn't know that it lost it). Messages arrive in any order, some never, some several
times, and an answer may get lost. The clock goes on, and in some walks it is stepped. Everything is drawn from one
seed, so a seed is a walk.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal, Protocol

from history.base import Entry
from history.decisions import Report, check
from reference import Reference

from leaselib._model import ClaimAnswer, ClaimRequest, Overlap

JOB = "job"
START_MS = 1_000_000
GAP_MS = 10_000
LEASES_MS = (5_000, 15_000)
TICKS_MS = (1, 999, 1_000, 4_000, 5_000, 12_000, 15_000, 30_000, 90_000)
STEPS_MS = (-60_000, -9_000, -1_001, 40_000)


@dataclass(frozen=True)
class Message:
    """What an instance sent: a claim, or another operation with a token."""

    op: Literal["claim", "heartbeat", "finish", "release"]
    slot_ms: int
    token: str
    request: ClaimRequest | None = None
    status: Literal["success", "failed"] = "success"
    checkpoint: str | None = None


@dataclass
class Options:
    """The kind of a walk; drawn from its seed.

    mixed: instances claim with `skip` and with `allow`; else with `skip` only.
    stepped: the clock is stepped now and then.
    """

    mixed: bool
    stepped: bool
    instances: int = 3
    slots: int = 3


class WalkedStore(Protocol):
    """Where a walk's messages go: the reference, or a real store beside it."""

    @property
    def entries(self) -> list[Entry]:
        """All decisions so far."""

    def claim(self, request: ClaimRequest, now_ms: int) -> ClaimAnswer:
        """See Store.claim."""

    def heartbeat(self, job: str, slot_ms: int, token: str, lease_ms: int, checkpoint: str | None, now_ms: int) -> bool:
        """See Store.heartbeat."""

    def finish(
        self, job: str, slot_ms: int, token: str, status: Literal["success", "failed"], error: str | None, now_ms: int
    ) -> bool:
        """See Store.finish."""

    def release(self, job: str, slot_ms: int, token: str, checkpoint: str | None, now_ms: int) -> bool:
        """See Store.release."""

    def purge(self, job: str, force: bool, now_ms: int) -> int:
        """See Store.purge."""


@dataclass
class Walk:
    """One random walk; `report` says what it broke. `start_ms` is a multiple of GAP_MS."""

    seed: int
    steps: int = 60
    store: WalkedStore = field(default_factory=lambda: Reference(f"{START_MS}-0"))
    start_ms: int = START_MS
    chance: random.Random = field(init=False)
    options: Options = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.options = Options(mixed=self.chance.random() < 0.25, stepped=self.chance.random() < 0.4)
        self._now_ms = self.start_ms
        self._known: dict[int, int] = {}  # slot: the latest attempt that some answer told of
        self._held: list[tuple[int, str]] = []  # slot and token of every `won`
        self._in_flight: list[Message] = []
        self._tokens = 0

    def report(self) -> Report:
        """Walks, then checks every decision."""
        for _ in range(self.steps):
            act = self.chance.choices(
                (self._send_claim, self._send_other, self._deliver, self._tick, self._purge), (3, 3, 7, 2, 0.15)
            )[0]
            act()
        return check(self.store.entries)

    # ---- the instances -------------------------------------------------------------------------------------------

    def _send_claim(self) -> None:
        chance, self._tokens = self.chance, self._tokens + 1
        # A slot near the store's time: claims are sent when a slot is due.
        latest = self._now_ms // GAP_MS * GAP_MS
        slot_ms = latest - chance.choice((-1, 0, 0, 1, 2)) * GAP_MS
        takeover_of = None
        if self._known and chance.random() < 0.6:
            slot_ms = chance.choice(list(self._known))
            takeover_of = self._known[slot_ms]
        overlap: Overlap = "allow" if self.options.mixed and chance.random() < 0.5 else "skip"
        max_late_ms = chance.choice((0, 5_000, 60_000))
        request = ClaimRequest(
            job=JOB,
            slot_ms=slot_ms,
            token=f"t{self._tokens}",
            runner=f"r{chance.randrange(self.options.instances)}",
            lease_ms=chance.choice(LEASES_MS),
            max_attempts=chance.choice((1, 2, 3)),
            overlap=overlap,
            max_late_ms=max_late_ms,
            keep_ms=max(max_late_ms, chance.choice((0, 0, 60_000))),
            history_size=chance.choice((0, 1, 100)),
            reason="scheduled",
            takeover_of=takeover_of,
        )
        self._in_flight.append(Message("claim", slot_ms, request.token, request))

    def _send_other(self) -> None:
        if not self._held:
            return
        chance = self.chance
        slot_ms, token = chance.choice(self._held[-3:] if chance.random() < 0.7 else self._held)
        op = chance.choices(("heartbeat", "finish", "release"), (4, 1, 2))[0]
        self._in_flight.append(
            Message(
                op,
                slot_ms,
                token,
                status=chance.choice(("success", "failed")),
                checkpoint=chance.choice((None, f'"{token}-{len(self.store.entries)}"')),
            )
        )

    # ---- the network and the store -------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """A message arrives: often the newest, now and then one that travelled for long."""
        if not self._in_flight:
            return
        chance = self.chance
        index = len(self._in_flight) - 1 if chance.random() < 0.5 else chance.randrange(len(self._in_flight))
        message = self._in_flight[index]
        if chance.random() < 0.6:
            del self._in_flight[index]  # else it is sent, or comes, once more
        if message.request is not None:
            self._deliver_claim(message.request)
        elif message.op == "heartbeat":
            lease_ms = chance.choice(LEASES_MS)
            self.store.heartbeat(JOB, message.slot_ms, message.token, lease_ms, message.checkpoint, self._now_ms)
        elif message.op == "finish":
            self.store.finish(JOB, message.slot_ms, message.token, message.status, None, self._now_ms)
        else:
            self.store.release(JOB, message.slot_ms, message.token, message.checkpoint, self._now_ms)

    def _deliver_claim(self, request: ClaimRequest) -> None:
        answer = self.store.claim(request, self._now_ms)
        if self.chance.random() < 0.2 or answer.record is None:
            return  # the answer got lost, or tells of no run
        self._known[answer.record.slot_ms] = answer.record.attempt
        if answer.outcome == "won" and (request.slot_ms, request.token) not in self._held:
            self._held.append((request.slot_ms, request.token))

    def _tick(self) -> None:
        if self.options.stepped and self.chance.random() < 0.2:
            self._now_ms += self.chance.choice(STEPS_MS)
        else:
            self._now_ms += self.chance.choice(TICKS_MS)

    def _purge(self) -> None:
        self.store.purge(JOB, self.chance.random() < 0.3, self._now_ms)
