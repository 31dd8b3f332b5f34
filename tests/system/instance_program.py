"""One leaselib instance as a child process. `cluster.Cluster.spawn` runs it as a script; gunicorn loads `make_app()`.

What to do stands in the environment variable LEASELIB_TEST as JSON: `url`, `journal`, `options` of the Scheduler,
`jobs`, and `then`, the name of one of the functions in THEN: how the main thread goes on. Every fact is one JSON line,
written by one `write` to a file opened with O_APPEND, so that lines of many processes never mix. Times are
CLOCK_MONOTONIC, which all processes of a machine share. Commands come as JSON lines on stdin, read by a thread of their
own.

Runs on every Python that leaselib runs on, with leaselib and its dependencies alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "patch_identity" in os.environ["LEASELIB_TEST"]:  # every container is pid 1 of a host of the same name
    import socket

    _real_pid = os.getpid()
    socket.gethostname = lambda: "box"
    os.getpid = lambda: 1

import leaselib
from leaselib.events import EVENT_NAMES

CONF: dict[str, Any] = json.loads(os.environ["LEASELIB_TEST"])

if "before_scripts" in CONF:  # Lua of an audit's, which sees what all scripts do
    from leaselib.stores import _assets

    _load = _assets.load
    _assets.load = lambda folder, name: (CONF["before_scripts"] if name == "common.lua" else "") + _load(folder, name)

JOURNAL = os.open(CONF["journal"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
STARTED = threading.Semaphore(0)  # released once per handler start in this process
GO: dict[str, threading.Event] = defaultdict(threading.Event)  # by job; ends handlers that hold on
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


def pid() -> int:
    """This process's id, also where os.getpid is patched."""
    return _real_pid if "patch_identity" in CONF else os.getpid()


def note(fact: str, **fields: Any) -> None:
    """Writes one fact to the journal."""
    line = {"t": time.monotonic(), "fact": fact, "pid": pid(), **fields}
    os.write(JOURNAL, json.dumps(line, default=str).encode() + b"\n")


def ms(instant: dt.datetime | None) -> int | None:
    """An aware UTC datetime as milliseconds since the epoch."""
    if instant is None:
        return None
    assert instant.utcoffset() == dt.timedelta(0), f"not UTC: {instant!r}"
    return (instant - EPOCH) // dt.timedelta(milliseconds=1)


# ---- what handlers do; `job` is the entry in `jobs` -----------------------------------------------------------------


def seconds_of(ctx: leaselib.RunContext, job: dict[str, Any]) -> float:
    """How long the handler takes: a number, or a list with one for each attempt, the last for all further ones."""
    seconds = job.get("seconds", 30)
    return seconds if not isinstance(seconds, list) else seconds[min(ctx.attempt, len(seconds)) - 1]


