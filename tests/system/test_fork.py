"""Forks: the parent goes on undisturbed, each child starts afresh, and nothing is shared between them.

Forks from inside a handler, by multiprocessing, by subprocess, and at the end of the main thread are in `test_exit`,
on every Python.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from cluster import SLACK_S, Cluster, assert_all_started, assert_started_once, due_in, gone, slots_between, wall_ms

pytestmark = pytest.mark.system

HOLD_S = 1.0
"""A forked child touches the store this much after the fork, at the earliest."""


@pytest.mark.timeout(60)
def test_four_children_work_beside_their_parent_whose_run_goes_on(cluster: Cluster) -> None:
    """Each slot once over all five processes; names of their own; the end of one leaves the others at work."""
    jobs = [
        {"name": "long", "do": "hold", "every_ms": due_in(0.4)},
        *({"name": f"tick{n}", "do": "quick", "every_ms": 300} for n in range(3)),
    ]
    parent = cluster.spawn(*jobs, then="fork_and_work", conf={"children": 4}, lease=6, heartbeat=0.5, runner="api")
    forked = cluster.wait("forked", 20)
    children = forked["children"]
    for pid in (parent.pid, *children):
        start = cluster.wait("start", HOLD_S + 8, pid=pid, t=lambda t: t > forked["t"])
        assert pid == parent.pid or start["t"] > forked["t"] + HOLD_S - 0.2  # the first child is a little older
    first_ms = wall_ms() + 100
    cluster.wait_until(time.monotonic() + 1.2)
    assert_all_started(cluster.facts(), "tick0", slots_between(300, first_ms, wall_ms() - 500))
    runners = {pid: {f["runner"] for f in cluster.facts("start", pid=pid)} for pid in (parent.pid, *children)}
    assert all(len(names) == 1 for names in runners.values()), runners
    assert runners[parent.pid] == {"api"}, "a name that was given is the parent's"
    assert len(set.union(*runners.values())) == 5, "a name of the parent's or of a sibling's was kept"
    os.kill(children[0], signal.SIGTERM)
    cluster.wait_event("stopped", 3, pid=children[0])
    cluster.until(lambda: gone(children[0]), "the child has ended", 3)
    ended = time.monotonic()
    for pid in (parent.pid, *children[1:]):
        cluster.wait("start", 8, pid=pid, t=lambda t: t > ended)
    # The run that was under way at the fork is still the parent's first attempt, and a success in the end.
    parent.send("go", name="long")
    run = cluster.wait_status("long", cluster.facts("start", job="long")[0]["slot"], "success")
    assert (run.attempt, run.runner) == (1, next(iter(runners[parent.pid])))
    parent.terminate()
    parent_ended = parent.ended(3)
    for pid in children[1:]:
        cluster.wait("start", 8, pid=pid, t=lambda t: t > parent_ended)
    assert_started_once(cluster.facts())
    assert not cluster.events("lost")
    assert not cluster.events("store_error")


@pytest.mark.timeout(60)
def test_two_hundred_forks_under_load_disturb_nothing(cluster: Cluster) -> None:
    """Children look at what they inherited and leave in three ways: no descriptor of a SQLite file, no run, no name.

    Meanwhile the parent runs each slot once, and renews a run that is longer than two leases.
    """
    jobs = [
        {"name": "long", "do": "hold", "every_ms": due_in(0.4)},
        *({"name": f"tick{n}", "do": "quick", "every_ms": 200} for n in range(4)),
    ]
    foreign = cluster.file or ""  # sockets are inherited like anything open; that they aren't used is seen elsewhere
    parent = cluster.spawn(*jobs, then="fork_often", conf={"children": 200, "foreign": foreign})
    first_ms = cluster.wait("start", 20, job="tick0")["slot"] + 200
    done = cluster.wait("forks-done", 50)
    last_ms = cluster.facts("start", job="tick0")[-1]["slot"]
    cluster.wait("start", 5, job="tick0", t=lambda t: t > done["t"] + 0.2)
    cluster.go("long")
    cluster.wait_event("success", 5, job="long")
    parent.terminate()
    parent.ended(3)
    assert not cluster.facts("inherited")
    assert not cluster.facts("child-failed")
    assert {f["pid"] for f in cluster.facts("start")} == {parent.pid}
    assert {f["runner"] for f in cluster.facts("start")} == {done["runner"]}
    assert_started_once(cluster.facts())
    for n in range(4):
        assert_all_started(cluster.facts(), f"tick{n}", slots_between(200, first_ms, last_ms))
    assert not cluster.events("lost")
    assert cluster.facts("end", job="long")[0]["t"] - cluster.facts("start", job="long")[0]["t"] > SLACK_S
