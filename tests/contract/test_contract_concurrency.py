"""Each operation is one atomic step: threads and clients that ask at the same moment, on every store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import pytest
from bench import JOB, Bench, run_in

from leaselib.stores._base import Store

THREADS = 8
T = TypeVar("T")


def at_once(count: int, call: Callable[[int], T]) -> list[T]:
    """What `call(0)` to `call(count - 1)` return, each called in a thread of its own, all released together."""
    barrier = threading.Barrier(count)
    results: list[T] = []
    errors: list[BaseException] = []

    def run(n: int) -> None:
        barrier.wait(30)
        try:
            results.append(call(n))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    assert len(results) == count
    return results


@pytest.fixture(params=["one client", "a client each"])
def clients(request: pytest.FixtureRequest, bench: Bench) -> list[Store]:
    """What each thread talks to: the same store object, or a client of its own on the same place."""
    if request.param == "one client":
        return [bench.store] * THREADS
    return [bench.connect("default") for _ in range(THREADS)]


def test_one_slot_has_one_winner(bench: Bench, clients: list[Store]) -> None:
    """Of 8 threads one wins, the others are told `running`, slot after slot."""
    for n in range(10):
        bench.set_now(bench.slot(n))
        slot = bench.slot(n)
        answers = at_once(THREADS, lambda i, slot=slot, n=n: clients[i].claim(JOB, slot, f"t-{n}-{i}", f"r-{i}"))
        assert Counter(a.outcome for a in answers) == {"won": 1, "running": THREADS - 1}
        assert len({run_in(a).token for a in answers}) == 1
        winner = next(a for a in answers if a.outcome == "won")
        assert run_in(winner).runner == f"r-{winner.token.rpartition('-')[2]}"
        assert bench.finish(winner)


def test_one_dead_run_has_one_successor(bench: Bench, clients: list[Store]) -> None:
    """Several backups notice: one wins attempt 2, the others see its lease."""
    latest = bench.win(max_attempts=99)
    for n in range(1, 9):
        bench.expire(latest)
        answers = at_once(
            THREADS,
            lambda i, n=n: clients[i].claim(JOB, bench.base, f"t-{n}-{i}", "r", takeover_of=n, max_attempts=99),
        )
        assert Counter(a.outcome for a in answers) == {"won": 1, "running": THREADS - 1}
        assert {run_in(a).attempt for a in answers} == {n + 1}
        latest = next(a for a in answers if a.outcome == "won")


def test_one_run_of_a_job_is_live_whatever_the_slots(bench: Bench, clients: list[Store]) -> None:
    """Eight slots of a skip job at once: one wins, the others overlap it, whichever is older."""
    for n in range(6):
        bench.set_now(bench.slot(n * 10))
        slots = [bench.slot(n * 10 + i / 10) for i in range(THREADS)]
        answers = at_once(THREADS, lambda i, slots=slots, n=n: clients[i].claim(JOB, slots[i], f"t-{n}-{i}", "r"))
        assert Counter(a.outcome for a in answers) == {"won": 1, "overlap": THREADS - 1}
        assert len({run_in(a).slot for a in answers}) == 1
        assert bench.finish(next(a for a in answers if a.outcome == "won"))


def test_a_claim_sent_eight_times_at_once_is_one_attempt(bench: Bench, clients: list[Store]) -> None:
    """Every answer is `won`, with the same attempt and fence."""
    answers = at_once(THREADS, lambda i: clients[i].claim(JOB, bench.base, "same", "r"))
    assert {(a.outcome, run_in(a).attempt, run_in(a).fence) for a in answers} == {("won", 1, run_in(answers[0]).fence)}


def test_a_finish_and_a_takeover_at_once_have_one_winner(bench: Bench, clients: list[Store]) -> None:
    """Either the run is finished and the backup is told so, or the backup has it and the finish is refused."""
    for n in range(10):
        bench.set_now(bench.slot(n * 40))
        answer = bench.win(n * 40)
        bench.expire(answer)
        slot = bench.slot(n * 40)

        def race(i: int, slot=slot, answer=answer, n=n) -> object:  # type: ignore[no-untyped-def]
            if i == 0:
                return clients[0].finish(JOB, slot, answer.token, "success")
            return clients[i].claim(JOB, slot, f"t-{n}-{i}", "r", takeover_of=1)

        results = at_once(THREADS, race)
        finished = next(r for r in results if isinstance(r, bool))
        outcomes = Counter(r.outcome for r in results if not isinstance(r, bool))  # type: ignore[attr-defined]
        run = bench.run(n * 40)
        if finished:
            assert outcomes == {"finished": THREADS - 1}
            assert (run.status, run.attempt) == ("success", 1)
        else:
            assert outcomes == {"won": 1, "running": THREADS - 2}
            assert (run.status, run.attempt) == ("running", 2)
            assert bench.store.finish(JOB, slot, run.token, "success")


def test_fences_of_a_job_are_unique_under_contention(bench: Bench, clients: list[Store]) -> None:
    """Eight threads start runs of an `allow` job: every start has a fence of its own, in the order of starting."""

    def starts(i: int) -> list[tuple[int, int]]:
        found = []
        for n in range(10):
            answer = clients[i].claim(JOB, bench.slot((i * 10 + n) / 100), f"t-{i}-{n}", "r", overlap="allow")
            assert answer.outcome == "won"
            found.append((run_in(answer).fence, answer.now_ms))
        return found

    results = at_once(THREADS, starts)
    for found in results:
        assert found == sorted(found)
    pairs = sorted(pair for found in results for pair in found)
    fences = [fence for fence, _ in pairs]
    assert len(set(fences)) == THREADS * 10
    assert [now for _, now in pairs] == sorted(now for _, now in pairs)


def test_jobs_do_not_wait_for_each_other(bench: Bench, clients: list[Store]) -> None:
    """Eight jobs at once, whole lives each: every one of them comes through."""

    def life(i: int) -> bool:
        store, job = clients[i], f"job-{i}"
        for n in range(8):
            slot = bench.slot(n / 100)
            assert store.claim(job, slot, f"t-{n}", "r").outcome == "won"
            assert store.heartbeat(job, slot, f"t-{n}", 30, f"{n}")
            assert store.release(job, slot, f"t-{n}")
            assert store.claim(job, slot, f"u-{n}", "r", takeover_of=1).outcome == "won"
            assert store.finish(job, slot, f"u-{n}", "success")
        return True

    assert at_once(THREADS, life) == [True] * THREADS
    for i in range(THREADS):
        runs = bench.store.runs(f"job-{i}")
        assert [(run.status, run.attempt) for run in runs] == [("success", 2)] * 8
