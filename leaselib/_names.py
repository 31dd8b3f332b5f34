"""Names of jobs, runners and namespaces: what they may be. Owns nothing; any thread may call it."""

from __future__ import annotations

import re

from leaselib.errors import ConfigurationError

NAME_LENGTH = 200
# Control characters (C0, DEL, C1), the line and paragraph separators, and lone surrogates, which no store can keep.
_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def check_name(what: str, name: object) -> str:
    """The name itself, if it is one: any Unicode text of 1 to 200 characters without control characters.

    Raises:
        ConfigurationError: it isn't; says what was found.
    """
    if not isinstance(name, str):
        raise ConfigurationError(f"{what} must be a str of 1 to {NAME_LENGTH} characters, not {name!r:.100}")
    if not 1 <= len(name) <= NAME_LENGTH:
        raise ConfigurationError(
            f"{what} must have 1 to {NAME_LENGTH} characters; this one has {len(name)}: {name[:40]!r}. Choose a "
            f"{'longer' if not name else 'shorter'} one"
        )
    found = _FORBIDDEN.search(name)
    if found is not None:
        raise ConfigurationError(
            f"{what} {name!r:.100} holds the control character {found.group()!r}; leave it out, any other Unicode "
            f"text will do"
        )
    return name
