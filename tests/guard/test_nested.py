from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from frontmcp_py.call import Call, Caller
from frontmcp_py.errors import Cancelled, GuardError
from frontmcp_py.guard import Guard, Plan, Run
from frontmcp_py.policy import Admission, Concurrency, Policy, RateLimit, Throttle
from frontmcp_py.signal import AbortSignal
from frontmcp_py.testing import settle, virtual_time
from tests.guard.support import FREE, code_of, hold, inside, new_guard, now, once, refusal
from tests.reconcile import adds_up

Body = Callable[[Run], Awaitable[Any]]


async def nothing(_: Run) -> float:
    return now()


def waits(seconds: float) -> Body:
    async def body(_: Run) -> float:
        await asyncio.sleep(seconds)
        return now()

    return body


async def within(guard: Guard, body: Body, policy: Policy = FREE, **call: Any) -> Any:
    """A call of the tool `outer`, in which `body` makes others."""
    return await guard.call(guard.bind("outer", policy), Call("outer", **call), body)


# --------------------------------------------------------------------------------- which limits apply to it


@virtual_time
async def test_the_callees_own_limits_apply() -> None:
    guard = new_guard()
    inner = guard.bind("inner", Policy("1/hour", timeout=2))

    async def body(run: Run) -> list[str]:
        first = await code_of(inside(guard, run, inner, waits(5)))
        return [first, await code_of(inside(guard, run, inner, nothing))]

    assert await within(guard, body) == ["EXECUTION_TIMEOUT", "RATE_LIMIT_EXCEEDED"]
    assert now() == 2
    await asyncio.sleep(3)


@virtual_time
async def test_the_defaults_apply_where_the_callee_has_no_limits_of_its_own() -> None:
    guard = new_guard(Throttle(default_rate_limit="1/hour", default_timeout=2))
    inner = guard.bind("inner", FREE)

    async def body(run: Run) -> list[str]:
        first = await code_of(inside(guard, run, inner, waits(5)))
        return [first, await code_of(inside(guard, run, inner, nothing))]

    outer = Policy(rate_limit=None, timeout=None)
    assert await within(guard, body, outer) == ["EXECUTION_TIMEOUT", "RATE_LIMIT_EXCEEDED"]
    await asyncio.sleep(3)


@virtual_time
async def test_global_limits_and_admission_count_the_outer_call_only() -> None:
    guard = new_guard(
        Throttle(
            global_rate_limit="1/hour",
            global_concurrency=1,
            admission=Admission(max_active=2, reserved=1, max_queued=0),
        )
    )
    inner = guard.bind("inner", FREE)

    async def body(run: Run) -> int:
        for _ in range(5):
            await inside(guard, run, inner, nothing)
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(inside(guard, run, inner, waits(1)))
            await asyncio.sleep(0.5)
            statistics = guard.statistics()
            assert statistics.places == 1
            return statistics.active

    # Nested calls are counted like others, so more may be active than there are places.
    assert await within(guard, body) == 6
    assert guard.statistics().counts.started == 11
    assert await code_of(once(guard, "other")) == "RATE_LIMIT_EXCEEDED"


@virtual_time
async def test_it_is_made_under_the_parents_caller() -> None:
    guard = new_guard()
    inner = guard.bind("inner", Policy(RateLimit(1, 60, "user_id")))

    async def body(run: Run) -> str:
        return await code_of(inside(guard, run, inner, nothing))

    for name in ("ann", "bob"):
        assert await within(guard, body, caller=Caller(user_id=name)) == "ok"
        assert await within(guard, body, caller=Caller(user_id=name)) == "RATE_LIMIT_EXCEEDED"


@virtual_time
async def test_a_refusal_names_the_callee() -> None:
    guard = new_guard()
    inner = guard.bind("inner", Policy(concurrency=1))
    running = await hold(guard, "inner", Policy(concurrency=1))

    async def body(run: Run) -> GuardError:
        return await refusal(inside(guard, run, inner, nothing))

    assert str(await within(guard, body)) == 'Concurrency limit reached for "inner" (max: 1)'
    await running.end()


