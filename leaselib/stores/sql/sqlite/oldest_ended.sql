-- A job's oldest ended slots before an instant. Arguments: job id, that instant in ms, how many at most.
SELECT slot_ms FROM leaselib_runs WHERE job_id = ? AND slot_ms < ? AND status <> 'running' ORDER BY slot_ms LIMIT ?
