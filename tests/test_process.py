"""Real commands, on asyncio's loop and, in the slow run, on uvloop.

A command is known by a number that nobody else has in its arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import itertools
import logging
import os
import pickle
import resource
import signal as signals
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
import uvloop

from frontmcp_py import AbortSignal, ConfigurationError, OutputLimit
from frontmcp_py.process import ProcessResult, ProcessTimeout, kill_all, run, table
from frontmcp_py.process.child import Child, lingering, live
from tests.processes import alive, is_sleep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

PATIENCE: Final = 20.0
"""Seconds after which whatever a test waits for is overdue."""

# Output that is not flushed is written at the end only.
PYTHON: Final = (sys.executable, "-S", "-u", "-c")

_NUMBERS: Final = itertools.count()


class Stop(Exception):
    """A reason of the tests' own."""


@pytest.fixture(params=["asyncio", pytest.param("uvloop", marks=pytest.mark.slow)])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


@pytest.fixture
def nap() -> Iterator[str]:
    """For how many seconds the processes of a test sleep: longer than it takes, and as nobody else does."""
    nap = f"300.{os.getpid()}{next(_NUMBERS)}"
    yield nap
    left = alive(nap)
    for pid in left:
        os.kill(pid, signals.SIGKILL)
    assert left == []


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    """Nothing that runs is left in the books, and every child has been waited for."""
    before = children()
    yield
    assert live == {}
    assert lingering == []
    assert children() <= before


@pytest.fixture(autouse=True)
def endless_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is waited for in vain is waited for until the test is overdue, and not much longer."""
    monkeypatch.setattr("frontmcp_py.process.child._PATIENCE", 75.0)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL comes soon, for processes that ignore SIGTERM in any case."""
    monkeypatch.setattr("frontmcp_py.process.child._GRACE", 0.1)


