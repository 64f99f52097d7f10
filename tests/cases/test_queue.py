"""Whose turn is it? Wake-ups, cancellation, and fairness among those who wait."""

from __future__ import annotations

import asyncio
import gc
import queue
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from frontmcp_py import (
    AbortSignal,
    Admission,
    Call,
    Concurrency,
    Policy,
    RateLimitExceeded,
    Throttle,
)
from frontmcp_py.testing import settle
from tests.cases.desk import (
    WAYS_TO_RUN,
    Attempt,
    Desk,
    StepLoop,
    at,
    at_every_step,
    conc,
    now,
    other_tasks,
    turn_until,
    until,
    with_rate,
)

OpenDesk = Callable[..., Desk]

CROWD = Throttle(admission=Admission(max_active=1000, reserved=8, max_queued=100_000, queue_timeout=600))
"""Room for many to wait."""


# ------------------------------------------------------------------------------------------ lost wake-ups


async def test_a_waiter_cancelled_as_it_is_woken_passes_the_slot_on(desk: Desk) -> None:
    """python/asyncio#270: the wake-up was spent on the dead waiter, and the other one slept on."""
    policy = Policy(concurrency=conc(1, queue=5, wait=10))
    a = desk.call(policy=policy, seconds=1.0)
    await at(0.1)
    b = desk.call(policy=policy)
    await at(0.2)
    c = desk.call(policy=policy)
    await at(1.0)
    b.cancel()
    await c
    assert (a.outcome, b.outcome, c.outcome) == ("ok", "cancelled", "ok")
    assert b.began is None
    assert c.began == 1.0


Strike = Callable[[Attempt, AbortSignal], object]


def cancel(attempt: Attempt, _: AbortSignal) -> None:
    attempt.cancel()


def abort(_: Attempt, signal: AbortSignal) -> None:
    signal.abort()


def cancel_and_abort(attempt: Attempt, signal: AbortSignal) -> None:
    attempt.cancel()
    signal.abort()


def abort_and_cancel(attempt: Attempt, signal: AbortSignal) -> None:
    signal.abort()
    attempt.cancel()


@WAYS_TO_RUN
@pytest.mark.parametrize(
    ("strike", "signalled"),
    [(cancel, False), *((strike, True) for strike in (cancel, abort, cancel_and_abort, abort_and_cancel))],
)
def test_at_whatever_moment_a_waiter_goes_the_slot_goes_to_the_next(
    policy: Policy, strike: Strike, signalled: bool
) -> None:
    """python/asyncio#270, agronholm/anyio#947: between hand-over and resume nobody owned the slot.

    The waiter goes before each single callback of the loop, from the end of the holder on to its own end.
    """

    async def scenario(loop: StepLoop) -> None:
        desk, gate, signal = Desk(), asyncio.Event(), AbortSignal()
        limited = with_rate(policy, "3/minute")
        a = desk.call(policy=limited, body=until(gate), name="a")
        b = desk.call(policy=limited, seconds=0.5, name="b", signal=signal if signalled else None)
        c = desk.call(policy=limited, name="c")
        await settle()
        loop.strike = lambda: strike(b, signal)
        gate.set()
        await asyncio.gather(a.task, b.task, c.task)
        assert a.outcome == c.outcome == "ok"
        if b.began is None:
            assert b.outcome in ("cancelled", "CANCELLED")
            assert c.began == 0.0
        elif loop.struck_at == 0.0:
            # Its work takes half a second: it was told in the middle of it.
            assert b.outcome in ("cancelled", "CANCELLED")
        else:
            assert b.outcome == "ok" or loop.struck
        # Who never began is not counted: three calls fit into the minute.
        d = await desk.call(policy=limited, name="d")
        assert d.outcome == ("ok" if b.began is None else "RATE_LIMIT_EXCEEDED")
        desk.assert_clean()
        assert other_tasks() == set()

    assert at_every_step(scenario) > 5


