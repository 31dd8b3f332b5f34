"""Where a command's output goes: standard output for what was asked, standard error for complaints; JSON for programs.

Owns nothing; the main thread calls it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any

from leaselib.cli._text import escape

FINE, TROUBLE, WRONG_USE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes. INTERRUPTED is how shells know that Ctrl-C ended a program."""
# So that the text is safe inside a page as well; in JSON these three can only stand in strings.
_HTML = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def prepare() -> None:
    """Makes sure that there are streams to write to, and that no character makes them fail."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this process
            setattr(sys, name, io.StringIO())
        with contextlib.suppress(AttributeError, ValueError):  # replaced by something simpler
            stream.reconfigure(errors="backslashreplace")


def forget_stdout() -> None:
    """Nobody reads the output any more: what is still buffered must not raise again when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


def json_text(value: object) -> str:
    """One line of JSON: ASCII only, and without the characters that mean something to HTML."""
    return json.dumps(value, allow_nan=False).translate(_HTML)


def json_value(value: Any) -> Any:
    """A value from the store itself if JSON can hold it; else its text, since somebody else wrote it there."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        try:
            return {"not_json": json.dumps(value)[:1000]}
        except RecursionError:
            return {"not_json": "nested too deep"}
    return value


def say(text: str = "") -> None:
    """Prints a line (or lines) that was asked for; whoever calls has escaped what came from a store."""
    print(text)


def say_json(value: object) -> None:
    """Prints a line of JSON, at once."""
    print(json_text(value), flush=True)


def complain(text: str) -> None:
    """Says on standard error what went wrong."""
    print(f"leaselib: {escape(text)}", file=sys.stderr, flush=True)
