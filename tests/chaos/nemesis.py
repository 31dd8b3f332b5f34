"""Carries a plan's faults out on a cluster of processes, journals each, and heals everything in the end.

Used by the test's thread only. Faults begin and end in the plan's order, whatever the machine does: what takes long (a
process that ends, a server that starts) is waited for, and all that comes after it comes that much later.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import json
import math
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cluster import Cluster, Instance
from fix_clock_shim import SteppedClock
from fix_proxy import Direction, Proxy

from .plan import EVERYBODY, Fault

EXIT_S = 4 + 4.0
"""So long may an instance take to end after SIGTERM: stop_timeout, an operation's time-out, and what a loaded machine
adds."""
UP_S = 20.0
LOCK_S = 0.5
"""So long is the file's lock waited for, while nothing else goes on."""
NEVER = 1 << 62
T = TypeVar("T")


class Member:
    """One of the instances: its place in the cluster, its own way to the server, its own clock, its process of now."""

    def __init__(self, number: int, proxy: Proxy | None, clock: SteppedClock | None, url: str) -> None:
        self.number, self.proxy, self.clock, self.url = number, proxy, clock, url
        self.instance: Instance | None = None

    @property
    def process(self) -> Instance:
        """Its process."""
        assert self.instance is not None
        return self.instance


class Nemesis:
    """See the module's text.

    Args:
        cluster: where the instances are.
        members: the instances, not started yet.
        jobs: what each instance runs.
        server: with kill, start, freeze and thaw; None for a file.
    """

    def __init__(
        self, cluster: Cluster, members: list[Member], jobs: list[Mapping[str, Any]], server: Any | None
    ) -> None:
        self.cluster, self.members, self.jobs, self.server = cluster, members, jobs, server
        self._journal = os.open(cluster.journal.path, os.O_WRONLY | os.O_APPEND)
        self._undo: list[tuple[float, int, Callable[[], None]]] = []  # by the plan's time
        self._order = itertools.count()
        self._zero = 0.0  # the plan's beginning, on the monotonic clock; later by all that was waited for

    def close(self) -> None:
        """Closes the journal."""
        os.close(self._journal)

    def note(self, kind: str, **fields: Any) -> None:
        """Writes a `fault` fact."""
        line = {"t": time.monotonic(), "fact": "fault", "pid": 0, "kind": kind, **fields}
        os.write(self._journal, json.dumps(line).encode() + b"\n")

    def boot(self) -> None:
        """Starts all instances and waits until their schedulers are started."""
        for member in self.members:
            self._spawn(member)
        for member in self.members:
            self._up(member)

    def carry_out(self, faults: list[Fault]) -> float:
        """All of the plan, and its undoing. Returns when the last fault was over and all instances were up."""
        self._zero = time.monotonic()
        for fault in faults:
            self._undo_until(fault.at_s)
            undo = self._at(fault.at_s, functools.partial(self._begin, fault))
            heapq.heappush(self._undo, (fault.at_s + fault.seconds, next(self._order), undo))
        self._undo_until(math.inf)
        for member in self.members:
            if member.proxy is not None:
                _heal(member.proxy)
            self._up(member)
        self.note("healed")
        return time.monotonic()

    # ---- time -------------------------------------------------------------------------------------------------------

    def _undo_until(self, at_s: float) -> None:
        """Ends what ends until then, in the plan's time."""
        while self._undo and self._undo[0][0] <= at_s:
            end_s, _, undo = heapq.heappop(self._undo)
            self._at(end_s, undo)

    def _at(self, at_s: float, act: Callable[[], T]) -> T:
        """Acts at that time of the plan, whose time stands still meanwhile."""
        self.cluster.wait_until(self._zero + at_s)
        done = act()
        self._zero = max(self._zero, time.monotonic() - at_s)
        return done

    # ---- instances --------------------------------------------------------------------------------------------------

    def _spawn(self, member: Member) -> None:
        env = {} if member.clock is None else member.clock.environment
        member.instance = self.cluster.spawn(*self.jobs, conf={"url": member.url}, env=env, max_workers=12)

    def _up(self, member: Member) -> None:
        """Waits until its scheduler is started, and a signal would be heard."""
        process, end = member.process, time.monotonic() + UP_S
        while not self.cluster.facts("up", pid=process.pid):
            assert process.alive(), f"instance {member.number} ended at its start; {self.cluster.complaints()}"
            assert time.monotonic() < end, f"instance {member.number} is not up within {UP_S} s"
            time.sleep(0.1)

    # ---- faults -----------------------------------------------------------------------------------------------------

    def _begin(self, fault: Fault) -> Callable[[], None]:
        """Begins a fault; returns what ends it."""
        if fault.target == EVERYBODY:
            self.note(fault.kind, seconds=fault.seconds)
            return {"server-kill": self._server_kill, "server-freeze": self._server_freeze, "file-lock": self._lock}[
                fault.kind
            ]()
        member = self.members[fault.target]
        about = {"target": fault.target, "seconds": fault.seconds, "amount": fault.amount, "way": fault.way}
        self.note(fault.kind, victim=member.process.pid, **about)
        if fault.kind in ("kill", "freeze", "terminate"):
            return {"kill": self._kill, "freeze": self._freeze, "terminate": self._terminate}[fault.kind](member)
        if fault.kind == "clock":
            assert member.clock is not None
            member.clock.step(fault.amount)
            return lambda: None  # it stays wrong, also when all else is healed
        assert member.proxy is not None
        return _network(member.proxy, fault)

    def _kill(self, member: Member) -> Callable[[], None]:
        member.process.kill()
        return lambda: self._spawn(member)

    def _freeze(self, member: Member) -> Callable[[], None]:
        # At whatever point it is, a transaction on the file included: that is a lock that others wait for.
        process = member.process
        process.popen.send_signal(signal.SIGSTOP)
        return lambda: process.popen.send_signal(signal.SIGCONT)

    def _terminate(self, member: Member) -> Callable[[], None]:
        self._up(member)
        time.sleep(0.2)  # from `up` to the handler of the signal: a window of the test program's, not of leaselib's
        process = member.process
        process.terminate()

        def restart() -> None:
            process.ended(EXIT_S)
            self._spawn(member)

        return restart

    # ---- the store --------------------------------------------------------------------------------------------------

    def _server_kill(self) -> Callable[[], None]:
        assert self.server is not None
        self.server.kill()
        started: Callable[[], None] = self.server.start
        return started

    def _server_freeze(self) -> Callable[[], None]:
        assert self.server is not None
        self.server.freeze()
        thaw: Callable[[], None] = self.server.thaw
        return thaw

    def _lock(self) -> Callable[[], None]:
        assert self.cluster.file is not None
        file = Path(self.cluster.file)
        database = sqlite3.connect(file, timeout=LOCK_S, isolation_level=None)
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            # An instance that is frozen in the middle of a transaction holds it: the very same fault.
            database.close()
            self.note("file-lock is another's")
            return lambda: None

        def unlock() -> None:
            database.execute("ROLLBACK")
            database.close()

        return unlock


