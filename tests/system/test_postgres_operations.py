"""PostgresStore on a healthy server: URLs and errors, claims that wait, the pool, pgbouncer, forks, odd records."""

from __future__ import annotations

import builtins
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from fix_proxy import Proxy
from fix_servers_postgres import PgBouncer, PostgresServer, pgbouncer, place, postgres_server, session_url, wait_until

from leaselib._model import ERROR_BYTES, to_ms
from leaselib.errors import ConfigurationError, StoreError
from leaselib.stores import open_store
from leaselib.stores._postgres import PostgresStore
from leaselib.stores._postgres_connection import Deadline
from leaselib.stores._postgres_errors import Failure, connect_sqlstate, store_error, transient
from leaselib.stores._postgres_url import parse


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server's URL, with a schema of the test's own."""
    with place(tmp_path) as own:
        yield own


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    """A store whose schema exists."""
    own = PostgresStore(url)
    own.create_schema()
    yield own
    own.close()


def due(store: PostgresStore) -> datetime:
    """A slot that is due now."""
    return store.now().replace(microsecond=0)


def admin(store: PostgresStore) -> psycopg.Connection[Any]:
    """Another session on the same server."""
    return psycopg.connect(session_url(), autocommit=False)


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Runs a call in a thread; its result or exception comes into the list."""
    result: list[object] = []

    def run() -> None:
        try:
            result.append(call())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


