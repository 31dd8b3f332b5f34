"""Looking up hosts' names within a deadline, which the system's resolver doesn't take. Imports no driver.

Owns the questions that are under way; a lock guards them. Any thread may ask. Each name is looked up in a thread of its
own, which ends by itself; all that ask for it meanwhile share that one, so that a resolver which hangs costs one thread
for each name at most.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from leaselib import _threads


class Names:
    """See the module's text."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[tuple[str, int | None], _Question] = {}

    def find(self, host: str, port: int | None, wait_s: float) -> list[Any]:
        """The addresses of a host, as socket.getaddrinfo gives them.

        Raises:
            TimeoutError: the resolver didn't answer within `wait_s` seconds.
            OSError: there are none.
        """
        with self._lock:
            question = self._asked.get((host, port))
            new = question is None or question.answered.is_set()
            if question is None or new:
                question = self._asked[host, port] = _Question(host, port)
        if new:
            try:
                _threads.spawn(f"lookup-{host}", question.ask)
            except RuntimeError:  # no more threads, as while the interpreter ends: better late than not at all
                question.ask()
        if not question.answered.wait(max(0.0, wait_s)):
            raise TimeoutError(f"the name {host!r} was not looked up in time")
        if question.error is not None:
            raise OSError(f"the name {host!r} can't be looked up: {question.error}") from question.error
        return question.found


class _Question:
    """A name that is being looked up, and the answer."""

    def __init__(self, host: str, port: int | None) -> None:
        self._host, self._port = host, port
        self.answered = threading.Event()
        self.found: list[Any] = []
        self.error: Exception | None = None

    def ask(self) -> None:
        """Asks the system's resolver, which takes its time."""
        try:
            self.found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self.error = error
        finally:
            self.answered.set()
