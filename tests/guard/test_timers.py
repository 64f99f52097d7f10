from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from frontmcp_py.guard.timers import Timers
from frontmcp_py.testing import run_virtual, virtual_time
from tests.guard.support import now


class Bell:
    """Timers, and what they rang for."""

    def __init__(self) -> None:
        self.rung: list[tuple[str, float]] = []
        self.timers: Timers[str] = Timers(asyncio.get_running_loop(), self._ring)

    def _ring(self, item: str) -> None:
        self.rung.append((item, now()))


@virtual_time
async def test_it_rings_once_for_each_when_its_time_has_come() -> None:
    bell = Bell()
    bell.timers.set(3, "a")
    await asyncio.sleep(1)
    bell.timers.set(3, "b")
    bell.timers.set(1, "c")
    assert len(bell.timers) == 3
    await asyncio.sleep(100)
    assert bell.rung == [("c", 2), ("a", 3), ("b", 4)]
    assert len(bell.timers) == 0


@virtual_time
async def test_it_does_not_ring_for_what_was_dropped() -> None:
    bell = Bell()
    for item in "abc":
        bell.timers.set(3, item)
    await asyncio.sleep(1)
    assert bell.timers.drop(3, "a") == 2
    assert bell.timers.drop(3, "a") is None
    assert bell.timers.drop(9, "b") is None
    await asyncio.sleep(100)
    assert bell.rung == [("b", 3), ("c", 3)]


@virtual_time
async def test_what_is_dropped_while_it_rings_for_another_of_that_moment_is_not_rung_for() -> None:
    rung: list[str] = []

    def ring(item: str) -> None:
        rung.append(item)
        timers.drop(3, "b")

    timers: Timers[str] = Timers(asyncio.get_running_loop(), ring)
    for item in "abc":
        timers.set(3, item)
    await asyncio.sleep(10)
    assert rung == ["a", "c"]


@virtual_time
async def test_it_rings_no_more_when_it_is_closed() -> None:
    bell = Bell()
    bell.timers.set(3, "a")
    bell.timers.close()
    await asyncio.sleep(10)
    assert bell.rung == []


@virtual_time
async def test_ever_new_durations_do_not_make_it_grow() -> None:
    bell = Bell()
    bell.timers.set(1000, "stays")
    for number in range(2000):
        bell.timers.set(1 + number / 4096, f"item-{number}")
        bell.timers.drop(1 + number / 4096, f"item-{number}")
    assert len(bell.timers._queues) <= 257
    await asyncio.sleep(1001)
    assert bell.rung == [("stays", 1000)]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 2, 5]), st.booleans()), max_size=30))
def test_it_rings_for_exactly_those_that_were_not_dropped_and_at_their_time(
    steps: list[tuple[int, int, bool]],
) -> None:
    async def main() -> None:
        bell = Bell()
        expected: dict[str, float] = {}
        for number, (gap, seconds, drops) in enumerate(steps):
            await asyncio.sleep(gap)
            item = str(number)
            bell.timers.set(seconds, item)
            expected[item] = now() + seconds
            earlier = str(number // 2)
            if drops and bell.timers.drop(steps[number // 2][1], earlier) is not None:
                del expected[earlier]
        await asyncio.sleep(10)
        assert dict(bell.rung) == expected
        assert len(bell.rung) == len(expected)

    run_virtual(main)
