-- Remembers a job's fence, floor and count of ended runs. Arguments: fence, floor_ms, ended, job id.
UPDATE leaselib_jobs SET fence = ?, floor_ms = ?, ended = ? WHERE id = ?
