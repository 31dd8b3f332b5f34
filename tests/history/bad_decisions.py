"""Histories of a store's decisions, made by hand: what breaks each invariant. Pure; any thread may use it.

`bad` adds one to the list that `test_bad_histories` goes through. Only the last entry of each is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from leaselib._model import ClaimAnswer, ClaimRequest, Record

from .base import Entry

JOB = "job"
T0 = 1_000_000


def request(slot_ms: int = T0, token: str = "a", **options: Any) -> ClaimRequest:
    """A claim; a minute's lateness, a lease of 10 s."""
    given: dict[str, Any] = {
        "job": JOB,
        "slot_ms": slot_ms,
        "token": token,
        "runner": "r",
        "lease_ms": 10_000,
        "max_attempts": 2,
        "overlap": "skip",
        "max_late_ms": 60_000,
        "keep_ms": 60_000,
        "history_size": 100,
        "reason": "scheduled",
        "takeover_of": None,
    }
    return ClaimRequest(**{**given, **options})


def record(slot_ms: int = T0, token: str = "a", now_ms: int = T0, **fields: Any) -> Record:
    """A run that has just started."""
    given: dict[str, Any] = {
        "job": JOB,
        "slot_ms": slot_ms,
        "status": "running",
        "attempt": 1,
        "handovers": 0,
        "token": token,
        "runner": "r",
        "fence": now_ms,
        "lease_ms": 10_000,
        "lease_end_ms": now_ms + 10_000,
        "released": False,
        "reason": "scheduled",
        "started_ms": now_ms,
    }
    return Record(**{**given, **fields})


@dataclass
class Decisions:
    """Builds a list of decisions, good or bad."""

    entries: list[Entry]

    def claim(
        self,
        run: Record,
        now_ms: int = T0,
        *more: Record,
        outcome: str = "won",
        drops: tuple[int, ...] = (),
        put: bool = True,
        **options: Any,
    ) -> Record:
        """A claim of that run's slot with its token, answered with it; `more` is written as well."""
        asked = request(run.slot_ms, run.token, **options)
        answer = ClaimAnswer(outcome, run.token, now_ms, "1-0", run)  # type: ignore[arg-type]
        puts = (run, *more) if put else more
        dropped = tuple((JOB, slot) for slot in drops)
        self.entries.append(Entry("claim", JOB, now_ms, answer, puts, dropped, run.slot_ms, run.token, asked))
        return run

    def op(self, op: str, run: Record, now_ms: int, answer: bool = True, **changes: Any) -> Record:
        """A heartbeat, finish or release with that run's token; `changes` is what it made of the run."""
        token = changes.pop("by", run.token)
        sent = {key: changes.pop(f"sent_{key}") for key in ("status", "checkpoint") if f"sent_{key}" in changes}
        changed = replace(run, **changes)
        puts = (changed,) if changes else ()
        self.entries.append(Entry(op, JOB, now_ms, answer, puts, (), run.slot_ms, token, **sent))  # type: ignore[arg-type]
        return changed

    def won(self, slot_ms: int = T0, token: str = "a", now_ms: int | None = None, **fields: Any) -> Record:
        """A new run that starts in time."""
        now_ms = slot_ms if now_ms is None else now_ms
        return self.claim(record(slot_ms, token, now_ms, **fields), now_ms)

    def ended(self, slot_ms: int = T0, token: str = "a") -> Record:
        """A new run that was finished a second later."""
        run = self.won(slot_ms, token)
        return self.op("finish", run, slot_ms + 1000, sent_status="success", status="success", ended_ms=slot_ms + 1000)

    def released(self) -> Record:
        """A new run that was released a second later."""
        return self.op("release", self.won(), T0 + 1000, released=True, handovers=1, lease_end_ms=T0 + 1000)


Build = Callable[[Decisions], object]
BAD: dict[str, tuple[frozenset[str], Build]] = {}


def bad(*invariants: str) -> Callable[[Build], Build]:
    """Adds a history that breaks exactly these invariants, the first one above all."""

    def add(build: Build) -> Build:
        BAD[build.__name__] = frozenset(invariants), build
        return build

    return add


def second(run: Record, token: str = "b", now_ms: int = T0 + 20_000, **fields: Any) -> Record:
    """The next attempt of a run."""
    return record(run.slot_ms, token, now_ms, **{"attempt": run.attempt + 1, **fields})


