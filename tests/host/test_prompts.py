"""People are asked one thing at a time, in the written order; what they decide is what happens."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from mcp_types import CallToolResult, ImageContent, TextContent

from frontmcp_py.host import BatchHandle, Complete, Host, Run, Skip, State, ToolCall, ToolResult
from frontmcp_py.testing import settle
from tests.host.stage import Stage, call, fan, operations_of, staged, statuses
from tests.host.stage import result as said

ONE = {"t": {"concurrency": 1}}
FAN = {"t": {"concurrency": 1, "fan_out": True}}


class Desk(Stage):
    """A stage at which people answer after `takes` seconds. The log says when they are asked and done."""

    def __init__(
        self, config: Any = None, *, approve: bool = False, review: bool = False, takes: float = 1
    ) -> None:
        self.takes = takes
        self.asked: list[str] = []
        self.busy = False
        super().__init__(
            config,
            question=self.question,
            **({"approve": self.approve} if approve else {}),
            **({"review": self.review} if review else {}),
        )

    async def approve(self, asked: ToolCall) -> bool:
        await self._think("may", asked)
        return True

    async def question(self, asked: ToolCall | None, request: object) -> object:
        assert asked is not None
        await self._think("which", asked)
        return "this"

    async def review(self, asked: ToolCall, result: ToolResult) -> None:
        await self._think("good", asked)

    async def _think(self, what: str, asked: ToolCall) -> None:
        if self.busy:
            self.faults.append(f"people are asked two things at once: {what} {asked.id}")
        self.busy = True
        self.asked.append(f"{what} {asked.id}")
        self.note(f"?{what} {asked.id}")
        try:
            await asyncio.sleep(self.takes)
        finally:
            self.busy = False


# ------------------------------------------------------------------------------------------------ the order


@staged
async def test_everything_is_approved_in_the_written_order_before_anything_runs() -> None:
    desk = Desk(ONE | {"f": {"fan_out": True}}, approve=True)
    await desk.run(call("free", "a"), fan("f", "b", {}, {}), call("t", "c"), call("free", "d"))
    asked = ["may a", "may b#0", "may b#1", "may c", "may d"]
    assert desk.asked == asked
    assert desk.log[: len(asked)] == [f"?{each}" for each in asked]
    assert desk.starts == ["a", "b#0", "b#1", "c", "d"]
    assert {desk.at[f"+{each}"] for each in desk.starts} == {5}


@staged
async def test_while_one_is_asked_about_all_await_permission() -> None:
    desk = Desk(ONE, approve=True)
    handle = desk.start(call("free", "a"), call("t", "b"), ToolCall("c", "t", problem="it is broken"))
    await asyncio.sleep(0.5)
    assert handle.states == ("awaiting-permission", "awaiting-permission", "completed")
    await asyncio.sleep(1)
    assert handle.states == ("queued", "awaiting-permission", "completed")
    await handle.results()


@staged
async def test_a_call_that_waits_for_permission_does_not_hold_up_another_batch_that_needs_none() -> None:
    desk = Desk(ONE, approve=True, takes=10)
    handle = desk.start(call("t", "a"))
    await asyncio.sleep(1)
    desk.host.approve = None
    assert statuses(await desk.run(call("t", "b"))) == ["ok"]
    await handle.results()
    assert desk.starts == ["b", "a"]


@staged
async def test_all_of_a_batch_is_approved_before_people_are_asked_about_a_later_one() -> None:
    desk = Desk(ONE, approve=True)
    first = desk.start(call("t", "a0"), call("t", "a1"), call("t", "a2"))
    second = desk.start(call("t", "b0"), call("t", "b1"))
    await first.results()
    await second.results()
    assert desk.asked == ["may a0", "may a1", "may a2", "may b0", "may b1"]


@staged
async def test_of_what_is_due_the_first_in_the_written_order_comes_first() -> None:
    """Whatever kind it is. People are busy with b's question, while d, c and a end, in that order."""
    desk = Desk(review=True, takes=5)
    await desk.run(
        call("t", "a", takes=3),
        call("t", "b", takes=2, asks="?"),
        call("t", "c", takes=2.5),
        call("t", "d", takes=1),
    )
    assert desk.asked == ["which b", "good a", "good b", "good c", "good d"]
    assert desk.at["?good a"] == 5


