"""The rules of the scheduler, one test each.

`Desk` is a scheduler with short ways to say what happens: `start` and `wait` make a new call and state how
it must fare, `end` and `leave` answer who starts because of it, in order.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Hashable
from functools import partial
from types import FrameType

import pytest

from frontmcp_py.scheduler import Pool, Scheduler, Slot, Ticket


class Desk:
    """A scheduler whose slots have the given capacities, 1 where none is given."""

    def __init__(self, **capacities: int) -> None:
        self.scheduler = Scheduler()
        self.capacities = capacities

    def __getitem__(self, key: Hashable) -> Slot:
        return self.scheduler.slot(key, self.capacities.get(str(key), 1))

    def ticket(self, *needs: Hashable | Pool, control: bool = False, nested: bool = False) -> Ticket:
        slots = tuple(self[need] for need in needs if not isinstance(need, Pool))
        pools = tuple(need for need in needs if isinstance(need, Pool))
        return Ticket(slots, pools, control=control, nested=nested)

    def start(self, *needs: Hashable | Pool, control: bool = False, nested: bool = False) -> Ticket:
        """A call that starts at once."""
        ticket = self.ticket(*needs, control=control, nested=nested)
        assert self.scheduler.offer(ticket)
        assert ticket.is_holding
        return ticket

    def wait(self, *needs: Hashable | Pool, control: bool = False, nested: bool = False) -> Ticket:
        """A call that cannot start and waits."""
        ticket = self.ticket(*needs, control=control, nested=nested)
        assert not self.scheduler.offer(ticket)
        self.scheduler.wait(ticket)
        assert ticket.is_waiting
        return ticket

    def has_place(self, *needs: Hashable | Pool, control: bool = False, nested: bool = False) -> bool:
        """Whether a newcomer could start; it goes away again."""
        ticket = self.ticket(*needs, control=control, nested=nested)
        could = self.scheduler.offer(ticket)
        if could:
            self.scheduler.release(ticket)
            assert self.settle() == []
        else:
            self.scheduler.refuse(ticket)
        return could

    def end(self, *tickets: Ticket) -> list[Ticket]:
        for ticket in tickets:
            self.scheduler.release(ticket)
        return self.settle()

    def leave(self, *tickets: Ticket) -> list[Ticket]:
        for ticket in tickets:
            self.scheduler.leave(ticket)
        return self.settle()

    def settle(self) -> list[Ticket]:
        return list(iter(self.scheduler.next, None))


def admission(places: int, reserved: int = 0) -> Pool:
    return Pool("admission", places, reserved)


class TestStarting:
    def test_a_call_that_needs_nothing_starts(self) -> None:
        desk = Desk()
        assert desk.end(desk.start()) == []

    def test_as_many_start_as_the_slot_has_places(self) -> None:
        desk = Desk(A=3)
        for _ in range(3):
            desk.start("A")
        assert not desk.has_place("A")
        assert desk["A"].held == 3

    def test_an_offer_that_fails_changes_nothing(self) -> None:
        desk = Desk()
        pool = admission(2)
        desk.start("B")
        assert not desk.scheduler.offer(desk.ticket("A", "B", pool))
        assert (desk["A"].held, desk["B"].held, pool.held) == (0, 1, 0)
        assert desk.scheduler.waiting == desk["A"].waiting == desk["B"].waiting == 0
        assert desk["B"].first is None

    def test_a_place_in_every_slot_is_taken_in_one_step_or_in_none(self) -> None:
        desk = Desk()
        a, b = desk.start("A"), desk.start("B")
        both = desk.wait("A", "B")
        assert desk.end(a) == []
        assert desk["A"].held == 0  # a waiter holds nothing while it waits
        assert desk.end(b) == [both]
        assert (desk["A"].held, desk["B"].held) == (1, 1)

    def test_pools_and_slots_are_taken_together_or_not_at_all(self) -> None:
        desk = Desk()
        pool = admission(1)
        running, elsewhere = desk.start("A"), desk.start(pool)
        waiter = desk.wait("A", pool)
        assert desk.end(running) == []
        assert desk["A"].held == 0
        assert desk.end(elsewhere) == [waiter]
        assert (desk["A"].held, pool.held) == (1, 1)

    def test_a_call_that_can_start_starts_however_many_wait(self) -> None:
        desk = Desk()
        pool = admission(3)
        desk.start("A", pool)
        for _ in range(50):
            desk.wait("A", pool)
        desk.start("B", pool)
        desk.start(pool)


class TestOrder:
    def test_equals_are_served_first_come_first_served(self) -> None:
        desk = Desk()
        running = desk.start("A")
        queue = [desk.wait("A") for _ in range(5)]
        for waiter in queue:
            assert desk.end(running) == [waiter]
            running = waiter

    def test_a_freed_place_goes_to_the_waiter_and_never_to_a_newcomer(self) -> None:
        desk = Desk()
        running = desk.start("A")
        waiter = desk.wait("A")
        assert desk.end(running) == [waiter]
        assert desk["A"].held == 1
        assert not desk.has_place("A", control=True)

    def test_control_passes_normal(self) -> None:
        desk = Desk()
        running = desk.start("A")
        normal = desk.wait("A")
        control = desk.wait("A", control=True)
        assert desk.end(running) == [control]
        assert desk.end(control) == [normal]

    def test_control_calls_are_served_in_order_of_arrival(self) -> None:
        desk = Desk()
        running = desk.start("A")
        first, second = desk.wait("A", control=True), desk.wait("A", control=True)
        assert desk.end(running) == [first]
        assert desk.end(first) == [second]

    def test_nested_calls_are_tried_before_control_and_normal_ones(self) -> None:
        desk = Desk()
        running = desk.start("A")
        normal = desk.wait("A")
        control = desk.wait("A", control=True)
        nested = desk.wait("A", nested=True)
        assert desk.end(running) == [nested]
        assert desk.end(nested) == [control]
        assert desk.end(control) == [normal]

    def test_nested_calls_are_served_in_order_of_arrival_whatever_their_priority(self) -> None:
        desk = Desk()
        running = desk.start("A")
        normal = desk.wait("A", nested=True)
        control = desk.wait("A", nested=True, control=True)
        assert desk.end(running) == [normal]
        assert desk.end(normal) == [control]

    def test_when_several_places_free_waiters_of_all_slots_start_in_one_order(self) -> None:
        desk = Desk()
        running = desk.start("A", "B", "C")
        late = [desk.wait("B"), desk.wait("A")]
        control = desk.wait("A", control=True)
        nested = desk.wait("C", nested=True)
        assert desk.end(running) == [nested, control, late[0]]
        assert desk.end(control) == [late[1]]

    def test_several_releases_in_one_turn_start_waiters_in_order(self) -> None:
        desk = Desk(A=2)
        running = [desk.start("A"), desk.start("A"), desk.start("B")]
        queue = [desk.wait("A"), desk.wait("B"), desk.wait("A"), desk.wait("A")]
        assert desk.end(*reversed(running)) == queue[:3]

    def test_a_waiter_held_up_by_another_slot_is_passed(self) -> None:
        desk = Desk(A=3)
        running = [desk.start("A") for _ in range(3)]
        desk.start("B")
        both = [desk.wait("A", "B") for _ in range(5)]
        single = desk.wait("A")
        assert desk.end(running[0]) == []  # the first of the line keeps this one
        assert desk.end(running[1]) == [single]  # nobody else keeps any: four waiters are passed
        assert all(waiter.is_waiting for waiter in both)

    def test_one_release_lets_everybody_start_whom_it_lets(self) -> None:
        desk = Desk(A=3)
        wide = desk.start("A", "B")
        desk.start("A")
        desk.start("A")
        with_b, alone = desk.wait("B"), desk.wait("A")
        assert desk.end(wide) == [with_b, alone]

    def test_calls_that_share_no_slot_never_wait_for_each_other(self) -> None:
        desk = Desk()
        desk.start("A")
        for _ in range(10):
            desk.wait("A", "B", control=True)
        other = desk.start("C")
        waiter = desk.wait("C", "D")
        assert desk.end(other) == [waiter]


class TestKeptPlace:
    """The first of a line keeps one place in each slot that it waits for."""

    @staticmethod
    def first_waits_elsewhere(a: int, *, control: bool = False) -> tuple[Desk, Ticket, Ticket]:
        """A call needs A, which has `a` places, all free, and B, which is busy; it waits."""
        desk = Desk(A=a)
        busy = desk.start("B")
        return desk, desk.wait("A", "B", control=control), busy

    def test_a_newcomer_does_not_take_it(self) -> None:
        desk, first, busy = self.first_waits_elsewhere(1)
        assert desk["A"].first is first
        assert not desk.has_place("A")
        assert desk.end(busy) == [first]

    def test_a_waiter_behind_does_not_take_it(self) -> None:
        desk = Desk()
        running, busy = desk.start("A"), desk.start("B")
        first, second = desk.wait("A", "B"), desk.wait("A")
        assert desk.end(running) == []
        assert desk.end(busy) == [first]
        assert desk.end(first) == [second]

    def test_the_places_beyond_it_are_for_everybody(self) -> None:
        desk, first, busy = self.first_waits_elsewhere(3)
        desk.start("A")
        desk.start("A")
        assert not desk.has_place("A")
        assert desk.end(busy) == [first]
        assert desk["A"].held == 3

    def test_nobody_but_the_first_keeps_one(self) -> None:
        desk, _, _ = self.first_waits_elsewhere(2)
        for _ in range(10):
            desk.wait("A", "B")
        desk.start("A")
        assert not desk.has_place("A")

    def test_it_is_kept_in_every_slot_of_the_first(self) -> None:
        desk = Desk()
        desk.start("C")
        desk.wait("A", "B", "C")
        assert not desk.has_place("A")
        assert not desk.has_place("B")

    def test_a_control_newcomer_takes_the_place_that_a_normal_first_keeps(self) -> None:
        desk, first, busy = self.first_waits_elsewhere(1)
        control = desk.start("A", control=True)
        assert desk.end(busy) == []
        assert desk.end(control) == [first]

    def test_a_control_newcomer_does_not_take_the_place_that_a_control_first_keeps(self) -> None:
        desk, _, _ = self.first_waits_elsewhere(1, control=True)
        assert not desk.has_place("A", control=True)
        assert not desk.has_place("A")

    def test_a_control_waiter_becomes_the_first_and_keeps_the_place_instead(self) -> None:
        desk = Desk()
        busy_b, busy_c = desk.start("B"), desk.start("C")
        normal = desk.wait("A", "B")
        control = desk.wait("A", "C", control=True)
        assert desk["A"].first is control
        assert desk.end(busy_b) == []  # the normal one could, but for the place that control keeps
        assert desk.end(busy_c) == [control]
        assert desk.end(control) == [normal]

    def test_a_nested_call_takes_it(self) -> None:
        desk, first, busy = self.first_waits_elsewhere(1, control=True)
        nested = desk.start("A", nested=True)
        assert desk.end(busy) == []
        assert desk.end(nested) == [first]

    def test_a_waiting_nested_call_takes_it(self) -> None:
        desk = Desk()
        running, _ = desk.start("A"), desk.start("B")
        desk.wait("A", "B", control=True)
        nested = desk.wait("A", nested=True)
        assert desk.end(running) == [nested]

    def test_a_waiting_nested_call_keeps_none(self) -> None:
        desk = Desk()
        desk.start("B")
        desk.wait("A", "B", nested=True)
        assert desk["A"].first is None
        desk.start("A")

    def test_it_is_there_for_the_next_when_the_first_has_left(self) -> None:
        desk, first, _ = self.first_waits_elsewhere(1)
        behind = desk.wait("A")
        assert desk.leave(first) == [behind]

    def test_nobody_keeps_one_in_a_pool(self) -> None:
        desk = Desk()
        pool = admission(2)
        desk.start("A", pool)
        desk.wait("A", pool)
        desk.start("B", pool)

    @pytest.mark.parametrize("capacity", [1, 2, 3])
    def test_so_a_call_of_two_slots_is_not_starved_by_callers_of_one(self, capacity: int) -> None:
        desk = Desk(A=capacity, B=capacity)
        on_a, on_b = ([desk.start(key) for _ in range(capacity)] for key in "AB")
        both = desk.wait("A", "B")
        crowd = [desk.wait(key) for _ in range(5 * capacity) for key in "AB"]
        assert both not in desk.end(*on_a)
        assert both in desk.end(*on_b)
        assert any(waiter.is_waiting for waiter in crowd)


class TestNested:
    def test_a_nested_waiter_stands_in_no_line_but_counts_as_waiting(self) -> None:
        desk = Desk()
        desk.start("A")
        nested = desk.wait("A", nested=True)
        assert desk["A"].waiting == 0
        assert desk["A"].first is None
        assert desk.scheduler.waiting == 1
        assert desk.leave(nested) == []
        assert desk.scheduler.waiting == 0

    def test_a_nested_call_passes_the_line_when_a_place_is_physically_free(self) -> None:
        desk = Desk(A=2)
        desk.start("A")
        desk.start("B")
        desk.wait("A", "B")
        assert not desk.has_place("A")
        desk.start("A", nested=True)
        assert not desk.has_place("A", nested=True)

    def test_a_nested_waiter_keeps_its_slot_alive_between_two_holders(self) -> None:
        desk = Desk()
        busy_a, busy_b = desk.start("A"), desk.start("B")
        slot = desk["A"]
        nested = desk.wait("A", "B", nested=True)
        assert desk.end(busy_a) == []
        assert desk["A"] is slot
        assert desk.end(busy_b) == [nested]
        assert not desk.has_place("A")
        assert desk.end(nested) == []
        assert desk.scheduler.live_slots == 0

    def test_a_nested_waiter_that_leaves_lets_its_slots_be_forgotten(self) -> None:
        desk = Desk()
        busy_a, busy_b = desk.start("A"), desk.start("B")
        nested = desk.wait("A", "B", nested=True)
        desk.end(busy_a)
        desk.leave(nested)
        assert desk.scheduler.live_slots == 1
        desk.end(busy_b)
        assert desk.scheduler.live_slots == 0

    def test_nested_calls_use_the_normal_places_of_a_pool_unless_they_are_control(self) -> None:
        desk = Desk()
        threads = Pool("threads", 2, 1)
        desk.start(threads, nested=True)
        assert not desk.has_place(threads, nested=True)
        desk.start(threads, nested=True, control=True)


class TestLeaving:
    def test_a_waiter_that_leaves_is_passed_over(self) -> None:
        desk = Desk()
        running = desk.start("A")
        first, second, third = (desk.wait("A") for _ in range(3))
        assert desk.leave(second) == []
        assert desk.leave(first) == []
        assert desk["A"].waiting == 1
        assert desk.end(running) == [third]

    def test_leaving_unblocks_everybody_who_stood_behind(self) -> None:
        desk = Desk(B=2)
        desk.start("C")
        first = desk.wait("A", "B", "C")
        desk.start("B")
        on_a, on_b = desk.wait("A"), desk.wait("B")
        assert desk.leave(first) == [on_a, on_b]

    def test_leaving_unblocks_in_order_control_first(self) -> None:
        desk = Desk()
        desk.start("B")
        first = desk.wait("A", "B", control=True)
        normal, control = desk.wait("A"), desk.wait("A", control=True)
        assert desk.leave(first) == [control]
        assert normal.is_waiting

    def test_when_the_first_control_waiter_has_left_the_next_one_is_the_first(self) -> None:
        desk = Desk()
        busy_b, busy_c = desk.start("B"), desk.start("C")
        normal = desk.wait("A", "B")
        control = [desk.wait("A", "C", control=True) for _ in range(2)]
        assert desk.leave(control[0]) == []
        assert desk["A"].first is control[1]
        assert desk.end(busy_b) == []
        assert desk.end(busy_c) == [control[1]]
        assert normal.is_waiting

    def test_when_control_has_left_a_normal_first_keeps_the_place_again(self) -> None:
        desk = Desk()
        busy, _ = desk.start("B"), desk.start("C")
        normal = desk.wait("A", "B")
        control = desk.wait("A", "C", control=True)
        behind = desk.wait("A")
        assert desk.leave(control) == []
        assert desk["A"].first is normal
        assert desk.end(busy) == [normal]
        assert desk.end(normal) == [behind]

    def test_leaving_a_full_slot_starts_nobody(self) -> None:
        desk = Desk()
        desk.start("A")
        first, second = desk.wait("A"), desk.wait("A")
        assert desk.leave(first) == []
        assert desk["A"].first is second

    def test_everybody_may_leave_at_once(self) -> None:
        desk = Desk()
        running = desk.start("A")
        queue = [desk.wait("A", control=number % 2 == 0) for number in range(6)]
        assert desk.leave(*queue) == []
        assert desk["A"].waiting == desk.scheduler.waiting == 0
        assert desk.end(running) == []
        desk.start("A")

    def test_a_waiter_may_leave_after_a_release_before_anybody_started(self) -> None:
        desk = Desk()
        running = desk.start("A")
        first, second = desk.wait("A"), desk.wait("A")
        desk.scheduler.release(running)
        assert desk.leave(first) == [second]

    def test_leaving_twice_does_nothing(self) -> None:
        desk = Desk()
        desk.start("A")
        first, _ = desk.wait("A"), desk.wait("A")
        desk.leave(first)
        assert desk.leave(first) == []
        assert desk.scheduler.waiting == desk["A"].waiting == 1

    def test_a_ticket_that_has_started_cannot_leave(self) -> None:
        desk = Desk()
        running = desk.start("A")
        waiter = desk.wait("A")
        desk.end(running)
        assert desk.leave(waiter) == []
        assert waiter.is_holding
        assert desk["A"].held == 1


class TestReleasing:
    def test_a_second_release_does_nothing(self) -> None:
        desk = Desk()
        pool = admission(2)
        first = desk.start("A", pool)
        desk.end(first)
        desk.start("A", pool)
        assert desk.end(first) == []
        assert (desk["A"].held, pool.held, pool.held_normal) == (1, 1, 1)

    def test_releasing_a_waiter_does_nothing(self) -> None:
        desk = Desk()
        desk.start("A")
        waiter = desk.wait("A")
        assert desk.end(waiter) == []
        assert waiter.is_waiting
        assert desk["A"].held == 1

    def test_a_ticket_refused_at_its_turn_passes_the_turn_on(self) -> None:
        desk = Desk()
        running = desk.start("A")
        refused, following = desk.wait("A"), desk.wait("A")
        desk.scheduler.release(running)
        assert desk.scheduler.next() is refused
        desk.scheduler.release(refused)
        assert desk.scheduler.next() is following
        assert desk.scheduler.next() is None

    def test_a_whole_line_may_be_refused_at_its_turn(self) -> None:
        desk = Desk()
        running = desk.start("A", "B")
        queue = [desk.wait("A", "B") for _ in range(5)]
        desk.scheduler.release(running)
        for waiter in queue:
            assert desk.scheduler.next() is waiter
            desk.scheduler.release(waiter)
        assert desk.scheduler.next() is None
        assert desk.scheduler.live_slots == 0

    def test_a_refused_ticket_leaves_nothing(self) -> None:
        desk = Desk()
        desk.start("A")
        ticket = desk.ticket("A", "B")
        assert not desk.scheduler.offer(ticket)
        desk.scheduler.refuse(ticket)
        assert not ticket.is_waiting
        assert not ticket.is_holding
        assert desk.scheduler.live_slots == 1
        desk.start("B")


class TestPools:
    def test_the_41st_normal_call_waits_while_a_control_call_runs(self) -> None:
        desk = Desk()
        pool = admission(48, 8)
        running = [desk.start(pool) for _ in range(40)]
        waiter = desk.wait(pool)
        control = desk.start(pool, control=True)
        assert desk.end(control) == []  # its place is not for normal calls
        assert desk.end(running[0]) == [waiter]

    def test_control_calls_may_use_every_place(self) -> None:
        desk = Desk()
        pool = admission(48, 8)
        running = [desk.start(pool, control=True) for _ in range(48)]
        assert not desk.has_place(pool, control=True)
        waiter = desk.wait(pool)
        assert desk.end(running[0]) == [waiter]  # it is full, not used up by normal calls

    def test_normal_waiters_never_hide_a_control_waiter(self) -> None:
        desk = Desk()
        pool = admission(3, 1)
        desk.start(pool)
        desk.start(pool)
        running = desk.start(pool, control=True)
        for key in range(5):
            desk.wait(key, pool)
        control = desk.wait(pool, control=True)
        assert desk.end(running) == [control]

    def test_a_nested_normal_waiter_that_comes_first_does_not_hide_a_control_waiter_either(self) -> None:
        desk = Desk()
        threads = Pool("threads", 3, 1)
        desk.start(threads)
        desk.start(threads)
        running = desk.start(threads, control=True)
        desk.wait(threads, nested=True)
        control = desk.wait(threads, control=True, nested=True), desk.wait(threads, control=True)
        assert desk.end(running) == [control[0]]
        assert desk.end(control[0]) == [control[1]]

    def test_control_passes_normal_at_a_full_pool(self) -> None:
        desk = Desk()
        pool = admission(2)
        running, _ = desk.start(pool), desk.start(pool)
        normal, control = desk.wait(pool), desk.wait(pool, control=True)
        assert desk.end(running) == [control]
        assert desk.end(control) == [normal]

    def test_waiters_of_different_slots_start_in_order_of_arrival_when_a_pool_frees(self) -> None:
        desk = Desk()
        pool = admission(1)
        running = desk.start(pool)
        queue = [desk.wait(key, pool) for key in ("B", "A", "C", "A")]
        for waiter in queue:
            assert desk.end(running) == [waiter]
            running = waiter

    def test_waiters_for_a_slot_take_no_places_in_a_pool(self) -> None:
        desk = Desk()
        pool = admission(2)
        desk.start("A", pool)
        for _ in range(10):
            desk.wait("A", pool)
        assert pool.held == 1

    def test_a_call_may_need_several_pools(self) -> None:
        desk = Desk()
        pool, threads = admission(5), Pool("threads", 1, 0)
        running = desk.start(pool, threads)
        waiter = desk.wait(pool, threads)
        desk.start(pool)
        assert pool.held == 2
        assert desk.end(running) == [waiter]
        assert (pool.held, threads.held) == (2, 1)

    def test_a_waiter_held_up_by_a_pool_keeps_the_place_in_its_slot(self) -> None:
        desk = Desk(A=2)
        pool = admission(1)
        running = desk.start(pool)
        first = desk.wait("A", pool)
        desk.start("A")
        assert not desk.has_place("A")
        assert desk.end(running) == [first]


class TestForced:
    def test_a_forced_ticket_goes_over_the_limit(self) -> None:
        desk = Desk()
        pool = admission(2, 1)
        desk.start("A", pool)
        forced = [desk.ticket("A", pool) for _ in range(3)]
        for ticket in forced:
            desk.scheduler.force(ticket)
            assert ticket.is_holding
        assert (desk["A"].held, pool.held, pool.held_normal) == (4, 4, 4)

    def test_a_waiter_starts_only_below_the_limit(self) -> None:
        desk = Desk()
        running = desk.start("A")
        waiter = desk.wait("A")
        forced = desk.ticket("A")
        desk.scheduler.force(forced)
        assert desk.end(running) == []
        assert desk.end(forced) == [waiter]

    def test_a_waiter_starts_only_below_the_limit_of_a_pool(self) -> None:
        desk = Desk()
        pool = admission(1)
        running = desk.start(pool)
        waiter = desk.wait(pool)
        forced = [desk.ticket(pool, control=True) for _ in range(2)]
        for ticket in forced:
            desk.scheduler.force(ticket)
        assert desk.end(running) == []
        assert desk.end(forced[0]) == []
        assert desk.end(forced[1]) == [waiter]

    def test_a_forced_ticket_takes_a_kept_place(self) -> None:
        desk = Desk()
        busy = desk.start("B")
        first = desk.wait("A", "B")
        forced = desk.ticket("A")
        desk.scheduler.force(forced)
        assert desk.end(busy) == []
        assert desk.end(forced) == [first]

    def test_leaving_the_line_of_an_overfull_slot_starts_nobody(self) -> None:
        desk = Desk()
        desk.start("A")
        desk.scheduler.force(desk.ticket("A"))
        first, second = desk.wait("A"), desk.wait("A")
        assert desk.leave(first) == []
        assert second.is_waiting


class TestObstacles:
    def test_every_slot_and_pool_without_room_is_named_in_order(self) -> None:
        desk = Desk()
        full, roomy = admission(1), Pool("threads", 5, 0)
        desk.start("A", "C", full)
        ticket = desk.ticket("C", "B", "A", roomy, full)
        assert not desk.scheduler.offer(ticket)
        assert desk.scheduler.obstacles(ticket) == ([desk["C"], desk["A"]], [full])

    def test_room_means_beyond_what_the_first_of_the_line_keeps(self) -> None:
        desk = Desk()
        desk.start("B")
        first = desk.wait("A", "B")
        ticket = desk.ticket("A")
        assert not desk.scheduler.offer(ticket)
        assert desk.scheduler.obstacles(ticket) == ([desk["A"]], [])
        assert desk.scheduler.obstacles(first) == ([desk["B"]], [])

    def test_a_nested_call_is_held_up_only_by_what_is_physically_full(self) -> None:
        desk = Desk()
        desk.start("B")
        desk.wait("A", "B")
        ticket = desk.ticket("A", "B", nested=True)
        assert not desk.scheduler.offer(ticket)
        assert desk.scheduler.obstacles(ticket) == ([desk["B"]], [])

    def test_the_reserved_places_of_a_pool_are_an_obstacle_for_normal_calls_only(self) -> None:
        desk = Desk()
        pool = admission(2, 1)
        desk.start(pool)
        desk.start("A")
        normal, control = desk.ticket("A", pool), desk.ticket("A", pool, control=True)
        assert not desk.scheduler.offer(normal)
        assert desk.scheduler.obstacles(normal) == ([desk["A"]], [pool])
        assert not desk.scheduler.offer(control)
        assert desk.scheduler.obstacles(control) == ([desk["A"]], [])


class TestSlots:
    def test_the_same_key_names_the_same_slot_while_it_is_used(self) -> None:
        desk = Desk()
        running = desk.start("A")
        slot = desk["A"]
        waiter = desk.wait("A")
        assert desk["A"] is slot
        assert desk.end(running) == [waiter]
        assert desk["A"] is slot

    def test_a_slot_that_nobody_holds_or_waits_for_is_forgotten(self) -> None:
        desk = Desk()
        running = desk.start("A", "B")
        waiter = desk.wait("A")
        assert desk.scheduler.live_slots == 2
        desk.end(running)
        assert desk.scheduler.live_slots == 1
        desk.end(waiter)
        assert desk.scheduler.live_slots == 0

    def test_a_slot_is_forgotten_when_its_last_waiter_leaves(self) -> None:
        desk = Desk()
        desk.start("B")
        waiter = desk.wait("A", "B")
        assert desk.scheduler.live_slots == 2
        desk.leave(waiter)
        assert desk.scheduler.live_slots == 1

    def test_a_slot_whose_first_waits_elsewhere_is_remembered(self) -> None:
        desk = Desk()
        running, busy = desk.start("A"), desk.start("B")
        first = desk.wait("A", "B")
        desk.end(running)
        assert desk["A"].first is first
        assert desk.end(busy) == [first]

    def test_a_lasting_slot_is_never_forgotten_and_not_counted_as_live(self) -> None:
        desk = Desk()
        slot = desk.scheduler.slot("A", 1, lasting=True)
        running = desk.start("A")
        assert desk.scheduler.live_slots == 0
        desk.end(running)
        assert desk["A"] is slot

    def test_a_larger_capacity_lets_waiters_start_in_order(self) -> None:
        desk = Desk()
        desk.start("A")
        queue = [desk.wait("A") for _ in range(3)]
        desk.capacities["A"] = 3
        assert desk["A"].capacity == 3
        assert desk.settle() == queue[:2]

    def test_a_smaller_capacity_takes_nothing_from_those_who_hold_it(self) -> None:
        desk = Desk(A=2)
        running = [desk.start("A"), desk.start("A")]
        waiter = desk.wait("A")
        desk.capacities["A"] = 1
        assert desk["A"].held == 2
        assert desk.settle() == []
        assert desk.end(running[0]) == []
        assert desk.end(running[1]) == [waiter]

    def test_a_forgotten_slot_is_made_anew_with_the_capacity_it_is_asked_for(self) -> None:
        desk = Desk()
        desk.end(desk.start("A"))
        assert desk.scheduler.slot("A", 7).capacity == 7

    def test_the_line_counts_control_and_normal_waiters(self) -> None:
        desk = Desk()
        desk.start("A")
        desk.wait("A")
        desk.wait("A", control=True)
        desk.wait("A", "B")
        assert desk["A"].waiting == 3
        assert desk["B"].waiting == 1
        assert desk.scheduler.waiting == 3


# -- growth ----------------------------------------------------------------------------------------


def calls_made(action: Callable[[], object]) -> int:
    """How many functions, of Python or of C, are called while `action` runs: work, without a clock."""
    count = 0

    def count_call(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1

    before = sys.getprofile()
    # A collection in between would call whatever others have hung into the collector.
    gc.disable()
    sys.setprofile(count_call)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


Crowd = tuple[Desk, Ticket, list[Ticket]]
"""A desk, a holder that everybody waits for, and the waiters."""


def equals(size: int) -> Crowd:
    """Everybody waits for the same slot."""
    desk = Desk()
    return desk, desk.start("A"), [desk.wait("A") for _ in range(size)]


def a_mutex_under_a_shared_limit(size: int) -> Crowd:
    desk = Desk(G=10)
    return desk, desk.start("G", "M"), [desk.wait("G", "M") for _ in range(size)]


def each_with_a_slot_of_its_own(size: int) -> Crowd:
    """Nobody's needs equal another's; all wait for one shared slot."""
    desk = Desk()
    return desk, desk.start("G"), [desk.wait(number, "G") for number in range(size)]


def each_at_a_full_pool(size: int) -> Crowd:
    desk = Desk()
    pool = admission(1)
    return desk, desk.start(pool), [desk.wait(number, pool) for number in range(size)]


def each_held_up_elsewhere(size: int) -> Crowd:
    """Nobody waits for the shared slot's places; each waits for a busy slot of its own."""
    desk = Desk(G=5)
    for number in range(size):
        desk.start(number)
    return desk, desk.start("G"), [desk.wait(number, "G") for number in range(size)]


