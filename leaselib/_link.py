"""An instance's view of its store: what time it is there, and whether it can be reached. Decisions only.

`StoreClock` keeps the offset between the boot clock and the store's clock. `StoreHealth` decides when the store counts
as lost, when to try it again, and when trouble is over. `JobTroubles` knows the jobs whose own records can't be used.
`Epochs` knows which slots are older than the store's data. `Link` holds all four, and notices clock steps. `Loads` says
which jobs' unfinished runs are still to be asked for. All are parts of a Planner, and guarded as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from typing import Literal

from leaselib._model import ClaimAnswer, Record, epoch_ms
from leaselib._random import Chance

Kind = Literal["ping", "load", "write", "sure"]
"""What an answer proves: that the store can be reached (`ping`), read (`load`), written to (`write`), or that a claim
or a finish is on as many replicas as are waited for (`sure`)."""
Trouble = Literal["ping", "load", "write", "replicas"]
"""What fails, the one that asks for most last. `replicas`: all is carried out, but too few replicas have it in time."""

SAMPLES = 16
STEP_MS = 100
"""An offset that is off by more than this, beyond what the round trips explain, is a step of a clock."""
AGING = 2_000
"""Two clocks drift apart by at most one part in so many."""
STALE_MS = 600_000
"""An idle instance asks for the time again after this long."""
WALL_STEP_MS = 200
"""The machine's time of day moved by more than this against the boot clock: the store is asked for the time again."""
ENDED_BY: dict[Trouble, frozenset[Kind]] = {
    "ping": frozenset({"ping", "load", "write", "sure"}),
    "load": frozenset({"load", "write", "sure"}),
    "write": frozenset({"write", "sure"}),
    "replicas": frozenset({"ping", "sure"}),
}
"""The operations whose success ends a trouble: of the kind that failed, or asking for more. A disk that is full, or a
server out of memory, answers pings all the time. Once replicas were too few, pings wait for them as well (see
`Store.ping`); heartbeats and releases never do."""
GRAVITY: tuple[Trouble, ...] = tuple(ENDED_BY)
LOAD_AGAIN_MS = 30_000
"""A job whose unfinished runs are malformed is asked about again after this long."""


class StoreClock:
    """The store's clock, estimated from answers: the middle of send and receive, best of the last 16.

    A sample's error is half its round trip, and grows by 500 ppm as it ages. A sample that contradicts the estimate
    is a step: what was known before is forgotten.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int, int]] = deque(maxlen=SAMPLES)  # boot_ms, offset_ms, error_ms
        self.offset_ms: int | None = None
        self._error_ms = 0
        self.sampled_boot_ms: int | None = None

    def add(self, sent_boot_ms: int, received_boot_ms: int, store_ms: int) -> int:
        """Takes an answer's time. Returns by how many ms the clock was found to have stepped; 0 if it didn't."""
        offset_ms = store_ms - (sent_boot_ms + received_boot_ms) // 2
        error_ms = (received_boot_ms - sent_boot_ms) // 2 + 1
        stepped_ms = 0
        if self.offset_ms is not None and self.sampled_boot_ms is not None:
            difference_ms = offset_ms - self.offset_ms
            known_ms = self._error_ms + max(0, received_boot_ms - self.sampled_boot_ms) // AGING
            if abs(difference_ms) > error_ms + known_ms + STEP_MS:
                stepped_ms = difference_ms
                self._samples.clear()
        self._samples.append((received_boot_ms, offset_ms, error_ms))
        self.offset_ms, self._error_ms = offset_ms, error_ms
        for sampled_ms, sample_ms, its_error_ms in reversed(self._samples):  # the newest of the best
            aged_ms = its_error_ms + (received_boot_ms - sampled_ms) // AGING
            if aged_ms < self._error_ms:
                self._error_ms, self.offset_ms = aged_ms, sample_ms
        self.sampled_boot_ms = received_boot_ms
        return stepped_ms

    def store_ms(self, boot_ms: int) -> int | None:
        """The store's clock at that boot time, or None if it was never heard."""
        return None if self.offset_ms is None else boot_ms + self.offset_ms

    def boot_ms(self, store_ms: int) -> int | None:
        """The boot time at which the store's clock shows that, or None if it was never heard."""
        return None if self.offset_ms is None else store_ms - self.offset_ms


