"""Places of a limit: who has one, and who is next. The thin shell around the scheduler of the guard."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from frontmcp_py.scheduler import Scheduler, Ticket


class Entrant(Protocol):
    """Somebody who needs a place, and may have started others that need one, too."""

    @property
    def ticket(self) -> Ticket | None:
        """The claim to a place, if there is a limit."""
        ...

    @property
    def children(self) -> Collection[Entrant]:
        """Those whose end it waits for."""
        ...


class Lanes:
    """All concurrency keys of a host. First come, first served in each; none holds another up."""

    def __init__(self) -> None:
        self._begin: dict[Ticket, Callable[[], None]] = {}
        self._entrants: dict[Ticket, Entrant] = {}
        self._scheduler = Scheduler()

    def clear(self) -> None:
        """Forget everybody: they ended with their event loop."""
        self._begin.clear()
        self._entrants.clear()
        self._scheduler = Scheduler()

    @property
    def is_idle(self) -> bool:
        """Whether nobody has a place or waits for one."""
        return not (self._entrants or self._begin or self._scheduler.waiting or self._scheduler.live_slots)

    def enter(self, key: str, limit: int, who: Entrant, begin: Callable[[], None]) -> Ticket:
        """Begin when fewer than `limit` run under `key` and everybody who came before has begun or left.

        Args:
            key: The name of the limit.
            limit: How many run at once.
            who: Whose place it is.
            begin: Called once, perhaps before this returns. It must not block.
        """
        ticket = Ticket((self._scheduler.slot(key, limit),))
        self._entrants[ticket] = who
        if self._scheduler.offer(ticket):
            begin()
        else:
            self._begin[ticket] = begin
            self._scheduler.wait(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give back a place, or give up waiting for it. Whoever can begin now does, before this returns."""
        self._begin.pop(ticket, None)
        self._entrants.pop(ticket, None)
        self._scheduler.release(ticket)
        self._scheduler.leave(ticket)
        while (following := self._scheduler.next()) is not None:
            self._begin.pop(following)()

    def is_stuck(self, who: Entrant) -> bool:
        """Whether somebody waits for a place that nobody will ever give back.

        That is when each who holds a place of the key waits, directly or through what it started, for a place
        of which the same can be said. Only those who were started from a place can be stuck.
        """
        return self._is_stuck(who, frozenset(), set())

    def _is_stuck(self, who: Entrant, assumed: frozenset[Ticket], free: set[Ticket]) -> bool:
        ticket = who.ticket
        if ticket is None or not ticket.is_waiting:
            # It runs: it ends when what it has started does.
            return any(self._is_stuck(child, assumed, free) for child in who.children)
        if ticket in assumed or ticket in free:
            return ticket in assumed
        assumed |= {ticket}
        holders = (
            holder
            for each, holder in self._entrants.items()
            if each.is_holding and each.slots == ticket.slots
        )
        is_stuck = all(self._is_stuck(holder, assumed, free) for holder in holders)
        if not is_stuck:
            # Assumptions can only make more look stuck, so this holds whatever is assumed.
            free.add(ticket)
        return is_stuck
