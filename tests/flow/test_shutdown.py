"""A server that is told to stop takes no more calls, answers those that it has, and is gone in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import mcp_types as types
import psutil
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from tests.flow.wires import HTTP, ROOT, SOON, STDIO, Kind, http_client, logged, text, until

SSE_2026, SSE_2025, JSON_2026, *_ = HTTP

GRACE: Final = 1
"""Seconds of grace in tests where a call is still running at its end."""

LONG: Final = 60
"""Seconds of grace in tests that end long before."""


class Stopping:
    """A server in a process of its own, which will be told to stop.

    Attributes:
        client: A client of it.
        process: The process, once it is known.
    """

    client: Client
    pid: int

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.journal = folder / "journal"
        self.log = folder / "log"
        self.address = ""
        self._process: asyncio.subprocess.Process | None = None

    @contextlib.asynccontextmanager
    async def serve(self, **options: Any) -> AsyncIterator[Stopping]:
        options = {"transport": self.kind.transport, "http": dict.fromkeys(self.kind.http, True), **options}
        arguments = ["-m", "tests.flow.stopping", os.fspath(self.journal), json.dumps(options)]
        async with contextlib.AsyncExitStack() as stack:
            log = stack.enter_context(self.log.open("w"))
            if self.kind.transport == "stdio":
                parameters = StdioServerParameters(command=sys.executable, args=arguments, cwd=ROOT)
                stream: Any = stdio_client(parameters, errlog=log)
            else:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, *arguments, cwd=ROOT, stdout=log, stderr=log
                )
                self._process = process
                stack.push_async_callback(self._kill)
                self.pid = process.pid
                port = await logged(self.log, r"Listening on 127\.0\.0\.1 port (\d+)")
                self.address = f"http://127.0.0.1:{port}"
                http = await stack.enter_async_context(http_client())
                stream = streamable_http_client(f"{self.address}/mcp", http_client=http)
            self.client = Client(stream, mode=self.kind.mode, cache=None)
            try:
                await stack.enter_async_context(self.client)
                # Else it would ask for the schemas of results after the last answer.
                await self.client.list_tools()
                if self.kind.transport == "stdio":
                    self.pid = self._child()
                yield self
            finally:
                # A client cannot say good-bye to who has gone.
                with contextlib.suppress(MCPError, OSError):
                    await stack.aclose()

    def tell(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.pid, number)

    def start(self, tool: str) -> asyncio.Task[types.CallToolResult]:
        return asyncio.create_task(self.client.call_tool(tool, {}))

    async def begun(self, tool: str) -> asyncio.Task[types.CallToolResult]:
        """A call that has begun to run."""
        call = self.start(tool)
        await self.said(f"{tool}: began")
        return call

    async def said(self, what: str) -> list[str]:
        """What has happened, once this has."""
        await until(lambda: what in self.so_far())
        return self.so_far()

    def so_far(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    async def probe(self, path: str) -> tuple[int, Any]:
        async with http_client() as http:
            answer = await http.get(f"{self.address}{path}")
        return answer.status_code, answer.json()

    async def ended(self) -> int | None:
        """How it ended: the negative number of a signal. On stdio its parent is the SDK, and nobody says."""
        if self._process is not None:
            return await asyncio.wait_for(self._process.wait(), SOON)
        await until(lambda: _is_over(self.pid))
        return None

    def _child(self) -> int:
        [child] = [each for each in psutil.Process().children() if os.fspath(self.journal) in each.cmdline()]
        return child.pid

    async def _kill(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


def _is_over(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def refused(result: types.CallToolResult) -> bool:
    """Whether a call was answered by a server that shuts down."""
    assert result.is_error
    assert result.meta is not None
    assert result.meta["code"] == "OVERLOADED"
    assert "shutting down" in text(result)
    return True


def slow(*values: object) -> Any:
    """The same on another transport: only with the slow tests, as each server takes a second to start."""
    return pytest.param(*values, marks=pytest.mark.slow)


every_transport = pytest.mark.parametrize(
    "kind", [SSE_2025, slow(STDIO[0]), slow(SSE_2026), slow(JSON_2026), slow(STDIO[1])], ids=str
)
one_of_each = pytest.mark.parametrize("kind", [SSE_2025, slow(STDIO[0])], ids=str)


@every_transport
async def test_a_running_call_has_its_grace_and_nobody_else_gets_in(kind: Kind, tmp_path: Path) -> None:
    async with Stopping(kind, tmp_path).serve(grace=LONG) as server:
        running = [await server.begun("hold"), await server.begun("look"), await server.begun("alone")]
        waiting = server.start("alone")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.2)
        server.tell()
        assert refused(await waiting)
        assert refused(await server.client.call_tool("hold", {}))
        if kind.transport == "http":
            assert await server.probe("/healthz") == (200, {"ok": True, "service": "stopping"})
            status, body = await server.probe("/readyz")
            assert (status, body["ok"], body["status"], body["active"]) == (503, False, "draining", 3)
        await server.client.read_resource("stop://let-go")
        assert [text(answer) for answer in await asyncio.gather(*running)] == ["hold", "look", "alone"]
        assert await server.ended() in (-signal.SIGTERM, None)
        assert server.so_far()[-1] == "cleaned up"
        assert not [line for line in server.so_far() if "aborted" in line or "cancelled" in line]


@every_transport
async def test_what_still_runs_after_its_grace_is_answered_aborted_and_cancelled(
    kind: Kind, tmp_path: Path
) -> None:
    async with Stopping(kind, tmp_path).serve(grace=GRACE) as server:
        running = [await server.begun(tool) for tool in ("hold", "look", "hang", "ignore")]
        server.tell()
        assert all(map(refused, await asyncio.gather(*running)))
        assert await server.ended() in (-signal.SIGTERM, None)
        said = server.so_far()
        for what in ("hold: aborted: OVERLOADED", "hang: aborted: OVERLOADED", "ignore: aborted: OVERLOADED"):
            assert what in said
        assert {"hold: cancelled", "look: cancelled", "cleaned up"} <= {*said}


@one_of_each
@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
async def test_a_second_signal_ends_it_at_once(kind: Kind, number: int, tmp_path: Path) -> None:
    async with Stopping(kind, tmp_path).serve(grace=LONG) as server:
        running = await server.begun("hold")
        server.tell(number)
        assert refused(await server.client.call_tool("hold", {}))
        server.tell(number)
        assert await server.ended() in (-number, None)
        assert "cleaned up" not in server.so_far()
        running.cancel()


@one_of_each
@pytest.mark.parametrize("tool", ["block", slow("hang")])
async def test_whatever_hangs_does_not_hold_it_up(kind: Kind, tool: str, tmp_path: Path) -> None:
    async with Stopping(kind, tmp_path).serve(grace=0) as server:
        running = await server.begun(tool)
        server.tell(signal.SIGINT)
        # A machine that is slow to wake the main thread is told by the exit status.
        assert await server.ended() in (-signal.SIGINT, 128 + signal.SIGINT, None)
        running.cancel()


@pytest.mark.slow
@one_of_each
@pytest.mark.parametrize(("grace", "times"), [(0, 1), slow(LONG, 2)])
async def test_foreign_code_that_hears_no_signal_does_not_hold_it_up(
    kind: Kind, grace: int, times: int, tmp_path: Path
) -> None:
    async with Stopping(kind, tmp_path).serve(grace=grace) as server:
        running = await server.begun("compute")
        for _ in range(times):
            server.tell()
            # The system makes one of two signals that come at once.
            await asyncio.sleep(0.2)
        # No handler could say why it ends, so the exit status does.
        assert await server.ended() in (128 + signal.SIGTERM, None)
        running.cancel()


@pytest.mark.slow
@one_of_each
async def test_a_clean_up_that_hangs_is_cut_off(kind: Kind, tmp_path: Path) -> None:
    async with Stopping(kind, tmp_path).serve(grace=0, clean_up=600) as server:
        server.tell()
        assert await server.ended() in (-signal.SIGTERM, None)
        assert "cleaned up" not in server.so_far()


@pytest.mark.slow
@one_of_each
@pytest.mark.parametrize("times", [1, 2])
async def test_no_child_process_of_a_tool_is_left(kind: Kind, times: int, tmp_path: Path) -> None:
    async with Stopping(kind, tmp_path).serve(grace=0 if times == 1 else LONG) as server:
        running = await server.begun("run_child")
        number = tmp_path / "child"
        await until(lambda: number.exists() and number.read_text().endswith("\n"))
        child = psutil.Process(int(number.read_text()))
        family = [child, *child.children(recursive=True)]
        for _ in range(times):
            server.tell()
            await asyncio.sleep(0.05)
        await server.ended()
        _, alive = psutil.wait_procs(family, timeout=SOON)
        assert not alive
        running.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SSE_2026, slow(SSE_2025)], ids=str)
async def test_streams_without_an_end_do_not_hold_it_up(kind: Kind, tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(Stopping(kind, tmp_path).serve(grace=LONG))
        if kind.is_modern:
            await stack.enter_async_context(server.client.listen(tools_list_changed=True))
        else:
            # The client of the handshake era has opened one of its own.
            await logged(server.log, '"GET /mcp HTTP/1.1" 200')
        server.tell()
        assert await server.ended() == -signal.SIGTERM
        assert server.so_far() == ["cleaned up"]
        assert "Traceback" not in server.log.read_text()
