"""Exactly once in one's own SQLite file: the caller's open transaction, made fit for the rules.

Owns nothing; runs in the caller's thread on the caller's connection, and neither commits nor rolls back. SQLite has one
writer at a time, so that once the caller's transaction holds the write lock, nobody takes a run over until it ends.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from typing import Any

from leaselib.errors import ConfigurationError


class Inside:
    """The caller's connection, with plain rows whatever row factory the caller has chosen."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        """As sqlite3.Connection.execute."""
        return self._cursor().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any]) -> sqlite3.Cursor:
        """As sqlite3.Connection.executemany."""
        return self._cursor().executemany(sql, parameters)

    def _cursor(self) -> sqlite3.Cursor:
        cursor = self._connection.cursor()
        cursor.row_factory = None
        return cursor


def enter(connection: Any, path: str) -> Inside:
    """Checks the connection, and takes the write lock in its open transaction.

    Raises:
        ConfigurationError: not a sqlite3 connection to the store's file, or no transaction is open in it.
        sqlite3.OperationalError: the write lock can't be had; the transaction can only be rolled back. One that began
            with BEGIN IMMEDIATE has it already.
    """
    own = getattr(getattr(connection, "connection", None), "driver_connection", connection)  # SQLAlchemy's
    if not isinstance(own, sqlite3.Connection):
        raise ConfigurationError(
            f"this needs a sqlite3.Connection to the store's own file, {path}, not "
            f"{type(connection).__module__}.{type(connection).__qualname__}"
        )
    if not own.in_transaction:
        raise ConfigurationError(
            "no transaction is open in this connection, so nothing would hold the run: execute BEGIN IMMEDIATE first"
        )
    inside = Inside(own)
    main = next((row[2] for row in inside.execute("PRAGMA database_list") if row[1] == "main"), "")
    if not main or os.path.realpath(main) != os.path.realpath(path):
        raise ConfigurationError(f"this connection is to {main or 'no file'}, but the store is {path}")
    inside.execute("UPDATE leaselib_meta SET only_row = only_row")
    return inside
