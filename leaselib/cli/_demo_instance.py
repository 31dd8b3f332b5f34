"""An instance of the demo: a process with a scheduler. Started by `_demo_crew` as
`python -m leaselib.cli._demo_instance URL RUNNER FOLDER`.

Its main thread waits in `run_forever`; one thread reads commands from standard input, one tells how many runs are
watched, handlers and listeners tell what they see. All of them write to standard output, one line at a time, under
`_lock`. If its standard input ends, the demo itself has died: the instance stops, and removes the demo's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from datetime import timedelta

from leaselib import Event, Every, RunContext, Scheduler, _clock, _threads
from leaselib.cli import _demo_plan as plan
from leaselib.events import EVENT_NAMES

_lock = threading.Lock()


def tell(kind: str, **fields: object) -> None:
    """Writes a message. Nobody may be there to read it any more."""
    line = json.dumps({"is": kind, **fields}).encode() + b"\n"
    with _lock, contextlib.suppress(OSError):
        os.write(1, line)


def tick() -> None:
    """A job with next to nothing to do; that it ran shows in the events."""


def report(ctx: RunContext) -> None:
    """A job of twelve steps. After each it remembers how far it is, so that another attempt goes on from there."""
    for step in range((ctx.resume or 0) + 1, plan.STEPS + 1):
        ctx.sleep(plan.STEP_S)
        ctx.checkpoint(step, flush=True)
        tell("step", step=step, attempt=ctx.attempt, at_ms=_clock.SYSTEM.wall_ms())


def on_event(event: Event) -> None:
    """Tells an event."""
    tell(
        "event",
        name=event.name,
        job=event.job,
        slot_ms=None if event.slot is None else round(event.slot.timestamp() * 1000),
        attempt=event.attempt,
        reason=event.reason,
        error=event.error,
        handed_over=event.handed_over,
    )


def obey(scheduler: Scheduler, orphaned: threading.Event) -> None:
    """Carries out commands until none can come any more: then the demo itself has died."""
    # Reads the descriptor: a thread that sits inside sys.stdin is in the way when the interpreter ends.
    buffered = b""
    while data := os.read(0, 4096):
        *lines, buffered = (buffered + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if command["do"] == "stop":
                scheduler.stop()
                return
            # An interval whose next slot is that instant, and the one after it half a century later.
            interval = Every(timedelta(milliseconds=command["slot_ms"]))
            scheduler.add(report, interval, name=plan.REPORT, jitter=0.2)
    orphaned.set()
    scheduler.stop()


def pulse(scheduler: Scheduler, over: threading.Event) -> None:
    """Tells how many runs of others this instance watches."""
    while not over.wait(plan.PULSE_S):
        tell("pulse", backups=scheduler.health().backups_held)


def main() -> None:
    """Runs until it is told to stop."""
    url, runner, folder = sys.argv[1:]
    scheduler = Scheduler(
        url, runner=runner, max_workers=3, lease=plan.LEASE_S, heartbeat=plan.HEARTBEAT_S, catch_up=0, stop_timeout=5
    )
    scheduler.every(seconds=plan.TICK_S, name=plan.TICK)(tick)
    for name in EVENT_NAMES:
        scheduler.on(name, on_event)
    over, orphaned = threading.Event(), threading.Event()
    scheduler.start()
    _threads.spawn("demo-commands", lambda: obey(scheduler, orphaned))
    _threads.spawn("demo-pulse", lambda: pulse(scheduler, over))
    tell("up")
    scheduler.run_forever()
    over.set()
    if orphaned.is_set():
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
