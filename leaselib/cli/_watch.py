"""`leaselib watch`: a store's jobs, again and again. Owns nothing; the main thread runs it.

With rich, on a terminal, the table is drawn in place and what changes scrolls by above it. Without, or in a pipe, the
table comes once and each change is a line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Protocol

from leaselib import _clock
from leaselib._model import Run
from leaselib.cli import _output, _text
from leaselib.cli._command import Command
from leaselib.cli._place import Place, add_url, count, opened, seconds
from leaselib.cli._rich import LiveArea, rich_usable
from leaselib.cli._status import status_lines, unreachable_json
from leaselib.cli._text import Terminal
from leaselib.cli._view import StoreState, lease_state, look, state_json, took_words
from leaselib.errors import StoreError

DETAILS = """\
Ends with Ctrl-C, or after --count looks. A store that can't be reached is said so, and looked at again.

On a terminal, and with the extra `cli` installed (rich), the table stays in place and changes scroll by above it.
Otherwise, also with --plain or NO_COLOR, the table is printed once and then each change as a line of its own.

Exit code: 0 if the last look could read everything, also after Ctrl-C; 1 if it could not.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("--interval", type=seconds, default=2.0, metavar="S", help="seconds between looks (default: 2)")
    parser.add_argument("--count", type=count, metavar="N", help="end after so many looks")
    parser.add_argument("--plain", action="store_true", help="lines only, nothing is drawn in place")
    parser.add_argument("--json", action="store_true", help="each look as a line of JSON, as `status --json` prints it")


class _Showing(Protocol):
    """What becomes of each look."""

    def state(self, state: StoreState) -> None: ...
    def trouble(self, place: Place, error: StoreError) -> None: ...


def _run(args: argparse.Namespace) -> int:
    code = _output.FINE
    with opened(args) as place:
        try:
            with _showing(args) as showing:
                for code in _looks(place, showing, args.interval, args.count):  # noqa: B007  the last one is returned
                    pass
        except KeyboardInterrupt:  # how one ends it
            return _output.FINE
    return code


def _showing(args: argparse.Namespace) -> AbstractContextManager[_Showing]:
    if args.json:
        return nullcontext(_Json())
    if rich_usable(sys.stdout, plain=args.plain):
        return _Drawn()
    return nullcontext(_Lines(_text.terminal_of(sys.stdout)))


def _looks(place: Place, showing: _Showing, interval_s: float, limit: int | None) -> Iterator[int]:
    """Looks at the store; yields what each look's exit code would be."""
    looks = 0
    while limit is None or looks < limit:
        if looks:
            _clock.pause(interval_s)
        looks += 1
        try:
            state = look(place)
        except StoreError as error:
            showing.trouble(place, error)
            yield _output.TROUBLE
        else:
            showing.state(state)
            yield _output.TROUBLE if state.malformed else _output.FINE


# ---- three ways to show ---------------------------------------------------------------------------------------------


class _Json:
    def state(self, state: StoreState) -> None:
        _output.say_json(state_json(state, tokens=False))

    def trouble(self, place: Place, error: StoreError) -> None:
        _output.say_json(unreachable_json(place, error))


class _Lines:
    """The table once, then changes."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._before: StoreState | None = None
        self._error: str | None = None

    def state(self, state: StoreState) -> None:
        if self._before is None:
            self._print(status_lines(state, self._terminal))
        else:
            back = [(_at(state.now), "the store answers again")] if self._error is not None else []
            self._print([_text.line_of(parts, self._terminal) for parts in [*back, *changes(self._before, state)]])
        self._before, self._error = state, None

    def trouble(self, place: Place, error: StoreError) -> None:
        said = place.said(error)
        if said != self._error:
            self._print([self._terminal.paint(_text.escape(said), "red")])
        self._error = said

    def _print(self, lines: list[str]) -> None:
        for line in lines:
            _output.say(line)
        sys.stdout.flush()


class _Drawn:
    """The table in place, changes above it."""

    def __init__(self) -> None:
        self._area = LiveArea(sys.stdout)
        self._before: StoreState | None = None
        self._drawn: list[str] = []

    def __enter__(self) -> _Drawn:
        self._area.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._area.stop()

    def state(self, state: StoreState) -> None:
        terminal = _text.terminal_of(sys.stdout)
        if self._before is not None:
            for parts in changes(self._before, state):
                self._area.above(_text.line_of(parts, terminal))
        self._before = state
        self._drawn = status_lines(state, terminal)
        self._area.draw_ansi(["", *self._drawn])

    def trouble(self, place: Place, error: StoreError) -> None:
        terminal = _text.terminal_of(sys.stdout)
        told = terminal.paint(_text.escape(place.said(error)), "red")
        self._area.draw_ansi(["", *self._drawn, "", told])


# ---- what changed ---------------------------------------------------------------------------------------------------


def changes(before: StoreState, after: StoreState) -> list[tuple[str, ...]]:
    """What happened between two looks, the parts of a line each, not escaped; oldest slot first within a job."""
    lines: list[tuple[str, ...]] = []
    if before.epoch != after.epoch:
        lines.append((_at(after.now), "the store was emptied or replaced: it has another epoch"))
    known = {job.job: job for job in before.jobs}
    for job in after.jobs:
        old = known.get(job.job)
        if job.error is not None:
            if old is None or old.error is None:
                lines.append((_at(after.now), job.job, f"malformed: {job.error}"))
            continue
        olds = {} if old is None else {run.slot: run for run in (*old.runs, *old.unfinished)}
        oldest = min((run.slot for run in old.runs), default=None) if old is not None else None
        news = {run.slot: run for run in (*job.runs, *job.unfinished)}
        for slot in sorted(news):
            if oldest is not None and slot < oldest and slot not in olds:
                continue  # kept all the time, and only now among the newest: some were purged
            where = (_at(after.now), job.job, _text.instant_words(slot, after.now))
            lines += [(*where, text) for text in _run_changes(olds.get(slot), news[slot], before.now, after.now)]
    return lines


def _run_changes(old: Run | None, new: Run, then: datetime, now: datetime) -> Iterator[str]:
    if old is None or old.attempt != new.attempt:
        again = "" if old is None or old.released else f" (that of {old.runner} ran out)"
        yield f"attempt {new.attempt} started on {new.runner}: {new.reason}{again}"
    if new.status != "running" and (old is None or old.status == "running"):
        error = "" if new.error is None else f": {new.error}"
        yield f"{new.status} after {took_words(new)} on {new.runner}{error}"
    elif new.released and (old is None or not old.released or old.attempt != new.attempt):
        yield f"released by {new.runner}, which is stopping"
    elif old is not None and _expired(new, now) and not (_expired(old, then) and old.attempt == new.attempt):
        yield f"the lease of {new.runner} ran out"


def _expired(run: Run, now: datetime) -> bool:
    return (lease_state(run, now) or ("", 0.0))[0] == "expired"


def _at(now: datetime) -> str:
    return f"{now.time().isoformat('seconds')}Z"


WATCH = Command("watch", "a store's jobs, again and again, and what changes", DETAILS, _add_arguments, _run)
