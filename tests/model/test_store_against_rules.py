"""Every store side by side with the pure rules, under random operations: same answers, same stored runs, each time.

Twice: by Hypothesis, which looks for small failing examples, with two jobs and all options; and on the explorer's
walks, which are long lives of one job with messages that are late, repeated and lost.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any, Literal

import pytest
from explorer import GAP_MS, JOB, Walk
from fix_stores import StoreUnderTest
from history.base import Entry
from history.decisions import check
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from side_by_side import SideBySide, options_of

from leaselib._model import ClaimAnswer, ClaimRequest, Record, from_ms, to_ms

EXAMPLES = 300
STEPS = 50
WALKS = 500
JOBS = ("job", "jo*b")

JOB_NAMES = st.sampled_from(JOBS)
STATUS = st.sampled_from(["success", "failed"])
CHECKPOINTS = st.sampled_from([None, "null", '{"page": 7}', '"é"'])
LEASES_MS = st.sampled_from([5_000, 20_000, 60_000])
INDEX = st.integers(0, 3)
CURRENT = st.sampled_from([0, 0, 0, 1, 2, None, None])
ADVANCES = st.sampled_from([0.001, 1.0, 5.0, 9.999, 20.0, 60.0, 70.0, 130.0, 400.0])
STEPS_S = st.sampled_from([-3600.0, -90.0, -10.0, -1.001, 30.0, 3600.0])
OPTIONS = st.fixed_dictionaries(
    {
        "lease_ms": st.sampled_from([5_000, 20_000, 60_000, 1]),
        "max_attempts": st.sampled_from([1, 2, 3]),
        "overlap": st.sampled_from(["skip", "skip", "allow"]),
        "max_late_ms": st.sampled_from([60_000, 0, 0, 300_000]),
        "keep_ms": st.sampled_from([0, 0, 300_000]),
        "history_size": st.sampled_from([0, 0, 1, 3, 100]),
        "reason": st.sampled_from(["scheduled", "catch-up", "manual"]),
        "runner": st.sampled_from(["r1", "r2"]),
    }
)


class StoreAgainstRules(RuleBasedStateMachine):
    """One store's namespace beside the rules, and a neighbouring namespace that nothing may change."""

    claims = Bundle("claims")

    def __init__(self, sut: StoreUnderTest, namespace: str) -> None:
        super().__init__()
        self.clock = sut.clock
        self.both = SideBySide(sut, namespace, JOBS)
        self.store, self.reference = self.both.store, self.both.reference
        self.tokens = (f"{namespace}-{n}" for n in itertools.count())
        self.until_a_slot(1)  # so that every example begins alike
        self.neighbour = sut.connect(f"{namespace}*")
        for job in JOBS:
            slot = from_ms(self.slot_ms(0))
            assert self.neighbour.claim(job, slot, f"{namespace}-{job}", "r").outcome == "won"
        self.neighbours = [self.neighbour.runs(job) for job in JOBS]

    def slot_ms(self, back: int) -> int:
        """The slot that is due now, or so many before it."""
        return (to_ms(self.store.now()) // GAP_MS - back) * GAP_MS

    # ---- operations ----------------------------------------------------------------------------------------------

    @rule(target=claims, job=JOB_NAMES, back=st.sampled_from([0, 0, 0, 0, -1, 1, 1, 2, 31]), options=OPTIONS)
    def claim(self, job: str, back: int, options: dict[str, Any]) -> ClaimRequest:
        """A claim of a slot near the store's time."""
        return self.send(job, self.slot_ms(back), options, None)

    @precondition(lambda self: self.reference.records)
    @rule(
        target=claims, index=INDEX, named=st.sampled_from(["latest", "latest", "latest", None, 1, 2]), options=OPTIONS
    )
    def takeover(self, index: int, named: Literal["latest"] | int | None, options: dict[str, Any]) -> ClaimRequest:
        """A claim of a stored run, naming its latest attempt, another one, or none."""
        record = self.stored(index)
        return self.send(record.job, record.slot_ms, options, record.attempt if named == "latest" else named)

    @rule(sent=claims)
    def claim_again(self, sent: ClaimRequest) -> None:
        """Any claim, once more: of a run that is stored, was removed or never came to be."""
        self.both.claim(sent)

    @rule(sent=claims, index=CURRENT, lease_ms=LEASES_MS, checkpoint=CHECKPOINTS)
    def heartbeat(self, sent: ClaimRequest, index: int | None, lease_ms: int, checkpoint: str | None) -> None:
        """With a current token, or any that was ever sent."""
        self.both.heartbeat(*self.whose(sent, index), lease_ms, checkpoint)

    @rule(sent=claims, index=CURRENT, status=STATUS, error=st.sampled_from([None, "no", "x" * 5000]))
    def finish(
        self, sent: ClaimRequest, index: int | None, status: Literal["success", "failed"], error: str | None
    ) -> None:
        """Also with tokens of which one was accepted before, with the same or another status."""
        self.both.finish(*self.whose(sent, index), status, error)

    @rule(sent=claims, index=CURRENT, checkpoint=CHECKPOINTS)
    def release(self, sent: ClaimRequest, index: int | None, checkpoint: str | None) -> None:
        """Also with tokens of which one was accepted before."""
        self.both.release(*self.whose(sent, index), checkpoint)

    @precondition(lambda self: len(self.reference.records) > 2)
    @rule(job=JOB_NAMES, force=st.sampled_from([False, False, True]))
    def purge(self, job: str, force: bool) -> None:
        """Now and then somebody tidies up."""
        self.both.purge(job, force)

    # ---- time ----------------------------------------------------------------------------------------------------

    @rule(seconds=ADVANCES)
    def advance(self, seconds: float) -> None:
        """Time passes."""
        self.clock.advance(seconds)

    @rule(slots=st.sampled_from([1, 1, 2, 7, 13]))
    def until_a_slot(self, slots: int) -> None:
        """Time passes until just one of the next slots."""
        self.clock.advance((self.slot_ms(-slots) - to_ms(self.store.now())) / 1000)

    @rule(seconds=STEPS_S)
    def step(self, seconds: float) -> None:
        """Somebody sets the store's clock."""
        self.clock.step(seconds)

    @precondition(lambda self: self.reference.records)
    @rule(index=INDEX, edge_ms=st.sampled_from([-1, 0, 0, 1]))
    def expire(self, index: int, edge_ms: int) -> None:
        """The store's clock reaches the end of a run's lease, give or take a millisecond."""
        wait_ms = self.stored(index).lease_end_ms + edge_ms - to_ms(self.store.now())
        self.clock.advance(max(0, wait_ms) / 1000)

    # ---- judgement -----------------------------------------------------------------------------------------------

    @invariant()
    def the_same_runs_are_stored(self) -> None:
        """After every step."""
        self.both.compare()

    def teardown(self) -> None:
        """All decisions together keep the invariants, and the neighbouring namespace is as it was."""
        report = check(self.reference.entries)
        neighbours = [self.neighbour.runs(job) for job in JOBS]
        self.store.close()
        self.neighbour.close()
        assert not report.violations, [str(violation) for violation in report.violations]
        assert neighbours == self.neighbours

    # ---- helpers -------------------------------------------------------------------------------------------------

    def send(self, job: str, slot_ms: int, options: dict[str, Any], takeover_of: int | None) -> ClaimRequest:
        """Sends a new claim to both."""
        keep_ms = max(options["keep_ms"], options["max_late_ms"])
        given = {**options, "keep_ms": keep_ms, "takeover_of": takeover_of}
        request = ClaimRequest(job=job, slot_ms=slot_ms, token=next(self.tokens), **given)
        self.both.claim(request)
        return request

    def stored(self, index: int) -> Record:
        """One of the stored runs; small numbers are the latest slots."""
        records = sorted(self.reference.records.values(), key=lambda r: (r.slot_ms, r.job), reverse=True)
        return records[index % len(records)]

    def whose(self, sent: ClaimRequest, index: int | None) -> tuple[str, int, str]:
        """Job, slot and token of a stored run's latest attempt, or of that claim."""
        if index is None or not self.reference.records:
            return sent.job, sent.slot_ms, sent.token
        record = self.stored(index)
        return record.job, record.slot_ms, record.token


def share(sut: StoreUnderTest, number: int) -> int:
    """A server answers a hundred times slower than a dictionary: it gets a fifth; `--effort 5` makes up for that."""
    return number if sut.store.machine_clock else number // 5


@pytest.mark.timeout(900)  # Hypothesis takes its time to make a failure small
def test_a_store_answers_and_stores_what_the_rules_say(sut: StoreUnderTest, effort: int) -> None:
    """Whatever is asked of it, in whatever order."""
    numbers = itertools.count()
    run_state_machine_as_test(
        lambda: StoreAgainstRules(sut, f"n{next(numbers)}"),
        settings=settings(
            max_examples=share(sut, EXAMPLES) * effort,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            derandomize=effort == 1,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


class Mirror:
    """What a walk takes for its store: a real one beside the rules, its clock moved as the walk's own moves."""

    def __init__(self, sut: StoreUnderTest, namespace: str, start_ms: int) -> None:
        self.both = SideBySide(sut, namespace, [JOB])
        self.clock, self.now_ms = sut.clock, start_ms

    @property
    def entries(self) -> list[Entry]:
        """What the rules decided, at the store's times."""
        return self.both.reference.entries

    def at(self, now_ms: int) -> SideBySide:
        """Both, once the store's clock has gone on as the walk's did."""
        delta_s, self.now_ms = (now_ms - self.now_ms) / 1000, now_ms
        if delta_s >= 0:
            self.clock.advance(delta_s)
        else:
            self.clock.step(delta_s)
        return self.both

    def claim(self, request: ClaimRequest, now_ms: int) -> ClaimAnswer:
        """See Reference."""
        return self.at(now_ms).claim(request)

    def heartbeat(self, job: str, slot_ms: int, token: str, lease_ms: int, checkpoint: str | None, now_ms: int) -> bool:
        """See Reference."""
        return self.at(now_ms).heartbeat(job, slot_ms, token, lease_ms, checkpoint)

    def finish(
        self, job: str, slot_ms: int, token: str, status: Literal["success", "failed"], error: str | None, now_ms: int
    ) -> bool:
        """See Reference."""
        return self.at(now_ms).finish(job, slot_ms, token, status, error)

    def release(self, job: str, slot_ms: int, token: str, checkpoint: str | None, now_ms: int) -> bool:
        """See Reference."""
        return self.at(now_ms).release(job, slot_ms, token, checkpoint)

    def purge(self, job: str, force: bool, now_ms: int) -> int:
        """See Reference."""
        return self.at(now_ms).purge(job, force)


@pytest.mark.timeout(900)  # thousands of round trips, on a server
def test_a_store_goes_every_walk_as_the_rules_do(sut: StoreUnderTest, effort: int) -> None:
    """Seed by seed: the same answer to every message, the same stored runs at the end, and no invariant broken."""
    for seed in range(share(sut, WALKS) * effort):
        now_ms = to_ms(sut.store.now())
        start_ms = now_ms + -now_ms % GAP_MS
        sut.clock.advance((start_ms - now_ms) / 1000)
        mirror = Mirror(sut, f"walk-{seed}", start_ms)
        report = Walk(seed, store=mirror, start_ms=start_ms).report()
        mirror.both.compare()
        mirror.both.store.close()
        assert not report.violations, f"seed {seed}: {[str(violation) for violation in report.violations]}"


def test_a_request_and_its_options_say_the_same() -> None:
    """What SideBySide hands to the rules is what Store.claim makes of the options that it hands to the store."""
    from leaselib.stores._memory import MemoryStore

    seen: list[ClaimRequest] = []

    class Spy(MemoryStore):
        def _claim(self, request: ClaimRequest, timeout: float) -> ClaimAnswer:
            seen.append(request)
            return super()._claim(request, timeout)

    request = ClaimRequest("job", 5_000, "t", "r", 7_500, 2, "allow", 3_500, 99_001, 9, "manual", 4)
    Spy().claim(request.job, from_ms(request.slot_ms), request.token, **options_of(request))
    assert seen == [request]
    assert timedelta(seconds=options_of(request)["keep"]) == timedelta(milliseconds=99_001)
