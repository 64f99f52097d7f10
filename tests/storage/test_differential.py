"""Random sequences of questions, asked of two storages alike: every answer is the same.

A failure names the seed of its sequence; `Sequence(seed)` asks the same again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from limits import RateLimitItemPerSecond
from limits.strategies import (
    FixedWindowRateLimiter,
    MovingWindowRateLimiter,
    RateLimiter,
    SlidingWindowCounterRateLimiter,
)

from frontmcp_py.guard.rates import BoundRate, bind_rates
from frontmcp_py.policy import RateLimit, Strategy
from frontmcp_py.scheduler import CONTROL, NESTED, NORMAL, Slot
from frontmcp_py.storage import (
    Answer,
    Ask,
    Claim,
    MemoryStorage,
    NoSlot,
    Queued,
    RateNeed,
    RateRefusal,
    Renewed,
    SlotNeed,
    Started,
    Storage,
    TooOften,
    Turn,
    Verdict,
    WindowCounts,
)
from frontmcp_py.storage.redis import RedisStorage
from frontmcp_py.testing import FakeClock
from frontmcp_py.testing.in_process import InProcessStorage, InProcessStore
from tests.servers import SOON, Valkey, eventually

SECOND = 1_000_000
# Long against what a sequence really takes: the keys of a Redis end by its own clock.
LEASE = 60
INSTANCES = 2

RATES = (
    RateNeed("minute", "fixed-window", 5, 60 * SECOND),
    RateNeed("odd", "fixed-window", 2, 17 * SECOND + 123),
    RateNeed("moving", "moving-window", 2, 30 * SECOND + 1),
    RateNeed("sliding", "sliding-window", 3, 30 * SECOND),
    RateNeed("steep", "sliding-window", 1, 20 * SECOND + 7),
)
SLOTS = {"a": 1, "b": 2, "c": 3}

_KINDS = ("take", "release", "again", "pass_on", "renew", "time")
_OFTEN = (7, 7, 2, 2, 2, 3)

_prefixes = itertools.count()


def seeds(count: int) -> list[int]:
    """New ones in every run, but in CI the same, as for properties."""
    first = 0 if os.environ.get("CI") else random.SystemRandom().randrange(10**9)
    return list(range(first, first + count))


class Party:
    """The instances of one store, and what each of them is told."""

    def __init__(self, instances: Sequence[Storage]) -> None:
        self.instances = instances
        self.heard: list[list[Turn]] = [[] for _ in instances]
        self._numbers: dict[str, int] = {}
        self._listeners: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Party:
        for storage, heard in zip(self.instances, self.heard, strict=True):
            ready = asyncio.Event()
            self._listeners.append(asyncio.create_task(storage.listen(heard.append, ready.set)))
            await asyncio.wait_for(ready.wait(), SOON)
        return self

    async def __aexit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)
        for storage in self.instances:
            await storage.close()

    async def answer(self, nth: int, kind: str, what: Any) -> object:
        """Ask an instance. Numbers are each store's own; what they do shows in the order of turns."""
        storage = self.instances[nth]
        if kind == "take":
            answer = await storage.take(replace(what, number=self._numbers.get(what.lease, 0)))
            if isinstance(answer, Started | Queued):
                self._numbers[what.lease] = answer.number
            return _without_number(answer)
        if kind == "release":
            lease, undo = what
            return await storage.release(lease, undo=undo)
        if kind == "pass_on":
            return await storage.pass_on(*what)
        return await storage.renew(*what)

    async def all_heard(self) -> list[list[Turn]]:
        """What was told, once a last message that comes after everything else is there."""
        for nth, storage in enumerate(self.instances):
            last = [Ask(f"last-{nth}-{each}", slots=(SlotNeed(f"last-{nth}", 1),)) for each in range(2)]
            await self.instances[nth - 1].take(last[0])
            await storage.take(last[1])
            await self.instances[nth - 1].release(last[0].lease)
            heard, told = self.heard[nth], Turn(last[1].lease, 1)
            await eventually(partial(heard.__contains__, told))
        return self.heard


@dataclass
class Known:
    """A call of the sequence: who asked, what it asked last, and whether it asks no more."""

    owner: int
    ask: Ask
    ended: bool = False


