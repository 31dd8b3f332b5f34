"""Mutants: the rules with one mistake each, and the invariants of which at least one must catch it.

Each mutant replaces functions of `leaselib._rules` through pytest's monkeypatch, for the length of one test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from leaselib import _rules
from leaselib._model import Record

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """A mistake, and what must notice it. walks: so many random walks are enough, with room to spare."""

    name: str
    caught_by: frozenset[str]
    patch: Patch
    walks: int = 400


MUTANTS: list[Mutant] = []


def mutant(*caught_by: str, walks: int = 400) -> Callable[[Patch], Patch]:
    """Adds a mutant that at least one of these invariants must catch."""

    def add(patch: Patch) -> Patch:
        MUTANTS.append(Mutant(patch.__name__, frozenset(caught_by), patch, walks))
        return patch

    return add


def _wrap(patch: pytest.MonkeyPatch, name: str, wrapper: Callable[..., Any]) -> None:
    """Replaces a function of the rules by `wrapper(original, *arguments)`, the arguments in their order."""
    original = getattr(_rules, name)
    signature = inspect.signature(original)
    patch.setattr(_rules, name, lambda *args, **named: wrapper(original, *signature.bind(*args, **named).args))


def _any_token(run: Record | None, token: str) -> str:
    return token if run is None else run.token


# ---- claims ----------------------------------------------------------------------------------------------------------


@mutant("S14", "S2")
def no_same_token_rule(patch: pytest.MonkeyPatch) -> None:
    """A claim sent again is judged as anybody's: once the lease ran out it starts another attempt."""
    _wrap(patch, "_claim_existing", lambda f, view, run, *rest: f(view, replace(run, token="?"), *rest))


@mutant("S5")
def won_again_after_a_release(patch: pytest.MonkeyPatch) -> None:
    """A claim sent again renews the lease that its runner has released."""

    def existing(f: Any, view: Any, run: Record, request: Any, *rest: Any) -> Any:
        if run.token == request.token:
            run = replace(run, released=False)
        return f(view, run, request, *rest)

    _wrap(patch, "_claim_existing", existing)


@mutant("S1")
def no_overlap_check(patch: pytest.MonkeyPatch) -> None:
    """Nobody is in the way."""
    patch.setattr(_rules, "_live_one", lambda running, now_ms: None)


@mutant("S1")
def overlap_forgets_runs_near_their_lease_end(patch: pytest.MonkeyPatch) -> None:
    """A run whose lease ends within a second is thought dead."""
    _wrap(patch, "_live_one", lambda f, running, now_ms: f(running, now_ms + 1000))


@mutant("S1")
def dead_runs_are_left_running(patch: pytest.MonkeyPatch) -> None:
    """A start doesn't interrupt the dead ones, and their slow runners renew."""
    patch.setattr(_rules, "_dooms", lambda *_: False)


@mutant("S3", "S1")
def takeover_while_the_lease_is_live(patch: pytest.MonkeyPatch) -> None:
    """A backup doesn't wait for the lease end."""

    def existing(f: Any, view: Any, run: Record, request: Any, now_ms: int, epoch: str) -> Any:
        if request.takeover_of == run.attempt and run.token != request.token:
            run = replace(run, lease_end_ms=min(run.lease_end_ms, now_ms))
        return f(view, run, request, now_ms, epoch)

    _wrap(patch, "_claim_existing", existing)


@mutant("S7", walks=2_000)
def no_superseded(patch: pytest.MonkeyPatch) -> None:
    """Slots may start out of order."""
    patch.setattr(_rules, "_newer_started", lambda *_: False)


@mutant("S8", walks=2_000)
def dead_runs_are_left_running_and_may_be_taken_over(patch: pytest.MonkeyPatch) -> None:
    """Two rules that cover each other, both left out."""
    patch.setattr(_rules, "_dooms", lambda *_: False)
    patch.setattr(_rules, "_newer_started", lambda *_: False)


@mutant("S10")
def no_max_attempts(patch: pytest.MonkeyPatch) -> None:
    """A run is started for ever."""
    _wrap(
        patch,
        "_claim_existing",
        lambda f, view, run, request, *rest: f(view, run, replace(request, max_attempts=10**6), *rest),
    )


