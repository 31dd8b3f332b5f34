-- The tables, made in one transaction on the first use of a file. Other programs may keep tables of their own beside
-- them, so that every name begins with leaselib_ and nothing that belongs to the file as a whole is set.
-- Instants and durations are whole milliseconds; instants count from 1970-01-01T00:00:00Z on this machine's clock.

-- One row: the version of these tables, and a random identity that changes when the file is made anew.
CREATE TABLE IF NOT EXISTS leaselib_meta (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    schema_version INTEGER NOT NULL,
    epoch TEXT NOT NULL
);

-- fence: the highest of the runs that have ended; those under way remember their own. floor_ms: the highest slot ever
-- trimmed or purged. ended: ended runs that are kept.
CREATE TABLE IF NOT EXISTS leaselib_jobs (
    id INTEGER PRIMARY KEY,
    namespace TEXT NOT NULL,
    name TEXT NOT NULL,
    fence INTEGER NOT NULL,
    floor_ms INTEGER,
    ended INTEGER NOT NULL,
    UNIQUE (namespace, name)
);

-- Columns as leaselib._model.Record; past is a JSON list of [number, runner, started_ms, ended_ms, outcome].
CREATE TABLE IF NOT EXISTS leaselib_runs (
    job_id INTEGER NOT NULL REFERENCES leaselib_jobs (id),
    slot_ms INTEGER NOT NULL,
    status TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    handovers INTEGER NOT NULL,
    token TEXT NOT NULL,
    runner TEXT NOT NULL,
    fence INTEGER NOT NULL,
    lease_ms INTEGER NOT NULL,
    lease_end_ms INTEGER NOT NULL,
    released INTEGER NOT NULL,
    reason TEXT NOT NULL,
    started_ms INTEGER NOT NULL,
    ended_ms INTEGER,
    error TEXT,
    checkpoint TEXT,
    past TEXT NOT NULL,
    PRIMARY KEY (job_id, slot_ms)
) WITHOUT ROWID;

-- What every claim asks for; holds as many entries as there are runs under way, whatever the length of the history.
CREATE INDEX IF NOT EXISTS leaselib_runs_running ON leaselib_runs (job_id, fence) WHERE status = 'running';
