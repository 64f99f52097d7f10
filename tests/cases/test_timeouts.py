"""How long may it run? Deadlines, threads, and whose failure it is."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable

import anyio
import pytest
from mcp.server.mcpserver.exceptions import ToolError

from frontmcp_py import (
    AbortSignal,
    Admission,
    Call,
    Concurrency,
    ExecutionTimeout,
    FrontMCP,
    Policy,
    Throttle,
    Timeout,
    ToolContext,
)
from frontmcp_py.guard import Run
from frontmcp_py.policy import ON_CANCEL, OnCancel
from frontmcp_py.testing import settle
from tests.cases.asgi import Request, call, code_of_call, serving
from tests.cases.desk import (
    ERAS,
    Attempt,
    Desk,
    StepLoop,
    at,
    at_every_step,
    code_of,
    conc,
    connected,
    now,
    text_of,
    until,
)

OpenDesk = Callable[..., Desk]


class Threads:
    """Bodies in worker threads that end when they are told to."""

    def __init__(self) -> None:
        self.ends = threading.Event()
        self.seen: list[str] = []

    def end_at(self, moment: float) -> None:
        asyncio.get_running_loop().call_at(moment, self.ends.set)

    def work(self) -> str:
        self.seen.append(threading.current_thread().name)
        self.ends.wait()
        return "done"


@pytest.fixture
def threads() -> Threads:
    return Threads()


# ------------------------------------------------------------------------------------------- sync bodies


async def test_a_sync_tool_holds_up_nobody(threads: Threads) -> None:
    """modelcontextprotocol/python-sdk#1646, PrefectHQ/fastmcp#2865: it ran on the event loop itself."""
    server = FrontMCP("server")
    server.tool(name="blocks", timeout=1)(threads.work)

    @server.tool
    async def hello() -> str:
        return "hello"

    async with serving(server) as app:
        threads.end_at(5)
        blocked = call(app, "blocks")
        await at(0.1)
        probe, other = Request(app, "/healthz", method="GET"), call(app, "hello")
        assert (await probe.answer())["ok"]
        assert await code_of_call(other) == "ok"
        assert (probe.ended, other.ended) == (0.1, 0.1)
        assert await code_of_call(blocked) == "EXECUTION_TIMEOUT"
        assert blocked.ended == 1.0
        await at(5)
    assert all(name != threading.current_thread().name for name in threads.seen)


@ERAS
async def test_a_thread_keeps_its_slot_until_it_has_really_ended(era: str, threads: Threads) -> None:
    """PrefectHQ/fastmcp#2865: answered in time, but nobody may take what the thread still uses."""
    server = FrontMCP("server")
    server.tool(name="blocks", timeout=1, concurrency=Concurrency(1, queue_timeout=10))(threads.work)
    async with connected(server, era) as client:
        threads.end_at(5)
        first = await client.call_tool("blocks", {})
        assert (code_of(first), now()) == ("EXECUTION_TIMEOUT", 1.0)
        assert server.guard.statistics().abandoned == 1
        second = await client.call_tool("blocks", {})
        # It began when the thread had ended, and found the event set already.
        assert (code_of(second), now()) == ("ok", 5.0)


@ERAS
async def test_a_thread_that_listens_gives_its_slot_back_at_its_deadline(era: str) -> None:
    """PrefectHQ/fastmcp#2865: a thread can only be told, so it has to be told."""
    server = FrontMCP("server")
    told: list[object] = []

    @server.tool(timeout=1, concurrency=1)
    def listens(ctx: ToolContext) -> str:
        told.append(ctx.signal.wait_sync())
        told.append(ctx.signal.reason)
        ctx.signal.throw_if_aborted()
        return "never"

    async with connected(server, era) as client:
        for moment in (1, 3, 5):
            assert code_of(await client.call_tool("listens", {})) == "EXECUTION_TIMEOUT"
            assert now() == moment
            # Time does not pass before the thread is done.
            await at(moment + 1)
    assert told[0] is True
    assert isinstance(told[1], ExecutionTimeout)


