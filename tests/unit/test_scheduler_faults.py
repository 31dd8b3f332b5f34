"""What a tester broke once, and its kind: each of these held wrong, and holds now."""

from __future__ import annotations

import functools
import logging
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from leaselib import (
    ConfigurationError,
    Event,
    Every,
    MemoryStore,
    RunContext,
    Scheduler,
    SQLiteStore,
    StoreError,
    open_store,
)
from leaselib._claims import Failure
from leaselib._model import to_ms
from leaselib.stores._base import GivenBackError

RARELY = Every(days=300)


class Facts:
    """The events of a scheduler, to be waited for."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()
        for name in ("start", "success", "failed", "lost", "interrupted", "skip", "store_error", "stopped"):
            scheduler.on(name, self._note)

    def _note(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(self, *names: str, timeout: float = 10) -> Event:
        """The first event of these names."""

        def found() -> Event | None:
            return next((event for event in self.events if event.name in names), None)

        with self._changed:
            assert self._changed.wait_for(found, timeout), [event.name for event in self.events]
        event = found()
        assert event is not None
        return event


LEFT_OPEN = """
import gc, sqlite3, sys, threading
from leaselib import Every, Scheduler, SQLiteStore

gc.disable()
path, how = sys.argv[1:]

def bad(ctx):
    connection = sqlite3.connect(path, check_same_thread=False)
    connection.execute("CREATE TABLE t (x)")
    connection.execute("INSERT INTO t VALUES (1)")
    if how == "raises":
        raise ValueError("left open")

told, ended = [], threading.Event()
def note(event):
    told.append((event.name, event.error))
    ended.set()

scheduler = Scheduler(SQLiteStore(path), lease=3, heartbeat=0.5, catch_up=0)
for name in ("success", "failed", "lost"):
    scheduler.on(name, note)
scheduler.add(bad, Every(days=300))
with scheduler:
    assert scheduler.run_now("bad") == "won"
    ended.wait(40)
    print(told)
"""


@pytest.mark.system
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("how", "told"), [("raises", ("failed", "ValueError: left open")), ("returns", ("success", None))]
)
def test_an_end_is_recorded_though_the_handler_left_a_transaction_open_on_the_stores_own_file(
    tmp_path: Path, how: str, told: tuple[str, str | None]
) -> None:
    """The exception must not be kept: its frame holds the connection, and that the write lock.

    Nor is it enough that nobody can reach the connection: by chance the collector came by, or everybody waited for the
    lock as long as that program went on. In a program of its own, where it never comes by itself.
    """
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", LEFT_OPEN, str(tmp_path / "own.db"), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout.strip() == str([told]), done.stdout + done.stderr


@pytest.mark.parametrize("heartbeat", [0.4, 5])
def test_max_runtime_holds_whether_or_not_it_is_shorter_than_the_heartbeat(heartbeat: float) -> None:
    """The signal comes when the time is over, not with the next heartbeat."""
    scheduler = Scheduler(MemoryStore(), lease=30, heartbeat=heartbeat, max_runtime=0.3, catch_up=0)
    facts = Facts(scheduler)
    scheduler.add(lambda ctx: ctx.sleep(20), RARELY, name="long")
    with scheduler:
        scheduler.run_now("long")
        event = facts.wait("failed")
    assert event.duration is not None
    assert 0.3 <= event.duration < 1.5
    assert event.error is not None
    assert "max_runtime" in event.error


def test_start_during_a_stop_starts_afresh_once_that_is_over() -> None:
    """Also from a listener of `stopped`, which runs within the stop."""
    scheduler = Scheduler(MemoryStore(), catch_up=0)
    facts, running, go_on = Facts(scheduler), threading.Event(), threading.Event()

    def handler() -> None:
        running.set()
        go_on.wait(10)

    scheduler.add(handler, RARELY)
    scheduler.start()
    first = scheduler.runner
    scheduler.run_now("handler")
    assert running.wait(10)
    stopper = threading.Thread(target=scheduler.stop)
    stopper.start()
    while not scheduler._stopping:
        stopper.join(0.01)
    scheduler.start()
    go_on.set()
    stopper.join()
    facts.wait("stopped")
    assert scheduler.health().started
    assert scheduler.runner != first
    assert scheduler.run_now("handler") == "won"
    assert scheduler.stop()
    assert not scheduler.health().started


def finish(path: Path, ctx: RunContext, *, twice: bool = False) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    ctx.finish(connection)
    if twice:
        ctx.confirm(connection)
        ctx.finish(connection)
    connection.execute("COMMIT")
    connection.close()


@pytest.fixture
def own(tmp_path: Path) -> Any:
    store = SQLiteStore(tmp_path / "own.db")
    store.ping()
    yield store
    store.close()


def outcome(store: SQLiteStore, handler: Any) -> list[Event]:
    scheduler = Scheduler(store, lease=0.6, heartbeat=0.1, catch_up=0)
    facts = Facts(scheduler)
    scheduler.add(handler, RARELY, name="job")
    with scheduler:
        scheduler.run_now("job")
        facts.wait("success", "failed")
    return [event for event in facts.events if event.name not in ("start", "stopped")]


def test_a_handler_that_works_on_after_a_committed_finish_raises_no_alarm(own: SQLiteStore) -> None:
    """However long: nobody can start the run again."""

    def handler(ctx: RunContext) -> None:
        finish(Path(own.path), ctx)
        assert not ctx.signal.wait(1.5)
        ctx.check()

    assert [event.name for event in outcome(own, handler)] == ["success"]


def test_confirm_and_finish_after_finish_in_one_transaction_hold(own: SQLiteStore) -> None:
    """The run is over, and still this attempt's."""
    assert [e.name for e in outcome(own, lambda ctx: finish(Path(own.path), ctx, twice=True))] == ["success"]


