"""A host over every wire: its calls, what they ask while they run, and connections that are lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.mcpserver import Context, MCPServer

from frontmcp_py.host import Host, State, ToolCall, ToolResult
from tests.flow.program import Answer
from tests.flow.wires import (
    ALL,
    HTTP,
    ROOT,
    SOON,
    STDIO,
    Kind,
    Server,
    Servers,
    Wire,
    http_client,
    over,
    until,
)

with_a_back_channel = over([kind for kind in ALL if kind.has_back_channel])
# Nothing that concerns a request reaches it on the others.
with_cancellation = over(
    [kind for kind in ALL if not kind.is_stateless and not (kind.is_json and kind.is_modern)]
)
either_way = over([kind for kind in ALL if kind.has_back_channel or kind.is_modern])


class Person:
    """Is asked, and answers when told to: `accept` the first call and `decline` the others."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.withdrawn: list[str | None] = []
        self.is_asked = asyncio.Event()
        self.answers = asyncio.Event()

    async def __call__(self, call: ToolCall | None, request: Any) -> object:
        name = None if call is None else call.id
        self.asked.append(name)
        self.is_asked.set()
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.withdrawn.append(name)
            raise
        return {"really": True} if name == "1" else None


@pytest.fixture
def person() -> Person:
    return Person()


@pytest.fixture
def states() -> list[tuple[str, State]]:
    return []


@pytest.fixture
def host(wire: Wire, person: Person, states: list[tuple[str, State]]) -> Iterator[Host]:
    """A host that hears what the server at the other end asks. Its tools with a slot share one here, too."""
    limits: dict[str, object] = {
        name: {"concurrency": {"key": "slot", "limit": 2}} for name in ("ask", "hold", "work")
    }
    wire.host = Host(limits, question=person, on_state=lambda call, state: states.append((call.id, state)))
    yield wire.host
    wire.host = None


def told(results: list[ToolResult]) -> list[tuple[str, str, str]]:
    return [(each.id, each.status, each.text) for each in results]


async def soon(host: Host, calls: list[ToolCall], call: Any) -> list[ToolResult]:
    """Run a batch that ends soon."""
    async with asyncio.timeout(2 * SOON):
        return await host.run(calls, call=call)


# -------------------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize("way", ["client", "session"])
async def test_results_come_back_in_the_written_order_whenever_they_are_there(
    wire: Wire, host: Host, case: str, way: str
) -> None:
    call = wire.client if way == "client" else wire.client.session
    await wire.call("once", case=case)
    batch = host.start(
        [
            ToolCall("c1", "hold", {"case": case}),
            ToolCall("c2", "once", {"case": case}),
            ToolCall("c3", "nothing"),
            ToolCall("c4", "large", {"size": 2}),
            ToolCall("c5", "fail", {"how": "deliberately"}),
        ],
        call=call,
    )
    await wire.said(case, "started")
    await until(lambda: len(batch.results_so_far()) == 4)
    await wire.let_go(case)
    results = await batch.results()
    assert [(each.id, each.name, each.status) for each in results] == [
        ("c1", "hold", "ok"),
        ("c2", "once", "error"),
        ("c3", "nothing", "error"),
        ("c4", "large", "ok"),
        ("c5", "fail", "error"),
    ]
    assert (results[1].meta or {})["code"] == "RATE_LIMIT_EXCEEDED"
    assert "Unknown tool: nothing" in results[2].text
    assert results[3].structured_content == {"number": 2, "titles": ["xx"]}
    assert "No such ticket: 7" in results[4].text


@with_cancellation
async def test_cancelling_a_batch_ends_its_calls_on_the_server(wire: Wire, host: Host, case: str) -> None:
    cases = [f"{case}-1", f"{case}-2"]
    batch = host.start([ToolCall(each, "read", {"case": each}) for each in cases], call=wire.client)
    for each in cases:
        await wire.said(each, "started")
    batch.cancel()
    assert [each.status for each in await batch.results()] == ["cancelled"] * 2
    await batch.ended()
    for each in cases:
        said = await wire.said(each, "over")
        assert ("cancelled" in said, "done" in said) == (True, False)


