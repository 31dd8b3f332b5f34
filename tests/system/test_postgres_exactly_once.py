"""Exactly once in one's own database: effect and record in one transaction, on a real server.

First what `confirm` and `finish_in` promise, step by step; then 200 runs whose runners are killed and frozen at random
between effect and commit.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from fix_servers_postgres import PostgresServer, postgres_server, wait_until
from psycopg.rows import dict_row

from leaselib._model import to_ms
from leaselib.errors import ConfigurationError, StoreError
from leaselib.stores import _postgres_inside
from leaselib.stores._postgres import PostgresStore
from leaselib.stores._postgres_schema import grants_sql

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server with a table of effects, which has no constraint that would hide a second one."""
    with postgres_server() as own:
        own.sql("CREATE TABLE effects (job text, slot bigint, token text)")
        yield own


@pytest.fixture
def store(server: PostgresServer) -> Iterator[PostgresStore]:
    """A store in a namespace of its own."""
    own = PostgresStore(server.url(namespace=f"n{next(numbers)}"))
    own.create_schema()
    yield own
    own.close()


@pytest.fixture
def own(server: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    """The handler's own connection."""
    with psycopg.connect(server.url()) as connection:
        yield connection


def due(store: PostgresStore) -> datetime:
    """A slot that is due now."""
    return store.now().replace(microsecond=0)


def win(store: PostgresStore, lease: float = 30.0) -> datetime:
    """The slot of a run of `job` that was won with token `t1`."""
    slot = due(store)
    assert store.claim("job", slot, "t1", "r", lease=lease).outcome == "won"
    return slot


def expire(server: PostgresServer, store: PostgresStore) -> None:
    """Every lease of the store's namespace has run out, by an update from outside."""
    query = f"UPDATE leaselib.runs SET lease_end_ms = 0 WHERE namespace = '{store.namespace}'"
    server.sql(query)


# ---- what they promise -----------------------------------------------------------------------------------------------


def test_confirm_tells_whether_the_attempt_holds_the_run(store: PostgresStore, own: psycopg.Connection[Any]) -> None:
    """Only the current token, only while it is running and not released; its lease may have run out."""
    slot = win(store, lease=0.001)
    assert store.confirm(own, "job", slot, "t1")
    assert not store.confirm(own, "job", slot, "t0")
    assert not store.confirm(own, "job", slot + timedelta(milliseconds=1), "t1")
    assert not store.confirm(own, "jo", slot, "t1")
    own.rollback()
    assert store.claim("job", slot, "t2", "r", takeover_of=1).outcome == "won"
    assert not store.confirm(own, "job", slot, "t1")
    assert store.confirm(own, "job", slot, "t2")
    own.rollback()
    assert store.release("job", slot, "t2")
    assert not store.confirm(own, "job", slot, "t2")
    own.rollback()
    assert store.claim("job", slot, "t3", "r", takeover_of=2).outcome == "won"
    assert store.finish("job", slot, "t3", "success")
    assert not store.confirm(own, "job", slot, "t3")


def test_nobody_takes_over_while_a_confirmed_transaction_is_open(
    server: PostgresServer, store: PostgresStore, own: psycopg.Connection[Any]
) -> None:
    """Not by a takeover, a newer slot or a release, though the lease ran out; and nobody waits for it or is held up."""
    slot = win(store)
    assert store.confirm(own, "job", slot, "t1")
    expire(server, store)
    newer = slot + timedelta(seconds=1)
    began = time.monotonic()
    assert store.claim("job", slot, "t2", "r", takeover_of=1, timeout=2).outcome == "running"
    overlap = store.claim("job", newer, "t3", "r", timeout=2)
    assert (overlap.outcome, overlap.run.slot) == ("overlap", slot)  # type: ignore[union-attr]
    allowed = store.claim("job", newer, "t4", "r", overlap="allow", timeout=2)
    assert (allowed.outcome, allowed.interrupted) == ("won", ())
    assert store.finish("job", newer, "t4", "success")
    assert time.monotonic() - began < 1
    with pytest.raises(StoreError, match="55P03"):
        store.release("job", slot, "t1", timeout=0.3)
    own.rollback()
    assert store.get("job", slot).status == "running"  # type: ignore[union-attr]


def test_the_runners_own_heartbeats_pass_a_confirmed_transaction(
    store: PostgresStore, own: psycopg.Connection[Any]
) -> None:
    """A transaction may take longer than the lease."""
    slot = win(store)
    assert store.confirm(own, "job", slot, "t1")
    for _ in range(3):
        assert store.heartbeat("job", slot, "t1", 30, timeout=1)
    assert store.claim("job", slot, "t1", "r", timeout=1).outcome == "won", "the claim sent again, too"
    assert store.confirm(own, "job", slot, "t1"), "and it can be confirmed again"
    assert store.finish_inside(own, "job", slot, "t1")
    own.commit()
    assert store.get("job", slot).status == "success"  # type: ignore[union-attr]


def test_effect_and_record_commit_together_or_not_at_all(
    server: PostgresServer, store: PostgresStore, own: psycopg.Connection[Any]
) -> None:
    """Rolled back, the run is as before and can be taken over; committed, it is over, and says so to everybody."""
    slot = win(store)
    token = f"{store.namespace}-t"
    insert = "INSERT INTO effects VALUES ('job', %s, %s)"
    assert store.confirm(own, "job", slot, "t1")
    own.execute(insert, (to_ms(slot), token))
    assert store.finish_inside(own, "job", slot, "t1")
    assert store.get("job", slot).status == "running", "nobody sees it before the commit"  # type: ignore[union-attr]
    own.rollback()
    expire(server, store)
    assert store.claim("job", slot, "t2", "r", takeover_of=1).outcome == "won"
    assert not store.finish_inside(own, "job", slot, "t1")
    own.rollback()
    own.execute(insert, (to_ms(slot), token))
    assert store.finish_inside(own, "job", slot, "t2")
    assert store.finish_inside(own, "job", slot, "t2"), "the same again is true again"
    own.commit()
    assert store.claim("job", slot, "t3", "r", takeover_of=2).outcome == "finished"
    assert store.finish("job", slot, "t2", "success"), "the plain finish sent afterwards is true again"
    assert server.sql(f"SELECT count(*) FROM effects WHERE token = '{token}'") == [(1,)]


def test_a_takeover_meets_the_result_of_a_finish_that_is_under_way(
    server: PostgresServer, store: PostgresStore, own: psycopg.Connection[Any]
) -> None:
    """finish_in alone holds the run as well: until its transaction ends the answer is `running`, then `finished`."""
    slot = win(store)
    expire(server, store)
    assert store.finish_inside(own, "job", slot, "t1")
    assert store.claim("job", slot, "t2", "r", takeover_of=1, timeout=3).outcome == "running"
    own.commit()
    assert store.claim("job", slot, "t2", "r", takeover_of=1).outcome == "finished"


def test_confirm_waits_for_a_takeover_that_is_being_committed(
    server: PostgresServer, store: PostgresStore, own: psycopg.Connection[Any]
) -> None:
    """Whoever comes second sees the first one's result: never do both hold the run."""
    slot = win(store)
    with server.admin() as other, other.transaction():
        other.execute("SELECT FROM leaselib.runs WHERE slot_ms = %s FOR UPDATE", (to_ms(slot),))  # as claim_1 does
        other.execute("UPDATE leaselib.runs SET token = 't2', attempt = 2 WHERE slot_ms = %s", (to_ms(slot),))
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(store.confirm(own, "job", slot, "t1")))
        thread.start()
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%confirm_2%'"
        wait_until(lambda: server.sql(waiting), "confirm to wait")
    thread.join(10)
    assert answers == [False]


