"""What tests need: those of servers built with this package, and its own.

Time that passes at once
    `run_virtual` and `virtual_time` run async code on a `VirtualTimeLoop`, on which an hour of waiting takes
    no time and every timestamp is exact. `settle` waits until everybody else has come as far as they can
    without time passing.

Clocks
    `VirtualClock` shows the time of such a loop, `FakeClock` a time that the test moves by hand.

Storages
    `frontmcp_py.testing.contract` has the tests that every storage has to pass, and
    `frontmcp_py.testing.in_process` a store of several instances within one process.

Nothing here needs a test framework.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import datetime
import functools
import itertools
import math
import selectors
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from contextvars import Context
from pathlib import PurePath
from types import FrameType
from typing import Any, Final, ParamSpec, Self, TypeAlias, TypeVar, TypeVarTuple

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

_Ready: TypeAlias = list[tuple[selectors.SelectorKey, int]]
_Select: TypeAlias = Callable[[float | None], _Ready]

START: Final = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
"""Where clocks start unless told otherwise: windows of a second, a minute, an hour, a day all begin here."""

_SECOND_NS: Final = 1_000_000_000
_MICROSECOND_NS: Final = 1_000

# A thread that has just woken the loop goes to sleep, or ends, a few microseconds later. So a working thread
# is looked at this often before the loop sleeps for its sake ...
_LOOKS: Final = 50
# ... and then again after this many seconds.
_LOOK_AGAIN: Final = 0.001

_TASKS_NAMED: Final = 20


# ---------------------------------------------------------------------------------- time that passes at once


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on which time passes only when everybody waits, and then at once.

    When nothing is ready to run, loop time jumps to the next timer. So `asyncio.sleep(3600)` takes no time,
    and `loop.time()` is exact. What is due at one moment happens at that moment, in the order in which the
    timers were set.

    Time stands still, and the loop really waits, while a thread works: any thread that was started after the
    loop was made, and whatever `run_in_executor` was given. A thread that waits for somebody does not work:
    in a `wait`, `get`, `acquire` or `result` of a `threading.Event`, `Condition` or `Semaphore`, a
    `queue.Queue` or a `concurrent.futures.Future`. One that sleeps, waits for a bare `Lock` or is otherwise
    inside C code does.

    Sockets and pipes can be used, but time passes while they are silent. Where the other side needs real time
    to answer, give `io_patience` or use `hold`.

    `run_virtual` runs a function on it. It can also be given to whatever takes a loop factory, such as
    `anyio.run(main, backend_options={"loop_factory": VirtualTimeLoop})`.

    Args:
        start: Loop time at the beginning, in seconds.
        io_patience: How long to really wait for open sockets and pipes before time passes, in seconds.
        thread_patience: How long a thread may work without a pause, in real seconds.

    Raises:
        RuntimeError: From whatever runs the loop. Every task waits for ever: nothing is ready to run, no
            timer is set, no thread works, and no socket, pipe or child process is open. Or a thread works for
            longer than `thread_patience`.
    """

    def __init__(
        self, *, start: float = 0.0, io_patience: float = 0.0, thread_patience: float = 10.0
    ) -> None:
        self._now_ns = round(start * _SECOND_NS)
        self._io_patience = io_patience
        self._thread_patience = thread_patience
        self._threads = _Threads()
        self._timers = itertools.count()
        self._holds: list[None] = []
        self._settling: dict[asyncio.Future[None], int] = {}
        self._executor: concurrent.futures.Executor | None = None
        self._selecting = _Selector(self._poll)
        super().__init__(self._selecting)
        # The pipe by which threads wake the loop is not one to wait for.
        self._own_files = len(self._selecting.get_map())

    def time(self) -> float:
        """Loop time in seconds."""
        return self._now_ns / _SECOND_NS

    def time_ns(self) -> int:
        """Loop time in nanoseconds."""
        return self._now_ns

    @contextmanager
    def hold(self) -> Generator[None]:
        """Let time stand still, and the loop really wait, until this is left.

        May be entered in any thread, more than once, and for as long as one likes.
        """
        self._holds.append(None)
        try:
            yield
        finally:
            self._holds.pop()

    def ignore_thread(self, thread: threading.Thread) -> None:
        """Never wait for this thread: say, a server's own, which blocks in C code for as long as it lives."""
        self._threads.ignore(thread)

    async def settle(self, turns: int = 1000) -> None:
        """As the function `settle`."""
        future = self.create_future()
        self._settling[future] = turns
        try:
            await future
        finally:
            self._settling.pop(future, None)

    def call_at(
        self,
        when: float,
        callback: Callable[[*ArgsT], object],
        *args: *ArgsT,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As in any loop, but timers of one moment are due in the order in which they were set."""
        if when == math.inf:
            # Never due, so not one that time could jump to.
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(_Moment(when, next(self._timers)), callback, *args, context=context)

    def set_default_executor(self, executor: concurrent.futures.Executor) -> None:
        """As in any loop."""
        if not isinstance(executor, concurrent.futures.ThreadPoolExecutor):
            raise TypeError("the default executor has to be a ThreadPoolExecutor")
        super().set_default_executor(executor)
        self._executor = executor

    def run_in_executor(
        self,
        executor: concurrent.futures.Executor | None,
        func: Callable[[*ArgsT], ResultT],
        *args: *ArgsT,
    ) -> asyncio.Future[ResultT]:
        """As in any loop. Time stands still until the function returns, also if nobody awaits it any more."""
        if executor is None:
            if self._executor is None:
                self.set_default_executor(
                    concurrent.futures.ThreadPoolExecutor(thread_name_prefix="virtual time")
                )
            executor = self._executor
        assert executor is not None
        job = _Job()
        if isinstance(executor, concurrent.futures.ThreadPoolExecutor):
            work = executor.submit(lambda: job.run(func, *args))
        else:
            # The work has to be pickled.
            work = executor.submit(func, *args)
        self._threads.jobs.add(job)
        future = asyncio.wrap_future(work, loop=self)
        # After the callback that wakes the loop: otherwise time could pass before the result is there.
        work.add_done_callback(lambda _: self._threads.jobs.discard(job))
        return future

    def _poll(self, select: _Select, timeout: float | None) -> _Ready:
        """Find out what is ready; if nothing is, let time pass."""
        if timeout is not None and timeout <= 0:
            self._let_settled_go(idle=False)
            return select(0)
        ready = self._wait_for_threads(select, has_timer=timeout is not None)
        if ready is not None:
            return ready
        if timeout is None:
            if not self._io_is_open():
                raise RuntimeError(self._who_waits())
            return select(None)
        if self._io_patience and self._io_is_open() and (ready := select(self._io_patience)):
            return ready
        self._now_ns += round(timeout * _SECOND_NS)
        return []

    def _wait_for_threads(self, select: _Select, has_timer: bool) -> _Ready | None:
        """Wait while threads work; `None` when none does and nothing is ready."""
        looks, waited = 0, 0.0
        while True:
            # Before polling: who does not work any more, or hold, has already told the loop what there is.
            held = bool(self._holds)
            working = self._threads.working(timed_waits_too=not has_timer)
            if (ready := select(0)) or self._let_settled_go(idle=True):
                return ready
            if not working and not held:
                return None
            looks += 1
            if looks <= _LOOKS:
                continue
            if ready := select(_LOOK_AGAIN):
                return ready
            waited = 0.0 if held else waited + _LOOK_AGAIN
            if waited > self._thread_patience:
                raise RuntimeError(
                    f"threads work for more than {self._thread_patience} s of real time: {', '.join(working)}"
                )

    def _io_is_open(self) -> bool:
        return len(self._selecting.get_map()) > self._own_files or self._threads.watch_children()

    def _let_settled_go(self, *, idle: bool) -> bool:
        woken = False
        for future, turns in list(self._settling.items()):
            self._settling[future] = turns - 1
            if (idle or turns <= 0) and not future.done():
                future.set_result(None)
                woken = True
        return woken

    def _who_waits(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        named = [f"  {task.get_name()}: {_where(task)}" for task in tasks[:_TASKS_NAMED]]
        if len(tasks) > _TASKS_NAMED:
            named.append(f"  and {len(tasks) - _TASKS_NAMED} more")
        return "\n".join([f"every task waits for ever, at {self.time()} s of loop time:", *named])


def run_virtual(function: Callable[[*ArgsT], Coroutine[Any, Any, ResultT]], *args: *ArgsT) -> ResultT:
    """Run an async function on a new `VirtualTimeLoop`, and close that again.

    Args:
        function: The async function.
        args: Its arguments.

    Returns:
        What the function returns.

    Raises:
        RuntimeError: Every task waits for ever; the text names them.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(function(*args))


def virtual_time(function: Callable[P, Coroutine[Any, Any, ResultT]]) -> Callable[P, ResultT]:
    """Make an async test one that is not, and runs on a `VirtualTimeLoop`. Fixtures go on working.

    Args:
        function: The async test.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        return run_virtual(functools.partial(function, *args, **kwargs))

    return run


async def settle(turns: int = 1000) -> None:
    """Wait until everybody else has come as far as they can without time passing.

    On a `VirtualTimeLoop` that is exact. Another loop cannot be asked whether anything is ready to run, so
    there it takes all the turns. Threads are not waited for.

    Args:
        turns: For how many turns of the loop to wait at most, should somebody never come to rest.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualTimeLoop):
        await loop.settle(turns)
        return
    for _ in range(turns):
        await asyncio.sleep(0)


