"""Connections to Redis and Valkey servers: one total deadline for whatever a call does on them, and a bounded number.

Owns the sockets. Any thread may call it: each pool is guarded by the condition that it holds, the map of pools by a
lock, and nobody waits for the network while holding one. A connection belongs to one call at a time. It is closed, and
never used again, as soon as anything unexpected happens on it: a time-out, an interrupt, an answer for another call.

redis-py does what a driver does (the protocol, the handshake, the classes of errors). How long anything may take,
whether it is tried again, and how many connections there are is decided here and above.
"""

from __future__ import annotations

import inspect
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from leaselib import _clock
from leaselib.errors import StoreError
from leaselib.stores._lookup import Names
from leaselib.stores._redis_url import Address

Command = tuple[Any, ...]
Follow = Callable[[Any], Sequence[Command]]
"""Says what else to send on the same connection, given the answer to the last command."""


class Deadline:
    """The instant, on the clock that can't be set, at which an operation gives up."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._end_ns = _clock.SYSTEM.boot_ns() + int(timeout * 1e9)

    def left(self) -> float:
        """Seconds until then.

        Raises:
            TimeoutError: none are left.
        """
        left = (self._end_ns - _clock.SYSTEM.boot_ns()) / 1e9
        if left <= 0:
            raise TimeoutError("the operation's time is up")
        return left

    def share(self, parts: int) -> Deadline:
        """The part of this deadline that the first of `parts` equal tries may use up."""
        return Deadline(self.left() / parts)


class NoConnection(StoreError):
    """All connections that may be open are in use: says nothing about the server or the network."""


class _DeadlineSocket:
    """A connected socket that gives every send and receive what is left of the current call's deadline.

    A socket's own time-out starts afresh with each byte that arrives; a slow server could stretch a call for ever.
    """

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        self._sock, self._connection = sock, connection

    def settimeout(self, timeout: float | None) -> None:
        """The driver's own ideas of time-outs don't count."""

    def recv(self, *args: Any) -> bytes:
        self._sock.settimeout(self._connection.deadline.left())
        return self._sock.recv(*args)

    def recv_into(self, *args: Any) -> int:
        self._sock.settimeout(self._connection.deadline.left())
        return self._sock.recv_into(*args)

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self._connection.deadline.left())
        self._sock.sendall(data)

    def quiet(self) -> bool:
        """Whether the connection is open and nothing has arrived on it: what an idle one must be."""
        try:
            self._sock.settimeout(0)
            self._sock.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False  # end of file, or an answer that nobody asked for

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class Connection(redis.Connection):
    """One connection; TCP, TLS or Unix socket. Used by one call at a time, within `deadline`."""

    deadline: Deadline

    def __init__(
        self, address: Address, options: dict[str, Any], tls: ssl.SSLContext | None, unix: bool, names: Names
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            host=address[0],
            port=address[1],
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,
            socket_connect_timeout=None,
            health_check_interval=0,
            decode_responses=False,
            protocol=2,
            **_quiet_handshake(),
            **options,
        )
        self._address, self._tls, self._unix, self._names = address, tls, unix, names
        self.generation = 0

    def exchange(self, commands: Sequence[Command], deadline: Deadline, follow: Follow | None = None) -> list[Any]:
        """Sends the commands in one go and reads an answer for each; an answer may be a redis.ResponseError.

        Then does the same with what `follow` says.
        """
        self.deadline = deadline
        answers = self._ask(commands)
        more = () if follow is None else follow(answers[-1])
        return answers + self._ask(more) if more else answers

    def _ask(self, commands: Sequence[Command]) -> list[Any]:
        driver: Any = self  # its methods have no types
        driver.send_packed_command(driver.pack_commands(commands), check_health=False)
        answers: list[Any] = []
        for _ in commands:
            try:
                answers.append(self.read_response())
            except redis.ResponseError as error:
                answers.append(error)
        return answers

    def let_go(self) -> None:
        """Closes the socket; a later exchange would connect anew."""
        self.disconnect()  # type: ignore[no-untyped-call]

    def usable(self) -> bool:
        """Whether an idle connection can be used once more. One that isn't open yet can."""
        return self._sock is None or self._sock.quiet()

    def _connect(self) -> Any:
        """Connects within the deadline, whatever the number of addresses behind the name."""
        error: OSError = OSError(f"{self._address[0]!r} has no address")
        for family, kind, protocol, _, place in self._places():
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(self.deadline.left())
                sock.connect(place)
                if not self._unix:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if self._tls is not None:
                    sock.settimeout(self.deadline.left())
                    sock = self._tls.wrap_socket(sock, server_hostname=self._address[0])
                return _DeadlineSocket(sock, self)
            except ssl.SSLCertVerificationError as failure:
                sock.close()
                raise StoreError(
                    f"the certificate of {self._address[0]}:{self._address[1]} was refused: "
                    f"{failure.verify_message}. Connect by a name that the certificate holds, and name the authority "
                    f"that signed it with ?ssl_ca_certs=FILE"
                ) from failure
            except OSError as failure:
                sock.close()
                error = failure
        raise error

    def _places(self) -> list[Any]:
        if self._unix:
            return [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", self._address[0])]
        host, port = self._address
        try:  # an address needs no look-up
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            return self._names.find(host, port, self.deadline.left())


def _quiet_handshake() -> dict[str, Any]:
    """Leaves out the two commands by which newer drivers introduce themselves at each connect."""
    known = inspect.signature(redis.connection.AbstractConnection.__init__).parameters
    return {"driver_info": None} if "driver_info" in known else {"lib_name": None, "lib_version": None}


class Pool:
    """The connections of one kind of call to one server: as many as are used at once, `size` at most."""

    def __init__(self, make: Callable[[], Connection], size: int) -> None:
        self._make, self._size = make, size
        self._idle: list[Connection] = []
        self._open = 0
        self._generation = 0
        self._free = threading.Condition()

    def exchange(self, commands: Sequence[Command], deadline: Deadline, follow: Follow | None = None) -> list[Any]:
        """See Connection.exchange. Waits for a free connection no longer than the deadline."""
        connection = self._take(deadline)
        done = False
        try:
            if not connection.usable():
                connection.let_go()  # the server closed it while it was idle; it connects anew
            answers = connection.exchange(commands, deadline, follow)
            done = True
            return answers
        finally:
            self._put_back(connection, keep=done)

    def _take(self, deadline: Deadline) -> Connection:
        with self._free:
            while not self._idle and self._open >= self._size:
                try:
                    self._free.wait(deadline.left())
                except TimeoutError:
                    raise NoConnection(
                        f"all {self._size} connections were in use for {deadline.timeout:.3g} s; raise max_connections "
                        f"if the server is well",
                        transient=True,
                    ) from None
            if self._idle:
                return self._idle.pop()
            connection = self._make()
            connection.generation = self._generation
            self._open += 1
            return connection

    def _put_back(self, connection: Connection, *, keep: bool) -> None:
        if not keep:
            connection.let_go()
        with self._free:
            kept = keep and connection.generation == self._generation
            if kept:
                self._idle.append(connection)
            else:
                self._open -= 1
            self._free.notify()
        if keep and not kept:
            connection.let_go()

    def close(self) -> None:
        """Closes what is idle; what is in use is closed when its call ends. The next call connects anew."""
        with self._free:
            idle, self._idle = self._idle, []
            self._generation += 1
            self._open -= len(idle)
            self._free.notify_all()
        for connection in idle:
            connection.let_go()

    def counts(self) -> tuple[int, int]:
        """How many connections there are, and how many of them are idle."""
        with self._free:
            return self._open, len(self._idle)


class Nodes:
    """The pools of every server that was talked to: two for each, so that heartbeats never queue behind claims."""

    def __init__(
        self, options: dict[str, Any], tls: ssl.SSLContext | None, *, unix: bool = False, max_connections: int
    ) -> None:
        self._options, self._tls, self._unix, self._names = options, tls, unix, Names()
        claims = max(1, max_connections // 4)
        self._sizes = {True: max_connections - claims, False: claims}
        self._pools: dict[tuple[Address, bool], Pool] = {}
        self._lock = threading.Lock()

    def exchange(
        self,
        address: Address,
        commands: Sequence[Command],
        deadline: Deadline,
        *,
        urgent: bool,
        follow: Follow | None = None,
    ) -> list[Any]:
        """See Connection.exchange. Urgent are heartbeats, finishes and releases."""
        with self._lock:
            pool = self._pools.get((address, urgent))
            if pool is None:
                pool = self._pools[address, urgent] = Pool(lambda: self._connection(address), self._sizes[urgent])
        return pool.exchange(commands, deadline, follow)

    def _connection(self, address: Address) -> Connection:
        return Connection(address, self._options, self._tls, self._unix, self._names)

    def drop(self, address: Address) -> None:
        """Closes the connections to one server: it isn't what it was."""
        with self._lock:
            pools = [pool for (place, _), pool in self._pools.items() if place == address]
        for pool in pools:
            pool.close()

    def close(self) -> None:
        """Closes all connections; the next call opens new ones."""
        with self._lock:
            pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.close()

    def counts(self) -> tuple[int, int]:
        """How many connections there are, to all servers together, and how many of them are idle."""
        with self._lock:
            counts = [pool.counts() for pool in self._pools.values()]
        return sum(opened for opened, _ in counts), sum(idle for _, idle in counts)
