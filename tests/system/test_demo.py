"""The demo: what it judges, by made-up evidence; and that it happens, fails, and cleans up, with real processes."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from test_cli_terminal import Typed, environment, leaselib

from leaselib import Run
from leaselib._model import Attempt, from_ms
from leaselib.cli import _demo_plan as plan
from leaselib.cli._demo_judge import Blow, Check, Evidence, Start, judge
from leaselib.cli._demo_story import Act, Story

T_MS = 1_800_000_000_000
ALL = ["instances", "once", "takeover", "hand-over", "finish"]


# ---- judging --------------------------------------------------------------------------------------------------------


def at(seconds: float) -> Any:
    """An instant of the made-up demo."""
    return from_ms(T_MS + round(seconds * 1000))


def run_of(job: str, status: Any, attempts: list[tuple[str, float, float | None, str | None]], slot: float = 0) -> Run:
    """A run with such attempts: runner, start, end, outcome."""
    log = tuple(
        Attempt(number, runner, at(start), None if end is None else at(end), outcome)
        for number, (runner, start, end, outcome) in enumerate(attempts, 1)
    )
    last = log[-1]
    return Run(
        job=job, slot=at(slot), status=status, attempt=last.number, handovers=0, token="t", runner=last.runner,
        fence=1, lease=plan.LEASE_S, lease_end=at(100), released=False, reason="scheduled", started_at=last.started_at,
        ended_at=last.ended_at, error=None, checkpoint=plan.STEPS, attempts=log,
    )  # fmt: skip


def start(runner: str, attempt: int, reason: str) -> Start:
    """An instance said that it started that attempt of `report`."""
    return Start(runner, plan.REPORT, T_MS, attempt, reason)


# app-1 starts at 0 and is killed at 2.7, its lease (last renewed at 2.5) ends at 5.5; app-2 takes over at 6.1, gets its
# SIGTERM at 8.5 and releases at 8.6; app-3 goes on at 9.2 and finishes.
GOOD = Evidence(
    up=plan.RUNNERS,
    starts=(
        start("app-1", 1, "scheduled"),
        start("app-2", 2, "takeover"),
        start("app-3", 3, "hand-over"),
        *(Start(f"app-{n}", plan.TICK, T_MS + n * 1000, 1, "scheduled") for n in (1, 2, 3)),
    ),
    steps={1: (1, 2, 3, 4), 2: (5, 6, 7, 8), 3: (9, 10, 11, 12)},
    killed=Blow("app-1", T_MS + 2700),
    stopped=Blow("app-2", T_MS + 8500),
    report=run_of(
        plan.REPORT,
        "success",
        [("app-1", 0, 5.5, "expired"), ("app-2", 6.1, 8.6, "handed-over"), ("app-3", 9.2, 12, "success")],
    ),
    ticks=tuple(run_of(plan.TICK, "success", [(f"app-{n}", n, n, "success")], n) for n in (1, 2, 3)),
)


def with_attempts(evidence: Evidence, *attempts: tuple[str, float, float | None, str | None]) -> Evidence:
    """The same, but the store has other attempts of `report`."""
    status = "success" if attempts[-1][3] == "success" else "running"
    return replace(evidence, report=run_of(plan.REPORT, status, list(attempts)))


def check_of(evidence: Evidence, name: str) -> Check:
    """One of the checks."""
    return next(check for check in judge(evidence) if check.name == name)


def test_good_evidence_passes_every_check_with_its_figures() -> None:
    """Takeover from the last heartbeat, from the kill and from the lease's end; hand-over from release and signal."""
    checks = judge(GOOD)
    assert [check.name for check in checks if check.ok] == ALL
    takeover, handover = checks[2], checks[3]
    assert (takeover.measured, takeover.bound) == (3.6, plan.LEASE_S + 2 * plan.HEARTBEAT_S)
    assert dict(takeover.more) == {"from": "app-1", "to": "app-2", "since_kill": 3.4, "since_lease_end": 0.6}
    assert (handover.measured, handover.bound) == (0.6, 2 * plan.HEARTBEAT_S)
    assert dict(handover.more) == {"from": "app-2", "to": "app-3", "since_sigterm": 0.7}
    assert dict(checks[1].more) == {"due": 3, "started": 3, "twice": 0}


