"""What goes to PostgreSQL and what comes back: the statements, their parameters and rows, as text.

Owns nothing; any thread may call it. Rows are untrusted: whatever doesn't fit raises ValueError or TypeError.
"""

from __future__ import annotations

import json
from typing import Literal, TypeVar, get_args

from leaselib._model import ERROR_BYTES, ClaimAnswer, Outcome, PastAttempt, Reason, Record, Status, from_ms
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

_STATUSES, _REASONS, _OUTCOMES = get_args(Status), get_args(Reason), get_args(Outcome)
_PAST_OUTCOMES: tuple[Literal["expired", "handed-over"], ...] = ("expired", "handed-over")


def statements(schema: str) -> dict[str, bytes]:
    """The one statement of each operation; `schema` is quoted. Functions are named by the version that brought them."""
    run, row = ", ".join(f"(c.run).{name}" for name in COLUMNS), ", ".join(f"r.{name}" for name in COLUMNS)
    claim = "$1::text, $2::text, $3::bigint, $4::text, $5::text, $6::bigint, $7::bigint, $8::text, $9::bigint, "
    claim += "$10::bigint, $11::bigint, $12::text, $13::bigint, $14::bigint"
    mine = "$1::text, $2::text, $3::bigint, $4::text, "
    texts = {
        "claim": f"c.echo, c.outcome, c.now_ms, c.epoch, c.wait_ms, c.interrupted, {run} FROM ~.claim_1({claim}) AS c",
        "heartbeat": f"c.echo, c.accepted FROM ~.heartbeat_1({mine}$5::bigint, $6::text, $7::bigint) AS c",
        "finish": f"c.echo, c.accepted FROM ~.finish_1({mine}$5::text, $6::text, $7::bigint) AS c",
        "release": f"c.echo, c.accepted FROM ~.release_1({mine}$5::text, $6::bigint) AS c",
        "unfinished": f"{row} FROM ~.unfinished_1($1::text, $2::jsonb) AS r",
        "get": f"{row} FROM ~.get_1($1::text, $2::text, $3::bigint) AS r",
        "runs": f"{row} FROM ~.runs_1($1::text, $2::text, $3::bigint) AS r",
        "jobs": "j FROM ~.jobs_1($1::text) AS j",
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


def claim_answer(job: str, row: Row) -> ClaimAnswer:
    """The answer in a row of the statement `claim`."""
    token, outcome, now_ms, epoch, wait_ms, interrupted = row[:6]
    run = row[6:]
    return ClaimAnswer(
        one_of(_OUTCOMES, outcome),
        text(token),
        number(now_ms),
        text(epoch),
        None if run[1] is None else record(job, run),
        number(wait_ms),
        tuple(int(slot) for slot in (interrupted or b"").strip(b"{}").split(b",") if slot),
    )


def record(job: str, row: Row) -> Record:
    """The run in a row of COLUMNS; of that job, or it is malformed."""
    if text(row[0]) != job:
        raise ValueError(f"it belongs to {text(row[0])!r:.100}")
    if len(row[14] or b"") > ERROR_BYTES or len(row[15] or b"") > CHECKPOINT_BYTES:
        raise ValueError(f"its error has {len(row[14] or b'')} bytes, its checkpoint {len(row[15] or b'')}")
    checkpoint = None if row[15] is None else text(row[15])
    if checkpoint is not None:
        try:
            json.loads(checkpoint)
        except RecursionError as error:
            raise ValueError("its checkpoint is nested too deeply") from error
    ended_ms = None if row[13] is None else instant(row[13])
    found = Record(
        job=job,
        slot_ms=instant(row[1]),
        status=one_of(_STATUSES, row[2]),
        attempt=number(row[3]),
        handovers=number(row[4]),
        token=text(row[5]),
        runner=text(row[6]),
        fence=number(row[7]),
        lease_ms=number(row[8]),
        lease_end_ms=instant(row[9]),
        released=row[10] == b"t",
        reason=one_of(_REASONS, row[11]),
        started_ms=instant(row[12]),
        ended_ms=ended_ms,
        error=None if row[14] is None else text(row[14]),
        checkpoint=checkpoint,
        past=past(row[16]),
    )
    if found.attempt < 1 or found.handovers < 0 or (found.status == "running") != (ended_ms is None):
        raise ValueError(f"attempt {found.attempt}, {found.handovers} hand-overs, {found.status}, ended {ended_ms}")
    return found


def past(raw: bytes | None) -> tuple[PastAttempt, ...]:
    """The ended attempts of a run: a JSON list of [number, runner, started_ms, ended_ms, outcome]."""
    if raw == b"[]":
        return ()
    entries, found = json.loads(text(raw)), []
    if not isinstance(entries, list):
        raise ValueError(f"the past attempts are {entries!r:.100}")
    for entry in entries:
        number_, runner, started_ms, ended_ms, outcome = entry
        if type(number_) is not int or type(runner) is not str or outcome not in _PAST_OUTCOMES:
            raise ValueError(f"a past attempt is {entry!r:.100}")
        found.append(PastAttempt(number_, runner, instant(started_ms), instant(ended_ms), outcome))
    return tuple(found)


def text(raw: bytes | None) -> str:
    """A text that must be there."""
    if raw is None:
        raise ValueError("a text is missing")
    return raw.decode()


def number(raw: object) -> int:
    """A whole number that must be there."""
    if not isinstance(raw, (bytes, int)) or isinstance(raw, bool):
        raise ValueError(f"a number is {raw!r:.50}")
    found = int(raw)
    if not -HUGE <= found <= HUGE:
        raise ValueError(f"a number is {found}")
    return found


def instant(raw: object) -> int:
    """A time in milliseconds that a datetime can hold."""
    ms = number(raw)
    try:
        from_ms(ms)
    except OverflowError as error:
        raise ValueError(f"a time is {ms} ms") from error
    return ms


def one_of(allowed: tuple[T, ...], raw: bytes | None) -> T:
    """One of these words."""
    found = text(raw)
    for word in allowed:
        if word == found:
            return word
    raise ValueError(f"{found!r:.50} is none of {', '.join(allowed)}")
