"""Claims, outcome by outcome: each row of the table of outcomes, on every store."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from bench import JOB, Bench, ms, run_in

from leaselib._model import Attempt, Run, epoch_ms
from leaselib.errors import ConfigurationError

# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"reason": "oops"}, {"reason": None}, {"reason": ""}, {"max_late": -1}, {"max_late": math.nan},
        {"max_late": math.inf}, {"max_late": "60"}, {"max_late": None}, {"max_late": True}, {"keep": -1},
        {"keep": math.nan}, {"keep": "60"}, {"history_size": -1}, {"history_size": 1.5}, {"history_size": None},
        {"history_size": True}, {"takeover_of": -1}, {"takeover_of": 1.0}, {"takeover_of": "1"}, {"lease": 0},
        {"lease": math.nan}, {"max_attempts": 0}, {"max_attempts": None}, {"overlap": "both"}, {"overlap": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_claim_with_an_impossible_argument_is_refused_and_never_sent(bench: Bench, options: dict[str, Any]) -> None:
    """So that nothing is recorded which no store could read again."""
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        bench.claim(**options)
    assert bench.store.get(JOB, bench.slot()) is None
    assert bench.claim().outcome == "won"


def test_durations_of_a_claim_may_be_timedeltas(bench: Bench) -> None:
    """As all durations may."""
    assert bench.claim(-60, lease=timedelta(seconds=5), max_late=timedelta(minutes=2)).outcome == "won"


# ---- won -------------------------------------------------------------------------------------------------------------


def test_a_claim_without_state_wins_attempt_1(bench: Bench) -> None:
    """Rule 1: every field of the new run, in the answer as in the store."""
    answer = bench.claim(token="t", runner="api-2", lease=12.5, reason="catch-up")
    now, fence = answer.now, run_in(answer).fence
    expected = Run(
        job=JOB,
        slot=bench.base,
        status="running",
        attempt=1,
        handovers=0,
        token="t",
        runner="api-2",
        fence=fence,
        lease=12.5,
        lease_end=now + timedelta(seconds=12.5),
        released=False,
        reason="catch-up",
        started_at=now,
        ended_at=None,
        error=None,
        checkpoint=None,
        attempts=(Attempt(1, "api-2", now, None, None),),
    )
    assert (answer.outcome, answer.run, answer.wait, answer.interrupted) == ("won", expected, 0, ())
    assert bench.run() == expected


def test_an_answer_names_its_token_the_stores_time_and_its_epoch(bench: Bench) -> None:
    """Whatever the outcome: an answer can be matched to its question, and teaches the store's clock."""
    won = bench.win()
    answers = [won, bench.again(won), bench.claim(), bench.claim(1), bench.claim(takeover_of=1), bench.claim(9_999)]
    answers += [bench.claim(-9_999), bench.claim(-9_999, takeover_of=1)]
    outcomes = [answer.outcome for answer in answers]
    assert outcomes == ["won", "won", "running", "overlap", "running", "early", "late", "gone"]
    epoch = bench.store.ping().epoch
    for answer in answers:
        assert answer.epoch == epoch
        assert bench.base <= answer.now <= bench.store.now()


@pytest.mark.parametrize("reason", ["scheduled", "catch-up", "manual"])
def test_a_new_run_records_the_claims_reason(bench: Bench, reason: str) -> None:
    """The first attempt is as its claim says."""
    assert run_in(bench.win(reason=reason)).reason == reason


def test_a_claim_sent_again_is_won_again(bench: Bench) -> None:
    """Its answer was lost: same attempt, same fence, and the lease is renewed by a write."""
    first = bench.win(lease=30)
    bench.clock.advance(20)
    again = bench.again(first)
    assert again.outcome == "won"
    assert again.run == bench.run()
    run, before = bench.run(), run_in(first)
    assert run.lease_end == again.now + timedelta(seconds=30) > before.lease_end
    unchanged = ("attempt", "fence", "started_at", "runner", "token", "reason", "handovers", "attempts", "status")
    for name in unchanged:
        assert getattr(run, name) == getattr(before, name)


def test_a_claim_sent_again_may_come_any_number_of_times(bench: Bench) -> None:
    """One logical claim yields one attempt, however often it is sent."""
    first = bench.win()
    answers = [bench.again(first) for _ in range(5)]
    assert {(a.outcome, run_in(a).attempt, run_in(a).fence) for a in answers} == {("won", 1, run_in(first).fence)}


def test_a_claim_sent_again_after_the_lease_ran_out_is_won_again(bench: Bench) -> None:
    """Nobody took over: it is still this token's attempt."""
    first = bench.win(lease=10)
    bench.clock.advance(60)
    again = bench.again(first)
    assert again.outcome == "won"
    assert run_in(again).attempt == 1
    assert bench.run().lease_end == again.now + timedelta(seconds=10)


