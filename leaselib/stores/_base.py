"""Store: the contract that every store keeps, and the checks on what callers hand in.

Owns nothing but the namespace. Every method may be called from any thread, at any time, also after `close()` (which
only lets connections go: the next call opens new ones) and in the child of a fork (where nothing of the parent's is
used or closed).
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal, get_args

from leaselib import _life
from leaselib._model import ClaimAnswer, ClaimRequest, Overlap, Pong, Reason, Record, Run, to_ms
from leaselib._names import check_name
from leaselib._options import choice, duration_ms, whole
from leaselib.errors import ConfigurationError, StoreError

CHECKPOINT_BYTES = 64 * 1024
"""A checkpoint's JSON text has at most so many bytes of UTF-8."""
CHECKPOINT_LEVELS = 500
"""A checkpoint's lists and objects are nested at most so deep: deeper ones not every reader of JSON takes."""
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{\]}]')
DEFAULT_TIMEOUT_S = 10.0
"""How long an operation may take if the caller doesn't say."""


class GivenBackError(StoreError):
    """A claim was won, but too few replicas had it in time, so it was given back.

    Attributes:
        interrupted: slots of older, dead runs of the job that the claim marked `interrupted`, which stays so.
    """

    def __init__(self, message: str, job: str | None, interrupted: tuple[int, ...]) -> None:
        super().__init__(message, transient=True, job=job, unreplicated=True)
        self.interrupted = interrupted


