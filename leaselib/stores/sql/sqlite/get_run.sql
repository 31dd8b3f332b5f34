-- One run. Arguments: job id, slot_ms.
SELECT
    slot_ms, status, attempt, handovers, token, runner, fence, lease_ms, lease_end_ms, released, reason, started_ms,
    ended_ms, error, checkpoint, past
FROM leaselib_runs WHERE job_id = ? AND slot_ms = ?
