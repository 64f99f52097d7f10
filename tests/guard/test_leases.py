"""What an instance has in a store: kept alive, and given up, whatever is lost or comes late.

The store is in this process, so that time is virtual and each question can be lost, or be slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from frontmcp_py import (
    AbortSignal,
    Admission,
    Cancelled,
    Guard,
    GuardStorageUnavailable,
    LeaseLost,
    Overloaded,
)
from frontmcp_py.storage import Answer, Ask, Renewed, StorageUnavailable, Turn
from frontmcp_py.testing import settle, virtual_time
from frontmcp_py.testing.in_process import InProcessStorage, InProcessStore
from tests.guard.support import Held
from tests.instances import slot


class Line(InProcessStorage):
    """A line to the store that can be told to fail.

    Attributes:
        lost: So many of the next starts and turns are asked for in vain.
        slow: How long the answer to a start is on its way, in seconds.
        hangs: So many of the next renewals get no answer at all.
        opened: Whether it is open.
        asked: How many starts were asked for.
        fails: So many of the next renewals fail in a way that no storage should.
    """

    def __init__(self, store: InProcessStore) -> None:
        super().__init__(store)
        self.lost = 0
        self.slow = 0.0
        self.hangs = 0
        self.opened = False
        self.asked = 0
        self.fails = 0

    async def open(self) -> None:
        await super().open()
        self.opened = True

    async def close(self) -> None:
        self.opened = False

    async def take(self, ask: Ask) -> Answer:
        self.asked += 1
        if self.lost:
            self.lost -= 1
            raise StorageUnavailable("lost")
        answer = await super().take(ask)
        await asyncio.sleep(self.slow)
        return answer

    async def release(self, lease: str, *, undo: bool = False) -> Sequence[Turn]:
        turns = await super().release(lease, undo=undo)
        await asyncio.sleep(self.slow)
        return turns

    async def renew(self, held: Sequence[str], waiting: Sequence[str]) -> Renewed:
        if self.fails:
            self.fails -= 1
            raise ValueError("a fault of the storage")
        if self.hangs and held:
            self.hangs -= 1
            await asyncio.sleep(1000)
        return await super().renew(held, waiting)


def on(line: Line, **options: Any) -> Guard:
    return Guard({"fallback": "error", **options}, storage=line)


async def ended(*calls: Held) -> None:
    for call in calls:
        call.let_go()
    await asyncio.gather(*[call.task for call in calls], return_exceptions=True)


@virtual_time
async def test_a_turn_that_is_asked_for_again_in_vain_is_not_lost() -> None:
    store = InProcessStore()
    one, other = Line(store), Line(store)
    async with on(one) as a, on(other) as b:
        first = Held(a, "x", slot(1))
        await settle()
        second = Held(b, "x", slot(1, 60))
        await settle()
        assert b._shared is not None
        (run,) = b._shared._leases.line.values()
        assert run.stake is not None
        # As if this process had stood still since, so that the turn is heard too late to be relied on.
        run.stake.confirmed_at -= 8
        other.lost = 1
        await ended(first)
        assert second.waits
        await asyncio.sleep(2)
        assert second.runs
        await ended(second)


@virtual_time
async def test_a_call_of_a_guard_that_was_left_hears_its_turn() -> None:
    store = InProcessStore()
    line = Line(store)
    left = on(line)
    async with on(Line(store)) as b:
        holder = Held(b, "x", slot(1))
        await settle()
        async with left:
            pass
        waiter = Held(left, "x", slot(1, 60))
        await asyncio.sleep(15)
        await ended(holder)
        await settle()
        assert waiter.runs
        await ended(waiter)
    await asyncio.sleep(5)
    assert not line.opened


@pytest.mark.parametrize("turns", range(8))
@virtual_time
async def test_whoever_enters_while_another_leaves_is_served(turns: int) -> None:
    store = InProcessStore()
    line = Line(store)
    guard = on(line)
    async with on(Line(store)) as b:
        holder = Held(b, "x", slot(1))
        await settle()

        async def come_and_go() -> None:
            async with guard:
                call = Held(guard, "x", slot(1, 60))
                await settle()
                call.task.cancel()

        going = asyncio.ensure_future(come_and_go())
        await settle()
        for _ in range(turns):
            await asyncio.sleep(0)
        async with guard:
            await going
            waiter = Held(guard, "x", slot(1, 60))
            await asyncio.sleep(15)
            await ended(holder)
            await settle()
            assert waiter.runs
            assert line.opened
            await ended(waiter)
    assert not line.opened


@pytest.mark.parametrize(("lease", "storage_timeout"), [(10, 0.2), (1, 0.2), (1, 0.5), (10, 5), (1, 60)])
@virtual_time
async def test_a_renewal_that_hangs_does_not_cost_the_leases(lease: float, storage_timeout: float) -> None:
    store = InProcessStore(lease=lease)
    one, other = Line(store), Line(store)
    options = {"lease": lease, "storage_timeout": storage_timeout}
    async with on(one, **options) as a, on(other, **options) as b:
        holder = Held(a, "x", slot(1))
        await settle()
        waiter = Held(b, "x", slot(1, 29))
        await settle()
        one.hangs = 1
        await asyncio.sleep(25)
        assert holder.runs
        assert waiter.waits
        await ended(holder, waiter)


@virtual_time
async def test_a_store_whose_answers_come_too_late_for_the_lease_is_one_that_is_down() -> None:
    line = Line(InProcessStore(lease=1))
    async with on(line, lease=1, storage_timeout=60) as guard:
        line.slow = 0.9
        call = Held(guard, "x", slot(1))
        await asyncio.sleep(5)
        assert isinstance(call.task.exception(), GuardStorageUnavailable)
        assert guard.statistics().outages == 1


@virtual_time
async def test_an_observed_call_that_goes_while_it_asks_leaves_nothing() -> None:
    store = InProcessStore()
    line = Line(store)
    async with on(Line(store)) as b, on(line, mode="observe", storage_timeout=5) as observing:
        holder = Held(b, "x", slot(1))
        await settle()
        line.slow = 1
        call = Held(observing, "x", slot(1, 0))
        # It has been told that it would be refused, and takes the slot all the same.
        await asyncio.sleep(1.5)
        call.task.cancel()
        await asyncio.sleep(5)
        assert observing.statistics().asking == 0
        await ended(holder)
        after = Held(b, "x", slot(1))
        await settle()
        assert after.runs
        await ended(after)


@pytest.mark.parametrize("noticed", [True, False], ids=["suspended", "paused from outside"])
@virtual_time
async def test_a_machine_that_was_suspended_has_lost_its_slots(
    noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop's clock stands still meanwhile."""
    loop, suspended = asyncio.get_running_loop(), 0.0
    monkeypatch.setattr("frontmcp_py.guard.leases.suspended_s", lambda: suspended if noticed else 0.0)
    store = InProcessStore(now_us=lambda: round((loop.time() + suspended) * 1_000_000))
    async with on(Line(store)) as b, on(Line(store)) as a:
        sleeper = Held(a, "x", slot(1))
        waiter = Held(b, "x", slot(1, 60))
        await asyncio.sleep(5)
        assert a._shared is not None
        (run,) = a._shared._leases.held.values()
        suspended = 20.0
        await asyncio.sleep(2)
        assert isinstance(run.signal.reason, LeaseLost)
        assert waiter.runs
        await ended(sleeper, waiter)


