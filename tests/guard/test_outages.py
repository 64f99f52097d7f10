"""The store goes, hangs, forgets and comes back: what calls are told, and what is counted and given back."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from functools import partial

import pytest

from frontmcp_py import Call, Concurrency, ConfigurationError, Guard, Policy
from tests.fault_proxy import FaultProxy
from tests.guard.support import Held, code_of, once, refusal
from tests.guard.test_shared import begins, hold, line_up
from tests.guard.test_shared import proxy as proxy
from tests.instances import (
    asked,
    asks,
    counted,
    every_key_ends,
    held,
    in_line,
    instance,
    instances,
    rate,
    slot,
)
from tests.servers import Valkey, eventually

BRIEF = 0.2
"""Seconds that a question may take where a test makes the store hang."""

UNAVAILABLE = "GUARD_STORAGE_UNAVAILABLE"
TOO_OFTEN = "RATE_LIMIT_EXCEEDED"


def told(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """What the guard has logged of outages at this level."""
    records = [each for each in caplog.records if each.name == "frontmcp_py.guard" and each.levelno == level]
    return [each.getMessage() for each in records if "the store of the limits" in each.getMessage()]


async def is_up(*guards: Guard) -> None:
    """Wait until the instances know that the store answers."""
    await eventually(lambda: all(each.statistics().storage == "up" for each in guards), "the store is up")


async def is_down(*guards: Guard) -> None:
    """Wait until the instances know that the store does not answer."""
    await eventually(lambda: all(each.statistics().storage == "down" for each in guards), "the store is down")


# ------------------------------------------------------------------------------------------ without fallback


async def test_without_fallback_calls_that_need_the_store_are_refused_until_it_is_back(
    proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "frontmcp_py.guard")
    async with instance(proxy.url) as a:
        await once(a, "x", slot())
        proxy.refuse()
        for policy in (Policy(rate(9)), slot(), slot(1, 0, rate_limit=rate(9))):
            error = await refusal(once(a, "x", policy))
            assert error.code == UNAVAILABLE
            assert {"errorId", "code"} <= set(error.meta())
            assert not any(word in str(error) for word in ("127.0.0.1", str(proxy.port), "redis"))
        assert await code_of(once(a, "free")) == "ok", "what needs no store goes on"
        assert await code_of(once(a, "timed", Policy(timeout=5))) == "ok"
        health = a.health()
        assert (health.status, health.is_ready) == ("degraded", False)
        assert a.statistics().outages == 1
        proxy.accept()
        await is_up(a)
        assert await code_of(once(a, "x", slot())) == "ok"
        assert (a.health().status, a.health().is_ready) == ("ready", True)
    assert len(told(caplog, logging.WARNING)) == len(told(caplog, logging.INFO)) == 1


@pytest.mark.slow
async def test_a_call_that_runs_when_the_store_goes_returns_its_result(
    proxy: FaultProxy, valkey: Valkey
) -> None:
    async with instance(proxy.url, lease=3) as a:
        running = await hold(a, "x", slot(1, 0))
        proxy.refuse()
        assert await running.end() == "done"
        assert await code_of(once(a, "x", slot(1, 0))) == UNAVAILABLE
        assert held(valkey) == 1
        proxy.accept()
        # Its release is repeated: the slot is free long before the lease has ended.
        await eventually(lambda: held(valkey) == 0)
        assert int(valkey.do("PTTL", "{frontmcp}:number")) > 0
        await is_up(a)
        assert await code_of(once(a, "x", slot(1, 0))) == "ok"


@pytest.mark.slow
async def test_a_waiter_stays_in_line_while_the_store_is_away(proxy: FaultProxy, valkey: Valkey) -> None:
    async with instance(proxy.url, lease=5) as a, instance(valkey.url, lease=5) as b:
        running = await hold(b, "x", slot())
        waiting = await line_up(a, "x", slot())
        brief = await line_up(a, "x", slot(1, 0.6, key="x"))
        proxy.refuse()
        await is_down(a)
        await running.end()
        # Its own time to wait goes on meanwhile, and has its own code.
        assert (await brief.refusal()).code == "QUEUE_TIMEOUT"
        assert waiting.waits
        proxy.accept()
        await begins(waiting)
        await eventually(lambda: in_line(valkey) == 0, "who has gone is no longer in line")
        await waiting.end()


# --------------------------------------------------------------------------------------------- with fallback


async def test_with_fallback_each_instance_counts_alone_and_says_so(
    proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "frontmcp_py.guard")
    options = {"fallback": "memory"}
    async with instance(proxy.url, **options) as a, instance(proxy.url, **options) as b:
        await once(a, "x", slot(1, 0))
        await once(b, "x", slot(1, 0))
        proxy.refuse()
        for each in (a, b):
            outcomes = [await code_of(once(each, "y", Policy(rate(2)))) for _ in range(4)]
            assert outcomes == ["ok", "ok", TOO_OFTEN, TOO_OFTEN]
            assert (each.health().status, each.health().is_ready) == ("degraded", True)
        running = await hold(a, "x", slot(1, 0))
        assert await code_of(once(a, "x", slot(1, 0))) == "CONCURRENCY_LIMIT"
        assert await code_of(once(b, "x", slot(1, 0))) == "ok"
        await running.end()
        assert len(told(caplog, logging.WARNING)) == 2, "one for each instance, not for each call"
        proxy.accept()
        await is_up(a, b)
        assert len(told(caplog, logging.INFO)) == 2
        assert len(told(caplog, logging.WARNING)) == 2
        # Now they share again.
        running = await hold(a, "x", slot(1, 0))
        assert await code_of(once(b, "x", slot(1, 0))) == "CONCURRENCY_LIMIT"
        await running.end()


@pytest.mark.parametrize("url", ["proxied", "direct"])
async def test_a_mutex_does_not_overlap_itself_when_the_store_goes(
    proxy: FaultProxy, valkey: Valkey, url: str
) -> None:
    async with instance(proxy.url, fallback="memory") as a:
        running = await hold(a, "x", slot())
        proxy.refuse()
        assert await code_of(once(a, "x", slot(1, 0))) == "CONCURRENCY_LIMIT"
        waiting = await line_up(a, "x", slot())
        assert a.statistics().storage == "down"
        await running.end()
        await (await begins(waiting)).end()
        proxy.accept()


async def test_a_mutex_does_not_overlap_itself_when_the_store_comes(
    proxy: FaultProxy, valkey: Valkey
) -> None:
    async with instance(proxy.url, fallback="memory") as a, instance(valkey.url) as b:
        proxy.refuse()
        alone = await hold(a, "x", slot())
        waiting_alone = await line_up(a, "x", slot())
        proxy.accept()
        await is_up(a)
        assert await code_of(once(a, "x", slot(1, 0))) == "CONCURRENCY_LIMIT"
        waiting = await line_up(a, "x", slot())
        await asyncio.sleep(0.5)
        assert (waiting.waits, waiting_alone.waits) == (True, True)
        # What it holds alone binds nobody else, and its waiters keep nothing from them.
        assert await code_of(once(b, "x", slot(1, 5))) == "ok"
        await alone.end()
        await begins(waiting_alone)
        assert await code_of(once(b, "x", slot(1, 0))) == "CONCURRENCY_LIMIT", "now the store knows of it"
        assert waiting.waits
        await waiting_alone.end()
        await (await begins(waiting)).end()


@pytest.mark.slow
async def test_whoever_stood_in_line_when_the_store_goes_waits_on_here_in_the_same_order(
    proxy: FaultProxy, valkey: Valkey
) -> None:
    async with instance(proxy.url, fallback="memory") as a:
        running = await hold(a, "x", slot())
        waiting = [await line_up(a, "x", slot()) for _ in range(4)]
        proxy.refuse()
        await is_down(a)
        assert a.statistics().waiting == 4
        for call in waiting[:2]:
            await running.end()
            running = await begins(call)
            assert [each.runs for each in waiting].count(True) == 1
        # The others ask the store as soon as it is there: all at once, in whatever order it hears them.
        proxy.accept()
        await is_up(a)
        for _ in waiting[2:]:
            await running.end()
            await eventually(lambda: any(each.runs for each in waiting), "another one begins")
            running = next(each for each in waiting if each.runs)
        await running.end()
        await eventually(lambda: (held(valkey), in_line(valkey)) == (0, 0))


@pytest.mark.slow
async def test_a_waiter_of_one_instance_starts_alone_when_the_holder_is_elsewhere(
    proxy: FaultProxy, valkey: Valkey
) -> None:
    async with instance(proxy.url, fallback="memory") as a, instance(valkey.url) as b:
        running = await hold(b, "x", slot())
        waiting = await line_up(a, "x", slot())
        proxy.refuse()
        # Its own counts have room, and nothing else is known.
        await begins(waiting)
        proxy.accept()
        await is_up(a)
        await eventually(lambda: in_line(valkey) == 0, "its place in the store's line is given up")
        await waiting.end()
        assert await code_of(once(a, "x", slot(1, 0))) == "CONCURRENCY_LIMIT"
        await running.end()


@pytest.mark.slow
async def test_a_slot_is_given_back_where_it_was_taken(proxy: FaultProxy, valkey: Valkey) -> None:
    async with instance(proxy.url, fallback="memory", lease=5) as a, instance(valkey.url, lease=5) as b:
        shared = await hold(a, "x", slot(1, 0))
        proxy.refuse()
        await is_down(a)
        alone = await hold(a, "y", slot(1, 0))
        proxy.accept()
        await is_up(a)
        other = await hold(b, "y", slot(1, 0))
        # What was taken here is given back here: it frees nothing of the other instance's.
        await alone.end()
        assert await code_of(once(a, "y", slot(1, 0))) == "CONCURRENCY_LIMIT"
        assert await code_of(once(b, "x", slot(1, 0))) == "CONCURRENCY_LIMIT"
        await shared.end()
        assert await code_of(once(b, "x", slot(1, 0))) == "ok"
        await other.end()
        assert held(valkey) == 0


@pytest.mark.slow
async def test_a_queued_answer_that_comes_when_the_store_is_held_to_be_down_does_not_strand_its_call(
    proxy: FaultProxy, valkey: Valkey
) -> None:
    options = {"fallback": "memory", "storage_timeout": 0.5}
    async with instance(proxy.url, **options) as a, instance(valkey.url) as b:
        await once(a, "x", slot())
        running = await hold(b, "x", slot())
        proxy.forget()
        proxy.hold(asks("take", "renew"))
        early = Held(a, "y", Policy(rate(9)))
        await asyncio.sleep(0.3)
        waiting = Held(a, "x", slot())
        await eventually(lambda: proxy.answered(asks("take")) == 2)
        await is_down(a)
        # Only the answer to the second one arrives, and after it nothing any more.
        proxy.hold(lambda command: b"tool:x" not in b"".join(command.words))
        proxy._pump_all()
        await early.end()
        await begins(waiting)
        proxy.let_go()
        await waiting.end()
        await running.end()


# ------------------------------------------------------------------------------------- it hangs, or is slow


@pytest.mark.slow
@pytest.mark.parametrize("fallback", ["error", "memory"])
async def test_a_store_that_hangs_costs_one_budget_and_is_not_asked_again(
    proxy: FaultProxy, fallback: str
) -> None:
    async with instance(proxy.url, fallback=fallback, storage_timeout=BRIEF, lease=10) as a:
        await once(a, "x", Policy(rate(99)))
        proxy.hold()
        proxy.forget()
        outcomes = [await code_of(once(a, "y", Policy(rate(3)))) for _ in range(20)]
        if fallback == "error":
            assert outcomes == [UNAVAILABLE] * 20
        else:
            assert outcomes == ["ok"] * 3 + [TOO_OFTEN] * 17
        assert asked(proxy, "take") <= 1, "a store that is down is not asked"
        assert a.statistics().outages == 1
        proxy.let_go()
        await is_up(a)


@pytest.mark.slow
async def test_a_store_that_is_down_is_probed_about_once_a_second(proxy: FaultProxy) -> None:
    async with instance(proxy.url, fallback="memory", storage_timeout=BRIEF, lease=10) as a:
        proxy.hold(asks("take", "renew"))
        await code_of(once(a, "x", Policy(rate(3))))
        await is_down(a)
        loop = asyncio.get_running_loop()
        began = loop.time()
        proxy.forget()
        for _ in range(60):
            await code_of(once(a, "x", Policy(rate(3))))
            await asyncio.sleep(0.05)
        passed = loop.time() - began
        # A probe asks what calls ask; the calls themselves, sixty of them, do not.
        assert 1 <= proxy.count(asks("take")) <= passed + 1
        assert proxy.count(asks("renew")) == 0
        proxy.let_go()
        await is_up(a)


@pytest.mark.parametrize("fallback", ["error", "memory"])
async def test_an_answer_that_comes_too_late_leaves_no_count_and_no_lease(
    proxy: FaultProxy, valkey: Valkey, fallback: str
) -> None:
    async with instance(proxy.url, fallback=fallback, storage_timeout=BRIEF) as a:
        await once(a, "x", slot(1, 0, rate_limit=rate(9)))
        proxy.hold(asks("take", "renew"))
        outcome = await code_of(once(a, "x", slot(1, 0, rate_limit=rate(9))))
        assert outcome == (UNAVAILABLE if fallback == "error" else "ok")
        proxy.let_go()
        await is_up(a)
        await eventually(lambda: (counted(valkey), held(valkey)) == (1, 0), "the late start is undone")


@pytest.mark.slow
async def test_a_slow_store_is_one_that_does_not_answer(proxy: FaultProxy, valkey: Valkey) -> None:
    async with instance(proxy.url, storage_timeout=BRIEF) as a:
        await once(a, "x", Policy(rate(9)))
        proxy.delay(2 * BRIEF)
        assert await code_of(once(a, "x", Policy(rate(9)))) == UNAVAILABLE
        proxy.delay(0)
        await is_up(a)
        await eventually(lambda: counted(valkey) == 1)
        assert await code_of(once(a, "x", Policy(rate(9)))) == "ok"


@pytest.mark.slow
async def test_a_caller_who_goes_while_the_store_hangs_is_answered_at_once(proxy: FaultProxy) -> None:
    async with instance(proxy.url, storage_timeout=60) as a:
        await once(a, "x", slot())
        proxy.hold()
        call = Held(a, "x", slot())
        await eventually(lambda: a.statistics().asking == 1)
        call.task.cancel()
        await asyncio.wait((call.task,), timeout=20)
        assert call.task.cancelled()
        assert (a.statistics().asking, a.statistics().places) == (0, 0)
        proxy.let_go()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.5, 2.5], ids=["shorter than a lease", "longer than a lease"])
@pytest.mark.parametrize("fallback", ["error", "memory"])
async def test_what_a_frozen_store_does_late_is_undone(
    own_valkey: Valkey, fallback: str, seconds: float
) -> None:
    policy = slot(1, 0, rate_limit=rate(9))
    async with instance(own_valkey.url, fallback=fallback, storage_timeout=BRIEF) as a:
        await once(a, "x", policy)
        own_valkey.freeze()
        # They lie in the store's connections, and it does them when it goes on.
        first = await asyncio.gather(*(code_of(once(a, "x", policy)) for _ in range(3)))
        if fallback == "error":
            assert first == [UNAVAILABLE] * 3
        await asyncio.sleep(seconds)
        own_valkey.thaw()
        await is_up(a)
        await eventually(lambda: (counted(own_valkey), held(own_valkey)) == (1, 0), "all of it is undone")
        await asyncio.sleep(0.3)
        assert (counted(own_valkey), held(own_valkey)) == (1, 0)
        assert await code_of(once(a, "x", policy)) == "ok"
        every_key_ends(own_valkey)


# ---------------------------------------------------------------------- connections and answers that are lost


async def test_a_connection_that_was_lost_meanwhile_is_made_anew_without_a_word(
    proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    async with instance(proxy.url) as a:
        for _ in range(5):
            assert await code_of(once(a, "x", slot(1, 0, rate_limit=rate(9)))) == "ok"
            proxy.reset()
        assert a.statistics().outages == 0
    assert told(caplog, logging.WARNING) == []


@pytest.mark.slow
@pytest.mark.parametrize("what", ["take", "release", "renew", "pass_on"])
@pytest.mark.parametrize("cut", ["cut_before", "lose_reply"])
async def test_a_question_whose_connection_is_cut_is_done_once(
    proxy: FaultProxy, valkey: Valkey, what: str, cut: str
) -> None:
    policy = slot(rate_limit=rate(99))
    async with (
        instance(proxy.url, admission={"max_active": 2, "reserved": 1}) as a,
        instance(valkey.url) as b,
    ):
        await once(a, "x", policy)
        fault = getattr(proxy, cut)(asks(what))
        running = await hold(b, "x", policy)
        waiting = await line_up(a, "x", policy)
        if what == "pass_on":
            busy = await hold(a, "other")
            await running.end()
            await eventually(lambda: fault.happened)
            await busy.end()
        else:
            await running.end()
        await (await begins(waiting)).end()
        await eventually(lambda: fault.happened, "it was cut")
        assert await code_of(once(b, "x", slot(1, 0, rate_limit=rate(99)))) == "ok"
        await eventually(lambda: (held(valkey), in_line(valkey), counted(valkey)) == (0, 0, 4))
        every_key_ends(valkey)
        assert a.statistics().outages == 0


@pytest.mark.slow
async def test_a_release_that_got_no_answer_is_repeated(proxy: FaultProxy, valkey: Valkey) -> None:
    async with instance(proxy.url, lease=5, storage_timeout=BRIEF) as a, instance(valkey.url, lease=5) as b:
        running = await hold(a, "x", slot(1, 0))
        lost = proxy.cut_before(asks("release"), times=4)
        assert await running.end() == "done"
        assert lost.happened
        await eventually(lambda: held(valkey) == 0)
        assert await code_of(once(b, "x", slot(1, 0))) == "ok"


@pytest.mark.slow
async def test_a_lost_subscription_is_made_anew(proxy: FaultProxy, valkey: Valkey) -> None:
    async with instance(proxy.url, lease=60) as a, instance(valkey.url, lease=60) as b:
        await eventually(lambda: proxy.answered("SUBSCRIBE"))
        proxy.reset()
        # It is made anew after a second; the client may have tried by itself before, in vain.
        await asyncio.sleep(1.2)
        await eventually(lambda: len(valkey.do("PUBSUB", "CHANNELS")) == 2)
        running = await hold(b, "x", slot())
        waiting = await line_up(a, "x", slot())
        proxy.hold(asks("renew"))
        await running.end()
        await begins(waiting)
        proxy.let_go()
        await waiting.end()


# ------------------------------------------------------------------------------------------------- it forgets


async def test_scripts_that_the_store_has_forgotten_are_sent_again(valkey: Valkey) -> None:
    async with instance(valkey.url) as a:
        for _ in range(3):
            assert await code_of(once(a, "x", slot(2, 0, rate_limit=rate(9)))) == "ok"
            valkey.do("SCRIPT FLUSH")
        assert a.statistics().outages == 0


@pytest.mark.slow
async def test_after_a_restart_without_data_holders_and_waiters_are_known_again(own_valkey: Valkey) -> None:
    async with instance(own_valkey.url) as a, instance(own_valkey.url) as b:
        running = await hold(a, "x", slot())
        first = await line_up(b, "x", slot())
        second = await line_up(a, "x", slot())
        await asyncio.to_thread(own_valkey.restart)
        await eventually(lambda: (held(own_valkey), in_line(own_valkey)) == (1, 2))
        await is_up(a, b)
        assert await code_of(once(b, "x", slot(1, 0))) == "CONCURRENCY_LIMIT"
        await running.end()
        await begins(first)
        assert second.waits, "they have kept their numbers"
        await first.end()
        await (await begins(second)).end()
        every_key_ends(own_valkey)


@pytest.mark.slow
async def test_after_a_restart_without_data_counts_begin_anew(own_valkey: Valkey) -> None:
    async with instance(own_valkey.url) as a:
        outcomes = [await code_of(once(a, "x", Policy(rate(2)))) for _ in range(3)]
        assert outcomes == ["ok", "ok", TOO_OFTEN]
        await asyncio.to_thread(own_valkey.restart)
        assert await code_of(once(a, "x", Policy(rate(2)))) in ("ok", UNAVAILABLE)
        await is_up(a)
        assert await code_of(once(a, "x", Policy(rate(2)))) == "ok"


@pytest.mark.slow
async def test_holders_that_the_store_forgets_hold_their_slots_above_the_limit_if_need_be(
    own_valkey: Valkey,
) -> None:
    async with instance(own_valkey.url) as a, instance(own_valkey.url) as b:
        running = [await hold(a, "x", slot(2, 0)) for _ in range(2)]
        own_valkey.do("FLUSHALL")
        # It comes before the holders are known again.
        newcomer = await hold(b, "x", slot(2, 0))
        await eventually(lambda: held(own_valkey) == 3)
        await newcomer.end()
        assert await code_of(once(b, "x", slot(2, 0))) == "CONCURRENCY_LIMIT"
        for each in running:
            assert await each.end() == "done"
        assert await code_of(once(b, "x", slot(2, 0))) == "ok"


@pytest.mark.slow
async def test_a_store_that_takes_no_more_data_is_one_that_is_down(own_valkey: Valkey) -> None:
    async with instance(own_valkey.url) as a:
        await once(a, "x", Policy(rate(9)))
        own_valkey.do("CONFIG SET", "maxmemory", 1)
        assert await code_of(once(a, "x", Policy(rate(9)))) == UNAVAILABLE
        own_valkey.do("CONFIG SET", "maxmemory", 0)
        await is_up(a)
        assert await code_of(once(a, "x", Policy(rate(9)))) == "ok"


# ------------------------------------------------------------------------------------------ leaving meanwhile


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [True, False], ids=["it comes back", "it never does"])
@pytest.mark.parametrize("fallback", ["error", "memory"])
async def test_who_leaves_while_the_store_is_away_leaves_no_task_and_no_connection_for_long(
    proxy: FaultProxy, fallback: str, comes_back: bool
) -> None:
    known = asyncio.all_tasks()
    async with instance(proxy.url, fallback=fallback) as a:
        await once(a, "x", slot(4))
        proxy.refuse()
        calls = [Held(a, "x", slot(4)) for _ in range(30)]
        await is_down(a)
        for call in calls:
            call.let_go()
        await asyncio.wait([call.task for call in calls])
    if comes_back:
        proxy.accept()
    await eventually(lambda: asyncio.all_tasks() == known, "no task is left")
    await asyncio.sleep(0.2)
    assert proxy.connections == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_no_instance_lets_a_mutex_overlap_itself_however_often_the_store_comes_and_goes(
    proxy: FaultProxy, seed: int
) -> None:
    rng = random.Random(seed)
    options = {"fallback": "memory", "storage_timeout": 1}
    running = {0: 0, 1: 0}
    most = {0: 0, 1: 0}

    async def body(which: int) -> None:
        running[which] += 1
        most[which] = max(most[which], running[which])
        await asyncio.sleep(rng.random() * 0.02)
        running[which] -= 1

    async def caller(guards: list[Guard]) -> Counter[str]:
        codes: Counter[str] = Counter()
        for _ in range(40):
            which = rng.randrange(2)
            policy = slot(1, rng.choice([0, 0.05, 20]), key="K", on_cancel="abort")
            call = guards[which].run(Call(f"t{policy.concurrency_limits}"), policy, partial(body, which))
            try:
                async with asyncio.timeout(rng.random() * 0.05 if rng.random() < 0.1 else None):
                    codes[await code_of(call)] += 1
            except TimeoutError:
                codes["cancelled"] += 1
            await asyncio.sleep(rng.random() * 0.02)
        return codes

    async with instance(proxy.url, **options) as a, instance(proxy.url, **options) as b:
        callers = asyncio.gather(*(caller([a, b]) for _ in range(8)))
        while not callers.done():
            await asyncio.sleep(rng.random() * 0.5)
            proxy.refuse()
            await asyncio.sleep(rng.random() * 0.5)
            proxy.accept()
            if rng.random() < 0.3:
                proxy.reset()
        codes: Counter[str] = sum(await callers, Counter())
        await eventually(lambda: not (a.statistics().active or b.statistics().active))
        await is_up(a, b)
    assert set(codes) <= {"ok", "CONCURRENCY_LIMIT", "QUEUE_TIMEOUT", "cancelled"}
    assert most == {0: 1, 1: 1}


# --------------------------------------------------------------------------------------------- at the start


@pytest.mark.slow
async def test_without_fallback_a_store_that_is_not_there_stops_the_start() -> None:
    with Valkey(password="hush") as server:
        server.kill()
        guard = instance(server.url, fallback="error", storage_timeout=BRIEF)
        with pytest.raises(ConfigurationError) as caught:
            await guard.__aenter__()
        assert server.address in str(caught.value)
        assert "hush" not in str(caught.value)
        # When it is there, the start succeeds.
        server.start()
        async with guard:
            assert await code_of(once(guard, "x", slot())) == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("fallback", ["error", "memory"])
async def test_a_store_with_another_password_stops_the_start_whatever_the_fallback(
    fallback: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Valkey(password="hush") as server:
        url = f"redis://:secret@{server.address}/0"
        with pytest.raises(ConfigurationError, match="refuses this client") as caught:
            await instance(url, fallback=fallback, storage_timeout=BRIEF).__aenter__()
    assert "secret" not in str(caught.value)
    assert "secret" not in caplog.text


@pytest.mark.slow
async def test_with_fallback_a_start_without_the_store_counts_alone_until_it_is_there(
    proxy: FaultProxy, valkey: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.refuse()
    options = {"fallback": "memory", "storage_timeout": BRIEF}
    async with instance(proxy.url, **options) as a, instance(valkey.url) as b:
        assert (a.health().status, a.health().is_ready) == ("degraded", True)
        outcomes = [await code_of(once(a, "x", Policy(rate(1)))) for _ in range(2)]
        assert outcomes == ["ok", TOO_OFTEN]
        assert len(told(caplog, logging.WARNING)) == 1
        proxy.accept()
        await is_up(a)
        assert await code_of(once(a, "x", Policy(rate(1)))) == "ok"
        assert await code_of(once(b, "x", Policy(rate(1)))) == TOO_OFTEN


@pytest.mark.slow
@pytest.mark.parametrize(("production", "fallback"), [(True, "error"), (False, "memory")])
async def test_what_is_done_without_the_store_depends_on_production_if_nobody_says(
    proxy: FaultProxy, production: bool, fallback: str
) -> None:
    guard = Guard({"storage": proxy.url, "storage_timeout": 5}, production=production)
    async with guard:
        proxy.refuse()
        expected = UNAVAILABLE if fallback == "error" else "ok"
        assert await code_of(once(guard, "x", Policy(rate(9)))) == expected
        proxy.accept()


# -------------------------------------------------------------------------------------------------- observing


async def test_observed_calls_pass_without_the_store(proxy: FaultProxy) -> None:
    async with instance(proxy.url, mode="observe") as a:
        await once(a, "x", slot(1, 0))
        proxy.refuse()
        running = [await hold(a, "x", slot(1, 0, rate_limit=rate(1))) for _ in range(3)]
        assert a.statistics().counts.would_reject.get(UNAVAILABLE) == 3
        assert a.health().is_ready
        for each in running:
            assert await each.end() == "done"
        proxy.accept()


@pytest.mark.slow
async def test_observed_calls_are_not_told_that_they_lost_their_slots(own_valkey: Valkey) -> None:
    with instances(1, own_valkey.url, mode="observe") as (one,):
        await one.ready()
        for name in ("A", "B"):
            one.call(name, slot(1, 0))
            await one.said(name, "began")
        own_valkey.do("FLUSHALL")
        await asyncio.sleep(1.5)
        one.stop()
        await asyncio.sleep(2)
        one.go_on()
        await asyncio.sleep(1)
        for name in ("A", "B"):
            one.end(name)
            assert await one.answer(name) == "ok"
            assert one.heard(name, "aborted LEASE_LOST") is None


# --------------------------------------------------------------------------------------------- many at once


@pytest.mark.slow
async def test_many_calls_at_once_when_the_store_goes_each_get_one_answer(
    proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    for fallback in ("error", "memory"):
        async with instance(proxy.url, fallback=fallback) as a:
            policy = Policy(rate(999), Concurrency(3, queue_timeout=20))
            calls = [asyncio.create_task(code_of(once(a, "x", policy))) for _ in range(60)]
            await eventually(lambda: asked(proxy, "take") >= 10)
            proxy.refuse()
            # Whoever waits without fallback waits for the store.
            await asyncio.sleep(0.1)
            proxy.accept()
            outcomes = set(await asyncio.gather(*calls))
            assert outcomes <= {"ok", UNAVAILABLE}
            assert fallback == "error" or outcomes == {"ok"}
            assert a.statistics().active == 0
            proxy.forget()
