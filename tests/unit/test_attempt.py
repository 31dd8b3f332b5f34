"""One attempt: heartbeats, the own deadline, stopping, the last word, checkpoints. Driven by hand, in boot time."""

from __future__ import annotations

from typing import Any

import pytest
from harness import DELIVERED, START_MS, Fate, SeededChance, Work, World, lost_answer, lost_request, spec

from leaselib._attempt import Attempt
from leaselib._effects import Beat, Effect, Emit, SetSignal, Wake
from leaselib._link import StoreClock
from leaselib._model import Record

SENT_MS = 1_000_000
LEASE_MS, HEARTBEAT_MS = 30_000, 5_000
DEADLINE_MS = SENT_MS + LEASE_MS - HEARTBEAT_MS


def attempt(share: float = 1.0, **options: Any) -> Attempt:
    """An attempt whose claim was sent at SENT_MS; by default the lease is 30 s, the heartbeat 5 s."""
    job = spec(**options)
    record = Record(
        job="job",
        slot_ms=START_MS,
        status="running",
        attempt=2,
        handovers=0,
        token="t",
        runner="a",
        fence=1,
        lease_ms=job.options.lease_ms,
        lease_end_ms=START_MS + job.options.lease_ms,
        released=False,
        reason="takeover",
        started_ms=START_MS,
    )
    clock = StoreClock()
    clock.add(SENT_MS, SENT_MS, START_MS)
    return Attempt(job, record, clock, SeededChance("s", share), SENT_MS)


def running(share: float = 1.0, **options: Any) -> Attempt:
    """The same, its handler started right away."""
    made = attempt(share, **options)
    assert made.before_start(SENT_MS + 10).do == "start"
    made.start(SENT_MS + 10)
    return made


def told(effects: list[Effect]) -> list[tuple[str, str | None]]:
    """Name and reason of the events among effects."""
    return [(e.name, e.reason) for e in effects if isinstance(e, Emit)]


def kinds(effects: list[Effect]) -> list[type]:
    """What kinds of effects these are."""
    return [type(e) for e in effects]


# ---- heartbeats -------------------------------------------------------------------------------------------------


def test_the_first_heartbeat_is_due_one_interval_after_the_claim_was_sent():
    run = running()
    assert run.due_boot_ms() == SENT_MS + HEARTBEAT_MS
    assert run.tick(SENT_MS + HEARTBEAT_MS - 1) == []
    assert kinds(run.tick(SENT_MS + HEARTBEAT_MS)) == [Beat]
    assert run.tick(SENT_MS + HEARTBEAT_MS + 1) == [], "it is handed over once"


def test_each_next_heartbeat_counts_from_the_send_of_the_last():
    run = running()
    sent_ms = SENT_MS + HEARTBEAT_MS
    run.beat_sent()
    run.beat_answered(True, sent_ms, sent_ms + 3_000)
    step = run.next_beat(sent_ms + 3_000)
    assert (step.do, step.wait_ms) == ("wait", HEARTBEAT_MS - 3_000)
    assert run.next_beat(sent_ms + HEARTBEAT_MS).do == "send"


def test_a_heartbeat_may_take_an_interval_but_never_longer_than_the_lease_is_trusted():
    run = running()
    assert run.next_beat(SENT_MS + HEARTBEAT_MS).timeout_ms == 5_000
    assert run.next_beat(DEADLINE_MS - 700).timeout_ms == 700
    assert run.next_beat(DEADLINE_MS + 1).timeout_ms == 5_000, "once trust is gone, there is nothing left to guard"


def test_failed_heartbeats_come_again_with_growing_delays_of_at_most_an_interval():
    run = running()
    now_ms, waits = SENT_MS + HEARTBEAT_MS, []
    for _ in range(10):
        run.beat_failed(now_ms)
        waits.append(run.next_beat(now_ms).wait_ms)
        now_ms += waits[-1]
    assert waits == [50, 100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000, 5_000]


def test_delays_are_jittered_by_up_to_half():
    run = running(share=0.0)
    run.beat_failed(SENT_MS + HEARTBEAT_MS)
    assert run.next_beat(SENT_MS + HEARTBEAT_MS).wait_ms == 25


