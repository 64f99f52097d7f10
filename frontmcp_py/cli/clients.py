"""The clients of a flood, in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

from frontmcp_py.cli.calls import ToolCall
from frontmcp_py.cli.flood import Record
from frontmcp_py.cli.here import Place
from frontmcp_py.cli.output import Failure

# Clients of one process; more of them would wait for each other instead of for the server.
_CLIENTS_PER_PROCESS: Final = 100
_LONGEST_LINE: Final = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Load:
    """How much, of what, and for how long.

    Attributes:
        connections: Clients that call at once.
        seconds: How long each calls again and again.
        patience: Seconds after which a call without an answer is lost.
        calls: What is called, as it was written; empty for what may be called unasked.
        control: What is called as control tools, likewise.
        headers: Sent with every request.
    """

    connections: int
    seconds: float
    patience: float
    calls: tuple[str, ...]
    control: tuple[str, ...]
    headers: Mapping[str, str]


class Clients:
    """The processes that the clients live in."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self._processes = processes
        self._codes: list[Mapping[str, int]] = [{} for _ in processes]

    async def connect(self) -> tuple[int, str]:
        """Wait until every client is connected or cannot be; how many could not, and why."""
        answers = await asyncio.gather(*(_line(each) for each in self._processes))
        problems = [problem for answer in answers for problem in answer["problems"]]
        return sum(answer["unconnected"] for answer in answers), problems[0] if problems else ""

    async def run(self, tell: Callable[[str], None]) -> list[Record]:
        """Let them go, and collect what became of every call."""
        for each in self._processes:
            _stdin(each).write(b"go\n")
        records = await asyncio.gather(*(self._collect(nth, tell) for nth in range(len(self._processes))))
        return [record for each in records for record in each]

    async def _collect(self, nth: int, tell: Callable[[str], None]) -> list[Record]:
        while True:
            said = await _line(self._processes[nth])
            if "records" in said:
                return [Record(*record) for record in said["records"]]
            self._codes[nth] = said["codes"]
            counts = sum((Counter(each) for each in self._codes), Counter[str]())
            tell(", ".join(f"{count} {code}" for code, count in counts.most_common(3)))


@asynccontextmanager
async def clients(place: Place, load: Load, calls: Sequence[ToolCall]) -> AsyncGenerator[Clients]:
    """Processes for the clients: as many as are of use, and none is left behind."""
    number = min(-(-load.connections // _CLIENTS_PER_PROCESS), os.cpu_count() or 1)
    shares = [load.connections // number + (nth < load.connections % number) for nth in range(number)]
    processes: list[asyncio.subprocess.Process] = []
    try:
        for nth, share in enumerate(shares):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "frontmcp_py.cli.flood"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_LINE,
                start_new_session=True,
            )
            processes.append(process)
            order = {
                "url": place.mcp,
                "headers": dict(load.headers),
                "connections": share,
                "first": sum(shares[:nth]),
                "seconds": load.seconds,
                "patience": load.patience,
                "calls": [(each.tool, dict(each.arguments)) for each in calls],
            }
            _stdin(process).write(f"{json.dumps(order)}\n".encode())
        yield Clients(processes)
    finally:
        for process in processes:
            kill(process)
            await process.wait()


def kill(process: asyncio.subprocess.Process) -> None:
    """End a process at once, if it has not ended.

    Its own `kill` looks first whether it has, and takes the exit status of one that just has from asyncio's
    watcher, which then warns of an unknown child.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _stdin(process: asyncio.subprocess.Process) -> asyncio.StreamWriter:
    if process.stdin is None:
        raise RuntimeError("the process has no stdin")
    return process.stdin


async def _line(process: asyncio.subprocess.Process) -> dict[str, Any]:
    if process.stdout is None:
        raise RuntimeError("the process has no stdout")
    line = await process.stdout.readline()
    if not line:
        raise Failure("a process of clients has ended unexpectedly")
    return cast("dict[str, Any]", json.loads(line))
