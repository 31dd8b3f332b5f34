"""Cron slots around clock changes, written out: what a daily, an hourly and a quarter-hourly job see.

The answers were checked one by one against the rules (fixed times: once; `*` in minute or hour: as the clock shows).
They are in local time with its offset, day of the month first: `08T03:00-04:00`.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from leaselib.schedules import Cron

UTC = timezone.utc

# Zone, first instant of the window (left out), its length in hours, and for each expression all slots within it.
TABLE: list[tuple[str, str, float, dict[str, str]]] = [
    (
        "America/New_York",
        "2026-03-08T00:00-05:00",
        30,
        {
            "0 6 * * *": "08T06:00-04:00 09T06:00-04:00",
            "30 2 * * *": "08T03:00-04:00 09T02:30-04:00",
            "0 2 * * *": "08T03:00-04:00 09T02:00-04:00",
            "0,30 2 * * *": "08T03:00-04:00 09T02:00-04:00 09T02:30-04:00",
            "30 2,3 * * *": "08T03:00-04:00 08T03:30-04:00 09T02:30-04:00 09T03:30-04:00",
        },
    ),
    (
        "America/New_York",
        "2026-03-08T00:30-05:00",
        4,
        {
            "0 * * * *": "08T01:00-05:00 08T03:00-04:00 08T04:00-04:00 08T05:00-04:00",
            "*/15 2 * * *": "",
            "0 */2 * * *": "08T04:00-04:00",
            "*/30 * * * *": (
                "08T01:00-05:00 08T01:30-05:00 08T03:00-04:00 08T03:30-04:00 08T04:00-04:00 08T04:30-04:00 "
                "08T05:00-04:00 08T05:30-04:00"
            ),
            "0 0-23 * * *": "08T01:00-05:00 08T03:00-04:00 08T04:00-04:00 08T05:00-04:00",
        },
    ),
    (
        "America/New_York",
        "2026-11-01T00:00-04:00",
        30,
        {
            "0 6 * * *": "01T06:00-05:00",
            "30 1 * * *": "01T01:30-04:00 02T01:30-05:00",
            "0 1 * * *": "01T01:00-04:00 02T01:00-05:00",
            "0 2 * * *": "01T02:00-05:00 02T02:00-05:00",
        },
    ),
    (
        "America/New_York",
        "2026-11-01T00:30-04:00",
        4,
        {
            "0 * * * *": "01T01:00-04:00 01T01:00-05:00 01T02:00-05:00 01T03:00-05:00",
            "*/15 1 * * *": (
                "01T01:00-04:00 01T01:15-04:00 01T01:30-04:00 01T01:45-04:00 01T01:00-05:00 01T01:15-05:00 "
                "01T01:30-05:00 01T01:45-05:00"
            ),
            "0 0-23 * * *": "01T01:00-04:00 01T02:00-05:00 01T03:00-05:00",
            "30 * * * *": "01T01:30-04:00 01T01:30-05:00 01T02:30-05:00 01T03:30-05:00",
        },
    ),
    (
        "Europe/London",
        "2026-03-29T00:00+00:00",
        30,
        {
            "30 1 * * *": "29T02:00+01:00 30T01:30+01:00",
            "0 1 * * *": "29T02:00+01:00 30T01:00+01:00",
            "0 2 * * *": "29T02:00+01:00 30T02:00+01:00",
        },
    ),
    (
        "Europe/London",
        "2026-03-29T00:30+00:00",
        2.5,
        {
            "0 * * * *": "29T02:00+01:00 29T03:00+01:00 29T04:00+01:00",
            "*/15 * * * *": (
                "29T00:45+00:00 29T02:00+01:00 29T02:15+01:00 29T02:30+01:00 29T02:45+01:00 29T03:00+01:00 "
                "29T03:15+01:00 29T03:30+01:00 29T03:45+01:00 29T04:00+01:00"
            ),
        },
    ),
    (
        "Europe/London",
        "2026-10-25T00:00+01:00",
        30,
        {
            "30 1 * * *": "25T01:30+01:00 26T01:30+00:00",
            "0 1 * * *": "25T01:00+01:00 26T01:00+00:00",
            "0 2 * * *": "25T02:00+00:00 26T02:00+00:00",
        },
    ),
    (
        "Europe/London",
        "2026-10-25T00:30+01:00",
        2.5,
        {
            "0 * * * *": "25T01:00+01:00 25T01:00+00:00 25T02:00+00:00",
            "*/15 * * * *": (
                "25T00:45+01:00 25T01:00+01:00 25T01:15+01:00 25T01:30+01:00 25T01:45+01:00 25T01:00+00:00 "
                "25T01:15+00:00 25T01:30+00:00 25T01:45+00:00 25T02:00+00:00"
            ),
        },
    ),
    (
        "Europe/Paris",
        "2026-03-29T00:00+01:00",
        30,
        {
            "30 2 * * *": "29T03:00+02:00 30T02:30+02:00",
            "0 6 * * *": "29T06:00+02:00 30T06:00+02:00",
        },
    ),
    (
        "Europe/Paris",
        "2026-03-29T01:30+01:00",
        2.5,
        {
            "0 * * * *": "29T03:00+02:00 29T04:00+02:00 29T05:00+02:00",
            "*/15 * * * *": (
                "29T01:45+01:00 29T03:00+02:00 29T03:15+02:00 29T03:30+02:00 29T03:45+02:00 29T04:00+02:00 "
                "29T04:15+02:00 29T04:30+02:00 29T04:45+02:00 29T05:00+02:00"
            ),
        },
    ),
    (
        "Europe/Paris",
        "2026-10-25T00:00+02:00",
        30,
        {
            "30 2 * * *": "25T02:30+02:00 26T02:30+01:00",
            "0 6 * * *": "25T06:00+01:00",
        },
    ),
    (
        "Europe/Paris",
        "2026-10-25T01:30+02:00",
        2.5,
        {
            "0 * * * *": "25T02:00+02:00 25T02:00+01:00 25T03:00+01:00",
            "*/15 * * * *": (
                "25T01:45+02:00 25T02:00+02:00 25T02:15+02:00 25T02:30+02:00 25T02:45+02:00 25T02:00+01:00 "
                "25T02:15+01:00 25T02:30+01:00 25T02:45+01:00 25T03:00+01:00"
            ),
        },
    ),
    (
        "Australia/Lord_Howe",
        "2019-10-06T00:00+10:30",
        30,
        {
            "0 2 * * *": "06T02:30+11:00 07T02:00+11:00",
            "15 2 * * *": "06T02:30+11:00 07T02:15+11:00",
            "45 2 * * *": "06T02:45+11:00 07T02:45+11:00",
            "0 0 * * *": "07T00:00+11:00",
        },
    ),
    (
        "Australia/Lord_Howe",
        "2019-10-06T00:30+10:30",
        3,
        {
            "0 * * * *": "06T01:00+10:30 06T03:00+11:00 06T04:00+11:00",
            "*/15 * * * *": (
                "06T00:45+10:30 06T01:00+10:30 06T01:15+10:30 06T01:30+10:30 06T01:45+10:30 06T02:30+11:00 "
                "06T02:45+11:00 06T03:00+11:00 06T03:15+11:00 06T03:30+11:00 06T03:45+11:00 06T04:00+11:00"
            ),
            "30 * * * *": "06T01:30+10:30 06T02:30+11:00 06T03:30+11:00",
            "0 */2 * * *": "06T04:00+11:00",
        },
    ),
    (
        "Australia/Lord_Howe",
        "2019-04-07T00:00+11:00",
        30,
        {
            "0 2 * * *": "07T02:00+10:30 08T02:00+10:30",
            "30 1 * * *": "07T01:30+11:00 08T01:30+10:30",
            "45 1 * * *": "07T01:45+11:00 08T01:45+10:30",
            "0 0 * * *": "08T00:00+10:30",
        },
    ),
    (
        "Australia/Lord_Howe",
        "2019-04-07T00:30+11:00",
        3,
        {
            "0 * * * *": "07T01:00+11:00 07T02:00+10:30 07T03:00+10:30",
            "*/15 * * * *": (
                "07T00:45+11:00 07T01:00+11:00 07T01:15+11:00 07T01:30+11:00 07T01:45+11:00 07T01:30+10:30 "
                "07T01:45+10:30 07T02:00+10:30 07T02:15+10:30 07T02:30+10:30 07T02:45+10:30 07T03:00+10:30"
            ),
            "30 * * * *": "07T01:30+11:00 07T01:30+10:30 07T02:30+10:30",
        },
    ),
    (
        "America/Santiago",
        "2026-09-05T12:00-04:00",
        30,
        {
            "0 0 * * *": "06T01:00-03:00",
            "30 0 * * *": "06T01:00-03:00",
            "0 1 * * *": "06T01:00-03:00",
        },
    ),
    (
        "America/Santiago",
        "2026-09-05T22:30-04:00",
        3,
        {
            "0 * * * *": "05T23:00-04:00 06T01:00-03:00 06T02:00-03:00",
            "*/15 * * * *": (
                "05T22:45-04:00 05T23:00-04:00 05T23:15-04:00 05T23:30-04:00 05T23:45-04:00 06T01:00-03:00 "
                "06T01:15-03:00 06T01:30-03:00 06T01:45-03:00 06T02:00-03:00 06T02:15-03:00 06T02:30-03:00"
            ),
            "*/30 0 * * *": "",
        },
    ),
    (
        "America/Santiago",
        "2026-04-04T12:00-03:00",
        40,
        {
            "0 0 * * *": "05T00:00-04:00 06T00:00-04:00",
            "30 23 * * *": "04T23:30-03:00 05T23:30-04:00",
            "0 23 * * *": "04T23:00-03:00 05T23:00-04:00",
        },
    ),
    (
        "America/Santiago",
        "2026-04-04T22:30-03:00",
        3,
        {
            "0 * * * *": "04T23:00-03:00 04T23:00-04:00 05T00:00-04:00",
            "*/15 23 * * *": (
                "04T23:00-03:00 04T23:15-03:00 04T23:30-03:00 04T23:45-03:00 04T23:00-04:00 04T23:15-04:00 "
                "04T23:30-04:00 04T23:45-04:00"
            ),
        },
    ),
    (
        "Europe/Helsinki",
        "2026-03-29T00:00+02:00",
        30,
        {
            "0 3 * * *": "29T04:00+03:00 30T03:00+03:00",
            "30 3 * * *": "29T04:00+03:00 30T03:30+03:00",
            "0 4 * * *": "29T04:00+03:00 30T04:00+03:00",
        },
    ),
    (
        "Europe/Helsinki",
        "2026-03-29T02:30+02:00",
        2,
        {
            "0 * * * *": "29T04:00+03:00 29T05:00+03:00",
            "*/15 * * * *": (
                "29T02:45+02:00 29T04:00+03:00 29T04:15+03:00 29T04:30+03:00 29T04:45+03:00 29T05:00+03:00 "
                "29T05:15+03:00 29T05:30+03:00"
            ),
        },
    ),
    (
        "Europe/Helsinki",
        "2026-10-25T00:00+03:00",
        30,
        {
            "0 3 * * *": "25T03:00+03:00 26T03:00+02:00",
            "30 3 * * *": "25T03:30+03:00 26T03:30+02:00",
            "0 4 * * *": "25T04:00+02:00 26T04:00+02:00",
        },
    ),
    (
        "Europe/Helsinki",
        "2026-10-25T02:30+03:00",
        2.5,
        {
            "0 * * * *": "25T03:00+03:00 25T03:00+02:00 25T04:00+02:00",
            "*/15 3 * * *": (
                "25T03:00+03:00 25T03:15+03:00 25T03:30+03:00 25T03:45+03:00 25T03:00+02:00 25T03:15+02:00 "
                "25T03:30+02:00 25T03:45+02:00"
            ),
        },
    ),
    (
        "Asia/Beirut",
        "2026-03-28T12:00+02:00",
        30,
        {
            "0 0 * * *": "29T01:00+03:00",
            "30 0 * * *": "29T01:00+03:00",
            "0 1 * * *": "29T01:00+03:00",
        },
    ),
    (
        "Asia/Beirut",
        "2026-03-28T22:30+02:00",
        3,
        {
            "0 * * * *": "28T23:00+02:00 29T01:00+03:00 29T02:00+03:00",
            "*/30 0 * * *": "",
            "*/15 * * * *": (
                "28T22:45+02:00 28T23:00+02:00 28T23:15+02:00 28T23:30+02:00 28T23:45+02:00 29T01:00+03:00 "
                "29T01:15+03:00 29T01:30+03:00 29T01:45+03:00 29T02:00+03:00 29T02:15+03:00 29T02:30+03:00"
            ),
        },
    ),
    (
        "Asia/Beirut",
        "2026-10-24T12:00+03:00",
        36,
        {
            "0 0 * * *": "25T00:00+02:00",
            "30 23 * * *": "24T23:30+03:00",
        },
    ),
    (
        "Asia/Beirut",
        "2026-10-24T22:30+03:00",
        3,
        {
            "0 * * * *": "24T23:00+03:00 24T23:00+02:00 25T00:00+02:00",
            "*/15 23 * * *": (
                "24T23:00+03:00 24T23:15+03:00 24T23:30+03:00 24T23:45+03:00 24T23:00+02:00 24T23:15+02:00 "
                "24T23:30+02:00 24T23:45+02:00"
            ),
        },
    ),
    (
        "Asia/Tokyo",
        "2026-03-29T00:00+09:00",
        30,
        {
            "0 0 * * *": "30T00:00+09:00",
            "30 2 * * *": "29T02:30+09:00 30T02:30+09:00",
        },
    ),
    (
        "Asia/Tokyo",
        "2026-03-29T01:30+09:00",
        2.5,
        {
            "0 * * * *": "29T02:00+09:00 29T03:00+09:00 29T04:00+09:00",
            "*/15 * * * *": (
                "29T01:45+09:00 29T02:00+09:00 29T02:15+09:00 29T02:30+09:00 29T02:45+09:00 29T03:00+09:00 "
                "29T03:15+09:00 29T03:30+09:00 29T03:45+09:00 29T04:00+09:00"
            ),
        },
    ),
]
ROWS = [
    pytest.param(expression, zone, start, hours, slots, id=f"{zone} {start[:10]} {expression}")
    for zone, start, hours, expressions in TABLE
    for expression, slots in expressions.items()
]


def utc(text: str) -> datetime:
    """`2026-03-08T07:00Z` as a datetime; Python 3.10 knows no Z."""
    instant = datetime.fromisoformat(text.replace("Z", "+00:00"))
    assert instant.tzinfo is not None
    return instant


def walk(schedule: Cron, after: datetime, count: int) -> list[datetime]:
    """The first `count` slots after an instant."""
    found = []
    for _ in range(count):
        after = schedule.next(after)
        found.append(after)
    return found


def forward(schedule: Cron, start: datetime, end: datetime) -> list[datetime]:
    """All slots in (start, end], by next."""
    found = []
    while (slot := schedule.next(start)) <= end:
        found.append(slot)
        start = slot
    return found


def backward(schedule: Cron, start: datetime, end: datetime) -> list[datetime]:
    """All slots in (start, end], by latest, in ascending order."""
    found: list[datetime] = []
    while (slot := schedule.latest(end)) is not None and slot > start:
        found.append(slot)
        end = slot - timedelta(microseconds=1)
    return found[::-1]


@pytest.mark.parametrize(("expression", "zone", "start", "hours", "slots"), ROWS)
def test_the_slots_around_a_clock_change_are_those_of_the_table(
    expression: str, zone: str, start: str, hours: float, slots: str
) -> None:
    """Walking by next and by latest finds the table's slots and no other."""
    schedule, first = Cron(expression, zone), utc(start)
    last = first + timedelta(hours=hours)
    found = forward(schedule, first, last)
    local = [slot.astimezone(ZoneInfo(zone)) for slot in found]
    assert [f"{at:%d}T{at:%H:%M}{at.isoformat()[-6:]}" for at in local] == slots.split()
    assert backward(schedule, first, last) == found