@bad("S1")
def two_slots_are_live(h: Decisions) -> None:
    h.won(T0)
    h.won(T0 + 5_000, "b")


@bad("S1")
def a_dead_run_is_renewed_beside_a_newer_one(h: Decisions) -> None:
    old = h.won(T0)
    h.won(T0 + 20_000, "b")
    h.op("heartbeat", old, T0 + 21_000, lease_end_ms=T0 + 31_000)


@bad("S1")
def a_skip_claim_starts_beside_a_live_allow_run(h: Decisions) -> None:
    h.claim(record(T0), T0, overlap="allow")
    h.claim(record(T0 + 5_000, "b", T0 + 5_000), T0 + 5_000)


@bad("S2")
def an_attempt_number_is_left_out(h: Decisions) -> None:
    h.claim(second(h.won(), attempt=3), T0 + 20_000)


@bad("S2", "S9")
def an_attempt_number_comes_twice(h: Decisions) -> None:
    h.claim(second(h.won(), attempt=1), T0 + 20_000)


@bad("S2", "S14")
def a_token_starts_runs_of_two_slots(h: Decisions) -> None:
    h.ended(T0)
    h.won(T0 + 5_000, "a")


@bad("S2")
def a_heartbeat_starts_an_attempt(h: Decisions) -> None:
    run = h.won()
    h.op("heartbeat", run, T0 + 1000, attempt=2)


@bad("S2")
def attempt_two_has_no_state_before_it(h: Decisions) -> None:
    h.claim(record(attempt=2), T0)


@bad("S3")
def a_takeover_comes_a_millisecond_too_soon(h: Decisions) -> None:
    h.claim(second(h.won(), now_ms=T0 + 9_999), T0 + 9_999)


@bad("S3")
def a_takeover_overlooks_a_heartbeat(h: Decisions) -> None:
    run = h.op("heartbeat", h.won(), T0 + 5_000, lease_end_ms=T0 + 15_000)
    h.claim(second(run, now_ms=T0 + 12_000), T0 + 12_000)


@bad("S4")
def a_heartbeat_of_a_lost_token_is_accepted(h: Decisions) -> None:
    run = h.claim(second(h.won()), T0 + 20_000)
    h.op("heartbeat", run, T0 + 21_000, by="a", lease_end_ms=T0 + 31_000)


@bad("S4")
def a_finish_of_a_lost_token_is_accepted_without_a_write(h: Decisions) -> None:
    run = h.claim(second(h.won()), T0 + 20_000)
    h.op("finish", run, T0 + 21_000, by="a", sent_status="success")


@bad("S4")
def a_finish_with_another_status_is_true(h: Decisions) -> None:
    h.op("finish", h.ended(), T0 + 2_000, sent_status="failed")


@bad("S4")
def a_finish_after_the_release_is_true(h: Decisions) -> None:
    h.op("finish", h.released(), T0 + 2_000, sent_status="success", status="success", ended_ms=T0 + 2_000)


@bad("S4", "S21")
def a_refused_heartbeat_leaves_a_checkpoint(h: Decisions) -> None:
    h.op("heartbeat", h.released(), T0 + 2_000, answer=False, sent_checkpoint="1", checkpoint="1")


@bad("S4", "S6")
def a_repeated_finish_moves_the_end(h: Decisions) -> None:
    h.op("finish", h.ended(), T0 + 2_000, sent_status="success", ended_ms=T0 + 2_000)


@bad("S4")
def a_release_of_an_unknown_run_is_true(h: Decisions) -> None:
    h.op("release", record(), T0)


@bad("S5", "S4")
def a_heartbeat_takes_the_release_back(h: Decisions) -> None:
    h.op("heartbeat", h.released(), T0 + 2_000, released=False, lease_end_ms=T0 + 12_000)


@bad("S5")
def a_claim_is_won_again_after_the_release(h: Decisions) -> None:
    run = h.released()
    h.claim(run, T0 + 2_000, put=False)


@bad("S5")
def a_claim_sent_again_takes_the_release_back(h: Decisions) -> None:
    run = h.released()
    h.claim(replace(run, released=False, lease_end_ms=T0 + 12_000), T0 + 2_000, outcome="running")