def waiting_sessions(connection: psycopg.Connection[Any]) -> int:
    """How many sessions wait for a lock."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%claim_1%'"
    with psycopg.connect(session_url(), autocommit=True) as own:
        row = own.execute(query.encode()).fetchone()
    return int(row[0]) if row else 0


# ---- URLs and errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        "postgresql://u:sEcReT@h:port/db",
        "postgresql://u:sEcReT@h/db?nonsense=1",
        "postgresql://u:sEcReT@h/db?create=maybe",
        "postgresql://u:sEcReT@h/db?schema=pg_x",
        "postgresql://u:sEcReT@h/db?schema=a%20b",
        "postgresql://u:sEcReT@h/db?namespace=",
        "postgresql://u:sEcReT@h/db?namespace=a%09b",
        "postgresql://u:sEcReT@h/db?connect_timeout=soon",
        "postgresql://u:sEcReT@a,b,c/db?port=1,2",
        "postgresql://u:sEcReT@h:99999/db",
        "postgresql://h?password=12@sEcReT",
        "postgresql://h?user=u@name&password=sEcReT",
        "mysql://u:sEcReT@h/db",
        "host=h password=sEcReT",
    ],
)
def test_a_bad_url_is_a_configuration_error_without_the_password(bad: str) -> None:
    """By the constructor, before anything is sent; so says no message either."""
    for make in (PostgresStore, PostgresStore.from_url):
        with pytest.raises(ConfigurationError) as caught:
            make(bad)
        assert "sEcReT" not in f"{caught.value!r} {caught.value.__cause__!r} {caught.value.__context__!r}"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("connect_timout=3", "connect_timeout"), ("namespce=a", "namespace"), ("sslmod=x", "sslmode")],
)
def test_a_misspelt_parameter_is_told_by_what_it_may_have_been_meant_as(written: str, meant: str) -> None:
    """One that is like nothing known may be a part of a password: nothing is said of it."""
    with pytest.raises(ConfigurationError, match=f"misspelt parameter, perhaps for '{meant}'"):
        parse(f"postgresql://u:pw@h/d?{written}")
    with pytest.raises(ConfigurationError) as found:
        parse("postgresql://u:pw@h/d?hunter2=1")
    assert "misspelt" not in str(found.value)
    assert "hunter2" not in str(found.value)


def test_what_is_leaselibs_is_taken_off_the_url() -> None:
    """The rest goes to libpq, host by host, also for several hosts with parameters of their own."""
    address = parse(
        "postgresql://u:p%40ss@a:5433,[::1]:5434/base?namespace=n%20m&target_session_attrs=read-write"
        "&schema=S-1&create=no&connect_timeout=3"
    )
    assert (address.namespace, address.schema, address.create, address.connect_timeout) == ("n m", "S-1", False, 3.0)
    assert [(t.params["host"], t.params["port"], t.host) for t in address.targets] == [
        ("a", "5433", "a"),
        ("::1", "5434", None),
    ]
    for target in address.targets:
        assert target.params["password"] == "p@ss"
        assert target.params["target_session_attrs"] == "read-write"
        assert not {"namespace", "schema", "create"} & set(target.params)
    assert b"hostaddr=10.0.0.1" in address.targets[0].conninfo("10.0.0.1")
    assert address.shown == "postgresql://u@a:5433,::1:5434/base"
    store = open_store("postgresql://u:sEcReT@h/db?namespace=n")
    assert repr(store) == "PostgresStore('postgresql://u@h/db', namespace='n', schema='leaselib')"


@pytest.mark.parametrize("url", ["postgresql:///?service=mine", "postgresql:///db", "postgresql://:5433/?service=mine"])
def test_a_service_may_not_name_the_hosts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """libpq would look them up by itself, without a deadline. With a host in the URL it gives the rest."""
    monkeypatch.setenv("PGSERVICE", "mine")
    with pytest.raises(ConfigurationError, match=r"service.*Write the host in the URL"):
        PostgresStore(url)
    address = parse("postgresql://h/?service=mine")
    assert [(target.host, target.params["service"]) for target in address.targets] == [("h", "mine")]
    monkeypatch.delenv("PGSERVICE")
    assert parse("postgresql:///db").targets


@pytest.mark.system
def test_a_service_gives_what_the_url_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """User and database, from a service file."""
    place = urlsplit(session_url())
    file = tmp_path / "services"
    file.write_text(f"[mine]\nuser={place.username}\ndbname={place.path[1:]}\nport={place.port}\nhost=no-such-host\n")
    monkeypatch.setenv("PGSERVICEFILE", str(file))
    store = PostgresStore(f"postgresql://{place.hostname}/?service=mine&create=0&schema=not_there")
    with pytest.raises(StoreError, match="leaselib schema"):
        store.now()
    store.close()


def test_making_a_store_touches_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do closing it and looking at it."""
    listener = socket.create_server(("127.0.0.1", 0))
    store = PostgresStore(f"postgresql://127.0.0.1:{listener.getsockname()[1]}/db")
    repr(store)
    store.close()
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module can be imported; making a store says what to install."""
    real = builtins.__import__

    def fake(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "psycopg":
            raise ImportError("No module named 'psycopg'")
        return real(name, *args, **kwargs)

    ours = [name for name in sys.modules if name.startswith(("leaselib.stores._postgres", "psycopg"))]
    for name in ours:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", fake)
    from leaselib.stores._postgres import PostgresStore as Bare

    with pytest.raises(ConfigurationError, match=r"leaselib\[postgres\]"):
        Bare("postgresql://h/db")


@pytest.mark.parametrize(
    ("sqlstate", "passing"),
    [
        *((state, True) for state in ("08000", "08006", "08P01", "40001", "40P01", "40003", "25006", "25P03", "25P04")),
        *((state, True) for state in ("53100", "53200", "53300", "55P03", "57014", "57P01", "57P02", "57P03", "58030")),
        (None, True),
        *((state, False) for state in ("28P01", "28000", "3D000", "3F000", "42P01", "42501", "42883", "57P04")),
        *((state, False) for state in ("22003", "23505", "XX001", "P0001", "0A000", "42P05", "26000")),
    ],
)
def test_the_sqlstate_tells_whether_trouble_passes(sqlstate: str | None, passing: bool) -> None:
    """Row by row. Only data exceptions, damaged pages and locked records are blamed on the job."""
    error = store_error(Failure("words", sqlstate), "claim of 'j'", "postgresql://h/db", "j")
    assert (error.transient, transient(sqlstate)) == (passing, passing)
    assert error.job == ("j" if sqlstate in ("22003", "23505", "55P03", "XX001") else None)
    assert "words" in str(error)


@pytest.mark.parametrize(
    ("words", "sqlstate"),
    [
        ("FATAL:  sorry, too many clients already", "53300"),
        ("FATAL:  remaining connection slots are reserved for roles with the SUPERUSER attribute", "53300"),
        ('FATAL:  password authentication failed for user "x"', "28P01"),
        ('FATAL:  no pg_hba.conf entry for host "::1", user "x"', "28000"),
        ('FATAL:  role "x" does not exist', "28000"),
        ('FATAL:  database "x" does not exist', "3D000"),
        ("server does not support SSL, but SSL was required", "28000"),
        ('root certificate file "/home/x/.postgresql/root.crt" does not exist\nEither provide the file or', "28000"),
        ('could not read root certificate file "/x": no certificate or crl found', "28000"),
        ('private key file "/x" has group or world access', "28000"),
        ('FATAL:  role "database "x"" does not exist', "28000"),
        ('connection to server on socket "/x/.s.PGSQL.5432" failed: No such file or directory', None),
        ('connection to server failed: invalid sslmode value: "requre"', "28000"),
        ("local user with ID 7 does not exist", None),
        ("connection refused", None),
        ("FATAL:  the database system is starting up", None),
    ],
)
def test_a_failed_connect_is_judged_by_its_words(words: str, sqlstate: str | None) -> None:
    """libpq keeps the SQLSTATE of a connect to itself."""
    assert connect_sqlstate(words) == sqlstate


@pytest.mark.system
def test_a_password_is_in_no_message(url: str) -> None:
    """Each thing that can break is broken once, with a canary in the URL."""
    place = urlsplit(session_url())
    port = place.port
    silent = socket.create_server(("127.0.0.1", 0))
    canary = "cAnArY-9"
    urls = [
        f"postgresql://nobody:{canary}@127.0.0.1:{port}/postgres",
        f"postgresql://postgres:{canary}@127.0.0.1:{port}/not_there",
        f"postgresql://postgres:{canary}@127.0.0.1:{silent.getsockname()[1]}/postgres?connect_timeout=1",
        f"postgresql://postgres:{canary}@no-such-host.invalid:{port}/postgres",
        f"postgresql://postgres:{canary}@127.0.0.1:{port}/postgres?sslmode=require",
        f"postgresql://postgres@127.0.0.1:{port}/postgres?password={canary}&create=false&schema=not_there",
    ]
    for bad in urls:
        store = PostgresStore(bad)
        with pytest.raises(StoreError) as caught:
            store.now(timeout=2)
        assert canary not in f"{caught.value} {caught.value!r} {store!r}", bad
    silent.close()


def test_without_a_root_certificate_the_certificate_is_to_blame_not_the_database() -> None:
    """`sslmode=verify-full` needs that file; the server has agreed to TLS by then. Permanent, and names the file."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def agree() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(8)
                connection.sendall(b"S")
                connection.recv(1)

        thread, _ = in_thread(agree)
        where = f"127.0.0.1:{listener.getsockname()[1]}/db?sslmode=verify-full&sslrootcert=/not/there.crt"
        with pytest.raises(StoreError, match=r"/not/there\.crt.*SQLSTATE 28000.*certificates in the URL") as caught:
            PostgresStore(f"postgresql://u@{where}").now()
        thread.join(10)
    assert not caught.value.transient
    assert "Create the database" not in str(caught.value)


