"""Reading and purging: unfinished, get, runs, jobs, purge, now, ping and close, on every store."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from bench import JOB, Bench, ms, run_in

from leaselib._model import Pong, epoch_ms
from leaselib.errors import ConfigurationError

PARIS = ZoneInfo("Europe/Paris")


def _offset(bench: Bench, slot: datetime) -> float:
    return (slot - bench.base) / timedelta(seconds=1)


# ---- get and runs ----------------------------------------------------------------------------------------------------


def test_get_knows_a_run_by_job_and_slot_only(bench: Bench) -> None:
    """To the millisecond; anything else is None."""
    answer = bench.win(0)
    assert bench.store.get(JOB, bench.base) == answer.run
    assert bench.store.get(JOB, bench.base + ms(1)) is None
    assert bench.store.get(JOB, bench.base - ms(1)) is None
    assert bench.store.get("jo", bench.base) is None
    assert bench.store.get("job ", bench.base) is None


def test_every_instant_of_a_run_is_an_aware_utc_datetime(bench: Bench) -> None:
    """So that == and dict look-ups work."""
    bench.expire(bench.win(lease=5))
    run = run_in(bench.ended(takeover_of=1))
    stored = bench.run()
    instants = [stored.slot, stored.lease_end, stored.started_at, stored.ended_at, run.slot]
    instants += [t for a in stored.attempts for t in (a.started_at, a.ended_at)]
    for instant in instants:
        assert instant is not None
        assert instant.tzinfo is timezone.utc


def test_runs_are_newest_first_and_at_most_limit(bench: Bench) -> None:
    """Whatever their order of start and their status."""
    for at in (3, 1, 5, 2, 4):
        bench.win(at / 10, overlap="allow")
    assert bench.finish(bench.claim(0.6, overlap="allow"))
    found = [_offset(bench, run.slot) for run in bench.store.runs(JOB)]
    assert found == [0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert [_offset(bench, run.slot) for run in bench.store.runs(JOB, limit=2)] == [0.6, 0.5]
    assert bench.store.runs(JOB, limit=0) == []
    assert bench.store.runs("unknown") == []


def test_runs_gives_a_hundred_unless_told(bench: Bench) -> None:
    """The default limit."""
    for n in range(103):
        bench.ended(n / 1000, history_size=1000)
    assert len(bench.store.runs(JOB)) == 100
    assert len(bench.store.runs(JOB, limit=1000)) == 103
    assert len(bench.store.runs(JOB, 102)) == 102


def test_runs_and_get_agree(bench: Bench) -> None:
    """Field for field, for a run in every status."""
    bench.ended(0, overlap="allow")
    bench.finish(bench.win(0.1, overlap="allow"), "failed", "no")
    bench.win(0.2, overlap="allow", lease=1)
    bench.clock.advance(2)
    bench.win(0.3, overlap="allow")
    bench.release(bench.win(0.4, overlap="allow"), '{"a": [1]}')
    bench.win(0.5, overlap="allow")
    runs = bench.store.runs(JOB)
    assert [run.status for run in runs] == ["running", "interrupted", "running", "interrupted", "failed", "success"]
    assert runs == [bench.store.get(JOB, run.slot) for run in runs]


# ---- unfinished ------------------------------------------------------------------------------------------------------


def test_unfinished_lists_running_runs_whether_live_or_not(bench: Bench) -> None:
    """Live, ran out and released; not the ended ones. Oldest slot first."""
    bench.ended(0.1, overlap="allow")
    handed_over = bench.win(0.2, overlap="allow")
    bench.win(0.25, overlap="allow", lease=1000)
    bench.win(0.3, overlap="allow", lease=1)
    assert bench.release(handed_over)
    bench.clock.advance(50)
    found = bench.store.unfinished([JOB])
    assert [_offset(bench, run.slot) for run in found] == [0.2, 0.25, 0.3]
    assert found == [bench.run(at) for at in (0.2, 0.25, 0.3)]


def test_unfinished_looks_at_the_named_jobs_only(bench: Bench) -> None:
    """Several at once, each of their runs once, in one order by slot; names without runs give nothing."""
    bench.win(0.2, job="a")
    bench.win(0.1, job="b")
    bench.win(0.3, job="c")
    found = bench.store.unfinished(["c", "a", "unknown", "b"])
    assert [run.job for run in found] == ["b", "a", "c"]
    assert [run.job for run in bench.store.unfinished(("a",))] == ["a"]
    assert [run.job for run in bench.store.unfinished(name for name in ["a", "b"])] == ["b", "a"]
    assert bench.store.unfinished(["unknown"]) == []
    assert bench.store.unfinished([]) == []


def test_unfinished_gives_each_run_once_also_for_a_name_that_is_named_twice(bench: Bench) -> None:
    """Whoever asks would else back it up twice."""
    bench.win(job="a")
    assert [run.job for run in bench.store.unfinished(["a", "a"])] == ["a"]


def test_unfinished_copes_with_many_jobs(bench: Bench) -> None:
    """More names than some databases take parameters."""
    bench.win(job="job-1500")
    assert [run.job for run in bench.store.unfinished(f"job-{n}" for n in range(2000))] == ["job-1500"]


# ---- jobs ------------------------------------------------------------------------------------------------------------


def test_jobs_are_the_sorted_names_that_ever_started_a_run(bench: Bench) -> None:
    """In order of code points; a refused claim makes no job, and a purge forgets none."""
    assert bench.store.jobs() == []
    for job in ("b", "é", "B", "a", "😀", "\uffee"):
        bench.ended(job=job)
    bench.claim(99, job="early")
    bench.claim(-999, job="late")
    bench.claim(0, job="gone", takeover_of=1)
    expected = ["B", "a", "b", "é", "\uffee", "😀"]
    assert bench.store.jobs() == expected == sorted(expected)
    assert bench.store.purge("b") == 1
    assert bench.store.jobs() == expected


# ---- purge -----------------------------------------------------------------------------------------------------------


def test_purge_removes_the_ended_runs_and_says_how_many(bench: Bench) -> None:
    """Running ones stay, dead and released ones too."""
    for at, status in ((0.1, "success"), (0.2, "failed")):
        assert bench.finish(bench.win(at, overlap="allow"), status)  # type: ignore[arg-type]
    bench.win(0.3, overlap="allow", lease=1)
    handed_over = bench.win(0.4, overlap="allow")
    live = bench.win(0.5, overlap="allow", lease=900)
    assert bench.release(handed_over)
    bench.clock.advance(10)
    assert bench.store.purge(JOB) == 2
    assert bench.slots() == [0.3, 0.4, 0.5]
    assert bench.store.purge(JOB) == 0
    assert bench.finish(live)
    assert bench.store.purge(JOB) == 1


def test_purge_with_force_removes_running_runs_too(bench: Bench) -> None:
    """Their runners are refused from then on, and they don't start again."""
    bench.ended(0, overlap="allow")
    live = bench.win(0.5, overlap="allow")
    assert bench.store.purge(JOB, force=True) == 2
    assert bench.store.runs(JOB) == []
    assert not bench.beat(live)
    assert not bench.finish(live)
    assert not bench.release(live)
    assert bench.again(live).outcome == "superseded"
    assert bench.claim(0.5, takeover_of=1).outcome == "gone"
    assert bench.store.unfinished([JOB]) == []