@ERAS
async def test_more_sync_calls_than_threads_wait_for_a_thread_and_no_longer_than_admission(
    era: str, threads: Threads
) -> None:
    """modelcontextprotocol/python-sdk#1646: and async tools and control calls go on meanwhile."""
    server = FrontMCP("server", worker_threads=2, throttle=Throttle(admission=Admission(queue_timeout=3)))
    server.tool(name="blocks")(threads.work)
    server.tool(name="control", priority="control")(lambda: "control")

    @server.tool
    async def hello() -> str:
        return "hello"

    async with connected(server, era) as client:
        threads.end_at(4)
        calls = [asyncio.create_task(client.call_tool("blocks", {})) for _ in range(4)]
        await at(1)
        assert code_of(await client.call_tool("hello", {})) == "ok"
        assert code_of(await client.call_tool("control", {})) == "ok"
        assert now() == 1.0
        results = await asyncio.gather(*calls)
        assert sorted(map(code_of, results)) == ["OVERLOADED", "OVERLOADED", "ok", "ok"]
        assert len(threads.seen) == 2


# ------------------------------------------------------------------------------- whose failure is it?


@ERAS
@pytest.mark.parametrize("read_only", [True, False], ids=["inline", "own task"])
@pytest.mark.parametrize(
    "error", [TimeoutError, asyncio.CancelledError, ToolError, LookupError, SystemExit, BaseExceptionGroup]
)
async def test_a_tools_own_error_is_the_tools_failure(
    era: str, read_only: bool, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """tao12345666333/ankaloop#47: the type of an exception was taken for its cause."""
    server = FrontMCP("server")

    @server.tool(timeout=10 if not read_only else None, read_only=read_only)
    async def fails() -> str:
        await asyncio.sleep(0.1)
        raise (
            BaseExceptionGroup("two", [ValueError(), KeyError()])
            if error is BaseExceptionGroup
            else error("no")
        )

    with caplog.at_level(logging.CRITICAL, "frontmcp_py.server"):
        async with connected(server, era) as client:
            result = await client.call_tool("fails", {})
            assert (code_of(result), now()) == ("error", 0.1)
            assert "timed out" not in text_of(result)
            assert "was cancelled" not in text_of(result)
            again = await client.call_tool("fails", {})
            assert code_of(again) == "error"
    counts = server.guard.statistics().counts
    assert (counts.failed, counts.timed_out, counts.cancelled, counts.rejected) == (2, 0, 0, {})


@ERAS
@pytest.mark.parametrize("on_cancel", ON_CANCEL)
async def test_a_tool_that_cancels_itself_has_failed(era: str, on_cancel: OnCancel) -> None:
    """tao12345666333/ankaloop#47: a cancellation, but not one by the caller, who waits for an answer."""
    server = FrontMCP("server")

    @server.tool(timeout=10, on_cancel=on_cancel)
    async def cancels_itself() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)
        return "never"

    async with connected(server, era) as client:
        assert code_of(await client.call_tool("cancels_itself", {})) == "error"
    counts = server.guard.statistics().counts
    assert (counts.failed, counts.timed_out, counts.cancelled) == (1, 0, 0)


@pytest.mark.parametrize("own", [0.5, 1.0, 1.5])
async def test_a_timeout_of_the_body_and_one_of_the_guard_are_told_apart(desk: Desk, own: float) -> None:
    """tao12345666333/ankaloop#47: also when both come due in the same moment."""

    async def body(_: Attempt) -> object:
        async with asyncio.timeout(own):
            await asyncio.sleep(60)
        return "never"

    attempt = await desk.call(policy=Policy(timeout=Timeout(1, cancel_after=0)), body=body)
    if own < 1:
        assert (attempt.outcome, attempt.answered, desk.counts.failed) == ("TimeoutError", own, 1)
    elif own > 1:
        assert (attempt.outcome, attempt.answered, desk.counts.timed_out) == ("EXECUTION_TIMEOUT", 1.0, 1)
    else:
        assert attempt.outcome in ("TimeoutError", "EXECUTION_TIMEOUT")
        assert desk.counts.failed + desk.counts.timed_out == 1