def test_a_claim_sent_again_long_after_its_lateness_is_won_again(bench: Bench) -> None:
    """Lateness is for runs without state."""
    first = bench.win(max_late=1)
    bench.clock.advance(600)
    assert bench.again(first, max_late=1).outcome == "won"


def test_won_again_renews_by_the_lease_that_the_run_stored(bench: Bench) -> None:
    """The options of whoever asks don't count: a heartbeat may have changed the length meanwhile."""
    first = bench.win(lease=30)
    assert bench.beat(first, lease=90)
    again = bench.again(first, lease=30)
    assert run_in(again).lease == 90
    assert bench.run().lease_end == again.now + timedelta(seconds=90)


def test_won_again_of_a_takeover(bench: Bench) -> None:
    """A takeover may be retried as safely as a first claim."""
    bench.expire(bench.win())
    second = bench.win(takeover_of=1)
    again = bench.again(second, takeover_of=1)
    assert again.outcome == "won"
    assert (run_in(again).attempt, run_in(again).fence) == (2, run_in(second).fence)


def test_a_claim_sent_again_after_its_release_is_not_won(bench: Bench) -> None:
    """Released stays released: the answer is `running`, and nothing changes."""
    first = bench.win()
    assert bench.release(first)
    with bench.nothing_changes():
        assert bench.again(first).outcome == "running"


def test_a_claim_sent_again_after_a_takeover_is_not_won(bench: Bench) -> None:
    """The old token is told `running`, as anybody else."""
    first = bench.win()
    bench.expire(first)
    bench.win(takeover_of=1)
    with bench.nothing_changes():
        assert bench.again(first).outcome == "running"


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_claim_sent_again_after_its_takeover_died_too_is_not_won(bench: Bench, handed_over: bool) -> None:
    """One token, one attempt: the first attempt's claim, delivered once more, doesn't start a third."""
    first = bench.win()
    if handed_over:
        bench.release(first)
    else:
        bench.expire(first)
    bench.expire(bench.win(takeover_of=1))
    with bench.nothing_changes():
        assert bench.again(first).outcome != "won"
    assert bench.win(takeover_of=2).outcome == "won"


def test_a_takeover_sent_again_after_the_next_takeover_died_too_is_not_won(bench: Bench) -> None:
    """The same for attempt 2's claim, which named attempt 1."""
    bench.expire(bench.win(max_attempts=9))
    second = bench.win(takeover_of=1, max_attempts=9)
    bench.expire(second)
    bench.expire(bench.win(takeover_of=2, max_attempts=9))
    with bench.nothing_changes():
        assert bench.again(second, takeover_of=1, max_attempts=9).outcome != "won"


# ---- running ---------------------------------------------------------------------------------------------------------


def test_another_token_is_told_running_while_the_lease_is_live(bench: Bench) -> None:
    """Nothing is written, and the answer carries the run that is in the way."""
    bench.win()
    with bench.nothing_changes():
        answer = bench.claim(runner="runner-2")
    assert (answer.outcome, answer.run) == ("running", bench.run())


@pytest.mark.parametrize("offset_ms", [-2000, -1, 0, 1, 2000])
def test_a_lease_is_live_until_the_stores_clock_reaches_its_end(bench: Bench, offset_ms: int) -> None:
    """A millisecond before its end: running. At its end and after: the next attempt. For claims and takeovers."""
    for job, options in {"claimed": {}, "taken-over": {"takeover_of": 1}}.items():
        lease_end = run_in(bench.win(job=job, lease=30)).lease_end
        bench.set_now(lease_end + ms(offset_ms))
        answer = bench.claim(job=job, **options)
        assert answer.outcome == ("running" if answer.now < lease_end else "won")
        bench.set_now(bench.base)


def test_the_same_runner_with_another_token_is_told_running(bench: Bench) -> None:
    """Ownership is by token, never by the runner's name."""
    bench.win(runner="api")
    assert bench.claim(runner="api").outcome == "running"


# ---- finished --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["success", "failed"])
def test_a_run_that_was_finished_is_finished_for_every_claim(bench: Bench, status: str) -> None:
    """For a new claim, the run's own claim sent again, and a takeover."""
    first = bench.win()
    assert bench.finish(first, status)  # type: ignore[arg-type]
    with bench.nothing_changes():
        answers = [bench.claim(), bench.again(first), bench.claim(takeover_of=1)]
    assert [(a.outcome, a.run) for a in answers] == [("finished", bench.run())] * 3


