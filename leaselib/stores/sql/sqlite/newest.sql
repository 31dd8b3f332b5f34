-- A job's latest runs, newest slot first. Arguments: job id, how many at most.
SELECT
    slot_ms, status, attempt, handovers, token, runner, fence, lease_ms, lease_end_ms, released, reason, started_ms,
    ended_ms, error, checkpoint, past
FROM leaselib_runs WHERE job_id = ? ORDER BY slot_ms DESC LIMIT ?
