"""How often, in which span of time, and when again? Windows, clocks and hints."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import pytest

from frontmcp_py import AbortSignal, Call, Concurrency, Guard, Policy, RateLimit, RateLimitExceeded, Throttle
from frontmcp_py.policy import Strategy
from frontmcp_py.results import refusal
from frontmcp_py.testing import START, FakeClock, VirtualClock, settle
from tests.cases.desk import Desk, at, conc, now, until

OpenDesk = Callable[..., Desk]

FIXED: Strategy = "fixed-window"
MOVING: Strategy = "moving-window"
SLIDING: Strategy = "sliding-window"

STRATEGIES = pytest.mark.parametrize("strategy", [FIXED, MOVING, SLIDING])


def rate(most: int, window: float, strategy: Strategy = FIXED) -> Policy:
    return Policy(RateLimit(most, window, strategy=strategy))


async def ask(desk: Desk, policy: Policy, tool: str = "tool") -> float | None:
    """One call; the seconds it is asked to wait, if it is refused."""
    attempt = await desk.call(tool, policy)
    if attempt.outcome == "ok":
        return None
    assert isinstance(attempt.error, RateLimitExceeded)
    assert attempt.error.retry_after is not None
    return attempt.error.retry_after


# -------------------------------------------------------------------------------------- a window's edge


@pytest.mark.parametrize(("strategy", "passes"), [(FIXED, 10), (MOVING, 0), (SLIDING, 1)])
async def test_what_passes_at_a_windows_edge_is_what_the_strategy_promises(
    desk: Desk, strategy: Strategy, passes: int
) -> None:
    """IBM/mcp-context-forge#3784: twice the limit passed, and nobody had said that it would."""
    policy = rate(10, 60, strategy)
    await at(59.9)
    assert [await ask(desk, policy) for _ in range(10)] == [None] * 10
    assert await ask(desk, policy) is not None
    await at(60.1)
    second = [await ask(desk, policy) for _ in range(10)]
    assert second.count(None) <= passes
    if strategy != SLIDING:
        assert second.count(None) == passes


async def test_the_default_strategy_lines_up_with_the_clock_and_not_with_the_first_call(desk: Desk) -> None:
    """IBM/mcp-context-forge#3784: who knows where the edge is can tell what passes there."""
    policy = rate(1, 3600)
    await at(3599)
    assert await ask(desk, policy) is None
    assert await ask(desk, policy) == 1
    await at(3600)
    assert await ask(desk, policy) is None
    assert await ask(desk, policy) == 3600


@pytest.mark.parametrize("window", [0.1, 0.25, 1, 7, 60, 3600])
async def test_no_span_of_a_moving_window_ever_holds_more_than_the_limit(desk: Desk, window: float) -> None:
    """IBM/mcp-context-forge#3784, stefanprodan/AspNetCoreRateLimit#209: wherever the span begins."""
    policy, rng, passed = rate(7, window, MOVING), random.Random(1), list[float]()
    for _ in range(300):
        await asyncio.sleep(rng.choice([0, 0, window / 50, window / 7, window]))
        if await ask(desk, policy) is None:
            passed.append(now())
    assert len(passed) > 50
    for first, eighth in zip(passed, passed[7:], strict=False):
        assert eighth - first >= window - 1e-6


# ---------------------------------------------------------------------------------------- honest hints


@pytest.mark.parametrize(("strategy", "hint"), [(FIXED, 1.0), (MOVING, 1.0), (SLIDING, 1.0)])
async def test_the_hint_is_anchored_where_room_really_comes_from(
    desk: Desk, strategy: Strategy, hint: float
) -> None:
    """alisaifee/limits#200, ZhuoZhuoCrayon/throttled-py#87: it was counted from the newest hit."""
    policy = rate(3, 60, strategy)
    for moment in (0, 50, 58):
        await at(moment)
        assert await ask(desk, policy) is None
    await at(59)
    told = await ask(desk, policy)
    assert told is not None
    assert hint <= told <= hint + 1
    await at(59 + told)
    assert await ask(desk, policy) is None


