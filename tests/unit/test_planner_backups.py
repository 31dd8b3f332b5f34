"""Backups: when an instance checks the runs of others, what ends that, and when it holds back."""

from __future__ import annotations

import itertools

import pytest
from harness import DELIVERED, START_MS, Fate, Instance, Work, World, lost_answer, lost_request, spec

from leaselib._claims import Failure, JobSpec
from leaselib._model import from_ms

HEARTBEAT_MS = 5_000
LEASE_MS = 30_000


def hourly() -> JobSpec:
    """A job whose second slot is far away."""
    return spec(every=3_600, max_attempts=5)


def pair(*, share: float | None = 0.5, work_ms: int = 600_000, seed: int = 1) -> tuple[World, Instance, Instance]:
    """Instance a runs the job, b is its backup."""
    world = World(seed)
    world.work = lambda instance, attempt: Work(work_ms)
    a = world.instance(hourly(), name="a", share=share)
    world.advance(0)
    b = world.instance(hourly(), name="b", share=share)
    world.advance(10)
    assert (len(a.planner.attempts), len(b.planner.backups)) == (1, 1)
    return world, a, b


def checks(world: World, who: str = "b") -> list[int]:
    """When that instance sent its takeover claims."""
    return [call.sent_ms for call in world.sent("claim", who) if call.body.takeover_of is not None]


@pytest.mark.parametrize("seed", range(5))
def test_checks_come_one_to_two_heartbeats_apart(seed: int):
    world, _, _ = pair(share=None, seed=seed)
    world.advance(200_000)
    at = checks(world)
    gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert len(gaps) > 15
    assert all(HEARTBEAT_MS <= gap <= 2 * HEARTBEAT_MS for gap in gaps)
    assert len(set(gaps)) > 10, "the times are random"


def test_checks_end_when_the_run_ends():
    world, _, b = pair(work_ms=20_000)
    world.advance(20_000 + 2 * HEARTBEAT_MS)
    assert len(b.planner.backups) == 0
    sent = len(checks(world))
    world.advance(200_000)
    assert len(checks(world)) == sent
    assert b.events() == []


def test_a_dead_runner_is_replaced_within_its_lease_and_two_heartbeats():
    world, a, b = pair(share=1.0)
    world.advance(12_000)  # the last heartbeat was at 10 s
    a.kill()
    world.advance(LEASE_MS)
    assert b.summary("start") == [("start", "takeover")]
    assert b.told[-1][0] <= START_MS + 10_000 + LEASE_MS + 2 * HEARTBEAT_MS


def test_a_released_run_is_taken_over_at_the_next_check():
    world, a, b = pair()
    world.work = lambda instance, attempt: Work(1_000)
    a.planner.attempts.clear()
    world.store.release("job", from_ms(START_MS), world.sent("claim", "a")[0].token)
    world.advance(2 * HEARTBEAT_MS)
    assert b.summary("start") == [("start", "hand-over")]


def test_of_two_backups_one_takes_over_and_the_other_watches_the_new_attempt():
    world, a, b = pair()
    c = world.instance(hourly(), name="c", share=0.9)
    world.advance(1_000)
    a.kill()
    world.advance(LEASE_MS + 3 * HEARTBEAT_MS)
    runner, backup = (b, c) if b.planner.attempts else (c, b)
    assert runner.attempt().record.attempt == 2
    runner.kill()
    world.advance(LEASE_MS + 3 * HEARTBEAT_MS)
    assert backup.attempt().record.attempt == 3


def test_a_run_with_no_attempts_left_is_one_interrupted_event_of_its_backup():
    world = World()
    world.work = lambda instance, attempt: Work(600_000)
    once = spec(every=3_600, max_attempts=1)
    a = world.instance(once, name="a")
    world.advance(0)
    b = world.instance(once, name="b")
    world.advance(1_000)
    a.kill()
    world.advance(LEASE_MS + 2 * HEARTBEAT_MS)
    assert b.summary() == [("interrupted", "max_attempts")]
    assert len(b.planner.backups) == 0


