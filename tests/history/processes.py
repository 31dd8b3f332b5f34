"""Judges what processes journaled, and what the store kept of it. Pure, linear but for sorting; any thread may use it.

A process may be frozen between the moment in which its handler starts and the fact that says so, hence the order of
attempts is never taken from `start` alone where `decided` or a passed check tells better. A check that passed means
that the run was held when it began. What the invariants say stands in `base.INVARIANTS`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from leaselib import Run
from leaselib._model import to_ms

from .base import Fact, History, JobProfile, Violation

Slot = tuple[str, int]
LAST = ("success", "failed", "lost", "interrupted")


@dataclass
class Attempt:
    """What the facts say of one token.

    starts: when its handlers began; empty if only an event told of it, or none did.
    told: when a listener was told that it starts.
    decided: when the store started it, where that is known.
    skip: whether its claim said so; None if only the job's profile tells.
    first, last: when the first and the last of its checks began that passed, of those that count.
    """

    token: str
    job: str
    slot_ms: int
    number: int
    pid: Hashable = 0
    fence: int | None = None
    resume: Any = None
    starts: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)
    decided: float | None = None
    skip: bool | None = None
    first: float | None = None
    last: float | None = None
    words: list[Fact] = field(default_factory=list)

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.job} {self.slot_ms} (token {self.token}, pid {self.pid})"

    @property
    def began(self) -> bool:
        """Whether a handler of it has started."""
        return bool(self.starts or self.told)

    def passed(self, at: float) -> None:
        """A check that began then has passed."""
        self.first = at if self.first is None else min(self.first, at)
        self.last = at if self.last is None else max(self.last, at)

    def begun(self) -> float:
        """When it had begun, at the latest."""
        return min((*self.starts, *self.told)) if self.decided is None else self.decided


def collect(history: History) -> tuple[dict[str, Attempt], list[Violation]]:
    """The attempts that began in processes, or that are known to have been decided, by token; and S16, S2."""
    attempts: dict[str, Attempt] = {}
    found: list[Violation] = []
    for fact in history.facts:
        token, kind = fact.get("token"), fact["fact"]
        if token is None:
            continue
        known = attempts.get(token)
        if kind == "decided" and known is None:
            known = attempts[token] = _attempt(fact)
            known.decided, known.skip = fact["t"], fact["overlap"] == "skip"
        elif kind == "start":
            known = attempts.setdefault(token, known or _attempt(fact))
            found += _started(known, fact)
        elif kind == "effect":
            if known is None or not known.began:
                found.append(Violation("S16", f"an effect of a handler that never started: {dict(fact)}"))
            elif fact["at"] < history.quiet_until:
                known.passed(fact["at"])
        elif kind == "event":
            _told(attempts, known, fact, found)
    return attempts, found


def _attempt(fact: Fact) -> Attempt:
    return Attempt(fact["token"], fact["job"], fact["slot"], fact["attempt"], fact["pid"])


def _started(known: Attempt, fact: Fact) -> Iterator[Violation]:
    if known.starts:
        yield Violation("S16", f"{known} started again: {dict(fact)}")
    if (known.job, known.slot_ms, known.number) != (fact["job"], fact["slot"], fact["attempt"]):
        yield Violation("S2", f"the token of {known} has another attempt: {dict(fact)}")
    known.starts.append(fact["t"])
    known.fence, known.resume = fact["fence"], fact["resume"]


def _told(attempts: dict[str, Attempt], known: Attempt | None, fact: Fact, found: list[Violation]) -> None:
    """An event of the attempt's own process; others tell of it too, once it is interrupted."""
    if fact["event"] == "start":
        known = attempts.setdefault(fact["token"], known or _attempt(fact))
        if known.told:
            found.append(Violation("S16", f"{known} was told to start again: {dict(fact)}"))
        known.told.append(fact["t"])
    elif known is not None and fact["event"] in LAST and fact["pid"] == known.pid:
        known.words.append(fact)


