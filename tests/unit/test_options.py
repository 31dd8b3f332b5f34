"""Options: defaults, what durations may be, and each refusal with the words that its message must hold."""

from __future__ import annotations

import os
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from leaselib._options import LONGEST_MS, JobOptionsDict, choice, default_workers, duration_ms, job_options, whole
from leaselib.errors import ConfigurationError, LeaselibError


def test_the_defaults_are_those_of_the_table():
    options = job_options({})
    assert (options.lease_ms, options.heartbeat_ms, options.max_attempts) == (30_000, 5_000, 3)
    assert (options.overlap, options.on_store_loss) == ("skip", "abort")
    assert (options.jitter_ms, options.catch_up_ms, options.max_late_ms) == (None, 300_000, 60_000)
    assert (options.history_size, options.max_runtime_ms, options.around) == (100, None, None)


@pytest.mark.parametrize(
    ("lease", "heartbeat_ms"), [(30, 5_000), (600, 5_000), (12, 2_000), (0.6, 100), (0.01, 1)]
)
def test_the_default_heartbeat_is_five_seconds_or_a_sixth_of_a_smaller_lease(lease: float, heartbeat_ms: int):
    assert job_options({"lease": lease}).heartbeat_ms == heartbeat_ms


@pytest.mark.parametrize(("jitter", "gap_ms", "most_ms"), [
    (None, 60_000, 1_000),
    (None, 5_000, 500),
    (None, 1, 0),
    (0, 60_000, 0),
    (8, 60_000, 8_000),
    (8, 5_000, 5_000),
])
def test_jitter_is_a_second_or_a_tenth_of_the_gap_unless_set_and_never_over_the_gap(
    jitter: float | None, gap_ms: int, most_ms: int
):
    options = job_options({} if jitter is None else {"jitter": jitter})
    assert options.jitter(gap_ms) == most_ms


@pytest.mark.parametrize(
    ("lease", "heartbeat", "margin_ms", "call_ms", "beat_ms"),
    [
        (30, 5, 5_000, 10_000, 5_000),
        (30, 14, 7_500, 10_000, 5_000),
        (300, 5, 5_000, 10_000, 5_000),
        (3, 0.5, 500, 1_000, 500),
        (0.06, 0.01, 10, 50, 50),
    ],
)
def test_margin_and_timeouts_follow_from_lease_and_heartbeat(
    lease: float, heartbeat: float, margin_ms: int, call_ms: int, beat_ms: int
):
    options = job_options({"lease": lease, "heartbeat": heartbeat})
    assert (options.margin_ms, options.call_timeout_ms, options.beat_timeout_ms) == (margin_ms, call_ms, beat_ms)


def test_runs_are_kept_for_the_latest_claim_that_may_come():
    assert job_options({"max_late": 10, "catch_up": 20}).keep_ms == 20_000
    assert job_options({"max_late": 30, "catch_up": 20}).keep_ms == 30_000


@pytest.mark.parametrize(
    ("value", "ms"),
    [(1, 1_000), (0.25, 250), (0, 0), (1.0004, 1_000), (timedelta(minutes=1, microseconds=500), 60_000)],
)
def test_a_duration_is_seconds_or_a_timedelta(value: Any, ms: int):
    assert duration_ms("lease", value, least_ms=0) == ms


@pytest.mark.parametrize("value", [True, "30", None, b"1", Decimal(3), [30], object()])
def test_what_is_no_duration_is_refused_with_an_example(value: object):
    with pytest.raises(ConfigurationError, match=r"catch_up must be a number of seconds or a timedelta, such as "):
        duration_ms("catch_up", value, least_ms=0)


@pytest.mark.parametrize(
    "value",
    [-1, -0.001, float("nan"), float("inf"), float("-inf"), 10**400, -(10**400), 1e300, timedelta(-1), timedelta.max],
)
def test_what_no_clock_can_wait_for_is_refused_with_the_range(value: Any):
    with pytest.raises(ConfigurationError, match=r"max_late must be from 0 to 3\.15\S+ seconds; this is "):
        duration_ms("max_late", value, least_ms=0)