def children() -> set[int]:
    """This process's children, zombies too."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def files() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        # Nobody tells when a process is there or gone.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def started(*tokens: str) -> None:
    """Wait until the sleep of each of these is there; a shell that has the token in its script is none."""
    await until(lambda: all(sleeping(token) for token in tokens))


def sleeping(token: str) -> int:
    """How many sleeps there are with the token."""
    return sum(is_sleep(pid) for pid in alive(token))


async def test_a_result_has_the_status_and_both_outputs() -> None:
    result = await run("sh", "-c", "echo out; echo err >&2; exit 3")
    assert (result.returncode, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert 0 < result.duration < PATIENCE


async def test_a_command_that_a_signal_has_ended_has_a_negative_status() -> None:
    assert (await run("sh", "-c", "kill -KILL $$")).returncode == -signals.SIGKILL


async def test_text_is_read_as_utf_8_and_what_cannot_be_read_is_replaced() -> None:
    assert (await run("printf", r"\303\244\377\r\n")).stdout == "ä\ufffd\r\n"


async def test_bytes_are_given_as_they_were_written() -> None:
    result = await run("printf", r"\303\244\377", text=False)
    assert (result.stdout, result.stderr) == (b"\xc3\xa4\xff", b"")
    assert type(result.stdout) is bytes


@pytest.mark.parametrize("given", [None, "", b""], ids=repr)
async def test_standard_input_is_empty_unless_given(given: str | bytes | None) -> None:
    assert (await run("cat", input=given)).stdout == ""


async def test_the_input_of_the_server_is_never_shared() -> None:
    kept, (read, write) = os.dup(0), os.pipe()
    os.dup2(read, 0)
    try:
        os.write(write, b"client")
        assert (await run("head", "-c", "6")).stdout == ""
    finally:
        os.dup2(kept, 0)
        for file in (kept, read, write):
            os.close(file)


@pytest.mark.parametrize("given", ["ä" * 700_000, "ä".encode() * 700_000], ids=["text", "bytes"])
async def test_large_input_and_output_do_not_wait_for_each_other(given: str | bytes) -> None:
    result = await run("tee", "/dev/stderr", input=given)
    assert result.stdout == result.stderr == "ä" * 700_000


async def test_a_command_need_not_read_its_input() -> None:
    assert (await run("sh", "-c", "exec <&-; echo done", input=b"x" * 1_000_000)).stdout == "done\n"
    assert (await run("echo", "done", input=b"x" * 1_000_000)).stdout == "done\n"


async def test_input_that_nobody_reads_holds_nothing_up(nap: str) -> None:
    with pytest.raises(ProcessTimeout):
        await run("sh", "-c", f"sleep {nap} & wait", input=b"x" * 1_000_000, timeout=0.1)


async def test_output_after_the_end_of_one_stream() -> None:
    assert (await run("sh", "-c", "exec >&-; cat >&2; echo late >&2", input="")).stderr == "late\n"


async def test_a_command_runs_where_and_with_what_it_is_told(tmp_path: Path) -> None:
    result = await run(
        "sh",
        "-c",
        'pwd; echo "$GREETING"; env',
        cwd=tmp_path,
        env={"GREETING": "hi", "PATH": os.environ["PATH"]},
    )
    where, greeting, *environment = result.stdout.splitlines()
    assert (where, greeting) == (str(tmp_path), "hi")
    assert "HOME" not in {line.partition("=")[0] for line in environment}


async def test_a_command_has_the_environment_of_its_server_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GREETING", "hi")
    assert (await run("printenv", "GREETING")).stdout == "hi\n"


async def test_there_is_no_shell_unless_it_is_asked_for() -> None:
    assert (await run("echo", "$((1+1)); echo x")).stdout == "$((1+1)); echo x\n"
    assert (await run("echo $((1+1)); echo x", shell=True)).stdout == "2\nx\n"


async def test_a_path_is_a_program_too() -> None:
    assert (await run(Path("/bin/echo"), Path("a"))).stdout == "a\n"


async def test_the_command_is_in_a_session_of_its_own() -> None:
    result = await run(*PYTHON, "import os; print(os.getpid() == os.getsid(0) == os.getpgrp())")
    assert result.stdout == "True\n"


async def test_many_commands_at_once_have_their_own_output() -> None:
    results = await asyncio.gather(*(run("sh", "-c", f"sleep 0.0{n % 3}; echo {n}") for n in range(50)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(50)]


# ----------------------------------------------------------------------------------------- what is refused

LIST: Any = ["ls", "-l"]
NUMBER: Any = 5
BYTES: Any = b"ls"
BYTES_PATH: Any = os.fsencode(os.curdir)


@pytest.mark.parametrize(
    ("argv", "options", "error", "message"),
    [
        ((), {}, ConfigurationError, r"argv: \(\) is not allowed; give a program"),
        (("",), {}, ConfigurationError, r"argv\[0\]: '' is not allowed"),
        ((LIST,), {}, TypeError, r"each argument is given on its own"),
        (("sleep", NUMBER), {}, TypeError, r"argv\[1\] has to be text or a path, not 5"),
        ((BYTES,), {}, TypeError, r"argv\[0\] has to be text or a path, not b'ls'"),
        (("ls", "a\0b"), {}, ConfigurationError, r"argv\[1\]: 'a\\x00b' .* without a null character"),
        (("ls", "\ud800"), {}, ConfigurationError, r"argv\[1\]: '\\ud800' .* that can be encoded"),
        (("ls", "-l"), {"shell": True}, ConfigurationError, "argv: .* one text"),
        (("ls",), {"shell": 1}, ConfigurationError, "shell: 1"),
        (("ls",), {"text": "yes"}, ConfigurationError, "text: 'yes'"),
        (("ls",), {"cwd": BYTES_PATH}, TypeError, r"cwd has to be text"),
        (("ls",), {"cwd": "a\0"}, ConfigurationError, "cwd: "),
        (("ls",), {"env": {"A=": "b"}}, ConfigurationError, "a name without '='"),
        (("ls",), {"env": {"A": 1}}, TypeError, r"env\['A'\] has to be text"),
        (("ls",), {"env": {"A": "\0"}}, ConfigurationError, r"env\['A'\]: "),
        (("ls",), {"env": [("A", "b")]}, TypeError, "env has to be a mapping"),
        (("ls",), {"input": 5}, TypeError, "input has to be text or bytes, not 5"),
        (("ls",), {"input": "\ud800"}, ConfigurationError, r"input: '\\ud800' .* that can be encoded"),
        (("ls",), {"timeout": 0}, ConfigurationError, "timeout: 0"),
        (("ls",), {"timeout": "soon"}, ConfigurationError, "timeout: 'soon'"),
        (("ls",), {"timeout": True}, ConfigurationError, "timeout: True"),
        (("ls",), {"signal": signals.SIGTERM}, TypeError, "signal has to be an AbortSignal, not <Signals"),
        (("ls",), {"max_output": 1023}, ConfigurationError, "max_output: 1023 .* from 1024 to 1073741824"),
        (("ls",), {"max_output": 4096.0}, ConfigurationError, "max_output: 4096.0"),
    ],
)
async def test_what_no_command_can_be_run_with(
    argv: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await run(*argv, **options)


async def test_a_program_or_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as program:
        await run("no-such-program-anywhere", "-x")
    assert program.value.filename == "no-such-program-anywhere"
    with pytest.raises(FileNotFoundError) as folder:
        await run("ls", cwd=tmp_path / "nowhere")
    assert folder.value.filename == str(tmp_path / "nowhere")
    with pytest.raises(PermissionError):
        await run(tmp_path)


async def test_a_system_without_process_groups_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        with pytest.raises(NotImplementedError, match="Windows"):
            await run("ls")


# ---------------------------------------------------------------------------------------- what ends it


async def test_a_command_that_takes_too_long_is_ended_and_its_output_kept(nap: str) -> None:
    with pytest.raises(ProcessTimeout, match=r"'sh -c echo out; .*' took longer than 0.2 s") as error:
        await run("sh", "-c", f"echo out; echo err >&2; sleep {nap} & wait", timeout="200ms")
    assert (error.value.stdout, error.value.stderr, error.value.timeout) == ("out\n", "err\n", 0.2)
    assert isinstance(error.value, TimeoutError)
    assert alive(nap) == []


async def test_the_output_of_a_timeout_is_bytes_where_the_result_would_be(nap: str) -> None:
    with pytest.raises(ProcessTimeout) as error:
        await run("sh", "-c", f"echo out; sleep {nap}", timeout=0.2, text=False)
    copy = pickle.loads(pickle.dumps(error.value))
    assert (copy.stdout, copy.timeout, str(copy)) == (b"out\n", 0.2, str(error.value))


async def test_a_command_may_write_as_much_as_it_may_and_no_more() -> None:
    result = await run("sh", "-c", "head -c 1000 /dev/zero; head -c 24 /dev/zero >&2", max_output=1024)
    assert (len(result.stdout), len(result.stderr)) == (1000, 24)
    with pytest.raises(OutputLimit, match="larger than 1024 bytes; the process was ended") as error:
        await run("sh", "-c", "head -c 1000 /dev/zero; head -c 25 /dev/zero >&2", max_output=1024)
    assert (error.value.code, error.value.max_bytes) == ("OUTPUT_LIMIT", 1024)


async def test_a_command_that_never_stops_writing_is_ended(nap: str) -> None:
    with pytest.raises(OutputLimit):
        await run("sh", "-c", f"sleep {nap} & yes")
    assert alive(nap) == []


async def test_an_abort_ends_the_command_and_raises_its_reason(nap: str) -> None:
    signal, reason = AbortSignal(), Stop()
    task = asyncio.create_task(run("sh", "-c", f"sleep {nap} & wait", signal=signal))
    await started(nap)
    signal.abort(reason)
    with pytest.raises(Stop) as error:
        await task
    assert error.value is reason
    assert alive(nap) == []
    assert not signal._listeners


async def test_a_command_that_has_ended_listens_to_nothing() -> None:
    signal = AbortSignal()
    await run("true", signal=signal)
    with pytest.raises(ProcessTimeout):
        await run("sleep", "300", signal=signal, timeout=0.05)
    assert not signal._listeners


async def test_an_abort_from_another_thread(nap: str) -> None:
    signal = AbortSignal()
    task = asyncio.create_task(run("sleep", nap, signal=signal))
    await started(nap)
    thread = threading.Thread(target=signal.abort, args=(Stop(),))
    thread.start()
    with pytest.raises(Stop):
        await asyncio.wait_for(task, PATIENCE)
    thread.join()


async def test_nothing_is_started_after_an_abort(tmp_path: Path) -> None:
    signal = AbortSignal()
    signal.abort(Stop())
    with pytest.raises(Stop):
        await run("touch", tmp_path / "started", signal=signal)
    assert list(tmp_path.iterdir()) == []


async def test_an_abort_is_what_has_ended_it_whatever_is_written_then(nap: str) -> None:
    signal = AbortSignal()
    script = f"trap 'head -c 5000 /dev/zero; exit' TERM; sleep {nap} & wait"
    task = asyncio.create_task(run("sh", "-c", script, signal=signal, max_output=1024))
    await started(nap)
    signal.abort(Stop())
    with pytest.raises(Stop):
        await task


async def test_a_command_that_has_ended_is_not_aborted_any_more(nap: str, short_grace: None) -> None:
    signal = AbortSignal()
    script = f"trap '' TERM; sleep {nap} & echo $!"
    task = asyncio.create_task(run("sh", "-c", script, signal=signal))
    await until(lambda: any(child._has_ended for child in live.values()))
    signal.abort(Stop())
    assert (await task).returncode == 0


async def test_sigterm_comes_first(nap: str) -> None:
    with pytest.raises(ProcessTimeout) as error:
        await run("sh", "-c", f"trap 'echo bye; exit' TERM; sleep {nap} & wait", timeout=0.3)
    assert error.value.stdout == "bye\n"


async def test_every_member_has_sigterm_once(nap: str) -> None:
    polite = f"trap 'echo {{}}; exit' TERM; sleep {nap} & while :; do wait; done"
    inner = "sh -c '" + polite.format("inner").replace("'", '"') + "'"
    with pytest.raises(ProcessTimeout) as error:
        await run("sh", "-c", f"{inner} & {polite.format('outer')}", timeout=0.3)
    assert sorted(error.value.stdout.split()) == ["inner", "outer"]


async def test_a_member_of_the_group_is_told_with_the_group_only(
    nap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    send = signals.pidfd_send_signal

    def noted(fd: int, number: int) -> None:
        sent.append(number)
        send(fd, number)

    monkeypatch.setattr(signals, "pidfd_send_signal", noted)
    with pytest.raises(ProcessTimeout):
        await run("sh", "-c", f"sleep {nap} & sleep {nap} & setsid sleep {nap} & wait", timeout=0.3)
    # The one that has left the group has a signal of its own.
    assert sent.count(signals.SIGTERM) == 1


@pytest.mark.parametrize(
    "script",
    [
        "trap '' TERM; sleep {nap} & wait; wait",
        "(trap '' TERM; sleep {nap}) & wait",
        "trap '' TERM; setsid sleep {nap} & wait; wait",
        "trap '' TERM; exec sleep {nap}",
    ],
)
async def test_who_ignores_sigterm_is_killed(nap: str, script: str, short_grace: None) -> None:
    with pytest.raises(ProcessTimeout):
        await run("sh", "-c", script.format(nap=nap), timeout=0.2)
    assert alive(nap) == []


async def test_a_stopped_command_is_ended(nap: str, short_grace: None) -> None:
    with pytest.raises(ProcessTimeout):
        await run("sh", "-c", f"sleep {nap} & kill -STOP $$", timeout=0.2)


# ------------------------------------------------------------------------------------ what it leaves behind


@pytest.mark.parametrize(
    "script",
    [
        "sleep {nap} & exit 7",
        "(sleep {nap} & sleep {nap} &) ; exit 7",
        "(trap '' TERM; sleep {nap}) & sleep 0.05; exit 7",
        "setsid sleep {nap} & exit 7",
        "setsid sh -c '(setsid sleep {nap} &) ; sleep {nap}' & exit 7",
        "sleep {nap} >/dev/null 2>&1 & exit 7",
        "setsid sleep {nap} >/dev/null 2>&1 & exit 7",
        "i=0; while [ $i -lt 20 ]; do setsid sleep {nap} & sleep {nap} & i=$((i+1)); done; exit 7",
    ],
)
async def test_what_a_command_leaves_running_is_ended_before_its_result(
    nap: str, script: str, short_grace: None
) -> None:
    result = await run("sh", "-c", script.format(nap=nap))
    assert result.returncode == 7
    assert alive(nap) == []


async def test_who_leaves_the_group_but_not_the_session_is_found(nap: str) -> None:
    leave = f"import os; os.setpgid(0, 0); os.execve('/bin/sleep', ['sleep', '{nap}'], {{}})"
    result = await run(
        "sh", "-c", f'{sys.executable} -S -c "{leave}" & while ! pgrep -x sleep -s 0; do :; done'
    )
    assert result.returncode == 0
    assert alive(nap) == []


async def test_who_leaves_everything_but_its_parent_is_found(nap: str) -> None:
    with pytest.raises(ProcessTimeout):
        await run("sh", "-c", f"env -i setsid sleep {nap} & wait", timeout=0.3)
    assert alive(nap) == []


COMET: Final = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(2000):
        if os.fork():
            os._exit(0)
        os.setsid()
        time.sleep(0.002)
    open(sys.argv[1], "w").close()
"""


