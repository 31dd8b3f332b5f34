"""The calendar by itself, and the orphans: which slot of each job is waited for, and what becomes of slots too late."""

from __future__ import annotations

import pytest
from harness import START_MS, SeededChance, spec

from leaselib._calendar import COUNT_LIMIT, Calendar
from leaselib._claims import Claim, JobState, Orphan, Unfinished
from leaselib._effects import ReleaseOrphan
from leaselib._model import ClaimAnswer
from leaselib._orphans import Orphans

MINUTE_MS = 60_000


def begun(now_ms: int = START_MS + 1, share: float = 0.0, **options) -> tuple[Calendar, JobState]:
    """A job that every minute waits for its slot; nothing of it is unfinished."""
    calendar = Calendar(SeededChance("s", share))
    calendar.add(spec(**{"catch_up": 0, **options}))
    job = calendar.jobs["job"]
    assert calendar.begin(job, [], now_ms) == ([], None)
    return calendar, job


def answer(outcome: str, now_ms: int) -> ClaimAnswer:
    """The store's answer, as far as the calendar looks at it."""
    return ClaimAnswer(outcome, "t", now_ms, "0-e")


def test_a_job_waits_for_its_next_slot_and_is_due_then_once():
    calendar, job = begun()
    assert calendar.due_store_ms() == START_MS + MINUTE_MS
    assert calendar.due(START_MS + MINUTE_MS - 1) == []
    assert calendar.due(START_MS + MINUTE_MS) == [job]
    assert (job.phase, job.claim.slot_ms, job.claim.reason) == ("claiming", START_MS + MINUTE_MS, "scheduled")
    assert calendar.due(START_MS + 10 * MINUTE_MS) == []


@pytest.mark.parametrize(("jitter", "most_ms"), [(0, 0), (2.5, 2_500), (3_600, 60_000)])
def test_a_delay_is_at_most_the_jitter_and_never_reaches_beyond_the_next_slot(jitter: float, most_ms: int):
    calendar, _ = begun(share=1.0, jitter=jitter)
    assert calendar.due_store_ms() == START_MS + MINUTE_MS + most_ms


def test_a_removed_job_is_not_due_any_more_nor_is_its_namesake_by_the_old_timer():
    calendar, job = begun()
    assert calendar.remove("job") is job
    calendar.add(spec("job", every=3_600))
    assert calendar.due(START_MS + MINUTE_MS) == []
    assert job.removed


def test_an_answer_moves_a_job_on_to_the_following_slot():
    calendar, job = begun()
    calendar.due(START_MS + MINUTE_MS)
    calendar.answered(job, answer("won", START_MS + MINUTE_MS))
    assert (job.phase, job.slot_ms) == ("waiting", START_MS + 2 * MINUTE_MS)


def test_a_slot_that_was_claimed_a_little_early_is_not_waited_for_again():
    calendar, job = begun()
    calendar.due(START_MS + MINUTE_MS)
    calendar.answered(job, answer("won", START_MS + MINUTE_MS - 900))
    assert job.slot_ms == START_MS + 2 * MINUTE_MS


def test_early_waits_for_the_same_slot_or_for_a_nearer_one_after_a_step_back():
    calendar, job = begun()
    calendar.due(START_MS + MINUTE_MS)
    calendar.answered(job, answer("early", START_MS + MINUTE_MS - 5_000))
    assert job.slot_ms == START_MS + MINUTE_MS
    calendar.due(START_MS + MINUTE_MS)
    calendar.answered(job, answer("early", START_MS - 10 * MINUTE_MS - 5_000))
    assert job.slot_ms == START_MS - 10 * MINUTE_MS


def test_a_step_back_brings_nearer_slots_and_leaves_what_is_being_claimed():
    calendar, job = begun()
    calendar.step_back(START_MS - 30 * MINUTE_MS + 1)
    assert job.slot_ms == START_MS - 29 * MINUTE_MS
    calendar.due(job.slot_ms)
    claimed = job.slot_ms
    calendar.step_back(START_MS - 60 * MINUTE_MS)
    assert (job.phase, job.slot_ms) == ("claiming", claimed)


