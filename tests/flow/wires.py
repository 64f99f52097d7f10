"""Every way of talking to a server, seen alike: the transports, their two protocols and their variants."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final, Literal, TextIO
from urllib.parse import quote

import httpx2
import mcp_types as types
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from frontmcp_py import FrontMCP
from frontmcp_py.host import Host
from tests.flow import program

ROOT: Final = Path(__file__).parents[2]

SOON: Final = 15.0
"""Seconds after which whatever a test waits for is overdue."""

Transport = Literal["in-process", "stdio", "http"]


@dataclass(frozen=True)
class Kind:
    """One way of talking to a server.

    Attributes:
        name: What tests are called by.
        transport: How messages travel.
        mode: `auto` speaks the protocol of 2026-07-28, `legacy` that of 2025-11-25.
        production: Whether the server keeps details of failures to itself.
        http: Options of the HTTP app.
    """

    name: str
    transport: Transport
    mode: Literal["auto", "legacy"]
    production: bool = True
    http: tuple[str, ...] = ()

    @property
    def is_modern(self) -> bool:
        return self.mode == "auto"

    @property
    def is_json(self) -> bool:
        """An answer is one document, and nothing arrives before it."""
        return "json_response" in self.http

    @property
    def is_stateless(self) -> bool:
        """The server keeps nothing between requests, so one cannot be about another."""
        return "stateless_http" in self.http

    @property
    def has_back_channel(self) -> bool:
        """A tool can ask its client something while it runs."""
        return not (self.is_modern or self.is_json or self.is_stateless)

    def __str__(self) -> str:
        return self.name


IN_PROCESS: Final = (
    Kind("inprocess-2026", "in-process", "auto"),
    Kind("inprocess-2025", "in-process", "legacy"),
)
STDIO: Final = (
    Kind("stdio-2026", "stdio", "auto"),
    Kind("stdio-2025", "stdio", "legacy"),
)
HTTP: Final = (
    Kind("sse-2026", "http", "auto"),
    Kind("sse-2025", "http", "legacy"),
    Kind("json-2026", "http", "auto", http=("json_response",)),
    Kind("json-2025", "http", "legacy", http=("json_response",)),
    Kind("stateless-sse-2025", "http", "legacy", http=("stateless_http",)),
    Kind("stateless-json-2025", "http", "legacy", http=("stateless_http", "json_response")),
)
IN_DEVELOPMENT: Final = (
    Kind("inprocess-2026-development", "in-process", "auto", production=False),
    Kind("sse-2025-development", "http", "legacy", production=False),
)
ALL: Final = (*IN_PROCESS, *STDIO, *HTTP)


def over(kinds: Iterable[Kind]) -> pytest.MarkDecorator:
    """Run a test that takes a `wire` over these kinds only."""
    return pytest.mark.parametrize("connection", list(kinds), ids=str, indirect=True, scope="session")


# ------------------------------------------------------------------------------------------------- servers


@dataclass
class Server:
    """A server somewhere, and how to connect to it.

    Attributes:
        kind: How one talks to it.
        log: Reads what it has logged so far.
        here: The server itself, if it lives in this process.
        address: Where it listens, if it does.
        journal: Where a server on stdio writes down what happens.
    """

    kind: Kind
    log: Callable[[], str]
    here: FrontMCP | None = None
    address: str = ""
    journal: Path = Path(os.devnull)

    @contextlib.asynccontextmanager
    async def connect(
        self, *, headers: Mapping[str, str] | None = None, local_address: str | None = None
    ) -> AsyncIterator[Wire]:
        """A client of its own; on stdio, with a server of its own.

        Args:
            headers: Sent with every request over HTTP.
            local_address: The address that these come from.
        """
        wire = Wire(self)
        async with contextlib.AsyncExitStack() as stack:
            server: Any
            if self.here is not None:
                server = self.here.mcp
            elif not self.address:
                log = stack.enter_context(_to_append_to(Path(f"{self.journal}.log")))
                server = stdio_client(_stdio_parameters(self.journal, self.kind.production), errlog=log)
            else:
                http = http_client(
                    headers=headers, local_address=local_address, event_hooks={"request": [wire.http.see]}
                )
                server = streamable_http_client(
                    wire.http.url, http_client=await stack.enter_async_context(http)
                )
            # No cache: a test that looks at the server wants to see it as it is now.
            wire.client = Client(
                server,
                mode=self.kind.mode,
                cache=None,
                elicitation_callback=wire.hear_question,
                message_handler=wire.hear,
            )
            await stack.enter_async_context(wire.client)
            yield wire


class Servers:
    """Servers of every kind, made when they are first needed, and ended together.

    Those that serve over HTTP are forked from a process that has imported everything, so they are there soon.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.flow.program", "uvicorn"])
        # It imports while the first tests run, which need none of its processes.
        multiprocessing.forkserver.ensure_running()
        self._made: dict[tuple[object, ...], Server] = {}
        self._processes: list[ForkServerProcess] = []
        self._log = io.StringIO()
        self._handler = logging.StreamHandler(self._log)

    def of(self, kind: Kind, *, auth: bool = False) -> Server:
        """The server of this kind; there is one for all who ask."""
        place = (kind.http, kind.production, auth) if kind.transport == "http" else (kind, auth)
        made = self._made.get(place)
        if made is None:
            made = self._made[place] = self._make(kind, auth)
        return replace(made, kind=kind)

    def _make(self, kind: Kind, auth: bool) -> Server:
        name = "-".join([kind.name, *["auth"] * auth])
        if kind.transport == "in-process":
            logging.getLogger("frontmcp_py").addHandler(self._handler)
            return Server(kind, self._log.getvalue, here=program.build(production=kind.production, auth=auth))
        if kind.transport == "stdio":
            return self.of_its_own(kind, name)
        log = self._folder / f"{name}.log"
        options = {"production": kind.production, "auth": auth}
        http = {"port": 0, **dict.fromkeys(kind.http, True)}
        process = self._context.Process(target=program.serve_http, args=(log, options, http), daemon=True)
        process.start()
        self._processes.append(process)
        return Server(kind, log.read_text, address=f"http://127.0.0.1:{_port(process, log)}")

    def fail_to_serve(self, **http: Any) -> tuple[int | None, str]:
        """The exit status of a process that cannot serve over HTTP, and what it says."""
        log = self._folder / "failed.log"
        log.unlink(missing_ok=True)
        process = self._context.Process(target=program.serve_http, args=(log, {}, http), daemon=True)
        process.start()
        self._processes.append(process)
        process.join(SOON)
        return process.exitcode, log.read_text()

    def of_its_own(self, kind: Kind, name: str) -> Server:
        """A server on stdio, whose journal nobody else writes to."""
        journal = self._folder / name
        return Server(kind, Path(f"{journal}.log").read_text, journal=journal)

    def close(self) -> None:
        """End them all."""
        logging.getLogger("frontmcp_py").removeHandler(self._handler)
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(SOON)
            if process.is_alive():
                process.kill()
                process.join()


