"""A runner that was frozen past its lease does no harm when it wakes: refused, aborted, able to record nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cluster import BEAT_S, LEASE_S, OPTIONS, SLACK_S, TAKEOVER_S, Cluster, Recorder, due_in, wall_ms

import leaselib
from leaselib._model import from_ms

pytestmark = pytest.mark.system

KINDS = {
    "sleeps": {"do": "sleep"},
    "checks": {"do": "loop"},
    "deaf": {"do": "deaf"},
    "continues": {"do": "hold", "on_store_loss": "continue"},
}
"""Handlers that were frozen, by what they do about their signal."""


@pytest.mark.timeout(40)
def test_a_frozen_runner_that_wakes_is_refused_aborted_and_records_nothing(cluster: Cluster) -> None:
    """Whatever its handlers do. No check() passes after the next attempt's start."""
    (frozen,) = cluster.boot(1)
    due = due_in(0.4)
    for name, job in KINDS.items():
        cluster.add([frozen], name=name, every_ms=due, **job)
    old = {name: cluster.wait("start", job=name) for name in KINDS}
    backups = cluster.boot(2)
    for name, job in KINDS.items():
        cluster.add(backups, name=name, every_ms=due, **job)
    stopped = frozen.freeze()
    new = {name: cluster.wait("start", TAKEOVER_S + SLACK_S + 1, job=name, attempt=2) for name in KINDS}
    for start in new.values():
        assert start["reason"] == "takeover"
        assert start["t"] - stopped < TAKEOVER_S + SLACK_S
    before = {name: cluster.stored(name, start["slot"]) for name, start in new.items()}
    woke = frozen.thaw()
    for name, start in old.items():
        token = start["token"]
        told = cluster.wait("told" if name == "deaf" else "end", job=name, token=token)
        lost = cluster.wait_event("lost", job=name, token=token)
        assert max(told["t"], lost["t"]) - woke < BEAT_S + SLACK_S, name
        if name != "deaf":
            assert told["how"] == "Aborted"
        # By its own deadline it knows at once; one that goes on without the store learns it from a refusal.
        assert told["abort_reason"] in (("refused",) if name == "continues" else ("refused", "unreachable"))
        assert new[name]["fence"] > start["fence"]
    passed = cluster.facts("last-check", token=old["checks"]["token"])[0]["at"]
    assert 0 < passed < new["checks"]["t"]
    assert_old_token_is_void(cluster, old, new)
    frozen.send("go", name="deaf")  # it returns as if nothing had happened; its finish must come to nothing
    cluster.wait("end", job="deaf", token=old["deaf"]["token"], how="returned")
    frozen.terminate()
    frozen.ended(4)
    for name, start in new.items():
        run = cluster.stored(name, start["slot"])
        assert (run.status, run.token, run.attempt) == ("running", start["token"], 2), name
        assert run.fence == before[name].fence
        cluster.go(name)
    for name in ("checks", "deaf", "continues"):
        assert cluster.wait_status(name, new[name]["slot"], "success").token == new[name]["token"]
    assert len(cluster.events("lost")) == len(KINDS)
    assert not cluster.events("success", runner=old["deaf"]["runner"])


def assert_old_token_is_void(cluster: Cluster, old: dict[str, Any], new: dict[str, Any]) -> None:
    """By hand: the old token's heartbeat, finish and release are refused, and change nothing."""
    for name, start in old.items():
        slot, token, store = from_ms(start["slot"]), start["token"], cluster.store
        assert not store.heartbeat(name, slot, token, 60, '"stale"')
        assert not store.finish(name, slot, token, "success")
        assert not store.finish(name, slot, token, "failed", "stale")
        assert not store.release(name, slot, token, '"stale"')
        run = cluster.stored(name, start["slot"])
        assert (run.status, run.token, run.released, run.checkpoint) == ("running", new[name]["token"], False, None)
        assert (run.lease_end - cluster.store.now()).total_seconds() <= LEASE_S


@pytest.mark.timeout(40)
def test_a_check_after_the_deadline_raises_though_no_other_thread_could_run(cluster: Cluster) -> None:
    """check() compares the deadline itself, in the handler's thread: it needs no timer that has fired."""
    cluster.boot(1, {"name": "work", "do": "hog_and_check", "seconds": LEASE_S, "every_ms": due_in(0.6)})
    end = cluster.wait("end")
    assert (end["how"], end["abort_reason"]) == ("Aborted", "unreachable")
    assert not cluster.facts("passed")
    cluster.wait_event("lost", reason="unreachable")


