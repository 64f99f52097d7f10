"""Many deadlines, few timers.

Calls of one tool have one and the same time limit, so their deadlines come in the order in which they
were set: one queue per duration and one timer per queue do, and setting or dropping a deadline touches no
heap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# Durations are few, one for each tool; a caller that makes up ever new ones must not make this grow.
_PRUNE_FROM = 256


class Timers(Generic[T]):
    """Calls `ring(item)` on the loop when an item's time has come.

    Args:
        loop: Tells the time and keeps the timers.
        ring: Called once for each item that is not dropped before.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[T], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._queues: dict[float, _Queue[T]] = {}

    def set(self, seconds: float, item: T) -> None:
        """Ring for `item` in so many seconds."""
        queue = self._queues.get(seconds)
        if queue is None:
            if len(self._queues) >= _PRUNE_FROM:
                self._queues = {each: queue for each, queue in self._queues.items() if queue.due}
            queue = self._queues[seconds] = _Queue(self._loop, seconds, self._ring)
        queue.set(item)

    def drop(self, seconds: float, item: T) -> float | None:
        """Do not ring for `item`; the seconds that were left, or `None` if it was not set."""
        queue = self._queues.get(seconds)
        return None if queue is None else queue.drop(item)

    def __len__(self) -> int:
        return sum(len(queue.due) for queue in self._queues.values())

    def close(self) -> None:
        """Ring no more."""
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()


class _Queue(Generic[T]):
    """Items of one duration, in the order in which they are due."""

    __slots__ = ("_handle", "_loop", "_ring", "_seconds", "due")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, ring: Callable[[T], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None
        self.due: dict[T, float] = {}

    def set(self, item: T) -> None:
        due = self.due[item] = self._loop.time() + self._seconds
        if self._handle is None:
            self._handle = self._loop.call_at(due, self._fire, due)

    def drop(self, item: T) -> float | None:
        due = self.due.pop(item, None)
        # The timer is left to run out: setting and cancelling one for each call would cost more.
        return None if due is None else max(0.0, due - self._loop.time())

    def _fire(self, armed_for: float) -> None:
        self._handle = None
        # A loop may fire a little before the time by its own clock; then that time counts as reached.
        now = max(armed_for, self._loop.time())
        due = self.due
        ripe: list[T] = []
        for item, when in due.items():
            if when > now:
                self._handle = self._loop.call_at(when, self._fire, when)
                break
            ripe.append(item)
        for item in ripe:
            if due.pop(item, None) is not None:
                self._ring(item)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self.due.clear()
