"""Clocks: the only module that reads them, or sleeps by them. Owns no state; any thread may call it.

`boot_ms` counts durations: it can't be set, and where the system has such a clock it goes on during suspend. `wall_ms`
is the machine's time of day; only the stores whose clock is the machine's decide by it, and an instance merely watches
it for steps. `Clock` is how both are handed to whoever needs them, so that tests and simulations bring their own.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The two clocks of a machine, in whole milliseconds."""

    def boot_ms(self) -> int:
        """Milliseconds on a clock that can't be set; its zero means nothing."""

    def wall_ms(self) -> int:
        """Milliseconds since the epoch, by the machine's time of day."""


def _boot_clock() -> int | None:
    """The id of the clock that goes on during suspend, if this system has one that can be read."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    if clock is None:
        return None
    try:
        time.clock_gettime_ns(clock)
    except OSError:  # refused inside some containers and under some clock shims
        return None
    return int(clock)


class SystemClock:
    """This machine's clocks."""

    def __init__(self) -> None:
        self._boot = _boot_clock()

    def boot_ms(self) -> int:
        """See Clock."""
        return self.boot_ns() // 1_000_000

    def boot_ns(self) -> int:
        """The same clock in nanoseconds, for the length of a wait."""
        return time.monotonic_ns() if self._boot is None else time.clock_gettime_ns(self._boot)

    def wall_ms(self) -> int:
        """See Clock."""
        return time.time_ns() // 1_000_000


SYSTEM = SystemClock()


def pause(seconds: float) -> None:
    """Does nothing for so long, in a main thread that Ctrl-C is to end, with nobody else to wake it.

    For there a KeyboardInterrupt that comes just when an Event or Condition begins to wait becomes a RuntimeError.
    """
    time.sleep(seconds)
