"""ctx.confirm and ctx.finish over SQLAlchemy connections to the store's own SQLite file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy
from fix_sqlalchemy import transaction
from sqlalchemy.orm import Session

from leaselib import ConfigurationError, Event, Every, RunContext, Scheduler, SQLiteStore

INSERT = sqlalchemy.text("INSERT INTO effects VALUES ('x')")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sqlalchemy.Engine]:
    """An engine on the store's file, with a table of effects in it."""
    made = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'jobs.db'}")
    with made.begin() as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE effects (x TEXT)"))
    yield made
    made.dispose()


def run(engine: sqlalchemy.Engine, handler: Callable[[RunContext], None]) -> tuple[Event, str, int]:
    """Runs a job once: its event, the status that is stored, and how many effects there are."""
    events: list[Event] = []
    over = threading.Event()
    with closing(SQLiteStore(str(engine.url.database))) as store:
        scheduler = Scheduler(store, catch_up=0)
        for name in ("success", "failed", "lost"):
            scheduler.on(name, lambda event: (events.append(event), over.set()))
        scheduler.add(handler, Every(days=300), name="job")
        with scheduler:
            assert scheduler.run_now("job") == "won"
            assert over.wait(20)
        (event,), (stored,) = events, store.runs("job")
    with engine.connect() as connection:
        effects = connection.execute(sqlalchemy.text("SELECT count(*) FROM effects")).scalar_one()
    return event, stored.status, effects


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
@pytest.mark.parametrize("way", ["engine.begin", "session"])
def test_effect_and_record_are_committed_together_or_not_at_all(
    engine: sqlalchemy.Engine, way: str, commit: bool
) -> None:
    """The effect comes first: with SQLite it is what begins the driver's transaction."""

    def handler(ctx: RunContext) -> None:
        with transaction(engine, way) as connection:
            connection.execute(INSERT)
            ctx.confirm(connection)
            ctx.finish(connection)
            if not commit:
                raise RuntimeError("rolled back")

    event, status, effects = run(engine, handler)
    assert (event.name, event.error) == (("success", None) if commit else ("failed", "RuntimeError: rolled back"))
    assert (status, effects) == (event.name, commit)


def test_what_holds_no_transaction_or_is_no_connection_is_refused(engine: sqlalchemy.Engine) -> None:
    """SQLAlchemy begins only in name before the first change; a Session and an engine are no connections."""
    errors: list[str] = []

    def handler(ctx: RunContext) -> None:
        with engine.begin() as connection, Session(engine) as session:
            for refused in (connection, session, engine):
                for call in (ctx.confirm, ctx.finish):
                    with pytest.raises(ConfigurationError) as raised:
                        call(refused)
                    errors.append(str(raised.value))

    event, status, effects = run(engine, handler)
    assert (event.name, status, effects) == ("success", "success", 0)
    for number, words in enumerate(["no transaction is open", "sqlite3.Connection", "sqlite3.Connection"]):
        assert words in errors[2 * number]
        assert words in errors[2 * number + 1]
