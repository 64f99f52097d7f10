from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontmcp_py.call import Call, Caller
from frontmcp_py.errors import RateLimitExceeded
from frontmcp_py.guard import Guard
from frontmcp_py.guard.rates import bind_rates, too_often
from frontmcp_py.policy import STRATEGIES, Policy, RateLimit, Strategy, Throttle
from frontmcp_py.storage import Claim, MemoryStorage, RateRefusal, Verdict
from frontmcp_py.testing import START, FakeClock, virtual_time
from tests.guard.support import NOBODY, new_guard, once, refusal

MS = 1_000_000
HOUR = 3600


def at(text: str) -> datetime.datetime:
    """A moment of 2026-01-01, or a whole one, in UTC."""
    date = text if "-" in text else f"2026-01-01 {text}"
    return datetime.datetime.fromisoformat(date).replace(tzinfo=datetime.UTC)


class Tool:
    """Rate limits alone, under a clock that the test moves."""

    def __init__(
        self, *limits: RateLimit, start: datetime.datetime | float = START, max_keys: int = 10**6
    ) -> None:
        self.clock = FakeClock(start)
        self.storage = MemoryStorage(self.clock, max_keys)
        self.rates = bind_rates(limits, "x", self.storage.counts)

    def call(self, caller: Caller = NOBODY) -> RateRefusal | None:
        """A call starts (`None`) or is refused."""
        call = Call("x", {}, caller)
        verdict = self.storage.take(Claim([(rate, rate.key(call)) for rate in self.rates]))
        if isinstance(verdict, RateRefusal):
            return verdict
        assert verdict is Verdict.TAKEN
        return None

    def error(self, caller: Caller = NOBODY) -> RateLimitExceeded:
        """What a caller is told who is refused now."""
        refused = self.call(caller)
        assert refused is not None
        return too_often("x", refused)

    def admitted(self, times: int, caller: Caller = NOBODY) -> int:
        """How many of so many calls start."""
        return sum(self.call(caller) is None for _ in range(times))


def user(name: str) -> Caller:
    return Caller(user_id=name)


# --------------------------------------------------------------------------------------- at a window's edge


@pytest.mark.parametrize(
    ("window", "before", "edge"),
    [
        ("1h", at("10:59:59.999"), at("11:00")),
        ("1m", at("10:00:59.999"), at("10:01")),
        ("1d", at("23:59:59.999"), at("2026-01-02 00:00")),
        ("100ms", at("10:00:00.199"), at("10:00:00.200")),
        # Multiples of 7 hours since the Unix epoch, and of no hour of the day.
        ("7h", at("2026-01-02 03:59:59.999"), at("2026-01-02 04:00")),
    ],
)
def test_fixed_windows_begin_on_the_clock_in_utc(
    window: str, before: datetime.datetime, edge: datetime.datetime
) -> None:
    tool = Tool(RateLimit(2, window), start=before)
    assert tool.admitted(3) == 2
    tool.clock.set(edge)
    assert tool.admitted(3) == 2
    assert edge.timestamp() * 1000 % RateLimit(2, window).window_ms == 0


def test_an_hour_ends_with_the_hour_and_not_an_hour_after_the_first_call() -> None:
    tool = Tool(RateLimit(1, "1h"), start=at("10:59:59"))
    assert tool.call() is None
    assert tool.error().retry_after == 1
    tool.clock.advance(1)
    assert tool.call() is None
    assert tool.error().retry_after == HOUR


def test_twice_the_limit_may_pass_around_the_edge_of_a_fixed_window() -> None:
    tool = Tool(RateLimit(10, "1m"), start=at("10:00:59"))
    assert tool.admitted(20) == 10
    tool.clock.advance(1)
    assert tool.admitted(20) == 10


def test_a_moving_window_has_no_edge() -> None:
    tool = Tool(RateLimit(2, "1m", strategy="moving-window"), start=at("10:00:59"))
    assert tool.admitted(3) == 2
    tool.clock.advance(59.999)
    assert tool.call() is not None
    tool.clock.advance(0.001)
    assert tool.admitted(3) == 2


