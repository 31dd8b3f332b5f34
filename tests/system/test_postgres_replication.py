"""Streaming replicas: a promoted standby takes over, and with a synchronous one no acknowledged claim is lost.

For a store alone, and for the jobs of a scheduler.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import datetime, timedelta

import pytest
from fix_servers_postgres import Heard, PostgresServer, need_binaries, postgres_server, server_folder, wait_until

from leaselib import Every, Scheduler
from leaselib.errors import StoreError
from leaselib.stores._postgres import PostgresStore

pytestmark = pytest.mark.system
PRIMARY = {"wal_level": "replica", "max_wal_senders": "5", "hot_standby": "on"}


@pytest.fixture
def pair() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """A primary, and a replica of it that streams."""
    assert need_binaries()
    with ExitStack() as opened:
        primary = opened.enter_context(postgres_server(options=PRIMARY))
        PostgresStore(primary.url()).create_schema()
        folder = opened.enter_context(server_folder())
        replica = primary.base_backup(folder, "standby1")
        replica.start()
        opened.callback(replica.kill)
        streams = "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"
        wait_until(lambda: primary.sql(streams), "the replica to stream")
        yield primary, replica


def both_url(primary: PostgresServer, replica: PostgresServer, **parameters: str) -> str:
    """A URL that names both; only one that takes writes will do."""
    query = "&".join(f"{name}={value}" for name, value in parameters.items())
    hosts = f"127.0.0.1:{primary.port},127.0.0.1:{replica.port}"
    return f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write&{query}"


def make_synchronous(primary: PostgresServer, commit: str = "on") -> None:
    """Every commit waits for the standby from now on; `off` is what the role's sessions would have by themselves."""
    primary.sql(
        "ALTER SYSTEM SET synchronous_standby_names = 'standby1'",
        f"ALTER SYSTEM SET synchronous_commit = '{commit}'",
        "SELECT pg_reload_conf()",
    )
    wait_until(
        lambda: primary.sql("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"), "the replica to be in sync"
    )


def due(store: PostgresStore) -> datetime:
    """A slot that is due now."""
    return store.now().replace(microsecond=0)


def until_answered(store: PostgresStore, job: str, slot: datetime, token: str) -> object:
    """Sends a claim until it is answered."""
    end, pause = time.monotonic() + 20, threading.Event()
    while True:
        with suppress(StoreError):
            return store.claim(job, slot, token, "r", overlap="allow", timeout=1)
        assert time.monotonic() < end, "no answer"
        pause.wait(0.05)


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_jobs_go_on_at_a_promoted_replica(pair: tuple[PostgresServer, PostgresServer], fault: str) -> None:
    """The URL names both hosts: the first one dies, or says nothing any more, and the second becomes the primary."""
    primary, replica = pair
    store = PostgresStore(both_url(primary, replica))
    slot = due(store)
    assert store.claim("job", slot, "t", "r").outcome == "won"
    here = primary.sql("SELECT pg_current_wal_lsn()")[0][0]
    wait_until(lambda: replica.sql(f"SELECT pg_last_wal_replay_lsn() >= '{here}'")[0][0], "the replica to catch up")
    if fault == "killed":
        primary.kill()
    else:
        primary.freeze()
    with pytest.raises(StoreError) as caught:
        store.heartbeat("job", slot, "t", 30, timeout=1)
    assert caught.value.transient
    replica.promote()
    assert store.heartbeat("job", slot, "t", 30, timeout=4)
    began = time.monotonic()
    assert store.finish("job", slot, "t", "success", timeout=1)
    assert store.claim("job", slot + timedelta(seconds=1), "t2", "r", timeout=1).outcome == "won"
    assert time.monotonic() - began < 1, "the host that answered is asked first"
    store.close()


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_a_schedulers_jobs_go_on_at_a_promoted_replica(
    pair: tuple[PostgresServer, PostgresServer], fault: str
) -> None:
    """One store_error, one store_ok, and slots after them run; no slot ever runs twice."""
    primary, replica = pair
    make_synchronous(primary)
    heard = Heard()
    store = PostgresStore(both_url(primary, replica))
    scheduler = Scheduler(store, lease=6, heartbeat=0.5, catch_up=0, jitter=0, max_late=30)
    for name in ("start", "success", "store_error", "store_ok"):
        scheduler.on(name, heard.add)
    scheduler.add(lambda ctx: ctx.check(), Every(seconds=0.5), name="job")
    with scheduler:
        heard.wait(lambda: heard.count("success") >= 2)
        if fault == "killed":
            primary.kill()
        else:
            primary.freeze()
        heard.wait(lambda: heard.count("store_error") == 1)
        replica.promote()
        replica.sql("ALTER SYSTEM SET synchronous_standby_names = ''", "SELECT pg_reload_conf()")
        heard.wait(lambda: heard.count("store_ok") == 1)
        before = heard.count("success")
        heard.wait(lambda: heard.count("success") >= before + 3)
    store.close()
    assert (heard.count("store_error"), heard.count("store_ok")) == (1, 1)
    slots = [event.slot for event in heard.events if event.name == "success"]
    assert len(slots) == len(set(slots))


