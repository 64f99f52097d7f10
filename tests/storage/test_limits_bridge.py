"""Rate limits counted by the storages and strategies of the `limits` package."""

from __future__ import annotations

import asyncio
import gc
import importlib.abc
import sys
from collections.abc import AsyncIterator, Sequence
from types import ModuleType

import pytest

from frontmcp_py import ConfigurationError
from frontmcp_py.policy import STRATEGIES
from frontmcp_py.storage import (
    Answer,
    Ask,
    RateNeed,
    Renewed,
    SlotNeed,
    Started,
    StorageUnavailable,
    TooOften,
)
from frontmcp_py.storage.limits_bridge import LimitsStorage
from tests.servers import Memcached, Port, eventually

MINUTE_US = 60_000_000
HOUR_US = 60 * MINUTE_US
DAY_US = 24 * HOUR_US


def rate(
    most: int, *, key: str = "k", strategy: str = "fixed-window", window_us: int = MINUTE_US
) -> RateNeed:
    return RateNeed(key, strategy, most, window_us)


class Calls:
    """A storage, and calls that ask it for these rates, one after the other."""

    def __init__(self, storage: LimitsStorage) -> None:
        self.storage = storage
        self._lease = 0

    async def ask(self, *rates: RateNeed, force: bool = False) -> Answer:
        self._lease += 1
        return await self.storage.take(Ask(f"call-{self._lease}", rates, force=force))

    async def started(self, *rates: RateNeed, of: int) -> int:
        answers = [await self.ask(*rates) for _ in range(of)]
        return sum(isinstance(answer, Started) for answer in answers)


@pytest.fixture
async def memory() -> AsyncIterator[Calls]:
    storage = LimitsStorage("memory://")
    yield Calls(storage)
    await storage.close()


@pytest.fixture
async def cached(memcached: Memcached) -> AsyncIterator[Calls]:
    storage = LimitsStorage(memcached.url, timeout=5)
    yield Calls(storage)
    await storage.close()


# -- counting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_limit_lets_its_number_through_and_tells_how_long_to_wait(
    memory: Calls, strategy: str
) -> None:
    need = rate(3, strategy=strategy, window_us=DAY_US)
    assert await memory.started(need, of=3) == 3
    refusal = await memory.ask(need)
    assert isinstance(refusal, TooOften)
    assert refusal.rate == 0
    assert 0 < refusal.wait_us <= 2 * DAY_US


@pytest.mark.parametrize("strategy", ["fixed-window", "sliding-window"])
async def test_a_memcached_counts_for_all_who_share_it(memcached: Memcached, strategy: str) -> None:
    instances = [Calls(LimitsStorage(memcached.url, timeout=5)) for _ in range(2)]
    need = rate(5, strategy=strategy, window_us=DAY_US)
    for each in instances:
        await each.storage.open()
    assert [await each.started(need, of=3) for each in instances] == [3, 2]
    apart = Calls(LimitsStorage(memcached.url, prefix="other", timeout=5))
    assert await apart.started(need, of=3) == 3
    for each in [*instances, apart]:
        await each.storage.close()


async def test_calls_at_once_from_two_instances_are_never_more_than_the_limit(memcached: Memcached) -> None:
    instances = [Calls(LimitsStorage(memcached.url, timeout=5)) for _ in range(2)]
    answers = await asyncio.gather(*(each.ask(rate(7)) for _ in range(20) for each in instances))
    assert sum(isinstance(answer, Started) for answer in answers) == 7
    assert all(isinstance(answer, TooOften) for answer in answers if not isinstance(answer, Started))
    for each in instances:
        await each.storage.close()


async def test_the_longest_wait_of_several_limits_is_told_and_nothing_is_counted_then(memory: Calls) -> None:
    short, long, roomy = rate(1, key="a"), rate(1, key="b", window_us=HOUR_US), rate(9, key="c")
    assert await memory.started(short, long, of=1) == 1
    refusal = await memory.ask(short, roomy, long)
    assert isinstance(refusal, TooOften)
    assert refusal.rate == 2
    assert 59 * MINUTE_US < refusal.wait_us <= HOUR_US + MINUTE_US
    assert await memory.started(roomy, of=10) == 9


async def test_limits_with_one_key_share_nothing_when_strategy_number_or_window_differ(memory: Calls) -> None:
    needs = [
        *(rate(2, strategy=strategy) for strategy in STRATEGIES),
        rate(3),
        rate(2, window_us=HOUR_US),
    ]
    for need in needs:
        assert await memory.started(need, of=5) == need.most


async def test_a_forced_call_is_counted_without_a_look(memory: Calls) -> None:
    assert await memory.ask(rate(2), rate(1, key="b"), force=True) == Started(0)
    assert await memory.ask(rate(2), rate(1, key="b"), force=True) == Started(0)
    assert isinstance(await memory.ask(rate(2)), TooOften)