@pytest.mark.parametrize(
    ("late_ms", "catch_up", "first", "skipped", "caught", "same", "slot_minutes"),
    [
        (61_000, 300, 1, 1, True, False, 2),  # the next slot is due, on time
        (50_000, 300, 1, 0, True, True, 1),  # more time for the same
        (50_000, 0, 1, 1, False, False, 2),  # too late for good; on to the next
        (10 * 60_000 + 50_000, 300, 1, 10, True, False, 11),
        (10 * 60_000 + 50_000, 0, 1, 11, False, False, 12),
    ],
)
def test_of_slots_that_are_too_late_the_latest_is_caught_up_if_it_is_young(
    late_ms: int, catch_up: int, first: int, skipped: int, caught: bool, same: bool, slot_minutes: int
):
    calendar, job = begun(max_late=20)
    now_ms = START_MS + MINUTE_MS
    calendar.due(now_ms)
    job.spec = spec(max_late=20, catch_up=catch_up)
    plan = calendar.missed(job, job.claim, now_ms + late_ms)
    assert (plan.first_ms, plan.skipped, plan.caught, plan.same) == (
        START_MS + first * MINUTE_MS,
        skipped,
        caught,
        same,
    )
    assert job.slot_ms == START_MS + slot_minutes * MINUTE_MS


def test_counting_ends_at_its_limit():
    calendar, job = begun()
    calendar.due(START_MS + MINUTE_MS)
    assert calendar.missed(job, job.claim, START_MS + 10**12 + 30_500).skipped == COUNT_LIMIT - 1


def test_what_is_unfinished_is_sorted_into_live_runs_and_the_latest_dead_one():
    calendar = Calendar(SeededChance("s", 0.0))
    calendar.add(spec(overlap="allow"))
    now_ms = START_MS + 100
    live = Unfinished("job", START_MS - MINUTE_MS, 1, False, now_ms + 1)
    dead = Unfinished("job", START_MS, 1, False, now_ms)
    old = Unfinished("job", START_MS - 2 * MINUTE_MS, 1, False, now_ms)
    assert calendar.begin(calendar.jobs["job"], [old, live, dead], now_ms) == ([live], dead)
    assert calendar.jobs["job"].slot_ms == START_MS + MINUTE_MS, "the latest slot has a run: nothing is caught up"


def test_a_run_in_the_stores_future_is_not_the_latest():
    calendar = Calendar(SeededChance("s", 0.0))
    calendar.add(spec())
    now_ms = START_MS + 100
    future = Unfinished("job", START_MS + 3_600_000, 1, False, now_ms - 1)
    dead = Unfinished("job", START_MS, 1, False, now_ms)
    assert calendar.begin(calendar.jobs["job"], [dead, future], now_ms) == ([], dead)


def test_a_released_run_is_dead_whatever_its_lease_end():
    calendar = Calendar(SeededChance("s", 0.0))
    calendar.add(spec())
    released = Unfinished("job", START_MS, 1, True, START_MS + 99_999)
    assert calendar.begin(calendar.jobs["job"], [released], START_MS + 100) == ([], released)


# ---- orphans ----------------------------------------------------------------------------------------------------


def claim(**state) -> Claim:
    """A claim of the first slot, in that state."""
    return Claim(spec(), START_MS, "scheduled", **state)


def test_a_claim_that_was_never_sent_or_was_answered_leaves_no_orphan():
    orphans = Orphans()
    for one in (claim(), claim(token="t"), claim(token="t", unknown=True, in_flight=True)):
        orphans.give_up(one, 0)
        assert one.cancelled
    assert orphans.release(0) == []
    assert orphans.out == 0


def test_a_claim_of_unknown_fate_is_released_once_for_as_long_as_its_lease_can_live():
    orphans, one = Orphans(), claim(token="t", unknown=True)
    orphans.give_up(one, 1_000)
    orphans.give_up(one, 1_000)
    (effect,) = orphans.release(2_000)
    assert effect == ReleaseOrphan(Orphan("job", START_MS, "t", 1_000 + 30_000 + 10_000, 10_000))
    assert orphans.out == 1
    orphans.failed(effect.orphan, again=True)
    assert orphans.out == 0
    assert orphans.release(40_999) == [effect]
    orphans.failed(effect.orphan, again=True)
    assert orphans.release(41_000) == []


def test_a_release_that_failed_at_stop_is_forgotten():
    orphans = Orphans()
    orphans.give_up(claim(token="t", unknown=True), 0)
    (effect,) = orphans.release(1)
    orphans.failed(effect.orphan, again=False)
    assert orphans.release(2) == []


def test_the_look_at_a_refused_slot_lasts_for_what_is_left_of_its_window_and_two_heartbeats():
    one = Claim(spec(jitter=3), START_MS, "scheduled")
    assert one.look_again_ms(START_MS + 1_000) == 2_000 + 10_000
    assert one.look_again_ms(START_MS + 50_000) == 10_000
