"""Connections to Redis and Valkey servers: one total deadline for whatever a call does on them, and a bounded number.

Owns the sockets. Any thread may call it: each pool is guarded by the condition that it holds, the map of pools by a
lock, and nobody waits for the network while holding one. A connection belongs to one call at a time. It is closed, and
never used again, as soon as anything unexpected happens on it: a time-out, an interrupt, an answer for another call.

redis-py does what a driver does (the protocol, the handshake, the classes of errors). How long anything may take,
whether it is tried again, and how many connections there are is decided here and above. What a peer sends is met here:
its first bytes by _DeadlineSocket, the rest by Connection.read_response, which turns whatever the driver's parser makes
of rubbish into an error of the driver.
"""

from __future__ import annotations

import contextlib
import inspect
import re
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
SERVER_LACKS_TLS = (
    "the server may not speak TLS on this port: write redis:// (or redis+sentinel://, redis+cluster://) into the URL"
)
SERVER_HAS_TLS = (
    "the server may speak TLS on this port: write rediss:// (or rediss+sentinel://, rediss+cluster://) into the URL"
)
_MARKS = b"+-:$*"
"""What an answer may begin with."""
_NO_SIZE = re.compile(rb"[$*](\d{10}|-[02-9]|-1\d)")
"""A size that no answer has, a gigabyte or more, or a negative one: the driver would wait for its end."""
_TLS_ALERT = b"\x15\x03"
_NO_TLS = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "BAD_RECORD_TYPE", "HTTP_REQUEST",
    "UNKNOWN_PROTOCOL", "UNEXPECTED_EOF_WHILE_READING")  # fmt: skip
