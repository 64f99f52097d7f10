"""A computer as tools: look at it, run commands on it, end what should not run; and it survives a flood.

python examples/computer/server.py                  over HTTP, for clients on this machine: 127.0.0.1:8001
python examples/computer/server.py --port 9000      on another port
python examples/computer/server.py --config FILE    with limits of your own

Whoever reaches it may do whatever its user may. Read the README before anybody else than you does.
"""

import argparse
import codecs
import os
import shutil
import signal as signals
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import psutil
from pydantic import Field

from frontmcp_py import App, Call, Concurrency, FrontMCP, ToolContext, ToolError
from frontmcp_py.process import ProcessTimeout

OPERATION_BYTES = 4 * 1024**2
"""What one operation reads, writes or lets a command print, at most."""

RESULT_BYTES = 6 * 1024**2
"""What one result takes on the wire, at most; larger than an operation, as JSON escapes some characters."""

SHELLS = 8
"""How many commands run at once. Beyond it they wait, and hold up nothing else."""

FILE = Path(__file__).with_name("frontmcp.toml")
"""Limits for this machine; who has no such file has the defaults."""

MIB = 1024**2
ENTRIES = 1000
LAST_WORDS = 2000

app = App("computer")


@contextmanager
def refusals_told() -> Iterator[None]:
    """What the system refuses is the caller's to read, in production too."""
    try:
        yield
    except (OSError, ValueError, psutil.Error) as error:
        raise ToolError(str(error)) from error


def path_of(text: str) -> Path:
    return Path(text).expanduser()


# -- control: looking at the machine and ending things, answered while everything else is saturated ---------


@dataclass
class Disk:
    mounted_at: str
    size_mib: int
    used_percent: float


@dataclass
class SystemInfo:
    cpus: int
    cpu_percent: float
    load_1_5_15_minutes: tuple[float, float, float]
    memory_mib: int
    memory_available_mib: int
    swap_used_percent: float
    disks: list[Disk]
    up_seconds: int
    processes: int


@app.tool(name="system.info", priority="control", timeout=10, read_only=True)
def system_info() -> SystemInfo:
    """Tell how busy this computer is: CPU, load, memory, disks, and how long it has been up."""
    memory = psutil.virtual_memory()
    return SystemInfo(
        cpus=psutil.cpu_count() or 1,
        cpu_percent=psutil.cpu_percent(interval=0.1),
        load_1_5_15_minutes=psutil.getloadavg(),
        memory_mib=memory.total // MIB,
        memory_available_mib=memory.available // MIB,
        swap_used_percent=psutil.swap_memory().percent,
        disks=disks(),
        up_seconds=int(time.time() - psutil.boot_time()),
        processes=len(psutil.pids()),
    )


def disks() -> list[Disk]:
    found: dict[str, Disk] = {}
    for partition in psutil.disk_partitions():
        with suppress(OSError):  # not every mount is everybody's to look at
            usage = psutil.disk_usage(partition.mountpoint)
            disk = Disk(partition.mountpoint, usage.total // MIB, usage.percent)
            found.setdefault(partition.device, disk)
    return list(found.values())


@dataclass
class ProcessRow:
    pid: int
    name: str
    user: str | None
    cpu_percent: float
    memory_mib: float
    command: str


@app.tool(name="process.list", priority="control", timeout=10, read_only=True)
def process_list(
    sort_by: Literal["cpu", "memory"] = "cpu",
    top: Annotated[int, Field(ge=1, le=200, description="How many to list")] = 20,
) -> list[ProcessRow]:
    """List the processes that use the most CPU (measured just now) or the most memory."""
    began, before = time.monotonic(), measured()
    time.sleep(0.2)
    after, seconds = measured(), time.monotonic() - began

    def cpu(process: psutil.Process) -> float:
        used = after[process][0] - before.get(process, after[process])[0]
        return round(100 * used / seconds, 1)

    def memory(process: psutil.Process) -> float:
        return round(after[process][1] / MIB, 1)

    rows: list[ProcessRow] = []
    for process in sorted(after, key=cpu if sort_by == "cpu" else memory, reverse=True):
        if len(rows) == top:
            break
        with suppress(psutil.NoSuchProcess):
            told = process.as_dict(["name", "username", "cmdline"])
            command = " ".join(told["cmdline"] or [])[:200]
            rows.append(
                ProcessRow(
                    process.pid, told["name"], told["username"], cpu(process), memory(process), command
                )
            )
    return rows


def measured() -> dict[psutil.Process, tuple[float, int]]:
    """The seconds of CPU that each process has used, and the bytes of memory that it has."""
    found = {}
    for pid in psutil.pids():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(pid)
            times = process.cpu_times()
            found[process] = (times.user + times.system, process.memory_info().rss)
    return found


Signal = Literal["TERM", "KILL", "INT", "HUP", "QUIT", "STOP", "CONT", "USR1", "USR2"]


@dataclass
class Signalled:
    pid: int
    name: str
    signal: Signal


@app.tool(name="process.kill", priority="control", timeout=10, destructive=True)
def process_kill(pid: Annotated[int, Field(ge=1)], signal: Signal = "TERM") -> Signalled:
    """Send a signal to one process. Whether that has ended it is for process.list to tell."""
    with refusals_told():
        # The id of a thread is none of a process, but a signal to it would reach the thread's process.
        if not psutil.pid_exists(pid):
            raise ToolError(f"There is no process {pid}")
        if pid in untouchable():
            raise ToolError(f"Process {pid} is this server, or one that this server cannot live without")
        process = psutil.Process(pid)
        told = Signalled(pid, process.name(), signal)
        # Not os.kill: psutil makes sure that the id still means the process that was looked at.
        process.send_signal(signals.Signals[f"SIG{signal}"])
    return told


def untouchable() -> set[int]:
    me = psutil.Process()
    return {1, me.pid, *(parent.pid for parent in me.parents())}


Unit = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9:_.@\\][A-Za-z0-9:_.@\\-]*$", description="A unit of systemd, like nginx")
]


