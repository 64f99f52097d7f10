from __future__ import annotations

import asyncio
from itertools import permutations

import pytest

from frontmcp_py.call import Call
from frontmcp_py.errors import ConcurrencyLimit, GuardError, Overloaded, QueueTimeout
from frontmcp_py.policy import Admission, Concurrency, Policy, Throttle
from frontmcp_py.signal import AbortSignal
from frontmcp_py.testing import settle, virtual_time
from tests.guard.support import Held, code_of, hold, new_guard, now, once, refusal
from tests.reconcile import adds_up

MUTEX = Policy(concurrency=1)
PATIENT = Policy(concurrency=Concurrency(1, queue_timeout=5))


def named(key: str, number: int = 1, **options: float | None) -> Policy:
    """One slot that is shared by name."""
    return Policy(concurrency=Concurrency(number, key=key, **options))  # type: ignore[arg-type]


async def served(waiting: list[Held]) -> list[int]:
    """The places in the queue in the order in which they are served, each ended when it runs."""
    order: list[int] = []
    while len(order) < len(waiting):
        await settle()
        [place] = [place for place, each in enumerate(waiting) if each.runs]
        order.append(place)
        await waiting[place].end()
    return order


# -------------------------------------------------------------------------------- taken, and given back


@virtual_time
async def test_a_call_that_finds_no_free_slot_is_refused_at_once() -> None:
    guard = new_guard()
    policy = Policy(concurrency=2)
    running = [await hold(guard, "merge", policy) for _ in range(2)]
    error = await refusal(once(guard, "merge", policy))
    assert now() == 0
    assert isinstance(error, ConcurrencyLimit)
    assert str(error) == 'Concurrency limit reached for "merge" (max: 2)'
    meta = error.meta()
    assert meta == {"errorId": error.error_id, "code": "CONCURRENCY_LIMIT", "limit": 2, "scope": "tool"}
    for each in running:
        await each.end()


@pytest.mark.parametrize("outcome", ["success", "failure", "cancelled", "timed out"])
@virtual_time
async def test_the_slot_is_given_back_however_the_work_ends(outcome: str) -> None:
    guard = new_guard()
    policy = Policy(concurrency=1, timeout=10, on_cancel="cancel")

    async def body() -> None:
        await asyncio.sleep(1)
        if outcome == "failure":
            raise RuntimeError("the tool's own")
        if outcome == "timed out":
            await asyncio.sleep(30)

    call = asyncio.create_task(guard.run(Call("x"), policy, body))
    await asyncio.sleep(0.5)
    assert await code_of(once(guard, "x", policy)) == "CONCURRENCY_LIMIT"
    if outcome == "cancelled":
        call.cancel()
    await asyncio.wait([call])
    assert call.cancelled() or outcome == "success" or call.exception() is not None
    # A timeout ends the call and not the work, which ends at 31 s.
    while now() < 31 and outcome == "timed out":
        assert await code_of(once(guard, "x", policy)) == "CONCURRENCY_LIMIT"
        await asyncio.sleep(0.5)
    assert await code_of(once(guard, "x", policy)) == "ok"


@virtual_time
async def test_at_most_as_many_run_as_may_and_all_of_them_do() -> None:
    guard = new_guard(Throttle(admission=None))
    policy = Policy(concurrency=Concurrency(3, queue_timeout=1000))
    running, most, began = 0, 0, []

    async def body() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        began.append(now())
        await asyncio.sleep(1)
        running -= 1

    await asyncio.gather(*(guard.run(Call("x"), policy, body) for _ in range(30)))
    assert most == 3
    assert began == [float(second) for second in range(10) for _ in range(3)]


# ----------------------------------------------------------------------------------- first come, first served


@virtual_time
async def test_waiters_are_served_in_the_order_in_which_they_came() -> None:
    guard = new_guard()
    running, *waiting = [await hold(guard, "x", PATIENT) for _ in range(5)]
    await running.end()
    assert await served(waiting) == [0, 1, 2, 3]


