"""The computer survives a flood and leaves nothing behind; the commands that it is given here are harmless.

What the tests start sleeps for a number of seconds that nobody else does, by which it is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
import psutil
import pytest
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, TextContent

from examples.computer import server as example
from examples.computer.server import OPERATION_BYTES, RESULT_BYTES, computer
from frontmcp_py import Admission, FrontMCP
from frontmcp_py.testing import VirtualClock, settle, virtual_time

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

ROOT: Final = Path(__file__).parents[2]

PATIENCE: Final = 30.0
"""Seconds after which whatever a test waits for is overdue."""

CONTROL: Final = ["process.kill", "process.list", "service.control", "service.status", "system.info"]
NORMAL: Final = ["file.list", "file.read", "file.write", "shell.exec"]

_NUMBERS: Final = itertools.count()


@pytest.fixture
def nap() -> Iterator[str]:
    """For how many seconds the processes of a test sleep; none of them may be left at its end."""
    nap = f"400.{os.getpid()}{next(_NUMBERS)}"
    yield nap
    left = sleeping(nap)
    for process in left:
        process.kill()
    assert left == []


def sleeping(nap: str) -> list[psutil.Process]:
    """The processes that sleep for so long."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline() == ["sleep", nap]:
                found.append(process)
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        # Neither the guard nor the system tells when something changes.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Gate:
    """Where commands wait until they are let go, one by one."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        # Open at both ends: nobody has to be there when it is written to, and what is written stays.
        self._fd = os.open(path, os.O_RDWR)
        self.command: str = f"read -r _ <> {path}"

    def let_go(self, how_many: int = 1) -> None:
        os.write(self._fd, b"\n" * how_many)

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


class Systemctl:
    """Stands in front of the system's own: it knows two services, and starts and stops nothing."""

    SCRIPT = """#!/bin/sh
echo "$@" >> {folder}/asked
case "$*" in
    show*nginx*) printf 'Id=nginx.service\\nDescription=A = web server\\nLoadState=loaded\\n'
                 printf 'ActiveState=active\\nSubState=running\\nMainPID=17\\n' ;;
    show*) printf 'Id=%s.service\\nLoadState=not-found\\n' "$3"
           printf 'ActiveState=inactive\\nSubState=dead\\nMainPID=0\\n' ;;
    *slow*) read -r _ <> {folder}/gate ;;
    *nginx*) ;;
    *) echo "Failed: unit not found." >&2; exit 5 ;;
esac
"""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "systemctl"
        program.write_text(self.SCRIPT.format(folder=folder))
        program.chmod(0o755)

    def asked(self) -> list[str]:
        log = self.folder / "asked"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemctl:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return Systemctl(tmp_path)


@asynccontextmanager
async def opened(config: Any = None) -> AsyncIterator[tuple[FrontMCP, Client]]:
    """A computer without limits from elsewhere, and a client in this process."""
    desk = computer({} if config is None else config)
    async with desk.connect() as client:
        yield desk, client
        await until(lambda: desk.guard.statistics().active == 0)
    end = desk.guard.statistics()
    assert (end.active, end.waiting, end.places) == (0, 0, 0)


def start(client: Client, tool: str, **arguments: Any) -> asyncio.Task[CallToolResult]:
    return asyncio.create_task(client.call_tool(tool, arguments))


def code(result: CallToolResult) -> str:
    return str((result.meta or {}).get("code", "failed")) if result.is_error else "ok"


def text(result: CallToolResult) -> str:
    assert isinstance(result.content[0], TextContent)
    return result.content[0].text


def data(result: CallToolResult) -> Any:
    assert not result.is_error, text(result)
    assert result.structured_content is not None
    return result.structured_content.get("result", result.structured_content)


async def refusal(client: Client, tool: str, **arguments: Any) -> str:
    """What the caller reads of a call that fails."""
    result = await client.call_tool(tool, arguments)
    assert code(result) == "failed", result
    return text(result).removeprefix(f"Error executing tool {tool}: ")


