"""Redis Cluster: three real primaries, jobs spread over them, slots that move and nodes that fail while jobs run."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
import redis
from fix_servers_redis import LABELS, RedisCluster, RedisServer, program, wait_until

from leaselib._model import ClaimAnswer, Run, epoch_ms, to_ms
from leaselib.errors import StoreError
from leaselib.stores import _redis
from leaselib.stores._redis import RedisStore
from leaselib.stores._redis_codec import Keys

pytestmark = pytest.mark.system
_tokens = (f"token-{n}" for n in itertools.count())
KEYS = Keys("default")
HOSTILE = ("{", "}", "{}", "}{", "{a}b", "{a", "a}", "{}{x}", "{{a}}", "*", "é{ü}💥", "a:b", "runs", "x" * 200)


@pytest.fixture(scope="module", params=LABELS)
def cluster(request: pytest.FixtureRequest) -> Iterator[RedisCluster]:
    """Three nodes of each program, for this module."""
    with RedisCluster(program=program(request.param)) as it:
        yield it


@pytest.fixture
def store(cluster: RedisCluster) -> Iterator[RedisStore]:
    """A store on the emptied cluster."""
    for node in cluster.nodes:
        node.client().flushall()
    it = RedisStore(cluster.url())
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


def job_on(cluster: RedisCluster, node: RedisServer, *, start: int = 0) -> str:
    """A job whose keys that node holds."""
    return next(f"job-{n}" for n in itertools.count(start) if cluster.owner(KEYS.runs(f"job-{n}")) is node)


def test_jobs_of_any_name_live_on_all_nodes(cluster: RedisCluster, store: RedisStore) -> None:
    """Names with braces too: all keys of a job in one slot, jobs apart, listings complete and in order."""
    slot = due(store)
    names = [*HOSTILE, *(f"job-{n}" for n in range(30))]
    for name in names:
        assert cluster.slot(KEYS.runs(name)) == cluster.slot(KEYS.slots(name))
        run = win(store, slot, name)
        assert store.heartbeat(name, slot, run.token, 30, '{"page": 1}')
        assert claim(store, slot, name).outcome == "running"
    assert store.jobs() == sorted(names)
    unfinished = store.unfinished([*names, "unknown"])
    assert [(run.slot, run.job) for run in unfinished] == sorted((slot, name) for name in names)
    assert all(node.client().dbsize() for node in cluster.nodes)
    for run in unfinished:
        assert store.release(run.job, slot, run.token)
        second = win(store, slot, run.job, takeover_of=1)
        assert store.finish(run.job, slot, second.token, "success")
        assert [past.outcome for past in store.runs(run.job)[0].attempts] == ["handed-over", "success"]
        assert store.purge(run.job) == 1
    assert store.unfinished(names) == []
    assert store.jobs() == sorted(names), "a purged job is not forgotten"


def test_the_set_of_jobs_is_written_at_the_first_win_and_again_if_it_was_lost(
    cluster: RedisCluster, store: RedisStore
) -> None:
    """A call of its own, once in a process; a refused claim makes no job."""
    slot = due(store)
    assert claim(store, slot - timedelta(days=1), "late").outcome == "late"
    assert store.jobs() == []
    win(store, slot, "a")
    win(store, slot, "b")
    assert store.jobs() == ["a", "b"]
    home = cluster.owner(KEYS.jobs)
    home.client().delete(KEYS.jobs)
    win(RedisStore(cluster.url()), slot + timedelta(milliseconds=1), "a", overlap="allow")
    assert store.jobs() == ["a"]


def test_a_win_stands_if_the_set_of_jobs_is_out_of_reach(
    cluster: RedisCluster, store: RedisStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim is answered `won`, the trouble is logged, and a win some time later writes the set."""
    monkeypatch.setattr(_redis, "REGISTER_PAUSE_S", 0.0)
    slot = due(store)
    home = cluster.owner(KEYS.jobs)
    other = next(node for node in cluster.nodes if node is not home and node is not cluster.owner(KEYS.epoch))
    job = job_on(cluster, other)
    home.client().set(KEYS.jobs, "no set")
    run = win(store, slot, job)
    assert "could not be added to the set of jobs" in caplog.text
    with pytest.raises(StoreError, match="holds another type of value"):
        store.jobs()
    home.client().delete(KEYS.jobs)
    assert store.finish(job, slot, run.token, "success")
    win(store, slot + timedelta(milliseconds=1), job)
    assert store.jobs() == [job]


