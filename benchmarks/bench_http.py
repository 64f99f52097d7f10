"""A flood over HTTP, and what it does to control calls.

Three processes share the cores: the server, one that floods it, and this one, which makes the control calls.
Whoever is answered, or refused, calls again at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from benchmarks.http_load import Callers
from benchmarks.measure import Ratio, record, run_once

SHORT: Final = "BENCHMARKS_SHORT" in os.environ
"""Whether this is only to show that it works."""

FLOODED: Final = 200
"""Connections of a flood."""

FLOODS: Final = 1 if SHORT else 3
FLOOD_S: Final = 2.0 if SHORT else 10.0
UNLOADED_S: Final = 1.0 if SHORT else 5.0
"""Seconds in which nobody but the control callers calls, before and after each flood."""

LOADS: Final = (0, 10, 25, 50, 100, FLOODED)
"""Connections, for the growth of what a control call takes."""

ROUNDS: Final = 1 if SHORT else 5
ROUND_S: Final = 0.5 if SHORT else 2.0
"""Seconds of each load in each round."""

FREE_CORES: Final = max(1, (os.cpu_count() or 1) - 1)
"""Cores that the server's process leaves."""

START_S: Final = 30.0
"""Seconds after which a server that does not listen, or says nothing, is broken."""

ROOT: Final = Path(__file__).parent.parent

pytestmark = pytest.mark.timeout(600)


@dataclass
class Server:
    """A server in a process of its own, and another process to flood it.

    Attributes:
        port: Where it listens, on loopback.
        process: Its process.
        load: The process that floods it.
        outcomes: How all calls so far were answered, as the callers saw it.
    """

    port: int
    process: psutil.Process
    load: asyncio.subprocess.Process
    outcomes: Counter[str] = field(default_factory=Counter)

    @contextlib.asynccontextmanager
    async def flooded(self, connections: int) -> AsyncIterator[Counter[str]]:
        """Flood it; what is given is filled at the end, and says how these calls were answered."""
        outcomes = Counter[str]()
        if connections:
            await self._order(f"start {connections}")
        yield outcomes
        if connections:
            outcomes.update(await self._order("stop"))
            self.outcomes.update(outcomes)

    async def control_calls(self, seconds: float, callers: int = 1) -> list[float]:
        """How long control calls took, in seconds, of so many callers for so long."""
        look = Callers(self.port, "look")
        await look.start(callers)
        gc.collect()
        gc.disable()
        try:
            await asyncio.sleep(seconds)
        finally:
            gc.enable()
        await look.stop()
        self.outcomes.update(look.outcomes)
        return look.seconds

    def counters(self) -> Any:
        """What the server itself has counted."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=START_S) as answer:
            return json.load(answer)["counters"]

    def assert_nothing_is_forgotten(self) -> None:
        """The server has counted what its callers have; of a lost call, nobody knows how far it came."""
        if not self.outcomes["lost"]:
            counters = self.counters()
            seen = Counter(ok=counters["completed"], **counters["rejected"])
            assert (counters["submitted"], +seen) == (self.outcomes.total(), self.outcomes)

    async def _order(self, order: str) -> Any:
        assert self.load.stdin is not None
        assert self.load.stdout is not None
        self.load.stdin.write(f"{order}\n".encode())
        return json.loads(await self.load.stdout.readline())


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    """A server, until the end."""
    async with contextlib.AsyncExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        with log.open("w") as file:
            process = await started(stack, "benchmarks.http_server", stdout=file, stderr=file)
        port = await asyncio.wait_for(listening(log), START_S)
        load = await started(stack, "benchmarks.http_load", str(port), stdin=-1, stdout=-1)
        yield Server(port, psutil.Process(process.pid), load)


async def started(
    stack: contextlib.AsyncExitStack, module: str, *arguments: str, **streams: Any
) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, cwd=ROOT, **streams
    )

    async def end() -> None:
        if process.returncode is None:
            process.kill()
        await process.wait()

    stack.push_async_callback(end)
    return process


async def listening(log: Path) -> int:
    """The port that a server says it listens on."""
    async for _ in ticks(0.05):
        said = await asyncio.to_thread(log.read_text)
        if "startup complete" in said:
            [port] = re.findall(r"Listening on \S+ port (\d+)", said)
            return int(port)
    raise AssertionError


async def ticks(seconds: float) -> AsyncIterator[None]:
    """So often, for ever."""
    for _ in itertools.count():
        yield
        await asyncio.sleep(seconds)


def percentile(taken: list[float], percent: int) -> float:
    """The value, in milliseconds, that so many of a hundred do not exceed."""
    return sorted(taken)[-(-len(taken) * percent // 100) - 1] * 1000


class Floods:
    """Floods of one server, one after the other, and what they did to it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._outcomes = Counter[str]()
        self._control: list[float] = []
        self._seconds = self._cpu_s = 0.0
        self._rss = self._peak = server.process.memory_info().rss

    async def flood(self, seconds: float) -> list[float]:
        """One more; how long control calls took in it."""
        async with self._server.flooded(FLOODED) as outcomes:
            sampling = asyncio.create_task(self._sample())
            began, cpu = time.perf_counter(), self._cpu()
            taken = await self._server.control_calls(seconds)
            self._seconds += time.perf_counter() - began
            self._cpu_s += self._cpu() - cpu
            sampling.cancel()
        self._outcomes += outcomes
        self._control += taken
        return taken

    def figures(self) -> dict[str, Any]:
        """What the page tells about them."""
        return {
            "outcomes": dict(self._outcomes),
            "lost": self._outcomes["lost"],
            "control_calls": len(self._control),
            "control_p50_ms": percentile(self._control, 50),
            "control_p99_ms": percentile(self._control, 99),
            "server_cores_busy": self._cpu_s / self._seconds,
            "memory_growth_mb": (self._peak - self._rss) / 1e6,
            "served_by": served_by(),
        }

    def _cpu(self) -> float:
        times = self._server.process.cpu_times()
        return float(times.user + times.system)

    async def _sample(self) -> None:
        async for _ in ticks(0.25):
            self._peak = max(self._peak, self._server.process.memory_info().rss)


