"""ctx.confirm and ctx.finish in a handler's own transaction on the store's PostgreSQL database.

In each isolation level, over psycopg and SQLAlchemy, and over connections that go elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fix_servers_postgres
import psycopg
import pytest
import sqlalchemy
from fix_sqlalchemy import transaction
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.orm import Session

from leaselib import Aborted, ConfigurationError, Event, Every, PostgresStore, RunContext, Scheduler
from leaselib.errors import StoreError

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

    def heartbeats(self, ctx: RunContext, number: int = 2) -> None:
        """Waits until so many more of the run's heartbeats have been stored."""
        asked = f"SELECT lease_end_ms FROM {self.schema}.runs"
        for _ in range(number):
            before = self.execute(asked)
            while self.execute(asked) == before:
                ctx.sleep(0.02)

    def insert(self, connection: psycopg.Connection[object]) -> None:
        """The effect."""
        connection.execute(f"INSERT INTO {self.schema}.effects VALUES ('x')".encode())

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


# ---- isolation levels ------------------------------------------------------------------------------------------------

STRICT = [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE]


def strict(bench: Bench, level: psycopg.IsolationLevel) -> psycopg.Connection[object]:
    """A connection whose transactions have that level."""
    connection = psycopg.connect(bench.base)
    connection.isolation_level = level
    return connection


@pytest.mark.parametrize("level", STRICT)
def test_in_a_strict_transaction_finish_first_then_the_effect_then_commit(
    bench: Bench, level: psycopg.IsolationLevel
) -> None:
    """Several heartbeats later effect and success are committed together, by the only attempt."""

    def handler(ctx: RunContext) -> None:
        bench.heartbeats(ctx)
        with strict(bench, level) as connection:
            ctx.finish(connection)
            ctx.sleep(1)
            bench.insert(connection)
            assert bench.execute(f"SELECT status FROM {bench.schema}.runs") == [("running",)]

    assert [event.name for event in bench.run(handler)] == ["success"]
    assert bench.effects() == 1
    assert [(run.status, run.attempt) for run in bench.store.runs("job")] == [("success", 1)]


@pytest.mark.parametrize("level", STRICT)
def test_in_a_strict_transaction_finish_first_and_a_rollback_record_nothing(
    bench: Bench, level: psycopg.IsolationLevel
) -> None:
    """Neither the success nor the effect."""

    def handler(ctx: RunContext) -> None:
        with strict(bench, level) as connection:
            ctx.finish(connection)
            bench.insert(connection)
            raise RuntimeError("rolled back")

    (event,) = bench.run(handler)
    assert (event.name, event.error) == ("failed", "RuntimeError: rolled back")
    assert bench.effects() == 0


@pytest.mark.parametrize("level", STRICT)
@pytest.mark.parametrize("first", ["the effect", "confirm"])
def test_in_a_strict_transaction_finish_after_a_heartbeat_fails_and_loses_nothing(
    bench: Bench, level: psycopg.IsolationLevel, first: str
) -> None:
    """With SerializationFailure: nothing is recorded, the attempt holds the run, and another transaction does it."""
    failures: list[str | None] = []

    def handler(ctx: RunContext) -> None:
        with strict(bench, level) as connection:
            if first == "confirm":
                ctx.confirm(connection)
            bench.insert(connection)
            bench.heartbeats(ctx)
            with pytest.raises(psycopg.errors.SerializationFailure) as raised:
                ctx.finish(connection)
            failures.append(raised.value.sqlstate)
            connection.rollback()
            assert bench.effects() == 0
            bench.heartbeats(ctx)
            ctx.finish(connection)
            bench.insert(connection)

    assert [event.name for event in bench.run(handler)] == ["success"]
    assert failures == ["40001"]
    assert bench.effects() == 1
    assert [(run.status, run.attempt) for run in bench.store.runs("job")] == [("success", 1)]


@pytest.mark.parametrize("level", STRICT)
def test_in_a_strict_transaction_a_failed_finish_is_a_failed_run_without_effect(
    bench: Bench, level: psycopg.IsolationLevel
) -> None:
    """If the handler lets the error through, as most do."""

    def handler(ctx: RunContext) -> None:
        with strict(bench, level) as connection:
            bench.insert(connection)
            bench.heartbeats(ctx)
            ctx.finish(connection)

    (event,) = bench.run(handler)
    assert event.name == "failed"
    assert event.error is not None
    assert event.error.startswith("SerializationFailure")
    assert bench.effects() == 0