@pytest.mark.system
def test_what_is_wrong_is_said_and_whether_it_passes() -> None:
    """A user, a database or a right that isn't there is permanent; a server that isn't is transient."""
    port = urlsplit(session_url()).port
    for user, database, words in (("nobody_here", "postgres", "nobody_here"), ("postgres", "not_there", "not_there")):
        with pytest.raises(StoreError, match=words) as caught:
            PostgresStore(f"postgresql://{user}@127.0.0.1:{port}/{database}").now()
        assert not caught.value.transient
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    with pytest.raises(StoreError, match="refused") as caught:
        PostgresStore(f"postgresql://postgres@127.0.0.1:{free}/postgres").now()
    assert caught.value.transient


def test_a_name_that_is_not_looked_up_in_time_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver takes no deadline; whoever asks keeps its own, and one thread asks for all of them."""
    answer, asked = threading.Event(), []

    def slow(host: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        answer.wait(10)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    store = PostgresStore("postgresql://slow.example/db")
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"slow\.example") as caught:
            store.now(timeout=0.1)
        assert time.monotonic() - began < 1
        assert caught.value.transient
    assert asked == ["slow.example"]
    answer.set()
    with pytest.raises(StoreError, match="no such name"):
        store.now(timeout=5)


# ---- claims that wait ------------------------------------------------------------------------------------------------


@pytest.mark.system
def test_a_claim_that_waited_judges_by_the_time_it_has_then(store: PostgresStore) -> None:
    """The lease that it gives counts from when the lock was free, not from when its statement began."""
    slot = due(store)
    store.claim("job", slot, "first", "r")
    assert store.finish("job", slot, "first", "success")
    with admin(store) as other:
        other.execute(f"SELECT FROM {store.schema}.jobs FOR UPDATE".encode())
        thread, result = in_thread(lambda: store.claim("job", slot + timedelta(seconds=1), "t", "r", lease=5))
        wait_until(lambda: waiting_sessions(other), "a claim that waits")
        began = store.now()
        time.sleep(0.7)  # the very thing that is measured: how long the claim waits
        freed = store.now()
        other.rollback()
        thread.join(10)
    (answer,) = result
    assert answer.outcome == "won", answer  # type: ignore[attr-defined]
    assert answer.now >= freed >= began + timedelta(seconds=0.6)  # type: ignore[attr-defined]
    assert answer.run.lease_end == answer.now + timedelta(seconds=5)  # type: ignore[attr-defined]


@pytest.mark.system
def test_a_claim_gives_up_waiting_and_leaves_no_session_behind(store: PostgresStore) -> None:
    """The server gives up a little before the caller: no connection is lost, nobody goes on waiting."""
    slot = due(store)
    store.claim("job", slot, "t", "r")
    with admin(store) as other:
        other.execute(f"SELECT FROM {store.schema}.jobs FOR UPDATE".encode())
        began = time.monotonic()
        with pytest.raises(StoreError, match="55P03") as caught:
            store.claim("job", slot + timedelta(seconds=1), "t2", "r", timeout=0.5)
        assert caught.value.transient
        assert time.monotonic() - began < 1
        assert waiting_sessions(other) == 0
    assert store.claim("job", slot + timedelta(seconds=1), "t2", "r").outcome == "overlap"


@pytest.mark.system
def test_two_jobs_never_wait_for_each_other(store: PostgresStore) -> None:
    """While one job is locked, another whose name has the same CRC32, and every operation on it, goes through."""
    slot = due(store)
    assert store.claim("plumless", slot, "t1", "r").outcome == "won"
    with admin(store) as other:
        other.execute(f"SELECT FROM {store.schema}.jobs FOR UPDATE".encode())
        other.execute(f"SELECT FROM {store.schema}.runs FOR UPDATE".encode())
        assert store.claim("buckeroo", slot, "t2", "r", timeout=2).outcome == "won"
        assert store.heartbeat("buckeroo", slot, "t2", 30, timeout=2)
        assert store.release("buckeroo", slot, "t2", timeout=2)
        assert store.claim("buckeroo", slot, "t3", "r", takeover_of=1, timeout=2).outcome == "won"
        assert store.finish("buckeroo", slot, "t3", "success", timeout=2)


@pytest.mark.system
def test_what_a_claim_refuses_waits_for_nobody(store: PostgresStore) -> None:
    """A backup's check and a heartbeat come through while the job itself is locked by a claim that doesn't end."""
    slot = due(store)
    assert store.claim("job", slot, "t1", "r").outcome == "won"
    with admin(store) as other:
        other.execute(f"SELECT FROM {store.schema}.jobs FOR UPDATE".encode())
        assert store.claim("job", slot, "t2", "r", takeover_of=1, timeout=1).outcome == "running"
        assert store.heartbeat("job", slot, "t1", 30, timeout=1)
        assert store.finish("job", slot, "t1", "success", timeout=1)
        assert store.claim("job", slot, "t2", "r", takeover_of=1, timeout=1).outcome == "finished"


@pytest.mark.system
def test_heartbeats_never_wait_for_a_connection(store: PostgresStore) -> None:
    """Every connection that claims may have is stuck; a heartbeat gets one of its own at once."""
    slot = due(store)
    assert store.claim("alive", slot, "t", "r").outcome == "won"
    for n in range(20):
        store.claim(f"job{n}", slot, "t", "r")
    with admin(store) as other:
        other.execute(f"SELECT FROM {store.schema}.jobs FOR UPDATE".encode())
        later = slot + timedelta(seconds=1)
        stuck = [
            in_thread(lambda n=n: store.claim(f"job{n}", later, "t2", "r", timeout=10)) for n in range(20)
        ]
        wait_until(lambda: waiting_sessions(other) == 8, "as many waiting claims as connections")
        began = time.monotonic()
        assert store.heartbeat("alive", slot, "t", 30, timeout=1)
        assert store.finish("alive", slot, "t", "success", timeout=1)
        assert time.monotonic() - began < 0.5
        with pytest.raises(StoreError, match="none of 8 connections became free"):
            store.claim("alive", later, "t3", "r", timeout=0.1)
        other.rollback()
    for thread, result in stuck:
        thread.join(10)
        assert getattr(result[0], "outcome", None) == "overlap", result
    assert len(store._pool._idle) <= 8


@pytest.mark.system
def test_heartbeats_do_not_queue_behind_claims_to_look_at_the_schema(store: PostgresStore) -> None:
    """The schema was incomplete and is looked at again; claims wait for that and for connections, heartbeats not."""
    slot = due(store)
    assert store.claim("alive", slot, "t", "r").outcome == "won"
    for n in range(8):
        store.claim(f"job{n}", slot, "t", "r")
    later = slot + timedelta(seconds=1)
    with admin(store) as other, psycopg.connect(session_url(), autocommit=True) as ddl:
        other.execute(f"SELECT FROM {store.schema}.jobs FOR UPDATE".encode())
        stuck = [in_thread(lambda n=n: store.claim(f"job{n}", later, "t2", "r", timeout=10)) for n in range(8)]
        wait_until(lambda: waiting_sessions(other) == 8, "as many waiting claims as connections")
        ddl.execute(f"ALTER FUNCTION {store.schema}.heartbeat_1 RENAME TO gone".encode())
        with pytest.raises(StoreError, match="leaselib schema"):
            store.heartbeat("alive", slot, "t", 30, timeout=1)
        ddl.execute(f"ALTER FUNCTION {store.schema}.gone RENAME TO heartbeat_1".encode())
        looking = [in_thread(lambda: store.claim("alive", later, "t3", "r", timeout=10)) for _ in range(3)]
        wait_until(lambda: store._schema_lock.locked(), "a claim that looks at the schema")
        began = time.monotonic()
        assert store.heartbeat("alive", slot, "t", 30, timeout=1)
        assert store.finish("alive", slot, "t", "success", timeout=1)
        assert time.monotonic() - began < 0.5
        assert store._schema_lock.locked(), "that claim still waits"
        other.rollback()
    for thread, result in stuck + looking:
        thread.join(10)
        assert getattr(result[0], "outcome", None) in ("overlap", "won", "running"), result


@pytest.mark.system
def test_operations_take_one_round_trip(store: PostgresStore, url: str) -> None:
    """Counted by a proxy: one piece to the server, one back, for each operation on a warm connection."""
    slot = due(store)
    port = urlsplit(session_url()).port
    assert port is not None
    with Proxy(("127.0.0.1", port)) as proxy:
        counts = {"requests": 0, "answers": 0}

        def count(way: str) -> Callable[[bytes], bytes]:
            def note(data: bytes) -> bytes:
                counts[way] += 1
                return data

            return note

        own = PostgresStore(url.replace(f":{port}/", f":{proxy.port}/"))
        own.now()
        proxy.requests.rewrite, proxy.answers.rewrite = count("requests"), count("answers")
        operations: list[Callable[[], object]] = [
            lambda: own.claim("job", slot, "t", "r"),
            lambda: own.heartbeat("job", slot, "t", 30, "1"),
            lambda: own.release("job", slot, "t"),
            lambda: own.claim("job", slot, "t2", "r", takeover_of=1),
            lambda: own.finish("job", slot, "t2", "success"),
            lambda: own.get("job", slot),
            lambda: own.runs("job"),
            lambda: own.unfinished(["job"]),
            own.jobs,
            own.ping,
            lambda: own.purge("job"),
        ]
        for number, operation in enumerate(operations, 1):
            operation()
            assert counts == {"requests": number, "answers": number}
        assert proxy.accepted == 1
        own.close()


@pytest.mark.system
def test_conflicts_are_answered_by_sending_again(store: PostgresStore, url: str) -> None:
    """A role whose transactions are serializable: 40001 never reaches the caller of contended claims."""
    with psycopg.connect(session_url(), autocommit=True) as connection:
        role = f"strict_{os.getpid()}"
        connection.execute(f"CREATE ROLE {role} LOGIN SUPERUSER".encode())
        try:
            connection.execute(f"ALTER ROLE {role} SET default_transaction_isolation = 'serializable'".encode())
            strict = PostgresStore(url.replace("postgres@", f"{role}@"))
            slot = due(store)
            errors: list[object] = []

            def work(number: int) -> None:
                for n in range(25):
                    at, token = slot + timedelta(milliseconds=number * 25 + n), f"t{number}-{n}"
                    try:
                        assert strict.claim("job", at, token, "r", overlap="allow").outcome == "won"
                        assert strict.finish("job", at, token, "success")
                    except StoreError as error:
                        errors.append(error)

            threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            strict.close()
            assert len(errors) <= 2, errors  # five tries in a row may lose; what is left is the caller's to retry
            assert len(store.runs("job")) >= 73
        finally:
            connection.execute(f"DROP ROLE {role}".encode())


# ---- records that aren't ours ----------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize(
    "damage",
    [
        "status = 'napping'",
        "attempt = 0",
        "attempt = 9223372036854775807, lease_end_ms = 0",
        "fence = 9223372036854775807",
        "handovers = -1",
        "reason = 'because'",
        "lease_end_ms = 9223372036854775807, lease_ms = 9223372036854775807",
        "started_ms = 999999999999999999",
        "checkpoint = 'no json'",
        "checkpoint = repeat('[', 60000)",
        "checkpoint = repeat('1', 70000)",
        f"error = repeat('x', {ERROR_BYTES + 1})",
        "past = '{}'",
        "past = '[1, 2]'",
        "past = '[[1, \"r\", 0, 0, \"flew away\"]]'",
        "ended_ms = 5",
        "status = 'success'",
    ],
)
def test_a_malformed_record_stops_its_own_job_only(store: PostgresStore, damage: str) -> None:
    """With a permanent StoreError that names the job; never another exception, and other jobs go on."""
    slot = due(store)
    for job in ("bad", "good"):
        assert store.claim(job, slot, "t", "r").outcome == "won"
    with admin(store) as other:
        other.execute(f"UPDATE {store.schema}.runs SET {damage} WHERE job = 'bad'".encode())
    calls: list[Callable[[], object]] = [
        lambda: store.get("bad", slot),
        lambda: store.runs("bad"),
        lambda: store.unfinished(["bad", "good"]),
        lambda: store.claim("bad", slot, "t2", "r", takeover_of=1),
        lambda: store.claim("bad", slot + timedelta(seconds=1), "t3", "r"),
        lambda: store.heartbeat("bad", slot, "t", 30),
        lambda: store.finish("bad", slot, "t", "success"),
    ]
    found = []
    for call in calls:
        try:
            call()
        except StoreError as error:
            found.append(error)
    assert found, "nobody noticed"
    for error in found:
        assert (error.job, error.transient) == ("bad", False)
        assert "'bad'" in str(error)
    assert store.heartbeat("good", slot, "t", 30)
    assert store.finish("good", slot, "t", "success")
    assert store.claim("good", slot + timedelta(seconds=1), "t", "r").outcome == "won"


@pytest.mark.system
def test_a_trigger_that_raises_is_quoted(store: PostgresStore) -> None:
    """The server's words, cut, in a permanent error; nothing was changed."""
    slot = due(store)
    store.claim("job", slot, "t", "r")
    with admin(store) as other:
        other.execute(
            f"CREATE FUNCTION {store.schema}.no() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE 'not on my watch %', repeat('x', 9000); END $$; "
            f"CREATE TRIGGER no BEFORE UPDATE ON {store.schema}.runs EXECUTE FUNCTION {store.schema}.no()".encode()
        )
    with pytest.raises(StoreError, match="not on my watch") as caught:
        store.heartbeat("job", slot, "t", 30)
    assert (caught.value.transient, len(str(caught.value)) < 1500) == (False, True)


