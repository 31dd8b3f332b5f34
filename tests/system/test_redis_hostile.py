"""Stored data that nobody of ours wrote, and scripts that fail half way: one job at most is affected, and says so."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from fix_servers_redis import LABELS, RedisServer, program, wait_until

from leaselib._model import ClaimAnswer, Run, to_ms
from leaselib.errors import StoreError
from leaselib.stores import _redis
from leaselib.stores._redis import RedisStore
from leaselib.stores._redis_codec import Keys, Script, read_record, script

pytestmark = pytest.mark.system
_tokens = (f"token-{n}" for n in itertools.count())
KEYS = Keys("default")
JOB = "job"


@pytest.fixture(scope="module", params=LABELS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of each program, for this module."""
    with RedisServer(program=program(request.param)) as it:
        yield it


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    """A store on the emptied server."""
    server.client().flushall()
    it = RedisStore(server.url())
    yield it
    it.close()


def due(store: RedisStore) -> datetime:
    """The whole second on the server's clock."""
    return store.now().replace(microsecond=0)


def claim(store: RedisStore, slot: datetime, job: str = JOB, **options: Any) -> ClaimAnswer:
    """A claim with a token of its own."""
    return store.claim(job, slot, options.pop("token", None) or next(_tokens), "runner", **options)


def win(store: RedisStore, slot: datetime, job: str = JOB, **options: Any) -> Run:
    """A claim that must be won."""
    answer = claim(store, slot, job, **options)
    assert answer.outcome == "won", answer
    assert answer.run is not None
    return answer.run


# ---- hostile records -------------------------------------------------------------------------------------------------


def every_operation(store: RedisStore, run: Run) -> dict[str, Callable[[], Any]]:
    """Everything that can be asked about a run and its job."""
    after = run.slot + timedelta(milliseconds=1)
    return {
        "get": lambda: store.get(JOB, run.slot),
        "runs": lambda: store.runs(JOB),
        "unfinished": lambda: store.unfinished(["fine", JOB]),
        "heartbeat": lambda: store.heartbeat(JOB, run.slot, run.token, 30, "1"),
        "claim": lambda: claim(store, run.slot),
        "takeover": lambda: claim(store, run.slot, takeover_of=1),
        "new claim": lambda: claim(store, after),
        "allowed claim": lambda: claim(store, after, overlap="allow", history_size=0, keep=0, max_late=0),
        "release": lambda: store.release(JOB, run.slot, run.token),
        "finish": lambda: store.finish(JOB, run.slot, run.token, "success"),
        "purge": lambda: store.purge(JOB),
        "forced purge": lambda: store.purge(JOB, force=True),
    }


def assert_only_that_job_suffers(store: RedisStore, run: Run, what: object) -> int:
    """Each operation answers, or says that this job's records are at fault. How many did the latter."""
    caught: list[str] = []
    for name, operation in every_operation(store, run).items():
        try:
            operation()
        except StoreError as error:
            caught.append(f"{name}: {error}")
            if error.job != JOB or error.transient or len(str(error)) > 700:
                pytest.fail(f"{what}: {name} said {error} of {error.job}, transient: {error.transient}")
    return len(caught)


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.5, 1e300, -1e300, 10**18, -(10**18), 2**53, 2**63, "", "x", "running", "success",
    "NaN", [], [1], {}, {"a": 1}, "é" * 100_000, "\0", "\x1b[2J", 253402300800000, -62135596800001, 1e15,
)  # fmt: skip
TEXTS = (
    b"", b"{", b"{}", b"null", b"5", b'"x"', b"[]", b"[" * 50_000, b'{"slot":' * 3_000, b"\xff\xfe", b"\0", b"NaN",
    b'{"slot":NaN}', b"x" * 1_000_000, b"-1", b"1e5", b" ", b"1,2", b"nan", b"0x10", b"9" * 400,
)  # fmt: skip