@virtual_time
async def test_a_freed_slot_goes_to_the_waiter_before_anybody_else_is_asked() -> None:
    guard = new_guard()
    running, waiting = await hold(guard, "x", PATIENT), await hold(guard, "x", PATIENT)
    running.let_go()
    newcomers = [Held(guard, "x", PATIENT) for _ in range(3)]
    await running.task
    newcomers.append(Held(guard, "x", PATIENT))
    await settle()
    assert waiting.runs
    assert all(newcomer.waits for newcomer in newcomers)
    assert await served([waiting, *newcomers]) == [0, 1, 2, 3, 4]


@virtual_time
async def test_a_slot_is_handed_over_without_time_passing_and_without_polling() -> None:
    guard = new_guard()
    running, waiting = await hold(guard, "x", PATIENT), await hold(guard, "x", PATIENT)
    await asyncio.sleep(1.25)
    await running.end()
    await settle()
    assert waiting.began == running.ended == 1.25
    await waiting.end()


@virtual_time
async def test_everybody_who_can_start_does_when_something_frees() -> None:
    guard = new_guard()
    both = Policy(
        concurrency=[Concurrency(1, key="a", queue_timeout=9), Concurrency(1, key="b", queue_timeout=9)]
    )
    running = await hold(guard, "both", both)
    a, b = [await hold(guard, key, named(key, queue_timeout=9)) for key in ("a", "b")]
    await running.end()
    await settle()
    assert (a.runs, b.runs) == (True, True)
    await a.end()
    await b.end()


@virtual_time
async def test_control_comes_before_normal_and_arrival_decides_among_equals() -> None:
    guard = new_guard()
    slot = Concurrency(1, key="k", queue_timeout=9)
    normal, control = Policy(concurrency=slot), Policy(concurrency=slot, priority="control")
    running = await hold(guard, "normal", normal)
    waiting = [await hold(guard, *which) for which in [("normal", normal), ("control", control)] * 2]
    await running.end()
    assert await served(waiting) == [1, 3, 0, 2]


# -------------------------------------------------------------------------------- who is told what, and when


@virtual_time
async def test_a_waiter_is_refused_when_its_time_is_up() -> None:
    guard = new_guard()
    running, waiting = await hold(guard, "merge", PATIENT), await hold(guard, "merge", PATIENT)
    error = await waiting.refusal()
    assert now() == 5
    assert isinstance(error, QueueTimeout)
    assert str(error) == 'Queue timeout for "merge" after waiting 5000ms for a concurrency slot'
    assert error.meta() == {"errorId": error.error_id, "code": "QUEUE_TIMEOUT", "limit": 1, "scope": "tool"}
    await running.end()


@pytest.mark.parametrize(("seconds", "text"), [(0.25, "250ms"), (0.0015, "1.5ms"), (0.0004, "0.4ms")])
@virtual_time
async def test_the_time_that_it_waited_is_told_exactly(seconds: float, text: str) -> None:
    guard = new_guard()
    policy = Policy(concurrency=Concurrency(1, queue_timeout=seconds))
    running, waiting = await hold(guard, "x", policy), await hold(guard, "x", policy)
    assert f" {text} " in str(await waiting.refusal())
    await running.end()


@virtual_time
async def test_without_a_time_of_its_own_a_call_waits_as_long_as_admission_lets_it() -> None:
    guard = new_guard()
    policy = Policy(concurrency=Concurrency(1, queue_timeout=None))
    running, waiting = await hold(guard, "x", policy), await hold(guard, "x", policy)
    error = await waiting.refusal()
    assert now() == 30
    assert isinstance(error, Overloaded)
    text = "Server overloaded: waited 30000ms for a place (1 calls running, 0 waiting). Try again shortly."
    assert str(error) == text
    await running.end()


