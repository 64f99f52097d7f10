"""The operator's file, as a process of its own takes it from its environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import TextContent

PROGRAM = """
from frontmcp_py import FrontMCP

server = FrontMCP("desk", throttle={"defaultRateLimit": {"maxRequests": 5}})

@server.tool
async def export() -> str:
    return "done"

@server.tool
async def merge() -> str:
    return "done"

server.run()
"""


def parameters(config: Path, **environment: str) -> StdioServerParameters:
    environment = {"FRONTMCP_CONFIG": str(config), **environment}
    return StdioServerParameters(command=sys.executable, args=["-c", PROGRAM], env=environment)


@pytest.mark.slow
async def test_a_process_enforces_what_the_file_in_its_environment_says(tmp_path: Path) -> None:
    config = tmp_path / "frontmcp.toml"
    config.write_text("[tools.export]\nrate_limit = '1/hour'\n[tools.merge]\nenabled = false\n")
    async with Client(stdio_client(parameters(config))) as client:
        [export] = (await client.list_tools()).tools
        assert str(export.description).endswith("Limits: at most 1 call per hour.")
        results = [await client.call_tool("export", {}) for _ in range(2)]
        assert [result.is_error for result in results] == [False, True]


@pytest.mark.slow
async def test_the_environment_turns_off_what_the_file_says(tmp_path: Path) -> None:
    config = tmp_path / "frontmcp.toml"
    config.write_text("[throttle]\nenabled = true\n[tools.export]\nrate_limit = '1/hour'\n")
    async with Client(stdio_client(parameters(config, FRONTMCP_THROTTLE="off"))) as client:
        results = [await client.call_tool("export", {}) for _ in range(2)]
        assert [
            block.text for result in results for block in result.content if isinstance(block, TextContent)
        ] == [
            "done",
            "done",
        ]
