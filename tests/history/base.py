"""What a history is made of, and the list of the invariants. Pure; any thread may use it.

A `History` holds what is known of some instances and their store: the store's decisions in its own order, the facts
that processes journaled, the runs that are left, and how the jobs were configured. Any of them may be missing; what
can't be judged without it then isn't.

Facts are those of `instance_program`, as dictionaries. `t` is a time line that all processes share (CLOCK_MONOTONIC, or
a simulation's), `pid` says whose fact it is:

- `decided` the store started an attempt just then (known in a simulation only); `overlap` is what its claim said
- `start` a handler begins: job, slot, attempt, token, fence, resume
- `effect` a check of a handler's has passed; `at` is when that check began
- `saving`, `saved` a checkpoint is sent; it is known to be stored
- `event` a listener got that event
- `main-end` a process has come to its own end; `killed` it was killed all the same
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from leaselib import Run
from leaselib._model import ClaimAnswer, ClaimRequest, Overlap, Record
from leaselib._options import JobOptions

Fact = Mapping[str, Any]

INVARIANTS = {
    "S1": "At most one run of a job is live after every decision, if all claims of the job say `skip`. A `skip` claim "
    "never starts an attempt while another run of the job is live, whoever started that one. In such a job no check of "
    "an attempt passes once an attempt of another run has begun.",
    "S2": "Attempts of a run are 1, 2, 3 and on; each has a token that no other attempt anywhere has. Those that start "
    "in processes are those that the store knows.",
    "S3": "The next attempt starts only once the lease in force is over, or was released.",
    "S4": "A heartbeat, finish or release is true only with the current token, while running and not released; or it "
    "repeats a finish or release that was accepted, and then changes nothing. A refused one changes nothing.",
    "S5": "A released run stays released until its next attempt: nothing renews it, its claim isn't won again.",
    "S6": "An ended run never changes. `success` and `failed` come from a finish only, of an attempt whose handler had "
    "started; `interrupted` comes from a claim only.",
    "S7": "A new run never starts after one of a later slot that isn't in the store's future (`skip` jobs).",
    "S8": "An attempt after the first never starts once such a later run has started (`skip` jobs). Of the runs that "
    "it removed a store remembers the highest slot only: while that lies in its future, the other removed ones don't "
    "count.",
    "S9": "A slot is started as attempt 1 once, through trimming, purging and steps of the clock.",
    "S10": "Starts of a run that no hand-over preceded are at most the largest max_attempts of its claims.",
    "S11": "A new run starts at most its allowed lateness + 10 s late.",
    "S12": "A new run starts at most a second early.",
    "S13": "A run becomes `interrupted` only if it isn't live, and has no attempts left or a newer run has started. "
    "(Or one of the two lies in the store's future, whose clock was set back, and a `skip` claim started the other one "
    "in the same step: the dead one's runner must not renew beside it.)",
    "S14": "One token yields one attempt: every `won` for it names the same run, attempt and fence, and so does the "
    "handler that is started.",
    "S15": "A handler starts only with a token that the store made an attempt of.",
    "S16": "A token's handler starts once, over all processes; nothing else has effects.",
    "S17": "No check of an attempt passes once a later attempt of the run has begun, unless the job goes on without "
    "its store (on_store_loss).",
    "S18": "Once a heartbeat of a token was refused, the store takes nothing more from that token.",
    "S19": "An attempt whose process lived to its own end has exactly one of success, failed, lost and interrupted as "
    "its last event (`lost` may be followed by what the store told in the end). Success and failed are what the store "
    "accepted, and what its record says, where that is still there.",
    "S20": "The fence of each start of a job is greater than all before; it never changes otherwise, and handlers get "
    "it. (After a loss of data whose fences a clock that was set back can't make up for, only than those that are "
    "left.)",
    "S21": "A run's checkpoint is the last one that was accepted for it, and its next attempt resumes from that.",
    "S22": "A claim removes only ended runs that are outside the newest history_size and older than any claim may ask "
    "for; a purge removes running ones only by force; nothing else removes any.",
    "S24": "An operation on one job changes no other job and no other namespace.",
    "S28": "A claim's answer names the token of the claim.",
    "L1": "Every slot that was due in peace was dealt with: it has a run, or an answer or an event that says why not. "
    "The reason in an answer is true when it is decided.",
    "L2": "No run is left alone in peace: once its lease is over or released, an instance that watches it decides on "
    "it within two heartbeats and the time of a request.",
}
"""What `check` and `liveness` report, by id. All hold also when the store's clock is stepped, but for S1 and S17 of
processes. A store that loses data is excused from S2 and S9 for what it lost, if the loss is recorded as an entry."""


@dataclass(frozen=True)
class Violation:
    """What breaks an invariant. index: the entry of the decisions, if it is one of them."""

    id: str
    text: str
    index: int | None = None

    def __str__(self) -> str:
        where = "" if self.index is None else f" at entry {self.index}"
        return f"{self.id}{where}: {self.text}"


@dataclass(slots=True)  # not frozen, which would make the making of one three times as slow; nobody changes one
class Entry:
    """One decision of a store.

    job: which job it was about; of a `loss`: which job's data was lost, or "" for all of the namespace.
    now_ms: the store's clock when it decided.
    answer: a claim's answer; whether a heartbeat, finish or release was accepted; how many runs a purge removed; None
        if nobody knows, since only what changed was seen.
    puts: every record that it wrote, as it is stored afterwards.
    drops: job and slot of every record that it removed.
    request: what a claim asked.
    status, error, checkpoint: what a finish, heartbeat or release brought.
    force: whether a purge may remove running runs.
    elsewhere: other namespaces in which something changed with it.
    floor_ms: of a `loss`: the floor that the job still has; `puts` are the records that it still has.
    """

    op: Literal["claim", "heartbeat", "finish", "release", "purge", "loss"]
    job: str
    now_ms: int
    answer: ClaimAnswer | bool | int | None = 0
    puts: tuple[Record, ...] = ()
    drops: tuple[tuple[str, int], ...] = ()
    slot_ms: int = 0
    token: str = ""
    request: ClaimRequest | None = None
    status: str | None = None
    error: str | None = None
    checkpoint: str | None = None
    force: bool = False
    namespace: str = "default"
    elsewhere: tuple[str, ...] = ()
    floor_ms: int | None = None


@dataclass(frozen=True)
class JobProfile:
    """How a job is configured, over all instances that have it.

    overlap: `skip` and `allow` if all agree; `mixed` if they don't.
    max_attempts, fewest_attempts: the largest and the smallest that one of them allows.
    trusts_store: whether handlers are told when the store is lost, on every instance.
    late_ms: the largest lateness that one of them allows.
    history_size: the smallest.
    """

    overlap: Literal["skip", "allow", "mixed"] = "skip"
    max_attempts: int = 3
    fewest_attempts: int = 3
    trusts_store: bool = True
    late_ms: int = 300_000
    keep_ms: int = 60_000
    history_size: int = 100

    @staticmethod
    def of(options: Iterable[JobOptions]) -> JobProfile:
        """The profile of a job that instances have with these options, at least one."""
        them = list(options)
        overlaps: set[Overlap] = {it.overlap for it in them}
        return JobProfile(
            overlap=overlaps.pop() if len(overlaps) == 1 else "mixed",
            max_attempts=max(it.max_attempts for it in them),
            fewest_attempts=min(it.max_attempts for it in them),
            trusts_store=all(it.on_store_loss == "abort" for it in them),
            late_ms=max(it.keep_ms for it in them),
            keep_ms=min(it.keep_ms for it in them),
            history_size=min(it.history_size for it in them),
        )


@dataclass(frozen=True)
class History:
    """See the module's text.

    decisions: what the store decided, in its order; empty if it isn't known.
    facts: what was journaled, in the order in which it was.
    records: every run that the store still has.
    jobs: by name; a job that isn't there is known by its decisions only.
    quiet_until: since when the store's clock can't be relied on, or data was lost; the time line is that of the facts.
    kept: whether the store has kept all that it was told.
    """

    decisions: Sequence[Entry] = ()
    facts: Sequence[Fact] = ()
    records: Sequence[Run] = ()
    jobs: Mapping[str, JobProfile] = field(default_factory=dict)
    quiet_until: float = math.inf
    kept: bool = True
