-- claim: asks for a run, or for its next attempt (rules 1, 3, 5 and 6).
-- KEYS[1] <job>:runs, [2] <job>:slots; not in Cluster mode, where they live elsewhere: [3] the namespace's set of jobs,
--   [4] its epoch
-- ARGV[1] call, [2] job, [3] slot, [4] token, [5] runner, [6] lease, [7] max_attempts, [8] overlap, [9] max_late,
--   [10] keep, [11] history_size, [12] reason, [13] the attempt that a takeover saw, or empty for a new run,
--   [14] random text for a new epoch
-- Answer: [3] outcome, [4] now, [5] epoch or empty, [6] wait, [7] record, [8] its checkpoint, [9] its past attempts,
--   [10] the slots that were marked interrupted, an array

local LATE_TOLERANCE, EARLY, TRIM_MARGIN, TRIM_BATCH = 10000, 1000, 60000, 16

local now = clock()
local horizon = now + EARLY -- slots after this are in the server's future
local slot, token, lease = tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[6])
local skip, keep, takeover_of = ARGV[8] == 'skip', tonumber(ARGV[10]), tonumber(ARGV[13])
local runs_key, slots_key, jobs_key, epoch_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

-- Read. Nothing is written before all of it was found sound. ------------------------------------------------------

local got = redis.call('HMGET', runs_key, 'version', 'fence', 'floor', 'count', 'running', 'epoch', text(slot),
  text(slot) .. ':checkpoint', text(slot) .. ':past')
check_version(got[1])
local fence = number_field(got[2], 'fence', 0, LARGEST) or 0
local floor = number_field(got[3], 'floor', FIRST_MS, LAST_MS)
local count = number_field(got[4], 'count', 0, LARGEST) or 0
local running = running_slots(got[5])
local epoch = got[6]
local run = got[7] and decode(got[7], slot) or nil
local checkpoint, past = got[8], got[9]

local dirty = {} -- records to write, by slot

-- A lease end further away than the run's own lease: the server's clock was set back. It is brought down.
local function clamp(record)
  if not record.released and record.lease_end > now + record.lease then
    record.lease_end = now + record.lease
    dirty[record.slot] = record
  end
end

