"""What running tools ask: which call it is, who answers, and what happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import mcp_types as types
import pytest
from mcp.client import Client
from mcp.client.session import ClientRequestContext
from mcp.server.mcpserver import Context, MCPServer
from pydantic import BaseModel

from frontmcp_py import FrontMCP, ToolContext
from frontmcp_py.host import Host, Operation, State, ToolCall
from frontmcp_py.testing import settle, virtual_time

FORM: Final = {"type": "object", "properties": {"really": {"type": "boolean"}}}


def now() -> float:
    return asyncio.get_running_loop().time()


class Person:
    """Answers `answer`, after a second; what it is asked, it writes down."""

    def __init__(self, answer: object = True, seconds: float = 1) -> None:
        self.answer = answer
        self.seconds = seconds
        self.asked: list[str | None] = []
        self.at_once = 0
        self.at_most = 0
        self.left = 0

    async def __call__(self, call: ToolCall | None, request: Any) -> object:
        self.asked.append(None if call is None else call.id)
        self.at_once += 1
        self.at_most = max(self.at_most, self.at_once)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.at_once -= 1
        answer = self.answer
        return answer(call, request) if callable(answer) else answer


def calls(*names: str, **arguments: Any) -> list[ToolCall]:
    return [ToolCall(str(number), name, arguments) for number, name in enumerate(names, 1)]


# ------------------------------------------------------------------------------------ functions that ask


def asking(person: Person, config: str = "", **options: Any) -> Host:
    """A host whose tool `ask` asks; `ask_late` does so when half a second has passed; `work` takes two."""

    async def call(name: str, arguments: dict[str, Any]) -> object:
        if name == "work":
            await asyncio.sleep(2)
            return "worked"
        await asyncio.sleep(0.5 if name == "ask_late" else 0)
        return await host.ask(name)

    host = Host(config, call, question=person, **options)
    return host


@virtual_time
async def test_functions_ask_one_after_the_other_in_the_written_order() -> None:
    person = Person(answer=lambda call, request: f"{call.id} {request}")
    results = await asking(person).run(calls("ask", "ask", "ask_late", "ask"))
    # The third is due when the first is answered, so it does not wait for the fourth.
    assert person.asked == ["1", "2", "3", "4"]
    assert person.at_most == 1
    assert [each.text for each in results] == ["1 ask", "2 ask", "3 ask_late", "4 ask"]
    assert now() == 4


@virtual_time
async def test_a_call_that_asks_keeps_its_place_until_it_is_answered() -> None:
    begun: list[tuple[str, float]] = []

    def note(call: ToolCall, state: State) -> None:
        if state == "running" and call.id not in dict(begun):
            begun.append((call.id, now()))

    limits = '[ask]\nconcurrency = { key = "one" }\n[work]\nconcurrency = { key = "one" }'
    results = await asking(Person("yes"), limits, on_state=note).run(calls("ask", "work", "ask"))
    assert [each.text for each in results] == ["yes", "worked", "yes"]
    assert begun == [("1", 0), ("2", 1), ("3", 3)]


@virtual_time
async def test_a_call_that_asks_awaits_input_until_the_last_of_its_questions_is_answered() -> None:
    states: list[tuple[State, float]] = []
    person = Person("yes")

    async def call(name: str, arguments: dict[str, Any]) -> object:
        answers = await asyncio.gather(host.ask(1), host.ask(2))
        await asyncio.sleep(1)
        return answers

    host = Host(call=call, question=person, on_state=lambda call, state: states.append((state, now())))
    (result,) = await host.run(calls("any"))
    assert result.text == '[\n  "yes",\n  "yes"\n]'
    assert states == [("queued", 0), ("running", 0), ("awaiting-input", 0), ("running", 2), ("completed", 3)]
    assert person.at_most == 1


@virtual_time
async def test_each_operation_of_a_call_is_named_when_it_asks() -> None:
    asked: list[ToolCall] = []

    def answer(call: ToolCall, request: object) -> str:
        asked.append(call)
        return "yes"

    host = asking(Person(answer), "[ask]\nfan_out = true")
    (result,) = await host.run([ToolCall("1", "ask", {"ops": [{}, {}]})])
    assert result.text == "[1/2] ok\nyes\n[2/2] ok\nyes"
    assert [(type(each), each.id) for each in asked] == [(Operation, "1#0"), (Operation, "1#1")]


@virtual_time
async def test_who_asks_in_a_task_of_its_own_is_known_too() -> None:
    person = Person("yes")

    async def call(name: str, arguments: dict[str, Any]) -> object:
        return await asyncio.create_task(host.ask(name))

    host = Host(call=call, question=person)
    assert [each.text for each in await host.run(calls("a", "b"))] == ["yes", "yes"]
    assert person.asked == ["1", "2"]


@virtual_time
async def test_the_calls_of_a_batch_that_a_tool_starts_ask_for_themselves() -> None:
    person = Person("yes")

    async def call(name: str, arguments: dict[str, Any]) -> object:
        if name == "outer":
            first = await host.ask("outer")
            (result,) = await host.run([ToolCall("inner", "inner")])
            return [first, result.text, await host.ask("outer")]
        return await host.ask("inner")

    host = Host(call=call, question=person)
    (result,) = await host.run(calls("outer"))
    assert result.text == '[\n  "yes",\n  "yes",\n  "yes"\n]'
    assert person.asked == ["1", "inner", "1"]


@virtual_time
async def test_questions_of_two_hosts_do_not_mix() -> None:
    persons = [Person("one"), Person("two")]

    async def through(name: str, arguments: dict[str, Any]) -> object:
        return await second.ask(name)

    async def call(name: str, arguments: dict[str, Any]) -> object:
        (result,) = await second.run([ToolCall("in the second", name)])
        return [await first.ask(name), result.text]

    first, second = Host(call=call, question=persons[0]), Host(call=through, question=persons[1])
    (result,) = await first.run(calls("any"))
    assert result.text == '[\n  "one",\n  "two"\n]'
    assert [person.asked for person in persons] == [["1"], ["in the second"]]


@virtual_time
async def test_who_asks_outside_of_a_call_is_answered_without_one() -> None:
    person = Person("yes")
    assert await Host(question=person).ask("anything") == "yes"
    assert person.asked == [None]


@virtual_time
async def test_asking_a_host_without_a_hook_fails_the_call() -> None:
    async def call(name: str, arguments: dict[str, Any]) -> object:
        return await host.ask(name)

    host = Host(call=call)
    (result,) = await host.run(calls("any"))
    assert (result.status, "no `question` to ask" in result.text) == ("error", True)


@pytest.mark.parametrize("error", [ValueError("no"), asyncio.CancelledError()], ids=repr)
@virtual_time
async def test_a_hook_that_fails_fails_the_call_that_asks_and_no_other(error: BaseException) -> None:
    def answer(call: ToolCall, request: object) -> object:
        if call.id == "1":
            raise error
        return "yes"

    person = Person(answer)
    results = await asking(person).run(calls("ask", "ask"))
    assert [each.status for each in results] == ["error", "ok"]
    assert person.asked == ["1", "2"]


@virtual_time
async def test_a_cancelled_batch_withdraws_its_questions_and_lets_the_next_one_ask() -> None:
    person = Person("yes", seconds=60)
    host = asking(person)
    batch = host.start(calls("ask", "ask"))
    await settle()
    other = host.start([ToolCall("3", "ask")])
    await asyncio.sleep(1)
    assert (person.asked, person.left) == (["1"], 0)
    batch.cancel()
    assert [each.status for each in await batch.results()] == ["cancelled"] * 2
    await batch.ended()
    assert [each.text for each in await other.results()] == ["yes"]
    # The second was never asked.
    assert (person.asked, person.left, now()) == (["1", "3"], 1, 61)


@virtual_time
async def test_a_tool_that_gives_up_its_question_goes_on() -> None:
    person = Person("yes", seconds=60)

    async def call(name: str, arguments: dict[str, Any]) -> object:
        try:
            async with asyncio.timeout(1):
                return await host.ask(name)
        except TimeoutError:
            return "nobody is there"

    host = Host(call=call, question=person)
    assert [each.text for each in await host.run(calls("a", "b"))] == ["nobody is there"] * 2
    assert (person.asked, person.left, now()) == (["1"], 1, 1)


@virtual_time
async def test_a_tool_that_asks_when_its_batch_was_cancelled_is_not_answered() -> None:
    person = Person("yes")
    told: list[object] = []

    async def call(name: str, arguments: dict[str, Any]) -> object:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            try:
                told.append(await host.ask(name))
            except BaseException as error:
                told.append(type(error).__name__)
                raise
        return None

    host = Host(call=call, question=person)
    batch = host.start(calls("any"))
    await settle()
    batch.cancel()
    await batch.ended()
    assert (person.asked, told) == ([], ["Cancelled"])


# -------------------------------------------------------------------------------------- servers that ask


class Answer(BaseModel):
    really: bool


def server_of_its_own() -> FrontMCP:
    server = FrontMCP("asks")

    @server.tool
    async def ask(ctx: ToolContext, late: bool = False) -> str:
        await asyncio.sleep(0.5 if late else 0)
        answer = await ctx.elicit("Really?", schema=Answer)
        return str(answer.action)

    @server.tool
    async def send_away(ctx: ToolContext) -> str:
        answer = await ctx.elicit_url("Look there", "https://example.org/form", "form-1")
        return str(answer.action)

    @server.tool
    async def work() -> str:
        await asyncio.sleep(2)
        return "worked"

    return server


@asynccontextmanager
async def connected(host: Host, server: Any) -> AsyncIterator[Client]:
    """A client of the handshake era, whose server can ask at any time."""
    async with Client(
        server, mode="legacy", cache=None, elicitation_callback=host.elicitation_callback
    ) as client:
        yield client


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ({"really": True}, "accept"),
        (types.ElicitResult(action="accept", content={"really": True}), "accept"),
        (types.ElicitResult(action="cancel"), "cancel"),
        (types.ElicitResult(action="decline"), "decline"),
        (None, "decline"),
        (False, "decline"),
    ],
    ids=repr,
)
@virtual_time
async def test_a_hook_answers_in_any_form_that_is_unmistakable(answer: object, action: str) -> None:
    person = Person(answer)
    host = Host(question=person)
    async with connected(host, server_of_its_own().mcp) as client:
        results = await host.run(calls("ask", "ask"), call=client)
    assert [(each.status, each.text) for each in results] == [("ok", action)] * 2
    assert (person.asked, person.at_most, now()) == (["1", "2"], 1, 2)


@virtual_time
async def test_a_question_that_only_wants_to_be_seen_is_answered_yes_or_no() -> None:
    requests: list[Any] = []

    def answer(call: ToolCall | None, request: Any) -> bool:
        requests.append(request)
        return call is not None and call.id == "1"

    host = Host(question=answer)
    async with connected(host, server_of_its_own().mcp) as client:
        results = await host.run(calls("send_away", "send_away"), call=client)
    assert [each.text for each in results] == ["accept", "decline"]
    assert all(isinstance(each, types.ElicitRequestURLParams) for each in requests)
    assert requests[0].url == "https://example.org/form"
    # What the server repeats tells the two apart, over whatever they come.
    assert len({dict(each.meta)["dev.frontmcp/call"] for each in requests}) == 2


@virtual_time
async def test_a_server_repeats_only_what_a_call_has_said_of_itself() -> None:
    metas: list[dict[str, Any]] = []

    async def hear(context: object, params: types.ElicitRequestParams) -> types.ElicitResult:
        metas.append(dict(params.meta or {}))
        return types.ElicitResult(action="decline")

    server, meta = server_of_its_own(), cast("Any", {"dev.frontmcp/call": "7", "other": 1})
    async with Client(server.mcp, mode="legacy", cache=None, elicitation_callback=hear) as client:
        await client.call_tool("ask")
        await client.call_tool("ask", meta=meta)
    assert [meta.get("dev.frontmcp/call") for meta in metas] == [None, "7"]
    assert not any("other" in meta for meta in metas)


def _raise(*_: object) -> object:
    raise ValueError("not today")


@pytest.mark.parametrize("answer", [7, "yes", [True], _raise], ids=["number", "text", "list", "raises"])
@virtual_time
async def test_a_wrong_answer_is_an_error_of_the_call_that_asked(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(question=Person(answer))
    async with connected(host, server_of_its_own().mcp) as client:
        asked, other = await host.run(calls("ask", "work"), call=client)
    assert (asked.status, other.text) == ("error", "worked")
    assert "a question could not be answered" in caplog.text


@virtual_time
async def test_a_server_that_asks_is_in_a_call_that_awaits_input() -> None:
    states: list[tuple[str, State, float]] = []
    host = Host(
        question=Person({"really": True}),
        on_state=lambda call, state: states.append((call.id, state, now())),
    )
    async with connected(host, server_of_its_own().mcp) as client:
        await host.run([ToolCall("1", "ask", {"late": True})], call=client)
    assert states == [
        ("1", "queued", 0),
        ("1", "running", 0),
        ("1", "awaiting-input", 0.5),
        ("1", "running", 1.5),
        ("1", "completed", 1.5),
    ]


@virtual_time
async def test_a_cancelled_call_takes_its_question_back_and_ends_on_its_server() -> None:
    person = Person({"really": True}, seconds=60)
    server = server_of_its_own()
    host = Host(question=person)
    async with connected(host, server.mcp) as client:
        batch = host.start(calls("ask", "ask"), call=client)
        await asyncio.sleep(1)
        assert person.asked == ["1"]
        batch.cancel()
        assert [each.status for each in await batch.results()] == ["cancelled"] * 2
        await batch.ended()
        await settle()
        assert (person.asked, person.left, now()) == (["1"], 1, 1)
        assert server.guard.statistics().active == 0
        assert [each.text for each in await host.run(calls("work"), call=client)] == ["worked"]


@virtual_time
async def test_a_server_that_takes_its_question_back_lets_the_next_one_ask() -> None:
    server = server_of_its_own()

    @server.tool
    async def ask_hastily(ctx: ToolContext) -> str:
        try:
            async with asyncio.timeout(1):
                return str((await ctx.elicit("Really?", schema=Answer)).action)
        except TimeoutError:
            return "nobody is there"

    person = Person({"really": True}, seconds=3)
    states: list[State] = []

    def note(call: ToolCall, state: State) -> None:
        if call.id == "1":
            states.append(state)

    host = Host(question=person, on_state=note)
    async with connected(host, server.mcp) as client:
        results = await host.run(calls("ask_hastily", "ask"), call=client)
    assert [each.text for each in results] == ["nobody is there", "accept"]
    assert (person.asked, person.left, now()) == (["1", "2"], 1, 4)
    assert states == ["queued", "running", "awaiting-input", "running", "completed"]


# ---------------------------------------------------------------- servers that do not say which call asks


class Stranger:
    """A foreign server, which does not repeat what a call has said of itself."""

    def __init__(self) -> None:
        self.server: MCPServer[Any] = MCPServer("foreign")
        self.server.add_tool(self.ask)

    async def ask(self, ctx: Context[Any, Any]) -> str:
        await asyncio.sleep(0.5)
        return str((await ctx.elicit("Really?", schema=Answer)).action)


@asynccontextmanager
async def without_context(host: Host) -> AsyncIterator[Client]:
    """A client of a foreign server, that hears its questions where no call is known, as over a pipe."""
    questions: asyncio.Queue[tuple[Any, Any, asyncio.Future[Any]]] = asyncio.Queue()

    async def hear(context: Any, params: Any) -> Any:
        answer = asyncio.get_running_loop().create_future()
        await questions.put((context, params, answer))
        return await answer

    async def answer(context: Any, params: Any, answer: asyncio.Future[Any]) -> None:
        answer.set_result(await host.elicitation_callback(context, params))

    async def answer_all() -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(answer(*await questions.get()))

    answering = asyncio.create_task(answer_all())
    async with Client(Stranger().server, mode="legacy", cache=None, elicitation_callback=hear) as client:
        yield client
    answering.cancel()
    await asyncio.wait((answering,))


@virtual_time
async def test_a_question_that_does_not_say_whose_it_is_is_that_of_the_only_call() -> None:
    person = Person({"really": True})
    host = Host(question=person)
    async with without_context(host) as client, without_context(host) as another:
        for session in (client, client.session):
            assert [each.text for each in await host.run(calls("ask"), call=session)] == ["accept"]
        # Calls over other connections are not asked about over this one.
        batches = [
            host.start([ToolCall(name, "ask")], call=over) for name, over in (("a", client), ("b", another))
        ]
        for batch in batches:
            assert [each.text for each in await batch.results()] == ["accept"]
    assert person.asked == ["1", "1", "a", "b"]


@virtual_time
async def test_a_question_that_may_be_of_several_calls_is_asked_last_and_without_one() -> None:
    person = Person({"really": True})

    async def call(name: str, arguments: dict[str, Any]) -> object:
        await asyncio.sleep(1)
        return await host.ask(name)

    host = Host(question=person)
    async with without_context(host) as client:
        batch = host.start(calls("ask", "ask"), call=client)
        other = host.start([ToolCall("a", "any")], call=call)
        assert [each.text for each in await batch.results()] == ["accept", "accept"]
        assert [each.status for each in await other.results()] == ["ok"]
    # The first of them when nobody else was due, the other one after whoever has a place in the order.
    assert person.asked == [None, "a", None]
    assert person.at_most == 1


@virtual_time
async def test_a_client_that_was_left_is_not_one_that_asks() -> None:
    person = Person({"really": True})
    host = Host(question=person)
    async with connected(host, server_of_its_own().mcp) as left:
        pass
    async with without_context(host) as client:
        lost = host.start([ToolCall("0", "work")], call=left)
        assert [each.text for each in await host.run(calls("ask"), call=client)] == ["accept"]
    assert [each.status for each in await lost.results()] == ["not_run"]
    assert person.asked == ["1"]


@virtual_time
async def test_a_connection_that_was_opened_within_a_call_is_not_that_of_the_call_for_ever() -> None:
    person = Person({"really": True})
    host = Host(question=person)
    opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
    is_over = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def stay_connected() -> None:
        async with without_context(host) as client:
            opened.set_result(client)
            await is_over.wait()

    async def call(name: str, arguments: dict[str, Any]) -> object:
        if not tasks:
            tasks.append(asyncio.create_task(stay_connected()))
        return await (await opened).call_tool("ask")

    assert [each.text for each in await host.run([ToolCall("0", "any")], call=call)] == ["accept"]
    assert [each.text for each in await host.run(calls("ask"), call=await opened)] == ["accept"]
    # Of a call through a function nobody can tell over which connection it goes.
    assert [each.text for each in await host.run([ToolCall("2", "any")], call=call)] == ["accept"]
    is_over.set()
    await asyncio.wait(tasks)
    assert person.asked == ["0", "1", None]


@virtual_time
async def test_a_question_about_a_call_that_has_ended_is_not_asked() -> None:
    person = Person({"really": True})
    host = Host(question=person)
    numbers: list[Any] = []
    server: MCPServer[Any] = MCPServer("remembers")

    @server.tool()
    async def note(ctx: Context[Any, Any]) -> str:
        numbers.append(dict(ctx.request_context.meta or {})["dev.frontmcp/call"])
        return "noted"

    async with connected(host, server) as client:
        await host.run(calls("note"), call=client)
        context = ClientRequestContext(session=client.session, request_id=1)
        late, foreign = (
            types.ElicitRequestFormParams.model_validate(
                {"message": "Really?", "requestedSchema": FORM, "_meta": {"dev.frontmcp/call": number}}
            )
            for number in (numbers[0], "of somebody else")
        )
        cancelled = types.ElicitResult(action="cancel")
        assert await host.elicitation_callback(context, late) == cancelled
        accepted = types.ElicitResult(action="accept", content={"really": True})
        assert await host.elicitation_callback(context, foreign) == accepted
    assert person.asked == [None]


@virtual_time
async def test_servers_are_told_nothing_of_their_calls_if_nobody_can_be_asked() -> None:
    metas: list[Any] = []
    server: MCPServer[Any] = MCPServer("remembers")

    @server.tool()
    async def note(ctx: Context[Any, Any]) -> str:
        metas.append(ctx.request_context.meta)
        return "noted"

    host = Host()
    async with connected(host, server) as client:
        await host.run(calls("note"), call=client)
    assert "dev.frontmcp/call" not in (metas[0] or {})
