"""Worker threads: a `def` body runs in one, and the thread itself gives its place back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from .deadline import Deadlines
from .run import Run

T = TypeVar("T")


async def in_thread(deadlines: Deadlines, run: Run, work: Callable[[], T]) -> T:
    """Run `work` in a worker thread, for `run`.

    How many there may be is decided by the scheduler, before the call starts; the thread limiter of anyio
    counts a thread as free when its caller stops waiting, not when it has ended, so it is not asked.
    """
    loop = asyncio.get_running_loop()
    # Whoever is first: the thread that begins the work, or the task that is cancelled before it could.
    first: dict[str, bool] = {}

    def job() -> T:
        if not first.setdefault("begins", True):
            raise asyncio.CancelledError
        try:
            return work()
        finally:
            _tell(loop, deadlines.thread_ended, run)

    deadlines.thread_began(run)
    try:
        return await anyio.to_thread.run_sync(job, abandon_on_cancel=True, limiter=_unlimited())
    except BaseException:
        if not first.setdefault("begins", False):
            deadlines.thread_ended(run)
        raise


def _unlimited() -> anyio.CapacityLimiter:
    return anyio.CapacityLimiter(math.inf)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[Run], None], run: Run) -> None:
    try:
        loop.call_soon_threadsafe(callback, run)
    except RuntimeError:
        # The loop has closed meanwhile; it has given the places of everything it left behind to others.
        return
