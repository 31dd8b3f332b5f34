"""PostgresStore on each major version of PostgreSQL that this machine has, such as Debian's and a wheel's."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest
from fix_servers_postgres import PostgresServer, majors, need_binaries, postgres_server, wait_until

from leaselib.stores._postgres import PostgresStore
from leaselib.stores._postgres_schema import schema_sql

pytestmark = pytest.mark.system
MAJORS = majors()


@pytest.fixture(scope="module", params=list(MAJORS) or ["no-server"])
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A server of each version; on a machine without any, a failure that says what to install."""
    with postgres_server(binaries=MAJORS.get(request.param) or need_binaries()) as own:
        assert own.sql("SHOW server_version")[0][0].startswith(f"{request.param}.")
        yield own


def test_every_operation_works_on_this_version(server: PostgresServer) -> None:
    """From the schema's creation to the purge, with a takeover, a hand-over, an overlap and a confirmed transaction."""
    store = PostgresStore(server.url())
    store.create_schema()
    server.sql("CREATE TABLE effects (token text)")
    slot = store.now().replace(microsecond=0)
    assert store.claim("é", slot, "t1", "r1", lease=0.2).outcome == "won"
    assert store.heartbeat("é", slot, "t1", 0.2, '{"at": 1}')
    assert store.claim("é", slot, "t2", "r2", takeover_of=1).outcome in ("running", "won")
    wait_until(lambda: store.claim("é", slot, "t2", "r2", takeover_of=1).outcome == "won", "the takeover")
    assert not store.heartbeat("é", slot, "t1", 30)
    assert not store.finish("é", slot, "t1", "success")
    assert store.release("é", slot, "t2")
    third = store.claim("é", slot, "t3", "r1", takeover_of=2)
    assert (third.outcome, third.run.reason, third.run.checkpoint) == ("won", "hand-over", {"at": 1})  # type: ignore[union-attr]
    assert store.claim("é", slot + timedelta(milliseconds=500), "t4", "r2").outcome == "overlap"
    with psycopg.connect(server.url()) as own:
        assert not store.confirm(own, "é", slot, "t2")
        assert store.confirm(own, "é", slot, "t3")
        assert store.heartbeat("é", slot, "t3", 30)
        assert store.claim("é", slot, "t4", "r2", takeover_of=3).outcome == "running"
        own.execute("INSERT INTO effects VALUES ('t3')")
        assert store.finish_inside(own, "é", slot, "t3")
    (run,) = store.runs("é")
    assert (run.status, run.attempt, store.get("é", slot)) == ("success", 3, run)
    assert [past.outcome for past in run.attempts] == ["expired", "handed-over", "success"]
    assert server.sql("SELECT token FROM effects") == [("t3",)]
    assert store.claim("other", slot, "t5", "r").outcome == "won"
    assert [found.job for found in store.unfinished(["é", "other"])] == ["other"]
    assert store.finish("other", slot, "t5", "failed", "no disk ☃")
    assert store.get("other", slot).error == "no disk ☃"  # type: ignore[union-attr]
    assert store.jobs() == ["other", "é"]
    assert (store.purge("é"), store.runs("é")) == (1, [])
    assert store.claim("é", slot, "t6", "r").outcome == "superseded"
    store.close()


def test_the_administrators_script_runs_on_this_version(server: PostgresServer) -> None:
    """Twice, as at an upgrade."""
    with server.admin() as connection:
        for _ in range(2):
            connection.execute(schema_sql("by_dba").encode())
    store = PostgresStore(server.url(), schema="by_dba", create=False)
    assert store.claim("job", store.now().replace(microsecond=0), "t", "r").outcome == "won"
    store.close()
