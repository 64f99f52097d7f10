"""What tests need, those of servers built with this package and its own.

Time that passes at once:
    `run_virtual` and `virtual_time` run async code on a `VirtualTimeLoop`, where an hour of waiting takes no time
    and every timestamp is exact. `settle` waits until everybody else has got as far as they can without time
    passing. `VirtualClock` shows the loop's time, `FakeClock` a time that the test moves by hand.

Nothing here imports a test framework.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import concurrent.futures.thread
import datetime
import functools
import math
import selectors
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

__all__ = [
    "START",
    "FakeClock",
    "VirtualClock",
    "VirtualTimeLoop",
    "run_virtual",
    "settle",
    "virtual_time",
]

P = ParamSpec("P")
ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")

START: Final = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
"""Where clocks start unless told otherwise: a moment at which windows of a second to a day all begin."""

_SECOND_NS: Final = 1_000_000_000
# Most threads are done, or asleep, a few microseconds after they woke the loop: look again so often before sleeping.
_SPINS: Final = 50
_THREAD_POLL: Final = 0.001
_TASKS_NAMED: Final = 20


# ------------------------------------------------------------------------------------- time that passes at once


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on which time passes only when everybody waits, and then at once.

    When no callback is ready, loop time jumps to the next timer: `asyncio.sleep(3600)` takes no real time, and
    what happens at the same moment happens at exactly the same `loop.time()`. While a thread works, time stands
    still and the loop really waits for it. That holds for every thread started since the loop was made, whoever
    started it, and for all work given to `run_in_executor`. A thread that itself waits, on a `threading.Event`,
    `Condition`, `Queue` or a future, does not keep time from passing; one that sleeps, waits on a bare `Lock` or
    is otherwise inside C code counts as working.

    Sockets and pipes work, but time does not wait for them: if nothing can be read at once, it jumps. Give
    `io_patience` where the other side needs a moment of real time, or use `hold`.

    Use it through `run_virtual`, or anywhere a loop factory is taken, such as
    `anyio.run(main, backend_options={"loop_factory": VirtualTimeLoop})`.

    Args:
        start: Loop time at the start, in seconds.
        io_patience: Real seconds to give sockets and pipes before each jump.
        thread_patience: Real seconds to give working threads until that is taken for an error.

    Raises:
        RuntimeError: Out of the running loop: no callback is ready, no timer is set, no thread works and no
            socket, pipe or child process is open, so that every task would wait for ever; or a thread works for
            longer than `thread_patience`.
    """

    def __init__(self, *, start: float = 0.0, io_patience: float = 0.0, thread_patience: float = 10.0) -> None:
        self._now_ns = round(start * _SECOND_NS)
        self._io_patience = io_patience
        self._threads = _Threads(thread_patience)
        self._settlers: list[asyncio.Future[None]] = []
        self._executor: concurrent.futures.Executor | None = None
        selector = _JumpingSelector(self._when_nothing_is_ready)
        super().__init__(selector)
        # The loop's own pipe to itself is not something to wait for.
        self._own_files = len(selector.get_map())
        self._files = selector.get_map

    def time(self) -> float:
        """Loop time, in seconds."""
        return self._now_ns / _SECOND_NS

    def time_ns(self) -> int:
        """Loop time, in whole nanoseconds."""
        return self._now_ns

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let time stand still, and the loop really wait, for as long as this is entered.

        May be entered in any thread, and more than once. Unlike a working thread, it may last.
        """
        self._threads.hold(+1)
        try:
            yield
        finally:
            self._threads.hold(-1)
            if not self.is_closed():
                self.call_soon_threadsafe(lambda: None)

    def ignore_thread(self, thread: threading.Thread) -> None:
        """Let time pass whatever this thread does: for one that serves on its own and never seems to wait."""
        self._threads.ignore(thread)

    async def settled(self, turns: int) -> None:
        """See `settle`."""
        future = self.create_future()
        self._settlers.append(future)
        handle = self.call_soon(self._settle_after, future, turns)
        try:
            await future
        finally:
            handle.cancel()
            if future in self._settlers:
                self._settlers.remove(future)

    # What follows overrides the base class.

    def call_at(
        self,
        when: float,
        callback: Callable[[*ArgsT], object],
        *args: *ArgsT,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As ever, but a timer at infinity is not one that time could jump to."""
        if when == math.inf:
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)
