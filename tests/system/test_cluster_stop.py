"""stop(): from wherever it is called, however often, whatever handlers, listeners and the store do meanwhile.

In this process; what a stop does to runs and to the end of a process is in `test_cluster_handover` and `test_exit`.
"""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import BEAT_S, OPTIONS, SLACK_S, Recorder, due_in, sqlite, until

from leaselib import Aborted, Every, RunContext, Scheduler, StoreError

pytestmark = pytest.mark.timeout(30)

CALL_S = OPTIONS["lease"] / 3
"""A store call's time-out, at most."""


@pytest.fixture
def scheduler(cluster_url: str) -> Iterator[Scheduler]:
    """A scheduler that isn't started; stopped after the test."""
    it = Scheduler(cluster_url, **OPTIONS)
    yield it
    it.stop(5)
    it.store.close()


def stop_in_thread(scheduler: Scheduler, results: list[Any], timeout: float | None = None) -> threading.Thread:
    """Calls stop() in a thread of its own; what it returned or raised goes to `results`."""

    def call() -> None:
        try:
            results.append(scheduler.stop(timeout))
        except BaseException as error:  # the test looks at it
            results.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread


class HeartbeatCount:
    """Counts the heartbeats that a scheduler sends to its store."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.sent = 0
        self._heartbeat = scheduler.store.heartbeat
        scheduler.store.heartbeat = self._count  # type: ignore[method-assign]

    def _count(self, *args: Any, **kwargs: Any) -> Any:
        self.sent += 1
        return self._heartbeat(*args, **kwargs)


def threads_of(scheduler: Scheduler, runner: str) -> list[str]:
    """The names of that instance's threads."""
    return [t.name for t in threading.enumerate() if t.name.startswith(f"leaselib-{runner}-")]


def test_stop_from_a_handler_does_not_wait_for_that_handler(scheduler: Scheduler) -> None:
    """It returns to the handler, which goes on to its end; its return is then a success."""
    recorder = Recorder(scheduler)
    results: list[Any] = []
    contexts: list[RunContext] = []

    def work(ctx: RunContext) -> None:
        contexts.append(ctx)
        began = time.monotonic()
        results.append(scheduler.stop())
        results.append(time.monotonic() - began)
        results.append(ctx.abort_reason)

    scheduler.add(work, Every(due_in(0.1) / 1000))
    scheduler.start()
    recorder.wait("stopped")
    until(lambda: len(results) == 3, "stop() returned in the handler")
    assert results[0] is True
    assert results[1] < SLACK_S
    assert results[2] == "stopping"

    def status() -> str:
        run = scheduler.store.get("work", contexts[0].slot)
        return "" if run is None else run.status

    until(lambda: status() == "success", "the handler's return is recorded")
    assert not scheduler.health().started


def test_stop_from_a_handler_waits_for_the_others(scheduler: Scheduler) -> None:
    """And a stop from outside, meanwhile, returns the same."""
    recorder = Recorder(scheduler)
    stopper, other, told = threading.Event(), threading.Event(), threading.Event()
    results: list[Any] = []

    def deaf(ctx: RunContext) -> None:
        ctx.signal.wait(10)
        told.set()
        other.wait(10)

    def work() -> None:
        stopper.wait(5)
        results.append(scheduler.stop(3))

    due = Every(due_in(0.1) / 1000)
    scheduler.add(deaf, due)
    scheduler.add(work, due)
    scheduler.start()
    recorder.wait("start", count=2)
    stopper.set()
    assert told.wait(5)
    outside: list[Any] = []
    thread = stop_in_thread(scheduler, outside)
    assert not results, "it waits for the other handler"
    other.set()
    thread.join(5)
    until(lambda: results, "stop() returned in the handler")
    assert (results, outside) == ([True], [True])


def test_stop_from_a_listener_ends_the_instance(scheduler: Scheduler) -> None:
    """No deadlock, no error, and every handler is told."""
    results: list[Any] = []
    ended = threading.Event()

    def work(ctx: RunContext) -> None:
        try:
            ctx.sleep(10)
        except Aborted:
            ended.set()
            raise

    scheduler.on("start", lambda event: results.append(scheduler.stop()))
    recorder = Recorder(scheduler)
    scheduler.add(work, Every(due_in(0.1) / 1000))
    runner = scheduler.start().runner
    assert runner is not None
    until(lambda: results, "stop() returned in the listener")
    assert results == [True]
    assert ended.is_set()
    assert recorder.wait("interrupted").handed_over
    recorder.wait("stopped")
    until(lambda: not threads_of(scheduler, runner), "its threads have ended")


