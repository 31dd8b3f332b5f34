"""The demo's story: what instances told so far, and what is to be done next. No I/O, no clock, no threads.

The main thread owns a `Story`: it hears messages and returns lines for the time line.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from leaselib._model import Run
from leaselib.cli import _demo_plan as plan
from leaselib.cli._demo_judge import Blow, Evidence, Start, handover_of, takeover_of


@dataclass(frozen=True)
class Line:
    """A line of the time line."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Act:
    """What is to be done next. `announce`: give every instance the job `report`."""

    do: Literal["announce", "kill", "stop"]
    runner: str = ""


@dataclass
class Story:
    """See the module's text.

    Attributes:
        run: the run of `report` as the store had it last; set by whoever reads the store.
        backups: how many runs each instance watches.
        ticks: how many runs of `tick` each instance started.
        ended: the exit statuses of instances that are gone.
        over: whether `report` has succeeded.
    """

    run: Run | None = None
    up: list[str] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    steps: dict[int, list[int]] = field(default_factory=dict)
    backups: Counter[str] = field(default_factory=Counter)
    ticks: Counter[str] = field(default_factory=Counter)
    announced: bool = False
    killed: Blow | None = None
    stopped: Blow | None = None
    over: bool = False
    complaints: list[str] = field(default_factory=list)
    _stepped_ms: int = 0

    # ---- what is to be done -----------------------------------------------------------------------------------------

    def next_act(self, now_ms: int) -> Act | None:
        """The next act, if it is time for it (`now_ms`: by the instances' clock); `did` says that it was done."""
        if not self.announced:
            return Act("announce") if len(self.up) == len(plan.RUNNERS) else None
        attempt, runner = self.current()
        if runner is None or now_ms < self._stepped_ms + plan.INTO_STEP_S * 1000:
            return None
        step = max(self.steps.get(attempt, [0]))
        if self.killed is None and step >= plan.KILL_AFTER_STEP:
            return Act("kill", runner)
        if self.killed is not None and self.stopped is None and attempt > 1 and step >= plan.STOP_AFTER_STEP:
            return Act("stop", runner)
        return None

    def did(self, act: Act, at_ms: int) -> None:
        """The act was done then, on the store's clock."""
        if act.do == "announce":
            self.announced = True
        elif act.do == "kill":
            self.killed = Blow(act.runner, at_ms)
        else:
            self.stopped = Blow(act.runner, at_ms)

    @property
    def hopeless(self) -> bool:
        """Whether there is nobody left to go on, or to begin with."""
        return len(self.ended) == len(plan.RUNNERS) or (bool(self.ended) and not self.announced)

    def current(self) -> tuple[int, str | None]:
        """The latest attempt of `report` that an instance started, and which; 0 and None before the first."""
        latest = max((s for s in self.starts if s.job == plan.REPORT), key=lambda s: s.attempt, default=None)
        return (0, None) if latest is None else (latest.attempt, latest.runner)

    def done_steps(self) -> int:
        """How far `report` is."""
        return max((step for steps in self.steps.values() for step in steps), default=0)

    def evidence(self, ticks: list[Run]) -> Evidence:
        """What there is to judge by."""
        return Evidence(
            up=tuple(self.up),
            starts=tuple(self.starts),
            steps={attempt: tuple(steps) for attempt, steps in self.steps.items()},
            killed=self.killed,
            stopped=self.stopped,
            report=self.run,
            ticks=tuple(ticks),
            complaints=tuple(self.complaints),
        )

    # ---- what was heard -----------------------------------------------------------------------------------------

    def hear(self, runner: str, body: dict[str, Any]) -> list[Line]:
        """An instance's message; returns what to tell about it."""
        kind = body.get("is")
        if kind == "up":
            self.up.append(runner)
            return []
        if kind == "step":
            self.steps.setdefault(body["attempt"], []).append(body["step"])
            self._stepped_ms = body["at_ms"]
        elif kind == "pulse":
            self.backups[runner] = body["backups"]
        elif kind == "ended":
            return self._ended(runner, body["status"])
        elif kind == "event":
            return self._event(runner, body)
        return []

    def _ended(self, runner: str, status: int) -> list[Line]:
        self.ended[runner] = status
        self.backups.pop(runner, None)
        if self.killed is not None and self.killed.runner == runner:
            return []
        if self.over or (self.stopped is not None and self.stopped.runner == runner and status == 0):
            return [Line(f"{runner} has ended")]
        text = f"{runner} ended by itself, with status {status}"
        self.complaints.append(text)
        return [Line(text, "red")]

    def _event(self, runner: str, body: dict[str, Any]) -> list[Line]:
        name, job = body["name"], body["job"]
        if name == "start":
            self.starts.append(Start(runner, job, body["slot_ms"], body["attempt"], body["reason"]))
            if job == plan.TICK:
                self.ticks[runner] += 1
                return []
            return [self._report_start(runner, body["attempt"], body["reason"])]
        if job == plan.REPORT and name == "interrupted" and body["handed_over"]:
            return [Line(f"{runner} released its lease: nobody has to wait until it runs out")]
        if job == plan.REPORT and name == "success":
            self.over = True
            return [Line(f"{runner} has finished {plan.REPORT}, recorded as success", "green")]
        if name in ("failed", "lost", "store_error") or (name == "interrupted" and job == plan.REPORT):
            about = ", ".join(str(x) for x in (body["reason"], body["error"]) if x is not None)
            return [Line(f"{runner}: {name} of {job or 'the store'}: {about}", "yellow")]
        return []

    def _report_start(self, runner: str, attempt: int, reason: str) -> Line:
        if attempt == 1:
            others = " and ".join(other for other in plan.RUNNERS if other != runner)
            return Line(f"{runner} won the claim: it runs {plan.REPORT}; {others} watch it as backups", "cyan")
        did = {"takeover": "took over", "hand-over": "went on"}.get(reason, f"started ({reason})")
        text = f"{runner} {did}: attempt {attempt}, from step {self.done_steps() + 1}"
        gap = takeover_of(self.run, self.killed) if reason == "takeover" else handover_of(self.run, self.stopped)
        if gap is None or gap.to_attempt != attempt:
            return Line(text, "cyan")
        if reason == "takeover":
            bound = f"at most {plan.TAKEOVER_BOUND_S:.1f}"
            return Line(f"{text}; {gap.since_heartbeat:.2f} s after the last heartbeat ({bound})", "green")
        return Line(f"{text}; {gap.since_end:.2f} s after the release (at most {plan.HANDOVER_BOUND_S:.1f})", "green")
