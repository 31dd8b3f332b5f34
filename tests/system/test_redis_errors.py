"""Each error of a server and of the driver, worded with and without a script around it: worth a retry or not."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest
import redis
from fix_servers_redis import LABELS, RedisCluster, RedisServer, program, wait_until
from redis import exceptions
from redis.crc import key_slot

from leaselib import _threads
from leaselib._model import ClaimAnswer, Pong
from leaselib.errors import StoreError
from leaselib.stores import _redis_net, _redis_routes
from leaselib.stores._redis import RedisStore
from leaselib.stores._redis_acl import acl_setuser
from leaselib.stores._redis_codec import Keys
from leaselib.stores._redis_errors import TRANSIENT, code, to_store_error

SLOT = datetime(2026, 1, 1, tzinfo=timezone.utc)
SHOWN = "redis://h:6379/0"
OLD_WRAP = "ERR Error running script (call to f_0123): @user_script:90: @user_script: 90: -{} words"
NEW_WRAP = "{} words script: 0123, on @user_script:90."
A_NODE = "is a node of a Redis Cluster .*write redis.cluster"


@pytest.mark.parametrize("word", sorted(TRANSIENT))
@pytest.mark.parametrize("form", ["{} words", OLD_WRAP, NEW_WRAP, "-{} words"])
def test_each_transient_code_is_found_in_each_wording(word: str, form: str) -> None:
    """Bare, and as old and new servers wrap what a script's command said."""
    error = to_store_error(redis.ResponseError(form.format(word)), SHOWN, "job")
    assert error.transient
    assert error.job is None
    assert word in str(error)


@pytest.mark.parametrize(
    ("error", "transient", "says"),
    [
        (redis.ConnectionError("Connection closed by server."), True, "connection to redis://h:6379/0 failed"),
        (redis.ConnectionError("max number of clients reached"), True, "max number of clients"),
        (redis.TimeoutError("Timeout reading from socket"), True, "did not answer in time"),
        (TimeoutError("time is up"), True, "did not answer in time"),
        (ConnectionResetError(104, "reset"), True, "failed"),
        (socket.gaierror(-2, "Name or service not known"), True, "failed"),
        (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), True, "loading"),
        (exceptions.InvalidResponse("Protocol Error: b'HTTP'"), True, "can't be understood .*look whether a Redis"),
        (redis.ResponseError("Protocol error: expected '$', got 'x'"), True, "can't understand a request"),
        (redis.ResponseError("ERR Protocol error: invalid multibulk length"), True, "can't understand a request"),
        (
            redis.ResponseError("DENIED Redis is running in protected mode as"),
            False,
            "give its default user a password",
        ),
        (redis.ResponseError("DENIED Running in protected mode because"), False, "give its default user a password"),
        (exceptions.ReadOnlyError("You can't write against a read only replica."), True, "READONLY"),
        (exceptions.OutOfMemoryError("command not allowed"), True, "OOM"),
        (exceptions.MasterDownError("Link with MASTER is down"), True, "MASTERDOWN"),
        (exceptions.ClusterDownError("The cluster is down"), True, "CLUSTERDOWN"),
        (exceptions.TryAgainError("Multiple keys request during rehashing of slot"), True, "TRYAGAIN"),
        (exceptions.AuthenticationError("invalid username-password pair"), False, "refused the user or the password"),
        (exceptions.AuthorizationError("no"), False, "refused the user or the password"),
        (redis.ResponseError("WRONGPASS invalid username-password pair"), False, "refused the user or the password"),
        (
            exceptions.NoPermissionError("this user has no permissions to run the 'evalsha' command"),
            False,
            "ACL SETUSER",
        ),
        (redis.ResponseError("The user executing the script can't run this command"), False, "ACL SETUSER"),
        (redis.ResponseError("ACL failure in script: User u has no permissions to run 'zrem'"), False, "ACL SETUSER"),
        (redis.ResponseError("DB index is out of range"), False, "no such database"),
        (redis.ResponseError("This instance has cluster support disabled"), False, "write redis://"),
        (redis.ResponseError("unknown command 'SENTINEL', with args"), False, "is no sentinel"),
        (redis.ResponseError("unknown command `sentinel`, with args"), False, "is no sentinel"),
        (exceptions.MovedError("3999 127.0.0.1:6381"), False, "write redis\\+cluster://"),
        (exceptions.ClusterCrossSlotError("Keys in request"), False, "write redis\\+cluster://"),
        (redis.ResponseError("ERR unknown command 'EVALSHA'"), False, "could not carry out"),
        (redis.ResponseError("ERR BUSYKEY or OOMS are no codes"), False, "could not carry out"),
    ],
)
def test_each_error_is_worth_a_retry_or_not(error: Exception, transient: bool, says: str) -> None:
    """Authentication comes first: the driver counts it among the connection's errors."""
    found = to_store_error(error, SHOWN, "job")
    assert (found.transient, found.job) == (transient, None)
    assert re.search(says, str(found))


