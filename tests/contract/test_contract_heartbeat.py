"""Heartbeat, finish and release: when each is accepted, in every state of a run, on every store."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from bench import JOB, Bench, run_in

from leaselib._model import ClaimAnswer, cut_error
from leaselib.errors import ConfigurationError

# ---- the states in which an attempt may find its run -----------------------------------------------------------------


def _live(bench: Bench) -> ClaimAnswer:
    return bench.win()


def _ran_out(bench: Bench) -> ClaimAnswer:
    answer = bench.win(lease=5)
    bench.clock.advance(1000)
    return answer


def _released(bench: Bench) -> ClaimAnswer:
    answer = bench.win()
    assert bench.release(answer)
    return answer


def _taken_over(bench: Bench) -> ClaimAnswer:
    answer = bench.win()
    bench.expire(answer)
    bench.win(takeover_of=1)
    return answer


def _handed_over(bench: Bench) -> ClaimAnswer:
    answer = _released(bench)
    bench.win(takeover_of=1)
    return answer


def _success(bench: Bench) -> ClaimAnswer:
    answer = bench.win()
    assert bench.finish(answer, "success")
    return answer


def _failed(bench: Bench) -> ClaimAnswer:
    answer = bench.win()
    assert bench.finish(answer, "failed", "first")
    return answer


def _finished_by_the_next_attempt(bench: Bench) -> ClaimAnswer:
    answer = bench.win()
    bench.expire(answer)
    assert bench.finish(bench.win(takeover_of=1), "success")
    return answer


def _interrupted(bench: Bench) -> ClaimAnswer:
    answer = bench.win(max_attempts=1)
    bench.expire(answer)
    assert bench.claim(max_attempts=1).outcome == "interrupted"
    return answer


def _superseded(bench: Bench) -> ClaimAnswer:
    answer = bench.win(0, lease=5)
    bench.clock.advance(20)
    bench.win(20)
    return answer


def _purged(bench: Bench) -> ClaimAnswer:
    answer = bench.win()
    assert bench.store.purge(JOB, force=True) == 1
    return answer


def _never_won(bench: Bench) -> ClaimAnswer:
    """The token of a claim that was told `running`."""
    bench.win()
    return bench.claim()


State = Callable[[Bench], ClaimAnswer]
OVER: list[State] = [
    _taken_over,
    _handed_over,
    _finished_by_the_next_attempt,
    _interrupted,
    _superseded,
    _purged,
    _never_won,
]
ENDED: list[State] = [_success, _failed]


def in_states(*states: State) -> pytest.MarkDecorator:
    """The test runs once for each of these states."""
    return pytest.mark.parametrize("state", states, ids=lambda state: state.__name__[1:])


# ---- heartbeat -------------------------------------------------------------------------------------------------------


@in_states(_live, _ran_out)
def test_a_heartbeat_sets_the_lease_end_to_now_plus_its_lease(bench: Bench, state: State) -> None:
    """Rule 2: a lease that ran out but that nobody took over is renewed too. Nothing else changes."""
    answer = state(bench)
    bench.clock.advance(3)
    before, old = bench.store.now(), bench.run()
    assert bench.beat(answer, lease=45.5)
    after, run = bench.store.now(), bench.run()
    assert before <= run.lease_end - timedelta(seconds=45.5) <= after
    assert run.lease == 45.5
    kept = [name for name in old.__slots__ if name not in ("lease", "lease_end")]
    assert [getattr(run, name) for name in kept] == [getattr(old, name) for name in kept]


@in_states(_released, *OVER, *ENDED)
def test_a_heartbeat_is_refused_in_every_other_state(bench: Bench, state: State) -> None:
    """And leaves neither a lease nor a checkpoint behind."""
    answer = state(bench)
    with bench.nothing_changes():
        assert not bench.beat(answer, checkpoint='"late"')


def test_a_heartbeat_of_an_unknown_job_slot_or_token_is_refused(bench: Bench) -> None:
    """Nothing is recorded for it."""
    answer = bench.win()
    with bench.nothing_changes(JOB, "other"):
        assert not bench.store.heartbeat("other", bench.base, answer.token, 30)
        assert not bench.store.heartbeat(JOB, bench.slot(0.001), answer.token, 30)
        assert not bench.store.heartbeat(JOB, bench.base, answer.token + "x", 30)
        assert not bench.store.heartbeat(JOB, bench.base, "", 30)
    assert bench.store.jobs() == [JOB]


def test_a_heartbeat_may_shorten_a_lease(bench: Bench) -> None:
    """Lease end is now + lease, not the later of two ends."""
    answer = bench.win(lease=100)
    assert bench.beat(answer, lease=2)
    bench.clock.advance(2)
    assert bench.claim(takeover_of=1).outcome == "won"


def test_a_heartbeat_keeps_others_out(bench: Bench) -> None:
    """Ten leases long, by one heartbeat a third of a lease."""
    answer = bench.win(lease=30)
    for _ in range(30):
        bench.clock.advance(10)
        assert bench.beat(answer)
        assert bench.claim(takeover_of=1).outcome == "running"


def test_a_heartbeat_without_checkpoint_leaves_the_stored_one(bench: Bench) -> None:
    """None is no checkpoint; the JSON text `null` is one."""
    answer = bench.win()
    assert bench.beat(answer, checkpoint='{"n": 1}')
    assert bench.beat(answer)
    assert bench.run().checkpoint == {"n": 1}
    assert bench.beat(answer, checkpoint="null")
    assert bench.run().checkpoint is None


@pytest.mark.parametrize(
    "text", ['"\\u0000"', '"é 😀 \\ud83d"', "{}", "[]", "1e30", "12345678901234567890", '""', "[0.1]"]
)
def test_a_checkpoint_comes_back_as_the_same_value(bench: Bench, text: str) -> None:
    """Also what some stores find hard: NUL, emoji, lone surrogates (escaped), empty containers, large numbers."""
    answer = bench.win()
    assert bench.beat(answer, checkpoint=text)
    bench.expire(answer)
    assert run_in(bench.win(takeover_of=1)).checkpoint == json.loads(text)


def test_a_checkpoint_of_64_kib_is_kept(bench: Bench) -> None:
    """The largest allowed; the limit counts bytes of UTF-8."""
    text = '"' + "é" * (32 * 1024 - 1) + '"'
    assert len(text.encode()) == 64 * 1024
    answer = bench.win()
    assert bench.beat(answer, checkpoint=text)
    assert bench.run().checkpoint == text.strip('"')


@pytest.mark.parametrize("opening", ["[", '{"[":'], ids=["lists", "objects"])
def test_a_checkpoint_of_500_levels_is_carried_over_and_a_deeper_one_is_refused_at_once(
    bench: Bench, opening: str
) -> None:
    """Not only by the store that has to read it at a takeover."""
    closing = "]" if opening == "[" else "}"
    text = opening * 500 + "1" + closing * 500
    answer = bench.win()
    with pytest.raises(ConfigurationError, match="500 levels deep; these are 501"):
        bench.beat(answer, checkpoint=opening + text + closing)
    assert bench.beat(answer, checkpoint=text)
    bench.expire(answer)
    taken = run_in(bench.win(takeover_of=1)).checkpoint
    assert json.dumps(taken, separators=(",", ":")) == text


# ---- finish ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "error"), [("success", None), ("failed", "ValueError: no"), ("failed", None)])
@in_states(_live, _ran_out)
def test_a_finish_ends_the_run(bench: Bench, state: State, status: str, error: str | None) -> None:
    """Rule 4: with the current token, also after the lease ran out. Nothing else changes."""
    answer = state(bench)
    before, old = bench.store.now(), bench.run()
    assert bench.finish(answer, status, error)  # type: ignore[arg-type]
    after, run = bench.store.now(), bench.run()
    assert run.ended_at is not None
    assert before <= run.ended_at <= after
    assert (run.status, run.error) == (status, error)
    kept = [name for name in old.__slots__ if name not in ("status", "error", "ended_at", "attempts")]
    assert [getattr(run, name) for name in kept] == [getattr(old, name) for name in kept]


@in_states(_released, *OVER)
@pytest.mark.parametrize("status", ["success", "failed"])
def test_a_finish_is_refused_in_every_other_state(bench: Bench, state: State, status: str) -> None:
    """Released, taken over, ended by a claim, or gone: nothing changes."""
    answer = state(bench)
    with bench.nothing_changes():
        assert not bench.finish(answer, status, "late")  # type: ignore[arg-type]


def test_a_finish_sent_again_is_true_again(bench: Bench) -> None:
    """Its answer was lost; nothing is written twice, however much later it comes."""
    for at, status in ((0.0, "success"), (0.5, "failed")):
        answer = bench.win(at)
        assert bench.finish(answer, status, "e")  # type: ignore[arg-type]
        bench.clock.advance(10)
        with bench.nothing_changes():
            assert bench.finish(answer, status, "e")  # type: ignore[arg-type]
            assert bench.finish(answer, status, "e")  # type: ignore[arg-type]


def test_another_status_for_a_finished_run_is_refused(bench: Bench) -> None:
    """The first stands."""
    for at, first, second in ((0.0, "success", "failed"), (0.5, "failed", "success")):
        answer = bench.win(at)
        assert bench.finish(answer, first)  # type: ignore[arg-type]
        with bench.nothing_changes():
            assert not bench.finish(answer, second)  # type: ignore[arg-type]


@in_states(*ENDED)
def test_another_token_cannot_finish_a_finished_run(bench: Bench, state: State) -> None:
    """Not even with the status that it has."""
    state(bench)
    with bench.nothing_changes():
        for status in ("success", "failed"):
            assert not bench.store.finish(JOB, bench.base, "another", status)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "stored"),
    [
        ("x" * 4096, "x" * 4096),
        ("x" * 4097, "x" * 4096),
        ("x" * 1_000_000, "x" * 4096),
        ("é" * 3000, "é" * 2048),
        ("x" + "é" * 3000, "x" + "é" * 2047),
        ("xx" + "😀" * 3000, "xx" + "😀" * 1023),
        ("日" * 4096, "日" * 1365),
        ("a\0b", "a\\x00b"),
        ("a\ud800b", "a\\ud800b"),
        ("\udcff", "\\udcff"),
        ("\0" * 4096, "\\x00" * 1024),
        ("line 1\nline 2\r\n\ttab \x1b[2J", "line 1\nline 2\r\n\ttab \x1b[2J"),
        ("", ""),
    ],
    ids=lambda text: f"{len(text)}-{text[:3]!a}",
)
def test_an_error_is_cut_at_4_kib_and_always_storable(bench: Bench, error: str, stored: str) -> None:
    """At the end of a character; NUL and lone surrogates, which some store refuses, are escaped."""
    answer = bench.win()
    assert bench.finish(answer, "failed", error)
    assert bench.run().error == stored == cut_error(error)
    assert len(stored.encode()) <= 4096


# ---- release ---------------------------------------------------------------------------------------------------------


@in_states(_live, _ran_out)
def test_a_release_ends_the_lease_now(bench: Bench, state: State) -> None:
    """A hand-over: still `running`, released, lease end = now; nothing else changes."""
    answer = state(bench)
    before, old = bench.store.now(), bench.run()
    assert bench.release(answer)
    after, run = bench.store.now(), bench.run()
    assert before <= run.lease_end <= after
    assert (run.status, run.released, run.handovers, run.ended_at) == ("running", True, 1, None)
    kept = [name for name in old.__slots__ if name not in ("lease_end", "released", "handovers")]
    assert [getattr(run, name) for name in kept] == [getattr(old, name) for name in kept]


@in_states(*OVER, *ENDED)
def test_a_release_is_refused_in_every_other_state(bench: Bench, state: State) -> None:
    """And leaves no checkpoint behind."""
    answer = state(bench)
    with bench.nothing_changes():
        assert not bench.release(answer, checkpoint='"late"')


def test_a_release_sent_again_is_true_again(bench: Bench) -> None:
    """Its answer was lost: it counts once, and the first one's time and checkpoint stand."""
    answer = bench.win()
    assert bench.release(answer, checkpoint="1")
    bench.clock.advance(10)
    with bench.nothing_changes():
        assert bench.release(answer, checkpoint="2")
        assert bench.release(answer)


