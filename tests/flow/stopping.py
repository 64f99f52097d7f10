"""A server that is told to stop, for the tests of that.

    python -m tests.flow.stopping JOURNAL OPTIONS     serves what OPTIONS says; what happens goes to JOURNAL

OPTIONS is a JSON object: `transport`, `grace` in seconds, `clean_up` in seconds, `http` options.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer

from frontmcp_py import AbortSignal, Concurrency, FrontMCP, GuardError, ToolContext

FOR_EVER = 600.0
"""Seconds that no test waits for."""

CHILD = "trap '' TERM; echo $$ > {}; sleep 600 & wait; sleep 600"
"""A command that does not end when it is asked to, and tells its number."""


class Journal:
    """What happens, line by line, for a test in another process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, what: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{what}\n")


def note(journal: Journal, name: str, signal: AbortSignal) -> None:
    """Tell that a tool has begun, and why it is told to stop."""

    def aborted() -> None:
        assert isinstance(signal.reason, GuardError)
        journal.say(f"{name}: aborted: {signal.reason.code}")

    signal.add_callback(aborted)
    journal.say(f"{name}: began")


def build(journal: Journal, folder: Path, grace: float, clean_up: float) -> FrontMCP:
    gate = asyncio.Event()

    @contextlib.asynccontextmanager
    async def lifespan(_: MCPServer[Any]) -> AsyncGenerator[None, None]:
        yield
        time.sleep(clean_up)  # noqa: ASYNC251
        journal.say("cleaned up")

    server = FrontMCP("stopping", lifespan=lifespan, shutdown_grace=grace)

    async def wait(name: str) -> str:
        try:
            await gate.wait()
        except asyncio.CancelledError:
            journal.say(f"{name}: cancelled")
            raise
        journal.say(f"{name}: done")
        return name

    @server.tool
    async def hold(ctx: ToolContext) -> str:
        note(journal, "hold", ctx.signal)
        return await wait("hold")

    @server.tool(read_only=True)
    async def look() -> str:
        """Nothing but its caller can end it: its body runs in the request's own task."""
        journal.say("look: began")
        return await wait("look")

    @server.tool(concurrency=Concurrency(1, queue_timeout=FOR_EVER))
    async def alone(ctx: ToolContext) -> str:
        note(journal, "alone", ctx.signal)
        return await wait("alone")

    @server.mcp.resource("stop://let-go")
    async def let_go() -> str:
        gate.set()
        return ""

    _add_tools_that_hang(server, journal, folder)
    return server


def _add_tools_that_hang(server: FrontMCP, journal: Journal, folder: Path) -> None:
    @server.tool
    def hang(ctx: ToolContext) -> str:
        note(journal, "hang", ctx.signal)
        threading.Event().wait(FOR_EVER)
        return ""

    @server.tool
    async def ignore(ctx: ToolContext) -> str:
        note(journal, "ignore", ctx.signal)
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(FOR_EVER)

    @server.tool
    async def block() -> str:
        """Nothing else happens in this process any more."""
        journal.say("block: began")
        time.sleep(FOR_EVER)  # noqa: ASYNC251
        return ""

    @server.tool
    async def compute() -> str:
        """Foreign code, in which no signal handler of Python runs."""
        journal.say("compute: began")
        return hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9).hex()

    @server.tool
    async def run_child(ctx: ToolContext) -> int:
        note(journal, "run_child", ctx.signal)
        result = await ctx.run_process("sh", "-c", CHILD.format(folder / "child"))
        return result.returncode


def main(journal: str, options: str) -> None:
    given = json.loads(options)
    path = Path(journal)
    server = build(Journal(path), path.parent, given.get("grace", 2), given.get("clean_up", 0))
    if given["transport"] == "http":
        server.run("http", port=0, **given.get("http", {}))
    else:
        server.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