GATE = 7  # an advisory lock's number
GATED = """
CREATE FUNCTION public.gate() RETURNS boolean LANGUAGE plpgsql AS
    'BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN true; END';
CREATE POLICY gate ON gated.runs USING (public.gate());
ALTER TABLE gated.runs ENABLE ROW LEVEL SECURITY;
"""


@pytest.fixture(scope="module")
def gated(server: PostgresServer) -> Iterator[PostgresStore]:
    """A store whose runs the role `gated` reads only while nobody else holds GATE.

    By a row security policy, which the server asks after a snapshot is taken and before rows are locked.
    """
    own = PostgresStore(server.url(namespace="gated"), schema="gated")
    own.create_schema()
    server.sql("CREATE ROLE gated LOGIN", grants_sql("gated", "gated"), *GATED.strip().split(";\n"))
    yield own
    own.close()


INSTANT: dict[str, Callable[[PostgresStore, str, datetime], bool]] = {
    "release": lambda store, job, slot: store.release(job, slot, "t1"),
    "finish": lambda store, job, slot: store.finish(job, slot, "t1", "failed"),
    "takeover": lambda store, job, slot: store.claim(job, slot, "t2", "r2", takeover_of=1).outcome == "won",
    "newer slot": lambda store, job, slot: (
        store.claim(job, slot + timedelta(milliseconds=1), "t2", "r2").outcome == "won"
        and store.get(job, slot).status == "interrupted"  # type: ignore[union-attr]
    ),
}


