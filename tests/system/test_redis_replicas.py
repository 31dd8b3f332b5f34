"""Replicas: `wait_replicas`, failovers that lose a claim, and a real sentinel that moves the jobs to another server."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta
from typing import Any

import pytest
from fix_proxy import Proxy
from fix_servers_redis import LABELS, RedisServer, knows_replica, program, replica_of, sentinel, wait_until

from leaselib._model import ClaimAnswer, Run, to_ms
from leaselib.errors import StoreError
from leaselib.stores._base import GivenBackError
from leaselib.stores._redis import NOT_STARTED, RedisStore

pytestmark = pytest.mark.system
_tokens = (f"token-{n}" for n in itertools.count())


@pytest.fixture(params=LABELS)
def primary(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of each program, for one test."""
    with RedisServer(program=program(request.param)) as it:
        yield it


class Link:
    """A replica that follows its primary through a proxy: its lag is the test's."""

    def __init__(self, primary: RedisServer) -> None:
        self.proxy = Proxy(("127.0.0.1", primary.port))
        self.replica = replica_of(primary, port=self.proxy.port)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.proxy.close()
        self.replica.close()

    def cut(self) -> None:
        """Nothing of what the primary writes arrives any more; nobody notices yet."""
        self.proxy.answers.hold()

    def mend(self) -> None:
        """What was held arrives."""
        self.proxy.answers.go_on()


@pytest.fixture
def link(primary: RedisServer) -> Iterator[Link]:
    """The primary's replica behind a proxy."""
    with Link(primary) as it:
        yield it


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


def assert_transient(error: StoreError) -> None:
    """Worth another try."""
    assert error.transient, error


def test_with_a_replica_every_win_and_finish_is_on_it(primary: RedisServer, link: Link) -> None:
    """In one round trip: the replica has the run as soon as the caller knows of it."""
    waiting = RedisStore(primary.url(), wait_replicas=1)
    on_replica = RedisStore(link.replica.url())
    for number in range(20):
        slot = due(waiting) + timedelta(milliseconds=number)
        run = win(waiting, slot)
        assert on_replica.get("job", slot) == run
        assert waiting.finish("job", slot, run.token, "success")
        ended = on_replica.get("job", slot)
        assert ended is not None
        assert ended.status == "success"
    waiting.close()
    on_replica.close()


def test_without_a_replica_no_win_is_acted_on(primary: RedisServer) -> None:
    """It is released, so that it uses up no attempt and anybody may claim it again; reads go on."""
    waiting = RedisStore(primary.url(), wait_replicas=1, wait_timeout=0.1)
    slot = due(waiting)
    with pytest.raises(StoreError, match="0 instead of 1 replicas") as caught:
        claim(waiting, slot, token="mine", max_attempts=1)
    assert_transient(caught.value)
    run = waiting.get("job", slot)
    assert run is not None
    assert (run.released, run.handovers) == (True, 1)
    other = RedisStore(primary.url())
    assert claim(other, slot, token="mine").outcome == "running", "sent again after its release"
    for attempt in (1, 2, 3):
        with pytest.raises(StoreError, match="0 instead of 1 replicas"):
            claim(waiting, slot, takeover_of=attempt, max_attempts=1)
    assert win(other, slot, takeover_of=4, max_attempts=1).attempt == 5, "no attempt was used up"
    waiting.close()
    other.close()


def test_refusals_wait_for_no_replica(primary: RedisServer) -> None:
    """Only what was written has to be on replicas: without one, refusals of each kind come at once."""
    plain, waiting = RedisStore(primary.url()), RedisStore(primary.url(), wait_replicas=1, wait_timeout=5)
    slot = due(plain)
    run = win(plain, slot)
    assert plain.finish("ended", slot, win(plain, slot, "ended").token, "success")
    began = time.monotonic()
    assert claim(waiting, slot).outcome == "running"
    assert claim(waiting, slot + timedelta(milliseconds=1)).outcome == "overlap"
    assert claim(waiting, slot, "ended").outcome == "finished"
    assert not waiting.finish("job", slot, "another token", "success")
    assert not waiting.release("job", slot, "another token")
    assert waiting.heartbeat("job", slot, run.token, 30)
    assert time.monotonic() - began < 1
    plain.close()
    waiting.close()


