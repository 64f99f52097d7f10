"""The scheduler's rules told in the plainest way, and a driver that plays schedules against both.

`Model` knows nothing of how the scheduler works: it keeps one list of waiters in order and walks over it
for every question. `Driver` makes events happen at a scheduler and tells them to a `Watch`; `ModelWatch`
is the one that plays them to the model too and compares every decision. `play` makes up a schedule.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from random import Random

from frontmcp_py.scheduler import Pool, Scheduler, Slot, Ticket

# -- the model -------------------------------------------------------------------------------------


class Claim:
    """A call in the model: what it needs, by name, and its turn."""

    __slots__ = ("control", "nested", "pools", "slots", "turn")

    def __init__(
        self, slots: Sequence[str], pools: Sequence[str], *, control: bool, nested: bool, arrival: int
    ) -> None:
        self.slots = slots
        self.pools = pools
        self.control = control
        self.nested = nested
        # Nested first, then control, then normal; each in order of arrival.
        self.turn = (not nested, not control if not nested else False, arrival)

    def __lt__(self, other: Claim) -> bool:
        return self.turn < other.turn


class Model:
    """Who may start, decided by looking at everybody."""

    def __init__(self, slots: dict[str, int], pools: dict[str, tuple[int, int]]) -> None:
        self.slots = dict(slots)
        self.pools = pools
        self.held = dict.fromkeys((*slots, *pools), 0)
        self.held_by_normal = dict.fromkeys(pools, 0)
        self.waiters: list[Claim] = []

    def lines(self) -> dict[str, list[Claim]]:
        """Who stands in line for each slot, in order."""
        lines: dict[str, list[Claim]] = {slot: [] for slot in self.slots}
        for waiter in self.waiters:
            if not waiter.nested:
                for slot in waiter.slots:
                    lines[slot].append(waiter)
        return lines

    def first(self, slot: str) -> Claim | None:
        for waiter in self.waiters:
            if not waiter.nested and slot in waiter.slots:
                return waiter
        return None

    def in_use(self, slot: str) -> bool:
        return self.held[slot] > 0 or any(slot in waiter.slots for waiter in self.waiters)

    def slot_has_room(self, slot: str, claim: Claim) -> bool:
        free = self.slots[slot] - self.held[slot]
        if free == 1 and not claim.nested:
            # The last free place: the first of the line keeps it from whoever stands behind.
            first = self.first(slot)
            if first is not None and first < claim:
                return False
        return free > 0

    def pool_has_room(self, pool: str, claim: Claim) -> bool:
        places, reserved = self.pools[pool]
        if self.held[pool] >= places:
            return False
        return claim.control or self.held_by_normal[pool] < places - reserved

    def obstacles(self, claim: Claim) -> tuple[list[str], list[str]]:
        return (
            [slot for slot in claim.slots if not self.slot_has_room(slot, claim)],
            [pool for pool in claim.pools if not self.pool_has_room(pool, claim)],
        )

    def can_start(self, claim: Claim) -> bool:
        for slot in claim.slots:
            if not self.slot_has_room(slot, claim):
                return False
        return all(self.pool_has_room(pool, claim) for pool in claim.pools)

    def next(self) -> Claim | None:
        """Who starts now: the first of all waiters, in order, that can."""
        for waiter in self.waiters:
            if self.can_start(waiter):
                return waiter
        return None

    def take(self, claim: Claim) -> None:
        self._count(claim, 1)

    def give_back(self, claim: Claim) -> None:
        self._count(claim, -1)

    def _count(self, claim: Claim, places: int) -> None:
        for name in (*claim.slots, *claim.pools):
            self.held[name] += places
        if not claim.control:
            for pool in claim.pools:
                self.held_by_normal[pool] += places


# -- the driver ------------------------------------------------------------------------------------


class Watch:
    """Told of everything that happens; subclasses check what they care about."""

    def offered(self, driver: Driver, ticket: Ticket, started: bool) -> None:
        """A new ticket was offered."""

    def queued(self, driver: Driver, ticket: Ticket) -> None:
        """It could not start and waits."""

    def refused(self, driver: Driver, ticket: Ticket) -> None:
        """It could not start and went away."""

    def forced(self, driver: Driver, ticket: Ticket) -> None:
        """A new ticket took its places, room or not."""

    def released(self, driver: Driver, ticket: Ticket) -> None:
        """A ticket gave its places back."""

    def left(self, driver: Driver, ticket: Ticket) -> None:
        """A waiter gave up."""

    def resized(self, driver: Driver, name: str, capacity: int) -> None:
        """A slot's capacity has changed."""

    def turned(self, driver: Driver, ticket: Ticket | None) -> None:
        """`next` has answered; `driver.waiting` still holds the ticket."""

    def settled(self, driver: Driver) -> None:
        """Nobody else can start, and nothing is under way."""


