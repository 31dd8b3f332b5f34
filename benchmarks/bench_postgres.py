"""PostgresStore against bare statements: what a claim and a heartbeat cost, and whether history makes claims dearer.

    python benchmarks/bench_postgres.py [--url postgresql://...] [--pairs 2000]

The yardsticks are what one would write by hand with psycopg in autocommit, unprepared: an upsert of a row that says
who holds the run until when, and an UPDATE that moves that time. Both sides take turns, call by call, so that a slow
machine slows both; what is printed is the median of the first divided by the median of the second. Without --url it
starts a server of its own, which flushes each commit. One connection, one thread.
"""

from __future__ import annotations

import argparse
import contextlib
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

import psycopg

from leaselib.stores._postgres import PostgresStore

SCHEMA = "leaselib_bench"
TABLE = f"{SCHEMA}_bare"
CREATE = f"CREATE TABLE {TABLE} (job text, slot bigint, token text, lease_end timestamptz, PRIMARY KEY (job, slot))"
UPSERT = (
    f"INSERT INTO {TABLE} VALUES (%s, %s, %s, clock_timestamp() + %s * interval '1 second') ON CONFLICT (job, slot) "
    "DO UPDATE SET token = excluded.token, lease_end = excluded.lease_end"
)
UPDATE = (
    f"UPDATE {TABLE} SET lease_end = clock_timestamp() + %s * interval '1 second' "
    "WHERE job = %s AND slot = %s AND token = %s RETURNING lease_end"
)
JOBS = 100
LEASE_S = 30


@contextlib.contextmanager
def server(url: str | None) -> Iterator[str]:
    """The given server, or one of our own."""
    if url is not None:
        yield url
        return
    from fix_servers_postgres import postgres_server

    with postgres_server(options={"fsync": "on"}) as own:
        yield own.url()


def timed(call: Callable[[], object]) -> float:
    """How long a call takes, in microseconds."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6


def in_turns(count: int, first: Callable[[int], object], second: Callable[[int], object]) -> tuple[float, float]:
    """The medians of both, called alternately, in microseconds. The first tenth warms up."""
    times: tuple[list[float], list[float]] = ([], [])
    for n in range(count + count // 10):
        pair = (timed(lambda n=n: first(n)), timed(lambda n=n: second(n)))
        if n >= count // 10:
            times[0].append(pair[0])
            times[1].append(pair[1])
    return statistics.median(times[0]), statistics.median(times[1])


def show(what: str, ours: float, theirs: float, yardstick: str) -> None:
    """One line of the result."""
    print(f"{what:<34} {ours / theirs:5.2f} x {yardstick:<28} ({ours:.0f} : {theirs:.0f} us)")


def measure(url: str, pairs: int) -> None:
    """All comparisons on one server."""
    bare = psycopg.connect(url, autocommit=True, prepare_threshold=None)
    store = PostgresStore(url, schema=SCHEMA)
    bare.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE; DROP TABLE IF EXISTS {TABLE}".encode())
    bare.execute(CREATE.encode())
    start = store.now().replace(microsecond=0)
    token = secrets.token_hex(16)

    def slot(n: int) -> datetime:
        return start + timedelta(milliseconds=n // JOBS)

    def claim(n: int) -> None:
        assert store.claim(f"job{n % JOBS}", slot(n), token, "host-1-abcd", overlap="allow").outcome == "won"

    def upsert(n: int) -> None:
        bare.execute(UPSERT.encode(), (f"job{n % JOBS}", n // JOBS, token, LEASE_S))

    def heartbeat(n: int) -> None:
        assert store.heartbeat(f"job{n % JOBS}", slot(n), token, LEASE_S)

    def update(n: int) -> None:
        assert bare.execute(UPDATE.encode(), (LEASE_S, f"job{n % JOBS}", n // JOBS, token)).fetchone()

    def refused(n: int) -> None:
        assert store.claim(f"job{n % JOBS}", slot(n), "another", "host-2-efgh").outcome == "running"

    show("claim that wins", *in_turns(pairs, claim, upsert), "a bare upsert")
    show("heartbeat", *in_turns(pairs, heartbeat, update), "a bare UPDATE")
    show("claim told `running` (a backup)", *in_turns(pairs, refused, update), "a bare UPDATE")
    histories(store, bare, pairs)
    store.close()
    bare.execute(f"DROP SCHEMA {SCHEMA} CASCADE; DROP TABLE {TABLE}".encode())
    bare.close()


def histories(store: PostgresStore, bare: psycopg.Connection[tuple[object, ...]], pairs: int) -> None:
    """Whole lives of runs of two jobs, with 10 and with 10,000 ended runs behind them."""
    start = store.now().replace(microsecond=0)
    lengths = {"short": 10, "long": 10_000}
    for job, length in lengths.items():
        assert store.claim(job, start, "first", "host-1-abcd").outcome == "won"
        assert store.finish(job, start, "first", "success")
        copy = (
            f"INSERT INTO {SCHEMA}.runs SELECT namespace, job, slot_ms - n, status, attempt, handovers, token, runner, "
            f"fence, lease_ms, lease_end_ms, released, reason, started_ms, ended_ms, error, checkpoint, past "
            f"FROM {SCHEMA}.runs, generate_series(1, {length - 1}) AS n WHERE job = '{job}'"
        )
        bare.execute(copy.encode())
        bare.execute(f"UPDATE {SCHEMA}.jobs SET kept = {length} WHERE job = '{job}'".encode())

    def life(job: str) -> Callable[[int], None]:
        def one(n: int) -> None:
            slot = start + timedelta(milliseconds=n + 1)
            assert store.claim(job, slot, "t", "host-1-abcd", history_size=lengths[job]).outcome == "won"
            assert store.finish(job, slot, "t", "success")

        return one

    show("claim + finish, 10,000 ended runs", *in_turns(pairs // 2, life("long"), life("short")), "the same with 10")


def main() -> None:
    """Runs the comparisons and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a database in which it may create and drop what is named leaselib_bench*")
    parser.add_argument("--pairs", type=int, default=2000)
    options = parser.parse_args()
    with server(options.url) as url:
        with psycopg.connect(url) as connection:
            version = connection.info.server_version // 10000
        print(f"Python {platform.python_version()}, psycopg {psycopg.__version__}, PostgreSQL {version}; medians")
        measure(url, options.pairs)


if __name__ == "__main__":
    main()
