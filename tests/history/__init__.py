"""One judge of histories: of a pure store's decisions, of simulated clusters, and of real processes and their store.

`base` lists the invariants and says what a history is; `decisions` judges a store's decisions, `processes` what
processes journaled, `both` the one by the other, `liveness` whether things go on in peace; `audit` reads the decisions
of real stores. Nothing here knows how a history came about.
"""

from __future__ import annotations

from . import both, decisions, processes
from .base import INVARIANTS, Entry, Fact, History, JobProfile, Violation


def check(history: History) -> list[Violation]:
    """All that is wrong with a history, in one pass over each of its parts."""
    found = decisions.check(history.decisions).violations
    attempts, problems = processes.collect(history)
    found += problems
    found += processes.check(history, attempts)
    if history.decisions:
        found += both.check(history, attempts)
    return found


__all__ = ["INVARIANTS", "Entry", "Fact", "History", "JobProfile", "Violation", "check"]
