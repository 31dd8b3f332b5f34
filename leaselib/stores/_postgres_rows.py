"""What goes to PostgreSQL and what comes back: the statements, their parameters as text, their rows as JSON.

Owns nothing; any thread may call it. Rows are untrusted: whatever doesn't fit raises ValueError or TypeError.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any, Literal, TypeVar, get_args

from leaselib._model import ERROR_BYTES, ClaimAnswer, Outcome, PastAttempt, Reason, Record, Status, to_ms
from leaselib.errors import ConfigurationError
from leaselib.stores._base import CHECKPOINT_BYTES

Row = list["bytes | None"]
T = TypeVar("T", bound=str)

COLUMNS = (
    "job", "slot_ms", "status", "attempt", "handovers", "token", "runner", "fence", "lease_ms", "lease_end_ms",
    "released", "reason", "started_ms", "ended_ms", "error", "checkpoint", "past",
)  # fmt: skip
WAITING = frozenset({"claim", "heartbeat", "finish", "release", "purge"})
"""Operations whose last parameter is how long to wait for a lock, in milliseconds."""
HUGE = 2**53
"""Limits beyond this are as good as none, and would overflow the server's arithmetic. No stored number is larger."""

_FIRST_MS = to_ms(datetime.min.replace(tzinfo=timezone.utc))
_LAST_MS = to_ms(datetime.max.replace(tzinfo=timezone.utc))
_STATUSES, _REASONS, _OUTCOMES = get_args(Status), get_args(Reason), get_args(Outcome)
_PAST_OUTCOMES: tuple[Literal["expired", "handed-over"], ...] = ("expired", "handed-over")


class OtherAnswer(Exception):
    """The token in an answer isn't the one that was sent: it belongs to another question."""


def statements(schema: str) -> dict[str, bytes]:
    """The one statement of each operation; `schema` is quoted. Functions are named by the version that brought them."""
    claim = "$1::text, $2::text, $3::bigint, $4::text, $5::text, $6::bigint, $7::bigint, $8::text, $9::bigint, "
    claim += "$10::bigint, $11::bigint, $12::text, $13::bigint, $14::bigint"
    mine = "$1::text, $2::text, $3::bigint, $4::text, "
    texts = {
        "claim": f"~.claim_1({claim})",
        "heartbeat": f"~.heartbeat_1({mine}$5::bigint, $6::text, $7::bigint)",
        "finish": f"~.finish_1({mine}$5::text, $6::text, $7::bigint)",
        "release": f"~.release_1({mine}$5::text, $6::bigint)",
        "unfinished": "~.unfinished_1($1::text, $2::jsonb)",
        "get": "~.get_1($1::text, $2::text, $3::bigint)",
        "runs": "~.runs_1($1::text, $2::text, $3::bigint)",
        "jobs": "~.jobs_1($1::text)",
        "purge": "~.purge_1($1::text, $2::text, $3::boolean, $4::bigint)",
        "ping": "p.now_ms, p.epoch FROM ~.ping_1($1::text) AS p",
    }
    return {name: b"SELECT " + text.replace("~", schema).encode() for name, text in texts.items()}


def param(value: object) -> bytes | None:
    """A parameter as text.

    Raises:
        ConfigurationError: a text that PostgreSQL can't keep.
    """
    if value is None:
        return None
    if isinstance(value, bool):
        return b"t" if value else b"f"
    text = str(value)
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"a lone surrogate can't be stored: {text!r:.100}") from error
    if b"\0" in raw:
        raise ConfigurationError(f"a NUL character can't be stored: {text!r:.100}")
    return raw


def bounded(limit: int) -> int:
    """The limit, or one that means the same and fits the server's arithmetic."""
    return max(-HUGE, min(HUGE, limit))


def values(raw: bytes | None, count: int) -> list[Any]:
    """The JSON array in a column, of so many values."""
    try:
        found = json.loads(raw or b"null")
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, list) or len(found) != count:
        raise ValueError(f"an answer is {found!r:.100}")
    return found


