from __future__ import annotations

import asyncio
import logging

import pytest

from frontmcp_py.call import Call
from frontmcp_py.errors import Overloaded
from frontmcp_py.policy import Admission, Concurrency, Policy, Throttle
from frontmcp_py.testing import settle, virtual_time
from tests.guard.support import FREE, Held, code_of, hold, new_guard, now, once, refusal
from tests.reconcile import adds_up

CONTROL = Policy(priority="control")


def admitting(
    max_active: int = 3, reserved: int = 1, max_queued: int = 2, queue_timeout: float = 9
) -> Throttle:
    return Throttle(admission=Admission(max_active, reserved, max_queued, queue_timeout))


# ------------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("throttle", [None, Throttle()], ids=["no throttle", "throttle"])
@virtual_time
async def test_by_default_40_normal_calls_run_and_8_control_calls_more_and_64_wait(
    throttle: Throttle | None,
) -> None:
    guard = new_guard(throttle)
    normal = [Held(guard, f"tool-{number}") for number in range(120)]
    await settle()
    assert [each.runs for each in normal] == [True] * 40 + [False] * 80
    assert [each.waits for each in normal] == [False] * 40 + [True] * 64 + [False] * 16
    control = [await hold(guard, "stop", CONTROL) for _ in range(8)]
    assert all(each.runs for each in control)
    error = await refusal(once(guard, "stop", CONTROL))
    assert str(error) == "Server overloaded: 48 calls running, 64 waiting. Try again shortly."
    await asyncio.sleep(30)
    error = await normal[40].refusal()
    assert str(error).startswith("Server overloaded: waited 30000ms for a place (48 calls running, ")
    assert [(await each.refusal()).code for each in normal[40:]] == ["OVERLOADED"] * 80
    for each in (*normal[:40], *control):
        await each.end()


@virtual_time
async def test_control_calls_may_use_every_place() -> None:
    guard = new_guard(admitting(max_active=3, reserved=1))
    control = [await hold(guard, "stop", CONTROL) for _ in range(3)]
    assert all(each.runs for each in control)
    waiting = await hold(guard, "x")
    assert waiting.waits
    await control[0].end()
    await settle()
    assert waiting.runs
    for each in (waiting, *control[1:]):
        await each.end()


@virtual_time
async def test_a_place_that_control_took_of_the_normal_ones_is_a_place_less_for_these() -> None:
    guard = new_guard(admitting(max_active=3, reserved=1))
    control = [await hold(guard, "stop", CONTROL) for _ in range(2)]
    normal = [await hold(guard, "x"), await hold(guard, "x")]
    assert [each.runs for each in normal] == [True, False]
    for each in (*control, *normal):
        await each.end()


@virtual_time
async def test_all_tools_share_the_places() -> None:
    guard = new_guard(admitting(max_active=2, reserved=0, max_queued=0))
    running = [await hold(guard, tool) for tool in "ab"]
    assert await code_of(once(guard, "c")) == "OVERLOADED"
    for each in running:
        await each.end()


@virtual_time
async def test_a_timed_out_call_keeps_its_place_until_its_work_ends() -> None:
    guard = new_guard(admitting(max_active=2, reserved=1, max_queued=0))
    held = await hold(guard, "x", Policy(timeout=1))
    assert (await held.refusal()).code == "EXECUTION_TIMEOUT"
    assert await code_of(once(guard, "y")) == "OVERLOADED"
    held.let_go()
    await settle()
    assert await code_of(once(guard, "y")) == "ok"


@virtual_time
async def test_without_admission_as_many_run_as_come() -> None:
    guard = new_guard(Throttle(admission=None))
    running = [Held(guard, "x") for _ in range(500)]
    await settle()
    assert all(each.runs for each in running)
    for each in running:
        await each.end()


# -------------------------------------------------------------------------------------------------- the queue


@virtual_time
async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    guard = new_guard(admitting(max_active=2, reserved=0, max_queued=1))
    running, waiting = [await hold(guard, "x") for _ in range(2)], await hold(guard, "x")
    errors = [await refusal(once(guard, "y")) for _ in range(50)]
    assert now() == 0
    for error in errors:
        assert isinstance(error, Overloaded)
        assert str(error) == "Server overloaded: 2 calls running, 1 waiting. Try again shortly."
        meta = error.meta()
        assert isinstance(after := meta.pop("retryAfterMs"), int)
        assert 800 <= after <= 1200
        meta.pop("errorId")
        assert meta == {"code": "OVERLOADED", "limit": 2, "scope": "admission"}
    # Those who were refused together do not come back together.
    assert len({error.retry_after for error in errors}) > 10
    for each in (*running, waiting):
        await each.end()


