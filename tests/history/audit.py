"""The decisions of a real store, read from what triggers of the test's own note in the store itself.

An audit sees what changed, not what was asked or answered: refusals leave no trace, a renewal by a claim that was sent
again looks like a heartbeat, and what a claim said is taken from the job's profile. The store's time of a decision is
the one that the decision left in the run. A purge is taken to be by force, as nobody can tell.

Used by the test's thread, while instances use the store. SQLite gives no name to a transaction: there, what belongs to
one claim is told by the order in which the store writes it. Redis has no triggers: there, whoever uses the store has to
put `RedisAudit.script` in front of the Lua that all its scripts share.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

from leaselib._model import ClaimRequest, PastAttempt, Record
from leaselib.stores._redis_codec import read_record

from .base import Entry, JobProfile

COLUMNS = (
    "slot_ms", "status", "attempt", "handovers", "token", "runner", "fence", "lease_ms", "lease_end_ms", "released",
    "reason", "started_ms", "ended_ms", "error", "checkpoint", "past",
)  # fmt: skip
UNKNOWN = JobProfile("mixed", max_attempts=10**9, fewest_attempts=0, late_ms=10**15, keep_ms=-(10**6), history_size=0)
"""Of a job that no instance is known to have: nothing that depends on its options is judged."""


@dataclass(frozen=True)
class Change:
    """One row that changed: the transaction, and the run as it is afterwards; None if it was removed."""

    transaction: Hashable
    job: str
    slot_ms: int
    record: Record | None


class Audit(Protocol):
    """An audit of one namespace of a store."""

    def changes(self) -> list[Change]:
        """Every change since the audit was attached, in the store's order."""


def attach(url: str) -> Audit | None:
    """Begins to audit the store at that URL, whose tables must be there; None if it is of a kind that can't be."""
    parts = urlsplit(url)
    namespace = parse_qs(parts.query).get("namespace", ["default"])[0]
    if parts.scheme == "sqlite":
        return SQLiteAudit(url.partition(":///")[2].partition("?")[0], namespace)
    if parts.scheme == "postgresql":
        return PostgresAudit(urlunsplit(parts._replace(query="")), namespace)
    if parts.scheme == "redis":
        return RedisAudit(urlunsplit(parts._replace(query="")), namespace)
    return None


# ---- from changes to decisions --------------------------------------------------------------------------------------


def decisions(changes: Iterable[Change], jobs: Mapping[str, JobProfile], namespace: str = "default") -> list[Entry]:
    """What a store must have decided to make these changes, if its jobs are configured like that."""
    steps: dict[Hashable, _Step] = {}
    runs: dict[tuple[str, int], Record] = {}
    for change in changes:
        step = steps.setdefault((change.transaction, change.job), _Step(change.job))
        before = runs.pop((change.job, change.slot_ms), None)
        if change.record is None:
            step.drops.append(change.slot_ms)
            continue
        runs[change.job, change.slot_ms] = change.record
        step.puts[change.slot_ms] = (step.puts.get(change.slot_ms, (before,))[0], change.record)
    now: dict[str, int] = {}
    found: list[Entry] = []
    for step in steps.values():
        for entry in step.entries(jobs.get(step.job, UNKNOWN), namespace, now.get(step.job, 0)):
            now[step.job] = entry.now_ms
            found.append(entry)
    return found


@dataclass
class _Step:
    """What one transaction changed of one job: each run before and after."""

    job: str
    puts: dict[int, tuple[Record | None, Record]] = field(default_factory=dict)
    drops: list[int] = field(default_factory=list)

    def entries(self, profile: JobProfile, namespace: str, last_ms: int) -> Iterator[Entry]:
        """One claim or one purge, or else one decision for each run."""
        drops = tuple((self.job, slot) for slot in self.drops)
        claimed = [record for before, record in self.puts.values() if _is_start(before, record)]
        claimed += [record for before, record in self.puts.values() if _is_interruption(before, record)]
        if claimed:
            main = claimed[0]
            started = main.status == "running"
            yield Entry(
                "claim",
                self.job,
                main.started_ms if started else main.ended_ms or 0,
                None,
                tuple(record for _, record in self.puts.values()),
                drops,
                main.slot_ms,
                main.token if started else "",
                _request(main, profile, started),
                namespace=namespace,
            )
        elif drops:
            yield Entry("purge", self.job, last_ms, len(drops), (), drops, force=True, namespace=namespace)
        else:
            for before, record in self.puts.values():
                assert before is not None, "what was written anew is a start"
                yield _other(before, record, namespace)


def _is_start(before: Record | None, record: Record) -> bool:
    return before is None or (before.attempt, before.token) != (record.attempt, record.token)


