-- A job's runs that have not ended, in any order. Argument: job id. Left alone, the planner might walk through the
-- whole history.
SELECT
    slot_ms, status, attempt, handovers, token, runner, fence, lease_ms, lease_end_ms, released, reason, started_ms,
    ended_ms, error, checkpoint, past
FROM leaselib_runs INDEXED BY leaselib_runs_running
WHERE job_id = ? AND status = 'running'
