"""`mode="observe"`: what would have been is counted, and nobody is refused or waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frontmcp_py.call import Call
from frontmcp_py.guard import Counts, Guard
from frontmcp_py.policy import Admission, Concurrency, Policy, RateLimit, Throttle
from frontmcp_py.testing import settle, virtual_time
from tests.guard.support import FREE, code_of, hold, new_guard, now, once
from tests.reconcile import adds_up


def observing(**options: Any) -> Guard:
    return new_guard(Throttle(mode="observe", **options))


def counts(guard: Guard) -> Counts:
    adds_up(guard)
    return guard.statistics().counts


@virtual_time
async def test_a_call_that_comes_too_often_is_counted_and_passes() -> None:
    guard = observing()
    for _ in range(5):
        assert await code_of(once(guard, "x", Policy("2/hour"))) == "ok"
    assert dict(counts(guard).would_reject) == {"RATE_LIMIT_EXCEEDED": 3}
    assert (counts(guard).started, dict(counts(guard).rejected)) == (5, {})


@virtual_time
async def test_what_would_be_refused_consumes_no_rate_count() -> None:
    guard = observing(global_rate_limit="3/hour")
    for _ in range(5):
        await once(guard, "x", Policy("1/hour"))
    # One of x was counted, so two more have room.
    for _ in range(3):
        await once(guard, "y")
    tools = guard.statistics().tools
    assert dict(tools["x"].would_reject) == {"RATE_LIMIT_EXCEEDED": 4}
    assert dict(tools["y"].would_reject) == {"RATE_LIMIT_EXCEEDED": 1}


@virtual_time
async def test_what_would_be_refused_for_a_slot_is_counted_and_runs() -> None:
    guard = observing()
    policy = Policy("3/hour", 1)
    running = [await hold(guard, "x", policy) for _ in range(3)]
    assert all(each.runs for each in running)
    assert dict(counts(guard).would_reject) == {"CONCURRENCY_LIMIT": 2}
    for each in running:
        await each.end()
    # The two consumed no rate count.
    for _ in range(3):
        await once(guard, "x", policy)
    assert dict(counts(guard).would_reject) == {"CONCURRENCY_LIMIT": 2, "RATE_LIMIT_EXCEEDED": 1}


@virtual_time
async def test_what_would_wait_is_counted_and_runs_at_once_and_consumes_its_rate() -> None:
    guard = observing()
    policy = Policy("3/hour", Concurrency(1, queue_timeout=5))
    running = [await hold(guard, "x", policy) for _ in range(3)]
    assert [each.began for each in running] == [0, 0, 0]
    assert (counts(guard).would_wait, dict(counts(guard).would_reject)) == (2, {})
    for each in running:
        await each.end()
    await once(guard, "x", policy)
    assert dict(counts(guard).would_reject) == {"RATE_LIMIT_EXCEEDED": 1}


@virtual_time
async def test_everybody_holds_their_slots_over_the_limit_if_need_be() -> None:
    guard = observing()
    policy = Policy(concurrency=1)
    first, second, third = [await hold(guard, "x", policy) for _ in range(3)]
    await first.end()
    await second.end()
    # The third ran over the limit, and the slot is still taken.
    await once(guard, "x", policy)
    assert dict(counts(guard).would_reject) == {"CONCURRENCY_LIMIT": 3}
    await third.end()
    await once(guard, "x", policy)
    assert dict(counts(guard).would_reject) == {"CONCURRENCY_LIMIT": 3}


@virtual_time
async def test_what_would_be_refused_for_its_rate_holds_its_slot_too() -> None:
    guard = observing()
    limited = await hold(guard, "x", Policy("1/hour", Concurrency(1, key="k")))
    await limited.end()
    limited = await hold(guard, "x", Policy("1/hour", Concurrency(1, key="k")))
    await once(guard, "y", Policy(concurrency=Concurrency(1, key="k")))
    assert dict(counts(guard).would_reject) == {"RATE_LIMIT_EXCEEDED": 1, "CONCURRENCY_LIMIT": 1}
    await limited.end()


@pytest.mark.parametrize(("max_queued", "expected"), [(0, (0, {"OVERLOADED": 2})), (9, (2, {}))])
@virtual_time
async def test_admission_lets_everybody_in(max_queued: int, expected: tuple[int, dict[str, int]]) -> None:
    guard = observing(admission=Admission(max_active=2, reserved=0, max_queued=max_queued))
    running = [await hold(guard, "x") for _ in range(4)]
    assert all(each.runs for each in running)
    assert guard.statistics().places == 4
    assert (counts(guard).would_wait, dict(counts(guard).would_reject)) == expected
    for each in running:
        await each.end()


@virtual_time
async def test_a_partition_function_that_fails_refuses_nobody() -> None:
    def broken(_: Call) -> str:
        raise RuntimeError

    guard = observing()
    policy = Policy(RateLimit(1, 60, broken), Concurrency(1, partition_by=broken))
    assert await code_of(once(guard, "x", policy)) == "ok"
    assert dict(counts(guard).would_reject) == {"PARTITION_ERROR": 1}


@virtual_time
async def test_timeouts_are_enforced() -> None:
    guard = observing(default_timeout=2)
    held, own = await hold(guard, "x"), await hold(guard, "y", Policy(timeout=1))
    assert ((await own.refusal()).code, now()) == ("EXECUTION_TIMEOUT", 1)
    assert ((await held.refusal()).code, now()) == ("EXECUTION_TIMEOUT", 2)
    held.let_go()
    own.let_go()
    await settle()


@virtual_time
async def test_a_stopping_server_takes_no_calls() -> None:
    guard = observing()
    async with guard:
        running = await hold(guard, "x")
        closing = asyncio.create_task(guard.__aexit__(None, None, None))
        await settle()
        assert await code_of(once(guard, "x")) == "OVERLOADED"
        await running.end()
        await closing
        await guard.__aenter__()


@virtual_time
async def test_a_wait_without_an_end_is_allowed_where_nobody_waits() -> None:
    guard = observing(admission=None)
    policy = Policy(concurrency=Concurrency(1, queue_timeout=None))
    running = [await hold(guard, "x", policy) for _ in range(2)]
    assert counts(guard).would_wait == 1
    for each in running:
        await each.end()


@virtual_time
async def test_nested_calls_are_observed_by_their_own_limits() -> None:
    guard = observing(global_concurrency=1)
    inner, outer = guard.bind("inner", Policy("1/hour")), guard.bind("outer", FREE)

    async def nothing(_: object) -> None: ...

    async def body(run: Any) -> None:
        for _ in range(3):
            await guard.call(inner, Call("inner"), nothing, signal=run.signal, parent=run)

    await guard.call(outer, Call("outer"), body)
    assert dict(counts(guard).would_reject) == {"RATE_LIMIT_EXCEEDED": 2}