@pytest.fixture
def comet(tmp_path: Path) -> tuple[str, Path]:
    """A command of which each process starts the next one, in a session of its own, and goes."""
    (tmp_path / "comet.py").write_text(textwrap.dedent(COMET))
    return f"{sys.executable} -S {tmp_path / 'comet.py'} {tmp_path / 'end'}", tmp_path / "end"


async def test_who_never_stays_for_long_is_caught(comet: tuple[str, Path], short_grace: None) -> None:
    command, end = comet
    result = await run("sh", "-c", command)
    assert result.returncode == 0
    assert not end.exists()
    assert alive(str(end)) == []


LEAVER: Final = """
    import os, pathlib, signal, time

    def end(number, frame):
        pathlib.Path("told").touch()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    pathlib.Path("ready").touch()
    while not pathlib.Path("leave").exists():
        time.sleep(0.001)
    os.setsid()
    pathlib.Path("left").touch()
    time.sleep(300)
"""


async def test_who_leaves_the_group_just_before_its_signal_has_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = os.killpg

    def late(group: int, number: int) -> None:
        (tmp_path / "leave").touch()
        while not (tmp_path / "left").exists():
            time.sleep(0.001)
        kill(group, number)

    monkeypatch.setattr(os, "killpg", late)
    (tmp_path / "leaver.py").write_text(textwrap.dedent(LEAVER))
    script = f"{sys.executable} -S {tmp_path / 'leaver.py'} & wait"
    task = asyncio.create_task(run("sh", "-c", script, cwd=tmp_path))
    await until((tmp_path / "ready").exists)
    task.cancel()
    await asyncio.wait([task])
    assert (tmp_path / "told").exists()
    assert alive(str(tmp_path)) == []


