"""What a command of the command line is. Owns nothing."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        name: what one types.
        summary: what it does, in a line.
        details: what else `--help` says.
        add_arguments: adds its arguments to a parser.
        run: carries it out and returns the exit code; may raise StoreError (trouble) and ConfigurationError (wrong
            use), whose messages are then printed.
    """

    name: str
    summary: str
    details: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
