"""What one call of a RedisStore costs and keeps to: one round trip, constant work, its time-out, its connection."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from fix_proxy import Proxy
from fix_servers_redis import LABELS, RedisServer, program, wait_until

from leaselib._model import ClaimAnswer
from leaselib.errors import StoreError
from leaselib.stores._redis import RedisStore
from leaselib.stores._redis_codec import script

pytestmark = pytest.mark.system
_tokens = (f"token-{n}" for n in itertools.count())
RUBBISH = (
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"*9999999\r\n",
    b"$-5\r\n",
    b"\xff" * 50,
    b"+OK\r\n",
    b":1\r\n",
    b"*0\r\n",
    b"*1\r\n$1\r\nx\r\n",
    b"*2\r\n$-1\r\n$-1\r\n",
)
SLACK_S = 0.4
"""So much later than its time-out may a call return on a busy machine."""


@pytest.fixture(scope="module", params=LABELS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of each program, for this module."""
    with RedisServer(program=program(request.param)) as it:
        yield it


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    """A store on the emptied server."""
    server.client().flushall()
    it = RedisStore(server.url())
    yield it
    it.close()


def due(store: RedisStore, seconds: float = 0.0) -> datetime:
    """The whole second on the server's clock, or so many after it."""
    return store.now().replace(microsecond=0) + timedelta(seconds=seconds)


def claim(store: RedisStore, slot: datetime, job: str = "job", **options: Any) -> ClaimAnswer:
    """A claim with a token of its own."""
    return store.claim(job, slot, options.pop("token", None) or next(_tokens), "runner", **options)


def every_operation(store: RedisStore) -> dict[str, Callable[[], Any]]:
    """One call of each operation, in an order in which each has something to do."""
    slot = due(store)
    return {
        "claim": lambda: store.claim("job", slot, "t1", "runner"),
        "won again": lambda: store.claim("job", slot, "t1", "runner"),
        "heartbeat": lambda: store.heartbeat("job", slot, "t1", 30, '{"page": 1}'),
        "get": lambda: store.get("job", slot),
        "unfinished": lambda: store.unfinished([f"job-{n}" for n in range(50)] + ["job"]),
        "release": lambda: store.release("job", slot, "t1"),
        "takeover": lambda: store.claim("job", slot, "t2", "runner", takeover_of=1),
        "finish": lambda: store.finish("job", slot, "t2", "failed", "no disk"),
        "runs": lambda: store.runs("job"),
        "jobs": store.jobs,
        "ping": store.ping,
        "purge": lambda: store.purge("job"),
    }


def test_each_operation_is_one_command_and_one_round_trip(server: RedisServer, store: RedisStore) -> None:
    """MONITOR shows what clients send; commands that a script runs are marked as the script's."""
    for operation in every_operation(store).values():
        operation()  # from now on the server has the scripts
    server.client().flushall()
    operations = every_operation(store)
    admin = server.client()
    with server.client().monitor() as monitor:
        for name, operation in operations.items():
            result = operation()
            admin.echo(f"after {name}")
            sent = []
            for command in monitor.listen():
                if command["command"] == f"ECHO after {name}":
                    break
                if command["client_type"] != "lua":
                    sent.append(command["command"].split()[0])
            assert [word for word in sent if word not in ("CLIENT", "HELLO")] == ["EVALSHA"], name
            assert result not in (None, False, []), name
    admin.close()


def test_a_warm_call_is_one_piece_each_way(server: RedisServer) -> None:
    """Seen on the wire: one request goes out, one answer comes back, on one connection."""
    server.client().flushall()
    pieces: list[str] = []

    def note(way: str) -> Callable[[bytes], bytes]:
        def rewrite(data: bytes) -> bytes:
            pieces.append(way)
            return data

        return rewrite

    with Proxy(("127.0.0.1", server.port)) as proxy:
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}")
        for operation in every_operation(store).values():
            operation()
        server.client().flushall()
        operations = every_operation(store)
        accepted = proxy.accepted
        proxy.requests.rewrite, proxy.answers.rewrite = note("request"), note("answer")
        for name, operation in operations.items():
            pieces.clear()
            operation()
            assert pieces[0] == "request", name
            assert set(pieces[1:]) == {"answer"}, name  # a long answer may come in several pieces
        assert proxy.accepted == accepted <= 2
        store.close()


