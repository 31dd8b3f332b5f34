"""What every schedule can answer, and the two ends of time between which it has slots.

Owns no state. Schedules never change once made: any thread may call any method at any time, no lock is needed.
"""

from __future__ import annotations

import abc
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from leaselib.errors import ConfigurationError

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MS = timedelta(milliseconds=1)

# Slots lie in [MIN_MS, END_MS). Both ends keep a distance from what datetime can hold, so that the local time of a
# slot can be worked out in every zone.
MIN_MS = (datetime(1, 1, 3, tzinfo=timezone.utc) - EPOCH) // _MS
END_MS = (datetime(9999, 1, 1, tzinfo=timezone.utc) - EPOCH) // _MS


class Schedule(abc.ABC):
    """When a job is due. Its slots are the same on every instance, whatever instant they are asked from.

    Slots are whole milliseconds since 1970-01-01T00:00:00Z, from 3 January of the year 1 up to, not including,
    the year 9999. Schedules are immutable, hashable and safe to share between threads.

    Attributes:
        tz: The zone in which people read the slots; UTC for an interval.
    """

    __slots__ = ()

    tz: ZoneInfo | timezone

    @abc.abstractmethod
    def next_ms(self, after_ms: int) -> int | None:
        """The first slot strictly after `after_ms`; None if none comes before the year 9999.

        Both are milliseconds since the epoch, UTC.
        """

    @abc.abstractmethod
    def latest_ms(self, at_ms: int) -> int | None:
        """The last slot at or before `at_ms`, or None. Both are milliseconds since the epoch, UTC."""

    @abc.abstractmethod
    def count_ms(self, first_ms: int, last_ms: int, limit: int) -> int:
        """How many slots lie in [first_ms, last_ms], counted up to `limit`."""

    @abc.abstractmethod
    def describe(self) -> str:
        """The schedule in a few words, for logs and tables."""

    def next(self, after: datetime) -> datetime:
        """The first slot strictly after an instant.

        Args:
            after: An aware datetime, in any zone.

        Returns:
            The slot, as an aware datetime in UTC.

        Raises:
            ConfigurationError: `after` is not an aware datetime.
            OverflowError: No slot comes before the year 9999.
        """
        slot_ms = self.next_ms(_floor_ms("next", after))
        if slot_ms is None:
            raise OverflowError(f"{self.describe()} has no slot between {after} and the year 9999: ask from earlier")
        return EPOCH + timedelta(milliseconds=slot_ms)

    def latest(self, at: datetime) -> datetime | None:
        """The last slot at or before an instant.

        Args:
            at: An aware datetime, in any zone.

        Returns:
            The slot, as an aware datetime in UTC; None if there is none.

        Raises:
            ConfigurationError: `at` is not an aware datetime.
        """
        slot_ms = self.latest_ms(_floor_ms("latest", at))
        return None if slot_ms is None else EPOCH + timedelta(milliseconds=slot_ms)

    def __repr__(self) -> str:
        return f"<{self.describe()}>"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} can't be set: a schedule never changes; make a new one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name} can't be deleted: a schedule never changes; make a new one")


def shown(value: object) -> str:
    """`value` as an error message shows it: its repr, cut to a readable length."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a repr that fails (an int of 5,000 digits) must not hide the real complaint
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _floor_ms(method: str, value: datetime) -> int:
    """Whole milliseconds since the epoch; rounding down keeps both questions exact, as slots are whole."""
    if not isinstance(value, datetime):
        raise ConfigurationError(
            f"{method}() was given {shown(value)}; expected an aware datetime,"
            " such as datetime(2026, 1, 31, tzinfo=timezone.utc)"
        )
    if value.utcoffset() is None:
        raise ConfigurationError(
            f"{method}() was given {shown(value)}, which has no time zone; expected an aware datetime:"
            " add tzinfo=timezone.utc, or the zone that it was meant in"
        )
    return (value - EPOCH) // _MS
