"""Rate limits in any other store of the `limits` package: memcached, MongoDB, or one registered with it.

The counting is that package's own: its asyncio storages and its strategies. It counts one limit at a time and
takes nothing back, which is weaker than one step of a Redis in these ways:

* Slots are not shared. A call's slots are those of its own process.
* A call's limits are looked at one after the other, then counted one after the other. Whoever is faster in
  between can have the last place: the call is refused then, and stays counted in the limits that came before.
* A call that was counted and never ran (its caller went away, a slot was taken meanwhile) stays counted.
* A question whose answer was lost is counted again when it is asked again.
* A fixed window begins with the first call in it, not with the clock.
* Windows are whole seconds, by the clock of each instance where the store has none. A memcached ends a window
  up to a second early, and forgets counts when its memory is full.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Coroutine, Sequence
from importlib import import_module
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from limits import RateLimitItem, RateLimitItemPerSecond
from limits.aio import storage as stores
from limits.aio.storage import MovingWindowSupport, SlidingWindowCounterSupport
from limits.aio.strategies import (
    FixedWindowRateLimiter,
    MovingWindowRateLimiter,
    RateLimiter,
    SlidingWindowCounterRateLimiter,
)
from limits.errors import ConfigurationError as LimitsConfigurationError
from limits.storage import storage_from_string

from frontmcp_py.clock import SystemClock
from frontmcp_py.errors import ConfigurationError

from .base import Answer, Ask, RateNeed, Renewed, Started, StorageUnavailable, TooOften, Turn

_T = TypeVar("_T")

_SECOND_US: Final = 1_000_000

# The package computes waits in fractions of seconds, as floats, and is strict at a window's very edge.
_MARGIN_US: Final = 1_000

# A memcached takes keys of 250 bytes without blanks, and reads a longer time than 30 days as a date.
_PLAIN: Final = re.compile(r"[!-~]+")
_LONGEST_NAME: Final = 120
_LONGEST_PREFIX: Final = 64
_MEMCACHED_SECONDS: Final = 30 * 24 * 3600

_STRATEGIES: Final[dict[str, type[RateLimiter]]] = {
    "fixed-window": FixedWindowRateLimiter,
    "moving-window": MovingWindowRateLimiter,
    "sliding-window": SlidingWindowCounterRateLimiter,
}


_CLIENTS: Final = {
    "memcached": "memcachio",
    "mongodb": "motor.motor_asyncio",
    "mongodb+srv": "motor.motor_asyncio",
}
"""The client libraries of the package's own storages."""


