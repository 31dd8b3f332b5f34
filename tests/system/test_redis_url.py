"""What a Redis URL says, what is wrong with one, and that no message shows a password. No server, no network."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from leaselib.errors import ConfigurationError, LeaselibError
from leaselib.stores import _redis_url, open_store
from leaselib.stores._redis import RedisStore

CANARY = "c4n4ry"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a store opens no socket and asks no resolver."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("touched the network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize(
    ("url", "kind", "addresses", "db", "user", "master"),
    [
        ("redis://", None, (), 0, None, ""),
        ("redis://localhost", "single", (("localhost", 6379),), 0, None, ""),
        ("redis://h:7000/3", "single", (("h", 7000),), 3, None, ""),
        ("redis://h/?db=4", "single", (("h", 6379),), 4, None, ""),
        ("valkey://u:p%40ss@h/1", "single", (("h", 6379),), 1, ("u", "p@ss"), ""),
        ("redis://:pw@[::1]:7000", "single", (("::1", 7000),), 0, (None, "pw"), ""),
        ("redis://u@h?password=pw", "single", (("h", 6379),), 0, ("u", "pw"), ""),
        ("rediss://h", "single", (("h", 6379),), 0, None, ""),
        ("valkeys://h", "single", (("h", 6379),), 0, None, ""),
        ("unix:///run/redis.sock", "unix", (("/run/redis.sock", 0),), 0, None, ""),
        ("unix://u:pw@/run/my%20redis.sock?db=2", "unix", (("/run/my redis.sock", 0),), 2, ("u", "pw"), ""),
        ("redis+sentinel://a,b:1,[::2]:3/jobs", "sentinel", (("a", 26379), ("b", 1), ("::2", 3)), 0, None, "jobs"),
        ("redis+cluster://u:p[w]@[::1]:1,[::2]:3", "cluster", (("::1", 1), ("::2", 3)), 0, ("u", "p[w]"), ""),
        ("valkey+sentinel://a/my%2Fjobs/5", "sentinel", (("a", 26379),), 5, None, "my/jobs"),
        ("redis+cluster://a:1,b:2", "cluster", (("a", 1), ("b", 2)), 0, None, ""),
        ("valkeys+cluster://a/0", "cluster", (("a", 6379),), 0, None, ""),
    ],
)
def test_each_form_of_url_is_understood(
    url: str, kind: str | None, addresses: tuple[Any, ...], db: int, user: tuple[str | None, str] | None, master: str
) -> None:
    """Kind, places, database, credentials and the master's name; `redis://` alone names no host."""
    if kind is None:
        with pytest.raises(ConfigurationError):
            _redis_url.parse(url)
        return
    target = _redis_url.parse(url)
    assert (target.kind, target.addresses, target.db, target.master) == (kind, addresses, db, master)
    assert (target.username, target.password) == (user or (None, None))
    assert (target.tls is not None) == url.startswith(("rediss", "valkeys"))