@virtual_time
async def test_a_call_that_asks_when_the_store_goes_is_forgotten() -> None:
    line = Line(InProcessStore())
    async with on(line, fallback="memory") as guard:
        line.lost = 1
        call = Held(guard, "x", slot(1))
        await settle()
        assert call.runs
        await ended(call)
        assert guard._shared is not None
        assert not guard._shared._asked


@virtual_time
async def test_a_turn_that_is_told_again_and_again_is_asked_for_once() -> None:
    store = InProcessStore(latency=0.005)
    one, other = Line(store), Line(store)
    async with on(one) as a, on(other) as b:
        first = Held(a, "x", slot(1))
        await asyncio.sleep(0.1)
        second = Held(b, "x", slot(1, 60))
        await asyncio.sleep(0.1)
        assert b._shared is not None
        (run,) = b._shared._leases.line.values()
        assert run.stake is not None
        run.stake.confirmed_at -= 8
        turn = Turn(run.stake.lease, run.stake.attempt)
        asked = other.asked
        first.let_go()
        await first.task
        for _ in range(5):
            b._shared.hear(turn)
            await asyncio.sleep(0.002)
        await asyncio.sleep(1)
        assert second.runs
        assert other.asked == asked + 1
        await ended(second)


@virtual_time
async def test_a_caller_whose_call_is_called_off_does_not_wait_for_the_store() -> None:
    loop = asyncio.get_running_loop()
    line = Line(InProcessStore())
    async with on(line, storage_timeout=60) as guard:
        line.slow = 30
        signal = AbortSignal()
        aborted, drained = Held(guard, "x", slot(1), signal=signal), Held(guard, "y", slot(1))
        await asyncio.sleep(1)
        signal.abort(ValueError("enough"))
        await settle()
        assert isinstance(aborted.task.exception(), Cancelled)
        ending = asyncio.ensure_future(guard.drain())
        await settle()
        assert isinstance(drained.task.exception(), Overloaded)
        assert loop.time() < 2
        line.slow = 0
        await ending
        assert guard.statistics().asking == 0
        assert guard.statistics().places == 0


@virtual_time
async def test_a_store_that_answers_and_takes_nothing_is_down_until_it_takes_again() -> None:
    line = Line(InProcessStore())
    async with on(line) as guard:
        line.lost = 10**6
        refused = Held(guard, "x", slot(1))
        await asyncio.sleep(20)
        assert isinstance(refused.task.exception(), GuardStorageUnavailable)
        assert guard.statistics().storage == "down"
        assert guard.statistics().outages == 1
        line.lost = 0
        await asyncio.sleep(2)
        assert guard.statistics().storage == "up"


@virtual_time
async def test_the_beat_goes_on_after_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    store = InProcessStore()
    line = Line(store)
    async with on(line) as a, on(Line(store)) as b:
        holder = Held(a, "x", slot(1))
        await settle()
        line.fails = 1
        waiter = Held(b, "x", slot(1, 29))
        await asyncio.sleep(25)
        assert holder.runs
        assert waiter.waits
        await ended(holder, waiter)
    assert "a fault of the storage" in caplog.text


@virtual_time
async def test_the_first_call_that_may_not_wait_for_a_shared_slot_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    admission = Admission(max_active=4, reserved=0, max_queued=1)
    async with on(Line(InProcessStore()), admission=admission) as guard:
        holder, waiter = Held(guard, "x", slot(1)), Held(guard, "x", slot(1, 20))
        await settle()
        refused = Held(guard, "x", slot(1, 20))
        await settle()
        assert str(refused.task.exception()).startswith("Server overloaded: 1 calls running, 1 waiting.")
        assert "admission.max_queued 1" in caplog.text
        await ended(holder, waiter)