@pytest.mark.parametrize("level", STRICT)
def test_in_a_strict_transaction_confirm_first_holds_the_run(bench: Bench, level: psycopg.IsolationLevel) -> None:
    """However many heartbeats there were before it; it holds none up, and nobody takes over."""
    outcomes: list[str] = []

    def handler(ctx: RunContext) -> None:
        bench.heartbeats(ctx)
        with strict(bench, level) as connection:
            ctx.confirm(connection)
            bench.heartbeats(ctx)
            bench.insert(connection)
            bench.execute(f"UPDATE {bench.schema}.runs SET lease_end_ms = 0")
            outcomes.append(bench.store.claim("job", ctx.slot, "other", "r", takeover_of=1).outcome)

    assert [event.name for event in bench.run(handler)] == ["success"]
    assert (bench.effects(), outcomes) == (1, ["running"])


@pytest.mark.parametrize("level", STRICT)
def test_in_a_strict_transaction_confirm_after_a_heartbeat_fails_and_loses_nothing(
    bench: Bench, level: psycopg.IsolationLevel
) -> None:
    """The same as for finish: roll back, and do it again."""

    def handler(ctx: RunContext) -> None:
        with strict(bench, level) as connection:
            bench.insert(connection)
            bench.heartbeats(ctx)
            with pytest.raises(psycopg.errors.SerializationFailure):
                ctx.confirm(connection)
            connection.rollback()
            ctx.confirm(connection)
            bench.insert(connection)

    assert [event.name for event in bench.run(handler)] == ["success"]
    assert bench.effects() == 1


@pytest.mark.parametrize("level", STRICT)
@pytest.mark.parametrize("name", ["confirm", "finish"])
@pytest.mark.parametrize("how", ["taken over", "released", "taken over and finished"])
def test_in_a_strict_transaction_a_run_that_is_lost_is_not_seen_as_it_was(
    bench: Bench, level: psycopg.IsolationLevel, name: str, how: str
) -> None:
    """The transaction's snapshot still shows the run as this attempt's; the server refuses, and a new one tells."""
    store = bench.store
    slot = store.now().replace(microsecond=0)
    call = store.confirm if name == "confirm" else store.finish_inside
    assert store.claim("other", slot, "t1", "r").outcome == "won"
    with strict(bench, level) as connection:
        assert connection.execute(f"SELECT token FROM {bench.schema}.runs".encode()).fetchall() == [("t1",)]
        assert store.heartbeat("other", slot, "t1", 30)
        assert store.release("other", slot, "t1")
        if how != "released":
            assert store.claim("other", slot, "t2", "r", takeover_of=1).outcome == "won"
            assert store.heartbeat("other", slot, "t2", 30)
        if how == "taken over and finished":
            assert store.finish("other", slot, "t2", "success")
        with pytest.raises(psycopg.errors.SerializationFailure):
            call(connection, "other", slot, "t1")
        connection.rollback()
        assert not call(connection, "other", slot, "t1")


@pytest.mark.parametrize("level", STRICT)
@pytest.mark.parametrize("name", ["confirm", "finish"])
def test_in_a_strict_transaction_a_takeover_of_a_dead_lease_is_seen(
    bench: Bench, level: psycopg.IsolationLevel, name: str
) -> None:
    """Without a release before it: the takeover alone is enough."""
    store = bench.store
    slot = store.now().replace(microsecond=0)
    call = store.confirm if name == "confirm" else store.finish_inside
    assert store.claim("other", slot, "t1", "r").outcome == "won"
    with strict(bench, level) as connection:
        assert len(connection.execute(f"SELECT * FROM {bench.schema}.runs".encode()).fetchall()) == 1
        bench.execute(f"UPDATE {bench.schema}.runs SET lease_end_ms = 0")
        assert store.claim("other", slot, "t2", "r", takeover_of=1).outcome == "won"
        with pytest.raises(psycopg.errors.SerializationFailure):
            call(connection, "other", slot, "t1")


def test_a_confirm_inside_a_savepoint_that_is_rolled_back_protects_nothing(bench: Bench) -> None:
    """The server lets the lock go with the savepoint, so that the run can be taken over; before it, it holds."""
    outcomes: list[str] = []

    def take_over(ctx: RunContext) -> str:
        bench.execute(f"UPDATE {bench.schema}.runs SET lease_end_ms = 0")
        return bench.store.claim("job", ctx.slot, "other", "r", takeover_of=1).outcome

    def handler(ctx: RunContext) -> None:
        with psycopg.connect(bench.base) as connection:
            bench.insert(connection)
            with connection.transaction() as savepoint:
                ctx.confirm(connection)
                outcomes.append(take_over(ctx))
                raise psycopg.Rollback(savepoint)
            outcomes.append(take_over(ctx))
            connection.rollback()

    assert [event.name for event in bench.run(handler)] == ["lost"]
    assert outcomes == ["running", "won"]


