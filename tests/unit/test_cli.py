"""The command line on real SQLite files: what each command prints, its exit codes, and what it never prints."""

from __future__ import annotations

import gc
import io
import json
import sqlite3
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import leaselib
from leaselib import SQLiteStore
from leaselib._model import from_ms
from leaselib.cli import COMMANDS, _text, main
from leaselib.cli._place import VARIABLE, Place, shown_url
from leaselib.cli._text import Cell, Column, Terminal
from leaselib.cli._view import COUNTED, StoreState, look
from leaselib.cli._watch import changes

CANARY = "c4n4ry"
HOSTILE = "\x1b[2J\x1b]0;owned\x07<script>&\u202e\x9b31m"
NAMES = [
    "x" * 200,
    "é" * 200,
    "🎉" * 200,
    "👨\u200d👩\u200d👧 family",
    "שלום עולם",
    "مرحبا 123",
    "日本語のジョブ" * 20,
    "e\u0301" * 50,
    "'; DROP TABLE leaselib_runs; --",
    "--json",
    "a <b>&c",
    "%s {x} \\ *",
]


class MovedClock:
    """The machine's clocks, the time of day moved by `offset_s`: to write what happened earlier.

    While `held_ms` is set the time of day stands still there: what is written then has exact times, also on a busy
    machine.
    """

    def __init__(self) -> None:
        self.offset_s = 0.0
        self.held_ms: int | None = None

    def now_ms(self) -> int:
        """The true time of day."""
        return time.time_ns() // 1_000_000

    def boot_ms(self) -> int:
        """See leaselib._clock.Clock."""
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        """See leaselib._clock.Clock."""
        return (self.now_ms() if self.held_ms is None else self.held_ms) + round(self.offset_s * 1000)


class Made:
    """A SQLite file, and what a test writes into it."""

    def __init__(self, path: Path) -> None:
        self.path, self.url = path, f"sqlite:///{path}"
        self.clock = MovedClock()
        self.store = SQLiteStore(path, clock=self.clock)
        self._tokens = 0

    def run(self, job: str, ago: float, end: str | None = "success", **claim: Any) -> datetime:
        """A run that started so many seconds ago; ended a second later (`success`, `failed`), `released`, or not."""
        self._tokens += 1
        token = f"secret-token-{self._tokens}"
        self.clock.held_ms, self.clock.offset_s = self.clock.now_ms(), -ago
        slot = claim.pop("slot", from_ms(self.clock.wall_ms()))
        error = claim.pop("error", None)
        checkpoint = claim.pop("checkpoint", None)
        options = {"overlap": "allow", "max_late": 10**6, "runner": "api-1", **claim}
        answer = self.store.claim(job, slot, token, **options)
        assert answer.outcome == "won"
        self.clock.offset_s += 1
        if checkpoint is not None:
            assert self.store.heartbeat(job, slot, token, options.get("lease", 30), checkpoint)
        if end == "released":
            assert self.store.release(job, slot, token)
        elif end is not None:
            assert self.store.finish(job, slot, token, end, error)
        self.clock.held_ms, self.clock.offset_s = None, 0
        return slot

    def edit(self, statement: str, *values: object) -> None:
        """Changes the file behind the store's back."""
        with sqlite3.connect(self.path) as raw:
            raw.execute(statement, values)
        raw.close()

    def state(self) -> StoreState:
        """What `look` makes of it."""
        return look(Place(self.store, self.url, 5))


