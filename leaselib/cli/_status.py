"""`leaselib status`: a store's clock and jobs. Owns nothing; the main thread runs it."""

from __future__ import annotations

import argparse
import sys

from leaselib._model import Run
from leaselib.cli import _output, _text
from leaselib.cli._command import Command
from leaselib.cli._place import Place, add_url, opened
from leaselib.cli._text import Cell, Column, Terminal
from leaselib.cli._view import (
    COUNTED,
    JobState,
    StoreState,
    age,
    epoch_words,
    look,
    state_cell,
    state_json,
)
from leaselib.errors import StoreError

DETAILS = f"""\
For each job its newest run: the slot, its state, the attempt, on which instance, and how long ago it ended or started.
Then what became of the newest {COUNTED} runs, and how many are open (unfinished).

An unfinished run is `running` while its lease is live. `expired` (its instance died or froze, and the lease ran out) or
`released` (its instance was stopped), the next attempt is up: an instance that watches the run starts it within two
heartbeats. If it stays so, no instance with that job is running.

Exit code: 0 if all could be read, 1 if the store can't be reached or what is stored of a job is malformed. A job whose
runs fail is no trouble of the store's: see the output.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--tokens", action="store_true", help="show tokens: who has a run's token can end that run")


def _run(args: argparse.Namespace) -> int:
    with opened(args) as place:
        if args.json:
            return _print_json(place, tokens=args.tokens)
        state = look(place)
        for line in status_lines(state, _text.terminal_of(sys.stdout), tokens=args.tokens):
            _output.say(line)
        return _output.TROUBLE if state.malformed else _output.FINE


def _print_json(place: Place, *, tokens: bool) -> int:
    try:
        state = look(place)
    except StoreError as error:
        _output.say_json(unreachable_json(place, error))
        return _output.TROUBLE
    _output.say_json(state_json(state, tokens=tokens))
    return _output.TROUBLE if state.malformed else _output.FINE


def unreachable_json(place: Place, error: StoreError) -> dict[str, object]:
    """What a program gets instead of a state."""
    return {"store": place.shown, "namespace": place.store.namespace, "reachable": False, "error": place.said(error)}


def status_lines(state: StoreState, terminal: Terminal, *, tokens: bool = False) -> list[str]:
    """The whole status, for people."""
    lines = [*_head(state, terminal), ""]
    if not state.jobs:
        return [*lines, "no job has started a run here yet"]
    columns = [
        Column("JOB", shrinks=True), Column("LAST SLOT"), Column("STATE"), Column("ATT"),
        Column("RUNNER", shrinks=True), Column("AGE"), Column("RUNS"),
    ]  # fmt: skip
    lines += _text.table(columns, [_row(job, state) for job in state.jobs], terminal)
    others = [run for job in state.jobs for run in job.unfinished if job.last is None or run.slot != job.last.slot]
    if others:
        lines += ["", "unfinished, beside the newest runs:", *_unfinished(others, state, terminal)]
    if tokens:
        newest = [job.last for job in state.jobs if job.last is not None]
        shown = [*newest, *others]
        rows = [[Cell(r.job), Cell(_text.instant_words(r.slot, state.now)), Cell(r.token)] for r in shown]
        columns = [Column("JOB", shrinks=True), Column("SLOT"), Column("TOKEN")]
        lines += ["", *_text.table(columns, rows, terminal)]
    for error in state.malformed:
        lines += ["", terminal.paint(_text.escape(error), "red")]
    return lines


def _head(state: StoreState, terminal: Terminal) -> list[str]:
    store = state.place.store
    if store.machine_clock:
        clock = "this machine's"
    else:
        clock = f"{state.offset:+.3f} s to this machine's (± {state.offset_error:.3f})"
    head = (
        ("store", f"{state.place.shown}  namespace {store.namespace}"),
        ("clock", f"{state.now.date().isoformat()} {state.now.time().isoformat('milliseconds')}Z, {clock}"),
        ("epoch", epoch_words(state.epoch, state.now)),
    )
    room = Terminal(None if terminal.width is None else max(terminal.width - 7, 1))
    return [f"{terminal.paint(title, 'dim')}  {_text.line_of([text], room)}" for title, text in head]


def _row(state: JobState, store: StoreState) -> list[Cell]:
    if state.error is not None:
        return [Cell(state.job), Cell("-"), Cell("malformed", "red"), *[Cell("-")] * 4]
    last = state.last
    counts = {**state.counts(), "running": len(state.unfinished)}
    runs = Cell(", ".join(f"{n} {_SHORT.get(status, status)}" for status, n in counts.items() if n) or "-")
    if last is None:
        return [Cell(state.job), *[Cell("-")] * 5, runs]
    return [
        Cell(state.job),
        Cell(_text.instant_words(last.slot, store.now)),
        state_cell(last, store.now),
        Cell(str(last.attempt), "yellow" if last.attempt > 1 else ""),
        Cell(last.runner),
        Cell(_text.duration_words(age(last, store.now))),
        runs,
    ]


_SHORT = {"success": "ok", "running": "open"}


def _unfinished(runs: list[Run], state: StoreState, terminal: Terminal) -> list[str]:
    columns = [
        Column("JOB", shrinks=True), Column("SLOT"), Column("STATE"), Column("ATT"),
        Column("RUNNER", shrinks=True), Column("AGE"),
    ]  # fmt: skip
    rows = [
        [
            Cell(run.job),
            Cell(_text.instant_words(run.slot, state.now)),
            state_cell(run, state.now),
            Cell(str(run.attempt)),
            Cell(run.runner),
            Cell(_text.duration_words(age(run, state.now))),
        ]
        for run in runs
    ]
    return _text.table(columns, rows, terminal)


STATUS = Command("status", "a store's clock, and how each of its jobs is", DETAILS, _add_arguments, _run)
