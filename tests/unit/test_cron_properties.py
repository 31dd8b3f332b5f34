"""Properties that hold for every accepted expression, zone and instant, and agreement with two other opinions.

The first other opinion is a simulation of Vixie cron's own loop (`cron_oracle`), around clock changes and anywhere
else; the second is cronsim, which is right as long as no clock changes.
"""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import cron_oracle
from cronsim import CronSim
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from leaselib.errors import ConfigurationError
from leaselib.schedules import Cron

UTC = timezone.utc

# Zone and day of clock changes of every kind: of an hour at each time of night, of 15, 30 and 45 minutes, of two and
# three hours, over the date line, over midnight, and a summer time of one week.
CHANGES = [
    ("America/New_York", 2026, 3, 8),
    ("America/New_York", 2026, 11, 1),
    ("Europe/London", 2026, 3, 29),
    ("Europe/London", 2026, 10, 25),
    ("Europe/Paris", 2026, 3, 29),
    ("Europe/Paris", 2026, 10, 25),
    ("Europe/Helsinki", 2017, 10, 29),
    ("Europe/Dublin", 2026, 10, 25),
    ("Australia/Lord_Howe", 2019, 4, 7),
    ("Australia/Lord_Howe", 2019, 10, 6),
    ("America/Santiago", 2026, 4, 5),
    ("America/Santiago", 2026, 9, 6),
    ("Asia/Beirut", 2026, 3, 29),
    ("Asia/Beirut", 2026, 10, 25),
    ("America/Havana", 2026, 3, 8),
    ("America/Havana", 2026, 11, 1),
    ("America/Sao_Paulo", 2018, 2, 18),
    ("Atlantic/Azores", 2026, 3, 29),
    ("Asia/Tehran", 2021, 9, 22),
    ("Africa/Cairo", 2026, 4, 24),
    ("Africa/Casablanca", 2026, 2, 15),
    ("Asia/Kathmandu", 1986, 1, 1),
    ("America/Caracas", 2007, 12, 9),
    ("America/Caracas", 2016, 5, 1),
    ("America/St_Johns", 2010, 11, 7),
    ("Antarctica/Troll", 2026, 3, 29),
    ("Antarctica/Troll", 2026, 10, 25),
    ("Antarctica/Casey", 2009, 10, 18),
    ("Antarctica/Casey", 2010, 3, 5),
    ("America/Boa_Vista", 2000, 10, 8),
    ("Pacific/Apia", 2011, 12, 30),
    ("Pacific/Chatham", 2026, 4, 5),
    ("Asia/Gaza", 2040, 10, 20),
]
ZONES = [*sorted({change[0] for change in CHANGES}), "UTC", "Asia/Tokyo", "Asia/Kolkata", "Etc/GMT+12"]


def field(low: int, high: int, names: tuple[str, ...] = ()) -> st.SearchStrategy[str]:
    """A field of every accepted form, `*` and its steps more often than their share."""
    number = st.integers(low, high)
    span = st.tuples(number, number).filter(lambda ends: ends[0] != ends[1])
    rising = span.map(lambda ends: tuple(sorted(ends)))
    step = st.integers(1, high - low + 1)
    items = [
        number.map(str),
        span.map(lambda ends: f"{ends[0]}-{ends[1]}"),
        st.tuples(rising, step).map(lambda given: f"{given[0][0]}-{given[0][1]}/{given[1]}"),
        st.tuples(st.integers(low, high - 1), step).map(lambda given: f"{given[0]}/{given[1]}"),
        step.map(lambda every: f"*/{every}"),
    ]
    if names:
        items.append(st.sampled_from(names))
    some = st.lists(st.one_of(items), min_size=1, max_size=3).map(",".join)
    return st.one_of(st.just("*"), step.map(lambda every: f"*/{every}"), number.map(str), some)