@pytest.mark.parametrize("shown", [SHOWN, "redis+cluster://h:1", "redis+sentinel://h:1/jobs"])
@pytest.mark.parametrize(
    "error",
    [
        redis.ResponseError("NOAUTH Authentication required."),
        exceptions.AuthenticationError("Authentication required."),  # as the driver cuts it
        exceptions.AuthenticationError("HELLO must be called with the client already authenticated, otherwise"),
        redis.ResponseError("ERR Protocol error: unauthenticated multibulk length"),
        redis.ResponseError("Protocol error: unauthenticated multibulk length"),
        redis.ResponseError("Protocol error: unauthenticated bulk length"),
        redis.ResponseError(OLD_WRAP.format("NOAUTH")),
        redis.ConnectionError("none of the 2 nodes gave an answer; the last said: NOAUTH Authentication required."),
    ],
)
def test_each_way_to_ask_for_a_password_is_the_same_error(error: Exception, shown: str) -> None:
    """Short requests of clients that the server doesn't know get other answers than long ones."""
    found = to_store_error(error, shown, "job")
    assert (found.transient, found.job) == (False, None)
    assert f"{shown} asks for a user and a password" in str(found)
    assert ("sentinel_password" in str(found)) == ("sentinel" in shown)


@pytest.mark.system
@pytest.mark.parametrize("label", LABELS)
def test_a_server_that_starts_to_ask_for_a_password_is_understood_whatever_was_sent(label: str) -> None:
    """Each operation, each size of request: in many cases the server hangs up before it has read all of it."""
    with RedisServer(program=program(label)) as server:
        store = RedisStore(server.url())
        slot = store.now().replace(microsecond=0)
        store.claim("job", slot, "t", "runner")
        server.client().config_set("requirepass", "s3cret")
        calls: list[Callable[[], Any]] = [
            store.ping,
            store.jobs,
            lambda: store.claim("other", slot, "t", "runner"),
            lambda: store.heartbeat("job", slot, "t", 30),
            lambda: store.heartbeat("job", slot, "t", 30, f'"{"x" * 60_000}"'),
            lambda: store.finish("job", slot, "t", "failed", "é" * 4_000),
            *(lambda count=n: store.unfinished([f"j{n}" for n in range(count)]) for n in (1, 9, 5_000, 50_000)),
        ]
        for _ in range(5):
            for call in calls:
                store.close()  # a connection of those that were let in before would still serve
                with pytest.raises(StoreError, match="asks for a user and a password") as caught:
                    call()
                assert not caught.value.transient
                assert "s3cret" not in str(caught.value)
        known = RedisStore(f"redis://:s3cret@127.0.0.1:{server.port}")
        assert known.heartbeat("job", slot, "t", 30)
        known.close()


@pytest.mark.parametrize(
    "message",
    [
        "WRONGTYPE Operation against a key",
        "ERR Error running script (call to f_0): @user_script:9: -WRONGTYPE Operation against a key",
        "WRONGTYPE Operation against a key holding the wrong kind of value script: 0, on @user_script:9.",
    ],
)
def test_another_type_of_value_is_the_jobs_own_trouble(message: str) -> None:
    """Permanent, and it names the job, and the keys that it can be."""
    for keys, says in (
        (["a:runs"], "the key a:runs of the job 'job' holds another type of value"),
        (["a:runs", "a:slots"], "one of the keys a:runs, a:slots of the job 'job' holds another type of value"),
    ):
        found = to_store_error(redis.ResponseError(message), SHOWN, "job", keys)
        assert (found.transient, found.job) == (False, "job")
        assert str(found).startswith(says)
        assert "TYPE must say hash for :runs and zset for :slots; remove what is neither with DEL" in str(found)
    found = to_store_error(redis.ResponseError(message), SHOWN, None, ["a:jobs"])
    assert (found.transient, found.job) == (False, None)
    assert str(found).startswith("the key a:jobs holds another type of value")


