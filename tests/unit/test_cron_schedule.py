"""A `Cron` as a value and as a schedule: zones, aware instants, far dates, both ends of time, bounded searches."""

from __future__ import annotations

import copy
import importlib.resources
import pickle
import threading
import time
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from leaselib.errors import ConfigurationError
from leaselib.schedules import Cron, Every, Schedule, _zones

UTC = timezone.utc


def utc(*parts: int) -> datetime:
    """An instant in UTC."""
    return datetime(*parts, tzinfo=UTC)  # type: ignore[misc,arg-type]


def ms(*parts: int) -> int:
    """An instant in UTC as milliseconds since the epoch."""
    return round(utc(*parts).timestamp() * 1_000)


def cpu_s(work: Callable[[], object]) -> float:
    """How long this thread computes for it; what else the machine does is not counted."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


# --- zones -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tz", "words"),
    [
        ("CEST", ["abbreviations", "Europe/Paris"]),
        ("BST", ["abbreviations"]),
        ("PDT", ["abbreviations"]),
        ("europe/paris", ["write tz='Europe/Paris'"]),
        ("EUROPE/PARIS", ["write tz='Europe/Paris'"]),
        ("utc", ["write tz='UTC'"]),
        (" Europe/Paris ", ["write tz='Europe/Paris'"]),
        ("Europe", ["is not a time zone"]),
        ("Europe/", ["is not a time zone"]),
        ("Europe/Pariss", ["did you mean tz='Europe/Paris'?"]),
        ("", ["is not a time zone", "tz='UTC'"]),
        (" ", ["is not a time zone"]),
        ("UTC+2", ["Etc/GMT-2", "the sign is reversed"]),
        ("+02:00", ["Etc/GMT-2"]),
        ("GMT -5", ["Etc/GMT-2"]),
        ("../etc", ["is not a time zone"]),
        ("/etc/localtime", ["is not a time zone"]),
        ("Europe/../Europe/Paris", ["is not a time zone"]),
        ("Europe\\Paris", ["is not a time zone"]),
        ("Europe/Paris\x00", ["is not a time zone"]),
        ("Europe/Paris\n", ["Europe/Paris"]),
        ("\ud800", ["is not a time zone"]),
        ("zone.tab", ["is not a time zone"]),
        ("localtime", ["on each machine", "the zone's own name"]),
        ("posixrules", ["on each machine"]),
        ("right/Europe/Paris", ["on each machine"]),
        ("posix/Europe/Paris", ["on each machine"]),
    ],
)
def test_b16_an_unknown_zone_is_refused_by_name(tz: str, words: list[str]) -> None:
    """At registration, whatever class of error the zone data raises for it."""
    with pytest.raises(ConfigurationError) as refused:
        Cron("0 6 * * *", tz=tz)
    message = str(refused.value)
    assert message.startswith(f"tz={tz!r} ")
    assert not [word for word in words if word not in message], message


def test_b16_a_zone_name_of_300_letters_is_refused_without_repeating_it() -> None:
    """The operating system's complaint about long file names doesn't get through."""
    with pytest.raises(ConfigurationError, match=r"tz='aaaa.*302 characters.* is not a time zone"):
        Cron("0 6 * * *", tz="a" * 300)


@pytest.mark.parametrize(
    ("tz", "words"),
    [
        (None, ["tz=None", "a zone's name", "tz='UTC'"]),
        (2, ["tz=2", "a zone's name"]),
        (b"UTC", ["tz=b'UTC'"]),
        (["UTC"], ["tz=['UTC']"]),
        (timezone(timedelta(hours=2)), ["fixed offset", "Etc/GMT-2"]),
    ],
)
def test_b16_what_is_no_zone_is_refused(tz: object, words: list[str]) -> None:
    """Fixed offsets included: they have no name that a stored schedule could hold."""
    with pytest.raises(ConfigurationError) as refused:
        Cron("0 6 * * *", tz=tz)  # type: ignore[arg-type]
    assert not [word for word in words if word not in str(refused.value)], str(refused.value)


def test_b16_a_zone_without_a_key_is_refused() -> None:
    """A ZoneInfo made from an open file doesn't say which zone it is."""
    with importlib.resources.files("tzdata.zoneinfo.Europe").joinpath("Paris").open("rb") as file:
        nameless = ZoneInfo.from_file(file)
    with pytest.raises(ConfigurationError, match="ZoneInfo with a key"):
        Cron("0 6 * * *", tz=nameless)


