"""Calls that take their time on the wire: open answers, clients that leave, cancels that cross an answer."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from mcp.client._memory import InMemoryTransport
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import (
    CallToolResult,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)

from frontmcp_py import Admission, Concurrency, FrontMCP, Throttle, Timeout, ToolContext
from frontmcp_py.policy import ON_CANCEL, OnCancel
from frontmcp_py.testing import VirtualClock, settle
from tests.cases.asgi import ENVELOPE, call, code_of_call, serving
from tests.cases.desk import (
    ERAS,
    StepLoop,
    assert_clean,
    at,
    at_every_step,
    code_of,
    conc,
    connected,
    now,
    other_tasks,
)


class Tools:
    """A server with the tools that are called here, and what happened to them."""

    def __init__(self, throttle: Throttle | None = None, **options: Any) -> None:
        self.server = FrontMCP("server", throttle=throttle)
        self.said: list[str] = []
        given: dict[str, Any] = {"concurrency": conc(1), **options}

        @self.server.tool(**given)
        async def stream(ctx: ToolContext, items: int = 5) -> str:
            self.said.append(f"begins@{now():g}")
            try:
                for number in range(items):
                    await ctx.report_progress(number)
                    await asyncio.sleep(1)
                return "done"
            finally:
                self.said.append(f"ends@{now():g}")

        @self.server.tool
        async def hello() -> str:
            return "hello"


# --------------------------------------------------------------------------------- an answer that is open


@ERAS
async def test_the_slot_is_held_until_the_last_of_the_answer(era: str) -> None:
    """fastapi/fastapi#11143, #14099: it was free when the handler returned, though the answer went on."""
    tools = Tools()
    got: list[float] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        got.append(now())

    async with connected(tools.server, era) as client:
        a = asyncio.create_task(client.call_tool("stream", {}, progress_callback=on_progress))
        await at(2)
        assert code_of(await client.call_tool("stream", {})) == "CONCURRENCY_LIMIT"
        assert code_of(await a) == "ok"
        assert (now(), got) == (5.0, [0.0, 1.0, 2.0, 3.0, 4.0])
        await at(5.2)
        assert code_of(await client.call_tool("stream", {"items": 1})) == "ok"


async def test_over_http_the_slot_is_held_until_the_last_event() -> None:
    """fastapi/fastapi#11143, #14099: the answer of one call is one open response."""
    tools = Tools()
    async with serving(tools.server) as app:
        a = call(app, "stream", progress=True)
        await at(2.5)
        assert a.body.count(b"notifications/progress") == 3
        assert await code_of_call(call(app, "stream")) == "CONCURRENCY_LIMIT"
        assert await code_of_call(a) == "ok"
        assert a.ended == 5.0
        assert a.body.count(b"notifications/progress") == 5
        assert await code_of_call(call(app, "stream", {"items": 1})) == "ok"


@ERAS
async def test_a_timeout_is_the_last_that_comes_of_an_answer(era: str) -> None:
    """fastapi/fastapi#14099: and what the work still says goes nowhere."""
    tools = Tools(timeout=Timeout(3, cancel_after=0))
    got: list[float] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        got.append(now())

    async with connected(tools.server, era) as client:
        a = await client.call_tool("stream", {}, progress_callback=on_progress)
        assert (code_of(a), now()) == ("EXECUTION_TIMEOUT", 3.0)
        assert code_of(await client.call_tool("stream", {"items": 1})) == "ok"
        assert now() == 4.0
    assert [moment for moment in got if moment > 3] == []


async def test_over_http_a_timeout_is_the_last_event() -> None:
    """fastapi/fastapi#14099: the body that does not stop says nothing any more, and keeps its slot."""
    tools = Tools(timeout=3)
    async with serving(tools.server) as app:
        a = call(app, "stream", progress=True)
        assert await code_of_call(a) == "EXECUTION_TIMEOUT"
        assert a.ended == 3.0
        size = len(a.body)
        assert await code_of_call(call(app, "stream")) == "CONCURRENCY_LIMIT"
        await at(5.5)
        assert len(a.body) == size
        assert await code_of_call(call(app, "stream", {"items": 0})) == "ok"


