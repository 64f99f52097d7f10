from __future__ import annotations

import asyncio
import contextvars
import gc
import threading

import pytest

from frontmcp_py.call import Call
from frontmcp_py.errors import Cancelled, ExecutionTimeout, LeaseLost, QueueTimeout
from frontmcp_py.guard import Guard, Run
from frontmcp_py.policy import Concurrency, OnCancel, Policy, Throttle, Timeout
from frontmcp_py.signal import AbortSignal
from frontmcp_py.testing import run_virtual, settle, virtual_time
from tests.guard.support import FREE, code_of, hold, new_guard, now, once, refusal
from tests.reconcile import adds_up


class Listener:
    """A body that is given its signal and remembers what it heard."""

    def __init__(self, seconds: float = 100) -> None:
        self.seconds = seconds
        self.signal: AbortSignal | None = None
        self.aborted_at: float | None = None
        self.cancelled_at: float | None = None
        self.ended = False

    async def __call__(self, signal: AbortSignal) -> str:
        self.signal = signal
        signal.add_callback(self._heard)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled_at = now()
            raise
        finally:
            self.ended = True
        return "done"

    @property
    def reason(self) -> Exception | None:
        assert self.signal is not None
        return self.signal.reason

    def _heard(self) -> None:
        self.aborted_at = now()


# -------------------------------------------------------------------------------------------- the deadline


@pytest.mark.parametrize(
    ("timeout", "text"),
    [(0.5, "500ms"), (30, "30000ms"), ("1.5s", "1500ms"), (0.0015, "1.5ms"), (0.001, "1ms")],
)
@virtual_time
async def test_at_the_deadline_the_caller_is_answered(timeout: float | str, text: str) -> None:
    guard = new_guard()
    policy = Policy(timeout=timeout)
    held = await hold(guard, "lookup_customer", policy)
    error = await held.refusal()
    assert isinstance(error, ExecutionTimeout)
    assert str(error) == f'Execution of "lookup_customer" timed out after {text}'
    assert f"{now() * 1000:g}ms" == text
    assert (error.code, error.scope, error.meta()["limit"]) == ("EXECUTION_TIMEOUT", "tool", float(text[:-2]))
    assert error.retry_after is None
    held.let_go()
    await settle()


@virtual_time
async def test_the_signal_is_aborted_with_the_very_error_that_the_caller_gets() -> None:
    guard, body = new_guard(), Listener(seconds=3)
    error = await refusal(guard.run(Call("x"), Policy(timeout=1), body))
    assert body.reason is error
    assert body.aborted_at == 1
    await asyncio.sleep(2)
    assert body.ended


@virtual_time
async def test_a_timeout_ends_the_call_and_not_the_work() -> None:
    guard = new_guard()
    policy = Policy(concurrency=Concurrency(1, queue_timeout=50), timeout=1)
    held = await hold(guard, "x", policy)
    await held.refusal()
    statistics = guard.statistics()
    assert held.runs
    assert not held.was_cancelled
    assert (statistics.active, statistics.abandoned, statistics.running, statistics.places) == (1, 1, 0, 1)
    # A call that comes meanwhile is refused or queues, as if the work had not been answered.
    assert await code_of(once(guard, "y", Policy(concurrency=Concurrency(1, key="x")))) == "CONCURRENCY_LIMIT"
    waiting = await hold(guard, "x", policy)
    await asyncio.sleep(20)
    assert waiting.waits
    held.let_go()
    await settle()
    assert waiting.began == 21
    await waiting.end()


@virtual_time
async def test_the_clock_starts_with_the_call_and_not_in_the_queue() -> None:
    guard = new_guard()
    policy = Policy(concurrency=Concurrency(1, queue_timeout=9), timeout=2)
    running = await hold(guard, "other", Policy(concurrency=Concurrency(1, key="x")))
    waiting = await hold(guard, "x", policy)
    await asyncio.sleep(5)
    await running.end()
    await waiting.refusal()
    assert (waiting.began, now()) == (5, 7)
    waiting.let_go()
    await settle()


@virtual_time
async def test_a_call_that_ends_in_time_hears_nothing() -> None:
    guard, body = new_guard(), Listener(seconds=1)
    assert await guard.run(Call("x"), Policy(timeout=1.001), body) == "done"
    await asyncio.sleep(10)
    assert body.aborted_at is None