class LimitsStorage:
    """Counts of rate limits in a store of the `limits` package. The module says what this weakens.

    Args:
        uri: A storage URI of that package, such as `memcached://localhost:11211`.
        prefix: What every key begins with. Instances share what they name alike.
        timeout: Seconds that the client library may take to connect, and a memcached to answer.

    Raises:
        ConfigurationError: The scheme is not known, the rest cannot be read, or the client library that the
            scheme needs is not installed.
    """

    def __init__(self, uri: str, *, prefix: str = "frontmcp", timeout: float = 0.2) -> None:
        parts = urlsplit(uri)
        self._scheme = parts.scheme.removeprefix("async+")
        self._uri = f"async+{self._scheme}{uri[len(parts.scheme) :]}"
        self._where = f"{self._scheme}://{parts.netloc.rpartition('@')[2]}"
        self._prefix = _short(prefix, _LONGEST_PREFIX)
        self._options = _options(self._scheme, timeout)
        self._clock = SystemClock()
        self._asking: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._store: Any = self._make()
        self._supported = {"fixed-window"}
        if isinstance(self._store, MovingWindowSupport):
            self._supported.add("moving-window")
        if isinstance(self._store, SlidingWindowCounterSupport):
            self._supported.add("sliding-window")

    @property
    def shares_slots(self) -> bool:
        """Slots stay in each process."""
        return False

    @property
    def where(self) -> str:
        """The scheme and the hosts, without user, password and options."""
        return self._where

    def cannot_count(self, strategy: str, window_us: int) -> str | None:
        """What a rate limit would have to be like to be counted here; `None` if it can be as it is.

        Args:
            strategy: Its strategy.
            window_us: Its window, in microseconds.
        """
        if strategy not in self._supported:
            return f"a strategy that {self._scheme} can do: {', '.join(sorted(self._supported))}"
        if window_us % _SECOND_US:
            return "a window of whole seconds"
        longest = _MEMCACHED_SECONDS // (2 if strategy == "sliding-window" else 1)
        if self._scheme == "memcached" and window_us > longest * _SECOND_US:
            return f"a window of at most {longest // 86400} days"
        return None

    async def open(self) -> None:
        """See whether the store answers."""
        if not await self._safely(self._store_now().check()):
            raise StorageUnavailable(f"{self._where} does not answer")

    async def close(self) -> None:
        """Close every connection, and give up what is still being asked."""
        asking = list(self._asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await self._drop(self._store)

    async def take(self, ask: Ask) -> Answer:
        """Look at every rate limit of a call, then count it in each.

        Raises:
            StorageUnavailable: The store gave no answer. The call may have been counted.
            ConfigurationError: The call has slots, or a limit that `cannot_count` refuses.
        """
        if ask.slots:
            raise ConfigurationError(f"Throttle.storage: {self._where} cannot share slots")
        for rate in ask.rates:
            if allowed := self.cannot_count(rate.strategy, rate.window_us):
                raise ConfigurationError(
                    f"Throttle.storage: {self._where} cannot count the rate limit {rate.key!r} "
                    f"({rate.strategy}, {rate.window_us / _SECOND_US:g} s); give {allowed}"
                )
        return await self._safely(self._take(ask))

    async def pass_on(self, lease: str, attempt: int) -> Sequence[Turn]:
        """Nobody waits here."""
        return ()

    async def release(self, lease: str, *, undo: bool = False) -> Sequence[Turn]:
        """Nothing is held here, and what was counted stays counted."""
        return ()

    async def renew(self, held: Sequence[str], waiting: Sequence[str]) -> Renewed:
        """Nothing is held here; see whether the store answers."""
        await self.open()
        return Renewed()

    async def listen(self, hear: Callable[[Turn], None], ready: Callable[[], None]) -> None:
        """There is nothing to be told; waits until it is cancelled."""
        ready()
        await asyncio.get_running_loop().create_future()

    # -- parts ---------------------------------------------------------------------------------

    async def _take(self, ask: Ask) -> Answer:
        if not ask.force:
            worst: TooOften | None = None
            for position, rate in enumerate(ask.rates):
                limiter, item, name = self._limit(rate)
                if not await limiter.test(item, name):
                    refusal = TooOften(position, await self._wait(limiter, item, name))
                    if worst is None or refusal.wait_us > worst.wait_us:
                        worst = refusal
            if worst is not None:
                return worst
        for position, rate in enumerate(ask.rates):
            limiter, item, name = self._limit(rate)
            if not await limiter.hit(item, name) and not ask.force:
                return TooOften(position, await self._wait(limiter, item, name))
        return Started(ask.number)

    def _limit(self, rate: RateNeed) -> tuple[RateLimiter, RateLimitItem, str]:
        item = RateLimitItemPerSecond(rate.most, rate.window_us // _SECOND_US, self._prefix)
        # Strategies keep their counts in different ways, under the same keys.
        name = _short(f"{rate.strategy}/{rate.key}", _LONGEST_NAME)
        return _STRATEGIES[rate.strategy](self._store_now()), item, name

    async def _wait(self, limiter: RateLimiter, item: RateLimitItem, name: str) -> int:
        """Microseconds until a call that was just refused has room."""
        ends = (await limiter.get_window_stats(item, name)).reset_time
        return max(0, math.ceil(ends * _SECOND_US) - self._clock.wall_ns() // 1000) + _MARGIN_US

    async def _safely(self, question: Coroutine[Any, Any, _T]) -> _T:
        """Ask to the end, even if whoever asks is cancelled: an interrupted client loses connections."""
        store = self._store_now()
        task = asyncio.get_running_loop().create_task(question)
        self._asking.add(task)
        task.add_done_callback(self._asked)
        try:
            return await asyncio.shield(task)
        except Exception as error:
            # Whatever a client library raises. It may hold on to a connection that is dead.
            await self._drop(store)
            raise StorageUnavailable(f"{type(error).__name__}: {error}") from error

    def _asked(self, task: asyncio.Task[Any]) -> None:
        self._asking.discard(task)
        if not task.cancelled():
            # Nobody else may look at it any more, and asyncio warns of errors that nobody has seen.
            task.exception()

    def _store_now(self) -> Any:
        loop = asyncio.get_running_loop()
        is_elsewhere = self._loop is not None and self._loop is not loop and self._scheme != "memory"
        if self._store is None or is_elsewhere:
            # Connections belong to a loop; those of one that has ended cannot be closed any more.
            self._store = self._make()
        self._loop = loop
        return self._store

    def _make(self) -> Any:
        client = _CLIENTS.get(self._scheme)
        try:
            if client is not None:
                # The package says this in other words, and for some of its storages too late.
                import_module(client)
            return storage_from_string(self._uri, **self._options)
        except ImportError as error:
            package = (client or error.name or "").partition(".")[0]
            raise ConfigurationError(
                f"Throttle.storage: {self._scheme}:// needs the package {package}; "
                f"install it: pip install {package}"
            ) from error
        except (LimitsConfigurationError, ValueError) as error:
            if str(error).startswith("unknown storage scheme"):
                raise ConfigurationError(
                    f"Throttle.storage: the scheme {self._scheme}:// is not known; give redis://, "
                    f"{', '.join(f'{each}://' for each in _schemes())}"
                ) from None
            raise self._unreadable() from None

    def _unreadable(self) -> ConfigurationError:
        return ConfigurationError(
            f"Throttle.storage: {self._where} is not allowed; give {self._scheme}:// with host and port"
        )

    async def _drop(self, store: Any) -> None:
        """Close a client; the next question gets a new one. What lives in this process is kept."""
        if store is None or self._scheme == "memory":
            return
        if self._store is store:
            self._store = None
        try:
            close = await _closer(store)
            answer = close() if close else None
            if inspect.isawaitable(answer):
                await answer
        except Exception:
            # It was broken already.
            return


def _schemes() -> list[str]:
    """The schemes that the package brings, but those of Redis, which has a storage of its own here."""
    brought = {
        scheme.removeprefix("async+")
        for name in stores.__all__
        for scheme in getattr(getattr(stores, name), "STORAGE_SCHEME", None) or ()
    }
    return sorted(each for each in brought if not re.search("redis|valkey", each))


async def _closer(store: Any) -> Callable[[], Any] | None:
    """What closes the client of a storage; storages of the package do not close."""
    bridge = getattr(store, "bridge", None)
    if bridge is not None and hasattr(bridge, "get_storage"):
        client = await bridge.get_storage()
        pool = getattr(client, "connection_pool", client)
        return getattr(pool, "close", None)
    return getattr(getattr(store, "storage", store), "close", None)


def _options(scheme: str, timeout: float) -> dict[str, Any]:
    if scheme == "memcached":
        return {"connect_timeout": timeout, "read_timeout": timeout, "blocking_timeout": timeout}
    if scheme.startswith("mongodb"):
        milliseconds = max(1, round(timeout * 1000))
        return {"serverSelectionTimeoutMS": milliseconds, "connectTimeoutMS": milliseconds}
    return {}


def _short(text: str, most: int) -> str:
    """`text` itself, or a digest of what is too long or has characters that end a memcached's keys."""
    if len(text) <= most and _PLAIN.fullmatch(text):
        return text
    return f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"
