"""What every storage has to do: a test for each promise of `Storage`.

A subclass says how instances are made, and inherits the tests. It is collected by pytest with a plug-in that
runs async tests (anyio's, `pytest-asyncio`), or by `unittest`, as a second base beside
`IsolatedAsyncioTestCase`. `pytest.register_assert_rewrite("frontmcp_py.testing.contract")`, before the
import, lets pytest say more about a failure.

The time is that of the suite: nothing here sleeps.
"""

from __future__ import annotations

import asyncio
import itertools
import unittest
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from frontmcp_py.policy import STRATEGIES
from frontmcp_py.scheduler import CONTROL, NESTED
from frontmcp_py.storage import (
    Ask,
    NoSlot,
    Queued,
    RateNeed,
    Renewed,
    SlotNeed,
    Started,
    Storage,
    TooOften,
    Turn,
    Void,
)

from . import START

LEASE: Final = 10.0
"""The lease that instances are made with, in seconds."""

SECOND: Final = 1_000_000
MINUTE: Final = 60 * SECOND

_START_US: Final = round(START.timestamp()) * SECOND

# Bounds a test that waits for a message in vain.
_PATIENCE: Final = 10.0

# What stores, patterns and keys of our own give a meaning to.
_ODD_KEYS: Final = (
    *(f"a{odd}b" for odd in ":|{}*?[]%\\'\"/ \n\x00\u0308\u2028🙂"),
    *("", " ", "a", "A", "a:b:0", "{a}b", "0", "-1", "nil"),
)


def rate(
    key: str = "rate", most: int = 1, window_us: int = MINUTE, strategy: str = "fixed-window"
) -> RateNeed:
    """A rate limit to ask for."""
    return RateNeed(key, strategy, most, window_us)


def slot(
    key: str = "slot", capacity: int = 1, *, no_wait: bool = False, max_queued: int | None = None
) -> SlotNeed:
    """A slot to ask for."""
    return SlotNeed(key, capacity, no_wait, max_queued)


class Ear:
    """What an instance is told."""

    def __init__(self) -> None:
        self._heard: asyncio.Queue[Turn] = asyncio.Queue()
        self.hear: Callable[[Turn], None] = self._heard.put_nowait
        self.ready: asyncio.Event = asyncio.Event()

    async def turn(self) -> Turn:
        """The next turn."""
        return await asyncio.wait_for(self._heard.get(), _PATIENCE)


