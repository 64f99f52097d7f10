"""`frontmcp systemd`: a unit that keeps a server within bounds, and a watchdog for when it hangs."""

from __future__ import annotations

import math
import os
import re
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Final

import typer

from frontmcp_py.cli import target as targets
from frontmcp_py.cli import watchdog as watching
from frontmcp_py.cli.configured import CONFIG_HELP, load
from frontmcp_py.cli.output import Failure, complain, one_line, say
from frontmcp_py.cli.run import HOST, PORT
from frontmcp_py.errors import ConfigurationError

LEAST_STOP_S: Final = 5
"""Seconds that the service manager waits at least for the process to end."""

BEYOND_GRACE_S: Final = 3
"""Seconds beyond the grace of running calls: one to end them, the rest for a machine that is slow."""

# Whatever else a word of a command line holds, it is quoted.
_PLAIN: Final = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_UNIT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.-]{0,199}")

_SERVICE: Final = """\
[Unit]
Description={description}
# It is never given up: what keeps it from starting may be gone in a moment.
StartLimitIntervalSec=0

[Service]
Type=exec
WorkingDirectory={folder}
ExecStart={command}
{run_as}Restart=on-failure
RestartSec=2
# The server ends its calls, and its calls their processes; what is left after that is killed.
KillMode=mixed
TimeoutStopSec={stop}
# The last resort: the server's own limits refuse calls long before these are reached.
TasksMax=512
LimitNOFILE=65536
MemoryHigh=6G
MemoryMax=9G
CPUWeight=80

[Install]
WantedBy={wanted_by}
"""

_WATCHDOG: Final = """\
[Unit]
Description=Looks whether {name}.service answers

[Service]
Type=oneshot
ExecStart={command}
RuntimeDirectory={name}-watchdog
# What it has seen so far outlives each look.
RuntimeDirectoryPreserve=yes
TimeoutStartSec=60
"""

_TIMER: Final = """\
[Unit]
Description=Looks every {apart} seconds whether {name}.service answers

[Timer]
OnActiveSec={apart}s
OnUnitActiveSec={apart}s
AccuracySec=1s

[Install]
WantedBy=timers.target
"""


def systemd(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=targets.HELP, show_default=False)],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = HOST,
    port: Annotated[int, typer.Option(min=1, max=65_535, help="The port to listen on.")] = PORT,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help=CONFIG_HELP)] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The unit's name. [default: made of the server's]")
    ] = None,
    user: Annotated[
        bool, typer.Option("--user/--system", help="For the service manager of a user, or of the machine.")
    ] = False,
    run_as: Annotated[
        str | None, typer.Option(metavar="USER", help="The user that a unit of the machine runs as.")
    ] = None,
    watchdog: Annotated[
        bool, typer.Option(help="With a timer that restarts a server which no longer answers.")
    ] = True,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the units there instead of printing them.")
    ] = None,
) -> None:
    """Print systemd units: the server with its guardrails, and a watchdog that asks /healthz."""
    place = targets.Target.of(target)
    if user and run_as is not None:
        raise Failure("--run-as is for units of the machine; a user's units run as that user")
    if config is None and (given := os.environ.get("FRONTMCP_CONFIG")):
        config = Path(given)
    try:
        server = load(place, config)
    except ConfigurationError as error:
        raise Failure(str(error)) from error
    name = _unit_name(name, server.name)
    units = {
        f"{name}.service": _SERVICE.format(
            description=_value(f"{server.name}, an MCP server"),
            folder=_path(Path.cwd()),
            command=_command(_run(place, host, port, config)),
            run_as="" if run_as is None else f"User={_value(run_as)}\n",
            stop=stop_seconds(server.shutdown_grace),
            wanted_by="default.target" if user else "multi-user.target",
        )
    }
    if watchdog:
        looks = [sys.executable, "-I", str(Path(watching.__file__).absolute())]
        asked = ["--url", f"http://{_asked(host)}:{port}/healthz", "--unit", f"{name}.service"]
        units[f"{name}-watchdog.service"] = _WATCHDOG.format(
            name=name, command=_command([*looks, *asked, *(["--user"] if user else [])])
        )
        units[f"{name}-watchdog.timer"] = _TIMER.format(name=name, apart=watching.APART_S)
    if output is None:
        say("\n".join(f"# {file}\n{text}" for file, text in units.items()).rstrip("\n"))
    else:
        _write(units, output)


def stop_seconds(shutdown_grace: float) -> int:
    """How long the service manager waits for the process to end, in whole seconds."""
    return math.ceil(max(LEAST_STOP_S, shutdown_grace + BEYOND_GRACE_S))


def _run(place: targets.Target, host: str, port: int, config: Path | None) -> list[str]:
    command = [sys.executable, "-m", "frontmcp_py.cli", "run", "--http", "--host", host, "--port", str(port)]
    if config is not None:
        command += ["--config", str(config.absolute())]
    return [*command, "--", place.absolute]


def _asked(host: str) -> str:
    """Where a server that listens on `host` can be asked, as it is written in a URL."""
    try:
        address = ip_address(host)
    except ValueError:
        return host or "127.0.0.1"
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return host if address.version == 4 else f"[{host}]"


def _unit_name(given: str | None, server: str) -> str:
    if given is None:
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", server)[:100].strip("-.") or "mcp-server"
    name = given.removesuffix(".service")
    if not _UNIT_NAME.fullmatch(name):
        raise Failure(f"--name: {given!r} is no unit's name; give letters, digits, '.', '-', '_' or ':'")
    return name


def _command(words: list[str]) -> str:
    """A command line as systemd reads it: `%`, `$`, quotes and backslashes stand for themselves."""
    return " ".join(_word(word) for word in words)


def _word(word: str) -> str:
    if _PLAIN.fullmatch(word):
        return word
    for mark, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(mark, written)
    return '"{}"'.format("".join(mark if mark.isprintable() else _escaped(mark) for mark in word))


def _escaped(mark: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in mark.encode("utf-8", "surrogateescape"))


def _value(text: str) -> str:
    """Text of one line in which `%` is no specifier and the end no continuation."""
    return one_line(text).rstrip("\\").replace("%", "%%")


def _path(path: Path) -> str:
    """A path that is read to the end of the line."""
    text = str(path)
    if one_line(text) != text or text.endswith("\\"):
        raise Failure(f"{text!r} cannot stand in a unit; run this from a folder of another name")
    return text.replace("%", "%%")


def _write(units: dict[str, str], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in units.items():
            (folder / file).write_text(text, encoding="utf-8")
            complain(f"wrote {folder / file}")
    except OSError as error:
        raise Failure(f"cannot write to {folder}: {error.strerror or error}") from error
