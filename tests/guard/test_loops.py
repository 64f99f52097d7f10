"""One guard on several event loops, one after another, and how it comes to its end on each."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from frontmcp_py.call import Call
from frontmcp_py.guard import Guard, Run
from frontmcp_py.policy import Admission, Concurrency, OnCancel, Policy, Throttle
from frontmcp_py.signal import AbortSignal
from frontmcp_py.testing import FakeClock, run_virtual, settle, virtual_time
from tests.guard.support import Held, code_of, hold, is_clean, new_guard, now, once, refusal
from tests.reconcile import adds_up

MUTEX = Policy(concurrency=Concurrency(1, queue_timeout=5))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ------------------------------------------------------------------------------------ the last user leaves


@virtual_time
async def test_running_work_is_given_its_grace(caplog: pytest.LogCaptureFixture) -> None:
    guard = new_guard(shutdown_grace=2)
    async with guard:
        held = await hold(guard)
        asyncio.get_running_loop().call_later(1.5, held.let_go)
    # The end comes with the work, not with the grace.
    assert now() == 1.5
    assert await held.task == "done"
    assert warnings_in(caplog) == []


@virtual_time
async def test_the_grace_is_two_seconds_unless_told_otherwise() -> None:
    guard = new_guard()
    async with guard:
        held = await hold(guard)
    assert now() == 2
    assert (await held.refusal()).code == "OVERLOADED"


@pytest.mark.parametrize("on_cancel", ["cancel", "abort"])
@pytest.mark.parametrize("grace", [0, 3])
@virtual_time
async def test_after_the_grace_work_is_answered_aborted_and_cancelled_whatever_on_cancel_says(
    on_cancel: OnCancel, grace: float
) -> None:
    guard = new_guard(shutdown_grace=grace)
    reasons: list[Exception | None] = []
    cancelled_at: list[float] = []

    async def body(signal: AbortSignal) -> None:
        signal.add_callback(lambda: reasons.append(signal.reason))
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled_at.append(now())
            raise

    async with guard:
        task = asyncio.create_task(guard.run(Call("x"), Policy(on_cancel=on_cancel), body))
        await settle()
    error = await refusal(task)
    assert str(error) == "Server overloaded: shutting down. Try again shortly."
    assert (reasons, cancelled_at, now()) == ([error], [grace], grace)
    assert guard.statistics().counts.cancelled == 1


@virtual_time
async def test_a_body_in_its_callers_task_is_answered_too() -> None:
    guard = new_guard(shutdown_grace=1)
    async with guard:
        held = await hold(guard, "x", Policy(on_cancel="cancel"))
    assert str(await held.refusal()) == "Server overloaded: shutting down. Try again shortly."
    assert held.was_cancelled
    # The caller's own task goes on: it was the guard that cancelled the body, and has taken that back.
    assert held.task.cancelling() == 0


@virtual_time
async def test_waiters_are_told_at_once() -> None:
    guard = new_guard(shutdown_grace=5)
    async with guard:
        running, waiting = await hold(guard, "x", MUTEX), await hold(guard, "x", MUTEX)
        closing = asyncio.create_task(guard.__aexit__(None, None, None))
        assert str(await waiting.refusal()) == "Server overloaded: shutting down. Try again shortly."
        assert now() == 0
        assert waiting.began is None
        await running.end()
        await closing
        await guard.__aenter__()
    counts = guard.statistics().counts
    assert (counts.accepted, dict(counts.rejected)) == (2, {"OVERLOADED": 1})


@virtual_time
async def test_work_that_was_answered_already_is_cancelled_in_the_end() -> None:
    guard = new_guard(shutdown_grace=3)
    async with guard:
        held = await hold(guard, "x", Policy(timeout=1))
        assert (await held.refusal()).code == "EXECUTION_TIMEOUT"
    assert (held.was_cancelled, held.ended, now()) == (True, 4, 4)
    counts = guard.statistics().counts
    assert (counts.timed_out, counts.cancelled) == (1, 0)


@pytest.mark.parametrize(
    "policy",
    [Policy(concurrency=1), Policy(concurrency=1, on_cancel="cancel"), Policy(concurrency=1, timeout=1)],
    ids=["own", "inline", "timed"],
)
@virtual_time
async def test_work_that_ignores_its_cancellation_is_named_and_keeps_its_places_while_its_loop_runs(
    policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    guard = new_guard(shutdown_grace=3)
    async with guard:
        held = await hold(guard, "sticky", policy, stubborn=True)
    assert held.runs
    assert now() == 3.3
    [warning] = warnings_in(caplog)
    assert '"sticky"' in warning
    assert "cancel" in warning
    async with guard:
        assert await code_of(once(guard, "sticky", policy)) == "CONCURRENCY_LIMIT"
        adds_up(guard)
        held.let_go()
        await asyncio.wait([held.task])
        await settle()
        assert await code_of(once(guard, "sticky", policy)) == "ok"


@virtual_time
async def test_who_comes_and_goes_in_between_ends_nothing() -> None:
    guard = new_guard(shutdown_grace=0)
    async with guard:
        held = await hold(guard)
        async with guard:
            await once(guard)
        await settle()
        assert held.runs
        await held.end()


@pytest.mark.parametrize("comes_after", [1, 3.25])
@virtual_time
async def test_who_comes_while_it_closes_calls_that_off(comes_after: float) -> None:
    guard = new_guard(shutdown_grace=3)
    await guard.__aenter__()
    held = await hold(guard, "x", MUTEX, stubborn=True)
    closing = asyncio.create_task(guard.__aexit__(None, None, None))
    await asyncio.sleep(comes_after)
    assert await code_of(once(guard)) == "OVERLOADED"
    async with guard:
        assert await code_of(once(guard)) == "ok"
        await asyncio.sleep(10)
        await closing
        # What runs goes on, and keeps its slot.
        assert held.runs
        assert held.was_cancelled == (comes_after > 3)
        assert (
            await code_of(once(guard, "x", Policy(concurrency=Concurrency(1, key="x"))))
            == "CONCURRENCY_LIMIT"
        )
        held.let_go()
        await settle()
        assert await code_of(once(guard, "x", MUTEX)) == "ok"


@virtual_time
async def test_after_its_end_it_can_be_used_again_on_the_same_loop() -> None:
    guard = new_guard(shutdown_grace=1)
    for _ in range(3):
        async with guard:
            held = await hold(guard, "x", MUTEX)
            assert held.runs
        await held.refusal()
    assert await code_of(once(guard, "x", MUTEX)) == "ok"


@virtual_time
async def test_an_exception_in_the_block_ends_it_alike() -> None:
    guard = new_guard(shutdown_grace=1)
    held: list[Held] = []

    async def use() -> None:
        async with guard:
            held.append(await hold(guard))
            raise LookupError

    with pytest.raises(LookupError):
        await use()
    assert (await held[0].refusal()).code == "OVERLOADED"


@virtual_time
async def test_a_guard_that_nobody_has_used_ends_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    async with new_guard():
        pass
    assert warnings_in(caplog) == []


# ------------------------------------------------------------------------------- one loop after another

Main = Callable[[], Coroutine[Any, Any, None]]


def on_loops(*mains: Main) -> None:
    """Run each on a loop of its own."""
    for main in mains:
        run_virtual(main)


@pytest.mark.parametrize("is_entered", [True, False])
def test_rate_counts_live_on_and_everything_else_begins_anew(is_entered: bool) -> None:
    guard = Guard(Throttle(admission=Admission(max_active=2, reserved=1)), clock=FakeClock())
    policy = Policy("4/hour", Concurrency(1, queue_timeout=5))

    async def main() -> None:
        async def use() -> None:
            running, waiting = await hold(guard, "x", policy), await hold(guard, "x", policy)
            assert (running.runs, waiting.waits) == (True, True)

        if is_entered:
            async with guard:
                await use()
        else:
            # Both are cancelled with the loop.
            await use()

    async def count() -> None:
        codes = [await code_of(once(guard, "x", policy)) for _ in range(3)]
        assert codes == ["ok", "ok", "RATE_LIMIT_EXCEEDED"]

    on_loops(main, main, count)


def test_a_loop_that_is_thrown_away_takes_its_work_with_it(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(clock=FakeClock())
    kept: list[asyncio.Task[None]] = []

    async def forever() -> None:
        await asyncio.Event().wait()

    async def start() -> None:
        for _ in range(2):
            kept.append(asyncio.create_task(guard.run(Call("lost"), MUTEX, forever)))
            await settle()

    # Nobody cancels the tasks of this one.
    loop = asyncio.new_event_loop()
    loop.run_until_complete(start())
    loop.close()
    assert (guard.statistics().active, guard.statistics().waiting) == (1, 1)

    async def again() -> None:
        assert await code_of(once(guard, "lost", MUTEX)) == "ok"

    asyncio.run(again())
    is_clean(guard)
    assert any('"lost"' in warning for warning in warnings_in(caplog))
    # asyncio has its own word about tasks that are thrown away while they wait; the guard has none.
    caplog.clear()
    kept.clear()
    del loop
    gc.collect()
    assert {record.name for record in caplog.records} <= {"asyncio"}


def test_work_that_ignores_the_end_of_its_loop_holds_nothing_on_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = Guard(clock=FakeClock(), shutdown_grace=0)
    kept: list[Held] = []

    async def stick() -> None:
        async with guard:
            kept.append(await hold(guard, "sticky", MUTEX, stubborn=True))
        kept[0].let_go()
        await asyncio.wait([kept[0].task])

    async def again() -> None:
        async with guard:
            assert await code_of(once(guard, "sticky", MUTEX)) == "ok"

    on_loops(stick, again)
    assert kept[0].task.exception() is not None
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("is_entered", [True, False])
def test_a_hung_thread_is_named_and_the_next_loop_has_all_threads(
    is_entered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    guard = Guard(clock=FakeClock(), worker_threads=1, shutdown_grace=0)
    plan = guard.bind("hung", Policy(concurrency=1), threads=True)
    may_end = threading.Event()
    threads: list[threading.Thread] = []

    def work() -> None:
        threads.append(threading.current_thread())
        may_end.wait()

    async def hang() -> None:
        async def use() -> None:
            task = asyncio.create_task(guard.call(plan, Call("hung"), lambda run: guard.in_thread(run, work)))
            await asyncio.sleep(1)
            assert threads
            if is_entered:
                task.add_done_callback(lambda task: task.exception())

        if is_entered:
            async with guard:
                await use()
        else:
            await use()

    async def short() -> None:
        async def body(run: Run) -> int:
            return await guard.in_thread(run, threading.get_ident)

        assert await guard.call(plan, Call("hung"), body) != threading.get_ident()

    try:
        on_loops(hang, short)
        warnings = warnings_in(caplog)
        # Once for whoever leaves, once for the loop that takes over.
        assert len(warnings) == 1 + is_entered
        for warning in warnings:
            assert '"hung"' in warning
            assert "thread hangs" in warning
    finally:
        may_end.set()
        threads[0].join()
    # Its end, on a loop that is gone, harms nobody.
    on_loops(short)


def test_two_running_loops_at_once_are_refused() -> None:
    guard = Guard()
    errors: list[BaseException] = []

    async def elsewhere() -> None:
        await once(guard)

    def other_thread() -> None:
        try:
            asyncio.run(elsewhere())
        except RuntimeError as error:
            errors.append(error)

    async def main() -> None:
        async with guard:
            await asyncio.to_thread(other_thread)
            # Here it goes on.
            await once(guard)

    asyncio.run(main())
    [error] = errors
    assert "another event loop that is still running" in str(error)
    assert guard.statistics().counts.submitted == 1
    # And when the first has ended, the other may.
    asyncio.run(elsewhere())
