"""Event, and the dispatcher that hands events to listeners and to logging.

A Dispatcher owns a bounded queue and one thread, which alone calls listeners and writes the log records, so that a slow
or raising one delays no heartbeat, claim or signal. `emit` may be called from any thread; the queue guards itself.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Literal, get_args

from leaselib import _threads
from leaselib.errors import ConfigurationError

EventName = Literal[
    "start", "success", "failed", "lost", "interrupted", "skip", "store_error", "store_ok", "stopped"
]
EVENT_NAMES: tuple[str, ...] = get_args(EventName)
QUEUE_SIZE = 10_000

_log = logging.getLogger("leaselib.scheduler")
_store_log = logging.getLogger("leaselib.store")
_LEVELS = {
    "start": logging.DEBUG,
    "success": logging.INFO,
    "failed": logging.ERROR,
    "lost": logging.WARNING,
    "interrupted": logging.WARNING,
    "skip": logging.INFO,
    "store_error": logging.WARNING,
    "store_ok": logging.INFO,
    "stopped": logging.INFO,
}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a run or to an instance.

    Attributes:
        name: `start`, `success`, `failed`, `lost`, `interrupted`, `skip`, `store_error`, `store_ok` or `stopped`.
        job: the job's name, or None if the event isn't about a job.
        slot: when the run was due; an aware UTC datetime.
        attempt: the attempt's number.
        token: the attempt's token. Who can write to the store can end the run with it.
        runner: the instance that reports the event.
        at: when, on the store's clock (this machine's, as long as the store wasn't heard); an aware UTC datetime.
        reason: for `start` the run's; for `skip` one of overlap, late, missed, busy, superseded; for `lost` refused or
            unreachable; for `interrupted` max_attempts, superseded, stopping or unreachable; for `store_error` what
            kind of trouble.
        error: the handler's or the store's error, as text; with `success` what was raised after a committed ctx.finish.
        duration: seconds that the handler ran.
        handed_over: for `interrupted`: the run was released, so that a backup starts it again at once.
        count: for `skip`: how many slots; counted up to 1000.
    """

    name: str
    job: str | None
    slot: datetime | None
    attempt: int | None
    token: str | None
    runner: str
    at: datetime
    reason: str | None = None
    error: str | None = None
    duration: float | None = None
    handed_over: bool = False
    count: int | None = None


Listener = Callable[[Event], object]
_FIELDS = [field.name for field in fields(Event) if field.name != "name"]


def check_event(name: object) -> None:
    """Raises ConfigurationError unless an event has that name."""
    if name not in EVENT_NAMES:
        raise ConfigurationError(f"there is no event {name!r:.100}; events are {', '.join(EVENT_NAMES)}")


class Listeners:
    """Who listens to what. Guarded by a lock of its own; read as a snapshot."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, tuple[Listener, ...]] = {}

    def add(self, name: str, listener: Listener) -> None:
        """Adds a listener.

        Raises:
            ConfigurationError: no event has that name, or the listener can't be called.
        """
        check_event(name)
        if inspect.iscoroutinefunction(listener):
            raise ConfigurationError(f"{listener!r:.80} is async, and nobody would await it; register a plain one")
        if not callable(listener):
            raise ConfigurationError(f"a listener must be callable with one Event; this is {listener!r:.100}")
        with self._lock:
            self._by_name[name] = (*self._by_name.get(name, ()), listener)

    def of(self, name: str) -> tuple[Listener, ...]:
        """The listeners of that event, in the order in which they were added."""
        return self._by_name.get(name, ())

    def after_fork(self) -> None:
        """In the child: the lock may have been held by a thread that isn't here."""
        self._lock = threading.Lock()


class Dispatcher:
    """One instance's way to its listeners. After `close`, events are handled in the thread in which they occur.

    A lock of its own guards the queue's ends and the counts; nothing is called while it is held. Events are told in the
    order in which `note` was called.
    """

    def __init__(self, listeners: Listeners) -> None:
        self._listeners = listeners
        self._guard = threading.Lock()
        self._noted: deque[tuple[Event, str | None]] = deque()
        self._queue: queue.Queue[tuple[Event, str | None] | None] = queue.Queue(QUEUE_SIZE)
        self._thread: threading.Thread | None = None
        self._open = False
        self.dropped = 0
        self._dropped_told = 0
        self.log_errors = 0

    def start(self, name: str) -> threading.Thread:
        """Starts the thread."""
        self._thread = _threads.spawn(name, self._work)
        self._open = True
        return self._thread

    def note(self, event: Event, trace: str | None = None) -> None:
        """Takes an event, to be handed on by the next `flush`. Takes no lock, so any may be held meanwhile."""
        self._noted.append((event, trace))

    def flush(self) -> None:
        """Hands on what was noted, never waiting: if listeners are too slow, the oldest is dropped and counted."""
        if not self._noted:  # most decisions bring no event; and what another thread has taken is on its way in order
            return
        left = []
        with self._guard:
            while self._noted:  # only ever taken from here
                item = self._noted.popleft()
                if self._open:
                    self._put(item)
                else:
                    left.append(item)
        for item in left:
            self._handle(*item)

    def _put(self, item: tuple[Event, str | None] | None) -> None:
        while True:
            try:
                self._queue.put_nowait(item)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):  # the thread has just made room
                    self._queue.get_nowait()
                    self.dropped += 1

    def close(self, timeout_ms: int) -> None:
        """Lets the thread work off the queue, for that time at most, and end. Called by a listener: doesn't wait."""
        with self._guard:
            was_open, self._open = self._open, False
            if was_open:
                self._put(None)
        if was_open and self._thread is not None:
            _threads.join([self._thread], timeout_ms)

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the one that calls listeners."""
        return self._thread is threading.current_thread()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            self._handle(*item)
            dropped = self.dropped
            if dropped > self._dropped_told:
                self._dropped_told = dropped
                self._log(_log.warning, "listeners are too slow: %d events were dropped so far", dropped)

    def _handle(self, event: Event, trace: str | None) -> None:
        for listener in self._listeners.of(event.name):
            try:
                listener(event)
            except BaseException:  # noqa: BLE001  a listener's SystemExit must not end the thread either
                self._log(_log.error, "listener %r of event %s raised", listener, event.name, exc_info=True)
        self._log(_record, event, trace)

    def _log(self, call: Callable[..., object], *args: object, **kwargs: object) -> None:
        """Logs; a filter or handler of the user's that raises must not end the thread, and is counted."""
        try:
            call(*args, **kwargs)
        except BaseException:  # noqa: BLE001
            self.log_errors += 1


def _record(event: Event, trace: str | None) -> None:
    log = _store_log if event.name.startswith("store_") else _log
    level = logging.INFO if event.handed_over else _LEVELS[event.name]
    if event.name == "success" and event.error is not None:
        level = logging.WARNING  # it raised after ctx.finish had been committed
    if log.isEnabledFor(level):
        extra = {"event": event.name, **{name: getattr(event, name) for name in _FIELDS}}
        about = "".join(
            f" {name}={extra[name]!s:.300}"
            for name in ("job", "slot", "attempt", "reason", "error", "count")
            if extra[name] is not None
        )
        args = (event.name, _one_line(about))
        record = log.makeRecord(log.name, level, __file__, 0, "%s%s", args, None, "emit", extra)
        record.exc_text = trace  # where a formatter looks for a traceback's text first
        log.handle(record)


def _one_line(text: str) -> str:
    """Control characters as escapes, so that a stored text can't forge log lines or move a terminal's cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
