"""Stored records are untrusted: what somebody wrote into the file stops its own job with a clear error, no other."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from fix_stores import ManualClock

from leaselib._model import JobMeta, PastAttempt, Record, from_ms
from leaselib.errors import StoreError
from leaselib.stores._sqlite import SQLiteStore
from leaselib.stores._sqlite_rows import Malformed, job_from_row, run_from_row, run_to_row

RECORD = Record(
    job="job",
    slot_ms=1_800_000_000_000,
    status="failed",
    attempt=3,
    handovers=1,
    token="token",
    runner="läufer-😀",
    fence=1_800_000_000_001,
    lease_ms=30_000,
    lease_end_ms=1_800_000_030_000,
    released=False,
    reason="takeover",
    started_ms=1_800_000_000_500,
    ended_ms=1_800_000_001_000,
    error="it broke",
    checkpoint='{"page": 3}',
    past=(
        PastAttempt(1, 'a "b" \\', 1, 2, "expired"),
        PastAttempt(2, "läufer", 3, 4, "handed-over"),
    ),
)
SLOT = from_ms(RECORD.slot_ms)


@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        replace(RECORD, status="running", ended_ms=None, error=None, checkpoint=None, past=(), released=True),
        replace(RECORD, slot_ms=-62_135_596_800_000, lease_ms=0),
        replace(RECORD, error="x" * 4096, checkpoint='"' + "x" * 65_534 + '"'),
    ],
)
def test_a_record_comes_back_as_it_was_written(record: Record) -> None:
    assert run_from_row("job", run_to_row(record)) == record


def test_a_job_comes_back_as_it_was_written() -> None:
    assert job_from_row((3, 5, None, 0)) == (3, JobMeta(5, None, 0))
    assert job_from_row((3, 5, -1, 2)) == (3, JobMeta(5, -1, 2))


@pytest.mark.parametrize(
    "row",
    [
        ("x", 0, None, 0),
        (1, -1, None, 0),
        (1, 2**53 + 1, None, 0),
        (1, "5", None, 0),
        (1, b"5", None, 0),
        (1, 0, 1.5, 0),
        (1, 0, 10**17, 0),
        (1, 0, None, -1),
        (1, 0, None, None),
    ],
)
def test_a_job_of_another_shape_is_malformed(row: tuple[object, ...]) -> None:
    with pytest.raises(Malformed, match="expected whole numbers"):
        job_from_row(row)


HOSTILE: dict[str, list[str]] = {
    "slot_ms": ["'abc'", "99999999999999999", "x'00'", "1.5"],
    "status": ["''", "'RUNNING'", "x'72756e6e696e67'", "5", "'success '"],
    "attempt": ["0", "-1", "99999999999999999", "'x'", "1.5", "x'31'"],
    "handovers": ["-1", "'x'", "99999999999999999"],
    "token": ["x'74'", "CAST(x'ff' AS TEXT)", "''", "hex(zeroblob(101))"],
    "runner": ["x'74'", "CAST(x'c328' AS TEXT)", "''", "hex(zeroblob(101))"],
    "fence": ["-1", "9223372036854775807", "'x'", "9e99"],
    "lease_ms": ["-1", "999999999999999999", "'x'", "0.5"],
    "lease_end_ms": ["253402300800000", "-9223372036854775808", "'soon'"],
    "released": ["2", "-1", "'no'"],
    "reason": ["''", "'because'", "5"],
    "started_ms": ["253402300800000", "'x'"],
    "ended_ms": ["253402300800000", "'x'", "0.5", "x'00'"],
    "error": ["x'00'", "CAST(x'ff' AS TEXT)", "CAST(zeroblob(5000) AS TEXT)"],
    "checkpoint": [
        "'{'",
        "''",
        "'[1'",
        "x'31'",
        "CAST(x'22ff22' AS TEXT)",
        "'\"' || hex(zeroblob(40000)) || '\"'",
        f"'{'[' * 20_000 + ']' * 20_000}'",
    ],
    "past": [
        "''",
        "'{}'",
        "'5'",
        "'null'",
        "'[5]'",
        "x'5b5d'",
        '\'[[1,"r",1,2,"won"]]\'',
        "'[[1,\"r\",1,2]]'",
        '\'[[1,"r",1,99999999999999999,"expired"]]\'',
        '\'[[true,"r",1,2,"expired"]]\'',
        f"'{'[' * 20_000}'",
        "'[' || substr(replace(hex(zeroblob(21)), '00', ',[1,\"r\",1,2,\"expired\"]'), 2) || ']'",
    ],
}
CASES = [(column, value) for column, values in HOSTILE.items() for value in values]
CASE_NAMES = [f"{column}-{number}" for column, values in HOSTILE.items() for number in range(len(values))]


class Scene:
    """A store with one job under way that somebody tampers with, one that has ended, and one that is left alone."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock(RECORD.slot_ms)
        self.store = SQLiteStore(path, synchronous="NORMAL", clock=self.clock)
        self.raw = sqlite3.connect(path, isolation_level=None)
        for job in ("running", "ended", "good"):
            assert self.store.claim(job, SLOT, "token", "runner").outcome == "won"
        self.store.finish("ended", SLOT, "token", "success")
        self.saved = self.raw.execute("SELECT * FROM leaselib_runs").fetchall()
        self.clock.advance(10)

    def tamper(self, job: str, column: str, value: str) -> None:
        """Writes that value, whatever the type of the column."""
        self.raw.execute(
            f"UPDATE leaselib_runs SET {column} = {value} WHERE job_id = (SELECT id FROM leaselib_jobs WHERE name = ?)",
            (job,),
        )

    def restore(self) -> None:
        """Puts the rows back."""
        self.raw.execute("DELETE FROM leaselib_runs")
        marks = ", ".join("?" * len(self.saved[0]))
        self.raw.executemany(f"INSERT INTO leaselib_runs VALUES ({marks})", self.saved)

    def everything(self, job: str) -> list[StoreError]:
        """Calls each operation on the job; returns the errors. Anything but a StoreError gets out."""
        store, later = self.store, SLOT + timedelta(seconds=9)
        calls = [
            lambda: store.get(job, SLOT),
            lambda: store.runs(job),
            lambda: store.unfinished(["good", job]),
            lambda: store.claim(job, SLOT, "other", "runner").run,
            lambda: store.claim(job, SLOT, "other", "runner", takeover_of=1).run,
            lambda: store.claim(job, later, "later", "runner", overlap="allow", history_size=0).run,
            lambda: store.heartbeat(job, SLOT, "token", 30),
            lambda: store.release(job, SLOT, "token"),
            lambda: store.finish(job, SLOT, "token", "success"),
            lambda: store.purge(job, force=True),
        ]
        errors = []
        for call in calls:
            try:
                call()
            except StoreError as error:
                errors.append(error)
        return errors

    def check_others(self) -> None:
        """The job beside it, and the store as a whole, are as before."""
        assert self.store.heartbeat("good", SLOT, "token", 30)
        run = self.store.get("good", SLOT)
        assert run is not None
        assert run.status == "running"
        assert set(self.store.jobs()) >= {"running", "ended", "good"}
        assert self.store._connections._out == 0


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A fresh scene."""
    scene = Scene(tmp_path / "leases.db")
    yield scene
    scene.raw.close()
    scene.store.close()


@pytest.mark.parametrize("job", ["running", "ended"])
@pytest.mark.parametrize(("column", "value"), CASES, ids=CASE_NAMES)
def test_a_malformed_run_is_an_error_that_names_its_job_and_column(
    scene: Scene, job: str, column: str, value: str
) -> None:
    scene.tamper(job, column, value)
    errors = scene.everything(job)
    assert errors
    for error in errors:
        assert (error.transient, error.job) == (False, job)
        assert repr(job) in str(error)
        assert column in str(error)
        assert "leaselib_runs" in str(error) or "leaselib_jobs" in str(error)
        assert len(str(error)) < 800
    scene.check_others()


def test_a_run_that_ended_without_an_end_is_malformed(scene: Scene) -> None:
    scene.tamper("ended", "ended_ms", "NULL")
    with pytest.raises(StoreError, match="status is 'success', but its ended_ms is None"):
        scene.store.get("ended", SLOT)


def test_values_that_are_odd_but_possible_are_worked_with(scene: Scene) -> None:
    """A lease end in the year 9999 is brought down, a billion attempts are no more than too many."""
    scene.tamper("running", "lease_end_ms", "253402300799999")
    scene.tamper("running", "attempt", "1000000000")
    assert scene.store.claim("running", SLOT, "other", "runner").outcome == "running"
    run = scene.store.get("running", SLOT)
    assert run is not None
    assert run.lease_end <= from_ms(scene.clock.wall_ms()) + timedelta(seconds=30)
    scene.clock.advance(100)
    assert scene.store.claim("running", SLOT, "other", "runner", takeover_of=10**9).outcome == "interrupted"


@pytest.mark.parametrize("name", ["x'ff'", "CAST(x'ff' AS TEXT)", "5", "x'00'"])
def test_a_name_that_is_none_hides_no_other(scene: Scene, name: str) -> None:
    scene.raw.execute(f"INSERT INTO leaselib_jobs VALUES (99, 'default', {name}, 0, NULL, 0)")
    assert len(scene.store.jobs()) == 4
    scene.check_others()


@pytest.mark.parametrize("column", ["fence", "floor_ms", "ended"])
@pytest.mark.parametrize("value", ["'x'", "-9223372036854775808", "9223372036854775807", "1.5", "x'00'"])
def test_a_malformed_job_stops_only_itself(scene: Scene, column: str, value: str) -> None:
    scene.raw.execute(f"UPDATE leaselib_jobs SET {column} = {value} WHERE name = 'running'")
    errors = scene.everything("running")
    assert errors
    assert {(error.transient, error.job) for error in errors} <= {(False, "running")}
    scene.check_others()


def test_no_mutation_of_the_file_raises_anything_else(scene: Scene) -> None:
    """Two to four random values in random places, a few hundred times."""
    chance = random.Random(5)
    pool = [*(value for values in HOSTILE.values() for value in values), "NULL", "1", "'running'", "'[]'"]
    for _ in range(300):
        job = chance.choice(["running", "ended"])
        for _ in range(chance.randint(2, 4)):
            try:
                scene.tamper(job, chance.choice(list(HOSTILE)), chance.choice(pool))
            except sqlite3.IntegrityError:  # NOT NULL
                continue
        for error in scene.everything(job):
            assert (error.transient, error.job) == (False, job)
        scene.check_others()
        scene.raw.execute("UPDATE leaselib_jobs SET fence = 0, floor_ms = NULL, ended = 0")
        scene.restore()


NAMES = [
    "plumless",
    "buckeroo",
    "é" * 200,
    "😀" * 200,
    "\u202eمرحبا\u200f",
    "'; DROP TABLE leaselib_runs; --",
    "{x}",
    "*",
    "%",
    "_",
    "\\",
    '"',
    "'",
    "a:b",
    "A",
    "a",
    "\u00e9",
    "e\u0301",
    " ",
    "NULL",
    "5",
]


def test_names_and_namespaces_are_data_and_never_meet(tmp_path: Path) -> None:
    """Each name is one job and one namespace, whatever it would mean elsewhere; equal only if all code points are."""
    stores = {name: SQLiteStore(tmp_path / "leases.db", name, synchronous="NORMAL") for name in NAMES[:12]}
    slot = datetime.now(timezone.utc).replace(microsecond=0)
    for number, store in enumerate(stores.values()):
        for name in NAMES:
            assert store.claim(name, slot, f"{number} {NAMES.index(name)}", name).outcome == "won"
    for number, store in enumerate(stores.values()):
        assert store.jobs() == sorted(NAMES)
        gone = NAMES[number]
        assert store.finish(gone, slot, f"{number} {number}", "success")
        assert store.purge(gone) == 1
        left = [name for name in NAMES if name != gone]
        assert {run.job for run in store.unfinished(NAMES)} == set(left)
        for name in left:
            run = store.get(name, slot)
            assert run is not None
            assert (run.job, run.runner, run.token) == (name, name, f"{number} {NAMES.index(name)}")
        store.close()
