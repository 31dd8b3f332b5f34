-- The highest slot of a job up to an instant. Arguments: job id, that instant in ms.
SELECT slot_ms FROM leaselib_runs WHERE job_id = ? AND slot_ms <= ? ORDER BY slot_ms DESC LIMIT 1