def test_a_release_without_checkpoint_leaves_the_stored_one(bench: Bench) -> None:
    """As a heartbeat does."""
    answer = bench.win()
    assert bench.beat(answer, checkpoint="[1]")
    assert bench.release(answer)
    assert bench.run().checkpoint == [1]


def test_a_released_lease_stays_released(bench: Bench) -> None:
    """A heartbeat that was sent before the release and arrives after it doesn't renew it, and a finish is refused."""
    answer = bench.win()
    assert bench.release(answer)
    with bench.nothing_changes():
        assert not bench.beat(answer)
        assert not bench.finish(answer)
    assert bench.win(takeover_of=1).outcome == "won"


def test_nobody_waits_for_the_rest_of_a_released_lease(bench: Bench) -> None:
    """The next attempt, and the next slot, may start at the very same time."""
    for job in ("next attempt", "next slot"):
        assert bench.release(bench.win(0, job=job, lease=1000))
    assert bench.claim(0, job="next attempt", takeover_of=1).outcome == "won"
    assert bench.claim(0.5, job="next slot").outcome == "won"


# ---- the runner that was only slow -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["expire", "release"])
def test_an_attempt_that_was_taken_over_can_change_nothing_any_more(bench: Bench, how: str) -> None:
    """Fencing: heartbeat, finish and release with the old token are False; the new attempt's fence is larger."""
    old = bench.win(runner="frozen")
    if how == "expire":
        bench.expire(old)
    else:
        assert bench.release(old)
    new = bench.win(runner="backup", takeover_of=1)
    with bench.nothing_changes():
        assert not bench.beat(old, lease=1000, checkpoint='"old"')
        assert not bench.finish(old, "success")
        assert not bench.finish(old, "failed", "old")
        assert not bench.release(old, checkpoint='"old"')
    assert bench.run() == new.run
    assert run_in(new).fence > run_in(old).fence
    assert bench.finish(new)
    with bench.nothing_changes():
        assert not bench.beat(old)
        assert not bench.finish(old, "success")
        assert not bench.release(old)
