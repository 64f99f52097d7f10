from __future__ import annotations

import asyncio
import concurrent.futures
import datetime
import math
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

from frontmcp_py.clock import Clock
from frontmcp_py.signal import AbortSignal
from frontmcp_py.testing import (
    START,
    FakeClock,
    VirtualClock,
    VirtualTimeLoop,
    run_virtual,
    settle,
    virtual_time,
)

DAY = 24 * 60 * 60


def now() -> float:
    return asyncio.get_running_loop().time()


def running_loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


def work_for_a_while() -> None:
    """What a thread does that works: it sleeps in C code, as a query to a database would."""
    time.sleep(0.002)


# ------------------------------------------------------------------------------------------ time that passes


@virtual_time
async def test_waiting_takes_no_time_and_ends_exactly_when_due() -> None:
    assert now() == 0
    await asyncio.sleep(36)
    assert now() == 36
    await anyio.sleep(0.1)
    assert now() == 36.1
    with anyio.move_on_after(30 * DAY) as scope:
        await anyio.sleep(365 * DAY)
    assert scope.cancelled_caught
    assert now() == 36.1 + 30 * DAY
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.sleep(2), 1)
    assert running_loop().time_ns() == 37_100_000_000 + 30 * DAY * 10**9


@virtual_time
async def test_those_who_queue_for_36_seconds_get_their_turn_on_the_second() -> None:
    slot = asyncio.Semaphore(1)
    turns: list[tuple[int, float]] = []

    async def call(number: int) -> None:
        async with slot:
            turns.append((number, now()))
            await asyncio.sleep(3)

    async with asyncio.TaskGroup() as group:
        for number in range(12):
            group.create_task(call(number))
    assert turns == [(number, 3 * number) for number in range(12)]
    assert now() == 36


@virtual_time
async def test_time_stands_still_as_long_as_anything_is_ready_to_run() -> None:
    asyncio.get_running_loop().call_later(1e-6, lambda: None)
    for _ in range(10_000):
        await asyncio.sleep(0)
    assert now() == 0


@virtual_time
async def test_timers_are_due_in_order_and_those_of_one_moment_in_the_order_they_were_set() -> None:
    due: list[tuple[str, float]] = []
    loop = asyncio.get_running_loop()

    def note(name: str) -> None:
        due.append((name, now()))

    for name, delay in [("b", 0.1 + 0.2), ("a", 0.1), ("b too", 0.3), ("now", 0), ("past", -1)]:
        loop.call_later(delay, note, name)
    for number in range(100):
        loop.call_later(0.5, note, str(number))
    await asyncio.sleep(1)
    assert due[:5] == [("past", 0), ("now", 0), ("a", 0.1), ("b", 0.3), ("b too", 0.3)]
    assert due[5:] == [(str(number), 0.5) for number in range(100)]


@virtual_time
async def test_a_timer_at_infinity_is_never_due() -> None:
    timer = asyncio.get_running_loop().call_later(math.inf, lambda: None)
    with anyio.move_on_after(1):
        await anyio.sleep_forever()
    assert now() == 1
    timer.cancel()
    assert timer.cancelled()


def test_loop_time_may_start_anywhere() -> None:
    async def main() -> float:
        await asyncio.sleep(0.5)
        return now()

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start=1e6)) as runner:
        assert runner.run(main()) == 1_000_000.5


# ----------------------------------------------------------------------------------------------- ways to run


def test_run_virtual_passes_arguments_and_the_result_and_closes_the_loop() -> None:
    async def main(first: int, second: str) -> tuple[int, str, asyncio.AbstractEventLoop]:
        return first, second, asyncio.get_running_loop()

    first, second, loop = run_virtual(main, 1, "two")
    assert (first, second) == (1, "two")
    assert loop.is_closed()


def test_run_virtual_lets_errors_through() -> None:
    async def main() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        run_virtual(main)


def test_anyio_run_takes_it_as_a_loop_factory() -> None:
    async def main() -> float:
        await anyio.sleep(36)
        return anyio.current_time()

    assert anyio.run(main, backend_options={"loop_factory": VirtualTimeLoop}) == 36


@pytest.fixture
def seven() -> int:
    return 7


