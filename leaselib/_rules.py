"""The lease rules, as plain functions: given what the store knows of a job, its clock and a request, they answer.

This module is the specification in code. MemoryStore and SQLiteStore execute it; the Lua and SQL of the other stores
are held against it by tests, and where they differ, this is right. It owns nothing, reads no clock, and is called by
whichever thread holds the store's transaction.

The numbers in the comments are those of the rules:

1. A claim for a run with no state wins and gets a lease.
2. A heartbeat extends the lease, only with the current token and only while the lease was not released.
3. A run whose lease ran out can be claimed as the next attempt, up to max_attempts; once a newer run of the job has
   started, it is marked interrupted instead.
4. Finish and release only work with the current token.
5. A new run is refused while another run of the job has a live lease (overlap "skip").
6. A new claim that arrives too late, by the store's clock, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from leaselib._model import (
    LOG_ENTRIES,
    ClaimAnswer,
    ClaimRequest,
    JobMeta,
    Outcome,
    PastAttempt,
    Reason,
    Record,
    cut_error,
)

LATE_TOLERANCE_MS = 10_000
"""Rule 6: how far over its allowed lateness a claim may be when the store judges it."""
EARLY_MS = 1_000
"""A slot this far ahead of the store's clock may be started; one further ahead is `early` and "in the future"."""
TRIM_MARGIN_MS = 60_000
"""Runs are kept this much longer than the latest claim that could still ask for them."""
TRIM_BATCH = 16
"""A claim trims at most so many runs, so that its cost doesn't grow with history."""


@dataclass(frozen=True, slots=True)
class JobView:
    """What a claim has to know of a job; bounded, whatever the length of its history.

    Attributes:
        meta: the job's fence, floor and count of ended runs.
        run: the run that is asked for, or None.
        running: every other run of the job whose status is running.
        newest_ms: the highest slot of the job's runs at or before `horizon_ms(now)`, or None.
        trimmable: the oldest ended slots that may go now, `trim_limit` of them at most.
    """

    meta: JobMeta
    run: Record | None
    running: tuple[Record, ...]
    newest_ms: int | None
    trimmable: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """A claim's answer, and what has to be written in the same step: whole records, the job's meta, trimmed slots."""

    answer: ClaimAnswer
    puts: tuple[Record, ...] = ()
    meta: JobMeta | None = None
    drop: tuple[int, ...] = ()


def horizon_ms(now_ms: int) -> int:
    """Slots after this are in the store's future: they don't count as newer runs, and can't be started."""
    return now_ms + EARLY_MS


def trim_before_ms(request: ClaimRequest, now_ms: int) -> int:
    """Only ended runs of slots before this may be trimmed: no claim can ask for them any more."""
    return now_ms - request.keep_ms - LATE_TOLERANCE_MS - TRIM_MARGIN_MS


def trim_limit(request: ClaimRequest, meta: JobMeta) -> int:
    """How many runs this claim may trim, if it starts a new run."""
    return max(0, min(TRIM_BATCH, meta.ended - request.history_size))


def claim(view: JobView, request: ClaimRequest, now_ms: int, epoch: str) -> Decision:
    """Rules 1, 3, 5 and 6: decides a claim, atomically with respect to every other operation on the job."""
    runs = view.running if view.run is None else (*view.running, view.run)
    clamped = {run.slot_ms: brought for run in runs if (brought := _clamped(run, now_ms)) is not run}
    if not clamped:
        return _decided(view, request, now_ms, epoch)
    run = view.run and clamped.get(view.run.slot_ms, view.run)
    others = tuple(clamped.get(other.slot_ms, other) for other in view.running)
    decision = _decided(replace(view, run=run, running=others), request, now_ms, epoch)
    written = {record.slot_ms for record in decision.puts}
    kept = tuple(record for slot_ms, record in clamped.items() if slot_ms not in written)
    return replace(decision, puts=(*decision.puts, *kept)) if kept else decision


def _decided(view: JobView, request: ClaimRequest, now_ms: int, epoch: str) -> Decision:
    if view.run is None:
        return _claim_new(view, request, now_ms, epoch)
    return _claim_existing(view, view.run, request, now_ms, epoch)