@mutant("S10")
def one_attempt_too_many(patch: pytest.MonkeyPatch) -> None:
    """Off by one."""
    _wrap(
        patch,
        "_claim_existing",
        lambda f, view, run, request, *rest: f(
            view, run, replace(request, max_attempts=request.max_attempts + 1), *rest
        ),
    )


@mutant("S10", walks=2_000)
def a_release_counts_twice(patch: pytest.MonkeyPatch) -> None:
    """Each hand-over gives back one attempt too many."""

    def release(f: Any, run: Record | None, *rest: Any) -> Any:
        accepted, record = f(run, *rest)
        return accepted, None if record is None else replace(record, handovers=record.handovers + 1)

    _wrap(patch, "release", release)


@mutant("S9", walks=2_000)
def no_floor(patch: pytest.MonkeyPatch) -> None:
    """What was trimmed or purged is forgotten."""
    _wrap(patch, "_claim_new", lambda f, view, *rest: f(replace(view, meta=replace(view.meta, floor_ms=None)), *rest))


@mutant("S9", walks=2_000)
def purge_forgets_its_floor(patch: pytest.MonkeyPatch) -> None:
    """A purge leaves no trace of the slots that it removed."""
    patch.setattr(_rules, "purge", lambda meta, slots: replace(meta, ended=0))


@mutant("S11")
def no_lateness(patch: pytest.MonkeyPatch) -> None:
    """Claims that travelled for long start stale runs."""
    patch.setattr(_rules, "LATE_TOLERANCE_MS", 10**9)


@mutant("S11", walks=2_000)
def a_millisecond_too_late(patch: pytest.MonkeyPatch) -> None:
    """Off by one at the edge."""
    patch.setattr(_rules, "LATE_TOLERANCE_MS", _rules.LATE_TOLERANCE_MS + 1)


@mutant("S12")
def no_early(patch: pytest.MonkeyPatch) -> None:
    """An instance whose clock is fast starts slots that aren't due."""
    patch.setattr(_rules, "EARLY_MS", 10**9)


@mutant("S13")
def live_runs_are_interrupted(patch: pytest.MonkeyPatch) -> None:
    """A start of an `allow` job ends the live ones too."""

    def won(f: Any, view: Any, request: Any, *rest: Any) -> Any:
        expired = tuple(replace(r, lease_end_ms=r.lease_end_ms - 10**6) for r in view.running)
        decision = f(replace(view, running=expired), request, *rest)
        restored = tuple(
            r if r.slot_ms == request.slot_ms else replace(r, lease_end_ms=r.lease_end_ms + 10**6)
            for r in decision.puts
        )
        return replace(decision, puts=restored)

    _wrap(patch, "_won", won)


@mutant("S13")
def interrupted_with_an_attempt_left(patch: pytest.MonkeyPatch) -> None:
    """Off by one, the other way."""
    _wrap(
        patch,
        "_claim_existing",
        lambda f, view, run, request, *rest: f(
            view, run, replace(request, max_attempts=request.max_attempts - 1), *rest
        ),
    )


@mutant("S20")
def fence_is_the_clock(patch: pytest.MonkeyPatch) -> None:
    """It repeats within a millisecond, and goes back with the clock."""
    _wrap(patch, "_won", lambda f, view, *rest: f(replace(view, meta=replace(view.meta, fence=-(10**9))), *rest))


@mutant("S20", walks=2_000)
def purge_forgets_the_fence(patch: pytest.MonkeyPatch) -> None:
    """The job begins anew; the clock alone doesn't make up for it."""
    _wrap(patch, "purge", lambda f, meta, slots: replace(f(meta, slots), fence=0))


@mutant("S21")
def checkpoint_is_lost_at_a_takeover(patch: pytest.MonkeyPatch) -> None:
    """The next attempt starts from nothing."""

    def won(f: Any, view: Any, request: Any, now_ms: int, epoch: str, run: Record | None) -> Any:
        return f(view, request, now_ms, epoch, None if run is None else replace(run, checkpoint=None))

    _wrap(patch, "_won", won)


@mutant("S2")
def attempts_are_not_numbered_on(patch: pytest.MonkeyPatch) -> None:
    """A hand-over repeats the number of its attempt."""

    def won(f: Any, view: Any, request: Any, now_ms: int, epoch: str, run: Record | None) -> Any:
        if run is not None and run.released:
            run = replace(run, attempt=run.attempt - 1)
        return f(view, request, now_ms, epoch, run)

    _wrap(patch, "_won", won)


