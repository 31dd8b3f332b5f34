"""Whole schedulers on Redis: jobs go on after a failover by a real sentinel, and start only what a replica has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from fix_proxy import Proxy
from fix_servers_redis import LABELS, RedisServer, knows_replica, program, replica_of, sentinel, wait_until
from test_redis_replicas import Link

from leaselib import Aborted, Event, RunContext, Scheduler
from leaselib._model import to_ms
from leaselib.events import EVENT_NAMES
from leaselib.schedules import Schedule
from leaselib.stores._redis import RedisStore
from leaselib.stores._redis_codec import Keys

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
def started(facts: Facts, *schedulers: Scheduler) -> Iterator[None]:
    """They run, and tell what they report; stopped also if the test fails."""
    with ExitStack() as opened:
        for scheduler in schedulers:
            for name in EVENT_NAMES:
                scheduler.on(name, facts.note)
            opened.enter_context(scheduler)
        yield


@contextmanager
def instances(url: str, *jobs: str) -> Iterator[Facts]:
    """Two instances of one program, with jobs that are due every second."""
    facts = Facts()
    schedulers = [Scheduler(url, lease=2, heartbeat=0.3, jitter=0.1, stop_timeout=5) for _ in range(2)]
    for scheduler in schedulers:
        for job in jobs:
            scheduler.every(seconds=1, name=job)(lambda ctx: None)
    with started(facts, *schedulers):
        yield facts


def assert_each_slot_started_once(facts: Facts) -> None:
    slots = [event.slot for event in facts.events if event.name == "start" and event.attempt == 1]
    assert len(slots) == len(set(slots))


class Once(Schedule):
    """One slot, and none after it."""

    tz = timezone.utc

    def __init__(self, slot: datetime) -> None:
        object.__setattr__(self, "slot_ms", to_ms(slot))

    def next_ms(self, after_ms: int) -> int | None:
        return self.slot_ms if after_ms < self.slot_ms else None

    def latest_ms(self, at_ms: int) -> int | None:
        return self.slot_ms if at_ms >= self.slot_ms else None

    def count_ms(self, first_ms: int, last_ms: int, limit: int) -> int:
        return min(limit, int(first_ms <= self.slot_ms <= last_ms))

    def describe(self) -> str:
        return "once"


@pytest.fixture(params=LABELS)
def primary(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of each program, for one test."""
    with RedisServer(program=program(request.param)) as it:
        yield it


def test_jobs_go_on_after_a_sentinel_has_moved_them_to_the_replica(primary: RedisServer) -> None:
    """One store_error when trouble starts on each instance, one store_ok when it ends, and the next slots run."""
    with replica_of(primary), sentinel(primary) as watch:
        knows_replica(watch)
        with instances(f"redis+sentinel://127.0.0.1:{watch.port}/jobs/0", "tick") as facts:
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
    with instances(primary.url() + "?wait_replicas=1&wait_timeout=0.2", "tick") as facts:
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


def test_too_few_replicas_are_one_trouble_for_each_instance_and_runs_that_go_on_end_when_they_are_back(
    primary: RedisServer, link: Link
) -> None:
    """Heartbeats get through all the while, and end nothing. A run that ends meanwhile is recorded, and told when a
    replica has it.
    """
    facts, may_end = Facts(), threading.Event()
    schedulers = [
        Scheduler(primary.url() + "?wait_replicas=1&wait_timeout=0.2", lease=3, heartbeat=0.3, jitter=0.1)
        for _ in range(2)
    ]
    for scheduler in schedulers:
        scheduler.every(seconds=1, name="tick")(lambda ctx: None)
        scheduler.every(days=36_500, name="long")(lambda ctx: may_end.wait(30) and None)
    with started(facts, *schedulers), closing(RedisStore(primary.url())) as plain:
        facts.wait(lambda events: facts.count("success") >= 2)
        assert schedulers[0].run_now("long") == "won"
        facts.wait(lambda events: any(event.name == "start" and event.job == "long" for event in events))
        link.cut()
        facts.wait(lambda events: facts.count("store_error") >= 2)
        seen, (run,) = len(facts.events), plain.unfinished(["long"])
        for _ in range(5):  # heartbeats
            before_ms = to_ms(run.lease_end)
            wait_until(lambda known=before_ms: to_ms(plain.unfinished(["long"])[0].lease_end) > known, "a heartbeat")
            (run,) = plain.unfinished(["long"])
        may_end.set()
        wait_until(lambda: not plain.unfinished(["long"]), "the end to be recorded")
        waits = waited(primary)
        wait_until(lambda: waited(primary) > waits + 5, "more tries")
        assert facts.events[seen:] == []
        assert not any(scheduler.health().store_reachable for scheduler in schedulers)
        link.mend()
        facts.wait(lambda events: any(event.name == "success" and event.job == "long" for event in events))
        facts.wait(lambda events: facts.count("store_ok") >= 2)
        before = facts.count("success")
        facts.wait(lambda events: facts.count("success") >= before + 3)
    assert facts.count("store_error") == facts.count("store_ok") == 2
    assert facts.count("lost") == facts.count("failed") == 0
    assert_each_slot_started_once(Facts([event for event in facts.events if event.job == "tick"]))


