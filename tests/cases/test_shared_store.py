"""A store that several instances share: crashes, outages, skewed clocks and lost messages."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import signal
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
import uvicorn

from frontmcp_py import Admission, Caller, ConfigurationError, FrontMCP, Guard, Policy
from frontmcp_py.storage import Ask, SlotNeed
from frontmcp_py.storage.redis import RedisStorage
from frontmcp_py.testing import FakeClock
from tests.cases.desk import assert_clean, conc
from tests.fault_proxy import Command, FaultProxy
from tests.guard.support import Held, code_of, once
from tests.instances import (
    Instance,
    asked,
    asks,
    counted,
    every_key_ends,
    held,
    in_line,
    instance,
    instances,
    keys,
    rate,
    slot,
    throttle,
)
from tests.servers import RedisServer, Valkey, eventually

UNAVAILABLE = "GUARD_STORAGE_UNAVAILABLE"
TOO_OFTEN = "RATE_LIMIT_EXCEEDED"
NO_SLOT = "CONCURRENCY_LIMIT"


@pytest.fixture
def anyio_backend() -> str:
    """Real time: a store has its own."""
    return "asyncio"


@pytest.fixture
async def proxy(valkey: Valkey) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(valkey) as proxy:
        yield proxy


async def running(guard: Guard, policy: Policy, tool: str = "tool", **options: Any) -> Held:
    call = Held(guard, tool, policy, **options)
    await eventually(lambda: call.runs, f"{tool} begins: {call.task}")
    return call


async def waiting(guard: Guard, policy: Policy, tool: str = "tool", **options: Any) -> Held:
    before = guard.statistics().waiting
    call = Held(guard, tool, policy, **options)
    await eventually(lambda: guard.statistics().waiting > before, f"{tool} waits")
    return call


async def ends_clean(server: RedisServer, most: int, *guards: Guard, tool: str = "tool") -> None:
    """Nothing runs or waits, no key stays for ever, and as many calls as there are places begin at once."""
    await eventually(lambda: (held(server), in_line(server)) == (0, 0), "everything is given back")
    every_key_ends(server)
    calls = [Held(guard, tool, slot(most, 0)) for guard, _ in zip(itertools.cycle(guards), range(most))]
    await eventually(lambda: all(call.runs for call in calls), "all of them run")
    assert await code_of(once(guards[0], tool, slot(most, 0))) == NO_SLOT
    for call in calls:
        await call.end()
    for guard in guards:
        assert_clean(guard)


async def is_up(*guards: Guard) -> None:
    await eventually(lambda: all(guard.statistics().storage == "up" for guard in guards), "the store is up")


# --------------------------------------------------------------------------- steps that are cut in the middle


@pytest.mark.slow
async def test_no_cut_connection_leaves_a_count_that_never_ends(valkey: Valkey, proxy: FaultProxy) -> None:
    """JSONbored/loopover#9493, redis/redis#4548: counted, but its expiry never set; blocked for ever."""
    policy = Policy(rate_limit={"max_requests": 2, "window": 0.4})
    tools = []
    async with instance(proxy.url, fallback="memory") as guard:
        for cut in ("cut_before", "lose_reply", "cut_after"):
            for nth in (1, 2):
                tools.append(f"{cut}{nth}")
                fault = getattr(proxy, cut)("EVALSHA", nth=nth)
                for _ in range(2):
                    assert await code_of(once(guard, tools[-1], policy)) in ("ok", TOO_OFTEN)
                    every_key_ends(valkey)
                await eventually(lambda fault=fault: fault.happened)  # type: ignore[misc]
        await asyncio.sleep(0.4)
        assert [await code_of(once(guard, tool, policy)) for tool in tools] == ["ok"] * len(tools)
        await ends_clean(valkey, 1, guard)


@pytest.mark.slow
async def test_a_store_that_forgets_its_scripts_or_its_data_fails_no_call(own_valkey: Valkey) -> None:
    """vutran1710/PyrateLimiter#182, upstash/ratelimit-js#122: every check failed once the cache was empty."""
    policy = Policy(rate(5), conc(2, wait=9))
    async with instance(own_valkey.url, fallback="memory") as guard:
        assert [await code_of(once(guard, "tool", policy)) for _ in range(2)] == ["ok"] * 2
        own_valkey.do("SCRIPT FLUSH")
        assert [await code_of(once(guard, "tool", policy)) for _ in range(2)] == ["ok"] * 2
        assert counted(own_valkey) == 4
        holder = await running(guard, policy)
        await asyncio.to_thread(own_valkey.restart)
        assert await code_of(once(guard, "tool", policy)) == "ok"
        await is_up(guard)
        await eventually(lambda: held(own_valkey) == 1, "the holder is known again")
        assert [await code_of(once(guard, "tool", policy)) for _ in range(3)] == ["ok"] * 3
        assert await holder.end() == "done"
        await ends_clean(own_valkey, 2, guard, tool="fresh")


