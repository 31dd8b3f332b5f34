-- release: ends the lease now, as a hand-over (rule 4; a released lease stays released, rule 2).
-- KEYS[1] <job>:runs
-- ARGV[1] call, [2] slot, [3] token, [4] 1 if a checkpoint follows, [5] the checkpoint's JSON text
-- Answer: [3] 1 if accepted, now or before; 0 if refused

local now = clock()
local slot = tonumber(ARGV[2])
local run = one_run(KEYS[1], slot)
if problem then
  return refusal()
end

if not run or run.token ~= ARGV[3] then
  return unwritten(KEYS[1], 0)
end
if run.released then -- sent again; a newer run may have ended this one since
  return unwritten(KEYS[1], 1)
end
if run.status ~= 'running' then
  return unwritten(KEYS[1], 0)
end
run.released = true
run.lease_end = now
run.handovers = run.handovers + 1 -- doesn't count against max_attempts (rule 3)
local writes = { text(slot), encode(run) }
if ARGV[4] == '1' then
  writes[3], writes[4] = text(slot) .. ':checkpoint', ARGV[5]
end
redis.call('HSET', KEYS[1], unpack(writes))
return answer(1)
