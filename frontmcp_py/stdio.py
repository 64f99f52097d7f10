"""Serves one client over stdin and stdout, and drains when the process is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from frontmcp_py.guard import Guard
from frontmcp_py.shutdown import Shutdown

# How long the last answers have to get from the writer's queue into the pipe, in seconds.
_WRITER: Final = 0.1


async def serve_stdio(
    serve: Callable[[], Awaitable[None]], *, guard: Guard, grace: float, closed: asyncio.Event
) -> None:
    """Serve until the client closes its side, or the process is told to stop.

    Args:
        serve: Serves until the client has gone.
        guard: Drains.
        grace: Seconds that running calls are given when the process is told to stop.
        closed: Set when the server's lifespan has been left.
    """
    shutdown = Shutdown(grace, guard.drain)
    with shutdown.listening():
        serving = asyncio.ensure_future(serve())
        drained = asyncio.ensure_future(shutdown.drained())
        await asyncio.wait((serving, drained), return_when=asyncio.FIRST_COMPLETED)
        if shutdown.received is None:
            drained.cancel()
            await serving
            return
        await drained
        await asyncio.sleep(_WRITER)
        # This leaves the lifespan, but not the reader, whose thread waits for the client's next word.
        serving.cancel()
        is_closed = asyncio.ensure_future(closed.wait())
        await asyncio.wait((serving, is_closed), return_when=asyncio.FIRST_COMPLETED)
        shutdown.end()