A1, A2, A3 = ("app-1", 0, 5.5, "expired"), ("app-2", 6.1, 8.6, "handed-over"), ("app-3", 9.2, 12, "success")
MADE_UP: dict[str, tuple[Evidence, set[str], str]] = {
    "an instance did not come up": (replace(GOOD, up=("app-1", "app-2")), {"instances"}, "app-3 did not come up"),
    "an instance died by itself": (replace(GOOD, complaints=("app-3 ended by itself",)), {"instances"}, "by itself"),
    "a slot was started twice": (
        replace(GOOD, starts=(*GOOD.starts, Start("app-2", plan.TICK, T_MS + 1000, 1, "scheduled"))),
        {"once"},
        "started 2 times",
    ),
    "an attempt was started twice": (
        replace(GOOD, starts=(*GOOD.starts, start("app-3", 2, "takeover"))),
        {"once", "takeover"},
        "started 2 times",
    ),
    "no tick ran": (replace(GOOD, ticks=()), {"once"}, "no run of tick"),
    "nothing ran at all": (
        Evidence(plan.RUNNERS, (), {}, None, None, None, ()),
        {"once", "takeover", "hand-over", "finish"},
        "nobody was killed: nothing ran",
    ),
    "report never got far enough": (
        replace(with_attempts(GOOD, ("app-1", 0, None, None)), killed=None, stopped=None, steps={1: (1, 2)}),
        {"takeover", "hand-over", "finish"},
        "report got to step 2 of 12",
    ),
    "nobody took over": (
        replace(with_attempts(GOOD, ("app-1", 0, None, None)), stopped=None),
        {"takeover", "hand-over", "finish"},
        "nobody took over from app-1",
    ),
    "the lease ended, but of another instance": (
        with_attempts(GOOD, ("app-3", 0, 5.5, "expired"), A2, A3),
        {"takeover"},
        "nobody took over from app-1",
    ),
    "the takeover was too late": (
        with_attempts(GOOD, A1, ("app-2", 7.2, 8.6, "handed-over"), A3),
        {"takeover"},
        "over the bound",
    ),
    "the takeover was too early": (
        with_attempts(GOOD, A1, ("app-2", 5.4, 8.6, "handed-over"), A3),
        {"takeover"},
        "before the lease had ended",
    ),
    "the killed instance itself went on": (
        replace(
            with_attempts(GOOD, A1, ("app-1", 6.1, 8.6, "handed-over"), A3), stopped=Blow("app-1", T_MS + 8500)
        ),
        {"takeover"},
        "the same instance",
    ),
    "no instance says that it took over": (
        replace(GOOD, starts=tuple(s for s in GOOD.starts if s.attempt != 2)),
        {"takeover"},
        "no instance says",
    ),
    "the takeover was no takeover": (
        replace(GOOD, starts=(*(s for s in GOOD.starts if s.attempt != 2), start("app-2", 2, "hand-over"))),
        {"takeover"},
        "as a takeover",
    ),
    "nothing was handed over": (
        with_attempts(GOOD, A1, ("app-2", 6.1, 11.5, "expired"), ("app-3", 12, 15, "success")),
        {"hand-over"},
        "app-2 handed nothing over",
    ),
    "the hand-over was too slow": (
        with_attempts(GOOD, A1, A2, ("app-3", 10.2, 13, "success")),
        {"hand-over"},
        "over the bound",
    ),
    "nobody went on": (
        with_attempts(GOOD, A1, ("app-2", 6.1, None, None)),
        {"hand-over", "finish"},
        "app-2 handed nothing over",
    ),
    "the run is not finished": (with_attempts(GOOD, A1, A2, ("app-3", 9.2, None, None)), {"finish"}, "is running"),
    "a step was left out": (replace(GOOD, steps={**GOOD.steps, 2: (5, 6, 8)}), {"finish"}, "nobody did step 7"),
}


@pytest.mark.parametrize("what", MADE_UP)
def test_evidence_with_something_missing_fails_the_checks_that_it_should(what: str) -> None:
    """Those and no others, and the text says what was missing."""
    evidence, fails, text = MADE_UP[what]
    failed = [check for check in judge(evidence) if not check.ok]
    assert {check.name for check in failed} == fails
    assert any(text in check.text for check in failed)


