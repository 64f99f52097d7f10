"""The strategies of the `limits` package decide over our counts what the guard decides."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import RateLimitItem, RateLimitItemPerSecond
from limits.strategies import (
    STRATEGIES,
    FixedWindowRateLimiter,
    MovingWindowRateLimiter,
    RateLimiter,
    SlidingWindowCounterRateLimiter,
)

from frontmcp_py.call import Call, Caller
from frontmcp_py.guard.rates import bind_rates
from frontmcp_py.policy import RateLimit, Strategy
from frontmcp_py.storage import Claim, MemoryStorage, Verdict, WindowCounts
from frontmcp_py.testing import FakeClock

LIMITERS: dict[Strategy, type[RateLimiter]] = {
    "fixed-window": FixedWindowRateLimiter,
    "moving-window": MovingWindowRateLimiter,
    "sliding-window": SlidingWindowCounterRateLimiter,
}

strategies = st.sampled_from(sorted(LIMITERS))
# In milliseconds; whole seconds among them, where windows begin and calls leave.
gaps = st.one_of(st.integers(0, 3), st.integers(0, 15).map(lambda s: s * 1000), st.integers(0, 20_000))
calls = st.lists(st.tuples(gaps, st.sampled_from("ab")), max_size=40)


def test_every_strategy_of_the_package_is_compared() -> None:
    assert set(STRATEGIES.values()) == set(LIMITERS.values())


@given(strategies, st.integers(1, 5), st.integers(1, 12), st.integers(0, 10**6), calls)
def test_the_packages_strategies_decide_the_same(
    strategy: Strategy, most: int, window: int, start_ms: int, calls: list[tuple[int, str]]
) -> None:
    clock = FakeClock(start_ms / 1000)
    item = RateLimitItemPerSecond(most, window)
    theirs = LIMITERS[strategy](WindowCounts(clock))
    storage = MemoryStorage(clock)
    rate = bind_rates([RateLimit(most, window, "user_id", strategy)], "x", storage.counts)[0]
    for gap, who in calls:
        clock.advance(gap / 1000)
        claim = Claim([(rate, rate.key(Call("x", {}, Caller(user_id=who))))])
        starts = storage.take(claim) is Verdict.TAKEN
        assert theirs.test(item, who) == starts
        assert theirs.hit(item, who) == starts


@given(strategies, st.integers(1, 6), st.lists(st.tuples(gaps, st.integers(1, 3)), max_size=20))
def test_costs_above_one_are_taken_whole_or_not_at_all(
    strategy: Strategy, most: int, hits: list[tuple[int, int]]
) -> None:
    clock = FakeClock()
    limiter = LIMITERS[strategy](WindowCounts(clock))
    item = RateLimitItemPerSecond(most, 10)
    for gap, cost in hits:
        clock.advance(gap / 1000)
        fits = limiter.test(item, "a", cost=cost)
        assert limiter.hit(item, "a", cost=cost) == fits


@pytest.mark.parametrize("strategy", sorted(LIMITERS))
def test_the_package_can_tell_what_is_left(strategy: Strategy) -> None:
    clock = FakeClock()
    limiter = LIMITERS[strategy](WindowCounts(clock))
    item = RateLimitItemPerSecond(3, 10)
    assert limiter.get_window_stats(item, "a").remaining == 3
    clock.advance(4)
    limiter.hit(item, "a")
    assert limiter.get_window_stats(item, "a").remaining == 2


def reset_after(strategy: Strategy, seconds: float) -> float:
    clock = FakeClock()
    limiter = LIMITERS[strategy](WindowCounts(clock))
    item = RateLimitItemPerSecond(3, 10)
    began = clock.wall_ns() / 1e9
    clock.advance(seconds)
    limiter.hit(item, "a")
    return limiter.get_window_stats(item, "a").reset_time - began


def test_the_package_can_tell_when_a_window_ends() -> None:
    assert math.isclose(reset_after("fixed-window", 4), 10, abs_tol=1e-6)
    assert math.isclose(reset_after("moving-window", 4), 14, abs_tol=1e-6)


def test_nothing_is_left_where_nothing_was_counted() -> None:
    clock = FakeClock()
    limiter = FixedWindowRateLimiter(WindowCounts(clock))
    stats = limiter.get_window_stats(RateLimitItemPerSecond(3, 10), "a")
    assert stats.remaining == 3
    assert math.isclose(stats.reset_time, clock.wall_ns() / 1e9)


@pytest.mark.parametrize("strategy", sorted(LIMITERS))
@pytest.mark.parametrize("forget", ["clear", "reset"])
def test_the_package_can_forget(strategy: Strategy, forget: str) -> None:
    counts = WindowCounts(FakeClock())
    limiter = LIMITERS[strategy](counts)
    item = RateLimitItemPerSecond(1, 10)
    assert limiter.hit(item, "a")
    assert not limiter.hit(item, "a")
    ways: dict[str, Callable[[RateLimitItem], object]] = {
        "clear": lambda item: limiter.clear(item, "a"),
        "reset": lambda _: counts.reset(),
    }
    ways[forget](item)
    assert counts.held == 0
    assert limiter.hit(item, "a")


def test_the_counts_are_a_storage_that_is_always_there() -> None:
    assert WindowCounts(FakeClock()).check()
