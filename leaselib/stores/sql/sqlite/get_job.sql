-- What is remembered of a job: its id, last fence, floor_ms and ended. Arguments: namespace, name.
SELECT
    j.id,
    max(j.fence, ifnull((
        SELECT max(r.fence) FROM leaselib_runs AS r INDEXED BY leaselib_runs_running
        WHERE r.job_id = j.id AND r.status = 'running'
    ), 0)) AS fence,
    j.floor_ms, j.ended
FROM leaselib_jobs AS j WHERE j.namespace = ? AND j.name = ?