# ------------------------------------------------------------------------------------ a client that leaves


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing is cleaned up by accident."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_when_its_client_leaves_the_work_ends_and_its_slot_is_free() -> None:
    """lsst/daf_butler#1407: the body hung at a yield until the garbage collector came by."""
    tools = Tools(read_only=True)
    async with serving(tools.server) as app:
        a = call(app, "stream", progress=True)
        await at(1)
        a.leave()
        await at(2)
        assert tools.said == ["begins@0", "ends@1"]
        assert await code_of_call(call(app, "stream", {"items": 1})) == "ok"
    counts = tools.server.guard.statistics().counts
    assert (counts.cancelled, counts.completed) == (1, 1)


@pytest.mark.usefixtures("no_collector")
@ERAS
@pytest.mark.parametrize("on_cancel", ON_CANCEL)
async def test_a_cancelled_call_is_told_and_only_a_reader_is_stopped(era: str, on_cancel: OnCancel) -> None:
    """lsst/daf_butler#1407: work that changes things is not stopped halfway, and keeps its slot."""
    tools = Tools(on_cancel=on_cancel)
    async with connected(tools.server, era) as client:
        a = asyncio.create_task(client.call_tool("stream", {}))
        await at(1.5)
        a.cancel()
        await at(2)
        again = await client.call_tool("stream", {"items": 1})
        assert code_of(again) == ("ok" if on_cancel == "cancel" else "CONCURRENCY_LIMIT")
        await at(6)
        assert code_of(await client.call_tool("stream", {"items": 1})) == "ok"
    assert tools.said[1] == ("ends@1.5" if on_cancel == "cancel" else "ends@5")
    assert tools.server.guard.statistics().counts.cancelled == 1


@pytest.mark.parametrize("cleaning_up", ["waits", "raises", "waits long", "swallows"])
async def test_whatever_cleaning_up_does_the_slot_is_free_when_it_is_over(
    cleaning_up: str, caplog: pytest.LogCaptureFixture
) -> None:
    """omnigent-ai/omnigent#1198: release was chained after code of the tool's, which failed."""
    server = FrontMCP("server")
    over: list[float] = []

    @server.tool(concurrency=1, read_only=True)
    async def stream(ctx: ToolContext) -> str:
        try:
            await ctx.report_progress(1)
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            if cleaning_up != "swallows":
                raise
        finally:
            if cleaning_up == "waits":
                await asyncio.sleep(0)
            elif cleaning_up == "waits long":
                await asyncio.sleep(60)
            over.append(now())
            if cleaning_up == "raises":
                raise RuntimeError("while cleaning up")
        return "swallowed"

    @server.tool(concurrency=Concurrency(1, key="stream"))
    async def plain() -> str:
        return "plain"

    known = asyncio.all_tasks()
    with caplog.at_level(logging.INFO):
        async with serving(server) as app:
            a = call(app, "stream", progress=True)
            await at(1)
            a.leave()
            await at(1.5)
            # What still cleans up still works, and its slot belongs to it.
            expected = "CONCURRENCY_LIMIT" if cleaning_up == "waits long" else "ok"
            assert await code_of_call(call(app, "plain")) == expected
            await at(61)
            await settle()
            assert await code_of_call(call(app, "plain")) == "ok"
            assert a.task.done()
    assert over == [61.0 if cleaning_up == "waits long" else 1.0]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 1
    await settle()
    assert other_tasks(known) == set()


async def test_a_client_that_leaves_the_queue_is_never_served() -> None:
    """omnigent-ai/omnigent#1198, yvgude/lean-ctx#1265: over HTTP the client just goes."""
    tools = Tools(concurrency=conc(1, queue=1, wait=20))
    async with serving(tools.server) as app:
        a = call(app, "stream")
        await settle()
        b = call(app, "stream")
        await at(1)
        assert await code_of_call(call(app, "stream")) == "CONCURRENCY_LIMIT"
        b.leave()
        await settle()
        assert tools.server.guard.statistics().waiting == 0
        c = call(app, "stream", {"items": 1})
        assert await code_of_call(a) == await code_of_call(c) == "ok"
    assert tools.said == ["begins@0", "ends@5", "begins@5", "ends@6"]


