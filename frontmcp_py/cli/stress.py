"""`frontmcp stress`: the canary. A bounded load, and whether the server kept its promises meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import resource
import signal
import ssl
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import httpx2
import typer
from mcp.shared.exceptions import MCPError
from mcp_types import Tool
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from frontmcp_py.cli.calls import ToolCall, is_harmless, unasked
from frontmcp_py.cli.candidate import Candidate, started
from frontmcp_py.cli.clients import Clients, Load, clients
from frontmcp_py.cli.configured import CONFIG_HELP
from frontmcp_py.cli.configured import load as load_server
from frontmcp_py.cli.flood import Record, call, connected, why_not
from frontmcp_py.cli.here import Place, refuse_elsewhere
from frontmcp_py.cli.output import Failure, say_json, stderr, stdout
from frontmcp_py.cli.picture import drawn, latencies, outcomes, svg
from frontmcp_py.cli.promises import Metrics, Promise, Seen, judge
from frontmcp_py.cli.systemd import stop_seconds
from frontmcp_py.cli.target import Target
from frontmcp_py.cli.watch import PROBE_WITHIN_S, Watch
from frontmcp_py.errors import ConfigurationError

CONNECTIONS: Final = 200
SECONDS: Final = 10.0
ANSWER_WITHIN: Final = 60.0

_CONTROL_EVERY_S: Final = 0.1
_STYLES: Final = {"kept": "green", "broken": "bold red", "not judged": "yellow"}


def stress(
    server: Annotated[
        str,
        typer.Argument(
            metavar="URL|TARGET",
            help="A server of this machine by its address, or one to start for this: module:object or "
            "path.py:object.",
            show_default=False,
        ),
    ],
    call: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'TOOL k=v ...'",
            help="What to call: a tool with arguments, also as one JSON object; may be repeated. "
            "[default: tools that only read and need no arguments]",
        ),
    ] = None,
    control: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'TOOL k=v ...'",
            help="What must be answered meanwhile; may be repeated. [default: control tools that only read "
            "and need no arguments]",
        ),
    ] = None,
    connections: Annotated[
        int, typer.Option(min=1, max=2000, help="Clients that call at once.")
    ] = CONNECTIONS,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long they call.")] = SECONDS,
    answer_within: Annotated[
        float, typer.Option(min=1, max=600, help="Seconds after which a call without an answer is lost.")
    ] = ANSWER_WITHIN,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="'NAME: VALUE'", help="Sent with every request; may be repeated."),
    ] = None,
    allow_no_overload: Annotated[
        bool, typer.Option("--allow-no-overload", help="A flood of which nothing was refused is no failure.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"{CONFIG_HELP} For a TARGET only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the result, too.")] = None,
) -> None:
    """Flood a server of this machine, and see whether it keeps its promises; exit with 1 if it broke one."""
    if picture is not None and not picture.absolute().parent.is_dir():
        raise Failure(f"there is no folder {picture.absolute().parent}")
    load = Load(
        connections, seconds, answer_within, tuple(call or ()), tuple(control or ()), _headers(header)
    )
    _allow_files(connections)
    # A server that is loaded here sets up logging, which would tell of every probe.
    logging.disable(logging.INFO)
    try:
        seen = asyncio.run(_stress(server, config, load, quiet=as_json))
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    finally:
        logging.disable(logging.NOTSET)
    promises = judge(seen, needs_overload=not allow_no_overload)
    groups: dict[str, Sequence[Record]] = {"flood": seen.calls, "control": seen.control}
    groups = {name: records for name, records in groups.items() if records}
    if as_json:
        say_json(_data(server, load, groups, promises))
    else:
        console = stdout()
        if groups:
            console.print(drawn(groups))
            console.print()
        console.print(_promises(promises))
    if picture is not None:
        title = f"{server}: {connections} connections for {seconds:g} s"
        try:
            picture.write_text(svg(title, groups), encoding="utf-8")
        except OSError as error:
            raise Failure(f"cannot write {picture}: {error.strerror or error}") from error
    if any(each.verdict == "broken" for each in promises):
        raise typer.Exit(1)


async def _stress(server: str, config: Path | None, load: Load, *, quiet: bool) -> Seen:
    # Whoever ends this process must not leave a server and its clients behind.
    if (task := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    if "://" in server:
        if config is not None:
            raise Failure(
                "--config is for a server that is started here; this one has been configured already"
            )
        return await _flooded(Place.of(server), None, load, quiet=quiet)
    target = Target.of(server)
    try:
        allowed = stop_seconds(load_server(target, config).shutdown_grace)
    except ConfigurationError as error:
        raise Failure(str(error)) from error
    async with started(target, config, allowed) as candidate:
        await candidate.ready()
        return await _flooded(Place.of(candidate.url), candidate, load, quiet=quiet)


async def _flooded(place: Place, candidate: Candidate | None, load: Load, *, quiet: bool) -> Seen:
    """One whole canary: what is there, the flood and all that is watched meanwhile, the rest after it."""
    refuse_elsewhere(place.mcp)
    seen = Seen(connections=load.connections)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            httpx2.AsyncClient(trust_env=False, headers=dict(load.headers), timeout=PROBE_WITHIN_S)
        )
        watch = Watch(place, http, seen)
        await watch.look()
        seen.ready_before = seen.ready[-1]
        tools = await _tools(place, load)
        controls = _controls(load, tools, seen.metrics)
        calls = _calls(load, tools, {each.tool for each in controls} if not load.calls else set())
        seen.controls = tuple(dict.fromkeys(each.tool for each in controls))
        floods = await stack.enter_async_context(clients(place, load, calls))
        seen.unconnected = await floods.connect()
        memory = candidate.memory_mib() if candidate is not None else None
        await _flood(floods, watch, controls, load, quiet=quiet)
        await watch.rest()
        if candidate is not None:
            after = candidate.memory_mib()
            if memory is not None and after is not None:
                seen.memory_mib = memory[0], after[1]
    if candidate is not None:
        await candidate.end()
        seen.ended = candidate.ended_s, candidate.allowed_s
    return seen


async def _flood(
    floods: Clients, watch: Watch, controls: Sequence[ToolCall], load: Load, *, quiet: bool
) -> None:
    """The flood, and what is watched meanwhile."""
    seen = watch.seen
    over = asyncio.Event()
    with _progress(load, quiet=quiet) as (progress, task):
        control = asyncio.create_task(_control(watch.place, controls, load, seen, over))
        beside = [
            control,
            asyncio.create_task(watch.look_and_look()),
            asyncio.create_task(_tick(progress, task, load.seconds)),
        ]
        try:
            seen.calls = await floods.run(partial(_tell, progress, task))
            # The last control call is waited for: whether it is answered is what matters.
            over.set()
            await control
        finally:
            for each in beside:
                each.cancel()
            ends = await asyncio.gather(*beside, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end


# ------------------------------------------------------------------------------------------ what is called


async def _tools(place: Place, load: Load) -> dict[str, Tool]:
    """The server's tools, by name.

    Raises:
        Failure: There is no MCP server.
    """
    found: dict[str, Tool] = {}
    try:
        async with connected(place.mcp, load.headers, load.patience, _context(place)) as client:
            cursor: str | None = None
            while True:
                page = await client.list_tools(cursor=cursor)
                found |= {tool.name: tool for tool in page.tools}
                cursor = page.next_cursor
                if not cursor:
                    return found
    except MCPError as error:
        hint = "if it wants a token, give it with --header"
        raise Failure(f"{place.mcp} does not list its tools: {why_not(error)}; {hint}") from error
    except Exception as error:
        raise Failure(f"{place.mcp} does not list its tools: {why_not(error)}") from error


def _calls(load: Load, tools: Mapping[str, Tool], control: set[str]) -> list[ToolCall]:
    if load.calls:
        return [ToolCall.of(text, tools) for text in load.calls]
    calls = unasked(tools, control)
    if not calls:
        raise Failure(
            "no tool may be called unasked: none says that it only reads and needs no arguments; "
            "name one with --call"
        )
    return calls


def _controls(load: Load, tools: Mapping[str, Tool], metrics: Sequence[Metrics]) -> list[ToolCall]:
    if load.control:
        return [ToolCall.of(text, tools) for text in load.control]
    rows: Mapping[str, Any] = metrics[0].get("tools", {}) if metrics else {}
    names = [name for name, row in rows.items() if row.get("priority") == "control"]
    return [ToolCall(name) for name in names if name in tools and is_harmless(tools[name])]


async def _control(
    place: Place, controls: Sequence[ToolCall], load: Load, seen: Seen, over: asyncio.Event
) -> None:
    """One client that calls the control tools, one after the other and not often, until it is over."""
    if not controls:
        return
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        async with connected(place.mcp, load.headers, load.patience, _context(place)) as client:
            for wanted in itertools.cycle(controls):
                if over.is_set():
                    break
                seen.control.append(await call(client, wanted, load.patience, began))
                await asyncio.sleep(_CONTROL_EVERY_S)
    except Exception as error:
        at = loop.time() - began
        seen.control.append(Record(controls[0].tool, why_not(error), True, at, 0.0))


def _context(place: Place) -> ssl.SSLContext | bool:
    return httpx2.create_ssl_context() if place.mcp.startswith("https:") else False


def _headers(given: Sequence[str] | None) -> dict[str, str]:
    headers: dict[str, str] = {}
    for text in given or ():
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise Failure(f"--header: {text!r} is no header; give 'NAME: VALUE'")
        headers[name.strip()] = value.strip()
    return headers


def _allow_files(connections: int) -> None:
    """Each connection is a file, here and in a server that is started here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * connections + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


