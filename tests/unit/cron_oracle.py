"""A second opinion on cron: Vixie cron's main loop, lived through minute by minute.

Shares nothing with leaselib: it reads expressions by itself and takes local time from zoneinfo alone. Slow, and
simple enough to be checked by reading.

The loop knows two clocks: `running`, what the local clock shows now, and `virtual`, up to where jobs have been
looked at. Normally they move together. After the clock was put forward the jobs at fixed times that fell into the
gap are run; while it lags behind `virtual` after it was put back, only those with a `*` in minute or hour are.

Two deliberate differences from the C source, both of SPEC.md: a jump of exactly three hours still counts as
summer time (cron counts the minute of its own sleep too, and so stops one minute short of that), and a clock put
back by more than that does not make fixed times run again.
"""

from __future__ import annotations

from calendar import monthrange
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

UTC = timezone.utc
MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
WEEKDAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
NAMES = {name: str(number) for number, name in enumerate(MONTHS, 1)}
NAMES |= {name: str(number) for number, name in enumerate(WEEKDAYS)}


def numbers(field: str, low: int, high: int) -> set[int]:
    """The numbers that a field without L and # stands for; a range that wraps goes on from `low`."""
    found: set[int] = set()
    for item in field.split(","):
        span, _, step = item.partition("/")
        if span == "*":
            first, last = low, high
        elif "-" in span:
            first, last = (int(NAMES.get(end, end)) for end in span.split("-"))
        else:
            first = int(NAMES.get(span, span))
            last = high if step else first
        if first > last:
            last += high - low + 1
        for number in range(first, last + 1, int(step or 1)):
            found.add((number - low) % (high - low + 1) + low)
    return found


@dataclass
class Rule:
    """What an expression matches, and how cron treats it."""

    seconds: set[int]
    minutes: set[int]
    hours: set[int]
    day: str
    months: set[int]
    weekday: str
    wild: bool
    step: timedelta

    def __init__(self, expression: str) -> None:
        fields = expression.lower().replace("?", "*").split()
        self.step = timedelta(minutes=1) if len(fields) == 5 else timedelta(seconds=1)
        if len(fields) == 5:
            fields.insert(0, "0")
        second, minute, hour, self.day, month, self.weekday = fields
        self.seconds = numbers(second, 0, 59)
        self.minutes = numbers(minute, 0, 59)
        self.hours = numbers(hour, 0, 23)
        self.months = numbers(month, 1, 12)
        self.wild = minute[0] == "*" or hour[0] == "*"

    def day_of_month(self, wall: datetime) -> bool:
        """Whether the field day of month matches; an L stands for the last day."""
        last = monthrange(wall.year, wall.month)[1]
        plain = [item for item in self.day.split(",") if item != "l"]
        if "l" in self.day.split(",") and wall.day == last:
            return True
        return bool(plain) and wall.day in numbers(",".join(plain).replace("l", "31"), 1, 31)

    def day_of_week(self, wall: datetime) -> bool:
        """Whether the field day of week matches; 7 is Sunday, as 0 is."""
        today = wall.isoweekday() % 7
        last = monthrange(wall.year, wall.month)[1]
        if "#" not in self.weekday and "l" not in self.weekday:
            # 0-7, 5-7: cron counts up to 7 and then makes Sunday of it.
            return today in {n % 7 for n in self._up_to_seven()}
        for item in self.weekday.split(","):
            if item.startswith("l"):
                if today == int(item[1:]) % 7 and wall.day + 7 > last:
                    return True
            else:
                name, nth = item.split("#")
                if today == int(NAMES.get(name, name)) % 7 and (wall.day + 6) // 7 == int(nth):
                    return True
        return False

    def _up_to_seven(self) -> set[int]:
        found: set[int] = set()
        for item in self.weekday.split(","):
            if item.partition("/")[0].endswith("-7") and not item.startswith("7"):
                first = item.partition("-")[0]
                step = int(item.partition("/")[2] or 1)
                found |= set(range(int(NAMES.get(first, first)), 8, step))
            else:
                found |= numbers(item.replace("7", "0", 1) if item[0] == "7" else item, 0, 6)
        return found

    def matches(self, wall: datetime) -> bool:
        """Whether the local time `wall` is one that the expression names."""
        if wall.minute not in self.minutes or wall.hour not in self.hours or wall.second not in self.seconds:
            return False
        if wall.month not in self.months:
            return False
        if self.day[0] == "*" or self.weekday[0] == "*":
            return self.day_of_month(wall) and self.day_of_week(wall)
        return self.day_of_month(wall) or self.day_of_week(wall)


def slots(expression: str, zone: str, start: datetime, end: datetime) -> list[datetime]:
    """The instants in (start, end] at which cron runs a job, in UTC.

    `start` must not lie in the second pass of a repeated hour: cron, started there, knows of no first one.
    """
    rule, tz = Rule(expression), ZoneInfo(zone)
    step, limit = rule.step, timedelta(hours=3) + rule.step
    instant = start.astimezone(UTC)
    virtual = instant.astimezone(tz).replace(tzinfo=None)
    found = []
    while (instant := instant + step) <= end:
        running = instant.astimezone(tz).replace(tzinfo=None)
        moved = running - virtual
        if moved == step:
            virtual = running
            runs = rule.matches(running)
        elif step < moved <= limit:
            runs = rule.wild and rule.matches(running)
            while virtual < running:
                virtual += step
                runs = runs or (not rule.wild and rule.matches(virtual))
        elif moved <= timedelta(0):
            runs = rule.wild and rule.matches(running)
        else:
            virtual = running
            runs = rule.matches(running)
        if runs:
            found.append(instant)
    return found