def test_a_cut_off_replica_stops_wins_and_finishes_until_it_is_back(primary: RedisServer, link: Link) -> None:
    """Also the same finish and the same claim sent again, on another connection: nothing is taken for replicated."""
    waiting = RedisStore(primary.url(), wait_replicas=1, wait_timeout=0.15)
    slot = due(waiting)
    run, ending = win(waiting, slot), win(waiting, slot, "ending")
    link.cut()
    for _ in range(3):
        with pytest.raises(StoreError, match="0 instead of 1 replicas") as caught:
            waiting.finish("ending", slot, ending.token, "success")
        assert_transient(caught.value)
        with pytest.raises(StoreError, match="0 instead of 1 replicas"):
            claim(waiting, slot, token=run.token)  # "won again" is a write too; it is given back
        waiting.close()
        with pytest.raises(StoreError, match="0 instead of 1 replicas"):
            claim(waiting, slot, "other" + next(_tokens))
        run = win(RedisStore(primary.url()), slot, takeover_of=run.attempt)
        assert waiting.heartbeat("job", slot, run.token, 30), "heartbeats wait for nobody"
    link.mend()

    def finished() -> bool:
        try:
            return waiting.finish("ending", slot, ending.token, "success")
        except StoreError:
            return False

    wait_until(finished, "the replica to catch up")
    assert win(waiting, slot, "later").attempt == 1
    waiting.close()


def test_once_replicas_were_too_few_pings_wait_as_well_until_they_are_back(primary: RedisServer, link: Link) -> None:
    """What is answered then tells that the trouble is over. Refused claims are answered all the while, and say that
    nobody was waited for.
    """
    plain, waiting = RedisStore(primary.url()), RedisStore(primary.url(), wait_replicas=1, wait_timeout=0.15)
    slot = due(waiting)
    run = win(plain, slot)

    def answers() -> bool:
        with contextlib.suppress(StoreError):
            return bool(waiting.ping())
        return False

    assert answers()
    link.cut()
    assert answers(), "nobody knows yet"
    ended = win(plain, slot, "ended")
    with pytest.raises(StoreError, match="0 instead of 1 replicas"):
        waiting.finish("ended", slot, ended.token, "success")
    for _ in range(2):
        with pytest.raises(StoreError, match="0 instead of 1 replicas") as caught:
            waiting.ping()
        assert (caught.value.transient, caught.value.unreplicated) == (True, True)
        answer = claim(waiting, slot)
        assert (answer.outcome, answer.replicated) == ("running", False)
    assert claim(plain, slot).replicated, "it asks for none"
    assert waiting.heartbeat("job", slot, run.token, 30)
    assert waiting.runs("job")
    assert waiting.unfinished(["job"])
    assert RedisStore(waiting_url(primary)).ping(), "another process, such as `leaselib status`"
    link.mend()
    wait_until(answers, "the replica to catch up")
    plain.close()
    waiting.close()


def waiting_url(primary: RedisServer) -> str:
    """The store's URL for those who wait for a replica."""
    return f"{primary.url()}?wait_replicas=1&wait_timeout=0.15"


def test_a_finish_sent_again_on_a_fresh_connection_waits_as_well(primary: RedisServer, link: Link) -> None:
    """WAIT speaks of its own connection's writes; a mere look would be confirmed at once, and wrongly."""
    waiting = RedisStore(primary.url(), wait_replicas=1, wait_timeout=0.15)
    slot = due(waiting)
    run = win(waiting, slot)
    link.cut()
    for _ in range(2):
        fresh = RedisStore(primary.url(), wait_replicas=1, wait_timeout=0.15)
        fresh.ping()
        with pytest.raises(StoreError, match="0 instead of 1 replicas"):
            fresh.finish("job", slot, run.token, "success")
        fresh.close()
    on_replica = link.replica.client().hgetall("leaselib:{default:job}:runs")
    assert '"running"' in str(on_replica), "the replica has not heard of the end"
    link.mend()
    waiting.close()


