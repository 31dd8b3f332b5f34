-- heartbeat: moves the lease end to now + lease (rule 2).
-- KEYS[1] <job>:runs
-- ARGV[1] call, [2] slot, [3] token, [4] lease, [5] 1 if a checkpoint follows, [6] the checkpoint's JSON text
-- Answer: [3] 1 if the lease was renewed, 0 if the heartbeat is refused

local now = clock()
local slot = tonumber(ARGV[2])
local run = one_run(KEYS[1], slot)
if problem then
  return refusal()
end

-- Rule 2: only with the current token, and only while it runs and was not released. A lease that ran out but that
-- nobody took over is renewed. No state, after a failover or a flush: refused, so the runner stops.
if not run or run.token ~= ARGV[3] or run.status ~= 'running' or run.released then
  return unwritten(KEYS[1], 0)
end
run.lease = tonumber(ARGV[4])
run.lease_end = now + run.lease
local writes = { text(slot), encode(run) }
if ARGV[5] == '1' then
  writes[3], writes[4] = text(slot) .. ':checkpoint', ARGV[6]
end
redis.call('HSET', KEYS[1], unpack(writes))
return answer(1)
