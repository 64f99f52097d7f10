"""Who shares a count? Keys that collide, keys that callers mint, and keys that nobody ever forgets."""

from __future__ import annotations

import asyncio
import gc
import itertools
import tracemalloc
from collections.abc import Callable

import pytest

from frontmcp_py import (
    Call,
    Caller,
    Concurrency,
    ConfigurationError,
    FrontMCP,
    Guard,
    PartitionError,
    Policy,
    RateLimit,
    RateLimitExceeded,
    Throttle,
    tool,
)
from frontmcp_py.policy import Partition, PartitionBy, Strategy
from frontmcp_py.storage import WindowCounts
from frontmcp_py.testing import settle
from tests.cases.asgi import call, call_in_session, code_of_call, open_session, serving
from tests.cases.desk import Desk, conc

OpenDesk = Callable[..., Desk]

STRATEGIES: list[Strategy] = ["fixed-window", "moving-window", "sliding-window"]


def user(name: str) -> Caller:
    return Caller(user_id=name)


async def nothing() -> None:
    return


async def passes(guard: Guard, policy: Policy, caller: Caller, tool: str = "tool") -> bool:
    """One call without any work; whether its rate limit has room."""
    try:
        await guard.run(Call(tool, {}, caller), policy, nothing)
    except RateLimitExceeded:
        return False
    return True


