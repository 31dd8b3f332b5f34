"""Exactly once in one's own database: a run's record as a part of the caller's transaction.

`confirm` locks the run's record in the transaction that the caller has open, if this attempt still holds the run: until
that transaction ends nobody takes the run over. `finish_in` records its success there: effect and record commit
together or not at all. Both run in the caller's thread on the caller's connection, wait as long as that connection
waits, and neither commit nor roll back. Owns nothing.

Call `finish_in` last, but in a repeatable-read or serializable transaction first: finish_in, then the effect, then the
commit, all within the lease. Heartbeats update the record too, and there the server refuses (40001) to update what
changed since the transaction's first statement; from `finish_in` on no heartbeat gets through. `confirm` too is called
first there, or it is refused in the same way. Neither belongs into a savepoint: rolled back, it takes lock and record
with it.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from leaselib.errors import ConfigurationError, StoreError
from leaselib.stores._postgres_errors import NO_SCHEMA, transient
from leaselib.stores._postgres_schema import quoted


def confirm(connection: Any, job: str, slot_ms: int, token: str, *, namespace: str, schema: str) -> bool:
    """Whether the attempt with this token still holds the run; if so, it keeps it until the transaction ends.

    Args:
        connection: a psycopg.Connection, or a SQLAlchemy connection on psycopg 3; to the store's own database, in an
            open transaction.
        job: the job's name.
        slot_ms: the run's slot, milliseconds since the epoch.
        token: the attempt's token.
        namespace: the store's namespace.
        schema: the store's schema.

    Raises:
        ConfigurationError: no such connection, or no transaction is open in it.
        StoreError: the store's tables and functions can't be used over this connection.
        psycopg.Error: what else went wrong with the caller's transaction; it can only be rolled back.
    """
    statement = f"SELECT {quoted(schema)}.confirm_2(%s::text, %s::text, %s::bigint, %s::text)"
    return _ask(connection, schema, statement, namespace, job, slot_ms, token) is True


def finish_in(connection: Any, job: str, slot_ms: int, token: str, *, namespace: str, schema: str) -> bool:
    """Ends the run as a success in the caller's transaction, if the token is current and it is not over nor released.

    It counts once that transaction has committed. Arguments and errors as for `confirm`.
    """
    statement = f"SELECT {quoted(schema)}.finish_in_2(%s::text, %s::text, %s::bigint, %s::text, 'success')"
    return _ask(connection, schema, statement, namespace, job, slot_ms, token) is True


def check_epoch(connection: Any, expected: str, where: str, *, namespace: str, schema: str) -> None:
    """Makes sure that the connection goes to the store's own database: there the namespace has that epoch.

    Args:
        connection: as for `confirm`, which was answered with False over it.
        expected: the epoch of the namespace in the store's database.
        where: that database, without a password.
        namespace: the store's namespace.
        schema: the store's schema.

    Raises:
        ConfigurationError: it goes to another database that has leaselib's schema too.
        StoreError, psycopg.Error: as for `confirm`.
    """
    statement = f"SELECT n.epoch FROM {quoted(schema)}.namespaces AS n WHERE n.namespace = %s"  # noqa: S608
    found = _ask(connection, schema, statement, namespace)
    if found == expected:
        return
    info = _driver_connection(connection).info
    raise ConfigurationError(
        f"this connection goes to the database {info.dbname!r} at {info.host}:{info.port}, whose schema {schema!r} is "
        f"another store's: namespace {namespace!r} has the epoch {found} there, and {expected} in this store's own "
        f"database, {where}. Use a connection to that one"
    )


def _ask(connection: Any, schema: str, statement: str, *args: object) -> object:
    """The only value of the only row that the statement is answered with; None if there is no row."""
    own = _driver_connection(connection)
    try:
        # Whatever cursors, rows and preparing the caller has chosen: they would not do here, nor behind a pooler.
        with psycopg.Cursor(own, row_factory=tuple_row) as cursor:
            row = cursor.execute(statement.encode(), args, prepare=False).fetchone()
    except psycopg.Error as error:
        if error.sqlstate in NO_SCHEMA or error.sqlstate == "42501":
            raise StoreError(
                f"this connection can't use leaselib's functions in schema {schema!r} ({error.sqlstate}): it must go "
                f"to the store's own database, with a role that has the grants of `leaselib schema URL --grant ROLE`",
                transient=transient(error.sqlstate),
            ) from error
        raise
    return None if row is None else row[0]


def _driver_connection(connection: Any) -> psycopg.Connection[Any]:
    """The psycopg connection, with a transaction open or about to be.

    Raises:
        ConfigurationError: there is none.
    """
    own = connection
    if not isinstance(own, psycopg.Connection):
        proxied = getattr(connection, "connection", None)  # SQLAlchemy's Connection
        own = getattr(proxied, "driver_connection", None) or getattr(connection, "driver_connection", None)
        in_transaction = getattr(connection, "in_transaction", None)
        if isinstance(own, psycopg.Connection) and callable(in_transaction) and not in_transaction():
            raise ConfigurationError("open a transaction first: `with engine.begin() as connection:`")
    if not isinstance(own, psycopg.Connection):
        raise ConfigurationError(
            f"this needs a psycopg.Connection, or a SQLAlchemy connection whose engine uses postgresql+psycopg:// (a "
            f"Session has session.connection()), not {type(connection).__module__}.{type(connection).__qualname__}"
        )
    if own.autocommit and own.info.transaction_status == pq.TransactionStatus.IDLE:
        raise ConfigurationError(
            "the connection is in autocommit and has no transaction open, so nothing would hold the run. Use "
            "`with connection.transaction():` around the effect, or a connection without autocommit"
        )
    return own
