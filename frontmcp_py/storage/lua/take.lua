-- May this call start? Looks at every rate limit and slot, and takes all of them or nothing.
--
-- INVARIANT  A call is counted and holds its slots, or stands in the line of all its slots, or has changed
--            nothing. Asked again with the same lease and attempt, the answer is that of the first time.
--
-- KEYS  1 the hash tag
-- ARGV  1 moment  2 lease in ms  3 instance  4 lease  5 attempt  6 number, or 0  7 rank  8 whether it may wait
--       9 whether it is forced  10 needs: {"rates": [[key, strategy, most, window]],
--                                          "slots": [[key, capacity, no_wait, max_queued or -1]]}
-- Returns  {'started', number} | {'queued', number, blocked...} | {'full', refused by or -1, blocked...}
--          | {'often', rate, wait} | {'void'}; positions count from 0. Turns of others are published.

local lease, attempt, number, rank = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local may_wait, forced = ARGV[8] == '1', ARGV[9] == '1'
local needs = cjson.decode(ARGV[10])
answers_turns = false

local function blocked_for(order)
  local blocked = {}
  for position, slot in ipairs(needs.slots) do
    if not has_room(slot[1], slot[2], lease, order) then blocked[#blocked + 1] = position - 1 end
  end
  return blocked
end

local function with(head, blocked)
  for _, position in ipairs(blocked) do head[#head + 1] = position end
  return head
end

local call = known_of(lease)

-- Nothing is kept of a call that is refused.
local function refused(answer)
  if call then redis.call('DEL', call_key(lease)) end
  return answer
end

local has_ended = false

-- What is known of the call already: an answer that was lost, or a turn whose passing on was. It lasts one lease from
-- this answer on.
if call then
  if call.state == 'void' or attempt < call.attempt then return { 'void' } end
  local is_repeated = attempt == call.attempt
  call.attempt = attempt
  if call.state == 'held' then
    if holds(needs.slots, lease) then
      hold(needs.slots, lease)
      record(lease, call)
      return { 'started', call.number }
    end
    has_ended = true
    let_go(needs.slots, lease)
    uncount(needs.rates, lease, call.at)
  elseif call.state == 'waiting' and stands(needs.slots, lease) then
    join(needs.slots, lease, order_of(rank, call.number))
    record(lease, call)
    return with({ 'queued', call.number }, blocked_for(order_of(rank, call.number)))
  elseif call.state == 'refused' and is_repeated then
    return { 'often', call.rate, call.wait }
  end
  if number == 0 then number = call.number end
end

-- The first write of all: a store that is out of memory refuses it, and nothing has been changed.
local counter = base .. ':number'
if number == 0 then
  number = redis.call('INCR', counter)
  if number == 1 then redis.call('PEXPIRE', counter, lease_ms) end
elseif tonumber(redis.call('GET', counter) or 0) < number then
  -- The store has lost what it counted: whoever comes now is behind those who keep their numbers.
  redis.call('SET', counter, digits(number), 'PX', lease_ms)
end

-- Whoever waits goes before a newcomer to what has just come free.
local freed = {}
for _, slot in ipairs(needs.slots) do
  if purge(slot[1]) or has_ended then freed[#freed + 1] = slot end
end
advance(freed)

if not forced then
  local rate, wait = exhausted(needs.rates)
  if rate then return refused({ 'often', rate, wait }) end
  local blocked = blocked_for(order_of(rank, number))
  if #blocked > 0 then
    for _, position in ipairs(blocked) do
      local slot = needs.slots[position + 1]
      local is_full = slot[4] >= 0 and rank ~= 0 and redis.call('ZCOUNT', line_key(slot[1]), 0, '+inf') >= slot[4]
      if slot[3] == 1 or is_full then return refused(with({ 'full', position }, blocked)) end
    end
    if not may_wait then return refused(with({ 'full', -1 }, blocked)) end
    prolong(counter)
    join(needs.slots, lease, order_of(rank, number))
    record(lease, { state = 'waiting', attempt = attempt, number = number, needs = ARGV[10] })
    return with({ 'queued', number }, blocked)
  end
end

count(needs.rates, lease)
hold(needs.slots, lease)
record(lease, { state = 'held', attempt = attempt, number = number, needs = ARGV[10], at = now() })
return { 'started', number }
