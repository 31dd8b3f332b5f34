"""The values that travel: milliseconds and datetimes, error texts, what users see of a record, and the errors."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leaselib._model import (
    ERROR_BYTES,
    ClaimAnswer,
    JobMeta,
    PastAttempt,
    Record,
    cut_error,
    epoch_ms,
    from_ms,
    to_ms,
)
from leaselib.errors import Aborted, ConfigurationError, LeaselibError, StoreError

RECORD = Record(
    job="job",
    slot_ms=1_000,
    status="running",
    attempt=2,
    handovers=1,
    token="t",
    runner="b",
    fence=7,
    lease_ms=1_500,
    lease_end_ms=4_500,
    released=False,
    reason="hand-over",
    started_ms=3_000,
    checkpoint='{"n": [1, null]}',
    past=(PastAttempt(1, "a", 1_000, 2_000, "handed-over"),),
)


@given(st.integers(min_value=-62_135_596_800_000, max_value=253_402_300_799_999))
def test_milliseconds_come_back_from_a_datetime(ms: int):
    assert to_ms(from_ms(ms)) == ms
    assert from_ms(ms).tzinfo is timezone.utc


@pytest.mark.parametrize(("micros", "ms"), [(0, 0), (999, 0), (1_000, 1), (-1, -1), (-1_000, -1), (-1_001, -2)])
def test_an_instant_is_the_whole_milliseconds_at_or_before_it(micros: int, ms: int):
    assert to_ms(datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=micros)) == ms


def test_an_instant_in_another_zone_is_the_same():
    assert to_ms(datetime(1970, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))) == 0


def test_an_epoch_says_when_it_began():
    assert epoch_ms("1700000000000-00ff") == 1_700_000_000_000


@pytest.mark.parametrize(
    ("now_ms", "change", "live"),
    [
        (4_499, {}, True),
        (4_500, {}, False),
        (0, {"released": True}, False),
        (0, {"status": "success"}, False),
        (0, {"status": "interrupted"}, False),
    ],
)
def test_a_run_is_live_while_it_runs_unreleased_before_its_lease_end(now_ms: int, change: dict, live: bool):
    assert replace(RECORD, **change).live(now_ms) is live


def test_users_see_datetimes_seconds_and_the_checkpoints_value():
    run = RECORD.to_run()
    assert (run.slot, run.lease, run.lease_end) == (from_ms(1_000), 1.5, from_ms(4_500))
    assert (run.started_at, run.ended_at, run.checkpoint) == (from_ms(3_000), None, {"n": [1, None]})
    first, second = run.attempts
    assert (first.number, first.runner, first.outcome, first.ended_at) == (1, "a", "handed-over", from_ms(2_000))
    assert (second.number, second.runner, second.outcome, second.ended_at) == (2, "b", None, None)


def test_the_current_attempt_of_an_ended_run_has_the_runs_outcome():
    run = replace(RECORD, status="failed", ended_ms=5_000, error="boom", checkpoint=None).to_run()
    assert (run.error, run.ended_at, run.checkpoint) == ("boom", from_ms(5_000), None)
    assert (run.attempts[-1].outcome, run.attempts[-1].ended_at) == ("failed", from_ms(5_000))


def test_an_answer_is_seen_in_the_same_way():
    answer = ClaimAnswer("early", "t", 1_000, "0-e", wait_ms=1_250)
    assert (answer.run, answer.now, answer.wait) == (None, from_ms(1_000), 1.25)
    assert ClaimAnswer("won", "t", 0, "0-e", RECORD).run == RECORD.to_run()


def test_nothing_is_remembered_of_a_new_job():
    assert JobMeta() == JobMeta(fence=0, floor_ms=None, ended=0)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("boom", "boom"),
        ("", ""),
        ("a\0b", "a\\x00b"),
        ("a\ud800b", "a\\ud800b"),
        ("x" * 5_000, "x" * ERROR_BYTES),
        ("é" * 4_096, "é" * 2_048),
        ("x" + "é" * 4_096, "x" + "é" * 2_047),
    ],
)
def test_error_texts_are_cut_between_characters_and_made_storable(text: str, kept: str):
    assert cut_error(text) == kept


@given(st.text(st.characters(), max_size=6_000))
def test_whatever_the_text_what_is_kept_fits_and_is_kept_again_as_it_is(text: str):
    kept = cut_error(text)
    assert len(kept.encode()) <= ERROR_BYTES
    assert "\0" not in kept
    assert cut_error(kept) == kept


def test_errors_tell_what_a_caller_can_do():
    error = StoreError("away", transient=True, job="report")
    assert (str(error), error.transient, error.job) == ("away", True, "report")
    assert (StoreError("x").transient, StoreError("x").job) == (False, None)
    assert Aborted("stop", "stopping").reason == "stopping"
    for kind in (StoreError, Aborted, ConfigurationError):
        assert issubclass(kind, LeaselibError)