def test_a_standby_alone_is_no_place_for_claims(pair: tuple[PostgresServer, PostgresServer]) -> None:
    """A URL that names only it, without target_session_attrs: reads work, a claim is transient, and says what to do."""
    _, replica = pair
    store = PostgresStore(replica.url())
    assert store.jobs() == []
    with pytest.raises(StoreError, match="target_session_attrs=read-write") as caught:
        store.claim("job", datetime.fromisoformat("2026-01-01T00:00:00+00:00"), "t", "r")
    assert caught.value.transient
    store.close()


def test_with_remote_apply_no_acknowledged_claim_is_lost(pair: tuple[PostgresServer, PostgresServer]) -> None:
    """Claims under load, the primary killed at once, the replica promoted: each `won` is there, at once, too."""
    primary, replica = pair
    make_synchronous(primary, "remote_apply")
    store = PostgresStore(both_url(primary, replica))
    slot, done = due(store), threading.Event()
    won: list[tuple[datetime, str]] = []

    def load(number: int) -> None:
        for n in itertools.count():
            if done.is_set():
                return
            at, token = slot + timedelta(milliseconds=n), f"t{number}-{n}"
            with suppress(StoreError):
                if store.claim(f"job{number}", at, token, "r", overlap="allow", timeout=1).outcome == "won":
                    won.append((at, token))

    threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(won) > 300, "some claims")
    primary.kill()
    before = list(won)
    replica.promote()
    replica.sql("ALTER SYSTEM SET synchronous_standby_names = ''", "SELECT pg_reload_conf()")
    wait_until(lambda: len(won) > len(before) + 50, "claims to go on")
    done.set()
    for thread in threads:
        thread.join(10)
    stored = {run.token for number in range(3) for run in store.runs(f"job{number}", limit=10**6)}
    lost = [token for _, token in won if token not in stored]
    assert not lost, f"{len(lost)} of {len(won)} acknowledged claims are gone"
    store.close()


def test_nothing_is_acknowledged_while_the_standby_is_frozen(pair: tuple[PostgresServer, PostgresServer]) -> None:
    """Not by the first send, nor by sending it again: the repeated answer waits for the standby too, though the row is
    here; also where the sessions' own setting is not to wait at all. No query is cancelled."""
    primary, replica = pair
    make_synchronous(primary, "off")
    store = PostgresStore(primary.url())
    slot = due(store)
    for job in ("finish", "release", "beat"):
        assert store.claim(job, slot, "t", "r").outcome == "won"
    replica.freeze()
    calls = [
        lambda: store.claim("claim", slot, "t", "r", timeout=0.4),
        lambda: store.heartbeat("beat", slot, "t", 30, timeout=0.4),
        lambda: store.finish("finish", slot, "t", "success", timeout=0.4),
        lambda: store.release("release", slot, "t", timeout=0.4),
    ]
    try:
        for call in calls:
            for sent in ("once", "again", "after its session was ended"):
                began = time.monotonic()
                with pytest.raises(StoreError, match=r"isn't known|lock") as caught:
                    call()  # type: ignore[operator]
                assert caught.value.transient, sent
                assert time.monotonic() - began < 1
                # Ends the wait of whoever still waits: the row is visible on the primary from now on.
                primary.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        assert primary.sql("SELECT status FROM leaselib.runs WHERE job = 'finish'") == [("success",)]
    finally:
        replica.thaw()
    wait_until(lambda: primary.sql("SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"), "it to stream again")
    answer = until_answered(store, "claim", slot, "t")
    assert (answer.outcome, answer.run.attempt) == ("won", 1)  # type: ignore[attr-defined]
    assert store.finish("finish", slot, "t", "success")
    assert store.release("release", slot, "t")
    store.close()


def test_a_wait_that_somebody_cancels_is_no_success(pair: tuple[PostgresServer, PostgresServer]) -> None:
    """pg_cancel_backend during the wait for the standby: the server reports success with a warning; we don't."""
    primary, replica = pair
    make_synchronous(primary)
    store = PostgresStore(primary.url())
    slot = due(store)
    assert store.claim("job", slot, "t", "r").outcome == "won"
    replica.freeze()
    result: list[object] = []

    def beat() -> None:
        try:
            result.append(store.heartbeat("job", slot, "t", 30, timeout=20))
        except StoreError as error:
            result.append(error)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        waiting = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        wait_until(lambda: primary.sql(f"SELECT 1 {waiting}"), "the heartbeat to wait for the standby")
        (pid,) = primary.sql(f"SELECT pid {waiting}")[0]
        os.kill(pid, signal.SIGINT)  # what pg_cancel_backend does
        thread.join(10)
    finally:
        replica.thaw()
    (error,) = result
    assert isinstance(error, StoreError), error
    assert error.transient
    assert "synchronous standby was cancelled" in str(error)
    assert store.heartbeat("job", slot, "t", 30)
    store.close()