def test_a_dead_run_that_a_newer_slot_replaced_is_told_interrupted_once_by_whoever_replaced_it():
    world = World()
    world.work = lambda instance, attempt: Work(600_000)
    a = world.instance(spec(), name="a")
    world.advance(0)
    b = world.instance(spec(), name="b", share=1.0)
    world.advance(26_000)
    a.kill()
    # The lease ends at 55 s: b checks at 54 s, then its claim of the next slot comes first, at 60 s.
    b.planner.backups.arm_all(b.boot_ms + 8_000)
    world.advance(40_000)
    told = [e for e in b.events("interrupted") if e.slot_ms == START_MS]
    assert [(e.reason,) for e in told] == [("superseded",)]
    assert all(c.body.slot_ms != START_MS for c in world.sent("claim", "b") if c.sent_ms > START_MS + 60_000)


def test_a_check_whose_answer_was_lost_is_sent_again_with_its_token_and_wins():
    world, a, b = pair()
    a.kill()
    world.advance(LEASE_MS - 1_000)
    before = len(world.sent("claim", "b"))
    fates = iter([lost_answer()])
    world.fate = lambda call: next(fates, DELIVERED) if call.kind == "claim" else DELIVERED
    world.advance(20_000)
    first, second = world.sent("claim", "b")[before:][:2]
    assert first.token == second.token
    assert b.summary("start") == [("start", "takeover")]
    assert b.attempt().record.attempt == 2


def test_no_token_is_for_two_attempts_even_if_a_check_won_unbeknown():
    world, a, b = pair()
    c = world.instance(hourly(), name="c", share=0.6)
    world.advance(100)
    a.kill()
    world.fate = lambda call: (lost_answer() if call.instance == "b" and call.kind == "claim" else DELIVERED)
    world.advance(LEASE_MS + 2 * HEARTBEAT_MS)
    assert world.run(START_MS).runner == "b", "b's check won, and b doesn't know"
    world.fate = lambda call: lost_request() if call.instance == "b" else DELIVERED
    world.advance(LEASE_MS + 3 * HEARTBEAT_MS)
    assert world.run(START_MS).runner == "c"
    world.mend()
    world.advance(20_000)
    assert len(b.planner.backups) == 1
    c.kill()
    world.advance(LEASE_MS + 3 * HEARTBEAT_MS)
    run = world.run(START_MS)
    assert (run.attempt, run.runner) == (4, "b")
    claims = world.sent("claim", "b")
    tokens = {n: {c.token for c in claims if c.body.takeover_of == n} for n in (1, 3)}
    assert tokens[1].isdisjoint(tokens[3])


def test_after_an_outage_a_check_waits_one_to_two_heartbeats_from_the_return():
    world, a, _ = pair(share=0.0)
    world.cut()
    world.advance(LEASE_MS * 2)
    world.mend()
    mended_ms = world.now_ms
    world.advance(23_000)
    back_ms = min(c.sent_ms for c in world.sent("ping", "b") if c.sent_ms >= mended_ms)
    after = [at for at in checks(world) if at >= back_ms]
    assert after[0] == back_ms + HEARTBEAT_MS
    assert world.run(START_MS).attempt == 1, "the runner renewed first"
    assert a.planner.attempts


def test_a_check_that_came_due_right_before_the_return_waits_as_long():
    world, _, _ = pair(share=0.0)
    world.cut()
    world.advance(2 * HEARTBEAT_MS + 1_000)  # the first check failed after one heartbeat; the next came due after two
    world.mend()
    mended_ms = world.now_ms
    world.advance(3 * HEARTBEAT_MS)
    back_ms = min(c.sent_ms for c in world.sent("ping", "b") if c.sent_ms >= mended_ms)
    assert back_ms < START_MS + 3 * HEARTBEAT_MS, "the check was late by less than a heartbeat"
    assert next(at for at in checks(world) if at >= mended_ms) == back_ms + HEARTBEAT_MS


def test_no_check_is_sent_while_the_store_is_away():
    world, _, b = pair()
    world.cut()
    world.advance(8_000)
    sent = len(checks(world))
    world.advance(120_000)
    assert len(checks(world)) == sent
    assert len(b.planner.backups) == 1


