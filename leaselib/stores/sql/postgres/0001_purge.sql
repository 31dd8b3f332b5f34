-- purge_1: removes the job's ended runs, with p_force the running ones too, and answers how many. The highest purged slot
-- becomes the job's floor if it is above it, so that no late claim starts a purged run again.
--
-- p_wait_ms: how long to wait for a lock. Locks the job's row, then the runs that it removes.

CREATE OR REPLACE FUNCTION {schema}.purge_1(p_namespace text, p_job text, p_force boolean, p_wait_ms bigint)
RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
AS $leaselib$
DECLARE
    v_setting text;
    v_purged bigint;
    v_highest_ms bigint;
BEGIN
    v_setting := set_config('lock_timeout', p_wait_ms::text, true);
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        v_setting := set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM FROM {schema}.jobs j WHERE j.namespace = p_namespace AND j.job = p_job FOR NO KEY UPDATE;
    WITH purged AS (
        DELETE FROM {schema}.runs r
        WHERE r.namespace = p_namespace AND r.job = p_job AND (p_force OR r.status <> 'running')
        RETURNING r.slot_ms
    )
    SELECT count(*), max(purged.slot_ms) INTO v_purged, v_highest_ms FROM purged;
    IF v_purged > 0 THEN
        UPDATE {schema}.jobs j SET kept = j.kept - v_purged, floor_ms = greatest(j.floor_ms, v_highest_ms)
        WHERE j.namespace = p_namespace AND j.job = p_job;
    END IF;
    RETURN v_purged;
END
$leaselib$;