@pytest.mark.slow
async def test_a_process_killed_between_any_two_steps_leaves_no_slot_taken(valkey: Valkey) -> None:
    """dv/redis-semaphore#64, #66: killed between taking the token and writing down who has it."""
    boundaries = [(what, is_done) for what in ("take", "release") for is_done in (False, True)]
    async with contextlib.AsyncExitStack() as stack:
        tools = []
        for what, is_done in boundaries:
            tool = f"{what} {'done' if is_done else 'not done'}"
            proxy = await stack.enter_async_context(FaultProxy(valkey))
            process = stack.enter_context(Instance(proxy.url, lease=1))
            await process.ready()
            matches = asks(what)

            def kill(
                command: Command, matches: Callable[[Command], bool] = matches, pid: int = process.pid
            ) -> bool:
                if matches(command):
                    os.kill(pid, signal.SIGKILL)
                    return True
                return False

            if is_done:
                proxy.hold(matches)
            else:
                proxy.cut_before(kill, times=None)
            process.call("call", slot(2, 0), tool=tool, seconds=0)
            await eventually(lambda p=proxy, m=matches: p.count(m))  # type: ignore[misc]
            if is_done:
                await eventually(lambda p=proxy, m=matches: p.answered(m))  # type: ignore[misc]
                process.kill()
            tools.append(tool)
        guard = await stack.enter_async_context(instance(valkey.url))
        await eventually(lambda: held(valkey) == 0, "the leases of the dead end")
        for tool in tools:
            await ends_clean(valkey, 2, guard, tool=tool)


# -------------------------------------------------------------------------------------------------- outages


@pytest.mark.slow
@pytest.mark.parametrize("fallback", ["error", "memory"])
async def test_a_store_that_hangs_holds_nobody_up(own_valkey: Valkey, fallback: str) -> None:
    """envoyproxy/ratelimit#462, animir/node-rate-limiter-flexible#184, envoyproxy/gateway#1655."""
    policy = Policy(rate(10))
    options = {"fallback": fallback, "storage_timeout": 0.2, "lease": 10}
    async with FaultProxy(own_valkey) as proxy, instance(proxy.url, **options) as guard:
        await once(guard, "another", policy)
        own_valkey.freeze()
        proxy.forget()
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        loop, ticker = asyncio.get_running_loop(), asyncio.create_task(turn())
        began = loop.time()
        first = await code_of(once(guard, "tool", policy))
        assert turns > 10, "the loop goes on while one of them waits for the store"
        outcomes = [first]
        for _ in range(59):
            outcomes.append(await code_of(once(guard, "tool", policy)))
            await asyncio.sleep(0.05)
        passed = loop.time() - began
        expected = {UNAVAILABLE: 60} if fallback == "error" else {"ok": 10, TOO_OFTEN: 50}
        assert Counter(outcomes) == expected
        assert asked(proxy, "take") <= 1
        assert proxy.count(asks("renew")) <= passed + 2, "one probe a second"
        own_valkey.thaw()
        await is_up(guard)
        # The shared count applies again; what the store did late is taken back.
        await eventually(lambda: counted(own_valkey) == 1)
        assert await code_of(once(guard, "tool", policy)) == "ok"
        ticker.cancel()
        await ends_clean(own_valkey, 1, guard, tool="fresh")


@pytest.mark.parametrize("fallback", ["error", "memory"])
async def test_a_store_that_goes_while_serving_is_told_by_its_own_code(
    own_valkey: Valkey, fallback: str, caplog: pytest.LogCaptureFixture
) -> None:
    """agentfront/frontmcp#660, Vigil-SOC/vigil#100: callers saw an internal error."""
    policy = slot(1, 0.1, max_queued=1)
    async with instance(own_valkey.url, fallback=fallback) as guard:
        holder = await running(guard, policy)
        await asyncio.to_thread(own_valkey.kill)
        codes = [await code_of(once(guard, "limited", Policy(rate(2)))) for _ in range(3)]
        codes.append(await code_of(once(guard, "tool", policy)))
        if fallback == "error":
            assert codes == [UNAVAILABLE] * 4
        else:
            assert codes == ["ok", "ok", TOO_OFTEN, "QUEUE_TIMEOUT"]
        assert await holder.end() == "done", "its result is returned although its release reaches nobody"
        warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert len(warnings) == 1
        await asyncio.to_thread(own_valkey.start)
        await is_up(guard)
        await ends_clean(own_valkey, 1, guard)