def test_a_node_that_lost_its_data_is_a_new_epoch_of_its_own_jobs_alone(
    cluster: RedisCluster, store: RedisStore
) -> None:
    """Newer than the lost slots. A job that never started has none of its own, and tells the namespace's."""
    slot = due(store)
    epoch = store.ping().epoch
    home = cluster.owner(KEYS.epoch)
    lossy = next(node for node in cluster.nodes if node is not home)
    safe_job, lost_job = job_on(cluster, home), job_on(cluster, lossy)
    unborn = claim(store, slot + timedelta(minutes=1), "unborn")
    assert (unborn.outcome, unborn.epoch, unborn.job_epoch) == ("early", epoch, None)
    safe, lost = claim(store, slot, safe_job), claim(store, slot, lost_job)
    assert len({epoch, safe.job_epoch, lost.job_epoch, None}) == 4
    lossy.client().flushall()
    assert claim(store, slot, safe_job).job_epoch == safe.job_epoch
    assert claim(store, slot, lost_job, takeover_of=1).outcome == "gone"
    again = claim(store, slot + timedelta(milliseconds=1), lost_job)
    assert again.outcome == "won"
    assert again.job_epoch is not None
    assert epoch_ms(again.job_epoch) > to_ms(slot)
    assert claim(store, slot, safe_job).job_epoch == safe.job_epoch
    assert store.ping().epoch == again.epoch == safe.epoch == epoch
    home.client().flushall()
    assert epoch_ms(store.ping().epoch) > epoch_ms(epoch)
    assert claim(store, slot, lost_job).job_epoch == again.job_epoch


def test_all_processes_agree_on_the_epochs(cluster: RedisCluster, store: RedisStore) -> None:
    """Of the namespace and of each job, whichever operation comes first."""
    slot = due(store)
    for job in ("job-1", "job-2"):
        told = [claim(RedisStore(cluster.url()), slot, job) for _ in range(3)]
        assert len({answer.job_epoch for answer in told}) == 1
    later = slot + timedelta(minutes=1)
    early = {claim(RedisStore(cluster.url()), later, f"new-{n}").epoch for n in range(5)}
    assert early == {store.ping().epoch} == {RedisStore(cluster.url()).ping().epoch}


def test_a_job_is_added_to_the_set_of_jobs_again_after_that_was_lost(
    cluster: RedisCluster, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node may have lost its data, which no other node can know."""
    monkeypatch.setattr(_redis, "REGISTER_AGAIN_S", 0.0)
    slot = due(store)
    jobs = [job_on(cluster, node) for node in cluster.nodes]
    for job in jobs:
        assert store.finish(job, slot, win(store, slot, job).token, "success")
    cluster.owner(KEYS.jobs).client().delete(KEYS.jobs)
    assert store.jobs() == []
    for job in jobs:
        win(store, slot + timedelta(milliseconds=1), job)
    assert store.jobs() == sorted(jobs)


def move_slot(
    cluster: RedisCluster, slot: int, source: RedisServer, target: RedisServer, between: Callable[[], None]
) -> None:
    """Moves a hash slot, key by key, as the cluster's own tool does it; `between` runs after each step."""
    there, here = cluster.id_of(target), cluster.id_of(source)
    target.client().execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", here)
    source.client().execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", there)
    between()
    while keys := source.client().execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1):
        source.client().execute_command("MIGRATE", "127.0.0.1", target.port, keys[0], 0, 5000)
        between()
    for node in (target, source, *cluster.nodes):
        node.client().execute_command("CLUSTER", "SETSLOT", slot, "NODE", there)
    between()


