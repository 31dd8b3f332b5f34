"""Where a RedisStore's servers are: URLs taken apart, checked, and shown without their passwords.

Owns nothing; any thread may call it. Touches neither the network nor the driver; reads the certificate files that a
URL names.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from leaselib.errors import ConfigurationError

Kind = Literal["single", "unix", "sentinel", "cluster"]
Address = tuple[str, int]
"""A host and a port; for a Unix socket its path and 0."""

_SCHEMES: dict[str, tuple[Kind, bool]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "unix": ("unix", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_PORTS: dict[Kind, int] = {"single": 6379, "unix": 0, "sentinel": 26379, "cluster": 6379}
_FORMS = (
    "redis://[user:password@]host[:port][/db], rediss:// for TLS, unix:///path/to/socket[?db=N], "
    "redis+sentinel://host:port,host:port/master-name[/db] or redis+cluster://host:port,host:port"
)
_PARAMETERS = (
    "namespace", "db", "username", "password", "wait_replicas", "wait_timeout", "max_connections",
    "sentinel_username", "sentinel_password", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs",
    "ssl_check_hostname",
)  # fmt: skip
_ENDS_TOO_EARLY = (
    "this Redis URL (not shown, it may hold a password) has {} after its host. Percent-encode what means something in "
    "a URL: @ / ? # % as %40 %2F %3F %23 %25"
)
_SECRET = ("pass", "secret", "key", "token")


@dataclass(frozen=True)
class Target:
    """A parsed URL. Its repr and `shown` hold no secret.

    Attributes:
        kind: what answers there.
        addresses: of the server, the sentinels, or some of the cluster's nodes.
        shown: the URL with the secrets replaced, for messages.
        master: the name that the sentinels know the primary by.
        tls: the context of a TLS connection, or None.
        parameters: what else the query said; texts.
    """

    kind: Kind
    addresses: tuple[Address, ...]
    shown: str
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    master: str = ""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    parameters: dict[str, str] = field(default_factory=dict, repr=False)


def masked(url: str) -> str:
    """The URL with its user info and every secret of its query replaced."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "***" if "@" in url else url[:200]
    if "@" in rest:  # the last one: a password may hold any character, if it wasn't quoted
        user, colon, _ = rest.partition(":")
        user = user if colon and user.isalnum() else ""
        rest = f"{user}:***@{rest.rpartition('@')[2]}"
    rest, question_mark, query = rest.partition("?")
    pairs = []
    for pair in query.split("&"):
        name, equals, _ = pair.partition("=")
        plain = unquote(name).lower()
        hide = equals and any(word in plain for word in _SECRET) and not plain.endswith("file")
        pairs.append(f"{name}=***" if hide else pair)
    return f"{scheme}://{rest}{question_mark}{'&'.join(pairs)}"


def parse(url: str) -> Target:
    """Takes a URL apart.

    Raises:
        ConfigurationError: it can't work; says what to write instead.
    """
    if not isinstance(url, str):
        raise ConfigurationError(f"a Redis URL must be a str such as 'redis://localhost:6379/0', not {url!r:.100}")
    shown = masked(url)
    parts, query = _split(url, shown)
    scheme = parts.scheme.replace("valkeys", "rediss").replace("valkey", "redis")
    if scheme not in _SCHEMES:
        raise ConfigurationError(f"{shown!r} is no Redis URL: its scheme is {parts.scheme!r}; write {_FORMS}")
    kind, tls = _SCHEMES[scheme]
    unknown = sorted(set(query) - set(_PARAMETERS))
    if unknown:
        raise ConfigurationError(
            f"{shown!r} has the unknown parameter {unknown[0]!r}; known are {', '.join(_PARAMETERS)}. Time-outs and "
            f"retries are leaselib's own"
        )
    userinfo, _, hosts = parts.netloc.rpartition("@")
    username, password = _user(userinfo, query)
    path = [unquote(part) for part in parts.path.split("/") if part]
    master = ""
    if kind == "unix":
        if not hasattr(socket, "AF_UNIX"):
            raise ConfigurationError(f"{shown!r}: Python has no Unix sockets on this system; write redis://host:port/0")
        if hosts or not path:
            raise ConfigurationError(f"{shown!r} names no socket; write unix:///path/to/redis.sock (three slashes)")
        addresses: tuple[Address, ...] = ((unquote(parts.path), 0),)
        path = []
    else:
        addresses = _addresses(hosts, kind, shown)
    if kind == "sentinel":
        if not path:
            raise ConfigurationError(
                f"{shown!r} lacks the master's name; write redis+sentinel://host:26379,host:26379/master-name/0"
            )
        master = path.pop(0)
    if len(path) > 1:
        raise ConfigurationError(f"{shown!r} has too long a path; write {_FORMS}")
    db = _db([*path, *([query["db"]] if "db" in query else [])], shown)
    if kind == "cluster" and db:
        raise ConfigurationError(f"{shown!r} asks for database {db}, but a cluster has only database 0; leave it out")
    context = _tls(query, shown) if tls else None
    return Target(kind, addresses, shown, db, username, password, master, context, query)


