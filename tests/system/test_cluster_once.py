"""Nobody dies: every slot of a job runs once, at its time, whatever the number of instances."""

from __future__ import annotations

import itertools
import time

import pytest
from cluster import SLACK_S, Cluster, assert_all_started, assert_started_once, due_in, slots_between, wall_ms

pytestmark = pytest.mark.system


@pytest.mark.timeout(40)
def test_each_slot_runs_once_on_four_instances(cluster: Cluster) -> None:
    """Also for a name of any Unicode; every record is a success at attempt 1, newest first."""
    names = ["a", "b", "ünï {x}:*"]
    instances = cluster.boot(4)
    for name in names:
        cluster.add(instances, name=name, do="quick", every_ms=500)
    first_ms = wall_ms() + 300
    # Between two slots: one that is won in the moment of the stop is handed over, and that is no success.
    cluster.wait_until(cluster.at((wall_ms() + 3_300) // 500 * 500) + 0.3)
    last_ms = wall_ms() - 500
    cluster.stop_all()
    facts = cluster.facts()
    assert_started_once(facts)
    for name in names:
        assert_all_started(facts, name, slots_between(500, first_ms, last_ms))
        runs = cluster.store.runs(name)
        assert [r.slot for r in runs] == sorted({r.slot for r in runs}, reverse=True)
        assert {(r.status, r.attempt) for r in runs} == {("success", 1)}
        assert not cluster.store.unfinished([name])
    assert not cluster.events("lost")


@pytest.mark.timeout(40)
def test_a_short_interval_does_not_drift(cluster: Cluster) -> None:
    """Two instances started apart name the same slots, all whole multiples, and the last is no later than the first."""
    for delay_s in (0, 0.35):
        cluster.wait_until(time.monotonic() + delay_s)
        job = {"name": "tick", "do": "sleep", "seconds": 0.2, "every_ms": 400, "jitter": 0, "overlap": "allow"}
        cluster.boot(1, job)
    first_ms = wall_ms() + 100
    cluster.wait("start", 12, count=12, slot=lambda slot: slot >= first_ms)
    cluster.stop_all()
    starts = sorted(cluster.facts("start", slot=lambda slot: slot >= first_ms), key=lambda f: f["slot"])
    assert_started_once(cluster.facts())
    assert all(f["slot"] % 400 == 0 for f in starts)
    assert [b["slot"] - a["slot"] for a, b in itertools.pairwise(starts)] == [400] * (len(starts) - 1)
    late = [f["t"] - cluster.at(f["slot"]) for f in starts]
    assert min(late) > -0.03, "started before its slot"
    # A creep of the handler's 0.2 s a round would add up to over two seconds.
    assert max(late) < SLACK_S, late


@pytest.mark.timeout(40)
def test_instances_of_one_name_are_told_apart_by_token(cluster: Cluster) -> None:
    """Two processes called `api` run each slot once: ownership is by token, never by name."""
    job = {"name": "tick", "do": "quick", "every_ms": 300}
    cluster.boot(2, job, runner="api")
    first_ms = wall_ms() + 100
    cluster.wait("start", 10, count=8, slot=lambda slot: slot >= first_ms)
    last_ms = wall_ms() - 400
    cluster.stop_all()
    assert {f["runner"] for f in cluster.facts("start")} == {"api"}
    assert_started_once(cluster.facts())
    assert_all_started(cluster.facts(), "tick", slots_between(300, first_ms, last_ms))


@pytest.mark.timeout(40)
def test_default_names_differ_where_host_and_pid_are_the_same(cluster: Cluster) -> None:
    """As in two containers: the name has a random part."""
    cluster.boot(2, {"name": "tick", "do": "quick", "every_ms": 300}, conf={"patch_identity": True})
    cluster.wait("start", 10, count=4)
    cluster.stop_all()
    runners = [f["runner"] for f in cluster.facts("up")]
    assert all(runner.startswith("box-1-") for runner in runners)
    assert len(set(runners)) == 2
    assert_started_once(cluster.facts())


@pytest.mark.timeout(40)
def test_skip_refuses_slots_during_a_run_and_allow_runs_them_all(cluster: Cluster) -> None:
    """No two handlers of a `skip` job at once, on any instance; each slot between is one visible skip."""
    options = {"do": "sleep", "seconds": 0.55, "every_ms": 400, "catch_up": 0, "jitter": 0.02}
    cluster.boot(3, {"name": "skip", **options}, {"name": "allow", **options, "overlap": "allow"})
    first_ms = wall_ms() + 200
    cluster.wait_until(time.monotonic() + 3.4)
    last_ms = wall_ms() - 800
    wanted = slots_between(400, first_ms, last_ms)
    skipped = {f["slot"] for f in cluster.events("skip", job="skip", reason={"overlap", "superseded"})}
    ran = {f["slot"] for f in cluster.facts("start", job="skip")}
    assert len(ran) >= 3
    assert set(wanted) <= skipped | ran, "a slot with neither a run nor a skip"
    ends = {f["token"]: f["t"] for f in cluster.facts("end", job="skip")}
    spans = sorted((f["t"], ends.get(f["token"], f["t"])) for f in cluster.facts("start", job="skip"))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans)), spans
    assert not cluster.events("skip", job="allow", reason="overlap")
    assert_all_started(cluster.facts(), "allow", wanted)
    assert_started_once(cluster.facts())
    cluster.stop_all()


@pytest.mark.timeout(40)
def test_only_the_latest_missed_slot_is_caught_up(cluster: Cluster) -> None:
    """Once among two instances, and only by a job whose catch_up reaches that far."""
    missed = due_in(-2)
    jobs = [
        {"name": "late", "do": "quick", "every_ms": missed},
        {"name": "never", "do": "quick", "every_ms": missed, "catch_up": 0},
        {"name": "too-late", "do": "quick", "every_ms": missed, "catch_up": 1.5},
        {"name": "often", "do": "quick", "every_ms": 200},
    ]
    up_ms = wall_ms()
    cluster.boot(2, *jobs)
    caught = cluster.wait("start", job="late")
    assert caught["reason"] == "catch-up"
    assert caught["slot"] == wall_ms() // missed * missed
    # A later slot of a job that was registered last shows that the others had their turn.
    cluster.wait("start", count=6, job="often")
    cluster.stop_all()
    assert not cluster.facts("start", job="never")
    assert not cluster.facts("start", job="too-late")
    assert [f["slot"] for f in cluster.facts("start", job="often") if f["slot"] < up_ms - 200] == []
    assert_started_once(cluster.facts())
