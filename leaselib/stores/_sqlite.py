"""SQLiteStore: the rules inside SQLite transactions, for all programs of one machine.

Owns the path and a pool of connections (see `_sqlite_connections`); any thread may call it, and uses a connection of
its own meanwhile. The writers of a process queue for one `Turn`; those of several processes try again for the file's
write lock at random, short intervals, since SQLite's own waiting lets one process starve another.
"""

from __future__ import annotations

import gc
import os
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import tenacity

from leaselib import _clock, _random, _rules
from leaselib._model import ClaimRequest, JobMeta, Record
from leaselib.errors import ConfigurationError, StoreError
from leaselib.stores import _sqlite_inside, _sqlite_open
from leaselib.stores._rules_store import RulesStore
from leaselib.stores._sqlite_connections import Connections
from leaselib.stores._sqlite_errors import is_busy, is_undecodable, store_error
from leaselib.stores._sqlite_open import SYNCHRONOUS, Connection, FileReplaced, sql
from leaselib.stores._sqlite_rows import Malformed, job_from_row, run_from_row, run_to_row, slots_from_rows

# SQLite's lock mostly goes to whoever has just given it back and asks again. So whoever has waited a while tries more
# often, which evens out the waits of all. After a second nobody shares the lock any more: one program keeps it, and
# that may be this one. Since Python 3.11 a connection that nobody can reach any more, such as one that a handler left
# open amid a transaction, keeps its lock until the collector comes by, and in a program that waits it may never come.
LONG_PAUSE_S = 0.010
SHORT_PAUSE_S = 0.0005
IMPATIENT_AFTER_S = 0.020
RESIGNED_AFTER_S = 1.0
MOST_RUNS = 2**31
"""More runs than this are never asked for at once; SQLite takes a larger number for an error."""


