-- run_1: a run as a JSON array, in the order of COLUMNS in leaselib/stores/_postgres_rows.py. One value instead of many
-- columns: preparing and describing those costs the server as much as the rest of a claim. Simple enough for the
-- planner to put it in place of its call, so without settings of its own; every name is qualified.

CREATE OR REPLACE FUNCTION {schema}.run_1(r {schema}.runs) RETURNS json
LANGUAGE sql STABLE SECURITY INVOKER
AS $leaselib$
    SELECT pg_catalog.json_build_array(
        r.job, r.slot_ms, r.status, r.attempt, r.handovers, r.token, r.runner, r.fence, r.lease_ms, r.lease_end_ms,
        r.released, r.reason, r.started_ms, r.ended_ms, r.error, r.checkpoint, r.past
    )
$leaselib$;