def test_tls_verifies_chain_and_host_name_unless_told_not_to_in_so_many_words() -> None:
    """`ssl_cert_reqs=none` turns off both, `ssl_check_hostname=false` the name alone."""
    import ssl

    def context(query: str) -> ssl.SSLContext:
        tls = _redis_url.parse(f"rediss://h{query}").tls
        assert tls is not None
        return tls

    assert context("").verify_mode == ssl.CERT_REQUIRED
    assert context("").check_hostname
    assert context("?ssl_check_hostname=false").verify_mode == ssl.CERT_REQUIRED
    assert not context("?ssl_check_hostname=false").check_hostname
    assert context("?ssl_cert_reqs=none").verify_mode == ssl.CERT_NONE


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://h", "scheme is 'http'"),
        ("redis:/h", "is no host"),
        ("h:6379", "is no Redis URL"),
        ("", "is no Redis URL"),
        ("redis://h:0", "'h:0'"),
        ("redis://h:99999", "'h:99999'"),
        ("redis://h:port", "host:port; write redis"),
        ("redis://h/x", "by its number"),
        ("redis://h/-1", "by its number"),
        ("redis://h/1/2", "too long a path"),
        ("redis://h/1?db=2", "one database"),
        ("redis://a,b", "redis\\+sentinel"),
        ("redis://h?socket_timeout=3", "unknown parameter 'socket_timeout'.*Time-outs and retries are leaselib's own"),
        ("redis://h?namespace", "is no URL"),
        ("redis://h?namespace=%00", "control character"),
        ("redis://h?namespace=", "1 to 200"),
        ("redis://h?wait_replicas=-1", "wait_replicas must be a whole number of at least 0"),
        ("redis://h?wait_replicas=one", "wait_replicas must be a whole number of at least 0"),
        ("redis://h?wait_timeout=0", "wait_timeout must be a number of seconds above 0"),
        ("redis://h?wait_timeout=nan", "wait_timeout must be a number of seconds above 0"),
        ("redis://h?max_connections=1", "max_connections must be a whole number of at least 2"),
        ("unix://run/redis.sock", "three slashes"),
        ("unix://", "three slashes"),
        ("redis+sentinel://h", "lacks the master's name"),
        ("redis+sentinel://h,/jobs", "is no host"),
        ("redis+cluster://h/1", "only database 0"),
        ("rediss://h?ssl_ca_certs=/no/such/file", "No such file"),
        ("rediss://h?ssl_certfile=/no/such/file", "No such file"),
        ("rediss://h?ssl_cert_reqs=optional", "'required' or 'none'"),
        ("rediss://h?ssl_check_hostname=maybe", "true or false"),
        ("redis://[::1", "is no URL"),
        ("redis://h?namespace=a&namespace=b", "gives a parameter twice"),
        ("redis://h?db=1&db=1", "gives a parameter twice"),
        ("redis://h/0?db=", "by its number.*'0', ''"),
        ("redis://h/0#part", "has a # after its host.*%23"),
        ("redis://u:12/34@h", "has an @ after its host.*%40"),
        ("redis://h?namespace=a@b", "has an @ after its host.*%40"),
    ],
)
def test_a_url_that_can_not_work_is_a_configuration_error(url: str, says: str) -> None:
    """In the constructor, and it says what was found."""
    with pytest.raises(ConfigurationError, match=says):
        RedisStore.from_url(url)


NO_HOSTS = (
    "", " ", "my host", "h ", "\u00a0h", "h\u200b", "h%0a", "h%20", "h%00", "a..b", ".h", "x" * 64, "${HOST}", "{host}",
    "$HOST", "<h>", "h%2Fx", "h%40x", "h%3Fx", "h\\x", '"h"', "'h'", "6379", "\ud800", "[::1", "[h]", "[1.2.3.4]", ":1",
    "[::1%0a]", "[::1]1", "[::1]x:1", "::1", "h:", "h:0", "h:65536", "h:99999", "h:-1", "h:+1", "h: 1", "h:1 ",
    "h:port", "h:1:2", "h:٣", "h:1_0", "h:" + "9" * 5_000,
)  # fmt: skip


@pytest.mark.parametrize("host", NO_HOSTS)
@pytest.mark.parametrize(
    "form", ["redis://{}", "redis://u:pw@{}/0", "rediss://{}", "redis+sentinel://a,{}/m", "redis+cluster://{},b:1"]
)
def test_what_is_no_host_is_found_before_anybody_looks_it_up(form: str, host: str) -> None:
    """Alone, behind a password, first or last in a list; the message has what was found and what to write."""
    with pytest.raises(ConfigurationError) as caught:
        RedisStore(form.format(host))
    assert re.search("is no host or host:port; write redis|is no URL; write redis|blank at an end", str(caught.value))


@pytest.mark.parametrize(
    "host",
    ["h", "h.", "my_host", "a-b.example", "bücher.example", "0", "127.0.0.1", "[::1]", "[fe80::1%25eth0]", "x" * 63],
)
def test_what_is_a_host_stays_one(host: str) -> None:
    """Names of any alphabet, and addresses."""
    for port in ("", ":1", ":65535"):
        assert _redis_url.parse(f"redis://{host}{port}").addresses[0][1] == int(port[1:] or 6379)


