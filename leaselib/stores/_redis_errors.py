"""What a Redis or Valkey server's errors mean: their codes, and whether trying again may help.

Owns nothing; any thread may call it.
"""

from __future__ import annotations

import re

import redis
from redis import exceptions

from leaselib.errors import StoreError

_CLASSES: tuple[tuple[type[Exception], str], ...] = (
    (exceptions.NoScriptError, "NOSCRIPT"),
    (exceptions.OutOfMemoryError, "OOM"),
    (exceptions.ReadOnlyError, "READONLY"),
    (exceptions.NoPermissionError, "NOPERM"),
    (exceptions.MovedError, "MOVED"),  # before its base, AskError
    (exceptions.AskError, "ASK"),
    (exceptions.TryAgainError, "TRYAGAIN"),
    (exceptions.MasterDownError, "MASTERDOWN"),  # before its base, ClusterDownError
    (exceptions.ClusterDownError, "CLUSTERDOWN"),
    (exceptions.ClusterCrossSlotError, "CROSSSLOT"),
)
"""The driver cuts the code off a message if it knows a class for it, and which ones it knows depends on its version."""

TRANSIENT = {
    "BUSY": "a script has been running for too long on the server",
    "CLUSTERDOWN": "the cluster doesn't serve this slot now",
    "FAILOVER": "a failover is under way",
    "LOADING": "the server is loading its data",
    "MASTERDOWN": "the replica has lost its primary",
    "MISCONF": "the server can't save its data and refuses writes; look at its disk and its log",
    "NOREPLICAS": "too few replicas are connected (min-replicas-to-write)",
    "OOM": "the server's memory is full (maxmemory); give it more, or remove data",
    "READONLY": "the server is a replica now, or was made read-only",
    "TRYAGAIN": "the slot is being moved to another node",
    "UNBLOCKED": "the server's role changed",
    "UNKILLABLE": "a script is being killed on the server",
}
"""Codes after which the same call may succeed later without anybody changing leaselib's settings."""
_CODE = re.compile(rf"(?:^|[\s:-])({'|'.join(TRANSIENT)}|NOPERM|WRONGTYPE|NOAUTH|WRONGPASS)\b")
_NOT_ALLOWED = ("ACL failure in script", "The user executing the script can't")
_WRONG_URL = (
    (
        re.compile("DB index is out of range|SELECT is not allowed"),
        "has no such database; write another number into the URL",
    ),
    (
        re.compile("cluster support disabled"),
        "is no Redis Cluster; write redis:// into the URL instead of redis+cluster://",
    ),
    (
        re.compile("unknown command .SENTINEL", re.IGNORECASE),
        "is no sentinel; write the sentinels' own host:port into the URL, or redis:// to go to the server itself",
    ),
)


def code(error: BaseException) -> str:
    """The server's own word for an error, such as READONLY; empty if it has none. Scripts wrap it in other words."""
    for kind, word in _CLASSES:
        if isinstance(error, kind):
            return word
    message = str(error)
    if any(words in message for words in _NOT_ALLOWED):
        return "NOPERM"
    found = _CODE.search(message)
    if found is not None:
        return found.group(1)
    first = message.split(" ", 1)[0]
    return first if first in ("NOSCRIPT", "MOVED", "ASK", "CROSSSLOT") else ""


def to_store_error(error: Exception, shown: str, job: str | None = None) -> StoreError:
    """The StoreError for whatever a call ran into. `shown` is the URL without its secrets."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, redis.AuthenticationError | exceptions.AuthorizationError):  # they are ConnectionErrors too
        return StoreError(
            f"{shown} refused the user or the password ({_cut(error)}); mend the URL, or the server's ACL"
        )
    word = code(error)
    if word == "NOPERM":
        return StoreError(
            f"{shown} doesn't allow this user what leaselib needs ({_cut(error)}); grant it with the ACL SETUSER line "
            f"that the README shows"
        )
    if word in ("MOVED", "ASK", "CROSSSLOT"):
        return StoreError(f"{shown} is a node of a Redis Cluster ({_cut(error)}); write redis+cluster:// into the URL")
    if word in ("NOAUTH", "WRONGPASS"):
        return StoreError(f"{shown} asks for a user and a password ({_cut(error)}); write them into the URL")
    if word == "WRONGTYPE":
        return StoreError(
            f"a key of the job {job!r} holds another type of value ({_cut(error)}); remove it, and see who wrote it",
            job=job,
        )
    if word in TRANSIENT:
        return StoreError(f"{shown} answered {word}: {TRANSIENT[word]} ({_cut(error)})", transient=True)
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return StoreError(f"{shown} did not answer in time ({_cut(error)})", transient=True)
    if isinstance(error, redis.ConnectionError | redis.InvalidResponse | OSError):
        return StoreError(f"the connection to {shown} failed ({_cut(error)})", transient=True)
    advice = next((advice for words, advice in _WRONG_URL if words.search(str(error)) is not None), None)
    return StoreError(f"{shown} {advice or 'could not carry out the operation'} ({_cut(error)})")


def _cut(error: Exception) -> str:
    """The server's own words, on one line and not at length."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", f"{type(error).__name__}: {error}")[:300]
