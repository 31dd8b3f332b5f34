"""Intervals: which are accepted, where their slots lie, and what is refused with which words."""

from __future__ import annotations

import copy
import pickle
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leaselib.errors import ConfigurationError
from leaselib.schedules import Every

UTC = timezone.utc
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("every", "interval_ms"),
    [
        (Every(300), 300_000),
        (Every(0.25), 250),
        (Every(0.001), 1),
        (Every(timedelta(minutes=5)), 300_000),
        (Every(timedelta(microseconds=1_000)), 1),
        (Every(seconds=1.5), 1_500),
        (Every(minutes=5), 300_000),
        (Every(hours=2), 7_200_000),
        (Every(days=1), 86_400_000),
        (Every(days=1, hours=2, minutes=3, seconds=4.005), 93_784_005),
        (Every(minutes=5, seconds=0), 300_000),
        # Binary fractions that were meant as whole milliseconds.
        (Every(1.1), 1_100),
        (Every(0.1 + 0.2), 300),
        (Every(2.675), 2_675),
        (Every(minutes=1 / 3), 20_000),
        (Every(days=0.1), 8_640_000),
        (Every(1_000_000.001), 1_000_000_001),
        (Every(1.000_000_9), 1_000),
        (Every(seconds=0.1, minutes=0.7), 42_100),
        # As long as a timedelta may be.
        (Every(timedelta.max // timedelta(milliseconds=1) * timedelta(milliseconds=1)), 86_399_999_999_999_999),
        (Every(days=999_999_999), 86_399_999_913_600_000),
    ],
)
def test_an_interval_is_whole_milliseconds(every: Every, interval_ms: int) -> None:
    """Whatever way it was written, and keywords add up."""
    assert every.interval_ms == interval_ms
    assert type(every.interval_ms) is int


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        (True, ["every(True)", "found bool", "every(seconds=5)"]),
        (False, ["found bool"]),
        ("300", ["every('300')", "found str"]),
        (b"300", ["found bytes"]),
        ([300], ["found list"]),
        (Decimal(300), ["found Decimal"]),
        (Fraction(300), ["found Fraction"]),
        (3 + 0j, ["found complex"]),
        (float("nan"), ["every(nan)", "finite"]),
        (float("inf"), ["every(inf)", "finite"]),
        (float("-inf"), ["finite"]),
        (0, ["every(0)", "above zero", "0.001"]),
        (0.0, ["above zero"]),
        (-0.0, ["above zero"]),
        (-1, ["every(-1)", "negative", "above zero"]),
        (-0.001, ["negative"]),
        (0.0001, ["under 1 ms", "0.001"]),
        (1e-9, ["under 1 ms"]),
        (5e-324, ["under 1 ms"]),
        (0.0015, ["not a whole number of milliseconds", "write every(0.002)"]),
        (1.0004, ["not a whole number of milliseconds", "write every(1.0)"]),
        (1.00001, ["not a whole number of milliseconds"]),
        (1e300, ["longer than a timedelta holds"]),
        (10**400, ["longer than a timedelta holds"]),
        pytest.param(10**5000, ["longer than a timedelta holds"], id="an int that has no repr"),
        (86_400 * 10**9, ["longer than a timedelta holds", "999999999 days"]),
        (timedelta(0), ["above zero", "timedelta(milliseconds=1)"]),
        (timedelta(seconds=-1), ["above zero"]),
        (timedelta.min, ["above zero"]),
        (timedelta(microseconds=1), ["not a whole number of milliseconds", "timedelta(milliseconds=1)"]),
        (timedelta(microseconds=1_500), ["not a whole number of milliseconds", "timedelta(milliseconds=1)"]),
        (timedelta(seconds=1, microseconds=1), ["timedelta(milliseconds=1000)"]),
        (timedelta.max, ["not a whole number of milliseconds"]),
    ],
)
def test_what_is_no_interval_is_refused_with_what_to_write_instead(interval: object, words: list[str]) -> None:
    """In a message of a readable length."""
    with pytest.raises(ConfigurationError) as refused:
        Every(interval)  # type: ignore[arg-type]
    message = str(refused.value)
    assert not [word for word in words if word not in message], message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"minutes": True}, ["minutes=True", "found bool", "every(minutes=5)"]),
        ({"hours": "2"}, ["hours='2'", "found str", "number of hours"]),
        ({"seconds": timedelta(1)}, ["found timedelta"]),
        ({"days": float("nan")}, ["days=nan", "finite"]),
        ({"minutes": 5, "seconds": -30}, ["seconds=-30", "negative"]),
        ({"minutes": 0, "seconds": 0}, ["every(seconds=0, minutes=0)", "above zero"]),
        ({"hours": 1 / 7}, ["not a whole number of milliseconds", "write every(514.286)"]),
        ({"days": 10**9}, ["longer than a timedelta holds"]),
    ],
)
def test_keywords_are_checked_one_by_one(keywords: dict[str, float], words: list[str]) -> None:
    """The one at fault is named."""
    with pytest.raises(ConfigurationError) as refused:
        Every(**keywords)
    assert not [word for word in words if word not in str(refused.value)], str(refused.value)


