"""A Redis that is gone, forgets, or is cut off in the middle; and what is left in it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis

import frontmcp_py.storage.redis as module
from frontmcp_py import ConfigurationError
from frontmcp_py.policy import STRATEGIES
from frontmcp_py.storage import (
    Answer,
    Ask,
    NoSlot,
    Queued,
    RateNeed,
    Renewed,
    SlotNeed,
    Started,
    StorageUnavailable,
    TooOften,
    Turn,
)
from frontmcp_py.storage.redis import RedisStorage, _version, script
from tests.fault_proxy import Cut, FaultProxy
from tests.servers import Port, Valkey, eventually

MINUTE_US = 60_000_000
MOMENT_US = 1_800_000_000_000_000
"""A moment in the middle of every window used here, for tests that compare what is left in two stores."""


NUMBER = "{frontmcp}:number"


def rates(most: int, window_us: int = MINUTE_US) -> tuple[RateNeed, ...]:
    """One limit of each strategy."""
    return tuple(RateNeed(strategy, strategy, most, window_us) for strategy in STRATEGIES)


class Instances:
    """Makes storages, and closes them."""

    def __init__(self, uri: str, **options: Any) -> None:
        self._uri = uri
        self._options = {"timeout": 5.0, **options}
        self._made: list[RedisStorage] = []

    def new(self, uri: str | None = None, **options: Any) -> RedisStorage:
        storage = RedisStorage(uri or self._uri, **{**self._options, **options})
        self._made.append(storage)
        return storage

    async def close(self) -> None:
        for storage in self._made:
            await storage.close()


@contextlib.asynccontextmanager
async def instances_of(uri: str, **options: Any) -> AsyncIterator[Instances]:
    instances = Instances(uri, **options)
    try:
        yield instances
    finally:
        await instances.close()


@pytest.fixture
async def instances(valkey: Valkey) -> AsyncIterator[Instances]:
    async with instances_of(valkey.url) as made:
        yield made


def left_in(server: Valkey) -> dict[str, object]:
    """Every key and what it holds. On the way each is seen to have an end."""
    with redis.Redis(server.host, server.port, decode_responses=True) as client, client.pipeline() as look:
        keys: list[str] = sorted(client.keys("*"))
        for key in keys:
            look.type(key)
            look.pttl(key)
        about = look.execute()
        for key, kind in zip(keys, about[::2], strict=True):
            if kind == "zset":
                look.zrange(key, 0, -1, withscores=True)
            elif kind == "hash":
                look.hgetall(key)
            else:
                look.get(key)
        values = look.execute()
    assert [key for key, milliseconds in zip(keys, about[1::2], strict=True) if milliseconds == -1] == []
    return dict(zip(keys, values, strict=True))


def load_scripts(server: Valkey) -> None:
    for name in ("take", "release", "pass_on", "renew"):
        server.do("SCRIPT LOAD", script(name).source)


# -- what goes wrong -------------------------------------------------------------------------------------


@pytest.fixture
def nobody() -> Iterator[Port]:
    """A port where nobody listens."""
    port = Port()
    yield port
    port.give_up()


Question = Callable[[RedisStorage], Awaitable[object]]
QUESTIONS: dict[str, Question] = {
    "open": lambda storage: storage.open(),
    "take": lambda storage: storage.take(Ask("x", rates(1), (SlotNeed("s", 1),))),
    "pass_on": lambda storage: storage.pass_on("x", 1),
    "release": lambda storage: storage.release("x"),
    "renew": lambda storage: storage.renew(["x"], ["y"]),
    "listen": lambda storage: storage.listen(lambda turn: None, lambda: None),
}


@pytest.mark.parametrize("question", QUESTIONS)
async def test_a_server_that_is_not_there_is_unavailable(question: str, nobody: Port) -> None:
    async with instances_of(f"redis://127.0.0.1:{nobody.number}") as instances:
        with pytest.raises(StorageUnavailable, match=r"Error \d+ connecting to"):
            await QUESTIONS[question](instances.new())


@pytest.mark.parametrize("question", QUESTIONS)
async def test_a_server_that_does_not_know_the_password_is_unavailable_and_nobody_is_told_it(
    question: str,
) -> None:
    refusal = ConfigurationError if question == "open" else StorageUnavailable
    with Valkey(password="right") as server:
        async with instances_of(f"redis://:hidden@{server.address}") as instances:
            storage = instances.new()
            with pytest.raises(refusal) as caught:
                await QUESTIONS[question](storage)
            assert "hidden" not in f"{caught.value}{caught.value.__cause__}{storage.where}"


async def test_a_server_that_answers_with_an_error_is_unavailable(own_valkey: Valkey) -> None:
    async with instances_of(own_valkey.url) as instances:
        storage = instances.new()
        own_valkey.do("CONFIG SET", "maxmemory", "1")
        with pytest.raises(StorageUnavailable, match="OutOfMemory"):
            await storage.take(Ask("x", rates(1)))
        own_valkey.do("CONFIG SET", "maxmemory", "0")
        assert isinstance(await storage.take(Ask("x", rates(1))), Started)


async def test_no_error_when_the_script_cache_is_emptied_between_any_two_questions(
    valkey: Valkey, instances: Instances
) -> None:
    """vutran1710/PyrateLimiter#182, upstash/ratelimit-js#122."""
    storage = instances.new()
    slots = (SlotNeed("s", 2),)

    def forget() -> None:
        valkey.do("SCRIPT FLUSH")

    answers: list[Answer] = []
    for name in ("a", "b", "c"):
        forget()
        answers.append(await storage.take(Ask(name, rates(5), slots)))
    assert [type(answer) for answer in answers] == [Started, Started, Queued]
    forget()
    assert await storage.renew(["a", "b"], ["c"]) == Renewed()
    forget()
    assert list(await storage.release("a")) == [Turn("c", 1)]
    forget()
    assert list(await storage.pass_on("c", 1)) == []
    left_in(valkey)


