"""A store inside one process: what `Storage` promises, with nothing between the rules and the reader.

`InProcessStore` is what a Redis is elsewhere: every decision is one of its methods, runs in one step, and
cannot be told anything by halves. `InProcessStorage` is one instance's side of it. It is the reference for
whoever writes a storage, and the store of tests in virtual time. It shares nothing between processes.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from frontmcp_py.scheduler import NESTED
from frontmcp_py.storage import (
    Answer,
    Ask,
    NoSlot,
    Queued,
    RateNeed,
    Renewed,
    SlotNeed,
    Started,
    StorageUnavailable,
    TooOften,
    Turn,
    Void,
    WindowCounts,
)
from frontmcp_py.storage.memory import MovingWindows, Windows

ResultT = TypeVar("ResultT")

_State: TypeAlias = Literal["held", "waiting", "parked", "refused", "void"]

_NO_BOUND = 1 << 62


class _Place(NamedTuple):
    """Where a waiter stands in a line: nested, then control, then normal, each in order of arrival."""

    rank: int
    number: int
    lease: str


@dataclass(slots=True)
class _Slot:
    """Who holds a slot and until when, who stands in its line, and until when each of them counts."""

    held: dict[str, int] = field(default_factory=dict[str, int])
    line: list[_Place] = field(default_factory=list[_Place])
    alive: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class _Call:
    """What is known of one call."""

    state: _State
    ask: Ask
    owner: InProcessStorage
    number: int = 0
    attempt: int = 0
    counted_us: int = 0
    refusal: TooOften | None = None

    @property
    def place(self) -> _Place:
        return _Place(self.ask.rank, self.number, self.ask.lease)


class InProcessStore:
    """The counts, slots and calls that several instances share.

    Args:
        lease: Seconds until what an instance holds is free, unless it renews it.
        now_us: The store's clock, in microseconds since the Unix epoch; by default the event loop's time.
        latency: Seconds that a question takes to arrive, and its answer to come back.

    Attributes:
        reachable: `False` while the store is to be gone: every question raises `StorageUnavailable`.
    """

    def __init__(
        self, *, lease: float = 10.0, now_us: Callable[[], int] | None = None, latency: float = 0.0
    ) -> None:
        self.reachable: bool = True
        self.latency: float = latency
        self._now_us = now_us or _loop_us
        self._lease_us = round(lease * 1_000_000)
        self._counts = WindowCounts(self, max_keys=_NO_BOUND)
        self._slots: dict[str, _Slot] = {}
        self._calls: dict[str, _Call] = {}
        self._numbers = 0

    def wall_ns(self) -> int:
        """The store's clock, for windows that line up with it."""
        return self._now_us() * 1000

    def monotonic_ns(self) -> int:
        """The store's clock, for windows that do not."""
        return self._now_us() * 1000

    # -- the decisions -------------------------------------------------------------------------

    def take(self, ask: Ask, asker: InProcessStorage) -> Answer:
        """See `Storage.take`."""
        call = _Call("held", ask, asker, ask.number, ask.attempt)
        known = self._calls.get(ask.lease)
        has_ended = known is not None and known.state == "held"
        if known is not None:
            answer = self._answer_again(known, ask)
            if answer is not None:
                return answer
            call.number = call.number or known.number
            self._drop(known, uncount=True)
        if not call.number:
            call.number = self._numbers + 1
        # Whoever comes now is behind those who keep the numbers of a store that has lost its own.
        self._numbers = max(self._numbers, call.number)
        # Whoever waits goes before a newcomer to what has just come free.
        self._advance([need for need in ask.slots if self._purge(need.key) or has_ended])
        if not ask.force:
            refusal = self._exhausted(ask.rates)
            if refusal is not None:
                return refusal
            blocked = self._blocked(call)
            if blocked:
                return self._queue(call, blocked)
        self._calls[ask.lease] = call
        self._start(call)
        return Started(call.number)

    def pass_on(self, lease: str, attempt: int, asker: InProcessStorage) -> Sequence[Turn]:
        """See `Storage.pass_on`."""
        call = self._calls.get(lease)
        if call is None or call.state != "held" or call.attempt != attempt:
            return ()
        self._drop(call, uncount=True)
        call.state = "parked"
        self._calls[lease] = call
        return self._advance(call.ask.slots, asker)

    def release(self, lease: str, undo: bool, asker: InProcessStorage) -> Sequence[Turn]:
        """See `Storage.release`."""
        call = self._calls.get(lease)
        had_something = call is not None and call.state in {"held", "waiting"}
        if call is not None and call.state != "void":
            self._drop(call, uncount=undo)
        if undo:
            self._calls[lease] = _Call("void", Ask(lease), asker)
        return self._advance(call.ask.slots, asker) if call is not None and had_something else ()

    def renew(self, held: Sequence[str], waiting: Sequence[str], asker: InProcessStorage) -> Renewed:
        """See `Storage.renew`."""
        turns: list[Turn] = []
        lost: list[str] = []
        strayed: list[str] = []
        stirred: list[SlotNeed] = []
        for lease in held:
            call = self._calls.get(lease)
            if call is not None and self._holds(call):
                self._hold(call)
                continue
            lost.append(lease)
            if call is not None and call.state == "held":
                self._drop(call, uncount=False)
                stirred += call.ask.slots
        for lease in waiting:
            call = self._calls.get(lease)
            if call is not None and self._stands(call):
                self._wait(call)
                stirred += call.ask.slots
            elif call is not None and (call.state == "refused" or self._holds(call)):
                if call.state == "held":
                    self._hold(call)
                turns.append(Turn(lease, call.attempt, call.refusal))
            else:
                strayed.append(lease)
        turns += self._advance(stirred, asker)
        return Renewed(tuple(turns), tuple(lost), tuple(strayed), self._now_us())

    # -- calls ---------------------------------------------------------------------------------

    def _answer_again(self, known: _Call, ask: Ask) -> Answer | None:
        """The answer to a question that was asked before; `None` if it has to be decided anew."""
        if known.state == "void" or ask.attempt < known.attempt:
            return Void()
        if known.state == "refused" and ask.attempt == known.attempt:
            return known.refusal
        if self._holds(known):
            known.attempt = ask.attempt
            self._hold(known)
            return Started(known.number)
        if self._stands(known):
            known.attempt = ask.attempt
            self._wait(known)
            return Queued(known.number, self._blocked(known))
        return None

    def _queue(self, call: _Call, blocked: tuple[int, ...]) -> Queued | NoSlot:
        for position in blocked:
            need = call.ask.slots[position]
            ordinary = sum(place.rank != NESTED for place in self._slot(need).line)
            bound = need.max_queued if call.ask.rank != NESTED else None
            if need.no_wait or (bound is not None and ordinary >= bound):
                return NoSlot(blocked, position)
        if not call.ask.may_wait:
            return NoSlot(blocked, None)
        call.state = "waiting"
        self._calls[call.ask.lease] = call
        for need in call.ask.slots:
            slot = self._slot(need)
            insort(slot.line, call.place)
            slot.alive[call.ask.lease] = self._end_us()
        return Queued(call.number, blocked)

    def _start(self, call: _Call) -> None:
        call.state, call.counted_us = "held", self._now_us()
        for rate in call.ask.rates:
            self._windows(rate).hit(rate.key, self.wall_ns(), rate.key)
        self._hold(call)

    def _drop(self, call: _Call, *, uncount: bool) -> None:
        """Forget a call, and whatever it has."""
        if call.state == "held" and uncount:
            for rate in call.ask.rates:
                self._uncount(rate, call.counted_us * 1000)
        for need in call.ask.slots:
            self._slot(need).held.pop(call.ask.lease, None)
        self._quit(call)
        del self._calls[call.ask.lease]

    # -- rates ---------------------------------------------------------------------------------

    def _windows(self, rate: RateNeed) -> Windows:
        return self._counts.windows(rate.strategy, rate.window_us * 1000)

    def _exhausted(self, rates: Sequence[RateNeed]) -> TooOften | None:
        """The limit with the longest wait; `None` when all have room."""
        now = self.wall_ns()
        self._counts.free(now)
        waits = [self._windows(rate).wait_ns(rate.key, rate.most, now, rate.key) for rate in rates]
        longest = max(waits, default=0)
        return TooOften(waits.index(longest), -(-longest // 1000)) if longest else None

    def _uncount(self, rate: RateNeed, counted_ns: int) -> None:
        windows = self._windows(rate)
        if not isinstance(windows, MovingWindows):
            windows.undo(rate.key, rate.key, counted_ns)
        elif counted_ns in (windows.entries(rate.key) or ()):
            # Its own entry, not the latest: others may have started since.
            windows.log[rate.key].remove(counted_ns)

    # -- slots ---------------------------------------------------------------------------------

    def _slot(self, need: SlotNeed) -> _Slot:
        return self._slots.setdefault(need.key, _Slot())

    def _end_us(self) -> int:
        return self._now_us() + self._lease_us

    def _purge(self, key: str) -> bool:
        """Remove what has ended from a slot; whether that was anything."""
        slot, now = self._slots.get(key, _Slot()), self._now_us()
        gone = [lease for lease, end in slot.held.items() if end <= now]
        dead = {lease for lease, end in slot.alive.items() if end <= now}
        for lease in gone:
            del slot.held[lease]
        for lease in dead:
            del slot.alive[lease]
        if dead:
            slot.line = [place for place in slot.line if place.lease not in dead]
        return bool(gone or dead)

    def _hold(self, call: _Call) -> None:
        for need in call.ask.slots:
            self._slot(need).held[call.ask.lease] = self._end_us()

    def _holds(self, call: _Call) -> bool:
        """Whether it has started and its lease has not ended."""
        now = self._now_us()
        ends = [self._slot(need).held.get(call.ask.lease, 0) for need in call.ask.slots]
        return call.state == "held" and all(end > now for end in ends)

    def _stands(self, call: _Call) -> bool:
        """Whether it stands in all its lines."""
        lease = call.ask.lease
        return call.state == "waiting" and all(lease in self._slot(need).alive for need in call.ask.slots)

    def _wait(self, call: _Call) -> None:
        for need in call.ask.slots:
            self._slot(need).alive[call.ask.lease] = self._end_us()

    def _quit(self, call: _Call) -> None:
        for need in call.ask.slots:
            slot = self._slot(need)
            if slot.alive.pop(call.ask.lease, None) is not None:
                slot.line.remove(call.place)

    def _has_room(self, need: SlotNeed, place: _Place) -> bool:
        """Whether a call may take a place, beyond what the first of the line keeps."""
        slot = self._slot(need)
        free = need.capacity - len(slot.held)
        first = next((each for each in slot.line if each.rank != NESTED), place)
        if place.rank != NESTED and first < place:
            free -= 1
        return free > 0

    def _blocked(self, call: _Call) -> tuple[int, ...]:
        needs = enumerate(call.ask.slots)
        return tuple(position for position, need in needs if not self._has_room(need, call.place))

    def _advance(self, needs: Iterable[SlotNeed], asker: InProcessStorage | None = None) -> Sequence[Turn]:
        """Places may have come free in these slots: everybody starts who can now, in order.

        Returns:
            The turns of the asker's own calls; those of others are told to them.
        """
        turns: list[Turn] = []
        stirred = {need.key for need in needs}
        looking = bool(stirred)
        while looking:
            looking, closed = False, set[str]()
            for key in stirred:
                self._purge(key)
            for place in sorted({place for key in stirred for place in self._slots[key].line}):
                if stirred <= closed:
                    break
                call = self._calls[place.lease]
                blocked = self._blocked(call)
                if blocked:
                    # Whoever stands behind it there is held up there too.
                    closed |= {call.ask.slots[position].key for position in blocked}
                    continue
                self._quit(call)
                call.refusal = self._exhausted(call.ask.rates)
                if call.refusal is None:
                    self._start(call)
                else:
                    call.state = "refused"
                turn = Turn(place.lease, call.attempt, call.refusal)
                if call.owner is asker:
                    turns.append(turn)
                else:
                    call.owner.tell(turn)
                mine = {need.key for need in call.ask.slots}
                if call.refusal is not None and not mine <= stirred:
                    # What it kept in its other lines is there now for those behind it.
                    stirred |= mine
                    looking = True
                    break
        return tuple(turns)


class InProcessStorage:
    """One instance's side of an `InProcessStore`.

    Args:
        store: What the instances share.
    """

    def __init__(self, store: InProcessStore) -> None:
        self.store: InProcessStore = store
        self._ears: list[asyncio.Queue[Turn]] = []

    @property
    def shares_slots(self) -> bool:
        """Slots are shared."""
        return True

    @property
    def where(self) -> str:
        """Nowhere else."""
        return "this process"

    def cannot_count(self, strategy: str, window_us: int) -> str | None:
        """Every rate limit is counted here."""
        return None

    async def open(self) -> None:
        """See whether the store is there."""
        await self._ask(lambda: None)

    async def close(self) -> None:
        """There is nothing to close."""

    async def take(self, ask: Ask) -> Answer:
        """Look at every rate limit and slot of a call, and take all of them or nothing."""
        return await self._ask(lambda: self.store.take(ask, self))

    async def pass_on(self, lease: str, attempt: int) -> Sequence[Turn]:
        """A turn that has come cannot be used now: uncounted, it goes to the next in line."""
        return await self._ask(lambda: self.store.pass_on(lease, attempt, self))

    async def release(self, lease: str, *, undo: bool = False) -> Sequence[Turn]:
        """The work has ended, or the call does not wait any more."""
        return await self._ask(lambda: self.store.release(lease, undo, self))

    async def renew(self, held: Sequence[str], waiting: Sequence[str]) -> Renewed:
        """Keep everything of this instance alive for one lease more."""
        return await self._ask(lambda: self.store.renew(held, waiting, self))

    async def listen(self, hear: Callable[[Turn], None], ready: Callable[[], None]) -> None:
        """Pass on what the store tells this instance, until cancelled."""
        await self._ask(lambda: None)
        ear = asyncio.Queue[Turn]()
        self._ears.append(ear)
        try:
            ready()
            while True:
                hear(await ear.get())
        finally:
            self._ears.remove(ear)

    def tell(self, turn: Turn) -> None:
        """What the store has to say; lost when nobody listens, or while the store is gone."""
        for ear in self._ears:
            if self.store.reachable:
                ear.put_nowait(turn)

    async def _ask(self, decide: Callable[[], ResultT]) -> ResultT:
        await asyncio.sleep(self.store.latency)
        if not self.store.reachable:
            raise StorageUnavailable("the store is not there")
        answer = decide()
        await asyncio.sleep(self.store.latency)
        return answer


def _loop_us() -> int:
    return round(asyncio.get_running_loop().time() * 1_000_000)
