"""Slots, claims, workers and claims by hand: when a claim is sent, and what each answer leads to."""

from __future__ import annotations

from typing import Any

import pytest
from harness import DELIVERED, START_MS, Fate, Work, World, lost_answer, lost_request, spec

from leaselib._claims import Claim, Failure, JobSpec
from leaselib._effects import Ping
from leaselib._model import from_ms
from leaselib._options import job_options
from leaselib.schedules import Every

SLOT_MS = START_MS + 60_000


def quiet(**options: Any) -> JobSpec:
    """A job that catches nothing up."""
    return spec(**{"catch_up": 0, **options})


def test_every_slot_is_run_once_by_one_of_three():
    world = World()
    crew = [world.instance(quiet(jitter=1), name=name, share=None) for name in "abc"]
    world.advance(600_000)
    world.advance(1_000)
    slots = sorted(e.slot_ms for one in crew for e in one.events("success"))
    assert slots == [START_MS + n * 60_000 for n in range(1, 11)]


@pytest.mark.parametrize(
    ("every", "share", "delay_ms"), [(60, 1.0, 1_000), (60, 0.0, 0), (5, 1.0, 500), (0.1, 1.0, 10)]
)
def test_the_default_jitter_is_a_second_and_never_over_a_tenth_of_the_gap(every: float, share: float, delay_ms: int):
    world = World()
    job = JobSpec("job", Every(every), job_options({"catch_up": 0}))
    world.instance(job, share=share)
    world.advance(round(every * 1000) + delay_ms)
    assert [c.sent_ms - START_MS for c in world.sent("claim")][:1] == [round(every * 1000) + delay_ms]


def test_a_slot_is_timed_on_the_stores_clock_whatever_the_machine_thinks():
    world = World()
    world.store_offset_ms = -3_600_000 + 250
    a = world.instance(quiet())
    a.wall_offset_ms = 7_200_000
    world.advance(59_749)
    assert world.sent("claim") == []
    world.advance(1)
    assert [e.slot_ms for e in a.events("start")] == [START_MS - 3_600_000 + 60_000]


def test_a_claim_is_sent_only_with_a_free_worker():
    world = World()
    world.work = lambda instance, attempt: Work(30_000)
    a = world.instance(quiet(name="one"), quiet(name="two"), workers=1)
    world.advance(60_000 + 29_999)
    assert len(world.sent("claim")) == 1
    world.advance(1)
    assert len(world.sent("claim")) == 2
    assert len(a.events("start")) == 2


def test_a_slot_that_finds_no_worker_within_max_late_is_one_skip_busy():
    world = World()
    world.work = lambda instance, attempt: Work(100_000)
    a = world.instance(quiet(name="one", every=600), quiet(name="two", every=600, max_late=20), workers=1)
    slot_ms = START_MS + 600_000
    world.advance(slot_ms - START_MS + 20_000)
    assert a.events("skip") == []
    world.advance(1)
    assert [(e.job, e.reason, e.slot_ms, e.count) for e in a.events("skip")] == [("two", "busy", slot_ms, 1)]
    world.advance(100_000)
    assert len(world.sent("claim")) == 1, "a slot that was skipped is never claimed"


@pytest.mark.parametrize("off_ms", [-90, -5, 5, 90])
def test_a_slot_that_finds_no_worker_is_one_skip_busy_though_the_stores_clock_is_known_better_meanwhile(off_ms: int):
    """By a few milliseconds, or by a step too small to be one: the look at the slot is moved, not left out."""
    world = World()
    world.work = lambda instance, attempt: Work(100_000)
    a = world.instance(quiet(name="one", every=600), quiet(name="two", every=600, max_late=20), workers=1)
    slot_ms = START_MS + 600_000
    world.advance(slot_ms - START_MS + 10_000)
    world.store_offset_ms += off_ms
    known_ms = a.planner.clock.offset_ms
    a._ping(Ping(1_000))
    world.advance(10_200)
    assert a.planner.clock.offset_ms == known_ms + off_ms
    assert [(e.job, e.reason, e.slot_ms) for e in a.events("skip")] == [("two", "busy", slot_ms)]


