"""The invariants' checker itself: a good history passes, and each bad one is reported under the right name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from invariants import Entry, check
from reference import Reference

from leaselib._model import ClaimAnswer, ClaimRequest, Record

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
class History:
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


BAD: list[tuple[str, Callable[[History], object]]] = []


def bad(invariant: str) -> Callable[[Callable[[History], object]], Callable[[History], object]]:
    """Adds a history that breaks this invariant."""

    def add(build: Callable[[History], object]) -> Callable[[History], object]:
        BAD.append((invariant, build))
        return build

    return add


def second(run: Record, token: str = "b", now_ms: int = T0 + 20_000, **fields: Any) -> Record:
    """The next attempt of a run."""
    return record(run.slot_ms, token, now_ms, **{"attempt": run.attempt + 1, **fields})


@bad("S1")
def two_slots_are_live(h: History) -> None:
    h.won(T0)
    h.won(T0 + 5_000, "b")


@bad("S1")
def a_dead_run_is_renewed_beside_a_newer_one(h: History) -> None:
    old = h.won(T0)
    h.won(T0 + 20_000, "b")
    h.op("heartbeat", old, T0 + 21_000, lease_end_ms=T0 + 31_000)


@bad("S1")
def a_skip_claim_starts_beside_a_live_allow_run(h: History) -> None:
    h.claim(record(T0), T0, overlap="allow")
    h.claim(record(T0 + 5_000, "b", T0 + 5_000), T0 + 5_000)


@bad("S2")
def an_attempt_number_is_left_out(h: History) -> None:
    h.claim(second(h.won(), attempt=3), T0 + 20_000)


@bad("S2")
def an_attempt_number_comes_twice(h: History) -> None:
    h.claim(second(h.won(), attempt=1), T0 + 20_000)


@bad("S2")
def a_token_starts_runs_of_two_slots(h: History) -> None:
    h.ended(T0)
    h.won(T0 + 5_000, "a")


@bad("S2")
def a_heartbeat_starts_an_attempt(h: History) -> None:
    run = h.won()
    h.op("heartbeat", run, T0 + 1000, attempt=2)


@bad("S2")
def attempt_two_has_no_state_before_it(h: History) -> None:
    h.claim(record(attempt=2), T0)


@bad("S3")
def a_takeover_comes_a_millisecond_too_soon(h: History) -> None:
    h.claim(second(h.won(), now_ms=T0 + 9_999), T0 + 9_999)


@bad("S3")
def a_takeover_overlooks_a_heartbeat(h: History) -> None:
    run = h.op("heartbeat", h.won(), T0 + 5_000, lease_end_ms=T0 + 15_000)
    h.claim(second(run, now_ms=T0 + 12_000), T0 + 12_000)


@bad("S4")
def a_heartbeat_of_a_lost_token_is_accepted(h: History) -> None:
    run = h.claim(second(h.won()), T0 + 20_000)
    h.op("heartbeat", run, T0 + 21_000, by="a", lease_end_ms=T0 + 31_000)


@bad("S4")
def a_finish_of_a_lost_token_is_accepted_without_a_write(h: History) -> None:
    run = h.claim(second(h.won()), T0 + 20_000)
    h.op("finish", run, T0 + 21_000, by="a", sent_status="success")


@bad("S4")
def a_finish_with_another_status_is_true(h: History) -> None:
    h.op("finish", h.ended(), T0 + 2_000, sent_status="failed")


@bad("S4")
def a_finish_after_the_release_is_true(h: History) -> None:
    h.op("finish", h.released(), T0 + 2_000, sent_status="success", status="success", ended_ms=T0 + 2_000)


@bad("S4")
def a_refused_heartbeat_leaves_a_checkpoint(h: History) -> None:
    h.op("heartbeat", h.released(), T0 + 2_000, answer=False, sent_checkpoint="1", checkpoint="1")


@bad("S4")
def a_repeated_finish_moves_the_end(h: History) -> None:
    h.op("finish", h.ended(), T0 + 2_000, sent_status="success", ended_ms=T0 + 2_000)


@bad("S4")
def a_release_of_an_unknown_run_is_true(h: History) -> None:
    h.op("release", record(), T0)


@bad("S5")
def a_heartbeat_takes_the_release_back(h: History) -> None:
    h.op("heartbeat", h.released(), T0 + 2_000, released=False, lease_end_ms=T0 + 12_000)


@bad("S5")
def a_claim_is_won_again_after_the_release(h: History) -> None:
    run = h.released()
    h.claim(run, T0 + 2_000, put=False)


@bad("S6")
def an_ended_run_is_ended_otherwise(h: History) -> None:
    h.op("finish", h.ended(), T0 + 2_000, sent_status="failed", status="failed")


@bad("S6")
def an_ended_run_starts_again(h: History) -> None:
    h.claim(second(h.ended()), T0 + 20_000)


@bad("S6")
def a_heartbeat_ends_a_run(h: History) -> None:
    h.op("heartbeat", h.won(), T0 + 1_000, status="success", ended_ms=T0 + 1_000)


@bad("S6")
def a_finish_interrupts_a_run(h: History) -> None:
    h.op("finish", h.won(), T0 + 20_000, sent_status="failed", status="interrupted")


@bad("S7")
def an_older_slot_starts_after_a_newer_one(h: History) -> None:
    h.ended(T0)
    h.won(T0 - 5_000, "b", T0 + 2_000)


@bad("S7")
def an_older_slot_starts_after_a_newer_one_was_purged(h: History) -> None:
    h.ended(T0)
    h.entries.append(Entry("purge", JOB, T0 + 1_500, 1, drops=((JOB, T0),)))
    h.won(T0 - 5_000, "b", T0 + 2_000)


@bad("S8")
def an_older_run_is_taken_over_after_a_newer_one_started(h: History) -> None:
    old = h.won(T0)
    h.ended(T0 + 20_000, "b")
    h.claim(second(old, "c", T0 + 30_000), T0 + 30_000)


@bad("S8")
def a_released_run_is_taken_over_after_a_newer_one_started(h: History) -> None:
    old = h.released()
    h.ended(T0 + 5_000, "b")
    h.claim(second(old, "c", T0 + 7_000), T0 + 7_000)


@bad("S9")
def a_purged_slot_starts_again(h: History) -> None:
    h.ended(T0)
    h.entries.append(Entry("purge", JOB, T0 + 1_500, 1, drops=((JOB, T0),)))
    h.won(T0, "b", T0 + 2_000)


@bad("S9")
def a_trimmed_slot_starts_again_after_the_clock_stepped_back(h: History) -> None:
    h.ended(T0)
    late = record(T0 + 900_000, "b", T0 + 900_000)
    h.claim(late, T0 + 900_000, drops=(T0,), history_size=0)
    h.won(T0, "c", T0)


@bad("S10")
def a_third_start_of_two_allowed(h: History) -> None:
    run = h.claim(second(h.won()), T0 + 20_000)
    h.claim(second(run, "c", T0 + 40_000), T0 + 40_000)


@bad("S10")
def a_hand_over_frees_its_own_start_only(h: History) -> None:
    run = h.claim(second(h.released(), handovers=1), T0 + 20_000)
    run = h.claim(second(run, "c", T0 + 40_000), T0 + 40_000)
    h.claim(second(run, "d", T0 + 60_000), T0 + 60_000)


@bad("S11")
def a_new_run_starts_a_millisecond_too_late(h: History) -> None:
    h.won(T0, now_ms=T0 + 70_001)


@bad("S12")
def a_new_run_starts_a_millisecond_too_early(h: History) -> None:
    h.won(T0, now_ms=T0 - 1_001)


@bad("S13")
def a_live_run_is_interrupted(h: History) -> None:
    old = h.claim(record(T0), T0, overlap="allow")
    doomed = replace(old, status="interrupted")
    h.claim(record(T0 + 5_000, "b", T0 + 5_000), T0 + 5_000, doomed, overlap="allow")


@bad("S13")
def a_run_with_an_attempt_left_is_interrupted(h: History) -> None:
    old = h.won()
    h.claim(replace(old, status="interrupted"), T0 + 20_000, outcome="interrupted")


@bad("S13")
def a_released_run_is_interrupted_for_want_of_attempts(h: History) -> None:
    old = h.claim(second(h.won()), T0 + 20_000)
    old = h.op("release", old, T0 + 21_000, released=True, lease_end_ms=T0 + 21_000)
    h.claim(replace(old, status="interrupted"), T0 + 30_000, outcome="interrupted")


@bad("S13")
def a_newer_run_is_interrupted_by_an_older_one(h: History) -> None:
    new = h.claim(record(T0), T0, overlap="allow")
    doomed = replace(new, status="interrupted")
    h.claim(record(T0 - 5_000, "b", T0 + 20_000), T0 + 20_000, doomed, overlap="allow")


@bad("S14")
def a_claim_sent_again_is_another_attempt(h: History) -> None:
    h.claim(second(h.won(), "a"), T0 + 20_000)


@bad("S14")
def a_claim_sent_again_names_another_fence(h: History) -> None:
    run = h.won()
    h.claim(replace(run, fence=run.fence + 1), T0 + 1_000, put=False)


@bad("S14")
def a_claim_is_won_and_nothing_was_started(h: History) -> None:
    h.claim(record(), T0, put=False)


@bad("S14")
def a_claim_is_won_with_anothers_run(h: History) -> None:
    run = h.won()
    answer = ClaimAnswer("won", "b", T0 + 1_000, "1-0", run)
    h.entries.append(Entry("claim", JOB, T0 + 1_000, answer, (), (), T0, "b", request(T0, "b")))


@bad("S20")
def a_fence_repeats(h: History) -> None:
    h.ended(T0)
    h.won(T0 + 5_000, "b", fence=T0)


@bad("S20")
def a_fence_goes_back_with_the_clock(h: History) -> None:
    old = h.released()
    h.claim(second(old, "b", T0 - 5_000), T0 - 5_000)


@bad("S20")
def a_heartbeat_changes_the_fence(h: History) -> None:
    h.op("heartbeat", h.won(), T0 + 1_000, fence=T0 + 1_000)


@bad("S21")
def the_checkpoint_is_lost(h: History) -> None:
    run = h.op("heartbeat", h.won(), T0 + 1_000, sent_checkpoint="1", checkpoint="1", lease_end_ms=T0 + 11_000)
    h.claim(second(run), T0 + 20_000)


@bad("S21")
def an_older_checkpoint_comes_back(h: History) -> None:
    run = h.op("heartbeat", h.won(), T0 + 1_000, sent_checkpoint="1", checkpoint="1")
    run = h.op("heartbeat", run, T0 + 2_000, sent_checkpoint="2", checkpoint="2")
    h.claim(second(run, checkpoint="1"), T0 + 20_000)


@bad("S21")
def a_new_run_has_a_checkpoint(h: History) -> None:
    h.won(checkpoint="1")


@bad("S22")
def a_running_run_is_trimmed(h: History) -> None:
    h.won(T0)
    h.claim(record(T0 + 900_000, "b", T0 + 900_000), T0 + 900_000, drops=(T0,), history_size=0)


@bad("S22")
def one_of_the_newest_is_trimmed(h: History) -> None:
    h.ended(T0)
    h.claim(record(T0 + 900_000, "b", T0 + 900_000), T0 + 900_000, drops=(T0,), history_size=1)


@bad("S22")
def a_young_run_is_trimmed(h: History) -> None:
    h.ended(T0)
    h.claim(record(T0 + 129_999, "b", T0 + 129_999), T0 + 129_999, drops=(T0,), history_size=0)


@bad("S22")
def a_heartbeat_removes_a_run(h: History) -> None:
    h.ended(T0)
    h.won(T0 + 900_000, "b")
    h.entries.append(Entry("heartbeat", JOB, T0 + 900_001, False, (), ((JOB, T0),), T0 + 900_000, "b"))


@bad("S22")
def a_purge_removes_a_running_run_unasked(h: History) -> None:
    h.won()
    h.entries.append(Entry("purge", JOB, T0 + 900_000, 1, drops=((JOB, T0),)))


@bad("S24")
def a_claim_writes_to_another_job(h: History) -> None:
    h.claim(record(), T0, record(job="job*"))


@bad("S24")
def a_purge_removes_another_jobs_run(h: History) -> None:
    h.entries.append(Entry("purge", JOB, T0, 1, drops=(("job*", T0),)))


@bad("S24")
def a_finish_changes_another_namespace(h: History) -> None:
    h.entries.append(Entry("finish", JOB, T0, False, slot_ms=T0, token="a", elsewhere=("other",)))


@bad("S28")
def an_answer_names_another_token(h: History) -> None:
    answer = ClaimAnswer("early", "b", T0, "1-0")
    h.entries.append(Entry("claim", JOB, T0, answer, (), (), T0 + 5_000, "a", request(T0 + 5_000)))


@pytest.mark.parametrize(("invariant", "build"), BAD, ids=lambda value: getattr(value, "__name__", value))
def test_a_bad_history_is_reported(invariant: str, build: Callable[[History], object]) -> None:
    """Under the invariant that it breaks, at its last entry."""
    history = History([])
    build(history)
    found = [v for v in check(history.entries).violations if v.id == invariant]
    assert [v.index for v in found[-1:]] == [len(history.entries) - 1], check(history.entries)
    assert str(found[-1]).startswith(f"{invariant} at entry ")
    assert check(history.entries[:-1]).violations == [], "only the last entry is wrong"


def test_every_invariant_has_bad_histories() -> None:
    """At least one each, and two where there are two ways to break it."""
    ids = {invariant for invariant, _ in BAD}
    assert ids == {f"S{n}" for n in (*range(1, 15), 20, 21, 22, 24, 28)}


def test_a_good_history_passes() -> None:
    """A life with everything in it, decided by the rules themselves."""
    store = Reference("1-0")
    now = T0
    assert store.claim(request(T0, "a"), now).outcome == "won"
    assert store.claim(request(T0, "a"), now + 1).outcome == "won"
    assert store.heartbeat(JOB, T0, "a", 10_000, "1", now + 2)
    assert store.release(JOB, T0, "a", "2", now + 3)
    assert store.release(JOB, T0, "a", "2", now + 4)
    assert store.claim(request(T0, "b", takeover_of=1), now + 5).outcome == "won"
    assert not store.heartbeat(JOB, T0, "a", 10_000, None, now + 6)
    assert store.claim(request(T0 + 20_000, "c"), now + 20_000).interrupted == (T0,)
    assert store.finish(JOB, T0 + 20_000, "c", "success", None, now + 20_001)
    assert store.finish(JOB, T0 + 20_000, "c", "success", None, now + 20_002)
    assert store.claim(request(T0, "d"), now + 20_003).outcome == "finished"
    assert store.purge(JOB, False, now + 20_004) == 2
    assert store.claim(request(T0, "e"), now + 20_005).outcome == "superseded"
    report = check(store.entries)
    assert report.violations == []
    assert report.quiet


def test_a_clock_that_steps_back_or_a_loss_is_not_quiet() -> None:
    """The report says so; a forward step can't be told from time that passes."""
    history = History([])
    history.ended(T0)
    assert check(history.entries).quiet
    stepped = [*history.entries, Entry("purge", JOB, T0 - 1, 0)]
    lost = [*history.entries, Entry("loss", "", T0 + 9_000)]
    assert not check(stepped).quiet
    assert not check(lost).quiet


def test_a_store_that_lost_its_data_may_start_a_slot_again() -> None:
    """If the loss is on record; with another token, and a fence that is greater all the same."""
    history = History([])
    history.ended(T0)
    history.entries.append(Entry("loss", "", T0 + 2_000))
    history.won(T0, "b", T0 + 3_000)
    assert check(history.entries).violations == []
    assert check([e for e in history.entries if e.op != "loss"]).ids() >= {"S9"}


def test_namespaces_are_judged_apart() -> None:
    """The same job and slot may start in each; a token may not."""
    history = History([])
    history.won(T0, "a")
    history.entries.append(replace(history.entries[0], namespace="other"))
    assert check(history.entries).ids() == {"S2", "S14"}
    other = History([])
    other.won(T0, "b")
    assert check([history.entries[0], replace(other.entries[0], namespace="other")]).violations == []
