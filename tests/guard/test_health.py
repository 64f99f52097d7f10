"""How the guard is, in one word, and what operators read about shared keys, places and abandoned work."""

from __future__ import annotations

import asyncio
import logging

import pytest

from frontmcp_py.call import Call
from frontmcp_py.guard import Guard, KeyUse
from frontmcp_py.policy import Admission, Concurrency, Policy, RateLimit, Throttle
from frontmcp_py.testing import settle, virtual_time
from tests.guard.support import FREE, Held, code_of, hold, new_guard, once

SMALL = Admission(max_active=4, reserved=1, max_queued=2)
TIMED = Policy(timeout=1)


def status(guard: Guard) -> tuple[str, bool]:
    health = guard.health()
    return health.status, health.is_ready


async def fill(guard: Guard, calls: int, policy: Policy = FREE) -> list[Held]:
    return [await hold(guard, f"tool-{number}", policy) for number in range(calls)]


async def let_all_go(held: list[Held]) -> None:
    for each in held:
        each.let_go()
    await settle()


@virtual_time
async def test_a_server_is_ready_busy_while_calls_wait_and_overloaded_when_another_one_is_refused() -> None:
    guard = new_guard(Throttle(admission=SMALL))
    assert status(guard) == ("ready", True)
    held = await fill(guard, 3)
    assert status(guard) == ("ready", True)
    held += await fill(guard, 1)
    assert status(guard) == ("busy", True)
    held += await fill(guard, 1)
    assert status(guard) == ("overloaded", False)
    assert await code_of(once(guard)) == "OVERLOADED"
    await let_all_go(held)
    assert status(guard) == ("ready", True)


@virtual_time
async def test_a_queue_of_its_own_makes_a_server_busy_and_not_overloaded() -> None:
    guard = new_guard(Throttle(admission=SMALL))
    policy = Policy(concurrency=Concurrency(1, queue_timeout=60))
    held = [await hold(guard, "x", policy), await hold(guard, "x", policy)]
    assert status(guard) == ("busy", True)
    await let_all_go(held)


@virtual_time
async def test_without_a_queue_a_server_is_overloaded_when_no_normal_place_is_free() -> None:
    guard = new_guard(Throttle(admission=Admission(max_active=4, reserved=1, max_queued=0)))
    held = await fill(guard, 2)
    assert status(guard) == ("ready", True)
    held += await fill(guard, 1)
    assert status(guard) == ("overloaded", False)
    await let_all_go(held)
    held = await fill(guard, 4, Policy(priority="control"))
    assert status(guard) == ("overloaded", False)
    await let_all_go(held)
    assert status(guard) == ("ready", True)


@virtual_time
async def test_exhausted_rate_limits_and_full_slots_say_nothing_about_the_server() -> None:
    guard = new_guard(Throttle(admission=SMALL, global_rate_limit=RateLimit(1, "1h")))
    held = await hold(guard, "x", Policy(concurrency=1))
    assert await code_of(once(guard)) == "RATE_LIMIT_EXCEEDED"
    assert status(guard) == ("ready", True)
    await let_all_go([held])


@virtual_time
async def test_in_observe_mode_a_server_is_never_overloaded() -> None:
    guard = new_guard(Throttle(mode="observe", admission=Admission(2, 1, max_queued=0)))
    held = await fill(guard, 6)
    assert status(guard) == ("ready", True)
    await let_all_go(held)


@virtual_time
async def test_a_server_whose_throttle_is_off_is_unguarded_however_much_runs() -> None:
    guard = new_guard(Throttle(enabled=False, admission=SMALL))
    held = await fill(guard, 9)
    assert status(guard) == ("unguarded", True)
    assert guard.health().admission is None
    await let_all_go(held)


@virtual_time
async def test_a_server_without_admission_is_ready_whatever_runs_and_hangs() -> None:
    guard = new_guard(Throttle(admission=None))
    held = await fill(guard, 9, TIMED)
    await asyncio.sleep(2)
    assert guard.statistics().abandoned == 9
    assert status(guard) == ("ready", True)
    await let_all_go(held)


@virtual_time
async def test_half_of_the_places_taken_by_abandoned_work_is_stuck_and_named_in_the_log_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = new_guard(Throttle(admission=SMALL))
    first = await fill(guard, 1, TIMED)
    await asyncio.sleep(2)
    assert status(guard) == ("ready", True)
    second = await fill(guard, 1, TIMED)
    third = await fill(guard, 1, TIMED)
    assert not caplog.records
    await asyncio.sleep(2)
    assert status(guard) == ("stuck", True)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert '"tool-0" (2)' in record.getMessage()
    assert guard.statistics().abandoned_places == 3
    await let_all_go(first + second)
    assert status(guard) == ("ready", True)
    await let_all_go(third)
    # It has come back, so it is said again when it goes again.
    again = await fill(guard, 2, TIMED)
    await asyncio.sleep(2)
    assert status(guard) == ("stuck", True)
    assert len(caplog.records) == 2
    await let_all_go(again)


