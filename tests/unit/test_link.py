"""An instance's view of its store: the clock's estimate, whether the store answers, and which jobs to ask about."""

from __future__ import annotations

import pytest
from harness import SeededChance

from leaselib._link import STALE_MS, Epochs, JobTroubles, Kind, Link, Loads, StoreClock, StoreHealth

# ---- the clock --------------------------------------------------------------------------------------------------


def test_a_clock_that_was_never_heard_tells_nothing():
    clock = StoreClock()
    assert (clock.store_ms(5), clock.boot_ms(5), clock.offset_ms) == (None, None, None)


def test_an_answers_time_is_that_of_the_middle_between_send_and_receipt():
    clock = StoreClock()
    assert clock.add(1_000, 1_100, 500_000) == 0
    assert clock.store_ms(1_050) == 500_000
    assert clock.boot_ms(500_000) == 1_050


def test_the_quickest_answer_is_believed():
    clock = StoreClock()
    clock.add(1_000, 1_010, 500_005)
    clock.add(2_000, 2_400, 501_000)  # the middle is 195 ms off, and its error bound is 201 ms
    assert clock.store_ms(1_005) == 500_005


def test_an_old_answer_gives_way_to_a_fresh_one():
    clock = StoreClock()
    clock.add(0, 10, 5)
    clock.add(400_000, 400_100, 400_100)
    assert clock.offset_ms == 50


@pytest.mark.parametrize("step_ms", [-3_600_000, -300, 300, 3_600_000])
def test_a_step_either_way_is_taken_over_at_once(step_ms: int):
    clock = StoreClock()
    for n in range(20):
        clock.add(n * 1_000, n * 1_000 + 10, n * 1_000 + 5)
    assert clock.add(30_000, 30_010, 30_005 + step_ms) == step_ms
    assert clock.store_ms(31_000) == 31_000 + step_ms


@pytest.mark.parametrize("off_ms", [-100, 100])
def test_what_round_trips_explain_is_no_step(off_ms: int):
    clock = StoreClock()
    clock.add(0, 10, 5)
    assert clock.add(1_000, 1_010, 1_005 + off_ms) == 0


