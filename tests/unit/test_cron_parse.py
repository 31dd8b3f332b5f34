"""Which cron expressions are accepted and what they mean; which are refused, and with which words."""

from __future__ import annotations

import time
from datetime import datetime, timezone

import cron_oracle
import croniter
import pytest

from leaselib.errors import ConfigurationError
from leaselib.schedules import Cron
from leaselib.schedules._cron_parse import parse

UTC = timezone.utc

# Each with words that its message must hold, beside the expression itself.
REFUSED = {
    # What would be another slot on each instance.
    "R R * * *": ["'R'", "each instance", "minute"],
    "R(0-10) * * * *": ["each instance", "write a fixed one, such as 17"],
    "0 r * * *": ["each instance", "hour"],
    "H H * * *": ["'H'", "each instance"],
    "H/15 * * * *": ["each instance"],
    "0 h(0-6) * * *": ["each instance"],
    "5,H * * * *": ["each instance"],
    # How many fields.
    "": ["empty", "'0 6 * * *'"],
    "   ": ["empty", "five fields"],
    "* * * *": ["4 fields", "expected five", "minute, hour, day of month, month, day of week"],
    "5": ["1 field;", "expected five"],
    "0 0 12 * * 1 2026": ["seven fields", "year", "leave the last one out"],
    "0 0 6 * * 1 2026 x": ["8 fields", "expected five"],
    "0 6 * * *\n0 7 * * *": ["10 fields"],
    "CRON_TZ=Europe/Paris 0 6 * * *": ["zone", "tz="],
    "TZ=Europe/Paris 0 6 * * *": ["zone", "tz="],
    # Nearest weekday.
    "0 0 15W * *": ["W (nearest weekday)", "not supported", "write the days"],
    "0 0 W15 * *": ["W (nearest weekday)"],
    "0 0 LW * *": ["W (nearest weekday)"],
    "0 0 1,15w * *": ["W (nearest weekday)"],
    "* * 8W * 7": ["W (nearest weekday)"],
    # Ranges with equal ends.
    "5-5 * * * *": ["'5-5'", "equal", "write 5 for that one value, or *"],
    "0 0 * JAN-JAN *": ["equal", "month", "write 1"],
    "0 0 * * SUN-SUN": ["equal", "day of week"],
    "0 0 * * 7-0": ["equal"],
    "0 0 * * 7-7": ["equal"],
    "0 0 31-L * *": ["equal"],
    "0 0 1-1/3 * *": ["equal"],
    # The highest value with a step.
    "59/15 * * * *": ["'59/15'", "write 59 for that one value, or */15"],
    "0 23/6 * * *": ["write 23"],
    "0 0 31/2 * *": ["write 31"],
    "0 0 * DEC/3 *": ["write DEC"],
    "0 0 * 12/3 *": ["write 12"],
    "0 0 * * SAT/2": ["write SAT"],
    "0 0 * * 6/2": ["write 6"],
    "0 0 * * 7/2": ["write 7"],
    "59/30 * * * * *": ["second", "write 59"],
    # From a weekday on in steps that meet the second Sunday, 7: cron programs differ in whether they count it.
    "0 0 * * 1/2": ["'1/2'", "write 1-6/2 or 1-7/2"],
    "0 0 * * MON/3": ["write 1-6/3 or 1-7/3"],
    "0 0 * * 3,5/1": ["'5/1'", "write 5-6/1 or 5-7/1"],
    # Steps that lead nowhere.
    "*/0 * * * *": ["step of 0"],
    "1-9/0 * * * *": ["step of 0"],
    "*/90 * * * *": ["step 90", "wider than the field", "60 values"],
    "*/61 * * * *": ["wider than the field"],
    "0 */25 * * *": ["wider than the field", "24 values"],
    "0 0 */32 * *": ["wider than the field", "31 values"],
    "0 0 * */13 *": ["wider than the field", "12 values"],
    "0 0 * * */8": ["wider than the field", "7 values"],
    "0-30/61 * * * *": ["wider than the field"],
    "*/61 * * * * *": ["wider than the field", "second"],
    "0 20-4/3 * * *": ["wraps round", "write the list 20,23,2"],
    "0 0 * NOV-FEB/2 *": ["wraps round", "write the list 11,1"],
    "0 0 * * FRI-TUE/2": ["wraps round", "write the list 5,0,2"],
    # L and # where they don't belong.
    "0 0 * * 5L": ["'5L'", "write L5"],
    "0 0 * * FRIL": ["write L5"],
    "0 0 * * LFRI": ["write L5"],
    "0 0 * * L": ["write L6", "6 for each Saturday"],
    "0 0 L-3 * *": ["only the last day", "write L"],
    "0 0 L5 * *": ["only the last day"],
    "L * * * *": ["L stands for the last day in the field day of month"],
    "0 L * * *": ["L stands for the last day"],
    "0 0 1 L *": ["L stands for the last day"],
    "0 0 1 JUL-L *": ["L stands for the last day"],
    "0 0 * * L8": ["L stands for"],
    "0 0 * * 1-L": ["L stands for"],
    "0 0 5#2 * *": ["# counts weekdays", "5#2"],
    "0 0 * * 5#6": ["#1 to #5"],
    "0 0 * * 5#0": ["#1 to #5"],
    "0 0 * * 1-5#2": ["# counts weekdays"],
    "0 0 * * 8#1": ["# counts weekdays"],
    "0 0 * * 5#2,3": ["mixes 5#2 with plain weekdays", "write two schedules"],
    "0 0 * * 5,L5": ["mixes L5 with plain weekdays"],
    "0 0 * * *,5#1": ["mixes 5#1 with plain weekdays"],
    # Names that are no schedule.
    "@reboot": ["@reboot", "on every instance", "run_now"],
    "@every 5m": ["not cron", "scheduler.every(minutes=5)"],
    "@every_minute": ["scheduler.every"],
    "@noon": ["unknown name", "@daily"],
    "@": ["unknown name"],
    "@daily 5": ["unknown name"],
    # Values and names that don't exist.
    "60 * * * *": ["out of range", "0 to 59", "minute"],
    "0 24 * * *": ["out of range", "0 to 23", "hour"],
    "0 0 0 * *": ["out of range", "1 to 31", "day of month"],
    "0 0 32 * *": ["out of range", "1 to 31"],
    "0 0 1-32 * *": ["out of range"],
    "0 0 1 0 *": ["out of range", "1 to 12", "month"],
    "0 0 1 13 *": ["out of range", "1 to 12"],
    "0 0 * * 8": ["out of range", "0 to 7", "day of week"],
    "60 0 0 * * *": ["out of range", "second"],
    "0 0 * FOO *": ["FOO is no name", "JAN", "DEC"],
    "0 0 * * JAN": ["JAN is no name", "SUN", "SAT"],
    "MON * * * *": ["MON is no name", "which has no names"],
    "JUL * * * *": ["JUL is no name"],
    "0 0 * * MONDAY": ["can't be read"],
    # What is no field at all.
    "x * * * *": ["can't be read", "write a value from 0 to 59, a range 1-5, a list 1,3,5, a step */2, or *"],
    "1,,2 * * * *": ["''", "can't be read"],
    ", * * * *": ["can't be read"],
    "5- * * * *": ["can't be read"],
    "-5 * * * *": ["can't be read"],
    "*-5 * * * *": ["can't be read", "write * or a range"],
    "*5 * * * *": ["can't be read"],
    "** * * * *": ["can't be read"],
    "*/ * * * *": ["can't be read"],
    "*/-5 * * * *": ["can't be read"],
    "1/2/3 * * * *": ["can't be read"],
    "1-2-3 * * * *": ["can't be read"],
    "1.5 * * * *": ["can't be read"],
    "+5 * * * *": ["can't be read"],
    "1_0 * * * *": ["can't be read"],
    "0x5 * * * *": ["can't be read"],
    "00000000005 * * * *": ["can't be read"],
    "L/2 * * * *": ["L stands for"],
    "5\x00 * * * *": ["can't be read"],
    "５ * * * *": ["not ASCII", "plain digits"],
    "٣ * * * *": ["not ASCII"],
    "0 0 * * ſun": ["not ASCII"],
    "0 6 * * * 😀": ["not ASCII"],
    # Dates that never come.
    "0 0 30 2 *": ["never come", "L for the last day"],
    "0 0 31 2 *": ["never come"],
    "0 0 31 4,6,9,11 *": ["never come"],
    "0 0 30,31 FEB ?": ["never come"],
    "0 0 31 JUN */2": ["never come"],
    "0 0 */31 2 L1": ["never come"],
    "* * 31 11 *": ["never come"],
    "* * * 30 2 *": ["never come"],
}


