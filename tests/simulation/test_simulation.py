"""The simulation holds, is the same for the same seed, and catches decisions that are wrong.

`python -m tests.simulation` runs the 2,000 seeds of the gate; here are as many as take seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from harness import START_MS, StoreClock, World
from history import Entry

from leaselib import _backup, _rules
from leaselib._attempt import Attempt, Step
from leaselib._model import from_ms
from leaselib._options import job_options
from leaselib._planner import Planner

from . import checks, pairs, runner
from .plan import FAULTS, LAST_FAULTS, SLOTS, plan
from .store import SimulatedStore

FIRST = 10_000
"""Other seeds than those of the gate."""


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 40))
def test_every_invariant_holds_in_a_history(seed: int) -> None:
    """A random subset of the faults, at random times; then calm, in which the bounds of liveness hold."""
    result = runner.one(seed)
    assert not result.problems, runner.report(result)


def test_a_history_has_two_hundred_slots_or_more() -> None:
    """Over all its jobs."""
    for seed in range(50):
        made = plan(seed)
        assert sum(made.end_ms // job.every_ms for job in made.jobs) >= SLOTS


def test_the_margin_and_a_heartbeats_time_out_are_drawn_by_every_branch_of_their_rules() -> None:
    """Which of lease and heartbeat decides: until seeds drew the heartbeat too, half of these rules was never run."""
    options = [job_options(job.options) for seed in range(50) for job in plan(seed).jobs]
    assert {o.margin_ms < o.heartbeat_ms for o in options} == {True, False}
    assert {o.beat_timeout_ms < o.heartbeat_ms for o in options} == {True, False}


def test_every_kind_of_fault_is_drawn() -> None:
    """None is left out for good."""
    assert {fault.kind for seed in range(200) for fault in plan(seed).faults} == {*FAULTS, *LAST_FAULTS}


def test_one_seed_gives_one_history_to_the_byte() -> None:
    """And another seed another."""
    digests = [checks.run(plan(seed))[0].digest() for seed in (3, 3, 4)]
    assert digests[0] == digests[1] != digests[2]


def test_a_failover_that_brings_back_what_an_earlier_one_lost_says_so() -> None:
    """Seed 952: the judge knew nothing of a job that only the second replica had."""
    entries: list[Entry] = []
    store = SimulatedStore(StoreClock(World()), "1-1", entries.append)
    empty = store.snapshot()
    store.claim("job", from_ms(START_MS), "a", "runner")
    full = store.snapshot()
    store.restore(empty)
    store.restore(full)
    assert [(entry.op, entry.job, len(entry.puts)) for entry in entries] == [
        ("claim", "job", 1),
        ("loss", "job", 0),
        ("loss", "job", 1),
    ]


def _no_overlap(running: Any, now_ms: int) -> None:
    """Nothing is ever in the way."""


def _no_wait(self: Any, watch: Any, boot_ms: int, at_boot_ms: int | None = None) -> None:
    """No check is ever planned."""


def test_a_decision_that_raises_is_reported_with_its_seed_and_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any broken invariant is; it was a bare traceback."""
    monkeypatch.setattr(Planner, "_won", lambda self, claim, answer, boot_ms: 1 // 0)
    result = runner.one(FIRST)
    assert [identifier for identifier, _ in result.problems] == ["crash"]
    text = runner.report(result)
    assert "ZeroDivisionError" in text
    assert f"replay: python -m tests.simulation --seed {FIRST} --faults none" in text


@pytest.mark.parametrize("first", range(4))
def test_pairs_of_faults_at_the_steps_of_one_life_break_nothing(first: int) -> None:
    """Some of them; `python -m tests.simulation --pairs` runs them all."""
    assert [(name, problems) for name, problems in pairs.sweep(every=29, first=first) if problems] == []


def _wins_twice(self: Planner, claim: Any, answer: Any, boot_ms: int, won: Any = Planner._won) -> Any:
    """A won claim is begun by two workers."""
    effects = won(self, claim, answer, boot_ms)
    return [*effects, effects[-1]]


def _silent_refusal(self: Attempt, boot_ms: int) -> Any:
    """The handler isn't told."""
    self._refused = True
    return self._lose(boot_ms, "refused")


def _forgotten_stop(self: Planner, boot_ms: int, stop: Any = Planner.stop) -> Any:
    """Claims go on after it."""
    effects = stop(self, boot_ms)
    self.stopping = False
    return effects


def _start_unless_refused(self: Attempt, boot_ms: int) -> Step:
    """However late it is."""
    return Step("done" if self._refused or self._stopping or self.turned_down is not None else "start")


_BEAT_ANSWERED = Attempt.beat_answered


def _renewed_by_the_answer(self: Attempt, accepted: bool, sent_ms: int, now_ms: int) -> Any:
    """The deadline counts from when the answer came, not from just before the heartbeat was sent."""
    return _BEAT_ANSWERED(self, accepted, now_ms, now_ms)


_CLAIM_EXISTING = _rules._claim_existing


def _ended_too_soon(view: Any, run: Any, request: Any, now_ms: int, epoch: str) -> Any:
    """Others are told `finished` of a run that is alive, so that nobody watches it."""
    decision = _CLAIM_EXISTING(view, run, request, now_ms, epoch)
    if decision.answer.outcome != "running":
        return decision
    return replace(decision, answer=replace(decision.answer, outcome="finished"))


MUTANTS: dict[str, tuple[list[tuple[Any, str, Any]], set[str]]] = {
    "no overlap check": ([(_rules, "_live_one", _no_overlap)], {"S1"}),
    "no own deadline": ([(Attempt, "expired", lambda self, boot_ms: False)], {"S1", "S17"}),
    "backups that never check": ([(_backup.Backups, "arm", _no_wait)], {"L2"}),
    "slots are forgotten": ([(Planner, "_slot_due", lambda self, job, store_ms, boot_ms: [])], {"L1"}),
    "refusals are not told": ([(Attempt, "_lose", lambda self, boot_ms, reason: [])], {"S19"}),
    "trust counts from the answer": ([(Attempt, "beat_answered", _renewed_by_the_answer)], {"S17"}),
    "a handler starts late": ([(Attempt, "before_start", _start_unless_refused)], {"S15"}),
    "a handler starts twice": ([(Planner, "_won", _wins_twice)], {"S16"}),
    "handlers aren't told of refusals": ([(Attempt, "refuse", _silent_refusal)], {"S18"}),
    "claims after stop": ([(Planner, "stop", _forgotten_stop)], {"S25"}),
    "watches never end": ([(_backup.Backups, "drop", lambda self, job, slot_ms: None)], {"L9"}),
    "live runs are told finished": ([(_rules, "_claim_existing", _ended_too_soon)], {"L1"}),
    "workers are lost": ([(Planner, "_unsent", lambda self, claim: None)], {"L12"}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_decisions_are_caught_and_shrunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a hundred seeds; what is left of the faults still shows it, and replays."""
    patches, wanted = MUTANTS[name]
    for where, what, instead in patches:
        monkeypatch.setattr(where, what, instead)
    seed = _first(lambda found: bool(found & wanted))
    judge: Callable[..., set[str]] = lambda made: runner.broken(made) & wanted  # noqa: E731
    made, kept = runner.shrunk(plan(seed), judge)
    assert judge(made)
    assert judge(plan(seed).keeping(kept))
    for index in range(len(kept)):
        assert not judge(plan(seed).keeping(kept[:index] + kept[index + 1 :])), "it could be shrunk further"


def _first(wrong: Callable[[set[str]], bool]) -> int:
    for seed in range(100):
        if wrong(runner.broken(plan(seed))):
            return seed
    pytest.fail("no seed showed it")
