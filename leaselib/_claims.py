"""What a planner keeps of jobs, claims and watched runs. Values with little behaviour; guarded as the Planner is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from leaselib._model import ClaimRequest, Reason
from leaselib._options import JobOptions
from leaselib._random import Chance
from leaselib.schedules import Schedule

RETRY_FIRST_MS = 50
RETRY_LONGEST_MS = 2_000


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A registered job. `func` is the handler; decisions never look at it."""

    name: str
    schedule: Schedule
    options: JobOptions
    func: Any = None


@dataclass(eq=False, slots=True)
class Claim:
    """A claim on its way: of a slot that is due, of a missed one, by hand, or (with `watch`) of a next attempt.

    The token is drawn right before the first send and kept for every further one, so that a claim whose answer was
    lost can be sent again. `unknown` says that a send's fate isn't known.
    """

    spec: JobSpec
    slot_ms: int
    reason: Reason
    watch: Watch | None = None
    token: str | None = None
    unknown: bool = False
    cancelled: bool = False
    in_flight: bool = False
    queued: bool = False
    due_boot_ms: int = 0
    sent_boot_ms: int = 0
    tries: int = 0

    @property
    def max_late_ms(self) -> int:
        """How late this claim may be sent, after its slot."""
        options = self.spec.options
        return options.catch_up_ms if self.reason == "catch-up" else options.max_late_ms

    def retry_ms(self, chance: Chance) -> int:
        """How long to wait before the next try, after one that failed: growing, and jittered."""
        longest_ms = min(RETRY_LONGEST_MS, RETRY_FIRST_MS << min(self.tries, 10))
        return max(1, round(longest_ms * chance.uniform(0.5, 1.0)))

    def look_again_ms(self, now_ms: int) -> int:
        """How long a slot that was refused as an overlap is looked at: its jitter window and two heartbeats."""
        options = self.spec.options
        jitter_ms = 1000 if options.jitter_ms is None else options.jitter_ms
        return max(0, self.slot_ms + jitter_ms - now_ms) + 2 * options.heartbeat_ms

    def request(self, runner: str) -> ClaimRequest:
        """What is asked of the store."""
        options = self.spec.options
        return ClaimRequest(
            job=self.spec.name,
            slot_ms=self.slot_ms,
            token=self.token or "",
            runner=runner,
            lease_ms=options.lease_ms,
            max_attempts=options.max_attempts,
            overlap=options.overlap,
            max_late_ms=self.max_late_ms,
            keep_ms=options.keep_ms,
            history_size=options.history_size,
            reason=self.reason,
            takeover_of=None if self.watch is None else self.watch.attempt,
        )


@dataclass(eq=False, slots=True)
class Watch:
    """A run that this instance is a backup of, or (with `until_boot_ms`) a refused slot that it looks at again.

    Attributes:
        attempt: the attempt that was seen last; a takeover names it.
        token: kept over all checks of that attempt, so that a check whose answer was lost wins again.
        held_back: the next check has waited one more time already, because this instance slept.
        armed: the number of the timer that counts; older ones in the heap are stale.
    """

    spec: JobSpec
    slot_ms: int
    attempt: int
    until_boot_ms: int | None = None
    token: str | None = None
    unknown: bool = False
    due_boot_ms: int = 0
    armed: int = 0
    held_back: bool = False
    claim: Claim | None = None

    def check(self) -> Claim:
        """The claim that checks the run: the one under way, or a new one."""
        return self.claim or Claim(self.spec, self.slot_ms, "takeover", self, self.token, self.unknown)


@dataclass(eq=False, slots=True)
class JobState:
    """A job's place in its schedule.

    Attributes:
        phase: `loading` (unfinished runs not known yet), `waiting` (for the slot), `claiming` (the slot's claim is
            ready, sent or to be retried), `idle` (no slot comes any more).
        slot_ms: the slot that is waited for or claimed; the one after it is `following_ms`.
        armed: the number of the slot timer that counts.
    """

    spec: JobSpec
    phase: Literal["loading", "waiting", "claiming", "idle"] = "loading"
    slot_ms: int = 0
    following_ms: int | None = None
    reason: Reason = "scheduled"
    armed: int = 0
    claim: Claim | None = None
    removed: bool = False
    manual_ms: int | None = None  # the slot of the latest claim by hand


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A run that the store calls running, as far as a starting instance has to know it."""

    job: str
    slot_ms: int
    attempt: int
    released: bool
    lease_end_ms: int


@dataclass(frozen=True, slots=True)
class Orphan:
    """A claim that was given up while a send's fate was unknown; its token is released until that is answered."""

    job: str
    slot_ms: int
    token: str
    until_boot_ms: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A store operation that failed, in words. `job` is set if only that job's records are at fault, or away;
    `unreplicated` says that nothing is wrong but that too few replicas had it in time; `interrupted` which older runs
    the claim ended all the same.
    """

    error: str
    permanent: bool = False
    job: str | None = None
    unreplicated: bool = False
    interrupted: tuple[int, ...] = ()

    @property
    def malformed(self) -> bool:
        """Whether that job's records can't be used until somebody mends them."""
        return self.job is not None and self.permanent
