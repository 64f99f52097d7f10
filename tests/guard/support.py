"""What the guard's tests share: guards in virtual time, calls that end when a test says so, the end state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import pytest

from frontmcp_py.call import Call, Caller
from frontmcp_py.errors import GuardError
from frontmcp_py.guard import Guard, Plan, Run
from frontmcp_py.policy import Policy, Throttle
from frontmcp_py.signal import AbortSignal
from frontmcp_py.testing import VirtualClock, settle
from tests.reconcile import adds_up

FREE: Final = Policy()
"""A tool without limits of its own."""

NOBODY: Final = Caller()


def now() -> float:
    """Seconds that have passed on the loop."""
    return asyncio.get_running_loop().time()


def new_guard(throttle: Throttle | None = None, **options: Any) -> Guard:
    """A guard whose windows follow the virtual time of the loop that runs."""
    return Guard(throttle, clock=VirtualClock(), **options)


class Held:
    """A call that runs until the test ends it.

    Args:
        guard: Who decides about it.
        tool: What is called.
        policy: The tool's limits.
        caller: Who calls.
        arguments: With what.
        signal: Given to `guard.run`.
        stubborn: Its body ignores being cancelled.
    """

    def __init__(
        self,
        guard: Guard,
        tool: str = "x",
        policy: Policy = FREE,
        *,
        caller: Caller = NOBODY,
        arguments: Mapping[str, Any] | None = None,
        signal: AbortSignal | None = None,
        stubborn: bool = False,
    ) -> None:
        self.began: float | None = None
        self.ended: float | None = None
        self.was_cancelled = False
        self._stubborn = stubborn
        self._may_end = asyncio.Event()
        call = Call(tool, arguments or {}, caller)
        self.task = asyncio.create_task(guard.run(call, policy, self._body, signal))
        # A test need not look at every answer.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def runs(self) -> bool:
        return self.began is not None and self.ended is None

    @property
    def waits(self) -> bool:
        return self.began is None and not self.task.done()

    def let_go(self) -> None:
        """The body may end."""
        self._may_end.set()

    async def end(self) -> str:
        """End the body; what the caller gets."""
        self.let_go()
        return await self.task

    async def refusal(self) -> GuardError:
        """What the guard told the caller instead of a result."""
        return await refusal(self.task)

    async def _body(self) -> str:
        self.began = now()
        try:
            while not self._may_end.is_set():
                try:
                    await self._may_end.wait()
                except asyncio.CancelledError:
                    self.was_cancelled = True
                    if not self._stubborn:
                        raise
        finally:
            self.ended = now()
        return "done"


async def hold(guard: Guard, tool: str = "x", policy: Policy = FREE, **options: Any) -> Held:
    """A `Held` call that has come as far as it can."""
    held = Held(guard, tool, policy, **options)
    await settle()
    return held


async def once(
    guard: Guard,
    tool: str = "x",
    policy: Policy = FREE,
    *,
    caller: Caller = NOBODY,
    arguments: Mapping[str, Any] | None = None,
) -> float:
    """A call that does nothing; when it did."""

    async def body() -> float:
        return now()

    return await guard.run(Call(tool, arguments or {}, caller), policy, body)


async def refusal(call: Awaitable[object]) -> GuardError:
    """What the guard tells the caller instead of a result."""
    with pytest.raises(GuardError) as caught:
        await call
    return caught.value


async def code_of(call: Awaitable[object]) -> str:
    """How a call ends, in a word: `ok`, or the code of its refusal."""
    try:
        await call
    except GuardError as error:
        return error.code
    return "ok"


async def inside(
    guard: Guard, parent: Run, plan: Plan, body: Any, *, arguments: Mapping[str, Any] | None = None
) -> Any:
    """A nested call, the way a server makes it for `ctx.call_tool`."""
    call = Call(plan.tool, arguments or {}, parent.call.caller)
    return await guard.call(plan, call, body, signal=parent.signal, parent=parent)


def is_clean(guard: Guard) -> None:
    """Nothing runs, waits or is held any more, and the counters add up."""
    statistics = guard.statistics()
    assert (statistics.active, statistics.waiting, statistics.places) == (0, 0, 0)
    assert guard._scheduler.live_slots == 0
    assert guard._threads.held == guard._threads.held_normal == 0
    if guard._admission is not None:
        assert guard._admission.held == guard._admission.held_normal == 0
    for slot in guard._scheduler._slots.values():
        assert slot.is_unused
    adds_up(guard)


@contextmanager
def every_guard_ends_clean(monkeypatch: pytest.MonkeyPatch) -> Generator[list[Guard]]:
    """Look at every guard that is made in here, when this is left."""
    made: list[Guard] = []
    make = Guard.__init__

    def remember(guard: Guard, *args: Any, **options: Any) -> None:
        make(guard, *args, **options)
        made.append(guard)

    monkeypatch.setattr(Guard, "__init__", remember)
    yield made
    for guard in made:
        is_clean(guard)
