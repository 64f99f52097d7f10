"""A host that is started again goes on with what a transcript has: nothing twice, and in the old order."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.host import Batch, ToolCall, ToolResult
from frontmcp_py.testing import run_virtual
from tests.host.stage import Stage, call, fan, operations_of, staged, statuses
from tests.properties.host_model import Restarts

ONE = {"t": {"concurrency": 1}}
FAN = {"t": {"concurrency": 1, "fan_out": True}}
STOP = {"t": {"concurrency": 1, "fan_out": {"on_error": "stop"}}}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hooks that fail are part of random batches, and need no traceback."""
    logging.getLogger("frontmcp_py.host").disabled = True
    yield
    logging.getLogger("frontmcp_py.host").disabled = False


def result(call_id: str, text: str, status: Any = "ok") -> ToolResult:
    return ToolResult.saying(ToolCall(call_id, "t"), status, text)


def texts(results: list[ToolResult]) -> list[str]:
    return [each.text for each in results]


# ------------------------------------------------------------------------------------------------ what runs


@staged
async def test_only_calls_without_a_result_run_in_the_written_order() -> None:
    stage = Stage(ONE)
    calls = [call("t", label, takes=1) for label in "abcde"]
    known = [result("d", "d, earlier"), result("b", "b, earlier", "error")]
    results = await stage.host.run(Batch.resume(calls, known))
    assert stage.log == ["+a", "-a", "+c", "-c", "+e", "-e"]
    assert texts(results) == ["a is done", "b, earlier", "c is done", "d, earlier", "e is done"]
    assert statuses(results) == ["ok", "error", "ok", "ok", "ok"]


@staged
async def test_permission_is_asked_again_for_what_is_to_run_and_for_nothing_else() -> None:
    asked: list[str] = []

    def approve(one: ToolCall) -> bool:
        asked.append(one.id)
        return True

    stage = Stage(FAN, approve=approve)
    calls = [call("t", "a"), fan("t", "f", {}, {}, {}), call("u", "b")]
    await stage.host.run(Batch.resume(calls, [result("b", ""), result("f#1", "")]))
    assert asked == ["a", "f#0", "f#2"]


@staged
async def test_operations_run_again_in_the_written_order_whatever_the_first_run_had_released() -> None:
    """The first run was ended while its first operation asked, and the second had ended."""
    held = asyncio.Event()
    first = Stage({"t": {"concurrency": 2, "fan_out": True}}, question=lambda asked, request: held.wait())
    calls = [fan("t", "f", {"asks": "?"}, {"takes": 2}, {"takes": 9}, {"takes": 9})]
    handle = first.host.start(calls)
    await asyncio.sleep(3)
    known = handle.results_so_far()
    assert [each.id for each in known] == ["f#1"]
    second = Stage(FAN, question=lambda asked, request: "yes")
    (again,) = await second.host.run(Batch.resume(calls, known))
    assert second.starts == ["f#0", "f#2", "f#3"]
    assert operations_of(again) == ["ok"] * 4
    held.set()
    await handle.results()


@staged
async def test_late_answers_of_the_earlier_run_change_nothing() -> None:
    first, second = Stage(ONE), Stage(ONE)
    calls = [call("t", "a", takes=1), call("t", "b", takes=5, fails=True), call("t", "c", takes=5)]
    handle = first.host.start(calls)
    await asyncio.sleep(2)
    calls_now = [call("t", "a"), call("t", "b", takes=50), call("t", "c")]
    again = second.host.start(Batch.resume(calls_now, handle.results_so_far()))
    await asyncio.sleep(20)
    assert statuses(await handle.results()) == ["ok", "error", "ok"]
    assert again.states == ("completed", "running", "queued")
    assert second.starts == ["b"]
    assert statuses(await again.results()) == ["ok", "ok", "ok"]


@staged
async def test_a_batch_of_which_everything_is_known_is_done_at_once() -> None:
    asked: list[ToolCall] = []
    stage = Stage(ONE, approve=asked.append)
    handle = stage.host.start(Batch.resume([call("t", "a")], [result("a", "earlier")]))
    assert handle.is_done
    assert handle.states == ("completed",)
    assert texts(await handle.results()) == ["earlier"]
    assert handle.entries[0].result == handle.results_so_far()[0]
    await handle.ended()
    assert asked == []