# ---------------------------------------------------------------------------------------------------- clocks


class FakeClock:
    """A clock that stands still until a test moves it.

    Args:
        start: The time of day: an aware `datetime`, or seconds since the Unix epoch.
    """

    def __init__(self, start: datetime.datetime | float = START) -> None:
        self._wall_ns = _epoch_ns(start)
        self._monotonic_ns = 0

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch (UTC)."""
        return self._wall_ns

    def monotonic_ns(self) -> int:
        """Nanoseconds that this clock has been advanced by."""
        return self._monotonic_ns

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Args:
            seconds: How much.

        Raises:
            ValueError: Time does not go back.
        """
        nanoseconds = round(seconds * _SECOND_NS)
        if nanoseconds < 0:
            raise ValueError(f"advance({seconds!r}): time does not go back; set() moves the time of day only")
        self._wall_ns += nanoseconds
        self._monotonic_ns += nanoseconds

    def set(self, moment: datetime.datetime | float) -> None:
        """Set the time of day, forward or back, as an administrator does. No time passes.

        Args:
            moment: An aware `datetime`, or seconds since the Unix epoch.
        """
        self._wall_ns = _epoch_ns(moment)


class VirtualClock:
    """A clock that shows the time of a `VirtualTimeLoop`.

    Args:
        loop: The loop; by default the one that runs.
        start: The time of day now: an aware `datetime`, or seconds since the Unix epoch.

    Raises:
        RuntimeError: No loop was given and none runs.
        TypeError: The loop that runs is of another kind.
    """

    def __init__(self, loop: VirtualTimeLoop | None = None, start: datetime.datetime | float = START) -> None:
        running = asyncio.get_running_loop() if loop is None else loop
        if not isinstance(running, VirtualTimeLoop):
            raise TypeError(f"VirtualClock shows the time of a VirtualTimeLoop, not of {running!r}")
        self._loop = running
        self.set(start)

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch (UTC)."""
        return self._wall_offset_ns + self._loop.time_ns()

    def monotonic_ns(self) -> int:
        """Loop time in nanoseconds."""
        return self._loop.time_ns()

    def set(self, moment: datetime.datetime | float) -> None:
        """Set the time of day, forward or back, as an administrator does. No time passes.

        Args:
            moment: An aware `datetime`, or seconds since the Unix epoch.
        """
        self._wall_offset_ns = _epoch_ns(moment) - self._loop.time_ns()


def _epoch_ns(moment: datetime.datetime | float) -> int:
    if isinstance(moment, datetime.datetime):
        if moment.tzinfo is None:
            raise ValueError(f"{moment!r} has no time zone, so it is not clear which moment that is")
        return (moment - _EPOCH) // datetime.timedelta(microseconds=1) * _MICROSECOND_NS
    # Seconds as a float are exact to the microsecond, and no further.
    return round(moment * 1_000_000) * _MICROSECOND_NS


_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


# ------------------------------------------------------------------------------------ how virtual time works


class _Selector(selectors.DefaultSelector):
    """Leaves to the loop what to do when nothing is ready."""

    def __init__(self, poll: Callable[[_Select, float | None], _Ready]) -> None:
        super().__init__()
        self._poll = poll

    def select(self, timeout: float | None = None) -> _Ready:
        return self._poll(super().select, timeout)


class _Moment(float):
    """When a timer is due, in whole nanoseconds. Of equal ones the first that was made is the smaller one."""

    __slots__ = ("_place",)

    _place: int

    def __new__(cls, seconds: float, place: int) -> Self:
        moment = super().__new__(cls, round(seconds * _SECOND_NS) / _SECOND_NS)
        moment._place = place
        return moment

    def __lt__(self, other: float) -> bool:
        # The loop keeps its timers in a heap, which by itself does not keep the order of equal ones.
        if isinstance(other, _Moment) and self == other:
            return self._place < other._place
        return super().__lt__(other)


class _Job:
    """A function that was given to an executor."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None

    def run(self, function: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> ResultT:
        self.thread = threading.current_thread()
        return function(*args)


class _Threads:
    """Who works, among the threads that a loop has to do with."""

    def __init__(self) -> None:
        # Threads older than the loop serve somebody else, unless they are an executor's.
        self._strangers = set(threading.enumerate())
        self.jobs: set[_Job] = set()

    def ignore(self, thread: threading.Thread) -> None:
        self._strangers.add(thread)

    def watch_children(self) -> bool:
        """Whether a thread of asyncio waits for the end of a child process."""
        return any(map(_watches_child, threading.enumerate()))

    def working(self, *, timed_waits_too: bool) -> list[str]:
        """The names of the threads that work.

        The order of the steps matters, as the threads do not stop for this. Who was in a job before the
        stacks were taken is either still in it or has told the loop. And all stacks are of one moment: nobody
        in them can have been woken by another who then went to sleep.

        Args:
            timed_waits_too: Count who waits with a timeout, and so will wake up by itself.
        """
        if not self.jobs and self._strangers.issuperset(threading.enumerate()):
            return []
        jobs = [job.thread for job in list(self.jobs)]
        stacks = sys._current_frames()
        threads = {thread for thread in threading.enumerate() if thread not in self._strangers}
        threads.update(thread for thread in jobs if thread is not None)
        threads.discard(threading.current_thread())
        names = ["work that no thread of its executor has begun"] * jobs.count(None)
        for thread in threads:
            frame = None if thread.ident is None else stacks.get(thread.ident)
            if frame is not None and not _watches_child(thread) and _works(frame, timed_waits_too):
                names.append(thread.name)
        return names


_CONDITION_WAIT: Final = threading.Condition.wait.__code__


def _works(frame: FrameType, timed_waits_too: bool) -> bool:
    """Whether a thread works, given the innermost frame of its stack."""
    if frame.f_code is _CONDITION_WAIT:
        # Events, semaphores, queues and futures are all made of conditions. Who wakes a waiter takes it out
        # of the list, and the waiter stays in this frame a little longer.
        names = frame.f_locals
        asleep = names.get("waiter") in names["self"]._waiters
        return not asleep or (timed_waits_too and names["timeout"] is not None)
    # A thread of an executor waits for work in C code.
    return frame.f_code.co_name != "_worker" or frame.f_globals["__name__"] != "concurrent.futures.thread"


def _watches_child(thread: threading.Thread) -> bool:
    return thread.name.startswith("asyncio-waitpid-")


def _where(task: asyncio.Task[Any]) -> str:
    """Where a task waits, as the chain of who awaits whom."""
    chain: list[str] = []
    awaited: object = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if isinstance(frame, FrameType):
            code = frame.f_code
            chain.append(f"{code.co_qualname} ({PurePath(code.co_filename).name}:{frame.f_lineno})")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return " > ".join(chain)