@virtual_time
async def test_max_queued_bounds_the_waiters_of_the_limit() -> None:
    guard = new_guard()
    policy = Policy(concurrency=Concurrency(1, queue_timeout=5, max_queued=2))
    running, *waiting = [await hold(guard, "x", policy) for _ in range(3)]
    error = await refusal(once(guard, "x", policy))
    assert (error.code, error.limit) == ("CONCURRENCY_LIMIT", 1)
    await running.end()
    waiting.append(await hold(guard, "x", policy))
    assert waiting[-1].waits
    for each in waiting:
        await each.end()


@virtual_time
async def test_max_queued_of_none_at_all_lets_nobody_wait() -> None:
    guard = new_guard()
    policy = Policy(concurrency=Concurrency(1, queue_timeout=5, max_queued=0))
    running = await hold(guard, "x", policy)
    assert (await refusal(once(guard, "x", policy))).code == "CONCURRENCY_LIMIT"
    await running.end()


@virtual_time
async def test_the_arriving_tools_max_queued_counts_all_waiters_on_the_key() -> None:
    guard = new_guard()
    wide, narrow = named("k", queue_timeout=5, max_queued=9), named("k", queue_timeout=5, max_queued=2)
    running = await hold(guard, "wide", wide)
    waiting = [await hold(guard, "wide", wide), await hold(guard, "wide", wide)]
    assert await code_of(once(guard, "narrow", narrow)) == "CONCURRENCY_LIMIT"
    waiting.append(await hold(guard, "wide", wide))
    for each in (running, *waiting):
        await each.end()


@virtual_time
async def test_the_queue_timeout_is_each_tools_own() -> None:
    guard = new_guard()
    running = await hold(guard, "a", named("k"))
    slow, quick = (
        await hold(guard, "b", named("k", queue_timeout=9)),
        await hold(guard, "c", named("k", queue_timeout=3)),
    )
    assert await code_of(once(guard, "d", named("k"))) == "CONCURRENCY_LIMIT"
    assert (await quick.refusal()).code == "QUEUE_TIMEOUT"
    assert now() == 3
    assert (await slow.refusal()).code == "QUEUE_TIMEOUT"
    assert now() == 9
    await running.end()


# ------------------------------------------------------------------------ how long, is fixed on arrival


def two(a: float | None, b: float | None) -> Policy:
    return Policy(
        concurrency=[Concurrency(1, key="a", queue_timeout=a), Concurrency(1, key="b", queue_timeout=b)]
    )


def admitting(seconds: float) -> Throttle:
    return Throttle(admission=Admission(max_active=10, reserved=0, queue_timeout=seconds))


@pytest.mark.parametrize(
    ("busy", "timeouts", "admission", "waited", "code", "limit"),
    [
        ("a", (7, 3), 30, 7, "QUEUE_TIMEOUT", 1),  # b has room, so its time does not matter
        ("b", (7, 3), 30, 3, "QUEUE_TIMEOUT", 1),
        ("ab", (7, 3), 30, 3, "QUEUE_TIMEOUT", 1),
        ("ab", (3, 7), 30, 3, "QUEUE_TIMEOUT", 1),
        ("ab", (7, 3), 2, 2, "OVERLOADED", 10),  # admission's is the smallest
        ("ab", (7, 3), 3, 3, "QUEUE_TIMEOUT", 1),  # a tie
        ("ab", (3, 3), 30, 3, "QUEUE_TIMEOUT", 1),
        ("a", (None, 3), 6, 6, "OVERLOADED", 10),
        ("ab", (None, 3), 6, 3, "QUEUE_TIMEOUT", 1),
        ("a", (7, 0), 30, 7, "QUEUE_TIMEOUT", 1),
        ("ab", (7, 0), 30, 0, "CONCURRENCY_LIMIT", 1),
    ],
)
@virtual_time
async def test_the_shortest_time_of_what_has_no_room_counts_and_gives_the_code(
    busy: str,
    timeouts: tuple[float | None, float | None],
    admission: float,
    waited: float,
    code: str,
    limit: int,
) -> None:
    guard = new_guard(admitting(admission))
    running = [await hold(guard, key, named(key)) for key in busy]
    waiting = await hold(guard, "x", two(*timeouts))
    error = await waiting.refusal()
    assert (now(), error.code, error.limit) == (waited, code, limit)
    if code == "QUEUE_TIMEOUT":
        assert (error.scope, f" {1000 * waited:.0f}ms " in str(error)) == ("key", True)
    for each in running:
        await each.end()