@dataclass
class Service:
    unit: str
    description: str
    loaded: str
    active: str
    detail: str
    main_pid: int | None


@app.tool(name="service.status", priority="control", timeout=30, read_only=True)
async def service_status(ctx: ToolContext, unit: Unit) -> Service:
    """Tell whether a service of systemd runs."""
    properties = "Id,Description,LoadState,ActiveState,SubState,MainPID"
    said = await systemctl(ctx, "show", f"--property={properties}", unit, timeout=20)
    told = dict(line.partition("=")[::2] for line in said.splitlines())
    pid = told.get("MainPID", "0")
    return Service(
        unit=told.get("Id", unit),
        description=told.get("Description", ""),
        loaded=told.get("LoadState", "unknown"),
        active=told.get("ActiveState", "unknown"),
        detail=told.get("SubState", "unknown"),
        main_pid=int(pid) if pid.isdigit() and pid != "0" else None,
    )


def by_unit(call: Call) -> str:
    return str(call.arguments.get("unit")).removesuffix(".service")


# One at a time for each service: a stop and a restart that overlap end nobody knows how.
@app.tool(
    name="service.control",
    priority="control",
    concurrency=Concurrency(1, partition_by=by_unit, queue_timeout=10),
    destructive=True,
    describe_limits=False,  # it would speak of groups of callers
)
async def service_control(
    ctx: ToolContext, unit: Unit, action: Literal["start", "stop", "restart"]
) -> Service:
    """Start, stop or restart a service of systemd, and tell what has become of it. One at a time each."""
    await systemctl(ctx, "--no-ask-password", action, unit, timeout=90)
    return await service_status(ctx, unit)


async def systemctl(ctx: ToolContext, *arguments: str, timeout: float) -> str:
    program = shutil.which("systemctl")
    if program is None:
        raise ToolError("There is no systemctl on this computer, so its services cannot be reached")
    with refusals_told():
        result = await ctx.run_process(program, *arguments, timeout=timeout, max_output=OPERATION_BYTES)
    if result.returncode != 0:
        said = result.stderr.strip() or f"it ended with {result.returncode} and said nothing"
        raise ToolError(f"systemctl: {said}")
    return result.stdout


# -- commands: the dearest of all calls, so few at once -----------------------------------------------------


@dataclass
class CommandResult:
    returncode: int
    stdout: str
    stderr: str
    seconds: float


@app.tool(
    name="shell.exec",
    concurrency=Concurrency(SHELLS, key="shell", queue_timeout=None),
    on_cancel="cancel",
    destructive=True,
    open_world=True,
)
async def shell_exec(
    ctx: ToolContext,
    command: Annotated[str, Field(min_length=1, description="Text for /bin/sh")],
    cwd: Annotated[str | None, Field(description="The folder to run it in")] = None,
    timeout: Annotated[float, Field(ge=0.1, le=3600, description="Seconds until it is ended")] = 60,
) -> CommandResult:
    """Run a command. An exit status other than 0 is a result, not an error.

    The command ends with the call: at its timeout, when it prints more than 4 MiB, and when the call is
    cancelled, it is ended together with everything it has started.
    """
    with refusals_told():
        try:
            result = await ctx.run_process(
                command,
                shell=True,
                cwd=None if cwd is None else path_of(cwd),
                timeout=timeout,
                max_output=OPERATION_BYTES,
            )
        except ProcessTimeout as error:
            raise ToolError(f"{error}. Its last words:\n{last_words(error)}") from error
    return CommandResult(result.returncode, result.stdout, result.stderr, round(result.duration, 3))