async def test_no_error_when_the_server_comes_back_empty(own_valkey: Valkey) -> None:
    """vutran1710/PyrateLimiter#182: counts begin from zero, and a renewal tells who held something before."""
    async with instances_of(own_valkey.url) as instances:
        storage = instances.new()
        slots = (SlotNeed("s", 2),)
        for name in ("a", "b", "waits"):
            await storage.take(Ask(name, rates(2), slots))
        await asyncio.to_thread(own_valkey.restart)
        assert list(await storage.release("a")) == []
        assert await storage.renew(["b"], ["waits"]) == Renewed((), ("b",), ("waits",))
        assert isinstance(await storage.take(Ask("b", slots=slots, attempt=2, force=True)), Started)
        assert isinstance(await storage.take(Ask("c", rates(1), slots)), Started)
        assert isinstance(await storage.take(Ask("d", rates(1), slots)), TooOften)
        assert await storage.take(Ask("e", slots=slots, may_wait=False)) == NoSlot((0,), None)
        left_in(own_valkey)


async def test_a_server_that_was_killed_is_unavailable_until_it_is_back(own_valkey: Valkey) -> None:
    async with instances_of(own_valkey.url) as instances:
        storage = instances.new()
        assert isinstance(await storage.take(Ask("a", rates(2))), Started)
        await asyncio.to_thread(own_valkey.kill)
        for _ in range(3):
            with pytest.raises(StorageUnavailable):
                await storage.take(Ask("b", rates(2)))
        await asyncio.to_thread(own_valkey.restart)
        assert isinstance(await storage.take(Ask("b", rates(2))), Started)


async def test_a_server_that_hangs_takes_no_connection_away_from_those_who_give_up(
    own_valkey: Valkey,
) -> None:
    async with instances_of(own_valkey.url, connections=2, timeout=0.05) as instances:
        storage = instances.new()
        assert isinstance(await storage.take(Ask("a", rates(50))), Started)
        own_valkey.freeze()
        for n in range(6):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await storage.take(Ask(f"late-{n}", rates(50)))
        own_valkey.thaw()
        answers = await asyncio.gather(*(storage.take(Ask(f"new-{n}", rates(50))) for n in range(20)))
        assert all(isinstance(answer, Started) for answer in answers)


# -- cut off at every command ----------------------------------------------------------------------------


async def _free(storage: RedisStorage) -> Answer:
    return await storage.take(Ask("a", rates(3), (SlotNeed("s", 1), SlotNeed("t", 2))))


async def _in_line(storage: RedisStorage) -> None:
    await _free(storage)
    await storage.take(Ask("b", rates(3), (SlotNeed("s", 1),)))