def test_an_overlap_is_a_skip_that_names_the_run_in_the_way():
    world = World()
    world.work = lambda instance, attempt: Work(70_000)
    a = world.instance(quiet())
    world.advance(120_000)
    (skip,) = a.events("skip")
    assert (skip.reason, skip.slot_ms) == ("overlap", SLOT_MS + 60_000)
    assert from_ms(SLOT_MS).isoformat() in skip.error
    assert "attempt 1 on a" in skip.error


def test_an_instance_that_skipped_looks_at_the_slot_until_window_and_two_heartbeats_are_over():
    world = World()
    world.work = lambda instance, attempt: Work(65_000)
    b = world.instance(quiet(heartbeat=4, jitter=2), share=1.0, name="b")
    world.instance(quiet(heartbeat=4, jitter=2), share=0.0)
    world.advance(122_000)
    assert b.summary("skip") == [("skip", "overlap")]
    refused_ms = SLOT_MS + 60_000
    world.advance(60_000)
    looks = [c.sent_ms - refused_ms for c in world.sent("claim", "b") if c.body.slot_ms == refused_ms]
    assert looks == [2_000, 10_000], "the claim, then one look in the eight seconds that follow"


def test_a_refused_slot_that_another_won_later_is_backed_up():
    world = World()
    world.work = lambda instance, attempt: Work(61_000 if attempt.record.slot_ms == SLOT_MS else 300_000)
    a = world.instance(quiet(jitter=2), name="a", share=0.0)
    b = world.instance(quiet(jitter=2), name="b", share=0.2)  # asks for the second slot while the first run is alive
    c = world.instance(quiet(jitter=2), name="c", share=0.9)  # asks after it has ended
    world.advance(122_000)
    assert [e.slot_ms for e in c.events("start")] == [SLOT_MS + 60_000]
    assert a.summary("skip") == b.summary("skip") == [("skip", "overlap")]
    world.advance(15_000)
    assert (len(a.planner.backups), len(b.planner.backups)) == (1, 1)
    c.kill()
    world.advance(42_000)
    assert world.run(SLOT_MS + 60_000).attempt == 2


def test_a_claim_whose_answer_was_lost_is_sent_again_with_its_token_and_wins_once():
    world = World()
    fates = iter([lost_answer(300), lost_answer(300)])
    world.fate = lambda call: next(fates, DELIVERED) if call.kind == "claim" else DELIVERED
    a = world.instance(quiet())
    world.advance(65_000)
    claims = world.sent("claim")
    assert len(claims) == 3
    assert len({c.token for c in claims}) == 1
    assert [(e.name, e.attempt) for e in a.events("start", "success")] == [("start", 1), ("success", 1)]


def test_the_own_deadline_counts_from_the_send_that_was_answered():
    world = World()
    world.work = lambda instance, attempt: Work(40_000)
    fates = iter([lost_answer(10_000)])
    world.fate = lambda call: next(fates, DELIVERED) if call.kind == "claim" else DELIVERED
    a = world.instance(quiet())
    world.advance(60_000 + 10_100)
    last = world.sent("claim")[-1]
    attempt = a.attempt()
    assert attempt.deadline_boot_ms - a.boot_offset_ms == last.sent_ms + 30_000 - 5_000


def test_the_own_deadline_counts_from_the_send_however_long_the_answer_takes():
    world = World()
    world.work = lambda instance, attempt: Work(40_000)
    world.fate = lambda call: Fate(back_ms=4_000) if call.kind == "claim" else DELIVERED
    a = world.instance(quiet())
    world.advance(60_000 + 4_100)
    assert a.attempt().deadline_boot_ms - a.boot_offset_ms == SLOT_MS + 30_000 - 5_000


