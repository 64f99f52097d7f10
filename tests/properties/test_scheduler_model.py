"""Random schedules: the scheduler decides as the model does, and keeps what the rules promise."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from frontmcp_py.scheduler import NESTED, NORMAL, Pool, Slot, Ticket
from tests.properties.scheduler_model import (
    Driver,
    ModelWatch,
    Setting,
    Watch,
    assert_all_free,
    check_against_model,
    play,
)

# -- against the model -----------------------------------------------------------------------------


def test_the_scheduler_decides_as_the_model_does() -> None:
    for seed in range(5_000):
        check_against_model(seed)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_the_scheduler_decides_as_the_model_does_in_a_hundred_thousand_schedules(chunk: int) -> None:
    for seed in range(10_000 * (chunk + 1), 10_000 * (chunk + 2)):
        check_against_model(seed)


SLOTS = st.lists(st.sampled_from("ABC"), unique=True, max_size=3)
POOLS = st.lists(st.sampled_from(["admission", "threads"]), unique=True)
INDEX = st.integers(0, 9)


class Schedule(RuleBasedStateMachine):
    """The same comparison with schedules that hypothesis makes up, and shrinks when one fails."""

    @initialize(
        capacities=st.tuples(*[st.integers(1, 3)] * 3),
        admission=st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 1), (5, 2)]),
        threads=st.integers(1, 3),
        lasting=st.sets(st.sampled_from("ABC"), max_size=1),
    )
    def open(
        self, capacities: tuple[int, ...], admission: tuple[int, int], threads: int, lasting: set[str]
    ) -> None:
        slots = dict(zip("ABC", capacities, strict=True))
        pools = {"admission": admission, "threads": (threads, 0)}
        self.driver = Driver(slots, pools, ModelWatch(slots, pools), lasting=lasting)

    @rule(slots=SLOTS, pools=POOLS, control=st.booleans(), nested=st.booleans(), patient=st.booleans())
    def arrive(self, slots: list[str], pools: list[str], control: bool, nested: bool, patient: bool) -> None:
        self.driver.settle()
        self.driver.arrive(slots, pools, control=control, nested=nested, patient=patient)

    @rule(slots=SLOTS, control=st.booleans())
    def queue_up(self, slots: list[str], control: bool) -> None:
        self.driver.settle()
        for _ in range(3):
            self.driver.arrive(slots, control=control)

    @rule(slots=SLOTS, pools=POOLS, control=st.booleans(), nested=st.booleans())
    def force(self, slots: list[str], pools: list[str], control: bool, nested: bool) -> None:
        self.driver.settle()
        self.driver.force(slots, pools, control=control, nested=nested)

    @precondition(lambda self: self.driver.holding)
    @rule(index=INDEX)
    def release(self, index: int) -> None:
        self.driver.release(pick(self.driver.holding, index))

    @precondition(lambda self: self.driver.ended)
    @rule(index=INDEX)
    def release_again(self, index: int) -> None:
        self.driver.scheduler.release(pick(self.driver.ended, index))

    @precondition(lambda self: self.driver.waiting)
    @rule(index=INDEX)
    def leave(self, index: int) -> None:
        self.driver.leave(pick(self.driver.waiting, index))

    @precondition(lambda self: self.driver.waiting or self.driver.holding)
    @rule(index=INDEX, slots=SLOTS, pools=POOLS)
    def come_again(self, index: int, slots: list[str], pools: list[str]) -> None:
        self.driver.come_again(pick([*self.driver.waiting, *self.driver.holding], index), slots, pools)

    @rule(name=st.sampled_from("ABC"), capacity=st.integers(1, 3))
    def resize(self, name: str, capacity: int) -> None:
        self.driver.resize(name, capacity)

    @rule(refused=st.lists(st.booleans(), max_size=4))
    def settle(self, refused: list[bool]) -> None:
        refusals = iter(refused)

        def at_turn(ticket: Ticket) -> None:
            if next(refusals, False):
                self.driver.release(ticket)

        self.driver.settle(at_turn)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.settle()
            self.driver.finish()
            assert_all_free(self.driver)


def pick(tickets: Sequence[Ticket], index: int) -> Ticket:
    return tickets[index % len(tickets)]


def test_the_scheduler_decides_as_the_model_does_in_schedules_that_shrink() -> None:
    run_state_machine_as_test(
        Schedule,
        settings=settings(
            derandomize=True,
            database=None,
            deadline=None,
            max_examples=40,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )


# -- promises, checked without the model -------------------------------------------------------------


def watch_schedules(watch: Watch, count: int = 500, *, forces: bool = True, returns: bool = True) -> None:
    for seed in range(count):
        rng = Random(seed)
        setting = Setting(rng, forces=forces, returns=returns)
        play(rng, setting, setting.driver(watch))


def needs(ticket: Ticket) -> tuple[Slot | Pool, ...]:
    return (*ticket.slots, *ticket.pools)


class NeverOverALimit(Watch):
    def offered(self, driver: Driver, ticket: Ticket, started: bool) -> None:
        if started:
            self.check([*driver.holding, ticket], ticket)

    def turned(self, driver: Driver, ticket: Ticket | None) -> None:
        if ticket is not None:
            self.check([*driver.holding, ticket], ticket)

    def settled(self, driver: Driver) -> None:
        for ticket in driver.holding:
            self.count(driver.holding, ticket)

    def check(self, holding: list[Ticket], newest: Ticket) -> None:
        """Wherever the newest has got a place, it had to be free, and not a reserved one."""
        self.count(holding, newest)
        assert all(where.held <= where.capacity for where in needs(newest))
        if not newest.control:
            assert all(pool.held_normal <= pool.capacity - pool.reserved for pool in newest.pools)

    def count(self, holding: list[Ticket], ticket: Ticket) -> None:
        for where in needs(ticket):
            assert where.held == sum(where in needs(holder) for holder in holding)
        for pool in ticket.pools:
            normal = sum(pool in holder.pools and not holder.control for holder in holding)
            assert pool.held_normal == normal


def test_nobody_starts_over_a_limit_but_forced_tickets() -> None:
    watch_schedules(NeverOverALimit())


def test_no_place_is_ever_lost() -> None:
    for seed in range(500):
        rng = Random(seed)
        setting = Setting(rng)
        driver = setting.driver(Watch())
        play(rng, setting, driver)
        assert_all_free(driver)


class NobodyWaitsInVain(Watch):
    def settled(self, driver: Driver) -> None:
        for ticket in driver.waiting:
            slots, pools = driver.scheduler.obstacles(ticket)
            assert slots or pools
            if ticket.rank == NESTED or all(slot.first is ticket for slot in ticket.slots):
                # No place is kept from it: something it needs is taken, to the last place it may have.
                assert any(self.is_full(driver.holding, where, ticket) for where in needs(ticket))

    def is_full(self, holding: list[Ticket], where: Slot | Pool, ticket: Ticket) -> bool:
        holders = [holder for holder in holding if where in needs(holder)]
        if isinstance(where, Pool) and not ticket.control:
            normal = sum(not holder.control for holder in holders)
            if normal >= where.capacity - where.reserved:
                return True
        return len(holders) >= where.capacity


def test_nobody_waits_who_could_start() -> None:
    watch_schedules(NobodyWaitsInVain())


class FirstComeFirstServed(Watch):
    def turned(self, driver: Driver, ticket: Ticket | None) -> None:
        if ticket is not None:
            assert next(waiter for waiter in driver.waiting if self.equal(waiter, ticket)) is ticket

    def offered(self, driver: Driver, ticket: Ticket, started: bool) -> None:
        if started:
            assert not any(self.equal(waiter, ticket) for waiter in driver.waiting)

    def equal(self, one: Ticket, other: Ticket) -> bool:
        return (
            one.rank == other.rank
            and one.control == other.control
            and set(one.slots) == set(other.slots)
            and set(one.pools) == set(other.pools)
        )


def test_equals_are_served_first_come_first_served() -> None:
    # One that comes again keeps what it held, whoever has waited for that.
    watch_schedules(FirstComeFirstServed(), returns=False)


class ThePlaceOfTheFirst(Watch):
    def offered(self, driver: Driver, ticket: Ticket, started: bool) -> None:
        if started:
            self.check(driver, ticket)

    def turned(self, driver: Driver, ticket: Ticket | None) -> None:
        if ticket is not None:
            self.check(driver, ticket)

    def check(self, driver: Driver, started: Ticket) -> None:
        if started.rank == NESTED:
            return
        for slot in started.slots:
            line = [one for one in driver.waiting if slot in one.slots and one.rank != NESTED]
            if any((one.rank, one.seq) < (started.rank, started.seq) for one in line):
                assert slot.held < slot.capacity


def test_whoever_starts_leaves_a_place_for_the_first_of_the_line() -> None:
    watch_schedules(ThePlaceOfTheFirst(), forces=False)


class AgainAndAgain(Watch):
    def settled(self, driver: Driver) -> None:
        before = self.state(driver)
        for ticket in driver.ended:
            driver.scheduler.release(ticket)
            driver.scheduler.leave(ticket)
        assert driver.scheduler.next() is None
        assert self.state(driver) == before

    def state(self, driver: Driver) -> list[object]:
        pools = driver.pools.values()
        slots = {slot for ticket in (*driver.waiting, *driver.holding) for slot in ticket.slots}
        return [
            driver.scheduler.waiting,
            driver.scheduler.live_slots,
            [(pool.held, pool.held_normal) for pool in pools],
            {slot: (slot.held, slot.waiting, slot.first) for slot in slots},
        ]


def test_a_second_release_does_nothing() -> None:
    watch_schedules(AgainAndAgain())


def test_the_first_of_a_line_is_never_starved() -> None:
    """A call needs A and B. Single-slot callers keep both busy for ever, and yet it starts.

    It does so at the latest when everybody who was there before it has ended.
    """
    for seed in range(300):
        rng = Random(seed)
        slots = {"A": rng.randint(1, 3), "B": rng.randint(1, 3)}
        driver = Driver(slots, {}, Watch())
        for slot, capacity in slots.items():
            for _ in range(capacity + rng.randint(0, 3)):
                driver.arrive([slot])
        before = {*driver.holding, *driver.waiting}
        both = driver.arrive(rng.choice(["AB", "BA"]))
        assert both.is_waiting
        while not both.is_holding:
            assert before, f"seed {seed}: starved"
            ended = rng.choice(driver.holding)
            before.discard(ended)
            driver.release(ended)
            driver.settle()
            for _ in range(rng.randint(1, 3)):
                driver.arrive([rng.choice("AB")])
        assert len(driver.waiting) > 0


def test_calls_that_share_no_slot_never_wait_for_each_other() -> None:
    """Two crowds that share nothing but a roomy pool fare together as each does alone."""
    for seed in range(400):
        rng = Random(seed)
        slots = {name: rng.randint(1, 3) for name in "ABCD"}
        pools = {"admission": (1000, 0)}
        together = Driver(slots, pools, Watch())
        alone = {crowd: Driver(slots, pools, Watch()) for crowd in ("AB", "CD")}
        twins: dict[Ticket, tuple[str, Ticket]] = {}
        for _ in range(40):
            crowd = rng.choice(["AB", "CD"])
            apart = alone[crowd]
            mine = [one for one in (*together.holding, *together.waiting) if twins[one][0] == crowd]
            if not mine or rng.random() < 0.5:
                wanted = rng.sample(crowd, rng.randint(1, 2))
                control, nested = rng.random() < 0.2, rng.random() < 0.1
                one = together.arrive(wanted, ["admission"], control=control, nested=nested)
                other = apart.arrive(wanted, ["admission"], control=control, nested=nested)
                assert one.is_holding == other.is_holding, f"seed {seed}"
                twins[one] = (crowd, other)
            else:
                one = rng.choice(mine)
                other = twins[one][1]
                if one.is_holding:
                    together.release(one)
                    apart.release(other)
                else:
                    together.leave(one)
                    apart.leave(other)
            assert [twins[started][1] for started in together.settle()] == apart.settle(), f"seed {seed}"


def test_schedules_reach_what_they_are_meant_to_check() -> None:
    """A generator that never crowds a slot would prove nothing."""

    class Seen(Watch):
        def __init__(self) -> None:
            self.starts = [0, 0, 0]
            self.passed = self.crowded = self.leaves = self.forces = 0

        def turned(self, driver: Driver, ticket: Ticket | None) -> None:
            if ticket is not None:
                self.starts[ticket.rank] += 1
                self.passed += ticket is not driver.waiting[0]

        def settled(self, driver: Driver) -> None:
            self.crowded += sum(ticket.rank == NORMAL for ticket in driver.waiting) > 3

        def left(self, driver: Driver, ticket: Ticket) -> None:
            self.leaves += 1

        def forced(self, driver: Driver, ticket: Ticket) -> None:
            self.forces += 1

    seen = Seen()
    watch_schedules(seen)
    assert min(seen.starts) > 50
    assert min(seen.passed, seen.crowded, seen.leaves, seen.forces) > 50
