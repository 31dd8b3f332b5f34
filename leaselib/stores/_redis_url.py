"""Where a RedisStore's servers are: URLs taken apart, checked, and shown without their passwords.

Owns nothing; any thread may call it. Touches neither the network nor the driver; reads the certificate files that a
URL names.
"""

from __future__ import annotations

import ipaddress
import re
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
_UP_TO_PATH, _BRACKETED = re.compile(r"[^/?#]*"), re.compile(r"\[[^\[\]]*\]")
"""The credentials and hosts of what follows `://`; what stands in brackets there."""
_ENDS_TOO_EARLY = (
    "this Redis URL (not shown, it may hold a password) has {} after its host. Percent-encode what means something in "
    "a URL: @ / ? # % as %40 %2F %3F %23 %25"
)
_SHOWN = frozenset(_PARAMETERS) - {"password", "sentinel_password"}
"""Whose values may be shown. Not so any others': they may be a misspelt password's."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_NOT_IN_A_HOST = set("/\\@?#\"'<>{}$%;=&*^|`()!+")
_IN_BRACKETS = re.compile(r"\[[^\]]*\]")
_ODD_HOSTS = re.compile(r"(^|,):|;|:(?![0-9]*(,|$))")
"""A host that begins with a colon, or a colon before something else than a port's number; or a semicolon."""
_SOCKET_AND_DB = re.compile(r"(.*\.sock)/([0-9]+)/?", re.DOTALL)
_LARGEST_DB = 2**31 - 1
_LONGEST_SOCKET = 107  # bytes, on Linux; a few less elsewhere
_MOST = {"wait_replicas": 1_000, "max_connections": 10_000}
"""What is more is a slip of the pen."""


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
    else:
        hosts = re.split("[/?#]", rest, maxsplit=1)[0]
        if _ODD_HOSTS.search(_IN_BRACKETS.sub("host", hosts)):  # perhaps a password before something else than an @
            rest = "***" + rest[len(hosts) :]
    rest, question_mark, query = rest.partition("?")
    pairs = []
    for pair in query.split("&"):
        name, equals, _ = pair.partition("=")
        plain = unquote(name)
        if not pair or (equals and plain in _SHOWN):
            pairs.append(pair)
        else:  # one without a value may be the rest of another's
            pairs.append(f"{name}=***" if equals else "***")
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
    _check_parameters(query, shown, kind, tls=tls)
    userinfo, _, hosts = parts.netloc.rpartition("@")
    if "@" in userinfo and kind in ("sentinel", "cluster"):
        raise ConfigurationError(
            "this Redis URL (not shown, it holds a password) has more than one @. One user and one password count for "
            "all servers of a list: write them once, before the first host, and an @ of a password as %40"
        )
    username, password = _user(userinfo, query, shown)
    path = [unquote(part) for part in parts.path.split("/") if part]
    master = ""
    if kind == "unix":
        addresses: tuple[Address, ...] = ((_socket_path(hosts, unquote(parts.path), shown), 0),)
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
    if _CONTROL.search(url) is not None or url != url.strip():  # Python would drop some of them without a word
        raise ConfigurationError(
            f"{shown!r} has a control character (such as a line's end), or a blank at an end; leave it out, or "
            f"percent-encode it if it belongs to a name or a password"
        )
    try:
        parts = _parts(url)
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


def _parts(url: str) -> SplitResult:
    """As urlsplit, of any Python: newer ones refuse a list of hosts in which an IPv6 address isn't the only one.

    What stands in brackets is judged with the addresses.

    Raises:
        ValueError: as urlsplit.
    """
    scheme, separator, rest = url.partition("://")
    place = _UP_TO_PATH.match(rest)
    assert place is not None
    parts = urlsplit(f"{scheme}{separator}{_BRACKETED.sub('h', place[0])}{rest[place.end() :]}")
    return parts._replace(netloc=place[0])


def _check_parameters(query: dict[str, str], shown: str, kind: Kind, *, tls: bool) -> None:
    """That each is known, and has something to act on."""
    unknown = sorted(set(query) - set(_PARAMETERS))
    if unknown:
        raise ConfigurationError(
            f"{shown!r} has the unknown parameter {unknown[0]!r}; known are {', '.join(_PARAMETERS)}. Time-outs and "
            f"retries are leaselib's own"
        )
    for name, value in query.items():
        if name.startswith("ssl_") and not tls:
            raise ConfigurationError(
                f"{shown!r} has the parameter {name}, but no TLS; write rediss:// (or rediss+sentinel://, "
                f"rediss+cluster://), or leave it out"
            )
        if name.startswith("sentinel_") and kind != "sentinel":
            raise ConfigurationError(
                f"{shown!r} has the parameter {name}, but no sentinels; write redis+sentinel://, or leave it out"
            )
        if name.startswith("ssl_") and not value:
            raise ConfigurationError(f"{shown!r} gives {name} no value; write one, or leave it out")


