"""Which server a call goes to: the only one, the primary that the sentinels name, or the node with the key's slot.

A route owns its nodes' connections and what it has learned about who is primary. Any thread may call it; a route that
learns has one lock, held only to read or change what it has learned, never while talking to a server.
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
from leaselib.stores._redis_errors import TRANSIENT, code
from leaselib.stores._redis_net import Command, Deadline, Follow, NoConnection, Nodes
from leaselib.stores._redis_url import Address, Target, is_host

MAX_REDIRECTS = 5
SLOTS = 16384
Answer = TypeVar("Answer")
_NOT_PRIMARY = ("READONLY", "MASTERDOWN", "CLUSTERDOWN", "UNBLOCKED", "FAILOVER")
_OF_THE_KEY = ("NOSCRIPT", "TRYAGAIN", "WRONGTYPE")
"""Errors of a server that is well."""
_UNREADABLE = (TypeError, ValueError, AttributeError, IndexError)
_FAULTS = (redis.RedisError, OSError, StoreError)
"""What an exchange raises. All but NoConnection mean that the server or the way to it isn't what it was, and so does a
certificate that was refused."""


class Route(abc.ABC):
    """How commands find their server."""

    @abc.abstractmethod
    def exchange(
        self, key: str, command: Command, deadline: Deadline, *, urgent: bool, follow: Follow | None = None
    ) -> list[Any]:
        """Sends a command to the server that holds `key`, then on the same connection what `follow` says.

        Returns the answers; each may be a redis.ResponseError.

        Raises:
            redis.RedisError: no answer, or not from the right server.
            OSError: the same.
            StoreError: the same.
        """

    def partly_well(self) -> bool:
        """Whether trouble is that of a part of the store. It isn't, where one server is all of it."""
        return False

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
        command: Command,
        deadline: Deadline,
        *,
        urgent: bool,
        follow: Follow | None = None,
    ) -> list[Any]:
        """See Route. After trouble all idle connections are dropped: the name may lead to another server by now, and
        what one connection met awaits the others.
        """
        try:
            answers = self._nodes.exchange(self._address, [command], deadline, urgent=urgent, follow=follow)
        except _FAULTS as error:
            if not isinstance(error, NoConnection):
                self._nodes.drop(self._address)
            raise
        if _word(answers[0]) in _NOT_PRIMARY:
            self._nodes.drop(self._address)
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
        command: Command,
        deadline: Deadline,
        *,
        urgent: bool,
        follow: Follow | None = None,
    ) -> list[Any]:
        """See Route."""
        with self._lock:
            primary = self._primary
        if primary is None:
            primary = self._ask(deadline, urgent=urgent)
        try:
            answers = self._nodes.exchange(primary, [command], deadline, urgent=urgent, follow=follow)
        except _FAULTS as error:
            if not isinstance(error, NoConnection):
                self._forget(primary)
            raise
        if _word(answers[0]) in _NOT_PRIMARY:
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
            if answer is None:
                raise redis.ConnectionError(f"the sentinel at {address[0]}:{address[1]} knows no {self._master!r}")
            try:
                return _primary(answer, address)
            except redis.InvalidResponse:
                self._sentinels.drop(address)
                raise

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
        self._well: dict[Address, bool] = {}  # whether it carried out a script, or failed, when it was last asked
        self._lock = threading.Lock()

    def exchange(
        self, key: str, command: Command, deadline: Deadline, *, urgent: bool, follow: Follow | None = None
    ) -> list[Any]:
        """See Route. Follows MOVED and ASK; TRYAGAIN is for the caller."""
        slot = key_slot(key.encode())
        address, asking = self._node(slot, deadline, urgent=urgent), False
        for _ in range(MAX_REDIRECTS):
            sent = [("ASKING",), command] if asking else [command]
            answers = self._at(address, sent, deadline, urgent=urgent, follow=follow)[len(sent) - 1 :]
            word = _word(answers[0])
            if word not in ("MOVED", "ASK"):
                with self._lock:  # that it is loading, or full, or lets us in no more, is no proper answer
                    self._well[address] = word in _OF_THE_KEY or not isinstance(answers[0], redis.ResponseError)
                if word in _NOT_PRIMARY:
                    self._forget(address)
                return answers
            asking = word == "ASK"
            address = self._read(_redirected, answers[0], address)
            if not asking:
                with self._lock:
                    self._slots[slot] = address
                    self._known = list(dict.fromkeys([*self._known, address]))
        raise redis.ConnectionError(f"the cluster passed the call on {MAX_REDIRECTS} times without an answer")

    def exchange_anywhere(self, command: Command, deadline: Deadline) -> Any:
        """The answer to a command without keys, by whichever node gives one first. Raises as `exchange` does."""

        def one(address: Address, share: Deadline) -> Any:
            (answer,) = self._at(address, [command], share, urgent=False)
            if isinstance(answer, redis.ResponseError):
                raise answer
            return answer

        return _first_answer(self._nodes_to_ask(), one, deadline, "nodes of the cluster")[1]

    def partly_well(self) -> bool:
        """See Route: some node carried out what it was last asked for."""
        known = self._nodes_to_ask()
        with self._lock:
            return any(self._well.get(node, False) for node in known)

    def _at(
        self,
        address: Address,
        commands: Sequence[Command],
        deadline: Deadline,
        *,
        urgent: bool,
        follow: Follow | None = None,
    ) -> list[Any]:
        try:
            return self._nodes.exchange(address, commands, deadline, urgent=urgent, follow=follow)
        except _FAULTS as error:
            if not isinstance(error, NoConnection):
                self._forget(address)
            raise

    def _nodes_to_ask(self) -> list[Address]:
        with self._lock:
            return list(dict.fromkeys([*self._known, *self._addresses]))

    def _node(self, slot: int, deadline: Deadline, *, urgent: bool) -> Address:
        with self._lock:
            address = self._slots.get(slot)
        if address is not None:
            return address

        def one(address: Address, share: Deadline) -> dict[int, Address]:
            (answer,) = self._at(address, [("CLUSTER", "SLOTS")], share, urgent=urgent)
            if isinstance(answer, redis.ResponseError):
                raise answer
            slots = self._read(_slots, answer, address)
            if slot not in slots:  # or it doesn't know: it may have lost the others
                raise redis.ConnectionError(f"{address[0]}:{address[1]} knows no node that serves slot {slot}")
            return slots

        _, slots = _first_answer(self._nodes_to_ask(), one, deadline, "nodes of the cluster")
        with self._lock:
            nodes = list(dict.fromkeys(slots.values()))
            self._slots, self._known = slots, sorted(nodes, key=lambda node: self._well.get(node) is False)
        return slots[slot]

    def _read(self, read: Callable[[Any, Address], Answer], answer: Any, address: Address) -> Answer:
        """What a node's answer says. After one that can't be understood its connections are closed."""
        try:
            return read(answer, address)
        except redis.InvalidResponse:
            self._forget(address)
            raise

    def _forget(self, address: Address) -> None:
        with self._lock:
            self._slots = {}
            self._known = [*(node for node in self._known if node != address), address]
            self._well[address] = False
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
    refusal: redis.RedisError | OSError | None = None
    for number, address in enumerate(addresses):
        try:
            return address, ask(address, deadline.share(len(addresses) - number + 1))
        except NoConnection as error:
            failure = error
        except StoreError:
            raise
        except (redis.RedisError, OSError) as error:
            failure = error
            refused = isinstance(error, redis.ResponseError) and code(error) not in TRANSIENT
            if refused or isinstance(error, redis.AuthenticationError):
                refusal = error
    if refusal is not None:  # it will say the same the next time: the wrong kind of server, or a right is missing
        raise refusal
    kind = redis.InvalidResponse if isinstance(failure, redis.InvalidResponse) else redis.ConnectionError
    raise kind(f"none of the {len(addresses)} {who} gave an answer; the last said: {failure}")


