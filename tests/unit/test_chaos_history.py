"""The judge of chaos histories finds each fault in a history made by hand, and nothing in a good one."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from chaos import history
from chaos.history import Fact, Problem

from leaselib import Run
from leaselib._model import PastAttempt, Record, from_ms

SLOT_MS = 1_700_000_000_000
PID, OTHER = 11, 12
Facts = list[Fact]


def token(attempt: int, slot_ms: int = SLOT_MS) -> str:
    """The token of an attempt."""
    return f"{(slot_ms - SLOT_MS) // 1000}.{attempt}"


def fact(kind: str, t: float, attempt: int = 1, slot_ms: int = SLOT_MS, pid: int = PID, **fields: Any) -> Fact:
    """A fact about an attempt of the job `job`."""
    who = {"job": "job", "slot": slot_ms, "attempt": attempt, "token": token(attempt, slot_ms)}
    return {"t": t, "fact": kind, "pid": pid, **who, **fields}


def start(t: float, attempt: int = 1, slot_ms: int = SLOT_MS, pid: int = PID, **fields: Any) -> Fact:
    """A handler's start, with a fence that grows with slot and attempt unless given."""
    fence = slot_ms - SLOT_MS + attempt
    return fact("start", t, attempt, slot_ms, pid, **{"fence": fence, "resume": None, "reason": "scheduled", **fields})


def effect(at: float, attempt: int = 1, slot_ms: int = SLOT_MS, pid: int = PID, late: float = 0.001) -> Fact:
    """A passed check that began at `at`, and was noted a little later."""
    return fact("effect", at + late, attempt, slot_ms, pid, at=at)


def event(name: str, t: float, attempt: int = 1, slot_ms: int = SLOT_MS, pid: int = PID) -> Fact:
    """An event that a listener of that process got."""
    return fact("event", t, attempt, slot_ms, pid, event=name, reason=None)


def ended(pid: int, t: float = 99) -> Fact:
    """A process lived to its own end."""
    return {"t": t, "fact": "main-end", "pid": pid}


def record(status: Any = "success", attempt: int = 1, slot_ms: int = SLOT_MS, **fields: Any) -> Run:
    """What the store has of a run."""
    past = tuple(PastAttempt(n, "r", 0, 1, "expired") for n in range(1, attempt))
    made = Record(
        job="job", slot_ms=slot_ms, status=status, attempt=attempt, handovers=0, token=token(attempt, slot_ms),
        runner="r", fence=1, lease_ms=1000, lease_end_ms=SLOT_MS, released=False, reason="scheduled", started_ms=0,
        past=past,
    )  # fmt: skip
    return replace(made, **fields).to_run()


NEXT_MS = SLOT_MS + 1000


def good() -> Facts:
    """Attempt 1 dies with its process; attempt 2, elsewhere, resumes and succeeds; then comes the next slot.

    The dead process was frozen over the takeover, after a check of its own, and noted what it had done only then. The
    next slot's runner thought its run lost for a while.
    """
    return [
        start(1.0),
        effect(1.01),
        fact("saving", 1.02, value=[1, 1]),
        fact("saved", 1.03, value=[1, 1]),
        fact("saving", 1.04, value=[1, 2]),
        start(2.1, 2, pid=OTHER, resume=[1, 1], reason="takeover"),
        effect(1.3, late=1.0),
        effect(2.2, 2, pid=OTHER),
        event("success", 2.3, 2, pid=OTHER),
        event("interrupted", 2.3, 1, pid=OTHER),
        {"t": 2.4, "fact": "fault", "pid": 0, "kind": "kill"},
        start(3.0, slot_ms=NEXT_MS, pid=OTHER),
        effect(3.1, slot_ms=NEXT_MS, pid=OTHER),
        event("lost", 3.2, slot_ms=NEXT_MS, pid=OTHER),
        event("failed", 3.3, slot_ms=NEXT_MS, pid=OTHER),
        ended(OTHER),
    ]


def good_records() -> list[Run]:
    """What the store has after `good`."""
    return [record(attempt=2), record("failed", slot_ms=NEXT_MS)]


def judge(facts: Facts, records: list[Run] | None = None, *, skip: bool = True) -> list[Problem]:
    """The verdict on a history of one job."""
    jobs = frozenset(["job"]) if skip else frozenset[str]()
    return history.check(facts, good_records() if records is None else records, skip_jobs=jobs)


def found(problems: list[Problem]) -> set[str]:
    """Their identifiers."""
    return {problem.id for problem in problems}


def test_a_good_history_passes() -> None:
    """Whether the job is skip or allow; also if the store has trimmed its runs."""
    assert judge(good()) == []
    assert judge(good(), []) == []
    assert judge(good(), skip=False) == []


def test_an_empty_history_passes() -> None:
    """Nothing happened, nothing is wrong."""
    assert judge([], []) == []