def _port(process: ForkServerProcess, log: Path) -> str:
    """Where a server listens, once it says so."""
    end = time.monotonic() + 2 * SOON
    while time.monotonic() < end and process.is_alive():
        said = log.read_text() if log.exists() else ""
        if found := re.search(r"Listening on 127\.0\.0\.1 port (\d+)", said):
            return found[1]
        time.sleep(0.005)
    raise AssertionError(f"a server does not listen: {log.read_text() if log.exists() else process}")


async def until(happens: Callable[[], bool]) -> None:
    """Wait for what another process does, which nobody tells about."""
    async with asyncio.timeout(2 * SOON):
        while not happens():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def logged(log: Path, pattern: str) -> str:
    """What another process has logged, once it has: the pattern's group, or all of it."""
    await until(lambda: log.exists() and re.search(pattern, log.read_text()) is not None)
    found = re.search(pattern, log.read_text())
    assert found is not None
    return found[1] if found.groups() else found[0]


def _to_append_to(path: Path) -> TextIO:
    return path.open("a", encoding="utf-8")


def _stdio_parameters(journal: Path, production: bool) -> StdioServerParameters:
    return StdioServerParameters(
        command=sys.executable,
        args=["-m", "tests.flow.program", os.fspath(journal)],
        cwd=ROOT,
        env={"FRONTMCP_ENV": "production"} if production else {},
    )


# -------------------------------------------------------------------------------------------------- wires


def http_client(
    *, headers: Mapping[str, str] | None = None, local_address: str | None = None, **options: Any
) -> httpx2.AsyncClient:
    """A client for plain HTTP, which does not read every certificate of the system first."""
    transport = httpx2.AsyncHTTPTransport(verify=False, local_address=local_address)
    return httpx2.AsyncClient(transport=transport, headers=dict(headers or {}), timeout=2 * SOON, **options)


