from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, TextContent
from mcp_types import Tool as SeenTool

from frontmcp_py import (
    Admission,
    App,
    Call,
    Caller,
    Concurrency,
    ConcurrencyLimit,
    ConfigurationError,
    FrontMCP,
    RateLimit,
    Throttle,
    Timeout,
    ToolContext,
    ToolError,
    tool,
)
from frontmcp_py.guard import Guard
from frontmcp_py.testing import VirtualClock, run_virtual, settle, virtual_time
from tests.guard.support import every_guard_ends_clean, now

Mode = Literal["auto", "legacy"]
MODES: list[Mode] = ["auto", "legacy"]

SECRET = "the password is swordfish"


@pytest.fixture(autouse=True)
def guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Guard]]:
    """Every guard that the test makes. Each must have nothing left when the test has ended."""
    with every_guard_ends_clean(monkeypatch) as made:
        yield made


def plain() -> str:
    """A plain function."""
    return "plain"


async def nothing() -> str:
    """Do nothing."""
    return "done"


def text_of(result: CallToolResult) -> str:
    [block] = result.content
    assert isinstance(block, TextContent)
    return block.text


def meta_of(result: CallToolResult) -> dict[str, Any]:
    """What the guard says beside the message."""
    return {name: value for name, value in (result.meta or {}).items() if "/" not in name}


async def call(
    server: FrontMCP, name: str, arguments: dict[str, Any] | None = None, **client: Any
) -> CallToolResult:
    async with server.connect(**client) as connected:
        return await connected.call_tool(name, arguments or {})


async def listed(server: FrontMCP) -> dict[str, SeenTool]:
    """The tools as a client sees them."""
    async with server.connect() as client:
        return {each.name: each for each in (await client.list_tools()).tools}


# ---------------------------------------------------------------------------------------- what it is made of


async def test_a_server_serves_the_tools_of_its_apps_and_its_own() -> None:
    app, other = App("one", tools=[plain]), App("other", tools=[tool(name="second")(plain)])
    server = FrontMCP("front", version="1.2.3", instructions="Be kind.", apps=[app, other], tools=[nothing])

    @server.tool
    def bare() -> str:
        return "bare"

    @server.tool(rate_limit="1/hour")
    async def limited() -> str:
        return "limited"

    assert (bare(), await limited()) == ("bare", "limited")
    async with server.connect() as client:
        names = [each.name for each in (await client.list_tools()).tools]
        assert names == ["plain", "second", "nothing", "bare", "limited"]
        for name, text in (("plain", "plain"), ("second", "plain"), ("nothing", "done"), ("bare", "bare")):
            assert text_of(await client.call_tool(name, {})) == text
        assert client.server_info is not None
        assert (client.server_info.name, client.server_info.version) == ("front", "1.2.3")
        assert client.instructions == "Be kind."
    assert isinstance(server.mcp, MCPServer)
    assert isinstance(server.guard, Guard)


async def test_one_tool_may_be_given_to_several_servers_and_each_counts_for_itself() -> None:
    once = tool(rate_limit="1/hour")(nothing)
    for server in (FrontMCP("one", tools=[once]), FrontMCP("other", tools=[once])):
        assert [(await call(server, "nothing")).is_error for _ in range(2)] == [False, True]


async def test_a_bound_method_is_served() -> None:
    class Desk:
        def __init__(self, name: str) -> None:
            self.name = name

        @tool(name="ask")
        async def answer(self, question: str) -> str:
            return f"{self.name}: {question}"

        def close(self, ctx: ToolContext) -> str:
            return f"{self.name} is closed for {ctx.caller.transport}"

    desk = Desk("one")
    server = FrontMCP("front", tools=[desk.answer, desk.close])
    assert text_of(await call(server, "ask", {"question": "why?"})) == "one: why?"
    assert text_of(await call(server, "close")) == "one is closed for in-process"
    assert set((await listed(server))["ask"].input_schema["properties"]) == {"question"}
    assert (await listed(server))["close"].input_schema["properties"] == {}


