"""What a history is made of, drawn from one seed: jobs, instances, a list of faults. Pure values.

A plan is all that a history depends on beside the code; leaving faults out of it gives another history that can be
replayed as well, which is how a failing one is shrunk.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

SLOTS = 200
"""A history has at least so many slots, over all its jobs."""
CROWD = 300
"""So many instances are in the largest clusters."""
INTERVALS_MS = (1_000, 1_000, 1_000, 2_000, 2_000, 2_000, 3_000, 3_000, 5_000, 8_000)
"""The longer ones are rarer: most of such a history is heartbeats, checks and idle looks at clocks."""
CROWD_INTERVAL_MS = 3_000
"""The longest of a crowd's, for the same reason."""
HEARTBEATS = (6, 4, 3, 2.2)
"""So many of them in a lease: by default, by as many as the margin takes, and nearly by as few as can be."""
STORE_FAULTS = ("outage", "freeze-store", "refuse-writes", "failover", "reset", "store-step")
INSTANCE_FAULTS = (
    "crash", "pause", "pause-after-win", "stop", "cut", "drop-answers", "delay", "duplicate", "hold", "wall-step",
    "manual",
)  # fmt: skip
"""`pause-after-win` begins as soon as the instance wins a claim."""
FAULTS = STORE_FAULTS + INSTANCE_FAULTS
LAST_FAULTS = ("die", "leave")
"""In the calm time one instance may die or be stopped for good: how soon others go on is judged to the millisecond."""
RUNNER = "runner"
"""Of a fault's `who`: whichever instance runs something when it happens."""
WINDOWS = ("outage", "freeze-store", "refuse-writes", "cut", "drop-answers", "delay", "duplicate", "hold")
"""These last for a time; the others happen at an instant."""


@dataclass(frozen=True)
class JobPlan:
    """A job as all instances know it; `options` are those of the first version of the program."""

    name: str
    every_ms: int
    options: dict[str, Any]
    longest_ms: int  # how long its handlers take, at most
    fails: float  # the share of them that raises
    heeds: float  # the share of them that look at their signal
    checkpoints: float
    flips: bool = False  # whether the program's next version has the other `overlap`


@dataclass(frozen=True)
class Fault:
    """What happens when, to whom (None: the store, or everybody), for how long, and by how much."""

    kind: str
    at_ms: int
    who: str | None = None
    for_ms: int = 0
    amount: int = 0

    def __str__(self) -> str:
        who = f" {self.who}" if self.who else ""
        lasts = f" for {self.for_ms}" if self.for_ms else ""
        return f"{self.at_ms}: {self.kind}{who}{lasts}" + (f" by {self.amount}" if self.amount else "")


@dataclass(frozen=True)
class Plan:
    """One history to be. Times are milliseconds since the world's beginning."""

    seed: int
    jobs: tuple[JobPlan, ...]
    instances: tuple[str, ...]
    workers: int
    drift_ppm: dict[str, int]
    wall_offset_ms: dict[str, int]
    faults: tuple[Fault, ...]
    calm_ms: int  # no faults from here on, but for one of LAST_FAULTS once it has settled
    settled_ms: int  # and from here on the bounds of liveness must hold
    end_ms: int

    def keeping(self, indexes: list[int]) -> Plan:
        """The same with only these of its faults."""
        return replace(self, faults=tuple(self.faults[i] for i in indexes))


def crowded(seed: int) -> bool:
    """Whether that seed's cluster is one of the largest."""
    return seed % 1000 == 499


