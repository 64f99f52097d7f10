"""The guard alone, around a coroutine that does nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from benchmarks.measure import Ratio, record, run_once, take_turns
from frontmcp_py import Call, Concurrency, Guard, GuardError, Policy, RateLimit, Throttle

PLENTY = 10**9
CALL = Call("noop")


async def noop() -> None:
    """Do nothing."""


async def bare_tasks(calls: int) -> None:
    for _ in range(calls):
        await asyncio.create_task(noop())


def throttle() -> Throttle:
    """Two rate limits and two slots with a tool's own, and admission."""
    return Throttle(global_rate_limit=RateLimit(PLENTY), global_concurrency=Concurrency(40))


def policy(**options: Any) -> Policy:
    return Policy(rate_limit=RateLimit(PLENTY), concurrency=10, **options)


async def guarded(options: dict[str, Any]) -> Ratio:
    async with Guard(throttle()) as guard:
        limits = policy(**options)

        async def calls(count: int) -> None:
            for _ in range(count):
                await guard.run(CALL, limits, noop)

        return await take_turns(calls, bare_tasks, rounds=40, calls=1000)


@pytest.mark.parametrize(
    ("name", "options", "budget"),
    [
        ('`on_cancel="cancel"`, no timeout', {"on_cancel": "cancel"}, "at most 1.5"),
        ("a timeout", {"timeout": 30}, "at most 3"),
    ],
    ids=["cancel", "timeout"],
)
def test_guard_around_a_noop(benchmark: Any, name: str, options: dict[str, Any], budget: str) -> None:
    """Two rate limits, two slots and admission, against `await asyncio.create_task(noop())`."""
    ratio: Ratio = run_once(benchmark, lambda: guarded(options))
    record(benchmark, f"the guard alone around a no-op, {name}", budget, vars(ratio))


KINDS = pytest.mark.parametrize(
    ("kind", "options"),
    [("ordinary", {}), ('`on_cancel="cancel"`', {"on_cancel": "cancel"})],
    ids=["ordinary", "cancel"],
)


async def refusals(
    limits: Policy, prepare: Callable[[Guard], Awaitable[Any]], options: dict[str, Any]
) -> Ratio:
    """A refusal against an admission of the same kind of call."""
    async with Guard(throttle()) as guard:
        admitted = policy(**options)
        await prepare(guard)

        async def refused(count: int) -> None:
            for _ in range(count):
                try:
                    await guard.run(Call("refused"), limits, noop)
                except GuardError:
                    continue
                raise AssertionError("the call was not refused")

        async def admits(count: int) -> None:
            for _ in range(count):
                await guard.run(CALL, admitted, noop)

        return await take_turns(refused, admits, rounds=40, calls=1000)


@KINDS
def test_rate_limited(benchmark: Any, kind: str, options: dict[str, Any]) -> None:
    """A call that its rate limit refuses, against one that is admitted."""
    limits = Policy(rate_limit=RateLimit(1, window="365d"), **options)

    async def use_up(guard: Guard) -> None:
        await guard.run(Call("refused"), limits, noop)

    ratio: Ratio = run_once(benchmark, lambda: refusals(limits, use_up, options))
    record(
        benchmark, f"a refusal by a rate limit, against an admission ({kind} calls)", "at most 1", vars(ratio)
    )


@KINDS
def test_slot_taken(benchmark: Any, kind: str, options: dict[str, Any]) -> None:
    """A call that finds its slot taken, against one that is admitted."""
    limits = Policy(concurrency=1, **options)
    holders: list[asyncio.Task[None]] = []

    async def take(guard: Guard) -> None:
        taken = asyncio.Event()

        async def hold() -> None:
            taken.set()
            await asyncio.Event().wait()

        holders.append(asyncio.create_task(guard.run(Call("refused"), limits, hold)))
        await taken.wait()

    async def measured() -> Ratio:
        try:
            return await refusals(limits, take, options)
        finally:
            holders.pop().cancel()

    ratio: Ratio = run_once(benchmark, measured)
    name = f"a refusal for want of a slot, against an admission ({kind} calls)"
    record(benchmark, name, "at most 1", vars(ratio))
