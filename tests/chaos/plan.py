"""What a nemesis is going to do, drawn from a seed. Pure: the same seed, store and length give the same faults."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

MEMBERS = 4
FIRST_S = 2.0
"""So much peace at the start, in which jobs begin."""
Way = Literal["requests", "answers", "both"]

PROCESS = ("kill", "freeze", "terminate")
NETWORK = ("cut", "delay", "blackhole", "drop-answers", "cut-midway")
SERVER = ("server-kill", "server-freeze")
WEIGHTS = {
    "kill": 5, "freeze": 6, "terminate": 3, "cut": 3, "delay": 2, "blackhole": 5, "drop-answers": 4, "cut-midway": 2,
    "clock": 3, "server-kill": 2, "server-freeze": 2, "file-lock": 5,
}  # fmt: skip
EVERYBODY = -1
"""The target of a fault that isn't about one instance."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    at_s: when it begins, in seconds from the start.
    target: the number of the instance, or EVERYBODY.
    seconds: how long it lasts; then it is undone (a killed process starts again).
    amount: of a clock: by how many seconds it steps; of a delay: seconds per piece; of a cut midway: bytes that still
        get through; of dropped answers: how many; of a blackhole: 1 if it ends with its connections reset, instead of
        passing on what was held.
    """

    at_s: float
    kind: str
    target: int
    seconds: float
    amount: float = 0.0
    way: Way = "both"

    def __str__(self) -> str:
        whom = "" if self.target == EVERYBODY else f" of instance {self.target}"
        return f"{self.at_s:7.2f} s {self.kind}{whom} for {self.seconds:.2f} s, {self.way}, {self.amount:g}"


def kinds_of(store: str) -> list[str]:
    """The faults that a store's runs know. SQLite's clock is the machine's, so no clock is stepped with it."""
    if store == "sqlite":
        return [*PROCESS, "file-lock"]
    return [*PROCESS, *NETWORK, *SERVER, "clock"]


def draw(seed: int, store: str, seconds: float) -> list[Fault]:
    """The faults of a run of that length, in order; the last ends when two thirds of it are over."""
    chance = random.Random(f"{store} {seed}")
    kinds = kinds_of(store)
    weights = [WEIGHTS[kind] for kind in kinds]
    busy_until: dict[tuple[int, str], float] = {}
    faults: list[Fault] = []
    at_s, end_s = FIRST_S, seconds * 2 / 3
    while at_s < end_s - 0.2:
        kind = chance.choices(kinds, weights)[0]
        fault = _draw_one(chance, kind, at_s, end_s)
        key = (fault.target, _group(kind))
        if busy_until.get(key, 0.0) > at_s:  # one fault of a group at a time and target
            at_s += 0.05
            continue
        busy_until[key] = at_s + fault.seconds + 0.3
        faults.append(fault)
        at_s += chance.uniform(0.05, 1.1)
    return faults


def _group(kind: str) -> str:
    return next((name for name, kinds in (("process", PROCESS), ("network", NETWORK)) if kind in kinds), "other")


def _draw_one(chance: random.Random, kind: str, at_s: float, end_s: float) -> Fault:
    target = EVERYBODY if kind in SERVER or kind == "file-lock" else chance.randrange(MEMBERS)
    # Shorter than the lease of 1 s, or longer.
    seconds = chance.uniform(0.1, 0.8) if chance.random() < 0.5 else chance.uniform(1.1, 3.0)
    way: Way = chance.choice(("requests", "answers", "both"))
    amount = {
        "delay": chance.uniform(0.02, 0.4),
        "cut-midway": float(chance.randrange(0, 900)),
        "drop-answers": float(chance.randrange(1, 5)),
        "blackhole": float(chance.randrange(2)),
        "clock": chance.choice((-1, 1)) * 3600 ** chance.random(),
    }.get(kind, 0.0)
    if kind in ("clock", "drop-answers", "cut-midway"):
        seconds = 0.3
    return Fault(at_s, kind, target, min(seconds, max(0.1, end_s - at_s)), amount, way)