BAD: dict[str, tuple[str, Facts]] = {
    "a token started twice in two processes": ("S16", [*good(), start(4.0, 2, pid=PID, resume=[1, 1])]),
    "an effect of a token that never started": ("S16", [*good(), effect(4.0, 3)]),
    "two tokens for one attempt": ("S2", [*good(), {**start(4.0, 2, resume=[1, 1]), "token": "else"}]),
    "one token for two attempts": ("S2", [*good(), {**start(4.0, 3, resume=[1, 1]), "token": token(2)}]),
    "an attempt that the store never had": ("S2", [*good(), start(4.0, 3, resume=[1, 1])]),
    "a check that passed after the next attempt's start": ("S17", [*good(), effect(2.15)]),
    "a check that passed after the start of the attempt after the next": (
        "S17",
        [start(1.0), start(2.0, 2), start(3.0, 3), effect(3.1)],
    ),
    "a fence that doesn't grow with the attempt": (
        "S20",
        [start(1.0, fence=7), effect(1.1), start(2.0, 2, fence=7), effect(2.1, 2)],
    ),
    "a fence that is smaller for the later slot": (
        "S20",
        [start(1.0, fence=7), effect(1.1), start(2.0, slot_ms=NEXT_MS, fence=6), effect(2.1, slot_ms=NEXT_MS)],
    ),
    "a check of another slot between two of a run": (
        "S1",
        [start(1.0), effect(1.1), start(1.2, slot_ms=NEXT_MS), effect(1.3, slot_ms=NEXT_MS), effect(1.4)],
    ),
    "no last event of a process that lived": ("S19", [f for f in good() if f.get("event") != "success"]),
    "two last events of one kind": ("S19", [*good(), event("success", 2.35, 2, pid=OTHER)]),
    "success and failed of one attempt": ("S19", [*good(), event("failed", 2.35, 2, pid=OTHER)]),
    "lost after failed": ("S19", [start(1.0), event("failed", 1.1), event("lost", 1.2)]),
    "a success of an attempt that was taken over": ("S19", [*good(), event("success", 2.35)]),
    "a resume from what nobody sent": ("S21", [start(1.0), start(2.0, 2, resume=[9, 9])]),
    "a resume from nothing, though something was stored": (
        "S21",
        [start(1.0), fact("saving", 1.1, value=1), fact("saved", 1.2, value=1), start(2.0, 2)],
    ),
    "a resume from less than what was stored": (
        "S21",
        [
            start(1.0),
            *(fact(kind, 1.1, value=value) for value in (1, 2) for kind in ("saving", "saved")),
            start(2.0, 2, resume=1),
        ],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_reported_by_the_right_name(name: str) -> None:
    """One thing is wrong in each."""
    wanted, facts = BAD[name]
    keeps_records = any(f["fact"] == "main-end" for f in facts)
    assert wanted in found(judge(facts, good_records() if keeps_records else []))


@pytest.mark.parametrize(
    "name", ["a check of another slot between two of a run", "a fence that is smaller for the later slot"]
)
def test_runs_of_a_job_with_allow_may_overlap(name: str) -> None:
    """What is wrong for skip isn't for allow."""
    assert judge(BAD[name][1], [], skip=False) == []


def test_a_killed_process_owes_no_last_event() -> None:
    """The same history, but nobody saw the process's own end."""
    facts = [f for f in good() if f.get("event") != "success" and f["fact"] != "main-end"]
    assert judge(facts) == []


BAD_RECORDS: dict[str, tuple[str, Run]] = {
    "a success whose handler never started": ("S6", record(attempt=2, token="else")),
    "a log with a gap": ("S2", record(attempt=3, past=(PastAttempt(1, "r", 0, 1, "expired"),), token=token(2))),
    "too many starts": ("S10", record("running", attempt=4)),
    "another end than the event's": ("S19", record("failed", attempt=2)),
    "another token than the attempt's": ("S2", record("running", attempt=2, token="else")),
    "another token than the event's": ("S19", record("running", attempt=2, token="else")),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_bad_record_is_reported_by_the_right_name(name: str) -> None:
    """The facts are good, the store's record isn't."""
    wanted, bad = BAD_RECORDS[name]
    assert wanted in found(judge(good(), [bad]))


def test_hand_overs_are_no_counted_starts() -> None:
    """Attempt 4 of three allowed, after a hand-over."""
    assert judge([], [record("running", attempt=4, handovers=1)]) == []


def test_a_run_that_stays_running_after_its_lease_is_reported() -> None:
    """Later than allowed; not before, and not once it has ended."""
    run = record("running", lease_end_ms=SLOT_MS)
    assert found(history.dead_runs([run], SLOT_MS + 501, 500)) == {"L2"}
    assert history.dead_runs([run], SLOT_MS + 500, 500) == []
    assert history.dead_runs([record("success")], SLOT_MS + 501, 500) == []
    assert run.lease_end + timedelta(milliseconds=500) == from_ms(SLOT_MS + 500)