async def _served(storage: RedisStorage) -> None:
    await _in_line(storage)
    await storage.take(Ask("c", rates(3), (SlotNeed("s", 1),)))
    await storage.release("a")


Step = Callable[[RedisStorage], Awaitable[object]]
STEPS: dict[str, tuple[Step | None, Step]] = {
    "take": (None, _free),
    "take and wait": (_free, lambda storage: storage.take(Ask("b", rates(3), (SlotNeed("s", 1),)))),
    "take, refused": (_free, lambda storage: storage.take(Ask("b", rates(1)))),
    "take, forced": (
        _free,
        lambda storage: storage.take(Ask("b", rates(1), (SlotNeed("s", 1),), force=True)),
    ),
    "release": (_in_line, lambda storage: storage.release("a")),
    "release, undone": (_in_line, lambda storage: storage.release("a", undo=True)),
    "leave the line": (_in_line, lambda storage: storage.release("b", undo=True)),
    "renew": (_in_line, lambda storage: storage.renew(["a", "gone"], ["b"])),
    "pass on": (_served, lambda storage: storage.pass_on("b", 1)),
}


@pytest.mark.parametrize(
    "cut", [Cut.REPLY_LOST, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (Cut.BEFORE, Cut.AFTER))]
)
@pytest.mark.parametrize("step", STEPS)
async def test_a_question_cut_off_at_any_command_is_as_if_asked_once(
    valkey: Valkey, step: str, cut: Cut
) -> None:
    """JSONbored/loopover#9493, redis/redis#4548, dv/redis-semaphore#64 and #66.

    The client asks again by itself after one cut, so each command is cut twice as well: then the answer is an
    error, and whoever asks has to ask again. Only the numbers of arrival may have gaps, by calls that were
    refused.
    """
    before, ask = STEPS[step]
    async with FaultProxy(valkey) as proxy, instances_of(proxy.url, now_us=lambda: MOMENT_US) as instances:
        storage = instances.new()
        storage.instance = "the instance"

        async def prepare(*, scripts: bool) -> None:
            valkey.empty()
            if before is not None:
                await before(storage)
            if scripts:
                load_scripts(valkey)
            else:
                valkey.do("SCRIPT FLUSH")

        for scripts in (True, False):
            await prepare(scripts=scripts)
            proxy.forget()
            answer = await ask(storage)
            right, commands = left_in(valkey), proxy.count()
            assert commands == (1 if scripts else 2)
            for nth, times in itertools.product(range(1, commands + 1), (1, 2)):
                await prepare(scripts=scripts)
                fault = _arm(proxy, cut, nth, times)
                again: object = None
                while again is None:
                    with contextlib.suppress(StorageUnavailable):
                        again = await ask(storage)
                    left_in(valkey)
                proxy.heal()
                assert fault.happened >= 1
                if isinstance(answer, (Started, Queued, TooOften, NoSlot)):
                    assert again == answer
                left = left_in(valkey)
                if step == "take, refused":
                    left[NUMBER] = right[NUMBER]
                assert left == right


def _arm(proxy: FaultProxy, cut: Cut, nth: int, times: int) -> Any:
    arm = {Cut.BEFORE: proxy.cut_before, Cut.REPLY_LOST: proxy.lose_reply, Cut.AFTER: proxy.cut_after}[cut]
    return arm(nth=nth, times=times)


async def test_a_turn_whose_answer_was_lost_is_found_by_the_renewal(valkey: Valkey) -> None:
    async with FaultProxy(valkey) as proxy, instances_of(proxy.url) as instances:
        storage = instances.new()
        await _in_line(storage)
        load_scripts(valkey)
        proxy.lose_reply("EVALSHA", times=2)
        with pytest.raises(StorageUnavailable):
            await storage.release("a")
        assert list(await storage.release("a")) == []
        assert await storage.renew([], ["b"]) == Renewed((Turn("b", 1),))


async def test_an_answer_that_comes_after_its_asker_has_gone_is_nobody_elses(valkey: Valkey) -> None:
    async with FaultProxy(valkey) as proxy, instances_of(proxy.url, connections=1) as instances:
        storage = instances.new()
        await storage.take(Ask("first", (), (SlotNeed("s", 1),)))
        proxy.hold("EVALSHA")
        late = asyncio.ensure_future(storage.take(Ask("late", (), (SlotNeed("s", 1),))))
        await eventually(
            lambda: proxy.commands[-1].answered and proxy.count("EVALSHA") == 2, "it is answered"
        )
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        proxy.let_go()
        assert list(await storage.release("late", undo=True)) == []
        assert isinstance(await storage.take(Ask("new", (), (SlotNeed("t", 1),))), Started)


