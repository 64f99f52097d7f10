"""The command, run in this process where that is enough, and as a process where it matters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from frontmcp_py.cli.app import invoke

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "frontmcp_py.cli")


@dataclass(frozen=True)
class Done:
    """What came of a command."""

    status: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """That of a process which finds this package, wherever it runs."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def command(*words: str, cwd: Path = ROOT, timeout: float = 50, **more: str) -> Done:
    """The command as a process."""
    done = subprocess.run(
        [*COMMAND, *words],
        cwd=cwd,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def frontmcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """The command in this process and in `tmp_path`; what it imports is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)

    def run(*words: str) -> Done:
        capfd.readouterr()
        status = invoke([*words])
        out, err = capfd.readouterr()
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
                del sys.modules[name]
        return Done(status, out, err)

    return run


DESK = '''
"""A desk with tools of every kind."""

from frontmcp_py import App, Concurrency, FrontMCP, RateLimit, Throttle, Timeout

app = App("desk")


@app.tool(rate_limit=RateLimit(2, window="1h", partition_by="user_id"), read_only=True)
def export_tickets() -> str:
    """Export tickets."""
    return "none"


@app.tool(concurrency=Concurrency(3, key="crm", queue_timeout=5), timeout=2)
async def look_up(customer: str) -> str:
    """Look a customer up."""
    return customer


@app.tool(priority="control", read_only=True)
async def status() -> str:
    """How is it?"""
    return "fine"


server = FrontMCP("desk", apps=[app], throttle=Throttle(default_timeout=30), shutdown_grace=SHUTDOWN_GRACE)
'''


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """The file of a server."""
    return write_desk(tmp_path / "desk.py")


def write_desk(file: Path, shutdown_grace: float = 2) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(DESK.replace("SHUTDOWN_GRACE", str(shutdown_grace)), encoding="utf-8")
    return file