@pytest.mark.parametrize("on_cancel", ON_CANCEL)
def test_at_whatever_moment_a_client_leaves_its_slot_is_freed_once(on_cancel: OnCancel) -> None:
    """lsst/daf_butler#1407, modelcontextprotocol/python-sdk#2416: from request to end of answer."""

    async def scenario(loop: StepLoop) -> None:
        tools = Tools(on_cancel=on_cancel)
        async with serving(tools.server) as app:
            a = call(app, "stream", {"items": 1}, progress=True)
            loop.strike = a.leave
            await asyncio.wait([a.task])
            await asyncio.sleep(2)
            assert await code_of_call(call(app, "stream", {"items": 0})) == "ok"
            assert await code_of_call(call(app, "hello")) == "ok"

    assert at_every_step(scenario) > 20


# ----------------------------------------------------------------------------------------- notifications


class Wire:
    """One connection of raw messages to a server, in either era.

    Attributes:
        answers: What has come back for each id, in order.
    """

    def __init__(self, era: str, read: Any, write: Any) -> None:
        self._era = era
        self._read = read
        self._write = write
        self.answers: dict[object, list[object]] = {}

    async def send(self, message: JSONRPCRequest | JSONRPCNotification) -> None:
        await self._write.send(SessionMessage(message))

    async def call(self, number: int, tool: str, **arguments: object) -> None:
        params: dict[str, Any] = {"name": tool, "arguments": arguments}
        if self._era == "auto":
            params["_meta"] = ENVELOPE
        await self.send(JSONRPCRequest(jsonrpc="2.0", id=number, method="tools/call", params=params))

    async def cancel(self, number: int) -> None:
        params: dict[str, Any] = {"requestId": number, "reason": "changed my mind"}
        if self._era == "auto":
            params["_meta"] = ENVELOPE
        await self.send(JSONRPCNotification(jsonrpc="2.0", method="notifications/cancelled", params=params))

    async def shake_hands(self) -> None:
        if self._era == "auto":
            return
        params = {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "tests", "version": "1"},
        }
        await self.send(JSONRPCRequest(jsonrpc="2.0", id=0, method="initialize", params=params))
        await self.send(JSONRPCNotification(jsonrpc="2.0", method="notifications/initialized"))
        await settle()
        assert isinstance(self.answers.pop(0)[0], JSONRPCResponse)

    async def listen(self) -> None:
        async for message in self._read:
            assert isinstance(message, SessionMessage)
            if isinstance(message.message, JSONRPCResponse | JSONRPCError):
                self.answers.setdefault(message.message.id, []).append(message.message)

    def code(self, number: int) -> str:
        """How a call was answered; `nothing` if it was not."""
        answers = self.answers.get(number, [])
        assert len(answers) <= 1, "two answers to one request"
        if not answers:
            return "nothing"
        (answer,) = answers
        return (
            code_of(CallToolResult.model_validate(answer.result))
            if isinstance(answer, JSONRPCResponse)
            else "error"
        )


@asynccontextmanager
async def wired(server: FrontMCP, era: str) -> AsyncIterator[Wire]:
    """Raw messages to a server; before the connection closes, its server has to be clean."""
    server.guard.use_clock(VirtualClock())
    async with InMemoryTransport(server.mcp) as (read, write), anyio.create_task_group() as tasks:
        wire = Wire(era, read, write)
        tasks.start_soon(wire.listen)
        await wire.shake_hands()
        yield wire
        await asyncio.sleep(0.001)
        assert_clean(server.guard)
        tasks.cancel_scope.cancel()