class Wire:
    """A client of a server.

    Attributes:
        server: The server.
        kind: How they talk.
        client: The client.
        http: What the client has sent last, over HTTP.
        heard: Every notification of the server, also those that belong to no request any more.
        answer: Answers what a tool asks.
        host: Answers it instead.
    """

    client: Client

    def __init__(self, server: Server) -> None:
        self.server = server
        self.kind = server.kind
        self.http = Exchange(f"{server.address}/mcp")
        self.heard: list[object] = []
        self.answer: Callable[[], Awaitable[types.ElicitResult]] | None = None
        self.host: Host | None = None

    async def hear(self, message: object) -> None:
        """The server has said something."""
        self.heard.append(message)

    async def hear_question(self, context: Any, params: Any) -> types.ElicitResult | types.ErrorData:
        """A tool asks something."""
        if self.host is not None:
            answer: types.ElicitResult | types.ErrorData
            answer = await self.host.elicitation_callback(context, params)
            return answer
        assert self.answer is not None
        return await self.answer()

    async def call(self, name: str, /, **arguments: Any) -> types.CallToolResult:
        """Call a tool."""
        async with asyncio.timeout(2 * SOON):
            return await self.client.call_tool(name, arguments)

    def start(self, name: str, /, **arguments: Any) -> asyncio.Task[types.CallToolResult]:
        """Call a tool, and go on."""
        return asyncio.create_task(self.call(name, **arguments))

    async def said(self, case: str, what: str = "-", times: int = 1) -> list[str]:
        """What has happened in a case, once `what` has, so many times."""
        times = 0 if what == "-" else times
        said: list[str] = await self._read(f"said/{case}/{quote(what, safe='')}/{times}")
        assert said.count(what) >= times, f"{what!r} is overdue; what happened is {said}"
        return said

    async def let_go(self, case: str) -> None:
        """Let the tools of a case go on, now and later."""
        await self._read(f"let-go/{case}")

    async def end(self) -> dict[str, Any]:
        """The guard's statistics at the end of a test, when all that its calls waited for has happened."""
        statistics: dict[str, Any] = await self._read("end")
        return statistics

    async def statistics(self, field: str = "-", number: int = 0) -> dict[str, Any]:
        """The guard's statistics, once a field of them has a number."""
        statistics: dict[str, Any] = await self._read(f"statistics/{field}/{number}")
        told = {name: value for name, value in statistics.items() if name not in ("tools", "counts")}
        assert statistics.get(field, number) == number, f"{field} is still not {number}: {told}"
        return statistics

    async def _read(self, path: str) -> Any:
        async with asyncio.timeout(2 * SOON):
            answer = await self.client.read_resource(f"flow://{path}")
        (content,) = answer.contents
        assert isinstance(content, types.TextResourceContents)
        return json.loads(content.text)


@dataclass
class Exchange:
    """The last call that a client sent over HTTP, to send others like it without the client."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)

    async def see(self, request: httpx2.Request) -> None:
        """A client is about to send something."""
        body = json.loads(request.content) if request.content else {}
        if body.get("method") == "tools/call":
            ours = ("accept", "content-type", "authorization")
            names = [name for name in request.headers if name in ours or name.startswith("mcp-")]
            self.headers = {name: request.headers[name] for name in names}
            self.body = body

    def call(self, name: str, arguments: dict[str, Any], request_id: int) -> httpx2.Request:
        """A call of a tool."""
        headers = {**self.headers, **({"mcp-name": name} if "mcp-name" in self.headers else {})}
        params = {**self.body["params"], "name": name, "arguments": arguments}
        return self._request("POST", headers, {**self.body, "id": request_id, "params": params})

    def cancel(self, request_id: str) -> httpx2.Request:
        """The cancellation of a request."""
        params = {"requestId": int(request_id) if request_id.isdigit() else request_id}
        about_the_call = ("mcp-name", "mcp-method")
        headers = {name: value for name, value in self.headers.items() if name not in about_the_call}
        body = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
        return self._request("POST", headers, body)

    def leave(self) -> httpx2.Request:
        """The end of a session."""
        return self._request("DELETE", self.headers, None)

    def _request(self, method: str, headers: dict[str, str], body: object) -> httpx2.Request:
        content = None if body is None else json.dumps(body)
        return httpx2.Request(method, self.url, headers=headers, content=content)


def text(result: types.CallToolResult) -> str:
    """The text of a result that has one."""
    (block,) = result.content
    assert isinstance(block, types.TextContent)
    return block.text
