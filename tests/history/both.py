"""Judges what processes did by what their store decided. Pure, one pass; any thread may use it.

Needs every decision of the store: S14, S15, S19, S20 and S21 in `base.INVARIANTS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from leaselib._model import Record

from .base import History, Violation
from .processes import Attempt


def check(history: History, attempts: dict[str, Attempt]) -> Iterator[Violation]:
    """What the attempts that began in processes have against the decisions."""
    won: dict[str, list[Record]] = {}  # more than one only if the store lost the first
    accepted: set[tuple[str, str | None]] = set()
    for entry in history.decisions:
        if entry.op == "claim":
            for record in entry.puts:
                if record.token == entry.token and record.started_ms == entry.now_ms and record.status == "running":
                    won.setdefault(entry.token, []).append(record)
        elif entry.op == "finish" and entry.answer is True:
            accepted.add((entry.token, entry.status))
    for attempt in attempts.values():
        if attempt.began:
            yield from _as_decided(attempt, won.get(attempt.token, []))
        for fact in attempt.words:
            if fact["event"] in ("success", "failed") and (attempt.token, fact["event"]) not in accepted:
                yield Violation("S19", f"{attempt} was told to be a {fact['event']} that the store never accepted")


def _as_decided(attempt: Attempt, starts: list[Record]) -> Iterator[Violation]:
    """An attempt against the decision that started it."""
    if not starts:
        yield Violation("S15", f"{attempt} began, and the store never started it")
        return
    mine = (attempt.job, attempt.slot_ms, attempt.number)
    if all((it.job, it.slot_ms, it.attempt) != mine for it in starts):
        yield Violation("S14", f"{attempt} began, but its token was given to {starts}")
    if not attempt.starts:
        return
    fences = [it.fence for it in starts]
    if attempt.fence not in fences:
        yield Violation("S20", f"{attempt} got fence {attempt.fence}, the store's is {fences}")
    stored = [None if it.checkpoint is None else json.loads(it.checkpoint) for it in starts]
    if attempt.resume not in stored:
        yield Violation("S21", f"{attempt} resumes from {attempt.resume!r}, the store had {stored}")
