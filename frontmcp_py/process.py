"""Child processes in groups of their own: no command outlives the call that has started it.

`run` starts a command as the leader of a new session, and so of a new process group, reads what it writes,
and ends all of it before it returns: SIGTERM, a second later SIGKILL. Two things make that hold:

* A process id is used again as soon as nobody needs it. So the leader is watched without being waited for,
  and its zombie keeps the group's id until the last signal to the group has been sent.
* Who leaves the group (`setsid`, a daemon) is looked for in the process table: by its session, by descent,
  and by a variable in its environment, which the command and everything it starts inherit.

Only the task that runs the command takes part: there is no thread, and none of asyncio's child watchers. All
waiting is done in one place, `_Child._pause`, where a cancellation is kept until nothing is left to end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import select
import signal as signals
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, AnyStr, Final, Generic, Literal, cast, overload

import anyio

from .clock import SystemClock
from .errors import OutputLimit
from .policy import EXECUTE_RANGE, Duration, check_count, check_flag, not_allowed, parse_duration
from .signal import AbortSignal

__all__ = ["DEFAULT_MAX_OUTPUT", "MAX_OUTPUT_RANGE", "ProcessResult", "ProcessTimeout", "kill_all", "run"]

logger: logging.Logger = logging.getLogger(__name__)

DEFAULT_MAX_OUTPUT: Final = 4 * 1024**2
"""Bytes a command may write unless told otherwise: less than a result may have, more than a model reads."""

MAX_OUTPUT_RANGE: Final = (1024, 1024**3)
"""Bytes a command may write: an error message fits in the least, memory holds the most."""

_GRACE: Final = 1.0
"""Seconds between SIGTERM and SIGKILL."""

_PATIENCE: Final = 10.0
"""Seconds until a process that SIGKILL has not ended is left to itself: the kernel may be stuck for good, and
freeing the memory of a large one takes seconds."""

_POLL: Final = 0.05
"""Seconds between two looks at what nothing tells of, at most."""

_LOOK_AT_ONCE: Final = 64
"""Rows of the process table (a millisecond) after which other tasks have their turn."""

_ROUNDS: Final = 20
"""How often to look again, at most, for who was started while we looked or could not be told."""

_CHUNK: Final = 64 * 1024
"""Bytes read or written in one turn of the loop: what a pipe holds."""

_SHOWN_AT_MOST: Final = 100
"""Characters of a command line in a message."""

_STATUS_UNKNOWN: Final = 255
"""The return code if another part of the program has taken the exit status; asyncio says the same."""

# Each run has a variable of its own, so that a server which is itself a command of another keeps both marks.
_MARK: Final = "_FRONTMCP_CHILD_"
_MARKS: Final = re.compile(rb"(?:^|\0)_FRONTMCP_CHILD_([0-9a-f]{16})=")

# Of `/proc/PID/stat`, see proc(5): the fields after the name up to `exit_code`, and one bit of `flags`.
_STAT_FIELDS: Final = 50
_IS_KERNEL_THREAD: Final = 0x00200000

_GONE: Final = frozenset({b"Z", b"X"})

_CLOCK: Final = SystemClock()

_PROC: Final = "/proc" if Path("/proc/self/stat").exists() else None
"""The process table as files, where the system has that."""


@dataclass(frozen=True, slots=True)
class ProcessResult(Generic[AnyStr]):
    """What became of a command that has ended by itself.

    Attributes:
        returncode: Its exit status; a negative number is the signal that has ended it. Other than 0 is no
            error here: what it means depends on the command.
        stdout: What was written to standard output.
        stderr: What was written to standard error.
        duration: Seconds from its start to its end.
    """

    returncode: int
    stdout: AnyStr
    stderr: AnyStr
    duration: float


class ProcessTimeout(TimeoutError):
    """A command took longer than its own timeout and was ended.

    It is no `GuardError`: a tool that lets it through has failed.

    Args:
        message: Which command, and how long it had.
        timeout: How long it had, in seconds.
        stdout: What it had written to standard output by then.
        stderr: What it had written to standard error by then.
    """

    def __init__(
        self, message: str, *, timeout: float = 0.0, stdout: str | bytes = "", stderr: str | bytes = ""
    ) -> None:
        super().__init__(message)
        self.timeout: float = timeout
        self.stdout: str | bytes = stdout
        self.stderr: str | bytes = stderr


@overload
async def run(
    *argv: str | os.PathLike[str],
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    input: str | bytes | None = None,
    timeout: Duration | None = None,
    max_output: int = DEFAULT_MAX_OUTPUT,
    text: Literal[True] = True,
    shell: bool = False,
    signal: AbortSignal | None = None,
) -> ProcessResult[str]: ...


@overload
async def run(
    *argv: str | os.PathLike[str],
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    input: str | bytes | None = None,
    timeout: Duration | None = None,
    max_output: int = DEFAULT_MAX_OUTPUT,
    text: Literal[False],
    shell: bool = False,
    signal: AbortSignal | None = None,
) -> ProcessResult[bytes]: ...


async def run(
    *argv: str | os.PathLike[str],
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    input: str | bytes | None = None,
    timeout: Duration | None = None,
    max_output: int = DEFAULT_MAX_OUTPUT,
    text: bool = True,
    shell: bool = False,
    signal: AbortSignal | None = None,
) -> ProcessResult[str] | ProcessResult[bytes]:
    """Run a command to its end, or end it and everything it has started. POSIX only.

    However this ends, no process of the command's group is left when it does, also when the awaiting task is
    cancelled. One that has left the group is ended where it can be found, else a warning names it.

    Args:
        argv: The program and its arguments, each on its own.
        cwd: The folder to run it in.
        env: All of its environment; by default this process's.
        input: What it reads from standard input, which is empty by default. Text is encoded as UTF-8.
        timeout: How long it may take, as a `Duration` of a millisecond to a day.
        max_output: How many bytes it may write, to standard output and standard error together.
        text: Whether the result has `str`, from UTF-8 with what cannot be read replaced, or `bytes`.
        shell: Whether `argv` is one text for `/bin/sh`. Never put into it what a caller has sent.
        signal: Ends the command when it is aborted.

    Returns:
        Its exit status, which may be any, and its output.

    Raises:
        ProcessTimeout: It took longer than `timeout`.
        OutputLimit: It wrote more than `max_output`.
        Exception: The signal's reason, if the signal was aborted.
        OSError: It could not be started; `filename` is the program or folder that is missing.
        ConfigurationError: A value that no command can be run with.
        TypeError: An argument that is something else than it has to be.
        NotImplementedError: This system has no process groups.
    """
    if sys.platform == "win32":
        raise NotImplementedError("Commands are run in process groups, which Windows does not have")
    command = _checked_command(argv, shell=check_flag(shell, "shell"))
    folder = None if cwd is None else _checked_text(cwd, "cwd")
    environment = dict(os.environ) if env is None else _checked_environment(env)
    given = _checked_input(input)
    seconds = None
    if timeout is not None:
        seconds = parse_duration(timeout, field="timeout", low=EXECUTE_RANGE[0], high=EXECUTE_RANGE[1])
    check_count(max_output, "max_output", *MAX_OUTPUT_RANGE)
    decode = check_flag(text, "text")
    if signal is not None:
        signal.throw_if_aborted()
    child = _Child(_shown(command if isinstance(command, str) else " ".join(command)), max_output)
    try:
        child.start(command, folder, environment, given)
        await child.see_through(seconds, signal)
    finally:
        child.close()
    child.raise_error(seconds, signal, decode)
    out, err = child.output
    if decode:
        return ProcessResult(child.returncode, _text(out), _text(err), child.duration)
    return ProcessResult(child.returncode, bytes(out), bytes(err), child.duration)


def kill_all() -> None:
    """Kill every process of every command that runs, at once and without waiting: for the end of the program.

    Takes no lock, so a signal handler may call it on the main thread. A task that awaits one of the commands
    sees it end by SIGKILL, if its loop goes on.
    """
    told: set[_Process] = set()
    for turn in range(_ROUNDS):
        # A process that was forked off this one has a copy of the list, but the commands are not its own.
        children = [child for child in list(_live.values()) if child.owner == os.getpid()]
        if not children:
            return
        since = min(child.started for child in children)
        table = [process for process in _table(since) if process is not None]
        families = [(child, child.family(table)) for child in children]
        seen = {process for _, family in families for process in family}
        # The last look has found nobody whom we have not told.
        if turn and seen <= told and not any(process.is_unclear for process in table if process not in seen):
            return
        for child, family in families:
            child.signal_group(signals.SIGKILL)
            for process in family:
                _send(process, signals.SIGKILL)
        told |= seen


# ------------------------------------------------------------------------------------------------ one command


class _Child:
    """One command: its leader, its pipes and what is left of it."""

    def __init__(self, name: str, max_output: int) -> None:
        self.name = name
        self.owner = os.getpid()
        self.mark = secrets.token_hex(8)
        self.pid = 0
        self.started = 0
        self.output: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self.returncode = _STATUS_UNKNOWN
        self.duration = 0.0
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        # The loop's own time may be some milliseconds old.
        self._began_ns = _CLOCK.monotonic_ns()
        self._room = max_output
        self._max_output = max_output
        self._popen: subprocess.Popen[bytes] | None = None
        self._pipes: list[IO[bytes]] = []
        self._input = memoryview(b"")
        self._watch: _Watch | None = None
        self._news: asyncio.Future[None] | None = None
        self._known: list[_Process] = []
        self._seen: set[_Process] = set()
        self._refused: set[_Process] = set()
        self._has_ended = False
        self._is_reaped = False
        # Why it was ended, if it did not end by itself.
        self._is_too_much = False
        self._is_late = False
        self._is_aborted = False
        self._cancelled: asyncio.CancelledError | None = None

    def start(
        self, command: list[str] | str, folder: str | None, environment: dict[str, str], given: bytes | None
    ) -> None:
        """Start it. This takes no turn of the loop, so nothing can come between."""
        _lingering[:] = [left for left in _lingering if left.poll() is None]
        # Before there is a process, so that `kill_all` finds it by its mark even while it is being made.
        _live[self.mark] = self
        self._popen = popen = subprocess.Popen(
            command,
            shell=isinstance(command, str),
            cwd=folder,
            env={**environment, **_inherited_marks(), f"{_MARK}{self.mark}": "1"},
            # Never this process's own standard input: a server on stdio hears its client there.
            stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.pid = popen.pid
        self._pipes = [pipe for pipe in (popen.stdin, popen.stdout, popen.stderr) if pipe is not None]
        leader = _row(self.pid)
        self.started = leader.started if leader else 0
        self._watch = _watch(self.pid)
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
                self._is_late = deadline is not None and now >= deadline
                self._is_aborted = signal is not None and signal.aborted
                if self._is_late or self._is_too_much or self._is_aborted or self._cancelled:
                    break
                await self._pause(None if deadline is None else deadline - now)
        finally:
            if forget is not None:
                forget()
        # anyio would cancel again in every turn; a cancellation of the task itself is kept by `_pause`.
        with anyio.CancelScope(shield=True):
            await self._end()
            await self._read_the_rest()

    def raise_error(self, seconds: float | None, signal: AbortSignal | None, decode: bool) -> None:
        """Raise what has ended it, unless it has ended by itself and within its limits."""
        if self._cancelled is not None:
            try:
                raise self._cancelled
            finally:
                # The error refers to this frame by its traceback.
                self._cancelled = None
        # In the order of rank; more may have come out than it may while it was being ended.
        if self._is_late and seconds is not None:
            out, err = self.output
            raise ProcessTimeout(
                f"{self.name} took longer than {seconds:g} s and was ended",
                timeout=seconds,
                stdout=_text(out) if decode else bytes(out),
                stderr=_text(err) if decode else bytes(err),
            )
        if self._is_aborted and signal is not None:
            signal.throw_if_aborted()
        if self._is_too_much:
            raise OutputLimit(None, self._max_output, process=True)

    def close(self) -> None:
        """Give back all it has taken; kill it if it is not over, as when its loop has been thrown away."""
        if self._popen is not None and not self._is_reaped:
            for process in self.family([process for process in _table(self.started) if process is not None]):
                _send(process, signals.SIGKILL)
            self._reap()
        for pipe in list(self._pipes):
            self._close_pipe(pipe)
        self._close_watch()
        _live.pop(self.mark, None)

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
            self._cancelled = error
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
        if not self._has_ended and _has_exited(self.pid, self._watch):
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
            self._is_too_much = True
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
            await self._tell(signals.SIGKILL, _GRACE if _PROC is None else _PATIENCE)
        self._reap()
        for process in {process for process in (*self._known, *self._refused) if _lives(process)}:
            logger.warning(
                "Process %d (%s), started by %s, could not be ended",
                process.pid,
                _name(process.pid),
                self.name,
            )

    async def _tell(self, number: signals.Signals, seconds: float) -> bool:
        """Send a signal to everybody, newcomers too, and give them time; whether nobody is left."""
        told: set[_Process] = set()
        end = self._loop.time() + seconds
        pause = 0.001
        can_be_told = self.signal_group(number)
        while True:
            for process in self._known:
                # With the group it has had its signal already. Another SIGTERM might be taken for impatience.
                by_itself = number == signals.SIGKILL or not self._is_in_group(process)
                if by_itself and process not in told and not _send(process, number):
                    self._refused.add(process)
                told.add(process)
            others = (process for process in self._known if process not in self._refused)
            if self._leader_has_ended() and not any(_lives(process) for process in others):
                await self._look()
                if self._is_over():
                    return True
            left = end - self._loop.time()
            if left <= 0 or not can_be_told:
                return False
            await self._pause(min(pause, left))
            pause = min(2 * pause, _POLL)

    async def _look(self) -> None:
        """Look who is left besides the leader."""
        for turn in range(_ROUNDS):
            had_ended, known = self._leader_has_ended(), len(self._seen)
            table = await self._read_table()
            family = self.family(table)
            self._seen.update(family)
            self._known = [
                process for process in family if process.state not in _GONE and process not in self._refused
            ]
            # The list of processes is made first and their rows are read later. Who has gone in between may
            # have started somebody who is not on the list.
            has_gone = had_ended != self._leader_has_ended() or len(self._seen) != known
            has_gone = has_gone or (turn == 0 and _VANISHED in table)
            is_unclear = any(process.is_unclear and process not in self._seen for process in table)
            if self._known or not (has_gone or is_unclear):
                return
            await self._pause(0.001 if is_unclear else 0)

    async def _read_table(self) -> list[_Process]:
        table: list[_Process] = []
        for number, process in enumerate(_table(self.started), start=1):
            if process is not None:
                table.append(process)
            if number % _LOOK_AT_ONCE == 0:
                await self._pause(0)
        return table

    def family(self, table: Sequence[_Process]) -> list[_Process]:
        """Of the processes in a table, those that the command has started, without the leader."""
        holds_id = self.pid > 0 and self._holds_id()
        children: dict[int, list[_Process]] = {}
        family: dict[_Process, None] = {}
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

    def _is_in_group(self, process: _Process) -> bool:
        return process.group == self.pid and self._holds_id()

    def _is_over(self) -> bool:
        if self._known or not self._leader_has_ended():
            return False
        if _PROC is not None:
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
                _lingering.append(popen)
        self._is_reaped = True
        # Where nobody else takes in orphans (process 1 of a container), they have become our children.
        for process in self._seen:
            now = _row(process.pid)
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
            while pipe in self._pipes and left > 0 and not self._is_too_much:
                self._readable(pipe, output, min(left, _CHUNK))
                left -= _CHUNK
            if pipe in self._pipes and not self._is_too_much:
                # Nothing more to read: this closes the pipe, unless somebody holds its other end.
                self._readable(pipe, output, 1)
        held = [pipe for pipe in (popen.stdout, popen.stderr) if pipe in self._pipes]
        if held and not self._is_too_much:
            await self._name_holders(held)

    async def _name_holders(self, pipes: Sequence[IO[bytes] | None]) -> None:
        inodes = {os.fstat(pipe.fileno()).st_ino for pipe in pipes if pipe is not None}
        holders: list[int] = []
        for number, process in enumerate(_table(self.started), start=1):
            if process is not None and process.pid != self.owner and _holds(process.pid, inodes):
                holders.append(process.pid)
            if number % _LOOK_AT_ONCE == 0:
                await self._pause(0)
        who = (
            ", ".join(f"process {pid} ({_name(pid)})" for pid in holders) or "a process that cannot be found"
        )
        logger.warning("The output of %s is still held open by %s", self.name, who)


_live: Final[dict[str, _Child]] = {}
# Leaders that could not be ended; they are waited for when there is another command to run.
_lingering: Final[list[subprocess.Popen[bytes]]] = []


# ------------------------------------------------------------------------------------------ the process table


@dataclass(frozen=True, slots=True)
class _Watch:
    """A file that becomes readable when a process has ended, while its exit status stays where it is."""

    fd: int
    close: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Process:
    """A process as it was seen. With the time of its start its id means one process for good."""

    pid: int
    started: int
    state: bytes = b""
    parent: int = 0
    group: int = 0
    session: int = 0
    marks: frozenset[str] = frozenset()
    # In the middle of `execve` a process has no environment: it may be marked or not.
    is_unclear: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Process) and (self.pid, self.started) == (other.pid, other.started)

    def __hash__(self) -> int:
        return hash((self.pid, self.started))


_VANISHED: Final = _Process(0, 0)
"""Stands for a process that was listed and has gone before it could be looked at."""


def _watch(pid: int) -> _Watch | None:
    """Watch a child that has not been waited for; `None` if it has to be looked at again and again."""
    if sys.platform == "linux":
        fd = _pidfd(pid)
        return None if fd is None else _Watch(fd, partial(os.close, fd))
    elif sys.platform == "win32":  # noqa: RET505 - type checkers know platforms by their branches
        return None
    else:
        queue = select.kqueue()
        event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
        try:
            queue.control([event], 0)
        except OSError:
            # It has ended already.
            queue.close()
            return None
        return _Watch(queue.fileno(), queue.close)


def _has_exited(pid: int, watch: _Watch | None) -> bool:
    """Whether a child has ended; its exit status stays where it is."""
    if sys.platform == "linux":
        try:
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True
    # There, what watches it tells, and nothing watches what has ended at once.
    return watch is None


def _table(since: int) -> Iterator[_Process | None]:
    """All processes that were started no earlier; `None` for others, so that who iterates can make pauses."""
    if _PROC is None:
        return
    with os.scandir(_PROC) as entries:
        for entry in entries:
            if entry.name.isdigit():
                fields = _stat(int(entry.name))
                if fields is None:
                    yield _VANISHED
                elif int(fields[19]) >= since:
                    yield _marked(_process(int(entry.name), fields))
                else:
                    yield None


def _row(pid: int) -> _Process | None:
    fields = _stat(pid)
    return None if fields is None else _process(pid, fields)


def _process(pid: int, fields: Sequence[bytes]) -> _Process:
    return _Process(pid, int(fields[19]), fields[0], int(fields[1]), int(fields[2]), int(fields[3]))


def _marked(process: _Process) -> _Process:
    """The same with what its environment says."""
    environment = _read(process.pid, "environ")
    marks = frozenset(mark.decode() for mark in _MARKS.findall(environment or b""))
    is_unclear = environment == b"" and _is_unclear(process.pid)
    return replace(process, marks=marks, is_unclear=is_unclear) if marks or is_unclear else process


def _is_unclear(pid: int) -> bool:
    """Whether a process whose environment was empty just now may still have one."""
    fields = _stat(pid)
    if fields is None or fields[0] in _GONE or int(fields[6]) & _IS_KERNEL_THREAD:
        return False
    # The environment begins and ends at the same address, which is none as long as there is no program.
    return not fields[47] == fields[48] != b"0"


def _stat(pid: int) -> list[bytes] | None:
    stat = _read(pid, "stat") or b""
    # The name, in parentheses, may hold anything.
    fields = stat[stat.rfind(b")") + 2 :].split()
    return fields if len(fields) >= _STAT_FIELDS else None


def _read(pid: int, what: str) -> bytes | None:
    """A file of a process; empty if it cannot be read now or any more, `None` if we may not read it."""
    if _PROC is None:
        return None
    try:
        fd = os.open(f"{_PROC}/{pid}/{what}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return b"".join(iter(partial(os.read, fd, _CHUNK), b""))
        finally:
            os.close(fd)
    except PermissionError:
        return None
    except OSError:
        return b""


def _lives(process: _Process) -> bool:
    now = _row(process.pid)
    return now is not None and now == process and now.state not in _GONE


def _send(process: _Process, number: signals.Signals) -> bool:
    """Send a signal to this process, not to one that may have its id by now; whether the system lets us."""
    if process.pid <= 1 or process.pid == os.getpid():
        return True
    try:
        if sys.platform == "linux" and (fd := _pidfd(process.pid)) is not None:
            try:
                if _lives(process):
                    signals.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)
        elif _lives(process):
            os.kill(process.pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    return True


def _pidfd(pid: int) -> int | None:
    if sys.platform == "linux":
        try:
            return os.pidfd_open(pid)
        except OSError:
            # Before Linux 5.3, in a sandbox that does not know it, or without a file to spare.
            return None
    return None


def _name(pid: int) -> str:
    """The command line of a process, not at length."""
    words = (_read(pid, "cmdline") or b"").rstrip(b"\0") or (_read(pid, "comm") or b"").strip()
    return _shown(_text(words.replace(b"\0", b" ")))


def _holds(pid: int, inodes: set[int]) -> bool:
    """Whether a process has one of these pipes open."""
    try:
        with os.scandir(f"{_PROC}/{pid}/fd") as entries:
            return any(entry.stat().st_ino in inodes for entry in entries)
    except OSError:
        return False


def _readable_bytes(pipe: IO[bytes] | None) -> int:
    if pipe is not None and sys.platform != "win32":
        import fcntl
        import termios

        count = fcntl.ioctl(pipe.fileno(), termios.FIONREAD, bytes(4))
        return int.from_bytes(count, sys.byteorder)
    return 0


def _inherited_marks() -> dict[str, str]:
    """The marks of whatever has started this process, which would lose sight of our commands without them."""
    return {name: value for name, value in os.environ.items() if name.startswith(_MARK)}


# -------------------------------------------------------------------------------------------- what was given


def _checked_command(argv: Sequence[object], *, shell: bool) -> list[str] | str:
    if not argv:
        raise not_allowed("argv", argv, "a program and its arguments")
    if shell and len(argv) > 1:
        raise not_allowed(
            "argv", argv, "one text, as the shell reads it; with arguments, leave shell=True out"
        )
    if len(argv) == 1 and isinstance(argv[0], list | tuple):
        raise TypeError("argv: each argument is given on its own, as in run(*argv); this is a list of them")
    words = [_checked_text(word, f"argv[{index}]") for index, word in enumerate(argv)]
    if not words[0]:
        raise not_allowed("argv[0]", words[0], "the name of a program")
    return words[0] if shell else words


def _checked_text(value: object, field: str) -> str:
    path: object = value
    if isinstance(path, os.PathLike):
        path = cast("os.PathLike[str] | os.PathLike[bytes]", path).__fspath__()
    if not isinstance(path, str):
        raise TypeError(f"{field} has to be text or a path, not {_shown(path)}")
    if "\0" in path:
        raise not_allowed(field, path, "text without a null character")
    return path


def _checked_environment(env: object) -> dict[str, str]:
    if not isinstance(env, Mapping):
        raise TypeError(f"env has to be a mapping of names to text, not {_shown(env)}")
    checked: dict[str, str] = {}
    for name, value in cast("Mapping[object, object]", env).items():
        name = _checked_text(name, "a name in env")
        if not name or "=" in name:
            raise not_allowed("a name in env", name, "a name without '='")
        checked[name] = _checked_text(value, f"env[{name!r}]")
    return checked


def _checked_input(given: object) -> bytes | None:
    if given is None or isinstance(given, bytes):
        return given
    if isinstance(given, str):
        return given.encode()
    raise TypeError(f"input has to be text or bytes, not {_shown(given)}")


def _shown(value: object) -> str:
    """The value as messages show it, not at length."""
    text = repr(value)
    return text if len(text) <= _SHOWN_AT_MOST else f"{text[: _SHOWN_AT_MOST - 1]}…"


def _text(written: bytes | bytearray) -> str:
    return written.decode(errors="replace")