def test_wait_timeouts_stay_within_the_time_out_of_the_call(primary: RedisServer) -> None:
    """A long wait_timeout is cut to what the call has, and the error says how long it was."""
    waiting = RedisStore(primary.url(), wait_replicas=1, wait_timeout=60)
    slot = due(waiting)
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"0 instead of 1 replicas had it after 0\.[23]\d* s"):
        claim(waiting, slot, timeout=0.5)
    assert time.monotonic() - started < 0.9
    run = waiting.get("job", slot)
    assert run is not None
    assert run.released, "there was time left to give it back"
    waiting.close()


def test_a_failover_to_a_replica_that_lacks_the_claim_refuses_its_runner(primary: RedisServer, link: Link) -> None:
    """Heartbeat, finish and release are refused, a backup is told `gone`; the slot may run again, larger fence."""
    with Proxy(("127.0.0.1", primary.port)) as address:
        store = RedisStore(f"redis://127.0.0.1:{address.port}")
        slot = due(store)
        before = win(store, slot, "before")
        wait_until(lambda: link.replica.client().exists("leaselib:{default:before}:runs"), "the first claim's arrival")
        link.cut()
        lost = win(store, slot, "lost")
        primary.kill()
        link.replica.client().execute_command("REPLICAOF", "NO", "ONE")
        address.target = ("127.0.0.1", link.replica.port)
        address.reset_all()
        assert not store.heartbeat("lost", slot, lost.token, 30)
        assert claim(store, slot, "lost", takeover_of=lost.attempt).outcome == "gone"
        assert not store.finish("lost", slot, lost.token, "success")
        assert not store.release("lost", slot, lost.token)
        assert store.heartbeat("before", slot, before.token, 30)
        again = win(store, slot, "lost")
        assert again.attempt == 1
        assert again.fence > lost.fence
        store.close()


def test_what_a_replica_would_refuse_is_an_unknown_outcome(primary: RedisServer, link: Link) -> None:
    """A replica that lags behind knows nothing of the latest runs: no refusal of its is believed, of any operation.

    An address may lead to one (a virtual IP, a DNS name, an old connection), and a good finish would else be lost.
    """
    with closing(RedisStore(primary.url())) as store, closing(RedisStore(link.replica.url())) as behind:
        slot = due(store)
        known, ended = win(store, slot, "known"), win(store, slot, "ended")
        assert store.finish("ended", slot, ended.token, "success")
        freed = win(store, slot, "freed")
        assert store.release("freed", slot, freed.token)
        wait_until(lambda: behind.runs("freed") and behind.runs("freed")[0].released, "the replica to know of these")
        link.cut()
        lost = win(store, slot, "lost")
        refused: list[Callable[[], object]] = [
            lambda: behind.heartbeat("lost", slot, lost.token, 30),
            lambda: behind.finish("lost", slot, lost.token, "success"),
            lambda: behind.release("lost", slot, lost.token),
            lambda: claim(behind, slot, "lost", takeover_of=1),
            lambda: claim(behind, slot, "known"),
            lambda: claim(behind, slot + timedelta(milliseconds=1), "known"),
            lambda: claim(behind, slot, "ended"),
            lambda: claim(behind, slot - timedelta(days=1), "ended"),
            lambda: claim(behind, slot + timedelta(days=1), "ended"),
            lambda: claim(behind, slot - timedelta(milliseconds=1), "ended"),
            lambda: claim(behind, slot, "freed", token=freed.token),
            lambda: behind.heartbeat("known", slot, "another token", 30),
            lambda: behind.finish("known", slot, "another token", "success"),
            lambda: behind.finish("ended", slot, ended.token, "failed"),
            lambda: behind.release("known", slot, "another token"),
            lambda: behind.release("freed", slot, freed.token),
            lambda: behind.purge("lost"),
            lambda: behind.purge("known"),
        ]
        for number, call in enumerate(refused):
            with pytest.raises(StoreError, match="READONLY") as caught:
                call()
            assert_transient(caught.value)
            assert caught.value.job is None, number
        assert behind.get("known", slot) == known, "what only reads may be asked of a replica"


