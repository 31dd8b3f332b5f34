"""MemoryStore: the rules on dictionaries, for tests and for programs of a single process.

Owns all its data, guarded by one lock; any thread may call it.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from leaselib import _clock, _random, _rules
from leaselib._model import ClaimRequest, JobMeta, Record
from leaselib.errors import StoreError
from leaselib.stores import _rules_store
from leaselib.stores._rules_store import RulesStore


@dataclass
class _Job:
    meta: JobMeta = field(default_factory=JobMeta)
    runs: dict[int, Record] = field(default_factory=dict)
    slots: list[int] = field(default_factory=list)  # the keys of `runs`, sorted
    running: set[int] = field(default_factory=set)


class MemoryStore(RulesStore):
    """Keeps runs in this process's memory: for tests, and for a program that runs as one process.

    Its clock is the machine's. After a fork, parent and child each have a copy of their own.

    Args:
        namespace: recorded for symmetry with other stores; each MemoryStore is its own world anyway.
        clock: what to read the time from; tests hand in their own.
    """

    machine_clock = True

    def __init__(self, namespace: str = "default", *, clock: _clock.Clock = _clock.SYSTEM) -> None:
        super().__init__(namespace)
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self.epoch = f"{clock.wall_ms()}-{_random.SYSTEM.token()}"

    @contextmanager
    def _transaction(self, timeout: float, *, write: bool) -> Iterator[MemoryTable]:  # noqa: ARG002
        if not self._lock.acquire(timeout=timeout):
            raise StoreError(f"the MemoryStore's lock was not free within {timeout} s", transient=True)
        try:
            yield MemoryTable(self._jobs, self._clock.wall_ms(), self.epoch)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Does nothing: there are no connections."""

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"MemoryStore(namespace={self.namespace!r})"


class MemoryTable:
    """The rules' window on the dictionaries, while the lock is held. The rules write only after they have decided."""

    def __init__(self, jobs: dict[str, _Job], now_ms: int, epoch: str) -> None:
        self._jobs, self.now_ms, self.epoch = jobs, now_ms, epoch

    def _job(self, job: str) -> _Job:
        return self._jobs.get(job) or _Job()

    def view(self, request: ClaimRequest) -> _rules.JobView:
        return _rules_store.view(self, request)

    def meta(self, job: str) -> JobMeta:
        return self._job(job).meta

    def set_meta(self, job: str, meta: JobMeta) -> None:
        self._jobs.setdefault(job, _Job()).meta = meta

    def get(self, job: str, slot_ms: int) -> Record | None:
        return self._job(job).runs.get(slot_ms)

    def running(self, jobs: list[str]) -> list[Record]:
        found = [data.runs[slot] for name in jobs for data in [self._job(name)] for slot in data.running]
        return sorted(found, key=lambda r: (r.slot_ms, r.job))

    def newest_ms(self, job: str, horizon_ms: int) -> int | None:
        slots = self._job(job).slots
        index = bisect.bisect_right(slots, horizon_ms)
        return slots[index - 1] if index else None

    def oldest_ended(self, job: str, before_ms: int, limit: int) -> tuple[int, ...]:
        data = self._job(job)
        found: list[int] = []
        for slot in data.slots:
            if slot >= before_ms or len(found) == limit:
                break
            if slot not in data.running:
                found.append(slot)
        return tuple(found)

    def put(self, record: Record) -> None:
        data = self._jobs.setdefault(record.job, _Job())
        if record.slot_ms not in data.runs:
            bisect.insort(data.slots, record.slot_ms)
        data.runs[record.slot_ms] = record
        if record.status == "running":
            data.running.add(record.slot_ms)
        else:
            data.running.discard(record.slot_ms)

    def drop(self, job: str, slots: Iterable[int]) -> None:
        data = self._jobs[job]
        for slot in slots:
            del data.runs[slot]
            data.running.discard(slot)
            data.slots.remove(slot)

    def newest(self, job: str, limit: int) -> list[Record]:
        data = self._job(job)
        return [data.runs[slot] for slot in reversed(data.slots[-limit:] if limit > 0 else [])]

    def slots(self, job: str, ended_only: bool) -> tuple[int, ...]:
        data = self._job(job)
        return tuple(slot for slot in data.slots if not ended_only or slot not in data.running)

    def jobs(self) -> list[str]:
        return sorted(self._jobs)
