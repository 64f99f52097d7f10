"""A batch: who starts when, who keeps a place and how long, and what becomes of each call."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import sys
import warnings
from typing import Any

import pytest

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.host import Batch, BatchHandle, Complete, Host, Run, Skip, State, ToolCall, ToolResult
from frontmcp_py.host.lanes import Lanes
from frontmcp_py.testing import settle
from tests.host.stage import Stage, assert_all_free, call, fan, operations_of, staged, statuses
from tests.host.stage import result as said

ONE = {"t": {"concurrency": 1}}
TWO = {"t": {"concurrency": 2}}
KEY = {"draft": {"concurrency": {"key": "documents"}}, "renumber": {"concurrency": {"key": "documents"}}}
FAN = {"t": {"concurrency": 1, "fan_out": True}}
STOP = {"t": {"concurrency": 1, "fan_out": {"on_error": "stop"}}}
STOP_TWO = {"t": {"concurrency": 2, "fan_out": {"on_error": "stop"}}}


# ------------------------------------------------------------------------------------- whose turn it is


@staged
async def test_calls_of_a_tool_with_limit_1_run_one_after_the_other_in_the_written_order() -> None:
    stage = Stage(ONE)
    await stage.run(call("t", "a", takes=1), call("t", "b", takes=3), call("t", "c", takes=2))
    assert stage.log == ["+a", "-a", "+b", "-b", "+c", "-c"]


@staged
async def test_each_end_at_limit_2_starts_exactly_one_more() -> None:
    stage = Stage(TWO)
    takes = [5, 1, 2, 1.5, 3]
    await stage.run(*[call("t", label, takes=each) for label, each in zip("abcde", takes, strict=True)])
    # b ends at 1, c at 3, d at 4.5, a at 5.
    assert stage.log == ["+a", "+b", "-b", "+c", "-c", "+d", "-d", "+e", "-a", "-e"]
    assert stage.peak == 2


@staged
async def test_tools_that_name_one_key_share_one_limit_in_the_written_order() -> None:
    stage = Stage(KEY)
    await stage.run(call("renumber", "a", takes=2), call("draft", "b", takes=1), call("renumber", "c"))
    assert stage.log == ["+a", "-a", "+b", "-b", "+c", "-c"]


@staged
async def test_a_key_equal_to_the_name_of_a_tool_joins_the_limit_of_that_tool() -> None:
    stage = Stage({"t": {"concurrency": 1}, "other": {"concurrency": {"key": "t"}}})
    await stage.run(call("other", "a", takes=1), call("t", "b", takes=1), call("other", "c", takes=1))
    assert stage.log == ["+a", "-a", "+b", "-b", "+c", "-c"]


@staged
async def test_keys_do_not_hold_each_other_up() -> None:
    stage = Stage({"t": {"concurrency": 1}, "u": {"concurrency": 1}})
    await stage.run(
        call("t", "t1", takes=2), call("t", "t2", takes=2), call("u", "u1", takes=3), call("u", "u2", takes=3)
    )
    assert stage.log == ["+t1", "+u1", "-t1", "+t2", "-u1", "+u2", "-t2", "-u2"]


@staged
async def test_calls_without_a_limit_start_together_even_behind_parked_ones() -> None:
    stage = Stage({"t": {"concurrency": 1}, "lifted": {"concurrency": {"key": "t2", "limit": 0}}})
    await stage.run(
        call("t", "a", takes=1),
        call("t", "b", takes=1),
        call("free", "c", takes=1),
        call("lifted", "d", takes=1),
        call("lifted", "e", takes=1),
    )
    assert stage.starts == ["a", "c", "d", "e", "b"]
    assert [stage.at[f"+{each}"] for each in "abcde"] == [0, 1, 0, 0, 0]


@staged
async def test_a_call_that_fails_releases_the_next_one_with_its_key() -> None:
    stage = Stage(ONE)
    results = await stage.run(call("t", "a", fails=True), call("t", "b"), call("t", "c", fails=True))
    assert statuses(results) == ["error", "ok", "error"]
    assert results[0].text == "t failed: ValueError: a is broken"


@staged
async def test_a_tool_that_cancels_its_own_task_fails_alone() -> None:
    async def tool(name: str, arguments: dict[str, Any]) -> str:
        if name == "quits":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        await asyncio.sleep(1)
        return "done"

    host = Host({"quits": {"concurrency": 1}, "t": {"concurrency": {"key": "quits"}}}, tool)
    other = host.start([ToolCall("d", "t")])
    results = await host.run([ToolCall("a", "quits"), ToolCall("b", "t"), ToolCall("c", "free")])
    assert statuses(results) == ["error", "ok", "ok"]
    assert results[0].text == "quits failed: its task was cancelled"
    assert statuses(await other.results()) == ["ok"]
    assert_all_free(host)


@staged
async def test_two_batches_of_one_host_share_its_limits_first_come_first_served() -> None:
    stage = Stage(ONE)
    first = stage.start(call("t", "a", takes=2), call("t", "b", takes=2))
    await asyncio.sleep(1)
    second = stage.start(call("t", "c", takes=2), call("free", "d"))
    assert statuses(await second.results()) == ["ok", "ok"]
    assert first.is_done
    assert stage.starts == ["a", "d", "b", "c"]
    assert [stage.at[f"+{each}"] for each in "bc"] == [2, 4]


@staged
async def test_hosts_share_nothing() -> None:
    stages = [Stage(ONE), Stage(ONE)]
    for stage in stages:
        stage.start(call("t", "a", takes=1))
    await asyncio.sleep(0.5)
    assert [stage.running for stage in stages] == [["a"], ["a"]]
    await asyncio.sleep(1)


@staged
async def test_a_call_released_by_the_end_of_one_of_another_batch_keeps_its_own_context() -> None:
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user")
    seen: list[tuple[str, str]] = []

    async def tool(name: str, arguments: dict[str, Any]) -> None:
        await asyncio.sleep(1)
        seen.append((arguments["as"], user.get()))

    def review(asked: ToolCall, result: ToolResult) -> None:
        seen.append((f"review of {asked.id}", user.get()))

    host = Host(ONE, tool, review=review)
    user.set("ann")
    first = host.start([call("t", "a"), call("t", "b")])
    user.set("bob")
    second = host.start([call("t", "c")])
    await first.results()
    await second.results()
    assert [each for each in seen if len(each[0]) == 1] == [("a", "ann"), ("b", "ann"), ("c", "bob")]
    assert dict(seen)["review of b"] == "ann"
    assert dict(seen)["review of c"] == "bob"


@staged
async def test_results_stand_in_the_written_order_and_not_in_that_of_their_ends() -> None:
    stage = Stage()
    results = await stage.run(call("t", "a", takes=3), call("t", "b", fails=True), call("t", "c", takes=1))
    assert [each.text for each in results] == ["a is done", "t failed: ValueError: b is broken", "c is done"]
    assert [each.id for each in results] == ["a", "b", "c"]


@staged
async def test_calls_with_one_id_are_told_apart_by_their_place() -> None:
    stage = Stage(ONE)
    calls = [ToolCall("x", "t", {"as": label, "takes": 1}) for label in "abc"]
    results = await stage.run(*calls)
    assert [each.text for each in results] == ["a is done", "b is done", "c is done"]


@staged
async def test_an_empty_batch_is_done_at_once() -> None:
    stage = Stage()
    assert await stage.run() == []
    assert stage.start().is_done


# ------------------------------------------------------------------------------ what counts as an execution


@staged
async def test_operations_and_separate_calls_count_against_one_limit_in_the_written_order() -> None:
    shared = {"key": "t", "limit": 2}
    stage = Stage({"t": {"concurrency": 2, "fan_out": True}, "other": {"concurrency": shared}})
    await stage.run(
        call("other", "a", takes=4.5),
        fan("t", "f", {"takes": 1}, {"takes": 1}, {"takes": 1}),
        call("t", "b", takes=1),
        call("other", "c", takes=1),
    )
    assert stage.starts == ["a", "f#0", "f#1", "f#2", "b", "c"]
    assert stage.peak == 2
    assert [stage.at[f"+{each}"] for each in ("f#1", "f#2", "b", "c")] == [1, 2, 3, 4]


@staged
async def test_operations_of_a_tool_without_a_limit_start_together() -> None:
    stage = Stage({"t": {"fan_out": True}})
    (result,) = await stage.run(fan("t", "f", {"takes": 3}, {"takes": 1}, {"takes": 2}))
    assert stage.starts == ["f#0", "f#1", "f#2"]
    assert stage.peak == 3
    assert result.text.splitlines()[::2] == ["[1/3] ok", "[2/3] ok", "[3/3] ok"]


@staged
async def test_a_call_of_one_operation_is_answered_as_a_plain_call() -> None:
    stage = Stage({"t": {"fan_out": True}, "u": {}})
    one, plain, broken = await stage.run(
        fan("t", "f", {"as": "a"}), call("u", "b", **{"as": "a"}), fan("t", "g", {"as": "a", "fails": True})
    )
    assert (one.content, one.status, one.operations) == (plain.content, plain.status, ())
    assert (one.id, broken.id) == ("f", "g")
    assert (broken.status, broken.text) == ("error", "t failed: ValueError: a is broken")


@staged
async def test_a_call_whose_operations_all_fail_is_an_error_and_with_one_success_it_is_not() -> None:
    stage = Stage({"t": {"fan_out": True}})
    none, some = await stage.run(
        fan("t", "f", {"fails": True}, {"fails": True}), fan("t", "g", {"fails": True}, {})
    )
    assert none.is_error
    assert not some.is_error
    assert operations_of(some) == ["error", "ok"]


@staged
async def test_an_operation_that_fails_does_not_stop_the_others_unless_that_is_configured() -> None:
    (result,) = await Stage(FAN).run(fan("t", "f", {}, {"fails": True}, {}))
    assert operations_of(result) == ["ok", "error", "ok"]


# -------------------------------------------------------------------------------------- stop at a failure


@staged
async def test_after_a_failed_operation_no_further_one_starts_and_later_calls_do() -> None:
    stage = Stage(STOP)
    folded, later = await stage.run(
        fan("t", "f", {"takes": 1}, {"takes": 1, "fails": True}, {"takes": 1}, {"takes": 1}),
        call("t", "later", takes=1),
    )
    assert stage.starts == ["f#0", "f#1", "later"]
    assert stage.at["+later"] == 2
    assert operations_of(folded) == ["ok", "error", "not_run", "not_run"]
    assert folded.text.splitlines()[-2:] == [
        "[3/4] not run (stopped after operation 2 failed)",
        "[4/4] not run (stopped after operation 2 failed)",
    ]
    assert later.status == "ok"


@staged
async def test_operations_that_run_when_one_fails_run_to_their_end() -> None:
    stage = Stage(STOP_TWO)
    (result,) = await stage.run(fan("t", "f", {"takes": 5}, {"takes": 1, "fails": True}, {"takes": 1}))
    assert stage.log == ["+f#0", "+f#1", "-f#1", "-f#0"]
    assert operations_of(result) == ["ok", "error", "not_run"]


@staged
async def test_of_two_failures_later_operations_name_the_one_that_stopped_them() -> None:
    (result,) = await Stage(STOP_TWO).run(
        fan("t", "f", {"takes": 2, "fails": True}, {"takes": 1, "fails": True}, {}, {})
    )
    assert operations_of(result) == ["error", "error", "not_run", "not_run"]
    assert [each.text for each in result.operations[2:]] == ["not run (stopped after operation 2 failed)"] * 2


@staged
async def test_one_call_that_stops_does_not_stop_another_of_the_same_tool() -> None:
    first, second = await Stage(STOP).run(fan("t", "f", {"fails": True}, {}), fan("t", "g", {}, {}))
    assert operations_of(first) == ["error", "not_run"]
    assert operations_of(second) == ["ok", "ok"]


@staged
async def test_there_is_no_moment_between_a_failure_and_the_stop_in_which_another_operation_slips_in() -> (
    None
):
    """Whoever hears of the failed one, at the earliest moment there is, finds nothing else running."""
    seen: list[tuple[str, State, tuple[str, ...]]] = []

    def on_state(asked: ToolCall, state: State) -> None:
        seen.append((asked.id, state, tuple(stage.starts)))

    stage = Stage(STOP, on_state=on_state, review=lambda asked, result: asyncio.sleep(1))
    (result,) = await stage.run(fan("t", "f", {"fails": True, "takes": 1}, {"takes": 1}, {"takes": 1}))
    assert operations_of(result) == ["error", "not_run", "not_run"]
    assert {starts for _, _, starts in seen} == {(), ("f#0",)}
    # They are settled by the failure, and do not wait for its review.
    assert [each[0] for each in seen if each[1] == "completed"] == ["f#1", "f#2", "f#0", "f"]


@staged
async def test_of_two_that_end_in_one_turn_a_failure_stops_who_got_the_place_of_the_other() -> None:
    """Operation 2 has the place of 1, and its tool is not called yet when the failure of 0 is known."""
    ends = [asyncio.Event(), asyncio.Event()]
    started: list[int] = []

    async def tool(name: str, arguments: dict[str, Any]) -> str:
        started.append(arguments["nth"])
        await ends[arguments["nth"]].wait()
        if arguments["nth"] == 0:
            raise ValueError("it is broken")
        return "done"

    host = Host(STOP_TWO, tool)
    handle = host.start([ToolCall("f", "t", {"ops": [{"nth": nth} for nth in range(5)]})])
    await settle()
    ends[1].set()
    ends[0].set()
    (result,) = await handle.results()
    assert operations_of(result) == ["error", "ok", "not_run", "not_run", "not_run"]
    assert result.operations[2].text == "not run (stopped after operation 1 failed)"
    await handle.ended()
    assert started == [0, 1]
    assert_all_free(host)


@staged
async def test_no_operation_starts_between_a_failure_and_its_being_heard_of() -> None:
    """Operation 2 gets the place of 1, and its turn comes right after the step in which 0 fails."""
    ends = [asyncio.Event(), asyncio.Event()]
    log: list[str] = []

    async def tool(name: str, arguments: dict[str, Any]) -> str:
        nth = arguments["nth"]
        log.append(f"+{nth}")
        if nth < 2:
            await ends[nth].wait()
        if nth == 1:
            asyncio.get_running_loop().call_soon(ends[0].set)
        log.append(f"-{nth}")
        if nth == 0:
            raise ValueError("it is broken")
        return "done"

    host = Host(STOP_TWO, tool)
    handle = host.start([ToolCall("f", "t", {"ops": [{"nth": nth} for nth in range(4)]})])
    await settle()
    ends[1].set()
    (result,) = await handle.results()
    await handle.ended()
    assert log == ["+0", "+1", "-1", "-0"]
    assert operations_of(result) == ["error", "ok", "not_run", "not_run"]


@staged
async def test_after_a_failure_at_once_no_further_operation_starts_whatever_the_limit() -> None:
    started: list[int] = []

    async def tool(name: str, arguments: dict[str, Any]) -> str:
        started.append(arguments["nth"])
        if arguments["nth"] == 1:
            raise ValueError("it is broken")
        return "done"

    host = Host(STOP_TWO, tool)
    (result,) = await host.run([ToolCall("f", "t", {"ops": [{"nth": nth} for nth in range(6)]})])
    assert operations_of(result) == ["ok", "error", *["not_run"] * 4]
    assert started == [0, 1]
    await settle()
    assert_all_free(host)


@staged
async def test_the_stop_heeds_what_the_tool_said_and_not_what_a_review_made_of_it() -> None:
    def better(asked: ToolCall, result: ToolResult) -> ToolResult:
        return said("", "ok", "all is well")

    def worse(asked: ToolCall, result: ToolResult) -> ToolResult:
        return said("", "error", "not good enough")

    (result,) = await Stage(STOP, review=better).run(fan("t", "f", {"fails": True}, {}))
    assert operations_of(result) == ["ok", "not_run"]
    (result,) = await Stage(STOP, review=worse).run(fan("t", "f", {}, {}))
    assert operations_of(result) == ["error", "error"]


@staged
async def test_an_operation_that_could_not_be_run_or_was_lost_stops_later_ones() -> None:
    async def lost(name: str, arguments: dict[str, Any]) -> object:
        raise ConnectionResetError

    async def unsent(name: str, arguments: dict[str, Any]) -> object:
        return said("", "not_run", "not run (there is nobody)")

    for function, status in ((lost, "unknown"), (unsent, "not_run")):
        (result,) = await Host(STOP, function).run([fan("t", "f", {}, {}, {})])
        assert operations_of(result) == [status, "not_run", "not_run"]
        assert result.operations[2].text == "not run (stopped after operation 1 failed)"


@staged
async def test_a_failure_that_is_known_before_anything_runs_stops_only_the_operations_after_it() -> None:
    def approve(asked: ToolCall) -> object:
        if asked.arguments["as"] == "f#2":
            return Complete(said("", "error", "there is no such file"))
        return True

    stage = Stage(STOP, approve=approve)
    (result,) = await stage.run(fan("t", "f", {"takes": 1}, {"takes": 1}, {}, {"takes": 1}))
    assert stage.starts == ["f#0", "f#1"]
    assert operations_of(result) == ["ok", "ok", "error", "not_run"]
    assert result.operations[3].text == "not run (stopped after operation 3 failed)"


@staged
async def test_an_operation_that_was_not_permitted_stops_nothing() -> None:
    stage = Stage(STOP, approve=lambda asked: asked.arguments["as"] != "f#0")
    (result,) = await stage.run(fan("t", "f", {}, {}))
    assert operations_of(result) == ["skipped", "ok"]


@staged
async def test_an_operation_whose_permission_could_not_be_asked_for_stops_later_ones() -> None:
    def approve(asked: ToolCall) -> bool:
        if asked.arguments["as"] == "f#1":
            raise OSError("no terminal")
        return True

    (result,) = await Stage(STOP, approve=approve).run(fan("t", "f", {}, {}, {}))
    assert operations_of(result) == ["ok", "error", "not_run"]
    assert "no terminal" in result.operations[1].text


# ------------------------------------------------------------------------------ what never gets that far


@staged
async def test_a_call_of_a_disabled_tool_is_refused_and_the_others_run() -> None:
    stage = Stage({"t": {"enabled": False, "concurrency": 1}, "u": {"concurrency": {"key": "t"}}})
    refused, ran = await stage.run(call("t", "a"), call("u", "b"))
    assert (refused.id, refused.status) == ("a", "error")
    assert refused.text == "t: this tool is disabled. Nothing was run."
    assert ran.status == "ok"
    assert stage.starts == ["b"]


@staged
async def test_a_call_that_cannot_be_read_is_answered_and_nobody_is_asked_about_it() -> None:
    asked: list[str] = []

    def approve(one: ToolCall) -> bool:
        asked.append(one.id)
        return True

    stage = Stage({"t": {"fan_out": True}}, approve=approve)
    results = await stage.run(
        ToolCall("a", "t", problem="the arguments are not JSON"),
        ToolCall("b", "t", {"ops": []}),
        ToolCall("c", "t", {"ops": [{"as": "x"}, 7]}),
        call("t", "d"),
    )
    assert statuses(results) == ["error", "error", "error", "ok"]
    assert "the arguments are not JSON" in results[0].text
    assert "ops[1]" in results[2].text
    assert asked == ["d"]
    assert stage.starts == ["d"]
    assert [stage.states[each] for each in "abc"] == [["completed"]] * 3


@pytest.mark.parametrize("batch", ["abc", {"id": "a"}, 5, None, [{"id": "a", "name": "t"}]])
@staged
async def test_a_batch_that_is_no_list_of_calls_is_refused(batch: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"a batch|calls\[0\]"):
        Stage().host.start(batch)


@staged
async def test_a_host_without_a_way_to_call_says_what_it_needs() -> None:
    with pytest.raises(TypeError, match="made without `call`"):
        Host().start([])
    with pytest.raises(TypeError, match="cannot be called"):
        Host(None, 5)  # type: ignore[arg-type]

    async def tool(name: str, arguments: dict[str, Any]) -> str:
        return name

    (result,) = await Host().run([ToolCall("a", "t")], call=tool)
    assert result.text == "t"


def test_a_host_without_an_event_loop_says_so_and_leaves_nothing_behind() -> None:
    async def tool(name: str, arguments: dict[str, Any]) -> str:
        return name

    host = Host(ONE, tool)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="no running event loop"):
            host.start([ToolCall("a", "t")])
        gc.collect()
    assert [str(each.message) for each in warned] == []
    (result,) = asyncio.run(host.run([ToolCall("a", "t")]))
    assert result.text == "t"


def test_whoever_is_told_of_changes_must_not_be_async_in_any_form() -> None:
    class Told:
        async def __call__(self, call: ToolCall, state: State) -> None: ...

    with pytest.raises(TypeError, match="plain function"):
        Host(None, on_state=Told())


@pytest.mark.parametrize("hook", [None, "approve", "review"])
def test_a_host_whose_loop_was_thrown_away_runs_on_the_next_one(hook: str | None) -> None:
    """What was held there will never be given back."""

    async def ask(*asked: object) -> bool:
        if len(stage.states) < 3:
            await asyncio.sleep(10)
        return True

    async def main() -> None:
        stage.start(call("t", "a", takes=0 if hook == "review" else 10), call("t", "b"))
        await settle()

    stage = Stage(ONE, **({} if hook is None else {hook: ask}))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    (result,) = asyncio.run(asyncio.wait_for(stage.run(call("t", "c")), 5))
    assert result.status == "ok"
    assert_all_free(stage.host)
    gc.collect()
    assert_all_free(stage.host)


def test_batches_of_a_host_run_on_one_loop_at_a_time() -> None:
    """Places and people are handed on within a loop."""
    stage = Stage(ONE)

    async def main() -> BatchHandle:
        handle = stage.start(call("t", "a", takes=0.01))
        await settle()
        return handle

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        handle = loop.run_until_complete(main())
        with pytest.raises(RuntimeError, match="another event loop"):
            asyncio.run(asyncio.wait_for(stage.run(call("t", "b")), 5))
        assert statuses(loop.run_until_complete(handle.results())) == ["ok"]
        # When they are done it may be another one.
        assert statuses(asyncio.run(stage.run(call("t", "c")))) == ["ok"]
    assert stage.starts == ["a", "c"]


# ------------------------------------------------------------------------------------------------- states


@staged
async def test_a_call_goes_through_its_states_in_order() -> None:
    stage = Stage(
        ONE,
        approve=lambda asked: True,
        question=lambda asked, request: "yes",
        review=lambda asked, result: None,
    )
    await stage.run(call("t", "a", asks="?", takes=1), call("t", "b"))
    way = ["queued", "awaiting-permission", "queued", "running", "awaiting-input", "running"]
    assert stage.states["a"] == [*way, "awaiting-review", "completed"]
    assert stage.states["b"] == [*way[:4], "awaiting-review", "completed"]


@pytest.mark.parametrize(
    ("decision", "states"),
    [
        (Skip("no"), ["queued", "awaiting-permission", "completed"]),
        (Complete("known"), ["queued", "awaiting-permission", "completed"]),
        (Run({"as": "x"}), ["queued", "awaiting-permission", "queued", "running", "completed"]),
    ],
)
@staged
async def test_what_does_not_run_is_never_shown_as_running(decision: object, states: list[State]) -> None:
    stage = Stage(ONE, approve=lambda asked: decision)
    await stage.run(call("t", "a"))
    assert stage.states["a"] == states


@staged
async def test_without_hooks_a_call_is_queued_running_and_completed() -> None:
    stage = Stage(ONE)
    await stage.run(call("t", "a"), call("u", "b", fails=True))
    assert stage.states == {"a": ["queued", "running", "completed"], "b": ["queued", "running", "completed"]}


@staged
async def test_a_call_of_several_operations_stands_where_it_most_needs_to_be_seen() -> None:
    stage = Stage(FAN, question=lambda asked, request: asyncio.sleep(1))
    handle = stage.start(fan("t", "f", {"takes": 2}, {"takes": 1, "asks": "?"}), call("t", "b"))
    await asyncio.sleep(1)
    assert handle.states == ("running", "queued")
    assert [(each.call.id, each.position, each.state) for each in handle.entries] == [
        ("f#0", 0, "running"),
        ("f#1", 0, "queued"),
        ("b", 1, "queued"),
    ]
    await asyncio.sleep(1.5)
    assert handle.states == ("awaiting-input", "queued")
    await handle.results()
    assert handle.states == ("completed", "completed")
    assert [each.result is not None for each in handle.entries] == [True] * 3


@staged
async def test_a_call_of_several_operations_is_told_of_when_its_state_changes_and_not_more_often() -> None:
    two = {"t": {"concurrency": 2, "fan_out": True}}
    stage = Stage(two, question=lambda asked, request: asyncio.sleep(1))
    await stage.run(fan("t", "f", {"takes": 2}, {"takes": 1, "asks": "?"}, {"takes": 3}))
    assert stage.states["f"] == ["queued", "running", "awaiting-input", "running", "completed"]
    one = Stage(FAN)
    await one.run(fan("t", "f", {"takes": 2}, {"takes": 1}))
    # Between its operations, nothing of it runs for a moment.
    assert one.states["f"] == ["queued", "running", "queued", "running", "completed"]


@staged
async def test_whoever_is_told_that_a_call_is_completed_finds_its_result() -> None:
    found: dict[str, list[str]] = {}

    def on_state(asked: ToolCall, state: State) -> None:
        if state == "completed":
            found[asked.id] = [each.id for each in handle.results_so_far()]

    stage = Stage(FAN, on_state=on_state)
    handle = stage.start(fan("t", "f", {}, {}), call("t", "b"))
    await handle.results()
    assert found == {"f#0": ["f#0"], "f#1": ["f"], "f": ["f"], "b": ["f", "b"]}


@staged
async def test_a_batch_goes_on_when_being_told_fails() -> None:
    def on_state(asked: ToolCall, state: State) -> None:
        raise ValueError(state)

    stage = Stage(FAN, on_state=on_state, approve=lambda asked: True)
    results = await stage.run(fan("t", "f", {}, {}), call("t", "b"))
    assert statuses(results) == ["ok", "ok"]


# --------------------------------------------------------------------------------------------- eager tasks

eagerly = pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks of Python 3.11 are not eager")


def make_eager() -> None:
    """From now on tasks of the loop take their first step when they are made."""
    if sys.version_info >= (3, 12):
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)


@eagerly
@staged
async def test_with_eager_tasks_a_call_that_asks_at_once_goes_through_its_states_in_order() -> None:
    make_eager()

    async def question(asked: ToolCall | None, request: object) -> str:
        await asyncio.sleep(1)
        return "yes"

    stage = Stage(ONE, question=question)
    handle = stage.start(call("t", "a", asks="?"), call("t", "b", asks="?"))
    await asyncio.sleep(0.5)
    assert handle.states == ("awaiting-input", "queued")
    assert statuses(await handle.results()) == ["ok", "ok"]
    for label in "ab":
        assert stage.states[label] == ["queued", "running", "awaiting-input", "running", "completed"]


@eagerly
@staged
async def test_with_eager_tasks_a_batch_that_is_cancelled_by_a_call_at_once_stops_that_call() -> None:
    make_eager()
    log: list[str] = []

    async def tool(name: str, arguments: dict[str, Any]) -> None:
        log.append(f"+{name}")
        handle.cancel()
        await asyncio.sleep(1)
        log.append(f"-{name}")

    host = Host({"u": {"concurrency": {"key": "t"}}, **ONE}, tool)
    handle = host.start([ToolCall("a", "t"), ToolCall("b", "u"), ToolCall("c", "v")])
    assert statuses(await handle.results()) == ["cancelled"] * 3
    await handle.ended()
    assert log == ["+t"]
    assert_all_free(host)


@eagerly
@staged
async def test_with_eager_tasks_no_operation_starts_after_a_failure() -> None:
    make_eager()
    stage = Stage(STOP_TWO)
    (result,) = await stage.run(fan("t", "f", {}, {"fails": True}, {}, {}))
    assert operations_of(result) == ["ok", "error", "not_run", "not_run"]
    assert stage.starts == ["f#0", "f#1"]


# ------------------------------------------------------------------------------------------------- waiting


@staged
async def test_a_batch_runs_whether_or_not_anybody_waits() -> None:
    stage = Stage(ONE)
    handle = stage.start(call("t", "a", takes=1), call("t", "b", takes=1))
    await asyncio.sleep(3)
    assert handle.is_done
    assert statuses(await handle.results()) == ["ok", "ok"]


@staged
async def test_giving_up_waiting_for_results_does_not_cancel_the_batch() -> None:
    stage = Stage(ONE)
    handle = stage.start(call("t", "a", takes=2))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handle.results(), 1)
    assert not handle.is_done
    assert statuses(await handle.results()) == ["ok"]


@staged
async def test_results_so_far_are_those_that_are_there_operations_included() -> None:
    stage = Stage(FAN)
    handle = stage.start(call("u", "a"), fan("t", "f", {"takes": 1}, {"takes": 5}), call("t", "b"))
    await asyncio.sleep(2)
    assert [each.id for each in handle.results_so_far()] == ["a", "f#0"]
    await handle.results()
    assert [each.id for each in handle.results_so_far()] == ["a", "f", "b"]


# ----------------------------------------------------------------------- batches started from within a call


def nesting(config: dict[str, Any]) -> Host:
    """A host whose tools take a second and then run the batch that stands in their argument `inner`."""

    async def tool(name: str, arguments: dict[str, Any]) -> object:
        await asyncio.sleep(1)
        inner = arguments.get("inner")
        return "ran" if inner is None else [each.text for each in await host.run(inner)]

    host = Host(config, tool)
    return host


@staged
async def test_a_nested_batch_that_would_wait_for_its_own_call_is_refused() -> None:
    host = nesting({**ONE, **KEY})
    inner = [ToolCall("b", "t"), ToolCall("c", "draft"), ToolCall("d", "free")]
    (result,) = await host.run([ToolCall("a", "t", {"inner": inner})])
    assert "t was not run: it would wait for itself (concurrency key 't')" in result.text
    assert result.text.count('"ran"') == 2


@staged
async def test_a_nested_batch_is_refused_for_any_call_that_it_was_started_from() -> None:
    host = nesting({"t": {"concurrency": 1}, "u": {"concurrency": 1}})
    deepest = [ToolCall("c", "t")]
    (result,) = await host.run([ToolCall("a", "t", {"inner": [ToolCall("b", "u", {"inner": deepest})]})])
    assert "it would wait for itself" in result.text


@staged
async def test_a_nested_batch_waits_for_a_place_that_somebody_else_has() -> None:
    host = nesting({"t": {"concurrency": 2}})
    results = await host.run([ToolCall("a", "t", {"inner": [ToolCall("b", "t")]}), ToolCall("c", "t")])
    assert all("ran" in each.text for each in results)


@staged
async def test_calls_whose_nested_batches_would_wait_for_each_other_do_not_wait_for_ever() -> None:
    """Both places are held by calls that need another one: the second to ask is refused, and all end."""
    host = nesting({"t": {"concurrency": 2}})
    results = await host.run([ToolCall(label, "t", {"inner": [ToolCall("n", "t")]}) for label in "ab"])
    assert statuses(results) == ["ok", "ok"]
    assert sorted("it would wait for itself" in each.text for each in results) == [False, True]


@staged
async def test_nested_batches_that_would_wait_crosswise_do_not_wait_for_ever() -> None:
    host = nesting({"t": {"concurrency": 1}, "u": {"concurrency": 1}})
    results = await host.run(
        [
            ToolCall("a", "t", {"inner": [ToolCall("n", "u")]}),
            ToolCall("b", "u", {"inner": [ToolCall("n", "t")]}),
        ]
    )
    assert statuses(results) == ["ok", "ok"]
    assert sorted("it would wait for itself" in each.text for each in results) == [False, True]


@staged
async def test_operations_that_would_wait_for_their_own_call_are_refused_once_if_they_stop() -> None:
    inner = [ToolCall("f", "t", {"ops": [{}, {}]})]
    told: list[ToolResult] = []

    async def tool(name: str, arguments: dict[str, Any]) -> object:
        told.extend(await host.run(inner))
        return None

    host = Host(STOP, tool)
    await host.run([ToolCall("a", "t")])
    assert operations_of(told[0]) == ["error", "not_run"]


@staged
async def test_a_batch_started_from_within_a_call_of_another_host_knows_nothing_of_that() -> None:
    inner = nesting(ONE)

    async def tool(name: str, arguments: dict[str, Any]) -> object:
        return [each.text for each in await inner.run([ToolCall("b", "t")])]

    (result,) = await Host(ONE, tool).run([ToolCall("a", "t")])
    assert '"ran"' in result.text


@staged
async def test_a_nested_batch_ends_with_the_call_that_started_it() -> None:
    ended: list[str] = []

    async def tool(name: str, arguments: dict[str, Any]) -> object:
        if name == "outer":
            return await host.run([ToolCall("b", "inner"), ToolCall("c", "inner")])
        try:
            await asyncio.sleep(100)
        finally:
            ended.append(name)
        return None

    host = Host({"inner": {"concurrency": 1}}, tool)
    handle = host.start([ToolCall("a", "outer")])
    await asyncio.sleep(1)
    handle.cancel()
    await handle.ended()
    assert ended == ["inner"]
    assert host.lanes.is_idle


@staged
async def test_whether_a_call_would_wait_for_itself_is_decided_with_few_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five levels of nested batches with five calls each: the ways through them are some 5 ** 5."""
    depth = width = 5
    looks: list[int] = []
    look, decide = Lanes._is_stuck, Lanes.is_stuck

    def counted(self: Lanes, *asked: Any) -> bool:
        looks[-1] += 1
        return look(self, *asked)

    def decided(self: Lanes, who: Any) -> bool:
        looks.append(0)
        return decide(self, who)

    monkeypatch.setattr(Lanes, "_is_stuck", counted)
    monkeypatch.setattr(Lanes, "is_stuck", decided)

    async def tool(name: str, arguments: dict[str, Any]) -> None:
        level = arguments["level"]
        if level == depth:
            await asyncio.sleep(5)
            return
        inner = [ToolCall("n", f"t{level + 1}", {"level": level + 1})]
        if level == 0:
            late = asyncio.create_task(asyncio.sleep(1))
            late.add_done_callback(lambda _: handles.append(host.start(inner)))
        await host.run(inner * width)

    handles: list[BatchHandle] = []
    host = Host({f"t{level}": {"concurrency": 1} for level in range(depth + 1)}, tool)
    handle = host.start([ToolCall("a", "t0", {"level": 0})])
    await asyncio.sleep(2)
    assert [len(each.entries) for each in handles] == [1]
    # The last to come has looked at all the others, and for each of them once at those beside it.
    assert width * depth <= max(looks) <= depth * width * (width + 2)
    handle.cancel()
    await handle.ended()
    handles[0].cancel()
    await handles[0].ended()


