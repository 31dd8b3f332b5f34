"""A runner that is told to stop hands its runs over: a backup starts them at its next check, at no cost in attempts."""

from __future__ import annotations

import pytest
from cluster import BEAT_S, SLACK_S, Cluster, due_in

pytestmark = pytest.mark.system


@pytest.mark.timeout(40)
def test_sigterm_hands_over_within_two_heartbeats_and_costs_no_attempt(cluster: Cluster) -> None:
    """Twice, with max_attempts=1. A handler that raises its own exception is handed over as well; one that returns
    has succeeded.
    """
    instances = cluster.boot(3)
    options = {"every_ms": due_in(0.4), "max_attempts": 1}
    for name, do in (("work", "hold"), ("own", "own_error"), ("polite", "polite")):
        cluster.add(instances[:1], name=name, do=do, **options)
    starts = {name: cluster.wait("start", job=name) for name in ("work", "own", "polite")}
    for name, do in (("work", "hold"), ("own", "own_error"), ("polite", "polite")):
        cluster.add(instances[1:], name=name, do=do, **options)
    start = starts["work"]
    for attempt in (2, 3):
        runner = cluster.of(start)
        told = runner.terminate()
        event = cluster.wait_event("interrupted", job="work", token=start["token"])
        assert (event["handed_over"], event["reason"]) == (True, "stopping")
        start = cluster.wait("start", job="work", attempt=attempt)
        assert start["reason"] == "hand-over"
        assert start["t"] - told < 2 * BEAT_S + SLACK_S
        runner.ended(3)
        assert cluster.events("stopped", pid=runner.pid)
        if attempt == 2:
            own = cluster.wait("start", job="own", attempt=2)
            assert own["reason"] == "hand-over"
            assert own["t"] - told < 2 * BEAT_S + SLACK_S
    cluster.go("work")
    run = cluster.wait_status("work", start["slot"], "success")
    assert (run.attempt, run.handovers) == (3, 2)
    polite = cluster.wait_status("polite", start["slot"], "success")
    assert (polite.attempt, polite.token) == (1, starts["polite"]["token"])
    cluster.stop_all()


@pytest.mark.timeout(40)
def test_a_run_that_was_handed_over_keeps_its_attempts_but_not_those_of_the_dead(cluster: Cluster) -> None:
    """With max_attempts=2: a hand-over, a death, a hand-over, a death: only the second death ends it."""
    instances = cluster.boot(4)
    job = {"name": "work", "do": "hold", "every_ms": due_in(0.3), "max_attempts": 2}
    cluster.add(instances, **job)
    start = cluster.wait("start", job="work")
    cluster.of(start).terminate()
    start = cluster.wait("start", job="work", attempt=2, reason="hand-over")
    cluster.of(start).kill()
    start = cluster.wait("start", job="work", attempt=3, reason="takeover")
    cluster.of(start).terminate()
    start = cluster.wait("start", job="work", attempt=4, reason="hand-over")
    cluster.of(start).kill()
    (instance,) = cluster.boot(1)
    cluster.add([instance], **job)
    event = cluster.wait_event("interrupted", job="work", pid=instance.pid)
    assert (event["reason"], event["attempt"]) == ("max_attempts", 4)
    run = cluster.stored("work", start["slot"])
    assert (run.status, run.attempt, run.handovers) == ("interrupted", 4, 2)


@pytest.mark.timeout(40)
def test_a_second_sigterm_does_not_kill_the_hand_over(cluster: Cluster) -> None:
    """The process is still inside stop(), waiting for a handler that takes its time, when the second one comes."""
    (instance,) = cluster.boot(1)
    cluster.add([instance], name="slow", do="deaf", every_ms=due_in(0.2))
    start = cluster.wait("start", job="slow")
    instance.terminate()
    cluster.wait("told", job="slow", abort_reason="stopping")
    instance.terminate()
    instance.send("go", name="slow")
    instance.ended(3)
    assert cluster.stored("slow", start["slot"]).status == "success"
    assert cluster.events("stopped")