@staged
async def test_what_becomes_due_in_one_moment_is_asked_in_the_written_order() -> None:
    desk = Desk(review=True)
    await desk.run(*[call("t", label, takes=1) for label in "abc"], call("t", "d", takes=1, asks="?"))
    assert desk.asked == ["which d", "good a", "good b", "good c", "good d"]


@staged
async def test_a_later_review_does_not_wait_for_an_earlier_call_that_still_runs() -> None:
    desk = Desk(review=True)
    results = await desk.run(call("t", "a", takes=10), call("t", "b", takes=1))
    assert desk.at["?good b"] == 1
    assert desk.at["?good a"] == 10
    assert statuses(results) == ["ok", "ok"]


@staged
async def test_people_who_have_not_decided_yet_are_not_interrupted_by_an_earlier_call() -> None:
    desk = Desk(review=True, takes=5)
    await desk.run(call("t", "a", takes=2), call("t", "b", takes=1))
    assert [desk.at[f"?good {each}"] for each in "ba"] == [1, 6]


# --------------------------------------------------------------------------------- what keeps a place


@staged
async def test_a_call_that_asks_keeps_its_place_and_its_answer_starts_nobody_else() -> None:
    desk = Desk(ONE)
    handle = desk.start(call("t", "a", asks="?", takes=1), call("t", "b"), call("free", "c"))
    await asyncio.sleep(0.5)
    assert handle.states == ("awaiting-input", "queued", "completed")
    await asyncio.sleep(1)
    assert handle.states == ("running", "queued", "completed")
    await handle.results()
    order = ["+a", "+c", "-c", "?which a", "a is answered this", "-a", "+b", "-b"]
    assert desk.log == order
    assert desk.at["+b"] == 2


@staged
async def test_a_review_holds_no_place() -> None:
    desk = Desk(ONE, review=True)
    handle = desk.start(call("t", "a"), call("t", "b", takes=5))
    await asyncio.sleep(0.5)
    assert handle.states == ("awaiting-review", "running")
    assert desk.at["+b"] == 0
    await handle.results()


@pytest.mark.parametrize("decision", [Skip(), Complete("known"), False])
@staged
async def test_a_call_that_does_not_run_holds_no_place(decision: object) -> None:
    stage = Stage(ONE, approve=lambda asked: decision if asked.id == "a" else True)
    results = await stage.run(call("t", "a"), call("t", "b", takes=1), call("t", "c", takes=1))
    assert stage.starts == ["b", "c"]
    assert [stage.at[f"+{each}"] for each in "bc"] == [0, 1]
    assert statuses(results[1:]) == ["ok", "ok"]


@staged
async def test_operations_that_are_not_permitted_leave_the_others_to_run() -> None:
    stage = Stage(FAN, approve=lambda asked: asked.id != "f#1")
    (result,) = await stage.run(fan("t", "f", {}, {}, {}))
    assert operations_of(result) == ["ok", "skipped", "ok"]
    assert stage.starts == ["f#0", "f#2"]
    assert not result.is_error


# ------------------------------------------------------------------------------------ permission, answers


@staged
async def test_a_call_may_run_with_other_arguments_than_the_model_wrote() -> None:
    stage = Stage(FAN, approve=lambda asked: Run({"as": "x", "dry": True}) if "1" in asked.id else Run())
    result, plain = await stage.run(fan("t", "f", {}, {}), call("u", "a1"))
    assert [each.text for each in result.operations] == ["f#0 is done", "x is done"]
    assert stage.arguments["x"] == {"as": "x", "dry": True}
    assert (plain.id, plain.text) == ("a1", "x is done")


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (False, "Not permitted. It has not run."),
        (Skip(), "Not permitted. It has not run."),
        (Skip("Use the other one."), "Not permitted. It has not run. Use the other one."),
    ],
)
@staged
async def test_a_call_that_is_not_permitted_is_answered_with_that(decision: object, text: str) -> None:
    stage = Stage(approve=lambda asked: decision)
    (result,) = await stage.run(call("t", "a"))
    assert (result.status, result.text, result.is_error) == ("skipped", text, True)
    assert stage.starts == []