# ------------------------------------------------------------------------------ keys that nobody forgets


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("subjects", [3_000, pytest.param(200_000, marks=pytest.mark.slow)])
async def test_idle_subjects_are_forgotten(desk: Desk, strategy: Strategy, subjects: int) -> None:
    """PrefectHQ/fastmcp#4057, boinkor-net/governor#171: one entry for each client, for ever."""
    guard = desk.guard
    policy = Policy(
        RateLimit(5, 1, partition_by="ip", strategy=strategy), Concurrency(2, partition_by="user_id")
    )
    counts = guard._memory.counts
    for number in range(subjects):
        if number % 1000 == 0:
            await asyncio.sleep(0.01)
        address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        assert await passes(guard, policy, Caller(user_id=str(number), client_ip=address))
    assert counts.held > 0
    await asyncio.sleep(5)
    # Others call, whose keys are few: what has expired goes with their calls, a few with each.
    for _ in range(subjects // 64 + 3):
        await passes(guard, policy, user("somebody else"))
    assert counts.held <= 2
    assert stored(counts) <= 2
    assert guard._scheduler.live_slots == 0


def stored(counts: WindowCounts) -> int:
    """How many counts take up memory, expired ones included."""
    return sum(
        [
            *(len(each.counts) for each in counts._fixed.values()),
            *(len(each.counts) + len(each.previous) for each in counts._sliding.values()),
            *(len(each.log) for each in counts._moving.values()),
            *(len(each) for each in counts._discarded),
        ]
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_no_call_pays_for_the_expiry_of_all_others(desk: Desk, strategy: Strategy) -> None:
    """PrefectHQ/fastmcp#4057: a sweep over everything is a stall of the loop."""
    policy = Policy(RateLimit(5, 1, partition_by="user_id", strategy=strategy))
    counts = desk.guard._memory.counts
    for number in range(2_000):
        await passes(desk.guard, policy, user(str(number)))
    await asyncio.sleep(5)
    left = [stored(counts)]
    while left[-1] > 100:
        await passes(desk.guard, policy, user("one"))
        left.append(stored(counts))
    freed = [before - after for before, after in itertools.pairwise(left)]
    assert max(freed) <= 100
    assert min(freed[1:]) >= 50


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_beyond_the_most_subjects_new_ones_share_a_count_and_memory_stays(strategy: Strategy) -> None:
    """IBM/mcp-context-forge#4607: whoever can mint subjects can fill the memory."""
    guard = Guard(Throttle(max_keys=100))
    policy = Policy(RateLimit(3, 3600, partition_by="user_id", strategy=strategy))
    for number in range(100):
        assert await passes(guard, policy, user(f"early {number}"))
    late = [await passes(guard, policy, user(f"late {number}")) for number in range(1_000)]
    assert late.count(True) == 3
    assert guard._memory.counts.held <= 101
    # Nothing live was evicted for them.
    for number in range(100):
        assert [await passes(guard, policy, user(f"early {number}")) for _ in range(3)] == [True, True, False]


async def test_memory_is_bounded_whatever_callers_invent(desk: Desk) -> None:
    """PrefectHQ/fastmcp#4057, Krzysztof318/MailFathom#176: long names, each used once."""
    guard = desk.guard
    policy = Policy(
        RateLimit(5, 1, partition_by=lambda call: str(call.arguments["name"])),
        Concurrency(1, partition_by="user_id"),
    )
    serial = itertools.count()

    async def flood(calls: int) -> None:
        for _ in range(calls):
            long = f"{next(serial)}".ljust(100_000, "x")
            call = Call("tool", {"name": long}, Caller(user_id=long, session_id=long, client_ip=long))
            await guard.run(call, policy, nothing)

    await flood(20)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        await flood(200)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # Twenty megabytes of names have come by.
    assert grown < 500_000


# -------------------------------------------------------------------------------------- keys that collide

ODD_NAMES = [
    "global", "unknown", "anonymous", "unresolved", "overflow", "*", "%", "%2A", "a", "A", " ", "a ", "a:b",
    "a|b", "a/b", "a\nb", "a\0b", "{", "{a}", "user:a", "user%3Aa", "ip:10.0.0.1", "by:a", "\u00e9",
    "e\u0301", "\ud800", "sha256:" + "0" * 64, "x" * 10_000, "x" * 10_001, "x" * 128, "x" * 129,
    "%78" * 42 + "xx", "\u4e2d" * 200, "1", "\uff11",
]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_every_subject_has_a_count_of_its_own_whatever_it_is_called(
    desk: Desk, strategy: Strategy
) -> None:
    """better-auth/better-auth#7300, calcom/cal.diy#25112: glued key parts met in one counter."""
    partitions: list[tuple[PartitionBy, Callable[[str], Caller]]] = [
        ("user_id", user),
        ("session", lambda name: Caller(session_id=name)),
        (lambda call: call.caller.client_id or "", lambda name: Caller(client_id=name)),
    ]
    for number, (partition_by, caller) in enumerate(partitions):
        policy = Policy(RateLimit(2, 3600, partition_by=partition_by, strategy=strategy))
        tool = f"tool {number}"
        for name in ODD_NAMES:
            assert await passes(desk.guard, policy, caller(name), tool), name
        # Those without a name share a count, which is nobody else's.
        assert [await passes(desk.guard, policy, Caller(), tool) for _ in range(3)] == [True, True, False]
        for name in ODD_NAMES:
            assert await passes(desk.guard, policy, caller(name), tool), name
            assert not await passes(desk.guard, policy, caller(name), tool), name


async def test_tool_and_subject_cannot_be_read_into_one_another(desk: Desk) -> None:
    """better-auth/better-auth#7300: ("a:b", "c") and ("a", "b:c") were one and the same."""
    policy = Policy(RateLimit(1, 3600, partition_by="user_id"))
    pairs = [
        (called, name)
        for called in ("x", "x:y", "x|y", "x|1", "global", "tool:x", "x|", "|x", "")
        for name in ("z", "y:z", "y|z", "|z", "user:z", "x", "")
    ]
    for called, name in pairs:
        assert await passes(desk.guard, policy, user(name), called), (called, name)
    for called, name in pairs:
        assert not await passes(desk.guard, policy, user(name), called), (called, name)


async def test_a_subject_of_several_parts_is_as_unambiguous_as_its_function(desk: Desk) -> None:
    """calcom/cal.diy#25112: the text that a function returns is one part, whatever stands in it."""

    def tenant_and_user(call: Call) -> str:
        return repr((call.caller.client_id, call.caller.user_id))

    policy = Policy(RateLimit(1, 3600, partition_by=tenant_and_user))
    for tenant, name in (("a:b", "c"), ("a", "b:c"), ("a:b:c", ""), ("", "a:b:c")):
        caller = Caller(user_id=name, client_id=tenant)
        assert [await passes(desk.guard, policy, caller) for _ in range(2)] == [True, False]


async def test_slots_of_different_subjects_are_different_slots(desk: Desk) -> None:
    """better-auth/better-auth#7300: as with counts, so with slots."""
    policy = Policy(concurrency=Concurrency(1, partition_by="user_id"))
    for name in ODD_NAMES:
        desk.call(policy=policy, caller=user(name), seconds=1)
    await settle()
    assert desk.running == len(ODD_NAMES)
    for name in ODD_NAMES:
        assert (await desk.call(policy=policy, caller=user(name))).outcome == "CONCURRENCY_LIMIT"


async def test_a_key_a_tool_and_the_global_slot_of_one_name_are_what_they_are(open_desk: OpenDesk) -> None:
    """better-auth/better-auth#7300: "global" is a name like others."""
    desk = open_desk(Throttle(global_concurrency=2))
    named = Policy(concurrency=conc(1, key="global"))
    joined = Policy(concurrency=conc(1))
    desk.call("t", named, seconds=1)
    await settle()
    # A key that is a tool's name is that tool's slot; it is not the server's global one.
    assert (await desk.call("global", joined)).outcome == "CONCURRENCY_LIMIT"
    assert (await desk.call("other", joined)).outcome == "ok"
    second = desk.call("other", joined, seconds=0.5)
    await settle()
    third = await desk.call("third", joined)
    assert (second.outcome, third.outcome) == ("pending", "CONCURRENCY_LIMIT")


# ------------------------------------------------------------------------------------- keys that callers mint


@pytest.mark.parametrize("partition_by", ["ip", "session", "user_id"])
async def test_whoever_leaves_out_what_is_counted_gets_no_count_of_their_own(
    desk: Desk, partition_by: PartitionBy
) -> None:
    """agentfront/frontmcp GHSA-p3qf-fcwm-35x4: a new session for each call, and no limit at all."""
    policy = Policy(RateLimit(3, 60, partition_by=partition_by))
    outcomes = []
    for number in range(10):
        # What a caller may invent: a session that the server has not verified is left out by the server.
        session = None if partition_by == "session" else f"invented {number}"
        caller = Caller(client_id=f"client {number}", session_id=session)
        outcomes.append(await passes(desk.guard, policy, caller))
    assert outcomes == [True] * 3 + [False] * 7
    # Real subjects do not share it, and each authenticated user is one.
    known = {"ip": Caller(client_ip="203.0.113.7"), "session": Caller(session_id="s"), "user_id": user("u")}
    assert await passes(desk.guard, policy, known[str(partition_by)])
    for name in ("alice", "bob"):
        assert [await passes(desk.guard, policy, user(name)) for _ in range(4)] == [True] * 3 + [False]


async def test_addresses_that_are_none_share_the_count_of_the_missing(desk: Desk) -> None:
    """agentfront/frontmcp GHSA-p3qf-fcwm-35x4: garbage is no address, however it changes."""
    policy = Policy(RateLimit(3, 60, partition_by="ip"))
    garbage = [
        "",
        "not-an-ip",
        "10.1",
        "0x0a000001",
        "010.0.0.1",
        "1.2.3.4.5",
        "1.2.3.4, 5.6.7.8",
        "x" * 9000,
    ]
    callers = [Caller(client_ip=address) for address in (None, *garbage)]
    assert [await passes(desk.guard, policy, caller) for caller in callers] == [True] * 3 + [False] * 6


async def test_one_address_has_one_count_in_whatever_notation(desk: Desk) -> None:
    """agentfront/frontmcp GHSA-p3qf-fcwm-35x4: nor does another spelling make another subject."""
    policy = Policy(RateLimit(3, 60, partition_by="ip"))
    spellings = ["203.0.113.7", "::ffff:203.0.113.7", "::FFFF:cb00:7107", "0:0:0:0:0:ffff:203.0.113.7"]
    outcomes = [await passes(desk.guard, policy, Caller(client_ip=address)) for address in spellings]
    assert outcomes == [True, True, True, False]
    customer = [f"2001:db8:1:2::{number:x}" for number in range(1, 9)] + ["2001:db8:1:2:ffff::1%eth0"]
    outcomes = [await passes(desk.guard, policy, Caller(client_ip=address)) for address in customer]
    assert outcomes == [True] * 3 + [False] * 6
    assert await passes(desk.guard, policy, Caller(client_ip="2001:db8:1:3::1"))


@pytest.mark.parametrize("partition_by", ["ip", "session", "user_id"])
async def test_over_http_no_header_makes_a_new_subject(partition_by: Partition) -> None:
    """agentfront/frontmcp GHSA-p3qf-fcwm-35x4: session and forwarding headers are what their sender likes."""
    server = FrontMCP("server")

    @server.tool(rate_limit=RateLimit(3, 60, partition_by=partition_by))
    async def hello() -> str:
        return "hello"

    async with serving(server) as app:
        codes = [
            await code_of_call(
                call(
                    app,
                    "hello",
                    headers={
                        "mcp-session-id": f"invented-{number}",
                        "x-forwarded-for": f"198.51.100.{number}, 203.0.113.{number}",
                        "forwarded": f"for=198.51.100.{number}",
                        "x-real-ip": f"198.51.100.{number}",
                        "authorization": f"Bearer invented-{number}",
                    },
                )
            )
            for number in range(10)
        ]
        assert codes == ["ok"] * 3 + ["RATE_LIMIT_EXCEEDED"] * 7
        # Another peer is another address, and nothing else.
        other = await code_of_call(call(app, "hello", client="203.0.113.77"))
        assert other == ("ok" if partition_by == "ip" else "RATE_LIMIT_EXCEEDED")
        same = await code_of_call(call(app, "hello", client="::ffff:203.0.113.9"))
        assert same == "RATE_LIMIT_EXCEEDED"


async def test_sessions_that_the_server_has_opened_have_a_count_each() -> None:
    """agentfront/frontmcp GHSA-p3qf-fcwm-35x4: and one that it has not opened is answered by nobody."""
    server = FrontMCP("server")

    @server.tool(rate_limit=RateLimit(2, 60, partition_by="session"))
    async def hello() -> str:
        return "hello"

    async with serving(server) as app:
        for _ in range(2):
            session = await open_session(app)
            codes = [await code_of_call(call_in_session(app, session, "hello")) for _ in range(3)]
            assert codes == ["ok", "ok", "RATE_LIMIT_EXCEEDED"]
        unknown = call_in_session(app, {**session, "mcp-session-id": "invented"}, "hello")
        await unknown.task
        assert unknown.status == 404


# ------------------------------------------------------------------------------------------ shared keys


async def test_tools_that_disagree_about_a_shared_key_are_all_named() -> None:
    """paulomac1000/ha-mcp-readonly#22: the first one to run won, and nobody knew."""

    def one() -> None: ...

    def two() -> None: ...

    tools = [
        tool(concurrency=Concurrency(2, key="K"))(one),
        tool(concurrency=Concurrency(5, key="K"))(two),
    ]
    with pytest.raises(ConfigurationError) as refused:
        FrontMCP("server", tools=tools)
    assert all(name in str(refused.value) for name in ('"K"', '"one"', '"two"'))
    # The same at run time, and what was there before goes on as it was.
    server = FrontMCP("server", tools=tools[:1])
    with pytest.raises(ConfigurationError, match='"K"'):
        server.tool(name="two", concurrency=Concurrency(5, key="K"))(two)
    assert [each.name for each in await server.mcp.list_tools()] == ["one"]
    server.tool(name="two", concurrency=Concurrency(2, key="K", queue_timeout=5, max_queued=1))(two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (conc(2, key="K"), conc(5, key="K")),
        (conc(2, key="K"), conc(2, key="K", by="user_id")),
        (conc(2, key="K", by=lambda call: call.tool), conc(2, key="K", by=lambda call: call.tool)),
        (conc(0, key="K"), conc(2, key="K")),
        (conc(2), conc(3, key="one")),
    ],
    ids=["number", "partition", "functions", "none and some", "another tool's name"],
)
def test_every_disagreement_is_found_whoever_comes_first(one: Concurrency, two: Concurrency) -> None:
    """paulomac1000/ha-mcp-readonly#22: in either order, and without a trace of the refused one."""
    policies = {"one": Policy(concurrency=one), "two": Policy(concurrency=two)}
    for first, second in (("one", "two"), ("two", "one")):
        guard = Guard()
        guard.bind(first, policies[first])
        with pytest.raises(ConfigurationError, match="disagree"):
            guard.bind(second, policies[second])
        guard.bind(second, Policy())


async def test_tools_that_agree_share_one_limit_and_may_wait_each_as_long_as_it_likes(desk: Desk) -> None:
    """paulomac1000/ha-mcp-readonly#22: equal declarations are one limiter."""
    patient, hasty = (
        Policy(concurrency=conc(2, wait=10, key="K")),
        Policy(concurrency=conc(2, wait=1, key="K")),
    )
    for _ in range(2):
        desk.call("patient", patient, seconds=5)
    late, later = desk.call("hasty", hasty), desk.call("patient", patient)
    await desk.everybody()
    assert (late.outcome, late.answered) == ("QUEUE_TIMEOUT", 1.0)
    assert (later.outcome, later.began) == ("ok", 5.0)


def test_a_declaration_that_was_refused_binds_nobody() -> None:
    """paulomac1000/ha-mcp-readonly#22: a tool that never came to be cannot disagree."""
    guard = Guard()
    with pytest.raises(ConfigurationError, match="twice"):
        guard.bind("x", Policy(concurrency=[conc(1), conc(1, key="x")]))
    guard.bind("x", Policy(concurrency=conc(2)))
    guard.bind("y", Policy(concurrency=conc(2, key="x")))


async def test_a_limit_for_a_shared_backend_is_not_multiplied_by_its_users(desk: Desk) -> None:
    """arc-mcp/arc-1#276: built for each user, N users got N times the limit."""
    policy = Policy(concurrency=conc(2, queue=3, wait=5, key="DB"))
    calls = [
        desk.call(tool, policy, caller=user(f"user {number}"), seconds=1)
        for number, tool in enumerate(["one", "two"] * 3)
    ]
    await desk.everybody()
    assert sorted(attempt.outcome for attempt in calls) == ["CONCURRENCY_LIMIT"] + ["ok"] * 5
    assert [attempt.began for attempt in calls] == [0.0, 0.0, 1.0, 1.0, 2.0, None]
    assert desk.most_running == 2


async def test_a_partitioned_slot_is_one_for_each_subject_over_all_its_tools(desk: Desk) -> None:
    """arc-mcp/arc-1#276: and the other way round, each user has one slot for both tools."""
    policy = Policy(concurrency=conc(1, key="DB", by="user_id"))
    for name in ("alice", "bob"):
        desk.call("one", policy, caller=user(name), seconds=1)
        assert (await desk.call("two", policy, caller=user(name))).outcome == "CONCURRENCY_LIMIT"
    assert desk.running == 2


# ------------------------------------------------------------------------------- limits of equal numbers


async def test_limits_of_one_period_and_subject_do_not_share_a_count(open_desk: OpenDesk) -> None:
    """gmcquillan/django-brake#19, alisaifee/flask-limiter#208: the key did not say which limit it was for."""
    guard = open_desk(Throttle(global_rate_limit="100/minute")).guard
    t1 = Policy(RateLimit(200, 60, partition_by="user_id"))
    t2 = Policy(RateLimit(2, 60, partition_by="user_id"))
    u = user("u")
    assert [await passes(guard, t1, u, "t1") for _ in range(3)] == [True] * 3
    assert [await passes(guard, t2, u, "t2") for _ in range(3)] == [True, True, False]


async def test_limits_that_differ_in_one_thing_do_not_share_a_count(desk: Desk) -> None:
    """alisaifee/flask-limiter#208: number, period, strategy, partition, or place in a list."""
    limits = [
        RateLimit(3, 60),
        RateLimit(4, 60),
        RateLimit(3, 61),
        RateLimit(3, 60, strategy="moving-window"),
        RateLimit(3, 60, strategy="sliding-window"),
        RateLimit(3, 60, partition_by="user_id"),
        RateLimit(3, 60, partition_by="ip"),
    ]
    for limit in limits:
        outcomes = [await passes(desk.guard, Policy(limit), Caller()) for _ in range(limit.max_requests + 1)]
        assert outcomes == [True] * limit.max_requests + [False]
    twice = Policy([RateLimit(5, 60, partition_by=by) for by in (lambda _: "same", lambda _: "same")])
    assert [await passes(desk.guard, twice, Caller(), "other") for _ in range(6)] == [True] * 5 + [False]


async def test_other_numbers_start_a_fresh_count(desk: Desk) -> None:
    """alisaifee/flask-limiter#208: never a remainder of zero or less."""
    # Going back to numbers that were in force before goes back to their count.
    for most, fresh in ((5, 5), (10, 10), (5, 0)):
        policy = Policy(RateLimit(most, 60))
        outcomes = [await passes(desk.guard, policy, Caller()) for _ in range(most + 1)]
        assert outcomes == [True] * fresh + [False] * (most + 1 - fresh)


# --------------------------------------------------------------------------- functions that say who shares


def broken(value: object) -> Callable[[Call], str | None]:
    """A partition function that returns, or raises, what its type does not allow."""

    def partition(_: Call) -> str | None:
        if isinstance(value, BaseException):
            raise value
        return value  # type: ignore[return-value]

    return partition


@pytest.mark.parametrize("kind", ["rate", "slot"])
@pytest.mark.parametrize(
    "value",
    [
        b"bytes",
        ["a"],
        5,
        True,
        object,
        LookupError(),
        asyncio.CancelledError(),
        StopIteration(),
        TimeoutError(),
    ],
    ids=repr,
)
async def test_a_partition_function_that_fails_refuses_the_call(
    desk: Desk, kind: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Krzysztof318/MailFathom#176: a faulty plug-in must not open what it was to guard."""
    partition = broken(value)
    policy = Policy(
        [RateLimit(5, 60), *([RateLimit(5, 60, partition_by=partition)] if kind == "rate" else [])],
        [conc(1, by="user_id"), *([conc(1, by=partition)] if kind == "slot" else [])],
    )
    for _ in range(8):
        refused = await desk.call(policy=policy, caller=user("u"))
        assert (refused.outcome, refused.began) == ("PARTITION_ERROR", None)
    assert isinstance(refused.error, PartitionError)
    # It is in the log under the id that the caller is given.
    assert refused.error.error_id in caplog.text
    assert desk.counts.rejected == {"PARTITION_ERROR": 8}
    # Nothing was counted, and no slot stays behind.
    assert desk.guard._scheduler.live_slots == 0
    assert desk.guard._memory.counts.held == 0
    caplog.clear()


async def test_a_function_that_names_nobody_names_the_same_nobody(desk: Desk) -> None:
    """Krzysztof318/MailFathom#176: `None` and the empty text are one count."""
    texts = iter([None, "", None, ""])
    policy = Policy(RateLimit(2, 60, partition_by=lambda _: next(texts)))
    assert [await passes(desk.guard, policy, Caller()) for _ in range(4)] == [True, True, False, False]


async def test_a_long_subject_is_stored_as_a_short_digest(desk: Desk) -> None:
    """Krzysztof318/MailFathom#176: whoever chooses the text does not choose how much is kept of it."""

    def subject(call: Call) -> str:
        return str(call.arguments["of"])

    texts = ["x" * 1_000_000, "x" * 999_999 + "y"]
    policy = Policy(RateLimit(1, 60, partition_by=subject), conc(1, by=subject))
    for text in texts:
        for expected in ("ok", "RATE_LIMIT_EXCEEDED"):
            assert (await desk.call(policy=policy, arguments={"of": text})).outcome == expected
    keys = [*desk.guard._memory.counts.fixed(60_000_000_000).counts]
    assert len(keys) == 2
    assert all(len(key) <= 200 for key in keys)


def test_a_function_that_would_wait_is_refused_before_it_can() -> None:
    """Krzysztof318/MailFathom#176: who shares a count is decided in a step that waits for nothing."""

    async def slow(_: Call) -> str:
        await asyncio.sleep(5)
        return ""

    class Slow:
        async def __call__(self, _: Call) -> str:
            return ""

    for function in (slow, Slow()):
        with pytest.raises(ConfigurationError, match="async"):
            RateLimit(1, partition_by=function)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="async"):
            Concurrency(1, partition_by=function)  # type: ignore[arg-type]
