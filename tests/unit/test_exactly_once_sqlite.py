"""ctx.confirm and ctx.finish on the store's own SQLite file: effect and record commit together or not at all."""

from __future__ import annotations

import sqlite3
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from leaselib import Aborted, ConfigurationError, MemoryStore, RunContext, Scheduler, SQLiteStore
from leaselib._model import from_ms


class Bench:
    """A store, a file with an effects table, and a job that is run by hand with a handler of the test's."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "own.db"
        self.store = SQLiteStore(self.path)
        self.store.ping()
        with sqlite3.connect(self.path) as connection:
            connection.execute("CREATE TABLE effects (slot TEXT)")
        connection.close()

    def run(self, handler: Any, lease: float = 3) -> tuple[str, list[str]]:
        """Runs the handler once; returns how the run is recorded, and the names of the events about it."""
        names: list[str] = []
        over = threading.Event()
        scheduler = Scheduler(self.store, lease=lease, heartbeat=0.2, catch_up=0)
        for name in ("success", "failed", "lost", "interrupted"):
            scheduler.on(name, lambda event: (names.append(event.name), over.set()))
        scheduler.every(days=300, name="job")(handler)
        with scheduler:
            assert scheduler.run_now("job") == "won"
            assert over.wait(10)
        return self.store.runs("job")[0].status, names

    def effects(self) -> int:
        connection = sqlite3.connect(self.path)
        try:
            return int(connection.execute("SELECT count(*) FROM effects").fetchone()[0])
        finally:
            connection.close()

    def connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None)
        connection.row_factory = sqlite3.Row
        return connection


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    made = Bench(tmp_path)
    yield made
    made.store.close()


def effect(bench: Bench, ctx: RunContext, end: str, *, finish: bool) -> None:
    connection = bench.connect()
    try:
        connection.execute("BEGIN IMMEDIATE")
        ctx.confirm(connection)
        connection.execute("INSERT INTO effects VALUES (?)", (str(ctx.slot),))
        if finish:
            ctx.finish(connection)
        connection.execute(end)
    finally:
        connection.close()


@pytest.mark.parametrize("finish", [False, True])
def test_effect_and_success_are_committed_together(bench: Bench, finish: bool) -> None:
    status, names = bench.run(lambda ctx: effect(bench, ctx, "COMMIT", finish=finish))
    assert (status, names, bench.effects()) == ("success", ["success"], 1)


def test_a_handler_that_raises_after_its_commit_is_a_success_because_the_record_says_so(bench: Bench) -> None:
    def handler(ctx: RunContext) -> None:
        effect(bench, ctx, "COMMIT", finish=True)
        raise RuntimeError("too late to matter")

    assert bench.run(handler) == ("success", ["success"])
    assert bench.effects() == 1


def test_a_rolled_back_finish_records_nothing_and_the_failure_counts(bench: Bench) -> None:
    def handler(ctx: RunContext) -> None:
        effect(bench, ctx, "ROLLBACK", finish=True)
        raise RuntimeError("rolled back")

    assert bench.run(handler) == ("failed", ["failed"])
    assert bench.effects() == 0


@pytest.mark.parametrize("end", ["ROLLBACK", "SELECT 1"])
def test_a_handler_that_returns_after_a_finish_that_was_not_committed_has_failed(bench: Bench, end: str) -> None:
    """Rolled back, or closed without a COMMIT: the effect is gone, so the run must not be recorded as a success."""
    status, names = bench.run(lambda ctx: effect(bench, ctx, end, finish=True))
    assert (status, names, bench.effects()) == ("failed", ["failed"], 0)
    error = bench.store.runs("job")[0].error
    assert error is not None
    assert "was not committed" in error


@pytest.mark.parametrize("last", ["raise", "return"])
def test_a_confirm_after_a_finish_that_was_rolled_back_records_nothing(bench: Bench, last: str) -> None:
    """As in a loop that tries its transaction again: only a finish that is committed makes a success."""

    def handler(ctx: RunContext) -> None:
        effect(bench, ctx, "ROLLBACK", finish=True)
        effect(bench, ctx, "COMMIT", finish=False)
        if last == "raise":
            raise RuntimeError("after the effect")

    wanted = "failed" if last == "raise" else "success"
    assert bench.run(handler) == (wanted, [wanted])
    assert bench.effects() == 1


def test_a_finish_that_is_tried_again_after_a_rollback_is_one_success(bench: Bench) -> None:
    def handler(ctx: RunContext) -> None:
        effect(bench, ctx, "ROLLBACK", finish=True)
        effect(bench, ctx, "COMMIT", finish=True)

    assert bench.run(handler) == ("success", ["success"])
    assert bench.effects() == 1


def test_a_run_whose_finish_was_rolled_back_is_kept_by_heartbeats(bench: Bench) -> None:
    """Else its lease would end, and another attempt begin beside it, while its own checks still pass."""
    ends: list[datetime] = []

    def handler(ctx: RunContext) -> None:
        effect(bench, ctx, "ROLLBACK", finish=True)
        first = bench.store.runs("job")[0].lease_end
        while len(ends) < 2:
            ctx.check()
            run = bench.store.runs("job")[0]
            if run.lease_end > (ends or [first])[-1]:
                ends.append(run.lease_end)
            assert bench.store.ping().now < run.lease_end, "the lease ended while its runner's checks passed"
            ctx.sleep(0.01)

    assert bench.run(handler) == ("success", ["success"])


def test_after_a_committed_finish_the_handler_may_go_on_past_the_lease(bench: Bench) -> None:
    """The record is there: no heartbeat is needed, and nothing stops the handler."""

    def handler(ctx: RunContext) -> None:
        effect(bench, ctx, "COMMIT", finish=True)
        run = bench.store.runs("job")[0]
        while bench.store.ping().now < run.lease_end + timedelta(seconds=0.3):
            ctx.sleep(0.01)

    assert bench.run(handler, lease=1) == ("success", ["success"])


def test_confirm_raises_aborted_once_another_attempt_holds_the_run(bench: Bench) -> None:
    raised: list[BaseException] = []

    def handler(ctx: RunContext) -> None:
        connection = bench.connect()
        connection.execute("UPDATE leaselib_runs SET token = 'other', attempt = 2")
        connection.execute("BEGIN IMMEDIATE")
        try:
            ctx.confirm(connection)
        except Aborted as error:
            raised.append(error)
            raise
        finally:
            connection.execute("ROLLBACK")
            connection.close()

    assert bench.run(handler) == ("running", ["lost"])
    assert [error.reason for error in raised if isinstance(error, Aborted)] == ["refused"]


def test_while_the_transaction_is_open_nobody_takes_the_run_over(bench: Bench) -> None:
    slot = from_ms(int(datetime.now(timezone.utc).timestamp() * 1000))
    assert bench.store.claim("job", slot, "t1", "r1", lease=0.05).outcome == "won"
    connection = bench.connect()
    connection.execute("BEGIN IMMEDIATE")
    assert bench.store.confirm(connection, "job", slot, "t1")
    outcomes: list[str] = []
    taker = threading.Thread(
        target=lambda: outcomes.append(bench.store.claim("job", slot, "t2", "r2", takeover_of=1).outcome)
    )
    taker.start()
    taker.join(0.5)
    assert not outcomes, "the takeover must wait for the transaction"
    assert bench.store.finish_inside(connection, "job", slot, "t1")
    connection.execute("COMMIT")
    taker.join()
    assert outcomes == ["finished"]
    connection.close()


def test_what_can_not_hold_a_run_is_refused_with_what_to_do(bench: Bench, tmp_path: Path) -> None:
    slot = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=1)
    other = sqlite3.connect(tmp_path / "other.db", isolation_level=None)
    own = bench.connect()
    with pytest.raises(ConfigurationError, match="BEGIN IMMEDIATE"):
        bench.store.confirm(own, "job", slot, "t")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ConfigurationError, match=r"other\.db"):
        bench.store.confirm(other, "job", slot, "t")
    with pytest.raises(ConfigurationError, match=r"sqlite3\.Connection"):
        bench.store.confirm("no connection", "job", slot, "t")
    with pytest.raises(ConfigurationError, match=r"ctx\.fence"):
        MemoryStore().confirm(own, "job", slot, "t")
    other.close()
    own.close()