@pytest.mark.parametrize(("expression", "words"), REFUSED.items())
def test_b10_b13_what_has_no_sure_meaning_is_refused_with_what_to_write_instead(
    expression: str, words: list[str]
) -> None:
    """At once, naming the expression."""
    started = time.thread_time()
    with pytest.raises(ConfigurationError) as refused:
        Cron(expression)
    assert time.thread_time() - started < 0.5
    message = str(refused.value)
    shown = expression if expression.startswith("@") else " ".join(expression.split())
    assert repr(shown) in message
    missing = [word for word in words if word not in message]
    assert not missing, message


@pytest.mark.parametrize("expression", [None, 5, b"0 6 * * *", ["0", "6"], datetime(2026, 1, 1)])
def test_an_expression_that_is_no_text_is_refused(expression: object) -> None:
    """With the type that was found."""
    with pytest.raises(ConfigurationError, match=f"expected text.*found {type(expression).__name__}"):
        Cron(expression)  # type: ignore[arg-type]


def test_a_message_stays_short_whatever_was_written() -> None:
    """A megabyte of text is not repeated."""
    with pytest.raises(ConfigurationError) as refused:
        Cron("x" * 1_000_000 + " * * * *")
    assert len(str(refused.value)) < 500


def test_what_croniter_alone_refuses_is_refused_in_our_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors don't get through as they are, and its reason is kept as the cause."""
    reason = croniter.CroniterBadCronError("no such thing")

    def expand(*_args: object, **_options: object) -> None:
        raise reason

    monkeypatch.setattr(croniter.croniter, "expand", expand)
    with pytest.raises(ConfigurationError, match=r"'0 6 \* \* \*'.*no such thing") as refused:
        Cron("0 6 * * *")
    assert refused.value.__cause__ is reason