@pytest.mark.system
def test_emptied_tables_are_another_epoch(store: PostgresStore) -> None:
    """TRUNCATE: answers carry a new epoch, fences go on growing, nothing raises."""
    slot = due(store)
    first = store.claim("job", slot, "t1", "r")
    with admin(store) as other:
        other.execute(f"TRUNCATE {store.schema}.namespaces, {store.schema}.jobs, {store.schema}.runs".encode())
    assert not store.heartbeat("job", slot, "t1", 30)
    assert store.claim("job", slot, "t2", "r", takeover_of=1).outcome == "gone"
    again = store.claim("job", slot + timedelta(seconds=1), "t3", "r")
    assert again.outcome == "won"
    assert again.epoch != first.epoch
    assert again.run.fence > first.run.fence  # type: ignore[union-attr]


# ---- poolers and forks -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that only this module's pooler and forks talk to."""
    with postgres_server() as server:
        yield server


def prepared(bouncer: PgBouncer, pool: int) -> list[int]:
    """How many statements are prepared in each of the pooler's sessions; only a session itself can tell."""
    with ExitStack() as opened:
        asking = [opened.enter_context(psycopg.connect(bouncer.url(), prepare_threshold=None)) for _ in range(pool)]
        query = b"SELECT pg_backend_pid(), (SELECT count(*) FROM pg_prepared_statements)"
        counts = dict(connection.execute(query).fetchone() or (0, 0) for connection in asking)
        assert len(counts) == pool, "their transactions are open at once, so that each has a session to itself"
        return sorted(counts.values())


