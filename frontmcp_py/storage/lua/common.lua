-- What the scripts share. It is put in front of each of them.
--
-- INVARIANTS
--   * One script is one step: the store runs nothing else meanwhile.
--   * `held:<slot>` names the leases that hold a slot, each with the moment at which it ends. One that has ended
--     counts for nobody, and is removed by whoever looks at the slot next.
--   * `line:<slot>` names who waits for a slot, in order; `live:<slot>` says until when each of them counts.
--     Whoever waits stands in the line of every slot it needs, and in no other.
--   * `call:<lease>` is what is known of one call. It is `held`, `waiting`, `parked` (its turn was passed on),
--     `refused` (its rate limit had run out at its turn) or `void` (given up, whatever still arrives for it).
--   * The first of a line keeps one place: nobody behind it takes that place. Nested calls come first, keep
--     nothing and look at what is free.
--   * Every key has an end: one lease for slots and calls, two windows for counts.
--
-- All keys begin with KEYS[1], a hash tag, so that a cluster keeps them together; which of them a script needs is
-- seen only while it runs. Moments are microseconds of the store's clock.

local base = KEYS[1]
local lease_ms = tonumber(ARGV[2])
local instance = ARGV[3]

-- The moment, asked for once and only if it is needed. ARGV[1] is one for tests that decide what time it is.
local moment = tonumber(ARGV[1])
local function now()
  if moment == 0 then
    local clock = redis.call('TIME')
    moment = clock[1] * 1000000 + clock[2]
  end
  return moment
end
local function ends() return now() + lease_ms * 1000 end

-- How many waiters of one line a script looks at, how often it begins again because one of them was refused, and
-- how many dead ones it removes. What is left over is found by the next renewal of the instance that waits there.
local LOOKS = 64
local FEW = 8
local ROUNDS = 4
local BURIES = 256

-- Numbers as text in full: Lua's own form rounds large ones.
local function digits(number) return string.format('%.0f', number) end

local function held_key(slot) return base .. ':held:' .. slot end
local function line_key(slot) return base .. ':line:' .. slot end
local function live_key(slot) return base .. ':live:' .. slot end
local function call_key(lease) return base .. ':call:' .. lease end

-- Let a key live for one lease more, unless an instance with a longer one has a part in it.
local function prolong(key)
  if redis.call('PTTL', key) < lease_ms then redis.call('PEXPIRE', key, lease_ms) end
end

-- Where a call stands in its lines: nested ones below zero, then control, then normal, each by arrival.
local CLASS = 4503599627370496 -- 2^52: with a number beside it still exact
local function order_of(rank, number)
  if rank == 0 then return number - CLASS end
  if rank == 1 then return number end
  return number + CLASS
end

---------------------------------------------------------------------------------------------------- rates

-- The key of the fixed window that `at` lies in, and when that window began.
local function window_key(rate, at)
  local begin = at - at % rate[4]
  return base .. ':rate:' .. rate[1] .. ':' .. digits(begin), begin
end

local function log_key(rate) return base .. ':log:' .. rate[1] end

-- Microseconds until a rate limit has room for one more call; 0 for now.
local function wait_of(rate)
  local strategy, most, window = rate[2], rate[3], rate[4]
  if strategy == 'moving-window' then
    local log = log_key(rate)
    redis.call('ZREMRANGEBYSCORE', log, '-inf', digits(now() - window))
    if redis.call('ZCARD', log) < most then return 0 end
    local entry = redis.call('ZREVRANGE', log, most - 1, most - 1, 'WITHSCORES')
    return math.max(1, tonumber(entry[2]) + window - now())
  end
  local key, begin = window_key(rate, now())
  local current = tonumber(redis.call('GET', key) or 0)
  local left = begin + window - now()
  if strategy == 'fixed-window' then
    if current < most then return 0 end
    return left
  end
  local previous = tonumber(redis.call('GET', (window_key(rate, begin - 1))) or 0)
  if previous * left < (most - current) * window then return 0 end
  if current < most then return left - math.floor(((most - current) * window - 1) / previous) end
  -- Not before the next window, where what is current now is weighted in its turn.
  return left + window - math.min(window, math.floor((most * window - 1) / current))
end

