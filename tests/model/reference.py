"""Reference: a store of the simplest kind, a dictionary and the pure rules, that writes down each of its decisions.

It keeps nothing but the records and each job's fence and floor: whatever a claim has to know is found by looking at all
of them, so it can't share a mistake with a store's indexes and counters. One thread uses it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from history.base import Entry

from leaselib import _rules
from leaselib._model import ClaimAnswer, ClaimRequest, JobMeta, Record


class Reference:
    """The rules side by side with a store. `now_ms` is handed in: the store's own, wherever it has been told."""

    def __init__(self, epoch: str, namespace: str = "default") -> None:
        self.epoch, self.namespace = epoch, namespace
        self.records: dict[tuple[str, int], Record] = {}
        self.metas: dict[str, JobMeta] = {}
        self.entries: list[Entry] = []

    def of_job(self, job: str) -> list[Record]:
        """The job's records, oldest slot first."""
        return [record for _, record in sorted(self.records.items()) if record.job == job]

    def jobs(self) -> list[str]:
        """The names of the jobs that ever started a run."""
        return sorted(self.metas)

    def unfinished(self, jobs: list[str]) -> list[Record]:
        """The running records of these jobs, by slot and job."""
        found = [r for r in self.records.values() if r.job in jobs and r.status == "running"]
        return sorted(found, key=lambda r: (r.slot_ms, r.job))

    def view(self, request: ClaimRequest, now_ms: int) -> _rules.JobView:
        """What the rules want to know, by brute force."""
        mine = self.of_job(request.job)
        ended = [r.slot_ms for r in mine if r.status != "running"]
        meta = self._meta(request.job)
        run = self.records.get((request.job, request.slot_ms))
        limit = _rules.trim_limit(request, meta) if run is None else 0
        before_ms = _rules.trim_before_ms(request, now_ms)
        return _rules.JobView(
            meta=meta,
            run=run,
            running=tuple(r for r in mine if r.status == "running" and r.slot_ms != request.slot_ms),
            newest_ms=max((r.slot_ms for r in mine if r.slot_ms <= _rules.horizon_ms(now_ms)), default=None),
            trimmable=tuple(slot for slot in ended if slot < before_ms)[:limit],
        )

    def claim(self, request: ClaimRequest, now_ms: int) -> ClaimAnswer:
        """See Store.claim."""
        decision = _rules.claim(self.view(request, now_ms), request, now_ms, self.epoch)
        for record in decision.puts:
            self.records[record.job, record.slot_ms] = record
        for slot_ms in decision.drop:
            del self.records[request.job, slot_ms]
        if decision.meta is not None:
            self.metas[request.job] = decision.meta
            assert decision.meta == self._meta(request.job), "the rules count the ended runs wrongly"
        drops = tuple((request.job, slot) for slot in decision.drop)
        self._log(
            Entry(
                op="claim",
                job=request.job,
                now_ms=now_ms,
                answer=decision.answer,
                puts=decision.puts,
                drops=drops,
                slot_ms=request.slot_ms,
                token=request.token,
                request=request,
            )
        )
        return decision.answer

    def heartbeat(self, job: str, slot_ms: int, token: str, lease_ms: int, checkpoint: str | None, now_ms: int) -> bool:
        """See Store.heartbeat."""
        renewed = _rules.heartbeat(self.records.get((job, slot_ms)), token, lease_ms, checkpoint, now_ms)
        entry = Entry("heartbeat", job, now_ms, renewed is not None, slot_ms=slot_ms, token=token)
        return self._write(replace(entry, checkpoint=checkpoint), renewed)

    def finish(
        self,
        job: str,
        slot_ms: int,
        token: str,
        status: Literal["success", "failed"],
        error: str | None,
        now_ms: int,
    ) -> bool:
        """See Store.finish."""
        accepted, ended = _rules.finish(self.records.get((job, slot_ms)), token, status, error, now_ms)
        entry = Entry("finish", job, now_ms, accepted, slot_ms=slot_ms, token=token)
        return self._write(replace(entry, status=status, error=error), ended)

    def release(self, job: str, slot_ms: int, token: str, checkpoint: str | None, now_ms: int) -> bool:
        """See Store.release."""
        accepted, released = _rules.release(self.records.get((job, slot_ms)), token, checkpoint, now_ms)
        entry = Entry("release", job, now_ms, accepted, slot_ms=slot_ms, token=token)
        return self._write(replace(entry, checkpoint=checkpoint), released)

    def purge(self, job: str, force: bool, now_ms: int) -> int:
        """See Store.purge."""
        slots = tuple(r.slot_ms for r in self.of_job(job) if force or r.status != "running")
        meta = self._meta(job)
        for slot_ms in slots:
            del self.records[job, slot_ms]
        if slots:
            self.metas[job] = _rules.purge(meta, slots)
        drops = tuple((job, slot) for slot in slots)
        self._log(Entry("purge", job, now_ms, len(slots), drops=drops, force=force))
        return len(slots)

    def _meta(self, job: str) -> JobMeta:
        kept = self.metas.get(job, JobMeta())
        return JobMeta(kept.fence, kept.floor_ms, sum(r.status != "running" for r in self.of_job(job)))

    def _write(self, entry: Entry, record: Record | None) -> bool:
        if record is not None:
            self.records[record.job, record.slot_ms] = record
            entry = replace(entry, puts=(record,))
        self._log(entry)
        return bool(entry.answer)

    def _log(self, entry: Entry) -> None:
        self.entries.append(replace(entry, namespace=self.namespace))
