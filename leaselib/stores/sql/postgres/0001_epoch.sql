-- epoch_1: the namespace's epoch, `<milliseconds>-<random hex>`; made up at the namespace's first use.

CREATE OR REPLACE FUNCTION {schema}.epoch_1(p_namespace text) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
AS $leaselib$
DECLARE
    v_epoch text;
BEGIN
    LOOP
        SELECT n.epoch INTO v_epoch FROM {schema}.namespaces n WHERE n.namespace = p_namespace;
        EXIT WHEN FOUND;
        INSERT INTO {schema}.namespaces (namespace, epoch)
        VALUES (p_namespace, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint || '-'
            || replace(gen_random_uuid()::text, '-', ''))
        ON CONFLICT DO NOTHING;
    END LOOP;
    RETURN v_epoch;
END
$leaselib$;