-- The rate limit with the longest wait (by position, from 0) and that wait; nil when all have room.
local function exhausted(rates)
  local worst, longest = nil, 0
  for position, rate in ipairs(rates) do
    local wait = wait_of(rate)
    if wait > longest then worst, longest = position - 1, wait end
  end
  return worst, longest
end

local function count(rates, lease)
  for _, rate in ipairs(rates) do
    local lasts = math.ceil(2 * rate[4] / 1000)
    if rate[2] == 'moving-window' then
      local log = log_key(rate)
      redis.call('ZADD', log, digits(now()), lease)
      redis.call('PEXPIRE', log, lasts)
    else
      local key = window_key(rate, now())
      if redis.call('INCR', key) == 1 then redis.call('PEXPIRE', key, lasts) end
    end
  end
end

-- Take back what was counted at that moment, as far as it is still there.
local function uncount(rates, lease, at)
  for _, rate in ipairs(rates) do
    if rate[2] == 'moving-window' then
      redis.call('ZREM', log_key(rate), lease)
    else
      local key = window_key(rate, at)
      if tonumber(redis.call('GET', key) or 0) > 0 then redis.call('DECR', key) end
    end
  end
end

---------------------------------------------------------------------------------------------------- slots

-- Remove whatever has ended; whether that was anything.
local function purge(slot)
  local gone = redis.call('ZREMRANGEBYSCORE', held_key(slot), '-inf', digits(now()))
  local dead = redis.call('ZRANGEBYSCORE', live_key(slot), '-inf', digits(now()), 'LIMIT', 0, BURIES)
  if #dead > 0 then
    redis.call('ZREM', live_key(slot), unpack(dead))
    redis.call('ZREM', line_key(slot), unpack(dead))
  end
  return gone > 0 or #dead > 0
end