# ---- the network ----------------------------------------------------------------------------------------------------


def _ways(proxy: Proxy, fault: Fault) -> list[Direction]:
    ways = {"requests": [proxy.requests], "answers": [proxy.answers], "both": [proxy.requests, proxy.answers]}
    return ways[fault.way]


def _network(proxy: Proxy, fault: Fault) -> Callable[[], None]:
    """Begins a fault between an instance and the server; returns what ends it."""
    if fault.kind == "cut":
        proxy.refuse()
        return lambda: proxy.refuse(False)
    if fault.kind == "drop-answers":
        return _drop_answers(proxy, int(fault.amount))
    ways = _ways(proxy, fault)
    for way in ways:
        if fault.kind == "delay":
            way.delay = fault.amount
        elif fault.kind == "cut-midway":
            way.cut_after(int(fault.amount))
        else:
            way.hold()

    def end() -> None:
        if fault.kind == "blackhole" and fault.amount:
            proxy.reset_all()
        for way in ways:
            way.delay = 0.0
            way.go_on()

    return end


def _drop_answers(proxy: Proxy, count: int) -> Callable[[], None]:
    """So many answers in a row are lost: each time one is, the next is marked."""
    left = count

    def mark(data: bytes) -> bytes:
        nonlocal left
        if left > 0:
            left -= 1
            proxy.drop_answer()
        return data

    proxy.requests.rewrite = mark

    def end() -> None:
        proxy.requests.rewrite = None

    return end


def _heal(proxy: Proxy) -> None:
    """What is still to come, doesn't come any more."""
    proxy.requests.rewrite = None
    for way in (proxy.requests, proxy.answers):
        way.delay = 0.0
        way.cut_after(NEVER)
        way.cut_at_piece(NEVER)
        way.go_on()
    proxy.refuse(False)
