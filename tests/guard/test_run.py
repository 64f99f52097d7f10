"""`guard.run`: the guard without MCP."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from frontmcp_py.call import Call, Caller
from frontmcp_py.errors import ConfigurationError
from frontmcp_py.guard import Guard
from frontmcp_py.policy import Concurrency, Policy, RateLimit, Throttle
from frontmcp_py.signal import AbortSignal
from frontmcp_py.testing import virtual_time
from tests.guard.support import FREE, code_of, new_guard, once


async def plain() -> str:
    return "plain"


async def wants(signal: AbortSignal) -> bool:
    return isinstance(signal, AbortSignal)


async def positional(anything: AbortSignal, /) -> bool:
    return isinstance(anything, AbortSignal)


async def optional(signal: AbortSignal | None = None) -> bool:
    return isinstance(signal, AbortSignal)


async def has_defaults(number: int = 7, *rest: object, **options: object) -> str:
    return f"{number}{rest}{options}"


async def takes_two(number: int, signal: AbortSignal) -> bool:
    return number == 7 and isinstance(signal, AbortSignal)


class Callable:
    async def __call__(self) -> str:
        return "called"

    async def method(self) -> str:
        return "method"

    async def listening(self, signal: AbortSignal) -> bool:
        return isinstance(signal, AbortSignal)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (plain, "plain"),
        (wants, True),
        (positional, True),
        (optional, True),
        (has_defaults, "7(){}"),
        (functools.partial(takes_two, 7), True),
        (functools.partial(has_defaults, 8), "8(){}"),
        (Callable(), "called"),
        (Callable().method, "method"),
        (Callable().listening, True),
        (lambda signal: optional(signal), True),  # noqa: PLW0108 - a lambda is what is looked at
        (lambda: asyncio.sleep(0, "an awaitable"), "an awaitable"),
    ],
)
@pytest.mark.parametrize(
    "policy", [FREE, Policy(on_cancel="cancel"), Policy(timeout=5)], ids=["own", "inline", "timed"]
)
@virtual_time
async def test_a_body_is_given_the_signal_if_it_has_a_parameter_for_it(
    fn: Any, expected: Any, policy: Policy
) -> None:
    assert await new_guard().run(Call("x"), policy, fn) == expected


@virtual_time
async def test_as_the_contract_writes_it() -> None:
    guard = Guard(Throttle(global_rate_limit="100/minute"))
    caller = Caller(user_id="ann", client_ip="203.0.113.7", transport="cron")
    policy = Policy(
        rate_limit="5/minute", concurrency=Concurrency(1, queue_timeout=5), timeout=30, priority="normal"
    )
    async with guard:
        assert await guard.run(Call("export", {"status": "open"}, caller), policy, plain) == "plain"
        assert await guard.run(
            Call("export", {"status": "open"}, caller), policy, wants, signal=AbortSignal()
        )


@virtual_time
async def test_a_mapping_and_text_and_numbers_make_a_policy_too() -> None:
    guard = new_guard()
    policy = Policy({"max_requests": 1, "window": "1h"}, {"max_concurrent": 2}, {"execute": "30s"})
    assert await code_of(once(guard, "x", policy)) == "ok"
    assert await code_of(once(guard, "x", policy)) == "RATE_LIMIT_EXCEEDED"


@virtual_time
async def test_what_partitions_see_is_the_call_itself() -> None:
    guard = new_guard()
    seen: list[Call] = []

    def whose(call: Call) -> str:
        seen.append(call)
        return call.caller.user_id or "anonymous"

    call = Call("x", {"a": 1}, Caller(user_id="ann"))
    await guard.run(call, Policy(RateLimit(5, 60, whose)), plain)
    assert seen == [call]
    assert seen[0] is call


@virtual_time
async def test_nothing_of_a_call_that_cannot_be_bound_is_counted() -> None:
    guard = new_guard(Throttle(admission=None))
    with pytest.raises(ConfigurationError):
        await once(guard, "x", Policy(concurrency=Concurrency(1, queue_timeout=None)))
    assert guard.statistics().counts.submitted == 0


@virtual_time
async def test_what_is_no_call_and_no_policy_is_refused() -> None:
    guard = new_guard()
    wrong: Any = Policy("2/hour")
    with pytest.raises(TypeError, match=r"Guard\.run: .* is not allowed; give a Call"):
        await guard.run(wrong, wrong, plain)
    wrong = {"rate_limit": "2/hour"}
    with pytest.raises(TypeError, match=r"Guard\.run: .* is not allowed; give a Policy"):
        await guard.run(Call("x"), wrong, plain)


@virtual_time
async def test_ever_new_policies_do_not_make_it_grow() -> None:
    guard = new_guard()
    for _ in range(1500):
        # Each has a function of its own, so no two are equal.
        await once(guard, "x", Policy(RateLimit(10**6, 60, lambda _: "all")))
    assert len(guard._bound) <= 1024


@virtual_time
async def test_a_guard_need_not_be_entered() -> None:
    assert await code_of(once(Guard())) == "ok"


# -------------------------------------------------------------------------------------------- its options


@pytest.mark.parametrize("worker_threads", [0, -1, 1001, True, 4.0, "4", None])
def test_a_bad_number_of_threads_is_refused(worker_threads: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"worker_threads: .* is not allowed; give an integer from 1 to 1000"
    ):
        Guard(worker_threads=worker_threads)


@pytest.mark.parametrize("grace", [-1, 601, True, float("nan"), float("inf"), "2", None])
def test_a_bad_grace_is_refused(grace: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"shutdown_grace: .*seconds from 0 to 600"):
        Guard(shutdown_grace=grace)


@pytest.mark.parametrize("throttle", [7, "off", [], Policy()])
def test_what_is_no_throttle_is_refused(throttle: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"throttle: .* is not allowed; give .*a Throttle"):
        Guard(throttle)


def test_an_unknown_option_names_the_nearest_one() -> None:
    with pytest.raises(
        TypeError, match=r"Guard\(\) has no option 'worker_thread'; did you mean 'worker_threads'\?"
    ):
        Guard(worker_thread=4)  # type: ignore[call-arg]
