"""The store that a command is about: where its URL comes from, how it is shown, and how it is opened.

Owns nothing; the main thread calls it. The environment is read here and nowhere else in this package, but for what
concerns the terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from leaselib._names import check_name
from leaselib.errors import ConfigurationError, StoreError
from leaselib.stores import MemoryStore, SQLiteStore, Store, open_store
from leaselib.stores import mask as mask_url
from leaselib.stores._sqlite_open import file_id

VARIABLE = "LEASELIB_URL"
LEAST_SECRET = 3
"""A shorter part of a password is left in a message: it would be found everywhere."""
URL_HELP = (
    f"the store, such as sqlite:///jobs.db, redis://host/0 or postgresql://user@host/database; may be left out if the "
    f"environment variable {VARIABLE} holds it, which keeps a password out of the list of processes"
)
_SCHEMES = ("memory", "sqlite", "redis", "rediss", "unix", "valkey", "valkeys", "postgres", "postgresql")


@dataclass(frozen=True)
class Place:
    """An open store, and its URL, which is not to be shown: `shown` is."""

    store: Store
    url: str = field(repr=False)
    timeout: float

    @property
    def shown(self) -> str:
        """The URL without its secrets."""
        return shown_url(self.url)

    def said(self, error: StoreError) -> str:
        """What an error says, without the URL's secrets."""
        return without_secrets(str(error), self.url)

    def check(self) -> None:
        """A SQLite file that was deleted since it was opened must not be made anew by whoever only looks.

        Raises:
            StoreError: it isn't there.
        """
        if isinstance(self.store, SQLiteStore) and file_id(self.store.path) is None:
            raise StoreError(f"there is no file {self.store.path!r}; is the path right? Nothing was created")


def add_url(parser: argparse.ArgumentParser) -> None:
    """Adds the URL and the time-out to a command's arguments."""
    parser.add_argument("url", nargs="?", metavar="URL", help=URL_HELP)
    parser.add_argument(
        "--timeout", type=seconds, default=10.0, metavar="S", help="seconds to wait for each answer (default: 10)"
    )


def add_job(parser: argparse.ArgumentParser) -> None:
    """Adds a job's name to a command's arguments."""
    parser.add_argument("job", metavar="JOB", help="the job's name; write -- before one that begins with a dash")


def seconds(text: str) -> float:
    """An argument that is a number of seconds above 0.

    Raises:
        ArgumentTypeError: it isn't.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.01 <= value <= 86_400:
        raise argparse.ArgumentTypeError("expected a number of seconds from 0.01 to 86400")
    return value


def count(text: str) -> int:
    """An argument that is a whole number from 1.

    Raises:
        ArgumentTypeError: it isn't.
    """
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError("expected a whole number from 1")
    return int(text)


def shown_url(url: str) -> str:
    """The URL without password and other secrets."""
    scheme, separator, rest = url.partition("://")
    before, question, query = rest.partition("?")
    if question and "@" in query and "@" not in before and scheme.lower() != "sqlite":
        return f"{scheme}{separator}***"  # the '?' may be a part of the password
    return mask_url(url)


def url_of(args: argparse.Namespace) -> str:
    """The URL that the arguments or the environment name; empty if neither does, or the command takes none."""
    given = getattr(args, "url", "")
    return os.environ.get(VARIABLE, "") if given is None else str(given)


def without_secrets(message: str, url: str) -> str:
    """A message about the store, without any part of the URL that may be a secret.

    Stores hide secrets themselves; but where a password holds a character that ends it by the rules of URLs, what they
    take for another part of the URL may be the rest of it.
    """
    scheme, _, rest = url.partition("://")
    if scheme.lower() in ("sqlite", "memory"):
        return message
    parts = re.split("[:?#/@]", rest.rpartition("@")[0])[1:]
    query = (pair.partition("=") for pair in re.split("[?&]", rest)[1:])
    parts += [value for name, _, value in query if re.search("pass|secret|key|token", unquote(name).lower())]
    forms = {form for part in parts for form in (part, unquote(part)) if len(form) >= LEAST_SECRET}
    for secret in sorted(forms, key=len, reverse=True):
        message = message.replace(secret, "***")
    return message


@contextlib.contextmanager
def opened(args: argparse.Namespace) -> Iterator[Place]:
    """The store that the arguments or the environment name, closed afterwards.

    Raises:
        ConfigurationError: no URL, or one that can't work.
        StoreError: there is no such store.
    """
    if args.url is None and _is_url(getattr(args, "job", "")):
        raise ConfigurationError("JOB is missing: write the store's URL first, then the job's name")
    url = url_of(args)
    if not url:
        raise ConfigurationError(f"no store: write its URL, such as sqlite:///jobs.db, or set {VARIABLE}")
    if hasattr(args, "job"):
        check_name("JOB", args.job)
    place = Place(_existing(url), url, args.timeout)
    try:
        place.check()
        if isinstance(place.store, SQLiteStore):
            _check_tables(place.store.path)
        yield place
    finally:
        place.store.close()


def _is_url(text: str) -> bool:
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme.lower().partition("+")[0] in _SCHEMES


def _existing(url: str) -> Store:
    """A store that is there already: looking at one must not make a file, tables or a schema where there were none."""
    if url.partition(":")[0].lower() in ("postgres", "postgresql"):
        from leaselib.stores._postgres import PostgresStore

        return PostgresStore(url, create=False)
    store = open_store(url)
    if isinstance(store, MemoryStore):
        raise ConfigurationError(
            "memory:// is inside the program that made it and can't be looked at from here; give the URL of a store "
            "that programs share, such as sqlite:///jobs.db"
        )
    return store


def _check_tables(path: str) -> None:
    try:
        with contextlib.closing(sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True, timeout=1)) as raw:
            found = raw.execute("SELECT 1 FROM sqlite_master WHERE name = 'leaselib_meta'").fetchone()
    except sqlite3.Error:
        return  # locked, damaged, no database, not readable: the store says it better
    if found is None:
        raise StoreError(
            f"{path!r} is a SQLite database without leaselib's tables: no instance has used it yet, or the path is "
            f"wrong. Nothing was created"
        )