class Driver:
    """Makes events happen at a scheduler, in the way its contract asks for.

    `settle` must follow whatever may free something, before the next arrival.
    """

    def __init__(
        self,
        slots: dict[str, int],
        pools: dict[str, tuple[int, int]],
        watch: Watch,
        *,
        lasting: Iterable[str] = (),
    ) -> None:
        self.scheduler = Scheduler()
        self.capacities = dict(slots)
        self.pools = {name: Pool(name, places, reserved) for name, (places, reserved) in pools.items()}
        self.lasting = {name: self.scheduler.slot(name, slots[name], lasting=True) for name in lasting}
        self.watch = watch
        self.waiting: list[Ticket] = []
        self.holding: list[Ticket] = []
        self.ended: list[Ticket] = []

    def ticket(self, slots: Sequence[str], pools: Sequence[str], control: bool, nested: bool) -> Ticket:
        return Ticket(
            tuple([self.scheduler.slot(name, self.capacities[name]) for name in slots]),
            tuple([self.pools[name] for name in pools]),
            control=control,
            nested=nested,
        )

    def arrive(
        self,
        slots: Sequence[str],
        pools: Sequence[str] = (),
        *,
        control: bool = False,
        nested: bool = False,
        patient: bool = True,
    ) -> Ticket:
        """A call arrives. When it cannot start, it waits if it is `patient` and else goes away."""
        ticket = self.ticket(slots, pools, control, nested)
        started = self.scheduler.offer(ticket)
        self.watch.offered(self, ticket, started)
        if started:
            self.holding.append(ticket)
        elif patient:
            self.scheduler.wait(ticket)
            self.waiting.append(ticket)
            self.watch.queued(self, ticket)
        else:
            self.scheduler.refuse(ticket)
            self.watch.refused(self, ticket)
        return ticket

    def force(
        self, slots: Sequence[str], pools: Sequence[str] = (), *, control: bool = False, nested: bool = False
    ) -> Ticket:
        """A call that is only observed starts."""
        ticket = self.ticket(slots, pools, control, nested)
        self.scheduler.force(ticket)
        self.holding.append(ticket)
        self.watch.forced(self, ticket)
        return ticket

    def release(self, ticket: Ticket) -> None:
        self.holding.remove(ticket)
        self.scheduler.release(ticket)
        self.ended.append(ticket)
        self.watch.released(self, ticket)

    def come_again(self, ticket: Ticket, slots: Sequence[str], pools: Sequence[str] = ()) -> None:
        """A call gives back what it holds, or leaves the queue, and comes again at once with other needs."""
        party, told = (
            (self.waiting, self.watch.left) if ticket in self.waiting else (self.holding, self.watch.released)
        )
        party.remove(ticket)
        self.scheduler.withdraw(ticket)
        told(self, ticket)
        fresh = self.ticket(slots, pools, control=False, nested=False)
        ticket.slots, ticket.pools = fresh.slots, fresh.pools
        started = self.scheduler.offer(ticket)
        self.watch.offered(self, ticket, started)
        if started:
            self.holding.append(ticket)
        else:
            self.scheduler.wait(ticket)
            insort(self.waiting, ticket, key=lambda waiter: waiter.seq)
            self.watch.queued(self, ticket)

    def leave(self, ticket: Ticket) -> None:
        self.waiting.remove(ticket)
        self.scheduler.leave(ticket)
        self.ended.append(ticket)
        self.watch.left(self, ticket)

    def resize(self, name: str, capacity: int) -> None:
        """From now on the limit is another one."""
        self.capacities[name] = capacity
        used = (slot.key for ticket in (*self.holding, *self.waiting) for slot in ticket.slots)
        if name in self.lasting or name in used:
            self.scheduler.slot(name, capacity)
        self.watch.resized(self, name, capacity)

    def settle(self, at_turn: Callable[[Ticket], None] | None = None) -> list[Ticket]:
        """Start whoever can, in order. `at_turn` may make more happen after each start."""
        started: list[Ticket] = []
        while True:
            ticket = self.scheduler.next()
            self.watch.turned(self, ticket)
            if ticket is None:
                break
            self.waiting.remove(ticket)
            self.holding.append(ticket)
            started.append(ticket)
            if at_turn is not None:
                at_turn(ticket)
        self.watch.settled(self)
        return started

    def finish(self, pick: Callable[[int], int] | None = None) -> None:
        """End everything: waiters start and end, or leave, until nobody is left."""
        while self.waiting or self.holding:
            party = self.holding or self.waiting
            ticket = party[pick(len(party)) if pick else 0]
            if party is self.holding:
                self.release(ticket)
            else:
                self.leave(ticket)
            self.settle()


