"""The machine's time of day is set while instances run on SQLite, whose clock it is. Durations go on as before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import LEASE_S, SLACK_S, Cluster, assert_all_started, assert_started_once, due_in
from fix_clock_shim import SteppedClock

pytestmark = [pytest.mark.system, pytest.mark.timeout(40)]

NOTICED_S = 1.0
"""So long may a step go unnoticed."""
EVERY_MS = 400
COUNTED = 999
"""Missed slots are counted up to 1000; the one that is caught up is none of them."""


@pytest.fixture
def clock(tmp_path: Path) -> Iterator[SteppedClock]:
    """The time of day of all instances that are given its environment."""
    return SteppedClock(tmp_path)


def test_runs_go_on_when_the_clock_is_set_back_and_forward_again(sqlite_cluster: Cluster, clock: SteppedClock) -> None:
    """An hour back during a run of more than two leases: no takeover; slots run on within a second, none of them
    twice; and set right again: one skip (missed) with a count on each instance, and at most one slot caught up.
    """
    cluster = sqlite_cluster
    cluster.excuse("S1", "S17", why="a step forward ends every lease that is held just then")
    instances = cluster.boot(
        2,
        {"name": "tick", "do": "quick", "every_ms": EVERY_MS},
        {"name": "long", "do": "sleep", "seconds": 2.5 * LEASE_S, "every_ms": due_in(1)},
        env=clock.environment,
    )
    long = cluster.wait("start", job="long")
    cluster.wait("start", job="tick", count=2)
    before = cluster.facts("start", job="tick")
    stepped = time.monotonic()
    clock.step(-3600)
    back = cluster.wait("start", job="tick", slot=lambda slot: slot < before[0]["slot"] - 3_500_000)
    assert back["t"] - stepped < NOTICED_S + EVERY_MS / 1000 + SLACK_S
    assert cluster.wait("end", job="long")["how"] == "returned"
    run = cluster.wait_status("long", long["slot"], "success")
    assert run.attempt == 1
    last = cluster.wait("start", job="tick", count=len(before) + 6)
    clock.step(3600)
    ahead = cluster.wait("start", job="tick", slot=lambda slot: slot > before[-1]["slot"])
    assert ahead["t"] - last["t"] < NOTICED_S + EVERY_MS / 1000 + SLACK_S
    on = cluster.wait("start", job="tick", t=lambda t: t > ahead["t"], count=4)
    cluster.stop_all()
    assert_started_once(cluster.facts())
    for instance in instances:
        skips = [f for f in cluster.events("skip", job="tick", pid=instance.pid, reason="missed") if f["count"] > 10]
        assert len(skips) == 1
        assert skips[0]["count"] >= COUNTED
    assert_all_started(cluster.facts(), "tick", list(range(ahead["slot"], on["slot"] + 1, EVERY_MS)))
    missed = [f for f in cluster.facts("start", reason="catch-up") if f["t"] > last["t"]]
    assert len(missed) <= 1
    assert not cluster.events("lost")


def test_a_clock_that_is_set_ten_years_ahead_costs_no_memory_and_no_time(
    sqlite_cluster: Cluster, clock: SteppedClock
) -> None:
    """One skip (missed) with a count, at most one catch-up, and the next slots as before."""
    cluster = sqlite_cluster
    cluster.excuse("S1", "S17", why="a step forward ends every lease that is held just then")
    (instance,) = cluster.boot(1, {"name": "tick", "do": "quick", "every_ms": EVERY_MS}, env=clock.environment)
    before = cluster.wait("start", job="tick", count=3)
    memory_kb = instance.tell("rss_kb")
    clock.step(10 * 365 * 86_400)
    ahead = cluster.wait("start", job="tick", slot=lambda slot: slot > before["slot"] + 9 * 365 * 86_400_000)
    assert ahead["t"] - before["t"] < NOTICED_S + 2 * EVERY_MS / 1000 + SLACK_S
    cluster.wait("start", job="tick", t=lambda t: t > ahead["t"], count=4)
    assert instance.tell("rss_kb") < memory_kb + 8_000
    cluster.stop_all()
    (skip,) = cluster.events("skip", reason="missed")
    assert skip["count"] >= COUNTED
    assert len([f for f in cluster.facts("start", reason="catch-up") if f["t"] > before["t"]]) <= 1
    last_ms = cluster.facts("start")[-1]["slot"]
    assert_all_started(cluster.facts(), "tick", list(range(ahead["slot"], last_ms + 1, EVERY_MS)))
    assert_started_once(cluster.facts())


def test_a_freshly_set_clock_does_not_hide_a_death(sqlite_cluster: Cluster, clock: SteppedClock) -> None:
    """Set an hour back, and the runner dies: its lease end, an hour away by the new time, is brought down."""
    cluster = sqlite_cluster
    cluster.boot(2, {"name": "work", "do": "hold", "every_ms": due_in(1)}, env=clock.environment)
    start = cluster.wait("start")
    clock.step(-3600)
    killed = cluster.of(start).kill()
    taken = cluster.wait("start", 10, attempt=2)
    # A check brings the lease down to its own length from now; another, a lease later, takes over.
    assert taken["t"] - killed < 2 * LEASE_S + 1 + SLACK_S
    cluster.go("work")
    cluster.wait_event("success")