class Traffic:
    """Threads that run one job's slots, two instances each, and note who won what. Calls are sent until answered."""

    def __init__(self, url: str, job: str, base: datetime) -> None:
        self.job, self._url = job, url
        self.wins: dict[datetime, list[str]] = {}
        self.wrong: list[object] = []
        self.transient: set[str] = set()
        self._slots = (base + timedelta(milliseconds=n) for n in itertools.count(1))
        self._done, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(4)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        store = RedisStore(self._url)
        while not self._done.is_set():
            with self._lock:
                slot = next(self._slots)
            for instance in range(2):
                self._one_run(store, slot, f"{slot.timestamp()}-{number}-{instance}")
        store.close()

    def _one_run(self, store: RedisStore, slot: datetime, token: str) -> None:
        job = self.job
        answer = self._again(lambda: store.claim(job, slot, token, "r", overlap="allow", history_size=10**6))
        if answer.outcome != "won":
            self._check(answer.outcome == "finished", answer)
            return
        with self._lock:
            self.wins.setdefault(slot, []).append(token)
        self._check(self._again(lambda: store.heartbeat(job, slot, token, 30)), ("heartbeat", slot))
        self._check(self._again(lambda: store.finish(job, slot, token, "success")), ("finish", slot))

    def _again(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                return call()
            except StoreError as error:
                self.transient.add(str(error))
                if not error.transient:
                    self.wrong.append(error)
                    raise

    def _check(self, fine: bool, what: object) -> None:
        if not fine:
            self.wrong.append(what)


def test_a_slot_that_moves_while_jobs_run_loses_and_doubles_nothing(cluster: RedisCluster, store: RedisStore) -> None:
    """Four threads live on one job while its slot goes to another node and back: every slot is won by one claim."""
    job, base = "moving {job}", due(store) - timedelta(seconds=50)
    win(store, base, job)
    source = cluster.owner(KEYS.runs(job))
    target = next(node for node in cluster.nodes if node is not source)
    with Traffic(cluster.url(), job, base) as traffic:
        for start, end in ((source, target), (target, source)) * 3:
            seen = len(traffic.wins)
            move_slot(cluster, cluster.slot(KEYS.runs(job)), start, end, lambda: threading.Event().wait(0.02) and None)
            wait_until(lambda seen=seen: len(traffic.wins) > seen + 5, "runs on the new node")
    assert traffic.wrong == []
    assert [tokens for tokens in traffic.wins.values() if len(tokens) != 1] == []
    assert {run.slot for run in store.runs(job, limit=10**6)} == {base, *traffic.wins}
    assert all("TRYAGAIN" in error or "connection" in error for error in traffic.transient), traffic.transient


def test_a_job_in_a_slot_that_is_half_moved_is_followed_or_asked_for_again(
    cluster: RedisCluster, store: RedisStore
) -> None:
    """ASK is followed; with one of a job's two keys moved, a claim is told TRYAGAIN, and a heartbeat goes on."""
    job = "half moved"
    slot = due(store)
    hash_slot = cluster.slot(KEYS.runs(job))
    source = cluster.owner(KEYS.runs(job))
    target = next(node for node in cluster.nodes if node is not source)
    run = win(store, slot, job)
    seen: list[str] = []

    def look() -> None:
        try:
            seen.append(claim(store, slot, job, token=run.token).outcome)
        except StoreError as error:
            seen.append("try again" if error.transient and "TRYAGAIN" in str(error) else str(error))
        assert store.heartbeat(job, slot, run.token, 30)
        assert store.get(job, slot) is not None

    move_slot(cluster, hash_slot, source, target, look)
    assert seen == ["won", "try again", "won", "won"]
    move_slot(cluster, hash_slot, target, source, lambda: None)
    assert store.finish(job, slot, run.token, "success")


def test_a_node_that_is_killed_stops_its_own_jobs_only(cluster: RedisCluster, store: RedisStore) -> None:
    """Transient errors for them until it is back; the others don't notice. A frozen one takes its share of the time."""
    slot = due(store)
    home = cluster.owner(KEYS.epoch)
    victim = next(node for node in cluster.nodes if node is not home)
    lost_job, safe_job = job_on(cluster, victim), job_on(cluster, home)
    win(store, slot, lost_job)
    safe = win(store, slot, safe_job)
    victim.kill()
    for _ in range(3):
        with pytest.raises(StoreError) as caught:
            claim(store, slot, lost_job, timeout=2)
        assert caught.value.transient
        assert store.heartbeat(safe_job, slot, safe.token, 30, timeout=2)
        assert claim(store, slot, safe_job, timeout=2).outcome == "running"
    victim.start()
    wait_until(lambda: won_within_time(store, slot, lost_job), "the node's return")
    victim.freeze()
    try:
        with pytest.raises(StoreError) as caught:
            claim(store, slot, lost_job, timeout=0.5)
        assert caught.value.transient
        assert claim(RedisStore(cluster.url()), slot, safe_job, timeout=2).outcome == "running"
    finally:
        victim.thaw()
    wait_until(lambda: cluster_is_well(cluster), "the cluster to be well again")


def won_within_time(store: RedisStore, slot: datetime, job: str) -> bool:
    """Whether a new run of the job could be started."""
    try:
        return claim(store, slot, job, timeout=2).outcome == "won"
    except StoreError as error:
        if not error.transient:
            raise
        return False


def cluster_is_well(cluster: RedisCluster) -> bool:
    """Whether every node thinks so."""
    try:
        infos = [str(node.client().execute_command("CLUSTER", "INFO")) for node in cluster.nodes]
        nodes = [str(node.client(decode_responses=False).execute_command("CLUSTER", "NODES")) for node in cluster.nodes]
    except redis.RedisError:
        return False
    return all("cluster_state:ok" in info for info in infos) and not any("fail" in text for text in nodes)