# From 2026-01-01T00:00Z, a Thursday: the first three slots.
MEANINGS = {
    # Names, in any case; Sunday is 0 and 7.
    "0 6 * jan-MAR Mon": "2026-01-05T06:00 2026-01-12T06:00 2026-01-19T06:00",
    "0 6 * * 0": "2026-01-04T06:00 2026-01-11T06:00 2026-01-18T06:00",
    "0 6 * * 7": "2026-01-04T06:00 2026-01-11T06:00 2026-01-18T06:00",
    "0 6 * * sun": "2026-01-04T06:00 2026-01-11T06:00 2026-01-18T06:00",
    "0 6 * * 6-7": "2026-01-03T06:00 2026-01-04T06:00 2026-01-10T06:00",
    "0 6 * * SAT-SUN": "2026-01-03T06:00 2026-01-04T06:00 2026-01-10T06:00",
    "0 6 * * 0-7": "2026-01-01T06:00 2026-01-02T06:00 2026-01-03T06:00",
    "0 6 * * SUN-7": "2026-01-01T06:00 2026-01-02T06:00 2026-01-03T06:00",
    "0 6 * * 1-7/3": "2026-01-01T06:00 2026-01-04T06:00 2026-01-05T06:00",
    # Blanks between fields don't matter, nor do leading zeros.
    "  00\t06   *  *\n* ": "2026-01-01T06:00 2026-01-02T06:00 2026-01-03T06:00",
    # Steps, open and closed, and ranges that wrap round.
    "*/25 * * * *": "2026-01-01T00:25 2026-01-01T00:50 2026-01-01T01:00",
    "10/25 * * * *": "2026-01-01T00:10 2026-01-01T00:35 2026-01-01T01:10",
    "10-40/25 * * * *": "2026-01-01T00:10 2026-01-01T00:35 2026-01-01T01:10",
    "*/60 * * * *": "2026-01-01T01:00 2026-01-01T02:00 2026-01-01T03:00",
    "0 23-1 * * *": "2026-01-01T01:00 2026-01-01T23:00 2026-01-02T00:00",
    "0 0 1 nov-FEB *": "2026-02-01T00:00 2026-11-01T00:00 2026-12-01T00:00",
    "0 0 * * */7": "2026-01-04T00:00 2026-01-11T00:00 2026-01-18T00:00",
    "0 0 1 */6 *": "2026-07-01T00:00 2027-01-01T00:00 2027-07-01T00:00",
    "3,1,2,2 12 * * *": "2026-01-01T12:01 2026-01-01T12:02 2026-01-01T12:03",
    # Day of month and day of week.
    "0 9 13 * 5": "2026-01-02T09:00 2026-01-09T09:00 2026-01-13T09:00",
    "0 9 */2 * 1": "2026-01-05T09:00 2026-01-19T09:00 2026-02-09T09:00",
    "0 9 1-7 * */2": "2026-01-01T09:00 2026-01-03T09:00 2026-01-04T09:00",
    "0 9 *,13 * 5": "2026-01-02T09:00 2026-01-09T09:00 2026-01-16T09:00",
    "0 9 13,* * 5": "2026-01-01T09:00 2026-01-02T09:00 2026-01-03T09:00",
    "0 9 1-31 * 5": "2026-01-01T09:00 2026-01-02T09:00 2026-01-03T09:00",
    "0 9 ? * 1": "2026-01-05T09:00 2026-01-12T09:00 2026-01-19T09:00",
    "0 9 15 * ?": "2026-01-15T09:00 2026-02-15T09:00 2026-03-15T09:00",
    "? 0 1 1 ?": "2026-01-01T00:01 2026-01-01T00:02 2026-01-01T00:03",
    # The last day, the last Friday, the second Friday.
    "0 0 L * *": "2026-01-31T00:00 2026-02-28T00:00 2026-03-31T00:00",
    "0 0 l 2 *": "2026-02-28T00:00 2027-02-28T00:00 2028-02-29T00:00",
    "0 0 L,15 * *": "2026-01-15T00:00 2026-01-31T00:00 2026-02-15T00:00",
    "0 0 30-L * *": "2026-01-30T00:00 2026-01-31T00:00 2026-03-30T00:00",
    "0 0 * * L5": "2026-01-30T00:00 2026-02-27T00:00 2026-03-27T00:00",
    "0 0 * * L7": "2026-01-25T00:00 2026-02-22T00:00 2026-03-29T00:00",
    "0 0 * * 5#2": "2026-01-09T00:00 2026-02-13T00:00 2026-03-13T00:00",
    "0 0 * * FRI#5": "2026-01-30T00:00 2026-05-29T00:00 2026-07-31T00:00",
    "0 0 * * SUN#1,7#3": "2026-01-04T00:00 2026-01-18T00:00 2026-02-01T00:00",
    "0 0 * * 5#1,L5": "2026-01-02T00:00 2026-01-30T00:00 2026-02-06T00:00",
    # L and # obey the rule of the two day fields as well, where croniter wants both to match.
    "0 0 L * 1": "2026-01-05T00:00 2026-01-12T00:00 2026-01-19T00:00",
    "0 0 20 * 5#2": "2026-01-09T00:00 2026-01-20T00:00 2026-02-13T00:00",
    "0 0 L * L5": "2026-01-30T00:00 2026-01-31T00:00 2026-02-27T00:00",
    "0 0 */2 * 5#2": "2026-01-09T00:00 2026-02-13T00:00 2026-03-13T00:00",
    "13,16 0 25-30/5 * 1#1,3#2": "2026-01-05T00:13 2026-01-05T00:16 2026-01-14T00:13",
    # A day that its month lacks is simply not there; the counter-case of B10: either field is enough.
    "0 0 31 * *": "2026-01-31T00:00 2026-03-31T00:00 2026-05-31T00:00",
    "0 0 31 2 1": "2026-02-02T00:00 2026-02-09T00:00 2026-02-16T00:00",
    "0 0 30 2,4 *": "2026-04-30T00:00 2027-04-30T00:00 2028-04-30T00:00",
    "0 0 * 2 1#5": "2044-02-29T00:00 2072-02-29T00:00 2112-02-29T00:00",
    # Names for the whole.
    "@hourly": "2026-01-01T01:00 2026-01-01T02:00 2026-01-01T03:00",
    "@daily": "2026-01-02T00:00 2026-01-03T00:00 2026-01-04T00:00",
    "@midnight": "2026-01-02T00:00 2026-01-03T00:00 2026-01-04T00:00",
    "@Weekly": "2026-01-04T00:00 2026-01-11T00:00 2026-01-18T00:00",
    "@MONTHLY": "2026-02-01T00:00 2026-03-01T00:00 2026-04-01T00:00",
    "@yearly": "2027-01-01T00:00 2028-01-01T00:00 2029-01-01T00:00",
    "@annually": "2027-01-01T00:00 2028-01-01T00:00 2029-01-01T00:00",
    # Six fields: seconds come first.
    "*/30 * * * * *": "2026-01-01T00:00:30 2026-01-01T00:01 2026-01-01T00:01:30",
    "0 */2 * * * *": "2026-01-01T00:02 2026-01-01T00:04 2026-01-01T00:06",
    "5 0 * * * *": "2026-01-01T00:00:05 2026-01-01T01:00:05 2026-01-01T02:00:05",
    "59 59 23 L 2 7": "2026-02-01T23:59:59 2026-02-08T23:59:59 2026-02-15T23:59:59",
}