@pytest.mark.parametrize("in_time", [True, False])
def test_two_stops_at_once_return_the_same(scheduler: Scheduler, in_time: bool) -> None:
    """Whether the handler ended in time or not."""
    recorder = Recorder(scheduler)
    release, told = threading.Event(), threading.Event()

    def work(ctx: RunContext) -> None:
        ctx.signal.wait(10)
        told.set()
        release.wait(10)

    scheduler.add(work, Every(due_in(0.1) / 1000))
    scheduler.start()
    recorder.wait("start")
    results: list[Any] = []
    threads = [stop_in_thread(scheduler, results, 0.6) for _ in range(3)]
    assert told.wait(5)
    if in_time:
        release.set()
    for thread in threads:
        thread.join(10)
    release.set()
    assert results == [in_time] * 3
    assert len(recorder.events("stopped")) == 1
    assert scheduler.stop() is in_time, "once more, when all is over"


def test_a_handler_that_is_stuck_makes_stop_return_false_after_its_timeout(scheduler: Scheduler) -> None:
    """Its heartbeats end then, so that others take over; the finish that it sends in the end still counts if not."""
    recorder = Recorder(scheduler)
    release = threading.Event()
    slots: list[Any] = []

    def stuck(ctx: RunContext) -> None:
        slots.append(ctx.slot)
        release.wait(20)

    scheduler.add(stuck, Every(due_in(0.1) / 1000), lease=3)
    heartbeats = HeartbeatCount(scheduler)
    scheduler.start()
    recorder.wait("start")
    began = time.monotonic()
    assert scheduler.stop(0.5) is False
    assert 0.5 <= time.monotonic() - began < 0.5 + SLACK_S
    assert (sent := heartbeats.sent) >= 2
    threading.Event().wait(4 * BEAT_S)  # time in which heartbeats would come
    assert heartbeats.sent <= sent + 1, "but for one that was decided just before stop() gave up"
    release.set()

    def status() -> str:
        return scheduler.store.get("stuck", slots[0]).status  # type: ignore[union-attr]

    until(lambda: status() == "success", "the finish that came after stop() counts")


def test_a_stopped_scheduler_can_be_started_again(scheduler: Scheduler) -> None:
    """With a new name and the same jobs; also by `with`, and stop() of one that was never started is True."""
    recorder = Recorder(scheduler)
    assert scheduler.stop() is True
    scheduler.add(lambda: None, Every(0.1), name="tick")
    runners = []
    for _ in range(3):
        with scheduler as same:
            assert same is scheduler
            assert scheduler.start() is scheduler, "idempotent"
            runners.append(scheduler.runner)
            recorder.wait("success", runner=scheduler.runner)
        assert scheduler.runner is None
        assert scheduler.stop() is True
    assert len(set(runners)) == 3
    assert len(recorder.events("stopped")) == 3
    slots = [e.slot for e in recorder.events("start")]
    assert len(set(slots)) == len(slots)


def test_nothing_is_claimed_or_renewed_after_stop_returned(scheduler: Scheduler) -> None:
    """From the call of stop() on no claim leaves, and after its return no operation at all."""
    calls: list[tuple[float, str]] = []
    for name in ("claim", "heartbeat", "finish", "release", "ping", "unfinished"):
        operation = getattr(scheduler.store, name)

        def call(*args: Any, _operation: Any = operation, _name: str = name, **kwargs: Any) -> Any:
            calls.append((time.monotonic(), _name))
            return _operation(*args, **kwargs)

        setattr(scheduler.store, name, call)
    recorder = Recorder(scheduler)
    for n in range(10):
        scheduler.add(lambda: None, Every(0.05), name=f"tick{n}")
    scheduler.start()
    recorder.wait("success", count=30)
    began = time.monotonic()
    assert scheduler.stop()
    ended = time.monotonic()
    threading.Event().wait(0.4)  # time in which eighty slots are due
    # A claim that had passed its last look when stop() was called may still be on its way to the store.
    assert not [call for call in calls if call[1] == "claim" and call[0] > began + 0.1]
    assert not [call for call in calls if call[0] > ended]
    assert len([call for call in calls if call[1] == "claim"]) >= 30


@contextlib.contextmanager
def frozen(path: Path) -> Iterator[None]:
    """Another program holds the file's write lock."""
    program = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None); db.execute('BEGIN IMMEDIATE'); "
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    try:
        assert holder.stdout.readline() == "held\n"
        yield
    finally:
        holder.stdin.close()
        holder.wait(10)
        holder.stdout.close()


