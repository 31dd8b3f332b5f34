"""The URL of a PostgresStore: takes off what is leaselib's, leaves the rest to libpq, and hides the password.

Owns nothing; any thread may call it. Needs psycopg, but no network.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from dataclasses import dataclass
from urllib.parse import unquote

from psycopg import Error as DriverError
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from leaselib._names import check_name
from leaselib.errors import ConfigurationError

EXAMPLE = "postgresql://user:password@host:5432/database?namespace=myapp"
SHORT_SECRET = 4
"""Shorter secrets are hidden in messages only where they stand alone."""
_UNREADABLE = (
    "{} (not shown, it may hold a password). Write it as "
    + EXAMPLE
    + ", and characters such as @ / ? # % in the password as %40 %2F %3F %23 %25"
)
_OWN = ("namespace", "schema", "create")
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_SCHEMA = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")

# What a connection gets unless the URL says otherwise. TCP notices a silent peer by itself, beside leaselib's own
# deadlines; Kerberos is asked only if the URL wants it, which saves a round trip and a wait for its servers.
_DEFAULTS = {
    "fallback_application_name": "leaselib",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}


@dataclass(frozen=True)
class Target:
    """One host to try. `host` is a name that has to be looked up; None if `params` say all that libpq needs."""

    params: dict[str, str]
    host: str | None

    def conninfo(self, address: str | None = None) -> bytes:
        """What libpq is given; `address` is the one that was found for `host`."""
        extra = {} if address is None else {"hostaddr": address}
        return make_conninfo("", **{**self.params, **extra}).encode()


@dataclass(frozen=True)
class Address:
    """A parsed URL. Its repr and `shown` hold no password.

    Attributes:
        targets: the hosts, in the URL's order.
        namespace, schema, create: leaselib's own parameters; None where the URL doesn't say.
        connect_timeout: the longest that one host is tried, in seconds; None: no limit but the call's own.
        shown: the URL without password and parameters, for messages.
        secrets: texts that no message may contain.
    """

    targets: tuple[Target, ...]
    namespace: str | None
    schema: str | None
    create: bool | None
    connect_timeout: float | None
    shown: str
    secrets: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Address({self.shown!r})"

    def scrub(self, text: str) -> str:
        """The text on one line, at most 600 characters of it, and without what is secret."""
        for secret in self.secrets:
            if len(secret) >= SHORT_SECRET:
                text = text.replace(secret, "***")
            else:  # within words it is no secret but a part of them, and hiding it there would tell it
                text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", text)
        return " ".join(text.split())[:600]


def parse(url: str) -> Address:
    """Reads a URL without touching the network.

    Raises:
        ConfigurationError: it isn't one that PostgreSQL's libpq takes, or a service file is to name the hosts.
    """
    if not isinstance(url, str) or not url.startswith(("postgresql://", "postgres://")):
        found = f"one that begins with {url.partition(':')[0][:20]!r}" if isinstance(url, str) else type(url).__name__
        raise ConfigurationError(f"a PostgresStore needs a URL that begins like {EXAMPLE}, not {found}")
    rest, own = _take_own(url)
    authority, _, query = rest.partition("://")[2].partition("?")
    if set("/@#") & set(authority.rpartition("@")[0]):
        raise ConfigurationError(_UNREADABLE.format("A password in this URL ends too early"))
    if "@" in query and "/" not in authority:  # libpq takes all that stands before it for a user and a password
        raise ConfigurationError(_UNREADABLE.format("This URL has an @ among its parameters and no / before them"))
    try:
        raw = conninfo_to_dict(rest)
    except (DriverError, ValueError):
        # libpq's own words may quote the password, so neither they nor the URL are repeated.
        found = f"PostgreSQL's client library can't read this URL{_meant(rest)}"
        raise ConfigurationError(_UNREADABLE.format(found)) from None
    params = {key: str(value) for key, value in raw.items() if value is not None}
    secrets = [v for k, v in params.items() if re.search("pass|secret|token", k) and k != "passfile"]
    for key, value in _DEFAULTS.items():
        params.setdefault(key, value)
    params["client_encoding"] = "utf8"  # whatever the URL says: it is what leaselib sends and reads
    if "PGGSSENCMODE" not in os.environ:
        params.setdefault("gssencmode", "disable")
    schema = own.get("schema")
    return Address(
        targets=_targets(params),
        namespace=None if "namespace" not in own else check_name("namespace", own["namespace"]),
        schema=None if schema is None else check_schema(schema),
        create=None if "create" not in own else _boolean("create", own["create"]),
        connect_timeout=_seconds("connect_timeout", params.pop("connect_timeout", "0")) or None,
        shown=_shown(params),
        # Longest first, so that a password which contains another is hidden as a whole.
        secrets=tuple(sorted({s for s in secrets if s}, key=len, reverse=True)),
    )


def check_schema(name: object) -> str:
    """The schema's name itself, if leaselib takes it.

    Raises:
        ConfigurationError: it doesn't.
    """
    if not isinstance(name, str) or not _SCHEMA.fullmatch(name) or name.lower().startswith("pg_"):
        raise ConfigurationError(
            f"schema must be a name of 1 to 63 of the characters A-Z a-z 0-9 _ - that begins with a letter or _, and "
            f"not with pg_; not {name!r:.100}"
        )
    return name


def _take_own(url: str) -> tuple[str, dict[str, str]]:
    """The URL without leaselib's parameters, and those. urllib can't read several hosts, so the rest isn't touched."""
    base, mark, query = url.partition("?")
    own: dict[str, str] = {}
    others = []
    for item in query.split("&") if mark else []:
        key, _, value = item.partition("=")
        if unquote(key) in _OWN:
            own[unquote(key)] = unquote(value)
        elif item:
            others.append(item)
    return base + ("?" + "&".join(others) if others else ""), own