def test_when_the_store_is_back_an_overdue_heartbeat_is_sent_at_once():
    run = running()
    assert run.store_back(SENT_MS + 10) == [], "nothing is overdue"
    for _ in range(8):
        run.beat_failed(SENT_MS + 6_000)
    assert kinds(run.store_back(SENT_MS + 6_100)) == [Wake]
    assert run.next_beat(SENT_MS + 6_100).do == "send"


def test_when_the_store_is_back_an_overdue_last_word_is_sent_at_once():
    run = running()
    run.handler_ended(None, None, SENT_MS + 1_000)
    for _ in range(8):
        run.word_failed(SENT_MS + 6_000)
    assert run.next_word(SENT_MS + 6_100).do == "wait"
    assert kinds(run.store_back(SENT_MS + 6_100)) == [Wake]
    assert run.next_word(SENT_MS + 6_100).do == "send"


def test_heartbeats_go_on_while_the_last_word_is_tried_but_not_after_a_release():
    run = running()
    run.handler_ended(None, None, SENT_MS + 2_000)
    assert run.next_beat(SENT_MS + HEARTBEAT_MS).do == "send"
    released = running()
    released.stop()
    released.handler_ended("stop", "trace", SENT_MS + 2_000)
    assert released.next_beat(SENT_MS + HEARTBEAT_MS).do == "done"


# ---- the own deadline -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lease", "heartbeat", "trusted_ms"), [(30, 5, 25_000), (30, 14, 22_500), (0.4, 0.1, 300), (10, 1, 9_000)]
)
def test_trust_ends_the_smaller_of_heartbeat_and_quarter_lease_before_the_lease(
    lease: float, heartbeat: float, trusted_ms: int
):
    run = running(lease=lease, heartbeat=heartbeat)
    assert run.deadline_boot_ms == SENT_MS + trusted_ms
    assert not run.expired(SENT_MS + trusted_ms - 1)
    assert run.expired(SENT_MS + trusted_ms)


def test_a_heartbeat_moves_the_deadline_by_its_send_not_by_its_answer():
    run = running()
    run.beat_answered(True, SENT_MS + 6_000, SENT_MS + 20_000)
    assert run.deadline_boot_ms == SENT_MS + 6_000 + 25_000


def test_an_answer_that_overtook_a_later_one_moves_the_deadline_not_back():
    run = running()
    run.beat_answered(True, SENT_MS + 6_000, SENT_MS + 6_500)
    run.beat_answered(True, SENT_MS + 5_000, SENT_MS + 7_000)
    assert run.deadline_boot_ms == SENT_MS + 6_000 + 25_000


def test_at_the_deadline_the_signal_is_set_before_lost_is_told_and_once():
    run = running()
    run.beating = True
    assert run.due_boot_ms() == DEADLINE_MS
    effects = run.tick(DEADLINE_MS)
    assert kinds(effects) == [SetSignal, Emit]
    assert told(effects) == [("lost", "unreachable")]
    assert run.abort_reason == "unreachable"
    assert run.tick(DEADLINE_MS + 1) == []
    assert run.due_boot_ms() is None


def test_a_refusal_after_the_deadline_is_not_told_again():
    run = running()
    run.tick(DEADLINE_MS)
    effects = run.beat_answered(False, DEADLINE_MS, DEADLINE_MS + 10)
    assert told(effects) == []
    assert run.abort_reason == "unreachable"
    assert told(run.handler_ended("late", "trace", DEADLINE_MS + 20)) == []
    assert run.next_word(DEADLINE_MS + 20).do == "done", "a refused run has no last word"


def test_a_refusal_is_lost_at_once_with_the_signal_first():
    run = running()
    effects = run.beat_answered(False, SENT_MS + 5_000, SENT_MS + 5_010)
    assert kinds(effects) == [SetSignal, Emit, Wake]
    assert told(effects) == [("lost", "refused")]
    assert told(run.handler_ended(None, None, SENT_MS + 6_000)) == []
    assert run.phase == "over"
    assert not run.recorded


