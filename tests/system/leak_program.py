"""The child of `test_leaks`: a scheduler under load that counts what happens and measures what its process holds.

Run as `python leak_program.py CONF`, CONF being JSON: `url`, `jobs` (how many), `every_s`, `workers`, and `leak`:
whether every handler leaks on purpose. It answers one line of JSON once it has started, and one for each command, which
is a line of JSON on stdin. At the end of stdin it stops. `Counts` is guarded by its condition, and used by the workers
and by the thread that calls listeners; the rest is the main thread's.

With PYTHONTRACEMALLOC=4 set, `measure` also tells where memory was allocated that the first measurement did not find.
"""

from __future__ import annotations

import gc
import json
import resource
import socket
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from leaselib import Event, Every, RunContext, Scheduler
from leaselib.events import EVENT_NAMES

WAIT_S = 20.0
"""No wait for a fact is longer."""
SAME_LOOKS = 3
"""The process is at rest once so many looks in a row find the same."""
LEAKED_BYTES = 50_000
OPTIONS: dict[str, Any] = {
    "overlap": "allow",
    "history_size": 5,
    "lease": 3,
    # A run's record stays in memory until the instants planned for it have passed: its heartbeat, and the one at which
    # it would have been too late. Both come soon here, so that memory is level after seconds rather than minutes.
    "heartbeat": 0.5,
    "max_late": 2,
    "catch_up": 1,
}


class Counts:
    """How many of each event there were, and, as `ran`, how often a handler was called."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._counts: Counter[str] = Counter(dict.fromkeys((*EVENT_NAMES, "ran"), 0))

    def add(self, name: str) -> None:
        """One more."""
        with self._changed:
            self._counts[name] += 1
            self._changed.notify_all()

    def event(self, event: Event) -> None:
        """A listener."""
        self.add(event.name)

    def now(self) -> dict[str, int]:
        """All counts."""
        with self._changed:
            return dict(self._counts)

    def wait(self, what: str, condition: Callable[[Counter[str]], bool]) -> None:
        """Until it holds."""
        with self._changed:
            held = self._changed.wait_for(lambda: condition(self._counts), WAIT_S)
            assert held, f"not within {WAIT_S:g} s: {what}; {dict(self._counts)}"


class Program:
    """One scheduler, its jobs, and the commands that it is given."""

    def __init__(self, conf: dict[str, Any]) -> None:
        self.conf = conf
        self.counts = Counts()
        self.leaked: list[Any] = []
        self.traced: tracemalloc.Snapshot | None = None
        self.scheduler = Scheduler(conf["url"], max_workers=conf["workers"], **OPTIONS)
        for name in EVENT_NAMES:
            self.scheduler.on(name, self.counts.event)
        self.scheduler.add(self.by_hand, Every(days=36_500))  # not due in this century: it is there for run_now
        self.add_jobs()

    def add_jobs(self) -> None:
        """The load begins, or goes on."""
        for number in range(self.conf["jobs"]):
            self.scheduler.add(self.work, Every(self.conf["every_s"]), name=f"job-{number}")

    def by_hand(self) -> None:
        """A run that leaks nothing."""
        self.counts.add("ran")

    def work(self, ctx: RunContext) -> None:
        """What the jobs do."""
        self.counts.add("ran")
        if self.conf["leak"]:
            blocked = threading.Event()
            threading.Thread(target=blocked.wait, daemon=True).start()
            file = Path("/dev/null").open()  # noqa: SIM115  never closed, which is the point
            self.leaked += [blocked, b"x" * LEAKED_BYTES, socket.socket(), file]

    # ---- commands ------------------------------------------------------------------------------------------------

    def wait(self, name: str, count: int) -> dict[str, int]:
        """Until there were so many events of that name. Returns all counts."""
        self.counts.wait(f"{count} of {name}", lambda counts: counts[name] >= count)
        return self.counts.now()

    def wait_unreachable(self, seconds: float) -> None:
        """Until the store has been out of reach for so long."""
        until(lambda: self.scheduler.health().store_unreachable_for >= seconds, "the outage lasts")

    def fill_disk(self, full: bool) -> None:
        """From now on every write to a file fails as on a full disk; or no more."""
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if full else hard, hard))

    def measure(self) -> dict[str, Any]:
        """What the process holds, under load and at rest, and what it counted so far. Afterwards the load goes on.

        At rest: every run has ended and every worker is free, the connections that were kept are let go, and those that
        one run opens are open. So the figures don't depend on how many threads happened to be in the store at once.
        """
        loaded = held()
        for number in range(self.conf["jobs"]):
            self.scheduler.remove(f"job-{number}")
        looks: list[dict[str, int]] = []
        until(lambda: self.same_again(looks), "the process is at rest")
        gc.collect()
        rest = {**looks[-1], "rss_kib": resident_kib()}
        self.counts.wait("each run's success", lambda counts: counts["ran"] == counts["start"] == counts["success"])
        counts, health = self.counts.now(), self.scheduler.health()
        faults = {"internal_errors": health.internal_errors, "events_dropped": health.events_dropped}
        grown = self.grown()
        self.add_jobs()
        return {"loaded": loaded, "rest": rest, "counts": counts, "faults": faults, "grown": grown}

    def same_again(self, looks: list[dict[str, int]]) -> bool:
        """Lets connections go, runs a job by hand, and looks. Whether the last looks found the same."""
        instance = self.scheduler._instance
        assert instance is not None
        self.scheduler.store.close()
        if self.scheduler.run_now("by_hand") != "won":  # every worker has a claim yet, or this millisecond had its run
            return False
        until(lambda: instance.planner.free == self.conf["workers"], "every worker is free")
        looks.append(held())
        return len(looks) >= SAME_LOOKS and all(look == looks[-1] for look in looks[-SAME_LOOKS:])

    def grown(self) -> list[str]:
        """Where the most memory was allocated since the first measurement, if Python traces that."""
        if not tracemalloc.is_tracing():
            return []
        now = tracemalloc.take_snapshot()
        self.traced = before = self.traced or now
        return ["\n".join([str(found), *found.traceback.format()]) for found in now.compare_to(before, "traceback")[:5]]

    def stop(self) -> dict[str, Any]:
        """Stops the scheduler. What the process holds then."""
        assert self.scheduler.stop(), "a handler that does nothing did not end in time"
        self.scheduler.store.close()
        return {"rest": held(), "counts": self.counts.now()}

    def serve(self) -> None:
        """Carries out commands until there are no more."""
        commands = (self.wait, self.wait_unreachable, self.fill_disk, self.measure, self.stop)
        by_name: dict[str, Callable[..., Any]] = {command.__name__: command for command in commands}
        answer(held())
        self.scheduler.start()
        for line in sys.stdin:
            name, arguments = json.loads(line)
            answer(by_name[name](**arguments))
        self.scheduler.stop()


def answer(found: Any) -> None:
    """A line on stdout."""
    print(json.dumps(found), flush=True)


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits until it holds."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.002)


def held() -> dict[str, int]:
    """How many threads and file descriptors this process has, and how many of these are sockets."""
    kinds = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            kinds.append(str(descriptor.readlink()))
        except FileNotFoundError:  # closed meanwhile; the listing's own is among them
            continue
    sockets = sum(kind.startswith("socket:") for kind in kinds)
    return {"threads": threading.active_count(), "fds": len(kinds), "sockets": sockets}


def resident_kib() -> int:
    """The memory that this process has in RAM."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


if __name__ == "__main__":
    Program(json.loads(sys.argv[1])).serve()