@WAYS_TO_RUN
def test_several_who_go_in_one_turn_of_the_loop_lose_nothing(policy: Policy) -> None:
    """python/asyncio#270: a wake-up that is passed on may meet the next dead waiter."""

    async def scenario(loop: StepLoop) -> None:
        desk, gate = Desk(), asyncio.Event()
        a = desk.call(policy=policy, body=until(gate), name="a")
        others = [desk.call(policy=policy, seconds=1.0, name=name) for name in "bcde"]
        await settle()

        def some_go() -> None:
            for attempt in (others[1], others[0], others[2]):
                attempt.cancel()

        loop.strike = some_go
        gate.set()
        last = await others[-1]
        assert (a.outcome, last.outcome) == ("ok", "ok")
        if all(attempt.began is None for attempt in others[:-1]):
            assert last.began == 0.0
        await asyncio.gather(*(attempt.task for attempt in others))
        desk.assert_clean()

    assert at_every_step(scenario) > 5


@WAYS_TO_RUN
def test_when_all_waiters_go_at_once_the_slot_is_simply_free(policy: Policy) -> None:
    """agronholm/anyio#947: a grant that nobody took up was never handed back."""

    async def scenario(loop: StepLoop) -> None:
        desk, gate = Desk(), asyncio.Event()
        desk.call(policy=policy, body=until(gate), name="a")
        others = [desk.call(policy=policy, name=name) for name in "bcd"]
        await settle()
        loop.strike = lambda: [attempt.task.cancel() for attempt in others]
        gate.set()
        await settle()
        fresh = await desk.call(policy=policy)
        assert (fresh.outcome, fresh.began) == ("ok", 0.0)
        desk.assert_clean()

    assert at_every_step(scenario) > 5


@WAYS_TO_RUN
async def test_a_waiter_cancelled_at_its_grant_never_shrinks_the_capacity(desk: Desk, policy: Policy) -> None:
    """agronholm/anyio#947: each such round cost one slot for good."""
    for _ in range(300):
        gate = asyncio.Event()
        desk.attempts.clear()
        a = desk.call(policy=policy, body=until(gate))
        b = desk.call(policy=policy)
        await settle()
        gate.set()
        await turn_until(lambda: not desk.waiting)
        b.cancel()
        await b
        assert (b.outcome, b.began, desk.active) == ("cancelled", None, 0)
        d = await desk.call(policy=policy)
        assert (a.outcome, d.outcome, d.began) == ("ok", "ok", now())


@WAYS_TO_RUN
def test_one_signal_for_many_waiters_takes_them_all_and_the_slot_to_nobody_among_them(policy: Policy) -> None:
    """python/asyncio#270: each that goes hands on to the next, which is about to go by the same signal."""

    async def scenario(loop: StepLoop) -> None:
        desk, gate, signal = Desk(), asyncio.Event(), AbortSignal()
        desk.call(policy=policy, body=until(gate))
        many = [desk.call(policy=policy, signal=signal) for _ in range(4)]
        last = desk.call(policy=policy)
        await settle()
        loop.strike = signal.abort
        gate.set()
        await desk.everybody()
        await settle()
        loop.strike = None
        assert (last.outcome, now()) == ("ok", 0.0)
        assert {attempt.outcome for attempt in many} <= {"ok", "CANCELLED"}
        assert not signal._listeners
        desk.assert_clean()

    assert at_every_step(scenario) > 5


async def test_an_expired_waiter_at_the_moment_of_release_loses_nothing(desk: Desk) -> None:
    """python/asyncio#270: what holds for a cancelled waiter holds for one whose time runs out."""
    patient = Policy(concurrency=conc(1, wait=30, key="slot"))
    hasty = Policy(concurrency=conc(1, wait=5, key="slot"))
    for release_is_first in (True, False):
        start, gate = now(), asyncio.Event()
        desk.call("patient", patient, body=until(gate))
        await settle()
        if release_is_first:
            asyncio.get_running_loop().call_at(start + 5, gate.set)
        late = [desk.call("hasty", hasty) for _ in range(3)]
        await settle()
        if not release_is_first:
            asyncio.get_running_loop().call_at(start + 5, gate.set)
        last = await desk.call("patient", patient)
        assert (last.outcome, last.began) == ("ok", start + 5)
        for attempt in late:
            assert attempt.outcome in ("ok", "QUEUE_TIMEOUT")
            assert attempt.answered == start + 5
            assert (attempt.began is not None) == (attempt.outcome == "ok")