@STRATEGIES
@pytest.mark.parametrize("seed", range(12))
async def test_a_lone_retry_after_exactly_the_hint_passes_and_a_second_earlier_it_does_not(
    strategy: Strategy, seed: int
) -> None:
    """alisaifee/limits#202, ZhuoZhuoCrayon/throttled-py#89: too long by up to a whole window."""
    rng = random.Random(seed)
    window = rng.choice([0.1, 0.5, 1.5, 7, 60, 3600, 86_400])
    most = rng.choice([1, 2, 3, 10])
    steps = [0.0] * (most + 1) + [
        rng.choice([0, 0, window / 20, window / 3, window * 1.1]) for _ in range(25)
    ]
    start = rng.uniform(0, 2 * window)

    async def refusals_after(steps: Sequence[float]) -> float | None:
        """What the call after the last step is told."""
        clock = FakeClock()
        guard, policy = Guard(clock=clock), rate(most, window, strategy)
        clock.advance(start)
        told: float | None = None
        for step in steps:
            clock.advance(step)
            told = await told_by(guard, policy)
        return told

    refused = 0
    for end in range(1, len(steps)):
        told = await refusals_after(steps[:end])
        if told is None:
            continue
        refused += 1
        assert told > 0
        assert await refusals_after([*steps[:end], told]) is None
        if told > 1:
            assert await refusals_after([*steps[:end], told - 1]) is not None
        # To the millisecond: it is rounded up, and no further.
        assert await refusals_after([*steps[:end], max(0.0, told - 0.001)]) is not None
    assert refused


async def told_by(guard: Guard, policy: Policy) -> float | None:
    """One call without any work; the seconds it is asked to wait, if it is refused."""

    async def nothing() -> None:
        return

    try:
        await guard.run(Call("tool"), policy, nothing)
    except RateLimitExceeded as error:
        return error.retry_after
    return None


@STRATEGIES
@pytest.mark.parametrize("window", [0.5, 60.0])
async def test_the_hint_is_whole_seconds_in_the_message_and_exact_beside_it(
    desk: Desk, strategy: Strategy, window: float
) -> None:
    """SpaceTradersAPI/api-docs#24, cloudfoundry/cloud_controller_ng#2544: fractions, an epoch, or a zero."""
    policy = rate(1, window, strategy)
    await at(0.1)
    assert (await desk.call(policy=policy)).outcome == "ok"
    await at(0.3)
    error = (await desk.call(policy=policy)).error
    assert isinstance(error, RateLimitExceeded)
    answer = refusal(error)
    assert answer.meta is not None
    milliseconds = answer.meta["retryAfterMs"]
    assert isinstance(milliseconds, int)
    assert 0 < milliseconds <= 2 * window * 1000
    assert (
        error.message == f"Rate limit exceeded. Retry after {max(1, math.ceil(milliseconds / 1000))} seconds"
    )
    assert error.retry_after == milliseconds / 1000


@STRATEGIES
async def test_a_moment_before_the_edge_the_hint_is_not_zero(desk: Desk, strategy: Strategy) -> None:
    """SpaceTradersAPI/api-docs#24: told to come back at once, everybody did."""
    policy = rate(1, 60, strategy)
    assert await ask(desk, policy) is None
    await at(59.999_999_999)
    told = await ask(desk, policy)
    assert told is not None
    assert told >= 0.001
    await at(59.999_999_999 + told)
    assert await ask(desk, policy) is None


async def test_of_several_exhausted_limits_the_longest_wait_is_told(desk: Desk) -> None:
    """cloudfoundry/cloud_controller_ng#2544: a hint that the next limit refuses again is no hint."""
    policy = Policy([RateLimit(2, 10), RateLimit(3, 3600), RateLimit(5, 60, strategy=MOVING)])
    for expected in (None, None, 10.0):
        assert await ask(desk, policy) == expected
    await at(10)
    assert await ask(desk, policy) is None
    told = await ask(desk, policy)
    assert told == 3590
    await at(3600)
    assert await ask(desk, policy) is None