def test_a_moving_window_frees_one_call_at_a_time() -> None:
    tool = Tool(RateLimit(2, "1m", strategy="moving-window"))
    assert tool.call() is None
    tool.clock.advance(20)
    assert tool.call() is None
    assert tool.error().retry_after == 40
    tool.clock.advance(40)
    assert tool.admitted(2) == 1
    assert tool.error().retry_after == 20


def test_a_sliding_window_weighs_the_last_window_by_how_much_of_it_is_in_view() -> None:
    tool = Tool(RateLimit(10, "1m", strategy="sliding-window"), start=at("10:00:30"))
    assert tool.admitted(20) == 10
    # 10:01: all ten are still in view.
    tool.clock.set(at("10:01"))
    assert tool.call() is not None
    # 10:01:30: half of them are, so five more have room.
    tool.clock.set(at("10:01:30"))
    assert tool.admitted(20) == 5
    # Two windows later nothing is in view.
    tool.clock.set(at("10:03"))
    assert tool.admitted(20) == 10


def test_the_wait_of_a_sliding_window_is_exact() -> None:
    tool = Tool(RateLimit(4, "1m", strategy="sliding-window"), start=at("10:00:30"))
    assert tool.admitted(5) == 4
    # Full by what is current: until some of it has left the view, which it begins to do in the next window.
    assert tool.error().retry_after == 30.001
    tool.clock.set(at("10:01:00"))
    assert tool.error().retry_after == 0.001
    # A quarter of what was has left the view, which makes room for one, and a moment later for one more.
    tool.clock.set(at("10:01:15"))
    assert tool.admitted(2) == 1
    assert tool.error().retry_after == 0.001
    tool.clock.set(at("10:01:15.001"))
    assert tool.admitted(2) == 1
    assert tool.error().retry_after == 15


# ------------------------------------------------------------------------- decisions, against a plain model


@dataclass
class Model:
    """What a rate limit promises, from the times of all calls that were admitted, in milliseconds."""

    limit: RateLimit
    admitted: list[int] = field(default_factory=list[int])

    def has_room(self, now: int) -> bool:
        window, most = self.limit.window_ms, self.limit.max_requests
        begin = now - now % window
        current = sum(begin <= each <= now for each in self.admitted)
        if self.limit.strategy == "fixed-window":
            return current < most
        if self.limit.strategy == "moving-window":
            return sum(now - window < each <= now for each in self.admitted) < most
        previous = sum(begin - window <= each < begin for each in self.admitted)
        return previous * Fraction(begin + window - now, window) + current < most


WINDOWS_MS = [100, 250, 1000, 1500, 7000, 60_000]

rate_limits = st.builds(
    RateLimit,
    st.integers(1, 6),
    window=st.sampled_from(WINDOWS_MS).map(lambda ms: ms / 1000),
    strategy=st.sampled_from(STRATEGIES),
)
gaps = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2000), st.integers(0, 130_000)), max_size=40)


@given(st.lists(rate_limits, min_size=1, max_size=3), st.integers(0, 10**7), gaps)
def test_a_call_is_admitted_when_all_its_limits_have_room_for_it(
    limits: list[RateLimit], start: int, gaps_ms: list[int]
) -> None:
    tool = Tool(*limits, start=start / 1000)
    models = [Model(limit) for limit in limits]
    now = start
    for gap in gaps_ms:
        now += gap
        tool.clock.advance(gap / 1000)
        expected = all(model.has_room(now) for model in models)
        assert (tool.call() is None) == expected
        if expected:
            # A refused call is in no model: it consumes nothing, from any limit.
            for model in models:
                model.admitted.append(now)