def test_a_hundred_years_are_the_longest():
    assert duration_ms("lease", LONGEST_MS / 1000, least_ms=0) == LONGEST_MS
    with pytest.raises(ConfigurationError):
        duration_ms("lease", LONGEST_MS / 1000 + 1, least_ms=0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lease": 0}, ["lease must be from 0.01", "this is 0"]),
        ({"lease": 0.009}, ["lease must be from 0.01", "0.009"]),
        ({"heartbeat": 0}, ["heartbeat must be from 0.001", "this is 0"]),
        ({"heartbeat": 15}, ["under half of lease", "heartbeat is 15 s and lease 30 s", "heartbeat=5", "leave it out"]),
        ({"lease": 8, "heartbeat": 5}, ["heartbeat is 5 s and lease 8 s", "heartbeat=1.33333"]),
        ({"max_attempts": 0}, ["max_attempts must be a whole number of at least 1", "this is 0"]),
        ({"max_attempts": 2.0}, ["max_attempts must be a whole number", "2.0"]),
        ({"max_attempts": True}, ["max_attempts must be a whole number", "True"]),
        ({"history_size": -1}, ["history_size must be a whole number of at least 0", "-1"]),
        ({"overlap": "queue"}, ["overlap must be 'skip' or 'allow'", "'queue'"]),
        ({"overlap": None}, ["overlap must be 'skip' or 'allow'", "None"]),
        ({"on_store_loss": "stop"}, ["on_store_loss must be 'abort' or 'continue'", "'stop'"]),
        ({"jitter": -1}, ["jitter must be from 0", "-1"]),
        ({"jitter": None}, ["jitter must be a number of seconds", "None"]),
        ({"catch_up": "5m"}, ["catch_up must be a number of seconds or a timedelta", "'5m'"]),
        ({"max_late": -5}, ["max_late must be from 0", "-5"]),
        ({"max_runtime": 0}, ["max_runtime must be from 0.001", "this is 0"]),
        ({"around": "app"}, ["around must be a callable that returns a context manager", "without", "'app'"]),
        ({"retries": 3}, ["unknown option 'retries'", "max_attempts", "heartbeat"]),
        ({"leese": 3}, ["unknown option 'leese'", "lease"]),
    ],
)
def test_an_option_that_cant_work_is_refused_with_what_to_write_instead(given: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigurationError) as caught:
        job_options(given)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_an_unknown_option_is_told_every_known_one():
    with pytest.raises(ConfigurationError) as caught:
        job_options({"nope": 1})
    assert [name for name in JobOptionsDict.__annotations__ if name not in str(caught.value)] == []


@pytest.mark.parametrize(
    "given",
    [
        {"heartbeat": 14.999},
        {"max_runtime": None},
        {"around": None},
        {"around": dict},
        {"history_size": 0},
        {"catch_up": 0},
    ],
)
def test_what_is_just_allowed_is_allowed(given: dict[str, Any]):
    job_options(given)


def test_a_value_of_any_size_makes_a_short_message():
    for make in (lambda v: duration_ms("lease", v, least_ms=0), lambda v: whole("n", v, least=0),
                 lambda v: choice("overlap", v, ("skip",))):
        with pytest.raises(ConfigurationError) as caught:
            make("x" * 100_000)
        assert len(str(caught.value)) < 400


def test_a_configuration_error_is_a_value_error_too():
    assert issubclass(ConfigurationError, (LeaselibError, ValueError))


@pytest.mark.parametrize(("cpus", "workers"), [(None, 5), (1, 5), (8, 12), (64, 32)])
def test_workers_are_four_more_than_cpus_and_32_at_most(
    cpus: int | None, workers: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    assert default_workers() == workers
