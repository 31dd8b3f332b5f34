"""The audit sees every decision of a real store, and what somebody changes by hand is reported under its name."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

import leaselib
from leaselib.stores import _redis_codec

from . import History, JobProfile, audit, check

JOB = "job"
PROFILE = JobProfile("skip", max_attempts=3, fewest_attempts=3, late_ms=300_000, keep_ms=0, history_size=0)


class Audited:
    """A store in use, its audit, and a way to change its tables by hand."""

    def __init__(self, url: str, runs: str, execute: Callable[[str], object]) -> None:
        self.store = leaselib.open_store(url)
        self.store.ping()  # makes SQLite's tables
        found = audit.attach(url)
        assert found is not None
        self.audit, self._runs, self._execute = found, runs, execute
        self.first = self.store.now() - timedelta(seconds=200)

    def slot(self, number: int = 0) -> datetime:
        """The job's slots."""
        return self.first + timedelta(seconds=number)

    def claim(self, number: int = 0, *, lease: float = 30, **options: object) -> str:
        """Claims a run; returns the token."""
        token = secrets.token_hex(8)
        given: dict[str, object] = {"max_late": 300, **options}
        answer = self.store.claim(JOB, self.slot(number), token, "r", lease=lease, **given)  # type: ignore[arg-type]
        assert answer.outcome == "won"
        return token

    def change(self, assignments: str) -> None:
        """UPDATE of the one run, by hand."""
        self._execute(f"UPDATE {self._runs} SET {assignments}")

    def copy(self, shift_ms: int, changes: str = "") -> None:
        """INSERT of a copy of the one run, whose slot is that much later, with a token and a fence of its own."""
        columns = (*(("job_id",) if "leaselib_runs" in self._runs else ("namespace", "job")), *audit.COLUMNS)
        values = {name: name for name in columns}
        values |= {"slot_ms": f"slot_ms + {shift_ms}", "token": "'copy'", "fence": "fence + 1"}
        values |= dict(part.split(" = ", 1) for part in changes.split("; ") if part)
        chosen = ", ".join(values[name] for name in columns)
        self._execute(f"INSERT INTO {self._runs} ({', '.join(columns)}) SELECT {chosen} FROM {self._runs}")

    def replace_text(self, old: str, new: str) -> None:
        """By a script: in the record of the one run in Redis."""
        self._execute(
            f"""local key = 'leaselib:{{default:{JOB}}}:runs'
            for _, field in ipairs(redis.call('HKEYS', key)) do
              if string.match(field, '^%d+$') then
                local changed = string.gsub(redis.call('HGET', key, field), '{old}', '{new}')
                redis.call('HSET', key, field, changed)
              end
            end"""
        )

    def remove(self) -> None:
        """DELETE of all runs."""
        self._execute(f"DELETE FROM {self._runs}")

    def history(self) -> History:
        """What was decided so far."""
        return History(audit.decisions(self.audit.changes(), {JOB: PROFILE}))


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    """A server that is this module's own."""
    from fix_servers_postgres import postgres_server

    with postgres_server() as server:
        yield server.url()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.system)])
def audited(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Audited]:
    """An empty store that is audited."""
    if request.param == "sqlite":
        path = tmp_path / "leases.db"

        def execute(statement: str) -> None:
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
                database.execute(statement)

        made = Audited(f"sqlite:///{path}", "leaselib_runs", execute)
    else:
        made = _on_postgres(request.getfixturevalue("postgres_url"))
    yield made
    made.store.close()


def _on_postgres(url: str) -> Audited:
    import psycopg

    with contextlib.closing(leaselib.open_store(url)) as store:
        store.create_schema()  # type: ignore[attr-defined]

    def execute(statement: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement.encode())

    execute("DROP SCHEMA IF EXISTS audit CASCADE")
    execute("TRUNCATE leaselib.runs, leaselib.jobs")
    return Audited(url, "leaselib.runs", execute)


@pytest.fixture
def audited_redis(monkeypatch: pytest.MonkeyPatch) -> Iterator[Audited]:
    """An empty Redis whose scripts note what they do."""
    import redis
    from fix_servers_redis import RedisServer

    def script(name: str) -> _redis_codec.Script:
        text = audit.RedisAudit.script.encode() + _redis_codec.script(name).text
        return _redis_codec.Script(name, text, hashlib.sha1(text, usedforsecurity=False).hexdigest())

    monkeypatch.setattr("leaselib.stores._redis.script", script)
    with RedisServer() as server, contextlib.closing(redis.Redis.from_url(server.url())) as client:
        made = Audited(server.url(), "", lambda lua: client.eval(audit.RedisAudit.script + lua, 0))
        yield made
        made.store.close()


def test_a_stores_own_decisions_are_read_in_order_and_pass(audited: Audited) -> None:
    """Starts, renewals, a checkpoint, a hand-over, a takeover, a run that is replaced, ends, trimming, a purge."""
    decide_and_compare(audited)


@pytest.mark.system
def test_the_decisions_of_redis_are_read_in_order_and_pass(audited_redis: Audited) -> None:
    """The same."""
    decide_and_compare(audited_redis)


