"""Judges what processes journaled, and what the store kept of it. Pure, one pass over the facts; any thread may use it.

Facts are those of `instance_program`: `start` of handlers, `effect` (`at`: when the check before it began; that check
passed), `saving` and `saved` around checkpoints, `event`, `main-end`. Times are CLOCK_MONOTONIC, which all processes
share. The store's clock must not have been stepped; clocks of instances may.

A process may be frozen between the moment in which its handler starts and the fact that says so, hence the order of
attempts is never taken from `start` alone: it is that of their first passed checks. A check that passed means that the
run was held when it began.

The identifiers are those of the rules:

- S1 Attempts of a `skip` job, from first to last passed check, never overlap.
- S2 Attempts of a run have one token each, and no token has two attempts; the store's log numbers them without gap.
- S6 The store's success or failure is that of an attempt whose handler had started.
- S10 Starts of a run that no hand-over preceded are at most max_attempts.
- S16 A token's handler starts once, over all processes; so each attempt starts at most once.
- S17 No check of an attempt passes once a later attempt's handler has started.
- S19 An attempt whose process lived to its own end has exactly one of success, failed, lost and interrupted as its last
  event; success and failed are what the store's record says, where it is still there.
- S20 Fences grow from attempt to attempt in a run, and with the order of attempts in a `skip` job.
- S21 `resume` is a checkpoint of that run, and none older than the last that was stored.
- L2 No run is `running` for longer than two heartbeats and some slack after its lease ended.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from leaselib import Run
from leaselib._model import to_ms

Fact = dict[str, Any]
Slot = tuple[str, int]
LAST = ("success", "failed", "lost", "interrupted")


@dataclass(frozen=True)
class Problem:
    """What breaks an invariant."""

    id: str
    text: str

    def __str__(self) -> str:
        return f"{self.id}: {self.text}"


@dataclass
class _Attempt:
    """What the facts say of one token."""

    token: str
    job: str
    slot_ms: int
    number: int
    fence: int = 0
    pid: int = 0
    starts: list[float] = field(default_factory=list)
    passed: list[float] = field(default_factory=list)
    words: list[Fact] = field(default_factory=list)

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.job} {self.slot_ms} (token {self.token}, pid {self.pid})"


def check(
    facts: Iterable[Fact],
    records: Iterable[Run],
    *,
    skip_jobs: frozenset[str],
    max_attempts: int = 3,
) -> list[Problem]:
    """All that is wrong with a finished history.

    Args:
        facts: the journal, in the order in which it was written.
        records: every run that the store still has.
        skip_jobs: the jobs with overlap="skip"; the others have "allow".
        max_attempts: of every job.
    """
    history = list(facts)
    lived = {fact["pid"] for fact in history if fact["fact"] == "main-end"}
    attempts, problems = _collect(history)
    runs: dict[Slot, list[_Attempt]] = {}
    jobs: dict[str, list[_Attempt]] = {}
    for attempt in attempts.values():
        runs.setdefault((attempt.job, attempt.slot_ms), []).append(attempt)
        jobs.setdefault(attempt.job, []).append(attempt)
    for mine in runs.values():
        problems += _one_run(sorted(mine, key=lambda a: a.number))
    for job, mine in jobs.items():
        if job in skip_jobs:
            problems += _one_at_a_time(sorted((a for a in mine if a.passed), key=lambda a: a.passed[0]))
    for attempt in attempts.values():
        problems += _last_word(attempt, attempt.pid in lived)
    problems += _resumed(history)
    problems += _recorded(attempts, runs, list(records), max_attempts)
    return problems


def dead_runs(records: Iterable[Run], now_ms: int, allowed_ms: int) -> list[Problem]:
    """L2, of runs that the store had at `now_ms` on its own clock."""
    return [
        Problem("L2", f"{run.job} {to_ms(run.slot)}, attempt {run.attempt}, is running {over_ms} ms after its lease")
        for run in records
        if run.status == "running" and (over_ms := now_ms - to_ms(run.lease_end)) > allowed_ms
    ]


# ---- the facts ------------------------------------------------------------------------------------------------------


def _collect(history: list[Fact]) -> tuple[dict[str, _Attempt], list[Problem]]:
    """The attempts whose handlers started, by token; and S16."""
    attempts: dict[str, _Attempt] = {}
    problems: list[Problem] = []
    for fact in history:
        token, kind = fact.get("token"), fact["fact"]
        if token is None or kind not in ("start", "effect", "event"):
            continue
        known = attempts.get(token)
        if kind == "start":
            if known is None:
                known = _Attempt(token, fact["job"], fact["slot"], fact["attempt"], fact["fence"], fact["pid"])
                attempts[token] = known
            else:
                problems.append(Problem("S16", f"{known} started again: {fact}"))
                if (known.job, known.slot_ms, known.number) != (fact["job"], fact["slot"], fact["attempt"]):
                    problems.append(Problem("S2", f"the token of {known} has another attempt: {fact}"))
            known.starts.append(fact["t"])
        elif known is None:
            if kind == "effect":
                problems.append(Problem("S16", f"an effect of a handler that never started: {fact}"))
        elif kind == "effect":
            known.passed.append(fact["at"])
        elif fact["event"] in LAST and fact["pid"] == known.pid:  # others tell of it too, once it is interrupted
            known.words.append(fact)
    return attempts, problems


def _one_run(attempts: list[_Attempt]) -> Iterator[Problem]:
    """The attempts of one run, by number: S2, S17, S20."""
    latest: tuple[float, _Attempt] | None = None
    for before, after in itertools.pairwise(attempts):
        if before.number == after.number:
            yield Problem("S2", f"two tokens for one attempt: {before} and {after}")
        elif before.fence >= after.fence:
            yield Problem("S20", f"fence {after.fence} of {after} isn't above {before.fence} of {before}")
    for attempt in attempts:
        start = min(attempt.starts)
        if latest is not None and latest[0] >= start and latest[1].number < attempt.number:
            yield Problem(
                "S17", f"a check of {latest[1]} that began at {latest[0]:.4f} passed, and {attempt} started {start:.4f}"
            )
        if attempt.passed and (latest is None or attempt.passed[-1] > latest[0]):
            latest = (attempt.passed[-1], attempt)


def _one_at_a_time(attempts: list[_Attempt]) -> Iterator[Problem]:
    """The attempts of a skip job, by first passed check: S1, S20."""
    furthest: _Attempt | None = None
    fence: _Attempt | None = None
    for attempt in attempts:
        if furthest is not None and attempt.passed[0] <= furthest.passed[-1]:
            yield Problem(
                "S1",
                f"{attempt} passed a check at {attempt.passed[0]:.4f}, and {furthest} passed one later, at "
                f"{furthest.passed[-1]:.4f}",
            )
        if fence is not None and attempt.fence <= fence.fence:
            yield Problem("S20", f"fence {attempt.fence} of {attempt} isn't above {fence.fence} of the earlier {fence}")
        if furthest is None or attempt.passed[-1] > furthest.passed[-1]:
            furthest = attempt
        if fence is None or attempt.fence > fence.fence:
            fence = attempt


def _last_word(attempt: _Attempt, lived: bool) -> Iterator[Problem]:
    """S19, of one attempt. `lost` may be followed by what the store told in the end, when it was back."""
    names = [fact["event"] for fact in attempt.words]
    counts = Counter(names)
    if names and (max(counts.values()) > 1 or len(set(names) - {"lost"}) > 1 or "lost" in names[1:]):
        yield Problem("S19", f"{attempt} was told to be {names}")
    if lived and not names:
        yield Problem("S19", f"{attempt} has no last event, though its process lived to its own end")


def _resumed(history: list[Fact]) -> Iterator[Problem]:
    """S21: what an attempt resumes from was sent for that run, not before the last value that the store has."""
    sent: dict[Slot, list[Any]] = {}
    stored: dict[Slot, int] = {}
    for fact in history:
        kind = fact["fact"]
        if kind not in ("start", "saving", "saved"):
            continue
        slot = (fact["job"], fact["slot"])
        values = sent.setdefault(slot, [])
        if kind == "saving":
            values.append(fact["value"])
        elif kind == "saved":
            stored[slot] = max(stored.get(slot, 0), _place(values, fact["value"]))
        else:
            resume, least = fact["resume"], stored.get(slot, 0)
            found = 0 if resume is None else _place(values, resume)
            if resume is not None and not found:
                yield Problem("S21", f"{fact} resumes from what nobody sent; sent were {values[-5:]}")
            elif found < least:
                yield Problem("S21", f"{fact} resumes from {resume}, but {values[least - 1]} was stored")


def _place(values: list[Any], value: Any) -> int:
    """Which of the values it is, counted from 1, the latest first; 0 if it is none."""
    return next((i for i in range(len(values), 0, -1) if values[i - 1] == value), 0)


# ---- the store's records --------------------------------------------------------------------------------------------


def _recorded(
    attempts: dict[str, _Attempt], runs: dict[Slot, list[_Attempt]], records: list[Run], max_attempts: int
) -> Iterator[Problem]:
    for record in records:
        slot = (record.job, to_ms(record.slot))
        where = f"the store's run {slot[0]} {slot[1]} ({record.status}, attempt {record.attempt})"
        if record.status in ("success", "failed") and record.token not in attempts:
            yield Problem("S6", f"{where} has a token whose handler never started")
        numbers = [past.number for past in record.attempts]
        if numbers != list(range(record.attempt - len(numbers) + 1, record.attempt + 1)):
            yield Problem("S2", f"{where} has a log of attempts {numbers}")
        counted = record.attempt - record.handovers + record.released
        if counted > max_attempts:
            yield Problem("S10", f"{where} was started {counted} times without a hand-over, {max_attempts} are allowed")
        for attempt in runs.get(slot, ()):
            yield from _as_recorded(attempt, record, where)


def _as_recorded(attempt: _Attempt, record: Run, where: str) -> Iterator[Problem]:
    """One attempt against its run's record: S2 and S19."""
    if attempt.number > record.attempt:
        yield Problem("S2", f"{attempt} started, but {where} never had it")
    elif attempt.number == record.attempt and attempt.token != record.token:
        yield Problem("S2", f"{attempt} started, but {where} has token {record.token}")
    for fact in attempt.words:
        if fact["event"] in ("success", "failed") and (record.status, record.token) != (fact["event"], attempt.token):
            yield Problem("S19", f"{attempt} was told to be a {fact['event']}, but {where} has token {record.token}")