async def test_without_the_store_each_instance_has_the_limit_once_and_says_so(
    proxy: FaultProxy, valkey: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    """JhaSourav07/commitpulse#6138, liwala/ay-framework#205: N-fold limits that nobody noticed."""
    async with instance(proxy.url, fallback="memory") as a, instance(proxy.url, fallback="memory") as b:
        proxy.refuse()
        outcomes = [await code_of(once((a, b)[nth % 2], "tool", Policy(rate(10)))) for nth in range(40)]
        assert Counter(outcomes) == {"ok": 20, TOO_OFTEN: 20}
        for each in (a, b):
            assert (each.health().status, each.statistics().storage) == ("degraded", "down")
            assert each.statistics().outages == 1
        assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 2
        proxy.accept()
        await is_up(a, b)
        await ends_clean(valkey, 2, a, b)


@contextlib.asynccontextmanager
async def over_http(server: FrontMCP) -> AsyncIterator[httpx2.AsyncClient]:
    """The server on a port of this machine, and a client of it."""
    config = uvicorn.Config(server.http_app(), port=0, log_config=None)
    served = uvicorn.Server(config)
    task = asyncio.create_task(served.serve())
    await eventually(lambda: served.started or task.done())
    port = served.servers[0].sockets[0].getsockname()[1]
    try:
        transport = httpx2.AsyncHTTPTransport(verify=False)
        async with httpx2.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        served.should_exit = True
        await task


@pytest.mark.parametrize("fallback", ["error", pytest.param("memory", marks=pytest.mark.slow)])
async def test_readiness_tells_whether_calls_have_the_store_that_they_need(
    proxy: FaultProxy, fallback: str
) -> None:
    """faratech/bsod-analyzer#47: every call failed, and the health endpoint said that all was well."""
    server = FrontMCP("server", throttle=throttle(proxy.url, fallback=fallback))

    async with over_http(server) as client:

        async def ready() -> tuple[int, str]:
            answer = await client.get("/readyz")
            return answer.status_code, answer.json()["status"]

        async def is_ready(*expected: object) -> None:
            async def as_expected() -> bool:
                assert (await client.get("/healthz")).status_code == 200
                return await ready() == expected

            await eventually(as_expected, f"/readyz answers {expected}")

        assert await ready() == (200, "ready")
        proxy.refuse()
        # No call comes: the probe of the store finds it.
        await is_ready(503 if fallback == "error" else 200, "degraded")
        metrics = (await client.get("/metrics")).json()
        assert metrics["status"] == "degraded"
        proxy.accept()
        await is_ready(200, "ready")


@pytest.mark.slow
async def test_calls_do_not_pile_up_in_front_of_a_slow_store(proxy: FaultProxy, valkey: Valkey) -> None:
    """BerriAI/litellm#33077: they were admitted after the store had answered."""
    calls = 5_000
    admission = Admission(max_active=50, reserved=2)
    async with instance(proxy.url, admission=admission, storage_timeout=60, lease=60) as guard:
        policy = slot(100, rate_limit=rate(9999))
        await once(guard, "tool", policy)
        proxy.forget()
        proxy.hold(asks("take"))
        gc.collect()
        tracemalloc.start()
        try:
            tasks = [asyncio.create_task(code_of(once(guard, "tool", policy))) for _ in range(calls)]
            await eventually(lambda: proxy.count(asks("take")) == 48)
            statistics = guard.statistics()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        refused = calls - 48 - 64
        assert (statistics.places, statistics.asking, statistics.waiting) == (48, 48, 64)
        assert statistics.counts.rejected == {"OVERLOADED": refused}
        assert sum(task.done() for task in tasks) == refused
        assert peak < 50_000_000
        assert asked(proxy, "take") == 48, "who was refused never touched the store"
        proxy.let_go()
        assert Counter(await asyncio.gather(*tasks)) == {"OVERLOADED": refused, "ok": 112}
        await ends_clean(valkey, 3, guard, tool="fresh")


# --------------------------------------------------------------------------------------------------- leases


@pytest.mark.slow
async def test_a_killed_holders_slots_come_back_by_themselves(valkey: Valkey) -> None:
    """redisson/redisson#4462, rails/solid_queue#546, steinitzu/celery-singleton#40."""
    policy = slot(2, max_queued=1)
    async with instance(valkey.url) as guard:
        with instances(1, valkey.url) as (process,):
            await process.ready()
            for name in ("one", "two"):
                process.call(name, policy)
                await process.said(name, "began")
            process.kill()
        first = await waiting(guard, policy)
        assert await code_of(once(guard, "tool", policy)) == NO_SLOT, "the queue is full"
        await eventually(lambda: first.runs, "the dead give it up")
        assert held(valkey) == 1, "no dead holder is left"
        await first.end()
        await ends_clean(valkey, 2, guard)


@pytest.mark.slow
async def test_work_that_outlasts_a_lease_is_renewed_and_dies_with_its_process(valkey: Valkey) -> None:
    """chrisguidry/docket#293: a second holder came in while the first still worked."""
    policy = slot(1, 0)
    async with instance(valkey.url) as guard:
        with instances(1, valkey.url) as (process,):
            await process.ready()
            process.call("A", policy)
            await process.said("A", "began")
            for _ in range(6):
                await asyncio.sleep(0.4)
                assert await code_of(once(guard, "tool", policy)) == NO_SLOT
                assert 0 < max(keys(valkey).values()) <= 1000
            process.kill()
        await eventually(lambda: held(valkey) == 0, "its lease ends")
        await ends_clean(valkey, 1, guard)


@pytest.mark.slow
async def test_a_loop_that_stalls_for_longer_than_a_lease_has_lost_its_slot(valkey: Valkey) -> None:
    """stacklok/mecatl#1343: the lease is not renewed by anything that goes on while the loop stands still."""
    policy = slot(1, 0)
    async with instance(valkey.url) as guard, instance(valkey.url) as third:
        with instances(1, valkey.url) as (process,):
            await process.ready()
            process.call("A", policy)
            await process.said("A", "began")
            process.block(2.5)
            await eventually(lambda: held(valkey) == 0)
            b = await running(guard, policy)
            await process.said("A", "aborted LEASE_LOST")
            process.end("A")
            assert await process.answer("A") == "ok"
            assert await code_of(once(third, "tool", policy)) == NO_SLOT, "B's slot was not released"
            await b.end()
            await ends_clean(valkey, 1, guard, third)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["every message is lost", "the holder ends before anybody listens"])
