"""One of several processes that call tools on shared slots without a pause, and write down what happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from frontmcp_py import AbortSignal, Admission, Call, Concurrency, Guard, GuardError, Policy, Throttle
from frontmcp_py.storage import Answer, Ask, Queued, Renewed
from frontmcp_py.storage.redis import RedisStorage
from tests.history import Event, Rules
from tests.servers import eventually

LEASE: Final = 1.0

_SLOTS: Final = {"a": 1, "b": 2, "c": 3, "d": 1}

_TOOLS: Final = {
    "one": "a",
    "two": "b",
    "three": "c",
    "four": "d",
    "pair": "ab",
    "wide": "bc",
    "locks": "ad",
    "all": "abc",
}

# Several sets of slots, so that not all of them wait for the same dead holder.
RULES: Final = Rules(
    slots={f"{slot}{nth}": most for nth in range(4) for slot, most in _SLOTS.items()},
    tools={
        f"{tool}{nth}": tuple(f"{slot}{nth}" for slot in slots)
        for nth in range(4)
        for tool, slots in _TOOLS.items()
    },
    lease=LEASE,
)

_TICK: Final = 0.02
_CALLERS: Final = 12

_current: ContextVar[str] = ContextVar("_current", default="")


@dataclass(frozen=True)
class Orders:
    """What a process is told.

    Attributes:
        url: The store.
        name: What it is called.
        journal: Where it writes.
        seed: What its choices depend on.
        until: When it makes no more calls, by the monotonic clock.
        is_narrow: Whether it has places for fewer calls than come.
    """

    url: str
    name: str
    journal: Path
    seed: int
    until: float
    is_narrow: bool = False


def work(orders: Orders) -> None:
    """What the process does. Its exit status is 0 when its calls were answered and it has left its guard."""
    logging.getLogger("frontmcp_py").addHandler(logging.NullHandler())
    with orders.journal.open("ab", buffering=0) as journal:
        asyncio.run(_Worker(orders, journal.fileno()).run())


class _Watched(RedisStorage):
    """Tells when a call stands in line, and when leases may have ended for want of a renewal."""

    queued: Callable[[], None]
    cut_off: Callable[[float], None]
    _renewed_at: float = math.inf

    async def take(self, ask: Ask) -> Answer:
        answer = await super().take(ask)
        if isinstance(answer, Queued):
            self.queued()
        return answer

    async def renew(self, held: Sequence[str], waiting: Sequence[str]) -> Renewed:
        asked_at = time.monotonic()
        renewed = await super().renew(held, waiting)
        if time.monotonic() - self._renewed_at > 0.75 * LEASE:
            self.cut_off(self._renewed_at)
        self._renewed_at = asked_at
        return renewed


class _Worker:
    def __init__(self, orders: Orders, journal: int) -> None:
        self._orders = orders
        self._journal = journal
        self._random = random.Random(orders.seed)
        self._calls = 0
        storage = _Watched(orders.url, lease=LEASE, timeout=1)
        storage.queued = lambda: self._say("queued", _current.get()) if _current.get() else None
        storage.cut_off = lambda since: self._say("still", since=since)
        # Fewer places than callers, but one at least for each of them in the queue.
        admission = Admission(max_active=3, reserved=1) if orders.is_narrow else Admission()
        self._guard = Guard(
            Throttle(lease=LEASE, storage_timeout=1, fallback="error", admission=admission), storage=storage
        )
        self._policies = {tool: self._policy(slots) for tool, slots in RULES.tools.items()}

    async def run(self) -> None:
        async with self._guard:
            ticks = asyncio.create_task(self._tick())
            await asyncio.gather(*(self._caller() for _ in range(_CALLERS)))
            await eventually(lambda: not self._guard.statistics().active, "all work has ended")
            ticks.cancel()

    def _policy(self, slots: Sequence[str]) -> Policy:
        limits = [Concurrency(RULES.slots[slot], key=slot, queue_timeout=None) for slot in slots]
        return Policy(concurrency=limits, on_cancel="abort")

    async def _tick(self) -> None:
        """Tell when this process has stood still, for whatever reason."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(_TICK)
            now = time.monotonic()
            if now - last > LEASE / 8:
                self._say("still", since=last)
            last = now

    async def _caller(self) -> None:
        while time.monotonic() < self._orders.until:
            await asyncio.sleep(self._random.random() * 0.02)
            self._calls += 1
            name = f"{self._orders.name}.{self._calls}"
            _current.set(name)
            code = await self._call(name, self._random.choice(list(RULES.tools)))
            _current.set("")
            if code == "GUARD_STORAGE_UNAVAILABLE":
                await asyncio.sleep(LEASE / 10)

    async def _call(self, name: str, tool: str) -> str:
        seconds = self._random.choice([0, 0, 0.005, 0.01, 0.02, 0.05])
        if self._random.random() < 0.003:
            seconds = 1.5 * LEASE
        patience = self._random.random() * 0.1 if self._random.random() < 0.05 else None

        async def body(signal: AbortSignal) -> None:
            # Not a part of the call any more that asks.
            _current.set("")
            self._say("began", name)
            signal.add_callback(lambda: self._aborted(name, signal))
            if seconds:
                await asyncio.sleep(seconds)
            self._say("ended", name)

        self._say("asked", name, tool=tool, is_narrow=self._orders.is_narrow)
        code = "ok"
        try:
            async with asyncio.timeout(patience):
                await self._guard.run(Call(tool), self._policies[tool], body)
        except TimeoutError:
            code = "cancelled"
        except GuardError as error:
            code = error.code
        self._say("answered", name, code=code)
        return code

    def _aborted(self, name: str, signal: AbortSignal) -> None:
        if getattr(signal.reason, "code", "") == "LEASE_LOST":
            self._say("lost", name)

    def _say(self, what: str, call: str = "", **more: Any) -> None:
        event = Event(time.monotonic(), self._orders.name, what, call, **more)
        with contextlib.suppress(OSError):
            os.write(self._journal, f"{json.dumps(asdict(event))}\n".encode())