class ModelWatch(Watch):
    """Plays every event to the model too; the two must agree at each step."""

    def __init__(self, slots: dict[str, int], pools: dict[str, tuple[int, int]], note: object = "") -> None:
        self.model = Model(slots, pools)
        self.claims: dict[Ticket, Claim] = {}
        self.note = note
        self.settlings = 0

    def offered(self, driver: Driver, ticket: Ticket, started: bool) -> None:
        claim = self._claim(ticket)
        assert started == self.model.can_start(claim), (self.note, "offer")
        if started:
            self.model.take(claim)
        else:
            self._compare_obstacles(driver, ticket)
        assert ticket.is_holding == started, self.note
        assert not ticket.is_waiting, self.note

    def queued(self, driver: Driver, ticket: Ticket) -> None:
        insort(self.model.waiters, self.claims[ticket])
        assert ticket.is_waiting, self.note

    def refused(self, driver: Driver, ticket: Ticket) -> None:
        self._gone(ticket)

    def forced(self, driver: Driver, ticket: Ticket) -> None:
        self.model.take(self._claim(ticket))
        assert ticket.is_holding, self.note

    def released(self, driver: Driver, ticket: Ticket) -> None:
        self.model.give_back(self._gone(ticket))

    def left(self, driver: Driver, ticket: Ticket) -> None:
        self.model.waiters.remove(self._gone(ticket))

    def resized(self, driver: Driver, name: str, capacity: int) -> None:
        self.model.slots[name] = capacity

    def turned(self, driver: Driver, ticket: Ticket | None) -> None:
        expected = self.model.next()
        assert (None if ticket is None else self.claims[ticket]) is expected, (self.note, "next")
        if ticket is None:
            return
        assert expected is not None
        self.model.waiters.remove(expected)
        self.model.take(expected)
        assert ticket.is_holding, self.note
        assert not ticket.is_waiting, self.note

    def settled(self, driver: Driver) -> None:
        self._compare_state(driver)
        if driver.waiting:
            self.settlings += 1
            self._compare_obstacles(driver, driver.waiting[self.settlings % len(driver.waiting)])

    def _claim(self, ticket: Ticket) -> Claim:
        claim = self.claims[ticket] = Claim(
            [str(slot.key) for slot in ticket.slots],
            [pool.name for pool in ticket.pools],
            control=ticket.control,
            nested=ticket.rank == 0,
            arrival=ticket.seq,
        )
        return claim

    def _gone(self, ticket: Ticket) -> Claim:
        assert not ticket.is_holding, self.note
        assert not ticket.is_waiting, self.note
        return self.claims.pop(ticket)

    def _compare_obstacles(self, driver: Driver, ticket: Ticket) -> None:
        slots, pools = driver.scheduler.obstacles(ticket)
        found = ([slot.key for slot in slots], [pool.name for pool in pools])
        assert found == self.model.obstacles(self.claims[ticket]), (self.note, "obstacles")

    def _compare_state(self, driver: Driver) -> None:
        model, scheduler = self.model, driver.scheduler
        slots: dict[object, Slot] = {}
        lines = model.lines()
        live = 0
        for name, capacity in driver.capacities.items():
            if not model.in_use(name):
                continue
            live += name not in driver.lasting
            slot = slots[name] = scheduler.slot(name, capacity)
            assert slot.held == model.held[name], (self.note, "held", name)
            line = lines[name]
            assert slot.waiting == len(line), (self.note, "line", name)
            first = None if slot.first is None else self.claims[slot.first]
            assert first is (line[0] if line else None), (self.note, "first", name)
        # Asked after every live slot was named: one that had been forgotten too early was made anew above.
        assert scheduler.live_slots == live, (self.note, "live slots")
        assert scheduler.waiting == len(model.waiters), (self.note, "waiting")
        for name, pool in driver.pools.items():
            assert pool.held == model.held[name], (self.note, "held", name)
            assert pool.held_normal == model.held_by_normal[name], (self.note, "held by normal", name)
        for ticket in (*driver.waiting, *driver.holding):
            for slot in ticket.slots:
                assert slots[slot.key] is slot, (self.note, "same slot", slot.key)