async def test_a_message_that_is_not_heard_costs_a_beat_and_not_the_wait(
    proxy: FaultProxy, valkey: Valkey, how: str
) -> None:
    """redisson/redisson#5762, #5070: whoever slept through the message slept on."""
    policy = slot(1, 20, max_queued=1)
    if how == "every message is lost":
        proxy.drop_messages()
    else:
        proxy.cut_before("SUBSCRIBE", times=None)
    async with instance(valkey.url) as one, instance(proxy.url) as two:
        a = await running(one, policy)
        b = await waiting(two, policy)
        await a.end()
        await eventually(lambda: b.runs, "the beat finds it")
        await b.end()
        assert asked(proxy, "renew") >= 1
        await ends_clean(valkey, 1, one, two)


async def test_skewed_clocks_of_instances_change_nothing(valkey: Valkey) -> None:
    """spring-cloud/spring-cloud-gateway#1688, sourcegraph/sourcegraph#56826, openlinker/openlinker#2019."""
    ahead, behind = FakeClock(), FakeClock()
    ahead.advance(10 * 86400)
    one = Guard(throttle(valkey.url), clock=ahead)
    two = Guard(throttle(valkey.url), clock=behind)
    policies = [
        Policy({"max_requests": 4, "window": "300d", "strategy": strategy})
        for strategy in ("fixed-window", "moving-window", "sliding-window")
    ]
    async with one, two:
        for nth, policy in enumerate(policies):
            codes = [await code_of(once((one, two)[turn % 2], f"{nth}", policy)) for turn in range(10)]
            assert codes == ["ok"] * 4 + [TOO_OFTEN] * 6
        holder = await running(two, slot(1, 0))
        for _ in range(10):
            ahead.advance(60)
            assert await code_of(once(one, "tool", slot(1, 0))) == NO_SLOT
        await holder.end()
        await ends_clean(valkey, 1, one, two)


