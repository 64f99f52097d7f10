"""A batch that is cancelled: every call has exactly one result, and nothing that waits ever runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from frontmcp_py.host import BatchHandle, Host, State, ToolCall, ToolResult
from frontmcp_py.testing import settle
from tests.cases.desk import StepLoop, at_every_step
from tests.host.stage import Stage, assert_all_free, call, fan, operations_of, staged, statuses

ONE = {"t": {"concurrency": 1}}
TWO = {"t": {"concurrency": 2, "fan_out": True}}
FAN = {"t": {"concurrency": 1, "fan_out": True}}
PARKED = "Cancelled before it ran."
STOPPED = "Cancelled while it ran, so part of it may have happened. Check before calling again."


async def sleeping(*asked: object) -> None:
    """A hook that takes its time."""
    await asyncio.sleep(10)


def texts(results: list[ToolResult]) -> list[str]:
    return [each.text for each in results]


# ---------------------------------------------------------------------------------------- in every state


@staged
async def test_calls_that_wait_never_run_and_each_is_told_so() -> None:
    stage = Stage(ONE)
    handle = stage.start(*[call("t", label, takes=5) for label in "abc"])
    await asyncio.sleep(1)
    handle.cancel()
    assert handle.is_done
    results = await handle.results()
    assert statuses(results) == ["cancelled"] * 3
    assert texts(results) == [STOPPED, PARKED, PARKED]
    await asyncio.sleep(100)
    assert stage.log == ["+a", "-a"]


@staged
async def test_results_that_are_there_are_kept() -> None:
    stage = Stage(ONE)
    handle = stage.start(call("t", "a", takes=1), call("t", "b", takes=5), call("u", "c", fails=True))
    await asyncio.sleep(2)
    handle.cancel()
    results = await handle.results()
    assert [(each.status, each.text) for each in results] == [
        ("ok", "a is done"),
        ("cancelled", STOPPED),
        ("error", "u failed: ValueError: c is broken"),
    ]


@staged
async def test_calls_that_await_permission_are_cancelled_with_whoever_is_asked() -> None:
    ended: list[str] = []

    async def approve(asked: ToolCall) -> bool:
        if asked.id == "b":
            try:
                await asyncio.sleep(10)
            finally:
                ended.append(asked.id)
        return True

    stage = Stage(ONE, approve=approve)
    handle = stage.start(*[call("t", label) for label in "abc"])
    await asyncio.sleep(1)
    handle.cancel("The user has pressed Escape.")
    results = await handle.results()
    assert texts(results) == [f"{PARKED} The user has pressed Escape."] * 3
    await settle()
    assert ended == ["b"]
    assert stage.starts == []
    assert stage.states["a"] == ["queued", "awaiting-permission", "queued", "completed"]
    assert stage.states["c"] == ["queued", "awaiting-permission", "completed"]


@staged
async def test_a_batch_that_is_cancelled_at_once_asks_and_runs_nothing() -> None:
    asked: list[ToolCall] = []
    stage = Stage(ONE, approve=asked.append)
    handle = stage.start(call("t", "a"), call("u", "b"))
    handle.cancel()
    assert texts(await handle.results()) == [PARKED] * 2
    await handle.ended()
    assert (asked, stage.log) == ([], [])


@staged
async def test_a_call_that_is_released_and_cancelled_in_one_turn_is_never_sent() -> None:
    """Cancelled between its release and the moment at which it would have been sent."""

    def on_state(asked: ToolCall, state: State) -> None:
        if (asked.id, state) == ("a", "running"):
            handle.cancel()

    stage = Stage(ONE, on_state=on_state)
    handle = stage.start(call("t", "a"), call("t", "b"), call("u", "c"))
    assert texts(await handle.results()) == [PARKED] * 3
    await handle.ended()
    assert stage.log == []


@staged
async def test_the_next_in_line_is_never_sent_if_the_batch_is_cancelled_while_it_is_released() -> None:
    def on_state(asked: ToolCall, state: State) -> None:
        if (asked.id, state) == ("b", "running"):
            handle.cancel()

    stage = Stage(ONE, on_state=on_state)
    handle = stage.start(*[call("t", label, takes=1) for label in "abc"])
    results = await handle.results()
    assert texts(results) == ["a is done", PARKED, PARKED]
    await handle.ended()
    assert stage.starts == ["a"]


@staged
async def test_a_call_that_asks_is_cancelled_with_its_question() -> None:
    ended: list[str] = []

    async def question(asked: ToolCall | None, request: object) -> None:
        try:
            await asyncio.sleep(10)
        finally:
            ended.append(str(request))

    stage = Stage(ONE, question=question)
    handle = stage.start(call("t", "a", asks="which?"), call("u", "b", asks="what?"))
    await asyncio.sleep(1)
    assert handle.states == ("awaiting-input", "awaiting-input")
    handle.cancel()
    assert texts(await handle.results()) == [STOPPED] * 2
    await settle()
    # The second was due, and is not asked any more.
    assert ended == ["which?"]


@staged
async def test_what_a_tool_has_done_is_not_told_before_it_was_reviewed() -> None:
    stage = Stage(ONE, review=sleeping)
    handle = stage.start(call("t", "a"), call("t", "b", fails=True), call("t", "c", takes=5))
    await asyncio.sleep(1)
    handle.cancel()
    withheld = "The tool has run. Its result is withheld, as the batch was cancelled before it was reviewed."
    results = await handle.results()
    assert [(each.status, each.text) for each in results] == [
        ("ok", withheld),
        ("error", withheld),
        ("cancelled", STOPPED),
    ]


@staged
async def test_operations_that_are_there_are_kept_and_the_call_folds_them() -> None:
    stage = Stage(TWO)
    handle = stage.start(fan("t", "f", {"takes": 1}, {"takes": 5}, {"takes": 5}, {"takes": 5}))
    await asyncio.sleep(2)
    handle.cancel()
    (result,) = await handle.results()
    assert operations_of(result) == ["ok", "cancelled", "cancelled", "cancelled"]
    assert texts(list(result.operations)) == ["f#0 is done", STOPPED, STOPPED, PARKED]
    assert not result.is_error
    assert stage.starts == ["f#0", "f#1", "f#2"]


@staged
async def test_operations_of_a_cancelled_call_end_and_no_other_starts() -> None:
    """Ten operations, two at once: cancelled at once, within the moment, and for good."""
    stage = Stage(TWO)
    handle = stage.start(fan("t", "f", *[{"takes": 1}] * 10))
    await asyncio.sleep(0.05)
    handle.cancel()
    (result,) = await handle.results()
    await handle.ended()
    assert asyncio.get_running_loop().time() == 0.05
    assert operations_of(result) == ["cancelled"] * 10
    assert result.status == "cancelled"
    assert stage.running == []
    await asyncio.sleep(100)
    assert stage.starts == ["f#0", "f#1"]


# ----------------------------------------------------------------------------------------- once and for all


@pytest.mark.parametrize("moment", [0, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 20])
@staged
async def test_whenever_it_is_cancelled_every_call_is_completed_once_and_places_are_free(
    moment: float,
) -> None:
    async def think(*asked: object) -> Any:
        await asyncio.sleep(1)
        return True

    stage = Stage(FAN, approve=think, review=think, question=think)
    handle = stage.start(
        call("t", "a", takes=1, asks="?"), fan("t", "f", {"takes": 1}, {"takes": 1}), call("u", "b", takes=3)
    )
    await asyncio.sleep(moment)
    handle.cancel()
    handle.cancel()
    results = await handle.results()
    assert [each.id for each in results] == ["a", "f", "b"]
    assert set(stage.states) <= {"a", "f", "f#0", "f#1", "b"}
    assert [each.count("completed") for each in stage.states.values()] == [1] * 5
    assert [each[-1] for each in stage.states.values()] == ["completed"] * 5
    starts = stage.starts
    assert statuses(await stage.run(call("t", "again"))) == ["ok"]
    assert stage.starts == [*starts, "again"]
    assert await handle.results() == results


@staged
async def test_cancelling_a_batch_that_is_done_changes_nothing() -> None:
    stage = Stage(ONE)
    handle = stage.start(call("t", "a"))
    before = await handle.results()
    handle.cancel()
    assert await handle.results() == before
    assert stage.states["a"] == ["queued", "running", "completed"]


@staged
async def test_the_first_reason_is_told_even_if_it_is_cancelled_again_meanwhile() -> None:
    def on_state(asked: ToolCall, state: State) -> None:
        if state == "completed":
            handle.cancel("Something else.")

    stage = Stage(ONE, on_state=on_state)
    handle = stage.start(*[call("t", label, takes=5) for label in "abc"])
    await asyncio.sleep(1)
    handle.cancel("The user has pressed Escape.")
    results = await handle.results()
    assert texts(results) == [f"{text} The user has pressed Escape." for text in (STOPPED, PARKED, PARKED)]


@staged
async def test_another_batch_goes_on_and_gets_the_places() -> None:
    stage = Stage(ONE)
    first = stage.start(*[call("t", label, takes=5) for label in "abc"])
    second = stage.start(*[call("t", label, takes=1) for label in "de"])
    await asyncio.sleep(1)
    first.cancel()
    assert statuses(await second.results()) == ["ok", "ok"]
    assert stage.starts == ["a", "d", "e"]
    assert stage.at["+d"] == 1


def test_at_every_step_of_the_loop_a_batch_may_be_cancelled() -> None:
    """Between any two things that happen, and another batch always goes on to its end."""

    async def scenario(loop: StepLoop) -> None:
        async def think(*asked: object) -> Any:
            await asyncio.sleep(1)
            return True

        stage = Stage(FAN, approve=think, review=think, question=think)
        handle = stage.start(
            call("t", "a", asks="?"),
            fan("t", "f", {"takes": 1}, {"fails": True, "stubborn": 1}),
            call("u", "b"),
        )
        starts: list[str] = []

        def strike() -> None:
            starts.extend(stage.starts)
            handle.cancel()

        loop.strike = strike
        other = stage.start(call("t", "c", takes=1))
        results = await handle.results()
        assert statuses(await other.results()) == ["ok"]
        await handle.ended()
        await settle()
        assert [each.id for each in results] == ["a", "f", "b"]
        assert len(results[1].operations) == 2
        for label, states in stage.states.items():
            assert states.count("completed") == 1, label
            assert states[-1] == "completed", label
        if loop.struck:
            assert [each for each in stage.starts if each not in starts] in ([], ["c"])
            assert {"a", "f", "f#0", "f#1", "b"} <= stage.states.keys()
        assert_all_free(stage.host)

    assert at_every_step(scenario) > 50


# ------------------------------------------------------------------------- in the turn in which a call ends


def ending(config: Any = None, *, fails: bool = False, **hooks: Any) -> tuple[Host, list[BatchHandle]]:
    """A host whose tools cancel the batch in the turn of the loop in which they end, before anybody knows."""
    handles: list[BatchHandle] = []

    async def tool(name: str, arguments: dict[str, Any]) -> str:
        await asyncio.sleep(1)
        asyncio.get_running_loop().call_soon(handles[0].cancel)
        if fails:
            raise ValueError("it is broken")
        return "written"

    return Host(config, tool, **hooks), handles


@pytest.mark.parametrize(
    ("fails", "status", "text"),
    [(False, "ok", "written"), (True, "error", "t failed: ValueError: it is broken")],
)
@staged
async def test_a_call_that_has_ended_in_the_turn_of_the_cancellation_keeps_its_result(
    fails: bool, status: str, text: str
) -> None:
    host, handles = ending(ONE, fails=fails)
    handles.append(host.start([ToolCall("a", "t"), ToolCall("b", "t")]))
    first, second = await handles[0].results()
    await handles[0].ended()
    assert (first.status, first.text) == (status, text)
    # Its place goes to nobody of the batch.
    assert (second.status, second.text) == ("cancelled", PARKED)
    assert_all_free(host)


@staged
async def test_what_a_call_has_said_in_the_turn_of_the_cancellation_is_not_told_unreviewed() -> None:
    asked: list[str] = []
    host, handles = ending(review=lambda one, result: asked.append(one.id))
    handles.append(host.start([ToolCall("a", "t")]))
    (result,) = await handles[0].results()
    await handles[0].ended()
    assert (result.status, asked) == ("ok", [])
    assert result.text.startswith("The tool has run. Its result is withheld, as the batch was cancelled")


@staged
async def test_a_review_that_has_answered_in_the_turn_of_the_cancellation_counts() -> None:
    async def review(one: ToolCall, result: ToolResult) -> str:
        await asyncio.sleep(1)
        asyncio.get_running_loop().call_soon(handle.cancel)
        return "seen"

    stage = Stage(ONE, review=review)
    handle = stage.start(call("t", "a"), call("u", "b", takes=10))
    first, second = await handle.results()
    assert (first.status, first.text) == ("ok", "seen")
    assert (second.status, second.text) == ("cancelled", STOPPED)


# ----------------------------------------------------------------------------- those that do not stop at once


@staged
async def test_a_function_that_ignores_its_cancellation_has_its_result_and_holds_its_place() -> None:
    stage = Stage(ONE)
    handle = stage.start(call("t", "a", takes=10, stubborn=5), call("t", "b"))
    await asyncio.sleep(1)
    handle.cancel()
    assert texts(await handle.results()) == [STOPPED, PARKED]
    assert statuses(await stage.run(call("t", "c"))) == ["ok"]
    assert stage.log == ["+a", "-a", "+c", "-c"]
    assert stage.at["+c"] == 6
    # What it said at last is nobody's result.
    assert texts(await handle.results()) == [STOPPED, PARKED]


@staged
async def test_ended_waits_for_a_function_that_does_not_stop_but_not_for_ever() -> None:
    stage = Stage(ONE)
    handle = stage.start(call("t", "a", takes=10, stubborn=5))
    await asyncio.sleep(1)
    handle.cancel()
    await handle.ended(within=2)
    assert (asyncio.get_running_loop().time(), stage.running) == (3, ["a"])
    await handle.ended()
    assert (asyncio.get_running_loop().time(), stage.running) == (6, [])


@staged
async def test_a_function_that_ignores_its_cancellation_asks_nobody_any_more() -> None:
    asked: list[object] = []
    refused: list[BaseException] = []

    async def tool(name: str, arguments: dict[str, Any]) -> object:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            try:
                await host.ask("may I go on?")
            except Exception as error:
                refused.append(error)
        return "done"

    host = Host(ONE, tool, question=lambda one, request: asked.append(request))
    handle = host.start([ToolCall("a", "t")])
    await asyncio.sleep(1)
    handle.cancel()
    await handle.ended()
    assert asked == []
    assert len(refused) == 1


@staged
async def test_a_question_is_withdrawn_with_its_call_even_if_the_function_goes_on() -> None:
    """People are free for the next thing at once, and need not wait until the function has ended."""

    async def tool(name: str, arguments: dict[str, Any]) -> object:
        if name == "other":
            return await host.ask("other")
        asking = asyncio.create_task(host.ask("first"))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            return await asyncio.gather(asking, return_exceptions=True)

    async def question(one: ToolCall | None, request: object) -> str:
        asked.append((request, asyncio.get_running_loop().time()))
        await asyncio.sleep(10)
        return "yes"

    asked: list[tuple[object, float]] = []
    host = Host(None, tool, question=question)
    handle = host.start([ToolCall("a", "t")])
    await asyncio.sleep(1)
    other = host.start([ToolCall("b", "other")])
    handle.cancel()
    await handle.ended()
    assert asyncio.get_running_loop().time() == 1
    assert texts(await other.results()) == ["yes"]
    assert asked == [("first", 0), ("other", 1)]


@pytest.mark.parametrize("hook", ["approve", "question", "review"])
@staged
async def test_a_hook_that_ignores_its_cancellation_keeps_people_busy_and_decides_nothing(hook: str) -> None:
    asked: list[str] = []

    async def stubborn(one: ToolCall, *more: object) -> object:
        asked.append(one.id)
        if one.id == "a":
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                await asyncio.sleep(5)
        return True

    stage = Stage(ONE, **{hook: stubborn})
    asks = {"asks": "?"} if hook == "question" else {}
    handle = stage.start(call("t", "a", **asks), call("t", "c", **asks))
    await asyncio.sleep(1)
    handle.cancel()
    before = await handle.results()
    later = stage.start(call("t", "b", **asks))
    await later.results()
    assert asyncio.get_running_loop().time() == 6
    assert asked == ["a", "b"]
    assert await handle.results() == before
    assert stage.starts == {"approve": ["b"], "question": ["a", "b"], "review": ["a", "c", "b"]}[hook]


@staged
async def test_a_function_that_fails_when_it_is_cancelled_is_cancelled() -> None:
    async def tool(name: str, arguments: dict[str, Any]) -> object:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            raise OSError("while cleaning up") from None
        return None

    reviewed: list[str] = []
    host = Host(ONE, tool, review=lambda asked, result: reviewed.append(asked.id))
    handle = host.start([ToolCall("a", "t"), ToolCall("b", "t")])
    await asyncio.sleep(1)
    handle.cancel()
    await handle.ended()
    assert texts(await handle.results()) == [STOPPED, PARKED]
    assert reviewed == []


# ------------------------------------------------------------------------------------- cancelled from outside


@staged
async def test_if_the_caller_of_run_is_cancelled_so_is_the_batch() -> None:
    stage = Stage(ONE)
    task = asyncio.create_task(stage.run(call("t", "a", takes=10), call("t", "b")))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stage.log == ["+a", "-a"]
    assert [stage.states[each][-1] for each in "ab"] == ["completed", "completed"]


@staged
async def test_a_caller_of_run_that_is_cancelled_waits_for_running_calls_but_not_for_long() -> None:
    stage = Stage(ONE)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await stage.run(call("t", "a", takes=10, stubborn=60))
    assert asyncio.get_running_loop().time() == 2
    assert stage.running == ["a"]
    await asyncio.sleep(60)


@pytest.mark.parametrize("hook", [None, "approve", "review", "question"])
def test_a_loop_that_is_closed_ends_a_batch_that_nobody_waits_for(hook: str | None) -> None:
    """Every task of it is cancelled from outside, whatever it is at."""
    handles: list[BatchHandle] = []
    stages: list[Stage] = []

    async def main() -> None:
        stage = Stage(ONE, **({hook: sleeping} if hook else {}))
        asks = {"asks": "?"} if hook == "question" else {}
        stages.append(stage)
        handles.append(
            stage.start(call("t", "a", takes=0 if hook == "review" else 5, **asks), call("t", "b"))
        )
        await settle()

    asyncio.run(main())
    assert handles[0].is_done
    first, second = handles[0].results_so_far()
    assert first.status == ("ok" if hook == "review" else "cancelled")
    assert (first.text == PARKED) == (hook == "approve")
    assert second.id == "b"
    assert stages[0].running == []
    assert_all_free(stages[0].host)
    stages[0].host.approve = stages[0].host.review = None
    (again,) = asyncio.run(stages[0].run(call("t", "again")))
    assert again.status == "ok"


def test_when_a_loop_ends_no_call_that_waits_begins_of_any_batch() -> None:
    """Whoever begins then would be torn down half done."""
    handles: list[BatchHandle] = []
    stages: list[Stage] = []

    async def main() -> None:
        stage = Stage(ONE)
        stages.append(stage)
        handles.append(stage.start(*[call("t", label, takes=5) for label in "abc"]))
        handles.append(stage.start(*[call("t", label, takes=5) for label in "de"]))
        await settle()

    asyncio.run(main())
    assert stages[0].starts == ["a"]
    assert [texts(each.results_so_far()) for each in handles] == [[STOPPED, PARKED, PARKED], [PARKED, PARKED]]
    assert all(each.is_done for each in handles)
    assert_all_free(stages[0].host)


def tidying(log: list[str]) -> BatchHandle:
    """A batch whose loop ends while it runs. `tidy` cleans up in a task of its own, which nobody cancels."""
    handles: list[BatchHandle] = []

    async def tool(name: str, arguments: dict[str, Any]) -> None:
        log.append(f"+{name}")
        try:
            await asyncio.sleep(5)
        finally:
            if name == "tidy":
                await asyncio.create_task(asyncio.sleep(0.01))
            log.append(f"-{name}")

    async def main() -> None:
        host = Host(ONE, tool)
        handles.append(host.start([ToolCall(name, name) for name in ("tidy", "t", "t")]))
        await settle()

    asyncio.run(main())
    return handles[0]


def test_when_a_loop_ends_no_call_begins_even_if_another_takes_its_time_to_clean_up() -> None:
    log: list[str] = []
    handle = tidying(log)
    assert [each for each in log if each != "-tidy"] == ["+tidy", "+t", "-t"]
    assert texts(handle.results_so_far()) == [STOPPED, STOPPED, PARKED]


def test_when_a_loop_ends_whoever_cleans_up_is_not_interrupted() -> None:
    log: list[str] = []
    tidying(log)
    assert log[-1] == "-tidy"


@staged
async def test_whoever_cancels_the_task_of_one_call_cancels_no_other() -> None:
    """A button for one call, say, or another task of the tool."""
    tasks: dict[str, asyncio.Task[Any] | None] = {}

    async def tool(name: str, arguments: dict[str, Any]) -> str:
        tasks[name] = asyncio.current_task()
        await asyncio.sleep(5)
        return "done"

    host = Host({"t": {"concurrency": 1}, "u": {"concurrency": {"key": "t"}}}, tool)
    other = host.start([ToolCall("d", "v")])
    handle = host.start([ToolCall("a", "t"), ToolCall("b", "u"), ToolCall("c", "w")])
    await settle()
    task = tasks["t"]
    assert task is not None
    task.cancel()
    results = await handle.results()
    assert results[0].status in ("error", "cancelled")
    assert texts(results[1:]) == ["done", "done"]
    assert texts(await other.results()) == ["done"]
    assert_all_free(host)


def test_when_a_loop_ends_nobody_is_asked_for_another_review() -> None:
    asked: list[str] = []
    handles: list[BatchHandle] = []
    stages: list[Stage] = []

    async def review(one: ToolCall, result: ToolResult) -> None:
        asked.append(one.id)
        await asyncio.sleep(10)

    async def main() -> None:
        stage = Stage(ONE, review=review)
        stages.append(stage)
        # a is reviewed, b is to be; c runs, and d waits.
        handles.append(
            stage.start(call("t", "a"), call("t", "b"), call("t", "c", takes=5), call("t", "d", takes=0))
        )
        await settle()

    asyncio.run(main())
    assert (asked, stages[0].starts) == (["a"], ["a", "b", "c"])
    results = handles[0].results_so_far()
    assert statuses(results) == ["ok", "ok", "cancelled", "cancelled"]
    assert "withheld" in results[1].text
    assert texts(results)[2:] == [STOPPED, PARKED]
    assert_all_free(stages[0].host)


@staged
async def test_a_batch_may_be_cancelled_by_one_of_its_own_functions() -> None:
    async def tool(name: str, arguments: dict[str, Any]) -> object:
        stage_log.append(name)
        if name == "stop":
            handle.cancel()
        await asyncio.sleep(1)
        return None

    stage_log: list[str] = []
    host = Host({"u": {"concurrency": {"key": "stop"}}, "stop": {"concurrency": 1}}, tool)
    handle = host.start([ToolCall("a", "stop"), ToolCall("b", "u")])
    results = await handle.results()
    assert texts(results) == [STOPPED, PARKED]
    await handle.ended()
    assert stage_log == ["stop"]


@pytest.mark.parametrize("when", ["queued", "awaiting-permission", "running", "awaiting-review", "completed"])
@staged
async def test_whoever_is_told_of_a_change_may_cancel_the_batch(when: State) -> None:
    """At the earliest moment at which anybody can know of it."""

    def on_state(asked: ToolCall, state: State) -> None:
        told.append((asked.id, state))
        if (asked.id, state) == ("a", when):
            handle.cancel()

    told: list[tuple[str, State]] = []
    hooks: dict[str, Callable[..., object]] = {
        "approve": lambda asked: True,
        "review": lambda asked, result: None,
    }
    stage = Stage(FAN, on_state=on_state, **hooks)
    handle = stage.start(call("t", "a"), fan("t", "f", {}, {}), call("u", "b", takes=1))
    results = await handle.results()
    await handle.ended()
    assert len(results) == 3
    completed = [each for each, state in told if state == "completed"]
    assert sorted(completed) == ["a", "b", "f", "f#0", "f#1"]
    assert told[-1] == (completed[-1], "completed")
    if when in ("queued", "awaiting-permission", "running"):
        assert stage.starts == []