async def test_a_call_that_is_not_answered_in_time_may_have_run(wire: Wire, host: Host, case: str) -> None:
    async def call(name: str, arguments: dict[str, Any]) -> object:
        return await wire.client.call_tool(name, arguments, read_timeout_seconds=0.05)

    (result,) = await soon(host, [ToolCall("1", "hold", {"case": case})], call)
    assert result.status == "unknown"
    assert (await wire.call("restart")).is_error is False


async def test_a_call_that_cannot_be_written_leaves_the_connection_to_the_others(
    wire: Wire, host: Host, case: str
) -> None:
    """Half a character, which a model can write and no transport can send."""
    calls = [
        ToolCall("1", "restart"),
        ToolCall("2", "hold", {"case": f"{case}\ud83d"}),
        ToolCall("3", "large", {"size": 1}),
    ]
    results = await soon(host, calls, wire.client)
    assert [each.status for each in results] == ["ok", "error", "ok"]
    assert "was not sent" in results[1].text
    assert (await wire.call("restart")).is_error is False


@contextlib.asynccontextmanager
async def answering(status: str, kind: str, body: str) -> AsyncIterator[str]:
    """The address of a server that gives this answer to whatever it is asked."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}connection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"


JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
NOT_FOUND: Final = '{"jsonrpc": "2.0", "id": null, "error": {"code": -32001, "message": "Session not found"}}'


@pytest.mark.parametrize(
    ("status", "kind", "body", "result"),
    [
        ("502 Bad Gateway", "text/html", "<p>a gateway", "unknown"),
        ("504 Gateway Timeout", "text/plain", "", "unknown"),
        ("200 OK", "text/html", "<p>log in first", "unknown"),
        ("202 Accepted", JSON, "", "unknown"),
        ("200 OK", JSON, '{"jsonrpc', "unknown"),
        ("200 OK", EVENTS, "", "unknown"),
        ("200 OK", EVENTS, "data: {\n\n", "unknown"),
        ("404 Not Found", JSON, NOT_FOUND, "error"),
        ("429 Too Many Requests", JSON, NOT_FOUND.replace("-32001", "-32000"), "error"),
    ],
)
async def test_a_call_may_have_run_unless_its_answer_can_be_read(
    status: str, kind: str, body: str, result: str
) -> None:
    async with answering(status, kind, body) as address, http_client() as http:
        server = streamable_http_client(address, http_client=http)
        async with Client(server, mode="2026-07-28", cache=None) as client:
            for call in (client, client.session):
                (answer,) = await soon(Host(), [ToolCall("1", "any")], call)
                assert answer.status == result
                assert ("may have run" in answer.text) == (result == "unknown")


# ---------------------------------------------------------------------------------------------- questions


@with_a_back_channel
@pytest.mark.parametrize("way", ["client", "session"])
async def test_of_calls_that_ask_at_the_same_time_each_is_named(
    wire: Wire, host: Host, person: Person, states: list[tuple[str, State]], case: str, way: str
) -> None:
    calls = [ToolCall(str(i), "ask", {"case": f"{case}-{i}"}) for i in (1, 2)]
    batch = host.start(calls, call=wire.client if way == "client" else wire.client.session)
    for each in calls:
        await wire.said(str(each.arguments["case"]), "asks")
    await until(lambda: batch.states == ("awaiting-input",) * 2)
    # One is asked at a time.
    assert len(person.asked) == 1
    person.answers.set()
    assert told(await batch.results()) == [("1", "ok", "accept"), ("2", "ok", "decline")]
    assert sorted(map(str, person.asked)) == ["1", "2"]
    for each in calls:
        assert [state for name, state in states if name == each.id] == [
            "queued",
            "running",
            "awaiting-input",
            "running",
            "completed",
        ]


@with_a_back_channel
async def test_a_question_keeps_the_place_of_its_call(
    wire: Wire, host: Host, person: Person, states: list[tuple[str, State]], case: str
) -> None:
    batch = host.start(
        [
            ToolCall("1", "ask", {"case": f"{case}-1"}),
            ToolCall("2", "ask", {"case": f"{case}-2"}),
            ToolCall("3", "hold", {"case": case}),
            ToolCall("4", "restart"),
        ],
        call=wire.client,
    )
    await until(lambda: batch.states == ("awaiting-input", "awaiting-input", "queued", "completed"))
    assert await wire.said(case) == []
    person.answers.set()
    await wire.said(case, "started")
    answered = min(states.index((name, "completed")) for name in ("1", "2"))
    assert states.index(("3", "running")) > answered
    await wire.let_go(case)
    assert [each.status for each in await batch.results()] == ["ok"] * 4


@with_a_back_channel
async def test_a_cancelled_call_ends_on_its_server_and_takes_its_question_back(
    wire: Wire, host: Host, person: Person, case: str
) -> None:
    batch = host.start([ToolCall("1", "ask", {"case": case})], call=wire.client)
    await asyncio.wait_for(person.is_asked.wait(), SOON)
    batch.cancel()
    await batch.ended()
    assert [each.status for each in await batch.results()] == ["cancelled"]
    await wire.said(case, "not told: CANCELLED")
    assert (person.asked, person.withdrawn) == (["1"], ["1"])


@with_a_back_channel
async def test_a_question_of_a_tool_that_another_one_calls_is_that_of_the_call(
    wire: Wire, host: Host, person: Person, case: str
) -> None:
    person.answers.set()
    calls = [
        ToolCall(
            str(i),
            "delegate_soon",
            {"case": f"{case}-{i}", "tool": "ask", "arguments": {"case": f"{case}-{i}"}},
        )
        for i in (1, 2)
    ]
    results = await soon(host, calls, wire.client)
    assert told(results) == [("1", "ok", "accept"), ("2", "ok", "decline")]
    assert sorted(map(str, person.asked)) == ["1", "2"]


@with_a_back_channel
async def test_whoever_is_asked_may_run_a_batch_whose_tool_asks(wire: Wire, case: str) -> None:
    """The question of the inner call comes over the same connection, and does not wait for the outer one."""

    async def question(call: ToolCall | None, request: object) -> object:
        asked.append(None if call is None else call.id)
        if asked == ["outer"]:
            results.extend(await host.run([ToolCall("inner", "ask", {"case": f"{case}-2"})]))
        return {"really": True}

    asked: list[str | None] = []
    results: list[ToolResult] = []
    wire.host = host = Host(None, wire.client, question=question)
    try:
        results.extend(await soon(host, [ToolCall("outer", "ask", {"case": f"{case}-1"})], wire.client))
        # Nobody is left behind.
        results.extend(await soon(host, [ToolCall("later", "ask", {"case": f"{case}-3"})], wire.client))
    finally:
        wire.host = None
    assert told(results) == [(name, "ok", "accept") for name in ("inner", "outer", "later")]
    assert asked == ["outer", "inner", "later"]


@with_a_back_channel
async def test_an_answer_that_cannot_be_written_fails_its_call_alone(
    wire: Wire, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a character, typed or read by whoever is asked."""
    answers: list[object] = [{"really": "\ud83d"}, {"really": True}]
    wire.host = host = Host(None, wire.client, question=lambda call, request: answers.pop(0))
    try:
        batch = [ToolCall(str(number), "ask", {"case": f"{case}-{number}"}) for number in (1, 2)]
        results = [*await soon(host, batch[:1], wire.client), *await soon(host, batch[1:], wire.client)]
    finally:
        wire.host = None
    assert [each.status for each in results] == ["error", "ok"]
    assert "a question could not be answered" in caplog.text