def _split(url: str, shown: str) -> tuple[SplitResult, dict[str, str]]:
    """The URL's parts, and its query. Where a password may stand in the wrong part, nothing of the URL is shown."""
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:  # its text would quote a part of the URL that may be the password's
        raise ConfigurationError(f"{shown!r} is no URL; write {_FORMS}") from None
    if parts.netloc and "@" in parts.path + parts.query:
        raise ConfigurationError(_ENDS_TOO_EARLY.format("an @"))
    if "#" in url:
        raise ConfigurationError(_ENDS_TOO_EARLY.format("a #"))
    query = dict(pairs)
    if len(query) < len(pairs):
        raise ConfigurationError(f"{shown!r} gives a parameter twice; write it once")
    return parts, query


def _user(userinfo: str, query: dict[str, str]) -> tuple[str | None, str | None]:
    name, separator, secret = userinfo.partition(":")
    username = unquote(name) or query.get("username") or None
    password = (unquote(secret) if separator else None) or query.get("password") or None
    return username, password


def _addresses(hosts: str, kind: Kind, shown: str) -> tuple[Address, ...]:
    found = []
    for part in hosts.split(","):
        if part.startswith("["):  # an IPv6 address
            host, _, rest = part[1:].partition("]")
            port = rest.removeprefix(":")
        else:
            host, _, port = part.partition(":")
        if not host or not (port == "" or (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
            what = repr(part) if part in shown else "what stands for it"  # else it may be a part of the password
            raise ConfigurationError(
                f"{what} in {shown!r} is no host or host:port; write {_FORMS}, and percent-encode what means something "
                f"in a URL if it stands in a password"
            )
        found.append((unquote(host), int(port) if port else _PORTS[kind]))
    if kind == "single" and len(found) > 1:
        raise ConfigurationError(
            f"{shown!r} names {len(found)} servers; write redis+sentinel:// or redis+cluster:// for such a group"
        )
    return tuple(found)


def _db(found: list[str], shown: str) -> int:
    if not found:
        return 0
    if len(set(found)) > 1 or not (found[0].isascii() and found[0].isdigit()):
        raise ConfigurationError(f"{shown!r} must name one database by its number, such as /0; found {found}")
    return int(found[0])


def _tls(query: dict[str, str], shown: str) -> ssl.SSLContext:
    """Chain and host name are verified unless the URL says otherwise in so many words."""
    verify = query.get("ssl_cert_reqs", "required")
    if verify not in ("required", "none"):
        raise ConfigurationError(f"ssl_cert_reqs must be 'required' or 'none', not {verify!r:.100}")
    try:
        context = ssl.create_default_context(cafile=query.get("ssl_ca_certs"))
        if "ssl_certfile" in query:
            context.load_cert_chain(query["ssl_certfile"], query.get("ssl_keyfile"), password="")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the certificates that {shown!r} names can't be used: {error}. ssl_ca_certs, ssl_certfile and ssl_keyfile "
            f"must be PEM files that this process may read"
        ) from error
    if verify == "none" or not _flag("ssl_check_hostname", query.get("ssl_check_hostname", "true")):
        context.check_hostname = False
    if verify == "none":
        context.verify_mode = ssl.CERT_NONE
    return context


def _flag(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise ConfigurationError(f"{name} must be true or false, not {value!r:.100}")
    return value.lower() in ("true", "1")


def whole_number(name: str, value: object, least: int) -> int:
    """The value as an int.

    Raises:
        ConfigurationError: it is none, or below `least`.
    """
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name} must be a whole number of at least {least}, not {value!r:.100}")
    return value


def seconds(name: str, value: object) -> float:
    """A duration above 0 in seconds: an int or float (or its text), or a timedelta.

    Raises:
        ConfigurationError: it is none.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else 0.0
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise ConfigurationError(f"{name} must be a number of seconds above 0 or a timedelta, not {value!r:.100}")
    return number
