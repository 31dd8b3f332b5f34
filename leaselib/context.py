"""RunContext: what a handler gets. Owned by one attempt; the handler's thread uses it, and any that it hands it to.

The own deadline is compared here, in the caller's thread, at each look at the signal: a passed `check()` is never later
than another attempt's start, also if every other thread of the process is stuck.
"""

from __future__ import annotations

import json
import threading
from datetime import datetime
from typing import TYPE_CHECKING, Any

from leaselib._model import from_ms
from leaselib.errors import Aborted, ConfigurationError
from leaselib.stores._base import check_checkpoint_size

if TYPE_CHECKING:
    from leaselib._execution import Execution

_WORDS = {
    "stopping": "its scheduler is stopping",
    "refused": "another attempt holds the run now",
    "unreachable": "the store could not be reached before the lease could have run out",
    "timeout": "it ran longer than max_runtime",
}


class Signal(threading.Event):
    """Set when the handler should stop. Each look at it also compares the attempt's own deadline."""

    def __init__(self, execution: Execution) -> None:
        super().__init__()
        self._execution = execution

    def is_set(self) -> bool:
        """Whether the handler should stop."""
        if super().is_set():
            return True
        if self._execution.should_stop():
            super().set()
            return True
        return False

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the handler should stop, or for `timeout` seconds; returns whether it should."""
        execution = self._execution
        end_ms: float | None = None if timeout is None else execution.boot_ms() + max(0.0, timeout) * 1000
        while not self.is_set():
            now_ms = execution.boot_ms()
            if end_ms is not None and now_ms >= end_ms:
                return False
            until_ms: float = max(now_ms + 1, execution.deadline_boot_ms())
            if execution.past_deadline():
                until_ms = now_ms + 60_000
            if end_ms is not None:
                until_ms = min(until_ms, end_ms)
            super().wait((until_ms - now_ms) / 1000)
        return True


class RunContext:
    """One attempt of a run, for its handler.

    Attributes:
        job: the job's name.
        slot: when the run was due: an aware UTC datetime, the same on every instance.
        local_slot: the same instant in the job's time zone.
        attempt: which try this is, from 1.
        token: this attempt's random token.
        runner: the instance that runs it.
        reason: `scheduled`, `catch-up`, `takeover`, `hand-over` or `manual`.
        signal: a `threading.Event`, set when the handler should stop.
        fence: an int that is greater for every attempt of this job that started later: hand it to the resource that
            you write to, which refuses smaller ones.
        resume: what the previous attempts of this run checkpointed last, or None.
    """

    def __init__(self, execution: Execution) -> None:
        record, spec = execution.attempt.record, execution.attempt.spec
        self._execution = execution
        self.job = record.job
        self.slot: datetime = from_ms(record.slot_ms)
        self.local_slot: datetime = self.slot.astimezone(spec.schedule.tz)
        self.attempt = record.attempt
        self.token = record.token
        self.runner = record.runner
        self.reason = record.reason
        self.fence = record.fence
        self.signal: threading.Event = execution.signal
        self.resume: Any = None if record.checkpoint is None else json.loads(record.checkpoint)

    @property
    def abort_reason(self) -> str | None:
        """Why the signal is set: `stopping`, `refused`, `unreachable` or `timeout`; None while it isn't."""
        self.signal.is_set()
        return self._execution.attempt.abort_reason

    def check(self) -> None:
        """Call it before each side effect.

        Raises:
            Aborted: the handler should stop: it lost the run, may have lost it, or its scheduler is stopping.
        """
        if self.signal.is_set():
            raise self._aborted()

    def sleep(self, seconds: float) -> None:
        """Sleeps for that many seconds.

        Raises:
            Aborted: as soon as the handler should stop.
        """
        if self.signal.wait(seconds):
            raise self._aborted()

    def checkpoint(self, value: Any, flush: bool = False) -> None:
        """Remembers a JSON value with the run: if this attempt dies, the next finds it in `resume`.

        Sent with the next heartbeat or the release; with `flush=True` at once, and stored when this returns.

        Args:
            value: anything that `json.dumps` takes, 64 KiB of JSON and 500 levels at most.
            flush: store it now.

        Raises:
            ConfigurationError: not a JSON value, too large, or nested too deep.
            Aborted: with `flush`: the run is lost.
            StoreError: with `flush`: it could not be stored yet. It is kept, and goes with the next heartbeat.
        """
        try:
            text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"a checkpoint must be a JSON value: {error}") from error
        check_checkpoint_size(text)
        if self._execution.forked:
            raise self._aborted()
        self._execution.checkpoint(text, flush=flush)
        if flush:
            self.check()

    def confirm(self, connection: Any) -> None:
        """Makes sure, inside your own open transaction, that this attempt holds the run until that transaction ends.

        For handlers whose effects go to the store's own database: PostgreSQL (a psycopg connection, or SQLAlchemy's on
        psycopg) or the same SQLite file (a sqlite3 connection, or SQLAlchemy's). Call it before the effect, or right
        before the commit: no other attempt can start before the transaction has ended.

        Call it outside savepoints: one inside a savepoint that is rolled back protects nothing. In a PostgreSQL
        transaction at REPEATABLE READ or SERIALIZABLE it has to be the first statement, and can't be followed by
        `finish`, which has to be the first one too; see there.

        Raises:
            Aborted: another attempt holds the run, or the handler should stop; roll back.
            ConfigurationError: no such connection, no transaction is open in it, or it goes to another database.
            StoreError: leaselib's schema can't be used over this connection: it isn't there, or the role lacks the
                grants; roll back.
            psycopg.Error, sqlite3.Error: whatever else the driver reports, such as psycopg's SerializationFailure (at
                those levels, if the run's record has changed since the transaction's first statement) or SQLite's
                `database is locked`; the transaction can only be rolled back. A new one tells whether the run is held.
        """
        self.check()
        if not self._execution.confirm(connection):
            raise self._aborted()

    def finish(self, connection: Any) -> None:
        """Records the run's success inside your own open transaction: effect and record commit together or not at all.

        Connections as for `confirm`. Call it last, commit, and return: no heartbeat is sent from here on. Outside
        savepoints: one that is rolled back takes the record with it.

        A PostgreSQL transaction at REPEATABLE READ or SERIALIZABLE is the exception: call it *first*, as the very first
        statement, then do the effect, then commit, all within the lease. Called later, it raises SerializationFailure
        if a heartbeat was stored since the transaction's first statement. Nothing is lost then: roll back, and do it
        again in a new transaction. READ COMMITTED, the default, needs none of this.

        Raises:
            Aborted: another attempt holds the run, or the handler should stop; roll back.
            ConfigurationError: no such connection, no transaction is open in it, or it goes to another database.
            StoreError: leaselib's schema can't be used over this connection: it isn't there, or the role lacks the
                grants; roll back.
            psycopg.Error, sqlite3.Error: as for `confirm`; nothing was recorded.
        """
        self.check()
        if not self._execution.finish_inside(connection):
            raise self._aborted()

    def _aborted(self) -> Aborted:
        attempt = self._execution.attempt
        if attempt.abort_reason is None and attempt.phase == "over":
            return Aborted(f"job {self.job!r}, attempt {self.attempt} is over: its context is of no use now", "refused")
        reason = attempt.abort_reason or "refused"
        return Aborted(f"job {self.job!r}, attempt {self.attempt} should stop: {_WORDS[reason]}", reason)

    def __repr__(self) -> str:
        return f"<RunContext {self.job!r} {self.slot.isoformat()} attempt {self.attempt}>"