def check(history: History, attempts: dict[str, Attempt]) -> Iterator[Violation]:
    """S1, S2, S6, S10, S17, S19, S20 and S21 of these attempts."""
    runs: dict[Slot, list[Attempt]] = {}
    jobs: dict[str, list[Attempt]] = {}
    for attempt in attempts.values():
        runs.setdefault((attempt.job, attempt.slot_ms), []).append(attempt)
        jobs.setdefault(attempt.job, []).append(attempt)
    for mine in runs.values():
        yield from _one_run(history, sorted(mine, key=lambda a: a.number))
    for job, mine in jobs.items():
        if _told_of_losses(history, job):
            yield from _one_at_a_time([a for a in mine if _skips(history, a)], history)
    lived = {fact["pid"] for fact in history.facts if fact["fact"] == "main-end"}
    lived -= {fact["pid"] for fact in history.facts if fact["fact"] == "killed"}
    for attempt in attempts.values():
        yield from _last_word(attempt, attempt.pid in lived)
    yield from _resumed(history)
    if history.kept:
        yield from _recorded(attempts, runs, history)


def _told_of_losses(history: History, job: str) -> bool:
    return job not in history.jobs or history.jobs[job].trusts_store


def _skips(history: History, attempt: Attempt) -> bool:
    """Whether it belongs to a job or a claim that leaves no other run beside it."""
    if attempt.skip is not None:
        return attempt.skip
    return attempt.job in history.jobs and history.jobs[attempt.job].overlap == "skip"


# ---- the facts ------------------------------------------------------------------------------------------------------


def _one_run(history: History, attempts: Sequence[Attempt]) -> Iterator[Violation]:
    """The attempts of one run, by number: S2, S17, S20. A store that lost some counts anew."""
    for before, after in itertools.pairwise(attempts) if history.kept else ():
        if before.number == after.number:
            yield Violation("S2", f"two tokens for one attempt: {before} and {after}")
        elif before.fence is not None and after.fence is not None and before.fence >= after.fence:
            yield Violation("S20", f"fence {after.fence} of {after} isn't above {before.fence} of {before}")
    latest: Attempt | None = None
    for attempt in attempts if _told_of_losses(history, attempts[0].job) else ():
        begun = attempt.begun()
        before_it = latest is not None and latest.number < attempt.number and begun < history.quiet_until
        if latest is not None and before_it and _last(latest) >= begun:
            yield Violation(
                "S17", f"a check of {latest} that began at {latest.last:.4f} passed, and {attempt} began at {begun:.4f}"
            )
        if latest is None or _last(attempt) > _last(latest):
            latest = attempt


def _last(attempt: Attempt) -> float:
    return -math.inf if attempt.last is None else attempt.last


def _one_at_a_time(attempts: Sequence[Attempt], history: History) -> Iterator[Violation]:
    """The attempts of one job that leave no other beside them, by when they began: S1, S20."""
    furthest: Attempt | None = None
    highest: Attempt | None = None
    for at, attempt in sorted(_begun(attempts, history.quiet_until), key=lambda pair: pair[0]):
        if furthest is not None and at <= _last(furthest):
            yield Violation(
                "S1", f"{attempt} began by {at:.4f}, and a check of {furthest} at {furthest.last:.4f} passed"
            )
        if attempt.fence is not None:
            if highest is not None and highest.fence is not None and attempt.fence <= highest.fence:
                yield Violation("S20", f"fence {attempt.fence} of {attempt} isn't above {highest.fence} of {highest}")
            else:
                highest = attempt
        if furthest is None or _last(attempt) > _last(furthest):
            furthest = attempt


def _begun(attempts: Sequence[Attempt], until: float) -> Iterator[tuple[float, Attempt]]:
    """Those of which it is known when they held the run for the first time, at the latest, and when that is."""
    for attempt in attempts:
        at = attempt.first if attempt.decided is None else attempt.decided
        if at is not None and at < until:
            yield at, attempt


