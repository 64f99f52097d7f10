"""Child processes in groups of their own: no command outlives the call that has started it.

`run` starts a command as the leader of a new session, and so of a new process group, reads what it writes,
and ends all of it before it returns: SIGTERM, a second later SIGKILL. Two things make that hold:

* A process id is used again as soon as nobody needs it. So the leader is watched without being waited for,
  and its zombie keeps the group's id until the last signal to the group has been sent.
* Who leaves the group (`setsid`, a daemon) is looked for in the process table: by its session, by descent,
  and by a variable in its environment, which the command and everything it starts inherit.

Here stands what users see, and the checks of what they give. `child` is one command from its start until
nothing of it is left; `table` is what the system tells about processes.
"""

from __future__ import annotations

import os
import signal as signals
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import AnyStr, Generic, Literal, cast, overload

from frontmcp_py.errors import OutputLimit
from frontmcp_py.policy import (
    DEFAULT_MAX_OUTPUT,
    EXECUTE_RANGE,
    MAX_OUTPUT_RANGE,
    Duration,
    check_count,
    check_flag,
    not_allowed,
    parse_duration,
)
from frontmcp_py.signal import AbortSignal

from .child import Child, live
from .table import ROUNDS, Process, decoded, processes, send, shown

__all__ = ["ProcessResult", "ProcessTimeout", "kill_all", "run"]


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
    _check_signal(signal)
    child = Child(shown(command if isinstance(command, str) else " ".join(command)), max_output)
    try:
        child.start(command, folder, environment, given)
        await child.see_through(seconds, signal)
    finally:
        child.close()
    _raise_error(child, seconds, signal, decode)
    out, err = child.output
    if decode:
        return ProcessResult(child.returncode, decoded(out), decoded(err), child.duration)
    return ProcessResult(child.returncode, bytes(out), bytes(err), child.duration)


def _raise_error(child: Child, seconds: float | None, signal: AbortSignal | None, decode: bool) -> None:
    """Raise what has ended it, unless it has ended by itself and within its limits."""
    if child.cancelled is not None:
        try:
            raise child.cancelled
        finally:
            # The error refers to this frame by its traceback.
            child.cancelled = None
    # In the order of rank; more may have come out than it may while it was being ended.
    if child.is_late and seconds is not None:
        out, err = child.output
        raise ProcessTimeout(
            f"{child.name} took longer than {seconds:g} s and was ended",
            timeout=seconds,
            stdout=decoded(out) if decode else bytes(out),
            stderr=decoded(err) if decode else bytes(err),
        )
    if child.is_aborted and signal is not None:
        signal.throw_if_aborted()
    if child.is_too_much:
        raise OutputLimit(None, child.max_output, process=True)


def kill_all() -> None:
    """Kill every process of every command that runs, at once and without waiting: for the end of the program.

    Takes no lock, so a signal handler may call it on the main thread. A task that awaits one of the commands
    sees it end by SIGKILL, if its loop goes on.
    """
    told: set[Process] = set()
    for turn in range(ROUNDS):
        # A process that was forked off this one has a copy of the list, but the commands are not its own.
        children = [child for child in list(live.values()) if child.owner == os.getpid()]
        if not children:
            return
        since = min(child.started for child in children)
        table = [process for process in processes(since) if process is not None]
        families = [(child, child.family(table)) for child in children]
        seen = {process for _, family in families for process in family}
        # The last look has found nobody whom we have not told.
        if turn and seen <= told and not any(process.is_unclear for process in table if process not in seen):
            return
        for child, family in families:
            child.signal_group(signals.SIGKILL)
            for process in family:
                send(process, signals.SIGKILL)
        told |= seen


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
        raise TypeError(f"{field} has to be text or a path, not {shown(path)}")
    if "\0" in path:
        raise not_allowed(field, path, "text without a null character")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise not_allowed(field, path, "text that can be encoded") from None
    return path


def _checked_environment(env: object) -> dict[str, str]:
    if not isinstance(env, Mapping):
        raise TypeError(f"env has to be a mapping of names to text, not {shown(env)}")
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
        try:
            return given.encode()
        except UnicodeEncodeError:
            raise not_allowed("input", given, "text that can be encoded, or bytes") from None
    raise TypeError(f"input has to be text or bytes, not {shown(given)}")


def _check_signal(signal: object) -> None:
    if signal is not None:
        if not isinstance(signal, AbortSignal):
            raise TypeError(f"signal has to be an AbortSignal, not {shown(signal)}")
        signal.throw_if_aborted()
