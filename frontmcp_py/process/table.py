"""What the system tells about processes: who there is, who started whom, and who has ended.

It is asked through the files of `/proc`, see proc(5), where there are any. An answer may be outdated as soon
as it is given, and an id somebody else's; so a `Process` is known by the time of its start, too.
"""

from __future__ import annotations

import os
import re
import select
import signal as signals
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

# Each run has a variable of its own, so that a server which is itself a command of another keeps both marks.
MARK: Final = "_FRONTMCP_CHILD_"
_MARKS: Final = re.compile(rb"(?:^|\0)_FRONTMCP_CHILD_([0-9a-f]{16})=")

# Of `/proc/PID/stat`, see proc(5): the fields after the name up to `exit_code`, and one bit of `flags`.
_STAT_FIELDS: Final = 50
_IS_KERNEL_THREAD: Final = 0x00200000

GONE: Final = frozenset({b"Z", b"X"})
"""The states of a process that has ended."""

PROC: Final = "/proc" if Path("/proc/self/stat").exists() else None
"""The process table as files, where the system has that."""

_CHUNK: Final = 64 * 1024
"""Bytes of a file read at once."""

ROUNDS: Final = 20
"""How often to look again, at most, for who was started while we looked or could not be told."""

_SHOWN_AT_MOST: Final = 100
"""Characters of a command line in a message."""


@dataclass(frozen=True, slots=True)
class Watch:
    """A file that becomes readable when a process has ended, while its exit status stays where it is."""

    fd: int
    close: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Process:
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
        return isinstance(other, Process) and (self.pid, self.started) == (other.pid, other.started)

    def __hash__(self) -> int:
        return hash((self.pid, self.started))


VANISHED: Final = Process(0, 0)
"""Stands for a process that was listed and has gone before it could be looked at."""


def watch_end(pid: int) -> Watch | None:
    """Watch a child that has not been waited for; `None` if it has to be looked at again and again."""
    if sys.platform == "linux":
        fd = _pidfd(pid)
        return None if fd is None else Watch(fd, partial(os.close, fd))
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
        return Watch(queue.fileno(), queue.close)


def has_exited(pid: int, watch: Watch | None) -> bool:
    """Whether a child has ended; its exit status stays where it is."""
    if sys.platform == "linux":
        try:
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True
    # There, what watches it tells, and nothing watches what has ended at once.
    return watch is None


def has_table() -> bool:
    """Whether this system shows its process table."""
    return PROC is not None


def processes(since: int, above: int = 0) -> Iterator[Process | None]:
    """All processes that were started no earlier; `None` for others, so that who iterates can make pauses.

    Args:
        since: When, as the table has it.
        above: An id that was given at that time, if ids cannot have been given all round since: then smaller
            ones belong to older processes, and need not be looked at.
    """
    if PROC is None:
        return
    newest = _newest()
    if newest < above:
        # They have begun anew.
        above = 0
    try:
        entries = os.scandir(PROC)
    except OSError:
        # Without a file to spare nobody can be seen, but groups can still be ended.
        return
    with entries:
        for entry in entries:
            if entry.name.isdigit():
                pid = int(entry.name)
                yield _seen(pid, since) if pid >= above else None
    # The list was made first. Who was started since then is not on it, and may be the last of the family.
    for _ in range(ROUNDS):
        listed, newest = newest, _newest()
        if not listed or newest == listed:
            return
        for pid in range(listed + 1, newest + 1):
            yield None if _is_thread(pid) else _seen(pid, since)


def _seen(pid: int, since: int) -> Process | None:
    fields = _stat(pid)
    if fields is None:
        return VANISHED
    return _marked(_process(pid, fields)) if int(fields[19]) >= since else None


def _newest() -> int:
    """The id given last, to a process or a thread; 0 where the system does not tell."""
    try:
        return int(Path(f"{PROC}/loadavg").read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


def _is_thread(pid: int) -> bool:
    """Whether this is a thread of a process with another id, or nobody; the list has no threads."""
    return f"\nTgid:\t{pid}\n".encode() not in (_read(pid, "status") or b"")


def row(pid: int) -> Process | None:
    """What the table says about one process, but for its environment."""
    fields = _stat(pid)
    return None if fields is None else _process(pid, fields)


def _process(pid: int, fields: Sequence[bytes]) -> Process:
    return Process(pid, int(fields[19]), fields[0], int(fields[1]), int(fields[2]), int(fields[3]))


def _marked(process: Process) -> Process:
    """The same with what its environment says."""
    environment = _read(process.pid, "environ")
    marks = frozenset(mark.decode() for mark in _MARKS.findall(environment or b""))
    is_unclear = environment == b"" and _is_unclear(process.pid)
    return replace(process, marks=marks, is_unclear=is_unclear) if marks or is_unclear else process


def _is_unclear(pid: int) -> bool:
    """Whether a process whose environment was empty just now may still have one."""
    fields = _stat(pid)
    if fields is None or fields[0] in GONE or int(fields[6]) & _IS_KERNEL_THREAD:
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
    if PROC is None:
        return None
    try:
        fd = os.open(f"{PROC}/{pid}/{what}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return b"".join(iter(partial(os.read, fd, _CHUNK), b""))
        finally:
            os.close(fd)
    except PermissionError:
        return None
    except OSError:
        return b""


def lives(process: Process) -> bool:
    """Whether it has not ended; nobody else is taken for it."""
    now = row(process.pid)
    return now is not None and now == process and now.state not in GONE


def send(process: Process, number: signals.Signals) -> bool:
    """Send a signal to this process, not to one that may have its id by now; whether the system lets us."""
    if process.pid <= 1 or process.pid == os.getpid():
        return True
    try:
        if sys.platform == "linux" and (fd := _pidfd(process.pid)) is not None:
            try:
                if lives(process):
                    signals.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)
        elif lives(process):
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


def name_of(pid: int) -> str:
    """The command line of a process, not at length."""
    words = (_read(pid, "cmdline") or b"").rstrip(b"\0") or (_read(pid, "comm") or b"").strip()
    return shown(decoded(words.replace(b"\0", b" ")))


def holds_open(pid: int, inodes: set[int]) -> bool:
    """Whether a process has one of these pipes open."""
    try:
        with os.scandir(f"{PROC}/{pid}/fd") as entries:
            return any(entry.stat().st_ino in inodes for entry in entries)
    except OSError:
        return False


def inherited_marks() -> dict[str, str]:
    """The marks of whatever has started this process, which would lose sight of our commands without them."""
    return {name: value for name, value in os.environ.items() if name.startswith(MARK)}


def shown(value: object) -> str:
    """The value as messages show it, not at length."""
    text = repr(value)
    return text if len(text) <= _SHOWN_AT_MOST else f"{text[: _SHOWN_AT_MOST - 1]}…"


def decoded(written: bytes | bytearray) -> str:
    """What a process has written, as text."""
    return written.decode(errors="replace")
