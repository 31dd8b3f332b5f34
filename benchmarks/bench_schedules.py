"""How fast schedules find their slots, beside croniter and cronsim in the same run.

    python benchmarks/bench_schedules.py

Prints microseconds per slot, walking on from slot to slot, and what a new object costs; each figure is the best of
several rounds, as other work on the machine only ever adds to it. Ratios above 1 mean that leaselib is faster.
The peers answer the same question here; around clock changes their answers differ (see the tests).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from zoneinfo import ZoneInfo

from croniter import croniter
from cronsim import CronSim

from leaselib.schedules import Cron, Every

ROUNDS = 7
SLOTS = 200
START = datetime(2026, 3, 1, 3, 4, 5, tzinfo=timezone.utc)
EXPRESSIONS = [
    ("0 6 * * *", "Europe/Paris"),
    ("*/5 * * * *", "Europe/Paris"),
    ("0 * * * *", "America/New_York"),
    ("*/15 9-17 * * 1-5", "UTC"),
    ("0 9 13 * 5", "America/New_York"),
    ("0 9 * * 1#1", "Europe/London"),
    ("*/10 * * * * *", "UTC"),
    ("0 0 29 2 *", "UTC"),
    ("0 0 29 2 *", "America/New_York"),
]
NEVER = ["0 0 30 2 *", "0 0 31 4,6,9,11 *"]


def best_us(work: Callable[[], object], count: int) -> float:
    """Microseconds for one of `count`, in the best round."""
    best_ns = min(timed_ns(work) for _ in range(ROUNDS))
    return best_ns / count / 1_000


def timed_ns(work: Callable[[], object]) -> int:
    """Nanoseconds for one call."""
    started_ns = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - started_ns


def walk_ours(schedule: Cron | Every) -> None:
    """By the public `next`."""
    at = START
    for _ in range(SLOTS):
        at = schedule.next(at)


def walk_ours_ms(schedule: Cron | Every) -> None:
    """By `next_ms`, which the scheduler uses."""
    at_ms: int | None = round(START.timestamp() * 1_000)
    for _ in range(SLOTS):
        assert at_ms is not None
        at_ms = schedule.next_ms(at_ms)


def walk_croniter(expression: str, zone: str) -> None:
    """One object, kept."""
    slots = croniter(expression, START.astimezone(ZoneInfo(zone)), second_at_beginning=True)
    for _ in range(SLOTS):
        slots.get_next(datetime)


def walk_cronsim(expression: str, zone: str) -> None:
    """One object, kept."""
    slots = CronSim(expression, START.astimezone(ZoneInfo(zone)))
    for _ in range(SLOTS):
        next(slots)


def refuse(expression: str) -> None:
    """What a date that never comes costs."""
    try:
        Cron(expression)
    except ValueError:
        return
    raise AssertionError(f"{expression} was accepted")


def main() -> None:
    """Prints all tables."""
    print(f"Python {platform.python_version()}, {platform.machine()}; ", end="")
    print(", ".join(f"{name} {version(name)}" for name in ("croniter", "cronsim")))
    print(f"\n{'us per slot':<40}{'next':>8}{'next_ms':>9}{'croniter':>10}{'cronsim':>9}{'ratios of next':>18}")
    for expression, zone in EXPRESSIONS:
        schedule = Cron(expression, zone)
        ours = best_us(lambda: walk_ours(schedule), SLOTS)  # noqa: B023 - called at once
        ours_ms = best_us(lambda: walk_ours_ms(schedule), SLOTS)  # noqa: B023
        theirs = best_us(lambda: walk_croniter(expression, zone), SLOTS)  # noqa: B023
        second = best_us(lambda: walk_cronsim(expression, zone), SLOTS)  # noqa: B023
        print(f"{expression + '  ' + zone:<40}{ours:>8.1f}{ours_ms:>9.1f}{theirs:>10.1f}{second:>9.1f}", end="")
        print(f"{theirs / ours:>11.1f}{second / ours:>7.1f}")
    every = Every(300)
    print(f"{'every 5 min':<40}{best_us(lambda: walk_ours(every), SLOTS):>8.2f}", end="")
    print(f"{best_us(lambda: walk_ours_ms(every), SLOTS):>9.2f}")

    texts = [f"{n % 60} {n % 24} {n % 28 + 1} * *" for n in range(2_000)]
    ours = best_us(lambda: [Cron(text, "Europe/Paris") for text in texts], len(texts))
    theirs = best_us(lambda: [croniter(text, START) for text in texts], len(texts))
    second = best_us(lambda: [CronSim(text, START) for text in texts], len(texts))
    print(f"\nnew object: {ours:.0f} us (10,000: {ours / 100:.2f} s), croniter {theirs:.0f}, cronsim {second:.0f}")
    for expression in NEVER:
        print(f"{expression} refused in {best_us(lambda: refuse(expression), 1):.0f} us")  # noqa: B023


if __name__ == "__main__":
    main()
