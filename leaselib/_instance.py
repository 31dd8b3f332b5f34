"""Instance: a started scheduler in one process. Threads around a `Planner`: they wait, call the store and handlers, and
do what the planner decides. It has no rules of its own.

Owns its threads and queues, and the lock that guards the planner, its attempts and the table of executions (see
`_threads` for the whole picture). An instance is used once: a stop ends it, a fork leaves it behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable

from leaselib import _clock, _random, _threads
from leaselib._claims import Claim, Failure, JobSpec, Unfinished
from leaselib._effects import Beat, Begin, Effect, Emit, Load, Ping, ReleaseOrphan, SendClaim, SetSignal, Tell, Wake
from leaselib._execution import Execution, describe
from leaselib._model import ClaimAnswer, ClaimRequest, from_ms, to_ms
from leaselib._planner import Planner
from leaselib.errors import StoreError
from leaselib.events import Dispatcher, Event, Listeners
from leaselib.stores._base import GivenBackError, Store

LONGEST_WAIT_MS = 500
"""The scheduler thread looks at the clocks at least so often, so that a step is noticed within a second."""
ERROR_PAUSE_S = 0.1
"""After an internal error the scheduler thread pauses: the same one may come at once."""
LAST_WORD_MS = 2_000
"""How much longer than its time-out stop() waits for words to the store that are on their way."""

_log = logging.getLogger("leaselib.instance")
_StoreTask = Ping | Load | ReleaseOrphan


class Instance:
    """See the module's text."""

    def __init__(self, store: Store, runner: str, workers: int, listeners: Listeners) -> None:
        self.store, self.runner, self.pid = store, runner, os.getpid()
        self.clock = _clock.SYSTEM
        self.lock = threading.Lock()
        self.planner = Planner(runner, _random.SYSTEM, workers)
        self.executions: dict[str, Execution] = {}  # by token
        self.events = Dispatcher(listeners)
        self.internal_errors = 0
        self._workers = workers
        self._due = threading.Condition(self.lock)  # the scheduler thread waits on it
        self._quiet = threading.Condition(self.lock)  # stop() waits on it
        self._wake_at_ms = 0
        self._ended = False
        self._claims: queue.SimpleQueue[Claim | None] = queue.SimpleQueue()
        self._tasks: queue.SimpleQueue[_StoreTask | None] = queue.SimpleQueue()
        self._waiters: dict[Claim, queue.Queue[Tell]] = {}
        self._threads: list[threading.Thread] = []

    @property
    def forked(self) -> bool:
        """Whether this is a copy in a child process, where it must do nothing."""
        return os.getpid() != self.pid

    # ---- start --------------------------------------------------------------------------------------------------

    def start(self, specs: list[JobSpec]) -> None:
        """Makes all threads and begins. Never waits for the store.

        Raises:
            RuntimeError: no thread could be made.
        """
        name = self.runner
        self._threads.append(self.events.start(f"{name}-events"))
        self._threads.append(_threads.spawn(f"{name}-store", self._serve_store))
        made = 0
        try:
            for number in range(self._workers):
                worker = _Worker(self, self._claims)
                self._threads.append(_threads.spawn(f"{name}-beat-{number}", worker.beat))
                self._threads.append(_threads.spawn(f"{name}-worker-{number}", worker.work))
                made += 1
        except RuntimeError as error:
            if not made:
                raise
            _log.warning("only %d of %d workers could be started: %s", made, self._workers, error)
            self.planner.free = made
        with self.lock:
            for spec in specs:
                self.planner.add(spec)
        self._threads.append(_threads.spawn(f"{name}-scheduler", self._schedule))
        self.decide(lambda _: self.planner.start())

    # ---- deciding and doing -------------------------------------------------------------------------------------

    def decide(self, decision: Callable[[int], list[Effect]]) -> Execution | None:
        """Takes a decision under the lock, then does what it says. Returns the execution that a won claim begins.

        Events are noted under the lock too, so that they are told in the order of the decisions.
        """
        with self.lock:
            effects = decision(self.clock.boot_ms())
            begun = None
            for effect in effects:
                if type(effect) is Begin:
                    begun = self.executions[effect.attempt.record.token] = Execution(self, effect.attempt)
                elif type(effect) is Emit:
                    self._note(effect)
            due_ms = self.planner.due_boot_ms()
            if due_ms is not None and due_ms < self._wake_at_ms:
                self._wake_at_ms = due_ms
                self._due.notify()
        self.events.flush()
        self._do(effects)
        return begun

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            kind = type(effect)
            if isinstance(effect, SendClaim):
                self._claims.put(effect.claim)
            elif isinstance(effect, (Ping, Load, ReleaseOrphan)):
                self._tasks.put(effect)
            elif isinstance(effect, Tell):
                waiter = self._waiters.get(effect.claim)
                if waiter is not None:
                    waiter.put(effect)
            elif isinstance(effect, (SetSignal, Beat, Wake)):
                execution = self.executions.get(effect.attempt.record.token)
                if execution is None:
                    continue  # it is over
                if kind is SetSignal:
                    execution.signal.set()
                    execution.beaten.set()
                if kind is not Beat:
                    execution.wake.set()
                execution.poke()

    def _note(self, effect: Emit) -> None:
        at_ms = self.clock.wall_ms() if effect.at_ms is None else effect.at_ms
        event = Event(
            name=effect.name,
            job=effect.job,
            slot=None if effect.slot_ms is None else from_ms(effect.slot_ms),
            attempt=effect.attempt,
            token=effect.token,
            runner=self.runner,
            at=from_ms(at_ms),
            reason=effect.reason,
            error=effect.error,
            duration=None if effect.duration_ms is None else effect.duration_ms / 1000,
            handed_over=effect.handed_over,
            count=effect.count,
        )
        self.events.note(event, effect.trace)

    def failure(self, error: Exception) -> Failure:
        """What a store raised, for the planner. What no store should raise is logged, and counts as transient."""
        if isinstance(error, StoreError):
            interrupted = error.interrupted if isinstance(error, GivenBackError) else ()
            return Failure(str(error), not error.transient, error.job, error.unreplicated, interrupted)
        _log.error("the store raised %s", type(error).__name__, exc_info=error)
        return Failure(describe(error))

    def internal_error(self, where: str) -> None:
        """Counts and logs an error of leaselib's own, or of the user's logging set-up, that must not end a thread."""
        with self.lock:
            self.internal_errors += 1
        with contextlib.suppress(BaseException):  # a logging filter may be what raised in the first place
            _log.exception("internal error in %s; it goes on", where)

    # ---- the scheduler thread -----------------------------------------------------------------------------------

    def _schedule(self) -> None:
        while not self._ended and not self.forked:
            try:
                self.decide(lambda now_ms: self.planner.tick(now_ms, self.clock.wall_ms()))
            except Exception:  # noqa: BLE001  a fault of ours must not end the application's jobs
                self.internal_error("the scheduler thread")
                threading.Event().wait(ERROR_PAUSE_S)
            with self.lock:
                now_ms = self.clock.boot_ms()
                due_ms = self.planner.due_boot_ms()
                longest_ms = now_ms + LONGEST_WAIT_MS
                self._wake_at_ms = longest_ms if due_ms is None else min(due_ms, longest_ms)
                wait_ns = self._wake_at_ms * 1_000_000 - self.clock.boot_ns()
                if wait_ns > 0 and not self._ended:
                    self._due.wait(wait_ns / 1e9)
                self._wake_at_ms = 0

    # ---- the store thread ---------------------------------------------------------------------------------------

    def _serve_store(self) -> None:
        while (task := self._tasks.get()) is not None and not self.forked:
            try:
                if isinstance(task, Ping):
                    self._ping(task)
                elif isinstance(task, Load):
                    self._load(task)
                else:
                    self._release(task)
            except Exception:  # noqa: BLE001  as above
                self.internal_error("the store thread")

    def _ping(self, task: Ping) -> None:
        sent_ms = self.clock.boot_ms()
        try:
            pong = self.store.ping(timeout=task.timeout_ms / 1000)
        except Exception as error:  # noqa: BLE001  `failure` logs what no store should raise
            failure = self.failure(error)
            self.decide(lambda now_ms: self.planner.ping_failed(failure, now_ms))
        else:
            store_ms = to_ms(pong.now)
            self.decide(lambda now_ms: self.planner.ponged(sent_ms, now_ms, store_ms, pong.epoch))

    def _load(self, task: Load) -> None:
        timeout = task.timeout_ms / 1000
        try:
            runs = [
                Unfinished(run.job, to_ms(run.slot), run.attempt, run.released, to_ms(run.lease_end))
                for run in self.store.unfinished(task.jobs, timeout=timeout)
            ]
            sent_ms = self.clock.boot_ms()
            pong = self.store.ping(timeout=timeout)
        except Exception as error:  # noqa: BLE001  `failure` logs what no store should raise
            failure = self.failure(error)
            self.decide(lambda now_ms: self.planner.load_failed(task.jobs, failure, now_ms))
        else:
            store_ms = to_ms(pong.now)
            self.decide(lambda now_ms: self.planner.loaded(task.jobs, runs, sent_ms, now_ms, store_ms, pong.epoch))

    def _release(self, task: ReleaseOrphan) -> None:
        orphan = task.orphan
        try:
            slot, timeout = from_ms(orphan.slot_ms), orphan.timeout_ms / 1000
            accepted = self.store.release(orphan.job, slot, orphan.token, timeout=timeout)
        except Exception as error:  # noqa: BLE001  `failure` logs what no store should raise
            failure = self.failure(error)
            self.decide(lambda now_ms: self.planner.orphan_failed(orphan, failure, now_ms))
        else:
            self.decide(lambda now_ms: self.planner.orphan_answered(orphan, accepted, now_ms))
        self._look_quiet()

    # ---- a worker's part ----------------------------------------------------------------------------------------

    def send(self, claim: Claim) -> Execution | None:
        """Sends a claim; returns the execution if it was won."""
        request: ClaimRequest | None = None

        def before(now_ms: int) -> list[Effect]:
            nonlocal request
            request, effects = self.planner.before_send(claim, now_ms)
            return effects

        self.decide(before)
        if request is None:
            self._look_quiet()
            return None
        try:
            answer = self._claim(request, claim.spec.options.call_timeout_ms / 1000)
            if answer.token != request.token:
                raise StoreError("the store answered another claim than the one that was sent", transient=True)
        except Exception as error:  # noqa: BLE001  `failure` logs what no store should raise
            failure = self.failure(error)
            self.decide(lambda now_ms: self.planner.claim_failed(claim, failure, now_ms))
            begun = None
        else:
            begun = self.decide(lambda now_ms: self.planner.claim_answered(claim, answer, now_ms))
        self._look_quiet()
        return begun

    def _claim(self, request: ClaimRequest, timeout: float) -> ClaimAnswer:
        return self.store.claim(
            request.job,
            from_ms(request.slot_ms),
            request.token,
            request.runner,
            lease=request.lease_ms / 1000,
            max_attempts=request.max_attempts,
            overlap=request.overlap,
            max_late=request.max_late_ms / 1000,
            keep=request.keep_ms / 1000,
            history_size=request.history_size,
            reason=request.reason,
            takeover_of=request.takeover_of,
            timeout=timeout,
        )

    def over(self, execution: Execution) -> None:
        """A worker is done with an execution."""
        self.decide(lambda now_ms: self.planner.attempt_over(execution.attempt, now_ms))
        with self.lock:
            del self.executions[execution.attempt.record.token]
            self._quiet.notify_all()

    def _look_quiet(self) -> None:
        if self.planner.stopping:
            with self.lock:
                self._quiet.notify_all()

    # ---- by hand ------------------------------------------------------------------------------------------------

    def run_now(self, name: str) -> str:
        """Claims a run of the job whose slot is now. Returns the outcome, or `busy`.

        Raises:
            StoreError: see Scheduler.run_now.
        """
        if self.planner.clock.offset_ms is None:
            sent_ms = self.clock.boot_ms()
            pong = self.store.ping()
            store_ms = to_ms(pong.now)
            self.decide(lambda now_ms: self.planner.ponged(sent_ms, now_ms, store_ms, pong.epoch))
        waiter: queue.Queue[Tell] = queue.Queue()  # no SimpleQueue, as for heartbeats
        claim: Claim | None = None

        def decide(now_ms: int) -> list[Effect]:
            nonlocal claim
            claim, effects = self.planner.manual(name, now_ms)
            if claim is not None:
                self._waiters[claim] = waiter
            return effects

        self.decide(decide)
        if claim is None:
            return "busy"
        try:
            told = waiter.get(timeout=claim.spec.options.call_timeout_ms / 1000 + 5)
        except queue.Empty:
            raise StoreError(f"the claim of job {name!r} by hand got no answer in time", transient=True) from None
        finally:
            del self._waiters[claim]
        failure = told.failure
        if failure is not None:
            message = f"job {name!r} was not run by hand: {failure.error}"
            raise StoreError(
                message, transient=not failure.permanent, job=failure.job, unreplicated=failure.unreplicated
            )
        return told.outcome

    # ---- stop ---------------------------------------------------------------------------------------------------

    def stop(self, timeout_ms: int) -> bool:
        """Ends everything; see Scheduler.stop. Called once."""
        end_ms = self.clock.boot_ms() + timeout_ms
        own = [e for e in self.executions.copy().values() if e.handler_thread is threading.current_thread()]
        self.decide(self.planner.stop)
        with self.lock:
            self._wait_quiet(lambda: not self._handlers(own) and not self._on_the_way(own), end_ms)
            in_time = not self._handlers(own)
            abandoned = [e.attempt for e in self.executions.values() if e not in own]
        self.decide(lambda _: [effect for attempt in abandoned for effect in attempt.abandon()])
        for attempt in abandoned:
            if attempt.phase == "running":
                _log.warning(
                    "job %r, slot %s: its handler still runs after stop() waited for it; it keeps its lease of %s s "
                    "until that runs out, and then another instance takes over",
                    attempt.spec.name, from_ms(attempt.record.slot_ms), attempt.record.lease_ms / 1000,
                )  # fmt: skip
        with self.lock:
            self._wait_quiet(lambda: not self._on_the_way(own), end_ms + LAST_WORD_MS)
        self.decide(lambda now_ms: [Emit("stopped", self.planner.clock.store_ms(now_ms))])
        with self.lock:
            self._ended = True
            self._due.notify_all()
        for _ in range(self._workers):
            self._claims.put(None)
        self._tasks.put(None)
        self.events.close(LAST_WORD_MS)
        # A handler that goes on keeps its worker; which one it has isn't worth knowing.
        ending = [t for t in self._threads if not self.executions or not t.name.rpartition("-")[2].isdigit()]
        _threads.join(ending, min(1000, max(100, end_ms + LAST_WORD_MS - self.clock.boot_ms())))
        return in_time

    def _handlers(self, own: list[Execution]) -> bool:
        return any(e.attempt.phase in ("claimed", "running") for e in self.executions.values() if e not in own)

    def _on_the_way(self, own: list[Execution]) -> bool:
        """Whether claims, releases or last words are still to be answered."""
        words = any(e.attempt.phase in ("claimed", "ending") for e in self.executions.values() if e not in own)
        return words or self.planner.in_flight > 0 or self.planner.orphans.out > 0

    def _wait_quiet(self, condition: Callable[[], bool], end_ms: int) -> None:
        while not condition():
            left_ms = end_ms - self.clock.boot_ms()
            if left_ms <= 0:
                return
            self._quiet.wait(left_ms / 1000)

    def runs_in_current_thread(self) -> bool:
        """Whether the calling thread runs a handler of this instance."""
        return any(e.handler_thread is threading.current_thread() for e in self.executions.copy().values())


