"""What the guard tells of itself: one row of counters for each tool, and snapshots."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from frontmcp_py.call import Call
from frontmcp_py.guard import Counts, Guard
from frontmcp_py.policy import Concurrency, Policy
from frontmcp_py.testing import FakeClock, run_virtual, settle, virtual_time
from tests.guard.support import FREE, code_of, hold, new_guard, once
from tests.reconcile import adds_up

MUTEX = Policy(concurrency=Concurrency(1, queue_timeout=5))


class IsError:
    """A result that says of itself that the tool has failed, as that of a tool over the wire does."""

    is_error = True


@virtual_time
async def test_every_outcome_is_counted_once_and_the_counters_add_up_at_every_moment() -> None:
    guard = new_guard()
    policy = Policy("6/hour", Concurrency(1, queue_timeout=5, max_queued=1), timeout=9)
    running, waiting = await hold(guard, "x", policy), await hold(guard, "x", policy)
    adds_up(guard)
    assert await code_of(once(guard, "x", policy)) == "CONCURRENCY_LIMIT"
    adds_up(guard)
    await waiting.refusal()
    await running.refusal()
    adds_up(guard)
    assert guard.statistics().counts.timed_out == 1
    running.let_go()
    await settle()
    cancelled = await hold(guard, "x", policy)
    gone = await hold(guard, "x", policy)
    gone.task.cancel()
    cancelled.task.cancel()
    cancelled.let_go()
    await settle()
    adds_up(guard)
    for _ in range(3):
        await once(guard, "x", policy)

    async def fail() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        await guard.run(Call("x"), policy, fail)
    assert await code_of(once(guard, "x", policy)) == "RATE_LIMIT_EXCEEDED"
    adds_up(guard)
    assert guard.statistics().counts == Counts(
        submitted=10,
        accepted=8,
        started=6,
        completed=3,
        failed=1,
        timed_out=1,
        cancelled=1,
        cancelled_waiting=1,
        rejected={"CONCURRENCY_LIMIT": 1, "QUEUE_TIMEOUT": 1, "RATE_LIMIT_EXCEEDED": 1},
    )


@pytest.mark.parametrize("policy", [FREE, Policy(on_cancel="cancel")], ids=["own task", "caller's task"])
@virtual_time
async def test_a_result_that_is_an_error_is_a_failure(policy: Policy) -> None:
    guard = new_guard()

    async def body() -> Any:
        return IsError()

    assert isinstance(await guard.run(Call("x"), policy, body), IsError)
    assert (guard.statistics().counts.failed, guard.statistics().counts.completed) == (1, 0)


@virtual_time
async def test_each_tool_has_a_row() -> None:
    guard = new_guard()
    await once(guard, "a")
    await once(guard, "b")
    await once(guard, "b")
    tools = guard.statistics().tools
    assert {tool: counts.completed for tool, counts in tools.items()} == {"a": 1, "b": 2}
    assert guard.statistics().counts.completed == 3


@virtual_time
async def test_unknown_tools_are_one_number_and_nothing_else() -> None:
    guard = new_guard()
    guard.count_unknown()
    guard.count_unknown()
    statistics = guard.statistics()
    assert (statistics.unknown, statistics.counts, dict(statistics.tools)) == (2, Counts(), {})


@virtual_time
async def test_a_snapshot_does_not_change_any_more_and_nobody_can_change_it() -> None:
    guard = new_guard()
    await once(guard, "x", Policy("1/hour"))
    before = guard.statistics()
    await code_of(once(guard, "x", Policy("1/hour")))
    assert (before.counts.submitted, dict(before.counts.rejected)) == (1, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.active = 7  # type: ignore[misc]
    with pytest.raises(TypeError):
        before.tools["y"] = Counts()  # type: ignore[index]
    with pytest.raises(TypeError):
        before.counts.rejected["X"] = 1  # type: ignore[index]


@virtual_time
async def test_what_runs_and_waits_now() -> None:
    guard = new_guard()
    running, waiting = await hold(guard, "x", MUTEX), await hold(guard, "x", MUTEX)
    late = await hold(guard, "y", Policy(timeout=1))
    await late.refusal()
    statistics = guard.statistics()
    assert (statistics.active, statistics.running, statistics.abandoned) == (2, 1, 1)
    assert (statistics.waiting, statistics.places) == (1, 2)
    for each in (running, late, waiting):
        each.let_go()
    await asyncio.wait([running.task, waiting.task])
    await settle()


@virtual_time
async def test_a_tool_that_is_gone_keeps_its_row() -> None:
    guard = new_guard()
    plan = guard.bind("x", FREE)

    async def nothing(_: object) -> None: ...

    await guard.call(plan, Call("x"), nothing)
    guard.unbind("x")
    assert guard.statistics().tools["x"].completed == 1
    await guard.call(guard.bind("x", FREE), Call("x"), nothing)
    assert guard.statistics().tools["x"].completed == 2


def test_counters_and_peaks_live_on_from_loop_to_loop() -> None:
    guard = Guard(clock=FakeClock())

    async def main(calls: int) -> None:
        async with guard:
            held = [await hold(guard, "x") for _ in range(calls)]
            for each in held:
                await each.end()

    for calls in (3, 1):
        run_virtual(main, calls)
    statistics = guard.statistics()
    assert (statistics.counts.completed, statistics.peak_active) == (4, 3)


@virtual_time
async def test_counters_live_on_when_the_last_user_leaves() -> None:
    guard = new_guard()
    async with guard:
        await once(guard)
    assert guard.statistics().counts.completed == 1
