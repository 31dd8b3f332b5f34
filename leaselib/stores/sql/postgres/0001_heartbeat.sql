-- heartbeat_1: rule 2. The lease of the run is extended to now + p_lease_ms, only with the current token, while it is
-- running, and only while it was not released; a lease that ran out but that nobody took over is renewed.
--
-- p_checkpoint: JSON text, null leaves what is stored. p_wait_ms: how long to wait for the run's row.
-- Locks the run's row only, in the strength that lets a transaction which confirmed the run stay open meanwhile; reads
-- the clock when it is held. Answer: [p_token, whether it was accepted].

CREATE OR REPLACE FUNCTION {schema}.heartbeat_1(
    p_namespace text, p_job text, p_slot_ms bigint, p_token text, p_lease_ms bigint, p_checkpoint text,
    p_wait_ms bigint
) RETURNS json
LANGUAGE plpgsql VOLATILE SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $leaselib$
DECLARE
    v_setting text;
    v_accepted boolean;
BEGIN
    v_setting := set_config('lock_timeout', p_wait_ms::text, true);
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        v_setting := set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM FROM {schema}.runs r
    WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms
        AND r.token = p_token AND r.status = 'running' AND NOT r.released
    FOR NO KEY UPDATE;
    v_accepted := FOUND;
    IF v_accepted THEN
        UPDATE {schema}.runs r SET
            lease_ms = p_lease_ms,
            lease_end_ms = floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint + p_lease_ms,
            checkpoint = coalesce(p_checkpoint, r.checkpoint)
        WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms;
    END IF;
    RETURN json_build_array(p_token, v_accepted);
END
$leaselib$;
