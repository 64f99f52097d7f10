"""`frontmcp run`: serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frontmcp_py.cli import target as targets
from frontmcp_py.cli.configured import CONFIG_HELP, load
from frontmcp_py.cli.output import Failure
from frontmcp_py.errors import ConfigurationError

HOST = "127.0.0.1"
PORT = 8000


def run(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=targets.HELP, show_default=False)],
    http: Annotated[bool, typer.Option("--http", help="Serve over HTTP instead of stdio.")] = False,
    host: Annotated[str | None, typer.Option(help=f"The address to listen on. [default: {HOST}]")] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help=f"The port to listen on; 0 takes a free one. [default: {PORT}]"),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help=CONFIG_HELP)] = None,
) -> None:
    """Serve a server's tools: over stdio for the client that started it, over HTTP for many."""
    if not http and (host is not None or port is not None):
        raise Failure("--host and --port are for HTTP; add --http")
    try:
        server = load(targets.Target.of(target), config)
        if not http:
            server.run()
            return
        server.run("http", host=HOST if host is None else host, port=PORT if port is None else port)
    except ConfigurationError as error:
        raise Failure(str(error)) from error
    except SystemExit as error:
        # An address that cannot be listened on.
        if not isinstance(error.code, str):
            raise
        raise Failure(error.code.removeprefix("frontmcp_py: ")) from error