def test_a_checkpoint_after_finish_is_refused_at_once(own: SQLiteStore) -> None:
    """Nobody would ever resume from it."""

    def handler(ctx: RunContext) -> None:
        finish(Path(own.path), ctx)
        with pytest.raises(ConfigurationError, match=r"ctx\.finish"):
            ctx.checkpoint(1, flush=True)

    assert [event.name for event in outcome(own, handler)] == ["success"]


def test_what_is_raised_after_a_committed_finish_is_logged_with_its_traceback(
    own: SQLiteStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The record is a success all the same."""

    def handler(ctx: RunContext) -> None:
        finish(Path(own.path), ctx)
        raise ValueError("afterwards")

    with caplog.at_level(logging.INFO, "leaselib"):
        (event,) = outcome(own, handler)
    assert (event.name, event.error) == ("success", "ValueError: afterwards")
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "in handler" in logging.Formatter().format(record)


def test_a_failure_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Though the exception itself isn't kept."""
    scheduler = Scheduler(MemoryStore(), catch_up=0)
    facts = Facts(scheduler)

    def culprit() -> None:
        raise RuntimeError("boom")

    scheduler.add(culprit, RARELY)
    with caplog.at_level(logging.INFO, "leaselib"), scheduler:
        scheduler.run_now("culprit")
        facts.wait("failed")
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    text = logging.Formatter().format(record)
    assert "in culprit" in text
    assert text.endswith("RuntimeError: boom")


def keyword_only(*, ctx: RunContext) -> None:
    assert isinstance(ctx, RunContext)


def optional_second(x: int = 1, ctx: RunContext | None = None) -> None:
    assert (x, type(ctx)) == (1, RunContext)


def optional_keyword(*, context: RunContext | None = None) -> None:
    assert isinstance(context, RunContext)


def any_name(anything: RunContext) -> None:
    assert isinstance(anything, RunContext)


def bound(number: int, ctx: RunContext) -> None:
    assert (number, type(ctx)) == (3, RunContext)


def nothing_of_ours(limit: int = 5) -> None:
    assert limit == 5


HANDLERS = [
    keyword_only,
    optional_second,
    optional_keyword,
    any_name,
    functools.partial(bound, 3),
    nothing_of_ours,
    lambda *args: any_name(*args),
]


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_function_is_given_the_context_where_it_asks_for_it(handler: Any) -> None:
    """By name, or as its only needed argument."""
    scheduler = Scheduler(MemoryStore(), catch_up=0)
    facts = Facts(scheduler)
    scheduler.add(handler, RARELY, name="job")
    with scheduler:
        scheduler.run_now("job")
        event = facts.wait("success", "failed")
    assert event.error is None


def test_claims_by_hand_in_a_row_all_win_though_they_come_within_a_millisecond() -> None:
    """Each has a slot of its own, later than the one before."""
    scheduler = Scheduler(MemoryStore(), catch_up=0, overlap="allow", max_workers=8)
    facts, ended = Facts(scheduler), threading.Semaphore(0)
    scheduler.on("success", lambda event: ended.release())
    scheduler.add(lambda: None, RARELY, name="job")
    with scheduler:
        for _ in range(100):
            assert scheduler.run_now("job") == "won"
            assert ended.acquire(timeout=10)
    slots = [event.slot for event in facts.events if event.name == "start"]
    assert len(set(slots)) == 100


def test_an_async_listener_is_refused() -> None:
    """Nobody would await it."""

    async def alarm(event: Event) -> None: ...

    with pytest.raises(ConfigurationError, match="async"):
        Scheduler(MemoryStore()).on("failed", alarm)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite:////tmp/a#b.db", "%23"),
        ("sqlite:///a.db?namespace=a&namespace=b", "twice"),
    ],
)
def test_a_url_of_which_a_part_would_be_ignored_is_refused(url: str, words: str) -> None:
    """Rather than another file or namespace be used."""
    with pytest.raises(ConfigurationError, match=words):
        open_store(url)


