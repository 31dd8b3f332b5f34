"""PostgresStore when its server is killed, frozen, read-only or full, and when the way to it is bad."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta

import psycopg
import pytest
from fix_proxy import Proxy
from fix_servers_postgres import Heard, PostgresServer, postgres_server, wait_until

from leaselib import Every, Scheduler
from leaselib.errors import StoreError
from leaselib.stores._postgres import PostgresStore

pytestmark = pytest.mark.system
numbers = itertools.count(1)
LATE_S = 0.6
"""So much later than its time-out may a call return on a machine with other load."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that these tests harm in turn; each leaves it running."""
    with postgres_server(options={"superuser_reserved_connections": "3", "log_min_messages": "fatal"}) as own:
        yield own


@pytest.fixture
def store(server: PostgresServer) -> Iterator[PostgresStore]:
    """A store in a namespace of its own, with a warm connection."""
    own = PostgresStore(server.url(namespace=f"n{next(numbers)}"))
    own.now()
    yield own
    own.close()


@pytest.fixture
def proxy(server: PostgresServer) -> Iterator[Proxy]:
    """A proxy in front of the server."""
    with Proxy(("127.0.0.1", server.port)) as own:
        yield own


def through(proxy: Proxy, namespace: str | None = None) -> PostgresStore:
    """A store behind the proxy."""
    name = f"n{next(numbers)}" if namespace is None else namespace
    return PostgresStore(f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?namespace={name}")


def due(store: PostgresStore) -> datetime:
    """A slot that is due now."""
    return store.now().replace(microsecond=0)


def until_done(call: Callable[[], object], timeout: float = 20.0) -> tuple[object, list[StoreError]]:
    """Sends the same again until it is answered, as an instance does; the answer, and the errors on the way."""
    errors: list[StoreError] = []
    end, pause = time.monotonic() + timeout, threading.Event()
    while True:
        try:
            return call(), errors
        except StoreError as error:
            errors.append(error)
        assert errors[-1].transient, errors[-1]
        assert time.monotonic() < end, errors[-1]
        pause.wait(0.05)


def ends_in_time(call: Callable[[], object], timeout: float) -> StoreError:
    """A call that must fail for now, at its time-out and no later."""
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        call()
    took = time.monotonic() - began
    assert took < timeout + LATE_S, f"{took:.2f} s instead of {timeout}"
    assert caught.value.transient, caught.value
    return caught.value


# ---- the server ------------------------------------------------------------------------------------------------------


def test_a_killed_server_comes_back_with_all_that_it_acknowledged(server: PostgresServer, store: PostgresStore) -> None:
    """kill -9 of all its processes under load: what was won is there, and the same finish gets through later."""
    slot = due(store)
    assert store.claim("job", slot, "t", "r").outcome == "won"
    done, won = threading.Event(), []

    def load() -> None:
        for n in itertools.count():
            if done.is_set():
                return
            with suppress(StoreError):
                token = f"t{n}"
                at = slot + timedelta(milliseconds=n)
                if store.claim("load", at, token, "r", overlap="allow", timeout=1).outcome == "won":
                    won.append((at, token))

    thread = threading.Thread(target=load)
    thread.start()
    wait_until(lambda: len(won) > 50, "some claims")
    server.kill()
    assert ends_in_time(lambda: store.heartbeat("job", slot, "t", 30, timeout=1), 1)
    server.start()
    finished, errors = until_done(lambda: store.finish("job", slot, "t", "success"))
    assert (finished, errors) == (True, [])
    done.set()
    thread.join(10)
    stored = {run.slot: run.token for run in store.runs("load", limit=100_000)}
    lost = [pair for pair in won if stored.get(pair[0]) != pair[1]]
    assert not lost, f"{len(lost)} of {len(won)} acknowledged claims are gone"


def test_a_frozen_server_holds_no_call_beyond_its_time_out(server: PostgresServer, store: PostgresStore) -> None:
    """Warm connections, new ones, and the schema's creation; afterwards each is answered as if sent once."""
    slot = due(store)
    won = store.claim("job", slot, "t", "r", lease=1)
    fresh = PostgresStore(server.url(namespace="fresh"))
    server.freeze()
    try:
        calls: list[Callable[[float], object]] = [
            lambda t: store.heartbeat("job", slot, "t", 30, timeout=t),
            lambda t: store.claim("job2", slot, "t2", "r", timeout=t),
            lambda t: fresh.now(timeout=t),
            lambda t: fresh.create_schema(timeout=t),
            lambda t: store.runs("job", timeout=t),
        ]
        for call in calls:
            for timeout in (0.05, 0.4):
                error = ends_in_time(lambda call=call, timeout=timeout: call(timeout), timeout)
                assert "within" in str(error)
        assert not store._pool._open, "a connection that timed out is closed"
    finally:
        server.thaw()
    assert store.claim("job2", slot, "t2", "r").outcome == "won"
    again = store.claim("job", slot, "t", "r", lease=1)
    assert (again.outcome, again.run.attempt) == ("won", 1)  # type: ignore[union-attr]
    assert again.run.fence == won.run.fence  # type: ignore[union-attr]


def test_a_frozen_backend_takes_only_its_own_connection(server: PostgresServer, store: PostgresStore) -> None:
    """One session is stopped while it works: its caller gets away, the next call goes over another."""
    slot = due(store)
    store.claim("job", slot, "t", "r")
    (connection,) = store._pool._idle
    pid = connection._pgconn.backend_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        ends_in_time(lambda: store.heartbeat("job", slot, "t", 30, timeout=0.3), 0.3)
        assert store.heartbeat("job", slot, "t", 30, timeout=2)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_ended_idle_sessions_are_not_even_noticed(server: PostgresServer, store: PostgresStore) -> None:
    """pg_terminate_backend on all: a connection that was hung up is replaced before it is used."""
    slot = due(store)
    assert store.claim("job", slot, "t", "r").outcome == "won"
    for _ in range(5):
        terminate(server)
        assert store.heartbeat("job", slot, "t", 30)
    assert all(connection.usable() for connection in store._pool._idle)


def terminate(server: PostgresServer) -> int:
    """Ends every session of leaselib's, and waits until they are gone."""
    query = "FROM pg_stat_activity WHERE application_name = 'leaselib'"
    pids = server.sql(f"SELECT pid, pg_terminate_backend(pid) {query}")
    gone = " OR ".join(f"pid = {pid}" for pid, _ in pids) or "false"
    wait_until(lambda: not server.sql(f"SELECT 1 FROM pg_stat_activity WHERE {gone}"), "the sessions to end")
    return len(pids)


def one_life(store: PostgresStore, job: str, slot: datetime, token: str) -> None:
    """Claim, heartbeat and finish of a run, each sent until it is answered."""
    answer, _ = until_done(lambda: store.claim(job, slot, token, "r"))
    assert (answer.outcome, answer.run.attempt) == ("won", 1)  # type: ignore[attr-defined]
    assert until_done(lambda: store.heartbeat(job, slot, token, 30))[0]
    assert until_done(lambda: store.finish(job, slot, token, "success"))[0]


def test_sessions_ended_in_mid_run_and_in_mid_commit_lose_nothing(server: PostgresServer, store: PostgresStore) -> None:
    """Again and again under load: each life is carried through by sending the same, and happened once."""
    slot, done = due(store), threading.Event()
    lives: list[int] = [0, 0, 0]
    failures: list[BaseException] = []

    def live(number: int) -> None:
        try:
            while not done.is_set():
                one_life(store, f"job{number}", slot + timedelta(milliseconds=lives[number]), f"t{lives[number]}")
                lives[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=live, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    ended = 0
    while ended < 60 and not failures:
        ended += terminate(server)
        before = sum(lives)
        wait_until(lambda before=before: failures or sum(lives) > before + 3, "lives to go on")
    done.set()
    for thread in threads:
        thread.join(30)
    assert not failures, failures
    for number, count in enumerate(lives):
        runs = store.runs(f"job{number}", limit=100_000)
        assert {(run.status, run.attempt) for run in runs} == {("success", 1)}
        assert len(runs) >= count


def test_a_schedulers_jobs_go_on_after_every_session_was_ended(server: PostgresServer, store: PostgresStore) -> None:
    """In the middle of a claim: one store_error, one store_ok, the slot that it was about and the next ones run."""
    heard = Heard()
    scheduler = Scheduler(store, lease=6, heartbeat=0.5, catch_up=0, jitter=0, max_late=30)
    for name in ("start", "success", "failed", "lost", "store_error", "store_ok"):
        scheduler.on(name, heard.add)
    scheduler.add(lambda ctx: ctx.check(), Every(seconds=1), name="job")
    with scheduler:
        heard.wait(lambda: heard.count("success") >= 1)
        with server.admin() as other, other.transaction():
            other.execute("SELECT FROM leaselib.jobs WHERE namespace = %s FOR UPDATE", (store.namespace,))
            waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%claim_1%'"
            wait_until(lambda: server.sql(waiting), "a claim that is under way")
            held = max(event.slot for event in heard.events if event.slot is not None)
            terminate(server)
        heard.wait(lambda: heard.count("store_ok") == 1)
        before = heard.count("success")
        heard.wait(lambda: heard.count("success") >= before + 2)
    assert (heard.count("store_error"), heard.count("store_ok")) == (1, 1)
    assert (heard.count("failed"), heard.count("lost")) == (0, 0)
    slots = [event.slot for event in heard.events if event.name == "success"]
    assert len(slots) == len(set(slots))
    assert held + timedelta(seconds=1) in slots, "the slot whose claim was cut off"


def test_sessions_ended_between_two_slots_are_not_told(server: PostgresServer, store: PostgresStore) -> None:
    """A pool of ended sessions is no trouble with the store."""
    heard = Heard()
    scheduler = Scheduler(store, catch_up=0, jitter=0)
    for name in ("success", "store_error"):
        scheduler.on(name, heard.add)
    scheduler.add(lambda ctx: ctx.check(), Every(days=300), name="job")
    with scheduler:
        # Until the last call of the start was answered: its session must not be ended in the middle of it.
        wait_until(lambda: scheduler.health().clock_offset is not None and store._pool._idle, "an idle session")
        terminate(server)
        assert scheduler.run_now("job") == "won"
        heard.wait(lambda: heard.count("success") == 1)
    assert heard.count("store_error") == 0


def test_a_read_only_server_is_waited_for(server: PostgresServer, store: PostgresStore) -> None:
    """Restarted with default_transaction_read_only: transient, reads go on; then as if nothing had been."""
    slot = due(store)
    assert store.claim("job", slot, "t", "r").outcome == "won"
    server.stop()
    server.options["default_transaction_read_only"] = "on"
    server.start()
    try:
        for call in (
            lambda: store.heartbeat("job", slot, "t", 30),
            lambda: store.claim("job", slot + timedelta(seconds=1), "t2", "r", overlap="allow"),
            lambda: store.finish("job", slot, "t", "success"),
        ):
            with pytest.raises(StoreError, match=r"25006.*target_session_attrs") as caught:
                call()  # type: ignore[operator]
            assert caught.value.transient
            assert not store._pool._idle, "a connection to a demoted server isn't kept"
        assert [run.token for run in store.unfinished(["job"])] == ["t"]
    finally:
        server.stop()
        server.options["default_transaction_read_only"] = "off"
        server.start()
    assert store.finish("job", slot, "t", "success")


def test_a_full_server_is_asked_once_a_second(server: PostgresServer) -> None:
    """By all threads together, once it has said so. Transient, and over when there is a connection again."""
    server.sql(
        "DROP ROLE IF EXISTS plain",
        "CREATE ROLE plain LOGIN",
        "GRANT ALL ON SCHEMA leaselib TO plain",
        "GRANT ALL ON ALL TABLES IN SCHEMA leaselib TO plain",
        "GRANT ALL ON ALL FUNCTIONS IN SCHEMA leaselib TO plain",
    )
    own = PostgresStore(server.url("plain", namespace=f"n{next(numbers)}"))
    others = []
    with suppress(psycopg.OperationalError):
        while True:
            others.append(psycopg.connect(server.url("plain")))
    log = server.folder / "postgres.log"
    pause, enough = threading.Event(), threading.Event()
    errors: list[StoreError] = []
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            with pytest.raises(StoreError, match=r"53300.*max_connections") as caught:
                own.now(timeout=1)
            errors.append(caught.value)
        except BaseException as failure:
            failures.append(failure)

    def keep_asking() -> None:
        while not enough.is_set() and not failures:
            ask()
            pause.wait(0.01)

    ask()
    before = log.read_text(errors="replace").count("FATAL:")
    began = time.monotonic()
    threads = [threading.Thread(target=keep_asking) for _ in range(20)]
    for thread in threads:
        thread.start()
    pause.wait(3.5)  # the very thing that is measured: how often it is asked in that time
    enough.set()
    for thread in threads:
        thread.join(10)
    took = time.monotonic() - began
    asked = log.read_text(errors="replace").count("FATAL:") - before
    assert not failures, failures
    assert len(errors) > 200
    assert all(error.transient for error in errors)
    assert 2 <= asked <= 2 * (took + 1), f"{asked} refusals in {took:.1f} s"  # with and without TLS
    for connection in others:
        connection.close()
    assert until_done(own.now)[0]
    own.close()


def test_a_deadlock_is_sent_again_at_once(server: PostgresServer, store: PostgresStore) -> None:
    """Somebody locks run and job the other way round: whoever the server picks, the claim comes through."""
    slot = due(store)
    answers: list[object] = []
    for n in range(4):
        job = f"job{n}"
        assert store.claim(job, slot, "t", "r").outcome == "won"
        with server.admin() as other, other.transaction():
            other.execute("SET LOCAL deadlock_timeout = '10s'")  # so that the claim is the one that looks, and loses
            other.execute("SELECT FROM leaselib.runs WHERE job = %s FOR UPDATE", (job,))
            thread = threading.Thread(target=lambda job=job: answers.append(store.claim(job, slot, "t", "r")))
            thread.start()
            waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%claim_1%'"
            wait_until(lambda waiting=waiting: server.sql(waiting), "the claim to wait")
            other.execute("SELECT FROM leaselib.jobs WHERE job = %s FOR UPDATE", (job,))
        thread.join(20)
    assert [answer.outcome for answer in answers] == ["won"] * 4  # type: ignore[attr-defined]


# ---- the way to it ---------------------------------------------------------------------------------------------------


def test_an_answer_that_is_lost_changes_nothing(proxy: Proxy) -> None:
    """Each operation once: the server did it, the caller never learnt; sent again, it is answered as the first time."""
    store = through(proxy)
    slot = due(store)
    lost: list[object] = []

    def twice(call: Callable[[], object]) -> object:
        proxy.drop_answer()
        error = None
        try:
            call()
        except StoreError as caught:
            error = caught
        assert error is not None
        assert error.transient
        assert "isn't known" in str(error)
        lost.append(error)
        return call()

    first = twice(lambda: store.claim("job", slot, "t1", "r"))
    assert (first.outcome, first.run.attempt) == ("won", 1)  # type: ignore[attr-defined]
    assert twice(lambda: store.heartbeat("job", slot, "t1", 30, "[1]")) is True
    assert twice(lambda: store.release("job", slot, "t1")) is True
    second = twice(lambda: store.claim("job", slot, "t2", "r", takeover_of=1))
    assert (second.outcome, second.run.attempt, second.run.handovers) == ("won", 2, 1)  # type: ignore[attr-defined]
    assert twice(lambda: store.finish("job", slot, "t2", "failed", "why")) is True
    assert twice(lambda: store.purge("job")) == 0, "the first one had purged it"
    assert len(lost) == 6
    store.close()


def test_a_connection_cut_at_any_byte_is_an_unknown_outcome(proxy: Proxy) -> None:
    """Of a claim's question and of its answer: the same token again is won, with the same fence, once."""
    store = through(proxy)
    slot = due(store)
    for n, (cut, at) in enumerate(
        [(proxy.cut_request_after, at) for at in range(1, 900, 75)]
        + [(proxy.cut_answer_after, at) for at in range(1, 1200, 75)]
    ):
        job = f"job{n}"
        cut(at)
        with suppress(StoreError):
            store.claim(job, slot, "t", "r", timeout=3)
        answer, _ = until_done(lambda job=job: store.claim(job, slot, "t", "r", timeout=3))
        assert (answer.outcome, answer.run.attempt) == ("won", 1)  # type: ignore[attr-defined]
        proxy.cut_request_after(10**9)
        proxy.cut_answer_after(10**9)
    store.close()


def test_a_dead_way_ends_at_the_time_out_and_is_forgotten(proxy: Proxy) -> None:
    """Nothing gets through, nothing is closed; a connect that is never answered counts the same."""
    store = through(proxy)
    slot = due(store)
    proxy.hold()
    ends_in_time(lambda: store.claim("job", slot, "t", "r", timeout=0.3), 0.3)
    ends_in_time(lambda: store.claim("job", slot, "t", "r", timeout=0.3), 0.3)
    proxy.go_on()
    answer, _ = until_done(lambda: store.claim("job", slot, "t", "r"))
    assert (answer.outcome, answer.run.attempt) == ("won", 1)  # type: ignore[attr-defined]
    store.close()


def test_bytes_that_trickle_in_do_not_prolong_a_call(proxy: Proxy) -> None:
    """The deadline is the whole operation's, not each read's."""
    store = through(proxy)
    slot = due(store)
    proxy.answers.slice_size, proxy.answers.slice_pause = 1, 0.02
    ends_in_time(lambda: store.claim("job", slot, "t", "r", timeout=0.5), 0.5)
    proxy.answers.slice_size, proxy.answers.slice_pause = 0, 0.0
    assert store.claim("job", slot, "t", "r").outcome == "won"
    store.close()


def test_a_request_that_travelled_for_long_is_judged_when_it_arrives(proxy: Proxy, server: PostgresServer) -> None:
    """Held until its run was released, taken over and finished by others: it changes nothing."""
    namespace = f"n{next(numbers)}"
    slow, quick = through(proxy, namespace), PostgresStore(server.url(namespace=namespace))
    slot = due(slow)
    assert slow.claim("job", slot, "t1", "r").outcome == "won"
    proxy.hold()
    for call in (
        lambda: slow.heartbeat("job", slot, "t1", 3000, timeout=0.1),
        lambda: slow.claim("job", slot, "t1", "r", timeout=0.1),
    ):
        with pytest.raises(StoreError):
            call()
    assert quick.release("job", slot, "t1")
    assert quick.claim("job", slot, "t2", "r2", takeover_of=1, lease=30).outcome == "won"
    before = quick.get("job", slot)
    proxy.go_on()
    assert until_done(lambda: slow.heartbeat("job", slot, "t1", 3000))[0] is False
    assert quick.get("job", slot) == before
    assert quick.finish("job", slot, "t2", "success")
    slow.close()
    quick.close()


def test_rubbish_for_an_answer_is_an_unknown_outcome(proxy: Proxy) -> None:
    """Flipped bytes: a StoreError within the time-out, whatever they are, and the connection isn't used again."""
    store = through(proxy)
    slot = due(store)
    for n in range(0, 60, 3):
        proxy.answers.rewrite = lambda data, n=n: bytes(b ^ (0x55 if i % 60 == n else 0) for i, b in enumerate(data))
        began = time.monotonic()
        with suppress(StoreError):
            store.claim(f"job{n}", slot, "t", "r", timeout=0.4)
        assert time.monotonic() - began < 0.4 + LATE_S
        proxy.answers.rewrite = None
        answer, _ = until_done(lambda n=n: store.claim(f"job{n}", slot, "t", "r"))
        assert answer.outcome == "won"  # type: ignore[attr-defined]
    store.close()


def test_an_answer_to_another_question_is_not_believed(proxy: Proxy) -> None:
    """The token in an answer must be the one that was sent."""
    store = through(proxy)
    slot = due(store)
    proxy.answers.rewrite = lambda data: data.replace(b"token-a", b"token-b")
    with pytest.raises(StoreError, match="another question") as caught:
        store.claim("job", slot, "token-a", "r")
    assert caught.value.transient
    proxy.answers.rewrite = None
    assert store.claim("job", slot, "token-a", "r").outcome == "won"
    store.close()
