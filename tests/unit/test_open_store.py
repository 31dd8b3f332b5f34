"""open_store and mask: which URL makes which store, what refusals say, and that no message holds a secret."""

from __future__ import annotations

import subprocess
import sys

import pytest

from leaselib.errors import ConfigurationError
from leaselib.stores import MemoryStore, SQLiteStore, mask, open_store


def refusal(url: object) -> str:
    """The message of the refusal of that URL."""
    with pytest.raises(ConfigurationError) as caught:
        open_store(url)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("url", "namespace"),
    [
        ("memory://", "default"),
        ("MEMORY://", "default"),
        ("memory:", "default"),
        ("memory://?namespace=crew", "crew"),
        ("memory://?namespace=a%20b", "a b"),
    ],
)
def test_memory(url: str, namespace: str):
    store = open_store(url)
    assert isinstance(store, MemoryStore)
    assert store.namespace == namespace


def test_sqlite_takes_a_relative_or_absolute_path_and_touches_no_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in ("sqlite:///sub/a.db", f"sqlite:///{tmp_path}/b%20c.db?namespace=crew"):
        store = open_store(url)
        assert isinstance(store, SQLiteStore)
        store.close()
    assert store.namespace == "crew"
    assert "b c.db" in repr(store)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["sqlite://jobs.db", "sqlite://localhost/jobs.db", "memory://host"])
def test_a_host_where_there_is_none_is_refused_with_the_number_of_slashes(url: str):
    message = refusal(url)
    assert "takes no host" in message
    assert ":///path" in message
    assert url in message


@pytest.mark.parametrize("url", ["sqlite:///", "sqlite://", "sqlite:jobs.db", "sqlite:"])
def test_sqlite_without_a_path_is_refused_with_both_forms(url: str):
    message = refusal(url)
    assert "sqlite:///relative.db or sqlite:////absolute.db" in message


@pytest.mark.parametrize("url", ["memory://?name=x", "sqlite:///a.db?timeout=3"])
def test_an_unknown_parameter_is_refused_with_the_known_one(url: str):
    assert "knows no parameter" in refusal(url)
    assert "only namespace" in refusal(url)


def test_a_namespace_that_is_no_name_is_refused():
    assert "namespace" in refusal("memory://?namespace=")


@pytest.mark.parametrize("url", ["mongodb://host/db", "mysql://root:hunter2@host/db", "C:/jobs.db", "file:jobs.db"])
def test_an_unknown_store_is_refused_with_every_form(url: str):
    message = refusal(url)
    assert "knows no store" in message
    for form in ("memory://", "sqlite:///", "redis://", "redis+sentinel://", "postgresql://"):
        assert form in message
    assert "hunter2" not in message


@pytest.mark.parametrize("url", ["sqlite://[::1/jobs.db", "memory://a]", "sqlite://[x]/jobs.db"])
def test_what_cant_be_taken_apart_is_refused(url: str):
    assert url in refusal(url)


@pytest.mark.parametrize("url", ["", None, 5, b"memory://", "jobs.db"])
def test_what_is_no_url_is_refused_with_every_form(url: object):
    message = refusal(url)
    assert message.startswith("a store's URL is one of memory://")
    assert "postgresql://" in message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://user@host/0", "redis://user@host/0"),
        ("redis://:hunter2@host/0", "redis://:***@host/0"),
        ("rediss://user:hunter2@host/0?namespace=x", "rediss://user:***@host/0?namespace=x"),
        ("redis://user:p@hunter2@host/0", "redis://user:***@host/0"),
        ("redis://user:hun/ter2@host/0", "redis://user:***@host/0"),
        ("redis+sentinel://u:hunter2@a:1,b:2/name/0", "redis+sentinel://u:***@a:1,b:2/name/0"),
        ("postgresql://u:hunter2@/db?host=/tmp", "postgresql://u:***@/db?host=/tmp"),
        ("postgresql://u@h/db?password=hunter2&x=1", "postgresql://u@h/db?password=***&x=1"),
        ("postgresql://h/db?sslpassword=hunter2", "postgresql://h/db?sslpassword=***"),
        ("unix:///run/redis.sock?password=hunter2&db=1", "unix:///run/redis.sock?password=***&db=1"),
        ("redis://h/0?sentinel_PASSWORD=hunter2", "redis://h/0?sentinel_PASSWORD=***"),
        ("redis://h/0?auth_token=hunter2&api_key=hunter2&client_secret=hunter2",
         "redis://h/0?auth_token=***&api_key=***&client_secret=***"),
        ("sqlite:////var/jobs.db", "sqlite:////var/jobs.db"),
        ("jobs.db?password=hunter2", "jobs.db"),
    ],
)
def test_a_masked_url_shows_where_but_no_secret(url: str, shown: str):
    assert mask(url) == shown


def test_opening_a_store_without_driver_imports_none():
    code = (
        "import sys; from leaselib import open_store; open_store('memory://'); open_store('sqlite:///x.db');"
        "print(sorted(m for m in ('redis', 'psycopg') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "authority",
    ["app:{}/rest@db:5432", "app:x@{}@db:5432", "app:{}#rest@db:5432", "app:a/{}@db", "app:{}/rest?x@db:5432"],
)
def test_no_part_of_a_password_that_ends_too_early_is_shown(authority: str):
    """What a URL's rules take for a host or a port is then a part of the password."""
    message = refusal(f"postgresql://{authority.format('Zs3cretZ')}/shop")
    assert "Zs3cretZ" not in message
    assert "%2F" in message


def test_parameters_in_place_of_a_url_are_not_shown():
    """libpq takes such a text, and it may hold a password."""
    text = "host=127.0.0.1 password=Zs3cretZ"
    assert "Zs3cretZ" not in mask(text)
    assert "Zs3cretZ" not in refusal(text)


def test_a_password_of_one_letter_leaves_words_alone():
    """Hidden within words it would be told by what is missing."""
    from leaselib.stores._postgres_url import parse

    address = parse("postgresql://app:x@db/shop")
    assert address.scrub("cannot execute it with x") == "cannot execute it with ***"
    assert parse("postgresql://app:long@db/shop").scrub("belonging") == "be***ing"
