"""Jobs that come, go, are run by hand, find no worker, or change between versions of a program."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import (
    BEAT_S,
    LEASE_S,
    OPTIONS,
    SLACK_S,
    Cluster,
    Recorder,
    assert_all_started,
    assert_started_once,
    due_in,
    every_ms_due,
    slots_between,
    until,
    wall_ms,
)

from leaselib import ConfigurationError, Every, RunContext, Scheduler
from leaselib._model import from_ms, to_ms

pytestmark = pytest.mark.timeout(40)


@pytest.fixture
def scheduler(cluster_url: str) -> Iterator[Scheduler]:
    """A scheduler that isn't started; stopped after the test."""
    it = Scheduler(cluster_url, **OPTIONS)
    yield it
    it.stop(5)
    it.store.close()


# ---- jobs that come and go ------------------------------------------------------------------------------------------


def test_jobs_can_be_added_and_removed_while_the_scheduler_runs(scheduler: Scheduler) -> None:
    """A removed job is claimed no more, a run of it under way goes on to its end, and its name is free again."""
    recorder = Recorder(scheduler)
    release = threading.Event()

    def long() -> None:
        release.wait(10)

    with scheduler:
        scheduler.add(lambda: None, Every(0.1), name="tick")
        recorder.wait("success", job="tick", count=2)
        with pytest.raises(ConfigurationError, match="already"):
            scheduler.add(lambda: None, Every(1), name="tick")
        scheduler.add(long, Every(0.3), catch_up=0)
        started = recorder.wait("start", job="long")
        assert set(scheduler.jobs) == {"tick", "long"}
        scheduler.remove("long")
        scheduler.remove("tick")
        removed = wall_ms()
        assert not scheduler.jobs
        with pytest.raises(ConfigurationError, match="no job"):
            scheduler.remove("tick")
        until(lambda: [r.job for r in scheduler.running] == ["long"], "what ran of the short job has ended")
        scheduler.add(lambda: None, Every(0.1), name="other")
        recorder.wait("success", job="other", count=8)  # time enough for removed jobs to show
        release.set()
        assert recorder.wait("success", job="long").token == started.token
        late = [e for e in recorder.events("start", job="tick") if to_ms(e.slot) > removed + 50]
        assert not late
        assert len(recorder.events("start", job="long")) == 1
        again = threading.Event()
        scheduler.add(again.set, Every(0.1), name="long")
        assert again.wait(5)
        until(lambda: scheduler.health().backups_held == 0, "nothing of a removed job is watched")


def test_removing_a_job_ends_its_backups(cluster_url: str) -> None:
    """An instance that watches a run of the job doesn't take it over once the job is removed there."""
    first, second = (Scheduler(cluster_url, **OPTIONS) for _ in range(2))
    recorders = [Recorder(first), Recorder(second)]
    due = Every(due_in(0.1) / 1000)
    first.add(lambda ctx: ctx.sleep(20), due, name="work")
    with first, second:
        started = recorders[0].wait("start")
        second.add(lambda ctx: None, due, name="work")
        until(lambda: second.health().backups_held == 1, "the second watches it")
        second.remove("work")
        until(lambda: second.health().backups_held == 0, "the second watches it no more")
        assert first.stop()
        assert recorders[0].wait("interrupted").handed_over
        second.add(lambda: None, Every(0.1), name="tick")
        recorders[1].wait("success", job="tick", within_s=5, count=6)  # longer than two heartbeats
        run = second.store.get("work", started.slot)  # type: ignore[arg-type]
        assert run is not None
        assert (run.status, run.attempt, run.released) == ("running", 1, True)
    for scheduler in (first, second):
        scheduler.store.close()


# ---- by hand --------------------------------------------------------------------------------------------------------


def test_run_now_tells_the_outcome_and_keeps_the_rules(cluster_url: str) -> None:
    """`won` with reason `manual`; `overlap` while a run is alive, wherever; `busy` without a free worker."""
    one = Scheduler(cluster_url, max_workers=1, **OPTIONS)
    two = Scheduler(cluster_url, **OPTIONS)
    recorder = Recorder(one)
    release = threading.Event()
    reasons: list[str] = []

    def work(ctx: RunContext) -> None:
        reasons.append(ctx.reason)
        release.wait(10)

    for scheduler in (one, two):
        scheduler.add(work, Every(due_in(3000) / 1000), catch_up=0)
        scheduler.add(lambda: None, Every(due_in(3000) / 1000), name="other", catch_up=0)
    with pytest.raises(ConfigurationError, match=r"start\(\) first"):
        one.run_now("work")
    with one, two:
        with pytest.raises(ConfigurationError, match="no job 'nobody'"):
            one.run_now("nobody")
        before = wall_ms()
        assert one.run_now("work") == "won"
        start = recorder.wait("start", job="work")
        assert start.reason == "manual"
        assert before - 100 < to_ms(start.slot) < wall_ms() + 100
        assert one.run_now("other") == "busy"
        assert recorder.wait("skip", job="other").reason == "busy"
        until(lambda: wall_ms() > to_ms(start.slot) + 50, "a slot of its own, whichever instance's clock is ahead")
        assert two.run_now("work") == "overlap"
        assert two.run_now("other") == "won"
        release.set()
        recorder.wait("success", job="work")
        assert two.run_now("work") == "won"
        until(lambda: len(reasons) == 2, "it runs")
    assert reasons == ["manual"] * 2
    for scheduler in (one, two):
        scheduler.store.close()


