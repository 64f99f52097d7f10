"""Which numbers may a limit have? Others never reach a call, and never mean "unlimited"."""

from __future__ import annotations

import asyncio
import decimal
import fractions
import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
from limits import RateLimitItemPerMinute

from frontmcp_py import (
    Admission,
    Call,
    Concurrency,
    ConfigurationError,
    FrontMCP,
    Guard,
    Policy,
    RateLimit,
    RateLimitExceeded,
    Throttle,
    Timeout,
    tool,
)
from frontmcp_py.testing import FakeClock
from tests.cases.desk import Desk, StepLoop, at, conc

NOT_NUMBERS: list[object] = [
    "5",
    "",
    b"5",
    True,
    False,
    math.nan,
    math.inf,
    -math.inf,
    -1,
    -0.5,
    10**30,
    10**400,
    1e300,
    2 + 0j,
    decimal.Decimal(5),
    fractions.Fraction(5),
    [5],
    {},
    object(),
]
NOT_COUNTS: list[object] = [*NOT_NUMBERS, 2.5, 2.0, timedelta(seconds=5)]


def shown(value: object) -> str:
    return type(value).__name__ if isinstance(value, int) and value > 10**40 else repr(value)[:20]


def field_of(make: Callable[..., object], name: str, **others: object) -> Callable[[object], object]:
    """Makes an object with one of its fields given."""
    return lambda value: make(**{name: value}, **others)


def server(**options: Any) -> FrontMCP:
    return FrontMCP("server", **options)