class _Worker:
    """Two threads: one sends claims and runs handlers, one sends the heartbeats of what the first runs."""

    def __init__(self, instance: Instance, claims: queue.SimpleQueue[Claim | None]) -> None:
        self._instance, self._claims = instance, claims
        # No SimpleQueue: on Python 3.10 its get() with a time-out waits for ever if it is preempted at a bad moment.
        self._beats: queue.Queue[Execution | None] = queue.Queue()

    def work(self) -> None:
        """The worker thread."""
        while (claim := self._claims.get()) is not None:
            try:
                execution = self._instance.send(claim)
                if execution is not None:
                    self._run(execution)
            except Exception:  # noqa: BLE001  logged, unless this is a copy in a forked child
                if not self._instance.forked:
                    self._instance.internal_error("a worker")
            if self._instance.forked:
                return
        self._beats.put(None)

    def _run(self, execution: Execution) -> None:
        execution.poke = lambda: self._beats.put(execution)
        if execution.attempt.beating:
            execution.poke()
        try:
            execution.carry_out()
        finally:
            if not self._instance.forked:
                self._instance.over(execution)

    def beat(self) -> None:
        """The heartbeat thread: idle while its worker's runs are young, or there are none."""
        execution: Execution | None = None
        while True:
            try:
                seconds = None if execution is None else execution.beat_if_due()
            except Exception:  # noqa: BLE001  this thread must live on, or the worker's long runs lose their leases
                self._instance.internal_error("a heartbeat thread")
                seconds = ERROR_PAUSE_S
            if seconds is None:
                execution = None
            try:
                item = self._beats.get(timeout=seconds)
            except queue.Empty:
                continue
            if item is None:
                return
            if item.attempt.beating:
                execution = item
