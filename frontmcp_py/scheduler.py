"""Whose turn is it? Slots, shared keys, priorities and admission as one pure state machine.

A call needs places: one in each of its *slots* (a concurrency limit) and one in each of its
*pools* (admission, worker threads). It starts when it can have all of them at once, else it
waits and holds nothing. Nothing here reads a clock, touches an event loop or imports anything of
the package: an event goes in, a decision comes out, and a million random schedules can be checked
against a simple model.

The rules, in full:

* **All or nothing.** A ticket takes a place in everything it needs, in one step, or in nothing.
* **Order.** Nested tickets first, in order of arrival; then control, then normal, each in order of
  arrival. Whenever something frees, waiters are tried in that order and each that can start does.
* **Claim.** A waiter stands in the line of every slot it needs. The first of a line keeps one place
  there: nobody behind it takes that place. Nobody else keeps a place, and nobody keeps one in a pool.
  So a call that is held up by another slot may be passed, but never starved.
* **Nested.** A nested ticket (its parent holds places that others may wait for) stands in no line and
  looks at what is physically free.

How it stays fast: waiters with equal needs and rank form a group, and only a group's head can be the
next to start. A group is parked at one of the places that hold it up; only when that place may have
grown (something was released there, or the first of its line left) are the groups parked there looked
at again, in order of their heads. Among waiters with equal needs, or different ones held up by one place, a
release costs the same with a hundred of them or ten thousand.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Final, Literal

NESTED: Final = 0
CONTROL: Final = 1
NORMAL: Final = 2

Rank = Literal[0, 1, 2]

NEW: Final = 0
_WAITING: Final = 1
_HOLDING: Final = 2
_DONE: Final = 3

# A spot's heap may hold stale entries; beyond this many, and four times what is live, it is rebuilt.
_COMPACT_FROM: Final = 64


class _Spot:
    """A place where groups are parked that cannot start because of it."""

    __slots__ = ("groups", "parked")

    def __init__(self) -> None:
        self.parked: list[tuple[int, int, _Group]] = []
        self.groups: int = 0


class Slot(_Spot):
    """A concurrency limit: at most `capacity` tickets hold it, the others stand in its line.

    Attributes:
        key: What the slot is known by; tickets that name the same key share it.
        capacity: How many tickets may hold it at once.
        held: How many do. Forced tickets may take it above `capacity`.
        peak: The most that held it at once.
        first: The first of the line, who keeps one place here; `None` when nobody stands in line.
    """

    __slots__ = ("_control", "_nested", "_normal", "capacity", "first", "held", "key", "lasting", "peak")

    def __init__(self, key: Hashable, capacity: int, *, lasting: bool = False) -> None:
        super().__init__()
        self.key: Hashable = key
        self.capacity: int = capacity
        self.held: int = 0
        self.peak: int = 0
        self.first: Ticket | None = None
        self.lasting: bool = lasting
        # Ordered dicts, not plain ones: taking from the front of a dict over and over is quadratic.
        self._control: OrderedDict[Ticket, None] | None = None
        self._normal: OrderedDict[Ticket, None] | None = None
        self._nested = 0

    @property
    def waiting(self) -> int:
        """How many tickets stand in this line."""
        return len(self._control or ()) + len(self._normal or ())

    @property
    def is_unused(self) -> bool:
        """Whether nobody holds it and nobody waits for it."""
        return self.held == 0 and self.first is None and self._nested == 0

    def has_room(self, ticket: Ticket) -> bool:
        """Whether `ticket` may take a place here now, beyond what the first of the line keeps."""
        free = self.capacity - self.held
        first = self.first
        if first is not None and first is not ticket and first.is_ahead_of(ticket):
            free -= 1
        return free > 0

    def _join(self, ticket: Ticket) -> None:
        if ticket.rank == NESTED:
            self._nested += 1
            return
        if ticket.rank == CONTROL:
            if self._control is None:
                self._control = OrderedDict()
            _insert(self._control, ticket)
        else:
            if self._normal is None:
                self._normal = OrderedDict()
            _insert(self._normal, ticket)
        if self.first is None or ticket.is_ahead_of(self.first):
            self.first = ticket

    def _quit(self, ticket: Ticket) -> bool:
        """Take `ticket` out of the line; whether it was the first."""
        if ticket.rank == NESTED:
            self._nested -= 1
            return False
        line = self._control if ticket.rank == CONTROL else self._normal
        assert line is not None
        del line[ticket]
        if self.first is not ticket:
            return False
        if self._control:
            self.first = next(iter(self._control))
        elif self._normal:
            self.first = next(iter(self._normal))
        else:
            self.first = self._control = self._normal = None
        return True


class _Door(_Spot):
    """One class's way into a pool, so that normal waiters at a full pool never hide control ones."""

    __slots__ = ()