# --------------------------------------------------------------------------------------- it passes the line


def pair(a: float = 20, b: float = 20) -> Policy:
    return Policy(
        concurrency=[Concurrency(1, key="a", queue_timeout=a), Concurrency(1, key="b", queue_timeout=b)]
    )


@virtual_time
async def test_it_starts_where_a_place_is_free_though_others_wait_for_it() -> None:
    guard = new_guard()
    only_b = Policy(concurrency=Concurrency(1, key="b"))
    inner = guard.bind("inner", only_b)
    holds_a = await hold(guard, "a", Policy(concurrency=Concurrency(1, key="a")))
    # It waits for a, and keeps b, which is free.
    waiting = await hold(guard, "x", pair())
    assert await code_of(once(guard, "other", only_b)) == "CONCURRENCY_LIMIT"
    assert await within(guard, lambda run: inside(guard, run, inner, nothing)) == 0
    await holds_a.end()
    await waiting.end()


@virtual_time
async def test_when_something_frees_nested_waiters_are_tried_first_in_order_of_arrival() -> None:
    guard = new_guard()
    mutex = Policy(concurrency=Concurrency(1, key="k", queue_timeout=20))
    control = Policy(concurrency=Concurrency(1, key="k", queue_timeout=20), priority="control")
    inner = guard.bind("inner", mutex)
    running = await hold(guard, "x", mutex)
    normal, controls = await hold(guard, "x", mutex), await hold(guard, "c", control)
    began: list[tuple[str, float]] = []

    def remember(name: str) -> Body:
        async def body(_: Run) -> None:
            began.append((name, now()))
            await asyncio.sleep(1)

        return body

    async def parent(name: str) -> None:
        await within(guard, lambda run: inside(guard, run, inner, remember(name)))

    async with asyncio.TaskGroup() as group:
        group.create_task(parent("first"))
        await settle()
        group.create_task(parent("second"))
        await settle()
        assert guard.statistics().waiting == 4
        await running.end()
    await settle()
    assert began == [("first", 0), ("second", 1)]
    assert (controls.began, normal.began) == (2, None)
    await controls.end()
    await normal.end()


@virtual_time
async def test_a_nested_waiter_keeps_no_place() -> None:
    guard = new_guard()
    inner = guard.bind("inner", pair())
    holds_a = await hold(guard, "a", Policy(concurrency=Concurrency(1, key="a")))
    outer = asyncio.create_task(within(guard, lambda run: inside(guard, run, inner, nothing)))
    await settle()
    assert guard.statistics().waiting == 1
    assert await code_of(once(guard, "b", Policy(concurrency=Concurrency(1, key="b")))) == "ok"
    await holds_a.end()
    await outer


@virtual_time
async def test_a_nested_waiter_is_not_counted_by_the_limits_own_queue() -> None:
    guard = new_guard()
    narrow = Policy(concurrency=Concurrency(1, key="k", queue_timeout=20, max_queued=1))
    inner = guard.bind("inner", narrow)
    running = await hold(guard, "x", narrow)
    outer = asyncio.create_task(within(guard, lambda run: inside(guard, run, inner, nothing)))
    await settle()
    # It stands in no line, so there is still one place in it.
    waiting = await hold(guard, "x", narrow)
    assert waiting.waits
    await running.end()
    await waiting.end()
    await outer


# ------------------------------------------------------------------------------------------ waits for itself


@virtual_time
async def test_a_call_that_would_wait_for_its_own_parent_is_refused_at_once() -> None:
    guard = new_guard()
    mutex = Policy(concurrency=Concurrency(1, key="k", queue_timeout=None))
    inner = guard.bind("inner", mutex)

    async def body(run: Run) -> GuardError:
        return await refusal(inside(guard, run, inner, nothing))

    error = await within(guard, body, mutex)
    assert now() == 0
    assert (error.code, error.scope, error.limit) == ("CONCURRENCY_LIMIT", "key", 1)
    assert str(error) == 'Concurrency limit reached for "inner" (max: 1): it would wait for itself'


