"""What an instance does when it starts: runs of others, dead runs, the latest slot, and a store that is away."""

from __future__ import annotations

import pytest
from harness import DELIVERED, START_MS, Call, Fate, Work, World, spec

from leaselib._claims import Failure
from leaselib._model import from_ms

LEASE_MS = 30_000


def died(world: World, *, slot_ms: int = START_MS, job: str = "job") -> None:
    """A run of that slot whose runner is dead from the start: claimed straight in the store."""
    answer = world.store.claim(job, from_ms(slot_ms), f"dead-{slot_ms}", "dead")
    assert answer.outcome == "won"


def _refuse_load_of_bad(call: Call) -> Fate:
    if call.kind == "load" and "bad" in call.body:
        return Fate(failure=Failure("record of bad is malformed", permanent=True, job="bad"))
    return DELIVERED


def test_first_of_all_the_store_is_asked_what_is_unfinished():
    world = World()
    world.instance(spec("one"), spec("two"))
    world.advance(0)
    assert [call.kind for call in world.calls][:1] == ["load"]
    assert world.calls[0].body == ("one", "two")


def test_a_live_run_of_another_is_backed_up_and_taken_over_after_its_lease():
    world = World()
    died(world)
    world.advance(1_000)
    a = world.instance(spec(every=600))
    world.advance(1)
    assert len(a.planner.backups) == 1
    assert world.sent("claim") == []
    world.advance(LEASE_MS + 10_000)
    assert world.run(START_MS).attempt == 2
    assert a.summary("start") == [("start", "takeover")]


def test_a_dead_run_that_is_the_latest_is_taken_over_within_its_jitter():
    world = World()
    died(world)
    world.advance(LEASE_MS + 5_000)
    a = world.instance(spec(jitter=2), share=1.0)
    world.advance(1_999)
    assert a.events("start") == []
    world.advance(1)
    assert a.summary("start") == [("start", "takeover")]


def test_a_released_run_is_taken_over_at_once_as_a_hand_over():
    world = World()
    died(world)
    assert world.store.release("job", from_ms(START_MS), f"dead-{START_MS}")
    world.advance(100)
    a = world.instance(spec())
    world.advance(0)
    assert a.summary("start") == [("start", "hand-over")]


def test_a_dead_run_is_left_alone_once_a_newer_slot_is_due():
    world = World()
    died(world)
    world.advance(61_000)
    a = world.instance(spec(catch_up=0))
    world.advance(50_000)
    assert world.sent("claim") == []
    assert len(a.planner.backups) == 0
    world.advance(10_000)
    assert a.summary("start", "interrupted") == [("interrupted", "superseded"), ("start", "scheduled")]
    assert world.run(START_MS).error == "superseded"


def test_the_latest_slot_is_caught_up_if_it_is_young_and_no_older_one():
    world = World()
    world.advance(125_000)
    a = world.instance(spec())
    world.advance(10)
    assert [(e.slot_ms, e.reason) for e in a.events("start")] == [(START_MS + 120_000, "catch-up")]
    assert len(world.sent("claim")) == 1


@pytest.mark.parametrize(("age_ms", "caught"), [(299_999, True), (300_000, False)])
def test_a_slot_is_caught_up_only_if_it_was_due_less_than_catch_up_ago(age_ms: int, caught: bool):
    world = World()
    world.advance(3_600_000 + age_ms)
    a = world.instance(spec(every=3_600))
    world.advance(1)
    assert bool(a.events("start")) is caught


def test_nothing_is_caught_up_with_a_catch_up_of_zero():
    world = World()
    a = world.instance(spec(catch_up=0))
    world.advance(59_999)
    assert world.sent("claim") == []
    world.advance(1)
    assert a.summary("start") == [("start", "scheduled")]


def test_a_latest_slot_that_has_a_run_is_not_caught_up():
    world = World()
    died(world)
    world.advance(1_000)
    world.instance(spec())
    world.advance(100)
    assert world.sent("claim") == []


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_catch_up_waits_a_share_of_the_jitter(share: float):
    world = World()
    world.advance(10_000)
    a = world.instance(spec(jitter=2), share=share)
    world.advance(2_000)
    assert [at - START_MS for at, e in a.told if e.name == "start"] == [10_000 + round(2_000 * share)]


def test_a_store_that_is_away_at_the_start_is_one_store_error_and_jobs_begin_when_it_comes():
    world = World()
    world.cut()
    a = world.instance(spec())
    world.advance(20_000)
    assert a.summary() == [("store_error", "unreachable")]
    world.mend()
    world.advance(2_000)
    assert a.summary() == [("store_error", "unreachable"), ("store_ok", None), ("start", "catch-up"), ("success", None)]


def test_loads_that_fail_while_pings_work_are_one_trouble_and_slow_down():
    world = World()
    world.cut("load")
    a = world.instance(spec())
    world.advance(60_000)
    assert a.summary() == [("store_error", "unreachable")]
    assert 25 <= len(world.sent("load")) <= 70, "tries grow apart up to two seconds"
    world.mend()
    world.advance(2_000)
    assert a.summary("store_error", "store_ok") == [("store_error", "unreachable"), ("store_ok", None)]
    assert a.events("success")


def test_a_malformed_record_stops_only_its_own_job():
    world = World()
    world.fate = _refuse_load_of_bad
    a = world.instance(spec("bad"), spec("good"))
    world.advance(29_000)
    assert [(e.job, e.reason) for e in a.events("store_error")] == [("bad", "malformed")]
    assert {e.job for e in a.events("success")} == {"good"}
    assert a.planner.health.state == "up"
    assert len([c for c in world.sent("load") if "bad" in c.body]) == 1
    world.mend()
    world.advance(2_000)
    assert {e.job for e in a.events("success")} == {"good", "bad"}, "it is tried again half a minute later"


def test_more_jobs_than_one_question_holds_are_asked_for_in_batches():
    world = World()
    a = world.instance(*(spec(f"job{n}", every=86_400) for n in range(501)))
    world.advance(0)
    assert [len(c.body) for c in world.sent("load")] == [500, 1]
    assert {job.phase for job in a.planner.calendar.jobs.values()} == {"waiting"}


def test_jobs_that_were_removed_before_the_start_hide_none_that_stayed():
    world = World()
    a = world.instance(*(spec(f"job{n}") for n in range(500)), start=False)
    for n in range(500):
        a.remove(f"job{n}")
    a.add(spec("stays"))
    a.start()
    world.advance(0)
    assert [c.body for c in world.sent("load")] == [("stays",)]


def test_a_job_that_is_added_after_the_start_begins_as_at_a_start():
    world = World()
    a = world.instance()
    world.advance(5_000)
    a.add(spec())
    world.advance(0)
    assert a.summary("start") == [("start", "catch-up")]


def test_a_planner_that_is_not_started_plans_nothing():
    world = World()
    a = world.instance(spec(), start=False)
    world.advance(100_000)
    assert world.calls == []
    assert a.planner.due_boot_ms() is None


def test_a_run_that_was_caught_up_by_another_is_backed_up():
    world = World()
    world.work = lambda instance, attempt: Work(20_000)
    world.advance(10_000)
    a, b = world.instance(spec(every=600)), world.instance(spec(every=600), name="b")
    world.advance(10)
    assert (len(a.planner.attempts), len(b.planner.backups)) == (1, 1)
