"""Whether things go on in peace: L1 and L2 of `base.INVARIANTS`. Pure; any thread may use it.

When there was peace, and how long anything may take, only those know who made the history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from leaselib import Run
from leaselib._model import to_ms

from .base import Violation

Slot = tuple[str, int]


def coverage(due: Iterable[Slot], dealt: set[Slot]) -> Iterator[Violation]:
    """L1: of the slots that were due, those that nobody has dealt with."""
    for job, slot_ms in due:
        if (job, slot_ms) not in dealt:
            yield Violation("L1", f"slot {slot_ms} of {job} was lost: no run, no answer, no event")


def dead_runs(records: Iterable[Run], now_ms: int, allowed_ms: int) -> list[Violation]:
    """L2, of runs that the store had at `now_ms` on its own clock."""
    return [
        Violation("L2", f"{run.job} {to_ms(run.slot)}, attempt {run.attempt}, is running {over_ms} ms after its lease")
        for run in records
        if run.status == "running" and (over_ms := now_ms - to_ms(run.lease_end)) > allowed_ms
    ]