class Did(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Its output, which must be one line of JSON."""
        assert self.out.endswith("\n")
        assert self.out.count("\n") == 1
        return json.loads(self.out)

    def row(self, name: str) -> str:
        """The only line of its output that begins with that."""
        (found,) = [line for line in self.out.splitlines() if line.startswith(name)]
        return found


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    """A store with no job yet."""
    it = Made(tmp_path / "leases.db")
    it.store.ping()
    yield it
    it.store.close()


@pytest.fixture(autouse=True)
def no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have set it."""
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def do(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line."""

    def run(*argv: str) -> Did:
        try:
            code = main(argv)
        except SystemExit as left:
            code = int(left.code or 0)
        return Did(code, *capsys.readouterr())

    return run


# ---- the parser -----------------------------------------------------------------------------------------------------


def test_without_a_command_the_help_comes_and_the_code_is_2(do: Any) -> None:
    """On standard error: nothing was asked for."""
    did = do()
    assert (did.code, did.out) == (2, "")
    for name in COMMANDS:
        assert f"\n  {name} " in did.err


def test_an_unknown_command_is_answered_with_those_that_exist(do: Any) -> None:
    """None is promised that isn't there."""
    did = do("frobnicate", "x")
    assert did.code == 2
    assert all(name in did.err for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself_and_its_exit_codes(do: Any, name: str) -> None:
    """--help is on standard output and is fine."""
    did = do(name, "--help")
    assert did.code == 0
    assert f"usage: leaselib {name}" in did.out
    assert "Exit code" in did.out


def test_the_version_is_the_librarys(do: Any) -> None:
    """One line."""
    assert do("--version") == (0, f"leaselib {leaselib.__version__}\n", "")


def test_options_may_stand_anywhere_after_the_command(do: Any, made: Made) -> None:
    """Also between the URL and the job."""
    made.run("sync", 60)
    outputs = {
        do(*argv).json()["runs"][0]["slot"]
        for argv in (
            ("runs", made.url, "sync", "--json", "--limit", "1"),
            ("runs", "--json", made.url, "--limit", "1", "sync"),
            ("runs", "--limit=1", made.url, "--json", "--", "sync"),
        )
    }
    assert len(outputs) == 1


def test_the_url_may_come_from_the_environment_and_an_argument_stands_above_it(
    do: Any, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it needn't be in the list of processes."""
    made.run("sync", 60)
    monkeypatch.setenv(VARIABLE, made.url)
    assert do("status").code == 0
    assert do("runs", "sync").code == 0
    monkeypatch.setenv(VARIABLE, "sqlite:////nowhere/else.db")
    assert do("status").code == 1
    assert do("status", made.url).code == 0


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (("status",), VARIABLE),
        (("runs", "sync"), VARIABLE),
        (("runs", "sqlite:///x.db"), "JOB is missing"),
        (("purge", "redis+cluster://h"), "JOB is missing"),
        (("status", "memory://"), "memory://"),
        (("status", "mysql://h/d"), "mysql"),
        (("status", "jobs.db"), "sqlite:///"),
        (("status", "sqlite:///a.db?nonsense=1"), "nonsense"),
        (("runs", "sqlite:///a.db", ""), "JOB"),
        (("runs", "sqlite:///a.db", "a\tb"), "control character"),
        (("runs", "sqlite:///a.db", "x", "--limit", "0"), "whole number from 1"),
        (("runs", "sqlite:///a.db", "x", "--limit", "1" * 5000), "whole number from 1"),
        (("watch", "sqlite:///a.db", "--interval", "0"), "number of seconds"),
        (("watch", "sqlite:///a.db", "--interval", "nan"), "number of seconds"),
        (("status", "sqlite:///a.db", "--timeout", "soon"), "number of seconds"),
        (("status", "sqlite:///a.db", "sqlite:///b.db"), "unrecognized"),
        (("demo", "sqlite:///a.db"), "unrecognized"),
    ],
)
def test_wrong_use_is_code_2_with_a_hint(
    do: Any, argv: tuple[str, ...], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And touches nothing."""
    monkeypatch.chdir(tmp_path)
    did = do(*argv)
    assert (did.code, did.out) == (2, "")
    assert hint in did.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["redis", "rediss", "valkey", "redis+sentinel", "redis+cluster", "postgresql", "odd"])
@pytest.mark.parametrize(
    "rest",
    [
        f"user:{CANARY}@localhost:1/x",
        f":{CANARY}@localhost:1/x",
        f"localhost:1/x?password={CANARY}",
        f"localhost:1/x?sslpassword={CANARY}&nonsense=1",
        f"user:{CANARY}?a@localhost:1/x",
        f"user:a?{CANARY}@localhost:1/x",
        f"user:{CANARY}#a@localhost:1/x",
        f"user:a/{CANARY}@localhost:1/x",
        f"user:{CANARY}@localhost:port/x",
    ],
)
def test_no_password_is_ever_printed(do: Any, kind: str, rest: str) -> None:
    """Whatever is wrong with the URL or the rest of the command line; nothing listens on port 1."""
    url = f"{kind}://{rest}"
    told = [
        do("status", url, "--timeout", "0.2"),
        do("status", url, "--timeout", "0.2", "--json"),
        do("runs", url, "job", "--timeout", "0.2"),
        do("watch", url, "--count", "1", "--timeout", "0.2", "--plain"),
        do("purge", url, "job", "--timeout", "0.2", "--yes"),
        do("runs", url),
        do("status", url, url),
        do("status", "--nonsense", url),
        do("status", f"--nonsense={url}"),
        do("runs", url, "job", "--limit", url),
        do(url),
    ]
    for did in told:
        assert did.code in (1, 2)
        assert CANARY not in did.out + did.err
    assert CANARY not in shown_url(url)


def test_arguments_are_repeated_without_their_control_characters(do: Any) -> None:
    """A script may have put somebody's text there."""
    for argv in ((HOSTILE,), ("status", HOSTILE), ("status", "a:b", HOSTILE), ("watch", "x://y", "--count", HOSTILE)):
        did = do(*argv)
        assert did.code == 2
        assert not set(did.err) & set("\x1b\x07\x9b\u202e")


# ---- stores that aren't there ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["status", "watch", "runs", "purge"])
def test_looking_at_a_missing_file_creates_nothing(do: Any, tmp_path: Path, command: str) -> None:
    """A mistyped path is trouble, not a new store."""
    did = do(command, f"sqlite:///{tmp_path}/typo.db", *(["job"] if command in ("runs", "purge") else []))
    assert did.code == 1
    assert "no file" in did.err
    assert not list(tmp_path.iterdir())


def test_another_programs_database_is_left_as_it_is(do: Any, tmp_path: Path) -> None:
    """No tables are put into it, and its journal mode stays."""
    path = tmp_path / "app.db"
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE users (name TEXT)")
    raw.close()
    before = path.read_bytes()
    did = do("status", f"sqlite:///{path}")
    assert did.code == 1
    assert "without leaselib's tables" in did.err
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_file_that_is_no_database_is_trouble(do: Any, tmp_path: Path, as_json: bool) -> None:
    """For people on standard error; for programs as JSON."""
    path = tmp_path / "text.db"
    path.write_text("not a database, but a text of some length, repeated. " * 100)
    did = do("status", f"sqlite:///{path}", *(["--json"] if as_json else []))
    assert did.code == 1
    if as_json:
        found = did.json()
        assert found["reachable"] is False
        assert "not a database" in found["error"]
    else:
        assert (did.out, "not a database" in did.err) == ("", True)


# ---- status ---------------------------------------------------------------------------------------------------------


def test_status_of_a_store_without_jobs_says_so(do: Any, made: Made) -> None:
    """And is fine."""
    did = do("status", made.url)
    assert did.code == 0
    assert "no job has started a run here yet" in did.out
    assert do("status", made.url, "--json").json()["jobs"] == []


def test_status_shows_the_newest_run_of_each_job_and_its_lease(do: Any, made: Made) -> None:
    """A run that failed is no trouble of the store's."""
    made.run("ended", 100)
    made.run("broken", 100, "failed", error="ValueError: no")
    made.run("live", 5, None, lease=1000)
    made.run("dead", 100, None, lease=10)
    made.run("leaving", 100, "released")
    did = do("status", made.url)
    assert did.code == 0
    assert "success" in did.row("ended")
    assert "99 s" in did.row("ended")
    assert "failed" in did.row("broken")
    assert "running, 16 min left" in did.row("live")
    assert "expired 90 s ago" in did.row("dead")
    assert "released 99 s ago" in did.row("leaving")
    assert "1 open" in did.row("dead")
    assert "1 ok" in did.row("ended")


def test_status_counts_a_jobs_newest_runs_and_lists_older_unfinished_ones(do: Any, made: Made) -> None:
    """An old run that nobody ended must not hide behind newer ones."""
    old = made.run("sync", 5000, None, lease=10_000, runner="old-runner")
    for n in range(COUNTED + 5):
        made.run("sync", 1000 - n, "failed" if n % 10 == 0 else "success", history_size=1000)
    found = do("status", made.url, "--json").json()["jobs"][0]
    assert found["counted"] == COUNTED
    assert sum(found["counts"].values()) == COUNTED
    assert found["counts"]["failed"] == 10
    assert [run["slot"] for run in found["unfinished"]] == [_text.iso(old)]
    did = do("status", made.url)
    assert "90 ok, 10 failed, 1 open" in did.out
    assert "old-runner" in did.out.partition("unfinished, beside the newest runs")[2]


def test_status_json_has_every_figure(do: Any, made: Made) -> None:
    """Instants in UTC with milliseconds, durations in seconds."""
    slot = made.run("sync", 10, None, lease=100, runner="api-7", checkpoint='{"at": 3}')
    did = do("status", made.url, "--json")
    found = did.json()
    assert (did.code, found["reachable"], found["namespace"], found["store"]) == (0, True, "default", made.url)
    assert found["clock_offset"] == 0
    assert abs(datetime.fromisoformat(found["now"].replace("Z", "+00:00")).timestamp() - time.time()) < 30
    run = found["jobs"][0]["last"]
    assert run["slot"] == _text.iso(slot)
    assert (run["status"], run["attempt"], run["runner"], run["lease"]) == ("running", 1, "api-7", 100)
    assert run["lease_state"] == "live"
    assert 60 < run["lease_left"] <= 91
    assert 10 <= run["age"] < 40
    assert run["checkpoint"] == {"at": 3}
    assert run["attempts"][0]["outcome"] is None


def test_a_malformed_record_is_trouble_and_hides_no_other_job(do: Any, made: Made) -> None:
    """Shown as malformed, with what is wrong and where."""
    made.run("bad", 50)
    made.run("good", 50)
    made.edit(
        "UPDATE leaselib_runs SET status = ? WHERE job_id = (SELECT id FROM leaselib_jobs WHERE name = 'bad')", HOSTILE
    )
    did = do("status", made.url)
    assert did.code == 1
    assert "malformed" in did.row("bad")
    assert "success" in did.row("good")
    assert "expected one of failed" in did.out
    assert not set(did.out) & set("\x1b\x07\x9b\u202e")
    did = do("status", made.url, "--json")
    found = did.json()
    assert (did.code, found["malformed"]) == (1, 1)
    assert {job["job"]: job["error"] is None for job in found["jobs"]} == {"bad": False, "good": True}
    assert do("runs", made.url, "bad").code == 1
    assert "malformed" in do("runs", made.url, "bad", "--json").json()["error"]


def test_stored_text_reaches_no_terminal_and_no_page_as_it_is(do: Any, made: Made) -> None:
    """Names, runners, errors and checkpoints are written by others."""
    for _ in range(2):
        made.run("evil", 50, "failed", error=HOSTILE, checkpoint=json.dumps({HOSTILE: HOSTILE}))
        made.edit("UPDATE leaselib_runs SET runner = ?", HOSTILE)
        made.edit("UPDATE leaselib_jobs SET name = ? WHERE id = 1", HOSTILE)
    shown = [
        do("status", made.url, "--tokens"),
        do("runs", made.url, "evil"),
        do("runs", made.url, "evil", "--attempts"),
        do("watch", made.url, "--count", "1"),
        do("runs", made.url, "unknown"),
    ]
    for did in shown:
        assert not set(did.out + did.err) & set("\x1b\x07\x9b\u202e")
    assert r"\x1b[2J" in shown[0].out
    for argv in (("status", made.url), ("runs", made.url, "evil"), ("watch", made.url, "--count", "1")):
        did = do(*argv, "--json")
        assert not set(did.out) & set("<>&\x1b\u202e")
        assert HOSTILE in _texts(did.json())


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in _texts(part)]
    if isinstance(value, list):
        return [text for part in value for text in _texts(part)]
    return [value] if isinstance(value, str) else []


def test_tokens_are_shown_only_if_asked_for(do: Any, made: Made) -> None:
    """Who has a token can end that run."""
    made.run("sync", 50)
    made.run("sync", 40, None)
    commands = [("status", made.url), ("runs", made.url, "sync"), ("runs", made.url, "sync", "--attempts")]
    for argv in commands:
        for form in ([], ["--json"]):
            assert "secret-token" not in do(*argv, *form).out
            assert "secret-token" in do(*argv, *form, "--tokens").out
    assert "secret-token" not in do("watch", made.url, "--count", "1", "--json").out


def test_a_checkpoint_that_json_cannot_hold_is_shown_as_text(do: Any, made: Made) -> None:
    """Python reads NaN where JSON has none; somebody else may have written it."""
    made.run("sync", 50, checkpoint="1")
    made.edit("UPDATE leaselib_runs SET checkpoint = '[NaN, Infinity]'")
    found = do("runs", made.url, "sync", "--json").json()
    assert found["runs"][0]["checkpoint"] == {"not_json": "[NaN, Infinity]"}
    assert "NaN" in do("runs", made.url, "sync", "--attempts").out


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_tables_stay_usable_with_any_name(
    do: Any, made: Made, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal no line is wider than it, and the columns stay in line; in a pipe every name is there in full."""
    for name in NAMES:
        made.run(name, 50, runner=name)
    did = do("status", made.url)
    assert all(_text.escape(name) in did.out for name in NAMES)
    monkeypatch.setattr(_text, "terminal_of", lambda stream: Terminal(width))
    lines = [line.replace("\u2068", "").replace("\u2069", "") for line in do("status", made.url).out.splitlines()]
    assert max(map(_text.width_of, lines)) <= width
    table = lines[lines.index("") + 1 :]
    assert len(table) == len(NAMES) + 1
    if width >= 80:
        where = _text.width_of(table[0].partition("STATE")[0])
        assert {_text.width_of(line.partition("success")[0]) for line in table[1:]} == {where}


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_runs_are_newest_first_and_at_most_limit(do: Any, made: Made) -> None:
    """Twenty unless told otherwise."""
    slots = [_text.iso(made.run("sync", 100 - n)) for n in range(25)]
    found = do("runs", made.url, "sync", "--json").json()["runs"]
    assert [run["slot"] for run in found] == slots[:4:-1]
    found = do("runs", made.url, "sync", "--json", "--limit", "3").json()["runs"]
    assert [run["slot"] for run in found] == slots[:-4:-1]
    assert len(do("runs", made.url, "sync", "--limit", "3").out.splitlines()) == 1 + 3


def test_runs_with_attempts_tell_what_each_ended_with(do: Any, made: Made) -> None:
    """A death, a hand-over, and the end; the error in full."""
    slot = made.run("sync", 500, None, lease=10, runner="first")
    made.run("sync", 400, "released", slot=slot, takeover_of=1, runner="second", checkpoint='"half-way"')
    made.run("sync", 300, "failed", slot=slot, takeover_of=2, runner="third", error="ValueError: " + "long " * 100)
    did = do("runs", made.url, "sync", "--attempts")
    assert did.code == 0
    assert "attempt 1: expired after 10 s" in did.out
    assert "attempt 2: handed-over after 1.0 s" in did.out
    assert "attempt 3: failed after 1.0 s" in did.out
    assert 'checkpoint: "half-way"' in did.out
    assert "ValueError: " + "long " * 99 in did.out
    log = do("runs", made.url, "sync", "--json").json()["runs"][0]["attempts"]
    assert [(a["number"], a["runner"], a["outcome"]) for a in log] == [
        (1, "first", "expired"),
        (2, "second", "handed-over"),
        (3, "third", "failed"),
    ]


def test_runs_of_a_job_that_never_ran_are_trouble_and_name_those_that_did(do: Any, made: Made) -> None:
    """Most likely it is misspelt."""
    made.run("report", 50)
    did = do("runs", made.url, "rapport")
    assert (did.code, did.out) == (1, "")
    assert "'rapport'" in did.err
    assert "'report'" in did.err
    assert do("runs", made.url, "rapport", "--json").code == 1


def test_runs_of_a_purged_job_are_none_and_fine(do: Any, made: Made) -> None:
    """The store still knows the job."""
    made.run("sync", 50)
    made.store.purge("sync")
    did = do("runs", made.url, "sync")
    assert did.code == 0
    assert "no runs are kept" in did.out
    assert "-" in do("status", made.url).row("sync")


@pytest.mark.parametrize("name", NAMES)
def test_a_job_is_found_by_its_name_whatever_that_is(do: Any, made: Made, name: str) -> None:
    """After `--`, so that it may begin with a dash."""
    made.run(name, 50)
    assert do("runs", made.url, "--json", "--", name).json()["runs"][0]["job"] == name


# ---- purge ----------------------------------------------------------------------------------------------------------


def test_purge_removes_ended_runs_and_says_how_many(do: Any, made: Made) -> None:
    """Of that job only; the unfinished one stays, and is mentioned."""
    for n in range(3):
        made.run("sync", 50 - n)
    made.run("sync", 40, None, lease=1000)
    made.run("other", 50)
    did = do("purge", made.url, "sync")
    assert did.code == 0
    assert "removed 3 runs of job 'sync'" in did.out
    assert "1 run unfinished" in did.out
    assert [run.status for run in made.store.runs("sync")] == ["running"]
    assert len(made.store.runs("other")) == 1
    assert do("purge", made.url, "sync", "--json").json() == {"job": "sync", "removed": 0, "unfinished": 1}


def test_purge_of_an_unknown_job_is_trouble(do: Any, made: Made) -> None:
    """Nothing was removed, which is not what was wanted."""
    assert do("purge", made.url, "sync").code == 1


def test_purge_with_force_does_not_ask_without_a_terminal(
    do: Any, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a script."""
    made.run("sync", 40, None, lease=1000)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    did = do("purge", made.url, "sync", "--force", "--json")
    assert (did.code, did.json(), did.err) == (0, {"job": "sync", "removed": 1, "unfinished": 0}, "")


class Keyboard(io.StringIO):
    """What somebody types."""

    def isatty(self) -> bool:
        """Yes."""
        return True


@pytest.mark.parametrize(("typed", "code"), [("y\n", 0), ("YES\n", 0), ("n\n", 1), ("\n", 1), ("", 1)])
def test_purge_with_force_asks_on_a_terminal_before_a_live_run_goes(
    do: Any, made: Made, monkeypatch: pytest.MonkeyPatch, typed: str, code: int
) -> None:
    """On standard error, so that the output stays the result; no answer is no."""
    made.run("sync", 40, None, lease=1000)
    monkeypatch.setattr("sys.stdin", Keyboard(typed))
    did = do("purge", made.url, "sync", "--force")
    assert did.code == code
    assert "1 with a live lease" in did.err
    assert len(made.store.runs("sync")) == code


def test_purge_asks_nothing_if_no_run_is_unfinished_or_yes_was_given(
    do: Any, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is typed, so that a question would be answered with no."""
    monkeypatch.setattr("sys.stdin", Keyboard(""))
    made.run("sync", 50)
    assert do("purge", made.url, "sync", "--force").code == 0
    made.run("sync", 40, None, lease=1000)
    assert do("purge", made.url, "sync", "--force", "--yes").code == 0
    assert made.store.runs("sync") == []


def test_purge_with_force_clears_away_what_is_malformed(do: Any, made: Made) -> None:
    """Which is what one purges it for."""
    made.run("sync", 50, None)
    made.edit("UPDATE leaselib_runs SET token = x'00ff'")
    assert do("status", made.url).code == 1
    did = do("purge", made.url, "sync", "--force", "--json")
    assert (did.code, did.json()["removed"]) == (0, 1)
    assert do("status", made.url).code == 0


# ---- watch ----------------------------------------------------------------------------------------------------------


def test_watch_prints_the_table_once_and_json_once_per_look(do: Any, made: Made) -> None:
    """In a pipe, that is."""
    made.run("sync", 50)
    did = do("watch", made.url, "--count", "3", "--interval", "0.01")
    assert did.code == 0
    assert did.out.count("sync") == 1
    did = do("watch", made.url, "--count", "3", "--interval", "0.01", "--json")
    assert [json.loads(line)["jobs"][0]["job"] for line in did.out.splitlines()] == ["sync"] * 3


def test_watch_goes_on_when_the_store_is_away_and_says_when_it_is_back(
    do: Any, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is said once; the code is that of the last look. A file that is gone is not made anew."""
    made.run("sync", 50)
    made.store.close()
    away = made.path.with_name("away.db")
    moves = iter([lambda: made.path.rename(away), lambda: None, lambda: away.rename(made.path)])

    monkeypatch.setattr("leaselib.cli._watch._clock.pause", lambda seconds: next(moves)())
    did = do("watch", made.url, "--count", "4")
    assert did.code == 0
    assert did.out.count("no file") == 1
    assert did.out.count("answers again") == 1
    moves = iter([lambda: made.path.rename(away)])
    did = do("watch", made.url, "--count", "2", "--json")
    assert did.code == 1
    assert [json.loads(line)["reachable"] for line in did.out.splitlines()] == [True, False]
    assert not made.path.exists()


@pytest.mark.parametrize("way", ["--plain", "--json"])
def test_ctrl_c_at_any_moment_after_the_first_look_ends_watch_with_0(
    do: Any, made: Made, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Python raises it where a function begins or a built-in one returns: at each of these places in turn.

    What was in the way was an Event: interrupted as it begins to wait, it raises RuntimeError.
    """

    def watched(interrupt_at: int) -> tuple[Did, int]:
        looks, places = 0, 0

        def place(frame: FrameType, what: str, about: Any) -> None:
            nonlocal places
            if what in ("call", "c_return"):
                places += 1
                if places == interrupt_at:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        def counted(where: Place) -> StoreState:
            nonlocal looks
            sys.setprofile(None)
            looks += 1
            state = look(where)
            if looks == 1:
                sys.setprofile(place)
            return state

        monkeypatch.setattr("leaselib.cli._watch.look", counted)
        gc.disable()  # an earlier round's garbage would be finalized in this one, where nothing can be raised
        try:
            return do("watch", made.url, "--count", "2", "--interval", "0.01", way), places
        finally:
            sys.setprofile(None)
            gc.enable()
            gc.collect(0)

    made.run("sync", 50)
    did, places = watched(0)
    assert did.code == 0
    assert places > 50
    for number in range(1, places + 1):
        assert watched(number)[0].code == 0, number


def told(before: StoreState, after: StoreState) -> list[str]:
    """The last part of each change."""
    return [parts[-1] for parts in changes(before, after)]


def test_changes_tell_a_runs_whole_life(made: Made) -> None:
    """Start, death, takeover, hand-over, end: each once, none of them twice."""
    states = [made.state()]
    slot = made.run("sync", 500, None, lease=10_000, runner="a")
    states.append(made.state())
    made.edit("UPDATE leaselib_runs SET lease_end_ms = started_ms")
    states += [made.state(), made.state()]
    made.run("sync", 400, None, slot=slot, takeover_of=1, runner="b", lease=10_000)
    states.append(made.state())
    assert made.store.release("sync", slot, "secret-token-2")
    states += [made.state(), made.state()]
    made.run("sync", 300, "failed", slot=slot, takeover_of=2, runner="c", error="no")
    states.append(made.state())
    made.store.purge("sync")
    states.append(made.state())
    assert [told(a, b) for a, b in pairwise(states)] == [
        ["attempt 1 started on a: scheduled"],
        ["the lease of a ran out"],
        [],
        ["attempt 2 started on b: takeover (that of a ran out)"],
        ["released by b, which is stopping"],
        [],
        ["attempt 3 started on c: hand-over", "failed after 1.0 s on c: no"],
        [],
    ]


def test_changes_tell_a_reset_and_a_malformed_record_once(made: Made) -> None:
    """Both are what one watches for."""
    made.run("sync", 50)
    before = made.state()
    assert told(before, replace(before, epoch="1-other")) == ["the store was emptied or replaced: it has another epoch"]
    made.edit("UPDATE leaselib_runs SET attempt = -1")
    after = made.state()
    (text,) = told(before, after)
    assert text.startswith("malformed: ")
    assert told(after, after) == []


def test_runs_that_come_into_view_because_newer_ones_went_are_no_news(made: Made) -> None:
    """Only so many of the newest are looked at."""
    for n in range(COUNTED + 3):
        made.run("sync", 1000 - n, history_size=1000)
    before = made.state()
    made.edit("DELETE FROM leaselib_runs WHERE slot_ms IN (SELECT slot_ms FROM leaselib_runs ORDER BY 1 DESC LIMIT 2)")
    after = made.state()
    assert len(after.jobs[0].runs) == COUNTED
    assert told(before, after) == []


# ---- text -----------------------------------------------------------------------------------------------------------


@given(st.text())
def test_escaped_text_is_one_line_that_a_terminal_only_prints(text: str) -> None:
    """Whatever it was; what prints is left alone."""
    shown = _text.escape(text)
    assert shown.isprintable()
    if text.isprintable():
        assert shown == text


@given(st.text(), st.integers(0, 30))
def test_a_cut_text_is_never_wider_than_wanted(text: str, width: int) -> None:
    """A text that fits is left alone."""
    shown = _text.escape(text)
    short = _text.cut(shown, width)
    assert _text.width_of(short) <= width
    if _text.width_of(shown) <= width:
        assert short == shown


@given(st.lists(st.tuples(st.text(max_size=40), st.text(max_size=40)), max_size=5), st.integers(1, 60))
def test_no_line_of_a_table_is_wider_than_the_terminal(rows: list[tuple[str, str]], width: int) -> None:
    """For any texts and any terminal."""
    columns = [Column("ONE", shrinks=True), Column("TWO")]
    for line in _text.table(columns, [[Cell(a), Cell(b)] for a, b in rows], Terminal(width)):
        assert _text.width_of(line) <= width


def test_a_right_to_left_text_is_isolated_on_a_terminal_only(made: Made) -> None:
    """So that the columns beside it keep their order there, and a program finds the name as it is."""
    columns, rows = [Column("JOB"), Column("N")], [[Cell("שלום"), Cell("1")]]
    assert "\u2068שלום\u2069" in _text.table(columns, rows, Terminal(80))[1]
    assert _text.table(columns, rows, Terminal())[1] == "שלום  1"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0.0 s"), (0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "9 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"),
     (7200, "2 h"), (172_800, "2 d"), (1e11, "1157407 d")],
)  # fmt: skip
def test_durations_are_in_words_that_fit(seconds: float, words: str) -> None:
    """Never more than a few characters."""
    assert _text.duration_words(seconds) == words


def test_a_date_is_shown_unless_it_is_todays() -> None:
    """And milliseconds only where there are some."""
    now = from_ms(1_800_000_000_000)
    assert _text.instant_words(now, now) == "08:00:00Z"
    assert _text.instant_words(now - timedelta(days=1, milliseconds=5), now) == "2027-01-14 07:59:59.995Z"