def test_a_malformed_record_stops_only_its_own_job(server: RedisServer, store: RedisStore) -> None:
    """Each field of a record with each wrong value, missing, or with rubbish for the whole record."""
    slot = due(store)
    fine = win(store, slot, "fine")
    run = win(store, slot, lease=0.001)
    raw = server.client(decode_responses=False)
    key, field = KEYS.runs(JOB), str(to_ms(slot))
    sound: dict[bytes, bytes] = raw.hgetall(key)
    record = json.loads(sound[field.encode()])

    mutants: list[bytes] = list(TEXTS)
    for name in record:
        mutants += [json.dumps({**record, name: value}).encode() for value in VALUES]
        mutants.append(json.dumps({other: value for other, value in record.items() if other != name}).encode())
    complaints = 0
    for mutant in mutants:
        raw.delete(key, KEYS.slots(JOB))
        raw.hset(key, mapping={**sound, field.encode(): mutant})
        raw.zadd(KEYS.slots(JOB), {field: to_ms(slot)})
        complaints += assert_only_that_job_suffers(store, run, mutant[:200]) > 0
        assert claim(store, slot).outcome == "superseded", "a forced purge mends the job, and the slot stays purged"
        assert store.heartbeat("fine", slot, fine.token, 30)
        assert store.unfinished(["fine"])[0].token == fine.token
    assert complaints > len(mutants) * 0.7


def test_a_malformed_job_stops_only_itself(server: RedisServer, store: RedisStore) -> None:
    """Each of the job's own fields, a checkpoint and a log of attempts with rubbish in it; a field more or less."""
    slot = due(store)
    win(store, slot, "fine")
    run = win(store, slot)
    store.heartbeat(JOB, slot, run.token, 30, "1")
    store.release(JOB, slot, run.token)
    run = win(store, slot, takeover_of=1, lease=0.001)
    raw = server.client(decode_responses=False)
    key, field = KEYS.runs(JOB), str(to_ms(slot))
    sound: dict[bytes, bytes] = raw.hgetall(key)
    assert set(sound) == {
        b"version", b"fence", b"count", b"running", field.encode(), f"{field}:past".encode(),
        f"{field}:checkpoint".encode(),
    }  # fmt: skip
    for name in sorted(sound):
        for mutant in (*TEXTS, None):
            raw.delete(key, KEYS.slots(JOB))
            raw.hset(key, mapping={**sound, name: mutant or b""})
            if mutant is None:
                raw.hdel(key, name)
            raw.zadd(KEYS.slots(JOB), {field: to_ms(slot)})
            assert_only_that_job_suffers(store, run, (name, mutant and mutant[:100]))
            if name != b"version":  # else it may be a newer layout
                assert claim(store, due(store)).outcome in ("won", "superseded"), "a forced purge mends the job"
            assert [found.job for found in store.unfinished(["fine"])] == ["fine"]


def test_an_index_with_rubbish_stops_only_its_own_job(server: RedisServer, store: RedisStore) -> None:
    """Entries of the sorted set that are no slots, or slots without a run."""
    slot = due(store)
    win(store, slot, "fine")
    raw = server.client(decode_responses=False)
    for member in (b"", b"x", b"1e3", b"999999999999999999", b"\xff", str(to_ms(slot) - 500_000).encode()):
        for score in (0, to_ms(slot) - 400_000, to_ms(slot), float("inf"), float("-inf")):
            raw.delete(KEYS.runs(JOB), KEYS.slots(JOB))
            run = win(store, slot, lease=0.001)
            raw.zadd(KEYS.slots(JOB), {member: score})
            assert_only_that_job_suffers(store, run, (member, score))
            assert claim(store, slot, "fine").outcome == "running"


CHECKPOINTS = (
    b'"\\ud800"', b'"\\\\ud800\\""', b'"\\u00e9\\/\\b\\f\\n\\r\\t"', b'"\\q"', b'"\\u12"', b'"\t"', b'"a\nb"',
    b'"\x7f"', b" [1 , 2] ",
    b"[1,]", b"[,1]", b"{1:2}", b'{"a":1,}', b'{"a" 1}', b"01", b"-0", b"-01", b"1.", b".5", b"1.5e+3", b"1e", b"+1",
    b"0x10", b"nan", b"inf", b"tru", b"nulll", b"true false", b"\xc3\xa9", '"é💥"'.encode(), b'"\xc3"',
    b'"\xed\xa0\x80"',
    b'"\xf4\x90\x80\x80"', b'"\xc0\x80"', b"[" * 300 + b"]" * 300, b"\x0b1", b"1\x0c", b'"\x00"', b"1\x00",
    b"'a'", b"[1]]",
    b'{"a":[{"b":null}],"c":-1.25E-7}', b'"[1"', b'"\\\\"', b'"\\"', b"12345678901234567890123", b"1" * 5000,
)  # fmt: skip