def test_b02_from_inside_the_second_pass_each_answer_is_later_than_its_question() -> None:
    """Helsinki, 29 October 2017: asked at 03:45, the second time that the clock shows it."""
    schedule = Cron("30 * * * *", "Europe/Helsinki")
    asked = datetime(2017, 10, 29, 3, 45, fold=1, tzinfo=ZoneInfo("Europe/Helsinki"))
    found = walk(schedule, asked, 10)
    assert found[:3] == [utc("2017-10-29T02:30Z"), utc("2017-10-29T03:30Z"), utc("2017-10-29T04:30Z")]
    questions = [asked.astimezone(UTC), *found]
    assert all(answer > question for question, answer in zip(questions, found, strict=False))


def test_b02_the_two_passes_are_told_apart_by_fold() -> None:
    """The same wall time asks about two instants."""
    paris = ZoneInfo("Europe/Paris")
    schedule = Cron("30 * * * *", paris)
    assert schedule.next(datetime(2026, 10, 25, 2, 15, fold=0, tzinfo=paris)) == utc("2026-10-25T00:30Z")
    assert schedule.next(datetime(2026, 10, 25, 2, 15, fold=1, tzinfo=paris)) == utc("2026-10-25T01:30Z")


def test_b02_a_fixed_time_asked_for_in_the_second_pass_is_due_the_next_day() -> None:
    """30 1 in New York ran in the first pass; latest knows it, next doesn't find it again."""
    schedule = Cron("30 1 * * *", "America/New_York")
    second_pass = utc("2026-11-01T01:20-05:00")
    assert schedule.next(second_pass) == utc("2026-11-02T01:30-05:00")
    assert schedule.latest(second_pass) == utc("2026-11-01T01:30-04:00")
    assert schedule.latest(utc("2026-11-01T01:40-05:00")) == utc("2026-11-01T01:30-04:00")


