-- An instance lives: its calls keep what they have for one lease more, and the lines of its waiters move.
--
-- INVARIANT  A lease that has ended is not brought back: another call may hold its slots by now. Whoever waits
--            finds here what a lost message would have told, and what crashed holders have left.
--
-- KEYS  1 the hash tag
-- ARGV  1 moment  2 lease in ms  3 instance  4 how many hold slots  5... their leases, then those who wait
-- Returns  {{turns}, {lost}, {strayed}, moment}: turns as in release.lua, leases that have ended, waiters not known.

-- How many of an instance's own waiters are looked at by name.
local OWN = 256

local holders = tonumber(ARGV[4])
local lost, strayed, stirred = {}, {}, {}
local renewed = {}

-- What is known of a call, which is kept for one lease more in the same command.
local function kept(lease) return parsed(redis.call('GETEX', call_key(lease), 'PX', lease_ms)) end

-- Many calls need the same: each text is decoded once.
local decoded = {}
local function needs_of(call)
  decoded[call.needs] = decoded[call.needs] or cjson.decode(call.needs)
  return decoded[call.needs]
end

-- Keep what a call holds, if it holds it all still.
local function keep(lease, needs)
  if not holds(needs.slots, lease) then return false end
  for _, slot in ipairs(needs.slots) do
    redis.call('ZADD', held_key(slot[1]), digits(ends()), lease)
    renewed[held_key(slot[1])] = true
  end
  return true
end

for i = 5, 4 + holders do
  local lease = ARGV[i]
  local call = kept(lease)
  local needs = call and call.state == 'held' and needs_of(call)
  if not needs or not keep(lease, needs) then
    lost[#lost + 1] = lease
    if needs then
      let_go(needs.slots, lease)
      redis.call('DEL', call_key(lease))
      for _, slot in ipairs(needs.slots) do stirred[#stirred + 1] = slot end
    end
  end
end

for i = 5 + holders, #ARGV do
  local lease = ARGV[i]
  local call = kept(lease)
  local state, needs = call and call.state, call and call.needs and needs_of(call)
  if state == 'waiting' and stands(needs.slots, lease) then
    for _, slot in ipairs(needs.slots) do
      redis.call('ZADD', live_key(slot[1]), digits(ends()), lease)
      renewed[live_key(slot[1])] = true
      renewed[line_key(slot[1])] = true
      stirred[#stirred + 1] = slot
    end
  elseif state == 'held' and keep(lease, needs) then
    turns[#turns + 1] = { lease, call.attempt, -1, 0 }
  elseif state == 'refused' then
    turns[#turns + 1] = { lease, call.attempt, call.rate, call.wait }
  else
    strayed[#strayed + 1] = lease
  end
end

for key in pairs(renewed) do prolong(key) end
prolong(base .. ':number')

-- Whoever stands behind many others that are held up elsewhere is not seen from the front of its lines.
if advance(stirred) then
  local own = {}
  for i = 5 + holders, math.min(#ARGV, 4 + holders + OWN) do
    local call = known_of(ARGV[i])
    if call and call.state == 'waiting' then
      local needs = needs_of(call)
      local order = redis.call('ZSCORE', line_key(needs.slots[1][1]), ARGV[i])
      own[#own + 1] = { lease = ARGV[i], call = call, needs = needs, order = tonumber(order or 0) }
    end
  end
  table.sort(own, function(a, b) return a.order < b.order end)
  for _, waiter in ipairs(own) do
    if can_start(waiter.needs.slots, waiter.lease, waiter.order, {}) then
      serve(waiter.lease, waiter.call, waiter.needs)
    end
  end
end
return { turns, lost, strayed, now() }
