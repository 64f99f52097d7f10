"""A tool that calls another one gets its result, refusals included, and passes on what it likes."""

from __future__ import annotations

import re
from typing import Any

from tests.flow.program import SECRET
from tests.flow.wires import Wire


async def delegate(wire: Wire, case: str, tool: str, /, **arguments: object) -> dict[str, Any]:
    """The result that a tool got from another one, as the client is told of it."""
    result = await wire.call("delegate", case=case, tool=tool, arguments=arguments)
    assert not result.is_error, result
    passed_on: dict[str, Any] | None = result.structured_content
    assert passed_on is not None
    return passed_on


async def test_a_nested_result_is_passed_on_whole(wire: Wire, case: str) -> None:
    result = await delegate(wire, case, "once", case=case)
    assert result["structuredContent"] == {"number": 7, "titles": ["ä", "b\n"]}
    assert not result["isError"]


async def test_a_nested_refusal_is_a_result_too(wire: Wire, case: str) -> None:
    await delegate(wire, case, "once", case=case)
    refused = await delegate(wire, case, "once", case=case)
    assert refused["isError"]
    assert refused["content"][0]["text"].startswith("Rate limit exceeded. Retry after ")
    meta = refused["_meta"]
    assert (meta["code"], meta["limit"], meta["scope"]) == ("RATE_LIMIT_EXCEEDED", 1, "tool")


async def test_a_nested_call_that_would_wait_for_its_own_caller_is_refused(wire: Wire, case: str) -> None:
    for tool in ("knock", "enter"):
        refused = await delegate(wire, case, tool, case=case)
        assert refused["content"][0]["text"] == (
            f'Concurrency limit reached for "{tool}" (max: 1): it would wait for itself'
        )
        assert refused["_meta"]["code"] == "CONCURRENCY_LIMIT"


async def test_a_nested_call_has_a_time_limit_of_its_own(wire: Wire, case: str) -> None:
    refused = await delegate(wire, case, "late", case=f"{case}-late")
    assert refused["content"][0]["text"] == 'Execution of "late" timed out after 50ms'
    await wire.let_go(f"{case}-late")


async def test_a_bug_in_a_nested_call_is_masked_like_any_other(wire: Wire, case: str) -> None:
    result = await delegate(wire, case, "fail", how="with a bug")
    assert result["isError"]
    error_id = result["_meta"]["errorId"]
    assert re.fullmatch("err_[0-9a-f]{16}", error_id)
    assert (SECRET in str(result)) == (not wire.kind.production)
    assert f"ZeroDivisionError: {SECRET}" in wire.server.log().rpartition(f"[{error_id}]")[2]


async def test_what_a_nested_call_says_on_purpose_is_passed_on(wire: Wire, case: str) -> None:
    result = await delegate(wire, case, "fail", how="deliberately")
    assert result["isError"]
    assert "No such ticket: 7" in result["content"][0]["text"]


async def test_a_nested_call_of_an_unknown_tool_is_an_error_and_counts_towards_nothing(
    wire: Wire, case: str
) -> None:
    before = await wire.statistics()
    result = await delegate(wire, case, "no_such_tool")
    assert (result["isError"], result["content"][0]["text"]) == (True, "Unknown tool: no_such_tool")
    after = await wire.statistics()
    assert after["unknown"] == before["unknown"] + 1
    assert after["counts"]["submitted"] == before["counts"]["submitted"] + 1


async def test_nested_calls_hold_no_further_place(wire: Wire, case: str) -> None:
    inner = f"{case}-inner"
    call = wire.start("delegate", case=case, tool="change", arguments={"case": inner})
    await wire.said(inner, "started")
    now = await wire.statistics()
    assert (now["active"], now["places"]) == (2, 1)
    await wire.let_go(inner)
    assert not (await call).is_error
