"""A server that is flooded, for the tests of that.

python -m tests.flow.flooded JOURNAL     calls that begin are noted in JOURNAL, by their numbers
"""

from __future__ import annotations

import asyncio
import sys

from frontmcp_py import Concurrency, FrontMCP

TAKES = 0.05
"""Seconds that a call takes."""


def build(journal: str) -> FrontMCP:
    server = FrontMCP("flooded")

    def note(number: str) -> None:
        with open(journal, "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(f"{number}\n")

    @server.tool
    async def work(number: str) -> str:
        note(number)
        await asyncio.sleep(TAKES)
        return number

    @server.tool(concurrency=Concurrency(8, key="shell", queue_timeout=None))
    async def shell(number: str) -> str:
        note(number)
        await asyncio.sleep(TAKES)
        return number

    @server.tool(priority="control")
    async def look(number: str) -> str:
        return number

    return server


if __name__ == "__main__":
    build(sys.argv[1]).run("http", port=0, stateless_http=True)