@virtual_time
async def test_later_obstacles_change_nothing() -> None:
    guard = new_guard()
    holds_a = await hold(guard, "a", named("a"))
    waiting = await hold(guard, "x", two(7, 3))
    # The first in a line keeps a place there; only control may take it, and does.
    control = Policy(concurrency=Concurrency(1, key="b"), priority="control")
    holds_b = await hold(guard, "b", control)
    await asyncio.sleep(1)
    await holds_a.end()
    error = await waiting.refusal()
    assert (now(), error.code) == (7, "QUEUE_TIMEOUT")
    await holds_b.end()


@virtual_time
async def test_a_kept_place_is_no_room() -> None:
    guard = new_guard()
    holds_a = await hold(guard, "a", named("a"))
    first = await hold(guard, "x", two(9, 9))
    # b is free, but kept for the first of its line.
    assert await code_of(once(guard, "b", named("b"))) == "CONCURRENCY_LIMIT"
    behind = await hold(guard, "b2", named("b", queue_timeout=4))
    assert (await behind.refusal()).code == "QUEUE_TIMEOUT"
    assert now() == 4
    # Control may take it from a normal one.
    assert (
        await code_of(once(guard, "c", Policy(concurrency=Concurrency(1, key="b"), priority="control")))
        == "ok"
    )
    await holds_a.end()
    await first.end()


@virtual_time
async def test_control_does_not_take_the_place_that_another_control_call_keeps() -> None:
    guard = new_guard()
    slots = [Concurrency(1, key="a", queue_timeout=9), Concurrency(1, key="b", queue_timeout=9)]
    holds_a = await hold(guard, "a", named("a"))
    first = await hold(guard, "x", Policy(concurrency=slots, priority="control"))
    for newcomer in (Policy(concurrency=Concurrency(1, key="b"), priority="control"), named("b")):
        assert await code_of(once(guard, f"b-{newcomer.priority}", newcomer)) == "CONCURRENCY_LIMIT"
    await holds_a.end()
    await first.end()


@virtual_time
async def test_only_the_first_of_a_line_keeps_a_place_there() -> None:
    guard = new_guard()
    roomy = Concurrency(3, key="roomy", queue_timeout=9)
    holds_a = await hold(guard, "a", named("a"))
    stuck = Policy(concurrency=[Concurrency(1, key="a", queue_timeout=9), roomy])
    waiting = [await hold(guard, "x", stuck) for _ in range(5)]
    # Five wait in the line of three places; one of these is kept, two may be taken by who comes later.
    passing = [await hold(guard, "y", Policy(concurrency=roomy)) for _ in range(3)]
    assert [each.runs for each in passing] == [True, True, False]
    for each in passing[:2]:
        await each.end()
    await holds_a.end()
    for each in (*waiting, passing[2]):
        await each.end()


@virtual_time
async def test_calls_that_share_no_slot_do_not_wait_for_each_other() -> None:
    guard = new_guard()
    running = await hold(guard, "a", named("a"))
    waiting = [await hold(guard, "a", named("a", queue_timeout=9)) for _ in range(20)]
    assert await code_of(once(guard, "b", named("b"))) == "ok"
    for each in waiting:
        each.task.cancel()
    await running.end()


@virtual_time
async def test_a_call_that_admission_alone_holds_up_waits_even_if_it_would_not_wait_for_its_slot() -> None:
    guard = new_guard(Throttle(admission=Admission(max_active=2, reserved=0, queue_timeout=7)))
    running = [await hold(guard, "y") for _ in range(2)]
    first, second = await hold(guard, "x", MUTEX), await hold(guard, "z", MUTEX)
    assert (first.waits, second.waits) == (True, True)
    error = await first.refusal()
    assert (now(), error.code, error.scope, error.limit) == (7, "OVERLOADED", "admission", 2)
    assert str(error).startswith("Server overloaded: waited 7000ms for a place (2 calls running, ")
    await second.refusal()
    for each in running:
        await each.end()