def test_b04_a_daily_job_in_the_skipped_hour_is_due_at_the_end_of_the_gap() -> None:
    """(a) New York and (b) Pacific; the next day it is due as ever."""
    assert walk(Cron("30 2 * * *", "America/New_York"), utc("2026-03-08T06:30Z"), 2) == [
        utc("2026-03-08T07:00Z"),
        utc("2026-03-09T06:30Z"),
    ]
    assert Cron("0 2 * * *", "US/Pacific").next(utc("2025-03-08T20:00Z")) == utc("2025-03-09T10:00Z")


def test_b04_two_times_that_meet_at_the_end_of_the_gap_are_one_slot() -> None:
    """(c) 02:00 is moved to 03:00, which is due anyway."""
    start, end = utc("2025-03-09T00:00-08:00"), utc("2025-03-10T00:00-07:00")
    schedule = Cron("0 2,3 * * *", "US/Pacific")
    assert forward(schedule, start, end) == backward(schedule, start, end) == [utc("2025-03-09T10:00Z")]


@pytest.mark.parametrize("expression", ["30 2 * * *", "0 2,3 * * *", "*/15 * * * *", "0 * * * *", "0 0-23 * * *"])
def test_b04_every_slot_survives_a_round_trip_through_utc(expression: str) -> None:
    """No slot is a local time that doesn't exist."""
    for zone in ("America/New_York", "US/Pacific", "Australia/Lord_Howe", "Asia/Beirut", "Europe/London"):
        slot = utc("2026-01-01T00:00Z")
        for _ in range(400):
            slot = Cron(expression, zone).next(slot)
            local = slot.astimezone(ZoneInfo(zone))
            assert local.replace(tzinfo=None) == local.astimezone(UTC).astimezone(ZoneInfo(zone)).replace(tzinfo=None)
            assert slot.tzinfo is UTC


