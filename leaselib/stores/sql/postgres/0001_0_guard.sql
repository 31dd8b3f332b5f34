-- Comes before everything else: what leaselib can't use, it doesn't touch.
--
-- Names and error texts are any Unicode, which only a UTF8 database can keep. And on a first creation none of the names
-- of version 1 may be taken: CREATE ... IF NOT EXISTS would adopt an application's own table. Whether the schema is
-- leaselib's already, its table schema_version tells.

DO $leaselib$
DECLARE
    v_encoding CONSTANT text := pg_catalog.current_setting('server_encoding');
    v_relations CONSTANT text[] := '{schema_version, namespaces, jobs, runs}';
    v_functions CONSTANT text[] := '{run_1, claim_1, epoch_1, heartbeat_1, finish_1, release_1, purge_1, unfinished_1,
        get_1, runs_1, jobs_1, ping_1}';
    v_taken text;
BEGIN
    IF v_encoding <> 'UTF8' THEN
        RAISE EXCEPTION USING ERRCODE = 'feature_not_supported', MESSAGE = pg_catalog.format(
            'leaselib needs a database with the encoding UTF8, and the encoding of this one, %I, is %s. Use another one: '
            || 'CREATE DATABASE name ENCODING ''UTF8'' TEMPLATE template0', pg_catalog.current_database(), v_encoding);
    END IF;
    IF 3 = (
        SELECT pg_catalog.count(*) FROM pg_catalog.pg_attribute a
        JOIN pg_catalog.pg_class c ON c.oid = a.attrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = {schema_literal} AND c.relname = 'schema_version' AND a.attname IN ('one', 'version', 'serves')
    ) THEN
        RETURN;
    END IF;
    SELECT pg_catalog.string_agg(taken.name, ', ' ORDER BY taken.name) INTO v_taken FROM (
        SELECT c.relname::text AS name, c.relnamespace AS place FROM pg_catalog.pg_class c WHERE c.relname = ANY (v_relations)
        UNION
        SELECT t.typname::text, t.typnamespace FROM pg_catalog.pg_type t WHERE t.typname = ANY (v_relations)
        UNION
        SELECT p.proname || '()', p.pronamespace FROM pg_catalog.pg_proc p WHERE p.proname = ANY (v_functions)
    ) AS taken JOIN pg_catalog.pg_namespace n ON n.oid = taken.place WHERE n.nspname = {schema_literal};
    IF v_taken IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'duplicate_object', MESSAGE = pg_catalog.format(
            'the schema %I isn''t leaselib''s, and holds what leaselib would create there: %s. Nothing was changed. Give '
            || 'leaselib a schema of its own: ?schema=NAME in the URL', {schema_literal}, v_taken);
    END IF;
END
$leaselib$;