class TestDecorated:
    @pytest.mark.parametrize("number", [1, 2])
    @virtual_time
    async def test_methods_fixtures_and_parameters_go_on_working(self, seven: int, number: int) -> None:
        """A docstring."""
        await asyncio.sleep(seven * number)
        assert now() == 7 * number

    def test_names_and_docstrings_are_kept(self) -> None:
        decorated = TestDecorated.test_methods_fixtures_and_parameters_go_on_working
        assert decorated.__name__ == "test_methods_fixtures_and_parameters_go_on_working"
        assert decorated.__doc__ == "A docstring."


# --------------------------------------------------------------------------------------- waiting for nothing


def test_tasks_that_wait_for_ever_are_named() -> None:
    async def never_set() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(5)
        await asyncio.create_task(never_set(), name="the forgotten one")

    with pytest.raises(RuntimeError, match=r"every task waits for ever, at 5\.0 s") as raised:
        run_virtual(main)
    assert "the forgotten one: " in str(raised.value)
    assert "never_set (test_testing.py:" in str(raised.value)
    assert "> Event.wait (locks.py:" in str(raised.value)


def test_of_many_tasks_that_wait_for_ever_some_are_named() -> None:
    async def main() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(30):
                group.start_soon(anyio.sleep_forever)

    with pytest.raises(RuntimeError, match="and 11 more"):
        run_virtual(main)


def test_a_thread_that_only_the_waiting_tasks_could_wake_is_no_hope() -> None:
    gate = threading.Event()

    async def main() -> None:
        # Not awaited, so that it does not keep the runner from closing.
        thread = threading.Thread(target=gate.wait)
        thread.start()
        try:
            await asyncio.Event().wait()
        finally:
            gate.set()
            thread.join()

    with pytest.raises(RuntimeError, match="waits for ever"):
        run_virtual(main)


def test_after_the_error_everything_is_closed() -> None:
    closed: list[str] = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            closed.append("main")

    with pytest.raises(RuntimeError, match="waits for ever"):
        run_virtual(main)
    assert closed == ["main"]


# --------------------------------------------------------------------------------------------------- threads


async def in_anyio_thread(function: Callable[[], object]) -> None:
    await anyio.to_thread.run_sync(function)


async def in_asyncio_thread(function: Callable[[], object]) -> None:
    await asyncio.to_thread(function)


async def in_own_executor(function: Callable[[], object]) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        await asyncio.get_running_loop().run_in_executor(executor, function)


async def in_plain_thread(function: Callable[[], object]) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        function()
        loop.call_soon_threadsafe(done.set)

    thread = threading.Thread(target=run)
    thread.start()
    await done.wait()
    thread.join()


@pytest.fixture(params=[in_anyio_thread, in_asyncio_thread, in_own_executor, in_plain_thread])
def in_thread(request: pytest.FixtureRequest) -> Any:
    return request.param


@virtual_time
async def test_time_stands_still_while_a_thread_works(in_thread: Any) -> None:
    for _ in range(3):
        with anyio.fail_after(0.001):
            await in_thread(work_for_a_while)
    assert now() == 0


@virtual_time
async def test_time_stands_still_while_work_waits_for_a_thread_of_its_executor() -> None:
    loop, order = asyncio.get_running_loop(), list[int]()
    with concurrent.futures.ThreadPoolExecutor(1) as executor, anyio.fail_after(0.001):

        def work(number: int) -> None:
            work_for_a_while()
            order.append(number)

        await asyncio.gather(*(loop.run_in_executor(executor, work, number) for number in range(3)))
    assert order == [0, 1, 2]


@virtual_time
async def test_time_stands_still_while_an_abandoned_thread_works_on() -> None:
    done = threading.Event()

    def work() -> None:
        work_for_a_while()
        done.set()

    loop = asyncio.get_running_loop()
    abandoned = loop.run_in_executor(None, work)
    await asyncio.sleep(0)
    abandoned.cancel()
    await asyncio.sleep(1)
    assert done.is_set()

    done.clear()
    with anyio.CancelScope() as scope:

        def get_abandoned() -> None:
            loop.call_soon_threadsafe(scope.cancel)
            work()

        await anyio.to_thread.run_sync(get_abandoned, abandon_on_cancel=True)
    assert scope.cancelled_caught
    await asyncio.sleep(1)
    assert done.is_set()


