"""The server that is flooded by `bench_http.py`, in a process of its own.

python -m benchmarks.http_server
"""

from __future__ import annotations

import asyncio

from frontmcp_py import FrontMCP

WORK_S = 0.05
"""Seconds that `work` takes, all of them asleep."""


def build() -> FrontMCP:
    """A server on default admission, with a slow tool and a control tool that does nothing."""
    server = FrontMCP("flooded")

    @server.tool
    async def work(number: int) -> int:
        await asyncio.sleep(WORK_S)
        return number

    @server.tool(priority="control")
    async def look(number: int) -> int:
        return number

    return server


if __name__ == "__main__":
    build().run("http", port=0)