class SQLiteStore(RulesStore):
    """Keeps runs in a SQLite file on a local disk: for all programs of one machine. Needs no server.

    Its clock is the machine's. Nothing is opened before the first operation, which creates what is missing: the file
    with mode 0600, and tables whose names begin with `leaselib_`, so that an application may keep its own beside them.
    The file is in WAL mode: beside it lie `-wal` and `-shm`, which belong to it and must not be copied, moved or
    deleted alone. A file that is deleted or replaced while it is in use is noticed before the next operation, which
    opens what is there now; instances learn of it by the new epoch.

    Args:
        path: of the file; its folder must exist.
        namespace: two stores on one file with different namespaces don't see each other.
        synchronous: `FULL`: a claim that was answered survives a power cut. `NORMAL` is faster, and a power cut may
            undo the latest claims. `EXTRA` as SQLite documents it.
        clock: what to read the time from; tests hand in their own.
        allow_network_fs: opens the file on a file system that other machines may share too. SQLite's locks usually
            don't hold there, so that one slot may start several times.

    Raises:
        ConfigurationError: the path is no path of a file, or an argument is unknown.
    """

    machine_clock = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        namespace: str = "default",
        *,
        synchronous: str = "FULL",
        clock: _clock.Clock = _clock.SYSTEM,
        allow_network_fs: bool = False,
    ) -> None:
        self.path = _check_path(path)
        if synchronous not in SYNCHRONOUS:
            raise ConfigurationError(
                f"synchronous must be one of {', '.join(SYNCHRONOUS)}, not {synchronous!r:.40}; without syncing, a "
                f"power cut damages the file"
            )
        self._synchronous = synchronous
        self._clock = clock
        self._allow_network_fs = allow_network_fs
        self._connections = Connections(self._connect)
        super().__init__(namespace)

    def _transaction(self, timeout: float, *, write: bool) -> _Transaction:
        if self._connections.pid != os.getpid():  # forked by something that runs no hooks
            self._after_fork()
        return _Transaction(self, self._connections, timeout, write)

    def _begin(self, connections: Connections, write: bool, deadline_ms: float) -> tuple[Connection, _SQLiteTable]:
        """Begins a transaction; while others hold the lock, tries again until the deadline."""
        try:
            return self._try_begin(connections, write)
        except (sqlite3.Error, FileReplaced) as error:
            if not _worth_another_try(error):
                raise
        left_s = max(0.0, deadline_ms - _clock.SYSTEM.boot_ms()) / 1000
        retrying = tenacity.Retrying(
            stop=tenacity.stop_before_delay(left_s),
            wait=_pause_s,
            before_sleep=_collecting(min(RESIGNED_AFTER_S, left_s / 2)),
            retry=tenacity.retry_if_exception(_worth_another_try),
            reraise=True,
        )
        return retrying(self._try_begin, connections, write)

    def _try_begin(self, connections: Connections, write: bool) -> tuple[Connection, _SQLiteTable]:
        connection = connections.take()
        raw = connection.raw
        try:
            raw.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            if _sqlite_open.file_id(self.path) != connection.file:
                raw.execute("ROLLBACK")
                _sqlite_open.clear_stale(connection)
                connections.renew()
                raise FileReplaced(self.path)
            meta = raw.execute(sql("get_meta")).fetchone()
            if meta != connection.meta:
                if meta is None:
                    connections.renew()
                connection.meta = _sqlite_open.check_meta(meta, self.path)
            # The clock last: whoever waited for the lock must not decide by the time at which it began to wait.
            return connection, _SQLiteTable(raw, self.namespace, self.path, self._clock.wall_ms(), meta[1])
        except BaseException as error:
            connections.give(connection, error)
            raise

    def _confirm(self, connection: Any, job: str, slot_ms: int, token: str) -> bool:
        run = self._inside(connection).get(job, slot_ms)
        return run is not None and _rules.holds(run, token)

    def _finish_inside(self, connection: Any, job: str, slot_ms: int, token: str) -> bool:
        return self._finish_in(self._inside(connection), job, slot_ms, token, "success", None)

    def _inside(self, connection: Any) -> _SQLiteTable:
        """The caller's open transaction, as a table for the rules."""
        raw = _sqlite_inside.enter(connection, self.path)
        epoch = str(_sqlite_open.check_meta(raw.execute(sql("get_meta")).fetchone(), self.path)[1])
        return _SQLiteTable(raw, self.namespace, self.path, self._clock.wall_ms(), epoch)

    def _connect(self) -> Connection:
        return _sqlite_open.connect(self.path, self._synchronous, self._clock, self._allow_network_fs)

    def close(self) -> None:
        """Closes the idle connections now, those in use as soon as they are free. Later calls open new ones."""
        if self._connections.pid == os.getpid():
            self._connections.renew()

    def _after_fork(self) -> None:
        self._connections = self._connections.in_child()

    def __repr__(self) -> str:
        return f"SQLiteStore({self.path!r}, namespace={self.namespace!r})"


