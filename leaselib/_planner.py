"""Planner: one instance's mind. It knows what is due when (slots, claims, retries, checks of watched runs, looks at the
store) and what each answer means. Facts come in with the boot time, effects go out.

Decisions only: no clock, no thread, no I/O, and no chance but the one handed in; a simulation runs this very object.
Guarded by the instance's lock. What happens to one attempt is `_attempt`'s, to watched runs `_backup`'s, to the store
as a whole `_link`'s.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from leaselib import _rules
from leaselib._attempt import Attempt
from leaselib._backup import Backups
from leaselib._claims import Claim, JobSpec, JobState, Orphan, Unfinished, Watch
from leaselib._effects import Begin, Effect, Emit, Load, Ping, ReleaseOrphan, SendClaim, Tell
from leaselib._link import STALE_MS, StoreClock, StoreHealth
from leaselib._model import ClaimAnswer, ClaimRequest, epoch_ms
from leaselib._random import Chance

LOAD_BATCH = 500
COUNT_LIMIT = 1000
WALL_STEP_MS = 200
RELOAD_MS = 30_000
RETRY_FIRST_MS = 50
RETRY_LONGEST_MS = 2_000


@dataclass(frozen=True, slots=True)
class Failure:
    """A store operation that failed, in words. `job` is set if only that job's records are at fault."""

    error: str
    permanent: bool = False
    job: str | None = None


