"""What a Redis or Valkey server's errors mean: their codes, and whether trying again may help.

Owns nothing; any thread may call it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
_NO_PASSWORD = re.compile("NOAUTH|Authentication required|unauthenticated (multi)?bulk length|already authenticated")
"""A client that the server doesn't know yet may send no long request either: the answer to one has other words."""
_GARBLED = re.compile("(ERR )?Protocol error")
_NOT_ALLOWED = ("ACL failure in script", "The user executing the script can't")
_ADVICE = (
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
    (
        re.compile("^DENIED|in protected mode"),
        "lets in no client of another machine (protected-mode); give its default user a password, and the URL too",
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


def to_store_error(error: Exception, shown: str, job: str | None = None, keys: Sequence[str] = ()) -> StoreError:
    """The StoreError for whatever a call ran into.

    `shown` is the URL without its secrets; `keys` are those whose type of value the script relies on.
    """
    if isinstance(error, StoreError):
        return error
    word = code(error)
    if _NO_PASSWORD.search(str(error)) is not None:
        for_sentinels = ", those of the sentinels as ?sentinel_username= and ?sentinel_password="
        return StoreError(
            f"{shown} asks for a user and a password ({_cut(error)}); write them into the URL"
            f"{for_sentinels if '+sentinel://' in shown else ''}"
        )
    if word == "WRONGPASS" or isinstance(error, redis.AuthenticationError | exceptions.AuthorizationError):
        # before the errors of the connection, which the driver's classes for them count among
        return StoreError(
            f"{shown} refused the user or the password ({_cut(error)}); mend the URL, or the server's ACL"
        )
    if word == "NOPERM":
        return StoreError(
            f"{shown} doesn't allow this user what leaselib needs ({_cut(error)}); grant it with the ACL SETUSER line "
            f"that the README shows"
        )
    if word in ("MOVED", "ASK", "CROSSSLOT"):
        return StoreError(f"{shown} is a node of a Redis Cluster ({_cut(error)}); write redis+cluster:// into the URL")
    if word == "WRONGTYPE":
        return _wrong_type(error, job, keys)
    if word in TRANSIENT:
        return StoreError(f"{shown} answered {word}: {TRANSIENT[word]} ({_cut(error)})", transient=True)
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return StoreError(f"{shown} did not answer in time ({_cut(error)})", transient=True)
    return _other_trouble(error, shown)


def _other_trouble(error: Exception, shown: str) -> StoreError:
    if isinstance(error, redis.InvalidResponse):
        return StoreError(
            f"{shown} gave an answer that can't be understood ({_cut(error)}); look whether a Redis or Valkey server "
            f"listens at the URL's host and port, and whether anything on the way changes what it says",
            transient=True,
        )
    if isinstance(error, redis.ConnectionError | OSError):
        return StoreError(f"the connection to {shown} failed ({_cut(error)})", transient=True)
    if _GARBLED.match(str(error)) is not None:
        return StoreError(
            f"{shown} can't understand a request ({_cut(error)}); look whether anything on the way changes it",
            transient=True,
        )
    advice = next((advice for words, advice in _ADVICE if words.search(str(error)) is not None), None)
    return StoreError(f"{shown} {advice or 'could not carry out the operation'} ({_cut(error)})")


def _wrong_type(error: Exception, job: str | None, keys: Sequence[str]) -> StoreError:
    """The server's message doesn't tell the key."""
    which = f"the key {keys[0]}" if len(keys) == 1 else f"one of the keys {', '.join(keys)}" if keys else "a key"
    return StoreError(
        f"{which}{'' if job is None else f' of the job {job!r}'} holds another type of value ({_cut(error)}). TYPE "
        f"must say hash for :runs and zset for :slots; remove what is neither with DEL, and see who wrote it",
        job=job,
    )


def _cut(error: Exception) -> str:
    """The server's own words, on one line and not at length."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", f"{type(error).__name__}: {error}")[:300]