async def test_keys_too_long_for_a_memcached_or_with_odd_characters_are_told_apart(
    memcached: Memcached,
) -> None:
    calls = Calls(LimitsStorage(memcached.url, prefix="ü" * 300, timeout=5))
    for strategy in ("fixed-window", "sliding-window"):
        for key in ("x" * 1000 + "1", "x" * 1000 + "2", "ü 1", "ü 2", "\r\n", "short"):
            need = rate(2, key=key, strategy=strategy, window_us=DAY_US)
            assert await calls.started(need, of=3) == 2
    await calls.storage.close()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_lone_retry_after_the_wait_is_admitted(memory: Calls, strategy: str) -> None:
    need = rate(2, strategy=strategy, window_us=2_000_000)
    assert await memory.started(need, of=2) == 2
    refusal = await memory.ask(need)
    assert isinstance(refusal, TooOften)
    await asyncio.sleep(refusal.wait_us / 1e6)
    assert isinstance(await memory.ask(need), Started)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fixed-window", "sliding-window"])
async def test_a_lone_retry_after_the_wait_is_admitted_by_a_memcached(cached: Calls, strategy: str) -> None:
    need = rate(2, strategy=strategy, window_us=3_000_000)
    answers = [await cached.ask(need) for _ in range(4)]
    refusal = next(answer for answer in answers if isinstance(answer, TooOften))
    await asyncio.sleep(refusal.wait_us / 1e6)
    assert isinstance(await cached.ask(need), Started)


# -- what is not shared ----------------------------------------------------------------------------------


async def test_nothing_is_held_and_nothing_is_taken_back(memory: Calls) -> None:
    storage = memory.storage
    assert not storage.shares_slots
    assert await memory.ask(rate(1)) == Started(0)
    assert list(await storage.release("call-1", undo=True)) == []
    assert list(await storage.pass_on("call-1", 1)) == []
    assert await storage.renew(["call-1"], []) == Renewed()
    assert isinstance(await memory.ask(rate(1)), TooOften)
    with pytest.raises(ConfigurationError, match="cannot share slots"):
        await storage.take(Ask("x", slots=(SlotNeed("s", 1),)))


async def test_there_is_nothing_to_listen_to(memory: Calls) -> None:
    ready = asyncio.Event()
    listening = asyncio.ensure_future(memory.storage.listen(lambda turn: None, ready.set))
    await ready.wait()
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening


# -- what cannot be counted ------------------------------------------------------------------------------


def test_what_a_storage_can_count_is_told_before_any_call() -> None:
    memory = LimitsStorage("memory://")
    memcached = LimitsStorage("memcached://localhost:1")
    assert [memory.cannot_count(strategy, 60_000_000) for strategy in STRATEGIES] == [None] * 3
    assert memcached.cannot_count("moving-window", 60_000_000) is not None
    said = [
        memcached.cannot_count("moving-window", MINUTE_US),
        memory.cannot_count("fixed-window", 1_500_000),
        memcached.cannot_count("fixed-window", 31 * DAY_US),
        memcached.cannot_count("sliding-window", 16 * DAY_US),
    ]
    assert said == [
        "a strategy that memcached can do: fixed-window, sliding-window",
        "a window of whole seconds",
        "a window of at most 30 days",
        "a window of at most 15 days",
    ]
    assert memcached.cannot_count("fixed-window", 30 * DAY_US) is None
    assert memcached.cannot_count("sliding-window", 15 * DAY_US) is None
    assert memory.cannot_count("moving-window", 366 * DAY_US) is None


async def test_a_limit_that_cannot_be_counted_is_never_let_through(memory: Calls) -> None:
    with pytest.raises(
        ConfigurationError, match=r"'k' \(fixed-window, 0.5 s\); give a window of whole seconds"
    ):
        await memory.ask(rate(1, window_us=500_000))


async def test_the_longest_windows_of_a_memcached_are_counted(cached: Calls) -> None:
    assert await cached.started(rate(2, window_us=30 * DAY_US), of=3) == 2
    assert await cached.started(rate(2, strategy="sliding-window", window_us=15 * DAY_US), of=3) == 2


