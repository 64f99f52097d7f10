"""One limit over many instances: the event loop's side of a store that several of them share.

A call takes its places here, in admission and worker threads, before it asks the store, so that a flood does not
reach it. What the store says is then done: the call starts, or gives its places back and stands in the store's
lines until its turn is told, or is refused. Whatever a call holds there is a lease, which is renewed while the
work runs, and released with its end.

Without the store, calls are refused, or decided by this instance's own counts until it answers again. Slots of
running work are counted here in either case, so a mutex does not overlap itself when the store comes or goes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Final

from frontmcp_py.errors import (
    ConcurrencyLimit,
    ConfigurationError,
    GuardError,
    GuardStorageUnavailable,
    LeaseLost,
)
from frontmcp_py.scheduler import Slot
from frontmcp_py.storage import (
    Ask,
    MemoryStorage,
    NoSlot,
    Queued,
    RateNeed,
    RateRefusal,
    RateRule,
    SlotNeed,
    Started,
    Storage,
    StorageUnavailable,
    TooOften,
    Turn,
    Verdict,
)

from .link import Link
from .partition import escape
from .plan import Limits
from .rates import too_often
from .run import Run, Stake
from .slots import Slots

logger: logging.Logger = logging.getLogger("frontmcp_py.guard")

# A lost message costs at most this many seconds, and an outage is probed so often.
_BEAT: Final = 1.0

# Seconds that the first connection may take, if the budget of a question is shorter.
_OPENING: Final = 1.0


class Shared:
    """Asks the store for calls, keeps their leases, and does without it while it is away.

    Args:
        storage: The store.
        memory: This instance's own counts and slots.
        slots: Where calls wait.
        budget: Seconds that one question to the store may take.
        lease: Seconds until the slots of an instance that has crashed are free.
        fallback: Whether this instance's own counts decide while the store is down.
    """

    def __init__(
        self,
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
        self.fallback: bool = fallback
        self._name = secrets.token_hex(8)
        self._numbers = count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: Link | None = None
        self._beating: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._wake: asyncio.Future[None] | None = None
        self._closing = False
        # When this process was last seen to have stood still for so long that its leases may have ended.
        self._stood_still_at = 0.0
        self._held: dict[str, Run] = {}
        self._line: dict[str, Run] = {}
        # Leases to release whose release got no answer: whether to undo them, and until when it matters.
        self._unsettled: dict[str, tuple[bool, float]] = {}
        self._outages = 0

    # -- the store itself ----------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether the store answers, as far as is known."""
        return self._link is None or self._link.is_up

    @property
    def outages(self) -> int:
        """How often the store has stopped answering."""
        return self._outages + (self._link.outages if self._link else 0)

    @property
    def in_line(self) -> int:
        """How many calls of this instance stand in the store's lines."""
        return len(self._line)

    def waiting_for(self, slot: Slot) -> int:
        """How many of them stand in the line of this slot."""
        return sum(slot in stake.slots for run in self._line.values() if (stake := run.stake) is not None)

    def check(self, tool: str, limits: Limits) -> None:
        """See whether the store can count a tool's limits.

        Raises:
            ConfigurationError: It cannot.
        """
        for limit in (*limits.global_rates, *limits.rates):
            if not self._storage.supports(limit.strategy):
                raise ConfigurationError(
                    f'tool "{tool}": rate_limit: {self._storage.where} cannot count a {limit.strategy}; '
                    "choose another strategy, or a Redis or Valkey"
                )

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Calls ask on this loop from now on."""
        self._loop = loop
        without = (
            "until it does, this instance counts alone"
            if self.fallback
            else "until it does, calls that need it are refused"
        )
        self._link = Link(loop, self._storage.where, self._budget, without, self._went_down)

    def detach(self) -> None:
        """The loop has ended; the leases of what ran there end by themselves."""
        if self._link is not None:
            self._outages += self._link.outages
            self._link.close()
        self._loop = self._link = self._beating = self._listening = None
        self._held.clear()
        self._line.clear()
        self._unsettled.clear()

    async def open(self) -> None:
        """See whether the store is there.

        Raises:
            ConfigurationError: It is not, and nothing may stand in for it.
        """
        self._closing = False
        link = self._link
        assert link is not None
        if self._beating is not None and not self._beating.done():
            return
        try:
            async with asyncio.timeout(max(self._budget, _OPENING)):
                await self._storage.open()
        except (StorageUnavailable, TimeoutError) as error:
            why = str(error) or "no answer in time"
            if not self.fallback:
                await self._storage.close()
                raise ConfigurationError(
                    f"Throttle.storage: {self._storage.where} cannot be reached ({why}); start it, or set "
                    "fallback='memory' so that each instance counts alone without it"
                ) from error
            link.lost(StorageUnavailable(why))
        self._start()

    async def close(self) -> None:
        """Nobody asks any more: what has ended is released, and the connections are closed."""
        link = self._link
        if link is None:
            return
        self._closing = True
        await link.finish(self._budget)
        if self._held:
            # Work that goes on keeps its slots: the leases are renewed until it ends.
            return
        await self._stop()

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
        if not self.is_up and self.fallback:
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
        self._start()
        while True:
            if run.turn is not None:
                await self._slots.turn(run)
                run.turn = None
            if stake.is_alone or stake.is_held:
                return
            await self._ask(run, stake)

    def withdraw(self, run: Run) -> None:
        """The call does not begin after all: whatever the store has of it is undone."""
        stake = run.stake
        if stake is None:
            return
        self._line.pop(stake.lease, None)
        self._held.pop(stake.lease, None)
        stake.is_held = False
        if stake.is_known:
            stake.is_known = False
            self._settle(stake.lease, undo=True)

    def give_back(self, run: Run) -> None:
        """The call's work has ended: its slots go to whoever is next, on whatever instance."""
        stake = run.stake
        if stake is None or not stake.is_held:
            return
        stake.is_held = False
        if self._held.pop(stake.lease, None) is not None:
            stake.released = self._settle(stake.lease, undo=False)

    async def given_back(self, run: Run) -> None:
        """Wait until the store knows that the work has ended, so that who is answered may call again at once."""
        released = run.stake.released if run.stake is not None else None
        if released is not None and not released.done():
            await asyncio.wait((released,))

    # -- a question and its answers ------------------------------------------------------------

    async def _ask(self, run: Run, stake: Stake) -> None:
        """Ask the store whether a call that has its places here may start, and do what it says."""
        link = self._link
        assert link is not None and self._loop is not None
        if not link.is_up:
            self._without_store(run, stake)
            return
        question = self._question(run, stake)
        asked_at = self._loop.time()
        try:
            answer = await link.ask(self._storage.take(question))
        except StorageUnavailable:
            if run.reason is not None:
                raise run.reason from None
            self._without_store(run, stake)
            return
        except BaseException:
            if run.reason is None:
                self._slots.give_up(run)
            raise
        if run.reason is not None:
            # Refused or cancelled meanwhile; what the answer says is undone already.
            raise run.reason
        if stake.is_observed:
            await self._observed(run, stake, answer)
        elif isinstance(answer, Started):
            stake.number, stake.confirmed_at = answer.number, asked_at
            self._start_or_queue(run, stake)
        elif isinstance(answer, Queued):
            self._line_up(run, stake, answer)
        else:
            stake.is_known = False
            self._slots.turn_away(run, self._refusal(run, stake, answer))

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
                slots.append(SlotNeed(_text(slot), slot.capacity, no_wait, most))
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
            return self._slots.overloaded(run)
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
        self._line[stake.lease] = run
        self._give_places_back(run)
        blocked = [(run.plan.slots[each], stake.slots[each]) for each in answer.blocked]
        self._slots.stand(run, blocked)
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
            self._held[stake.lease] = run

    def _give_places_back(self, run: Run) -> None:
        self._scheduler.withdraw(run)
        if self._storage.shares_slots:
            self._scheduler.forget(run.slots)
            run.slots = ()

    def _pass_on(self, stake: Stake) -> None:
        """A turn cannot be used now: the next in line has it, and the call asks again when it has its places."""
        link = self._link
        assert link is not None
        link.spawn(self._passed_on(link, stake.lease, stake.attempt))

    async def _passed_on(self, link: Link, lease: str, attempt: int) -> None:
        # Without an answer it is not repeated: the call asks again, or is withdrawn, and both settle it.
        self._hear_all(await link.ask(self._storage.pass_on(lease, attempt)))

    # -- turns ---------------------------------------------------------------------------------

    def _hear_all(self, turns: Iterable[Turn]) -> None:
        for turn in turns:
            self._hear(turn)

    def _hear(self, turn: Turn) -> None:
        """The turn of a call that stood in line has come. It may be told more than once."""
        run = self._line.get(turn.lease)
        stake = run.stake if run is not None else None
        if run is None or stake is None or turn.attempt != stake.attempt:
            return
        assert self._loop is not None
        del self._line[turn.lease]
        if turn.refusal is not None:
            stake.is_known = False
            self._slots.refuse(run, self._refusal(run, stake, turn.refusal))
            return
        stake.confirmed_at = self._loop.time()
        if self._seat(run, stake):
            self._slots.call(run)
        else:
            self._pass_on(stake)
            self._memory.wait(run)
            self._slots.advance()

    # -- ends ----------------------------------------------------------------------------------

    def _settle(self, lease: str, *, undo: bool) -> asyncio.Task[None] | None:
        link, loop = self._link, self._loop
        if link is None or loop is None or loop.is_closed():
            return None
        until = loop.time() + self._lease
        if not link.is_up:
            self._unsettled[lease] = undo, until
            return None
        return link.spawn(self._release(link, lease, undo, until))

    async def _release(self, link: Link, lease: str, undo: bool, until: float) -> None:
        try:
            turns = await link.ask(self._storage.release(lease, undo=undo))
        except StorageUnavailable:
            self._unsettled[lease] = undo, until
        else:
            self._hear_all(turns)

    # -- the beat ------------------------------------------------------------------------------

    def _start(self) -> None:
        loop, link = self._loop, self._link
        assert loop is not None and link is not None
        if self._beating is None or self._beating.done():
            self._beating = loop.create_task(self._beat(loop, link))
        if self._storage.shares_slots and (self._listening is None or self._listening.done()):
            self._listening = loop.create_task(self._listen())

    async def _stop(self) -> None:
        beating, listening = self._beating, self._listening
        self._beating = self._listening = None
        for task in (beating, listening):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
                await asyncio.wait((task,))
        await self._storage.close()

    async def _beat(self, loop: asyncio.AbstractEventLoop, link: Link) -> None:
        """Keep the leases, find turns that were not heard, and see whether the store is there."""
        interval = min(_BEAT, self._lease / 3)
        while not (self._closing and not self._held and not self._unsettled):
            due = loop.time() + interval
            self._wake = loop.create_future()
            await asyncio.wait((self._wake,), timeout=interval)
            self._notice_stop(loop.time() - due)
            await self._renew(loop, link)
        await self._stop()

    def _notice_stop(self, late: float) -> None:
        assert self._loop is not None
        if late > self._lease / 2:
            self._stood_still_at = self._loop.time()

    async def _renew(self, loop: asyncio.AbstractEventLoop, link: Link) -> None:
        now = loop.time()
        self._unsettled = {lease: each for lease, each in self._unsettled.items() if each[1] > now}
        held = list(self._held)
        try:
            renewed = await link.ask(self._storage.renew(held, list(self._line)))
        except StorageUnavailable:
            self._notice_stop(loop.time() - now - 2 * self._budget)
            return
        self._notice_stop(loop.time() - now - 2 * self._budget)
        if link.found():
            self._came_back()
        self._hear_all(renewed.turns)
        lost = set(renewed.lost)
        for lease in held:
            run = self._held.get(lease)
            if run is None or run.stake is None:
                continue
            if lease in lost:
                await self._lost(run, run.stake, link)
            else:
                run.stake.confirmed_at = now
        for lease in renewed.strayed:
            run = self._line.get(lease)
            if run is not None and run.stake is not None:
                await self._strayed(run, run.stake, link)

    async def _lost(self, run: Run, stake: Stake, link: Link) -> None:
        """The store does not know a lease any more.

        It has ended because this process stood still: then others may hold its slots. Or the store has lost
        it: then it is put back, above the limit if need be, unless it was cut off for so long that it may
        have ended meanwhile and there is no room for it any more.
        """
        if stake.confirmed_at >= self._stood_still_at:
            assert self._loop is not None
            asked_at = self._loop.time()
            force = asked_at - stake.confirmed_at <= self._lease
            question = self._question(run, stake, counted=False, force=force)
            try:
                answer = await link.ask(self._storage.take(replace(question, may_wait=False)))
            except StorageUnavailable:
                return
            if stake.lease not in self._held:
                # It has ended meanwhile, and its release may have come before.
                self._settle(stake.lease, undo=False)
                return
            if isinstance(answer, Started):
                stake.confirmed_at = asked_at
                return
        if self._held.pop(stake.lease, None) is not None:
            logger.warning('"%s" has lost its slots to others: its lease has ended', run.plan.tool)
            run.abort(LeaseLost(run.plan.tool))

    async def _strayed(self, run: Run, stake: Stake, link: Link) -> None:
        """The store does not know a waiter any more: it joins the line again, with its number."""
        question = self._question(run, stake)
        try:
            answer = await link.ask(self._storage.take(question))
        except StorageUnavailable:
            return
        if stake.lease not in self._line:
            return
        if isinstance(answer, Started):
            self._hear(Turn(stake.lease, stake.attempt))
        elif isinstance(answer, TooOften):
            self._hear(Turn(stake.lease, stake.attempt, answer))

    async def _listen(self) -> None:
        while True:
            try:
                await self._storage.listen(self._hear, self._hurry)
            except StorageUnavailable as error:
                logger.debug("the store's messages are not heard: %s", error)
            # The beat finds meanwhile what they would have told.
            await asyncio.sleep(_BEAT)

    def _hurry(self) -> None:
        if self._line and self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

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
        stake.rename(self._new_lease())
        stake.is_alone = True
        self._give_places_back(run)
        run.rates = stake.rates
        run.slots = self._local(stake)

    def _without_store(self, run: Run, stake: Stake) -> None:
        """A call that has its places here was about to ask."""
        if stake.is_observed:
            if not self.fallback:
                run.plan.row.would_reject[GuardStorageUnavailable.code] += 1
            stake.is_held = True
            self._slots.begin(run)
            return
        if not self.fallback:
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
        """The store does not answer: who stood in its lines stands in this instance's own, in the same order."""
        if not self.fallback:
            return
        for run in sorted(self._line.values(), key=_arrival):
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

    def _came_back(self) -> None:
        """The store answers again: what could not be told is told, and who waits here asks there."""
        unsettled, self._unsettled = self._unsettled, {}
        for lease, (undo, _) in unsettled.items():
            self._settle(lease, undo=undo)
        for run in self._slots.waiting_here():
            stake = run.stake
            if stake is not None and stake.is_alone:
                self._scheduler.withdraw(run)
                self._hand_over(run, stake)
                if self._memory.take(run) is Verdict.TAKEN:
                    self._slots.ask(run)
                else:
                    self._memory.wait(run)
        self._slots.advance()

    # -- observing -----------------------------------------------------------------------------

    async def _observed(self, run: Run, stake: Stake, answer: object) -> None:
        """In `observe` mode: count what would have become of the call, and hold its slots all the same."""
        link = self._link
        assert link is not None
        row = run.plan.row
        if not isinstance(answer, Started):
            would_wait = isinstance(answer, NoSlot) and answer.refused_by is None
            if would_wait:
                row.would_wait += 1
            else:
                row.would_reject[self._refusal(run, stake, answer).code] += 1
            try:
                await link.ask(
                    self._storage.take(self._question(run, stake, counted=would_wait, force=True))
                )
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


def _arrival(run: Run) -> int:
    return run.stake.number if run.stake is not None else 0


def _text(slot: Slot) -> str:
    """What a slot is known by in the store."""
    name, *rest = slot.key if isinstance(slot.key, tuple) else (slot.key,)
    place = "global" if len(rest) == 3 else f"tool:{escape(str(name))}"
    return f"{place}|{rest[0]}|{rest[-1]}"
