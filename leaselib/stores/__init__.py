"""The stores, and `open_store`, which makes one from a URL. Owns no state; any thread may call it.

Drivers are imported only when a store that needs one is made.
"""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

from leaselib.errors import ConfigurationError
from leaselib.stores._base import Store
from leaselib.stores._memory import MemoryStore
from leaselib.stores._sqlite import SQLiteStore

__all__ = ["MemoryStore", "SQLiteStore", "Store", "open_store"]

_REDIS = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_VALKEY = ("valkey", "valkeys", "valkey+sentinel", "valkeys+sentinel", "valkey+cluster", "valkeys+cluster")
_POSTGRES = ("postgresql", "postgres")
_FORMS = (
    "memory://, sqlite:///relative.db, sqlite:////absolute.db, redis://host:6379/0, rediss://..., unix:///socket, "
    "redis+sentinel://host:26379/name/0, redis+cluster://host:7000, postgresql://user@host/database"
)


def open_store(url: str) -> Store:
    """A store from its URL. Doesn't touch the network or the disk.

    `memory://`, `sqlite:///relative.db`, `sqlite:////absolute.db`, `redis://`, `rediss://`, `unix://` (Redis socket),
    `redis+sentinel://host:port,host:port/master-name/db`, `redis+cluster://`, `postgresql://`; `valkey://` and
    `valkeys://` are the Redis ones. Each takes `?namespace=NAME`.

    Raises:
        ConfigurationError: an unknown or malformed URL, or a missing driver; says what to write or to install.
    """
    if not isinstance(url, str) or ":" not in url:
        raise ConfigurationError(f"a store's URL is one of {_FORMS}; this is {mask(url) if url else url!r:.200}")
    scheme = url.partition(":")[0].lower()
    if scheme == "memory":
        _, options = _split(url, ("namespace",))
        return MemoryStore(options.get("namespace", "default"))
    if scheme == "sqlite":
        path, options = _split(url, ("namespace",))
        if not path.startswith("/") or path == "/":
            raise ConfigurationError(
                f"write sqlite:///relative.db or sqlite:////absolute.db (three or four slashes); this is {mask(url)}"
            )
        return SQLiteStore(path[1:], options.get("namespace", "default"))
    if scheme in _REDIS or scheme in _VALKEY:
        from leaselib.stores._redis import RedisStore

        return RedisStore.from_url(url)
    if scheme in _POSTGRES:
        from leaselib.stores._postgres import PostgresStore

        return PostgresStore.from_url(url)
    raise ConfigurationError(f"leaselib knows no store {scheme!r}; a store's URL is one of {_FORMS}")


def mask(url: str) -> str:
    """The URL without its password and other secrets, for messages.

    Everything between the user's name and the last @ may be a password, also where that isn't how URLs are read: an
    unescaped / or ? in one is a common mistake, and just then there is a message.
    """
    head, separator, rest = str(url).partition("://")
    if not separator:
        place = head.partition("?")[0]
        if "=" in place:  # parameters as libpq writes them, perhaps a password among them
            return "***"
        return f"{place.partition(':')[0]}:***" if ":" in place else place
    credentials, at, host = rest.rpartition("@")
    place, question, query = host.partition("?")
    if at:
        user, colon, _ = credentials.partition(":")
        hidden = ":***" if colon else "***" if set("/?&") & set(user) else user
        place = f"{user}{hidden}@{place}" if colon else f"{hidden}@{place}"
    shown = "&".join(
        pair if not any(word in pair.partition("=")[0].lower() for word in ("pass", "secret", "key", "token"))
        else f"{pair.partition('=')[0]}=***"
        for pair in query.split("&")
    )
    return f"{head}{separator}{place}{question}{shown}"


def _split(url: str, known: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """The path and the query parameters of a URL without host."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigurationError(f"{mask(url)} is no URL; a store's URL is one of {_FORMS}") from None
    if parts.netloc:
        raise ConfigurationError(
            f"{parts.scheme}:// takes no host; write {parts.scheme}:///path for a path, with one more slash if it is "
            f"absolute; this is {mask(url)}"
        )
    if parts.fragment:
        raise ConfigurationError(f"write %23 for the # in {mask(url)}: as it stands, what follows it would be left out")
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ConfigurationError(f"{mask(url)} gives a parameter twice; write it once")
    for name in options:
        if name not in known:
            raise ConfigurationError(f"{parts.scheme}:// knows no parameter {name!r}, only {', '.join(known)}")
    return unquote(parts.path), options
