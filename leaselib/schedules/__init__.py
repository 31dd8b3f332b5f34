"""When jobs are due: intervals and cron expressions.

Owns nothing; schedules are immutable values, so any thread may use them without a lock.
"""

from __future__ import annotations

from leaselib.schedules._base import Schedule
from leaselib.schedules._cron import Cron
from leaselib.schedules._every import Every

__all__ = ["Cron", "Every", "Schedule"]
