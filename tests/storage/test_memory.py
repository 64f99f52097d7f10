from __future__ import annotations

import threading
import weakref

import pytest

from frontmcp_py.guard.rates import bind_rates
from frontmcp_py.policy import STRATEGIES, RateLimit, Strategy
from frontmcp_py.scheduler import Pool, Slot
from frontmcp_py.storage import Claim, MemoryStorage, RateRefusal, Verdict
from frontmcp_py.testing import FakeClock

MINUTE_NS = 60 * 10**9


class Place:
    """A storage, one slot and rate limits in it, and a clock."""

    def __init__(self, *limits: RateLimit, capacity: int = 1, start: float = 0) -> None:
        self.clock = FakeClock(start)
        self.storage = MemoryStorage(self.clock)
        self.slot = self.storage.scheduler.slot("s", capacity, lasting=True)
        self.rates = bind_rates(limits, "x", self.storage.counts)

    def claim(self, *, nested: bool = False) -> Claim:
        return Claim([(rate, rate.everybody or "") for rate in self.rates], (self.slot,), nested=nested)

    def counted(self) -> int:
        """How many calls the first limit has counted, as its room tells."""
        rate = self.rates[0]
        probes: list[Claim] = []
        while self.storage.take(probe := Claim([(rate, rate.everybody or "")])) is Verdict.TAKEN:
            probes.append(probe)
        for probe in probes:
            self.storage.undo(probe)
        return rate.limit.max_requests - len(probes)


per_minute = [RateLimit(5, 60, strategy=strategy) for strategy in STRATEGIES]


@pytest.mark.parametrize("limit", per_minute, ids=STRATEGIES)
def test_a_claim_takes_its_rates_and_its_places_together(limit: RateLimit) -> None:
    place = Place(limit)
    assert place.storage.take(place.claim()) is Verdict.TAKEN
    assert (place.counted(), place.slot.held) == (1, 1)


@pytest.mark.parametrize("limit", per_minute, ids=STRATEGIES)
def test_a_claim_without_a_place_is_not_counted(limit: RateLimit) -> None:
    place = Place(limit)
    place.storage.take(place.claim())
    assert place.storage.take(place.claim()) is Verdict.FULL
    assert (place.counted(), place.slot.held) == (1, 1)


def test_a_claim_without_room_in_its_rates_takes_no_place() -> None:
    place = Place(RateLimit(1, 60), capacity=2)
    place.storage.take(place.claim())
    refused = place.storage.take(place.claim())
    assert isinstance(refused, RateRefusal)
    assert refused.rule is place.rates[0]
    assert refused.wait_ns == MINUTE_NS
    assert place.slot.held == 1


@pytest.mark.parametrize("limit", per_minute, ids=STRATEGIES)
def test_what_never_ran_is_not_counted(limit: RateLimit) -> None:
    place = Place(limit)
    claim = place.claim()
    place.storage.take(claim)
    place.storage.undo(claim)
    assert (place.counted(), place.slot.held) == (0, 0)
    assert place.storage.counts.held == 0
    # Whoever takes it back twice takes back nothing of others.
    place.storage.take(place.claim())
    place.storage.undo(claim)
    assert (place.counted(), place.slot.held) == (1, 1)


@pytest.mark.parametrize("limit", per_minute, ids=STRATEGIES)
def test_undoing_one_of_several_leaves_the_others_counted(limit: RateLimit) -> None:
    place = Place(limit, capacity=3)
    claims = [place.claim() for _ in range(3)]
    for claim in claims:
        place.storage.take(claim)
    place.storage.undo(claims[1])
    assert (place.counted(), place.slot.held) == (2, 2)


def test_undoing_after_the_window_has_ended_takes_nothing_from_the_next_one() -> None:
    place = Place(RateLimit(5, 60), capacity=2, start=59)
    first = place.claim()
    place.storage.take(first)
    place.clock.advance(1)
    assert place.counted() == 0
    place.storage.undo(first)
    assert place.counted() == 0


def test_a_claim_is_released_once() -> None:
    place = Place()
    claim = place.claim()
    place.storage.take(claim)
    place.storage.release(claim)
    place.storage.release(claim)
    assert place.slot.held == 0


def test_a_turn_is_counted_when_it_comes_and_not_before() -> None:
    place = Place(RateLimit(5, 60))
    first, second = place.claim(), place.claim()
    place.storage.take(first)
    assert place.storage.take(second) is Verdict.FULL
    place.storage.wait(second)
    assert place.counted() == 1
    place.storage.release(first)
    assert place.storage.turns() == [(second, None)]
    assert (place.counted(), place.slot.held) == (2, 1)


def test_a_turn_whose_rate_has_run_out_passes_on_in_the_same_step() -> None:
    place = Place(RateLimit(2, 60))
    free = Claim((), (place.slot,))
    first, second, third = place.claim(), place.claim(), place.claim()
    place.storage.take(first)
    for claim in (second, third, free):
        assert place.storage.take(claim) is Verdict.FULL
        place.storage.wait(claim)
    place.storage.release(first)
    assert [(claim, refusal is None) for claim, refusal in place.storage.turns()] == [(second, True)]
    place.storage.release(second)
    turns = place.storage.turns()
    assert [claim for claim, _ in turns] == [third, free]
    refusal = turns[0][1]
    assert refusal is not None
    assert refusal.wait_ns == MINUTE_NS
    assert turns[1][1] is None
    assert free.is_holding
    assert not third.is_holding