@either_way
@pytest.mark.parametrize("way", ["client", "session"])
async def test_a_question_before_a_call_is_that_of_its_call(
    wire: Wire, host: Host, person: Person, case: str, way: str
) -> None:
    calls = [ToolCall(str(i), "book", {"case": f"{case}-{i}"}) for i in (1, 2)]
    person.answers.set()
    results = await soon(host, calls, wire.client if way == "client" else wire.client.session)
    assert told(results)[0] == ("1", "ok", "really: True")
    # Who declines gets no booking.
    assert results[1].status == "error"
    assert sorted(map(str, person.asked)) == ["1", "2"]


def foreign() -> MCPServer[Any]:
    """A server without this package: its questions do not say which call asks."""
    server: MCPServer[Any] = MCPServer("foreign")

    @server.tool()
    async def ask(ctx: Context[Any, Any]) -> str:
        return str((await ctx.elicit("Really?", schema=Answer)).action)

    return server


@pytest.mark.slow
async def test_a_foreign_server_over_a_pipe_is_understood_as_far_as_can_be(tmp_path: Path) -> None:
    person = Person()
    person.answers.set()
    host = Host(question=person)
    program = "from tests.flow.test_host import foreign; foreign().run('stdio')"
    parameters = StdioServerParameters(command=sys.executable, args=["-c", program], cwd=ROOT)
    with (tmp_path / "log").open("w") as log:
        server = stdio_client(parameters, errlog=log)
        callback = host.elicitation_callback
        async with Client(server, mode="legacy", cache=None, elicitation_callback=callback) as client:
            alone = await soon(host, [ToolCall("1", "ask")], client)
            assert told(alone) == [("1", "ok", "accept")]
            person.answers.clear()
            batch = host.start([ToolCall("1", "ask"), ToolCall("2", "ask")], call=client)
            await asyncio.wait_for(person.is_asked.wait(), SOON)
            person.answers.set()
            assert told(await batch.results()) == [("1", "ok", "decline"), ("2", "ok", "decline")]
    # While two ran, nobody could tell whose question it was; the last one was alone again, perhaps.
    assert person.asked[:2] == ["1", None]
    assert person.asked[2] in (None, "1", "2")


