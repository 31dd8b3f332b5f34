"""PostgresStore: leases in PostgreSQL 13 or newer, one function call and one round trip per operation.

The rules are in `sql/postgres/*_claim.sql` and its neighbours, held against `_rules` by tests. Everything here may be
called from any thread; the pool guards the connections, and `_schema_lock` makes claims and reads take turns at the
first look at the schema. No session state is used, so that a pooler in transaction mode may stand in between.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import tenacity

from leaselib._model import ClaimAnswer, ClaimRequest, Pong, Record, cut_error, from_ms
from leaselib.errors import ConfigurationError, StoreError
from leaselib.stores import _postgres_rows as rows
from leaselib.stores._base import DEFAULT_TIMEOUT_S, Store
from leaselib.stores._postgres_errors import CONFLICTS, NO_SCHEMA, Failure, store_error

try:
    from leaselib.stores import _postgres_inside, _postgres_schema, _postgres_url
    from leaselib.stores._postgres_connection import Connection, Deadline
    from leaselib.stores._postgres_pool import Pool

    _missing: ImportError | None = None
except ImportError as error:  # psycopg, or the libpq that it needs: said when a store is made
    _missing = error

CREATE_TIMEOUT_S = 60.0
RETRIES = 5
"""So many times a serialization failure or a deadlock is answered by sending the same again at once."""
LONGEST_PAUSE_S = 0.05
OWN_TIMEOUT_S = 1.0
"""How long the store's own database is asked which one it is, while a handler's transaction is open."""

T = TypeVar("T")


class PostgresStore(Store):
    """Leases in a PostgreSQL database, judged on its server's clock.

    The URL goes to libpq, with its parameters: `sslmode=verify-full`, or several hosts with
    `target_session_attrs=read-write`. `namespace`, `schema` and `create` are taken off it before, and stand above the
    arguments. Nothing is sent before the first operation, which also creates or upgrades the schema if it has to.

    Args:
        url: `postgresql://user:password@host:5432/database`.
        namespace: two stores in one database with different namespaces don't see each other.
        schema: where the tables and functions are.
        create: whether the first operation may create or upgrade the schema. Without it, or without the right to, it
            fails with a StoreError that names the command for the database's administrator.

    Raises:
        ConfigurationError: a URL that libpq can't read, or psycopg is missing.
    """

    def __init__(self, url: str, namespace: str = "default", *, schema: str = "leaselib", create: bool = True) -> None:
        if _missing is not None:
            raise ConfigurationError(
                f"a PostgresStore needs psycopg 3, which can't be imported ({_missing}). Install leaselib[postgres]: "
                f"pip install 'leaselib[postgres]'"
            ) from _missing
        address = _postgres_url.parse(url)
        super().__init__(namespace if address.namespace is None else address.namespace)
        self.schema = _postgres_url.check_schema(schema if address.schema is None else address.schema)
        self._create = create if address.create is None else address.create
        self._address = address
        self._pool = Pool(address)
        self._schema_lock = threading.Lock()
        self._schema_found = False
        self._statements = rows.statements(_postgres_schema.quoted(self.schema))

    @classmethod
    def from_url(cls, url: str) -> PostgresStore:
        """A store from its URL alone; see the class.

        Raises:
            ConfigurationError: a URL that libpq can't read, or psycopg is missing.
        """
        return cls(url)

    def __repr__(self) -> str:
        return f"PostgresStore({self._address.shown!r}, namespace={self.namespace!r}, schema={self.schema!r})"

    # ---- operations ----------------------------------------------------------------------------------------------

    def _claim(self, request: ClaimRequest, timeout: float) -> ClaimAnswer:
        r, bounded = request, rows.bounded
        limits = (bounded(r.max_late_ms), bounded(r.keep_ms), bounded(r.history_size))
        run = (self.namespace, r.job, r.slot_ms, r.token, r.runner, r.lease_ms)
        takeover_of = None if r.takeover_of is None else bounded(r.takeover_of)
        args = (*run, bounded(r.max_attempts), r.overlap, *limits, r.reason, takeover_of)
        return self._call("claim", args, timeout, lambda found: rows.claim_answer(found[0], r.job, r.token), job=r.job)

    def _heartbeat(
        self, job: str, slot_ms: int, token: str, lease_ms: int, checkpoint: str | None, timeout: float
    ) -> bool:
        args = (self.namespace, job, slot_ms, token, lease_ms, checkpoint)
        return self._call("heartbeat", args, timeout, lambda got: rows.accepted(got[0], token), job=job, urgent=True)

    def _finish(
        self,
        job: str,
        slot_ms: int,
        token: str,
        status: Literal["success", "failed"],
        error: str | None,
        timeout: float,
    ) -> bool:
        args = (self.namespace, job, slot_ms, token, status, None if error is None else cut_error(error))
        return self._call("finish", args, timeout, lambda got: rows.accepted(got[0], token), job=job, urgent=True)

    def _release(self, job: str, slot_ms: int, token: str, checkpoint: str | None, timeout: float) -> bool:
        args = (self.namespace, job, slot_ms, token, checkpoint)
        return self._call("release", args, timeout, lambda got: rows.accepted(got[0], token), job=job, urgent=True)

    def _unfinished(self, jobs: list[str], timeout: float) -> list[Record]:
        for job in jobs:
            rows.param(job)  # JSON would smuggle in what no name can hold
        args = (self.namespace, json.dumps(jobs, ensure_ascii=False))
        return self._call("unfinished", args, timeout, lambda found: [self._record(row) for row in found])

    def _get(self, job: str, slot_ms: int, timeout: float) -> Record | None:
        args = (self.namespace, job, slot_ms)
        return self._call("get", args, timeout, lambda found: self._record(found[0], job) if found else None, job=job)

    def _runs(self, job: str, limit: int, timeout: float) -> list[Record]:
        args = (self.namespace, job, rows.bounded(limit))
        return self._call("runs", args, timeout, lambda found: [self._record(row, job) for row in found], job=job)

    def _purge(self, job: str, force: bool, timeout: float) -> int:
        return self._call("purge", (self.namespace, job, force), timeout, lambda found: int(found[0][0] or 0), job=job)

    def jobs(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> list[str]:
        """See Store."""
        return self._call("jobs", (self.namespace,), timeout, lambda found: [(row[0] or b"").decode() for row in found])

    def ping(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> Pong:
        """See Store."""

        def read(found: list[rows.Row]) -> Pong:
            now_ms, epoch = found[0]
            return Pong(from_ms(int(now_ms or b"")), (epoch or b"").decode())

        return self._call("ping", (self.namespace,), timeout, read)

    # ---- the caller's own transactions ---------------------------------------------------------------------------

    def _confirm(self, connection: Any, job: str, slot_ms: int, token: str) -> bool:
        return self._inside(_postgres_inside.confirm, connection, job, slot_ms, token)

    def _finish_inside(self, connection: Any, job: str, slot_ms: int, token: str) -> bool:
        return self._inside(_postgres_inside.finish_in, connection, job, slot_ms, token)

    def _inside(self, ask: Callable[..., bool], connection: Any, job: str, slot_ms: int, token: str) -> bool:
        held = ask(connection, job, slot_ms, token, namespace=self.namespace, schema=self.schema)
        if not held:
            self._check_own(connection)
        return held

    def _check_own(self, connection: Any) -> None:
        """Over a connection to another database every run seems lost; so before that is believed, it is looked at."""
        try:
            epoch = self.ping(timeout=OWN_TIMEOUT_S).epoch
        except StoreError:
            return  # nobody knows; the run counts as lost, which is safe
        where = self._address.shown
        _postgres_inside.check_epoch(connection, epoch, where, namespace=self.namespace, schema=self.schema)

    # ---- the schema ----------------------------------------------------------------------------------------------

    def create_schema(self, *, timeout: float = CREATE_TIMEOUT_S) -> None:
        """Creates the schema, or upgrades it in place while older instances go on; does nothing if it is up to date.

        Safe to call from any number of instances at once. In one transaction, so it happens as a whole or not at all.

        Args:
            timeout: seconds, for waiting for other instances' turns too.

        Raises:
            StoreError: the role may not, the server can't be reached, or the schema is newer than this library.
        """
        self._run(lambda c, d: self._look(c, d, create=True), Deadline(timeout), "creating the schema", urgent=False)
        self._schema_found = True

    def _need_schema(self, deadline: Deadline, *, urgent: bool) -> None:
        """Before the first operation: creates or upgrades the schema, or says what the administrator has to do.

        Patient operations take turns. Urgent ones look for themselves, or they would wait behind claims.
        """
        if urgent:
            self._look_once(deadline, urgent=True)
            return
        if not self._schema_lock.acquire(timeout=max(0.0, deadline.left())):
            raise StoreError(f"the schema at {self._address.shown} was not looked at in time", transient=True)
        try:
            if not self._schema_found:
                self._look_once(deadline, urgent=False)
        finally:
            self._schema_lock.release()

    def _look_once(self, deadline: Deadline, *, urgent: bool) -> None:
        what = "looking at the schema"
        self._run(lambda c, d: self._look(c, d, create=self._create), deadline, what, urgent=urgent)
        self._schema_found = True

    def _look(self, connection: Connection, deadline: Deadline, *, create: bool) -> None:
        version = _postgres_schema.found_version(connection, self.schema, deadline)
        if version >= _postgres_schema.VERSION:
            return
        if not create:
            raise self._schema_missing(version, "this store may not create it (create=False)")
        try:
            _postgres_schema.create(connection, self.schema, version, deadline)
        except Failure as failure:
            if failure.sqlstate == "42501":
                reason = self._address.scrub(str(failure))
                raise self._schema_missing(version, f"the role may not create it ({reason})") from failure.__cause__
            raise

    def _schema_missing(self, version: int, why: str) -> StoreError:
        need, state = _postgres_schema.VERSION, f"has version {version}" if version else "isn't there"
        url = self._address.shown + ("" if self.schema == "leaselib" else f"?schema={self.schema}")
        return StoreError(
            f"leaselib needs its schema {self.schema!r} at version {need} in {self._address.shown}: it {state}, and "
            f"{why}. Have the database's administrator run the output of: leaselib schema {url}"
        )

    # ---- one call ------------------------------------------------------------------------------------------------

    def _call(
        self,
        operation: str,
        args: Sequence[object],
        timeout: float,
        read: Callable[[list[rows.Row]], T],
        *,
        job: str | None = None,
        urgent: bool = False,
    ) -> T:
        """One operation: one round trip, within `timeout` seconds. `read` makes the answer of the rows."""
        deadline = Deadline(timeout)
        params = [rows.param(arg) for arg in args]
        if not self._schema_found:
            self._need_schema(deadline, urgent=urgent)
        sql, waits = self._statements[operation], operation in rows.WAITING

        def attempt(connection: Connection, deadline: Deadline) -> T:
            # The server gives up waiting for a lock a little earlier, so that no session goes on waiting for nobody.
            own = [*params, b"%d" % max(1, int(deadline.left() * 900))] if waits else params
            found = connection.execute(sql, own, deadline)
            try:
                return read(found)
            except rows.OtherAnswer as error:
                raise Failure("the answer belongs to another question", unknown=True) from error
            except (ValueError, TypeError, IndexError) as error:
                raise self._malformed(job, error) from error

        what = operation if job is None else f"{operation} of {job!r}"
        return self._run(attempt, deadline, what, job=job, urgent=urgent)

    def _run(
        self,
        attempt: Callable[[Connection, Deadline], T],
        deadline: Deadline,
        what: str,
        *,
        urgent: bool,
        job: str | None = None,
    ) -> T:
        def once() -> T:
            with self._pool.connection(deadline, urgent=urgent) as connection:
                return attempt(connection, deadline)

        try:
            try:
                return once()
            except Failure as failure:
                if failure.sqlstate not in CONFLICTS:
                    raise
            return _again(once, deadline)
        except Failure as failure:
            raise self._store_error(failure, what, job) from failure.__cause__ or failure

    def _store_error(self, failure: Failure, what: str, job: str | None) -> StoreError:
        failure.args = (self._address.scrub(str(failure)),)
        if failure.sqlstate in NO_SCHEMA or failure.sqlstate == "42501":
            self._schema_found = False  # whatever comes next looks again
        if failure.sqlstate in NO_SCHEMA:
            return self._schema_missing(0, f"the server says: {failure}")
        return store_error(failure, what, self._address.shown, job)

    def _record(self, row: rows.Row, job: str | None = None) -> Record:
        """A row's run, of that job or of any; a malformed one is blamed on its own job."""
        run: list[Any] = []
        try:
            run = rows.values(row[0], len(rows.COLUMNS))
            return rows.record(run, job)
        except (ValueError, TypeError) as error:
            name = run[0] if run and isinstance(run[0], str) else None
            raise self._malformed(name if job is None else job, error) from error

    def _malformed(self, job: str | None, error: Exception) -> StoreError:
        whose = "an answer" if job is None else f"a run of {job!r}"
        return StoreError(
            f"{whose} stored in {self._address.shown} is malformed: {self._address.scrub(str(error))}. Look at it, and "
            f"remove it if need be; other jobs go on",
            job=job,
        )

    # ---- life ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """See Store."""
        self._pool.flush()

    def _after_fork(self) -> None:
        inherited, self._pool = self._pool, Pool(self._address)
        self._schema_lock = threading.Lock()
        inherited.forget()


def _again(once: Callable[[], T], deadline: Deadline) -> T:
    """The server undid the operation because others were at the same rows: at most RETRIES more tries, at once."""
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda e: isinstance(e, Failure) and e.sqlstate in CONFLICTS),
        stop=lambda state: state.attempt_number >= RETRIES or deadline.left() <= LONGEST_PAUSE_S,
        wait=tenacity.wait_random(0.005, LONGEST_PAUSE_S),
        reraise=True,
    )
    return retrying(once)
