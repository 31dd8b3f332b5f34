"""What handlers and listeners may do to an instance: raise anything, block, return what nobody runs, take too long.

In this process, on the store under test.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from cluster import BEAT_S, LEASE_S, OPTIONS, SLACK_S, Recorder, due_in, until

import leaselib
from leaselib import ConfigurationError, Every, RunContext, Scheduler

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def scheduler(cluster_url: str) -> Iterator[Scheduler]:
    """A scheduler that isn't started; stopped after the test."""
    it = Scheduler(cluster_url, **OPTIONS)
    yield it
    it.stop(5)
    it.store.close()


@pytest.fixture
def recorder(scheduler: Scheduler) -> Recorder:
    """Listens to it."""
    return Recorder(scheduler)


def now(seconds: float = 0.1) -> Every:
    """A schedule with one slot, in a moment."""
    return Every(due_in(seconds) / 1000)


def stored(scheduler: Scheduler, event: leaselib.Event) -> leaselib.Run:
    """The run that an event is about."""
    assert event.job is not None
    assert event.slot is not None
    run = scheduler.store.get(event.job, event.slot)
    assert run is not None
    return run


# ---- what handlers raise --------------------------------------------------------------------------------------------


class OwnError(BaseException):
    """Not even an Exception."""


class Unprintable(Exception):
    """An error whose text can't be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def recurse() -> None:
    """Raises RecursionError."""
    recurse()


def raising(error: BaseException) -> Callable[[], None]:
    """A handler that raises."""

    def handler() -> None:
        raise error

    return handler


RAISERS: dict[str, tuple[Callable[[], Any], str]] = {
    "exception": (raising(ValueError("bad value")), "ValueError: bad value"),
    "system-exit": (raising(SystemExit(3)), "SystemExit: 3"),
    "keyboard-interrupt": (raising(KeyboardInterrupt()), "KeyboardInterrupt"),
    "generator-exit": (raising(GeneratorExit()), "GeneratorExit"),
    "memory-error": (raising(MemoryError()), "MemoryError"),
    "base-exception": (raising(OwnError("own")), "OwnError: own"),
    "recursion": (recurse, "RecursionError: maximum recursion depth exceeded"),
    "unprintable": (raising(Unprintable()), "Unprintable: (its text can't be had)"),
    "awkward-text": (raising(ValueError("nul \0, lone \ud800, \x1b[2J")), "ValueError: nul"),
    "huge-text": (raising(ValueError("é" * 100_000)), "ValueError: éé"),
}


def test_whatever_a_handler_raises_is_recorded_as_failed_once(cluster_url: str) -> None:
    """And the process, the workers and the next slots go on: two workers are enough for all of them."""
    scheduler = Scheduler(cluster_url, max_workers=2, **OPTIONS)
    recorder = Recorder(scheduler)
    for name, (handler, _) in RAISERS.items():
        scheduler.add(handler, now(), name=name)
    ticks = threading.Semaphore(0)
    scheduler.add(ticks.release, Every(0.2), name="tick")
    with scheduler:
        for name, (_, text) in RAISERS.items():
            event = recorder.wait("failed", job=name)
            assert event.error is not None
            assert event.error.startswith(text)
            run = stored(scheduler, event)
            assert (run.status, run.attempt) == ("failed", 1)
            assert run.error is not None
            assert run.error.startswith(text)
            assert len(run.error.encode()) <= 4096
        before = len(recorder.events("success", job="tick"))
        recorder.wait("success", job="tick", count=before + 2)
        health = scheduler.health()
        assert (health.attempts_running, health.internal_errors) == (0, 0)
    for name in RAISERS:
        assert len(recorder.events("failed", job=name)) == 1
        assert len(recorder.events("start", job=name)) == 1


def test_a_handler_that_swallows_aborted_is_lost_whatever_it_returns(
    scheduler: Scheduler, recorder: Recorder
) -> None:
    """Somebody else ended the run meanwhile; late calls of its context raise as well."""
    contexts: list[RunContext] = []
    go_on = threading.Event()

    @scheduler.every(due_in(0.1) / 1000)
    def work(ctx: RunContext) -> None:
        contexts.append(ctx)
        with contextlib.suppress(leaselib.Aborted):
            ctx.sleep(10)
        go_on.wait(5)

    with scheduler:
        recorder.wait("start")
        assert scheduler.store.finish("work", contexts[0].slot, contexts[0].token, "failed", "by hand")
        lost = recorder.wait("lost")
        assert (lost.reason, lost.token) == ("refused", contexts[0].token)
        assert contexts[0].abort_reason == "refused"
        go_on.set()
        until(lambda: not scheduler.running, "the handler has returned")
        with pytest.raises(leaselib.Aborted):
            contexts[0].check()
        run = stored(scheduler, lost)
        assert (run.status, run.error) == ("failed", "by hand")
    assert not recorder.events("success")
    assert len(recorder.events("lost")) == 1


# ---- coroutines and generators --------------------------------------------------------------------------------------


async def coroutine_function() -> None:
    """Never awaited."""


class AsyncCallable:
    """An object whose call is async."""

    async def __call__(self) -> None:
        """Never awaited."""


def generator_function() -> Iterator[int]:
    """Never iterated."""
    yield 1


async def async_generator_function() -> AsyncIterator[int]:
    """Never iterated."""
    yield 1


@pytest.mark.parametrize(
    "func",
    [
        coroutine_function,
        functools.partial(coroutine_function),
        AsyncCallable(),
        generator_function,
        functools.partial(generator_function),
        async_generator_function,
    ],
    ids=["async", "partial", "object", "generator", "partial-generator", "async-generator"],
)
def test_a_function_whose_body_would_never_run_is_refused_at_registration(func: Callable[..., Any]) -> None:
    """The message says what to register instead."""
    scheduler = Scheduler("memory://")
    with pytest.raises(ConfigurationError, match="register"):
        scheduler.every(60, name="job")(func)
    assert not scheduler.jobs


def wrapped() -> Callable[[], Any]:
    """A plain wrapper around a coroutine function, as decorators make it."""

    @functools.wraps(coroutine_function)
    def wrapper() -> Any:
        return coroutine_function()

    return wrapper


@pytest.mark.parametrize(
    ("func", "kind"),
    [
        (lambda: coroutine_function(), "coroutine"),
        (wrapped(), "coroutine"),
        (lambda: generator_function(), "generator"),
        (lambda: async_generator_function(), "async_generator"),
    ],
    ids=["lambda", "wrapper", "generator", "async-generator"],
)
def test_a_function_that_returns_a_coroutine_has_failed(
    scheduler: Scheduler, recorder: Recorder, func: Callable[[], Any], kind: str
) -> None:
    """Seen only when it runs: never a success, and the coroutine is closed, so Python has nothing to warn about."""
    scheduler.add(func, now(), name="job")
    with scheduler:
        event = recorder.wait("failed")
        assert event.error is not None
        assert kind in event.error
        assert "asyncio.run()" in event.error
        assert stored(scheduler, event).status == "failed"
    assert not recorder.events("success")


# ---- listeners ------------------------------------------------------------------------------------------------------


def test_listeners_that_raise_harm_nothing(
    scheduler: Scheduler, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Other listeners are called, each raise is one log record, runs are recorded, and the next slot runs."""

    def bad(event: leaselib.Event) -> None:
        raise {"start": ValueError("start"), "success": SystemExit(3), "failed": KeyboardInterrupt()}[event.name]

    for name in ("start", "success", "failed"):
        scheduler.on(name, bad)
    after = Recorder(scheduler)  # added later: called after the bad one
    scheduler.add(lambda: None, Every(0.2), name="good")
    scheduler.add(lambda: 1 / 0, now(), name="failing")
    with scheduler, caplog.at_level(logging.ERROR, logger="leaselib"):
        failed = after.wait("failed", job="failing")
        after.wait("success", job="good", count=2)
        assert stored(scheduler, failed).status == "failed"
    raised = [r for r in caplog.records if "listener" in r.getMessage()]
    told = sum(len(after.events(name)) for name in ("start", "success", "failed"))
    assert len(raised) == told
    assert all(r.exc_info for r in raised)