@pytest.mark.parametrize("late", [True, False])
def test_the_bound_is_the_rules_own_and_half_a_second_for_the_machine(late: bool) -> None:
    """No more than that."""
    allowed = plan.HANDOVER_BOUND_S + plan.ALLOWANCE_S + (0.001 if late else 0)
    evidence = with_attempts(GOOD, A1, A2, ("app-3", 8.6 + allowed, 13, "success"))
    assert check_of(evidence, "hand-over").ok is not late
    allowed = plan.TAKEOVER_BOUND_S + plan.ALLOWANCE_S + (0.001 if late else 0)
    evidence = with_attempts(GOOD, A1, ("app-2", 2.5 + allowed, 8.6, "handed-over"), A3)
    assert check_of(evidence, "takeover").ok is not late


# ---- the story ------------------------------------------------------------------------------------------------------


def hear_start(story: Story, runner: str, attempt: int, reason: str) -> None:
    """`report` starts there."""
    event = {"name": "start", "job": plan.REPORT, "slot_ms": T_MS, "attempt": attempt, "reason": reason}
    story.hear(runner, {"is": "event", "error": None, "handed_over": False, **event})


def hear_step(story: Story, runner: str, attempt: int, step: int, at_ms: int) -> None:
    """A step is done."""
    story.hear(runner, {"is": "step", "attempt": attempt, "step": step, "at_ms": at_ms})


def test_the_story_goes_from_act_to_act_by_what_it_hears() -> None:
    """Announce once all are up; kill the runner in the middle of a step; stop the one that took over."""
    story, later_ms = Story(), T_MS + 10_000
    for runner in plan.RUNNERS:
        assert story.next_act(T_MS) is None
        story.hear(runner, {"is": "up"})
    assert story.next_act(T_MS) == Act("announce")
    story.did(Act("announce"), T_MS)
    assert story.next_act(later_ms) is None
    hear_start(story, "app-2", 1, "scheduled")
    hear_step(story, "app-2", 1, plan.KILL_AFTER_STEP - 1, T_MS)
    assert story.next_act(later_ms) is None
    hear_step(story, "app-2", 1, plan.KILL_AFTER_STEP, T_MS)
    assert story.next_act(T_MS) is None
    assert story.next_act(later_ms) == Act("kill", "app-2")
    story.did(Act("kill", "app-2"), T_MS)
    story.hear("app-2", {"is": "ended", "status": -9})
    assert story.next_act(later_ms) is None
    hear_start(story, "app-3", 2, "takeover")
    assert story.next_act(later_ms) is None
    hear_step(story, "app-3", 2, plan.STOP_AFTER_STEP, T_MS)
    assert story.next_act(later_ms) == Act("stop", "app-3")
    story.did(Act("stop", "app-3"), T_MS)
    assert story.next_act(later_ms) is None
    assert not story.complaints
    assert not story.hopeless


def test_an_instance_that_ends_by_itself_is_a_complaint_and_before_the_beginning_the_end() -> None:
    """The demo doesn't wait for what can't come any more."""
    story = Story()
    story.hear("app-1", {"is": "ended", "status": 1})
    assert story.complaints == ["app-1 ended by itself, with status 1"]
    assert story.hopeless


# ---- real processes -------------------------------------------------------------------------------------------------


@dataclass
class Demo:
    """A demo that runs in the background, its temporary files in a folder of the test's."""

    popen: subprocess.Popen[str]
    folder: Path
    seen: str = ""

    def line_with(self, text: str) -> str:
        """Reads its time line until such a line."""
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.seen += line
            if text in line:
                return line
        raise AssertionError(f"no {text!r} in:\n{self.seen}")

    def pids(self) -> dict[str, int]:
        """Its instances' process ids."""
        found = {runner: int(pid) for runner, pid in re.findall(r"(app-\d) \(pid (\d+)\)", self.line_with("(pid "))}
        assert tuple(found) == plan.RUNNERS
        return found


