"""Who holds a slot? Leaks, double releases and grants beyond the limit."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import tracemalloc
from collections.abc import Awaitable, Callable

import anyio
import pytest

from frontmcp_py import (
    AbortSignal,
    Admission,
    Call,
    ExecutionTimeout,
    Guard,
    Overloaded,
    Policy,
    Throttle,
    Timeout,
)
from frontmcp_py.testing import settle
from tests.cases.desk import (
    WAYS_TO_RUN,
    Attempt,
    Desk,
    StepLoop,
    Struck,
    assert_clean,
    at,
    at_every_step,
    conc,
    now,
    other_tasks,
    until,
)

OpenDesk = Callable[..., Desk]


# ------------------------------------------------------------------------- every way out gives the slot back


@pytest.mark.parametrize("way", ["caller", "signal"])
async def test_a_cancelled_call_gives_its_slot_back(desk: Desk, way: str) -> None:
    """resilience4j/resilience4j#332: the permit came back on success and on error, but not on cancel."""
    policy = Policy(concurrency=conc(1), on_cancel="cancel")
    signal = AbortSignal()
    a = desk.call(policy=policy, seconds=60, signal=signal)
    await at(1)
    if way == "caller":
        a.cancel()
    else:
        signal.abort()
    await at(1.1)
    b = await desk.call(policy=policy)
    assert (a.outcome, a.answered) == ("cancelled" if way == "caller" else "CANCELLED", 1.0)
    assert (b.outcome, b.began) == ("ok", 1.1)


@pytest.mark.parametrize("rounds", [200, pytest.param(10_000, marks=pytest.mark.slow)])
@WAYS_TO_RUN
async def test_no_number_of_cancelled_calls_wears_the_limit_out(
    desk: Desk, policy: Policy, rounds: int
) -> None:
    """resilience4j/resilience4j#332: the limit closed for good, one cancelled call at a time."""
    rng = random.Random(1)
    for _ in range(rounds):
        signal = AbortSignal()
        attempt = desk.call(
            policy=policy, body=lambda a: listen(a, 60), signal=signal, listens=bool(rng.getrandbits(1))
        )
        await asyncio.sleep(rng.choice([0, 0, 1]))
        attempt.cancel() if rng.getrandbits(1) else signal.abort()
        await desk.everybody()
        await settle()
        assert desk.active == 0
        desk.attempts.clear()


async def listen(attempt: Attempt, seconds: float) -> None:
    """Work that stops when it is told to."""
    if attempt.signal is None:
        await asyncio.sleep(min(seconds, 2))
        return
    async with attempt.signal.scope():
        await asyncio.sleep(seconds)