# -------------------------------------------------------------------------------------------- many of them


@pytest.mark.parametrize("count", [1, 2, 4, 64, 500])
@staged
async def test_n_calls_have_n_results(count: int) -> None:
    stage = Stage(ONE)
    results = await stage.run(*[call("t", str(index), takes=0.001) for index in range(count)])
    assert [each.text for each in results] == [f"{index} is done" for index in range(count)]
    assert stage.peak == 1


@staged
async def test_a_thousand_operations_run_in_order_within_their_limit() -> None:
    stage = Stage({"t": {"concurrency": 7, "fan_out": True}})
    (result,) = await stage.run(fan("t", "f", *[{"takes": 0.001}] * 1000))
    assert operations_of(result) == ["ok"] * 1000
    assert stage.starts == [f"f#{index}" for index in range(1000)]
    assert stage.peak == 7


@staged
async def test_one_operation_more_than_that_is_refused_and_nothing_runs() -> None:
    stage = Stage({"t": {"fan_out": True}})
    (result,) = await stage.run(fan("t", "f", *[{}] * 1001))
    assert result.text == "t: ops has 1001 operations; at most 1000 are allowed. Nothing was run."
    assert stage.starts == []


@staged
async def test_a_batch_that_is_handed_in_again_runs_again() -> None:
    stage = Stage(ONE)
    batch = Batch([call("t", "a")])
    first, second = await stage.host.run(batch), await stage.host.run(batch)
    assert first == second
    assert stage.starts == ["a", "a"]