def test_the_table_has_who_was_started_while_it_was_read(nap: str) -> None:
    looking = table.processes(0)
    next(looking)
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    sleeper = subprocess.Popen(["sleep", nap])
    pids = {seen.pid for seen in looking if seen is not None}
    sleeper.kill()
    sleeper.wait(PATIENCE)
    over.set()
    thread.join()
    assert sleeper.pid in pids
    assert thread.native_id not in pids


async def test_who_cannot_be_found_is_named_and_holds_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    nap = f"300.{os.getpid()}{next(_NUMBERS)}"
    leave = f"import os; os.fork() or (os.setsid(), os.execve('/bin/sleep', ['sleep', '{nap}'], {{}}))"
    with caplog.at_level(logging.WARNING, "frontmcp_py"):
        script = f'{sys.executable} -S -c "{leave}"; while ! pgrep -f "^sleep {nap}"; do :; done'
        result = await run("sh", "-c", script)
    (pid,) = alive(nap)
    os.kill(pid, signals.SIGKILL)
    assert result.stdout == f"{pid}\n"
    assert f"still held open by process {pid} ('sleep {nap}')" in caplog.text


async def test_who_may_not_be_ended_is_named_and_holds_up_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, number: int) -> None:
        raise PermissionError

    nap = f"300.{os.getpid()}{next(_NUMBERS)}"
    monkeypatch.setattr(signals, "pidfd_send_signal", refuse)
    result = await run("sh", "-c", f"setsid sleep {nap} & while ! pgrep -f '^sleep {nap}'; do :; done")
    (pid,) = alive(nap)
    os.kill(pid, signals.SIGKILL)
    assert result.returncode == 0
    assert f"Process {pid} ('sleep {nap}')" in caplog.text
    assert "could not be ended" in caplog.text


