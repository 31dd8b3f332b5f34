"""Calendar: an instance's jobs and which slot of each is waited for. Decisions only; a part of the Planner, and guarded
as it is.

Slots are timed on the store's clock. A job waits for one slot at a time: the next comes when that one was dealt with.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from leaselib import _rules
from leaselib._claims import Claim, JobSpec, JobState, Unfinished
from leaselib._model import ClaimAnswer
from leaselib._random import Chance

COUNT_LIMIT = 1000
"""Missed slots are counted up to this, so that a clock set forward by years costs no more than one by minutes."""


@dataclass(frozen=True, slots=True)
class Missed:
    """What becomes of slots that are later than a claim may be.

    Attributes:
        first_ms: the first of them.
        skipped: how many are not run at all.
        caught: whether the latest is still to be run.
        same: whether that is the slot of the claim that found itself late, which then has more time.
    """

    first_ms: int
    skipped: int
    caught: bool
    same: bool


class Calendar:
    """See the module's text."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self.jobs: dict[str, JobState] = {}
        self._slots: list[tuple[int, int, str, int]] = []  # store_ms, tie, job, armed
        self._tie = 0

    def add(self, spec: JobSpec) -> None:
        """A job that waits for what is unfinished of it to be known."""
        self.jobs[spec.name] = JobState(spec)

    def remove(self, name: str) -> JobState:
        """Forgets a job."""
        job = self.jobs.pop(name)
        job.removed = True
        return job

    def due_store_ms(self) -> int | None:
        """When the next slot's claim is due, or None."""
        return self._slots[0][0] if self._slots else None

    def due(self, store_ms: int) -> list[JobState]:
        """The jobs whose slot's claim is due now; they are `claiming` from here on."""
        found = []
        while self._slots and self._slots[0][0] <= store_ms:
            _, _, name, armed = heapq.heappop(self._slots)
            job = self.jobs.get(name)
            if job is not None and job.armed == armed and job.phase == "waiting":
                job.phase, job.claim = "claiming", Claim(job.spec, job.slot_ms, job.reason)
                found.append(job)
        return found

    def arm(self, job: JobState, earliest_store_ms: int | None = None) -> None:
        """Waits for the job's slot, plus a random delay of up to its jitter."""
        gap_ms = 10_000 if job.following_ms is None else job.following_ms - job.slot_ms
        delay_ms = round(self._chance.uniform(0, job.spec.options.jitter(gap_ms)))
        start_ms = job.slot_ms if earliest_store_ms is None else max(job.slot_ms, earliest_store_ms)
        job.phase, job.claim = "waiting", None
        self._tie += 1
        job.armed = self._tie  # unlike any other's, also of a job of the same name that was removed
        heapq.heappush(self._slots, (start_ms + delay_ms, self._tie, job.spec.name, job.armed))

    def advance(self, job: JobState) -> None:
        """The job's slot is dealt with; on to the next one."""
        job.claim, job.reason = None, "scheduled"
        if job.removed:
            return
        if job.following_ms is None:
            job.phase = "idle"
            return
        job.slot_ms = job.following_ms
        job.following_ms = job.spec.schedule.next_ms(job.slot_ms)
        self.arm(job)

    def begin(
        self, job: JobState, runs: Iterable[Unfinished], now_ms: int
    ) -> tuple[list[Unfinished], Unfinished | None]:
        """What is unfinished of the job is known: its slots begin.

        Returns the runs to watch because their leases are live, and the dead one to take over at once, if it is still
        the latest: one that a newer slot is due after is left alone, for that slot's run replaces it.
        """
        runs, schedule = list(runs), job.spec.schedule
        latest_ms = schedule.latest_ms(now_ms)
        live = [run for run in runs if not run.released and run.lease_end_ms > now_ms]
        newest = max(
            (run for run in runs if run.slot_ms <= _rules.horizon_ms(now_ms)), key=lambda r: r.slot_ms, default=None
        )
        dead = newest if newest is not None and newest not in live else None
        if dead is not None and latest_ms is not None and dead.slot_ms < latest_ms:
            dead = None
        missed = latest_ms is not None and now_ms - latest_ms < job.spec.options.catch_up_ms
        catch_up = missed and all(run.slot_ms != latest_ms for run in runs)
        slot_ms = latest_ms if catch_up else schedule.next_ms(now_ms)
        if slot_ms is None:
            job.phase = "idle"
        else:
            job.slot_ms, job.following_ms = slot_ms, schedule.next_ms(slot_ms)
            job.reason = "catch-up" if catch_up else "scheduled"
            self.arm(job, now_ms)
        return live, dead

    def missed(self, job: JobState, claim: Claim, now_ms: int) -> Missed:
        """The job's slot is later than its claim may be: a pause, an outage, or a clock that was set forward.

        The latest slot is caught up if it is young enough; the others are skipped. Moves the job on, unless the latest
        is the claim's own.
        """
        schedule, options, first_ms = job.spec.schedule, job.spec.options, job.slot_ms
        latest_ms = max(schedule.latest_ms(now_ms) or first_ms, first_ms)
        age_ms = now_ms - latest_ms
        timely = age_ms <= options.max_late_ms
        caught = timely or age_ms < options.catch_up_ms
        count = schedule.count_ms(first_ms, latest_ms, COUNT_LIMIT)
        plan = Missed(first_ms, count - 1 if caught else count, caught, caught and claim.slot_ms == latest_ms)
        job.reason = "scheduled" if timely else "catch-up"
        if plan.same:
            claim.reason = job.reason
            return plan
        job.slot_ms, job.following_ms = latest_ms, schedule.next_ms(latest_ms)
        if caught:
            self.arm(job, now_ms)
        else:
            self.advance(job)
        return plan

    def answered(self, job: JobState, answer: ClaimAnswer) -> None:
        """The store answered the claim of the job's slot: on to the next, or to the same again if it came too early.

        What is waited for then can lie far ahead, if the store's clock was set back while the claim was on its way.
        """
        slot_ms = job.slot_ms
        if answer.outcome == "early":
            self.arm(job)
        else:
            self.advance(job)
        if slot_ms > _rules.horizon_ms(answer.now_ms):
            self._recede(job, answer.now_ms)

    def step_back(self, now_ms: int) -> None:
        """The store's clock was set back: slots that seemed over are to come again; the store knows which ran."""
        for job in self.jobs.values():
            self._recede(job, now_ms)

    def _recede(self, job: JobState, now_ms: int) -> None:
        if job.phase not in ("waiting", "idle"):
            return
        slot_ms = job.spec.schedule.next_ms(now_ms)
        if slot_ms is not None and (job.phase == "idle" or slot_ms < job.slot_ms):
            job.slot_ms, job.following_ms = slot_ms, job.spec.schedule.next_ms(slot_ms)
            job.reason = "scheduled"
            self.arm(job)
