"""What answers at the URL's host and port is no Redis, or speaks TLS where the URL doesn't, or the other way round.

A call ends in a StoreError that says what to look at; no other exception, no connection left, no password shown.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from fix_proxy import Proxy
from fix_servers_redis import LABELS, Certificates, RedisServer, program, tls_server

from leaselib.errors import StoreError
from leaselib.stores._redis import RedisStore

pytestmark = pytest.mark.system
CANARY = "c4n4ry"
SLOT = datetime(2026, 1, 1, tzinfo=timezone.utc)
NOT_UNDERSTOOD = "gave an answer that can't be understood .*look whether a Redis or Valkey server listens"
MAY_HAVE_TLS = "may speak TLS on this port: write rediss://"
MAY_LACK_TLS = "may not speak TLS on this port: write redis://"


class Peer:
    """Listens on a port of 127.0.0.1 and answers each piece that it gets with what `answer` makes of it.

    One thread serves one connection after the other. Ends a connection if the answer is None, or after the answer with
    `hangs_up`; else it keeps silent after it.
    """

    def __init__(self, answer: Callable[[bytes], bytes | None] | bytes | None, *, hangs_up: bool = False) -> None:
        self.answer, self.hangs_up = answer, hangs_up
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="peer", daemon=True)
        self._thread.start()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.settimeout(5)
            with contextlib.suppress(OSError), client:
                while data := client.recv(65536):
                    said = self.answer(data) if callable(self.answer) else self.answer
                    if said is None:
                        break
                    client.sendall(said)
                    if self.hangs_up:
                        break

    def urls(self, user: str = f"u:{CANARY}@") -> list[str]:
        """One of each kind that leads here."""
        place = f"{user}127.0.0.1:{self.port}"
        return [
            f"redis://127.0.0.1:{self.port}", f"redis://{place}", f"redis://{place}/3", f"redis+cluster://{place}",
            f"redis+sentinel://{place}/jobs?sentinel_password={CANARY}",
        ]  # fmt: skip


def failure(url: str, call: str = "ping", timeout: float = 5.0) -> StoreError:
    """What a call ends in. It leaves no connection behind, and shows no password, also in a traceback."""
    store = RedisStore(url)
    calls: dict[str, Callable[[], Any]] = {
        "ping": lambda: store.ping(timeout=timeout),
        "claim": lambda: store.claim("job", SLOT, "t", "runner", timeout=timeout),
        "heartbeat": lambda: store.heartbeat("job", SLOT, "t", 30, timeout=timeout),
    }
    with pytest.raises(StoreError) as caught:
        calls[call]()
    assert store._route.counts() == (0, 0), caught.value
    assert CANARY not in "".join(traceback.format_exception(caught.value))
    return caught.value


# ---- no Redis --------------------------------------------------------------------------------------------------------

RUBBISH = {
    "HTTP": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "half a line of HTTP": b"HTTP/1.1 400",
    "SMTP": b"220 mail.example ESMTP\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    "PostgreSQL": b"E\0\0\0\x8dSFATAL\0",
    "MySQL": b"J\0\0\0\n8.0.36\0",
    "empty lines": b"\r\n\r\n",
    "zeros": b"\0" * 100_000,
    "bytes of no text": b"\xff\xfe" * 50,
    "types of RESP3": b"%1\r\n+a\r\n+b\r\n",
    "a size that is a word": b"$abc\r\n",
    "a count that is a word": b"*abc\r\n",
    "a number that is a word": b":abc\r\n",
    "a number of bytes of no text": b":\xff\xfe\r\n",
    "a number too long for Python": b":" + b"9" * 5_000 + b"\r\n",
    "a size of a terabyte": b"$999999999999\r\n",
    "a size beyond 64 bits": b"$" + b"9" * 30 + b"\r\n",
    "a count of 10^12": b"*999999999999\r\n",
    "a negative size": b"$-7\r\n",
    "a negative count": b"*-17\r\n",
    "arrays nested 100,000 deep": b"*1\r\n" * 100_000 + b":1\r\n",
    "a size beyond 64 bits inside": b"*1\r\n$" + b"9" * 30 + b"\r\n",
    "no type inside": b"*2\r\n:1\r\n?\r\n",
    "no number inside": b"*2\r\n:1\r\n:x\r\n",
    "an answer to something else": b"+HELLO\r\n",
    "nothing": b"*0\r\n",
}


@pytest.mark.parametrize("what", RUBBISH)
@pytest.mark.parametrize("hangs_up", [False, True], ids=["then silent", "then closed"])
def test_rubbish_is_refused_at_once_whatever_the_drivers_parser_makes_of_it(
    what: str, hangs_up: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By a server, a sentinel, a node of a cluster; to AUTH and to a script. Nothing waits for more of it."""
    with Peer(RUBBISH[what], hangs_up=hangs_up) as peer:
        for url in peer.urls():
            started = time.monotonic()
            error = failure(url)
            assert time.monotonic() - started < 2, error
            assert error.transient
            assert error.job is None
            assert_says(error, NOT_UNDERSTOOD)
            assert len(str(error)) < 900
        for call in ("claim", "heartbeat"):
            assert_says(failure(peer.urls()[0], call), NOT_UNDERSTOOD)
    assert caplog.records == []