@pytest.mark.system
def test_a_statement_left_prepared_in_a_poolers_session_is_found(own_server: PostgresServer) -> None:
    """So that finding none means something."""
    with pgbouncer(own_server, pool=2) as bouncer:
        with psycopg.connect(bouncer.url(), autocommit=True, prepare_threshold=None) as other:
            other.execute("PREPARE left_behind AS SELECT 1")
        assert prepared(bouncer, 2) == [0, 1]


@pytest.mark.system
def test_effect_and_record_commit_together_through_pgbouncer(own_server: PostgresServer) -> None:
    """The store and the handlers' own connections go through one in transaction mode; nothing is left prepared."""
    with pgbouncer(own_server, pool=2) as bouncer:
        store = PostgresStore(bouncer.url(namespace="inside"))
        slot = due(store)
        own_server.sql("CREATE TABLE IF NOT EXISTS effects (token text)", "TRUNCATE effects")
        for n in range(12):  # more often than psycopg waits before it prepares a statement by itself
            job, commit = f"job{n}", n % 2 == 0
            assert store.claim(job, slot, f"t{n}", "r").outcome == "won"
            with psycopg.connect(bouncer.url(), prepare_threshold=None) as own:
                assert store.confirm(own, job, slot, f"t{n}")
                assert store.claim(job, slot, "other", "r", takeover_of=1).outcome == "running"
                own.execute("INSERT INTO effects VALUES (%s)", (f"t{n}",))
                assert store.finish_inside(own, job, slot, f"t{n}")
                if not commit:
                    own.rollback()
                    assert not store.confirm(own, job, slot, "other"), "another attempt's token"
            assert [run.status for run in store.runs(job)] == ["success" if commit else "running"]
        assert own_server.sql("SELECT count(*), count(DISTINCT token) FROM effects") == [(6, 6)]
        with psycopg.connect(bouncer.url()) as own:  # prepares what is executed often; leaselib's own it doesn't
            for _ in range(8):
                assert store.confirm(own, "job1", slot, "t1")
        assert prepared(bouncer, 2) == [0, 0]
        store.close()


