"""Names are data: any Unicode text of 1 to 200 characters without control characters; each is a world of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress

import pytest
from bench import JOB, Bench

from leaselib.errors import ConfigurationError
from leaselib.stores._base import Store

HOSTILE = [
    "*",
    "?",
    "[a-z]*",
    "%",
    "_",
    "a_b",
    "axb",
    "\\",
    "\\x00",
    "\\0",
    "{x}",
    "{x}y",
    "y{x}",
    "{",
    "}",
    "{}",
    ":",
    "a:b",
    "a:b:c",
    "leaselib:default",
    "'; DROP TABLE runs; --",
    '"quoted"',
    "'quoted'",
    "`x`",
    "$1",
    "%s",
    "%(job)s",
    ":job",
    "?1",
    "@x",
    " ",
    "  ",
    " lead",
    "trail ",
    "a b",
    "a",
    "A",
    "1",
    "01",
    "1.0",
    "-1",
    "0",
    "null",
    "None",
    "true",
    "nan",
    "inf",
    "é",  # composed
    "e\u0301",  # decomposed: another name
    "ß",
    "SS",
    "İ",
    "i",
    "ﬁ",
    "fi",
    "日本語",
    "אבג מטלה",
    "\u202egnp.exe",
    "\u200b",
    "\ufeff",
    "a\u00a0b",
    "😀",
    "👩\u200d👩\u200d👧",
    "\U0010ffff",
    "<script>alert(1)</script>",
    "../../etc/passwd",
    "C:\\x",
    "a/b",
    "a?b=c&d",
    "a#b",
    "é" * 200,
    "😀" * 200,
    "ש" * 200,
    "x" * 200,
    "x" * 199,
    "plumless",
    "buckeroo",
]
NOT_NAMES = ["", "x" * 201, "é" * 201, "a\tb", "a\nb", "\r", "a\0b", "\x1b[2J", "\x7f", "\x85", "\ud800", "a\udfffb"]


def _id(name: str) -> str:
    return f"{len(name)}-{name[:12]!a}"


def test_every_name_is_a_job_of_its_own(bench: Bench) -> None:
    """All of them run at the same slot, side by side, and each keeps its own fence, lease and end."""
    answers = {name: bench.win(job=name, runner=name) for name in HOSTILE}
    assert bench.store.jobs() == sorted(HOSTILE)
    assert sorted(run.job for run in bench.store.unfinished(HOSTILE)) == sorted(HOSTILE)
    for name, answer in answers.items():
        assert bench.store.runs(name) == [answer.run]
        assert answer.run is not None
        assert (answer.run.job, answer.run.runner) == (name, name)
    for n, (name, answer) in enumerate(answers.items()):
        if n % 2:
            assert bench.finish(answer, "failed", name)
        else:
            assert bench.beat(answer, lease=100 + n)
    for n, name in enumerate(answers):
        run = bench.run(job=name)
        assert (run.status, run.error) == (("failed", name) if n % 2 else ("running", None))
        assert run.lease == (30 if n % 2 else 100 + n)


def test_a_purge_touches_the_very_job_only(bench: Bench) -> None:
    """No name is a pattern: purging `*`, `%` or `a_b` leaves the neighbours."""
    for name in HOSTILE:
        bench.ended(job=name)
    left = dict.fromkeys(HOSTILE)
    for name in HOSTILE:
        assert bench.store.purge(name) == 1
        del left[name]
        assert [other for other in HOSTILE if bench.store.runs(other)] == list(left)


def test_two_names_with_the_same_crc32_run_side_by_side(bench: Bench) -> None:
    """Jobs are told apart by their names, not by a hash."""
    assert zlib.crc32(b"plumless") == zlib.crc32(b"buckeroo")
    one, two = bench.win(job="plumless"), bench.win(job="buckeroo")
    bench.clock.advance(20)
    assert bench.beat(one)
    assert bench.beat(two)
    assert bench.claim(20, job="plumless").outcome == bench.claim(20, job="buckeroo").outcome == "overlap"


@pytest.mark.parametrize("name", NOT_NAMES, ids=_id)
def test_what_is_no_name_is_no_job(bench: Bench, name: str) -> None:
    """Refused with our error, before anything is sent, where it would be written."""
    with pytest.raises(ConfigurationError, match="job"):
        bench.claim(job=name)
    with pytest.raises(ConfigurationError, match="job"):
        bench.store.purge(name)
    assert bench.store.jobs() == []


@pytest.mark.parametrize("name", NOT_NAMES, ids=_id)
def test_what_is_no_name_is_no_runner(bench: Bench, name: str) -> None:
    """Stored with the run, shown to people: the same rule as for a job."""
    with pytest.raises(ConfigurationError, match="runner"):
        bench.claim(runner=name)
    assert bench.store.jobs() == []


@pytest.mark.parametrize("name", NOT_NAMES, ids=_id)
def test_a_job_that_can_not_exist_is_refused_or_unknown_to_every_other_operation(bench: Bench, name: str) -> None:
    """Our own error or an empty answer; never the driver's error, never somebody else's run."""
    bench.win()
    store, slot = bench.store, bench.base
    calls: list[Callable[[], object]] = [
        lambda: store.heartbeat(name, slot, "token-1", 30),
        lambda: store.finish(name, slot, "token-1", "success"),
        lambda: store.release(name, slot, "token-1"),
        lambda: store.get(name, slot),
        lambda: store.runs(name),
        lambda: store.unfinished([name]),
    ]
    with bench.nothing_changes():
        for call in calls:
            with suppress(ConfigurationError):
                assert not call()


@pytest.mark.parametrize("name", NOT_NAMES, ids=_id)
def test_what_is_no_name_is_no_namespace(bench: Bench, name: str) -> None:
    """Refused when the store is made."""
    with pytest.raises(ConfigurationError, match="namespace"):
        bench.connect(name)


# ---- isolation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "namespace", ["*", "default:", "{default}", "Default", "défaut", "%", "a'b", "x" * 200], ids=_id
)
def test_namespaces_do_not_see_each_other(bench: Bench, namespace: str) -> None:
    """The same job and slot in two of them: two runs, two fences, two histories."""
    mine, theirs = bench.store, bench.connect(namespace)
    assert theirs.namespace == namespace
    first = bench.win()
    with bench.nothing_changes():
        assert theirs.get(JOB, bench.base) is None
        assert theirs.jobs() == []
        assert theirs.unfinished([JOB]) == []
        assert not theirs.heartbeat(JOB, bench.base, first.token, 99)
        assert not theirs.finish(JOB, bench.base, first.token, "success")
        assert not theirs.release(JOB, bench.base, first.token)
        assert theirs.purge(JOB, force=True) == 0
        assert theirs.claim(JOB, bench.base, "their-token", "r").outcome == "won"
        assert theirs.claim(JOB, bench.slot(0.5), "their-next", "r").outcome == "overlap"
        assert theirs.finish(JOB, bench.base, "their-token", "failed", "theirs")
        assert theirs.purge(JOB) == 1
    assert mine.jobs() == theirs.jobs() == [JOB]
    assert mine.purge(JOB, force=True) == 1
    assert theirs.claim(JOB, bench.slot(0.5), "t", "r").outcome == "won"


def test_a_name_with_a_separator_is_not_another_namespaces_name(bench: Bench) -> None:
    """Namespace and job are two values, however they are put together."""
    _win(bench.connect("a:b"), bench, "c")
    _win(bench.connect("a"), bench, "b:c")
    _win(bench.connect("a:b:c"), bench, "c:a")
    assert bench.connect("a:b").jobs() == ["c"]
    assert bench.connect("a").jobs() == ["b:c"]
    assert bench.connect("a:b:c").jobs() == ["c:a"]
    assert bench.store.jobs() == []


def test_a_job_in_trouble_does_not_touch_its_neighbours(bench: Bench) -> None:
    """Every operation on one job, refused or not, leaves the others as they were."""
    bench.win(job="neighbour")
    bench.ended(job="other")
    with bench.nothing_changes("neighbour", "other"):
        first = bench.win(0)
        bench.claim()
        bench.claim(0.5)
        bench.beat(first, checkpoint="1")
        bench.expire(first)
        second = bench.win(takeover_of=1)
        bench.release(second, checkpoint="2")
        bench.ended(30)
        bench.clock.advance(500)
        bench.ended(530, history_size=0, max_late=0)
        bench.ended(530.5, history_size=0, max_late=0)
        bench.store.purge(JOB, force=True)


def _win(store: Store, bench: Bench, job: str) -> None:
    assert store.claim(job, bench.base, bench.token(), "r").outcome == "won"