def assert_says(error: StoreError, words: str) -> None:
    """With pytest's own way to show what was said instead."""
    with pytest.raises(StoreError, match=words):
        raise error


def test_rubbish_made_of_the_protocols_own_parts_ends_in_a_transient_error() -> None:
    """1,500 times what chance makes of them; an answer that is an error is none of these."""
    chance = random.Random(3)
    parts = [
        b"+", b":", b"$", b"*", b"\r\n", b"\n", b"\r", b"0", b"1", b"2", b"9" * 20, b"OK", b"a", b" ", b"\0", b"\xff",
        b"$-1\r\n", b"*-1\r\n", b"*2\r\n", b"*2\r\n-ERR no\r\n", b"$1\r\nx\r\n", b":7\r\n", b"+OK\r\n", b"_",
    ]  # fmt: skip

    def rubbish(_: bytes) -> bytes:
        return b"".join(chance.choices(parts, k=chance.randint(1, 12)))

    with Peer(rubbish, hangs_up=True) as peer:
        for number in range(1_500):
            error = failure(peer.urls()[number % 5], ("ping", "claim", "heartbeat")[number % 3])
            assert error.transient, error


@pytest.mark.parametrize("cut", [0, 1, 5])
def test_any_one_byte_of_an_answer_changed_on_the_way_is_no_trouble_but_a_store_error(cut: int) -> None:
    """That a garbled answer is one to no call, or is none; then the next call is answered on another connection."""
    with RedisServer() as server, Proxy(("127.0.0.1", server.port)) as proxy:
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}")
        store.ping()
        for number in range(14):  # the head of the answer: how many, how long, which call

            def garble(data: bytes, number: int = number) -> bytes:
                changed = bytearray(data)
                changed[number] ^= 1 << cut
                return bytes(changed)

            proxy.answers.rewrite = garble
            with contextlib.suppress(StoreError):
                store.ping(timeout=0.15)
            proxy.answers.rewrite = None
            with contextlib.suppress(StoreError):  # what was left over on the connection may be met only now
                store.ping()
            assert store.ping()
        store.close()


UNKNOWN = b"-ERR unknown command 'AUTH', with args beginning with: 'u' '%s"
ECHOES: dict[str, Callable[[bytes], bytes]] = {
    "all of it": lambda data: data,
    "in an error": lambda data: UNKNOWN % CANARY.encode() + b"' \r\n",
    "in other words": lambda data: b"-ERR what is AUTH u %s?\r\n" % CANARY.encode(),
    "in rubbish": lambda data: b"AUTH u %s\r\n" % CANARY.encode(),
    "as a number": lambda data: b":%s\r\n" % CANARY.encode(),
    "as an unknown type inside": lambda data: b"*1\r\n?%s\r\n" % CANARY.encode(),
    "as the driver's own refusal": lambda data: b"-WRONGPASS for %s\r\n" % CANARY.encode(),
    "before it closes": lambda data: b"-ERR max number of clients reached %s\r\n" % CANARY.encode(),
}