def test_a_claim_does_the_same_work_with_10_and_with_10000_ended_runs(server: RedisServer, store: RedisStore) -> None:
    """Counted in commands that the script runs, and in the server's own time for the script; measured in turns, so that
    a busy machine slows all alike.
    """
    first = due(store, -20_000)
    untrimmed: dict[str, Any] = {"history_size": 100_000, "max_late": 100_000.0}
    ended = {"few": 10, "many": 10_000, "trimmed": 3_000}

    def win(job: str, number: int, **options: Any) -> ClaimAnswer:
        answer = claim(store, first + timedelta(seconds=number), job, **{**untrimmed, **options})
        assert answer.outcome == "won"
        return answer

    def end(answer: ClaimAnswer) -> None:
        assert answer.run is not None
        assert store.finish(answer.run.job, answer.run.slot, answer.token, "success")

    for job, count in ended.items():
        for number in range(count):
            end(win(job, number))
    commands: dict[str, dict[str, int]] = {job: {} for job in ended}
    times: dict[str, list[float]] = {job: [] for job in ended}
    for turn in range(50):
        for job, count in ended.items():
            server.client().config_resetstat()
            options: dict[str, Any] = {"history_size": 10, "keep": 0.0} if job == "trimmed" else {}
            answer = win(job, count + turn, **options)
            stats: dict[str, Any] = server.client().info("commandstats")
            times[job].append(float(stats["cmdstat_evalsha"]["usec_per_call"]))
            for name in stats:
                if name not in ("cmdstat_info", "cmdstat_config|resetstat", "cmdstat_client|setinfo"):
                    commands[job][name] = commands[job].get(name, 0) + int(stats[name]["calls"])
            end(answer)
    assert commands["many"] == commands["few"]
    few_us, many_us, trimmed_us = (statistics.median(times[job]) for job in ended)
    assert many_us < few_us * 2, (few_us, many_us)
    assert len(store.runs("trimmed", limit=5_000)) > 1_000, "a claim trims a bounded number"
    assert trimmed_us < few_us * 8, (few_us, trimmed_us)
    assert set(commands["few"]) <= set(commands["trimmed"])


def test_scripts_flushed_in_the_middle_are_sent_again(server: RedisServer, store: RedisStore) -> None:
    """Each operation after its own SCRIPT FLUSH, and all of them while another client flushes without a pause."""
    for name, operation in every_operation(store).items():
        server.client().script_flush()
        assert operation() not in (None, False, []), name
    done = threading.Event()

    def flush() -> None:
        with contextlib.closing(server.client()) as client:
            while not done.is_set():
                client.script_flush()

    flusher = threading.Thread(target=flush)
    flusher.start()
    try:
        for second in range(100):
            slot = due(store, -50) + timedelta(milliseconds=second)
            answer = claim(store, slot, "flushed")
            assert answer.outcome == "won"
            assert store.finish("flushed", slot, answer.token, "success")
    finally:
        done.set()
        flusher.join()


def test_an_answer_to_another_call_is_an_unknown_outcome(server: RedisServer) -> None:
    """It closes the connections, so that no later call reads what belongs to an earlier one."""
    server.client().flushall()
    with Proxy(("127.0.0.1", server.port)) as proxy:
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}")
        slot = due(store)
        token = claim(store, slot).token
        assert store.heartbeat("job", slot, token, 30)
        seen: list[bytes] = []

        def replay(data: bytes) -> bytes:
            seen.append(data)
            return seen[0] if len(seen) == 2 else data

        proxy.answers.rewrite = replay
        assert store.heartbeat("job", slot, token, 30)
        before = proxy.accepted
        with pytest.raises(StoreError, match="another call") as caught:
            store.heartbeat("job", slot, token, 30)
        assert caught.value.transient
        assert store._route.counts() == (0, 0)
        proxy.answers.rewrite = None
        assert store.heartbeat("job", slot, token, 30)
        assert proxy.accepted == before + 1
        store.close()


def test_rubbish_in_an_answer_is_an_unknown_outcome(server: RedisServer) -> None:
    """Whatever bytes come back, a call ends in a StoreError, and the next one on a new connection is fine."""
    server.client().flushall()
    with Proxy(("127.0.0.1", server.port)) as proxy:
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}")
        slot, token = due(store), "t1"
        store.claim("job", slot, token, "runner")
        for rubbish in RUBBISH:
            proxy.answers.rewrite = lambda data, rubbish=rubbish: rubbish.ljust(len(data), b"\0")[: len(data)]
            with pytest.raises(StoreError) as caught:
                store.heartbeat("job", slot, token, 30, timeout=0.3)
            assert caught.value.transient, rubbish
            proxy.answers.rewrite = None
            assert store.heartbeat("job", slot, token, 30), rubbish
        store.close()


