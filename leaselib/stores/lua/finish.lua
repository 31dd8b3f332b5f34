-- finish: ends a run as success or failed (rule 4).
-- KEYS[1] <job>:runs
-- ARGV[1] call, [2] slot, [3] token, [4] status, [5] 1 if an error text follows, [6] the error text, cut by the caller
-- Answer: [3] 1 if accepted, now or before; 0 if refused

local now = clock()
local slot = tonumber(ARGV[2])
local run, running = one_run(KEYS[1], slot)
if problem then
  return refusal()
end

-- Rule 4: only with the current token, and not once it was released.
if not run or run.token ~= ARGV[3] then
  return unwritten(KEYS[1], 0)
end
if run.status ~= 'running' then
  if run.status ~= ARGV[4] then
    return unwritten(KEYS[1], 0)
  end
  -- The answer to an earlier send was lost: true again. What is stored is written once more, unchanged, so that a WAIT
  -- on this connection covers it too.
  redis.call('HSET', KEYS[1], text(slot), encode(run))
  return answer(1)
end
if run.released then
  return unwritten(KEYS[1], 0)
end
run.status = ARGV[4]
run.ended = now
run.error = ARGV[5] == '1' and ARGV[6] or nil
redis.call('HSET', KEYS[1], text(slot), encode(run), 'running', joined(changed(running, slot, false)))
return answer(1)