@pytest.mark.parametrize("way", ["expires", "is cancelled", "is aborted"])
async def test_when_the_first_of_a_line_goes_its_kept_place_is_taken(desk: Desk, way: str) -> None:
    """python/asyncio#270, as a wake-up that no release causes: the first of a line keeps a place there."""
    both = Policy(concurrency=[conc(2, wait=30, key="wide"), conc(1, wait=5, key="narrow")])
    wide = Policy(concurrency=conc(2, wait=30, key="wide"))
    narrow = Policy(concurrency=conc(1, key="narrow"))
    signal = AbortSignal()
    desk.call("narrow", narrow, seconds=60)
    desk.call("wide", wide, seconds=60)
    first = desk.call("both", both, signal=signal)
    await at(1)
    behind = desk.call("wide", wide)
    await settle()
    assert behind.began is None
    if way == "is cancelled":
        first.cancel()
    elif way == "is aborted":
        signal.abort()
    await behind
    assert behind.began == (5.0 if way == "expires" else 1.0)
    codes = {"expires": "QUEUE_TIMEOUT", "is cancelled": "cancelled", "is aborted": "CANCELLED"}
    assert first.outcome == codes[way]


async def test_a_waiter_whose_rate_ran_out_passes_its_turn_on_in_the_same_step(desk: Desk) -> None:
    """python/asyncio#270, with a waiter that is alive but may not start."""
    rated = Policy(concurrency=conc(1, wait=30, key="slot"), rate_limit="1/hour")
    free = Policy(concurrency=conc(1, wait=30, key="slot"))
    desk.call("free", free, seconds=2)
    rest = [desk.call("rated", rated, seconds=1, name=f"rated {n}") for n in range(3)]
    last = desk.call("free", free, name="last")
    await last
    assert [attempt.outcome for attempt in rest] == ["ok", "RATE_LIMIT_EXCEEDED", "RATE_LIMIT_EXCEEDED"]
    assert [attempt.answered for attempt in rest] == [3.0, 3.0, 3.0]
    assert last.began == 3.0
    assert isinstance(rest[1].error, RateLimitExceeded)
    assert rest[1].error.retry_after == 3597


# --------------------------------------------------------------------------------------- nobody pushes in


async def test_nobody_slips_in_between_hand_over_and_resume(desk: Desk) -> None:
    """agronholm/anyio#1170: two held a slot for one, and the count of free slots was -1."""
    waits = Policy(concurrency=conc(1, queue=1, wait=5, key="k"))
    hurries = Policy(concurrency=conc(1, key="k"))
    desk.call("t1", waits, seconds=1.0, name="a")
    await at(0.1)
    b = desk.call("t1", waits, seconds=1.0, name="b")
    await at(1.0)
    x = desk.call("t2", hurries, name="x")
    await b
    assert (x.outcome, b.outcome, b.began) == ("CONCURRENCY_LIMIT", "ok", 1.0)
    assert desk.most_running == 1


@WAYS_TO_RUN
def test_at_whatever_moment_a_newcomer_arrives_it_does_not_overtake(policy: Policy) -> None:
    """agronholm/anyio#1170: the free slot was up for grabs until the woken waiter had resumed."""

    async def scenario(loop: StepLoop) -> None:
        desk, gate = Desk(), asyncio.Event()
        desk.call("t1", policy, body=until(gate), name="a")
        b = desk.call("t1", policy, seconds=1.0, name="b")
        await settle()
        joins = Policy(concurrency=Concurrency(1, key="t1"))
        arrivals: list[Attempt] = []
        loop.strike = lambda: arrivals.append(desk.call("t2", joins, name="x"))
        gate.set()
        await b
        if not loop.struck:
            return
        x = await arrivals[0]
        assert x.outcome == "CONCURRENCY_LIMIT" or x.began == b.ended == 1.0
        assert desk.begun[:2] == ["a", "b"]
        assert desk.most_running == 1
        desk.assert_clean()

    assert at_every_step(scenario) > 3


