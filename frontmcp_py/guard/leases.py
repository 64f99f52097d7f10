"""What this instance has in the store: leases and waiters are kept alive, and what has ended is released.

One beat does it all in one round trip: it renews what is held and what waits, finds turns whose message was
lost, and probes a store that is down.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final, Protocol

from frontmcp_py.clock import suspended_s
from frontmcp_py.storage import Ask, Renewed, Storage, StorageUnavailable, Turn

from .link import Link
from .run import Run, Stake

logger: logging.Logger = logging.getLogger("frontmcp_py.guard")

# A lost message costs at most so many seconds, and an outage is probed so often.
_BEAT: Final = 1.0

# So many waiters a renewal looks at by name.
_CLOSELY: Final = 256

# So many questions about what was lost go on at once: after a restart of the store there may be thousands.
_FEW: Final = 16

# So many renewals that hang on dead connections fit into a lease, beside the time between two beats.
_TRIES: Final = 6


class Keeper(Protocol):
    """Whoever acts on what the store tells."""

    @property
    def is_asking(self) -> bool:
        """Whether a call awaits an answer."""
        ...

    def hear(self, turn: Turn) -> None:
        """The turn of a call has come."""
        ...

    def lost(self, run: Run, stake: Stake, *, stood_still: bool) -> Coroutine[Any, Any, None]:
        """The store does not know a running call any more."""
        ...

    def strayed(self, run: Run, stake: Stake) -> Coroutine[Any, Any, None]:
        """The store does not know a waiting call any more."""
        ...

    def came_back(self) -> None:
        """The store answers again."""
        ...


class Leases:
    """The leases and waiters of one instance, on one event loop.

    Args:
        loop: Where the beat goes on.
        storage: The store.
        link: The line to it.
        lease: Seconds until what is not renewed is free.
        keeper: Told what the store tells.

    Attributes:
        held: The running calls that hold slots in the store.
        line: The calls that stand in its lines.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, storage: Storage, link: Link, lease: float, keeper: Keeper
    ) -> None:
        self._loop = loop
        self._storage = storage
        self._link = link
        self._lease = lease
        self._keeper = keeper
        self.held: dict[str, Run] = {}
        self.line: dict[str, Run] = {}
        # Releases that got no answer: whether they undo, and until when they matter.
        self._unsettled: dict[str, tuple[bool, float]] = {}
        # When this process was last seen to have stood still for so long that its leases may have ended.
        self._stood_still_at = 0.0
        # The time of the last renewal, here and there.
        self._renewed_at: tuple[float, int] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._wake: asyncio.Future[None] | None = None
        self._closing = False
        # Calls that are asked about beside the beat.
        self._mending: set[str] = set()
        self._few = asyncio.Semaphore(_FEW)
        # Which waiter a renewal begins with.
        self._first = 0
        # Until when releases are repeated at the latest, once everybody has left.
        self._gives_up_at = math.inf

    def start(self) -> None:
        """Keep alive what there is from now on."""
        if self._beating is None or self._beating.done():
            self._beating = self._loop.create_task(self._beat())
        if self._storage.shares_slots and (self._listening is None or self._listening.done()):
            self._listening = self._loop.create_task(self._listen())

    @property
    def is_started(self) -> bool:
        """Whether it does."""
        return self._beating is not None and not self._beating.done()

    def come(self) -> None:
        """Somebody comes, perhaps again."""
        self._closing = False
        self._gives_up_at = math.inf

    def leave(self) -> None:
        """Nobody comes any more: the store is left as soon as no call has or wants anything there."""
        self._closing = True
        self._gives_up_at = self.now() + self._lease

    async def close(self) -> None:
        """Leave the store at once, if nobody has come meanwhile and nothing is left there."""
        if self._closing and not self._is_needed:
            await self._stop()

    def now(self) -> float:
        """The loop's time, and that in which the machine was suspended: leases do not stand still."""
        return self._loop.time() + suspended_s()

    def settle(self, lease: str, *, undo: bool) -> asyncio.Task[None] | None:
        """Release a lease; without an answer it is repeated until there is one, or the lease is over.

        Args:
            lease: What to release.
            undo: Whether the call never began.

        Returns:
            The release under way; `None` while the store is down.
        """
        if self._loop.is_closed():
            return None
        # A count that was never used does not end with the lease.
        until = math.inf if undo else self.now() + self._lease
        if not self._link.is_up:
            self._unsettled[lease] = undo, until
            return None
        return self._link.spawn(self._release(lease, undo, until))

    def mend(self, lease: str, work: Coroutine[Any, Any, None]) -> None:
        """Ask about a call beside everything else: only once at a time, and few of them at a time."""
        if lease in self._mending:
            work.close()
            return
        self._mending.add(lease)
        self._link.spawn(self._few_at_a_time(work)).add_done_callback(lambda _: self._mending.discard(lease))

    def hear_all(self, turns: Iterable[Turn]) -> None:
        """Turns that came with an answer."""
        for turn in turns:
            self._keeper.hear(turn)

    # -- parts ---------------------------------------------------------------------------------

    @property
    def _is_needed(self) -> bool:
        return bool(self.held or self.line or self._unsettled or self._keeper.is_asking)

    async def _few_at_a_time(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._few:
                await work
        finally:
            # Cancelled before its turn, it was never begun.
            work.close()

    async def _release(self, lease: str, undo: bool, until: float) -> None:
        try:
            turns = await self._link.ask(self._storage.release(lease, undo=undo))
        except StorageUnavailable:
            self._unsettled[lease] = undo, until
        else:
            self.hear_all(turns)

    async def _beat(self) -> None:
        try:
            await self._until_left()
        except asyncio.CancelledError:
            if self._beating is asyncio.current_task():
                # The loop ends, and nobody has left the guard.
                await self._storage.close()
            raise
        await self._stop()

    async def _until_left(self) -> None:
        interval = min(_BEAT, self._lease / 3)
        while not self._closing or self._is_needed:
            due = self.now() + interval
            self._wake = self._loop.create_future()
            await asyncio.wait((self._wake,), timeout=interval)
            self._notice_stop(self.now() - due)
            try:
                await self._renew()
            except Exception:
                # Without a beat every lease would end.
                logger.exception("a renewal has failed")
            if self._closing and not self._is_needed:
                # Whatever still asks would open connections anew that nobody closes.
                await self._link.finish(self._link.longest)

    async def _probe(self) -> None:
        """Ask what calls ask, for nothing: a store may answer, and yet take no data."""
        lease = secrets.token_hex(8)
        await self._storage.open()
        await self._storage.take(Ask(lease))
        await self._storage.release(lease)

    def _notice_stop(self, late: float) -> None:
        if late > self._lease / 2:
            self._stood_still_at = self.now()

    async def _renew(self) -> None:
        now = self.now()
        self._unsettled = {
            lease: each for lease, each in self._unsettled.items() if min(each[1], self._gives_up_at) > now
        }
        held, waiting = list(self.held), self._line_in_turn()
        try:
            renewed = await self._renewed(held, waiting)
        except StorageUnavailable:
            return
        finally:
            self._notice_stop(self.now() - now - self._link.longest)
        self._compare_clocks(now, self.now(), renewed.now_us)
        if self._link.found():
            unsettled, self._unsettled = self._unsettled, {}
            for lease, (undo, until) in unsettled.items():
                self._link.spawn(self._few_at_a_time(self._release(lease, undo, until)))
            self._keeper.came_back()
        strayed = set(renewed.strayed)
        for lease in waiting:
            if lease not in strayed and (run := self.line.get(lease)) is not None and run.stake is not None:
                run.stake.confirmed_at = max(now, run.stake.confirmed_at)
        self.hear_all(renewed.turns)
        lost = set(renewed.lost)
        for lease in held:
            if (run := self.held.get(lease)) is None or (stake := run.stake) is None:
                continue
            if lease in lost:
                stood_still = stake.confirmed_at < self._stood_still_at
                self.mend(lease, self._keeper.lost(run, stake, stood_still=stood_still))
            else:
                stake.confirmed_at = max(now, stake.confirmed_at)
        for lease in renewed.strayed:
            if (run := self.line.get(lease)) is not None and run.stake is not None:
                self.mend(lease, self._keeper.strayed(run, run.stake))

    def _line_in_turn(self) -> list[str]:
        """The waiters, beginning with others each time: a renewal looks closely at the first ones only."""
        line = list(self.line)
        self._first = self._first + _CLOSELY if self._first + _CLOSELY < len(line) else 0
        return line[self._first :] + line[: self._first]

    def _compare_clocks(self, asked_at: float, read_at: float, there_us: int) -> None:
        """Time that went by in the store alone is time in which this machine was paused unawares."""
        if not there_us:
            return
        if self._renewed_at is not None:
            last_asked_at, last_there_us = self._renewed_at
            missed = (there_us - last_there_us) / 1_000_000 - (read_at - last_asked_at)
            if missed > self._lease / 2:
                # What this very renewal has confirmed is sure.
                self._stood_still_at = asked_at
        self._renewed_at = asked_at, there_us

    async def _renewed(self, held: Sequence[str], waiting: Sequence[str]) -> Renewed:
        """Renew. A connection that hangs must not cost the leases, so another one is tried soon."""
        share = min(self._link.budget, self._lease / _TRIES)
        until = self._loop.time() + self._link.budget
        if not self._link.is_up:
            await self._link.ask(self._probe())
        while True:
            is_last = not self._link.is_up or self._loop.time() + share >= until
            try:
                return await self._link.ask(self._storage.renew(held, waiting), within=share, is_last=is_last)
            except StorageUnavailable:
                if is_last or not self._link.is_up:
                    raise

    async def _listen(self) -> None:
        while True:
            try:
                await self._storage.listen(self._keeper.hear, self._hurry)
            except StorageUnavailable as error:
                logger.debug("the store's messages are not heard: %s", error)
            # The beat finds meanwhile what they would have told.
            await asyncio.sleep(_BEAT)

    def _hurry(self) -> None:
        if self.line and self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _stop(self) -> None:
        """Leave the store, unless a call comes meanwhile."""
        beating, listening = self._beating, self._listening
        self._beating = self._listening = None
        for task in (beating, listening):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
                await asyncio.wait((task,))
        if not self.is_started:
            await self._storage.close()
