"""Names: any text of 1 to 200 characters without control characters, and what the refusals say."""

from __future__ import annotations

import pytest

from leaselib._names import NAME_LENGTH, check_name
from leaselib.errors import ConfigurationError


@pytest.mark.parametrize(
    "name",
    ["a", "report", "Bericht für Zürich", "日次レポート", "a b", "a:b/c{d}*", "🚀", "é", "x" * 200, " ", "\u200b"],
)
def test_any_text_is_a_name_and_stays_as_it_is(name: str):
    assert check_name("job", name) == name


@pytest.mark.parametrize("name", [None, 3, b"job", ["job"], object()])
def test_what_is_no_text_is_refused(name: object):
    with pytest.raises(ConfigurationError, match=r"job must be a str of 1 to 200 characters, not "):
        check_name("job", name)


def test_an_empty_name_is_refused_and_a_longer_one_asked_for():
    with pytest.raises(ConfigurationError, match=r"runner must have 1 to 200 characters; this one has 0: ''.*longer"):
        check_name("runner", "")


def test_a_long_name_is_refused_in_a_short_message():
    with pytest.raises(ConfigurationError, match=r"this one has 201: 'x+'\. Choose a shorter one") as caught:
        check_name("namespace", "x" * (NAME_LENGTH + 1))
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize("bad", ["\0", "\n", "\r", "\t", "\x1b", "\x7f", "\x85", "\x9f", "\u2028", "\u2029", "\ud800"])
def test_control_characters_and_lone_surrogates_are_refused_by_name(bad: str):
    with pytest.raises(ConfigurationError) as caught:
        check_name("job", f"a{bad}b")
    assert repr(bad) in str(caught.value)
    assert "leave it out" in str(caught.value)
    assert str(caught.value).isprintable(), "the message itself can't move a terminal's cursor"
