-- Schema version 1: what leaselib keeps in PostgreSQL (13 or newer).
--
-- Every statement of every migration may be run again: `leaselib schema` prints them all, for a fresh database as for an
-- upgrade. A released function is never changed, only succeeded: the number at the end of its name is the schema
-- version that brought it, so that instances of the version before go on calling theirs.
-- All times are whole milliseconds since 1970-01-01T00:00:00Z on this server's clock. Names collate "C": they are equal
-- only if they have the same characters, and sort the same everywhere.

DO $leaselib$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = {schema_literal}) THEN
        CREATE SCHEMA {schema};
        REVOKE ALL ON SCHEMA {schema} FROM PUBLIC;
        COMMENT ON SCHEMA {schema} IS 'leaselib: leases of scheduled jobs';
    END IF;
END
$leaselib$;

-- One row. `serves` lists the schema versions whose library may use this schema.
CREATE TABLE IF NOT EXISTS {schema}.schema_version (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    version integer NOT NULL,
    serves integer[] NOT NULL
);

-- A namespace's epoch names this very store: another one means that the tables were emptied or replaced.
CREATE TABLE IF NOT EXISTS {schema}.namespaces (
    namespace text COLLATE "C" PRIMARY KEY,
    epoch text NOT NULL
);

-- What is remembered of a job beside its runs. Its row is also the lock that makes claims of the job take turns.
CREATE TABLE IF NOT EXISTS {schema}.jobs (
    namespace text COLLATE "C" NOT NULL,
    job text COLLATE "C" NOT NULL,
    fence bigint NOT NULL,     -- the last one handed out
    floor_ms bigint,           -- the highest slot ever trimmed or purged
    kept bigint NOT NULL,      -- how many rows the job has in `runs`
    PRIMARY KEY (namespace, job)
) WITH (fillfactor = 50);

-- One row per run. What belongs to an attempt belongs to the latest one; `past` lists those before it, each as
-- [number, runner, started_ms, ended_ms, outcome]. There are no CHECK constraints, which the server would parse anew at
-- every heartbeat: whoever reads a row looks at each value anyhow.
CREATE TABLE IF NOT EXISTS {schema}.runs (
    namespace text COLLATE "C" NOT NULL,
    job text COLLATE "C" NOT NULL,
    slot_ms bigint NOT NULL,
    status text COLLATE "C" NOT NULL,      -- running, success, failed, interrupted
    attempt bigint NOT NULL,
    handovers bigint NOT NULL,
    token text COLLATE "C" NOT NULL,
    runner text COLLATE "C" NOT NULL,
    fence bigint NOT NULL,
    lease_ms bigint NOT NULL,
    lease_end_ms bigint NOT NULL,
    released boolean NOT NULL,
    reason text COLLATE "C" NOT NULL,      -- scheduled, catch-up, takeover, hand-over, manual
    started_ms bigint NOT NULL,
    ended_ms bigint,
    error text COLLATE "C",                -- at most 4 KiB
    checkpoint text COLLATE "C",           -- JSON, at most 64 KiB
    past jsonb NOT NULL,
    PRIMARY KEY (namespace, job, slot_ms)
) WITH (fillfactor = 70);

REVOKE ALL ON {schema}.schema_version, {schema}.namespaces, {schema}.jobs, {schema}.runs FROM PUBLIC;