def test_what_can_not_be_read_is_not_taken_over(server: RedisServer, store: RedisStore) -> None:
    """Each field of a dead run that the winner would be given: either it is won and read, or nothing has changed.

    Otherwise each try would use up an attempt. A checkpoint that Python takes for JSON stops no takeover.
    """
    slot, chance = due(store), random.Random(2)
    run = win(store, slot)
    store.heartbeat(JOB, slot, run.token, 30, "1")
    store.release(JOB, slot, run.token)
    run = win(store, slot, takeover_of=1, lease=0.001)
    wait_until(lambda: store.now() > run.lease_end, "the lease to run out")
    raw = server.client(decode_responses=False)
    key, field = KEYS.runs(JOB), str(to_ms(slot)).encode()
    sound: dict[bytes, bytes] = raw.hgetall(key)
    texts = [*CHECKPOINTS, *TEXTS]
    for _ in range(300):
        text = bytearray(chance.choice([text for text in CHECKPOINTS if len(text) < 99]))
        text[chance.randrange(len(text))] = chance.choice(b'"\\[]{},:0123456789eE+-.truefalsn u\x01\xff')
        texts.append(bytes(text))
    cases = [(field + b":checkpoint", text) for text in texts]
    cases += [(field + b":past", text) for text in (*TEXTS, *(sound[field + b":past"].replace(*pair) for pair in (
        (b"1,", b"1.5,"), (b"1,", b"0x1,"), (b"1,", b"0,"), (b'"runner"', b'"\xff"'), (b"handed-over", b"\xff"),
        (b"]", b",1]"), (b"runner", b"\\ud800"),
    )))]  # fmt: skip
    for name in (b"token", b"runner"):
        bad = re.sub(b'"%s":"[^"]*"' % name, b'"%s":"\xff"' % name, sound[field])
        cases.append((field, bad))
    cases.append((field, sound[field].replace(b'"lease":1,', b'"lease":9007199254740992,')))
    won = 0
    for name, text in cases:
        raw.delete(key)
        raw.hset(key, mapping={**sound, name: text})
        before = raw.hgetall(key)
        readable = name.endswith(b":checkpoint") and python_reads(text)
        try:
            answer = claim(store, slot, takeover_of=2)
        except StoreError as error:
            if raw.hgetall(key) != before or readable or error.job != JOB or error.transient:
                pytest.fail(f"{name!r} of {text!r:.200}: {error}")
        else:
            assert answer.outcome == "won", (name, text)
            won += 1
            assert store.get(JOB, slot) == answer.run
    assert 50 < won < len(cases) - 50