@virtual_time
async def test_many_deadlines_are_kept_each_at_its_time() -> None:
    guard = new_guard(Throttle(admission=None))
    ended: list[tuple[str, float]] = []

    async def call(tool: str, timeout: float) -> None:
        await refusal(guard.run(Call(tool), Policy(timeout=timeout), Listener(seconds=20)))
        ended.append((tool, now()))

    async with asyncio.TaskGroup() as group:
        for _ in range(10):
            group.create_task(call("a", 3))
            group.create_task(call("b", 2))
            await asyncio.sleep(1)
    assert ended == sorted(ended, key=lambda each: each[1])
    assert sorted(each for each in ended if each[0] == "a") == [("a", 3.0 + number) for number in range(10)]
    assert sorted(each for each in ended if each[0] == "b") == [("b", 2.0 + number) for number in range(10)]
    await asyncio.sleep(20)


@virtual_time
async def test_the_default_timeout_is_for_tools_without_their_own() -> None:
    guard = new_guard(Throttle(default_timeout=2))
    for policy, seconds in ((FREE, 2), (Policy(timeout=5), 5), (Policy(timeout=None), 10)):
        began = now()
        await code_of(guard.run(Call("x"), policy, Listener(seconds=10)))
        assert now() - began == seconds
    await asyncio.sleep(10)


# --------------------------------------------------------------------------------------------- cancel_after


@pytest.mark.parametrize("cancel_after", [0, 2, 7.5])
@virtual_time
async def test_cancel_after_cancels_the_body_so_long_after_the_deadline(cancel_after: float) -> None:
    guard, body = new_guard(), Listener()
    policy = Policy(timeout=Timeout(1, cancel_after=cancel_after), on_cancel="abort")
    error = await refusal(guard.run(Call("x"), policy, body))
    assert (now(), error.code) == (1, "EXECUTION_TIMEOUT")
    await asyncio.sleep(10)
    assert (body.aborted_at, body.cancelled_at) == (1, 1 + cancel_after)


@pytest.mark.parametrize("how", ["signal", "task"])
@virtual_time
async def test_work_whose_caller_went_before_the_deadline_is_cancelled_as_late_as_it_would_have_been(
    how: str,
) -> None:
    guard, body, signal = new_guard(), Listener(), AbortSignal()
    policy = Policy(concurrency=1, timeout=Timeout(5, cancel_after=2), on_cancel="abort")
    task = asyncio.create_task(guard.run(Call("x"), policy, body, signal))
    await asyncio.sleep(1)
    if how == "signal":
        signal.abort()
    else:
        task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(50)
    assert (body.aborted_at, body.cancelled_at) == (1, 7)
    assert isinstance(body.reason, Cancelled)
    counts = guard.statistics().counts
    assert (counts.cancelled, counts.timed_out) == (1, 0)


@virtual_time
async def test_work_that_was_cancelled_with_its_caller_is_not_cancelled_again() -> None:
    guard = new_guard()
    held = await hold(
        guard, "x", Policy(timeout=Timeout(5, cancel_after=0), on_cancel="cancel"), stubborn=True
    )
    held.task.cancel()
    await settle()
    assert held.was_cancelled
    held.was_cancelled = False
    await asyncio.sleep(50)
    assert not held.was_cancelled
    held.let_go()
    await settle()


@virtual_time
async def test_a_body_that_ends_before_is_not_cancelled() -> None:
    guard, body = new_guard(), Listener(seconds=2)
    await refusal(guard.run(Call("x"), Policy(timeout=Timeout(1, cancel_after=5)), body))
    await asyncio.sleep(10)
    assert body.cancelled_at is None
    assert body.ended


@virtual_time
async def test_a_body_that_ignores_its_cancellation_keeps_its_slot() -> None:
    guard = new_guard()
    policy = Policy(concurrency=1, timeout=Timeout(1, cancel_after=0))
    held = await hold(guard, "x", policy, stubborn=True)
    await held.refusal()
    await asyncio.sleep(1)
    assert held.was_cancelled
    assert await code_of(once(guard, "x", policy)) == "CONCURRENCY_LIMIT"
    held.let_go()
    await settle()
    assert await code_of(once(guard, "x", policy)) == "ok"