@pytest.mark.parametrize(
    ("result", "status", "text"),
    [
        ("known", "ok", "known"),
        ({"n": 1}, "ok", '{\n  "n": 1\n}'),
        (CallToolResult(content=[TextContent(text="no")], is_error=True), "error", "no"),
        (said("other", "skipped", "later"), "skipped", "later"),
    ],
)
@staged
async def test_a_call_may_be_completed_with_a_result_in_any_form(
    result: object, status: str, text: str
) -> None:
    stage = Stage(approve=lambda asked: Complete(result), review=lambda asked, told: "never asked")
    (told,) = await stage.run(call("t", "a"))
    assert (told.id, told.name, told.status, told.text) == ("a", "t", status, text)
    assert stage.starts == []


@pytest.mark.parametrize("answer", [None, "yes", 1, Run, Run(5), {}])  # type: ignore[arg-type]
@staged
async def test_an_approval_that_is_no_decision_refuses_the_call(answer: object) -> None:
    stage = Stage(approve=lambda asked: answer if asked.id == "a" else True)
    refused, ran = await stage.run(call("t", "a"), call("t", "b"))
    assert refused.status == "error"
    assert refused.text.startswith(
        "t was not run, as asking for permission failed: TypeError: approve answered"
    )
    assert ran.status == "ok"


@staged
async def test_an_approval_that_fails_refuses_that_call_alone() -> None:
    async def approve(asked: ToolCall) -> bool:
        await asyncio.sleep(1)
        if asked.id == "a":
            raise OSError("no terminal")
        if asked.id == "b":
            raise asyncio.CancelledError
        return True

    stage = Stage(ONE, approve=approve)
    results = await stage.run(call("t", "a"), call("t", "b"), call("t", "c"))
    assert statuses(results) == ["error", "error", "ok"]
    assert "no terminal" in results[0].text
    assert stage.starts == ["c"]


# ------------------------------------------------------------------------------------------------- reviews


@pytest.mark.parametrize("answer", [None, True])
@staged
async def test_a_review_may_leave_a_result_as_it_is(answer: object) -> None:
    stage = Stage(review=lambda asked, result: answer)
    (result,) = await stage.run(call("t", "a"))
    assert (result.status, result.text) == ("ok", "a is done")


@staged
async def test_a_review_may_withhold_what_the_tool_said_but_not_whether_it_failed() -> None:
    stage = Stage(review=lambda asked, result: False)
    results = await stage.run(call("t", "a"), call("t", "b", fails=True))
    assert statuses(results) == ["ok", "error"]
    assert {each.text for each in results} == {"The tool has run. Its result is withheld."}


@staged
async def test_a_review_may_say_something_else() -> None:
    instead: dict[str, Any] = {
        "a": "shorter",
        "b": said("", "error", "not that"),
        "c": CallToolResult(content=[ImageContent(data="", mime_type="image/png")]),
        "d": {"n": 1},
    }
    stage = Stage(review=lambda asked, result: instead[asked.id])
    results = await stage.run(*[call("t", label) for label in "abcd"])
    assert [(each.id, each.name, each.status) for each in results] == [
        ("a", "t", "ok"),
        ("b", "t", "error"),
        ("c", "t", "ok"),
        ("d", "t", "ok"),
    ]
    assert [each.text for each in results] == ["shorter", "not that", "[image image/png]", '{\n  "n": 1\n}']


@staged
async def test_a_review_in_words_leaves_the_status_as_the_tool_gave_it() -> None:
    stage = Stage(review=lambda asked, result: "it went wrong")
    (result,) = await stage.run(call("t", "a", fails=True))
    assert (result.status, result.text) == ("error", "it went wrong")


