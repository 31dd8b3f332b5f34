"""A TCP proxy for tests: passes bytes on, and on request holds, delays, slices, cuts, or drops answers.

One thread accepts, one thread reads each direction of each connection, and all end with `close`. The settings are plain
attributes that a test may change at any time from its own thread; each read looks at them anew. `answers_to_drop` and
the counts are guarded by the proxy's lock.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
import threading
from collections.abc import Callable

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of 0 s: closing sends a reset."""


class Proxy:
    """Listens on a port of 127.0.0.1 and passes everything on to `target`. A context manager.

    Attributes:
        port: where it listens.
        requests, answers: (per direction, towards the server and back) how bytes are passed on.
        accepted: how many connections were made so far.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.requests, self.answers = Direction(), Direction()
        self.accepted = 0
        self._lock = threading.Lock()
        self._refusing = False
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._start(self._accept, "accept")

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- faults --------------------------------------------------------------------------------------------------

    def drop_answer(self, number: int = 1) -> None:
        """The number-th piece that the server sends from now on isn't passed on: its connection is closed instead.

        So the request went through, the server did the work, and the caller never learns.
        """
        self.answers.cut_at_piece(number)

    def cut_request_after(self, count: int) -> None:
        """Closes the connection once so many bytes more went towards the server."""
        self.requests.cut_after(count)

    def cut_answer_after(self, count: int) -> None:
        """Closes the connection once so many bytes more went back to the caller."""
        self.answers.cut_after(count)

    def hold(self) -> None:
        """Both ways: nothing gets through any more, no connection is closed; as if the cable was out."""
        self.requests.hold()
        self.answers.hold()

    def go_on(self) -> None:
        """Ends hold: what was held is passed on."""
        self.requests.go_on()
        self.answers.go_on()

    def refuse(self, refusing: bool = True) -> None:
        """New connections are closed at once; those that exist are reset."""
        self._refusing = refusing
        if refusing:
            self.reset_all()

    def reset_all(self) -> None:
        """Every connection ends in a reset on both sides."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            _shut(*pair)

    def close(self) -> None:
        """Ends everything and waits for the threads."""
        self.refuse()
        self.requests.end()
        self.answers.end()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive(), f"the proxy's thread {thread.name} did not end"

    # ---- its threads ---------------------------------------------------------------------------------------------

    def _start(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=f"proxy-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._refusing:
                    raise ConnectionRefusedError("told to refuse")
                server = socket.create_connection(self.target, timeout=5)
            except OSError:
                client.close()
                continue
            for sock in (client, server):
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self.accepted += 1
                self._pairs.add((client, server))
            pump = functools.partial(self._pump, (client, server))
            self._start(functools.partial(pump, client, server, self.requests), "requests")
            self._start(functools.partial(pump, server, client, self.answers), "answers")

    def _pump(
        self, pair: tuple[socket.socket, socket.socket], source: socket.socket, sink: socket.socket, way: Direction
    ) -> None:
        with contextlib.suppress(OSError):
            while True:
                data = source.recv(65536)
                if not data or not way.send(data, sink):
                    break
        _shut(*pair)
        with self._lock:
            gone = pair in self._pairs
            self._pairs.discard(pair)
        if not gone:  # the other direction's thread has ended too
            for sock in pair:
                sock.close()


class Direction:
    """One way through a proxy. Settings may change while bytes flow.

    Attributes:
        delay: seconds that each piece is held.
        slice_size, slice_pause: pieces are cut into slices of so many bytes, with so many seconds after each.
        passed: bytes that went through.
        rewrite: what is done to each piece before it is passed on.
    """

    def __init__(self) -> None:
        self.delay = 0.0
        self.slice_size, self.slice_pause = 0, 0.0
        self.passed = 0
        self.rewrite: Callable[[bytes], bytes] | None = None
        self._open = threading.Event()
        self._open.set()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._bytes_left: int | None = None
        self._pieces_left: int | None = None

    def hold(self) -> None:
        """Nothing gets through until `go_on`."""
        self._open.clear()

    def go_on(self) -> None:
        """Ends `hold`."""
        self._open.set()

    def end(self) -> None:
        """Nothing gets through any more, and nobody waits."""
        self._ended.set()
        self._open.set()

    def cut_after(self, count: int) -> None:
        """After so many bytes more the connection is closed, once."""
        with self._lock:
            self._bytes_left = count

    def cut_at_piece(self, number: int) -> None:
        """Instead of the number-th piece from now on the connection is closed, once."""
        with self._lock:
            self._pieces_left = number

    def send(self, data: bytes, sink: socket.socket) -> bool:
        """Passes a piece on. False if the connection is to be closed now."""
        with self._lock:
            if self._pieces_left is not None:
                self._pieces_left -= 1
                if self._pieces_left == 0:
                    self._pieces_left = None
                    return False
            allowed = len(data) if self._bytes_left is None else min(len(data), self._bytes_left)
            whole = allowed == len(data) and self._bytes_left != allowed
            if self._bytes_left is not None:
                self._bytes_left = self._bytes_left - allowed if whole else None
        if self.delay:
            self._ended.wait(self.delay)
        self._open.wait()
        if self._ended.is_set():
            return False
        data = data if self.rewrite is None else self.rewrite(data)
        size = self.slice_size or max(1, allowed)
        for start in range(0, allowed, size):
            piece = data[start : min(start + size, allowed)]
            self.passed += len(piece)  # before it is sent: who got it may look at once
            sink.sendall(piece)
            if self.slice_size:
                self._ended.wait(self.slice_pause)
        return whole


def _shut(*socks: socket.socket) -> None:
    for sock in socks:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
