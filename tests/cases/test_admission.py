"""Is there room in the process? What counts as load, what is kept free, and what a flood costs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import tracemalloc
from collections.abc import Callable

import pytest
from mcp.shared.exceptions import MCPError

from frontmcp_py import (
    AbortSignal,
    Admission,
    Call,
    Caller,
    Concurrency,
    FrontMCP,
    Guard,
    Overloaded,
    Policy,
    Throttle,
    Timeout,
)
from frontmcp_py.testing import VirtualClock, settle
from tests.cases.asgi import Request, call, code_of_call, open_session, serving
from tests.cases.desk import ERAS, FREE, Desk, at, code_of, conc, connected, now, until

OpenDesk = Callable[..., Desk]

CONTROL = Policy(priority="control")


def small(max_active: int = 4, reserved: int = 1, max_queued: int = 2, queue_timeout: float = 30) -> Throttle:
    return Throttle(admission=Admission(max_active, reserved, max_queued, queue_timeout))


# --------------------------------------------------------------------------------------------- probes


@pytest.mark.parametrize("probes", [100, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_the_probe_is_answered_whatever_is_exhausted_and_consumes_nothing(probes: int) -> None:
    """cameri/nostream#182, benoitc/gunicorn#1417: probes ran into the limiter, so the process was killed."""
    server = FrontMCP(
        "server",
        throttle=Throttle(
            global_rate_limit="4/hour",
            global_concurrency=Concurrency(2, queue_timeout=60),
            admission=Admission(max_active=2, reserved=0, max_queued=1),
        ),
    )

    @server.tool
    async def busy(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    async with serving(server) as app:
        calls = [call(app, "busy", {"seconds": 20}) for _ in range(3)]
        await settle()
        assert await code_of_call(call(app, "busy", {"seconds": 0})) == "OVERLOADED"
        before = server.guard.statistics()
        for _ in range(probes):
            probe = Request(app, "/healthz", method="GET")
            assert await probe.answer() == {"ok": True, "service": "server"}
            assert (probe.status, probe.ended) == (200, 0.0)
        wrong = Request(app, "/healthz", method="POST", body={})
        await wrong.task
        assert (wrong.status, set(wrong.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})
        assert server.guard.statistics() == before
        assert [await code_of_call(each) for each in calls] == ["ok"] * 3
        # Nothing of the rate has gone to the probes.
        assert await code_of_call(call(app, "busy", {"seconds": 0})) == "ok"
        assert await code_of_call(call(app, "busy", {"seconds": 0})) == "RATE_LIMIT_EXCEEDED"
        assert (await Request(app, "/healthz", method="GET").answer())["ok"]


# ----------------------------------------------------------------------------------------------- load


@pytest.mark.parametrize("clients", [30, pytest.param(100, marks=pytest.mark.slow)])
@ERAS
async def test_idle_connections_are_no_load(era: str, clients: int) -> None:
    """Kludex/uvicorn#3029, #1811: open connections were counted, and calls refused while nothing ran."""
    server = FrontMCP("server", throttle=small(2, 1, 0))

    @server.tool
    async def hello() -> str:
        return "hello"

    async with contextlib.AsyncExitStack() as stack:
        for _ in range(clients):
            await stack.enter_async_context(server.connect(mode=era))
        async with connected(server, era) as client:
            assert server.guard.statistics().active == 0
            assert code_of(await client.call_tool("hello", {})) == "ok"
            assert server.guard.statistics().peak_active == 1


async def test_open_event_streams_are_no_load() -> None:
    """Kludex/uvicorn#3029, #1811: a stream that waits for events is not work."""
    server = FrontMCP("server", throttle=small(2, 1, 0))

    @server.tool
    async def hello() -> str:
        return "hello"

    async with serving(server) as app:
        streams: list[Request] = []
        for _ in range(20):
            session = await open_session(app)
            streams.append(Request(app, "/mcp", method="GET", headers=session))
        await settle()
        assert [stream.status for stream in streams] == [200] * 20
        assert server.guard.statistics().active == 0
        assert await code_of_call(call(app, "hello")) == "ok"
        for stream in streams:
            stream.leave()
        await asyncio.gather(*(stream.task for stream in streams))


async def test_work_that_was_answered_already_still_counts(open_desk: OpenDesk) -> None:
    """Kludex/uvicorn#3029, from the other side: what runs is load, whoever still waits for it."""
    desk = open_desk(small(2, 0, 0))
    for _ in range(2):
        desk.call(policy=Policy(timeout=1), seconds=10)
    await at(2)
    assert desk.outcomes() == ["EXECUTION_TIMEOUT"] * 2
    statistics = desk.guard.statistics()
    assert (statistics.places, statistics.abandoned, statistics.running) == (2, 2, 0)
    assert (await desk.call()).outcome == "OVERLOADED"
    await at(10)
    assert (await desk.call()).outcome == "ok"


# ------------------------------------------------------------------------------------- what is kept free


async def test_normal_calls_never_use_the_places_of_control_calls(open_desk: OpenDesk) -> None:
    """Keeper-Security/Commander#2108, dragonflyoss/dragonfly#5015: what manages the load stood behind it."""
    desk = open_desk(small(4, 1, 2))
    normal = [desk.call(seconds=10) for _ in range(6)]
    await settle()
    assert (desk.running, desk.waiting, normal[-1].outcome) == (3, 2, "OVERLOADED")
    # The queue is full; a call that can start needs no place in it.
    control = [desk.call("control", CONTROL, seconds=1) for _ in range(2)]
    await settle()
    assert [attempt.began for attempt in control] == [0.0, None]
    assert control[1].outcome == "OVERLOADED"
    await control[0]
    assert desk.running == 3
    await desk.everybody()
    assert desk.outcomes().count("ok") == 6


async def test_control_calls_are_first_in_the_queue(open_desk: OpenDesk) -> None:
    """dragonflyoss/dragonfly#5015: priority in the queue, not only in the reserve."""
    desk = open_desk(small(2, 0, 10))
    for _ in range(2):
        desk.call(seconds=1, name="holder")
    await settle()
    desk.call(name="normal", seconds=1)
    desk.call("control", CONTROL, name="control", seconds=1)
    desk.call(name="late", seconds=1)
    await desk.everybody()
    assert desk.begun == ["holder", "holder", "control", "normal", "late"]


async def test_a_place_goes_to_whoever_is_next_whatever_slots_others_wait_for(open_desk: OpenDesk) -> None:
    """kubernetes/kubernetes#105409: those who wait for a slot keep no seat while they do."""
    desk = open_desk(small(3, 0, 20))
    mutex = Policy(concurrency=conc(1, wait=29))
    desk.call("mutex", mutex, seconds=5)
    for _ in range(10):
        desk.call("mutex", mutex, seconds=1)
    await settle()
    free = [desk.call("free", FREE, seconds=1) for _ in range(4)]
    await desk.everybody()
    assert [attempt.began for attempt in free] == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("way", ["expires", "is cancelled", "is aborted"])
async def test_a_waiter_that_goes_leaves_its_place_in_the_queue(open_desk: OpenDesk, way: str) -> None:
    """python/asyncio#270, with a queue that is bounded: full of the dead it refuses the living."""
    desk = open_desk(small(2, 0, 1, queue_timeout=3))
    holders = [desk.call(seconds=10) for _ in range(2)]
    signal = AbortSignal()
    waiting = desk.call(signal=signal)
    await at(2)
    assert (await desk.call()).outcome == "OVERLOADED"
    if way == "is cancelled":
        waiting.cancel()
        await settle()
    elif way == "is aborted":
        signal.abort()
    else:
        await at(3)
        await settle()
        assert isinstance(waiting.error, Overloaded)
        assert waiting.error.message == (
            "Server overloaded: waited 3000ms for a place (2 calls running, 0 waiting). Try again shortly."
        )
    last = desk.call()
    await settle()
    assert last.outcome == "pending"
    assert (await last).outcome == "OVERLOADED"
    assert [attempt.outcome for attempt in holders] == ["pending"] * 2


async def test_hints_of_those_refused_together_do_not_bring_them_back_together(open_desk: OpenDesk) -> None:
    """benoitc/gunicorn#1417: the herd that was sent away comes back as one."""
    desk = open_desk(small(2, 0, 0))
    for _ in range(2):
        desk.call(seconds=1)
    refused = [desk.call() for _ in range(50)]
    await desk.everybody()
    hints = [attempt.error.retry_after for attempt in refused if isinstance(attempt.error, Overloaded)]
    assert len(hints) == 50
    assert all(hint is not None and 0.8 <= hint <= 1.2 for hint in hints)
    assert len(set(hints)) > 10


# --------------------------------------------------------------------------------------------- floods


@pytest.mark.parametrize("calls", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_a_flood_is_turned_away_at_the_door(open_desk: OpenDesk, calls: int) -> None:
    """BerriAI/litellm#33077: accepted calls piled up in front of the limiter's own store."""
    desk = open_desk(
        Throttle(admission=Admission(max_active=50, reserved=2, max_queued=64, queue_timeout=20))
    )
    guard = desk.guard

    async def work() -> str:
        await asyncio.sleep(5)
        return "done"

    async def one() -> str:
        try:
            return await guard.run(Call("tool"), FREE, work)
        except Overloaded:
            assert now() == 0.0
            return "OVERLOADED"

    gc.collect()
    tracemalloc.start()
    try:
        tasks = [asyncio.create_task(one()) for _ in range(calls)]
        control = desk.call("control", CONTROL)
        await settle()
        tasks = [task for task in tasks if not task.done()]
        gc.collect()
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (control.outcome, control.answered) == ("ok", 0.0)
    statistics = guard.statistics()
    assert (statistics.places, statistics.waiting, len(tasks)) == (48, 64, 112)
    assert statistics.counts.rejected == {"OVERLOADED": calls - 112}
    assert held < 2_000_000
    assert peak < 10_000 * calls
    assert sorted(set(await asyncio.gather(*tasks))) == ["done"]
    assert guard.statistics().peak_active == 49


async def test_the_number_of_calls_inside_never_exceeds_places_and_queue(open_desk: OpenDesk) -> None:
    """BerriAI/litellm#33077: at every moment of a long overload, with every way to end."""
    desk = open_desk(small(6, 2, 5, queue_timeout=0.5))
    rng = random.Random(7)
    for _ in range(600):
        policy = rng.choice(
            [FREE, CONTROL, Policy(timeout=Timeout(0.2, cancel_after=0)), Policy(concurrency=conc(2, wait=1))]
        )
        attempt = desk.call(repr(policy)[:200], policy, seconds=rng.choice([0, 0.1, 0.5]))
        if rng.random() < 0.2:
            asyncio.get_running_loop().call_later(rng.random(), attempt.cancel)
        await asyncio.sleep(rng.choice([0, 0, 0, 0.05]))
        statistics = desk.guard.statistics()
        assert statistics.places <= 6
        assert statistics.waiting <= 5
        assert desk.guard._admission is not None
        assert desk.guard._admission.held_normal <= 4
    await desk.everybody()
    assert {"ok", "OVERLOADED"} <= set(desk.outcomes())


@ERAS
async def test_calls_of_tools_that_do_not_exist_leave_one_number_behind(era: str) -> None:
    """BerriAI/litellm#27272, hrygo/hotplex#86: raw names became labels, one series for each."""
    server = FrontMCP("server", throttle=Throttle(default_rate_limit="1/hour", default_concurrency=1))

    @server.tool
    async def known() -> str:
        return "known"

    names = [f'no such "tool" {number}\n}} 1' for number in range(100)] + [
        "",
        "known ",
        "KNOWN",
        "x" * 10_000,
        "unknown",
    ]
    async with connected(server, era) as client:
        for name in names:
            with contextlib.suppress(MCPError):
                result = await client.call_tool(name, {})
                assert result.is_error
        assert code_of(await client.call_tool("known", {})) == "ok"
    statistics = server.guard.statistics()
    assert list(statistics.tools) == ["known"]
    assert statistics.unknown == len(names)
    assert statistics.counts.submitted == 1
    assert server.guard._memory.counts.held == 1
    assert server.guard._scheduler.live_slots == 0


async def test_callers_leave_no_rows_behind(desk: Desk) -> None:
    """BerriAI/litellm#27272: nor do users, sessions or addresses become labels."""
    policy = Policy(concurrency=Concurrency(1, partition_by="user_id"))
    for number in range(2_000):
        await desk.guard.run(
            Call("tool", {}, Caller(user_id=str(number), session_id=str(number))),
            policy,
            lambda: asyncio.sleep(0),
        )
    statistics = desk.guard.statistics()
    assert list(statistics.tools) == ["tool"]
    assert (statistics.active, statistics.waiting) == (0, 0)


async def test_with_admission_off_nothing_is_overloaded(open_desk: OpenDesk) -> None:
    """benoitc/gunicorn#1417: what was switched off is off."""
    desk = open_desk(Throttle(admission=None))
    gate = asyncio.Event()
    for _ in range(200):
        desk.call(body=until(gate))
    await settle()
    assert desk.running == 200
    gate.set()
    await desk.everybody()
    assert desk.outcomes() == ["ok"] * 200


async def test_two_servers_have_two_admissions() -> None:
    """Kludex/uvicorn#1811: the wrong thing may also be somebody else's."""
    guards = [Guard(small(2, 0, 0)) for _ in range(2)]
    for guard in guards:
        guard.use_clock(VirtualClock())
    gate = asyncio.Event()
    tasks = [asyncio.create_task(guard.run(Call("t"), FREE, gate.wait)) for guard in guards for _ in range(2)]
    await settle()
    gate.set()
    assert await asyncio.gather(*tasks) == [True] * 4