def test_b07_a_half_hour_change_is_the_same_from_both_sides() -> None:
    """Lord Howe, 6 October 2019: minute 0 never shows at 15:30Z."""
    schedule = Cron("0 * * * *", "Australia/Lord_Howe")
    assert schedule.next(utc("2019-10-05T15:13Z")) == utc("2019-10-05T16:00Z")
    assert schedule.latest(utc("2019-10-05T16:00Z")) == utc("2019-10-05T16:00Z")
    assert schedule.latest(utc("2019-10-05T15:59Z")) == utc("2019-10-05T14:30Z")
    start, end = utc("2019-10-05T00:00Z"), utc("2019-10-08T00:00Z")
    found = forward(schedule, start, end)
    assert found == backward(schedule, start, end)
    assert len(found) == 15 + 57  # at half past the hour of UTC up to the change, on the hour after it
    assert all(slot.astimezone(schedule.tz).minute == 0 for slot in found)


# Changes of half an hour, a quarter, three quarters, two and three hours; at midnight; a week of summer time.
ODD_CHANGES = [
    ("Australia/Lord_Howe", "2019-04-06T15:00Z"),
    ("Asia/Kathmandu", "1985-12-31T18:30Z"),
    ("America/Caracas", "2007-12-09T07:00Z"),
    ("America/Caracas", "2016-05-01T07:00Z"),
    ("Antarctica/Troll", "2026-03-29T01:00Z"),
    ("Antarctica/Troll", "2026-10-25T01:00Z"),
    ("Antarctica/Casey", "2009-10-17T18:00Z"),
    ("Antarctica/Casey", "2010-03-04T15:00Z"),
    ("America/Havana", "2026-11-01T05:00Z"),
    ("America/Boa_Vista", "2000-10-08T04:00Z"),
    ("America/Boa_Vista", "2000-10-15T03:00Z"),
    ("Africa/Casablanca", "2026-02-15T02:00Z"),
    ("Asia/Gaza", "2040-10-20T00:00Z"),
]


