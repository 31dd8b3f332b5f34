"""Whether the demo happened: the store's records and the instances' own words, measured against the bounds.

Plain functions on values; no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

from leaselib._model import Run, from_ms, to_ms
from leaselib.cli import _demo_plan as plan

SECOND = timedelta(seconds=1)


@dataclass(frozen=True)
class Start:
    """An instance said that it started a handler."""

    runner: str
    job: str
    slot_ms: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class Blow:
    """A signal that an instance was sent, and when, on the store's clock."""

    runner: str
    at_ms: int


@dataclass(frozen=True)
class Evidence:
    """All that is known in the end.

    Attributes:
        up: the instances that came up.
        starts: what they said they started.
        steps: the steps of `report` that each attempt said it had done.
        killed: who got SIGKILL.
        stopped: who got SIGTERM.
        report: the run of `report`, as the store has it.
        ticks: the runs of `tick`, as the store has them.
        complaints: what else went wrong.
    """

    up: tuple[str, ...]
    starts: tuple[Start, ...]
    steps: dict[int, tuple[int, ...]]
    killed: Blow | None
    stopped: Blow | None
    report: Run | None
    ticks: tuple[Run, ...]
    complaints: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gap:
    """From one attempt to the next, by the store's clock.

    Attributes:
        to_attempt: the later attempt's number.
        to_runner: who runs it.
        since_end: seconds since the earlier one's lease ended, or was released.
        since_heartbeat: seconds since the earlier one's last heartbeat, for one whose lease ran out.
        since_blow: seconds since the signal was sent.
    """

    to_attempt: int
    to_runner: str
    since_end: float
    since_heartbeat: float
    since_blow: float


@dataclass(frozen=True)
class Check:
    """One thing that was to happen, whether it did, and figures: `measured` seconds had to be at most `bound`."""

    name: str
    ok: bool
    text: str
    measured: float | None = None
    bound: float | None = None
    more: tuple[tuple[str, Any], ...] = ()


def takeover_of(run: Run | None, killed: Blow | None) -> Gap | None:
    """From the killed instance's attempt to the next, if the store says that its lease ran out first."""
    return _gap(run, killed, "expired")


def handover_of(run: Run | None, stopped: Blow | None) -> Gap | None:
    """From the stopped instance's attempt to the next, if the store says that it was released."""
    return _gap(run, stopped, "handed-over")


def _gap(run: Run | None, blow: Blow | None, outcome: str) -> Gap | None:
    if run is None or blow is None:
        return None
    for earlier, later in pairwise(run.attempts):
        if earlier.outcome == outcome and earlier.runner == blow.runner and earlier.ended_at is not None:
            since_end = (later.started_at - earlier.ended_at) / SECOND
            since_blow = (later.started_at - from_ms(blow.at_ms)) / SECOND
            return Gap(later.number, later.runner, since_end, since_end + run.lease, since_blow)
    return None


def judge(evidence: Evidence) -> list[Check]:
    """Everything that was to happen."""
    return [
        _instances(evidence),
        _once(evidence),
        _takeover(evidence),
        _handover(evidence),
        _finish(evidence),
    ]


def _instances(evidence: Evidence) -> Check:
    name = "instances"
    missing = [runner for runner in plan.RUNNERS if runner not in evidence.up]
    if missing or evidence.complaints:
        texts = [f"{', '.join(missing)} did not come up"] if missing else []
        return Check(name, False, "; ".join([*texts, *evidence.complaints]))
    return Check(name, True, f"{len(evidence.up)} processes, one SQLite file")


def _once(evidence: Evidence) -> Check:
    """The store keeps one run per slot whatever happens: that nothing started twice, only the instances can tell."""
    name = "once"
    starts = Counter((s.job, s.slot_ms, s.attempt) for s in evidence.starts)
    twice = [key for key, number in starts.items() if number > 1]
    if twice:
        job, slot_ms, attempt = twice[0]
        return Check(name, False, f"attempt {attempt} of {job} {slot_ms} was started {starts[twice[0]]} times")
    slots = {to_ms(run.slot) for run in evidence.ticks}
    if not slots:
        return Check(name, False, f"no run of {plan.TICK} is in the store")
    due = (max(slots) - min(slots)) // (plan.TICK_S * 1000) + 1
    shares = Counter(s.runner for s in evidence.starts if s.job == plan.TICK)
    by = ", ".join(f"{runner} {shares[runner]}" for runner in plan.RUNNERS)
    more = (("due", due), ("started", len(slots)), ("twice", 0))
    return Check(name, True, f"{len(slots)} of {due} slots of {plan.TICK} run, none twice ({by})", more=more)


