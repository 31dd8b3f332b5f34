"""Cron expressions: from text to the sets of numbers that match, and all that is said about what can't be accepted.

Owns no state; pure functions, so any thread may call.

croniter reads the fields. Checked here first is what it would read differently from Vixie cron, differently from one
version or object to the next, or not say clearly: two instances must never understand one expression in two ways.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from leaselib.errors import ConfigurationError
from leaselib.schedules._base import shown
from leaselib.schedules._cron_search import LAST, Walls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")


class _Field(NamedTuple):
    name: str
    low: int
    high: int
    names: Mapping[str, int] = {}

    @property
    def size(self) -> int:
        """How many different values there are: seven weekdays, as 7 is Sunday again."""
        return self.last - self.low + 1

    @property
    def last(self) -> int:
        """The highest value, as far as they all differ."""
        return 6 if self is _WEEKDAY else self.high


_SECOND = _Field("second", 0, 59)
_MINUTE = _Field("minute", 0, 59)
_HOUR = _Field("hour", 0, 23)
_DAY = _Field("day of month", 1, 31)
_MONTH = _Field("month", 1, 12, {name: number for number, name in enumerate(_MONTHS, 1)})
_WEEKDAY = _Field("day of week", 0, 7, {name: number for number, name in enumerate(_WEEKDAYS)})
_FIELDS = (_SECOND, _MINUTE, _HOUR, _DAY, _MONTH, _WEEKDAY)

_ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}

_ITEM = re.compile(r"(?P<low>\*|\d{1,4}|[A-Z]{3})(?:-(?P<high>\d{1,4}|[A-Z]{3}|L))?(?:/(?P<step>\d{1,4}))?")
_PER_INSTANCE = re.compile(r"[HR](\(.*\))?(/.*)?")
_NEAREST = re.compile(r"\d+W|W\d+|LW|WL")
_NTH = re.compile(r"(?:[0-7]|SUN|MON|TUE|WED|THU|FRI|SAT)#[1-5]|L[0-7]")
_WEEKDAY_L = re.compile(r"([0-7]|[A-Z]{3})L|L(SUN|MON|TUE|WED|THU|FRI|SAT)|L")


@dataclass(frozen=True, slots=True)
class Parsed:
    """An expression, understood.

    Attributes:
        walls: The local times that match.
        follows_clock: Whether its minute or hour starts with `*`, so that it is due whenever the clock shows a
            match; else it is at fixed times.
    """

    walls: Walls
    follows_clock: bool


def parse(expression: str) -> Parsed:
    """Read a cron expression.

    Args:
        expression: Five fields, six with seconds first, or a name such as `@daily`; no blanks but single spaces.

    Raises:
        ConfigurationError: It can't be accepted; the message says what to write instead. Dates that never come are
            not looked for here.
    """
    columns = _split(expression)
    fields = _FIELDS[6 - len(columns) :]
    for field, column in zip(fields, columns, strict=True):
        for item in column.split(","):
            _check_item(expression, field, item)
    _check_weekdays(expression, columns[-1])
    return _read(expression, columns)


def _refuse(expression: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"cron expression {shown(expression)}: {problem}")


def _split(expression: str) -> list[str]:
    """The columns in upper case, names such as `@daily` replaced, `?` as the `*` that it means."""
    if not expression:
        raise _refuse(expression, "it is empty; expected five fields, such as '0 6 * * *'")
    if not expression.isascii():
        raise _refuse(expression, "it holds characters that are not ASCII: write plain digits, names, * , - / # L")
    if expression.startswith("@"):
        expression = _expand_alias(expression)
    columns = expression.replace("?", "*").split(" ")
    if re.match(r"(CRON_)?TZ=", columns[0], re.IGNORECASE):
        raise _refuse(expression, "a zone can't be part of it: write the fields alone and pass tz='Europe/Paris'")
    if len(columns) == 7:
        raise _refuse(expression, "it has seven fields, but a year can't be given: leave the last one out")
    if len(columns) not in (5, 6):
        raise _refuse(
            expression,
            f"it has {len(columns)} field{'s' * (len(columns) != 1)}; expected five (minute, hour, day of month,"
            " month, day of week), such as '0 6 * * *', or six with seconds first",
        )
    return [column.upper() for column in columns]


def _expand_alias(expression: str) -> str:
    alias = expression.lower()
    if alias in _ALIASES:
        return _ALIASES[alias]
    if alias.startswith("@every"):
        raise _refuse(expression, "intervals are not cron: use scheduler.every(minutes=5), or Every(minutes=5)")
    if alias.startswith("@reboot"):
        raise _refuse(
            expression,
            "@reboot would run once on every instance: call the function when your program starts, or write"
            " scheduler.run_now(name) after start()",
        )
    raise _refuse(expression, f"unknown name; expected one of {', '.join(_ALIASES)}, or five fields")


def _check_item(expression: str, field: _Field, item: str) -> None:
    """Refuse what is between two commas unless it has one sure meaning."""
    where = f"{shown(item)} in the field {field.name}"
    if _PER_INSTANCE.fullmatch(item):
        fixed = field.low + 17 % field.size
        raise _refuse(
            expression, f"{where} would be another value on each instance: write a fixed one, such as {fixed}"
        )
    if field is _DAY and _NEAREST.fullmatch(item):
        raise _refuse(
            expression, f"{where}: W (nearest weekday) is not supported; write the days, such as 15, or weekdays"
        )
    if "L" in item.replace("JUL", "") and _check_last(expression, field, item, where):
        return
    if "#" in item:
        if field is _WEEKDAY and _NTH.fullmatch(item):
            return
        raise _refuse(
            expression,
            f"{where}: # counts weekdays of a month, in the field day of week; write 5#2 or FRI#2 for the second"
            " Friday (#1 to #5)",
        )
    match = _ITEM.fullmatch(item)
    if match is None:
        raise _refuse(
            expression,
            f"{where} can't be read; write a value from {field.low} to {field.high}, a range 1-5, a list 1,3,5,"
            " a step */2, or *",
        )
    _check_range(expression, field, match, where)


def _check_last(expression: str, field: _Field, item: str, where: str) -> bool:
    """Whether an item with an L is settled: True if it is good, False if it has to be read as a range."""
    if field is _DAY:
        if item == "L":
            return True
        if re.fullmatch(r"\d{1,2}-L(/\d{1,4})?", item):
            return False
        raise _refuse(expression, f"{where}: of L only the last day is supported; write L, or days such as 28")
    if field is _WEEKDAY:
        if _NTH.fullmatch(item):
            return True
        match = _WEEKDAY_L.fullmatch(item)
        if match:
            name = match.group(1) or match.group(2) or "SAT"
            number = int(name) if name.isdigit() else field.names.get(name, 6)
            alone = " or 6 for each Saturday" if item == "L" else ""
            raise _refuse(expression, f"{where}: write L{number} for the last one of the month{alone}")
    raise _refuse(
        expression,
        f"{where}: L stands for the last day in the field day of month (L), or before a weekday (L5 for the last"
        " Friday); write a number here",
    )


def _check_range(expression: str, field: _Field, match: re.Match[str], where: str) -> None:
    step = int(match["step"]) if match["step"] else None
    if step == 0:
        raise _refuse(expression, f"{where}: a step of 0 leads nowhere; write */1 or *, or a larger step")
    if step is not None and step > field.size:
        raise _refuse(
            expression,
            f"{where}: the step {step} is wider than the field, which has {field.size} values; write a step up to"
            f" {field.size}, or the one value {field.low}",
        )
    if match["low"] == "*":
        if match["high"]:
            raise _refuse(expression, f"{where} can't be read; write * or a range from {field.low} to {field.high}")
        return
    low = _value(expression, field, match["low"], where)
    if match["high"]:
        _check_bounds(expression, field, (low, _value(expression, field, match["high"], where)), step, where)
    elif step is not None and low >= field.last:
        raise _refuse(
            expression,
            f"{where}: nothing is left to step to, and versions of cron read it in two ways; write"
            f" {match['low']} for that one value, or */{step}",
        )
    elif step is not None and field is _WEEKDAY and low and (7 - low) % step == 0:
        raise _refuse(
            expression,
            f"{where}: some crons step on to 7, Sunday, and some stop at 6; write {low}-6/{step} or {low}-7/{step}",
        )


def _check_bounds(expression: str, field: _Field, bounds: tuple[int, int], step: int | None, where: str) -> None:
    low, high = bounds
    same = low % 7 == high % 7 and bounds != (0, 7) if field is _WEEKDAY else low == high
    if same:
        raise _refuse(expression, f"{where}: both ends are equal; write {low} for that one value, or * for all of them")
    if low > high and step is not None:
        values = [*range(low, high + field.size + 1, step)]
        written = ",".join(str((value - field.low) % field.size + field.low) for value in values)
        raise _refuse(expression, f"{where}: a range that wraps round can't have a step; write the list {written}")


def _value(expression: str, field: _Field, text: str, where: str) -> int:
    if text == "L" and field is _DAY:
        return field.high
    if not text.isdigit():
        if text in field.names:
            return field.names[text]
        known = f"; expected one of {', '.join(field.names)}" if field.names else ", which has no names"
        raise _refuse(expression, f"{where}: {text} is no name of that field{known} or a number")
    if not field.low <= int(text) <= field.high:
        raise _refuse(expression, f"{where} is out of range; write a value from {field.low} to {field.high}")
    return int(text)


def _check_weekdays(expression: str, column: str) -> None:
    """`5#2,3`: croniter refuses it or reads it in two ways, by the day."""
    items = column.split(",")
    nth = [item for item in items if _NTH.fullmatch(item)]
    if nth and len(nth) < len(items):
        raise _refuse(
            expression,
            f"{shown(column)} in the field day of week mixes {nth[0]} with plain weekdays: write two schedules,"
            " or all of them with # or L",
        )


def _read(expression: str, columns: list[str]) -> Parsed:
    """Let croniter expand the fields, and turn its lists into masks."""
    # Imported here: it takes 40 ms, which programs without cron expressions needn't spend.
    from croniter import CroniterError, croniter

    # Six fields at once are avoided: croniter 6 then knows no 7 for Sunday. Seconds are read as minutes are.
    second, five = columns[-6:-5], columns[-5:]
    try:
        (minutes, hours, days, months, weekdays), nth_of_weekday = croniter.expand(" ".join(five))
        seconds = croniter.expand(f"{second[0]} * * * *")[0][0] if second else [0]
    except CroniterError as error:
        raise _refuse(expression, f"croniter can't read it ({error})") from error
    day, weekday = columns[-3], columns[-1]
    month_mask = _mask(months, _MONTH)
    week = 0 if nth_of_weekday else _mask(weekdays, _WEEKDAY) & 0x7F
    walls = Walls(
        seconds=_mask(seconds, _SECOND),
        minutes=_mask(minutes, _MINUTE),
        hours=_mask(hours, _HOUR),
        days=_mask(days, _DAY),
        last_day="l" in days,
        months=tuple(month for month in range(1, 13) if month_mask >> month & 1),
        weekdays=sum(week << 7 * number for number in range(6)),
        nth_weekdays=tuple(
            (number, LAST if nth == "l" else int(nth))
            for number, nths in sorted(nth_of_weekday.items())
            for nth in sorted(nths, key=str)
        ),
        both=day.startswith("*") or weekday.startswith("*"),
    )
    minute, hour = columns[-5], columns[-4]
    return Parsed(walls, minute.startswith("*") or hour.startswith("*"))


def _mask(values: Sequence[int | str], field: _Field) -> int:
    if "*" in values:
        return (1 << field.high + 1) - (1 << field.low)
    return sum(1 << value for value in set(values) if isinstance(value, int))