def test_a_heartbeat_that_gets_through_after_the_deadline_counts():
    run = running()
    run.tick(DEADLINE_MS)
    run.beat_answered(True, DEADLINE_MS + 1_000, DEADLINE_MS + 1_010)
    assert not run.expired(DEADLINE_MS + 2_000)
    run.handler_ended(None, None, DEADLINE_MS + 2_000)
    assert told(run.word_answered(True, DEADLINE_MS + 2_010)) == [("success", None)]


def test_with_continue_each_outage_is_one_store_error_and_no_signal():
    run = running(on_store_loss="continue")
    run.beating = True
    assert told(run.tick(DEADLINE_MS)) == [("store_error", "unreachable")]
    assert run.tick(DEADLINE_MS + 1) == []
    assert not run.expired(DEADLINE_MS + 1)
    assert run.abort_reason is None
    run.beat_answered(True, DEADLINE_MS + 5_000, DEADLINE_MS + 5_010)
    assert run.due_boot_ms() == DEADLINE_MS + 30_000
    assert told(run.tick(DEADLINE_MS + 30_000)) == [("store_error", "unreachable")]


def test_with_continue_a_refusal_still_stops_the_handler():
    run = running(on_store_loss="continue")
    run.tick(DEADLINE_MS)
    effects = run.beat_answered(False, DEADLINE_MS + 1, DEADLINE_MS + 2)
    assert told(effects) == [("lost", "refused")]
    assert run.abort_reason == "refused"


# ---- before the handler -----------------------------------------------------------------------------------------


def test_a_worker_that_slept_after_its_claim_gets_a_heartbeat_through_first():
    run = attempt()
    step = run.before_start(DEADLINE_MS)
    assert step.do == "send"
    run.beat_sent()
    run.beat_failed(DEADLINE_MS + 10)
    step = run.before_start(DEADLINE_MS + 10)
    assert (step.do, step.wait_ms) == ("wait", 50)
    run.beat_answered(True, DEADLINE_MS + 60, DEADLINE_MS + 70)
    assert run.before_start(DEADLINE_MS + 70).do == "start"


def test_a_heartbeat_that_is_refused_before_the_start_is_lost_without_a_start():
    run = attempt()
    assert run.before_start(DEADLINE_MS).do == "send"
    assert told(run.beat_answered(False, DEADLINE_MS, DEADLINE_MS + 5)) == [("lost", "refused")]
    assert run.before_start(DEADLINE_MS + 5).do == "done"
    assert run.never_started(DEADLINE_MS + 5) == []
    assert run.next_word(DEADLINE_MS + 5).do == "done"


def test_a_run_that_is_stopped_before_its_start_is_released():
    run = attempt()
    run.stop()
    assert run.before_start(SENT_MS + 1).do == "done"
    run.never_started(SENT_MS + 1)
    assert run.word == "release"
    effects = run.word_answered(True, SENT_MS + 2)
    assert told(effects) == [("interrupted", "stopping")]
    assert effects[0].handed_over is True


def test_no_deadline_is_told_before_the_handler_started():
    run = attempt()
    run.beating = True
    assert run.tick(DEADLINE_MS + 1) == []


def test_start_tells_the_runs_reason():
    run = attempt()
    (event,) = run.start(SENT_MS + 10)
    assert (event.name, event.reason, event.attempt, event.at_ms) == ("start", "takeover", 2, START_MS + 10)


# ---- what the handler's end becomes -----------------------------------------------------------------------------

REFUSE, STOP, TIMEOUT, DEADLINE = "refused", "stopping", "timeout", "unreachable"