def _check_path(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if not isinstance(text, str):
        raise ConfigurationError(f"the path of a SQLiteStore must be a str or a pathlib.Path, not {text!r:.100}")
    if text == ":memory:":
        raise ConfigurationError(
            "SQLiteStore can't share a ':memory:' database between connections: use MemoryStore for runs in memory"
        )
    if not text or "\0" in text:
        raise ConfigurationError(
            f"a SQLiteStore needs the path of a file, not {text!r:.100}: use MemoryStore for runs in memory"
        )
    if text.lower().startswith(("file:", "sqlite:")):
        raise ConfigurationError(
            f"a SQLiteStore needs a plain path, not the URL {text!r:.100}: write the path alone, without what stands "
            f"before it and without '?' options; open_store() takes URLs"
        )
    return os.path.abspath(text)  # noqa: PTH100  Path.absolute leaves '..' in


def _worth_another_try(error: BaseException) -> bool:
    return is_busy(error) or isinstance(error, FileReplaced)


def _pause_s(state: tenacity.RetryCallState) -> float:
    impatient = IMPATIENT_AFTER_S < (state.seconds_since_start or 0.0) < RESIGNED_AFTER_S
    return _random.SYSTEM.uniform(0, SHORT_PAUSE_S if impatient else LONG_PAUSE_S)


def _collecting(after_s: float) -> Callable[[tenacity.RetryCallState], None]:
    """Collects garbage, once, when the lock has been waited for that long: what keeps it may be in there."""
    due = [after_s]

    def collect(state: tenacity.RetryCallState) -> None:
        if due and (state.seconds_since_start or 0.0) >= due[0]:
            due.clear()
            gc.collect()

    return collect


class _Transaction:
    """Waits for the lock, commits, or rolls back after an error; turns SQLite's errors into StoreErrors.

    A class, since it is on the way of every operation and costs half of what contextlib.contextmanager does.
    """

    def __init__(self, store: SQLiteStore, connections: Connections, timeout: float, write: bool) -> None:
        self._store, self._connections, self._timeout, self._write = store, connections, timeout, write

    def __enter__(self) -> _SQLiteTable:
        deadline_ms = _clock.SYSTEM.boot_ms() + self._timeout * 1000
        if self._write and not self._connections.turn.acquire(self._timeout):
            raise StoreError(
                f"SQLite store {self._store.path!r}: other threads of this process were writing, or waiting for the "
                f"file's lock, for all of {self._timeout:g} s. It is tried again",
                transient=True,
            )
        try:
            self._connection, table = self._store._begin(self._connections, self._write, deadline_ms)
        except BaseException as error:
            self._end(error)
            raise
        return table

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._connection.raw.execute("COMMIT")
        except BaseException as failure:
            self._connections.give(self._connection, failure)
            self._end(failure)
            raise
        self._connections.give(self._connection, error)
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._write:
            self._connections.turn.release()
        if isinstance(error, sqlite3.Error):
            raise store_error(error, self._store.path, self._timeout) from error


class _SQLiteTable:
    """The rules' window on one namespace of the file, while a transaction is open."""

    def __init__(
        self, raw: sqlite3.Connection | _sqlite_inside.Inside, namespace: str, path: str, now_ms: int, epoch: str
    ) -> None:
        self._raw, self._namespace, self._path = raw, namespace, path
        self.now_ms, self.epoch = now_ms, epoch
        self._jobs: dict[str, tuple[int, JobMeta]] = {}
        self._started: dict[str, int] = {}

    def view(self, request: ClaimRequest) -> _rules.JobView:
        """What a claim has to know, mostly by one statement: a claim's cost is that of its statements."""
        job, slot_ms, horizon_ms = request.job, request.slot_ms, _rules.horizon_ms(self.now_ms)
        rows = self._select(job, "claim_view", (horizon_ms, self._namespace, job))
        if not rows:
            return _rules.JobView(JobMeta(), None, (), None)
        try:
            job_id, meta = job_from_row(rows[0][:4])
            newest_ms = slots_from_rows([rows[0][4:5]])[0] if rows[0][4] is not None else None
            running = [run_from_row(job, row[5:]) for row in rows] if rows[0][5] is not None else []
        except Malformed as error:
            raise self._malformed(job, error) from error
        if running:
            running.sort(key=lambda r: r.slot_ms)
            meta = replace(meta, fence=max(meta.fence, *(r.fence for r in running)))
        self._jobs[job] = job_id, meta
        run = next((r for r in running if r.slot_ms == slot_ms), None) if running else None
        if run is None and (slot_ms > horizon_ms or (newest_ms is not None and slot_ms <= newest_ms)):
            run = self.get(job, slot_ms)
        limit = _rules.trim_limit(request, meta) if run is None else 0
        trimmable = self.oldest_ended(job, _rules.trim_before_ms(request, self.now_ms), limit) if limit else ()
        others = tuple(r for r in running if r.slot_ms != slot_ms) if running else ()
        return _rules.JobView(meta, run, others, newest_ms, trimmable)

    def meta(self, job: str) -> JobMeta:
        known = self._job(job)
        return JobMeta() if known is None else known[1]

    def set_meta(self, job: str, meta: JobMeta) -> None:
        job_id = self._job_id(job)
        before = self._jobs[job][1]
        if self._started.get(job) == meta.fence and (before.floor_ms, before.ended) == (meta.floor_ms, meta.ended):
            return  # the run that was just started remembers the fence: a start writes a page less
        self._raw.execute(sql("put_job"), (meta.fence, meta.floor_ms, meta.ended, job_id))
        self._jobs[job] = job_id, meta

    def get(self, job: str, slot_ms: int) -> Record | None:
        found = self._runs(job, "get_run", slot_ms)
        return found[0] if found else None

    def running(self, jobs: list[str]) -> list[Record]:
        # One statement a job: a row that can't be read must not hide whose it is.
        found = [record for job in dict.fromkeys(jobs) for record in self._runs(job, "running")]
        return sorted(found, key=lambda r: (r.slot_ms, r.job))

    def newest_ms(self, job: str, horizon_ms: int) -> int | None:
        found = self._slots(job, "newest_slot", horizon_ms)
        return found[0] if found else None

    def oldest_ended(self, job: str, before_ms: int, limit: int) -> tuple[int, ...]:
        return self._slots(job, "oldest_ended", before_ms, limit)

    def put(self, record: Record) -> None:
        self._raw.execute(sql("put_run"), (self._job_id(record.job), *run_to_row(record)))
        if record.status == "running":
            self._started[record.job] = record.fence

    def drop(self, job: str, slots: Iterable[int]) -> None:
        job_id = self._job_id(job)
        self._raw.executemany(sql("drop_run"), ((job_id, slot) for slot in slots))

    def newest(self, job: str, limit: int) -> list[Record]:
        return self._runs(job, "newest", min(max(limit, 0), MOST_RUNS))

    def slots(self, job: str, ended_only: bool) -> tuple[int, ...]:
        return self._slots(job, "slots", ended_only)

    def jobs(self) -> list[str]:
        rows = self._raw.execute(sql("jobs"), (self._namespace,))
        return sorted(name.decode("utf-8", "backslashreplace") for (name,) in rows)

    def _job(self, job: str) -> tuple[int, JobMeta] | None:
        known = self._jobs.get(job)
        if known is None:
            try:
                rows = self._select(job, "get_job", (self._namespace, job))
            except UnicodeEncodeError:  # a lone surrogate: no store can keep such a name, so nothing is known of it
                return None
            if not rows:
                return None
            try:
                known = self._jobs[job] = job_from_row(rows[0])
            except Malformed as error:
                raise self._malformed(job, error) from error
        return known

    def _job_id(self, job: str) -> int:
        known = self._job(job)
        if known is not None:
            return known[0]
        job_id = self._raw.execute(sql("add_job"), (self._namespace, job)).lastrowid or 0
        self._jobs[job] = job_id, JobMeta()
        return job_id

    def _rows(self, job: str, statement: str, arguments: tuple[int, ...]) -> list[tuple[Any, ...]]:
        known = self._job(job)
        return [] if known is None else self._select(job, statement, (known[0], *arguments))

    def _select(self, job: str, statement: str, arguments: tuple[int | str, ...]) -> list[tuple[Any, ...]]:
        try:
            return self._raw.execute(sql(statement), arguments).fetchall()
        except sqlite3.OperationalError as error:
            if is_undecodable(error):
                raise self._malformed(job, Malformed(str(error).partition(" with text")[0])) from error
            raise

    def _runs(self, job: str, statement: str, *arguments: int) -> list[Record]:
        rows = self._rows(job, statement, arguments)
        try:
            return [run_from_row(job, row) for row in rows]
        except Malformed as error:
            raise self._malformed(job, error) from error

    def _slots(self, job: str, statement: str, *arguments: int) -> tuple[int, ...]:
        rows = self._rows(job, statement, arguments)
        try:
            return slots_from_rows(rows)
        except Malformed as error:
            raise self._malformed(job, error) from error

    def _malformed(self, job: str, error: Malformed) -> StoreError:
        """Nothing is repaired by guess; the other jobs go on."""
        known = self._jobs.get(job)
        table = "leaselib_jobs or leaselib_runs" if known is None else f"leaselib_runs (job_id {known[0]})"
        return StoreError(
            f"SQLite store {self._path!r}: what is stored of job {job!r} is malformed: {error}. Mend or delete that "
            f"row of {table}; other jobs are not held up",
            job=job,
        )