def test_b16_the_wrong_case_is_refused_also_where_file_names_ignore_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the data loads under any spelling, and other machines would then refuse what one accepted."""

    class AnyCase(ZoneInfo):
        def __new__(cls, key: str) -> ZoneInfo:  # type: ignore[misc]
            return ZoneInfo(key.title())

    monkeypatch.setattr(_zones, "_CASE_BLIND", True)
    monkeypatch.setattr(_zones, "ZoneInfo", AnyCase)
    with pytest.raises(ConfigurationError, match="write tz='Asia/Manila'"):
        Cron("0 6 * * *", tz="asia/manila")


def test_a_machine_without_zone_data_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """UTC needs none."""
    monkeypatch.setattr(_zones, "_known_names", frozenset)
    with pytest.raises(ConfigurationError, match="install the package tzdata"):
        Cron("0 6 * * *", tz="Europe/Nowhere")
    assert Cron("0 6 * * *", tz="UTC").next(utc(2026, 1, 1)) == utc(2026, 1, 1, 6)


def test_a_zone_may_be_given_by_name_or_as_an_object() -> None:
    """They are the same schedule; UTC is timezone.utc, however it was given."""
    assert Cron("0 6 * * *", ZoneInfo("Europe/Paris")) == Cron("0 6 * * *", "Europe/Paris")
    assert Cron("0 6 * * *", ZoneInfo.no_cache("Europe/Paris")) == Cron("0 6 * * *", "Europe/Paris")
    for given in ("UTC", ZoneInfo("UTC"), UTC, timezone(timedelta(0))):
        assert Cron("0 6 * * *", given).tz is UTC
    assert Cron("0 6 * * *").tz is UTC
    assert str(Cron("0 6 * * *", "Europe/Paris").tz) == "Europe/Paris"


@pytest.mark.parametrize("zone", ["Etc/GMT-2", "Etc/UTC", "EST5EDT", "America/Port-au-Prince", "Asia/Kolkata"])
def test_any_zone_of_the_data_is_accepted(zone: str) -> None:
    """Also those that look odd."""
    slot = Cron("0 6 * * *", zone).next(utc(2026, 1, 1))
    assert slot.astimezone(ZoneInfo(zone)).hour == 6


# --- instants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [Cron("0 0 10 * *"), Cron("0 0 10 * *", "Europe/Paris"), Every(300)], ids=repr)
@pytest.mark.parametrize(
    "instant", [datetime(2019, 1, 1), date(2019, 1, 1), 1546300800, 1546300800.0, "2019-01-01T00:00Z", None]
)
def test_b16_an_instant_without_a_zone_is_refused(schedule: Schedule, instant: object) -> None:
    """By next and by latest, saying 'aware'."""
    for method in (schedule.next, schedule.latest):
        with pytest.raises(ConfigurationError, match=rf"{method.__name__}\(\) was given .*aware datetime"):
            method(instant)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", [Cron("0 0 10 * *", "Asia/Tokyo"), Every(300)], ids=repr)
def test_b16_answers_are_aware_and_in_utc(schedule: Schedule) -> None:
    """Whatever zone the question was in."""
    for zone in (UTC, ZoneInfo("America/New_York"), timezone(timedelta(hours=5, minutes=45))):
        instant = datetime(2019, 1, 1, 12, tzinfo=zone)
        latest = schedule.latest(instant)
        assert latest is not None
        assert schedule.next(instant).tzinfo is UTC
        assert latest.tzinfo is UTC
        assert latest <= instant < schedule.next(instant)


def test_parts_of_a_millisecond_are_not_lost() -> None:
    """next is strictly after to the microsecond, latest at or before."""
    schedule, tick = Cron("0 6 * * *"), timedelta(microseconds=1)
    slot, before = utc(2026, 1, 2, 6), utc(2026, 1, 1, 6)
    assert schedule.next(slot - tick) == slot
    assert schedule.next(slot) == schedule.next(slot + tick) == utc(2026, 1, 3, 6)
    assert schedule.latest(slot - tick) == before
    assert schedule.latest(slot) == schedule.latest(slot + tick) == slot
    assert schedule.next_ms(ms(2026, 1, 2, 6) - 1) == ms(2026, 1, 2, 6)
    assert schedule.next_ms(ms(2026, 1, 2, 6)) == ms(2026, 1, 3, 6)
    assert schedule.latest_ms(ms(2026, 1, 2, 6) - 1) == ms(2026, 1, 1, 6)
    assert schedule.latest_ms(ms(2026, 1, 2, 6)) == schedule.latest_ms(ms(2026, 1, 2, 6) + 1) == ms(2026, 1, 2, 6)


# --- far dates, ends of time, bounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("zone", ["UTC", "Europe/Paris"])
def test_b11_29_february_is_found_from_the_day_itself_and_across_2100(zone: str) -> None:
    """2100 is no leap year, so eight years pass without."""
    local = ZoneInfo(zone)
    schedule = Cron("0 9 29 2 *", zone)

    def at(year: int, month: int, day: int, hour: int) -> datetime:
        return datetime(year, month, day, hour, tzinfo=local)

    assert schedule.next(at(2016, 2, 29, 9)) == at(2020, 2, 29, 9)
    assert schedule.next(at(2016, 2, 29, 8)) == at(2016, 2, 29, 9)
    assert schedule.latest(at(2024, 2, 29, 8)) == at(2020, 2, 29, 9)
    assert schedule.latest(at(2024, 2, 29, 9)) == at(2024, 2, 29, 9)
    assert schedule.next(at(2096, 3, 1, 0)) == at(2104, 2, 29, 9)
    assert schedule.latest(at(2104, 2, 29, 8)) == at(2096, 2, 29, 9)


@pytest.mark.parametrize(
    ("expression", "after", "slot", "following"),
    [
        ("0 0 29 2 *", (2196, 3, 1), (2204, 2, 29), (2208, 2, 29)),
        ("0 0 29 2 */7", (2026, 1, 1), (2032, 2, 29), (2060, 2, 29)),
        ("0 0 29 2 */7", (2088, 3, 1), (2128, 2, 29), (2156, 2, 29)),
        ("0 0 * 2 1#5", (2026, 1, 1), (2044, 2, 29), (2072, 2, 29)),
        ("0 0 */30 12 5#5", (2026, 1, 1), (2027, 12, 31), (2032, 12, 31)),
        ("59 59 23 31 12 *", (2026, 12, 31, 23, 59, 59), (2027, 12, 31, 23, 59, 59), (2028, 12, 31, 23, 59, 59)),
    ],
)
@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_b11_rare_dates_are_found_both_ways_in_a_moment(
    expression: str, after: tuple[int, ...], slot: tuple[int, ...], following: tuple[int, ...], zone: str
) -> None:
    """However many years lie between."""
    schedule, local = Cron(expression, zone), ZoneInfo(zone)
    first, second = (datetime(*parts, tzinfo=local) for parts in (slot, following))  # type: ignore[misc,arg-type]
    started = datetime(*after, tzinfo=local)  # type: ignore[misc,arg-type]
    assert schedule.next(started) == first
    assert schedule.next(first) == second
    assert schedule.latest(second - timedelta(microseconds=1)) == first
    assert cpu_s(lambda: (schedule.next(started), schedule.latest(second))) < 0.1


@pytest.mark.parametrize(
    ("expression", "zone"),
    [
        ("0 0 29 2 */7", "UTC"),
        ("0 0 29 2 */7", "America/New_York"),
        ("*/15 * 29 2 */7", "America/New_York"),
        ("*/15 2 29 2 */7", "Asia/Beirut"),
        ("* * * * * *", "Europe/Paris"),
        ("0 0 L 2 5#5", "Antarctica/Troll"),
    ],
)
def test_a_search_is_bounded_from_wherever_it_starts(expression: str, zone: str) -> None:
    """Also from the year 1, from 9998, and with zone data not looked at before."""
    _zones._changes.cache_clear()
    schedule = Cron(expression, zone)
    for year in (1, 1582, 1899, 1970, 2026, 2400, 9900):
        instant = utc(year, 3, 1)
        assert cpu_s(lambda: (schedule.next(instant), schedule.latest(instant))) < 0.5, year  # noqa: B023


def test_b10_a_time_that_each_clock_change_skips_is_refused() -> None:
    """Quarter hours of 2 o'clock on the Sunday of March that has none; at a fixed time it is due at the gap's end."""
    _zones._changes.cache_clear()
    started = time.thread_time()
    with pytest.raises(ConfigurationError, match=r"'\*/15 2 \* 3 0#2'.*never come in America/New_York"):
        Cron("*/15 2 * 3 0#2", "America/New_York")
    assert time.thread_time() - started < 1.0
    fixed = Cron("15 2 * 3 0#2", "America/New_York")
    assert fixed.next(utc(2026, 1, 1)) == utc(2026, 3, 8, 7)
    assert Cron("*/15 2 * 3 0#2", "UTC").next(utc(2026, 1, 1)) == utc(2026, 3, 8, 2)


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "Etc/GMT+12", "America/New_York"])
@pytest.mark.parametrize("expression", ["0 0 * * *", "* * * * *", "0 0 29 2 *"])
def test_slots_end_with_the_year_9998_and_begin_in_the_year_1(expression: str, zone: str) -> None:
    """No question overflows, and the two directions agree at the ends too."""
    schedule = Cron(expression, zone)
    end, start = utc(9999, 1, 1), utc(1, 1, 3)
    last = schedule.latest(datetime.max.replace(tzinfo=UTC))
    assert last is not None
    assert last < end
    assert schedule.latest(last) == last
    assert schedule.next_ms(round((last - utc(1970, 1, 1)) / timedelta(milliseconds=1))) is None
    with pytest.raises(OverflowError, match="year 9999"):
        schedule.next(last)
    with pytest.raises(OverflowError, match="year 9999"):
        schedule.next(datetime.max.replace(tzinfo=UTC))
    first = schedule.next(datetime.min.replace(tzinfo=UTC))
    assert first >= start
    assert schedule.latest(first) == first
    assert schedule.latest(first - timedelta(microseconds=1)) is None
    assert schedule.latest(datetime.min.replace(tzinfo=UTC)) is None
    assert schedule.next_ms(-(10**18)) is not None
    assert schedule.next_ms(10**18) is schedule.latest_ms(-(10**18)) is None


def test_slots_before_1970_are_found_too() -> None:
    """With the offsets of their time, to the second: Paris was 9 min 21 s ahead until 1911."""
    assert Cron("0 12 * * *", "Europe/Paris").next(utc(1900, 1, 1)) == utc(1900, 1, 1, 11, 50, 39)
    assert Cron("0 12 * * *").latest(utc(1969, 7, 20)) == utc(1969, 7, 19, 12)


# --- counting --------------------------------------------------------------------------------------------------------


def test_counting_includes_both_ends_and_stops_at_the_limit() -> None:
    """What a scheduler asks after a pause: how many were missed."""
    schedule = Cron("*/15 * * * *")
    noon, one = ms(2026, 1, 1, 12), ms(2026, 1, 1, 13)
    assert schedule.count_ms(noon, one, 100) == 5
    assert schedule.count_ms(noon + 1, one - 1, 100) == 3
    assert schedule.count_ms(noon, noon, 100) == 1
    assert schedule.count_ms(noon + 1, noon + 2, 100) == 0
    assert schedule.count_ms(one, noon, 100) == 0
    assert schedule.count_ms(noon, one, 3) == 3
    assert schedule.count_ms(noon, one, 0) == 0
    assert schedule.count_ms(0, 10**18, 1_000) == 1_000
    assert Cron("0 0 29 2 *").count_ms(ms(2000, 1, 1), ms(2400, 1, 1), 1_000) == 97


def test_counting_follows_the_zone() -> None:
    """23 and 25 hours; a fixed time in the gap or the repeated hour counts once."""
    spring, autumn = (ms(2026, 3, 28, 23), ms(2026, 3, 29, 22) - 1), (ms(2026, 10, 24, 22), ms(2026, 10, 25, 23) - 1)
    assert Cron("0 * * * *", "Europe/Paris").count_ms(*spring, 100) == 23
    assert Cron("0 * * * *", "Europe/Paris").count_ms(*autumn, 100) == 25
    assert Cron("30 2 * * *", "Europe/Paris").count_ms(*spring, 100) == 1
    assert Cron("30 2 * * *", "Europe/Paris").count_ms(*autumn, 100) == 1


def test_b29_a_changed_schedule_has_its_next_slot_where_the_new_one_says() -> None:
    """At 14:00, changed from hourly to 09:30: nothing is due before tomorrow's 09:30, and today's is long past."""
    new, old, now = Cron("30 9 * * *"), Cron("0 * * * *"), utc(2026, 5, 4, 14)
    assert new.next(now) == utc(2026, 5, 5, 9, 30)
    assert new.latest(now) == utc(2026, 5, 4, 9, 30)
    assert old.latest(now) == now


# --- a schedule as a value -------------------------------------------------------------------------------------------


def test_schedules_are_equal_by_expression_and_zone() -> None:
    """Blanks don't count, zones do, and an interval is never a cron expression."""
    one = Cron("0 6 * * *", "Europe/Paris")
    same = Cron("  0  6 * * * ", "Europe/Paris")
    assert one == same
    assert hash(one) == hash(same)
    assert one.expression == same.expression == "0 6 * * *"
    assert len({one, same, Cron("0 6 * * *"), Cron("1 6 * * *", "Europe/Paris"), Every(1)}) == 4
    assert one != Cron("0 6 * * *", "Europe/Berlin")
    assert one != "0 6 * * *"
    assert Cron("0 0 * * *") != Every(days=1)


