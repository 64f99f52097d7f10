"""One limit over several instances: what a store that they share decides, and what its callers see of it.

Two guards in this process are two instances; where one of them has to stand still, they are processes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from frontmcp_py import (
    AbortSignal,
    Admission,
    Call,
    Caller,
    Concurrency,
    ConcurrencyLimit,
    Guard,
    GuardError,
    Overloaded,
    Policy,
    QueueTimeout,
    RateLimitExceeded,
    Timeout,
)
from frontmcp_py.guard import Run
from tests.cases.desk import turn_until
from tests.fault_proxy import FaultProxy
from tests.guard.support import FREE, Held, code_of, inside, once, refusal
from tests.instances import (
    asked,
    asks,
    counted,
    every_key_ends,
    held,
    in_line,
    instance,
    instances,
    rate,
    slot,
)
from tests.servers import Valkey, eventually

OpenInstance = Callable[..., Any]


@pytest.fixture
async def open_instance(valkey: Valkey) -> AsyncIterator[OpenInstance]:
    """Opens instances; when the test is over, nothing of theirs is held or waits in the store."""
    async with AsyncExitStack() as stack:

        async def open_instance(url: str | None = None, **options: Any) -> Guard:
            return await stack.enter_async_context(instance(url or valkey.url, **options))

        yield open_instance
    assert (held(valkey), in_line(valkey)) == (0, 0)
    every_key_ends(valkey)


@pytest.fixture
async def proxy(valkey: Valkey) -> AsyncIterator[FaultProxy]:
    """What stands between the instances and the store."""
    async with FaultProxy(valkey) as proxy:
        yield proxy


async def begins(call: Held) -> Held:
    """Wait until a call runs."""
    await eventually(lambda: call.runs, f"the call begins: {call.task}")
    return call


async def hold(guard: Guard, tool: str = "tool", policy: Policy = FREE, **options: Any) -> Held:
    """A call that runs until it is let go."""
    return await begins(Held(guard, tool, policy, **options))


async def line_up(guard: Guard, tool: str = "tool", policy: Policy = FREE, **options: Any) -> Held:
    """A call that stands in line."""
    before = guard.statistics().waiting
    call = Held(guard, tool, policy, **options)
    await eventually(lambda: guard.statistics().waiting > before, "the call waits")
    return call


# ------------------------------------------------------------------------------------------------ one limit


async def test_five_calls_sent_to_two_instances_in_turn_let_two_through(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance()
    twice = Policy(rate_limit=rate(2))
    outcomes = [await code_of(once(each, "export", twice)) for each in (a, b, a, b, a)]
    assert outcomes == ["ok", "ok", *["RATE_LIMIT_EXCEEDED"] * 3]


@pytest.mark.parametrize("strategy", ["moving-window", "sliding-window"])
async def test_every_strategy_is_counted_over_all_instances(
    open_instance: OpenInstance, strategy: str
) -> None:
    a, b = await open_instance(), await open_instance()
    policy = Policy(rate_limit={"max_requests": 3, "window": "300d", "strategy": strategy})
    outcomes = [await code_of(once(each, "x", policy)) for each in (a, b, a, b)]
    assert outcomes == ["ok", "ok", "ok", "RATE_LIMIT_EXCEEDED"]


async def test_a_slot_that_one_instance_has_taken_is_not_free_on_another(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance()
    mutex = slot(1, 0)
    running = await hold(a, "x", mutex)
    error = await refusal(once(b, "x", mutex))
    assert isinstance(error, ConcurrencyLimit)
    assert (error.limit, error.scope, error.waits_for_itself) == (1, "tool", False)
    assert "errorId" in error.meta()
    assert await code_of(once(b, "y", mutex)) == "ok", "another tool has a slot of its own"
    await running.end()
    assert await code_of(once(b, "x", mutex)) == "ok"


async def test_tools_that_name_a_key_share_it_over_all_instances(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance()
    running = [await hold(a, "x", slot(2, 0, key="shell")), await hold(b, "y", slot(2, 0, key="shell"))]
    error = await refusal(once(a, "z", slot(2, 0, key="shell")))
    assert (error.code, error.limit, error.scope) == ("CONCURRENCY_LIMIT", 2, "key")
    for each in running:
        await each.end()


async def test_global_limits_are_of_all_instances_together(open_instance: OpenInstance) -> None:
    limits = {"global_rate_limit": rate(4), "global_concurrency": Concurrency(1)}
    a, b = await open_instance(**limits), await open_instance(**limits)
    running = await hold(a, "x")
    error = await refusal(once(b, "y"))
    assert (error.code, error.limit, error.scope) == ("CONCURRENCY_LIMIT", 1, "global")
    assert await code_of(once(b, "y", Policy(priority="control"))) == "ok", "control calls are exempt"
    await running.end()
    assert [await code_of(once(each, "y")) for each in (b, a, b)] == ["ok"] * 3
    error = await refusal(once(a, "x"))
    assert isinstance(error, RateLimitExceeded)
    assert (error.limit, error.scope) == (4, "global")


async def test_each_subject_of_a_partition_has_a_limit_of_its_own(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance()
    policy = Policy({"max_requests": 2, "window": "300d", "partition_by": "user_id"})
    mutex = slot(1, 0, partition_by="user_id")
    ann, ben = Caller(user_id="ann"), Caller(user_id="ben|1:")
    for caller in (ann, ben):
        outcomes = [await code_of(once(each, "x", policy, caller=caller)) for each in (a, b, a)]
        assert outcomes == ["ok", "ok", "RATE_LIMIT_EXCEEDED"]
    running = [await hold(a, "y", mutex, caller=ann), await hold(b, "y", mutex, caller=ben)]
    assert await code_of(once(b, "y", mutex, caller=ann)) == "CONCURRENCY_LIMIT"
    assert await code_of(once(a, "y", mutex, caller=ben)) == "CONCURRENCY_LIMIT"
    for each in running:
        await each.end()


async def test_tools_limits_and_numbers_do_not_share_a_count(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance()
    assert [await code_of(once(a, "x", Policy(rate(2)))) for _ in range(3)][2] == "RATE_LIMIT_EXCEEDED"
    assert await code_of(once(b, "y", Policy(rate(2)))) == "ok"
    # Its numbers were changed: it begins anew.
    assert [await code_of(once(b, "x", Policy(rate(3)))) for _ in range(4)][2:] == [
        "ok",
        "RATE_LIMIT_EXCEEDED",
    ]


async def test_deployments_with_other_prefixes_share_nothing(open_instance: OpenInstance) -> None:
    a, b = await open_instance(key_prefix="one"), await open_instance(key_prefix="two")
    running = await hold(a, "x", slot(1, 0, rate_limit=rate(1)))
    assert await code_of(once(b, "x", slot(1, 0, rate_limit=rate(1)))) == "ok"
    await running.end()


async def test_a_call_takes_all_its_slots_and_counts_or_none(
    open_instance: OpenInstance, valkey: Valkey
) -> None:
    a, b = await open_instance(), await open_instance()
    both = Policy(rate(10), [Concurrency(1, key="A"), Concurrency(1, key="B")])
    running = await hold(b, "b", slot(1, 0, key="B"))
    assert await code_of(once(a, "x", both)) == "CONCURRENCY_LIMIT"
    assert counted(valkey) == 0, "a refused call consumes nothing"
    assert await code_of(once(b, "a", slot(1, 0, key="A"))) == "ok", "A was not taken"
    await running.end()
    assert await code_of(once(a, "x", both)) == "ok"
    assert counted(valkey) == 1


async def test_of_several_limits_without_room_the_longest_wait_is_told(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance()
    shorter = {"max_requests": 2, "window": "100d", "strategy": "moving-window"}
    longer = {"max_requests": 3, "window": "300d", "strategy": "moving-window"}
    policy = Policy([shorter, longer, shorter | {"window": "50d"}])
    for each in (a, b):
        await once(each, "x", policy)
    error = await refusal(once(a, "x", policy))
    assert isinstance(error, RateLimitExceeded)
    # The limit of three has room; of the other two, this one has it last.
    assert error.retry_after is not None
    assert error.retry_after == pytest.approx(100 * 86400, abs=60)
    assert (error.limit, error.scope) == (2, "tool")
    assert error.meta()["retryAfterMs"] == round(error.retry_after * 1000)


# ---------------------------------------------------------------------------------------------- taking turns


async def test_calls_start_in_the_order_they_came_whatever_instance_they_came_to(
    open_instance: OpenInstance,
) -> None:
    a, b = await open_instance(), await open_instance()
    running = await hold(a, "x", slot())
    waiting = [await line_up((b, a)[nth % 2], "x", slot()) for nth in range(6)]
    for each in waiting:
        await running.end()
        running = await begins(each)
        assert [one.runs for one in waiting].count(True) == 1
    await running.end()


async def test_a_freed_slot_is_granted_in_the_release_itself(
    open_instance: OpenInstance, valkey: Valkey
) -> None:
    a, b = await open_instance(), await open_instance()
    running = await hold(a, "x", slot())
    waiting = await line_up(b, "x", slot())
    running.let_go()
    await running.task
    # It is answered only when the store knows, and there the waiter holds the slot by now.
    assert (held(valkey), in_line(valkey)) == (1, 0)
    assert await code_of(once(a, "x", slot(1, 0))) == "CONCURRENCY_LIMIT", "nobody barges"
    await (await begins(waiting)).end()


async def test_a_turn_is_told_and_not_asked_for(open_instance: OpenInstance, proxy: FaultProxy) -> None:
    a, b = await open_instance(), await open_instance(proxy.url, storage_timeout=60, lease=60)
    running = await hold(a, "x", slot())
    waiting = await line_up(b, "x", slot())
    await eventually(lambda: proxy.answered("SUBSCRIBE"))
    # What it asks from now on is not answered: only a message can tell it.
    proxy.hold(asks("renew"))
    running.let_go()
    await begins(waiting)
    proxy.let_go()
    await waiting.end()


@pytest.mark.slow
async def test_a_turn_whose_message_is_lost_is_found_soon(
    open_instance: OpenInstance, proxy: FaultProxy
) -> None:
    a, b = await open_instance(), await open_instance(proxy.url)
    proxy.drop_messages()
    for _ in range(3):
        running = await hold(a, "x", slot())
        waiting = await line_up(b, "x", slot())
        await running.end()
        await (await begins(waiting)).end()
    assert proxy.dropped == 3


async def test_a_turn_that_is_told_before_the_place_in_line_is_known_is_heard(
    open_instance: OpenInstance, proxy: FaultProxy
) -> None:
    a, b = await open_instance(), await open_instance(proxy.url, storage_timeout=60, lease=60)
    await eventually(lambda: proxy.answered("SUBSCRIBE"))
    running = await hold(a, "x", slot())
    proxy.hold(asks("take", "renew"))
    waiting = Held(b, "x", slot())
    await eventually(lambda: proxy.answered(asks("take")) == 1)
    await running.end()
    await eventually(lambda: proxy.messages)
    # The message has overtaken the answer. A renewal could tell, too, but its answer does not come.
    proxy.hold(asks("renew"))
    proxy._pump_all()
    await begins(waiting)
    proxy.let_go()
    await waiting.end()


async def test_control_calls_go_first_on_every_instance(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance()
    running = await hold(a, "x", slot(key="K"))
    normal = await line_up(a, "x", slot(key="K"))
    control = await line_up(b, "c", slot(key="K", priority="control"))
    await running.end()
    await begins(control)
    assert normal.waits
    await control.end()
    await (await begins(normal)).end()


async def test_the_first_in_line_keeps_a_place_that_nobody_behind_it_takes(
    open_instance: OpenInstance,
) -> None:
    a, b = await open_instance(), await open_instance()
    only_a, only_b = slot(2, key="A"), slot(1, key="B")
    both = Policy(
        concurrency=[Concurrency(2, key="A", queue_timeout=9), Concurrency(1, key="B", queue_timeout=9)]
    )
    running = [await hold(a, "a", only_a), await hold(a, "b", only_b)]
    first = await line_up(b, "ab", both)
    # A has one place left, and the first in its line keeps it.
    behind = await line_up(a, "a", only_a)
    assert await code_of(once(b, "a", slot(2, 0, key="A"))) == "CONCURRENCY_LIMIT"
    assert behind.waits
    await running[1].end()
    await begins(first)
    await running[0].end()
    await begins(behind)
    for each in (first, behind):
        await each.end()


async def test_a_rate_that_ran_out_meanwhile_refuses_a_call_at_its_turn_and_the_next_one_has_it(
    open_instance: OpenInstance,
) -> None:
    a, b = await open_instance(), await open_instance()
    running = await hold(a, "x", slot(key="K"))
    waiting = [await line_up(b, "y", slot(key="K", rate_limit=rate(1))) for _ in range(2)]
    last = await line_up(a, "x", slot(key="K"))
    await running.end()
    await (await begins(waiting[0])).end()
    error = await waiting[1].refusal()
    assert isinstance(error, RateLimitExceeded)
    assert (error.limit, error.scope) == (1, "tool")
    await (await begins(last)).end()


async def test_a_wait_ends_with_its_own_time(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance()
    running = await hold(a, "x", slot(key="K"))
    error = await refusal(once(b, "y", slot(1, 0.05, key="K")))
    assert isinstance(error, QueueTimeout)
    assert (error.waited_ms, error.limit, error.scope, error.tool) == (50, 1, "key", "y")
    assert b.statistics().waiting == 0
    await running.end()


async def test_a_wait_ends_with_admissions_time_where_that_is_shorter(open_instance: OpenInstance) -> None:
    admission = Admission(queue_timeout=0.05)
    a, b = await open_instance(admission=admission), await open_instance(admission=admission)
    running = await hold(a, "x", slot(1, None))
    error = await refusal(once(b, "x", slot(1, None)))
    # What its limit says is capped by admission's time, and on a tie the limit's own time counts.
    assert error.code in ("OVERLOADED", "QUEUE_TIMEOUT")
    await running.end()


async def test_how_long_a_call_may_wait_is_fixed_by_what_held_it_up_when_it_came(
    open_instance: OpenInstance,
) -> None:
    a, b = await open_instance(), await open_instance()
    both = Policy(
        concurrency=[Concurrency(1, key="A", queue_timeout=20), Concurrency(1, key="B", queue_timeout=0.01)]
    )
    first = await hold(a, "a", slot(1, key="A"))
    # B has room when it comes, so B's time does not count, not even when B is taken later.
    waiting = await line_up(b, "ab", both)
    await asyncio.sleep(0.05)
    assert waiting.waits
    await first.end()
    await (await begins(waiting)).end()


async def test_the_waiters_of_all_instances_count_against_max_queued(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance()
    policy = slot(1, max_queued=2)
    running = await hold(a, "x", policy)
    waiting = [await line_up(a, "x", policy), await line_up(b, "x", policy)]
    for each in (a, b):
        assert await code_of(once(each, "x", policy)) == "CONCURRENCY_LIMIT"
    await running.end()
    for call in waiting:
        await (await begins(call)).end()


# ------------------------------------------------------------------------------------------------ admission


def tight(most: int = 2, queued: int = 5) -> Admission:
    return Admission(max_active=most, reserved=1, max_queued=queued)


async def test_a_turn_that_meets_a_full_admission_is_passed_on_and_the_call_keeps_its_number(
    open_instance: OpenInstance,
) -> None:
    a, b = await open_instance(), await open_instance(admission=tight())
    running = await hold(a, "x", slot())
    full = await line_up(b, "x", slot())
    busy = await hold(b, "other")
    next_one = await line_up(a, "x", slot())
    last = await line_up(a, "x", slot())
    await running.end()
    # b has no place for its call: the next one in line has its turn.
    await begins(next_one)
    assert full.waits
    await busy.end()
    await eventually(lambda: b.statistics().asking == 0)
    await next_one.end()
    # It came before the last one, and still does.
    await begins(full)
    assert last.waits
    await full.end()
    await (await begins(last)).end()


@pytest.mark.slow
async def test_a_call_that_lacks_a_place_for_longer_than_a_lease_keeps_its_number(
    open_instance: OpenInstance, valkey: Valkey
) -> None:
    a, b = await open_instance(), await open_instance(admission=tight())
    running = await hold(a, "x", slot())
    full = await line_up(b, "x", slot())
    busy = await hold(b, "other")
    next_one = await line_up(a, "x", slot())
    last = await line_up(a, "x", slot())
    await running.end()
    await begins(next_one)
    # The store has forgotten it by then.
    await asyncio.sleep(1.5)
    await busy.end()
    await eventually(lambda: in_line(valkey) == 2)
    await next_one.end()
    await begins(full)
    assert last.waits
    await full.end()
    await (await begins(last)).end()


@pytest.mark.slow
@pytest.mark.parametrize("is_free", [True, False], ids=["the slot is free", "the slot is taken"])
async def test_a_wait_that_ends_while_the_store_is_asked_again_depends_on_its_answer(
    open_instance: OpenInstance, proxy: FaultProxy, is_free: bool
) -> None:
    a, b = await open_instance(), await open_instance(proxy.url, admission=tight())
    running = await hold(a, "x", slot())
    call = await line_up(b, "x", slot(1, 1))
    busy = await hold(b, "other")
    await running.end()
    # Its turn is passed on for want of a place; when it has one, it asks again.
    await eventually(lambda: proxy.answered(asks("pass_on")))
    running = await hold(a, "x", slot())
    if is_free:
        await running.end()
    proxy.forget()
    proxy.hold(asks("take"))
    await busy.end()
    await eventually(lambda: proxy.answered(asks("take")))
    stake = next(iter(b._slots._asking)).stake
    assert stake is not None
    await eventually(lambda: stake.is_overdue, "its time to wait ends meanwhile")
    proxy.let_go()
    if is_free:
        await (await begins(call)).end()
    else:
        error = await call.refusal()
        assert isinstance(error, QueueTimeout)
        assert error.waited_ms == 1000
        await running.end()


async def test_a_call_that_waits_in_line_holds_no_place_in_admission(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance(admission=tight())
    running = await hold(a, "x", slot())
    waiting = [await line_up(b, "x", slot()) for _ in range(3)]
    assert b.statistics().places == 0
    assert await code_of(once(b, "other")) == "ok"
    await running.end()
    for call in waiting:
        await (await begins(call)).end()


async def test_a_call_without_a_place_does_not_ask_the_store(
    open_instance: OpenInstance, proxy: FaultProxy
) -> None:
    b = await open_instance(proxy.url, admission=tight(queued=1))
    policy = Policy(rate(1))
    assert await code_of(once(b, "x", policy)) == "ok"
    busy = await hold(b, "other")
    waiting = await line_up(b, "x", policy)
    before = asked(proxy, "take")
    error = await refusal(once(b, "x", policy))
    # Its rate limit has run out, too: but nobody has asked.
    assert isinstance(error, Overloaded)
    assert asked(proxy, "take") == before
    assert b.health().status == "overloaded"
    await busy.end()
    assert (await waiting.refusal()).code == "RATE_LIMIT_EXCEEDED"


async def test_the_lines_of_the_store_count_in_the_queue_of_the_process(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance(admission=tight(most=10, queued=2))
    running = await hold(a, "x", slot())
    waiting = [await line_up(b, "x", slot()) for _ in range(2)]
    error = await refusal(once(b, "x", slot()))
    assert isinstance(error, Overloaded)
    assert (error.waiting, error.scope) == (2, "admission")
    await running.end()
    for call in waiting:
        await (await begins(call)).end()


async def test_what_is_waited_for_in_the_store_is_in_the_statistics(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance()
    running = await hold(a, "x", slot(key="K"))
    waiting = await line_up(b, "x", slot(key="K"))
    statistics = b.statistics()
    assert (statistics.waiting, statistics.active, statistics.storage, statistics.outages) == (1, 0, "up", 0)
    assert (statistics.keys["K"].waiting, a.statistics().keys["K"].active) == (1, 1)
    assert b.health().status == "busy"
    await running.end()
    await (await begins(waiting)).end()


# ------------------------------------------------------------------------- callers who go, at every moment


def cancelled_by_task(call: Held, signal: AbortSignal) -> None:
    call.task.cancel()


def cancelled_by_signal(call: Held, signal: AbortSignal) -> None:
    signal.abort()


WAYS_TO_GO = pytest.mark.parametrize("go", [cancelled_by_task, cancelled_by_signal])


async def gone(call: Held) -> None:
    """The caller has been answered that its call was cancelled, and it never ran."""
    with pytest.raises((asyncio.CancelledError, GuardError)) as caught:
        await call.task
    assert getattr(caught.value, "code", "CANCELLED") == "CANCELLED"
    assert call.began is None


@WAYS_TO_GO
async def test_a_caller_who_goes_while_the_store_is_asked_leaves_nothing_there(
    open_instance: OpenInstance, proxy: FaultProxy, valkey: Valkey, go: Callable[..., None]
) -> None:
    b = await open_instance(proxy.url)
    await once(b, "x", slot(rate_limit=rate(5)))
    proxy.forget()
    proxy.hold(asks("take"))
    signal = AbortSignal()
    call = Held(b, "x", slot(rate_limit=rate(5)), signal=signal)
    await eventually(lambda: proxy.answered(asks("take")))
    assert (counted(valkey), held(valkey)) == (2, 1), "there it has started"
    go(call, signal)
    await eventually(lambda: (counted(valkey), held(valkey)) == (1, 0), "it is undone")
    proxy.let_go()
    await gone(call)
    assert await code_of(once(b, "x", slot(rate_limit=rate(5)))) == "ok"
    assert b.statistics().counts.cancelled_waiting == 1


@pytest.mark.slow
@WAYS_TO_GO
async def test_a_caller_who_goes_before_its_question_arrives_leaves_nothing_there(
    open_instance: OpenInstance, valkey: Valkey, go: Callable[..., None]
) -> None:
    b = await open_instance()
    policy = slot(rate_limit=rate(5))
    await once(b, "x", policy)
    for turns in range(12):
        signal = AbortSignal()
        call = Held(b, "x", policy, signal=signal)
        for _ in range(turns):
            await asyncio.sleep(0)
        go(call, signal)
        await asyncio.wait((call.task,))
        # One that had started is told to stop, and takes its time.
        call.let_go()
        await eventually(lambda: held(valkey) == 0)
    started = b.statistics().counts.started
    await eventually(lambda: counted(valkey) == started, f"{started} calls are counted")


@WAYS_TO_GO
async def test_a_caller_who_goes_while_it_stands_in_line_leaves_the_line(
    open_instance: OpenInstance, valkey: Valkey, go: Callable[..., None]
) -> None:
    a, b = await open_instance(), await open_instance()
    running = await hold(a, "x", slot())
    signal = AbortSignal()
    call = await line_up(b, "x", slot(), signal=signal)
    behind = await line_up(a, "x", slot())
    go(call, signal)
    await gone(call)
    await eventually(lambda: in_line(valkey) == 1)
    await running.end()
    await (await begins(behind)).end()


@WAYS_TO_GO
async def test_a_turn_that_meets_a_caller_who_has_gone_goes_to_the_next(
    open_instance: OpenInstance, proxy: FaultProxy, valkey: Valkey, go: Callable[..., None]
) -> None:
    a, b = await open_instance(), await open_instance(proxy.url)
    running = await hold(a, "x", slot(rate_limit=rate(9)))
    signal = AbortSignal()
    call = await line_up(b, "x", slot(rate_limit=rate(9)), signal=signal)
    behind = await line_up(a, "x", slot(rate_limit=rate(9)))
    proxy.hold()
    await running.end()
    # The turn is the call's, in the store; b has not heard it.
    assert (held(valkey), in_line(valkey), counted(valkey)) == (1, 1, 2)
    go(call, signal)
    proxy.let_go()
    await gone(call)
    await begins(behind)
    assert counted(valkey) == 2, "the call that never ran is not counted"
    await behind.end()


@pytest.mark.slow
@WAYS_TO_GO
async def test_a_turn_and_its_callers_going_in_one_instant_leave_the_slot_free(
    open_instance: OpenInstance, valkey: Valkey, go: Callable[..., None]
) -> None:
    a, b = await open_instance(), await open_instance()
    for _ in range(20):
        running = await hold(a, "x", slot())
        signal = AbortSignal()
        call = await line_up(b, "x", slot(), signal=signal)
        running.let_go()
        # As soon as b has heard of its turn: its caller has not come back yet to begin.
        await turn_until(lambda: bool(b._slots._called or b.statistics().active))
        go(call, signal)
        await asyncio.wait((call.task,))
        await running.task
        await eventually(lambda: held(valkey) == 0)
    assert b.statistics().active == 0


async def test_a_deadline_ends_the_call_and_the_slot_stays_with_the_work(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance()
    policy = Policy(concurrency=1, timeout=0.02, on_cancel="abort")
    call = Held(a, "x", policy, stubborn=True)
    assert (await call.refusal()).code == "EXECUTION_TIMEOUT"
    assert a.statistics().abandoned == 1
    assert await code_of(once(b, "x", policy)) == "CONCURRENCY_LIMIT"
    call.let_go()
    await eventually(lambda: a.statistics().active == 0)
    await eventually_free(b, "x", policy)


async def eventually_free(guard: Guard, tool: str, policy: Policy) -> None:
    async def is_free() -> bool:
        return await code_of(once(guard, tool, policy)) == "ok"

    await eventually(is_free)


@pytest.mark.slow
async def test_time_spent_in_line_is_not_time_to_run(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance()
    running = await hold(a, "x", slot(key="K"))
    policy = Policy(concurrency=Concurrency(1, key="K", queue_timeout=9), timeout=Timeout(0.5))
    waiting = await line_up(b, "y", policy)
    await asyncio.sleep(0.6)
    await running.end()
    assert await (await begins(waiting)).end() == "done"


async def test_draining_refuses_who_waits_and_gives_back_what_runs(
    open_instance: OpenInstance, valkey: Valkey
) -> None:
    a, b = await open_instance(), await open_instance(shutdown_grace=0.05)
    running = await hold(a, "x", slot())
    waiting = await line_up(b, "x", slot())
    own = await hold(b, "y", slot())
    await b.drain()
    error = await waiting.refusal()
    assert isinstance(error, Overloaded)
    assert error.shutting_down
    assert (await own.refusal()).code == "OVERLOADED"
    await eventually(lambda: (held(valkey), in_line(valkey)) == (1, 0))
    assert await code_of(once(b, "z")) == "OVERLOADED"
    await running.end()


async def test_a_call_that_asks_when_the_server_drains_never_runs(
    open_instance: OpenInstance, proxy: FaultProxy, valkey: Valkey
) -> None:
    b = await open_instance(proxy.url, shutdown_grace=0)
    proxy.hold(asks("take"))
    call = Held(b, "x", slot())
    await eventually(lambda: proxy.answered(asks("take")) >= 1)
    await b.drain()
    proxy.let_go()
    assert (await call.refusal()).code == "OVERLOADED"
    assert call.began is None
    await eventually(lambda: held(valkey) == 0)


# --------------------------------------------------------------------------------------------- nested calls


async def test_a_nested_call_takes_a_shared_slot_and_passes_the_line(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance()
    inner = a.bind("inner", slot(2, key="K"))
    running = await hold(b, "k", slot(2, key="K"))
    both = Policy(
        concurrency=[Concurrency(2, key="K", queue_timeout=9), Concurrency(1, key="L", queue_timeout=9)]
    )
    held_up = await hold(b, "l", slot(1, key="L"))
    first = await line_up(b, "kl", both)

    async def nothing(_: Run) -> str:
        return "nested"

    async def outer(run: Run) -> str:
        return str(await inside(a, run, inner, nothing))

    # One place is free, and kept for the first in line: a nested call looks at what is free.
    assert await a.call(a.bind("outer", FREE), Call("outer"), outer) == "nested"
    await held_up.end()
    await begins(first)
    for each in (first, running):
        await each.end()


async def test_a_nested_call_that_would_wait_for_itself_is_refused_and_says_so(
    open_instance: OpenInstance,
) -> None:
    a = await open_instance()
    plan = a.bind("tool", slot(1))

    async def outer(run: Run) -> GuardError:
        async def inner(_: Run) -> None:
            raise AssertionError

        return await refusal(inside(a, run, plan, inner))

    error = await a.call(plan, Call("tool"), outer)
    assert isinstance(error, ConcurrencyLimit)
    assert error.waits_for_itself


async def test_a_nested_call_waits_for_a_slot_of_another_instance_before_all_others(
    open_instance: OpenInstance,
) -> None:
    a, b = await open_instance(), await open_instance()
    inner = a.bind("inner", slot(1, key="K"))
    running = await hold(b, "k", slot(1, key="K"))
    waiting = await line_up(b, "k", slot(1, key="K"))
    order: list[str] = []

    async def nested(_: Run) -> None:
        order.append("nested")

    async def outer(run: Run) -> None:
        await inside(a, run, inner, nested)

    call = asyncio.create_task(a.call(a.bind("outer", FREE), Call("outer"), outer))
    await eventually(lambda: a.statistics().waiting == 1)
    await running.end()
    await call
    order.append("other")
    await (await begins(waiting)).end()
    assert order == ["nested", "other"]


# --------------------------------------------------------------------------------------------- observe mode


async def test_observed_calls_pass_and_are_counted_against_all_instances(
    open_instance: OpenInstance, valkey: Valkey
) -> None:
    a, b = await open_instance(mode="observe"), await open_instance(mode="observe")
    policy = slot(1, 0, rate_limit=rate(9))
    running = [await hold(a, "x", policy), await hold(b, "x", policy)]
    assert dict(b.statistics().counts.would_reject) == {"CONCURRENCY_LIMIT": 1}
    waiting = await hold(b, "x", slot(1, 5, rate_limit=rate(9)))
    assert b.statistics().counts.would_wait == 1
    # Whoever would be refused consumes no rate; all hold their slots, over the limit.
    assert (held(valkey), counted(valkey)) == (3, 2)
    for each in (*running, waiting):
        await each.end()


@pytest.mark.slow
async def test_what_observed_calls_hold_binds_instances_that_enforce(open_instance: OpenInstance) -> None:
    a, b = await open_instance(mode="observe"), await open_instance()
    running = [await hold(a, "x", slot(1, 0)) for _ in range(2)]
    waiting = await line_up(b, "x", slot(1))
    await running[0].end()
    assert await code_of(once(b, "x", slot(1, 0))) == "CONCURRENCY_LIMIT"
    assert waiting.waits
    await running[1].end()
    await (await begins(waiting)).end()


# --------------------------------------------------------------------------------------- the cost at the wire


async def test_a_caller_may_call_again_as_soon_as_it_is_answered(open_instance: OpenInstance) -> None:
    a, b = await open_instance(), await open_instance()
    for nth in range(20):
        assert await code_of(once((a, b)[nth % 2], "x", slot(1, 0))) == "ok"

    async def fails() -> None:
        raise ZeroDivisionError

    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            await a.run(Call("x"), slot(1, 0), fails)
        assert await code_of(once(b, "x", slot(1, 0))) == "ok"


async def test_a_call_without_limits_never_asks_the_store(
    open_instance: OpenInstance, proxy: FaultProxy
) -> None:
    a = await open_instance(proxy.url)
    for _ in range(20):
        await once(a, "free")
        await once(a, "timed", Policy(timeout=5))
    assert asked(proxy, "take") == asked(proxy, "release") == 0


async def test_a_start_is_one_round_trip_two_after_a_wait_and_an_end_is_one(
    open_instance: OpenInstance, proxy: FaultProxy
) -> None:
    a = await open_instance(proxy.url, global_rate_limit=rate(99), global_concurrency=Concurrency(3))
    policy = slot(1, rate_limit=rate(99))
    # From now on the store knows the scripts.
    await asyncio.gather(once(a, "x", policy), once(a, "x", policy))
    proxy.forget()
    await once(a, "x", policy)
    assert (asked(proxy, "take"), asked(proxy, "release")) == (1, 1)
    assert set(proxy.names()) <= {"EVALSHA"}

    running = await hold(a, "x", policy)
    proxy.forget()
    waiting = await line_up(a, "x", policy)
    await running.end()
    await begins(waiting)
    assert asked(proxy, "take") + asked(proxy, "pass_on") <= 2
    assert asked(proxy, "release") == 1
    await waiting.end()
    assert asked(proxy, "release") == 2


async def test_a_call_with_rates_alone_is_one_round_trip(
    open_instance: OpenInstance, proxy: FaultProxy
) -> None:
    a = await open_instance(proxy.url)
    await once(a, "x", Policy(rate(99)))
    proxy.forget()
    for _ in range(5):
        await once(a, "x", Policy(rate(99)))
    assert (asked(proxy, "take"), asked(proxy, "release")) == (5, 0)


async def test_a_refusal_is_one_round_trip(open_instance: OpenInstance, proxy: FaultProxy) -> None:
    a = await open_instance(proxy.url)
    running = await hold(a, "x", slot(1, 0))
    await once(a, "y", Policy(rate(1)))
    proxy.forget()
    assert await code_of(once(a, "x", slot(1, 0))) == "CONCURRENCY_LIMIT"
    assert await code_of(once(a, "y", Policy(rate(1)))) == "RATE_LIMIT_EXCEEDED"
    assert (asked(proxy, "take"), asked(proxy, "release")) == (2, 0)
    await running.end()


@pytest.mark.slow
async def test_the_leases_of_an_instance_are_renewed_in_one_round_trip(
    open_instance: OpenInstance, proxy: FaultProxy, valkey: Valkey
) -> None:
    a = await open_instance(proxy.url, lease=1)
    running = [await hold(a, f"x{nth}", slot()) for nth in range(10)]
    proxy.forget()
    await eventually(lambda: asked(proxy, "renew") == 2)
    renewals = [command for command in list(proxy.commands) if asks("renew")(command)]
    assert all(int(command.words[7]) == 10 for command in renewals)
    assert held(valkey) == 10
    for each in running:
        await each.end()


# -------------------------------------------------------------------------------------- leases that are lost


@pytest.mark.slow
async def test_work_that_outlasts_its_lease_keeps_its_slot(
    open_instance: OpenInstance, valkey: Valkey
) -> None:
    a, b = await open_instance(), await open_instance()
    running = await hold(a, "x", slot(1, 0))
    for _ in range(5):
        await asyncio.sleep(0.5)
        assert await code_of(once(b, "x", slot(1, 0))) == "CONCURRENCY_LIMIT"
        every_key_ends(valkey)
        assert max(int(valkey.do("PTTL", key)) for key in valkey.do("KEYS", "*")) <= 1000
    await running.end()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["blocked", "stopped"])
async def test_an_instance_that_stood_still_for_longer_than_its_lease_has_lost_its_slots(
    valkey: Valkey, how: str
) -> None:
    with instances(2, valkey.url) as (one, two):
        await one.ready(), await two.ready()
        one.call("A", slot(1, 0))
        await one.said("A", "began")
        if how == "blocked":
            one.block(2.5)
        else:
            one.stop()
        await eventually(lambda: held(valkey) == 0)
        two.call("B", slot(1, 0))
        await two.said("B", "began")
        if how == "stopped":
            one.go_on()
        await one.said("A", "aborted LEASE_LOST")
        # Its late release frees nobody else's slot.
        one.end("A")
        assert await one.answer("A") == "ok"
        one.call("C", slot(1, 0))
        assert await one.answer("C") == "CONCURRENCY_LIMIT"
        assert held(valkey) == 1
        two.end("B")
        assert await two.answer("B") == "ok"


@pytest.mark.slow
async def test_an_instance_that_stood_still_for_less_than_its_lease_keeps_its_slots(valkey: Valkey) -> None:
    with instances(2, valkey.url, lease=3) as (one, two):
        await one.ready(), await two.ready()
        one.call("A", slot(1, 0))
        await one.said("A", "began")
        one.stop()
        await asyncio.sleep(1.2)
        one.go_on()
        await asyncio.sleep(1.5)
        two.call("B", slot(1, 0))
        assert await two.answer("B") == "CONCURRENCY_LIMIT"
        one.end("A")
        assert await one.answer("A") == "ok"
        assert one.heard("A", "aborted LEASE_LOST") is None


@pytest.mark.slow
async def test_a_turn_that_an_instance_hears_after_its_lease_has_ended_starts_nobody(valkey: Valkey) -> None:
    with instances(2, valkey.url) as (one, two):
        await one.ready(), await two.ready()
        one.call("A", slot())
        await one.said("A", "began")
        two.call("B", slot())
        await eventually(lambda: in_line(valkey) == 1)
        two.stop()
        one.end("A")
        await one.answer("A")
        # The turn was told to an instance that cannot hear it, and its lease ends there.
        await eventually(lambda: held(valkey) == 0)
        one.call("C", slot())
        began = await one.said("C", "began")
        two.go_on()
        await asyncio.sleep(1)
        one.end("C")
        ended = await one.said("C", "ended")
        two.end("B")
        assert await two.answer("B") == "ok"
        assert await two.said("B", "began") >= ended > began


@pytest.mark.slow
async def test_the_slots_of_a_killed_instance_are_free_after_its_lease(valkey: Valkey) -> None:
    with instances(2, valkey.url) as (one, two):
        await one.ready(), await two.ready()
        one.call("A", slot())
        await one.said("A", "began")
        one.call("dead waiter", slot())
        await eventually(lambda: in_line(valkey) == 1)
        two.call("B", slot())
        await eventually(lambda: in_line(valkey) == 2)
        one.kill()
        # Nobody asks anew: the beat of the instance that waits there finds it.
        await two.said("B", "began")
        two.end("B")
        assert await two.answer("B") == "ok"


# ------------------------------------------------------------------------------------- coming, leaving, loops


async def test_what_runs_when_the_last_user_leaves_is_released(valkey: Valkey) -> None:
    a = instance(valkey.url, shutdown_grace=0)
    async with a:
        running = await hold(a, "x", slot())
    assert running.task.done()
    assert (held(valkey), in_line(valkey)) == (0, 0)
    every_key_ends(valkey)


@pytest.mark.slow
async def test_work_that_outlives_the_last_user_keeps_its_slot_in_the_store(
    open_instance: OpenInstance, proxy: FaultProxy
) -> None:
    b = await open_instance()
    a = instance(proxy.url, shutdown_grace=0)
    async with a:
        running = await hold(a, "x", slot(1, 0), stubborn=True)
    assert (await running.refusal()).code == "OVERLOADED"
    await asyncio.sleep(1.5)
    assert await code_of(once(b, "x", slot(1, 0))) == "CONCURRENCY_LIMIT"
    running.let_go()
    await eventually_free(b, "x", slot(1, 0))
    # With its last work the instance closes its connections.
    await eventually(lambda: proxy.connections == 0)


async def test_leaving_closes_every_connection(proxy: FaultProxy) -> None:
    known = asyncio.all_tasks()
    async with instance(proxy.url) as a:
        await asyncio.gather(*(once(a, "x", slot()) for _ in range(5)))
        assert proxy.connections
    await eventually(lambda: proxy.connections == 0)
    assert asyncio.all_tasks() - known == set()


@pytest.mark.slow
async def test_an_instance_may_be_left_and_entered_again(valkey: Valkey) -> None:
    a = instance(valkey.url)
    for _ in range(3):
        async with a:
            assert await code_of(once(a, "x", slot(1, 0))) == "ok"
            async with a:
                assert await code_of(once(a, "x", slot(1, 0))) == "ok"
            assert await code_of(once(a, "x", slot(1, 0))) == "ok"


def test_an_instance_may_be_used_on_one_loop_after_another(valkey: Valkey) -> None:
    a = instance(valkey.url, shutdown_grace=0)

    async def use() -> list[str]:
        async with a:
            running = await hold(a, "x", slot())
            waiting = await line_up(a, "x", slot())
            await running.end()
            await (await begins(waiting)).end()
            return [await code_of(once(a, "y", Policy(rate(2))))]

    outcomes = [asyncio.run(use())[0] for _ in range(3)]
    assert outcomes == ["ok", "ok", "RATE_LIMIT_EXCEEDED"], "counts live on"
    assert held(valkey) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # connections nobody closed
def test_what_is_left_on_a_loop_that_has_ended_is_free_after_a_lease(
    valkey: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    a = instance(valkey.url)

    async def leave_behind() -> None:
        await hold(a, "x", slot())
        await line_up(a, "x", slot())

    async def use_again() -> str:
        async with a:
            return await code_of(once(a, "x", slot()))

    with caplog.at_level(logging.CRITICAL, "asyncio"):
        asyncio.run(leave_behind())
        assert asyncio.run(use_again()) == "ok"
        gc.collect()


async def test_a_guard_in_use_without_being_entered_shares_its_limits_too(
    open_instance: OpenInstance, valkey: Valkey
) -> None:
    b = await open_instance()
    a = instance(valkey.url)
    running = await hold(a, "x", slot(1, 0))
    assert await code_of(once(b, "x", slot(1, 0))) == "CONCURRENCY_LIMIT"
    await running.end()
    async with a:
        pass


async def test_a_thread_gives_its_shared_slot_back_when_it_ends(
    open_instance: OpenInstance, valkey: Valkey
) -> None:
    a, b = await open_instance(), await open_instance()
    plan = a.bind("x", slot(1, 0), threads=True)
    gate = threading.Event()

    async def body(run: Run) -> object:
        return await a.in_thread(run, gate.wait)

    call = asyncio.create_task(a.call(plan, Call("x"), body))
    await eventually(lambda: held(valkey) == 1)
    assert await code_of(once(b, "x", slot(1, 0))) == "CONCURRENCY_LIMIT"
    gate.set()
    await call
    assert await code_of(once(b, "x", slot(1, 0))) == "ok"
