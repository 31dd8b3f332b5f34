"""The README is true: its examples run, its tables name what the code has, its commands exist."""

from __future__ import annotations

import inspect
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from leaselib import RunContext, Scheduler
from leaselib._model import Outcome
from leaselib._options import JobOptionsDict, job_options
from leaselib.cli import COMMANDS
from leaselib.events import EVENT_NAMES
from leaselib.stores._postgres_schema import grants_sql
from leaselib.stores._redis_acl import acl_setuser

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
STOPS_AT_ONCE = "import leaselib\nleaselib.Scheduler.run_forever = lambda self: self.start().stop()\n"


def first_column(heading: str) -> list[str]:
    """The words in backticks in the first column of the first table under a heading."""
    section = README.split(f"\n{heading}", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "---" not in line][1:]
    return [word for row in rows for word in re.findall(r"`([\w]+)", row.split("|")[1])]


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_each_example_runs_as_a_program(number: int, tmp_path: Path) -> None:
    """In a process of its own, with warnings as errors; run_forever stops at once."""
    code = PYTHON[number]
    if "run_forever" in code:
        code = STOPS_AT_ONCE + code
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    did = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, env=environment, capture_output=True, timeout=60
    )
    assert did.returncode == 0, did.stderr.decode()
    assert not did.stderr, did.stderr.decode()


def test_the_python_examples_are_all_found() -> None:
    """The pattern finds what the README has."""
    assert len(PYTHON) == README.count("```python") >= 5


def test_the_options_table_names_every_option_and_no_other() -> None:
    """In any order."""
    own = {"runner", "max_workers", "stop_timeout"}
    assert set(first_column("## Options")) == own | set(JobOptionsDict.__annotations__)


def test_the_defaults_in_the_options_table_are_the_codes() -> None:
    """Those that are plain values."""
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", README, re.MULTILINE))
    options = job_options({})
    for name, value in {
        "lease": options.lease_ms // 1000,
        "catch_up": options.catch_up_ms // 1000,
        "max_late": options.max_late_ms // 1000,
        "max_attempts": options.max_attempts,
        "history_size": options.history_size,
        "overlap": f'`"{options.overlap}"`',
        "on_store_loss": f'`"{options.on_store_loss}"`',
        "stop_timeout": inspect.signature(Scheduler).parameters["stop_timeout"].default,
    }.items():
        assert rows[name] == str(value), name
    assert rows["heartbeat"].startswith(str(options.heartbeat_ms // 1000))


def test_the_tables_of_outcomes_and_events_are_complete() -> None:
    """Every outcome of a claim, every event."""
    assert first_column("What a claim is answered:") == list(get_args(Outcome))
    assert set(first_column("## Events")) == set(EVENT_NAMES)


def test_the_context_table_names_every_public_member() -> None:
    """Attributes from the class's docstring, methods from the class."""
    methods = {name for name in vars(RunContext) if not name.startswith("_")}
    documented = set(re.findall(r"^        (\w+): ", inspect.getdoc(RunContext) or "", re.MULTILINE))
    documented |= set(re.findall(r"^    (\w+): ", inspect.getdoc(RunContext) or "", re.MULTILINE))
    assert methods | documented == set(first_column("## The context"))


def test_every_command_of_the_command_line_is_shown_and_exists() -> None:
    """`leaselib NAME` in a console block."""
    shown = {name for language, text in BLOCKS if language == "console" for name in re.findall(r"leaselib (\w+)", text)}
    assert shown == set(COMMANDS)


def test_the_acl_line_and_the_grants_are_what_the_code_prints() -> None:
    """Word for word."""
    assert acl_setuser() in README
    assert grants_sql("leaselib", "app") in README


def test_the_fenced_update_refuses_smaller_fences() -> None:
    """On SQLite; the statement is plain SQL."""
    update = next(text for language, text in BLOCKS if language == "sql" and text.startswith("UPDATE"))
    fence = int(re.findall(r"fence <= (\d+)", update)[0])
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE account (id INTEGER, balance INTEGER, fence INTEGER)")
    for stored, rows in ((fence - 1, 1), (fence, 1), (fence + 1, 0)):
        connection.execute("DELETE FROM account")
        connection.execute("INSERT INTO account VALUES (7, 100, ?)", (stored,))
        assert connection.execute(update).rowcount == rows
    connection.close()
