"""A cluster that carries a plan out: instances, a network with faults, one simulated store. See the package's text.

Everything that chance decides is drawn from generators that the seed and a name give, one for each instance's network,
so that leaving a fault out of a plan changes no draw that doesn't depend on it.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from harness import START_MS, Call, Instance, StoreClock, Work, World, spec
from history import Entry, Fact, History, JobProfile

from leaselib._attempt import Attempt
from leaselib._claims import Failure, JobSpec
from leaselib._effects import Effect
from leaselib._model import ClaimAnswer, Record, from_ms
from leaselib.errors import StoreError

from .plan import RUNNER, WINDOWS, Fault, JobPlan, Plan
from .store import SimulatedStore

WRITES = ("claim", "heartbeat", "finish", "release")
LATENCY_MS = 12
"""A message travels for up to so long when nothing is wrong."""
THAW_MS = 20
"""What became due while a process was paused happens within this, in any order."""


class Cluster(World):
    """See the module's text.

    Attributes:
        plan: what is carried out.
        entries: the store's decisions, in its order.
        problems: what was seen to be wrong while it ran, as (invariant, text).
        facts: what the instances would journal if they were processes, but for their events; see `history`.
        quiet_until: when the store first lost data, or its clock was stepped; in the world's time.
        counts: how often each branch was reached, of those that are seen only while it runs.
        settled_index: how many decisions there were when the bounds of liveness began to hold.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.seed)
        self.plan = plan
        self.entries: list[Entry] = []
        self.problems: list[tuple[str, str]] = []
        self.counts: Counter[str] = Counter()
        self.facts: list[Fact] = []
        self.quiet_until = math.inf
        self.settled_index = 0
        self.active: list[Fault] = []
        self.handlers: set[str] = set()  # tokens
        self.everyone: list[Member] = []  # also those that are gone
        self._stores = 0
        self._thaw = random.Random(f"{plan.seed}-thaw")
        self.store = self._new_store()
        self.work = self._draw_work

    # ---- the whole -----------------------------------------------------------------------------------------------

    def carry_out(self) -> Cluster:
        """The whole plan, then an orderly end; returns itself."""
        plan = self.plan
        for fault in plan.faults:
            self.at(START_MS + fault.at_ms, None, lambda fault=fault: self._strike(fault))
        for number, name in enumerate(plan.instances):
            self.at(START_MS + 37 * (number % 40), None, lambda name=name: self._join(name, 0, version=0))
        self.advance(plan.settled_ms)
        self.settled_index = len(self.entries)
        self.advance(plan.end_ms - plan.settled_ms)
        return self

    def shut_down(self) -> Cluster:
        """Every instance is stopped, and everything that is under way ends."""
        longest_ms = max(job.longest_ms for job in self.plan.jobs)
        for member in self.living():
            member.stop()
        self.advance(longest_ms + 15_000)
        return self

    def living(self) -> list[Member]:
        """The instances whose processes are there."""
        return [member for member in self.everyone if not member.dead]

    def digest(self) -> str:
        """A history in a few letters: equal only if every decision and every event is, to the byte."""
        told = [(at, member.name, emit) for member in self.everyone for at, emit in member.told]
        return hashlib.sha256(repr((self.entries, told)).encode()).hexdigest()

    def advance(self, ms: int) -> None:
        """Lets so much time pass; what a paused process has to do waits until it goes on."""
        end_ms, heap = self.now_ms + ms, self._heap
        while heap and heap[0][0] <= end_ms:
            at_ms, _, owner, what = heapq.heappop(heap)
            if at_ms > self.now_ms:
                self.now_ms = at_ms
            if owner is None:
                what()
            elif owner.dead:
                continue
            elif owner.frozen_until_ms > self.now_ms:
                self.at(owner.frozen_until_ms + self._thaw.randrange(THAW_MS), owner, what)
            else:
                what()
        self.now_ms = end_ms

    # ---- the store -----------------------------------------------------------------------------------------------

    def _new_store(self) -> SimulatedStore:
        self._stores += 1
        return SimulatedStore(StoreClock(self), f"{self.store_ms}-{self._stores:032x}", self._decided)

    def _decided(self, entry: Entry) -> None:
        self.entries.append(entry)
        answer, request = entry.answer, entry.request
        if isinstance(answer, ClaimAnswer) and answer.outcome == "won" and request is not None:
            started = answer.record
            if started is not None and started.started_ms == entry.now_ms:
                self.note("decided", member_of(entry.token), started, overlap=request.overlap)
                self._note_who_trusts(started)

    def note(self, kind: str, pid: str, record: Record, **fields: Any) -> None:
        """A fact about an attempt."""
        self.facts.append(
            {
                "t": self.now_ms,
                "fact": kind,
                "pid": pid,
                "job": record.job,
                "slot": record.slot_ms,
                "attempt": record.attempt,
                "token": record.token,
                **fields,
            }
        )

    def _note_who_trusts(self, started: Record) -> None:
        """A passed check of every handler of the job that would still pass `ctx.check()` now: S1, S17."""
        if self.now_ms >= self.quiet_until:
            return
        for member in self.living():
            for attempt in member.planner.attempts.values():
                mine = attempt.record
                if attempt.phase != "running" or mine.job != started.job or mine.token == started.token:
                    continue
                if mine.token not in member.signals and not attempt.expired(member.boot_ms):
                    self.note("effect", member.name, mine, at=self.now_ms)

    def history(self) -> History:
        """All that happened, in the terms in which real processes are judged as well."""
        facts = list(self.facts)
        for member in self.everyone:
            facts += member.told_facts()
            if not member.dead:
                facts.append({"t": self.now_ms, "fact": "main-end", "pid": member.name})
        versions = {job.name: [_spec(job, version).options for version in (0, 1)] for job in self.plan.jobs}
        return History(
            self.entries,
            facts,
            [record.to_run() for record in self.store.all_records()],
            {name: JobProfile.of(options) for name, options in versions.items()},
            self.quiet_until,
            kept=all(entry.op != "loss" for entry in self.entries),
        )

    # ---- members -------------------------------------------------------------------------------------------------

    def _join(self, name: str, number: int, version: int) -> None:
        member = Member(self, name, number, self.plan)
        self.everyone.append(member)
        self.instances[name] = member
        for job in self.plan.jobs:
            member.add(_spec(job, version))
        member.start()

    def _draw_work(self, instance: Instance, attempt: Attempt) -> Work:
        job = next(job for job in self.plan.jobs if job.name == attempt.record.job)
        chance = random.Random(f"{self.seed}-work-{attempt.record.token}")
        member = self.instances.get(instance.name.partition(".")[0])
        duration_ms = chance.randrange(1, job.longest_ms + 1)
        if isinstance(member, Member) and chance.random() < job.checkpoints:
            value, flush = json.dumps([instance.name, attempt.record.attempt]), chance.random() < 0.5
            at_ms = self.now_ms + chance.randrange(duration_ms)
            self.at(at_ms, instance, lambda: member.remember(attempt, value, flush=flush))
        return Work(
            duration_ms,
            error="it failed" if chance.random() < job.fails else None,
            heeds_ms=chance.randrange(100) if chance.random() < job.heeds else None,
        )

    # ---- faults --------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        if fault.who == RUNNER:
            runners = [member.place for member in self.living() if member.planner.attempts]
            fault = replace(fault, who=runners[0] if runners else self.plan.instances[0])
        kind, who = fault.kind, self.instances.get(fault.who or "")
        if fault.for_ms and kind in WINDOWS:
            self.active.append(fault)
            self.at(self.now_ms + fault.for_ms, None, lambda: self.active.remove(fault))
        elif kind == "failover":
            self._fail_over(fault)
        elif kind == "reset":
            self._lost_all()
        elif kind == "store-step":
            self._disquiet()
            self.store_offset_ms += fault.amount
        elif isinstance(who, Member) and not who.dead:
            self._strike_member(fault, who)

    def _strike_member(self, fault: Fault, who: Member) -> None:
        if fault.kind == "pause-after-win":  # right before a handler starts, which chance rarely hits
            who.pauses_until_ms = self.now_ms + fault.for_ms
        elif fault.kind == "pause":
            who.freeze(fault.for_ms)
        elif fault.kind == "crash":
            who.kill()
            self._return(fault, who)
        elif fault.kind == "stop" and not who.planner.stopping:
            self.at(self.now_ms, who, who.stop)
            self._return(fault, who)
        elif fault.kind == "die":
            who.kill()
        elif fault.kind == "leave":
            self.at(self.now_ms, who, who.stop)
        elif fault.kind == "wall-step":
            who.wall_offset_ms += fault.amount
        elif fault.kind == "manual":
            job = self.plan.jobs[fault.at_ms % len(self.plan.jobs)]
            self.at(self.now_ms, who, lambda: who.manual_if_it_can(job.name))

    def _return(self, fault: Fault, who: Member) -> None:
        """The program is started again, perhaps in another version; nobody else has taken its place meanwhile."""

        def back() -> None:
            if self.instances[who.place] is who:
                self._join(who.place, who.number + 1, fault.amount)

        self.at(self.now_ms + max(1, fault.for_ms), None, back)

    def _fail_over(self, fault: Fault) -> None:
        """The replica heard nothing of the last `amount` ms; it was copied when those began, that is now."""
        self._disquiet()
        snapshot, store = self.store.snapshot(), self.store

        def lose() -> None:
            if self.store is store:
                self.store.restore(snapshot)
                self.counts["failover"] += 1

        self.at(self.now_ms + fault.amount, None, lose)

    def _disquiet(self) -> None:
        self.quiet_until = min(self.quiet_until, self.now_ms)

    def _lost_all(self) -> None:
        self._disquiet()
        self.entries.append(Entry("loss", "", self.store_ms))
        self.store = self._new_store()

    def faces(self, kind: str, who: str | None = None) -> Fault | None:
        """The fault of that kind that is on, for that instance or (None) for the store."""
        for fault in self.active:
            if fault.kind == kind and fault.who == who:
                return fault
        return None