@pytest.mark.parametrize("character", [*map(chr, range(32)), "\x7f", "\x85", "\x9f", "\u2028"])
def test_a_control_character_is_allowed_nowhere(character: str) -> None:
    """Python's own parser of URLs would drop some of them without a word: a password would be another one."""
    url = f"redis+sentinel://user:{CANARY}@host:1,other/jobs/0?namespace=name&sentinel_password={CANARY}"
    RedisStore(url)
    for place in range(len(url) + 1):
        with pytest.raises(ConfigurationError) as caught:
            RedisStore(url[:place] + character + url[place:])
        assert str(caught.value).isprintable()
        assert CANARY[:3] not in str(caught.value)
    for broken in (f" {url}", f"{url} ", f"{url}\u3000"):
        with pytest.raises(ConfigurationError, match="a blank at an end"):
            RedisStore(broken)


@pytest.mark.parametrize("form", ["redis://h/{}", "redis://h?db={}", "unix:///s?db={}", "redis+sentinel://h/m/{}"])
def test_a_databases_number_is_a_small_whole_one(form: str) -> None:
    """Servers count them with 31 bits."""
    for number in ("-1", "+1", "1.0", "1e3", "0x1", "٣", "²", "1_0", "%201", "2147483648", "9" * 5_000, "zero"):
        with pytest.raises(ConfigurationError, match="by its number, such as /0; the largest is 2147483647; found '"):
            RedisStore(form.format(number))
    for number in ("0", "15", "007", "2147483647"):
        assert _redis_url.parse(form.format(number)).db == int(number)


@pytest.mark.parametrize(("name", "least", "most"), [("wait_replicas", 0, 1_000), ("max_connections", 2, 10_000)])
def test_counts_have_limits(name: str, least: int, most: int) -> None:
    """In the URL and as an argument; numbers that Python itself would refuse to print too."""
    says = f"{name} must be a whole number of at least {least} and at most {most}, not "
    for number in (least, most):
        RedisStore(f"redis://h?{name}={number}")
        RedisStore("redis://h", **{name: number})  # type: ignore[arg-type]
    for text in (least - 1, most + 1, "", "1.0", "1e2", "٣", "9" * 5_000, "many"):
        with pytest.raises(ConfigurationError, match=says):
            RedisStore(f"redis://h?{name}={text}")
    for value in (least - 1, most + 1, 10**30, 10**5_000, -(10**5_000), 2.0, float("nan"), True, b"3", "٣"):
        with pytest.raises(ConfigurationError, match=says):
            RedisStore("redis://h", **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["none", "required", "false", "/file", ""])
