"""Worker threads: one more slot, which the thread itself gives back."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import anyio.to_thread
import pytest

from frontmcp_py.call import Call
from frontmcp_py.errors import GuardError
from frontmcp_py.guard import Guard, Run
from frontmcp_py.policy import Admission, Concurrency, Policy, Throttle
from frontmcp_py.signal import AbortSignal
from frontmcp_py.testing import virtual_time
from tests.guard.support import FREE, code_of, inside, is_clean, new_guard, now, refusal

CONTROL = Policy(priority="control")


class Threaded:
    """A call whose body runs in a worker thread until the test ends it."""

    made: ClassVar[list[Threaded]] = []

    def __init__(
        self,
        guard: Guard,
        tool: str = "x",
        policy: Policy = FREE,
        *,
        cancels: bool = False,
        signal: AbortSignal | None = None,
    ) -> None:
        self.came = now()
        self.thread: threading.Thread | None = None
        self._may_end = threading.Event()
        self.made.append(self)
        plan = guard.bind(tool, policy, threads=True, cancels=cancels)
        self.task = asyncio.create_task(
            guard.call(plan, Call(tool), lambda run: guard.in_thread(run, self._work), signal=signal)
        )

    @property
    def runs(self) -> bool:
        return self.thread is not None and self.thread.is_alive() and not self.task.done()

    @property
    def waits(self) -> bool:
        return self.thread is None and not self.task.done()

    def let_go(self) -> None:
        self._may_end.set()

    async def end(self) -> str:
        self.let_go()
        return await self.task

    async def refusal(self) -> GuardError:
        return await refusal(self.task)

    def _work(self) -> str:
        self.thread = threading.current_thread()
        self._may_end.wait()
        return "done"


@pytest.fixture(autouse=True)
def let_threads_go() -> Iterator[None]:
    """A test that fails must not leave threads behind that never end."""
    yield
    for each in Threaded.made:
        each.let_go()
    Threaded.made.clear()


async def rest() -> None:
    """Let threads and everybody else come as far as they can: time passes only when they have."""
    await asyncio.sleep(0.5)


async def start(guard: Guard, *which: Any, **options: Any) -> Threaded:
    threaded = Threaded(guard, *which, **options)
    await rest()
    return threaded


async def short(guard: Guard, tool: str = "x", policy: Policy = FREE) -> int:
    """A call that does nothing in a thread; which one it was."""
    plan = guard.bind(tool, policy, threads=True)
    return await guard.call(plan, Call(tool), lambda run: guard.in_thread(run, threading.get_ident))


# ------------------------------------------------------------------------------------------ as one more slot


@virtual_time
async def test_the_work_never_runs_on_the_event_loops_thread() -> None:
    guard = new_guard()
    assert await short(guard) != threading.get_ident()


@pytest.mark.parametrize(
    "throttle",
    [
        Throttle(admission=Admission(max_active=200, reserved=8, max_queued=99)),
        Throttle(admission=None),
        Throttle(enabled=False, admission=Admission(max_active=9, reserved=3)),
    ],
    ids=["admission", "no admission", "off"],
)
@virtual_time
async def test_there_are_40_for_normal_calls_and_8_more_for_control(throttle: Throttle) -> None:
    guard = new_guard(throttle)
    normal = [Threaded(guard, f"tool-{number}") for number in range(42)]
    await rest()
    assert [each.runs for each in normal] == [True] * 40 + [False] * 2
    control = [Threaded(guard, f"stop-{number}", CONTROL) for number in range(9)]
    await rest()
    assert [each.runs for each in control] == [True] * 8 + [False]
    for each in (*normal, *control):
        each.let_go()
    assert await asyncio.gather(*(each.task for each in (*normal, *control))) == ["done"] * 51


@virtual_time
async def test_their_number_and_the_reserve_can_be_chosen() -> None:
    guard = new_guard(Throttle(admission=Admission(max_active=20, reserved=2)), worker_threads=3)
    normal = [await start(guard, f"tool-{number}") for number in range(4)]
    control = [await start(guard, f"stop-{number}", CONTROL) for number in range(3)]
    assert [each.runs for each in normal] == [True, True, True, False]
    assert [each.runs for each in control] == [True, True, False]
    for each in (*normal, *control):
        each.let_go()
        await each.task


@virtual_time
async def test_a_call_that_needs_no_thread_does_not_wait_for_one() -> None:
    guard = new_guard(worker_threads=1)
    busy = await start(guard)
    plan = guard.bind("async", FREE)

    async def body(_: Run) -> str:
        return "done"

    assert await guard.call(plan, Call("async"), body) == "done"
    await busy.end()


@pytest.mark.parametrize(
    "throttle",
    [None, Throttle(admission=None), Throttle(enabled=False), Throttle(mode="observe")],
    ids=["admission", "no admission", "off", "observe"],
)
@virtual_time
async def test_a_call_that_a_thread_alone_holds_up_waits_30_seconds(throttle: Throttle | None) -> None:
    guard = new_guard(throttle, worker_threads=1)
    busy, waiting = await start(guard), await start(guard, "y", Policy(concurrency=1))
    error = await waiting.refusal()
    assert (now() - waiting.came, error.code, error.scope) == (30, "OVERLOADED", "admission")
    assert "waited 30000ms for a place" in str(error)
    assert waiting.thread is None
    await busy.end()


@virtual_time
async def test_it_waits_as_long_as_admission_says() -> None:
    guard = new_guard(Throttle(admission=Admission(queue_timeout=5)), worker_threads=1)
    busy, waiting = await start(guard), await start(guard, "y")
    assert ((await waiting.refusal()).code, now() - waiting.came) == ("OVERLOADED", 5)
    await busy.end()


@virtual_time
async def test_it_counts_in_admissions_queue() -> None:
    guard = new_guard(Throttle(admission=Admission(max_queued=1)), worker_threads=1)
    busy, waiting = await start(guard), await start(guard, "y")
    assert await code_of(short(guard, "z")) == "OVERLOADED"
    await busy.end()
    await waiting.end()


@pytest.mark.parametrize("leaves", ["cancelled", "in time", "refused at once"])
@virtual_time
async def test_while_observing_a_call_without_a_thread_gives_back_what_it_would_have_held(
    leaves: str,
) -> None:
    guard = new_guard(Throttle(mode="observe", global_concurrency=1), worker_threads=1)
    busy = await start(guard)
    waiting = await start(guard, "y", Policy(concurrency=1))
    if leaves == "cancelled":
        waiting.task.cancel()
        await asyncio.wait([waiting.task])
    elif leaves == "in time":
        await waiting.refusal()
    else:
        await guard.__aenter__()
        closing = asyncio.create_task(guard.__aexit__(None, None, None))
        assert (await waiting.refusal()).code == "OVERLOADED"
        await busy.end()
        await closing
    assert guard.statistics().places == (leaves != "refused at once")
    busy.let_go()
    await asyncio.wait([busy.task])


@virtual_time
async def test_a_slot_and_a_thread_are_taken_together_and_nobody_keeps_a_thread() -> None:
    guard = new_guard(worker_threads=2)
    mutex = Policy(concurrency=Concurrency(1, key="k", queue_timeout=9))
    first = await start(guard, "a", mutex)
    waiting = await start(guard, "b", mutex)
    # One thread is free, and the waiter does not keep it.
    other = await start(guard, "c")
    assert (first.runs, waiting.waits, other.runs) == (True, True, True)
    await first.end()
    await rest()
    assert waiting.runs
    await waiting.end()
    await other.end()


# ------------------------------------------------------------------------------- the thread gives it back


@pytest.mark.parametrize("how", ["timeout", "signal", "cancel", "cancelled body"])
@virtual_time
async def test_the_place_is_taken_until_the_thread_itself_has_ended(how: str) -> None:
    guard, signal = new_guard(worker_threads=1), AbortSignal()
    policy = Policy(timeout=1) if how == "timeout" else FREE
    held = await start(guard, "x", policy, signal=signal, cancels=how == "cancelled body")
    if how == "timeout":
        assert (await held.refusal()).code == "EXECUTION_TIMEOUT"
    elif how == "cancel":
        held.task.cancel()
        await asyncio.wait([held.task])
    else:
        signal.abort()
        assert (await held.refusal()).code == "CANCELLED"
    waiting = await start(guard, "y")
    await asyncio.sleep(10)
    assert waiting.waits
    assert guard.statistics().abandoned == 1
    held.let_go()
    await rest()
    assert waiting.runs
    await waiting.end()


@virtual_time
async def test_a_slot_that_the_call_holds_is_given_back_with_the_thread() -> None:
    guard = new_guard()
    mutex = Policy(concurrency=1, timeout=1)
    held = await start(guard, "x", mutex)
    await held.refusal()
    assert await code_of(short(guard, "x", mutex)) == "CONCURRENCY_LIMIT"
    held.let_go()
    await rest()
    assert await code_of(short(guard, "x", mutex)) == "ok"


@virtual_time
async def test_a_thread_hears_that_its_call_is_over() -> None:
    guard = new_guard()
    plan = guard.bind("x", Policy(timeout=2), threads=True)
    heard: list[Exception | None] = []

    async def body(run: Run) -> None:
        def work() -> None:
            assert run.signal.wait_sync()
            heard.append(run.signal.reason)

        await guard.in_thread(run, work)

    error = await refusal(guard.call(plan, Call("x"), body))
    await rest()
    assert heard == [error]


@pytest.mark.parametrize("turns", range(4))
@virtual_time
async def test_a_call_may_be_cancelled_in_every_turn_in_which_its_thread_begins(turns: int) -> None:
    for _ in range(5):
        guard = new_guard(worker_threads=1)
        held = Threaded(guard, "x", Policy(on_cancel="cancel"))
        for _ in range(turns):
            await asyncio.sleep(0)
        held.task.cancel()
        held.let_go()
        await asyncio.wait([held.task])
        await rest()
        is_clean(guard)
        await short(guard)


@virtual_time
async def test_work_that_no_thread_has_begun_yet_never_begins_once_its_call_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard = new_guard(worker_threads=1)
    jobs: list[Callable[[], object]] = []

    async def no_thread_yet(job: Callable[[], object], **_: object) -> None:
        # As when threads are slow to start: nobody can be made to be late at will.
        jobs.append(job)
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(anyio.to_thread, "run_sync", no_thread_yet)
        held = Threaded(guard, "x", Policy(on_cancel="cancel"))
        await rest()
        held.task.cancel()
        await asyncio.wait([held.task])
        await rest()
    is_clean(guard)
    with pytest.raises(asyncio.CancelledError):
        jobs[0]()
    assert held.thread is None
    await rest()
    is_clean(guard)


class Broken(Exception):
    """The tool's own."""


