"""Execution: carries one attempt out. The thin shell around an `Attempt`: its context and signal, its handler, its
heartbeats and its last word.

An execution belongs to the worker that won the claim; that worker's thread runs `carry_out`, its heartbeat thread runs
`beat_if_due`, the handler's thread (and any it hands its context to) calls what RunContext needs. The attempt
itself is written only under the instance's lock; single fields of it are read without.
"""

from __future__ import annotations

import inspect
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leaselib import _life
from leaselib._attempt import Attempt, Step
from leaselib._model import ERROR_BYTES, from_ms
from leaselib.context import RunContext, Signal
from leaselib.errors import StoreError

if TYPE_CHECKING:
    from leaselib._instance import Instance


TRACE_LENGTH = 64 * 1024
"""So much of a traceback, its end, goes to the log."""


class Execution:
    """See the module's text. Made under the instance's lock, so that no effect about its attempt is missed."""

    def __init__(self, instance: Instance, attempt: Attempt) -> None:
        self._instance, self.attempt = instance, attempt
        self.signal = Signal(self)
        self.wake = threading.Event()  # the worker looks again
        self.beaten = threading.Event()  # a heartbeat was answered, or failed
        self.poke: Callable[[], None] = lambda: None  # has the heartbeat thread look again; set by the worker
        self.handler_thread: threading.Thread | None = None

    # ---- what the context needs ---------------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """Whether this is a copy in a child process, of a run that is the parent's."""
        return self._instance.forked

    def boot_ms(self) -> int:
        """The boot clock."""
        return self._instance.clock.boot_ms()

    def deadline_boot_ms(self) -> int:
        """When the attempt's trust in its lease ends, as things stand."""
        return self.attempt.deadline_boot_ms

    def past_deadline(self) -> bool:
        """Whether that time is over."""
        return self.boot_ms() >= self.attempt.deadline_boot_ms

    def should_stop(self) -> bool:
        """Whether the handler should stop. Takes the lock only when the deadline has just passed."""
        if self.attempt.abort_reason is not None or self.attempt.phase == "over" or self._instance.forked:
            return True
        if self.attempt.expired(self.boot_ms()):
            self._instance.decide(self.attempt.tick)
        return self.attempt.abort_reason is not None

    def checkpoint(self, text: str, *, flush: bool) -> None:
        """See RunContext.checkpoint."""
        attempt, serial = self.attempt, 0

        def decide(now_ms: int) -> list[Any]:
            nonlocal serial
            effects = attempt.checkpoint(text, now_ms, flush=flush)
            serial = attempt.checkpoint_serial
            self.beaten.clear()
            return effects

        self._instance.decide(decide)
        if not flush:
            return
        end_ms = self.boot_ms() + 2 * attempt.spec.options.beat_timeout_ms + 1000
        while attempt.stored_serial < serial and attempt.abort_reason is None and attempt.phase == "running":
            left_ms = end_ms - self.boot_ms()
            if left_ms <= 0:
                raise StoreError(
                    f"the checkpoint of job {attempt.spec.name!r} could not be stored yet; it is kept and goes with "
                    f"the next heartbeat that gets through",
                    transient=True,
                )
            self.beaten.wait(left_ms / 1000)
            self.beaten.clear()

    def confirm(self, connection: Any) -> bool:
        """See RunContext.confirm."""
        record, store = self.attempt.record, self._instance.store
        run = (record.job, from_ms(record.slot_ms), record.token)
        held = store.confirm(connection, *run)
        if self.attempt.ending_inside:
            if held:  # what ctx.finish wrote was rolled back
                self._instance.decide(self.attempt.finish_undone)
            else:  # the run is over, and may still be this attempt's; nothing is written
                held = store.finish_inside(connection, *run)
        if not held:
            self._instance.decide(self.attempt.refuse)
        return held

    def finish_inside(self, connection: Any) -> bool:
        """See RunContext.finish."""
        record = self.attempt.record
        before = self.attempt.ending_inside
        self._instance.decide(lambda _: self.attempt.finish_inside())
        try:
            held = self._instance.store.finish_inside(connection, record.job, from_ms(record.slot_ms), record.token)
        except BaseException:
            if not before:
                self._instance.decide(self.attempt.finish_undone)
            raise
        self._instance.decide((lambda _: self.attempt.finish_written()) if held else self.attempt.refuse)
        return held

    # ---- the worker's thread ------------------------------------------------------------------------------------

    def carry_out(self) -> None:
        """From the won claim to the last word."""
        instance, attempt = self._instance, self.attempt
        while True:
            step = self._step(attempt.before_start)
            if step.do == "send":
                self.beat(step.timeout_ms)
            elif step.do == "wait":
                self._wait(step.wait_ms)
            else:
                break
        if step.do == "start":
            instance.decide(lambda now_ms: instance.planner.start_attempt(attempt, now_ms))
            self.handler_thread = threading.current_thread()
            failed = self._call_handler()
            if instance.forked:
                # A child that the handler forked: the run is the parent's.
                _life.leave_child(*((0, None) if failed is None else (failed.exit_code, failed.trace)))
            error, trace = (None, None) if failed is None else (failed.error, failed.trace)
            instance.decide(lambda now_ms: attempt.handler_ended(error, trace, now_ms))
        else:
            instance.decide(attempt.never_started)
        while True:
            step = self._step(attempt.next_word)
            if step.do == "send":
                self._send_word(step.timeout_ms)
            elif step.do == "wait":
                self._wait(step.wait_ms)
            else:
                break
        instance.decide(attempt.give_up)

    def _step(self, decide: Callable[[int], Step]) -> Step:
        with self._instance.lock:
            return decide(self._instance.clock.boot_ms())

    def _wait(self, wait_ms: int) -> None:
        self.wake.wait(wait_ms / 1000)
        self.wake.clear()

    def _call_handler(self) -> Failed | None:
        handler: Handler = self.attempt.spec.func
        around = self.attempt.spec.options.around
        try:
            with nullcontext() if around is None else around():
                handler(RunContext(self))
        except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt are failures like any other
            # As text, at once: the exception would keep alive what the handler left open, such as a transaction on the
            # store's own file, which the record of this very failure would then wait for.
            return Failed.of(error)
        return None

    def _send_word(self, timeout_ms: int) -> None:
        instance, attempt, planner = self._instance, self.attempt, self._instance.planner
        record, word, timeout = attempt.record, attempt.word, timeout_ms / 1000
        slot = from_ms(record.slot_ms)
        assert word is not None
        try:
            if word == "release":
                checkpoint = attempt.pending_checkpoint
                accepted = instance.store.release(record.job, slot, record.token, checkpoint, timeout=timeout)
            else:
                error = attempt.error if word == "failed" else None
                accepted = instance.store.finish(record.job, slot, record.token, word, error, timeout=timeout)
        except Exception as error:  # noqa: BLE001  whatever the store raised, the word goes out again
            failure = instance.failure(error)
            instance.decide(lambda now_ms: planner.word_failed(attempt, failure, now_ms))
        else:
            instance.decide(lambda now_ms: planner.word_answered(attempt, word, accepted, now_ms))

    # ---- the heartbeat thread -----------------------------------------------------------------------------------

    def beat_if_due(self) -> float | None:
        """Sends a heartbeat if one is due. Returns the seconds until the next look, or None if none is needed."""
        if self._instance.forked:
            return None
        step = self._step(self.attempt.next_beat)
        if step.do == "send":
            self.beat(step.timeout_ms)
            return 0
        return step.wait_ms / 1000 if step.do == "wait" else None

    def beat(self, timeout_ms: int) -> None:
        """Sends one heartbeat."""
        instance, attempt, record = self._instance, self.attempt, self.attempt.record
        planner = instance.planner
        with instance.lock:
            checkpoint = attempt.beat_sent()
        sent_ms = instance.clock.boot_ms()
        try:
            accepted = instance.store.heartbeat(
                record.job,
                from_ms(record.slot_ms),
                record.token,
                record.lease_ms / 1000,
                checkpoint,
                timeout=timeout_ms / 1000,
            )
        except Exception as error:  # noqa: BLE001  whatever the store raised, the next heartbeat is due
            failure = instance.failure(error)
            instance.decide(lambda now_ms: planner.beat_failed(attempt, failure, now_ms))
        else:
            instance.decide(lambda now_ms: planner.beat_answered(attempt, accepted, sent_ms, now_ms))
        self.beaten.set()