# ---- SQLAlchemy ------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(bench: Bench) -> Iterator[sqlalchemy.Engine]:
    """A SQLAlchemy engine on the store's database."""
    made = sqlalchemy.create_engine(bench.base.replace("postgresql://", "postgresql+psycopg://"))
    yield made
    made.dispose()


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
@pytest.mark.parametrize("way", ["engine.begin", "session", "connect"])
def test_sqlalchemy_connections_take_part(bench: Bench, engine: sqlalchemy.Engine, way: str, commit: bool) -> None:
    """An engine's, a Session's, and one that began by itself: effect and record together, or neither."""
    insert = sqlalchemy.text(f"INSERT INTO {bench.schema}.effects VALUES ('x')")

    def handler(ctx: RunContext) -> None:
        with transaction(engine, way) as connection:
            if way == "connect":
                connection.execute(insert)  # begins
            ctx.confirm(connection)
            connection.execute(insert)
            bench.heartbeats(ctx)
            ctx.finish(connection)
            if not commit:
                raise RuntimeError("rolled back")

    (event,) = bench.run(handler)
    assert (event.name, event.error) == (("success", None) if commit else ("failed", "RuntimeError: rolled back"))
    assert bench.effects() == commit * (2 if way == "connect" else 1)
    assert [run.status for run in bench.store.runs("job")] == [event.name]


def test_sqlalchemy_connections_that_will_not_do(bench: Bench, engine: sqlalchemy.Engine) -> None:
    """Without a transaction, in autocommit, a Session or an engine instead of a connection, and another driver's."""
    errors: list[str] = []

    def handler(ctx: RunContext) -> None:
        lite = sqlalchemy.create_engine("sqlite://")
        with engine.connect() as idle, Session(engine) as session, lite.begin() as other:
            auto = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            auto.execute(sqlalchemy.text("SELECT 1"))
            for connection in (idle, auto, session, engine, other):
                for call in (ctx.confirm, ctx.finish):
                    with pytest.raises(ConfigurationError) as raised:
                        call(connection)
                    errors.append(str(raised.value))
            auto.close()
        lite.dispose()

    assert [event.name for event in bench.run(handler)] == ["success"]
    for number, words in enumerate(["engine.begin()", "autocommit", *["session.connection()"] * 3]):
        assert words in errors[2 * number]
        assert words in errors[2 * number + 1]


# ---- connections that go elsewhere -----------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(bench: Bench) -> Iterator[str]:
    """The URL of another database on the same server."""
    name = f"elsewhere_{bench.schema}"
    bench.execute(f"CREATE DATABASE {name}")
    info = conninfo_to_dict(bench.base)
    yield f"postgresql://{info['user']}@{info['host']}:{info['port']}/{name}"
    bench.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("name", ["confirm", "finish"])
def test_a_connection_to_another_database_with_leaselibs_schema_is_told_apart(
    bench: Bench, elsewhere: str, name: str, used: bool
) -> None:
    """What is there, what was expected, what to do; and the run isn't lost: the right connection goes on with it."""
    other = PostgresStore(elsewhere, schema=bench.schema)
    other.create_schema()
    there = other.ping().epoch if used else "None"
    other.close()
    here = bench.store.ping().epoch
    errors: list[str] = []

    def handler(ctx: RunContext) -> None:
        with psycopg.connect(elsewhere) as connection:
            with pytest.raises(ConfigurationError) as raised:
                getattr(ctx, name)(connection)
            errors.append(str(raised.value))
        bench.heartbeats(ctx)
        with psycopg.connect(bench.base) as connection:
            bench.insert(connection)
            ctx.finish(connection)

    assert [event.name for event in bench.run(handler)] == ["success"]
    (message,) = errors
    for words in ("elsewhere_", f"epoch {there} there", f"{here} in this store's", "Use a connection to that one"):
        assert words in message


@pytest.mark.parametrize("name", ["confirm", "finish"])
def test_a_connection_to_a_database_without_leaselibs_schema_is_a_store_error(
    bench: Bench, elsewhere: str, name: str
) -> None:
    """As is one of a role without the grants."""
    errors: list[bool] = []

    def handler(ctx: RunContext) -> None:
        with (
            psycopg.connect(elsewhere) as connection,
            pytest.raises(StoreError, match="store's own database") as raised,
        ):
            getattr(ctx, name)(connection)
        errors.append(raised.value.transient)

    assert [event.name for event in bench.run(handler)] == ["success"]
    assert errors == [False]


@pytest.mark.parametrize("name", ["confirm", "finish"])
def test_a_run_that_is_lost_is_lost_though_the_store_cannot_be_asked_where_it_is(
    bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the connection is believed, which is safe."""

    def handler(ctx: RunContext) -> None:
        bench.execute(f"UPDATE {bench.schema}.runs SET token = 'other', attempt = 2")
        monkeypatch.setattr(bench.store, "ping", unreachable)
        with psycopg.connect(bench.base) as connection:
            bench.insert(connection)
            getattr(ctx, name)(connection)

    def unreachable(*, timeout: float) -> None:
        raise StoreError("no answer", transient=True)

    assert [event.name for event in bench.run(handler)] == ["lost"]
    assert bench.effects() == 0
