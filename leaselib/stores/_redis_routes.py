"""Which server a call goes to: the only one, the primary that the sentinels name, or the node with the key's slot.

A route owns its nodes' connections and what it has learned about who is primary. Any thread may call it; each route has
one lock, held only to read or change what it has learned, never while talking to a server.
"""

from __future__ import annotations

import abc
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis
from redis.crc import key_slot

from leaselib.errors import StoreError
from leaselib.stores._redis_errors import code
from leaselib.stores._redis_net import Command, Deadline, Nodes
from leaselib.stores._redis_url import Address, Target

MAX_REDIRECTS = 5
Answer = TypeVar("Answer")
_NOT_PRIMARY = ("READONLY", "MASTERDOWN", "CLUSTERDOWN", "UNBLOCKED", "FAILOVER")


class Route(abc.ABC):
    """How commands find their server."""

    @abc.abstractmethod
    def exchange(self, key: str, commands: Sequence[Command], deadline: Deadline, *, urgent: bool) -> list[Any]:
        """Sends commands to the server that holds `key`, on one connection, and reads an answer for each.

        An answer may be a redis.ResponseError.

        Raises:
            redis.RedisError: no answer, or not from the right server.
            OSError: the same.
            StoreError: the same.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Closes all connections; the next call opens new ones."""

    @abc.abstractmethod
    def counts(self) -> tuple[int, int]:
        """How many connections there are, and how many of them are idle."""


def route_to(target: Target, sentinel_options: dict[str, Any], max_connections: int) -> Route:
    """The route for a parsed URL."""
    options = {"db": target.db, "username": target.username, "password": target.password}
    nodes = Nodes(options, target.tls, unix=target.kind == "unix", max_connections=max_connections)
    if target.kind == "cluster":
        return ClusterRoute(nodes, target.addresses)
    if target.kind == "sentinel":
        sentinels = Nodes(sentinel_options, target.tls, max_connections=max_connections)
        return SentinelRoute(nodes, sentinels, target.addresses, target.master)
    return SingleRoute(nodes, target.addresses[0])


class SingleRoute(Route):
    """One server, always under the same address."""

    def __init__(self, nodes: Nodes, address: Address) -> None:
        self._nodes, self._address = nodes, address

    def exchange(
        self,
        key: str,  # noqa: ARG002  there is only one place for all keys
        commands: Sequence[Command],
        deadline: Deadline,
        *,
        urgent: bool,
    ) -> list[Any]:
        """See Route."""
        answers = self._nodes.exchange(self._address, commands, deadline, urgent=urgent)
        if any(isinstance(answer, redis.ResponseError) and code(answer) in _NOT_PRIMARY for answer in answers):
            self._nodes.drop(self._address)  # the name may lead to another server by now
        return answers

    def close(self) -> None:
        """See Route."""
        self._nodes.close()

    def counts(self) -> tuple[int, int]:
        """See Route."""
        return self._nodes.counts()


