"""SQLiteStore against bare SQLite: what a claim costs, and how long anybody waits when 8 processes write at once.

    python benchmarks/bench_sqlite.py [--pairs 100] [--claims 100] [--processes 8] [--seconds 4] [--rounds 3]

The yardstick is a transaction that a user would write by hand: BEGIN IMMEDIATE, SELECT, upsert, COMMIT in WAL mode with
synchronous=FULL; under contention it waits by SQLite's own busy handler. Both sides take turns in one run (A B A B),
so that a slow machine slows both. Runs in the main thread and in child processes; what it writes is removed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import secrets
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from leaselib.stores._sqlite import SQLiteStore

SCHEMA = (
    "CREATE TABLE IF NOT EXISTS runs (job TEXT, slot INTEGER, status TEXT, token TEXT, runner TEXT, lease_end INTEGER, "
    "PRIMARY KEY (job, slot)) WITHOUT ROWID"
)
SELECT = "SELECT status, lease_end FROM runs WHERE job = ? AND slot = ?"
UPSERT = (
    "INSERT INTO runs VALUES (?, ?, 'running', ?, ?, ?) ON CONFLICT (job, slot) "
    "DO UPDATE SET status = excluded.status, token = excluded.token, lease_end = excluded.lease_end"
)
FINISH = "UPDATE runs SET status = 'success' WHERE job = ? AND slot = ?"
BUSY_TIMEOUT_S = 60

Life = Callable[[str, int], float]
"""Claims run n of a job, then finishes it; returns the seconds that the claim took."""


def bare(path: str) -> Life:
    """The hand-written transaction."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(SCHEMA)

    def life(job: str, n: int) -> float:
        began = time.perf_counter()
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(SELECT, (job, n)).fetchone()
        now_ms = time.time_ns() // 1_000_000
        connection.execute(UPSERT, (job, n, secrets.token_hex(16), "runner", now_ms + 30_000))
        connection.execute("COMMIT")
        took = time.perf_counter() - began
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(FINISH, (job, n))
        connection.execute("COMMIT")
        return took

    return life


def leaselib(path: str) -> Life:
    """SQLiteStore, as it comes."""
    store = SQLiteStore(path)
    start = datetime.now(timezone.utc).replace(microsecond=0) - timedelta(seconds=3000)

    def life(job: str, n: int) -> float:
        slot = start + timedelta(milliseconds=n)
        began = time.perf_counter()
        token = secrets.token_hex(16)
        answer = store.claim(job, slot, token, "runner", max_late=3600, timeout=BUSY_TIMEOUT_S)
        took = time.perf_counter() - began
        assert answer.outcome == "won", answer
        assert store.finish(job, slot, token, "success", timeout=BUSY_TIMEOUT_S)
        return took

    return life


SIDES = {"bare": bare, "leaselib": leaselib}


def at(sample: list[float], share: float) -> float:
    """That percentile of the sample, in milliseconds."""
    return sorted(sample)[min(len(sample) - 1, int(len(sample) * share))] * 1000


def one_process(folder: str, pairs: int, claims: int) -> None:
    """Claim p50 and p99, in turns."""
    lives = {side: make(os.path.join(folder, f"one-{side}.db")) for side, make in SIDES.items()}
    taken: dict[str, list[float]] = {side: [] for side in SIDES}
    ratios = []
    for pair in range(pairs):
        p50 = {}
        for side, life in lives.items():
            sample = [life(f"job-{n % 50}", pair * claims + n) for n in range(claims)]
            taken[side] += sample
            p50[side] = at(sample, 0.5)
        ratios.append(p50["leaselib"] / p50["bare"])
    print(f"one process, {pairs} pairs of {claims} claims in turns, in ms:")
    for side, sample in taken.items():
        print(f"  {side:9} p50 {at(sample, 0.5):7.3f}   p99 {at(sample, 0.99):7.3f}")
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"  claim p50, leaselib / bare: {middle:.2f} (median; half of the pairs {low:.2f} to {high:.2f}; goal: 1.50)")


def _writer(side: str, path: str, number: int, seconds: float, ready: Any, answers: Any) -> None:
    life = SIDES[side](path)
    taken: list[float] = []
    ready.wait()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        taken.append(life(f"job-{number}", len(taken)))
    answers.put(taken)


def contend(side: str, path: str, processes: int, seconds: float) -> list[list[float]]:
    """What each claim of each process took, with all of them writing at once."""
    context = multiprocessing.get_context("spawn")
    SIDES[side](path)("job", 0)
    ready, answers = context.Barrier(processes), context.Queue()
    children = [
        context.Process(target=_writer, args=(side, path, n, seconds, ready, answers)) for n in range(processes)
    ]
    for child in children:
        child.start()
    parts = [answers.get() for _ in children]
    for child in children:
        child.join()
    return parts


def many_processes(folder: str, rounds: int, processes: int, seconds: float) -> None:
    """Throughput, waits and shares of processes that write without a pause, in turns."""
    print(f"{processes} processes without a pause, {seconds:g} s a round, in ms:")
    kept: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side, figures in kept.items():
            parts = contend(side, os.path.join(folder, f"many-{side}-{number}.db"), processes, seconds)
            taken = [t for part in parts for t in part]
            shares = sorted(len(part) for part in parts)
            shown = {"p50": at(taken, 0.5), "p99": at(taken, 0.99), "p99.9": at(taken, 0.999), "longest": at(taken, 1)}
            figures.append({**shown, "claims/s": len(taken) / seconds})
            text = "   ".join(f"{name} {value:8.2f}" for name, value in figures[-1].items())
            print(f"  {side:9} {text}   claims per process {shares[0]} .. {shares[-1]}", flush=True)
    ours, bares = (
        {name: statistics.median(figure[name] for figure in kept[side]) for name in kept[side][0]}
        for side in ("leaselib", "bare")
    )
    print(
        f"  medians: leaselib p99 {ours['p99']:.1f} ms (goal: 40 at most); leaselib / bare: longest wait "
        f"{ours['longest'] / bares['longest']:.3f} (goal: 0.100 at most), claims/s "
        f"{ours['claims/s'] / bares['claims/s']:.2f} (bare, one process does nearly all of them)"
    )


def main() -> None:
    """Parses the arguments, prints machine and versions, runs both parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--claims", type=int, default=100)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to put the files (default: a new folder among the temporary ones)")
    options = parser.parse_args()
    print(
        f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {platform.system()} "
        f"{platform.machine()}, {os.cpu_count()} cores, synchronous=FULL"
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        one_process(folder, options.pairs, options.claims)
        many_processes(folder, options.rounds, options.processes, options.seconds)


if __name__ == "__main__":
    main()
