"""A runner dies: a backup takes the run over in time, as often as attempts allow, unless a newer run was first."""

from __future__ import annotations

import secrets
import time
from typing import Any

import pytest
from cluster import BEAT_S, LEASE_S, SLACK_S, TAKEOVER_S, Cluster, Fact, due_in, every_ms_due, wall_ms

from leaselib._model import from_ms

pytestmark = pytest.mark.system


def play_dead_runner(cluster: Cluster, job: str, slot_ms: int, lease_s: float, **claim: Any) -> float:
    """Claims a run and does nothing more, as a runner would that dies at once. Returns when the lease ends."""
    answer = cluster.store.claim(
        job, from_ms(slot_ms), secrets.token_hex(16), "dead", lease=lease_s, max_late=300, **claim
    )
    at = time.monotonic()
    assert answer.outcome == "won"
    return at + lease_s


def next_attempt(cluster: Cluster, job: str, attempt: int, killed: float) -> Fact:
    """The takeover after a kill, within the rules' bound."""
    start = cluster.wait("start", TAKEOVER_S + SLACK_S + 1, job=job, attempt=attempt)
    assert start["reason"] == "takeover"
    took = start["t"] - killed
    # The last heartbeat was up to one interval (and a slow store call) before the kill.
    assert LEASE_S - BEAT_S - 0.3 < took < TAKEOVER_S + SLACK_S, took
    return start


@pytest.mark.timeout(40)
def test_a_killed_runner_is_taken_over_within_lease_and_two_heartbeats(cluster: Cluster) -> None:
    """Twice in a row; the third attempt succeeds. Fences grow."""
    instances = cluster.boot(3)
    cluster.add(instances, name="work", do="hold", every_ms=due_in(0.3))
    starts = [cluster.wait("start", job="work")]
    for attempt in (2, 3):
        cluster.wait_until(starts[-1]["t"] + 0.3)  # it has to be renewed first
        starts.append(next_attempt(cluster, "work", attempt, cluster.of(starts[-1]).kill()))
    cluster.go("work")
    run = cluster.wait_status("work", starts[0]["slot"], "success")
    assert (run.attempt, run.token, run.handovers) == (3, starts[2]["token"], 0)
    assert [a.number for a in run.attempts] == [1, 2, 3]
    assert starts[0]["fence"] < starts[1]["fence"] < starts[2]["fence"]
    assert len(cluster.facts("start")) == 3


@pytest.mark.timeout(40)
def test_a_run_is_interrupted_when_its_attempts_are_used_up(cluster: Cluster) -> None:
    """With max_attempts=2 a run whose runners die starts twice, and a third instance tells that it is over."""
    instances = cluster.boot(3)
    cluster.add(instances, name="bomb", do="hold", every_ms=due_in(0.3), max_attempts=2)
    start = cluster.wait("start", job="bomb")
    start = next_attempt(cluster, "bomb", 2, cluster.of(start).kill())
    killed = cluster.of(start).kill()
    event = cluster.wait_event("interrupted", TAKEOVER_S + SLACK_S, job="bomb")
    assert event["t"] - killed < TAKEOVER_S + SLACK_S
    assert (event["reason"], event["attempt"]) == ("max_attempts", 2)
    assert cluster.stored("bomb", start["slot"]).status == "interrupted"
    cluster.stop_all()
    assert len(cluster.facts("start", job="bomb")) == 2


