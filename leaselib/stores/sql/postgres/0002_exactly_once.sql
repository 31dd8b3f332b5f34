-- Schema version 2: confirm_2 and finish_in_2, which a handler calls in a transaction of its own so that its effect and
-- the run's record commit together or not at all; and an index of the running runs, which every claim looks through.
-- Functions of version 1 go on as they were, faster.

CREATE INDEX IF NOT EXISTS runs_running ON {schema}.runs (namespace, job, slot_ms) WHERE status = 'running';

-- confirm_2: whether this attempt still holds the run: its token is current, the run is running and was not released.
-- If so, nobody takes the run over, ends it in favour of a newer one, or hands it over, until the caller's transaction
-- has ended: its row stays locked, in the strength that lets the runner's own heartbeats pass.
CREATE OR REPLACE FUNCTION {schema}.confirm_2(p_namespace text, p_job text, p_slot_ms bigint, p_token text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $leaselib$
BEGIN
    PERFORM FROM {schema}.runs r
    WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms
        AND r.token = p_token AND r.status = 'running' AND NOT r.released
    FOR KEY SHARE;
    RETURN FOUND;
END
$leaselib$;

-- finish_in_2: finish_1 as a part of the caller's transaction. Leaves its settings alone: whatever happens to the
-- commit happens to the effect and to the record alike.
CREATE OR REPLACE FUNCTION {schema}.finish_in_2(
    p_namespace text, p_job text, p_slot_ms bigint, p_token text, p_status text
) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $leaselib$
DECLARE
    v_status text;
    v_released boolean;
BEGIN
    SELECT r.status, r.released INTO v_status, v_released FROM {schema}.runs r
    WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms AND r.token = p_token
    FOR NO KEY UPDATE;
    IF NOT FOUND OR v_status <> 'running' OR v_released THEN
        RETURN coalesce(v_status = p_status, false);
    END IF;
    UPDATE {schema}.runs r SET
        status = p_status, ended_ms = floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
    WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms;
    RETURN true;
END
$leaselib$;

REVOKE ALL ON FUNCTION
    {schema}.confirm_2(text, text, bigint, text),
    {schema}.finish_in_2(text, text, bigint, text, text)
FROM PUBLIC;

UPDATE {schema}.schema_version SET version = 2, serves = '{1,2}' WHERE version < 2;