def test_an_interrupted_run_is_finished_for_every_claim(bench: Bench) -> None:
    """Only the claim that marked it is told `interrupted`."""
    first = bench.win(max_attempts=1)
    bench.expire(first)
    assert bench.claim(max_attempts=1).outcome == "interrupted"
    with bench.nothing_changes():
        answers = [bench.claim(max_attempts=9), bench.again(first), bench.claim(takeover_of=1, max_attempts=9)]
    assert [(a.outcome, run_in(a).status) for a in answers] == [("finished", "interrupted")] * 3


def test_an_ended_run_is_finished_however_late_it_is_asked_for(bench: Bench) -> None:
    """As long as it is kept, its state answers before its lateness does."""
    bench.ended()
    bench.clock.advance(100_000)
    assert bench.claim(max_late=0).outcome == "finished"


# ---- interrupted -----------------------------------------------------------------------------------------------------


def test_a_dead_run_without_attempts_left_becomes_interrupted(bench: Bench) -> None:
    """Rule 3, and the run says why and when."""
    bench.expire(bench.win(max_attempts=2))
    second = bench.win(takeover_of=1, max_attempts=2)
    bench.expire(second)
    answer = bench.claim(takeover_of=2, max_attempts=2)
    run = bench.run()
    assert (answer.outcome, answer.run) == ("interrupted", run)
    assert (run.status, run.error, run.ended_at) == ("interrupted", "max_attempts", answer.now)
    assert (run.attempt, run.token, run.fence) == (2, second.token, run_in(second).fence)
    assert [a.outcome for a in run.attempts] == ["expired", "interrupted"]


def test_the_claimers_max_attempts_decides(bench: Bench) -> None:
    """Two versions with different options run side by side: each claim is judged by its own."""
    bench.expire(bench.win(max_attempts=1))
    bench.expire(bench.win(takeover_of=1, max_attempts=2))
    assert bench.claim(takeover_of=2, max_attempts=2).outcome == "interrupted"


def test_a_dead_run_becomes_interrupted_once_a_newer_run_has_started(bench: Bench) -> None:
    """Under `allow` the newer one starts while the older one lives; the older isn't taken over after its death."""
    old = bench.win(0, overlap="allow", lease=30)
    bench.clock.advance(5)
    bench.win(5, overlap="allow", lease=90)
    bench.expire(old)
    answer = bench.claim(0, takeover_of=1, overlap="allow")
    run = bench.run(0)
    assert (answer.outcome, answer.run) == ("interrupted", run)
    assert (run.status, run.error, run.ended_at) == ("interrupted", "superseded", answer.now)


def test_a_released_run_becomes_interrupted_once_a_newer_run_has_started(bench: Bench) -> None:
    """A hand-over doesn't put it before the newer run either."""
    old = bench.win(0, overlap="allow")
    bench.clock.advance(5)
    bench.win(5, overlap="allow")
    assert bench.release(old)
    assert bench.claim(0, takeover_of=1, overlap="allow").outcome == "interrupted"


def test_a_newer_run_counts_also_when_it_has_ended(bench: Bench) -> None:
    """It has started, that is what matters."""
    old = bench.win(0, overlap="allow")
    bench.clock.advance(5)
    bench.ended(5, overlap="allow")
    bench.expire(old)
    assert bench.claim(0, takeover_of=1).outcome == "interrupted"


def test_a_newer_run_counts_also_when_it_was_purged(bench: Bench) -> None:
    """The store keeps the highest slot that started."""
    old = bench.win(0, overlap="allow")
    bench.clock.advance(5)
    bench.ended(5, overlap="allow")
    assert bench.store.purge(JOB) == 1
    bench.expire(old)
    assert bench.claim(0, takeover_of=1).outcome == "interrupted"


def test_starting_a_run_interrupts_every_older_dead_run_in_the_same_step(bench: Bench) -> None:
    """Three dead ones, one of them released; the answer lists them."""
    bench.win(0, overlap="allow", lease=10)
    bench.win(1, overlap="allow", lease=10)
    handed_over = bench.win(0.5, overlap="allow", lease=90)
    assert bench.release(handed_over)
    bench.clock.advance(20)
    answer = bench.win(20)
    assert sorted(answer.interrupted) == [slot_ms(bench, at) for at in (0, 0.5, 1)]
    for at in (0, 0.5, 1):
        run = bench.run(at)
        assert (run.status, run.error, run.ended_at) == ("interrupted", "superseded", answer.now)
    assert [a.outcome for a in bench.run(0).attempts] == ["interrupted"]


def test_starting_a_run_leaves_live_older_runs_alone(bench: Bench) -> None:
    """Under `allow` they go on side by side."""
    live = bench.win(0, overlap="allow", lease=90)
    dead = bench.win(1, overlap="allow", lease=5)
    bench.clock.advance(20)
    assert bench.win(20, overlap="allow").interrupted == (slot_ms(bench, 1),)
    assert bench.run(0).status == "running"
    assert bench.beat(live)
    assert not bench.beat(dead)


