"""The safety properties of a store, checked on a list of its decisions in one pass. Pure; any thread may call it.

The list is in the store's own order of decisions. Whoever records them (the reference driver, a simulation, an audit
table of a real store) is trusted for the order and for the changes; everything else is judged from there. What an
invariant says stands in `base.INVARIANTS`; those of a store's decisions are S1 to S14, S18, S20 to S22, S24, S28 and,
of the reasons of refusals, L1.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from leaselib._model import ClaimAnswer, ClaimRequest, Record

from .base import Entry, Violation

EARLY_MS = 1_000
LATE_TOLERANCE_MS = 10_000
TRIM_MARGIN_MS = 60_000


@dataclass(frozen=True)
class Report:
    """What a check found.

    quiet: no clock was seen to step back and no data was lost.
    """

    violations: list[Violation]
    quiet: bool

    def ids(self) -> set[str]:
        """The invariants that were broken."""
        return {violation.id for violation in self.violations}


def check(entries: Iterable[Entry]) -> Report:
    """Checks a list of decisions, in the store's order."""
    history = list(entries)
    skip_jobs = _skip_jobs(history)
    tokens: dict[str, _Start] = {}
    jobs: dict[tuple[str, str], _Job] = {}
    now: dict[str, int] = {}
    found: list[Violation] = []
    quiet = True
    for index, entry in enumerate(history):
        quiet = quiet and entry.op != "loss" and entry.now_ms >= now.get(entry.namespace, entry.now_ms)
        now[entry.namespace] = entry.now_ms
        if entry.op == "loss":
            for (namespace, name), job in jobs.items():
                if namespace == entry.namespace and entry.job in ("", name):
                    job.lose(entry)
            continue
        key = (entry.namespace, entry.job)
        job = jobs.setdefault(key, _Job(entry.namespace, entry.job, key in skip_jobs, tokens))
        found += [Violation(id_, text, index) for id_, text in job.take(entry)]
    return Report(found, quiet)


def _skip_jobs(history: list[Entry]) -> set[tuple[str, str]]:
    """The jobs whose every claim says `skip`."""
    overlaps: dict[tuple[str, str], set[str]] = {}
    for entry in history:
        if entry.request is not None:
            overlaps.setdefault((entry.namespace, entry.job), set()).add(entry.request.overlap)
    return {key for key, found in overlaps.items() if found == {"skip"}}


@dataclass(frozen=True)
class _Start:
    """What a token started."""

    namespace: str
    job: str
    slot_ms: int
    attempt: int
    fence: int


Found = Iterator[tuple[str, str]]


@dataclass
class _Life:
    """What is remembered of a slot, also when its run was removed."""

    attempt: int = 0
    counted: int = 0
    max_attempts: int = 0
    checkpoint: str | None = None
    finishes: dict[str, str] = field(default_factory=dict)
    releases: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)  # tokens that held the run once, and were told that they don't


def _survivor(record: Record, before: _Life) -> _Life:
    """What a store's loss leaves of a slot's life, if this record of it is left."""
    return _Life(
        attempt=record.attempt,
        counted=record.attempt - record.handovers + record.released,
        max_attempts=before.max_attempts,
        checkpoint=record.checkpoint,
        finishes={record.token: record.status} if record.status in ("success", "failed") else {},
        releases={record.token} if record.released else set(),
    )


