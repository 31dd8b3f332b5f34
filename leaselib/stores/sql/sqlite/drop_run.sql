-- Removes a run. Arguments: job id, slot_ms.
DELETE FROM leaselib_runs WHERE job_id = ? AND slot_ms = ?
