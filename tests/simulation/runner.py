"""Runs many histories, in several processes if asked, and shrinks those that fail. Main thread only.

A failing history is reported with the command that replays it; shrinking leaves out faults, halves of them first, as
long as one of the same invariants is broken.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from . import checks
from .plan import Plan, plan

TRIES = 200
"""A shrink tries at most so many histories."""


@dataclass
class Result:
    """What a history showed: the problems as (invariant, text), and the branches that it went through."""

    seed: int
    problems: list[tuple[str, str]]
    reached: Counter[str]
    slots: int
    decisions: int


@dataclass
class Summary:
    """What many histories showed."""

    histories: int = 0
    slots: int = 0
    decisions: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    failed: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Takes one history in."""
        self.histories += 1
        self.slots += result.slots
        self.decisions += result.decisions
        self.reached += result.reached
        if result.problems:
            self.failed.append(result)

    def missed(self) -> list[str]:
        """The branches that no history went through."""
        return [branch for branch in checks.BRANCHES if not self.reached[branch]]


def one(seed: int) -> Result:
    """The history of a seed."""
    made = plan(seed)
    slots = sum(made.end_ms // job.every_ms for job in made.jobs)
    try:
        cluster, problems = checks.run(made)
    except Exception as error:
        return Result(seed, [_crash(error)], Counter(), slots, 0)
    return Result(seed, problems, checks.reached(cluster), slots, len(cluster.entries))


def many(seeds: Iterable[int], jobs: int) -> Iterator[Result]:
    """The histories of these seeds, in as many processes; in no particular order if there are several."""
    if jobs == 1:
        yield from map(one, seeds)
        return
    quiet = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to hear
    with multiprocessing.get_context("spawn").Pool(jobs, signal.signal, quiet) as pool:
        yield from pool.imap_unordered(one, seeds, chunksize=4)


def shrunk(made: Plan, judge: Callable[[Plan], set[str]]) -> tuple[Plan, list[int]]:
    """The plan with as few of its faults as still break one of the same invariants, and which those are.

    `judge` gives the invariants that a plan's history breaks.
    """
    wanted, kept = judge(made), list(range(len(made.faults)))
    assert wanted, f"seed {made.seed} breaks nothing; there is nothing to shrink"
    size, tries = max(1, len(kept) // 2), 0
    while kept and tries < TRIES:
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            tries += 1
            if judge(made.keeping(fewer)) & wanted:
                kept = fewer
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
    return made.keeping(kept), kept


def broken(made: Plan) -> set[str]:
    """The invariants that a plan's history breaks."""
    try:
        return {identifier for identifier, _ in checks.run(made)[1]}
    except Exception as error:
        return {_crash(error)[0]}


def _crash(error: Exception) -> tuple[str, str]:
    """A decision that raised is a problem like others: it has a seed, and is shrunk."""
    return "crash", "".join(traceback.format_exception(error)[-3:]).strip()


def report(result: Result) -> str:
    """What went wrong in a history, shrunk, and the command that shows it again."""
    made, kept = shrunk(plan(result.seed), broken)
    lines = [f"seed {result.seed}: {len(result.problems)} problems"]
    lines += [f"  {identifier}: {text}" for identifier, text in result.problems[:5]]
    lines += [f"  jobs: {', '.join(map(str, made.jobs))}", f"  instances: {len(made.instances)}"]
    lines += [f"  fault {index} at {fault}" for index, fault in zip(kept, made.faults, strict=True)]
    faults = ",".join(map(str, kept)) or "none"
    return "\n".join([*lines, f"  replay: python -m tests.simulation --seed {result.seed} --faults {faults}"])
