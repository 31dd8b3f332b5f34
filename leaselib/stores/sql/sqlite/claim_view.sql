-- What a claim has to know of a job, in one statement: a row for each of its runs that has not ended, or a single row
-- whose run is NULL; no row if the job is new. Before the run come id, fence, floor_ms and ended of the job, and its
-- highest slot up to the horizon. Arguments: horizon in ms, namespace, name.
SELECT
    j.id, j.fence, j.floor_ms, j.ended,
    (SELECT n.slot_ms FROM leaselib_runs AS n WHERE n.job_id = j.id AND n.slot_ms <= ? ORDER BY n.slot_ms DESC LIMIT 1),
    r.slot_ms, r.status, r.attempt, r.handovers, r.token, r.runner, r.fence, r.lease_ms, r.lease_end_ms, r.released,
    r.reason, r.started_ms, r.ended_ms, r.error, r.checkpoint, r.past
FROM leaselib_jobs AS j
LEFT JOIN leaselib_runs AS r INDEXED BY leaselib_runs_running ON r.job_id = j.id AND r.status = 'running'
WHERE j.namespace = ? AND j.name = ?