# -- schedules -------------------------------------------------------------------------------------


class Setting:
    """What a made-up schedule happens in: slots and pools, and how calls there tend to be."""

    def __init__(self, rng: Random, *, max_slots: int = 4, forces: bool = True, returns: bool = True) -> None:
        chance = rng.random
        self.slots = {name: 1 + int(chance() * 3) for name in "ABCD"[: 1 + int(chance() * max_slots)]}
        places = 2 + int(chance() * 4)
        self.pools = {
            "admission": (places, int(chance() * min(3, places))),
            "threads": (1 + int(chance() * 3), 0),
        }
        self.lasting = [name for name in self.slots if chance() < 0.15]
        self.steps = 5 + int(chance() * 25)
        self.arrives = 0.5 + chance() * 0.3
        self.control = chance() * 0.5
        self.nested = chance() * 0.3
        self.forced = chance() * 0.1 if forces and chance() < 0.4 else 0.0
        self.pooled = chance() * 0.7
        self.patient = 0.7 + chance() * 0.3
        self.at_turn = chance() * 0.3
        self.resized = 0.1 if chance() < 0.3 else 0.0
        self.returns = chance() * 0.4 if returns and chance() < 0.4 else 0.0

    def driver(self, watch: Watch) -> Driver:
        return Driver(self.slots, self.pools, watch, lasting=self.lasting)


