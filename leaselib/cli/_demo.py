"""`leaselib demo`: three instances, a killed runner, a takeover, a hand-over; live, measured, and judged.

The main thread runs it and owns everything: the crew of processes, the story, the screen, a store to read from.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta

from leaselib import _clock
from leaselib._model import Run, from_ms
from leaselib.cli import _demo_plan as plan
from leaselib.cli import _output
from leaselib.cli._command import Command
from leaselib.cli._demo_crew import Crew, ended_by_exception
from leaselib.cli._demo_judge import Check, judge
from leaselib.cli._demo_screen import Screen, screen_for
from leaselib.cli._demo_story import Act, Story
from leaselib.stores import SQLiteStore, open_store

DETAILS = """\
Starts three instances in processes of their own on a temporary SQLite file, kills the one that runs a job, shows a
backup take over, stops that one and shows the hand-over; then says what was measured, and against which bounds. Takes
about 15 seconds, 30 at most, and leaves no process and no file behind.

On a terminal, and with the extra `cli` installed (rich), the instances are drawn in place. Otherwise, also with --plain
or NO_COLOR, it is plain text. With --json all that goes to standard error, and standard output gets one line of JSON.

Exit code: 0 if it all happened within its bounds; 1 if not, and the summary says what was missing.
"""
REFRESH_S = 0.1
SHOWN_TICKS = 1000


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plain", action="store_true", help="lines only, nothing is drawn in place")
    parser.add_argument("--json", action="store_true", help="a summary for programs on standard output")


def _run(args: argparse.Namespace) -> int:
    screen = screen_for(sys.stderr if args.json else sys.stdout, plain=args.plain)
    try:
        with ended_by_exception(), Crew() as crew:
            show = _Show(crew, screen)
            try:
                screen.start()
                show.run()
            finally:
                screen.close()
            checks, seconds = show.judged(), show.seconds()
    except KeyboardInterrupt:
        screen.say("ended by Ctrl-C; no process and no file is left")
        raise
    except BrokenPipeError:  # nobody saw it
        _output.forget_stdout()
        return _output.TROUBLE
    happened = all(check.ok for check in checks)
    missed = ", ".join(check.name for check in checks if not check.ok)
    verdict = f"it all happened, in {seconds:.1f} s" if happened else f"after {seconds:.1f} s, missed: {missed}"
    screen.summary(checks, verdict)
    if args.json:
        _output.say_json(_summary(checks, seconds))
    return _output.FINE if happened else _output.TROUBLE


class _Show:
    """One performance."""

    def __init__(self, crew: Crew, screen: Screen) -> None:
        self._crew, self._screen = crew, screen
        self._story = Story()
        self._began_ms = _clock.SYSTEM.boot_ms()
        store = open_store(crew.url)
        assert isinstance(store, SQLiteStore)
        self._store = store
        self._slot_ms: int | None = None
        self._pids: dict[str, int] = {}

    def seconds(self) -> float:
        """Since the beginning."""
        return (_clock.SYSTEM.boot_ms() - self._began_ms) / 1000

    def run(self) -> None:
        """Until the story is over, or can't go on, or took too long."""
        try:
            for runner in plan.RUNNERS:
                self._crew.start(runner)
                self._pids[runner] = self._crew.pid(runner)
            self._tell(f"{', '.join(f'{r} (pid {p})' for r, p in self._pids.items())} start")
            while not (self._story.over or self._story.hopeless) and self.seconds() < plan.LIMIT_S:
                self._listen()
                act = self._story.next_act(_clock.SYSTEM.wall_ms())
                if act is not None:
                    self._do(act)
            if self._story.over:
                self._tell("the last instance is told to stop as well")
            self._crew.stop_all()
            self._listen()
            self._ticks = self._store.runs(plan.TICK, SHOWN_TICKS)
        finally:
            self._store.close()

    def judged(self) -> list[Check]:
        """What there is to say about it."""
        return judge(self._story.evidence(self._ticks))

    def _listen(self) -> None:
        messages = self._crew.receive(REFRESH_S)
        if self._slot_ms is not None:
            self._story.run = self._store.get(plan.REPORT, from_ms(self._slot_ms))
        for message in messages:
            for line in self._story.hear(message.runner, message.body):
                self._tell(line.text, line.style)
            if message.body.get("is") == "ended" and message.body["status"] not in (0, -9):
                complaint = self._crew.complaint(message.runner)
                if complaint:
                    self._tell(f"its last words: {complaint}", "red")
        self._screen.picture(self._story, self._pids, _left(self._story.run))

    def _do(self, act: Act) -> None:
        now_ms = _clock.SYSTEM.wall_ms()
        if act.do == "announce":
            self._slot_ms = now_ms + round(plan.REPORT_DELAY_S * 1000)
            for runner in plan.RUNNERS:
                self._crew.send(runner, do="report", slot_ms=self._slot_ms)
            due = from_ms(self._slot_ms).time().isoformat("milliseconds")
            self._tell(f"all are up; {plan.REPORT} is due at {due}Z, in {plan.REPORT_DELAY_S:g} s")
        elif act.do == "kill":
            now_ms = self._crew.kill(act.runner)
            step = self._story.done_steps() + 1
            self._tell(f"SIGKILL to {act.runner} (pid {self._pids[act.runner]}), in step {step} of {plan.STEPS}", "red")
            left = _left(self._story.run)
            if left is not None:
                self._tell(f"nobody knows yet that it is dead: its lease ends in {max(left, 0):.1f} s")
        else:
            now_ms = self._crew.stop(act.runner)
            step = self._story.done_steps() + 1
            pid = self._pids[act.runner]
            self._tell(f"SIGTERM to {act.runner} (pid {pid}), in step {step} of {plan.STEPS}", "yellow")
        self._story.did(act, now_ms)

    def _tell(self, text: str, style: str = "") -> None:
        self._screen.line(self.seconds(), text, style)


def _left(run: Run | None) -> float | None:
    """Seconds until the lease ends; this machine's clock is the store's."""
    if run is None or run.status != "running":
        return None
    return (run.lease_end - from_ms(_clock.SYSTEM.wall_ms())) / timedelta(seconds=1)


def _summary(checks: list[Check], seconds: float) -> dict[str, object]:
    return {
        "demo": all(check.ok for check in checks),
        "seconds": round(seconds, 1),
        "lease": plan.LEASE_S,
        "heartbeat": plan.HEARTBEAT_S,
        "missing": [f"{check.name}: {check.text}" for check in checks if not check.ok],
        "checks": [
            {
                "name": check.name,
                "ok": check.ok,
                "text": check.text,
                "measured": check.measured,
                "bound": check.bound,
                **dict(check.more),
            }
            for check in checks
        ],
    }


DEMO = Command("demo", "three instances, a killed one, a takeover and a hand-over, live", DETAILS, _add_arguments, _run)