# --------------------------------------------------------------------------------- cancelled by the caller


@pytest.mark.parametrize("timeout", [None, 50])
@pytest.mark.parametrize("on_cancel", ["cancel", "abort"])
@virtual_time
async def test_a_cancelled_task_gets_its_cancellation_and_the_body_what_on_cancel_says(
    on_cancel: OnCancel, timeout: float | None
) -> None:
    guard, body = new_guard(), Listener(seconds=10)
    policy = Policy(concurrency=1, timeout=timeout, on_cancel=on_cancel)
    task = asyncio.create_task(guard.run(Call("x"), policy, body))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert now() == body.aborted_at == 1
    assert isinstance(body.reason, Cancelled)
    await settle()
    if on_cancel == "cancel":
        assert body.cancelled_at == 1
    else:
        assert not body.ended
        assert await code_of(once(guard, "x", policy)) == "CONCURRENCY_LIMIT"
        await asyncio.sleep(9)
        assert (body.cancelled_at, body.ended) == (None, True)
    assert await code_of(once(guard, "x", policy)) == "ok"
    assert guard.statistics().counts.cancelled == 1


@virtual_time
async def test_guard_run_aborts_only_unless_told_otherwise() -> None:
    guard, body = new_guard(), Listener(seconds=2)
    task = asyncio.create_task(guard.run(Call("x"), FREE, body))
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(1)
    assert (body.aborted_at, body.cancelled_at, body.ended) == (1, None, True)


@virtual_time
async def test_only_a_body_that_nothing_but_its_caller_could_end_runs_in_its_callers_task() -> None:
    guard = new_guard()

    async def body() -> object:
        return asyncio.current_task()

    async def listening(signal: AbortSignal) -> object:
        return asyncio.current_task()

    mine, cancels = asyncio.current_task(), Policy(on_cancel="cancel")
    assert await guard.run(Call("x"), cancels, body) is mine
    for policy in (FREE, Policy(timeout=5, on_cancel="cancel")):
        assert await guard.run(Call("x"), policy, body) is not mine
    assert await guard.run(Call("x"), cancels, listening) is not mine
    assert await guard.run(Call("x"), cancels, body, AbortSignal()) is not mine


@virtual_time
async def test_a_body_in_its_callers_task_is_cancelled_with_it() -> None:
    guard = new_guard()
    held = await hold(guard, "x", Policy(concurrency=1, on_cancel="cancel"))
    held.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held.task
    assert held.was_cancelled
    assert guard.statistics().counts.cancelled == 1


@virtual_time
async def test_a_body_in_its_callers_task_may_ignore_that_and_keeps_its_slot() -> None:
    guard = new_guard()
    policy = Policy(concurrency=1, on_cancel="cancel")
    held = await hold(guard, "x", policy, stubborn=True)
    held.task.cancel()
    await settle()
    assert held.runs
    assert await code_of(once(guard, "x", policy)) == "CONCURRENCY_LIMIT"
    assert await held.end() == "done"
    assert guard.statistics().counts.completed == 1


# ------------------------------------------------------------------------------- cancelled through a signal


@pytest.mark.parametrize("on_cancel", ["cancel", "abort"])
@virtual_time
async def test_a_signal_cancels_the_call_and_the_body_hears_what_on_cancel_says(on_cancel: OnCancel) -> None:
    guard, body, signal = new_guard(), Listener(seconds=10), AbortSignal()
    task = asyncio.create_task(guard.run(Call("x"), Policy(on_cancel=on_cancel), body, signal))
    await asyncio.sleep(1)
    signal.abort(LeaseLost("x"))
    error = await refusal(task)
    assert (str(error), error.code) == ('Call to "x" was cancelled', "CANCELLED")
    assert body.reason is error
    assert body.aborted_at == now() == 1
    await asyncio.sleep(10)
    assert body.cancelled_at == (1 if on_cancel == "cancel" else None)
    assert body.ended


@virtual_time
async def test_a_call_whose_signal_is_aborted_already_never_starts() -> None:
    guard, signal = new_guard(), AbortSignal()
    signal.abort()
    held = await hold(guard, "x", Policy("1/hour", 1), signal=signal)
    assert (await held.refusal()).code == "CANCELLED"
    assert held.began is None
    assert await code_of(once(guard, "x", Policy("1/hour", 1))) == "ok"


