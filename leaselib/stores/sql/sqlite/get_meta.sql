-- The version of the tables and the store's epoch. No arguments.
SELECT schema_version, epoch FROM leaselib_meta WHERE only_row = 1