class StoreHealth:
    """Whether the store answers: `up`, `down`, or `trial` (it answers a ping; whether it takes writes is to be seen).

    Trouble starts with a failed operation and ends with one that succeeds where the gravest failed: see `ENDED_BY`.
    """

    FIRST_DELAY_MS = 100
    LONGEST_DELAY_MS = 2_000
    PERMANENT_DELAY_MS = 30_000

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self.state = "up"
        self.since_boot_ms: int | None = None
        self._trouble: Trouble = "ping"  # the gravest that was met
        self._delay_ms = self.FIRST_DELAY_MS
        self.retry_boot_ms: int | None = None
        self.error: str | None = None
        self.permanent = False  # somebody has to mend something first, as far as the latest failure told

    def failed(self, boot_ms: int, error: str, *, permanent: bool, trouble: Trouble) -> bool:
        """An operation failed. Returns whether trouble just started."""
        started = self.state == "up"
        if started:
            self.since_boot_ms = boot_ms
            self._delay_ms = self.FIRST_DELAY_MS
            self._trouble = trouble
        self._trouble = max(self._trouble, trouble, key=GRAVITY.index)
        self.permanent = permanent
        if self.state == "down" and self.retry_boot_ms is not None and self.retry_boot_ms > boot_ms:
            return False  # one more failure of the same time; the next try is planned already
        self.state = "down"
        self.error = error
        delay_ms = self.PERMANENT_DELAY_MS if permanent else self._delay_ms
        self.retry_boot_ms = boot_ms + max(1, round(delay_ms * self._chance.uniform(0.5, 1.0)))
        self._delay_ms = min(self.LONGEST_DELAY_MS, self._delay_ms * 2)
        return started

    def trying(self) -> None:
        """The planned try is under way."""
        self.retry_boot_ms = None

    def answered(self, kind: Kind) -> bool:
        """An operation of that kind was answered. Returns whether trouble is over."""
        if self.state == "up":
            return False
        if kind in ENDED_BY[self._trouble]:
            return self._over()
        if self._trouble != "replicas":  # else all the rest works all the time, and is no news
            self.state = "trial"
            self.retry_boot_ms = None
        return False

    def _over(self) -> bool:
        self.state = "up"
        self.since_boot_ms = None
        self.retry_boot_ms = None
        self.error = None
        return True


class Link:
    """What an instance knows of its store as a whole.

    Attributes:
        jobs: the jobs that are in trouble alone.
        epochs: since when the store has its data.
        pinging: a ping is under way.
    """

    def __init__(self, chance: Chance) -> None:
        self.clock, self.health, self.jobs, self.epochs = StoreClock(), StoreHealth(chance), JobTroubles(), Epochs()
        self.pinging = False
        self._wall_delta_ms: int | None = None
        self._resync = False

    def due_boot_ms(self) -> int | None:
        """When the store is to be tried again, or None."""
        return None if self.pinging else self.health.retry_boot_ms

    def ping_due(self, boot_ms: int, wall_ms: int) -> bool:
        """Whether to ping now: a planned try, a step of the machine's clock, or no news for long."""
        delta_ms, before_ms = wall_ms - boot_ms, self._wall_delta_ms
        self._wall_delta_ms = delta_ms
        self._resync |= before_ms is not None and abs(delta_ms - before_ms) > WALL_STEP_MS
        if self.pinging:
            return False
        if self.health.state == "down":
            due = self.health.retry_boot_ms is not None and boot_ms >= self.health.retry_boot_ms
            if due:
                self.health.trying()
        else:
            heard_ms = self.clock.sampled_boot_ms
            due = heard_ms is not None and (self._resync or boot_ms - heard_ms > STALE_MS)
        if due:
            self.pinging, self._resync = True, False
        return due



