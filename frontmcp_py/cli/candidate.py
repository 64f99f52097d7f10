"""A server that is started for a canary, in a process of its own, and ended afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Final

import httpx2

from frontmcp_py.cli.clients import kill
from frontmcp_py.cli.output import Failure, one_line
from frontmcp_py.cli.target import Target

_STARTS_WITHIN_S: Final = 60.0
_LOOKS_EVERY_S: Final = 0.1
_PREFIX: Final = "frontmcp: "


class Candidate:
    """The process.

    Attributes:
        url: Where it is.
        allowed_s: Seconds that it may take to end.
        ended_s: Seconds that it has taken to end by SIGTERM; `None` before that, or if it did not.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, url: str, log: IO[bytes], allowed_s: float
    ) -> None:
        self.url: str = url
        self.allowed_s: float = allowed_s
        self.ended_s: float | None = None
        self._process = process
        self._log = log

    def memory_mib(self) -> tuple[float, float] | None:
        """Memory now, and the most so far; `None` where the system does not say."""
        try:
            text = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        except OSError:
            return None
        sizes = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        try:
            now, most = (int(sizes[each].split()[0]) / 1024 for each in ("VmRSS", "VmHWM"))
        except (KeyError, ValueError):
            return None
        return now, most

    def said(self) -> str:
        """The last line of its log."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return one_line(lines[-1].removeprefix(_PREFIX)) if lines else "it said nothing"

    async def ready(self) -> None:
        """Wait until it answers.

        Raises:
            Failure: It has ended, or does not answer in time.
        """
        async with httpx2.AsyncClient(trust_env=False, timeout=5) as http:
            for _ in range(int(_STARTS_WITHIN_S / _LOOKS_EVERY_S)):
                if self._process.returncode is not None:
                    raise Failure(f"the server does not start: {self.said()}")
                with contextlib.suppress(httpx2.TransportError):
                    if (await http.get(f"{self.url}/healthz")).is_success:
                        return
                await asyncio.sleep(_LOOKS_EVERY_S)
        raise Failure(f"the server does not answer within {_STARTS_WITHIN_S:g} s: {self.said()}")

    async def end(self) -> None:
        """Tell it to end, see how long that takes, and make sure of it."""
        loop = asyncio.get_running_loop()
        told = loop.time()
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), self.allowed_s)
                self.ended_s = loop.time() - told
        await self.kill()

    async def kill(self) -> None:
        """Make sure that it is gone."""
        if self._process.returncode is None:
            kill(self._process)
            await self._process.wait()


@asynccontextmanager
async def started(target: Target, config: Path | None, allowed_s: float) -> AsyncGenerator[Candidate]:
    """Run a server on a free loopback port for as long as this block.

    Args:
        target: Which server.
        config: The operator's file that was named, if one was.
        allowed_s: Seconds that it may take to end.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "frontmcp_py.cli", "run", "--http", "--port", str(port)]
    if config is not None:
        command += ["--config", str(config)]
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            "--",
            target.text,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C is for this process, which then ends that one.
            start_new_session=True,
        )
        candidate = Candidate(process, f"http://127.0.0.1:{port}", log, allowed_s)
        try:
            yield candidate
        finally:
            await candidate.kill()