@virtual_time
async def test_so_is_one_that_would_wait_for_its_grandparent() -> None:
    guard = new_guard()
    mutex = Policy(concurrency=Concurrency(1, queue_timeout=None))
    plans: dict[str, Plan] = {"outer": guard.bind("outer", mutex), "middle": guard.bind("middle", FREE)}

    async def grandchild(run: Run) -> GuardError:
        return await refusal(inside(guard, run, plans["outer"], nothing))

    async def child(run: Run) -> Any:
        return await inside(guard, run, plans["middle"], grandchild)

    error = await guard.call(plans["outer"], Call("outer"), child)
    assert str(error) == 'Concurrency limit reached for "outer" (max: 1): it would wait for itself'


@virtual_time
async def test_a_tool_that_calls_itself_does_so_while_slots_are_free() -> None:
    guard = new_guard()
    plan = guard.bind("x", Policy(concurrency=Concurrency(3, queue_timeout=20)))
    deepest = 0

    async def body(run: Run) -> str:
        nonlocal deepest
        deepest += 1
        return await code_of(inside(guard, run, plan, body))

    await guard.call(plan, Call("x"), body)
    assert deepest == 3


@virtual_time
async def test_it_does_not_wait_for_itself_when_somebody_else_holds_the_slot() -> None:
    guard = new_guard()
    mutex = Policy(concurrency=Concurrency(1, key="k", queue_timeout=20))
    inner = guard.bind("inner", mutex)
    running = await hold(guard, "x", mutex)
    outer = asyncio.create_task(within(guard, lambda run: inside(guard, run, inner, nothing)))
    await asyncio.sleep(3)
    await running.end()
    assert await outer == 3


# ------------------------------------------------------------------------------------------ a bounded wait


@pytest.mark.parametrize(
    ("queue_timeout", "code", "waited"),
    [(0, "CONCURRENCY_LIMIT", 0), (4, "QUEUE_TIMEOUT", 4), (7, "QUEUE_TIMEOUT", 7), (20, "OVERLOADED", 7)],
)
@virtual_time
async def test_its_wait_is_bounded_by_admissions(queue_timeout: float, code: str, waited: float) -> None:
    guard = new_guard(Throttle(admission=Admission(max_active=9, reserved=0, queue_timeout=7)))
    mutex = Policy(concurrency=Concurrency(1, key="k", queue_timeout=queue_timeout))
    inner = guard.bind("inner", mutex)
    running = await hold(guard, "x", mutex)
    assert await within(guard, lambda run: code_of(inside(guard, run, inner, nothing))) == code
    assert now() == waited
    await running.end()


@virtual_time
async def test_its_wait_is_bounded_by_30_seconds_where_admission_is_off() -> None:
    guard = new_guard(Throttle(admission=None))
    mutex = Policy(concurrency=Concurrency(1, key="k", queue_timeout=1000))
    inner = guard.bind("inner", mutex)
    running = await hold(guard, "x", mutex)
    error = await within(guard, lambda run: refusal(inside(guard, run, inner, nothing)))
    assert (now(), error.code) == (30, "OVERLOADED")
    await running.end()


@virtual_time
async def test_it_is_refused_when_the_queue_is_full_and_counts_in_it() -> None:
    guard = new_guard(Throttle(admission=Admission(max_active=9, reserved=0, max_queued=1)))
    mutex = Policy(concurrency=Concurrency(1, key="k", queue_timeout=20))
    inner = guard.bind("inner", mutex)
    running, waiting = await hold(guard, "x", mutex), await hold(guard, "x", mutex)
    assert await within(guard, lambda run: code_of(inside(guard, run, inner, nothing))) == "OVERLOADED"
    waiting.task.cancel()
    outer = asyncio.create_task(within(guard, lambda run: inside(guard, run, inner, nothing)))
    await settle()
    assert await code_of(once(guard, "x", mutex)) == "OVERLOADED"
    await running.end()
    await outer


# --------------------------------------------------------------------------------------- the parent's abort


