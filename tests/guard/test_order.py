"""The questions of a call, their order, and that a refused call consumes nothing."""

from __future__ import annotations

import asyncio

import pytest

from frontmcp_py.call import Call
from frontmcp_py.policy import Admission, Concurrency, Policy, RateLimit, Throttle
from frontmcp_py.testing import settle, virtual_time
from tests.guard.support import FREE, code_of, hold, new_guard, now, once, refusal

ONE_PLACE = Admission(max_active=2, reserved=1, max_queued=0)


# ------------------------------------------------------------------------------- which refusal is reported


@virtual_time
async def test_a_stopping_server_says_so_before_anything_else() -> None:
    guard = new_guard(Throttle(admission=ONE_PLACE), shutdown_grace=10)
    policy = Policy("1/hour", 1)
    async with guard:
        running = await hold(guard, "x", policy)
        closing = asyncio.create_task(guard.__aexit__(None, None, None))
        await settle()
        error = await refusal(once(guard, "x", policy))
        assert str(error) == "Server overloaded: shutting down. Try again shortly."
        assert (error.code, error.scope) == ("OVERLOADED", "admission")
        await running.end()
        await closing
        await guard.__aenter__()


@virtual_time
async def test_too_often_comes_before_slots_and_admission() -> None:
    guard = new_guard(Throttle(admission=ONE_PLACE))
    policy = Policy("1/hour", 1)
    running = await hold(guard, "x", policy)
    assert (await refusal(once(guard, "x", policy))).code == "RATE_LIMIT_EXCEEDED"
    await running.end()


@virtual_time
async def test_slots_come_before_admission() -> None:
    guard = new_guard(Throttle(admission=ONE_PLACE))
    policy = Policy(concurrency=1)
    running = await hold(guard, "x", policy)
    assert (await refusal(once(guard, "x", policy))).code == "CONCURRENCY_LIMIT"
    assert (await refusal(once(guard, "y"))).code == "OVERLOADED"
    await running.end()


@virtual_time
async def test_the_global_slot_comes_before_the_tools_own() -> None:
    guard = new_guard(Throttle(global_concurrency=2))
    mutex = Policy(concurrency=1)
    running = await hold(guard, "x", mutex)
    assert (await refusal(once(guard, "x", mutex))).scope == "tool"
    also = await hold(guard, "y")
    assert (await refusal(once(guard, "x", mutex))).scope == "global"
    await running.end()
    await also.end()


@virtual_time
async def test_a_call_that_may_wait_for_its_slot_needs_a_place_in_the_queue() -> None:
    guard = new_guard(Throttle(admission=Admission(max_active=4, reserved=0, max_queued=1)))
    policy = Policy(concurrency=Concurrency(1, queue_timeout=5))
    running, waiting = await hold(guard, "x", policy), await hold(guard, "x", policy)
    assert (await refusal(once(guard, "x", policy))).code == "OVERLOADED"
    await running.end()
    await waiting.end()


# -------------------------------------------------------------------------- a refused call consumes nothing


@virtual_time
async def test_a_call_without_a_slot_is_not_counted() -> None:
    guard = new_guard(Throttle(global_rate_limit="3/hour"))
    policy = Policy("3/hour", 1)
    running = await hold(guard, "x", policy)
    for _ in range(10):
        assert await code_of(once(guard, "x", policy)) == "CONCURRENCY_LIMIT"
    await running.end()
    assert [await code_of(once(guard, "x", policy)) for _ in range(3)] == ["ok", "ok", "RATE_LIMIT_EXCEEDED"]


@virtual_time
async def test_a_call_without_a_place_is_not_counted_and_takes_no_slot() -> None:
    guard = new_guard(Throttle(admission=ONE_PLACE))
    policy = Policy("2/hour", Concurrency(1, key="k"))
    running = await hold(guard, "y")
    for _ in range(5):
        assert await code_of(once(guard, "x", policy)) == "OVERLOADED"
    await running.end()
    assert [await code_of(once(guard, "x", policy)) for _ in range(3)] == ["ok", "ok", "RATE_LIMIT_EXCEEDED"]


@virtual_time
async def test_a_call_that_comes_too_often_takes_no_slot_and_no_place() -> None:
    guard = new_guard(Throttle(admission=ONE_PLACE))
    often = Policy("1/hour", Concurrency(1, key="k"))
    await once(guard, "x", often)
    assert await code_of(once(guard, "x", often)) == "RATE_LIMIT_EXCEEDED"
    assert guard.statistics().places == 0
    assert await code_of(once(guard, "y", Policy(concurrency=Concurrency(1, key="k")))) == "ok"


@virtual_time
async def test_a_call_takes_all_its_slots_or_none() -> None:
    guard = new_guard()
    both = Policy(concurrency=[Concurrency(1, key="a"), Concurrency(1, key="b")])
    only_a, only_b = (Policy(concurrency=Concurrency(1, key=key)) for key in "ab")
    holder = await hold(guard, "b", only_b)
    assert await code_of(once(guard, "both", both)) == "CONCURRENCY_LIMIT"
    assert await code_of(once(guard, "a", only_a)) == "ok"
    await holder.end()


@pytest.mark.parametrize("queue_timeout", [0, 3])
@virtual_time
async def test_a_call_whose_wait_ends_without_a_slot_is_not_counted(queue_timeout: float) -> None:
    guard = new_guard()
    policy = Policy("2/hour", Concurrency(1, queue_timeout=queue_timeout))
    running = await hold(guard, "x", policy)
    await refusal(once(guard, "x", policy))
    assert now() == queue_timeout
    await running.end()
    assert [await code_of(once(guard, "x", policy)) for _ in range(2)] == ["ok", "RATE_LIMIT_EXCEEDED"]


