"""What goes wrong with PostgreSQL, and what it means: a table by SQLSTATE. Owns nothing; any thread may call it.

`Failure` is what the connection and the pool raise; `store_error` turns it into the StoreError that callers see.
"""

from __future__ import annotations

import re

from leaselib.errors import StoreError

CONFLICTS = frozenset({"40001", "40P01"})
"""Serialization failure and deadlock: the server undid everything; the same statement may be sent again at once."""

NO_SCHEMA = frozenset({"3F000", "42P01", "42883", "42704"})
"""The schema, a table, a function or a type of it isn't there."""

STALE = frozenset({"25006"})
"""The server is read-only: a standby, or a primary that was demoted. Other connections go there too."""

_LOCKED = "55P03"
"""Lock not available: another transaction holds one job's records, such as a handler's own after ctx.finish."""

_TRANSIENT_CLASSES = frozenset(
    {
        "08",  # connection exceptions; also what pgbouncer reports of its own
        "53",  # insufficient resources: connections, memory, disk
        "57",  # operator intervention: shutdown, restart, recovery, cancelled; not a dropped database, see below
        "58",  # system errors outside the server, such as a failed read or write
    }
)
_TRANSIENT = frozenset(
    {
        "25006",  # read-only transaction
        "25P03",  # idle_in_transaction_session_timeout
        "25P04",  # transaction_timeout
        "40000",
        "40001",  # serialization failure
        "40003",  # statement completion unknown
        "40P01",  # deadlock
        "55006",  # object in use
        _LOCKED,
        "55000",  # object not in prerequisite state: a standby that is starting
    }
)
_PERMANENT = frozenset({"57P04"})  # the database was dropped

_RECORD_CLASSES = frozenset({"22", "23"})
"""Data exceptions and violated constraints: what is stored of the job, or was handed in, is at fault."""
_RECORD = frozenset({"XX001", "XX002"})
"""A damaged page or index: other jobs may well be readable."""

_ADVICE = {
    "28": "Check user, password and certificates in the URL, and the server's pg_hba.conf",
    "3D": "Create the database, or correct the name at the end of the URL",
    "42501": "Grant the role what leaselib needs: the output of `leaselib schema URL --grant ROLE` says it",
    _LOCKED: "Another transaction holds its records, perhaps a handler's own that has confirmed or finished its run",
    "25006": "Is it a standby? Name every host in the URL, with target_session_attrs=read-write",
    "53300": "Raise max_connections, or connect through pgbouncer",
    "57P04": "The database was dropped: correct the URL",
    "XX001": "A page of the database is damaged: restore it",
    "XX002": "An index of the database is damaged: REINDEX it",
}
# libpq keeps the SQLSTATE of a failed connect to itself, so only words are left; servers in other languages than
# English are taken for transient here, which costs a retry.
_CONNECT_PERMANENT = {
    "password authentication failed": "28P01",
    "no password supplied": "28P01",
    "authentication failed": "28000",
    "no pg_hba.conf entry": "28000",
    "is not permitted to log in": "28000",
    "no such user": "28000",
    "server does not support ssl": "28000",
    "certificate verify failed": "28000",
    "does not match host name": "28000",
    "certificate file": "28000",  # this side's own: not there, or not readable
    "private key file": "28000",
    "no such database": "3D000",
}
_CONNECT_FULL = ("too many clients", "connection slots", "too many connections", "no more connections allowed")


class Failure(Exception):
    """An operation that PostgreSQL, or the way to it, didn't carry out.

    Attributes:
        sqlstate: PostgreSQL's code; None if there was no answer from the server.
        broken: the connection can't be used again.
        unknown: whether the server has done, or will do, what it was asked isn't known.
    """

    def __init__(
        self, message: str, sqlstate: str | None = None, *, broken: bool = True, unknown: bool = False
    ) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.broken = broken
        self.unknown = unknown


def transient(sqlstate: str | None) -> bool:
    """Whether trying again, without anybody's help, may succeed. No SQLSTATE means that no server answered."""
    if sqlstate is None or sqlstate in _TRANSIENT:
        return True
    return sqlstate[:2] in _TRANSIENT_CLASSES and sqlstate not in _PERMANENT


def of_record(sqlstate: str | None) -> bool:
    """Whether only what is stored of one job is at fault."""
    return sqlstate is not None and (sqlstate[:2] in _RECORD_CLASSES or sqlstate in _RECORD)


def connect_sqlstate(message: str) -> str | None:
    """The SQLSTATE that a failed connect must have had, as far as its words tell."""
    lowered = message.lower()
    if any(words in lowered for words in _CONNECT_FULL):
        return "53300"
    for words, sqlstate in _CONNECT_PERMANENT.items():
        if words in lowered:
            return sqlstate
    if re.search(r"invalid \w+ value: ", lowered):  # what libpq refuses before it connects, such as sslmode=requre
        return "28000"
    missing = re.search(r'(role|database) ".*" does not exist', lowered)
    if missing is None:
        return None
    return "3D000" if missing[1] == "database" else "28000"


def store_error(failure: Failure, what: str, where: str, job: str | None) -> StoreError:
    """The StoreError for a failure.

    Args:
        failure: what happened.
        what: the operation, such as `claim of 'report'`.
        where: the server, without a password.
        job: the job that the operation was about; it is blamed only if its records are at fault, or locked.
    """
    state = failure.sqlstate
    words = [f"{what} failed at {where}: {failure}"]
    if state is not None:
        words[0] += f" (SQLSTATE {state})"
        advice = _ADVICE.get(state) or _ADVICE.get(state[:2])
        if advice is not None:
            words.append(advice)
    if job is not None and of_record(state):
        words.append(f"What is stored of {job!r} can't be used; look at it, and remove it if need be: other jobs go on")
    if failure.unknown:
        words.append("Whether it was carried out isn't known: send it again with the same token")
    blamed = job if of_record(state) or state == _LOCKED else None
    return StoreError(". ".join(words), transient=transient(state), job=blamed)
