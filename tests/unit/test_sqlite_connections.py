"""The pool of connections and the queue of writers: who gets what, in which order, and what is left open."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from leaselib.errors import StoreError
from leaselib.stores._sqlite_connections import MAX_IDLE, Connections, Turn
from leaselib.stores._sqlite_open import Connection


class Waiter(threading.Thread):
    """A thread that asks for the turn and tells when it got it."""

    def __init__(self, turn: Turn, order: list[int], number: int) -> None:
        super().__init__(daemon=True)
        self._turn, self._order, self._number = turn, order, number
        queued = len(turn._waiting)
        self.start()
        while len(turn._waiting) == queued:
            threading.Event().wait(0.001)

    def run(self) -> None:
        assert self._turn.acquire(10)
        self._order.append(self._number)
        self._turn.release()


def test_the_turn_comes_in_the_order_of_asking() -> None:
    turn, order = Turn(), list[int]()
    assert turn.acquire(0)
    waiters = [Waiter(turn, order, number) for number in range(8)]
    turn.release()
    for waiter in waiters:
        waiter.join(10)
    assert order == list(range(8))
    assert turn.acquire(0)


def test_one_who_gives_the_turn_back_and_asks_again_is_last() -> None:
    turn, order = Turn(), list[int]()
    assert turn.acquire(0)
    waiter = Waiter(turn, order, 1)
    turn.release()
    assert turn.acquire(10)
    assert order == [1]
    turn.release()
    waiter.join(10)


@pytest.mark.parametrize("timeout", [0, -5, 0.02])
def test_one_whose_time_is_up_leaves_the_queue(timeout: float) -> None:
    turn = Turn()
    assert turn.acquire(timeout)
    assert not turn.acquire(timeout)
    turn.release()
    assert turn.acquire(timeout)


def test_a_wait_without_end_is_no_error() -> None:
    turn, order = Turn(), list[int]()
    assert turn.acquire(float("inf"))
    waiter = Waiter(turn, order, 1)
    turn.release()
    waiter.join(10)
    assert turn.acquire(float("inf"))


@pytest.mark.parametrize("came", [False, True])
def test_a_signal_that_interrupts_the_wait_loses_no_turn(monkeypatch: pytest.MonkeyPatch, came: bool) -> None:
    """Whether the turn came in the same moment or not."""
    turn = Turn()
    assert turn.acquire(0)

    class Interrupted:
        def acquire(self, *_: object, timeout: float | None = None) -> bool:
            if timeout is not None:
                if came:
                    turn.release()
                raise KeyboardInterrupt
            return True

        def release(self) -> None:
            pass

    with monkeypatch.context() as patched:
        patched.setattr(threading, "Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            turn.acquire(5)
    if not came:
        turn.release()
    assert not turn._waiting
    assert turn.acquire(0)


class Opener:
    """Opens connections to a file and remembers them."""

    def __init__(self, path: Path) -> None:
        self.path, self.opened = path, list[Connection]()
        self.fault: Exception | None = None

    def __call__(self) -> Connection:
        if self.fault is not None:
            raise self.fault
        raw = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        self.opened.append(Connection(raw, (0, 0), {}, ()))
        return self.opened[-1]

    def open_now(self) -> int:
        """How many of them are open."""
        return sum(is_open(connection) for connection in self.opened)


def is_open(connection: Connection) -> bool:
    """Whether a connection is open."""
    try:
        connection.raw.execute("SELECT 1").fetchall()
    except sqlite3.ProgrammingError:
        return False
    return True


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    """Opens connections to one file; closes them in the end."""
    opener = Opener(tmp_path / "x.db")
    yield opener
    for connection in opener.opened:
        connection.raw.close()


def test_the_connection_that_came_back_last_is_taken_first(opener: Opener) -> None:
    pool = Connections(opener)
    first, second = pool.take(), pool.take()
    pool.give(first)
    pool.give(second)
    assert pool.take() is second
    assert pool.take() is first


def test_no_more_than_a_few_connections_stay_open(opener: Opener) -> None:
    pool = Connections(opener)
    for connection in [pool.take() for _ in range(MAX_IDLE + 3)]:
        pool.give(connection)
    assert opener.open_now() == MAX_IDLE
    pool.renew()
    assert opener.open_now() == 0


def test_a_connection_in_use_is_closed_when_it_comes_back_after_the_pool_was_closed(opener: Opener) -> None:
    pool = Connections(opener)
    taken = pool.take()
    pool.renew()
    assert is_open(taken)
    pool.give(taken)
    assert not is_open(taken)
    assert pool.take() is not taken


def test_an_open_transaction_is_rolled_back_before_the_connection_is_used_again(opener: Opener) -> None:
    pool = Connections(opener)
    taken = pool.take()
    taken.raw.execute("BEGIN IMMEDIATE")
    taken.raw.execute("CREATE TABLE t (x)")
    pool.give(taken, ValueError())
    assert pool.take() is taken
    assert not taken.raw.in_transaction
    assert taken.raw.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


def test_after_an_error_of_the_file_all_connections_are_opened_anew(opener: Opener) -> None:
    pool = Connections(opener)
    first, second = pool.take(), pool.take()
    pool.give(first)
    pool.give(second, sqlite3.OperationalError("disk I/O error"))
    assert opener.open_now() == 0


def test_a_connection_that_can_not_roll_back_is_closed(opener: Opener) -> None:
    pool = Connections(opener)
    taken = pool.take()

    class Stuck:
        in_transaction = True

        def execute(self, _: str) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        def close(self) -> None:
            opener.opened[0].raw.close()

    pool.give(Connection(Stuck(), (0, 0), {}, ()), StoreError("malformed"))  # type: ignore[arg-type]
    assert not is_open(taken)


def test_a_failure_to_open_counts_as_nothing_in_use(opener: Opener) -> None:
    pool = Connections(opener)
    opener.fault = StoreError("no")
    with pytest.raises(StoreError):
        pool.take()
    assert pool._out == 0


def test_before_a_fork_the_pool_waits_for_those_in_use_and_closes_them_all(opener: Opener) -> None:
    """And whoever asks meanwhile waits until the fork is over."""
    pool = Connections(opener)
    pool.give(pool.take())
    taken = pool.take()
    with ThreadPoolExecutor() as executor:
        held = executor.submit(pool.hold)
        assert wait([held], timeout=0.05).not_done
        late = executor.submit(pool.take)
        pool.give(taken)
        held.result(5)
        assert opener.open_now() == 0
        assert wait([late], timeout=0.05).not_done
        pool.resume()
        assert is_open(late.result(5))


def test_a_child_that_inherited_a_connection_in_use_opens_nothing(opener: Opener) -> None:
    pool = Connections(opener)
    connection = pool.take()
    with pytest.raises(StoreError, match="Restart this process") as caught:
        pool.in_child().take()
    assert not caught.value.transient
    with pytest.raises(StoreError, match="Restart this process"):
        pool.in_child().in_child().take()
    pool.give(connection)


def test_a_child_never_closes_the_idle_connections_that_it_inherited(opener: Opener) -> None:
    pool = Connections(opener)
    inherited = pool.take()
    pool.give(inherited)
    child = pool.in_child()
    assert child.pid == os.getpid()
    assert child.take() is not inherited
    del pool
    assert is_open(inherited)