# ----------------------------------------------------------------------------------------- keys and globals


@virtual_time
async def test_tools_that_name_a_key_share_its_slots_and_each_is_told_its_own_name() -> None:
    guard = new_guard()
    running = await hold(guard, "a", named("shell"))
    error = await refusal(once(guard, "b", named("shell")))
    assert (str(error), error.scope) == ('Concurrency limit reached for "b" (max: 1)', "key")
    waiting = await hold(guard, "c", named("shell", queue_timeout=2))
    assert '"c"' in str(await waiting.refusal())
    await running.end()


@virtual_time
async def test_a_key_without_a_number_is_a_mutex() -> None:
    guard = new_guard()
    policy = Policy(concurrency={"key": "shell"})
    running = await hold(guard, "a", policy)
    assert (await refusal(once(guard, "b", policy))).limit == 1
    await running.end()


@virtual_time
async def test_global_concurrency_is_a_slot_for_all_tools_together() -> None:
    guard = new_guard(Throttle(global_concurrency=Concurrency(2, queue_timeout=5)))
    running = [await hold(guard, tool) for tool in "ab"]
    waiting = await hold(guard, "c")
    error = await waiting.refusal()
    assert (str(error), error.scope, error.limit) == (
        'Queue timeout for "c" after waiting 5000ms for a concurrency slot',
        "global",
        2,
    )
    for each in running:
        await each.end()


@virtual_time
async def test_default_concurrency_is_for_each_tool_alone() -> None:
    guard = new_guard(Throttle(default_concurrency=1))
    a, b = await hold(guard, "a"), await hold(guard, "b")
    assert (a.runs, b.runs) == (True, True)
    error = await refusal(once(guard, "a"))
    assert (error.scope, error.limit) == ("tool", 1)
    await a.end()
    await b.end()


# ------------------------------------------------------------------------------------- waiters that leave


@virtual_time
async def test_a_cancelled_waiter_leaves_in_the_same_turn_of_the_loop() -> None:
    guard = new_guard()
    policy = Policy(concurrency=Concurrency(1, queue_timeout=5, max_queued=1))
    running, waiting = await hold(guard, "x", policy), await hold(guard, "x", policy)
    signal = AbortSignal()
    waiting.task.cancel()
    await asyncio.wait([waiting.task])
    signalled = await hold(guard, "x", policy, signal=signal)
    assert guard.statistics().waiting == 1
    signal.abort()
    assert guard.statistics().waiting == 0
    assert (await signalled.refusal()).code == "CANCELLED"
    assert (waiting.began, signalled.began) == (None, None)
    counts = guard.statistics().counts
    assert (counts.cancelled_waiting, counts.started, counts.accepted) == (2, 1, 3)
    await running.end()


@virtual_time
async def test_who_leaves_lets_those_behind_start() -> None:
    guard = new_guard()
    holds_a = await hold(guard, "a", named("a"))
    first = await hold(guard, "x", two(9, 9))
    behind = await hold(guard, "b", named("b", queue_timeout=9))
    assert behind.waits
    first.task.cancel()
    await settle()
    assert behind.runs
    await behind.end()
    await holds_a.end()


@virtual_time
async def test_who_times_out_lets_those_behind_start() -> None:
    guard = new_guard()
    holds_a = await hold(guard, "a", named("a"))
    first = await hold(guard, "x", two(3, 9))
    behind = await hold(guard, "b", named("b", queue_timeout=9))
    await first.refusal()
    await settle()
    assert (now(), behind.began) == (3, 3)
    await behind.end()
    await holds_a.end()


EVENTS = ("ends", "cancelled", "aborted", "expires")


