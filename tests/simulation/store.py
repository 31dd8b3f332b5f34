"""The simulated store: the rules on dictionaries, which writes down each decision, and can lose its newest writes.

One thread uses it. Its clock is the world's, moved by `store_offset_ms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from history import Entry

from leaselib import _clock
from leaselib._model import ClaimAnswer, ClaimRequest, Record
from leaselib.stores import MemoryStore

Told = Callable[[Entry], None]


class SimulatedStore(MemoryStore):
    """A MemoryStore that tells `told` each of its decisions, in its own order."""

    def __init__(self, clock: _clock.Clock, epoch: str, told: Told) -> None:
        super().__init__(clock=clock)
        self.epoch, self._told = epoch, told  # an epoch of its own: the usual one is drawn at random

    def _claim(self, request: ClaimRequest, timeout: float) -> ClaimAnswer:
        before = self._records(request.job)
        answer = super()._claim(request, timeout)
        after = self._records(request.job)
        puts = [record for slot, record in after.items() if before.get(slot) is not record]
        drops = tuple((request.job, slot) for slot in before if slot not in after)
        self._told(
            Entry(
                "claim",
                request.job,
                answer.now_ms,
                answer,
                tuple(puts),
                drops,
                request.slot_ms,
                request.token,
                request,
            )
        )
        return answer

    def _heartbeat(
        self, job: str, slot_ms: int, token: str, lease_ms: int, checkpoint: str | None, timeout: float
    ) -> bool:
        before = self._get(job, slot_ms, timeout)
        accepted = super()._heartbeat(job, slot_ms, token, lease_ms, checkpoint, timeout)
        self._tell("heartbeat", job, slot_ms, token, accepted, before, checkpoint=checkpoint)
        return accepted

    def _finish(
        self,
        job: str,
        slot_ms: int,
        token: str,
        status: Literal["success", "failed"],
        error: str | None,
        timeout: float,
    ) -> bool:
        before = self._get(job, slot_ms, timeout)
        accepted = super()._finish(job, slot_ms, token, status, error, timeout)
        self._tell("finish", job, slot_ms, token, accepted, before, status=status, error=error)
        return accepted

    def _release(self, job: str, slot_ms: int, token: str, checkpoint: str | None, timeout: float) -> bool:
        before = self._get(job, slot_ms, timeout)
        accepted = super()._release(job, slot_ms, token, checkpoint, timeout)
        self._tell("release", job, slot_ms, token, accepted, before, checkpoint=checkpoint)
        return accepted

    def _tell(
        self,
        op: Literal["heartbeat", "finish", "release"],
        job: str,
        slot_ms: int,
        token: str,
        accepted: bool,
        before: Record | None,
        **brought: Any,
    ) -> None:
        after = self._get(job, slot_ms, 0)
        puts = (after,) if after is not None and after is not before else ()
        self._told(Entry(op, job, self._clock.wall_ms(), accepted, puts, slot_ms=slot_ms, token=token, **brought))

    def _records(self, job: str) -> dict[int, Record]:
        data = self._jobs.get(job)
        return dict(data.runs) if data is not None else {}

    def all_records(self) -> Iterable[Record]:
        """Every run that is stored, by job and slot."""
        for job in sorted(self._jobs):
            yield from (self._jobs[job].runs[slot] for slot in self._jobs[job].slots)

    def snapshot(self) -> dict[str, Any]:
        """Everything that is stored: what a replica has that hears nothing more from here on."""
        return _copied(self._jobs)

    def restore(self, snapshot: dict[str, Any]) -> None:
        """A failover: what was written after the snapshot is lost."""
        lost = self._jobs
        self._jobs = _copied(snapshot)
        for job in lost:
            data = self._jobs.get(job)
            survivors = () if data is None else tuple(data.runs[slot] for slot in data.slots)
            loss = Entry("loss", job, self._clock.wall_ms(), puts=survivors)
            self._told(loss if data is None else replace(loss, floor_ms=data.meta.floor_ms))


def _copied(jobs: dict[str, Any]) -> dict[str, Any]:
    """A copy of the tables; the records in them are frozen."""
    return {
        name: replace(data, runs=dict(data.runs), slots=list(data.slots), running=set(data.running))
        for name, data in jobs.items()
    }