class Store(abc.ABC):
    """Where leases live. Each operation is one atomic step, judged on the store's own clock.

    Every operation takes `timeout`: the seconds after which it gives up with a transient StoreError, its outcome then
    unknown. An operation that is sent again with the same token is safe: it answers as if it had been sent once.

    Attributes:
        namespace: two stores in one place with different namespaces don't see each other.
        machine_clock: True if the store's clock is this machine's time of day.
    """

    machine_clock = False

    def __init__(self, namespace: str = "default") -> None:
        self.namespace = check_name("namespace", namespace)
        _life.track(self)

    # ---- what a store implements; times in whole milliseconds, arguments checked ---------------------------------

    @abc.abstractmethod
    def _claim(self, request: ClaimRequest, timeout: float) -> ClaimAnswer: ...

    @abc.abstractmethod
    def _heartbeat(
        self, job: str, slot_ms: int, token: str, lease_ms: int, checkpoint: str | None, timeout: float
    ) -> bool: ...

    @abc.abstractmethod
    def _finish(
        self,
        job: str,
        slot_ms: int,
        token: str,
        status: Literal["success", "failed"],
        error: str | None,
        timeout: float,
    ) -> bool: ...

    @abc.abstractmethod
    def _release(self, job: str, slot_ms: int, token: str, checkpoint: str | None, timeout: float) -> bool: ...

    @abc.abstractmethod
    def _unfinished(self, jobs: list[str], timeout: float) -> list[Record]: ...

    @abc.abstractmethod
    def _get(self, job: str, slot_ms: int, timeout: float) -> Record | None: ...

    @abc.abstractmethod
    def _runs(self, job: str, limit: int, timeout: float) -> list[Record]: ...

    @abc.abstractmethod
    def _purge(self, job: str, force: bool, timeout: float) -> int: ...

    @abc.abstractmethod
    def jobs(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> list[str]:
        """The names of all jobs that ever started a run here and weren't forgotten, sorted.

        Raises:
            StoreError: the store could not answer.
        """

    @abc.abstractmethod
    def ping(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> Pong:
        """The store's clock and epoch, in one round trip where all is well.

        Raises:
            StoreError: the store could not answer; or `unreplicated`, after fewer replicas than `wait_replicas` had a
                claim or a finish in time: until enough of them keep up again.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Lets connections go. Idempotent; a later call of any operation opens new ones."""

    @abc.abstractmethod
    def _after_fork(self) -> None:
        """Called in the child of a fork: forgets, and never closes, what the parent had open; makes new locks."""

    # ---- what callers see ----------------------------------------------------------------------------------------

    def claim(
        self,
        job: str,
        slot: datetime,
        token: str,
        runner: str,
        *,
        lease: float = 30.0,
        max_attempts: int = 3,
        overlap: Overlap = "skip",
        max_late: float = 60.0,
        keep: float | None = None,
        history_size: int = 100,
        reason: Reason = "scheduled",
        takeover_of: int | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> ClaimAnswer:
        """Asks for a run, or for its next attempt. Rules 1, 3, 5 and 6.

        Args:
            job: the job's name.
            slot: when the run is due; an aware datetime.
            token: random and fresh for each attempt; the same when a claim is sent again.
            runner: who would run it.
            lease: seconds from the store's now until the lease ends.
            max_attempts: starts allowed when runners die.
            overlap: `skip` refuses while another run of the job has a live lease; `allow` doesn't look.
            max_late: seconds; a new run is refused when the store's now - slot is over this + 10 s.
            keep: seconds; the largest lateness that any claim of this job may have (default: max_late).
            history_size: ended runs to keep.
            reason: recorded with a new run; a later attempt is a `takeover` or a `hand-over`.
            takeover_of: the attempt that a backup saw; None asks for a new run.
            timeout: seconds.

        Returns:
            The outcome, the run and the store's now.

        Raises:
            StoreError: the outcome is unknown if it is transient; send the same claim again.
        """
        max_late_ms = duration_ms("max_late", max_late, least_ms=0)
        request = ClaimRequest(
            job=check_name("job", job),
            slot_ms=_slot_ms(slot),
            token=check_name("token", token),
            runner=check_name("runner", runner),
            lease_ms=duration_ms("lease", lease, least_ms=1),
            max_attempts=whole("max_attempts", max_attempts, least=1),
            overlap=choice("overlap", overlap, ("skip", "allow")),
            max_late_ms=max_late_ms,
            keep_ms=max_late_ms if keep is None else max(max_late_ms, duration_ms("keep", keep, least_ms=0)),
            history_size=whole("history_size", history_size, least=0),
            reason=choice("reason", reason, get_args(Reason)),
            takeover_of=None if takeover_of is None else whole("takeover_of", takeover_of, least=0),
        )
        return self._claim(request, timeout)

    def heartbeat(
        self,
        job: str,
        slot: datetime,
        token: str,
        lease: float,
        checkpoint: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bool:
        """Rule 2: moves the lease end to now + lease seconds, if the token is current and the run wasn't released.

        A lease that ran out but that nobody took over is renewed. `checkpoint` is JSON text, or None to leave what is
        stored.

        Raises:
            StoreError: the outcome is unknown if it is transient.
        """
        return self._heartbeat(
            job, _slot_ms(slot), token, duration_ms("lease", lease, least_ms=1), _checkpoint(checkpoint), timeout
        )

    def finish(
        self,
        job: str,
        slot: datetime,
        token: str,
        status: Literal["success", "failed"],
        error: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bool:
        """Rule 4: ends the run, if the token is current and the run is neither over nor released.

        The same finish sent again is true again. `error` is cut at 4 KiB.

        Raises:
            StoreError: the outcome is unknown if it is transient.
        """
        if status not in ("success", "failed"):
            raise ConfigurationError(f"status must be 'success' or 'failed', not {status!r:.100}")
        return self._finish(job, _slot_ms(slot), token, status, error, timeout)

    def release(
        self,
        job: str,
        slot: datetime,
        token: str,
        checkpoint: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bool:
        """Rule 4: ends the lease now, as a hand-over, which doesn't count as an attempt. Sent again: true again.

        Raises:
            StoreError: the outcome is unknown if it is transient.
        """
        return self._release(job, _slot_ms(slot), token, _checkpoint(checkpoint), timeout)

    def unfinished(self, jobs: Iterable[str], *, timeout: float = DEFAULT_TIMEOUT_S) -> list[Run]:
        """The runs of these jobs that are `running`, whether their leases are live or not; oldest slot first.

        Raises:
            StoreError: the store could not answer.
        """
        return [record.to_run() for record in self._unfinished(list(dict.fromkeys(jobs)), timeout)]

    def get(self, job: str, slot: datetime, *, timeout: float = DEFAULT_TIMEOUT_S) -> Run | None:
        """The run of that job and slot, or None.

        Raises:
            StoreError: the store could not answer.
        """
        record = self._get(job, _slot_ms(slot), timeout)
        return None if record is None else record.to_run()

    def runs(self, job: str, limit: int = 100, *, timeout: float = DEFAULT_TIMEOUT_S) -> list[Run]:
        """The job's runs, newest slot first, `limit` of them at most.

        Raises:
            StoreError: the store could not answer.
        """
        return [record.to_run() for record in self._runs(job, limit, timeout)]

    def purge(self, job: str, *, force: bool = False, timeout: float = DEFAULT_TIMEOUT_S) -> int:
        """Removes the job's ended runs; with `force` the running ones too. Returns how many.

        The highest purged slot is remembered, so that no late claim starts a purged run again.

        Raises:
            StoreError: the store could not do it.
        """
        return self._purge(check_name("job", job), force, timeout)

    def confirm(self, connection: Any, job: str, slot: datetime, token: str) -> bool:
        """Whether the attempt still holds the run; if so, it keeps it until the caller's open transaction ends.

        Args:
            connection: the caller's connection to the store's own database, with a transaction open.
            job: the job's name.
            slot: the run's slot.
            token: the attempt's token.

        Raises:
            ConfigurationError: not such a connection, or a store that can't take part in its transaction.
        """
        return self._confirm(connection, check_name("job", job), _slot_ms(slot), token)

    def finish_inside(self, connection: Any, job: str, slot: datetime, token: str) -> bool:
        """Rule 4 in the caller's open transaction: records the run's success, which counts once that has committed.

        Arguments and errors as for `confirm`.
        """
        return self._finish_inside(connection, check_name("job", job), _slot_ms(slot), token)

    def _confirm(self, connection: Any, job: str, slot_ms: int, token: str) -> bool:  # noqa: ARG002
        raise self._no_transaction_of_yours()

    def _finish_inside(self, connection: Any, job: str, slot_ms: int, token: str) -> bool:  # noqa: ARG002
        raise self._no_transaction_of_yours()

    def _no_transaction_of_yours(self) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self).__name__} can't take part in a transaction of yours: ctx.confirm and ctx.finish need a "
            f"PostgresStore and a connection to its database, or a SQLiteStore and one to its file. With other stores "
            f"hand ctx.fence to what you write to"
        )

    def now(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> datetime:
        """The store's clock, as an aware UTC datetime.

        Raises:
            StoreError: as `ping`.
        """
        return self.ping(timeout=timeout).now


def _slot_ms(slot: datetime) -> int:
    if not isinstance(slot, datetime) or slot.tzinfo is None:
        raise ConfigurationError(
            f"a slot must be an aware datetime, such as datetime(2026, 1, 1, tzinfo=timezone.utc); this is {slot!r:.80}"
        )
    if slot.microsecond % 1000:
        raise ConfigurationError(f"a slot must be a whole number of milliseconds, not {slot!r:.100}")
    return to_ms(slot)


def _checkpoint(checkpoint: str | None) -> str | None:
    if checkpoint is None:
        return None
    try:
        checkpoint.encode()
        json.loads(checkpoint, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        raise ConfigurationError(f"a checkpoint must be JSON text: {error}") from error
    check_checkpoint_size(checkpoint)
    return checkpoint


def check_checkpoint_size(checkpoint: str) -> None:
    """Makes sure that every store takes this JSON text.

    Raises:
        ConfigurationError: it is too large, or nested too deep.
    """
    if (size := len(checkpoint.encode())) > CHECKPOINT_BYTES:
        raise ConfigurationError(
            f"a checkpoint may have {CHECKPOINT_BYTES} bytes of JSON; this one has {size}. Keep the data elsewhere and "
            f"checkpoint where it is"
        )
    if (levels := _levels(checkpoint)) > CHECKPOINT_LEVELS:
        raise ConfigurationError(
            f"a checkpoint's lists and objects may be nested {CHECKPOINT_LEVELS} levels deep; these are {levels}. "
            f"Write them flatter, or as a text"
        )


def _levels(text: str) -> int:
    """How deep the lists and objects of that JSON text are nested."""
    level = deepest = 0
    for bracket in _BRACKETS.findall(text):
        level += {"[": 1, "{": 1, "]": -1, "}": -1}.get(bracket, 0)
        deepest = max(deepest, level)
    return deepest


def _no_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")