@mutant("S28")
def answers_to_another_question(patch: pytest.MonkeyPatch) -> None:
    """A refusal names the token of the run in the way."""

    def claim(f: Any, *arguments: Any) -> Any:
        decision = f(*arguments)
        answer = decision.answer
        if answer.outcome == "running":
            answer = replace(answer, token=answer.record.token)
        return replace(decision, answer=answer)

    _wrap(patch, "claim", claim)


# ---- trimming --------------------------------------------------------------------------------------------------------


@mutant("S22")
def trims_too_young(patch: pytest.MonkeyPatch) -> None:
    """A run goes although a late claim could still ask for it."""
    patch.setattr(_rules, "trim_before_ms", lambda request, now_ms: now_ms)


@mutant("S22", walks=2_000)
def trims_one_too_many(patch: pytest.MonkeyPatch) -> None:
    """History is one shorter than asked for."""
    _wrap(
        patch, "trim_limit", lambda f, request, meta: f(replace(request, history_size=request.history_size - 1), meta)
    )


# ---- heartbeat, finish, release --------------------------------------------------------------------------------------


@mutant("S4")
def heartbeat_ignores_the_token(patch: pytest.MonkeyPatch) -> None:
    """Anybody renews."""
    _wrap(patch, "heartbeat", lambda f, run, token, *rest: f(run, _any_token(run, token), *rest))


@mutant("S5", "S4")
def heartbeat_ignores_the_release(patch: pytest.MonkeyPatch) -> None:
    """One that was sent before the release takes it back."""
    _wrap(patch, "heartbeat", lambda f, run, *rest: f(run and replace(run, released=False), *rest))


@mutant("S6", "S4")
def heartbeat_revives_an_ended_run(patch: pytest.MonkeyPatch) -> None:
    """Whatever its status."""
    _wrap(patch, "heartbeat", lambda f, run, *rest: f(run and replace(run, status="running"), *rest))


@mutant("S21")
def heartbeat_drops_the_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """One without a checkpoint forgets the stored one."""

    def heartbeat(f: Any, run: Any, token: str, lease_ms: int, checkpoint: str | None, now_ms: int) -> Any:
        record = f(run, token, lease_ms, checkpoint, now_ms)
        return record and replace(record, checkpoint=checkpoint)

    _wrap(patch, "heartbeat", heartbeat)


@mutant("S4")
def finish_ignores_the_token(patch: pytest.MonkeyPatch) -> None:
    """A runner that lost its run ends it."""
    _wrap(patch, "finish", lambda f, run, token, *rest: f(run, _any_token(run, token), *rest))


@mutant("S4")
def finish_ignores_the_release(patch: pytest.MonkeyPatch) -> None:
    """A run that was handed over is ended by the one that handed it over."""
    _wrap(patch, "finish", lambda f, run, *rest: f(run and replace(run, released=False), *rest))


@mutant("S6", "S4")
def the_last_finish_counts(patch: pytest.MonkeyPatch) -> None:
    """A second finish with another status changes the run."""
    _wrap(patch, "finish", lambda f, run, *rest: f(run and replace(run, status="running"), *rest))


@mutant("S4")
def release_ignores_the_token(patch: pytest.MonkeyPatch) -> None:
    """A runner that lost its run hands over its successor's."""
    _wrap(patch, "release", lambda f, run, token, *rest: f(run, _any_token(run, token), *rest))


@mutant("S4")
def a_repeated_release_counts_again(patch: pytest.MonkeyPatch) -> None:
    """And moves the time of the hand-over."""
    _wrap(patch, "release", lambda f, run, *rest: f(run and replace(run, released=False), *rest))


# ---- isolation -------------------------------------------------------------------------------------------------------


@mutant("S24")
def a_heartbeat_is_written_to_another_job(patch: pytest.MonkeyPatch) -> None:
    """As a name that was taken for a pattern would do."""

    def heartbeat(f: Any, *arguments: Any) -> Any:
        record = f(*arguments)
        return record and replace(record, job=record.job + "*")

    _wrap(patch, "heartbeat", heartbeat)
