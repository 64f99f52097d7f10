"""A time limit ends the call, not the work: what the work still does, and what its client hears of it."""

from __future__ import annotations

import asyncio

import mcp_types as types
import pytest

from tests.flow.wires import SOON, Wire, text


def code(result: types.CallToolResult) -> object:
    return (result.meta or {}).get("code")


@pytest.mark.parametrize("tool", ["late", "late_in_thread"])
async def test_work_goes_on_after_its_call_has_timed_out_and_keeps_its_slot_until_it_ends(
    wire: Wire, case: str, tool: str
) -> None:
    assert code(await wire.call(tool, case=case)) == "EXECUTION_TIMEOUT"
    said = await wire.said(case, "aborted: EXECUTION_TIMEOUT")
    assert "over" not in said
    now = await wire.statistics()
    assert (now["active"], now["abandoned"], now["places"]) == (1, 1, 1)
    assert code(await wire.call("knock", case=case)) == "CONCURRENCY_LIMIT"
    await wire.let_go(case)
    assert (await wire.said(case, "done"))[-2:] == ["over", "done"]
    assert text(await wire.call("enter", case=case)) == "inside"


async def test_work_that_is_cancelled_after_its_deadline_frees_its_slot_at_once(
    wire: Wire, case: str
) -> None:
    assert code(await wire.call("late_and_cancelled", case=case)) == "EXECUTION_TIMEOUT"
    said = await wire.said(case, "over")
    assert said[1:] == ["started", "aborted: EXECUTION_TIMEOUT", "cancelled", "over"]
    assert text(await wire.call("enter", case=case)) == "inside"


async def test_work_that_fails_after_its_call_has_timed_out_harms_nobody(wire: Wire, case: str) -> None:
    assert code(await wire.call("late_and_failing", case=case)) == "EXECUTION_TIMEOUT"
    await wire.let_go(case)
    assert text(await wire.call("enter", case=case)) == "inside"
    assert (await wire.statistics("active", 0))["tools"]["late_and_failing"]["failed"] == 0


@pytest.mark.filterwarnings("ignore:The logging capability is deprecated")
async def test_progress_and_log_messages_are_heard_until_the_answer_and_no_longer(
    wire: Wire, case: str
) -> None:
    heard: list[str | None] = []
    is_heard = asyncio.Event()

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message)
        is_heard.set()

    wire.heard.clear()
    async with asyncio.timeout(SOON):
        answer = await wire.client.call_tool("talkative", {"case": case}, progress_callback=hear)
        assert code(answer) == "EXECUTION_TIMEOUT"
        await wire.let_go(case)
        await wire.said(case, "over")
        # Whatever the server has said by now arrives before its answer to this.
        await wire.call("restart")
        if not wire.kind.is_json:
            await is_heard.wait()
    # An answer that is one document has no room for more; and log messages are for those who ask, since 2026.
    assert heard == ([] if wire.kind.is_json else ["early"])
    assert "late" not in str(wire.heard)
    logged = [each.params.data for each in wire.heard if isinstance(each, types.LoggingMessageNotification)]
    assert logged == ([] if wire.kind.is_json or wire.kind.is_modern else ["early"])
