"""How the demo looks: plain lines, or with rich a picture of the instances below the time line.

Owns what is drawn; the main thread calls it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from leaselib._model import Run
from leaselib.cli import _demo_plan as plan
from leaselib.cli._demo_judge import Check
from leaselib.cli._demo_story import Story
from leaselib.cli._rich import LiveArea, rich_usable
from leaselib.cli._text import escape, terminal_of

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

TITLES = {
    "instances": "three instances",
    "once": "each due run once",
    "takeover": "takeover after SIGKILL",
    "hand-over": "hand-over after SIGTERM",
    "finish": "the run was finished",
}
INTRO = (
    f"Three instances of one program share a SQLite file and nothing else. `{plan.TICK}` is due every second; soon "
    f"`{plan.REPORT}` is due once, {plan.STEPS} steps of {plan.STEP_S:g} s. Leases last {plan.LEASE_S:g} s and are "
    f"renewed every {plan.HEARTBEAT_S:g} s."
)
ACTS = (
    "Each due run is started by one instance only; the others watch it as its backups.",
    (
        f"The instance that runs `{plan.REPORT}` is killed (SIGKILL). A backup takes over, at most lease + 2 "
        f"heartbeats = {plan.TAKEOVER_BOUND_S:.1f} s after the last heartbeat."
    ),
    (
        f"That one is told to stop (SIGTERM) and hands over: the last one goes on, at most 2 heartbeats = "
        f"{plan.HANDOVER_BOUND_S:.1f} s later."
    ),
)
OUTRO = "About 15 seconds; Ctrl-C ends it at any time and cleans up."


class PlainScreen:
    """Lines, for a pipe, a log or a terminal without rich."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._width = terminal_of(stream).width or 110

    def start(self) -> None:
        """Says what is to be seen."""
        self._print("leaselib demo", "", INTRO)
        for number, text in enumerate(ACTS, 1):
            self._print(f"  {number}. {text}", indent=5)
        self._print(OUTRO, "")

    def line(self, seconds: float, text: str, style: str = "") -> None:  # noqa: ARG002
        """A line of the time line."""
        self._print(f"{seconds:5.1f} s  {escape(text)}", indent=9)

    def picture(self, story: Story, pids: dict[str, int], lease_left: float | None) -> None:
        """How things are now: nothing that a line would be worth."""

    def close(self) -> None:
        """Nothing is drawn, so nothing is left to do."""

    def summary(self, checks: Sequence[Check], verdict: str) -> None:
        """What became of it all."""
        self._print("", "As the store recorded it:")
        for check in checks:
            mark = "ok    " if check.ok else "MISSED"
            self._print(f"  {mark}  {TITLES[check.name]:<23}  {escape(check.text)}{_bound_words(check)}", indent=35)
        self._print("", verdict)

    def say(self, text: str) -> None:
        """A line below everything."""
        self._print(text)

    def _print(self, *lines: str, indent: int = 0) -> None:
        for line in lines:
            for part in textwrap.wrap(line, self._width, subsequent_indent=" " * indent) or [""]:
                print(part, file=self._stream)
        self._stream.flush()


