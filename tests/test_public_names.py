from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import frontmcp_py
from frontmcp_py.errors import CODES, GuardError

ROOT = Path(__file__).parents[1]

NAMES = {
    *("App", "FrontMCP", "Tool", "tool", "ToolContext"),
    *("RateLimit", "Concurrency", "Timeout", "Throttle", "Admission", "IPFilter", "Policy"),
    *("Guard", "Call", "Caller", "AbortSignal"),
    *("ToolError", "ConfigurationError", "GuardError"),
}


def camel_case(code: str) -> str:
    return "".join(word.capitalize() for word in code.split("_"))


def test_the_exported_names_are_these_and_no_others() -> None:
    assert set(frontmcp_py.__all__) == NAMES | {camel_case(code) for code in CODES}
    assert len(frontmcp_py.__all__) == len(set(frontmcp_py.__all__))


def test_every_exported_name_is_there() -> None:
    for name in frontmcp_py.__all__:
        assert getattr(frontmcp_py, name) is not None


@pytest.mark.parametrize("code", CODES)
def test_there_is_one_error_for_each_code(code: str) -> None:
    error = getattr(frontmcp_py, camel_case(code))
    assert issubclass(error, GuardError)
    assert error.code == code


def test_a_tools_own_error_is_the_sdks() -> None:
    from mcp.server.mcpserver.exceptions import ToolError

    assert frontmcp_py.ToolError is ToolError


def in_a_fresh_interpreter(program: str) -> str:
    """What a program prints that begins with nothing imported; a warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """The modules that come with the package, whose import must change nothing else in the process."""
    program = """
import asyncio, logging, os, signal, sys, threading, warnings
import mcp.server.mcpserver, mcp.client, limits.strategies
before = set(sys.modules)

def seen():
    logger = logging.getLogger("frontmcp_py")
    return {
        "threads": threading.active_count(),
        "handlers": [*logging.root.handlers, *logger.handlers],
        "levels": [logging.root.level, logger.level, logging.root.manager.disable],
        "signals": [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)],
        "environment": dict(os.environ),
        "policy": type(asyncio.get_event_loop_policy()).__name__ if sys.version_info < (3, 14) else None,
        "warnings": len(warnings.filters),
        "children": os.path.exists("/proc/self/task") and len(os.listdir("/proc/self/task")),
    }

then = seen()
import frontmcp_py
assert seen() == then, (seen(), then)
print(*sorted(set(sys.modules) - before))
"""
    return set(in_a_fresh_interpreter(program).split())


def test_importing_has_no_side_effects(imported: set[str]) -> None:
    assert "frontmcp_py.server" in imported


def test_no_extra_and_nothing_of_a_test_framework_comes_with_it(imported: set[str]) -> None:
    assert not {name.partition(".")[0] for name in imported} & {
        *("redis", "valkey", "pymemcache", "pymongo", "etcd3", "typer", "rich", "prometheus_client"),
        *("fastmcp", "pytest", "hypothesis", "uvloop"),
    }


def test_only_who_runs_a_server_or_a_test_imports_what_that_needs(imported: set[str]) -> None:
    assert not imported & {"frontmcp_py.testing", "frontmcp_py.http.serve"}
