-- get: one run.
-- KEYS[1] <job>:runs
-- ARGV[1] call, [2] slot
-- Answer: [3] an array of record, checkpoint and past attempts; the record is nil if there is no such run

local slot = ARGV[2]
local got = redis.call('HMGET', KEYS[1], 'version', slot, slot .. ':checkpoint', slot .. ':past')
check_version(got[1])
if problem then
  return refusal()
end
return answer({ got[2], got[3], got[4] })