@virtual_time
async def test_a_call_that_is_cancelled_while_it_waits_is_not_counted() -> None:
    guard = new_guard()
    policy = Policy("2/hour", Concurrency(1, queue_timeout=3))
    running, waiting = await hold(guard, "x", policy), await hold(guard, "x", policy)
    waiting.task.cancel()
    await running.end()
    assert [await code_of(once(guard, "x", policy)) for _ in range(2)] == ["ok", "RATE_LIMIT_EXCEEDED"]


# ------------------------------------------------------------------ a call that waits is counted at its turn


@virtual_time
async def test_a_call_that_waits_holds_nothing() -> None:
    guard = new_guard(Throttle(admission=Admission(max_active=2, reserved=0)))
    waits = Policy(concurrency=[Concurrency(1, key="busy", queue_timeout=9), Concurrency(2, key="free")])
    running = await hold(guard, "busy", Policy(concurrency=Concurrency(1, key="busy")))
    waiting = await hold(guard, "x", waits)
    assert waiting.waits
    assert guard.statistics().places == 1
    # One of two places of the other slot is kept for the first of its line, but the admission place is not.
    also = await hold(guard, "free", Policy(concurrency=Concurrency(2, key="free")))
    assert also.runs
    await running.end()
    await also.end()
    await waiting.end()


@virtual_time
async def test_a_call_is_counted_in_the_window_in_which_it_starts() -> None:
    guard = new_guard()
    policy = Policy("1/minute", Concurrency(1, key="k", queue_timeout=100))
    await asyncio.sleep(50)
    running = await hold(guard, "other", Policy(concurrency=Concurrency(1, key="k")))
    waiting = await hold(guard, "x", policy)
    await asyncio.sleep(20)
    await running.end()
    await settle()
    assert waiting.began == 70
    error = await refusal(once(guard, "x", policy))
    assert error.retry_after == 50
    await waiting.end()


@virtual_time
async def test_a_call_whose_rate_has_run_out_is_refused_at_its_turn_and_not_earlier() -> None:
    guard = new_guard()
    policy = Policy("2/minute", Concurrency(1, queue_timeout=100))
    first = await hold(guard, "x", policy)
    second, third = await hold(guard, "x", policy), await hold(guard, "x", policy)
    await asyncio.sleep(10)
    await first.end()
    await settle()
    # Two have started, so nothing is left for the third. The window may still renew.
    assert (second.began, third.waits) == (10, True)
    await asyncio.sleep(10)
    await second.end()
    error = await third.refusal()
    assert now() == 20
    assert (error.code, error.limit, error.retry_after) == ("RATE_LIMIT_EXCEEDED", 2, 40)


@virtual_time
async def test_a_call_whose_rate_has_renewed_by_its_turn_starts() -> None:
    guard = new_guard()
    policy = Policy("2 per 10 seconds", Concurrency(1, queue_timeout=100))
    first = await hold(guard, "x", policy)
    second, third = await hold(guard, "x", policy), await hold(guard, "x", policy)
    await first.end()
    await asyncio.sleep(10)
    await second.end()
    await settle()
    assert third.began == 10
    await third.end()


@virtual_time
async def test_when_many_turns_are_refused_the_next_one_that_may_start_does_at_once() -> None:
    guard = new_guard()
    shared = Concurrency(1, key="k", queue_timeout=100)
    limited, free = Policy("2/hour", shared), Policy(concurrency=shared)
    running = await hold(guard, "limited", limited)
    waiting = [await hold(guard, "limited", limited) for _ in range(4)]
    behind = await hold(guard, "free", free)
    await asyncio.sleep(1)
    await running.end()
    await settle()
    assert [each.runs for each in waiting] == [True, False, False, False]
    await waiting[0].end()
    await settle()
    assert behind.began == 1
    assert [(await each.refusal()).code for each in waiting[1:]] == ["RATE_LIMIT_EXCEEDED"] * 3
    await behind.end()
    counts = guard.statistics().counts
    assert (counts.accepted, counts.started, counts.rejected["RATE_LIMIT_EXCEEDED"]) == (6, 3, 3)


# ------------------------------------------------------------------------------------- all in one step


@virtual_time
async def test_of_many_calls_at_once_exactly_as_many_start_as_may() -> None:
    guard = new_guard()
    policy = Policy("5/minute")
    codes = await asyncio.gather(*(code_of(once(guard, "x", policy)) for _ in range(50)))
    assert codes.count("ok") == 5
    assert codes.count("RATE_LIMIT_EXCEEDED") == 45


@virtual_time
async def test_a_call_that_can_start_does_so_without_a_turn_of_the_loop() -> None:
    guard = new_guard(Throttle(global_rate_limit="9/minute", global_concurrency=9))
    policy = Policy(RateLimit(5, 60, "user_id"), Concurrency(2, partition_by="user_id"), on_cancel="cancel")
    began: list[str] = []

    async def body() -> None:
        began.append("body")

    call = guard.run(Call("x"), policy, body)
    with pytest.raises(StopIteration):
        call.send(None)
    assert began == ["body"]


@virtual_time
async def test_calls_without_limits_pass() -> None:
    guard = new_guard()
    assert [await code_of(once(guard, "x", FREE)) for _ in range(100)] == ["ok"] * 100
