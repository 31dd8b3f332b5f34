"""One chaos run from its beginning to its verdict: the store's place, the members, the nemesis, peace, the checks.

Used by the test's thread; a metronome thread of its own measures by how much the machine was late, which is added to
the bounds of liveness, never to anything else.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import history
from cluster import BEAT_S, SLACK_S, TAKEOVER_S, Cluster, Fact, assert_all_started, slots_between, wall_ms
from fix_clock_shim import SteppedClock
from fix_proxy import Proxy
from history import liveness

from leaselib._model import to_ms

from . import plan
from .nemesis import Member, Nemesis

STORES = ("sqlite", "redis", "postgres")
DEFAULT_SEEDS = {"sqlite": 1, "redis": 2, "postgres": 3}
JOBS: list[Mapping[str, Any]] = [
    {"name": "skip", "do": "work", "seconds": 0.15, "every_ms": 500},
    {"name": "allow", "do": "work", "seconds": 1.0, "every_ms": 700, "overlap": "allow"},
    {"name": "long", "do": "work", "seconds": 2.2, "every_ms": 3000},
    {"name": "failing", "do": "work_and_fail", "seconds": 0.1, "every_ms": 900},
    {"name": "saving", "do": "work_and_save", "seconds": 1.2, "every_ms": 2000},
]
PATIENCE_S = 30.0
"""How long a missed bound is waited for, so that the report tells late from never."""


class ChaosError(AssertionError):
    """A run that broke something. Its text is the whole report."""


@dataclass
class Result:
    """What a run was and what it found."""

    store: str
    seed: int
    seconds: float
    folder: Path
    faults: list[plan.Fault]
    counts: Counter[str]
    problems: list[history.Violation]
    slowest_s: float = 0.0

    @property
    def summary(self) -> str:
        """One line."""
        counts = ", ".join(f"{number} {name}" for name, number in sorted(self.counts.items()))
        return (
            f"{self.store} seed {self.seed}, {self.seconds:g} s: {len(self.faults)} faults, {len(self.problems)} "
            f"problems; all jobs ran again after {self.slowest_s:.2f} s; {counts}"
        )

    def report(self) -> str:
        """All that is needed to look into it and to play it again."""
        command = f"python -m tests.chaos --store {self.store} --seconds {self.seconds:g} --seed {self.seed}"
        problems = "\n".join(f"  {problem}" for problem in self.problems[:25])
        faults = "\n".join(f"  {fault}" for fault in self.faults)
        return (
            f"{self.summary}\nproblems (25 at most):\n{problems}\nfaults:\n{faults}\n"
            f"journal and stderr: {self.folder}\nto play it again: {command}"
        )

    def require(self) -> None:
        """Raises ChaosError with the report if something was broken."""
        if self.problems:
            raise ChaosError(self.report())


class Metronome:
    """Ticks every 50 ms, and sums up by how much it was late. Read by the test's thread."""

    def __init__(self) -> None:
        self.late_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="metronome", daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        before = time.monotonic()
        while not self._end.wait(0.05):
            now = time.monotonic()
            if now - before > 0.3:
                self.late_s += now - before - 0.05
            before = now

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()
        self._thread.join(5)


# ---- the place ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def place(store: str, folder: Path) -> Iterator[tuple[str, Any | None]]:
    """The URL of a place of its own, and the server that may be harmed, if it is one."""
    namespace = f"namespace=chaos-{secrets.token_hex(4)}"
    if store == "sqlite":
        yield f"sqlite:///{folder / 'leases.db'}", None
    elif store == "redis":
        from fix_servers_redis import RedisServer

        with RedisServer({"appendonly": "yes", "appendfsync": "always"}) as redis:
            yield f"{redis.url()}?{namespace}", redis
    else:
        from fix_servers_postgres import postgres_server

        with postgres_server() as postgres:
            yield f"{postgres.url()}?{namespace}", postgres


@contextlib.contextmanager
def members(url: str, server: Any | None, folder: Path) -> Iterator[list[Member]]:
    """The instances, each with its own proxy and clock if the store is a server's."""
    found: list[Member] = []
    with contextlib.ExitStack() as opened:
        for number in range(plan.MEMBERS):
            if server is None:
                found.append(Member(number, None, None, url))
                continue
            own = folder / f"clock-{number}"
            own.mkdir()
            proxy = opened.enter_context(Proxy(("127.0.0.1", server.port)))
            through = url.replace(f":{server.port}/", f":{proxy.port}/")
            found.append(Member(number, proxy, SteppedClock(own), through))
        yield found


# ---- the run --------------------------------------------------------------------------------------------------------