async def test_a_leader_that_may_not_be_ended_is_named_and_waited_for_later(
    nap: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", refuse)
        with pytest.raises(ProcessTimeout):
            await run("sleep", nap, timeout=0.2)
    (left,) = lingering
    assert alive(nap) == [left.pid]
    assert f"Process {left.pid}, 'sleep {nap}', could not be ended" in caplog.text
    os.kill(left.pid, signals.SIGKILL)
    await until(lambda: alive(nap) == [])
    await run("true")
    assert left.returncode == -signals.SIGKILL


async def test_the_mark_of_an_outer_server_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_FRONTMCP_CHILD_0123456789abcdef", "1")
    result = await run("/usr/bin/env", env={})
    names = {line.partition("=")[0] for line in result.stdout.splitlines()}
    assert len(names) == 2
    assert "_FRONTMCP_CHILD_0123456789abcdef" in names


# ------------------------------------------------------------------------------------------- cancellation


async def test_a_cancelled_task_ends_its_command_first(nap: str) -> None:
    task = asyncio.create_task(run("sh", "-c", f"sleep {nap} & setsid sleep {nap} & wait"))
    await started(nap)
    task.cancel("enough")
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await task
    assert task.cancelled()
    assert alive(nap) == []


@pytest.mark.parametrize(
    "script", ["sleep {nap} & wait", "sleep {nap} & exit 0", "setsid sleep {nap} & echo x", "true"]
)
async def test_a_task_that_is_cancelled_at_any_moment(nap: str, script: str) -> None:
    script = script.format(nap=nap)
    # In some of the first turns nothing runs yet; later on, it runs, has ended, or is being ended.
    for turns in (*range(12), 20, 40, 80, 160):
        task = asyncio.create_task(run("sh", "-c", script))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert task.cancel() != task.done()
        await asyncio.wait([task])
        assert alive(nap) == []
        assert task.cancelled() or task.result().returncode == 0
        assert live == {}


@pytest.mark.parametrize("milliseconds", range(0, 16, 2))
async def test_a_task_that_is_cancelled_while_its_command_ends(nap: str, milliseconds: int) -> None:
    task = asyncio.create_task(run("sh", "-c", f"sleep 0.003; sleep {nap} & exit 0"))
    await asyncio.sleep(milliseconds / 1000)
    task.cancel()
    await asyncio.wait([task])
    assert alive(nap) == []


async def test_who_is_impatient_still_waits_until_nothing_is_left(nap: str, short_grace: None) -> None:
    task = asyncio.create_task(run("sh", "-c", f"trap '' TERM; sleep {nap} & wait; wait"))
    await started(nap)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()
    assert alive(nap) == []


async def test_a_cancel_scope_ends_the_command(nap: str, short_grace: None) -> None:
    with anyio.move_on_after(0.2) as scope:
        await run("sh", "-c", f"trap '' TERM; sleep {nap} & wait; wait")
    assert scope.cancelled_caught
    assert alive(nap) == []
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await run("sh", "-c", f"sleep {nap} & wait")
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancel_scope_does_not_keep_the_loop_busy(
    nap: str, short_grace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float | None] = []
    pause = Child._pause

    async def counted(child: Child, seconds: float | None) -> None:
        pauses.append(seconds)
        await pause(child, seconds)

    monkeypatch.setattr(Child, "_pause", counted)
    with anyio.move_on_after(0.1):
        await run("sh", "-c", f"trap '' TERM; sleep {nap} & wait; wait")
    # A cancel scope cancels again in every turn; this is but the doubling pauses between two looks.
    assert len([seconds for seconds in pauses if seconds]) < 50


async def test_a_cancelled_task_in_a_scope_stays_cancelled(nap: str) -> None:
    async def work() -> None:
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().call_soon(scope.cancel)
            await run("sleep", nap)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_cancelled_command_says_so_whatever_else_has_happened(nap: str) -> None:
    signal = AbortSignal()
    task = asyncio.create_task(run("sleep", nap, signal=signal))
    await started(nap)
    signal.abort(Stop())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_interrupt_while_a_command_is_being_started_leaves_nothing(
    nap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)
            raise KeyboardInterrupt

    made: list[subprocess.Popen[bytes]] = []
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            await run("sleep", nap)
    for popen in made:
        assert popen.wait(PATIENCE) == -signals.SIGKILL
        for pipe in (popen.stdout, popen.stderr):
            assert pipe is not None
            pipe.close()


async def test_a_command_is_ended_without_a_file_to_spare(nap: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    task = asyncio.create_task(run("sh", "-c", f"sleep {nap} & wait"))
    await started(nap)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, files())), limits[1]))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(2))
        task.cancel()
        await asyncio.wait([task])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in taken:
            os.close(file)
    assert task.cancelled()
    await until(lambda: alive(nap) == [])


