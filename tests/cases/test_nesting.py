"""A call within a call: whoever holds a slot must not wait for it, and is not its only borrower."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from frontmcp_py import (
    AbortSignal,
    Admission,
    Call,
    Concurrency,
    FrontMCP,
    Guard,
    Policy,
    RateLimit,
    Throttle,
    ToolContext,
)
from frontmcp_py.guard import Plan, Run
from frontmcp_py.policy import ON_CANCEL, OnCancel
from frontmcp_py.testing import settle
from tests.cases.desk import (
    ERAS,
    Desk,
    StepLoop,
    assert_clean,
    at,
    at_every_step,
    code_of,
    conc,
    connected,
    now,
    other_tasks,
    text_of,
)

OpenDesk = Callable[..., Desk]


class Family:
    """A server whose tools call one another, and when each of their bodies began."""

    def __init__(self, throttle: Throttle | None = None) -> None:
        self.server = FrontMCP("family", throttle=throttle)
        self.running: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.begun: list[tuple[str, float]] = []

    def tool(self, name: str, policy: dict[str, object] | None = None, **options: object) -> None:
        """A tool that works at `first`, calls others, one after the other, and works for some `seconds`."""

        async def body(
            ctx: ToolContext, calls: list[list[str]] | None = None, seconds: float = 0.0, first: float = 0.0
        ) -> str:
            self.begun.append((name, now()))
            self.running[name] = self.running.get(name, 0) + 1
            self.most[name] = max(self.most.get(name, 0), self.running[name])
            try:
                told = []
                await asyncio.sleep(first)
                for chain in calls or []:
                    inner = {"calls": [chain[1:]] if chain[1:] else [], "seconds": seconds}
                    result = await ctx.call_tool(chain[0], inner)
                    told.append(f"{chain[0]}={code_of(result)}@{now():g} {text_of(result)}")
                await asyncio.sleep(seconds)
                return "; ".join(told) or name
            finally:
                self.running[name] -= 1

        self.server.tool(name=name, **{**(policy or {}), **options})(body)  # type: ignore[call-overload]


@ERAS
async def test_a_tool_that_calls_itself_is_told_at_once_that_it_would_wait_for_itself(era: str) -> None:
    """sindresorhus/p-limit#91, sib-swiss/void-generator#17: it held the only slot and waited for it."""
    family = Family()
    family.tool("t", concurrency=conc(1, queue=5, wait=30, key="K"), timeout=60)
    async with connected(family.server, era) as client:
        result = await client.call_tool("t", {"calls": [["t"]]})
        assert (code_of(result), now()) == ("ok", 0.0)
        assert text_of(result).startswith("t=CONCURRENCY_LIMIT@0 ")
        assert text_of(result).endswith(
            'Concurrency limit reached for "t" (max: 1): it would wait for itself'
        )
    assert family.most == {"t": 1}


@ERAS
async def test_two_parents_that_nest_at_once_do_not_wait_for_each_other(era: str) -> None:
    """sindresorhus/p-limit#91: with two slots it took two of them, and was harder to find."""
    family = Family()
    family.tool("t", concurrency=conc(2, queue=5, wait=30, key="K"), timeout=60)

    async with connected(family.server, era) as client:
        results = await asyncio.gather(
            *(client.call_tool("t", {"calls": [["t"]], "first": 1}) for _ in range(2))
        )
        assert [code_of(result) for result in results] == ["ok", "ok"]
        assert all("it would wait for itself" in text_of(result) for result in results)
        assert now() == 1.0
    assert family.most == {"t": 2}


@ERAS
@pytest.mark.parametrize("chain", [["u"], ["between", "u"], ["between", "between", "u"]])
async def test_a_slot_that_an_ancestor_holds_is_found_however_far_up(era: str, chain: list[str]) -> None:
    """sib-swiss/void-generator#17: another tool on the same key, or one called by one that is called."""
    family = Family()
    family.tool("t", concurrency=conc(1, wait=30, key="K"))
    family.tool("u", concurrency=conc(1, wait=30, key="K"))
    family.tool("between")
    async with connected(family.server, era) as client:
        result = await client.call_tool("t", {"calls": [chain]})
        assert now() == 0.0
        assert 'Concurrency limit reached for "u" (max: 1): it would wait for itself' in text_of(result)


@ERAS
async def test_where_a_place_is_free_the_inner_call_takes_it(era: str) -> None:
    """PrefectHQ/prefect#10632: a second borrow by one task was an internal error."""
    family = Family()
    family.tool("t", concurrency=conc(2))
    async with connected(family.server, era) as client:
        result = await client.call_tool("t", {"calls": [["t"], ["t"]], "seconds": 1})
        assert text_of(result) == "t=ok@1 t; t=ok@2 t"
        # Each end has given back one slot, its own.
        both = await asyncio.gather(*(client.call_tool("t", {"seconds": 1}) for _ in range(3)))
        assert sorted(map(code_of, both)) == ["CONCURRENCY_LIMIT", "ok", "ok"]
    assert family.most == {"t": 2}


