"""Nothing leaks: threads, sockets, file descriptors and memory are level over 10,000 runs and 200 outages of the store
(in the gate, with `--effort 3`; a third of that otherwise).

A scheduler runs in a child process, `leak_program`, so that this process's memory doesn't count. It is measured after a
warm-up, and again at the end. Outages come while runs are under way; a server's outage is a proxy that resets every
connection and takes no new one, SQLite's is a disk that takes no more bytes. The figures of each store are printed;
`pytest -rP` shows them.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fix_servers_postgres
import fix_servers_redis
import pytest
from fix_proxy import Proxy

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("leak_program.py")
WORKERS = 4
LOAD: dict[str, Any] = {"jobs": 20, "every_s": 0.025, "workers": WORKERS, "leak": False}
"""800 runs are due in a second; a machine that can't do as many takes longer, and its slots are skipped as busy."""
WARM_UP_RUNS, WARM_UP_OUTAGES = 700, 7
"""Times `--effort`, as the next two."""
RUNS, OUTAGES = 3_400, 67
"""From the first to the last measurement, and from the beginning."""
LONG_OUTAGE_S = 0.15
"""Longer than until the first try to reach the store again. Every tenth outage is one of these."""
MOST_GROWTH_KIB = 5 * 1024


class Child:
    """The process under test. `before` is what it held before its scheduler was started."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self._popen = popen
        self.before = self._answer()

    def _answer(self) -> Any:
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        line = self._popen.stdout.readline()
        assert line, f"the child process ended: {self._popen.stderr.read()}"
        return json.loads(line)

    def tell(self, command: str, **arguments: Any) -> Any:
        """Gives a command and returns the answer."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps([command, arguments]) + "\n")
        self._popen.stdin.flush()
        return self._answer()


@contextmanager
def child(url: str, **conf: Any) -> Iterator[Child]:
    """A started scheduler on that store. At the end it is stopped, and has written nothing to stderr."""
    command = [sys.executable, str(PROGRAM), json.dumps({**LOAD, "url": url, **conf})]
    pipe = subprocess.PIPE  # stderr too: a file would take no more bytes while the disk counts as full
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as popen:
        try:
            yield Child(popen)
            _, errors = popen.communicate(timeout=20)
            assert (popen.returncode, errors) == (0, "")
        finally:
            popen.kill()


# ---- the stores and their outages ------------------------------------------------------------------------------------

Outage = Callable[[Child, bool], object]
"""Begins an outage (true) or ends it."""


def fill_disk(it: Child, full: bool) -> None:
    """The system refuses every byte that the process would write to a file, as on a full disk."""
    it.tell("fill_disk", full=full)


@contextmanager
def sqlite(folder: Path) -> Iterator[tuple[str, Outage]]:
    """A file."""
    yield f"sqlite:///{folder / 'leases.db'}", fill_disk


@contextmanager
def redis(folder: Path) -> Iterator[tuple[str, Outage]]:
    """A namespace of its own on the session's Redis, through a proxy."""
    url = fix_servers_redis.session_url()
    with through_proxy(f"{url}{'&' if '?' in url else '?'}namespace=leaks-{secrets.token_hex(4)}", 6379) as found:
        yield found


@contextmanager
def postgres(folder: Path) -> Iterator[tuple[str, Outage]]:
    """A schema of its own on the session's PostgreSQL, through a proxy."""
    with fix_servers_postgres.place(folder) as url, through_proxy(url, 5432) as found:
        yield found


@contextmanager
def through_proxy(url: str, default_port: int) -> Iterator[tuple[str, Outage]]:
    """The same place by way of a proxy that can refuse."""
    parts = urlsplit(url)
    with Proxy((parts.hostname or "127.0.0.1", parts.port or default_port)) as proxy:
        user = parts.netloc.rpartition("@")
        place = f"{user[0]}{user[1]}127.0.0.1:{proxy.port}"
        yield parts._replace(netloc=place).geturl(), lambda _, refusing: proxy.refuse(refusing)