async def test_an_sdk_tool_gets_globals_defaults_and_admission() -> None:
    server = FrontMCP(
        "front",
        throttle=Throttle(
            global_rate_limit="3/hour",
            default_rate_limit="2/hour",
            admission=Admission(max_active=2, reserved=0, max_queued=0),
        ),
    )
    ended = asyncio.Event()

    @server.mcp.tool()
    async def theirs() -> str:
        """Theirs."""
        await ended.wait()
        return "theirs"

    async with server.connect() as client:
        running = [asyncio.create_task(client.call_tool("theirs", {})) for _ in range(2)]
        await settle()
        assert server.guard.statistics().places == 2
        assert meta_of(await client.call_tool("theirs", {}))["code"] == "RATE_LIMIT_EXCEEDED"
        ended.set()
        assert [text_of(await each) for each in running] == ["theirs", "theirs"]
        seen = (await client.list_tools()).tools[0]
    assert seen.description is not None
    assert seen.description.startswith(
        "Theirs. Limits: at most 2 calls per hour; at most 3 calls per hour over all"
    )
    # Calling it through the SDK's own method is past the guard.
    assert isinstance(await server.mcp.call_tool("theirs", {}), CallToolResult)


@virtual_time
async def test_a_def_tool_of_the_sdks_kind_runs_in_the_servers_own_threads() -> None:
    server = FrontMCP("front", worker_threads=1, throttle=Throttle(admission=Admission(queue_timeout=4)))
    may_end = threading.Event()

    @server.mcp.tool()
    def waits() -> str:
        may_end.wait()
        return "done"

    async with server.connect() as client:
        running = [asyncio.create_task(client.call_tool("waits", {})) for _ in range(2)]
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        assert [meta_of(each.result())["code"] for each in done] == ["OVERLOADED"]
        may_end.set()
        assert sorted([(await each).is_error for each in running]) == [False, True]


async def test_a_tool_given_to_the_sdk_keeps_its_limits() -> None:
    server = FrontMCP("front")
    server.mcp.add_tool(tool(rate_limit="1/hour")(nothing))
    assert [(await call(server, "nothing")).is_error for _ in range(2)] == [False, True]


async def test_a_def_function_that_returns_a_coroutine_has_failed() -> None:
    def forgets_to_wait() -> Any:
        return nothing()

    result = await call(FrontMCP("front", tools=[forgets_to_wait]), "forgets_to_wait")
    assert result.is_error
    assert 'make it "async def"' in text_of(result)


async def test_the_sdks_own_way_to_call_a_tool_passes_the_guard_by() -> None:
    limits: Any = {"rate_limit": "1/hour", "concurrency": 1}
    server = FrontMCP("front", tools=[tool(**limits)(nothing), tool(**limits)(plain)])
    for name, text in (("nothing", "done"), ("plain", "plain")):
        for _ in range(3):
            result = await server.mcp.call_tool(name, {})
            assert isinstance(result, CallToolResult)
            assert text_of(result) == text
    assert server.guard.statistics().counts.submitted == 0


async def test_a_tool_can_be_taken_away_and_given_back() -> None:
    server = FrontMCP("front", tools=[tool(concurrency=1)(nothing)])
    server.mcp.remove_tool("nothing")
    assert await listed(server) == {}
    server.tool(concurrency=2)(nothing)
    assert text_of(await call(server, "nothing")) == "done"


# ---------------------------------------------------------------------------------------------- bad values


BAD: dict[str, list[Any]] = {
    "name": ["", " ", 7, None],
    "version": [1, None],
    "instructions": [7],
    "apps": [App("one"), 7, "one", [nothing], None],
    "tools": [nothing, tool(nothing), 7, [7], None],
    "throttle": ["off", 7, [], {"mod": "observe"}, {"mode": "watch"}],
    "production": ["yes", 1],
    "lifespan": [7],
    "describe_limits": [1, None],
    "worker_threads": [0, 1001, True, 4.0, "4", None],
    "shutdown_grace": [-1, 601, float("nan"), "2", True, None],
    "max_result_bytes": [1023, 1024**3 + 1, True, 1e6, None],
    "mcp_options": [7, {"name": "x"}, {"log_leve": "INFO"}, ["debug"]],
}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        pytest.param(option, value, id=f"{option}-{number}")
        for option, values in BAD.items()
        for number, value in enumerate(values)
    ],
)
def test_a_bad_value_names_the_option_and_what_is_allowed(option: str, value: Any) -> None:
    options = {"name": "front", option: value}
    with pytest.raises(ConfigurationError) as caught:
        FrontMCP(**options)
    message = str(caught.value)
    assert message.startswith(f"FrontMCP.{option}")
    assert any(word in message for word in ("; give ", "did you mean", "needs a unit"))