def waited(server: RedisServer) -> int:
    """How often somebody has waited for replicas."""
    stats: dict[str, Any] = server.client().info("commandstats")
    return int(stats["cmdstat_wait"]["calls"])


@pytest.fixture
def link(primary: RedisServer) -> Iterator[Link]:
    """The primary's replica behind a proxy that can be cut."""
    with Link(primary) as it:
        yield it


def test_after_a_failover_that_lost_the_claim_its_runner_is_stopped_and_the_slot_may_run_again(
    primary: RedisServer, link: Link
) -> None:
    """The replica never heard of the run. Its runner's heartbeat is refused: `lost`, and its handler is told to stop.

    An instance that starts within the slot's lateness finds no state and runs it again, with a larger fence.
    """
    facts, fences, reasons = Facts(), [], []
    with ExitStack() as opened:
        address = opened.enter_context(Proxy(("127.0.0.1", primary.port)))
        url = f"redis://127.0.0.1:{address.port}"
        store = opened.enter_context(closing(RedisStore(url)))
        slot = store.now().replace(microsecond=0) + timedelta(seconds=1)

        def work(ctx: RunContext) -> None:
            fences.append(ctx.fence)
            if len(fences) == 1:
                try:
                    ctx.sleep(30)
                except Aborted as error:
                    reasons.append(error.reason)
                    raise

        def instance() -> None:
            scheduler = Scheduler(url, lease=5, heartbeat=0.3, jitter=0, stop_timeout=5)
            scheduler.add(work, Once(slot), name="job")
            opened.enter_context(started(facts, scheduler))

        instance()
        link.cut()
        facts.wait(lambda events: facts.count("start") == 1)
        primary.kill()
        link.replica.client().execute_command("REPLICAOF", "NO", "ONE")
        address.target = ("127.0.0.1", link.replica.port)
        address.reset_all()
        facts.wait(lambda events: facts.count("lost") == 1)
        instance()
        facts.wait(lambda events: facts.count("success") == 1)
        run = store.get("job", slot)
    lost, again = (next(event for event in facts.events if event.name == name) for name in ("lost", "success"))
    assert (lost.reason, lost.slot, reasons) == ("refused", slot, ["refused"])
    assert (again.slot, again.attempt) == (slot, 1)
    assert again.runner != lost.runner
    assert fences[0] < fences[1]
    assert run is not None
    assert (run.status, run.fence) == ("success", fences[1])


def test_a_job_whose_key_holds_another_type_stops_alone(primary: RedisServer) -> None:
    """One `store_error` (malformed) with its name on each instance; the jobs before and after it miss nothing."""
    primary.client().set(Keys("default").runs("bad"), "mine")
    with instances(primary.url(), "a", "bad", "b") as facts:
        facts.wait(lambda events: all(sum(e.job == job and e.name == "success" for e in events) >= 3 for job in "ab"))
        facts.wait(lambda events: facts.count("store_error") >= 2)
    errors = [event for event in facts.events if event.name == "store_error"]
    assert [(event.job, event.reason) for event in errors] == [("bad", "malformed")] * 2
    assert all("another type of value" in str(event.error) for event in errors)
    assert facts.count("store_ok") == facts.count("skip") == facts.count("failed") == 0
    assert {event.job for event in facts.events if event.name == "start"} == {"a", "b"}
