-- claim: asks for a run, or for its next attempt (rules 1, 3, 5 and 6).
-- KEYS[1] <job>:runs, [2] <job>:slots; not in Cluster mode, where they live elsewhere: [3] the namespace's set of jobs,
--   [4] its epoch
-- ARGV[1] call, [2] job, [3] slot, [4] token, [5] runner, [6] lease, [7] max_attempts, [8] overlap, [9] max_late,
--   [10] keep, [11] history_size, [12] reason, [13] the attempt that a takeover saw, or empty for a new run,
--   [14] random text for a new epoch, [15] 1 for a probe: replicas are waited for whatever the outcome
-- Answer: [3] outcome, [4] now, [5] epoch or empty, [6] wait, [7] record, [8] its checkpoint, [9] its past attempts,
--   [10] the slots that were marked interrupted, an array

local LATE_TOLERANCE, EARLY, TRIM_MARGIN, TRIM_BATCH = 10000, 1000, 60000, 16
local RUNS, SLOTS, JOBS, EPOCH = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

-- Few tables rather than many locals: each function below pays for every local of the script that it uses.
local now = clock()
local ask = {
  slot = tonumber(ARGV[3]),
  field = text(tonumber(ARGV[3])),
  token = ARGV[4],
  lease = tonumber(ARGV[6]),
  skip = ARGV[8] == 'skip',
  takeover_of = tonumber(ARGV[13]), -- nil for a new run
}

-- Read. Nothing is written before all of it was found sound. ------------------------------------------------------

local got = redis.call('HMGET', RUNS, 'version', 'fence', 'floor', 'count', 'running', 'epoch', ask.field,
  ask.field .. ':checkpoint', ask.field .. ':past')
check_version(got[1])
local job = {
  fence = number_field(got[2], 'fence', 0, LARGEST) or 0,
  floor = number_field(got[3], 'floor', FIRST_MS, LAST_MS),
  count = number_field(got[4], 'count', 0, LARGEST) or 0,
  running = running_slots(got[5]),
  epoch = got[6], -- false if there is none
  run = got[7] and decode(got[7], ask.slot) or nil,
  checkpoint = got[8],
  past = got[9],
  others = {}, -- every other run whose status is running, oldest slot first
  -- what is to be written: records by slot, other fields of the hash, and the slots that go
  dirty = {},
  writes = {},
  dropped = {},
  interrupted = {},
  failure = nil, -- the answer, if a key of the namespace can't be used
}

-- A lease end further away than the run's own lease: the server's clock was set back. It is brought down.
local function clamp(run)
  if run.status == 'running' and not run.released and run.lease_end > now + run.lease then
    run.lease_end = now + run.lease
    job.dirty[run.slot] = run
  end
end