STORES: dict[str, Callable[[Path], AbstractContextManager[tuple[str, Outage]]]] = {
    "sqlite": sqlite,
    "redis": redis,
    "postgres": postgres,
}


def suffer(it: Child, outage: Outage, *, long: bool) -> None:
    """One outage under load, noticed and over. It begins while the store is well."""
    counts = it.tell("wait", name="ran", count=0)
    assert counts["store_error"] == counts["store_ok"], f"the outage before is not over: {counts}"
    outage(it, True)
    it.tell("wait", name="store_error", count=counts["store_error"] + 1)
    if long:
        outage(it, True)  # once more: a connection that was just being made may have escaped
        it.tell("wait_unreachable", seconds=LONG_OUTAGE_S)
    outage(it, False)
    counts = it.tell("wait", name="store_error", count=0)
    it.tell("wait", name="store_ok", count=counts["store_error"])


def load(it: Child, outage: Outage, *, runs: int, outages: int) -> None:
    """So many runs, with so many outages spread over them; the first and the last part is undisturbed."""
    begun = it.tell("wait", name="success", count=0)["success"]
    for number in range(outages):
        it.tell("wait", name="success", count=begun + runs * (number + 1) // (outages + 1))
        suffer(it, outage, long=number % 10 == 0)
    it.tell("wait", name="success", count=begun + runs)


# ---- what must be the same -------------------------------------------------------------------------------------------


def leaks(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Of what there is another number than before, or over 5 MiB more memory: before and after."""
    changed = {name for name in ("threads", "fds", "sockets") if after[name] != before[name]}
    if after["rss_kib"] > before["rss_kib"] + MOST_GROWTH_KIB:
        changed.add("rss_kib")
    return {name: (before[name], after[name]) for name in changed}


@pytest.mark.parametrize("name", STORES)
def test_nothing_leaks_over_thousands_of_runs_and_many_outages(name: str, effort: int, tmp_path: Path) -> None:
    """Each run that starts ends in success, each outage is told and its end too, and what the process holds is level.

    There may be more of store_error than outages, though as many of store_ok: calls of several workers are under way
    when the connections go. One whose answer had already come counts as the store's being well, and the next one to
    fail begins the trouble anew.
    """
    with STORES[name](tmp_path) as (url, outage), child(url) as it:
        load(it, outage, runs=WARM_UP_RUNS * effort, outages=WARM_UP_OUTAGES * effort)
        first = it.tell("measure")
        load(it, outage, runs=RUNS * effort, outages=(OUTAGES - WARM_UP_OUTAGES) * effort)
        last = it.tell("measure")
        stopped = it.tell("stop")
    print(f"{name}: before {it.before}; warm {first['rest']}; at the end {last['rest']}, {last['counts']}")
    assert leaks(first["rest"], last["rest"]) == {}, "\n".join(last["grown"])
    assert stopped["rest"] == it.before, "a stopped scheduler still holds something"
    # Under load: one each for the claims, the finishes and the heartbeats of every worker, and for pings.
    assert last["loaded"]["sockets"] <= 3 * WORKERS + 1
    counts = last["counts"]
    assert counts["ran"] == counts["start"] == counts["success"] >= (WARM_UP_RUNS + RUNS) * effort
    assert (counts["failed"], counts["lost"]) == (0, 0)
    assert counts["store_error"] == counts["store_ok"] >= OUTAGES * effort
    assert last["faults"] == {"internal_errors": 0, "events_dropped": 0}


def test_a_program_that_leaks_is_found_out(tmp_path: Path) -> None:
    """A handler that leaks a thread, a socket, a file and memory: the same measurements tell of all four."""
    with sqlite(tmp_path) as (url, outage), child(url, leak=True) as it:
        load(it, outage, runs=100, outages=1)
        first = it.tell("measure")
        load(it, outage, runs=200, outages=1)
        last = it.tell("measure")
    found = leaks(first["rest"], last["rest"])
    assert set(found) == {"threads", "fds", "sockets", "rss_kib"}
    assert found["fds"][1] - found["fds"][0] >= 2 * 200
