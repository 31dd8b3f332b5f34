-- ping: the server's clock and the namespace's epoch, which begins here if there is none: the first call ever, or the
-- first since the server lost its data.
-- KEYS[1] the namespace's epoch
-- ARGV[1] call, [2] random text for a new epoch, [3] 1 for a probe: replicas are waited for, and WAIT speaks of
--   what its own connection wrote; so this writes what is there
-- Answer: [3] now, [4] epoch

local now = clock()
local epoch = redis.pcall('GET', KEYS[1])
local failure = no_epoch(epoch, KEYS[1])
if failure then
  return failure
end
if not epoch or ARGV[3] == '1' then
  epoch = epoch or text(now) .. '-' .. ARGV[2]
  redis.call('SET', KEYS[1], epoch)
end
return answer(text(now), epoch)