-- Whether `lease` may take a place, beyond what the first of the line keeps.
local function has_room(slot, capacity, lease, order)
  local free = capacity - redis.call('ZCARD', held_key(slot))
  if free > 0 and order >= 0 then
    local first = redis.call('ZRANGEBYSCORE', line_key(slot), 0, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    if first[1] and first[1] ~= lease and tonumber(first[2]) < order then free = free - 1 end
  end
  return free > 0
end

local function hold(slots, lease)
  for _, slot in ipairs(slots) do
    redis.call('ZADD', held_key(slot[1]), digits(ends()), lease)
    prolong(held_key(slot[1]))
  end
end

-- Whether a call still holds all its slots.
local function holds(slots, lease)
  for _, slot in ipairs(slots) do
    local until_when = redis.call('ZSCORE', held_key(slot[1]), lease)
    if not until_when or tonumber(until_when) <= now() then return false end
  end
  return true
end

local function let_go(slots, lease)
  for _, slot in ipairs(slots) do redis.call('ZREM', held_key(slot[1]), lease) end
end

-- Whether a waiter still stands in all its lines.
local function stands(slots, lease)
  for _, slot in ipairs(slots) do
    if not redis.call('ZSCORE', line_key(slot[1]), lease) then return false end
  end
  return true
end

local function join(slots, lease, order)
  for _, slot in ipairs(slots) do
    redis.call('ZADD', line_key(slot[1]), digits(order), lease)
    redis.call('ZADD', live_key(slot[1]), digits(ends()), lease)
    prolong(line_key(slot[1]))
    prolong(live_key(slot[1]))
  end
end

local function quit(slots, lease)
  for _, slot in ipairs(slots) do
    redis.call('ZREM', line_key(slot[1]), lease)
    redis.call('ZREM', live_key(slot[1]), lease)
  end
end

---------------------------------------------------------------------------------------------------- calls

-- What is known of a call is one text, a field on each line, so that it is read and written in one command.
local FIELDS = { 'state', 'attempt', 'number', 'instance', 'at', 'rate', 'wait', 'needs' }

local function parsed(text)
  if not text then return nil end
  local call, nth = {}, 1
  for value in string.gmatch(text, '[^\n]+') do
    call[FIELDS[nth]] = value
    nth = nth + 1
  end
  call.attempt, call.number, call.at = tonumber(call.attempt), tonumber(call.number), tonumber(call.at)
  call.rate, call.wait = tonumber(call.rate), tonumber(call.wait)
  return call
end

local function known_of(lease) return parsed(redis.call('GET', call_key(lease))) end

local function record(lease, call)
  local text = table.concat({
    call.state, digits(call.attempt or 0), digits(call.number or 0), call.instance or instance, digits(call.at or 0),
    digits(call.rate or -1), digits(call.wait or 0), call.needs or '',
  }, '\n')
  redis.call('SET', call_key(lease), text, 'PX', lease_ms)
end

-- Turns of this instance's own calls go into the answer, if it has room for them; the others are told at once.
local turns = {}
local answers_turns = true
local function tell(lease, owner, attempt, rate, wait)
  if answers_turns and owner == instance then
    turns[#turns + 1] = { lease, attempt, rate or -1, wait or 0 }
  else
    local text = lease .. ' ' .. digits(attempt) .. ' ' .. (rate or -1) .. ' ' .. digits(wait or 0)
    redis.call('PUBLISH', base .. ':to:' .. owner, text)
  end
end

-- The turn of a waiter has come: it starts, or its rate limit refuses it. Whether it started.
local function serve(lease, call, needs)
  quit(needs.slots, lease)
  local rate, wait = exhausted(needs.rates)
  if rate then
    call.state, call.rate, call.wait = 'refused', rate, wait
  else
    count(needs.rates, lease)
    hold(needs.slots, lease)
    call.state, call.at = 'held', now()
  end
  record(lease, call)
  tell(lease, call.instance, call.attempt, rate, wait)
  return not rate
end

-- The first waiters of these slots, in order over all of them, and whether a line is longer than what was read.
local function candidates_of(slots, looks)
  local found, seen, is_longer = {}, {}, false
  for slot in pairs(slots) do
    local line = redis.call('ZRANGE', line_key(slot), 0, looks - 1, 'WITHSCORES')
    if #line > 0 and purge(slot) then
      line = redis.call('ZRANGE', line_key(slot), 0, looks - 1, 'WITHSCORES')
    end
    is_longer = is_longer or #line == 2 * looks
    for i = 1, #line, 2 do
      if not seen[line[i]] then
        seen[line[i]] = true
        found[#found + 1] = { lease = line[i], order = tonumber(line[i + 1]), slot = slot }
      end
    end
  end
  table.sort(found, function(a, b) return a.order < b.order end)
  return found, is_longer
end

-- Whether a waiter can start; else the slots without room are closed for all who stand behind it there.
local function can_start(slots, lease, order, closed)
  local can = true
  for _, slot in ipairs(slots) do
    if not has_room(slot[1], slot[2], lease, order) then
      closed[slot[1]] = true
      can = false
    end
  end
  return can
end

-- Places may have come free in these slots: everybody starts who can now, in order. Whether there may be more.
local function advance(slots)
  local stirred = {}
  for _, slot in ipairs(slots) do stirred[slot[1]] = true end
  -- Mostly one place has come free in one slot, and whoever is first there takes it.
  local alone = next(stirred)
  local looks = alone and not next(stirred, alone) and FEW or LOOKS
  for _ = 1, ROUNDS do
    local again, wider, closed = false, false, {}
    local candidates, is_longer = candidates_of(stirred, looks)
    for _, waiter in ipairs(candidates) do
      if not wider and not closed[waiter.slot] then
        local call = known_of(waiter.lease)
        if not call or call.state ~= 'waiting' then
          redis.call('ZREM', line_key(waiter.slot), waiter.lease)
          redis.call('ZREM', live_key(waiter.slot), waiter.lease)
        else
          local needs = cjson.decode(call.needs)
          if can_start(needs.slots, waiter.lease, waiter.order, closed)
            and not serve(waiter.lease, call, needs) then
            -- The places that it kept are there now for those behind it; in lines that were not looked at yet,
            -- some of them may go before whoever is next in these.
            again = true
            for _, slot in ipairs(needs.slots) do
              wider = wider or not stirred[slot[1]]
              stirred[slot[1]] = true
            end
          end
        end
      end
    end
    if not again and not (looks == FEW and is_longer and not closed[alone]) then
      return looks == LOOKS and is_longer
    end
    looks = LOOKS
  end
  return true
end