def quick(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """Returns at once."""


def sleep(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """One ctx.sleep."""
    ctx.sleep(seconds_of(ctx, job))


def hold(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """Sleeps by ctx.sleep until the command `go`."""
    end = time.monotonic() + seconds_of(ctx, job)
    while not GO[ctx.job].is_set() and time.monotonic() < end:
        ctx.sleep(0.01)


def loop(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """Calls ctx.check() again and again, and notes when it last began one that passed."""
    end, passed = time.monotonic() + seconds_of(ctx, job), 0.0
    try:
        while not GO[ctx.job].is_set() and time.monotonic() < end:
            began = time.monotonic()
            ctx.check()
            passed = began
            time.sleep(0.002)
    finally:
        note("last-check", **who(ctx), at=passed)
        if passed:
            note("effect", **who(ctx), at=passed)


def deaf(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """Notes that its signal is set, works on for all that, and returns."""
    end, told = time.monotonic() + seconds_of(ctx, job), False
    while not GO[ctx.job].is_set() and time.monotonic() < end:
        if not told and ctx.signal.is_set():
            told = True
            note("told", **who(ctx), abort_reason=ctx.abort_reason)
        time.sleep(0.01)


def polite(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """Returns when its signal is set."""
    ctx.signal.wait(seconds_of(ctx, job))


def own_error(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """Raises an exception of its own when its signal is set."""
    if ctx.signal.wait(seconds_of(ctx, job)):
        raise RuntimeError("told to stop")


def remember(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """Checkpoints what it resumed from and its own attempt, then sleeps until `go`."""
    save(ctx, [*(ctx.resume or []), f"{ctx.attempt} é"], flush=job.get("flush", False))
    note("checkpointed", **who(ctx))
    hold(ctx, job)


def save(ctx: leaselib.RunContext, value: Any, *, flush: bool) -> None:
    """Checkpoints, with a fact before, and one after if the store has it for certain."""
    note("saving", **who(ctx), value=value)
    ctx.checkpoint(value, flush=flush)
    if flush:
        note("saved", **who(ctx), value=value)


def work(ctx: leaselib.RunContext, job: dict[str, Any], *, saves: bool = False) -> None:
    """Side effects in a row, each after a check that passed; a fact says when that check began.

    With `saves` each effect is checkpointed.
    """
    end, number = time.monotonic() + seconds_of(ctx, job), 0
    while (began := time.monotonic()) < end or not number:
        ctx.check()
        number += 1
        note("effect", **who(ctx), at=began)
        if saves:
            save(ctx, [ctx.attempt, number], flush=True)
        time.sleep(0.05)


def work_and_save(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """As `work`, with a checkpoint after each effect."""
    work(ctx, job, saves=True)


def work_and_fail(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """As `work`, and then raises an exception of its own."""
    work(ctx, job)
    raise RuntimeError("as it always does")


def hog(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """Holds the interpreter lock, so that no other thread of this process can run."""
    # PyDLL keeps the lock during the call. One call only: between two, a heartbeat could begin a transaction.
    ctypes.PyDLL(None).usleep(round(seconds_of(ctx, job) * 1_000_000))


def hog_and_check(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """Holds the interpreter lock past the deadline, and goes on to check() before any other thread gets it."""
    sys.setswitchinterval(100)
    try:
        time.sleep(0.05)  # one that waits for the lock already would be given it after the usual interval
        hog(ctx, job)
        ctx.check()
        note("passed", **who(ctx))
    finally:
        sys.setswitchinterval(0.005)


def fork_and_exit(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """Forks; the child leaves at once, the parent waits for it."""
    child = os.fork()
    if not child:
        os._exit(0)
    note("child-ended", status=os.waitpid(child, 0)[1])


def fork_and_return(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """Forks; the child returns from the handler as if it were the parent."""
    fork_and(ctx, lambda: None)


def fork_and_raise(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """Forks; the child leaves the handler by sys.exit."""
    fork_and(ctx, lambda: sys.exit(7))


def fork_and(ctx: leaselib.RunContext, leave: Callable[[], None]) -> None:
    """Forks; the child notes what it sees and leaves like that."""
    child = os.fork()
    if child:
        note("child-ended", status=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    else:
        note("child-goes-on", signal=ctx.signal.is_set())
        leave()


def in_app(ctx: leaselib.RunContext, job: dict[str, Any]) -> None:
    """Uses Flask's current_app, then sleeps."""
    import flask

    note("app", name=flask.current_app.name, **who(ctx))
    ctx.sleep(seconds_of(ctx, job))


DO = {f.__name__: f for f in (quick, sleep, hold, loop, deaf, polite, own_error, remember, hog, hog_and_check)}
DO |= {f.__name__: f for f in (work, work_and_save, work_and_fail)}
DO |= {f.__name__: f for f in (fork_and_exit, fork_and_return, fork_and_raise, in_app)}


def who(ctx: leaselib.RunContext) -> dict[str, Any]:
    """Which attempt."""
    return {"job": ctx.job, "slot": ms(ctx.slot), "attempt": ctx.attempt, "token": ctx.token, "runner": ctx.runner}


def note_if_held(ctx: leaselib.RunContext) -> None:
    """Notes an effect if the run is held, as far as this process can tell."""
    began = time.monotonic()
    if not ctx.signal.is_set():
        note("effect", **who(ctx), at=began)


def handler_of(job: dict[str, Any]) -> Any:
    """The handler of a job: its `do`, with facts around it."""

    def handler(ctx: leaselib.RunContext) -> None:
        note("start", **who(ctx), reason=ctx.reason, fence=ctx.fence, resume=ctx.resume)
        note_if_held(ctx)
        STARTED.release()
        how = "returned"
        try:
            DO[job["do"]](ctx, job)
        except BaseException as error:
            how = type(error).__name__
            raise
        finally:
            note_if_held(ctx)
            note("end", **who(ctx), how=how, abort_reason=ctx.abort_reason)

    return handler


# ---- the scheduler --------------------------------------------------------------------------------------------------


def add(scheduler: leaselib.Scheduler, job: dict[str, Any]) -> None:
    """Registers a job: `name`, `do`, `every_ms`, and options of leaselib's."""
    options = {k: v for k, v in job.items() if k not in ("name", "do", "every_ms", "seconds", "flush")}
    interval = dt.timedelta(milliseconds=job["every_ms"])
    scheduler.add(handler_of(job), leaselib.Every(interval), name=job["name"], **options)


def listener(event: leaselib.Event) -> None:
    """Notes an event."""
    fields = {name: getattr(event, name) for name in ("job", "attempt", "token", "runner", "reason", "error", "count")}
    note("event", event=event.name, slot=ms(event.slot), handed_over=event.handed_over, **fields)


def build(**more: Any) -> leaselib.Scheduler:
    """The scheduler that CONF describes, not started."""
    scheduler = leaselib.Scheduler(CONF["url"], **CONF["options"], **more)
    for name in EVENT_NAMES:
        scheduler.on(name, listener)
    for job in CONF["jobs"]:
        add(scheduler, job)
    return scheduler


def obey(scheduler: leaselib.Scheduler) -> None:
    """Carries out the commands on stdin. Reads the descriptor: a thread inside sys.stdin would disturb the exit."""
    buffered = b""
    while data := os.read(0, 65536):
        *lines, buffered = (buffered + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            answer: Any = None
            try:
                answer = COMMANDS[command["do"]](scheduler, command)
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            note("answer", number=command["number"], answer=answer)


def health_of(scheduler: leaselib.Scheduler) -> dict[str, Any]:
    """The scheduler's health as JSON."""
    health = scheduler.health()
    return {name: getattr(health, name) for name in leaselib.Health.__slots__}


def rss_kb() -> int:
    """This process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * (os.sysconf("SC_PAGESIZE") // 1024)


COMMANDS: dict[str, Any] = {
    "add": lambda scheduler, command: add(scheduler, command["job"]),
    "remove": lambda scheduler, command: scheduler.remove(command["name"]),
    "go": lambda scheduler, command: GO[command["name"]].set(),
    "stop": lambda scheduler, command: scheduler.stop(command.get("timeout")),
    "start": lambda scheduler, command: scheduler.start().runner,
    "health": lambda scheduler, command: health_of(scheduler),
    "rss_kb": lambda scheduler, command: rss_kb(),
}


# ---- how the main thread goes on ------------------------------------------------------------------------------------


def first_start() -> None:
    """Waits until a handler has started in this process."""
    assert STARTED.acquire(timeout=20), "no handler started"


def forever(scheduler: leaselib.Scheduler) -> None:
    """run_forever."""
    scheduler.run_forever()


def end(scheduler: leaselib.Scheduler) -> None:
    """The main thread ends while a handler runs."""
    scheduler.start()
    first_start()


def stop_and_end(scheduler: leaselib.Scheduler) -> None:
    """Calls stop() while a handler runs, and ends."""
    scheduler.start()
    first_start()
    began = time.monotonic()
    note("stopped", result=scheduler.stop(), seconds=time.monotonic() - began)


def outlived(scheduler: leaselib.Scheduler) -> None:
    """The main thread ends while a handler is young, and a thread of the application's lives on."""
    threading.Thread(target=lambda: time.sleep(CONF["seconds"])).start()
    scheduler.start()
    first_start()


def fork(scheduler: leaselib.Scheduler) -> None:
    """Forks while a handler runs; then the main threads of both processes end."""
    scheduler.start()
    first_start()
    child = os.fork()
    if child:
        note("forked", child=child)


def fork_and_work(scheduler: leaselib.Scheduler) -> None:
    """Forks several children while a handler runs. They start nothing themselves; all live until SIGTERM comes."""
    scheduler.start()
    first_start()
    children = []
    for _ in range(CONF["children"]):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # as servers make their workers leave
            while True:
                signal.pause()
        children.append(child)
    note("forked", children=children)
    scheduler.run_forever()


def fork_often(scheduler: leaselib.Scheduler) -> None:
    """Forks again and again while jobs run. Each child looks at what it inherited, and leaves in one of three ways."""
    scheduler.start()
    first_start()
    for number in range(CONF["children"]):
        child = os.fork()
        if not child:
            links = map(descriptor, os.listdir("/proc/self/fd")) if CONF["foreign"] else ()
            inherited = [link for link in links if CONF["foreign"] in link]
            if inherited or scheduler.runner is not None or scheduler.running:
                note("inherited", descriptors=inherited, runner=scheduler.runner, running=str(scheduler.running))
            if number % 3 == 0:
                os._exit(0)
            if number % 3 == 1:
                scheduler.stop()
            return  # the interpreter ends as usual, atexit included
        status = os.waitpid(child, 0)[1]
        if status:
            note("child-failed", status=status, number=number)
    note("forks-done", runner=scheduler.runner)
    scheduler.run_forever()


def descriptor(number: str) -> str:
    """What an open descriptor refers to."""
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


def subprocesses(scheduler: leaselib.Scheduler) -> None:
    """Starts programs with a preexec_fn, which makes a child that forks first and execs a little later."""
    scheduler.start()
    first_start()
    program = """if True:
        import os, sys
        links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
        sys.exit(any(sys.argv[1] in os.readlink(link) for link in links if os.path.lexists(link)))"""
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-S", "-c", program, CONF["foreign"]],
            preexec_fn=lambda: time.sleep(0.6),
            close_fds=False,
            check=False,
        )
        note("subprocess-ended", status=done.returncode)
    scheduler.run_forever()


def mp_target() -> None:
    """The child of multiprocessing: ends while a handler of its own runs."""
    global STARTED
    if CONF["method"] != "fork":
        end(build())
    else:
        STARTED = threading.Semaphore(0)  # the inherited one may count the parent's
        first_start()
    note("target-end")


def mp(scheduler: leaselib.Scheduler) -> None:
    """A child made by multiprocessing ends, then this process does, each while a handler runs in it."""
    scheduler.start()
    first_start()
    child = multiprocessing.get_context(CONF["method"]).Process(target=mp_target)
    child.start()
    child.join(20)
    note("child-ended", status=child.exitcode, child=child.pid)


THEN = {
    f.__name__: f
    for f in (forever, end, stop_and_end, outlived, fork, fork_and_work, fork_often, subprocesses, mp)
}


def make_app() -> Any:
    """A Flask application whose scheduler starts with it, wherever gunicorn loads it."""
    import flask

    logging.basicConfig(level=logging.WARNING)
    app = flask.Flask("leaselib_test_app")
    scheduler = build(around=app.app_context)

    @app.get("/healthz")
    def healthz() -> dict[str, Any]:
        return {"pid": os.getpid(), "runner": scheduler.runner, **health_of(scheduler)}

    scheduler.start()
    note("up", runner=scheduler.runner)
    return app


def main() -> None:
    """Starts as CONF says. Warnings go to stderr, where the test looks for errors of leaselib's own."""
    logging.basicConfig(level=logging.WARNING)
    scheduler = build()
    threading.Thread(target=obey, args=(scheduler,), daemon=True).start()
    if CONF["then"] == "forever":
        scheduler.start()
        note("up", runner=scheduler.runner)
    with contextlib.suppress(KeyboardInterrupt):
        THEN[CONF["then"]](scheduler)
    note("main-end")


if __name__ == "__main__":
    main()