class StorageContract:
    """The tests. A subclass says how instances are made, and what its store cannot do.

    Attributes:
        resolution_us: The smallest difference that the store's windows know, in microseconds.
        time_can_be_set: Whether instances tell the time by what they are given. If not, what needs that is
            skipped.
        is_atomic: Whether a question is one step that may be repeated. If not, what needs that is skipped.
        longest_window_us: The longest window that can be counted, in microseconds.
    """

    resolution_us: int = 1
    time_can_be_set: bool = True
    is_atomic: bool = True
    longest_window_us: int = 366 * 24 * 60 * MINUTE

    def make_instances(self, count: int, *, lease: float, now_us: Callable[[], int]) -> Sequence[Storage]:
        """Make instances that share one store, which is empty at the beginning of each test.

        Args:
            count: How many.
            lease: Seconds that a lease lasts.
            now_us: The time, in microseconds since the Unix epoch.
        """
        raise NotImplementedError

    # -- parts ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def instances(self, count: int = 1) -> AsyncGenerator[Sequence[Storage]]:
        """Instances that are open."""
        self.now_us: int = _START_US
        self._names = itertools.count(1)
        made = self.make_instances(count, lease=LEASE, now_us=lambda: self.now_us)
        try:
            for each in made:
                await each.open()
            yield made
        finally:
            for each in made:
                await each.close()

    @asynccontextmanager
    async def instance(self) -> AsyncGenerator[Storage]:
        """One instance that is open."""
        async with self.instances() as (storage,):
            yield storage

    @asynccontextmanager
    async def slot_instances(self, count: int = 1) -> AsyncGenerator[Sequence[Storage]]:
        """Instances that share slots; skips the test where they cannot."""
        async with self.instances(count) as made:
            if not all(each.shares_slots for each in made):
                raise unittest.SkipTest("slots are not shared here")
            yield made

    @asynccontextmanager
    async def slot_instance(self) -> AsyncGenerator[Storage]:
        """One instance that has slots; skips the test where it has none."""
        async with self.slot_instances() as (storage,):
            yield storage

    @asynccontextmanager
    async def listening(self, storage: Storage) -> AsyncGenerator[Ear]:
        """What an instance is told, from now on."""
        ear = Ear()
        listener = asyncio.create_task(storage.listen(ear.hear, ear.ready.set))
        try:
            await asyncio.wait_for(ear.ready.wait(), _PATIENCE)
            yield ear
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    def later(self, microseconds: float) -> None:
        """Let time pass."""
        if not self.time_can_be_set:
            raise unittest.SkipTest("the time cannot be set here")
        self.now_us += round(microseconds)

    def atomic(self) -> None:
        """Skip the test where a question is not one step."""
        if not self.is_atomic:
            raise unittest.SkipTest("a question is not one step here")

    def ask(self, *needs: RateNeed | SlotNeed, lease: str = "") -> Ask:
        """A question for these needs."""
        return Ask(
            lease or f"call-{next(self._names)}",
            rates=tuple(need for need in needs if isinstance(need, RateNeed)),
            slots=tuple(need for need in needs if isinstance(need, SlotNeed)),
        )

    async def start(self, storage: Storage, *needs: RateNeed | SlotNeed, force: bool = False) -> Ask:
        """A call that starts."""
        ask = replace(self.ask(*needs), force=force)
        assert isinstance(await storage.take(ask), Started)
        return ask

    async def queue(
        self, storage: Storage, *needs: RateNeed | SlotNeed, control: bool = False, nested: bool = False
    ) -> Ask:
        """A call that has to wait."""
        ask = self.ask(*needs)
        if control or nested:
            ask = replace(ask, rank=NESTED if nested else CONTROL)
        assert isinstance(await storage.take(ask), Queued)
        return ask

    async def is_full(self, storage: Storage, *slots: SlotNeed) -> bool:
        """Whether a newcomer finds no place; changes nothing."""
        probe = replace(self.ask(*slots), may_wait=False)
        if isinstance(await storage.take(probe), NoSlot):
            return True
        await storage.release(probe.lease, undo=True)
        return False

    async def left(self, storage: Storage, need: RateNeed) -> int:
        """How many calls a rate limit has room for; changes nothing."""
        probes: list[str] = []
        while isinstance(await storage.take(probe := self.ask(need)), Started):
            probes.append(probe.lease)
        for lease in probes:
            await storage.release(lease, undo=True)
        return len(probes)

    async def wait_of(self, storage: Storage, need: RateNeed) -> int:
        """The wait that a refused call is told, in microseconds."""
        answer = await storage.take(self.ask(need))
        assert isinstance(answer, TooOften)
        return answer.wait_us

    def strategies(self, storage: Storage) -> list[str]:
        """The strategies that are counted here."""
        return [each for each in STRATEGIES if storage.cannot_count(each, MINUTE) is None]

    def need_strategy(self, storage: Storage, strategy: str) -> None:
        """Skip the test where this strategy is not counted."""
        if strategy not in self.strategies(storage):
            raise unittest.SkipTest(f"no {strategy} here")

    # -- rates ---------------------------------------------------------------------------------

    async def test_several_instances_enforce_one_limit(self) -> None:
        async with self.instances(2) as (one, two):
            answers = [await storage.take(self.ask(rate(most=2))) for storage in (one, two, one, two, one)]
        assert [type(answer) for answer in answers] == [Started, Started, TooOften, TooOften, TooOften]

    async def test_calls_that_come_at_once_are_counted_one_by_one(self) -> None:
        async with self.instances(2) as made:
            asked = [made[nth % 2].take(self.ask(rate(most=7))) for nth in range(30)]
            answers = await asyncio.gather(*asked)
        assert sum(isinstance(answer, Started) for answer in answers) == 7

    async def test_a_call_without_needs_starts(self) -> None:
        async with self.instance() as storage:
            assert isinstance(await storage.take(self.ask()), Started)

    async def test_a_refused_call_consumes_nothing_from_any_limit(self) -> None:
        async with self.instance() as storage:
            self.atomic()
            for strategy in self.strategies(storage):
                wide, narrow = rate(f"wide {strategy}", 9, strategy=strategy), rate(f"narrow {strategy}")
                await self.start(storage, wide, narrow)
                for _ in range(5):
                    assert isinstance(await storage.take(self.ask(wide, narrow)), TooOften)
                    assert isinstance(await storage.take(self.ask(narrow, wide)), TooOften)
                assert await self.left(storage, wide) == 8

    async def test_a_refused_call_extends_nothing(self) -> None:
        async with self.instance() as storage:
            for strategy in self.strategies(storage):
                need = rate(strategy, strategy=strategy)
                await self.start(storage, need)
                wait = await self.wait_of(storage, need)
                for _ in range(5):
                    self.later(SECOND)
                    assert await self.wait_of(storage, need) == wait - SECOND
                    wait -= SECOND

    async def test_of_several_exhausted_limits_the_longest_wait_is_told(self) -> None:
        async with self.instance() as storage:
            self.later(SECOND)
            hour, minute = rate("hour", window_us=60 * MINUTE), rate("minute")
            await self.start(storage, hour, minute)
            assert await storage.take(self.ask(hour, minute)) == TooOften(0, 60 * MINUTE - SECOND)
            assert await storage.take(self.ask(minute, hour)) == TooOften(1, 60 * MINUTE - SECOND)
            assert await storage.take(self.ask(minute)) == TooOften(0, MINUTE - SECOND)

    async def test_a_rate_refusal_goes_before_a_missing_slot(self) -> None:
        async with self.slot_instance() as storage:
            await self.start(storage, rate(), slot())
            refused = self.ask(rate(), slot(no_wait=True))
            assert isinstance(await storage.take(refused), TooOften)

    async def test_a_fixed_window_lines_up_with_the_clock(self) -> None:
        async with self.instance() as storage:
            self.need_strategy(storage, "fixed-window")
            self.later(MINUTE - SECOND)
            need = rate(most=2)
            await self.start(storage, need)
            await self.start(storage, need)
            assert await self.wait_of(storage, need) == SECOND
            self.later(SECOND)
            assert await self.left(storage, need) == 2

    async def test_a_fixed_window_of_an_odd_length_is_counted_from_the_epoch(self) -> None:
        async with self.instance() as storage:
            self.need_strategy(storage, "fixed-window")
            self.later(0)
            need = rate(window_us=7 * 60 * MINUTE)
            await self.start(storage, need)
            assert await self.wait_of(storage, need) == need.window_us - self.now_us % need.window_us

    async def test_a_moving_window_holds_for_any_span(self) -> None:
        async with self.instance() as storage:
            self.need_strategy(storage, "moving-window")
            self.later(MINUTE - SECOND)
            need = rate(most=2, strategy="moving-window")
            await self.start(storage, need)
            self.later(30 * SECOND)
            await self.start(storage, need)
            self.later(10 * SECOND)
            assert await self.wait_of(storage, need) == 20 * SECOND
            self.later(20 * SECOND)
            await self.start(storage, need)
            assert await self.wait_of(storage, need) == 30 * SECOND

    async def test_a_sliding_window_weighs_the_last_one_by_what_is_in_view(self) -> None:
        async with self.instance() as storage:
            self.need_strategy(storage, "sliding-window")
            self.later(MINUTE / 2)
            need = rate(most=10, strategy="sliding-window")
            for _ in range(10):
                await self.start(storage, need)
            self.later(MINUTE / 2 + MINUTE / 4)
            # Three quarters of ten are 7.5 calls: the third more makes it 9.5, and then there is no room.
            for _ in range(3):
                await self.start(storage, need)
            assert isinstance(await storage.take(self.ask(need)), TooOften)

    async def test_the_wait_of_a_fixed_window_is_honest(self) -> None:
        await self._honest_waits("fixed-window")

    async def test_the_wait_of_a_moving_window_is_honest(self) -> None:
        await self._honest_waits("moving-window")

    async def test_the_wait_of_a_sliding_window_is_honest(self) -> None:
        await self._honest_waits("sliding-window")

    async def _honest_waits(self, strategy: str) -> None:
        async with self.instance() as storage:
            self.need_strategy(storage, strategy)
            need = rate(most=3, window_us=MINUTE + 7, strategy=strategy)
            for gap in (1, 17 * SECOND, 3, 29 * SECOND, 0, 0, 0, 41 * SECOND, 11, 0, 0, MINUTE, 7, 7):
                self.later(gap)
                answer = await storage.take(self.ask(need))
                if isinstance(answer, TooOften):
                    assert answer.wait_us >= self.resolution_us
                    self.later(answer.wait_us - self.resolution_us)
                    assert await self.wait_of(storage, need) == self.resolution_us
                    self.later(self.resolution_us)
                    await self.start(storage, need)

    async def test_a_limit_above_which_calls_were_forced_has_an_honest_wait(self) -> None:
        async with self.instance() as storage:
            self.atomic()
            for strategy in self.strategies(storage):
                self.later(SECOND)
                need = rate(strategy, 2, strategy=strategy)
                for _ in range(5):
                    self.later(SECOND)
                    await self.start(storage, need, force=True)
                wait = await self.wait_of(storage, need)
                self.later(wait - self.resolution_us)
                assert await self.wait_of(storage, need) == self.resolution_us
                self.later(self.resolution_us)
                await self.start(storage, need)

    async def test_a_call_that_ends_stays_counted(self) -> None:
        async with self.instance() as storage:
            for strategy in self.strategies(storage):
                need = rate(strategy, strategy=strategy)
                ask = await self.start(storage, need)
                await storage.release(ask.lease)
                assert isinstance(await storage.take(self.ask(need)), TooOften)

    async def test_a_call_that_never_began_is_not_counted(self) -> None:
        async with self.instance() as storage:
            self.atomic()
            for strategy in self.strategies(storage):
                need = rate(strategy, 3, strategy=strategy)
                asks = [await self.start(storage, need) for _ in range(3)]
                await storage.release(asks[0].lease, undo=True)
                assert await self.left(storage, need) == 1

    async def test_what_is_taken_back_is_the_calls_own_count(self) -> None:
        async with self.instance() as storage:
            self.atomic()
            self.need_strategy(storage, "moving-window")
            need = rate(most=2, strategy="moving-window")
            first = await self.start(storage, need)
            self.later(30 * SECOND)
            await self.start(storage, need)
            await storage.release(first.lease, undo=True)
            await self.start(storage, need)
            assert await self.wait_of(storage, need) == MINUTE

    async def test_what_is_taken_back_late_leaves_the_window_of_now_alone(self) -> None:
        async with self.instance() as storage:
            self.atomic()
            for strategy in self.strategies(storage):
                need = rate(strategy, strategy=strategy)
                first = await self.start(storage, need)
                self.later(2 * MINUTE)
                await self.start(storage, need)
                await storage.release(first.lease, undo=True)
                assert isinstance(await storage.take(self.ask(need)), TooOften)

    async def test_a_forced_call_is_counted_without_a_look(self) -> None:
        async with self.instance() as storage:
            self.atomic()
            for strategy in self.strategies(storage):
                need = rate(strategy, 3, strategy=strategy)
                for _ in range(2):
                    await self.start(storage, need, force=True)
                assert await self.left(storage, need) == 1
                await self.start(storage, need)
                await self.start(storage, need, force=True)

    async def test_rate_keys_of_any_characters_do_not_collide(self) -> None:
        async with self.instance() as storage:
            for strategy in self.strategies(storage):
                for key in _ODD_KEYS:
                    await self.start(storage, rate(f"{strategy} {key}", strategy=strategy))
                for key in _ODD_KEYS:
                    refused = self.ask(rate(f"{strategy} {key}", strategy=strategy))
                    assert isinstance(await storage.take(refused), TooOften)

    async def test_large_limits_and_long_windows_are_counted(self) -> None:
        async with self.instance() as storage:
            for strategy in self.strategies(storage):
                most = 10_000 if strategy == "moving-window" else 10**9
                for window_us in (MINUTE, self.longest_window_us):
                    need = rate(f"{strategy} {window_us}", most, window_us, strategy)
                    for _ in range(3):
                        await self.start(storage, need)

    async def test_a_store_can_be_left_and_found_again(self) -> None:
        async with self.instance() as storage:
            await self.start(storage, rate(most=2))
            await storage.close()
            await storage.close()
            await storage.open()
            await self.start(storage, rate(most=2))
            assert isinstance(await storage.take(self.ask(rate(most=2))), TooOften)

    async def test_a_storage_says_where_it_is_and_what_it_counts(self) -> None:
        async with self.instance() as storage:
            assert storage.where
            assert self.strategies(storage)

    # -- slots ---------------------------------------------------------------------------------

    async def test_several_instances_share_the_places_of_a_slot(self) -> None:
        async with self.slot_instances(2) as (one, two):
            await self.start(one, slot(capacity=2))
            ends = await self.start(two, slot(capacity=2))
            assert await self.is_full(one, slot(capacity=2))
            assert await self.is_full(two, slot(capacity=2))
            await two.release(ends.lease)
            await self.start(one, slot(capacity=2))

    async def test_calls_that_come_at_once_never_hold_too_many_places(self) -> None:
        async with self.slot_instances(2) as made:
            asked = [made[nth % 2].take(self.ask(slot(capacity=5))) for nth in range(30)]
            answers = await asyncio.gather(*asked)
        assert sum(isinstance(answer, Started) for answer in answers) == 5
        assert sum(isinstance(answer, Queued) for answer in answers) == 25

    async def test_a_call_takes_all_its_slots_or_none(self) -> None:
        async with self.slot_instance() as storage:
            await self.start(storage, slot("b"))
            for needs, blocked in (((slot("a"), slot("b")), (1,)), ((slot("b"), slot("a")), (0,))):
                answer = await storage.take(replace(self.ask(*needs), may_wait=False))
                assert answer == NoSlot(blocked, None)
            assert not await self.is_full(storage, slot("a"))

    async def test_a_call_for_which_there_is_no_slot_is_not_counted(self) -> None:
        async with self.slot_instance() as storage:
            await self.start(storage, slot())
            for strategy in self.strategies(storage):
                need = rate(strategy, 3, strategy=strategy)
                refused = self.ask(need, slot(no_wait=True))
                assert isinstance(await storage.take(refused), NoSlot)
                assert await self.left(storage, need) == 3

    async def test_every_slot_without_room_is_named(self) -> None:
        async with self.slot_instance() as storage:
            await self.start(storage, slot("a"))
            await self.start(storage, slot("c"))
            answer = await storage.take(self.ask(slot("a"), slot("b"), slot("c")))
            assert isinstance(answer, Queued)
            assert answer.blocked == (0, 2)

    async def test_the_first_full_slot_that_lets_nobody_wait_refuses(self) -> None:
        async with self.slot_instance() as storage:
            await self.start(storage, slot("b"))
            await self.start(storage, slot("c"))
            both = self.ask(slot("a", no_wait=True), slot("b"), slot("c", no_wait=True))
            assert await storage.take(both) == NoSlot((1, 2), 2)

    async def test_a_slot_that_lets_nobody_wait_and_has_room_does_not_refuse(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot("b"))
            waits = await self.queue(storage, slot("a", no_wait=True), slot("b"))
            assert await storage.release(holder.lease) == _turns(waits)

    async def test_so_many_may_wait_over_all_instances_and_no_more(self) -> None:
        async with self.slot_instances(2) as (one, two):
            await self.start(one, slot())
            assert await one.take(self.ask(slot(max_queued=0))) == NoSlot((0,), 0)
            for storage in (one, two):
                await self.queue(storage, slot(max_queued=2))
            for storage in (one, two):
                assert await storage.take(self.ask(slot(max_queued=2))) == NoSlot((0,), 0)
            # The number is that of who asks.
            await self.queue(two, slot(max_queued=3))

    async def test_a_full_line_lets_nested_calls_in_and_does_not_count_them(self) -> None:
        async with self.slot_instance() as storage:
            await self.start(storage, slot())
            await self.queue(storage, slot(max_queued=0), nested=True)
            await self.queue(storage, slot(max_queued=1))
            await self.queue(storage, slot(max_queued=1), nested=True)
            assert isinstance(await storage.take(self.ask(slot(max_queued=1))), NoSlot)

    async def test_a_call_that_may_not_wait_is_refused_by_nobody_in_particular(self) -> None:
        async with self.slot_instance() as storage:
            await self.start(storage, slot("a"))
            await self.start(storage, slot("b"))
            answer = await storage.take(replace(self.ask(slot("a"), slot("b")), may_wait=False))
            assert answer == NoSlot((0, 1), None)

    async def test_a_waiter_holds_nothing(self) -> None:
        async with self.slot_instance() as storage:
            await self.start(storage, slot("b"))
            await self.queue(storage, rate(most=2), slot("a", 2), slot("b"))
            assert await self.left(storage, rate(most=2)) == 2
            await self.start(storage, slot("a", 2))

    async def test_slots_that_nobody_shares_do_not_hold_each_other_up(self) -> None:
        async with self.slot_instance() as storage:
            await self.start(storage, slot("a"))
            await self.queue(storage, slot("a"))
            await self.start(storage, slot("b"))

    async def test_slot_names_of_any_characters_do_not_collide(self) -> None:
        async with self.slot_instance() as storage:
            holders = [await self.start(storage, slot(key)) for key in _ODD_KEYS]
            waiters = [await self.queue(storage, slot(key)) for key in _ODD_KEYS]
            for holder, waiter in zip(holders, waiters, strict=True):
                assert await storage.release(holder.lease) == _turns(waiter)

    async def test_a_call_that_ends_twice_frees_one_place(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot())
            second, third = await self.queue(storage, slot()), await self.queue(storage, slot())
            assert await storage.release(holder.lease) == _turns(second)
            assert await storage.release(holder.lease) == ()
            assert await storage.release(holder.lease, undo=True) == ()
            assert await storage.release(second.lease) == _turns(third)

    async def test_the_end_of_a_call_that_nobody_knows_is_no_error(self) -> None:
        async with self.slot_instance() as storage:
            assert await storage.release("nobody") == ()
            assert await storage.release("nobody", undo=True) == ()
            assert await storage.pass_on("nobody", 1) == ()

    # -- the order of waiters ------------------------------------------------------------------

    async def test_who_comes_first_is_served_first_over_all_instances(self) -> None:
        async with self.slot_instances(2) as (one, two), self.listening(one) as ear:
            holder = await self.start(two, slot())
            waiters = [await self.queue(storage, slot()) for storage in (two, one, one, two, one)]
            assert await two.release(holder.lease) == _turns(waiters[0])
            assert await two.release(waiters[0].lease) == ()
            assert [await ear.turn()] == [*_turns(waiters[1])]
            assert await one.release(waiters[1].lease) == _turns(waiters[2])
            assert await two.release(waiters[2].lease) == _turns(waiters[3])
            assert await two.release(waiters[3].lease) == ()
            assert [await ear.turn()] == [*_turns(waiters[4])]

    async def test_a_free_place_is_granted_in_the_step_that_frees_it(self) -> None:
        async with self.slot_instances(2) as (one, two):
            holder = await self.start(one, slot())
            await self.queue(two, slot())
            await one.release(holder.lease)
            # Nobody told it, and still nobody can get in between.
            assert await self.is_full(one, slot())

    async def test_control_goes_before_normal_and_nested_before_both(self) -> None:
        async with self.slot_instance() as storage:
            last = await self.start(storage, slot())
            normal = [await self.queue(storage, slot()) for _ in range(2)]
            control = [await self.queue(storage, slot(), control=True) for _ in range(2)]
            nested = [await self.queue(storage, slot(), nested=True) for _ in range(2)]
            for waiter in (*nested, *control, *normal):
                assert await storage.release(last.lease) == _turns(waiter)
                last = waiter

    async def test_every_place_that_comes_free_is_used(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot("a", 2), slot("b", 2))
            await self.start(storage, slot("a", 2))
            await self.start(storage, slot("b", 2))
            waiters = [await self.queue(storage, slot(key, 2)) for key in "aabb"]
            assert await storage.release(holder.lease) == _turns(waiters[0], waiters[2])

    async def test_a_newcomer_may_not_take_the_place_that_the_first_of_a_line_keeps(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot("b"))
            first = await self.queue(storage, slot("a", 2), slot("b"))
            passes = await self.start(storage, slot("a", 2))
            behind = await self.queue(storage, slot("a", 2))
            assert await storage.release(holder.lease) == _turns(first)
            assert await storage.release(passes.lease) == _turns(behind)

    async def test_who_stands_behind_may_not_take_the_place_that_the_first_keeps(self) -> None:
        async with self.slot_instance() as storage:
            await self.start(storage, slot("b"))
            holders = [await self.start(storage, slot("a", 2)) for _ in range(2)]
            await self.queue(storage, slot("a", 2), slot("b"))
            behind = [await self.queue(storage, slot("a", 2)) for _ in range(2)]
            assert await storage.release(holders[0].lease) == ()
            assert await storage.release(holders[1].lease) == _turns(behind[0])
            assert await storage.release(behind[0].lease) == _turns(behind[1])

    async def test_only_the_first_of_a_line_keeps_a_place(self) -> None:
        async with self.slot_instance() as storage:
            await self.start(storage, slot("b"))
            for _ in range(3):
                await self.queue(storage, slot("a", 3), slot("b"))
            await self.start(storage, slot("a", 3))
            await self.start(storage, slot("a", 3))
            assert await self.is_full(storage, slot("a", 3))

    async def test_a_control_newcomer_takes_the_place_that_a_normal_waiter_keeps(self) -> None:
        async with self.slot_instance() as storage:
            await self.start(storage, slot("b"))
            await self.queue(storage, slot("a"), slot("b"))
            assert await self.is_full(storage, slot("a"))
            control = replace(self.ask(slot("a")), rank=CONTROL)
            assert isinstance(await storage.take(control), Started)

    async def test_a_control_newcomer_leaves_the_place_that_a_control_waiter_keeps(self) -> None:
        async with self.slot_instance() as storage:
            await self.start(storage, slot("b"))
            await self.queue(storage, slot("a"), slot("b"), control=True)
            await self.queue(storage, slot("a"), control=True)

    async def test_a_nested_call_takes_a_place_that_somebody_keeps(self) -> None:
        async with self.slot_instance() as storage:
            await self.start(storage, slot("b"))
            await self.queue(storage, slot("a"), slot("b"), control=True)
            nested = replace(self.ask(slot("a")), rank=NESTED)
            assert isinstance(await storage.take(nested), Started)

    async def test_a_nested_waiter_keeps_no_place(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot("b"))
            nested = await self.queue(storage, slot("a"), slot("b"), nested=True)
            passes = await self.start(storage, slot("a"))
            assert await storage.release(holder.lease) == ()
            assert await storage.release(passes.lease) == _turns(nested)

    async def test_a_waiter_that_gives_up_lets_those_behind_it_start(self) -> None:
        for undo in (False, True):
            async with self.slot_instance() as storage:
                key = f"a {undo}"
                await self.start(storage, slot(f"b {undo}"))
                first = await self.queue(storage, slot(key), slot(f"b {undo}"))
                behind = await self.queue(storage, slot(key))
                assert await storage.release(first.lease, undo=undo) == _turns(behind)
                assert await storage.release(first.lease, undo=undo) == ()

    async def test_many_waiters_are_served_in_order(self) -> None:
        async with self.slot_instance() as storage:
            last = await self.start(storage, slot())
            waiters = [await self.queue(storage, slot()) for _ in range(150)]
            for waiter in waiters:
                assert await storage.release(last.lease) == _turns(waiter)
                last = waiter

    async def test_nobody_starves_behind_many_who_are_held_up_elsewhere(self) -> None:
        async with self.slot_instance() as storage:
            both = (slot("a", 2), slot("b"))
            blocker = await self.start(storage, slot("b"))
            users = [await self.start(storage, slot("a", 2)) for _ in range(2)]
            waiters = [await self.queue(storage, *both) for _ in range(80)]
            last = await self.queue(storage, slot("a", 2))
            running = [blocker.lease, *(user.lease for user in users)]
            started: list[str] = []
            while running:
                turns = [turn.lease for turn in await storage.release(running.pop(0))]
                running += turns
                started += turns
            assert [lease for lease in started if lease != last.lease] == [each.lease for each in waiters]
            assert last.lease in started

    # -- rates at the turn of a waiter -----------------------------------------------------------

    async def test_a_waiter_is_counted_when_it_starts(self) -> None:
        async with self.slot_instance() as storage:
            for strategy in self.strategies(storage):
                need, place = rate(strategy, 2, strategy=strategy), slot(strategy)
                holder = await self.start(storage, place)
                waiter = await self.queue(storage, need, place)
                assert await self.left(storage, need) == 2
                assert await storage.release(holder.lease) == _turns(waiter)
                assert await self.left(storage, need) == 1
                await storage.release(waiter.lease, undo=True)
                assert await self.left(storage, need) == 2

    async def test_a_waiter_whose_rate_has_run_out_is_refused_and_the_next_starts_in_the_same_step(
        self,
    ) -> None:
        async with self.slot_instance() as storage:
            self.later(SECOND)
            holder = await self.start(storage, slot())
            refused = await self.queue(storage, rate("other", 5), rate(), slot())
            starts = await self.queue(storage, slot())
            await self.start(storage, rate())
            refusal = Turn(refused.lease, 1, TooOften(1, MINUTE - SECOND))
            assert await storage.release(holder.lease) == (refusal, *_turns(starts))
            assert await self.left(storage, rate("other", 5)) == 5
            assert await storage.release(refused.lease) == ()
            assert await self.is_full(storage, slot())

    async def test_a_waiter_whose_window_has_come_round_starts_at_its_turn(self) -> None:
        async with self.slot_instance() as storage:
            self.later(MINUTE - SECOND)
            holder = await self.start(storage, slot())
            waiter = await self.queue(storage, rate(), slot())
            await self.start(storage, rate())
            self.later(SECOND)
            assert await storage.release(holder.lease) == _turns(waiter)

    async def test_a_refusal_at_a_turn_is_told_to_the_instance_that_waits(self) -> None:
        async with self.slot_instances(2) as (one, two), self.listening(two) as ear:
            self.later(SECOND)
            holder = await self.start(one, slot())
            refused = await self.queue(two, rate(), slot())
            await self.start(one, rate())
            assert await one.release(holder.lease) == ()
            assert await ear.turn() == Turn(refused.lease, 1, TooOften(0, MINUTE - SECOND))

    async def test_a_refused_waiter_gives_up_the_places_that_it_kept_elsewhere(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot("b"))
            refused = await self.queue(storage, rate(), slot("a"), slot("b"))
            behind = await self.queue(storage, slot("a"))
            await self.start(storage, rate())
            turns = await storage.release(holder.lease)
            assert [(turn.lease, turn.refusal is None) for turn in turns] == [
                (refused.lease, False),
                (behind.lease, True),
            ]

    async def test_what_a_refused_waiter_kept_goes_to_the_first_in_line(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot("a", 2))
            blocker = await self.start(storage, slot("a", 2))
            other = await self.start(storage, slot("c"))
            await self.start(storage, slot("b", 2))
            refused = await self.queue(storage, rate(), slot("a", 2), slot("b", 2))
            earlier = await self.queue(storage, slot("b", 2))
            later = await self.queue(storage, slot("a", 2), slot("b", 2))
            await self.start(storage, rate())
            turns = await storage.release(holder.lease)
            assert [turn.lease for turn in turns] == [refused.lease, earlier.lease]
            assert await storage.release(blocker.lease) == ()
            assert await storage.release(other.lease) == ()
            assert await storage.release(earlier.lease) == _turns(later)

    async def test_a_refused_waiter_makes_way_in_the_order_of_all_its_lines(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot("b"))
            refused = await self.queue(storage, rate("run out"), slot("a"), slot("b"))
            earlier = await self.queue(storage, rate("one left"), slot("a"))
            later = await self.queue(storage, rate("one left"), slot("b"))
            await self.start(storage, rate("run out"))
            turns = await storage.release(holder.lease)
            assert [(turn.lease, turn.refusal is None) for turn in turns] == [
                (refused.lease, False),
                (earlier.lease, True),
                (later.lease, False),
            ]

    async def test_a_hundred_refused_waiters_hold_nobody_up(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot())
            refused = [await self.queue(storage, rate(), slot()) for _ in range(100)]
            starts = await self.queue(storage, slot())
            await self.start(storage, rate())
            turns = [*await storage.release(holder.lease)]
            waiting = [ask.lease for ask in (*refused, starts)]
            for _ in range(3):
                told = {turn.lease for turn in turns}
                turns += (await storage.renew([], [lease for lease in waiting if lease not in told])).turns
            assert [turn.lease for turn in turns] == waiting
            assert [turn.refusal is None for turn in turns] == [False] * 100 + [True]

    # -- a turn that cannot be used --------------------------------------------------------------

    async def test_a_turn_that_is_passed_on_goes_to_the_next_and_is_not_counted(self) -> None:
        async with self.slot_instance() as storage:
            for strategy in self.strategies(storage):
                need, place = rate(strategy, 1, strategy=strategy), slot(strategy)
                holder = await self.start(storage, place)
                first, second = await self.queue(storage, need, place), await self.queue(storage, need, place)
                assert await storage.release(holder.lease) == _turns(first)
                assert await storage.pass_on(first.lease, 1) == _turns(second)
                assert await storage.pass_on(first.lease, 1) == ()
                assert isinstance(await storage.take(self.ask(need)), TooOften)

    async def test_a_call_that_passed_its_turn_on_keeps_its_number(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot())
            first = self.ask(slot())
            answer = await storage.take(first)
            second, third = await self.queue(storage, slot()), await self.queue(storage, slot())
            assert await storage.release(holder.lease) == _turns(first)
            assert await storage.pass_on(first.lease, 1) == _turns(second)
            again = replace(first, attempt=2, number=answer.number if isinstance(answer, Queued) else 0)
            assert isinstance(await storage.take(again), Queued)
            assert await storage.release(second.lease) == _turns(first, attempt=2)
            assert await storage.release(first.lease) == _turns(third)

    async def test_a_call_that_the_store_has_forgotten_gets_its_place_by_its_number(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot())
            first = self.ask(slot())
            answer = await storage.take(first)
            assert isinstance(answer, Queued)
            second = await self.queue(storage, slot())
            assert await storage.release(first.lease) == ()
            again = replace(first, attempt=2, number=answer.number)
            assert await storage.take(again) == answer
            assert await storage.release(holder.lease) == _turns(first, attempt=2)
            assert await storage.release(first.lease) == _turns(second)

    async def test_a_call_that_passed_its_turn_on_stands_in_no_line(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot())
            first = await self.queue(storage, slot())
            assert await storage.release(holder.lease) == _turns(first)
            assert await storage.pass_on(first.lease, 1) == ()
            later = await self.start(storage, slot())
            assert await storage.release(later.lease) == ()
            assert await storage.renew([], [first.lease]) == Renewed(strayed=(first.lease,))

    async def test_a_turn_is_passed_on_to_another_instance(self) -> None:
        async with self.slot_instances(2) as (one, two), self.listening(two) as ear:
            holder = await self.start(one, slot())
            first, second = await self.queue(one, slot()), await self.queue(two, slot())
            assert await one.release(holder.lease) == _turns(first)
            assert await one.pass_on(first.lease, 1) == ()
            assert [await ear.turn()] == [*_turns(second)]

    async def test_a_turn_of_an_older_question_cannot_be_passed_on(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot())
            first = await self.queue(storage, slot())
            await storage.release(holder.lease)
            await storage.pass_on(first.lease, 1)
            assert isinstance(await storage.take(replace(first, attempt=2)), Started)
            assert await storage.pass_on(first.lease, 1) == ()
            assert await self.is_full(storage, slot())

    async def test_nothing_is_passed_on_by_a_call_that_still_waits_or_was_refused(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot())
            refused = await self.queue(storage, rate(), slot())
            assert await storage.pass_on(refused.lease, 1) == ()
            await self.start(storage, rate())
            assert [turn.lease for turn in await storage.release(holder.lease)] == [refused.lease]
            assert await storage.pass_on(refused.lease, 1) == ()
            assert isinstance(await storage.take(refused), TooOften)

    async def test_a_call_that_passed_its_turn_on_can_be_given_up(self) -> None:
        async with self.slot_instance() as storage:
            need = rate(most=2)
            holder = await self.start(storage, slot())
            first = await self.queue(storage, need, slot())
            await storage.release(holder.lease)
            await storage.pass_on(first.lease, 1)
            await self.start(storage, need)
            assert await storage.release(first.lease, undo=True) == ()
            assert await self.left(storage, need) == 1

    # -- questions that are asked again ----------------------------------------------------------

    async def test_a_start_that_is_asked_for_again_is_counted_once(self) -> None:
        async with self.instance() as storage:
            self.atomic()
            for strategy in self.strategies(storage):
                need = rate(strategy, 3, strategy=strategy)
                ask = self.ask(need)
                answer = await storage.take(ask)
                self.later(SECOND)
                assert await storage.take(ask) == answer
                assert await self.left(storage, need) == 2
                await storage.release(ask.lease, undo=True)
                assert await self.left(storage, need) == 3

    async def test_a_start_that_is_asked_for_again_holds_one_place(self) -> None:
        async with self.slot_instance() as storage:
            ask = self.ask(slot(capacity=2))
            answer = await storage.take(ask)
            assert await storage.take(ask) == answer
            assert not await self.is_full(storage, slot(capacity=2))
            await storage.release(ask.lease)
            await self.start(storage, slot(capacity=2))
            await self.start(storage, slot(capacity=2))

    async def test_a_forced_start_that_is_asked_for_again_holds_one_place(self) -> None:
        async with self.slot_instance() as storage:
            ask = replace(self.ask(rate(most=2), slot(capacity=2)), force=True)
            assert await storage.take(ask) == await storage.take(ask)
            assert await self.left(storage, rate(most=2)) == 1
            assert not await self.is_full(storage, slot(capacity=2))

    async def test_a_waiter_that_asks_again_stands_in_line_once(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot())
            ask = self.ask(slot(max_queued=1))
            answer = await storage.take(ask)
            second = await self.queue(storage, slot(max_queued=2))
            # Neither at its end nor refused because of itself.
            assert await storage.take(ask) == answer
            assert await storage.release(holder.lease) == _turns(ask)
            assert await storage.release(ask.lease) == _turns(second)

    async def test_a_waiter_that_asks_again_after_its_turn_has_started(self) -> None:
        async with self.slot_instance() as storage:
            need = rate(most=3)
            holder = await self.start(storage, slot())
            ask = self.ask(need, slot())
            answer = await storage.take(ask)
            await storage.release(holder.lease)
            assert isinstance(answer, Queued)
            assert await storage.take(ask) == Started(answer.number)
            assert await self.left(storage, need) == 2

    async def test_a_waiter_that_asks_again_after_it_was_refused_is_told_the_same(self) -> None:
        async with self.slot_instance() as storage:
            self.later(SECOND)
            holder = await self.start(storage, slot())
            ask = await self.queue(storage, rate(), slot())
            await self.start(storage, rate())
            await storage.release(holder.lease)
            self.later(5 * SECOND)
            assert await storage.take(ask) == TooOften(0, MINUTE - SECOND)

    async def test_a_waiter_that_was_refused_may_ask_anew(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot())
            ask = await self.queue(storage, rate(), slot())
            await self.start(storage, rate())
            await storage.release(holder.lease)
            self.later(MINUTE)
            assert isinstance(await storage.take(replace(ask, attempt=2)), Started)

    async def test_a_newer_question_finds_what_an_older_one_has_taken(self) -> None:
        async with self.slot_instance() as storage:
            ask = self.ask(rate(most=3), slot(capacity=2))
            answer = await storage.take(ask)
            assert await storage.take(replace(ask, attempt=2)) == answer
            assert await self.left(storage, rate(most=3)) == 2
            assert not await self.is_full(storage, slot(capacity=2))

    async def test_a_newer_question_of_a_waiter_is_the_one_whose_turn_comes(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot())
            ask = self.ask(slot())
            answer = await storage.take(ask)
            assert await storage.take(replace(ask, attempt=2)) == answer
            assert await storage.release(holder.lease) == _turns(ask, attempt=2)

    async def test_an_older_question_that_comes_late_is_void(self) -> None:
        async with self.instance() as storage:
            self.atomic()
            ask = self.ask(rate(most=5))
            answer = await storage.take(replace(ask, attempt=2))
            assert await storage.take(ask) == Void()
            assert await storage.take(replace(ask, attempt=2)) == answer
            assert await storage.take(replace(ask, attempt=3)) == answer
            assert await storage.take(replace(ask, attempt=2)) == Void()
            assert await self.left(storage, rate(most=5)) == 4

    async def test_an_older_question_of_a_waiter_is_void(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot())
            ask = self.ask(slot())
            answer = await storage.take(replace(ask, attempt=2))
            assert await storage.take(ask) == Void()
            assert await storage.take(replace(ask, attempt=2)) == answer
            assert await storage.release(holder.lease) == _turns(ask, attempt=2)
            assert await storage.take(ask) == Void()
            await storage.pass_on(ask.lease, 2)
            assert await storage.take(ask) == Void()
            assert not await self.is_full(storage, slot())

    async def test_a_question_that_comes_after_its_call_was_given_up_is_void(self) -> None:
        async with self.instance() as storage:
            self.atomic()
            ask = self.ask(rate())
            await storage.release(ask.lease, undo=True)
            for attempt in (1, 1, 2):
                assert await storage.take(replace(ask, attempt=attempt)) == Void()
            assert await storage.take(replace(ask, force=True)) == Void()
            assert await self.left(storage, rate()) == 1

    async def test_a_question_that_is_void_takes_no_place(self) -> None:
        async with self.slot_instance() as storage:
            ask = self.ask(slot())
            await storage.release(ask.lease, undo=True)
            assert await storage.take(ask) == Void()
            await self.start(storage, slot())
            assert await storage.take(ask) == Void()
            assert isinstance(await storage.take(self.ask(slot(max_queued=1))), Queued)

    async def test_a_call_that_is_given_up_is_void_whatever_had_become_of_it(self) -> None:
        async with self.slot_instance() as storage:
            self.later(SECOND)
            need = rate(most=2)
            held = await self.start(storage, need, slot())
            refused = await self.queue(storage, rate("run out"), slot())
            waits = await self.queue(storage, need, slot())
            await self.start(storage, rate("run out"))
            await storage.release(waits.lease, undo=True)
            await storage.release(held.lease, undo=True)
            assert await storage.release(refused.lease, undo=True) == ()
            for ask in (held, refused, waits):
                assert await storage.take(ask) == Void()
                # Also when its end is told once more, in the other way.
                await storage.release(ask.lease)
                assert await storage.take(ask) == Void()
            assert await self.left(storage, need) == 2
            assert not await self.is_full(storage, slot())

    async def test_a_call_that_is_given_up_twice_is_taken_back_once(self) -> None:
        async with self.instance() as storage:
            self.atomic()
            for strategy in self.strategies(storage):
                need = rate(strategy, 3, strategy=strategy)
                await self.start(storage, need)
                ask = await self.start(storage, need)
                for _ in range(2):
                    await storage.release(ask.lease, undo=True)
                    assert await self.left(storage, need) == 2

    # -- leases ----------------------------------------------------------------------------------

    async def test_what_is_not_renewed_is_free_when_the_lease_ends(self) -> None:
        async with self.slot_instances(2) as (one, two):
            await self.start(one, slot())
            self.later(LEASE * SECOND - 1)
            assert await self.is_full(two, slot())
            self.later(1)
            await self.start(two, slot())

    async def test_what_is_renewed_lasts_one_lease_more(self) -> None:
        async with self.slot_instance() as storage:
            ask = await self.start(storage, slot())
            for _ in range(3):
                self.later(0.9 * LEASE * SECOND)
                assert await storage.renew([ask.lease], []) == Renewed()
            self.later(LEASE * SECOND - 1)
            assert await self.is_full(storage, slot())
            self.later(1)
            assert not await self.is_full(storage, slot())

    async def test_a_newcomer_is_behind_those_who_keep_the_numbers_of_a_store_that_lost_its_own(self) -> None:
        async with self.slot_instance() as storage:
            first = self.ask(slot())
            assert isinstance(await storage.take(replace(first, number=1000)), Started)
            waiter = replace(self.ask(slot()), number=1001)
            assert isinstance(await storage.take(waiter), Queued)
            newcomer = await self.queue(storage, slot())
            assert await storage.release(first.lease) == _turns(waiter)
            assert await storage.release(waiter.lease) == _turns(newcomer)

    async def test_whoever_stands_behind_many_who_are_held_up_elsewhere_starts_soon(self) -> None:
        async with self.slot_instance() as storage:
            wide, narrow = slot("wide", 10), slot("narrow")
            await self.start(storage, narrow)
            fillers = [await self.start(storage, wide) for _ in range(10)]
            many = [await self.queue(storage, wide, narrow) for _ in range(70)]
            last = await self.queue(storage, wide)
            turns = [*await storage.release(fillers[0].lease), *await storage.release(fillers[1].lease)]
            turns += (await storage.renew([], [each.lease for each in (*many, last)])).turns
            # It may be told more than once.
            assert {turn.lease for turn in turns} == {last.lease}

    async def test_an_answer_that_is_given_again_lasts_one_lease_more(self) -> None:
        self.atomic()
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot())
            waiter = await self.queue(storage, slot())
            for attempt in (1, 2):
                self.later(0.9 * LEASE * SECOND)
                assert isinstance(await storage.take(replace(holder, attempt=attempt)), Started)
                assert isinstance(await storage.take(replace(waiter, attempt=attempt)), Queued)
            self.later(0.9 * LEASE * SECOND)
            assert await storage.renew([holder.lease], [waiter.lease]) == Renewed()

    async def test_a_call_keeps_its_slots_for_a_lease_from_its_turn(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot())
            waiter = await self.queue(storage, slot())
            self.later(0.9 * LEASE * SECOND)
            await storage.release(holder.lease)
            self.later(0.9 * LEASE * SECOND)
            assert await storage.renew([waiter.lease], []) == Renewed()

    async def test_waiters_go_before_a_newcomer_to_what_a_crash_has_left(self) -> None:
        async with self.slot_instances(2) as (one, two), self.listening(two) as ear:
            await self.start(one, slot())
            waiter = await self.queue(two, slot())
            self.later(0.6 * LEASE * SECOND)
            assert await two.renew([], [waiter.lease]) == Renewed()
            self.later(0.6 * LEASE * SECOND)
            newcomer = await self.queue(two, slot())
            assert [await ear.turn()] == [*_turns(waiter)]
            assert await two.release(waiter.lease) == _turns(newcomer)

    async def test_the_order_of_waiters_holds_over_all_that_a_crash_has_left(self) -> None:
        async with self.slot_instances(2) as (one, two), self.listening(two) as ear:
            await self.start(one, slot("a"), slot("b"))
            earlier = await self.queue(two, rate(), slot("b"))
            later = await self.queue(two, rate(), slot("a"))
            self.later(0.6 * LEASE * SECOND)
            assert await two.renew([], [earlier.lease, later.lease]) == Renewed()
            self.later(0.6 * LEASE * SECOND)
            await self.queue(one, slot("a"), slot("b"))
            assert [await ear.turn()] == [*_turns(earlier)]
            refused = await ear.turn()
            assert refused.lease == later.lease
            assert refused.refusal is not None

    async def test_waiters_find_what_a_crash_has_left_when_they_renew(self) -> None:
        async with self.slot_instances(2) as (one, two):
            await self.start(one, slot())
            waiters = [await self.queue(two, slot()) for _ in range(2)]
            leases = [waiter.lease for waiter in waiters]
            self.later(0.6 * LEASE * SECOND)
            assert await two.renew([], leases) == Renewed()
            self.later(0.6 * LEASE * SECOND)
            assert await two.renew([], leases) == Renewed(turns=_turns(waiters[0]))

    async def test_the_turn_of_another_instance_is_told_when_somebody_renews(self) -> None:
        async with self.slot_instances(3) as (one, two, three), self.listening(two) as ear:
            await self.start(one, slot())
            first, second = await self.queue(two, slot()), await self.queue(three, slot())
            self.later(0.6 * LEASE * SECOND)
            assert await two.renew([], [first.lease]) == Renewed()
            assert await three.renew([], [second.lease]) == Renewed()
            self.later(0.6 * LEASE * SECOND)
            assert await three.renew([], [second.lease]) == Renewed()
            assert [await ear.turn()] == [*_turns(first)]

    async def test_an_end_that_is_told_after_the_lease_frees_nobody_elses_place(self) -> None:
        for undo in (False, True):
            async with self.slot_instances(2) as (one, two):
                place = slot(f"slot {undo}")
                late = await self.start(one, place)
                self.later(LEASE * SECOND)
                await self.start(two, place)
                assert await one.release(late.lease, undo=undo) == ()
                assert await self.is_full(one, place)

    async def test_a_renewal_that_comes_after_the_lease_brings_nothing_back(self) -> None:
        async with self.slot_instances(2) as (one, two):
            late = await self.start(one, slot())
            self.later(LEASE * SECOND)
            holder = await self.start(two, slot())
            assert await one.renew([late.lease], []) == Renewed(lost=(late.lease,))
            assert await one.renew([late.lease], []) == Renewed(lost=(late.lease,))
            assert await self.is_full(one, slot())
            await two.release(holder.lease)
            assert not await self.is_full(one, slot())

    async def test_a_lease_that_has_ended_is_lost_also_when_nobody_took_the_place(self) -> None:
        async with self.slot_instance() as storage:
            late = await self.start(storage, slot())
            self.later(LEASE * SECOND)
            assert await storage.renew([late.lease], []) == Renewed(lost=(late.lease,))

    async def test_a_call_that_has_lost_one_slot_has_lost_all(self) -> None:
        async with self.slot_instances(2) as (one, two):
            late = await self.start(one, slot("a"), slot("b"))
            self.later(LEASE * SECOND)
            await self.start(two, slot("b"))
            assert await one.renew([late.lease], []) == Renewed(lost=(late.lease,))
            await self.start(two, slot("a"))

    async def test_calls_that_the_store_does_not_know_are_lost_or_astray(self) -> None:
        async with self.slot_instance() as storage:
            ended = await self.start(storage, slot())
            await storage.release(ended.lease)
            given_up = self.ask(slot()).lease
            await storage.release(given_up, undo=True)
            names = ("never", ended.lease, given_up)
            assert await storage.renew(names, names) == Renewed(lost=names, strayed=names)

    async def test_a_renewal_of_nothing_finds_nothing(self) -> None:
        async with self.slot_instance() as storage:
            await self.start(storage, slot())
            await self.queue(storage, slot())
            assert await storage.renew([], []) == Renewed()

    async def test_what_a_lost_call_held_goes_to_the_next_in_line(self) -> None:
        async with self.slot_instances(2) as (one, two), self.listening(two) as ear:
            late = await self.start(one, slot())
            waiter = await self.queue(two, slot())
            self.later(0.6 * LEASE * SECOND)
            assert await two.renew([], [waiter.lease]) == Renewed()
            self.later(0.6 * LEASE * SECOND)
            assert await one.renew([late.lease], []) == Renewed(lost=(late.lease,))
            assert [await ear.turn()] == [*_turns(waiter)]

    async def test_a_lost_call_stays_counted(self) -> None:
        async with self.slot_instance() as storage:
            need = rate(most=2)
            late = await self.start(storage, need, slot())
            self.later(LEASE * SECOND)
            await storage.renew([late.lease], [])
            await storage.release(late.lease)
            assert await self.left(storage, need) == 1

    async def test_a_turn_whose_message_was_lost_is_found_by_a_renewal(self) -> None:
        async with self.slot_instances(2) as (one, two):
            self.later(SECOND)
            holder = await self.start(one, slot())
            refused = await self.queue(two, rate(), slot())
            starts = await self.queue(two, slot())
            waits = await self.queue(two, slot())
            await self.start(one, rate())
            await one.release(holder.lease)
            leases = [refused.lease, starts.lease, waits.lease]
            found = Renewed(turns=(Turn(refused.lease, 1, TooOften(0, MINUTE - SECOND)), *_turns(starts)))
            assert await two.renew([], leases) == found
            assert await two.renew([], leases) == found

    async def test_what_a_renewal_finds_to_have_started_is_kept(self) -> None:
        async with self.slot_instances(2) as (one, two):
            holder = await self.start(one, slot())
            starts = await self.queue(two, slot())
            await one.release(holder.lease)
            for _ in range(2):
                self.later(0.6 * LEASE * SECOND)
                assert await two.renew([], [starts.lease]) == Renewed(turns=_turns(starts))

    async def test_a_turn_that_is_found_after_its_lease_has_gone_astray(self) -> None:
        async with self.slot_instances(2) as (one, two):
            holder = await self.start(one, slot())
            late = await self.queue(two, slot())
            await one.release(holder.lease)
            self.later(LEASE * SECOND)
            assert await two.renew([], [late.lease]) == Renewed(strayed=(late.lease,))
            await self.start(one, slot())

    async def test_waiters_of_an_instance_that_has_gone_hold_nobody_up(self) -> None:
        async with self.slot_instances(2) as (gone, lives):
            holder = await self.start(lives, slot())
            dead = [await self.queue(gone, slot()) for _ in range(3)]
            self.later(0.6 * LEASE * SECOND)
            waiter = await self.queue(lives, slot())
            assert await lives.renew([holder.lease], [waiter.lease]) == Renewed()
            self.later(0.6 * LEASE * SECOND)
            assert await lives.release(holder.lease) == _turns(waiter)
            leases = tuple(each.lease for each in dead)
            assert await gone.renew([], leases) == Renewed(strayed=leases)

    async def test_a_waiter_of_an_instance_that_has_gone_keeps_no_place(self) -> None:
        async with self.slot_instances(2) as (gone, lives):
            holder = await self.start(lives, slot("b"))
            await self.queue(gone, slot("a"), slot("b"))
            assert await self.is_full(lives, slot("a"))
            self.later(0.6 * LEASE * SECOND)
            await lives.renew([holder.lease], [])
            self.later(0.6 * LEASE * SECOND)
            assert not await self.is_full(lives, slot("a"))

    async def test_a_waiter_that_went_astray_joins_again_in_its_old_place(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot())
            first = self.ask(slot())
            answer = await storage.take(first)
            assert isinstance(answer, Queued)
            second = await self.queue(storage, slot())
            for _ in range(2):
                self.later(0.6 * LEASE * SECOND)
                await storage.renew([holder.lease], [second.lease])
            again = replace(first, attempt=2, number=answer.number)
            assert isinstance(await storage.take(again), Queued)
            assert await storage.release(holder.lease) == _turns(first, attempt=2)

    async def test_a_start_that_is_asked_for_again_after_its_lease_is_decided_anew(self) -> None:
        async with self.slot_instances(2) as (one, two):
            need = rate(most=3)
            ask = await self.start(one, need, slot())
            self.later(LEASE * SECOND)
            holder = await self.start(two, slot())
            assert isinstance(await one.take(ask), Queued)
            assert await self.left(one, need) == 3
            await two.release(holder.lease)
            assert isinstance(await one.take(ask), Started)
            assert await self.left(one, need) == 2

    async def test_a_call_that_is_refused_after_its_lease_is_taken_back_once(self) -> None:
        async with self.slot_instances(2) as (one, two):
            need = rate(most=2)
            ask = await self.start(one, need, slot())
            self.later(LEASE * SECOND)
            await self.start(two, need, slot())
            assert isinstance(await one.take(replace(ask, may_wait=False)), NoSlot)
            assert await self.left(one, need) == 1
            await one.release(ask.lease, undo=True)
            assert await self.left(one, need) == 1

    # -- forced calls ----------------------------------------------------------------------------

    async def test_forced_calls_go_above_the_limit_and_nobody_starts_until_it_is_below(self) -> None:
        async with self.slot_instance() as storage:
            running = [await self.start(storage, slot(capacity=2))]
            running += [await self.start(storage, slot(capacity=2), force=True) for _ in range(3)]
            waiter = await self.queue(storage, slot(capacity=2))
            for ask in running[:2]:
                assert await storage.release(ask.lease) == ()
                assert await self.is_full(storage, slot(capacity=2))
            assert await storage.release(running[2].lease) == _turns(waiter)

    async def test_a_forced_call_takes_a_place_that_somebody_keeps(self) -> None:
        async with self.slot_instance() as storage:
            blocker = await self.start(storage, slot("b"))
            waiter = await self.queue(storage, slot("a"), slot("b"))
            forced = await self.start(storage, slot("a"), force=True)
            assert await storage.release(blocker.lease) == ()
            assert await storage.release(forced.lease) == _turns(waiter)

    async def test_another_number_of_places_counts_for_who_names_it(self) -> None:
        async with self.slot_instance() as storage:
            holder = await self.start(storage, slot(capacity=1))
            waiter = await self.queue(storage, slot(capacity=1))
            await self.start(storage, slot(capacity=3))
            assert await storage.release(holder.lease) == ()
            assert await self.is_full(storage, slot(capacity=2))
            assert await storage.renew([], [waiter.lease]) == Renewed()


def _turns(*asks: Ask, attempt: int = 1) -> tuple[Turn, ...]:
    """The turns of calls that have started."""
    return tuple(Turn(ask.lease, attempt) for ask in asks)
