"""Backups by themselves: which runs are watched, when each is checked, what makes a timer stale."""

from __future__ import annotations

from harness import SeededChance, spec

from leaselib._backup import Backups

HEARTBEAT_MS = 5_000


def backups(share: float = 0.0) -> Backups:
    """Nothing watched; chance is fixed."""
    return Backups(SeededChance("s", share))


def test_nothing_watched_is_never_due():
    mind = backups()
    assert (mind.due_boot_ms(), mind.due(10**9), len(mind)) == (None, [], 0)


def test_a_watch_is_due_one_to_two_heartbeats_from_now():
    early, late = backups(0.0), backups(1.0)
    for mind in (early, late):
        mind.watch(spec(), 60, 1, 1_000)
    assert (early.due_boot_ms(), late.due_boot_ms()) == (1_000 + HEARTBEAT_MS, 1_000 + 2 * HEARTBEAT_MS)
    assert early.due(1_000 + HEARTBEAT_MS - 1) == []
    (found,) = early.due(1_000 + HEARTBEAT_MS)
    assert (found.slot_ms, found.attempt) == (60, 1)


def test_a_first_check_can_have_a_time_of_its_own():
    mind = backups()
    mind.watch(spec(), 60, 1, 1_000, first_check_boot_ms=1_234)
    assert mind.due_boot_ms() == 1_234


def test_watching_again_sets_a_new_time_and_the_old_one_counts_no_more():
    mind = backups()
    mind.watch(spec(), 60, 1, 1_000)
    mind.watch(spec(), 60, 2, 3_000)
    assert len(mind) == 1
    assert mind.due(1_000 + HEARTBEAT_MS) == []
    (found,) = mind.due(3_000 + HEARTBEAT_MS)
    assert found.attempt == 2


def test_a_check_that_is_due_much_too_late_waits_one_more_time_and_one_only():
    mind = backups()
    mind.watch(spec(), 60, 1, 0)
    assert mind.due(HEARTBEAT_MS * 3) == []
    assert mind.due_boot_ms() == HEARTBEAT_MS * 4
    assert len(mind.due(HEARTBEAT_MS * 9)) == 1


def test_a_check_that_is_late_by_a_heartbeat_at_most_is_on_time():
    mind = backups()
    mind.watch(spec(), 60, 1, 0)
    assert len(mind.due(HEARTBEAT_MS * 2)) == 1


def test_another_attempt_means_another_token():
    mind = backups()
    mind.watch(spec(), 60, 1, 0)
    (watch,) = mind.due(HEARTBEAT_MS)
    watch.token, watch.unknown = "first", True
    mind.watch(spec(), 60, 1, HEARTBEAT_MS)
    assert (watch.token, watch.unknown) == ("first", True)
    mind.watch(spec(), 60, 2, HEARTBEAT_MS)
    assert (watch.token, watch.unknown) == (None, False)
    watch.token = "second"
    mind.gone("job", 60, 3, HEARTBEAT_MS)
    assert (watch.token, watch.attempt) == (None, 3)


def test_a_run_that_is_gone_is_watched_no_more():
    mind = backups()
    mind.watch(spec(), 60, 1, 0)
    mind.gone("job", 60, None, 100)
    assert (len(mind), mind.due_boot_ms()) == (0, None)
    mind.gone("job", 60, None, 100)  # nothing happens


def test_a_refused_slot_is_looked_at_until_its_time_and_is_no_backup():
    mind = backups()
    mind.watch(spec(), 60, 1, 0, until_boot_ms=7_000)
    assert len(mind) == 0
    assert len(mind.due(HEARTBEAT_MS)) == 1
    mind.gone("job", 60, None, HEARTBEAT_MS)
    assert mind.due_boot_ms() == 2 * HEARTBEAT_MS
    mind.gone("job", 60, None, 7_000)
    assert mind.due_boot_ms() is None


def test_a_refused_slot_that_turns_out_to_have_a_run_is_a_backup():
    mind = backups()
    mind.watch(spec(), 60, 1, 0, until_boot_ms=7_000)
    mind.watch(spec(), 60, 1, 100)
    assert len(mind) == 1
    mind.watch(spec(), 60, 1, 200, until_boot_ms=7_000)
    assert len(mind) == 1, "a run that is watched stays so"


def test_dropping_a_job_leaves_the_others():
    mind = backups()
    mind.watch(spec("one"), 60, 1, 0)
    mind.watch(spec("one"), 120, 1, 0)
    mind.watch(spec("two"), 60, 1, 0)
    assert [w.slot_ms for w in mind.drop_job("one")] == [60, 120]
    assert [w.spec.name for w in mind.due(HEARTBEAT_MS)] == ["two"]
    assert [w.spec.name for w in mind.drop_all()] == ["two"]
    assert mind.due_boot_ms() is None


def test_arming_what_was_dropped_does_nothing():
    mind = backups()
    mind.watch(spec(), 60, 1, 0)
    (watch,) = mind.due(HEARTBEAT_MS)
    mind.drop("job", 60)
    mind.arm(watch, HEARTBEAT_MS)
    assert mind.due_boot_ms() is None


def test_when_the_store_is_back_every_check_that_is_not_under_way_starts_anew():
    mind = backups()
    mind.watch(spec("one"), 60, 1, 0)
    mind.watch(spec("two"), 60, 1, 0)
    one, two = mind.due(HEARTBEAT_MS)
    two.claim = two.check()
    mind.arm_all(50_000)
    assert mind.due_boot_ms() == 50_000 + HEARTBEAT_MS
    assert mind.due(50_000 + HEARTBEAT_MS) == [one]