class SentinelRoute(Route):
    """The primary that the sentinels name. They are asked again after anything that a failover could explain."""

    def __init__(self, nodes: Nodes, sentinels: Nodes, addresses: Sequence[Address], master: str) -> None:
        self._nodes, self._sentinels, self._master = nodes, sentinels, master
        self._addresses = list(addresses)
        self._primary: Address | None = None
        self._lock = threading.Lock()

    def exchange(
        self,
        key: str,  # noqa: ARG002  there is only one place for all keys
        commands: Sequence[Command],
        deadline: Deadline,
        *,
        urgent: bool,
    ) -> list[Any]:
        """See Route."""
        with self._lock:
            primary = self._primary
        if primary is None:
            primary = self._ask(deadline, urgent=urgent)
        try:
            answers = self._nodes.exchange(primary, commands, deadline, urgent=urgent)
        except (redis.RedisError, OSError):
            self._forget(primary)
            raise
        if any(isinstance(answer, redis.ResponseError) and code(answer) in _NOT_PRIMARY for answer in answers):
            self._forget(primary)
        return answers

    def _ask(self, deadline: Deadline, *, urgent: bool) -> Address:
        with self._lock:
            addresses = list(self._addresses)
        command = [("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master)]

        def one(address: Address, share: Deadline) -> Address:
            (answer,) = self._sentinels.exchange(address, command, share, urgent=urgent)
            if isinstance(answer, redis.ResponseError):
                raise answer
            if not answer:
                raise redis.ConnectionError(f"the sentinel at {address[0]}:{address[1]} knows no {self._master!r}")
            return answer[0].decode(), int(answer[1])

        asked, primary = _first_answer(addresses, one, deadline, "sentinels")
        with self._lock:
            self._primary = primary
            self._addresses.remove(asked)
            self._addresses.insert(0, asked)  # the one that answers is asked first the next time
        return primary

    def _forget(self, primary: Address) -> None:
        with self._lock:
            if self._primary == primary:
                self._primary = None
        self._nodes.drop(primary)

    def close(self) -> None:
        """See Route."""
        self._nodes.close()
        self._sentinels.close()

    def counts(self) -> tuple[int, int]:
        """See Route."""
        (opened, idle), (more, more_idle) = self._nodes.counts(), self._sentinels.counts()
        return opened + more, idle + more_idle


class ClusterRoute(Route):
    """The primaries of a Redis Cluster, by hash slot. The map is read when it is missing, and after any trouble."""

    def __init__(self, nodes: Nodes, addresses: Sequence[Address]) -> None:
        self._nodes, self._addresses = nodes, tuple(addresses)
        self._slots: dict[int, Address] = {}
        self._known: list[Address] = []  # the nodes of the last map, those that failed us last at the end
        self._lock = threading.Lock()

    def exchange(self, key: str, commands: Sequence[Command], deadline: Deadline, *, urgent: bool) -> list[Any]:
        """See Route. Follows MOVED and ASK; TRYAGAIN is for the caller."""
        slot = key_slot(key.encode())
        address, asking = self._node(slot, deadline, urgent=urgent), False
        for _ in range(MAX_REDIRECTS):
            sent = [("ASKING",), *commands] if asking else list(commands)
            try:
                answers = self._nodes.exchange(address, sent, deadline, urgent=urgent)[-len(commands) :]
            except (redis.RedisError, OSError):
                self._forget(address)
                raise
            word = code(answers[0]) if isinstance(answers[0], redis.ResponseError) else ""
            if word not in ("MOVED", "ASK"):
                if word in _NOT_PRIMARY:
                    self._forget(address)
                return answers
            asking = word == "ASK"
            address = _redirected(answers[0], address)
            if not asking:
                with self._lock:
                    self._slots[slot] = address
        raise redis.ConnectionError(f"the cluster passed the call on {MAX_REDIRECTS} times without an answer")

    def _node(self, slot: int, deadline: Deadline, *, urgent: bool) -> Address:
        with self._lock:
            address = self._slots.get(slot)
            known = list(dict.fromkeys([*self._known, *self._addresses]))
        if address is not None:
            return address

        def one(address: Address, share: Deadline) -> dict[int, Address]:
            (answer,) = self._nodes.exchange(address, [("CLUSTER", "SLOTS")], share, urgent=urgent)
            if isinstance(answer, redis.ResponseError):
                raise answer
            return _slots(answer, address)

        _, slots = _first_answer(known, one, deadline, "nodes of the cluster")
        with self._lock:
            self._slots, self._known = slots, list(dict.fromkeys(slots.values()))
        if slot not in slots:
            raise redis.ConnectionError(f"no node of the cluster serves slot {slot}")
        return slots[slot]

    def _forget(self, address: Address) -> None:
        with self._lock:
            self._slots = {}
            self._known = [*(node for node in self._known if node != address), address]
        self._nodes.drop(address)

    def close(self) -> None:
        """See Route."""
        self._nodes.close()

    def counts(self) -> tuple[int, int]:
        """See Route."""
        return self._nodes.counts()


def _first_answer(
    addresses: Sequence[Address], ask: Callable[[Address, Deadline], Answer], deadline: Deadline, who: str
) -> tuple[Address, Answer]:
    """Asks one after the other; each gets a share of the time, and some is left for the call itself."""
    failure: Exception | None = None
    for number, address in enumerate(addresses):
        try:
            return address, ask(address, deadline.share(len(addresses) - number + 1))
        except (redis.AuthenticationError, StoreError):
            raise
        except (redis.RedisError, OSError) as error:
            failure = error
    raise redis.ConnectionError(f"none of the {len(addresses)} {who} gave an answer; the last said: {failure}")


def _redirected(error: redis.ResponseError, asked: Address) -> Address:
    """Where MOVED or ASK points: `[MOVED] <slot> <host>:<port>`; no host means the one that was asked."""
    found = re.search(r"(\d+) (\S*):(\d+)$", str(error).strip())
    if found is None:
        raise redis.InvalidResponse(f"the cluster's redirection can't be read: {error}")
    return found.group(2) or asked[0], int(found.group(3))


def _slots(answer: Any, asked: Address) -> dict[int, Address]:
    """The answer to CLUSTER SLOTS: [first, last, [host, port, ...] of the primary, of replicas...], ..."""
    try:
        return {
            slot: (primary[0].decode() if primary[0] not in (None, b"", b"?") else asked[0], int(primary[1]))
            for first, last, primary, *_ in answer
            for slot in range(first, last + 1)
        }
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise redis.InvalidResponse(f"the cluster's list of slots can't be read: {error!r:.200}") from error