local listed = false
for _, slot in ipairs(job.running) do
  if slot == ask.slot then
    listed = true
  else
    local json = redis.call('HGET', RUNS, text(slot))
    local other = json and decode(json, slot)
    if not other or other.status ~= 'running' then
      malformed('its field running names slot ' .. text(slot) .. ', which is not running')
    else
      clamp(other)
      job.others[#job.others + 1] = other
    end
  end
end
if job.run then
  if (job.run.status == 'running') ~= listed then
    malformed('its field running and the record of slot ' .. ask.field .. ' disagree')
  end
  clamp(job.run)
end
if job.epoch and not is_epoch(job.epoch) then
  malformed('its field epoch is none')
end
if problem then
  return refusal()
end
if EPOCH then
  job.epoch = redis.pcall('GET', EPOCH)
  job.failure = no_epoch(job.epoch, EPOCH)
  if job.failure then
    return job.failure
  end
end

-- Decide. --------------------------------------------------------------------------------------------------------

local function write(field, value)
  job.writes[#job.writes + 1] = field
  job.writes[#job.writes + 1] = value
end

local function set_running(slot, present)
  job.running, job.running_changed = changed(job.running, slot, present), true
end

-- Rule 5: the newest other run that has a live lease.
local function in_the_way()
  for i = #job.others, 1, -1 do
    if live(job.others[i], now) then
      return job.others[i]
    end
  end
end

-- Rule 3: whether a newer run, not in the server's future, has started; it may be trimmed by now.
local function newer_started()
  local horizon = now + EARLY
  local newest = redis.call('ZREVRANGEBYSCORE', SLOTS, text(horizon), '-inf', 'LIMIT', 0, 1)[1]
  newest = number_field(newest, SLOTS, FIRST_MS, LAST_MS)
  return (newest and newest > ask.slot) or (job.floor and ask.slot < job.floor and job.floor <= horizon)
end

local function interrupt(run, why)
  run.status, run.ended, run.error = 'interrupted', now, why
  job.dirty[run.slot] = run
  set_running(run.slot, false)
end

-- Which ended runs go: the oldest beyond history_size, a bounded number, none that a claim could still ask for.
local function trim()
  local limit = math.min(TRIM_BATCH, job.count - #job.running - tonumber(ARGV[11]))
  if limit <= 0 then
    return
  end
  local before = now - tonumber(ARGV[10]) - LATE_TOLERANCE - TRIM_MARGIN
  local oldest = redis.call('ZRANGEBYSCORE', SLOTS, '-inf', '(' .. text(before), 'LIMIT', 0, limit + #job.running)
  local is_running = {}
  for _, slot in ipairs(job.running) do
    is_running[text(slot)] = true
  end
  for _, old in ipairs(oldest) do
    if not is_running[old] and #job.dropped < limit then
      job.dropped[#job.dropped + 1] = old
      job.floor = math.max(job.floor or FIRST_MS, number_field(old, SLOTS, FIRST_MS, LAST_MS) or FIRST_MS)
      job.count = job.count - redis.call('HEXISTS', RUNS, old)
    end
  end
end

local function is_number(word)
  local digits, rest = string.match(word, '^%-?(%d+)(.*)$')
  if not digits or #word > 4000 or string.find(digits, '^0%d') then
    return false
  end
  return string.gsub(string.gsub(rest, '^%.%d+', ''), '^[eE][+-]?%d+', '') == ''
end

-- Whether a text is JSON, no deeper than 1000 levels. cjson alone won't do: it takes other numbers, and fewer escapes.
-- So it only judges what is left when strings are emptied.
local function is_json(value)
  local escaped = string.gsub(string.gsub(value, '\\[\\"/bfnrt]', '.'), '\\u%x%x%x%x', '.')
  local bare = string.gsub(escaped, '"([^"]*)"', function(inside)
    return string.find(inside, '[%z\1-\31\\]') and '!' or '""'
  end)
  for word in string.gmatch(bare, '[^%s%[%]{}:,"]+') do
    if not (one_of(word, 'true', 'false', 'null') or is_number(word)) then
      return false
    end
  end
  return pcall(cjson.decode, bare)
end

local function past_line(number, runner, started, ended, how)
  return string.format('[%.0f,%s,%.0f,%.0f,"%s"]', number, cjson.encode(runner), started, ended, how)
end

-- The log of past attempts, line by line, each written anew.
local function past_lines()
  local lines = {}
  for line in string.gmatch(job.past and job.past .. '\n' or '', '([^\n]*)\n') do
    local ok, past = pcall(cjson.decode, line)
    if not (ok and type(past) == 'table' and #past == 5 and whole(past[1], 1, LARGEST) and utf8_text(past[2])
      and instant(past[3]) and instant(past[4]) and one_of(past[5], 'expired', 'handed-over')) then
      malformed("the log of a run's past attempts can't be read")
      return {}
    end
    lines[#lines + 1] = past_line(unpack(past))
  end
  return lines
end

-- The attempt that is over joins the log of the run's past ones.
local function log_past(run)
  local lines = past_lines()
  lines[#lines + 1] = past_line(run.attempt, run.runner, run.started, run.lease_end,
    run.released and 'handed-over' or 'expired')
  while #lines > LOG_ENTRIES do
    table.remove(lines, 1)
  end
  job.past = table.concat(lines, '\n')
  write(ask.field .. ':past', job.past)
end

-- Rule 3: a new run ends every older one that is dead. Under skip any start ends every dead run: one that isn't older
-- lies in the future of a clock that was set back, and its runner could otherwise renew beside this one.
local function end_dead_ones(first)
  for _, other in ipairs(job.others) do
    if not live(other, now) and (ask.skip or (first and other.slot < ask.slot)) then
      job.interrupted[#job.interrupted + 1] = text(other.slot)
      interrupt(other, 'superseded')
    end
  end
end

local function start()
  local before = job.run
  if redis.call('ZCARD', SLOTS) < job.count then
    malformed('the index of its slots, ' .. SLOTS .. ', has lost entries (does this server evict keys?)')
  end
  if before then
    log_past(before)
  else
    if JOBS then
      local known = redis.pcall('SISMEMBER', JOBS, ARGV[2])
      job.failure, job.is_new = failed(known, JOBS), known == 0
    end
    trim()
    job.count, job.first = job.count + 1, true
    job.checkpoint, job.past = false, false
  end
  job.fence = math.max(job.fence + 1, now) -- grows also after the server has lost the last one
  job.run = {
    slot = ask.slot,
    status = 'running',
    attempt = before and before.attempt + 1 or 1,
    handovers = before and before.handovers or 0,
    token = ask.token,
    runner = ARGV[5],
    fence = job.fence,
    lease = ask.lease,
    lease_end = now + ask.lease,
    released = false,
    reason = not before and ARGV[12] or (before.released and 'hand-over' or 'takeover'),
    started = now,
  }
  job.dirty[ask.slot] = job.run
  set_running(ask.slot, true)
  end_dead_ones(job.first)
  write('version', VERSION)
  write('fence', text(job.fence))
  write('count', text(job.count))
  if job.floor then
    write('floor', text(job.floor))
  end
  if not EPOCH and not job.epoch then
    job.epoch = text(now) .. '-' .. ARGV[14]
    write('epoch', job.epoch)
  end
  return 'won', job.run
end

-- A run with no state.
local function claim_new()
  if ask.takeover_of then
    return 'gone'
  end
  if ask.slot > now + EARLY then
    return 'early'
  end
  if job.floor and ask.slot <= job.floor then -- its state may have been trimmed, so it may have run already
    return ask.skip and 'superseded' or 'late'
  end
  if now - ask.slot > tonumber(ARGV[9]) + LATE_TOLERANCE then -- rule 6
    return 'late'
  end
  if ask.skip then
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

local function claim_existing(run)
  if run.status ~= 'running' then
    return 'finished', run
  end
  if run.token == ask.token then
    if run.released then -- sent again after the release: nobody listens, and rule 2 forbids a renewal
      return 'running', run
    end
    -- The answer to an earlier send was lost. A write, so that WAIT covers it too.
    run.lease_end = now + run.lease
    job.dirty[ask.slot] = run
    return 'won', run
  end
  if live(run, now) then
    return 'running', run
  end
  if ask.takeover_of and ask.takeover_of ~= run.attempt then
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
  if not ask.takeover_of and run.attempt > 1 then
    -- This may be a late copy of the claim that started an attempt before the latest: one token, one attempt. A backup
    -- names the attempt that it saw, so this sender becomes one.
    return 'running', run
  end
  local other = ask.skip and in_the_way() -- rule 5
  if other then
    return 'overlap', other
  end
  return start() -- rule 3: the next attempt
end

local outcome, shown
if job.run then
  outcome, shown = claim_existing(job.run)
else
  outcome, shown = claim_new()
end
if shown and shown.slot ~= ask.slot then
  local more = redis.call('HMGET', RUNS, text(shown.slot) .. ':checkpoint', text(shown.slot) .. ':past')
  job.checkpoint, job.past = more[1], more[2]
end
if shown and next(job.dirty) then -- what the caller can't read must not be decided either: each try would cost an attempt
  if job.checkpoint and not (utf8_text(job.checkpoint) and is_json(job.checkpoint)) then
    malformed('the checkpoint of slot ' .. text(shown.slot) .. ' is no JSON')
  end
  job.past = job.past and table.concat(past_lines(), '\n')
end
if job.failure or problem then
  return job.failure or refusal()
end

-- Write. The first command is one that a full server refuses, so that it refuses the whole. ------------------------

if EPOCH and not job.epoch then
  job.epoch, job.new_epoch = text(now) .. '-' .. ARGV[14], true
  redis.call('SET', EPOCH, job.epoch)
end
if job.first then
  redis.call('ZADD', SLOTS, ask.field, ask.field)
end
if job.running_changed then
  write('running', joined(job.running))
end
for slot, record in pairs(job.dirty) do
  write(text(slot), encode(record))
end
for from = 1, #job.writes, 4000 do -- unpack takes no more than about 8000
  redis.call('HSET', RUNS, unpack(job.writes, from, math.min(from + 3999, #job.writes)))
end
for _, old in ipairs(job.dropped) do
  redis.call('HDEL', RUNS, old, old .. ':checkpoint', old .. ':past')
  redis.call('ZREM', SLOTS, old)
end
if job.is_new then
  redis.call('SADD', JOBS, ARGV[2])
end
if #job.writes == 0 and not job.new_epoch then
  if ARGV[15] == '1' then -- WAIT speaks of what its own connection wrote: so this writes what is there, or should be
    redis.call('HSET', RUNS, 'version', VERSION)
  else
    redis.call('HDEL', RUNS, '') -- see `unwritten`
  end
end

local wait = outcome == 'early' and ask.slot - now or 0
return answer(outcome, text(now), job.epoch or '', text(wait), shown and encode(shown) or false, job.checkpoint,
  job.past, job.interrupted)
