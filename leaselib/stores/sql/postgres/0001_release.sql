-- release_1: rule 4 for a hand-over. The lease ends now and the run is released, only with the current token and while it
-- is running. A release sent again is accepted again.
--
-- p_checkpoint: JSON text, null leaves what is stored. p_wait_ms: how long to wait for the run's row.
-- Locks the run's row only, but in full: it waits until a transaction that confirmed the run has ended, since the run is
-- anybody's afterwards. Answer: [p_token, whether it was accepted].

CREATE OR REPLACE FUNCTION {schema}.release_1(
    p_namespace text, p_job text, p_slot_ms bigint, p_token text, p_checkpoint text,
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
    FOR UPDATE;
    -- Sent again, it is accepted again, also if a newer run has ended this one since.
    v_accepted := coalesce(v_released OR v_status = 'running', false);
    IF v_accepted AND NOT v_released THEN
        UPDATE {schema}.runs r SET
            released = true, handovers = r.handovers + 1,
            lease_end_ms = floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint,
            checkpoint = coalesce(p_checkpoint, r.checkpoint)
        WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms;
    END IF;
    RETURN json_build_array(p_token, v_accepted);
END
$leaselib$;
