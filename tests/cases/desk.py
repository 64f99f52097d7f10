"""Calls in virtual time, what became of each, and the end state that they must leave behind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import asynccontextmanager
from contextvars import Context
from functools import partial
from typing import Any, Final, Generic, TypeVar, TypeVarTuple

import pytest
from mcp.client import Client
from mcp_types import CallToolResult, TextContent

from frontmcp_py import AbortSignal, Call, Caller, Concurrency, FrontMCP, Guard, GuardError, Policy, Throttle
from frontmcp_py.guard import Counts
from frontmcp_py.policy import UNSET, PartitionBy, Unset
from frontmcp_py.testing import VirtualClock, VirtualTimeLoop

ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")

FREE = Policy()
"""No limit but admission's."""


def now() -> float:
    """Loop time in seconds."""
    return asyncio.get_running_loop().time()


async def at(moment: float) -> None:
    """Wait until the loop's clock shows `moment`."""
    await asyncio.sleep(moment - now())


async def turn_until(condition: Callable[[], bool]) -> None:
    """Let the loop turn, time standing still, until the condition holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


def conc(
    most: int = 1,
    queue: int | None = None,
    wait: float | None = 0.0,
    *,
    key: str | None = None,
    by: PartitionBy = "global",
) -> Concurrency:
    """At most so many at once, so many in the queue, and so many seconds there."""
    return Concurrency(most, key=key, partition_by=by, queue_timeout=wait, max_queued=queue)


class Attempt:
    """One call, and what became of it.

    Attributes:
        name: What it is called in `Desk.begun`.
        began: When its body began, in loop time.
        ended: When its body had ended.
        answered: When its caller had the answer.
        result: What it was answered with.
        error: Or the error instead.
        signal: The call's signal, if its body asked for it.
        task: The caller.
    """

    task: asyncio.Task[None]

    def __init__(self, name: str) -> None:
        self.name = name
        self.began: float | None = None
        self.ended: float | None = None
        self.answered: float | None = None
        self.result: object = None
        self.error: BaseException | None = None
        self.signal: AbortSignal | None = None

    def __repr__(self) -> str:
        return f"<{self.name}: {self.outcome} at {self.answered}>"

    @property
    def outcome(self) -> str:
        """`ok`, a code of the guard, `cancelled` for a cancelled caller, or the name of another error."""
        if self.answered is None:
            return "cancelled" if self.task.cancelled() else "pending"
        if self.error is None:
            return "ok"
        if isinstance(self.error, GuardError):
            return self.error.code
        return "cancelled" if isinstance(self.error, asyncio.CancelledError) else type(self.error).__name__

    def cancel(self) -> None:
        """The caller is cancelled."""
        self.task.cancel()

    def __await__(self) -> Generator[Any, None, Attempt]:
        """Wait for the answer; whatever it is, it is not raised."""
        yield from asyncio.wait([self.task]).__await__()
        return self


Body = Callable[[Attempt], Awaitable[object]]


class Desk:
    """Makes calls and keeps a list of who began, in order.

    Args:
        throttle: What its guard is given.
        guard: The guard to call, if not a new one.
    """

    def __init__(self, throttle: Throttle | None = None, *, guard: Guard | None = None) -> None:
        self.guard = guard or Guard(throttle)
        self.guard.use_clock(VirtualClock())
        self.begun: list[str] = []
        self.running = 0
        self.most_running = 0
        self.attempts: list[Attempt] = []
        self._at_work: set[asyncio.Future[None]] = set()

    def call(
        self,
        tool: str = "tool",
        policy: Policy = FREE,
        body: Body | None = None,
        *,
        seconds: float = 0.0,
        name: str | None = None,
        caller: Caller | None = None,
        arguments: Mapping[str, object] | None = None,
        signal: AbortSignal | None = None,
        listens: bool = False,
    ) -> Attempt:
        """A caller comes, in a task of its own.

        Args:
            tool: What it calls.
            policy: The tool's limits.
            body: The work; by default sleep.
            seconds: For how long that is.
            name: What the call is known by; by default the tool's name.
            caller: Who it is.
            arguments: What it sends.
            signal: What cancels the call.
            listens: Whether the body is given the call's signal.
        """
        attempt = Attempt(name or tool)
        call = Call(tool, arguments or {}, caller or Caller())

        async def sleep(_: Attempt) -> object:
            return await asyncio.sleep(seconds, attempt.name)

        work = self._work(attempt, body or sleep, listens=listens)

        async def arrive() -> None:
            try:
                attempt.result = await self.guard.run(call, policy, work, signal)
            except BaseException as error:
                attempt.error = error
            attempt.answered = now()

        attempt.task = asyncio.create_task(arrive(), name=attempt.name)
        self.attempts.append(attempt)
        return attempt

    def _work(self, attempt: Attempt, body: Body, *, listens: bool) -> Callable[..., Awaitable[object]]:
        async def work() -> object:
            attempt.began = now()
            end = asyncio.get_running_loop().create_future()
            self._at_work.add(end)
            self.begun.append(attempt.name)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                return await body(attempt)
            finally:
                self.running -= 1
                attempt.ended = now()
                self._at_work.remove(end)
                end.set_result(None)

        async def listening(signal: AbortSignal) -> object:
            attempt.signal = signal
            return await work()

        return listening if listens else work

    @property
    def counts(self) -> Counts:
        """What became of all calls together."""
        return self.guard.statistics().counts

    @property
    def active(self) -> int:
        """Calls whose work has not ended."""
        return self.guard.statistics().active

    @property
    def waiting(self) -> int:
        """Calls in the queue."""
        return self.guard.statistics().waiting

    async def everybody(self) -> None:
        """Wait until all callers have their answers, and all work has ended."""
        if self.attempts:
            await asyncio.wait([attempt.task for attempt in self.attempts])
        while self._at_work:
            await asyncio.wait(self._at_work)

    def outcomes(self) -> list[str]:
        """What became of every call, in the order of arrival."""
        return [attempt.outcome for attempt in self.attempts]

    def assert_clean(self) -> None:
        """Everybody has been answered, and the guard is as if nobody had called, but for its counters."""
        assert [attempt for attempt in self.attempts if attempt.outcome == "pending"] == []
        assert self.running == 0
        assert_clean(self.guard)


def until(gate: asyncio.Event) -> Body:
    """A body that works until it is let go."""

    async def work(_: Attempt) -> object:
        return await gate.wait()

    return work


def every_way_to_run() -> list[Policy]:
    """One slot to wait for; bodies in their caller's task and in their own, with and without a timeout."""
    slot = conc(1, queue=5, wait=10)
    return [
        Policy(concurrency=slot, on_cancel="cancel"),
        Policy(concurrency=slot, on_cancel="abort"),
        Policy(concurrency=slot, on_cancel="cancel", timeout=60),
        Policy(concurrency=slot, on_cancel="abort", timeout=60),
    ]


