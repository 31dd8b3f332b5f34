"""A connection to PostgreSQL that never waits longer than it was told to.

It drives libpq's non-blocking calls, as psycopg's documented `psycopg.pq` hands them out, in a loop of its own: every
wait for the socket ends at the operation's one deadline, connecting included. That holds when the server, the network
or a TLS handshake is frozen and when bytes trickle in one by one, and takes no other thread. `psycopg.Connection` has
no such deadline, its connect counts whole seconds per host, and on Ctrl-C it cancels the query; a cancelled wait for a
synchronous standby is reported as success, so leaselib never cancels: a connection whose deadline passed is closed,
and what became of its statement isn't known.

A Connection is used by one thread at a time; the pool sees to that. There is no lock.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Sequence

import psycopg
from psycopg import pq

from leaselib import _clock
from leaselib.stores._postgres_errors import Failure, connect_sqlstate
from leaselib.stores._postgres_rows import Row

LONGEST_S = 1_000_000.0
"""A time-out beyond this is as good as none, and more than poll() and the server's timers can count."""
_READ, _WRITE = 1, 2
_GOOD = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK, pq.ExecStatus.EMPTY_QUERY)

_inherited: list[object] = []
"""Connections of a parent process: kept for ever, so that nothing ever finalizes them here."""