def test_a_refused_claim_interrupts_nobody(bench: Bench) -> None:
    """Only a run that starts does."""
    bench.win(0, overlap="allow", lease=5)
    bench.win(1, overlap="allow", lease=90)
    bench.clock.advance(20)
    with bench.nothing_changes():
        assert bench.claim(20).outcome == "overlap"


def test_a_takeover_under_allow_leaves_other_dead_runs_alone(bench: Bench) -> None:
    """Their runners may only be slow, and under `allow` they may go on beside it."""
    old = bench.win(0, overlap="allow", lease=5)
    new = bench.win(1, overlap="allow", lease=5)
    bench.expire(new)
    assert bench.win(1, takeover_of=1, overlap="allow").interrupted == ()
    assert bench.beat(old)


def test_a_takeover_under_skip_interrupts_every_other_dead_run(bench: Bench) -> None:
    """Else a slow runner could renew beside it, and two runs of the job would hold live leases."""
    old = bench.win(0, overlap="allow", lease=5)
    new = bench.win(1, overlap="allow", lease=5)
    bench.expire(new)
    assert bench.win(1, takeover_of=1).interrupted == (slot_ms(bench, 0),)
    assert bench.run(0).status == "interrupted"
    assert not bench.beat(old)


# ---- overlap ---------------------------------------------------------------------------------------------------------


def test_a_newer_slot_is_refused_while_an_older_run_is_live(bench: Bench) -> None:
    """Rule 5; the answer names the run in the way, and nothing is recorded."""
    bench.win(0)
    bench.clock.advance(10)
    with bench.nothing_changes():
        answer = bench.claim(10)
    assert (answer.outcome, answer.run) == ("overlap", bench.run(0))


def test_an_older_slot_is_refused_while_a_newer_run_is_live(bench: Bench) -> None:
    """No two runs of a job hold live leases at once, whichever of the two slots is older."""
    bench.clock.advance(10)
    bench.win(10)
    with bench.nothing_changes():
        answer = bench.claim(0)
    assert (answer.outcome, answer.run) == ("overlap", bench.run(10))


def test_overlap_names_the_newest_live_run(bench: Bench) -> None:
    """Of several, which only `allow` can have started."""
    for at in (0, 1, 2):
        bench.win(at / 2, overlap="allow")
    assert run_in(bench.claim(-5)).slot == bench.slot(1)


def test_a_run_that_ended_or_died_or_was_released_is_not_in_the_way(bench: Bench) -> None:
    """Only a live lease is."""
    bench.ended(0)
    bench.clock.advance(10)
    bench.expire(bench.win(10, lease=5))
    bench.clock.advance(5)
    assert bench.release(bench.win(20))
    bench.clock.advance(10)
    bench.win(30)


@pytest.mark.parametrize("offset_ms", [-2000, -1, 0, 1, 2000])
def test_a_run_is_in_the_way_until_its_lease_end(bench: Bench, offset_ms: int) -> None:
    """The same edge as for a takeover."""
    lease_end = run_in(bench.win(0, lease=30)).lease_end
    bench.set_now(lease_end + ms(offset_ms))
    answer = bench.claim(28)
    assert answer.outcome == ("overlap" if answer.now < lease_end else "won")


def test_allow_does_not_look_at_other_runs(bench: Bench) -> None:
    """Any number of its runs is live at once."""
    bench.win(0, overlap="allow")
    bench.win(1, overlap="allow")
    bench.win(-1, overlap="allow")
    assert [run.status for run in bench.store.runs(JOB)] == ["running"] * 3


def test_a_skip_claim_respects_a_run_that_allow_started(bench: Bench) -> None:
    """Two versions side by side: the claimer's option decides its own claim."""
    bench.win(0, overlap="allow")
    assert bench.claim(1, overlap="skip").outcome == "overlap"
    assert bench.claim(1, overlap="allow").outcome == "won"


def test_a_skip_takeover_is_refused_while_another_run_is_live(bench: Bench) -> None:
    """An older one that `allow` started; once it is over, the takeover wins."""
    older = bench.win(0, overlap="allow", lease=90)
    newer = bench.win(1, overlap="allow", lease=5)
    bench.expire(newer)
    with bench.nothing_changes():
        answer = bench.claim(1, takeover_of=1)
    assert (answer.outcome, answer.run) == ("overlap", bench.run(0))
    assert bench.finish(older)
    assert bench.claim(1, takeover_of=1).outcome == "won"


# ---- superseded ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["finished", "dead", "released"])
def test_an_older_slot_is_superseded_once_a_newer_run_has_started(bench: Bench, end: str) -> None:
    """It would run out of order. Nothing is recorded."""
    bench.clock.advance(10)
    newer = bench.win(10)
    if end == "finished":
        bench.finish(newer)
    elif end == "dead":
        bench.expire(newer)
    else:
        bench.release(newer)
    with bench.nothing_changes():
        answer = bench.claim(0)
    assert (answer.outcome, answer.run) == ("superseded", None)