# -- who is told -----------------------------------------------------------------------------------------


async def test_a_listener_hears_the_turns_of_its_own_calls(instances: Instances) -> None:
    one, two = instances.new(), instances.new()
    heard: list[Turn] = []
    came, ready = asyncio.Event(), asyncio.Event()

    def hear(turn: Turn) -> None:
        heard.append(turn)
        came.set()

    listening = asyncio.ensure_future(two.listen(hear, ready.set))
    await ready.wait()
    slots = (SlotNeed("s", 1),)
    await one.take(Ask("holds", slots=slots))
    for name in ("own", "theirs"):
        await (one if name == "own" else two).take(Ask(name, slots=slots, attempt=3))
    assert list(await one.release("holds")) == [Turn("own", 3)]
    assert list(await one.release("own")) == []
    await came.wait()
    assert heard == [Turn("theirs", 3)]
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening


async def test_a_listener_that_is_cut_off_says_so_at_once(valkey: Valkey) -> None:
    async with FaultProxy(valkey) as proxy, instances_of(proxy.url) as instances:
        ready = asyncio.Event()
        listening = asyncio.ensure_future(instances.new().listen(lambda turn: None, ready.set))
        await ready.wait()
        proxy.refuse()
        with pytest.raises(StorageUnavailable):
            await listening


async def test_nothing_stays_open_after_closing_and_it_can_be_used_again(valkey: Valkey) -> None:
    async with FaultProxy(valkey) as proxy, instances_of(proxy.url) as instances:
        storage = instances.new()
        for _ in range(2):
            await storage.open()
            await asyncio.gather(*(storage.take(Ask(f"{n}", rates(99))) for n in range(9)))
            assert proxy.connections > 0
            await storage.close()
            await eventually(lambda: proxy.connections == 0, "all connections are closed")
        await storage.close()


def test_a_storage_is_used_from_one_loop_after_another(valkey: Valkey) -> None:
    storage = RedisStorage(valkey.url, timeout=5)

    async def use(name: str) -> Answer:
        try:
            return await storage.take(Ask(name, rates(2)))
        finally:
            await storage.close()

    assert [type(asyncio.run(use(name))) for name in "abc"] == [Started, Started, TooOften]


# -- which servers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "found"),
    [
        ({"redis_version": "6.2.14"}, ("redis", (6, 2))),
        ({"redis_version": "8"}, ("redis", (8, 0))),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "9.1.0"}, ("valkey", (9, 1))),
    ],
)
def test_the_name_and_version_of_a_server_are_read(about: dict[str, str], found: object) -> None:
    assert _version(about) == found


