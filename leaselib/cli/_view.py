"""What is stored, as the commands show it: a store's state collected, a run in words and as JSON.

Owns nothing; the main thread calls it. Whatever is shown here as text is escaped when it becomes a table or a line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from leaselib import _clock
from leaselib._model import Attempt, Run, epoch_ms, from_ms
from leaselib.cli._output import json_value
from leaselib.cli._place import Place
from leaselib.cli._text import Cell, duration_words, instant_words, iso
from leaselib.errors import StoreError

COUNTED = 100
"""A job's counts are those of so many of its newest runs."""
_STYLES = {"success": "green", "failed": "red", "interrupted": "yellow", "running": "cyan"}


@dataclass(frozen=True)
class JobState:
    """A job. `runs`: the newest, at most COUNTED; `error`: why it can't be read, if what is stored is malformed."""

    job: str
    runs: tuple[Run, ...] = ()
    unfinished: tuple[Run, ...] = ()
    error: str | None = None

    @property
    def last(self) -> Run | None:
        """The run with the newest slot."""
        return self.runs[0] if self.runs else None

    def counts(self) -> dict[str, int]:
        """How many of `runs` have each status."""
        found = Counter(run.status for run in self.runs)
        return {status: found[status] for status in ("success", "failed", "interrupted", "running")}


@dataclass(frozen=True)
class StoreState:
    """A store at one moment.

    Attributes:
        now: its clock then.
        offset: seconds that its clock is ahead of this machine's.
        offset_error: by how many seconds the offset may be wrong.
        epoch: its identity; another one means that it was emptied or replaced.
    """

    place: Place
    now: datetime
    offset: float
    offset_error: float
    epoch: str
    jobs: tuple[JobState, ...]

    @property
    def malformed(self) -> list[str]:
        """What is wrong with what jobs have stored."""
        return [job.error for job in self.jobs if job.error is not None]


# ---- reading --------------------------------------------------------------------------------------------------------


def look(place: Place) -> StoreState:
    """Reads everything.

    Raises:
        StoreError: the store could not be read. A malformed record is its own job's `error` only.
    """
    place.check()
    store, timeout = place.store, place.timeout
    pong = store.ping(timeout=timeout)
    offset_s = error_s = 0.0
    if not store.machine_clock:  # once more: now there is a connection, and it takes one round trip only
        before_ms = _clock.SYSTEM.wall_ms()
        pong = store.ping(timeout=timeout)
        after_ms = _clock.SYSTEM.wall_ms()
        offset_s = (pong.now - from_ms((before_ms + after_ms) // 2)) / timedelta(seconds=1)
        error_s = max(1, after_ms - before_ms) / 2000
    jobs = tuple(_look_at(place, job) for job in store.jobs(timeout=timeout))
    return StoreState(place, pong.now, offset_s, error_s, pong.epoch, jobs)


def _look_at(place: Place, job: str) -> JobState:
    try:
        runs = place.store.runs(job, COUNTED, timeout=place.timeout)
        return JobState(job, tuple(runs), tuple(place.store.unfinished([job], timeout=place.timeout)))
    except StoreError as error:
        if error.job is None:
            raise
        return JobState(job, error=place.said(error))


# ---- words ----------------------------------------------------------------------------------------------------------


def age(run: Run, now: datetime) -> float:
    """Seconds since the run ended, or since its latest attempt started."""
    return (now - (run.ended_at or run.started_at)) / timedelta(seconds=1)


def lease_state(run: Run, now: datetime) -> tuple[str, float] | None:
    """`live`, `expired` or `released`, and the seconds until the lease ends (below 0: since); None if the run ended."""
    if run.status != "running":
        return None
    left = (run.lease_end - now) / timedelta(seconds=1)
    return ("released" if run.released else "live" if left > 0 else "expired"), left


def state_cell(run: Run, now: datetime) -> Cell:
    """The status; of a run that hasn't ended, how its lease is."""
    found = lease_state(run, now)
    if found is None:
        return Cell(run.status, _STYLES[run.status])
    state, left = found
    if state == "live":
        return Cell(f"running, {duration_words(left)} left", _STYLES["running"])
    return Cell(f"{state} {duration_words(-left)} ago", "yellow")


def took_words(run: Run | Attempt) -> str:
    """How long the (latest) attempt took, or a dash."""
    return "-" if run.ended_at is None else duration_words((run.ended_at - run.started_at) / timedelta(seconds=1))


# ---- JSON -----------------------------------------------------------------------------------------------------------


def run_json(run: Run, now: datetime, *, tokens: bool) -> dict[str, Any]:
    """A run for programs; its token only if asked for: who has it can end the run."""
    lease = lease_state(run, now)
    value = {
        "job": run.job,
        "slot": iso(run.slot),
        "status": run.status,
        "attempt": run.attempt,
        "handovers": run.handovers,
        "runner": run.runner,
        "reason": run.reason,
        "fence": run.fence,
        "started_at": iso(run.started_at),
        "ended_at": None if run.ended_at is None else iso(run.ended_at),
        "age": round(age(run, now), 3),
        "lease": run.lease,
        "lease_end": iso(run.lease_end),
        "lease_state": None if lease is None else lease[0],
        "lease_left": None if lease is None else round(lease[1], 3),
        "released": run.released,
        "error": run.error,
        "checkpoint": json_value(run.checkpoint),
        "attempts": [_attempt_json(attempt) for attempt in run.attempts],
    }
    return {**value, "token": run.token} if tokens else value


def _attempt_json(attempt: Attempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "runner": attempt.runner,
        "started_at": iso(attempt.started_at),
        "ended_at": None if attempt.ended_at is None else iso(attempt.ended_at),
        "outcome": attempt.outcome,
    }


def state_json(state: StoreState, *, tokens: bool) -> dict[str, Any]:
    """A store's state for programs."""

    def runs_json(runs: Iterable[Run]) -> list[dict[str, Any]]:
        return [run_json(run, state.now, tokens=tokens) for run in runs]

    return {
        "store": state.place.shown,
        "namespace": state.place.store.namespace,
        "reachable": True,
        "now": iso(state.now),
        "clock_offset": round(state.offset, 4),
        "clock_offset_error": round(state.offset_error, 4),
        "epoch": state.epoch,
        "malformed": len(state.malformed),
        "jobs": [
            {
                "job": job.job,
                "error": job.error,
                "last": next(iter(runs_json(job.runs[:1])), None),
                "unfinished": runs_json(job.unfinished),
                "counted": len(job.runs),
                "counts": job.counts(),
            }
            for job in state.jobs
        ],
    }


def epoch_words(epoch: str, now: datetime) -> str:
    """Since when the store is the one that it is."""
    try:
        return f"since {instant_words(from_ms(epoch_ms(epoch)), now)}"
    except (ValueError, OverflowError):
        return epoch[:80]