async def test_an_inner_deadline_is_not_taken_for_ones_own(desk: Desk) -> None:
    """tao12345666333/ankaloop#47: an error of the guard that a body lets through keeps its code."""

    async def body(_: Attempt) -> object:
        inner = await desk.call("inner", Policy(timeout=1), seconds=5)
        assert inner.error is not None
        raise inner.error

    outer = await desk.call("outer", Policy(timeout=10), body)
    assert (outer.outcome, outer.answered) == ("EXECUTION_TIMEOUT", 1.0)
    assert isinstance(outer.error, ExecutionTimeout)
    assert outer.error.tool == "inner"
    tools = desk.guard.statistics().tools
    assert (tools["outer"].failed, tools["outer"].timed_out, tools["inner"].timed_out) == (1, 0, 1)


# ---------------------------------------------------------------------------- bodies that do not stop


async def test_a_body_that_swallows_its_cancellation_keeps_its_slot_and_its_caller_is_answered(
    desk: Desk,
) -> None:
    """python/cpython#111379: cancelling a task is a request, and the tool worked on."""

    async def stubborn(_: Attempt) -> object:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(5)
        return "too late"

    policy = Policy(concurrency=conc(1), timeout=Timeout(1, cancel_after=0))
    a = desk.call(policy=policy, body=stubborn)
    await at(2)
    assert (a.outcome, a.answered) == ("EXECUTION_TIMEOUT", 1.0)
    assert (await desk.call(policy=policy)).outcome == "CONCURRENCY_LIMIT"
    assert desk.guard.statistics().abandoned == 1
    await at(6.5)
    assert (await desk.call(policy=policy)).outcome == "ok"
    assert desk.counts.timed_out == 1
    assert desk.counts.completed == 1


@pytest.mark.parametrize(("cancel_after", "ends"), [(None, 4.0), (0, 1.0), (2, 3.0)])
@pytest.mark.parametrize("ending", ["returns", "raises", "is cancelled"])
async def test_what_a_late_body_ends_with_changes_nothing(
    desk: Desk, cancel_after: float | None, ends: float, ending: str
) -> None:
    """python/cpython#111379, tao12345666333/ankaloop#47: the first outcome is the one that is counted."""

    async def body(_: Attempt) -> object:
        try:
            await asyncio.sleep(4)
        except asyncio.CancelledError:
            if ending == "is cancelled":
                raise
        if ending == "raises":
            raise LookupError
        return "too late"

    policy = Policy(concurrency=conc(1), timeout=Timeout(1, cancel_after=cancel_after))
    attempt = await desk.call(policy=policy, body=body)
    assert (attempt.outcome, attempt.answered) == ("EXECUTION_TIMEOUT", 1.0)
    await desk.everybody()
    assert attempt.ended == ends
    counts = desk.counts
    assert (counts.timed_out, counts.completed, counts.failed, counts.cancelled) == (1, 0, 0, 0)


async def test_the_signal_is_aborted_at_the_deadline_with_the_very_error_of_the_answer(desk: Desk) -> None:
    """python/cpython#111379: who listens can stop where stopping is right."""
    reasons: list[object] = []

    async def body(attempt: Attempt) -> object:
        assert attempt.signal is not None
        reasons.append(await attempt.signal.wait())
        with pytest.raises(ExecutionTimeout):
            attempt.signal.throw_if_aborted()
        return now()

    attempt = await desk.call(policy=Policy(timeout=1), body=body, listens=True)
    await settle()
    assert reasons == [attempt.error]
    assert attempt.ended == 1.0


@pytest.mark.parametrize("cancel_after", [0, 2])
async def test_a_caller_that_goes_early_does_not_lengthen_the_work(desk: Desk, cancel_after: float) -> None:
    """knacklabs/gantry#328: the work went on without an end because nobody was there to be answered."""
    signal = AbortSignal()
    policy = Policy(concurrency=conc(1), timeout=Timeout(3, cancel_after=cancel_after), on_cancel="abort")
    attempt = desk.call(policy=policy, seconds=60, signal=signal)
    await at(1)
    signal.abort()
    await attempt
    assert (attempt.outcome, attempt.answered) == ("CANCELLED", 1.0)
    await desk.everybody()
    assert attempt.ended == 3 + cancel_after
    assert (desk.counts.cancelled, desk.counts.timed_out) == (1, 0)


