"""How SQLiteStore writes a Record as a row, and how it reads one back without trusting it.

Owns nothing; called by whichever thread holds the transaction. Whoever can write the file can put anything into a row,
so every value is checked: what comes out is a Record that the rules and `Record.to_run` can work with, or `Malformed`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

from leaselib._model import ERROR_BYTES, LOG_ENTRIES, JobMeta, PastAttempt, Record, to_ms
from leaselib._names import NAME_LENGTH
from leaselib.stores._base import CHECKPOINT_BYTES

FIRST_MS = to_ms(datetime.min.replace(tzinfo=timezone.utc))
LAST_MS = to_ms(datetime.max.replace(tzinfo=timezone.utc))
LONGEST_MS = 10**14
"""The longest lease that is believed: now plus this is still a datetime."""
LARGEST = 2**53
"""The largest number that is believed; no store keeps a larger one exactly."""
PAST_LENGTH = 2**20
"""The JSON text of the past attempts has at most so many characters."""
_STATUSES = frozenset(("running", "success", "failed", "interrupted"))
_REASONS = frozenset(("scheduled", "catch-up", "takeover", "hand-over", "manual"))
_PAST_OUTCOMES = frozenset(("expired", "handed-over"))


class Malformed(ValueError):
    """A stored row is not what this library writes; the text says which value, and what was expected."""


def _instant(value: object) -> bool:
    return type(value) is int and FIRST_MS <= value <= LAST_MS


def _optional_instant(value: object) -> bool:
    return value is None or _instant(value)


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _name(value: object) -> bool:
    return type(value) is str and 0 < len(value) <= NAME_LENGTH


def _error(value: object) -> bool:
    return value is None or (type(value) is str and len(value) <= ERROR_BYTES)


def _checkpoint(value: object) -> bool:
    if value is None:
        return True
    if type(value) is not str or len(value) > CHECKPOINT_BYTES:
        return False
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return False
    return True


# In the order of the columns in the SQL files.
_RUN: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("slot_ms", "milliseconds of an instant", _instant),
    ("status", f"one of {', '.join(sorted(_STATUSES))}", lambda v: type(v) is str and v in _STATUSES),
    ("attempt", "a whole number from 1", lambda v: _whole(v) and v > 0),
    ("handovers", "a whole number from 0", _whole),
    ("token", f"text of up to {NAME_LENGTH} characters", _name),
    ("runner", f"text of up to {NAME_LENGTH} characters", _name),
    ("fence", "a whole number from 0", _whole),
    ("lease_ms", f"milliseconds from 0 to {LONGEST_MS}", lambda v: type(v) is int and 0 <= v <= LONGEST_MS),
    ("lease_end_ms", "milliseconds of an instant", _instant),
    ("released", "0 or 1", lambda v: type(v) is int and v in (0, 1)),
    ("reason", f"one of {', '.join(sorted(_REASONS))}", lambda v: type(v) is str and v in _REASONS),
    ("started_ms", "milliseconds of an instant", _instant),
    ("ended_ms", "milliseconds of an instant, or NULL", _optional_instant),
    ("error", f"text of up to {ERROR_BYTES} bytes, or NULL", _error),
    ("checkpoint", f"JSON text of up to {CHECKPOINT_BYTES} bytes, or NULL", _checkpoint),
)


def job_from_row(row: Sequence[Any]) -> tuple[int, JobMeta]:
    """The id of a job's runs and what is remembered of it, from a row of get_job.sql.

    Raises:
        Malformed: a value is not what it should be.
    """
    job_id, fence, floor_ms, ended = row
    if type(job_id) is int and _whole(fence) and _whole(ended) and _optional_instant(floor_ms):
        return job_id, JobMeta(fence, floor_ms, ended)
    raise Malformed(
        f"its fence, floor_ms and ended are {fence!r:.40}, {floor_ms!r:.40} and {ended!r:.40}, expected whole numbers "
        f"from 0; floor_ms may be NULL"
    )


def run_from_row(job: str, row: Sequence[Any]) -> Record:
    """The Record of a row of get_run.sql and its kin.

    Raises:
        Malformed: a value is not what it should be.
    """
    for (name, expected, valid), value in zip(_RUN, row, strict=False):
        if not valid(value):
            raise Malformed(f"{_which(row)}: its {name} is {value!r:.60}, expected {expected}")
    ended_ms, past = row[12], row[15]
    if (row[1] == "running") != (ended_ms is None):
        raise Malformed(f"{_which(row)}: its status is {row[1]!r}, but its ended_ms is {ended_ms!r}")
    try:
        attempts = () if past == "[]" else _past_from_json(past)
    except (ValueError, TypeError, RecursionError) as error_found:
        raise Malformed(
            f"{_which(row)}: its past is {past!r:.60}, expected a JSON list of up to {LOG_ENTRIES} attempts "
            f"[number, runner, started_ms, ended_ms, outcome]"
        ) from error_found
    values = (*row[:9], bool(row[9]), *row[10:15], attempts)
    return Record(job, *values)


def slots_from_rows(rows: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    """The slots of rows that hold nothing else.

    Raises:
        Malformed: one is no instant.
    """
    for row in rows:
        if not _instant(row[0]):
            raise Malformed(f"{_which(row)}: its slot_ms is {row[0]!r:.60}, expected milliseconds of an instant")
    return tuple(row[0] for row in rows)


def run_to_row(record: Record) -> tuple[str | int | None, ...]:
    """A Record's values in the order of put_run.sql, without the job."""
    return (
        record.slot_ms,
        record.status,
        record.attempt,
        record.handovers,
        record.token,
        record.runner,
        record.fence,
        record.lease_ms,
        record.lease_end_ms,
        int(record.released),
        record.reason,
        record.started_ms,
        record.ended_ms,
        record.error,
        record.checkpoint,
        _past_to_json(record.past) if record.past else "[]",
    )


def _which(row: Sequence[Any]) -> str:
    return f"the run with slot_ms {row[0]!r:.40}"


def _past_to_json(past: tuple[PastAttempt, ...]) -> str:
    rows = [(a.number, a.runner, a.started_ms, a.ended_ms, a.outcome) for a in past]
    return json.dumps(rows, ensure_ascii=False, separators=(",", ":"))


def _past_from_json(text: str) -> tuple[PastAttempt, ...]:
    if type(text) is not str or len(text) > PAST_LENGTH:
        raise ValueError("not a text, or too long")
    rows = json.loads(text)
    if type(rows) is not list or len(rows) > LOG_ENTRIES:
        raise ValueError("not a short list")
    return tuple(_past_attempt(*row) for row in rows)


def _past_attempt(number: Any, runner: Any, started_ms: Any, ended_ms: Any, outcome: Any) -> PastAttempt:
    good = _whole(number) and _name(runner) and _instant(started_ms) and _instant(ended_ms)
    if not good or type(outcome) is not str or outcome not in _PAST_OUTCOMES:
        raise ValueError("not an attempt")
    return PastAttempt(number, runner, started_ms, ended_ms, outcome)  # type: ignore[arg-type]