@pytest.mark.parametrize("name", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"])
def test_options_of_tls_without_tls_are_refused(name: str, value: str) -> None:
    """Rather than to let somebody believe that the connection is encrypted."""
    for form in ("redis://h", "valkey://h", "unix:///s", "redis+sentinel://h/m", "redis+cluster://h"):
        with pytest.raises(ConfigurationError, match=f"parameter {name}, but no TLS; write rediss://"):
            RedisStore(f"{form}?{name}={value}")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://h?sentinel_password=pw", "parameter sentinel_password, but no sentinels; write redis.sentinel://"),
        ("redis+cluster://h?sentinel_username=u", "parameter sentinel_username, but no sentinels"),
        ("redis://u:pw@h?password=pw", "gives the password twice"),
        ("redis://u:pw@h?username=u", "gives the username twice"),
        ("redis+cluster://:pw@a:1,:pw@b:2", "more than one @.*once, before the first host"),
        ("redis+sentinel://u:pw@a,u:pw@b/jobs", "more than one @"),
        ("redis://h/0?db=1", "by its number.*found '0', '1'"),
        ("rediss://h?ssl_keyfile=/key", "a key but no certificate; add ssl_certfile"),
        ("rediss://h?ssl_ca_certs=", "gives ssl_ca_certs no value"),
        ("rediss://h?ssl_certfile=", "gives ssl_certfile no value"),
        ("rediss://h?ssl_cert_reqs=none&ssl_check_hostname=true", "can't have the host's name checked"),
        ("rediss://h?ssl_cert_reqs=none&ssl_check_hostname=maybe", "true or false"),
        *((f"redis://h?{name}=1&{name}=1", "gives a parameter twice") for name in ("db", "wait_replicas", "password")),
    ],
)
def test_what_contradicts_itself_or_acts_on_nothing_is_refused(url: str, says: str) -> None:
    """Nothing of a URL is left out without a word."""
    with pytest.raises(ConfigurationError, match=says):
        RedisStore(url)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/x.sock/0", "write unix:///x.sock\\?db=0"),
        ("/run/redis/redis.sock/15", "write unix:///run/redis/redis.sock\\?db=15"),
        ("/x.sock/3/", "write unix:///x.sock\\?db=3"),
        ("/my%20x.sock/0", "write unix:///my x.sock\\?db=0"),
        ("/x.sock/", "ends with a /"),
        ("/x.sock%00", "control character"),
        ("/x%0a.sock", "control character"),
        ("/", "names no socket"),
        ("//", "names no socket"),
        ("/" + "x" * 107, "108 bytes; a system takes 107"),
        ("/" + "é" * 54, "109 bytes"),
        ("/" + "\ud800" * 54, "163 bytes"),
    ],
)
def test_a_path_that_can_be_no_socket_is_refused(path: str, says: str) -> None:
    """Among them one with the database's number behind it, as URLs of servers have it."""
    with pytest.raises(ConfigurationError, match=says):
        RedisStore(f"unix://{path}")
    for sound in ("/x.sock", "/0", "/x.sock/dir/s", "/x.socks/0", "/" + "x" * 106, "/x.sock?db=0"):
        RedisStore(f"unix://{sound}")


@pytest.mark.parametrize("value", [None, 3, b"redis://h"])
def test_what_is_no_text_is_no_url(value: Any) -> None:
    """Of whatever type."""
    with pytest.raises(ConfigurationError):
        RedisStore(value)


@pytest.mark.parametrize(
    "options",
    [
        {"wait_replicas": True},
        {"wait_replicas": 1.0},
        {"wait_timeout": timedelta(0)},
        {"wait_timeout": True},
        {"wait_timeout": "soon"},
        {"max_connections": 0},
        {"namespace": ""},
        {"namespace": "a\nb"},
    ],
)
def test_an_argument_that_can_not_work_is_a_configuration_error(options: dict[str, Any]) -> None:
    """As in the URL."""
    with pytest.raises(ConfigurationError):
        RedisStore("redis://h", **options)


def test_options_come_from_the_url_and_arguments_win() -> None:
    """Namespace, replicas and time-out."""
    url = "redis://h?namespace=shop%20%C3%A9&wait_replicas=2&wait_timeout=0.5&max_connections=9"
    store = RedisStore(url)
    assert (store.namespace, store.wait_replicas, store.wait_timeout) == ("shop é", 2, 0.5)
    store = RedisStore(url, "other", wait_replicas=0, wait_timeout=timedelta(seconds=2))
    assert (store.namespace, store.wait_replicas, store.wait_timeout) == ("other", 0, 2.0)
    store = RedisStore("redis://h")
    assert (store.namespace, store.wait_replicas) == ("default", 0)


