"""The stores that tests run against: one registry, one fixture. Runs in the main thread; guards nothing.

To put a store under the whole contract and model suite, add one line to `STORES` below: a name, and a factory that
takes a folder of its own and is a context manager around a `StoreUnderTest`. Import the driver inside the factory.

Tests that ask for `sut` (or `store`, or `clock`) run once for each store that was chosen with `--stores`. They move
time only through `StoreClock`, never by sleeping: it may be a plain object (memory, SQLite) or a shim that shifts a
real server's time of day. On a server time also passes by itself, so a test compares with the `now` of an answer, or
with two readings around the call, never with a number of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

import pytest

from leaselib._model import from_ms
from leaselib.stores._base import Store


class StoreClock(Protocol):
    """The clock that a store judges by, in the hands of a test."""

    def advance(self, seconds: float) -> None:
        """Time passes: every clock of the store's machine goes forward."""

    def step(self, seconds: float) -> None:
        """Somebody sets the time of day, forward or (below 0) back; no time passes."""

    def now(self) -> datetime:
        """What the store's clock shows."""


@dataclass(frozen=True)
class StoreUnderTest:
    """A store, its clock, and how to reach the same place again.

    connect: another client of the same place (file, server), with the namespace that it is given. Whatever it opens,
        the factory closes.
    """

    store: Store
    clock: StoreClock
    connect: Callable[[str], Store]


@dataclass(frozen=True)
class StoreKind:
    """A registered store.

    factory: takes an empty folder, is a context manager around a StoreUnderTest.
    missing: why this store can't run on this machine (no server program, no driver), or None if it can.
    server: tests on it carry the marker `system`.
    folder: only the tests of that folder run on it; all if it is empty.
    """

    factory: Callable[[Path], AbstractContextManager[StoreUnderTest]]
    missing: Callable[[], str | None] = lambda: None
    server: bool = False
    folder: str = ""

    def runs(self, test: Path) -> bool:
        """Whether the tests of that file run on it."""
        return not self.folder or self.folder in test.parts


class ManualClock:
    """A machine's two clocks (leaselib._clock.Clock) that stand still until a test moves them."""

    def __init__(self, wall_ms: int = 1_800_000_000_000) -> None:
        self._wall_ms = wall_ms
        self._boot_ms = 1_000_000

    def boot_ms(self) -> int:
        """See leaselib._clock.Clock."""
        return self._boot_ms

    def wall_ms(self) -> int:
        """See leaselib._clock.Clock."""
        return self._wall_ms

    def advance(self, seconds: float) -> None:
        """See StoreClock."""
        self._boot_ms += round(seconds * 1000)
        self._wall_ms += round(seconds * 1000)

    def step(self, seconds: float) -> None:
        """See StoreClock."""
        self._wall_ms += round(seconds * 1000)

    def now(self) -> datetime:
        """See StoreClock."""
        return from_ms(self._wall_ms)


@contextmanager
def memory(folder: Path) -> Iterator[StoreUnderTest]:
    """MemoryStore. A client of the same place can only be the same object: it keeps its own data."""
    from leaselib.stores._memory import MemoryStore

    clock = ManualClock()
    stores = {"default": MemoryStore(clock=clock)}

    def connect(namespace: str) -> Store:
        if namespace not in stores:
            stores[namespace] = MemoryStore(namespace, clock=clock)
        return stores[namespace]

    yield StoreUnderTest(stores["default"], clock, connect)


@contextmanager
def sqlite(folder: Path) -> Iterator[StoreUnderTest]:
    """SQLiteStore on a file in the folder."""
    from leaselib.stores._sqlite import SQLiteStore

    clock = ManualClock()
    with ExitStack() as opened:

        def connect(namespace: str) -> Store:
            store = SQLiteStore(str(folder / "leases.db"), namespace, clock=clock)
            opened.callback(store.close)
            return store

        yield StoreUnderTest(connect("default"), clock, connect)


@contextmanager
def postgres(folder: Path) -> Iterator[StoreUnderTest]:
    """PostgresStore in a schema of its own, on a server that lives for the session and whose clock can be moved."""
    from fix_servers_postgres import store_under_test

    with store_under_test() as under_test:
        yield under_test


def _on_redis(name: str, folder: str = "") -> StoreKind:
    """RedisStore on a server program of this machine: `redis` is the ladder's first, `redis-cluster` three of those."""

    def factory(folder: Path) -> AbstractContextManager[StoreUnderTest]:
        import fix_servers_redis

        return fix_servers_redis.under_test(name)

    def missing() -> str | None:
        import fix_servers_redis

        return fix_servers_redis.missing(name)

    return StoreKind(factory, missing, server=True, folder=folder)


STORES: dict[str, StoreKind] = {
    "memory": StoreKind(memory),
    "sqlite": StoreKind(sqlite),
    "redis": _on_redis("redis"),
    "valkey": _on_redis("valkey"),
    "redis-cluster": _on_redis("redis-cluster"),
    "redis-oldest": _on_redis("redis-oldest", "contract"),
    "redis-newest": _on_redis("redis-newest", "contract"),
    "postgres": StoreKind(postgres, server=True),
}
"""Every store that the suite knows. Register new ones here."""

at_session_end = ExitStack()
"""Closed after the last test: where a factory leaves a server that it starts once and uses for many tests."""

_kept: set[int] = set()


def keep_process(pid: int) -> None:
    """Tells the leak check that this child process lives until the session ends."""
    _kept.add(pid)


def kept_processes() -> frozenset[int]:
    """The children that may outlive a test."""
    return frozenset(_kept)


def found_stores() -> list[str]:
    """The registered stores that can run here."""
    return [name for name, kind in STORES.items() if kind.missing() is None]


def chosen_stores(option: str | None) -> list[str]:
    """What `--stores` asks for; all that can run here if it wasn't given.

    Raises:
        pytest.UsageError: one is unknown, or can't run here: asked for by name, it must not be left out silently.
    """
    if option is None:
        return found_stores()
    names = [name.strip() for name in option.split(",") if name.strip()]
    for name in names:
        if name not in STORES:
            raise pytest.UsageError(f"--stores: no store {name!r} is registered; choose from {', '.join(STORES)}")
        missing = STORES[name].missing()
        if missing is not None:
            raise pytest.UsageError(f"--stores: {name} can't run here: {missing}")
    return names


@pytest.fixture
def sut(store_name: str, tmp_path: Path) -> Iterator[StoreUnderTest]:
    """The store under test, its clock, and how to connect to it again."""
    with STORES[store_name].factory(tmp_path) as under_test:
        yield under_test


@pytest.fixture
def store(sut: StoreUnderTest) -> Store:
    """The store under test."""
    return sut.store


@pytest.fixture
def clock(sut: StoreUnderTest) -> StoreClock:
    """The clock that the store under test judges by."""
    return sut.clock
