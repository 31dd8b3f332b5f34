-- unfinished: the runs whose status is running, live or not.
-- KEYS[1...] <job>:runs of each job asked for; in Cluster mode one job a call
-- ARGV[1] call
-- Answer: [3] an array of the number of the key, slot, record, checkpoint and past attempts, again and again; or
--   "malformed" or "broken", what is wrong, and [4] the number of the key: one job's trouble is not the others'

local found = {}
for number, key in ipairs(KEYS) do
  local meta = redis.pcall('HMGET', key, 'version', 'running')
  local failure = failed(meta, key)
  if failure then
    failure[4] = number
    return failure
  end
  check_version(meta[1])
  local slots = running_slots(meta[2])
  if problem then
    return { ARGV[1], 'malformed', problem, number }
  end
  for _, slot in ipairs(slots) do
    local field = text(slot)
    local got = redis.call('HMGET', key, field, field .. ':checkpoint', field .. ':past')
    for _, value in ipairs({ number, field, got[1], got[2], got[3] }) do
      found[#found + 1] = value
    end
  end
end
return answer(found)
