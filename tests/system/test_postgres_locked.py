"""A transaction that holds one job's records: that job waits, the others and the instance's view of its store don't."""

from __future__ import annotations

from pathlib import Path

import fix_servers_postgres
import psycopg
import pytest
from fix_servers_postgres import Heard

from leaselib import Every, PostgresStore, RunContext, Scheduler

pytestmark = [pytest.mark.system, pytest.mark.timeout(90)]

EVERY_S = 0.5
SLOTS = 8
"""So many slots of the other job are looked at; they take longer than a claim's time-out."""


def nothing(ctx: RunContext) -> None:
    """A handler."""
    ctx.check()


def test_while_one_jobs_records_are_locked_the_other_jobs_slots_start_in_time(tmp_path: Path) -> None:
    """One event says so, the store doesn't count as lost, and the job goes on once the lock is gone."""
    heard = Heard()
    with fix_servers_postgres.place(tmp_path) as url:
        store = PostgresStore.from_url(url)
        store.create_schema()
        scheduler = Scheduler(store, lease=3, heartbeat=0.5, catch_up=0, jitter=0, max_late=30)
        for name in ("start", "store_error", "store_ok"):
            scheduler.on(name, heard.add)
        for job in ("free", "held"):
            scheduler.add(nothing, Every(seconds=EVERY_S), name=job)
        with scheduler, psycopg.connect(fix_servers_postgres.session_url()) as connection:
            heard.wait(lambda: bool(heard.starts("held")))
            connection.execute(f"SELECT FROM {store.schema}.jobs WHERE job = 'held' FOR UPDATE".encode())
            before, held_before = len(heard.starts("free")), len(heard.starts("held"))
            heard.wait(lambda: len(heard.starts("free")) >= before + SLOTS)
            heard.wait(lambda: any(event.name == "store_error" for event in heard.events))
            locked = heard.starts("free")[before:]
            assert len(heard.starts("held")) - held_before <= 1, "one that was decided before the lock"
            connection.rollback()
            held_now = len(heard.starts("held"))
            heard.wait(lambda: len(heard.starts("held")) > held_now)
            heard.wait(lambda: any(event.name == "store_ok" for event in heard.events))
        store.close()
    assert max((event.at - event.slot).total_seconds() for event in locked if event.slot is not None) < EVERY_S
    troubles = [(event.name, event.reason, event.job) for event in heard.events if event.name != "start"]
    assert troubles == [("store_error", "unreachable", "held"), ("store_ok", None, "held")]