@pytest.mark.parametrize("how", ECHOES)
def test_a_peer_that_repeats_the_password_does_not_bring_it_into_a_message(how: str) -> None:
    """As servers do that know no AUTH, and as an echo does. Looked for in messages and tracebacks by `failure`."""
    with Peer(ECHOES[how]) as peer:
        for url in peer.urls()[1:]:
            assert failure(url, "claim")


def test_the_start_of_a_long_password_is_not_shown_either() -> None:
    """Servers repeat the first 128 characters."""
    secret = CANARY * 50
    with Peer(UNKNOWN % secret[:128].encode() + b"\r\n") as peer:
        for url in peer.urls(f"u:{secret}@")[1:]:
            assert "unknown command 'AUTH'" in str(failure(url))


# ---- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """An authority of this module's own."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_port(certificates: Certificates) -> Iterator[int]:
    """The TLS port of a server."""
    certificate, key = certificates.issue("server", "IP:127.0.0.1")
    with tls_server(certificate, key, certificates.authority) as (_, port):
        yield port


@pytest.mark.parametrize("label", LABELS)
def test_tls_to_a_plain_port_is_guessed(label: str) -> None:
    """Some servers keep silent when they get a handshake, others refuse it."""
    with RedisServer(program=program(label)) as server:
        place = f"127.0.0.1:{server.port}"
        for url in (f"rediss://{place}", f"rediss+cluster://{place}", f"rediss+sentinel://{place}/jobs"):
            error = failure(url, timeout=1.0)
            assert_says(error, MAY_LACK_TLS)
            assert error.transient


@pytest.mark.parametrize(
    "answer",
    [b"-ERR unknown command\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 100, b"", None,
     b"\x15\x03\x01\0\x02\x01\0"],
    ids=["error", "HTTP", "zeros", "silence", "closed", "an end in TLS"],
)
def test_tls_to_a_peer_without_it_is_guessed(answer: bytes | None) -> None:
    """Whatever that says to a handshake."""
    with Peer(answer) as peer:
        error = failure(f"rediss://127.0.0.1:{peer.port}", timeout=0.5)
        assert_says(error, MAY_LACK_TLS)
        assert error.transient


def test_plain_text_to_a_tls_port_is_guessed(tls_port: int) -> None:
    """By the alert, or by the connection's end before anything was said."""
    place = f"u:{CANARY}@127.0.0.1:{tls_port}"
    for url in (f"redis://127.0.0.1:{tls_port}", f"redis://{place}/1", f"redis+cluster://{place}",
                f"redis+sentinel://127.0.0.1:{tls_port}/jobs"):  # fmt: skip
        for call in ("ping", "claim"):
            error = failure(url, call)
            assert_says(error, MAY_HAVE_TLS)
            assert error.transient


@pytest.mark.parametrize(
    "answer", [b"\x15\x03\x01\0\x02\x02\x46", b"\x15\x03\x03\0\x02\x02\x0a", None], ids=["alert", "newer", "closed"]
)
@pytest.mark.parametrize("hangs_up", [False, True])
def test_plain_text_to_a_peer_with_tls_is_guessed(answer: bytes | None, hangs_up: bool) -> None:
    """Also if it leaves the connection open after its alert."""
    with Peer(answer, hangs_up=hangs_up) as peer:
        for url in peer.urls():
            error = failure(url)
            assert_says(error, MAY_HAVE_TLS)
            assert error.transient


def test_tls_is_no_guess_where_it_can_not_be_the_trouble(tls_port: int, certificates: Certificates) -> None:
    """A port where nobody listens, a certificate that was refused, a connection lost that had served, a Unix socket."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = f"127.0.0.1:{gone.getsockname()[1]}"
    for url in (f"redis://{nobody}", f"rediss://{nobody}", f"rediss://127.0.0.1:{tls_port}", "unix:///no/such.sock"):
        assert "speak TLS" not in str(failure(url))
    trusted = f"?ssl_ca_certs={certificates.authority}"
    RedisStore(f"rediss://127.0.0.1:{tls_port}{trusted}").ping()
    with RedisServer() as server, Proxy(("127.0.0.1", server.port)) as proxy:
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}")
        store.ping()
        proxy.drop_answer()
        with pytest.raises(StoreError) as caught:
            store.ping()
        assert "speak TLS" not in str(caught.value)
        store.close()
