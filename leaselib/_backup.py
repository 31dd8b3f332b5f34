"""Backups: the runs of others that an instance watches, and when it checks each again. Decisions only; a part of the
Planner, and guarded as it is.

A check is a takeover claim. It comes a random time between one and two heartbeats after the last, until the run ends.
Checks hold back for such a time, once, after the store was away and after this instance slept, so that runners which
live renew before anybody claims their runs.
"""

from __future__ import annotations

import heapq

from leaselib._claims import JobSpec, Watch
from leaselib._random import Chance


class Backups:
    """Everything that one instance watches, by job and slot."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._watches: dict[tuple[str, int], Watch] = {}
        self._timers: list[tuple[int, int, Watch, int]] = []  # boot_ms, tie, watch, armed
        self._tie = 0

    def __len__(self) -> int:
        """How many runs are watched; slots that are merely looked at again don't count."""
        return sum(watch.until_boot_ms is None for watch in self._watches.values())

    def watch(
        self,
        spec: JobSpec,
        slot_ms: int,
        attempt: int,
        boot_ms: int,
        *,
        token: str | None = None,
        until_boot_ms: int | None = None,
        first_check_boot_ms: int | None = None,
    ) -> None:
        """Watches that run, its attempt `attempt` being the latest known; `token` is that attempt's.

        With `until_boot_ms` the slot has no run yet: it is looked at again until then.
        """
        watch = self._watches.get((spec.name, slot_ms))
        if watch is None:
            watch = self._watches[spec.name, slot_ms] = Watch(spec, slot_ms, attempt, until_boot_ms)
        elif until_boot_ms is None:
            if token is None or token != watch.token:
                self._seen(watch, attempt)
            # Else a check of ours has won it, and the answer is lost or still to come: sent again, it is won again.
            watch.until_boot_ms = None
        if watch.claim is None:
            self.arm(watch, boot_ms, first_check_boot_ms)

    def arm(self, watch: Watch, boot_ms: int, at_boot_ms: int | None = None) -> None:
        """Sets the next check: at that time, or after a random time between one and two heartbeats."""
        if self._watches.get((watch.spec.name, watch.slot_ms)) is not watch:
            return
        if at_boot_ms is None:
            heartbeat_ms = watch.spec.options.heartbeat_ms
            at_boot_ms = boot_ms + max(1, round(self._chance.uniform(heartbeat_ms, 2 * heartbeat_ms)))
        watch.armed += 1
        watch.due_boot_ms = at_boot_ms
        self._tie += 1
        heapq.heappush(self._timers, (at_boot_ms, self._tie, watch, watch.armed))

    def arm_all(self, boot_ms: int) -> None:
        """The store is back: every check waits its random time from now."""
        for watch in self._watches.values():
            if watch.claim is None:
                self.arm(watch, boot_ms)

    def due_boot_ms(self) -> int | None:
        """When the next check is due, or None."""
        while self._timers and not self._counts(self._timers[0]):
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def due(self, boot_ms: int) -> list[Watch]:
        """The watches to check now."""
        found = []
        while self._timers and self._timers[0][0] <= boot_ms:
            timer = heapq.heappop(self._timers)
            if not self._counts(timer):
                continue
            watch = timer[2]
            if self.hold_back(watch, watch.due_boot_ms, boot_ms):
                self.arm(watch, boot_ms)
            else:
                found.append(watch)
        return found

    def hold_back(self, watch: Watch, due_boot_ms: int, boot_ms: int) -> bool:
        """Whether a check that was due then is to wait another time, because this instance slept meanwhile: runners
        that slept too renew first. One round per check only, or a busy machine would never take over.
        """
        slept = boot_ms - due_boot_ms > watch.spec.options.heartbeat_ms
        if not slept or watch.held_back:
            return False
        watch.held_back = True
        return True

    def gone(self, job: str, slot_ms: int, attempt: int | None, boot_ms: int) -> None:
        """The takeover named something that isn't there: another attempt is, or no run (None)."""
        watch = self._watches.get((job, slot_ms))
        if watch is None:
            return
        if attempt is not None:
            self._seen(watch, attempt)
            self.arm(watch, boot_ms)
        elif watch.until_boot_ms is not None and boot_ms < watch.until_boot_ms:
            self.arm(watch, boot_ms)
        else:
            self.drop(job, slot_ms)

    def drop(self, job: str, slot_ms: int) -> None:
        """The run ended, or is our own now."""
        self._watches.pop((job, slot_ms), None)

    def drop_job(self, job: str) -> list[Watch]:
        """Ends everything about a job; returns what was watched."""
        dropped = [watch for watch in self._watches.values() if watch.spec.name == job]
        for watch in dropped:
            self.drop(job, watch.slot_ms)
        return dropped

    def drop_all(self) -> list[Watch]:
        """Ends everything; returns what was watched."""
        dropped = list(self._watches.values())
        self._watches.clear()
        self._timers.clear()
        return dropped

    def _seen(self, watch: Watch, attempt: int) -> None:
        """Another attempt than before: no send of a check can win any more, and one token is for one attempt."""
        if attempt != watch.attempt:
            watch.attempt, watch.token, watch.unknown = attempt, None, False

    def _counts(self, timer: tuple[int, int, Watch, int]) -> bool:
        watch = timer[2]
        return watch.armed == timer[3] and self._watches.get((watch.spec.name, watch.slot_ms)) is watch
