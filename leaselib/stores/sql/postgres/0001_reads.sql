-- What reads only: unfinished_1, get_1, runs_1, jobs_1 lock nothing; ping_1 writes at the namespace's first use.
-- A run is answered as run_1 writes it.

-- The runs of these jobs that are running, live or not; oldest slot first. p_jobs: a JSON array of names.
CREATE OR REPLACE FUNCTION {schema}.unfinished_1(p_namespace text, p_jobs jsonb) RETURNS SETOF json
LANGUAGE plpgsql STABLE SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
AS $leaselib$
BEGIN
    RETURN QUERY
    SELECT {schema}.run_1(r) FROM (SELECT DISTINCT name FROM jsonb_array_elements_text(p_jobs) AS name) AS asked
    JOIN {schema}.runs r ON r.namespace = p_namespace AND r.job = asked.name AND r.status = 'running'
    ORDER BY r.slot_ms, r.job;
END
$leaselib$;

-- The run of that job and slot: one row or none.
CREATE OR REPLACE FUNCTION {schema}.get_1(p_namespace text, p_job text, p_slot_ms bigint) RETURNS SETOF json
LANGUAGE plpgsql STABLE SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
AS $leaselib$
BEGIN
    RETURN QUERY
    SELECT {schema}.run_1(r) FROM {schema}.runs r
    WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms;
END
$leaselib$;

-- The job's newest runs, newest slot first, p_limit of them at most.
CREATE OR REPLACE FUNCTION {schema}.runs_1(p_namespace text, p_job text, p_limit bigint) RETURNS SETOF json
LANGUAGE plpgsql STABLE SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
AS $leaselib$
BEGIN
    RETURN QUERY
    SELECT {schema}.run_1(r) FROM {schema}.runs r
    WHERE r.namespace = p_namespace AND r.job = p_job
    ORDER BY r.slot_ms DESC LIMIT greatest(0, p_limit);
END
$leaselib$;

-- The names of all jobs that ever started a run, sorted by their characters' numbers.
CREATE OR REPLACE FUNCTION {schema}.jobs_1(p_namespace text) RETURNS SETOF text
LANGUAGE plpgsql STABLE SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
AS $leaselib$
BEGIN
    RETURN QUERY SELECT j.job FROM {schema}.jobs j WHERE j.namespace = p_namespace ORDER BY j.job;
END
$leaselib$;

-- This server's clock, and the namespace's epoch.
CREATE OR REPLACE FUNCTION {schema}.ping_1(p_namespace text, OUT now_ms bigint, OUT epoch text)
LANGUAGE plpgsql VOLATILE SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
AS $leaselib$
BEGIN
    epoch := {schema}.epoch_1(p_namespace);
    now_ms := floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint;
END
$leaselib$;