@bad("S6", "S4")
def an_ended_run_is_ended_otherwise(h: Decisions) -> None:
    h.op("finish", h.ended(), T0 + 2_000, sent_status="failed", status="failed")


@bad("S6")
def an_ended_run_starts_again(h: Decisions) -> None:
    h.claim(second(h.ended()), T0 + 20_000)


@bad("S6")
def a_heartbeat_ends_a_run(h: Decisions) -> None:
    h.op("heartbeat", h.won(), T0 + 1_000, status="success", ended_ms=T0 + 1_000)


@bad("S6")
def a_finish_interrupts_a_run(h: Decisions) -> None:
    h.op("finish", h.won(), T0 + 20_000, sent_status="failed", status="interrupted")


@bad("S7")
def an_older_slot_starts_after_a_newer_one(h: Decisions) -> None:
    h.ended(T0)
    h.won(T0 - 5_000, "b", T0 + 2_000)


@bad("S7")
def an_older_slot_starts_after_a_newer_one_was_purged(h: Decisions) -> None:
    h.ended(T0)
    h.entries.append(Entry("purge", JOB, T0 + 1_500, 1, drops=((JOB, T0),)))
    h.won(T0 - 5_000, "b", T0 + 2_000)


@bad("S8")
def an_older_run_is_taken_over_after_a_newer_one_started(h: Decisions) -> None:
    old = h.won(T0)
    h.ended(T0 + 20_000, "b")
    h.claim(second(old, "c", T0 + 30_000), T0 + 30_000)


@bad("S8")
def a_released_run_is_taken_over_after_a_newer_one_started(h: Decisions) -> None:
    old = h.released()
    h.ended(T0 + 5_000, "b")
    h.claim(second(old, "c", T0 + 7_000), T0 + 7_000)


@bad("S9")
def a_purged_slot_starts_again(h: Decisions) -> None:
    h.ended(T0)
    h.entries.append(Entry("purge", JOB, T0 + 1_500, 1, drops=((JOB, T0),)))
    h.won(T0, "b", T0 + 2_000)


@bad("S9")
def a_trimmed_slot_starts_again_after_the_clock_stepped_back(h: Decisions) -> None:
    h.ended(T0)
    late = h.claim(record(T0 + 900_000, "b", T0 + 900_000), T0 + 900_000, drops=(T0,), history_size=0)
    h.op("finish", late, T0 + 900_001, sent_status="success", status="success", ended_ms=T0 + 900_001)
    h.won(T0, "c", T0, fence=T0 + 900_001)


@bad("S10")
def a_third_start_of_two_allowed(h: Decisions) -> None:
    run = h.claim(second(h.won()), T0 + 20_000)
    h.claim(second(run, "c", T0 + 40_000), T0 + 40_000)


@bad("S10")
def a_hand_over_frees_its_own_start_only(h: Decisions) -> None:
    run = h.claim(second(h.released(), handovers=1), T0 + 20_000)
    run = h.claim(second(run, "c", T0 + 40_000), T0 + 40_000)
    h.claim(second(run, "d", T0 + 60_000), T0 + 60_000)


@bad("S11")
def a_new_run_starts_a_millisecond_too_late(h: Decisions) -> None:
    h.won(T0, now_ms=T0 + 70_001)


@bad("S11")
def a_new_run_that_may_not_be_late_starts_after_the_tolerance(h: Decisions) -> None:
    h.claim(record(now_ms=T0 + 10_001), T0 + 10_001, max_late_ms=0)


@bad("S12")
def a_new_run_starts_an_hour_early(h: Decisions) -> None:
    h.ended(T0)
    h.won(T0 + 3_600_000, "b", T0 + 5_000)


@bad("S12")
def a_new_run_starts_a_millisecond_too_early(h: Decisions) -> None:
    h.won(T0, now_ms=T0 - 1_001)


@bad("S13")
def a_live_run_is_interrupted(h: Decisions) -> None:
    old = h.claim(record(T0), T0, overlap="allow")
    doomed = replace(old, status="interrupted")
    h.claim(record(T0 + 5_000, "b", T0 + 5_000), T0 + 5_000, doomed, overlap="allow")