@pytest.mark.parametrize(("zone", "change"), ODD_CHANGES)
@pytest.mark.parametrize("expression", ["0 * * * *", "*/15 * * * *", "0 0-23 * * *", "30 0,1,2,3 * * *", "@daily"])
def test_b07_next_and_latest_agree_over_every_odd_change(expression: str, zone: str, change: str) -> None:
    """From any instant, every seven minutes."""
    schedule, middle = Cron(expression, zone), utc(change)
    start, end = middle - timedelta(days=1), middle + timedelta(days=1)
    found = forward(schedule, start, end)
    assert found == backward(schedule, start, end)
    for step in range(0, 48 * 60, 7):
        instant = start + timedelta(minutes=step)
        slot = schedule.next(instant)
        assert schedule.latest(slot) == slot
        assert slot == next((other for other in found if other > instant), slot)


def test_a_gap_of_exactly_three_hours_is_caught_up_at_its_end() -> None:
    """Casey, 18 October 2009: from 02:00 to 05:00. Only what is longer is no summer time."""
    schedule = Cron("30 3 * * *", "Antarctica/Casey")
    assert forward(schedule, utc("2009-10-17T00:00+08:00"), utc("2009-10-20T00:00+11:00")) == [
        utc("2009-10-17T03:30+08:00"),
        utc("2009-10-18T05:00+11:00"),
        utc("2009-10-19T03:30+11:00"),
    ]
    assert schedule.latest(utc("2009-10-18T05:00+11:00")) == utc("2009-10-18T05:00+11:00")


