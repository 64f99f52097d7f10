"""Does the store answer? Every question to it has a time budget, and an outage is told once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from frontmcp_py.storage import StorageUnavailable

logger: logging.Logger = logging.getLogger("frontmcp_py.guard")

T = TypeVar("T")

# A timer that fires so many seconds late means that this process stood still: the answer may be there.
_LATE: Final = 0.05


class Link:
    """The line to a store, on one event loop.

    Args:
        loop: Where the questions are asked.
        where: The store's address, for the log.
        budget: Seconds that one question may take.
        without: What happens while the store is down, for the log.
        down: Called when the store stops answering.

    Attributes:
        longest: Seconds after which every question has been answered or given up.
        is_up: Whether the store answered the last question.
        outages: How often it has stopped answering.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        where: str,
        budget: float,
        without: str,
        down: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._where = where
        self._budget = budget
        self._without = without
        self._down = down
        self._tasks: set[asyncio.Task[Any]] = set()
        self.longest: float = 2 * budget
        self.is_up: bool = True
        self.outages: int = 0

    async def ask(self, question: Coroutine[Any, Any, T]) -> T:
        """Ask the store.

        Whoever asks may be cancelled: the question then goes on by itself, since one that is broken off
        would cost its connection.

        Raises:
            StorageUnavailable: There was no answer in time, or none that could be used.
        """
        task = self.spawn(question)
        due = self._loop.time() + self._budget
        await asyncio.wait((task,), timeout=self._budget)
        if not task.done() and self._loop.time() > due + _LATE:
            await asyncio.wait((task,), timeout=self._budget)
        if not task.done():
            task.cancel()
            error: Exception = StorageUnavailable(f"no answer within {self._budget:g} s")
        elif task.cancelled():
            error = StorageUnavailable("the question was broken off")
        elif (failure := task.exception()) is None:
            return task.result()
        elif isinstance(failure, Exception):
            error = failure
        else:
            raise failure
        self.lost(error)
        raise StorageUnavailable(str(error)) from error

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Let something go on beside; its failure is nobody's unless it is awaited."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def found(self) -> bool:
        """The store has answered a probe; whether it had been down."""
        was_down = not self.is_up
        if was_down:
            self.is_up = True
            logger.info("the store of the limits answers again: %s", self._where)
        return was_down

    async def finish(self, seconds: float) -> None:
        """Wait for what is under way, for so many seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    def close(self) -> None:
        """Ask no more."""
        if not self._loop.is_closed():
            for task in self._tasks:
                task.cancel()

    def lost(self, error: Exception) -> None:
        """The store has not answered."""
        if not self.is_up:
            return
        self.is_up = False
        self.outages += 1
        why = str(error).rstrip(".")
        logger.warning("the store of the limits does not answer: %s: %s; %s", self._where, why, self._without)
        if not isinstance(error, StorageUnavailable):
            logger.error("the storage failed", exc_info=error)
        self._down()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Looked at, so that asyncio does not report it as never retrieved.
            task.exception()