WAYS_TO_RUN: Final = pytest.mark.parametrize(
    "policy", every_way_to_run(), ids=["inline", "own task", "cancel, timeout", "abort, timeout"]
)


def with_rate(policy: Policy, rate: str) -> Policy:
    """A policy, and a rate limit besides."""
    slots, deadline = policy.concurrency_limits, policy.deadline
    assert not isinstance(slots, Unset)
    return Policy(
        rate,
        slots,
        UNSET if isinstance(deadline, Unset) else deadline,
        priority=policy.priority,
        on_cancel=policy.on_cancel,
    )


def assert_clean(guard: Guard) -> None:
    """Nobody runs or waits, every place is free, no timer is set, and the counters add up."""
    statistics = guard.statistics()
    assert (statistics.active, statistics.abandoned, statistics.waiting, statistics.places) == (0, 0, 0, 0)
    scheduler = guard._scheduler
    assert scheduler.live_slots == 0
    assert not scheduler._groups
    for slot in scheduler._slots.values():
        assert (slot.held, slot.waiting, slot.first, slot.groups) == (0, 0, None, 0), slot.key
    for pool in (guard._admission, guard._threads):
        if pool is not None:
            assert (pool.held, pool.held_normal) == (0, 0), pool.name
    assert not guard._slots._waiting
    assert not guard._slots._called
    for timers in (guard._slots._timers, guard._deadlines and guard._deadlines._timers):
        assert not timers
    assert_adds_up(statistics.counts)
    for counts in statistics.tools.values():
        assert_adds_up(counts)


def assert_adds_up(counts: Counts) -> None:
    """Every call that came is accounted for, once."""
    rejected = sum(counts.rejected.values())
    assert counts.submitted == rejected + counts.cancelled_waiting + counts.started, counts
    assert counts.started == counts.completed + counts.failed + counts.timed_out + counts.cancelled, counts
    assert counts.submitted >= counts.accepted >= counts.started