@pytest.mark.parametrize("error", [Broken("b"), TimeoutError("mine"), SystemExit(3), KeyError("k")], ids=repr)
@virtual_time
async def test_what_the_function_raises_is_what_the_caller_gets(error: BaseException) -> None:
    guard = new_guard()

    def work() -> None:
        raise error

    plan = guard.bind("x", FREE, threads=True)
    with pytest.raises(type(error)) as caught:
        await guard.call(plan, Call("x"), lambda run: guard.in_thread(run, work))
    assert caught.value is error
    assert guard.statistics().counts.failed == 1


@virtual_time
async def test_a_function_that_runs_out_of_items_is_a_failure_like_any_other() -> None:
    guard = new_guard()
    plan = guard.bind("x", FREE, threads=True)
    with pytest.raises(RuntimeError):
        await guard.call(plan, Call("x"), lambda run: guard.in_thread(run, lambda: next(iter(()))))


@virtual_time
async def test_the_function_runs_in_its_callers_context() -> None:
    guard = new_guard()
    name = contextvars.ContextVar("name", default="nobody")
    plan = guard.bind("x", FREE, threads=True)
    name.set("ann")
    assert await guard.call(plan, Call("x"), lambda run: guard.in_thread(run, name.get)) == "ann"


@virtual_time
async def test_many_short_calls_use_no_more_threads_than_there_are() -> None:
    guard = new_guard(
        Throttle(admission=Admission(max_active=500, reserved=0, max_queued=500)), worker_threads=4
    )
    running, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        with lock:
            running -= 1

    plan = guard.bind("x", FREE, threads=True)
    body: Callable[[Run], Any] = lambda run: guard.in_thread(run, work)  # noqa: E731
    await asyncio.gather(*(guard.call(plan, Call("x"), body) for _ in range(200)))
    assert most <= 4