def test_a_message_of_the_server_is_one_short_line() -> None:
    """Whatever it holds."""
    found = to_store_error(redis.ResponseError("ERR \x1b[2J\r\n" + "x" * 10_000), SHOWN)
    assert len(str(found)) < 500
    assert str(found).isprintable()


def test_codes_that_routes_act_on_are_found_whatever_the_driver_knows() -> None:
    """Newer drivers have classes for them and cut the word off; older ones leave it in the message."""
    for word, kind, cut in (
        ("NOSCRIPT", exceptions.NoScriptError, "No matching script."),
        ("MOVED", exceptions.MovedError, "3999 127.0.0.1:6381"),
        ("ASK", exceptions.AskError, "3999 127.0.0.1:6381"),
        ("READONLY", exceptions.ReadOnlyError, "You can't write"),
    ):
        assert code(kind(cut)) == word
        assert code(redis.ResponseError(f"{word} {cut}")) == word


def test_a_key_that_the_cluster_would_split_is_never_made() -> None:
    """Both keys of a job have the hash slot of its tag, for any name; the tag is never empty."""
    for name in ("{", "}", "{}", "}{", "{a}{b}", "a", "*", "é", "💥" * 200):
        for namespace in ("default", "{", "}", "a:b"):
            keys = Keys(namespace)
            assert key_slot(keys.runs(name).encode()) == key_slot(keys.slots(name).encode())
            assert keys.runs(name).count("{") == keys.runs(name).count("}") == 1
    assert len({Keys(a).runs(b) for a, b in (("a", "b:c"), ("a:b", "c"), ("a%3Ab", "c"), ("a", "b%3Ac"))}) == 4


@pytest.mark.system
def test_an_interrupted_call_leaves_no_connection_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between a request and its answer: that connection is never used again."""
    with RedisServer() as server:
        store = RedisStore(server.url())
        store.ping()
        real = _redis_net.Connection.read_response

        def interrupt(self: Any, *args: Any, **options: Any) -> Any:
            monkeypatch.setattr(_redis_net.Connection, "read_response", real)
            raise KeyboardInterrupt

        monkeypatch.setattr(_redis_net.Connection, "read_response", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.get("job", SLOT)
        assert store._route.counts() == (0, 0)
        assert store.get("job", SLOT) is None
        store.close()


@pytest.mark.system
def test_names_are_looked_up_also_when_no_thread_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while the interpreter ends: a heartbeat that needs a new connection still gets one."""

    def refuse(name: str, target: Any) -> threading.Thread:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_threads, "spawn", refuse)
    with RedisServer() as server:
        store = RedisStore(f"redis://localhost:{server.port}")
        assert store.ping()
        store.close()


@pytest.mark.system
def test_a_cluster_that_passes_a_call_round_and_round_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that disagree about a slot: an error after a few hops, not a loop; and a list of slots that is none."""
    store = RedisStore("redis+cluster://127.0.0.1:7000")
    hops: list[Any] = []

    def send_on(address: Any, commands: Any, deadline: Any, **options: Any) -> list[Any]:
        if commands[0][0] == "CLUSTER":
            return [[[0, 16383, [b"127.0.0.1", 7000, b"id"]]]]
        hops.append(address)
        return [redis.ResponseError(f"MOVED 1 127.0.0.1:{7000 + len(hops) % 2}")]

    monkeypatch.setattr(store._route._nodes, "exchange", send_on)  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="passed the call on 5 times") as caught:
        store.ping()
    assert caught.value.transient
    assert len(hops) == 5
    for rubbish in (
        [[0, 16383]], [[0, 16383, []]], [5], b"OK", [["a", "b", [b"h", 1]]], [[0, 16383, [b"h", b"port"]]], 7, None,
        *([[0, 16383, [host, 1]]] for host in (b"\xff", b"a b", b"a..b", b"x" * 64, b"h\r\n", 5, [], ValueError())),
        *([[0, 16383, [b"h", port]]] for port in (0, -1, 65536, 10**30, None, b"", redis.ResponseError("no"))),
    ):  # fmt: skip
        other = RedisStore("redis+cluster://127.0.0.1:7000")
        monkeypatch.setattr(other._route._nodes, "exchange", lambda *a, r=rubbish, **o: [r])  # type: ignore[attr-defined]
        with pytest.raises(StoreError, match=r"can't be understood .*none of the 1 nodes") as caught:
            other.ping()
        assert caught.value.transient


def test_what_a_sentinel_says_can_be_rubbish_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that is none; and the connection that it came on is closed."""
    store = RedisStore("redis+sentinel://127.0.0.1:26379/jobs")
    dropped: list[Any] = []
    route: Any = store._route
    monkeypatch.setattr(route._sentinels, "drop", dropped.append)
    for number, rubbish in enumerate(
        ([], [b"h"], [b"h", b"1", b"2"], b"OK", 7, [b"h", b"port"], [b"h", b"0"], [b"h", b"70000"], [b"\xff", b"1"],
         [b"a b", b"1"], [None, None], [[], []], [b"h", b"9" * 5_000]), 1,
    ):  # fmt: skip
        monkeypatch.setattr(route._sentinels, "exchange", lambda *a, r=rubbish, **o: [r])
        with pytest.raises(StoreError, match=r"can't be understood .*none of the 1 sentinels") as caught:
            store.ping()
        assert caught.value.transient
        assert len(dropped) == number