def test_a_claim_that_is_given_up_with_its_fate_unknown_is_released_when_the_store_is_back():
    world = World()
    world.fate = lambda call: lost_answer(100) if call.kind == "claim" else lost_request()
    a = world.instance(quiet(max_late=5, lease=60, every=600), start=False)
    world.fate = lambda call: DELIVERED if call.kind == "load" else lost_answer(100)
    a.start()
    slot_ms = START_MS + 600_000
    world.advance(slot_ms - START_MS + 20_000)
    assert world.run(slot_ms).released is False
    world.mend()
    world.advance(3_000)
    assert [c.body for c in world.sent("release")] == ["orphan"]
    assert world.run(slot_ms).released is True
    assert a.summary("skip") == [("skip", "missed")]
    assert a.planner.free == 4


def test_a_given_up_claim_is_not_released_once_its_lease_must_be_over():
    world = World()
    world.fate = lambda call: lost_answer() if call.kind == "claim" else DELIVERED
    a = world.instance(quiet(every=600, max_late=1, lease=10))
    world.advance(600_000)
    world.cut()
    a.remove()
    world.advance(60_000)
    world.mend()
    world.advance(5_000)
    assert [c for c in world.sent("release") if c.sent_ms > START_MS + 600_000] == []


def test_a_retry_that_was_cancelled_before_it_was_sent_releases_the_token_of_its_first_send():
    world = World()
    world.fate = lambda call: lost_answer() if call.kind == "claim" else DELIVERED
    a = world.instance(quiet())
    sends = []

    def remove_before_the_second(claim: Claim) -> None:
        sends.append(claim)
        if len(sends) == 2:
            a.remove()

    a.on_send = remove_before_the_second
    world.advance(65_000)
    assert len(world.sent("claim")) == 1
    assert [c.token for c in world.sent("release")] == [world.sent("claim")[0].token]
    assert world.run(SLOT_MS).released is True


def test_a_job_that_is_removed_while_its_claim_travels_is_handed_over_if_it_won():
    world = World()
    world.fate = lambda call: Fate(50, 50) if call.kind == "claim" else DELIVERED
    a = world.instance(quiet())
    world.advance(60_010)
    a.remove()
    world.advance(1_000)
    assert a.summary() == [("interrupted", "stopping")]
    assert world.run(SLOT_MS).released is True
    assert (a.planner.free, a.planner.in_flight, a.planner.attempts) == (4, 0, {})
    world.advance(120_000)
    assert len(world.sent("claim")) == 1


def test_a_removed_job_whose_claim_fails_is_released_and_never_claimed_again():
    world = World()
    world.fate = lambda call: lost_answer(500) if call.kind == "claim" else DELIVERED
    a = world.instance(quiet())
    world.advance(60_100)
    a.remove()
    world.advance(10_000)
    assert len(world.sent("claim")) == 1
    assert world.run(SLOT_MS).released is True


def test_a_job_that_was_removed_and_added_again_is_claimed_by_its_new_options():
    world = World()
    a = world.instance(quiet(lease=20))
    world.advance(1_000)
    a.remove()
    a.add(quiet(lease=40))
    world.advance(60_000)
    assert [c.body.lease_ms for c in world.sent("claim")] == [40_000]


def test_waking_late_is_one_skip_missed_with_a_count_and_the_latest_is_caught_up():
    world = World()
    a = world.instance(spec(every=60, catch_up=300))
    world.advance(30_000)
    a.freeze(60_000 * 30)
    world.advance(60_000 * 31)
    skips = a.events("skip")
    assert [(e.reason, e.slot_ms, e.count) for e in skips] == [("missed", SLOT_MS, 29)]
    assert [e.slot_ms for e in a.events("start")][1:3] == [START_MS + 30 * 60_000, START_MS + 31 * 60_000]


