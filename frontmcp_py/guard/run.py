"""One call from its arrival to the end of its work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from enum import Enum, IntEnum
from typing import Any

from frontmcp_py.call import Call
from frontmcp_py.scheduler import CONTROL, NESTED, NEW, NORMAL, Pool, Rank, Slot
from frontmcp_py.signal import AbortSignal
from frontmcp_py.storage import Claim, RateRule, Turn

from .plan import BoundSlot, Plan

Body = Callable[["Run"], Awaitable[Any]]


class Outcome(Enum):
    """How a call that had started was answered. The first one recorded stands."""

    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


class Ending(IntEnum):
    """Why a call is about to be answered before its work has ended.

    Of several in one turn of the loop the first in this order counts, and a result that comes in the
    same turn counts before all of them.
    """

    DEADLINE = 1
    CANCELLED = 2
    SHUTDOWN = 3


class Stake:
    """What a call wants of a store that several instances share, and where it stands there.

    Attributes:
        lease: What the store knows the call by.
        rates: The rate limits, and the keys it is counted under.
        slots: The slots, as this instance counts them.
        asker: The task that awaits the store's answer.
        attempt: How often the store was asked under this lease.
        number: Its place in the order of arrival there; 0: it has none yet.
        has_waited_here: Whether it waited on this instance alone, and the store has come back since.
        is_alone: Whether this instance's own counts decide, because the store is away.
        is_known: Whether the store may know something of the call.
        is_held: Whether it has started there.
        is_overdue: Whether its time to wait ended while it asked.
        is_observed: Whether it passes whatever the store says.
        confirmed_at: When the store was last asked about it, and knew it; see `Leases.now`.
        early: A turn that came before the answer that it stands in line.
        released: The release, once it is under way.
        was_called_off: Whether that task was told not to await it any longer.
    """

    __slots__ = (
        "asker",
        "attempt",
        "confirmed_at",
        "early",
        "has_waited_here",
        "is_alone",
        "is_held",
        "is_known",
        "is_observed",
        "is_overdue",
        "lease",
        "number",
        "rates",
        "released",
        "slots",
        "was_called_off",
    )

    def __init__(
        self, lease: str, rates: Sequence[tuple[RateRule, str]], slots: tuple[Slot, ...], *, is_observed: bool
    ) -> None:
        self.rates: Sequence[tuple[RateRule, str]] = rates
        self.slots: tuple[Slot, ...] = slots
        self.has_waited_here: bool = False
        self.is_alone: bool = False
        self.is_held: bool = False
        self.is_observed: bool = is_observed
        self.is_overdue: bool = False
        self.confirmed_at: float = 0.0
        self.released: asyncio.Task[None] | None = None
        self.asker: asyncio.Task[Any] | None = None
        self.was_called_off: bool = False
        self.know_as(lease)

    def call_off(self) -> None:
        """Whoever awaits the store's answer does not need it any more."""
        if self.asker is not None and not self.was_called_off:
            self.was_called_off = True
            self.asker.cancel()

    def know_as(self, lease: str) -> None:
        """Be known by a lease of which the store knows nothing yet."""
        self.lease: str = lease
        self.attempt: int = 0
        self.number: int = 0
        self.is_known: bool = False
        self.early: Turn | None = None


class Run(Claim):
    """A call under the guard: its claim, its body, its signal, its one answer.

    Attributes:
        call: Who calls what.
        plan: What the tool's calls are asked.
        body: The work.
        parent: The run that this one was called from, if it is nested.
        turn: Settled when a waiting call may start, or is refused.
        waits_on: The limit that set how long it may wait; `None` is admission.
        answer: Settled with the result, or with what is told instead of it.
        task: Where the body runs.
        outcome: How it was answered, once it was.
        ending: Why it is about to be answered early.
        threads: Worker threads still at work for it.
        has_ended: Whether the body's coroutine has ended.
        was_cancelled: Whether the guard has cancelled the body's task.
        is_abandoned: Whether its work went on after it was answered, or still does.
        began_at: When it started, by the loop's clock.
        shadow: In `observe` mode, what it would hold.
        stake: What it wants of a store, if there is one.
    """

    __slots__ = (
        "_signal",
        "answer",
        "began_at",
        "body",
        "call",
        "ending",
        "has_ended",
        "is_abandoned",
        "killer",
        "outcome",
        "parent",
        "plan",
        "questions",
        "reason",
        "shadow",
        "stake",
        "task",
        "threads",
        "time_left",
        "turn",
        "waits_on",
        "was_cancelled",
    )

    def __init__(
        self,
        plan: Plan,
        call: Call,
        body: Body,
        rates: Sequence[tuple[RateRule, str]],
        slots: tuple[Slot, ...],
        parent: Run | None,
    ) -> None:
        # Made for every call: what the base classes would set is set here, without two calls more.
        self.rates = rates
        self.slots = slots
        self.pools: tuple[Pool, ...] = plan.pools
        self.control: bool = plan.control
        self.rank: Rank = NESTED if parent is not None else CONTROL if plan.control else NORMAL
        self.seq = 0
        self.state = NEW
        self.plan: Plan = plan
        self.call: Call = call
        self.body: Body = body
        self.parent: Run | None = parent
        self.turn: asyncio.Future[None] | None = None
        self.waits_on: BoundSlot | None = None
        self.answer: asyncio.Future[Any] | None = None
        self.task: asyncio.Task[Any] | None = None
        self.outcome: Outcome | None = None
        self.ending: Ending | None = None
        self.threads: int = 0
        self.has_ended: bool = False
        self.was_cancelled: bool = False
        self.is_abandoned: bool = False
        self.began_at: float = 0.0
        self.shadow: Claim | None = None
        self.stake: Stake | None = None
        self._signal: AbortSignal | None = None
        self.reason: Exception | None = None
        self.questions: int = 0
        self.time_left: float = 0.0
        self.killer: asyncio.TimerHandle | None = None

    @property
    def is_gone(self) -> bool:
        """Whether nobody awaits the turn any more."""
        return self.turn is not None and self.turn.done()

    @property
    def is_answered(self) -> bool:
        """Whether the caller has been answered."""
        return self.outcome is not None

    @property
    def signal(self) -> AbortSignal:
        """The call's signal, made when somebody first asks for it."""
        if self._signal is None:
            self._signal = AbortSignal()
            if self.reason is not None:
                self._signal.abort(self.reason)
        return self._signal

    def abort(self, reason: Exception) -> None:
        """Tell the work to stop; the first reason stands."""
        if self.reason is None:
            self.reason = reason
            if self._signal is not None:
                self._signal.abort(reason)

    def holds(self, place: object) -> bool:
        """Whether it, or a run it was called from, holds a place there."""
        return any(run.is_holding and (place in run.slots or place in run.pools) for run in self.lineage())

    def lineage(self) -> Iterator[Run]:
        """It, the run it was called from, and so on."""
        run: Run | None = self
        while run is not None:
            yield run
            run = run.parent