def test_a_backup_that_slept_lets_runners_that_slept_too_renew_first():
    world, a, b = pair(share=0.0)
    world.advance(1_000)
    for one in (a, b):
        one.freeze(LEASE_MS * 3)
    world.advance(LEASE_MS * 3)
    woke_ms = world.now_ms
    world.advance(1_000)
    assert [at for at in checks(world) if at >= woke_ms] == []
    world.advance(30_000)
    assert world.run(START_MS).attempt == 1


def test_a_backup_that_slept_right_before_its_send_holds_back_once():
    world, _, b = pair(share=0.0)
    b.on_send = lambda claim: b.freeze(60_000) if not checks(world) and not b.frozen_until_ms else None
    world.advance(5_000 + 60_000)
    assert checks(world) == []
    world.advance(HEARTBEAT_MS)
    assert len(checks(world)) == 1


def test_a_machine_that_is_always_slow_holds_each_check_back_for_one_round_only():
    world, _, b = pair(share=0.0)
    slow: set[object] = set()

    def hesitate(claim: object) -> None:
        if claim not in slow:
            slow.add(claim)
            b.freeze(HEARTBEAT_MS + 1)

    b.on_send = hesitate
    world.advance(60_000)
    assert len(checks(world)) >= 2


def test_gone_ends_the_backup_and_is_no_claim_of_its_own():
    world, a, b = pair()
    a.kill()
    world.reset_store()
    world.advance(30_000)
    assert len(b.planner.backups) == 0
    assert len(checks(world)) == 1
    assert world.run(START_MS) is None


def test_removing_the_job_ends_its_backups():
    world, a, b = pair()
    b.remove()
    a.kill()
    sent = len(checks(world))
    world.advance(120_000)
    assert len(checks(world)) == sent
    assert len(b.planner.backups) == 0


def test_removing_the_job_releases_a_check_whose_fate_is_unknown():
    world, a, b = pair()
    a.kill()
    world.advance(LEASE_MS - 1_000)
    world.fate = lambda call: lost_answer() if call.kind == "claim" else DELIVERED
    world.advance(8_000)
    assert world.run(START_MS).attempt == 2
    b.remove()
    world.advance(0)
    assert world.run(START_MS).released is True
    assert b.events("start") == []


def test_stop_releases_a_check_whose_fate_is_unknown():
    world, a, b = pair()
    a.kill()
    world.advance(LEASE_MS - 1_000)
    world.fate = lambda call: lost_answer() if call.kind == "claim" else DELIVERED
    world.advance(8_000)
    assert world.run(START_MS).attempt == 2
    b.stop()
    world.advance(0)
    assert world.run(START_MS).released is True
    assert b.events("start") == []


@pytest.mark.parametrize("sleeps", [1, 2, 3])
def test_backups_hold_back_after_each_sleep(sleeps: int):
    world, a, b = pair(work_ms=3_000_000)
    for _ in range(sleeps):
        world.advance(20_000)
        a.freeze(61_000)
        b.freeze(60_000)
        world.advance(80_000)
    assert (b.events("start"), world.run(START_MS).attempt) == ([], 1)


def test_an_instance_that_is_told_overlap_backs_up_the_run_in_the_way():
    world = World()
    world.work = lambda instance, attempt: Work(600_000)
    a = world.instance(spec(catch_up=0), name="a")
    b = world.instance(spec(catch_up=0), name="b")
    world.advance(2_000)
    a.manual()  # b hears of that run only when its claim of the next slot overlaps with it
    world.advance(0)
    slot_ms = a.attempt().record.slot_ms
    world.advance(70_000)
    assert [e.reason for e in b.events("skip")] == ["overlap"]
    a.kill()
    world.advance(LEASE_MS + 2 * HEARTBEAT_MS)
    assert world.run(slot_ms).attempt == 2 or world.run(slot_ms).error == "superseded"
    assert b.events("start")


def test_a_check_under_way_is_sent_once_though_another_answer_names_its_run():
    world = World()
    world.work = lambda instance, attempt: Work(600_000)
    job = spec(every=11, heartbeat=3, lease=30, catch_up=0)
    a = world.instance(job, name="a")
    world.advance(11_000)
    slot_ms = a.attempt().record.slot_ms
    world.instance(job, name="b")
    slow = Fate(out_ms=5_000, back_ms=4_900)
    world.fate = lambda call: slow if call.kind == "claim" and call.body.takeover_of is not None else DELIVERED
    world.advance(200_000)
    sent: dict[int, list[int]] = {}
    for call in world.sent("claim", "b"):
        if call.body.takeover_of is not None:
            sent.setdefault(call.body.slot_ms, []).append(call.sent_ms)
    assert len(sent[slot_ms]) > 10
    for times in sent.values():
        assert all(later - earlier >= 9_900 for earlier, later in itertools.pairwise(times)), "two at once for one run"