@pytest.mark.parametrize("what", INSTANT)
def test_what_commits_between_confirms_snapshot_and_its_lock_is_seen(
    server: PostgresServer, gated: PostgresStore, what: str
) -> None:
    """Some of these updates leave the lock to be had on the very version that they replaced, without a wait."""
    slot = due(gated)
    assert gated.claim(what, slot, "t1", "r", lease=30 if what in ("release", "finish") else 0.2).outcome == "won"
    answers: list[bool] = []
    with psycopg.connect(server.url(user="gated")) as own, server.admin() as gate:
        assert gated.confirm(own, what, slot, "t1"), "the gate is open and refuses nobody"
        own.rollback()
        gate.execute("SELECT pg_advisory_lock(%s)", (GATE,))
        thread = threading.Thread(target=lambda: answers.append(gated.confirm(own, what, slot, "t1")))
        thread.start()
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'advisory' AND query LIKE '%confirm_2%'"
        wait_until(lambda: server.sql(waiting), "confirm to wait at the gate")
        wait_until(lambda: INSTANT[what](gated, what, slot), f"the {what}, once the lease allows it")
        gate.execute("SELECT pg_advisory_unlock(%s)", (GATE,))
        thread.join(10)
    assert answers == [False]


CLAIM = "SELECT leaselib.claim_1(%s, 'job', %s, 't2', 'r2', 30000, 9, %s, 600000, 600000, 9, 'scheduled', %s, 5000)"


