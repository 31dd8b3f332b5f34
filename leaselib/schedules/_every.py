"""Intervals: slots at whole multiples of a number of milliseconds since the epoch.

Owns no state; immutable, so any thread may use an `Every` without a lock.
"""

from __future__ import annotations

import math
from datetime import timedelta, timezone
from fractions import Fraction
from typing import TYPE_CHECKING

from leaselib.errors import ConfigurationError
from leaselib.schedules._base import END_MS, MIN_MS, Schedule, shown

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

_MS = timedelta(milliseconds=1)
_MAX_MS = timedelta.max // _MS
_UNITS_MS = {"seconds": 1_000, "minutes": 60_000, "hours": 3_600_000, "days": 86_400_000}
# 0.1 + 0.2 and 1.1 are not exact in binary: what is this near to a whole millisecond was meant as one.
_NOISE_MS = Fraction(1, 1_000)


class Every(Schedule):
    """Due at whole multiples of an interval since 1970-01-01T00:00:00Z.

    All instances therefore agree on the slots without talking, and no run moves a later one. The multiples go on
    before 1970 too. Clock changes play no part: every two hours is every two real hours.

        Every(300)
        Every(timedelta(minutes=5))
        Every(minutes=5)
        Every(hours=1, minutes=30)

    Args:
        interval: Seconds, or a timedelta. Either this or the keywords.
        seconds: Added to the interval, as are minutes, hours and days.
        minutes: See seconds.
        hours: See seconds.
        days: See seconds; always 24 hours each.

    Raises:
        ConfigurationError: The interval is not a number, not above zero, not whole milliseconds or more than a
            timedelta holds.

    Attributes:
        interval_ms: The interval in milliseconds, at least 1.
    """

    __slots__ = ("interval_ms", "tz")

    interval_ms: int

    def __init__(
        self,
        interval: float | timedelta | None = None,
        /,
        *,
        seconds: float | None = None,
        minutes: float | None = None,
        hours: float | None = None,
        days: float | None = None,
    ) -> None:
        given = {"seconds": seconds, "minutes": minutes, "hours": hours, "days": days}
        parts = {name: value for name, value in given.items() if value is not None}
        if interval is None and not parts:
            raise ConfigurationError("every() has no interval: write every(300), every(minutes=5) or every(days=1)")
        if interval is not None and parts:
            raise ConfigurationError(
                f"every() was given both {shown(interval)} and {', '.join(parts)}: write one or the other,"
                " such as every(90) or every(minutes=1, seconds=30)"
            )
        if isinstance(interval, timedelta):
            interval_ms = _timedelta_ms(interval)
        elif interval is not None:
            interval_ms = _whole_ms({"interval": interval})
        else:
            interval_ms = _whole_ms(parts)
        zone: ZoneInfo | timezone = timezone.utc
        object.__setattr__(self, "interval_ms", interval_ms)
        object.__setattr__(self, "tz", zone)

    def next_ms(self, after_ms: int) -> int | None:
        """The first multiple after `after_ms` (milliseconds since the epoch); None if none is before year 9999."""
        step_ms = self.interval_ms
        slot_ms = (max(after_ms, MIN_MS - 1) // step_ms + 1) * step_ms
        return slot_ms if slot_ms < END_MS else None

    def latest_ms(self, at_ms: int) -> int | None:
        """The last multiple at or before `at_ms` (milliseconds since the epoch); None before the year 1."""
        slot_ms = min(at_ms, END_MS - 1) // self.interval_ms * self.interval_ms
        return slot_ms if slot_ms >= MIN_MS else None

    def count_ms(self, first_ms: int, last_ms: int, limit: int) -> int:
        """How many multiples lie in [first_ms, last_ms], at most `limit`; by arithmetic, however many they are."""
        first_ms, last_ms = max(first_ms, MIN_MS), min(last_ms, END_MS - 1)
        if last_ms < first_ms:
            return 0
        return max(0, min(limit, last_ms // self.interval_ms - (first_ms - 1) // self.interval_ms))

    def describe(self) -> str:
        """The interval in the largest unit that holds it whole: `every 5 min`."""
        for unit_ms, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s")):
            if self.interval_ms % unit_ms == 0:
                return f"every {self.interval_ms // unit_ms} {unit}"
        if self.interval_ms < 1_000:
            return f"every {self.interval_ms} ms"
        whole_s, rest_ms = divmod(self.interval_ms, 1_000)
        return f"every {whole_s}.{rest_ms:03}".rstrip("0") + " s"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Every):
            return NotImplemented
        return self.interval_ms == other.interval_ms

    def __hash__(self) -> int:
        return hash((Every, self.interval_ms))

    def __reduce__(self) -> tuple[type[Every], tuple[timedelta]]:
        return Every, (timedelta(milliseconds=self.interval_ms),)


def _whole_ms(parts: dict[str, float]) -> int:
    """The sum of the parts in milliseconds; Fractions, so that no rounding of ours is added to the caller's."""
    exact_ms = sum((_part_ms(name, value) for name, value in parts.items()), Fraction(0))
    written = ", ".join(shown(v) if name == "interval" else f"{name}={shown(v)}" for name, v in parts.items())
    if exact_ms > _MAX_MS:
        raise ConfigurationError(
            f"every({written}) is longer than a timedelta holds ({timedelta.max.days} days): write a shorter interval"
        )
    interval_ms = round(exact_ms)
    if interval_ms < 1:
        raise ConfigurationError(
            f"every({written}) is under 1 ms; expected an interval above zero: write at least 0.001 seconds (1 ms)"
        )
    if abs(exact_ms - interval_ms) > _NOISE_MS:
        raise ConfigurationError(
            f"every({written}) is not a whole number of milliseconds: write every({interval_ms / 1_000!r}),"
            " or another interval of whole milliseconds"
        )
    return interval_ms


def _part_ms(name: str, value: float) -> Fraction:
    unit = "seconds" if name == "interval" else name
    written = shown(value) if name == "interval" else f"{name}={shown(value)}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(
            f"every({written}): expected a number of {unit}, found {type(value).__name__};"
            f" write every({unit}=5), or every(timedelta({unit}=5))"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"every({written}): expected a finite number of {unit}, such as every({unit}=5)")
    if value < 0:
        raise ConfigurationError(f"every({written}) is negative: write an interval above zero, such as every({unit}=5)")
    return Fraction(value) * _UNITS_MS[unit]


def _timedelta_ms(interval: timedelta) -> int:
    interval_ms, rest = divmod(interval, _MS)
    if interval <= timedelta(0):
        raise ConfigurationError(
            f"every({shown(interval)}) is not above zero: write at least timedelta(milliseconds=1)"
        )
    if rest:
        raise ConfigurationError(
            f"every({shown(interval)}) is not a whole number of milliseconds: write"
            f" every(timedelta(milliseconds={max(1, interval_ms)})), or another interval of whole milliseconds"
        )
    return interval_ms