async def test_a_holder_that_calls_again_at_once_does_not_overtake_those_who_wait(desk: Desk) -> None:
    """python/cpython#31910: a loop of acquire and release starved everybody else."""
    policy = Policy(concurrency=conc(1, queue=10, wait=5))

    async def work(name: str) -> None:
        desk.begun.append(name)
        await asyncio.sleep(0.01)

    async def back_to_back() -> None:
        for number in range(100):
            await desk.guard.run(Call("tool"), policy, lambda n=number: work(f"l{n}"))

    greedy = asyncio.create_task(back_to_back())
    await at(0.005)
    b = await desk.call(policy=policy, seconds=0.01, name="b")
    assert (b.outcome, b.began) == ("ok", 0.01)
    await greedy
    assert desk.begun == ["l0", "b", *(f"l{number}" for number in range(1, 100))]


async def test_grants_come_in_the_order_of_arrival_whatever_tool_is_called(desk: Desk) -> None:
    """python/cpython#31910: with a shared key there is one line, not one for each tool."""
    policies = {tool: Policy(concurrency=conc(2, wait=600, key="k")) for tool in ("one", "two", "three")}
    rng = random.Random(1)
    names = [f"call {number}" for number in range(300)]
    for name in names:
        tool = rng.choice(list(policies))
        desk.call(tool, policies[tool], seconds=rng.choice([0.1, 0.2, 0.5]), name=name)
        await asyncio.sleep(rng.choice([0, 0, 0.01]))
        if desk.waiting > 50:
            await asyncio.sleep(5)
    await asyncio.gather(*(attempt.task for attempt in desk.attempts))
    assert desk.begun == names
    assert desk.most_running == 2


async def test_control_calls_go_first_and_among_themselves_in_order(desk: Desk) -> None:
    """python/cpython#31910, with the one exception from first come, first served."""
    normal = Policy(concurrency=conc(1, wait=30, key="k"))
    control = Policy(concurrency=conc(1, wait=30, key="k"), priority="control")
    desk.call("normal", normal, seconds=1)
    calls = [desk.call("normal", normal, name=name) for name in ("n1", "n2")]
    calls += [desk.call("control", control, name=name) for name in ("c1", "c2")]
    await asyncio.gather(*(attempt.task for attempt in calls))
    assert desk.begun == ["normal", "c1", "c2", "n1", "n2"]


# --------------------------------------------------------------------------------- callers that have gone


@WAYS_TO_RUN
async def test_a_call_that_is_cancelled_before_it_arrives_takes_nothing(desk: Desk, policy: Policy) -> None:
    """golang/go#63615: a free semaphore was acquired although the context was already done."""
    limited = with_rate(policy, "5/minute")
    signal = AbortSignal()
    signal.abort()
    aborted = await desk.call(policy=limited, signal=signal)
    assert (aborted.outcome, aborted.began) == ("CANCELLED", None)
    cancelled = desk.call(policy=limited)
    cancelled.cancel()
    await cancelled
    assert cancelled.began is None
    five = [await desk.call(policy=limited) for _ in range(5)]
    assert [attempt.outcome for attempt in five] == ["ok"] * 5
    assert (await desk.call(policy=limited)).outcome == "RATE_LIMIT_EXCEEDED"


@pytest.mark.parametrize("way", ["caller", "signal"])
async def test_a_call_cancelled_in_the_queue_never_runs_later(desk: Desk, way: str) -> None:
    """yvgude/lean-ctx#1265, golang/go#67723: the tool ran all the same when the slot became free."""
    policy = Policy(rate_limit="5/minute", concurrency=conc(1, queue=5, wait=30))
    signal = AbortSignal()
    a = desk.call(policy=policy, seconds=5)
    b = desk.call(policy=policy, signal=signal)
    await at(1)
    if way == "caller":
        b.cancel()
    else:
        signal.abort()
    await b
    assert (b.outcome, b.answered) == ("cancelled" if way == "caller" else "CANCELLED", 1.0)
    assert desk.waiting == 0
    await a
    await at(60)
    assert (a.outcome, b.began) == ("ok", None)
    assert desk.counts.cancelled_waiting == 1


async def test_an_aborted_waiter_leaves_its_place_in_the_same_step(desk: Desk) -> None:
    """SamSaffron/term-llm#686: the next caller must not find the queue full of people who have gone."""
    policy = Policy(concurrency=conc(1, queue=1, wait=30))
    signal = AbortSignal()
    a = desk.call(policy=policy, seconds=5)
    b = desk.call(policy=policy, signal=signal)
    await settle()
    assert (await desk.call(policy=policy)).outcome == "CONCURRENCY_LIMIT"
    signal.abort()
    assert desk.waiting == 0
    c = desk.call(policy=policy)
    await asyncio.gather(a.task, b.task, c.task)
    assert (a.outcome, b.outcome, c.outcome, c.began) == ("ok", "CANCELLED", "ok", 5.0)