@pytest.mark.timeout(40)
def test_the_next_slot_is_skipped_while_the_dead_lease_lives_and_the_old_run_is_taken_over(cluster: Cluster) -> None:
    """First line of the rules' table; and while the old run's next attempt runs, further slots are skipped too."""
    every_ms = 1200
    instances = cluster.boot(2)
    slot_ms = (wall_ms() // every_ms + 1) * every_ms
    cluster.wait_until(cluster.at(slot_ms))
    # So it ends after the next slot, and long enough before the one after that for a backup's check.
    lease_end = play_dead_runner(cluster, "job", slot_ms, 1.4)
    cluster.add(instances, name="job", do="hold", every_ms=every_ms, jitter=0.02, catch_up=0)
    taken = cluster.wait("start", job="job", slot=slot_ms, attempt=2, reason="takeover")
    assert -0.1 < taken["t"] - lease_end < 2 * BEAT_S + SLACK_S
    skipped = cluster.events("skip", job="job", reason="overlap", slot=slot_ms + every_ms)
    assert skipped, "the slot that was due while the dead run's lease lived"
    assert all(f["t"] < taken["t"] for f in skipped)
    cluster.wait_event("skip", job="job", reason="overlap", slot=lambda slot: cluster.at(slot) > taken["t"])
    assert len(cluster.facts("start", job="job")) == 1
    cluster.go("job")
    cluster.wait_status("job", slot_ms, "success")


@pytest.mark.timeout(40)
def test_a_check_that_comes_before_the_next_slot_takes_the_old_run_over(cluster: Cluster) -> None:
    """Second line of the table: the slot that comes while the old run's attempt 2 runs is skipped as an overlap."""
    instances = cluster.boot(2)
    due_ms = wall_ms() + 2300
    every_ms = every_ms_due(due_ms)
    old_ms = wall_ms()
    play_dead_runner(cluster, "job", old_ms, LEASE_S)
    cluster.add(instances, name="job", do="hold", every_ms=every_ms)
    taken = cluster.wait("start", TAKEOVER_S + SLACK_S, job="job")
    assert (taken["slot"], taken["reason"]) == (old_ms, "takeover")
    slot_ms = due_ms // every_ms * every_ms
    assert taken["t"] < cluster.at(slot_ms), "this machine is too slow for the order that is tested"
    cluster.wait_event("skip", job="job", reason="overlap", slot=slot_ms)
    cluster.go("job")
    cluster.wait_status("job", old_ms, "success")


@pytest.mark.timeout(40)
def test_a_next_slot_that_comes_first_replaces_the_dead_run(cluster: Cluster) -> None:
    """Third line of the table: the new run starts, the dead one becomes interrupted and is never retried.

    The instances are its backups; their first check is planned for later.
    """
    instances = cluster.boot(2)
    due_ms = wall_ms() + 1300
    every_ms = every_ms_due(due_ms)
    old_ms = wall_ms()
    lease_end = play_dead_runner(cluster, "job", old_ms, 0.7)
    # A backup's first check comes after one heartbeat at the earliest, and so after the slot.
    cluster.add(instances, name="job", do="quick", every_ms=every_ms, lease=30, heartbeat=1.5)
    slot_ms = due_ms // every_ms * every_ms
    assert lease_end < cluster.at(slot_ms) - 0.1, "this machine is too slow for the order that is tested"
    start = cluster.wait("start", job="job")
    assert (start["slot"], start["reason"], start["attempt"]) == (slot_ms, "scheduled", 1)
    event = cluster.wait_event("interrupted", job="job", slot=old_ms)
    assert event["reason"] == "superseded"
    run = cluster.stored("job", old_ms)
    assert (run.status, run.attempt) == ("interrupted", 1)
    # Checks that were planned come to nothing: seen from an instance's own count of what it watches.
    for instance in instances:
        cluster.until(lambda i=instance: i.tell("health")["backups_held"] == 0, "nobody watches the dead run", 6)
    assert len(cluster.facts("start", job="job")) == 1


@pytest.mark.timeout(40)
def test_a_starting_instance_leaves_a_dead_run_whose_next_slot_is_due(cluster: Cluster) -> None:
    """The newer slot is caught up, and replaces it. A dead run that is still the latest is claimed at once."""
    newer_ms = due_in(-1)
    latest_ms = wall_ms() // newer_ms * newer_ms
    play_dead_runner(cluster, "old", latest_ms - 5_000, 0.01)
    play_dead_runner(cluster, "latest", latest_ms, 0.01)
    jobs = [{"name": name, "do": "quick", "every_ms": newer_ms} for name in ("old", "latest")]
    cluster.boot(1, *jobs)
    caught = cluster.wait("start", job="old")
    assert (caught["slot"], caught["reason"], caught["attempt"]) == (latest_ms, "catch-up", 1)
    assert cluster.stored("old", latest_ms - 5_000).status == "interrupted"
    taken = cluster.wait("start", job="latest")
    assert (taken["slot"], taken["reason"], taken["attempt"]) == (latest_ms, "takeover", 2)
    cluster.stop_all()
    assert len(cluster.facts("start")) == 2


@pytest.mark.timeout(40)
def test_a_run_outlives_its_lease_while_its_runner_lives_and_one_that_holds_the_interpreter_lock_is_fenced(
    cluster: Cluster,
) -> None:
    """A long handler has one attempt. One that lets no heartbeat through is taken over, and its success is refused."""
    long_ms, hog_ms = due_in(0.4), due_in(0.45)
    first = cluster.boot(1)[0]
    cluster.add([first], name="hog", do="hog", seconds=[2.6, 0.1], every_ms=hog_ms)
    hogging = cluster.wait("start", job="hog")
    second = cluster.boot(1)[0]
    cluster.add([second], name="hog", do="hog", seconds=[2.6, 0.1], every_ms=hog_ms)
    cluster.add([second], name="long", do="sleep", seconds=2.4, every_ms=long_ms)
    taken = cluster.wait("start", TAKEOVER_S + SLACK_S + 1, job="hog", attempt=2)
    assert taken["pid"] == second.pid
    lost = cluster.wait_event("lost", 4, job="hog")
    assert lost["token"] == hogging["token"]
    cluster.wait("end", 5, job="long", how="returned")
    long = cluster.facts("start", job="long")
    assert len(long) == 1
    run = cluster.wait_status("long", long[0]["slot"], "success")
    assert run.attempt == 1
    assert run.ended_at is not None
    assert (run.ended_at - run.started_at).total_seconds() > 2 * LEASE_S
    cluster.stop_all()
    assert [f["token"] for f in cluster.events("success", job="hog")] == [taken["token"]]
    assert cluster.stored("hog", taken["slot"]).status == "success"
    assert len(cluster.events("lost")) == 1


@pytest.mark.timeout(40)
def test_the_next_attempt_resumes_from_the_last_checkpoint_that_was_stored(cluster: Cluster) -> None:
    """Sent with a heartbeat, at once by flush, or with the release."""
    instances = cluster.boot(3)
    cluster.add(instances, name="beat", do="remember", every_ms=due_in(0.2))
    one = cluster.wait("checkpointed", job="beat", attempt=1)
    cluster.wait_until(one["t"] + 2 * BEAT_S + 0.2)
    assert cluster.stored("beat", one["slot"]).checkpoint == ["1 é"]  # by a heartbeat
    cluster.of(one).kill()
    two = cluster.wait("checkpointed", job="beat", attempt=2)
    cluster.of(two).terminate()  # by the release, or by a heartbeat before it
    three = cluster.wait("start", job="beat", attempt=3)
    assert three["resume"] == ["1 é", "2 é"]
    assert three["reason"] == "hand-over"
    cluster.go("beat")
    cluster.wait_status("beat", one["slot"], "success")
    # By flush: stored when ctx.checkpoint returns, though no heartbeat is due for seconds.
    last = cluster.of(three)  # the one that was told to stop may be alive still, but takes no commands any more
    cluster.add([last], name="flush", do="remember", flush=True, every_ms=due_in(0.2), lease=30, heartbeat=10)
    flushed = cluster.wait("checkpointed", job="flush")
    last.kill()
    assert cluster.stored("flush", flushed["slot"]).checkpoint == ["1 é"]