def test_an_interval_is_given_once() -> None:
    """By position or by keywords, not both, not neither."""
    with pytest.raises(ConfigurationError, match="no interval: write every"):
        Every()
    with pytest.raises(ConfigurationError, match="both 300 and seconds, minutes: write one or the other"):
        Every(300, minutes=5, seconds=0)
    with pytest.raises(ConfigurationError, match="both"):
        Every(timedelta(1), days=1)


def test_b17_each_slot_is_a_whole_multiple_since_the_epoch() -> None:
    """(a) However late the question comes, no slot moves: twenty runs of 0.7 s each, every two seconds."""
    every, now = Every(2), datetime(2026, 1, 1, 0, 0, 0, 300_000, tzinfo=UTC)
    for number in range(1, 21):
        slot = every.next(now)
        assert slot == datetime(2026, 1, 1, 0, 0, tzinfo=UTC) + timedelta(seconds=2 * number)
        now = slot + timedelta(seconds=0.7, microseconds=number)


def test_b17_two_hours_are_two_real_hours_over_a_clock_change() -> None:
    """(b) New York loses an hour on 8 March 2026."""
    asked = datetime(2026, 3, 8, 1, 30, tzinfo=ZoneInfo("America/New_York"))
    every = Every(hours=2)
    assert every.next(asked) == datetime(2026, 3, 8, 8, tzinfo=UTC)
    assert every.next(every.next(asked)) == datetime(2026, 3, 8, 10, tzinfo=UTC)
    assert every.latest(asked) == datetime(2026, 3, 8, 6, tzinfo=UTC)


def test_b17_instances_started_apart_name_the_same_slots() -> None:
    """(c) 0.9 s apart, and each with an object of its own."""
    start = datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert Every(2).next(start) == Every(seconds=2).next(start + timedelta(seconds=0.9))
    assert Every(7).next(start) == Every(timedelta(seconds=7)).next(start + timedelta(seconds=0.9))


def test_parts_of_a_millisecond_are_not_lost() -> None:
    """next is strictly after to the microsecond, latest at or before."""
    every, tick = Every(0.005), timedelta(microseconds=1)
    slot = EPOCH + timedelta(milliseconds=10)
    assert every.next(slot - tick) == slot
    assert every.next(slot) == every.next(slot + tick) == slot + timedelta(milliseconds=5)
    assert every.latest(slot - tick) == slot - timedelta(milliseconds=5)
    assert every.latest(slot) == every.latest(slot + tick) == slot


@given(st.integers(1, 10**11), st.integers(-(10**13), 10**14))
def test_next_and_latest_are_the_multiples_on_both_sides(interval_ms: int, at_ms: int) -> None:
    """Before 1970 as well."""
    every = Every(timedelta(milliseconds=interval_ms))
    after_ms, before_ms = every.next_ms(at_ms), every.latest_ms(at_ms)
    assert after_ms is not None
    assert before_ms is not None
    assert before_ms <= at_ms < after_ms
    assert after_ms - before_ms == interval_ms
    assert after_ms % interval_ms == 0
    assert every.latest_ms(after_ms) == after_ms
    assert every.next_ms(before_ms) == after_ms