async def control_is_answered(client: Client, pid: int) -> None:
    """Call every control tool, one after another; `pid` is a process that a SIGCONT does no harm to."""
    calls: dict[str, dict[str, Any]] = {
        "system.info": {},
        "process.list": {"top": 1},
        "process.kill": {"pid": pid, "signal": "CONT"},
        "service.status": {"unit": "nginx"},
        "service.control": {"unit": "nginx", "action": "restart"},
    }
    assert sorted(calls) == CONTROL
    for tool, arguments in calls.items():
        result = await client.call_tool(tool, arguments)
        assert code(result) == "ok", text(result)


@contextmanager
def sleeper(nap: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", nap]) as process:
        try:
            yield process
        finally:
            process.kill()


def holding(desk: FrontMCP, *, priority: Any = "normal") -> asyncio.Event:
    """Give a computer a tool `PRIORITY.hold`, whose calls last until the event is set."""
    is_over = asyncio.Event()

    @desk.tool(name=f"{priority}.hold", priority=priority)
    async def hold() -> str:
        await is_over.wait()
        return "held"

    return is_over


# ------------------------------------------------------------------------------------------------- a flood


async def test_while_all_shells_are_taken_the_next_waits_and_everything_else_is_answered(
    gate: Gate, systemctl: Systemctl, nap: str, tmp_path: Path
) -> None:
    (tmp_path / "note").write_text("hello")
    async with opened() as (desk, client):
        shells = [start(client, "shell.exec", command=gate.command) for _ in range(9)]
        await until(lambda: desk.guard.statistics().waiting == 1)
        assert desk.guard.statistics().keys["shell"].active == 8

        read = await client.call_tool("file.read", {"path": str(tmp_path / "note")})
        assert data(read)["text"] == "hello"
        with sleeper(nap) as process:
            await control_is_answered(client, process.pid)

        now = desk.guard.statistics()
        assert (now.keys["shell"].active, now.waiting) == (8, 1)
        gate.let_go(9)
        assert {code(each) for each in await asyncio.gather(*shells)} == {"ok"}
        assert desk.guard.statistics().keys["shell"].peak == 8


async def test_a_command_that_ends_makes_room_for_the_one_that_waits(gate: Gate) -> None:
    async with opened() as (desk, client):
        first = [start(client, "shell.exec", command=gate.command) for _ in range(8)]
        await until(lambda: desk.guard.statistics().keys["shell"].active == 8)
        ninth = start(client, "shell.exec", command="echo ninth")
        await until(lambda: desk.guard.statistics().waiting == 1)
        gate.let_go()
        assert data(await ninth)["stdout"] == "ninth\n"
        assert sum(each.done() for each in first) == 1
        gate.let_go(7)
        await asyncio.gather(*first)


async def test_a_full_queue_is_answered_with_overloaded_at_once_and_control_calls_pass_it(
    systemctl: Systemctl, nap: str
) -> None:
    desk = computer({})
    is_over = holding(desk)
    async with desk.connect() as client:
        running = [start(client, "normal.hold") for _ in range(40)]
        await until(lambda: desk.guard.statistics().active == 40)
        waiting = [start(client, "normal.hold")]
        await until(lambda: desk.guard.statistics().waiting == 1)
        assert desk.guard.statistics().active == 40

        # For 63 of these there is room in the queue.
        more = [start(client, "normal.hold") for _ in range(64)]
        done, still = await asyncio.wait(more, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        [refused] = done
        waiting += still
        assert code(refused.result()) == "OVERLOADED"
        assert text(refused.result()).startswith("Server overloaded: 40 calls running, 64 waiting.")
        assert desk.guard.statistics().waiting == 64
        # A tool that needs no shell and no gate has to wait as well: it is the process that is full.
        assert code(await client.call_tool("file.list", {"path": "/"})) == "OVERLOADED"

        assert desk.guard.health().status == "overloaded"
        with sleeper(nap) as process:
            await control_is_answered(client, process.pid)
        is_over.set()
        answers = await asyncio.gather(*running, *waiting)
        assert Counter(map(code, answers)) == {"ok": 104}
        assert desk.guard.health().status == "ready"
    assert desk.guard.statistics().peak_active == 41


@virtual_time
async def test_normal_calls_have_40_places_control_calls_48_and_nobody_waits_longer_than_30_seconds() -> None:
    desk = computer({})
    desk.guard.use_clock(VirtualClock())
    normal, control = holding(desk), holding(desk, priority="control")
    async with desk.connect() as client:
        running = [start(client, "normal.hold") for _ in range(40)]
        await settle()
        late = start(client, "normal.hold")
        running += [start(client, "control.hold") for _ in range(8)]
        await settle()
        assert (desk.guard.statistics().active, desk.guard.statistics().waiting) == (48, 1)
        more = start(client, "control.hold")
        await settle()
        assert (desk.guard.statistics().active, desk.guard.statistics().waiting) == (48, 2)

        assert code(await late) == "OVERLOADED"
        assert asyncio.get_running_loop().time() == 30
        assert code(await more) == "OVERLOADED"
        normal.set()
        control.set()
        assert {code(each) for each in await asyncio.gather(*running)} == {"ok"}


async def test_a_command_that_is_cancelled_while_it_waits_never_runs(gate: Gate, tmp_path: Path) -> None:
    async with opened() as (desk, client):
        shells = [start(client, "shell.exec", command=gate.command) for _ in range(8)]
        await until(lambda: desk.guard.statistics().active == 8)
        ninth = start(client, "shell.exec", command=f"touch {tmp_path / 'ran'}")
        await until(lambda: desk.guard.statistics().waiting == 1)
        ninth.cancel()
        await until(lambda: desk.guard.statistics().waiting == 0)
        gate.let_go(8)
        await asyncio.gather(*shells)
        assert desk.guard.statistics().counts.cancelled_waiting == 1
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------------------------------- limits of a machine


async def test_without_a_file_the_defaults_hold() -> None:
    async with opened() as (desk, client):
        admission = Admission(max_active=48, reserved=8, max_queued=64, queue_timeout=30)
        assert desk.guard.health().admission == admission
        assert desk.guard.statistics().keys["shell"].limit == 8
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert sorted(tools) == sorted(CONTROL + NORMAL)
    in_force = desk.mcp.in_force
    assert [name for name in sorted(tools) if in_force[name].priority.value == "control"] == CONTROL
    assert "at most 8 at a time" in (tools["shell.exec"].description or "")
    assert in_force["shell.exec"].on_cancel.value == "cancel"


async def test_the_file_of_the_machine_changes_admission_and_the_number_of_shells(
    tmp_path: Path, gate: Gate
) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(
        "[concurrency]\nmax_active = 4\nreserved = 2\nmax_queued = 1\n[concurrency.keys]\nshell = 1\n"
    )
    async with opened(file) as (desk, client):
        first = start(client, "shell.exec", command=gate.command)
        await until(lambda: desk.guard.statistics().active == 1)
        second = start(client, "shell.exec", command="true")
        await until(lambda: desk.guard.statistics().waiting == 1)
        assert code(await client.call_tool("shell.exec", {"command": "true"})) == "OVERLOADED"
        gate.let_go()
        assert {code(each) for each in await asyncio.gather(first, second)} == {"ok"}
        assert desk.guard.statistics().keys["shell"].peak == 1


def test_a_file_beside_the_server_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(example.__file__).with_name("frontmcp.toml") == example.FILE
    file = tmp_path / "frontmcp.toml"
    monkeypatch.setattr(example, "FILE", file)
    file.write_text("[concurrency]\nmax_active = 20\n")
    assert computer().guard.health().admission == Admission(max_active=20)


# ----------------------------------------------------------------------------- commands leave nothing behind


async def test_an_exit_status_is_a_result(tmp_path: Path) -> None:
    async with opened() as (_, client):
        command = "pwd; echo oops >&2; exit 3"
        told = data(await client.call_tool("shell.exec", {"command": command, "cwd": str(tmp_path)}))
        assert (told["returncode"], told["stdout"], told["stderr"]) == (3, f"{tmp_path}\n", "oops\n")
        assert "No such file" in await refusal(client, "shell.exec", command="true", cwd=str(tmp_path / "no"))


async def test_cancelling_a_call_ends_its_command_and_all_that_this_has_started(nap: str) -> None:
    async with opened() as (desk, client):
        call = start(client, "shell.exec", command=f"trap '' TERM; sleep {nap} & sleep {nap} & sleep {nap}")
        await until(lambda: len(sleeping(nap)) == 3)
        call.cancel()
        await until(lambda: desk.guard.statistics().active == 0)
        assert sleeping(nap) == []
        assert desk.guard.statistics().counts.cancelled == 1


async def test_a_command_that_takes_too_long_is_ended_and_its_last_words_are_told(nap: str) -> None:
    async with opened() as (desk, client):
        command = f"sleep {nap} & echo half done; echo alas >&2; sleep {nap}"
        said = await refusal(client, "shell.exec", command=command, timeout=1)
        assert sleeping(nap) == []
        assert desk.guard.statistics().active == 0
    assert "took longer than 1 s and was ended" in said
    assert said.endswith("Its last words:\nhalf done\nalas\n")


async def test_a_command_that_prints_too_much_is_ended(nap: str) -> None:
    async with opened() as (desk, client):
        result = await client.call_tool("shell.exec", {"command": f"sleep {nap} & exec cat /dev/zero"})
        assert sleeping(nap) == []
        assert desk.guard.statistics().active == 0
    assert code(result) == "OUTPUT_LIMIT"
    assert "4194304 bytes; the process was ended" in text(result)


async def test_what_an_operation_may_print_fits_into_a_result_and_five_mebibytes_do_not() -> None:
    async with opened() as (_, client):
        command = "head -c {} /dev/zero | tr '\\0' x"
        full = await client.call_tool("shell.exec", {"command": command.format(OPERATION_BYTES)})
        assert data(full)["stdout"] == "x" * OPERATION_BYTES
        assert len(full.model_dump_json(by_alias=True, exclude_none=True)) <= RESULT_BYTES
        assert text(full).endswith("(shortened: the whole result is in the structured content)")

        result = await client.call_tool("shell.exec", {"command": command.format(5 * 1024**2)})
    assert code(result) == "OUTPUT_LIMIT"
    assert "4194304 bytes" in text(result)


async def test_a_result_of_more_than_six_mebibytes_is_refused_and_says_that_the_command_has_run(
    tmp_path: Path,
) -> None:
    async with opened() as (_, client):
        # In JSON each of these bytes takes six.
        command = "head -c 1200000 /dev/zero; touch ran"
        result = await client.call_tool("shell.exec", {"command": command, "cwd": str(tmp_path)})
    assert code(result) == "OUTPUT_LIMIT"
    assert text(result) == 'Result of "shell.exec" is larger than 6291456 bytes; the tool has run.'
    assert (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------------------- the machine


async def test_the_server_its_parents_and_its_threads_cannot_be_killed() -> None:
    never = threading.Event()
    thread = threading.Thread(target=never.wait)
    thread.start()
    try:
        async with opened() as (_, client):
            for pid in (1, os.getpid(), os.getppid(), *(each.pid for each in psutil.Process().parents())):
                said = await refusal(client, "process.kill", pid=pid, signal="CONT")
                assert said == f"Process {pid} is this server, or one that this server cannot live without"
            assert thread.native_id is not None
            for pid in (thread.native_id, 2**31 - 1):
                said = await refusal(client, "process.kill", pid=pid, signal="CONT")
                assert said == f"There is no process {pid}"
            assert "greater than or equal to 1" in await refusal(client, "process.kill", pid=-1)
    finally:
        never.set()
        thread.join()


async def test_process_1_cannot_be_killed_even_where_it_is_no_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    # So it is for a server that somebody has started inside a container from outside.
    monkeypatch.setattr(psutil.Process, "parents", lambda _: [])
    async with opened() as (_, client):
        said = await refusal(client, "process.kill", pid=1, signal="CONT")
        assert said == "Process 1 is this server, or one that this server cannot live without"


async def test_another_process_is_sent_the_signal_that_was_named(nap: str) -> None:
    async with opened() as (_, client):
        with sleeper(nap) as process:
            told = data(await client.call_tool("process.kill", {"pid": process.pid, "signal": "INT"}))
            assert told == {"pid": process.pid, "name": "sleep", "signal": "INT"}
            assert await asyncio.to_thread(process.wait, PATIENCE) == -signal.SIGINT


async def test_processes_are_listed_by_what_they_use() -> None:
    async with opened() as (_, client):
        largest = data(await client.call_tool("process.list", {"sort_by": "memory", "top": 5}))
        busiest = data(await client.call_tool("process.list", {"top": 200}))
    memory = [row["memory_mib"] for row in largest]
    assert memory == sorted(memory, reverse=True)
    assert 1 <= len(memory) <= 5
    cpu = [row["cpu_percent"] for row in busiest]
    assert cpu == sorted(cpu, reverse=True)
    if len(busiest) < 200:
        [me] = [row for row in busiest if row["pid"] == os.getpid()]
        assert me["name"] == psutil.Process().name()
        assert me["memory_mib"] > 1


async def test_the_system_is_described() -> None:
    async with opened() as (_, client):
        told = data(await client.call_tool("system.info", {}))
    assert told["cpus"] == psutil.cpu_count()
    assert told["memory_mib"] == psutil.virtual_memory().total // 1024**2
    assert told["up_seconds"] > 0
    assert len(told["load_1_5_15_minutes"]) == 3
    assert all(0 <= disk["used_percent"] <= 100 for disk in told["disks"])


async def test_services_are_looked_at(systemctl: Systemctl) -> None:
    async with opened() as (_, client):
        told = data(await client.call_tool("service.status", {"unit": "nginx"}))
        assert told == {
            "unit": "nginx.service",
            "description": "A = web server",
            "loaded": "loaded",
            "active": "active",
            "detail": "running",
            "main_pid": 17,
        }
        told = data(await client.call_tool("service.status", {"unit": "nothing"}))
        assert (told["unit"], told["loaded"], told["main_pid"]) == ("nothing.service", "not-found", None)


async def test_services_are_started_and_stopped_and_what_systemctl_refuses_is_told(
    systemctl: Systemctl,
) -> None:
    async with opened() as (_, client):
        for action in ("start", "stop", "restart"):
            result = await client.call_tool("service.control", {"unit": "nginx", "action": action})
            assert data(result)["active"] == "active"
        said = await refusal(client, "service.control", unit="ssh", action="stop")
        assert said == "systemctl: Failed: unit not found."
        asked = [line for line in systemctl.asked() if not line.startswith("show")]
        assert asked == [
            "--no-ask-password start nginx",
            "--no-ask-password stop nginx",
            "--no-ask-password restart nginx",
            "--no-ask-password stop ssh",
        ]
        for bad in ("--now", "a;b", "a b", ""):
            await refusal(client, "service.control", unit=bad, action="stop")
            await refusal(client, "service.status", unit=bad)
        await refusal(client, "service.control", unit="nginx", action="mask")
        assert [line for line in systemctl.asked() if not line.startswith("show")] == asked


async def test_two_changes_of_one_service_do_not_overlap(systemctl: Systemctl, gate: Gate) -> None:
    async with opened() as (desk, client):
        first = start(client, "service.control", unit="slow", action="restart")
        await until(lambda: "--no-ask-password restart slow" in systemctl.asked())
        second = start(client, "service.control", unit="slow.service", action="stop")
        await until(lambda: desk.guard.statistics().waiting == 1)
        other = await client.call_tool("service.control", {"unit": "nginx", "action": "start"})
        assert code(other) == "ok"
        assert "--no-ask-password stop slow.service" not in systemctl.asked()
        gate.let_go(2)
        assert {code(each) for each in await asyncio.gather(first, second)} == {"ok"}


async def test_a_computer_without_systemctl_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    async with opened() as (_, client):
        said = "There is no systemctl on this computer, so its services cannot be reached"
        assert await refusal(client, "service.status", unit="nginx") == said
        assert await refusal(client, "service.control", unit="nginx", action="stop") == said


# --------------------------------------------------------------------------------------------------- files


async def test_a_file_is_read_in_parts_and_no_character_is_cut_in_two(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("abcä€😀" * 10, encoding="utf-8")
    size, parts, offset = file.stat().st_size, [], 0
    async with opened() as (_, client):
        while offset is not None:
            arguments = {"path": str(file), "offset": offset, "limit": 5}
            part = data(await client.call_tool("file.read", arguments))
            assert part["size"] == size
            parts.append(part["text"])
            offset = part["next_offset"]
    assert "".join(parts) == "abcä€😀" * 10
    assert len(parts) > 2


async def test_files_that_are_none_are_refused_before_they_hold_anything_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    async with opened() as (_, client):
        pipe = str(tmp_path / "pipe")
        assert await refusal(client, "file.read", path=pipe) == f"{pipe} is not a regular file"
        assert await refusal(client, "file.write", path=pipe, text="") == f"{pipe} is not a regular file"
        assert "Is a directory" in await refusal(client, "file.read", path=str(tmp_path))
        assert "No such file" in await refusal(client, "file.read", path=str(tmp_path / "nothing"))
        status = data(await client.call_tool("file.read", {"path": "/proc/self/status"}))
        assert status["text"].startswith("Name:")
        assert status["next_offset"] is None


async def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    file, link = tmp_path / "script", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o750)
    link.symlink_to(file)
    with file.open() as reader:
        async with opened() as (_, client):
            for path, text_ in ((link, "new ä"), (tmp_path / "fresh", "")):
                told = data(await client.call_tool("file.write", {"path": str(path), "text": text_}))
                assert told == {"path": str(path.resolve()), "size": len(text_.encode())}
            entries = data(await client.call_tool("file.list", {"path": str(tmp_path)}))
            assert "Is a directory" in await refusal(client, "file.read", path=str(tmp_path))
            said = await refusal(client, "file.write", path=str(file), text="x" * (OPERATION_BYTES + 1))
            assert said == "The text is larger than 4194304 bytes"
        assert reader.read() == "old"
    assert (file.read_text(), file.stat().st_mode & 0o777, link.is_symlink()) == ("new ä", 0o750, True)
    assert entries["left_off"] == 0
    assert [(each["name"], each["kind"]) for each in entries["entries"]] == [
        ("fresh", "file"),
        ("link", "link"),
        ("script", "file"),
    ]


async def test_a_list_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "ENTRIES", 2)
    for name in "cab":
        (tmp_path / name).mkdir()
    async with opened() as (_, client):
        told = data(await client.call_tool("file.list", {"path": str(tmp_path)}))
    assert ([each["name"] for each in told["entries"]], told["left_off"]) == (["a", "b"], 1)


async def test_what_the_system_refuses_is_told_in_production_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRONTMCP_ENV", "production")
    async with opened() as (_, client):
        said = await refusal(client, "file.list", path="/nowhere")
        assert said == "[Errno 2] No such file or directory: '/nowhere'"
        assert await refusal(client, "shell.exec", command="true", cwd="/nowhere") == said


# ------------------------------------------------------------------------------------ as a process, over HTTP


@asynccontextmanager
async def serving(*command: str, **more: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The server as a process, and where it listens."""
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("FRONTMCP_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        cwd=ROOT,
        env={**surroundings, "PYTHONPATH": str(ROOT), **more},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE):
            said = ""
            while not (found := re.search(r"Listening on (127\.0\.0\.1) port (\d+)", said)):
                line = await process.stderr.readline()
                assert line, said
                said += line.decode()
            reading = asyncio.create_task(process.stderr.read())
        yield process, f"http://{found[1]}:{found[2]}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    await reading


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[httpx2.AsyncClient, Client]]:
    async with (
        httpx2.AsyncClient(trust_env=False, timeout=PATIENCE) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client,
    ):
        yield http, client


async def metrics(http: httpx2.AsyncClient, url: str) -> dict[str, Any]:
    told: dict[str, Any] = (await http.get(f"{url}/metrics")).json()
    return told


async def until_it_has(http: httpx2.AsyncClient, url: str, **numbers: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while not numbers.items() <= (await metrics(http, url)).items():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["examples/computer/server.py", "--port", "0"],
        ["-m", "examples.computer.server", "--port", "0"],
        ["-m", "frontmcp_py.cli", "run", "examples/computer/server.py", "--http", "--port", "0"],
    ],
    ids=["script", "module", "frontmcp run"],
)
async def test_over_http_commands_end_with_their_client_and_with_the_server(
    command: list[str], nap: str
) -> None:
    async with serving(*command) as (process, url), connected(url) as (http, client):
        call = start(client, "shell.exec", command=f"sleep {nap} & sleep {nap}")
        await until(lambda: len(sleeping(nap)) == 2)
        assert code(await client.call_tool("system.info", {})) == "ok"
        call.cancel()
        await until_it_has(http, url, active=0)
        assert sleeping(nap) == []
        limits = (await metrics(http, url))["limits"]
        wanted = {"max_active": 48, "reserved": 8, "max_queued": 64, "queue_timeout_s": 30}
        assert {name: limits[name] for name in wanted} == wanted

        start(client, "shell.exec", command=f"trap '' TERM; sleep {nap} & sleep {nap}; sleep {nap}")
        await until(lambda: len(sleeping(nap)) == 2)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == -signal.SIGTERM
        assert sleeping(nap) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--config", pytest.param("FRONTMCP_CONFIG", marks=pytest.mark.slow)])
async def test_over_http_the_file_that_is_named_holds(how: str, tmp_path: Path, gate: Gate) -> None:
    file = tmp_path / "limits.toml"
    file.write_text("[concurrency]\nmax_active = 2\nreserved = 1\nmax_queued = 1\n")
    words = ["--config", str(file)] if how == "--config" else []
    named = {} if how == "--config" else {"FRONTMCP_CONFIG": str(file)}
    async with (
        serving("examples/computer/server.py", "--port", "0", *words, **named) as (_, url),
        connected(url) as (http, client),
    ):
        first = start(client, "shell.exec", command=gate.command)
        await until_it_has(http, url, active=1)
        second = start(client, "file.list", path=str(tmp_path))
        await until_it_has(http, url, queued=1)

        assert (await http.get(f"{url}/healthz")).json() == {"ok": True, "service": "computer"}
        assert (await http.get(f"{url}/readyz")).status_code == 503
        refused = await client.call_tool("file.list", {"path": str(tmp_path)})
        assert code(refused) == "OVERLOADED"
        assert code(await client.call_tool("system.info", {})) == "ok"
        gate.let_go()
        assert {code(each) for each in await asyncio.gather(first, second)} == {"ok"}
        ready = await http.get(f"{url}/readyz")
        assert (ready.status_code, json.loads(ready.text)["status"]) == (200, "ready")