@ERAS
@pytest.mark.parametrize("on_cancel", ON_CANCEL)
async def test_a_cancelled_request_is_not_answered_and_counted_once(era: str, on_cancel: OnCancel) -> None:
    """modelcontextprotocol/go-sdk#1259, modelcontextprotocol/python-sdk#2493: it met an unknown id."""
    tools = Tools(concurrency=conc(1, queue=5, wait=20), on_cancel=on_cancel)
    async with wired(tools.server, era) as wire:
        await wire.call(1, "stream")
        await settle()
        await wire.call(2, "stream")
        await at(0.5)
        await wire.call(3, "stream")
        await wire.cancel(3)
        await wire.cancel(2)
        await settle()
        statistics = tools.server.guard.statistics()
        assert (statistics.waiting, statistics.active) == (0, 1)
        await wire.cancel(1)
        await settle()
        assert tools.server.guard.statistics().active == (0 if on_cancel == "cancel" else 1)
        await at(10)
        assert wire.answers == {}
        await wire.call(4, "stream", items=1)
        await at(12)
        assert wire.code(4) == "ok"
    counts = tools.server.guard.statistics().counts
    assert counts.cancelled == 1
    assert counts.cancelled_waiting + counts.cancelled <= 3
    assert counts.submitted == counts.cancelled_waiting + counts.cancelled + 1
    assert tools.said[0] == "begins@0"
    assert len(tools.said) == 4


@ERAS
async def test_a_call_can_be_cancelled_by_its_id_while_it_waits(era: str) -> None:
    """BaseIntelligence/bounty-challenge#18319, IBM/mcp-context-forge#1983: it was not registered yet."""
    tools = Tools(concurrency=conc(1, queue=5, wait=20))
    async with wired(tools.server, era) as wire:
        await wire.call(1, "stream")
        await settle()
        await wire.call(7, "stream")
        await at(1)
        assert tools.server.guard.statistics().waiting == 1
        await wire.cancel(7)
        await wire.cancel(999)
        await settle()
        assert tools.server.guard.statistics().waiting == 0
        await at(2)
        await wire.cancel(7)
        await at(10)
        assert (wire.code(1), wire.code(7)) == ("ok", "nothing")
    assert tools.said == ["begins@0", "ends@5"]
    counts = tools.server.guard.statistics().counts
    assert (counts.cancelled_waiting, counts.completed) == (1, 1)


@ERAS
@pytest.mark.parametrize("read_only", [True, False], ids=["inline", "own task"])
@pytest.mark.parametrize("queued", [False, True], ids=["running", "queued"])
def test_at_whatever_moment_a_cancel_crosses_the_answer_there_is_one_outcome(
    era: str, read_only: bool, queued: bool
) -> None:
    """modelcontextprotocol/python-sdk#2416, #1152: two ends of one request crashed the server."""

    async def scenario(loop: StepLoop) -> None:
        server = FrontMCP("server")

        @server.tool(read_only=read_only, concurrency=conc(1, wait=5))
        async def short(seconds: float = 0.0) -> str:
            await asyncio.sleep(seconds)
            return "short"

        async with wired(server, era) as wire:
            if queued:
                await wire.call(1, "short", seconds=1)
                await settle()
            cancels: list[asyncio.Task[None]] = []
            loop.strike = lambda: cancels.append(asyncio.create_task(wire.cancel(2)))
            await wire.call(2, "short")
            await asyncio.sleep(3)
            loop.strike = None
            await asyncio.gather(*cancels)
            assert wire.code(2) in ("ok", "nothing")
            assert wire.code(2) == "ok" or cancels
            await wire.call(3, "short")
            await settle()
            assert wire.code(3) == "ok"
            assert wire.code(1) == ("ok" if queued else "nothing")
            counts = server.guard.statistics().counts
            assert counts.completed + counts.cancelled + counts.cancelled_waiting == counts.submitted

    assert at_every_step(scenario) > 10