@pytest.mark.slow
async def test_whoever_is_asked_by_a_foreign_server_may_run_a_batch_whose_tool_asks(tmp_path: Path) -> None:
    """Nothing says whose question it is, and the hook that runs the batch is asked all the same."""

    async def question(call: ToolCall | None, request: object) -> object:
        asked.append(None if call is None else call.id)
        if len(asked) == 1:
            results.extend(await host.run([ToolCall("inner", "ask")], call=client))
        return {"really": True}

    asked: list[str | None] = []
    results: list[ToolResult] = []
    host = Host(question=question)
    program = "from tests.flow.test_host import foreign; foreign().run('stdio')"
    parameters = StdioServerParameters(command=sys.executable, args=["-c", program], cwd=ROOT)
    with (tmp_path / "log").open("w") as log:
        server = stdio_client(parameters, errlog=log)
        callback = host.elicitation_callback
        async with Client(server, mode="legacy", cache=None, elicitation_callback=callback) as client:
            results.extend(await soon(host, [ToolCall("outer", "ask")], client))
            results.extend(await soon(host, [ToolCall("later", "ask")], client))
    assert told(results) == [(name, "ok", "accept") for name in ("inner", "outer", "later")]
    # While two ran, nobody could tell whose question it was.
    assert asked == ["outer", None, "later"]


# --------------------------------------------------------------------------------------- lost connections


@contextlib.asynccontextmanager
async def mortal(kind: Kind, folder: Path) -> AsyncIterator[tuple[Server, Callable[[], None]]]:
    """A server in a process of its own, and what ends that at once."""
    servers = Servers(folder)
    server = servers.of(kind)

    def kill() -> None:
        if kind.transport == "http":
            servers._processes[0].kill()
            return
        (child,) = [
            each for each in psutil.Process().children() if os.fspath(server.journal) in each.cmdline()
        ]
        child.send_signal(signal.SIGKILL)

    try:
        yield server, kill
    finally:
        servers.close()


