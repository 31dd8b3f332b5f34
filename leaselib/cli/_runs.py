"""`leaselib runs`: a job's runs, newest first. Owns nothing; the main thread runs it."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timedelta
from itertools import chain

from leaselib._model import Run
from leaselib.cli import _output, _text
from leaselib.cli._command import Command
from leaselib.cli._place import Place, add_job, add_url, count, opened
from leaselib.cli._text import Cell, Column, Terminal
from leaselib.cli._view import lease_state, run_json, state_cell, took_words
from leaselib.errors import StoreError

DETAILS = """\
A run is shown with its latest attempt: why it started, on which instance, how long after the slot, how long it took.
With --attempts all of them follow, and with what each ended: `expired` means that its instance died or froze and the
lease ran out, `handed-over` that its instance was stopped and released the run.

Exit code: 0 if they could be read, 1 if the store can't be reached, knows no such job or holds malformed runs of it.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    add_job(parser)
    parser.add_argument("--limit", type=count, default=20, metavar="N", help="so many of the newest (default: 20)")
    parser.add_argument("--attempts", action="store_true", help="each attempt of a run, its checkpoint and its error")
    parser.add_argument("--json", action="store_true", help="one line of JSON; attempts and checkpoints are in it")
    parser.add_argument("--tokens", action="store_true", help="show tokens: who has a run's token can end that run")


def _run(args: argparse.Namespace) -> int:
    with opened(args) as place:
        runs = place.store.runs(args.job, args.limit, timeout=args.timeout)
        if not runs:
            check_known(place, args.job)
        now = place.store.now(timeout=args.timeout)
        if args.json:
            shown = [run_json(run, now, tokens=args.tokens) for run in runs]
            _output.say_json({"job": args.job, "now": _text.iso(now), "runs": shown})
            return _output.FINE
        if not runs:
            _output.say("no runs are kept of this job")
        else:
            terminal = _text.terminal_of(sys.stdout)
            for line in run_lines(runs, now, terminal, attempts=args.attempts, tokens=args.tokens):
                _output.say(line)
        return _output.FINE


def check_known(place: Place, job: str) -> None:
    """A name that was never run here is most likely misspelt.

    Raises:
        StoreError: the store doesn't know the job.
    """
    known = place.store.jobs(timeout=place.timeout)
    if job not in known:
        names = ", ".join(repr(name[:60]) for name in known[:20]) or "none"
        more = f" and {len(known) - 20} more" if len(known) > 20 else ""
        raise StoreError(f"no run of a job {job!r} has ever started here; the jobs of {place.shown} are: {names}{more}")


def run_lines(runs: list[Run], now: datetime, terminal: Terminal, *, attempts: bool, tokens: bool) -> list[str]:
    """A table of runs, for people."""
    columns = [
        Column("SLOT"), Column("STATE"), Column("ATT"), Column("REASON"), Column("RUNNER", shrinks=True),
        Column("STARTED"), Column("TOOK"),
    ]  # fmt: skip
    columns += [Column("TOKEN")] if tokens else []
    columns += [] if attempts else [Column("ERROR", shrinks=True)]
    rows = [_row(run, now, attempts=attempts, tokens=tokens) for run in runs]
    title, *lines = _text.table(columns, rows, terminal)
    if not attempts:
        return [title, *lines]
    details = (_details(run, now, terminal) for run in runs)
    return [title, *chain.from_iterable([line, *more] for line, more in zip(lines, details, strict=True))]


def _row(run: Run, now: datetime, *, attempts: bool, tokens: bool) -> list[Cell]:
    return [
        Cell(_text.instant_words(run.slot, now)),
        state_cell(run, now),
        Cell(str(run.attempt), "yellow" if run.attempt > 1 else ""),
        Cell(run.reason),
        Cell(run.runner),
        Cell(f"+{_text.duration_words((run.started_at - run.slot) / timedelta(seconds=1))}"),
        Cell(took_words(run)),
        *([Cell(run.token)] if tokens else []),
        *([] if attempts else [Cell(run.error or "", "red" if run.status == "failed" else "")]),
    ]


def _details(run: Run, now: datetime, terminal: Terminal) -> list[str]:
    lines = []
    lease = lease_state(run, now)
    for attempt in run.attempts:
        if attempt.outcome is not None:
            outcome = f"{attempt.outcome} after {took_words(attempt)}"
        else:
            outcome = "under way" if lease is None or lease[0] == "live" else f"its lease is {lease[0]}"
        started = _text.instant_words(attempt.started_at, now)
        lines.append(f"attempt {attempt.number}: {outcome}, started {started} on {attempt.runner}")
    if run.checkpoint is not None:
        text = json.dumps(_output.json_value(run.checkpoint), ensure_ascii=False)
        lines.append(f"checkpoint: {text if len(text) <= 500 else text[:499] + '…'}")
    if run.error is not None:
        lines.append(f"error: {run.error}")
    return [_text.line_of(["  ", line], terminal) for line in lines]


RUNS = Command("runs", "the runs of a job, newest first", DETAILS, _add_arguments, _run)
