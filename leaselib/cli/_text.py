"""Text for terminals: escapes, widths, tables, instants and durations in words.

Owns nothing; any thread may call it. Names, runners and errors come from a store that others can write to, so nothing
of theirs reaches a terminal but through `escape`.
"""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TextIO

GAP = "  "
LEAST_WIDTH = 8
"""On a terminal a column that may shrink keeps so many cells."""
MOST_PADDING = 40
"""In a file or a pipe nothing is cut; a longer text moves the rest of its own line, and not that of all lines."""
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_ISOLATE, _POP = "\u2068", "\u2069"


@dataclass(frozen=True)
class Terminal:
    """What the output goes to.

    Attributes:
        width: its columns; None for a file or a pipe, where nothing is cut.
        colour: whether styles are shown.
    """

    width: int | None = None
    colour: bool = False

    def paint(self, text: str, style: str) -> str:
        """The text in a style of `_STYLES`, or as it is."""
        if not self.colour or not style or not text:
            return text
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


@dataclass(frozen=True)
class Cell:
    """A text of a table, not yet escaped, and its style."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table. `shrinks`: its texts may be cut where the terminal is narrow."""

    title: str
    shrinks: bool = False


def terminal_of(stream: TextIO) -> Terminal:
    """What a stream writes to. NO_COLOR and TERM=dumb turn styles off."""
    if not stream.isatty():
        return Terminal()
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return Terminal(shutil.get_terminal_size().columns, not plain)


# ---- characters -----------------------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """The text on one line, with everything that doesn't print (control characters, ANSI escapes, marks that turn the
    direction of writing, lone surrogates) as an escape.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def width_of(text: str) -> int:
    """How many columns an escaped text takes."""
    return len(text) if text.isascii() else sum(map(_width, text))


def cut(text: str, width: int) -> str:
    """The text in at most so many columns; what was cut shows as an ellipsis."""
    if width_of(text) <= width:
        return text
    if width < 1:
        return ""
    kept, used = "", 0
    for char in text:
        used += _width(char)
        if used > width - 1:
            break
        kept += char
    return f"{kept}…"


def _width(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def _isolated(text: str) -> str:
    """Keeps a right-to-left text from turning around what stands beside it."""
    if any(unicodedata.bidirectional(c) in ("R", "AL", "AN") for c in text):
        return f"{_ISOLATE}{text}{_POP}"
    return text


# ---- tables ---------------------------------------------------------------------------------------------------------


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], terminal: Terminal) -> list[str]:
    """The lines of a table, its titles first; no line is wider than the terminal."""
    cells = [[Cell(column.title, "dim") for column in columns], *rows]
    texts = [[escape(cell.text) for cell in row] for row in cells]
    widths = [max(width_of(row[i]) for row in texts) for i in range(len(columns))]
    if terminal.width is None:
        widths = [min(width, MOST_PADDING) for width in widths]
    else:
        _shrink(widths, [i for i, column in enumerate(columns) if column.shrinks], terminal.width)
    lines = []
    for row, shown in zip(cells, texts, strict=True):
        styles = [cell.style for cell in row]
        lines.append(_line(shown, styles, widths, terminal))
    return lines


def _shrink(widths: list[int], may: list[int], wanted: int) -> None:
    gaps = len(GAP) * (len(widths) - 1)
    while sum(widths) + gaps > wanted:
        widest = max(may, key=lambda i: widths[i], default=None)
        if widest is None or widths[widest] <= LEAST_WIDTH:
            return
        widths[widest] -= 1


def _line(texts: list[str], styles: list[str], widths: list[int], terminal: Terminal) -> str:
    line, left = "", terminal.width
    for i, (text, style, width) in enumerate(zip(texts, styles, widths, strict=True)):
        gap, room, shown = GAP if i else "", width, text
        if left is not None:
            room = min(width, left - len(gap))
            if room < 1:
                break
            shown = cut(text, room)
            left -= len(gap) + room
        pad = " " * (room - width_of(shown))
        line += gap + terminal.paint(_isolated(shown) if left is not None else shown, style) + pad
    return line.rstrip()


def line_of(parts: Sequence[str], terminal: Terminal) -> str:
    """A line of parts, not yet escaped, side by side; cut to the terminal."""
    if terminal.width is None:
        return GAP.join(map(escape, parts))
    return cut(GAP.join(_isolated(escape(part)) for part in parts), terminal.width)


# ---- time -----------------------------------------------------------------------------------------------------------


def iso(instant: datetime) -> str:
    """A UTC instant for programs: `2026-01-31T12:00:00.000Z`."""
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def instant_words(instant: datetime, now: datetime) -> str:
    """A UTC instant for people; without its date if that is today's."""
    digits = "seconds" if instant.microsecond == 0 else "milliseconds"
    clock = f"{instant.time().isoformat(timespec=digits)}Z"
    return clock if instant.date() == now.date() else f"{instant.date().isoformat()} {clock}"


def duration_words(seconds: float) -> str:
    """A duration in its largest fitting unit: `2.4 s`, `45 s`, `12 min`, `5 h`, `3 d`."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    for limit_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit_s:
            return f"{int(seconds // unit_s)} {unit}"
    return f"{int(seconds // 86_400)} d"