def plan(seed: int) -> Plan:
    """The history of a seed."""
    chance = random.Random(f"plan-{seed}")
    crowd = crowded(seed)
    jobs = tuple(_job(chance, f"job-{n}", crowd) for n in range(1 if crowd else chance.randint(1, 3)))
    count = CROWD if crowd else chance.choice((2, 2, 2, 3, 3, 4, 5))
    names = tuple(f"i{n}" for n in range(count))
    span_ms = math.ceil((SLOTS + len(jobs)) / sum(1 / job.every_ms for job in jobs))  # a job's last slot may be cut off
    settle_ms = max(bound_ms(job) for job in jobs)
    calm_ms = max(span_ms * 4 // 5, 1)
    end_ms = max(span_ms, calm_ms + settle_ms + max(4 * max(job.every_ms for job in jobs), 500 + takeover_ms(jobs)))
    made = Plan(
        seed,
        jobs,
        names,
        workers=chance.choice((1, 2, 4, 4)),
        drift_ppm={name: chance.choice((0, 0, 200, -200, 400, -400)) for name in names},
        wall_offset_ms={name: chance.choice((0, 0, 3_600_000, -3_600_000, 250)) for name in names},
        faults=_faults(chance, names, jobs, calm_ms),
        calm_ms=calm_ms,
        settled_ms=calm_ms + settle_ms,
        end_ms=end_ms,
    )
    return replace(made, faults=made.faults + _last_faults(made))


def takeover_ms(jobs: tuple[JobPlan, ...]) -> int:
    """How long it takes at most until a run whose instance is lost must have been decided on again, and a bit."""
    return max(round(1_000 * (job.options["lease"] + 2 * job.options["heartbeat"])) for job in jobs) + 500


def bound_ms(job: JobPlan) -> int:
    """Lease + two heartbeats + interval, and what calls that were under way when the faults stopped can still take."""
    lease_ms, heartbeat_ms = round(job.options["lease"] * 1000), round(job.options["heartbeat"] * 1000)
    return lease_ms + 2 * heartbeat_ms + job.every_ms + EPSILON_MS + lease_ms // 3


EPSILON_MS = 2_500
"""How long an instance may take to notice that the store is back (its longest delay between pings), and a bit."""


def _job(chance: random.Random, name: str, crowd: bool) -> JobPlan:
    every_ms = chance.choice([ms for ms in INTERVALS_MS if ms <= CROWD_INTERVAL_MS or not crowd])
    lease = chance.choice((3, 6, 9))
    options: dict[str, Any] = {
        "lease": lease,
        "heartbeat": lease / chance.choice(HEARTBEATS),
        "max_attempts": chance.choice((1, 2, 3)),
        "overlap": chance.choice(("skip", "skip", "skip", "allow")),
        "jitter": chance.choice((0, 0.1, every_ms / 5_000)),
        "max_late": chance.choice((2, 5, 20)),
        "catch_up": chance.choice((0, 10, 60)),
        "history_size": chance.choice((0, 3, 20)),
        "on_store_loss": chance.choice(("abort", "abort", "abort", "continue")),
    }
    if chance.random() < 0.2:
        options["max_runtime"] = every_ms / 1_000
    longest_ms = chance.choice((50, every_ms // 2, every_ms // 2, every_ms, 3 * every_ms, lease * 2_000))
    if crowd:
        options |= {"jitter": every_ms / 2_000, "history_size": 20}
        longest_ms = min(longest_ms, every_ms // 2)
    fails, heeds = chance.choice((0, 0.1)), chance.choice((0, 0.8, 1))
    return JobPlan(name, every_ms, options, longest_ms, fails, heeds, 0.3, flips=chance.random() < 1 / 3)


def _faults(
    chance: random.Random, names: tuple[str, ...], jobs: tuple[JobPlan, ...], calm_ms: int
) -> tuple[Fault, ...]:
    """A random subset of the kinds is switched on; between few and many of them happen."""
    kinds = chance.sample(FAULTS, chance.randint(1, min(7, len(FAULTS))))
    lease_ms = max(round(job.options["lease"] * 1000) for job in jobs)
    count = chance.choice((2, 6, 12, 25))
    if chance.random() < 0.05:  # copies of claims that arrive while nobody is there to take over
        kinds, count = ["duplicate", "stop", "crash", "pause", "pause-after-win"], 25
    made = [one(chance, chance.choice(kinds), names, lease_ms, calm_ms) for _ in range(count)]
    return tuple(sorted(made, key=lambda fault: fault.at_ms))


def _last_faults(made: Plan) -> tuple[Fault, ...]:
    """In two of three histories an instance is lost for good, while it runs something if possible."""
    chance = random.Random(f"last-{made.seed}")
    if chance.random() < 1 / 3:
        return ()
    at_ms = chance.randrange(made.settled_ms, made.end_ms - takeover_ms(made.jobs))
    return (Fault(chance.choice(LAST_FAULTS), at_ms, RUNNER),)


def one(chance: random.Random, kind: str, names: tuple[str, ...], lease_ms: int, calm_ms: int) -> Fault:
    """A fault of that kind."""
    at_ms = chance.randrange(500, calm_ms)
    who = None if kind in STORE_FAULTS else chance.choice((RUNNER, chance.choice(names)))
    for_ms = amount = 0
    if kind in WINDOWS or kind in ("pause", "pause-after-win", "crash", "stop"):
        lasts_ms = chance.choice((lease_ms // 8, lease_ms // 2, lease_ms, 2 * lease_ms, 5 * lease_ms))
        for_ms = min(calm_ms - at_ms, lasts_ms)
    if kind == "delay":
        amount = chance.choice((50, lease_ms // 12, lease_ms // 3))
    elif kind == "hold":
        amount = min(calm_ms - at_ms, chance.choice((lease_ms, 4 * lease_ms, 10 * lease_ms)))
    elif kind == "failover":
        amount = chance.choice((100, 1_000, lease_ms))
    elif kind in ("store-step", "wall-step"):
        amount = chance.choice((1, -1)) * chance.choice((300, 1_000, lease_ms, 30_000, 3_600_000))
    elif kind in ("crash", "stop"):
        amount = chance.choice((0, 0, 1))  # the next start is of a version with other options
    return Fault(kind, at_ms, who, for_ms, amount)
