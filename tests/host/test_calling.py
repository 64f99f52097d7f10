"""How one call reaches its tool, and what came of it, whatever happens on the way."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import anyio
import httpx2
import mcp_types as types
import pytest
from mcp.client import Client
from mcp.client.session import ClientSession
from mcp.client.session_group import ClientSessionGroup
from mcp.server import Server
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.resolve import Elicit, Resolve
from mcp.shared.exceptions import MCPError
from mcp.shared.memory import create_client_server_memory_streams
from pydantic import BaseModel

from frontmcp_py import FrontMCP, RateLimit
from frontmcp_py.host import CallOption, Host, Run, ToolCall, ToolResult
from frontmcp_py.host.calling import outcome
from frontmcp_py.testing import run_virtual, settle, virtual_time

Mode = Literal["auto", "legacy"]
both_modes = pytest.mark.parametrize("mode", ["auto", "legacy"])

GOOD: Final = ToolCall("1", "good")
BAD: Final = ToolCall("2", "bad")
LAST: Final = ToolCall("3", "good")


def now() -> float:
    return asyncio.get_running_loop().time()


# ---------------------------------------------------------------------------------------------- functions


class Broken(Exception):
    """Cannot even say what is wrong."""

    def __str__(self) -> str:
        raise ValueError("no text")


def among_good_ones(
    bad: Callable[[], Awaitable[object]],
) -> Callable[[str, dict[str, Any]], Awaitable[object]]:
    """A function whose tool `bad` does this, and whose tool `good` takes a second."""

    async def call(name: str, arguments: dict[str, Any]) -> object:
        if name == "bad":
            return await bad()
        await asyncio.sleep(1)
        return "fine"

    return call


def raising(error: BaseException) -> Callable[[], Awaitable[object]]:
    async def bad() -> object:
        raise error

    return bad


async def result_of(bad: Callable[[], Awaitable[object]]) -> ToolResult:
    """What comes of a bad call among good ones, which do not suffer from it."""
    first, result, last = await Host(call=among_good_ones(bad)).run([GOOD, BAD, LAST])
    assert [(each.id, each.name, each.status, each.text) for each in (first, last)] == [
        ("1", "good", "ok", "fine"),
        ("3", "good", "ok", "fine"),
    ]
    assert (result.id, result.name) == ("2", "bad")
    assert result.text.strip()
    return result


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Exception(), "bad failed: Exception"),
        (Exception("  \n"), "bad failed: Exception"),
        (ValueError("no such page"), "bad failed: ValueError: no such page"),
        (KeyError("bad"), "bad failed: KeyError: 'bad'"),
        (Broken(), "bad failed: Broken"),
        (BaseException(), "bad failed: BaseException"),
        (BaseException("out"), "bad failed: BaseException: out"),
        (SystemExit(), "bad failed: SystemExit"),
        (SystemExit(3), "bad failed: SystemExit: 3"),
        (GeneratorExit(), "bad failed: GeneratorExit"),
        (asyncio.CancelledError(), "bad failed: it was cancelled from within"),
        (StopIteration(), "bad failed: RuntimeError: coroutine raised StopIteration"),
        (ExceptionGroup("two", [ValueError("a"), KeyError()]), "bad failed: ValueError: a; KeyError"),
        (BaseExceptionGroup("one", [BaseExceptionGroup("in it", [SystemExit()])]), "bad failed: SystemExit"),
        (MCPError(-32603, "Internal server error"), "bad failed: Internal server error"),
        (MCPError(-32603, ""), "bad failed: MCPError"),
    ],
    ids=lambda value: repr(value) if isinstance(value, BaseException) else "",
)
@virtual_time
async def test_whatever_a_function_raises_is_the_result_of_its_call_alone(
    error: BaseException, text: str
) -> None:
    result = await result_of(raising(error))
    assert (result.status, result.is_error, result.text) == ("error", True, text)


def test_an_interrupt_of_the_program_is_not_the_failure_of_a_call() -> None:
    with pytest.raises(KeyboardInterrupt):
        run_virtual(result_of, raising(KeyboardInterrupt()))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError(),
        ConnectionResetError("reset by peer"),
        BrokenPipeError(),
        EOFError(),
        asyncio.IncompleteReadError(b"{", 2),
        TimeoutError(),
        anyio.ClosedResourceError(),
        anyio.BrokenResourceError(),
        anyio.EndOfStream(),
        httpx2.ReadError("cut"),
        httpx2.ReadTimeout("late"),
        httpx2.RemoteProtocolError("no answer"),
        MCPError(types.CONNECTION_CLOSED, "Connection closed"),
        MCPError(types.CONNECTION_CLOSED, "SSE stream ended without a response"),
        MCPError(types.REQUEST_TIMEOUT, "Request 'tools/call' timed out"),
        MCPError(types.REQUEST_TIMEOUT, "Timed out after 1.0s waiting for 'tools/call'"),
        MCPError(types.PARSE_ERROR, "Failed to parse JSON response: line 1"),
        MCPError(types.INVALID_REQUEST, "Unexpected content type: text/html"),
        MCPError(types.INTERNAL_ERROR, "Server returned an error response"),
        ExceptionGroup("late", [ValueError(), TimeoutError()]),
        ExceptionGroup("one of them", [ValueError(), ConnectionError()]),
        BaseExceptionGroup("deep", [SystemExit(), ExceptionGroup("deeper", [anyio.ClosedResourceError()])]),
    ],
    ids=lambda error: f"{type(error).__name__} {error}",
)
@virtual_time
async def test_who_has_no_answer_cannot_say_whether_the_call_has_run(error: BaseException) -> None:
    result = await result_of(raising(error))
    assert (result.status, result.is_error) == ("unknown", True)
    assert "may have run" in result.text
    assert "not run" not in result.text


@pytest.mark.parametrize(
    "error",
    [
        MCPError(types.CONNECTION_CLOSED, "Rate limit exceeded"),
        MCPError(types.REQUEST_TIMEOUT, "Session not found"),
        MCPError(types.INTERNAL_ERROR, "Internal server error"),
        httpx2.HTTPStatusError(
            "403 Forbidden", request=httpx2.Request("GET", "http://x"), response=httpx2.Response(403)
        ),
        OSError(28, "No space left on device"),
    ],
    ids=lambda error: f"{type(error).__name__} {error}",
)
@virtual_time
async def test_an_answer_is_an_answer_whatever_code_it_has(error: Exception) -> None:
    result = await result_of(raising(error))
    assert result.status == "error"
    assert str(error) in result.text


@virtual_time
async def test_an_unknown_name_is_a_result_among_the_others() -> None:
    tools: dict[str, Callable[..., Awaitable[object]]] = {"known": lambda: asyncio.sleep(1, "found")}

    async def call(name: str, arguments: dict[str, Any]) -> object:
        return await tools[name](**arguments)

    results = await Host(call=call).run(
        [ToolCall(str(i), name) for i, name in enumerate(["known", "?", "known"])]
    )
    assert [(each.id, each.status, each.text) for each in results] == [
        ("0", "ok", "found"),
        ("1", "error", "? failed: KeyError: '?'"),
        ("2", "ok", "found"),
    ]


@pytest.mark.parametrize(
    ("value", "status", "text"),
    [
        (None, "ok", ""),
        ("words", "ok", "words"),
        (0, "ok", "0"),
        (b"\xff", "ok", None),
        ({"a": [1]}, "ok", '{\n  "a": [\n    1\n  ]\n}'),
        (types.TextContent(text="a block"), "ok", "a block"),
        ([types.TextContent(text="a"), types.TextContent(text="b")], "ok", "a\nb"),
        (types.CallToolResult(content=[types.TextContent(text="no")], is_error=True), "error", "no"),
        (types.CallToolResult(content=[], is_error=True), "error", "good failed and does not say why"),
        (ToolResult("other", "name", "skipped", [types.TextContent(text="kept")]), "skipped", "kept"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@virtual_time
async def test_whatever_a_function_returns_becomes_a_result(
    value: object, status: str, text: str | None
) -> None:
    async def call(name: str, arguments: dict[str, Any]) -> object:
        return value

    (result,) = await Host(call=call).run([GOOD])
    assert (result.id, result.name, result.status) == ("1", "good", status)
    if text is not None:
        assert result.text == text


async def _stream() -> AsyncIterator[str]:
    yield "a part"


@virtual_time
async def test_what_a_function_that_is_not_async_returns_is_the_result() -> None:
    """It has run by then: to say that it ought to be async would make the model run it again."""
    call: Any = lambda name, arguments: "at once"  # noqa: E731
    (result,) = await Host(call=call).run([GOOD])
    assert (result.status, result.text) == ("ok", "at once")


@virtual_time
async def test_a_function_that_returns_a_generator_fails_with_the_reason() -> None:
    call: Any = lambda name, arguments: _stream()  # noqa: E731
    (result,) = await Host(call=call).run([GOOD])
    assert result.status == "error"
    assert "returned a generator" in result.text


@virtual_time
async def test_whatever_can_be_called_and_awaited_is_a_function() -> None:
    class Caller:
        async def __call__(self, name: str, arguments: dict[str, Any]) -> str:
            return name

    async def with_more(more: str, name: str, arguments: dict[str, Any]) -> str:
        return more + name

    calls: list[CallOption] = [
        Caller(),
        functools.partial(with_more, "so "),
        lambda name, arguments: asyncio.get_running_loop().create_task(asyncio.sleep(1, name)),
    ]
    results = [await Host(call=call).run([GOOD]) for call in calls]
    assert [result.text for (result,) in results] == ["good", "so good", "good"]


@pytest.mark.parametrize("call", [7, "name", object()], ids=repr)
def test_what_cannot_be_called_is_refused_when_the_host_is_made(call: Any) -> None:
    with pytest.raises(TypeError, match="cannot be called"):
        Host(call=call)


@virtual_time
async def test_a_function_may_keep_and_change_its_arguments() -> None:
    asked = ToolCall("1", "good", {"list": "a"})

    async def call(name: str, arguments: dict[str, Any]) -> object:
        arguments["list"] += "b"
        return arguments["list"]

    host = Host(call=call)
    assert [(await host.run([asked]))[0].text for _ in range(2)] == ["ab", "ab"]
    assert asked.arguments == {"list": "a"}


@virtual_time
async def test_a_function_may_change_what_stands_within_its_arguments() -> None:
    """What the model wrote stays as it was, for the provider and for a restart."""
    message = {"type": "tool_use", "id": "1", "name": "good", "input": {"list": ["a"], "in": {"it": {}}}}
    (asked,) = ToolCall.from_anthropic([message])

    async def call(name: str, arguments: dict[str, Any]) -> object:
        arguments["list"].append("b")
        arguments["in"]["it"]["new"] = 1
        return arguments["list"]

    host = Host(call=call)
    assert [json.loads((await host.run([asked]))[0].text) for _ in range(2)] == [["a", "b"]] * 2
    assert asked.arguments == message["input"] == {"list": ["a"], "in": {"it": {}}}


@virtual_time
async def test_a_function_may_be_given_what_cannot_be_copied() -> None:
    given: list[object] = []

    async def call(name: str, arguments: dict[str, Any]) -> None:
        given.append(arguments["file"])

    with Path(__file__).open() as file:
        await Host(call=call).run([ToolCall("1", "good", {"file": file})])
    assert given == [file]


def test_a_call_that_is_thrown_away_goes_on_with_nothing() -> None:
    """Its coroutine is closed where it stands, as Python asks of whoever is closed."""

    async def call(name: str, arguments: dict[str, Any]) -> None:
        await Forever()

    working = outcome(call, GOOD, {}, None)
    working.send(None)
    with pytest.raises(GeneratorExit):
        working.throw(GeneratorExit)


class Forever:
    """Whoever awaits it waits."""

    def __await__(self) -> Generator[None, None, None]:
        while True:
            yield


# ----------------------------------------------------------------------------------------------- sessions


class Point(BaseModel):
    x: int


def build() -> FrontMCP:
    """A server in this process."""
    server = FrontMCP("in process")

    @server.tool
    async def wait(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return f"waited {seconds:g}"

    @server.tool(rate_limit=RateLimit(1, window="1h"))
    async def once() -> str:
        return "once"

    @server.tool
    async def locate() -> Point:
        return Point(x=1)

    @server.tool
    async def draw() -> Image:
        return Image(data=b"a picture", format="png")

    @server.tool
    async def say(code: int, words: str) -> str:
        raise MCPError(code, words)

    return server


Way = Literal["client", "its session", "a session"]
every_way = pytest.mark.parametrize("way", ["client", "its session", "a session"])


@asynccontextmanager
async def connected(server: FrontMCP, mode: Mode, way: Way, **options: Any) -> AsyncIterator[Any]:
    """What a host is given to reach a server: a client, the session inside of it, or one made by hand."""
    async with AsyncExitStack() as stack:
        if way == "a session":
            yield await stack.enter_async_context(made_by_hand(server, mode, **options))
        else:
            client = await stack.enter_async_context(Client(server.mcp, mode=mode, cache=None, **options))
            yield client if way == "client" else client.session


@asynccontextmanager
async def made_by_hand(server: FrontMCP, mode: Mode, **options: Any) -> AsyncIterator[ClientSession]:
    """A session over streams."""
    lowlevel = server.mcp._lowlevel_server
    async with (
        create_client_server_memory_streams() as (ours, theirs),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(lowlevel.run, *theirs, lowlevel.create_initialization_options())
        async with ClientSession(*ours, **options) as session:
            await (session.initialize() if mode == "legacy" else session.discover())
            yield session
        tasks.cancel_scope.cancel()


@every_way
@both_modes
@virtual_time
async def test_a_refusal_at_once_does_not_overtake_calls_that_take_longer(mode: Mode, way: Way) -> None:
    async with connected(build(), mode, way) as call:
        host = Host(call=call)
        await host.run([ToolCall("0", "once")])
        begin = now()
        results = await host.run(
            [
                ToolCall("c1", "wait", {"seconds": 0.3}),
                ToolCall("c2", "once"),
                ToolCall("c3", "wait", {"seconds": 0.1}),
            ]
        )
        assert now() - begin == pytest.approx(0.3)
    assert [(each.id, each.name, each.status) for each in results] == [
        ("c1", "wait", "ok"),
        ("c2", "once", "error"),
        ("c3", "wait", "ok"),
    ]
    assert (results[1].meta or {})["code"] == "RATE_LIMIT_EXCEEDED"


@every_way
@both_modes
@virtual_time
async def test_structured_results_images_and_refusals_arrive_as_they_are(mode: Mode, way: Way) -> None:
    async with connected(build(), mode, way) as call:
        point, image, unknown, bad = await Host(call=call).run(
            [
                ToolCall("1", "locate"),
                ToolCall("2", "draw"),
                ToolCall("3", "nothing"),
                ToolCall("4", "wait", {"seconds": "long"}),
            ]
        )
    assert (point.status, point.structured_content) == ("ok", {"x": 1})
    (block,) = image.content
    assert isinstance(block, types.ImageContent)
    assert (image.text, block.mime_type) == ("[image image/png]", "image/png")
    assert (unknown.status, unknown.is_error) == ("error", True)
    assert "Unknown tool: nothing" in unknown.text
    assert bad.status == "error"
    assert "seconds" in bad.text


@every_way
@both_modes
@virtual_time
async def test_a_tool_that_uses_the_code_of_a_closed_connection_has_been_called(mode: Mode, way: Way) -> None:
    async with connected(build(), mode, way) as call:
        said = {"code": types.CONNECTION_CLOSED, "words": "Too many requests"}
        closed = {"code": types.CONNECTION_CLOSED, "words": "Connection closed"}
        late = {"code": types.REQUEST_TIMEOUT, "words": "Session not found"}
        results = await Host(call=call).run(
            [ToolCall(str(i), "say", words) for i, words in enumerate([said, closed, late])]
        )
    assert [(each.status, each.text) for each in (results[0], results[2])] == [
        ("error", "say failed: Too many requests"),
        ("error", "say failed: Session not found"),
    ]
    # It may be this server that has lost another one.
    assert results[1].status == "unknown"


@every_way
@both_modes
@virtual_time
async def test_a_call_that_is_not_answered_in_time_may_have_run(mode: Mode, way: Way) -> None:
    async with connected(build(), mode, way, read_timeout_seconds=2) as call:
        host = Host(call=call)
        late, soon = await host.run(
            [ToolCall("1", "wait", {"seconds": 3}), ToolCall("2", "wait", {"seconds": 1})]
        )
        assert (late.status, soon.text) == ("unknown", "waited 1")
        # Only that call is lost.
        assert (await host.run([ToolCall("3", "wait", {"seconds": 1})]))[0].text == "waited 1"


@every_way
@both_modes
@virtual_time
async def test_a_call_over_a_connection_that_was_closed_before_has_not_run(mode: Mode, way: Way) -> None:
    async with connected(build(), mode, way) as call:
        host = Host(call=call)
        assert (await host.run([ToolCall("1", "locate")]))[0].status == "ok"
    for _ in range(2):
        (result,) = await host.run([ToolCall("2", "locate")])
        assert (result.status, result.is_error) == ("not_run", True)
        assert ("there is no connection" if way == "client" else "may be called again") in result.text


@virtual_time
async def test_a_call_over_a_connection_that_was_never_opened_has_not_run() -> None:
    async with create_client_server_memory_streams() as (ours, _):
        for call in (Client(build().mcp), ClientSession(*ours)):
            (result,) = await Host(call=call).run([ToolCall("1", "locate")])
            assert result.status == "not_run"
            assert result.text == (
                "not run (there is no connection: the client was not entered, or has been left)"
            )


RING: Final[list[Any]] = []
RING.append(RING)


@every_way
@both_modes
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("say", {"code": 1, "words": "\ud83d"}),
        ("say", {"code": 1, "words": "a", "more": {"\ude00": 1}}),
        ("sa\ud83d", {}),
        ("say", {"code": 1, "words": b"\xff"}),
        ("say", {"code": 1, "words": object()}),
        ("say", {"code": 1, "words": RING}),
    ],
    ids=["text", "key", "name", "bytes", "object", "ring"],
)
@virtual_time
async def test_a_call_that_cannot_be_written_is_not_sent_and_breaks_no_other(
    mode: Mode, way: Way, name: str, arguments: dict[str, Any]
) -> None:
    """A model may write half a character; a program, anything."""
    async with connected(build(), mode, way) as call:
        host = Host(call=call)
        results = await host.run(
            [ToolCall("1", "locate"), ToolCall("2", name, arguments), ToolCall("3", "wait", {"seconds": 1})]
        )
        assert [each.status for each in results] == ["ok", "error", "ok"]
        assert "was not sent: its arguments have no form in JSON" in results[1].text
        assert [each.status for each in await host.run([ToolCall("4", "locate")])] == ["ok"]


@virtual_time
async def test_arguments_that_were_changed_must_be_such_as_can_be_written() -> None:
    def approve(asked: ToolCall) -> Run | bool:
        return Run({"code": 1, "words": "\ud83d"}) if asked.name == "say" else True

    async with connected(build(), "legacy", "a session") as call:
        results = await Host(call=call, approve=approve).run([ToolCall("1", "say"), ToolCall("2", "locate")])
    assert [each.status for each in results] == ["error", "ok"]
    assert "was not sent" in results[0].text


@pytest.mark.parametrize(
    ("mode", "way"), [("legacy", "client"), ("legacy", "a session"), ("auto", "a session")]
)
@virtual_time
async def test_calls_that_run_while_the_connection_is_closed_may_have_run(mode: Mode, way: Way) -> None:
    async with connected(build(), mode, way) as call:
        host = Host(call=call)
        running = host.start([ToolCall(str(i), "wait", {"seconds": 60}) for i in range(3)])
        await settle()
    assert [each.status for each in await running.results()] == ["unknown"] * 3
    assert now() < 60
    assert [each.status for each in await host.run([ToolCall("4", "locate")])] == ["not_run"]


@virtual_time
async def test_a_server_in_this_process_answers_even_while_its_connection_is_closed() -> None:
    # A call of this kind is made in the host's own task, so there is nothing in between to be lost.
    async with connected(build(), "auto", "client") as call:
        running = Host(call=call).start([ToolCall("1", "wait", {"seconds": 3})])
        await settle()
    (result,) = await running.results()
    assert (result.status, (result.meta or {})["code"]) == ("error", "OVERLOADED")


# --------------------------------------------------------------------- questions that come before a call


class Answer(BaseModel):
    really: bool


async def confirmation(what: str) -> Elicit[Answer]:
    return Elicit(f"Really {what}?", Answer)


async def again(answer: Annotated[Answer, Resolve(confirmation)]) -> Elicit[Answer] | Answer:
    return Elicit("Really, really?", Answer) if answer.really else answer


def careful() -> FrontMCP:
    server = FrontMCP("careful")

    @server.tool
    async def book(
        what: str,
        first: Annotated[Answer, Resolve(confirmation)],
        second: Annotated[Answer, Resolve(again)],
    ) -> str:
        return f"{what}: {first.really}, {second.really}"

    return server


@every_way
@both_modes
@virtual_time
async def test_whoever_is_called_through_questions_before_a_call_are_answered(mode: Mode, way: Way) -> None:
    asked: list[tuple[str | None, str]] = []

    async def question(call: ToolCall | None, request: types.ElicitRequestParams) -> object:
        asked.append((None if call is None else call.id, request.message))
        await asyncio.sleep(1)
        return {"really": call is not None and (call.id, request.message) != ("2", "Really, really?")}

    host = Host(question=question)
    async with connected(careful(), mode, way, elicitation_callback=host.elicitation_callback) as session:
        results = await host.run(
            [ToolCall("1", "book", {"what": "ship"}), ToolCall("2", "book", {"what": "train"})], call=session
        )
    assert [each.text for each in results] == ["ship: True, True", "train: True, False"]
    assert sorted(asked) == [
        ("1", "Really ship?"),
        ("1", "Really, really?"),
        ("2", "Really train?"),
        ("2", "Really, really?"),
    ]


def _raise() -> object:
    raise ValueError("not today")


@every_way
@pytest.mark.parametrize("answer", [lambda: "text", _raise], ids=["wrong", "raises"])
@virtual_time
async def test_a_question_that_cannot_be_answered_fails_its_call(
    way: Way, answer: Callable[[], object]
) -> None:
    host = Host(question=lambda call, request: answer())
    async with connected(careful(), "auto", way, elicitation_callback=host.elicitation_callback) as session:
        (result,) = await host.run([ToolCall("1", "book", {"what": "ship"})], call=session)
    assert result.status == "error"
    assert "The host could not answer the question" in result.text


@every_way
@virtual_time
async def test_a_host_without_a_hook_says_so_when_it_is_asked(way: Way) -> None:
    host = Host()
    async with connected(careful(), "auto", way, elicitation_callback=host.elicitation_callback) as session:
        (result,) = await host.run([ToolCall("1", "book", {"what": "ship"})], call=session)
    assert (result.status, result.text) == ("error", "book failed: The host has nobody to ask")


@dataclass
class Insatiable:
    """A server that asks so many times before it answers, or only tells to come again."""

    rounds: int
    asks: bool
    calls: int = 0

    async def __call__(self, _: object, params: types.CallToolRequestParams) -> Any:
        self.calls += 1
        assert (params.request_state or "0") == str(self.calls - 1)
        assert (params.input_responses is not None) == (self.asks and self.calls > 1)
        if self.calls > self.rounds:
            return types.CallToolResult(content=[types.TextContent(text="enough")])
        return types.InputRequiredResult(
            request_state=str(self.calls), input_requests={"key": ASKING} if self.asks else None
        )


ASKING: Final = types.ElicitRequest(
    params=types.ElicitRequestFormParams(
        message="More?",
        requested_schema={"type": "object", "properties": {"really": {"type": "boolean"}}},
    )
)


@pytest.mark.parametrize("way", ["client", "its session"])
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize(("rounds", "status"), [(10, "ok"), (11, "error")])
@virtual_time
async def test_a_server_may_ask_ten_times_before_it_runs_a_call(
    way: Way, asks: bool, rounds: int, status: str
) -> None:
    server = Insatiable(rounds, asks)
    host = Host(question=lambda call, request: {"really": True})
    lowlevel: Server[Any] = Server("asks", on_call_tool=server, on_list_tools=_no_tools)
    async with Client(lowlevel, cache=None, elicitation_callback=host.elicitation_callback) as client:
        (result,) = await host.run([ToolCall("1", "any")], call=client if way == "client" else client.session)
    assert result.status == status
    assert server.calls == 11
    # Who is only told to come again does so after 50, 100, 200 and then each 250 ms.
    assert now() == pytest.approx(0 if asks else 0.35 + 7 * 0.25)


async def _no_tools(*_: object) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[])


@virtual_time
async def test_a_foreign_server_without_this_package_is_called_alike() -> None:
    server: MCPServer[Any] = MCPServer("foreign")

    @server.tool()
    async def add(a: int, b: int) -> int:
        return a + b

    async with Client(server, cache=None) as client:
        results = await Host(call=client).run(
            [ToolCall("1", "add", {"a": 1, "b": 2}), ToolCall("2", "add", {"a": "x"}), ToolCall("3", "sub")]
        )
    assert [(each.status, each.structured_content) for each in results] == [
        ("ok", {"result": 3}),
        ("error", None),
        ("error", None),
    ]


@virtual_time
async def test_several_servers_are_called_through_a_session_group() -> None:
    person: list[str | None] = []
    host = Host(question=lambda call, request: person.append(None if call is None else call.id))
    async with AsyncExitStack() as stack:
        group = ClientSessionGroup()
        for server in (build(), careful()):
            client = Client(
                server.mcp, mode="legacy", cache=None, elicitation_callback=host.elicitation_callback
            )
            session = (await stack.enter_async_context(client)).session
            info = types.Implementation(name=server.mcp.name, version="1")
            await group.connect_with_session(info, session)
        here, there, nowhere = await host.run(
            [ToolCall("1", "locate"), ToolCall("2", "book", {"what": "ship"}), ToolCall("3", "nothing")],
            call=group,
        )
    assert (here.status, here.structured_content) == ("ok", {"x": 1})
    # It was asked about, and declined.
    assert (there.status, person) == ("error", ["2"])
    assert (nowhere.status, nowhere.text) == ("error", "nothing failed: KeyError: 'nothing'")
