"""Bench: what an instance does to a store, in few words. One per test, called from the test's thread.

Slots are given as seconds from the store's time when the test began. Each claim gets a fresh token unless it is given
one, and each answer is checked to name the token that it answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Literal

from fix_stores import StoreUnderTest

from leaselib._model import ClaimAnswer, Run

JOB = "job"


def ms(milliseconds: int) -> timedelta:
    """So many milliseconds."""
    return timedelta(milliseconds=milliseconds)


class Bench:
    """A store, its clock, and the moment at which the test began."""

    def __init__(self, sut: StoreUnderTest) -> None:
        self.store, self.clock, self.connect = sut.store, sut.clock, sut.connect
        self.base = self.store.now()
        self._tokens = (f"token-{n}" for n in itertools.count(1))

    # ---- time ----------------------------------------------------------------------------------------------------

    def slot(self, seconds: float = 0.0) -> datetime:
        """The slot so many seconds after the test began."""
        return self.base + ms(round(seconds * 1000))

    def set_now(self, instant: datetime) -> None:
        """Moves the store's clock to that instant (on a server, time goes on from there)."""
        delta = (instant - self.store.now()) / timedelta(seconds=1)
        if delta >= 0:
            self.clock.advance(delta)
        else:
            self.clock.step(delta)

    def expire(self, answer: ClaimAnswer) -> None:
        """Lets time pass until the stored lease of that answer's run has just run out."""
        self.set_now(self.run_of(answer).lease_end)

    # ---- operations ----------------------------------------------------------------------------------------------

    def token(self) -> str:
        """One never used before in this test."""
        return next(self._tokens)

    def claim(
        self, at: float = 0.0, *, token: str | None = None, job: str = JOB, runner: str = "runner-1", **options: Any
    ) -> ClaimAnswer:
        """Claims the slot `at` seconds after the test began."""
        token = self.token() if token is None else token
        answer = self.store.claim(job, self.slot(at), token, runner, **options)
        assert answer.token == token, "an answer names the token that it answers"
        return answer

    def win(self, at: float = 0.0, **options: Any) -> ClaimAnswer:
        """A claim that must be won."""
        answer = self.claim(at, **options)
        assert answer.outcome == "won", answer
        return answer

    def again(self, answer: ClaimAnswer, **options: Any) -> ClaimAnswer:
        """Sends that answer's claim once more."""
        run = run_in(answer)
        return self.store.claim(run.job, run.slot, answer.token, run.runner, **{"lease": run.lease, **options})

    def beat(self, answer: ClaimAnswer, lease: float = 30.0, checkpoint: str | None = None) -> bool:
        """A heartbeat with that answer's token."""
        return self.store.heartbeat(run_in(answer).job, run_in(answer).slot, answer.token, lease, checkpoint)

    def finish(
        self, answer: ClaimAnswer, status: Literal["success", "failed"] = "success", error: str | None = None
    ) -> bool:
        """A finish with that answer's token."""
        return self.store.finish(run_in(answer).job, run_in(answer).slot, answer.token, status, error)

    def release(self, answer: ClaimAnswer, checkpoint: str | None = None) -> bool:
        """A release with that answer's token."""
        return self.store.release(run_in(answer).job, run_in(answer).slot, answer.token, checkpoint)

    def ended(self, at: float = 0.0, **options: Any) -> ClaimAnswer:
        """A run that was won and finished."""
        answer = self.win(at, **options)
        assert self.finish(answer)
        return answer

    # ---- what is stored ------------------------------------------------------------------------------------------

    def run(self, at: float = 0.0, job: str = JOB) -> Run:
        """The stored run of that slot, which must exist."""
        run = self.store.get(job, self.slot(at))
        assert run is not None, f"no run of {job!r} at {at}"
        return run

    def run_of(self, answer: ClaimAnswer) -> Run:
        """The stored run of that answer, which must exist."""
        run = self.store.get(run_in(answer).job, run_in(answer).slot)
        assert run is not None, f"no run of {answer}"
        return run

    def slots(self, job: str = JOB) -> list[float]:
        """The slots of the job's stored runs, oldest first, in seconds after the test began."""
        return sorted((run.slot - self.base) / timedelta(seconds=1) for run in self.store.runs(job, limit=10_000))

    @contextmanager
    def nothing_changes(self, *jobs: str) -> Iterator[None]:
        """Whatever happens inside leaves every stored run of these jobs as it was."""
        names = jobs or (JOB,)
        before = {job: self.store.runs(job, limit=10_000) for job in names}
        yield
        assert {job: self.store.runs(job, limit=10_000) for job in names} == before


def run_in(answer: ClaimAnswer) -> Run:
    """The run that an answer carries, which must be there."""
    run = answer.run
    assert run is not None, answer
    return run
