"""The connections of one SQLiteStore: a small pool, the queue of its writers, and what a fork does to both.

Any thread may call. `Connections` owns the idle connections and guards them by one condition, `_changed`; a connection
that was taken belongs to the thread that took it. `Turn` owns the order of the writers and guards it by one lock.
Nobody holds either while SQLite works. The module owns the set of all pools, guarded by `_registry`.

SQLite keeps, in each process, a table of the locks that the process holds on a file, and asks the system only for what
the table lacks. The child of a fork inherits the table but not the locks. An inherited write lock is never given back
there, and behind inherited read locks other processes take the child's -wal away; both were seen. So before a fork the
pools wait until no connection is in use, and close the idle ones: nothing is inherited, and parent and child open anew.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from collections import deque
from collections.abc import Callable

from leaselib.errors import StoreError
from leaselib.stores._sqlite_errors import keeps_connection
from leaselib.stores._sqlite_open import Connection

MAX_IDLE = 4
"""More connections than this are opened when they are needed, and closed after use."""
FORK_WAIT_S = 5.0
"""So long may the transactions under way delay a fork."""


class Turn:
    """A lock that goes to whoever waits longest.

    SQLite lets one writer in at a time, so the writers of a process queue here rather than at the file, and none of
    them overtakes the others again and again, as it could with threading.Lock. The inner lock may be taken again by
    its own thread, as a signal handler would.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self, timeout: float) -> bool:
        """Waits for its turn, `timeout` seconds at most. Returns whether it came."""
        with self._lock:
            if not self._held:
                self._held = True
                return True
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            if mine.acquire(timeout=min(max(timeout, 0), threading.TIMEOUT_MAX)):
                return True
        except BaseException:  # a signal handler raised
            if not self._leave(mine):
                self.release()
            raise
        return not self._leave(mine)

    def _leave(self, mine: threading.Lock) -> bool:
        """Stops waiting. Returns False if the turn came in the last moment."""
        with self._lock:
            if mine not in self._waiting:
                return False
            self._waiting.remove(mine)
            return True

    def release(self) -> None:
        """Hands the turn on."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False


class Connections:
    """Connections to one file, each used by one thread at a time; the last one given back is taken first.

    Args:
        open_one: opens a connection.
        spoiled: locks that can't be told from real ones were inherited, so nothing may be opened.
    """

    def __init__(self, open_one: Callable[[], Connection], spoiled: bool = False) -> None:
        self.pid = os.getpid()
        self.turn = Turn()
        self._open_one = open_one
        self._spoiled = spoiled
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._idle: list[Connection] = []
        self._out = 0
        self._held = False
        self._generation = 0
        _register(self)

    def __del__(self) -> None:
        """A store that nobody closed leaves no open connections behind, nor warnings about them."""
        if self.pid == os.getpid():
            for connection in self._idle:
                connection.raw.close()

    def in_child(self) -> Connections:
        """The pool of a forked child, in place of this one, which was its parent's.

        If nobody announced the fork (uWSGI doesn't), idle connections were inherited: they are forgotten, but never
        closed, which SQLite forbids. If one was in use, its lock may seem to be held here for ever.
        """
        if self._idle or self._out:
            _inherited.append(self)
        return Connections(self._open_one, self._spoiled or self._out > 0)

    def take(self) -> Connection:
        """An idle connection, or a new one.

        Raises:
            StoreError, sqlite3.Error: it could not be opened.
        """
        if self._spoiled:
            raise StoreError(
                "this process was forked while another thread was in the middle of a transaction of its SQLite store, "
                "without time for it to end, so the file can't be used safely here. Restart this process; make the "
                "store after the fork (uWSGI: lazy-apps, or --py-call-osafterfork)"
            )
        with self._lock:
            while self._held:  # a fork is under way
                self._changed.wait()
            self._out += 1
            generation = self._generation
            if self._idle:
                return self._idle.pop()
        try:
            connection = self._open_one()
        except BaseException:
            self._returned()
            raise
        connection.generation = generation
        return connection

    def give(self, connection: Connection, error: BaseException | None = None) -> None:
        """Takes a connection back; `error` is what ended its use, if not success.

        An open transaction is rolled back. After an error that may be the connection's own, all are opened anew.
        """
        raw = connection.raw
        if error is None:
            with self._lock:
                if connection.generation == self._generation and len(self._idle) < MAX_IDLE and not self._held:
                    self._idle.append(connection)
                    self._out -= 1
                    return
        try:
            keep = error is None or keeps_connection(error)
            if keep and raw.in_transaction:
                keep = _rolled_back(raw)
            if not keep:
                self.renew()
            with self._changed:
                keep = keep and connection.generation == self._generation and len(self._idle) < MAX_IDLE
                if keep:
                    self._idle.append(connection)
            if not keep:
                raw.close()
        finally:
            self._returned()

    def renew(self) -> None:
        """Closes the idle connections now and those in use when they are given back; later ones are opened anew."""
        with self._changed:
            self._generation += 1
            closing, self._idle = self._idle, []
            self._out += len(closing)
        for connection in closing:
            try:
                connection.raw.close()
            finally:
                self._returned()

    def hold(self) -> None:
        """Before a fork: waits until no connection is in use, and closes the idle ones."""
        with self._changed:
            self._held = True
            self._changed.wait_for(lambda: not self._out, FORK_WAIT_S)
            for connection in self._idle:
                connection.raw.close()
            self._idle.clear()

    def resume(self) -> None:
        """After the fork, in the parent: goes on."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def _returned(self) -> None:
        with self._changed:
            self._out -= 1
            if self._held:
                self._changed.notify_all()


def _rolled_back(raw: sqlite3.Connection) -> bool:
    try:
        raw.execute("ROLLBACK")
    except sqlite3.Error:
        return False
    return True


_inherited: list[Connections] = []
_pools: weakref.WeakSet[Connections] = weakref.WeakSet()
_registry = threading.RLock()  # taken again by the forking thread, when hooks of the child make new pools
_hooked: list[bool] = []


def _register(connections: Connections) -> None:
    with _registry:
        _pools.add(connections)
        if not _hooked and hasattr(os, "register_at_fork"):
            _hooked.append(True)
            os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


def _before() -> None:
    _registry.acquire()
    for pool in list(_pools):
        pool.hold()


def _after_in_parent() -> None:
    for pool in list(_pools):
        pool.resume()
    _registry.release()


def _after_in_child() -> None:
    for pool in list(_pools):
        if pool.pid != os.getpid():
            _pools.discard(pool)
    _registry.release()
