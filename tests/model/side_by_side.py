"""SideBySide: a store and the reference, asked the same things; any difference is an AssertionError.

The rules are told the store's own time: from a claim's answer, or from what a heartbeat, finish or release left in the
run (their outcome doesn't depend on it). So it works on a server whose time passes by itself. One thread uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

from fix_stores import StoreUnderTest
from reference import Reference

from leaselib._model import ClaimAnswer, ClaimRequest, Run, from_ms, to_ms

TOLERANCE = timedelta(milliseconds=1)
"""Two readings of a server's clock may be rounded apart."""


def options_of(request: ClaimRequest) -> dict[str, Any]:
    """The arguments with which Store.claim makes this very request; all but job, slot and token."""
    return {
        "runner": request.runner,
        "lease": request.lease_ms / 1000,
        "max_attempts": request.max_attempts,
        "overlap": request.overlap,
        "max_late": request.max_late_ms / 1000,
        "keep": request.keep_ms / 1000,
        "history_size": request.history_size,
        "reason": request.reason,
        "takeover_of": request.takeover_of,
    }


class SideBySide:
    """One namespace of a store, and the rules on a dictionary.

    store: the client that is asked.
    jobs: the jobs whose stored runs are compared.
    """

    def __init__(self, sut: StoreUnderTest, namespace: str, jobs: Sequence[str]) -> None:
        self.store, self.jobs = sut.connect(namespace), list(jobs)
        self.reference = Reference(self.store.ping().epoch, namespace)

    def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """The answers are equal field for field."""
        before = self.store.now()
        answer = self.store.claim(request.job, from_ms(request.slot_ms), request.token, **options_of(request))
        self._decided_between(before, answer.now)
        expected = self.reference.claim(request, answer.now_ms)
        assert answer == expected
        return answer

    def heartbeat(self, job: str, slot_ms: int, token: str, lease_ms: int, checkpoint: str | None) -> bool:
        """Accepted or refused by both."""
        slot, now = from_ms(slot_ms), self.store.now()
        accepted = self.store.heartbeat(job, slot, token, lease_ms / 1000, checkpoint)
        run = self.store.get(job, slot)
        if accepted and run is not None:
            before, now = now, run.lease_end - timedelta(milliseconds=lease_ms)
            self._decided_between(before, now)
        assert accepted == self.reference.heartbeat(job, slot_ms, token, lease_ms, checkpoint, to_ms(now))
        return accepted

    def finish(
        self, job: str, slot_ms: int, token: str, status: Literal["success", "failed"], error: str | None
    ) -> bool:
        """Accepted or refused by both."""
        before, was = self.store.now(), self.store.get(job, from_ms(slot_ms))
        accepted = self.store.finish(job, from_ms(slot_ms), token, status, error)
        now = self._changed_at(before, was, self.store.get(job, from_ms(slot_ms)))
        assert accepted == self.reference.finish(job, slot_ms, token, status, error, to_ms(now))
        return accepted

    def release(self, job: str, slot_ms: int, token: str, checkpoint: str | None) -> bool:
        """Accepted or refused by both."""
        before, was = self.store.now(), self.store.get(job, from_ms(slot_ms))
        accepted = self.store.release(job, from_ms(slot_ms), token, checkpoint)
        now = self._changed_at(before, was, self.store.get(job, from_ms(slot_ms)))
        assert accepted == self.reference.release(job, slot_ms, token, checkpoint, to_ms(now))
        return accepted

    def purge(self, job: str, force: bool) -> int:
        """Both remove as many."""
        now_ms = to_ms(self.store.now())
        removed = self.store.purge(job, force=force)
        assert removed == self.reference.purge(job, force, now_ms)
        return removed

    def compare(self) -> None:
        """The same runs are stored, field for field, also as `unfinished` and `jobs` list them."""
        for job in self.jobs:
            expected = [record.to_run() for record in reversed(self.reference.of_job(job))]
            assert self.store.runs(job, limit=1000) == expected
        unfinished = [record.to_run() for record in self.reference.unfinished(self.jobs)]
        assert self.store.unfinished(self.jobs) == unfinished
        assert self.store.jobs() == self.reference.jobs()

    def _changed_at(self, before: datetime, was: Run | None, run: Run | None) -> datetime:
        """When the store decided on a finish or release, by what it left. If nothing changed, it doesn't matter."""
        if run is None or run == was:
            return before
        now = run.lease_end if run.ended_at is None else run.ended_at
        self._decided_between(before, now)
        return now

    def _decided_between(self, before: datetime, now: datetime) -> None:
        """The store decided by its clock at some moment of the call."""
        assert before - TOLERANCE <= now <= self.store.now() + TOLERANCE