def run(store: str, seed: int, seconds: float, folder: Path) -> Result:
    """A chaos run of about that many seconds, in that empty folder, which isn't removed."""
    result = Result(store, seed, seconds, folder, plan.draw(seed, store, seconds), Counter(), [])
    try:
        with contextlib.ExitStack() as opened:
            url, server = opened.enter_context(place(store, folder))
            cluster = Cluster(url, folder, own_server=True)
            opened.callback(cluster.close, judged=False)
            metronome = Metronome()
            opened.callback(metronome.close)
            crew = opened.enter_context(members(url, server, folder))
            nemesis = Nemesis(cluster, crew, JOBS, server)
            opened.callback(nemesis.close)
            _carry_out(result, cluster, nemesis, metronome)
    except Exception as error:
        result.problems.append(history.Violation("run", f"{type(error).__name__}: {error}"))
        raise ChaosError(result.report()) from error
    return result


def _carry_out(result: Result, cluster: Cluster, nemesis: Nemesis, metronome: Metronome) -> None:
    began = time.monotonic()
    nemesis.boot()
    healed = nemesis.carry_out(result.faults)
    result.problems += _running_again(result, cluster, healed, metronome)
    calm_ms = wall_ms() + 1000
    result.problems += _no_dead_runs(cluster)
    cluster.wait_until(max(began + result.seconds, time.monotonic() + 4))
    calm_end_ms = wall_ms() - 1000
    cluster.stop_all(within_s=8)
    facts = cluster.facts()
    result.problems += _coverage(facts, calm_ms, calm_end_ms)
    ended_badly = {i.pid: i.popen.returncode for i in cluster.instances if i.pid not in cluster.killed}
    for pid, status in ended_badly.items():
        if status != 0:
            result.problems.append(history.Violation("run", f"process {pid}, which nobody killed, ended with {status}"))
    found = cluster.history()
    result.problems += history.check(found)
    result.counts = _counts(found)


def _running_again(
    result: Result, cluster: Cluster, healed: float, metronome: Metronome
) -> list[history.Violation]:
    """Every job passes a check within lease + two heartbeats + its interval + slack of the last fault."""
    problems, late_before_s = [], metronome.late_s
    first: dict[str, float] = {}
    while len(first) < len(JOBS) and time.monotonic() < healed + PATIENCE_S:
        for fact in cluster.facts("effect", at=lambda at: at > healed):
            first.setdefault(fact["job"], fact["at"] - healed)
        time.sleep(0.1)
    for job in JOBS:
        allowed_s = TAKEOVER_S + job["every_ms"] / 1000 + SLACK_S + metronome.late_s - late_before_s
        took_s = first.get(job["name"])
        if took_s is None or took_s > allowed_s:
            shown = "never" if took_s is None else f"after {took_s:.2f} s"
            problems.append(history.Violation("L2", f"{job['name']} ran again {shown}, {allowed_s:.2f} s are allowed"))
    result.slowest_s = max(first.values(), default=0.0)
    return problems


def _coverage(facts: list[Fact], first_ms: int, last_ms: int) -> list[history.Violation]:
    """L1 in peace: the quick jobs start in every slot, but for a few skips that say why."""
    problems = []
    for job in JOBS:
        if "overlap" not in job and job["every_ms"] < 1000:
            try:
                assert_all_started(facts, job["name"], slots_between(job["every_ms"], first_ms, last_ms))
            except AssertionError as error:
                problems.append(history.Violation("L1", str(error)))
    return problems


def _no_dead_runs(cluster: Cluster) -> list[history.Violation]:
    """In peace nothing stays `running` after its lease for longer than it takes a backup to look."""
    names, allowed_ms = [str(job["name"]) for job in JOBS], round((2 * BEAT_S + SLACK_S) * 1000)
    end = time.monotonic() + TAKEOVER_S + max(job["every_ms"] for job in JOBS) / 1000 + SLACK_S
    while True:
        records = cluster.store.unfinished(names)
        found = liveness.dead_runs(records, to_ms(cluster.store.ping().now), allowed_ms)
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


def _counts(found: history.History) -> Counter[str]:
    """How often what was reached."""
    counts: Counter[str] = Counter()
    for fact in found.facts:
        if fact["fact"] == "start":
            counts["handler starts"] += 1
            if fact["reason"] != "scheduled":
                counts[f"starts by {fact['reason']}"] += 1
        elif fact["fact"] == "effect":
            counts["passed checks"] += 1
        elif fact["fact"] == "event" and fact["event"] in ("lost", "interrupted", "store_error"):
            counts[f"events {fact['event']}"] += 1
    counts["runs in the store"] = len(found.records)
    if found.decisions:
        counts["decisions"] = len(found.decisions)
    return counts
