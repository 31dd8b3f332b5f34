"""What goes wrong with a real server, and what a RedisStore makes of it: the right kind of error, and no lost truth.

Each fault is one test. A transient StoreError leaves the outcome open; the same call sent again settles it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis
from fix_proxy import Direction, Proxy
from fix_servers_redis import ALL_LABELS, RedisServer, program, replica_of, wait_until

from leaselib._model import ClaimAnswer, Run, epoch_ms, to_ms
from leaselib.errors import StoreError
from leaselib.stores._redis import RedisStore
from leaselib.stores._redis_codec import Keys

pytestmark = pytest.mark.system
_tokens = (f"token-{n}" for n in itertools.count())


@pytest.fixture(params=ALL_LABELS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of each program, for one test, which may harm it."""
    with RedisServer(program=program(request.param)) as it:
        yield it


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    """A store on that server."""
    it = RedisStore(server.url())
    yield it
    it.close()


def due(store: RedisStore) -> datetime:
    """The whole second on the server's clock."""
    return store.now().replace(microsecond=0)


def claim(store: RedisStore, slot: datetime, job: str = "job", **options: Any) -> ClaimAnswer:
    """A claim with a token of its own."""
    return store.claim(job, slot, options.pop("token", None) or next(_tokens), "runner", **options)


def win(store: RedisStore, slot: datetime, job: str = "job", **options: Any) -> Run:
    """A claim that must be won."""
    answer = claim(store, slot, job, **options)
    assert answer.outcome == "won", answer
    assert answer.run is not None
    return answer.run


def assert_transient(call: Callable[[], Any], says: str = ".") -> StoreError:
    """The call ends in a transient StoreError."""
    with pytest.raises(StoreError, match=says) as caught:
        call()
    assert caught.value.transient, caught.value
    assert caught.value.job is None
    return caught.value


def every_write(store: RedisStore, run: Run) -> list[Callable[[], Any]]:
    """Every operation that would write something, given a live run."""
    return [
        lambda: claim(store, run.slot + timedelta(milliseconds=1), run.job, overlap="allow"),
        lambda: claim(store, run.slot, f"not {run.job}"),
        lambda: claim(store, run.slot, run.job, token=run.token),
        lambda: store.heartbeat(run.job, run.slot, run.token, 30, "7"),
        lambda: store.finish(run.job, run.slot, run.token, "success"),
        lambda: store.release(run.job, run.slot, run.token),
        lambda: store.purge(run.job, force=True),
    ]


def assert_nothing_is_written(server: RedisServer, store: RedisStore, run: Run, says: str) -> None:
    """Each write is refused as a whole: transient, and every key of the server is as before."""
    before = server.contents()
    for write in every_write(store, run):
        assert_transient(write, says)
    assert server.contents() == before


# ---- the server ------------------------------------------------------------------------------------------------------


def test_a_server_killed_and_restarted_with_its_data_goes_on(server: RedisServer) -> None:
    """SIGKILL: errors while it is away, then the run is still the runner's."""
    server.options.update({"appendonly": "yes", "appendfsync": "always"})
    server.kill()
    server.start()
    store = RedisStore(server.url())
    run, epoch = win(store, due(store)), store.ping().epoch
    ended = win(store, run.slot, "ended")
    store.finish("ended", run.slot, ended.token, "success")
    server.kill()
    for _ in range(3):
        assert_transient(lambda: store.heartbeat("job", run.slot, run.token, 30))
    server.start()
    assert store.heartbeat("job", run.slot, run.token, 30)
    assert store.ping().epoch == epoch
    assert store.get("ended", run.slot) is not None
    assert claim(store, run.slot).outcome == "running"
    store.close()