def test_a_listener_that_blocks_delays_no_heartbeat_no_claim_and_no_signal(scheduler: Scheduler) -> None:
    """Neither its own run's nor another's: a run of two leases succeeds at its first attempt meanwhile."""
    blocked, entered = threading.Event(), threading.Event()
    aborted = threading.Event()
    later = threading.Semaphore(0)

    @scheduler.on("start")
    def block(event: leaselib.Event) -> None:
        entered.set()
        blocked.wait(20)

    done = threading.Event()
    slots: list[Any] = []

    def long(ctx: RunContext) -> None:
        slots.append(ctx.slot)
        ctx.sleep(2 * LEASE_S)
        done.set()

    def limited(ctx: RunContext) -> None:
        ctx.signal.wait(5)
        aborted.set()

    scheduler.add(long, now())
    scheduler.add(limited, now(), max_runtime=0.3)
    scheduler.add(later.release, Every(0.2), name="tick")
    scheduler.start()
    try:
        assert entered.wait(5)
        assert aborted.wait(2), "the signal of another run"
        for _ in range(3):
            assert later.acquire(timeout=2), "claims of the next slots"
        assert done.wait(5), "heartbeats of a run that is longer than its lease"
    finally:
        blocked.set()
    assert scheduler.stop(5)
    run = scheduler.store.get("long", slots[0])
    assert run is not None
    assert (run.status, run.attempt) == ("success", 1)


