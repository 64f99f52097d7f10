"""A server as an operator runs it: loaded, with the file that holds for it."""

from __future__ import annotations

import os
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


def file_of(target: Target, config: Path | None) -> Path | None:
    """The operator's file that holds for a server, as far as the command line and its surroundings say."""
    named = os.environ.get("FRONTMCP_CONFIG", "").strip()
    file = config or (Path(named) if named else target.folder / FILE_NAME)
    return file if file.exists() else None
