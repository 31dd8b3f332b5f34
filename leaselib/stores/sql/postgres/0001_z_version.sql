-- Ends the migration to schema version 1: nobody may call what wasn't granted, and the version is noted.

REVOKE ALL ON FUNCTION
    {schema}.claim_1(text, text, bigint, text, text, bigint, bigint, text, bigint, bigint, bigint, text, bigint, bigint),
    {schema}.epoch_1(text),
    {schema}.run_1({schema}.runs),
    {schema}.heartbeat_1(text, text, bigint, text, bigint, text, bigint),
    {schema}.finish_1(text, text, bigint, text, text, text, bigint),
    {schema}.release_1(text, text, bigint, text, text, bigint),
    {schema}.purge_1(text, text, boolean, bigint),
    {schema}.unfinished_1(text, jsonb),
    {schema}.get_1(text, text, bigint),
    {schema}.runs_1(text, text, bigint),
    {schema}.jobs_1(text),
    {schema}.ping_1(text)
FROM PUBLIC;

INSERT INTO {schema}.schema_version (version, serves) VALUES (1, '{1}') ON CONFLICT DO NOTHING;
