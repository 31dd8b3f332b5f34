"""RedisStore: the lease rules as Lua scripts on a Redis or Valkey server, one script and one round trip an operation.

Owns the route to the servers (and through it the connections), and what it has seen of the namespace's epoch, of the
set of jobs and of replicas that were too few. Any thread may call it; one lock guards what it has seen, and the route
and its pools have locks of their own. Nothing of the driver is imported before a store is made.

In a cluster trouble with one node is trouble of its jobs: it is reported with the job's name, and the rest goes on.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from leaselib import _clock, _random
from leaselib._link import Epochs
from leaselib._model import ClaimAnswer, ClaimRequest, Outcome, Pong, Record, check_epoch, cut_error, from_ms
from leaselib.errors import ConfigurationError, StoreError
from leaselib.stores import _redis_url
from leaselib.stores._base import DEFAULT_TIMEOUT_S, GivenBackError, Store
from leaselib.stores._redis_codec import Keys, read_record, script

if TYPE_CHECKING:
    from leaselib.stores._redis_net import Command, Deadline
    from leaselib.stores._redis_routes import Route

_log = logging.getLogger("leaselib.store")
MAX_CONNECTIONS = 64
"""So many connections to one server at most, in one process: a quarter for claims and reads, the rest for heartbeats,
finishes and releases, which so never queue behind claims. Each is opened when it is first needed."""
WAIT_TIMEOUT_S = 1.0
"""How long a claim or a finish waits for replicas, if the caller doesn't say."""
REGISTER_PAUSE_S = 30.0
"""Cluster mode: after the set of jobs was out of reach, wins leave it alone for so long."""
REGISTER_AGAIN_S = 60.0
"""Cluster mode: a job is added to the set of jobs again after so long, as that set's node may have lost its data."""
NOT_STARTED = "not started: too few replicas had the claim"
_KINDS = ([b"ok"], [b"malformed"], [b"broken"])
"""How a script's answer goes on after the call's number; see common.lua."""

_inherited: list[Any] = []
"""In a forked child: what the parent had open. Kept, so that it is never closed from here."""