@pytest.mark.parametrize("error", [OSError("no terminal"), asyncio.CancelledError()])
@staged
async def test_a_review_that_fails_withholds_the_result(error: BaseException) -> None:
    """What somebody wanted to look at first is not told unseen."""

    async def review(asked: ToolCall, result: ToolResult) -> None:
        raise error

    stage = Stage(ONE, review=review)
    results = await stage.run(call("t", "a"), call("t", "b"))
    text = "The tool has run. Its result is withheld, as reviewing it failed."
    assert [(each.status, each.text) for each in results] == [("ok", text)] * 2


@staged
async def test_only_what_a_tool_has_said_is_reviewed() -> None:
    reviewed: list[str] = []

    async def tool(name: str, arguments: dict[str, Any]) -> str:
        if name == "lost":
            raise ConnectionResetError
        if name == "broken":
            raise ValueError
        return "ok"

    host = Host(
        FAN,
        tool,
        approve=lambda asked: asked.name != "forbidden",
        review=lambda asked, result: reviewed.append(asked.id),
    )
    names = ["lost", "broken", "forbidden", "t"]
    results = await host.run([ToolCall(name, name) for name in names] + [ToolCall("f", "t", {"ops": []})])
    assert statuses(results) == ["unknown", "error", "skipped", "ok", "error"]
    assert sorted(reviewed) == ["broken", "t"]


@staged
async def test_each_operation_is_reviewed_by_itself() -> None:
    stage = Stage(FAN, review=lambda asked, result: f"seen {asked.id}" if asked.id == "f#1" else None)
    (result,) = await stage.run(fan("t", "f", {}, {}))
    assert result.text == "[1/2] ok\nf#0 is done\n[2/2] ok\nseen f#1"


# ----------------------------------------------------------------------------------------------- questions


@staged
async def test_a_function_that_asks_is_given_the_answer_and_the_hook_the_call() -> None:
    asked: list[tuple[str | None, object]] = []

    def question(one: ToolCall | None, request: object) -> str:
        asked.append((one.id if one else None, request))
        return "blue"

    stage = Stage(FAN, question=question)
    await stage.run(fan("t", "f", {}, {"asks": {"which": "colour"}}), call("u", "a", asks="?"))
    assert asked == [("a", "?"), ("f#1", {"which": "colour"})]
    assert "f#1 is answered blue" in stage.log


@staged
async def test_a_question_that_fails_is_an_error_in_the_function_that_asked() -> None:
    def question(asked: ToolCall | None, request: object) -> object:
        raise OSError("no terminal")

    stage = Stage(ONE, question=question)
    results = await stage.run(call("t", "a", asks="?"), call("t", "b"))
    assert statuses(results) == ["error", "ok"]
    assert "no terminal" in results[0].text


@staged
async def test_a_host_that_has_nobody_to_ask_says_so() -> None:
    (result,) = await Stage().run(call("t", "a", asks="?"))
    assert result.text == "t failed: RuntimeError: this host has no `question` to ask"


@staged
async def test_a_function_may_ask_again_and_again_and_of_several_tasks() -> None:
    asked: list[object] = []

    def question(one: ToolCall | None, request: object) -> object:
        assert one is not None
        asked.append((one.id, request))
        return request

    async def tool(name: str, arguments: dict[str, Any]) -> object:
        await host.ask("first")
        return await asyncio.gather(*[host.ask(each) for each in "xyz"])

    states: list[State] = []
    host = Host(None, tool, question=question, on_state=lambda one, state: states.append(state))
    (result,) = await host.run([ToolCall("a", "t")])
    assert asked == [("a", "first"), ("a", "x"), ("a", "y"), ("a", "z")]
    assert '"x"' in result.text
    assert states == ["queued", "running", *["awaiting-input", "running"] * 2, "completed"]


@staged
async def test_a_call_awaits_input_until_the_last_of_its_questions_is_answered() -> None:
    async def tool(name: str, arguments: dict[str, Any]) -> None:
        await asyncio.gather(host.ask("x"), host.ask("y"))
        await asyncio.sleep(1)

    host = Host(None, tool, question=lambda one, request: asyncio.sleep(1))
    handle = host.start([ToolCall("a", "t")])
    for state in ("awaiting-input", "awaiting-input", "running"):
        await asyncio.sleep(0.9)
        assert handle.states == (state,)
    await handle.results()


