"""The store as a whole: trouble is told once and ends once, and a store that lost its data is noticed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from harness import DELIVERED, START_MS, Call, Fate, Instance, Work, World, lost_answer, lost_request, spec

from leaselib._claims import Failure
from leaselib._model import from_ms
from leaselib._reports import OLDER_THAN_DATA

SLOT_MS = START_MS + 60_000
LEASE_MS = 30_000


def test_an_outage_is_one_store_error_and_one_store_ok():
    world = World()
    a = world.instance(spec(every=10, max_late=5))
    world.advance(5_000)
    world.cut()
    world.advance(60_000)
    assert a.summary("store_error", "store_ok") == [("store_error", "unreachable")]
    world.mend()
    world.advance(3_000)
    assert a.summary("store_error", "store_ok") == [("store_error", "unreachable"), ("store_ok", None)]
    assert a.planner.health.state == "up"


def test_tries_grow_apart_up_to_two_seconds():
    world = World()
    world.instance(spec(every=10))
    world.advance(5_000)
    world.cut()
    world.advance(120_000)
    at = [c.sent_ms for c in world.sent("ping")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 400
    assert 1_000 <= gaps[-1] <= 2_000


def test_a_trouble_that_somebody_has_to_mend_is_tried_twice_a_minute():
    world = World()
    a = world.instance(spec(every=10))
    world.advance(5_000)
    world.fate = lambda call: Fate(failure=Failure("no such table", permanent=True))
    world.advance(120_000)
    assert [(e.reason, e.error) for e in a.events("store_error")] == [("permanent", "no such table")]
    assert 3 <= len(world.sent("ping")) <= 8


def test_locked_records_of_a_job_are_its_own_trouble_and_its_claims_are_sent_until_they_pass():
    """Some transaction holds them: other jobs' slots start in time, and nothing is skipped."""
    world = World()
    a = world.instance(spec("free", every=1, catch_up=0), spec("held", every=10, max_late=9, catch_up=0))
    world.advance(3_000)
    locked = Fate(0, 300, Failure("lock timeout", job="held"))
    world.fate = lambda call: locked if call.job == "held" else DELIVERED
    world.advance(13_000)
    world.fate = lambda call: DELIVERED
    world.advance(2_000)
    assert [(e.reason, e.job) for e in a.events("store_error")] == [("unreachable", "held")]
    assert [e.job for e in a.events("store_ok")] == ["held"]
    assert a.planner.health.state == "up"
    assert [e.slot_ms for e in a.events("start") if e.job == "held"] == [START_MS + 10_000]
    assert a.events("skip") == []
    starts = [e for e in a.events("start") if e.job == "free"]
    assert [e.slot_ms for e in starts] == list(range(START_MS + 1_000, START_MS + 18_001, 1_000))


def test_each_trouble_of_a_job_is_one_store_error_and_one_store_ok():
    """However long it lasts, and though the job's other runs are well meanwhile: here the record of one is locked."""
    world = World()
    options = {"lease": 120, "heartbeat": 5, "overlap": "allow", "catch_up": 0}
    a = world.instance(spec("held", **options))
    world.work = lambda instance, attempt: Work(240_000)
    world.advance(63_000)
    (start,) = a.events("start")
    locked = Fate(0, 300, Failure("lock timeout", job="held"))
    for _ in range(2):
        world.fate = lambda call: locked if call.kind == "heartbeat" and call.token == start.token else DELIVERED
        world.advance(75_000)
        world.fate = lambda call: DELIVERED
        world.advance(10_000)
    told = [(e.name, e.error) for e in a.events("store_error", "store_ok")]
    assert told == [("store_error", "lock timeout"), ("store_ok", None)] * 2
    assert {e.job for e in a.events("store_error", "store_ok")} == {"held"}
    assert len(a.events("start")) >= 3


TOO_FEW = Failure("0 instead of 1 replicas", unreplicated=True)


def short_of_replicas(call: Call) -> Fate:
    """What becomes of calls while too few replicas keep up: heartbeats and releases don't wait for them."""
    if call.kind == "finish":
        return Fate(0, 300, TOO_FEW, carried_out=True)
    return Fate(0, 300, TOO_FEW) if call.kind in ("claim", "ping") else DELIVERED


