"""Which limits are in force for a tool, and who shares a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from frontmcp_py.call import Call
from frontmcp_py.errors import ConfigurationError
from frontmcp_py.guard import Guard, Limits
from frontmcp_py.policy import Admission, Concurrency, Policy, RateLimit, Throttle, Timeout
from frontmcp_py.testing import settle, virtual_time
from tests.guard.support import FREE, Held, code_of, hold, new_guard, now, once, refusal

EVERYTHING = Throttle(
    global_rate_limit="100/hour",
    global_concurrency=50,
    default_rate_limit="10/hour",
    default_concurrency=5,
    default_timeout=30,
)


# ------------------------------------------------------------------------------------- own, default, global


def test_a_tool_without_limits_of_its_own_gets_the_defaults_and_the_globals() -> None:
    assert Limits.of(FREE, EVERYTHING) == Limits(
        (RateLimit(10, "1h"),), (Concurrency(5),), Timeout(30), (RateLimit(100, "1h"),), (Concurrency(50),)
    )


def test_a_tools_own_limit_replaces_the_default_of_its_kind_whole() -> None:
    throttle = Throttle(default_rate_limit="10/hour; 100/day", default_timeout=Timeout(30, cancel_after=1))
    limits = Limits.of(Policy("3/minute", timeout=5), throttle)
    assert limits.rates == (RateLimit(3, 60),)
    assert limits.timeout == Timeout(5)
    assert Limits.of(Policy("3/minute"), EVERYTHING).slots == (Concurrency(5),)


def test_none_means_no_limit_of_this_kind_and_globals_stay() -> None:
    policies = (Policy(None, None, None), Policy(None, 0, None))
    for policy in policies:
        limits = Limits.of(policy, EVERYTHING)
        assert (limits.rates, limits.slots, limits.timeout) == ((), (), None)
        assert limits.global_rates == (RateLimit(100, "1h"),)
        assert limits.global_slots == (Concurrency(50),)


def test_control_is_exempt_from_globals_and_defaults_and_keeps_its_own() -> None:
    assert Limits.of(Policy(priority="control"), EVERYTHING) == Limits((), (), None, (), ())
    own = Policy("3/minute", 2, 5, priority="control")
    assert Limits.of(own, EVERYTHING) == Limits((RateLimit(3, 60),), (Concurrency(2),), Timeout(5), (), ())


def test_without_a_throttle_a_tools_own_limits_hold() -> None:
    own = Policy("3/minute", 2, 5)
    assert Limits.of(own, None) == Limits((RateLimit(3, 60),), (Concurrency(2),), Timeout(5), (), ())
    assert Limits.of(FREE, None) == Limits((), (), None, (), ())


def test_a_throttle_that_is_off_leaves_a_tools_own_timeout_only() -> None:
    off = Throttle(
        enabled=False,
        global_rate_limit="1/hour",
        default_concurrency=1,
        default_timeout=30,
        global_concurrency=1,
    )
    assert Limits.of(Policy("3/minute", 2, 5), off) == Limits((), (), Timeout(5), (), ())
    assert Limits.of(FREE, off) == Limits((), (), None, (), ())


@virtual_time
async def test_without_a_throttle_own_limits_and_admission_are_enforced() -> None:
    guard = new_guard()
    assert await code_of(once(guard, "x", Policy("1/hour"))) == "ok"
    assert await code_of(once(guard, "x", Policy("1/hour"))) == "RATE_LIMIT_EXCEEDED"
    running = [Held(guard, f"tool-{number}") for number in range(105)]
    await settle()
    assert (await running[104].refusal()).code == "OVERLOADED"
    for each in running[:104]:
        each.let_go()
    await asyncio.gather(*(each.task for each in running[:104]))


@virtual_time
async def test_a_throttle_that_is_off_enforces_nothing_but_own_timeouts_and_the_end() -> None:
    guard = new_guard(
        Throttle(
            enabled=False,
            global_rate_limit="1/hour",
            global_concurrency=1,
            default_rate_limit="1/hour",
            default_timeout=1,
            admission=Admission(max_active=2, reserved=0, max_queued=0),
        )
    )
    async with guard:
        running = [await hold(guard, "x", Policy("1/hour", 1)) for _ in range(5)]
        timed = await hold(guard, "y", Policy(timeout=3))
        await asyncio.sleep(2)
        assert all(each.runs for each in running)
        assert (await timed.refusal()).code == "EXECUTION_TIMEOUT"
        assert now() == 3
        for each in (*running, timed):
            each.let_go()
        await settle()
        running = [await hold(guard, "x")]
        closing = asyncio.create_task(guard.__aexit__(None, None, None))
        await settle()
        assert str(await refusal(once(guard, "x"))) == "Server overloaded: shutting down. Try again shortly."
        await running[0].end()
        await closing
        await guard.__aenter__()


@virtual_time
async def test_a_control_call_passes_globals_and_defaults_but_not_its_own_limits() -> None:
    guard = new_guard(
        Throttle(
            global_rate_limit="1/hour",
            global_concurrency=1,
            default_rate_limit="1/hour",
            default_concurrency=1,
            default_timeout=1,
        )
    )
    busy = await hold(guard, "x", Policy(timeout=None))
    stop = Policy(priority="control")
    running = [await hold(guard, "stop", stop) for _ in range(3)]
    await asyncio.sleep(2)
    assert all(each.runs for each in running)
    own = Policy("2/hour", 1, priority="control")
    held = await hold(guard, "own", own)
    assert await code_of(once(guard, "own", own)) == "CONCURRENCY_LIMIT"
    await held.end()
    assert await code_of(once(guard, "own", own)) == "ok"
    assert await code_of(once(guard, "own", own)) == "RATE_LIMIT_EXCEEDED"
    # Nor have they consumed anything of the globals: the one normal call has.
    assert guard.statistics().places == 4
    for each in (busy, *running):
        await each.end()


# ------------------------------------------------------------------------------- keys and names are one space


def key(name: str, number: int = 1, **options: object) -> Policy:
    return Policy(concurrency=Concurrency(number, key=name, **options))  # type: ignore[arg-type]


async def shares(guard: Guard, one: tuple[str, Policy], other: tuple[str, Policy]) -> bool:
    """Whether a running call of the one keeps the other out."""
    running = await hold(guard, *one)
    assert running.runs
    code = await code_of(once(guard, *other))
    await running.end()
    return code == "CONCURRENCY_LIMIT"


@virtual_time
async def test_a_key_joins_the_limit_of_the_tool_of_that_name() -> None:
    guard = new_guard()
    export, helper = ("export", Policy(concurrency=1)), ("helper", key("export"))
    assert await shares(guard, export, helper)
    assert await shares(guard, helper, export)


@virtual_time
async def test_a_key_joins_the_default_limit_of_the_tool_of_that_name() -> None:
    guard = new_guard(Throttle(default_concurrency=1))
    assert await shares(guard, ("export", FREE), ("helper", key("export")))


@virtual_time
async def test_a_key_that_is_the_name_of_a_tool_without_a_limit_stands_alone() -> None:
    guard = new_guard()
    for export in (("export", FREE), ("export", key("other"))):
        assert not await shares(guard, export, ("helper", key("export")))
        assert await shares(guard, ("helper", key("export")), ("another", key("export")))


@virtual_time
async def test_only_the_first_limit_without_a_key_can_be_joined() -> None:
    guard = new_guard()
    by_user = Concurrency(1, partition_by="user_id")
    export = Policy(concurrency=[Concurrency(9, key="k"), by_user, Concurrency(1)])
    assert await shares(
        guard,
        ("export", export),
        ("x", Policy(concurrency=Concurrency(1, key="export", partition_by="user_id"))),
    )
    assert not await shares(
        guard, ("export", export), ("y", Policy(concurrency=Concurrency(1, key="export.1")))
    )
    # Its third limit is its own: a mutex of export, and of nobody else.
    assert await shares(guard, ("export", export), ("export", export))


@virtual_time
async def test_limits_of_one_tool_do_not_share_slots() -> None:
    guard = new_guard()
    policy = Policy(concurrency=[Concurrency(2), Concurrency(2)])
    running = [await hold(guard, "x", policy) for _ in range(2)]
    assert all(each.runs for each in running)
    for each in running:
        await each.end()


@virtual_time
async def test_nobody_can_name_the_global_slot() -> None:
    guard = new_guard(Throttle(global_concurrency=1))
    running = await hold(guard, "global", Policy(concurrency=1))
    assert (await refusal(once(guard, "other", key("global")))).scope == "global"
    await running.end()


@virtual_time
async def test_zero_with_a_key_limits_nothing() -> None:
    guard = new_guard()
    running = [await hold(guard, tool, key("k", 0)) for tool in ("a", "b", "a")]
    assert all(each.runs for each in running)
    for each in running:
        await each.end()


# ------------------------------------------------------------------------------------------------- agreement


def disagreement(*tools: tuple[str, Policy], throttle: Throttle | None = None) -> str:
    guard = Guard(throttle)

    def bind_all() -> None:
        for tool, policy in tools:
            guard.bind(tool, policy)

    with pytest.raises(ConfigurationError) as caught:
        bind_all()
    return str(caught.value)


def by_tool(call: Call) -> str:
    return call.tool


PARTITIONS: list[Callable[[Call], str]] = [lambda _: "all", lambda _: "all"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Concurrency(1, key="k"), Concurrency(2, key="k")),
        (Concurrency(1, key="k"), Concurrency(0, key="k")),
        (Concurrency(1, key="k"), Concurrency(1, key="k", partition_by="user_id")),
        (Concurrency(1, key="k", partition_by="ip"), Concurrency(1, key="k", partition_by="session")),
        (Concurrency(1, key="k", partition_by=by_tool), Concurrency(1, key="k", partition_by="ip")),
        (
            Concurrency(1, key="k", partition_by=PARTITIONS[0]),
            Concurrency(1, key="k", partition_by=PARTITIONS[1]),
        ),
    ],
)
def test_whoever_names_a_key_has_to_agree_about_it(one: Concurrency, other: Concurrency) -> None:
    for pair in ((one, other), (other, one)):
        message = disagreement(*zip("ab", (Policy(concurrency=each) for each in pair), strict=True))
        for named in ('"k"', '"a"', '"b"', "max_concurrent", "partition_by"):
            assert named in message


def test_every_tool_that_is_involved_is_named() -> None:
    message = disagreement(("a", key("k")), ("b", key("k")), ("c", key("other")), ("d", key("k", 2)))
    assert all(f'"{tool}"' in message for tool in "abd")
    assert '"c"' not in message


def test_the_tool_of_the_keys_name_has_to_agree_too() -> None:
    for tools in (
        [("export", Policy(concurrency=2)), ("helper", key("export"))],
        [("helper", key("export")), ("export", Policy(concurrency=2))],
    ):
        message = disagreement(*tools)
        assert all(
            named in message for named in ('"export"', '"helper"', "max_concurrent=2", "max_concurrent=1")
        )


def test_so_has_its_default() -> None:
    throttle = Throttle(default_concurrency=2)
    for tools in (
        [("export", FREE), ("helper", key("export"))],
        [("helper", key("export")), ("export", FREE)],
    ):
        assert "max_concurrent=2" in disagreement(*tools, throttle=throttle)


def test_a_disagreement_does_not_hide_while_limits_are_off() -> None:
    assert '"k"' in disagreement(("a", key("k")), ("b", key("k", 2)), throttle=Throttle(enabled=False))
    assert '"k"' in disagreement(("a", key("k")), ("b", key("k", 2)), throttle=Throttle(mode="observe"))


def test_how_long_and_with_how_many_a_tool_waits_is_its_own() -> None:
    guard = Guard()
    guard.bind("a", key("k", queue_timeout=5, max_queued=3))
    guard.bind("b", key("k", queue_timeout=0))
    guard.bind("c", key("k", queue_timeout=None, max_queued=0))


def test_the_same_function_is_an_agreement() -> None:
    guard = Guard()
    guard.bind("a", key("k", partition_by=by_tool))
    guard.bind("b", key("k", partition_by=by_tool))


def test_a_tool_that_is_gone_binds_nobody() -> None:
    guard = Guard()
    guard.bind("a", key("k"))
    guard.unbind("a")
    guard.bind("b", key("k", 2))
    guard.bind("a", key("k", 2))


def test_a_tool_that_was_refused_binds_nobody() -> None:
    guard = Guard()
    guard.bind("a", key("k"))
    with pytest.raises(ConfigurationError):
        guard.bind("b", Policy(concurrency=[Concurrency(3, key="other"), Concurrency(2, key="k")]))
    guard.bind("c", key("other", 7))
    assert "b" not in guard.statistics().tools


def test_a_call_holds_one_place_of_a_slot_only() -> None:
    guard = Guard()
    with pytest.raises(ConfigurationError, match='tool "x": concurrency names the slot "x" twice'):
        guard.bind("x", Policy(concurrency=[Concurrency(1), Concurrency(1, key="x")]))


@virtual_time
async def test_a_policy_that_disagrees_is_refused_by_run_as_well() -> None:
    guard = new_guard()
    await once(guard, "a", key("k"))
    with pytest.raises(ConfigurationError, match='concurrency key "k"'):
        await once(guard, "b", key("k", 2))
    assert guard.statistics().counts.submitted == 1


@virtual_time
async def test_a_tool_may_be_bound_anew_with_another_number() -> None:
    guard = new_guard()
    guard.bind("x", Policy(concurrency=1))
    guard.unbind("x")
    plan = guard.bind("x", Policy(concurrency=2))
    began = 0

    async def body(_: object) -> None:
        nonlocal began
        began += 1
        await asyncio.sleep(1)

    await asyncio.gather(*(guard.call(plan, Call("x"), body) for _ in range(2)))
    assert (began, now()) == (2, 1)


@pytest.mark.parametrize(
    "limit", [Concurrency(1, queue_timeout=None), Concurrency(1, key="k", queue_timeout=None)]
)
def test_a_wait_without_an_end_names_the_tool(limit: Concurrency) -> None:
    guard = Guard(Throttle(admission=None))
    with pytest.raises(ConfigurationError, match='tool "x": concurrency: queue_timeout None is not allowed'):
        guard.bind("x", Policy(concurrency=limit))
    Guard(Throttle(admission=None, enabled=False)).bind("x", Policy(concurrency=limit))
    Guard(Throttle(admission=None, mode="observe")).bind("x", Policy(concurrency=limit))
    Guard().bind("x", Policy(concurrency=limit))
