-- The work of a call has ended, or it waits no more.
--
-- INVARIANT  Only what this very lease held is freed, and once. Whoever is next has started when it ends.
--
-- KEYS  1 the hash tag
-- ARGV  1 moment  2 lease in ms  3 instance  4 lease  5 whether it never began: then it is uncounted, and a
--       question of it that is still on its way is void
-- Returns  the turns of this instance's calls: {{lease, attempt, rate or -1, wait}...}; others' are published.

local lease, undo = ARGV[4], ARGV[5] == '1'
local call = known_of(lease)
local state = call and call.state

if undo then
  record(lease, { state = 'void' })
elseif state and state ~= 'void' then
  redis.call('DEL', call_key(lease))
end

if state == 'held' or state == 'waiting' then
  local needs = cjson.decode(call.needs)
  if state == 'held' then
    let_go(needs.slots, lease)
    if undo then uncount(needs.rates, lease, call.at) end
  else
    quit(needs.slots, lease)
  end
  advance(needs.slots)
end
return turns
