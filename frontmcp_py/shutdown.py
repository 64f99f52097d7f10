"""From the signal that tells a process to stop to its end, in bounded time.

The first signal begins the drain: no new calls, a grace for those that run, then the end. A second one ends
the process at once. So does a watchdog when the grace has long passed, whatever hangs: a worker thread, a
tool that blocks the event loop, an author's own clean-up. However it ends, no child process of a tool is left
behind, and it ends by the signal that it received; only where the main thread is deep in foreign code, which
no Python handler can interrupt, the exit status says it instead (128 and the signal's number). Foreign code
that holds Python's own lock stops the watchdog, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Generator
from types import FrameType
from typing import Final, NoReturn

from frontmcp_py.process import kill_all

logger: logging.Logger = logging.getLogger("frontmcp_py.server")

# How long all may take that comes after the grace, in seconds.
_REST: Final = 0.75

# What a handler adds to a signal's number to tell that it has run.
_HANDLED: Final = 128

# How long the main thread has to hear a signal that ends it, in seconds.
_HEARING: Final = 0.25

_SIGNALS: Final = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGBREAK") if hasattr(signal, name)
)


class Shutdown:
    """Waits for the signal to stop, drains once, and ends the process.

    Args:
        grace: Seconds that running calls are given.
        drain: Brings them to an end; takes no longer than `grace` and a moment.
    """

    def __init__(self, grace: float, drain: Callable[[], Awaitable[None]]) -> None:
        self._grace = grace
        self._drain = drain
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drained: asyncio.Event | None = None
        self._draining: asyncio.Task[None] | None = None
        self._bell: socket.socket | None = None
        self.received: int | None = None
        """The signal that told the process to stop, once one did."""

    @contextlib.contextmanager
    def listening(self, handler: Callable[[int, FrameType | None], None] | None = None) -> Generator[None]:
        """Handle signals while the block runs; outside of the main thread nobody can, and nothing is done.

        Args:
            handler: Is given to the system instead of `handle`, which it calls.
        """
        self._loop = asyncio.get_running_loop()
        self._drained = asyncio.Event()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Not through the loop: a handler of its own runs also while a tool blocks the loop.
        before = {each: signal.signal(each, handler or self.handle) for each in _SIGNALS}
        ours, bell = socket.socketpair()
        bell.setblocking(False)
        self._bell = bell
        # The system rings this bell itself, also while the main thread runs no Python.
        others = signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._watch, args=(ours, others), name="shutdown", daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(others)
            bell.close()
            for each, previous in before.items():
                signal.signal(each, previous)

    def handle(self, received: int, _: FrameType | None = None) -> None:
        """A signal has come: the first one begins the drain, the second one ends the process."""
        loop = self._loop
        if self.received is not None or loop is None or loop.is_closed():
            self._end(received)
        self.received = received
        if self._bell is not None:
            # Others may have taken the bell's place meanwhile, such as `loop.add_signal_handler`.
            with contextlib.suppress(OSError):
                self._bell.send(bytes([received + _HANDLED]))
        loop.call_soon_threadsafe(self._begin)

    async def drained(self) -> None:
        """Wait for a signal, and for the drain that it begins."""
        assert self._drained is not None
        await self._drained.wait()

    def end(self) -> None:
        """End the process by the signal that it received, if one came."""
        if self.received is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self._end(self.received)

    def _begin(self) -> None:
        self._draining = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        assert self._drained is not None
        logger.info("told to stop: running calls have %g s", self._grace)
        try:
            await self._drain()
        except Exception:
            logger.exception("draining failed")
        finally:
            self._drained.set()

    def _watch(self, bell: socket.socket, others: int) -> None:
        """In a thread of its own: end the process when the main thread does not.

        Args:
            bell: Tells of signals, by their numbers.
            others: Where the loop would hear of them.
        """
        heard: list[int] = []
        with bell:
            while True:
                left = self._grace + _REST if len(heard) == 1 else _HEARING if heard else None
                ready, _, _ = select.select([bell], [], [], left)
                if not ready:
                    break
                numbers = bell.recv(4096)
                if not numbers:
                    # Nobody listens any more.
                    return
                if others != -1:
                    with contextlib.suppress(OSError):
                        os.write(others, bytes(number for number in numbers if number < _HANDLED))
                for number in numbers:
                    if number in _SIGNALS:
                        heard.append(number)
                    elif number - _HANDLED in _SIGNALS and not heard:
                        heard.append(number - _HANDLED)
            if len(heard) == 1 and hasattr(signal, "pthread_kill"):
                # A second one, to the main thread, so that it comes back from whatever it waits for.
                signal.pthread_kill(threading.main_thread().ident or 0, heard[0])
                threading.Event().wait(_HEARING)
        kill_all()
        os._exit(128 + heard[-1])

    def _end(self, received: int) -> NoReturn:
        kill_all()
        signal.signal(received, signal.SIG_DFL)
        signal.raise_signal(received)
        # Blocked, or not deadly here.
        os._exit(128 + received)
