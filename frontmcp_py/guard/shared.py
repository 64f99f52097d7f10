"""One limit over many instances: the event loop's side of a store that several of them share.

A call takes its places here, in admission and worker threads, before it asks the store, so that a flood does
not reach it. What the store says is then done: the call starts, or gives its places back and stands in the
store's lines until its turn is told, or is refused. What it holds there is a lease; `leases` keeps it alive.

Without the store, calls are refused, or decided by this instance's own counts until it answers again. Slots
of running work are counted here in either case, so a mutex does not overlap itself when the store comes or
goes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import replace
from itertools import count
from typing import Any, Final, cast

from frontmcp_py.errors import (
    ConcurrencyLimit,
    ConfigurationError,
    GuardError,
    GuardStorageUnavailable,
    LeaseLost,
)
from frontmcp_py.scheduler import Slot
from frontmcp_py.storage import (
    Answer,
    Ask,
    MemoryStorage,
    NoSlot,
    Queued,
    RateNeed,
    RateRefusal,
    SlotNeed,
    Started,
    Storage,
    StorageUnavailable,
    TooOften,
    Turn,
    Verdict,
)

from .leases import Leases
from .link import Link
from .partition import escape
from .plan import BoundSlot
from .rates import too_often
from .run import Run, Stake
from .slots import Slots

logger: logging.Logger = logging.getLogger("frontmcp_py.guard")

# What happens while the store is down, for the log: without and with the fallback.
_WITHOUT: Final = {
    False: "until it does, calls that need it are refused",
    True: "until it does, this instance counts alone",
}

# The part of a lease after which no work begins without asking again. It is renewed by a third of one.
_FRESH: Final = 2 / 3

# Seconds that an answer waits for the store to know of the end, if one question may take longer.
_ANSWER: Final = 1.0

# How often a call asks, if this process stands still while it does.
_QUESTIONS: Final = 3

# Seconds that the store is tried at the start, if the budget of a question is shorter, and between two tries.
_OPENING: Final = 1.0
_AGAIN: Final = 0.05


class Shared:
    """Asks the store for calls, and does without it while it is away. Belongs to one event loop.

    Args:
        loop: Where calls ask.
        storage: The store.
        memory: This instance's own counts and slots.
        slots: Where calls wait.
        budget: Seconds that one question to the store may take.
        lease: Seconds until the slots of an instance that has crashed are free.
        fallback: Whether this instance's own counts decide while the store is down.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        storage: Storage,
        memory: MemoryStorage,
        slots: Slots,
        *,
        budget: float,
        lease: float,
        fallback: bool,
    ) -> None:
        self._storage = storage
        self._memory = memory
        self._scheduler = memory.scheduler
        self._slots = slots
        self._budget = budget
        self._lease = lease
        self._fallback = fallback
        self._name = secrets.token_hex(8)
        self._numbers = count(1)
        self._returning = asyncio.Lock()
        # Calls that await their answer, by lease.
        self._asked: dict[str, Run] = {}
        self._link = Link(loop, storage.where, budget, _WITHOUT[fallback], self._went_down)
        self._leases = Leases(loop, storage, self._link, lease, self)

    # -- the store itself ----------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether the store answers, as far as is known."""
        return self._link.is_up

    @property
    def outages(self) -> int:
        """How often it has stopped answering."""
        return self._link.outages

    @property
    def in_line(self) -> int:
        """How many calls of this instance stand in the store's lines."""
        return len(self._leases.line)

    def waiting_for(self, slot: Slot) -> int:
        """How many of them stand in the line of this slot."""
        return sum(
            slot in stake.slots for run in self._leases.line.values() if (stake := run.stake) is not None
        )

    async def open(self) -> None:
        """See whether the store is there.

        Raises:
            ConfigurationError: It is not, and nothing may stand in for it.
        """
        self._leases.come()
        if self._leases.is_started:
            return
        try:
            await self._opened()
        except ConfigurationError:
            await self._storage.close()
            raise
        except StorageUnavailable as error:
            if not self._fallback:
                await self._storage.close()
                why = str(error).rstrip(".")
                raise ConfigurationError(
                    f"Throttle.storage: {self._storage.where} cannot be reached ({why}); start it, or set "
                    "fallback='memory' so that each instance counts alone without it"
                ) from error
            self._link.lost(error)
        self._leases.start()

    async def _opened(self) -> None:
        """Try for a while: a machine that starts has much to do, and the store may start beside."""
        error = StorageUnavailable("no answer in time")
        try:
            async with asyncio.timeout(max(self._budget, _OPENING)):
                while True:
                    try:
                        return await self._storage.open()
                    except StorageUnavailable as failure:
                        error = failure
                    await asyncio.sleep(_AGAIN)
        except TimeoutError:
            raise error from None

    async def close(self) -> None:
        """Nobody asks any more: what has ended is released, and the connections are closed.

        Work that goes on keeps its slots: its leases are renewed until it ends.
        """
        self._leases.leave()
        await self._link.finish(self._budget)
        await self._leases.close()

    def detach(self) -> None:
        """The loop has ended; the leases of what ran there end by themselves."""
        self._link.close()

    # -- calls ---------------------------------------------------------------------------------

    def split(self, run: Run, *, observed: bool) -> None:
        """What a call needs is divided: the store decides its part, this instance the rest.

        Args:
            run: The call.
            observed: Whether it passes whatever the store says.

        Raises:
            GuardStorageUnavailable: The store is down, and nothing may stand in for it.
        """
        if not (run.rates or (run.slots and self._storage.shares_slots)):
            return
        stake = Stake(self._new_lease(), run.rates, run.slots, is_observed=observed)
        if not self.is_up and self._fallback:
            run.stake = stake
            stake.is_alone = True
        elif self.is_up or observed:
            run.stake = stake
            self._hand_over(run, stake)
        else:
            self._scheduler.forget(run.slots)
            raise GuardStorageUnavailable(run.plan.tool)

    async def start(self, run: Run) -> None:
        """Wait until the call has started.

        Raises:
            GuardError: It was refused.
            asyncio.CancelledError: Its caller has gone; it holds nothing any more.
        """
        stake = run.stake
        assert stake is not None
        self._leases.start()
        while run.reason is None:
            if run.turn is not None:
                await self._slots.turn(run)
                run.turn = None
            if stake.is_alone or stake.is_held:
                return
            await self._ask(run, stake)
        raise run.reason

    def withdraw(self, run: Run) -> None:
        """The call does not begin after all: whatever the store has of it is undone."""
        stake = run.stake
        if stake is None:
            return
        self._leases.line.pop(stake.lease, None)
        self._leases.held.pop(stake.lease, None)
        stake.is_held = False
        if stake.is_known:
            stake.is_known = False
            self._leases.settle(stake.lease, undo=True)

    def give_back(self, run: Run) -> None:
        """The call's work has ended: its slots go to whoever is next, on whatever instance."""
        stake = run.stake
        if stake is None or not stake.is_held:
            return
        stake.is_held = False
        if self._leases.held.pop(stake.lease, None) is not None:
            stake.released = self._leases.settle(stake.lease, undo=False)

    async def given_back(self, run: Run) -> None:
        """Wait until the store knows of the end, so that whoever is answered may call again at once."""
        released = run.stake.released if run.stake is not None else None
        if released is not None and not released.done():
            await asyncio.wait((released,), timeout=_ANSWER)

    @property
    def is_asking(self) -> bool:
        """Whether a call awaits the store's answer."""
        return self._slots.asking > 0

    # -- a question and its answers ------------------------------------------------------------

    async def _ask(self, run: Run, stake: Stake) -> None:
        """Ask the store whether a call that has its places here may start, and do what it says."""
        if not self._link.is_up:
            self._without_store(run, stake)
            return
        lease = stake.lease
        stake.asker = asyncio.current_task()
        try:
            answer = await self._answer(run, stake)
            if stake.is_observed and run.reason is None:
                await self._observed(run, stake, answer)
                return
        except StorageUnavailable:
            if run.reason is not None:
                raise run.reason from None
            self._without_store(run, stake)
            return
        except BaseException:
            if run.reason is None:
                self._slots.give_up(run)
            elif stake.was_called_off and _is_called_off(stake.asker):
                raise run.reason from None
            raise
        finally:
            stake.asker = None
            self._asked.pop(lease, None)
        if run.reason is not None:
            # Refused or cancelled meanwhile; what the answer says is undone already.
            raise run.reason
        if isinstance(answer, Started):
            stake.number = answer.number
            self._start_or_queue(run, stake)
        elif isinstance(answer, Queued):
            if self._fallback and not self._link.is_up:
                # It has gone away since it answered, and nobody would look after those in its lines.
                self._without_store(run, stake)
            else:
                self._line_up(run, stake, answer)
        else:
            stake.is_known = False
            self._slots.turn_away(run, self._refusal(run, stake, answer))

    async def _answer(self, run: Run, stake: Stake) -> Answer:
        """What the store says."""
        if not stake.has_waited_here:
            return await self._answered(run, stake)
        # Those who waited here while the store was away ask one after the other, and so keep their order.
        async with self._returning:
            return await self._answered(run, stake)

    async def _answered(self, run: Run, stake: Stake) -> Answer:
        """What the store says; asked again if it was read so late that a lease may have ended since."""
        self._asked[stake.lease] = run
        for _ in range(_QUESTIONS):
            question = self._question(run, stake)
            stake.confirmed_at = self._leases.now()
            answer = await self._link.ask(self._storage.take(question))
            if not isinstance(answer, Started) or self._is_fresh(stake) or run.reason is not None:
                return answer
        error = StorageUnavailable("its answers come too late for the lease")
        self._link.lost(error)
        raise error

    def _is_fresh(self, stake: Stake) -> bool:
        """Whether a lease lasts until it is renewed, even if what was told of it was read late."""
        needs = stake.slots and self._storage.shares_slots
        return not needs or self._leases.now() - stake.confirmed_at <= self._lease * _FRESH

    def _question(self, run: Run, stake: Stake, *, counted: bool = True, force: bool = False) -> Ask:
        stake.attempt += 1
        stake.is_known = True
        rates = [
            RateNeed(key, rule.limit.strategy, rule.most, rule.limit.window_ms * 1000)
            for rule, key in stake.rates
        ]
        slots: list[SlotNeed] = []
        if self._storage.shares_slots:
            parent = run.parent
            first = not self._slots.has_patience(run)
            for bound, slot in zip(run.plan.slots, stake.slots, strict=True):
                limit = bound.limit
                itself = parent is not None and parent.holds(slot)
                no_wait = first and (limit.queue_timeout == 0 or itself)
                most = limit.max_queued if first else None
                slots.append(SlotNeed(_text(bound, slot), slot.capacity, no_wait, most))
        return Ask(
            stake.lease,
            tuple(rates) if counted else (),
            tuple(slots),
            run.rank,
            stake.attempt,
            stake.number,
            may_wait=not stake.is_observed and (self._slots.has_patience(run) or not self._slots.is_full),
            force=force,
        )

    def _refusal(self, run: Run, stake: Stake, answer: object) -> GuardError:
        tool = run.plan.tool
        if isinstance(answer, TooOften):
            return too_often(tool, RateRefusal(stake.rates[answer.rate][0], answer.wait_us * 1000))
        if isinstance(answer, NoSlot) and answer.refused_by is not None:
            bound, slot = run.plan.slots[answer.refused_by], stake.slots[answer.refused_by]
            itself = run.parent is not None and run.parent.holds(slot)
            return ConcurrencyLimit(tool, bound.limit.max_concurrent, bound.scope, waits_for_itself=itself)
        if isinstance(answer, NoSlot):
            return self._slots.full(run)
        return GuardStorageUnavailable(tool)

    def _start_or_queue(self, run: Run, stake: Stake) -> None:
        """The store has started a call that was not in line."""
        if self._seat(run, stake):
            self._slots.begin(run)
            return
        # Its slot is taken here by work of a time without the store.
        self._pass_on(stake)
        self._slots.queue_again(run)

    def _line_up(self, run: Run, stake: Stake, answer: Queued) -> None:
        """The call stands in the store's lines now, and holds nothing here."""
        stake.number = answer.number
        self._leases.line[stake.lease] = run
        self._give_places_back(run)
        blocked = [(run.plan.slots[each], stake.slots[each]) for each in answer.blocked]
        self._slots.stand(run, blocked)
        early, stake.early = stake.early, None
        if early is not None:
            self.hear(early)
        self._slots.advance()

    def _seat(self, run: Run, stake: Stake) -> bool:
        """The store has started the call: take its places here, too. Whether there was room."""
        self._give_places_back(run)
        if self._storage.shares_slots:
            run.slots = self._local(stake)
        else:
            run.slots = stake.slots
        if self._memory.take(run) is not Verdict.TAKEN:
            return False
        self._hold(run, stake)
        return True

    def _hold(self, run: Run, stake: Stake) -> None:
        stake.is_held = True
        if stake.slots and self._storage.shares_slots:
            self._leases.held[stake.lease] = run

    def _give_places_back(self, run: Run) -> None:
        self._scheduler.withdraw(run)
        if self._storage.shares_slots:
            self._scheduler.forget(run.slots)
            run.slots = ()

    def _pass_on(self, stake: Stake) -> None:
        """A turn cannot be used now: the next in line has it; the call asks again once it has its places."""
        self._link.spawn(self._passed_on(stake.lease, stake.attempt))

    async def _passed_on(self, lease: str, attempt: int) -> None:
        # Without an answer it is not repeated: the call asks again, or is withdrawn, and both settle it.
        self._leases.hear_all(await self._link.ask(self._storage.pass_on(lease, attempt)))

    # -- turns ---------------------------------------------------------------------------------

    def hear(self, turn: Turn) -> None:
        """The turn of a call that stood in line has come. It may be told more than once."""
        run = self._leases.line.get(turn.lease) or self._asked.get(turn.lease)
        stake = run.stake if run is not None else None
        if run is None or stake is None or turn.attempt > stake.attempt:
            return
        if turn.lease not in self._leases.line:
            # It has overtaken the answer that the call stands in line.
            stake.early = turn
            return
        if turn.attempt < stake.attempt or (turn.refusal is None and not self._is_fresh(stake)):
            # Told for a question before, or read late: only an answer says whether it still holds.
            self._leases.mend(turn.lease, self.strayed(run, stake))
            return
        del self._leases.line[turn.lease]
        if turn.refusal is not None:
            stake.is_known = False
            self._slots.refuse(run, self._refusal(run, stake, turn.refusal))
            return
        if self._seat(run, stake):
            self._slots.call(run)
        else:
            self._pass_on(stake)
            self._memory.wait(run)
            self._slots.advance()

    # -- what the store does not know any more -------------------------------------------------

    async def lost(self, run: Run, stake: Stake, *, stood_still: bool) -> None:
        """The store does not know the lease of a running call any more.

        It has ended because this process stood still: then others may hold its slots. Or the store has lost
        it: then it is put back, above the limit if need be, unless it was cut off for so long that it may
        have ended meanwhile and there is no room for it any more.
        """
        if stake.is_observed or not stood_still:
            asked_at = self._leases.now()
            force = stake.is_observed or asked_at - stake.confirmed_at <= self._lease
            question = self._question(run, stake, counted=False, force=force)
            try:
                answer = await self._link.ask(self._storage.take(replace(question, may_wait=False)))
            except StorageUnavailable:
                return
            if stake.lease not in self._leases.held:
                # It has ended meanwhile, and its release may have come before.
                self._leases.settle(stake.lease, undo=False)
                return
            if isinstance(answer, Started):
                stake.confirmed_at = asked_at
                return
        if self._leases.held.pop(stake.lease, None) is not None and not stake.is_observed:
            logger.warning('"%s" has lost its slots to others: its lease has ended', run.plan.tool)
            run.abort(LeaseLost(run.plan.tool))

    async def strayed(self, run: Run, stake: Stake) -> None:
        """The store may not know a waiter any more: it asks again, with its number."""
        question = self._question(run, stake)
        stake.confirmed_at = self._leases.now()
        try:
            answer = await self._link.ask(self._storage.take(question))
        except StorageUnavailable:
            return
        # Under the names that it was asked with: meanwhile the call may have gone alone, and come back.
        if isinstance(answer, Started):
            self.hear(Turn(question.lease, question.attempt))
        elif isinstance(answer, TooOften):
            self.hear(Turn(question.lease, question.attempt, answer))

    # -- without the store ---------------------------------------------------------------------

    def _hand_over(self, run: Run, stake: Stake) -> None:
        """The store decides: here the call needs only what is not shared."""
        stake.is_alone = False
        run.rates = ()
        if self._storage.shares_slots:
            self._scheduler.forget(run.slots)
            run.slots = ()

    def _go_alone(self, run: Run, stake: Stake) -> None:
        """This instance's own counts decide; what the store has of the call is undone as soon as it hears."""
        self.withdraw(run)
        stake.know_as(self._new_lease())
        stake.is_alone = True
        self._give_places_back(run)
        run.rates = stake.rates
        run.slots = self._local(stake)

    def _without_store(self, run: Run, stake: Stake) -> None:
        """A call that has its places here was about to ask."""
        if stake.is_observed:
            if not self._fallback:
                run.plan.row.would_reject[GuardStorageUnavailable.code] += 1
            stake.is_held = True
            self._slots.begin(run)
            return
        if not self._fallback:
            self._slots.turn_away(run, GuardStorageUnavailable(run.plan.tool))
            return
        self._go_alone(run, stake)
        verdict = self._memory.take(run)
        if verdict is Verdict.TAKEN:
            self._slots.begin(run)
        elif isinstance(verdict, RateRefusal):
            self._slots.turn_away(run, too_often(run.plan.tool, verdict))
        else:
            self._slots.queue_again(run)

    def _went_down(self) -> None:
        """The store does not answer: who stood in its lines stands in this instance's, in the same order."""
        if not self._fallback:
            return
        for run in sorted(self._leases.line.values(), key=_arrival):
            stake = run.stake
            assert stake is not None
            self._go_alone(run, stake)
            verdict = self._memory.take(run)
            if verdict is Verdict.TAKEN:
                self._slots.call(run)
            elif isinstance(verdict, RateRefusal):
                self._slots.refuse(run, too_often(run.plan.tool, verdict))
            else:
                self._memory.wait(run)
        self._slots.advance()

    def came_back(self) -> None:
        """The store answers again: who waits here asks there."""
        for run in self._slots.waiting_here():
            stake = run.stake
            if stake is not None and stake.is_alone:
                self._scheduler.withdraw(run)
                self._hand_over(run, stake)
                stake.has_waited_here = True
                if self._memory.take(run) is Verdict.TAKEN:
                    self._slots.ask(run)
                else:
                    self._memory.wait(run)
        self._slots.advance()

    # -- observing -----------------------------------------------------------------------------

    async def _observed(self, run: Run, stake: Stake, answer: object) -> None:
        """In `observe` mode: count what would have become of the call, and hold its slots all the same."""
        row = run.plan.row
        if not isinstance(answer, Started):
            would_wait = isinstance(answer, NoSlot) and answer.refused_by is None
            if would_wait:
                row.would_wait += 1
            else:
                row.would_reject[self._refusal(run, stake, answer).code] += 1
            try:
                question = self._question(run, stake, counted=would_wait, force=True)
                await self._link.ask(self._storage.take(question))
            except StorageUnavailable:
                logger.debug('"%s" is not counted: the store is down', run.plan.tool)
            if run.reason is not None:
                raise run.reason
        self._hold(run, stake)
        self._slots.begin(run)

    # -- parts ---------------------------------------------------------------------------------

    def _new_lease(self) -> str:
        return f"{self._name}.{next(self._numbers):x}"

    def _local(self, stake: Stake) -> tuple[Slot, ...]:
        """The call's slots on this instance: those that nobody used were forgotten meanwhile."""
        stake.slots = tuple(self._scheduler.slot(slot.key, slot.capacity) for slot in stake.slots)
        return stake.slots


def _is_called_off(task: asyncio.Task[Any] | None) -> bool:
    """Take the cancellation back that called it off; whether nobody else has cancelled it."""
    return task is not None and task.uncancel() == 0


def _arrival(run: Run) -> int:
    return run.stake.number if run.stake is not None else 0


def _text(bound: BoundSlot, slot: Slot) -> str:
    """What a slot is known by in the store."""
    name, nth, *_, subject = cast("tuple[object, ...]", slot.key)
    place = "global" if bound.scope == "global" else f"tool:{escape(str(name))}"
    return f"{place}|{nth}|{subject}"
