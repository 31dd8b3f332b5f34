-- purge: removes the job's ended runs, with force the running ones too. Also mends a job whose records are malformed.
-- KEYS[1] <job>:runs, [2] <job>:slots
-- ARGV[1] call, [2] 1 for force
-- Answer: [3] how many runs were removed
-- The highest purged slot becomes the floor, so that no late claim starts a purged run again (rule 6).

local force = ARGV[2] == '1'
if not force then
  redis.call('ZCARD', KEYS[2]) -- fails if the index is no sorted set; removing its entries below would be too late
end
local got = redis.call('HMGET', KEYS[1], 'version', 'floor', 'running', 'fence')
check_version(got[1])
if problem then -- a newer layout: not even force may guess what it means
  return refusal()
end
local floor = number_field(got[2], 'floor', FIRST_MS, LAST_MS)
local running = running_slots(got[3])
local fence = number_field(got[4], 'fence', 0, LARGEST)
if problem and not force then
  return refusal()
end

local stays = {}
for _, slot in ipairs(force and {} or running) do
  stays[text(slot)] = true
end
local purged, kept = {}, {}
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  local slot = string.match(field, '^%-?%d+$') and tonumber(field)
  if slot and stays[field] then
    kept[#kept + 1] = field
  elseif slot then
    purged[#purged + 1] = field
    if instant(slot) then
      floor = math.max(floor or FIRST_MS, slot)
    end
  end
end
if #purged == 0 and not (force and got[1]) then
  if force then
    redis.call('DEL', KEYS[2])
  end
  return unwritten(KEYS[1], 0)
end

-- The floor comes first: if nothing else got done, no purged slot could run again.
redis.call('HSET', KEYS[1], 'version', VERSION, 'count', #kept, 'running', table.concat(kept, ' '),
  'fence', text(fence or 0), 'floor', text(floor or FIRST_MS))
for _, slot in ipairs(purged) do
  redis.call('HDEL', KEYS[1], slot, slot .. ':checkpoint', slot .. ':past')
  if not force then
    redis.call('ZREM', KEYS[2], slot)
  end
end
if force then -- whatever the index holds, or is
  redis.call('DEL', KEYS[2])
end
return answer(#purged)