@pytest.mark.system
def test_what_a_script_changes_in_redis_is_reported(audited_redis: Audited) -> None:
    """A fence that is lowered, an ended run that ends otherwise."""
    it = audited_redis
    token = it.claim()
    assert check(it.history()) == []
    it.replace_text('"fence":', '"fence":1,"was":')
    assert {violation.id for violation in check(it.history())} == {"S20"}
    it.replace_text('"fence":1,"was":', '"fence":')
    assert it.store.finish(JOB, it.slot(), token, "success")
    before = check(it.history())
    it.replace_text("success", "failed")
    assert "S6" in {violation.id for violation in check(it.history())[len(before) :]}


def decide_and_compare(it: Audited) -> None:
    """Uses the store, and compares what the audit saw."""
    store = it.store
    first = it.claim(0)
    assert store.heartbeat(JOB, it.slot(0), first, 30, "1")
    assert store.release(JOB, it.slot(0), first, "2")
    second = it.claim(0, lease=0.01, takeover_of=1)
    assert not store.heartbeat(JOB, it.slot(0), first, 30)
    third = _until_won(it, 0, lease=0.01, takeover_of=2)
    newer = _until_won(it, 100)
    assert not store.finish(JOB, it.slot(0), third, "success")
    assert store.finish(JOB, it.slot(100), newer, "failed", "why")
    assert store.finish(JOB, it.slot(100), newer, "failed", "why")
    last = it.claim(190, max_late=20, keep=0, history_size=0)
    assert store.finish(JOB, it.slot(190), last, "success")
    assert store.purge(JOB) == 1
    history = it.history()
    assert check(history) == []
    ops = [entry.op for entry in history.decisions]
    claim, heartbeat, release, finish, purge = "claim", "heartbeat", "release", "finish", "purge"
    assert ops == [claim, heartbeat, release, claim, claim, claim, finish, claim, finish, purge]
    tokens = [entry.token for entry in history.decisions[:-1]]
    assert tokens == [first, first, first, second, third, newer, newer, last, last]
    replaced, trimmed = history.decisions[5], history.decisions[7]
    assert [run.status for run in replaced.puts] == ["running", "interrupted"]
    assert [len(entry.drops) for entry in (trimmed, history.decisions[-1])] == [2, 1]
    stored = [entry.puts[0].checkpoint for entry in history.decisions[:5]]
    assert stored == [None, "1", "2", "2", "2"]


def _until_won(it: Audited, number: int, **claim: object) -> str:
    """Claims until a lease of 10 ms in the way is over."""
    for _ in range(500):
        token = secrets.token_hex(8)
        given: dict[str, object] = {"lease": 30, "max_late": 300, **claim}
        if it.store.claim(JOB, it.slot(number), token, "r", **given).outcome == "won":  # type: ignore[arg-type]
            return token
    pytest.fail("the lease doesn't end")


def _won(it: Audited) -> None:
    it.claim()


def _ended(it: Audited) -> None:
    assert it.store.finish(JOB, it.slot(), it.claim(), "success")


def _released(it: Audited) -> None:
    assert it.store.release(JOB, it.slot(), it.claim(), "1")


def _removed_and_won(it: Audited) -> None:
    it.remove()
    it.claim()


_NEXT = "token = 'else', attempt = attempt + 1, fence = fence + 1"
BY_HAND: dict[str, tuple[str, Callable[[Audited], None], Callable[[Audited], None]]] = {
    "another run is live": ("S1", _won, lambda it: it.copy(1)),
    "the token changes": ("S2", _won, lambda it: it.change("token = 'else'")),
    "an attempt is left out": ("S2", _released, lambda it: it.change(_NEXT.replace("attempt + 1", "3"))),
    "a run is taken over before its lease ends": ("S3", _won, lambda it: it.change(_NEXT)),
    "a release is taken back": ("S5", _released, lambda it: it.change("released = NOT released")),
    "an ended run ends otherwise": ("S6", _ended, lambda it: it.change("status = 'failed'")),
    "an ended run runs again": ("S6", _ended, lambda it: it.change("status = 'running', ended_ms = NULL")),
    "an older slot starts": (
        "S7", _ended, lambda it: it.copy(-1, "status = 'running'; ended_ms = NULL; started_ms = started_ms + 1")
    ),
    "a removed slot starts again": ("S9", _ended, _removed_and_won),
    "a run starts an hour early": ("S12", _ended, lambda it: it.copy(3_800_000, "status = 'running'; ended_ms = NULL")),
    "a run is interrupted with attempts left": (
        "S13", _released, lambda it: it.change("status = 'interrupted', ended_ms = lease_end_ms")
    ),
    "a fence is lowered": ("S20", _won, lambda it: it.change("fence = fence - 1")),
    "an attempt begins with another checkpoint": ("S21", _released, lambda it: it.change(f"{_NEXT}, checkpoint = '2'")),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_changed_by_hand_is_reported(audited: Audited, name: str) -> None:
    """The store's own decision before it is fine."""
    invariant, before, change = BY_HAND[name]
    before(audited)
    assert check(audited.history()) == []
    change(audited)
    found = check(audited.history())
    assert invariant in {violation.id for violation in found}, found
