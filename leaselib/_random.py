"""Chance: the only module that draws it. Owns no state that a fork could copy; any thread may call it.

Decisions get a `Chance` handed in, so that a simulation's seed decides them.
"""

from __future__ import annotations

import random
import secrets
from typing import Protocol


class Chance(Protocol):
    """What decisions draw."""

    def uniform(self, low: float, high: float) -> float:
        """A number between low and high."""

    def token(self) -> str:
        """128 random bits, never drawn before and never to be drawn again, in any process."""


class SystemChance:
    """The operating system's randomness: nothing that two processes could share after a fork (rulings on tokens)."""

    def __init__(self) -> None:
        self._random = random.SystemRandom()

    def uniform(self, low: float, high: float) -> float:
        """See Chance."""
        return self._random.uniform(low, high)

    def token(self) -> str:
        """See Chance."""
        return secrets.token_hex(16)


SYSTEM = SystemChance()