@pytest.mark.parametrize(
    ("abort", "raises", "word"),
    [
        (None, False, "success"),
        (None, True, "failed"),
        (STOP, False, "success"),
        (STOP, True, "release"),
        (DEADLINE, False, "success"),
        (DEADLINE, True, "release"),
        (TIMEOUT, False, "success"),
        (TIMEOUT, True, "failed"),
        (REFUSE, False, None),
        (REFUSE, True, None),
    ],
)
def test_the_last_word_follows_from_why_it_should_stop_and_whether_it_raised(
    abort: str | None, raises: bool, word: str | None
):
    run = running(max_runtime=20 if abort == TIMEOUT else None)
    if abort == STOP:
        run.stop()
    elif abort == TIMEOUT:
        run.tick(SENT_MS + 20_010)
    elif abort == REFUSE:
        run.beat_answered(False, SENT_MS, SENT_MS)
    elif abort == DEADLINE:
        run.tick(DEADLINE_MS)
    assert run.abort_reason == abort
    run.handler_ended("boom" if raises else None, "trace" if raises else None, SENT_MS + 26_000)
    assert run.word == word


def test_max_runtime_sets_the_signal_once_and_counts_from_the_start():
    run = running(max_runtime=3)
    assert run.due_boot_ms() == SENT_MS + 3_010
    assert run.tick(SENT_MS + 3_009) == []
    assert kinds(run.tick(SENT_MS + 3_010)) == [SetSignal]
    assert run.abort_reason == "timeout"
    assert run.tick(SENT_MS + 3_011) == []


def test_success_and_failure_carry_duration_error_and_traceback():
    run = running()
    run.handler_ended("RuntimeError: boom", "trace", SENT_MS + 2_010)
    assert run.next_word(SENT_MS + 2_010).do == "send"
    (event,) = run.word_answered(True, SENT_MS + 2_020)
    assert (event.name, event.error, event.duration_ms, event.trace) == ("failed", "RuntimeError: boom", 2_000, "trace")
    assert run.recorded
    assert run.next_word(SENT_MS + 2_020).do == "done"


def test_a_refused_finish_is_lost_with_the_handlers_error():
    run = running()
    run.handler_ended("boom", "trace", SENT_MS + 100)
    (event,) = run.word_answered(False, SENT_MS + 200)
    assert (event.name, event.reason, event.error) == ("lost", "refused", "boom")
    assert not run.recorded


def test_an_error_text_is_cut_to_what_stores_keep():
    run = running()
    run.handler_ended("x" * 10_000 + "\0", "trace", SENT_MS + 100)
    assert len(run.error) == 4_096


def test_a_last_word_is_sent_past_the_lease_end_with_delays_up_to_a_heartbeat():
    run = running()
    now_ms = SENT_MS + 1_000
    run.handler_ended(None, None, now_ms)
    waits = []
    for _ in range(40):
        assert run.next_word(now_ms).do == "send"
        run.word_failed(now_ms)
        waits.append(run.next_word(now_ms).wait_ms)
        now_ms += waits[-1]
    assert now_ms > SENT_MS + 2 * LEASE_MS
    assert max(waits) == HEARTBEAT_MS
    assert run.tick(now_ms) == [Beat(run)], "no loss is told while the word is tried"
    assert told(run.word_answered(True, now_ms)) == [("success", None)]


def test_a_heartbeat_that_is_refused_while_the_word_is_tried_decides_nothing():
    run = running()
    run.handler_ended(None, None, SENT_MS + 1_000)
    assert run.beat_answered(False, SENT_MS + 900, SENT_MS + 1_010) == []
    assert told(run.word_answered(True, SENT_MS + 1_020)) == [("success", None)]


def test_a_release_that_is_refused_after_a_lost_answer_was_a_hand_over():
    run = running()
    run.stop()
    run.handler_ended("stop", "trace", SENT_MS + 100)
    run.word_failed(SENT_MS + 200)
    effects = run.word_answered(False, SENT_MS + 300)
    assert told(effects) == [("interrupted", "stopping")]
    assert effects[0].handed_over is True


def test_a_release_that_is_refused_at_its_first_send_is_lost():
    run = running()
    run.stop()
    run.handler_ended("stop", "trace", SENT_MS + 100)
    assert told(run.word_answered(False, SENT_MS + 300)) == [("lost", "refused")]


def test_when_stop_ends_the_tries_the_fate_is_lost_unreachable_and_told_once():
    run = running()
    run.handler_ended(None, None, SENT_MS + 100)
    run.word_failed(SENT_MS + 200)
    run.abandon()
    assert run.next_word(SENT_MS + 10_000).do == "done"
    assert told(run.give_up(SENT_MS + 10_000)) == [("lost", "unreachable")]
    assert run.give_up(SENT_MS + 10_001) == []