def test_an_unknown_option_names_the_nearest_one() -> None:
    for option, meant in (("worker_thread", "worker_threads"), ("app", "apps"), ("throttel", "throttle")):
        with pytest.raises(
            TypeError, match=rf"FrontMCP\(\) has no option '{option}'; did you mean '{meant}'\?"
        ):
            FrontMCP("front", **{option: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"tool\(\) has no option 'timeouts'; did you mean 'timeout'\?"):
        FrontMCP("front").tool(timeouts=1)  # type: ignore[call-overload]


def test_a_store_that_cannot_be_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigurationError, match=r"^Throttle\.storage: ") as caught:
        FrontMCP("front", throttle=Throttle(storage="redis://user:secret@localhost/not-a-number"))
    assert "secret" not in str(caught.value)


def test_what_the_sdk_refuses_about_a_tool_is_refused_with_the_tools_name() -> None:
    async def odd(_hidden: int) -> str:
        return str(_hidden)

    server = FrontMCP("front")
    with pytest.raises(ConfigurationError, match='tool "odd": '):
        server.tool(odd)
    # And it leaves nothing behind: the name is free.
    server.tool(name="odd")(nothing)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            lambda: FrontMCP("front", apps=[App("one", [plain]), App("other", [plain])]),
            ['app "one"', 'app "other"'],
        ),
        (lambda: FrontMCP("front", apps=[App("one", [plain, plain])]), ['app "one"']),
        (
            lambda: FrontMCP("front", apps=[App("one", [plain])], tools=[plain]),
            ['app "one"', "the server itself"],
        ),
        (lambda: FrontMCP("front", tools=[plain]).tool(plain), ["the server itself"]),
        (
            lambda: FrontMCP("front", tools=[plain]).mcp.tool(name="plain")(plain),
            ["the server itself", "server.mcp"],
        ),
        (lambda: FrontMCP("front", tools=[plain]).mcp.add_tool(plain), ["the server itself", "server.mcp"]),
    ],
    ids=["two apps", "one app", "app and server", "server", "sdk's decorator", "sdk's method"],
)
def test_two_tools_of_one_name_are_refused_and_both_owners_named(make: Any, named: list[str]) -> None:
    with pytest.raises(ConfigurationError, match='two tools are called "plain"') as caught:
        make()
    assert all(name in str(caught.value) for name in named)


def test_tools_that_disagree_about_a_key_are_refused_and_named() -> None:
    one = tool(name="one", concurrency=Concurrency(1, key="shell"))(nothing)
    other = tool(name="other", concurrency=Concurrency(2, key="shell"))(nothing)
    with pytest.raises(ConfigurationError, match='concurrency key "shell": tools "one", "other" disagree'):
        FrontMCP("front", apps=[App("a", [one]), App("b", [other])])


def test_a_wait_without_an_end_is_refused_with_the_tools_name() -> None:
    patient = tool(concurrency=Concurrency(1, queue_timeout=None))(nothing)
    with pytest.raises(
        ConfigurationError, match='tool "nothing": concurrency: queue_timeout None is not allowed'
    ):
        FrontMCP("front", tools=[patient], throttle=Throttle(admission=None))
    FrontMCP("front", tools=[patient], throttle=False)


@pytest.mark.parametrize(
    ("transport", "options"),
    [
        ("stdio", {"port": 9000}),
        ("stdio", {"stateless_http": True}),
        ("http", {"port": -1}),
        ("http", {"host": ""}),
    ],
)
def test_options_of_running_are_looked_at_before_anything_runs(
    transport: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError):
        FrontMCP("front").run(transport, **options)