# What is not allowed, by field: what is no number at all, and what lies outside the range.
FIELDS: dict[str, tuple[Callable[[object], object], list[object]]] = {
    "RateLimit.max_requests": (field_of(RateLimit, "max_requests"), [*NOT_COUNTS, 0, None, 10**9 + 1]),
    "RateLimit.window": (
        field_of(RateLimit, "window", max_requests=5),
        [*NOT_NUMBERS, 0, None, 0.0999, 366 * 86_400 + 1],
    ),
    "Concurrency.max_concurrent": (field_of(Concurrency, "max_concurrent"), [*NOT_COUNTS, None, 10**6 + 1]),
    "Concurrency.max_queued": (field_of(Concurrency, "max_queued"), [*NOT_COUNTS, 10**6 + 1]),
    "Concurrency.queue_timeout": (field_of(Concurrency, "queue_timeout"), [*NOT_NUMBERS, 86_401, 10**9]),
    "Timeout.execute": (
        field_of(Timeout, "execute"),
        [*NOT_NUMBERS, None, 0, 0.0001, 86_401, 10**9, 10**12],
    ),
    "Timeout.cancel_after": (field_of(Timeout, "cancel_after", execute=1), [*NOT_NUMBERS, 86_401]),
    "Admission.max_active": (
        field_of(Admission, "max_active", reserved=0),
        [*NOT_COUNTS, None, 0, 1, 100_001],
    ),
    "Admission.reserved": (field_of(Admission, "reserved", max_active=10), [*NOT_COUNTS, None, 10]),
    "Admission.max_queued": (field_of(Admission, "max_queued"), [*NOT_COUNTS, None, 100_001]),
    "Admission.queue_timeout": (field_of(Admission, "queue_timeout"), [*NOT_NUMBERS, None, 0, 601]),
    "FrontMCP.worker_threads": (field_of(server, "worker_threads"), [*NOT_COUNTS, None, 0, 1001]),
    "FrontMCP.shutdown_grace": (field_of(server, "shutdown_grace"), [*NOT_NUMBERS, None, 601]),
    "FrontMCP.max_result_bytes": (field_of(server, "max_result_bytes"), [*NOT_COUNTS, None, 0]),
    "Throttle.max_keys": (field_of(Throttle, "max_keys"), [*NOT_COUNTS, None, 0, 10**9 + 1]),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_number_that_is_none_is_refused_with_its_field(field: str) -> None:
    """RakuenSoftware/aimee#1513: what was zero, negative or unset was read as "unlimited"."""
    make, values = FIELDS[field]
    for value in values:
        with pytest.raises(ConfigurationError) as refused:
            make(value)
        text = str(refused.value)
        assert text.startswith(f"{field}: "), shown(value)
        assert "give" in text
        # The value is shown, but never at length.
        assert len(text) < 400


def test_what_is_missing_is_not_made_up() -> None:
    """RakuenSoftware/aimee#1513: a limit without its number is no limit, so it is no limit object either."""
    makers: list[Callable[..., object]] = [RateLimit, Timeout]
    for make in makers:
        with pytest.raises(TypeError, match="required"):
            make()
    with pytest.raises(ConfigurationError, match=r"RateLimit.*max_requests"):
        Policy(rate_limit={"window": 60})
    assert Concurrency().max_concurrent == 1


BAD_OPTIONS: list[tuple[str, Mapping[str, Any]]] = [
    ("rate_limit", {"rate_limit": {"max_requests": 0}}),
    ("rate_limit", {"rate_limit": {"max_requests": -1, "window": "1h"}}),
    ("rate_limit", {"rate_limit": {"max_requests": 5, "window_ms": 60_000}}),
    ("rate_limit", {"rate_limit": 5}),
    ("rate_limit", {"rate_limit": True}),
    ("rate_limit", {"rate_limit": []}),
    ("rate_limit", {"rate_limit": ["10/minute", "x"]}),
    ("concurrency", {"concurrency": True}),
    ("concurrency", {"concurrency": -1}),
    ("concurrency", {"concurrency": 2.0}),
    ("concurrency", {"concurrency": "2"}),
    ("concurrency", {"concurrency": {"max": 2}}),
    ("concurrency", {"concurrency": [Concurrency(1, key="a"), Concurrency(2, key="a")]}),
    ("Timeout", {"timeout": True}),
    ("Timeout", {"timeout": 0}),
    ("Timeout", {"timeout": "5"}),
    ("Timeout", {"timeout": math.nan}),
    ("timeout", {"timeout": {"exec": 5}}),
    ("priority", {"priority": "high"}),
    ("on_cancel", {"on_cancel": "kill"}),
]


@pytest.mark.parametrize(("field", "options"), BAD_OPTIONS, ids=lambda value: str(value)[:60])
def test_a_bad_option_stops_the_start_and_names_the_tool(field: str, options: dict[str, Any]) -> None:
    """RakuenSoftware/aimee#1513, IBM/mcp-context-forge#3750: it was found by the first call, or by nobody."""
    with pytest.raises(ConfigurationError, match=field) as refused:
        FrontMCP("server").tool(name="search", **options)(lambda: None)
    assert 'tool "search"' in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ";",
        "abc/m",
        "abc/minute",
        "60/d",
        "10",
        "10/",
        "/minute",
        "10/0s",
        "10/0 minute",
        "10 per 00 hours",
        "10/-5s",
        "-10/minute",
        "0/minute",
        "1.5/minute",
        "1e3/minute",
        "10/minute and more",
        "10/minute; ",
        "10/minute; nonsense",
        "10/minute; 5/0 hours",
        "10/fortnight",
        "10/minute\n; x",
        "1" * 5000 + "/minute",
        "10/" + "9" * 5000 + " minutes",
        "10/400 days",
        "10/2 years",
        "NaN/minute",
        "True/minute",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_malformed_text_is_refused_when_it_is_read(text: str) -> None:
    """IBM/mcp-context-forge#3750: malformed text blew up at the first call."""
    for place in (
        lambda: Policy(rate_limit=text),
        lambda: Throttle(global_rate_limit=text),
        lambda: Throttle(default_rate_limit=text),
        lambda: tool(name="search", rate_limit=text)(lambda: None),
    ):
        with pytest.raises(ConfigurationError, match="rate_limit"):
            place()


@pytest.mark.parametrize(
    ("option", "most", "window"),
    [
        ("2/hour", 2, 3600),
        ("2 per hour", 2, 3600),
        ("3/second", 3, 1),
        ("3 per 2 minutes", 3, 120),
        ("1/day", 1, 86_400),
        (RateLimitItemPerMinute(4), 4, 60),
        ({"max_requests": 2, "window": "250ms"}, 2, 0.25),
        ({"max_requests": 2, "window": timedelta(hours=1), "strategy": "moving-window"}, 2, 3600),
        (RateLimit(2, window="1.5h"), 2, 5400),
        (["2/minute", RateLimit(5, 3600)], 2, 60),
        ("5/hour; 2/minute", 2, 60),
    ],
    ids=str,
)
async def test_every_notation_that_is_accepted_is_enforced_everywhere(
    desk: Desk, option: Any, most: int, window: float
) -> None:
    """IBM/mcp-context-forge#3750: one hook honoured the option, another one did not look at it."""
    guards = {
        "own": (desk.guard, Policy(rate_limit=option)),
        "global": (Guard(Throttle(global_rate_limit=option), clock=FakeClock()), Policy()),
        "default": (Guard(Throttle(default_rate_limit=option), clock=FakeClock()), Policy()),
    }

    async def nothing() -> None:
        return

    for guard, policy in guards.values():
        for _ in range(most):
            await guard.run(Call("tool"), policy, nothing)
        with pytest.raises(RateLimitExceeded) as refused:
            await guard.run(Call("tool"), policy, nothing)
        assert refused.value.limit == most
        assert refused.value.retry_after == window


async def test_a_list_of_limits_is_all_of_them(desk: Desk) -> None:
    """IBM/mcp-context-forge#3750: the first of a list was enforced, the others were not."""
    policy = Policy(rate_limit="3/minute; 4/hour; 5/day")
    passed = 0
    for moment in (0, 60, 3600, 7200, 86_400):
        await at(moment)
        outcomes = [(await desk.call(policy=policy)).outcome for _ in range(6)]
        passed += outcomes.count("ok")
        assert passed == {0: 3, 60: 4, 3600: 5, 7200: 5, 86_400: 8}[moment]


@pytest.mark.parametrize("option", ["cost", "weight", "tokens", "amount"])
def test_nothing_is_offered_that_would_weigh_calls(option: str) -> None:
    """golang/go#54082, alisaifee/limits#151, golang/sync#7: an unchecked weight gave tokens back.

    Each call counts as one. What looks like a weight is refused instead of being silently left out.
    """
    kinds: list[tuple[Callable[..., object], dict[str, object], str]] = [
        (RateLimit, {"max_requests": 5}, "rate_limit"),
        (Concurrency, {"max_concurrent": 5}, "concurrency"),
    ]
    for make, least, given in kinds:
        with pytest.raises(TypeError, match=f"no option '{option}'"):
            field_of(make, option, **least)(-3)
        with pytest.raises(ConfigurationError, match=f"no field '{option}'"):
            field_of(Policy, given)({**least, option: -3})
        with pytest.raises(TypeError, match=f"no option '{option}'"):
            field_of(tool, option)(2)


async def test_zero_slots_is_the_one_zero_that_means_none(desk: Desk) -> None:
    """RakuenSoftware/aimee#1513: written down, and so no accident."""
    for policy in (Policy(concurrency=0), Policy(concurrency=None), Policy(concurrency=Concurrency(0))):
        calls = [desk.call(policy=policy, seconds=1) for _ in range(20)]
        await desk.everybody()
        assert [attempt.outcome for attempt in calls] == ["ok"] * 20
    assert desk.most_running == 20


def test_a_month_is_a_window_and_nothing_runs_hot_in_it() -> None:
    """animir/node-rate-limiter-flexible#71, sindresorhus/p-throttle#40: an overflown timer fired at once."""

    async def scenario(loop: StepLoop) -> None:
        desk = Desk()
        policy = Policy(
            RateLimit(5, window=2_592_000), conc(1, wait=86_400), timeout=Timeout(86_400, cancel_after=86_400)
        )
        await asyncio.sleep(1)
        outcomes = [(await desk.call(policy=policy)).outcome for _ in range(6)]
        assert outcomes == ["ok"] * 5 + ["RATE_LIMIT_EXCEEDED"]
        error = desk.attempts[-1].error
        assert isinstance(error, RateLimitExceeded)
        assert error.retry_after is not None
        assert 0 < error.retry_after <= 2_592_000
        before = loop.ran
        await asyncio.sleep(error.retry_after)
        assert loop.ran - before < 20
        assert (await desk.call(policy=policy)).outcome == "ok"
        desk.assert_clean()

    run_apart(scenario)


def run_apart(scenario: Callable[[StepLoop], Any]) -> None:
    with asyncio.Runner(loop_factory=StepLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, StepLoop)
        runner.run(scenario(loop))


async def test_the_longest_wait_and_the_longest_run_end_when_they_should(desk: Desk) -> None:
    """animir/node-rate-limiter-flexible#71: large durations met narrow types."""
    policy = Policy(timeout=86_400)
    long = desk.call(policy=policy, seconds=86_401)
    await long
    assert (long.outcome, long.answered) == ("EXECUTION_TIMEOUT", 86_400)


def test_without_admission_a_day_is_the_longest_wait_in_the_queue() -> None:
    """sindresorhus/p-throttle#40: and nothing between a bound and the bound that is enforced."""

    async def scenario(_: StepLoop) -> None:
        desk = Desk(Throttle(admission=None))
        policy = Policy(concurrency=conc(1, wait=86_400))
        desk.call(policy=policy, seconds=100_000)
        waiting = await desk.call(policy=policy)
        assert (waiting.outcome, waiting.answered) == ("QUEUE_TIMEOUT", 86_400)
        await desk.everybody()
        desk.assert_clean()

    run_apart(scenario)


ARABIC_FIVE = "\u0665"
NOT_DURATIONS = [
    "5",
    "5 x",
    "-1s",
    "1e3s",
    "NaNs",
    "infs",
    "1h30m",
    "",
    "s",
    "1 000ms",
    "0x10s",
    "9" * 400 + "s",
]


@pytest.mark.parametrize("text", [*NOT_DURATIONS, f"{ARABIC_FIVE}s"])
def test_text_for_a_duration_is_one_number_and_a_unit(text: str) -> None:
    """sindresorhus/p-throttle#40, RakuenSoftware/aimee#1513: half-read text is a number nobody wrote."""
    for field in ("RateLimit.window", "Concurrency.queue_timeout", "Timeout.execute"):
        with pytest.raises(ConfigurationError, match=field):
            FIELDS[field][0](text)