@pytest.mark.system
def test_twenty_clients_share_two_sessions_behind_pgbouncer(own_server: PostgresServer) -> None:
    """Transaction mode: no prepared statement, setting, lock or open transaction is left for the next client."""
    with pgbouncer(own_server, pool=2) as bouncer:
        stores = [PostgresStore(bouncer.url(namespace="bouncer")) for _ in range(20)]
        slot = due(stores[0])

        def work(number: int) -> list[object]:
            own, found = stores[number], []
            for n in range(10):
                at, token = slot + timedelta(milliseconds=n), f"t{number}-{n}"
                found.append(own.claim("shared", at, token, "r", overlap="allow").outcome)
                assert own.claim(f"job{number}", at, token, "r", overlap="allow").outcome == "won"
                assert own.heartbeat(f"job{number}", at, token, 30, json.dumps("é"))
                assert own.finish(f"job{number}", at, token, "success")
            return found

        threads = [in_thread(lambda number=number: work(number)) for number in range(20)]
        outcomes: list[object] = []
        for thread, result in threads:
            thread.join(60)
            assert isinstance(result[0], list), result
            outcomes += result[0]
        assert outcomes.count("won") == 10
        state = own_server.sql(
            "SELECT (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'), "
            "(SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%')"
        )
        assert state == [(0, 0)]
        assert prepared(bouncer, 2) == [0, 0]
        with psycopg.connect(bouncer.url(), autocommit=True, prepare_threshold=None) as other:
            for setting, usual in (("lock_timeout", "0"), ("search_path", '"$user", public'), ("enable_seqscan", "on")):
                assert other.execute(f"SHOW {setting}".encode()).fetchone() == (usual,)
        for store in stores:
            store.close()


