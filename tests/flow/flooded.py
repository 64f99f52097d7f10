"""A server that is flooded, for the tests of that.

python -m tests.flow.flooded JOURNAL     calls that begin are noted in JOURNAL, by their numbers
"""

from __future__ import annotations

import asyncio
import sys

from frontmcp_py import Concurrency, FrontMCP

TAKES = 0.05
"""Seconds that a call takes, once calls may come to their end."""


def build(journal: str) -> FrontMCP:
    server, gate = FrontMCP("flooded"), asyncio.Event()

    def note(number: str) -> None:
        with open(journal, "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(f"{number}\n")

    async def work_on(number: str) -> str:
        note(number)
        await gate.wait()
        await asyncio.sleep(TAKES)
        return number

    @server.tool
    async def work(number: str) -> str:
        return await work_on(number)

    @server.tool(concurrency=Concurrency(8, key="shell", queue_timeout=None))
    async def shell(number: str) -> str:
        return await work_on(number)

    @server.tool(priority="control")
    async def look(number: str) -> str:
        return number

    @server.tool(priority="control")
    async def let_go(number: str) -> str:
        """From now on calls come to their end."""
        gate.set()
        return number

    return server


if __name__ == "__main__":
    build(sys.argv[1]).run("http", port=0, stateless_http=True)
