"""The README says what is so: its code runs, its tables are the code's, its commands exist.

Each Python block runs alone, in a process and an empty folder of its own, as a reader would paste it into a file.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import get_args

import fix_servers_postgres
import pytest

import leaselib
from leaselib import _model, _options, context, events
from leaselib.cli import COMMANDS
from leaselib.stores._postgres_schema import grants_sql
from leaselib.stores._redis_acl import acl_setuser

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
POSTGRES_MARK = "-- PostgreSQL only"
WAIT_S = 30

# Runs the block in sys.argv[1] as __main__. A block that serves for ever is ended by a real SIGTERM after its first
# success: every job of a five-minute interval catches one run up when it starts. A started web application is asked.
DRIVER = """
import os, pathlib, signal, sys, threading
import leaselib

succeeded = threading.Event()
run_forever, start = leaselib.Scheduler.run_forever, leaselib.Scheduler.start

def started(self):
    self.on("success", lambda event: succeeded.set())
    return start(self)

def until_success(self):
    def end():
        if not succeeded.wait(WAIT_S):
            os._exit(70)
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=end, daemon=True).start()
    run_forever(self)

leaselib.Scheduler.start, leaselib.Scheduler.run_forever = started, until_success
names = {"__name__": "__main__"}
exec(compile(pathlib.Path(sys.argv[1]).read_text("utf-8"), sys.argv[1], "exec"), names)
if "app" in names:
    assert succeeded.wait(WAIT_S), "no job ran"
    answer = names["app"].test_client().get("/healthz")
    assert answer.status_code == 200 and answer.json["ok"] is True, answer.text
""".replace("WAIT_S", str(WAIT_S))


def rows(*header: str) -> list[list[str]]:
    """The rows of the README's table whose header begins like that, without it; cells stripped."""
    for part in re.findall(r"(?:^\|.*\|\n)+", README, re.MULTILINE):
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()]
        if tuple(table[0][: len(header)]) == header:
            return table[2:]
    raise AssertionError(f"the README has no table {header}")


def words(cell: str) -> list[str]:
    """What is in backticks."""
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.system
@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_each_python_block_runs_by_itself(number: int, tmp_path: Path) -> None:
    """It ends with exit code 0, and no traceback or listener's error is printed."""
    block, driver = tmp_path / "block.py", tmp_path / "driver.py"
    block.write_text(PYTHON[number], "utf-8")
    driver.write_text(DRIVER, "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, str(driver), str(block)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=2 * WAIT_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, f"exit code {ended.returncode}\n{PYTHON[number]}\n{ended.stdout}{ended.stderr}"
    assert "Traceback" not in ended.stderr


@pytest.mark.system
def test_the_effect_in_one_transaction_is_recorded_with_its_run(tmp_path: Path) -> None:
    """The block with ctx.finish leaves as many bookings as successful runs."""
    (block,) = (text for text in PYTHON if "ctx.finish(" in text and "sqlite3" in text)
    (tmp_path / "block.py").write_text(block, "utf-8")
    (tmp_path / "driver.py").write_text(DRIVER, "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "driver.py", "block.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=2 * WAIT_S, check=True)
    store = leaselib.SQLiteStore(tmp_path / "shop.db")
    runs = store.runs("book")
    store.close()
    connection = sqlite3.connect(tmp_path / "shop.db")
    booked = [slot for (slot,) in connection.execute("SELECT slot FROM booking ORDER BY slot DESC")]
    connection.close()
    assert booked == [run.slot.isoformat() for run in runs if run.status == "success"]
    assert booked


@pytest.mark.system
def test_the_effect_in_one_postgresql_transaction_is_recorded_with_its_run(tmp_path: Path) -> None:
    """The same of the block for PostgreSQL, which expects the application's own table."""
    (block,) = (text for text in PYTHON if "ctx.finish(" in text and "psycopg" in text)
    (tmp_path / "block.py").write_text(f"{block}\nscheduler.run_forever()\n", "utf-8")
    (tmp_path / "driver.py").write_text(DRIVER, "utf-8")
    with fix_servers_postgres.postgres_server() as server:
        server.sql("CREATE TABLE booking (slot timestamptz NOT NULL)")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DATABASE_URL": server.url()}
        command = [sys.executable, "driver.py", "block.py"]
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=2 * WAIT_S, check=True)
        store = leaselib.PostgresStore(server.url())
        runs = store.runs("book")
        store.close()
        booked = [slot for (slot,) in server.sql("SELECT slot FROM booking ORDER BY slot DESC")]
    assert booked == [run.slot for run in runs if run.status == "success"]
    assert booked