@virtual_time
async def test_a_call_that_can_start_needs_no_place_in_the_queue() -> None:
    guard = new_guard(admitting(max_active=3, reserved=1, max_queued=1))
    running, waiting = [await hold(guard, "x") for _ in range(2)], await hold(guard, "x")
    assert await code_of(once(guard, "x")) == "OVERLOADED"
    assert await code_of(once(guard, "stop", CONTROL)) == "ok"
    for each in (*running, waiting):
        await each.end()


@virtual_time
async def test_a_queue_full_of_calls_for_one_slot_does_not_hold_up_others() -> None:
    guard = new_guard(admitting(max_active=10, reserved=0, max_queued=3))
    mutex = Policy(concurrency=Concurrency(1, queue_timeout=5))
    running, *waiting = [await hold(guard, "x", mutex) for _ in range(4)]
    assert await code_of(once(guard, "x", mutex)) == "OVERLOADED"
    assert await code_of(once(guard, "y")) == "ok"
    for each in (running, *waiting):
        await each.end()


@virtual_time
async def test_control_waits_before_normal_and_each_in_order_of_arrival() -> None:
    guard = new_guard(admitting(max_active=2, reserved=0, max_queued=9))
    running = [await hold(guard, "stop", CONTROL) for _ in range(2)]
    waiting = [await hold(guard, *which) for which in [("x", FREE), ("stop", CONTROL)] * 3]
    await running[0].end()
    order = []
    for _ in waiting:
        await settle()
        [place] = [place for place, each in enumerate(waiting) if each.runs]
        order.append(place)
        await waiting[place].end()
    assert order == [1, 3, 5, 0, 2, 4]
    await running[1].end()


@virtual_time
async def test_waiting_longer_than_admission_lets_ends_in_overload() -> None:
    guard = new_guard(admitting(max_active=2, reserved=0, max_queued=1, queue_timeout=0.25))
    running, waiting = [await hold(guard, "x") for _ in range(2)], await hold(guard, "x")
    error = await waiting.refusal()
    assert now() == 0.25
    text = "Server overloaded: waited 250ms for a place (2 calls running, 0 waiting). Try again shortly."
    assert str(error) == text
    assert error.retry_after is not None
    for each in running:
        await each.end()


@virtual_time
async def test_without_a_queue_nobody_waits() -> None:
    guard = new_guard(admitting(max_active=2, reserved=0, max_queued=0))
    running = [await hold(guard, "x") for _ in range(2)]
    error = await refusal(once(guard, "x"))
    assert str(error) == "Server overloaded: 2 calls running, 0 waiting. Try again shortly."
    for each in running:
        await each.end()


@virtual_time
async def test_the_first_time_it_is_full_is_logged_with_the_names_of_the_knobs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = new_guard(admitting(max_active=2, reserved=1, max_queued=0))
    for _ in range(2):
        running = await hold(guard, "x")
        assert await code_of(once(guard, "x")) == "OVERLOADED"
        await running.end()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    for knob in (
        "admission.max_active",
        "admission.reserved",
        "admission.max_queued",
        "admission.queue_timeout",
    ):
        assert knob in record.getMessage()


@virtual_time
async def test_every_call_of_a_flood_is_answered_and_control_comes_through() -> None:
    guard = new_guard()

    async def call(number: int) -> str:
        async def body() -> None:
            await asyncio.sleep(1)

        policy = CONTROL if number % 100 == 0 else FREE
        return await code_of(guard.run(Call("stop" if policy is CONTROL else "x"), policy, body))

    codes = await asyncio.gather(*(call(number) for number in range(800)))
    assert set(codes) == {"ok", "OVERLOADED"}
    assert codes.count("ok") == 40 + 8 + 64
    assert codes[::100] == ["ok"] * 8
    adds_up(guard)
    assert guard.statistics().peak_active == 48