def last_words(error: ProcessTimeout) -> str:
    return f"{error.stdout!s}{error.stderr!s}"[-LAST_WORDS:] or "(none)"


# -- files ------------------------------------------------------------------------------------------------


@dataclass
class FileText:
    text: str
    size: int
    next_offset: int | None


@app.tool(name="file.read", timeout=30, read_only=True)
def file_read(
    path: str,
    offset: Annotated[int, Field(ge=0, description="Where to begin, in bytes")] = 0,
    limit: Annotated[int, Field(ge=4, le=OPERATION_BYTES, description="How many bytes at most")] = 65_536,
) -> FileText:
    """Read a file as UTF-8. If there is more of it, next_offset says where to go on."""
    with refusals_told(), opened(path_of(path)) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ToolError(f"{path} is not a regular file")
        file.seek(offset)
        # One byte more: the size of some files is known only when there is nothing left to read.
        read = file.read(limit + 1)
    data, is_end = read[:limit], len(read) <= limit
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final=is_end)
    # A character that the limit has cut in two comes whole with the next part.
    used = len(data) - len(decoder.getstate()[0])
    return FileText(text, max(about.st_size, offset + used), None if is_end else offset + used)


def opened(path: Path) -> BinaryIO:
    # Without O_NONBLOCK, a pipe that nobody writes to would hold up the thread for ever.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")


@dataclass
class Entry:
    name: str
    kind: Literal["file", "folder", "link", "other"]
    size: int


@dataclass
class Listing:
    entries: list[Entry]
    left_off: int


@app.tool(name="file.list", timeout=30, read_only=True)
def file_list(path: str) -> Listing:
    """List what is in a folder, by name, at most 1000 of it."""
    with refusals_told():
        paths = sorted(path_of(path).iterdir())
        entries: list[Entry] = []
        for each in paths[:ENTRIES]:
            with suppress(FileNotFoundError):  # gone since
                entries.append(entry_of(each))
    return Listing(entries, max(0, len(paths) - ENTRIES))


def entry_of(path: Path) -> Entry:
    about = path.lstat()
    kinds: Mapping[int, Literal["file", "folder", "link"]] = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "folder",
        stat.S_IFLNK: "link",
    }
    return Entry(path.name, kinds.get(stat.S_IFMT(about.st_mode), "other"), about.st_size)


@dataclass
class Written:
    path: str
    size: int


@app.tool(name="file.write", timeout=30, destructive=True, idempotent=True)
def file_write(path: str, text: str) -> Written:
    """Write a file as UTF-8, in place of what was there; nobody ever reads half of it."""
    with refusals_told():
        data = text.encode()
        if len(data) > OPERATION_BYTES:
            raise ToolError(f"The text is larger than {OPERATION_BYTES} bytes")
        target = path_of(path).resolve()
        if target.exists() and not target.is_file():
            raise ToolError(f"{path} is not a regular file")
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".write-", delete=False) as file:
            written = Path(file.name)
            try:
                file.write(data)
                file.flush()
                written.chmod(mode)
                written.replace(target)
            except BaseException:
                written.unlink()
                raise
    return Written(str(target), len(data))


# -- the server ---------------------------------------------------------------------------------------------


def computer(config: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> FrontMCP:
    """The computer.

    Admission is not mentioned here: its defaults hold, 48 calls at once, 8 of these places for control tools
    alone, 64 waiting for at most 30 seconds.

    Args:
        config: Limits for this machine; by default those of `frontmcp.toml` beside this file, if it exists.
    """
    if config is None and FILE.exists():
        config = FILE
    return FrontMCP("computer", version="1.0.0", apps=[app], config=config, max_result_bytes=RESULT_BYTES)


server = computer()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve this computer over HTTP, to this machine alone.")
    parser.add_argument("--port", type=int, default=8001, help="the port of 127.0.0.1; 0 takes a free one")
    parser.add_argument("--config", metavar="FILE", help="limits for this machine [default: frontmcp.toml]")
    options = parser.parse_args()
    chosen = server if options.config is None else computer(options.config)
    chosen.run("http", host="127.0.0.1", port=options.port)


if __name__ == "__main__":
    main()
