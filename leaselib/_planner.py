"""Planner: one instance's mind. It knows what is due when (slots, claims, retries, checks of watched runs, looks at the
store) and what each answer means. Facts come in with the boot time, effects go out.

Decisions only: no clock, no thread, no I/O, and no chance but the one handed in; a simulation runs this very object.
Guarded by the instance's lock. What happens to one attempt is `_attempt`'s, which slots come `_calendar`'s, which runs
are watched `_backup`'s, whether the store can be reached `_link`'s.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Literal

from leaselib._attempt import Attempt, Word
from leaselib._backup import Backups
from leaselib._calendar import Calendar
from leaselib._claims import Claim, Failure, JobSpec, JobState, Orphan, Unfinished
from leaselib._effects import Begin, Effect, Load, Ping, SendClaim, Tell
from leaselib._link import LOAD_AGAIN_MS, Epochs, Kind, Link, Loads, Trouble
from leaselib._model import ClaimAnswer, ClaimRequest, Record, from_ms
from leaselib._orphans import Orphans
from leaselib._random import Chance
from leaselib._reports import OLDER_THAN_DATA, Reports

LOAD_TIMEOUT_MS = 5_000
MANUAL_AHEAD_MS = 500
PING_TIMEOUT_MS = 3_000


class Planner:
    """See the module's text. `workers` is how many claims and handlers may be under way at once."""

    def __init__(self, runner: str, chance: Chance, workers: int) -> None:
        self.runner, self._chance = runner, chance
        self.link = Link(chance)
        self.clock, self.health = self.link.clock, self.link.health
        self._reports = Reports(self.clock)
        self.calendar = Calendar(chance)
        self.attempts: dict[str, Attempt] = {}  # by token
        self.backups = Backups(chance)
        self.free, self.in_flight = workers, 0
        self.started = self.stopping = False
        self.last_late_ms: int | None = None
        self._ready: deque[Claim] = deque()
        self._timers: list[tuple[int, int, Claim | Attempt | JobState]] = []  # boot_ms, tie, what
        self._tie = 0
        self._loads, self.orphans = Loads(), Orphans()

    # ---- registration -------------------------------------------------------------------------------------------

    def add(self, spec: JobSpec) -> list[Effect]:
        """A job was registered, before or after the start."""
        self.calendar.add(spec)
        self._loads.add(spec.name)
        return self._load()

    def remove(self, name: str, boot_ms: int) -> list[Effect]:
        """A job was removed: no claim and no takeover of it from here on; what runs goes on."""
        job = self.calendar.remove(name)
        self.link.jobs.removed(name)
        claims = [job.claim] if job.claim is not None else []
        for claim in [*claims, *(watch.check() for watch in self.backups.drop_job(name))]:
            self.orphans.give_up(claim, boot_ms)
        return self._release_orphans(boot_ms)

    def start(self) -> list[Effect]:
        """The instance starts: first of all, what is unfinished?"""
        self.started = True
        return self._load()

    def stop(self, boot_ms: int) -> list[Effect]:
        """No claim and no takeover from here on; every handler is told to stop."""
        self.stopping = True
        self._ready.clear()
        claims = [job.claim for job in self.calendar.jobs.values() if job.claim is not None]
        for claim in [*claims, *(watch.check() for watch in self.backups.drop_all())]:
            self.orphans.give_up(claim, boot_ms)
        effects: list[Effect] = []
        for attempt in self.attempts.values():
            effects += attempt.stop()
        return [*effects, *self.orphans.release(boot_ms)]

    def manual(self, name: str, boot_ms: int) -> tuple[Claim | None, list[Effect]]:
        """A claim by hand, of a slot that is now; None if every worker is busy."""
        spec, slot_ms = self.calendar.jobs[name].spec, self.clock.store_ms(boot_ms)
        if slot_ms is None:
            raise RuntimeError("the store's clock must be known before a manual claim")
        if self.free < 1 or self.stopping:
            return None, [self._reports.skip(spec, slot_ms, "busy", boot_ms)]
        job = self.calendar.jobs[name]
        if job.manual_ms is not None and slot_ms <= job.manual_ms < slot_ms + MANUAL_AHEAD_MS:
            slot_ms = job.manual_ms + 1  # two in a millisecond, or the clock's estimate has just receded by one
        job.manual_ms = slot_ms
        claim = Claim(spec, slot_ms, "manual", due_boot_ms=boot_ms)
        return claim, [self._send(claim, boot_ms)]

    # ---- time ---------------------------------------------------------------------------------------------------

    def due_boot_ms(self) -> int | None:
        """When `tick` has something to do, at the latest; None if nothing is planned."""
        earliest_ms = self._timers[0][0] if self._timers else None
        if self.stopping:
            return earliest_ms
        slot_store_ms = self.calendar.due_store_ms()
        slot_ms = None if slot_store_ms is None else self.clock.boot_ms(slot_store_ms)
        check_ms = self.backups.due_boot_ms() if self.health.state != "down" else None
        for at_ms in (slot_ms, check_ms, self.link.due_boot_ms()):
            if at_ms is not None and (earliest_ms is None or at_ms < earliest_ms):
                earliest_ms = at_ms
        return earliest_ms

    def tick(self, boot_ms: int, wall_ms: int) -> list[Effect]:
        """Everything that time alone brings. `wall_ms` is only watched for steps."""
        if self.stopping:
            return self._tick_timers(boot_ms)
        effects: list[Effect] = [self._ping()] if self.started and self.link.ping_due(boot_ms, wall_ms) else []
        effects += self._tick_timers(boot_ms)
        store_ms = self.clock.store_ms(boot_ms)
        if store_ms is not None:
            for job in self.calendar.due(store_ms):
                effects += self._slot_due(job, store_ms, boot_ms)
        if self.health.state != "down":
            for watch in self.backups.due(boot_ms):
                watch.claim = watch.check()
                self._enqueue(watch.claim)
        return effects + self._dispatch(boot_ms)

    def _ping(self) -> Ping:
        timeouts = [job.spec.options.call_timeout_ms for job in self.calendar.jobs.values()]
        return Ping(min(PING_TIMEOUT_MS, *timeouts) if timeouts else PING_TIMEOUT_MS)

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
                self._loads.add(what.spec.name)
                effects += self._load()
        return effects

    def _arm(self, at_boot_ms: int, what: Claim | Attempt | JobState) -> None:
        self._tie += 1
        heapq.heappush(self._timers, (at_boot_ms, self._tie, what))

    def _arm_attempt(self, attempt: Attempt, boot_ms: int) -> None:
        due_ms = attempt.due_boot_ms()
        if due_ms is not None:
            self._arm(max(due_ms, boot_ms + 1), attempt)

    # ---- slots --------------------------------------------------------------------------------------------------

    def _slot_due(self, job: JobState, store_ms: int, boot_ms: int) -> list[Effect]:
        claim = job.claim
        if claim is None:
            return []
        if store_ms - job.slot_ms > claim.max_late_ms:
            return self._missed(job, claim, boot_ms)
        self._enqueue(claim)
        return []

    def _enqueue(self, claim: Claim) -> None:
        """Waits for a free worker, until the claim is too late."""
        self._ready.append(claim)
        claim.queued = True
        if self.free < len(self._ready) and claim.watch is None:
            self._arm_late(claim)

    def _arm_late(self, claim: Claim) -> None:
        """Looks again when the claim is too late, as the store's clock is known now."""
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
        job = self.calendar.jobs.get(claim.spec.name)
        if claim.cancelled or claim.in_flight or job is None or job.claim is not claim:
            return []
        if not claim.queued:
            self._enqueue(claim)
            return []
        store_ms = self.clock.store_ms(boot_ms)
        if self.health.state != "up" or store_ms is None:
            return []  # an outage: what it made late is dealt with when the store is back
        if store_ms - claim.slot_ms <= claim.max_late_ms:  # the clock was set back, or is known better by now
            self._arm_late(claim)
            return []
        if claim.tries:
            return self._missed(job, claim, boot_ms)
        self.orphans.give_up(claim, boot_ms)
        self.calendar.advance(job)
        return [self._reports.skip(claim.spec, claim.slot_ms, "busy", boot_ms), *self._release_orphans(boot_ms)]

    def _missed(self, job: JobState, claim: Claim, boot_ms: int) -> list[Effect]:
        plan = self.calendar.missed(job, claim, self.clock.store_ms(boot_ms) or 0)
        effects: list[Effect] = []
        if plan.skipped:
            effects.append(self._reports.skip(job.spec, plan.first_ms, "missed", boot_ms, count=plan.skipped))
        if plan.same:  # the same claim, with more time: it may have been won already
            if not claim.queued:
                self._enqueue(claim)
            return effects
        self.orphans.give_up(claim, boot_ms)
        return [*effects, *self._release_orphans(boot_ms)]

    # ---- claims -------------------------------------------------------------------------------------------------

    def before_send(self, claim: Claim, boot_ms: int) -> tuple[ClaimRequest | None, list[Effect]]:
        """Right before a claim is sent: is it still wanted, and still in time? The process may have been frozen."""
        if claim.cancelled or self.stopping:
            self._unsent(claim)
            self.orphans.give_up(claim, boot_ms)
            told: list[Effect] = [Tell(claim, "busy")] if claim.reason == "manual" else []
            return None, [*told, *self._release_orphans(boot_ms), *self._dispatch(boot_ms)]
        watch = claim.watch
        if watch is not None:
            if self.backups.hold_back(watch, claim.due_boot_ms, boot_ms):
                self._unsent(claim)
                self.backups.arm(watch, boot_ms)
                return None, self._dispatch(boot_ms)
            watch.held_back = False
            watch.token = watch.token or self._chance.token()
            claim.token = watch.token
        elif claim.reason != "manual":
            job, store_ms = self.calendar.jobs[claim.spec.name], self.clock.store_ms(boot_ms) or 0
            if store_ms - claim.slot_ms > claim.max_late_ms:
                self._unsent(claim)
                return None, [*self._missed(job, claim, boot_ms), *self._dispatch(boot_ms)]
            if self.link.epochs.lost_slot(claim.spec.name, claim.slot_ms) and not claim.unknown:
                # One that may have been won is sent again, as only its winner can see to it that nobody else runs it.
                self._unsent(claim)
                claim.cancelled = True
                self.calendar.advance(job)
                return None, [self._reports.skip_lost(claim, boot_ms), *self._dispatch(boot_ms)]
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
        effects = self._failed(failure, boot_ms, kind="write", slot_ms=claim.slot_ms)
        effects += self._superseded(claim, failure.interrupted, boot_ms)
        watch, job = claim.watch, self.calendar.jobs.get(claim.spec.name)
        if claim.reason == "manual":
            effects.append(Tell(claim, "unknown", failure))
        if claim.reason == "manual" or claim.cancelled or self.stopping:
            self.orphans.give_up(claim, boot_ms)
            effects += self._release_orphans(boot_ms)
        elif watch is not None and failure.malformed:
            self.backups.drop(watch.spec.name, watch.slot_ms)
        elif watch is not None:
            watch.unknown = True
            self.backups.arm(watch, boot_ms)
        elif job is not None and failure.malformed:
            self.orphans.give_up(claim, boot_ms)
            effects.append(self._reports.skip(claim.spec, claim.slot_ms, "missed", boot_ms, error=failure.error))
            effects += self._release_orphans(boot_ms)
            self.calendar.advance(job)
        else:
            self._arm(boot_ms + claim.retry_ms(self._chance), claim)
        return effects + self._dispatch(boot_ms)

    def claim_answered(self, claim: Claim, answer: ClaimAnswer, boot_ms: int) -> list[Effect]:
        """The store answered a claim; `boot_ms` is when the answer was there."""
        self.in_flight -= 1
        claim.in_flight = claim.unknown = False
        if claim.watch is not None:
            claim.watch.claim, claim.watch.unknown = None, False
        name = claim.spec.name
        whose, epoch = Epochs.told_by(name, answer)
        effects = self._heard(claim.sent_boot_ms, boot_ms, answer.now_ms, epoch, whose)
        effects += self._answered(name, None, boot_ms, "sure" if answer.replicated else "write")
        if claim.reason == "manual":
            effects.append(Tell(claim, answer.outcome))
        elif claim.watch is None:
            self.last_late_ms = answer.now_ms - claim.slot_ms
        effects += self._superseded(claim, answer.interrupted, boot_ms)
        if answer.outcome == "won" and answer.record is not None:
            effects += self._won(claim, answer, boot_ms)
        else:
            self.free += 1
            effects += self._refused(claim, answer, boot_ms)
        job = self.calendar.jobs.get(name)
        if job is not None and job.claim is claim:
            self.calendar.answered(job, answer)
        return effects + self._dispatch(boot_ms)

    def _superseded(self, claim: Claim, slots_ms: Iterable[int], boot_ms: int) -> list[Effect]:
        """That claim has ended other, dead runs of the job."""
        effects: list[Effect] = []
        for slot_ms in slots_ms:
            self.backups.drop(claim.spec.name, slot_ms)
            effects.append(self._reports.event("interrupted", boot_ms, claim.spec, slot_ms, reason="superseded"))
        return effects

    def _won(self, claim: Claim, answer: ClaimAnswer, boot_ms: int) -> list[Effect]:
        assert answer.record is not None
        self.backups.drop(claim.spec.name, claim.slot_ms)
        attempt = Attempt(claim.spec, answer.record, self.clock, self._chance, claim.sent_boot_ms)
        self.attempts[answer.record.token] = attempt
        self._arm_attempt(attempt, boot_ms)
        effects: list[Effect] = []
        if self.link.epochs.lost_win(answer.record):  # handed over, it would be started by whoever takes it
            attempt.turn_down(OLDER_THAN_DATA)
            effects.append(self._reports.skip_lost(claim, boot_ms))
        elif self.stopping or claim.cancelled:
            effects += attempt.stop()
        return [*effects, Begin(attempt)]

    def _refused(self, claim: Claim, answer: ClaimAnswer, boot_ms: int) -> list[Effect]:
        spec, slot_ms, record, watch = claim.spec, claim.slot_ms, answer.record, claim.watch
        if claim.cancelled or self.stopping:
            return []
        outcome = answer.outcome
        if outcome == "running" and record is not None:
            self._watch(spec, record, boot_ms)
        elif outcome == "overlap" and record is not None:
            return self._overlap(claim, answer, boot_ms)
        elif outcome == "gone":
            self.backups.gone(spec.name, slot_ms, None if record is None else record.attempt, boot_ms)
        elif outcome != "early":  # finished, interrupted, superseded, late
            self.backups.drop(spec.name, slot_ms)
            if outcome == "interrupted" and record is not None:
                why, attempt = record.error, record.attempt
                return [self._reports.event("interrupted", boot_ms, spec, slot_ms, reason=why, attempt=attempt)]
            if outcome in ("superseded", "late") and watch is None:
                return [self._reports.skip(spec, slot_ms, outcome, boot_ms)]
            if watch is None and record is not None and (record.status, record.token) == ("failed", claim.token):
                # Won, and ended by the store itself, as it is older than the data: see RedisStore._give_back.
                return [self._reports.skip_lost(claim, boot_ms)]
        return []

    def _watch(self, spec: JobSpec, record: Record, boot_ms: int) -> None:
        """A run is alive: watch it, unless it is this instance's own."""
        if record.token not in self.attempts:
            token = None if record.released else record.token  # once released, it is never won again
            self.backups.watch(spec, record.slot_ms, record.attempt, boot_ms, token=token)

    def _overlap(self, claim: Claim, answer: ClaimAnswer, boot_ms: int) -> list[Effect]:
        """Refused for a live run of the job: watch that one, and look at the refused slot again for a while."""
        record, spec = answer.record, claim.spec
        assert record is not None
        self._watch(spec, record, boot_ms)
        if claim.watch is not None:
            self.backups.arm(claim.watch, boot_ms)
            return []
        until_ms = boot_ms + claim.look_again_ms(answer.now_ms)
        self.backups.watch(spec, claim.slot_ms, 1, boot_ms, until_boot_ms=until_ms)
        slot = from_ms(record.slot_ms).isoformat()
        in_the_way = f"the run of {slot} is alive: attempt {record.attempt} on {record.runner}"
        return [self._reports.skip(spec, claim.slot_ms, "overlap", boot_ms, error=in_the_way)]

    def start_attempt(self, attempt: Attempt, boot_ms: int) -> list[Effect]:
        """A worker starts the handler of an attempt."""
        effects = attempt.start(boot_ms)
        self._arm_attempt(attempt, boot_ms)  # its deadline and its max_runtime begin to count only now
        return effects

    def attempt_over(self, attempt: Attempt, boot_ms: int) -> list[Effect]:
        """A worker is done with an attempt. If it ended without a success or failure, somebody has to watch the run."""
        self.attempts.pop(attempt.record.token, None)
        self.free += 1
        self.link.jobs.attempt_over(attempt.spec.name, attempt.record.slot_ms)
        if attempt.spec.name not in self.calendar.jobs:
            self.link.jobs.removed(attempt.spec.name)
        job = self.calendar.jobs.get(attempt.spec.name)
        ended = attempt.recorded or attempt.turned_down is not None
        if not (self.stopping or ended) and job is not None and job.spec is attempt.spec:
            self.backups.watch(attempt.spec, attempt.record.slot_ms, attempt.record.attempt, boot_ms)
        return self._dispatch(boot_ms)

    # ---- claims that were given up ------------------------------------------------------------------------------

    def _release_orphans(self, boot_ms: int) -> list[Effect]:
        return [] if self.health.state == "down" and not self.stopping else self.orphans.release(boot_ms)

    def orphan_answered(self, orphan: Orphan, accepted: bool, boot_ms: int) -> list[Effect]:
        """Released, or not ours: either way nobody waits for that token any more."""
        self.orphans.answered()
        effects = self._job_answered(orphan.job, None, boot_ms, "write" if accepted else "load")
        # Refused, it hardly says anything of writes, but nothing else may ask for long after an outage.
        believed = accepted or not (self.health.permanent or self.stopping)
        return effects + self._reached(boot_ms, "write" if believed else "load")

    def orphan_failed(self, orphan: Orphan, failure: Failure, boot_ms: int) -> list[Effect]:
        """To be released again once the store is back, until the lease must be over anyway."""
        self.orphans.failed(orphan, again=not self.stopping)
        return self._failed(failure, boot_ms, kind="write")

    # ---- the store as a whole -----------------------------------------------------------------------------------

    def _load(self) -> list[Effect]:
        if not self.started or self.stopping or self.health.state == "down":
            return []
        names = self._loads.batch(self.calendar.jobs)
        return [Load(names, LOAD_TIMEOUT_MS)] if names else []

    def loaded(
        self, names: Iterable[str], runs: Iterable[Unfinished], sent_ms: int, boot_ms: int, now_ms: int, epoch: str
    ) -> list[Effect]:
        """What is unfinished of these jobs is known: their slots begin (section "Start" of the rules)."""
        self._loads.over()
        effects = [*self._heard(sent_ms, boot_ms, now_ms, epoch), *self._reached(boot_ms, "load")]
        by_job: dict[str, list[Unfinished]] = {}
        for run in runs:
            by_job.setdefault(run.job, []).append(run)
        for name in names:
            job = self.calendar.jobs.get(name)
            if job is not None and job.phase == "loading" and not self.stopping:
                self._begin(job, by_job.get(name, []), boot_ms)
            effects += self._job_answered(name, None, boot_ms, "load")
        return [*effects, *self._load(), *self._dispatch(boot_ms)]

    def _begin(self, job: JobState, runs: list[Unfinished], boot_ms: int) -> None:
        spec = job.spec
        live, dead = self.calendar.begin(job, runs, self.clock.store_ms(boot_ms) or 0)
        for run in live:
            self.backups.watch(spec, run.slot_ms, run.attempt, boot_ms)
        if dead is not None:
            at_ms = boot_ms + round(self._chance.uniform(0, spec.options.jitter(10_000)))
            self.backups.watch(spec, dead.slot_ms, dead.attempt, boot_ms, first_check_boot_ms=at_ms)

    def load_failed(self, names: Iterable[str], failure: Failure, boot_ms: int) -> list[Effect]:
        """Tried again when the store is back; a job that is in trouble alone, later than the others."""
        self._loads.over()
        for name in names:
            job = self.calendar.jobs.get(name)
            if name == failure.job and job is not None:
                again_ms = LOAD_AGAIN_MS if failure.malformed else self.health.LONGEST_DELAY_MS
                self._arm(boot_ms + again_ms, job)
            elif job is not None:
                self._loads.add(name)
        return [*self._failed(failure, boot_ms, kind="load"), *self._load()]

    def ponged(self, sent_ms: int, boot_ms: int, now_ms: int, epoch: str) -> list[Effect]:
        """The store answered a ping."""
        self.link.pinging = False
        return [*self._heard(sent_ms, boot_ms, now_ms, epoch), *self._reached(boot_ms)]

    def ping_failed(self, failure: Failure, boot_ms: int) -> list[Effect]:
        """The store didn't answer a ping."""
        self.link.pinging = False
        return self._failed(failure, boot_ms, kind="ping")

    def _heard(self, sent_ms: int, boot_ms: int, now_ms: int, epoch: str, job: str | None = None) -> list[Effect]:
        """An answer told the store's clock and an epoch: that job's own or, if None, the store's."""
        if self.clock.add(sent_ms, boot_ms, now_ms) < 0:
            self.calendar.step_back(self.clock.store_ms(boot_ms) or 0)
        return [self._reports.reset(boot_ms, job)] if self.link.epochs.heard(job, epoch, now_ms) else []

    def _reached(self, boot_ms: int, kind: Kind = "ping") -> list[Effect]:
        """The store answered a read: runners send what is overdue now, backups hold back for a heartbeat or two."""
        was_down = self.health.state == "down"
        over = self.health.answered(kind)
        if was_down and self.health.state != "down":
            return self._back(boot_ms, over)
        told: list[Effect] = [self._reports.event("store_ok", boot_ms)] if over else []
        return [*told, *self._load()]

    def beat_answered(self, attempt: Attempt, accepted: bool, sent_ms: int, boot_ms: int) -> list[Effect]:
        """The store answered a heartbeat of that attempt, sent at `sent_ms`."""
        effects = attempt.beat_answered(accepted, sent_ms, boot_ms)
        return effects + self._answered(attempt.spec.name, attempt.record.slot_ms, boot_ms, "write")

    def word_answered(self, attempt: Attempt, word: Word, accepted: bool, boot_ms: int) -> list[Effect]:
        """The store answered that last word of that attempt."""
        effects = attempt.word_answered(accepted, boot_ms)
        kind: Kind = "sure" if accepted and word != "release" else "write"
        return effects + self._answered(attempt.spec.name, attempt.record.slot_ms, boot_ms, kind)

    def beat_failed(self, attempt: Attempt, failure: Failure, boot_ms: int) -> list[Effect]:
        """A heartbeat of that attempt failed."""
        return attempt.beat_failed(boot_ms) + self._attempt_failed(attempt, failure, boot_ms)

    def word_failed(self, attempt: Attempt, failure: Failure, boot_ms: int) -> list[Effect]:
        """The last word of that attempt failed."""
        return attempt.word_failed(boot_ms) + self._attempt_failed(attempt, failure, boot_ms)

    def _attempt_failed(self, attempt: Attempt, failure: Failure, boot_ms: int) -> list[Effect]:
        slot_ms = attempt.record.slot_ms
        return self._failed(failure, boot_ms, kind="write", slot_ms=slot_ms, attempt_slot_ms=slot_ms)

    def _answered(self, job: str, attempt_slot_ms: int | None, boot_ms: int, kind: Kind) -> list[Effect]:
        """The store carried out a write; of the attempt of that slot, or of none."""
        effects = self._job_answered(job, attempt_slot_ms, boot_ms, kind)
        was_down = self.health.state == "down"
        if not self.health.answered(kind):
            return effects
        if was_down:
            return effects + self._back(boot_ms, True)
        return [*effects, self._reports.event("store_ok", boot_ms), *self._dispatch(boot_ms)]

    def _job_answered(self, job: str, attempt_slot_ms: int | None, boot_ms: int, kind: Kind) -> list[Effect]:
        over = self.link.jobs.answered(job, attempt_slot_ms, kind)
        return [self._reports.job_ok(job, boot_ms)] if over else []

    def _back(self, boot_ms: int, over: bool) -> list[Effect]:
        effects: list[Effect] = [self._reports.event("store_ok", boot_ms)] if over else []
        for attempt in self.attempts.values():
            effects += attempt.store_back(boot_ms)
        self.backups.arm_all(boot_ms)
        effects += [*self._release_orphans(boot_ms), *self._load()]
        return effects + self._dispatch(boot_ms)

    def _failed(
        self,
        failure: Failure,
        boot_ms: int,
        *,
        kind: Literal["ping", "load", "write"],
        slot_ms: int | None = None,
        attempt_slot_ms: int | None = None,
    ) -> list[Effect]:
        """An operation failed. One `store_error` when trouble starts; trouble with one job's records is its alone."""
        trouble: Trouble = "replicas" if failure.unreplicated else kind
        if failure.job is not None:
            if attempt_slot_ms is None and failure.job not in self.calendar.jobs:
                return []  # removed meanwhile: nobody asks for it again, and so nothing would end the trouble
            if not self.link.jobs.failed(failure.job, attempt_slot_ms, trouble):
                return []
            return [self._reports.job_error(failure, failure.job, slot_ms, boot_ms)]
        was = self.health.state
        began = self.health.failed(boot_ms, failure.error, permanent=failure.permanent, trouble=trouble)
        if was != "down":  # checks that wait for a worker are held back as well; `_back` arms them anew
            for claim in self._ready:
                if claim.watch is not None:
                    claim.watch.claim = None
            self._ready = deque(claim for claim in self._ready if claim.watch is None)
        return [self._reports.store_error(failure, boot_ms)] if began else []
