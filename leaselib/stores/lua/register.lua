-- register: adds a job to the namespace's set of jobs. Only in Cluster mode, where that set and the job's own keys
-- live on different nodes; elsewhere the claim does it. Any number of times is the same as once.
-- KEYS[1] the namespace's set of jobs
-- ARGV[1] call, [2] job
-- Answer: nothing more

local added = redis.pcall('SADD', KEYS[1], ARGV[2])
return failed(added, KEYS[1]) or answer()