def test_open_store_makes_one_from_each_scheme() -> None:
    """The URL schemes that the README lists."""
    for url in ("redis://h", "valkey://h", "unix:///s", "redis+sentinel://h/m", "redis+cluster://h", "rediss://h"):
        assert isinstance(open_store(f"{url}?namespace=n"), RedisStore)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{CANARY}@h:1/0",
        f"redis://:{CANARY}@h",
        f"redis://user:x{CANARY}/y?z#@h",
        f"redis://user:12/{CANARY}@h",
        f"redis://user:12/{CANARY}@h/0?db=1",
        f"redis://user:12?{CANARY}@h",
        f"redis://user:12?{CANARY}=et@h",
        f"redis://user:12?namespace={CANARY}@h",
        f"redis://user:12#{CANARY}@h",
        f"redis://user:12#{CANARY}/0?db=x@h",
        f"redis+sentinel://user:12/{CANARY}@h/0",
        f"redis+sentinel://user:12/{CANARY}@h/jobs/0",
        f"redis+cluster://user:12/{CANARY}@h",
        f"redis://user:{CANARY}@h:bad",
        f"redis://:{CANARY}:h:6379",
        f"redis://user:{CANARY}:h",
        f"redis://user:{CANARY}",
        f"redis://user:{CANARY}/0",
        f"redis+cluster://a:1,user:{CANARY}",
        f"redis://h/0?password=12&{CANARY}",
        f"redis://h:6379;password={CANARY}",
        f"redis+cluster://a:1,user:{CANARY}:b",
        f"redis+cluster://:{CANARY}@a:1,:{CANARY}@b:2",
        f"redis+sentinel://u:{CANARY}@a:1,u:{CANARY}@b:2/jobs",
        f"redis://user:{CANARY}@h?unknown=1",
        f"redis://h?password={CANARY}",
        f"redis://h?p%61ssword={CANARY}&x=1",
        f"redis://h?sentinel_password={CANARY}&namespace=%00",
        f"redis://h?pasword={CANARY}",
        f"redis://h?PASSWORD={CANARY}&db=x",
        f"redis+sentinel://h?sentinel_pwd={CANARY}",
        f"http://user:{CANARY}@h",
        f"user:{CANARY}@h",
        f"unix://user:{CANARY}@/s?password={CANARY}",
        f"redis+sentinel://user:{CANARY}@a,b",
        f"redis+cluster://user:{CANARY}@a,b/7",
        f"redis://user:{CANARY}@a,b",
        f"rediss://user:{CANARY}@h?ssl_ca_certs=/no/file",
    ],
)
def test_no_password_is_shown(url: str) -> None:
    """Neither by repr nor by an error, and not by the errors behind an error."""
    try:
        shown = repr(RedisStore.from_url(url))
    except LeaselibError as error:
        shown = ""
        cause: BaseException | None = error
        while cause is not None:
            shown += f"{cause!r} {cause} "
            cause = cause.__cause__
    assert shown
    assert CANARY not in shown
    assert CANARY not in repr(_redis_url.masked(url))


def test_without_the_driver_a_store_names_the_extra_to_install(tmp_path: Path) -> None:
    """And the module itself can be imported: only making a store needs the driver."""
    (tmp_path / "redis.py").write_text("raise ImportError('No module named redis')")
    code = (
        "from leaselib.errors import ConfigurationError\n"
        "from leaselib.stores._redis import RedisStore\n"
        "from leaselib.stores._redis_acl import acl_setuser\n"
        "try: RedisStore('redis://h')\n"
        "except ConfigurationError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
    )
    assert "pip install 'leaselib[redis]'" in done.stdout, done.stderr


@pytest.mark.parametrize("secret", ["12/34", "12?34", "12#34", "a?b=c", "1/2#3?4"])
def test_a_password_that_ends_too_early_is_never_taken_for_something_else(secret: str) -> None:
    """No host, database or master's name is made of it: the URL is refused, whatever its kind."""
    for form in ("redis://u:{}@h", "rediss://u:{}@h/0", "redis+sentinel://u:{}@h/jobs", "redis+cluster://u:{}@a,b"):
        with pytest.raises(ConfigurationError):
            RedisStore(form.format(secret))


def test_where_there_are_no_unix_sockets_the_url_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    monkeypatch.delattr(socket, "AF_UNIX")
    with pytest.raises(ConfigurationError, match="no Unix sockets on this system; write redis://"):
        RedisStore("unix:///run/redis.sock")
