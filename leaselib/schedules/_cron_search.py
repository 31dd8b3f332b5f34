"""Finds slots: the fields of an expression against local time, and local time against a zone's clock changes.

Owns no state; immutable, so any thread may search without a lock.

Local time is counted in seconds as if it were UTC ("wall seconds"), so that the fields can be searched without
thinking of zones. Two rules, both Vixie cron's, turn it into instants:

- An expression whose minute or hour field starts with `*` (`follows_clock`) is due whenever the local clock shows a
  match: never for a time inside a gap, and in both passes of a repeated hour.
- Any other is due when the local clock first reaches a matching time. A time inside a gap is reached at its end; in
  the second pass of a repeated hour nothing is reached that had not been before. A jump of over three hours (a move
  across the date line) is no summer time: what it skips is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from leaselib.schedules._base import END_MS, EPOCH, MIN_MS
from leaselib.schedules._zones import stretch_at

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

_DAY_S = 86_400
_MIN_S = MIN_MS // 1_000
_END_S = END_MS // 1_000
_EPOCH_DAY = EPOCH.toordinal()
_MAX_GAP_S = 3 * 3_600
# Offsets are under a day, so two local clocks differ by less than two.
_REACH_S = 2 * _DAY_S
# The calendar repeats every 400 years, weekdays included: a date that these years don't have never comes.
_CYCLE_YEARS = 400
_CYCLE_S = 146_097 * _DAY_S
# From here on no zone has changes other than by a rule that holds for every year (Morocco's list ends in 2087).
RULES_ONLY_S = 130 * 365 * _DAY_S

LAST = 0  # as the number of an nth weekday: the last one of its month


@dataclass(frozen=True, slots=True)
class Walls:
    """The local times that an expression matches, whatever the zone. Sets of numbers are bit masks.

    Attributes:
        seconds, minutes, hours: Bits 0 to 59, and 0 to 23.
        days: Days of the month, bits 1 to 31.
        last_day: Whether the last day of the month matches too (`L`).
        months: Ascending.
        weekdays: Bit n is n days after a Sunday, six weeks long, so that a month is a slice of it.
        nth_weekdays: (weekday from 0 for Sunday, 1 to 5 or LAST).
        both: Whether a day has to match as day of the month and as weekday; else either is enough.
    """

    seconds: int
    minutes: int
    hours: int
    days: int
    last_day: bool
    months: tuple[int, ...]
    weekdays: int
    nth_weekdays: tuple[tuple[int, int], ...]
    both: bool

    def next(self, wall_s: int) -> int | None:
        """The first match at or after `wall_s`; None if the next 400 years have none."""
        day, time_s = divmod(wall_s, _DAY_S)
        start = date.fromordinal(day + _EPOCH_DAY)
        for year in range(start.year, min(start.year + _CYCLE_YEARS, 9_999) + 1):
            is_first_year = year == start.year
            for month in self.months:
                if is_first_year and month < start.month:
                    continue
                month_day, days = self._month(year, month)
                if is_first_year and month == start.month:
                    days &= -1 << start.day
                    if days >> start.day & 1:
                        found_s = self._time_from(time_s)
                        if found_s >= 0:
                            return day * _DAY_S + found_s
                        days &= days - 1
                if days:
                    return (month_day + _lowest(days)) * _DAY_S + self._time_from(0)
        return None

    def latest(self, wall_s: int) -> int | None:
        """The last match at or before `wall_s`; None if the 400 years before have none."""
        day, time_s = divmod(wall_s, _DAY_S)
        start = date.fromordinal(day + _EPOCH_DAY)
        for year in range(start.year, max(start.year - _CYCLE_YEARS, 1) - 1, -1):
            is_last_year = year == start.year
            for month in reversed(self.months):
                if is_last_year and month > start.month:
                    continue
                month_day, days = self._month(year, month)
                if is_last_year and month == start.month:
                    days &= (2 << start.day) - 1
                    if days >> start.day & 1:
                        found_s = self._time_to(time_s)
                        if found_s >= 0:
                            return day * _DAY_S + found_s
                        days ^= 1 << start.day
                if days:
                    return (month_day + _highest(days)) * _DAY_S + self._time_to(_DAY_S - 1)
        return None

    def _month(self, year: int, month: int) -> tuple[int, int]:
        """The day before the month's first, counted from the epoch, and the days that match, as a mask."""
        first = date(year, month, 1).toordinal()
        if month == 12:
            length = 31
        else:
            length = date(year, month + 1, 1).toordinal() - first
        first_weekday = first % 7  # day 1 of the year 1 was a Monday
        of_month = self.days | self.last_day << length
        of_week = self.weekdays >> first_weekday << 1
        for weekday, nth in self.nth_weekdays:
            earliest = (weekday - first_weekday) % 7 + 1
            of_week |= 1 << (earliest + (7 * (nth - 1) if nth else (length - earliest) // 7 * 7))
        days = of_month & of_week if self.both else of_month | of_week
        return first - 1 - _EPOCH_DAY, days & ((2 << length) - 2)

    def _time_from(self, time_s: int) -> int:
        """The first matching second of the day at or after `time_s`, or -1."""
        hour, rest_s = divmod(time_s, 3_600)
        minute, second = divmod(rest_s, 60)
        hours = self.hours & -1 << hour
        if hours >> hour & 1:
            minutes = self.minutes & -1 << minute
            if minutes >> minute & 1:
                seconds = self.seconds & -1 << second
                if seconds:
                    return hour * 3_600 + minute * 60 + _lowest(seconds)
                minutes &= minutes - 1
            if minutes:
                return hour * 3_600 + _lowest(minutes) * 60 + _lowest(self.seconds)
            hours &= hours - 1
        if not hours:
            return -1
        return _lowest(hours) * 3_600 + _lowest(self.minutes) * 60 + _lowest(self.seconds)

    def _time_to(self, time_s: int) -> int:
        """The last matching second of the day at or before `time_s`, or -1."""
        hour, rest_s = divmod(time_s, 3_600)
        minute, second = divmod(rest_s, 60)
        hours = self.hours & (2 << hour) - 1
        if hours >> hour & 1:
            minutes = self.minutes & (2 << minute) - 1
            if minutes >> minute & 1:
                seconds = self.seconds & (2 << second) - 1
                if seconds:
                    return hour * 3_600 + minute * 60 + _highest(seconds)
                minutes ^= 1 << minute
            if minutes:
                return hour * 3_600 + _highest(minutes) * 60 + _highest(self.seconds)
            hours ^= 1 << hour
        if not hours:
            return -1
        return _highest(hours) * 3_600 + _highest(self.minutes) * 60 + _highest(self.seconds)


def next_slot_s(walls: Walls, zone: ZoneInfo | None, *, follows_clock: bool, after_s: int) -> int | None:
    """The first slot after `after_s`, None if none is before the year 9999. Seconds since the epoch, UTC.

    Args:
        walls: The local times that match.
        zone: Where they are local; None is UTC.
        follows_clock: Which of the module's two rules holds.
        after_s: Slots are strictly later.
    """
    after_s = max(after_s, _MIN_S - 1)
    if after_s >= _END_S - 1:
        return None
    if zone is None:
        slot_s = walls.next(after_s + 1)
    elif follows_clock:
        slot_s = _next_shown_s(walls, zone, after_s + 1)
    else:
        slot_s = _next_reached_s(walls, zone, after_s)
    return slot_s if slot_s is not None and slot_s < _END_S else None


def latest_slot_s(walls: Walls, zone: ZoneInfo | None, *, follows_clock: bool, at_s: int) -> int | None:
    """The last slot at or before `at_s`, or None. Arguments as for next_slot_s."""
    at_s = min(at_s, _END_S - 1)
    if at_s < _MIN_S:
        return None
    if zone is None:
        slot_s = walls.latest(at_s)
    elif follows_clock:
        slot_s = _latest_shown_s(walls, zone, at_s)
    else:
        slot_s = _latest_reached_s(walls, zone, at_s)
    return slot_s if slot_s is not None and slot_s >= _MIN_S else None


def _next_shown_s(walls: Walls, zone: ZoneInfo, from_s: int) -> int | None:
    # Once only yearly rules are left, a whole cycle without a slot means that there is none.
    end_s = min(_END_S, max(from_s, RULES_ONLY_S) + _CYCLE_S)
    while from_s < end_s:
        stretch = stretch_at(zone, from_s)
        wall_s = walls.next(from_s + stretch.offset_s)
        if wall_s is None:
            return None
        slot_s = wall_s - stretch.offset_s
        if slot_s < stretch.end_s:
            return slot_s
        # No local time before wall_s matches, save that a clock set back shows earlier ones again near from_s.
        if stretch.end_s < from_s + _REACH_S:
            from_s = stretch.end_s
        else:
            from_s = max(stretch.end_s, slot_s - _REACH_S)
    return None


def _latest_shown_s(walls: Walls, zone: ZoneInfo, at_s: int) -> int | None:
    while at_s >= _MIN_S:
        stretch = stretch_at(zone, at_s)
        wall_s = walls.latest(at_s + stretch.offset_s)
        if wall_s is None:
            return None
        slot_s = wall_s - stretch.offset_s
        if slot_s >= stretch.start_s:
            return slot_s
        if stretch.start_s > at_s - _REACH_S:
            at_s = stretch.start_s - 1
        else:
            at_s = min(stretch.start_s - 1, slot_s + _REACH_S)
    return None


def _next_reached_s(walls: Walls, zone: ZoneInfo, after_s: int) -> int | None:
    wall_s = walls.next(_furthest_s(zone, after_s) + 1)
    while wall_s is not None and wall_s < _END_S + _DAY_S:
        slot_s, _, resume_s = _reached_s(zone, wall_s, max(after_s, wall_s - _DAY_S))
        if slot_s is not None:
            return slot_s
        wall_s = walls.next(resume_s)
    return None


def _latest_reached_s(walls: Walls, zone: ZoneInfo, at_s: int) -> int | None:
    wall_s = walls.latest(_furthest_s(zone, at_s))
    while wall_s is not None and wall_s >= _MIN_S - _DAY_S:
        slot_s, dropped_s, _ = _reached_s(zone, wall_s, wall_s - _DAY_S)
        if slot_s is not None:
            return slot_s
        wall_s = walls.latest(dropped_s - 1)
    return None


def _furthest_s(zone: ZoneInfo, at_s: int) -> int:
    """The latest local time that the clock has shown up to `at_s`: more than it shows in a repeated hour."""
    stretch = stretch_at(zone, at_s)
    wall_s = at_s + stretch.offset_s
    while stretch.start_s > at_s - _REACH_S:
        end_s = stretch.start_s
        stretch = stretch_at(zone, end_s - 1)
        wall_s = max(wall_s, end_s - 1 + stretch.offset_s)
    return wall_s


def _reached_s(zone: ZoneInfo, wall_s: int, from_s: int) -> tuple[int | None, int, int]:
    """When the local clock first shows `wall_s` or later, looking from `from_s`, when it was still earlier.

    Returns:
        The instant, or None if a jump of over three hours drops `wall_s`; then also the first local time that the
        jump left out, and the first after it.
    """
    before = stretch = stretch_at(zone, from_s)
    while wall_s - stretch.offset_s >= stretch.end_s:
        before, stretch = stretch, stretch_at(zone, stretch.end_s)
    shown_s = wall_s - stretch.offset_s
    if shown_s >= stretch.start_s:
        return shown_s, wall_s, wall_s
    if stretch.offset_s - before.offset_s <= _MAX_GAP_S:
        return stretch.start_s, wall_s, wall_s
    return None, stretch.start_s + before.offset_s, stretch.start_s + stretch.offset_s


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _highest(mask: int) -> int:
    return mask.bit_length() - 1
