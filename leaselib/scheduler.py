"""Scheduler: registration, start, stop, run_now, health. No rules: those are the planner's and the store's.

Owns the registered jobs and the listeners, guarded by one lock; every public method may be called from any thread. What
runs is an `Instance`: made by `start()`, ended by `stop()`, and replaced by a new one in the child of a fork.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import FrameType, MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from leaselib import _life, _random, _threads
from leaselib._claims import JobSpec
from leaselib._execution import Handler
from leaselib._instance import Instance
from leaselib._model import from_ms
from leaselib._names import check_name
from leaselib._options import Duration, JobOptionsDict, default_workers, duration_ms, job_options, whole
from leaselib.errors import ConfigurationError
from leaselib.events import Listener, Listeners, check_event
from leaselib.schedules import Cron, Every, Schedule
from leaselib.stores import Store, open_store

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])
L = TypeVar("L", bound=Listener)
SIGNAL_LOOK_S = 0.1
"""run_forever() looks so often whether a signal came."""
FORK_HOLD_S = 1.0
"""After a fork the child touches the store only this much later: a child that will exec, or ends soon, never claims."""

_log = logging.getLogger("leaselib.scheduler")


@dataclass(frozen=True, slots=True)
class Job:
    """A registered job, as `Scheduler.jobs` shows it. Durations in seconds."""

    name: str
    schedule: Schedule
    func: Callable[..., Any]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunningAttempt:
    """An attempt that runs on this instance, as `Scheduler.running` shows it."""

    job: str
    slot: datetime
    attempt: int
    token: str
    reason: str
    started_at: datetime


@dataclass(frozen=True, slots=True)
class Health:
    """How an instance is, for a /healthz route.

    Attributes:
        started: whether it runs.
        store_reachable: whether the store answered last.
        store_unreachable_for: seconds since it stopped answering; 0 while it answers.
        store_error: what it last failed with, while it is unreachable.
        clock_offset: seconds that the store's clock is ahead of this machine's; None before the first answer.
        attempts_running: handlers running here.
        backups_held: runs of others that this instance watches.
        last_claim_late: seconds between the last claimed slot and the store's answer; None before the first.
        events_dropped: events that listeners were too slow for.
        internal_errors: errors of leaselib's own, logged with their traceback; anything but 0 is worth a report.
    """

    started: bool
    store_reachable: bool
    store_unreachable_for: float
    store_error: str | None
    clock_offset: float | None
    attempts_running: int
    backups_held: int
    last_claim_late: float | None
    events_dropped: int
    internal_errors: int


class Scheduler:
    """Runs each due run of its jobs on exactly one of the instances that share a store.

    Args:
        store: a Store, or its URL (see `open_store`).
        runner: this instance's name; by default host, process id and a random part.
        max_workers: handlers running at once on this instance; by default min(32, cpus + 4).
        stop_timeout: seconds that `stop()` waits for handlers.
        options: defaults for every job's options; see the table in the README.

    Raises:
        ConfigurationError: a bad URL, a missing driver, a bad option; the message says what to write instead.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        runner: str | None = None,
        max_workers: int | None = None,
        stop_timeout: Duration = 10,
        **options: Unpack[JobOptionsDict],
    ) -> None:
        if not isinstance(store, (Store, str)):
            raise ConfigurationError(
                f"store must be a leaselib Store or its URL, such as 'sqlite:///jobs.db'; this is {store!r:.100}"
            )
        self._owns_store = isinstance(store, str)
        self._store: Store = open_store(store) if isinstance(store, str) else store
        self._named = None if runner is None else check_name("runner", runner)
        self._workers = default_workers()
        if max_workers is not None:
            self._workers = whole("max_workers", max_workers, least=1, most=4096)
        self._stop_timeout_ms = duration_ms("stop_timeout", stop_timeout, least_ms=0)
        self._defaults: dict[str, Any] = dict(options)
        job_options(self._defaults)
        self._specs: dict[str, JobSpec] = {}
        self._given: dict[str, Mapping[str, Any]] = {}
        self._listeners = Listeners()
        self._instance: Instance | None = None
        self._lock = threading.RLock()
        self._stopping: threading.Event | None = None
        self._stop_result = True
        self._start_again = False
        self._forever = threading.Event()
        self._pid = self._made_pid = os.getpid()
        self._fork_pending: threading.Event | None = None
        _life.track(self)

    # ---- registration -------------------------------------------------------------------------------------------

    def every(
        self,
        interval: Duration | None = None,
        *,
        name: str | None = None,
        seconds: float = 0,
        minutes: float = 0,
        hours: float = 0,
        days: float = 0,
        **options: Unpack[JobOptionsDict],
    ) -> Callable[[F], F]:
        """A decorator: runs the function at whole multiples of an interval since 1970-01-01T00:00:00Z.

        `every(minutes=5)`, `every(300)`, `every(timedelta(minutes=5))`. Returns the function unchanged.

        Raises:
            ConfigurationError: at once for a bad interval, at registration for anything else.
        """
        parts = {k: v for k, v in (("seconds", seconds), ("minutes", minutes), ("hours", hours), ("days", days)) if v}
        schedule = Every(**parts) if interval is None else Every(interval, **parts)
        return self._decorator(schedule, name, options)

    def cron(
        self, expression: str, *, tz: Any = "UTC", name: str | None = None, **options: Unpack[JobOptionsDict]
    ) -> Callable[[F], F]:
        """A decorator: runs the function as a cron expression says, in a time zone. Returns the function unchanged.

        Raises:
            ConfigurationError: at once for a bad expression or zone, at registration for anything else.
        """
        return self._decorator(Cron(expression, tz), name, options)

    def _decorator(self, schedule: Schedule, name: str | None, options: JobOptionsDict) -> Callable[[F], F]:
        def register(func: F) -> F:
            return self.add(func, schedule, name=name, **options)

        return register

    def add(
        self, func: F, schedule: Schedule, *, name: str | None = None, **options: Unpack[JobOptionsDict]
    ) -> F:
        """Registers a job, before or after `start()`. Returns the function unchanged.

        Raises:
            ConfigurationError: a name that is taken or missing, a function that is async, a bad option.
        """
        handler = _handler(func)
        name = check_name("job name", _name_of(func) if name is None else name)
        if not isinstance(schedule, Schedule):
            raise ConfigurationError(
                f"schedule must be a leaselib.Every or Cron, such as Every(minutes=5); this is {schedule!r:.100}"
            )
        given = {**self._defaults, **options}
        spec = JobSpec(name, schedule, job_options(given), handler)
        with self._lock:
            if name in self._specs:
                raise ConfigurationError(
                    f"there is a job {name!r} already; give this one a name of its own: name='...'"
                )
            self._specs[name] = spec
            self._given[name] = MappingProxyType(given)
            instance = self._live()
            if instance is not None:
                instance.decide(lambda _: instance.planner.add(spec))
        return func

    def remove(self, name: str) -> None:
        """Removes a job: this instance claims no more of its runs, and watches none. A run under way goes on.

        Raises:
            ConfigurationError: there is no such job.
        """
        with self._lock:
            if name not in self._specs:
                raise ConfigurationError(f"there is no job {name!r:.200}; there are {', '.join(self._specs) or 'none'}")
            del self._specs[name], self._given[name]
            instance = self._live()
            if instance is not None:
                instance.decide(lambda now_ms: instance.planner.remove(name, now_ms))

    @overload
    def on(self, event: str, func: L) -> L: ...

    @overload
    def on(self, event: str) -> Callable[[L], L]: ...

    def on(self, event: str, func: L | None = None) -> L | Callable[[L], L]:
        """Calls `func(Event)` for each such event: `on("failed", f)`, or `@on("failed")` above it.

        Listeners are called one after the other on a thread of their own; one that raises is logged and harms nothing.

        Raises:
            ConfigurationError: no event has that name.
        """
        if func is not None:
            self._listeners.add(event, func)
            return func

        def register(listener: L) -> L:
            self._listeners.add(event, listener)
            return listener

        check_event(event)
        return register

    @property
    def jobs(self) -> Mapping[str, Job]:
        """The registered jobs by name; a read-only snapshot."""
        with self._lock:
            found = {n: Job(n, s.schedule, s.func.func, self._given[n]) for n, s in self._specs.items()}
        return MappingProxyType(found)

    @property
    def running(self) -> tuple[RunningAttempt, ...]:
        """The attempts whose handlers run on this instance; a read-only snapshot."""
        instance = self._live()
        if instance is None:
            return ()
        with instance.lock:
            records = [e.attempt.record for e in instance.executions.values() if e.attempt.phase == "running"]
        return tuple(
            RunningAttempt(r.job, from_ms(r.slot_ms), r.attempt, r.token, r.reason, from_ms(r.started_ms))
            for r in records
        )

    @property
    def runner(self) -> str | None:
        """This instance's name while it runs, else None."""
        instance = self._live()
        return None if instance is None else instance.runner

    @property
    def store(self) -> Store:
        """The store."""
        return self._store

    # ---- life ---------------------------------------------------------------------------------------------------

    def _live(self) -> Instance | None:
        instance = self._instance
        return None if instance is None or instance.forked else instance

    def start(self) -> Scheduler:
        """Starts this instance and returns the scheduler at once, whether or not the store can be reached.

        Idempotent. At interpreter exit a scheduler that still runs is stopped.

        Raises:
            RuntimeError: the system allows no threads.
        """
        with self._lock:
            if self._live() is None:
                self._start_instance()
                _hint_about_reloader()
            elif self._stopping is not None:
                self._start_again = True  # stop() is under way, perhaps in a thread that calls this: it starts anew
        return self

    def _start_instance(self) -> None:
        if self._fork_pending is not None:
            self._fork_pending.set()
        self._pid = os.getpid()
        self._stopping, self._start_again = None, False
        self._forever.clear()
        _life.at_exit(self._at_exit)
        instance = Instance(self._store, self._runner_name(), self._workers, self._listeners)
        instance.start(list(self._specs.values()))
        self._instance = instance

    def _runner_name(self) -> str:
        if self._named is not None and self._pid == self._made_pid:
            return self._named
        base = socket.gethostname() if self._named is None else self._named
        return f"{base[:150] or 'host'}-{os.getpid()}-{_random.SYSTEM.token()[:6]}"

    def stop(self, timeout: Duration | None = None) -> bool:
        """Stops this instance: no new claims; every handler's signal is set; waits for handlers.

        A handler that raises is handed over to another instance at once; one that returns is a success; one that still
        runs at the time-out keeps its lease until that runs out. Idempotent, thread-safe, and may be called from a
        handler (which it doesn't wait for) or a listener.

        Args:
            timeout: seconds to wait for handlers; by default `stop_timeout`.

        Returns:
            Whether every handler ended in time.
        """
        timeout_ms = self._stop_timeout_ms if timeout is None else duration_ms("timeout", timeout, least_ms=0)
        with self._lock:
            instance, stopping = self._live(), self._stopping
            if self._fork_pending is not None:
                self._fork_pending.set()
            if instance is None:
                return self._stop_result
            first = stopping is None
            if stopping is None:
                stopping = self._stopping = threading.Event()
        if not first:
            # Waiting here in a handler would make the first stop wait for this one.
            own = instance.runs_in_current_thread() or instance.events.is_current
            stopping.wait(0 if own else (timeout_ms + 5000) / 1000)
            return self._stop_result
        result = False
        try:
            result = instance.stop(timeout_ms)
        finally:
            if self._owns_store:
                self._store.close()
            with self._lock:
                self._instance = None
                atexit.unregister(self._at_exit)
                self._stop_result = result
                stopping.set()
                again, self._start_again = self._start_again, False
                if again:
                    self._start_instance()
                else:
                    self._forever.set()
        return result

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            self.stop()

    def __enter__(self) -> Scheduler:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def run_forever(self) -> None:
        """Starts, blocks until `stop()`, and turns SIGTERM and SIGINT into one. For a process that does nothing else.

        Called outside the main thread it can't handle signals, and only blocks.
        """
        self.start()
        before: dict[signal.Signals, Any] = {}
        told: list[int] = []

        def tell(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
            told.append(number)  # no Event: this thread may hold its lock at this very moment

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                before[number] = signal.signal(number, tell)
        try:
            while not told and not self._forever.wait(SIGNAL_LOOK_S):
                pass
            if told:
                self.stop()
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _after_fork(self) -> None:
        """In the child of a fork: a started scheduler starts afresh, a little later, on threads of its own."""
        was = self._instance
        self._instance, self._stopping = None, None
        self._lock = threading.RLock()
        self._forever = threading.Event()
        self._pid = os.getpid()
        self._listeners.after_fork()
        if was is None or was.planner.stopping:
            self._fork_pending = None
            return
        settled = self._fork_pending = threading.Event()  # set: somebody started or stopped it meanwhile

        def begin() -> None:
            settled.wait(FORK_HOLD_S)
            with self._lock:
                if not settled.is_set() and self._pid == os.getpid():
                    self._start_instance()

        try:
            _threads.spawn("after-fork", begin)
        except RuntimeError as error:
            _log.warning("no thread can be started in this forked child, so no jobs run in it: %s", error)

    # ---- by hand, and health ------------------------------------------------------------------------------------

    def run_now(self, name: str) -> str:
        """Claims a run of the job whose slot is now, under the same rules as any other, and runs it here if it is won.

        Returns:
            The claim's outcome (`won`, `overlap`, ...), or `busy` if every worker is.

        Raises:
            ConfigurationError: there is no such job, or the scheduler isn't started.
            StoreError: the store could not be asked, or gave no answer: then the run may be there all the same. It is
                given back as soon as the store can be reached; until its lease is over another instance may take it.
        """
        instance = self._live()
        if instance is None:
            raise ConfigurationError("run_now needs a started scheduler: call start() first")
        with self._lock:
            known = list(self._specs)
        if name not in known:
            raise ConfigurationError(f"there is no job {name!r:.200}; there are {', '.join(known) or 'none'}")
        return instance.run_now(name)

    def health(self) -> Health:
        """How this instance is; never waits for the store."""
        instance = self._live()
        if instance is None:
            return Health(False, False, 0.0, None, None, 0, 0, None, 0, 0)
        with instance.lock:
            planner, now_ms = instance.planner, instance.clock.boot_ms()
            since_ms, store_ms = planner.health.since_boot_ms, planner.clock.store_ms(now_ms)
            late_ms = planner.last_late_ms
            return Health(
                started=True,
                store_reachable=planner.health.state == "up" and store_ms is not None,
                store_unreachable_for=0.0 if since_ms is None else (now_ms - since_ms) / 1000,
                store_error=planner.health.error,
                clock_offset=None if store_ms is None else (store_ms - instance.clock.wall_ms()) / 1000,
                attempts_running=sum(a.phase == "running" for a in planner.attempts.values()),
                backups_held=len(planner.backups),
                last_claim_late=None if late_ms is None else late_ms / 1000,
                events_dropped=instance.events.dropped,
                internal_errors=instance.internal_errors,
            )

    def __repr__(self) -> str:
        state = "started" if self._live() else "not started"
        return f"<Scheduler on {self._store!r}, {len(self._specs)} jobs, {state}>"


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", None)
    if not isinstance(name, str) or name == "<lambda>":
        raise ConfigurationError(f"{func!r:.100} has no name of its own: give the job one, name='...'")
    return name


def _handler(func: Callable[..., Any]) -> Handler:
    """Checks a job's function, and finds out whether it takes a context."""
    if not callable(func):
        raise ConfigurationError(f"a job must be a function or another callable; this is {func!r:.100}")
    inner: Any = func
    while isinstance(inner, functools.partial):
        inner = inner.func
    for candidate in (inner, getattr(inner, "__call__", None)):  # noqa: B004
        if inspect.iscoroutinefunction(candidate) or inspect.isasyncgenfunction(candidate):
            raise ConfigurationError(
                f"{func!r:.100} is async, and leaselib runs plain functions: register one that calls asyncio.run()"
            )
        if inspect.isgeneratorfunction(candidate):
            raise ConfigurationError(
                f"{func!r:.100} is a generator function, whose body would never run: register a function that loops "
                f"over it"
            )
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # a builtin that doesn't tell
        return Handler(func, None)
    named = next((p for p in parameters if p.name in ("ctx", "context") and p.kind in _BY_NAME), None)
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    others = [p for p in needed if p is not named]
    if len(others) > (0 if named else 1) or any(p.kind is p.KEYWORD_ONLY for p in others):
        raise ConfigurationError(
            f"a job's function takes one argument, the context, or none; {func!r:.100} needs "
            f"{', '.join(p.name for p in needed)}. Bind the others with functools.partial"
        )
    if named is not None:
        return Handler(func, named.name)
    # An optional argument gets the context only if it is called so: others have a use of their own.
    return Handler(func, "first" if needed or any(p.kind is p.VAR_POSITIONAL for p in parameters) else None)


def _hint_about_reloader() -> None:
    if os.environ.get("WERKZEUG_RUN_MAIN") != "true" and os.environ.get("FLASK_DEBUG") == "1":
        _log.info("Flask's reloader runs this program twice: both processes are instances, which is harmless")