def test_a_server_restarted_without_its_data_has_another_epoch(server: RedisServer, store: RedisStore) -> None:
    """The runner's heartbeat and finish are refused, a backup is told `gone`, and the fence goes on growing."""
    slot = due(store)
    run, epoch = win(store, slot), store.ping().epoch
    server.kill()
    assert_transient(lambda: store.heartbeat("job", slot, run.token, 30))
    server.start()
    assert not store.heartbeat("job", slot, run.token, 30)
    assert not store.finish("job", slot, run.token, "success")
    assert not store.release("job", slot, run.token)
    gone = claim(store, slot, takeover_of=1)
    assert gone.outcome == "gone"
    assert gone.epoch != epoch
    assert epoch_ms(gone.epoch) > to_ms(slot), "so an instance knows that this slot may have run before"
    assert store.ping().epoch == gone.epoch
    again = win(store, slot)
    assert again.fence > run.fence
    assert store.jobs() == ["job"]


@pytest.mark.parametrize("deleted", ["everything", "the job"])
def test_state_that_vanishes_is_never_resurrected_by_its_runner(
    server: RedisServer, store: RedisStore, deleted: str
) -> None:
    """FLUSHALL, or the job's keys deleted by hand, while a run is live."""
    slot = due(store)
    run = win(store, slot)
    keys = Keys("default")
    server.client().flushall() if deleted == "everything" else server.client().delete(
        keys.runs("job"), keys.slots("job")
    )
    assert not store.heartbeat("job", slot, run.token, 30)
    assert claim(store, slot, takeover_of=run.attempt).outcome == "gone"
    assert not store.finish("job", slot, run.token, "success")
    assert store.get("job", slot) is None
    assert win(store, slot + timedelta(milliseconds=1)).fence > run.fence