@dataclass
class _Job:
    """One job of one namespace, as its decisions so far say it must be."""

    namespace: str
    name: str
    skip: bool
    tokens: dict[str, _Start]
    fence: int = 0
    kept_fence: int | None = None  # since a loss: the highest fence that is certainly left
    runs: dict[int, Record] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    ended: list[int] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    floor_ms: int | None = None
    lives: defaultdict[int, _Life] = field(default_factory=lambda: defaultdict(_Life))

    def lose(self, entry: Entry) -> None:
        """The store lost this job's data, but for what the entry names: the rest can't be held against it."""
        kept = [record for record in entry.puts if record.job == self.name]
        lives, self.lives, self.runs = self.lives, defaultdict(_Life), {}
        self.running, self.ended, self.floor_ms = set(), [], entry.floor_ms
        known = {(self.namespace, self.name, record.slot_ms, record.attempt) for record in kept}
        for token, start in list(self.tokens.items()):
            mine = (start.namespace, start.job) == (self.namespace, self.name)
            if mine and (self.namespace, self.name, start.slot_ms, start.attempt) not in known:
                del self.tokens[token]
        for record in kept:
            self._store(record)
            start = _Start(self.namespace, self.name, record.slot_ms, record.attempt, record.fence)
            self.tokens.setdefault(record.token, start)  # which an earlier loss may have taken away
            self.lives[record.slot_ms] = _survivor(record, lives[record.slot_ms])
        slots = {record.slot_ms for record in kept} | ({entry.floor_ms} if entry.floor_ms is not None else set())
        self.started = sorted(slots)
        self.kept_fence = max((record.fence for record in kept), default=0)
        self.fence = max(self.kept_fence, min(self.fence, entry.now_ms - 1))

    def take(self, entry: Entry) -> Found:
        """Checks one decision and takes it over."""
        if entry.now_ms <= self.fence and self.kept_fence is not None:
            # Data was lost, and then the clock set back: neither says how high the fence was.
            self.fence = max(self.kept_fence, min(self.fence, entry.now_ms - 1))
        life = self.lives[entry.slot_ms]
        if entry.request is not None:
            life.max_attempts = max(life.max_attempts, entry.request.max_attempts)
        if entry.puts or entry.drops or entry.elsewhere:
            yield from self._isolation(entry)
        yield from self._answer(entry, life)
        if entry.puts or entry.drops:
            yield from self._changes(entry)
        if self.skip:
            live = [slot for slot in self.running if self.runs[slot].live(entry.now_ms)]
            if len(live) > 1:
                yield "S1", f"runs {sorted(live)} of {self.name!r} are live at once"

    def _changes(self, entry: Entry) -> Found:
        mine = [record for record in entry.puts if record.job == self.name]
        starts = [record for record in mine if self._is_start(record)]
        for record in starts:
            yield from self._start(entry, record)
        for record in mine:
            yield from self._change(entry, record)
            self._store(record)
        yield from self._interrupted(entry, mine)
        yield from self._dropped(entry)

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _is_start(self, record: Record) -> bool:
        before = self.runs.get(record.slot_ms)
        return before is None or (before.attempt, before.token) != (record.attempt, record.token)

    def _newer_started(self, slot_ms: int, now_ms: int) -> bool:
        index = bisect.bisect_right(self.started, now_ms + EARLY_MS)
        return index > 0 and self.started[index - 1] > slot_ms

    def _known_newer(self, slot_ms: int, now_ms: int) -> bool:
        """The same, of what a store can know: see S8."""
        horizon_ms = now_ms + EARLY_MS
        if self.floor_ms is None or self.floor_ms <= horizon_ms:
            return self._newer_started(slot_ms, now_ms)
        first, end = bisect.bisect_right(self.started, slot_ms), bisect.bisect_right(self.started, horizon_ms)
        return any(slot in self.runs for slot in self.started[first:end])

    def _store(self, record: Record) -> None:
        slot = record.slot_ms
        self._forget(slot)
        self.runs[slot] = record
        if record.status == "running":
            self.running.add(slot)
        else:
            bisect.insort(self.ended, slot)

    def _forget(self, slot: int) -> Record | None:
        before = self.runs.pop(slot, None)
        self.running.discard(slot)
        if before is not None and before.status != "running":
            self.ended.remove(slot)
        return before

    # ---- the checks ----------------------------------------------------------------------------------------------

    def _isolation(self, entry: Entry) -> Found:
        for job in sorted({r.job for r in entry.puts} | {job for job, _ in entry.drops}):
            if job != self.name:
                yield "S24", f"a {entry.op} of {self.name!r} changed {job!r}"
        for namespace in entry.elsewhere:
            yield "S24", f"a {entry.op} in {self.namespace!r} changed namespace {namespace!r}"

    def _answer(self, entry: Entry, life: _Life) -> Found:
        if isinstance(entry.answer, ClaimAnswer):
            yield from self._claim_answer(entry, entry.answer)
        elif entry.op not in ("purge", "claim"):
            yield from self._accepted(entry, life)

    def _claim_answer(self, entry: Entry, answer: ClaimAnswer) -> Found:
        if answer.token != entry.token:
            yield "S28", f"the answer to {entry.token!r} names {answer.token!r}"
        if answer.outcome != "won":
            if entry.request is not None and not self._true_refusal(entry.request, answer.outcome, entry.now_ms):
                run = self.runs.get(entry.slot_ms)
                yield "L1", f"{entry.token!r} was told {answer.outcome!r}, which isn't true of the run {run}"
            return
        record = answer.record
        if record is None or record.token != entry.token:
            yield "S14", f"{entry.token!r} was told `won` with {record}"
            return
        before = self.runs.get(entry.slot_ms)
        if before is not None and before.released and before.token == entry.token:
            yield "S5", f"{entry.token!r} was won again after its release"
        start = _Start(self.namespace, self.name, record.slot_ms, record.attempt, record.fence)
        known = self.tokens.get(entry.token)
        if known is not None and known != start:
            yield "S14", f"{entry.token!r} won {known} before, and now {start}"
        elif known is None and not any(self._is_start(r) and r.token == entry.token for r in entry.puts):
            yield "S14", f"{entry.token!r} was told `won`, and nothing was started"

    def _true_refusal(self, request: ClaimRequest, outcome: str, now_ms: int) -> bool:
        """Whether the reason is true as far as decisions tell. `interrupted` is judged by S13."""
        slot, skip, run = request.slot_ms, request.overlap == "skip", self.runs.get(request.slot_ms)
        removed = self.floor_ms is not None and slot <= self.floor_ms
        if outcome == "finished":
            return run is not None and run.status != "running"
        if outcome == "running":
            late_copy = run is not None and request.takeover_of is None and run.attempt > 1
            running = run is not None and run.status == "running"
            return running and (run.live(now_ms) or run.token == request.token or late_copy)
        if outcome == "overlap":
            return skip and any(other != slot and self.runs[other].live(now_ms) for other in self.running)
        if outcome == "superseded":
            return skip and (removed or self._newer_started(slot, now_ms))
        if outcome == "late":
            return now_ms - slot > request.max_late_ms + LATE_TOLERANCE_MS or (removed and not skip)
        if outcome == "gone":
            return request.takeover_of is not None and (run is None or run.attempt != request.takeover_of)
        return outcome == "interrupted" or (outcome == "early" and slot > now_ms + EARLY_MS)

    def _accepted(self, entry: Entry, life: _Life) -> Found:
        """Judges a heartbeat, finish or release, and remembers what was accepted."""
        run = self.runs.get(entry.slot_ms)
        current = run is not None and run.token == entry.token and run.status == "running" and not run.released
        repeated = (entry.op == "finish" and life.finishes.get(entry.token) == entry.status) or (
            entry.op == "release" and entry.token in life.releases
        )
        if entry.answer and not current and not repeated:
            yield "S4", f"a {entry.op} with {entry.token!r} was accepted, but the run is {run}"
        if entry.puts and not (entry.answer and current):
            yield "S4", f"a {entry.op} with {entry.token!r} that was refused or repeated changed {entry.puts}"
        if entry.op == "heartbeat" and not entry.answer and entry.token in self.tokens:
            life.refused.add(entry.token)
        elif entry.answer and entry.puts and entry.token in life.refused:
            yield "S18", f"a {entry.op} with {entry.token!r} was accepted, and a heartbeat of it refused before"
        if entry.answer and current:
            if entry.op == "finish":
                life.finishes[entry.token] = entry.status or ""
            elif entry.op == "release":
                life.releases.add(entry.token)
            if entry.op != "finish" and entry.checkpoint is not None:
                life.checkpoint = entry.checkpoint

    def _start(self, entry: Entry, record: Record) -> Found:
        life = self.lives[record.slot_ms]
        before, request = self.runs.get(record.slot_ms), entry.request
        if request is None or record.slot_ms != entry.slot_ms or record.token != entry.token:
            yield "S2", f"a {entry.op} with {entry.token!r} for slot {entry.slot_ms} started {record}"
            return
        if record.attempt == 1:
            yield from self._birth(entry, record, request, life)
        else:
            yield from self._next_attempt(entry, record, before)
        born_again = record.attempt == 1 and before is None  # that is S9
        if record.attempt != life.attempt + 1 and not born_again:
            yield "S2", f"attempt {record.attempt} of slot {record.slot_ms} follows attempt {life.attempt}"
        if record.token in self.tokens:
            yield "S2", f"token {record.token!r} of {self.tokens[record.token]} started attempt {record.attempt} too"
        if record.fence <= self.fence:
            yield "S20", f"fence {record.fence} of slot {record.slot_ms} isn't above {self.fence}"
        others = [slot for slot in self.running if slot != record.slot_ms and self.runs[slot].live(entry.now_ms)]
        if request.overlap == "skip" and others:
            yield "S1", f"slot {record.slot_ms} was started under skip while {sorted(others)} are live"
        life.attempt = record.attempt
        life.counted += before is None or not before.released
        if life.counted > life.max_attempts:
            yield "S10", f"start {life.counted} of slot {record.slot_ms}, of {life.max_attempts} allowed"
        self.fence, self.kept_fence = max(self.fence, record.fence), None
        self.tokens.setdefault(
            record.token, _Start(self.namespace, self.name, record.slot_ms, record.attempt, record.fence)
        )
        if record.slot_ms not in self.started[bisect.bisect_left(self.started, record.slot_ms) :][:1]:
            bisect.insort(self.started, record.slot_ms)

    def _birth(self, entry: Entry, record: Record, request: ClaimRequest, life: _Life) -> Found:
        late_ms = entry.now_ms - record.slot_ms
        if life.attempt:
            yield "S9", f"slot {record.slot_ms} was started again as attempt 1, after attempt {life.attempt}"
        if late_ms > request.max_late_ms + LATE_TOLERANCE_MS:
            yield "S11", f"slot {record.slot_ms} was started {late_ms} ms late, {request.max_late_ms} allowed"
        if -late_ms > EARLY_MS:
            yield "S12", f"slot {record.slot_ms} was started {-late_ms} ms early"
        if self.skip and self._newer_started(record.slot_ms, entry.now_ms):
            yield "S7", f"slot {record.slot_ms} was started after a later one of {self.started[-5:]}"

    def _next_attempt(self, entry: Entry, record: Record, before: Record | None) -> Found:
        if before is None:
            yield "S2", f"attempt {record.attempt} of slot {record.slot_ms} was started without state"
            return
        if not before.released and entry.now_ms < before.lease_end_ms:
            yield "S3", f"slot {record.slot_ms} was taken over {before.lease_end_ms - entry.now_ms} ms too soon"
        if self.skip and self._known_newer(record.slot_ms, entry.now_ms):
            yield "S8", f"slot {record.slot_ms} was taken over after a later one of {self.started[-5:]} had started"

    def _change(self, entry: Entry, record: Record) -> Found:
        """Judges what a record became. `_start` has judged the new attempt, if it is one."""
        before = self.runs.get(record.slot_ms)
        if before is not None and before.status != "running" and before != record:
            yield "S6", f"a {entry.op} changed the {before.status} run {record.slot_ms} to {record}"
        was = "running" if before is None else before.status
        if record.status != was:
            allowed = "claim" if record.status == "interrupted" else "finish"
            if entry.op != allowed or record.status == "running":
                yield "S6", f"a {entry.op} made the {was} run {record.slot_ms} {record.status}"
        if before is not None and not self._is_start(record):
            if before.released and record.status == "running" and not record.released:
                yield "S5", f"a {entry.op} made the released run {record.slot_ms} live again"
            if record.fence != before.fence:
                yield "S20", f"a {entry.op} changed the fence of {record.slot_ms} to {record.fence}"
        expected = self.lives[record.slot_ms].checkpoint
        if record.checkpoint != expected:
            yield "S21", f"run {record.slot_ms} has checkpoint {record.checkpoint!r}, accepted was {expected!r}"

    def _interrupted(self, entry: Entry, puts: list[Record]) -> Found:
        """Runs that became interrupted, once the run that started in the same step is known."""
        request = entry.request
        if request is None:
            return
        for record in puts:
            if record.status != "interrupted":
                continue
            life, slot = self.lives[record.slot_ms], record.slot_ms
            if not record.released and record.lease_end_ms > entry.now_ms:
                yield "S13", f"run {slot} was interrupted while it was live"
            used_up = slot == entry.slot_ms and not record.released and life.counted >= request.max_attempts
            in_future = (
                slot != entry.slot_ms
                and request.overlap == "skip"
                and max(slot, entry.slot_ms) > entry.now_ms + EARLY_MS
            )
            newer = self._newer_started(slot, entry.now_ms) or slot < (self.floor_ms or slot)
            if not used_up and not in_future and not newer:
                yield "S13", f"run {slot} was interrupted with attempts left and no newer run started"

    def _dropped(self, entry: Entry) -> Found:
        slots = [slot for job, slot in entry.drops if job == self.name]
        ended = list(self.ended) if slots else []
        for slot in slots:
            run = self._forget(slot)
            self.floor_ms = slot if self.floor_ms is None else max(slot, self.floor_ms)
            if run is None:
                yield "S22", f"slot {slot}, which had no run, was removed"
            elif entry.op == "purge":
                if run.status == "running" and not entry.force:
                    yield "S22", f"running run {slot} was purged without force"
            elif entry.request is None:
                yield "S22", f"a {entry.op} removed run {slot}"
            else:
                yield from self._trimmed(entry.request, entry.now_ms, run, ended)

    def _trimmed(self, request: ClaimRequest, now_ms: int, run: Record, ended: list[int]) -> Found:
        if run.status == "running":
            yield "S22", f"running run {run.slot_ms} was trimmed"
        newer = len(ended) - bisect.bisect_right(ended, run.slot_ms)
        if newer < request.history_size:
            yield "S22", f"run {run.slot_ms} was trimmed: {newer} newer ended runs, {request.history_size} are kept"
        age_ms, window_ms = now_ms - run.slot_ms, request.keep_ms + LATE_TOLERANCE_MS + TRIM_MARGIN_MS
        if age_ms < window_ms:
            yield "S22", f"run {run.slot_ms} was trimmed {window_ms - age_ms} ms too young"