def test_whoever_goes_at_the_moment_its_time_runs_out_is_counted_once() -> None:
    """python/asyncio#270: cancel and expiry in one turn of the loop are one answer, not two."""

    async def scenario(loop: StepLoop) -> None:
        desk, signal = Desk(), AbortSignal()
        policy = Policy(concurrency=conc(1, wait=5))
        a = desk.call(policy=policy, seconds=20)
        b = desk.call(policy=policy, signal=signal)
        await at(4)
        loop.strike = lambda: cancel_and_abort(b, signal)
        await b
        assert b.outcome in ("cancelled", "CANCELLED", "QUEUE_TIMEOUT")
        assert b.began is None
        await a
        counts = desk.counts
        assert counts.cancelled_waiting + counts.rejected.get("QUEUE_TIMEOUT", 0) == 1
        desk.assert_clean()

    assert at_every_step(scenario) > 3


async def test_a_guard_that_is_closed_as_a_waiter_is_called_refuses_it(open_desk: OpenDesk) -> None:
    """python/asyncio#270: who was granted but has not begun belongs to nobody's list of running calls."""
    desk = open_desk()
    policy = Policy(concurrency=conc(1, wait=30))

    async def work() -> None:
        await asyncio.sleep(1)

    async with desk.guard:
        asyncio.get_running_loop().call_later(0.5, lambda: desk.call(policy=policy, seconds=1))
        await desk.guard.run(Call("tool"), policy, work)
    assert desk.active == 0
    (late,) = desk.attempts
    await late
    assert (late.outcome, late.began) == ("OVERLOADED", None)


# ------------------------------------------------------------------------------------- crowds that wait