@pytest.mark.system
def test_stop_does_not_wait_for_a_store_that_is_frozen(tmp_path: Path) -> None:
    """It returns within its time-out and one call's; what became of the run isn't known: `lost`, not `success`."""
    with sqlite(tmp_path) as url:
        scheduler = Scheduler(url, **OPTIONS)
    recorder = Recorder(scheduler)
    scheduler.add(lambda ctx: ctx.sleep(10), Every(due_in(0.1) / 1000), name="raises")
    scheduler.add(lambda ctx: ctx.signal.wait(10) and None, Every(due_in(0.1) / 1000), name="returns")
    scheduler.add(lambda: None, Every(0.1), name="tick")
    scheduler.start()
    for name in ("raises", "returns"):
        recorder.wait("start", job=name)
    with frozen(tmp_path / "leases.db"):
        recorder.wait("store_error")
        began = time.monotonic()
        scheduler.stop(1)
        took = time.monotonic() - began
        assert took < 1 + 2 + CALL_S + SLACK_S, took  # 2 s more for words that are on their way
        for name in ("raises", "returns"):
            assert recorder.wait("lost", job=name).reason == "unreachable"
    assert not recorder.events("success", job="returns")
    for name in ("raises", "returns"):
        run = scheduler.store.runs(name)[0]
        assert (run.status, run.released) == ("running", False)
    scheduler.store.close()


@pytest.mark.system
def test_handlers_are_told_when_the_store_freezes_and_it_is_told_about_once(tmp_path: Path) -> None:
    """By default before the lease can be over, with `continue` not at all; one store_error, and one store_ok."""
    with sqlite(tmp_path) as url:
        scheduler = Scheduler(url, **OPTIONS)
    recorder = Recorder(scheduler)
    told: dict[str, float] = {}
    go_on = threading.Event()

    def aborts(ctx: RunContext) -> None:
        ctx.signal.wait(10)
        told[f"aborts {ctx.abort_reason}"] = time.monotonic()
        ctx.check()

    def continues(ctx: RunContext) -> None:
        go_on.wait(10)
        told[f"continues {ctx.abort_reason}"] = time.monotonic()

    due = Every(due_in(0.1) / 1000)
    scheduler.add(aborts, due)
    scheduler.add(continues, due, on_store_loss="continue")
    with scheduler:
        for name in ("aborts", "continues"):
            recorder.wait("start", job=name)
        database = sqlite3.connect(tmp_path / "leases.db", isolation_level=None)
        database.execute("BEGIN IMMEDIATE")
        froze = time.monotonic()
        try:
            recorder.wait("lost", job="aborts", reason="unreachable")
            health = scheduler.health()
            assert not health.store_reachable
            assert health.store_unreachable_for > 0
            assert health.store_error
            recorder.wait("store_error", job="continues", reason="unreachable")
            threading.Event().wait(0.5)  # several heartbeats and pings fail meanwhile
        finally:
            database.execute("ROLLBACK")
            database.close()
        recorder.wait("store_ok")
        go_on.set()
        # Nobody took it over: the heartbeat that gets through counts, and so does the success.
        recorder.wait("success", job="continues")
        assert scheduler.health().store_reachable
    at = told["aborts unreachable"]
    # The last heartbeat was sent up to one interval (and a call) before the freeze; then lease - heartbeat.
    assert OPTIONS["lease"] - 2 * BEAT_S - 0.2 < at - froze < OPTIONS["lease"] - BEAT_S + 0.25 + 0.3
    assert "continues None" in told
    assert len([e for e in recorder.events("store_error") if e.job is None]) == 1
    assert len(recorder.events("store_ok")) == 1
    scheduler.store.close()


def test_run_now_after_stop_is_refused(scheduler: Scheduler) -> None:
    """With what to do instead."""
    scheduler.add(lambda: None, Every(60), name="job")
    scheduler.start()
    scheduler.stop()
    with pytest.raises(Exception, match=r"start\(\) first"):
        scheduler.run_now("job")


@pytest.mark.system
def test_a_scheduler_starts_at_once_while_its_store_is_away_and_works_when_it_comes(tmp_path: Path) -> None:
    """start() doesn't wait; one store_error, one store_ok, then the jobs."""
    with sqlite(tmp_path) as url:
        scheduler = Scheduler(url, **OPTIONS)
    scheduler.store.ping()  # makes the file
    recorder = Recorder(scheduler)
    scheduler.add(lambda: None, Every(0.1), name="tick")
    with frozen(tmp_path / "leases.db"):
        began = time.monotonic()
        scheduler.start()
        assert time.monotonic() - began < SLACK_S
        recorder.wait("store_error")
        with pytest.raises(StoreError):
            scheduler.run_now("tick")
    recorder.wait("success")
    recorder.wait("store_ok")
    scheduler.stop()
    assert len(recorder.events("store_error")) == 1
    scheduler.store.close()
