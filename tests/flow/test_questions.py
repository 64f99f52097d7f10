"""A tool that asks its client something. On connections of 2025-11-25 it waits for the answer as it runs."""

from __future__ import annotations

import asyncio

import mcp_types as types

from tests.flow.wires import ALL, SOON, Wire, over, text

with_a_back_channel = over([kind for kind in ALL if kind.has_back_channel])

YES = types.ElicitResult(action="accept", content={"really": True})


either_way = over([kind for kind in ALL if kind.has_back_channel or kind.is_modern])


class Person:
    """Is asked, and answers when told to."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.answers = asyncio.Event()

    async def __call__(self) -> types.ElicitResult:
        self.is_asked.set()
        await self.answers.wait()
        return YES

    async def lets_time_pass(self) -> None:
        """Is asked, and lets more time pass than the tool has; nothing but waiting makes it pass."""
        await asyncio.wait_for(self.is_asked.wait(), SOON)
        await asyncio.sleep(0.35)


async def ask(wire: Wire, case: str, **more: object) -> tuple[Person, asyncio.Task[types.CallToolResult]]:
    """Call a tool that has 250 ms, of which the person it asks takes none."""
    wire.answer = person = Person()
    call = wire.start("ask", case=case, **more)
    await person.lets_time_pass()
    assert not call.done()
    return person, call


@with_a_back_channel
async def test_a_question_stops_the_clock_and_keeps_the_slot(wire: Wire, case: str) -> None:
    person, call = await ask(wire, case)
    refused = await wire.call("knock", case=case)
    assert (refused.meta or {})["code"] == "CONCURRENCY_LIMIT"
    now = await wire.statistics()
    assert (now["active"], now["abandoned"], now["places"]) == (1, 0, 1)
    person.answers.set()
    assert text(await call) == "accept"
    assert text(await wire.call("enter", case=case)) == "inside"


@with_a_back_channel
async def test_the_clock_goes_on_when_the_answer_is_there_and_no_question_is_asked_when_time_is_up(
    wire: Wire, case: str
) -> None:
    person, call = await ask(wire, case, hang=True)
    person.answers.set()
    assert text(await call) == 'Execution of "ask" timed out after 250ms'
    # Now it would ask again.
    person.is_asked.clear()
    await wire.let_go(case)
    await wire.said(case, "not told: EXECUTION_TIMEOUT")
    assert text(await wire.call("enter", case=case)) == "inside"
    assert not person.is_asked.is_set()


@with_a_back_channel
async def test_a_question_of_a_cancelled_call_ends_unanswered(wire: Wire, case: str) -> None:
    _, call = await ask(wire, case)
    call.cancel()
    await asyncio.wait((call,))
    # Nobody answers it any more, so waiting for that would take the slot for ever.
    await wire.said(case, "not told: CANCELLED")
    assert text(await wire.call("enter", case=case)) == "inside"


@with_a_back_channel
async def test_a_nested_question_stops_the_clocks_of_its_callers_too(wire: Wire, case: str) -> None:
    wire.answer = person = Person()
    call = wire.start("delegate_soon", case=f"{case}-outer", tool="ask", arguments={"case": case})
    await person.lets_time_pass()
    assert not call.done()
    person.answers.set()
    assert text(await call) == "accept"


@either_way
async def test_a_question_that_comes_before_the_tool_is_asked_in_the_way_of_the_protocol(
    wire: Wire, case: str
) -> None:
    wire.answer = person = Person()
    person.answers.set()
    assert text(await wire.call("book", case=case)) == "really: True"
    assert person.is_asked.is_set()
