"""The command line as a process: on a terminal, in a pipe that breaks, under Ctrl-C, and without rich.

`Typed` is a program on a pseudo-terminal; `test_demo` uses it too.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from leaselib import SQLiteStore

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 20.0
WITHOUT_RICH = "import sys; sys.modules['rich'] = None; from leaselib.cli import main; sys.exit(main())"
# Makes its input the terminal whose Ctrl-C reaches it, then becomes the program.
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
SHOW_CURSOR = "\x1b[?25h"


def environment(**more: str) -> dict[str, str]:
    """A terminal's environment, with this leaselib and no URL."""
    kept = {name: value for name, value in os.environ.items() if name not in ("LEASELIB_URL", "NO_COLOR", "COLUMNS")}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1", **more}


class Typed:
    """A program on a pseudo-terminal of its own, and what it has written."""

    def __init__(self, *argv: str, columns: int = 100, **env: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self.popen = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *argv],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(**env),
            start_new_session=True,
        )
        os.close(theirs)
        self.raw = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # how Linux tells that the program's side was closed
                data = b""
            if not data:
                return
            with self._changed:
                self.raw += data.decode("utf-8", "replace")
                self._changed.notify_all()

    @property
    def text(self) -> str:
        """What was written, without escapes for style and cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw).replace("\r", "")

    def wait_for(self, text: str) -> None:
        """Until that was written."""
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.text, PATIENCE_S), f"no {text!r} in:\n{self.text}"

    def type(self, keys: str) -> None:
        """Types."""
        os.write(self._ours, keys.encode())

    def ended(self, within_s: float = PATIENCE_S) -> int:
        """Waits for the end; returns the exit code."""
        try:
            return self.popen.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within_s} s:\n{self.text}") from None

    def close(self) -> None:
        """Ends it, however it stands."""
        self.popen.kill()
        self.popen.wait()
        self._reader.join(PATIENCE_S)
        os.close(self._ours)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A store with one job's run."""
    store = SQLiteStore(tmp_path / "leases.db")
    claim(store, "sync")
    yield f"sqlite:///{tmp_path}/leases.db"
    store.close()


def claim(store: SQLiteStore, job: str) -> None:
    """Starts a run of the job now."""
    now = datetime.fromtimestamp(int(time.time()), timezone.utc)
    assert store.claim(job, now, f"token of {job}", "api-1", overlap="allow").outcome == "won"


def leaselib(*argv: str) -> list[str]:
    """The command line of a command."""
    return [sys.executable, "-m", "leaselib", *argv]


@pytest.mark.parametrize("way", ["rich", "plain", "no rich", "NO_COLOR", "dumb"])
def test_watch_shows_changes_until_ctrl_c_and_leaves_the_terminal_as_it_was(url: str, way: str) -> None:
    """In place with rich; as lines without it, and where somebody asked for that."""
    program = [sys.executable, "-c", WITHOUT_RICH] if way == "no rich" else leaselib()
    env = {"NO_COLOR": {"NO_COLOR": "1"}, "dumb": {"TERM": "dumb"}}.get(way, {})
    plain = ["--plain"] if way == "plain" else []
    typed = Typed(*program, "watch", url, "--interval", "0.1", *plain, **env)
    try:
        typed.wait_for("sync")
        store = SQLiteStore(url.removeprefix("sqlite:///"))
        claim(store, "other")
        store.close()
        typed.wait_for("attempt 1 started on api-1: scheduled")
        typed.type("\x03")
        assert typed.ended() == 0
    finally:
        typed.close()
    assert "Traceback" not in typed.text
    if way == "rich":
        assert typed.text.count("JOB") > 1
        assert typed.raw.rindex(SHOW_CURSOR) > typed.raw.rindex("\x1b[?25l")
    else:
        assert typed.text.count("JOB") == 1
        assert ("\x1b[" in typed.raw) == (way in ("plain", "no rich"))


def test_status_on_a_terminal_is_coloured_and_fits(url: str) -> None:
    """Also a narrow one."""
    typed = Typed(*leaselib("status", url), columns=40)
    try:
        assert typed.ended() == 0
        typed.wait_for("running")
    finally:
        typed.close()
    assert "\x1b[36m" in typed.raw
    assert max(map(len, typed.text.splitlines())) <= 40


def test_a_closed_pipe_ends_watch_quietly(url: str) -> None:
    """As `leaselib watch | head -1` does."""
    process = subprocess.Popen(
        leaselib("watch", url, "--interval", "0.05", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert json.loads(process.stdout.readline())["reachable"] is True
    process.stdout.close()
    assert process.wait(PATIENCE_S) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_sigint_ends_watch_quietly_in_a_pipe_too(url: str) -> None:
    """As Ctrl-C in a pipeline does."""
    process = subprocess.Popen(
        leaselib("watch", url, "--interval", "60"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    while b"sync" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (0, b"", b"")


def test_names_are_printed_whatever_the_output_can_encode(url: str) -> None:
    """As escapes where it must be ASCII, rather than as an error."""
    store = SQLiteStore(url.removeprefix("sqlite:///"))
    claim(store, "été 🎉")
    store.close()
    done = subprocess.run(
        leaselib("status", url), env=environment(PYTHONIOENCODING="ascii"), capture_output=True, check=True, timeout=20
    )
    assert rb"\xe9t\xe9 \U0001f389" in done.stdout


def test_the_command_line_needs_neither_rich_nor_a_driver(url: str) -> None:
    """For a SQLite store."""
    code = (
        "import sys\n"
        "for name in ('rich', 'redis', 'psycopg'): sys.modules[name] = None\n"
        "from leaselib.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "status", url]
    done = subprocess.run(command, env=environment(), capture_output=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert b"sync" in done.stdout


def test_a_full_disk_is_trouble_and_said_so(url: str) -> None:
    """Without a traceback, and without a second complaint when the interpreter ends."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            leaselib("status", url), stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=20
        )
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert b"No space left" in done.stderr


@pytest.mark.parametrize("closed", ["out", "err"])
def test_a_closed_stream_is_no_trouble(url: str, closed: str) -> None:
    """The exit code is what such a caller wants to know."""
    number = {"out": 1, "err": 2}[closed]
    shell = f'"$@" {number}>&-'
    done = subprocess.run(["sh", "-c", shell, "sh", *leaselib("status", url)], env=environment(), timeout=20)
    assert done.returncode == 0