# ----------------------------------------------------------------------------------------------- nested calls


@virtual_time
async def test_a_nested_call_needs_a_thread_of_its_own_and_waits_for_one() -> None:
    guard = new_guard(worker_threads=1)
    outer, inner = guard.bind("outer", FREE), guard.bind("inner", FREE, threads=True)
    busy = await start(guard)

    async def body(run: Run) -> Any:
        return await inside(guard, run, inner, lambda run: guard.in_thread(run, threading.get_ident))

    task = asyncio.create_task(guard.call(outer, Call("outer"), body))
    await asyncio.sleep(3)
    assert not task.done()
    await busy.end()
    assert await task != threading.get_ident()


@virtual_time
async def test_a_nested_call_does_not_wait_for_the_thread_that_its_own_parent_holds() -> None:
    guard = new_guard(worker_threads=1)
    outer, inner = guard.bind("outer", FREE, threads=True), guard.bind("inner", FREE, threads=True)

    async def body(run: Run) -> GuardError:
        return await refusal(inside(guard, run, inner, lambda run: guard.in_thread(run, threading.get_ident)))

    error = await guard.call(outer, Call("outer"), body)
    assert (now(), error.code) == (0, "CONCURRENCY_LIMIT")
    assert "it would wait for itself" in str(error)