# -------------------------------------------------------------------------------------------- what is shown


@contextlib.contextmanager
def _progress(load: Load, *, quiet: bool) -> Generator[tuple[Progress, TaskID]]:
    console = stderr()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}", markup=False),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )
    with progress:
        yield progress, progress.add_task(f"{load.connections} connections", total=load.seconds, said="")


def _tell(progress: Progress, task: TaskID, said: str) -> None:
    progress.update(task, said=said)


async def _tick(progress: Progress, task: TaskID, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        await asyncio.sleep(0.1)
        progress.update(task, completed=min(seconds, loop.time() - began))


def _promises(promises: Sequence[Promise]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, title="promises", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column()
    for each in promises:
        table.add_row(Text(each.verdict, style=_STYLES[each.verdict]), Text(each.name), Text(each.says))
    return table


def _data(
    server: str, load: Load, groups: Mapping[str, Sequence[Record]], promises: Sequence[Promise]
) -> dict[str, Any]:
    return {
        "server": server,
        "connections": load.connections,
        "seconds": load.seconds,
        "kept": not any(each.verdict == "broken" for each in promises),
        "promises": [{"name": each.name, "verdict": each.verdict, "says": each.says} for each in promises],
        "calls": {
            name: {
                "number": len(records),
                "outcomes": outcomes(records),
                "latency_ms": latencies(records),
                "tools": dict(Counter(each.tool for each in records)),
            }
            for name, records in groups.items()
        },
    }
