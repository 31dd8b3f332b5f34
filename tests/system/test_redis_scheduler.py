"""Whole schedulers on Redis: jobs go on after a failover by a real sentinel, and start only what a replica has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from fix_servers_redis import LABELS, RedisServer, knows_replica, program, replica_of, sentinel
from test_redis_replicas import Link

from leaselib import Event, Scheduler

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


@dataclass
class Facts:
    """What the schedulers of a test reported."""

    events: list[Event] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def note(self, event: Event) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def wait(self, condition: Callable[[list[Event]], bool], seconds: float = 40) -> None:
        with self.changed:
            held = self.changed.wait_for(lambda: condition(self.events), seconds)
        assert held, [(event.name, event.job, event.slot, event.reason) for event in self.events[-20:]]

    def count(self, name: str) -> int:
        return sum(event.name == name for event in self.events)


@contextmanager
def two_schedulers(url: str) -> Iterator[Facts]:
    """Two instances of one program with a job due every second."""
    facts = Facts()
    schedulers = [Scheduler(url, lease=2, heartbeat=0.3, jitter=0.1, stop_timeout=5) for _ in range(2)]
    for scheduler in schedulers:
        for name in ("start", "success", "failed", "lost", "store_error", "store_ok"):
            scheduler.on(name, facts.note)
        scheduler.every(seconds=1, name="tick")(lambda ctx: None)
        scheduler.start()
    try:
        yield facts
    finally:
        for scheduler in schedulers:
            scheduler.stop()


def assert_each_slot_started_once(facts: Facts) -> None:
    slots = [event.slot for event in facts.events if event.name == "start" and event.attempt == 1]
    assert len(slots) == len(set(slots))


@pytest.fixture(params=LABELS)
def primary(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of each program, for one test."""
    with RedisServer(program=program(request.param)) as it:
        yield it


def test_jobs_go_on_after_a_sentinel_has_moved_them_to_the_replica(primary: RedisServer) -> None:
    """One store_error when trouble starts on each instance, one store_ok when it ends, and the next slots run."""
    with replica_of(primary), sentinel(primary) as watch:
        knows_replica(watch)
        with two_schedulers(f"redis+sentinel://127.0.0.1:{watch.port}/jobs/0") as facts:
            facts.wait(lambda events: facts.count("success") >= 2)
            primary.kill()
            facts.wait(lambda events: facts.count("store_error") >= 2)
            before = facts.count("success")
            facts.wait(lambda events: facts.count("store_ok") >= 2 and facts.count("success") >= before + 3)
        assert facts.count("failed") == 0
        assert_each_slot_started_once(facts)


def test_with_its_replica_cut_off_nothing_starts_and_jobs_go_on_when_it_is_back(
    primary: RedisServer, link: Link
) -> None:
    """No win is acted on that a failover could lose."""
    with two_schedulers(primary.url() + "?wait_replicas=1&wait_timeout=0.2") as facts:
        facts.wait(lambda events: facts.count("success") >= 2)
        link.cut()
        facts.wait(lambda events: facts.count("store_error") >= 2)
        started = facts.count("start")
        with facts.changed:
            facts.changed.wait_for(lambda: facts.count("start") > started, 3)
        assert facts.count("start") == started, "started though no replica has the claim"
        link.mend()
        facts.wait(lambda events: facts.count("success") >= started + 3)
    assert_each_slot_started_once(facts)


@pytest.fixture
def link(primary: RedisServer) -> Iterator[Link]:
    """The primary's replica behind a proxy that can be cut."""
    with Link(primary) as it:
        yield it