def test_a_handler_that_ends_after_stop_gave_it_up_still_sends_its_word_once():
    run = running()
    run.stop()
    run.abandon()
    assert run.due_boot_ms() is None
    assert run.tick(DEADLINE_MS + 1) == []
    assert run.next_beat(SENT_MS + HEARTBEAT_MS).do == "done"
    run.handler_ended(None, None, SENT_MS + 90_000)
    assert run.next_word(SENT_MS + 90_000).do == "send"
    run.word_failed(SENT_MS + 90_001)
    assert run.next_word(SENT_MS + 90_001).do == "done"


def test_a_heartbeat_that_is_refused_after_the_handlers_end_is_the_last_one():
    """The last word may have been carried out, and only its answer be missing: there is nothing to renew then."""
    run = running()
    run.handler_ended(None, None, SENT_MS + 4_000)
    run.word_failed(SENT_MS + 4_100)
    assert run.next_beat(SENT_MS + HEARTBEAT_MS).do == "send", "it is kept until the word is accepted"
    run.beat_sent()
    assert run.beat_answered(False, SENT_MS + HEARTBEAT_MS, SENT_MS + HEARTBEAT_MS + 1) == []
    assert run.next_beat(SENT_MS + 2 * HEARTBEAT_MS).do == "done"
    assert run.next_word(SENT_MS + HEARTBEAT_MS).do == "send"
    assert told(run.word_answered(True, SENT_MS + HEARTBEAT_MS + 10)) == [("success", None)]


# ---- checkpoints ------------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_with_the_next_heartbeat_and_then_no_more():
    run = running()
    assert run.beat_sent() is None
    assert run.checkpoint("1", SENT_MS + 20, flush=False) == []
    assert run.pending_checkpoint == "1"
    assert run.beat_sent() == "1"
    run.beat_failed(SENT_MS + 5_000)
    assert run.beat_sent() == "1", "its fate is unknown, so it goes again"
    run.beat_answered(True, SENT_MS + 5_050, SENT_MS + 5_060)
    assert run.beat_sent() is None
    assert run.pending_checkpoint is None


def test_a_checkpoint_that_came_while_a_heartbeat_was_under_way_stays_pending():
    run = running()
    run.checkpoint("1", SENT_MS + 20, flush=False)
    assert run.beat_sent() == "1"
    run.checkpoint("2", SENT_MS + 30, flush=False)
    run.beat_answered(True, SENT_MS + 25, SENT_MS + 40)
    assert (run.stored_serial, run.checkpoint_serial, run.pending_checkpoint) == (1, 2, "2")


def test_flush_makes_a_heartbeat_due_now():
    run = running()
    assert kinds(run.checkpoint("1", SENT_MS + 20, flush=True)) == [Beat]
    assert run.next_beat(SENT_MS + 20).do == "send"
    assert kinds(run.checkpoint("2", SENT_MS + 30, flush=True)) == [Wake]


def test_a_flush_while_a_heartbeat_is_under_way_doesnt_wait_for_another_interval():
    run = running()
    run.beating = True
    run.beat_sent()
    run.checkpoint("1", SENT_MS + 30, flush=True)
    run.beat_answered(True, SENT_MS + 25, SENT_MS + 40)
    assert run.next_beat(SENT_MS + 40).do == "send"
    assert run.beat_sent() == "1"
    run.beat_answered(True, SENT_MS + 40, SENT_MS + 50)
    assert run.next_beat(SENT_MS + 50).do == "wait"


# ---- together with a planner and a store ------------------------------------------------------------------------


def test_a_finish_whose_answer_was_lost_is_one_success():
    world = World()
    fates = iter([lost_answer(200), lost_answer(200)])
    world.fate = lambda call: next(fates, DELIVERED) if call.kind == "finish" else DELIVERED
    a = world.instance(spec(every=3_600))
    world.advance(5_000)
    assert len(world.sent("finish")) == 3
    assert a.summary("success", "lost") == [("success", None)]