@virtual_time
async def test_work_that_is_cancelled_before_it_began_does_not_hold_time() -> None:
    loop, gate = asyncio.get_running_loop(), threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        first = loop.run_in_executor(executor, gate.wait)
        loop.run_in_executor(executor, gate.wait).cancel()
        await asyncio.sleep(1)
        gate.set()
        await first


@virtual_time
async def test_time_passes_while_a_thread_waits_for_somebody(in_thread: Any) -> None:
    gate = threading.Event()
    asyncio.get_running_loop().call_later(30, gate.set)
    await in_thread(gate.wait)
    assert now() == 30


@pytest.mark.parametrize("kind", ["condition", "semaphore", "queue", "future", "barrier", "signal"])
@virtual_time
async def test_time_passes_whatever_a_thread_waits_with(kind: str) -> None:
    condition, semaphore = threading.Condition(), threading.Semaphore(0)
    items: queue.Queue[int] = queue.Queue()
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    barrier, signal = threading.Barrier(2), AbortSignal()

    def wait_for_condition() -> None:
        with condition:
            condition.wait()

    def notify() -> None:
        with condition:
            condition.notify()

    waits: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "condition": (wait_for_condition, notify),
        "semaphore": (semaphore.acquire, semaphore.release),
        "queue": (items.get, lambda: items.put(1)),
        "future": (future.result, lambda: future.set_result(1)),
        "barrier": (barrier.wait, barrier.wait),
        "signal": (signal.wait_sync, signal.abort),
    }
    wait, wake = waits[kind]
    asyncio.get_running_loop().call_later(30, wake)
    await anyio.to_thread.run_sync(wait)
    assert now() == 30


@virtual_time
async def test_a_thread_may_wait_for_time_to_pass_on_the_loop() -> None:
    await anyio.to_thread.run_sync(anyio.from_thread.run, anyio.sleep, 30)
    assert now() == 30


@virtual_time
async def test_without_a_timer_a_wait_with_a_timeout_runs_out() -> None:
    assert not await anyio.to_thread.run_sync(threading.Event().wait, 0.001)
    assert now() == 0


def test_a_thread_that_works_for_too_long_is_named() -> None:
    done = threading.Event()

    async def main() -> None:
        def work() -> None:
            while not done.is_set():
                time.sleep(0.001)

        thread = threading.Thread(target=work, name="the busy one")
        thread.start()
        try:
            await asyncio.sleep(1)
        finally:
            done.set()
            thread.join()

    runner = asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(thread_patience=0.01))
    with runner, pytest.raises(RuntimeError, match="the busy one"):
        runner.run(main())


@virtual_time
async def test_a_thread_can_be_ignored() -> None:
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            time.sleep(0.001)

    thread = threading.Thread(target=serve)
    thread.start()
    running_loop().ignore_thread(thread)
    await asyncio.sleep(30)
    done.set()
    thread.join()


def test_threads_older_than_the_loop_do_not_hold_time() -> None:
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            time.sleep(0.001)

    thread = threading.Thread(target=serve)
    thread.start()
    run_virtual(asyncio.sleep, 30)
    done.set()
    thread.join()


@virtual_time
async def test_time_stands_still_while_it_is_held_in_any_thread() -> None:
    loop = running_loop()
    events: list[str] = []
    loop.call_later(1, events.append, "time passes")
    older = threading.Event()

    def hold() -> None:
        with loop.hold(), loop.hold():
            older.set()
            work_for_a_while()
            loop.call_soon_threadsafe(events.append, "released")

    thread = threading.Thread(target=hold)
    loop.ignore_thread(thread)
    thread.start()
    older.wait()
    await asyncio.sleep(2)
    assert events == ["released", "time passes"]
    thread.join()


