"""What every test has: the choice of stores, and a check that it leaves no thread and no process behind.

Runs in the main thread. Owns nothing; the registry of stores is in `fix_stores`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import fix_stores
import pytest
from fix_stores import clock, store, sut  # noqa: F401  fixtures live in the conftest that names them

# Most test folders are no packages; the reference of this one is used by the tests of `history` as well.
sys.path.insert(0, str(Path(__file__).parent / "model"))

LEAK_TIMEOUT_S = 5.0
"""So long may a thread that was told to stop take to end."""


def pytest_configure() -> None:
    """Signals mean what they usually mean, also to the child processes of tests.

    A shell starts what it runs in the background with SIGINT ignored, nohup with SIGHUP, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hang_up = getattr(signal, "SIGHUP", None)
    if hang_up is not None and signal.getsignal(hang_up) is signal.SIG_IGN:
        signal.signal(hang_up, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """--stores: which registered stores the contract and model tests run on. --effort: how long random tests search."""
    parser.addoption("--stores", help=f"comma-separated stores to test, of: {', '.join(fix_stores.STORES)}")
    parser.addoption(
        "--effort", type=int, default=1, help="so many times more random examples; above 1 they differ from run to run"
    )


def pytest_report_header(config: pytest.Config) -> str:
    """Names the stores that this session tests, and why others are left out."""
    chosen = fix_stores.chosen_stores(config.getoption("--stores"))
    left_out = {name: kind.missing() or "not chosen" for name, kind in fix_stores.STORES.items() if name not in chosen}
    notes = "".join(f"; without {name} ({why})" for name, why in left_out.items())
    return f"leaselib stores: {', '.join(chosen)}{notes}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that uses a store runs once on each chosen one."""
    if "store_name" not in metafunc.fixturenames:
        return
    chosen = fix_stores.chosen_stores(metafunc.config.getoption("--stores"))
    names = [name for name in chosen if fix_stores.STORES[name].runs(metafunc.definition.path)]
    params = [pytest.param(name, marks=pytest.mark.system if fix_stores.STORES[name].server else ()) for name in names]
    metafunc.parametrize("store_name", params)


def pytest_unconfigure() -> None:
    """Stops the servers that lived for the whole session."""
    fix_stores.at_session_end.close()


@pytest.fixture
def effort(pytestconfig: pytest.Config) -> int:
    """How many times more random examples than in a quick run."""
    return int(pytestconfig.getoption("--effort"))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves a `leaselib*` thread or a child process behind.

    Set up before every other fixture, so it looks once they are all torn down.
    """
    threads_before, children_before = set(threading.enumerate()), _children()
    yield
    started = [t for t in threading.enumerate() if t.name.startswith("leaselib") and t not in threads_before]
    deadline = time.monotonic() + LEAK_TIMEOUT_S
    for thread in started:
        thread.join(max(0.0, deadline - time.monotonic()))
    left = sorted(t.name for t in started if t.is_alive())
    assert not left, f"the test left threads running: {left}. Stop the scheduler or store that started them"
    children = _children() - children_before - fix_stores.kept_processes()
    assert not children, (
        f"the test left child processes {sorted(children)}. End and wait for them, or call fix_stores.keep_process"
    )


def _children() -> set[int]:
    """The process ids of this process's children, where the system can tell; those that ended unwaited-for too."""
    multiprocessing.active_children()  # waits for those that have ended
    found: set[int] = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(int(pid) for pid in listing.read_text().split())
        except FileNotFoundError:  # that thread has just ended
            continue
    helpers = (
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(forkserver._forkserver, "_forkserver_pid", None),
    )
    return found - {pid for pid in helpers if pid is not None} - {os.getpid()}