def _claim_new(view: JobView, request: ClaimRequest, now_ms: int, epoch: str) -> Decision:
    slot_ms, skip = request.slot_ms, request.overlap == "skip"

    def refuse(outcome: Outcome, record: Record | None = None, wait_ms: int = 0) -> Decision:
        return Decision(ClaimAnswer(outcome, request.token, now_ms, epoch, record, wait_ms))

    if request.takeover_of is not None:
        return refuse("gone")
    if slot_ms > horizon_ms(now_ms):
        return refuse("early", wait_ms=slot_ms - now_ms)
    if view.meta.floor_ms is not None and slot_ms <= view.meta.floor_ms:
        # Rule 6's second half: this slot's state may have been trimmed, so it may have run already.
        return refuse("superseded" if skip else "late")
    if now_ms - slot_ms > request.max_late_ms + LATE_TOLERANCE_MS:
        return refuse("late")
    if skip:
        in_the_way = _live_one(view.running, now_ms)
        if in_the_way is not None:
            return refuse("overlap", in_the_way)
        if _newer_started(view, slot_ms, now_ms):
            return refuse("superseded")
    return _won(view, request, now_ms, epoch, run=None)


def _claim_existing(view: JobView, run: Record, request: ClaimRequest, now_ms: int, epoch: str) -> Decision:
    def answer(outcome: Outcome, record: Record = run) -> ClaimAnswer:
        return ClaimAnswer(outcome, request.token, now_ms, epoch, record)

    if run.status != "running":
        return Decision(answer("finished"))
    if run.token == request.token:
        if run.released:  # sent again after the release: nobody listens for the answer, and rule 2 forbids a renewal
            return Decision(answer("running"))
        # The answer to an earlier send was lost. A write, so that a synchronous replica confirms it too.
        renewed = replace(run, lease_end_ms=now_ms + run.lease_ms)
        return Decision(answer("won", renewed), puts=(renewed,))
    if run.live(now_ms):
        return Decision(answer("running"))
    if request.takeover_of is not None and request.takeover_of != run.attempt:
        return Decision(answer("gone"))
    if _newer_started(view, run.slot_ms, now_ms):
        return _interrupted(view, run, request, now_ms, epoch, "superseded")
    if not run.released and run.attempt - run.handovers >= request.max_attempts:
        return _interrupted(view, run, request, now_ms, epoch, "max_attempts")
    if request.takeover_of is None and run.attempt > 1:
        # This may be a late copy of the claim that started an attempt before the latest: one token, one attempt. A
        # backup names the attempt that it saw, so this sender becomes one.
        return Decision(answer("running"))
    if request.overlap == "skip":
        in_the_way = _live_one(view.running, now_ms)
        if in_the_way is not None:
            return Decision(answer("overlap", in_the_way))
    return _won(view, request, now_ms, epoch, run)


def _won(view: JobView, request: ClaimRequest, now_ms: int, epoch: str, run: Record | None) -> Decision:
    fence = max(view.meta.fence + 1, now_ms)
    started = Record(
        job=request.job,
        slot_ms=request.slot_ms,
        status="running",
        attempt=1 if run is None else run.attempt + 1,
        handovers=0 if run is None else run.handovers,
        token=request.token,
        runner=request.runner,
        fence=fence,
        lease_ms=request.lease_ms,
        lease_end_ms=now_ms + request.lease_ms,
        released=False,
        reason=_reason(request, run),
        started_ms=now_ms,
        checkpoint=None if run is None else run.checkpoint,
        past=() if run is None else _past(run),
    )
    doomed = tuple(
        _end(other, "interrupted", now_ms, "superseded")
        for other in view.running
        if not other.live(now_ms) and _dooms(started, other, request)
    )
    drop = view.trimmable if run is None else ()
    floor_ms = view.meta.floor_ms
    if drop:
        floor_ms = max(drop) if floor_ms is None else max(floor_ms, *drop)
    meta = JobMeta(fence, floor_ms, view.meta.ended + len(doomed) - len(drop))
    answer = ClaimAnswer(
        "won", request.token, now_ms, epoch, started, interrupted=tuple(r.slot_ms for r in doomed)
    )
    return Decision(answer, (started, *doomed), meta, drop)


def _dooms(started: Record, dead: Record, request: ClaimRequest) -> bool:
    """Whether a start ends another run that is dead.

    Rule 3: a new run ends every older one. Under skip, any start ends every dead run: one that isn't older lies in
    the store's future (its clock was set back), and its runner could otherwise renew beside this one.
    """
    if request.overlap == "skip":
        return True
    return started.attempt == 1 and dead.slot_ms < started.slot_ms