@bad("S13")
def a_run_with_an_attempt_left_is_interrupted(h: Decisions) -> None:
    old = h.won()
    h.claim(replace(old, status="interrupted"), T0 + 20_000, outcome="interrupted")


@bad("S13")
def a_released_run_is_interrupted_for_want_of_attempts(h: Decisions) -> None:
    old = h.claim(second(h.won()), T0 + 20_000)
    old = h.op("release", old, T0 + 21_000, released=True, lease_end_ms=T0 + 21_000)
    h.claim(replace(old, status="interrupted"), T0 + 30_000, outcome="interrupted")


@bad("S13")
def a_newer_run_is_interrupted_by_an_older_one(h: Decisions) -> None:
    new = h.claim(record(T0), T0, overlap="allow")
    doomed = replace(new, status="interrupted")
    h.claim(record(T0 - 5_000, "b", T0 + 20_000), T0 + 20_000, doomed, overlap="allow")


@bad("S14", "S2")
def a_claim_sent_again_is_another_attempt(h: Decisions) -> None:
    h.claim(second(h.won(), "a"), T0 + 20_000)


@bad("S14")
def a_claim_sent_again_names_another_fence(h: Decisions) -> None:
    run = h.won()
    h.claim(replace(run, fence=run.fence + 1), T0 + 1_000, put=False)


@bad("S14")
def a_claim_is_won_and_nothing_was_started(h: Decisions) -> None:
    h.claim(record(), T0, put=False)


@bad("S14")
def a_claim_is_won_with_anothers_run(h: Decisions) -> None:
    run = h.won()
    answer = ClaimAnswer("won", "b", T0 + 1_000, "1-0", run)
    h.entries.append(Entry("claim", JOB, T0 + 1_000, answer, (), (), T0, "b", request(T0, "b")))


@bad("S18")
def a_finish_is_accepted_after_a_heartbeat_was_refused(h: Decisions) -> None:
    run = h.op("heartbeat", h.won(), T0 + 1_000, answer=False)
    h.op("finish", run, T0 + 2_000, sent_status="success", status="success", ended_ms=T0 + 2_000)


@bad("S18")
def a_heartbeat_is_accepted_after_one_was_refused(h: Decisions) -> None:
    run = h.op("heartbeat", h.won(), T0 + 1_000, answer=False)
    h.op("heartbeat", run, T0 + 2_000, lease_end_ms=T0 + 12_000)


@bad("S20")
def a_fence_repeats(h: Decisions) -> None:
    h.ended(T0)
    h.won(T0 + 5_000, "b", fence=T0)


@bad("S20")
def a_fence_goes_back_with_the_clock(h: Decisions) -> None:
    old = h.released()
    h.claim(second(old, "b", T0 - 5_000), T0 - 5_000)


@bad("S20")
def a_heartbeat_changes_the_fence(h: Decisions) -> None:
    h.op("heartbeat", h.won(), T0 + 1_000, fence=T0 + 1_000)


@bad("S21")
def the_checkpoint_is_lost(h: Decisions) -> None:
    run = h.op("heartbeat", h.won(), T0 + 1_000, sent_checkpoint="1", checkpoint="1", lease_end_ms=T0 + 11_000)
    h.claim(second(run), T0 + 20_000)


@bad("S21")
def an_older_checkpoint_comes_back(h: Decisions) -> None:
    run = h.op("heartbeat", h.won(), T0 + 1_000, sent_checkpoint="1", checkpoint="1")
    run = h.op("heartbeat", run, T0 + 2_000, sent_checkpoint="2", checkpoint="2")
    h.claim(second(run, checkpoint="1"), T0 + 20_000)


@bad("S21")
def a_new_run_has_a_checkpoint(h: Decisions) -> None:
    h.won(checkpoint="1")


@bad("S22")
def a_running_run_is_trimmed(h: Decisions) -> None:
    h.won(T0)
    h.claim(record(T0 + 900_000, "b", T0 + 900_000), T0 + 900_000, drops=(T0,), history_size=0)


@bad("S22")
def one_of_the_newest_is_trimmed(h: Decisions) -> None:
    h.ended(T0)
    h.claim(record(T0 + 900_000, "b", T0 + 900_000), T0 + 900_000, drops=(T0,), history_size=1)