def python_reads(text: bytes) -> bool:
    """Whether a checkpoint like that could have been stored."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text.decode(), parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


TYPES: dict[str, tuple[Any, ...]] = {
    "string": ("SET", "mine"), "list": ("RPUSH", "mine"), "set": ("SADD", "mine"), "stream": ("XADD", "*", "a", "mine"),
    "hash": ("HSET", "a", "mine"), "zset": ("ZADD", "1", "mine"),
}  # fmt: skip


@pytest.mark.parametrize(("which", "kind"), [
    (which, kind) for which, right in (("runs", "hash"), ("slots", "zset")) for kind in TYPES if kind != right
])  # fmt: skip
def test_another_type_of_value_stops_only_its_own_job(
    server: RedisServer, store: RedisStore, which: str, kind: str
) -> None:
    """Somebody wrote to one of the job's keys: the error names the job, also when several are asked about at once, and
    the key, or both if the script uses both.

    Nothing is written; with the key removed all is well again.
    """
    slot = due(store)
    win(store, slot, "fine")
    run = win(store, slot)
    store.finish(JOB, slot, run.token, "success")
    key = getattr(KEYS, which)(JOB)
    server.client().delete(key)
    server.client().execute_command(TYPES[kind][0], key, *TYPES[kind][1:])
    written = server.client().dump(key)
    records = server.client().hgetall(KEYS.runs(JOB)) if which == "slots" else {}
    use_both = ("claim", "takeover", "new claim", "allowed claim", "runs", "purge", "forced purge")
    refused = (*use_both, "heartbeat", "get", "release", "finish", "unfinished")
    for name in ("new claim", "runs", "purge") if which == "slots" else refused:
        with pytest.raises(StoreError, match="another type of value") as caught:
            every_operation(store, run)[name]()
        assert (caught.value.job, caught.value.transient) == (JOB, False)
        named = f"one of the keys {KEYS.runs(JOB)}, {KEYS.slots(JOB)} of" if name in use_both else f"the key {key} "
        assert named in str(caught.value), name
    assert server.client().dump(key) == written
    assert claim(store, slot, "fine").outcome == "running"
    if which == "slots":
        assert server.client().hgetall(KEYS.runs(JOB)) == records
        assert store.purge(JOB, force=True) == 1
        assert claim(store, slot).outcome == "superseded"
    server.client().delete(KEYS.runs(JOB), KEYS.slots(JOB))
    win(store, slot + timedelta(milliseconds=1))


def test_a_key_of_the_namespace_with_another_type_of_value_stops_the_namespace(
    server: RedisServer, store: RedisStore
) -> None:
    """The epoch or the set of jobs: nothing is written, the error names the key and no job."""
    slot = due(store)
    for key, value in (
        (KEYS.epoch, None),
        (KEYS.jobs, "rubbish"),
        *((KEYS.epoch, text) for text in ("", "x", "1-", "-a", "9" * 45_000 + "-a", "9" * 16 + "-a", "1-" + "a" * 99)),
    ):
        server.client().flushall()
        if value is None:
            server.client().hset(key, "a", "b")
        else:
            server.client().set(key, value)
        before = server.contents()
        calls: list[Callable[[], Any]] = [lambda: claim(store, slot), store.jobs if key == KEYS.jobs else store.ping]
        for call in calls:
            with pytest.raises(StoreError, match=re.escape(key)) as caught:
                call()
            assert (caught.value.job, caught.value.transient) == (None, False)
        assert server.contents() == before


def test_a_newer_layout_is_left_alone_and_named(server: RedisServer, store: RedisStore) -> None:
    """What a later leaselib wrote is neither guessed at nor purged."""
    slot = due(store)
    run = win(store, slot)
    server.client().hset(KEYS.runs(JOB), "version", "2")
    before = server.contents()
    for operation in every_operation(store, run).values():
        with pytest.raises(StoreError, match=r"layout version 2.*upgrade leaselib") as caught:
            operation()
        assert caught.value.job == JOB
    assert server.contents() == before


def test_an_evicted_index_is_noticed_and_a_forced_purge_mends_the_job(server: RedisServer, store: RedisStore) -> None:
    """A server that evicts keys may drop one of a job's two: no run is started without it."""
    slot = due(store)
    store.finish(JOB, slot, win(store, slot).token, "success")
    die(store, slot + timedelta(milliseconds=1))
    server.client().delete(KEYS.slots(JOB))
    with pytest.raises(StoreError, match=r"lost entries .*evict") as caught:
        claim(store, slot + timedelta(milliseconds=2))
    assert caught.value.job == JOB
    assert store.purge(JOB, force=True) == 2
    assert claim(store, slot).outcome == "superseded"
    assert win(store, slot + timedelta(milliseconds=2)).attempt == 1


def test_10000_random_mutations_never_raise_anything_but_a_store_error() -> None:
    """Reading alone, without a server: bytes of a sound record flipped, cut, doubled."""
    chance = random.Random(1)
    sound = (
        b'{"slot":1796200000000,"status":"running","attempt":2,"handovers":1,"token":"t","runner":"r","fence":7,"lease":'
        b'30000,"lease_end":1796200030000,"released":false,"reason":"hand-over","started":1796200000000,"ended":null,'
        b'"error":null}'
    )
    past = b'[1,"r",1796200000000,1796200000000,"handed-over"]'
    assert read_record(JOB, sound, b"{}", past).attempt == 2
    read = refused = 0
    for _ in range(10_000):
        parts = [bytearray(sound), bytearray(b'{"a":1}'), bytearray(past)]
        for part in chance.sample(parts, chance.randint(1, 3)):
            at = chance.randrange(len(part))
            how = chance.randrange(4)
            if how == 0:
                part[at] = chance.randrange(256)
            elif how == 1:
                del part[at:]
            elif how == 2:
                del part[at : at + chance.randint(1, 9)]
            else:
                part[at:at] = part[: chance.randint(1, 30)]
        try:
            record = read_record(JOB, *(bytes(part) for part in parts))
            record.to_run()
            read += 1
        except ValueError:
            refused += 1
    assert read
    assert refused > 5_000


# ---- scripts that fail half way --------------------------------------------------------------------------------------