class Deadline:
    """The one moment at which everything that belongs to an operation has to end."""

    __slots__ = ("_end_ns", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds = min(seconds, LONGEST_S)
        self._end_ns = _clock.SYSTEM.boot_ns() + int(seconds * 1e9)

    def left(self) -> float:
        """Seconds until then; 0 or less once it has passed."""
        return (self._end_ns - _clock.SYSTEM.boot_ns()) / 1e9

    def share(self, of: int, longest: float | None = None) -> Deadline:
        """An earlier deadline: an equal share of what is left, for one of so many attempts."""
        part = max(0.0, self.left() / of)
        return Deadline(part if longest is None else min(part, longest))


if sys.platform == "win32":

    def _wait(fd: int, for_what: int, seconds: float) -> int:
        """Waits until the socket can be read or written; 0 if it can't within that time."""
        readable, writable, broken = select.select(
            [fd] if for_what & _READ else [], [fd] if for_what & _WRITE else [], [fd], max(0.0, seconds)
        )
        return (_READ if readable or broken else 0) | (_WRITE if writable or broken else 0)

else:

    def _wait(fd: int, for_what: int, seconds: float) -> int:
        """Waits until the socket can be read or written; 0 if it can't within that time."""
        poll = select.poll()
        poll.register(fd, (select.POLLIN if for_what & _READ else 0) | (select.POLLOUT if for_what & _WRITE else 0))
        found = poll.poll(max(0.0, seconds * 1000))
        if not found:
            return 0
        events = found[0][1]
        failed = events & ~(select.POLLIN | select.POLLOUT)  # libpq finds out what it was
        return (_READ if failed or events & select.POLLIN else 0) | (_WRITE if failed or events & select.POLLOUT else 0)


class Connection:
    """One session of the server, in autocommit: each statement is a transaction of its own."""

    def __init__(self, conninfo: bytes) -> None:
        """Begins to connect, to one host only, so that libpq has nothing to choose from; `connect` has to follow."""
        self._pgconn = pq.PGconn.connect_start(conninfo)
        self._warnings: list[bytes] = []
        self.broken = False

    def connect(self, deadline: Deadline) -> None:
        """Connects.

        Raises:
            Failure: it didn't come about; what is left can only be closed.
        """
        pgconn = self._pgconn
        while pgconn.status != pq.ConnStatus.BAD:
            state = pgconn.connect_poll()
            if state == pq.PollingStatus.OK:
                pgconn.nonblocking = 1
                pgconn.notice_handler = _noting(self._warnings)
                return
            if state == pq.PollingStatus.FAILED:
                break
            if not _wait(pgconn.socket, _READ if state == pq.PollingStatus.READING else _WRITE, deadline.left()):
                raise Failure(f"no connection within {deadline.seconds:.3g} s")
        message = _text(pgconn.error_message)
        raise Failure(message or "no connection", "28P01" if pgconn.needs_password else connect_sqlstate(message))

    def usable(self) -> bool:
        """Whether an idle connection still seems good, without a round trip.

        A server that ends a session says so and hangs up: then there is something to read, though nothing was asked.
        """
        return not self.broken and not _wait(self._pgconn.socket, _READ, 0.0)

    def execute(self, sql: bytes, params: Sequence[bytes | None], deadline: Deadline) -> list[Row]:
        """Sends one statement with its parameters, all in one round trip, and returns its rows as text.

        Raises:
            Failure: it failed, or its outcome isn't known.
        """
        return self._exchange(lambda: self._pgconn.send_query_params(sql, params), deadline)

    def script(self, sql: bytes, deadline: Deadline) -> list[Row]:
        """Sends statements without parameters, in one round trip and one transaction; returns the last one's rows.

        Raises:
            Failure: one failed and nothing was done, or the outcome isn't known.
        """
        return self._exchange(lambda: self._pgconn.send_query(sql), deadline)

    def _exchange(self, send: Callable[[], None], deadline: Deadline) -> list[Row]:
        self.broken = True  # until the whole answer is here
        self._warnings.clear()
        try:
            send()
            results = self._answer(deadline)
        except psycopg.Error as error:
            raise Failure(f"connection lost: {_words(str(error))}", unknown=True) from error
        for result in results:
            if result.status == pq.ExecStatus.FATAL_ERROR:
                self.broken = self._pgconn.status != pq.ConnStatus.OK
                raise _failure(result, broken=self.broken)
            if result.status not in _GOOD:
                raise Failure(f"unexpected answer of kind {result.status}", unknown=True)
        if b"SyncRepWaitForLSN" in self._warnings:
            # Somebody cancelled the wait: the commit is here, but a standby may not have it. That is no success.
            raise Failure("the wait for the synchronous standby was cancelled", unknown=True)
        if self._pgconn.transaction_status != pq.TransactionStatus.IDLE:
            raise Failure("the server left a transaction open", unknown=True)
        self.broken = False
        last = results[-1]
        columns = range(last.nfields)
        return [[last.get_value(row, column) for column in columns] for row in range(last.ntuples)]

    def _answer(self, deadline: Deadline) -> list[pq.abc.PGresult]:
        pgconn, fd = self._pgconn, self._pgconn.socket
        while pgconn.flush():
            ready = self._ready(fd, _READ | _WRITE, deadline)
            if ready & _READ:
                pgconn.consume_input()
        results: list[pq.abc.PGresult] = []
        while True:
            while pgconn.is_busy():
                self._ready(fd, _READ, deadline)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                return results
            results.append(result)
            if result.status not in _GOOD and result.status != pq.ExecStatus.FATAL_ERROR:
                return results

    def _ready(self, fd: int, for_what: int, deadline: Deadline) -> int:
        ready = _wait(fd, for_what, deadline.left())
        if not ready:
            raise Failure(f"no answer within {deadline.seconds:.3g} s", unknown=True)
        return ready

    def close(self) -> None:
        """Says goodbye and closes the socket; waits for nothing. Not for the child of a fork."""
        self.broken = True
        self._pgconn.finish()

    def forget(self) -> None:
        """For the child of a fork: lets go of its copy of the socket, unnoticed by the server and by the parent.

        The descriptor's number stays taken, so that nothing else can get hold of it while libpq knows it.
        """
        _inherited.append(self._pgconn)
        try:
            fd = self._pgconn.socket
            null = os.open(os.devnull, os.O_RDWR)
        except (psycopg.Error, OSError):
            return
        try:
            os.dup2(null, fd, inheritable=False)
        finally:
            os.close(null)


def _noting(warnings: list[bytes]) -> Callable[[pq.abc.PGresult], None]:
    """Notes which function of the server warned. Refers to the list alone: to the connection, it would be a cycle."""
    return lambda notice: warnings.append(_field(notice, "SOURCE_FUNCTION"))


def _field(result: pq.abc.PGresult, name: str) -> bytes:
    return result.error_field(pq.DiagnosticField[name]) or b""


def _text(raw: bytes) -> str:
    return _words(raw.decode("utf-8", "replace"))


def _words(text: str) -> str:
    return " ".join(text.split())


def _failure(result: pq.abc.PGresult, *, broken: bool) -> Failure:
    """What the server said, with psycopg's own error as the cause."""
    sqlstate = _field(result, "SQLSTATE").decode("ascii", "replace") or None
    said = [_text(_field(result, name)) for name in ("MESSAGE_PRIMARY", "MESSAGE_DETAIL", "MESSAGE_HINT")]
    message = ". ".join(part for part in said if part) or _text(result.error_message)
    failure = Failure(message, sqlstate, broken=broken, unknown=broken)
    try:
        kind: type[psycopg.Error] = psycopg.errors.lookup(sqlstate or "")
    except KeyError:
        kind = psycopg.DatabaseError
    failure.__cause__ = kind(message)
    return failure