CROWDS = [
    equals,
    a_mutex_under_a_shared_limit,
    each_with_a_slot_of_its_own,
    each_at_a_full_pool,
    each_held_up_elsewhere,
]


@pytest.mark.parametrize("crowd", CROWDS)
def test_a_release_costs_the_same_with_a_hundred_waiters_and_with_ten_thousand(
    crowd: Callable[[int], Crowd],
) -> None:
    def costs(size: int) -> list[int]:
        """Of twenty calls that end one after the other, each but the first handed on from the one before."""
        desk, running, _ = crowd(size)
        started: list[Ticket] = [running]
        return [calls_made(lambda: started.extend(desk.end(started[-1]))) for _ in range(20)]

    assert costs(100) == costs(10_000)


@pytest.mark.parametrize("crowd", CROWDS)
def test_a_waiter_leaves_at_the_same_cost_from_a_hundred_and_from_ten_thousand(
    crowd: Callable[[int], Crowd],
) -> None:
    def costs(size: int) -> list[int]:
        desk, _, queue = crowd(size)
        return [calls_made(partial(desk.leave, queue[place])) for place in (50, -1, 0, 1, 2)]

    assert costs(100) == costs(10_000)


@pytest.mark.parametrize("crowd", CROWDS)
def test_an_arrival_costs_the_same_behind_a_hundred_waiters_and_behind_ten_thousand(
    crowd: Callable[[int], Crowd],
) -> None:
    def cost(size: int) -> int:
        desk, holder, _ = crowd(size)
        newcomer = desk.ticket("new", *(slot.key for slot in holder.slots), *holder.pools)

        def arrive() -> None:
            if not desk.scheduler.offer(newcomer):
                desk.scheduler.wait(newcomer)

        return calls_made(arrive)

    assert cost(100) == cost(10_000)


