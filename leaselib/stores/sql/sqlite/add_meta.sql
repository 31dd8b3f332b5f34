-- Writes the identity of a new store; leaves one that is there. Arguments: schema version, epoch.
INSERT OR IGNORE INTO leaselib_meta (only_row, schema_version, epoch) VALUES (1, ?, ?)