def served_by() -> str:
    """What uvicorn has chosen, from what is installed."""
    loop = "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"
    parser = "httptools" if importlib.util.find_spec("httptools") else "h11"
    return f"uvicorn {version('uvicorn')} on {loop} with {parser}"


async def floods() -> dict[str, Any]:
    """Floods, each between two times of peace."""
    async with serving() as server:
        unloaded = [percentile(await server.control_calls(UNLOADED_S, FREE_CORES), 99)]
        floods, flooded = Floods(server), list[float]()
        for _ in range(FLOODS):
            flooded.append(percentile(await floods.flood(FLOOD_S), 99))
            unloaded.append(percentile(await server.control_calls(UNLOADED_S, FREE_CORES), 99))
        server.assert_nothing_is_forgotten()
    around = [(before + after) / 2 for before, after in itertools.pairwise(unloaded)]
    ratios = sorted(mine / theirs for mine, theirs in zip(flooded, around, strict=True))
    taken = Ratio(
        subject_us=statistics.median(flooded) * 1000,
        baseline_us=statistics.median(unloaded) * 1000,
        ratio=statistics.median(ratios),
        low=ratios[0],
        high=ratios[-1],
    )
    return {**vars(taken), "figures": floods.figures()}


def test_floods(benchmark: Any) -> None:
    """Floods of 200 connections on default admission; everybody is answered."""
    measured = run_once(benchmark, floods)
    measured["figures"] |= {
        "name": f"floods over HTTP: {FLOODS} times {FLOODED} connections for {FLOOD_S:g} s",
        "budget": "every call answered, none lost",
    }
    name = (
        f"p99 of a control call while {FLOODED} connections flood HTTP, against one connection per free core"
    )
    record(benchmark, name, "at most 3", measured)


async def growth() -> dict[str, Any]:
    """Control calls under loads that take turns."""
    control = {load: list[float]() for load in LOADS}
    answered, seconds = dict.fromkeys(LOADS, 0), dict.fromkeys(LOADS, 0.0)
    async with serving() as server:
        await server.control_calls(UNLOADED_S)
        for _ in range(ROUNDS):
            for load in LOADS:
                began = time.perf_counter()
                async with server.flooded(load) as outcomes:
                    control[load] += await server.control_calls(ROUND_S)
                seconds[load] += time.perf_counter() - began
                answered[load] += outcomes.total()
        server.assert_nothing_is_forgotten()
    rows = [
        {
            "connections": load,
            "p50_ms": percentile(control[load], 50),
            "p99_ms": percentile(control[load], 99),
            "control_calls": len(control[load]),
            "answered_per_s": answered[load] / seconds[load],
        }
        for load in LOADS
    ]
    return {"growth": rows, "rounds": ROUNDS, "round_s": ROUND_S}


def test_growth(benchmark: Any) -> None:
    """How long a control call takes, by the number of connections that flood the server."""
    record(benchmark, "control calls by load over HTTP", "none", run_once(benchmark, growth))
