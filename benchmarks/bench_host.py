"""A host: what it adds to the calls of a batch, and whether a long line costs more than a short one."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from benchmarks.measure import record, run_once, take_turns
from frontmcp_py.host import Host, ToolCall

ONE_AT_A_TIME = {"work": {"concurrency": 1}}


async def work(name: str, arguments: dict[str, Any]) -> str:
    await asyncio.sleep(0)
    return "done"


def batch(calls: int) -> list[ToolCall]:
    return [ToolCall(str(number), "work") for number in range(calls)]


async def against_gather() -> dict[str, Any]:
    host = Host(call=work)

    async def through_host(calls: int) -> None:
        await host.run(batch(calls))

    async def at_once(calls: int) -> None:
        await asyncio.gather(*(asyncio.create_task(work("work", {})) for _ in range(calls)))

    return asdict(await take_turns(through_host, at_once, rounds=20, calls=500))


async def long_line() -> dict[str, Any]:
    host = Host(ONE_AT_A_TIME, work)

    async def in_one_batch(calls: int) -> None:
        await host.run(batch(calls))

    async def in_many(calls: int) -> None:
        for _ in range(calls // 50):
            await host.run(batch(50))

    return asdict(await take_turns(in_one_batch, in_many, rounds=10, calls=5000))


def test_a_batch_without_limits(benchmark: Any) -> None:
    """500 calls of a batch against tasks that are gathered."""
    name = "500 calls of a host's batch, per call, against `asyncio.gather`"
    record(benchmark, name, "none", run_once(benchmark, against_gather))


def test_a_long_line(benchmark: Any) -> None:
    """5,000 calls on one key in one batch against 100 batches of 50."""
    name = "5,000 calls that wait for one key, per call, against 50"
    record(benchmark, name, "none", run_once(benchmark, long_line))
