"""Real clients, many at once, in a process of their own.

`frontmcp stress` starts one or more of these. An order comes in as one line of JSON; when all clients are
connected (`{"unconnected": n, ...}` goes out), a second line lets them go. What they have done so far goes
out from time to time, and at the end every call with what became of it.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, NamedTuple, cast

import httpx2
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult

from frontmcp_py.cli.calls import ToolCall

OK: Final = "ok"
FAILED: Final = "failed"
"""The tool's own error, or any other without a code."""

_TELLS_EVERY_S: Final = 0.25
_OPENS_AT_ONCE: Final = 20
# A connection that has lost so many calls in a row gives up, so that a dead server is not hammered.
_GIVES_UP_AFTER: Final = 5


class Record(NamedTuple):
    """One call, and what became of it.

    Attributes:
        tool: What was called.
        code: `ok`, `failed`, the code of a refusal, or why there was no answer.
        lost: There was no answer.
        at: When it was sent, in seconds since the flood began.
        took: Seconds until it was answered or given up.
    """

    tool: str
    code: str
    lost: bool
    at: float
    took: float


@asynccontextmanager
async def connected(
    url: str, headers: Mapping[str, str], patience: float, context: ssl.SSLContext | bool
) -> AsyncGenerator[Client]:
    """A client of the SDK. Neither a proxy nor a redirect takes it anywhere else.

    Args:
        url: Where the tools are.
        headers: Sent with every request.
        patience: Seconds to wait for anything.
        context: What checks certificates; one for all clients, since each costs milliseconds to make.
    """
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=2)
    async with (
        httpx2.AsyncClient(
            headers=dict(headers),
            trust_env=False,
            follow_redirects=False,
            timeout=httpx2.Timeout(patience, pool=None),
            limits=limits,
            verify=context,
        ) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        yield client


async def call(client: Client, wanted: ToolCall, patience: float, since: float) -> Record:
    """Call a tool once.

    Args:
        client: Who calls.
        wanted: What is called.
        patience: Seconds after which it counts as lost.
        since: The loop's time at which the flood began.
    """
    loop = asyncio.get_running_loop()
    sent = loop.time()

    def record(code: str, *, lost: bool = False) -> Record:
        return Record(wanted.tool, code, lost, round(sent - since, 4), round(loop.time() - sent, 4))

    try:
        async with asyncio.timeout(patience):
            result = await client.call_tool(wanted.tool, dict(wanted.arguments))
    except TimeoutError:
        return record(f"no answer within {patience:g} s", lost=True)
    except MCPError as error:
        return record(f"protocol error: {error}", lost=True)
    except Exception as error:
        return record(f"{type(error).__name__}: {error}", lost=True)
    return record(_code(result))


def why_not(error: BaseException) -> str:
    """The first cause in an exception group, as one line."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    said = str(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _code(result: CallToolResult) -> str:
    if not result.is_error:
        return OK
    code = (result.meta or {}).get("code")
    return code if isinstance(code, str) else FAILED


class _Flood:
    """One process's share of a flood."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._url: str = order["url"]
        self._headers: Mapping[str, str] = order["headers"]
        self._patience: float = order["patience"]
        self._seconds: float = order["seconds"]
        self._calls = [ToolCall(tool, arguments) for tool, arguments in order["calls"]]
        self._connections: int = order["connections"]
        self._first: int = order["first"]
        self._opening = asyncio.Semaphore(_OPENS_AT_ONCE)
        self._go = asyncio.Event()
        self._began = 0.0
        self._connected = 0
        self._settled = asyncio.Event()
        self._problems: list[str] = []
        self.records: list[Record] = []

    async def run(
        self, go: Callable[[], Awaitable[object]], tell: Callable[[Mapping[str, Any]], None]
    ) -> None:
        # What no connection needs is made once: reading certificates takes longer than connecting.
        context = httpx2.create_ssl_context() if self._url.startswith("https:") else False
        tasks = [asyncio.create_task(self._connection(nth, context)) for nth in range(self._connections)]
        await self._settled.wait()
        tell({"unconnected": len(self._problems), "problems": self._problems[:3]})
        await go()
        self._began = asyncio.get_running_loop().time()
        self._go.set()
        pending: set[asyncio.Task[None]] = set(tasks)
        while pending:
            _, pending = await asyncio.wait(pending, timeout=_TELLS_EVERY_S)
            tell({"codes": Counter(each.code for each in self.records), "open": len(pending)})

    async def _connection(self, nth: int, context: ssl.SSLContext | bool) -> None:
        """One client, from its first to its last call, in a task of its own as the SDK wants it."""
        is_open = False
        calling: list[tuple[ToolCall, float]] = []
        try:
            async with AsyncExitStack() as stack:
                async with self._opening:
                    opening = connected(self._url, self._headers, self._patience, context)
                    client = await stack.enter_async_context(opening)
                is_open = True
                self._settle(None)
                await self._go.wait()
                await self._call_and_call(client, self._first + nth, calling)
        except Exception as error:
            if not is_open:
                self._settle(why_not(error))
            # A connection that breaks takes the call with it, which then ends without any outcome.
            for wanted, sent in calling:
                took = asyncio.get_running_loop().time() - sent
                self.records.append(
                    Record(wanted.tool, why_not(error), True, round(sent - self._began, 4), round(took, 4))
                )

    def _settle(self, problem: str | None) -> None:
        if problem is None:
            self._connected += 1
        else:
            self._problems.append(problem)
        if self._connected + len(self._problems) == self._connections:
            self._settled.set()

    async def _call_and_call(self, client: Client, nth: int, calling: list[tuple[ToolCall, float]]) -> None:
        loop = asyncio.get_running_loop()
        lost = 0
        while loop.time() - self._began < self._seconds and lost < _GIVES_UP_AFTER:
            wanted = self._calls[nth % len(self._calls)]
            calling.append((wanted, loop.time()))
            record = await call(client, wanted, self._patience, self._began)
            calling.clear()
            self.records.append(record)
            nth += 1
            lost = lost + 1 if record.lost else 0
            if record.lost:
                await asyncio.sleep(0.1)


async def _main() -> None:
    order = json.loads(sys.stdin.readline())
    flood = _Flood(order)

    def tell(said: Mapping[str, Any]) -> None:
        sys.stdout.write(f"{json.dumps(said)}\n")
        sys.stdout.flush()

    await flood.run(lambda: asyncio.to_thread(sys.stdin.readline), tell)
    tell({"records": flood.records})


if __name__ == "__main__":
    asyncio.run(_main())
