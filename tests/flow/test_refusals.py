"""A refusal is the same tool result however one talks to the server, in production and in development."""

from __future__ import annotations

import asyncio
import re

import mcp_types as types
import pytest

from tests.flow.program import MAX_RESULT_BYTES
from tests.flow.wires import ALL, IN_DEVELOPMENT, Wire, over, text

pytestmark = over((*ALL, *IN_DEVELOPMENT))


def told(result: types.CallToolResult) -> dict[str, object]:
    """What a refusal tells programs, without what is different each time."""
    meta = dict(result.meta or {})
    # The protocol of 2026-07-28 has the SDK say who it is in every answer.
    meta.pop("io.modelcontextprotocol/serverInfo", None)
    assert re.fullmatch("err_[0-9a-f]{16}", str(meta.pop("errorId")))
    return meta


def assert_refused(result: types.CallToolResult, message: str, **meta: object) -> None:
    assert (result.is_error, text(result), result.structured_content) == (True, message, None)
    assert told(result) == meta


async def test_a_rate_limit_refuses_and_says_when_it_will_not(wire: Wire, case: str) -> None:
    assert not (await wire.call("once", case=case)).is_error
    refused = await wire.call("once", case=case)
    wait = (refused.meta or {})["retryAfterMs"]
    assert isinstance(wait, int)
    assert 0 < wait <= 366 * 86_400_000
    assert_refused(
        refused,
        f"Rate limit exceeded. Retry after {-(-wait // 1000)} seconds",
        code="RATE_LIMIT_EXCEEDED",
        retryAfterMs=wait,
        limit=1,
        scope="tool",
    )


async def test_a_taken_slot_refuses_at_once(wire: Wire, case: str) -> None:
    running = wire.start("change", case=case)
    await wire.said(case, "started")
    assert_refused(
        await wire.call("knock", case=case),
        'Concurrency limit reached for "knock" (max: 1)',
        code="CONCURRENCY_LIMIT",
        limit=1,
        scope="key",
    )
    await wire.let_go(case)
    assert text(await running) == "done"
    assert not (await wire.call("knock", case=case)).is_error


async def test_a_slot_that_stays_taken_refuses_after_the_wait(wire: Wire, case: str) -> None:
    running = wire.start("change", case=case)
    await wire.said(case, "started")
    assert_refused(
        await wire.call("knock_patiently", case=case),
        'Queue timeout for "knock_patiently" after waiting 50ms for a concurrency slot',
        code="QUEUE_TIMEOUT",
        limit=1,
        scope="key",
    )
    await wire.let_go(case)
    assert text(await running) == "done"
    assert text(await wire.call("knock_patiently", case=case)) == "open"


@pytest.mark.parametrize("tool", ["late", "late_in_thread"])
async def test_a_call_that_takes_too_long_is_answered_at_its_deadline(
    wire: Wire, case: str, tool: str
) -> None:
    assert_refused(
        await wire.call(tool, case=case),
        f'Execution of "{tool}" timed out after 50ms',
        code="EXECUTION_TIMEOUT",
        limit=50,
        scope="tool",
    )
    await wire.let_go(case)


async def test_a_full_server_refuses_at_once_and_still_does_what_controls_it(wire: Wire, case: str) -> None:
    holding = [wire.start("hold", case=case) for _ in range(44)]
    await wire.said(case, "started", 40)
    await wire.statistics("waiting", 4)
    refused = await wire.call("hold", case=case)
    wait = (refused.meta or {})["retryAfterMs"]
    assert isinstance(wait, int)
    assert 800 <= wait <= 1200
    assert_refused(
        refused,
        "Server overloaded: 40 calls running, 4 waiting. Try again shortly.",
        code="OVERLOADED",
        retryAfterMs=wait,
        limit=48,
        scope="admission",
    )
    assert text(await wire.call("restart")) == "restarted"
    assert (await wire.statistics())["tools"]["hold"]["rejected"]["OVERLOADED"] >= 1
    await wire.let_go(case)
    assert {text(held) for held in await asyncio.gather(*holding)} == {"held"}


async def test_a_result_that_is_too_large_is_kept_back(wire: Wire) -> None:
    assert_refused(
        await wire.call("large", size=MAX_RESULT_BYTES + 1),
        f'Result of "large" is larger than {MAX_RESULT_BYTES} bytes; the tool has run.',
        code="OUTPUT_LIMIT",
        limit=MAX_RESULT_BYTES,
    )


async def test_a_text_that_repeats_a_large_result_is_shortened(wire: Wire) -> None:
    size = MAX_RESULT_BYTES * 2 // 3
    result = await wire.call("large", size=size)
    assert not result.is_error
    assert result.structured_content == {"number": size, "titles": ["x" * size]}
    assert text(result).endswith("… (shortened: the whole result is in the structured content)")


async def test_who_cannot_be_counted_is_refused(wire: Wire, case: str) -> None:
    refused = await wire.call("unaccountable", case=case)
    assert_refused(
        refused,
        'Call to "unaccountable" was refused: whose limit it counts against could not be told.',
        code="PARTITION_ERROR",
    )
    log = wire.server.log()
    assert f"[{(refused.meta or {})['errorId']}]" in log
    assert "LookupError" in log


async def test_a_refusal_that_a_tool_lets_through_is_answered_as_it_is(wire: Wire) -> None:
    assert_refused(
        await wire.call("fail", how="with a refusal"),
        "Server overloaded: 3 calls running, 4 waiting. Try again shortly.",
        code="OVERLOADED",
        retryAfterMs=1500,
        limit=5,
        scope="admission",
    )


async def test_a_refused_call_consumes_nothing(wire: Wire, case: str) -> None:
    running = wire.start("change", case=case)
    await wire.said(case, "started")
    before = await wire.statistics()
    await wire.call("knock", case=case)
    after = await wire.statistics()
    assert after["counts"]["started"] == before["counts"]["started"]
    assert after["places"] == before["places"]
    assert after["live_slots"] == before["live_slots"]
    await wire.let_go(case)
    await running
