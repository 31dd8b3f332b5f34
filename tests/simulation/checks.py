"""What must hold of a simulated history. Pure.

Decisions and facts are judged by `history.check`, as those of real processes are. What only a look into the decision
objects tells, or the plan, is judged here, in the terms of `history.INVARIANTS`; and beside those:

- S15, S25 while the cluster runs: no handler starts when its lease isn't to be trusted any more; no claim is sent by an
  instance that was told to stop.
- S18 A handler whose run was refused is told.
- L1, L2 (with L3, L5: taken over, handed over, ended) from `settled_ms` on.
- L9 Nobody watches a run for long after its end.
- L12 After the end nothing is left: no attempt, no call under way, every worker free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import history
from harness import START_MS
from history import liveness
from history.processes import LAST

from leaselib._model import ClaimAnswer, Record

from .cluster import Cluster, Member, member_of, slots
from .plan import Plan

Problem = tuple[str, str]
EPSILON_MS = 300
"""Beside two heartbeats a takeover may take the time of a check's request and answer."""


def run(plan: Plan) -> tuple[Cluster, list[Problem]]:
    """Carries a plan out and judges it. Problems are (invariant, text), at most a few of each."""
    cluster = Cluster(plan).carry_out()
    problems = [*coverage(cluster), *dead_runs(cluster), *watches(cluster)]
    cluster.shut_down()
    problems += [(violation.id, str(violation)) for violation in history.check(cluster.history())]
    problems += cluster.problems
    problems += [*untold(cluster), *left_over(cluster)]
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
    due: list[tuple[str, int]] = []
    for job in plan.jobs:
        first_ms = START_MS + plan.settled_ms + cluster.store_offset_ms
        last_ms = cluster.store_ms - round(job.options["jitter"] * 1000) - 2_000
        if any(member.planner.free < 1 for member in cluster.living()):
            last_ms -= round(job.options["max_late"] * 1000)  # until then a claim waits for a free worker
        due += [(job.name, slot_ms) for slot_ms in slots(job, first_ms, last_ms)]
    yield from ((violation.id, violation.text) for violation in liveness.coverage(due, dealt))


def dead_runs(cluster: Cluster) -> Iterator[Problem]:
    """L2, L3, L5, of the runs that died or were released in the calm time."""
    offset_ms, plan = cluster.store_offset_ms, cluster.plan
    allowed_ms = {job.name: round(2_000 * job.options["heartbeat"]) + EPSILON_MS for job in plan.jobs}
    since_ms, told = START_MS + plan.settled_ms + offset_ms, _told_of(cluster)

    def late(record: Record, over_ms: int, decided_ms: int) -> bool:
        within_ms = allowed_ms[record.job]
        return (
            over_ms >= since_ms
            and decided_ms > over_ms + within_ms
            and any(
                member.could_take_over(max(over_ms, first_ms) - offset_ms, decided_ms - offset_ms, within_ms)
                for member, first_ms in told.get((record.job, record.slot_ms), ())
            )
        )

    over: dict[tuple[str, int], tuple[Record, int]] = {}
    for index, entry in enumerate(cluster.entries):
        if entry.op == "loss":
            over = {}
        for record in entry.puts:
            key = (record.job, record.slot_ms)
            before = over.pop(key, None)
            if before is not None and index >= cluster.settled_index and late(*before, entry.now_ms):
                yield "L2", f"{before[0]} was over at {before[1]}, and next decided at {entry.now_ms}"
            if record.status == "running":
                over[key] = (record, entry.now_ms if record.released else record.lease_end_ms)
    for record, over_ms in over.values():
        if late(record, over_ms, cluster.store_ms):
            yield "L2", f"{record} was over at {over_ms}, and not decided by {cluster.store_ms}"


def _told_of(cluster: Cluster) -> dict[tuple[str, int], list[tuple[Member, int]]]:
    """Who was told by the store that a run is alive elsewhere (its own answer, or the run in the way), so watches it;
    and when first, on the store's clock.
    """
    members = {member.name: member for member in cluster.everyone}
    found: dict[tuple[str, int], dict[str, int]] = {}
    for entry in cluster.entries:
        answer = entry.answer
        if isinstance(answer, ClaimAnswer) and answer.outcome in ("running", "overlap") and answer.record is not None:
            told = member_of(entry.token)
            if member_of(answer.record.token) != told:  # else it is its own
                found.setdefault((entry.job, answer.record.slot_ms), {}).setdefault(told, entry.now_ms)
    return {key: [(members[name], ms) for name, ms in of.items()] for key, of in found.items()}


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


def untold(cluster: Cluster) -> Iterator[Problem]:
    """S18, the runner's side of it."""
    for member in cluster.everyone:
        ended = Counter(event.token for _, event in member.told if event.name in LAST)
        for _, event in member.told:
            refused = event.name == "lost" and event.reason == "refused" and event.token in cluster.handlers
            if refused and event.token not in member.signals and event.duration_ms is None and ended[event.token] == 1:
                yield "S18", f"{event.token} on {member.name} was refused, and its handler not told"


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


def _count_claim(counts: Counter[str], entry: history.Entry, answer: ClaimAnswer) -> None:
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
