-- finish_1: rule 4. Ends the run with p_status, `success` or `failed`, only with the current token, while it is running
-- and was not released. The same finish sent again is accepted again; another status for the same token is not.
--
-- p_error: at most 4 KiB, or null. p_wait_ms: how long to wait for the run's row.
-- Locks the run's row only, also when the finish was accepted before: a lock is a write, so that this answer too waits
-- for a synchronous standby. Answer: [p_token, whether it was accepted].

CREATE OR REPLACE FUNCTION {schema}.finish_1(
    p_namespace text, p_job text, p_slot_ms bigint, p_token text, p_status text, p_error text,
    p_wait_ms bigint
) RETURNS json
LANGUAGE plpgsql VOLATILE SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $leaselib$
DECLARE
    v_setting text;
    v_accepted boolean;
    v_status text;
    v_released boolean;
BEGIN
    v_setting := set_config('lock_timeout', p_wait_ms::text, true);
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        v_setting := set_config('synchronous_commit', 'on', true);
    END IF;
    SELECT r.status, r.released INTO v_status, v_released FROM {schema}.runs r
    WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms AND r.token = p_token
    FOR NO KEY UPDATE;
    v_accepted := coalesce(CASE WHEN v_status = 'running' THEN NOT v_released ELSE v_status = p_status END, false);
    IF v_accepted AND v_status = 'running' THEN
        UPDATE {schema}.runs r SET
            status = p_status, error = p_error,
            ended_ms = floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
        WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms;
    END IF;
    RETURN json_build_array(p_token, v_accepted);
END
$leaselib$;