def test_a_purged_job_goes_on_with_its_next_slot(bench: Bench) -> None:
    """The live run that force removed is in nobody's way."""
    bench.win(0)
    assert bench.store.purge(JOB, force=True) == 1
    assert bench.claim(0.5).outcome == "won"


def test_purge_of_an_unknown_job_is_zero(bench: Bench) -> None:
    """And makes no job."""
    assert bench.store.purge("unknown") == 0
    assert bench.store.purge("unknown", force=True) == 0
    assert bench.store.jobs() == []


# ---- now, ping and close ---------------------------------------------------------------------------------------------


def test_now_and_ping_show_the_stores_clock(bench: Bench) -> None:
    """In UTC; it follows when the clock goes on and when it is set back."""
    before = bench.clock.now()
    pong, now = bench.store.ping(), bench.store.now()
    assert isinstance(pong, Pong)
    assert pong.now.tzinfo is now.tzinfo is timezone.utc
    assert before - ms(1) <= pong.now <= now <= bench.clock.now() + ms(1)
    bench.clock.advance(5000)
    assert timedelta(seconds=5000) <= bench.store.now() - now < timedelta(seconds=5060)
    bench.clock.step(-9000)
    assert timedelta(seconds=-4000) <= bench.store.now() - now < timedelta(seconds=-3940)


