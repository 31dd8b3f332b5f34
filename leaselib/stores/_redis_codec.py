"""How a RedisStore's data looks from Python: its keys, its scripts, and records read back as `Record`.

Owns the texts of the scripts, read once. Any thread may call it. What comes from the server is not trusted: it becomes
a sound Record or a ValueError that says what is wrong.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args
from urllib.parse import quote

from leaselib._model import PastAttempt, Reason, Record, Status, from_ms
from leaselib.stores import _assets

_EXACT = 2**53
"""Whole numbers up to here are exact in the server's scripts."""


@dataclass(frozen=True)
class Script:
    """One operation's Lua text, and the digest that the server knows it by."""

    name: str
    text: bytes
    sha: str


@functools.cache
def script(name: str) -> Script:
    """The script of that name, behind what all scripts share."""
    text = "\n".join(_assets.load("lua", f"{part}.lua") for part in ("common", name)).encode()
    return Script(name, text, hashlib.sha1(text, usedforsecurity=False).hexdigest())


@dataclass(frozen=True)
class Keys:
    """The keys of a namespace. Names are percent-encoded, so that no two make the same key, none holds a brace, and
    all keys of a job are in one hash slot: the one of `<namespace>:<job>`."""

    namespace: str

    @property
    def epoch(self) -> str:
        """The random identity of the namespace's data."""
        return f"leaselib:{_quoted(self.namespace)}:epoch"

    @property
    def jobs(self) -> str:
        """The set of the names of its jobs."""
        return f"leaselib:{_quoted(self.namespace)}:jobs"

    def runs(self, job: str) -> str:
        """The hash of a job's records."""
        return f"leaselib:{{{self._tag(job)}}}:runs"

    def slots(self, job: str) -> str:
        """The sorted set of its slots."""
        return f"leaselib:{{{self._tag(job)}}}:slots"

    def _tag(self, job: str) -> str:
        return f"{_quoted(self.namespace)}:{_quoted(job)}"


@functools.lru_cache(maxsize=10_000)
def _quoted(name: str) -> str:
    """Percent-encoded. A name that can't exist, with a lone surrogate, makes a key that doesn't exist."""
    return quote(name, safe="", errors="surrogatepass")


def read_record(job: str, raw: Any, checkpoint: Any, past: Any) -> Record:
    """The record of a run from its three fields; the last two may be missing.

    Raises:
        ValueError: it is malformed; says how.
    """
    try:
        data = json.loads(_text(raw))
    except RecursionError:
        raise ValueError("a record is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("a record is no JSON object")
    status, ended = _one_of(data, "status", get_args(Status)), data.get("ended")
    if (ended is None) != (status == "running"):
        raise ValueError("a record's end and its status disagree")
    error = data.get("error")
    if not isinstance(error, str | None):
        raise ValueError("a record's error is no text")
    released = data.get("released")
    if not isinstance(released, bool):
        raise ValueError("a record's released is neither true nor false")
    return Record(
        job=job,
        slot_ms=_instant(data, "slot"),
        status=cast(Status, status),
        attempt=_whole(data, "attempt", 1),
        handovers=_whole(data, "handovers", 0),
        token=_str(data, "token"),
        runner=_str(data, "runner"),
        fence=_whole(data, "fence", 0),
        lease_ms=_whole(data, "lease", 0),
        lease_end_ms=_instant(data, "lease_end"),
        released=released,
        reason=cast(Reason, _one_of(data, "reason", get_args(Reason))),
        started_ms=_instant(data, "started"),
        ended_ms=None if ended is None else _instant(data, "ended"),
        error=error,
        checkpoint=None if checkpoint is None else _checkpoint(checkpoint),
        past=() if past is None else _past(past),
    )


def _text(raw: Any) -> str:
    if not isinstance(raw, bytes):
        raise ValueError(f"expected text, found {raw!r:.40}")
    return raw.decode("utf-8")  # its error is a ValueError


def _str(data: dict[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise ValueError(f"a record's {name} is no text: {value!r:.40}")
    return value


def _one_of(data: dict[str, Any], name: str, allowed: tuple[str, ...]) -> str:
    value = _str(data, name)
    if value not in allowed:
        raise ValueError(f"a record's {name} is {value!r:.40}, which is none of {', '.join(allowed)}")
    return value


def _whole(data: dict[str, Any], name: str, least: int) -> int:
    value = data.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _EXACT:
        raise ValueError(f"a record's {name} is no possible number: {value!r:.40}")
    return value


def _instant(data: dict[str, Any], name: str) -> int:
    value = _whole(data, name, -_EXACT)
    try:
        from_ms(value)
    except OverflowError:
        raise ValueError(f"a record's {name} is no date: {value}") from None
    return value


def _checkpoint(raw: Any) -> str:
    text = _text(raw)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("a checkpoint is no JSON") from None
    return text


def _past(raw: Any) -> tuple[PastAttempt, ...]:
    found = []
    for line in _text(raw).split("\n"):
        try:
            number, runner, started, ended, outcome = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            raise ValueError("the log of past attempts can't be read") from None
        data = {"number": number, "runner": runner, "started": started, "ended": ended, "outcome": outcome}
        found.append(
            PastAttempt(
                number=_whole(data, "number", 1),
                runner=_str(data, "runner"),
                started_ms=_instant(data, "started"),
                ended_ms=_instant(data, "ended"),
                outcome=cast(Literal["expired", "handed-over"], _one_of(data, "outcome", ("expired", "handed-over"))),
            )
        )
    return tuple(found)