async def test_two_calls_of_one_task_are_two_calls(desk: Desk) -> None:
    """PrefectHQ/prefect#10632: borrowers were told apart by their task."""
    policy = Policy(concurrency=conc(2), on_cancel="cancel")
    active: list[int] = []

    async def work(seconds: float) -> int:
        active.append(desk.active)
        await asyncio.sleep(seconds)
        return desk.active

    async def outer() -> tuple[int, int]:
        inner = await desk.guard.run(Call("t"), policy, lambda: work(1))
        return inner, desk.active

    run = desk.guard.run
    both = await asyncio.gather(
        run(Call("t"), policy, lambda: work(1)), run(Call("t"), policy, lambda: work(2))
    )
    assert list(both) == [2, 1]
    assert await run(Call("t"), policy, outer) == (2, 1)
    assert desk.active == 0
    fresh = [desk.call("t", policy, seconds=1) for _ in range(3)]
    await desk.everybody()
    assert [attempt.outcome for attempt in fresh] == ["ok", "ok", "CONCURRENCY_LIMIT"]


@ERAS
async def test_an_inner_call_may_wait_for_strangers_and_goes_before_those_in_line(era: str) -> None:
    """sindresorhus/p-limit#91: its parent already holds what others may wait for."""
    family = Family()
    family.tool("parent")
    family.tool("t", concurrency=conc(1, wait=20))
    async with connected(family.server, era) as client:
        stranger = asyncio.create_task(client.call_tool("t", {"seconds": 5}))
        await at(1)
        in_line = asyncio.create_task(client.call_tool("t", {}))
        await at(2)
        result = await client.call_tool("parent", {"calls": [["t"]]})
        assert text_of(result) == "t=ok@5 t"
        await asyncio.gather(stranger, in_line)
    assert [name for name, _ in family.begun] == ["t", "parent", "t", "t"]


@ERAS
@pytest.mark.parametrize("admission", [Admission(queue_timeout=7), None], ids=["admission", "no admission"])
async def test_a_nested_wait_ends_when_admission_would_end_it(era: str, admission: Admission | None) -> None:
    """sib-swiss/void-generator#17: two that wait for each other must not do so for ever."""
    longest = 7.0 if admission else 30.0
    family = Family(Throttle(admission=admission))
    family.tool("left", concurrency=conc(1, wait=3000))
    family.tool("right", concurrency=conc(1, wait=3000))
    async with connected(family.server, era) as client:
        left = asyncio.create_task(client.call_tool("left", {"calls": [["right"]], "first": 1}))
        right = asyncio.create_task(client.call_tool("right", {"calls": [["left"]], "first": 1}))
        results = await asyncio.gather(left, right)
        # One of them gives up; then the other one goes on, or has given up in the same moment.
        assert [code_of(result) for result in results] == ["ok", "ok"]
        assert any("OVERLOADED" in text_of(result) for result in results)
        assert now() == 1 + longest


@ERAS
async def test_what_is_global_counts_the_outer_call_only(era: str) -> None:
    """sindresorhus/p-limit#91: a global limit of one would make every nested call wait for its parent."""
    family = Family(
        Throttle(
            global_concurrency=Concurrency(1, queue_timeout=5),
            global_rate_limit="2/minute",
            admission=Admission(max_active=2, reserved=1, max_queued=0),
        )
    )
    family.tool("outer")
    family.tool("inner")
    async with connected(family.server, era) as client:
        for _ in range(2):
            result = await client.call_tool("outer", {"calls": [["inner"], ["inner", "inner"]]})
            assert text_of(result).count("=ok@0") == 3
        assert code_of(await client.call_tool("outer", {})) == "RATE_LIMIT_EXCEEDED"


@ERAS
async def test_an_inner_call_is_charged_to_the_tool_it_calls(era: str) -> None:
    """bnb-chain/reth#210: what is called from within must not be a way around a limit."""
    family = Family()
    family.tool("outer")
    family.tool("inner", rate_limit=RateLimit(3, 60))
    async with connected(family.server, era) as client:
        result = await client.call_tool("outer", {"calls": [["inner"]] * 4})
        assert text_of(result).count("inner=ok") == 3
        assert "inner=RATE_LIMIT_EXCEEDED" in text_of(result)
        assert code_of(await client.call_tool("inner", {})) == "RATE_LIMIT_EXCEEDED"