def test_allow_starts_runs_out_of_order(bench: Bench) -> None:
    """`superseded` is for skip."""
    bench.clock.advance(10)
    bench.ended(10, overlap="allow")
    assert bench.claim(0, overlap="allow").outcome == "won"


def test_a_newer_run_in_the_stores_future_does_not_supersede(bench: Bench) -> None:
    """The clock was an hour ahead for a while; what started then must not stop the job for that hour."""
    bench.clock.step(3600)
    bench.ended(3600)
    bench.set_now(bench.base)
    assert bench.claim(0).outcome == "won"


@pytest.mark.parametrize("ahead_ms", [-2000, 0, 999, 1000, 1001, 4000])
def test_a_slot_is_in_the_stores_future_from_a_second_ahead_on(bench: Bench, ahead_ms: int) -> None:
    """The same second as for `early`: a run that could be started now counts as newer."""
    newer = bench.slot(3600)
    bench.set_now(newer)
    bench.ended(3600)
    bench.set_now(newer - ms(ahead_ms))
    answer = bench.claim(3590)
    assert answer.outcome == ("superseded" if newer - answer.now <= ms(1000) else "won")


def test_a_dead_run_in_the_stores_future_is_interrupted_by_a_start_under_skip(bench: Bench) -> None:
    """Its runner could otherwise renew beside the new one."""
    bench.clock.step(3600)
    ahead = bench.win(3600, lease=5)
    assert bench.release(ahead)
    bench.set_now(bench.base)
    assert bench.win(0).interrupted == (slot_ms(bench, 3600),)
    assert bench.run(3600).status == "interrupted"


def test_a_live_run_in_the_stores_future_is_an_overlap(bench: Bench) -> None:
    """Its lease, brought down to its own length from now, still says that its runner lives."""
    bench.clock.step(3600)
    bench.win(3600, lease=5)
    bench.set_now(bench.base)
    answer = bench.claim(0)
    assert answer.outcome == "overlap"
    assert run_in(answer).lease_end == answer.now + timedelta(seconds=5)


# ---- the floor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overlap", "outcome"), [("skip", "superseded"), ("allow", "late")])
def test_a_purged_slot_never_starts_again(bench: Bench, overlap: str, outcome: str) -> None:
    """Its state is gone, so it may have run: the highest purged slot is remembered. Slots below it neither."""
    bench.ended(0, overlap=overlap)
    assert bench.store.purge(JOB) == 1
    answers = [bench.claim(at, overlap=overlap) for at in (0, -0.001, -5)]
    assert [(a.outcome, a.run) for a in answers] == [(outcome, None)] * 3
    assert bench.claim(0.001, overlap=overlap).outcome == "won"


def test_a_purge_of_several_runs_remembers_the_highest(bench: Bench) -> None:
    """None of them starts again, whatever the order in which the store removes them."""
    for at in (0.2, 0, 0.4):
        bench.ended(at, overlap="allow")
    assert bench.store.purge(JOB) == 3
    assert [bench.claim(at).outcome for at in (0, 0.2, 0.4)] == ["superseded"] * 3
    assert bench.claim(0.401).outcome == "won"


@pytest.mark.parametrize("overlap", ["skip", "allow"])
def test_a_floor_ahead_of_the_clock_supersedes_nothing(bench: Bench, overlap: str) -> None:
    """A run that the store's clock, set back since, has still to reach stops no takeover of one that is due now."""
    older = bench.win(lease=7200, overlap=overlap)
    bench.clock.step(3600)
    bench.ended(3600, overlap="allow")
    assert bench.store.purge(JOB) == 1
    bench.clock.step(-3600)
    assert bench.release(older)
    taken = bench.claim(takeover_of=1, overlap=overlap)
    assert (taken.outcome, run_in(taken).attempt) == ("won", 2)


@pytest.mark.parametrize(("overlap", "outcome"), [("skip", "superseded"), ("allow", "late")])
def test_a_trimmed_slot_never_starts_again(bench: Bench, overlap: str, outcome: str) -> None:
    """However late a claim is allowed to be."""
    options = {"overlap": overlap, "history_size": 0, "max_late": 0}
    bench.ended(0, **options)
    bench.clock.advance(1000)
    bench.ended(1000, **options)
    assert bench.slots() == [1000]
    answers = [bench.claim(at, overlap=overlap, max_late=1e6) for at in (0, -5)]
    assert [(a.outcome, a.run) for a in answers] == [(outcome, None)] * 2


