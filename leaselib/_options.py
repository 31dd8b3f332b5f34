"""Options: durations, defaults, and the relations between options. Owns nothing; any thread may call it.

Every check says what to write instead. Durations come in as seconds (int, float) or timedelta and go on as whole
milliseconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypedDict

from leaselib._model import Overlap
from leaselib.errors import ConfigurationError

Duration = int | float | timedelta
Around = Callable[[], AbstractContextManager[Any]]
OnStoreLoss = Literal["abort", "continue"]

LONGEST_MS = 100 * 365 * 86_400_000
"""No duration may be longer than about a hundred years."""
_MISSING = object()


class JobOptionsDict(TypedDict, total=False):
    """The options that a scheduler has defaults for and that every job can override; durations in seconds."""

    lease: Duration
    heartbeat: Duration
    max_attempts: int
    overlap: Overlap
    jitter: Duration
    catch_up: Duration
    max_late: Duration
    history_size: int
    max_runtime: Duration | None
    on_store_loss: OnStoreLoss
    around: Around | None


@dataclass(frozen=True, slots=True)
class JobOptions:
    """A job's options, checked; durations in whole milliseconds. `jitter_ms` of None is the default: see `jitter`."""

    lease_ms: int
    heartbeat_ms: int
    max_attempts: int
    overlap: Overlap
    jitter_ms: int | None
    catch_up_ms: int
    max_late_ms: int
    history_size: int
    max_runtime_ms: int | None
    on_store_loss: OnStoreLoss
    around: Around | None

    @property
    def margin_ms(self) -> int:
        """How long before its lease can end a runner stops trusting it: min(heartbeat, lease / 4)."""
        return min(self.heartbeat_ms, self.lease_ms // 4)

    @property
    def keep_ms(self) -> int:
        """The largest lateness that any claim of the job may have."""
        return max(self.max_late_ms, self.catch_up_ms)

    def jitter(self, gap_ms: int) -> int:
        """The longest random delay before a claim: never over a tenth of the gap between two slots, unless set.

        A jitter that was set by hand is kept as it is, but for never reaching into the next slot.
        """
        if self.jitter_ms is None:
            return min(1000, gap_ms // 10)
        return min(self.jitter_ms, gap_ms)

    @property
    def call_timeout_ms(self) -> int:
        """How long one claim, finish or release may take: a third of the lease, so that several fit into it."""
        return max(50, min(10_000, self.lease_ms // 3))

    @property
    def beat_timeout_ms(self) -> int:
        """How long one heartbeat may take: no longer than the time to the next, so that a stalled one costs one."""
        return max(50, min(self.heartbeat_ms, self.lease_ms // 6))


def duration_ms(what: str, value: object, *, least_ms: int, most_ms: int = LONGEST_MS) -> int:
    """A duration as whole milliseconds, at least `least_ms`.

    Raises:
        ConfigurationError: not a number of seconds or a timedelta, or out of range.
    """
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value) if abs(value) < 1e300 else math.inf
    else:
        raise ConfigurationError(
            f"{what} must be a number of seconds or a timedelta, such as {what}=30 or {what}=timedelta(minutes=1); "
            f"this is {_shown(value)}"
        )
    ms = round(seconds * 1000) if math.isfinite(seconds) and abs(seconds) < 1e12 else None
    if ms is None or not least_ms <= ms <= most_ms:
        raise ConfigurationError(
            f"{what} must be from {least_ms / 1000:g} to {most_ms / 1000:g} seconds; this is {_shown(value)}"
        )
    return ms


def _shown(value: object) -> str:
    """A value in a message; some ints are too long to be shown."""
    try:
        return f"{value!r:.100}"
    except ValueError:
        return f"an int of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__


def whole(what: str, value: object, *, least: int, most: int = 10**9) -> int:
    """An int from `least` to `most`.

    Raises:
        ConfigurationError: it isn't one.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        bounds = f"of at most {most}" if isinstance(value, int) and value > most else f"of at least {least}"
        raise ConfigurationError(f"{what} must be a whole number {bounds}; this is {_shown(value)}")
    return value


def choice(what: str, value: object, allowed: tuple[str, ...]) -> Any:
    """One of the allowed words.

    Raises:
        ConfigurationError: another one.
    """
    if value not in allowed:
        raise ConfigurationError(f"{what} must be {' or '.join(map(repr, allowed))}; this is {value!r:.100}")
    return value


def default_workers() -> int:
    """min(32, cpus + 4): handlers that run at once unless `max_workers` says otherwise."""
    return min(32, (os.cpu_count() or 1) + 4)


def job_options(given: Mapping[str, Any]) -> JobOptions:
    """Checks a job's options, the scheduler's defaults merged in.

    Raises:
        ConfigurationError: an option is unknown, of the wrong kind or out of range, or two don't go together.
    """
    known = set(JobOptionsDict.__annotations__)
    for name in given:
        if name not in known:
            raise ConfigurationError(f"unknown option {name!r}; a job knows {', '.join(sorted(known))}")
    lease_ms = duration_ms("lease", given.get("lease", 30), least_ms=10)
    if "heartbeat" in given:
        heartbeat_ms = duration_ms("heartbeat", given["heartbeat"], least_ms=1)
    else:
        heartbeat_ms = max(1, min(5000, lease_ms // 6))
    if heartbeat_ms * 2 >= lease_ms:
        raise ConfigurationError(
            f"heartbeat must be under half of lease, so that a missed one doesn't end it: heartbeat is "
            f"{heartbeat_ms / 1000:g} s and lease {lease_ms / 1000:g} s; write heartbeat={lease_ms / 6000:g}, or leave "
            f"it out"
        )
    around = given.get("around")
    if around is not None and not callable(around):
        raise ConfigurationError(
            f"around must be a callable that returns a context manager, such as around=app.app_context (without "
            f"calling it); this is {around!r:.100}"
        )
    jitter, max_runtime = given.get("jitter", _MISSING), given.get("max_runtime")
    return JobOptions(
        lease_ms=lease_ms,
        heartbeat_ms=heartbeat_ms,
        max_attempts=whole("max_attempts", given.get("max_attempts", 3), least=1),
        overlap=choice("overlap", given.get("overlap", "skip"), ("skip", "allow")),
        jitter_ms=None if jitter is _MISSING else duration_ms("jitter", jitter, least_ms=0),
        catch_up_ms=duration_ms("catch_up", given.get("catch_up", 300), least_ms=0),
        max_late_ms=duration_ms("max_late", given.get("max_late", 60), least_ms=0),
        history_size=whole("history_size", given.get("history_size", 100), least=0),
        max_runtime_ms=None if max_runtime is None else duration_ms("max_runtime", max_runtime, least_ms=1),
        on_store_loss=choice("on_store_loss", given.get("on_store_loss", "abort"), ("abort", "continue")),
        around=around,
    )