class RedisStore(Store):
    """Keeps runs on a Redis (6.2 or newer) or Valkey server, alone, behind Sentinel, or in a cluster.

    Its clock is the server's; in a cluster each job's is that of the node that holds it. It sets no TTL on its keys.
    In a cluster the first claim or ping of a process needs the node with the namespace's epoch; after that each job
    needs only its own node.
    Connections are opened when they are needed; none is used by two calls at once, or shared across a fork.

    Args:
        url: `redis://host:port/db`, `rediss://` for TLS, `unix:///path`, `redis+sentinel://host:port,host:port/master`
            or `redis+cluster://host:port,host:port`; `valkey` may stand for `redis`.
        namespace: wins over the URL's `?namespace=`; `default` if neither is given.
        wait_replicas: a win is acted on, and a finish reported, only once so many replicas have it.
        wait_timeout: how long to wait for them; seconds or a timedelta.
        max_connections: so many to each server at most; at least 2.

    Raises:
        ConfigurationError: the URL or an argument can't work, or the driver is missing.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        namespace: str | None = None,
        *,
        wait_replicas: int | None = None,
        wait_timeout: float | timedelta | None = None,
        max_connections: int | None = None,
    ) -> None:
        target = _redis_url.parse(url)
        given = target.parameters

        def option(name: str, argument: object, default: object) -> object:
            return given.get(name, default) if argument is None else argument

        super().__init__(given.get("namespace", "default") if namespace is None else namespace)
        self.wait_replicas = _redis_url.whole_number("wait_replicas", option("wait_replicas", wait_replicas, 0), 0)
        self.wait_timeout = _redis_url.seconds("wait_timeout", option("wait_timeout", wait_timeout, WAIT_TIMEOUT_S))
        self._max_connections = _redis_url.whole_number(
            "max_connections", option("max_connections", max_connections, MAX_CONNECTIONS), 2
        )
        self._target = target
        self._keys = Keys(self.namespace)
        self._cluster = target.kind == "cluster"
        self._start_afresh()

    @classmethod
    def from_url(cls, url: str) -> RedisStore:
        """The store that a URL names, with all that its query says.

        Raises:
            ConfigurationError: the URL can't work, or the driver is missing.
        """
        return cls(url)

    def __repr__(self) -> str:
        return f"RedisStore({self._target.shown!r}, namespace={self.namespace!r})"

    # ---- life ----------------------------------------------------------------------------------------------------

    def _start_afresh(self) -> None:
        """Connections, locks and memories of this process alone. Touches no network."""
        try:
            from leaselib.stores import _redis_routes
        except ImportError as error:
            raise ConfigurationError(
                f"a RedisStore needs the redis package, which can't be imported ({error}); "
                f"install it with: pip install 'leaselib[redis]'"
            ) from error
        sentinel = {
            "username": self._target.parameters.get("sentinel_username"),
            "password": self._target.parameters.get("sentinel_password"),
        }
        self._route: Route = _redis_routes.route_to(self._target, sentinel, self._max_connections)
        self._calls = itertools.count(1)
        self._sent: set[str] = set()  # scripts whose text was sent; adding to a set is safe from any thread
        self._lock = threading.Lock()
        self._short: set[str | None] = set()  # where replicas were too few the last time: see _place
        self._epochs = Epochs()  # as claims and pings met them
        # Cluster mode: the boot times before which a job isn't added to the set of jobs again, and before which that
        # set isn't tried at all.
        self._registered: dict[str, int] = {}
        self._register_at_ns = 0
        self._pid = os.getpid()

    def close(self) -> None:
        """Lets connections go. Idempotent; a later call of any operation opens new ones."""
        self._check_process()
        self._route.close()

    def _after_fork(self) -> None:
        _inherited.append(self._route)
        self._start_afresh()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:  # forked in a way that ran no hook
            self._after_fork()

    # ---- one call ------------------------------------------------------------------------------------------------

    def _call(
        self,
        name: str,
        keys: list[str],
        arguments: tuple[object, ...],
        deadline: Deadline,
        *,
        job: str | None = None,
        jobs: Sequence[str] = (),
        urgent: bool = False,
        wait_if: Callable[[Any], bool] | None = None,
    ) -> tuple[list[Any], str]:
        """Runs a script within the deadline. Returns what follows its "ok", and whether replicas lack it, in words.

        `job` is whose records the keys are; `jobs` those of several keys, if the script says which one is at fault.
        `wait_if` looks at the first value of the answer: whether to wait for replicas. Where they were too few the last
        time, a script that is told to "probe" writes whatever it answers, so that WAIT has something to speak of.

        Raises:
            StoreError: whatever went wrong; the outcome is unknown if it is transient.
        """
        import redis

        from leaselib.stores._redis_errors import code, to_store_error

        lua, call = script(name), f"{next(self._calls):x}"
        rest = (len(keys), *keys, call, *arguments)
        by_digest, by_text = ("EVALSHA", lua.sha, *rest), ("EVAL", lua.text, *rest)
        try:
            # The text goes out once in a process's life, and again whenever the server says that it hasn't got it.
            first = by_digest if name in self._sent else by_text
            wait = _Wait(self.wait_replicas, self.wait_timeout, wait_if, deadline)
            replies = self._route.exchange(keys[0], first, deadline, urgent=urgent, follow=wait)
            if isinstance(replies[0], redis.ResponseError) and code(replies[0]) == "NOSCRIPT":
                replies = self._route.exchange(keys[0], by_text, deadline, urgent=urgent, follow=wait)
            self._sent.add(name)
            for reply in replies:
                if isinstance(reply, redis.ResponseError):
                    raise reply
            answer = replies[0]
            if not (isinstance(answer, list) and answer[:1] == [call.encode()] and answer[1:2] in _KINDS):
                self._route.close()  # the connection that brought it must not be used again
                raise redis.InvalidResponse(f"an answer to another call: expected {call}, found {answer!r:.60}")
            if len(replies) > 1 and not isinstance(replies[1], int):
                self._route.close()
                raise redis.InvalidResponse(f"it said {replies[1]!r:.60} to WAIT, expected a number of replicas")
        except (redis.RedisError, OSError, UnicodeError) as error:
            raise self._blame(to_store_error(error, self._target.shown, job, keys[:2]), job) from error
        except StoreError as error:
            raise self._blame(error, job) from error.__cause__
        if answer[1] == b"ok":
            shortage = wait.shortage(replies)
            if len(replies) > 1:
                with self._lock:
                    (self._short.add if shortage else self._short.discard)(self._place(job))
            return answer[2:], shortage
        what, at_fault = answer[2].decode("utf-8", "replace"), jobs[answer[3] - 1] if jobs else None
        if answer[1] == b"malformed":
            raise _malformed(at_fault or job or "", what)
        raise _BrokenKeyError(f"{self._target.shown}: {what}; remove it, and see who wrote it", job=at_fault)

    def _blame(self, error: StoreError, job: str | None) -> StoreError:
        """In a cluster trouble with one node is that of its jobs, as long as others are well. It may be over without
        anybody's help, whatever it is: the hash slot may move to a node that is well.
        """
        if job is None or error.job is not None or not self._cluster or not self._route.partly_well():
            return error
        return StoreError(str(error), transient=True, job=job, unreplicated=error.unreplicated)

    def _too_few(self, what: str, shortage: str) -> str:
        return f"{self._target.shown}: {what}, but {shortage}"

    def _place(self, job: str | None) -> str | None:
        """Where too few replicas are everybody's trouble: on a server of its own, None. In a cluster each job's."""
        return job if self._cluster else None

    def _probing(self, job: str | None) -> bool:
        with self._lock:
            return self._place(job) in self._short

    def _deadline(self, timeout: float) -> Deadline:
        from leaselib.stores._redis_net import Deadline

        self._check_process()
        return Deadline(timeout)

    # ---- the operations ------------------------------------------------------------------------------------------

    def _claim(self, request: ClaimRequest, timeout: float) -> ClaimAnswer:
        deadline, job = self._deadline(timeout), request.job
        probing = self._cluster and self._probing(job)  # else pings do
        keys = [self._keys.runs(job), self._keys.slots(job)]
        if self._cluster:
            self._learn_epoch(deadline)
        else:
            keys += [self._keys.jobs, self._keys.epoch]
        arguments = (
            job, request.slot_ms, request.token, request.runner, request.lease_ms, request.max_attempts,
            request.overlap, request.max_late_ms, request.keep_ms, request.history_size, request.reason,
            "" if request.takeover_of is None else request.takeover_of, _random.SYSTEM.token(), int(probing),
        )  # fmt: skip
        answer, shortage = self._call(
            "claim", keys, arguments, deadline, job=job, wait_if=lambda how: probing or how == b"won"
        )
        waited = not self.wait_replicas or probing or answer[0] == b"won"
        result = self._claim_answer(request, answer, replicated=waited and not shortage)
        whose, epoch = Epochs.told_by(job, result)
        if whose is not None or not self._cluster:  # else it is what this store remembers itself
            with self._lock:
                self._epochs.heard(whose, epoch, result.now_ms)
        if shortage and result.outcome == "won" and result.record is not None:
            what = self._give_back(request, result.record, deadline)
            raise GivenBackError(self._too_few(what, shortage), self._place(job), result.interrupted)
        if self._cluster and result.outcome == "won":
            self._register(job, deadline)
        return result

    def _claim_answer(self, request: ClaimRequest, answer: list[Any], *, replicated: bool) -> ClaimAnswer:
        outcome, now, epoch, wait, record, checkpoint, past, interrupted = answer
        try:
            kept = None if record is None else read_record(request.job, record, checkpoint, past)
        except ValueError as error:
            raise _malformed(request.job, str(error)) from error
        known: Outcome = outcome.decode()
        return ClaimAnswer(
            outcome=known,
            token=request.token,
            now_ms=int(now),
            epoch=self._known_epoch() if self._cluster else epoch.decode(),
            record=kept,
            wait_ms=int(wait),
            interrupted=tuple(int(slot) for slot in interrupted),
            replicated=replicated,
            job_epoch=epoch.decode() if self._cluster and epoch else None,  # one that never started has none
        )

    def _give_back(self, request: ClaimRequest, won: Record, deadline: Deadline) -> str:
        """A win that too few replicas have isn't acted on. Returns what became of it, in words.

        It is released, so that it may be claimed again later; but ended if nobody may run it, as the data were lost
        after its slot, or if it was claimed by hand, as its caller is told of it.
        """
        with self._lock:
            ended = request.reason == "manual" or self._epochs.lost_win(won)
        keys = [self._keys.runs(request.job)]
        name, done = "release", "released again"
        arguments: tuple[object, ...] = (request.slot_ms, request.token, 0, "")
        if ended:
            name, done = "finish", "ended as failed"
            arguments = (request.slot_ms, request.token, "failed", 1, NOT_STARTED)
        try:
            self._call(name, keys, arguments, deadline, job=request.job, urgent=True)
        except StoreError as error:  # its lease runs out, or the same claim, sent again, wins and comes here again
            return f"the claim of {request.job!r} was won and could not be {done} ({error})"
        return f"the claim of {request.job!r} was won and {done}"

    def _heartbeat(
        self, job: str, slot_ms: int, token: str, lease_ms: int, checkpoint: str | None, timeout: float
    ) -> bool:
        arguments = (slot_ms, token, lease_ms, *_optional(checkpoint))
        answer, _ = self._call(
            "heartbeat", [self._keys.runs(job)], arguments, self._deadline(timeout), job=job, urgent=True
        )
        return bool(answer[0])

    def _finish(
        self,
        job: str,
        slot_ms: int,
        token: str,
        status: Literal["success", "failed"],
        error: str | None,
        timeout: float,
    ) -> bool:
        arguments = (slot_ms, token, status, *_optional(None if error is None else cut_error(error)))
        answer, shortage = self._call(
            "finish", [self._keys.runs(job)], arguments, self._deadline(timeout), job=job, urgent=True, wait_if=bool
        )
        if shortage:
            message = self._too_few(f"the end of a run of {job!r} was recorded", shortage)
            raise StoreError(message, transient=True, job=self._place(job), unreplicated=True)
        return bool(answer[0])

    def _release(self, job: str, slot_ms: int, token: str, checkpoint: str | None, timeout: float) -> bool:
        arguments = (slot_ms, token, *_optional(checkpoint))
        answer, _ = self._call(
            "release", [self._keys.runs(job)], arguments, self._deadline(timeout), job=job, urgent=True
        )
        return bool(answer[0])

    def _unfinished(self, jobs: list[str], timeout: float) -> list[Record]:
        deadline = self._deadline(timeout)
        found: list[Record] = []
        for group in [[job] for job in jobs] if self._cluster else [jobs] if jobs else []:
            keys, job = [self._keys.runs(job) for job in group], group[0] if self._cluster else None
            answer, _ = self._call("unfinished", keys, (), deadline, job=job, jobs=group)
            found += [
                self._record(group[number - 1], int(slot), fields) for number, slot, *fields in _rows(answer[0], 5)
            ]
        return sorted(found, key=lambda record: (record.slot_ms, record.job))

    def _get(self, job: str, slot_ms: int, timeout: float) -> Record | None:
        answer, _ = self._call("get", [self._keys.runs(job)], (slot_ms,), self._deadline(timeout), job=job)
        return None if answer[0][0] is None else self._record(job, slot_ms, answer[0])

    def _runs(self, job: str, limit: int, timeout: float) -> list[Record]:
        if limit <= 0:
            return []
        keys = [self._keys.runs(job), self._keys.slots(job)]
        answer, _ = self._call("runs", keys, (limit,), self._deadline(timeout), job=job)
        return [self._record(job, int(slot), fields) for slot, *fields in _rows(answer[0], 4)]

    def _purge(self, job: str, force: bool, timeout: float) -> int:
        keys = [self._keys.runs(job), self._keys.slots(job)]
        answer, _ = self._call("purge", keys, (int(force),), self._deadline(timeout), job=job)
        return int(answer[0])

    def jobs(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> list[str]:
        """See Store."""
        answer, _ = self._call("jobs", [self._keys.jobs], (), self._deadline(timeout))
        return sorted(name.decode("utf-8", "backslashreplace") for name in answer[0])

    def ping(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> Pong:
        """See Store. In a cluster the clock is that of the node that holds the namespace's epoch; if that one can't
        answer and the epoch is known, any other's.
        """
        return self._ping(self._deadline(timeout))

    def _ping(self, deadline: Deadline) -> Pong:
        known, probing = self._known_epoch() if self._cluster else "", self._probing(None)
        arguments = (_random.SYSTEM.token(), int(probing))
        try:
            share = deadline.share(2) if known else deadline
            (now, raw), shortage = self._call(
                "ping", [self._keys.epoch], arguments, share, wait_if=lambda _now: probing
            )
        except _BrokenKeyError:
            raise  # the node answered
        except StoreError as error:
            if not known:
                raise
            return self._ping_any(known, deadline, error)
        if shortage:
            raise StoreError(self._too_few("a ping was answered", shortage), transient=True, unreplicated=True)
        if self._probing(None) and not probing:
            return self._ping(deadline)  # replicas were found too few while this was under way
        epoch = check_epoch(raw.decode())
        with self._lock:
            self._epochs.heard(None, epoch, int(now))
        return Pong(from_ms(int(now)), epoch)

    def _ping_any(self, epoch: str, deadline: Deadline, failure: StoreError) -> Pong:
        """Cluster mode: the time of any node that has it, while the one with the epoch is in trouble."""
        import redis

        from leaselib.stores._redis_routes import ClusterRoute

        try:
            assert isinstance(self._route, ClusterRoute)
            seconds, microseconds = self._route.exchange_anywhere(("TIME",), deadline)
            return Pong(from_ms(int(seconds) * 1000 + int(microseconds) // 1000), epoch)
        except (redis.RedisError, OSError, StoreError, TypeError, ValueError):
            raise failure from None

    def _record(self, job: str, slot_ms: int, fields: list[Any]) -> Record:
        try:
            record = read_record(job, *fields)
            if record.slot_ms != slot_ms:
                raise ValueError("it names another slot")
        except ValueError as error:
            raise _malformed(job, f"the record of slot {slot_ms}: {error}") from error
        return record

    # ---- what a job's own node doesn't know in a cluster ---------------------------------------------------------

    def _known_epoch(self) -> str:
        """Cluster mode: the namespace's epoch as it was last met, empty if it never was."""
        with self._lock:
            return self._epochs.of_store

    def _learn_epoch(self, deadline: Deadline) -> None:
        """Cluster mode: a claim's own node may not know the namespace's epoch. Asked for once in a process's life."""
        if not self._known_epoch():
            self._ping(deadline)

    def _register(self, job: str, deadline: Deadline) -> None:
        """Cluster mode: adds the job to the set of jobs, after a win."""
        now_ns = _clock.SYSTEM.boot_ns()
        with self._lock:
            if now_ns < max(self._registered.get(job, 0), self._register_at_ns):
                return
        try:
            self._call("register", [self._keys.jobs], (job,), deadline.share(4))
        except (StoreError, OSError) as error:  # the win stands; a later one tries again
            _log.warning(
                "the job %r could not be added to the set of jobs, so `leaselib status` may miss it: %s", job, error
            )
            with self._lock:
                self._register_at_ns = _clock.SYSTEM.boot_ns() + int(REGISTER_PAUSE_S * 1e9)
            return
        with self._lock:
            self._registered[job] = now_ns + int(REGISTER_AGAIN_S * 1e9)