# ---- health ---------------------------------------------------------------------------------------------------------


def test_health_tells_what_an_instance_does(cluster_url: str) -> None:
    """Attempts running, backups held, the store's clock, lateness; nothing of it once stopped."""
    one, two = (Scheduler(cluster_url, **OPTIONS) for _ in range(2))
    recorder = Recorder(one)
    release = threading.Event()
    due = Every(due_in(0.6) / 1000)
    assert not one.health().started
    one.add(lambda: release.wait(10) and None, due, name="work")
    with one, two:
        recorder.wait("start")
        two.add(lambda: None, due, name="work")
        until(lambda: two.health().backups_held == 1, "the second is a backup")
        health = one.health()
        assert health.started
        assert health.store_reachable
        assert health.store_unreachable_for == 0
        assert health.store_error is None
        assert (health.attempts_running, health.backups_held) == (1, 0)
        assert health.clock_offset is not None
        assert abs(health.clock_offset) < 0.5
        assert health.last_claim_late is not None
        assert -0.1 < health.last_claim_late < SLACK_S
        assert (health.events_dropped, health.internal_errors) == (0, 0)
        (running,) = one.running
        assert (running.job, running.attempt, running.reason) == ("work", 1, "scheduled")
        release.set()
        recorder.wait("success")
        until(lambda: one.health().attempts_running == 0, "nothing runs")
        until(lambda: two.health().backups_held == 0, "a run that ended is watched no more", 2 * BEAT_S + SLACK_S)
    assert not one.health().started
    assert one.running == ()
    for scheduler in (one, two):
        scheduler.store.close()


# ---- no free worker -------------------------------------------------------------------------------------------------


@pytest.mark.system
def test_sixty_jobs_of_one_slot_all_run_on_few_workers(cluster: Cluster) -> None:
    """Each once, on one of two instances with four workers each, as workers become free."""
    instances = cluster.boot(2, max_workers=4, lease=5)
    due = due_in(0.8)
    jobs = [{"name": f"job{n}", "do": "sleep", "seconds": 0.25, "every_ms": due} for n in range(60)]
    cluster.add(instances, *jobs)
    cluster.wait("end", 20, count=60)
    cluster.stop_all()
    starts = cluster.facts("start")
    assert len({f["job"] for f in starts}) == 60
    assert_started_once(starts)
    assert {f["pid"] for f in starts} == {i.pid for i in instances}
    for instance in instances:
        assert most_at_once(cluster, instance.pid) <= 4
    assert not cluster.events("lost")


def most_at_once(cluster: Cluster, pid: int) -> int:
    """How many handlers of a process ran at the same time, at most."""
    changes = [(f["t"], 1) for f in cluster.facts("start", pid=pid)] + [
        (f["t"], -1) for f in cluster.facts("end", pid=pid)
    ]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


@pytest.mark.system
def test_a_job_that_finds_no_free_worker_in_time_is_a_visible_skip(cluster: Cluster) -> None:
    """Every job of the slot has a run or, on each instance, a skip (busy); none is won and then left waiting."""
    instances = cluster.boot(2, max_workers=4)
    due = due_in(0.8)
    # Their leases are long: a store that is slow for a moment is no outage, which would be told as another skip.
    timing = {"max_late": 1, "catch_up": 1, "lease": 10, "heartbeat": 1}
    jobs = [{"name": f"job{n}", "do": "hold", "every_ms": due, **timing} for n in range(40)]
    cluster.add(instances, *jobs)
    cluster.wait("start", 10, count=8)
    for instance in instances:
        cluster.wait_event("skip", 5, pid=instance.pid, reason="busy", job=lambda job: True)
    ran = {f["job"] for f in cluster.facts("start")}
    left = {j["name"] for j in jobs} - ran
    assert (len(ran), len(left)) == (8, 32)
    for instance in instances:
        cluster.until(
            lambda i=instance: {f["job"] for f in cluster.events("skip", pid=i.pid, reason="busy")} >= left,
            "each job that didn't run is told of",
            3,
        )
    for name in left:
        assert not cluster.store.runs(name)
    for fact in cluster.facts("start"):
        run = cluster.stored(fact["job"], fact["slot"])
        won = cluster.at(to_ms(run.started_at))
        assert fact["t"] - won < SLACK_S, "won, and started later"
    cluster.stop_all()