def test_there_are_two_ways_to_run() -> None:
    with pytest.raises(ConfigurationError, match="transport: 'sse' is not allowed; give 'stdio' or 'http'"):
        FrontMCP("front").run("sse")  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------- what the caller gets


@pytest.mark.parametrize("production", [True, False])
@pytest.mark.parametrize("mode", MODES)
@virtual_time
async def test_a_refusal_is_an_ordinary_result_the_same_in_production(mode: Mode, production: bool) -> None:
    server = FrontMCP("front", tools=[tool(rate_limit="1/hour")(nothing)], production=production)
    server.guard.use_clock(VirtualClock())
    async with server.connect(mode=mode) as client:
        assert text_of(await client.call_tool("nothing", {})) == "done"
        refused = await client.call_tool("nothing", {})
    assert refused.is_error
    assert text_of(refused) == "Rate limit exceeded. Retry after 3600 seconds"
    meta = meta_of(refused)
    assert meta.pop("errorId").startswith("err_")
    assert meta == {"code": "RATE_LIMIT_EXCEEDED", "retryAfterMs": 3_600_000, "limit": 1, "scope": "tool"}


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "def"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_failure_is_masked_in_production_and_logged_with_its_id(
    mode: Mode, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> str:
        raise LookupError(SECRET)

    def fails_in_a_thread() -> str:
        raise LookupError(SECRET)

    for production in (True, False):
        caplog.clear()
        body = tool(name="fails")(fails if is_async else fails_in_a_thread)
        server = FrontMCP("front", tools=[body], production=production)
        result = await call(server, "fails", mode=mode)
        assert result.is_error
        assert (SECRET in text_of(result)) != production
        error_id = meta_of(result)["errorId"]
        [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert error_id in record.getMessage()
        assert record.exc_info is not None
        assert str(record.exc_info[1]) == SECRET
        assert server.guard.statistics().counts.failed == 1


@pytest.mark.parametrize(
    ("environment", "option", "masks"),
    [
        ({}, False, False),
        ({"FRONTMCP_ENV": "production"}, False, True),
        ({"FRONTMCP_ENV": " Production "}, False, True),
        ({"FRONTMCP_ENV": "development"}, False, False),
        ({"FRONTMCP_ENV": "production"}, True, True),
        ({"FRONTMCP_ENV": "development"}, True, True),
    ],
)
async def test_whether_it_is_production_is_an_option_or_the_environments(
    environment: dict[str, str], option: bool, masks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    async def fails() -> str:
        raise LookupError(SECRET)

    result = await call(FrontMCP("front", tools=[fails], production=option), "fails")
    assert (SECRET not in text_of(result)) == masks


@pytest.mark.parametrize("production", [True, False])
async def test_what_a_tool_says_on_purpose_reaches_the_client(production: bool) -> None:
    async def refuses() -> str:
        raise ToolError("No such ticket: 7")

    async def passes_on() -> str:
        raise ConcurrencyLimit("other", 3, "key")

    server = FrontMCP("front", tools=[refuses, passes_on], production=production)
    assert "No such ticket: 7" in text_of(await call(server, "refuses"))
    passed = await call(server, "passes_on")
    assert text_of(passed) == 'Concurrency limit reached for "other" (max: 3)'
    assert meta_of(passed)["code"] == "CONCURRENCY_LIMIT"


async def exits() -> str:
    raise SystemExit(3)


def exits_in_a_thread() -> str:
    raise SystemExit(3)


async def cancels_itself() -> str:
    raise asyncio.CancelledError


async def times_out() -> str:
    async with asyncio.timeout(0):
        await asyncio.sleep(1)
    return "late"


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("function", [exits, exits_in_a_thread, cancels_itself, times_out])
@pytest.mark.parametrize("mode", MODES)
async def test_a_tool_that_exits_or_cancels_itself_has_failed_and_the_server_goes_on(
    mode: Mode, function: Any, read_only: bool
) -> None:
    server = FrontMCP("front", tools=[tool(read_only=read_only)(function), nothing])
    async with server.connect(mode=mode) as client:
        failed = await client.call_tool(function.__name__, {})
        assert failed.is_error
        assert "code" not in meta_of(failed)
        assert text_of(await client.call_tool("nothing", {})) == "done"
    counts = server.guard.statistics().counts
    assert (counts.failed, counts.cancelled, counts.timed_out) == (1, 0, 0)


@pytest.mark.parametrize("mode", MODES)
async def test_a_result_that_is_too_large_is_kept_back(mode: Mode) -> None:
    server = FrontMCP("front", max_result_bytes=2048)

    @server.tool
    async def much(characters: int) -> str:
        return "x" * characters

    async with server.connect(mode=mode) as client:
        assert text_of(await client.call_tool("much", {"characters": 800})) == "x" * 800
        shortened = await client.call_tool("much", {"characters": 1500})
        assert "shortened" in text_of(shortened)
        assert shortened.structured_content == {"result": "x" * 1500}
        refused = await client.call_tool("much", {"characters": 5000})
    assert text_of(refused) == 'Result of "much" is larger than 2048 bytes; the tool has run.'
    assert (refused.is_error, meta_of(refused)["code"], meta_of(refused)["limit"]) == (
        True,
        "OUTPUT_LIMIT",
        2048,
    )
    counts = server.guard.statistics().counts
    assert (counts.completed, counts.failed) == (2, 1)


async def test_an_unknown_tool_is_the_sdks_and_counts_towards_nothing() -> None:
    server = FrontMCP("front", tools=[nothing], throttle=Throttle(global_rate_limit="1/hour"))
    async with server.connect() as client, FrontMCP("other").connect() as other:
        for _ in range(3):
            unknown = await client.call_tool("nope", {})
            assert text_of(unknown) == text_of(await other.call_tool("nope", {}))
        assert text_of(await client.call_tool("nothing", {})) == "done"
    statistics = server.guard.statistics()
    assert (statistics.unknown, statistics.counts.submitted, list(statistics.tools)) == (3, 1, ["nothing"])


async def test_arguments_that_do_not_validate_are_a_started_call() -> None:
    server = FrontMCP("front")

    @server.tool(rate_limit="2/hour")
    async def add(a: int, b: int) -> int:
        return a + b

    async with server.connect() as client:
        invalid = await client.call_tool("add", {"a": "one"})
        assert invalid.is_error
        assert meta_of(invalid).get("code") is None
        assert not (await client.call_tool("add", {"a": 1, "b": 2})).is_error
        assert meta_of(await client.call_tool("add", {"a": 1, "b": 2}))["code"] == "RATE_LIMIT_EXCEEDED"
    counts = server.guard.statistics().counts
    assert (counts.started, counts.failed, counts.completed) == (2, 1, 1)


# -------------------------------------------------------------------------------------- telling the model


async def test_the_model_is_told_of_the_limits_in_words_and_as_data() -> None:
    export = tool(
        rate_limit=RateLimit(2, "1h", "user_id"),
        concurrency=Concurrency(1, queue_timeout=5),
        meta={"team": "crm"},
    )(nothing)
    server = FrontMCP("front", tools=[export, plain], throttle=Throttle(default_timeout=30))
    seen = await listed(server)
    assert seen["nothing"].description == (
        "Do nothing. Limits: at most 2 calls per hour for each signed-in caller, and 2 for all anonymous "
        "callers together; one at a time, waiting up to 5 seconds for a turn; gives up after 30 seconds."
    )
    assert seen["nothing"].meta == {
        "team": "crm",
        "frontmcp/limits": {
            "rateLimits": [
                {
                    "maxRequests": 2,
                    "windowMs": 3_600_000,
                    "partitionBy": "user_id",
                    "strategy": "fixed-window",
                }
            ],
            "concurrency": [{"maxConcurrent": 1, "queueTimeoutMs": 5000, "partitionBy": "global"}],
            "timeoutMs": 30_000,
        },
    }
    assert seen["plain"].meta == {"frontmcp/limits": {"timeoutMs": 30_000}}
    assert await listed(server) == seen


@pytest.mark.parametrize(
    ("on_server", "on_tool", "tells"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
async def test_telling_can_be_switched_off_and_the_tools_own_switch_wins(
    on_server: bool, on_tool: bool | None, tells: bool
) -> None:
    limited = tool(rate_limit="2/hour", describe_limits=on_tool, meta={"team": "crm"})(nothing)
    placed = tool(name="placed", description="{limits} Place.", rate_limit="2/hour", describe_limits=on_tool)(
        nothing
    )
    seen = await listed(FrontMCP("front", tools=[limited, placed], describe_limits=on_server))
    assert ("Limits:" in (seen["nothing"].description or "")) == tells
    assert ("frontmcp/limits" in (seen["nothing"].meta or {})) == tells
    assert (seen["nothing"].meta or {})["team"] == "crm"
    told = "Limits: at most 2 calls per hour. Place." if tells else "Place."
    assert seen["placed"].description == told


async def test_without_limits_nothing_is_told() -> None:
    seen = await listed(FrontMCP("front", tools=[nothing]))
    assert (seen["nothing"].description, seen["nothing"].meta) == ("Do nothing.", None)


async def test_while_observing_only_timeouts_are_told() -> None:
    limited = tool(rate_limit="2/hour", concurrency=1, timeout=5)(nothing)
    seen = await listed(FrontMCP("front", tools=[limited], throttle=Throttle(mode="observe")))
    assert seen["nothing"].description == "Do nothing. Limits: gives up after 5 seconds."
    assert seen["nothing"].meta == {"frontmcp/limits": {"timeoutMs": 5000}}


# ------------------------------------------------------------------------------------- switched off, observed


@pytest.mark.parametrize(
    "how", ["throttle=False", "enabled=False", "environment", "environment over a mapping"]
)
@virtual_time
async def test_with_the_throttle_off_own_timeouts_stay(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {
        "throttle=False": False,
        "enabled=False": Throttle(enabled=False, global_rate_limit="1/hour", default_timeout=1),
        "environment": None,
        "environment over a mapping": {"global_rate_limit": "1/hour", "default_timeout": 1},
    }
    if how.startswith("environment"):
        monkeypatch.setenv("FRONTMCP_THROTTLE", "off")
    server = FrontMCP("front", throttle=given[how])
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "the throttle is off" in record.getMessage()

    @server.tool(rate_limit="1/hour", concurrency=1, read_only=True)
    async def quick() -> float:
        await asyncio.sleep(2)
        return now()

    @server.tool(timeout=Timeout(3, cancel_after=0))
    async def slow() -> str:
        await asyncio.sleep(100)
        return "late"

    async with server.connect() as client:
        results = await asyncio.gather(*(client.call_tool("quick", {}) for _ in range(60)))
        assert [text_of(result) for result in results] == ["2.0"] * 60
        timed = await client.call_tool("slow", {})
        assert (meta_of(timed)["code"], now()) == ("EXECUTION_TIMEOUT", 5)
        seen = {each.name: each.meta for each in (await client.list_tools()).tools}
    assert seen == {"quick": None, "slow": {"frontmcp/limits": {"timeoutMs": 3000}}}


async def test_with_the_throttle_off_a_result_may_still_be_too_large_and_arguments_invalid() -> None:
    server = FrontMCP("front", throttle=False, max_result_bytes=1024)

    @server.tool
    async def much(characters: int) -> str:
        return "x" * characters

    assert meta_of(await call(server, "much", {"characters": 5000}))["code"] == "OUTPUT_LIMIT"
    assert (await call(server, "much", {"characters": "many"})).is_error


def test_bad_values_are_refused_also_while_the_throttle_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRONTMCP_THROTTLE", "off")
    with pytest.raises(ConfigurationError, match=r"FrontMCP\.throttle"):
        FrontMCP("front", throttle="maybe")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="rate_limit"):
        FrontMCP("front").tool(rate_limit="often")(nothing)


@pytest.mark.parametrize("value", ["", "on", "enforce"])
async def test_other_values_of_the_environment_change_nothing(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRONTMCP_THROTTLE", value)
    server = FrontMCP("front", tools=[tool(rate_limit="1/hour")(nothing)])
    assert [(await call(server, "nothing")).is_error for _ in range(2)] == [False, True]


async def test_while_observing_nobody_is_refused() -> None:
    limited = tool(rate_limit="1/hour", concurrency=1)(nothing)
    server = FrontMCP("front", tools=[limited], throttle={"mode": "observe"})
    assert [(await call(server, "nothing")).is_error for _ in range(3)] == [False] * 3
    assert dict(server.guard.statistics().counts.would_reject) == {"RATE_LIMIT_EXCEEDED": 2}


# --------------------------------------------------------------------------------------- the tool's context


@pytest.mark.parametrize("mode", MODES)
@virtual_time
async def test_a_tool_is_given_its_signal_and_its_caller(mode: Mode) -> None:
    server = FrontMCP("front", shutdown_grace=5)
    heard: list[Exception | None] = []
    callers: list[Caller] = []

    @server.tool(timeout=2)
    async def listens(ctx: ToolContext) -> str:
        callers.append(ctx.caller)
        heard.append(await ctx.signal.wait())
        return "stopped"

    async with server.connect(mode=mode) as client:
        result = await client.call_tool("listens", {})
        assert (meta_of(result)["code"], now()) == ("EXECUTION_TIMEOUT", 2)
    [reason] = heard
    assert str(reason) == text_of(result)
    assert callers == [Caller(transport="in-process")]


async def test_a_def_tool_runs_in_a_thread_and_has_a_context_too() -> None:
    server = FrontMCP("front")
    threads: list[threading.Thread] = []

    @server.tool
    def where(ctx: ToolContext, greeting: str) -> str:
        threads.append(threading.current_thread())
        return f"{greeting} {ctx.caller.transport} {ctx.signal.aborted}"

    assert text_of(await call(server, "where", {"greeting": "hello"})) == "hello in-process False"
    assert threads != [threading.current_thread()]
    assert set((await listed(server))["where"].input_schema["properties"]) == {"greeting"}


@virtual_time
async def test_worker_threads_are_the_servers_own() -> None:
    server = FrontMCP("front", worker_threads=2, throttle=Throttle(admission=Admission(queue_timeout=4)))
    may_end = threading.Event()

    @server.tool
    def waits() -> str:
        may_end.wait()
        return "done"

    async with server.connect() as client:
        running = [asyncio.create_task(client.call_tool("waits", {})) for _ in range(3)]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        [refused] = [each.result() for each in running if each.done()]
        assert (meta_of(refused)["code"], now()) == ("OVERLOADED", 4)
        may_end.set()
        results = [await each for each in running]
    assert sorted(result.is_error for result in results) == [False, False, True]


@pytest.mark.parametrize("mode", MODES)
async def test_a_tool_calls_another_one_through_the_guard(mode: Mode) -> None:
    server = FrontMCP("front", throttle=Throttle(global_rate_limit="1/hour"))

    @server.tool(rate_limit="2/hour")
    async def inner(number: int) -> int:
        return number + 1

    @server.tool
    async def outer(ctx: ToolContext) -> str:
        results = [await ctx.call_tool("inner", {"number": number}) for number in range(3)]
        assert all(isinstance(result, CallToolResult) for result in results)
        assert [result.structured_content for result in results[:2]] == [{"result": 1}, {"result": 2}]
        assert meta_of(results[2])["code"] == "RATE_LIMIT_EXCEEDED"
        unknown = await ctx.call_tool("nope")
        invalid = await ctx.call_tool("inner", {"number": "one"})
        return f"{results[2].is_error} {text_of(unknown)} {invalid.is_error}"

    assert text_of(await call(server, "outer", mode=mode)) == "True Unknown tool: nope True"
    statistics = server.guard.statistics()
    assert (statistics.unknown, statistics.tools["inner"].started, statistics.counts.started) == (1, 2, 3)


async def test_the_callers_name_is_handed_down_and_a_nested_failure_is_masked() -> None:
    server = FrontMCP("front", production=True)
    seen: list[Call] = []

    def whose(call: Call) -> str:
        seen.append(call)
        return "all"

    @server.tool(rate_limit=RateLimit(9, 60, whose))
    async def inner(number: int) -> int:
        raise LookupError(SECRET)

    @server.tool
    async def outer(ctx: ToolContext) -> str:
        return text_of(await ctx.call_tool("inner", {"number": 7}))

    told = text_of(await call(server, "outer"))
    assert SECRET not in told
    assert "err_" in told
    assert seen == [Call("inner", {"number": 7}, Caller(transport="in-process"))]


@virtual_time
async def test_a_call_made_by_work_that_outlives_its_own_call_is_one_like_any_other() -> None:
    server = FrontMCP("front", throttle=Throttle(global_rate_limit="2/hour"))
    told: list[CallToolResult] = []

    @server.tool
    async def inner() -> str:
        return "inner"

    @server.tool
    async def outer(ctx: ToolContext) -> str:
        async def later() -> None:
            await asyncio.sleep(1)
            told.extend([await ctx.call_tool("inner") for _ in range(2)])

        kept.append(asyncio.create_task(later()))
        return "outer"

    kept: list[asyncio.Task[None]] = []
    async with server.connect() as client:
        assert text_of(await client.call_tool("outer", {})) == "outer"
        await kept[0]
    # The globals count it: the first was the second call of the hour.
    assert [meta_of(each).get("code") for each in told] == [None, "RATE_LIMIT_EXCEEDED"]


# -------------------------------------------------------------------------------------- connections and loops


async def test_every_connection_has_the_same_guard() -> None:
    server = FrontMCP("front", tools=[tool(rate_limit="2/hour")(nothing)])
    async with server.connect() as one, server.connect(mode="legacy") as other:
        results = [await client.call_tool("nothing", {}) for client in (one, other, one)]
    assert [result.is_error for result in results] == [False, False, True]


async def test_the_lifespan_is_the_authors_own_and_its_state_is_the_tools() -> None:
    happened: list[str] = []

    @asynccontextmanager
    async def lifespan(mcp: MCPServer[Any]) -> AsyncIterator[dict[str, str]]:
        happened.append("begin")
        yield {"name": mcp.name}
        happened.append("end")

    async def asks(ctx: ToolContext) -> str:
        return str(ctx.request_context.lifespan_context["name"])

    server = FrontMCP("front", lifespan=lifespan, tools=[asks])
    assert text_of(await call(server, "asks")) == "front"
    assert happened == ["begin", "end"]


@virtual_time
async def test_when_the_last_connection_closes_running_work_gets_its_grace_inside_the_lifespan() -> None:
    happened: list[tuple[str, float]] = []

    @asynccontextmanager
    async def lifespan(_: MCPServer[Any]) -> AsyncIterator[None]:
        yield
        happened.append(("lifespan", now()))

    server = FrontMCP("front", lifespan=lifespan, shutdown_grace=3)

    @server.tool(timeout=1)
    async def slow() -> str:
        try:
            await asyncio.sleep(3)
        finally:
            happened.append(("work", now()))
        return "late"

    assert meta_of(await call(server, "slow"))["code"] == "EXECUTION_TIMEOUT"
    assert happened == [("work", 3), ("lifespan", 3)]


def test_one_server_serves_several_loops_one_after_another() -> None:
    server = FrontMCP("front", tools=[tool(rate_limit="3/day", concurrency=1)(nothing)], shutdown_grace=0)
    codes: list[bool] = []

    async def main() -> None:
        codes.extend([(await call(server, "nothing")).is_error for _ in range(2)])

    for _ in range(2):
        run_virtual(main)
    assert codes == [False, False, False, True]


def test_two_running_loops_at_once_are_refused_with_a_clear_error() -> None:
    server = FrontMCP("front", tools=[nothing])
    errors: list[str] = []

    def elsewhere() -> None:
        try:
            asyncio.run(call(server, "nothing"))
        except BaseException as error:
            errors.append(repr(error))

    async def main() -> None:
        async with server.connect() as client:
            await asyncio.to_thread(elsewhere)
            assert not (await client.call_tool("nothing", {})).is_error

    asyncio.run(main())
    [error] = errors
    assert "another event loop that is still running" in error


def test_the_http_app_serves_mcp_and_the_probe() -> None:
    app = FrontMCP("front").http_app()
    assert {getattr(route, "path", None) for route in app.routes} >= {"/mcp", "/healthz"}