@pytest.mark.parametrize("read_only", [True, False], ids=["inline", "own task"])
@ERAS
def test_at_whatever_moment_a_caller_is_cancelled_the_server_lives(era: str, read_only: bool) -> None:
    """modelcontextprotocol/python-sdk#2416: from the sending of the request to the reading of its answer."""

    async def scenario(loop: StepLoop) -> None:
        server = FrontMCP("server")

        @server.tool(read_only=read_only, concurrency=1)
        async def short() -> str:
            await asyncio.sleep(0)
            return "short"

        async with connected(server, era) as client:
            a = asyncio.create_task(client.call_tool("short", {}))
            loop.strike = a.cancel
            await asyncio.wait([a])
            await asyncio.sleep(1)
            loop.strike = None
            assert a.cancelled() or code_of(a.result()) == "ok"
            assert code_of(await client.call_tool("short", {})) == "ok"

    assert at_every_step(scenario) > 5


@ERAS
async def test_a_client_that_stops_waiting_cancels_its_call(era: str) -> None:
    """modelcontextprotocol/go-sdk#1259: a timeout of the client's is a cancel, too."""
    tools = Tools(read_only=True)
    async with connected(tools.server, era) as client:
        with pytest.raises(MCPError, match=r"(?i)timed out"):
            await client.call_tool("stream", {}, read_timeout_seconds=2)
        await settle()
        assert tools.said == ["begins@0", "ends@2"]
        assert code_of(await client.call_tool("stream", {"items": 1})) == "ok"


@ERAS
async def test_a_cancel_after_the_answer_changes_nothing(era: str) -> None:
    """BaseIntelligence/bounty-challenge#18319: a notice for what is over is ignored."""
    tools = Tools(timeout=2)
    async with wired(tools.server, era) as wire:
        await wire.call(1, "stream")
        await at(3)
        assert wire.code(1) == "EXECUTION_TIMEOUT"
        await wire.cancel(1)
        await settle()
        assert tools.server.guard.statistics().abandoned == 1
        await at(6)
        assert wire.code(1) == "EXECUTION_TIMEOUT"
    counts = tools.server.guard.statistics().counts
    assert (counts.timed_out, counts.cancelled) == (1, 0)
    assert tools.said == ["begins@0", "ends@5"]


# ------------------------------------------------------------------------------------- seats and streams


async def test_long_answers_leave_the_reserve_to_control_calls_and_count_once_each() -> None:
    """kubernetes/kubernetes#105409: long-lived streams took all the seats."""
    throttle = Throttle(admission=Admission(max_active=4, reserved=1, max_queued=0))
    tools = Tools(throttle, concurrency=None, read_only=True)
    server = tools.server
    server.tool(name="control", priority="control")(lambda: "control")
    async with serving(server) as app:
        streams = [call(app, "stream", {"items": 10_000}, progress=True) for _ in range(3)]
        await at(5)
        assert server.guard.statistics().places == 3
        assert await code_of_call(call(app, "stream", progress=True)) == "OVERLOADED"
        assert await code_of_call(call(app, "hello")) == "OVERLOADED"
        assert await code_of_call(call(app, "control")) == "ok"
        streams[1].leave()
        await settle()
        assert server.guard.statistics().places == 2
        assert await code_of_call(call(app, "hello")) == "ok"
        late = call(app, "stream", {"items": 10_000}, progress=True)
        await settle()
        assert await code_of_call(call(app, "hello")) == "OVERLOADED"
        for stream in (streams[0], streams[2], late):
            stream.leave()
        await settle()
        assert server.guard.statistics().places == 0
        assert all(stream.task.done() for stream in [*streams, late])


@ERAS
async def test_progress_that_nobody_can_deliver_ends_no_call(era: str) -> None:
    """omnigent-ai/omnigent#1198: the client's own code may fail as well."""
    tools = Tools()

    async def broken(progress: float, total: float | None, message: str | None) -> None:
        raise LookupError

    async with connected(tools.server, era) as client:
        result = await client.call_tool("stream", {"items": 2}, progress_callback=broken)
        assert code_of(result) in ("ok", "error")
        assert code_of(await client.call_tool("stream", {"items": 1})) == "ok"
