"""One server object over its life: loop after loop, connection after connection, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, Literal

import mcp_types as types
import pytest
from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError

from frontmcp_py import Admission, Concurrency, FrontMCP, RateLimit, Throttle, Timeout, ToolContext
from frontmcp_py.testing import settle, virtual_time
from tests.flow.wires import text

Mode = Literal["auto", "legacy"]

both_modes = pytest.mark.parametrize("mode", ["auto", "legacy"])

SOON: Final = 15.0


def code(result: types.CallToolResult) -> object:
    return (result.meta or {}).get("code")


def left(server: FrontMCP) -> tuple[int, int, int, int]:
    """What runs, waits and is held."""
    now = server.guard.statistics()
    return now.active, now.waiting, now.places, server.guard._scheduler.live_slots


def on_uvloop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def on_asyncio(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


def counting() -> FrontMCP:
    """A server that has something to count, to hold and to wait for."""
    server = FrontMCP("life")

    @server.tool(rate_limit=RateLimit(4, window="366d"), concurrency=Concurrency(1, queue_timeout=SOON))
    async def count(slowly: bool = False) -> str:
        if slowly:
            await asyncio.sleep(0.005)
        return "counted"

    @server.tool(timeout=0.01)
    async def late(ctx: ToolContext) -> str:
        await ctx.signal.wait()
        return "late"

    @server.tool(timeout=0.01)
    def late_in_thread(ctx: ToolContext) -> str:
        ctx.signal.wait_sync(SOON)
        return "late"

    return server


# ---------------------------------------------------------------------------------------- loop after loop


@both_modes
@pytest.mark.parametrize("run", [on_asyncio, on_uvloop])
def test_a_server_runs_on_one_loop_after_the_other_and_goes_on_counting(
    run: Callable[[Callable[[], Coroutine[Any, Any, None]]], None], mode: Mode
) -> None:
    server = counting()
    codes: list[object] = []

    async def main() -> None:
        async with server.connect(mode=mode) as client:
            # Two at once, on a mutex: the second waits.
            both = (client.call_tool("count", {"slowly": True}), client.call_tool("count", {}))
            codes.extend(code(result) for result in await asyncio.gather(*both))
            assert code(await client.call_tool("late", {})) == "EXECUTION_TIMEOUT"
            assert code(await client.call_tool("late_in_thread", {})) == "EXECUTION_TIMEOUT"
        assert left(server) == (0, 0, 0, 0)

    for _ in range(3):
        run(main)
    assert codes == [None] * 4 + ["RATE_LIMIT_EXCEEDED"] * 2


def test_a_thread_that_hangs_is_named_and_the_next_loop_has_all_its_places(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = FrontMCP("life", worker_threads=1, shutdown_grace=0)
    is_at_work, is_open = threading.Event(), threading.Event()

    @server.tool(concurrency=1, timeout=0.01)
    def hang() -> str:
        is_at_work.set()
        is_open.wait(SOON)
        return "over"

    async def call() -> types.CallToolResult:
        is_at_work.clear()
        async with server.connect() as client:
            answer = await client.call_tool("hang", {})
            assert await asyncio.to_thread(is_at_work.wait, SOON)
        return answer

    async def look() -> None:
        async with server.connect():
            pass

    with caplog.at_level(logging.WARNING, "frontmcp_py"):
        assert code(asyncio.run(call())) == "EXECUTION_TIMEOUT"
        assert '"hang" has not ended although nobody is connected any more: its worker thread' in caplog.text
        # It is there again although the thread still hangs, with its slot and its one thread.
        assert code(asyncio.run(call())) == "EXECUTION_TIMEOUT"
        assert '"hang" is left behind on an event loop that has ended: its worker thread hangs' in caplog.text
    is_open.set()
    asyncio.run(look())
    assert left(server) == (0, 0, 0, 0)


@both_modes
def test_a_loop_that_just_ends_leaves_nothing_to_the_next(mode: Mode) -> None:
    server = FrontMCP("life", shutdown_grace=0)

    @server.tool(concurrency=Concurrency(1, queue_timeout=None))
    async def hold(forever: bool) -> str:
        if forever:
            await asyncio.Event().wait()
        return "held"

    calls: list[asyncio.Task[types.CallToolResult]] = []

    async def main() -> None:
        client = await contextlib.AsyncExitStack().enter_async_context(server.connect(mode=mode))
        calls.extend(asyncio.create_task(client.call_tool("hold", {"forever": True})) for _ in range(2))
        await settle()
        assert left(server)[:2] == (1, 1)

    loop = asyncio.new_event_loop()
    # Nothing is cancelled and nothing awaited: somebody just runs it no longer.
    loop.run_until_complete(main())

    async def again() -> str:
        async with server.connect(mode=mode) as client:
            held = text(await client.call_tool("hold", {"forever": False}))
            calls.append(asyncio.create_task(client.call_tool("hold", {"forever": True})))
            await settle()
        # The last connection has closed, although one of the other loop never has.
        assert left(server) == (0, 0, 0, 0)
        return held

    assert asyncio.run(again()) == "held"
    _end(loop)
    assert left(server) == (0, 0, 0, 0)
    # However they ended, nobody was told that the work was done.
    answers = [call for call in calls if not call.cancelled() and call.exception() is None]
    assert {code(answer.result()) for answer in answers} <= {"OVERLOADED"}


def _end(loop: asyncio.AbstractEventLoop) -> None:
    async def cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=SOON)

    loop.run_until_complete(cancel_all())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@both_modes
async def test_a_second_running_loop_is_refused_and_the_first_goes_on(mode: Mode) -> None:
    server = counting()

    async def elsewhere() -> None:
        async with server.connect(mode=mode) as client:
            await client.call_tool("count", {})

    async with server.connect(mode=mode) as client:
        assert text(await client.call_tool("count", {})) == "counted"
        refusal = (await asyncio.gather(asyncio.to_thread(asyncio.run, elsewhere()), return_exceptions=True))[
            0
        ]
        assert isinstance(refusal, Exception)
        assert "in use on another event loop that is still running" in _everything(refusal)
        assert text(await client.call_tool("count", {})) == "counted"
    assert left(server) == (0, 0, 0, 0)


def _everything(error: BaseException) -> str:
    """What an error says, and all those that it stands for."""
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return " ".join([str(error), *(_everything(each) for each in inner)])


@both_modes
@virtual_time
async def test_a_call_that_waits_too_long_for_a_place_is_told_how_full_the_server_is(mode: Mode) -> None:
    server = FrontMCP("life", throttle=Throttle(admission=Admission(2, 1, max_queued=2, queue_timeout=0.3)))

    @server.tool
    async def take(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "taken"

    async with server.connect(mode=mode) as client:
        calls = [asyncio.create_task(client.call_tool("take", {"seconds": 5})) for _ in range(3)]
        answers = await asyncio.gather(*calls)
    assert [text(answer) for answer in answers] == [
        "taken",
        "Server overloaded: waited 300ms for a place (1 calls running, 1 waiting). Try again shortly.",
        "Server overloaded: waited 300ms for a place (1 calls running, 0 waiting). Try again shortly.",
    ]
    assert [code(answer) for answer in answers] == [None, "OVERLOADED", "OVERLOADED"]
    assert left(server) == (0, 0, 0, 0)


# ---------------------------------------------------------------------------- connection after connection


class Story:
    """A server whose lifespan and whose work tell what happens, and when."""

    def __init__(self, **options: Any) -> None:
        self.told: list[tuple[str, float]] = []
        self.server = FrontMCP("story", lifespan=self._lifespan, **options)
        self.server.tool(timeout=Timeout(1))(self.work)
        self.server.tool(read_only=True)(self.read)

    def tell(self, what: str) -> None:
        self.told.append((what, asyncio.get_running_loop().time()))

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: MCPServer[Any]) -> AsyncIterator[dict[str, Any]]:
        self.tell("opens")
        try:
            yield {}
        finally:
            self.tell("closes")

    async def work(self, seconds: float, ctx: ToolContext) -> str:
        """Takes its time."""
        ctx.signal.add_callback(lambda: self.tell(f"aborted: {getattr(ctx.signal.reason, 'code', '?')}"))
        return await self._take(seconds)

    async def read(self, seconds: float) -> str:
        """Takes its time, and changes nothing."""
        return await self._take(seconds)

    async def _take(self, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.tell("cancelled")
            raise
        self.tell("done")
        return "done"


@both_modes
@virtual_time
async def test_the_lifespan_is_entered_and_left_with_each_connection(mode: Mode) -> None:
    story = Story()
    for _ in range(2):
        async with story.server.connect(mode=mode) as client:
            assert text(await client.call_tool("read", {"seconds": 1})) == "done"
    assert [what for what, _ in story.told] == ["opens", "done", "closes"] * 2


@both_modes
@virtual_time
async def test_work_that_is_left_ends_within_its_grace_before_the_lifespan_does(mode: Mode) -> None:
    story = Story(shutdown_grace=5)
    async with story.server.connect(mode=mode) as client:
        assert code(await client.call_tool("work", {"seconds": 5.5})) == "EXECUTION_TIMEOUT"
    assert story.told == [("opens", 0), ("aborted: EXECUTION_TIMEOUT", 1), ("done", 5.5), ("closes", 5.5)]
    assert left(story.server) == (0, 0, 0, 0)


@both_modes
@virtual_time
async def test_work_that_takes_longer_than_its_grace_is_cancelled(mode: Mode) -> None:
    story = Story(shutdown_grace=5)
    async with story.server.connect(mode=mode) as client:
        assert code(await client.call_tool("work", {"seconds": 60})) == "EXECUTION_TIMEOUT"
    assert story.told == [("opens", 0), ("aborted: EXECUTION_TIMEOUT", 1), ("cancelled", 6), ("closes", 6)]
    assert left(story.server) == (0, 0, 0, 0)


@virtual_time
async def test_a_call_that_runs_when_its_client_goes_is_told_and_has_its_grace() -> None:
    story = Story(shutdown_grace=5)
    async with story.server.connect(mode="legacy") as client:
        call = asyncio.create_task(client.call_tool("work", {"seconds": 0.9}))
        await asyncio.sleep(0.5)
    with pytest.raises(MCPError):
        await call
    assert story.told == [("opens", 0), ("aborted: CANCELLED", 0.5), ("done", 0.9), ("closes", 0.9)]


@virtual_time
async def test_a_call_that_is_still_unanswered_when_its_grace_is_over_is_told_that_the_server_stops() -> None:
    story = Story(shutdown_grace=5)
    async with story.server.connect(mode="auto") as client:
        # A call belongs to its caller, who is still there when the connection is not.
        call = asyncio.create_task(client.call_tool("read", {"seconds": 60}))
        await asyncio.sleep(1)
    answer = await call
    assert text(answer) == "Server overloaded: shutting down. Try again shortly."
    assert code(answer) == "OVERLOADED"
    assert story.told == [("opens", 0), ("cancelled", 6), ("closes", 6)]


@both_modes
@virtual_time
async def test_only_the_last_connection_ends_what_is_left(mode: Mode) -> None:
    story = Story(shutdown_grace=1)
    async with story.server.connect(mode=mode) as last:
        async with story.server.connect(mode=mode) as first:
            assert code(await first.call_tool("work", {"seconds": 10})) == "EXECUTION_TIMEOUT"
        assert [what for what, _ in story.told][-1] == "closes"
        # The other one's work is still there, and its place.
        assert left(story.server)[0] == 1
        assert text(await last.call_tool("read", {"seconds": 20})) == "done"
    assert [each for each in story.told if each[0] in ("done", "cancelled")] == [("done", 10), ("done", 21)]


@both_modes
@virtual_time
async def test_a_connection_that_comes_while_the_last_one_closes_is_served(mode: Mode) -> None:
    story = Story(shutdown_grace=5)

    async def go_and_leave_work() -> None:
        async with story.server.connect(mode=mode) as client:
            assert code(await client.call_tool("work", {"seconds": 60})) == "EXECUTION_TIMEOUT"

    leaving = asyncio.create_task(go_and_leave_work())
    await asyncio.sleep(2)
    async with story.server.connect(mode=mode) as client:
        assert text(await client.call_tool("read", {"seconds": 20})) == "done"
    await leaving
    assert left(story.server) == (0, 0, 0, 0)