class _BrokenKeyError(StoreError):
    """A server answered, but a key of the namespace holds what it can't."""


class _Wait:
    """What follows a script: WAIT, if something was written that replicas must have, and how that ended.

    On the same connection, so that it speaks of this very write. A refusal waits for nobody.
    """

    def __init__(
        self, replicas: int, seconds: float, wanted: Callable[[Any], bool] | None, deadline: Deadline
    ) -> None:
        self._replicas, self._seconds, self._wanted, self._deadline = replicas, seconds, wanted, deadline

    def __call__(self, answer: Any) -> list[Command]:
        if self._wanted is None or not self._replicas or not isinstance(answer, list) or answer[1:2] != [b"ok"]:
            return []
        if not self._wanted(answer[2]):
            return []
        # Leaves time for the answer, and for a release. WAIT takes 0 for ever.
        self._seconds = max(0.001, min(self._seconds, self._deadline.left() * 0.6))
        return [("WAIT", self._replicas, int(self._seconds * 1000))]

    def shortage(self, replies: list[Any]) -> str:
        """How many replicas have it, in words; empty if those are enough, or nothing had to be waited for."""
        if len(replies) == 1 or replies[1] >= self._replicas:
            return ""
        return f"{replies[1]} instead of {self._replicas} replicas had it after {self._seconds:.3g} s"


def _malformed(job: str, what: str) -> StoreError:
    if "layout version" in what:  # not even a forced purge may guess what a newer layout means
        advice = "use the leaselib that wrote them; if nobody did, delete the job's keys by hand"
    else:
        advice = "`leaselib purge --force URL JOB` removes all records of the job"
    return StoreError(
        f"the stored records of the job {job!r} are malformed: {what}. See who wrote them; {advice}", job=job
    )


def _optional(text: str | None) -> tuple[int, str]:
    """How scripts take a text that may be missing."""
    return (0, "") if text is None else (1, text)


def _rows(flat: list[Any], width: int) -> list[list[Any]]:
    return [flat[start : start + width] for start in range(0, len(flat), width)]
