"""A deterministic world for the decision objects: instances on one MemoryStore, virtual clocks, seeded chance.

A World owns the true time and one heap of everything that is still to happen; nothing runs but inside `advance`. Each
instance is a Planner whose effects are carried out in order: calls to the store travel as `World.fate` says, handlers
last as long as `World.work` says. No thread, no sleep; the same seed gives the same history.

The store is asked through its inner operations, in milliseconds: what the public ones check and convert is the same for
every call and has tests of its own, and here it would be a tenth of the time.

Clocks: the world's true time, the store's (`store_offset_ms` away from it), and each instance's boot and wall clocks.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from leaselib._attempt import Attempt, Step
from leaselib._claims import Claim, Failure, JobSpec, Orphan, Unfinished
from leaselib._effects import Beat, Begin, Effect, Emit, Load, Ping, ReleaseOrphan, SendClaim, SetSignal, Tell, Wake
from leaselib._model import ClaimRequest, Run, from_ms, to_ms
from leaselib._options import job_options
from leaselib._planner import Planner
from leaselib.errors import StoreError
from leaselib.schedules import Every
from leaselib.stores import MemoryStore

START_MS = 1_699_999_200_000
"""The world begins at a whole hour."""
LONGEST_WAIT_MS = 1_000
"""An instance looks at its clocks at least this often."""
CALL_S = 5.0
"""What a MemoryStore's lock is waited for, at most; it is free."""


class SeededChance:
    """Chance that a seed decides. With `share` set, every draw is that share of its range; tokens are counted."""

    def __init__(self, seed: str, share: float | None = None) -> None:
        self._random, self._name, self._count = random.Random(seed), seed, 0
        self.share = share

    def uniform(self, low: float, high: float) -> float:
        """See Chance."""
        return self._random.uniform(low, high) if self.share is None else low + self.share * (high - low)

    def token(self) -> str:
        """See Chance."""
        self._count += 1
        return f"{self._name}-{self._count}"


@dataclass(slots=True)  # not frozen, which would make the making of one three times as slow; nobody changes one
class Call:
    """One call to the store: its `kind` is claim, heartbeat, finish, release, load or ping."""

    instance: str
    kind: str
    job: str | None
    token: str | None
    timeout_ms: int
    sent_ms: int
    body: Any = None


@dataclass(frozen=True)
class Fate:
    """What becomes of a call: how long it travels, and what is lost.

    `failure` comes instead of the answer; with `carried_out` the store did what was asked all the same.
    """

    out_ms: int = 0
    back_ms: int = 0
    failure: Failure | None = None
    carried_out: bool = False


DELIVERED = Fate()


def lost_request(after_ms: int = 0) -> Fate:
    """The store never heard of it."""
    return Fate(0, after_ms, Failure("connection refused"))


def lost_answer(after_ms: int = 0) -> Fate:
    """The store did it, and the answer was lost."""
    return Fate(0, after_ms, Failure("timed out"), carried_out=True)


@dataclass(frozen=True)
class Work:
    """What a handler does: it ends after `duration_ms`, with an error or without.

    heeds_ms: how long after its signal it raises; None is a handler that doesn't look at it.
    """

    duration_ms: int = 0
    error: str | None = None
    heeds_ms: int | None = None


def spec(name: str = "job", every: float = 60, **options: Any) -> JobSpec:
    """A job that is due every so many seconds; without jitter unless asked for."""
    return JobSpec(name, Every(every), job_options({"jitter": 0, **options}))


class StoreClock:
    """The clock that the world's MemoryStore reads."""

    def __init__(self, world: World) -> None:
        self._world = world

    def boot_ms(self) -> int:
        """See Clock."""
        return self._world.now_ms

    def wall_ms(self) -> int:
        """See Clock."""
        return self._world.store_ms