def test_a_finished_job_survives_an_outage_of_two_leases_without_a_second_start():
    world = World()
    world.work = lambda instance, made: Work(10_000)
    a = world.instance(spec(every=3_600))
    world.advance(0)
    b = world.instance(spec(every=3_600), name="b")
    world.advance(9_000)
    world.cut()
    world.advance(2 * LEASE_MS)
    world.mend()
    world.advance(30_000)
    assert a.summary("success", "lost") == [("success", None)]
    assert b.events("start") == []


def test_a_handler_that_heeds_its_signal_at_stop_hands_its_checkpoint_over():
    world = World()
    world.work = lambda instance, made: Work(60_000, heeds_ms=20)
    a = world.instance(spec(every=3_600))
    world.advance(1_000)
    a.decide(lambda now_ms: a.attempt().checkpoint('{"n": 1}', now_ms, flush=False))
    a.stop()
    world.advance(100)
    assert [(e.name, e.reason, e.handed_over) for e in a.events("interrupted")] == [("interrupted", "stopping", True)]
    b = world.instance(spec(every=3_600), name="b")
    world.advance(100)
    assert b.summary("start") == [("start", "hand-over")]
    assert b.attempt().record.checkpoint == '{"n": 1}'


def test_a_claim_that_won_while_its_worker_was_frozen_starts_only_with_a_renewed_lease():
    world = World()
    world.fate = lambda call: Fate(0, 28_000) if call.kind == "claim" else DELIVERED
    a = world.instance(spec(every=3_600))
    world.advance(28_000)
    assert [c.kind for c in world.calls] == ["load", "claim", "heartbeat", "finish"]
    assert a.summary() == [("start", "catch-up"), ("success", None)]


def test_a_claim_that_won_and_was_taken_over_meanwhile_is_lost_without_a_start():
    world = World()
    world.work = lambda instance, made: Work(60_000)
    world.fate = lambda call: Fate(0, 60_000) if call.kind == "claim" and call.instance == "a" else DELIVERED
    a = world.instance(spec(every=3_600))
    world.advance(10)
    b = world.instance(spec(every=3_600), name="b")
    world.advance(61_000)
    assert b.summary("start") == [("start", "takeover")]
    assert a.summary() == [("lost", "refused")]
    assert len(a.planner.backups) == 1


def test_a_runner_that_is_cut_off_stops_before_anybody_can_take_over():
    world = World()
    world.work = lambda instance, made: Work(600_000, heeds_ms=0)
    a = world.instance(spec(every=3_600), share=None)
    world.advance(0)
    b = world.instance(spec(every=3_600), name="b", share=None)
    world.advance(12_000)
    world.fate = lambda call: lost_request(100) if call.instance == "a" else DELIVERED
    world.advance(60_000)
    (stopped_ms, reason) = next(iter(a.signals.values()))
    assert (stopped_ms - START_MS, reason) == (10_000 + 25_000, "unreachable")
    (took_over_ms,) = [at for at, e in b.told if e.name == "start"]
    assert took_over_ms >= START_MS + 10_000 + LEASE_MS > stopped_ms


# ---- ctx.finish: the handler's own transaction ends the run --------------------------------------------------------


def finishing(**options: Any) -> Attempt:
    """One whose handler has called ctx.finish just after its start."""
    run = running(**options)
    run.finish_inside()
    run.finish_written()
    return run


def test_after_ctx_finish_the_next_heartbeat_is_sent_one_interval_before_trust_ends():
    """Earlier ones would only wait for the handler's transaction."""
    run = finishing()
    due_ms = DEADLINE_MS - HEARTBEAT_MS
    assert run.due_boot_ms() == due_ms
    assert run.tick(due_ms - 1) == []
    assert kinds(run.tick(due_ms)) == [Beat]
    assert run.next_beat(due_ms).do == "send"