# ---- versions -------------------------------------------------------------------------------------------------------


@pytest.mark.system
def test_a_deploy_that_changes_a_schedule_runs_nothing_by_itself(cluster: Cluster) -> None:
    """Old and new instances side by side: each slot of either schedule runs once. Orphans of removed jobs stay."""
    orphan_ms = wall_ms() - 1000
    claim = cluster.store.claim("removed", from_ms(orphan_ms), secrets.token_hex(16), "old", lease=0.01, max_late=60)
    assert claim.outcome == "won"
    name = {"name": "report", "do": "quick"}
    cluster.boot(1, {**name, "every_ms": 1000})
    cluster.wait("start", count=2)
    # The new schedule's slots so far are long past: nothing is to be caught up. The one to come is between two of the
    # old schedule: time enough to boot before it, and to start it before the old schedule's next one supersedes it.
    deployed_ms = wall_ms()
    new_ms = every_ms_due((deployed_ms + 4000) // 1000 * 1000 + 220)
    cluster.boot(2, {**name, "every_ms": new_ms})
    slot_ms = (deployed_ms // new_ms + 1) * new_ms
    start = cluster.wait("start", slot=slot_ms)
    assert start["reason"] == "scheduled"
    cluster.wait("start", t=lambda t: t > start["t"], count=2)
    last_ms = wall_ms() - 500
    cluster.stop_all()
    starts = cluster.facts("start")
    assert_started_once(starts)
    assert {f["slot"] for f in starts if f["slot"] % 1000} <= {slot_ms}
    assert_all_started(cluster.facts(), "report", slots_between(1000, starts[0]["slot"], last_ms))
    orphan = cluster.stored("removed", orphan_ms)
    assert (orphan.status, orphan.attempt) == ("running", 1)
    assert not cluster.events("store_error")


@pytest.mark.system
def test_versions_with_other_leases_take_each_others_runs_over(cluster: Cluster) -> None:
    """A lease is judged by what the runner stored with the run, not by the options of whoever asks."""
    due = due_in(0.5)
    (old,) = cluster.boot(1, {"name": "work", "do": "hold", "every_ms": due})
    start = cluster.wait("start")
    (new,) = cluster.boot(1)
    new.tell("add", job={"name": "work", "do": "quick", "every_ms": due, "lease": 20, "heartbeat": BEAT_S})
    cluster.until(lambda: new.tell("health")["backups_held"] == 1, "the new version watches the old one's run")
    killed = old.kill()
    taken = cluster.wait("start", 5, attempt=2)
    assert taken["t"] - killed < LEASE_S + 2 * BEAT_S + SLACK_S
    run: Any = cluster.wait_status("work", start["slot"], "success")
    assert run.attempts[-1].number == 2
    assert run.lease == 20


# ---- a store that is busy -------------------------------------------------------------------------------------------


@pytest.mark.system
def test_a_program_that_holds_sqlites_lock_for_three_seconds_costs_no_slot(sqlite_cluster: Cluster) -> None:
    """Four processes with ten jobs each: every slot once, nothing told as an error, no process left out."""
    import sqlite3

    cluster = sqlite_cluster
    # With `skip` a slot could be refused because the finish of the one before waits for the lock.
    jobs = [{"name": f"job{n}", "do": "quick", "every_ms": 1000, "overlap": "allow"} for n in range(10)]
    instances = cluster.boot(4, *jobs, lease=30, heartbeat=5, jitter=0.1)
    cluster.wait("start", count=10)
    first_ms = wall_ms()
    database = sqlite3.connect(cluster.folder / "leases.db", isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    cluster.wait_until(time.monotonic() + 3)
    database.execute("ROLLBACK")
    database.close()
    freed = time.monotonic()
    last_ms = wall_ms() + 1000
    for job in jobs:
        cluster.wait("start", 10, job=job["name"], slot=lambda slot: slot > last_ms)
    cluster.stop_all()
    assert_started_once(cluster.facts())
    for job in jobs:
        assert_all_started(cluster.facts(), job["name"], slots_between(1000, first_ms, last_ms))
    after = [f for f in cluster.facts("start") if f["t"] > freed]
    assert {f["pid"] for f in after} == {i.pid for i in instances}
    for name in ("store_error", "lost", "failed"):
        assert not cluster.events(name)
    assert "OperationalError" not in cluster.complaints()