def _meant(url: str) -> str:
    """What a parameter that nobody knows was probably to be. Its text isn't shown: it may be a part of a password."""
    known = [*_OWN, *(option.keyword.decode() for option in pq.Conninfo.get_defaults())]
    for item in url.partition("?")[2].split("&"):
        key = unquote(item.partition("=")[0])
        close = [] if key in known else difflib.get_close_matches(key, known, n=1, cutoff=0.75)
        if close:
            return f": it has a misspelt parameter, perhaps for {close[0]!r}"
    return ""


def _targets(params: dict[str, str]) -> tuple[Target, ...]:
    """One target per host, so that each can be given its share of the time."""
    if ("service" in params or "PGSERVICE" in os.environ) and not (params.get("host") or params.get("hostaddr")):
        # libpq would read the hosts there, and look them up without a deadline.
        raise ConfigurationError(
            "the URL leaves its host to a service (service= or PGSERVICE), and leaselib has to know each host to keep "
            "its time-outs. Write the host in the URL: postgresql://host:5432/?service=NAME takes the rest from there"
        )
    hosts = (params.get("host") or os.environ.get("PGHOST") or "").split(",")
    addresses = (params.get("hostaddr") or os.environ.get("PGHOSTADDR") or "").split(",")
    count = max(len(hosts), len(addresses))
    ports = (params.get("port") or os.environ.get("PGPORT") or "").split(",")
    if len(ports) not in (1, count) or (len(hosts) != count and hosts != [""]) or len(addresses) not in (1, count):
        raise ConfigurationError(
            f"the URL names {len(hosts)} hosts, {len(addresses)} addresses and {len(ports)} ports, which don't match; "
            f"write each host with its port: a:5432,b:5433"
        )
    for port in ports:
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            # Not shown: where a password holds a ? or / as it stands, what is read as the port is a part of it.
            raise ConfigurationError(_UNREADABLE.format("The port in this URL is no number from 1 to 65535"))
    if addresses == [""]:
        addresses = addresses * count
    found = []
    for index in range(count):
        host = hosts[index] if index < len(hosts) else ""
        own = {"host": host, "hostaddr": addresses[index], "port": ports[index if len(ports) > 1 else 0]}
        rest = {key: value for key, value in params.items() if key not in own and key != "connect_timeout"}
        target = {**rest, **{key: value for key, value in own.items() if value}}
        found.append(Target(target, host if not addresses[index] and _is_name(host) else None))
    return tuple(found)


def _is_name(host: str) -> bool:
    """Whether a host has to be looked up: it is neither a socket's folder nor an address."""
    if not host or host.startswith(("/", "@")):
        return False
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return True
    return False


def _shown(params: dict[str, str]) -> str:
    hosts, ports = params.get("host", "").split(","), params.get("port", "").split(",")
    if len(ports) == 1:
        ports = ports * len(hosts)
    places = (f"{h}:{p}" if p else h for h, p in zip(hosts, ports, strict=False))
    user = f"{params['user']}@" if "user" in params else ""
    return f"postgresql://{user}{','.join(places)}/{params.get('dbname', '')}"


def _boolean(name: str, value: str) -> bool:
    if value.lower() not in _BOOLEANS:
        raise ConfigurationError(f"{name} in the URL must be true or false, not {value!r:.100}")
    return _BOOLEANS[value.lower()]


def _seconds(name: str, value: str) -> float:
    try:
        return max(0.0, float(value))
    except ValueError:
        raise ConfigurationError(f"{name} in the URL must be a number of seconds, not {value!r:.100}") from None
