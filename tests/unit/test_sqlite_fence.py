"""The fence grows with every start of a job, though only runs that have ended write it to the job's row."""

from __future__ import annotations

import sqlite3
from datetime import timedelta
from pathlib import Path

from fix_stores import ManualClock

from leaselib._model import from_ms
from leaselib.stores._sqlite import SQLiteStore


def test_the_fence_grows_through_everything_that_may_happen_to_a_run(tmp_path: Path) -> None:
    """The clock stands still, or runs backwards, so that only what is remembered makes it grow."""
    clock = ManualClock()
    store = SQLiteStore(tmp_path / "leases.db", clock=clock)
    base = from_ms(clock.wall_ms()) - timedelta(seconds=50)
    fences: list[int] = []

    def start(number: int, *, takeover_of: int | None = None, overlap: str = "allow") -> str:
        token = f"{number}-{takeover_of}"
        at = base + timedelta(seconds=number)
        won = store.claim("job", at, token, "r", takeover_of=takeover_of, overlap=overlap, max_late=999)  # type: ignore[arg-type]
        assert won.outcome == "won"
        assert won.record is not None
        fences.append(won.record.fence)
        return token

    for number in range(3):
        start(number)
    assert store.finish("job", base + timedelta(seconds=2), "2-None", "success")
    start(3)
    assert store.release("job", base + timedelta(seconds=3), "3-None")
    start(3, takeover_of=1)
    clock.step(-10)
    start(4)
    assert store.purge("job") == 1
    start(5)
    assert store.purge("job", force=True) == 5
    start(6)
    assert store.purge("job", force=True) == 1
    start(7)
    clock.advance(40)
    start(8, overlap="skip")
    start(9)
    assert store.purge("job", force=True) == 3
    clock.step(-100)
    store.close()
    store = SQLiteStore(tmp_path / "leases.db", clock=clock)
    assert store.claim("job", base + timedelta(seconds=9.5), "late", "r").outcome == "early"
    clock.step(100)
    start(10)
    assert fences == sorted(set(fences))
    store.close()


def test_a_start_leaves_the_row_of_its_job_alone(tmp_path: Path) -> None:
    """What the trick is for: a start writes a page less."""
    clock = ManualClock()
    store = SQLiteStore(tmp_path / "leases.db", clock=clock)
    slot = from_ms(clock.wall_ms())
    raw = sqlite3.connect(tmp_path / "leases.db")
    rows = []
    for number in range(3):
        store.claim("job", slot - timedelta(seconds=9 - number), f"{number}", "r", overlap="allow")
        rows.append(raw.execute("SELECT fence, floor_ms, ended FROM leaselib_jobs").fetchall())
    assert rows == [[(0, None, 0)]] * 3
    assert store.finish("job", slot - timedelta(seconds=7), "2", "success")
    rows = raw.execute("SELECT fence, floor_ms, ended FROM leaselib_jobs").fetchall()
    assert rows == [(clock.wall_ms() + 2, None, 1)]
    raw.close()
    store.close()
