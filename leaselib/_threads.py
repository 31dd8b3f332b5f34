"""Threads: the one place that makes them and the one that joins them.

Every thread is a daemon with a name, so that interpreter exit reaches the atexit stop while handlers still run. All of
an instance's threads are made when it starts: from the moment the main thread has ended, some Pythons refuse new ones,
though the process lives on. The threads of one instance, what they wait for, and the lock they share:

| thread | how many | waits for | does |
| --- | --- | --- | --- |
| scheduler | 1 | the instance's condition, until something is due | lets the planner decide; never calls the store |
| worker-N | max_workers | its instance's queue of claims | sends a claim; if won, runs the handler and its finish |
| beat-N | max_workers | a queue of its own | sends the heartbeats of worker-N's run once it outlived one interval |
| store | 1 | a queue | pings, loads, releases of claims that were given up |
| events | 1 | a queue | calls listeners and writes log records |

One lock, the instance's, guards the planner, its attempts and the table of executions. Nobody holds it while calling
the store, a handler or a listener, and nobody takes another lock of leaselib's while holding it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from leaselib import _clock

_log = logging.getLogger("leaselib.threads")


def spawn(name: str, target: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread named `leaselib-<name>`.

    Raises:
        RuntimeError: the system or the interpreter allows no more threads.
    """
    thread = threading.Thread(target=target, name=f"leaselib-{name}", daemon=True)
    thread.start()
    return thread


def join(threads: Iterable[threading.Thread], timeout_ms: int) -> list[threading.Thread]:
    """Joins all of these but the current one, within one total time. Returns those that go on, and logs their names."""
    end_ms = _clock.SYSTEM.boot_ms() + timeout_ms
    alive = []
    for thread in threads:
        if thread is threading.current_thread():
            continue
        thread.join(max(0, end_ms - _clock.SYSTEM.boot_ms()) / 1000)
        if thread.is_alive():
            alive.append(thread)
    if alive:
        _log.debug("threads still alive after stop: %s", ", ".join(thread.name for thread in alive))
    return alive
