"""Exactly one outcome for each call, whatever comes together in one turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import permutations

import pytest

from frontmcp_py.call import Call
from frontmcp_py.errors import GuardError
from frontmcp_py.guard import Guard, Run
from frontmcp_py.guard.run import Ending
from frontmcp_py.policy import Policy, Timeout
from frontmcp_py.signal import AbortSignal
from frontmcp_py.testing import settle, virtual_time
from tests.guard.support import Held, hold, new_guard, now
from tests.reconcile import adds_up

# In the order in which they count when they come in one turn of the loop.
EVENTS = ("result", "deadline", "cancel", "shutdown")
TOGETHER = [order for size in (2, 3, 4) for order in permutations(EVENTS, size)]
OUTCOMES = {"result": "completed", "deadline": "timed_out", "cancel": "cancelled", "shutdown": "cancelled"}


class Running:
    """A call that runs, and what may happen to it."""

    def __init__(self, guard: Guard, policy: Policy) -> None:
        self.signal = AbortSignal()
        self._guard = guard
        self._result = asyncio.get_running_loop().create_future()
        self._run: Run | None = None
        self.task = asyncio.create_task(
            guard.call(guard.bind("x", policy), Call("x"), self._body, signal=self.signal)
        )

    async def _body(self, run: Run) -> str:
        self._run = run
        await self._result
        return "done"

    def let_go(self) -> None:
        if not self._result.done():
            self._result.set_result(None)

    def in_one_turn(self, events: tuple[str, ...]) -> None:
        """Have all of them happen in the next turn of the loop, in this order."""
        loop = asyncio.get_running_loop()
        happens: dict[str, Callable[[], object]] = {
            # The body is woken, and returns, in the next turn; the others are called in it.
            "result": self.let_go,
            "deadline": lambda: loop.call_soon(self._end, Ending.DEADLINE),
            "cancel": lambda: loop.call_soon(self.signal.abort),
            "shutdown": lambda: loop.call_soon(self._end, Ending.SHUTDOWN),
        }
        for event in events:
            happens[event]()

    def _end(self, ending: Ending) -> None:
        assert self._run is not None
        assert self._guard._deadlines is not None
        self._guard._deadlines.end(self._run, ending)

    async def told(self) -> str:
        """What the caller gets, in a word."""
        try:
            return await self.task
        except GuardError as error:
            return error.code


TOLD = {"result": "done", "deadline": "EXECUTION_TIMEOUT", "cancel": "CANCELLED", "shutdown": "OVERLOADED"}


@pytest.mark.parametrize(
    "timeout", [None, Timeout(60), Timeout(60, cancel_after=0)], ids=["none", "60", "60+0"]
)
@virtual_time
async def test_of_several_in_one_turn_of_the_loop_the_first_in_order_counts(timeout: Timeout | None) -> None:
    for events in TOGETHER:
        guard = new_guard()
        running = Running(guard, Policy(timeout=timeout))
        await settle()
        running.in_one_turn(events)
        winner = min(events, key=EVENTS.index)
        assert await running.told() == TOLD[winner], events
        running.let_go()
        await settle()
        counts = guard.statistics().counts
        outcomes = {name: getattr(counts, name) for name in ("completed", "timed_out", "cancelled", "failed")}
        assert {name: number for name, number in outcomes.items() if number} == {OUTCOMES[winner]: 1}, events
        adds_up(guard)


@pytest.mark.parametrize("events", TOGETHER, ids="-".join)
@virtual_time
async def test_a_later_ending_changes_nothing(events: tuple[str, ...]) -> None:
    guard = new_guard()
    running = Running(guard, Policy(timeout=60))
    await settle()
    for event in events:
        running.in_one_turn((event,))
        await settle()
    assert await running.told() == TOLD[events[0]]
    running.let_go()
    await settle()
    adds_up(guard)


@pytest.mark.parametrize("other", ["result", "deadline", "cancel", "shutdown"])
@pytest.mark.parametrize("is_first", [True, False])
@virtual_time
async def test_a_cancelled_task_gets_its_cancellation_whatever_comes_with_it(
    other: str, is_first: bool
) -> None:
    guard = new_guard()
    running = Running(guard, Policy(timeout=60))
    await settle()
    if is_first:
        running.in_one_turn((other,))
    asyncio.get_running_loop().call_soon(running.task.cancel)
    if not is_first:
        running.in_one_turn((other,))
    with pytest.raises(asyncio.CancelledError):
        await running.task
    running.let_go()
    await settle()
    counts = guard.statistics().counts
    # What came with it is what is recorded, once; a shutdown counts after the caller.
    assert getattr(counts, OUTCOMES[other]) == 1
    adds_up(guard)


@pytest.mark.parametrize("is_inline", [True, False])
@virtual_time
async def test_a_result_and_a_cancellation_of_the_task_in_every_order_of_turns(is_inline: bool) -> None:
    policy = Policy(on_cancel="cancel") if is_inline else Policy(on_cancel="cancel", timeout=60)
    for turns in range(6):
        for first in ("result", "cancel"):
            guard = new_guard()
            held = await hold(guard, "x", policy)
            happens: dict[str, Callable[[], object]] = {"result": held.let_go, "cancel": held.task.cancel}
            happens.pop(first)()
            for _ in range(turns):
                await asyncio.sleep(0)
            for event in happens.values():
                event()
            await settle()
            assert held.task.done()
            assert held.task.cancelled() or held.task.result() == "done"
            counts = guard.statistics().counts
            assert counts.completed + counts.cancelled == 1
            adds_up(guard)


@pytest.mark.parametrize("is_set_first", [True, False])
@virtual_time
async def test_a_result_in_the_instant_of_the_deadline_gives_one_answer(is_set_first: bool) -> None:
    guard = new_guard()
    loop = asyncio.get_running_loop()
    held = Held(guard, "x", Policy(concurrency=1, timeout=5))
    if is_set_first:
        loop.call_at(5, held.let_go)
    await settle()
    if not is_set_first:
        loop.call_at(5, held.let_go)
    outcome = (await asyncio.gather(held.task, return_exceptions=True))[0]
    assert now() == 5
    counts = guard.statistics().counts
    await settle()
    if outcome == "done":
        assert (counts.completed, counts.timed_out) == (1, 0)
    else:
        assert isinstance(outcome, GuardError)
        assert (outcome.code, counts.completed, counts.timed_out) == ("EXECUTION_TIMEOUT", 0, 1)
    adds_up(guard)


@pytest.mark.parametrize("turns", range(5))
@virtual_time
async def test_a_call_may_be_aborted_in_every_turn_of_its_begin(turns: int) -> None:
    for policy in (Policy(concurrency=1), Policy(concurrency=1, on_cancel="cancel", timeout=60)):
        guard, signal = new_guard(), AbortSignal()
        held = Held(guard, "x", policy, signal=signal)
        for _ in range(turns):
            await asyncio.sleep(0)
        signal.abort()
        assert (await held.refusal()).code == "CANCELLED"
        held.let_go()
        await settle()
        adds_up(guard)
        assert guard.statistics().active == 0


@pytest.mark.parametrize("turns", range(5))
@virtual_time
async def test_a_task_may_be_cancelled_in_every_turn_of_its_begin(turns: int) -> None:
    for policy in (
        Policy(concurrency=1),
        Policy(concurrency=1, on_cancel="cancel"),
        Policy(concurrency=1, on_cancel="cancel", timeout=60),
    ):
        guard = new_guard()
        held = Held(guard, "x", policy)
        for _ in range(turns):
            await asyncio.sleep(0)
        held.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held.task
        held.let_go()
        await settle()
        adds_up(guard)
        assert guard.statistics().active == 0
