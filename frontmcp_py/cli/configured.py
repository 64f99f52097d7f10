"""A server as an operator runs it: loaded, with the file that holds for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from frontmcp_py.cli.target import Target
from frontmcp_py.cli.target import load as load_target
from frontmcp_py.config import FILE_NAME, for_target
from frontmcp_py.server import FrontMCP

CONFIG_HELP = f"The operator's file. [default: $FRONTMCP_CONFIG, else {FILE_NAME} beside TARGET]"


def load(target: Target, config: Path | None) -> FrontMCP:
    """Import the server, under the operator's file.

    Args:
        target: Which server.
        config: The file that was named, if one was.

    Raises:
        ConfigurationError: Its limits, or the file, are not as they have to be.
        Failure: It cannot be loaded.
    """
    with for_target(target.folder, config):
        return load_target(target)


def named_file(config: Path | None) -> Path | None:
    """The operator's file that holds whatever the code says: of the command line, else of the environment."""
    named = os.environ.get("FRONTMCP_CONFIG", "").strip()
    return config or (Path(named) if named else None)


def file_of(target: Target, server: FrontMCP | None) -> Path | None:
    """The file that holds when none is named: that of the code, else the one beside TARGET.

    Args:
        target: Which server.
        server: The same, loaded under any file; `None` if it cannot be loaded.
    """
    of_code = None if server is None else server.mcp.config.code_names
    if isinstance(of_code, Mapping):
        return None
    return target.folder / FILE_NAME if of_code is None else Path(of_code)