def test_waking_too_late_for_a_catch_up_skips_all_and_waits_for_the_next():
    world = World()
    a = world.instance(quiet(every=3_600))
    first_ms = START_MS + 3_600_000
    world.advance(1_000)
    a.freeze(first_ms - world.now_ms + 2 * 3_600_000 + 61_000)
    world.advance(first_ms - world.now_ms + 2 * 3_600_000 + 100_000)
    assert [(e.reason, e.slot_ms, e.count) for e in a.events("skip")] == [("missed", first_ms, 3)]
    assert world.sent("claim") == []
    world.advance(3_600_000)
    assert [e.slot_ms for e in a.events("start")] == [first_ms + 3 * 3_600_000]


def test_a_count_of_missed_slots_ends_at_a_thousand():
    world = World()
    a = world.instance(quiet(every=1))
    world.advance(500)
    world.store_offset_ms = 10 * 86_400_000
    world.advance(5_000)
    assert [(e.reason, e.count) for e in a.events("skip")] == [("late", 1), ("missed", 999)]


def test_a_worker_that_was_frozen_before_its_send_judges_lateness_again():
    world = World()
    world.advance(200_000)
    a = world.instance(spec(every=3_600, catch_up=100, max_late=10))
    slot_ms = START_MS + 3_600_000
    a.on_send = lambda claim: a.freeze(200_000) if world.now_ms == slot_ms else None
    world.advance(slot_ms - world.now_ms + 300_000)
    assert world.sent("claim") == []
    assert a.summary() == [("skip", "missed")]


def test_a_slot_that_became_late_on_the_way_is_caught_up_if_it_is_young():
    world = World()
    world.advance(200_000)
    a = world.instance(spec(every=3_600, catch_up=100, max_late=10))
    slot_ms = START_MS + 3_600_000
    a.on_send = lambda claim: a.freeze(50_000) if world.now_ms == slot_ms else None
    world.advance(slot_ms - world.now_ms + 100_000)
    assert [c.body.reason for c in world.sent("claim")] == ["catch-up"]
    assert a.summary() == [("start", "catch-up"), ("success", None)]


def test_a_claim_that_the_store_calls_late_is_a_skip():
    world = World()
    world.fate = lambda call: Fate(75_000, 0) if call.kind == "claim" else DELIVERED
    a = world.instance(quiet(every=600))
    slot_ms = START_MS + 600_000
    world.advance(slot_ms - START_MS + 80_000)
    assert [(e.reason, e.slot_ms) for e in a.events("skip")] == [("late", slot_ms)]


def test_an_older_slot_than_one_that_ran_by_hand_is_a_skip_superseded():
    world = World()
    a = world.instance(quiet(jitter=2), share=1.0)
    world.advance(60_300)
    assert a.manual() is not None
    world.advance(2_000)
    assert a.summary("start", "skip") == [("start", "manual"), ("skip", "superseded")]
    world.advance(60_000)
    assert a.events("start")[-1].slot_ms == SLOT_MS + 60_000


def test_a_claim_of_a_slot_that_is_far_ahead_is_early_and_asked_again_in_time():
    world = World()
    a = world.instance(quiet())
    world.advance(59_000)
    world.store_offset_ms = -4_000
    world.advance(1_000)
    assert [c.kind for c in world.calls][-1] == "claim"
    assert a.events() == []
    world.advance(4_000)
    assert [e.slot_ms for e in a.events("start")] == [SLOT_MS]


def test_when_the_stores_clock_is_set_back_an_hour_no_job_stands_still_for_it():
    world = World()
    a = world.instance(quiet())
    world.advance(59_000)
    world.store_offset_ms = -3_600_000 - 500  # nobody has noticed when the claim goes out: it is told early
    world.advance(61_500)
    assert [e.slot_ms - START_MS + 3_600_000 for e in a.events("start")] == [60_000, 120_000]


def test_a_slot_that_was_won_before_the_step_back_does_not_make_the_job_wait_for_the_old_time():
    world = World()
    fates = iter([lost_answer(2_000)])
    world.fate = lambda call: next(fates, DELIVERED) if call.kind == "claim" else DELIVERED
    a = world.instance(quiet())
    world.advance(61_000)
    world.store_offset_ms = -3_600_000
    world.advance(120_000)
    slots = [e.slot_ms for e in a.events("start")]
    assert slots[0] == SLOT_MS
    assert slots[1:] == [SLOT_MS - 3_600_000 + 60_000, SLOT_MS - 3_600_000 + 120_000]