def test_the_end_of_a_loop_ends_its_commands(nap: str) -> None:
    async def main() -> None:
        task = asyncio.create_task(run("sh", "-c", f"setsid sleep {nap} & sleep {nap} & wait"))
        await started(nap)
        assert not task.done()

    asyncio.run(main())
    assert alive(nap) == []


def test_a_loop_that_is_thrown_away_kills_its_commands(nap: str) -> None:
    loop = asyncio.new_event_loop()
    coroutine = run("sh", "-c", f"setsid sleep {nap} & sleep {nap} & wait")
    task = loop.create_task(coroutine)
    loop.run_until_complete(started(nap))
    loop.close()
    coroutine.close()
    # This is a mistake, and the task would say so.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    asyncio.run(until(lambda: alive(nap) == []))
    for left in lingering:
        left.wait(PATIENCE)
    lingering.clear()


# ----------------------------------------------------------------------------------------------- kill_all


def wait_until_gone(nap: str) -> None:
    for _ in range(1000):
        if not alive(nap):
            return
        time.sleep(0.01)
    assert alive(nap) == []


async def test_kill_all_kills_every_command_at_once(nap: str) -> None:
    naps = [f"{nap}{n}" for n in range(1, 4)]
    scripts = [
        f"trap '' TERM; sleep {naps[0]} & wait; wait",
        f"setsid sleep {naps[1]} & wait",
        f"env -i setsid sleep {naps[2]} & wait",
    ]
    tasks = [asyncio.create_task(run("sh", "-c", script)) for script in scripts]
    await started(*naps)
    kill_all()
    # The loop has no turn meanwhile: what was sent has to be enough.
    wait_until_gone(nap)
    assert [result.returncode for result in await asyncio.gather(*tasks)] == [-signals.SIGKILL] * 3


async def test_kill_all_finds_what_a_command_has_left_behind(nap: str) -> None:
    task = asyncio.create_task(run("sh", "-c", f"(setsid sleep {nap} &) ; wait; exec sleep {nap}"))
    await started(nap)
    await until(lambda: sleeping(nap) == 2)
    kill_all()
    assert (await task).returncode == -signals.SIGKILL
    assert alive(nap) == []


async def test_kill_all_catches_who_never_stays_for_long(nap: str, comet: tuple[str, Path]) -> None:
    command, end = comet
    task = asyncio.create_task(run("sh", "-c", f"{command}; sleep {nap}"))
    await started(nap)
    kill_all()
    wait_until_gone(str(end))
    assert (await task).returncode == -signals.SIGKILL
    assert not end.exists()


