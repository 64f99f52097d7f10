"""What a tool returns or raises, as it arrives; and what clients are told of the tools."""

from __future__ import annotations

import re

import pytest
from mcp.client import Client
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from tests.flow.program import SECRET
from tests.flow.wires import ALL, IN_DEVELOPMENT, Kind, Wire, over, text

pytestmark = over((*ALL, *IN_DEVELOPMENT))

BUGS = {
    "with a bug": "ZeroDivisionError",
    "with a timeout of its own": "TimeoutError",
    "by leaving the process": "SystemExit",
}


async def sdk_says(kind: Kind, name: str, arguments: dict[str, object]) -> tuple[str, bool]:
    """What the SDK's own server answers to a call, or the error that its client raises."""
    bare: MCPServer[None] = MCPServer("flow")

    @bare.tool()
    async def fail(how: str) -> str:
        raise ToolError("No such ticket: 7")

    @bare.tool()
    async def once(case: str, number: int = 7) -> str:
        return "never"

    async with Client(bare, mode=kind.mode) as client:
        result = await client.call_tool(name, arguments)
        return text(result), bool(result.is_error)


async def test_a_structured_result_arrives_unharmed(wire: Wire, case: str) -> None:
    result = await wire.call("once", case=case)
    assert not result.is_error
    assert result.structured_content == {"number": 7, "titles": ["ä", "b\n"]}
    assert "ä" in text(result)
    assert set(result.meta or {}) <= {"io.modelcontextprotocol/serverInfo"}


async def test_what_a_tool_says_on_purpose_arrives_as_with_the_sdk(wire: Wire) -> None:
    arguments: dict[str, object] = {"how": "deliberately"}
    result = await wire.call("fail", **arguments)
    assert (text(result), result.is_error) == await sdk_says(wire.kind, "fail", arguments)
    assert "No such ticket: 7" in text(result)


@pytest.mark.parametrize(
    ("tool", "how"), [*(("fail", how) for how in BUGS), ("fail_in_thread", "with a bug")]
)
async def test_a_bug_is_masked_in_production_and_logged_under_the_id_the_client_sees(
    wire: Wire, tool: str, how: str
) -> None:
    result = await wire.call(tool, how=how)
    error_id = str((result.meta or {})["errorId"])
    assert result.is_error
    assert re.fullmatch("err_[0-9a-f]{16}", error_id)
    if wire.kind.production:
        assert text(result) == f"Error executing tool {tool}. Error id: {error_id}"
        assert SECRET not in result.model_dump_json()
    else:
        assert text(result) == f"Error executing tool {tool}: {BUGS[how]}: {SECRET}"
    record = wire.server.log().rpartition(f"[{error_id}]")[2]
    assert "Traceback (most recent call last)" in record
    assert f"{BUGS[how]}: {SECRET}" in record


async def test_a_tool_that_cancels_itself_has_failed(wire: Wire) -> None:
    before = (await wire.statistics())["tools"]["fail"]
    result = await wire.call("fail", how="by cancelling itself")
    assert result.is_error
    assert text(result).startswith("Error executing tool fail")
    after = (await wire.statistics())["tools"]["fail"]
    assert (after["failed"], after["cancelled"]) == (before["failed"] + 1, before["cancelled"])


async def test_an_unknown_tool_is_answered_by_the_sdk_and_counts_towards_nothing(wire: Wire) -> None:
    before = await wire.statistics()
    result = await wire.call("no_such_tool", case="x")
    assert (text(result), result.is_error) == await sdk_says(wire.kind, "no_such_tool", {"case": "x"})
    after = await wire.statistics()
    assert after["unknown"] == before["unknown"] + 1
    assert after["counts"] == before["counts"]
    assert "no_such_tool" not in after["tools"]


async def test_arguments_that_do_not_validate_are_a_started_call(wire: Wire, case: str) -> None:
    before = (await wire.statistics())["tools"]["once"]
    result = await wire.call("once", case=case, number="seven")
    assert (result.is_error, result.meta is None or "code" not in result.meta) == (True, True)
    assert "number" in text(result)
    after = (await wire.statistics())["tools"]["once"]
    assert (after["started"], after["failed"]) == (before["started"] + 1, before["failed"] + 1)
    # It is counted: the one call that the limit allows has been made.
    assert ((await wire.call("once", case=case)).meta or {})["code"] == "RATE_LIMIT_EXCEEDED"


async def test_clients_are_told_of_the_limits(wire: Wire) -> None:
    tools = {tool.name: tool for tool in (await wire.client.list_tools()).tools}
    once = tools["once"]
    assert once.description == (
        "Gives a ticket. "
        "Limits: at most 1 call per 366 days for each group of callers; gives up after 5 seconds."
    )
    assert (once.meta or {})["frontmcp/limits"] == {
        "rateLimits": [
            {
                "maxRequests": 1,
                "windowMs": 366 * 86_400_000,
                "partitionBy": "function",
                "strategy": "fixed-window",
            }
        ],
        "timeoutMs": 5000,
    }
    patient = tools["knock_patiently"]
    assert patient.description == (
        "Limits: one at a time for each group of callers, shared with other tools, "
        "waiting up to 50 milliseconds for a turn."
    )
    assert (patient.meta or {})["frontmcp/limits"] == {
        "concurrency": [{"maxConcurrent": 1, "queueTimeoutMs": 50, "partitionBy": "function"}]
    }
    assert tools["restart"].meta is None
    # What the guard gives a tool is no part of what clients give it.
    assert set(tools["change"].input_schema["properties"]) == {"case"}
