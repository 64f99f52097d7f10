-- A turn that has come cannot be used now: it goes to whoever is next.
--
-- INVARIANT  Nothing is counted or held for the call afterwards, and it stands in no line; it is known, so that it
--            may ask again with its number. Too late for a newer question of it, this changes nothing.
--
-- KEYS  1 the hash tag
-- ARGV  1 moment  2 lease in ms  3 instance  4 lease  5 attempt
-- Returns  the turns of this instance's calls: {{lease, attempt, rate or -1, wait}...}; others' are published.

local lease, attempt = ARGV[4], tonumber(ARGV[5])
local call = known_of(lease)
if call and call.state == 'held' and call.attempt == attempt then
  local needs = cjson.decode(call.needs)
  let_go(needs.slots, lease)
  uncount(needs.rates, lease, call.at)
  call.state = 'parked'
  record(lease, call)
  advance(needs.slots)
end
return turns