@pytest.fixture
def paris(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose local time is not UTC."""
    monkeypatch.setenv("TZ", "Europe/Paris")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("paris")
async def test_local_time_is_of_no_account(desk: Desk) -> None:
    """BerriAI/litellm#39816, stefanprodan/AspNetCoreRateLimit#209: hints were off by the offset from UTC."""
    assert time.timezone == -3600
    clock = VirtualClock(start=START.replace(hour=22, minute=30))
    desk.guard.use_clock(clock)
    policy = rate(2, 86_400)
    assert [await ask(desk, policy) for _ in range(2)] == [None, None]
    error = (await desk.call(policy=policy)).error
    assert isinstance(error, RateLimitExceeded)
    # The day ends at midnight in UTC; in Paris it has ended half an hour ago.
    assert error.retry_after == 5400
    # Nothing in the answer is a point in time that somebody would have to read in some zone.
    assert set(refusal(error).meta or {}) == {"errorId", "code", "retryAfterMs", "limit", "scope"}
    await at(5400)
    assert await ask(desk, policy) is None


# ------------------------------------------------------------------------------ refusals change nothing


@pytest.mark.parametrize(("strategy", "first"), [(FIXED, 10), (MOVING, 10), (SLIDING, 11)])
async def test_a_client_that_keeps_trying_is_let_in_as_soon_as_one_that_waits(
    desk: Desk, strategy: Strategy, first: int
) -> None:
    """rcarmo/piclaw#105, peterkhayes/rolling-rate-limiter#9: each refused try made the block longer."""
    policy = rate(5, 10, strategy)
    assert [await ask(desk, policy) for _ in range(5)] == [None] * 5
    for moment in range(1, first):
        await at(moment)
        told = await ask(desk, policy)
        assert told is not None
        assert moment + told <= first
    await at(first)
    assert await ask(desk, policy) is None


@STRATEGIES
async def test_a_refused_call_burns_nothing_of_any_limit(desk: Desk, strategy: Strategy) -> None:
    """upstash/ratelimit-js#161: what was left was spent on the call that was then refused."""
    both = Policy([RateLimit(10, 60, strategy=strategy), RateLimit(2, 60, strategy=strategy)])
    assert [await ask(desk, both) for _ in range(2)] == [None, None]
    for _ in range(30):
        assert await ask(desk, both) is not None
    # The same two counts without the smaller limit: eight are left of ten.
    ten = Policy(RateLimit(10, 60, strategy=strategy))
    assert [await ask(desk, ten) for _ in range(8)] == [None] * 8
    assert await ask(desk, ten) is not None


@STRATEGIES
async def test_a_call_refused_for_want_of_a_slot_is_not_counted(desk: Desk, strategy: Strategy) -> None:
    """upstash/ratelimit-js#161: nor is one that gives up in the queue."""
    policy = Policy(RateLimit(5, 3600, strategy=strategy), conc(1, wait=2, queue=1))
    holder = desk.call(policy=policy, seconds=10)
    signal = AbortSignal()
    waiting = desk.call(policy=policy, signal=signal)
    await settle()
    assert (await desk.call(policy=policy)).outcome == "CONCURRENCY_LIMIT"
    signal.abort()
    expired = await desk.call(policy=policy)
    assert (waiting.outcome, expired.outcome) == ("CANCELLED", "QUEUE_TIMEOUT")
    await holder
    assert [await ask(desk, policy) for _ in range(4)] == [None] * 4
    assert await ask(desk, policy) is not None


async def test_a_queued_call_is_counted_in_the_window_in_which_it_starts(desk: Desk) -> None:
    """upstash/ratelimit-js#161: counted on arrival, it would burn a window in which it never ran."""
    policy = Policy(RateLimit(1, 60), conc(1, wait=20))
    await at(50)
    holder = desk.call(policy=policy, seconds=15)
    await settle()
    assert await ask(desk, policy) == 10
    await at(60)
    late = await desk.call(policy=policy)
    assert (holder.outcome, late.outcome, late.began) == ("ok", "ok", 65.0)
    assert await ask(desk, policy) == 55


@STRATEGIES
async def test_a_hand_over_that_is_taken_back_after_the_edge_is_not_taken_from_the_next_window(
    strategy: Strategy, open_desk: OpenDesk
) -> None:
    """upstash/ratelimit-js#161: a count that is put back belongs to the window it was taken from."""
    desk = open_desk()
    clock = FakeClock()
    desk.guard.use_clock(clock)
    clock.advance(59.9)
    policy = Policy(RateLimit(2, 60, strategy=strategy), conc(2, wait=10, key="k"))
    other = Policy(concurrency=conc(2, wait=10, key="k"))
    gate, signal = asyncio.Event(), AbortSignal()
    for _ in range(2):
        desk.call("other", other, body=until(gate))
    granted = desk.call(policy=policy, signal=signal)
    await settle()
    # All in one turn of the loop: it is granted in this window and goes in the next one, in which somebody
    # else has been counted meanwhile.
    gate.set()
    asyncio.get_running_loop().call_soon(clock.advance, 0.2)
    counted = desk.call(policy=policy)
    asyncio.get_running_loop().call_soon(signal.abort)
    await desk.everybody()
    assert (granted.outcome, granted.began, counted.outcome) == ("CANCELLED", None, "ok")
    assert await ask(desk, policy) is None
    assert await ask(desk, policy) is not None


@STRATEGIES
async def test_a_slow_steady_client_is_never_refused(desk: Desk, strategy: Strategy) -> None:
    """marcpope/cortendesk#74: each hit renewed the expiry, so the window never ended."""
    policy = rate(120, 60, strategy)
    for number in range(360):
        await at(30 * number)
        assert await ask(desk, policy) is None
        assert desk.guard._memory.counts.held <= (2 if strategy == SLIDING else 1)
    await at(30 * 360 + 121)
    # Long after the window a call of another tool finds nothing left of it.
    await ask(desk, rate(1, 60, strategy), tool="other")
    assert desk.guard._memory.counts.held <= 2


@STRATEGIES
async def test_a_client_at_exactly_the_limit_is_never_refused(desk: Desk, strategy: Strategy) -> None:
    """marcpope/cortendesk#74: one call each time the last one has just left the window."""
    policy = rate(1, 10, strategy)
    for number in range(100):
        await at(10 * number)
        if strategy == SLIDING and number:
            # The estimate keeps the last window in view until it has quite gone.
            await at(10 * number + 0.001)
            if number % 2:
                continue
        assert await ask(desk, policy) is None


# ------------------------------------------------------------------------------- clocks that are set


@STRATEGIES
async def test_a_clock_that_is_set_back_locks_nobody_out(desk: Desk, strategy: Strategy) -> None:
    """ProfessionalWiki/MediaWiki-MCP-Server#557: the caller had to wait until the clock was there again."""
    clock = VirtualClock()
    desk.guard.use_clock(clock)
    policy = rate(3, 60, strategy)
    for moment in (0, 1, 2):
        await at(moment)
        assert await ask(desk, policy) is None
    await at(3)
    clock.set(START.timestamp() + 3 - 3600)
    await at(63)
    assert await ask(desk, policy) is None


@STRATEGIES
async def test_a_clock_that_is_set_never_makes_a_hint_longer_than_the_strategy_can_need(
    desk: Desk, strategy: Strategy
) -> None:
    """jhurliman/node-rate-limiter#48: the hint was as long as the step."""
    clock, rng = VirtualClock(), random.Random(6)
    desk.guard.use_clock(clock)
    policy = rate(2, 60, strategy)
    for _ in range(300):
        await asyncio.sleep(rng.choice([0, 1, 10, 50]))
        if rng.random() < 0.3:
            clock.set(
                clock.wall_ns() / 1e9 + rng.choice([-86_400, -3600, -61, -1, -0.001, 0.001, 1, 61, 3600])
            )
        told = await ask(desk, policy)
        assert told is None or 0 < told <= (120 if strategy == SLIDING else 60)


@pytest.mark.parametrize(("strategy", "passes"), [(MOVING, False), (FIXED, True)])
async def test_a_clock_that_is_set_forward_refills_aligned_windows_only(
    desk: Desk, strategy: Strategy, passes: bool
) -> None:
    """jhurliman/node-rate-limiter#48. Aligned windows are those of the wall's clock, by their definition."""
    clock = VirtualClock()
    desk.guard.use_clock(clock)
    policy = rate(3, 60, strategy)
    assert [await ask(desk, policy) for _ in range(3)] == [None] * 3
    await at(3)
    clock.set(START.timestamp() + 3 + 3600)
    await at(4)
    told = await ask(desk, policy)
    if passes:
        assert told is None
    else:
        assert told is not None
        assert 1 <= told <= 60


@pytest.mark.parametrize("step", [-3600, 3600])
async def test_waits_and_timeouts_do_not_look_at_the_walls_clock(desk: Desk, step: float) -> None:
    """jhurliman/node-rate-limiter#48: the wall's clock was used for durations."""
    clock = VirtualClock()
    desk.guard.use_clock(clock)
    policy = Policy(concurrency=conc(1, wait=5), timeout=5)
    running = desk.call(policy=policy, seconds=60)
    waiting = desk.call("other", Policy(concurrency=Concurrency(1, key="tool", queue_timeout=4)))
    await at(3)
    clock.set(clock.wall_ns() / 1e9 + step)
    await waiting
    assert (waiting.outcome, waiting.answered) == ("QUEUE_TIMEOUT", 4.0)
    await running
    assert (running.outcome, running.answered) == ("EXECUTION_TIMEOUT", 5.0)


# ------------------------------------------------------------------ what a strategy is, in a few plain lines


def passes_by_the_book(
    strategy: Strategy, most: int, window: int, earlier: Sequence[int], moment: int
) -> bool:
    """Whether a call at `moment` has room, given the moments of the calls before that had."""
    begin = moment - moment % window
    current = sum(each >= begin for each in earlier)
    if strategy == FIXED:
        return current < most
    if strategy == MOVING:
        return sum(each > moment - window for each in earlier) < most
    previous = sum(begin - window <= each < begin for each in earlier)
    return previous * Fraction(begin + window - moment, window) + current < most


@STRATEGIES
@pytest.mark.parametrize(
    "sequences", [range(25), pytest.param(range(25, 1025), marks=pytest.mark.slow)], ids=["some", "many"]
)
async def test_every_decision_is_the_one_that_the_definition_gives(
    strategy: Strategy, sequences: range
) -> None:
    """golang/go#47221, YasserShkeir/django-smart-ratelimit#75: two ways to count disagreed at extremes."""
    for seed in sequences:
        rng = random.Random(seed)
        most = rng.choice([1, 2, 3, 5, 50, 10_000 if strategy == MOVING else 10**9])
        window_ms = rng.choice([100, 101, 999, 1000, 7_200_000, 86_400_000, 366 * 86_400_000])
        steps = [0, 0, window_ms / 10_000, window_ms / 3000, window_ms / 1000, rng.random()]
        clock, window = FakeClock(), window_ms * 1_000_000
        guard, policy = Guard(clock=clock), rate(most, window_ms / 1000, strategy)
        passed: list[int] = []
        for _ in range(60):
            clock.advance(rng.choice(steps))
            moment = clock.wall_ns()
            told = await told_by(guard, policy)
            assert (told is None) == passes_by_the_book(strategy, most, window, passed, moment)
            if told is None:
                passed.append(moment)
                continue
            then = moment + round(told * 1e9)
            assert passes_by_the_book(strategy, most, window, passed, then)
            assert not passes_by_the_book(strategy, most, window, passed, then - 1_000_000)


async def test_global_and_own_windows_are_counted_side_by_side(open_desk: OpenDesk) -> None:
    """alisaifee/flask-limiter#208: the same period twice is two counts."""
    desk = open_desk(Throttle(global_rate_limit="4/minute", default_rate_limit="3/minute"))
    assert [await ask(desk, Policy(), tool) for tool in "aaab"] == [None] * 4
    assert await ask(desk, Policy(), "b") == 60
    assert await ask(desk, Policy(priority="control"), "control") is None
