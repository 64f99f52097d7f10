"""Counts and slots in a Redis or a Valkey, for several instances.

Every question is one of the scripts in `lua/`, which the store runs in one step; here they are only called,
and their answers read. The scripts begin with `common.lua`, which states the invariants.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    NoScriptError,
    RedisError,
)

from frontmcp_py.errors import ConfigurationError

from .base import Answer, Ask, NoSlot, Queued, Renewed, Started, StorageUnavailable, TooOften, Turn, Void
from .redis_address import RedisAddress

logger: logging.Logger = logging.getLogger("frontmcp_py.guard")

OLDEST_REDIS: Final = (6, 2)
"""The first Redis that has every command of the scripts."""

OLDEST_VALKEY: Final = (7, 2)
"""The first release under that name."""


_REFUSALS: Final = (AuthenticationError, AuthorizationError, NoPermissionError)


class Script:
    """One of the named scripts, with what all of them share in front."""

    def __init__(self, name: str) -> None:
        folder = resources.files("frontmcp_py.storage") / "lua"
        self.name: str = name
        self.source: str = "\n".join((folder / f"{each}.lua").read_text("utf-8") for each in ("common", name))
        self.sha: str = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


@cache
def script(name: str) -> Script:
    """The script of that name, read once."""
    return Script(name)


class RedisStorage:
    """One instance's side of a Redis or a Valkey that several instances share.

    Args:
        uri: Where it is; see `RedisAddress` for the forms.
        prefix: What every key begins with, as a hash tag. Instances share what they name alike.
        lease: Seconds until what a crashed instance held is free.
        timeout: Seconds that making a connection may take.
        connections: How many connections are kept at most; more questions at once wait for one.
        now_us: The time in microseconds, for tests; else the store's clock counts.

    Attributes:
        instance: The name that the store tells this instance its turns under.
    """

    def __init__(
        self,
        uri: str,
        *,
        prefix: str = "frontmcp",
        lease: float = 10.0,
        timeout: float = 0.2,
        connections: int = 64,
        now_us: Callable[[], int] | None = None,
    ) -> None:
        self.instance: str = uuid.uuid4().hex
        self._address = RedisAddress.of(uri)
        self._base = f"{{{prefix}}}"
        self._channel = f"{self._base}:to:{self.instance}"
        self._lease_ms = round(lease * 1000)
        self._timeout = timeout
        self._connections = connections
        self._now_us = now_us
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def shares_slots(self) -> bool:
        """Slots are shared."""
        return True

    @property
    def where(self) -> str:
        """The address, without a password."""
        return self._address.shown

    def cannot_count(self, strategy: str, window_us: int) -> str | None:
        """Every rate limit is counted here."""
        return None

    async def open(self) -> None:
        """Connect, and see whether the server is new enough.

        Raises:
            StorageUnavailable: It does not answer.
            ConfigurationError: It is too old, or it refuses this client.
        """
        try:
            about = await self._ask_server(self._connected().info("server"))
        except StorageUnavailable as error:
            if isinstance(error.__cause__, _REFUSALS) or "DB index" in str(error):
                raise ConfigurationError(
                    f"Throttle.storage: {self.where} refuses this client ({error}); "
                    "look at user, password and number of the database"
                ) from error
            raise
        name, version = _version(about)
        oldest = OLDEST_VALKEY if name == "valkey" else OLDEST_REDIS
        if version < oldest:
            raise ConfigurationError(
                f"Throttle.storage: {self.where} is {name.capitalize()} {'.'.join(map(str, version))}; "
                f"{'.'.join(map(str, oldest))} or later is needed"
            )

    async def close(self) -> None:
        """Close every connection."""
        client, self._client = self._client, None
        if client is not None:
            try:
                await client.aclose()
            except (RedisError, OSError):
                # It was gone already.
                return

    async def take(self, ask: Ask) -> Answer:
        """Look at every rate limit and slot of a call, and take all of them or nothing."""
        needs = {
            "rates": [(rate.key, rate.strategy, rate.most, rate.window_us) for rate in ask.rates],
            "slots": [
                (
                    slot.key,
                    slot.capacity,
                    int(slot.no_wait),
                    -1 if slot.max_queued is None else slot.max_queued,
                )
                for slot in ask.slots
            ],
        }
        verdict, *numbers = await self._run(
            "take",
            ask.lease,
            ask.attempt,
            ask.number,
            ask.rank,
            int(ask.may_wait),
            int(ask.force),
            json.dumps(needs, separators=(",", ":")),
        )
        match verdict:
            case b"started":
                return Started(numbers[0])
            case b"queued":
                return Queued(numbers[0], tuple(numbers[1:]))
            case b"full":
                return NoSlot(tuple(numbers[1:]), None if numbers[0] < 0 else numbers[0])
            case b"often":
                return TooOften(numbers[0], numbers[1])
            case _:
                return Void()

    async def pass_on(self, lease: str, attempt: int) -> Sequence[Turn]:
        """A turn that has come cannot be used now: uncounted, it goes to the next in line."""
        return _turns(await self._run("pass_on", lease, attempt))

    async def release(self, lease: str, *, undo: bool = False) -> Sequence[Turn]:
        """The work has ended, or the call does not wait any more."""
        return _turns(await self._run("release", lease, int(undo)))

    async def renew(self, held: Sequence[str], waiting: Sequence[str]) -> Renewed:
        """Keep everything of this instance alive for one lease more."""
        turns, lost, strayed, now_us = await self._run("renew", len(held), *held, *waiting)
        return Renewed(_turns(turns), tuple(map(_text, lost)), tuple(map(_text, strayed)), now_us)

    async def listen(self, hear: Callable[[Turn], None], ready: Callable[[], None]) -> None:
        """Pass on what the store tells this instance, until cancelled."""
        listener = self._address.listener(self._timeout, self._base)
        try:
            async with listener.pubsub() as subscription:
                await subscription.subscribe(self._channel)
                async for message in subscription.listen():
                    if message["type"] == "subscribe":
                        ready()
                    elif message["type"] == "message":
                        turn = _turn_told(message["data"])
                        if turn is not None:
                            hear(turn)
        except (RedisError, OSError) as error:
            raise StorageUnavailable(_why(error)) from error
        finally:
            await listener.aclose()
        raise StorageUnavailable("the subscription has ended")

    # -- parts ---------------------------------------------------------------------------------

    def _connected(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            # Connections belong to a loop; those of one that has ended cannot be closed any more.
            self._client = self._address.client(self._timeout, self._connections, self._base)
            self._loop = loop
        return self._client

    async def _run(self, name: str, *arguments: str | int) -> Any:
        """Run a script; where the server does not know it (any more), it is sent along."""
        client = self._connected()
        wanted = script(name)
        now = 0 if self._now_us is None else self._now_us()
        full = (self._base, now, self._lease_ms, self.instance, *arguments)
        return await self._ask_server(_evaluate(client, wanted, full))

    async def _ask_server(self, question: Awaitable[Any]) -> Any:
        try:
            return await question
        except (RedisError, OSError, asyncio.IncompleteReadError) as error:
            raise StorageUnavailable(_why(error)) from error


async def _evaluate(client: Any, wanted: Script, arguments: Sequence[str | int]) -> Any:
    try:
        return await client.evalsha(wanted.sha, 1, *arguments)
    except NoScriptError:
        return await client.eval(wanted.source, 1, *arguments)


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _text(value: bytes) -> str:
    return value.decode()


def _turns(rows: Sequence[Sequence[Any]]) -> tuple[Turn, ...]:
    return tuple(
        Turn(_text(lease), attempt, None if rate < 0 else TooOften(rate, wait))
        for lease, attempt, rate, wait in rows
    )


def _turn_told(data: bytes) -> Turn | None:
    """The turn that a message tells; `None` if somebody else has sent it."""
    try:
        lease, attempt, rate, wait = data.split()
        return _turns([(lease, int(attempt), int(rate), int(wait))])[0]
    except ValueError:
        logger.debug("a message that tells no turn: %r", data[:100])
        return None


def _version(fields: Mapping[str, Any]) -> tuple[str, tuple[int, int]]:
    """What the server is, and its version."""
    name = "valkey" if fields.get("server_name") == "valkey" else "redis"
    text = str(fields.get("valkey_version" if name == "valkey" else "redis_version", "0.0"))
    major, minor, *_ = (*text.split("."), "0")
    return name, (int(major), int(minor))