@pytest.mark.parametrize("waiters", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_one_release_wakes_one_waiter_however_many_there_are(waiters: int) -> None:
    """mjpieters/aiolimiter#73: each waiter had a timer of its own, and all of them woke on every tick."""

    async def scenario(loop: StepLoop) -> None:
        desk = Desk(CROWD)
        policy = Policy(concurrency=conc(1, queue=waiters + 5, wait=300))
        gates = [asyncio.Event() for _ in range(6)]
        for gate in gates:
            desk.call(policy=policy, body=until(gate), name="holder")
            await settle()
        crowd = [desk.call(policy=policy, name=str(number)) for number in range(waiters)]
        await settle()
        assert desk.waiting == waiters + 5
        # All these waiters have one duration, and one timer.
        assert len(loop._scheduled) <= 2  # type: ignore[attr-defined]
        ran: list[int] = []
        for gate in gates[:-1]:
            before = loop.ran
            gate.set()
            await settle()
            ran.append(loop.ran - before)
        assert len(desk.begun) == len(gates)
        assert max(ran) <= 12
        assert len(set(ran)) == 1
        for attempt in crowd[1::2]:
            attempt.cancel()
        await settle()
        assert desk.waiting == len(crowd[::2])
        gates[-1].set()
        await asyncio.gather(*(attempt.task for attempt in crowd))
        assert desk.begun[len(gates) :] == [str(number) for number in range(0, waiters, 2)]
        desk.assert_clean()

    with asyncio.Runner(loop_factory=StepLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, StepLoop)
        runner.run(scenario(loop))


def calls_made_by(work: Callable[[], object]) -> int:
    """How many Python functions are called meanwhile: what work costs, whatever the machine does besides."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    # A collection in between would call whatever others have hung into the collector.
    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.parametrize("sizes", [(100, 1_000), pytest.param((1_000, 10_000), marks=pytest.mark.slow)])
async def test_neither_release_nor_cancel_costs_more_in_a_larger_crowd(
    sizes: tuple[int, int], open_desk: OpenDesk
) -> None:
    """mjpieters/aiolimiter#73: O(n) for each release, and O(n²) to remove all waiters."""
    costs: list[tuple[int, float]] = []
    for size in sizes:
        desk, gate = open_desk(CROWD), asyncio.Event()
        policy = Policy(concurrency=conc(1, wait=300))
        signal = AbortSignal()
        holder = desk.call(policy=policy, body=until(gate))
        crowd = [desk.call(policy=policy, signal=signal) for _ in range(size)]
        await settle()
        run = next(iter(desk.guard._deadlines.running))  # type: ignore[union-attr]
        release = calls_made_by(lambda guard=desk.guard, run=run: guard._give_back(run))  # type: ignore[misc]
        leave = calls_made_by(signal.abort) / size
        costs.append((release, leave))
        gate.set()
        await asyncio.gather(holder.task, *(attempt.task for attempt in crowd))
        assert [attempt.outcome for attempt in crowd] == ["CANCELLED"] * size
    (release, leave), (release_from_many, leave_many) = costs
    assert release_from_many <= 2 * release
    assert leave_many <= 2 * leave


@pytest.mark.parametrize("rounds", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_waiters_that_come_and_go_leave_nothing_behind(desk: Desk, rounds: int) -> None:
    """mjpieters/aiolimiter#73, agronholm/anyio#947: what is kept for each waiter has to go with it."""
    policy = Policy(concurrency=conc(1, wait=0.5, by="user_id"), timeout=5)
    holder = desk.call(policy=policy, seconds=3600)
    rng = random.Random(2)
    for number in range(rounds):
        signal = AbortSignal()
        attempt = desk.call(policy=policy, signal=signal)
        await asyncio.sleep(0)
        match number % 4:
            case 0:
                attempt.cancel()
            case 1:
                signal.abort()
            case 2:
                await asyncio.sleep(rng.random())
                attempt.cancel()
        await attempt
        assert attempt.began is None
        desk.attempts.remove(attempt)
        assert (desk.waiting, len(desk.guard._scheduler._groups), len(desk.guard._slots._waiting)) == (
            0,
            0,
            0,
        )
        assert len(desk.guard._scheduler._slots) == 1
    holder.cancel()
    await holder


# -------------------------------------------------------------------------------------- how long, how many


async def test_waiting_and_running_have_a_clock_each(open_desk: OpenDesk) -> None:
    """SamSaffron/term-llm#686: the queue's time was charged to the execution, or to nobody."""
    policy = Policy(concurrency=conc(1, queue=1, wait=2), timeout=3)
    for a_takes, b_takes, b_outcome, b_answered in (
        (1.5, 2.5, "ok", 4.0),
        (1.5, 3.5, "EXECUTION_TIMEOUT", 4.5),
        (2.5, 0.0, "QUEUE_TIMEOUT", 2.0),
    ):
        start = now()
        desk = open_desk()
        a = desk.call(policy=policy, seconds=a_takes)
        b = await desk.call(policy=policy, seconds=b_takes)
        assert (b.outcome, b.answered) == (b_outcome, start + b_answered)
        await a
        assert (a.outcome, a.answered) == ("ok", start + a_takes)
        await asyncio.sleep(1)


async def test_time_in_the_queue_does_not_shorten_the_time_to_run(desk: Desk) -> None:
    """SamSaffron/term-llm#686: nor does a long timeout lengthen the wait."""
    short = Policy(concurrency=conc(1, wait=25, key="k"), timeout=1)
    long = Policy(concurrency=conc(1, wait=1, key="k"), timeout=3600)
    holder = desk.call("holder", Policy(concurrency=conc(1, wait=0, key="k")), seconds=20)
    a = desk.call("short", short, seconds=0.9)
    b = await desk.call("long", long)
    assert (b.outcome, b.answered) == ("QUEUE_TIMEOUT", 1.0)
    await a
    assert (a.outcome, a.began, holder.outcome) == ("ok", 20.0, "ok")


async def test_a_burst_is_bounded_and_what_is_too_much_is_told_at_once(desk: Desk) -> None:
    """smart-mcp-proxy/mcpproxy-go#955, #959: bursts went through unbounded, or queued without an end."""
    policy = Policy(concurrency=conc(1, queue=2, wait=5))
    burst = [desk.call(policy=policy, seconds=1.0) for _ in range(5)]
    await desk.everybody()
    assert desk.outcomes() == ["ok", "ok", "ok", "CONCURRENCY_LIMIT", "CONCURRENCY_LIMIT"]
    assert [attempt.began for attempt in burst] == [0.0, 1.0, 2.0, None, None]
    assert [attempt.answered for attempt in burst[3:]] == [0.0, 0.0]


async def test_what_a_full_queue_says_depends_on_whose_queue_is_full(open_desk: OpenDesk) -> None:
    """smart-mcp-proxy/mcpproxy-go#955: the limit's own queue, or that of the whole process."""
    desk = open_desk(Throttle(admission=Admission(max_active=10, reserved=0, max_queued=2)))
    policy = Policy(concurrency=conc(1, wait=5))
    for _ in range(4):
        desk.call(policy=policy, seconds=1.0)
    await desk.everybody()
    assert desk.outcomes() == ["ok", "ok", "ok", "OVERLOADED"]


async def test_a_queue_of_nobody_refuses_at_once_and_a_wait_of_nothing_too(desk: Desk) -> None:
    """smart-mcp-proxy/mcpproxy-go#959: zero is not "without a limit"."""
    no_wait = Policy(concurrency=conc(1, wait=0, key="a"))
    no_queue = Policy(concurrency=conc(1, queue=0, wait=60, key="b"))
    for tool, policy in (("no wait", no_wait), ("no queue", no_queue)):
        desk.call(tool, policy, seconds=1.0)
        refused = await desk.call(tool, policy)
        assert (refused.outcome, refused.answered) == ("CONCURRENCY_LIMIT", 0.0)
    await at(1)


# ------------------------------------------------------------------------------------ aborts from a thread


class Aborter:
    """A thread that aborts the signals it is given, each after a few turns of a loop."""

    def __init__(self) -> None:
        self._inbox: queue.Queue[tuple[AbortSignal, int] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Aborter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._inbox.put(None)
        self._thread.join()

    def abort(self, signal: AbortSignal, turns: int) -> None:
        self._inbox.put((signal, turns))

    def _run(self) -> None:
        while (job := self._inbox.get()) is not None:
            signal, turns = job
            for _ in range(turns):
                pass
            signal.abort()


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


TRIES = pytest.mark.parametrize("tries", [500, pytest.param(10_000, marks=pytest.mark.slow)])


@TRIES
@pytest.mark.usefixtures("restless")
async def test_an_abort_from_a_thread_around_parking_is_never_missed(desk: Desk, tries: int) -> None:
    """e2b-dev/infra#3629: set between "am I cancelled?" and going to sleep, it was slept through."""
    policy = Policy(concurrency=conc(1, queue=1, wait=30))
    gate, rng = asyncio.Event(), random.Random(3)
    holder = desk.call(policy=policy, body=until(gate))
    await settle()
    with Aborter() as aborter:
        for _ in range(tries):
            signal = AbortSignal()
            aborter.abort(signal, rng.randrange(2000))
            b = desk.call(policy=policy, signal=signal)
            await b
            assert (b.outcome, b.began, now(), desk.waiting) == ("CANCELLED", None, 0.0, 0)
            desk.attempts.remove(b)
    gate.set()
    assert (await holder).outcome == "ok"


@TRIES
@WAYS_TO_RUN
@pytest.mark.usefixtures("restless")
async def test_an_abort_from_a_thread_around_the_hand_over_loses_no_slot(
    desk: Desk, policy: Policy, tries: int
) -> None:
    """e2b-dev/infra#3629, agronholm/anyio#947: it may come at any instant of the hand-over, too."""
    rng = random.Random(4)
    with Aborter() as aborter:
        for _ in range(tries // 4):
            signal, gate = AbortSignal(), asyncio.Event()
            a = desk.call(policy=policy, body=until(gate))
            b = desk.call(policy=policy, signal=signal)
            c = desk.call(policy=policy)
            await settle()
            aborter.abort(signal, rng.randrange(3000))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            gate.set()
            await asyncio.gather(a.task, b.task, c.task)
            assert (a.outcome, c.outcome, now()) == ("ok", "ok", 0.0)
            assert b.outcome in ("ok", "CANCELLED")
            await settle()
            assert (desk.active, desk.waiting) == (0, 0)
            desk.attempts.clear()