def test_the_readme_has_the_blocks_that_these_tests_look_for() -> None:
    """A fence that is written differently would leave them with nothing to test."""
    assert len(PYTHON) >= 8
    assert {language for language, _ in BLOCKS} == {"python", "shell", "sql", "text", "mermaid"}
    assert README.count("\n```") == 2 * len(BLOCKS)


def test_the_short_example_has_ten_lines() -> None:
    assert len(PYTHON[0].strip().splitlines()) == 10


def test_the_fence_sql_refuses_what_an_earlier_attempt_writes() -> None:
    """Run on SQLite: the same and later fences write, an earlier one changes nothing and counts no row."""
    create, write = (text for language, text in BLOCKS if language == "sql" and POSTGRES_MARK not in text)
    connection = sqlite3.connect(":memory:")
    connection.execute(create)

    def total(fence: int, value: int) -> tuple[int, int]:
        cursor = connection.execute(write, {"day": "2026-03-01", "total": value, "fence": fence})
        return cursor.rowcount, connection.execute("SELECT total FROM daily_total").fetchone()[0]

    assert total(5, 10) == (1, 10)
    assert total(4, 99) == (0, 10)
    assert total(5, 11) == (1, 11)
    assert total(6, 12) == (1, 12)
    assert total(5, 99) == (0, 12)
    connection.close()


def test_the_grants_are_those_that_the_store_needs() -> None:
    (text,) = (text for language, text in BLOCKS if language == "sql" and POSTGRES_MARK in text)
    assert text.partition("\n")[2] == grants_sql("leaselib", "app")


def test_the_acl_line_is_the_store_s_own() -> None:
    (text,) = (text for language, text in BLOCKS if language == "text")
    assert text.strip() == acl_setuser()


def test_the_shell_blocks_use_every_command_and_no_other() -> None:
    shell = "".join(text for language, text in BLOCKS if language == "shell")
    assert set(re.findall(r"^leaselib (\w+)", shell, re.MULTILINE)) == set(COMMANDS)


def test_the_extras_are_those_of_the_package() -> None:
    setup = (ROOT / "setup.cfg").read_text("utf-8").partition("[options.extras_require]")[2]
    extras = set(re.findall(r"^(\w+) *=", setup, re.MULTILINE))
    named = set(re.findall(r"(?:leaselib|\.)\[(\w+)\]", README))
    assert named <= extras
    assert extras - named <= {"dev"}


def test_the_options_table_has_every_option_with_its_default() -> None:
    """Compared with what the code does when nothing is given."""
    table = {words(row[0])[0]: row for row in rows("option")}
    of_jobs = set(_options.JobOptionsDict.__annotations__)
    parameters = inspect.signature(leaselib.Scheduler).parameters
    of_scheduler = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert set(table) == of_jobs | of_scheduler
    assert {name for name, row in table.items() if row[1] == "J"} == of_jobs
    options = _options.job_options({})
    for name in of_jobs:
        said = ast.literal_eval(words(table[name][2])[0])
        if name == "jitter":
            assert options.jitter(3_600_000) == said * 1000
        elif hasattr(options, f"{name}_ms"):
            found = getattr(options, f"{name}_ms")
            assert found == (None if said is None else said * 1000), name
        else:
            assert getattr(options, name) == said, name
        assert (table[name][3] == "seconds") == hasattr(options, f"{name}_ms"), name
    assert ast.literal_eval(words(table["stop_timeout"][2])[0]) == parameters["stop_timeout"].default
    cpus = os.cpu_count() or 1
    assert eval(words(table["max_workers"][2])[0], {"cpus": cpus}) == _options.default_workers()


