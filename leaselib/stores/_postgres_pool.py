"""The pool of a PostgresStore: connections on demand, last in first out, and nothing that runs by itself.

One lock guards all that changes: the idle connections, the set of all open ones, how many patient operations are under
way, which host worked last, and whether the server is full. It is never held while the network is waited for. Any
thread may call anything. After a fork the child makes a new pool and only calls `forget` on the old one.

Two kinds of operations share it. Patient ones (claims, reads) wait until fewer than `limit` of their kind are under
way. Urgent ones (heartbeat, finish, release) never wait for a connection: if none is idle they open one, so that there
are at most `limit` plus as many as there are urgent calls at once. At most `limit` idle ones are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from leaselib import _clock
from leaselib.stores._lookup import Names
from leaselib.stores._postgres_connection import Connection, Deadline
from leaselib.stores._postgres_errors import STALE, Failure, transient
from leaselib.stores._postgres_url import Address, Target

FULL_PAUSE_S = 1.0
"""A server that has said that it has no connection left is asked again by one caller at most in this time."""


class Pool:
    """The open connections to one address.

    Args:
        address: where to connect to.
        limit: so many patient operations may be under way at once.
    """

    def __init__(self, address: Address, limit: int = 8) -> None:
        self._address = address
        self._limit = limit
        self._changed = threading.Condition()
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._patient = 0
        self._generation = 0
        self._first = 0  # the target that worked last
        self._names = Names()
        self._full: tuple[int, Failure] | None = None  # until when (boot clock, ns) not to connect, and why

    @contextmanager
    def connection(self, deadline: Deadline, *, urgent: bool) -> Iterator[Connection]:
        """A connection for one operation. It goes back to the pool unless it is broken by then.

        Raises:
            Failure: there is none: no answer, a refusal, or none became free until the deadline.
        """
        if not urgent:
            self._begin_patient(deadline)
        try:
            connection, generation = self._take(deadline)
            try:
                yield connection
            except Failure as failure:
                if failure.broken or failure.sqlstate in STALE:
                    connection.broken = True
                    self.flush()
                raise
            finally:  # whatever else ended the operation in mid-exchange, the connection knows that it is broken
                self._give_back(connection, generation)
        finally:
            if not urgent:
                with self._changed:
                    self._patient -= 1
                    self._changed.notify()

    def _begin_patient(self, deadline: Deadline) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._patient < self._limit, max(0.0, deadline.left())):
                raise Failure(f"none of {self._limit} connections became free within {deadline.seconds:.3g} s")
            self._patient += 1

    def _take(self, deadline: Deadline) -> tuple[Connection, int]:
        while True:
            with self._changed:
                generation = self._generation
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect(deadline), generation
            if connection.usable():
                return connection, generation
            self._drop(connection)

    def _give_back(self, connection: Connection, generation: int) -> None:
        with self._changed:
            keep = not connection.broken and generation == self._generation and len(self._idle) < self._limit
            if keep:
                self._idle.append(connection)
        if not keep:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        with self._changed:
            self._open.discard(connection)
        connection.close()

    def flush(self) -> None:
        """Closes every idle connection; those in use when they come back. What was lost once may be lost for all."""
        with self._changed:
            self._generation += 1
            idle, self._idle = self._idle, []
            self._open.difference_update(idle)
        for connection in idle:
            connection.close()

    def forget(self) -> None:
        """In the child of a fork, of the parent's pool: takes no lock, which another thread may have held."""
        for connection in tuple(self._open):
            connection.forget()

    # ---- connecting ----------------------------------------------------------------------------------------------

    def _connect(self, deadline: Deadline) -> Connection:
        self._heed_full()
        targets = self._address.targets
        with self._changed:
            first = self._first
        order = [(first + step) % len(targets) for step in range(len(targets))]
        failures: list[Failure] = []
        for tried, index in enumerate(order):
            try:
                connection = self._connect_to(targets[index], deadline.share(len(order) - tried))
            except Failure as error:
                failures.append(error)
            else:
                with self._changed:
                    self._first, self._full = index, None
                return connection
        worst = next((f for f in failures if transient(f.sqlstate)), failures[0])
        failure = Failure("; ".join(dict.fromkeys(map(str, failures))), worst.sqlstate)
        if failure.sqlstate == "53300":
            with self._changed:
                self._full = (_full_until_ns(), failure)
        raise failure

    def _heed_full(self) -> None:
        """Refuses at once while a full server isn't to be asked; whoever may ask makes the others wait meanwhile."""
        with self._changed:
            if self._full is None:
                return
            until_ns, failure = self._full
            if _clock.SYSTEM.boot_ns() < until_ns:
                raise Failure(f"{failure} (asked less than {FULL_PAUSE_S:g} s ago)", failure.sqlstate)
            self._full = (_full_until_ns(), failure)

    def _connect_to(self, target: Target, deadline: Deadline) -> Connection:
        """Tries one host, each of its addresses for an equal share of the time."""
        addresses: list[str | None] = [None]
        if target.host is not None:
            addresses = [*self._look_up(target.host, deadline)]
        for tried, address in enumerate(addresses):
            share = deadline.share(len(addresses) - tried, self._address.connect_timeout)
            try:
                return self._open_one(target.conninfo(address), share)
            except Failure:
                if tried == len(addresses) - 1:
                    raise
        raise AssertionError("a host has at least one address")

    def _look_up(self, host: str, deadline: Deadline) -> list[str]:
        try:
            found = self._names.find(host, None, deadline.left())
        except TimeoutError:
            raise Failure(f"the name {host!r} was not looked up within {deadline.seconds:.3g} s") from None
        except OSError as error:
            raise Failure(str(error)) from error.__cause__
        return list(dict.fromkeys(str(place[4][0]) for place in found))

    def _open_one(self, conninfo: bytes, deadline: Deadline) -> Connection:
        connection = Connection(conninfo)
        with self._changed:
            self._open.add(connection)  # before it is made, so that the child of a fork finds it
        try:
            connection.connect(deadline)
        except BaseException:
            self._drop(connection)
            raise
        return connection


def _full_until_ns() -> int:
    """Until when a server that is full now is not asked again, on the boot clock."""
    return _clock.SYSTEM.boot_ns() + int(FULL_PAUSE_S * 1e9)