@ERAS
async def test_a_parent_that_ends_early_ends_the_wait_of_its_child(era: str) -> None:
    """knacklabs/gantry#328: the parent was over, and its children began later all the same."""
    family = Family()
    family.tool("parent", timeout=2)
    family.tool("t", concurrency=conc(1, wait=20))
    async with connected(family.server, era) as client:
        stranger = asyncio.create_task(client.call_tool("t", {"seconds": 10}))
        await settle()
        result = await client.call_tool("parent", {"calls": [["t"]]})
        assert (code_of(result), now()) == ("EXECUTION_TIMEOUT", 2.0)
        await settle()
        statistics = family.server.guard.statistics()
        assert (statistics.waiting, statistics.active) == (0, 1)
        assert statistics.tools["t"].cancelled_waiting == 1
        await stranger
        await at(60)
    assert [name for name, _ in family.begun] == ["t", "parent"]


@ERAS
async def test_a_child_that_outlives_its_parent_frees_its_own_slot_and_no_other(era: str) -> None:
    """PrefectHQ/prefect#10632: the parent gave back what its child still held."""
    server = FrontMCP("server")
    left_behind: list[asyncio.Task[object]] = []

    @server.tool(concurrency=1)
    async def child() -> str:
        await asyncio.sleep(5)
        return "child"

    @server.tool(concurrency=1)
    async def parent(ctx: ToolContext) -> str:
        left_behind.append(asyncio.create_task(ctx.call_tool("child")))
        await asyncio.sleep(1)
        return "parent"

    async with connected(server, era) as client:
        assert code_of(await client.call_tool("parent", {})) == "ok"
        assert code_of(await client.call_tool("child", {})) == "CONCURRENCY_LIMIT"
        assert server.guard.statistics().active == 1
        await left_behind[0]
        assert now() == 5.0
        assert code_of(await client.call_tool("child", {})) == "ok"


# ------------------------------------------------------------------ ends at whatever moment, parents included


@pytest.mark.parametrize("on_cancel", ON_CANCEL)
@pytest.mark.parametrize("timeout", [None, 60])
@pytest.mark.parametrize("strike", ["abort the parent", "cancel the parent"])
def test_at_whatever_moment_a_parent_ends_its_childs_slot_is_not_lost(
    on_cancel: OnCancel, timeout: float | None, strike: str
) -> None:
    """python/asyncio#270, agronholm/anyio#947: the hand-over to a child, and its parent's end."""

    async def scenario(loop: StepLoop) -> None:
        guard, gate, signal = Guard(), asyncio.Event(), AbortSignal()
        child = guard.bind("child", Policy(concurrency=conc(1, wait=9), timeout=timeout, on_cancel=on_cancel))
        parent = guard.bind("parent", Policy(on_cancel="cancel"))
        begun: list[str] = []

        async def child_body(_: Run) -> None:
            begun.append("child")
            await asyncio.sleep(0)

        async def parent_body(run: Run) -> None:
            await guard.call(child, Call("child"), child_body, signal=run.signal, parent=run)

        async def hold(_: Run) -> None:
            await gate.wait()

        holder = asyncio.create_task(guard.call(child, Call("child"), hold))
        await settle()
        call = asyncio.create_task(guard.call(parent, Call("parent"), parent_body, signal=signal))
        await settle()
        loop.strike = signal.abort if strike == "abort the parent" else call.cancel
        gate.set()
        await asyncio.wait([holder, call])
        await settle()
        if not loop.struck:
            assert begun == ["child"]
        elif not begun:
            assert call.cancelled() or call.exception() is not None
        await guard.call(child, Call("child"), child_body)
        assert now() == 0.0
        assert_clean(guard)
        assert other_tasks() == set()

    assert at_every_step(scenario) > 5


def plans(guard: Guard, **policies: Policy) -> dict[str, Plan]:
    return {name: guard.bind(name, policy) for name, policy in policies.items()}


def test_at_whatever_moment_a_grandparent_ends_all_below_it_leave_the_queue() -> None:
    """knacklabs/gantry#328: each generation was told by the one above it, if that still listened."""

    async def scenario(loop: StepLoop) -> None:
        guard, gate, signal = Guard(), asyncio.Event(), AbortSignal()
        plan = plans(
            guard, top=Policy(), middle=Policy(on_cancel="cancel"), low=Policy(concurrency=conc(1, wait=9))
        )

        async def low(_: Run) -> str:
            return "low"

        async def middle(run: Run) -> str:
            return await guard.call(plan["low"], Call("low"), low, signal=run.signal, parent=run)

        async def top(run: Run) -> str:
            return await guard.call(plan["middle"], Call("middle"), middle, signal=run.signal, parent=run)

        async def hold(_: Run) -> None:
            await gate.wait()

        holder = asyncio.create_task(guard.call(plan["low"], Call("low"), hold))
        await settle()
        loop.strike = signal.abort
        call = asyncio.create_task(guard.call(plan["top"], Call("top"), top, signal=signal))
        await settle()
        if loop.struck:
            await settle()
            assert guard.statistics().waiting == 0
        gate.set()
        await asyncio.wait([holder, call])
        await settle()
        assert await guard.call(plan["low"], Call("low"), low) == "low"
        assert_clean(guard)

    assert at_every_step(scenario) > 5