@pytest.mark.parametrize("level", list(psycopg.IsolationLevel))
@pytest.mark.parametrize("way", ["takeover", "newer slot", "newer slot beside it"])
@pytest.mark.parametrize("name", ["confirm", "finish_inside"])
def test_whoever_waits_for_a_claim_sees_what_it_decided(
    server: PostgresServer,
    store: PostgresStore,
    own: psycopg.Connection[Any],
    level: psycopg.IsolationLevel,
    way: str,
    name: str,
) -> None:
    """The claim itself, held open before its commit: the run that it takes or ends is nobody else's afterwards."""
    slot = win(store)
    expire(server, store)
    own.isolation_level = level
    answers: list[object] = []

    def call() -> None:
        try:
            answers.append(getattr(store, name)(own, "job", slot, "t1"))
        except psycopg.errors.SerializationFailure:
            answers.append("again")

    takeover = way == "takeover"
    args = (store.namespace, to_ms(slot) + (0 if takeover else 1), "allow" if "beside" in way else "skip")
    with server.admin() as other, other.transaction():
        (answer,) = other.execute(CLAIM, (*args, 1 if takeover else None)).fetchone() or ()
        assert answer[1] == "won", answer
        thread = threading.Thread(target=call)
        thread.start()
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%_2(%'"
        wait_until(lambda: server.sql(waiting), f"{name} to wait")
    thread.join(10)
    own.rollback()
    strict = level in (psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE)
    assert answers == (["again"] if strict else [False])
    assert not getattr(store, name)(own, "job", slot, "t1")
    own.rollback()


def test_a_confirmed_transaction_that_is_idle_for_too_long_gives_the_run_free(
    server: PostgresServer, store: PostgresStore, own: psycopg.Connection[Any]
) -> None:
    """With idle_in_transaction_session_timeout, which the README recommends: whoever wakes up can't commit any more."""
    slot = win(store)
    own.execute("SET idle_in_transaction_session_timeout = '300ms'")
    own.commit()
    assert store.confirm(own, "job", slot, "t1")
    own.execute("INSERT INTO effects VALUES ('job', 0, 'frozen')")
    expire(server, store)
    assert store.claim("job", slot, "t2", "r", takeover_of=1).outcome == "running"
    wait_until(lambda: store.claim("job", slot, "t2", "r", takeover_of=1).outcome == "won", "the takeover")
    with pytest.raises(psycopg.Error):
        own.commit()
    assert server.sql("SELECT * FROM effects WHERE token = 'frozen'") == []
    own.close()


def test_connections_that_will_do(server: PostgresServer, store: PostgresStore) -> None:
    """psycopg's, with any rows and cursors, in autocommit inside `transaction()`; SQLAlchemy's through its driver's."""
    slot = win(store)
    with psycopg.connect(server.url(), row_factory=dict_row) as own:
        assert store.confirm(own, "job", slot, "t1")
    with psycopg.connect(server.url(), cursor_factory=psycopg.RawCursor) as own:
        assert store.confirm(own, "job", slot, "t1")
    with psycopg.connect(server.url(), autocommit=True) as own, own.transaction():
        assert store.confirm(own, "job", slot, "t1")
    with psycopg.connect(server.url()) as own:
        alchemy = SimpleNamespace(connection=SimpleNamespace(driver_connection=own), in_transaction=lambda: True)
        assert store.confirm(alchemy, "job", slot, "t1")
        keywords = {"namespace": store.namespace, "schema": store.schema}
        assert _postgres_inside.confirm(own, "job", to_ms(slot), "t1", **keywords)
        for _ in range(8):
            assert _postgres_inside.finish_in(own, "job", to_ms(slot), "t1", **keywords)
        prepared = own.execute("SELECT count(*) FROM pg_prepared_statements", prepare=False).fetchone()
        assert prepared == (0,), "nothing that a pooler would stumble over"


def test_connections_that_will_not_do(server: PostgresServer, store: PostgresStore) -> None:
    """Each is refused with what to do instead, before anything is sent."""
    slot = win(store)
    with psycopg.connect(server.url(), autocommit=True) as own:
        idle = SimpleNamespace(connection=SimpleNamespace(driver_connection=own), in_transaction=lambda: False)
        foreign = SimpleNamespace(connection=SimpleNamespace(driver_connection=object()))
        cases: list[tuple[object, str]] = [
            (own, r"autocommit.*connection\.transaction\(\)"),
            (idle, r"engine\.begin\(\)"),
            (foreign, "psycopg"),
            ("postgresql://h/db", "psycopg"),
            (store, "psycopg"),
        ]
        for connection, words in cases:
            for call in (store.confirm, store.finish_inside):
                with pytest.raises(ConfigurationError, match=words):
                    call(connection, "job", slot, "t1")
    with psycopg.connect(server.url(database="template1")) as own, pytest.raises(StoreError, match="own database"):
        store.confirm(own, "job", slot, "t1")


# ---- 200 runs --------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, random, select, signal, sys, time
from collections import Counter
from datetime import datetime, timedelta, timezone
import psycopg
from leaselib._model import to_ms
from leaselib.errors import StoreError
from leaselib.stores._postgres import PostgresStore

url, plain_url, mode, lanes, per_lane, seed, base_ms = sys.argv[1:8]
lanes, per_lane, base_ms = int(lanes), int(per_lane), int(base_ms)
start = datetime.fromtimestamp(base_ms // 1000, timezone.utc)
LEASE_S = 0.4

def fault(chance, point, out):
    # Dies or stops here, now and then; whoever watches sees which.
    drawn = chance.random()
    if drawn < 0.09:
        os.write(out, f"kill {point}\\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    elif drawn < 0.18:
        os.write(out, f"stop {point}\\n".encode())
        os.kill(os.getpid(), signal.SIGSTOP)

def handler(store, job, slot, token, chance, out):
    with psycopg.connect(plain_url) as own:
        fault(chance, "before confirm", out)
        if mode == "once" and not store.confirm(own, job, slot, token):
            os.write(out, b"lost confirm\\n")
            return
        fault(chance, "before effect", out)
        own.execute("INSERT INTO effects VALUES (%s, %s, %s)", (job, to_ms(slot), token))
        fault(chance, "after effect", out)
        if mode == "once":
            if not store.finish_inside(own, job, slot, token):
                os.write(out, b"lost finish\\n")
                own.rollback()
                return
            fault(chance, "before commit", out)
    fault(chance, "after commit", out)
    if mode == "naive":
        store.finish(job, slot, token, "success")

def work(number, out):
    chance = random.Random(f"{seed}-{number}")
    store = PostgresStore(url)
    due = {f"lane{n}": 0 for n in range(lanes)}
    seen = {}
    while due:
        job = chance.choice(sorted(due))
        slot = start + timedelta(milliseconds=due[job])
        token = f"{number}-{chance.random()}"
        answer = store.claim(job, slot, token, f"r{number}", lease=LEASE_S, max_attempts=10**6, max_late=10**6,
                             takeover_of=seen.get((job, slot)))
        if answer.outcome == "won":
            os.write(out, f"attempt {min(2, answer.run.attempt)}\\n".encode())
            handler(store, job, slot, token, chance, out)
            seen.pop((job, slot), None)
        elif answer.outcome == "running":
            seen[job, slot] = answer.run.attempt
            time.sleep(0.02)
        elif answer.outcome == "finished":
            due[job] += 1
            if due[job] == per_lane:
                del due[job]
        elif answer.outcome == "gone":
            seen.pop((job, slot), None)
        else:
            raise AssertionError(answer)

reading, writing = os.pipe()
chance = random.Random(seed)
counts, alive, wake, numbers = Counter(), set(), {}, 0
end = time.monotonic() + 100
while True:
    while len(alive) < 4 and not counts["done"]:
        numbers += 1
        pid = os.fork()
        if pid == 0:
            try:
                work(numbers, writing)
            except BaseException as error:
                os.write(writing, f"error {error!r}\\n".replace("\\n", " ").encode() + b"\\n")
                os._exit(1)
            os._exit(0)
        alive.add(pid)
    pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED) if alive else (0, 0)
    if pid and os.WIFSTOPPED(status):
        wake[pid] = time.monotonic() + chance.choice([0.05, 0.2, 0.6, 0.9])
    elif pid:
        alive.discard(pid)
        if not os.WIFSIGNALED(status):
            counts["done"] += 1
    now = time.monotonic()
    for pid in [pid for pid, at in wake.items() if at <= now]:
        del wake[pid]
        os.kill(pid, signal.SIGCONT)
    if select.select([reading], [], [], 0)[0]:
        for line in os.read(reading, 65536).decode().splitlines():
            counts[line] += 1
    if not alive:
        break
    assert now < end, f"not done: {dict(counts)}"
    time.sleep(0.002)
print(json.dumps(counts))
"""


def run_lanes(server: PostgresServer, mode: str, lanes: int, per_lane: int, seed: str) -> tuple[Counter[str], str]:
    """Four runner processes work through all slots; returns what happened to them, and the namespace."""
    namespace = f"{mode}{next(numbers)}"
    store = PostgresStore(server.url(namespace=namespace))
    store.create_schema()
    base_ms = to_ms(due(store)) - 10_000
    server.sql("TRUNCATE effects")
    argv = [server.url(namespace=namespace), server.url(), mode, str(lanes), str(per_lane), seed, str(base_ms)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *argv], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    store.close()
    return Counter(json.loads(done.stdout)), namespace


@pytest.mark.timeout(120)
def test_200_runs_with_runners_killed_and_frozen_have_one_effect_each(server: PostgresServer) -> None:
    """At every point between claim and commit, again and again; every kind of trouble must have come up."""
    seed = "200"
    counts, namespace = run_lanes(server, "once", 8, 25, seed)
    assert not [line for line in counts if line.startswith("error")], counts
    effects = server.sql("SELECT job, slot, count(*) FROM effects GROUP BY job, slot")
    assert len(effects) == 200
    assert {count for _, _, count in effects} == {1}, f"seed {seed}: {effects}"
    store = PostgresStore(server.url(namespace=namespace))
    runs = [run for n in range(8) for run in store.runs(f"lane{n}")]
    assert Counter(run.status for run in runs) == {"success": 200}
    tokens = {(job, slot): token for job, slot, token in server.sql("SELECT * FROM effects")}
    assert all(tokens[run.job, to_ms(run.slot)] == run.token for run in runs), "the effect is the last attempt's"
    store.close()
    points = ("before confirm", "before effect", "after effect", "before commit", "after commit")
    unseen = [f"{kind} {point}" for kind in ("kill", "stop") for point in points if not counts[f"{kind} {point}"]]
    assert not unseen, counts
    assert counts["attempt 2"] > 20, counts
    assert counts["lost confirm"], counts


def test_without_confirm_the_same_trouble_shows_in_the_effects(server: PostgresServer) -> None:
    """The proof can fail: when the finish is sent after the commit, some slots have two effects."""
    run_lanes(server, "naive", 8, 3, "24")
    counts = Counter(count for _, _, count in server.sql("SELECT job, slot, count(*) FROM effects GROUP BY job, slot"))
    assert sum(number for count, number in counts.items() if count > 1) > 0, counts


def test_a_call_in_an_aborted_transaction_is_the_drivers_error(
    store: PostgresStore, own: psycopg.Connection[Any]
) -> None:
    """It can only be rolled back; nothing of ours hides that."""
    slot = win(store)
    with pytest.raises(psycopg.errors.UndefinedTable):
        own.execute("SELECT * FROM not_there")
    calls: list[Callable[..., bool]] = [store.confirm, store.finish_inside]
    for call in calls:
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            call(own, "job", slot, "t1")
    own.rollback()
