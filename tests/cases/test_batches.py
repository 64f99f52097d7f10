"""Batches of calls: every call has its own answer, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frontmcp_py import FrontMCP, RateLimit
from frontmcp_py.host import Host, HostConfigOption, ToolCall, ToolResult
from tests.cases.desk import ERAS, conc, connected, now


class Shop:
    """A server with a tool `work` that takes some seconds, and when each of its runs began."""

    def __init__(self, **policy: Any) -> None:
        self.server = FrontMCP("shop")
        self.begun: list[tuple[str, float]] = []
        self.running = 0
        self.most = 0

        @self.server.tool(**policy)
        async def work(label: str, seconds: float = 0.0, fails: bool = False) -> str:
            self.begun.append((label, now()))
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await asyncio.sleep(seconds)
            finally:
                self.running -= 1
            if fails:
                raise ValueError(f"{label} is broken")
            return label


def work(label: str, seconds: float = 0.0, *, fails: bool = False) -> ToolCall:
    return ToolCall(label, "work", {"label": label, "seconds": seconds, "fails": fails})


def fan(count: int, seconds: float = 0.0) -> ToolCall:
    return ToolCall("f", "work", {"ops": [{"label": f"f{n}", "seconds": seconds} for n in range(count)]})


def codes(results: list[ToolResult]) -> list[str]:
    return [str((each.meta or {}).get("code", each.status)) for each in results]


@ERAS
async def test_results_stand_in_the_order_of_the_calls_and_not_in_that_of_their_ends(era: str) -> None:
    """anthropics/claude-code#21906, earendil-works/pi#3468: a refusal overtook earlier calls."""
    shop = Shop(rate_limit=RateLimit(2, 60))
    async with connected(shop.server, era) as client:
        await client.call_tool("work", {"label": "before"})
        host = Host(None, client)
        results = await host.run([work("c1", 0.3), work("c2"), ToolCall("c3", "nothing", {})])
        assert [each.id for each in results] == ["c1", "c2", "c3"]
        assert codes(results)[:2] == ["ok", "RATE_LIMIT_EXCEEDED"]
        assert results[2].is_error
        assert now() == 0.3
    assert shop.begun == [("before", 0), ("c1", 0)]


async def test_calls_that_may_run_in_parallel_take_as_long_as_the_longest() -> None:
    shop = Shop()
    async with connected(shop.server, "auto") as client:
        results = await Host(None, client).run([work("c1", 0.3), work("c2", 0.2), work("c3", 0.1)])
        assert [each.text for each in results] == ["c1", "c2", "c3"]
        assert now() == 0.3
    assert shop.begun == [("c1", 0), ("c2", 0), ("c3", 0)]


@ERAS
async def test_a_call_that_fails_cancels_nobody(era: str) -> None:
    """anthropics/claude-code#64920: its siblings, which had nothing to do with it, were cancelled."""
    shop = Shop()
    async with connected(shop.server, era) as client:
        calls = [work("c1", 1), work("c2", 0.01, fails=True), work("c3", 1)]
        results = await Host(None, client).run(calls)
    assert codes(results) == ["ok", "error", "ok"]
    assert "c2 is broken" in results[1].text


@pytest.mark.parametrize(
    "error",
    [Exception(), asyncio.CancelledError(), SystemExit(), SystemExit(3), ExceptionGroup("", [ValueError()])],
    ids=repr,
)
async def test_a_failure_without_a_word_still_has_its_id_name_and_some_text(error: BaseException) -> None:
    """smallest-inc/smallest-python-sdk#118: the result of a failed call had no id, and empty text."""

    async def call(name: str, arguments: dict[str, Any]) -> str:
        if name == "bad":
            raise error
        return "fine"

    host = Host({"bad": {"concurrency": 1}}, call)
    names = ["bad", "good", "bad", "bad", "bad"]
    results = await host.run([ToolCall(f"c{place}", name) for place, name in enumerate(names)])
    assert [(each.id, each.name, each.is_error) for each in results] == [
        (f"c{place}", name, name == "bad") for place, name in enumerate(names)
    ]
    assert all(each.text.strip() for each in results)
    assert await host.run([ToolCall("again", "good")])