class RichScreen:
    """The time line scrolls by above a picture of the instances and the lease."""

    def __init__(self, stream: TextIO) -> None:
        self._area = LiveArea(stream)
        self._drawing = False

    def start(self) -> None:
        """Says what is to be seen, and begins to draw."""
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        acts = Table.grid(padding=(0, 1))
        for number, text in enumerate(ACTS, 1):
            acts.add_row(Text(f"{number}.", style="bold cyan"), text)
        body = Table.grid()
        body.add_row(INTRO)
        body.add_row(acts)
        body.add_row(Text(OUTRO, style="dim"))
        self._area.console.print(Panel(body, title="leaselib demo", title_align="left", border_style="cyan"))
        self._area.start()
        self._drawing = True

    def line(self, seconds: float, text: str, style: str = "") -> None:
        """A line of the time line."""
        from rich.table import Table
        from rich.text import Text

        row = Table.grid(padding=(0, 2))
        row.add_row(Text(f"{seconds:5.1f} s", style="dim", no_wrap=True), Text(escape(text), style=style))
        self._area.console.print(row)

    def picture(self, story: Story, pids: dict[str, int], lease_left: float | None) -> None:
        """How things are now."""
        from rich.panel import Panel
        from rich.table import Table

        body = Table.grid(expand=True)
        body.add_row(_instances(story, pids))
        body.add_row(_lease(story.run, lease_left))
        self._area.draw(Panel(body, border_style="dim"))

    def close(self) -> None:
        """Takes the picture away: what it showed last is in the summary."""
        if self._drawing:
            self._drawing = False
            self._area.clear()
            self._area.stop()

    def summary(self, checks: Sequence[Check], verdict: str) -> None:
        """What became of it all."""
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        body = Table.grid(padding=(0, 1))
        for check in checks:
            mark = Text("✔", style="bold green") if check.ok else Text("✘", style="bold red")
            told = Text.assemble((escape(check.text), "" if check.ok else "red"), (_bound_words(check), "dim"))
            body.add_row(mark, Text(TITLES[check.name], style="bold", no_wrap=True), told)
        fine = all(check.ok for check in checks)
        style = "green" if fine else "red"
        self._area.console.print(
            Panel(body, title="as the store recorded it", title_align="left", subtitle=verdict, border_style=style)
        )

    def say(self, text: str) -> None:
        """A line below everything."""
        self._area.console.print(text)


Screen = PlainScreen | RichScreen


def screen_for(stream: TextIO, *, plain: bool) -> Screen:
    """The screen that fits."""
    return RichScreen(stream) if rich_usable(stream, plain=plain) else PlainScreen(stream)


def _bound_words(check: Check) -> str:
    return "" if check.bound is None else f" (bound: {check.bound:.2f} s)"


# ---- the picture ----------------------------------------------------------------------------------------------------


def _instances(story: Story, pids: dict[str, int]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True, box=None, pad_edge=False)
    table.add_column("instance", style="bold", no_wrap=True)
    table.add_column("pid", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("runs", ratio=1, no_wrap=True)
    table.add_column(f"{plan.TICK}s", justify="right", no_wrap=True)
    attempt, runner = story.current()
    for name in plan.RUNNERS:
        state, style = _state(story, name)
        doing = Text("")
        if name == runner and not story.over and state in ("up", "stopping"):
            doing = Text.assemble((f"{plan.REPORT}, attempt {attempt}  ", "cyan"), _bar(story.done_steps(), plan.STEPS))
            doing.append(f"  {story.done_steps()}/{plan.STEPS}")
        elif story.backups[name]:
            doing = Text(f"backup of {plan.REPORT}", style="dim")
        table.add_row(name, str(pids.get(name, "")), Text(f"● {state}", style=style), doing, str(story.ticks[name]))
    return table


def _state(story: Story, runner: str) -> tuple[str, str]:
    if story.killed is not None and story.killed.runner == runner:
        return "killed", "red"
    if runner in story.ended:
        return "stopped", "yellow"
    if story.stopped is not None and story.stopped.runner == runner:
        return "stopping", "yellow"
    return ("up", "green") if runner in story.up else ("starting", "dim")


def _lease(run: Run | None, left: float | None) -> Text:
    from rich.text import Text

    if run is None or left is None or run.status != "running":
        return Text("no lease is held", style="dim")
    if run.released:
        return Text(f"lease of {plan.REPORT}: released by {run.runner}, up for the next attempt", style="yellow")
    if left <= 0:
        return Text(f"lease of {plan.REPORT}: ran out, up for the next attempt", style="yellow")
    text = Text(f"lease of {plan.REPORT}, held by {run.runner}  ")
    text.append_text(_bar(round(left * 10), round(plan.LEASE_S * 10), 30))
    return text.append(f"  {left:.1f} s left")


def _bar(value: int, whole: int, cells: int = 12) -> Text:
    from rich.text import Text

    full = max(0, min(cells, round(cells * value / whole)))
    return Text.assemble(("█" * full, "green"), ("░" * (cells - full), "dim"))
