"""The command line as a whole: its commands, and what becomes of their errors."""

from __future__ import annotations

import sys
import traceback
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Annotated

import typer
from typer.main import get_command

from frontmcp_py.cli.check import check
from frontmcp_py.cli.host import app as host
from frontmcp_py.cli.listing import list_tools
from frontmcp_py.cli.output import Failure, complain, say
from frontmcp_py.cli.run import run as serve
from frontmcp_py.cli.stress import stress
from frontmcp_py.cli.systemd import systemd
from frontmcp_py.errors import ConfigurationError

app: typer.Typer = typer.Typer(
    name="frontmcp",
    help="MCP servers that survive their users.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("run")(serve)
app.command("check")(check)
app.command("list")(list_tools)
app.command("stress")(stress)
app.command("systemd")(systemd)
app.add_typer(host, name="host")


def _tell_version(wanted: bool) -> None:
    if wanted:
        try:
            say(f"frontmcp {version_of('frontmcp-py')}")
        except PackageNotFoundError:
            # It runs out of a folder that nobody has installed.
            say("frontmcp, not installed")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error comes from, with its traceback.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_tell_version),
    ] = False,
) -> None:
    """MCP servers that survive their users."""


def invoke(arguments: list[str]) -> int:
    """Run one command.

    Args:
        arguments: What stands behind the command's name.

    Returns:
        The exit status.
    """
    try:
        # Without its standalone mode it raises errors instead of drawing boxes around them.
        status = get_command(app).main(
            args=arguments or ["--help"], prog_name="frontmcp", standalone_mode=False
        )
    except (Failure, ConfigurationError) as error:
        if "--debug" in arguments and error.__cause__ is not None:
            traceback.print_exception(error.__cause__, file=sys.stderr)
        complain(str(error))
        return error.status if isinstance(error, Failure) else 2
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        # What is wrong with the arguments: an error of typer's, whose class moves from release to release.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        said = message()
        if said:
            complain(f"{said.rstrip('.')}; frontmcp --help tells more")
        return 2
    return status if isinstance(status, int) else 0