local others, listed = {}, false -- every other run whose status is running, oldest slot first
for _, other in ipairs(running) do
  if other == slot then
    listed = true
  else
    local json = redis.call('HGET', runs_key, text(other))
    local record = json and decode(json, other)
    if not record or record.status ~= 'running' then
      malformed('its field running names slot ' .. text(other) .. ', which is not running')
    else
      clamp(record)
      others[#others + 1] = record
    end
  end
end
if run and (run.status == 'running') ~= listed then
  malformed('its field running and the record of slot ' .. text(slot) .. ' disagree')
end
if run and run.status == 'running' then
  clamp(run)
end
if problem then
  return refusal()
end

local failure -- the answer, if a key of the namespace can't be used
if epoch_key then
  epoch = redis.pcall('GET', epoch_key)
  failure = failed(epoch, epoch_key)
  if failure then
    return failure
  end
end
local fresh_epoch = text(now) .. '-' .. ARGV[14]

-- Decide. --------------------------------------------------------------------------------------------------------

local writes, interrupted, dropped, running_changed, new_job = {}, {}, {}, false, false

local function write(field, value)
  writes[#writes + 1] = field
  writes[#writes + 1] = value
end

-- Rule 5: the newest other run that has a live lease.
local function in_the_way()
  for i = #others, 1, -1 do
    if live(others[i], now) then
      return others[i]
    end
  end
end

-- Rule 3: whether a newer run, not in the server's future, has started; it may be trimmed by now.
local function newer_started()
  local newest = redis.call('ZREVRANGEBYSCORE', slots_key, text(horizon), '-inf', 'LIMIT', 0, 1)[1]
  newest = number_field(newest, slots_key, FIRST_MS, LAST_MS)
  return (newest and newest > slot) or (floor and slot < floor and floor <= horizon)
end

local function interrupt(record, why)
  record.status, record.ended, record.error = 'interrupted', now, why
  dirty[record.slot] = record
  running, running_changed = changed(running, record.slot, false), true
end

-- Which ended runs go: the oldest beyond history_size, a bounded number, none that a claim could still ask for.
local function trim()
  local limit = math.min(TRIM_BATCH, count - #running - tonumber(ARGV[11]))
  if limit <= 0 then
    return
  end
  local before = now - keep - LATE_TOLERANCE - TRIM_MARGIN
  local oldest = redis.call('ZRANGEBYSCORE', slots_key, '-inf', '(' .. text(before), 'LIMIT', 0, limit + #running)
  local is_running = {}
  for _, other in ipairs(running) do
    is_running[text(other)] = true
  end
  for _, old in ipairs(oldest) do
    if not is_running[old] and #dropped < limit then
      dropped[#dropped + 1] = old
      floor = math.max(floor or FIRST_MS, number_field(old, slots_key, FIRST_MS, LAST_MS) or FIRST_MS)
      count = count - redis.call('HEXISTS', runs_key, old)
    end
  end
end

local function log_past()
  local lines = {}
  for line in string.gmatch(past or '', '[^\n]+') do
    lines[#lines + 1] = line
  end
  lines[#lines + 1] = string.format('[%.0f,%s,%.0f,%.0f,"%s"]', run.attempt, cjson.encode(run.runner), run.started,
    run.lease_end, run.released and 'handed-over' or 'expired')
  while #lines > LOG_ENTRIES do
    table.remove(lines, 1)
  end
  past = table.concat(lines, '\n')
  write(text(slot) .. ':past', past)
end

local function start()
  local first = not run
  if redis.call('ZCARD', slots_key) < count then
    malformed('the index of its slots, ' .. slots_key .. ', has lost entries (does this server evict keys?)')
  end
  if first and jobs_key then
    local listed = redis.pcall('SISMEMBER', jobs_key, ARGV[2])
    failure, new_job = failed(listed, jobs_key), listed == 0
  end
  if first then
    trim()
    count = count + 1
    checkpoint, past = false, false
  else
    log_past()
  end
  fence = math.max(fence + 1, now) -- grows also after the server has lost the last one
  run = {
    slot = slot,
    status = 'running',
    attempt = first and 1 or run.attempt + 1,
    handovers = first and 0 or run.handovers,
    token = token,
    runner = ARGV[5],
    fence = fence,
    lease = lease,
    lease_end = now + lease,
    released = false,
    reason = first and ARGV[12] or (run.released and 'hand-over' or 'takeover'),
    started = now,
  }
  dirty[slot] = run
  running, running_changed = changed(running, slot, true), true
  -- Rule 3: a new run ends every older one that is dead. Under skip any start ends every dead run: one that isn't
  -- older lies in the future of a clock that was set back, and its runner could otherwise renew beside this one.
  for _, other in ipairs(others) do
    if not live(other, now) and (skip or (first and other.slot < slot)) then
      interrupted[#interrupted + 1] = text(other.slot)
      interrupt(other, 'superseded')
    end
  end
  write('version', VERSION)
  write('fence', text(fence))
  write('count', text(count))
  if floor then
    write('floor', text(floor))
  end
  if not epoch and not epoch_key then
    epoch = fresh_epoch
    write('epoch', epoch)
  end
  return 'won', run, first
end

-- A run with no state.
local function claim_new()
  if takeover_of then
    return 'gone'
  end
  if slot > horizon then
    return 'early'
  end
  if floor and slot <= floor then -- its state may have been trimmed, so it may have run already
    return skip and 'superseded' or 'late'
  end
  if now - slot > tonumber(ARGV[9]) + LATE_TOLERANCE then -- rule 6
    return 'late'
  end
  if skip then
    local other = in_the_way() -- rule 5
    if other then
      return 'overlap', other
    end
    if newer_started() then
      return 'superseded'
    end
  end
  return start() -- rule 1
end

local function claim_existing()
  if run.status ~= 'running' then
    return 'finished', run
  end
  if run.token == token then
    if run.released then -- sent again after the release: nobody listens, and rule 2 forbids a renewal
      return 'running', run
    end
    -- The answer to an earlier send was lost. A write, so that WAIT covers it too.
    run.lease_end = now + run.lease
    dirty[slot] = run
    return 'won', run
  end
  if live(run, now) then
    return 'running', run
  end
  if takeover_of and takeover_of ~= run.attempt then
    return 'gone', run
  end
  if newer_started() then -- rule 3
    interrupt(run, 'superseded')
    return 'interrupted', run
  end
  if not run.released and run.attempt - run.handovers >= tonumber(ARGV[7]) then -- rule 3
    interrupt(run, 'max_attempts')
    return 'interrupted', run
  end
  if not takeover_of and run.attempt > 1 then
    -- This may be a late copy of the claim that started an attempt before the latest: one token, one attempt. A backup
    -- names the attempt that it saw, so this sender becomes one.
    return 'running', run
  end
  local other = skip and in_the_way() -- rule 5
  if other then
    return 'overlap', other
  end
  return start() -- rule 3: the next attempt
end

local outcome, shown, first
if run then
  outcome, shown, first = claim_existing()
else
  outcome, shown, first = claim_new()
end
if failure or problem then
  return failure or refusal()
end
if shown and shown.slot ~= slot then
  local more = redis.call('HMGET', runs_key, text(shown.slot) .. ':checkpoint', text(shown.slot) .. ':past')
  checkpoint, past = more[1], more[2]
end

-- Write. The first command is one that a full server refuses, so that it refuses the whole. ------------------------

if epoch_key and not epoch then
  epoch = fresh_epoch
  redis.call('SET', epoch_key, epoch)
end
if first then
  redis.call('ZADD', slots_key, text(slot), text(slot))
end
if running_changed then
  write('running', joined(running))
end
for _, record in pairs(dirty) do
  write(text(record.slot), encode(record))
end
for from = 1, #writes, 4000 do -- unpack takes no more than about 8000
  redis.call('HSET', runs_key, unpack(writes, from, math.min(from + 3999, #writes)))
end
for _, old in ipairs(dropped) do
  redis.call('HDEL', runs_key, old, old .. ':checkpoint', old .. ':past')
  redis.call('ZREM', slots_key, old)
end
if new_job then
  redis.call('SADD', jobs_key, ARGV[2])
end

local wait = outcome == 'early' and slot - now or 0
return answer(outcome, text(now), epoch or '', text(wait), shown and encode(shown) or false, checkpoint, past,
  interrupted)