@pytest.mark.system
def test_pgbouncer_paused_and_restarted(own_server: PostgresServer) -> None:
    """PAUSE: the call ends at its deadline. Gone: transient. Back again: goes on, by itself."""
    with pgbouncer(own_server) as bouncer:
        store = PostgresStore(bouncer.url(namespace="paused"))
        slot = due(store)
        assert store.claim("job", slot, "t", "r").outcome == "won"
        bouncer.console("PAUSE")
        began = time.monotonic()
        with pytest.raises(StoreError, match="no answer") as caught:
            store.heartbeat("job", slot, "t", 30, timeout=0.5)
        assert 0.4 < time.monotonic() - began < 1.5
        assert caught.value.transient
        bouncer.console("RESUME")
        assert store.heartbeat("job", slot, "t", 30)
        bouncer.stop()
        with pytest.raises(StoreError) as caught:
            store.heartbeat("job", slot, "t", 30, timeout=1)
        assert caught.value.transient
        bouncer.start()
        assert store.finish("job", slot, "t", "success")
        store.close()


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_children_of_forks_leave_the_parents_connections_alone(own_server: PostgresServer) -> None:
    """Forked under load, they use sessions of their own, and end in every way; the parent's go on without an error."""
    store = PostgresStore(own_server.url(namespace="fork"))
    slot = due(store)
    assert store.claim("job", slot, "t", "r").outcome == "won"
    parents = {row[0] for row in own_server.sql("SELECT pid FROM pg_stat_activity WHERE application_name = 'leaselib'")}
    done = threading.Event()

    def beat() -> int:
        count = 0
        while not done.is_set():
            assert store.heartbeat("job", slot, "t", 30)
            count += 1
        return count

    threads = [in_thread(beat) for _ in range(3)]
    for n in range(40):
        pid = os.fork()
        if pid == 0:
            try:
                inherited = store._pool._idle
                good = not inherited and store.heartbeat("job", slot, "t", 30) and store.now() is not None
                if n % 3 == 0:
                    store.close()
                os._exit(0 if good else 1)
            except BaseException:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    done.set()
    for thread, result in threads:
        thread.join(20)
        assert isinstance(result[0], int), result
        assert result[0] > 20
    alive = {row[0] for row in own_server.sql("SELECT pid FROM pg_stat_activity WHERE application_name = 'leaselib'")}
    assert parents <= alive
    assert store.finish("job", slot, "t", "success")
    store.close()


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_holds_no_socket_of_its_parent(own_server: PostgresServer) -> None:
    """When the parent hangs up, the server sees it, though the child lives on."""
    store = PostgresStore(own_server.url(namespace="fork2", application_name="forking"))
    store.now()
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'forking'"
    assert own_server.sql(sessions) == [(1,)]
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        fd = store._pool._idle[0]._pgconn.socket
        os.close(os.dup(fd))
        store._pool._idle.clear()
        (connection,) = store._pool._open
        socket.socket(fileno=os.dup(connection._pgconn.socket)).close()
        store.close()
        os.close(connection._pgconn.socket)  # without libpq's goodbye, as if the parent was killed
        wait_until(lambda: own_server.sql(sessions) == [(0,)], "the server to notice", 10)
    finally:
        os.close(writing)
        os.waitpid(pid, 0)
        os.close(reading)
        null = os.open(os.devnull, os.O_RDWR)
        assert null == fd  # what was closed by hand gets its number back before libpq closes it
        connection.close()


def test_shares_of_a_deadline_add_up() -> None:
    """Three hosts in two seconds: none gets more than its share of what is left."""
    deadline = Deadline(2)
    assert 0.6 < deadline.share(3).left() <= 0.667
    assert deadline.share(1, 0.5).left() <= 0.5
    assert 1.9 < deadline.left() <= 2
    assert to_ms(datetime.fromisoformat("1970-01-01T00:00:01+00:00")) == 1000