def test_a_freeze_longer_than_the_lease_loses_no_thread_and_no_truth(server: RedisServer, store: RedisStore) -> None:
    """SIGSTOP: calls end at their time-outs; then either the runner renews or a backup takes over, never both."""
    slot = due(store)
    run = win(store, slot, lease=0.5)
    threads_before = threading.active_count()
    server.freeze()
    outcomes: list[str] = []

    def call(work: Callable[[], Any]) -> None:
        started = time.monotonic()
        try:
            work()
            outcomes.append("answered")
        except StoreError as error:
            outcomes.append("in time" if error.transient and time.monotonic() - started < 0.8 else f"late, or {error}")

    calls: list[Callable[[], Any]] = [
        lambda: store.heartbeat("job", slot, run.token, 0.5, timeout=0.3),
        lambda: claim(store, slot, takeover_of=1, timeout=0.3),
        lambda: store.finish("other", slot, run.token, "success", timeout=0.3),
        lambda: store.ping(timeout=0.3),
    ]
    threads = [threading.Thread(target=call, args=(work,)) for work in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(0.5)  # a fact can't be waited for: nothing happens while the server stands still
    server.thaw()
    assert outcomes == ["in time"] * 4
    assert threading.active_count() == threads_before
    wait_until(lambda: store.now() > run.lease_end, "the lease to run out")
    beat, taken = store.heartbeat("job", slot, run.token, 30), store.get("job", slot)
    assert taken is not None
    assert beat == (taken.attempt == 1), "what was sent while it stood still may have been done when it went on"


def test_a_server_that_became_a_replica_is_transient(server: RedisServer, store: RedisStore) -> None:
    """READONLY after a failover: refused as a whole, reads go on; well again once it is a primary."""
    run = win(store, due(store))
    with RedisServer(program=server.program) as other:
        server.client().execute_command("REPLICAOF", "127.0.0.1", str(free_port_of_nobody(other)))
        assert_nothing_is_written(server, store, run, "READONLY")
        server.client().execute_command("REPLICAOF", "NO", "ONE")
    assert store.heartbeat("job", run.slot, run.token, 30)


def free_port_of_nobody(server: RedisServer) -> int:
    """A port that was a server's a moment ago."""
    server.kill()
    return server.port


def test_a_replica_without_its_primary_is_transient(server: RedisServer) -> None:
    """MASTERDOWN, also for reads, where the replica is told not to serve stale data."""
    replica = replica_of(server, options={"replica-serve-stale-data": "no", "replica-read-only": "yes"})
    with replica:
        store = RedisStore(replica.url())
        server.kill()
        wait_until(lambda: replica.client().info("replication")["master_link_status"] == "down", "the link's end")
        assert_transient(store.ping, "MASTERDOWN")
        assert_transient(lambda: store.get("job", datetime(2026, 1, 1, tzinfo=timezone.utc)), "MASTERDOWN")
        store.close()


def test_a_full_server_refuses_a_call_as_a_whole(server: RedisServer, store: RedisStore) -> None:
    """OOM under `maxmemory` with `noeviction`: transient, nothing half written, reads go on; then all is well again."""
    run = win(store, due(store))
    server.client().config_set("maxmemory-policy", "noeviction")
    server.client().config_set("maxmemory", "1")
    assert_nothing_is_written(server, store, run, "OOM")
    assert store.get("job", run.slot) == run
    assert [live.token for live in store.unfinished(["job"])] == [run.token]
    server.client().config_set("maxmemory", "0")
    assert store.heartbeat("job", run.slot, run.token, 30)
    assert store.finish("job", run.slot, run.token, "success")


def test_an_empty_server_that_is_full_stays_empty(server: RedisServer, store: RedisStore) -> None:
    """The very first claim, which has the epoch to write as well."""
    server.client().config_set("maxmemory", "1")
    slot = datetime.now(timezone.utc).replace(microsecond=0)
    assert_transient(lambda: claim(store, slot), "OOM")
    assert_transient(store.ping, "OOM")
    assert server.client().dbsize() == 0
    server.client().config_set("maxmemory", "0")
    assert win(store, slot).attempt == 1


def test_a_server_that_can_not_save_is_transient(server: RedisServer, store: RedisStore) -> None:
    """MISCONF: it refuses writes until it can save again."""
    run = win(store, due(store))
    (server.folder / "dump.rdb").mkdir()
    (server.folder / "dump.rdb" / "in the way").touch()
    admin = server.client()
    admin.config_set("save", "3600 1000000")
    admin.bgsave()
    wait_until(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err", "the save's failure")
    assert_nothing_is_written(server, store, run, "MISCONF")
    admin.config_set("stop-writes-on-bgsave-error", "no")
    assert store.heartbeat("job", run.slot, run.token, 30)


def test_a_server_with_too_few_replicas_is_transient(server: RedisServer, store: RedisStore) -> None:
    """NOREPLICAS, where `min-replicas-to-write` asks for one."""
    run = win(store, due(store))
    server.client().config_set("min-replicas-to-write", "1")
    assert_nothing_is_written(server, store, run, "NOREPLICAS")
    server.client().config_set("min-replicas-to-write", "0")
    assert store.heartbeat("job", run.slot, run.token, 30)


def test_a_server_busy_with_a_script_is_transient(server: RedisServer, store: RedisStore) -> None:
    """BUSY, for every call, until the script is killed."""
    run = win(store, due(store))
    server.client().config_set("lua-time-limit", "50")

    def loop() -> None:
        with pytest.raises(redis.RedisError):
            server.client(socket_timeout=20).eval("while true do end", 0)

    looping = threading.Thread(target=loop)
    looping.start()

    def says_busy() -> bool:
        try:
            store.ping(timeout=1)
        except StoreError as error:
            return error.transient and "answered BUSY" in str(error)
        return False

    wait_until(says_busy, "the answer BUSY")
    assert_transient(lambda: store.heartbeat("job", run.slot, run.token, 30), "BUSY")
    server.client().script_kill()
    looping.join()
    assert store.heartbeat("job", run.slot, run.token, 30)


def test_a_server_that_loads_its_data_is_transient(server: RedisServer, store: RedisStore) -> None:
    """LOADING, after a restart with much data."""
    slot = due(store)
    admin = server.client()
    admin.config_set("rdbcompression", "no")
    admin.mset({f"ballast-{number}": "x" * 200_000 for number in range(150)})
    run = win(store, slot)
    admin.save()
    server.options.update({"key-load-delay": "10000"})
    server.kill()
    seen: list[StoreError] = []

    def watch() -> bool:
        try:
            return store.heartbeat("job", slot, run.token, 30)
        except StoreError as error:
            seen.append(error)
            return False

    starting = threading.Thread(target=server.start)
    starting.start()
    wait_until(watch, "the end of loading")
    starting.join()
    assert all(error.transient for error in seen)
    assert any("loading" in str(error) for error in seen)


def test_a_server_without_room_for_clients_is_transient(server: RedisServer, store: RedisStore) -> None:
    """`max number of clients reached`."""
    admin = server.client()
    admin.ping()
    admin.config_set("maxclients", "1")
    assert_transient(store.ping, "max number of clients|failed")
    admin.config_set("maxclients", "100")
    assert store.ping()


# ---- the network -----------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    """A proxy before that server."""
    with Proxy(("127.0.0.1", server.port)) as it:
        yield it


@pytest.fixture
def far(proxy: Proxy) -> Iterator[RedisStore]:
    """A store behind that proxy, whose connections are open, on a server that has the scripts."""
    it = RedisStore(f"redis://127.0.0.1:{proxy.port}")
    for write in every_write(it, win(it, due(it), "warm")):
        write()
    yield it
    it.close()


def lose_the_answer(proxy: Proxy, call: Callable[[], Any]) -> None:
    """The server does what it is asked, and the caller doesn't learn."""
    proxy.drop_answer()
    assert_transient(call)


def test_a_claim_whose_answer_was_lost_is_won_again(proxy: Proxy, far: RedisStore, store: RedisStore) -> None:
    """The same attempt and fence, however often; and one more for a takeover."""
    slot = due(far)
    lose_the_answer(proxy, lambda: claim(far, slot, token="mine"))
    stored = store.get("job", slot)
    assert stored is not None
    assert stored.token == "mine", "the server did the work"
    lose_the_answer(proxy, lambda: claim(far, slot, token="mine"))
    again = win(far, slot, token="mine")
    assert (again.attempt, again.fence) == (1, stored.fence)
    assert store.release("job", slot, "mine")
    lose_the_answer(proxy, lambda: claim(far, slot, token="next", takeover_of=1))
    again = win(far, slot, token="next", takeover_of=1)
    assert (again.attempt, again.reason) == (2, "hand-over")
    assert claim(far, slot, token="mine").outcome == "running"


@pytest.mark.parametrize("status", ["success", "failed"])
def test_a_finish_whose_answer_was_lost_is_true_again(
    proxy: Proxy, far: RedisStore, store: RedisStore, status: Any
) -> None:
    """The first one stands, and another status is refused."""
    slot = due(far)
    run = win(far, slot)
    assert far.heartbeat("job", slot, run.token, 30)
    lose_the_answer(proxy, lambda: far.finish("job", slot, run.token, status, "why"))
    stored = store.get("job", slot)
    assert stored is not None
    assert stored.status == status
    assert far.finish("job", slot, run.token, status, "why")
    assert not far.finish("job", slot, run.token, "success" if status == "failed" else "failed")
    assert store.get("job", slot) == stored


def test_a_heartbeat_and_a_release_whose_answers_were_lost_are_true_again(
    proxy: Proxy, far: RedisStore, store: RedisStore
) -> None:
    """A release counts once."""
    slot = due(far)
    run = win(far, slot)
    assert far.heartbeat("job", slot, run.token, 30)
    lose_the_answer(proxy, lambda: far.heartbeat("job", slot, run.token, 60, "1"))
    assert far.heartbeat("job", slot, run.token, 60, "1")
    lose_the_answer(proxy, lambda: far.release("job", slot, run.token, "2"))
    assert far.release("job", slot, run.token, "2")
    stored = store.get("job", slot)
    assert stored is not None
    assert (stored.handovers, stored.checkpoint) == (1, 2)


def test_a_purge_whose_answer_was_lost_is_done(proxy: Proxy, far: RedisStore, store: RedisStore) -> None:
    """Sent again it finds nothing, and the purged slot stays purged."""
    slot = due(far)
    run = win(far, slot)
    assert store.finish("job", slot, run.token, "success")
    lose_the_answer(proxy, lambda: far.purge("job"))
    assert far.purge("job") == 0
    assert claim(far, slot).outcome == "superseded"


def test_a_connection_cut_at_any_byte_of_a_claim_leaves_one_attempt(
    proxy: Proxy, far: RedisStore, store: RedisStore
) -> None:
    """On the way there and on the way back: sent again with the same token it is won, as attempt 1."""
    slot = due(far)
    sent, got = proxy.requests.passed, proxy.answers.passed
    win(far, slot, "job-xxx", token="mine")
    sent, got = proxy.requests.passed - sent, proxy.answers.passed - got
    cuts = [(proxy.cut_request_after, count) for count in range(0, sent + 1, 7)]
    cuts += [(proxy.cut_answer_after, count) for count in range(0, got, 7)]
    for number, (cut, count) in enumerate(cuts):
        job = f"job-{number:03}"
        cut(count)
        assert_transient(lambda job=job: claim(far, slot, job, token="mine"))
        run = win(far, slot, job, token="mine")
        assert (run.attempt, run.token) == (1, "mine"), (cut.__name__, count)
        assert store.runs(job) == [run]


def test_a_request_that_travels_for_long_is_judged_when_it_arrives(
    proxy: Proxy, far: RedisStore, store: RedisStore
) -> None:
    """A claim and a heartbeat that arrive after another attempt began change nothing."""
    slot = due(far)
    run = win(far, slot, lease=0.3)
    far.heartbeat("job", slot, run.token, 0.3)
    proxy.hold()
    calls: list[Callable[[], Any]] = [
        lambda: far.heartbeat("job", slot, run.token, 30, timeout=0.2),
        lambda: claim(far, slot, token=run.token, timeout=0.2),
    ]
    for call in calls:
        assert_transient(call)
    wait_until(lambda: store.now() > run.lease_end + timedelta(seconds=0.3), "the lease to run out")
    second = win(store, slot, takeover_of=1)
    proxy.go_on()
    assert far.ping()
    wait_until(lambda: proxy.requests.passed and far.get("job", slot) == store.get("job", slot), "the held requests")
    assert store.get("job", slot) == second


def test_a_network_that_refuses_resets_and_comes_back(proxy: Proxy, far: RedisStore) -> None:
    """Transient all the while, and well at once afterwards."""
    slot = due(far)
    run = win(far, slot)
    assert far.heartbeat("job", slot, run.token, 30)
    proxy.refuse()
    for _ in range(3):
        assert_transient(lambda: far.heartbeat("job", slot, run.token, 30))
        assert_transient(lambda: claim(far, slot))
    proxy.refuse(False)
    assert far.heartbeat("job", slot, run.token, 30)
    proxy.reset_all()
    assert far.heartbeat("job", slot, run.token, 30), "a connection that was reset while idle is replaced"
    proxy.answers.delay = 0.15
    assert far.heartbeat("job", slot, run.token, 30, timeout=1)
    assert_transient(lambda: far.heartbeat("job", slot, run.token, 30, timeout=0.1))
    proxy.answers.delay = 0.0
    assert far.heartbeat("job", slot, run.token, 30)


def test_idle_connections_that_went_dead_cost_one_call_together(proxy: Proxy, store: RedisStore) -> None:
    """A network that forgets connections without a word (a NAT table, a failed host): the first call times out, and
    tells that the other idle ones are no better.
    """
    far, slot = RedisStore(f"redis://127.0.0.1:{proxy.port}"), due(store)
    jobs = [f"job-{number}" for number in range(12)]
    for job in jobs:
        win(store, slot, job, token="mine")
    proxy.answers.delay = 0.2
    beats = [threading.Thread(target=lambda job=job: far.heartbeat(job, slot, "mine", 30)) for job in jobs]
    for beat in beats:
        beat.start()
    for beat in beats:
        beat.join()
    proxy.answers.delay = 0.0
    assert far._route.counts() == (12, 12)
    dead, proxy.requests = proxy.requests, Direction()
    dead.hold()
    assert_transient(lambda: far.heartbeat("job-0", slot, "mine", 30, timeout=0.3))
    for job in jobs:
        assert far.heartbeat(job, slot, "mine", 30, timeout=0.3)
    assert far._route.counts() == (1, 1)
    far.close()
    dead.end()
