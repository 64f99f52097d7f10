"""Places of a limit: who has one, and who is next. The thin shell around the scheduler of the guard."""

from __future__ import annotations

from collections.abc import Callable

from frontmcp_py.scheduler import Scheduler, Ticket


class Lanes:
    """All concurrency keys of a host. First come, first served in each; none holds another up."""

    def __init__(self) -> None:
        self._scheduler = Scheduler()
        self._begin: dict[Ticket, Callable[[], None]] = {}

    def enter(self, key: str, limit: int, begin: Callable[[], None]) -> Ticket:
        """Begin when fewer than `limit` run under `key` and everybody who came before has begun or left.

        Args:
            key: The name of the limit.
            limit: How many run at once.
            begin: Called once, perhaps before this returns. It must not block.
        """
        ticket = Ticket((self._scheduler.slot(key, limit),))
        if self._scheduler.offer(ticket):
            begin()
        else:
            self._begin[ticket] = begin
            self._scheduler.wait(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give back a place, or give up waiting for it. Whoever can begin now does, before this returns."""
        self._begin.pop(ticket, None)
        self._scheduler.release(ticket)
        self._scheduler.leave(ticket)
        while (following := self._scheduler.next()) is not None:
            self._begin.pop(following)()
