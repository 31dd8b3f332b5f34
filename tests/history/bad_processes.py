"""Histories of processes, made by hand: good ones, and what breaks each invariant. Pure; any thread may use it.

`BAD` has those that are judged by facts and records alone, `BAD_BOTH` those that need the store's decisions, and
`BAD_LIVENESS` what is judged by `liveness`. In all of them one job is `skip` and another `allow`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from leaselib import Run
from leaselib._model import ClaimAnswer, ClaimRequest, PastAttempt, Record

from . import liveness
from .base import Entry, Fact, History, JobProfile, Violation

SLOT_MS = 1_700_000_000_000
NEXT_MS = SLOT_MS + 1000
PID, OTHER = 11, 12
PROFILES = {"job": JobProfile("skip"), "free": JobProfile("allow"), "stubborn": JobProfile("skip", trusts_store=False)}
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


def saved(t: float, *values: Any) -> Facts:
    """Checkpoints that attempt 1 sent, and that were stored."""
    return [fact(kind, t, value=value) for value in values for kind in ("saving", "saved")]


def decided(t: float, attempt: int = 1, slot_ms: int = SLOT_MS, overlap: str = "skip") -> Fact:
    """The store started an attempt just then."""
    return fact("decided", t, attempt, slot_ms, overlap=overlap)


def ended(pid: int, t: float = 99) -> Fact:
    """A process lived to its own end."""
    return {"t": t, "fact": "main-end", "pid": pid}


def record(status: Any = "success", attempt: int = 1, slot_ms: int = SLOT_MS, **fields: Any) -> Record:
    """What the store has of a run."""
    past = tuple(PastAttempt(n, "r", 0, 1, "expired") for n in range(1, attempt))
    made = Record(
        job="job", slot_ms=slot_ms, status=status, attempt=attempt, handovers=0, token=token(attempt, slot_ms),
        runner="r", fence=slot_ms - SLOT_MS + attempt, lease_ms=1000, lease_end_ms=SLOT_MS, released=False,
        reason="scheduled", started_ms=0, past=past,
    )  # fmt: skip
    return replace(made, **fields)


def good() -> Facts:
    """Attempt 1 dies with its process; attempt 2, elsewhere, resumes and succeeds; then comes the next slot.

    The dead process was frozen over the takeover, after a check of its own, and noted what it had done only then. The
    next slot's runner thought its run lost for a while.
    """
    return [
        start(1.0),
        effect(1.01),
        *saved(1.03, [1, 1]),
        fact("saving", 1.04, value=[1, 2]),
        start(2.1, 2, pid=OTHER, resume=[1, 1], reason="takeover"),
        effect(1.3, late=1.0),
        effect(2.2, 2, pid=OTHER),
        event("success", 2.3, 2, pid=OTHER),
        event("interrupted", 2.3, 1, pid=OTHER),
        {"t": 2.4, "fact": "fault", "pid": 0, "kind": "kill"},
        start(3.0, slot_ms=NEXT_MS, pid=OTHER),
        event("start", 3.01, slot_ms=NEXT_MS, pid=OTHER),
        effect(3.1, slot_ms=NEXT_MS, pid=OTHER),
        event("lost", 3.2, slot_ms=NEXT_MS, pid=OTHER),
        event("failed", 3.3, slot_ms=NEXT_MS, pid=OTHER),
        ended(OTHER),
    ]


def good_records() -> list[Record]:
    """What the store has after `good`."""
    return [record(attempt=2), record("failed", slot_ms=NEXT_MS)]


def of(facts: Facts, *records: Record, job: str = "job", **more: Any) -> History:
    """A history of that job."""
    mine = [{**fact, "job": job} if "job" in fact else fact for fact in facts]
    runs: list[Run] = [replace(record, job=job).to_run() for record in records]
    return History(facts=mine, records=runs, jobs=PROFILES, **more)


def full(facts: Facts) -> History:
    """The history with the records of the good one."""
    return of(facts, *good_records())


def _without(name: str) -> Facts:
    return [fact for fact in good() if fact.get("event") != name]


BAD: dict[str, tuple[set[str], History]] = {
    "a check of another slot between two of a run": (
        {"S1"},
        of([start(1.0), effect(1.1), start(1.2, slot_ms=NEXT_MS), effect(1.3, slot_ms=NEXT_MS), effect(1.4)]),
    ),
    "a check after the store started another slot's run, before that had any": (
        {"S1"},
        of([decided(1.0), start(1.0), effect(1.1), decided(1.2, slot_ms=NEXT_MS), start(1.5, slot_ms=NEXT_MS),
            effect(1.3)]),
    ),
    "a check after a skip claim started another slot's run of a mixed job": (
        {"S1"},
        of([decided(1.0), start(1.0), effect(1.1), decided(1.2, slot_ms=NEXT_MS), start(1.5, slot_ms=NEXT_MS),
            effect(1.3)], job="free"),
    ),
    "two tokens for one attempt": ({"S2"}, of([start(1.0), {**start(2.0), "token": "else"}])),
    "an attempt that the store never had": ({"S2"}, full([*good(), start(4.0, 3, resume=[1, 1])])),
    "a log with a gap": (
        {"S2"}, of([], record("running", attempt=3, past=(PastAttempt(1, "r", 0, 1, "expired"),)))
    ),
    "another token than the attempt's": ({"S2"}, of([start(1.0)], record("running", token="else"))),
    "one token for two attempts": (
        {"S16", "S2"}, full([*good(), {**start(4.0, 3, resume=[1, 1]), "token": token(2)}])
    ),
    "a success whose handler never started": ({"S6"}, of([], record())),
    "a failure whose handler never started": ({"S6"}, of([start(1.0)], record("failed", 2))),
    "too many starts": ({"S10"}, of([], record("running", attempt=4))),
    "too many starts beside a hand-over": ({"S10"}, of([], record("running", attempt=5, handovers=1))),
    "a token started twice in two processes": ({"S16"}, full([*good(), start(4.0, 2, pid=PID, resume=[1, 1])])),
    "a token told to start twice": ({"S16"}, of([event("start", 1.0), event("start", 2.0)])),
    "an effect of a token that never started": ({"S16"}, full([*good(), effect(4.0, 3)])),
    "a check that passed after the next attempt's start": ({"S17"}, of([*good()[:6], effect(2.15)])),
    "a check that passed after the start of the attempt after the next": (
        {"S17"},
        of([start(1.0), start(2.0, 2), start(3.0, 3), effect(3.1)]),
    ),
    "a check that passed after the next attempt was decided, before it began": (
        {"S17"},
        of([start(1.0), decided(2.0, 2), start(2.5, 2), effect(2.2)], job="free"),
    ),
    "a check that passed after an attempt was decided whose process never began it": (
        {"S17"},
        of([start(1.0), decided(2.0, 2), effect(2.2)]),
    ),
    "a success of an attempt that was decided and never began": ({"S6"}, of([decided(1.0)], record())),
    "an effect of an attempt that was decided and never began": ({"S16"}, of([decided(1.0), effect(1.1)])),
    "no last event of a process that lived": ({"S19"}, full(_without("success"))),
    "no last event of a run that only an event told of": ({"S19"}, of([event("start", 1.0), ended(PID)])),
    "two last events of one kind": ({"S19"}, full([*good(), event("success", 2.35, 2, pid=OTHER)])),
    "success and failed of one attempt": ({"S19"}, full([*good(), event("failed", 2.35, 2, pid=OTHER)])),
    "lost after failed": ({"S19"}, of([start(1.0), event("failed", 1.1), event("lost", 1.2)])),
    "a success of an attempt that was taken over": ({"S19"}, full([*good(), event("success", 2.35)])),
    "another end than the event's": ({"S19"}, of(good(), record("failed", attempt=2))),
    "a fence that doesn't grow with the attempt": ({"S20"}, of([start(1.0, fence=7), start(2.0, 2, fence=7)])),
    "a fence that is smaller for the later slot": (
        {"S20"},
        of([start(1.0, fence=7), effect(1.1), start(2.0, slot_ms=NEXT_MS, fence=6), effect(2.1, slot_ms=NEXT_MS)]),
    ),
    "a resume from what nobody sent": ({"S21"}, of([start(1.0), start(2.0, 2, resume=[9, 9])])),
    "a resume from nothing, though something was stored": ({"S21"}, of([start(1.0), *saved(1.1, 1), start(2.0, 2)])),
    "a resume from less than what was stored": (
        {"S21"},
        of([start(1.0), *saved(1.1, 1, 2), start(2.0, 2, resume=1)]),
    ),
}  # fmt: skip
"""By name: the invariants that are broken, and nothing but they."""

GOOD: dict[str, History] = {
    "nothing happened": History(),
    "a death, a takeover, the next slot": full(good()),
    "the store has trimmed its runs": of(good()),
    "a job with allow": of(good(), *good_records(), job="free"),
    "runs of a job with allow overlap": replace(
        BAD["a check of another slot between two of a run"][1],
        facts=[{**fact, "job": "free"} for fact in BAD["a check of another slot between two of a run"][1].facts],
    ),
    "a job that goes on without its store is late": of([*good()[:6], effect(2.15)], job="stubborn"),
    "a check passes after the store's clock was stepped": of([*good()[:6], effect(2.15)], quiet_until=2.0),
    "a run is taken over at once as the store's clock was stepped": of(
        [start(1.0), effect(1.1), start(1.2, 2), effect(1.3)], quiet_until=1.15
    ),
    "a store has lost what it stored": of([start(1.0), *saved(1.1, 1), start(2.0, 2)], quiet_until=1.5, kept=False),
    "a run starts again, as the store has lost it": of(
        [start(1.0, fence=7), {**start(2.0, fence=6), "token": "else"}], quiet_until=1.5, kept=False
    ),
    "a store has lost a run": of(good(), record("running", token="else"), kept=False),
    "a killed process owes no last event": full([f for f in _without("success") if f["fact"] != "main-end"]),
    "a process that was killed after its own end owes none": full(
        [*_without("success"), {"t": 99.5, "fact": "killed", "pid": OTHER}]
    ),
    "an attempt that never began owes no last event": of([decided(1.0), ended(PID)]),
    "hand-overs are no counted starts": of([], record("running", attempt=4, handovers=1)),
}


# ---- with the store's decisions -------------------------------------------------------------------------------------


def decisions(checkpoint: str | None = None, status: str | None = None, fence: int = 1) -> list[Entry]:
    """The store starts the first attempt, maybe stores a checkpoint, starts the second; the last is finished."""
    request = ClaimRequest("job", SLOT_MS, "", "r", 1000, 3, "skip", 60_000, 60_000, 100, "scheduled", None)
    run = record("running", started_ms=SLOT_MS, lease_end_ms=SLOT_MS + 1000, fence=fence)
    entries: list[Entry] = []

    def claim(run: Record, now_ms: int) -> None:
        asked = replace(request, token=run.token)
        answer = ClaimAnswer("won", run.token, now_ms, "1-0", run)
        entries.append(Entry("claim", "job", now_ms, answer, (run,), (), SLOT_MS, run.token, asked))

    def other(op: Any, run: Record, now_ms: int, **sent: Any) -> None:
        entries.append(Entry(op, "job", now_ms, True, (run,), slot_ms=SLOT_MS, token=run.token, **sent))

    claim(run, SLOT_MS)
    if checkpoint is not None:
        run = replace(run, checkpoint=checkpoint)
        other("heartbeat", run, SLOT_MS, checkpoint=checkpoint)
        run = replace(run, attempt=2, token=token(2), fence=fence + 1, lease_end_ms=SLOT_MS + 2100)
        run = replace(run, started_ms=SLOT_MS + 1100)
        claim(run, SLOT_MS + 1100)
    if status is not None:
        end: Any = status
        other("finish", replace(run, status=end, ended_ms=SLOT_MS + 1200), SLOT_MS + 1200, status=status)
    return entries




BAD_BOTH: dict[str, tuple[set[str], History]] = {
    "a handler starts with another's token": ({"S15"}, of([start(1.0, 2)], decisions=decisions())),
    "a run is told to start that the store never started": (
        {"S15"}, of([event("start", 1.0, slot_ms=NEXT_MS)], decisions=decisions())
    ),
    "a handler is told that it is another attempt": (
        {"S14"}, of([{**start(1.0, 2, fence=1), "token": token(1)}], decisions=decisions())
    ),
    "a handler is told another slot": (
        {"S14"}, of([{**start(1.0, slot_ms=NEXT_MS, fence=1), "token": token(1)}], decisions=decisions())
    ),
    "a success that the store never accepted": (
        {"S19"}, of([start(1.0), event("success", 1.1)], decisions=decisions())
    ),
    "a success that the store took for a failure": (
        {"S19"}, of([start(1.0), event("success", 1.1)], decisions=decisions(status="failed"))
    ),
    "a handler gets a smaller fence": ({"S20"}, of([start(1.0, fence=1)], decisions=decisions(fence=7))),
    "a handler gets a larger fence": ({"S20"}, of([start(1.0, fence=8)], decisions=decisions(fence=7))),
    "a handler resumes from something else": ({"S21"}, of([start(1.0, 2, resume=None)], decisions=decisions("5"))),
}  # fmt: skip
"""As BAD, judged by the store's decisions."""