class Pool:
    """Places for everybody, without lines: nobody keeps one.

    Attributes:
        capacity: Places in all.
        reserved: How many of them only control tickets may use.
        held: Places taken.
        held_normal: Places taken by normal tickets, at most `capacity - reserved`.
        peak: The most places that were taken at once.
    """

    __slots__ = (
        "_control_door",
        "_normal_door",
        "capacity",
        "held",
        "held_normal",
        "name",
        "peak",
        "reserved",
    )

    def __init__(self, name: str, capacity: int, reserved: int) -> None:
        self.name: str = name
        self.capacity: int = capacity
        self.reserved: int = reserved
        self.held: int = 0
        self.held_normal: int = 0
        self.peak: int = 0
        self._control_door = _Door()
        self._normal_door = _Door()

    def has_room(self, ticket: Ticket) -> bool:
        """Whether a place is free for a ticket of this class."""
        if self.held >= self.capacity:
            return False
        return ticket.control or self.held_normal < self.capacity - self.reserved

    def _door(self, ticket: Ticket) -> _Door:
        return self._control_door if ticket.control else self._normal_door


class Ticket:
    """One call's claim: what it needs, and whether it waits for that or holds it.

    Args:
        slots: A place in each of these, without repetition.
        pools: And in each of these.
        control: May use the reserved places of pools, and goes before normal tickets.
        nested: Made inside a running call: stands in no line, tried first.
    """

    __slots__ = ("control", "pools", "rank", "seq", "slots", "state")

    def __init__(
        self,
        slots: tuple[Slot, ...] = (),
        pools: tuple[Pool, ...] = (),
        *,
        control: bool = False,
        nested: bool = False,
    ) -> None:
        self.slots: tuple[Slot, ...] = slots
        self.pools: tuple[Pool, ...] = pools
        self.control: bool = control
        self.rank: Rank = NESTED if nested else CONTROL if control else NORMAL
        self.seq: int = 0
        self.state: int = NEW

    @property
    def is_waiting(self) -> bool:
        """Whether it stands in the queue."""
        return self.state == _WAITING

    @property
    def is_holding(self) -> bool:
        """Whether it holds its places."""
        return self.state == _HOLDING

    def is_ahead_of(self, other: Ticket) -> bool:
        """Whether `other` must leave the place that this one, first of a line, keeps.

        A nested ticket looks past kept places, so nobody is ahead of it.
        """
        if other.rank != self.rank:
            return self.rank < other.rank
        return other.rank != NESTED and self.seq < other.seq


class _Group:
    """Waiters with equal needs and rank; only the head can be the next to start."""

    __slots__ = ("key", "members", "spot")

    def __init__(self, key: tuple[object, ...]) -> None:
        self.key = key
        self.members: OrderedDict[Ticket, None] = OrderedDict()
        self.spot: _Spot | None = None

    @property
    def head(self) -> Ticket:
        return next(iter(self.members))

    def __lt__(self, other: _Group) -> bool:
        # Asked of two heap entries for one ticket, which came again with other needs: one of them is stale.
        return False