@pytest.fixture
def demo(tmp_path: Path) -> Any:
    """Starts `leaselib demo --json`; its time line is on standard error."""
    started: list[subprocess.Popen[str]] = []

    def begin() -> Demo:
        env = environment(TMPDIR=str(tmp_path))
        popen = subprocess.Popen(
            leaselib("demo", "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        started.append(popen)
        return Demo(popen, tmp_path)

    yield begin
    for popen in started:
        popen.kill()
        popen.communicate()


def gone(pid: int) -> bool:
    """Whether a process has ended, whether or not anybody has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.system
@pytest.mark.timeout(60)
def test_the_demo_happens_in_time_and_leaves_nothing_behind(demo: Callable[[], Demo]) -> None:
    """Its summary is one line of JSON; every process and file is gone."""
    it = demo()
    pids = it.pids()
    out, err = it.popen.communicate(timeout=40)
    err = it.seen + err
    assert it.popen.returncode == 0, err
    found = json.loads(out)
    assert found["demo"] is True
    assert found["missing"] == []
    assert found["seconds"] < 30
    checks = {check["name"]: check for check in found["checks"]}
    assert list(checks) == ALL
    assert 3.0 <= checks["takeover"]["measured"] <= checks["takeover"]["bound"] + plan.ALLOWANCE_S
    assert checks["takeover"]["since_kill"] < checks["takeover"]["measured"]
    assert 0 <= checks["hand-over"]["measured"] <= checks["hand-over"]["bound"] + plan.ALLOWANCE_S
    assert len({checks["takeover"]["from"], checks["takeover"]["to"], checks["hand-over"]["to"]}) == 3
    assert (checks["finish"]["attempts"], checks["finish"]["handovers"]) == (3, 1)
    assert "\x1b" not in err
    assert err.isascii()
    assert f"at most lease + 2 heartbeats = {plan.TAKEOVER_BOUND_S:.1f} s" in " ".join(err.split())
    assert f"SIGKILL to {checks['takeover']['from']}" in err
    assert all(gone(pid) for pid in pids.values())
    assert not list(it.folder.iterdir())


@pytest.mark.system
@pytest.mark.timeout(60)
def test_the_demo_is_drawn_on_a_terminal(tmp_path: Path) -> None:
    """What will happen, a row per instance, the lease, the time line, a closing summary; in 80 columns too."""
    typed = Typed(*leaselib("demo"), columns=80, TMPDIR=str(tmp_path))
    try:
        assert typed.ended(40) == 0, typed.text
        typed.wait_for("it all happened")
    finally:
        typed.close()
    text = typed.text
    for shown in (
        "leaselib demo", "backup of report", "● up", "● killed", "● stopped", "lease of report, held by", "s left",
        "SIGKILL to", "took over", "SIGTERM to", "released its lease", "went on", "as the store recorded it",
        "(bound: 4.00 s)", "(bound: 1.00 s)", "✔ takeover after SIGKILL",
    ):  # fmt: skip
        assert shown in text
    assert typed.raw.rindex("\x1b[?25h") > typed.raw.rindex("\x1b[?25l")
    assert not list(tmp_path.iterdir())


@pytest.mark.system
@pytest.mark.timeout(60)
def test_the_demo_fails_and_says_why_if_nobody_is_left_to_take_over(demo: Callable[[], Demo]) -> None:
    """Both backups are killed as soon as the runner was."""
    it = demo()
    pids = it.pids()
    killed = re.search(r"SIGKILL to (app-\d)", it.line_with("SIGKILL to"))
    assert killed is not None
    for runner, pid in pids.items():
        if runner != killed.group(1):
            os.kill(pid, signal.SIGKILL)
    out, err = it.popen.communicate(timeout=30)
    assert it.popen.returncode == 1
    found = json.loads(out)
    assert found["demo"] is False
    missing = {text.partition(":")[0] for text in found["missing"]}
    assert missing == {"instances", "takeover", "hand-over", "finish"}
    assert f"nobody took over from {killed.group(1)}" in out
    assert "MISSED" in err
    assert not list(it.folder.iterdir())


@pytest.mark.system
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_the_demo_cleans_up_however_it_is_ended(demo: Callable[[], Demo], number: int, code: int) -> None:
    """After SIGKILL the instances see to it themselves."""
    it = demo()
    pids = it.pids()
    it.line_with("won the claim")
    ends = [os.pidfd_open(pid) for pid in pids.values()]
    it.popen.send_signal(number)
    assert it.popen.wait(15) == code
    for end in ends:
        assert select.select([end], [], [], 15)[0], "an instance goes on"
        os.close(end)
    assert list(it.folder.iterdir()) == []