def test_a_schedule_cannot_be_changed() -> None:
    """So that threads may share it, and sets may hold it."""
    schedule = Cron("0 6 * * *")
    for name in ("expression", "tz", "_walls", "other"):
        with pytest.raises(AttributeError, match="never changes"):
            setattr(schedule, name, "x")
    with pytest.raises(AttributeError, match="never changes"):
        del schedule.expression
    assert schedule == Cron("0 6 * * *")


def test_a_schedule_can_be_copied_and_pickled() -> None:
    """Worker processes get an equal one, whose answers are the same."""
    for schedule in (Cron("*/5 * * * * *", "Australia/Lord_Howe"), Cron("@daily"), Cron("0 0 L * 5#2", UTC)):
        for twin in (pickle.loads(pickle.dumps(schedule)), copy.copy(schedule), copy.deepcopy(schedule)):
            assert twin == schedule
            assert twin.next(utc(2026, 1, 1)) == schedule.next(utc(2026, 1, 1))
            assert twin.tz is schedule.tz


def test_a_schedule_says_what_it_is() -> None:
    """In tables, and in a debugger."""
    assert Cron("0 6 * * *", "Europe/Paris").describe() == "cron '0 6 * * *' Europe/Paris"
    assert Cron("@daily").describe() == "cron '@daily' UTC"
    assert repr(Cron("0 6 * * *")) == "<cron '0 6 * * *' UTC>"


