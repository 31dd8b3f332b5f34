"""What the demo's processes agree on: its jobs, its options, the messages that instances send. Owns nothing."""

from __future__ import annotations

RUNNERS = ("app-1", "app-2", "app-3")
LEASE_S = 3.0
HEARTBEAT_S = 0.5
TAKEOVER_BOUND_S = LEASE_S + 2 * HEARTBEAT_S
"""From a dead runner's last heartbeat to the next attempt, at most."""
HANDOVER_BOUND_S = 2 * HEARTBEAT_S
"""From a stopping runner's release to the next attempt, at most."""
ALLOWANCE_S = 0.5
"""What a busy machine may add to a bound before the demo calls it broken: claims and wake-ups take time themselves."""

TICK = "tick"
TICK_S = 1
REPORT = "report"
STEPS = 12
STEP_S = 0.6
KILL_AFTER_STEP, STOP_AFTER_STEP = 4, 8
INTO_STEP_S = 0.3
"""So long into the next step the signals are sent: in the middle of the work, and some time after a heartbeat."""
REPORT_DELAY_S = 1.2
"""So long after all instances are up the report is due."""
LIMIT_S = 26.0
"""By then the demo has happened or not; ending the processes takes another second or two at most."""

PULSE_S = 0.25
"""So often an instance tells how many runs it watches."""

# The lines that an instance writes: {"is": "up" | "event" | "step" | "pulse", ...}; those that it reads:
# {"do": "report", "slot_ms": ...} and {"do": "stop"}.