def _socket_path(hosts: str, path: str, shown: str) -> str:
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigurationError(f"{shown!r}: Python has no Unix sockets on this system; write redis://host:port/0")
    if hosts or not path.strip("/"):
        raise ConfigurationError(f"{shown!r} names no socket; write unix:///path/to/redis.sock (three slashes)")
    with_db = _SOCKET_AND_DB.fullmatch(path)
    if with_db is not None:
        raise ConfigurationError(
            f"{shown!r} has a database number in the socket's path; write unix://{with_db[1]}?db={with_db[2]}"
        )
    if path.endswith("/") or _CONTROL.search(path) is not None:
        raise ConfigurationError(f"{shown!r} must name a socket; its path has a control character, or ends with a /")
    size = len(path.encode(errors="surrogatepass"))
    if size > _LONGEST_SOCKET:
        raise ConfigurationError(
            f"{shown!r} has a socket's path of {size} bytes; a system takes {_LONGEST_SOCKET} at most: let the server "
            f"make its socket at a shorter path"
        )
    return path


def _user(userinfo: str, query: dict[str, str], shown: str) -> tuple[str | None, str | None]:
    name, separator, secret = userinfo.partition(":")
    for what, given in (("username", name), ("password", secret)):
        if given and what in query:
            raise ConfigurationError(f"{shown!r} gives the {what} twice; write it before the @ or as ?{what}=")
    username = unquote(name) or query.get("username") or None
    password = (unquote(secret) if separator else None) or query.get("password") or None
    return username, password


def _addresses(hosts: str, kind: Kind, shown: str) -> tuple[Address, ...]:
    found = []
    for part in hosts.split(","):
        if part.startswith("["):  # an IPv6 address
            host, _, rest = part[1:].partition("]")
            colon, port = rest[:1], rest[1:]
        else:
            host, colon, port = part.partition(":")
        host = unquote(host)
        if not (is_host(host, bracketed=part.startswith("[")) and (_is_port(port) if colon == ":" else not colon)):
            what = repr(part) if part in shown else "the host (not shown, it may be a part of a password)"
            raise ConfigurationError(
                f"{what} in {shown!r} is no host or host:port; write {_FORMS}, an IPv6 address as [::1]:6379, and "
                f"percent-encode what means something in a URL if it stands in a password"
            )
        found.append((host, int(port) if port else _PORTS[kind]))
    if kind == "single" and len(found) > 1:
        raise ConfigurationError(
            f"{shown!r} names {len(found)} servers; write redis+sentinel:// or redis+cluster:// for such a group"
        )
    return tuple(found)


def is_host(host: str, *, bracketed: bool = False) -> bool:
    """Whether a resolver can be asked for it, or it is an address."""
    if bracketed:
        try:
            return bool(ipaddress.IPv6Address(host))
        except ValueError:
            return False
    if not host or not host.isprintable() or any(char.isspace() or char in _NOT_IN_A_HOST for char in host):
        return False
    if host.isdigit() and host != "0":  # a port without a host; it would be taken for an address
        return False
    try:
        return bool(host.encode("idna"))  # as sockets do it; no label may be empty, or longer than 63 bytes
    except UnicodeError:
        return False


def _is_port(port: str) -> bool:
    return port.isascii() and port.isdigit() and len(port) < 10 and 0 < int(port) < 65536


def _db(found: list[str], shown: str) -> int:
    if not found:
        return 0
    number = _whole(found[0])
    if len(set(found)) > 1 or number is None or number > _LARGEST_DB:
        raise ConfigurationError(
            f"{shown!r} must name one database by its number, such as /0; the largest is {_LARGEST_DB}; found "
            f"{', '.join(f'{one!r:.40}' for one in found)}"
        )
    return number


def _whole(text: str) -> int | None:
    """What plain digits stand for. Python takes other signs for digits too, and refuses thousands of them."""
    return int(text) if re.fullmatch("[0-9]{1,20}", text) is not None else None


def _tls(query: dict[str, str], shown: str) -> ssl.SSLContext:
    """Chain and host name are verified unless the URL says otherwise in so many words."""
    verify = query.get("ssl_cert_reqs", "required")
    if verify not in ("required", "none"):
        raise ConfigurationError(f"ssl_cert_reqs must be 'required' or 'none', not {verify!r:.100}")
    check_name = _flag("ssl_check_hostname", query.get("ssl_check_hostname", "true"))
    if verify == "none" and check_name and "ssl_check_hostname" in query:
        raise ConfigurationError(
            f"{shown!r} can't have the host's name checked in a certificate that isn't verified: leave out either "
            f"ssl_cert_reqs=none or ssl_check_hostname"
        )
    if "ssl_keyfile" in query and "ssl_certfile" not in query:
        raise ConfigurationError(f"{shown!r} names a key but no certificate; add ssl_certfile")
    try:
        context = ssl.create_default_context(cafile=query.get("ssl_ca_certs"))
        if "ssl_certfile" in query:
            context.load_cert_chain(query["ssl_certfile"], query.get("ssl_keyfile"), password="")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the certificates that {shown!r} names can't be used: {error}. ssl_ca_certs, ssl_certfile and ssl_keyfile "
            f"must be PEM files that this process may read"
        ) from error
    if verify == "none" or not check_name:
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
        ConfigurationError: it is none, or below `least`, or larger than makes sense.
    """
    number = _whole(value) if isinstance(value, str) else value
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= _MOST[name]:
        huge = isinstance(value, int) and abs(value) > 10**20  # Python refuses to print some of those
        shown = "a number of more than 20 digits" if huge else f"{value!r:.100}"
        raise ConfigurationError(
            f"{name} must be a whole number of at least {least} and at most {_MOST[name]}, not {shown}"
        )
    return number


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