@virtual_time
async def test_the_parents_deadline_aborts_it() -> None:
    guard = new_guard()
    inner = guard.bind("inner", FREE)
    heard: list[tuple[float, Exception | None]] = []

    async def child(run: Run) -> None:
        await run.signal.wait()
        heard.append((now(), run.signal.reason))

    async def body(run: Run) -> str:
        return await code_of(inside(guard, run, inner, child))

    assert await code_of(within(guard, body, Policy(timeout=2))) == "EXECUTION_TIMEOUT"
    await settle()
    [(when, reason)] = heard
    assert when == 2
    assert isinstance(reason, Cancelled)
    assert reason.tool == "inner"


@virtual_time
async def test_the_parents_cancellation_ends_its_wait() -> None:
    guard, signal = new_guard(), AbortSignal()
    mutex = Policy(concurrency=Concurrency(1, key="k", queue_timeout=20))
    inner = guard.bind("inner", mutex)
    running = await hold(guard, "x", mutex)
    told: list[str] = []

    async def body(run: Run) -> None:
        told.append(await code_of(inside(guard, run, inner, nothing)))

    task = asyncio.create_task(guard.call(guard.bind("outer", FREE), Call("outer"), body, signal=signal))
    await asyncio.sleep(1)
    signal.abort()
    assert await code_of(task) == "CANCELLED"
    await settle()
    assert (told, now()) == (["CANCELLED"], 1)
    assert guard.statistics().waiting == 0
    adds_up(guard)
    await running.end()


@virtual_time
async def test_a_call_made_after_the_abort_never_starts() -> None:
    guard = new_guard()
    inner = guard.bind("inner", FREE)
    told: list[str] = []

    async def body(run: Run) -> None:
        await asyncio.sleep(2)
        told.append(await code_of(inside(guard, run, inner, nothing)))

    await refusal(within(guard, body, Policy(timeout=1)))
    await asyncio.sleep(1)
    assert told == ["CANCELLED"]
    assert guard.statistics().tools["inner"].started == 0


@virtual_time
async def test_its_own_timeout_leaves_the_parent_running() -> None:
    guard = new_guard()
    inner = guard.bind("inner", Policy(timeout=1))

    async def body(run: Run) -> tuple[str, bool]:
        code = await code_of(inside(guard, run, inner, waits(3)))
        return code, run.signal.aborted

    assert await within(guard, body, Policy(timeout=5)) == ("EXECUTION_TIMEOUT", False)
    await asyncio.sleep(3)


# ----------------------------------------------------------------------------------------- while it drains


@virtual_time
async def test_it_is_allowed_while_the_server_stops() -> None:
    guard = new_guard(shutdown_grace=10)
    inner = guard.bind("inner", FREE)

    async def body(run: Run) -> float:
        await asyncio.sleep(3)
        return float(await inside(guard, run, inner, nothing))

    async with guard:
        outer = asyncio.create_task(within(guard, body))
        await settle()
    assert now() == 3
    assert await outer == 3


@virtual_time
async def test_so_is_waiting_for_a_slot() -> None:
    guard = new_guard(shutdown_grace=10)
    mutex = Policy(concurrency=Concurrency(1, key="k", queue_timeout=20))
    inner = guard.bind("inner", mutex)
    async with guard:
        running = await hold(guard, "x", mutex)
        waiting = await hold(guard, "x", mutex)
        outer = asyncio.create_task(within(guard, lambda run: inside(guard, run, inner, nothing)))
        await settle()
        asyncio.get_running_loop().call_later(4, running.let_go)
    assert await outer == 4
    assert (await waiting.refusal()).code == "OVERLOADED"
    await running.task


@virtual_time
async def test_in_the_end_its_wait_is_cancelled_with_the_parent() -> None:
    guard = new_guard(shutdown_grace=2)
    mutex = Policy(concurrency=Concurrency(1, key="k", queue_timeout=20))
    inner = guard.bind("inner", mutex)
    async with guard:
        running = await hold(guard, "x", mutex)
        outer = asyncio.create_task(within(guard, lambda run: inside(guard, run, inner, nothing)))
        await settle()
    assert now() == 2
    assert await code_of(outer) == "OVERLOADED"
    assert (await running.refusal()).code == "OVERLOADED"
    adds_up(guard)
