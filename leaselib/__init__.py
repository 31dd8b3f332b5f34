"""leaselib: scheduled jobs for programs that are not async, each run exactly one instance's, by leases in a store.

    from leaselib import Scheduler

    scheduler = Scheduler("sqlite:///jobs.db").start()

    @scheduler.every(minutes=5)
    def sync(ctx):
        ...

However many instances of the program run, each due run of a job is started by exactly one of them; if that one dies,
freezes or is stopped, another takes over within a bounded time. See the README for the rules.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from leaselib._model import Attempt, ClaimAnswer, Run
from leaselib.context import RunContext
from leaselib.errors import Aborted, ConfigurationError, LeaselibError, StoreError
from leaselib.events import Event
from leaselib.scheduler import Health, Job, Scheduler
from leaselib.schedules import Cron, Every, Schedule
from leaselib.stores import MemoryStore, SQLiteStore, Store, open_store

if TYPE_CHECKING:
    from leaselib.stores._postgres import PostgresStore
    from leaselib.stores._redis import RedisStore

__all__ = [
    "Aborted",
    "Attempt",
    "ClaimAnswer",
    "ConfigurationError",
    "Cron",
    "Event",
    "Every",
    "Health",
    "Job",
    "LeaselibError",
    "MemoryStore",
    "PostgresStore",
    "RedisStore",
    "Run",
    "RunContext",
    "SQLiteStore",
    "Schedule",
    "Scheduler",
    "Store",
    "StoreError",
    "open_store",
]
__version__ = "0.1.0"

# A library prints nothing: without this, Python itself prints warnings of a program that set up no logging.
logging.getLogger("leaselib").addHandler(logging.NullHandler())


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """RedisStore and PostgresStore are imported when they are first named, so that neither driver is needed."""
    if name == "RedisStore":
        from leaselib.stores._redis import RedisStore

        return RedisStore
    if name == "PostgresStore":
        from leaselib.stores._postgres import PostgresStore

        return PostgresStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
