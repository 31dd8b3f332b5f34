"""Whole schedulers on a Redis Cluster of three real primaries: a node that dies is trouble of its own jobs alone, and a
hash slot that moves is none.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
from fix_servers_redis import LABELS, RedisCluster, RedisServer, program, wait_until
from test_redis_cluster import KEYS, cluster_is_well, job_on, move_slot
from test_redis_scheduler import Facts, assert_each_slot_started_once, instances

from leaselib import Event
from leaselib.stores._redis import RedisStore

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", params=LABELS[:1])
def cluster(request: pytest.FixtureRequest) -> Iterator[RedisCluster]:
    """Three nodes, for this module; a test that kills one starts it again. test_redis_cluster covers each program."""
    with RedisCluster(program=program(request.param)) as it:
        yield it


def of_job(events: list[Event], job: str, name: str) -> int:
    """How many such events the job has had."""
    return sum(event.job == job and event.name == name for event in events)


def of_store(events: list[Event]) -> list[str | None]:
    """What was said about the store as a whole."""
    return [event.error for event in events if event.job is None and event.name in ("store_error", "store_ok")]


@pytest.mark.parametrize(("epochs", "frozen"), [(False, False), (True, True)], ids=["killed", "epoch-frozen"])
def test_a_dead_node_stops_its_own_jobs_alone(cluster: RedisCluster, epochs: bool, frozen: bool) -> None:
    """Whether it holds the namespace's epoch or not: each of its jobs has a `store_error` of its own.

    The others miss no slot, and it goes on once the node is back.
    """
    home = cluster.owner(KEYS.epoch)
    victim = home if epochs else next(node for node in cluster.nodes if node is not home)
    jobs = {node.port: job_on(cluster, node) for node in cluster.nodes}
    lost, safe = jobs[victim.port], [job for port, job in jobs.items() if port != victim.port]
    try:
        with instances(cluster.url(), *jobs.values()) as facts:
            facts.wait(lambda events: all(of_job(events, job, "success") >= 2 for job in jobs.values()))
            assert of_store(facts.events) == []
            (victim.freeze if frozen else victim.kill)()
            facts.wait(lambda events: of_job(events, lost, "store_error") >= 2)
            before = len(facts.events)
            facts.wait(lambda events: all(of_job(events[before:], job, "success") >= 4 for job in safe))
            assert of_store(facts.events) == []
            assert all(of_job(facts.events, job, "store_error") == 0 for job in safe)
            for job in safe:
                assert_no_slot_is_missing(facts.events, job)
            (victim.thaw if frozen else victim.start)()
            before = len(facts.events)
            facts.wait(lambda events: all(of_job(events[before:], job, "success") >= 3 for job in jobs.values()))
        assert facts.count("failed") == facts.count("lost") == 0
        for job in safe:
            assert_each_slot_started_once(Facts([event for event in facts.events if event.job == job]))
    finally:
        restore(cluster, victim)


@pytest.mark.parametrize("what", ["a job's keys", "a node's data"])
def test_lost_data_are_a_new_epoch_of_the_jobs_that_lost_them_alone(cluster: RedisCluster, what: str) -> None:
    """Each of those has one `store_error` (reset) on each instance, and the others miss no slot."""
    jobs = {node.port: job_on(cluster, node) for node in cluster.nodes}
    victim = next(node for node in cluster.nodes if node is not cluster.owner(KEYS.epoch))
    lost, safe = jobs[victim.port], [job for port, job in jobs.items() if port != victim.port]
    with instances(cluster.url(), *jobs.values()) as facts:
        facts.wait(lambda events: all(of_job(events, job, "success") >= 2 for job in jobs.values()))
        if what == "a job's keys":
            victim.client().delete(KEYS.runs(lost), KEYS.slots(lost))
        else:
            victim.client().flushall()
        facts.wait(lambda events: of_job(events, lost, "store_error") >= 2)
        before = len(facts.events)
        facts.wait(lambda events: all(of_job(events[before:], job, "success") >= 3 for job in jobs.values()))
    assert of_store(facts.events) == []
    told = [(event.job, event.reason) for event in facts.events if event.name == "store_error"]
    assert told == [(lost, "reset")] * 2
    assert all(of_job(facts.events, job, "skip") == 0 for job in safe)
    for job in safe:
        assert_no_slot_is_missing(facts.events, job)
    assert facts.count("failed") == 0
    restore(cluster, victim)


@pytest.mark.parametrize("refusal", ["the password", "a right", "the cluster is down"])
def test_a_node_that_refuses_stops_its_own_jobs_alone(cluster: RedisCluster, refusal: str) -> None:
    """Its users were changed, or it has lost the rest of the cluster: one `store_error` of each of its jobs, and one
    `store_ok` when it lets us in again. The others miss no slot.
    """
    jobs = {node.port: job_on(cluster, node) for node in cluster.nodes}
    victim = next(node for node in cluster.nodes if node is not cluster.owner(KEYS.epoch))
    lost, safe = jobs[victim.port], [job for port, job in jobs.items() if port != victim.port]
    unused = cluster.slot(next(key for key in map(str, itertools.count()) if cluster.owner(key) is victim))
    admin = victim.client()  # knows the server since before
    admin.ping()
    with instances(cluster.url(), *jobs.values()) as facts:
        facts.wait(lambda events: all(of_job(events, job, "success") >= 2 for job in jobs.values()))
        if refusal == "the password":
            admin.execute_command("ACL", "SETUSER", "root", "on", "nopass", "allcommands", "allkeys")
            admin.execute_command("AUTH", "root", "any")
            admin.execute_command("ACL", "SETUSER", "default", "resetpass", ">secret")
            admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        elif refusal == "a right":
            admin.execute_command("ACL", "SETUSER", "root", "on", "nopass", "allcommands", "allkeys")
            admin.execute_command("AUTH", "root", "any")
            admin.execute_command("ACL", "SETUSER", "default", "-hset")
        else:
            admin.config_set("cluster-require-full-coverage", "yes")
            admin.execute_command("CLUSTER", "DELSLOTS", unused)
        facts.wait(lambda events: of_job(events, lost, "store_error") >= 2)
        before = len(facts.events)
        facts.wait(lambda events: all(of_job(events[before:], job, "success") >= 4 for job in safe))
        assert of_store(facts.events) == []
        assert of_job(facts.events, lost, "store_error") == 2
        assert of_job(facts.events, lost, "store_ok") == 0
        for job in safe:
            assert of_job(facts.events, job, "store_error") == 0
            assert_no_slot_is_missing(facts.events, job)
        if refusal == "the cluster is down":
            admin.execute_command("CLUSTER", "ADDSLOTS", unused)
            admin.config_set("cluster-require-full-coverage", "no")
        else:
            admin.execute_command("ACL", "SETUSER", "default", "nopass", "allcommands")
            admin.execute_command("ACL", "DELUSER", "root")
        before = len(facts.events)
        facts.wait(lambda events: all(of_job(events[before:], job, "success") >= 3 for job in jobs.values()))
    assert of_store(facts.events) == []
    assert of_job(facts.events, lost, "store_ok") == 2
    assert facts.count("failed") == facts.count("lost") == 0
    restore(cluster, victim)


def assert_no_slot_is_missing(events: list[Event], job: str) -> None:
    """Between the first one that was started and the last."""
    slots = sorted(event.slot for event in events if event.job == job and event.name == "start" and event.slot)
    assert all((later - earlier).total_seconds() == 1 for earlier, later in itertools.pairwise(slots))


def restore(cluster: RedisCluster, victim: RedisServer) -> None:
    """The cluster is whole again, and empty."""
    if victim.runs():
        victim.thaw()
    else:
        victim.start()
    wait_until(lambda: cluster_is_well(cluster), "the cluster to be well again")
    for node in cluster.nodes:
        node.client().flushall()


def test_with_all_nodes_dead_the_store_is_lost_as_a_whole(cluster: RedisCluster) -> None:
    """Not only each job by itself: health() says so, and one `store_ok` tells that it is over."""
    jobs = [job_on(cluster, node) for node in cluster.nodes]
    with instances(cluster.url(), *jobs) as facts:
        facts.wait(lambda events: all(of_job(events, job, "success") >= 1 for job in jobs))
        for node in cluster.nodes:
            node.kill()
        facts.wait(lambda events: sum(event.name == "store_error" and event.job is None for event in events) >= 2)
        for node in cluster.nodes:
            node.start()
        wait_until(lambda: cluster_is_well(cluster), "the cluster to be well again")
        before = len(facts.events)
        facts.wait(lambda events: all(of_job(events[before:], job, "success") >= 2 for job in jobs))
        facts.wait(lambda events: sum(event.name == "store_ok" and event.job is None for event in events) >= 2)


def test_a_slot_that_moves_while_schedulers_run_loses_and_doubles_nothing(cluster: RedisCluster) -> None:
    """To another node and back, key by key, while a job in it is due every second: each slot starts once."""
    store = RedisStore(cluster.url())
    job = "moving {job}"
    source = cluster.owner(KEYS.runs(job))
    target = next(node for node in cluster.nodes if node is not source)
    with instances(cluster.url(), job) as facts:
        facts.wait(lambda events: of_job(events, job, "success") >= 1)
        for start, end in ((source, target), (target, source)):
            before = of_job(facts.events, job, "success")
            move_slot(cluster, cluster.slot(KEYS.runs(job)), start, end, lambda: threading.Event().wait(0.3) and None)
            facts.wait(lambda events, before=before: of_job(events, job, "success") >= before + 2)
    assert of_store(facts.events) == []
    assert facts.count("lost") == facts.count("failed") == facts.count("skip") == 0
    assert_each_slot_started_once(facts)
    runs = store.runs(job)
    assert [run.attempt for run in runs] == [1] * len(runs)
    slots = sorted(run.slot for run in runs)
    assert all((later - earlier).total_seconds() == 1 for earlier, later in itertools.pairwise(slots))
    store.close()
