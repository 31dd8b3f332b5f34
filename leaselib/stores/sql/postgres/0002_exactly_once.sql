-- Schema version 2: confirm_2 and finish_in_2, which a handler calls in a transaction of its own so that its effect and
-- the run's record commit together or not at all; and an index of the running runs, which every claim looks through.
-- Functions of version 1 go on as they were, faster.

-- As in 0001_0_guard.sql, for the names that come with this version.
DO $leaselib$
DECLARE
    v_relations CONSTANT text[] := '{runs_running}';
    v_functions CONSTANT text[] := '{confirm_2, finish_in_2}';
    v_taken text;
BEGIN
    IF EXISTS (SELECT FROM {schema}.schema_version v WHERE v.version >= 2) THEN
        RETURN;
    END IF;
    SELECT pg_catalog.string_agg(taken.name, ', ' ORDER BY taken.name) INTO v_taken FROM (
        SELECT c.relname::text AS name, c.relnamespace AS place FROM pg_catalog.pg_class c WHERE c.relname = ANY (v_relations)
        UNION
        SELECT p.proname || '()', p.pronamespace FROM pg_catalog.pg_proc p WHERE p.proname = ANY (v_functions)
    ) AS taken JOIN pg_catalog.pg_namespace n ON n.oid = taken.place WHERE n.nspname = {schema_literal};
    IF v_taken IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'duplicate_object', MESSAGE = pg_catalog.format(
            'the schema %I holds what isn''t leaselib''s, under names that leaselib would create there: %s. Nothing was '
            || 'changed. Rename it, or give leaselib a schema of its own: ?schema=NAME in the URL',
            {schema_literal}, v_taken);
    END IF;
END
$leaselib$;

CREATE INDEX IF NOT EXISTS runs_running ON {schema}.runs (namespace, job, slot_ms) WHERE status = 'running';

-- confirm_2: whether this attempt still holds the run: its token is current, the run is running and was not released.
-- If so, nobody takes the run over, ends it in favour of a newer one, or hands it over, until the caller's transaction
-- has ended: its row stays locked, in the strength that lets the runner's own heartbeats pass.
--
-- That lock is also had on a version of the row that an update has just replaced, since no update changes the key. So
-- what it holds is looked at again: by a newer snapshot, or where the transaction has only one, by a lock that is refused
-- (40001) if anything has changed since, and given back at once.
CREATE OR REPLACE FUNCTION {schema}.confirm_2(p_namespace text, p_job text, p_slot_ms bigint, p_token text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $leaselib$
BEGIN
    PERFORM FROM {schema}.runs r
    WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms AND r.token = p_token
    FOR KEY SHARE;
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        BEGIN
            PERFORM FROM {schema}.runs r
            WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms FOR NO KEY UPDATE;
            RAISE EXCEPTION USING ERRCODE = 'LEASE', MESSAGE = 'gives the second lock back';
        EXCEPTION WHEN SQLSTATE 'LEASE' THEN
        END;
    END IF;
    PERFORM FROM {schema}.runs r
    WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms
        AND r.token = p_token AND r.status = 'running' AND NOT r.released;
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