class Member(Instance):
    """An instance whose calls meet the faults of the cluster's network, and whose clocks drift.

    Attributes:
        place: the name of its place in the plan; after a restart another member has it.
        trusted: token: the boot time just before the last successful claim or heartbeat was sent.
        stopped_ms: when it was told to stop, in the world's time.
        gone_ms: when its process ended, in the world's time.
        busy: since when it has had a free worker, or none: (the world's time, whether it has one).
        pauses_until_ms: it is paused as soon as a claim of its is won, until then in the world's time.
    """

    world: Cluster

    def __init__(self, cluster: Cluster, place: str, number: int, plan: Plan) -> None:
        self.ppm = plan.drift_ppm[place]
        super().__init__(cluster, f"{place}.{number}" if number else place, plan.workers, None)
        self.place, self.number = place, number
        self.wall_offset_ms = plan.wall_offset_ms[place]
        self.trusted: dict[str, int] = {}
        self.stopped_ms: int | None = None
        self.gone_ms: int | None = None
        self.busy: list[tuple[int, bool]] = [(cluster.now_ms, True)]
        self.pauses_until_ms = 0
        self._net = random.Random(f"{plan.seed}-net-{self.name}")

    @property
    def boot_ms(self) -> int:
        """This machine's boot clock, which drifts."""
        passed_ms = self.world.now_ms - START_MS
        return START_MS + self.boot_offset_ms + passed_ms + passed_ms * self.ppm // 1_000_000

    def true_ms(self, boot_ms: int) -> int:
        """See Instance; rounded up, so that what is due then is due."""
        passed_ms = boot_ms - self.boot_offset_ms - START_MS
        return START_MS + -(-passed_ms * 1_000_000 // (1_000_000 + self.ppm))

    def stop(self) -> None:
        """The decision to stop."""
        self.stopped_ms = self.world.now_ms
        super().stop()

    def remember(self, attempt: Attempt, value: str, *, flush: bool) -> None:
        """The handler calls ctx.checkpoint."""
        if attempt.phase == "running":
            self.world.note("saving", self.name, attempt.record, value=json.loads(value))
            self.decide(lambda now_ms: attempt.checkpoint(value, now_ms, flush=flush))

    def _note_saved(self, call: Call) -> None:
        """The store is known to have the checkpoint that went along."""
        attempt = self.planner.attempts.get(call.token or "")
        if attempt is not None and call.body is not None:
            self.world.note("saved", self.name, attempt.record, value=json.loads(call.body))

    def manual_if_it_can(self, job: str) -> None:
        """run_now, which waits for the store's clock first."""
        if self.planner.clock.offset_ms is not None and not self.planner.stopping:
            self.manual(job)

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _call(
        self,
        call: Call,
        execute: Callable[[], Any],
        answered: Callable[[Any], None],
        failed: Callable[[Failure], None],
    ) -> None:
        """Sends a call into the network; its time-out counts from here."""
        cluster, sent_ms = self.world, self.boot_ms
        cluster.calls.append(call)
        if call.kind == "claim" and self.stopped_ms is not None:
            cluster.problems.append(("S25", f"{self.name} sent a claim after it was stopped: {call}"))

        def take(result: Any) -> None:
            good = result.outcome == "won" if call.kind == "claim" else call.kind == "heartbeat" and result
            if good and call.token is not None:
                self.trusted[call.token] = max(sent_ms, self.trusted.get(call.token, sent_ms))
            if result is True and call.kind in ("heartbeat", "release"):
                self._note_saved(call)
            answered(result)
            if good and call.kind == "claim" and self.pauses_until_ms > cluster.now_ms:
                self.freeze(self.pauses_until_ms - cluster.now_ms)

        _Sent(self, call, execute, take, failed).go(_Way(self._net, call, cluster, self.place))

    # ---- handlers ------------------------------------------------------------------------------------------------

    def _start(self, attempt: Attempt) -> None:
        """S15: a handler starts while the lease is to be trusted."""
        token, cluster = attempt.record.token, self.world
        options = attempt.spec.options
        last_ms = self.trusted.get(token)
        trust_ends_ms = None if last_ms is None else last_ms + attempt.record.lease_ms - options.margin_ms
        if trust_ends_ms is None or self.boot_ms >= trust_ends_ms:
            cluster.problems.append(("S15", f"{token} starts on {self.name} with trust until {trust_ends_ms}"))
        cluster.handlers.add(token)
        record = attempt.record
        resume = None if record.checkpoint is None else json.loads(record.checkpoint)
        cluster.note("start", self.name, record, fence=record.fence, resume=resume)
        if last_ms is not None and self.boot_ms - last_ms >= options.heartbeat_ms:
            cluster.counts["slow start"] += 1
        super()._start(attempt)

    def _before_start(self, attempt: Attempt) -> None:
        if self.boot_ms >= attempt.deadline_boot_ms:
            self.world.counts["slept between win and start"] += 1
        super()._before_start(attempt)

    def decide(self, decision: Callable[[int], Iterable[Effect]]) -> None:
        """See Instance."""
        if not self.dead:
            super().decide(decision)
            if (self.planner.free > 0) != self.busy[-1][1]:
                self.busy.append((self.world.now_ms, self.planner.free > 0))
            for attempt in self.planner.attempts.values():
                self._judge_deadline(attempt)

    def _judge_deadline(self, attempt: Attempt) -> None:
        """S17: trust ends with the margin, counted from just before the last accepted heartbeat or claim was sent."""
        sent_ms = self.trusted.get(attempt.record.token)
        if sent_ms is not None:
            latest_ms = sent_ms + attempt.record.lease_ms - attempt.spec.options.margin_ms
            if attempt.deadline_boot_ms > latest_ms:
                late = f"{attempt.record.token} is trusted {attempt.deadline_boot_ms - latest_ms} ms too long"
                self.world.problems.append(("S17", late))

    def kill(self) -> None:
        """The process ends at once."""
        self.gone_ms = self.world.now_ms
        super().kill()

    def could_take_over(self, since_ms: int, until_ms: int, within_ms: int) -> bool:
        """Whether between these, in the world's time, it was there, not told to stop, and had a free worker for longer
        than that at a stretch.
        """
        until_ms = min(ms for ms in (until_ms, self.gone_ms, self.stopped_ms) if ms is not None)
        return any(
            free and min(end_ms, until_ms) - max(at_ms, since_ms) > within_ms
            for (at_ms, free), (end_ms, _) in pairwise([*self.busy, (until_ms, False)])
        )

    def told_facts(self) -> Iterator[Fact]:
        """Its events about attempts, as facts."""
        for at, event in self.told:
            if event.token is not None:
                yield {
                    "t": at,
                    "fact": "event",
                    "pid": self.name,
                    "event": event.name,
                    "job": event.job,
                    "slot": event.slot_ms,
                    "attempt": event.attempt,
                    "token": event.token,
                }


class _Sent:
    """A call that was sent: what comes first, an answer, a failure or the time-out, is what its sender hears of it."""

    def __init__(
        self,
        member: Member,
        call: Call,
        execute: Callable[[], Any],
        answered: Callable[[Any], None],
        failed: Callable[[Failure], None],
    ) -> None:
        self._member, self._cluster, self._call = member, member.world, call
        self._execute, self._answered, self._failed = execute, answered, failed
        self._open = True

    def go(self, way: _Way) -> None:
        """On its way, in as many copies as the network makes of it."""
        cluster = self._cluster
        for number, ms in enumerate(way.out_ms):
            back_ms = way.back_ms if number == 0 else None
            cluster.at(cluster.now_ms + ms, None, lambda back_ms=back_ms: self._arrive(back_ms))
        if way.refused_ms is not None:
            self._reply(way.refused_ms, lambda: self._failed(Failure("connection reset")))
        cluster.at(cluster.now_ms + self._call.timeout_ms, self._member, self._time_out)

    def _reply(self, back_ms: int | None, report: Callable[[], None]) -> None:
        if back_ms is not None:
            self._cluster.at(self._cluster.now_ms + back_ms, self._member, lambda: self._settle(report))

    def _settle(self, report: Callable[[], None]) -> None:
        if self._open:
            self._open = False
            report()

    def _time_out(self) -> None:
        self._settle(lambda: self._failed(Failure("timed out")))

    def _arrive(self, back_ms: int | None) -> None:
        cluster = self._cluster
        frozen = cluster.faces("freeze-store")
        if frozen is not None:
            thawed_ms = START_MS + frozen.at_ms + frozen.for_ms + 1
            cluster.at(thawed_ms + (back_ms or 0), None, lambda: self._arrive(back_ms))
        elif cluster.faces("outage") is not None:
            self._reply(back_ms, lambda: self._failed(Failure("connection refused")))
        elif self._call.kind in WRITES and cluster.faces("refuse-writes") is not None:
            self._reply(back_ms, lambda: self._failed(Failure("out of memory")))
        else:
            self._carry_out(back_ms)

    def _carry_out(self, back_ms: int | None) -> None:
        try:
            result = self._execute()
        except StoreError as error:
            failure = Failure(str(error), not error.transient, error.job)
            self._reply(back_ms, lambda: self._failed(failure))
        else:
            self._reply(back_ms, lambda: self._answered(result))


class _Way:
    """What the network does with one call.

    out_ms: when each copy of the request arrives. back_ms: how long the answer travels; None: it is lost.
    refused_ms: when the sender is told that its connection broke, or None.
    """

    def __init__(self, chance: random.Random, call: Call, cluster: Cluster, place: str) -> None:
        draw = chance.random  # five draws, whatever is on
        self.out_ms = [1 + int(draw() * LATENCY_MS)]
        self.back_ms: int | None = 1 + int(draw() * LATENCY_MS)
        self.refused_ms: int | None = None
        draws = (draw(), draw(), draw())
        if not cluster.active:
            return
        if cluster.faces("cut", place):
            self.out_ms = []
            self.refused_ms = 1 + int(draws[0] * 20) if draws[1] < 0.5 else None
            return
        delay, hold = cluster.faces("delay", place), cluster.faces("hold", place)
        if cluster.faces("duplicate", place):
            later_ms = int(draws[2] * 2_000)
            if draws[0] < 0.3:  # long enough for others to have taken over, and over in the calm time
                later_ms = max(later_ms, min(10 * later_ms, START_MS + cluster.plan.calm_ms - cluster.now_ms))
            self.out_ms.append(self.out_ms[0] + 1 + later_ms)
        if delay is not None:
            self.out_ms = [ms + int(draws[0] * delay.amount) for ms in self.out_ms]
            self.back_ms += int(draws[1] * delay.amount)
        if hold is not None and draws[0] < 0.5:
            self.out_ms = [ms + hold.amount for ms in self.out_ms]
        if cluster.faces("drop-answers", place):
            self.back_ms = None
            self.refused_ms = self.out_ms[0] + 5 if draws[1] < 0.5 else None


def _spec(job: JobPlan, version: int) -> JobSpec:
    """The job as a version of the program has it."""
    options = dict(job.options)
    if version:
        options |= {"lease": options["lease"] / 2, "heartbeat": options["heartbeat"] / 2, "max_attempts": 2}
        options |= {"history_size": 1, "max_late": 3, "catch_up": 5}
        if job.flips:
            options["overlap"] = "allow" if options["overlap"] == "skip" else "skip"
    return spec(job.name, job.every_ms / 1000, **options)


def member_of(token: str) -> str:
    """The name of the instance that made up a token."""
    return token.split("-")[1]


def slots(job: JobPlan, first_ms: int, last_ms: int) -> range:
    """The slots of a job in [first_ms, last_ms]."""
    return range(-(-first_ms // job.every_ms) * job.every_ms, last_ms + 1, job.every_ms)


__all__ = ["Cluster", "Member", "from_ms", "member_of", "slots"]