async def test_kill_all_leaves_the_commands_of_other_processes_alone(nap: str) -> None:
    task = asyncio.create_task(run("sleep", nap))
    await started(nap)
    (child,) = live.values()
    child.owner += 1
    kill_all()
    assert len(alive(nap)) == 1
    child.owner -= 1
    task.cancel()
    await asyncio.wait([task])


def test_kill_all_without_commands_does_nothing() -> None:
    kill_all()


async def test_kill_all_in_a_signal_handler(nap: str) -> None:
    before = signals.signal(signals.SIGUSR1, lambda number, frame: kill_all())
    try:
        scripts = [f"setsid sleep {nap}{n} & sleep {nap}{n} & wait" for n in range(3)]
        tasks = [asyncio.create_task(run("sh", "-c", script)) for script in scripts]
        while not all(task.done() for task in tasks):
            # In whatever it is about to do.
            signals.raise_signal(signals.SIGUSR1)
            await asyncio.sleep(0)
    finally:
        signals.signal(signals.SIGUSR1, before)
    assert [task.result().returncode for task in tasks] == [-signals.SIGKILL] * 3


async def test_kill_all_finds_a_command_that_is_being_made(nap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            # Here comes the signal, and the command's id is not known yet.
            kill_all()

    monkeypatch.setattr(subprocess, "Popen", Slow)
    assert (await run("sleep", nap)).returncode == -signals.SIGKILL


SERVER: Final = """
    import asyncio, os, signal, sys
    from frontmcp_py import process

    def end(number, frame):
        process.kill_all()
        os._exit(7)

    async def main():
        signal.signal(signal.SIGTERM, end)
        tasks = [
            asyncio.create_task(process.run("sh", "-c", f"setsid sleep {nap} & sleep {nap} & wait"))
            for nap in sys.argv[1:]
        ]
        await asyncio.wait(tasks)

    asyncio.run(main())
"""


@pytest.mark.slow
def test_a_server_that_kills_all_in_a_signal_handler_leaves_nothing(nap: str) -> None:
    naps = [f"{nap}{n}" for n in range(1, 6)]
    server = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SERVER), *naps])
    asyncio.run(until(lambda: [sleeping(each) for each in naps] == [2] * 5))
    server.terminate()
    assert server.wait(PATIENCE) == 7
    asyncio.run(until(lambda: alive(nap) == []))


# ----------------------------------------------------------------------------------------- whose id it is


@pytest.mark.parametrize("whose", ["nobody's", "everybody's", "our own"])
async def test_no_other_group_is_ever_signalled(whose: str) -> None:
    heard: list[int] = []
    # A signal that nobody minds, should it be sent after all.
    before = signals.signal(signals.SIGWINCH, lambda number, frame: heard.append(number))
    try:
        child = Child("x", 1024)
        child.pid = {"nobody's": 0, "everybody's": 1, "our own": os.getpgrp()}[whose]
        assert child.signal_group(signals.SIGWINCH)
        child._reap()
    finally:
        signals.signal(signals.SIGWINCH, before)
    assert heard == []


async def test_a_group_whose_id_may_be_anybodys_is_not_signalled(
    nap: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "gate")
    signalled: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: signalled.append(group))
    task = asyncio.create_task(run("sh", "-c", f"sleep {nap} & read x <gate; exit 3", cwd=tmp_path))
    await started(nap)
    (child,) = live.values()
    (tmp_path / "gate").write_text("\n")
    # Somebody waits for every child of the program, and so takes this one's exit status.
    os.waitpid(child.pid, 0)
    result = await task
    assert result.returncode == 255
    assert "exit status of" in caplog.text
    assert signalled == []
    assert alive(nap) == []


async def test_a_process_that_has_got_an_old_id_is_not_signalled(nap: str) -> None:
    sleeper = subprocess.Popen(["sleep", nap])
    now = table.row(sleeper.pid)
    assert now is not None
    assert table.send(table.Process(now.pid, now.started - 1), signals.SIGKILL)
    await asyncio.sleep(0)
    assert sleeper.poll() is None
    assert table.send(now, signals.SIGKILL)
    assert sleeper.wait(PATIENCE) == -signals.SIGKILL
    assert table.send(now, signals.SIGKILL)


# ------------------------------------------------------------------------------------------- other systems