def test_a_logging_handler_that_raises_harms_nothing(scheduler: Scheduler, recorder: Recorder) -> None:
    """The next events come all the same."""

    class Bad(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("no log today")

    bad = Bad()
    logger = logging.getLogger("leaselib")
    logger.addHandler(bad)
    try:
        scheduler.add(lambda: 1 / 0, Every(0.2), name="failing")
        with scheduler:
            recorder.wait("failed", count=3)
    finally:
        logger.removeHandler(bad)


# ---- around, max_runtime, checkpoints -------------------------------------------------------------------------------


def test_around_is_entered_around_each_handler_in_its_thread(scheduler: Scheduler, recorder: Recorder) -> None:
    """It sees what the handler raises; if it raises itself, the run is failed and the handler not called."""
    seen: list[tuple[str, int, str | None]] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        seen.append(("enter", threading.get_ident(), None))
        error: str | None = None
        try:
            yield
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            seen.append(("exit", threading.get_ident(), error))

    @contextlib.contextmanager
    def broken() -> Iterator[None]:
        raise LookupError("no context")
        yield

    def work() -> None:
        seen.append(("work", threading.get_ident(), None))
        raise ValueError("inside")

    called = threading.Event()
    scheduler.add(work, now(), around=around)
    scheduler.add(called.set, now(), name="broken", around=broken)
    with scheduler:
        assert recorder.wait("failed", job="work").error == "ValueError: inside"
        assert recorder.wait("failed", job="broken").error == "LookupError: no context"
    assert [(what, error) for what, _, error in seen] == [("enter", None), ("work", None), ("exit", "ValueError")]
    assert len({thread for _, thread, _ in seen}) == 1
    assert seen[0][1] != threading.get_ident()
    assert not called.is_set()


def test_max_runtime_sets_the_signal_and_a_handler_that_raises_then_has_failed(
    scheduler: Scheduler, recorder: Recorder
) -> None:
    """One that returns all the same is a success. Neither is retried."""
    reasons: dict[str, str | None] = {}

    def raises(ctx: RunContext) -> None:
        try:
            ctx.sleep(10)
        finally:
            reasons["raises"] = ctx.abort_reason

    def returns(ctx: RunContext) -> None:
        ctx.signal.wait(10)
        reasons["returns"] = ctx.abort_reason

    for func in (raises, returns):
        scheduler.add(func, now(), max_runtime=0.4)
    with scheduler:
        failed, success = recorder.wait("failed", job="raises"), recorder.wait("success", job="returns")
        assert stored(scheduler, failed).status == "failed"
        assert stored(scheduler, success).status == "success"
    assert reasons == {"raises": "timeout", "returns": "timeout"}
    for event in (failed, success):
        assert event.duration is not None
        assert 0.35 < event.duration < 0.4 + SLACK_S
    assert failed.error is not None
    assert "max_runtime" in failed.error
    assert len(recorder.events("start")) == 2
    assert not recorder.events("lost")


def test_a_checkpoint_goes_with_the_next_heartbeat_or_at_once_by_flush(
    scheduler: Scheduler, recorder: Recorder
) -> None:
    """Only JSON of 64 KiB at most; what is refused changes nothing."""
    step, go_on = threading.Semaphore(0), threading.Semaphore(0)
    problems: list[str] = []

    def work(ctx: RunContext) -> None:
        assert ctx.resume is None
        ctx.checkpoint({"page": 1, "ü": [None, 1.5]}, flush=True)
        step.release()
        go_on.acquire(timeout=5)
        for bad in ({1, 2}, float, float("nan"), "x" * 70_000, [[]] * 40_000):
            try:
                ctx.checkpoint(bad)
            except ConfigurationError as error:
                problems.append(str(error))
        ctx.checkpoint({"page": 2})
        step.release()
        go_on.acquire(timeout=5)

    scheduler.add(work, now())
    with scheduler:
        start = recorder.wait("start")
        assert step.acquire(timeout=5)
        assert stored(scheduler, start).checkpoint == {"page": 1, "ü": [None, 1.5]}
        go_on.release()
        assert step.acquire(timeout=5)
        until(lambda: stored(scheduler, start).checkpoint == {"page": 2}, "a heartbeat took it along", BEAT_S + SLACK_S)
        go_on.release()
        recorder.wait("success")
    assert len(problems) == 5
    assert all("JSON" in problem for problem in problems)


def test_a_handler_may_take_its_context_or_nothing(scheduler: Scheduler, recorder: Recorder) -> None:
    """And the context says what runs: an aware UTC slot, the same instant in the job's zone, reason, attempt, token."""
    contexts: list[RunContext] = []
    nothing = threading.Event()
    scheduler.add(contexts.append, now(0.6), name="takes")
    scheduler.add(nothing.set, now(), name="nothing")
    with scheduler:
        event = recorder.wait("success", job="takes")
        recorder.wait("success", job="nothing")
    ctx = contexts[0]
    assert nothing.is_set()
    assert (ctx.job, ctx.slot, ctx.attempt, ctx.token) == ("takes", event.slot, 1, event.token)
    assert ctx.slot.utcoffset() is not None
    assert ctx.local_slot == ctx.slot
    assert ctx.reason == "scheduled"
    assert ctx.runner == event.runner
    assert isinstance(ctx.signal, threading.Event)
    assert isinstance(ctx.fence, int)
