"""`python -m tests.mutants [name ...] [--jobs N] [--baseline]`: applies each mutant and runs the test that must fail.

Runs in the main thread, which waits for `--jobs` threads; each of those works on one mutant at a time, in a copy of the
project of its own, and waits for that mutant's pytest. Nothing is shared between them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.mutants.mutant_patches import ROOT, BadPatchError, Mutant, load

COPIED = ("leaselib", "tests", "setup.cfg", "pyproject.toml", "README.md", "CHANGELOG.md")
TESTS_FAILED = 1
"""pytest's exit status for tests that ran and failed; any other is an error of ours, or says that all passed."""
TIMEOUT_S = 300.0


class Verdict:
    """What became of one mutant. `killed` is the only good one."""

    def __init__(self, mutant: Mutant, word: str, detail: str, seconds: float) -> None:
        self.mutant, self.word, self.detail, self.seconds = mutant, word, detail, seconds

    def __str__(self) -> str:
        return f"{self.word:<14} {self.mutant.name:<52} {self.seconds:5.1f} s  {self.detail}"


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 if every mutant was killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="name", help="which: how their names begin, such as 07; else all")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (2)")
    parser.add_argument(
        "--baseline", action="store_true", help="only check that every selection passes on the project as it is"
    )
    options = parser.parse_args(arguments)
    mutants = [m for m in load() if not options.names or m.name.startswith(tuple(options.names))]
    if not mutants:
        parser.error(f"no mutant's name begins with {' or '.join(options.names)}")
    if options.baseline:
        return _baseline(mutants)
    began = time.monotonic()
    survivors = 0
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        for verdict in pool.map(_judge, mutants):
            print(verdict, flush=True)
            survivors += verdict.word != "killed"
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants killed in {time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


def _baseline(mutants: list[Mutant]) -> int:
    """Runs each distinct selection on the unchanged project, those on the same stores together."""
    by_options: dict[tuple[str, ...], dict[str, None]] = {}
    for mutant in mutants:
        by_options.setdefault(mutant.killed_by[1:], {})[mutant.killed_by[0]] = None
    status = 0
    with tempfile.TemporaryDirectory(prefix="leaselib-mutant-") as folder:
        copy = _copy(Path(folder))
        for extra, selections in by_options.items():
            code, words, _ = _run_tests(copy, (*selections, *extra))
            print(f"{'passed' if code == 0 else 'FAILED':<8} {len(selections)} selections {' '.join(extra)}")
            if code != 0:
                status = 1
                print(words)
    return status


def _judge(mutant: Mutant) -> Verdict:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="leaselib-mutant-") as folder:
        copy = _copy(Path(folder))
        try:
            for file, text in mutant.mutated(copy).items():
                (copy / file).write_text(text, encoding="utf-8")
        except BadPatchError as error:
            return Verdict(mutant, "does not apply", str(error), time.monotonic() - began)
        code, words, failures = _run_tests(copy, mutant.killed_by)
    seconds = time.monotonic() - began
    if code == TESTS_FAILED and failures:
        return Verdict(mutant, "killed", failures[0], seconds)
    if code == 0:
        return Verdict(mutant, "SURVIVED", f"{mutant.breaks} ({' '.join(mutant.killed_by)} passes)", seconds)
    return Verdict(mutant, "ERROR", f"no test failed, pytest ended with {code}:\n{words}", seconds)


def _copy(folder: Path) -> Path:
    """A copy of the project, in a folder of its own so that no bytecode of another mutant is ever taken for it."""
    copy = folder / "project"
    copy.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.patch"))
        else:
            shutil.copy2(ROOT / name, copy / name)
    (folder / "elsewhere").mkdir()
    return copy


def _run_tests(copy: Path, selection: tuple[str, ...]) -> tuple[int, str, list[str]]:
    """pytest's exit status, what it printed, and a line for each test that failed (errors of fixtures are none)."""
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    # Where the current folder is another one, as in child processes of tests, only PYTHONPATH can lead to the copy.
    where = subprocess.run(
        [sys.executable, "-c", "import leaselib; print(leaselib.__file__)"],
        cwd=copy.parent / "elsewhere", env=environment, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    if Path(where).resolve() != (copy / "leaselib" / "__init__.py").resolve():
        raise RuntimeError(f"the tests would import {where}, not the mutant in {copy}: is PYTHONPATH ignored?")
    report = copy.parent / "report.xml"
    command = [
        sys.executable, "-m", "pytest", *selection, "-q", "--tb=short", "-p", "no:cacheprovider", "--maxfail=1",
        f"--junitxml={report}",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return -1, f"pytest did not end within {TIMEOUT_S:g} s", []
    failures: list[str] = []
    if report.exists():
        for failure in ET.parse(report).iter("failure"):
            failures.append(re.sub(r"\s+", " ", failure.get("message", ""))[:160])
    return done.returncode, done.stdout[-3000:] + done.stderr[-3000:], failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