class World:
    """See the module's text.

    Attributes:
        calls: every call to the store so far, in the order of sending.
        fate: decides what becomes of a call; tests replace it.
        work: decides what a handler does; tests replace it.
    """

    def __init__(self, seed: int = 1) -> None:
        self.seed = seed
        self.now_ms = START_MS
        self.store_offset_ms = 0
        self.store = MemoryStore(clock=StoreClock(self))
        self.instances: dict[str, Instance] = {}
        self.calls: list[Call] = []
        self.fate: Callable[[Call], Fate] = lambda call: DELIVERED
        self.work: Callable[[Instance, Attempt], Work] = lambda instance, attempt: Work()
        self._heap: list[tuple[int, int, Instance | None, Callable[[], None]]] = []  # when, tie, whose, what
        self._tie = 0

    @property
    def store_ms(self) -> int:
        """What the store's clock shows."""
        return self.now_ms + self.store_offset_ms

    def instance(
        self, *specs: JobSpec, name: str = "a", workers: int = 4, share: float | None = 0.5, start: bool = True
    ) -> Instance:
        """A new instance with these jobs. `share` fixes its chance, None seeds it."""
        made = self.instances[name] = Instance(self, name, workers, share)
        for job in specs:
            made.decide(lambda _, job=job: made.planner.add(job))
        if start:
            made.start()
        return made

    def at(self, at_ms: int, owner: Instance | None, what: Callable[[], None]) -> None:
        """Has something happen at that true time; in the order of calls among equals."""
        self._tie += 1
        heapq.heappush(self._heap, (at_ms, self._tie, owner, what))

    def advance(self, ms: int) -> None:
        """Lets so much time pass, and everything happen that is due in it."""
        end_ms = self.now_ms + ms
        while self._heap and self._heap[0][0] <= end_ms:
            at_ms, _, owner, what = heapq.heappop(self._heap)
            self.now_ms = max(self.now_ms, at_ms)
            if owner is None:
                what()
            elif owner.dead:
                continue
            elif owner.frozen_until_ms > self.now_ms:
                self.at(owner.frozen_until_ms, owner, what)
            else:
                what()
        self.now_ms = end_ms

    def cut(self, *kinds: str) -> None:
        """The store can't be reached; with `kinds`, it only refuses those."""
        self.fate = lambda call: lost_request() if not kinds or call.kind in kinds else DELIVERED

    def mend(self) -> None:
        """Every call arrives again."""
        self.fate = lambda call: DELIVERED

    def reset_store(self) -> None:
        """The store is replaced by an empty one."""
        self.store = MemoryStore(clock=StoreClock(self))

    def run(self, slot_ms: int, job: str = "job") -> Run | None:
        """What the store knows of a run."""
        return self.store.get(job, from_ms(slot_ms))

    def sent(self, kind: str, instance: str | None = None) -> list[Call]:
        """The calls of that kind so far."""
        return [c for c in self.calls if c.kind == kind and instance in (None, c.instance)]

    def seeded(self, name: str, share: float | None) -> SeededChance:
        """An instance's chance."""
        return SeededChance(f"{self.seed}-{name}", share)