@pytest.mark.parametrize("order", list(permutations(EVENTS, 3)), ids="-".join)
@virtual_time
async def test_a_slot_that_frees_in_the_instant_in_which_a_wait_ends_is_used_or_passed_on(
    order: tuple[str, ...],
) -> None:
    guard, signal, loop = new_guard(), AbortSignal(), asyncio.get_running_loop()
    running = await hold(guard, "x", PATIENT)
    begun: list[Held] = []

    def cancel() -> None:
        begun[0].task.cancel()

    # What is set for one moment happens in the order in which it was set.
    for event in (*order, "expires"):
        if event != "expires":
            loop.call_at(5, {"ends": running.let_go, "cancelled": cancel, "aborted": signal.abort}[event])
        elif not begun:
            begun.append(await hold(guard, "x", PATIENT, signal=signal))
    [first] = begun
    await asyncio.sleep(0.5)
    second = await hold(guard, "x", PATIENT)
    await asyncio.sleep(4.5)
    await settle()
    running.let_go()
    await settle()
    # Exactly one answer for the first, and the slot is not lost.
    assert first.runs or first.task.done()
    if first.runs:
        await first.end()
        await settle()
    elif not first.task.cancelled():
        error = first.task.exception()
        assert isinstance(error, GuardError)
        assert error.code in ("QUEUE_TIMEOUT", "CANCELLED")
    assert second.runs
    await second.end()
    adds_up(guard)


@pytest.mark.parametrize("leaves", ["cancelled", "aborted", "both"])
@pytest.mark.parametrize("turns", range(6))
@virtual_time
async def test_a_slot_that_is_just_being_handed_over_goes_to_the_next(leaves: str, turns: int) -> None:
    guard, signal = new_guard(), AbortSignal()
    policy = Policy("3/hour", Concurrency(1, queue_timeout=5), on_cancel="cancel")
    running = await hold(guard, "x", policy)
    first = await hold(guard, "x", policy, signal=signal)
    second = await hold(guard, "x", policy)
    running.let_go()
    # Every moment between the end of the one and the begin of the other.
    for _ in range(turns):
        await asyncio.sleep(0)
    if leaves != "aborted":
        first.task.cancel()
    if leaves != "cancelled":
        signal.abort()
    await asyncio.wait([first.task])
    assert first.task.cancelled() or first.task.exception() is not None
    await settle()
    assert second.runs
    await second.end()
    adds_up(guard)
    counts = guard.statistics().counts
    if first.began is None:
        # It never ran, so it is not counted, neither as started nor by its rate limit.
        assert (counts.started, counts.cancelled_waiting, counts.cancelled) == (2, 1, 0)
        assert await code_of(once(guard, "x", policy)) == "ok"
    else:
        assert (counts.started, counts.cancelled_waiting, counts.cancelled) == (3, 0, 1)
    assert await code_of(once(guard, "x", policy)) == "RATE_LIMIT_EXCEEDED"


@virtual_time
async def test_nobody_is_there_to_take_a_turn_so_the_next_one_does() -> None:
    guard = new_guard()
    running = await hold(guard, "x", PATIENT)
    waiting = [await hold(guard, "x", PATIENT) for _ in range(4)]
    running.let_go()
    for each in waiting[:3]:
        each.task.cancel()
    await settle()
    assert waiting[3].runs
    await waiting[3].end()


# -------------------------------------------------------------------------------------------- by the way


@virtual_time
async def test_the_most_that_ever_waited_is_remembered() -> None:
    guard = new_guard()
    running, *waiting = [await hold(guard, "x", PATIENT) for _ in range(4)]
    for each in (running, *waiting):
        await each.end()
    statistics = guard.statistics()
    assert (statistics.peak_waiting, statistics.waiting, statistics.peak_active) == (3, 0, 1)


@virtual_time
async def test_a_wait_for_ever_is_a_mistake_where_admission_is_off() -> None:
    guard = new_guard(Throttle(admission=None))
    with pytest.raises(ValueError, match="queue_timeout None is not allowed with admission off"):
        await once(guard, "x", Policy(concurrency=Concurrency(1, queue_timeout=None)))
