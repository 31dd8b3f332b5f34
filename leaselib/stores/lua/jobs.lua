-- jobs: the names of all jobs that ever started a run in this namespace.
-- KEYS[1] the namespace's set of jobs
-- ARGV[1] call
-- Answer: [3] an array of names, in no order

local names = redis.pcall('SMEMBERS', KEYS[1])
return failed(names, KEYS[1]) or answer(names)