class Instance:
    """One Planner, and what carries out its effects.

    Attributes:
        told: every event so far, with the true time.
        answers: what `run_now` was told.
        frozen_until_ms: nothing of this instance happens before that time; its clocks go on.
    """

    def __init__(self, world: World, name: str, workers: int, share: float | None) -> None:
        self.world, self.name = world, name
        self.chance = world.seeded(name, share)
        self.planner = Planner(name, self.chance, workers)
        self.boot_offset_ms = -START_MS + 1_000_000  # boot clocks don't begin with the epoch
        self.wall_offset_ms = 0
        self.dead = False
        self.frozen_until_ms = 0
        self.told: list[tuple[int, Emit]] = []
        self.answers: list[Tell] = []
        self.signals: dict[str, tuple[int, str | None]] = {}  # token: when its signal was set, and why
        self.on_send: Callable[[Claim], None] = lambda claim: None  # between the decision to send and the send
        self._handler_ends: dict[str, int] = {}
        self._works: dict[str, Work] = {}
        self._looks: dict[tuple[str, str], int] = {}  # (token, "worker" or "beats"): the wait that counts
        self._look_serial = 0
        self._tick_ms: int | None = None

    # ---- what tests ask and do -----------------------------------------------------------------------------------

    @property
    def boot_ms(self) -> int:
        """This machine's boot clock."""
        return self.world.now_ms + self.boot_offset_ms

    def true_ms(self, boot_ms: int) -> int:
        """When this machine's boot clock shows that, in the world's time."""
        return boot_ms - self.boot_offset_ms

    def start(self) -> None:
        """Starts it."""
        self.decide(lambda _: self.planner.start())
        self._plan_tick(self.world.now_ms)

    def stop(self) -> None:
        """The decision to stop; nothing waits."""
        self.decide(self.planner.stop)

    def kill(self) -> None:
        """The process is gone."""
        self.dead = True

    def freeze(self, ms: int) -> None:
        """The process is paused for so long; its clocks go on."""
        self.frozen_until_ms = self.world.now_ms + ms

    def add(self, job: JobSpec) -> None:
        """Registers a job."""
        self.decide(lambda _: self.planner.add(job))

    def remove(self, name: str = "job") -> None:
        """Removes a job."""
        self.decide(lambda now_ms: self.planner.remove(name, now_ms))

    def manual(self, name: str = "job") -> Claim | None:
        """A claim by hand."""
        made: list[Claim | None] = []

        def decide(now_ms: int) -> list[Effect]:
            claim, effects = self.planner.manual(name, now_ms)
            made.append(claim)
            return effects

        self.decide(decide)
        return made[0]

    def events(self, *names: str) -> list[Emit]:
        """The events so far, of these names if any are given."""
        return [event for _, event in self.told if not names or event.name in names]

    def summary(self, *names: str) -> list[tuple[str, str | None]]:
        """The name and reason of each event."""
        return [(event.name, event.reason) for event in self.events(*names)]

    def attempt(self) -> Attempt:
        """The one attempt of this instance."""
        (attempt,) = self.planner.attempts.values()
        return attempt

    # ---- effects -------------------------------------------------------------------------------------------------

    def decide(self, decision: Callable[[int], Iterable[Effect]]) -> None:
        """Takes a decision, carries its effects out in order, and plans the next tick."""
        for effect in decision(self.boot_ms):
            self._do(effect)
        due_ms = self.planner.due_boot_ms()
        self._plan_tick(self.world.now_ms + LONGEST_WAIT_MS if due_ms is None else self.true_ms(due_ms))

    def _do(self, effect: Effect) -> None:
        if isinstance(effect, Emit):
            self.told.append((self.world.now_ms, effect))
        elif isinstance(effect, Tell):
            self.answers.append(effect)
        elif isinstance(effect, SendClaim):
            self._later(0, lambda: self._send_claim(effect.claim))
        elif isinstance(effect, Begin):
            self._later(0, lambda: self._before_start(effect.attempt))
        elif isinstance(effect, Ping):
            self._ping(effect)
        elif isinstance(effect, Load):
            self._load(effect)
        elif isinstance(effect, ReleaseOrphan):
            self._release_orphan(effect.orphan)
        elif isinstance(effect, SetSignal):
            self._signal(effect.attempt)
        elif isinstance(effect, Wake):
            self._wake(effect.attempt)
        elif isinstance(effect, Beat):
            self._later(0, lambda: self._beats(effect.attempt))

    def _later(self, ms: int, what: Callable[[], None]) -> None:
        self.world.at(self.world.now_ms + ms, self, what)

    def _plan_tick(self, at_ms: int) -> None:
        at_ms = min(max(at_ms, self.world.now_ms), self.world.now_ms + LONGEST_WAIT_MS)
        if self._tick_ms is None or at_ms < self._tick_ms:
            self._tick_ms = at_ms
            self.world.at(at_ms, self, lambda: self._tick(at_ms))

    def _tick(self, planned_ms: int) -> None:
        if planned_ms != self._tick_ms:
            return  # an earlier one came instead
        self._tick_ms = None
        self.decide(lambda now_ms: self.planner.tick(now_ms, self.world.now_ms + self.wall_offset_ms))

    # ---- the store ----------------------------------------------------------------------------------------------

    def _call(
        self,
        call: Call,
        execute: Callable[[], Any],
        answered: Callable[[Any], None],
        failed: Callable[[Failure], None],
    ) -> None:
        """Sends a call on its way, as the world's `fate` says."""
        world, fate = self.world, self.world.fate(call)
        world.calls.append(call)

        def arrive() -> None:
            failure, result = fate.failure, None
            if failure is None or fate.carried_out:
                try:
                    result = execute()
                except StoreError as error:
                    failure = failure or Failure(str(error), not error.transient, error.job, error.unreplicated)
            report = (lambda: answered(result)) if failure is None else (lambda: failed(failure))
            world.at(world.now_ms + fate.back_ms, self, report)

        world.at(world.now_ms + fate.out_ms, None, arrive)

    def _made(
        self, kind: str, timeout_ms: int, job: str | None = None, token: str | None = None, body: Any = None
    ) -> Call:
        return Call(self.name, kind, job, token, timeout_ms, self.world.now_ms, body)

    def _send_claim(self, claim: Claim) -> None:
        self.on_send(claim)
        if self.frozen_until_ms > self.world.now_ms:
            self._later(0, lambda: self._send_claim(claim))
            return
        requests: list[ClaimRequest | None] = []

        def before(now_ms: int) -> list[Effect]:
            request, effects = self.planner.before_send(claim, now_ms)
            requests.append(request)
            return effects

        self.decide(before)
        request = requests[0]
        if request is None:
            return

        self._call(
            self._made("claim", claim.spec.options.call_timeout_ms, request.job, request.token, request),
            lambda: self.world.store._claim(request, CALL_S),
            lambda answer: self.decide(lambda now_ms: self.planner.claim_answered(claim, answer, now_ms)),
            lambda failure: self.decide(lambda now_ms: self.planner.claim_failed(claim, failure, now_ms)),
        )

    def _ping(self, effect: Ping) -> None:
        sent_ms = self.boot_ms
        self._call(
            self._made("ping", effect.timeout_ms),
            lambda: self.world.store.ping(),
            lambda pong: self.decide(
                lambda now_ms: self.planner.ponged(sent_ms, now_ms, to_ms(pong.now), pong.epoch)
            ),
            lambda failure: self.decide(lambda now_ms: self.planner.ping_failed(failure, now_ms)),
        )

    def _load(self, effect: Load) -> None:
        sent_ms = self.boot_ms

        def execute() -> Any:
            store = self.world.store
            runs = [
                Unfinished(run.job, run.slot_ms, run.attempt, run.released, run.lease_end_ms)
                for run in store._unfinished(list(effect.jobs), CALL_S)
            ]
            return runs, store.ping()

        self._call(
            self._made("load", effect.timeout_ms, body=effect.jobs),
            execute,
            lambda found: self.decide(
                lambda now_ms: self.planner.loaded(
                    effect.jobs, found[0], sent_ms, now_ms, to_ms(found[1].now), found[1].epoch
                )
            ),
            lambda failure: self.decide(lambda now_ms: self.planner.load_failed(effect.jobs, failure, now_ms)),
        )

    def _release_orphan(self, orphan: Orphan) -> None:
        self._call(
            self._made("release", orphan.timeout_ms, orphan.job, orphan.token, "orphan"),
            lambda: self.world.store._release(orphan.job, orphan.slot_ms, orphan.token, None, CALL_S),
            lambda accepted: self.decide(lambda now_ms: self.planner.orphan_answered(orphan, accepted, now_ms)),
            lambda failure: self.decide(lambda now_ms: self.planner.orphan_failed(orphan, failure, now_ms)),
        )

    # ---- an attempt ---------------------------------------------------------------------------------------------

    def _look_in(self, attempt: Attempt, who: str, wait_ms: int, what: Callable[[], None]) -> None:
        """Looks again in that time, or when the attempt is woken."""
        self._look_serial += 1
        key, serial = (attempt.record.token, who), self._look_serial

        def look() -> None:
            if self._looks.get(key) == serial:
                del self._looks[key]
                what()

        self._looks[key] = serial
        self._later(wait_ms, look)

    def _before_start(self, attempt: Attempt) -> None:
        step = attempt.before_start(self.boot_ms)
        if step.do == "send":
            self._beat(attempt, step, lambda: self._before_start(attempt))
        elif step.do == "wait":
            self._look_in(attempt, "worker", step.wait_ms, lambda: self._before_start(attempt))
        elif step.do == "start":
            self._start(attempt)
        else:
            self.decide(attempt.never_started)
            self._last_word(attempt)

    def _start(self, attempt: Attempt) -> None:
        token = attempt.record.token
        work = self._works[token] = self.world.work(self, attempt)
        self.decide(lambda now_ms: self.planner.start_attempt(attempt, now_ms))
        self._end_handler_in(attempt, work.duration_ms, work.error)
        if token in self.signals and work.heeds_ms is not None:
            self._end_handler_in(attempt, work.heeds_ms, "Aborted")

    def _end_handler_in(self, attempt: Attempt, ms: int, error: str | None) -> None:
        token = attempt.record.token
        self._look_serial += 1
        serial = self._handler_ends[token] = self._look_serial

        def end() -> None:
            if self._handler_ends.get(token) == serial:
                del self._handler_ends[token]
                self.decide(lambda now_ms: attempt.handler_ended(error, error, now_ms))
                self._last_word(attempt)

        self._later(ms, end)

    def _signal(self, attempt: Attempt) -> None:
        token = attempt.record.token
        self.signals.setdefault(token, (self.world.now_ms, attempt.abort_reason))
        work = self._works.get(token)
        if work is not None and work.heeds_ms is not None and token in self._handler_ends:
            self._end_handler_in(attempt, work.heeds_ms, "Aborted")

    def _wake(self, attempt: Attempt) -> None:
        token = attempt.record.token
        if self._looks.pop((token, "worker"), None) is not None:
            self._later(0, lambda: self._worker_look(attempt))
        if self._looks.pop((token, "beats"), None) is not None:
            self._later(0, lambda: self._beats(attempt))

    def _worker_look(self, attempt: Attempt) -> None:
        if attempt.phase == "claimed":
            self._before_start(attempt)
        else:
            self._last_word(attempt)

    def _last_word(self, attempt: Attempt) -> None:
        step = attempt.next_word(self.boot_ms)
        if step.do == "send":
            self._send_word(attempt, step)
        elif step.do == "wait":
            self._look_in(attempt, "worker", step.wait_ms, lambda: self._last_word(attempt))
        else:
            self.decide(attempt.give_up)
            self.decide(lambda now_ms: self.planner.attempt_over(attempt, now_ms))

    def _send_word(self, attempt: Attempt, step: Step) -> None:
        record, word, world = attempt.record, attempt.word, self.world
        run = record.job, record.slot_ms, record.token
        assert word is not None

        def answered(accepted: bool) -> None:
            self.decide(lambda now_ms: self.planner.word_answered(attempt, word, accepted, now_ms))
            self._last_word(attempt)

        def failed(failure: Failure) -> None:
            self.decide(lambda now_ms: self.planner.word_failed(attempt, failure, now_ms))
            self._last_word(attempt)

        if word == "release":
            checkpoint = attempt.pending_checkpoint
            call = self._made("release", step.timeout_ms, record.job, record.token, checkpoint)
            self._call(call, lambda: world.store._release(*run, checkpoint, CALL_S), answered, failed)
        else:
            call = self._made("finish", step.timeout_ms, record.job, record.token, word)
            self._call(call, lambda: world.store._finish(*run, word, attempt.error, CALL_S), answered, failed)

    def _beats(self, attempt: Attempt) -> None:
        step = attempt.next_beat(self.boot_ms)
        if step.do == "send":
            self._beat(attempt, step, lambda: self._beats(attempt))
        elif step.do == "wait":
            self._look_in(attempt, "beats", step.wait_ms, lambda: self._beats(attempt))

    def _beat(self, attempt: Attempt, step: Step, then: Callable[[], None]) -> None:
        record, sent_ms, world = attempt.record, self.boot_ms, self.world
        checkpoint = attempt.beat_sent()

        def answered(accepted: bool) -> None:
            self.decide(lambda now_ms: self.planner.beat_answered(attempt, accepted, sent_ms, now_ms))
            then()

        def failed(failure: Failure) -> None:
            self.decide(lambda now_ms: self.planner.beat_failed(attempt, failure, now_ms))
            then()

        self._call(
            self._made("heartbeat", step.timeout_ms, record.job, record.token, checkpoint),
            lambda: world.store._heartbeat(
                record.job, record.slot_ms, record.token, record.lease_ms, checkpoint, CALL_S
            ),
            answered,
            failed,
        )
