"""Frozen values that the rules, the stores and the instances pass to one another. No I/O, no clock, no threads.

Two shapes of a run live here. `Record` is what stores keep and rules judge: whole milliseconds since the epoch and the
checkpoint as JSON text. `Run` is what users see: aware UTC datetimes, seconds, the checkpoint as a value.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

from leaselib.errors import StoreError

Status = Literal["running", "success", "failed", "interrupted"]
Overlap = Literal["skip", "allow"]
Reason = Literal["scheduled", "catch-up", "takeover", "hand-over", "manual"]
Outcome = Literal[
    "won", "running", "finished", "interrupted", "overlap", "superseded", "late", "early", "gone"
]

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MILLISECOND = timedelta(milliseconds=1)
ERROR_BYTES = 4096
"""Error texts are cut to this many bytes of UTF-8."""
LOG_ENTRIES = 20
"""So many ended attempts are remembered with a run; the oldest go first."""
_EPOCH = re.compile(r"[0-9]{1,15}-[^\s]{1,80}")


def to_ms(instant: datetime) -> int:
    """The whole milliseconds since 1970-01-01T00:00:00Z at or before an aware datetime."""
    return (instant - EPOCH) // MILLISECOND


def from_ms(ms: int) -> datetime:
    """The aware UTC datetime of so many milliseconds since the epoch."""
    return EPOCH + timedelta(milliseconds=ms)


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """An attempt of a run that is over: it was taken over (`expired`) or released (`handed-over`)."""

    number: int
    runner: str
    started_ms: int
    ended_ms: int
    outcome: Literal["expired", "handed-over"]


@dataclass(frozen=True, slots=True)
class Record:
    """A run as stores keep it. Times are milliseconds on the store's clock.

    `attempt`, `token`, `runner`, `fence`, `reason` and `started_ms` belong to the latest attempt; `past` lists those
    before it. `handovers` counts accepted releases. While `released` is set, `lease_end_ms` is the time of the release.
    """

    job: str
    slot_ms: int
    status: Status
    attempt: int
    handovers: int
    token: str
    runner: str
    fence: int
    lease_ms: int
    lease_end_ms: int
    released: bool
    reason: Reason
    started_ms: int
    ended_ms: int | None = None
    error: str | None = None
    checkpoint: str | None = None
    past: tuple[PastAttempt, ...] = ()

    def live(self, now_ms: int) -> bool:
        """Whether the runner is known to be alive: running, not released, and the lease end is still to come."""
        return self.status == "running" and not self.released and self.lease_end_ms > now_ms

    def to_run(self) -> Run:
        """This record as users see it."""
        current = Attempt(
            self.attempt,
            self.runner,
            from_ms(self.started_ms),
            None if self.ended_ms is None else from_ms(self.ended_ms),
            None if self.status == "running" else self.status,
        )
        past = tuple(
            Attempt(a.number, a.runner, from_ms(a.started_ms), from_ms(a.ended_ms), a.outcome) for a in self.past
        )
        return Run(
            job=self.job,
            slot=from_ms(self.slot_ms),
            status=self.status,
            attempt=self.attempt,
            handovers=self.handovers,
            token=self.token,
            runner=self.runner,
            fence=self.fence,
            lease=self.lease_ms / 1000,
            lease_end=from_ms(self.lease_end_ms),
            released=self.released,
            reason=self.reason,
            started_at=from_ms(self.started_ms),
            ended_at=None if self.ended_ms is None else from_ms(self.ended_ms),
            error=self.error,
            checkpoint=None if self.checkpoint is None else json.loads(self.checkpoint),
            attempts=(*past, current),
        )


@dataclass(frozen=True, slots=True)
class Attempt:
    """One execution of a run. Instants are aware UTC datetimes on the store's clock.

    `outcome` is None while it runs, then `success`, `failed`, `interrupted`, `expired` (the lease ran out and another
    attempt began) or `handed-over`. For `expired`, `ended_at` is the lease's end.
    """

    number: int
    runner: str
    started_at: datetime
    ended_at: datetime | None
    outcome: str | None


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a job, as the store recorded it. Instants are aware UTC datetimes on the store's clock.

    `attempt`, `token`, `runner`, `fence`, `reason` and `started_at` are the latest attempt's. `lease` is in seconds.
    `attempts` lists the latest 20 or so ended attempts and the current one, oldest first.
    An `interrupted` run says in `error` why: `max_attempts` or `superseded`.
    """

    job: str
    slot: datetime
    status: Status
    attempt: int
    handovers: int
    token: str
    runner: str
    fence: int
    lease: float
    lease_end: datetime
    released: bool
    reason: Reason
    started_at: datetime
    ended_at: datetime | None
    error: str | None
    checkpoint: Any
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class JobMeta:
    """What a store remembers of a job beside its runs.

    fence: the last fence handed out. floor_ms: the highest slot ever trimmed or purged. ended: how many ended runs
    are kept.
    """

    fence: int = 0
    floor_ms: int | None = None
    ended: int = 0


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """What an instance asks of the store. `takeover_of` names the attempt that a backup saw; None is a new run.

    max_late_ms: the allowed lateness of this claim (max_late, or catch_up). keep_ms: the largest lateness that any
    claim of this job may have; younger runs are not trimmed.
    """

    job: str
    slot_ms: int
    token: str
    runner: str
    lease_ms: int
    max_attempts: int
    overlap: Overlap
    max_late_ms: int
    keep_ms: int
    history_size: int
    reason: Reason
    takeover_of: int | None


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """The store's answer to a claim.

    Attributes:
        outcome: see the table of outcomes in the README.
        token: the token of the claim that this answers.
        now_ms: the store's clock when it decided.
        epoch: the store's identity; another one means that the store was replaced or emptied.
        replicated: whether as many replicas as are asked for (by most stores: none) had in time what was written.
        job_epoch: the identity of this job's records alone, where they can be lost while the rest of the store is well
            (in a cluster each node can lose its data by itself); else None.
        record: the run that was claimed; for `overlap` the run in the way; None if there is none.
        wait_ms: for `early`: how long until the slot.
        interrupted: slots of older, dead runs of the job that this claim marked `interrupted`.
    """

    outcome: Outcome
    token: str
    now_ms: int
    epoch: str
    record: Record | None = None
    wait_ms: int = 0
    interrupted: tuple[int, ...] = ()
    replicated: bool = field(default=True, compare=False)
    job_epoch: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_epoch(self.epoch)
        if self.job_epoch is not None:
            check_epoch(self.job_epoch)

    @property
    def run(self) -> Run | None:
        """The run that was claimed; for `overlap` the run in the way; None if there is none."""
        return None if self.record is None else self.record.to_run()

    @property
    def now(self) -> datetime:
        """The store's clock when it decided."""
        return from_ms(self.now_ms)

    @property
    def wait(self) -> float:
        """For `early`: seconds until the slot."""
        return self.wait_ms / 1000


@dataclass(frozen=True, slots=True)
class Pong:
    """A store's sign of life: its clock, as an aware UTC datetime, and its epoch (see `epoch_ms`)."""

    now: datetime
    epoch: str

    def __post_init__(self) -> None:
        check_epoch(self.epoch)


def check_epoch(epoch: str) -> str:
    """A store's epoch itself, if it is one. What a store keeps isn't trusted, and each answer comes by here.

    Raises:
        StoreError: it isn't.
    """
    if _EPOCH.fullmatch(epoch) is None:
        raise StoreError(
            f"the store's epoch can't be one: {epoch!r:.40}. It is milliseconds, a dash and random hex digits; see who "
            f"wrote it, and remove it"
        )
    return epoch


def epoch_ms(epoch: str) -> int:
    """When a store's epoch began, in milliseconds on its clock. An epoch is `<milliseconds>-<random hex>`."""
    return int(epoch.partition("-")[0])


def cut_error(error: str) -> str:
    """An error text as stores keep it: no NUL, no lone surrogate, at most ERROR_BYTES bytes of UTF-8."""
    raw = error[:ERROR_BYTES].replace("\0", "\\x00").encode("utf-8", "backslashreplace")
    return raw[:ERROR_BYTES].decode("utf-8", "ignore")
