"""Random walks over the rules: the rules as they are break no invariant; with a mistake in them, they do."""

from __future__ import annotations

from collections import Counter

import pytest
from explorer import Walk
from mutants import MUTANTS, Mutant

from leaselib._model import ClaimAnswer

WALKS = 1_500


def test_no_walk_breaks_an_invariant(effort: int) -> None:
    """Each walk is a seed: `Walk(seed).report()` repeats it."""
    broken = {}
    for seed in range(WALKS * effort):
        violations = Walk(seed).report().violations
        if violations:
            broken[seed] = str(violations[0])
    assert not broken, f"{len(broken)} walks, the first ones: {dict(list(broken.items())[:5])}"


def test_walks_reach_every_answer() -> None:
    """A walk that never sees an outcome tests nothing about it."""
    reached: Counter[str] = Counter()
    for seed in range(300):
        walk = Walk(seed)
        walk.report()
        for entry in walk.store.entries:
            if isinstance(entry.answer, ClaimAnswer):
                started = entry.answer.record is not None and entry.answer.record.started_ms == entry.now_ms
                reached[entry.answer.outcome] += 1
                reached["won again"] += entry.answer.outcome == "won" and not started
                reached["interrupts others"] += bool(entry.answer.interrupted)
                reached["trims"] += bool(entry.drops)
            else:
                reached[f"{entry.op} {bool(entry.answer)}"] += 1
                reached[f"{entry.op} repeated"] += entry.answer is True and not entry.puts
    expected = ["won", "running", "finished", "interrupted", "overlap", "superseded", "late", "early", "gone"]
    expected += ["won again", "interrupts others", "trims", "finish repeated", "release repeated"]
    expected += [f"{op} {answer}" for op in ("heartbeat", "finish", "release", "purge") for answer in (True, False)]
    assert [name for name in expected if reached[name] < 10] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_in_the_rules_is_caught(mutant: Mutant) -> None:
    """By the invariants that are about it, on a walk that is fine without the mistake."""
    for seed in range(mutant.walks):
        with pytest.MonkeyPatch.context() as patch:
            mutant.patch(patch)
            caught = Walk(seed).report().ids() & mutant.caught_by
        if caught and not Walk(seed).report().violations:
            return
    pytest.fail(f"{mutant.walks} walks with {mutant.name} broke none of {sorted(mutant.caught_by)}")
