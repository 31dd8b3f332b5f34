"""An instance's view of its store: what time it is there, and whether it can be reached. Decisions only.

`StoreClock` keeps the offset between the boot clock and the store's clock. `StoreHealth` decides when the store counts
as lost, when to try it again, and when trouble is over. Both are parts of a Planner, and guarded by whatever guards it.
"""

from __future__ import annotations

from collections import deque

from leaselib._random import Chance

SAMPLES = 16
STEP_MS = 100
"""An offset that is off by more than this, beyond what the round trips explain, is a step of a clock."""
STALE_MS = 600_000
"""An idle instance asks for the time again after this long."""


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
        if self.offset_ms is not None:
            difference_ms = offset_ms - self.offset_ms
            if abs(difference_ms) > error_ms + self._error_ms + STEP_MS:
                stepped_ms = difference_ms
                self._samples.clear()
        self._samples.append((received_boot_ms, offset_ms, error_ms))
        best = min(reversed(self._samples), key=lambda s: s[2] + (received_boot_ms - s[0]) // 2000)
        self.offset_ms = best[1]
        self._error_ms = best[2] + (received_boot_ms - best[0]) // 2000
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

    Trouble starts with a failed operation and ends with a successful one of the kind that failed: a disk that is full,
    or a server out of memory, answers pings all the time.
    """

    FIRST_DELAY_MS = 100
    LONGEST_DELAY_MS = 2_000
    PERMANENT_DELAY_MS = 30_000

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self.state = "up"
        self.since_boot_ms: int | None = None
        self._write_failed = False
        self._permanent = False
        self._delay_ms = self.FIRST_DELAY_MS
        self.retry_boot_ms: int | None = None
        self.error: str | None = None

    def failed(self, boot_ms: int, error: str, *, permanent: bool, write: bool) -> bool:
        """An operation failed. Returns whether trouble just started."""
        started = self.state == "up"
        if started:
            self.since_boot_ms = boot_ms
            self._delay_ms = self.FIRST_DELAY_MS
            self._write_failed = False
        elif self.state == "down" and self.retry_boot_ms is not None and self.retry_boot_ms > boot_ms:
            self._write_failed |= write
            return False  # one more failure of the same time; the next try is planned already
        self.state = "down"
        self.error = error
        self._permanent = permanent
        self._write_failed |= write
        delay_ms = self.PERMANENT_DELAY_MS if permanent else self._delay_ms
        self.retry_boot_ms = boot_ms + max(1, round(delay_ms * self._chance.uniform(0.5, 1.0)))
        self._delay_ms = min(self.LONGEST_DELAY_MS, self._delay_ms * 2)
        return started

    def trying(self) -> None:
        """The planned try is under way."""
        self.retry_boot_ms = None

    def answered_ping(self) -> bool:
        """A ping was answered. Returns whether trouble is over."""
        self.retry_boot_ms = None
        if self.state == "up":
            return False
        if self._write_failed:
            self.state = "trial"
            return False
        return self._over()

    def answered_write(self) -> bool:
        """A claim, heartbeat, finish or release was answered. Returns whether trouble is over."""
        return False if self.state == "up" else self._over()

    def _over(self) -> bool:
        self.state = "up"
        self.since_boot_ms = None
        self.retry_boot_ms = None
        self.error = None
        return True