class Questions:
    """A random sequence of questions for parties that share one clock."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now_us = 1_767_225_600 * SECOND + self.random.randrange(3600 * SECOND)
        self.calls: list[Known] = []
        self.started: set[str] = set()

    def new(self) -> Known:
        pick = self.random
        slots = pick.sample(sorted(SLOTS), pick.choice((0, 1, 1, 1, 2, 2, 3)))
        ask = Ask(
            f"call-{len(self.calls)}",
            rates=tuple(pick.sample(RATES, pick.choice((0, 1, 1, 1, 2)))),
            slots=tuple(
                SlotNeed(key, SLOTS[key], pick.random() < 0.04, pick.choice((None, None, None, None, 2, 5)))
                for key in slots
            ),
            rank=pick.choice((NESTED, CONTROL, CONTROL, NORMAL, NORMAL, NORMAL, NORMAL)),
            may_wait=pick.random() < 0.95,
            force=pick.random() < 0.04,
        )
        self.calls.append(Known(pick.randrange(INSTANCES), ask))
        return self.calls[-1]

    def again(self) -> Known:
        call = self.random.choice([call for call in self.calls if not call.ended][-12:])
        change = self.random.choice((0, 0, 1, 1, -1))
        if call.ask.attempt + change > 0:
            asked = replace(call.ask, attempt=call.ask.attempt + change)
            if change >= 0:
                call.ask = asked
            return Known(call.owner, asked)
        return call

    def next(self) -> tuple[str, int, Any]:
        """What to do, by whom, and with what."""
        pick = self.random
        kind = pick.choice(
            ("take",) * 7
            + ("release",) * 5
            + ("again", "again", "pass_on", "pass_on", "renew", "time", "time")
        )
        if kind == "time":
            self.now_us += round(pick.choice((0, 1, SECOND, SECOND, 3 * SECOND, 20 * SECOND)) * pick.random())
            return "time", 0, self.now_us
        if kind == "renew":
            nth = pick.randrange(INSTANCES)
            mine = [call.ask.lease for call in self.calls if call.owner == nth and not call.ended][:30]
            # Now and then one that waits is said to hold, and the other way round.
            held = [lease for lease in mine if (lease in self.started) != (pick.random() < 0.03)]
            return "renew", nth, (held, [lease for lease in mine if lease not in held])
        if kind == "take" or not self.calls or (kind == "again" and self.calls[-1].ended):
            call = self.new()
            return "take", call.owner, call.ask
        if kind == "again":
            call = self.again()
            return "take", call.owner, call.ask
        likely = [call for call in self.calls if call.ask.lease in self.started and not call.ended]
        call = pick.choice(likely if likely and pick.random() < 0.7 else self.calls[-20:])
        if kind == "pass_on":
            return "pass_on", call.owner, (call.ask.lease, pick.choice((1, call.ask.attempt)))
        return "release", call.owner, (call.ask.lease, pick.random() < 0.3)

    def note(self, kind: str, what: Any, answer: object) -> None:
        if isinstance(answer, Started):
            self.started.add(what.lease)
        elif isinstance(answer, Renewed):
            for lease in answer.lost:
                self.named(lease).ended = True
            self.started |= {turn.lease for turn in answer.turns}
        elif isinstance(answer, tuple):
            self.started |= {turn.lease for turn in answer}
        if kind == "release" and (not what[1] or self.random.random() < 0.7):
            self.named(what[0]).ended = True

    def named(self, lease: str) -> Known:
        return self.calls[int(lease.split("-")[1])]

    async def ask_all(self, parties: Sequence[Party], length: int) -> None:
        said: list[str] = []
        for _ in range(length):
            kind, nth, what = self.next()
            if kind == "time":
                said.append(f"now {what}")
                continue
            answers = [await party.answer(nth, kind, what) for party in parties]
            said.append(f"{nth}: {kind} {what} -> {answers[0]}")
            assert answers[0] == answers[1], "\n".join(
                [f"seed {self.seed}", *said[-30:], f"but {answers[1]}"]
            )
            self.note(kind, what, answers[0])
        heard = [await party.all_heard() for party in parties]
        assert heard[0] == heard[1], f"seed {self.seed}"


async def compare(url: str, seed: int, length: int) -> None:
    questions = Questions(seed)
    store = InProcessStore(lease=LEASE, now_us=lambda: questions.now_us)
    make = partial(RedisStorage, url, lease=LEASE, timeout=SOON, now_us=lambda: questions.now_us)
    prefix = f"differential-{next(_prefixes)}"
    reference = Party([InProcessStorage(store) for _ in range(INSTANCES)])
    redis = Party([make(prefix=prefix) for _ in range(INSTANCES)])
    async with reference, redis:
        await questions.ask_all([reference, redis], length)


async def test_redis_answers_what_the_reference_answers(valkey: Valkey) -> None:
    for seed in seeds(10):
        await compare(valkey.url, seed, 100)


@pytest.mark.slow
async def test_redis_answers_what_the_reference_answers_in_many_sequences(valkey: Valkey) -> None:
    for seed in seeds(50):
        await compare(valkey.url, seed, 250)


# ------------------------------------------------------------------------------- the decisions of one process


class OneProcess:
    """Questions put to the counts and slots of one process, as the guard does without a store."""

    def __init__(self, clock: FakeClock) -> None:
        self.storage = MemoryStorage(clock)
        self.claims: dict[str, Claim] = {}
        self._rates: dict[str, BoundRate] = {}

    def claim(self, ask: Ask) -> Claim:
        slots = [self.storage.scheduler.slot(need.key, need.capacity, lasting=True) for need in ask.slots]
        return Claim(
            [(self._rate(need), need.key) for need in ask.rates],
            tuple(slots),
            control=ask.rank == CONTROL,
            nested=ask.rank == NESTED,
        )

    def _rate(self, need: RateNeed) -> BoundRate:
        if need.key not in self._rates:
            strategies: dict[str, Strategy] = {
                each: each for each in ("fixed-window", "moving-window", "sliding-window")
            }
            limit = RateLimit(need.most, need.window_us / SECOND, strategy=strategies[need.strategy])
            self._rates[need.key] = bind_rates([limit], need.key, self.storage.counts)[0]
        return self._rates[need.key]

    def take(self, ask: Ask) -> Answer:
        claim = self.claims.get(ask.lease) or self.claim(ask)
        found = self.storage.take(claim)
        if isinstance(found, RateRefusal):
            return _often(claim, found)
        if found is Verdict.TAKEN:
            self.claims[ask.lease] = claim
            return Started(0)
        obstacles: list[Slot] = self.storage.scheduler.obstacles(claim)[0]
        blocked = tuple(position for position, slot in enumerate(claim.slots) if slot in obstacles)
        if not ask.may_wait:
            self.storage.refuse(claim)
            return NoSlot(blocked, None)
        self.claims[ask.lease] = claim
        self.storage.wait(claim)
        return Queued(0, blocked)

    def release(self, lease: str) -> tuple[Turn, ...]:
        claim = self.claims.pop(lease, None)
        if claim is not None:
            self.storage.release(claim)
            self.storage.leave(claim)
        return self.turns()

    def turns(self) -> tuple[Turn, ...]:
        names = {claim: lease for lease, claim in self.claims.items()}
        return tuple(
            Turn(names[claim], 1, None if refusal is None else _often(claim, refusal))
            for claim, refusal in self.storage.turns()
        )


def _often(claim: Claim, refusal: RateRefusal) -> TooOften:
    position = [rule for rule, _ in claim.rates].index(refusal.rule)
    return TooOften(position, -(-refusal.wait_ns // 1000))


def _without_number(answer: object) -> object:
    return replace(answer, number=0) if isinstance(answer, Started | Queued) else answer


async def compare_in_memory(seed: int, length: int) -> None:
    pick = random.Random(seed)
    clock = FakeClock(1_767_225_600)
    alone = OneProcess(clock)
    storage = InProcessStorage(InProcessStore(lease=10**6, now_us=lambda: clock.wall_ns() // 1000))
    running: list[str] = []
    for nth in range(length):
        if pick.random() < 0.2:
            clock.advance(round(pick.choice((1, 5, 20)) * pick.random(), 3))
        if running and pick.random() < 0.5:
            lease = running.pop(pick.randrange(len(running)))
            answers: list[object] = [await storage.release(lease), alone.release(lease)]
        else:
            slots = pick.sample(sorted(SLOTS), pick.choice((0, 1, 1, 2, 2, 3)))
            whole = [need for need in RATES if need.window_us % 1000 == 0]
            ask = Ask(
                f"call-{nth}",
                rates=tuple(pick.sample(whole, pick.choice((0, 0, 1, 1, 2)))),
                slots=tuple(SlotNeed(key, SLOTS[key]) for key in slots),
                rank=pick.choice((NESTED, CONTROL, NORMAL, NORMAL, NORMAL)),
                may_wait=pick.random() < 0.9,
            )
            answers = [_without_number(await storage.take(ask)), alone.take(ask)]
            if isinstance(answers[0], Started | Queued):
                running.append(ask.lease)
        assert answers[0] == answers[1], f"seed {seed}, question {nth}"


async def test_one_process_decides_what_several_share() -> None:
    for seed in seeds(20):
        await compare_in_memory(seed, 200)


@pytest.mark.slow
async def test_one_process_decides_what_several_share_in_many_sequences() -> None:
    for seed in seeds(200):
        await compare_in_memory(seed, 250)


# ----------------------------------------------------------------------------------- the package as a referee

LIMITERS: dict[str, type[RateLimiter]] = {
    "fixed-window": FixedWindowRateLimiter,
    "moving-window": MovingWindowRateLimiter,
    "sliding-window": SlidingWindowCounterRateLimiter,
}


@pytest.mark.parametrize("strategy", sorted(LIMITERS))
async def test_redis_counts_as_the_strategies_of_the_package_do(valkey: Valkey, strategy: str) -> None:
    for seed in seeds(3):
        pick = random.Random(seed)
        clock = FakeClock(1_767_225_600)
        most, window = pick.randint(1, 5), pick.randint(10, 40)
        limiter, item = LIMITERS[strategy](WindowCounts(clock)), RateLimitItemPerSecond(most, window)
        storage = RedisStorage(
            valkey.url,
            prefix=f"referee-{next(_prefixes)}",
            timeout=SOON,
            now_us=lambda clock=clock: clock.wall_ns() // 1000,  # type: ignore[misc]
        )
        for nth in range(60):
            part = round(pick.choice((1, pick.random())), 3)
            clock.advance(pick.choice((0, 1, window / 4, window)) * part)
            need = RateNeed("key", strategy, most, window * SECOND)
            starts = isinstance(await storage.take(Ask(f"call-{nth}", (need,))), Started)
            assert (limiter.get_window_stats(item, "key").remaining > 0) == starts, f"seed {seed}"
            assert limiter.hit(item, "key") == starts, f"seed {seed}"
        await storage.close()
