"""Which tools the canary calls, and with what."""

from __future__ import annotations

from typing import Any

import pytest
from mcp_types import Tool, ToolAnnotations

from frontmcp_py.cli.calls import ToolCall, unasked
from frontmcp_py.cli.output import Failure


def tool(name: str, properties: dict[str, Any] | None = None, **hints: Any) -> Tool:
    required = hints.pop("required", [])
    schema = {"type": "object", "properties": properties or {}, "required": required}
    return Tool(name=name, input_schema=schema, annotations=ToolAnnotations(**hints) if hints else None)


TOOLS = {
    each.name: each
    for each in (
        tool("search", {"query": {"type": "string"}, "limit": {"type": "integer"}}),
        tool("note", {"text": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "tags": {"type": "array"}}),
    )
}


@pytest.mark.parametrize(
    ("text", "tool", "arguments"),
    [
        ("search", "search", {}),
        ("search query=7 limit=7", "search", {"query": "7", "limit": 7}),
        ("search 'query=two words' limit=x", "search", {"query": "two words", "limit": "x"}),
        ("  search   query=a=b ", "search", {"query": "a=b"}),
        ("search query=", "search", {"query": ""}),
        ('search {"query": "x", "limit": 1.5}', "search", {"query": "x", "limit": 1.5}),
        ("note text=null tags='[1, 2]' other=true", "note", {"text": "null", "tags": [1, 2], "other": True}),
    ],
)
def test_a_call_is_read_as_its_tool_wants_it(text: str, tool: str, arguments: dict[str, Any]) -> None:
    assert ToolCall.of(text, TOOLS) == ToolCall(tool, arguments)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("serch query=x", "the server has no tool 'serch'; did you mean 'search'?"),
        ("search x", "'search x': 'x' is no argument; give key=value, or one JSON object"),
        ("search =x", "'search =x': '=x' is no argument; give key=value, or one JSON object"),
        ("search {query", "'search {query': the arguments are not JSON: "),
        ("search 'x", '"search \'x": No closing quotation'),
    ],
)
def test_what_is_no_call_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(Failure) as caught:
        ToolCall.of(text, TOOLS)
    assert str(caught.value).startswith(said)


def test_nothing_is_called_unasked_but_what_reads_and_needs_nothing() -> None:
    tools = {
        each.name: each
        for each in (
            tool("reads", read_only_hint=True),
            tool("may_take", {"limit": {"type": "integer"}}, read_only_hint=True),
            tool("needs", {"query": {"type": "string"}}, read_only_hint=True, required=["query"]),
            tool("says_nothing"),
            tool("writes", read_only_hint=False),
            tool("contradicts_itself", read_only_hint=True, destructive_hint=True),
            tool("watches", read_only_hint=True),
        )
    }
    assert [each.tool for each in unasked(tools, without={"watches"})] == ["reads", "may_take"]