@pytest.mark.parametrize("count", [1, 2, 4, 64, 500])
@pytest.mark.parametrize("config", [None, {"work": {"concurrency": 3}}], ids=["unlimited", "limited"])
async def test_n_calls_have_n_results(count: int, config: HostConfigOption) -> None:
    """vllm-project/vllm#57791, NousResearch/hermes-agent#93251: only the last one ran, or no result came."""

    async def call(name: str, arguments: dict[str, Any]) -> object:
        await asyncio.sleep(0.1)
        return arguments["label"]

    results = await Host(config, call).run([work(f"c{n}") for n in range(count)])
    assert [(each.id, each.text) for each in results] == [(f"c{n}", f"c{n}") for n in range(count)]


@ERAS
async def test_a_call_of_a_tool_that_does_not_exist_is_answered_and_takes_nothing(era: str) -> None:
    """dynamiq-ai/dynamiq#902: looking it up failed, and took the results of the others with it."""
    shop = Shop(rate_limit=RateLimit(2, 60), concurrency=conc(1, wait=5))
    async with connected(shop.server, era) as client:
        calls = [work("c1"), ToolCall("c2", "wrok", {"label": "c2"}), work("c3")]
        results = await Host(None, client).run(calls)
        assert [each.is_error for each in results] == [False, True, False]
        assert "wrok" in results[1].text
        assert list(shop.server.guard.statistics().tools) == ["work"]


@ERAS
async def test_each_operation_counts_as_a_call(era: str) -> None:
    """bnb-chain/reth#210, cristianuibar/bricks-mcp#3: a message of many calls counted as one."""
    shop = Shop(rate_limit=RateLimit(5, 60))
    async with connected(shop.server, era) as client:
        (result,) = await Host({"work": {"concurrency": 1, "fan_out": True}}, client).run([fan(20)])
        assert codes(list(result.operations)) == ["ok"] * 5 + ["RATE_LIMIT_EXCEEDED"] * 15
    assert [label for label, _ in shop.begun] == [f"f{n}" for n in range(5)]


async def test_nothing_to_do_is_done_at_once_or_refused() -> None:
    """home-assistant/core#4946, aws/aws-durable-execution-sdk-python#324: nothing to do raised."""

    async def call(name: str, arguments: dict[str, Any]) -> str:
        raise AssertionError("nothing is called")

    host = Host({"work": {"concurrency": 1, "fan_out": True}}, call)
    assert await host.run([]) == []
    (result,) = await host.run([ToolCall("a", "work", {"ops": []})])
    assert result.text == "work: ops is empty; give one operation or more. Nothing was run."
    assert now() == 0


@ERAS
async def test_operations_wait_in_the_host_and_do_not_shut_others_out_of_the_server(era: str) -> None:
    """Advance-Technologies-Foundation/clio#834: operations filled the queue, and were refused."""
    shop = Shop(concurrency=conc(2, queue=5, wait=10))
    config = {"work": {"concurrency": 2, "fan_out": True}}
    async with connected(shop.server, era) as client:

        async def somebody_else() -> None:
            await asyncio.sleep(0.25)
            await client.call_tool("work", {"label": "x", "seconds": 0.1})

        other = asyncio.create_task(somebody_else())
        (result,) = await Host(config, client).run([fan(20, 0.1)])
        await other
        assert codes(list(result.operations)) == ["ok"] * 20
        assert [each.text for each in result.operations] == [f"f{n}" for n in range(20)]
        assert now() == pytest.approx(1.1)
    assert shop.most == 2
    assert dict(shop.begun)["x"] == pytest.approx(0.3)


@ERAS
async def test_a_call_that_is_cancelled_takes_its_operations_with_it(era: str) -> None:
    """knacklabs/gantry#328: its operations went on, or started later."""
    shop = Shop(timeout=60, on_cancel="cancel")
    config = {"work": {"concurrency": 2, "fan_out": True}}
    async with connected(shop.server, era) as client:
        handle = Host(config, client).start([fan(10, 1)])
        await asyncio.sleep(0.05)
        handle.cancel()
        (result,) = await handle.results()
        assert codes(list(result.operations)) == ["cancelled"] * 10
        await handle.ended()
        # The server has ended them, too.
        await asyncio.sleep(0.1)
        assert shop.running == 0
        await asyncio.sleep(60)
    assert [label for label, _ in shop.begun] == ["f0", "f1"]
