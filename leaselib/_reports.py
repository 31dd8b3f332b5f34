"""Reports: the events about jobs and about the store, as effects. Decisions only; a part of the Planner, and guarded as
it is. Events about one attempt are `_attempt`'s.
"""

from __future__ import annotations

from leaselib._claims import Claim, Failure, JobSpec
from leaselib._effects import Emit
from leaselib._link import StoreClock

OLDER_THAN_DATA = "not run: its slot is older than the store's data, so it may have run before those were lost"


class Reports:
    """Puts the store's time on what is to be told."""

    def __init__(self, clock: StoreClock) -> None:
        self._clock = clock

    def event(
        self,
        name: str,
        boot_ms: int,
        spec: JobSpec | None = None,
        slot_ms: int | None = None,
        *,
        reason: str | None = None,
        error: str | None = None,
        attempt: int | None = None,
        count: int | None = None,
    ) -> Emit:
        """An event about a job's slot or, without `spec`, about the store."""
        job = None if spec is None else spec.name
        at_ms = self._clock.store_ms(boot_ms)
        return Emit(name, at_ms, job, slot_ms, attempt, reason=reason, error=error, count=count)

    def skip(
        self, spec: JobSpec, slot_ms: int, reason: str, boot_ms: int, *, error: str | None = None, count: int = 1
    ) -> Emit:
        """A slot, or `count` of them from that one on, that isn't run."""
        return self.event("skip", boot_ms, spec, slot_ms, reason=reason, error=error, count=count)

    def skip_lost(self, claim: Claim, boot_ms: int) -> Emit:
        """The store was emptied or replaced after this slot, which may have run before that."""
        return self.skip(claim.spec, claim.slot_ms, "missed", boot_ms, error=OLDER_THAN_DATA)

    def job_error(self, failure: Failure, job: str, slot_ms: int | None, boot_ms: int) -> Emit:
        """One job's records can't be read, or can't be reached for now; the others go on."""
        at_ms, reason = self._clock.store_ms(boot_ms), "malformed" if failure.malformed else "unreachable"
        return Emit("store_error", at_ms, job, slot_ms, reason=reason, error=failure.error)

    def job_ok(self, job: str, boot_ms: int) -> Emit:
        """That job's records can be used again."""
        return Emit("store_ok", self._clock.store_ms(boot_ms), job)

    def store_error(self, failure: Failure, boot_ms: int) -> Emit:
        """The store as a whole can't be used."""
        reason = "permanent" if failure.permanent else "unreachable"
        return self.event("store_error", boot_ms, reason=reason, error=failure.error)

    def reset(self, boot_ms: int, job: str | None) -> Emit:
        """The store is another one than before, or (in a cluster) that job's records are."""
        what = "the store was" if job is None else "the records of this job were"
        error = f"{what} emptied, replaced or restored; slots older than that are not run"
        return Emit("store_error", self._clock.store_ms(boot_ms), job, reason="reset", error=error)
