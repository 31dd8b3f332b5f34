"""Chaos from the command line: `python -m tests.chaos --store redis --seconds 600 --seed 7`, from the root folder."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path

import fix_stores

from . import drive


def main() -> int:
    """Runs, prints the verdict; the status is 1 if something was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="faults on real processes, from a seed")
    parser.add_argument("--store", choices=[*drive.STORES, "all"], default="all")
    parser.add_argument("--seconds", type=float, default=60, help="per run; faults stop after two thirds (from 15)")
    parser.add_argument("--seed", type=int, help="drawn at random unless given")
    parser.add_argument("--runs", type=int, default=1, help="so many runs per store, with the seeds that follow")
    given = parser.parse_args()
    if given.seconds < 15:
        parser.error("--seconds must be at least 15: the processes need some to start, and the faults some to work")
    first = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    broken = False
    for seed in range(first, first + given.runs):
        for store in drive.STORES if given.store == "all" else [given.store]:
            print(f"{store}: seed {seed}, {given.seconds:g} s", flush=True)
            folder = Path(tempfile.mkdtemp(prefix=f"leaselib-chaos-{store}-"))
            try:
                result = drive.run(store, seed, given.seconds, folder)
                result.require()
            except drive.ChaosError as error:
                broken = True
                print(error, flush=True)
            else:
                print(result.summary, flush=True)
                shutil.rmtree(folder)
    return int(broken)


if __name__ == "__main__":
    try:
        status = main()
    finally:
        fix_stores.at_session_end.close()
    sys.exit(status)