@given(st.lists(rate_limits, min_size=1, max_size=3), st.integers(0, 10**7), gaps)
def test_the_wait_of_a_refusal_is_honest(limits: list[RateLimit], start: int, gaps_ms: list[int]) -> None:
    tool = Tool(*limits, start=start / 1000)
    for gap in gaps_ms:
        tool.clock.advance(gap / 1000)
        if tool.call() is None:
            continue
        error = tool.error()
        assert error.retry_after is not None
        wait_ms = round(error.retry_after * 1000)
        seconds = max(1, -(-wait_ms // 1000))
        assert error.message == f"Rate limit exceeded. Retry after {seconds} seconds"
        # A lone retry a whole second earlier is refused, and so is one a millisecond too early ...
        tool.clock.advance(seconds - 1)
        assert tool.call() is not None
        too_early = wait_ms - 1 - (seconds - 1) * 1000
        if too_early >= 0:
            tool.clock.advance(too_early / 1000)
            assert tool.call() is not None
            tool.clock.advance(0.001)
        # ... and after exactly that wait it is admitted.
        assert tool.call() is None


@given(rate_limits, st.integers(0, 10**7), gaps)
def test_a_moving_window_never_lets_more_through_in_any_span_of_its_length(
    limit: RateLimit, start: int, gaps_ms: list[int]
) -> None:
    moving = RateLimit(limit.max_requests, limit.window, strategy="moving-window")
    tool = Tool(moving, start=start / 1000)
    admitted: list[int] = []
    now = 0
    for gap in gaps_ms:
        now += gap
        tool.clock.advance(gap / 1000)
        if tool.call() is None:
            admitted.append(now)
    for first in admitted:
        assert sum(first <= each < first + moving.window_ms for each in admitted) <= moving.max_requests


def test_of_several_exhausted_limits_the_one_with_the_longest_wait_is_reported() -> None:
    for limits in ((RateLimit(1, "1m"), RateLimit(1, "1h")), (RateLimit(1, "1h"), RateLimit(1, "1m"))):
        tool = Tool(*limits)
        assert tool.call() is None
        refused = tool.call()
        assert refused is not None
        assert refused.rule.limit == RateLimit(1, "1h")
        assert refused.wait_ns == HOUR * 1000 * MS


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_refused_call_extends_nothing(strategy: Strategy) -> None:
    patient = Tool(RateLimit(2, "1m", strategy=strategy))
    hammering = Tool(RateLimit(2, "1m", strategy=strategy))
    for tool in (patient, hammering):
        assert tool.admitted(2) == 2
    for _ in range(50):
        hammering.clock.advance(1)
        assert hammering.call() is not None
    patient.clock.advance(50)
    assert hammering.error().retry_after == patient.error().retry_after


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_call_that_one_limit_refuses_consumes_nothing_of_the_other(strategy: Strategy) -> None:
    tool = Tool(RateLimit(1, "1m", strategy=strategy), RateLimit(3, "1h", strategy=strategy))
    for _ in range(3):
        assert tool.call() is None
        assert tool.admitted(10) == 0
        tool.clock.advance(120)
    assert tool.error().limit == 3


# ----------------------------------------------------------------------------------- what shares a count


def test_limits_of_one_period_do_not_share_a_count() -> None:
    assert Tool(RateLimit(2, 60), RateLimit(3, 60)).admitted(10) == 2
    assert Tool(RateLimit(3, 60), RateLimit(2, 60)).admitted(10) == 2


def test_equal_limits_do_not_share_a_count() -> None:
    assert Tool(RateLimit(4, 60), RateLimit(4, 60)).admitted(10) == 4


def test_limits_that_differ_in_their_strategy_do_not_share_a_count() -> None:
    tool = Tool(*(RateLimit(4, 60, strategy=strategy) for strategy in STRATEGIES))
    assert tool.admitted(10) == 4


def test_limits_that_differ_in_whom_they_count_do_not_share_a_count() -> None:
    tool = Tool(RateLimit(4, 60), RateLimit(4, 60, "user_id"), RateLimit(4, 60, lambda _: "all"))
    assert tool.admitted(10) == 4


def test_windows_that_are_alike_in_milliseconds_are_one_limit() -> None:
    assert RateLimit(2, 60).label == RateLimit(2, "1m").label != RateLimit(2, "61s").label


@virtual_time
async def test_other_numbers_start_a_fresh_count() -> None:
    guard = new_guard()
    old, new = Policy("2/minute"), Policy("3/minute")
    for _ in range(2):
        await once(guard, "x", old)
    assert (await refusal(once(guard, "x", old))).limit == 2
    for _ in range(3):
        await once(guard, "x", new)
    assert (await refusal(once(guard, "x", new))).limit == 3
    # And the old one is still there, used up as it was.
    assert (await refusal(once(guard, "x", old))).limit == 2


@virtual_time
async def test_equal_policies_share_a_count_whoever_made_them() -> None:
    guard = new_guard()
    await once(guard, "x", Policy("1/minute"))
    await refusal(once(guard, "x", Policy(RateLimit(1, 60))))


@virtual_time
async def test_each_tool_has_a_count_of_its_own() -> None:
    guard = new_guard()
    for tool in ("a", "b", "global", "tool:a", ""):
        await once(guard, tool, Policy("1/minute"))
        await refusal(once(guard, tool, Policy("1/minute")))


@virtual_time
async def test_a_default_counts_for_each_tool_alone_and_a_global_limit_over_all() -> None:
    guard = new_guard(Throttle(default_rate_limit="2/minute", global_rate_limit="5/minute"))
    for tool in ("a", "b"):
        await once(guard, tool)
        await once(guard, tool)
        error = await refusal(once(guard, tool))
        assert (error.scope, error.limit) == ("tool", 2)
    await once(guard, "c")
    error = await refusal(once(guard, "c"))
    assert (error.scope, error.limit) == ("global", 5)


@virtual_time
async def test_a_call_that_the_tools_limit_refuses_is_not_counted_globally() -> None:
    guard = new_guard(Throttle(global_rate_limit="2/minute"))
    await once(guard, "a", Policy("1/minute"))
    for _ in range(5):
        assert (await refusal(once(guard, "a", Policy("1/minute")))).scope == "tool"
    await once(guard, "b")
    assert (await refusal(once(guard, "b"))).scope == "global"


@virtual_time
async def test_a_global_limit_may_be_partitioned() -> None:
    guard = new_guard(Throttle(global_rate_limit=RateLimit(1, 60, "user_id")))
    await once(guard, "a", caller=user("ann"))
    await once(guard, "b", caller=user("bob"))
    await refusal(once(guard, "b", caller=user("ann")))


@virtual_time
async def test_what_the_caller_is_told() -> None:
    guard = new_guard()
    policy = Policy("2/hour")
    await once(guard, "export", policy)
    await once(guard, "export", policy)
    error = await refusal(once(guard, "export", policy))
    assert isinstance(error, RateLimitExceeded)
    assert str(error) == "Rate limit exceeded. Retry after 3600 seconds"
    meta = error.meta()
    assert str(meta.pop("errorId")).startswith("err_")
    assert meta == {"code": "RATE_LIMIT_EXCEEDED", "retryAfterMs": 3_600_000, "limit": 2, "scope": "tool"}


# --------------------------------------------------------------------------------- keys, and many of them


@given(
    st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()), st.sampled_from(["user_id", "session"])
)
def test_no_two_subjects_of_no_two_tools_collide(
    one: tuple[str, str], other: tuple[str, str], partition: str
) -> None:
    counts = MemoryStorage(FakeClock()).counts

    def key(tool: str, subject: str) -> str:
        limit = RateLimit(1, 60, "user_id" if partition == "user_id" else "session")
        caller = Caller(user_id=subject) if partition == "user_id" else Caller(session_id=subject)
        return bind_rates([limit], tool, counts)[0].key(Call(tool, {}, caller))

    assert (key(*one) == key(*other)) == (one == other)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_beyond_max_keys_new_subjects_share_one_count_and_known_ones_keep_theirs(strategy: Strategy) -> None:
    tool = Tool(RateLimit(2, "1h", "user_id", strategy), max_keys=2)
    assert tool.call(user("ann")) is None
    assert tool.call(user("bob")) is None
    # Two are held; everybody else shares one count ...
    assert tool.call(user("cid")) is None
    assert tool.call(user("dan")) is None
    assert tool.call(user("eve")) is not None
    # ... and who was there before has lost nothing.
    for known in ("ann", "bob"):
        assert tool.admitted(2, user(known)) == 1
    assert tool.storage.counts.held == 3


def test_each_limit_has_an_overflow_of_its_own() -> None:
    tool = Tool(RateLimit(5, "1h", "user_id"), RateLimit(3, "1h", "user_id"), max_keys=2)
    assert tool.call(user("ann")) is None
    assert [tool.call(user(f"new-{n}")) is None for n in range(5)] == [True] * 3 + [False] * 2
    assert tool.error(user("another")).limit == 3


def test_nobody_is_named_like_the_overflow() -> None:
    tool = Tool(RateLimit(1, "1h", lambda call: call.caller.user_id), max_keys=1)
    assert tool.call(user("overflow")) is None
    assert tool.call(user("ann")) is None
    assert tool.call(user("bob")) is not None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_when_windows_end_there_is_room_for_new_subjects_again(strategy: Strategy) -> None:
    tool = Tool(RateLimit(1, "1m", "user_id", strategy), max_keys=2)
    for name in ("ann", "bob", "cid"):
        assert tool.call(user(name)) is None
    assert tool.call(user("dan")) is not None
    tool.clock.advance(180)
    for name in ("dan", "eve"):
        assert tool.call(user(name)) is None
        assert tool.call(user(name)) is not None


@virtual_time
async def test_max_keys_is_the_throttles() -> None:
    guard = new_guard(Throttle(max_keys=1))
    policy = Policy(RateLimit(1, "1h", "user_id"))
    await once(guard, "x", policy, caller=user("ann"))
    await once(guard, "x", policy, caller=user("bob"))
    await refusal(once(guard, "x", policy, caller=user("cid")))


@virtual_time
async def test_a_tool_without_limits_creates_no_keyed_state() -> None:
    guard = new_guard(Throttle())
    for name in ("ann", "bob"):
        await once(guard, "free", caller=user(name))
    assert guard._memory.counts.held == 0
    assert guard._scheduler.live_slots == 0


# ------------------------------------------------------------------------------------------------ whose clock


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_moving_window_does_not_notice_that_somebody_sets_the_clock(hours: int) -> None:
    tool = Tool(RateLimit(1, "1m", strategy="moving-window"), start=at("12:00"))
    assert tool.call() is None
    tool.clock.set(at("12:00") + datetime.timedelta(hours=hours))
    assert tool.error().retry_after == 60
    tool.clock.advance(60)
    assert tool.call() is None


def test_a_fixed_window_follows_the_wall_clock() -> None:
    tool = Tool(RateLimit(1, "1h"), start=at("12:00"))
    assert tool.call() is None
    tool.clock.set(at("13:00"))
    assert tool.call() is None
    # Back to a window that is gone: it begins anew, and nobody waits for longer than a window.
    tool.clock.set(at("12:30"))
    assert tool.call() is None
    assert tool.error().retry_after == HOUR / 2


def test_the_guard_reads_the_clock_it_is_given() -> None:
    clock = FakeClock(at("12:30"))
    guard = Guard(clock=clock)
    rate = bind_rates([RateLimit(1, "1h")], "x", guard._memory.counts)[0]
    assert guard._memory.take(Claim([(rate, rate.key(Call("x")))])) is Verdict.TAKEN
    refused = guard._memory.take(Claim([(rate, rate.key(Call("x")))]))
    assert isinstance(refused, RateRefusal)
    assert refused.wait_ns == HOUR // 2 * 1000 * MS
    later = FakeClock(at("13:00"))
    guard.use_clock(later)
    assert guard._memory.take(Claim([(rate, rate.key(Call("x")))])) is Verdict.TAKEN
