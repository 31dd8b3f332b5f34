"""`leaselib purge`: removes a job's runs. Owns nothing; the main thread runs it."""

from __future__ import annotations

import argparse
import sys

from leaselib._model import Run
from leaselib.cli import _output
from leaselib.cli._command import Command
from leaselib.cli._place import Place, add_job, add_url, opened
from leaselib.cli._runs import check_known
from leaselib.cli._text import escape
from leaselib.cli._view import lease_state
from leaselib.errors import StoreError

DETAILS = """\
Without --force only runs that ended are removed, and nothing is asked. The store remembers the newest slot that was
removed, so that no late claim starts a purged run again.

With --force the unfinished runs go too. A runner that is still at work on one learns of it at its next heartbeat: its
handler is told to stop, and its result is refused. Mind that the job's next slot may then start beside it. On a
terminal, --force asks first if there are such runs; --yes answers for you. Without a terminal on standard input (a
script, a pipe, cron) nothing is ever asked.

Exit code: 0 if it was done, also if there was nothing to remove; 1 if the store can't be reached or knows no such job,
or if the answer was no.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    add_job(parser)
    parser.add_argument("--force", action="store_true", help="remove unfinished runs too, also those under way")
    parser.add_argument("-y", "--yes", action="store_true", help="don't ask")
    parser.add_argument("--json", action="store_true", help="one line of JSON")


def _run(args: argparse.Namespace) -> int:
    with opened(args) as place:
        check_known(place, args.job)
        unfinished = _unfinished(place, args.job)
        ask = args.force and not args.yes and sys.stdin.isatty()
        if ask and unfinished and not _agreed(place, args.job, unfinished):
            _output.complain("nothing was removed")
            return _output.TROUBLE
        removed = place.store.purge(args.job, force=args.force, timeout=args.timeout)
        left = _unfinished(place, args.job)
        if args.json:
            shown = {"job": args.job, "removed": removed, "unfinished": None if left is None else len(left)}
            _output.say_json(shown)
        else:
            _output.say(f"removed {_runs(removed)} of job {escape(repr(args.job))}")
            if left:
                _output.say(f"{_runs(len(left))} unfinished, and left as they are; --force removes such too")
        return _output.FINE


def _unfinished(place: Place, job: str) -> list[Run] | None:
    """The unfinished runs, or None if they can't be read: a malformed one is a reason to purge, not to refuse it."""
    try:
        return place.store.unfinished([job], timeout=place.timeout)
    except StoreError as error:
        if error.job is None:
            raise
        return None


def _agreed(place: Place, job: str, unfinished: list[Run]) -> bool:
    now = place.store.now(timeout=place.timeout)
    live = sum(1 for run in unfinished if (lease_state(run, now) or ("", 0))[0] == "live")
    what = f"{_runs(len(unfinished))} of job {escape(repr(job))} unfinished, {live} with a live lease"
    print(f"{what}. Remove them as well? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


PURGE = Command("purge", "remove the runs of a job", DETAILS, _add_arguments, _run)