def _takeover(evidence: Evidence) -> Check:
    name, bound = "takeover", plan.TAKEOVER_BOUND_S
    if evidence.killed is None:
        return Check(name, False, f"nobody was killed: {_progress(evidence)}", bound=bound)
    gap = takeover_of(evidence.report, evidence.killed)
    if gap is None:
        return Check(name, False, f"nobody took over from {evidence.killed.runner} after its SIGKILL", bound=bound)
    more = (
        ("from", evidence.killed.runner),
        ("to", gap.to_runner),
        ("since_kill", round(gap.since_blow, 3)),
        ("since_lease_end", round(gap.since_end, 3)),
    )
    text = f"{gap.to_runner} took over {gap.since_heartbeat:.2f} s after the last heartbeat, {gap.since_blow:.2f} s "
    text += "after the kill"
    fault = _fault(evidence, gap, "takeover", evidence.killed.runner)
    if fault is None and gap.since_end < 0:
        fault = "but before the lease had ended"
    if fault is None and gap.since_heartbeat > bound + plan.ALLOWANCE_S:
        fault = "which is over the bound"
    return Check(name, fault is None, _with(text, fault), round(gap.since_heartbeat, 3), bound, more)


def _handover(evidence: Evidence) -> Check:
    name, bound = "hand-over", plan.HANDOVER_BOUND_S
    if evidence.stopped is None:
        return Check(name, False, f"nobody was told to stop: {_progress(evidence)}", bound=bound)
    gap = handover_of(evidence.report, evidence.stopped)
    if gap is None:
        return Check(name, False, f"{evidence.stopped.runner} handed nothing over after its SIGTERM", bound=bound)
    more = (("from", evidence.stopped.runner), ("to", gap.to_runner), ("since_sigterm", round(gap.since_blow, 3)))
    text = f"{gap.to_runner} went on {gap.since_end:.2f} s after the release, {gap.since_blow:.2f} s after the SIGTERM"
    fault = _fault(evidence, gap, "hand-over", evidence.stopped.runner)
    if fault is None and gap.since_end > bound + plan.ALLOWANCE_S:
        fault = "which is over the bound"
    return Check(name, fault is None, _with(text, fault), round(gap.since_end, 3), bound, more)


def _fault(evidence: Evidence, gap: Gap, reason: str, before: str) -> str | None:
    """Whether the store and the instances agree that another instance went on."""
    if gap.to_runner == before:
        return "but that is the same instance"
    said = [s for s in evidence.starts if s.job == plan.REPORT and s.attempt == gap.to_attempt]
    if [(s.runner, s.reason) for s in said] != [(gap.to_runner, reason)]:
        return f"but no instance says that it started attempt {gap.to_attempt} as a {reason}"
    return None


def _with(text: str, fault: str | None) -> str:
    return text if fault is None else f"{text}, {fault}"


def _finish(evidence: Evidence) -> Check:
    name, run = "finish", evidence.report
    if run is None:
        return Check(name, False, f"{plan.REPORT} never started")
    done = {step for steps in evidence.steps.values() for step in steps}
    shares = ", ".join(
        f"{attempt.runner} {_span(evidence.steps.get(attempt.number, ()))}" for attempt in run.attempts
    )
    text = f"{plan.REPORT} is {run.status} after {run.attempt} attempts: {shares}"
    if run.status != "success":
        return Check(name, False, text)
    missing = sorted(set(range(1, plan.STEPS + 1)) - done)
    if missing:
        return Check(name, False, f"{text}, but nobody did step {missing[0]}")
    more = (("attempts", run.attempt), ("handovers", run.handovers), ("steps", len(done)))
    return Check(name, True, text, more=more)


def _span(steps: tuple[int, ...]) -> str:
    return f"steps {min(steps)}-{max(steps)}" if steps else "no step"


def _progress(evidence: Evidence) -> str:
    done = max((step for steps in evidence.steps.values() for step in steps), default=0)
    return f"{plan.REPORT} got to step {done} of {plan.STEPS}" if evidence.report is not None else "nothing ran"