class Epochs:
    """The epochs that were met, and with them which slots are older than the store's data, so that they may have run
    unbeknown to the store. In a cluster each job has an epoch of its own, as its node can lose its data alone;
    elsewhere the store's is everybody's.
    """

    def __init__(self) -> None:
        self._met: dict[str | None, str] = {}  # of each job that has its own; None: the store's
        self._not_before_ms: dict[str | None, int] = {}  # of those that became others since this instance began

    @staticmethod
    def told_by(job: str, answer: ClaimAnswer) -> tuple[str | None, str]:
        """Whose epoch the answer to a claim of that job tells, as `heard` takes it, and which one."""
        return (None, answer.epoch) if answer.job_epoch is None else (job, answer.job_epoch)

    @property
    def of_store(self) -> str:
        """The store's epoch as it was met last, or empty."""
        return self._met.get(None, "")

    def heard(self, job: str | None, epoch: str, now_ms: int) -> bool:
        """An answer told an epoch: the job's own or, if None, the store's. Returns whether it is a new one."""
        reset = self._met.setdefault(job, epoch) != epoch
        self._met[job] = epoch
        if reset:
            self._not_before_ms[job] = epoch_ms(epoch)
        if job in self._not_before_ms:  # an epoch that lies ahead began before the store's clock was set back
            self._not_before_ms[job] = min(self._not_before_ms[job], now_ms)
        return reset

    def lost_slot(self, job: str, slot_ms: int) -> bool:
        """Whether that slot of the job is older than its data, which were lost since this instance began."""
        not_before_ms = self._not_before_ms.get(job if job in self._met else None)
        return not_before_ms is not None and slot_ms < not_before_ms

    def lost_win(self, won: Record) -> bool:
        """Whether nobody may run what was just won. A slot of a claim by hand is new, though, and a run that had an
        attempt before began after the data were lost.
        """
        return won.attempt == 1 and won.reason != "manual" and self.lost_slot(won.job, won.slot_ms)


class JobTroubles:
    """Which jobs are in trouble alone, the store as a whole being well, and where: at claims, or at which attempts."""

    def __init__(self) -> None:
        # job: where it is in trouble, as the slot of the attempt (None: what no attempt asks), and in which
        self._places: dict[str, set[tuple[int | None, Trouble]]] = {}

    def failed(self, job: str, slot_ms: int | None, trouble: Trouble) -> bool:
        """A job's records are at fault or away: for that slot's attempt or, if None, for what no attempt asked. Returns
        whether the job's trouble just started.
        """
        started = job not in self._places
        self._places.setdefault(job, set()).add((slot_ms, trouble))
        return started

    def answered(self, job: str, slot_ms: int | None, kind: Kind) -> bool:
        """What may have failed before was carried out. Returns whether the job's trouble is over.

        Too few replicas are so for all that the job asks, wherever that was met.
        """
        if job not in self._places:
            return False
        ended = {trouble for trouble in GRAVITY if kind in ENDED_BY[trouble]}
        over = {(at, what) for at, what in self._places[job] if what in ended and (at == slot_ms or what == "replicas")}
        self._places[job] -= over
        if self._places[job]:
            return False
        del self._places[job]
        return True

    def attempt_over(self, job: str, slot_ms: int) -> None:
        """An attempt that is in trouble won't ask the store again: the job's next claim shows whether it is over."""
        if job in self._places:
            self._places[job] = {(None if at == slot_ms else at, what) for at, what in self._places[job]}

    def removed(self, job: str) -> None:
        """The job is gone. What no attempt asked is nobody's trouble any more; that of attempts that go on remains."""
        places = {place for place in self._places.pop(job, ()) if place[0] is not None}
        if places:
            self._places[job] = places


class Loads:
    """The jobs whose unfinished runs are still to be asked for, a batch at a time."""

    BATCH = 500

    def __init__(self) -> None:
        self._names: list[str] = []
        self._under_way = False

    def add(self, name: str) -> None:
        """A job to ask about."""
        self._names.append(name)

    def batch(self, known: Container[str]) -> tuple[str, ...]:
        """The jobs to ask about now, if no other batch is under way; those not `known` any more are left out."""
        if self._under_way:
            return ()
        self._names = [name for name in self._names if name in known]
        names = tuple(self._names[: self.BATCH])
        del self._names[: self.BATCH]
        self._under_way = bool(names)
        return names

    def over(self) -> None:
        """The batch under way was answered, or failed."""
        self._under_way = False
