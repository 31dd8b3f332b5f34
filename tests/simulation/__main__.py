"""`python -m tests.simulation`: see --help. Exit code 1 if an invariant was broken or a branch was never reached."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterable

from . import checks, pairs, runner
from .plan import crowded, plan


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2_000, metavar="N", help="so many histories (default: 2000)")
    parser.add_argument("--first", type=int, metavar="SEED", help="the first (default: 0; with --forever, any)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="in so many processes (default: 2)")
    parser.add_argument("--forever", action="store_true", help="go on until one fails, or until interrupted")
    parser.add_argument("--seed", type=int, metavar="SEED", help="only this one, with everything that happened")
    parser.add_argument("--faults", metavar="LIST", help="with --seed: only these of its faults, as 0,3,7 or none")
    parser.add_argument("--pairs", action="store_true", help="every pair of faults at every step of one run's life")
    options = parser.parse_args()
    if options.pairs:
        return _pairs()
    if options.seed is not None:
        return _replay(options.seed, options.faults)
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    began, summary, first = time.monotonic(), runner.Summary(), options.first
    if first is None:  # others than the gate's, which hold
        first = random.randrange(1_000_000, 1_000_000_000) if options.forever else 0
    seeds: Iterable[int] = itertools.count(first)
    if not options.forever:  # those that take longest come first, so that no process is left alone with one
        seeds = sorted(range(first, first + options.seeds), key=crowded, reverse=True)
    try:
        for result in runner.many(seeds, options.jobs):
            summary.add(result)
            if summary.histories % 200 == 0:
                print(f"{summary.histories} histories in {time.monotonic() - began:.0f} s", flush=True)
            if options.forever and summary.failed:
                break
    except KeyboardInterrupt:
        print("interrupted")
    for failed in summary.failed[:3]:
        print(runner.report(failed))
    for branch in checks.BRANCHES:
        print(f"  {summary.reached[branch]:>10}  {branch}")
    print(
        f"{summary.histories} histories, {summary.slots} slots, {summary.decisions} decisions of the store, "
        f"{len(summary.failed)} failed, {len(summary.missed())} branches never reached "
        f"({', '.join(summary.missed()) or 'none'}), {time.monotonic() - began:.0f} s"
    )
    return 1 if summary.failed or summary.missed() else 0


def _pairs() -> int:
    began, count, failed = time.monotonic(), 0, 0
    for name, problems in pairs.sweep():
        count += 1
        failed += bool(problems)
        if problems and failed <= 20:
            print(f"{name}: {problems[0][0]}: {problems[0][1]}", flush=True)
    print(f"{count} pairs of faults at steps, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def _replay(seed: int, faults: str | None) -> int:
    made = plan(seed)
    if faults is not None:
        made = made.keeping([] if faults == "none" else [int(index) for index in faults.split(",")])
    cluster, problems = checks.run(made)
    lines = [(at, f"{member.name}: {emit}") for member in cluster.everyone for at, emit in member.told]
    for at, line in sorted(lines):
        print(at, line)
    for fault in made.faults:
        print(f"fault at {fault}")
    for identifier, text in problems:
        print(f"{identifier}: {text}")
    print(f"{len(problems)} problems; digest {cluster.digest()}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
