"""Orphans: claims that were given up though they may have been won. Decisions only; a part of the Planner, and guarded
as it is.

Nobody runs such a run, so its token is released, until the store answers or the lease must be over anyway: accepted is
a hand-over, refused means that nothing was lost.
"""

from __future__ import annotations

from leaselib._claims import Claim, Orphan
from leaselib._effects import Effect, ReleaseOrphan


class Orphans:
    """The tokens to release. `out` counts the releases under way."""

    def __init__(self) -> None:
        self._waiting: list[Orphan] = []
        self.out = 0

    def give_up(self, claim: Claim, boot_ms: int) -> None:
        """Cancels a claim. If a send's fate is unknown, its token is to be released; if it is still in flight, its
        answer or failure brings it here again.
        """
        claim.cancelled = True
        if claim.unknown and claim.token is not None and not claim.in_flight:
            claim.unknown = False
            options = claim.spec.options
            until_ms = boot_ms + options.lease_ms + options.call_timeout_ms
            self._waiting.append(
                Orphan(claim.spec.name, claim.slot_ms, claim.token, until_ms, options.call_timeout_ms)
            )

    def release(self, boot_ms: int) -> list[Effect]:
        """Sends the releases, of those whose lease can still be live."""
        effects: list[Effect] = [ReleaseOrphan(o) for o in self._waiting if o.until_boot_ms > boot_ms]
        self._waiting.clear()
        self.out += len(effects)
        return effects

    def answered(self) -> None:
        """A release was answered: accepted or refused, nobody waits for that token any more."""
        self.out -= 1

    def failed(self, orphan: Orphan, *, again: bool) -> None:
        """A release's fate is unknown; `again` keeps it for the next time."""
        self.out -= 1
        if again:
            self._waiting.append(orphan)
