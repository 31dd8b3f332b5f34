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
from leaselib.stores._memory import MemoryStore, MemoryTable

Told = Callable[[Entry], None]


class SimulatedStore(MemoryStore):
    """A MemoryStore that tells `told` each of its decisions, in its own order."""

    def __init__(self, clock: _clock.Clock, epoch: str, told: Told) -> None:
        super().__init__(clock=clock)
        self.epoch, self._told = epoch, told  # an epoch of its own: the usual one is drawn at random

    def _transaction(self, timeout: float, *, write: bool) -> _Written:
        self._written = _Written(self._jobs, self._clock.wall_ms(), self.epoch)  # the latest, for `_tell`
        return self._written

    def _claim(self, request: ClaimRequest, timeout: float) -> ClaimAnswer:
        answer = super()._claim(request, timeout)
        self._tell("claim", request.job, request.slot_ms, request.token, answer, request=request)
        return answer

    def _heartbeat(
        self, job: str, slot_ms: int, token: str, lease_ms: int, checkpoint: str | None, timeout: float
    ) -> bool:
        accepted = super()._heartbeat(job, slot_ms, token, lease_ms, checkpoint, timeout)
        self._tell("heartbeat", job, slot_ms, token, accepted, checkpoint=checkpoint)
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
        accepted = super()._finish(job, slot_ms, token, status, error, timeout)
        self._tell("finish", job, slot_ms, token, accepted, status=status, error=error)
        return accepted

    def _release(self, job: str, slot_ms: int, token: str, checkpoint: str | None, timeout: float) -> bool:
        accepted = super()._release(job, slot_ms, token, checkpoint, timeout)
        self._tell("release", job, slot_ms, token, accepted, checkpoint=checkpoint)
        return accepted

    def _tell(
        self,
        op: Literal["claim", "heartbeat", "finish", "release"],
        job: str,
        slot_ms: int,
        token: str,
        answer: ClaimAnswer | bool,
        **brought: Any,
    ) -> None:
        written = self._written
        puts, drops = tuple(written.puts), tuple(written.drops)
        self._told(Entry(op, job, written.now_ms, answer, puts, drops, slot_ms, token, **brought))

    def all_records(self) -> Iterable[Record]:
        """Every run that is stored, by job and slot."""
        for job in sorted(self._jobs):
            yield from (self._jobs[job].runs[slot] for slot in self._jobs[job].slots)

    def snapshot(self) -> dict[str, Any]:
        """Everything that is stored: what a replica has that hears nothing more from here on."""
        return _copied(self._jobs)

    def restore(self, snapshot: dict[str, Any]) -> None:
        """A failover: what was written after the snapshot is lost; what another failover lost since may be back."""
        lost = self._jobs
        self._jobs = _copied(snapshot)
        for job in sorted({*lost, *snapshot}):
            data = self._jobs.get(job)
            survivors = () if data is None else tuple(data.runs[slot] for slot in data.slots)
            loss = Entry("loss", job, self._clock.wall_ms(), puts=survivors)
            self._told(loss if data is None else replace(loss, floor_ms=data.meta.floor_ms))


class _Written(MemoryTable):
    """A transaction that remembers what was written in it. One thread uses the store, so that nothing is locked."""

    def __init__(self, jobs: dict[str, Any], now_ms: int, epoch: str) -> None:
        super().__init__(jobs, now_ms, epoch)
        self.puts: list[Record] = []
        self.drops: list[tuple[str, int]] = []

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def put(self, record: Record) -> None:
        """See MemoryTable."""
        self.puts.append(record)
        super().put(record)

    def drop(self, job: str, slots: Iterable[int]) -> None:
        """See MemoryTable."""
        slots = list(slots)
        self.drops += [(job, slot) for slot in slots]
        super().drop(job, slots)


def _copied(jobs: dict[str, Any]) -> dict[str, Any]:
    """A copy of the tables; the records in them are frozen."""
    return {
        name: replace(data, runs=dict(data.runs), slots=list(data.slots), running=set(data.running))
        for name, data in jobs.items()
    }