def test_a_turn_that_nobody_is_there_to_take_passes_on() -> None:
    class Gone(Claim):
        @property
        def is_gone(self) -> bool:
            return True

    place = Place(RateLimit(5, 60))
    first = place.claim()
    place.storage.take(first)
    gone, next_one = Gone([(place.rates[0], place.rates[0].everybody or "")], (place.slot,)), place.claim()
    for claim in (gone, next_one):
        place.storage.take(claim)
        place.storage.wait(claim)
    place.storage.release(first)
    assert place.storage.turns() == [(next_one, None)]
    assert (place.counted(), place.slot.held) == (2, 1)


def test_forced_claims_go_over_the_limit_and_are_counted_only_if_asked_to() -> None:
    place = Place(RateLimit(5, 60))
    claims = [place.claim() for _ in range(3)]
    place.storage.take(claims[0])
    place.storage.force(claims[1], count=True)
    place.storage.force(claims[2], count=False)
    assert (place.counted(), place.slot.held) == (2, 3)
    # What was not counted is not taken back either.
    place.storage.undo(claims[2])
    assert (place.counted(), place.slot.held) == (2, 2)


# ---------------------------------------------------------------------------------------------------- memory


class Key(str):
    """A key that can be watched while it is in memory."""


class Subjects:
    """One limit, counted for many subjects."""

    def __init__(self, strategy: Strategy) -> None:
        self.clock = FakeClock()
        self.storage = MemoryStorage(self.clock)
        self.rate = bind_rates([RateLimit(2, 60, "user_id", strategy)], "x", self.storage.counts)[0]
        self._seen: list[weakref.ref[Key]] = []

    @property
    def held(self) -> int:
        return self.storage.counts.held

    def call(self, name: str) -> bool:
        """Whether a call of this subject starts."""
        key = Key(name)
        self._seen.append(weakref.ref(key))
        return self.storage.take(Claim([(self.rate, key)])) is Verdict.TAKEN

    def call_all(self, prefix: str, number: int) -> list[bool]:
        return [self.call(f"{prefix}-{each}") for each in range(number)]

    def remembered(self) -> int:
        """How many keys are still somewhere in memory, live or not."""
        return sum(seen() is not None for seen in self._seen)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_counts_expire_with_their_windows_and_their_memory_is_freed(strategy: Strategy) -> None:
    subjects = Subjects(strategy)
    subjects.call_all("subject", 500)
    assert subjects.held == subjects.remembered() == 500
    # The estimate needs the counts of a window for one window more.
    subjects.clock.advance(120 if strategy == "sliding-window" else 60)
    for _ in range(20):
        subjects.call("another")
    assert subjects.held == subjects.remembered() == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_call_frees_a_little_so_that_none_is_held_up(strategy: Strategy) -> None:
    subjects = Subjects(strategy)
    subjects.call_all("subject", 500)
    subjects.clock.advance(180)
    subjects.call("another")
    assert subjects.remembered() > 350


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_live_is_never_freed(strategy: Strategy) -> None:
    subjects = Subjects(strategy)
    for _ in range(2):
        assert all(subjects.call_all("subject", 500))
    subjects.clock.advance(59.999)
    assert all(subjects.call_all("another", 300))
    assert not any(subjects.call_all("subject", 500))
    assert subjects.held == 800


def test_windows_that_nobody_calls_any_more_are_freed_by_calls_of_others() -> None:
    clock = FakeClock()
    storage = MemoryStorage(clock)
    limits = [RateLimit(1, window, "user_id", strategy) for strategy in STRATEGIES for window in (1, 60)]
    seen: list[weakref.ref[Key]] = []
    for rate in bind_rates(limits, "x", storage.counts):
        for number in range(100):
            key = Key(f"subject-{number}")
            seen.append(weakref.ref(key))
            assert storage.take(Claim([(rate, key)])) is Verdict.TAKEN
    del key
    assert storage.counts.held == 600
    clock.advance(120)
    busy = bind_rates([RateLimit(100, 3600)], "y", storage.counts)[0]
    for _ in range(30):
        assert storage.take(Claim([(busy, "y")])) is Verdict.TAKEN
    assert storage.counts.held == 1
    assert not any(ref() for ref in seen)


def test_no_thread_is_started() -> None:
    before = threading.enumerate()
    subjects = Subjects("moving-window")
    subjects.call("subject")
    assert threading.enumerate() == before


def test_a_slot_and_a_pool_are_what_a_claim_needs() -> None:
    storage = MemoryStorage(FakeClock())
    pool = Pool("admission", 1, 0)
    slot: Slot = storage.scheduler.slot("s", 1)
    assert storage.take(Claim((), (slot,), (pool,))) is Verdict.TAKEN
    refused = Claim((), (), (pool,))
    assert storage.take(refused) is Verdict.FULL
    storage.refuse(refused)
    assert storage.scheduler.waiting == 0
