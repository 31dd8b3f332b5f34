"""Every pair of faults at every step of one run's life, from before its claim to after its end. Pure.

A history without faults tells when each step of the first run is; then the same is carried out again with two faults at
a step. Each fault of an instance hits the runner; the second one also, in a history of its own, the backup.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness import START_MS

from .checks import run
from .cluster import Cluster
from .plan import FAULTS, STORE_FAULTS, Fault, JobPlan, Plan, bound_ms

EVERY_MS = 5_000
LONG_MS = 4_500
"""Longer than lease + two heartbeats."""
STEPS = (
    "before the claim is sent",
    "the claim is under way",
    "the claim's answer is under way",
    "the handler begins",
    "the handler is half done",
    "before a heartbeat is sent",
    "a heartbeat is under way",
    "a heartbeat's answer is under way",
    "before the finish is sent",
    "the finish is under way",
    "the finish's answer is under way",
    "the run is over",
)
KINDS = (*(kind for kind in FAULTS if kind != "store-step"), "store-step forward", "store-step back")
AMOUNTS = {
    "store-step forward": 4_000,
    "store-step back": -4_000,
    "wall-step": 3_600_000,
    "delay": 200,
    "hold": 4_000,
    "failover": 500,
    "crash": 1,
}
INSTANTS = ("failover", "reset", "store-step forward", "store-step back", "wall-step", "manual")


def base() -> Plan:
    """Two instances, one job whose handler outlives several heartbeats; no faults."""
    options = {"lease": 3, "heartbeat": 0.5, "max_attempts": 3, "overlap": "skip", "jitter": 0.1}
    options |= {"max_late": 5, "catch_up": 10, "history_size": 20, "on_store_loss": "abort"}
    job = JobPlan("job-0", EVERY_MS, options, longest_ms=2_400, fails=0, heeds=1, checkpoints=1)
    calm_ms = EVERY_MS + 2_500 + LONG_MS + 500
    return Plan(
        seed=1,
        jobs=(job,),
        instances=("i0", "i1"),
        workers=4,
        drift_ppm={"i0": 0, "i1": 0},
        wall_offset_ms={"i0": 0, "i1": 0},
        faults=(),
        calm_ms=calm_ms,
        settled_ms=calm_ms + bound_ms(job),
        end_ms=calm_ms + bound_ms(job) + 4 * EVERY_MS,
    )


def steps(cluster: Cluster) -> tuple[str, dict[str, int]]:
    """The runner of the first run that outlives a heartbeat, and when each of its steps is, in a history's own time."""
    beat = next(call for call in cluster.calls if call.kind == "heartbeat")
    token = beat.token
    decided = {
        op: next(e.now_ms for e in cluster.entries if e.op == op and e.token == token)
        for op in ("claim", "heartbeat", "finish")
    }
    sent = {
        kind: next(c.sent_ms for c in cluster.calls if c.kind == kind and c.token == token)
        for kind in ("claim", "finish")
    }
    runner = next(member for member in cluster.everyone if member.name == beat.instance)
    told = {event.name: at for at, event in runner.told if event.token == token}
    times = (
        sent["claim"] - 1,
        decided["claim"] - 1,
        decided["claim"] + 1,
        told["start"] + 1,
        (told["start"] + sent["finish"]) // 2,
        beat.sent_ms - 1,
        decided["heartbeat"] - 1,
        decided["heartbeat"] + 1,
        sent["finish"] - 1,
        decided["finish"] - 1,
        decided["finish"] + 1,
        told["success"] + 1,
    )
    return runner.place, {name: at - START_MS for name, at in zip(STEPS, times, strict=True)}


def histories() -> Iterator[tuple[str, Plan]]:
    """Each pair at each step: its name, and the plan."""
    plain = base()
    runner, times = steps(Cluster(plain).carry_out())
    (other,) = [name for name in plain.instances if name != runner]
    for step, at_ms in times.items():
        for first in KINDS:
            for second in KINDS:
                for whose in (runner,) if second in STORE_FAULTS or second.startswith("store") else (runner, other):
                    faults = (fault(first, at_ms, runner), fault(second, at_ms, whose))
                    yield f"{step}: {first}, {second} of {whose}", replace(plain, faults=faults)


def fault(kind: str, at_ms: int, who: str) -> Fault:
    """The fault of that kind, at that time."""
    name = kind.partition(" ")[0]
    for_ms = 0 if kind in INSTANTS else 1_000 if kind in ("crash", "stop") else LONG_MS
    return Fault(name, at_ms, None if name in STORE_FAULTS else who, for_ms, AMOUNTS.get(kind, 0))


def sweep(every: int = 1, first: int = 0) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The problems of each pair at each step; with `every`, of each so manieth of them."""
    for number, (name, made) in enumerate(histories()):
        if number % every == first:
            yield name, run(made)[1]