def _is_interruption(before: Record | None, record: Record) -> bool:
    return record.status == "interrupted" and before is not None and before.status == "running"


def _request(record: Record, profile: JobProfile, started: bool) -> ClaimRequest:
    """The claim that did it, as far as the job's profile tells; where that leaves a choice, what allows most."""
    return ClaimRequest(
        job=record.job,
        slot_ms=record.slot_ms,
        token=record.token if started else "",
        runner=record.runner,
        lease_ms=record.lease_ms,
        max_attempts=profile.max_attempts if started else profile.fewest_attempts,
        overlap="skip" if profile.overlap == "skip" else "allow",
        max_late_ms=profile.late_ms,
        keep_ms=profile.keep_ms,
        history_size=profile.history_size,
        reason=record.reason,
        takeover_of=None if record.attempt == 1 else record.attempt - 1,
    )


def _other(before: Record, record: Record, namespace: str) -> Entry:
    """A heartbeat, finish or release."""
    op: Literal["heartbeat", "finish", "release"] = "heartbeat"
    now_ms, status = record.lease_end_ms - record.lease_ms, None
    if record.status != before.status and record.status in ("success", "failed"):
        op, now_ms, status = "finish", record.ended_ms or 0, record.status
    elif record.released and not before.released:
        op, now_ms = "release", record.lease_end_ms
    return Entry(
        op,
        record.job,
        now_ms,
        True,
        (record,),
        slot_ms=record.slot_ms,
        token=record.token,
        status=status,
        error=record.error,
        checkpoint=None if record.checkpoint == before.checkpoint else record.checkpoint,
        namespace=namespace,
    )


def _record(job: str, values: Mapping[str, Any]) -> Record:
    """A run from the columns of its row."""
    past = values["past"]
    attempts = tuple(PastAttempt(*row) for row in (json.loads(past) if isinstance(past, str) else past))
    return Record(job=job, **{**values, "released": bool(values["released"]), "past": attempts})


# ---- SQLite ---------------------------------------------------------------------------------------------------------


class SQLiteAudit:
    """An audit of a SQLite file, which may be attached to by several at once."""

    def __init__(self, path: str, namespace: str) -> None:
        self._path, self._namespace = path, namespace
        with self._connection() as database:
            database.executescript(_SQLITE)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self._path, timeout=30, isolation_level=None)) as database:
            yield database

    def changes(self) -> list[Change]:
        """See Audit."""
        with self._connection() as database:
            rows = database.execute(
                f"SELECT a.seq, a.kind, j.name, {', '.join(f'a.{name}' for name in COLUMNS)} FROM audit_changes AS a "
                f"JOIN leaselib_jobs AS j ON j.id = a.job_id WHERE j.namespace = ? ORDER BY a.seq",
                (self._namespace,),
            ).fetchall()
        found: list[Change] = []
        first: Change | None = None  # of the transaction, if more may belong to it
        for seq, kind, job, *values in rows:
            if kind == "job":  # the last thing that a claim or purge writes
                first = None
                continue
            record = _record(job, dict(zip(COLUMNS, values, strict=True))) if kind == "put" else None
            belongs = first is not None and first.job == job and _belongs(first.record, record)
            change = Change(first.transaction if first is not None and belongs else seq, job, values[0], record)
            found.append(change)
            first = first if belongs else change
        return found


def _belongs(first: Record | None, record: Record | None) -> bool:
    """Whether a change is part of the transaction that began with another: a claim writes its start first, then the
    runs that it ends, and removes what it trims; a purge only removes.
    """
    if first is None:
        return record is None
    started = first.status == "running" and first.lease_end_ms == first.started_ms + first.lease_ms
    return started and (record is None or (record.status, record.ended_ms) == ("interrupted", first.started_ms))


_NEW = ", ".join(f"NEW.{name}" for name in COLUMNS)
_SQLITE = f"""
CREATE TABLE IF NOT EXISTS audit_changes (seq INTEGER PRIMARY KEY, kind, job_id, {', '.join(COLUMNS)});
CREATE TRIGGER IF NOT EXISTS audit_new AFTER INSERT ON leaselib_runs BEGIN
    INSERT INTO audit_changes VALUES (NULL, 'put', NEW.job_id, {_NEW});
END;
CREATE TRIGGER IF NOT EXISTS audit_changed AFTER UPDATE ON leaselib_runs BEGIN
    INSERT INTO audit_changes VALUES (NULL, 'put', NEW.job_id, {_NEW});
END;
CREATE TRIGGER IF NOT EXISTS audit_removed AFTER DELETE ON leaselib_runs BEGIN
    INSERT INTO audit_changes (kind, job_id, slot_ms) VALUES ('drop', OLD.job_id, OLD.slot_ms);
END;
CREATE TRIGGER IF NOT EXISTS audit_job AFTER UPDATE ON leaselib_jobs BEGIN
    INSERT INTO audit_changes (kind, job_id) VALUES ('job', NEW.id);
END;
"""