def test_a_jump_over_the_date_line_drops_the_times_that_it_skips() -> None:
    """Apia had no 30 December 2011, so nothing is caught up for it."""
    schedule = Cron("0 6 * * *", "Pacific/Apia")
    assert forward(schedule, utc("2011-12-29T00:00-10:00"), utc("2012-01-01T00:00+14:00")) == [
        utc("2011-12-29T06:00-10:00"),
        utc("2011-12-31T06:00+14:00"),
    ]
    assert schedule.latest(utc("2011-12-31T00:00+14:00")) == utc("2011-12-29T06:00-10:00")


def test_a_jump_over_the_date_line_costs_no_time_even_with_a_slot_each_second() -> None:
    """All 86,400 skipped seconds are passed over at once."""
    schedule = Cron("0-59 0-59 0-23 * * *", "Pacific/Apia")
    started = time.thread_time()
    assert schedule.next(utc("2011-12-29T23:59:59-10:00")) == utc("2011-12-31T00:00+14:00")
    assert schedule.latest(utc("2011-12-30T23:59:59.500+14:00")) == utc("2011-12-29T23:59:59-10:00")
    assert time.thread_time() - started < 0.25


def test_seconds_in_the_skipped_hour_are_one_slot_and_in_the_repeated_hour_come_once() -> None:
    """Minute and hour decide whether a time is fixed; seconds only say how often it is due within its minute."""
    schedule = Cron("*/20 30 2 * * *", "Europe/Paris")
    assert walk(schedule, utc("2026-03-29T00:00Z"), 2) == [utc("2026-03-29T01:00Z"), utc("2026-03-30T00:30Z")]
    assert walk(schedule, utc("2026-10-25T00:00Z"), 4) == [
        utc("2026-10-25T00:30:00Z"),
        utc("2026-10-25T00:30:20Z"),
        utc("2026-10-25T00:30:40Z"),
        utc("2026-10-26T01:30:00Z"),
    ]


