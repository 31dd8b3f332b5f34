"""Attempt: one attempt's mind. It decides when to send a heartbeat, when to stop trusting its own lease, what becomes
of the handler's end, and what the last word to the store and to the listeners is.

Decisions only: every method gets the boot time and returns what to do. Written only under the instance's lock; single
fields, and `expired`, are read without it.

The own deadline (a runner that can't reach the store must stop before anyone can take over) counts from just before
the last *successful* claim or heartbeat was *sent*: lease - min(heartbeat, lease / 4) later, trust ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from leaselib._claims import JobSpec
from leaselib._effects import Beat, Effect, Emit, SetSignal, Wake
from leaselib._link import StoreClock
from leaselib._model import Record, cut_error
from leaselib._random import Chance
from leaselib.errors import ConfigurationError

AbortReason = Literal["stopping", "refused", "unreachable", "timeout"]
Word = Literal["success", "failed", "release"]
FIRST_RETRY_MS = 50
NOT_COMMITTED = (
    "the transaction that ctx.finish(connection) was called in was not committed, so nothing of it was recorded; "
    "commit it before the handler returns"
)


@dataclass(frozen=True, slots=True)
class Step:
    """What a thread that carries out a part of an attempt is to do next.

    `send`: call the store, for `timeout_ms` at most. `wait`: look again in `wait_ms`, or when woken. `start`: run the
    handler. `done`: nothing is left to do.
    """

    do: Literal["send", "wait", "start", "done"]
    timeout_ms: int = 0
    wait_ms: int = 0


class Attempt:
    """One attempt, from the won claim to the last word. See the module's text.

    Attributes:
        phase: `claimed` (not started yet), `running`, `ending` (the handler ended, the last word is to be accepted),
            `over`.
        abort_reason: why the handler should stop, or None.
        word: after the handler's end: `success`, `failed` or `release`.
    """

    def __init__(self, spec: JobSpec, record: Record, clock: StoreClock, chance: Chance, sent_boot_ms: int) -> None:
        self.spec, self.record, self._clock, self._chance = spec, record, clock, chance
        self.phase: Literal["claimed", "running", "ending", "over"] = "claimed"
        self.abort_reason: AbortReason | None = None
        self.word: Word | None = None
        self.started_boot_ms: int | None = None
        self.duration_ms: int | None = None
        self.error: str | None = None
        self.trace: str | None = None
        self.beating = False  # handed to a heartbeat thread
        self.recorded = False  # the store accepted a success or a failure
        self._renewed_boot_ms = sent_boot_ms
        self._next_beat_boot_ms = sent_boot_ms + spec.options.heartbeat_ms
        self._next_word_boot_ms = 0
        self._beat_tries = 0
        self._nothing_to_renew = False  # a heartbeat was refused after the handler's end
        self._word_tries = 0
        self._stopping = False
        self._abandoned = False
        self._refused = False
        self.turned_down: str | None = None  # why nobody may run it
        self.ending_inside = False  # ctx.finish was called: the handler's own transaction ends the run
        self._written_inside = False  # and has returned: a heartbeat that is accepted now tells that it was undone
        self._ended_inside = False  # and a heartbeat was refused: that transaction was committed, or the run is lost
        self._sent_after_written = False
        self._lost_told = False
        self._loss_told = False  # for on_store_loss="continue": store_error once per outage
        self._checkpoint: str | None = None
        self._sent_checkpoint: str | None = None
        self.checkpoint_serial = 0  # grows with each ctx.checkpoint
        self.stored_serial = 0  # the latest serial that the store accepted
        self._sent_serial = 0
        self._flush_serial = 0  # the latest serial that was to be stored at once

    # ---- time -------------------------------------------------------------------------------------------------------

    @property
    def deadline_boot_ms(self) -> int:
        """When trust in the own lease ends."""
        return self._renewed_boot_ms + self.record.lease_ms - self.spec.options.margin_ms

    def expired(self, boot_ms: int) -> bool:
        """Whether the deadline has passed and the handler should stop for it. Reads only; needs no lock."""
        abort = self.spec.options.on_store_loss == "abort" and not self._ended_inside
        return abort and boot_ms >= self.deadline_boot_ms

    def due_boot_ms(self) -> int | None:
        """When `tick` should be called next, or None."""
        if self.phase == "over" or self._abandoned:
            return None
        due = [self.deadline_boot_ms] if not self._deadline_handled() else []
        if not self.beating:
            due.append(self._next_beat_boot_ms)
        end_ms = self._runtime_end_boot_ms()
        if end_ms is not None:
            due.append(end_ms)
        return min(due, default=None)

    def _runtime_end_boot_ms(self) -> int | None:
        runtime_ms = self.spec.options.max_runtime_ms
        if runtime_ms is None or self.started_boot_ms is None or self.phase != "running" or self.abort_reason:
            return None
        return self.started_boot_ms + runtime_ms

    def _deadline_handled(self) -> bool:
        if self.phase != "running" or self._ended_inside:
            return True  # there is no handler to stop: not yet, or not any more, or it has recorded its success
        return self._lost_told or self._loss_told

    def tick(self, boot_ms: int) -> list[Effect]:
        """What time alone brings: the heartbeat thread, the own deadline, max_runtime."""
        effects: list[Effect] = []
        if self.phase == "over" or self._abandoned:
            return effects
        if not self.beating and boot_ms >= self._next_beat_boot_ms:
            self.beating = True
            effects.append(Beat(self))
        if boot_ms >= self.deadline_boot_ms and not self._deadline_handled():
            if self.spec.options.on_store_loss == "abort":
                effects += self._abort("unreachable")
                effects += self._lose(boot_ms, "unreachable")
            else:
                self._loss_told = True
                error = "no heartbeat got through in time; on_store_loss='continue' lets the handler go on"
                effects.append(self.event("store_error", boot_ms, reason="unreachable", error=error))
        end_ms = self._runtime_end_boot_ms()
        if end_ms is not None and boot_ms >= end_ms:
            effects += self._abort("timeout")
        return effects

    # ---- before the handler -------------------------------------------------------------------------------------

    def before_start(self, boot_ms: int) -> Step:
        """Once more between the won claim and the handler: trust must not have ended meanwhile.

        A worker that slept after its claim was answered first gets a heartbeat through.
        """
        if self._refused or self._stopping or self.turned_down is not None:
            return Step("done")
        if boot_ms < self.deadline_boot_ms:
            return Step("start")
        return self.next_beat(boot_ms, forced=True)

    def start(self, boot_ms: int) -> list[Effect]:
        """The handler starts now."""
        self.phase = "running"
        self.started_boot_ms = boot_ms
        return [self.event("start", boot_ms, reason=self.record.reason)]

    # ---- heartbeats ---------------------------------------------------------------------------------------------

    def next_beat(self, boot_ms: int, *, forced: bool = False) -> Step:
        """What the heartbeat thread is to do now."""
        if self.phase == "over" or self._abandoned or self._refused or self._nothing_to_renew:
            return Step("done")
        if self._ended_inside or self.word == "release":
            return Step("done")
        due_ms = self._next_beat_boot_ms
        if forced and self._beat_tries == 0:
            due_ms = boot_ms
        if boot_ms < due_ms:
            return Step("wait", wait_ms=due_ms - boot_ms)
        timeout_ms = self.spec.options.beat_timeout_ms
        left_ms = self.deadline_boot_ms - boot_ms
        if left_ms > 0:
            timeout_ms = min(timeout_ms, max(1, left_ms))
        return Step("send", timeout_ms=timeout_ms)

    def beat_sent(self) -> str | None:
        """The heartbeat thread is about to send: the checkpoint that goes along, or None for none."""
        self._sent_checkpoint, self._sent_serial = self._checkpoint, self.checkpoint_serial
        self._sent_after_written = self._written_inside
        return self._sent_checkpoint if self._sent_serial > self.stored_serial else None

    def beat_answered(self, accepted: bool, sent_boot_ms: int, boot_ms: int) -> list[Effect]:
        """The store answered a heartbeat that was sent at `sent_boot_ms`."""
        if accepted:
            self._renewed_boot_ms = max(self._renewed_boot_ms, sent_boot_ms)
            flush = self._flush_serial > self._sent_serial  # a checkpoint that came while this was under way
            self._next_beat_boot_ms = boot_ms if flush else sent_boot_ms + self.spec.options.heartbeat_ms
            self._beat_tries = 0
            if self._sent_after_written:
                self.ending_inside = self._written_inside = False  # rolled back: the lease counts as before
            self._loss_told = False
            self.stored_serial = max(self.stored_serial, self._sent_serial)
            return []
        if self.phase in ("ending", "over"):
            # The last word's own answer decides: it may have been carried out, and only its answer be missing.
            self._nothing_to_renew = True
            return []
        if self.ending_inside:
            # Nobody could take the run over before the deadline, so then it was committed. Later nobody can tell: the
            # handler is stopped, and the last word decides.
            self._ended_inside = True
            return [] if boot_ms < self.deadline_boot_ms else self._abort("refused")
        return self.refuse(boot_ms)

    def beat_failed(self, boot_ms: int) -> list[Effect]:
        """A heartbeat's fate is unknown: the next is sent soon, at the latest one interval later."""
        self._next_beat_boot_ms = boot_ms + self._back_off(self._beat_tries)
        self._beat_tries += 1
        return self.tick(boot_ms)

    def store_back(self, boot_ms: int) -> list[Effect]:
        """The store can be reached again: what is overdue is sent at once, before any backup claims."""
        if self.phase == "over" or self._abandoned:
            return []
        if self._beat_tries:
            self._next_beat_boot_ms = boot_ms
        if self._word_tries:
            self._next_word_boot_ms = boot_ms
        return [Wake(self)] if self._beat_tries or self._word_tries else []

    def checkpoint(self, value: str, boot_ms: int, *, flush: bool) -> list[Effect]:
        """Remembers a checkpoint (JSON text) for the next heartbeat or the release; `flush` makes that now.

        Raises:
            ConfigurationError: ctx.finish was called before.
        """
        if self.ending_inside:
            raise ConfigurationError("ctx.finish has ended this run: call ctx.checkpoint before it")
        self._checkpoint = value
        self.checkpoint_serial += 1
        if not flush:
            return []
        self._flush_serial = self.checkpoint_serial
        self._next_beat_boot_ms = boot_ms
        if not self.beating:
            self.beating = True
            return [Beat(self)]
        return [Wake(self)]

    @property
    def pending_checkpoint(self) -> str | None:
        """The checkpoint that the store hasn't got yet, or None."""
        return self._checkpoint if self.checkpoint_serial > self.stored_serial else None

    def finish_inside(self) -> list[Effect]:
        """The handler's own transaction is about to record the run's success. Until it ends nobody can take the run
        over, and heartbeats would wait for it. So the next one is sent only when trust in the lease is about to end: if
        it is accepted, that transaction was rolled back; if it is refused, it was committed.
        """
        self.ending_inside = True
        self._written_inside = self._sent_after_written = False  # what a heartbeat under way tells is of an earlier one
        last_ms = self.deadline_boot_ms - self.spec.options.heartbeat_ms
        self._next_beat_boot_ms = max(self._next_beat_boot_ms, last_ms)
        return []

    def finish_written(self) -> list[Effect]:
        """ctx.finish has returned: from here until that transaction ends no heartbeat is accepted."""
        self._written_inside = True
        return []

    def finish_undone(self, boot_ms: int) -> list[Effect]:
        """ctx.finish failed, or was rolled back: nothing was recorded, and the lease counts as before."""
        self.ending_inside = self._written_inside = self._ended_inside = False
        self._next_beat_boot_ms = boot_ms
        self.beating = True
        return [Beat(self)]

    def refuse(self, boot_ms: int) -> list[Effect]:
        """The store said that this attempt doesn't hold the run any more."""
        self._refused = True
        return [*self._abort("refused"), *self._lose(boot_ms, "refused"), Wake(self)]

    # ---- stop ---------------------------------------------------------------------------------------------------

    def stop(self) -> list[Effect]:
        """The scheduler is stopping: the handler should end, and is handed over if it raises."""
        self._stopping = True
        return [*self._abort("stopping"), Wake(self)]

    def abandon(self) -> list[Effect]:
        """stop() waits no longer: nothing is renewed from here on. A handler that ends later still sends its word."""
        self._abandoned = True
        return [Wake(self)]

    # ---- the end ------------------------------------------------------------------------------------------------

    def handler_ended(self, error: str | None, trace: str | None, boot_ms: int) -> list[Effect]:
        """The handler returned, or raised (`error` and `trace` say what). Decides the last word to the store."""
        if self.started_boot_ms is not None:
            self.duration_ms = max(0, boot_ms - self.started_boot_ms)
        self.phase = "ending"
        self.error = None if error is None else cut_error(error)
        self.trace = trace
        self._next_word_boot_ms = boot_ms
        if self._refused:
            return self._over(boot_ms)
        if error is None and self.ending_inside:
            # Not a success unless the handler's transaction made it one: it refuses this word if it was committed.
            self.word, self.error = "failed", NOT_COMMITTED
        elif error is None:
            self.word = "success"
        elif self.abort_reason in ("stopping", "unreachable"):
            self.word = "release"
        else:
            self.word = "failed"
        return [Wake(self)]

    def turn_down(self, why: str) -> None:
        """Nobody may run this: it ends as failed without its handler. What listeners are told is the caller's."""
        self.turned_down = why

    def never_started(self, boot_ms: int) -> list[Effect]:
        """The handler isn't to start: the run is handed over, unless somebody else has it by now or nobody may."""
        self.phase = "ending"
        self._next_word_boot_ms = boot_ms
        if self._refused:
            return self._over(boot_ms)
        self.word, self.error = ("release", None) if self.turned_down is None else ("failed", self.turned_down)
        return []

    def next_word(self, boot_ms: int) -> Step:
        """What the worker is to do about the last word."""
        if self.phase == "over":
            return Step("done")
        if self._abandoned and self._word_tries:
            return Step("done")
        if boot_ms < self._next_word_boot_ms:
            return Step("wait", wait_ms=self._next_word_boot_ms - boot_ms)
        return Step("send", timeout_ms=self.spec.options.call_timeout_ms)

    def word_failed(self, boot_ms: int) -> list[Effect]:
        """The last word's fate is unknown: it is sent again, also after the lease ended, since it is fenced."""
        self._next_word_boot_ms = boot_ms + self._back_off(self._word_tries)
        self._word_tries += 1
        return []

    def word_answered(self, accepted: bool, boot_ms: int) -> list[Effect]:
        """The store answered the last word."""
        if accepted and self.word in ("success", "failed"):
            self.phase, self.recorded = "over", True
            if self.turned_down is not None:
                return []
            return [self.event(self.word, boot_ms, error=self.error, trace=self.trace)]
        if self.ending_inside and not accepted and self.word != "success":
            # Refused after ctx.finish: was the handler's transaction committed before?
            self.ending_inside, self.word = False, "success"
            if self.error == NOT_COMMITTED:
                self.error = None
            return []
        if self.word == "release" and (accepted or self._word_tries):
            # Refused after an answer was lost: an earlier send was accepted, and a backup has taken over since.
            self.phase = "over"
            return [self.event("interrupted", boot_ms, reason=self.abort_reason, handed_over=True)]
        return self._over(boot_ms)

    def _over(self, boot_ms: int) -> list[Effect]:
        self.phase = "over"
        return self._lose(boot_ms, "refused")

    def give_up(self, boot_ms: int) -> list[Effect]:
        """stop() ended the tries to get the last word through: what became of the run isn't known."""
        if self.phase == "over":
            return []
        self.phase = "over"
        return self._lose(boot_ms, "unreachable")

    # ---- parts --------------------------------------------------------------------------------------------------

    def _abort(self, reason: AbortReason) -> list[Effect]:
        if self.abort_reason is not None:
            return []
        self.abort_reason = reason
        return [SetSignal(self)]

    def _lose(self, boot_ms: int, reason: str) -> list[Effect]:
        if self._lost_told or self.turned_down is not None:
            return []
        self._lost_told = True
        return [self.event("lost", boot_ms, reason=reason, error=self.error)]

    def _back_off(self, tries: int) -> int:
        """Growing, jittered, and never over one heartbeat."""
        longest_ms = max(1, self.spec.options.heartbeat_ms)
        delay_ms = min(longest_ms, FIRST_RETRY_MS << min(tries, 10))
        return max(1, round(delay_ms * self._chance.uniform(0.5, 1.0)))

    def event(
        self,
        name: str,
        boot_ms: int,
        *,
        reason: str | None = None,
        error: str | None = None,
        handed_over: bool = False,
        trace: str | None = None,
    ) -> Emit:
        """An event about this attempt."""
        return Emit(
            name,
            self._clock.store_ms(boot_ms),
            job=self.spec.name,
            slot_ms=self.record.slot_ms,
            attempt=self.record.attempt,
            token=self.record.token,
            reason=reason,
            error=error,
            duration_ms=self.duration_ms,
            handed_over=handed_over,
            trace=trace,
        )