def meets_sunday(text: str) -> bool:
    """Whether a list of weekdays has an open step that arrives at 7, which is refused."""
    starts = [item.split("/") for item in text.split(",") if item[0].isdigit() and "/" in item and "-" not in item]
    return any(first != "0" and (7 - int(first)) % int(step) == 0 for first, step in starts)


SECONDS, MINUTES = field(0, 59), field(0, 59)
HOURS = st.one_of(field(0, 23), st.sampled_from(["0", "1", "2", "3", "1-3", "0-23", "2,3", "*/2", "23"]))
DAYS = st.one_of(st.just("*"), st.just("?"), field(1, 31), st.sampled_from(["L", "1,L", "15-L", "L,13"]))
MONTHS = st.one_of(st.just("*"), field(1, 12, ("jan", "MAR", "Oct", "jul-SEP")))
NTH = st.tuples(st.sampled_from(["0", "1", "FRI", "sat", "7", "3"]), st.integers(1, 5)).map(lambda g: f"{g[0]}#{g[1]}")
WEEKDAYS = st.one_of(
    st.just("*"),
    field(0, 6, ("sun", "MON", "Fri", "mon-FRI", "sat-sun")).filter(lambda text: not meets_sunday(text)),
    st.sampled_from(["7", "5-7", "0-7", "1-7/2", "L5", "L0,L3", "*/2", "L7,1#1"]),
    NTH,
)
FIVE = st.tuples(MINUTES, HOURS, DAYS, MONTHS, WEEKDAYS).map(" ".join)
SIX = st.tuples(SECONDS, MINUTES, HOURS, DAYS, MONTHS, WEEKDAYS).map(" ".join)
# Due every day, so that a short window around a clock change has slots.
DAILY_FIVE = st.tuples(MINUTES, HOURS).map(lambda given: " ".join((*given, "* * *")))
DAILY_SIX = st.tuples(SECONDS, MINUTES, HOURS).map(lambda given: " ".join((*given, "* * *")))
INSTANTS = st.datetimes(datetime(1971, 1, 1), datetime(2300, 1, 1), timezones=st.just(UTC))

checks = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def made(expression: str, zone: str) -> Cron:
    """The schedule; expressions that never come are none."""
    try:
        return Cron(expression, zone)
    except ConfigurationError as error:
        assume("never come" not in str(error))
        raise


def near(change: tuple[str, int, int, int], offset_s: int) -> datetime:
    """An instant so many seconds from noon, UTC, on the day of a change."""
    return datetime(*change[1:], 12, tzinfo=UTC) + timedelta(seconds=offset_s)


def check_window(expression: str, zone: str, start: datetime, settled: datetime, end: datetime) -> None:
    """Compares both walks over (start, end] with the simulation, which begins at `settled`."""
    schedule = made(expression, zone)
    expected = [slot for slot in cron_oracle.slots(expression, zone, settled, end) if slot > start]
    forward, at = [], start
    while (at := schedule.next(at)) <= end:
        forward.append(at)
    assert forward == expected
    backward: list[datetime] = []
    before = schedule.latest(end)
    while before is not None and before > start:
        backward.append(before)
        before = schedule.latest(before - timedelta(microseconds=1))
    assert backward[::-1] == expected


@checks
@given(st.one_of(FIVE, SIX), st.sampled_from(ZONES), INSTANTS)
def test_next_is_later_and_latest_finds_it_again(expression: str, zone: str, instant: datetime) -> None:
    """next is strictly after its question, latest at or before; each is the other's inverse."""
    schedule = made(expression, zone)
    slot = schedule.next(instant)
    assert slot > instant
    assert schedule.latest(slot) == slot
    assert schedule.next(slot - timedelta(microseconds=1)) == slot
    before = schedule.latest(instant)
    assert before is not None
    assert before <= instant
    assert schedule.next(before) == slot
    assert schedule.latest(slot - timedelta(microseconds=1)) == before


