"""Time zones: which names are accepted, and the stretches of equal UTC offset that a zone's time is made of.

Owns two caches, of zone names and of clock changes. Both are `lru_cache`s, which lock for themselves; all else is
immutable. Any thread may call.
"""

from __future__ import annotations

import difflib
import re
import sys
from bisect import bisect_right
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo, available_timezones

from leaselib.errors import ConfigurationError
from leaselib.schedules._base import END_MS, EPOCH, MIN_MS, shown

_DAY_S = 86_400
# Clock changes are looked up once per zone and period of 2**25 seconds, a little over a year.
_PERIOD_BITS = 25
# The closest two changes that cancel each other out are just under four days apart (Freetown, 1939), and under
# seven in living rules (Boa Vista, Gaza): looking every two days misses none.
_PROBE_S = 2 * _DAY_S
_FIRST_S = MIN_MS // 1_000 - _DAY_S
_LAST_S = END_MS // 1_000 + _DAY_S
# Where file names ignore case, a zone loads under any spelling; elsewhere the same name would be refused.
_CASE_BLIND = sys.platform in ("win32", "cygwin", "darwin")


class Stretch(NamedTuple):
    """A time in which a zone's offset from UTC does not change: [start_s, end_s), seconds since the epoch, UTC.

    It is cut where a period of the cache ends, so the stretch next to it may have the same offset.
    """

    start_s: int
    end_s: int
    offset_s: int


def resolve_zone(tz: object) -> ZoneInfo | timezone:
    """The zone that the caller means.

    Args:
        tz: A zone's name, a ZoneInfo (taken by its key) or `datetime.timezone.utc`.

    Returns:
        `timezone.utc` for UTC, else a ZoneInfo.

    Raises:
        ConfigurationError: No such zone, or not one that means the same on every instance.
    """
    if isinstance(tz, timezone):
        if tz != timezone.utc:
            raise ConfigurationError(
                f"tz={shown(tz)} is a fixed offset; expected a zone's name, such as tz='Europe/Paris',"
                " or for a fixed offset one like tz='Etc/GMT-2' (two hours ahead of UTC: the sign is reversed)"
            )
        return timezone.utc
    name = tz.key if isinstance(tz, ZoneInfo) else tz
    if not isinstance(name, str):
        raise ConfigurationError(
            f"tz={shown(tz)}: expected a zone's name, such as tz='Europe/Paris' or tz='UTC', or a ZoneInfo with a key"
        )
    return _load(name)


@lru_cache(maxsize=1_024)
def _load(name: str) -> ZoneInfo | timezone:
    if name == "UTC":
        return timezone.utc
    if name in ("localtime", "posixrules") or name.startswith(("posix/", "right/")):
        raise ConfigurationError(
            f"tz={shown(name)} may mean something else on each machine: write the zone's own name,"
            " such as tz='Europe/Paris'"
        )
    try:
        zone = ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # ZoneInfoNotFoundError is a KeyError; paths raise the others
        raise ConfigurationError(f"tz={shown(name)} is not a time zone: {_advice(name)}") from None
    if _CASE_BLIND and name not in _known_names():
        raise ConfigurationError(f"tz={shown(name)} is not a time zone: {_advice(name)}")
    return zone


@lru_cache(maxsize=1)
def _known_names() -> frozenset[str]:
    return frozenset(available_timezones())


def _advice(name: str) -> str:
    known = _known_names()
    if not known:
        return "this machine has no time zone data: install the package tzdata"
    folded = name.strip().casefold()
    same = sorted(n for n in known if n.casefold() == folded)
    if same:
        return f"write tz={same[0]!r}"
    if re.fullmatch(r"(UTC|GMT|Z)?\s*[+-]\s*\d.*", name, re.ASCII | re.IGNORECASE):
        return (
            "write the name of a place, such as tz='Europe/Paris', or for a fixed offset one like tz='Etc/GMT-2'"
            " (two hours ahead of UTC: the sign is reversed)"
        )
    if re.fullmatch(r"[A-Z]{2,5}", name, re.ASCII):
        return "abbreviations mean several zones, or only half the year: write a place, such as tz='Europe/Paris'"
    near = difflib.get_close_matches(name[:64], sorted(known), n=1)
    return f"did you mean tz={near[0]!r}?" if near else "write a zone's name, such as tz='Europe/Paris' or tz='UTC'"


def stretch_at(zone: ZoneInfo, at_s: int) -> Stretch:
    """The stretch that holds `at_s`, in seconds since the epoch, UTC."""
    starts, offsets = _changes(zone, at_s >> _PERIOD_BITS)
    index = bisect_right(starts, at_s)
    return Stretch(starts[index - 1], starts[index], offsets[index - 1])


@lru_cache(maxsize=4_096)
def _changes(zone: ZoneInfo, period: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """When the stretches of a period start, closed by where the period ends, and the offset of each."""
    start_s = period << _PERIOD_BITS
    end_s = (period + 1) << _PERIOD_BITS
    starts, offsets = [start_s], [_offset_s(zone, start_s)]
    low_s = start_s
    while low_s < end_s - 1:
        high_s = min(low_s + _PROBE_S, end_s - 1)
        if _offset_s(zone, high_s) == offsets[-1]:
            low_s = high_s
            continue
        while high_s - low_s > 1:
            middle_s = (low_s + high_s) // 2
            if _offset_s(zone, middle_s) == offsets[-1]:
                low_s = middle_s
            else:
                high_s = middle_s
        starts.append(high_s)
        offsets.append(_offset_s(zone, high_s))
        low_s = high_s
    return (*starts, end_s), tuple(offsets)


def _offset_s(zone: ZoneInfo, at_s: int) -> int:
    at = EPOCH + timedelta(seconds=min(max(at_s, _FIRST_S), _LAST_S))
    offset = datetime.astimezone(at, zone).utcoffset()
    assert offset is not None, "a ZoneInfo always knows its offset"
    return offset // timedelta(seconds=1)