@pytest.mark.slow
async def test_thousands_of_dead_instances_leave_nothing_behind(valkey: Valkey) -> None:
    """SGrondin/bottleneck#115: the script walked ever more of the dead until the store was busy."""

    def work() -> int:
        """How many commands the store has run, those of scripts among them."""
        return sum(int(each["calls"]) for each in valkey.do("INFO", "commandstats").values())

    need = (SlotNeed("tool|0|", 1),)
    dead = RedisStorage(valkey.url, lease=1, timeout=5)
    for first in range(0, 2_000, 100):
        # Each dies with a holder and a waiter; nobody renews or releases any of them.
        for kind in ("holder", "waiter"):
            names = [f"{kind}{nth}" for nth in range(first, first + 100)]
            await asyncio.gather(
                *(dead.take(Ask(name, slots=need, force=kind == "holder")) for name in names)
            )
    assert len(keys(valkey)) > 500
    before = work()
    await dead.take(Ask("in the middle", slots=need))
    assert work() - before < 2_000, "a script looks at a bounded number of them"
    await eventually(lambda: len(keys(valkey)) < 5, "all of it ends by itself")
    async with instance(valkey.url) as guard:
        await ends_clean(valkey, 1, guard)
    await dead.close()


# -------------------------------------------------------------------------------------------- shared numbers


async def test_a_shared_key_is_one_limiter_on_all_instances_and_has_one_number(valkey: Valkey) -> None:
    """paulomac1000/ha-mcp-readonly#22: the first to run won silently."""
    async with instance(valkey.url) as a, instance(valkey.url) as b:
        a.bind("T1", slot(2, key="K"))
        with pytest.raises(ConfigurationError, match=r'"K".*"T1".*"T2"'):
            a.bind("T2", slot(5, key="K"))
        # Waits may differ, and are each tool's own.
        calls = [await running(a, slot(2, 0, key="K"), "T1"), await running(b, slot(2, 3, key="K"), "T2")]
        assert await code_of(once(b, "T1", slot(2, 0, key="K"))) == NO_SLOT
        for call in calls:
            await call.end()


async def test_limits_with_one_period_on_one_subject_have_counts_of_their_own(valkey: Valkey) -> None:
    """gmcquillan/django-brake#19, alisaifee/flask-limiter#208: the key did not say which limit it was for."""

    def by_user(most: int) -> Policy:
        return Policy({"max_requests": most, "window": "300d", "partition_by": "user_id"})

    ann = Caller(user_id="ann")
    options = {"global_rate_limit": rate(100)}
    async with instance(valkey.url, **options) as a, instance(valkey.url, **options) as b:
        for guard in (a, b, a):
            assert await code_of(once(guard, "T1", by_user(200), caller=ann)) == "ok"
        codes = [await code_of(once(guard, "T2", by_user(2), caller=ann)) for guard in (a, b, a)]
        assert codes == ["ok", "ok", TOO_OFTEN]
    # Another number after a restart is another limit, and begins anew.
    async with instance(valkey.url) as c:
        for _ in range(5):
            assert await code_of(once(c, "T3", by_user(5), caller=ann)) == "ok"
    async with instance(valkey.url) as d:
        codes = [await code_of(once(d, "T3", by_user(10), caller=ann)) for _ in range(11)]
        assert codes == ["ok"] * 10 + [TOO_OFTEN]


async def test_a_limit_for_a_shared_back_end_is_not_multiplied_by_users_tools_or_instances(
    valkey: Valkey,
) -> None:
    """arc-mcp/arc-1#276: built for each user, N users got N times the limit."""
    policy = slot(2, 5, key="DB", max_queued=3)
    async with instance(valkey.url) as a, instance(valkey.url) as b:
        calls = []
        for nth in range(5):
            make = running if nth < 2 else waiting
            caller = Caller(user_id=f"user{nth}")
            calls.append(await make((a, b)[nth % 2], policy, f"T{nth % 3 % 2}", caller=caller))
        assert await code_of(once(b, "T1", policy, caller=Caller(user_id="user6"))) == NO_SLOT
        assert (held(valkey), in_line(valkey)) == (2, 3)
        for call in calls:
            await eventually(lambda call=call: call.runs)  # type: ignore[misc]
            await call.end()
        await ends_clean(valkey, 2, a, b)
