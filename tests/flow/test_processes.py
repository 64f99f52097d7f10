"""Tools that run commands: whatever ends a call ends its command, over every transport."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal as signals
import sys
from collections.abc import Iterator
from typing import Any, Final

import mcp_types as types
import pytest

from tests.flow.wires import ALL, SOON, Servers, Wire, over, text
from tests.processes import alive, is_sleep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

# One of each protocol, and every process that a server can live in.
SOME: Final = [kind for kind in ALL if kind.name in ("inprocess-2026", "stdio-2025", "sse-2026", "json-2025")]

# A deadline has to be waited for, and what ends a command is the same over all of them.
WAITING: Final = [
    kind if kind.name == "inprocess-2026" else pytest.param(kind, marks=pytest.mark.slow) for kind in SOME
]

CANCELLABLE: Final = [kind for kind in SOME if kind.name != "json-2025"]

_NUMBERS: Final = itertools.count()


@pytest.fixture
def nap() -> Iterator[str]:
    """For how many seconds a command sleeps, as nobody else does."""
    nap = f"400.{os.getpid()}{next(_NUMBERS)}"
    yield nap
    left = alive(nap)
    for pid in left:
        os.kill(pid, signals.SIGKILL)
    assert left == []


async def until_asleep(nap: str) -> None:
    async with asyncio.timeout(SOON):
        while not any(is_sleep(pid) for pid in alive(nap)):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


def meta_of(result: types.CallToolResult) -> dict[str, Any]:
    return dict(result.meta or {})


@over(SOME)
async def test_a_tool_gives_what_its_command_has_written(wire: Wire, case: str) -> None:
    result = await wire.call("shell", case=case, script="echo out; echo err >&2; cat; exit 3")
    content = result.structured_content or {}
    assert (content["returncode"], content["stdout"], content["stderr"]) == (3, "out\n", "err\n")


@pytest.mark.parametrize("connection", WAITING, ids=str, indirect=True, scope="session")
async def test_the_deadline_of_a_call_ends_its_command(wire: Wire, case: str, nap: str) -> None:
    result = await wire.call("shell_in_time", case=case, script=f"setsid sleep {nap} & sleep {nap} & wait")
    assert meta_of(result)["code"] == "EXECUTION_TIMEOUT"
    assert "ExecutionTimeout" in await wire.said(case, "over")
    assert alive(nap) == []
    await wire.statistics("active", 0)
    assert text(await wire.call("enter", case=case)) == "inside"


@over(SOME)
async def test_a_command_that_takes_too_long_is_a_failure_of_the_tool(
    wire: Wire, case: str, nap: str
) -> None:
    result = await wire.call("shell", case=case, script=f"sleep {nap} & wait", timeout=0.2)
    assert result.is_error
    assert "code" not in meta_of(result)
    assert "ProcessTimeout" in await wire.said(case, "over")
    assert alive(nap) == []


@over(SOME)
async def test_a_command_that_writes_too_much_says_so(wire: Wire, case: str, nap: str) -> None:
    result = await wire.call("shell", case=case, script=f"sleep {nap} & yes")
    assert text(result) == 'Process output of "shell" is larger than 4096 bytes; the process was ended.'
    assert (meta_of(result)["code"], meta_of(result)["limit"]) == ("OUTPUT_LIMIT", 4096)
    assert alive(nap) == []


@pytest.mark.parametrize("tool", ["shell", "shell_that_reads"])
@over(CANCELLABLE)
async def test_a_client_that_gives_up_ends_the_command(wire: Wire, case: str, nap: str, tool: str) -> None:
    call = wire.start(tool, case=case, script=f"sleep {nap} & wait")
    await until_asleep(nap)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    # A tool that changes things is only told, but the command listens.
    said = await wire.said(case, "over")
    assert said[0] == ("CancelledError" if tool == "shell_that_reads" else "Cancelled")
    assert alive(nap) == []
    assert text(await wire.call("enter", case=case)) == "inside"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stdio-2026", "stdio-2025"])
async def test_a_client_on_stdio_that_goes_ends_the_command(
    servers: Servers, case: str, nap: str, name: str
) -> None:
    (kind,) = [kind for kind in ALL if kind.name == name]
    async with servers.of_its_own(kind, f"{name}-{case}").connect() as wire:
        call = wire.start("shell", case=case, script=f"trap '' TERM; sleep {nap} & wait; wait")
        await until_asleep(nap)
    await asyncio.gather(call, return_exceptions=True)
    assert alive(nap) == []