def test_too_few_replicas_are_one_trouble_however_many_heartbeats_get_through():
    """No claim is sent while it lasts, a finish at growing distances; both at once when it is over."""
    world = World()
    a = world.instance(spec(every=10, catch_up=0), spec("long", every=3_600), spec("ends", every=3_600), share=1.0)
    world.work = lambda instance, attempt: Work({"long": 900_000, "ends": 20_000}.get(attempt.spec.name, 10))
    world.advance(4_000)
    a.manual("long")
    a.manual("ends")
    world.advance(11_000)
    world.fate = short_of_replicas
    world.advance(60_000)
    short = world.now_ms
    assert a.summary("store_error", "store_ok") == [("store_error", "unreachable")]
    assert a.planner.health.state == "down"
    assert len([c for c in world.sent("claim") if c.sent_ms > START_MS + 15_000]) <= 2
    sent = [c.sent_ms for c in world.sent("finish") if c.sent_ms > START_MS + 15_000]
    gaps = [later - earlier for earlier, later in itertools.pairwise(sent)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 5_000, "up to a heartbeat apart"
    world.fate = lambda call: DELIVERED
    world.advance(2_100)
    assert a.summary("store_error", "store_ok") == [("store_error", "unreachable"), ("store_ok", None)]
    assert next(e.job for e in a.events("success") if e.at_ms >= short) == "ends"
    world.advance(10_000)
    assert a.events("start")[-1].slot_ms >= short - START_MS
    assert a.events("lost") == []


def test_dead_runs_that_a_claim_has_ended_are_told_though_it_was_given_back():
    """Once: no later answer names them again."""
    world = World()
    a = world.instance(spec(every=10, catch_up=0), share=1.0)
    given_back = Fate(0, 10, replace(TOO_FEW, interrupted=(START_MS - 20_000, START_MS - 10_000)))
    world.advance(9_000)
    world.fate = lambda call: given_back if call.kind == "claim" else DELIVERED
    world.advance(1_050)
    world.fate = lambda call: DELIVERED
    world.advance(5_000)
    ended = [(e.slot_ms, e.reason) for e in a.events("interrupted")]
    assert ended == [(START_MS - 20_000, "superseded"), (START_MS - 10_000, "superseded")]
    assert a.summary("start") == [("start", "scheduled")]


GIVEN_BACK = Fate(0, 10, TOO_FEW, carried_out=True)


def test_a_run_that_is_given_back_again_and_again_is_taken_over_by_the_same_instance_in_the_end():
    """As long as it is the only one: its own released token is nobody's, and is never won again."""
    world = World()
    a = world.instance(spec(every=3_600, catch_up=0), share=0.5)
    world.advance(1_000)
    slot_ms = START_MS - START_MS % 3_600_000 + 3_600_000
    world.advance(slot_ms - world.now_ms - 1_000)
    for attempt in (None, 1, 2):
        world.fate = lambda call, named=attempt: (
            GIVEN_BACK if call.kind == "claim" and call.body.takeover_of == named else DELIVERED
        )
        for _ in range(LEASE_MS // 10):
            world.advance(10)
            run = world.run(slot_ms)
            if run is not None and run.attempt == (attempt or 0) + 1:
                break
        assert run is not None
        assert world.store.release("job", from_ms(slot_ms), run.token)
        world.fate = lambda call: DELIVERED
        world.advance(200)  # the store is well again, and the claim that may have been won is sent again
    world.advance(2 * LEASE_MS)
    assert [(e.slot_ms, e.attempt, e.reason) for e in a.events("start")] == [(slot_ms, 4, "hand-over")]
    assert world.run(slot_ms).status == "success"


def test_a_slot_that_the_store_has_ended_as_older_than_its_data_is_told_as_missed():
    """Given back, it would be started by whoever takes it."""
    world = World()
    a = world.instance(spec(jitter=5, catch_up=0), share=0.4)
    world.advance(61_000)
    world.reset_store()
    world.fate = lambda call: GIVEN_BACK if call.kind == "claim" else DELIVERED
    while not world.sent("claim"):
        world.advance(100)
    world.advance(20)
    world.fate = lambda call: DELIVERED
    assert world.store.finish("job", from_ms(SLOT_MS), world.run(SLOT_MS).token, "failed", "not started")
    world.advance(10_000)
    assert a.summary("start", "skip", "failed", "lost") == [("skip", "missed")]
    assert "older than the store's data" in a.events("skip")[0].error


def test_a_claim_by_hand_is_run_though_it_is_the_first_since_the_store_lost_its_data():
    """Its slot is new: nobody can have run it before."""
    world = World()
    a = world.instance(spec(every=3_600, catch_up=0))
    world.advance(5_000)
    world.fate = lambda call: Fate(50, 0)
    a.manual()
    world.advance(20)
    world.reset_store()  # while the claim is on its way: that is what gives many a store its new epoch
    world.advance(1_000)
    assert [t.outcome for t in a.answers] == ["won"]
    assert a.summary() == [("store_error", "reset"), ("start", "manual"), ("success", None)]


@pytest.mark.parametrize("carried_out", [False, True], ids=["never came", "answer lost"])
def test_trouble_is_over_when_the_store_is_back_though_its_claim_was_too_late(carried_out: bool):
    """Not only with the job's next slot, which may be a day away."""
    world = World()
    a = world.instance(spec(every=3_600, max_late=5, catch_up=0), share=0.5)
    world.advance(1_000)
    world.advance(3_600_000 - world.now_ms % 3_600_000 - 1_000)
    lost = Fate(0, 100, Failure("away"), carried_out=carried_out)
    world.fate = lambda call: lost if call.kind == "claim" else lost_request()
    world.advance(30_000)
    assert a.summary("store_error", "store_ok") == [("store_error", "unreachable")]
    world.fate = lambda call: DELIVERED
    world.advance(10_000)
    assert a.summary("store_error", "store_ok") == [("store_error", "unreachable"), ("store_ok", None)]
    assert a.planner.health.state == "up"


def test_what_a_release_was_answered_says_nothing_of_claims_that_are_refused():
    """At the end no `store_ok` is told for a store that still refuses to write."""
    world = World()
    a = world.instance(spec(every=10, catch_up=0), share=1.0)
    world.advance(5_000)
    refused = Fate(0, 10, Failure("no right to write", permanent=True))
    world.fate = lambda call: refused if call.kind == "claim" else DELIVERED
    world.advance(6_000)
    a.stop()
    world.advance(5_000)
    assert len(world.sent("release")) == 1
    assert a.summary("store_error", "store_ok") == [("store_error", "permanent")]


def test_a_release_that_is_answered_lets_jobs_load_that_wait_for_the_store():
    """It says that the store can be read again; nothing else may come for long."""
    world = World()
    a = world.instance(spec(every=3_600, catch_up=0), share=1.0)
    world.advance(5_000)
    fates = {"claim": lost_request(), "release": Fate(0, 3_000)}
    world.fate = lambda call: fates.get(call.kind, DELIVERED)
    a.manual()  # what it may have won is released as soon as a ping gets through
    world.advance(1_000)
    assert [c.body for c in world.sent("release")] == ["orphan"]
    fates["ping"] = lost_request()
    a.manual()
    world.advance(100)
    assert a.planner.health.state == "down"
    a.add(spec("late", every=3_600, catch_up=0))
    world.advance(1_000)
    assert a.planner.calendar.jobs["late"].phase == "loading"
    world.advance(2_000)
    assert a.planner.calendar.jobs["late"].phase == "waiting"


def test_the_trouble_of_a_job_that_was_removed_is_forgotten_with_its_last_run():
    """Added again, its first trouble is told like any other's."""
    world = World()
    a = world.instance(spec(every=60, catch_up=0))
    world.work = lambda instance, attempt: Work(10_000)
    too_few = Fate(0, 10, replace(TOO_FEW, job="job"), carried_out=True)
    for troubles in (1, 2):
        world.advance(60_000 - world.now_ms % 60_000 + 2_000)
        assert len(a.planner.attempts) == 1
        a.remove()
        world.fate = lambda call: too_few if call.kind == "finish" else DELIVERED
        world.advance(12_000)
        assert len(a.events("store_error")) == troubles
        world.store.purge("job", force=True)
        world.fate = lambda call: DELIVERED
        world.advance(10_000)
        assert len(a.events("lost")) == troubles
        a.add(spec(every=60, catch_up=0))
    assert a.events("store_ok") == []


@pytest.mark.parametrize("first", ["claim", "finish"])
def test_too_few_replicas_for_one_job_are_its_own_trouble_until_a_claim_or_a_finish_gets_through(first: str):
    """On a node of a cluster: the job's heartbeats, and the other jobs, go on meanwhile."""
    world = World()
    a = world.instance(spec("short", every=20, overlap="allow", catch_up=0), spec("free", every=1), share=1.0)
    world.work = lambda instance, attempt: Work(30_000 if attempt.spec.name == "short" else 0)
    failure = replace(TOO_FEW, job="short")
    too_few = {"claim": Fate(0, 300, failure), "finish": Fate(0, 300, failure, carried_out=True)}
    world.advance({"claim": 25_000, "finish": 45_000}[first])
    world.fate = lambda call: too_few.get(call.kind, DELIVERED) if call.job == "short" else DELIVERED
    world.advance(60_000)
    assert [(e.job, e.reason) for e in a.events("store_error", "store_ok")] == [("short", "unreachable")]
    assert len([c for c in world.sent("heartbeat") if c.job == "short"]) > 5
    world.fate = lambda call: DELIVERED
    world.advance(30_000)
    assert [(e.job, e.name) for e in a.events("store_error", "store_ok")] == [
        ("short", "store_error"),
        ("short", "store_ok"),
    ]
    starts = [e.slot_ms for e in a.events("start") if e.job == "free"]
    assert all(later - earlier == 1_000 for earlier, later in itertools.pairwise(starts))


def test_a_store_that_answers_pings_but_refuses_writes_is_one_trouble():
    world = World()
    a = world.instance(spec(every=10, max_late=5, catch_up=0))
    world.advance(5_000)
    world.cut("claim", "heartbeat", "finish", "release")
    world.advance(100_000)
    assert a.summary("store_error", "store_ok") == [("store_error", "unreachable")]
    assert len(world.sent("claim")) < 100
    world.mend()
    world.advance(15_000)
    assert a.summary("store_error", "store_ok") == [("store_error", "unreachable"), ("store_ok", None)]
    assert a.events("success")[-1].slot_ms >= START_MS + 110_000


def test_while_writes_are_in_doubt_one_claim_at_a_time_is_tried():
    world = World()
    jobs = [spec(f"job{n}", every=10, catch_up=0) for n in range(4)]
    world.instance(*jobs)
    world.advance(5_000)
    world.fate = lambda call: Fate(10, 10, Failure("disk full")) if call.kind == "claim" else DELIVERED
    world.advance(5_100)
    first = len(world.sent("claim"))
    assert first >= 4
    world.advance(60_000)
    times = [c.sent_ms for c in world.sent("claim")[first:]]
    assert all(later - earlier >= 20 for earlier, later in itertools.pairwise(times))


def test_an_answered_heartbeat_ends_an_outage():
    world = World()
    world.work = lambda instance, attempt: Work(60_000)
    a = world.instance(spec(every=3_600))
    world.advance(1_000)
    world.fate = lambda call: lost_request() if call.kind in ("ping", "claim") else DELIVERED
    a.manual()
    world.advance(6_000)
    assert a.summary("store_error", "store_ok") == [("store_error", "unreachable"), ("store_ok", None)]


def test_runners_renew_at_once_when_the_store_is_back():
    world = World()
    world.work = lambda instance, attempt: Work(600_000)
    a = world.instance(spec(every=3_600))
    world.advance(6_000)
    world.cut()
    world.advance(16_000)
    world.fate = lambda call: DELIVERED if call.kind == "ping" else lost_request()
    world.advance(2_000)
    pinged = [c.sent_ms for c in world.sent("ping") if c.sent_ms > START_MS + 22_000]
    assert pinged[0] in [c.sent_ms for c in world.sent("heartbeat")]
    assert len(a.events("store_error")) == 1


def test_slots_that_an_outage_made_late_are_one_skip_and_one_catch_up():
    world = World()
    a = world.instance(spec(every=60, max_late=30))
    world.advance(30_000)
    world.cut()
    world.advance(60_000 * 5)
    assert a.events("skip") == []
    world.mend()
    world.advance(5_000)
    assert [(e.slot_ms, e.reason, e.count) for e in a.events("skip")] == [(SLOT_MS, "missed", 4)]
    assert [(e.slot_ms, e.reason) for e in a.events("start")][1:] == [(START_MS + 300_000, "catch-up")]


def test_an_emptied_store_is_one_store_error_reset_and_older_slots_are_not_run():
    world = World()
    a = world.instance(spec(jitter=5), share=1.0)
    world.advance(58_000)
    done = len(a.events("start"))
    world.advance(3_000)  # past the slot, before its claim
    world.reset_store()
    a.wall_offset_ms = 10_000  # a step of the machine's clock makes it ask for the time at once
    world.advance(10_000)
    assert [(e.reason, e.slot_ms) for e in a.events("store_error", "skip")] == [("reset", None), ("missed", SLOT_MS)]
    assert "older than the store's data" in a.events("skip")[0].error
    assert len(a.events("start")) == done
    world.advance(60_000)
    assert a.events("start")[-1].slot_ms == SLOT_MS + 60_000
    assert len(a.events("store_error")) == 1


def test_an_older_slot_is_not_even_claimed_in_an_emptied_store():
    world = World()
    a = world.instance(spec(jitter=5), share=1.0)
    world.advance(61_000)  # past the slot, before its claim
    world.reset_store()
    a.wall_offset_ms = 10_000
    claims = len(world.sent("claim"))
    world.advance(10_000)
    assert a.summary("store_error", "skip") == [("store_error", "reset"), ("skip", "missed")]
    assert len(world.sent("claim")) == claims
    assert world.run(SLOT_MS) is None


def assert_turned_down(world: World, *instances: Instance) -> None:
    """Nobody has started the slot or will, the store says why, and the winner told of it as of one that was missed."""
    run = world.run(SLOT_MS)
    assert (run.status, run.attempt, run.error) == ("failed", 1, OLDER_THAN_DATA)
    for instance in instances:
        assert instance.summary("start", "failed", "lost", "interrupted") == []
        assert len(instance.planner.backups) == 0
    assert [e.reason for instance in instances for e in instance.events("skip")] == ["missed"]


def test_a_claim_that_won_an_older_slot_in_an_emptied_store_lets_nobody_start_it():
    """Not handed over: the others know no more than the store does, and would start it."""
    world = World()
    a = world.instance(spec(jitter=5, catch_up=0), share=0.4)
    b = world.instance(spec(jitter=5, catch_up=0), name="b", share=0.6)
    world.advance(61_000)
    world.reset_store()  # noticed only by the claims' own answers
    world.advance(2 * LEASE_MS)
    assert_turned_down(world, a, b)
    assert a.summary() == [("store_error", "reset"), ("skip", "missed")]


@pytest.mark.parametrize("end", ["stop", "remove"])
def test_it_lets_nobody_start_it_either_if_it_is_stopped_or_its_job_removed_meanwhile(end: str):
    world = World()
    a = world.instance(spec(jitter=5, catch_up=0), share=0.4)
    world.advance(61_000)
    world.reset_store()
    world.fate = lambda call: Fate(10, 500) if call.kind == "claim" else DELIVERED
    world.advance(1_200)
    getattr(a, end)()
    world.advance(2 * LEASE_MS)
    assert_turned_down(world, a)


def test_an_older_slot_whose_send_has_an_unknown_fate_is_sent_again_after_a_reset_and_started_by_nobody():
    world = World()
    a = world.instance(spec(catch_up=0, jitter=2), share=1.0)
    world.advance(61_000)
    world.reset_store()
    world.fate = lambda call: lost_answer() if call.kind == "claim" else DELIVERED
    world.advance(1_000)
    assert world.run(SLOT_MS).status == "running"
    a.wall_offset_ms = 10_000
    world.advance(500)
    world.fate = lambda call: DELIVERED
    world.advance(5_000)
    assert_turned_down(world, a)


def test_a_handler_whose_run_the_emptied_store_forgot_is_told_to_stop():
    world = World()
    world.work = lambda instance, attempt: Work(60_000, heeds_ms=10)
    a = world.instance(spec(every=3_600))
    world.advance(1_000)
    world.reset_store()
    world.advance(10_000)
    assert a.summary("lost", "success", "failed") == [("lost", "refused")]
    assert list(a.signals.values()) == [(START_MS + 5_000, "refused")]


def test_lateness_of_the_last_claim_is_known():
    world = World()
    a = world.instance(spec(catch_up=0, jitter=2), share=0.5)
    world.advance(62_000)
    assert a.planner.last_late_ms == 1_000


def test_a_release_that_fails_is_sent_again_when_the_store_is_back():
    world = World()
    world.fate = lambda call: lost_answer() if call.kind == "claim" else DELIVERED
    a = world.instance(spec(catch_up=0))
    world.advance(60_000)
    world.fate = lambda call: lost_request() if call.kind == "release" else DELIVERED
    a.remove()
    world.advance(500)
    first = len(world.sent("release"))
    world.mend()
    world.advance(5_000)
    assert first >= 1
    assert world.run(SLOT_MS).released is True
    assert a.planner.orphans.out == 0


def test_the_same_seed_gives_the_same_history():
    def history(seed: int) -> list[tuple[int, str, str, str | None]]:
        world = World(seed)
        world.work = lambda instance, attempt: Work(25_000)
        for name in "abc":
            world.instance(spec(jitter=5), name=name, share=None)
        world.advance(300_000)
        return [(c.sent_ms, c.instance, c.kind, c.token) for c in world.calls]

    assert history(1) == history(1)
    assert [h[:3] for h in history(1)] != [h[:3] for h in history(2)]
