"""Each operation's answer is lost once, after the server did the work: under a whole scheduler, not a bare store.

Two instances in the test's process share a server, the first behind a proxy that knows operations by what their
requests hold (the script's digest or text, the function's name). Used by the test's thread; `rewrite` is called by the
proxy's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster import Recorder, due_in, until
from fix_proxy import Proxy

import leaselib

OPERATIONS = ("claim", "heartbeat", "finish", "release")
LEASE_S, BEAT_S = 3.0, 0.4
"""Long enough that no takeover can pass for the answer to a lost one."""


def signs_of(store: str, operation: str) -> tuple[bytes, ...]:
    """What a request of that operation holds, and no other."""
    if store == "postgres":
        return (f".{operation}_1($1".encode(),)
    from leaselib.stores._redis_codec import script

    lua = script(operation)
    return lua.sha.encode(), lua.text


@dataclass
class Loser:
    """Loses the answer to the first request of an operation that passes the proxy.

    sent: how many such requests passed.
    look: reads the store's runs, past the proxy.
    between: what the store had when the operation was sent for the second time, before that got through: whether the
        first was carried out, though nobody learnt of it.
    """

    proxy: Proxy
    signs: tuple[bytes, ...]
    look: Callable[[], list[leaselib.Run]]
    sent: int = 0
    between: list[leaselib.Run] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, data: bytes) -> bytes:
        """See Direction.rewrite."""
        if any(sign in data for sign in self.signs):
            with self.lock:
                self.sent += 1
                number = self.sent
            if number == 1:
                self.proxy.drop_answer()
            elif number == 2:
                self.between = self.look()
        return data


@dataclass
class Told:
    """What became of a run whose operation's answer was lost."""

    sent: int
    starts: list[tuple[int, str]]
    """Attempt and token of each handler start, in order."""
    reasons: list[str]
    lost: int
    troubles: int
    """How often the first instance had trouble with its store: the lost answer, and nothing else."""
    between: list[leaselib.Run]
    """See Loser."""
    run: leaselib.Run

    def carried_out(self, operation: str) -> bool:
        """Whether the store had done what was asked when it was asked again."""
        if len(self.between) != 1:
            return False
        run = self.between[0]
        renewed_s = (run.lease_end - run.started_at).total_seconds() - LEASE_S
        return {
            "claim": run.attempt == 1 and run.status == "running",
            "heartbeat": renewed_s >= BEAT_S / 2,
            "finish": run.status == "success",
            "release": run.handovers == 1,
        }[operation]


def lose_answer(store: str, proxy: Proxy, near: str, far: str, operation: str) -> Told:
    """One run of one job, in which the first answer to that operation is lost.

    Args:
        store: `redis` or `postgres`.
        proxy: between the first instance and the server.
        near: the server's URL, for the second instance, which joins in for a hand-over.
        far: the URL through the proxy.
        operation: one of OPERATIONS.
    """
    reader = leaselib.open_store(near)
    loser = Loser(proxy, signs_of(store, operation), lambda: reader.runs(operation))
    starts: list[tuple[int, str]] = []
    reasons: list[str] = []
    started = threading.Event()
    seconds = {"heartbeat": 3 * BEAT_S, "release": 60.0}.get(operation, 0.0)

    def handler(ctx: leaselib.RunContext) -> None:
        starts.append((ctx.attempt, ctx.token))
        reasons.append(ctx.reason)
        started.set()
        ctx.sleep(seconds if ctx.attempt == 1 else 0.0)

    def instance(url: str) -> tuple[leaselib.Scheduler, Recorder]:
        scheduler = leaselib.Scheduler(url, lease=LEASE_S, heartbeat=BEAT_S, jitter=0, catch_up=0)
        scheduler.add(handler, leaselib.Every(every_ms / 1000), name=operation)
        return scheduler, Recorder(scheduler)

    every_ms = due_in(0.8)
    first, told = instance(far)
    proxy.requests.rewrite = loser
    first.start()
    second, told_second = instance(near)
    try:
        assert started.wait(8), f"no handler started; {told.events('store_error')}"
        if operation == "release":
            second.start()
            until(lambda: second.health().backups_held, "the second instance backs the run up")
            assert first.stop(), "a handler outlived stop()"
            told_second.wait("success", 8)
        else:
            told.wait("success", 8)
            _quiet(lambda: loser.sent)
    finally:
        proxy.requests.rewrite = None
        first.stop()
        second.stop()
        with contextlib.closing(reader):
            runs = reader.runs(operation)
    assert len(runs) == 1, f"one slot was due, the store has {runs}"
    lost = len(told.events("lost")) + len(told_second.events("lost"))
    return Told(loser.sent, starts, reasons, lost, len(told.events("store_error")), loser.between, runs[0])


def _quiet(count: Callable[[], int], for_s: float = 2 * BEAT_S) -> None:
    """Waits until nothing was counted for that long: whatever was under way has come."""
    seen, since = count(), time.monotonic()
    while time.monotonic() - since < for_s:
        time.sleep(0.05)
        if count() != seen:
            seen, since = count(), time.monotonic()