def test_the_epoch_is_the_same_for_every_client_and_every_answer(bench: Bench) -> None:
    """It names the store, not the connection."""
    epoch = bench.store.ping().epoch
    other = bench.connect("default")
    assert other.ping().epoch == epoch == bench.win().epoch
    assert other.claim(JOB, bench.slot(), "t", "r").epoch == epoch
    assert epoch_ms(epoch) <= bench.claim().now_ms
    bench.store.close()
    bench.clock.advance(100)
    assert bench.store.ping().epoch == epoch


def test_every_client_of_a_place_sees_the_same_runs(bench: Bench) -> None:
    """What one writes the other reads and respects."""
    other = bench.connect("default")
    answer = bench.win()
    assert other.get(JOB, bench.base) == answer.run
    assert other.claim(JOB, bench.base, "t", "r").outcome == "running"
    assert other.heartbeat(JOB, bench.base, answer.token, 77)
    assert bench.run().lease == 77
    assert other.finish(JOB, bench.base, answer.token, "success")
    assert bench.claim().outcome == "finished"


def test_a_closed_store_opens_again_at_the_next_call(bench: Bench) -> None:
    """close() is idempotent, and lets nothing but connections go."""
    answer = bench.win()
    bench.store.close()
    bench.store.close()
    assert bench.store.get(JOB, bench.base) == answer.run
    bench.store.close()
    assert bench.beat(answer)
    assert bench.claim().outcome == "running"


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_a_slot_may_be_given_in_any_zone(bench: Bench) -> None:
    """It is an instant; what comes back is UTC."""
    slot = bench.base.astimezone(PARIS)
    run = run_in(bench.store.claim(JOB, slot, "t", "r"))
    assert run.slot == bench.base
    assert run.slot.tzinfo is timezone.utc
    assert bench.store.get(JOB, slot) == run


@pytest.mark.parametrize("fold", [0, 1])
def test_a_slot_may_be_an_ambiguous_local_time(bench: Bench, fold: int) -> None:
    """Python finds no such datetime equal to the same instant in UTC; the store must not trip over that."""
    slot = datetime(2026, 10, 25, 2, 30, fold=fold, tzinfo=PARIS)
    instant = datetime(2026, 10, 25, 0, 30, tzinfo=timezone.utc) + timedelta(hours=fold)
    answer = bench.store.claim(JOB, slot, "t", "r", max_late=1e9)
    assert answer.outcome == "won"
    assert run_in(answer).slot == instant
    assert bench.store.get(JOB, slot) == bench.store.get(JOB, instant) == answer.run


@pytest.mark.parametrize(
    "slot", [datetime(2026, 1, 1), datetime(2026, 1, 1, microsecond=1, tzinfo=timezone.utc), 0, None], ids=str
)
def test_a_slot_that_is_no_aware_whole_millisecond_is_refused(bench: Bench, slot: object) -> None:
    """By every operation that takes one, before anything is sent."""
    store = bench.store
    calls = [
        lambda: store.claim(JOB, slot, "t", "r"),  # type: ignore[arg-type]
        lambda: store.heartbeat(JOB, slot, "t", 30),  # type: ignore[arg-type]
        lambda: store.finish(JOB, slot, "t", "success"),  # type: ignore[arg-type]
        lambda: store.release(JOB, slot, "t"),  # type: ignore[arg-type]
        lambda: store.get(JOB, slot),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match="slot"):
            call()


def test_a_finish_with_another_status_is_refused(bench: Bench) -> None:
    """`interrupted` and `running` come from claims only."""
    answer = bench.win()
    for status in ("interrupted", "running", "done", ""):
        with bench.nothing_changes(), pytest.raises(ConfigurationError, match="status"):
            bench.finish(answer, status)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "nonsense", "{'a': 1}", '"' + "x" * 64 * 1024 + '"', "[" * 60_000, '"\ud800"'])
def test_a_checkpoint_that_is_no_json_or_too_large_is_refused(bench: Bench, text: str) -> None:
    """By heartbeat and release; nothing changes."""
    answer = bench.win()
    with bench.nothing_changes():
        with pytest.raises(ConfigurationError, match="checkpoint"):
            bench.beat(answer, checkpoint=text)
        with pytest.raises(ConfigurationError, match="checkpoint"):
            bench.release(answer, checkpoint=text)