@pytest.mark.parametrize("how", ["cancel_after", "signal"])
@pytest.mark.parametrize("calls", [200, pytest.param(2_000, marks=pytest.mark.slow)])
async def test_a_timed_out_call_gives_its_slot_back_before_its_caller_comes_again(
    desk: Desk, how: str, calls: int
) -> None:
    """apache/rocketmq#605: the path of a timeout forgot to release."""
    cancel_after = 0 if how == "cancel_after" else None
    policy = Policy(concurrency=conc(2), timeout=Timeout(0.05, cancel_after=cancel_after))

    async def sleep() -> None:
        await asyncio.sleep(1)

    async def sleep_until_told(signal: AbortSignal) -> None:
        async with signal.scope():
            await asyncio.sleep(1)

    work = sleep if how == "cancel_after" else sleep_until_told

    async def one_after_the_other() -> None:
        for _ in range(calls // 2):
            start = now()
            with pytest.raises(ExecutionTimeout):
                await desk.guard.run(Call("tool"), policy, work)
            assert now() == pytest.approx(start + 0.05)

    await asyncio.gather(one_after_the_other(), one_after_the_other())
    assert desk.counts.timed_out == calls
    fresh = [desk.call(policy=policy) for _ in range(2)]
    await desk.everybody()
    assert [attempt.outcome for attempt in fresh] == ["ok", "ok"]


async def test_a_timed_out_call_whose_work_goes_on_keeps_its_slot(desk: Desk) -> None:
    """apache/rocketmq#605, from the other side: what still works has not given anything back."""
    policy = Policy(concurrency=conc(1), timeout=1)
    a = desk.call(policy=policy, seconds=5)
    await at(2)
    assert (a.outcome, a.answered, desk.active) == ("EXECUTION_TIMEOUT", 1.0, 1)
    assert (await desk.call(policy=policy)).outcome == "CONCURRENCY_LIMIT"
    await at(5.1)
    assert (await desk.call(policy=policy)).outcome == "ok"


class Shock(BaseException):
    """Nothing that code is prepared for."""


@WAYS_TO_RUN
@pytest.mark.parametrize(
    "error",
    [ValueError, TimeoutError, asyncio.CancelledError, StopIteration, GeneratorExit, Shock, ExceptionGroup],
)
@pytest.mark.parametrize("when", ["before it awaits", "afterwards", "before there is a coroutine"])
async def test_whatever_a_body_raises_the_slot_is_free(
    desk: Desk, policy: Policy, error: type[BaseException], when: str
) -> None:
    """sgl-project/sglang#31907: what nobody had thought of kept the permit."""

    def fail() -> BaseException:
        return ExceptionGroup("two", [ValueError(), KeyError()]) if error is ExceptionGroup else error()

    async def body() -> None:
        if when == "afterwards":
            await asyncio.sleep(1)
        raise fail()

    def no_body() -> Awaitable[None]:
        raise fail()

    work = no_body if when == "before there is a coroutine" else body
    start = now()
    call = asyncio.create_task(desk.guard.run(Call("tool"), policy, work))
    raised = (await asyncio.gather(call, return_exceptions=True))[0]
    # A cancellation that nobody asked for is a failure like others; a caller must not take it for its own.
    assert isinstance(raised, RuntimeError if error in (asyncio.CancelledError, StopIteration) else error)
    assert now() - start <= 1
    await settle()
    assert (await desk.call(policy=policy)).outcome == "ok"
    assert desk.counts.failed == 1


# ------------------------------------------------------------------------------------------ fault injection


@WAYS_TO_RUN
@pytest.mark.parametrize("error", [asyncio.CancelledError, RuntimeError, Shock])
@pytest.mark.parametrize("early", [True, False], ids=["instead of the wait", "after the wait"])
@pytest.mark.parametrize("waits_first", [False, True], ids=["free slot", "queued"])
@pytest.mark.parametrize("signalled", [False, True], ids=["no signal", "signal"])
async def test_whichever_wait_of_a_call_fails_its_slot_is_free_afterwards(
    desk: Desk,
    policy: Policy,
    error: type[BaseException],
    early: bool,
    waits_first: bool,
    signalled: bool,
) -> None:
    """sgl-project/sglang#31907: between taking the permit and protecting it there was a wait."""

    async def work() -> str:
        for _ in range(3):
            await asyncio.sleep(0.1)
        return "done"

    for number in range(1, 20):
        holder = desk.call(policy=policy, seconds=0.5) if waits_first else None
        await settle()
        signal = AbortSignal() if signalled else None
        struck = Struck(desk.guard.run(Call("tool"), policy, work, signal), number, error(), early=early)

        async def struck_call(struck: Struck[str] = struck) -> str:
            return await struck

        result = (await asyncio.gather(asyncio.create_task(struck_call()), return_exceptions=True))[0]
        assert result == "done" or isinstance(result, error | RuntimeError), result
        if holder is not None:
            await holder
        await asyncio.sleep(0.5)
        plain = await desk.call(policy=policy)
        assert (plain.outcome, plain.began) == ("ok", now())
        if not struck.struck:
            assert result == "done"
            return
    raise AssertionError("the call has no end")


@WAYS_TO_RUN
@pytest.mark.parametrize("queued", [False, True])
def test_at_whatever_moment_everything_is_cancelled_the_slot_is_free_afterwards(
    policy: Policy, queued: bool
) -> None:
    """sgl-project/sglang#31907: a task that has not made its first step yet holds what was taken for it."""

    async def scenario(loop: StepLoop) -> None:
        desk = Desk()
        known = asyncio.all_tasks()

        def cancel_everything() -> None:
            for task in asyncio.all_tasks() - known:
                task.cancel()

        loop.strike = cancel_everything
        desk.call(policy=policy, seconds=1)
        if queued:
            desk.call(policy=policy, seconds=1)
        await asyncio.sleep(5)
        loop.strike = None
        plain = await desk.call(policy=policy)
        assert (plain.outcome, plain.began) == ("ok", 5.0)
        desk.attempts = [plain]
        assert desk.active == 0
        assert_clean(desk.guard)
        assert other_tasks() == set()

    assert at_every_step(scenario) > 5


@WAYS_TO_RUN
@pytest.mark.parametrize("timeout", [None, 1, Timeout(1, cancel_after=0), Timeout(1, cancel_after=1)])
def test_at_whatever_moment_a_running_call_is_cancelled_it_has_one_outcome(
    policy: Policy, timeout: Timeout | float | None
) -> None:
    """resilience4j/resilience4j#332, with the deadline, the result and the cancel all around one moment."""
    timed = Policy(concurrency=conc(1), timeout=timeout, on_cancel=policy.on_cancel)

    async def scenario(loop: StepLoop) -> None:
        desk, signal = Desk(), AbortSignal()
        a = desk.call(policy=timed, seconds=1, signal=signal)
        await at(0.5)
        loop.strike = signal.abort
        await a
        assert a.outcome in ("ok", "EXECUTION_TIMEOUT", "CANCELLED")
        await at(5)
        counts = desk.counts
        assert counts.completed + counts.timed_out + counts.cancelled == counts.started == 1
        assert counts.completed == (a.outcome == "ok")
        assert (await desk.call(policy=timed)).began == 5.0
        desk.assert_clean()

    assert at_every_step(scenario) > 3


# ------------------------------------------------------------------------------ nothing is given back twice


async def test_refused_calls_give_nothing_back(desk: Desk) -> None:
    """openllb/hlb#320: release ran although acquire had failed, and capacity grew beyond the limit."""
    policy = Policy(concurrency=conc(1))
    a = desk.call(policy=policy, seconds=5)
    for number in range(50):
        await at(0.1 + number * 0.078)
        assert (await desk.call(policy=policy)).outcome == "CONCURRENCY_LIMIT"
    await at(4.5)
    assert (await desk.call(policy=policy)).outcome == "CONCURRENCY_LIMIT"
    await at(5.1)
    c, d = desk.call(policy=policy, seconds=1), desk.call(policy=policy, seconds=1)
    await desk.everybody()
    assert a.outcome == "ok"
    assert sorted([c.outcome, d.outcome]) == ["CONCURRENCY_LIMIT", "ok"]
    assert desk.most_running == 1


@pytest.mark.parametrize("refusal", ["rate", "slot", "queue", "expiry", "admission", "partition"])
async def test_no_kind_of_refusal_takes_or_gives_a_place_anywhere(open_desk: OpenDesk, refusal: str) -> None:
    """openllb/hlb#320: all limits of a call, not only the one that refused."""
    desk = open_desk(Throttle(admission=Admission(max_active=4, reserved=0, max_queued=1, queue_timeout=1)))
    wide = conc(3, wait=0, key="wide")

    def failing(_: Call) -> str:
        raise LookupError

    narrow = {
        "rate": Policy("1/hour", wide),
        "slot": Policy(concurrency=[wide, conc(1)]),
        "queue": Policy(concurrency=[wide, conc(1, queue=0, wait=10)]),
        "expiry": Policy(concurrency=[wide, conc(1, wait=0.5)]),
        "admission": Policy(concurrency=wide),
        "partition": Policy(concurrency=[wide, conc(1, by=failing)]),
    }[refusal]
    others = Policy(concurrency=wide)
    if refusal == "admission":
        for _ in range(4):
            desk.call("other", Policy(), seconds=10)
        desk.call("other", Policy())
    elif refusal != "partition":
        desk.call("narrow", narrow, seconds=10)
    await settle()
    for _ in range(20):
        refused = await desk.call("narrow", narrow)
        assert (
            refused.outcome
            in {
                "rate": ["RATE_LIMIT_EXCEEDED"],
                "slot": ["CONCURRENCY_LIMIT"],
                "queue": ["CONCURRENCY_LIMIT"],
                "expiry": ["QUEUE_TIMEOUT"],
                "admission": ["OVERLOADED"],
                "partition": ["PARTITION_ERROR"],
            }[refusal]
        )
    await at(11)
    await desk.everybody()
    together = [desk.call("third", others, seconds=1) for _ in range(4)]
    await desk.everybody()
    assert [attempt.outcome for attempt in together] == ["ok", "ok", "ok", "CONCURRENCY_LIMIT"]


async def test_work_that_outlives_the_last_user_keeps_its_slot_until_it_ends(desk: Desk) -> None:
    """openllb/hlb#320: its slot is not free because nobody waits for it, and is free once it has ended."""
    guard = Guard(shutdown_grace=0)
    desk.guard = guard
    policy = Policy(concurrency=conc(1))

    async def stubborn(_: Attempt) -> None:
        while now() < 10:
            try:
                await asyncio.sleep(10 - now())
            except asyncio.CancelledError:
                continue

    async with guard:
        a = desk.call(policy=policy, body=stubborn)
        await at(1)
    assert isinstance(a.error, Overloaded)
    async with guard:
        assert (await desk.call(policy=policy)).outcome == "CONCURRENCY_LIMIT"
        await at(10.5)
        b = desk.call(policy=policy, seconds=20)
        await settle()
        assert (await desk.call(policy=policy)).outcome == "CONCURRENCY_LIMIT"
        await b
        assert b.outcome == "ok"
        desk.assert_clean()


def test_a_thread_that_outlived_its_loop_frees_nobody_elses_slot() -> None:
    """openllb/hlb#320: the thread gives its place back on a loop that is gone, or does not at all."""
    guard = Guard(shutdown_grace=0)
    plan = guard.bind("tool", Policy(concurrency=conc(1)), threads=True)
    hang = threading.Event()

    async def leave_a_thread_behind() -> None:
        async with guard:
            call = guard.call(plan, Call("tool"), lambda run: guard.in_thread(run, hang.wait))
            task = asyncio.create_task(call)
            await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await task

    async def use_again() -> None:
        async with guard:
            gate = asyncio.Event()
            holder = asyncio.create_task(guard.call(plan, Call("tool"), lambda _: gate.wait()))
            await settle(20)
            hang.set()
            await asyncio.sleep(0.05)
            assert guard.statistics().active == 1
            gate.set()
            await holder
            assert_clean(guard)

    # A loop of the ordinary kind: the other one would wait for the thread.
    asyncio.run(leave_a_thread_behind())
    asyncio.run(use_again())


# ---------------------------------------------------------------------------------- a limit that changes


async def test_a_limit_that_is_lowered_and_raised_again_grants_what_is_really_free(desk: Desk) -> None:
    """agronholm/anyio#1223: as many waiters were woken as the limit had been raised by."""
    guard = desk.guard
    two, one = Policy(concurrency=conc(2, queue=5, wait=30)), Policy(concurrency=conc(1, queue=5, wait=30))

    def serve_anew(policy: Policy) -> None:
        guard.unbind("tool")
        guard.bind("tool", policy)

    a, b = desk.call(policy=two, seconds=10), desk.call(policy=two, seconds=20)
    await at(1)
    serve_anew(one)
    await settle()
    assert desk.running == 2
    c, d = desk.call(policy=one, seconds=1), desk.call(policy=one, seconds=1)
    await at(2)
    serve_anew(two)
    await at(3)
    assert (desk.running, desk.waiting) == (2, 2)
    await desk.everybody()
    assert [attempt.began for attempt in (a, b, c, d)] == [0.0, 0.0, 10.0, 11.0]
    assert desk.most_running == 2


async def test_a_limit_that_is_raised_lets_exactly_the_new_places_be_taken(desk: Desk) -> None:
    """agronholm/anyio#1223: neither more than these, nor none of them before the next release."""
    small, large = Policy(concurrency=conc(1, wait=30)), Policy(concurrency=conc(3, wait=30))
    for _ in range(5):
        desk.call(policy=small, seconds=10)
    await at(1)
    assert desk.running == 1
    desk.guard.unbind("tool")
    desk.guard.bind("tool", large)
    await at(2)
    assert desk.running == 3
    await desk.everybody()
    assert [attempt.began for attempt in desk.attempts] == [0.0, 1.0, 1.0, 10.0, 11.0]


async def test_a_limit_that_is_lowered_interrupts_nobody_and_admits_nobody_too_early(desk: Desk) -> None:
    """agronholm/anyio#1223: holders above the new limit stay; each release counts against them first."""
    large, small = Policy(concurrency=conc(3, wait=30)), Policy(concurrency=conc(1, wait=30))
    holders = [desk.call(policy=large, seconds=seconds) for seconds in (2, 4, 6)]
    await at(1)
    desk.guard.unbind("tool")
    desk.guard.bind("tool", small)
    last = await desk.call(policy=small)
    assert last.began == 6.0
    assert [attempt.outcome for attempt in holders] == ["ok"] * 3


# --------------------------------------------------------------------------------------------- storms


@pytest.mark.parametrize("seed", range(8))
async def test_in_a_storm_no_limit_is_ever_exceeded_and_everybody_is_answered(
    open_desk: OpenDesk, seed: int
) -> None:
    """resilience4j/resilience4j#332, openllb/hlb#320: every ending at once, on limits that overlap."""
    desk = open_desk(Throttle(admission=Admission(max_active=12, reserved=2, max_queued=40, queue_timeout=3)))
    most = {"one": 1, "two": 2, "both": 1}
    held = dict.fromkeys(most, 0)
    tools = {
        "a": (["one"], Policy(concurrency=conc(1, wait=1, key="one"), timeout=2)),
        "b": (["two"], Policy("40/minute", conc(2, wait=2, key="two"), on_cancel="cancel")),
        "c": (
            ["one", "two", "both"],
            Policy(
                concurrency=[
                    conc(1, wait=2, key="one"),
                    conc(2, wait=2, key="two"),
                    conc(1, wait=3, key="both"),
                ],
                timeout=Timeout(1, cancel_after=0.5),
            ),
        ),
        "d": ([], Policy(timeout=1, on_cancel="cancel")),
        "e": (["two"], Policy(concurrency=conc(2, wait=1, queue=2, key="two"), priority="control")),
    }
    rng = random.Random(seed)

    def body_of(keys: list[str]) -> Callable[[Attempt], Awaitable[object]]:
        async def body(_: Attempt) -> None:
            for key in keys:
                held[key] += 1
                assert held[key] <= most[key]
            try:
                await asyncio.sleep(rng.choice([0, 0, 0.1, 0.5, 3]))
                if rng.random() < 0.1:
                    raise LookupError
            finally:
                for key in keys:
                    held[key] -= 1

        return body

    for _ in range(400):
        tool = rng.choice(list(tools))
        keys, policy = tools[tool]
        signal = AbortSignal()
        attempt = desk.call(tool, policy, body_of(keys), signal=rng.choice([None, signal]))
        fate = rng.random()
        loop = asyncio.get_running_loop()
        if fate < 0.2:
            loop.call_later(rng.choice([0, 0.1, 0.5, 1, 2]), attempt.cancel)
        elif fate < 0.4:
            loop.call_later(rng.choice([0, 0.1, 0.5, 1, 2]), signal.abort)
        await asyncio.sleep(rng.choice([0, 0, 0, 0.01, 0.1]))
        assert desk.guard.statistics().places <= 12
    await desk.everybody()
    assert "AssertionError" not in desk.outcomes()
    assert len(set(desk.outcomes())) >= 6
    assert held == dict.fromkeys(most, 0)


@pytest.mark.parametrize("rounds", [100, pytest.param(2_500, marks=pytest.mark.slow)])
async def test_calls_of_every_ending_leave_no_memory_behind(open_desk: OpenDesk, rounds: int) -> None:
    """resilience4j/resilience4j#332, mjpieters/aiolimiter#73: what is kept for a call goes with it."""
    guard = open_desk().guard
    policy = Policy(concurrency=conc(1, wait=0.5, by="user_id"), timeout=Timeout(1, cancel_after=0))

    async def work(signal: AbortSignal) -> None:
        await asyncio.sleep(0.2)
        if rng.random() < 0.3:
            raise LookupError
        async with signal.scope():
            await asyncio.sleep(5)

    async def one_call() -> None:
        signal = AbortSignal()
        task = asyncio.create_task(guard.run(Call("tool"), policy, work, signal))
        await asyncio.sleep(rng.choice([0, 0.1, 0.3, 2]))
        rng.choice([task.cancel, signal.abort])()
        await asyncio.wait([task])
        # Whoever is not asked for its error complains about it.
        assert task.cancelled() or task.exception() is not None

    rng = random.Random(5)
    held: list[int] = []
    tracemalloc.start()
    try:
        for _ in range(4):
            for _ in range(rounds):
                await one_call()
            await asyncio.sleep(10)
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # Tables that grow now and then are no leak; a single object for each call would be more, each time.
    assert min(after - before for before, after in itertools.pairwise(held)) < 16 * rounds


@WAYS_TO_RUN
async def test_a_signal_that_outlives_its_calls_keeps_nothing_of_them(desk: Desk, policy: Policy) -> None:
    """resilience4j/resilience4j#332: what was registered for a call is taken back, however it ends."""
    signal = AbortSignal()
    gate = asyncio.Event()
    desk.call(policy=policy, body=until(gate))
    await settle()
    for ending in ("expires", "is cancelled", "is called"):
        attempt = desk.call(policy=policy, signal=signal)
        await settle()
        assert len(signal._listeners) == 1
        if ending == "is cancelled":
            attempt.cancel()
        elif ending == "is called":
            gate.set()
        await attempt
        assert not signal._listeners
    for _ in range(5):
        assert (await desk.call(policy=policy, signal=signal)).outcome == "ok"
    assert not signal._listeners


async def test_a_scope_of_anyio_that_is_cancelled_gives_the_slot_back(desk: Desk) -> None:
    """resilience4j/resilience4j#332: not only tasks are cancelled, scopes are too, and more than once."""
    policy = Policy(concurrency=conc(1, wait=5), on_cancel="cancel")

    async def work() -> None:
        try:
            await anyio.sleep(60)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(1)

    with anyio.move_on_after(2) as scope:
        await desk.guard.run(Call("tool"), policy, work)
    assert scope.cancelled_caught
    after = await desk.call(policy=policy)
    assert (after.outcome, after.began) == ("ok", 3.0)


@WAYS_TO_RUN
async def test_waiting_with_a_timeout_of_asyncio_loses_no_slot(desk: Desk, policy: Policy) -> None:
    """python/asyncio#270: `wait_for` around an acquire is how it was lost in the first place."""
    gate = asyncio.Event()
    holder = desk.call(policy=policy, body=until(gate))

    async def work() -> str:
        return "ran"

    for number in range(20):
        start = now()
        asyncio.get_running_loop().call_at(start + 1, gate.set)
        try:
            result = await asyncio.wait_for(desk.guard.run(Call("tool"), policy, work), timeout=1)
        except TimeoutError:
            result = "too late"
        assert result in ("ran", "too late")
        await settle()
        await holder
        gate.clear()
        holder = desk.call(policy=policy, body=until(gate), name=f"holder {number}")
        await settle()
        assert holder.began == now()
    gate.set()
