"""What a call asks of the counts and slots of its own process, and what it is told."""

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