@staged
async def test_a_function_may_give_up_its_question_and_people_are_asked_the_next_thing() -> None:
    async def tool(name: str, arguments: dict[str, Any]) -> object:
        try:
            async with asyncio.timeout(arguments["patience"]):
                return await host.ask(arguments["patience"])
        except TimeoutError:
            return "no answer"

    async def question(asked: ToolCall | None, request: object) -> str:
        asked_for.append(request)
        await asyncio.sleep(5)
        return "yes"

    asked_for: list[object] = []
    host = Host(None, tool, question=question)
    # The first gives up while people think, the second before they are asked.
    calls = [ToolCall(str(patience), "t", {"patience": patience}) for patience in (3, 2, 9)]
    results = await host.run(calls)
    assert [each.text for each in results] == ["no answer", "no answer", "yes"]
    assert asked_for == [3, 9]
    assert asyncio.get_running_loop().time() == 8


@pytest.mark.parametrize("review", [None, lambda asked, result: asyncio.sleep(5)])
@staged
async def test_nobody_is_asked_for_a_call_that_has_ended(review: Any) -> None:
    """Whether or not what it said is still reviewed."""

    async def tool(name: str, arguments: dict[str, Any]) -> str:
        tasks.append(asyncio.create_task(afterwards()))
        return "done"

    async def afterwards() -> object:
        await asyncio.sleep(1)
        return await host.ask("one more thing")

    asked: list[object] = []
    tasks: list[asyncio.Task[object]] = []
    host = Host(None, tool, question=lambda one, request: asked.append(request), review=review)
    await host.run([ToolCall("a", "t")])
    with pytest.raises(RuntimeError, match="has ended"):
        await tasks[0]
    assert asked == []


# ---------------------------------------------------------------------------------------- hooks that ask on


@pytest.mark.parametrize("hook", ["approve", "question", "review"])
@staged
async def test_a_hook_may_run_a_batch_of_its_own_and_does_not_wait_for_itself(hook: str) -> None:
    async def ask(asked: ToolCall, *more: object) -> object:
        asked_for.append(asked.id)
        if asked.id == "a":
            results.extend(await stage.run(call("t", "inner", **asks), call("t", "inner too", **asks)))
        return True

    asks: dict[str, Any] = {"asks": "?"} if hook == "question" else {}
    asked_for: list[str] = []
    results: list[ToolResult] = []
    stage = Stage({"t": {"concurrency": 2}}, **{hook: ask})
    outer = await stage.run(call("u", "a", **asks), call("u", "b", **asks))
    assert statuses(outer + results) == ["ok"] * 4
    # b is due all the time, and has to wait until a's hook has answered.
    assert asked_for == ["a", "inner", "inner too", "b"]


@staged
async def test_a_hook_of_one_host_may_run_a_batch_on_another() -> None:
    inner = Desk(approve=True)
    results: list[ToolResult] = []

    async def approve(asked: ToolCall) -> bool:
        results.extend(await inner.run(call("t", "b")))
        return True

    outer = Stage(approve=approve)
    assert statuses(await outer.run(call("t", "a")) + results) == ["ok", "ok"]
    assert inner.asked == ["may b"]


@staged
async def test_a_hook_may_ask_on() -> None:
    async def question(asked: ToolCall | None, request: object) -> object:
        return await stage.host.ask("what?") if request == "which?" else f"that, says {asked and asked.id}"

    stage = Stage(question=question)
    await stage.run(call("t", "a", asks="which?"))
    assert "a is answered that, says a" in stage.log