def other_tasks(known: Iterable[asyncio.Task[Any]] = ()) -> set[asyncio.Task[Any]]:
    """The tasks that have not ended, but for the one that asks, pytest's and those that are known."""
    current = asyncio.current_task()
    tasks = asyncio.all_tasks() - {current, *known}
    return {task for task in tasks if getattr(task.get_coro(), "__name__", "") != "_call_in_runner_task"}


# ------------------------------------------------------------------------- one thing at every possible moment


class StepLoop(VirtualTimeLoop):
    """Virtual time, in which `strike` happens just before one of the callbacks that are run after it was set.

    Args:
        step: Before which one of them, counted from 1; 0 is never.
    """

    def __init__(self, step: int = 0) -> None:
        self.ran = 0
        self.strike: Callable[[], object] | None = None
        self.struck = False
        self.struck_at: float | None = None
        self._steps_left = step
        super().__init__()

    def _call_soon(
        self, callback: Callable[..., object], args: tuple[object, ...], context: Context | None
    ) -> asyncio.Handle:
        handle: asyncio.Handle = super()._call_soon(self._run, (callback, args), context)  # type: ignore[misc]
        return handle

    def call_at(
        self, when: float, callback: Callable[[*ArgsT], object], *args: *ArgsT, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._run, callback, args, context=context)

    def _run(self, callback: Callable[..., object], args: tuple[object, ...]) -> None:
        self.ran += 1
        if self.strike is not None and not self.struck:
            self._steps_left -= 1
            if not self._steps_left:
                self.struck = True
                self.struck_at = self.time()
                self.strike()
        callback(*args)


def at_every_step(scenario: Callable[[StepLoop], Coroutine[Any, Any, None]]) -> int:
    """Run a scenario once for each callback that its loop runs; before that one, its `strike` happens.

    The scenario sets `loop.strike` as soon as there is something to strike at, and checks by itself whether
    the end was right. Among the runs is every order in which two things of one turn of the loop can happen.

    Args:
        scenario: What is run, on a loop of its own each time.

    Returns:
        How many runs there were.
    """
    for step in itertools.count(1):
        loop = StepLoop(step)
        with asyncio.Runner(loop_factory=partial(_same, loop)) as runner:
            runner.run(_unstruck_at_the_end(scenario, loop))
        if not loop.struck:
            return step
    raise AssertionError


async def _unstruck_at_the_end(
    scenario: Callable[[StepLoop], Coroutine[Any, Any, None]], loop: StepLoop
) -> None:
    try:
        await scenario(loop)
    finally:
        loop.strike = None


def _same(loop: StepLoop) -> StepLoop:
    return loop


class Struck(Generic[ResultT]):
    """Awaits a coroutine, and lets one of its waits fail.

    Args:
        coroutine: What is awaited.
        wait: Which of its waits fails, counted from 1.
        error: How.
        early: Whether the wait fails before it has begun; else when it is over.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, ResultT], wait: int, error: BaseException, *, early: bool
    ) -> None:
        self.coroutine = coroutine
        self.wait = wait
        self.error = error
        self.early = early
        self.struck = False

    def __await__(self) -> Generator[Any, Any, ResultT]:
        go_on = partial(self.coroutine.send, None)
        step = go_on
        for number in itertools.count(1):
            try:
                future = step()
            except StopIteration as end:
                result: ResultT = end.value
                return result
            if number != self.wait or not self.early:
                try:
                    yield future
                except BaseException as error:
                    step = partial(self.coroutine.throw, error)
                    continue
            step = go_on
            if number == self.wait:
                self.struck = True
                step = partial(self.coroutine.throw, self.error)
        raise AssertionError


# ---------------------------------------------------------------------------------------------- over the wire

ERAS: Final = pytest.mark.parametrize("era", ["auto", "legacy"])
"""Clients of the protocol of today, and those that begin with a handshake."""


@asynccontextmanager
async def connected(server: FrontMCP, era: str, **options: Any) -> AsyncIterator[Client]:
    """A client in this process; before it leaves, its server has to be clean."""
    server.guard.use_clock(VirtualClock())
    async with server.connect(mode=era, **options) as client:
        yield client
        # Time does not pass before everybody, threads included, is done with what can be done now.
        await asyncio.sleep(0.001)
        assert_clean(server.guard)


def code_of(result: CallToolResult) -> str:
    """`ok`, the code of a refusal, or `error` for a tool's failure."""
    if not result.is_error:
        return "ok"
    return str((result.meta or {}).get("code", "error"))


def text_of(result: CallToolResult) -> str:
    """What the model reads."""
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))