def test_a_refusal_is_not_sent_to_replicas_and_opens_no_full_server(primary: RedisServer) -> None:
    """That a refusal could not have come from a replica costs nothing; what is refused for lack of memory stays so."""
    store, admin = RedisStore(primary.url()), primary.client()
    with replica_of(primary):
        slot = due(store)
        run = win(store, slot)
        admin.config_set("repl-ping-replica-period", "3600")

        def quiet() -> bool:
            before = offset()
            threading.Event().wait(0.05)
            return offset() == before

        def offset() -> int:
            return int(admin.info("replication")["master_repl_offset"])

        wait_until(quiet, "the replication stream to rest")
        before = offset()
        for _ in range(20):
            assert claim(store, slot).outcome == "running"
            assert not store.heartbeat("job", slot, "another token", 30)
            assert not store.finish("job", slot, "another token", "success")
            assert not store.release("job", slot, "another token")
            assert store.purge("job") == 0
        # Redis 6.2 sends an empty transaction, of 29 bytes.
        most = 29 * 100 if primary.program.version.startswith("6.") else 0
        assert offset() - before <= most
    admin.config_set("maxmemory", "1")
    assert claim(store, slot).outcome == "running"
    assert not store.heartbeat("job", slot, "another token", 30)
    with pytest.raises(StoreError, match="OOM"):
        store.heartbeat("job", slot, run.token, 30)
    store.close()


def test_a_sentinel_moves_the_jobs_to_the_replica(primary: RedisServer) -> None:
    """A real sentinel: the primary is killed, calls are transient errors for a while, then claims and runs go on.

    A store with `wait_replicas` goes on once the new primary has a replica of its own.
    """
    replica = replica_of(primary)
    with replica, sentinel(primary) as watch:
        knows_replica(watch)
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{watch.port}/jobs/0?wait_replicas=1"
        store, plain = RedisStore(url), RedisStore(url, wait_replicas=0)
        slot = due(store)
        run = win(store, slot)
        trouble: list[StoreError] = []

        def beat() -> bool:
            try:
                return plain.heartbeat("job", slot, run.token, 30, timeout=0.5)
            except StoreError as error:
                trouble.append(error)
                return False

        assert beat()
        primary.kill()
        wait_until(beat, "the failover", 30)
        assert trouble
        assert all(error.transient for error in trouble)
        assert int(watch.client().sentinel_get_master_addr_by_name("jobs")[1]) == replica.port
        assert win(plain, slot + timedelta(milliseconds=1), "other").attempt == 1
        assert plain.finish("job", slot, run.token, "success")

        assert not claim_on_two(store, slot), "no replica has it yet"
        with replica_of(replica):
            wait_until(lambda: claim_on_two(store, slot), "a win that another replica has")
        assert all(error.transient for error in trouble)
        store.close()
        plain.close()


def claim_on_two(store: RedisStore, slot: datetime) -> bool:
    """Whether a new run was won, and a replica has it."""
    try:
        return claim(store, slot, f"job {next(_tokens)}").outcome == "won"
    except StoreError as error:
        assert_transient(error)
        return False


def test_a_primary_demoted_while_it_is_in_use_is_left_at_once(primary: RedisServer) -> None:
    """READONLY makes the store ask the sentinels again: one transient error, then the new primary."""
    replica = replica_of(primary)
    with replica, sentinel(primary) as watch:
        knows_replica(watch)
        store = RedisStore(f"redis+sentinel://127.0.0.1:{watch.port}/jobs")
        slot = due(store)
        run = win(store, slot)
        watch.client().execute_command("SENTINEL", "FAILOVER", "jobs")
        address_of = watch.client().sentinel_get_master_addr_by_name
        wait_until(lambda: int(address_of("jobs")[1]) == replica.port, "the failover")
        # What the sentinel does about 10 s later.
        primary.client().execute_command("REPLICAOF", "127.0.0.1", replica.port)
        errors = 0
        for _ in range(3):
            try:
                assert store.heartbeat("job", slot, run.token, 30)
            except StoreError as error:
                assert_transient(error)
                errors += 1
        assert errors <= 1
        assert store.heartbeat("job", slot, run.token, 30)
        store.close()


