"""The errors that leaselib raises. Owns no state; any thread may raise them.

Every message says what was found, what was expected, and what to do.
"""

from __future__ import annotations


class LeaselibError(Exception):
    """Base of every error that leaselib raises."""


class ConfigurationError(LeaselibError, ValueError):
    """Something that the caller wrote can't work; the message says what to write instead.

    Raised when a scheduler is made, when a job is registered and when a store is opened, and by calls that are given
    something they can't take (run_now, ctx.checkpoint, ctx.confirm, ctx.finish); never by an instance that runs.
    """


class StoreError(LeaselibError):
    """The store could not carry out an operation. The driver's own error is the cause.

    Attributes:
        transient: True if trying again, without a restart and without anybody's help, may succeed (connection lost,
            file locked, disk full, server restarting). False if somebody has to mend something first: the message
            says what.
        job: the job's name if only this job's records are at fault or (transient) can't be reached for now, being
            locked by another transaction or on a node that is away; None if it is about the store as a whole.
        unreplicated: True if the operation was carried out, but fewer replicas than `wait_replicas` had it in time: it
            may be lost at a failover.
    """

    def __init__(
        self, message: str, *, transient: bool = False, job: str | None = None, unreplicated: bool = False
    ) -> None:
        super().__init__(message)
        self.transient = transient
        self.job = job
        self.unreplicated = unreplicated


class Aborted(LeaselibError):
    """This attempt should stop: it lost its run, its scheduler is stopping, or it ran for too long.

    Raised by `ctx.check()` and `ctx.sleep()`. Let it pass through the handler.

    Attributes:
        reason: `stopping`, `refused`, `unreachable` or `timeout`, as `ctx.abort_reason`.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
