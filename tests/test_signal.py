# ruff: noqa: PT012 - what raises here is an `async with` block, with what happens in it
from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import queue
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest

from frontmcp_py.errors import Cancelled
from frontmcp_py.signal import AbortSignal

TRIES = 10_000


class Stop(Exception):
    """A reason of the tests' own."""


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


@pytest.fixture
def fast_thread_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@contextmanager
def aborting_thread(seed: int = 1) -> Iterator[Callable[[AbortSignal], None]]:
    """A thread that aborts each signal it is given, a random moment later."""
    todo: queue.SimpleQueue[AbortSignal | None] = queue.SimpleQueue()
    chance = random.Random(seed)

    def work() -> None:
        while (signal := todo.get()) is not None:
            dawdle(chance)
            signal.abort(Stop())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield todo.put
    finally:
        todo.put(None)
        thread.join()


def dawdle(chance: random.Random) -> None:
    for _ in range(chance.randrange(300)):
        pass


def in_thread(function: Callable[[], object]) -> None:
    """Run a function in another thread and wait for it, blocking this one."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def at_once(*functions: Callable[[], object]) -> None:
    """Have functions called one after another in one turn of the loop, when everybody has gone to sleep."""
    loop = asyncio.get_running_loop()

    def call(turns: int) -> None:
        if turns:
            loop.call_soon(call, turns - 1)
            return
        for function in functions:
            function()

    loop.call_soon(call, 20)


async def some_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def outcome_of(task: asyncio.Task[Any]) -> object:
    await asyncio.wait([task], timeout=10)
    assert task.done(), "the task hangs"
    return "cancelled" if task.cancelled() else task.exception() or task.result()


# ------------------------------------------------------------------------------------ state and reason


def test_a_new_signal_is_not_aborted() -> None:
    signal = AbortSignal()
    signal.throw_if_aborted()
    assert (signal.aborted, signal.reason, repr(signal)) == (False, None, "<AbortSignal>")


def test_abort_keeps_the_reason_and_throw_raises_that_very_object() -> None:
    signal, reason = AbortSignal(), Stop("enough")
    signal.abort(reason)
    assert signal.aborted
    assert signal.reason is reason
    with pytest.raises(Stop) as raised:
        signal.throw_if_aborted()
    assert raised.value is reason
    assert "enough" in repr(signal)


def test_abort_without_a_reason_says_that_the_call_was_cancelled() -> None:
    signal = AbortSignal()
    signal.abort()
    assert isinstance(signal.reason, Cancelled)


@pytest.mark.parametrize("reason", ["enough", Stop, KeyboardInterrupt(), 7])
def test_a_reason_has_to_be_an_exception_object(reason: Any) -> None:
    signal = AbortSignal()
    with pytest.raises(TypeError, match="Exception object"):
        signal.abort(reason)
    assert not signal.aborted


def test_the_first_abort_counts() -> None:
    signal, first = AbortSignal(), Stop()
    signal.abort(first)
    signal.abort(Stop())
    signal.abort()
    assert signal.reason is first


def test_asking_again_and_again_does_not_grow_the_reason() -> None:
    signal = AbortSignal()

    def caught(reason: Exception) -> Exception:
        try:
            raise reason
        except Stop as error:
            return error

    cause, reason = Stop("cause"), Stop("reason")
    reason.__cause__ = cause
    signal.abort(caught(reason))
    lengths: set[int] = set()
    for _ in range(3):
        with pytest.raises(Stop) as raised:
            try:
                raise LookupError
            except LookupError:
                signal.throw_if_aborted()
        lengths.add(len(raised.traceback))
        assert raised.traceback[-1].name == "caught", "the traceback it came with is kept"
        assert (reason.__cause__, reason.__context__) == (cause, None)
    assert len(lengths) == 1


def test_of_threads_that_abort_at_once_one_wins_and_all_agree(fast_thread_switches: None) -> None:
    threads = 4
    barrier = threading.Barrier(threads)
    signals = [AbortSignal() for _ in range(300)]
    seen: list[list[Exception | None]] = [[] for _ in range(threads)]

    def work(index: int) -> None:
        for signal in signals:
            barrier.wait()
            signal.abort(Stop())
            seen[index].append(signal.reason)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert seen == [[signal.reason for signal in signals]] * threads
    assert None not in seen[0]


def test_a_signal_dies_with_its_last_user() -> None:
    gc.disable()
    try:
        signal = AbortSignal()
        signal.abort(Stop())
        gone = weakref.ref(signal)
        del signal
        assert gone() is None
    finally:
        gc.enable()


# --------------------------------------------------------------------------------------------- waiting


async def test_wait_returns_the_reason() -> None:
    signal, reason = AbortSignal(), Stop()
    at_once(lambda: signal.abort(reason))
    assert await signal.wait() is reason
    assert await signal.wait() is reason


async def test_an_abort_from_a_thread_wakes_all_who_wait() -> None:
    signal, reason = AbortSignal(), Stop()
    waiting = [asyncio.create_task(signal.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    in_thread(lambda: signal.abort(reason))
    assert await asyncio.gather(*waiting) == [reason] * 3


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    signal = AbortSignal()
    waiting = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    assert signal._listeners
    waiting.cancel()
    assert await outcome_of(waiting) == "cancelled"
    assert not signal._listeners
    with anyio.move_on_after(0.001):
        await signal.wait()
    assert not signal._listeners


async def test_a_wait_that_is_cancelled_as_the_signal_aborts_stays_cancelled() -> None:
    signal = AbortSignal()
    waiting = asyncio.create_task(signal.wait())
    at_once(signal.abort, waiting.cancel)
    assert await outcome_of(waiting) == "cancelled"


async def test_no_wait_sleeps_through_an_abort_from_a_thread(fast_thread_switches: None) -> None:
    """The abort lands between the question "am I cancelled?" and going to sleep (e2b-dev/infra#3629)."""
    chance = random.Random(2)
    with aborting_thread() as abort, anyio.fail_after(30):
        for _ in range(TRIES):
            signal = AbortSignal()
            abort(signal)
            dawdle(chance)
            assert await signal.wait() is signal.reason
            assert not signal._listeners


def test_no_wait_sync_sleeps_through_an_abort_from_a_thread(fast_thread_switches: None) -> None:
    chance = random.Random(3)
    with aborting_thread() as abort:
        for _ in range(TRIES):
            signal = AbortSignal()
            abort(signal)
            dawdle(chance)
            assert signal.wait_sync(30)
            assert not signal._listeners


def test_wait_sync_gives_up_after_its_timeout_and_leaves_nothing_behind() -> None:
    signal = AbortSignal()
    assert not signal.wait_sync(0.001)
    assert not signal.wait_sync(0)
    assert not signal._listeners
    signal.abort()
    assert signal.wait_sync(0)
    assert signal.wait_sync()


async def test_an_abort_on_the_loop_wakes_threads_that_wait() -> None:
    signal = AbortSignal()
    at_once(signal.abort)
    assert await anyio.to_thread.run_sync(signal.wait_sync)


async def test_wait_sync_refuses_to_block_the_event_loop() -> None:
    signal = AbortSignal()
    with pytest.raises(RuntimeError, match=r"await signal\.wait\(\)"):
        signal.wait_sync(0.001)
    signal.abort()
    assert signal.wait_sync()


# ------------------------------------------------------------------------------------------- callbacks


async def test_an_abort_on_the_loop_runs_the_callbacks_in_order_before_it_returns() -> None:
    signal, ran = AbortSignal(), list[int]()
    for number in range(5):
        signal.add_callback(lambda number=number: ran.append(number))  # type: ignore[misc]
    signal.abort()
    assert ran == [0, 1, 2, 3, 4]
    signal.abort()
    await asyncio.sleep(0)
    assert ran == [0, 1, 2, 3, 4]


async def test_after_an_abort_from_a_thread_the_callbacks_run_on_the_loop() -> None:
    signal, ran = AbortSignal(), list[tuple[str, threading.Thread]]()
    signal.add_callback(lambda: ran.append(("loop", threading.current_thread())))
    in_thread(lambda: signal.add_callback(lambda: ran.append(("thread", threading.current_thread()))))
    in_thread(signal.abort)
    assert not ran
    await some_turns()
    assert ran == [("loop", threading.current_thread()), ("thread", threading.current_thread())]


async def test_a_callback_added_after_the_abort_runs_once_and_soon() -> None:
    signal, ran = AbortSignal(), list[str]()
    signal.abort()
    signal.add_callback(lambda: ran.append("from the loop"))
    in_thread(lambda: signal.add_callback(lambda: ran.append("from a thread")))
    assert not ran
    await some_turns()
    assert ran == ["from the loop", "from a thread"]


async def test_a_callback_added_by_a_callback_runs_too() -> None:
    signal, ran = AbortSignal(), list[str]()

    def first() -> None:
        ran.append("first")
        signal.add_callback(lambda: ran.append("second"))

    signal.add_callback(first)
    signal.abort()
    await some_turns()
    assert ran == ["first", "second"]


async def test_the_same_function_added_twice_runs_twice_and_is_taken_back_one_by_one() -> None:
    signal, ran = AbortSignal(), list[int]()

    def callback() -> None:
        ran.append(1)

    remove = signal.add_callback(callback)
    signal.add_callback(callback)
    remove()
    remove()
    signal.abort()
    assert ran == [1]
    remove()


async def test_a_callback_may_take_back_one_that_comes_later() -> None:
    signal, ran = AbortSignal(), list[str]()

    def first() -> None:
        remove_second()

    signal.add_callback(first)
    remove_second = signal.add_callback(lambda: ran.append("second"))
    signal.add_callback(lambda: ran.append("third"))
    signal.abort()
    assert ran == ["third"]


async def test_a_callback_taken_back_before_the_loop_gets_to_it_does_not_run() -> None:
    signal, ran = AbortSignal(), list[int]()
    remove = signal.add_callback(lambda: ran.append(1))
    in_thread(signal.abort)
    remove()
    await some_turns()
    assert not ran


@pytest.mark.parametrize("error", [LookupError("broken"), asyncio.CancelledError()])
async def test_a_callback_that_raises_is_logged_and_the_rest_run(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    signal, ran = AbortSignal(), list[int]()

    def broken() -> None:
        raise error

    signal.add_callback(broken)
    signal.add_callback(lambda: ran.append(1))
    with caplog.at_level(logging.ERROR):
        signal.abort()
    assert ran == [1]
    [record] = caplog.records
    assert record.name == "frontmcp_py.signal"
    assert record.exc_info
    assert record.exc_info[1] is error


async def test_a_callback_sees_the_context_variables_of_who_added_it() -> None:
    variable = contextvars.ContextVar[str]("variable")
    signal, seen = AbortSignal(), list[str]()
    variable.set("who added")
    signal.add_callback(lambda: seen.append(variable.get()))
    variable.set("who aborted")
    signal.abort()
    assert seen == ["who added"]


@pytest.mark.parametrize("callback", [None, 7, asyncio.sleep])
def test_a_callback_has_to_be_a_plain_function(callback: Any) -> None:
    with pytest.raises(TypeError, match="not async"):
        AbortSignal().add_callback(callback)


async def test_a_callback_added_as_a_thread_aborts_runs_exactly_once(fast_thread_switches: None) -> None:
    chance = random.Random(4)
    with aborting_thread() as abort, anyio.fail_after(30):
        for _ in range(TRIES // 4):
            signal, ran = AbortSignal(), asyncio.Queue[int]()
            abort(signal)
            dawdle(chance)
            signal.add_callback(partial(ran.put_nowait, 1))
            await ran.get()
            await asyncio.sleep(0)
            assert ran.empty()


# ----------------------------------------------------------------------------------------------- loops


def test_a_signal_made_without_a_loop_belongs_to_the_first_it_is_used_on() -> None:
    signal, ran = AbortSignal(), list[threading.Thread]()
    signal.add_callback(lambda: ran.append(threading.current_thread()))
    in_thread(signal.abort)
    assert not ran

    async def use() -> None:
        signal.add_callback(lambda: None)
        await some_turns()

    asyncio.run(use())
    assert ran == [threading.current_thread()]


def test_a_signal_whose_loop_is_closed_moves_to_the_next() -> None:
    async def make() -> AbortSignal:
        return AbortSignal()

    async def use() -> None:
        at_once(lambda: in_thread(signal.abort))
        assert await signal.wait() is signal.reason

    signal = asyncio.run(make())
    asyncio.run(use())


def test_a_thread_may_abort_when_the_loop_is_closed() -> None:
    async def make() -> AbortSignal:
        signal = AbortSignal()
        signal.add_callback(lambda: None)
        return signal

    signal = asyncio.run(make())
    in_thread(signal.abort)
    assert signal.aborted


def test_a_loop_may_be_named() -> None:
    async def use() -> None:
        signal, ran = AbortSignal(asyncio.get_running_loop()), list[threading.Thread]()
        in_thread(lambda: signal.add_callback(lambda: ran.append(threading.current_thread())))
        in_thread(signal.abort)
        await some_turns()
        assert ran == [threading.current_thread()]

    asyncio.run(use())


async def test_a_second_loop_in_another_thread_can_wait_too() -> None:
    signal, reason = AbortSignal(), Stop()
    outcomes: list[object] = []
    ready = threading.Barrier(2)

    async def elsewhere() -> None:
        waiting = asyncio.create_task(signal.wait())
        await asyncio.sleep(0)
        ready.wait()
        try:
            async with signal.scope():
                await asyncio.sleep(10)
        except Stop as error:
            outcomes.extend([error, await waiting])

    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, lambda: asyncio.run(elsewhere()))
        await anyio.to_thread.run_sync(ready.wait)
        signal.abort(reason)
    assert outcomes == [reason, reason]


# ----------------------------------------------------------------------------------------------- scope


async def test_scope_cancels_what_is_inside_and_raises_the_reason() -> None:
    signal, reason = AbortSignal(), Stop()
    at_once(lambda: signal.abort(reason))
    inside: list[BaseException] = []
    with pytest.raises(Stop) as raised:
        async with signal.scope():
            try:
                await asyncio.sleep(10)
            except BaseException as error:
                inside.append(error)
                raise
    assert raised.value is reason
    assert reason.__context__ is None
    assert [type(error) for error in inside] == [asyncio.CancelledError]
    await assert_undisturbed()


async def test_scope_hears_a_thread() -> None:
    signal = AbortSignal()
    at_once(lambda: in_thread(signal.abort))
    with pytest.raises(Cancelled):
        async with signal.scope():
            await asyncio.sleep(10)
    await assert_undisturbed()


async def test_scope_of_an_aborted_signal_is_not_entered() -> None:
    signal, reason = AbortSignal(), Stop()
    signal.abort(reason)
    entered = False
    with pytest.raises(Stop) as raised:
        async with signal.scope():
            entered = True
    assert raised.value is reason
    assert not entered
    await assert_undisturbed()


async def test_what_finishes_inside_a_scope_is_not_disturbed_later() -> None:
    signal = AbortSignal()
    async with signal.scope():
        await asyncio.sleep(0)
    assert not signal._listeners
    signal.abort()
    await assert_undisturbed()


async def test_a_block_that_ends_without_another_await_is_not_disturbed() -> None:
    signal = AbortSignal()
    async with signal.scope():
        signal.abort()
    await assert_undisturbed()


async def test_a_block_that_aborts_its_own_signal_is_cancelled_at_the_next_await() -> None:
    signal = AbortSignal()
    with pytest.raises(Cancelled):
        async with signal.scope():
            signal.abort()
            await asyncio.sleep(0)
    await assert_undisturbed()


async def test_what_swallows_the_cancellation_is_cancelled_again() -> None:
    """A body catches the cancellation and works on (python/cpython#111379)."""
    signal = AbortSignal()
    at_once(signal.abort)
    with pytest.raises(Cancelled):
        async with signal.scope():
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                pass
            await asyncio.sleep(10)
    await assert_undisturbed()


async def test_a_shielded_clean_up_comes_to_its_end() -> None:
    signal, cleaned = AbortSignal(), False
    at_once(signal.abort)
    with pytest.raises(Cancelled):
        async with signal.scope():
            try:
                await asyncio.sleep(10)
            finally:
                with anyio.CancelScope(shield=True):
                    await some_turns()
                    cleaned = True
    assert cleaned
    await assert_undisturbed()


async def test_a_worker_thread_inside_is_waited_for() -> None:
    signal, done = AbortSignal(), threading.Event()

    def work() -> None:
        signal.wait_sync()
        done.set()

    at_once(signal.abort)
    async with signal.scope():
        await anyio.to_thread.run_sync(work)
        assert done.is_set()
    await assert_undisturbed()


@pytest.mark.parametrize("error", [LookupError(), TimeoutError(), asyncio.CancelledError()])
async def test_what_the_inside_raises_by_itself_comes_out_as_it_is(error: BaseException) -> None:
    """A body's own `TimeoutError` is not the guard's (tao12345666333/ankaloop#47)."""
    with pytest.raises(type(error)) as raised:
        async with AbortSignal().scope():
            raise error
    assert raised.value is error
    await assert_undisturbed()


async def test_an_error_of_the_clean_up_comes_out_instead_of_the_reason() -> None:
    signal = AbortSignal()
    at_once(signal.abort)
    with pytest.raises(LookupError):
        async with signal.scope():
            try:
                await asyncio.sleep(10)
            finally:
                raise LookupError
    await assert_undisturbed()


@pytest.mark.parametrize("group", ["asyncio", "anyio"])
async def test_the_children_of_a_task_group_are_cancelled_before_the_reason_comes_out(group: str) -> None:
    signal, cancelled = AbortSignal(), 0

    async def child() -> None:
        nonlocal cancelled
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            cancelled += 1
            raise

    at_once(signal.abort)
    with pytest.raises(Cancelled):
        async with signal.scope():
            if group == "asyncio":
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(3):
                        tasks.create_task(child())
            else:
                async with anyio.create_task_group() as any_tasks:
                    for _ in range(3):
                        any_tasks.start_soon(child)
    assert cancelled == 3
    await assert_undisturbed()


async def test_a_scope_entered_outside_of_a_task_says_so() -> None:
    entered = asyncio.get_running_loop().create_future()

    def call() -> None:
        try:
            AbortSignal().scope().__aenter__().__await__().send(None)
        except BaseException as error:
            entered.set_result(error)

    asyncio.get_running_loop().call_soon(call)
    assert isinstance(await entered, RuntimeError)


# ----------------------------------------------------------------------- scope: cancelled from outside


@pytest.mark.parametrize("abort_first", [True, False])
async def test_a_task_cancel_that_meets_the_abort_stays_a_cancel(abort_first: bool) -> None:
    signal = AbortSignal()
    counts: list[int] = []

    async def work() -> None:
        try:
            async with signal.scope():
                await asyncio.sleep(10)
        finally:
            counts.append(task.cancelling())

    task = asyncio.create_task(work())
    at_once(*in_order(abort_first, signal.abort, task.cancel))
    assert await outcome_of(task) == "cancelled"
    assert counts == [1]


@pytest.mark.parametrize("abort_first", [True, False])
async def test_a_task_cancel_and_an_abort_some_turns_apart_stay_a_cancel(abort_first: bool) -> None:
    signal = AbortSignal()

    async def work() -> None:
        async with signal.scope():
            try:
                await asyncio.sleep(10)
            finally:
                with anyio.CancelScope(shield=True):
                    second()
                    # A native cancel goes through a shield.
                    await some_turns()

    task = asyncio.create_task(work())
    first, second = in_order(abort_first, signal.abort, task.cancel)
    at_once(first)
    assert await outcome_of(task) == "cancelled"


@pytest.mark.parametrize("abort_first", [True, False])
async def test_an_outer_anyio_scope_that_is_cancelled_as_the_signal_aborts_wins(abort_first: bool) -> None:
    signal = AbortSignal()
    with anyio.CancelScope() as outer:
        at_once(*in_order(abort_first, signal.abort, outer.cancel))
        async with signal.scope():
            await asyncio.sleep(10)
    assert outer.cancelled_caught
    await assert_undisturbed()


@pytest.mark.parametrize("abort_first", [True, False])
async def test_an_outer_anyio_scope_that_is_cancelled_some_turns_apart_wins(abort_first: bool) -> None:
    signal = AbortSignal()
    with anyio.CancelScope() as outer:
        first, second = in_order(abort_first, signal.abort, outer.cancel)
        at_once(first)
        async with signal.scope():
            try:
                await asyncio.sleep(10)
            finally:
                with anyio.CancelScope(shield=True):
                    second()
                    await some_turns()
    assert outer.cancelled_caught
    await assert_undisturbed()


async def test_under_a_shield_a_cancelled_outer_scope_does_not_hide_the_reason() -> None:
    signal = AbortSignal()
    with anyio.CancelScope() as outer:
        outer.cancel()
        with anyio.CancelScope(shield=True):
            at_once(signal.abort)
            with pytest.raises(Cancelled):
                async with signal.scope():
                    await asyncio.sleep(10)
        await asyncio.sleep(10)
    assert outer.cancelled_caught
    await assert_undisturbed()


@pytest.mark.parametrize("abort_first", [True, False, None])
async def test_a_timeout_around_the_scope_stays_a_timeout(abort_first: bool | None) -> None:
    signal = AbortSignal()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10) as timeout:
            now = asyncio.get_running_loop().time()
            if abort_first is None:
                timeout.reschedule(now)
            elif abort_first:
                asyncio.get_running_loop().call_at(now - 1, signal.abort)
                timeout.reschedule(now)
            else:
                timeout.reschedule(now)
                asyncio.get_running_loop().call_soon(signal.abort)
            async with signal.scope():
                await asyncio.sleep(10)
    await assert_undisturbed()


def expire(timeout: asyncio.Timeout) -> None:
    """What its timer would do, now; the timer itself never does."""
    timeout._timeout_handler.cancel()  # type: ignore[attr-defined]
    timeout._on_timeout()  # type: ignore[attr-defined]


async def test_a_timeout_inside_that_expires_as_the_signal_aborts_leaves_no_bare_cancellation() -> None:
    """The timeout's own cancel takes the place of anyio's, and nobody but the scope can tell."""
    signal = AbortSignal()
    with pytest.raises(Cancelled):
        async with signal.scope(), asyncio.timeout(10) as timeout:
            at_once(signal.abort, partial(expire, timeout))
            await asyncio.sleep(10)
    await assert_undisturbed()


async def test_a_timeout_inside_that_expires_just_before_the_abort_is_a_timeout() -> None:
    signal = AbortSignal()
    with pytest.raises(TimeoutError):
        async with signal.scope(), asyncio.timeout(10) as timeout:
            at_once(partial(expire, timeout), signal.abort)
            await asyncio.sleep(10)
    await assert_undisturbed()


@pytest.mark.parametrize("abort_first", [True, False])
async def test_an_inner_anyio_scope_does_not_swallow_the_abort(abort_first: bool) -> None:
    signal = AbortSignal()
    with pytest.raises(Cancelled):
        async with signal.scope():
            with anyio.CancelScope() as inner:
                at_once(*in_order(abort_first, signal.abort, inner.cancel))
                await asyncio.sleep(10)
            await asyncio.sleep(10)
    await assert_undisturbed()


# --------------------------------------------------------------------------------------- scope: nested


async def test_of_nested_scopes_the_one_whose_signal_aborts_raises_its_reason() -> None:
    outer, inner = AbortSignal(), AbortSignal()
    reason = Stop()
    at_once(lambda: inner.abort(reason))
    async with outer.scope():
        with pytest.raises(Stop) as raised:
            async with inner.scope():
                await asyncio.sleep(10)
        assert raised.value is reason
        await assert_undisturbed()
    at_once(lambda: outer.abort(reason))
    between: list[BaseException] = []
    with pytest.raises(Stop) as raised:
        async with outer.scope():
            try:
                async with AbortSignal().scope():
                    await asyncio.sleep(10)
            except BaseException as error:
                between.append(error)
                raise
    assert raised.value is reason
    assert [type(error) for error in between] == [asyncio.CancelledError]
    await assert_undisturbed()


@pytest.mark.parametrize("outer_first", [True, False])
async def test_of_nested_scopes_that_abort_at_once_the_outer_wins(outer_first: bool) -> None:
    outer, inner = AbortSignal(), AbortSignal()
    reason = Stop()
    at_once(*in_order(outer_first, lambda: outer.abort(reason), inner.abort))
    with pytest.raises(Stop) as raised:
        async with outer.scope(), inner.scope():
            await asyncio.sleep(10)
    assert raised.value is reason
    await assert_undisturbed()


async def test_scopes_of_one_signal_may_be_nested() -> None:
    signal, reason = AbortSignal(), Stop()
    at_once(lambda: signal.abort(reason))
    with pytest.raises(Stop) as raised:
        async with signal.scope(), signal.scope():
            await asyncio.sleep(10)
    assert raised.value is reason
    await assert_undisturbed()


async def test_many_tasks_get_the_same_reason_from_one_signal() -> None:
    signal, reason = AbortSignal(), Stop()

    async def work() -> None:
        async with signal.scope():
            await asyncio.sleep(10)

    tasks = [asyncio.create_task(work()) for _ in range(20)]
    at_once(lambda: signal.abort(reason))
    assert [await outcome_of(task) for task in tasks] == [reason] * 20


# ---------------------------------------------------------------------------------------- scope: races


async def test_no_scope_sleeps_through_an_abort_from_a_thread(fast_thread_switches: None) -> None:
    chance = random.Random(5)
    task = asyncio.current_task()
    assert task
    with aborting_thread() as abort, anyio.fail_after(30):
        for _ in range(TRIES // 5):
            signal = AbortSignal()
            abort(signal)
            dawdle(chance)
            with pytest.raises(Stop) as raised:
                async with signal.scope():
                    await asyncio.sleep(30)
            assert raised.value is signal.reason
            assert task.cancelling() == 0


async def test_an_abort_as_the_block_ends_either_raises_the_reason_or_leaves_no_trace(
    fast_thread_switches: None,
) -> None:
    chance = random.Random(6)
    task = asyncio.current_task()
    assert task
    with aborting_thread() as abort, anyio.fail_after(30):
        for _ in range(TRIES // 5):
            signal, finished = AbortSignal(), False
            abort(signal)
            with suppress(Stop):
                async with signal.scope():
                    for _ in range(chance.randrange(8)):
                        await asyncio.sleep(0)
                    finished = True
            assert finished or signal.aborted
            assert task.cancelling() == 0
            # A cancellation that were still on its way would arrive here.
            await asyncio.sleep(0)
            await signal.wait()
            await asyncio.sleep(0)


def in_order(abort_first: bool, abort: Callable[[], object], other: Callable[[], object]) -> Any:
    return (abort, other) if abort_first else (other, abort)


async def assert_undisturbed() -> None:
    """No cancellation is left behind, or still on its way."""
    task = asyncio.current_task()
    assert task
    assert task.cancelling() == 0
    await some_turns()