@checks
@given(st.one_of(DAILY_FIVE, FIVE), st.sampled_from(CHANGES), st.integers(-30 * 3600, 20 * 3600))
def test_around_a_clock_change_the_slots_are_vixie_crons(
    expression: str, change: tuple[str, int, int, int], offset_s: int
) -> None:
    """Asked from any second, also within the gap and both passes."""
    start = near(change, offset_s)
    settled = near(change, -60 * 3600)
    check_window(expression, change[0], start, settled, near(change, 30 * 3600))


@settings(checks, max_examples=40)
@given(DAILY_SIX, st.sampled_from(CHANGES), st.integers(-2 * 3600, 3600))
def test_with_seconds_the_slots_are_vixie_crons_too(
    expression: str, change: tuple[str, int, int, int], offset_s: int
) -> None:
    """A cron that looked every second would do the same; six hours around the change itself."""
    zone = ZoneInfo(change[0])
    hours = [near(change, hour * 3600) for hour in range(-30, 31)]
    middle = next(b for a, b in itertools.pairwise(hours) if offset(a, zone) != offset(b, zone))
    start = middle + timedelta(seconds=offset_s)
    check_window(expression, change[0], start, middle - timedelta(hours=4), middle + timedelta(hours=4))


def offset(at: datetime, zone: ZoneInfo) -> timedelta | None:
    """The zone's offset from UTC at an instant."""
    return at.astimezone(zone).utcoffset()


@checks
@given(FIVE, st.sampled_from(ZONES), INSTANTS)
def test_anywhere_else_the_slots_are_vixie_crons(expression: str, zone: str, instant: datetime) -> None:
    """Two days at any time, in any zone."""
    start = instant.replace(second=0, microsecond=0)
    before = [start - timedelta(hours=hours) for hours in range(0, 54, 3)]
    assume(len({offset(at, ZoneInfo(zone)) for at in before}) == 1)  # the simulation can't start in a second pass
    check_window(expression, zone, start, start - timedelta(minutes=1), start + timedelta(days=2))


CRONSIM_DAYS = st.one_of(st.just("*"), field(1, 31).filter(lambda text: not wraps(text)), st.just("L"))
CRONSIM_WEEKDAYS = st.one_of(
    st.sampled_from(["*", "L5", "5-7", "0-7", "1-7/2", "7"]),
    field(0, 6).filter(lambda text: not wraps(text) and not meets_sunday(text)),
    NTH,
)


def wraps(text: str) -> bool:
    """Whether a field has a range that goes round, which cronsim doesn't read."""
    ends = [item.partition("/")[0].split("-") for item in text.split(",") if "-" in item]
    return any(int(first) > int(last) for first, last in ends)


@checks
@given(
    MINUTES.filter(lambda text: not wraps(text)), CRONSIM_DAYS, st.sampled_from(["*", "2", "*/3", "4-9"]),
    CRONSIM_WEEKDAYS, INSTANTS,
)  # fmt: skip
def test_without_clock_changes_cronsim_finds_the_same_slots(
    minute: str, day: str, month: str, weekday: str, instant: datetime
) -> None:
    """Far dates too: cronsim walks on to the next match however long it takes; both ways."""
    instant = instant.replace(second=0, microsecond=0)  # its versions differ in what they make of parts of a minute
    expression = f"{minute} 5,17 {day} {month} {weekday}"
    schedule = made(expression, "UTC")
    theirs = f"{minute} 5,17 {day} {month} {weekday.replace('L5', '5L')}"
    ahead = CronSim(theirs, instant.replace(tzinfo=None))
    back = CronSim(theirs, instant.replace(tzinfo=None), reverse=True)
    after, before = instant, schedule.latest(instant - timedelta(microseconds=1))
    for _ in range(4):
        after = schedule.next(after)
        assert after.replace(tzinfo=None) == next(ahead)
        assert before is not None
        assert before.replace(tzinfo=None) == next(back)
        before = schedule.latest(before - timedelta(microseconds=1))