def test_the_heartbeat_is_a_sixth_of_a_short_lease_and_the_takeover_time_is_right() -> None:
    assert _options.job_options({"lease": 6}).heartbeat_ms == 1000
    defaults = _options.job_options({})
    seconds = (defaults.lease_ms + 2 * defaults.heartbeat_ms) / 1000
    assert f"`lease + 2 * heartbeat` after the runner's last heartbeat, which is {seconds:g} seconds" in README


def test_the_table_of_outcomes_is_complete() -> None:
    assert [words(row[0])[0] for row in rows("outcome", "when")] == list(get_args(_model.Outcome))


def test_the_table_of_events_is_complete_and_so_are_its_reasons() -> None:
    """Reasons are compared with what the sources emit, event by event."""
    table = {words(row[0])[0]: words(row[2]) for row in rows("event", "when")}
    assert list(table) == list(events.EVENT_NAMES)
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "leaselib").glob("_*.py"))
    assert table["start"] == list(get_args(_model.Reason))
    assert all(f'"{reason}"' in sources for reasons in table.values() for reason in reasons)
    doc = " ".join((events.Event.__doc__ or "").split())
    for name in ("skip", "lost", "interrupted"):
        described = re.search(rf"for `{name}` (?:one of )?([\w, ]+)", doc)
        assert described is not None
        assert set(table[name]) == set(re.findall(r"\w+", described.group(1))) - {"or"}, name
    emitted = set(re.findall(r'"store_error"[^\n]*reason="(\w+)"', sources)) | {"permanent", "malformed"}
    assert set(table["store_error"]) == emitted
    fields = [field.name for field in dataclasses.fields(events.Event)]
    told = re.search(r"get a frozen `Event`: ([^.]*)\.", README)
    assert told is not None
    assert words(told.group(1)) == fields


def test_the_table_of_the_context_has_every_public_member() -> None:
    table = rows("member", "meaning")
    named = [word.partition("(")[0] for row in table for word in words(row[0])]
    doc = inspect.getdoc(context.RunContext) or ""
    attributes = set(re.findall(r"^    (\w+): ", doc, re.MULTILINE))
    members = {name for name in vars(context.RunContext) if not name.startswith("_")}
    assert sorted(named) == sorted(attributes | members)
    (abort,) = (row for row in table if row[0] == "`abort_reason`")
    assert set(words(abort[1])) - {"None"} == set(context._WORDS)
    (reason,) = (row for row in table if row[0] == "`reason`")
    assert words(reason[1]) == list(get_args(_model.Reason))


@pytest.mark.parametrize("url", [url for row in rows("URL", "store") for url in words(row[0])])
def test_each_url_of_the_table_opens_a_store(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is touched by that, so no server is needed."""
    monkeypatch.chdir(tmp_path)
    store = leaselib.open_store(url)
    assert isinstance(store, leaselib.Store)
    store.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("expression", ["H * * * *", "R * * * *", "0 0 * * * * 2026", "0 0 15W * *", "0 0 * * 5L",
    "5-5 * * * *", "*/0 * * * *", "*/61 * * * *", "0 0 * * 5#2,3", "@reboot", "@every 5m", "TZ=UTC 0 0 * * *",
    "0 0 30 2 *"])  # fmt: skip
def test_the_cron_expressions_that_are_called_refused_are(expression: str) -> None:
    with pytest.raises(leaselib.ConfigurationError):
        leaselib.Cron(expression)


def test_the_changelog_names_everything_public_and_the_version() -> None:
    assert re.search(r"^## \[Unreleased\]$", CHANGELOG, re.MULTILINE)
    assert f"## [{leaselib.__version__}]" in CHANGELOG
    named = set(re.findall(r"\w+", " ".join(words(CHANGELOG))))
    assert set(leaselib.__all__) <= named
    assert set(COMMANDS) <= named
    assert set(events.EVENT_NAMES) <= named