class Planner:
    """See the module's text. `workers` is how many claims and handlers may be under way at once."""

    def __init__(self, runner: str, chance: Chance, workers: int) -> None:
        self.runner, self._chance = runner, chance
        self.clock, self.health = StoreClock(), StoreHealth(chance)
        self.jobs: dict[str, JobState] = {}
        self.attempts: dict[str, Attempt] = {}  # by token
        self.backups = Backups(chance)
        self.free = workers
        self.in_flight = 0
        self.started = self.stopping = False
        self.last_late_ms: int | None = None
        self._ready: deque[Claim] = deque()
        self._slots: list[tuple[int, int, str, int]] = []  # store_ms, tie, job, armed
        self._timers: list[tuple[int, int, Claim | Attempt | JobState]] = []  # boot_ms, tie, what
        self._tie = 0
        self._to_load: list[str] = []
        self._loading = False
        self._pinging = False
        self._orphans: list[Orphan] = []
        self.orphans_out = 0
        self._epoch: str | None = None
        self._not_before_ms: int | None = None
        self._wall_delta_ms: int | None = None
        self._resync = False
        self._job_trouble: dict[str, int] = {}  # boot_ms of the last store_error about one job's records

    # ---- registration -------------------------------------------------------------------------------------------

    def add(self, spec: JobSpec, boot_ms: int) -> list[Effect]:
        """A job was registered, before or after the start."""
        self.jobs[spec.name] = JobState(spec)
        self._to_load.append(spec.name)
        return self._load(boot_ms)

    def remove(self, name: str, boot_ms: int) -> list[Effect]:
        """A job was removed: no claim and no takeover of it from here on; what runs goes on."""
        job = self.jobs.pop(name)
        job.removed = True
        if name in self._to_load:
            self._to_load.remove(name)
        claims = [job.claim] if job.claim is not None else []
        for claim in [*claims, *(_takeover(watch) for watch in self.backups.drop_job(name))]:
            self._cancel(claim, boot_ms)
        return self._release_orphans(boot_ms)

    def start(self, boot_ms: int) -> list[Effect]:
        """The instance starts: first of all, what is unfinished?"""
        self.started = True
        return self._load(boot_ms)

    def stop(self, boot_ms: int) -> list[Effect]:
        """No claim and no takeover from here on; every handler is told to stop."""
        self.stopping = True
        self._ready.clear()
        claims = [job.claim for job in self.jobs.values() if job.claim is not None]
        for claim in [*claims, *(_takeover(watch) for watch in self.backups.drop_all())]:
            self._cancel(claim, boot_ms)
        effects: list[Effect] = []
        for attempt in self.attempts.values():
            effects += attempt.stop()
        return [*effects, *self._flush_orphans()]

    def manual(self, name: str, boot_ms: int) -> tuple[Claim | None, list[Effect]]:
        """A claim by hand, of a slot that is now; None if every worker is busy."""
        spec, slot_ms = self.jobs[name].spec, self.clock.store_ms(boot_ms)
        if slot_ms is None:
            raise RuntimeError("the store's clock must be known before a manual claim")
        if self.free < 1 or self.stopping:
            return None, [self._skip(spec, slot_ms, "busy", boot_ms)]
        claim = Claim(spec, slot_ms, "manual", due_boot_ms=boot_ms)
        return claim, [self._send(claim, boot_ms)]

    # ---- time ---------------------------------------------------------------------------------------------------

    def due_boot_ms(self) -> int | None:
        """When `tick` has something to do, at the latest; None if nothing is planned."""
        due = [self._timers[0][0]] if self._timers else []
        if self.stopping:
            return min(due, default=None)
        slot_ms = self.clock.boot_ms(self._slots[0][0]) if self._slots else None
        check_ms = self.backups.due_boot_ms() if self.health.state != "down" else None
        retry_ms = None if self._pinging else self.health.retry_boot_ms
        due += [at for at in (slot_ms, check_ms, retry_ms) if at is not None]
        return min(due, default=None)

    def tick(self, boot_ms: int, wall_ms: int) -> list[Effect]:
        """Everything that time alone brings. `wall_ms` is only watched for steps."""
        if self.stopping:
            return self._tick_timers(boot_ms)
        effects = self._tick_link(boot_ms, wall_ms)
        effects += self._tick_timers(boot_ms)
        store_ms = self.clock.store_ms(boot_ms)
        while store_ms is not None and self._slots and self._slots[0][0] <= store_ms:
            _, _, name, armed = heapq.heappop(self._slots)
            job = self.jobs.get(name)
            if job is not None and job.armed == armed and job.phase == "waiting":
                effects += self._slot_due(job, store_ms, boot_ms)
        if self.health.state != "down":
            for watch in self.backups.due(boot_ms):
                watch.claim = _takeover(watch)
                self._enqueue(watch.claim)
        return effects + self._dispatch(boot_ms)

    def _tick_link(self, boot_ms: int, wall_ms: int) -> list[Effect]:
        delta_ms, before_ms = wall_ms - boot_ms, self._wall_delta_ms
        self._wall_delta_ms = delta_ms
        self._resync |= before_ms is not None and abs(delta_ms - before_ms) > WALL_STEP_MS
        if not self.started or self._pinging:
            return []
        if self.health.state == "down":
            if self.health.retry_boot_ms is not None and boot_ms >= self.health.retry_boot_ms:
                self.health.trying()
                return [self._ping()]
            return []
        heard_ms = self.clock.sampled_boot_ms
        if heard_ms is not None and (self._resync or boot_ms - heard_ms > STALE_MS):
            return [self._ping()]
        return []

    def _ping(self) -> Ping:
        self._pinging, self._resync = True, False
        leases = [job.spec.options.call_timeout_ms for job in self.jobs.values()] if len(self.jobs) < 100 else []
        return Ping(min(leases, default=3000))

    def _tick_timers(self, boot_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        while self._timers and self._timers[0][0] <= boot_ms:
            what = heapq.heappop(self._timers)[2]
            if isinstance(what, Attempt):
                effects += what.tick(boot_ms)
                self._arm_attempt(what, boot_ms)
            elif isinstance(what, Claim):
                effects += self._claim_timer(what, boot_ms)
            elif not what.removed and what.phase == "loading":
                self._to_load.append(what.spec.name)
                effects += self._load(boot_ms)
        return effects

    def _arm(self, at_boot_ms: int, what: Claim | Attempt | JobState) -> None:
        self._tie += 1
        heapq.heappush(self._timers, (at_boot_ms, self._tie, what))

    def _arm_attempt(self, attempt: Attempt, boot_ms: int) -> None:
        due_ms = attempt.due_boot_ms()
        if due_ms is not None:
            self._arm(max(due_ms, boot_ms + 1), attempt)

    def _arm_slot(self, job: JobState, earliest_store_ms: int | None = None) -> None:
        """Waits for the job's slot, plus a random delay of up to its jitter."""
        gap_ms = 10_000 if job.following_ms is None else job.following_ms - job.slot_ms
        delay_ms = round(self._chance.uniform(0, job.spec.options.jitter(gap_ms)))
        start_ms = job.slot_ms if earliest_store_ms is None else max(job.slot_ms, earliest_store_ms)
        job.phase, job.claim = "waiting", None
        job.armed += 1
        self._tie += 1
        heapq.heappush(self._slots, (start_ms + delay_ms, self._tie, job.spec.name, job.armed))

    # ---- slots --------------------------------------------------------------------------------------------------

    def _slot_due(self, job: JobState, store_ms: int, boot_ms: int) -> list[Effect]:
        claim = Claim(job.spec, job.slot_ms, job.reason)
        job.phase, job.claim = "claiming", claim
        if store_ms - job.slot_ms > claim.max_late_ms:
            return self._missed(job, claim, boot_ms)
        self._enqueue(claim)
        return []

    def _enqueue(self, claim: Claim) -> None:
        """Waits for a free worker, until the claim is too late."""
        self._ready.append(claim)
        claim.queued = True
        if self.free < len(self._ready) and claim.watch is None:
            late_ms = self.clock.boot_ms(claim.slot_ms + claim.max_late_ms + 1)
            if late_ms is not None:
                self._arm(late_ms, claim)

    def _dispatch(self, boot_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        while self._ready and self.free > 0 and not self.stopping:
            if self.health.state == "down" or (self.health.state == "trial" and self.in_flight):
                break
            claim = self._ready.popleft()
            claim.queued = False
            if not claim.cancelled:
                effects.append(self._send(claim, boot_ms))
        return effects

    def _send(self, claim: Claim, boot_ms: int) -> SendClaim:
        self.free -= 1
        self.in_flight += 1
        claim.in_flight = True
        claim.due_boot_ms = boot_ms
        return SendClaim(claim)

    def _claim_timer(self, claim: Claim, boot_ms: int) -> list[Effect]:
        """A claim that waits: for its next try, or until it is too late for it."""
        job = self.jobs.get(claim.spec.name)
        if claim.cancelled or claim.in_flight or job is None or job.claim is not claim:
            return []
        if not claim.queued:
            self._enqueue(claim)
            return []
        store_ms = self.clock.store_ms(boot_ms)
        if self.health.state != "up" or store_ms is None or store_ms - claim.slot_ms <= claim.max_late_ms:
            return []  # an outage: what it made late is dealt with when the store is back
        if claim.tries:
            return self._missed(job, claim, boot_ms)
        self._cancel(claim, boot_ms)
        effects: list[Effect] = [self._skip(claim.spec, claim.slot_ms, "busy", boot_ms)]
        return [*effects, *self._release_orphans(boot_ms), *self._advance(job, boot_ms)]

    def _advance(self, job: JobState, boot_ms: int) -> list[Effect]:
        """The job's slot is dealt with; on to the next one."""
        job.claim, job.reason = None, "scheduled"
        if job.removed:
            return []
        if job.following_ms is None:
            job.phase = "idle"
            return []
        job.slot_ms = job.following_ms
        job.following_ms = job.spec.schedule.next_ms(job.slot_ms)
        self._arm_slot(job)
        return []

    def _missed(self, job: JobState, claim: Claim, boot_ms: int) -> list[Effect]:
        """The slot is later than its claim may be: a pause, an outage, or a clock that was set forward.

        The latest slot is caught up if it is young enough; the others are one skip.
        """
        store_ms = self.clock.store_ms(boot_ms) or 0
        schedule, options, first_ms = job.spec.schedule, job.spec.options, job.slot_ms
        latest_ms = max(schedule.latest_ms(store_ms) or first_ms, first_ms)
        age_ms = store_ms - latest_ms
        timely = age_ms <= options.max_late_ms
        caught = timely or age_ms < options.catch_up_ms
        skipped = schedule.count_ms(first_ms, latest_ms, COUNT_LIMIT) - (1 if caught else 0)
        effects: list[Effect] = []
        if skipped > 0:
            effects.append(self._skip(job.spec, first_ms, "missed", boot_ms, count=skipped))
        if not (caught and claim.slot_ms == latest_ms):
            self._cancel(claim, boot_ms)
            effects += self._release_orphans(boot_ms)
        if not caught:
            job.following_ms = schedule.next_ms(latest_ms)
            return effects + self._advance(job, boot_ms)
        job.reason = "scheduled" if timely else "catch-up"
        if claim.slot_ms == latest_ms:  # the same claim, with more time: it may have been won already
            claim.reason = job.reason
            if not claim.queued:
                self._enqueue(claim)
            return effects
        job.slot_ms, job.following_ms = latest_ms, schedule.next_ms(latest_ms)
        self._arm_slot(job, store_ms)
        return effects

    def _step_back(self, boot_ms: int) -> None:
        """The store's clock was set back: slots that seemed over are to come again; the store knows which ran."""
        store_ms = self.clock.store_ms(boot_ms) or 0
        for job in self.jobs.values():
            if job.phase in ("waiting", "idle"):
                slot_ms = job.spec.schedule.next_ms(store_ms)
                if slot_ms is not None and (job.phase == "idle" or slot_ms < job.slot_ms):
                    job.slot_ms, job.following_ms = slot_ms, job.spec.schedule.next_ms(slot_ms)
                    job.reason = "scheduled"
                    self._arm_slot(job)

    # ---- claims -------------------------------------------------------------------------------------------------

    def before_send(self, claim: Claim, boot_ms: int) -> tuple[ClaimRequest | None, list[Effect]]:
        """Right before a claim is sent: is it still wanted, and still in time? The process may have been frozen."""
        if claim.cancelled or self.stopping:
            self._unsent(claim)
            told: list[Effect] = [Tell(claim, "busy")] if claim.reason == "manual" else []
            return None, [*told, *self._dispatch(boot_ms)]
        watch = claim.watch
        if watch is not None:
            if boot_ms - claim.due_boot_ms > watch.spec.options.heartbeat_ms:
                self._unsent(claim)
                self.backups.arm(watch, boot_ms)  # it slept: runners that slept too renew first
                return None, self._dispatch(boot_ms)
            watch.token = watch.token or self._chance.token()
            claim.token = watch.token
        elif claim.reason != "manual":
            job, store_ms = self.jobs[claim.spec.name], self.clock.store_ms(boot_ms) or 0
            if store_ms - claim.slot_ms > claim.max_late_ms:
                self._unsent(claim)
                return None, [*self._missed(job, claim, boot_ms), *self._dispatch(boot_ms)]
            if self._not_before_ms is not None and claim.slot_ms < self._not_before_ms:
                self._unsent(claim)
                skip = self._skip(claim.spec, claim.slot_ms, "missed", boot_ms, error="older than the store's data")
                return None, [skip, *self._advance(job, boot_ms), *self._dispatch(boot_ms)]
        claim.token = claim.token or self._chance.token()
        claim.sent_boot_ms = boot_ms
        claim.tries += 1
        return claim.request(self.runner), []

    def _unsent(self, claim: Claim) -> None:
        self.free += 1
        self.in_flight -= 1
        claim.in_flight = False
        if claim.watch is not None:
            claim.watch.claim = None

    def claim_failed(self, claim: Claim, failure: Failure, boot_ms: int) -> list[Effect]:
        """A claim's fate is unknown (or the store refuses to work): it will be sent again, with the same token."""
        self._unsent(claim)
        claim.unknown = True
        effects = self.store_failed(failure, boot_ms, write=True, slot_ms=claim.slot_ms)
        watch, job = claim.watch, self.jobs.get(claim.spec.name)
        if claim.reason == "manual":
            effects.append(Tell(claim, "unknown", failure.error))
        if claim.reason == "manual" or claim.cancelled or self.stopping:
            self._cancel(claim, boot_ms)
            effects += self._flush_orphans() if self.stopping else self._release_orphans(boot_ms)
        elif watch is not None and failure.job is not None:
            self.backups.drop(watch.spec.name, watch.slot_ms)
        elif watch is not None:
            watch.unknown = True
            self.backups.arm(watch, boot_ms)
        elif job is not None and failure.job is not None:
            self._cancel(claim, boot_ms)
            effects += [*self._release_orphans(boot_ms), *self._advance(job, boot_ms)]
        else:
            longest_ms = min(RETRY_LONGEST_MS, RETRY_FIRST_MS * 2 ** min(claim.tries, 10))
            self._arm(boot_ms + max(1, round(longest_ms * self._chance.uniform(0.5, 1.0))), claim)
        return effects + self._dispatch(boot_ms)

    def claim_answered(self, claim: Claim, answer: ClaimAnswer, boot_ms: int) -> list[Effect]:
        """The store answered a claim; `boot_ms` is when the answer was there."""
        self.in_flight -= 1
        claim.in_flight = claim.unknown = False
        if claim.watch is not None:
            claim.watch.claim, claim.watch.unknown = None, False
        effects = self._heard(claim.sent_boot_ms, boot_ms, answer.now_ms, answer.epoch)
        effects += self.store_answered(boot_ms)
        if claim.reason == "manual":
            effects.append(Tell(claim, answer.outcome))
        elif claim.watch is None:
            self.last_late_ms = answer.now_ms - claim.slot_ms
        for slot_ms in answer.interrupted:
            effects.append(self._emit("interrupted", boot_ms, claim.spec, slot_ms, reason="superseded"))
        if answer.outcome == "won" and answer.record is not None:
            effects += self._won(claim, answer, boot_ms)
        else:
            self.free += 1
            effects += self._refused(claim, answer, boot_ms)
        job = self.jobs.get(claim.spec.name)
        if job is not None and job.claim is claim and answer.outcome != "early":
            effects += self._advance(job, boot_ms)
        return effects + self._dispatch(boot_ms)

    def _won(self, claim: Claim, answer: ClaimAnswer, boot_ms: int) -> list[Effect]:
        assert answer.record is not None
        self.backups.drop(claim.spec.name, claim.slot_ms)
        attempt = Attempt(claim.spec, answer.record, self.clock, self._chance, claim.sent_boot_ms)
        self.attempts[answer.record.token] = attempt
        self._arm_attempt(attempt, boot_ms)
        stale = self._not_before_ms is not None and claim.slot_ms < self._not_before_ms and answer.record.attempt == 1
        effects: list[Effect] = []
        if self.stopping or claim.cancelled:
            effects += attempt.stop()
        elif stale:  # the store lost its data: this slot may have run before
            effects += attempt.stop()
            skip = self._skip(claim.spec, claim.slot_ms, "missed", boot_ms, error="older than the store's data")
            effects.append(skip)
        return [*effects, Begin(attempt)]

    def _refused(self, claim: Claim, answer: ClaimAnswer, boot_ms: int) -> list[Effect]:
        spec, slot_ms, record, watch = claim.spec, claim.slot_ms, answer.record, claim.watch
        if claim.cancelled or self.stopping:
            return []
        outcome = answer.outcome
        if outcome == "running" and record is not None:
            if record.token not in self.attempts:
                self.backups.watch(spec, slot_ms, record.attempt, boot_ms)
        elif outcome == "overlap" and record is not None:
            return self._overlap(claim, answer, boot_ms)
        elif outcome == "early":
            job = self.jobs.get(spec.name)
            if job is not None and job.claim is claim:
                self._arm_slot(job)
        elif outcome == "gone":
            self.backups.gone(spec.name, slot_ms, None if record is None else record.attempt, boot_ms)
        else:  # finished, interrupted, superseded, late
            self.backups.drop(spec.name, slot_ms)
            if outcome == "interrupted" and record is not None:
                event = self._emit("interrupted", boot_ms, spec, slot_ms, reason=record.error, attempt=record.attempt)
                return [event]
            if outcome in ("superseded", "late") and watch is None:
                return [self._skip(spec, slot_ms, outcome, boot_ms)]
        return []

    def _overlap(self, claim: Claim, answer: ClaimAnswer, boot_ms: int) -> list[Effect]:
        """Refused for a live run of the job: watch that one, and look at the refused slot again for a while."""
        record, spec = answer.record, claim.spec
        assert record is not None
        if record.token not in self.attempts:
            self.backups.watch(spec, record.slot_ms, record.attempt, boot_ms)
        if claim.watch is not None:
            self.backups.arm(claim.watch, boot_ms)
            return []
        jitter_ms = spec.options.jitter_ms if spec.options.jitter_ms is not None else 1000
        window_ms = max(0, claim.slot_ms + jitter_ms - answer.now_ms)
        until_ms = boot_ms + window_ms + 2 * spec.options.heartbeat_ms
        self.backups.watch(spec, claim.slot_ms, 1, boot_ms, until_boot_ms=until_ms)
        in_the_way = f"run {record.slot_ms} of the job is alive (attempt {record.attempt}, runner {record.runner})"
        return [self._skip(spec, claim.slot_ms, "overlap", boot_ms, error=in_the_way)]

    def attempt_over(self, attempt: Attempt, boot_ms: int) -> list[Effect]:
        """A worker is done with an attempt. If it ended without a success or failure, somebody has to watch the run."""
        self.attempts.pop(attempt.record.token, None)
        self.free += 1
        job = self.jobs.get(attempt.spec.name)
        stale = self._not_before_ms is not None and attempt.record.slot_ms < self._not_before_ms
        if not (self.stopping or attempt.recorded or stale) and job is not None and job.spec is attempt.spec:
            self.backups.watch(attempt.spec, attempt.record.slot_ms, attempt.record.attempt, boot_ms)
        return self._dispatch(boot_ms)

    # ---- claims that were given up ------------------------------------------------------------------------------

    def _cancel(self, claim: Claim, boot_ms: int) -> None:
        """Gives a claim up; if it may have been won without our knowing, its token is released."""
        claim.cancelled = True
        if claim.unknown and claim.token is not None and not claim.in_flight:
            claim.unknown = False
            options = claim.spec.options
            until_ms = boot_ms + options.lease_ms + options.call_timeout_ms
            self._orphans.append(
                Orphan(claim.spec.name, claim.slot_ms, claim.token, until_ms, options.call_timeout_ms)
            )

    def _release_orphans(self, boot_ms: int) -> list[Effect]:
        self._orphans = [o for o in self._orphans if o.until_boot_ms > boot_ms]
        return [] if self.health.state == "down" else self._flush_orphans()

    def _flush_orphans(self) -> list[Effect]:
        effects: list[Effect] = [ReleaseOrphan(orphan) for orphan in self._orphans]
        self.orphans_out += len(effects)
        self._orphans.clear()
        return effects

    def orphan_answered(self, boot_ms: int) -> list[Effect]:
        """Released, or not ours: either way nobody waits for that token any more."""
        self.orphans_out -= 1
        return self.store_answered(boot_ms)

    def orphan_failed(self, orphan: Orphan, failure: Failure, boot_ms: int) -> list[Effect]:
        """To be released again once the store is back, until the lease must be over anyway."""
        self.orphans_out -= 1
        if not self.stopping:
            self._orphans.append(orphan)
        return self.store_failed(failure, boot_ms, write=True)

    # ---- the store as a whole -----------------------------------------------------------------------------------

    def _load(self, boot_ms: int) -> list[Effect]:
        if not self.started or self.stopping or self._loading or not self._to_load or self.health.state == "down":
            return []
        names, self._to_load = self._to_load[:LOAD_BATCH], self._to_load[LOAD_BATCH:]
        self._loading = True
        return [Load(tuple(names), 5000)]

    def loaded(
        self, names: Iterable[str], runs: Iterable[Unfinished], sent_ms: int, boot_ms: int, now_ms: int, epoch: str
    ) -> list[Effect]:
        """What is unfinished of these jobs is known: their slots begin (section "Start" of the rules)."""
        self._loading = False
        effects = [*self._heard(sent_ms, boot_ms, now_ms, epoch), *self._reached(boot_ms)]
        by_job: dict[str, list[Unfinished]] = {}
        for run in runs:
            by_job.setdefault(run.job, []).append(run)
        for name in names:
            job = self.jobs.get(name)
            if job is not None and job.phase == "loading":
                self._begin(job, by_job.get(name, []), boot_ms)
        return [*effects, *self._load(boot_ms), *self._dispatch(boot_ms)]

    def _begin(self, job: JobState, runs: list[Unfinished], boot_ms: int) -> None:
        spec, now_ms = job.spec, self.clock.store_ms(boot_ms) or 0
        latest_ms = spec.schedule.latest_ms(now_ms)
        newest_ms = max((run.slot_ms for run in runs if run.slot_ms <= _rules.horizon_ms(now_ms)), default=None)
        for run in runs:
            if not run.released and run.lease_end_ms > now_ms:
                self.backups.watch(spec, run.slot_ms, run.attempt, boot_ms)
            elif run.slot_ms == newest_ms and (latest_ms is None or run.slot_ms >= latest_ms):
                delay_ms = round(self._chance.uniform(0, spec.options.jitter(10_000)))
                self.backups.watch(spec, run.slot_ms, run.attempt, boot_ms, first_check_boot_ms=boot_ms + delay_ms)
        catch_up = (
            latest_ms is not None
            and now_ms - latest_ms < spec.options.catch_up_ms
            and all(run.slot_ms != latest_ms for run in runs)
        )
        slot_ms = latest_ms if catch_up else spec.schedule.next_ms(now_ms)
        if slot_ms is None:
            job.phase = "idle"
            return
        job.slot_ms, job.following_ms = slot_ms, spec.schedule.next_ms(slot_ms)
        job.reason = "catch-up" if catch_up else "scheduled"
        self._arm_slot(job, now_ms)

    def load_failed(self, names: Iterable[str], failure: Failure, boot_ms: int) -> list[Effect]:
        """Tried again when the store is back; a job whose records are malformed alone, later than the others."""
        self._loading = False
        for name in names:
            job = self.jobs.get(name)
            if name == failure.job and job is not None:
                self._arm(boot_ms + RELOAD_MS, job)
            elif job is not None:
                self._to_load.append(name)
        return [*self.store_failed(failure, boot_ms, write=False), *self._load(boot_ms)]

    def ponged(self, sent_ms: int, boot_ms: int, now_ms: int, epoch: str) -> list[Effect]:
        """The store answered a ping."""
        self._pinging = False
        return [*self._heard(sent_ms, boot_ms, now_ms, epoch), *self._reached(boot_ms)]

    def ping_failed(self, failure: Failure, boot_ms: int) -> list[Effect]:
        """The store didn't answer a ping."""
        self._pinging = False
        return self.store_failed(failure, boot_ms, write=False)

    def _heard(self, sent_ms: int, boot_ms: int, now_ms: int, epoch: str) -> list[Effect]:
        stepped_ms = self.clock.add(sent_ms, boot_ms, now_ms)
        if stepped_ms < 0:
            self._step_back(boot_ms)
        if epoch == self._epoch:
            return []
        known, self._epoch = self._epoch, epoch
        if known is None:
            return []
        self._not_before_ms = epoch_ms(epoch)
        error = "the store is not the one it was: it was emptied, replaced, or restored. Slots older than it are not run"
        return [self._emit("store_error", boot_ms, reason="reset", error=error)]

    def _reached(self, boot_ms: int) -> list[Effect]:
        """The store answered a read: runners send what is overdue now, backups hold back for a heartbeat or two."""
        if self.health.state != "down":
            return self._load(boot_ms)
        over = self.health.answered_ping()
        return self._back(boot_ms, over)

    def store_answered(self, boot_ms: int) -> list[Effect]:
        """The store carried out a claim, a heartbeat, a finish or a release."""
        if self.health.state == "up":
            return []
        was_down = self.health.state == "down"
        self.health.answered_write()
        if was_down:
            return self._back(boot_ms, True)
        return [self._emit("store_ok", boot_ms), *self._dispatch(boot_ms)]

    def _back(self, boot_ms: int, over: bool) -> list[Effect]:
        effects: list[Effect] = [self._emit("store_ok", boot_ms)] if over else []
        for attempt in self.attempts.values():
            effects += attempt.store_back(boot_ms)
        self.backups.arm_all(boot_ms)
        effects += [*self._release_orphans(boot_ms), *self._load(boot_ms)]
        return effects + self._dispatch(boot_ms)

    def store_failed(
        self, failure: Failure, boot_ms: int, *, write: bool, slot_ms: int | None = None
    ) -> list[Effect]:
        """An operation failed. One `store_error` when trouble starts; a malformed record is its own job's alone."""
        if failure.job is not None:
            told_ms = self._job_trouble.get(failure.job)
            if told_ms is not None and boot_ms - told_ms < RELOAD_MS:
                return []
            self._job_trouble[failure.job] = boot_ms
            event = self._emit("store_error", boot_ms, reason="malformed", error=failure.error)
            return [_of_job(event, failure.job, slot_ms)]
        was, began = self.health.state, self.health.failed(
            boot_ms, failure.error, permanent=failure.permanent, write=write
        )
        if was != "down":  # checks that wait for a worker are held back as well; `_back` arms them anew
            for claim in self._ready:
                if claim.watch is not None:
                    claim.watch.claim = None
            self._ready = deque(claim for claim in self._ready if claim.watch is None)
        if not began:
            return []
        reason = "permanent" if failure.permanent else "unreachable"
        return [self._emit("store_error", boot_ms, reason=reason, error=failure.error)]

    # ---- events -------------------------------------------------------------------------------------------------

    def _emit(
        self,
        name: str,
        boot_ms: int,
        spec: JobSpec | None = None,
        slot_ms: int | None = None,
        *,
        reason: str | None = None,
        error: str | None = None,
        attempt: int | None = None,
        count: int | None = None,
    ) -> Emit:
        job = None if spec is None else spec.name
        at_ms = self.clock.store_ms(boot_ms)
        return Emit(name, at_ms, job, slot_ms, attempt, reason=reason, error=error, count=count)

    def _skip(
        self, spec: JobSpec, slot_ms: int, reason: str, boot_ms: int, *, error: str | None = None, count: int = 1
    ) -> Emit:
        return self._emit("skip", boot_ms, spec, slot_ms, reason=reason, error=error, count=count)


def _takeover(watch: Watch) -> Claim:
    """The claim that checks a watched run, or the one under way."""
    return watch.claim or Claim(watch.spec, watch.slot_ms, "takeover", watch, watch.token, watch.unknown)


def _of_job(event: Emit, job: str, slot_ms: int | None) -> Emit:
    return Emit(event.name, event.at_ms, job, slot_ms, reason=event.reason, error=event.error)