@bad("S22")
def a_young_run_is_trimmed(h: Decisions) -> None:
    h.ended(T0)
    h.claim(record(T0 + 129_999, "b", T0 + 129_999), T0 + 129_999, drops=(T0,), history_size=0)


@bad("S22")
def a_heartbeat_removes_a_run(h: Decisions) -> None:
    h.ended(T0)
    h.won(T0 + 900_000, "b")
    h.entries.append(Entry("heartbeat", JOB, T0 + 900_001, False, (), ((JOB, T0),), T0 + 900_000, "b"))


@bad("S22")
def a_purge_removes_a_running_run_unasked(h: Decisions) -> None:
    h.won()
    h.entries.append(Entry("purge", JOB, T0 + 900_000, 1, drops=((JOB, T0),)))


@bad("S24")
def a_claim_writes_to_another_job(h: Decisions) -> None:
    h.claim(record(), T0, record(job="job*"))


@bad("S24")
def a_purge_removes_another_jobs_run(h: Decisions) -> None:
    h.entries.append(Entry("purge", JOB, T0, 1, drops=(("job*", T0),)))


@bad("S24")
def a_finish_changes_another_namespace(h: Decisions) -> None:
    h.entries.append(Entry("finish", JOB, T0, False, slot_ms=T0, token="a", elsewhere=("other",)))


@bad("S28")
def an_answer_names_another_token(h: Decisions) -> None:
    answer = ClaimAnswer("early", "b", T0, "1-0")
    h.entries.append(Entry("claim", JOB, T0, answer, (), (), T0 + 5_000, "a", request(T0 + 5_000)))


@bad("S28")
def a_refusal_names_the_token_of_the_run_in_the_way(h: Decisions) -> None:
    run = h.won()
    answer = ClaimAnswer("running", run.token, T0 + 1_000, "1-0", run)
    h.entries.append(Entry("claim", JOB, T0 + 1_000, answer, (), (), T0, "b", request(T0, "b")))


# ---- refusals whose reason isn't true (L1) ---------------------------------------------------------------------------


def _refused(outcome: str, late_ms: int = 0, **options: Any) -> Build:
    """The job's first claim, of a slot that is due, is refused."""

    def build(history: Decisions) -> None:
        now_ms, asked = T0 + late_ms, request(**options)
        answer = ClaimAnswer(outcome, "a", now_ms, "1-0")  # type: ignore[arg-type]
        history.entries.append(Entry("claim", JOB, now_ms, answer, (), (), T0, "a", asked))

    return build


def _told(outcome: str, **options: Any) -> Build:
    """A claim of the slot of a run that is alive gets that answer."""

    def build(history: Decisions) -> None:
        run = history.won()
        asked = request(T0, "b", **options)
        answer = ClaimAnswer(outcome, "b", T0 + 1, "1-0", run)  # type: ignore[arg-type]
        history.entries.append(Entry("claim", JOB, T0 + 1, answer, (), (), T0, "b", asked))

    return build


def _overlap_with_a_dead_run(history: Decisions) -> None:
    run = history.won()
    asked = request(T0 + 20_000, "b")
    answer = ClaimAnswer("overlap", "b", T0 + 20_000, "1-0", run)
    history.entries.append(Entry("claim", JOB, T0 + 20_000, answer, (), (), T0 + 20_000, "b", asked))


def _running_after_the_end(history: Decisions) -> None:
    run = history.ended()
    answer = ClaimAnswer("running", "b", T0 + 2_000, "1-0", run)
    history.entries.append(Entry("claim", JOB, T0 + 2_000, answer, (), (), T0, "b", request(T0, "b")))


BAD |= {
    "late in time": (frozenset({"L1"}), _refused("late", late_ms=60_000)),
    "early though it is due": (frozenset({"L1"}), _refused("early")),
    "superseded by nothing": (frozenset({"L1"}), _refused("superseded")),
    "finished without a run": (frozenset({"L1"}), _refused("finished")),
    "finished while it is alive": (frozenset({"L1"}), _told("finished")),
    "gone though it is there": (frozenset({"L1"}), _told("gone", takeover_of=1)),
    "overlap with a dead run": (frozenset({"L1"}), _overlap_with_a_dead_run),
    "overlap though all may": (frozenset({"L1"}), _refused("overlap", overlap="allow")),
    "running after its end": (frozenset({"L1"}), _running_after_the_end),
}