@virtual_time
async def test_a_signal_may_be_aborted_in_another_thread() -> None:
    guard, signal = new_guard(), AbortSignal()
    mutex = Policy(concurrency=Concurrency(1, queue_timeout=9))
    running, waiting = (
        await hold(guard, "x", mutex, signal=signal),
        await hold(guard, "x", mutex, signal=signal),
    )
    thread = threading.Thread(target=signal.abort)
    thread.start()
    assert (await running.refusal()).code == (await waiting.refusal()).code == "CANCELLED"
    assert (now(), waiting.began) == (0, None)
    thread.join()
    running.let_go()
    await settle()


@virtual_time
async def test_a_signal_that_is_aborted_later_is_of_no_interest_any_more() -> None:
    guard, signal = new_guard(), AbortSignal()
    held = await hold(guard, "x", signal=signal)
    assert await held.end() == "done"
    signal.abort()
    await settle()
    assert guard.statistics().counts.cancelled == 0
    assert not signal._listeners


# --------------------------------------------------------------------------------- the tool's own failures


class Broken(Exception):
    """The tool's own."""


@pytest.mark.parametrize(
    "policy", [FREE, Policy(timeout=9), Policy(on_cancel="cancel")], ids=["own", "timed", "inline"]
)
@pytest.mark.parametrize(
    "error", [Broken("b"), TimeoutError("mine"), QueueTimeout("other", 5, 1), SystemExit(3)]
)
@virtual_time
async def test_what_the_tool_raises_is_what_the_caller_gets(policy: Policy, error: BaseException) -> None:
    guard = new_guard()

    async def body() -> None:
        await asyncio.sleep(1)
        raise error

    with pytest.raises(type(error)) as caught:
        await guard.run(Call("x"), policy, body)
    assert caught.value is error
    counts = guard.statistics().counts
    assert (counts.failed, counts.timed_out, dict(counts.rejected)) == (1, 0, {})


@pytest.mark.parametrize(
    "policy", [FREE, Policy(timeout=9), Policy(on_cancel="cancel")], ids=["own", "timed", "inline"]
)
@virtual_time
async def test_a_cancellation_that_nobody_asked_for_is_the_tools_failure(policy: Policy) -> None:
    guard = new_guard()

    async def body() -> None:
        await asyncio.sleep(1)
        raise asyncio.CancelledError("mine")

    async def waits_for_something_cancelled() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    for function in (body, waits_for_something_cancelled):
        with pytest.raises(RuntimeError, match='"x" cancelled itself') as caught:
            await guard.run(Call("x"), policy, function)
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    counts = guard.statistics().counts
    assert (counts.failed, counts.cancelled) == (2, 0)


@virtual_time
async def test_a_tools_own_timeout_is_no_execution_timeout() -> None:
    guard = new_guard()

    async def body() -> None:
        async with asyncio.timeout(1):
            await asyncio.sleep(10)

    with pytest.raises(TimeoutError):
        await guard.run(Call("x"), Policy(timeout=5), body)
    counts = guard.statistics().counts
    assert (counts.failed, counts.timed_out) == (1, 0)


def test_an_interrupt_ends_the_loop_and_leaves_nothing_behind() -> None:
    made: list[Guard] = []

    async def body() -> None:
        await asyncio.sleep(1)
        raise KeyboardInterrupt

    async def main() -> None:
        made.append(new_guard())
        await made[0].run(Call("x"), Policy(concurrency=1, timeout=9), body)

    with pytest.raises(KeyboardInterrupt):
        run_virtual(main)
    # asyncio says that nobody has awaited the interrupted task; let it say so here.
    gc.collect()