class Scheduler:
    """The state of every slot, pool and waiter, and the decisions about them.

    After any event that may free something (`release`, `leave`) call `next` until it answers `None`:
    each ticket that it returns has started and holds its places.
    """

    def __init__(self) -> None:
        self._slots: dict[Hashable, Slot] = {}
        self._groups: dict[tuple[object, ...], _Group] = {}
        self._stirred: list[_Spot] = []
        self._arrivals = 0
        self.waiting: int = 0
        """How many tickets wait, nested ones included."""

    def slot(self, key: Hashable, capacity: int, *, lasting: bool = False) -> Slot:
        """The slot known by `key`, made when there is none.

        A slot that nobody holds or waits for is forgotten, unless it was made `lasting`: name it and offer
        the ticket in one step. One that is known with another capacity changes to this one: those who hold
        it keep it, and `next` may find waiters who can start now.
        """
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = Slot(key, capacity, lasting=lasting)
        elif slot.capacity != capacity:
            slot.capacity = capacity
            if slot.parked:
                self._stir(slot)
        return slot

    @property
    def live_slots(self) -> int:
        """How many slots are remembered, lasting ones left out."""
        return sum(not slot.lasting for slot in self._slots.values())

    def forget(self, slots: tuple[Slot, ...]) -> None:
        """Slots that were named are not needed: forget those that nobody holds or waits for."""
        for slot in slots:
            self._forget_unused(slot)

    # -- events --------------------------------------------------------------------------------

    def offer(self, ticket: Ticket) -> bool:
        """A ticket arrives. It takes everything it needs and is holding, or nothing changes."""
        if not ticket.seq:
            self._arrivals += 1
            ticket.seq = self._arrivals
        for slot in ticket.slots:
            if slot.first is None:
                if slot.held >= slot.capacity:
                    return False
            elif not slot.has_room(ticket):
                return False
        for pool in ticket.pools:
            if not pool.has_room(ticket):
                return False
        self._take(ticket)
        return True

    def force(self, ticket: Ticket) -> None:
        """A new ticket takes its places whether there is room or not."""
        self._arrivals += 1
        ticket.seq = self._arrivals
        self._take(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """A ticket gives back what it holds, or leaves the queue, and may be offered again.

        It keeps its number, and so its place in the order of arrival; what it needs may change meanwhile.
        """
        self.release(ticket)
        self.leave(ticket)
        ticket.state = NEW

    def obstacles(self, ticket: Ticket) -> tuple[list[Slot], list[Pool]]:
        """The slots and the pools that have no room for `ticket` now."""
        return (
            [slot for slot in ticket.slots if not slot.has_room(ticket)],
            [pool for pool in ticket.pools if not pool.has_room(ticket)],
        )

    def refuse(self, ticket: Ticket) -> None:
        """A ticket that was offered and could not start goes away without waiting."""
        assert ticket.state == NEW
        ticket.state = _DONE
        for slot in ticket.slots:
            self._forget_unused(slot)

    def wait(self, ticket: Ticket) -> None:
        """A ticket that was offered and could not start joins the queue."""
        assert ticket.state == NEW
        blocked = self._blocked_at(ticket)
        assert blocked is not None, "a ticket that can start does not wait"
        ticket.state = _WAITING
        self.waiting += 1
        for slot in ticket.slots:
            slot._join(ticket)
        key = (ticket.rank, ticket.control, ticket.slots, ticket.pools)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(key)
            group.members[ticket] = None
            self._park(group, blocked)
        else:
            _insert(group.members, ticket)
            if group.head is ticket:
                # One that comes again may be first, and held up elsewhere.
                assert group.spot is not None
                group.spot.groups -= 1
                self._park(group, blocked)

    def release(self, ticket: Ticket) -> None:
        """A ticket's work has ended: its places are free. A second release of one ticket does nothing."""
        if ticket.state != _HOLDING:
            return
        ticket.state = _DONE
        for slot in ticket.slots:
            slot.held -= 1
            if slot.parked:
                self._stir(slot)
            self._forget_unused(slot)
        for pool in ticket.pools:
            pool.held -= 1
            if not ticket.control:
                pool.held_normal -= 1
            if pool._control_door.parked:
                self._stir(pool._control_door)
            if pool._normal_door.parked:
                self._stir(pool._normal_door)

    def leave(self, ticket: Ticket) -> None:
        """A waiter gives up (cancelled, or its time ran out). Others may be able to start now."""
        if ticket.state != _WAITING:
            return
        group = self._groups[ticket.rank, ticket.control, ticket.slots, ticket.pools]
        was_head = group.head is ticket
        self._unqueue(group, ticket)
        ticket.state = _DONE
        if group.members and was_head:
            assert group.spot is not None
            self._push(group, group.spot)

    def next(self) -> Ticket | None:
        """Start the first waiter, in order, that can start now; `None` when nobody can."""
        stirred = self._stirred
        while stirred:
            spot, group = self._first_parked()
            if group is None:
                break
            head = group.head
            blocked = self._blocked_at(head)
            if blocked is None:
                self._take(head)
                self._unqueue(group, head)
                if group.members:
                    self._push(group, spot)
                return head
            if blocked is spot:
                # Whoever stands behind the first one that is held up here is held up here too.
                stirred.remove(spot)
            else:
                spot.groups -= 1
                self._park(group, blocked)
        return None

    # -- parts ---------------------------------------------------------------------------------

    def _take(self, ticket: Ticket) -> None:
        for slot in ticket.slots:
            slot.held += 1
            if slot.held > slot.peak:
                slot.peak = slot.held
        for pool in ticket.pools:
            pool.held += 1
            if pool.held > pool.peak:
                pool.peak = pool.held
            if not ticket.control:
                pool.held_normal += 1
        ticket.state = _HOLDING

    def _blocked_at(self, ticket: Ticket) -> _Spot | None:
        for slot in ticket.slots:
            if not slot.has_room(ticket):
                return slot
        for pool in ticket.pools:
            if not pool.has_room(ticket):
                return pool._door(ticket)
        return None

    def _unqueue(self, group: _Group, ticket: Ticket) -> None:
        """Take a waiter out of its lines and its group."""
        self.waiting -= 1
        for slot in ticket.slots:
            # The place that the first of a line kept is now there for those behind it.
            if slot._quit(ticket) and slot.held < slot.capacity and slot.parked:
                self._stir(slot)
            self._forget_unused(slot)
        del group.members[ticket]
        if not group.members:
            spot = group.spot
            assert spot is not None
            spot.groups -= 1
            group.spot = None
            del self._groups[group.key]
            self._compact(spot)

    def _park(self, group: _Group, spot: _Spot) -> None:
        group.spot = spot
        spot.groups += 1
        self._push(group, spot)

    def _push(self, group: _Group, spot: _Spot) -> None:
        head = group.head
        heappush(spot.parked, (head.rank, head.seq, group))
        self._compact(spot)

    def _compact(self, spot: _Spot) -> None:
        if len(spot.parked) > max(_COMPACT_FROM, 4 * spot.groups):
            spot.parked[:] = [entry for entry in spot.parked if _is_live(entry, spot)]
            heapify(spot.parked)

    def _first_parked(self) -> tuple[_Spot, _Group | None]:
        """Of the groups parked where something changed, the one whose head comes first."""
        best: tuple[int, int, _Group] | None = None
        where = self._stirred[0]
        for spot in tuple(self._stirred):
            parked = spot.parked
            while parked and not _is_live(parked[0], spot):
                heappop(parked)
            if not parked:
                self._stirred.remove(spot)
            elif best is None or parked[0] < best:
                best, where = parked[0], spot
        return where, None if best is None else best[2]

    def _stir(self, spot: _Spot) -> None:
        if spot not in self._stirred:
            self._stirred.append(spot)

    def _forget_unused(self, slot: Slot) -> None:
        if not slot.lasting and slot.is_unused and self._slots.get(slot.key) is slot:
            del self._slots[slot.key]


def _insert(line: OrderedDict[Ticket, None], ticket: Ticket) -> None:
    """Put a ticket at the end of a line, or where its number belongs if it comes again."""
    is_last = not line or next(reversed(line)).seq < ticket.seq
    line[ticket] = None
    if not is_last:
        for behind in [each for each in line if each.seq > ticket.seq]:
            line.move_to_end(behind)


def _is_live(entry: tuple[int, int, _Group], spot: _Spot) -> bool:
    _, seq, group = entry
    return group.spot is spot and group.head.seq == seq