"""How OpenSSL calls it, by version, when what answers a handshake isn't TLS."""
_ODD_HANDSHAKE = ("Invalid Username or Password", "Invalid Database")
"""The driver's own words for an answer to AUTH or SELECT that is neither OK nor an error."""
_HUNG_UP = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""How Python calls it, by version, when the connection ends instead."""
_STUMBLES = (ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, LookupError, MemoryError,
    RuntimeError, TypeError, ValueError)  # fmt: skip
"""What a parser can raise that was written for servers that keep to the protocol; there are two of them."""
_ECHO = re.compile(r",? with args beginning with.*", re.DOTALL)


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
    It refuses at once what can't be the beginning of an answer: the parser would wait for more of it.

    Attributes:
        silent: nothing has ever arrived.
    """

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        self._sock, self._connection = sock, connection
        self.silent = True
        self._awaited = True  # what arrives next begins an answer

    def settimeout(self, timeout: float | None) -> None:
        """The driver's own ideas of time-outs don't count."""

    def recv(self, *args: Any) -> bytes:
        self._sock.settimeout(self._connection.deadline.left())
        data = self._sock.recv(*args)
        self._check(data[:40])
        return data

    def recv_into(self, buffer: Any, *args: Any) -> int:
        self._sock.settimeout(self._connection.deadline.left())
        count = self._sock.recv_into(buffer, *args)
        self._check(bytes(memoryview(buffer)[: min(count, 40)]))
        return count

    def sendall(self, data: bytes) -> None:
        self._awaited = True
        self._sock.settimeout(self._connection.deadline.left())
        try:
            self._sock.sendall(data)
        except TimeoutError:
            raise
        except OSError as error:  # the peer hung up in the middle of a request; it may have said why
            said = b""
            with contextlib.suppress(OSError):
                self._sock.settimeout(0)
                said = self._sock.recv(4096)
            self._check(said[:40])
            if said[:1] == b"-":
                raise self._connection.error_of(said) from None
            if said:
                raise redis.InvalidResponse(f"it sent {said[:40]!r} before it had the whole request") from None
            raise self._connection.loss(redis.ConnectionError(f"while writing: {error}"), self) from error

    def _check(self, start: bytes) -> None:
        if not (start and self._awaited):
            return
        self.silent = self._awaited = False
        if start.startswith(_TLS_ALERT):
            raise redis.ConnectionError(f"it answered with a TLS alert; {SERVER_HAS_TLS}")
        if start[0] not in _MARKS or _NO_SIZE.match(start):
            raise redis.InvalidResponse(f"what it sent begins with {start!r}")

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
        try:
            driver.send_packed_command(driver.pack_commands(commands), check_health=False)
        except redis.ConnectionError as error:
            if str(error) in _ODD_HANDSHAKE:
                raise redis.InvalidResponse("what it said to AUTH or SELECT is neither OK nor an error") from None
            raise
        answers: list[Any] = []
        for _ in commands:
            try:
                answers.append(self.read_response())
            except redis.ResponseError as error:
                answers.append(error)
        return answers

    def read_response(self, *args: Any, **options: Any) -> Any:
        """The next answer, also those of the handshake. The driver closes the connection with any other error.

        Raises:
            redis.ResponseError: that is the answer.
            redis.InvalidResponse: what arrived can't be understood, in whatever way the parser failed.
            redis.RedisError: no answer.
        """
        driver: Any = super()
        sock: Any = self._sock  # the driver forgets it when something fails
        first = sock.silent
        try:
            return driver.read_response(*args, **options)
        except (redis.RedisError, OSError) as error:
            if first:  # the only answer that could repeat the password: that to AUTH
                error.args = tuple(self._without_secret(str(arg)) for arg in error.args)
            if type(error) is redis.ConnectionError and (guess := self.loss(error, sock)) is not error:
                raise guess from error
            raise
        except _STUMBLES as error:
            words = self._without_secret(f"{type(error).__name__}: {error}")
            raise redis.InvalidResponse(f"the driver stumbled over it with {words:.100}") from None

    def loss(self, error: redis.ConnectionError, sock: _DeadlineSocket) -> redis.ConnectionError:
        """The error for a lost connection. A server that expects TLS often hangs up on plain text without a word."""
        if not sock.silent or self._tls is not None or self._unix:
            return error
        return redis.ConnectionError(f"{str(error).rstrip('.')}. That was before it said anything: {SERVER_HAS_TLS}")

    def error_of(self, line: bytes) -> redis.RedisError:
        """What the driver makes of an answer that is an error."""
        text = line[1:].split(b"\r\n", 1)[0].decode("utf-8", "replace")
        error: redis.RedisError = self._parser.parse_error(self._without_secret(text))
        return error

    def _without_secret(self, text: str) -> str:
        """Some servers repeat the words of a command that they don't know; those of AUTH hold the password."""
        text = _ECHO.sub("", text)
        return text.replace(self.password, "***") if self.password else text

    def let_go(self) -> None:
        """Closes the socket; a later exchange would connect anew."""
        self.disconnect()  # type: ignore[no-untyped-call]

    def usable(self) -> bool:
        """Whether an idle connection can be used once more. One that isn't open yet can."""
        return self._sock is None or self._sock.quiet()

    def _connect(self) -> Any:
        """Connects within the deadline, whatever the number of addresses behind the name."""
        error: Exception = OSError(f"{self._address[0]!r} has no address")
        for family, kind, protocol, _, place in self._places():
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as failure:  # a family of addresses that this machine hasn't got
                error = failure
                continue
            try:
                sock.settimeout(self.deadline.left())
                sock.connect(place)
                if not self._unix:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if self._tls is not None:
                    sock = self._handshake(self._tls, sock)
                return _DeadlineSocket(sock, self)
            except (redis.ConnectionError, OSError) as failure:
                sock.close()
                error = failure
            except BaseException:
                sock.close()
                raise
        raise error

    def _handshake(self, tls: ssl.SSLContext, sock: socket.socket) -> ssl.SSLSocket:
        host, port = self._address
        try:
            sock.settimeout(self.deadline.left())
            return tls.wrap_socket(sock, server_hostname=host)
        except ssl.SSLCertVerificationError as failure:
            raise StoreError(
                f"the certificate of {host}:{port} was refused: {failure.verify_message.rstrip('.')}. Connect by a "
                f"name that the certificate holds, and name the authority that signed it with ?ssl_ca_certs=FILE"
            ) from failure
        except TimeoutError as failure:
            raise redis.TimeoutError(f"{host}:{port} took no part in a TLS handshake; {SERVER_LACKS_TLS}") from failure
        except (ssl.SSLError, ConnectionError) as failure:
            if isinstance(failure, _HUNG_UP) or failure.reason in _NO_TLS:
                raise redis.ConnectionError(
                    f"the TLS handshake with {host}:{port} failed ({failure}); {SERVER_LACKS_TLS}"
                ) from failure
            raise

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
