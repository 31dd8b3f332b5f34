"""What must hold of a history: the store's decisions, the instances' events, and the bounds of liveness. Pure.

The decisions go through `invariants.check`, S15, S16, S17 and S25 are seen while the cluster runs; the rest is here:

- S18 A refused run has its signal set, and at most one `lost`.
- S19 Each attempt of an instance that lived to the end has exactly one of success, failed, lost and interrupted as its
  last event, success and failed at most once and only if the store accepted that finish.
- L1 From `settled_ms` on every slot has a run, or an answer or an event that says why not.
- L2 Then no run is dead for longer than lease + two heartbeats + interval (L3, L5: taken over, handed over, ended).
- L9 Nobody watches a run for long after its end.
- L12 After the end nothing is left: no attempt, no call under way, every worker free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import invariants
from harness import START_MS

from leaselib._model import ClaimAnswer

from .cluster import Cluster, slots
from .plan import Plan, bound_ms

Problem = tuple[str, str]
LAST = ("success", "failed", "lost", "interrupted")


def run(plan: Plan) -> tuple[Cluster, list[Problem]]:
    """Carries a plan out and judges it. Problems are (invariant, text), at most a few of each."""
    cluster = Cluster(plan).carry_out()
    problems = [*coverage(cluster), *dead_runs(cluster), *watches(cluster)]
    cluster.shut_down()
    report = invariants.check(cluster.entries)
    problems += [(violation.id, str(violation)) for violation in report.violations]
    problems += cluster.problems
    problems += [*last_words(cluster), *left_over(cluster)]
    return cluster, problems


def coverage(cluster: Cluster) -> Iterator[Problem]:
    """L1, of the time in which no fault is on."""
    plan = cluster.plan
    every_ms = {job.name: job.every_ms for job in plan.jobs}
    dealt: set[tuple[str, int]] = set()
    for entry in cluster.entries:
        if isinstance(entry.answer, ClaimAnswer) and entry.answer.outcome != "early":
            dealt.add((entry.job, entry.slot_ms))
    for member in cluster.everyone:
        for _, event in member.told:
            if event.name == "skip" and event.job is not None and event.slot_ms is not None:
                told = range(event.count or 1)  # one event may stand for several slots in a row
                dealt.update((event.job, event.slot_ms + n * every_ms[event.job]) for n in told)
    for job in plan.jobs:
        first_ms = START_MS + plan.settled_ms + cluster.store_offset_ms
        last_ms = cluster.store_ms - round(job.options["jitter"] * 1000) - 2_000
        if any(member.planner.free < 1 for member in cluster.living()):
            last_ms -= round(job.options["max_late"] * 1000)  # until then a claim waits for a free worker
        for slot_ms in slots(job, first_ms, last_ms):
            if (job.name, slot_ms) not in dealt:
                yield "L1", f"slot {slot_ms} of {job.name} was lost: no run, no answer, no event"


def dead_runs(cluster: Cluster) -> Iterator[Problem]:
    """L2, L3, L5, at the end of the calm time."""
    bounds = {job.name: bound_ms(job) for job in cluster.plan.jobs}
    for record in cluster.store.all_records():
        dead_ms = cluster.store_ms - record.lease_end_ms
        if record.status == "running" and dead_ms > bounds[record.job] and record.slot_ms <= cluster.store_ms:
            yield "L2", f"{record} has been dead for {dead_ms} ms, allowed are {bounds[record.job]}"


def watches(cluster: Cluster) -> Iterator[Problem]:
    """L9, at the end of the calm time."""
    for member in cluster.living():
        if member.planner.free < 1:
            continue  # a check may win, so it waits for a free worker
        for (job, slot_ms), watch in member.planner.backups._watches.items():
            run = cluster.run(slot_ms, job)
            if watch.until_boot_ms is not None or run is None or run.ended_at is None:
                continue
            ended_ms = cluster.store_ms - round(run.ended_at.timestamp() * 1000)
            allowed_ms = 2 * watch.spec.options.heartbeat_ms + 1_000
            if ended_ms > allowed_ms:
                yield "L9", f"{member.name} still watches slot {slot_ms} of {job}, which ended {ended_ms} ms ago"


def last_words(cluster: Cluster) -> Iterator[Problem]:
    """S18 and S19."""
    accepted = {(e.token, e.status) for e in cluster.entries if e.op == "finish" and e.answer is True}
    for member in cluster.everyone:
        words = member.last_words()
        for token, events in words.items():
            names = [event.name for event in events]
            counts = Counter(names)
            if max(counts.values()) > 1 or len(set(names) - {"lost"}) > 1 or "lost" in names[1:]:
                yield "S19", f"{token} on {member.name} was told to be {names}"
            for event in events:
                if event.name in ("success", "failed") and (token, event.name) not in accepted:
                    yield "S19", f"{token} on {member.name} is a {event.name} that the store never accepted"
                if event.name == "lost" and event.reason == "refused" and token in cluster.handlers:
                    ended = any(e.name in LAST and e is not event for e in events)
                    if token not in member.signals and event.duration_ms is None and not ended:
                        yield "S18", f"{token} on {member.name} was refused, and its handler not told"
        if member.dead:
            continue
        for token, owner in cluster.handlers.items():
            if owner == member.name and token not in words:
                yield "S19", f"{token} on {member.name} started, and has no last event"


def left_over(cluster: Cluster) -> Iterator[Problem]:
    """L12, after the end."""
    for member in cluster.living():
        planner = member.planner
        if planner.attempts or planner.in_flight or planner.orphans.out or planner.free != cluster.plan.workers:
            yield "L12", (
                f"{member.name} has {len(planner.attempts)} attempts, {planner.in_flight} calls and "
                f"{planner.orphans.out} releases under way, {planner.free} of {cluster.plan.workers} workers free"
            )


BRANCHES = (
    "won", "won again", "running", "finished", "interrupted", "overlap", "superseded", "late", "early", "gone",
    "takeover", "hand-over", "catch-up", "manual", "resumed", "trimmed", "clamped", "doomed", "late copy",
    "refused heartbeat", "refused finish", "repeated finish", "accepted release", "repeated release",
    "skip overlap", "skip late", "skip missed", "skip busy", "skip superseded", "lost refused", "lost unreachable",
    "interrupted stopping", "interrupted unreachable", "interrupted max_attempts", "interrupted superseded",
    "store_error", "store_error reset", "store_ok", "failed", "success", "timeout", "failover", "slow start",
    "slept between win and start",
)  # fmt: skip
"""Rare and less rare branches. A whole session of seeds must reach each of them."""


def reached(cluster: Cluster) -> Counter[str]:
    """How often a history went through each branch."""
    counts = Counter(cluster.counts)
    repeated: set[tuple[str, str, str | None]] = set()
    for entry in cluster.entries:
        if isinstance(entry.answer, ClaimAnswer):
            _count_claim(counts, entry, entry.answer)
        elif entry.op in ("heartbeat", "finish", "release"):
            key = (entry.op, entry.token, entry.status)
            name = "refused" if not entry.answer else "repeated" if key in repeated and not entry.puts else "accepted"
            counts[f"{name} {entry.op}"] += 1
            repeated.add(key)
    for member in cluster.everyone:
        for _, event in member.told:
            counts[event.name] += 1
            if event.reason is not None:
                counts[f"{event.name} {event.reason}"] += 1
        counts["timeout"] += sum(why == "timeout" for _, why in member.signals.values())
    return counts


def _count_claim(counts: Counter[str], entry: invariants.Entry, answer: ClaimAnswer) -> None:
    record = answer.record
    counts["trimmed"] += len(entry.drops)
    counts["doomed"] += len(answer.interrupted)
    if answer.outcome != "won" or record is None:
        counts[answer.outcome] += 1
        counts["clamped"] += any(put.status == "running" for put in entry.puts)
        late_copy = entry.request is not None and entry.request.takeover_of is None
        if answer.outcome == "running" and record is not None and late_copy:
            counts["late copy"] += not record.live(entry.now_ms)
    elif record.started_ms == entry.now_ms and record.lease_end_ms == entry.now_ms + record.lease_ms:
        counts["won"] += 1
        counts[record.reason] += 1
        counts["resumed"] += record.attempt > 1 and record.checkpoint is not None
    else:
        counts["won again"] += 1