@pytest.fixture(params=["without pidfd", "without /proc", "without both"])
def poorer_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, short_grace: None) -> None:
    def unknown(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    if request.param != "without /proc":
        monkeypatch.setattr(os, "pidfd_open", unknown)
    if request.param != "without pidfd":
        monkeypatch.setattr(table, "PROC", None)


@pytest.mark.usefixtures("poorer_system")
async def test_groups_are_ended_on_poorer_systems(nap: str) -> None:
    assert (await run("sh", "-c", "cat; exit 3", input="x")).returncode == 3
    assert (await run("sh", "-c", f"sleep {nap} & exit 3")).returncode == 3
    assert alive(nap) == []
    # One that not even an open output tells of.
    assert (await run("sh", "-c", f"sleep {nap} >/dev/null 2>&1 & exit 3")).returncode == 3
    await until(lambda: alive(nap) == [])
    with pytest.raises(ProcessTimeout):
        await run("sh", "-c", f"trap '' TERM; sleep {nap} & wait; wait", timeout=0.2)
    assert alive(nap) == []
    task = asyncio.create_task(run("sleep", nap))
    await started(nap)
    task.cancel()
    await asyncio.wait([task])
    assert alive(nap) == []
    task = asyncio.create_task(run("sleep", nap))
    await started(nap)
    kill_all()
    assert (await task).returncode == -signals.SIGKILL


async def test_an_escape_on_a_system_without_a_process_table_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, short_grace: None
) -> None:
    nap = f"300.{os.getpid()}{next(_NUMBERS)}"
    monkeypatch.setattr(table, "PROC", None)
    await run("sh", "-c", f"setsid sleep {nap} & while ! pgrep -f '^sleep {nap}'; do :; done")
    (pid,) = alive(nap)
    os.kill(pid, signals.SIGKILL)
    assert "still held open by a process that cannot be found" in caplog.text


@pytest.fixture
def subreaper() -> Iterator[None]:
    """Orphans become this process's children, as those of process 1 of a container."""
    set_child_subreaper, prctl = 36, ctypes.CDLL(None).prctl
    assert prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    yield
    assert prctl(set_child_subreaper, 0, 0, 0, 0) == 0


@pytest.mark.usefixtures("subreaper")
@pytest.mark.parametrize(
    "script", ["sleep {nap} & exit", "setsid sleep {nap} & exit", "(sleep 0 &) ; sleep 0.1"]
)
async def test_orphans_are_waited_for_where_they_become_our_children(nap: str, script: str) -> None:
    before = children()
    await run("sh", "-c", script.format(nap=nap))
    assert children() <= before


# -------------------------------------------------------------------------------------------- other loops


@pytest.mark.parametrize(
    "factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_several_loops_run_commands_at_once(
    nap: str, factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main(number: int) -> None:
        signal = AbortSignal()
        result = await run("sh", "-c", f"cat; sleep {nap} & exit 3", input=f"{number}")
        assert (result.returncode, result.stdout) == (3, f"{number}")
        with pytest.raises(ProcessTimeout):
            await run("sh", "-c", f"setsid sleep {nap} & wait", timeout=0.1)
        asyncio.get_running_loop().call_later(0.05, signal.abort, Stop())
        with pytest.raises(Stop):
            await run("sleep", nap, signal=signal)
        with anyio.move_on_after(0.05) as scope:
            await run("sleep", nap)
        assert scope.cancelled_caught
        ended.append(number)

    def serve(number: int) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main(number))

    ended: list[int] = []
    threads = [threading.Thread(target=serve, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(ended) == [0, 1, 2]


# --------------------------------------------------------------------------------------------------- leaks


async def assert_nothing_leaks(rounds: int, nap: str) -> None:
    signal = AbortSignal()

    async def each(number: int) -> None:
        with contextlib.suppress(ProcessTimeout, OutputLimit):
            match number % 5:
                case 0:
                    await run("true", signal=signal)
                case 1:
                    await run("sh", "-c", f"sleep {nap} & exit 1", input="x" * 100_000)
                case 2:
                    await run("sleep", nap, timeout=0.01)
                case 3:
                    await run("yes", max_output=1024)
                case _:
                    with pytest.raises(FileNotFoundError):
                        await run("no-such-program")

    await asyncio.gather(*(each(number) for number in range(5)))
    gc.collect()
    before = (files(), threading.active_count(), children(), len(signal._listeners))
    for _ in range(rounds):
        await asyncio.gather(*(each(number) for number in range(10)))
    gc.collect()
    after = (files(), threading.active_count(), children(), len(signal._listeners))
    assert after == before
    assert alive(nap) == []


async def test_commands_leak_nothing(nap: str) -> None:
    await assert_nothing_leaks(3, nap)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_thousands_of_commands_leak_nothing(nap: str) -> None:
    await assert_nothing_leaks(100, nap)


def test_a_result_is_a_value() -> None:
    assert ProcessResult(0, "a", "", 1.0) == ProcessResult(0, "a", "", 1.0)