def remembered() -> int:
    """How many tickets exist anywhere in the process."""
    gc.collect()
    return sum(isinstance(thing, Ticket) for thing in gc.get_objects())


def parked(desk: Desk, holder: Ticket) -> int:
    """How many entries the heaps hold at the places that `holder` holds."""
    doors = [door for pool in holder.pools for door in (pool._control_door, pool._normal_door)]
    return sum(len(spot.parked) for spot in (*holder.slots, *doors))


@pytest.mark.parametrize("crowd", CROWDS)
@pytest.mark.parametrize("order", [1, -1], ids=["first first", "last first"])
def test_cancelled_waiters_leave_nothing_behind(crowd: Callable[[int], Crowd], order: int) -> None:
    before = remembered()
    desk, holder, queue = crowd(1_000)
    others = len(desk.scheduler._slots)
    assert desk.leave(*queue[::order]) == []
    queue.clear()
    assert desk.scheduler.waiting == 0
    assert not desk.scheduler._groups
    assert parked(desk, holder) < 100
    assert desk.end(holder) == []
    assert parked(desk, holder) == 0
    assert remembered() == before + 1  # `holder`, which this test still knows
    assert desk.scheduler.live_slots <= others


def test_callers_that_come_and_go_at_a_held_slot_do_not_pile_up() -> None:
    desk = Desk()
    holder = desk.start("A")
    most = 0
    for number in range(2_000):
        own = desk.wait("A", number)
        same = [desk.wait("A", control=True), desk.wait("A", control=True)]
        assert desk.leave(same[0], own, same[1]) == []
        most = max(most, parked(desk, holder))
    assert most < 100
    assert desk.scheduler.live_slots == 1


