"""AbortSignal: how a call that is already running is told to stop.

A signal only tells. Work that wants to stop listens: by asking (`aborted`, `throw_if_aborted`), by waiting
(`wait`, in a thread `wait_sync`), by a callback, or by `scope`, which cancels what is inside it.

No lock is taken here. Every step that threads may race for is one atomic operation on a list or a dict, and
whoever registers looks for an abort again afterwards, so that either the abort finds the listener or the
listener finds the abort. With a lock, a signal handler or a finalizer that aborts could interrupt the very
thread that holds it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import TypeAlias

import anyio

from .errors import Cancelled

__all__ = ["AbortSignal"]

logger: logging.Logger = logging.getLogger(__name__)

# The reason, and the traceback and the context it came with: each time it is raised, Python changes both.
_Outcome: TypeAlias = tuple[Exception, TracebackType | None, BaseException | None]
_Callback: TypeAlias = Callable[[], object]


class AbortSignal:
    """Tells work that it should stop, and why. It is aborted once at most.

    Every member that is not async may be used from any thread. Callbacks run on the signal's event loop.

    Args:
        loop: The signal's event loop; by default the one that runs where the signal is made or, if none does,
            the one on which the signal is first used.
    """

    __slots__ = ("__weakref__", "_listeners", "_loop", "_outcomes")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        # Threads that abort at the same moment may each append; the first in the list has won.
        self._outcomes: list[_Outcome] = []
        # In order of registration. A `threading.Event` stands for a thread that sleeps in `wait_sync`.
        self._listeners: dict[object, _Callback] = {}
        self._loop = loop or _running_loop()

    def __repr__(self) -> str:
        return f"<AbortSignal aborted: {self.reason!r}>" if self._outcomes else "<AbortSignal>"

    @property
    def aborted(self) -> bool:
        """Whether the work should stop."""
        return bool(self._outcomes)

    @property
    def reason(self) -> Exception | None:
        """Why the work should stop; `None` as long as it should not."""
        return self._outcomes[0][0] if self._outcomes else None

    def abort(self, reason: Exception | None = None) -> None:
        """Tell all who listen, now or later, that the work should stop.

        The first abort counts; later ones do nothing. On the signal's event loop all callbacks have run when
        this returns; from another thread they run soon.

        Args:
            reason: What `throw_if_aborted` and `scope` raise; by default a `Cancelled` error.

        Raises:
            TypeError: The reason is something other than an `Exception` object.
        """
        if self._outcomes:
            return
        reason = Cancelled() if reason is None else _checked_reason(reason)
        self._outcomes.append((reason, reason.__traceback__, reason.__context__))
        if self._outcomes[0][0] is not reason:
            return
        for listener in list(self._listeners):
            if isinstance(listener, threading.Event):
                listener.set()
        running = self._adopt_running_loop()
        if running is not None and running is self._loop:
            self._run_callbacks()
        else:
            self._run_callbacks_soon()

    def throw_if_aborted(self) -> None:
        """Raise the reason if the work should stop.

        Raises:
            Exception: The reason, each time the same object.
        """
        if not self._outcomes:
            return
        reason, traceback, context = self._outcomes[0]
        try:
            # Otherwise a loop that asks again and again would make the traceback longer each time.
            raise reason.with_traceback(traceback)
        finally:
            reason.__context__ = context
            # The traceback refers to this frame.
            del reason, traceback, context

    async def wait(self) -> Exception:
        """Wait until the work should stop.

        Returns:
            The reason. It is not raised.
        """
        if not self._outcomes:
            future = asyncio.get_running_loop().create_future()
            self._listen_here(future, partial(_wake, future))
            try:
                await future
            finally:
                self._forget(future)
        return self._outcomes[0][0]

    def wait_sync(self, timeout: float | None = None) -> bool:
        """Block this thread until the work should stop.

        Args:
            timeout: Seconds to wait at most; `None` waits without an end.

        Returns:
            Whether the work should stop.

        Raises:
            RuntimeError: This thread runs an event loop, which would stand still.
        """
        if self._outcomes:
            return True
        if _running_loop() is not None:
            raise RuntimeError("wait_sync() would block the event loop; use `await signal.wait()` there")
        sleeper = threading.Event()
        self._listeners[sleeper] = sleeper.set
        try:
            # An abort that came before the line above has not seen this sleeper.
            return self.aborted or sleeper.wait(timeout)
        finally:
            self._forget(sleeper)

    def add_callback(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Have a function called, without arguments, when the signal aborts.

        It runs once, on the signal's event loop, after those that were added before it and with the context
        variables of this call. If the signal is already aborted it runs soon. What it raises is logged; the
        others run all the same.

        Args:
            callback: A plain function. It must not block.

        Returns:
            A function that takes the callback back. It may be called at any time, and more than once.

        Raises:
            TypeError: The callback is not callable, or it is an `async` function, which nobody would await.
        """
        _check_callback(callback)
        token = object()
        self._adopt_running_loop()
        self._listen(token, partial(copy_context().run, callback))
        return partial(self._forget, token)

    def scope(self) -> AbstractAsyncContextManager[None]:
        """Cancel what is inside `async with signal.scope():` when the signal aborts, then raise the reason.

        It is an `anyio` cancel scope. So every `await` inside is cancelled until the block is left, except
        under `anyio.CancelScope(shield=True)`, and a worker thread of `anyio.to_thread` is waited for.

        If the signal is already aborted the block is not entered. A block that comes to its end by itself is
        left alone, and so is what follows it. A cancellation from outside remains one, even if both come at
        once.

        Raises:
            Exception: The reason, each time the same object.
        """
        return _Scope(self, self._listen_here, self._forget)

    def _listen(self, token: object, callback: _Callback) -> None:
        self._listeners[token] = callback
        # An abort that came before the line above has not seen this callback.
        if self._outcomes:
            self._run_callbacks_soon()

    def _listen_here(self, token: object, callback: _Callback) -> None:
        """Listen for the loop that runs here, even if the signal belongs to another one."""
        running = self._adopt_running_loop()
        if running is not None and running is not self._loop:
            callback = partial(running.call_soon_threadsafe, callback)
        self._listen(token, callback)

    def _forget(self, token: object) -> None:
        self._listeners.pop(token, None)

    def _adopt_running_loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that runs here. The signal takes it for its own if it has none that could still run."""
        running = _running_loop()
        if running is None or running is self._loop:
            return running
        if self._loop is None or self._loop.is_closed():
            self._loop = running
            # Whoever aborted before this had no loop to turn to.
            if self._outcomes and self._listeners:
                running.call_soon(self._run_callbacks)
        return running

    def _run_callbacks_soon(self) -> None:
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._run_callbacks)
            except RuntimeError:
                # The loop is closed, so none of its tasks listens any more.
                pass

    def _run_callbacks(self) -> None:
        for token in list(self._listeners):
            # Whoever takes it out has it: it runs once, or it was taken back in time.
            callback = self._listeners.pop(token, None)
            if callback is not None:
                _run_logged(callback)


class _Scope:
    """One use of `AbortSignal.scope`."""

    __slots__ = ("_cancel_scope", "_cancelling", "_forget", "_listen", "_signal", "_task")

    _cancel_scope: anyio.CancelScope
    _cancelling: int
    _task: asyncio.Task[object]

    def __init__(
        self,
        signal: AbortSignal,
        listen: Callable[[object, _Callback], None],
        forget: Callable[[object], None],
    ) -> None:
        self._signal = signal
        self._listen = listen
        self._forget = forget

    async def __aenter__(self) -> None:
        self._signal.throw_if_aborted()
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("scope() can only be entered in a task")
        self._task = task
        self._cancelling = task.cancelling()
        self._cancel_scope = anyio.CancelScope()
        self._cancel_scope.__enter__()
        self._listen(self, self._cancel_scope.cancel)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._forget(self)
        swallowed = self._cancel_scope.__exit__(exc_type, exc, traceback)
        # Not every release of anyio lets through a `task.cancel()` that meets its own cancellation, so what
        # it said does not count yet.
        if not self._cancel_scope.cancel_called or self._cancelled_from_outside():
            return False
        # A timeout inside that expires in the same turn puts its own `CancelledError` in place of anyio's.
        if swallowed or isinstance(exc, asyncio.CancelledError):
            self._signal.throw_if_aborted()
        return False

    def _cancelled_from_outside(self) -> bool:
        by_task_cancel = self._task.cancelling() > self._cancelling
        by_outer_scope = anyio.current_effective_deadline() == -math.inf
        return by_task_cancel or by_outer_scope


def _checked_reason(reason: object) -> Exception:
    if not isinstance(reason, Exception):
        raise TypeError(f"abort() takes an Exception object or None, not {reason!r}")
    return reason


def _check_callback(callback: object) -> None:
    if not callable(callback) or inspect.iscoroutinefunction(callback):
        raise TypeError(f"add_callback() takes a function that is not async, not {callback!r}")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _run_logged(callback: _Callback) -> None:
    try:
        callback()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        # A `CancelledError` too: asking a cancelled future for its result raises one.
        logger.exception("A callback of an abort signal failed")
