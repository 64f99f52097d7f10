from __future__ import annotations

from typing import Any

import pytest

from frontmcp_py import App, ConfigurationError, FrontMCP, RateLimit, Tool, tool
from frontmcp_py.policy import Policy


def plain() -> str:
    """A plain function."""
    return "plain"


@tool(rate_limit="2/hour")
async def limited() -> str:
    """A tool."""
    return "limited"


def test_an_app_is_a_named_set_of_tools_and_plain_functions_become_some() -> None:
    app = App("help-desk", tools=[limited, plain])
    assert app.name == "help-desk"
    assert [each.name for each in app.tools] == ["limited", "plain"]
    assert app.tools[0] is limited
    assert app.tools[1].policy == Policy()


def test_the_decorator_registers_at_once_bare_and_with_options() -> None:
    app = App("help-desk")

    @app.tool
    def one() -> str:
        return "one"

    @app.tool(rate_limit="10/minute", concurrency=1)
    def merge_customers(source: str, target: str) -> str:
        return f"{source}>{target}"

    @app.tool()
    async def two() -> str:
        return "two"

    assert [each.name for each in app.tools] == ["one", "merge_customers", "two"]
    assert app.tools[1] is merge_customers
    assert merge_customers.policy == Policy(RateLimit(10, 60), 1)
    assert (one(), merge_customers("a", "b")) == ("one", "a>b")


def test_one_decorator_object_registers_two_tools() -> None:
    app = App("help-desk")
    limit = app.tool(rate_limit="2/hour")

    def another() -> str:
        return "another"

    one, other = limit(plain), limit(another)
    assert isinstance(one, Tool)
    assert app.tools == [one, other]


def test_the_options_are_those_of_tool() -> None:
    app = App("help-desk")
    with pytest.raises(TypeError, match=r"tool\(\) has no option 'ratelimit'; did you mean 'rate_limit'"):
        app.tool(ratelimit="2/hour")  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match='tool "plain": rate_limit'):
        app.tool(rate_limit="often")(plain)
    assert app.tools == []


@pytest.mark.parametrize("name", ["", 7, None])
def test_it_needs_a_name(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"App\.name: .* is not allowed; give text"):
        App(name)


@pytest.mark.parametrize(
    "tools",
    [plain, limited, 7, "limited", None, [7], ["limited"]],
    ids=["function", "tool", "number", "text", "None", "list of a number", "list of text"],
)
def test_what_is_no_list_of_tools_is_refused_and_the_app_named(tools: Any) -> None:
    with pytest.raises(ConfigurationError, match=r'app "help-desk": tools: .* is not allowed; give .*tools'):
        App("help-desk", tools=tools)


def test_an_unknown_option_names_the_nearest_one() -> None:
    with pytest.raises(TypeError, match=r"App\(\) has no option 'tool'; did you mean 'tools'\?"):
        App("help-desk", tool=[])  # type: ignore[call-arg]


def test_the_parentheses_of_the_sdks_decorators_are_missed() -> None:
    app = App("help-desk")
    decorator: Any
    for decorator, needed in ((app.resource, "needs the resource's URI"), (app.prompt, "is called")):
        with pytest.raises(TypeError, match=needed):
            decorator(plain)


# ------------------------------------------------------------------------------- once a server has been built


def test_an_app_whose_server_has_been_built_takes_nothing_more() -> None:
    app = App("help-desk")
    early = app.tool(rate_limit="2/hour")
    resource, prompt = app.resource("note://late"), app.prompt()
    FrontMCP("front", apps=[app])
    for late in (
        lambda: app.tool(plain),
        lambda: app.tool(rate_limit="2/hour"),
        lambda: early(plain),
        lambda: app.resource("note://late"),
        app.prompt,
        lambda: resource(plain),
        lambda: prompt(plain),
    ):
        with pytest.raises(
            ConfigurationError, match='app "help-desk": server "front" has been built from it'
        ):
            late()
    assert app.tools == []


def test_a_server_that_could_not_be_built_closes_no_app() -> None:
    app = App("help-desk", tools=[plain])
    with pytest.raises(ConfigurationError, match='two tools are called "plain"'):
        FrontMCP("front", apps=[app, App("other", tools=[plain])])
    app.tool(limited.fn)
    FrontMCP("front", apps=[app])


async def test_an_app_may_be_served_by_several_servers_and_each_counts_for_itself() -> None:
    app = App("help-desk", tools=[tool(name="once", rate_limit="1/hour")(plain)])
    for server in (FrontMCP("one", apps=[app]), FrontMCP("other", apps=[app])):
        async with server.connect() as client:
            results = [await client.call_tool("once", {}) for _ in range(2)]
            assert [result.is_error for result in results] == [False, True]


async def test_resources_and_prompts_have_the_sdks_meaning_and_are_not_limited() -> None:
    app = App("help-desk")

    @app.resource("note://{name}", title="A note")
    def note(name: str) -> str:
        return f"note of {name}"

    @app.prompt(title="Greet")
    def greet(name: str) -> str:
        return f"Greet {name}."

    server = FrontMCP("front", apps=[app], throttle={"global_rate_limit": "1/day"})
    async with server.connect() as client:
        for _ in range(5):
            read = await client.read_resource("note://ann")
            assert read.contents[0].text == "note of ann"  # type: ignore[union-attr]
            prompt = await client.get_prompt("greet", {"name": "ann"})
            assert prompt.messages[0].content.text == "Greet ann."  # type: ignore[union-attr]
        assert (await client.list_prompts()).prompts[0].title == "Greet"
        assert (await client.list_resource_templates()).resource_templates[0].title == "A note"
    assert server.guard.statistics().counts.submitted == 0
    # The functions are the author's own, as before.
    assert note("bob") == "note of bob"