@dataclass(frozen=True, slots=True)
class Failed:
    """What a handler raised, without the exception itself."""

    error: str
    trace: str
    exit_code: int

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Takes down an exception."""
        try:
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-TRACE_LENGTH:]
        except BaseException:  # noqa: BLE001  a __str__ or __repr__ that raises
            trace = describe(error)
        # Whoever else may hold the exception, the handler's frames hold nothing from here on.
        traceback.clear_frames(error.__traceback__)
        code = error.code if isinstance(error, SystemExit) else 1
        return cls(describe(error), trace.rstrip(), code if isinstance(code, int) else 0 if code is None else 1)


class Handler:
    """A job's function, called with a context or, if it takes no argument, without.

    `context` says how: `first` as the only positional argument, else the name of a keyword argument, or None.
    """

    def __init__(self, func: Callable[..., Any], context: str | None) -> None:
        self.func, self._context = func, context

    def __call__(self, context: RunContext) -> None:
        """Runs it.

        Raises:
            TypeError: it returned a coroutine or a generator, whose body nobody would run.
        """
        if self._context == "first":
            result = self.func(context)
        else:
            result = self.func(**({} if self._context is None else {self._context: context}))
        if inspect.iscoroutine(result) or inspect.isgenerator(result):
            result.close()
        elif not (inspect.isawaitable(result) or inspect.isasyncgen(result)):
            return
        raise TypeError(
            f"the handler of job {context.job!r} returned {type(result).__name__}, whose body was never run: leaselib "
            f"is for functions that are not async. Register a plain function, for example one that calls asyncio.run()"
        )


def describe(error: BaseException) -> str:
    """`Type: text` of an exception, whatever its `__str__` does."""
    name = type(error).__name__
    try:
        text = str(error)[:ERROR_BYTES]
    except BaseException:  # noqa: BLE001  a __str__ that raises
        text = "(its text can't be had)"
    return f"{name}: {text}" if text else name