def test_hourly_by_name_is_due_every_real_hour() -> None:
    """@hourly is `0 * * * *`, also where the clock is put back."""
    start, end = utc("2026-10-24T00:00Z"), utc("2026-10-26T00:00Z")
    hours = [start + timedelta(hours=n) for n in range(1, 49)]
    assert forward(Cron("@hourly", "Europe/Paris"), start, end) == hours


@pytest.mark.parametrize("machine", ["Europe/London", "Australia/Sydney", "America/New_York", "UTC", "Asia/Kathmandu"])
def test_b08_the_zone_of_the_machine_plays_no_part(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same slots for every TZ of the process, also after tzset."""
    set_zone = getattr(time, "tzset", lambda: None)  # Windows has none, and there TZ must not matter either
    monkeypatch.setenv("TZ", machine)
    set_zone()
    try:
        assert Cron("30 1 * * *").next(utc("2022-10-29T12:00Z")) == utc("2022-10-30T01:30Z")
        assert Cron("0 * * * *").next(utc("2025-10-05T02:00Z")) == utc("2025-10-05T03:00Z")
        assert Cron("0 * * * *").latest(utc("2025-10-05T02:59Z")) == utc("2025-10-05T02:00Z")
        assert Cron("30 2 * * *", "America/New_York").next(utc("2026-03-08T06:30Z")) == utc("2026-03-08T07:00Z")
        hours = forward(Cron("0 * * * *"), utc("2025-10-04T00:00Z"), utc("2025-10-06T00:00Z"))
        assert hours == [utc("2025-10-04T00:00Z") + timedelta(hours=n) for n in range(1, 49)]
    finally:
        monkeypatch.undo()
        set_zone()