GOOD |= {
    "the store started and finished what processes did": of(
        [start(1.0), *saved(1.1, 5), start(2.0, 2, resume=5), event("failed", 2.1, 2)],
        decisions=decisions("5", "failed"),
    ),
    "nobody journaled what the store decided": of([], decisions=decisions("5", "success")),
}


# ---- liveness -------------------------------------------------------------------------------------------------------

_RUNNING = record("running").to_run()
BAD_LIVENESS: dict[str, tuple[set[str], list[Violation]]] = {
    "a slot that nobody dealt with": ({"L1"}, list(liveness.coverage([("job", SLOT_MS)], set()))),
    "a slot that only another job had": ({"L1"}, list(liveness.coverage([("job", SLOT_MS)], {("free", SLOT_MS)}))),
    "a run is running after its lease": ({"L2"}, liveness.dead_runs([_RUNNING], SLOT_MS + 501, 500)),
    "a released run is not taken": (
        {"L2"}, liveness.dead_runs([record("running", released=True).to_run()], SLOT_MS + 501, 500)
    ),
}  # fmt: skip
GOOD_LIVENESS: dict[str, list[Violation]] = {
    "a slot was dealt with": list(liveness.coverage([("job", SLOT_MS)], {("job", SLOT_MS)})),
    "a run is running, but not for long after its lease": liveness.dead_runs([_RUNNING], SLOT_MS + 500, 500),
    "a run has ended": liveness.dead_runs([record().to_run()], SLOT_MS + 501, 500),
}