# ---- time-outs -------------------------------------------------------------------------------------------------------


def assert_times_out(call: Callable[[], Any], timeout: float) -> None:
    """The call ends in a transient StoreError, at its time-out and not later."""
    started = time.monotonic()
    with pytest.raises(StoreError) as caught:
        call()
    assert caught.value.transient
    assert time.monotonic() - started < timeout + SLACK_S, caught.value


def test_a_frozen_server_holds_no_call_beyond_its_time_out(server: RedisServer, store: RedisStore) -> None:
    """Warm connections and new ones; and what was sent is not sent again behind the caller's back."""
    slot = due(store)
    answer = store.claim("job", slot, "t1", "runner", lease=1.0)
    cold = RedisStore(server.url())
    server.freeze()
    try:
        for timeout in (0.1, 0.5):
            assert_times_out(lambda timeout=timeout: store.heartbeat("job", slot, "t1", 30, timeout=timeout), timeout)
            assert_times_out(lambda timeout=timeout: claim(store, slot, "other", timeout=timeout), timeout)
            assert_times_out(lambda timeout=timeout: cold.ping(timeout=timeout), timeout)
    finally:
        server.thaw()
    assert answer.record is not None
    assert store.heartbeat("job", slot, "t1", 30), (
        "the lease ran out while the server stood still, but nobody took over"
    )
    assert store._route.counts()[0] <= 2
    cold.close()


def test_bytes_that_trickle_in_do_not_stretch_a_call(server: RedisServer) -> None:
    """The deadline is the call's, not one of each read."""
    server.client().flushall()
    with Proxy(("127.0.0.1", server.port)) as proxy:
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}")
        slot = due(store)
        store.claim("job", slot, "t1", "runner")
        proxy.answers.slice_size, proxy.answers.slice_pause = 1, 0.05
        assert_times_out(lambda: store.get("job", slot, timeout=0.4), 0.4)
        proxy.answers.slice_size = 0
        assert store.get("job", slot) is not None
        store.close()


def test_the_time_out_covers_connecting() -> None:
    """A server that accepts and says nothing: with TLS and without, and a sentinel and a cluster's node like that."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        for url in (f"redis://:pw@{place}", f"rediss://{place}", f"redis+sentinel://{place},{place}/jobs",
                    f"redis+cluster://{place},{place}", f"redis://{place}/3"):  # fmt: skip
            store = RedisStore(url)
            assert_times_out(lambda store=store: store.ping(timeout=0.3), 0.3)
            store.close()


def test_a_name_without_address_is_a_transient_error_within_the_time_out() -> None:
    """However long the resolver thinks about it."""
    store = RedisStore("redis://no-such-host.invalid")
    assert_times_out(lambda: store.ping(timeout=1.0), 1.0)


def test_a_resolver_that_hangs_holds_no_call_beyond_its_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's resolver takes no time-out of its own."""
    release, real = threading.Event(), socket.getaddrinfo

    def hang(host: Any, *args: Any, flags: int = 0, **options: Any) -> Any:
        if not flags & socket.AI_NUMERICHOST:
            release.wait(20)
        return real("127.0.0.1" if not flags else host, *args, flags=flags, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    store = RedisStore("redis://some-host.example")
    try:
        assert_times_out(lambda: store.ping(timeout=0.3), 0.3)
    finally:
        release.set()


# ---- connections -----------------------------------------------------------------------------------------------------


def test_connections_are_bounded_and_heartbeats_do_not_queue_behind_claims(server: RedisServer) -> None:
    """With all of the claims' connections stuck in claims, a heartbeat goes through at once."""
    server.client().flushall()
    gate, sha = threading.Event(), script("claim").sha.encode()

    def hold_claims(data: bytes) -> bytes:
        if sha in data:
            gate.wait(20)
        return data

    with Proxy(("127.0.0.1", server.port)) as proxy:
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}?max_connections=8")
        slot = due(store)
        store.claim("job", slot, "t1", "runner")
        assert store.heartbeat("job", slot, "t1", 30)
        proxy.requests.rewrite = hold_claims

        def stuck() -> None:
            with contextlib.suppress(StoreError):
                claim(store, slot, "other", timeout=20)

        threads = [threading.Thread(target=stuck) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: store._route.counts() == (3, 1), "two claims under way, one heartbeat's connection idle")
        for _ in range(4):
            with pytest.raises(StoreError, match="all 2 connections were in use") as caught:
                claim(store, slot, "other", timeout=0.1)
            assert caught.value.transient
        for _ in range(10):
            assert store.heartbeat("job", slot, "t1", 30, timeout=0.5)
        proxy.requests.rewrite = None
        gate.set()
        for thread in threads:
            thread.join()
        assert store.finish("job", slot, "t1", "success")
        store.close()


