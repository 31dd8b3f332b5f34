"""The command line: `leaselib`, which is `python -m leaselib`. The parser, the table of commands, the exit codes.

Owns nothing; the main thread runs it. A new command is a module of its own and a line in `COMMANDS`.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

import leaselib
from leaselib.cli import _output
from leaselib.cli._command import Command
from leaselib.cli._demo import DEMO
from leaselib.cli._place import VARIABLE, shown_url, url_of, without_secrets
from leaselib.cli._purge import PURGE
from leaselib.cli._runs import RUNS
from leaselib.cli._schema import SCHEMA
from leaselib.cli._status import STATUS
from leaselib.cli._watch import WATCH
from leaselib.errors import ConfigurationError, StoreError

__all__ = ["main"]

COMMANDS: dict[str, Command] = {command.name: command for command in (DEMO, STATUS, RUNS, WATCH, PURGE, SCHEMA)}

_WIDTH = max(map(len, COMMANDS)) + 2
_EPILOG = "\n".join(
    (
        "commands:",
        *(f"  {command.name:{_WIDTH}}{command.summary}" for command in COMMANDS.values()),
        "",
        "`leaselib COMMAND --help` says more about each. All but demo are about a store, named by its URL or by the",
        f"environment variable {VARIABLE}; none of them creates one. Passwords are never printed.",
        "",
        "exit codes: 0 fine, 1 found trouble, 2 wrong use, 130 ended by Ctrl-C.",
    )
)


class _Help(argparse.HelpFormatter):
    """Fills paragraphs as wide as the terminal, and leaves lists as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(p if "\n  " in p else textwrap.fill(p, width, initial_indent=indent) for p in paragraphs)


class _Parser(argparse.ArgumentParser):
    """Repeats no password in an error message, and nothing that a terminal would obey."""

    given: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        for text in sorted(self.given, key=len, reverse=True):
            if "://" in text:
                for written in {text, repr(text)[1:-1], text.partition("=")[2]} - {""}:
                    message = message.replace(written, shown_url(written))
        self.print_usage(sys.stderr)
        _output.complain(message)
        sys.exit(_output.WRONG_USE)


def _parser(prog: str, description: str, epilog: str, given: Sequence[str]) -> _Parser:
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.given = given
    return parser


def _parse(argv: Sequence[str]) -> tuple[Command, argparse.Namespace]:
    command = COMMANDS.get(argv[0]) if argv else None
    if command is not None:
        summary = f"{command.summary[:1].upper()}{command.summary[1:]}."
        parser = _parser(f"leaselib {command.name}", summary, command.details, argv)
        command.add_arguments(parser)
        return command, parser.parse_intermixed_args(argv[1:])  # options may also stand between URL and JOB
    top = _parser("leaselib", "Looks at the leases of scheduled jobs, and shows how they work.", _EPILOG, argv)
    top.add_argument("--version", action="version", version=f"leaselib {leaselib.__version__}")
    top.add_argument("command", metavar="COMMAND", choices=list(COMMANDS), help="one of those below")
    if not argv:
        top.print_help(sys.stderr)
        sys.exit(_output.WRONG_USE)
    top.parse_args(argv[:1])  # prints the help or the version, or says which commands there are
    return top.error("write the command first, then its arguments")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    Args:
        argv: the arguments, without the program's name; those of the process by default.

    Raises:
        SystemExit: argparse has said what is wrong with the arguments, or has printed the help or the version.
    """
    _output.prepare()
    command, args = _parse(list(sys.argv[1:] if argv is None else argv))
    try:
        code = command.run(args)
        sys.stdout.flush()
    except ConfigurationError as error:
        _output.complain(without_secrets(str(error), url_of(args)))
        return _output.WRONG_USE
    except StoreError as error:
        message = without_secrets(str(error), url_of(args))
        if getattr(args, "json", False):
            _output.say_json({"error": message})
        _output.complain(message)
        return _output.TROUBLE
    except KeyboardInterrupt:
        return _output.INTERRUPTED
    except BrokenPipeError:
        _output.forget_stdout()
        return _output.FINE
    except OSError as error:  # what stores meet are StoreErrors: this is the output's disk, or no more processes
        _output.forget_stdout()
        _output.complain(str(error))
        return _output.TROUBLE
    return code