def test_stop_ends_every_backup():
    world, a, b = pair()
    b.stop()
    a.kill()
    sent = len(checks(world))
    world.advance(120_000)
    assert len(checks(world)) == sent
    assert len(b.planner.backups) == 0


def test_a_check_waits_for_a_free_worker():
    world = World()
    world.work = lambda instance, attempt: Work(20_000 if instance.name == "b" else 600_000)
    a = world.instance(hourly(), name="a")
    world.advance(0)
    b = world.instance(hourly(), spec("busy", every=3_600), name="b", workers=1)
    world.advance(1_000)
    assert [e.job for e in b.events("start")] == ["busy"]
    assert checks(world) == []
    world.advance(19_000)
    assert len(b.events("success")) == 1
    assert len(b.planner.backups) == 1
    a.kill()
    world.advance(LEASE_MS + 2 * HEARTBEAT_MS)
    assert world.run(START_MS).runner == "b"


def test_a_takeover_whose_answer_is_lost_is_won_again_though_a_newer_slot_met_it_as_the_run_in_the_way():
    """Or the instance would watch an attempt of its own that nobody runs, and waste a lease and an attempt on it."""
    world = World()
    job = {"every": 60, "lease": 12, "heartbeat": 2, "max_attempts": 5}
    world.work = lambda instance, attempt: Work(600_000)
    a = world.instance(spec(**job), name="a")
    world.advance(0)
    b = world.instance(spec(**job), name="b")
    world.advance(44_000)
    a.kill()
    world.fate = lambda call: lost_answer(3_500) if call.kind == "claim" and call.body.takeover_of == 1 else DELIVERED
    world.advance(15_900)
    assert world.run(START_MS).attempt == 2, "the check was carried out"
    world.fate = lambda call: DELIVERED
    world.advance(30_000)
    assert [(e.slot_ms, e.reason, e.attempt) for e in b.events("start")] == [(START_MS, "takeover", 2)]
    assert [e.reason for e in b.events("skip")] == ["overlap"]


def test_a_check_that_waits_for_a_worker_when_the_store_goes_away_is_held_back_too():
    world = World()
    world.work = lambda instance, attempt: Work(20_000 if instance.name == "b" else 600_000)
    world.instance(hourly(), name="a")
    world.advance(0)
    b = world.instance(hourly(), spec("busy", every=3_600), name="b", workers=1, share=0.0)
    world.advance(15_000)
    world.cut()
    world.advance(60_000)
    world.mend()
    world.advance(3_000)
    (back_ms,) = [at for at, e in b.told if e.name == "store_ok"]
    world.advance(20_000)
    assert min(at for at in checks(world) if at >= back_ms) >= back_ms + HEARTBEAT_MS


def test_malformed_records_of_a_run_end_its_backup_alone():
    world, _, b = pair()
    bad = Fate(failure=Failure("malformed", permanent=True, job="job"))
    world.fate = lambda call: bad if call.kind == "claim" else DELIVERED
    world.advance(30_000)
    assert len(b.planner.backups) == 0
    assert b.summary() == [("store_error", "malformed")]
    assert b.planner.health.state == "up"


def test_a_runner_that_lost_its_run_becomes_its_backup():
    world, a, _b = pair()
    world.fate = lambda call: lost_request() if call.instance == "a" else DELIVERED
    world.advance(LEASE_MS + 3 * HEARTBEAT_MS)
    assert world.run(START_MS).runner == "b"
    world.work = lambda instance, attempt: Work(1_000)
    world.mend()
    world.advance(5_000)
    assert a.summary("lost") == [("lost", "unreachable")]
    world.advance(600_000)
    assert len(a.planner.backups) == 0
    assert world.run(START_MS).status == "success"