async def test_a_server_that_is_too_old_is_refused(
    instances: Instances, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not: the storage asks for one that is newer than any."""
    monkeypatch.setattr(module, "OLDEST_VALKEY", (99, 0))
    monkeypatch.setattr(module, "OLDEST_REDIS", (99, 0))
    with pytest.raises(ConfigurationError, match=r"is (Valkey|Redis) \d+\.\d+; 99\.0 or later is needed"):
        await instances.new().open()


# -- whose clock -----------------------------------------------------------------------------------------


@pytest.fixture
def clock_off_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets this process think that it is earlier or later."""
    right, right_ns = time.time, time.time_ns
    off = [0.0]
    monkeypatch.setattr(time, "time", lambda: right() + off[0])
    monkeypatch.setattr(time, "time_ns", lambda: right_ns() + round(off[0] * 1e9))
    return lambda seconds: off.__setitem__(0, seconds)


async def test_clocks_of_instances_that_are_wrong_change_nothing(
    instances: Instances, clock_off_by: Callable[[float], None]
) -> None:
    """spring-cloud-gateway#1688, sourcegraph#56826, openlinker#2019."""
    early, late = instances.new(lease=5), instances.new(lease=5)
    day = 24 * 3600 * 1_000_000
    need = tuple(RateNeed(strategy, strategy, 4, day) for strategy in ("moving-window", "fixed-window"))
    started = 0
    clock_off_by(-10)
    assert isinstance(await early.take(Ask("holds", slots=(SlotNeed("s", 1),))), Started)
    for n in range(20):
        clock_off_by(10 if n % 2 else -10)
        storage = late if n % 2 else early
        started += isinstance(await storage.take(Ask(f"{n}", need)), Started)
        clock_off_by(10)
        refused = await late.take(Ask(f"no-{n}", slots=(SlotNeed("s", 1),), may_wait=False))
        assert refused == NoSlot((0,), None)
        clock_off_by(-10)
        assert await early.renew(["holds"], []) == Renewed()
    assert started == 4


async def test_no_time_of_an_instance_reaches_the_server(valkey: Valkey) -> None:
    async with FaultProxy(valkey) as proxy, instances_of(proxy.url) as instances:
        await _served(instances.new())
        asked = [command for command in proxy.commands if command.name in ("EVAL", "EVALSHA")]
        assert len(asked) >= 4
        # The first argument after the script and its one key.
        assert {command.words[4] for command in asked} == {b"0"}


# -- what is left ----------------------------------------------------------------------------------------


async def test_instances_with_different_leases_do_not_shorten_each_others(valkey: Valkey) -> None:
    """As while a new lease is rolled out: the short one must not end the keys that the long one is in."""
    async with instances_of(valkey.url) as instances:
        long, short = instances.new(lease=60), instances.new(lease=1)
        slots = (SlotNeed("s", 1),)
        await long.take(Ask("holds", rates(9), slots))
        await long.take(Ask("waits", rates(9), slots))
        for ask in (Ask("a", slots=slots), Ask("b", slots=(SlotNeed("s", 2),), rank=0)):
            await short.take(ask)
        await short.renew(["b"], ["a"])
        shared = [key for key in left_in(valkey) if ":call:" not in key and not key.endswith(":s:")]
        lives = {key: valkey.do("PTTL", key) for key in shared}
        assert {kind for key in shared if (kind := key.split(":")[1])} >= {"held", "line", "live", "number"}
        assert all(milliseconds > 50_000 for milliseconds in lives.values()), lives


@pytest.mark.slow
async def test_dead_holders_and_waiters_leave_nothing_and_slow_nobody_down(own_valkey: Valkey) -> None:
    """SGrondin/bottleneck#115: 2000 instances die, each with a call that runs and one that waits."""
    async with instances_of(own_valkey.url, lease=6) as instances:
        dead, alive = instances.new(), instances.new()
        many, one = SlotNeed("many", 5000), SlotNeed("one", 1)
        await dead.take(Ask("first", slots=(one,)))

        async def die(n: int) -> None:
            await dead.take(Ask(f"holds-{n}", rates(10**6, 100_000), (many,)))
            await dead.take(Ask(f"waits-{n}", slots=(one,)))

        for begin in range(0, 2000, 100):
            await asyncio.gather(*(die(n) for n in range(begin, begin + 100)))
        assert own_valkey.do("ZCARD", "{frontmcp}:held:many") == own_valkey.do("ZCARD", "{frontmcp}:line:one")

        def commands() -> int:
            stats = own_valkey.do("INFO", "commandstats")
            return sum(row["calls"] for row in stats.values())

        costs: list[int] = []

        async def count(question: Awaitable[object]) -> None:
            before = commands()
            await question
            costs.append(commands() - before)

        # Nobody renews them, and somebody who lives stands in line with them: that keeps the line.
        waits = Ask("lives", slots=(one, many))
        await alive.take(waits)
        asked = itertools.count()

        async def has_its_turn() -> bool:
            name = f"asks-{next(asked)}"
            await count(alive.take(Ask(name, rates(10**6), (one, many))))
            await count(alive.release(name))
            renewed = alive.renew([], ["lives"])
            before = commands()
            turns = (await renewed).turns
            costs.append(commands() - before)
            return bool(turns)

        await eventually(has_its_turn, "the dead have gone, and the one who lives is first", within=30)
        assert max(costs) < 150
        await alive.release("lives")
        await eventually(lambda: not own_valkey.do("KEYS", "*:call:*"), "nothing is known of the dead")
        for _ in range(10):
            await alive.take(Ask("last", slots=(many, one)))
            await alive.release("last")
        left = left_in(own_valkey)
        assert sum(len(value) if isinstance(value, (list, dict)) else 1 for value in left.values()) <= 12, (
            left
        )