@pytest.mark.parametrize("ppm", [-400, 400])
def test_what_two_clocks_drift_apart_over_idle_minutes_is_no_step(ppm: int):
    """Within 500 ppm, however long nothing was asked."""
    clock, idle_ms = StoreClock(), STALE_MS + 1_000
    clock.add(0, 10, 5)
    assert clock.add(idle_ms, idle_ms + 10, idle_ms + 5 + idle_ms * ppm // 1_000_000) == 0


# ---- health -----------------------------------------------------------------------------------------------------


def health(share: float = 1.0) -> StoreHealth:
    """A store that answers."""
    return StoreHealth(SeededChance("s", share))


def test_trouble_begins_once_and_is_tried_again_with_growing_delays():
    state, now_ms, delays = health(), 0, []
    assert state.failed(now_ms, "away", permanent=False, trouble="ping") is True
    for _ in range(7):
        delays.append(state.retry_boot_ms - now_ms)
        now_ms = state.retry_boot_ms
        state.trying()
        assert state.failed(now_ms, "away", permanent=False, trouble="ping") is False
    assert delays == [100, 200, 400, 800, 1_600, 2_000, 2_000]
    assert (state.since_boot_ms, state.error) == (0, "away")


def test_failures_before_the_planned_try_change_nothing_about_it():
    state = health()
    state.failed(0, "away", permanent=False, trouble="ping")
    assert state.failed(50, "away", permanent=False, trouble="write") is False
    assert state.retry_boot_ms == 100


def test_delays_are_jittered():
    state = health(0.0)
    state.failed(0, "away", permanent=False, trouble="ping")
    assert state.retry_boot_ms == 50


def test_a_permanent_failure_is_tried_again_after_half_a_minute():
    state = health()
    state.failed(0, "no table", permanent=True, trouble="write")
    assert state.retry_boot_ms == 30_000


@pytest.mark.parametrize(
    ("failed", "answered", "state_after"),
    [
        ("ping", "ping", "up"),
        ("ping", "load", "up"),
        ("ping", "write", "up"),
        ("load", "ping", "trial"),
        ("load", "load", "up"),
        ("load", "write", "up"),
        ("write", "ping", "trial"),
        ("write", "load", "trial"),
        ("write", "write", "up"),
        ("write", "sure", "up"),
        ("replicas", "ping", "up"),
        ("replicas", "sure", "up"),
    ],
)
def test_trouble_ends_with_an_answer_of_the_kind_that_failed_or_one_that_asks_for_more(
    failed: str, answered: str, state_after: str
):
    state = health()
    state.failed(0, "away", permanent=False, trouble=failed)
    assert state.answered(answered) is (state_after == "up")
    assert state.state == state_after
    assert (state.since_boot_ms is None) is (state_after == "up")
    assert state.retry_boot_ms is None


@pytest.mark.parametrize("answered", ["load", "write"])
def test_what_waits_for_no_replica_says_nothing_of_too_few_and_shortens_no_wait(answered: Kind):
    """Heartbeats go through all the time; so do they after the server itself was away."""
    state = health()
    state.failed(0, "0 instead of 1 replicas", permanent=False, trouble="replicas")
    state.failed(10, "away", permanent=False, trouble="ping")
    assert state.answered(answered) is False
    assert (state.state, state.retry_boot_ms) == ("down", 100)


def test_a_failed_trial_goes_on_with_the_same_trouble():
    state = health()
    state.failed(0, "full", permanent=False, trouble="write")
    state.answered("ping")
    assert state.failed(200, "full", permanent=False, trouble="write") is False
    assert (state.state, state.retry_boot_ms, state.since_boot_ms) == ("down", 400, 0)


def test_the_next_trouble_knows_nothing_of_the_last():
    state = health()
    state.failed(0, "full", permanent=False, trouble="write")
    state.answered("write")
    assert state.failed(1_000, "away", permanent=False, trouble="ping") is True
    assert state.retry_boot_ms == 1_100
    assert state.answered("ping") is True


def test_an_answer_without_trouble_ends_none():
    assert health().answered("write") is False


# ---- the link ---------------------------------------------------------------------------------------------------


def link() -> Link:
    """A link that heard the store at boot time 0, when both clocks showed 0."""
    made = Link(SeededChance("s", 1.0))
    made.clock.add(0, 0, 1_000_000)
    made.ping_due(0, 5_000)
    return made


def test_no_ping_is_due_before_the_store_was_ever_heard():
    assert Link(SeededChance("s")).ping_due(10**9, 0) is False


@pytest.mark.parametrize(("step_ms", "due"), [(200, False), (201, True), (-201, True)])
def test_a_step_of_the_machines_time_of_day_makes_a_ping_due(step_ms: int, due: bool):
    assert link().ping_due(1_000, 6_000 + step_ms) is due


def test_a_step_while_a_ping_is_under_way_is_remembered():
    made = link()
    made.ping_due(1_000, 16_000)
    assert made.pinging
    assert made.ping_due(1_500, 26_500) is False
    made.pinging = False
    assert made.ping_due(2_000, 27_000) is True


def test_without_news_a_ping_is_due_after_ten_minutes():
    made = link()
    assert made.ping_due(STALE_MS, STALE_MS + 5_000) is False
    assert made.ping_due(STALE_MS + 1, STALE_MS + 5_001) is True


def test_while_the_store_is_away_pings_come_when_planned_and_one_at_a_time():
    made = link()
    made.health.failed(1_000, "away", permanent=False, trouble="ping")
    assert made.due_boot_ms() == 1_100
    assert made.ping_due(1_099, 6_099) is False
    assert made.ping_due(1_100, 6_100) is True
    assert made.due_boot_ms() is None
    assert made.ping_due(1_200, 6_200) is False


def test_another_epoch_is_told_once_and_older_slots_are_lost():
    epochs = Epochs()
    assert epochs.heard(None, "900000-aa", 1_000_000) is False
    assert epochs.lost_slot("job", 5) is False
    assert epochs.heard(None, "900000-aa", 1_000_010) is False
    assert epochs.heard(None, "950000-bb", 1_000_020) is True
    assert epochs.heard(None, "950000-bb", 1_000_030) is False
    assert (epochs.lost_slot("job", 949_999), epochs.lost_slot("job", 950_000)) == (True, False)


def test_an_epoch_of_ones_own_is_the_only_one_that_counts_for_a_job():
    """Each is told by itself. A job that never had one of its own goes by the store's."""
    epochs = Epochs()
    for job in (None, "lost", "safe"):
        assert epochs.heard(job, "900000-aa", 1_000_000) is False
    assert epochs.heard("lost", "950000-bb", 1_000_010) is True
    assert [epochs.lost_slot(job, 949_999) for job in ("lost", "safe", "unheard of")] == [True, False, False]
    assert epochs.heard("safe", "900000-aa", 1_000_020) is False
    assert epochs.heard(None, "960000-cc", 1_000_030) is True
    assert [epochs.lost_slot(job, 955_000) for job in ("lost", "safe", "unheard of")] == [False, False, True]


def test_an_epoch_that_lies_ahead_after_a_step_back_makes_no_slot_wait_for_it():
    epochs = Epochs()
    epochs.heard(None, "900000-aa", 1_000_000)
    epochs.heard(None, "5000000-bb", 5_000_000)
    epochs.heard(None, "5000000-bb", 1_400_000)
    assert (epochs.lost_slot("job", 1_399_999), epochs.lost_slot("job", 1_400_000)) == (True, False)


def test_one_jobs_trouble_begins_once_and_is_over_when_all_that_failed_has_got_through():
    made = JobTroubles()
    assert made.failed("a", None, "write")
    assert not made.failed("a", None, "write")
    assert made.failed("b", 7, "write")
    assert not made.failed("a", 7, "write")
    assert not made.answered("a", None, "write")
    assert not made.answered("a", 8, "write")
    assert made.answered("a", 7, "write")
    assert not made.answered("a", 7, "write")
    assert made.failed("a", 7, "write"), "the next trouble is told as well"


def test_the_trouble_of_an_attempt_that_is_over_ends_with_the_jobs_next_claim():
    made = JobTroubles()
    made.attempt_over("a", 7)
    assert not made.answered("a", None, "write"), "it was in no trouble"
    assert made.failed("a", 7, "write")
    made.attempt_over("a", 7)
    assert not made.failed("a", None, "write")
    assert made.answered("a", None, "write")


def test_a_removed_job_takes_its_trouble_with_it():
    made = JobTroubles()
    assert made.failed("a", None, "write")
    made.removed("a")
    assert not made.answered("a", None, "write")
    assert made.failed("a", None, "write")


def test_the_trouble_of_a_removed_jobs_run_that_goes_on_is_told_once_and_ends_with_it():
    made = JobTroubles()
    assert made.failed("a", 7, "write")
    assert not made.failed("a", None, "write")
    made.removed("a")
    assert not made.failed("a", 7, "write"), "it was told before"
    assert made.answered("a", 7, "write")


def test_a_load_that_gets_through_says_nothing_of_claims_that_fail():
    """The records of runs may be sound, and what claims look at besides them not."""
    made = JobTroubles()
    assert made.failed("a", None, "write")
    assert not made.failed("a", None, "load")
    assert not made.answered("a", None, "load")
    assert made.answered("a", None, "write")
    assert made.failed("a", None, "load")
    assert made.answered("a", None, "load")


def test_too_few_replicas_for_a_job_are_over_only_with_what_waits_for_them():
    """Wherever they were too few: a finish that gets through says that claims will too, if nothing else is wrong."""
    made = JobTroubles()
    assert made.failed("a", 7, "replicas")
    assert not made.failed("a", None, "replicas")
    assert not made.failed("a", 7, "write")
    for kind in ("load", "write"):
        assert not made.answered("a", 7, kind)
        assert not made.answered("a", None, kind)
    assert made.answered("a", 7, "sure")
    assert made.failed("a", 7, "replicas")
    assert not made.failed("a", None, "write")
    assert not made.answered("a", 8, "sure")
    assert made.answered("a", None, "write")


# ---- what is to be asked for ------------------------------------------------------------------------------------


def test_one_batch_at_a_time_and_in_order():
    loads = Loads()
    names = [f"job{n}" for n in range(Loads.BATCH + 2)]
    for name in names:
        loads.add(name)
    assert loads.batch(names) == tuple(names[: Loads.BATCH])
    assert loads.batch(names) == ()
    loads.over()
    assert loads.batch(names) == tuple(names[Loads.BATCH :])
    loads.over()
    assert loads.batch(names) == ()


def test_removed_jobs_are_left_out_and_hide_none_behind_them():
    loads = Loads()
    for n in range(Loads.BATCH):
        loads.add(f"gone{n}")
    loads.add("stays")
    assert loads.batch({"stays"}) == ("stays",)


def test_an_empty_question_is_not_under_way():
    loads = Loads()
    loads.add("gone")
    assert loads.batch(()) == ()
    loads.add("stays")
    assert loads.batch({"stays"}) == ("stays",)
