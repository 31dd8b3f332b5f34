"""The judge of histories: each bad one is reported under just the invariants that it breaks, a good one under none."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from reference import Reference

from . import INVARIANTS, Entry, History, check, decisions
from .bad_decisions import BAD as BAD_DECISIONS
from .bad_decisions import JOB, T0, Decisions, request
from .bad_processes import BAD, BAD_BOTH, BAD_LIVENESS, GOOD, GOOD_LIVENESS

PROCESSES = {**BAD, **BAD_BOTH}


def test_every_invariant_has_two_bad_histories_that_break_nothing_else() -> None:
    """Whoever adds an invariant to the list has to show that it is seen."""
    counts: Counter[str] = Counter()
    for ids in (*(ids for ids, _ in BAD_DECISIONS.values()), *(ids for ids, _ in (PROCESSES | BAD_LIVENESS).values())):
        counts.update(ids if len(ids) == 1 else ())
    assert {name: counts[name] for name in INVARIANTS if counts[name] < 2} == {}
    assert set(counts) <= set(INVARIANTS)


@pytest.mark.parametrize("name", BAD_DECISIONS)
def test_a_bad_history_of_decisions_is_reported(name: str) -> None:
    """At its last entry, which alone is wrong."""
    invariants, build = BAD_DECISIONS[name]
    made = Decisions([])
    build(made)
    found = check(History(made.entries))
    assert {violation.id for violation in found} == invariants, found
    assert {violation.index for violation in found} == {len(made.entries) - 1}
    assert str(found[0]).startswith(f"{found[0].id} at entry ")
    assert check(History(made.entries[:-1])) == []


@pytest.mark.parametrize("name", PROCESSES)
def test_a_bad_history_of_processes_is_reported(name: str) -> None:
    """Those with decisions are fine without them."""
    invariants, made = PROCESSES[name]
    assert {violation.id for violation in check(made)} == invariants
    if name in BAD_BOTH:
        assert check(replace(made, decisions=())) == []


@pytest.mark.parametrize("name", BAD_LIVENESS)
def test_what_stands_still_in_peace_is_reported(name: str) -> None:
    """One slot, or one run."""
    invariants, found = BAD_LIVENESS[name]
    assert {violation.id for violation in found} == invariants
    assert len(found) == 1


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_passes(name: str) -> None:
    """Nothing is held against it."""
    assert check(GOOD[name]) == []


@pytest.mark.parametrize("name", GOOD_LIVENESS)
def test_what_goes_on_passes(name: str) -> None:
    """Nothing is held against it."""
    assert GOOD_LIVENESS[name] == []


def test_what_the_rules_decide_passes() -> None:
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
    report = decisions.check(store.entries)
    assert report.violations == []
    assert report.quiet


def test_a_clock_that_steps_back_or_a_loss_is_not_quiet() -> None:
    """The report says so; a forward step can't be told from time that passes."""
    history = Decisions([])
    history.ended(T0)
    assert decisions.check(history.entries).quiet
    stepped = [*history.entries, Entry("purge", JOB, T0 - 1, 0)]
    lost = [*history.entries, Entry("loss", "", T0 + 9_000)]
    assert not decisions.check(stepped).quiet
    assert not decisions.check(lost).quiet


def test_a_store_that_lost_its_data_may_start_a_slot_again() -> None:
    """If the loss is on record; with another token, and a fence that is greater all the same."""
    history = Decisions([])
    history.ended(T0)
    history.entries.append(Entry("loss", "", T0 + 2_000))
    history.won(T0, "b", T0 + 3_000)
    assert decisions.check(history.entries).violations == []
    assert decisions.check([e for e in history.entries if e.op != "loss"]).ids() >= {"S9"}


def test_namespaces_are_judged_apart() -> None:
    """The same job and slot may start in each; a token may not."""
    history = Decisions([])
    history.won(T0, "a")
    history.entries.append(replace(history.entries[0], namespace="other"))
    assert decisions.check(history.entries).ids() == {"S2", "S14"}
    other = Decisions([])
    other.won(T0, "b")
    assert decisions.check([history.entries[0], replace(other.entries[0], namespace="other")]).violations == []
