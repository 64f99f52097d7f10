"""Kind T, child processes: what a command starts does not outlive the call that has started the command.

Here time is real, as the commands are.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal as signals
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from frontmcp_py import AbortSignal, Call, Cancelled, Concurrency, ExecutionTimeout, Guard, Policy
from frontmcp_py.process import ProcessResult, run
from tests.cases.desk import assert_clean
from tests.processes import alive, is_sleep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

PATIENCE: Final = 20.0
_NUMBERS: Final = itertools.count()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def nap() -> Iterator[str]:
    """How long whoever outlives its call would sleep, in seconds, as nobody else does."""
    nap = f"30.{os.getpid()}{next(_NUMBERS)}"
    yield nap
    for pid in alive(nap):
        os.kill(pid, signals.SIGKILL)


class Shell:
    """A tool that runs a script, one at a time, and a caller of it."""

    def __init__(self, timeout: float | None = None) -> None:
        self.guard = Guard()
        self.signal = AbortSignal()
        self.result: ProcessResult[str] | None = None
        self._policy = Policy(concurrency=Concurrency(1), timeout=timeout)

    async def call(self, script: str) -> None:
        async def body(signal: AbortSignal) -> None:
            self.result = await run("sh", "-c", script, signal=signal)

        async with asyncio.timeout(PATIENCE):
            await self.guard.run(Call("shell"), self._policy, body, self.signal)

    async def assert_free(self, nap: str) -> None:
        """The caller has its answer. Soon nothing is left either, and only then the slot is free."""
        async with asyncio.timeout(PATIENCE):
            while self.guard.statistics().active:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        assert alive(nap) == []
        assert_clean(self.guard)
        self.signal = AbortSignal()
        await self.call("true")


async def until_asleep(nap: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while not any(is_sleep(pid) for pid in alive(nap)):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("end", ["timeout", "cancel"])
async def test_a_grandchild_that_keeps_the_pipe_open_holds_nothing_up(nap: str, end: str) -> None:
    """C87: python/cpython#76116, tomerfiliba/plumbum#840, greyhaven-ai/autocontext#940."""
    await assert_ends(f"sleep {nap} & echo hi; wait", nap, end)


@pytest.mark.parametrize("end", [pytest.param("timeout", marks=pytest.mark.slow), "cancel"])
async def test_a_worker_whose_wrapper_has_gone_is_ended(nap: str, end: str) -> None:
    """C88: NousResearch/hermes-agent#35249, modelcontextprotocol/typescript-sdk#2596."""
    # The wrapper waits for one command only, and goes as soon as that has been ended.
    await assert_ends(f"(sleep {nap} & exec sleep {nap}) ; exit 0", nap, end)


async def test_a_worker_that_its_wrapper_leaves_behind_is_ended(nap: str) -> None:
    """C88: the wrapper comes to its end by itself."""
    shell = Shell()
    await shell.call(f"sleep {nap} & echo hi; exit 0")
    assert shell.result is not None
    assert (shell.result.returncode, shell.result.stdout) == (0, "hi\n")
    await shell.assert_free(nap)


@pytest.mark.parametrize("end", [pytest.param("timeout", marks=pytest.mark.slow), "cancel"])
async def test_a_grandchild_in_a_session_of_its_own_is_ended(nap: str, end: str) -> None:
    """C89: razzant/ouroboros#31, NorthlandPositronics/Cogtrix#966."""
    await assert_ends(f"setsid sleep {nap} & echo hi; wait", nap, end)


async def test_an_escapee_that_cannot_be_found_is_named(nap: str, caplog: pytest.LogCaptureFixture) -> None:
    """C89: the same with nothing left that tells whose it is."""
    shell = Shell()
    with caplog.at_level(logging.WARNING, "frontmcp_py"):
        await shell.call(f"(env -i setsid sleep {nap} &) ; while ! pgrep -f '^sleep {nap}'; do :; done")
    (pid,) = alive(nap)
    os.kill(pid, signals.SIGKILL)
    assert f"process {pid} ('sleep {nap}')" in caplog.text
    assert_clean(shell.guard)


async def assert_ends(script: str, nap: str, end: str) -> None:
    """The script would go on, but its call does not, and nothing is left of it."""
    shell = Shell(timeout=1 if end == "timeout" else None)
    call = asyncio.create_task(shell.call(script))
    await until_asleep(nap)
    if end == "cancel":
        shell.signal.abort(Cancelled())
    with pytest.raises(ExecutionTimeout if end == "timeout" else Cancelled):
        await call
    assert shell.result is None
    await shell.assert_free(nap)
