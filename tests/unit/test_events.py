"""Listeners and the dispatcher, without its thread: who is called, in which order, and what a log record holds."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from leaselib import _threads, events
from leaselib._model import from_ms
from leaselib.errors import ConfigurationError
from leaselib.events import EVENT_NAMES, Dispatcher, Event, Listeners, check_event


def event(name: str = "success", **fields: Any) -> Event:
    """An event of a run of job `report`."""
    given = {"job": "report", "slot": from_ms(0), "attempt": 1, "token": "secret-token", "runner": "a"}
    return Event(name, **{**given, "at": from_ms(5), **fields})


@pytest.fixture
def listeners() -> Listeners:
    """Nobody listens."""
    return Listeners()


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """The records of logger `leaselib`, at every level."""
    found: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)

    logger, handler = logging.getLogger("leaselib"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def emit(dispatcher: Dispatcher, event: Event, trace: str | None = None) -> None:
    """Tells of an event, as an instance does."""
    dispatcher.note(event, trace)
    dispatcher.flush()


def unstarted(listeners: Listeners, monkeypatch: pytest.MonkeyPatch, size: int = 3) -> Dispatcher:
    """A dispatcher that thinks it has a thread, which never gets to work."""
    monkeypatch.setattr(events, "QUEUE_SIZE", size)
    monkeypatch.setattr(_threads, "spawn", lambda name, target: object())
    monkeypatch.setattr(_threads, "join", lambda threads, timeout_ms: None)
    made = Dispatcher(listeners)
    made.start("leaselib-events")
    return made


def test_the_event_names_are_the_documented_ones():
    assert EVENT_NAMES == (
        "start", "success", "failed", "lost", "interrupted", "skip", "store_error", "store_ok", "stopped"
    )


@pytest.mark.parametrize("name", ["finish", "", None, ["start"], "START"])
def test_an_event_that_there_isnt_is_refused_with_those_that_there_are(name: object):
    with pytest.raises(ConfigurationError, match=r"there is no event .*; events are start, success, failed, lost"):
        check_event(name)


def test_a_listener_that_cant_be_called_is_refused(listeners: Listeners):
    with pytest.raises(ConfigurationError, match=r"a listener must be callable with one Event; this is 'print'"):
        listeners.add("start", "print")  # type: ignore[arg-type]


def test_listeners_are_called_in_the_order_of_adding_and_only_for_their_event(listeners: Listeners):
    heard: list[tuple[str, str]] = []
    listeners.add("success", lambda e: heard.append(("first", e.name)))
    listeners.add("failed", lambda e: heard.append(("failed", e.name)))
    listeners.add("success", lambda e: heard.append(("second", e.name)))
    emit(Dispatcher(listeners), event())
    assert heard == [("first", "success"), ("second", "success")]


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(1), KeyboardInterrupt()])
def test_a_listener_that_raises_is_logged_and_harms_no_other(
    error: BaseException, listeners: Listeners, records: list[logging.LogRecord]
):
    def bad(_: Event) -> None:
        raise error

    heard: list[str] = []
    listeners.add("success", bad)
    listeners.add("success", lambda e: heard.append(e.name))
    emit(Dispatcher(listeners), event())
    assert heard == ["success"]
    assert "raised" in records[0].getMessage()
    assert records[0].exc_info[1] is error
    assert records[-1].getMessage().startswith("success")


def test_a_log_handler_that_raises_is_counted_and_harms_nothing(listeners: Listeners):
    class Bad(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise RuntimeError("filter")

    logger, bad = logging.getLogger("leaselib.scheduler"), Bad()
    logger.addFilter(bad)
    try:
        dispatcher = Dispatcher(listeners)
        emit(dispatcher, event("failed"))
    finally:
        logger.removeFilter(bad)
    assert dispatcher.log_errors == 1


@pytest.mark.parametrize(
    ("name", "logger", "level"),
    [
        ("start", "leaselib.scheduler", logging.DEBUG),
        ("success", "leaselib.scheduler", logging.INFO),
        ("failed", "leaselib.scheduler", logging.ERROR),
        ("lost", "leaselib.scheduler", logging.WARNING),
        ("interrupted", "leaselib.scheduler", logging.WARNING),
        ("skip", "leaselib.scheduler", logging.INFO),
        ("store_error", "leaselib.store", logging.WARNING),
        ("store_ok", "leaselib.store", logging.INFO),
        ("stopped", "leaselib.scheduler", logging.INFO),
    ],
)
def test_every_event_is_one_record_of_its_logger_and_level(
    name: str, logger: str, level: int, listeners: Listeners, records: list[logging.LogRecord]
):
    emit(Dispatcher(listeners), event(name))
    assert [(r.name, r.levelno) for r in records] == [(logger, level)]


def test_a_hand_over_is_no_warning(listeners: Listeners, records: list[logging.LogRecord]):
    emit(Dispatcher(listeners), event("interrupted", handed_over=True))
    assert records[0].levelno == logging.INFO


def test_a_record_has_every_field_and_its_text_has_no_token(
    listeners: Listeners, records: list[logging.LogRecord]
):
    given = event("skip", reason="missed", count=7, error="why")
    emit(Dispatcher(listeners), given)
    (record,) = records
    assert record.event == "skip"
    for field in dataclasses.fields(Event):
        if field.name != "name":
            assert getattr(record, field.name) == getattr(given, field.name), field.name
    assert record.getMessage() == (
        "skip job=report slot=1970-01-01 00:00:00+00:00 attempt=1 reason=missed error=why count=7"
    )
    assert "secret-token" not in record.getMessage()


def test_a_failure_is_logged_with_its_traceback(listeners: Listeners, records: list[logging.LogRecord]):
    emit(Dispatcher(listeners), event("failed", error="ValueError: boom"), "Traceback of ValueError: boom")
    assert logging.Formatter().format(records[0]).endswith("Traceback of ValueError: boom")


def test_a_text_from_the_store_cant_forge_log_lines(listeners: Listeners, records: list[logging.LogRecord]):
    emit(Dispatcher(listeners), event("failed", error="a\nsuccess job=x\x1b[2J\u2028"))
    assert records[0].getMessage().isprintable()
    assert "a\\nsuccess" in records[0].getMessage()


def test_a_long_error_is_cut_in_the_log_and_whole_in_the_record(
    listeners: Listeners, records: list[logging.LogRecord]
):
    emit(Dispatcher(listeners), event("failed", error="x" * 4_096))
    assert len(records[0].getMessage()) < 500
    assert len(records[0].error) == 4_096


def test_events_wait_for_the_thread_that_calls_listeners(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch
):
    heard: list[str] = []
    listeners.add("success", lambda e: heard.append(e.name))
    dispatcher = unstarted(listeners, monkeypatch)
    emit(dispatcher, event())
    assert heard == []
    dispatcher.close(0)
    dispatcher._work()
    assert heard == ["success"]


def test_when_listeners_are_too_slow_the_oldest_are_dropped_and_counted(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch, records: list[logging.LogRecord]
):
    heard: list[int | None] = []
    listeners.add("success", lambda e: heard.append(e.attempt))
    dispatcher = unstarted(listeners, monkeypatch, size=3)
    for n in range(5):
        emit(dispatcher, event(attempt=n))
    assert dispatcher.dropped == 2
    dispatcher.close(0)  # makes room for its own mark
    assert dispatcher.dropped == 3
    assert not records, "whoever emits writes no log record"
    dispatcher._work()
    assert heard == [3, 4]
    assert sum("too slow" in r.getMessage() and "3 events" in r.getMessage() for r in records) == 1


def test_after_close_events_are_handled_where_they_occur(listeners: Listeners, monkeypatch: pytest.MonkeyPatch):
    heard: list[str] = []
    listeners.add("stopped", lambda e: heard.append(e.name))
    dispatcher = unstarted(listeners, monkeypatch)
    dispatcher.close(0)
    emit(dispatcher, event("stopped"))
    assert heard == ["stopped"]
    dispatcher.close(0)  # again: nothing happens
    assert not dispatcher.is_current


def test_after_a_fork_a_lock_that_was_held_is_free(listeners: Listeners):
    listeners._lock.acquire()
    listeners.after_fork()
    listeners.add("start", print)
    assert listeners.of("start") == (print,)


def test_an_event_cant_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        event().name = "other"  # type: ignore[misc]