def test_a_step_back_starts_no_slot_twice():
    world = World()
    a = world.instance(quiet(every=10))
    world.advance(60_000)
    world.store_offset_ms = -35_000
    world.advance(60_000)
    slots = [e.slot_ms for e in a.events("start")]
    assert len(slots) == len(set(slots))
    assert slots == sorted(slots)
    assert len(slots) >= 8


def test_a_step_of_the_machines_clock_is_noticed_within_a_second():
    world = World()
    a = world.instance(quiet(every=3_600))
    world.advance(10_500)
    a.wall_offset_ms = 5_000
    world.advance(1_000)
    assert len(world.sent("ping")) == 1


def test_an_idle_instance_asks_for_the_time_every_ten_minutes():
    world = World()
    world.instance(spec(every=86_400, catch_up=0))
    world.advance(3_600_000)
    assert 5 <= len(world.sent("ping")) <= 6


def test_a_schedule_with_no_slot_left_is_idle():
    class Once(Every):
        __slots__ = ()

        def next_ms(self, after_ms: int) -> int | None:
            return SLOT_MS if after_ms < SLOT_MS else None

        def latest_ms(self, at_ms: int) -> int | None:
            return SLOT_MS if at_ms >= SLOT_MS else None

    world = World()
    a = world.instance(JobSpec("job", Once(60), job_options({"jitter": 0})))
    world.advance(600_000)
    assert [e.slot_ms for e in a.events("start")] == [SLOT_MS]
    assert a.planner.calendar.jobs["job"].phase == "idle"


# ---- by hand ----------------------------------------------------------------------------------------------------


def test_a_claim_by_hand_is_of_a_slot_that_is_now_and_tells_its_outcome():
    world = World()
    a = world.instance(quiet())
    world.advance(1_234)
    claim = a.manual()
    world.advance(0)
    assert claim.slot_ms == START_MS + 1_234
    assert [t.outcome for t in a.answers] == ["won"]
    assert a.summary() == [("start", "manual"), ("success", None)]


def test_a_claim_by_hand_without_a_free_worker_is_a_skip_busy():
    world = World()
    world.work = lambda instance, attempt: Work(100_000)
    a = world.instance(spec(), workers=1)
    world.advance(100)
    assert a.manual() is None
    assert a.summary("skip") == [("skip", "busy")]


def test_a_claim_by_hand_whose_answer_is_lost_is_told_unknown_and_released():
    world = World()
    world.fate = lambda call: lost_answer(100) if call.kind == "claim" else DELIVERED
    a = world.instance(quiet())
    world.advance(1_000)
    a.manual()
    world.advance(3_000)
    assert [(t.outcome, t.failure and t.failure.error) for t in a.answers] == [("unknown", "timed out")]
    assert world.run(START_MS + 1_000).released is True
    assert len(world.sent("claim")) == 1, "it is not sent again: whoever asked has been told"


def test_a_claim_by_hand_needs_the_stores_clock():
    world = World()
    a = world.instance(quiet(), start=False)
    with pytest.raises(RuntimeError, match="clock"):
        a.manual()


def test_a_run_by_hand_doesnt_take_the_place_of_the_latest_slot_at_a_start():
    world = World()
    a = world.instance(quiet())
    world.advance(30_000)
    a.manual()
    world.advance(1_000)
    b = world.instance(spec(overlap="allow"), name="b")
    world.advance(1_000)
    assert [(e.slot_ms, e.reason) for e in b.events("start")] == [(START_MS, "catch-up")]


# ---- stop -------------------------------------------------------------------------------------------------------


def test_after_stop_nothing_is_claimed_and_nothing_is_planned():
    world = World()
    a = world.instance(quiet())
    world.advance(1_000)
    a.stop()
    world.advance(600_000)
    assert world.sent("claim") == []
    assert a.planner.due_boot_ms() is None
    assert a.manual() is None


