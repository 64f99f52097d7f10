"""What a storage decides: rates and slots of one call, together, all or nothing.

A storage speaks in decisions. The guard never reads a count to act on it later: it hands over a
`Claim` and is told whether the call has started, must wait, or is refused, and by which limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from frontmcp_py.scheduler import Pool, Slot, Ticket

if TYPE_CHECKING:
    from frontmcp_py.policy import RateLimit


class Windows(Protocol):
    """Counts of one strategy and window length, by key. Times are nanoseconds of the wall's clock.

    `overflow` is the key that new subjects share when no more can be held.
    """

    def wait_ns(self, key: str, most: int, now_ns: int, overflow: str) -> int:
        """Nanoseconds until one more call has room, of `most` in a window; 0 when it has room now."""
        ...

    def hit(self, key: str, now_ns: int, overflow: str) -> object:
        """Count a call that starts."""
        ...

    def undo(self, key: str, overflow: str, counted_ns: int) -> None:
        """Take back the latest `hit`, which was at `counted_ns`: the call never ran after all."""
        ...


class RateRule(Protocol):
    """One rate limit as it applies to one tool (or to all): whose counts they are, and where they live."""

    @property
    def limit(self) -> RateLimit:
        """The limit that is counted."""
        ...

    @property
    def scope(self) -> str:
        """`tool` or `global`."""
        ...

    @property
    def most(self) -> int:
        """How many calls may start in a window."""
        ...

    @property
    def windows(self) -> Windows:
        """Where they are counted."""
        ...

    @property
    def overflow(self) -> str:
        """The key that new subjects share when no more can be held."""
        ...


class Claim(Ticket):
    """A ticket that is also counted.

    Attributes:
        rates: The limits to look at, each with its subject's key.
        counted_ns: The wall's time at which it was counted.
    """

    __slots__ = ("counted_ns", "rates")

    def __init__(
        self,
        rates: Sequence[tuple[RateRule, str]] = (),
        slots: tuple[Slot, ...] = (),
        pools: tuple[Pool, ...] = (),
        *,
        control: bool = False,
        nested: bool = False,
    ) -> None:
        super().__init__(slots, pools, control=control, nested=nested)
        self.rates: Sequence[tuple[RateRule, str]] = rates
        self.counted_ns: int = 0

    @property
    def is_gone(self) -> bool:
        """Whether nobody is there any more to use a place: its turn passes on."""
        return False


class Verdict(Enum):
    """What became of a claim that no rate limit refused."""

    TAKEN = "taken"
    """It has started: its rates are counted and its places are held."""

    FULL = "full"
    """A place is missing. Nothing was taken or counted; the claim may wait or go away."""


@dataclass(frozen=True, slots=True)
class RateRefusal:
    """A rate limit has no room: of several, the one with the longest wait."""

    rule: RateRule
    wait_ns: int


class Storage(Protocol):
    """Decides about claims. Every method is one atomic step."""

    def take(self, claim: Claim) -> Verdict | RateRefusal:
        """Look at every rate limit and place of the claim, and take all of them or nothing."""
        ...

    def force(self, claim: Claim, *, count: bool) -> None:
        """Take the places whether there is room or not, and count the call only if asked to."""
        ...

    def wait(self, claim: Claim) -> None:
        """A claim that was `FULL` joins the queue."""
        ...

    def refuse(self, claim: Claim) -> None:
        """A claim that was `FULL` goes away."""
        ...

    def leave(self, claim: Claim) -> None:
        """A waiter gives up."""
        ...

    def release(self, claim: Claim) -> None:
        """The work has ended. Never raises; a second release does nothing."""
        ...

    def undo(self, claim: Claim) -> None:
        """The claim was taken but its work never began: what it counted is not counted."""
        ...

    def turns(self) -> list[tuple[Claim, RateRefusal | None]]:
        """Let everybody start who can now, in order.

        Each waiter whose turn has come is listed once: with `None` it has started; with a refusal its
        rate limit has run out meanwhile, and its turn has passed on in the same step.
        """
        ...
