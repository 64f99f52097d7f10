"""One command, from its start until nothing of it is left.

Only the task that runs the command takes part: there is no thread, and none of asyncio's child watchers. All
waiting is done in one place, `Child._pause`, where a cancellation is kept until nothing is left to end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal as signals
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Final

import anyio

from frontmcp_py.clock import SystemClock
from frontmcp_py.signal import AbortSignal

from .table import (
    GONE,
    MARK,
    ROUNDS,
    VANISHED,
    Process,
    Watch,
    has_exited,
    has_table,
    holds_open,
    inherited_marks,
    lives,
    name_of,
    processes,
    row,
    send,
    watch_end,
)

logger: logging.Logger = logging.getLogger("frontmcp_py.process")

_GRACE: Final = 1.0
"""Seconds between SIGTERM and SIGKILL."""

_PATIENCE: Final = 10.0
"""Seconds until a process that SIGKILL has not ended is left to itself: the kernel may be stuck for good, and
freeing the memory of a large one takes seconds."""

_POLL: Final = 0.05
"""Seconds between two looks at what nothing tells of, at most."""

_LOOK_AT_ONCE: Final = 64
"""Rows of the process table (a millisecond) after which other tasks have their turn."""

_CHUNK: Final = 64 * 1024
"""Bytes read or written in one turn of the loop: what a pipe holds."""

_STATUS_UNKNOWN: Final = 255
"""The return code if another part of the program has taken the exit status; asyncio says the same."""

# How long after its start, in seconds, a command's descendants have larger ids than it has itself.
_YOUNG: Final = 1.0

_CLOCK: Final = SystemClock()


class Child:
    """One command: its leader, its pipes and what is left of it."""

    def __init__(self, name: str, max_output: int) -> None:
        self.name: str = name
        self.max_output: int = max_output
        self.owner: int = os.getpid()
        self.mark: str = secrets.token_hex(8)
        self.pid: int = 0
        self.started: int = 0
        self.output: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self.returncode: int = _STATUS_UNKNOWN
        self.duration: float = 0.0
        # Why it was ended, if it did not end by itself.
        self.is_too_much: bool = False
        self.is_late: bool = False
        self.is_aborted: bool = False
        self.cancelled: asyncio.CancelledError | None = None
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        # The loop's own time may be some milliseconds old.
        self._began_ns = _CLOCK.monotonic_ns()
        self._room = max_output
        self._popen: subprocess.Popen[bytes] | None = None
        self._pipes: list[IO[bytes]] = []
        self._input = memoryview(b"")
        self._watch: Watch | None = None
        self._news: asyncio.Future[None] | None = None
        self._known: list[Process] = []
        self._seen: set[Process] = set()
        self._refused: set[Process] = set()
        self._has_ended = False
        self._is_reaped = False

    def start(
        self, command: list[str] | str, folder: str | None, environment: dict[str, str], given: bytes | None
    ) -> None:
        """Start it. This takes no turn of the loop, so nothing can come between."""
        lingering[:] = [left for left in lingering if left.poll() is None]
        # Before there is a process, so that `kill_all` finds it by its mark even while it is being made.
        live[self.mark] = self
        try:
            self._popen = popen = subprocess.Popen(
                command,
                shell=isinstance(command, str),
                cwd=folder,
                env={**environment, **inherited_marks(), f"{MARK}{self.mark}": "1"},
                # Never this process's own standard input: a server on stdio hears its client there.
                stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except Exception:
            # There is no process; but an interrupt from the keyboard may have left one, with our mark.
            self._is_reaped = True
            raise
        self.pid = popen.pid
        self._pipes = [pipe for pipe in (popen.stdin, popen.stdout, popen.stderr) if pipe is not None]
        leader = row(self.pid)
        self.started = leader.started if leader else 0
        self._watch = watch_end(self.pid)
        if self._watch is not None:
            self._loop.add_reader(self._watch.fd, self._end_seen)
        for end in self._pipes:
            os.set_blocking(end.fileno(), False)
        for pipe, output in zip((popen.stdout, popen.stderr), self.output, strict=True):
            if pipe is not None:
                self._loop.add_reader(pipe.fileno(), self._readable, pipe, output)
        if popen.stdin is not None:
            self._input = memoryview(given or b"")
            self._loop.add_writer(popen.stdin.fileno(), self._writable, popen.stdin)

    async def see_through(self, seconds: float | None, signal: AbortSignal | None) -> None:
        """Wait until it ends, or has to be ended, and let nothing of it be left."""
        deadline = None if seconds is None else self._began + seconds
        forget: Callable[[], None] | None = None
        if signal is not None:
            # The signal may belong to the loop of another thread.
            forget = signal.add_callback(partial(self._loop.call_soon_threadsafe, self._wake))
        try:
            while not self._leader_has_ended():
                now = self._loop.time()
                self.is_late = deadline is not None and now >= deadline
                self.is_aborted = signal is not None and signal.aborted
                if self.is_late or self.is_too_much or self.is_aborted or self.cancelled:
                    break
                await self._pause(None if deadline is None else deadline - now)
        finally:
            if forget is not None:
                forget()
        # anyio would cancel again in every turn; a cancellation of the task itself is kept by `_pause`.
        with anyio.CancelScope(shield=True):
            await self._end()
            await self._read_the_rest()

    def close(self) -> None:
        """Give back all it has taken; kill it if it is not over, as when its loop has been thrown away."""
        if not self._is_reaped:
            table = [process for process in processes(self.started) if process is not None]
            for process in self.family(table):
                send(process, signals.SIGKILL)
            self._reap()
        for pipe in list(self._pipes):
            self._close_pipe(pipe)
        self._close_watch()
        live.pop(self.mark, None)

    # ---------------------------------------------------------------------------------------- what happens

    async def _pause(self, seconds: float | None) -> None:
        """Wait for news, at most so long: the one place to wait, or be cancelled, while something lives."""
        if self._watch is None and not self._has_ended:
            seconds = _POLL if seconds is None else min(seconds, _POLL)
        self._news = self._loop.create_future()
        timer = None if seconds is None else self._loop.call_later(seconds, self._wake)
        try:
            await self._news
        except asyncio.CancelledError as error:
            self.cancelled = error
        finally:
            self._news = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _end_seen(self) -> None:
        self._note_end()
        self._close_watch()
        self._wake()

    def _leader_has_ended(self) -> bool:
        if not self._has_ended and has_exited(self.pid, self._watch):
            self._note_end()
        return self._has_ended

    def _note_end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self.duration = (_CLOCK.monotonic_ns() - self._began_ns) / 1e9

    def _readable(self, pipe: IO[bytes], output: bytearray, most: int = _CHUNK) -> None:
        try:
            chunk = os.read(pipe.fileno(), most)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._close_pipe(pipe)
            return
        output += chunk[: self._room]
        self._room -= len(chunk)
        if self._room < 0:
            self._room = 0
            self.is_too_much = True
            for other in self._pipes:
                self._loop.remove_reader(other.fileno())
            self._wake()

    def _writable(self, pipe: IO[bytes]) -> None:
        try:
            self._input = self._input[os.write(pipe.fileno(), self._input[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            # It does not want to hear it, which is its own affair.
            self._input = memoryview(b"")
        if not self._input:
            self._close_pipe(pipe)

    def _close_pipe(self, pipe: IO[bytes]) -> None:
        if pipe in self._pipes:
            self._pipes.remove(pipe)
            if not self._loop.is_closed():
                self._loop.remove_reader(pipe.fileno())
                self._loop.remove_writer(pipe.fileno())
            pipe.close()

    def _close_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(watch.fd)
            watch.close()

    # ------------------------------------------------------------------------------------------ the ending

    async def _end(self) -> None:
        """End what is left: politely at first, then not."""
        # Before any signal: who has left the group can be found by descent only as long as its parents live.
        await self._look()
        if not self._is_over() and not await self._tell(signals.SIGTERM, _GRACE):
            # Without a process table there is nobody to wait for in particular.
            await self._tell(signals.SIGKILL, _PATIENCE if has_table() else _GRACE)
        self._reap()
        for process in {process for process in (*self._known, *self._refused) if lives(process)}:
            logger.warning(
                "Process %d (%s), started by %s, could not be ended",
                process.pid,
                name_of(process.pid),
                self.name,
            )

    async def _tell(self, number: signals.Signals, seconds: float) -> bool:
        """Send a signal to everybody, newcomers too, and give them time; whether nobody is left."""
        told: set[Process] = set()
        end = self._loop.time() + seconds
        pause = 0.001
        can_be_told = self.signal_group(number)
        while True:
            self._tell_each(number, told)
            others = (process for process in self._known if process not in self._refused)
            if self._leader_has_ended() and not any(lives(process) for process in others):
                await self._look()
                if self._is_over():
                    return True
                # At once: some have started the next and gone within a millisecond.
                pause = 0.001 if self._tell_each(number, told) else pause
            left = end - self._loop.time()
            if left <= 0 or not can_be_told:
                return False
            await self._pause(min(pause, left))
            pause = min(2 * pause, _POLL)

    def _tell_each(self, number: signals.Signals, told: set[Process]) -> bool:
        """Send a signal to those who have not had it; whether there were any."""
        newcomers = [process for process in self._known if process not in told]
        for process in newcomers:
            # With the group it has had its signal already. Another SIGTERM might be taken for impatience.
            by_itself = number == signals.SIGKILL or not self._is_in_group(process)
            if by_itself and not send(process, number):
                self._refused.add(process)
        told.update(newcomers)
        return bool(newcomers)

    async def _look(self) -> None:
        """Look who is left besides the leader."""
        for turn in range(ROUNDS):
            had_ended, known = self._leader_has_ended(), len(self._seen)
            table = await self._read_table()
            family = self.family(table)
            self._seen.update(family)
            self._known = [
                process for process in family if process.state not in GONE and process not in self._refused
            ]
            # The list of processes is made first and their rows are read later. Who has gone in between may
            # have started somebody who is not on the list.
            has_gone = had_ended != self._leader_has_ended() or len(self._seen) != known
            has_gone = has_gone or (turn == 0 and VANISHED in table)
            is_unclear = any(process.is_unclear and process not in self._seen for process in table)
            if self._known or not (has_gone or is_unclear):
                return
            await self._pause(0.001 if is_unclear else 0)

    async def _read_table(self) -> list[Process]:
        table: list[Process] = []
        # No system starts as many processes in that time as there are ids.
        is_young = self._loop.time() - self._began < _YOUNG
        for number, process in enumerate(processes(self.started, self.pid if is_young else 0), start=1):
            if process is not None:
                table.append(process)
            if number % _LOOK_AT_ONCE == 0:
                await self._pause(0)
        return table

    def family(self, table: Sequence[Process]) -> list[Process]:
        """Of the processes in a table, those that the command has started, without the leader."""
        holds_id = self.pid > 0 and self._holds_id()
        children: dict[int, list[Process]] = {}
        family: dict[Process, None] = {}
        for process in table:
            children.setdefault(process.parent, []).append(process)
            is_known = self.mark in process.marks or process in self._seen
            if is_known or (holds_id and self.pid in (process.group, process.session)):
                family[process] = None
        parents = [process.pid for process in family]
        if holds_id:
            parents.append(self.pid)
        while parents:
            for process in children.get(parents.pop(), ()):
                if process not in family:
                    family[process] = None
                    parents.append(process.pid)
        return [process for process in family if process.pid != self.pid]

    def _is_in_group(self, process: Process) -> bool:
        # It may have left since it was seen.
        now = row(process.pid)
        return now is not None and now == process and now.group == self.pid and self._holds_id()

    def _is_over(self) -> bool:
        if self._known or not self._leader_has_ended():
            return False
        if has_table():
            return True
        if sys.platform == "linux":
            # The zombie counts as a member; who writes no more is the best that can be told.
            return not self._pipes
        try:
            os.killpg(self.pid, 0)
        except OSError:
            # A group of zombies counts as none.
            return True
        return False

    def _holds_id(self) -> bool:
        """Whether the leader, dead or alive, still keeps the group's id from being given to others."""
        if self._is_reaped:
            return False
        if sys.platform == "linux":
            try:
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return False
        return True

    def signal_group(self, number: signals.Signals) -> bool:
        """Send a signal to the whole group, if its id is still its own; whether the system lets us."""
        # 0 would be our own group, and 1 would be everybody.
        if self.pid > 1 and self.pid != os.getpgrp() and self._holds_id():
            try:
                os.killpg(self.pid, number)
            except PermissionError:
                # Elsewhere than on Linux, also if all of them are zombies.
                return self._has_ended
            except ProcessLookupError:
                pass
        return True

    def _reap(self) -> None:
        """Take the leader's exit status, and let go of its id; kill whoever is in the group by then."""
        popen = self._popen
        if popen is None:
            return
        if not self._holds_id():
            logger.warning("The exit status of %s was taken by another part of the program", self.name)
            popen.returncode = _STATUS_UNKNOWN
        else:
            self.signal_group(signals.SIGKILL)
            try:
                # It has ended, but for one that is beyond our reach or has had its SIGKILL just now.
                self.returncode = popen.wait(0 if self._has_ended else _GRACE / 10)
            except subprocess.TimeoutExpired:
                logger.warning("Process %d, %s, could not be ended", self.pid, self.name)
                lingering.append(popen)
        self._is_reaped = True
        # Where nobody else takes in orphans (process 1 of a container), they have become our children.
        for process in self._seen:
            now = row(process.pid)
            if now is not None and now == process and now.parent == self.owner:
                try:
                    os.waitpid(process.pid, os.WNOHANG)
                except ChildProcessError:
                    pass

    async def _read_the_rest(self) -> None:
        """Read what was written by now, and name whoever could still write."""
        popen = self._popen
        if popen is None:
            return
        for pipe, output in zip((popen.stdout, popen.stderr), self.output, strict=True):
            left = _readable_bytes(pipe) if pipe in self._pipes else 0
            while pipe in self._pipes and left > 0 and not self.is_too_much:
                self._readable(pipe, output, min(left, _CHUNK))
                left -= _CHUNK
            if pipe in self._pipes and not self.is_too_much:
                # Nothing more to read: this closes the pipe, unless somebody holds its other end.
                self._readable(pipe, output, 1)
        held = [pipe for pipe in (popen.stdout, popen.stderr) if pipe in self._pipes]
        if held and not self.is_too_much:
            await self._name_holders(held)

    async def _name_holders(self, pipes: Sequence[IO[bytes] | None]) -> None:
        inodes = {os.fstat(pipe.fileno()).st_ino for pipe in pipes if pipe is not None}
        holders: list[int] = []
        # No system starts as many processes in that time as there are ids.
        is_young = self._loop.time() - self._began < _YOUNG
        for number, process in enumerate(processes(self.started, self.pid if is_young else 0), start=1):
            if process is not None and process.pid != self.owner and holds_open(process.pid, inodes):
                holders.append(process.pid)
            if number % _LOOK_AT_ONCE == 0:
                await self._pause(0)
        who = ", ".join(f"process {pid} ({name_of(pid)})" for pid in holders)
        logger.warning(
            "The output of %s is still held open by %s", self.name, who or "a process that cannot be found"
        )


def _readable_bytes(pipe: IO[bytes] | None) -> int:
    if pipe is not None and sys.platform != "win32":
        import fcntl
        import termios

        count = fcntl.ioctl(pipe.fileno(), termios.FIONREAD, bytes(4))
        return int.from_bytes(count, sys.byteorder)
    return 0


live: Final[dict[str, Child]] = {}
# Leaders that could not be ended; they are waited for when there is another command to run.
lingering: Final[list[subprocess.Popen[bytes]]] = []
