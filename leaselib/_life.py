"""Fork and exit: tells everything that must not be shared with a child process to start afresh there, and what must be
done before the interpreter ends.

Owns a weak set of what is tracked (schedulers and stores) and the process's registrations with the interpreter. `track`
may be called from any thread; the hook runs in the child's only thread. No lock: one could itself be held at the moment
of a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

_log = logging.getLogger("leaselib.life")


class Forkable(Protocol):
    """Something that has to start afresh in the child of a fork."""

    def _after_fork(self) -> None: ...


_tracked: weakref.WeakSet[Any] = weakref.WeakSet()
_registered: list[int] = []  # the process in which the hooks were last looked at
_forked_in: list[int] = [os.getpid()]  # the process that the tracked things believe to be in


def track(thing: Forkable) -> None:
    """Has `thing._after_fork()` called in every child process that is forked while `thing` exists."""
    _tracked.add(thing)
    if not _registered:
        _registered.append(os.getpid())
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=after_fork)
        _chain_uwsgi()


def after_fork() -> None:
    """Runs in the child. Stores first: schedulers start afresh on them."""
    if _forked_in[0] == os.getpid():
        return  # both hooks of a server may call this
    _forked_in[0] = os.getpid()
    for thing in sorted(_tracked, key=lambda thing: hasattr(thing, "start")):
        thing._after_fork()


def at_exit(stop: Callable[[], object]) -> None:
    """Has `stop()` called before the interpreter ends, in this process; what was registered earlier runs after it.

    A child that multiprocessing forked ends without atexit, but runs its own finalizers.
    """
    atexit.unregister(stop)
    atexit.register(stop)
    util = sys.modules.get("multiprocessing.util")
    parent = sys.modules.get("multiprocessing.process")
    if util is not None and parent is not None and parent.parent_process() is not None:
        util.Finalize(None, stop, exitpriority=100)


def leave_child(status: int, trace: str | None) -> NoReturn:
    """Ends a child process that a handler forked, and whose only inherited thread came back from that handler.

    Without leaselib such a process ends by itself, having no thread left; here a scheduler that started afresh would
    keep it alive for ever. The exit status is the one that `sys.exit` was called with, 0 after a return, else 1.
    """
    if status == 1:
        _log.error("a child process that a handler forked ended with an exception:\n%s", trace)
    for thing in list(_tracked):
        if hasattr(thing, "stop"):
            thing.stop()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or None
            stream.flush()
    os._exit(status & 0xFF)


def _chain_uwsgi() -> None:
    """uWSGI forks its workers without calling the interpreter's hooks, but calls one of its own."""
    uwsgi = sys.modules.get("uwsgi")
    if uwsgi is None:
        return
    before = getattr(uwsgi, "post_fork_hook", None)

    def hook() -> None:
        if before is not None:
            before()
        after_fork()

    vars(uwsgi)["post_fork_hook"] = hook
    options = getattr(uwsgi, "opt", {})
    if not any(key in options for key in ("enable-threads", b"enable-threads", "threads", b"threads")):
        _log.warning("uWSGI runs without threads: leaselib's jobs need the option enable-threads")