@pytest.mark.parametrize("takes", [0, 0.5, 5])
@staged
async def test_a_batch_that_a_hook_started_and_left_behind_asks_when_it_is_its_turn(takes: float) -> None:
    class Leaving(Desk):
        async def question(self, asked: ToolCall | None, request: object) -> object:
            handles.append(self.start(call("t", "c"), call("t", "d"), call("t", "e")))
            await asyncio.sleep(takes)
            return "later"

    handles: list[BatchHandle] = []
    desk = Leaving(approve=True)
    await desk.run(call("t", "a", asks="?"), call("t", "b"))
    results = await desk.run(call("t", "f"), call("t", "g"))
    assert statuses(results + await handles[0].results()) == ["ok"] * 5


# --------------------------------------------------------------------------------------- hooks that misbehave


@pytest.mark.parametrize("error", [SystemExit(3), BaseException("strange")])
@pytest.mark.parametrize("hook", ["approve", "review", "question", "on_state"])
@staged
async def test_whatever_a_hook_raises_the_host_lives_on(hook: str, error: BaseException) -> None:
    def broken(*asked: object) -> object:
        if getattr(asked[0], "id", "") == "a":
            raise error
        return True

    stage = Stage(ONE, **{hook: broken})
    first, second = await stage.run(
        call("t", "a", **({"asks": 1} if hook == "question" else {})), call("t", "b")
    )
    assert second.status == "ok"
    expected = {"approve": "error", "review": "ok", "question": "error", "on_state": "ok"}
    assert first.status == expected[hook]
    assert "cancelled" not in first.text


@pytest.mark.parametrize("hook", ["approve", "review", "question"])
def test_a_hook_that_is_thrown_away_with_its_loop_decides_nothing(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing goes on in a loop that is closed, and nobody is told that something has failed."""
    asked: list[str] = []

    async def ask(one: ToolCall, *more: object) -> bool:
        asked.append(one.id)
        await asyncio.sleep(10)
        return True

    async def main() -> None:
        asks = {"asks": "?"} if hook == "question" else {}
        stage.start(call("t", "a", **asks), call("u", "b", **asks))
        await settle()

    stage = Stage(ONE, **{hook: ask})
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    # Whatever belongs to the loop goes with it, once nobody needs it any more.
    host = stage.host
    for part in (host.running, host.lanes, host.prompts, host.questions):
        part.clear()
    gc.collect()
    assert asked == ["a"]
    assert "completed" not in [*stage.states["a"], *stage.states["b"]]
    assert [record.message for record in caplog.records if record.name == "frontmcp_py.host"] == []


@staged
async def test_a_hook_that_is_neither_a_function_nor_none_is_refused() -> None:
    for hook in ("approve", "question", "review", "on_state"):
        with pytest.raises(TypeError, match=hook):
            Host(None, **{hook: 5})  # type: ignore[arg-type]

    async def on_state(call: ToolCall, state: State) -> None: ...

    with pytest.raises(TypeError, match="plain function"):
        Host(None, on_state=on_state)


@staged
async def test_a_hook_that_hangs_holds_up_no_tool_that_runs() -> None:
    hold = asyncio.Event()

    async def review(asked: ToolCall, result: ToolResult) -> None:
        if asked.id == "a":
            await hold.wait()

    stage = Stage(ONE, review=review)
    handle = stage.start(*[call("t", label, takes=1) for label in "abc"])
    await asyncio.sleep(10)
    assert stage.log == ["+a", "-a", "+b", "-b", "+c", "-c"]
    assert handle.states == ("awaiting-review",) * 3
    hold.set()
    assert statuses(await handle.results()) == ["ok"] * 3


@staged
async def test_hooks_may_start_and_cancel_batches() -> None:
    """Whoever is told of a change is told while it happens, and may do anything but wait."""

    def on_state(asked: ToolCall, state: State) -> None:
        if (asked.id, state) == ("a", "running"):
            handles.append(stage.start(call("t", "c")))
        if (asked.id, state) == ("c", "running"):
            handles[0].cancel()

    handles = []
    stage = Stage(ONE, on_state=on_state)
    handles.append(stage.start(call("t", "a", takes=1), call("u", "b", takes=5)))
    assert statuses(await handles[0].results()) == ["ok", "cancelled"]
    assert statuses(await handles[1].results()) == ["ok"]