@pytest.mark.parametrize("uri", ["carrierpigeon://x", "async+carrierpigeon://x"])
def test_an_unknown_scheme_is_refused_with_those_that_are_known(uri: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LimitsStorage(uri)
    assert str(caught.value) == (
        "Throttle.storage: the scheme carrierpigeon:// is not known; give redis://, memcached://, memory://, "
        "mongodb://, mongodb+srv://"
    )


class Missing(importlib.abc.MetaPathFinder):
    """Lets no module of these packages be imported."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(name, name=name)


@pytest.mark.parametrize(
    ("uri", "package"), [("mongodb://localhost:1", "motor"), ("memcached://localhost:1", "memcachio")]
)
def test_a_client_library_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, uri: str, package: str
) -> None:
    monkeypatch.setattr(sys, "meta_path", [Missing(package), *sys.meta_path])
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        ConfigurationError, match=f"needs the package {package}; install it: pip install {package}"
    ):
        LimitsStorage(uri)


@pytest.mark.parametrize("uri", ["memcached://u:hidden@host", "memcached://u:hidden@host:x"])
def test_an_address_that_cannot_be_read_is_refused_without_its_password(uri: str) -> None:
    with pytest.raises(ConfigurationError, match="give memcached:// with host and port") as caught:
        LimitsStorage(uri)
    assert "hidden" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_where_it_is_has_no_password() -> None:
    assert LimitsStorage("memcached://u:hidden@host:1/?x=hidden").where == "memcached://host:1"


# -- outages ---------------------------------------------------------------------------------------------


async def test_a_store_that_is_not_there_is_unavailable() -> None:
    port = Port()
    storage = LimitsStorage(f"memcached://127.0.0.1:{port.number}", timeout=5)
    with pytest.raises(StorageUnavailable):
        await storage.open()
    for _ in range(5):
        with pytest.raises(StorageUnavailable):
            await storage.take(Ask("x", (rate(1),)))
    await storage.close()
    port.give_up()


async def test_a_store_that_was_gone_is_used_again_when_it_is_back() -> None:
    with Memcached() as server:
        calls = Calls(LimitsStorage(server.url, timeout=5))
        assert await calls.started(rate(2), of=1) == 1
        await asyncio.to_thread(server.kill)
        for _ in range(3):
            with pytest.raises(StorageUnavailable):
                await calls.ask(rate(2))
        await asyncio.to_thread(server.restart)
        assert await calls.started(rate(2), of=3) == 2
        await calls.storage.close()


async def test_a_store_that_hangs_is_given_up_and_takes_no_connection_away() -> None:
    with Memcached() as server:
        calls = Calls(LimitsStorage(server.url, timeout=0.1))
        assert await calls.started(rate(50), of=1) == 1
        server.freeze()
        with pytest.raises(StorageUnavailable):
            await calls.ask(rate(50))
        # Whoever asks may have less patience than the client.
        for turns in range(10):
            question = asyncio.ensure_future(calls.ask(rate(50)))
            for _ in range(turns):
                await asyncio.sleep(0)
            question.cancel()
            with pytest.raises((asyncio.CancelledError, StorageUnavailable)):
                await question
        server.thaw()

        async def answers() -> bool:
            try:
                return isinstance(await calls.ask(rate(50)), Started)
            except StorageUnavailable:
                return False

        await eventually(answers, "it is used again")
        started = await asyncio.gather(*(calls.ask(rate(50, key="new")) for _ in range(60)))
        assert sum(isinstance(answer, Started) for answer in started) == 50
        await calls.storage.close()


async def test_questions_cancelled_at_any_moment_take_no_connection_away(memcached: Memcached) -> None:
    for turns in range(12):
        calls = Calls(LimitsStorage(memcached.url, timeout=5))
        for _ in range(3):
            question = asyncio.ensure_future(calls.ask(rate(99, key="cancelled")))
            for _ in range(turns):
                await asyncio.sleep(0)
            question.cancel()
            await asyncio.wait([question])
        assert await calls.started(rate(2, key=f"{turns}"), of=3) == 2
        await calls.storage.close()


async def test_a_connection_that_has_gone_silent_is_not_used_again(memcached: Memcached) -> None:
    """As when the machine at its other end was switched off: nobody closes it."""
    made: list[asyncio.StreamWriter] = []
    passing: list[asyncio.Task[None]] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(writer)
        if len(made) > 1:
            theirs, ours = await asyncio.open_connection(memcached.host, memcached.port)
            made.append(ours)
            passing.extend(
                asyncio.ensure_future(pass_on(*ends)) for ends in ((reader, ours), (theirs, writer))
            )

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as door:
        port = door.sockets[0].getsockname()[1]
        calls = Calls(LimitsStorage(f"memcached://127.0.0.1:{port}", timeout=0.2))
        with pytest.raises(StorageUnavailable):
            await calls.ask(rate(2))
        assert await calls.started(rate(2), of=3) == 2
        await calls.storage.close()
        made[0].close()
        await asyncio.wait(passing)


async def test_closing_gives_up_what_is_being_asked() -> None:
    with Memcached() as server:
        calls = Calls(LimitsStorage(server.url, timeout=30))
        assert await calls.started(rate(2), of=1) == 1
        server.freeze()
        question = asyncio.ensure_future(calls.ask(rate(2)))
        await asyncio.sleep(0)
        await calls.storage.close()
        with pytest.raises((asyncio.CancelledError, StorageUnavailable)):
            await question
        server.thaw()


def test_counts_are_found_again_from_another_loop(memcached: Memcached) -> None:
    for uri in (memcached.url, "memory://"):
        storage = LimitsStorage(uri, timeout=5)

        async def use(storage: LimitsStorage = storage) -> int:
            await storage.open()
            started = await Calls(storage).started(rate(3), of=2)
            await storage.close()
            return started

        assert [asyncio.run(use()) for _ in range(2)] == [2, 1]


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_connections_of_a_loop_that_has_ended_are_not_used_again(memcached: Memcached) -> None:
    storage = LimitsStorage(memcached.url, timeout=5)
    calls = Calls(storage)
    assert [asyncio.run(calls.started(rate(3), of=2)) for _ in range(2)] == [2, 1]
    del storage, calls
    gc.collect()
