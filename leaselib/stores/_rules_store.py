"""RulesStore: the operations of a store that executes `_rules` itself, inside a transaction of its own.

Owns nothing; MemoryStore and SQLiteStore bring the transaction. Whoever calls an operation runs it in its own thread;
the transaction is what keeps other threads and processes out.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal, Protocol

from leaselib import _rules
from leaselib._model import ClaimAnswer, ClaimRequest, JobMeta, Pong, Record, from_ms
from leaselib.stores._base import DEFAULT_TIMEOUT_S, Store


class Table(Protocol):
    """One open transaction on a namespace: what the rules need to know, and what they want written."""

    now_ms: int
    epoch: str

    def view(self, request: ClaimRequest) -> _rules.JobView: ...
    def meta(self, job: str) -> JobMeta: ...
    def set_meta(self, job: str, meta: JobMeta) -> None: ...
    def get(self, job: str, slot_ms: int) -> Record | None: ...
    def running(self, jobs: list[str]) -> list[Record]: ...
    def newest_ms(self, job: str, horizon_ms: int) -> int | None: ...
    def oldest_ended(self, job: str, before_ms: int, limit: int) -> tuple[int, ...]: ...
    def put(self, record: Record) -> None: ...
    def drop(self, job: str, slots: Iterable[int]) -> None: ...
    def newest(self, job: str, limit: int) -> list[Record]: ...
    def slots(self, job: str, ended_only: bool) -> tuple[int, ...]: ...
    def jobs(self) -> list[str]: ...


class RulesStore(Store):
    """A store on a transaction: reads a view, lets the rules decide, writes what they say."""

    @abc.abstractmethod
    def _transaction(self, timeout: float, *, write: bool) -> AbstractContextManager[Table]:
        """An exclusive transaction if `write`; its clock is read once the lock is held."""

    def _claim(self, request: ClaimRequest, timeout: float) -> ClaimAnswer:
        with self._transaction(timeout, write=True) as table:
            decision = _rules.claim(table.view(request), request, table.now_ms, table.epoch)
            for record in decision.puts:
                table.put(record)
            if decision.drop:
                table.drop(request.job, decision.drop)
            if decision.meta is not None:
                table.set_meta(request.job, decision.meta)
            return decision.answer

    def _heartbeat(
        self, job: str, slot_ms: int, token: str, lease_ms: int, checkpoint: str | None, timeout: float
    ) -> bool:
        with self._transaction(timeout, write=True) as table:
            renewed = _rules.heartbeat(table.get(job, slot_ms), token, lease_ms, checkpoint, table.now_ms)
            if renewed is not None:
                table.put(renewed)
            return renewed is not None

    def _finish(
        self,
        job: str,
        slot_ms: int,
        token: str,
        status: Literal["success", "failed"],
        error: str | None,
        timeout: float,
    ) -> bool:
        with self._transaction(timeout, write=True) as table:
            return self._finish_in(table, job, slot_ms, token, status, error)

    @staticmethod
    def _finish_in(
        table: Table, job: str, slot_ms: int, token: str, status: Literal["success", "failed"], error: str | None
    ) -> bool:
        accepted, ended = _rules.finish(table.get(job, slot_ms), token, status, error, table.now_ms)
        if ended is not None:
            table.put(ended)
            meta = table.meta(job)
            table.set_meta(job, replace(meta, ended=meta.ended + 1))
        return accepted

    def _release(self, job: str, slot_ms: int, token: str, checkpoint: str | None, timeout: float) -> bool:
        with self._transaction(timeout, write=True) as table:
            accepted, released = _rules.release(table.get(job, slot_ms), token, checkpoint, table.now_ms)
            if released is not None:
                table.put(released)
            return accepted

    def _unfinished(self, jobs: list[str], timeout: float) -> list[Record]:
        with self._transaction(timeout, write=False) as table:
            return table.running(jobs)

    def _get(self, job: str, slot_ms: int, timeout: float) -> Record | None:
        with self._transaction(timeout, write=False) as table:
            return table.get(job, slot_ms)

    def _runs(self, job: str, limit: int, timeout: float) -> list[Record]:
        with self._transaction(timeout, write=False) as table:
            return table.newest(job, limit)

    def _purge(self, job: str, force: bool, timeout: float) -> int:
        with self._transaction(timeout, write=True) as table:
            slots = table.slots(job, ended_only=not force)
            if slots:
                table.drop(job, slots)
                table.set_meta(job, _rules.purge(table.meta(job), slots))
            return len(slots)

    def jobs(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> list[str]:
        """See Store."""
        with self._transaction(timeout, write=False) as table:
            return table.jobs()

    def ping(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> Pong:
        """See Store."""
        with self._transaction(timeout, write=False) as table:
            return Pong(from_ms(table.now_ms), table.epoch)


def view(table: Table, request: ClaimRequest) -> _rules.JobView:
    """What a claim has to know, one thing after the other: for a table that has no faster way."""
    job, now_ms = request.job, table.now_ms
    meta, run = table.meta(job), table.get(job, request.slot_ms)
    limit = _rules.trim_limit(request, meta) if run is None else 0
    return _rules.JobView(
        meta=meta,
        run=run,
        running=tuple(r for r in table.running([job]) if r.slot_ms != request.slot_ms),
        newest_ms=table.newest_ms(job, _rules.horizon_ms(now_ms)),
        trimmable=table.oldest_ended(job, _rules.trim_before_ms(request, now_ms), limit) if limit else (),
    )