def test_a_heartbeat_refused_in_time_after_ctx_finish_says_that_it_was_committed():
    """No more heartbeats, no deadline, and whatever the handler does then the record is a success."""
    run = finishing()
    run.tick(DEADLINE_MS - 20)
    run.beat_sent()
    assert run.beat_answered(False, DEADLINE_MS - 20, DEADLINE_MS - 10) == []
    assert run.next_beat(DEADLINE_MS).do == "done"
    assert run.due_boot_ms() is None
    assert not run.expired(DEADLINE_MS + 60_000)
    run.handler_ended(None, None, DEADLINE_MS + 60_000)
    assert run.word == "failed"
    assert run.word_answered(False, DEADLINE_MS + 60_010) == []
    assert run.word == "success"
    assert told(run.word_answered(True, DEADLINE_MS + 60_020)) == [("success", None)]


def test_a_heartbeat_accepted_after_ctx_finish_says_that_it_was_rolled_back():
    """Heartbeats, the deadline and refusals are then as before."""
    run = finishing()
    run.beat_sent()
    sent_ms = DEADLINE_MS - 20
    assert run.beat_answered(True, sent_ms, sent_ms + 10) == []
    assert not run.ending_inside
    assert run.deadline_boot_ms == sent_ms + LEASE_MS - HEARTBEAT_MS
    assert run.expired(run.deadline_boot_ms)
    run.beat_sent()
    assert told(run.beat_answered(False, sent_ms + 100, sent_ms + 110)) == [("lost", "refused")]


def test_a_heartbeat_that_was_sent_before_ctx_finish_returned_says_nothing_about_it():
    """It may have been decided before ctx.finish wrote."""
    run = running()
    run.beat_sent()
    run.finish_inside()
    run.finish_written()
    assert run.beat_answered(True, SENT_MS + 20, SENT_MS + 30) == []
    assert run.ending_inside


def test_a_heartbeat_that_tells_of_an_undone_ctx_finish_says_nothing_about_the_next_one():
    """It was sent between the two, and answered after the second had written: committed, that one is no loss."""
    run = finishing()
    run.beat_sent()
    run.finish_inside()
    assert run.beat_answered(True, SENT_MS + 20, SENT_MS + 30) == []
    run.finish_written()
    assert run.ending_inside
    run.beat_sent()
    assert run.beat_answered(False, DEADLINE_MS - 20, DEADLINE_MS - 10) == []
    run.handler_ended(None, None, DEADLINE_MS)
    run.word_answered(False, DEADLINE_MS + 10)
    assert told(run.word_answered(True, DEADLINE_MS + 20)) == [("success", None)]


@pytest.mark.parametrize("policy", ["abort", "continue"])
def test_a_heartbeat_refused_too_late_after_ctx_finish_stops_the_handler_and_the_last_word_decides(policy):
    """The transaction was committed late, or rolled back and somebody else took the run over: both refuse."""
    run = finishing(on_store_loss=policy)
    run.tick(DEADLINE_MS)
    assert run.abort_reason == ("unreachable" if policy == "abort" else None)
    run.beat_sent()
    run.beat_answered(False, DEADLINE_MS - 20, DEADLINE_MS + 10)
    assert run.abort_reason == ("unreachable" if policy == "abort" else "refused")
    run.handler_ended("Aborted: stop", None, DEADLINE_MS + 20)
    assert run.word == ("release" if policy == "abort" else "failed")
    run.word_answered(False, DEADLINE_MS + 30)
    assert run.word == "success"


def test_with_the_transaction_of_ctx_finish_still_open_at_the_deadline_the_handler_is_stopped():
    """Whether it will be committed can't be known, and once it is rolled back the run is taken over."""
    run = finishing()
    run.tick(DEADLINE_MS - HEARTBEAT_MS)
    run.beat_sent()
    assert told(run.beat_failed(DEADLINE_MS)) == [("lost", "unreachable")]
    assert run.expired(DEADLINE_MS)
    assert run.abort_reason == "unreachable"


def test_an_undone_ctx_finish_sends_a_heartbeat_at_once():
    """ctx.confirm found the run held after all: heartbeats were held back meanwhile."""
    run = finishing()
    assert kinds(run.finish_undone(SENT_MS + 100)) == [Beat]
    assert run.next_beat(SENT_MS + 100).do == "send"
    assert not run.ending_inside