@pytest.mark.parametrize(
    "said", ["MOVED", "MOVED 1", "MOVED 1 h", "MOVED 1 h:port", "MOVED 1 h:70000", "MOVED 1 a..b:1", "ASK x"]
)
def test_a_redirection_that_can_not_be_read_is_no_answer(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the connection that it came on is closed."""
    store = RedisStore("redis+cluster://127.0.0.1:7000")
    route: Any = store._route
    dropped: list[Any] = []

    def answer(address: Any, commands: Any, deadline: Any, **options: Any) -> list[Any]:
        if commands[0][0] == "CLUSTER":
            return [[[0, 16383, [b"127.0.0.1", 7000, b"id"]]]]
        return [redis.ResponseError(said)]

    monkeypatch.setattr(route._nodes, "exchange", answer)
    monkeypatch.setattr(route._nodes, "drop", dropped.append)
    with pytest.raises(StoreError, match="redirection can't be read") as caught:
        store.ping()
    assert caught.value.transient
    assert dropped == [("127.0.0.1", 7000)]


@pytest.mark.parametrize(
    "epoch", ["", "x", "1", "-a", "1-", "9" * 16 + "-a", "9" * 45_000 + "-a", "1-" + "a" * 200, "1-a b"]
)
def test_an_epoch_that_is_none_is_read_from_no_store(epoch: str) -> None:
    """Neither with an answer to a claim nor to a ping: a number of 45,000 digits would end the thread that reads it."""
    for answer in (lambda: ClaimAnswer("gone", "t", 0, epoch), lambda: Pong(SLOT, epoch)):
        with pytest.raises(StoreError, match="epoch can't be one") as caught:
            answer()
        assert (caught.value.transient, len(str(caught.value)) < 300) == (False, True)


class Wire:
    """Stands for a connection whose calls a test lets end."""

    generation = 0

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def usable(self) -> bool:
        return True

    def let_go(self) -> None:
        pass

    def exchange(self, commands: Any, deadline: Any, follow: Any) -> list[Any]:
        self.go_on.wait(10)
        return [b"OK"]


def test_dropping_idle_connections_does_not_raise_the_limit() -> None:
    """Those in use still count until their calls end, and are closed then."""
    wires: list[Wire] = []

    def make() -> Any:
        wires.append(Wire())
        return wires[-1]

    pool = _redis_net.Pool(make, 2)
    calls = [threading.Thread(target=pool.exchange, args=([], _redis_net.Deadline(10))) for _ in range(2)]
    for call in calls:
        call.start()
    wait_until(lambda: pool.counts() == (2, 0), "both connections in use")
    pool.close()
    with pytest.raises(_redis_net.NoConnection, match="all 2 connections were in use"):
        pool.exchange([], _redis_net.Deadline(0.05))
    for wire in wires:
        wire.go_on.set()
    for call in calls:
        call.join()
    assert pool.counts() == (0, 0)


@pytest.mark.parametrize("url", ["rediss+sentinel://h:1/m", "rediss+cluster://h:1", "rediss://h:1"])
def test_a_certificate_that_was_refused_makes_a_route_look_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The primary may be another machine by now: sentinels, the map of slots and names are asked anew each time."""
    store = RedisStore(url)
    route: Any = store._route
    asked, dropped = [], []

    def node(address: Any, commands: Any, deadline: Any, **options: Any) -> list[Any]:
        if commands[0][0] == "CLUSTER":
            asked.append(address)
            return [[[0, 16383, [b"new", 6379]]]]
        raise StoreError("the certificate of new:6379 was refused")

    def watch(address: Any, commands: Any, deadline: Any, **options: Any) -> list[Any]:
        asked.append(address)
        return [[b"new", b"6379"]]

    monkeypatch.setattr(route._nodes, "exchange", node)
    monkeypatch.setattr(route._nodes, "drop", dropped.append)
    if "sentinel" in url:
        monkeypatch.setattr(route._sentinels, "exchange", watch)
    for number in (1, 2, 3):
        with pytest.raises(StoreError, match="was refused") as caught:
            store.ping()
        assert not caught.value.transient
        assert len(dropped) == number
        assert len(asked) == (0 if url == "rediss://h:1" else number)


def test_calls_that_wait_for_one_name_share_one_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that hangs costs one thread for each name, however many calls time out; then it is asked again."""
    release, asked, real = threading.Event(), [], socket.getaddrinfo

    def hang(host: Any, *args: Any, flags: int = 0, **options: Any) -> Any:
        if flags & socket.AI_NUMERICHOST:
            return real(host, *args, flags=flags, **options)
        asked.append(host)
        release.wait(10)
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    store = RedisStore("redis://some-host.example")
    before = threading.active_count()
    for _ in range(6):
        with pytest.raises(StoreError, match="did not answer in time") as caught:
            store.ping(timeout=0.05)
        assert caught.value.transient
    assert threading.active_count() == before + 1
    assert len(asked) == 1
    release.set()
    wait_until(lambda: threading.active_count() == before, "the look-up's end")
    with pytest.raises(StoreError, match=r"looked up.*try again") as caught:
        store.ping(timeout=5)
    assert caught.value.transient
    assert len(asked) == 2


def test_a_redirection_without_a_host_leads_to_the_node_that_was_asked() -> None:
    """Both ways in which nodes say that they don't know their own name."""
    for said in ("1 ?:7001", "1 :7001", "MOVED 1 ?:7001"):
        assert _redis_routes._redirected(redis.ResponseError(said), ("h", 7000)) == ("h", 7001)
    assert _redis_routes._redirected(redis.ResponseError("1 g:7001"), ("h", 7000)) == ("g", 7001)


@pytest.mark.system
def test_a_server_of_another_kind_than_the_url_says_is_a_permanent_error() -> None:
    """No later try can help: the URL has to be mended, and the error says how."""
    with RedisServer() as server, RedisCluster() as cluster:
        place = f"127.0.0.1:{server.port}"
        node = RedisStore(f"redis://127.0.0.1:{cluster.nodes[0].port}")
        cases: list[tuple[Callable[[], Any], str]] = [
            (RedisStore(f"redis+cluster://{place}").ping, "is no Redis Cluster; write redis://"),
            (RedisStore(f"redis+cluster://127.0.0.1:1,{place}").ping, "is no Redis Cluster; write redis://"),
            (RedisStore(f"redis+sentinel://{place}/jobs").ping, "is no sentinel"),
            (lambda: [node.get(f"job-{n}", SLOT) for n in range(20)], A_NODE),
            (lambda: node.claim("job", SLOT, "t", "r"), A_NODE),
        ]
        for call, says in cases:
            with pytest.raises(StoreError, match=says) as caught:
                call()
            assert not caught.value.transient


@pytest.mark.system
def test_a_cluster_that_does_not_allow_to_read_its_map_is_a_permanent_error() -> None:
    """Without `+cluster|slots`; and with a password that its nodes refuse."""
    with RedisCluster() as cluster:
        for node in cluster.nodes:
            words = acl_setuser("limited", "s3cret").split()
            node.client().execute_command(*(word for word in words if word != "+cluster|slots"))
        for password, says in (("s3cret", "ACL SETUSER"), ("wrong", "refused the user or the password")):
            store = RedisStore(cluster.url().replace("://", f"://limited:{password}@"))
            with pytest.raises(StoreError, match=says) as caught:
                store.ping()
            assert (caught.value.transient, caught.value.job) == (False, None)
            store.close()