def test_many_threads_share_few_connections(server: RedisServer, store: RedisStore) -> None:
    """32 threads, 4 connections: each call gets its own answer, and no more connections are opened."""
    small = RedisStore(server.url(), max_connections=4)
    slot = due(store)
    wrong: list[object] = []

    def work(number: int) -> None:
        for second in range(20):
            mine = slot - timedelta(milliseconds=second)
            answer = claim(small, mine, f"job-{number}", token=f"{number}-{second}", overlap="allow")
            if answer.outcome != "won" or answer.record is None or answer.record.token != f"{number}-{second}":
                wrong.append(answer)
            if not small.finish(f"job-{number}", mine, f"{number}-{second}", "success"):
                wrong.append((number, second))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert small._route.counts() == (4, 4)
    small.close()
    assert small._route.counts() == (0, 0)


def test_a_connection_that_the_server_closed_while_idle_is_replaced_without_an_error(
    server: RedisServer, store: RedisStore
) -> None:
    """CLIENT KILL, and the server's own idle time-out, are nothing that a caller hears of."""
    slot = due(store)
    token = claim(store, slot).token
    for _ in range(3):
        server.client().execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert store.heartbeat("job", slot, token, 30)
        assert claim(store, slot).outcome == "running"
    mine = {client["id"] for client in server.client().client_list()}
    server.client().config_set("timeout", 1)
    try:
        wait_until(lambda: len({client["id"] for client in server.client().client_list()} & mine) <= 1, "the time-out")
        assert store.heartbeat("job", slot, token, 30)
    finally:
        server.client().config_set("timeout", 0)


def test_close_lets_connections_go_and_the_next_call_makes_new_ones(server: RedisServer, store: RedisStore) -> None:
    """Any number of times, also while calls are under way."""
    slot = due(store)
    token = claim(store, slot).token
    done, wrong = threading.Event(), []

    def beat() -> None:
        while not done.is_set():
            if not store.heartbeat("job", slot, token, 30):
                wrong.append("refused")

    threads = [threading.Thread(target=beat) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        store.close()
        assert store.get("job", slot) is not None
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    store.close()
    store.close()
    assert store._route.counts() == (0, 0)


# ---- fork ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooks", [True, False], ids=["hooks ran", "hooks did not run"])
def test_a_forked_child_has_connections_of_its_own(server: RedisServer, store: RedisStore, hooks: bool) -> None:
    """50 children while the parent's threads talk: the children's calls and exits disturb nobody."""
    slot = due(store)
    store.claim("job", slot, "t1", "runner")
    done, trouble = threading.Event(), []

    def beat() -> None:
        while not done.is_set():
            try:
                if not store.heartbeat("job", slot, "t1", 30):
                    trouble.append("refused")
            except StoreError as error:
                trouble.append(str(error))

    threads = [threading.Thread(target=beat) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(50):
            assert _in_child(lambda number=number: _child(store, slot, number, hooks)) == 0
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert trouble == []
    assert {f"child-{number}" for number in range(50)} <= set(store.jobs())
    assert store.finish("job", slot, "t1", "success")


def _child(store: RedisStore, slot: datetime, number: int, hooks: bool) -> None:
    if not hooks:  # as if forked by something that runs none: only the process id tells
        store.__dict__.update(_pid=os.getppid())
    parents = store._route if not hooks else None
    assert store.claim(f"child-{number}", slot, f"c{number}", "child").outcome == "won"
    assert store._route is not parents
    assert store._route.counts() == (1, 1)
    assert store.finish(f"child-{number}", slot, f"c{number}", "success")
    store.close()


def _in_child(work: Callable[[], None]) -> int:
    """Runs it in a forked child; the child's exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "this process is multi-threaded": that is the point
        pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