class ThreadPerCall(concurrent.futures.Executor):
    """An executor that asyncio does not know, and whose threads the loop is told to ignore."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        thread = threading.Thread(target=lambda: future.set_result(fn(*args, **kwargs)))
        running_loop().ignore_thread(thread)
        thread.start()
        return future


@virtual_time
async def test_any_executor_holds_time() -> None:
    with anyio.fail_after(0.001):
        await asyncio.get_running_loop().run_in_executor(ThreadPerCall(), work_for_a_while)


@virtual_time
async def test_the_default_executor_may_be_replaced() -> None:
    loop, executor = asyncio.get_running_loop(), concurrent.futures.ThreadPoolExecutor(1, "mine")
    loop.set_default_executor(executor)
    with anyio.fail_after(0.001):
        name = await asyncio.to_thread(lambda: threading.current_thread().name)
    assert name.startswith("mine")
    with pytest.raises(TypeError):
        loop.set_default_executor(ThreadPerCall())


@pytest.fixture
def fast_thread_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@virtual_time
async def test_no_time_passes_between_the_moment_a_thread_is_woken_and_its_answer(
    in_thread: Any, fast_thread_switches: None
) -> None:
    """Threads hand work to each other, sleep and wake at random, while timers lie in wait."""
    chance = random.Random(7)
    loop = asyncio.get_running_loop()
    requests: queue.Queue[int | None] = queue.Queue()
    answers: queue.Queue[int] = queue.Queue()

    def echo() -> None:
        while (item := requests.get()) is not None:
            spin(chance.randrange(200))
            answers.put(item)

    echoing = threading.Thread(target=echo)
    echoing.start()
    gate, seen = threading.Event(), list[float]()

    def work() -> None:
        gate.wait()
        spin(chance.randrange(200))
        for item in range(chance.randrange(3)):
            requests.put(item)
            answers.get()
        seen.append(loop.time())

    for _ in range(200):
        gate.clear()
        opened = loop.time() + 1
        loop.call_at(opened, gate.set)
        ticks = [loop.call_at(opened + delay, lambda: None) for delay in (1e-9, 1e-3, 1)]
        await in_thread(work)
        assert seen.pop() == opened
        assert loop.time() == opened
        for tick in ticks:
            tick.cancel()
    requests.put(None)
    echoing.join()


def spin(times: int) -> None:
    for _ in range(times):
        pass


# ------------------------------------------------------------------------------------- sockets and processes


@virtual_time
async def test_sockets_work_and_are_waited_for_when_there_is_no_timer() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(echo, "127.0.0.1") as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        writer.close()
        await writer.wait_closed()
    assert now() == 0


@virtual_time
async def test_a_child_process_is_waited_for_when_there_is_no_timer() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "pass", stdin=subprocess.DEVNULL)
    assert await process.wait() == 0
    assert now() == 0


@virtual_time
async def test_time_passes_while_a_child_process_is_silent() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    with anyio.move_on_after(3600) as scope:
        await process.wait()
    assert scope.cancelled_caught
    assert now() == 3600
    await process.communicate(b"\n")


@virtual_time
async def test_held_time_lets_a_child_process_answer() -> None:
    with anyio.fail_after(1), running_loop().hold():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "print('hi')", stdout=subprocess.PIPE
        )
        assert (await process.communicate())[0].strip() == b"hi"


def test_with_patience_for_io_a_slow_answer_comes_before_time_passes() -> None:
    async def main() -> None:
        here, there = await anyio.connect_tcp("127.0.0.1", port), await asyncio.to_thread(accepted.get)

        def answer() -> None:
            work_for_a_while()
            there.send(b"x")

        thread = threading.Thread(target=answer)
        running_loop().ignore_thread(thread)
        thread.start()
        async with here:
            with anyio.fail_after(1):
                assert await here.receive() == b"x"
        thread.join()
        there.close()

    accepted: queue.Queue[socket.socket] = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        accepting = threading.Thread(target=lambda: accepted.put(listener.accept()[0]))
        accepting.start()
        with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(io_patience=10)) as runner:
            runner.run(main())
        accepting.join()


# ---------------------------------------------------------------------------------------------------- settle


@virtual_time
async def test_settle_lets_everybody_get_as_far_as_they_can_without_time_passing() -> None:
    reached: list[int] = []

    async def work(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        reached.append(turns)
        await asyncio.sleep(1)
        reached.append(-turns)

    tasks = [asyncio.create_task(work(turns)) for turns in (0, 1, 50, 500)]
    await settle()
    assert reached == [0, 1, 50, 500]
    assert now() == 0
    await asyncio.gather(*tasks)
    assert reached == [0, 1, 50, 500, 0, -1, -50, -500]


@virtual_time
async def test_settle_ends_when_somebody_never_comes_to_rest() -> None:
    handle: asyncio.Handle

    def never_rests() -> None:
        nonlocal handle
        handle = asyncio.get_running_loop().call_soon(never_rests)

    handle = asyncio.get_running_loop().call_soon(never_rests)
    await settle()
    await settle(turns=1)
    assert now() == 0
    handle.cancel()


@virtual_time
async def test_several_may_settle_at_once_and_be_cancelled() -> None:
    settling = [asyncio.create_task(settle()) for _ in range(3)]
    await asyncio.sleep(0)
    settling[0].cancel()
    await settle()
    await settle()
    assert [task.cancelled() for task in settling] == [True, False, False]
    assert all(task.done() for task in settling)


@virtual_time
async def test_settle_does_not_wait_for_threads() -> None:
    gate = threading.Event()

    def work() -> None:
        while not gate.is_set():
            time.sleep(0.001)

    task = asyncio.create_task(in_anyio_thread(work))
    await settle()
    assert not task.done()
    gate.set()
    await task


def test_settle_works_on_other_loops_too() -> None:
    async def main() -> None:
        reached: list[int] = []

        async def work() -> None:
            for _ in range(50):
                await asyncio.sleep(0)
            reached.append(1)

        task = asyncio.create_task(work())
        await settle()
        assert reached == [1]
        await task

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------- clocks


def test_a_fake_clock_stands_still_until_it_is_advanced() -> None:
    fake = FakeClock()
    clock: Clock = fake
    assert (clock.wall_ns(), clock.monotonic_ns()) == (1_767_225_600 * 10**9, 0)
    fake.advance(0.1)
    fake.advance(60)
    assert (clock.wall_ns(), clock.monotonic_ns()) == (1_767_225_660_100_000_000, 60_100_000_000)


def test_by_default_clocks_start_where_windows_begin() -> None:
    assert START.isoformat() == "2026-01-01T00:00:00+00:00"
    for window in (1, 60, 3600, DAY):
        assert FakeClock().wall_ns() % (window * 10**9) == 0


@pytest.mark.parametrize(
    ("start", "nanoseconds"),
    [
        (datetime.datetime(1970, 1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1))), 0),
        (datetime.datetime(2026, 1, 1, 0, 0, 0, 7, tzinfo=datetime.UTC), 1_767_225_600_000_007_000),
        (1_767_225_600.123, 1_767_225_600_123_000_000),
        (0, 0),
    ],
)
def test_a_clock_starts_at_a_datetime_or_at_seconds_since_the_epoch(start: Any, nanoseconds: int) -> None:
    assert FakeClock(start).wall_ns() == nanoseconds


def test_setting_a_clock_moves_the_time_of_day_alone() -> None:
    clock = FakeClock()
    clock.advance(10)
    clock.set(5)
    assert (clock.wall_ns(), clock.monotonic_ns()) == (5 * 10**9, 10 * 10**9)


def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="does not go back"):
        FakeClock().advance(-1)


def test_a_moment_needs_a_time_zone() -> None:
    with pytest.raises(ValueError, match="time zone"):
        FakeClock(datetime.datetime(2026, 1, 1))  # noqa: DTZ001


@virtual_time
async def test_a_virtual_clock_shows_the_time_of_the_loop() -> None:
    await asyncio.sleep(3)
    clock: Clock = VirtualClock()
    started = clock.monotonic_ns()
    assert clock.wall_ns() == 1_767_225_600 * 10**9
    await asyncio.sleep(0.1)
    assert clock.wall_ns() == 1_767_225_600_100_000_000
    assert clock.monotonic_ns() - started == 100_000_000


@virtual_time
async def test_setting_a_virtual_clock_moves_the_time_of_day_alone() -> None:
    clock = VirtualClock(start=100)
    await asyncio.sleep(1)
    clock.set(50)
    await asyncio.sleep(1)
    assert clock.wall_ns() == 51 * 10**9
    assert clock.monotonic_ns() == 2 * 10**9


def test_a_virtual_clock_can_be_made_before_its_loop_runs() -> None:
    loop = VirtualTimeLoop()
    clock = VirtualClock(loop)
    loop.run_until_complete(asyncio.sleep(1))
    assert clock.monotonic_ns() == 10**9
    loop.close()
    with pytest.raises(RuntimeError):
        VirtualClock()


def test_a_virtual_clock_needs_a_virtual_loop() -> None:
    async def main() -> None:
        VirtualClock()

    with pytest.raises(TypeError, match="VirtualTimeLoop"):
        asyncio.run(main())
