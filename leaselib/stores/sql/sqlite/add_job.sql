-- A job's first mention; its new row id is the key of its runs. Arguments: namespace, name.
INSERT INTO leaselib_jobs (namespace, name, fence, floor_ms, ended) VALUES (?, ?, 0, NULL, 0)