@given(st.integers(1, 50), st.integers(-500, 500), st.integers(-500, 500), st.integers(0, 200))
def test_counting_finds_as_many_as_walking_does(interval_ms: int, first_ms: int, last_ms: int, limit: int) -> None:
    """Both ends included, up to the limit."""
    walked = sum(1 for at_ms in range(first_ms, last_ms + 1) if at_ms % interval_ms == 0)
    every = Every(timedelta(milliseconds=interval_ms))
    assert every.count_ms(first_ms, last_ms, limit) == min(walked, limit)


def test_counting_takes_no_time_however_many_there_are() -> None:
    """Ten years of milliseconds; and questions beyond both ends of time."""
    ten_years_ms = 10 * 365 * 86_400_000
    assert Every(0.001).count_ms(0, ten_years_ms - 1, 10**15) == ten_years_ms
    assert Every(0.001).count_ms(-(10**18), 10**18, 5) == 5
    assert Every(days=1).count_ms(-(10**18), 10**18, 10**9) == (datetime(9999, 1, 1) - datetime(1, 1, 3)).days


def test_slots_end_with_the_year_9998_and_begin_in_the_year_1() -> None:
    """No question overflows, also for the longest interval, whose one slot was the epoch."""
    for every in (Every(0.001), Every(7), Every(days=30)):
        last = every.latest(datetime.max.replace(tzinfo=UTC))
        assert last is not None
        assert datetime(9998, 11, 1, tzinfo=UTC) < last < datetime(9999, 1, 1, tzinfo=UTC)
        with pytest.raises(OverflowError, match="year 9999"):
            every.next(last)
        first = every.next(datetime.min.replace(tzinfo=UTC))
        assert datetime(1, 1, 3, tzinfo=UTC) <= first < datetime(1, 3, 1, tzinfo=UTC)
        assert every.latest(first) == first
        assert every.latest(first - timedelta(microseconds=1)) is None
    longest = Every(days=999_999_999)
    assert longest.next_ms(0) is None
    assert longest.next(datetime(1969, 1, 1, tzinfo=UTC)) == EPOCH
    assert longest.latest(datetime(2026, 1, 1, tzinfo=UTC)) == EPOCH
    assert longest.latest_ms(-1) is None


def test_intervals_are_equal_by_length() -> None:
    """However they were written."""
    assert Every(300) == Every(minutes=5) == Every(timedelta(minutes=5))
    assert hash(Every(300)) == hash(Every(minutes=5))
    assert Every(300) != Every(301)
    assert Every(300) != 300
    assert len({Every(300), Every(minutes=5), Every(1)}) == 2


def test_an_interval_cannot_be_changed() -> None:
    """So that threads may share it."""
    every = Every(300)
    with pytest.raises(AttributeError, match="never changes"):
        every.interval_ms = 1
    with pytest.raises(AttributeError, match="never changes"):
        del every.tz
    assert every == Every(300)


def test_an_interval_can_be_copied_and_pickled() -> None:
    """Worker processes get an equal one."""
    for every in (Every(0.001), Every(300), Every(days=999_999_999)):
        for twin in (pickle.loads(pickle.dumps(every)), copy.copy(every), copy.deepcopy(every)):
            assert twin == every
            assert twin.tz is UTC


@pytest.mark.parametrize(
    ("every", "text"),
    [
        (Every(300), "every 5 min"),
        (Every(90), "every 90 s"),
        (Every(1.5), "every 1.5 s"),
        (Every(1.001), "every 1.001 s"),
        (Every(0.25), "every 250 ms"),
        (Every(minutes=90), "every 90 min"),
        (Every(hours=36), "every 36 h"),
        (Every(days=7), "every 7 d"),
    ],
)
def test_an_interval_says_what_it_is(every: Every, text: str) -> None:
    """In the largest unit that holds it whole."""
    assert every.describe() == text
    assert repr(every) == f"<{text}>"
    assert every.tz is UTC