def test_the_floor_holds_after_the_clock_steps_back(bench: Bench) -> None:
    """It doesn't depend on any clock."""
    bench.clock.step(3600)
    bench.ended(3600)
    assert bench.store.purge(JOB) == 1
    bench.set_now(bench.base + timedelta(seconds=3600))
    bench.clock.step(-5)
    assert bench.claim(3600 - 4.5).outcome == "superseded"


# ---- late ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_late", [0, 60, 300.5])
@pytest.mark.parametrize("offset_ms", [-3000, 0, 1, 3000])
def test_a_new_claim_is_late_above_its_allowed_lateness_and_ten_seconds(
    bench: Bench, max_late: float, offset_ms: int
) -> None:
    """Rule 6, by the store's clock: exactly on the edge it still wins. Nothing is recorded when it is late."""
    edge = timedelta(seconds=max_late + 10)
    bench.set_now(bench.base + edge + ms(offset_ms))
    answer = bench.claim(0, max_late=max_late)
    late = answer.now - bench.base > edge
    assert answer.outcome == ("late" if late else "won")
    assert (answer.run is None) == late == (bench.store.get(JOB, bench.base) is None)


def test_each_claim_brings_its_own_allowed_lateness(bench: Bench) -> None:
    """A scheduled claim is allowed max_late, a catch-up claim catch_up; `keep` allows nothing."""
    bench.clock.advance(200)
    assert bench.claim(0, max_late=60, keep=300).outcome == "late"
    assert bench.claim(0, max_late=300, reason="catch-up").outcome == "won"


def test_a_takeover_is_never_late(bench: Bench) -> None:
    """Lateness is for runs without state."""
    bench.win(0, max_late=0)
    bench.clock.advance(10_000)
    assert bench.claim(0, takeover_of=1, max_late=0).outcome == "won"


# ---- early -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_ms", [-2000, 0, 999, 1000, 1001, 5000])
def test_a_claim_more_than_a_second_ahead_is_early(bench: Bench, ahead_ms: int) -> None:
    """Exactly a second still wins. It says how long to wait, and nothing is recorded."""
    slot = bench.slot(100)
    bench.set_now(slot - ms(ahead_ms))
    answer = bench.claim(100)
    early = slot - answer.now > ms(1000)
    assert answer.outcome == ("early" if early else "won")
    if early:
        assert timedelta(seconds=answer.wait) == slot - answer.now
        assert answer.run is None
        assert bench.store.runs(JOB) == []
        assert JOB not in bench.store.jobs()


def test_an_early_claim_wins_once_it_has_waited(bench: Bench) -> None:
    """`wait` is the time until the slot."""
    answer = bench.claim(77)
    bench.clock.advance(answer.wait)
    assert bench.claim(77).outcome == "won"


# ---- gone ------------------------------------------------------------------------------------------------------------


def test_a_takeover_of_a_run_without_state_is_gone(bench: Bench) -> None:
    """The store lost it, or purged it: a backup never turns into a new claim."""
    assert bench.claim(0, takeover_of=1).outcome == "gone"
    assert bench.store.get(JOB, bench.base) is None
    bench.ended(0)
    bench.store.purge(JOB)
    assert bench.claim(0, takeover_of=1).outcome == "gone"


@pytest.mark.parametrize("named", [1, 3, 7])
def test_a_takeover_of_another_attempt_than_the_latest_is_gone(bench: Bench, named: int) -> None:
    """It travelled for long, and nobody awaits it any more. Nothing changes."""
    bench.expire(bench.win())
    bench.expire(bench.win(takeover_of=1))
    with bench.nothing_changes():
        answer = bench.claim(takeover_of=named)
    assert (answer.outcome, answer.run) == ("gone", bench.run())
    assert bench.claim(takeover_of=2).outcome == "won"


def test_a_takeover_of_an_older_attempt_is_told_running_while_the_latest_lives(bench: Bench) -> None:
    """So the backup backs up the attempt that won."""
    bench.expire(bench.win())
    bench.win(takeover_of=1)
    answer = bench.claim(takeover_of=1)
    assert (answer.outcome, run_in(answer).attempt) == ("running", 2)


# ---- what a later attempt carries ------------------------------------------------------------------------------------


def test_a_takeover_is_the_next_attempt(bench: Bench) -> None:
    """Rule 3: every field of attempt 2, with attempt 1 in the log as expired at its lease's end."""
    first = run_in(bench.win(0, token="t1", runner="api-1", lease=30))
    bench.clock.advance(60)
    answer = bench.claim(0, token="t2", runner="api-2", lease=20, takeover_of=1, reason="scheduled")
    now, fence = answer.now, run_in(answer).fence
    assert answer.run == bench.run()
    assert answer.run == Run(
        job=JOB,
        slot=bench.base,
        status="running",
        attempt=2,
        handovers=0,
        token="t2",
        runner="api-2",
        fence=fence,
        lease=20.0,
        lease_end=now + timedelta(seconds=20),
        released=False,
        reason="takeover",
        started_at=now,
        ended_at=None,
        error=None,
        checkpoint=None,
        attempts=(
            Attempt(1, "api-1", first.started_at, first.lease_end, "expired"),
            Attempt(2, "api-2", now, None, None),
        ),
    )
    assert fence > first.fence


