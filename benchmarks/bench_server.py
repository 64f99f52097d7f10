"""A call through the SDK's client in this process: guarded, against the same tool on a bare server."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from mcp.client import Client
from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

from benchmarks.measure import Ratio, record, run_once, take_turns
from frontmcp_py import FrontMCP, RateLimit, Throttle, ToolContext

PLENTY = 10**9


def bare_server() -> MCPServer[Any]:
    server: MCPServer[Any] = MCPServer("bare", log_level="ERROR")

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    async def look_up(number: int) -> str:
        return "ok"

    return server


def guarded_server(throttle: Throttle, *, read_only: bool) -> FrontMCP:
    server = FrontMCP("guarded", throttle=throttle, mcp_options={"log_level": "ERROR"})

    @server.tool(read_only=read_only, rate_limit=RateLimit(PLENTY), concurrency=10)
    async def look_up(number: int) -> str:
        return "ok"

    return server


def with_context(throttle: Throttle) -> FrontMCP:
    server = FrontMCP("guarded", throttle=throttle, mcp_options={"log_level": "ERROR"})

    @server.tool(rate_limit=RateLimit(PLENTY), concurrency=10)
    async def look_up(ctx: ToolContext, number: int) -> str:
        return "ok"

    return server


def calls_of(client: Client) -> Callable[[int], Awaitable[None]]:
    async def calls(count: int) -> None:
        for _ in range(count):
            await client.call_tool("look_up", {"number": 1})

    return calls


async def compare(server: FrontMCP) -> Ratio:
    async with Client(bare_server()) as bare, server.connect() as guarded:
        return await take_turns(calls_of(guarded), calls_of(bare), rounds=40, calls=100)


GLOBAL = Throttle(global_rate_limit=RateLimit(PLENTY))
DEADLINE = Throttle(global_rate_limit=RateLimit(PLENTY), default_timeout=30)


@pytest.mark.parametrize(
    ("name", "make", "budget"),
    [
        (
            "a `read_only` tool without a timeout",
            lambda: guarded_server(GLOBAL, read_only=True),
            "at most 1.10",
        ),
        (
            "any other tool, with a default timeout",
            lambda: guarded_server(DEADLINE, read_only=False),
            "at most 1.22 on 3.11, 1.12 later",
        ),
        ("the same with a `ToolContext`", lambda: with_context(DEADLINE), "none"),
    ],
    ids=["read_only", "timeout", "context"],
)
def test_call_in_process(benchmark: Any, name: str, make: Callable[[], FrontMCP], budget: str) -> None:
    """A global and an own rate limit, an own slot and admission, against a bare `MCPServer`."""
    logging.disable(logging.WARNING)
    ratio: Ratio = run_once(benchmark, lambda: compare(make()))
    logging.disable(logging.NOTSET)
    record(benchmark, f"a call in process, {name}, against a bare server", budget, vars(ratio))


def test_import(benchmark: Any) -> None:
    """`import frontmcp_py`, against importing the SDK's server."""

    def took(module: str) -> float:
        code = (
            f"import time; began = time.perf_counter(); import {module}; print(time.perf_counter() - began)"
        )
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)

    def measured() -> Ratio:
        pairs = [(took("frontmcp_py"), took("mcp.server.mcpserver")) for _ in range(9)]
        ratios = sorted(mine / theirs for mine, theirs in pairs)
        mine, theirs = (sorted(each)[4] * 1e6 for each in zip(*pairs, strict=True))
        return Ratio(mine, theirs, ratios[4], ratios[2], ratios[6])

    ratio = benchmark.pedantic(measured, rounds=1, iterations=1)
    name = "`import frontmcp_py`, against `import mcp.server.mcpserver`"
    record(benchmark, name, "at most 1.2", vars(ratio))