@pytest.mark.parametrize(
    ("kind", "overlap", "wait_ms", "dead"),
    [
        ("load", "skip", 10, False),
        ("load", "skip", 10, True),
        ("claim", "skip", 60_010, False),
        ("claim", "allow", 60_010, False),
    ],
    ids=["load of a live run", "load of a dead run", "claim that overlaps", "claim that came second"],
)
def test_an_answer_that_comes_after_stop_has_nothing_watched(kind: str, overlap: str, wait_ms: int, dead: bool):
    world = World()
    world.work = lambda instance, attempt: Work(600_000)
    a = world.instance(quiet(overlap=overlap), name="a")
    world.advance(60_000 if kind == "load" else 0)
    assert len(a.planner.attempts) == (kind == "load")
    if dead:
        a.kill()
        world.advance(40_000)
    world.fate = lambda call: Fate(50, 50) if (call.kind, call.instance) == (kind, "b") else DELIVERED
    b = world.instance(quiet(overlap=overlap, catch_up=0), name="b")
    world.advance(wait_ms)
    assert len(world.sent(kind, "b")) == 1
    b.stop()
    world.advance(1_000)
    assert (len(b.planner.backups), b.planner.due_boot_ms(), b.planner.in_flight) == (0, None, 0)


def test_a_claim_that_wins_after_stop_is_handed_over_without_a_start():
    world = World()
    world.fate = lambda call: Fate(50, 50) if call.kind == "claim" else DELIVERED
    a = world.instance(quiet())
    world.advance(60_010)
    a.stop()
    world.advance(1_000)
    assert a.summary() == [("interrupted", "stopping")]
    assert world.run(SLOT_MS).released is True
    assert (a.planner.in_flight, a.planner.free) == (0, 4)


def test_a_claim_of_unknown_fate_is_released_at_stop():
    world = World()
    world.fate = lambda call: lost_answer() if call.kind == "claim" else DELIVERED
    a = world.instance(quiet())
    world.advance(60_001)
    a.stop()
    world.advance(10)
    assert world.run(SLOT_MS).released is True
    assert a.planner.orphans.out == 0


def test_a_claim_that_fails_after_stop_is_released_once():
    world = World()
    world.fate = lambda call: lost_answer(100) if call.kind == "claim" else lost_request(10)
    a = world.instance(quiet(), start=False)
    world.mend()
    a.start()
    world.advance(59_999)
    world.fate = lambda call: lost_answer(100) if call.kind == "claim" else lost_request(10)
    world.advance(50)
    a.stop()
    world.advance(10_000)
    assert len(world.sent("release")) == 1
    assert (a.planner.orphans.out, a.planner.in_flight) == (0, 0)


def test_a_claim_by_hand_that_was_not_sent_before_stop_is_told_busy():
    world = World()
    a = world.instance(quiet())
    world.advance(1_000)
    a.on_send = lambda claim: a.stop()
    a.manual()
    world.advance(10)
    assert [t.outcome for t in a.answers] == ["busy"]
    assert world.sent("claim") == []


def test_malformed_records_at_a_claim_cost_that_slot_and_no_other_job():
    world = World()
    bad = Fate(failure=Failure("malformed", permanent=True, job="bad"))
    world.fate = lambda call: bad if call.kind == "claim" and call.job == "bad" else DELIVERED
    a = world.instance(quiet(name="bad"), quiet(name="good"))
    world.advance(125_000)
    assert {e.job for e in a.events("success")} == {"good"}
    (told,) = a.events("store_error", "store_ok")
    assert (told.job, told.reason, told.slot_ms) == ("bad", "malformed", SLOT_MS)
    skipped = [("bad", "missed", SLOT_MS, "malformed"), ("bad", "missed", SLOT_MS + 60_000, "malformed")]
    assert [(e.job, e.reason, e.slot_ms, e.error) for e in a.events("skip")] == skipped
    assert a.planner.health.state == "up"
    assert a.planner.free == 4
