"""Is there a slot, and a place in the process? The event loop's side of the scheduler.

The scheduler says whose turn it is; here calls wait for theirs, for a time that is fixed when they arrive.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import NoReturn, Protocol

from frontmcp_py.errors import Cancelled, ConcurrencyLimit, GuardError, Overloaded, QueueTimeout
from frontmcp_py.policy import DEFAULT_QUEUE_TIMEOUT, Admission
from frontmcp_py.scheduler import Pool, Slot
from frontmcp_py.storage import Claim, MemoryStorage

from .plan import BoundSlot
from .rates import too_often
from .run import Run
from .timers import Timers

logger: logging.Logger = logging.getLogger("frontmcp_py.guard")


class Elsewhere(Protocol):
    """Lines that calls stand in elsewhere, in a store that several instances share."""

    @property
    def in_line(self) -> int:
        """How many calls of this instance stand in them."""
        ...

    def withdraw(self, run: Run) -> None:
        """The call does not begin after all."""
        ...


class Slots:
    """Lets calls wait for their turn, and lets the next ones start whenever something frees.

    A call that waits is in the scheduler's queue or in line elsewhere. One that has its places here and asks
    for what is shared is `asking`.

    Args:
        memory: Decides who may start.
        admission: The limits of the process, if they are enforced.
        places: Their pool.
        threads: The pool of worker threads.
        observed: The limits of the process as they would be enforced, in `observe` mode.
    """

    def __init__(
        self,
        memory: MemoryStorage,
        admission: Admission | None,
        places: Pool | None,
        threads: Pool,
        observed: Admission | None = None,
    ) -> None:
        self._memory = memory
        self._scheduler = memory.scheduler
        self._admission = admission
        self._places = places
        self._threads = threads
        self._observed = observed
        self._longest_wait = admission.queue_timeout if admission else DEFAULT_QUEUE_TIMEOUT
        self._said_full = False
        self._timers: Timers[Run] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[Run, float] = {}
        # Whose turn has come, while their callers have not been back yet to begin.
        self._called: dict[Run, None] = {}
        self._asking: dict[Run, None] = {}
        self.elsewhere: Elsewhere | None = None
        self.peak_waiting: int = 0

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on calls wait on this loop."""
        self._loop = loop
        self._timers = Timers(loop, self._overdue)

    def detach(self) -> None:
        """The loop is gone, and with it everybody who waited on it."""
        for run in self._everybody():
            self._leave(run)
            run.reason = Cancelled(run.plan.tool)
            run.plan.row.cancelled_waiting += 1
            if run.turn is not None and self._loop is not None and not self._loop.is_closed():
                run.turn.cancel()
        if self._timers is not None:
            self._timers.close()

    @property
    def called(self) -> int:
        """Calls that hold their places, while their callers have not been back yet to begin."""
        return len(self._called)

    @property
    def asking(self) -> int:
        """Calls that hold places here while they ask for what is shared."""
        return len(self._asking)

    @property
    def waiting(self) -> int:
        """Calls that wait, here or elsewhere."""
        return self._scheduler.waiting + (self.elsewhere.in_line if self.elsewhere is not None else 0)

    @property
    def is_full(self) -> bool:
        """Whether no more calls may wait."""
        return self._admission is not None and self.waiting >= self._admission.max_queued

    def queue(self, run: Run) -> None:
        """A call that cannot start joins the queue.

        Raises:
            GuardError: It may not wait.
        """
        if run not in self._waiting:
            limits, pools = self._obstacles(run, run)
            refusal = self._refusal_on_arrival(run, limits, pools)
            if refusal is not None:
                self._memory.refuse(run)
                self._release_shadow(run)
                raise refusal
            self._set_patience(run, limits)
        self._memory.wait(run)
        self._expect_turn(run)

    # -- calls that ask for what is shared ------------------------------------------------------

    def ask(self, run: Run) -> None:
        """A call holds its places here, and asks for the rest."""
        self._asking[run] = None
        if run.turn is not None and not run.turn.done():
            run.turn.set_result(None)

    def begin(self, run: Run) -> None:
        """A call that asked has started."""
        del self._asking[run]
        self._forget(run)
        run.plan.row.started += 1

    def call(self, run: Run) -> None:
        """A call that waited has started; its caller comes back to begin."""
        assert run.turn is not None
        self._forget(run)
        self._called[run] = None
        run.plan.row.started += 1
        if not run.turn.done():
            run.turn.set_result(None)

    def stand(self, run: Run, limits: Sequence[tuple[BoundSlot, Slot]]) -> None:
        """A call that asked stands in line elsewhere, and holds nothing here.

        Args:
            run: The call.
            limits: Its limits without room, and their slots.

        Raises:
            GuardError: It may not wait.
        """
        del self._asking[run]
        if run not in self._waiting:
            # It is in line already, and counted there.
            if self._admission is not None and self.waiting > self._admission.max_queued:
                self.turn_away(run, self.full(run))
            self._set_patience(run, limits)
        elif run.stake is not None and run.stake.is_overdue:
            self.turn_away(run, self._too_late(run))
        self._expect_turn(run)

    def queue_again(self, run: Run) -> None:
        """A call that asked cannot start, and joins the queue here.

        Raises:
            GuardError: It may not wait.
        """
        del self._asking[run]
        if run.stake is not None and run.stake.is_overdue:
            self.turn_away(run, self._too_late(run))
        try:
            self.queue(run)
        except GuardError as error:
            self.turn_away(run, error)
        self.advance()

    def turn_away(self, run: Run, error: GuardError) -> NoReturn:
        """A call that asked is refused.

        Raises:
            GuardError: The refusal.
        """
        row = run.plan.row
        row.rejected[error.code] += 1
        if run not in self._waiting:
            row.refused_on_arrival += 1
        self._leave(run)
        self.advance()
        raise error

    def refuse(self, run: Run, error: GuardError) -> None:
        """A call that waits is refused."""
        self._dismiss(run, error)
        run.plan.row.rejected[error.code] += 1

    def has_patience(self, run: Run) -> bool:
        """Whether it is settled how long the call may wait, because it has waited."""
        return run in self._waiting

    def waiting_here(self) -> list[Run]:
        """The calls in the scheduler's queue, in order of arrival."""
        return sorted((run for run in self._waiting if run.is_waiting), key=lambda run: run.seq)

    def would_refuse(self, run: Run, shadow: Claim) -> str | None:
        """In `observe` mode: the code the call would have been refused with; `None`: it would have waited."""
        limits, pools = self._obstacles(run, shadow)
        refusal = self._refusal_on_arrival(run, limits, pools)
        if refusal is not None:
            return refusal.code
        observed = self._observed
        return Overloaded.code if observed is not None and not observed.max_queued else None

    async def turn(self, run: Run) -> None:
        """Wait until the call may start.

        Raises:
            GuardError: Its time ran out, or its rate limit did.
            asyncio.CancelledError: The caller has gone; the call holds nothing any more.
        """
        assert run.turn is not None
        try:
            await run.turn
        except BaseException:
            # Who was refused in this very turn of the loop has left already.
            if run.reason is None:
                self.give_up(run)
            raise
        if run.reason is not None:
            raise run.reason
        self._called.pop(run, None)

    def cancel(self, run: Run) -> bool:
        """The signal that a call was given is aborted: if the call has not begun, it never does.

        Returns:
            Whether it has not begun.
        """
        if run not in self._waiting and run not in self._called and run not in self._asking:
            return False
        self._dismiss(run, Cancelled(run.plan.tool))
        run.plan.row.cancelled_waiting += 1
        self.advance()
        return True

    def refuse_everybody(self) -> None:
        """The server stops: whoever has not begun does not wait any longer, nested calls excepted."""
        for run in self._everybody():
            # A running call may need what it calls to come to its end; its own end cancels that wait.
            if run.parent is None:
                self.refuse(run, self.overloaded(run, shutting_down=True))

    def advance(self) -> None:
        """Let everybody start whose turn has come."""
        if not self._scheduler.waiting:
            return
        for claim, refusal in self._memory.turns():
            assert isinstance(claim, Run) and claim.turn is not None
            if refusal is not None:
                self.refuse(claim, too_often(claim.plan.tool, refusal))
            elif claim.stake is not None and not claim.stake.is_alone:
                self.ask(claim)
            else:
                self.call(claim)

    def full(self, run: Run, pools: Sequence[Pool] = ()) -> Overloaded:
        """The answer where no more calls may wait; the first time, the log has it too."""
        error = self.overloaded(run, pools)
        if self._admission is not None:
            self._say_full(error, self._admission)
        return error

    def overloaded(
        self,
        run: Run,
        pools: Sequence[Pool] = (),
        *,
        waited_ms: float | None = None,
        shutting_down: bool = False,
    ) -> Overloaded:
        """The answer of a server that has no room; of what holds the call up, admission is named first."""
        places = self._places or self._threads
        return Overloaded(
            running=places.held - (run in self._asking),
            # Whoever is refused after a wait does not count among those who wait.
            waiting=self.waiting - (run in self._waiting and run not in self._asking),
            waited_ms=waited_ms,
            shutting_down=shutting_down,
            tool=run.plan.tool,
            limit=None if shutting_down else (pools[0] if pools else places).capacity,
        )

    # -- parts ---------------------------------------------------------------------------------

    def _obstacles(self, run: Run, claim: Claim) -> tuple[list[tuple[BoundSlot, Slot]], list[Pool]]:
        """The limits and the pools that have no room for the call."""
        slots, pools = self._scheduler.obstacles(claim)
        if not slots:
            return [], pools
        pairs = zip(run.plan.slots, claim.slots, strict=True)
        return [(limit, slot) for limit, slot in pairs if slot in slots], pools

    def _refusal_on_arrival(
        self, run: Run, limits: Sequence[tuple[BoundSlot, Slot]], pools: Sequence[Pool]
    ) -> GuardError | None:
        tool, parent = run.plan.tool, run.parent
        for limit, slot in limits:
            itself = parent is not None and parent.holds(slot)
            if itself or limit.limit.queue_timeout == 0 or _is_full(run, limit, slot):
                return ConcurrencyLimit(
                    tool, limit.limit.max_concurrent, limit.scope, waits_for_itself=itself
                )
        for pool in pools:
            if parent is not None and parent.holds(pool):
                return ConcurrencyLimit(tool, pool.capacity, "admission", waits_for_itself=True)
        return self.full(run, pools) if self.is_full else None

    def _set_patience(self, run: Run, limits: Sequence[tuple[BoundSlot, Slot]]) -> None:
        assert self._timers is not None
        seconds, run.waits_on = self._patience(run, limits)
        self._waiting[run] = seconds
        self._timers.set(seconds, run)

    def _expect_turn(self, run: Run) -> None:
        assert self._loop is not None
        run.turn = self._loop.create_future()
        self.peak_waiting = max(self.peak_waiting, self.waiting)

    def _everybody(self) -> list[Run]:
        """The calls that have not begun."""
        return list(dict.fromkeys([*self._waiting, *self._called, *self._asking]))

    def _patience(self, run: Run, limits: Sequence[tuple[BoundSlot, Slot]]) -> tuple[float, BoundSlot | None]:
        """How many seconds the call may wait, and which limit says so (`None`: admission)."""
        bounded = self._admission is not None or run.parent is not None or not limits
        shortest = self._longest_wait if bounded else math.inf
        by: BoundSlot | None = None
        for limit, _ in limits:
            timeout = limit.limit.queue_timeout
            # On a tie the limit's own time counts, so that the caller reads QUEUE_TIMEOUT.
            if timeout is not None and (timeout < shortest or (timeout == shortest and by is None)):
                shortest, by = timeout, limit
        return shortest, by

    def _overdue(self, run: Run) -> None:
        if run in self._asking:
            # The answer may be that it starts; if not, it does not wait any more.
            if run.stake is not None:
                run.stake.is_overdue = True
            return
        if run not in self._waiting:
            return
        self.refuse(run, self._too_late(run))
        self.advance()

    def _too_late(self, run: Run) -> GuardError:
        waited_ms = self._waiting[run] * 1000
        limit = run.waits_on
        if limit is None:
            _, pools = self._scheduler.obstacles(run)
            return self.overloaded(run, pools, waited_ms=waited_ms)
        return QueueTimeout(
            run.plan.tool, waited_ms=waited_ms, limit=limit.limit.max_concurrent, scope=limit.scope
        )

    def give_up(self, run: Run) -> None:
        """The caller of a call that has not begun has gone."""
        self._leave(run)
        run.plan.row.cancelled_waiting += 1
        self.advance()

    def _dismiss(self, run: Run, error: GuardError) -> None:
        """The wait ends with an error, unless its caller has gone in this very turn of the loop."""
        self._leave(run)
        run.reason = error
        if run.turn is not None and not run.turn.done():
            run.turn.set_result(None)
        if run.stake is not None:
            run.stake.call_off()

    def _leave(self, run: Run) -> None:
        """Out of the queue; a place that was just being handed over is free for the next, uncounted."""
        if run in self._called:
            del self._called[run]
            self._memory.undo(run)
            run.plan.row.started -= 1
        if run.stake is not None:
            self._asking.pop(run, None)
            self._memory.release(run)
            if self.elsewhere is not None:
                self.elsewhere.withdraw(run)
        self._memory.leave(run)
        self._release_shadow(run)
        self._forget(run)

    def _release_shadow(self, run: Run) -> None:
        if run.shadow is not None:
            self._memory.release(run.shadow)

    def _forget(self, run: Run) -> None:
        seconds = self._waiting.pop(run, None)
        if seconds is not None and self._timers is not None:
            self._timers.drop(seconds, run)

    def _say_full(self, error: Overloaded, admission: Admission) -> None:
        if not self._said_full:
            self._said_full = True
            logger.warning(
                "%s Calls are refused until one ends; admission.max_active is %d, admission.reserved %d, "
                "admission.max_queued %d and admission.queue_timeout %g s. This is said once.",
                error,
                admission.max_active,
                admission.reserved,
                admission.max_queued,
                admission.queue_timeout,
            )


def _is_full(run: Run, limit: BoundSlot, slot: Slot) -> bool:
    """Whether the limit's own queue has no place; a nested call stands in no line and needs none."""
    most = limit.limit.max_queued
    return most is not None and run.parent is None and slot.waiting >= most
