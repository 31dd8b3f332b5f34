"""rich, if it is installed: the one place that imports it. Owns nothing but what a LiveArea draws; the main thread
calls it.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType


def rich_usable(stream: TextIO, *, plain: bool) -> bool:
    """Whether to draw on that stream: a terminal that can, rich installed, and nobody asked for plain text."""
    if plain or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return False
    return importlib.util.find_spec("rich") is not None


class LiveArea:
    """A part of the terminal that is drawn in place, at the bottom; lines printed above it scroll as usual."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = Console(file=stream, highlight=False)
        self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="ellipsis")

    def start(self) -> None:
        """Begins to draw."""
        self._live.start()

    def stop(self) -> None:
        """Leaves what was drawn last, and gives the cursor back."""
        self._live.stop()

    def draw(self, what: RenderableType) -> None:
        """Draws this from now on."""
        from rich.console import Group

        # The empty line is where the terminal writes the ^C of Ctrl-C: at the end of a full line it would wrap, and
        # what is drawn would no longer be where it is thought to be.
        self._live.update(Group(what, ""), refresh=True)

    def clear(self) -> None:
        """Takes away what is drawn."""
        self._live.update("", refresh=True)

    def draw_ansi(self, lines: list[str]) -> None:
        """Draws these lines, which may hold escapes for styles."""
        from rich.text import Text

        self.draw(Text("\n", no_wrap=True, overflow="crop").join(Text.from_ansi(line) for line in lines))

    def above(self, text: str, style: str = "") -> None:
        """Prints a line above, for good."""
        from rich.text import Text

        self.console.print(Text(text, style=style, no_wrap=True, overflow="crop"), soft_wrap=True)
