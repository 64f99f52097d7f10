"""What a store decides for several instances: the rates and slots of one call, together, all or nothing.

A storage speaks in decisions. Nobody reads a count to act on it later: an `Ask` goes in, and the answer says
whether the call has started, waits in line, or is refused, and by which limit. Everything may be repeated:
the caller chooses the lease's name, so that a question whose answer was lost is asked again without harm.

`Storage` is what to implement for a store of another kind; `frontmcp_py.testing` ships the tests that each
implementation has to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from frontmcp_py.scheduler import Rank


class StorageUnavailable(Exception):
    """The store gave no answer that could be used: it is gone, hangs, or does not take the question."""


@dataclass(frozen=True, slots=True)
class RateNeed:
    """A rate limit that a call is counted in.

    Attributes:
        key: Whose count it is; unique for the limit, its numbers and its subject.
        strategy: `fixed-window`, `moving-window` or `sliding-window`.
        most: How many calls may start in a window.
        window_us: The window, in microseconds.
    """

    key: str
    strategy: str
    most: int
    window_us: int


@dataclass(frozen=True, slots=True)
class SlotNeed:
    """A slot that a call takes.

    Attributes:
        key: The slot's name; who gives the same name shares it.
        capacity: How many may hold it at once.
        no_wait: Whether the call is refused if there is no room here.
        max_queued: With so many in line it is refused as well; `None`: the line has no end.
    """

    key: str
    capacity: int
    no_wait: bool = False
    max_queued: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One call asks to start.

    Attributes:
        lease: Its name in the store, chosen by who asks, and never used for another call.
        rates: The limits to look at and to count in.
        slots: The slots to take.
        rank: Its class: nested calls go before control calls, and those before normal ones.
        attempt: Counts up with each new question for the same lease. An older one that comes late is void.
        number: Its place in the order of arrival, if it was told one before; 0 for a new arrival.
        may_wait: Whether it joins the lines when there is no room. If not, it is refused.
        force: Take the slots whether there is room or not, and count without a look.
    """

    lease: str
    rates: tuple[RateNeed, ...] = ()
    slots: tuple[SlotNeed, ...] = ()
    rank: Rank = 2
    attempt: int = 1
    number: int = 0
    may_wait: bool = True
    force: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """The call has started: it is counted, and it holds its slots until it is released or its lease ends.

    Attributes:
        number: Its place in the order of arrival.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Queued:
    """The call stands in line and holds nothing; a `Turn` tells when its time has come.

    Attributes:
        number: Its place in the order of arrival.
        blocked: Which of its slots had no room, by position.
    """

    number: int
    blocked: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NoSlot:
    """The call is refused for want of a slot; nothing was counted or taken.

    Attributes:
        blocked: Which of its slots had no room, by position.
        refused_by: The first of them that lets it not wait; `None` if only `may_wait` forbade it.
    """

    blocked: tuple[int, ...]
    refused_by: int | None


@dataclass(frozen=True, slots=True)
class TooOften:
    """The call is refused by a rate limit; nothing was counted or taken.

    Attributes:
        rate: Which of its rate limits has the longest wait, by position.
        wait_us: Microseconds until it has room for one more.
    """

    rate: int
    wait_us: int


@dataclass(frozen=True, slots=True)
class Void:
    """The question came after its call was given up, or after a newer one of it; it has changed nothing."""


Answer: TypeAlias = Started | Queued | NoSlot | TooOften | Void


@dataclass(frozen=True, slots=True)
class Turn:
    """The turn of a call that stood in line has come.

    Attributes:
        lease: The call.
        attempt: The question that it had joined the line with.
        refusal: `None`: it has started. Else its rate limit has run out meanwhile, and its turn passed on.
    """

    lease: str
    attempt: int
    refusal: TooOften | None = None


@dataclass(frozen=True, slots=True)
class Renewed:
    """What a renewal found.

    Attributes:
        turns: Turns of the instance's own calls that have come.
        lost: Calls whose lease has ended, or that the store does not know any more.
        strayed: Calls that stood in line and that the store does not know any more.
        now_us: The store's time, in microseconds; 0: it does not tell.
    """

    turns: tuple[Turn, ...] = ()
    lost: tuple[str, ...] = ()
    strayed: tuple[str, ...] = ()
    now_us: int = field(default=0, compare=False)


class Storage(Protocol):
    """A store that several instances share. One object is one instance.

    Every question is one atomic step of the store, by the store's clock, and raises `StorageUnavailable` when
    it cannot be answered. How long an answer may take is not the storage's matter: who asks gives up, by
    cancelling, when its time is over.
    """

    @property
    def shares_slots(self) -> bool:
        """Whether slots are shared too; if not, an `Ask` has rates only."""
        ...

    @property
    def where(self) -> str:
        """Where the store is, for logs, without passwords."""
        ...

    def cannot_count(self, strategy: str, window_us: int) -> str | None:
        """What a rate limit would have to be like to be counted here; `None` if it can be as it is.

        Args:
            strategy: Its strategy.
            window_us: Its window, in microseconds.
        """
        ...

    async def open(self) -> None:
        """Make sure that the store answers and is one that can be used. May be called again after `close`."""
        ...

    async def close(self) -> None:
        """Close every connection. Never raises."""
        ...

    async def take(self, ask: Ask) -> Answer:
        """Look at every rate limit and slot of a call, and take all of them or nothing."""
        ...

    async def pass_on(self, lease: str, attempt: int) -> Sequence[Turn]:
        """A turn that has come cannot be used now: uncounted, it goes to the next in line, in the same step.

        The call stands in no line until it asks again, with its number.
        """
        ...

    async def release(self, lease: str, *, undo: bool = False) -> Sequence[Turn]:
        """The work has ended, or the call does not wait any more; the next in line start in the same step.

        Args:
            lease: The call. One that is not known is no error.
            undo: The work never began: it is not counted, and a question that is still on its way is void.

        Returns:
            The turns of this instance's own calls; those of others are told to them.
        """
        ...

    async def renew(self, held: Sequence[str], waiting: Sequence[str]) -> Renewed:
        """Keep everything of this instance alive for one lease more, and let the lines of its waiters move.

        Args:
            held: The calls that hold slots.
            waiting: The calls that stand in line.
        """
        ...

    async def listen(self, hear: Callable[[Turn], None], ready: Callable[[], None]) -> None:
        """Pass on what the store tells this instance, until cancelled.

        Messages may be lost: `renew` finds what they would have told.

        Args:
            hear: Called for each turn.
            ready: Called once, when messages can be heard from now on.

        Raises:
            StorageUnavailable: The connection is gone.
        """
        ...
