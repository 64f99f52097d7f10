"""Does the store answer? Every question to it has a time budget, and an outage is told once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
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
        budget: Seconds that one question may take.
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
        self.budget: float = budget
        self._without = without
        self._down = down
        self._tasks: set[asyncio.Task[Any]] = set()
        self.longest: float = 2 * budget
        self.is_up: bool = True
        self.outages: int = 0

    async def ask(self, question: Awaitable[T], *, within: float | None = None, is_last: bool = True) -> T:
        """Ask the store.

        Args:
            question: What is asked.
            within: Seconds that it may take, if less than the budget.
            is_last: Whether the store is down if there is no answer in time; if not, it is asked again.

        Raises:
            StorageUnavailable: There was no answer in time, or none that could be used.
            asyncio.CancelledError: Whoever asks was cancelled. The store may have heard the question.
        """
        loop, budget = self._loop, within or self.budget
        due = loop.time() + budget
        try:
            async with asyncio.timeout_at(due + budget) as limit:
                timer = loop.call_at(due, self._is_over, limit, due)
                try:
                    return await question
                finally:
                    timer.cancel()
        except TimeoutError:
            error: Exception = StorageUnavailable(f"no answer within {budget:g} s")
            if not is_last:
                raise error from None
        except Exception as failure:
            error = failure
        self.lost(error)
        raise StorageUnavailable(str(error)) from error

    def _is_over(self, limit: asyncio.Timeout, due: float) -> None:
        now = self._loop.time()
        if now <= due + _LATE:
            limit.reschedule(now)

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