def test_a_dead_run_may_be_claimed_without_naming_an_attempt(bench: Bench) -> None:
    """The slot's own claim, arriving after the first winner died, takes over too."""
    bench.expire(bench.win(lease=5))
    answer = bench.claim()
    assert (answer.outcome, run_in(answer).attempt, run_in(answer).reason) == ("won", 2, "takeover")


def test_a_hand_over_is_the_next_attempt_at_once(bench: Bench) -> None:
    """Its reason is `hand-over`, and the log has the time of the release."""
    first = bench.win(0, runner="api-1", lease=30)
    bench.clock.advance(3)
    assert bench.release(first)
    released_at = bench.run().lease_end
    bench.clock.advance(1)
    run = run_in(bench.win(0, runner="api-2", takeover_of=1))
    assert (run.attempt, run.handovers, run.released, run.reason) == (2, 1, False, "hand-over")
    assert run.attempts[0] == Attempt(1, "api-1", run_in(first).started_at, released_at, "handed-over")


def test_attempts_are_numbered_through_takeovers_and_hand_overs(bench: Bench) -> None:
    """1, 2, 3 and on, without gap or repeat."""
    numbers = [run_in(bench.win(max_attempts=9)).attempt]
    for n in range(1, 6):
        if n % 2:
            bench.set_now(bench.run().lease_end)
        else:
            assert bench.store.release(JOB, bench.base, bench.run().token)
        numbers.append(run_in(bench.win(takeover_of=n, max_attempts=9)).attempt)
    assert numbers == [1, 2, 3, 4, 5, 6]


def test_hand_overs_do_not_use_up_attempts(bench: Bench) -> None:
    """However many: deploys can't use them up."""
    latest = bench.win(max_attempts=1)
    for n in range(1, 8):
        assert bench.release(latest)
        latest = bench.win(takeover_of=n, max_attempts=1)
    assert (bench.run().attempt, bench.run().handovers) == (8, 7)
    bench.expire(latest)
    assert bench.claim(takeover_of=8, max_attempts=1).outcome == "interrupted"


def test_starts_after_a_death_count_among_hand_overs(bench: Bench) -> None:
    """Of died, handed over, died, handed over, died: three starts count, and the fourth is refused."""
    latest, n = bench.win(), 1
    for handed_over in (False, True, False, True):
        if handed_over:
            assert bench.release(latest)
        else:
            bench.expire(latest)
        latest = bench.win(takeover_of=n, max_attempts=3)
        n += 1
    bench.expire(latest)
    assert bench.claim(takeover_of=n, max_attempts=3).outcome == "interrupted"
    assert (bench.run().attempt, bench.run().handovers) == (5, 2)


def test_a_run_released_on_its_last_attempt_may_start_again(bench: Bench) -> None:
    """The start after a hand-over is free."""
    bench.expire(bench.win(max_attempts=2))
    assert bench.release(bench.win(takeover_of=1, max_attempts=2))
    assert bench.claim(takeover_of=2, max_attempts=2).outcome == "won"


def test_the_log_keeps_the_latest_twenty_ended_attempts(bench: Bench) -> None:
    """And the current one; the oldest go first."""
    latest = bench.win()
    for n in range(1, 25):
        assert bench.release(latest)
        latest = bench.win(takeover_of=n)
    assert [a.number for a in bench.run().attempts] == list(range(5, 26))


def test_the_log_shows_how_the_last_attempt_ended(bench: Bench) -> None:
    """As the run's status."""
    failed = bench.win()
    assert bench.finish(failed, "failed", "boom")
    run = bench.run()
    assert run.attempts == (Attempt(1, "runner-1", run.started_at, run.ended_at, "failed"),)


def test_the_checkpoint_is_carried_over(bench: Bench) -> None:
    """Through a takeover and a hand-over, until another one replaces it."""
    first = bench.win()
    assert bench.beat(first, checkpoint='{"page": 7}')
    bench.expire(first)
    second = bench.win(takeover_of=1)
    assert run_in(second).checkpoint == {"page": 7}
    assert bench.release(second, checkpoint="[8, null]")
    assert run_in(bench.win(takeover_of=2)).checkpoint == [8, None]


# ---- fence -----------------------------------------------------------------------------------------------------------