# ---- PostgreSQL -----------------------------------------------------------------------------------------------------


class PostgresAudit:
    """An audit of a PostgreSQL server that is the test's own: its trigger sees the runs of all namespaces."""

    def __init__(self, url: str, namespace: str, schema: str = "leaselib") -> None:
        self._url, self._namespace = url, namespace
        with self._connection() as connection:
            connection.execute(_POSTGRES.replace("{schema}", schema))

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Any]:
        import psycopg

        with psycopg.connect(self._url, autocommit=True) as connection:
            yield connection

    def changes(self) -> list[Change]:
        """See Audit."""
        with self._connection() as connection:
            rows = connection.execute(
                "SELECT transaction, job, slot_ms, run FROM audit.changes WHERE namespace = %s ORDER BY seq",
                (self._namespace,),
            ).fetchall()
        return [
            Change(
                transaction, job, slot_ms, None if run is None else _record(job, {name: run[name] for name in COLUMNS})
            )
            for transaction, job, slot_ms, run in rows
        ]


_POSTGRES = """
CREATE SCHEMA IF NOT EXISTS audit;
CREATE TABLE IF NOT EXISTS audit.changes (
    seq bigserial PRIMARY KEY, transaction bigint NOT NULL, namespace text NOT NULL, job text NOT NULL,
    slot_ms bigint NOT NULL, run jsonb
);
CREATE OR REPLACE FUNCTION audit.note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        INSERT INTO audit.changes (transaction, namespace, job, slot_ms)
        VALUES (txid_current(), OLD.namespace, OLD.job, OLD.slot_ms);
    ELSE
        INSERT INTO audit.changes (transaction, namespace, job, slot_ms, run)
        VALUES (txid_current(), NEW.namespace, NEW.job, NEW.slot_ms, to_jsonb(NEW));
    END IF;
    RETURN NULL;
END
$$;
DROP TRIGGER IF EXISTS audit_changes ON {schema}.runs;
CREATE TRIGGER audit_changes AFTER INSERT OR UPDATE OR DELETE ON {schema}.runs
FOR EACH ROW EXECUTE FUNCTION audit.note();
"""


# ---- Redis ----------------------------------------------------------------------------------------------------------

_SLOT = re.compile(r"-?\d+")
_KEY = re.compile(r"leaselib:\{([^:]*):(.*)\}:runs")


class RedisAudit:
    """An audit of a Redis server, of those whose scripts begin with `script`."""

    script = """
local real, transaction = redis, nil
local redis = setmetatable({}, { __index = real })
function redis.call(...)
  local reply = real.call(...)
  local name, key = ...
  if (name == 'HSET' or name == 'HDEL') and string.find(key, ':runs$') then
    transaction = transaction or real.call('INCR', 'audit:transactions')
    real.call('RPUSH', 'audit:changes', cjson.encode({ transaction, ... }))
  end
  return reply
end
"""
    """Notes each write to a job's records, once it is done and in the same step."""

    def __init__(self, url: str, namespace: str) -> None:
        self._url, self._namespace = url, namespace

    def changes(self) -> list[Change]:
        """See Audit."""
        import redis

        with contextlib.closing(redis.Redis.from_url(self._url)) as client:
            lines: Any = client.lrange("audit:changes", 0, -1)
        hashes: dict[str, dict[str, Any]] = {}
        found: list[Change] = []
        for line in lines:
            transaction, name, key, *words = json.loads(line)
            match = _KEY.fullmatch(key)
            if match is None or unquote(match[1]) != self._namespace:
                continue
            stored = hashes.setdefault(key, {})
            names = words[::2] if name == "HSET" else words
            slots = [field for field in names if _SLOT.fullmatch(field)]
            before = {field: stored.get(field) for field in slots}
            if name == "HSET":
                stored.update(zip(words[::2], words[1::2], strict=True))
            else:
                for field in words:
                    stored.pop(field, None)
            for field in slots:  # a repeated finish writes what is there already
                if stored.get(field) != before[field]:
                    record = _of_fields(unquote(match[2]), field, stored)
                    found.append(Change(transaction, unquote(match[2]), int(field), record))
        return found


def _of_fields(job: str, slot: str, stored: Mapping[str, Any]) -> Record | None:
    """A run from the fields of its job's hash; None if it isn't there."""
    values = [stored.get(f"{slot}{part}") for part in ("", ":checkpoint", ":past")]
    raw, checkpoint, past = (None if value is None else value.encode() for value in values)
    return None if raw is None else read_record(job, raw, checkpoint, past)