def test_a_url_as_the_path_of_a_sqlite_store_is_refused() -> None:
    """It would make a folder named `sqlite:`."""
    with pytest.raises(ConfigurationError, match="open_store"):
        SQLiteStore("sqlite:///jobs.db")


def test_more_workers_than_a_process_can_have_are_refused() -> None:
    """At once, with the bound."""
    with pytest.raises(ConfigurationError, match="4096"):
        Scheduler(MemoryStore(), max_workers=10**9)


def test_events_are_told_in_the_order_in_which_things_were_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the thread that was first is held up right after its decision: the last word on the store is true."""
    scheduler = Scheduler(MemoryStore())
    told: list[str] = []
    over, go_on, held = threading.Event(), threading.Event(), threading.Event()
    for name in ("store_error", "store_ok"):
        scheduler.on(name, lambda event: told.append(event.name))
    scheduler.on("stopped", lambda event: over.set())
    with scheduler:
        instance = scheduler._instance
        assert instance is not None
        flush = instance.events.flush

        def slow_flush() -> None:
            if threading.current_thread().name == "held up":
                held.set()
                go_on.wait(10)
            flush()

        monkeypatch.setattr(instance.events, "flush", slow_flush)
        failed = functools.partial(instance.planner.ping_failed, Failure("away"))
        thread = threading.Thread(target=instance.decide, args=(failed,), name="held up")
        thread.start()
        assert held.wait(10)
        pong = instance.store.ping()
        now_ms = to_ms(pong.now)
        instance.decide(lambda boot_ms: instance.planner.ponged(boot_ms, boot_ms, now_ms, pong.epoch))
        go_on.set()
        thread.join()
    assert over.wait(10)
    assert told == ["store_error", "store_ok"]


class Refusing(MemoryStore):
    """Takes no claim."""

    def __init__(self, error: StoreError) -> None:
        super().__init__()
        self.error = error

    def _claim(self, request: Any, timeout: float) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        StoreError("no right to write: grant it", transient=False),
        StoreError("away", transient=True),
        StoreError("its records are malformed", transient=False, job="job"),
        GivenBackError("won and ended as failed, but 0 of 1 replicas had it", None, ()),
    ],
    ids=["permanent", "transient", "job", "given back"],
)
def test_run_now_raises_what_the_store_said(error: StoreError) -> None:
    """With all that a caller could go by."""
    scheduler = Scheduler(Refusing(error))
    scheduler.add(lambda: None, RARELY, name="job")
    with scheduler, pytest.raises(StoreError, match="job 'job' was not run by hand: " + str(error)) as found:
        scheduler.run_now("job")
    for name in ("transient", "job", "unreplicated"):
        assert getattr(found.value, name) == getattr(error, name)