def test_threads_share_a_schedule_without_disturbing_each_other() -> None:
    """Eight threads walk the same schedules at once, each finding what one alone finds; the zone data is new to all."""
    schedules = [Cron(e, z) for e in ("*/7 * * * *", "30 1,2,3 * * *") for z in ("Europe/Paris", "America/Havana")]

    def walk() -> list[datetime]:
        found = []
        for schedule in schedules:
            at = utc(2026, 3, 1)
            for _ in range(300):
                at = schedule.next(at)
                found.append(at)
                assert schedule.latest(at) == at
        return found

    alone = walk()
    _zones._changes.cache_clear()
    results: list[list[datetime]] = []
    ready = threading.Barrier(8)

    def run() -> None:
        ready.wait()
        results.append(walk())

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [alone] * 8


def test_every_week_long_summer_time_of_the_zone_data_is_seen() -> None:
    """No zone has two changes so close together that the search for changes steps over both."""
    for key in ("America/Boa_Vista", "America/Noronha", "Asia/Gaza", "Africa/Freetown"):
        zone = ZoneInfo(key)
        for first_year, last_year in ((1939, 1940), (2000, 2001), (2040, 2041)):
            hour, end = utc(first_year, 1, 1), utc(last_year, 1, 1)
            while hour < end:
                at_s = round(hour.timestamp())
                offset = hour.astimezone(zone).utcoffset()
                assert offset is not None
                stretch = _zones.stretch_at(zone, at_s)
                assert stretch.start_s <= at_s < stretch.end_s
                assert timedelta(seconds=stretch.offset_s) == offset, (key, hour)
                hour += timedelta(hours=6)
