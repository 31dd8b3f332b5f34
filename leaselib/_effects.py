"""What decisions ask the outside to do. Frozen values; no I/O, clock or threads.

`_planner` and `_attempt` return lists of these; `_instance` (threads) and a simulation (none) carry them out.
Times named boot_ms are on a clock that can't be set; those named store_ms or slot_ms are on the store's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leaselib._attempt import Attempt
    from leaselib._claims import Claim, Failure, Orphan


@dataclass(frozen=True, slots=True)
class SendClaim:
    """A worker is to ask `Planner.before_send`, send the claim, and report the answer or the failure."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Begin:
    """The claim was won: the same worker is to carry out this attempt."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask the store for its clock and epoch, and report `ponged` or `ping_failed`."""

    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Load:
    """Ask the store for the unfinished runs of these jobs, and report `loaded` or `load_failed`."""

    jobs: tuple[str, ...]
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class ReleaseOrphan:
    """A claim whose fate is unknown was given up: release its token, and report `orphan_answered` or `_failed`."""

    orphan: Orphan


@dataclass(frozen=True, slots=True)
class SetSignal:
    """Set the attempt's signal: its handler should stop, for `attempt.abort_reason`."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Beat:
    """The run has outlived its first heartbeat interval: its heartbeat thread takes it over."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Wake:
    """Something about this attempt is due now: whoever waits for it should look again."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Tell:
    """The outcome for whoever waits in `run_now`; with `failure` it isn't known, and that is why."""

    claim: Claim
    outcome: str
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Emit:
    """An event for the listeners and the log. `at_ms` is the store's clock, or None if it isn't known yet."""

    name: str
    at_ms: int | None
    job: str | None = None
    slot_ms: int | None = None
    attempt: int | None = None
    token: str | None = None
    reason: str | None = None
    error: str | None = None
    duration_ms: int | None = None
    handed_over: bool = False
    count: int | None = None
    trace: str | None = None


Effect = SendClaim | Begin | Ping | Load | ReleaseOrphan | SetSignal | Beat | Wake | Tell | Emit