def accepted(row: Row, token: str) -> bool:
    """The answer to a heartbeat, finish or release with that token."""
    echo, yes = values(row[0], 2)
    if echo != token or not isinstance(yes, bool):
        raise OtherAnswer
    return yes


def claim_answer(row: Row, job: str, token: str) -> ClaimAnswer:
    """The answer to a claim of that job with that token."""
    echo, outcome, now_ms, epoch, wait_ms, interrupted, run = values(row[0], 7)
    if echo != token:
        raise OtherAnswer
    return ClaimAnswer(
        one_of(_OUTCOMES, outcome),
        token,
        instant(now_ms),
        text(epoch),
        None if run is None else record(run, job),
        number(wait_ms),
        tuple(map(instant, interrupted)),
    )


def record(run: list[Any], job: str | None = None) -> Record:
    """The run in a list of COLUMNS; of that job, or it is malformed."""
    if len(run) != len(COLUMNS):
        raise ValueError(f"it has {len(run)} values")
    (
        name, slot_ms, status, attempt, handovers, token, runner, fence, lease_ms, lease_end_ms,
        released, reason, started_ms, ended_ms, error, checkpoint, past,
    ) = run  # fmt: skip
    if job is not None and name != job:
        raise ValueError(f"it belongs to {name!r:.100}")
    if type(released) is not bool:
        raise ValueError(f"released is {released!r:.50}")
    found = Record(
        job=text(name),
        slot_ms=instant(slot_ms),
        status=one_of(_STATUSES, status),
        attempt=number(attempt),
        handovers=number(handovers),
        token=text(token),
        runner=text(runner),
        fence=number(fence),
        lease_ms=number(lease_ms),
        lease_end_ms=instant(lease_end_ms),
        released=released,
        reason=one_of(_REASONS, reason),
        started_ms=instant(started_ms),
        ended_ms=None if ended_ms is None else instant(ended_ms),
        error=None if error is None else text(error, ERROR_BYTES),
        checkpoint=None if checkpoint is None else json_text(checkpoint),
        past=past_attempts(past),
    )
    if found.attempt < 1 or found.handovers < 0 or (found.status == "running") != (ended_ms is None):
        raise ValueError(f"attempt {attempt}, {handovers} hand-overs, {status}, ended {ended_ms}")
    return found


def past_attempts(entries: object) -> tuple[PastAttempt, ...]:
    """The ended attempts of a run: a list of [number, runner, started_ms, ended_ms, outcome]."""
    if not isinstance(entries, list):
        raise ValueError(f"the past attempts are {entries!r:.100}")
    return tuple(
        PastAttempt(number(n), text(runner), instant(started_ms), instant(ended_ms), one_of(_PAST_OUTCOMES, outcome))
        for n, runner, started_ms, ended_ms, outcome in entries
    )


def text(value: object, limit: int | None = None) -> str:
    """A text that must be there, of at most so many bytes."""
    if type(value) is not str or (limit is not None and len(value.encode()) > limit):
        raise ValueError(f"a text is {value!r:.50}")
    return value


def json_text(value: object) -> str:
    """A text that must be JSON."""
    found = text(value, CHECKPOINT_BYTES)
    try:
        json.loads(found)
    except RecursionError as error:
        raise ValueError("a checkpoint is nested too deeply") from error
    return found


def number(value: object) -> int:
    """A whole number that must be there."""
    if type(value) is not int or not -HUGE <= value <= HUGE:
        raise ValueError(f"a number is {value!r:.50}")
    return value


def instant(value: object) -> int:
    """A time in milliseconds that a datetime can hold."""
    ms = number(value)
    if not _FIRST_MS <= ms <= _LAST_MS:
        raise ValueError(f"a time is {ms} ms")
    return ms


def one_of(allowed: tuple[T, ...], value: object) -> T:
    """One of these words."""
    for word in allowed:
        if word == value:
            return word
    raise ValueError(f"{value!r:.50} is none of {', '.join(allowed)}")