@pytest.mark.parametrize("late", [Broken("late"), asyncio.CancelledError("late"), SystemExit(3)], ids=repr)
@virtual_time
async def test_a_failure_after_the_answer_disturbs_nobody(
    late: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    guard = new_guard()

    async def body() -> None:
        await asyncio.sleep(2)
        raise late

    await refusal(guard.run(Call("x"), Policy(concurrency=1, timeout=1), body))
    await asyncio.sleep(2)
    assert await code_of(once(guard, "x", Policy(concurrency=1))) == "ok"
    gc.collect()
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


@virtual_time
async def test_an_answer_that_nobody_waits_for_any_more_disturbs_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = new_guard()

    async def body() -> None:
        await asyncio.sleep(2)
        raise Broken

    for policy in (FREE, Policy(timeout=1), Policy(timeout=3)):
        task = asyncio.create_task(guard.run(Call("x"), policy, body))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.sleep(9)
        assert task.cancelled()
    gc.collect()
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


# ---------------------------------------------------------------------------------- what the body is given


@virtual_time
async def test_the_body_runs_in_its_callers_context() -> None:
    guard = new_guard()
    name = contextvars.ContextVar("name", default="nobody")

    async def body() -> str:
        return name.get()

    name.set("ann")
    for policy in (FREE, Policy(timeout=9), Policy(on_cancel="cancel")):
        assert await guard.run(Call("x"), policy, body) == "ann"


@virtual_time
async def test_the_signal_that_a_body_is_given_late_knows_that_it_is_aborted() -> None:
    guard = new_guard()
    plan = guard.bind("x", Policy(timeout=1))
    seen: list[Exception | None] = []

    async def body(run: Run) -> None:
        await asyncio.sleep(2)
        seen.append(run.signal.reason)

    error = await refusal(guard.call(plan, Call("x"), body))
    await asyncio.sleep(2)
    assert seen == [error]


@virtual_time
async def test_a_body_that_listens_ends_at_the_deadline_and_frees_its_slot() -> None:
    guard = new_guard()
    policy = Policy(concurrency=1, timeout=1)

    async def body(signal: AbortSignal) -> None:
        async with signal.scope():
            await asyncio.sleep(100)

    await refusal(guard.run(Call("x"), policy, body))
    await settle()
    assert now() == 1
    assert await code_of(once(guard, "x", policy)) == "ok"


# ------------------------------------------------------------------------- while a person is asked something


@virtual_time
async def test_a_question_stops_the_clock_and_keeps_the_slots() -> None:
    guard = new_guard()
    plan = guard.bind("x", Policy(concurrency=1, timeout=3))

    async def body(run: Run) -> str:
        await asyncio.sleep(2)
        guard.pause(run)
        await asyncio.sleep(1000)
        assert (
            await code_of(once(guard, "y", Policy(concurrency=Concurrency(1, key="x"))))
            == "CONCURRENCY_LIMIT"
        )
        guard.resume(run)
        await asyncio.sleep(0.75)
        return "done"

    assert await guard.call(plan, Call("x"), body) == "done"


@virtual_time
async def test_after_the_answer_of_the_person_the_clock_goes_on_where_it_stood() -> None:
    guard = new_guard()
    plan = guard.bind("x", Policy(timeout=3))

    async def body(run: Run) -> None:
        for _ in range(2):
            await asyncio.sleep(1)
            guard.pause(run)
            # Two questions at once are one pause.
            guard.pause(run)
            await asyncio.sleep(100)
            guard.resume(run)
            await asyncio.sleep(50)
            guard.resume(run)
        await asyncio.sleep(10)

    assert (await refusal(guard.call(plan, Call("x"), body))).code == "EXECUTION_TIMEOUT"
    assert now() == 303
    await asyncio.sleep(10)


@virtual_time
async def test_a_question_of_a_call_without_a_timeout_changes_nothing() -> None:
    guard = new_guard()
    plan = guard.bind("x", FREE)

    async def body(run: Run) -> str:
        guard.pause(run)
        await asyncio.sleep(100)
        guard.resume(run)
        return "done"

    assert await guard.call(plan, Call("x"), body) == "done"


@virtual_time
async def test_a_question_that_outlives_its_call_is_not_counted_against_it() -> None:
    guard, signal = new_guard(), AbortSignal()
    plan = guard.bind("x", Policy(timeout=3))

    async def body(run: Run) -> None:
        guard.pause(run)
        await asyncio.sleep(5)
        guard.resume(run)
        await asyncio.sleep(100)

    task = asyncio.create_task(guard.call(plan, Call("x"), body, signal=signal))
    await asyncio.sleep(1)
    signal.abort()
    assert (await refusal(task)).code == "CANCELLED"
    await asyncio.sleep(200)
    assert guard.statistics().counts.timed_out == 0
    adds_up(guard)