def _reason(request: ClaimRequest, run: Record | None) -> Reason:
    if run is None:
        return request.reason
    return "hand-over" if run.released else "takeover"


def _past(run: Record) -> tuple[PastAttempt, ...]:
    outcome: Literal["expired", "handed-over"] = "handed-over" if run.released else "expired"
    ended = PastAttempt(run.attempt, run.runner, run.started_ms, run.lease_end_ms, outcome)
    return (*run.past, ended)[-LOG_ENTRIES:]


def _interrupted(
    view: JobView, run: Record, request: ClaimRequest, now_ms: int, epoch: str, why: str
) -> Decision:
    ended = _end(run, "interrupted", now_ms, why)
    answer = ClaimAnswer("interrupted", request.token, now_ms, epoch, ended)
    return Decision(answer, (ended,), replace(view.meta, ended=view.meta.ended + 1))


def _end(
    run: Record, status: Literal["success", "failed", "interrupted"], now_ms: int, error: str | None
) -> Record:
    return replace(run, status=status, ended_ms=now_ms, error=error)


def _live_one(running: tuple[Record, ...], now_ms: int) -> Record | None:
    """The newest other run that has a live lease (rule 5)."""
    return max((r for r in running if r.live(now_ms)), key=lambda r: r.slot_ms, default=None)


def _newer_started(view: JobView, slot_ms: int, now_ms: int) -> bool:
    """Rule 3: whether a newer run of the job, not in the store's future, has started; it may be trimmed by now."""
    if view.newest_ms is not None and view.newest_ms > slot_ms:
        return True
    floor_ms = view.meta.floor_ms
    return floor_ms is not None and slot_ms < floor_ms <= horizon_ms(now_ms)


def _clamped(run: Record, now_ms: int) -> Record:
    """A lease end further away than the run's own lease: the store's clock was set back. It is brought down."""
    if run.status == "running" and not run.released and run.lease_end_ms > now_ms + run.lease_ms:
        return replace(run, lease_end_ms=now_ms + run.lease_ms)
    return run


def holds(run: Record, token: str) -> bool:
    """Whether the attempt with this token holds the run: rules 2 and 4 ask for nothing less."""
    return run.token == token and run.status == "running" and not run.released


def heartbeat(
    run: Record | None, token: str, lease_ms: int, checkpoint: str | None, now_ms: int
) -> Record | None:
    """Rule 2: the run with its lease extended to now + lease_ms, or None if the heartbeat is refused.

    A lease that ran out but that nobody took over is renewed. A checkpoint of None leaves the stored one.
    """
    if run is None or not holds(run, token):
        return None
    return replace(
        run,
        lease_ms=lease_ms,
        lease_end_ms=now_ms + lease_ms,
        checkpoint=run.checkpoint if checkpoint is None else checkpoint,
    )


def finish(
    run: Record | None, token: str, status: Literal["success", "failed"], error: str | None, now_ms: int
) -> tuple[bool, Record | None]:
    """Rule 4: whether the finish is accepted, and the record to write (None if it was accepted before)."""
    if run is None or run.token != token:
        return False, None
    if run.status != "running":
        return run.status == status, None
    if run.released:
        return False, None
    return True, _end(run, status, now_ms, None if error is None else cut_error(error))


def release(run: Record | None, token: str, checkpoint: str | None, now_ms: int) -> tuple[bool, Record | None]:
    """Rule 4 for a hand-over: whether the release is accepted, and the record to write (None if it was before)."""
    if run is None or run.token != token:
        return False, None
    if run.released:  # sent again; a newer run may have ended this one since
        return True, None
    if run.status != "running":
        return False, None
    released = replace(
        run,
        released=True,
        lease_end_ms=now_ms,
        handovers=run.handovers + 1,
        checkpoint=run.checkpoint if checkpoint is None else checkpoint,
    )
    return True, released


def purge(meta: JobMeta, slots: tuple[int, ...]) -> JobMeta:
    """The job's meta once these runs, all its ended ones among them, were purged.

    The floor rises to the highest, so that no late claim starts one of them again.
    """
    floors = slots if meta.floor_ms is None else (*slots, meta.floor_ms)
    return replace(meta, floor_ms=max(floors, default=None), ended=0)
