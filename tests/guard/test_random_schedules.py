"""Whatever comes in whatever order: no limit is broken, every call is answered once, nothing is left."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontmcp_py.call import Call, Caller
from frontmcp_py.errors import GuardError, QueueTimeout
from frontmcp_py.guard import Guard, Run
from frontmcp_py.policy import Admission, Concurrency, Policy, RateLimit, Throttle, Timeout
from frontmcp_py.signal import AbortSignal
from frontmcp_py.testing import run_virtual, settle
from tests.guard.support import FREE, inside, is_clean, new_guard, now
from tests.reconcile import adds_up

SHELL = Concurrency(2, key="shell", queue_timeout=None)
THROTTLE = Throttle(
    global_rate_limit="40/minute",
    global_concurrency=Concurrency(5, queue_timeout=6),
    admission=Admission(max_active=6, reserved=2, max_queued=6, queue_timeout=10),
)
POLICIES = {
    "free": FREE,
    "mutex": Policy(concurrency=1),
    "patient": Policy(concurrency=Concurrency(1, queue_timeout=4), on_cancel="cancel"),
    "shell": Policy(concurrency=SHELL, timeout=3),
    "both": Policy(concurrency=[Concurrency(1, key="patient", queue_timeout=8), SHELL]),
    "users": Policy(
        RateLimit(3, 5, "user_id", "moving-window"), Concurrency(1, partition_by="user_id", queue_timeout=5)
    ),
    "stop": Policy(priority="control"),
    "strict": Policy(concurrency=SHELL, priority="control", timeout=Timeout(2, cancel_after=1)),
    "parent": Policy(timeout=9),
}
# Which limits a tool's calls count against, and how many may run at once.
SLOTS = {
    "mutex": {"mutex": 1},
    "patient": {"patient": 1},
    "shell": {"shell": 2},
    "both": {"patient": 1, "shell": 2},
    "strict": {"shell": 2},
}
CONTROL = {"stop", "strict"}


@dataclass(frozen=True)
class Step:
    """One call: how long after the last one it comes, and what becomes of it."""

    gap: float
    tool: str
    seconds: float
    user: str
    aborted_after: float | None
    cancelled_after: float | None
    is_stubborn: bool


quarters = st.integers(0, 24).map(lambda quarter: quarter / 4)
moments = st.one_of(st.none(), st.none(), quarters)
steps = st.lists(
    st.builds(
        Step,
        gap=quarters.map(lambda gap: gap / 4),
        tool=st.sampled_from(sorted(POLICIES)),
        seconds=quarters,
        user=st.sampled_from("ab"),
        aborted_after=moments,
        cancelled_after=moments,
        is_stubborn=st.booleans(),
    ),
    max_size=40,
)


class World:
    """A guard, and who is at work in it."""

    def __init__(self) -> None:
        self.guard: Guard = new_guard(THROTTLE)
        self.plans = {tool: self.guard.bind(tool, policy) for tool, policy in POLICIES.items()}
        self.at_work: Counter[str] = Counter()

    async def call(self, step: Step) -> None:
        signal = AbortSignal() if step.aborted_after is not None else None
        call = Call(step.tool, {}, Caller(user_id=step.user))
        plan = self.plans[step.tool]
        inline = plan.cancels and signal is None and plan.timeout_s is None
        came = now()
        task = asyncio.create_task(
            self.guard.call(plan, call, lambda run: self._body(run, step), signal=signal, inline=inline)
        )
        loop = asyncio.get_running_loop()
        if signal is not None:
            loop.call_later(step.aborted_after or 0, signal.abort)
        if step.cancelled_after is not None:
            loop.call_later(step.cancelled_after, task.cancel)
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            assert isinstance(error, GuardError), error
            if isinstance(error, QueueTimeout):
                assert (now() - came) * 1000 == error.waited_ms
        adds_up(self.guard)

    async def _body(self, run: Run, step: Step) -> None:
        taken = [*SLOTS.get(step.tool, {}), f"users:{step.user}" if step.tool == "users" else "other"]
        taken.append("control" if step.tool in CONTROL else "normal")
        self.at_work.update(taken)
        self._check()
        end = now() + step.seconds
        try:
            if step.tool == "parent":
                await self._call_others(run, step)
            while now() < end:
                try:
                    await asyncio.sleep(end - now())
                except asyncio.CancelledError:
                    if not step.is_stubborn:
                        raise
        finally:
            self.at_work.subtract(taken)

    async def _call_others(self, run: Run, step: Step) -> None:
        for tool in ("mutex", "patient", "both"):
            child = Step(0, tool, step.seconds / 4, step.user, None, None, is_stubborn=step.is_stubborn)
            try:
                await inside(
                    self.guard, run, self.plans[tool], lambda run, child=child: self._body(run, child)
                )
            except GuardError:
                pass

    def _check(self) -> None:
        """No limit is broken, not by work either that was answered long ago."""
        for slots in SLOTS.values():
            for slot, number in slots.items():
                assert self.at_work[slot] <= number
        assert max(self.at_work["users:a"], self.at_work["users:b"]) <= 1
        statistics = self.guard.statistics()
        assert statistics.places <= 6
        assert statistics.waiting <= 6
        adds_up(self.guard)


@pytest.mark.parametrize("leaves_early", [False, True])
@settings(max_examples=60)
@given(steps)
def test_whatever_comes(leaves_early: bool, steps: list[Step]) -> None:
    async def main() -> None:
        world = World()
        async with world.guard, asyncio.TaskGroup() as group:
            for step in steps:
                await asyncio.sleep(step.gap)
                group.create_task(world.call(step))
            if leaves_early:
                # The last user goes while calls still run and wait.
                await world.guard.__aexit__(None, None, None)
                await world.guard.__aenter__()
        await asyncio.sleep(60)
        await settle()
        assert not +world.at_work
        is_clean(world.guard)

    run_virtual(main)
