-- runs: a job's newest runs.
-- KEYS[1] <job>:runs, [2] <job>:slots
-- ARGV[1] call, [2] how many at most
-- Answer: [3] an array of slot, record, checkpoint and past attempts, again and again, newest slot first

check_version(redis.call('HGET', KEYS[1], 'version'))
if problem then
  return refusal()
end
local found = {}
for _, slot in ipairs(redis.call('ZREVRANGEBYSCORE', KEYS[2], '+inf', '-inf', 'LIMIT', 0, ARGV[2])) do
  local got = redis.call('HMGET', KEYS[1], slot, slot .. ':checkpoint', slot .. ':past')
  if got[1] then -- else only the index got written: no such run
    for _, value in ipairs({ slot, got[1], got[2], got[3] }) do
      found[#found + 1] = value
    end
  end
end
return answer(found)
