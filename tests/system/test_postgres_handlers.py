"""ctx.confirm and ctx.finish in a handler's own transaction on the store's PostgreSQL database."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fix_servers_postgres
import psycopg
import pytest

from leaselib import Aborted, Event, Every, PostgresStore, RunContext, Scheduler

pytestmark = pytest.mark.system


class Bench:
    """A store, a table of effects beside it, and a job that is run by hand."""

    def __init__(self, url: str) -> None:
        self.store = PostgresStore.from_url(url)
        self.store.create_schema()
        self.base = fix_servers_postgres.session_url()
        self.schema = self.store.schema
        self.execute(f"CREATE TABLE {self.schema}.effects (slot text)")

    def execute(self, sql: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.base, autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    def run(self, handler: Callable[[RunContext], None]) -> list[Event]:
        events: list[Event] = []
        over = threading.Event()
        scheduler = Scheduler(self.store, lease=4, heartbeat=0.2, catch_up=0)
        for name in ("success", "failed", "lost", "interrupted"):
            scheduler.on(name, lambda event: (events.append(event), over.set()))
        scheduler.add(handler, Every(days=300), name="job")
        with scheduler:
            assert scheduler.run_now("job") == "won"
            assert over.wait(20)
        return events

    def effects(self) -> int:
        return len(self.execute(f"SELECT slot FROM {self.schema}.effects"))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with fix_servers_postgres.place(tmp_path) as url:
        made = Bench(url)
        yield made
        made.store.close()


@pytest.mark.parametrize("finish", [False, True])
def test_effect_and_success_are_committed_together(bench: Bench, finish: bool) -> None:
    """Heartbeats go on while a confirmed transaction is open for longer than several of them."""

    def handler(ctx: RunContext) -> None:
        with psycopg.connect(bench.base) as connection:
            ctx.confirm(connection)
            connection.execute(f"INSERT INTO {bench.schema}.effects VALUES (%s)".encode(), (str(ctx.slot),))
            ctx.sleep(1)
            if finish:
                ctx.finish(connection)

    assert [event.name for event in bench.run(handler)] == ["success"]
    assert bench.effects() == 1
    (run,) = bench.store.runs("job")
    assert (run.status, run.attempt) == ("success", 1)


def test_a_rollback_after_finish_records_neither_effect_nor_success(bench: Bench) -> None:
    """The failure counts."""

    def handler(ctx: RunContext) -> None:
        with psycopg.connect(bench.base) as connection:
            connection.execute(f"INSERT INTO {bench.schema}.effects VALUES ('x')".encode())
            ctx.finish(connection)
            raise RuntimeError("rolled back")

    assert [event.name for event in bench.run(handler)] == ["failed"]
    assert bench.effects() == 0


def test_an_exception_after_the_commit_leaves_the_success(bench: Bench) -> None:
    """Effect and record are there."""

    def handler(ctx: RunContext) -> None:
        with psycopg.connect(bench.base) as connection:
            connection.execute(f"INSERT INTO {bench.schema}.effects VALUES ('x')".encode())
            ctx.finish(connection)
        raise RuntimeError("afterwards")

    (event,) = bench.run(handler)
    assert (event.name, event.error) == ("success", "RuntimeError: afterwards")
    assert bench.effects() == 1


def test_confirm_raises_aborted_once_another_attempt_holds_the_run(bench: Bench) -> None:
    """And the effect is rolled back."""

    def handler(ctx: RunContext) -> None:
        bench.execute(f"UPDATE {bench.schema}.runs SET token = 'other', attempt = 2")
        with psycopg.connect(bench.base) as connection:
            connection.execute(f"INSERT INTO {bench.schema}.effects VALUES ('x')".encode())
            with pytest.raises(Aborted) as raised:
                ctx.confirm(connection)
            assert raised.value.reason == "refused"
            raise raised.value

    assert [event.name for event in bench.run(handler)] == ["lost"]
    assert bench.effects() == 0