def _word(answer: Any) -> str:
    """The code of an answer that is an error; else empty."""
    return code(answer) if isinstance(answer, redis.ResponseError) else ""


def _redirected(error: redis.ResponseError, asked: Address) -> Address:
    """Where MOVED or ASK points: `[MOVED] <slot> <host>:<port>`; no host, or `?`, means the one that was asked."""
    found = re.search(r"[0-9] (\S*):([0-9]+)$", str(error).strip())
    try:
        host, port = found.groups() if found is not None else ()
        return _place(host, port, asked)
    except _UNREADABLE:
        raise redis.InvalidResponse(f"the cluster's redirection can't be read: {error!s:.200}") from None


def _slots(answer: Any, asked: Address) -> dict[int, Address]:
    """The answer to CLUSTER SLOTS: [first, last, [host, port, ...] of the primary, of replicas...], ..."""
    try:
        return {
            slot: place
            for first, last, primary, *_ in answer
            for place in [_place(primary[0], primary[1], asked)]
            for slot in range(max(0, first), min(last, SLOTS - 1) + 1)
        }
    except _UNREADABLE as error:
        raise redis.InvalidResponse(f"the cluster's list of slots can't be read: {error!r:.200}") from error


def _primary(answer: Any, asked: Address) -> Address:
    """The answer to SENTINEL GET-MASTER-ADDR-BY-NAME: host and port."""
    try:
        host, port = answer
        return _place(host, port, asked)
    except _UNREADABLE as error:
        raise redis.InvalidResponse(f"the sentinel's answer can't be read: {error!r:.200}") from error


def _place(host: Any, port: Any, asked: Address) -> Address:
    """Where a server says that another is: no host, or `?`, means the one that was asked. Raises one of _UNREADABLE."""
    name = "" if host is None else host if isinstance(host, str) else host.decode()
    number = int(port)
    if not 0 < number < 65536 or not (name in ("", "?") or is_host(name)):
        raise ValueError(f"{name!r:.100} and {number} are no host and port")
    return (asked[0] if name in ("", "?") else name), number
