"""History: what trimming keeps, what it removes, and that its length costs a claim nothing, on every store."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

import pytest
from bench import JOB, Bench, ms

TRIM_AGE_S = 70
"""Runs younger than the largest lateness + 10 s + 60 s are never trimmed."""


def test_trimming_keeps_the_newest_history_size_ended_runs(bench: Bench) -> None:
    """Also at the moment when a new run starts: that one hasn't ended."""
    for n in range(6):
        bench.ended(n / 10, history_size=100)
    bench.clock.advance(1000)
    newest = bench.win(1000, history_size=3)
    kept = [0.3, 0.4, 0.5]
    assert bench.slots() == [*kept, 1000]
    assert bench.finish(newest)
    bench.clock.advance(1000)
    bench.win(2000, history_size=3)
    assert bench.slots() == [0.4, 0.5, 1000, 2000]


def test_history_of_one_still_shows_the_last_run_while_the_next_is_running(bench: Bench) -> None:
    """One ended run is kept."""
    options = {"history_size": 1, "max_late": 0}
    for at in (0, 1000, 2000):
        bench.set_now(bench.slot(at))
        answer = bench.win(at, **options)
        assert bench.slots() == [0] if at == 0 else bench.slots() == [at - 1000, at]
        assert bench.finish(answer)


def test_ended_runs_stay_as_few_as_history_size_under_load(bench: Bench) -> None:
    """Ten, the one that ended last, and those too young to trim."""
    for n in range(200):
        bench.set_now(bench.slot(n * 5))
        bench.ended(n * 5, history_size=10, max_late=0)
    young = TRIM_AGE_S // 5 + 1
    assert 10 <= len(bench.slots()) <= max(10 + 1, young + 1)
    bench.set_now(bench.slot(5000))
    bench.win(5000, history_size=10, max_late=0)
    assert len(bench.slots()) == 10 + 1


@pytest.mark.parametrize(("max_late", "keep"), [(60.0, None), (60.0, 300.0), (300.0, 60.0), (0.0, 0.0)])
@pytest.mark.parametrize("offset_ms", [-2000, 0, 1, 3000])
def test_a_run_that_a_claim_could_still_ask_for_is_never_trimmed(
    bench: Bench, max_late: float, keep: float | None, offset_ms: int
) -> None:
    """Up to the largest lateness that any claim may have + 10 s + 60 s, whatever history_size is."""
    options = {"history_size": 0, "max_late": max_late, "keep": keep}
    bench.ended(0, **options)
    window = ms(round(max(max_late, keep or 0) * 1000)) + ms(TRIM_AGE_S * 1000)
    bench.set_now(bench.base + window + ms(offset_ms))
    at = (bench.store.now() - bench.base).total_seconds()
    answer = bench.win(at, **options)
    young = answer.now - bench.base <= window
    assert bench.slots() == ([0, at] if young else [at])


def test_running_runs_are_never_trimmed(bench: Bench) -> None:
    """However old: a long one that its runner keeps alive."""
    long = bench.win(0, overlap="allow", lease=100_000)
    for n in range(1, 5):
        bench.set_now(bench.slot(n * 1000))
        bench.ended(n * 1000, overlap="allow", history_size=0, max_late=0)
    assert bench.slots() == [0, 4000]
    assert bench.finish(long)
    bench.set_now(bench.slot(5000))
    bench.ended(5000, overlap="allow", history_size=0, max_late=0)
    assert bench.slots() == [5000]


def test_a_claim_trims_a_bounded_number_of_runs(bench: Bench) -> None:
    """A history that was made long by another option shrinks from claim to claim, oldest first."""
    for n in range(50):
        bench.ended(n / 100, history_size=1000)
    left = [len(bench.slots())]
    for n in range(1, 6):
        bench.set_now(bench.slot(n * 1000))
        bench.ended(n * 1000, history_size=3, max_late=0)
        left.append(len(bench.slots()))
        assert bench.slots() == bench.slots()[-left[-1] :]
    assert left[0] == 50
    assert all(before + 1 - after <= 16 for before, after in pairwise(left))
    assert left[-1] == 3 + 1


def test_claims_of_other_kinds_trim_nothing(bench: Bench) -> None:
    """Refused ones, ones sent again, and takeovers write no more than their own run."""
    for n in range(5):
        bench.ended(n / 10, history_size=100)
    bench.clock.advance(1000)
    first = bench.win(1000, history_size=100)
    assert bench.claim(1000, history_size=0, max_late=0).outcome == "running"
    assert bench.claim(1000.5, history_size=0, max_late=0).outcome == "overlap"
    assert bench.again(first, history_size=0, max_late=0).outcome == "won"
    bench.expire(first)
    assert bench.claim(1000, takeover_of=1, history_size=0, max_late=0).outcome == "won"
    assert len(bench.slots()) == 6


@pytest.mark.timeout(600)  # up to 20,000 round trips take their time on a server
def test_a_claim_costs_the_same_after_100_and_after_thousands_of_runs(bench: Bench, effort: int) -> None:
    """10,000 in the gate, with `--effort 4`; a quarter of that otherwise.

    Medians of a start, two refusals and a finish; measured in turns, so that a slow machine slows both."""
    for job, count in (("short", 100), ("long", 2_500 * effort)):
        for n in range(count):
            bench.ended(n / 1000, job=job, history_size=1_000_000)
        bench.clock.advance(20)
    costs: dict[str, dict[str, list[float]]] = {"short": {}, "long": {}}
    for _ in range(60):
        bench.clock.advance(1)
        for job, taken in costs.items():
            _time_a_life(bench, job, taken)
    for kind, seconds in costs["short"].items():
        short, long = statistics.median(seconds), statistics.median(costs["long"][kind])
        assert long < 4 * short, f"{kind}: {short:.6f} s after 100 runs, {long:.6f} s after {2_500 * effort}"


def _time_a_life(bench: Bench, job: str, taken: dict[str, list[float]]) -> None:
    at = (bench.store.now() - bench.base).total_seconds()
    options = {"job": job, "history_size": 1_000_000}
    clock = [time.perf_counter()]
    answer = bench.win(at, **options)
    clock.append(time.perf_counter())
    assert bench.claim(at + 0.5, **options).outcome == "overlap"
    clock.append(time.perf_counter())
    assert bench.finish(answer)
    clock.append(time.perf_counter())
    assert bench.claim(at, **options).outcome == "finished"
    clock.append(time.perf_counter())
    for kind, (start, end) in zip(("win", "overlap", "finish", "finished"), pairwise(clock), strict=True):
        taken.setdefault(kind, []).append(end - start)


def test_history_is_kept_per_job(bench: Bench) -> None:
    """One job's starts trim no other job's runs."""
    bench.ended(0, job="other", history_size=0, max_late=0)
    bench.clock.advance(1000)
    bench.ended(1000, history_size=0, max_late=0)
    assert bench.slots("other") == [0]
    assert bench.slots(JOB) == [1000]