every_process = pytest.mark.parametrize("kind", [*STDIO, *HTTP], ids=str)


@pytest.mark.slow
@every_process
async def test_calls_of_a_server_that_is_killed_may_have_run_and_later_ones_have_not(
    kind: Kind, tmp_path: Path
) -> None:
    host = Host()
    async with mortal(kind, tmp_path) as (server, kill):
        # Over HTTP the SDK cancels whoever uses its client when a request fails, and raises this at the end.
        with contextlib.suppress(BaseExceptionGroup):
            async with server.connect() as wire:
                done = await soon(host, [ToolCall("0", "restart")], wire.client)
                batch = host.start(
                    [ToolCall(str(i), "hold", {"case": "a"}) for i in (1, 2)], call=wire.client
                )
                await wire.said("a", "started", 2)
                kill()
                async with asyncio.timeout(SOON):
                    await batch.results()
                if kind.transport == "stdio":
                    later = await soon(host, [ToolCall("3", "restart")], wire.client)
                    assert [each.status for each in later] == ["not_run"]
        async with asyncio.timeout(SOON):
            results = await batch.results()
            await batch.ended()
        assert [each.status for each in done] == ["ok"]
        assert [each.status for each in results] == ["unknown"] * 2
        assert all("may have run" in each.text for each in results)
        later = await soon(host, [ToolCall("3", "restart")], wire.client)
        assert [each.status for each in later] == ["not_run"]


@pytest.mark.slow
@every_process
async def test_a_function_that_connects_for_each_call_loses_only_that_call(
    kind: Kind, tmp_path: Path
) -> None:
    begun = asyncio.Event()
    host = Host()
    async with mortal(kind, tmp_path) as (server, kill):

        async def call(name: str, arguments: dict[str, Any]) -> object:
            if name == "here":
                await asyncio.sleep(0)
                return "fine"
            async with server.connect() as wire:
                calling = asyncio.create_task(wire.client.call_tool(name, arguments))
                await wire.said("a", "started")
                begun.set()
                return await calling

        batch = host.start([ToolCall("1", "hold", {"case": "a"}), ToolCall("2", "here")], call=call)
        await asyncio.wait_for(begun.wait(), SOON)
        kill()
        async with asyncio.timeout(SOON):
            results = await batch.results()
    assert [each.status for each in results] == ["unknown", "ok"]


@pytest.mark.slow
@every_process
async def test_a_call_to_a_server_that_is_gone_is_never_said_to_have_run(kind: Kind, tmp_path: Path) -> None:
    host = Host()
    async with mortal(kind, tmp_path) as (server, kill):
        with contextlib.suppress(BaseExceptionGroup):
            async with server.connect() as wire:
                await soon(host, [ToolCall("0", "restart")], wire.client)
                kill()
                batch = host.start([ToolCall("1", "restart")], call=wire.client)
                async with asyncio.timeout(SOON):
                    await batch.results()
        async with asyncio.timeout(SOON):
            (result,) = await batch.results()
        # Who has handed it on cannot know how far it came.
        assert result.status in ("unknown", "not_run")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in (*STDIO, *HTTP) if kind.has_back_channel], ids=str)
async def test_a_question_of_a_server_that_is_killed_is_withdrawn(kind: Kind, tmp_path: Path) -> None:
    person = Person()
    host = Host(question=person)
    async with mortal(kind, tmp_path) as (server, kill):
        with contextlib.suppress(BaseExceptionGroup):
            async with server.connect() as wire:
                wire.host = host
                batch = host.start([ToolCall("1", "ask", {"case": "a"})], call=wire.client)
                await asyncio.wait_for(person.is_asked.wait(), SOON)
                kill()
                async with asyncio.timeout(SOON):
                    await batch.results()
        async with asyncio.timeout(SOON):
            (result,) = await batch.results()
    assert result.status == "unknown"
    assert person.withdrawn == ["1"]