def failing_after(name: str, number: int) -> Script:
    """That script, made to fail right after its number-th command."""
    text = script(name).text.decode()
    guard = (
        f"local commands_left = {number}\n"
        "local function guarded(...)\n"
        "  local reply = redis.call(...)\n"
        "  commands_left = commands_left - 1\n"
        "  if commands_left == 0 then error('injected failure') end\n"
        "  return reply\n"
        "end\n"
    )
    text = guard + text.replace("redis.call(", "guarded(")
    return Script(name, text.encode(), hashlib.sha1(text.encode()).hexdigest())


def history(store: RedisStore, slot: datetime) -> None:
    """Five ended runs that may be trimmed, and one that died."""
    for number in range(5):
        old = slot - timedelta(seconds=300 - number)
        run = win(store, old, max_late=1000.0)
        store.finish(JOB, old, run.token, "success")
    die(store, slot - timedelta(seconds=200), max_late=1000.0)


def die(store: RedisStore, slot: datetime, **options: Any) -> None:
    """A run whose lease has run out."""
    run = win(store, slot, lease=0.001, **options)
    wait_until(lambda: store.now() > run.lease_end, "the lease to run out")


SCENARIOS: dict[str, tuple[str, Callable[[RedisStore, datetime], Callable[[], Any]], Any]] = {
    "first claim ever": ("claim", lambda store, slot: lambda: claim(store, slot, token="t").outcome, "won"),
    "claim that trims and interrupts": (
        "claim",
        lambda store, slot: (
            history(store, slot),
            lambda: claim(store, slot, token="t", history_size=1, max_late=0.0, keep=0.0).outcome,
        )[1],
        "won",
    ),
    "takeover": (
        "claim",
        lambda store, slot: (
            store.release(JOB, slot, win(store, slot).token, "1"),
            lambda: claim(store, slot, token="t", takeover_of=1).outcome,
        )[1],
        "won",
    ),
    "claim that marks interrupted": (
        "claim",
        lambda store, slot: (
            die(store, slot),
            lambda: claim(store, slot, token="t", takeover_of=1, max_attempts=1).outcome in ("interrupted", "finished"),
        )[1],
        True,
    ),
    "heartbeat": (
        "heartbeat",
        lambda store, slot: (win(store, slot, token="t"), lambda: store.heartbeat(JOB, slot, "t", 30, "7"))[1],
        True,
    ),
    "finish": (
        "finish",
        lambda store, slot: (win(store, slot, token="t"), lambda: store.finish(JOB, slot, "t", "failed", "why"))[1],
        True,
    ),
    "release": (
        "release",
        lambda store, slot: (win(store, slot, token="t"), lambda: store.release(JOB, slot, "t", "7"))[1],
        True,
    ),
    "purge": ("purge", lambda store, slot: (history(store, slot), lambda: store.purge(JOB) < 6)[1], True),
    "forced purge": (
        "purge",
        lambda store, slot: (history(store, slot), lambda: store.purge(JOB, force=True) < 7)[1],
        True,
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_script_that_fails_after_any_of_its_commands_leaves_sound_records(
    server: RedisServer, store: RedisStore, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts are not rolled back. Whatever got done, every record reads well, and the call sent again settles it."""
    name, prepare, expected = SCENARIOS[scenario]
    slot = due(store)
    for number in itertools.count(1):
        server.client().flushall()
        call = prepare(store, slot)
        with monkeypatch.context() as patched:
            patched.setattr(_redis, "script", lambda asked, number=number: (
                failing_after(asked, number) if asked == name else script(asked)
            ))  # fmt: skip
            store._sent.discard(name)
            try:
                assert call() == expected
                failed = False
            except StoreError as error:
                failed = "injected failure" in str(error)
                if not failed:
                    raise
        runs = store.runs(JOB)
        assert [run.slot for run in runs] == sorted({run.slot for run in runs}, reverse=True)
        live = [run for run in store.unfinished([JOB]) if run.lease_end > store.now() and not run.released]
        assert len(live) <= 1
        if not failed:
            assert number > 2, "the script runs more than two commands"
            break
        store._sent.discard(name)
        assert call() == expected, (scenario, number)
        assert store.runs(JOB) is not None
        later = claim(store, slot + timedelta(milliseconds=1), overlap="allow")
        assert later.outcome == "won", (scenario, number, later)
        assert JOB in store.jobs()