def test_at_whatever_moment_around_the_deadline_the_result_comes_there_is_one_answer() -> None:
    """tao12345666333/ankaloop#47, fastapi/fastapi#14099: result and deadline in one turn of the loop."""

    async def scenario(loop: StepLoop) -> None:
        desk, gate, signal = Desk(), asyncio.Event(), AbortSignal()
        attempt = desk.call(policy=Policy(timeout=1), body=until(gate), signal=signal)
        await at(0.9)
        loop.strike = gate.set
        await attempt
        assert attempt.outcome in ("ok", "EXECUTION_TIMEOUT")
        gate.set()
        await desk.everybody()
        await settle()
        counts = desk.counts
        assert counts.completed + counts.timed_out == 1
        assert counts.completed == (attempt.outcome == "ok")
        desk.assert_clean()

    assert at_every_step(scenario) > 3


async def test_of_result_deadline_and_cancel_in_one_moment_the_result_counts(desk: Desk) -> None:
    """tao12345666333/ankaloop#47: in one turn of the loop: result, deadline, cancel."""
    policy = Policy(timeout=1, on_cancel="cancel")
    loop = asyncio.get_running_loop()
    for order in ("cancel first", "cancel last"):
        start, gate, signal = now(), asyncio.Event(), AbortSignal()
        if order == "cancel first":
            loop.call_at(start + 1, signal.abort)
        attempt = desk.call(policy=policy, body=until(gate), signal=signal)
        await settle()
        if order == "cancel last":
            loop.call_at(start + 1, signal.abort)
        await attempt
        assert (attempt.outcome, attempt.answered) == ("EXECUTION_TIMEOUT", start + 1)
        gate.set()
        await desk.everybody()


# --------------------------------------------------------------------------------- what the clock covers


@ERAS
async def test_validation_of_arguments_is_a_started_call(era: str) -> None:
    """SamSaffron/term-llm#686: it is charged and counted like any other failure of the tool."""
    server = FrontMCP("server")

    @server.tool(rate_limit="2/hour", concurrency=1)
    async def double(number: int) -> int:
        return 2 * number

    async with connected(server, era) as client:
        assert code_of(await client.call_tool("double", {"number": "not a number"})) == "error"
        assert code_of(await client.call_tool("double", {"number": 4})) == "ok"
        assert code_of(await client.call_tool("double", {"number": 4})) == "RATE_LIMIT_EXCEEDED"
    counts = server.guard.statistics().counts
    assert (counts.started, counts.failed, counts.completed) == (2, 1, 1)


async def test_deadlines_of_different_lengths_do_not_get_in_each_others_way(open_desk: OpenDesk) -> None:
    """mjpieters/aiolimiter#73: one timer for each length, however many there are."""
    desk = open_desk(Throttle(admission=None))
    lengths = [0.001 * number for number in range(1, 600)]
    for number, length in enumerate(lengths):
        desk.call(f"tool {length}", Policy(timeout=Timeout(length, cancel_after=0)), seconds=5)
        if number % 7 == 0:
            await asyncio.sleep(0.001)
    await desk.everybody()
    assert set(desk.outcomes()) == {"EXECUTION_TIMEOUT"}
    for attempt, length in zip(desk.attempts, lengths, strict=True):
        assert attempt.began is not None
        assert attempt.answered is not None
        assert attempt.answered - attempt.began == pytest.approx(length)