def test_a_line_whose_first_keeps_leaving_does_not_pile_up() -> None:
    desk = Desk()
    holder = desk.start("A")
    queue = [desk.wait("A") for _ in range(2_000)]
    for waiter in queue:
        desk.leave(waiter)
        assert parked(desk, holder) < 100


def test_a_waiter_whose_obstacle_keeps_changing_does_not_pile_up() -> None:
    desk = Desk()
    obstacles = [desk.start("A"), desk.start("B")]
    desk.wait("A", "B")
    for _ in range(500):
        for number, key in enumerate("AB"):
            assert desk.end(obstacles[number]) == []
            obstacles[number] = desk.start(key, nested=True)
    for _ in range(500):
        desk.leave(desk.wait("A"))
        assert parked(desk, obstacles[0]) + parked(desk, obstacles[1]) < 200


# -- who comes again -------------------------------------------------------------------------------


def test_whoever_comes_again_with_other_needs_keeps_its_place_in_the_order() -> None:
    scheduler = Scheduler()
    a, b = scheduler.slot("A", 1, lasting=True), scheduler.slot("B", 1, lasting=True)
    holder, first, second = Ticket((a,)), Ticket((a,)), Ticket((a,))
    assert scheduler.offer(holder)
    for waiter in (first, second):
        assert not scheduler.offer(waiter)
        scheduler.wait(waiter)
    scheduler.withdraw(first)
    first.slots = (a, b)
    assert not scheduler.offer(first)
    scheduler.wait(first)
    assert a.first is first
    scheduler.release(holder)
    assert scheduler.next() is first
    assert scheduler.next() is None
    scheduler.release(first)
    assert scheduler.next() is second


def test_a_holder_that_withdraws_may_be_offered_again() -> None:
    scheduler = Scheduler()
    slot = scheduler.slot("A", 1)
    ticket = Ticket((slot,))
    assert scheduler.offer(ticket)
    scheduler.withdraw(ticket)
    assert slot.held == 0
    ticket.slots = (scheduler.slot("A", 1),)
    assert scheduler.offer(ticket)
    scheduler.release(ticket)
    assert scheduler.live_slots == 0


def test_named_slots_that_nobody_needs_are_forgotten() -> None:
    scheduler = Scheduler()
    held, unused = scheduler.slot("A", 1), scheduler.slot("B", 1)
    assert scheduler.offer(Ticket((held,)))
    scheduler.forget((held, unused))
    assert scheduler.live_slots == 1
