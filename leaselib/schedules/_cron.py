"""Cron expressions as schedules, by Vixie cron's rules, in any time zone.

Owns no state beyond what was read from the expression; immutable, so any thread may use a `Cron` without a lock.
"""

from __future__ import annotations

from datetime import timezone
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from leaselib.errors import ConfigurationError
from leaselib.schedules._base import Schedule, shown
from leaselib.schedules._cron_parse import parse
from leaselib.schedules._cron_search import RULES_ONLY_S, latest_slot_s, next_slot_s
from leaselib.schedules._zones import resolve_zone

if TYPE_CHECKING:
    from leaselib.schedules._cron_search import Walls


class Cron(Schedule):
    """Due when the local clock of a zone matches a cron expression.

    Five fields (minute, hour, day of month, month, day of week), six with seconds first, or `@hourly`, `@daily`,
    `@midnight`, `@weekly`, `@monthly`, `@yearly`, `@annually`. A field is `*`, a value, a range `1-5`, a step `*/2`,
    `1-9/2` or `5/10` (from 5 to the end), or a list of these. Months and weekdays have names, in any case; Sunday is
    0 and 7; `?` is `*`; a range without a step may wrap round (`22-2`). `L` is the last day of the month, `L5` its
    last Friday, `5#2` its second Friday.

    The rules are Vixie cron's:

    - Day of month and day of week both restricted: either is enough. A field that starts with `*` doesn't restrict:
      then both have to match.
    - Neither minute nor hour starts with `*`: it is at fixed times. A time that a clock change skips is due once, at
      the end of the gap; one that comes twice is due the first time. (Local time moved on by over three hours at
      once, as at the date line, drops what it skips.)
    - Any other follows the clock: it is due whenever the clock shows a match, in both passes of a repeated hour and
      not in a gap. `0 * * * *` is due once in every real hour.

        Cron("0 6 * * *", tz="Europe/Paris")
        Cron("*/10 * * * * *")  # every ten seconds

    Equal if expression and zone are.

    Args:
        expression: The fields; blanks between them don't matter.
        tz: A zone's name, a ZoneInfo or `timezone.utc`. The zone of the machine plays no part.

    Raises:
        ConfigurationError: The expression can't be read or has more than one meaning, its dates never come, or the
            zone is unknown.

    Attributes:
        expression: As given, with single spaces.
    """

    __slots__ = ("_follows_clock", "_walls", "_zone", "expression", "tz")

    expression: str
    _walls: Walls
    _follows_clock: bool
    _zone: ZoneInfo | None

    def __init__(self, expression: str, tz: str | ZoneInfo | timezone = "UTC") -> None:
        if not isinstance(expression, str):
            raise ConfigurationError(
                f"cron expression {shown(expression)}: expected text, such as '0 6 * * *', found"
                f" {type(expression).__name__}"
            )
        text = " ".join(expression.split())
        parsed = parse(text)
        zone = resolve_zone(tz)
        object.__setattr__(self, "expression", text)
        object.__setattr__(self, "tz", zone)
        object.__setattr__(self, "_walls", parsed.walls)
        object.__setattr__(self, "_follows_clock", parsed.follows_clock)
        object.__setattr__(self, "_zone", zone if isinstance(zone, ZoneInfo) else None)
        self._check_comes()

    def _check_comes(self) -> None:
        """Refuse what is never due; asked of a time by when all zones keep to their last rules, so of no clock."""
        if self._walls.next(RULES_ONLY_S) is None:
            raise ConfigurationError(
                f"cron expression {shown(self.expression)}: its dates never come; write a day that its months have,"
                " such as 28, or L for the last day of the month"
            )
        # A fixed time that a clock change skips is due at the end of the gap, so only the others can miss all.
        if self._follows_clock and self.next_ms(RULES_ONLY_S * 1_000) is None:
            raise ConfigurationError(
                f"cron expression {shown(self.expression)}: its times never come in {self.tz}, where clock changes"
                " always skip them; write a fixed minute and hour, or a time outside the change"
            )

    def next_ms(self, after_ms: int) -> int | None:
        """The first slot strictly after `after_ms`, in milliseconds since the epoch; None if none before year 9999."""
        slot_s = next_slot_s(self._walls, self._zone, follows_clock=self._follows_clock, after_s=after_ms // 1_000)
        return None if slot_s is None else slot_s * 1_000

    def latest_ms(self, at_ms: int) -> int | None:
        """The last slot at or before `at_ms`, in milliseconds since the epoch; None if there is none."""
        slot_s = latest_slot_s(self._walls, self._zone, follows_clock=self._follows_clock, at_s=at_ms // 1_000)
        return None if slot_s is None else slot_s * 1_000

    def count_ms(self, first_ms: int, last_ms: int, limit: int) -> int:
        """How many slots lie in [first_ms, last_ms], by walking over at most `limit` of them."""
        count = 0
        slot_ms = self.next_ms(first_ms - 1)
        while count < limit and slot_ms is not None and slot_ms <= last_ms:
            count += 1
            slot_ms = self.next_ms(slot_ms)
        return count

    def describe(self) -> str:
        """The expression and its zone: `cron '0 6 * * *' Europe/Paris`."""
        return f"cron {self.expression!r} {self.tz}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Cron):
            return NotImplemented
        return self.expression == other.expression and str(self.tz) == str(other.tz)

    def __hash__(self) -> int:
        return hash((Cron, self.expression, str(self.tz)))

    def __reduce__(self) -> tuple[type[Cron], tuple[str, str]]:
        return Cron, (self.expression, str(self.tz))