def test_the_fence_is_the_stores_time_or_one_more_than_the_last(bench: Bench) -> None:
    """For every start of the job: new runs, takeovers and hand-overs, while the clock goes on and steps back."""
    last = 0
    for n in range(12):
        answer = bench.win(overlap="allow") if n == 0 else bench.win(takeover_of=n, overlap="allow", max_attempts=99)
        fence = run_in(answer).fence
        assert fence == max(last + 1, answer.now_ms)
        last = fence
        assert bench.release(answer)
        if n % 4 == 3:
            bench.clock.step(-3600)
        elif n % 4 == 1:
            bench.clock.advance(10)


def test_the_fence_grows_from_slot_to_slot_after_a_step_back(bench: Bench) -> None:
    """Each attempt of the job that started later has the greater one."""
    first = bench.ended(0)
    bench.clock.step(-1000)
    second = bench.ended(-1000)
    third = bench.ended(-999)
    fences = [run_in(a).fence for a in (first, second, third)]
    assert fences == [fences[0], fences[0] + 1, fences[0] + 2]


def test_the_fence_grows_through_a_purge(bench: Bench) -> None:
    """What was handed out is remembered with the job, not with its runs."""
    first = run_in(bench.ended(0))
    assert bench.store.purge(JOB, force=True) == 1
    bench.clock.step(-1000)
    bench.clock.advance(1)
    assert bench.claim(-999).outcome == "superseded"
    bench.set_now(bench.base + ms(5000))
    bench.clock.step(-4)
    assert run_in(bench.win(1)).fence > first.fence


def test_won_again_and_heartbeats_use_up_no_fence(bench: Bench) -> None:
    """Only a start gets one."""
    first = bench.win()
    bench.again(first)
    bench.beat(first)
    bench.clock.step(-1000)
    assert bench.release(first)
    assert run_in(bench.win(takeover_of=1)).fence == run_in(first).fence + 1


def test_jobs_have_fences_of_their_own(bench: Bench) -> None:
    """One job's starts don't move another's."""
    for n in range(5):
        bench.ended(n / 10, job="busy")
    bench.clock.step(-1000)
    answer = bench.win(-1000, job="idle")
    assert run_in(answer).fence == answer.now_ms


# ---- whose options, whose clock --------------------------------------------------------------------------------------


def test_a_lease_is_judged_by_what_its_runner_stored(bench: Bench) -> None:
    """Never by the options of whoever asks."""
    bench.win(lease=120)
    bench.clock.advance(60)
    assert bench.claim(lease=1).outcome == "running"
    assert bench.claim(lease=1, takeover_of=1).outcome == "running"
    assert bench.claim(60, lease=1).outcome == "overlap"


def test_a_short_lease_ends_also_for_one_who_asks_with_a_long_one(bench: Bench) -> None:
    """The other way round."""
    bench.win(lease=2)
    bench.clock.advance(5)
    assert bench.claim(lease=1000).outcome == "won"


def test_a_lease_end_too_far_away_is_brought_down_by_the_next_claim(bench: Bench) -> None:
    """The clock was set back: the run gets its own lease's length from now, and not the lost hour on top."""
    bench.win(lease=30)
    bench.clock.step(-3600)
    answer = bench.claim(0)
    assert answer.outcome == "running"
    assert bench.run().lease_end == run_in(answer).lease_end == answer.now + timedelta(seconds=30)
    bench.set_now(bench.run().lease_end)
    assert bench.claim(takeover_of=1).outcome == "won"


def test_a_claim_of_another_slot_brings_a_lease_down_too(bench: Bench) -> None:
    """So that a dead run of the job doesn't hold up the slots of an hour."""
    bench.win(0, lease=30)
    bench.clock.step(-3600)
    answer = bench.claim(-3600)
    assert answer.outcome == "overlap"
    assert bench.run(0).lease_end == answer.now + timedelta(seconds=30)
    bench.clock.advance(30)
    assert bench.claim(-3570).outcome == "won"


def test_a_lease_within_its_own_length_is_left_alone(bench: Bench) -> None:
    """A small step back changes nothing that is stored."""
    bench.win(lease=30)
    bench.clock.advance(10)
    bench.clock.step(-5)
    with bench.nothing_changes():
        assert bench.claim().outcome == "running"


def test_the_epoch_tells_when_the_store_began(bench: Bench) -> None:
    """`<milliseconds>-<random hex>`, at or before now."""
    epoch = bench.win().epoch
    began, _, random = epoch.partition("-")
    assert int(began) == epoch_ms(epoch) <= bench.claim().now_ms
    assert len(random) >= 16
    assert int(random, 16) >= 0


def slot_ms(bench: Bench, at: float) -> int:
    """A slot in milliseconds since the epoch, as `ClaimAnswer.interrupted` lists it."""
    return round(bench.slot(at).timestamp() * 1000)