def test_sentinels_that_do_not_know_the_name_or_are_away_are_transient(primary: RedisServer) -> None:
    """They may be told about it yet."""
    with sentinel(primary) as watch:
        for url in (f"redis+sentinel://127.0.0.1:{watch.port}/other", "redis+sentinel://127.0.0.1:1,127.0.0.1:2/jobs"):
            store = RedisStore(url)
            with pytest.raises(StoreError, match=r"none of the \d sentinels gave an answer") as caught:
                store.ping(timeout=1)
            assert_transient(caught.value)
            store.close()


def test_a_frozen_sentinel_leaves_time_for_the_next_one(primary: RedisServer) -> None:
    """Each gets a share of the call's time, and the one that answered is asked first from then on."""
    with sentinel(primary) as frozen, sentinel(primary) as watch:
        frozen.freeze()
        store = RedisStore(f"redis+sentinel://127.0.0.1:{frozen.port},127.0.0.1:{watch.port}/jobs")
        assert store.ping(timeout=3)
        store.close()
        store._route._forget(("127.0.0.1", primary.port))  # type: ignore[attr-defined]
        assert store.ping(timeout=0.3)
        store.close()


def test_a_claim_by_hand_that_is_given_back_is_run_by_nobody_later(primary: RedisServer) -> None:
    """Its caller is told that it failed. Claims of slots are released, for whoever claims them next."""
    waiting = RedisStore(primary.url(), wait_replicas=1, wait_timeout=0.1)
    slot = due(waiting)
    with pytest.raises(GivenBackError, match="was won and ended as failed, but 0 instead of 1"):
        claim(waiting, slot, token="mine", reason="manual")
    run = waiting.get("job", slot)
    assert run is not None
    assert (run.status, run.error) == ("failed", NOT_STARTED)
    assert waiting.unfinished(["job"]) == []
    assert not waiting.release("job", slot, "mine"), "what an instance does with a claim that it gives up"
    waiting.close()


def test_a_win_that_is_given_back_tells_which_dead_runs_it_has_ended(primary: RedisServer) -> None:
    """They stay ended, and no later answer would name them again."""
    plain, waiting = RedisStore(primary.url()), RedisStore(primary.url(), wait_replicas=1, wait_timeout=0.1)
    slot = due(plain)
    win(plain, slot, lease=0.01)
    later = slot + timedelta(milliseconds=1)
    wait_until(lambda: plain.unfinished(["job"])[0].lease_end < plain.now(), "the lease's end")
    with pytest.raises(GivenBackError) as caught:
        claim(waiting, later)
    assert caught.value.interrupted == (to_ms(slot),)
    assert (caught.value.transient, caught.value.unreplicated, caught.value.job) == (True, True, None)
    assert claim(plain, later, takeover_of=1).interrupted == ()
    plain.close()
    waiting.close()


def test_a_win_of_a_slot_older_than_the_data_is_ended_when_it_is_given_back(primary: RedisServer) -> None:
    """By a store that has met other data before: it may have run then, and released it would be started by others."""
    waiting = RedisStore(primary.url(), wait_replicas=1, wait_timeout=0.1)
    fresh = RedisStore(primary.url(), wait_replicas=1, wait_timeout=0.1)
    plain = RedisStore(primary.url())
    older = due(waiting)
    wait_until(lambda: waiting.now() > older, "the slot")
    primary.client().flushall()
    with pytest.raises(GivenBackError, match="was won and ended as failed, but 0 instead of 1"):
        claim(waiting, older, "ended")
    with pytest.raises(GivenBackError, match="was won and released again"):
        claim(fresh, older, "released")
    assert [(run.job, run.released) for run in fresh.unfinished(["ended", "released"])] == [("released", True)]
    with pytest.raises(GivenBackError, match="was won and released again"):
        claim(waiting, due(plain) + timedelta(seconds=1), "newer")
    for store in (waiting, fresh, plain):
        store.close()