def _last_word(attempt: Attempt, lived: bool) -> Iterator[Violation]:
    """S19, of one attempt. `lost` may be followed by what the store told in the end, when it was back."""
    names = [fact["event"] for fact in attempt.words]
    counts = Counter(names)
    if names and (max(counts.values()) > 1 or len(set(names) - {"lost"}) > 1 or "lost" in names[1:]):
        yield Violation("S19", f"{attempt} was told to be {names}")
    if lived and attempt.began and not names:
        yield Violation("S19", f"{attempt} has no last event, though its process lived to its own end")


def _resumed(history: History) -> Iterator[Violation]:
    """S21: what an attempt resumes from was sent for that run, not before the last value that the store has."""
    sent: dict[Slot, dict[str, int]] = {}  # each value, and which one it was, counted from 1; the latest if repeated
    stored: dict[Slot, int] = {}
    numbers: Counter[Slot] = Counter()
    for fact in history.facts:
        if fact["fact"] not in ("start", "saving", "saved"):
            continue
        slot = (fact["job"], fact["slot"])
        values = sent.setdefault(slot, {})
        if fact["fact"] == "saving":
            numbers[slot] += 1
            values[json.dumps(fact["value"])] = numbers[slot]
        elif fact["fact"] == "saved":
            stored[slot] = max(stored.get(slot, 0), values.get(json.dumps(fact["value"]), 0))
        else:
            resume, least = fact["resume"], stored.get(slot, 0) if fact["t"] < history.quiet_until else 0
            found = 0 if resume is None else values.get(json.dumps(resume), 0)
            if resume is not None and not found:
                yield Violation("S21", f"{dict(fact)} resumes from what nobody sent; sent were {list(values)[-5:]}")
            elif found < least:
                yield Violation("S21", f"{dict(fact)} resumes from {resume}, but a later value was stored")


# ---- the store's records --------------------------------------------------------------------------------------------


def _recorded(
    attempts: dict[str, Attempt], runs: dict[Slot, list[Attempt]], history: History
) -> Iterator[Violation]:
    def began(token: str) -> bool:
        return token in attempts and attempts[token].began

    for record in history.records:
        slot = (record.job, to_ms(record.slot))
        where = f"the store's run {slot[0]} {slot[1]} ({record.status}, attempt {record.attempt})"
        if record.status in ("success", "failed") and not began(record.token):
            yield Violation("S6", f"{where} has a token whose handler never started")
        numbers = [past.number for past in record.attempts]
        if numbers != list(range(record.attempt - len(numbers) + 1, record.attempt + 1)):
            yield Violation("S2", f"{where} has a log of attempts {numbers}")
        yield from _counted(record, where, history.jobs.get(record.job))
        for attempt in runs.get(slot, ()):
            yield from _as_recorded(attempt, record, where)


def _counted(record: Run, where: str, job: JobProfile | None) -> Iterator[Violation]:
    counted = record.attempt - record.handovers + record.released
    if job is not None and counted > job.max_attempts:
        allowed = job.max_attempts
        yield Violation("S10", f"{where} was started {counted} times without a hand-over, {allowed} are allowed")


def _as_recorded(attempt: Attempt, record: Run, where: str) -> Iterator[Violation]:
    """One attempt against its run's record: S2 and S19."""
    if attempt.number > record.attempt:
        yield Violation("S2", f"{attempt} started, but {where} never had it")
    elif attempt.number == record.attempt and attempt.token != record.token:
        yield Violation("S2", f"{attempt} started, but {where} has token {record.token}")
    for fact in attempt.words:
        if fact["event"] in ("success", "failed") and (record.status, record.token) != (fact["event"], attempt.token):
            yield Violation("S19", f"{attempt} was told to be a {fact['event']}, but {where} has token {record.token}")
