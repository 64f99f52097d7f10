"""Waiting: hand-off, a release among many waiters, a flood on the guard alone, memory per key."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.measure import Ratio, record, run_once, take_turns
from frontmcp_py import Call, Caller, Concurrency, Guard, GuardError, Policy, RateLimit
from frontmcp_py.scheduler import Scheduler, Slot, Ticket
from frontmcp_py.testing import FakeClock

MUTEX = Policy(concurrency=Concurrency(1, queue_timeout=600))


async def noop() -> None:
    """Do nothing."""


async def hand_offs() -> dict[str, Any]:
    """From a freed slot to the waiter's first step."""
    taken: list[float] = []

    async def once(guard: Guard) -> None:
        freed = 0.0

        async def hold() -> None:
            nonlocal freed
            await asyncio.sleep(0)
            freed = time.perf_counter()

        async def wait() -> None:
            taken.append(time.perf_counter() - freed)

        await asyncio.gather(guard.run(Call("mutex"), MUTEX, hold), guard.run(Call("mutex"), MUTEX, wait))

    async with Guard() as guard:
        for _ in range(2000):
            await once(guard)
    return {"median_us": statistics.median(taken) * 1e6}


def test_hand_off(benchmark: Any) -> None:
    """From a freed slot to the waiter."""
    record(benchmark, "hand-off from a freed slot", "median under 200 µs", run_once(benchmark, hand_offs))


async def twenty_jobs() -> dict[str, Any]:
    async with Guard() as guard:

        async def job() -> None:
            await asyncio.sleep(0.01)

        began = time.perf_counter()
        await asyncio.gather(*(guard.run(Call("mutex"), MUTEX, job) for _ in range(20)))
        return {"seconds": time.perf_counter() - began}


def test_twenty_jobs(benchmark: Any) -> None:
    """Twenty queued 10 ms jobs on a mutex."""
    record(benchmark, "20 queued 10 ms jobs on a mutex", "within 0.25 s", run_once(benchmark, twenty_jobs))


async def releases(waiters: int, against: int) -> Ratio:
    """A release that lets the next one start, while so many stand behind it."""

    def crowd(count: int) -> tuple[Scheduler, Slot, list[Ticket]]:
        scheduler = Scheduler()
        slot = scheduler.slot("mutex", 1, lasting=True)
        holder = Ticket((slot,))
        assert scheduler.offer(holder)
        for _ in range(count):
            join(scheduler, slot)
        return scheduler, slot, [holder]

    def join(scheduler: Scheduler, slot: Slot) -> None:
        ticket = Ticket((slot,))
        assert not scheduler.offer(ticket)
        scheduler.wait(ticket)

    def turns(scheduler: Scheduler, slot: Slot, holders: list[Ticket]) -> Callable[[int], Awaitable[None]]:
        async def turn(count: int) -> None:
            for _ in range(count):
                scheduler.release(holders.pop())
                started = scheduler.next()
                assert started is not None
                holders.append(started)
                join(scheduler, slot)

        return turn

    return await take_turns(turns(*crowd(waiters)), turns(*crowd(against)), rounds=30, calls=2000)


def test_release_among_many(benchmark: Any) -> None:
    """A release with 10,000 waiters, against one with 100."""
    ratio: Ratio = run_once(benchmark, lambda: releases(10_000, 100))
    name = "a release with 10,000 waiters, against one with 100"
    record(benchmark, name, "at most 2", vars(ratio))


async def flood(calls: int, *, weighs: bool) -> dict[str, Any]:
    """So many calls at once on default admission, and a control call now and then.

    Counting memory slows everything down, so one flood is timed and another one weighed.
    """
    control = Policy(priority="control")
    outcomes: Counter[str] = Counter()
    slowest = 0.0

    async def work() -> None:
        await asyncio.sleep(0.001)

    async def normal(guard: Guard) -> None:
        try:
            await guard.run(Call("work"), Policy(), work)
        except GuardError as error:
            outcomes[error.code] += 1
        else:
            outcomes["answered"] += 1

    async def controls(guard: Guard, stop: asyncio.Event) -> None:
        nonlocal slowest
        while not stop.is_set():
            began = time.perf_counter()
            await guard.run(Call("control"), control, noop)
            slowest = max(slowest, time.perf_counter() - began)
            await asyncio.sleep(0.001)

    async with Guard() as guard:
        await guard.run(Call("control"), control, noop)
        stop = asyncio.Event()
        watcher = asyncio.create_task(controls(guard, stop))
        await asyncio.sleep(0.01)
        gc.collect()
        if weighs:
            tracemalloc.start()
        await asyncio.gather(*(normal(guard) for _ in range(calls)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        stop.set()
        await watcher
    if weighs:
        return {"memory_mb": peak / 1e6}
    return {
        "calls": calls,
        "outcomes": dict(outcomes),
        "lost": calls - sum(outcomes.values()),
        "slowest_control_ms": slowest * 1000,
    }


def test_flood(benchmark: Any) -> None:
    """10,000 calls at once on default admission."""
    budget = "none lost, slowest control call under 50 ms, under 20 MB"

    async def measured() -> dict[str, Any]:
        return await flood(10_000, weighs=False) | await flood(10_000, weighs=True)

    record(benchmark, "a flood of 10,000 calls on the guard alone", budget, run_once(benchmark, measured))


async def memory(keys: int) -> dict[str, Any]:
    """What a live count of a fixed window takes, and what is left after its window."""
    clock = FakeClock()
    limits = Policy(rate_limit=RateLimit(5, window="1m", partition_by="user_id"), on_cancel="cancel")
    async with Guard(clock=clock) as guard:
        await guard.run(Call("tool"), limits, noop)
        gc.collect()
        tracemalloc.start()
        for number in range(keys):
            await guard.run(Call("tool", {}, Caller(user_id=f"issuer|user-{number}")), limits, noop)
        gc.collect()
        live, _ = tracemalloc.get_traced_memory()
        clock.advance(60)
        for _ in range(keys // 50):
            await guard.run(Call("tool"), Policy(rate_limit=RateLimit(10**9), on_cancel="cancel"), noop)
        gc.collect()
        left, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return {"keys": keys, "bytes_per_key": live / keys, "bytes_per_key_after_expiry": left / keys}


def test_memory_per_key(benchmark: Any) -> None:
    """100,000 subjects of a fixed window."""
    budget = "under 300 bytes; none after expiry"
    record(benchmark, "memory per live rate key", budget, run_once(benchmark, lambda: memory(100_000)))