class Player:
    """Lets random things happen to `driver`."""

    def __init__(self, rng: Random, setting: Setting, driver: Driver) -> None:
        self.chance = rng.random
        self.setting = setting
        self.driver = driver
        self.names = list(setting.slots)

    def pick(self, count: int) -> int:
        return int(self.chance() * count)

    def any_of(self, tickets: list[Ticket]) -> Ticket:
        return tickets[self.pick(len(tickets))]

    def needs(self) -> tuple[list[str], list[str]]:
        names = self.names
        first = self.pick(len(names))
        count = self.pick(min(3, len(names)) + 1)
        slots = [names[(first + step) % len(names)] for step in range(count)]
        if count == 2 and self.chance() < 0.3:
            slots.reverse()
        return slots, [name for name in self.driver.pools if self.chance() < self.setting.pooled]

    def arrival(self) -> None:
        chance, setting, driver = self.chance, self.setting, self.driver
        slots, pools = self.needs()
        nested = chance() < setting.nested
        control = chance() < setting.control
        if chance() < setting.forced:
            driver.force(slots, pools, control=control, nested=nested)
        else:
            patient = chance() < setting.patient
            driver.arrive(slots, pools, control=control, nested=nested, patient=patient)

    def something_frees(self) -> None:
        driver, what = self.driver, self.chance()
        present = [*driver.waiting, *driver.holding]
        if present and self.chance() < self.setting.returns:
            driver.come_again(self.any_of(present), *self.needs())
        elif what < 0.1 and driver.ended:
            driver.scheduler.release(self.any_of(driver.ended))  # again: does nothing
        elif what < 0.8 and driver.holding:
            driver.release(self.any_of(driver.holding))
        elif driver.waiting:
            driver.leave(self.any_of(driver.waiting))

    def at_turn(self, ticket: Ticket) -> None:
        """Between two starts of one turn of the loop."""
        driver = self.driver
        if self.chance() >= self.setting.at_turn:
            return
        what = self.chance()
        if what < 0.6:
            driver.release(ticket)  # its rate limit has run out meanwhile: refused at its turn
        elif what < 0.8:
            driver.release(self.any_of(driver.holding))
        elif driver.waiting:
            driver.leave(self.any_of(driver.waiting))

    def step(self) -> None:
        if self.chance() < self.setting.arrives:
            self.arrival()
            self.driver.settle()  # an arrival frees nothing: nobody can start
            return
        for _ in range(1 if self.chance() < 0.8 else 3):
            self.something_frees()
        if self.chance() < self.setting.resized:
            self.driver.resize(self.names[self.pick(len(self.names))], 1 + self.pick(3))
        self.driver.settle(self.at_turn)


def play(rng: Random, setting: Setting, driver: Driver) -> None:
    """Let random things happen to `driver`, then end everything."""
    player = Player(rng, setting, driver)
    for _ in range(setting.steps):
        player.step()
    driver.finish(player.pick)


def check_against_model(seed: int) -> None:
    """One random schedule, at which scheduler and model must agree to the last step."""
    rng = Random(seed)
    setting = Setting(rng)
    driver = setting.driver(ModelWatch(setting.slots, setting.pools, f"seed {seed}"))
    play(rng, setting, driver)
    assert_all_free(driver)


def assert_all_free(driver: Driver) -> None:
    """Everything is free again: each slot and pool takes exactly as many fresh tickets as it has places."""
    scheduler = driver.scheduler
    assert scheduler.waiting == 0
    assert scheduler.live_slots == 0
    for name, capacity in driver.capacities.items():
        slot = scheduler.slot(name, capacity)
        _assert_places(scheduler, slot.capacity, slot)
    for pool in driver.pools.values():
        _assert_places(scheduler, pool.capacity, pool)
    assert scheduler.live_slots == 0


def _assert_places(scheduler: Scheduler, places: int, where: Slot | Pool) -> None:
    def ticket() -> Ticket:
        if isinstance(where, Slot):
            return Ticket((where,), control=True)
        return Ticket((), (where,), control=True)

    fresh = [ticket() for _ in range(places)]
    assert all(scheduler.offer(one) for one in fresh)
    assert where.held == places
    last = ticket()
    assert not scheduler.offer(last)
    scheduler.refuse(last)
    for one in fresh:
        scheduler.release(one)
    assert scheduler.next() is None
    assert where.held == 0
