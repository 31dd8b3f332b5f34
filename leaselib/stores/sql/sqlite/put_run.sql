-- Writes a whole run, over an earlier state of it. Arguments: job id, then the columns in this order.
INSERT OR REPLACE INTO leaselib_runs (
    job_id, slot_ms, status, attempt, handovers, token, runner, fence, lease_ms, lease_end_ms, released, reason, started_ms,
    ended_ms, error, checkpoint, past
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
