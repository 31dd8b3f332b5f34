-- What every script of leaselib shares. The loader puts this file in front of each of them.
--
-- A job is two keys, which share a hash slot:
--   <job>:runs   a hash. For each run up to three fields:
--                  <slot>             the record, JSON with whole numbers (see encode)
--                  <slot>:checkpoint  JSON text, if there is one
--                  <slot>:past        ended attempts, one JSON array a line: [number, runner, started, ended, outcome]
--                and of the job itself:
--                  version  of this layout
--                  fence    the last one handed out (rulings on the fence)
--                  floor    the highest slot ever trimmed or purged
--                  count    how many runs are kept
--                  running  the slots whose status is running, in ascending order, separated by blanks
--                  epoch    in Cluster mode only: the job's own epoch
--   <job>:slots  a sorted set of the slots of all kept runs, so that a claim's cost doesn't grow with history.
-- One HSET writes all that an operation decides. What comes before it (an entry of the sorted set) and after it (the
-- removal of trimmed runs) does no harm if it is all that got done.
--
-- Units: all times are whole milliseconds since 1970, on the server's clock. Numbers are sent as text with "%.0f": Lua's
-- own conversion keeps 14 digits only.
-- Answers: an array. [1] is ARGV[1], which tells one call's answer from another's. [2] is "ok"; or "malformed", then [3]
-- says what is wrong with this job's records; or "broken", then [3] says what is wrong with a key of the namespace.

local VERSION = '1'
local FIRST_MS, LAST_MS = -62135596800000, 253402300799999 -- the years 1 to 9999
local LARGEST = 9007199254740992 -- 2^53: whole numbers up to here are exact
local LONGEST_LEASE = 3153600000000 -- about 100 years
local LOG_ENTRIES = 20

local problem -- the first thing found malformed; scripts look at it before they write

local function malformed(what)
  problem = problem or what
end

local function text(number)
  return string.format('%.0f', number)
end

-- The server's clock. Called once, at the top of a script: two calls may differ.
local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function whole(value, least, most)
  return type(value) == 'number' and value >= least and value <= most and value == math.floor(value)
end

local function instant(value)
  return whole(value, FIRST_MS, LAST_MS)
end

local function one_of(value, ...)
  for _, allowed in ipairs({ ... }) do
    if value == allowed then
      return true
    end
  end
  return false
end

-- Whether a value is text in UTF-8: whole characters are struck out, and no other byte above 127 may be left.
local function utf8_text(value)
  if type(value) ~= 'string' then
    return false
  end
  for _, characters in ipairs({
    '[\194-\223][\128-\191]',
    '\224[\160-\191][\128-\191]',
    '\237[\128-\159][\128-\191]', -- no surrogates
    '[\225-\236\238\239][\128-\191][\128-\191]',
    '\240[\144-\191][\128-\191][\128-\191]',
    '[\241-\243][\128-\191][\128-\191][\128-\191]',
    '\244[\128-\143][\128-\191][\128-\191]',
  }) do
    if not string.find(value, '[\128-\255]') then
      return true
    end
    value = string.gsub(value, characters, '.')
  end
  return not string.find(value, '[\128-\255]')
end

-- A stored record as a table, or nil if it is malformed. Nothing in it is trusted.
local function decode(json, slot)
  local ok, run = pcall(cjson.decode, json)
  if not (ok and type(run) == 'table') then
    return malformed('the record of slot ' .. text(slot) .. ' is no JSON object')
  end
  if run.ended == cjson.null then
    run.ended = nil
  end
  if run.error == cjson.null then
    run.error = nil
  end
  local sound = run.slot == slot
    and one_of(run.status, 'running', 'success', 'failed', 'interrupted')
    and one_of(run.reason, 'scheduled', 'catch-up', 'takeover', 'hand-over', 'manual')
    and whole(run.attempt, 1, LARGEST)
    and whole(run.handovers, 0, LARGEST)
    and utf8_text(run.token)
    and utf8_text(run.runner)
    and whole(run.fence, 0, LARGEST)
    and whole(run.lease, 0, LONGEST_LEASE)
    and instant(run.lease_end)
    and instant(run.started)
    and type(run.released) == 'boolean'
    and (run.ended == nil) == (run.status == 'running')
    and (run.ended == nil or instant(run.ended))
    and (run.error == nil or utf8_text(run.error))
  if not sound then
    return malformed('the record of slot ' .. text(slot) .. ' has a missing, unknown or impossible value')
  end
  return run
