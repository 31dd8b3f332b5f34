-- A job's slots, oldest first. Arguments: job id, 1 for ended runs only or 0 for all.
SELECT slot_ms FROM leaselib_runs WHERE job_id = ? AND (status <> 'running' OR NOT ?) ORDER BY slot_ms
