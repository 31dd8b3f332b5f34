"""The rights that a RedisStore needs on a server with access lists, and no more. Owns nothing; imports no driver."""

from __future__ import annotations

ACL_KEYS = "leaselib:*"
"""Every key of every namespace is one of these."""
ACL_SENT = ("evalsha", "eval", "select", "wait", "asking", "cluster|slots")
"""What is sent as such: select only for a database other than 0, wait only for wait_replicas, asking and cluster|slots
only to a Redis Cluster."""
ACL_COMMANDS = (
    *ACL_SENT,
    # what the scripts run; a cluster's nodes are also asked for their time as such
    "time", "get", "set", "hget", "hmget", "hset", "hdel", "hkeys", "hexists", "zadd", "zrem", "zcard",
    "zrangebyscore", "zrevrangebyscore", "sadd", "sismember", "smembers", "del",
)  # fmt: skip
"""Every command that leaselib uses, in the form that ACL SETUSER takes."""


def acl_setuser(user: str = "leaselib", password: str = "<password>") -> str:  # noqa: S107  a placeholder
    """The ACL SETUSER command for a user that can do what leaselib needs on its own keys, and nothing else."""
    commands = " ".join(f"+{command}" for command in ACL_COMMANDS)
    return f"ACL SETUSER {user} on >{password} resetkeys ~{ACL_KEYS} resetchannels -@all {commands}"