@pytest.mark.timeout(40)
def test_a_freeze_shorter_than_the_lease_is_not_noticed(cluster: Cluster) -> None:
    """Three times half a lease: one attempt, a success, nothing lost."""
    instances = cluster.boot(2)
    lease_s = 3 * LEASE_S  # what is left of it after the freeze is for the heartbeat, on a busy machine as well
    cluster.add(instances, name="work", do="hold", every_ms=due_in(0.3), lease=lease_s)
    start = cluster.wait("start", job="work")
    runner = cluster.of(start)
    for _ in range(3):
        renewed_to = cluster.stored("work", start["slot"]).lease_end
        cluster.until(
            lambda end=renewed_to: cluster.stored("work", start["slot"]).lease_end > end, "a heartbeat gets through"
        )
        cluster.wait_until(runner.freeze() + lease_s / 2)
        runner.thaw()
    cluster.go("work")
    run = cluster.wait_status("work", start["slot"], "success")
    assert (run.attempt, run.token) == (1, start["token"])
    cluster.stop_all()
    assert not cluster.events("lost")
    assert len(cluster.facts("start")) == 1


@pytest.mark.timeout(40)
def test_an_instance_frozen_over_several_slots_catches_up_the_latest_and_skips_the_others(cluster: Cluster) -> None:
    """One `skip` (missed) with a count; no slot twice; then on as before."""
    (instance,) = cluster.boot(1, {"name": "tick", "do": "quick", "every_ms": 300, "max_late": 0.2})
    cluster.wait("start", job="tick", count=2)
    stopped_ms = wall_ms()
    cluster.wait_until(instance.freeze() + 1.6)
    woke = instance.thaw()
    woke_ms = wall_ms()
    skip = cluster.wait_event("skip", job="tick", reason="missed")
    assert skip["t"] - woke < SLACK_S
    assert skip["count"] >= (woke_ms - stopped_ms) // 300 - 2
    after = cluster.wait("start", job="tick", t=lambda t: t > woke)
    assert after["slot"] > woke_ms - 300 - 50
    assert after["reason"] in ("catch-up", "scheduled")
    cluster.wait("start", job="tick", t=lambda t: t > woke, count=4)
    cluster.stop_all()
    slots = [f["slot"] for f in cluster.facts("start")]
    assert len(set(slots)) == len(slots)
    assert slots == sorted(slots)
    assert len(cluster.events("skip", reason="missed")) == 1


class Cut:
    """Makes what a runner sends to its store fail while `off` is true, as behind a network that is cut."""

    def __init__(self, store: leaselib.Store) -> None:
        self.off = False
        for name in ("heartbeat", "finish", "release"):
            setattr(store, name, self._guarded(getattr(store, name)))

    def _guarded(self, operation: Callable[..., bool]) -> Callable[..., bool]:
        def call(*args: Any, **kwargs: Any) -> bool:
            if self.off:
                raise leaselib.StoreError("cut off by the test", transient=True)
            return operation(*args, **kwargs)

        return call


@pytest.mark.timeout(30)
@pytest.mark.parametrize("on_store_loss", ["abort", "continue"])
def test_two_attempts_of_one_process_are_told_apart_as_those_of_two_are(cluster_url: str, on_store_loss: str) -> None:
    """A runner that is cut off: by default its signal is set before its lease can be over, else when it is refused."""
    stores = [leaselib.open_store(cluster_url) for _ in range(2)]
    cut = Cut(stores[0])
    contexts: list[leaselib.RunContext] = []
    ends: list[str | None] = []

    def work(ctx: leaselib.RunContext) -> None:
        contexts.append(ctx)
        try:
            ctx.sleep(20 if len(contexts) == 1 else 0.5)
        finally:
            ends.append(ctx.abort_reason)

    options = {**OPTIONS, "on_store_loss": on_store_loss}
    first, second = (leaselib.Scheduler(store, **options) for store in stores)
    recorders = [Recorder(first), Recorder(second)]
    due = leaselib.Every(due_in(0.1) / 1000)
    first.add(work, due)
    with first:
        recorders[0].wait("start")
        second.add(work, due)
        with second:
            cut.off = True
            taken = recorders[1].wait("start", attempt=2)
            assert taken.reason == "takeover"
            if on_store_loss == "continue":
                assert not ends, "it was told to go on"
                recorders[0].wait("store_error", reason="unreachable")
            cut.off = False
            lost = recorders[0].wait("lost")
            assert lost.token == contexts[0].token
            assert lost.reason == ("unreachable" if on_store_loss == "abort" else "refused")
            success = recorders[1].wait("success")
            assert success.token == contexts[1].token
            assert contexts[1].fence > contexts[0].fence
            assert ends[0] == lost.reason
    run = stores[0].get("work", contexts[0].slot)
    assert run is not None
    assert (run.status, run.token, run.attempt) == ("success", contexts[1].token, 2)
    assert not recorders[0].events("success")
    for store in stores:
        store.close()
