"""What happened to a call: one row of counters for each tool, and snapshots of them all.

The counters add up at every moment:

    submitted = rejected + cancelled_waiting + started + waiting + asking
    started   = completed + failed + timed_out + cancelled + running
    accepted  = submitted - refused on arrival
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal


class Row:
    """The counters of one tool."""

    __slots__ = (
        "cancelled",
        "cancelled_waiting",
        "completed",
        "failed",
        "refused_on_arrival",
        "rejected",
        "started",
        "submitted",
        "timed_out",
        "would_reject",
        "would_wait",
    )

    def __init__(self) -> None:
        self.submitted: int = 0
        self.refused_on_arrival: int = 0
        self.started: int = 0
        self.completed: int = 0
        self.failed: int = 0
        self.timed_out: int = 0
        self.cancelled: int = 0
        self.cancelled_waiting: int = 0
        self.would_wait: int = 0
        self.rejected: Counter[str] = Counter()
        self.would_reject: Counter[str] = Counter()

    def freeze(self) -> Counts:
        """The counters as they are now."""
        return Counts(
            submitted=self.submitted,
            accepted=self.submitted - self.refused_on_arrival,
            started=self.started,
            completed=self.completed,
            failed=self.failed,
            timed_out=self.timed_out,
            cancelled=self.cancelled,
            cancelled_waiting=self.cancelled_waiting,
            would_wait=self.would_wait,
            rejected=MappingProxyType(dict(self.rejected)),
            would_reject=MappingProxyType(dict(self.would_reject)),
        )


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of calls, of one tool or of all.

    Attributes:
        submitted: Calls that arrived.
        accepted: Those that were not refused on arrival.
        started: Those that began to run.
        completed: Ended with a result.
        failed: Ended with an error of the tool's own.
        timed_out: Answered at their deadline.
        cancelled: Cancelled, or shut down, while they ran.
        cancelled_waiting: Cancelled while they waited.
        would_wait: In `observe` mode, those that would have waited.
        rejected: Refused, by code; waiters whose time ran out are among them.
        would_reject: In `observe` mode, those that would have been refused, by code.
    """

    submitted: int = 0
    accepted: int = 0
    started: int = 0
    completed: int = 0
    failed: int = 0
    timed_out: int = 0
    cancelled: int = 0
    cancelled_waiting: int = 0
    would_wait: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict[str, int])
    would_reject: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class KeyUse:
    """A slot that tools share by its key.

    Attributes:
        limit: How many calls may hold it at once.
        active: How many calls of this instance do.
        waiting: How many of them stand in its line.
        peak: The most of them that held it at once.
    """

    limit: int
    active: int
    waiting: int
    peak: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """The guard at one moment.

    Attributes:
        active: Calls whose work has not ended: running and abandoned ones.
        abandoned: Answered already, but their work goes on.
        waiting: Calls in the queue.
        asking: Calls that have a place and await the answer of the store that instances share.
        places: Places taken in admission; nested calls take none, so it may be less than `active`.
        counts: All calls.
        tools: The calls of each tool; `unknown` counts are apart.
        unknown: Calls of tools that do not exist.
        peak_active: The most calls active at once.
        peak_waiting: The most calls waiting at once.
        peak_places: The most places taken in admission at once.
        abandoned_places: Places in admission that abandoned calls keep.
        oldest_running_s: Seconds since the oldest of the active calls started; 0 when there is none.
        keys: Slots that tools share by a key, where everybody shares one.
        storage: Whether the store that instances share answers; `None`: there is none.
        outages: How often it has stopped answering.
    """

    active: int
    abandoned: int
    waiting: int
    asking: int
    places: int
    counts: Counts
    tools: Mapping[str, Counts]
    unknown: int
    peak_active: int
    peak_waiting: int
    peak_places: int
    abandoned_places: int
    # Time goes by while nothing happens.
    oldest_running_s: float = field(compare=False)
    keys: Mapping[str, KeyUse]
    storage: Literal["up", "down"] | None
    outages: int

    @property
    def running(self) -> int:
        """Calls that run and have not been answered."""
        return self.active - self.abandoned


def total(rows: Iterable[Row]) -> Row:
    """The sum of the rows."""
    everything = Row()
    for row in rows:
        for name in Row.__slots__:
            setattr(everything, name, getattr(everything, name) + getattr(row, name))
    return everything
