"""RedisStore against bare commands: what a claim and a heartbeat cost, and whether history makes claims dearer.

    python benchmarks/bench_redis.py [--url redis://...] [--pairs 3000]

The yardsticks go through redis-py as one would use it: a PING, and an EVALSHA of the least script that could hold a
lease (HGET, TIME, HSET). Both sides take turns, call by call, so that a slow machine slows both; what is printed is the
median of the first divided by the median of the second. Without --url it starts a server of its own. One connection a
side, one thread. History is compared in the same way: jobs with 10 ended runs against one with 10,000.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import platform
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import redis

from leaselib.stores._redis import RedisStore

BARE = """
local token = redis.call('HGET', KEYS[1], 'token')
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'lease_end', time[1] + ARGV[2])
return token
"""
JOBS = 100
LEASE_S = 30


@contextlib.contextmanager
def server(url: str | None) -> Iterator[str]:
    """The given server, or one of our own."""
    if url is not None:
        yield url
        return
    from fix_servers_redis import RedisServer

    with RedisServer() as own:
        yield own.url()


def timed(call: Callable[[], object]) -> float:
    """How long a call takes, in microseconds."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6


def ratio(
    name: str,
    first: Callable[[], object],
    second: Callable[[], object],
    pairs: int,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Prints the medians of two calls that take turns, and how they compare. `after` each first call, not timed."""
    ours, theirs = [], []
    for number in range(-50, pairs):
        one = timed(first)
        after()
        other = timed(second)
        if number >= 0:
            ours.append(one)
            theirs.append(other)
    one, other = statistics.median(ours), statistics.median(theirs)
    p99 = statistics.quantiles(ours, n=100)[98]
    print(f"{name:48} {one:6.0f} us / {other:6.0f} us = {one / other:5.2f}   (p99 {p99:.0f} us)")


class Job:
    """One job whose slots are won and finished one after the other."""

    def __init__(self, store: RedisStore, name: str, base: datetime) -> None:
        self.store, self.name = store, name
        self._slots = (base + timedelta(milliseconds=number) for number in itertools.count())
        self.slot, self.token = base, ""

    def claim(self) -> None:
        """Wins the next slot."""
        self.slot, self.token = next(self._slots), secrets.token_hex(16)
        answer = self.store.claim(
            self.name, self.slot, self.token, "runner", lease=LEASE_S, max_late=1e5, history_size=10**6
        )
        assert answer.outcome == "won", answer

    def heartbeat(self) -> None:
        """Renews the lease of the slot that was won last."""
        assert self.store.heartbeat(self.name, self.slot, self.token, LEASE_S)

    def finish(self) -> None:
        """Ends the run of the slot that was won last."""
        assert self.store.finish(self.name, self.slot, self.token, "success")


def compare_with_bare_commands(store: RedisStore, client: redis.Redis, base: datetime, pairs: int) -> None:
    """A claim, a heartbeat and a finish against what one would write by hand."""
    sha = client.script_load(BARE)
    jobs = itertools.cycle([Job(store, f"job-{number}", base) for number in range(JOBS)])
    job = next(jobs)

    def claim() -> None:
        nonlocal job
        job = next(jobs)
        job.claim()

    def bare() -> None:
        client.evalsha(sha, 1, f"leaselib:bench:{job.name}", secrets.token_hex(16), LEASE_S)

    ratio("a claim / a PING", claim, client.ping, pairs, lambda: job.finish())
    ratio("a claim / an EVALSHA of HGET, TIME, HSET", claim, bare, pairs, lambda: job.finish())
    claim()
    ratio("a heartbeat / an EVALSHA of HGET, TIME, HSET", lambda: job.heartbeat(), bare, pairs)


def compare_histories(store: RedisStore, base: datetime, pairs: int) -> None:
    """Claims of jobs with few ended runs against claims of one with many."""
    many = Job(store, "many", base)
    for _ in range(10_000):
        many.claim()
        many.finish()
    few_jobs = []
    for number in range(pairs // 10 + 50):
        few_jobs.append(Job(store, f"few-{number}", base))
        for _ in range(10):
            few_jobs[-1].claim()
            few_jobs[-1].finish()
    few = iter(few_jobs)
    name = "a claim with 10,000 ended runs / with 10"
    ratio(name, many.claim, lambda: next(few).claim(), pairs // 10, many.finish)


def main() -> None:
    """Prints the machine, the server and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a Redis or Valkey server; keys below leaselib: are written and removed")
    parser.add_argument("--pairs", type=int, default=3000)
    options = parser.parse_args()
    with server(options.url) as url:
        namespace = f"bench-{secrets.token_hex(4)}"
        store, client = RedisStore(url, namespace), redis.Redis.from_url(url)
        info = client.info("server")
        version = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
        print(f"{version}; redis-py {redis.__version__}; Python {platform.python_version()}; {platform.platform()}")
        base = store.now().replace(microsecond=0) - timedelta(seconds=1000)
        compare_with_bare_commands(store, client, base, options.pairs)
        compare_histories(store, base, options.pairs)
        for key in client.scan_iter(match="leaselib:*"):
            if namespace.encode() in key or b":bench:" in key:
                client.delete(key)
        store.close()
        client.close()


if __name__ == "__main__":
    main()