@pytest.mark.parametrize(("expression", "slots"), MEANINGS.items())
def test_b13_an_accepted_expression_means_what_vixie_cron_takes_it_for(expression: str, slots: str) -> None:
    """Its first three slots of 2026, in UTC."""
    schedule, at, found = Cron(expression), datetime(2026, 1, 1, tzinfo=UTC), []
    for _ in range(3):
        at = schedule.next(at)
        found.append(at)
    assert found == [datetime.fromisoformat(slot).replace(tzinfo=UTC) for slot in slots.split()]


@pytest.mark.parametrize("index", [0, 1, 2, 3], ids=["minute", "hour", "day", "month"])
def test_each_value_range_and_step_of_a_field_is_read_as_cron_reads_it(index: int) -> None:
    """All values and ranges, rising ranges and open ones with steps, against a reading of our own."""
    low, high = [(0, 59), (0, 23), (1, 31), (1, 12)][index]
    every = range(low, high + 1)
    few = range(low, high + 1, 1 if high < 13 else 7)
    steps = [step for step in (1, 2, 3, 5, 7, 11, high - low, high - low + 1) if step <= high - low + 1]
    texts = [str(number) for number in every]
    texts += [f"{first}-{last}" for first in few for last in every if first != last]
    texts += [f"{first}-{last}/{step}" for first in few for last in few if first < last for step in steps]
    texts += [f"{first}/{step}" for first in every if first < high for step in steps]
    texts += [f"*/{step}" for step in range(1, high - low + 2)]
    for text in texts:
        columns = ["0", "0", "*", "*", "*"]
        columns[index] = text
        walls = parse(" ".join(columns)).walls
        months = sum(1 << month for month in walls.months)
        mask = (walls.minutes, walls.hours, walls.days, months)[index]
        assert {bit for bit in range(60) if mask >> bit & 1} == cron_oracle.numbers(text, low, high), text


def test_each_range_and_step_of_weekdays_is_read_as_cron_reads_it() -> None:
    """Cron counts weekdays up to 7 and takes that for Sunday; every range and step, over two weeks."""
    texts = [str(number) for number in range(8)] + [f"*/{step}" for step in range(1, 8)]
    spans = [(a, b) for a in range(8) for b in range(8) if a % 7 != b % 7 or (a, b) == (0, 7)]
    texts += [f"{first}-{last}" for first, last in spans]
    texts += [f"{first}-{last}/{step}" for first, last in spans if first < last for step in range(1, 8)]
    texts += [f"{first}/{step}" for first in range(6) for step in range(1, 8) if not first or (7 - first) % step]
    days = [datetime(2026, 1, day, tzinfo=UTC) for day in range(4, 18)]
    for text in texts:
        expression = f"0 0 * * {text}"
        schedule, rule = Cron(expression), cron_oracle.Rule(expression)
        assert [day for day in days if schedule.latest(day) == day] == [day for day in days if rule.matches(day)], text