@staged
async def test_a_call_all_of_whose_operations_are_known_is_answered_without_running_anything() -> None:
    stage = Stage(FAN)
    known = [result("f#1", "two", "error"), result("f#0", "one")]
    folded, other = await stage.host.run(Batch.resume([fan("t", "f", {}, {}), call("t", "a")], known))
    assert folded.text == "[1/2] ok\none\n[2/2] error\ntwo"
    assert other.status == "ok"
    assert stage.starts == ["a"]


@staged
async def test_a_known_failure_stops_later_operations() -> None:
    stage = Stage(STOP)
    calls = [fan("t", "f", {}, {}, {}, {})]
    (folded,) = await stage.host.run(Batch.resume(calls, [result("f#1", "it broke", "error")]))
    assert stage.starts == ["f#0"]
    assert operations_of(folded) == ["ok", "error", "not_run", "not_run"]
    assert folded.operations[3].text == "not run (stopped after operation 2 failed)"


@staged
async def test_what_was_cancelled_or_lost_is_not_run_again() -> None:
    """Part of it may have happened. The model decides, and writes a call if it has to be."""
    stage = Stage(ONE)
    known = [result("a", "Cancelled.", "cancelled"), result("b", "lost", "unknown")]
    results = await stage.host.run(Batch.resume([call("t", label) for label in "abc"], known))
    assert stage.starts == ["c"]
    assert statuses(results) == ["cancelled", "unknown", "ok"]


# -------------------------------------------------------------------------------------- whose result is it


@staged
async def test_results_by_place_stand_where_they_stood() -> None:
    stage = Stage(ONE)
    calls = [ToolCall("x", "t", {"as": label}) for label in "abc"]
    results = await stage.host.run(Batch.resume(calls, [None, result("x", "known"), None]))
    assert texts(results) == ["a is done", "known", "c is done"]


@staged
async def test_results_of_calls_with_one_id_go_to_the_first_that_has_none() -> None:
    stage = Stage(ONE)
    calls = [ToolCall("x", "t", {"as": label}) for label in "abc"]
    results = await stage.host.run(Batch.resume(calls, [result("x", "one"), result("x", "two")]))
    assert texts(results) == ["one", "two", "c is done"]


@staged
async def test_results_that_a_handle_gives_know_their_place() -> None:
    first, second = Stage(FAN), Stage(FAN)
    calls = [
        ToolCall("x", "t", {"ops": [{"as": "a", "takes": 9}, {"as": "b"}]}),
        ToolCall("x", "u", {"as": "c", "takes": 9}),
        ToolCall("x", "u", {"as": "d"}),
    ]
    handle = first.host.start(calls)
    await asyncio.sleep(1)
    known = [ToolResult.from_dict(json.loads(json.dumps(each.as_dict()))) for each in handle.results_so_far()]
    assert texts(known) == ["d is done"]
    await second.host.run(Batch.resume(calls, known))
    assert sorted(second.starts) == ["a", "b", "c"]
    await handle.results()


@pytest.mark.parametrize(
    "known",
    [
        ["a#0", "b"],  # an operation of a, and b
        ["b", "a#0"],
    ],
)
@staged
async def test_results_may_come_in_any_order(known: list[str]) -> None:
    stage = Stage(FAN)
    calls = [fan("t", "a", {}, {}), call("t", "b")]
    results = await stage.host.run(Batch.resume(calls, [result(each, f"{each}, earlier") for each in known]))
    assert stage.starts == ["a#1"]
    assert results[0].operations[0].text == "a#0, earlier"
    assert results[1].text == "b, earlier"


@staged
async def test_the_result_of_a_call_counts_more_than_those_of_its_operations() -> None:
    """A transcript may have both: first each operation's, and at last that of the whole."""
    stage = Stage(FAN)
    known = [result("a#0", "one"), result("a", "both")]
    assert texts(await stage.host.run(Batch.resume([fan("t", "a", {}, {})], known))) == ["both"]
    assert stage.starts == []