async def test_a_blocked_loop_is_no_reason_to_answer_twice(desk: Desk) -> None:
    """modelcontextprotocol/python-sdk#1646: an async body that blocks makes its own deadline late."""
    loop = asyncio.get_running_loop()

    async def blocks(_: Attempt) -> object:
        # What a blocking call does to the loop: much time passes in one turn.
        loop._now_ns += 5_000_000_000  # type: ignore[attr-defined]
        return "late"

    attempt = await desk.call(policy=Policy(concurrency=conc(1), timeout=1), body=blocks)
    assert (attempt.outcome, attempt.answered) == ("ok", 5.0)

    async def blocks_and_waits(_: Attempt) -> object:
        loop._now_ns += 5_000_000_000  # type: ignore[attr-defined]
        await asyncio.sleep(1)
        return "later"

    attempt = await desk.call(policy=Policy(concurrency=conc(1), timeout=1), body=blocks_and_waits)
    assert (attempt.outcome, attempt.answered) == ("EXECUTION_TIMEOUT", 10.0)
    await desk.everybody()
    assert desk.counts.timed_out == desk.counts.completed == 1


async def test_the_callers_own_timeout_is_the_callers(desk: Desk) -> None:
    """tao12345666333/ankaloop#47: a scope of the caller's that ends is a cancelled call, not a late one."""
    policy = Policy(timeout=5, concurrency=conc(1), on_cancel="cancel")
    with anyio.move_on_after(2) as scope:
        await desk.guard.run(Call("tool"), policy, lambda: asyncio.sleep(60))
    assert scope.cancelled_caught
    await settle()
    assert (desk.counts.cancelled, desk.counts.timed_out) == (1, 0)
    assert (await desk.call(policy=policy)).outcome == "ok"


# ------------------------------------------------------------------------------------ what goes with a call

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


@pytest.mark.parametrize("kind", ["inline", "own task", "thread"])
@pytest.mark.parametrize("queued", [False, True])
async def test_a_body_sees_the_context_of_its_caller_and_nobody_elses(
    desk: Desk, kind: str, queued: bool
) -> None:
    """modelcontextprotocol/python-sdk#1646: what goes on elsewhere still goes on for the same caller."""
    guard = desk.guard
    policy = Policy(concurrency=conc(1, wait=9), on_cancel="cancel" if kind == "inline" else "abort")
    plan = guard.bind("tool", policy, threads=kind == "thread")
    seen: list[str] = []

    def look() -> None:
        seen.append(WHO.get())

    async def body(run: Run) -> None:
        if kind == "thread":
            await guard.in_thread(run, look)
        else:
            look()

    async def caller(name: str) -> None:
        WHO.set(name)
        await guard.call(plan, Call("tool"), body, inline=kind == "inline")

    gate = asyncio.Event()
    if queued:
        holder = asyncio.create_task(guard.call(plan, Call("tool"), lambda _: gate.wait()))
        await settle()
    callers = [asyncio.create_task(caller(name)) for name in ("alice", "bob")]
    await settle()
    gate.set()
    await asyncio.gather(*callers, *([holder] if queued else []))
    assert seen == ["alice", "bob"]
    assert WHO.get() == "nobody"


@ERAS
async def test_a_call_within_a_call_has_a_deadline_of_its_own_and_its_parents(era: str) -> None:
    """SamSaffron/term-llm#686: whichever comes first, and each is told as what it is."""
    server = FrontMCP("server")

    @server.tool(timeout=Timeout(2, cancel_after=0))
    async def inner() -> str:
        await asyncio.sleep(60)
        return "never"

    @server.tool(timeout=Timeout(3, cancel_after=0))
    async def outer(ctx: ToolContext) -> str:
        first = await ctx.call_tool("inner")
        second = await ctx.call_tool("inner")
        return f"{text_of(first)}, {text_of(second)}"

    async with connected(server, era) as client:
        result = await client.call_tool("outer", {})
        assert (code_of(result), now()) == ("EXECUTION_TIMEOUT", 3.0)
        assert text_of(result) == 'Execution of "outer" timed out after 3000ms'
        # What it called is told, and cancelled when its own deadline says so.
        await at(4.001)
        assert server.guard.statistics().active == 0
    tools = server.guard.statistics().tools
    assert (tools["inner"].timed_out, tools["inner"].cancelled, tools["outer"].timed_out) == (1, 1, 1)
