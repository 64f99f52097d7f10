"""HTTP without sockets: requests to an ASGI app, whose clients leave when they like, in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from mcp_types import CLIENT_CAPABILITIES_META_KEY, CLIENT_INFO_META_KEY, PROTOCOL_VERSION_META_KEY
from starlette.applications import Starlette
from starlette.types import Message

from frontmcp_py import FrontMCP
from frontmcp_py.testing import VirtualClock
from tests.cases.desk import assert_clean, now

VERSION = "2026-07-28"
OLD_VERSION = "2025-11-25"
ENVELOPE = {
    PROTOCOL_VERSION_META_KEY: VERSION,
    CLIENT_CAPABILITIES_META_KEY: {},
    CLIENT_INFO_META_KEY: {"name": "tests", "version": "1"},
}


@asynccontextmanager
async def serving(server: FrontMCP, **http: Any) -> AsyncIterator[Starlette]:
    """The HTTP app of a server, alive; before it ends, its server has to be clean."""
    server.guard.use_clock(VirtualClock())
    app = server.http_app(**http)
    async with app.router.lifespan_context(app):
        yield app
        # Time does not pass before everybody, threads included, is done with what can be done now.
        await asyncio.sleep(0.001)
        assert_clean(server.guard)


class Request:
    """One request.

    Args:
        app: Whom it is sent to.
        path: Where.
        method: How.
        body: What, as JSON.
        headers: Besides those that every request has.
        client: The address that it comes from.

    Attributes:
        status: The answer's status, once it has begun.
        headers: The answer's headers.
        body: What has come of the answer.
        ended: When the app had done with it, in loop time.
    """

    def __init__(
        self,
        app: Starlette,
        path: str,
        *,
        method: str = "POST",
        body: object = None,
        headers: Mapping[str, str] | None = None,
        client: str = "203.0.113.9",
    ) -> None:
        sent = b"" if body is None else json.dumps(body).encode()
        given = {
            "host": "localhost:8000",
            "content-type": "application/json",
            "content-length": str(len(sent)),
            "accept": "application/json, text/event-stream",
            **(headers or {}),
        }
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "server": ("localhost", 8000),
            "client": (client, 50_000),
        }
        self._sent: bytes | None = sent
        self._gone = asyncio.Event()
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.ended: float | None = None
        self.task = asyncio.create_task(self._run(app))

    def leave(self) -> None:
        """The client closes its connection."""
        self._gone.set()

    async def answer(self) -> Any:
        """The JSON that the answer is, or whose last event it is."""
        await self.task
        text = self.body.decode()
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            text = [line.removeprefix("data:") for line in text.splitlines() if line.startswith("data:")][-1]
        return json.loads(text)

    async def _run(self, app: Starlette) -> None:
        try:
            await app(self._scope, self._receive, self._send)
        finally:
            self.ended = now()

    async def _receive(self) -> Message:
        if self._sent is not None:
            sent, self._sent = self._sent, None
            return {"type": "http.request", "body": sent, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set():
            raise OSError("the client has gone")
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {
                name.decode().lower(): value.decode() for name, value in message.get("headers", [])
            }
        else:
            self.body += message.get("body", b"")


def call(
    app: Starlette,
    tool: str,
    arguments: Mapping[str, object] | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    client: str = "203.0.113.9",
    progress: bool = False,
) -> Request:
    """A `tools/call` of the protocol of today."""
    meta = {**ENVELOPE, **({"progressToken": "p"} if progress else {})}
    return Request(
        app,
        "/mcp",
        body={
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {"name": tool, "arguments": dict(arguments or {}), "_meta": meta},
        },
        headers={
            "mcp-protocol-version": VERSION,
            "mcp-method": "tools/call",
            "mcp-name": tool,
            **(headers or {}),
        },
        client=client,
    )


async def open_session(app: Starlette) -> dict[str, str]:
    """A session of the protocol that begins with a handshake: the headers that its requests have."""
    hello = Request(
        app,
        "/mcp",
        body={
            "jsonrpc": "2.0",
            "id": 0,
            "method": "initialize",
            "params": {
                "protocolVersion": OLD_VERSION,
                "capabilities": {},
                "clientInfo": {"name": "tests", "version": "1"},
            },
        },
    )
    assert "result" in await hello.answer()
    return {"mcp-session-id": hello.headers["mcp-session-id"], "mcp-protocol-version": OLD_VERSION}


def call_in_session(app: Starlette, session: Mapping[str, str], tool: str, **arguments: object) -> Request:
    """A `tools/call` in a session."""
    body = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": tool, "arguments": arguments},
    }
    return Request(app, "/mcp", body=body, headers=session)


async def code_of_call(request: Request) -> str:
    """`ok`, the code of a refusal, or `error` for a tool's failure."""
    answer = await request.answer()
    result = answer["result"]
    if not result.get("isError"):
        return "ok"
    return str(result.get("_meta", {}).get("code", "error"))