@staged
async def test_an_id_with_a_number_sign_is_that_of_a_call_if_there_is_one() -> None:
    stage = Stage(FAN)
    calls = [fan("t", "a", {}, {}), call("t", "a#1")]
    results = await stage.host.run(Batch.resume(calls, [result("a#1", "earlier")]))
    assert results[1].text == "earlier"
    assert stage.starts == ["a#0", "a#1"]


def test_a_result_is_renamed_after_its_call() -> None:
    """Messages of a transcript do not say which tool answered."""
    batch = Batch.resume([ToolCall("a", "t")], [ToolResult("a", "")])
    assert batch.known[0].name == "t"


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ([result("b", "")], "'b'"),
        ([result("a", ""), result("a", "")], "'a'"),
        ([result("a#0", ""), result("a#0", "")], "'a#0'"),
        ([result("a#", "")], "'a#'"),
        ([result("a#x", "")], "'a#x'"),
        ([result("a#01", "")], "'a#01'"),
        ([result("a#-1", "")], "'a#-1'"),
        ([result("a#\u0663", "")], "a#"),
        ([result("a", ""), result("a#0", "")], "'a#0'"),
        ([None, None], r"as many as there are calls \(1\)"),
        (["a"], r"results\[0\]"),
        ([{"id": "a"}], r"results\[0\]"),
    ],
)
def test_a_result_that_belongs_to_no_call_is_refused(known: list[Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Batch.resume([ToolCall("a", "t")], known)


@pytest.mark.parametrize(
    ("calls", "known"),
    [
        ([fan("t", "f", {}, {})], "f#2"),
        ([call("t", "f")], "f#0"),
        ([call("u", "f")], "f#0"),
        ([ToolCall("f", "t", problem="it is broken")], "f#0"),
    ],
)
@staged
async def test_a_result_of_an_operation_that_a_call_does_not_have_is_refused(
    calls: list[ToolCall], known: str
) -> None:
    """What the transcript says has happened must not happen again since a configuration was changed."""
    with pytest.raises(ConfigurationError, match=known):
        Stage(FAN).host.start(Batch.resume(calls, [result(known, "")]))


@pytest.mark.parametrize(
    ("config", "asked", "why"),
    [
        ({"enabled": False}, fan("t", "f", {}, {}), "no operations now (t: this tool is disabled. Nothing"),
        ({"concurrency": 1}, fan("t", "f", {}, {}), "no operations now; "),
        ({"fan_out": True}, ToolCall("f", "t", {"ops": 5}), "no operations now (t: ops must be"),
        ({"fan_out": True}, fan("t", "f", {}), "1 operations; "),
    ],
    ids=["disabled", "not fanned out", "not readable", "fewer"],
)
@staged
async def test_a_batch_that_cannot_be_resumed_since_a_configuration_was_changed_says_why(
    config: dict[str, Any], asked: ToolCall, why: str
) -> None:
    """It names the tool and the call, and what can be done."""
    stage = Stage({"t": config})
    known = [result("f#1", "f#1, earlier")]
    with pytest.raises(ConfigurationError) as refused:
        stage.host.start(Batch.resume([asked, call("u", "b")], known))
    said = str(refused.value)
    assert said.startswith(f"the result 'f#1' belongs to no operation: t#f has {why}")
    assert said.endswith("leave the result out to resume without it")
    assert stage.starts == []
    # As it says.
    assert len(await stage.host.run(Batch.resume([asked, call("u", "b")], []))) == 2


def test_a_result_by_place_of_another_call_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'b'"):
        Batch.resume([ToolCall("a", "t"), ToolCall("b", "t")], [result("b", ""), None])


# ---------------------------------------------------------------------------------------- at every moment


async def restart_all(seeds: range, **options: bool) -> int:
    return sum([await Restarts(seed, **options).run() for seed in seeds])


OPTIONS: list[dict[str, bool]] = [{}, {"as_messages": True}, {"one_id": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_ended_after_any_change_a_random_batch_goes_on_as_the_rules_say(options: dict[str, bool]) -> None:
    assert run_virtual(lambda: restart_all(range(20), **options)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_ended_after_any_change_a_thousand_random_batches_go_on_as_the_rules_say(
    options: dict[str, bool],
) -> None:
    run_virtual(lambda: restart_all(range(1_000, 2_000), **options))