end

local function encode(run)
  return string.format(
    '{"slot":%.0f,"status":"%s","attempt":%.0f,"handovers":%.0f,"token":',
    run.slot, run.status, run.attempt, run.handovers
  ) .. cjson.encode(run.token) .. ',"runner":' .. cjson.encode(run.runner) .. string.format(
    ',"fence":%.0f,"lease":%.0f,"lease_end":%.0f,"released":%s,"reason":"%s","started":%.0f,"ended":%s,"error":',
    run.fence, run.lease, run.lease_end, tostring(run.released), run.reason, run.started,
    run.ended and text(run.ended) or 'null'
  ) .. (run.error and cjson.encode(run.error) or 'null') .. '}'
end

-- Whether the runner is known to be alive.
local function live(run, now)
  return run.status == 'running' and not run.released and run.lease_end > now
end

local function check_version(version)
  if version and version ~= VERSION then
    malformed('its records have layout version ' .. string.sub(version, 1, 20) .. ', and this leaselib knows only '
      .. VERSION .. ': upgrade leaselib')
  end
end

-- A whole number of a job's own fields, or nil.
local function number_field(value, name, least, most)
  if not value then
    return nil
  end
  local number = tonumber(value)
  if not whole(number, least, most) then
    return malformed('its field ' .. name .. ' is no whole number')
  end
  return number
end

-- The slots in the field `running`, in ascending order.
local function running_slots(value)
  local slots = {}
  for word in string.gmatch(value or '', '%S+') do
    local slot = tonumber(word)
    if not instant(slot) then
      malformed('its field running holds something else than slots')
      return {}
    end
    slots[#slots + 1] = slot
  end
  table.sort(slots)
  return slots
end

-- Running slots with one added or removed, in ascending order.
local function changed(slots, slot, present)
  local others = {}
  for _, other in ipairs(slots) do
    if other ~= slot then
      others[#others + 1] = other
    end
  end
  if present then
    others[#others + 1] = slot
  end
  table.sort(others)
  return others
end

-- Running slots as the field `running` holds them.
local function joined(slots)
  local words = {}
  for i, slot in ipairs(slots) do
    words[i] = text(slot)
  end
  return table.concat(words, ' ')
end

-- What heartbeat, finish and release look at: the record of one run, and the job's running slots.
local function one_run(key, slot)
  local got = redis.call('HMGET', key, 'version', 'running', text(slot))
  check_version(got[1])
  local slots = running_slots(got[2])
  return got[3] and decode(got[3], slot) or nil, slots
end

local function answer(...)
  return { ARGV[1], 'ok', ... }
end

-- The answer of a script that writes, when it has nothing to write. A replica would let that pass, though what it knows
-- may be out of date; so this begins a write all the same, which a replica refuses with READONLY. It removes nothing (no
-- field has an empty name), and nothing of it is sent to replicas (by Redis 6.2 an empty transaction). Only ever the
-- last command: after a write, even one of nothing, a full server refuses no other any more.
local function unwritten(key, ...)
  redis.call('HDEL', key, '')
  return answer(...)
end

local function refusal()
  return { ARGV[1], 'malformed', problem }
end

-- The answer for a reply of redis.pcall to a key of the namespace, if that reply is an error; else nil.
local function failed(reply, key)
  if type(reply) ~= 'table' or not reply.err then
    return nil
  end
  if string.find(reply.err, 'WRONGTYPE', 1, true) then
    return { ARGV[1], 'broken', 'the key ' .. key .. ' holds another type of value' }
  end
  return reply
end

-- Whether a text is an epoch: `<milliseconds>-<hex digits>`, of bounded length.
local function is_epoch(value)
  local milliseconds = string.match(value, '^(%d+)%-%x+$')
  return milliseconds and #milliseconds <= 15 and #value <= 100
end

-- As `failed`, for the namespace's epoch, which must be one.
local function no_epoch(reply, key)
  if type(reply) == 'string' and not is_epoch(reply) then
    return { ARGV[1], 'broken', 'the key ' .. key .. ' holds no epoch' }
  end
  return failed(reply, key)
end
