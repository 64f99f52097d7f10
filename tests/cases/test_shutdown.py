"""What becomes of everybody when the server is told to stop, second by second."""

from __future__ import annotations

import asyncio
from typing import Any

from mcp.client import Client
from mcp_types import CallToolResult

from frontmcp_py import Concurrency, FrontMCP, Throttle, Timeout, ToolContext
from frontmcp_py.testing import VirtualClock
from tests.cases.desk import ERAS, assert_clean, at, now


def lane(**options: Any) -> tuple[FrontMCP, list[tuple[str, float]]]:
    """A server with one slot, a queue before it, and what its tools tell of themselves."""
    server = FrontMCP("lane", shutdown_grace=5, **options)
    server.guard.use_clock(VirtualClock())
    told: list[tuple[str, float]] = []

    @server.tool(concurrency=Concurrency(1, queue_timeout=60, max_queued=5))
    async def work(seconds: float, ctx: ToolContext) -> str:
        ctx.signal.add_callback(lambda: told.append(("told", now())))
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            told.append(("cancelled", now()))
            raise
        return "done"

    @server.tool
    async def outer(ctx: ToolContext) -> CallToolResult:
        await asyncio.sleep(2)
        return await ctx.call_tool("inner", {})

    @server.tool
    async def inner() -> str:
        return "inside"

    return server, told


async def timed(client: Client, tool: str, **arguments: object) -> tuple[str, float]:
    """How a call was answered, and when."""
    result = await client.call_tool(tool, arguments)
    code = (result.meta or {}).get("code", "error") if result.is_error else "ok"
    return str(code), now()


@ERAS
async def test_waiters_are_told_at_once_and_running_work_after_its_grace(era: Any) -> None:
    """sindresorhus/p-limit#25, henrygd/queue#4: the queue was emptied, and its waiters were never told."""
    server, told = lane()
    async with server.connect(mode=era) as client:
        a, b, c = (asyncio.create_task(timed(client, "work", seconds=20)) for _ in range(3))
        await at(1)
        drain = asyncio.create_task(server.guard.drain())
        assert [*await asyncio.gather(b, c)] == [("OVERLOADED", 1.0)] * 2
        await at(1.5)
        assert await timed(client, "work", seconds=0) == ("OVERLOADED", 1.5)
        assert await a == ("OVERLOADED", 6.0)
        await drain
        assert now() < 7
    assert told == [("told", 6.0), ("cancelled", 6.0)]
    assert_clean(server.guard)
    assert server.guard.statistics().counts.rejected == {"OVERLOADED": 3}


@ERAS
async def test_running_work_may_call_other_tools_to_its_end(era: Any) -> None:
    server, _ = lane()
    async with server.connect(mode=era) as client:
        call = asyncio.create_task(timed(client, "outer"))
        await at(1)
        drain = asyncio.create_task(server.guard.drain())
        assert await call == ("ok", 2.0)
        await drain
        assert now() == 2


@ERAS
async def test_work_that_was_answered_at_its_deadline_is_waited_for_too(era: Any) -> None:
    server = FrontMCP("lane", shutdown_grace=5)
    server.guard.use_clock(VirtualClock())

    @server.tool(timeout=Timeout(1))
    async def late() -> str:
        await asyncio.sleep(4)
        return "late"

    async with server.connect(mode=era) as client:
        assert await timed(client, "late") == ("EXECUTION_TIMEOUT", 1.0)
        await server.guard.drain()
        assert now() == 4
    assert_clean(server.guard)


@ERAS
async def test_a_server_whose_throttle_is_off_drains_like_any_other(era: Any) -> None:
    server, _ = lane(throttle=Throttle(enabled=False))
    async with server.connect(mode=era) as client:
        running = [asyncio.create_task(timed(client, "work", seconds=20)) for _ in range(3)]
        await at(1)
        drain = asyncio.create_task(server.guard.drain())
        await asyncio.sleep(0.5)
        assert await timed(client, "work", seconds=0) == ("OVERLOADED", 1.5)
        assert await asyncio.gather(*running) == [("OVERLOADED", 6.0)] * 3
        await drain
