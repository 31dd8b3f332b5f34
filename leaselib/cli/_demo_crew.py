"""The demo's processes: started, listened to, killed, stopped, and always cleaned up.

Owns the child processes, a temporary folder with the SQLite file, and a thread per child that reads what it writes.
The main thread calls everything here; the readers only put messages into a queue.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, NoReturn
from urllib.parse import quote

import leaselib
from leaselib import _clock, _threads

END_S = 3.0
"""So long a child may take to end after it was told to."""


@dataclass(frozen=True)
class Message:
    """What a child wrote, or `{"is": "ended", "status": ...}` once it will write no more."""

    runner: str
    body: dict[str, Any]


class Crew:
    """The instances. A context manager: whatever happens, no child and no file is left."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="leaselib-demo-", ignore_cleanup_errors=True)
        self.url = "sqlite:///" + quote(str(Path(self._folder.name, "leases.db")), safe="/:\\")
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _undisturbed():
            for child in self._children.values():
                child.kill()
            for child in self._children.values():
                child.wait()
                assert child.stdin is not None
                with contextlib.suppress(OSError):
                    child.stdin.close()
            _threads.join(self._readers, round(END_S * 1000))
            self._folder.cleanup()

    def start(self, runner: str) -> None:
        """Starts an instance. In a session of its own, so that Ctrl-C reaches the demo alone, which then cleans up."""
        root = str(Path(leaselib.__file__).resolve().parents[1])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        with self._log(runner).open("wb") as log:
            child = self._children[runner] = subprocess.Popen(  # noqa: S603  this Python, and arguments of our own
                [sys.executable, "-m", "leaselib.cli._demo_instance", self.url, runner, self._folder.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        assert child.stdout is not None
        stream = child.stdout
        self._readers.append(_threads.spawn(f"demo-{runner}", lambda: self._read(runner, child, stream)))

    def _read(self, runner: str, child: subprocess.Popen[bytes], stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                with contextlib.suppress(ValueError):  # cut off by a kill
                    self._messages.put(Message(runner, json.loads(line)))
        self._messages.put(Message(runner, {"is": "ended", "status": child.wait()}))

    def _log(self, runner: str) -> Path:
        return Path(self._folder.name, f"{runner}.log")

    def receive(self, timeout_s: float) -> list[Message]:
        """What children wrote; waits for something, but no longer than that."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._messages.get(timeout=timeout_s))
            while True:
                found.append(self._messages.get_nowait())
        return found

    def pid(self, runner: str) -> int:
        """A child's process id."""
        return self._children[runner].pid

    def complaint(self, runner: str) -> str:
        """The last line that a child wrote to its standard error."""
        lines = self._log(runner).read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    def kill(self, runner: str) -> int:
        """SIGKILL. Returns when, in ms on this machine's clock, which is the store's."""
        at_ms = _clock.SYSTEM.wall_ms()
        self._children[runner].kill()
        return at_ms

    def stop(self, runner: str) -> int:
        """SIGTERM, or a command where there are no signals. Returns when, as `kill`."""
        at_ms = _clock.SYSTEM.wall_ms()
        if os.name == "nt":
            self.send(runner, do="stop")
        else:
            self._children[runner].send_signal(signal.SIGTERM)
        return at_ms

    def send(self, runner: str, **command: object) -> None:
        """Gives a command; a child that is gone gets none."""
        stdin = self._children[runner].stdin
        assert stdin is not None
        with contextlib.suppress(OSError):
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()

    def stop_all(self) -> None:
        """Stops all that still run, and waits for them a moment."""
        running = [runner for runner, child in self._children.items() if child.poll() is None]
        for runner in running:
            self.stop(runner)
        end_ms = _clock.SYSTEM.boot_ms() + round(END_S * 1000)
        for runner in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._children[runner].wait(max(0.0, (end_ms - _clock.SYSTEM.boot_ms()) / 1000))


@contextlib.contextmanager
def ended_by_exception() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise SystemExit in the main thread as Ctrl-C raises KeyboardInterrupt, so that what
    was begun is cleaned up.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
        raise SystemExit(128 + number)

    with _signals(leave, "SIGTERM", "SIGHUP"):
        yield


def _undisturbed() -> AbstractContextManager[None]:
    """Within, a second Ctrl-C doesn't end the clean-up half-way."""
    return _signals(signal.SIG_IGN, "SIGINT", "SIGTERM", "SIGHUP")


@contextlib.contextmanager
def _signals(handler: signal.Handlers | Callable[[int, FrameType | None], object], *names: str) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, handler_before in before:
            signal.signal(number, signal.SIG_DFL if handler_before is None else handler_before)