@virtual_time
async def test_nested_work_that_is_abandoned_takes_no_place_and_makes_nobody_stuck() -> None:
    guard = new_guard(Throttle(admission=SMALL))
    plan = guard.bind("inner", TIMED)
    held: list[asyncio.Event] = []

    async def outer() -> None:
        run = next(iter(guard.attach().running))

        async def inner(_: object) -> None:
            held.append(asyncio.Event())
            while not held[-1].is_set():
                await held[-1].wait()

        for _ in range(3):
            assert await code_of(guard.call(plan, run.call, inner, parent=run)) == "EXECUTION_TIMEOUT"
        statistics = guard.statistics()
        assert (statistics.abandoned, statistics.abandoned_places, statistics.places) == (3, 0, 1)
        assert status(guard) == ("ready", True)

    await guard.run(Call("outer"), FREE, outer)
    for event in held:
        event.set()
    await settle()


@virtual_time
async def test_of_several_states_the_gravest_is_told() -> None:
    guard = new_guard(Throttle(admission=SMALL), shutdown_grace=60)
    abandoned = await fill(guard, 2, TIMED)
    await asyncio.sleep(2)
    waiting = await fill(guard, 2)
    # Three run and one waits: busy and stuck.
    assert status(guard) == ("stuck", True)
    waiting += await fill(guard, 1)
    assert status(guard) == ("overloaded", False)
    drain = asyncio.create_task(guard.drain())
    await settle()
    assert status(guard) == ("draining", False)
    await let_all_go(abandoned + waiting)
    await drain


@virtual_time
async def test_a_drained_guard_takes_no_calls_and_stays_so() -> None:
    guard = new_guard(shutdown_grace=3)
    async with guard:
        held = await hold(guard)
        drain = asyncio.create_task(guard.drain())
        await settle()
        assert await code_of(once(guard)) == "OVERLOADED"
        async with guard:
            assert await code_of(once(guard)) == "OVERLOADED"
        started = asyncio.get_running_loop().time()
        held.let_go()
        await drain
        assert asyncio.get_running_loop().time() == started
        await guard.drain()
        assert await code_of(once(guard)) == "OVERLOADED"
    assert status(guard) == ("draining", False)


@virtual_time
async def test_leaving_a_guard_waits_for_the_drain_that_has_begun_and_gives_no_second_grace() -> None:
    guard = new_guard(shutdown_grace=3)
    loop = asyncio.get_running_loop()
    async with guard:
        held = await hold(guard)
        drain = asyncio.create_task(guard.drain())
        await asyncio.sleep(2)
    assert loop.time() == 3
    assert (await held.refusal()).code == "OVERLOADED"
    await drain


@virtual_time
async def test_a_drain_takes_over_the_grace_that_the_last_user_has_left() -> None:
    guard = new_guard(shutdown_grace=3)
    loop = asyncio.get_running_loop()

    async def come_and_go() -> Held:
        async with guard:
            return await hold(guard)

    left = asyncio.create_task(come_and_go())
    await asyncio.sleep(2)
    await guard.drain()
    assert loop.time() == 5
    assert (await (await left).refusal()).code == "OVERLOADED"


@virtual_time
async def test_shared_keys_tell_how_they_are_used() -> None:
    guard = new_guard()
    shell = Concurrency(2, key="shell", queue_timeout=60)
    guard.bind("idle", Policy(concurrency=Concurrency(5, key="idle")))
    guard.bind("own", Policy(concurrency=1))
    guard.bind("each", Policy(concurrency=Concurrency(1, key="each", partition_by="user_id")))
    held = [await hold(guard, f"tool-{number}", Policy(concurrency=shell)) for number in range(3)]
    keys = guard.statistics().keys
    assert keys == {"shell": KeyUse(2, 2, 1, 2), "idle": KeyUse(5, 0, 0, 0)}
    assert guard.plans["tool-0"].keys == ("shell",)
    assert guard.plans["own"].keys == ()
    await let_all_go(held)
    assert guard.statistics().keys["shell"] == KeyUse(2, 0, 0, 2)
    guard.unbind("idle")
    assert "idle" not in guard.statistics().keys


@virtual_time
async def test_the_oldest_work_and_the_most_places_are_told() -> None:
    guard = new_guard()
    assert guard.statistics().oldest_running_s == 0
    first = await hold(guard)
    await asyncio.sleep(5)
    second = await hold(guard)
    await asyncio.sleep(2)
    assert guard.statistics().oldest_running_s == 7
    await let_all_go([first])
    assert guard.statistics().oldest_running_s == 2
    await let_all_go([second])
    statistics = guard.statistics()
    assert (statistics.oldest_running_s, statistics.places, statistics.peak_places) == (0, 0, 2)
