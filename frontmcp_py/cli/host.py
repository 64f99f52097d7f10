"""`frontmcp host run`: a model's batch of calls, run as a host runs it, with a timeline."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import httpx2
import typer
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import Tool
from rich.console import Console
from rich.live import Live
from rich.text import Text

from frontmcp_py.cli import target as targets
from frontmcp_py.cli.batch_file import FORMS, STDIN, read_calls, read_results
from frontmcp_py.cli.configured import load
from frontmcp_py.cli.flood import why_not
from frontmcp_py.cli.here import Place
from frontmcp_py.cli.output import Failure, complain, say, say_json, stderr, stdout
from frontmcp_py.cli.target import Target
from frontmcp_py.cli.terminal import Terminal, decline
from frontmcp_py.errors import ConfigurationError
from frontmcp_py.host import Batch, BatchHandle, Host, HostConfig, Operation, Timeline, ToolCall, ToolResult
from frontmcp_py.host.timeline import Drawing
from frontmcp_py.policy import HOST_FAREWELL
from frontmcp_py.server import FrontMCP

# Seconds until a server has to have answered the handshake: one that is a process has to start first.
_HANDSHAKE_S: Final = 30.0
_REDRAWN_EVERY_S: Final = 0.15
# What is shown of a result's text without --full.
_LINES: Final = 10
_CHARACTERS: Final = 300

_STYLES: Final = {"ok": "green", "error": "red", "unknown": "bold red"}
_COLOURS: Final = {"█": "green", "?": "yellow", "r": "cyan", "·": "dim"}

app: typer.Typer = typer.Typer(help="The host's side: run a model's batches of calls.")


@app.callback(invoke_without_command=True)
def host(context: typer.Context) -> None:
    """The host's side: run a model's batches of calls."""
    if context.invoked_subcommand is None:
        say(context.get_help())


@app.command("run")
def run(
    context: typer.Context,
    target: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET",
            help="The server: module:object or path.py:object, which is run here; or its URL; with --stdio, "
            "the command that starts it, after --.",
            show_default=False,
        ),
    ],
    batch: Annotated[
        str,
        typer.Option(metavar="FILE", help=f"The calls, as JSON: {FORMS}. - is stdin.", show_default=False),
    ],
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The host's configuration, as TOML. [default: nothing is limited]"),
    ] = None,
    results: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What --json printed in an earlier run of the batch; only what has no result there is run.",
        ),
    ] = None,
    approve: Annotated[
        bool, typer.Option("--approve", help="Ask on the terminal whether each call may run.")
    ] = False,
    stdio: Annotated[
        bool, typer.Option("--stdio", help="TARGET is a command that serves over stdio.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Print all of every result.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results and the timeline as JSON.")
    ] = False,
) -> None:
    """Run a batch in the order it was written; exit with 1 if a call is not ok."""
    limits = HostConfig.of(config)
    calls = read_calls(batch)
    todo = Batch(calls) if results is None else read_results(results, calls)
    screen = _Screen()
    terminal = Terminal.find(screen.pause, stdin_is_used=batch == STDIN)
    if approve and terminal is None:
        raise Failure("--approve asks on the terminal, and there is none")
    # A server that is loaded here sets up logging, which would tell of every request, and of every failure
    # with its traceback. What failed is seen in the results.
    logging.disable(logging.INFO if context.find_root().params.get("debug") else logging.ERROR)
    report = _show_json if as_json else partial(_show, full=full)
    try:
        server = _server_of(target, stdio=stdio)
        outcome = asyncio.run(_run(server, limits, todo, screen, terminal, report, approve=approve))
    finally:
        logging.disable(logging.NOTSET)
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)
    if any(each.is_error for each in outcome.results):
        raise typer.Exit(1)


# ---------------------------------------------------------------------------------------------------- running


@dataclass(slots=True)
class _Outcome:
    """What came of a batch.

    Attributes:
        calls: What was to run.
        timeline: What was seen of it.
        results: One per call, in the written order.
        kept: What the batch can be resumed from: of a call of which anything was cancelled before it began,
            not the result but those of its other operations.
        signal: What the batch was interrupted by, if it was.
    """

    calls: Sequence[ToolCall]
    timeline: Timeline = field(default_factory=Timeline)
    results: Sequence[ToolResult] = ()
    kept: Sequence[ToolResult] = ()
    signal: int | None = None


_Server: TypeAlias = FrontMCP | StdioServerParameters | Place


def _server_of(words: Sequence[str], *, stdio: bool) -> _Server:
    if stdio:
        return StdioServerParameters(command=words[0], args=list(words[1:]), env=dict(os.environ))
    if len(words) > 1:
        raise Failure(f"{words[1]!r} is one argument too many; give one TARGET, or --stdio -- COMMAND ...")
    if "://" in words[0]:
        return Place.of(words[0])
    return load(Target.of(words[0]), None)


@asynccontextmanager
async def _connected(server: _Server, host: Host) -> AsyncGenerator[Client]:
    """A client of the server.

    Raises:
        Failure: It cannot be connected to.
    """
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                client = await _client_of(server, host, stack)
        except ConfigurationError:
            raise
        except TimeoutError as error:
            raise Failure(f"{_name_of(server)} did not answer within {_HANDSHAKE_S:g} seconds") from error
        except Exception as error:
            raise Failure(f"{_name_of(server)} cannot be connected to: {why_not(error)}") from error
        yield client


async def _client_of(server: _Server, host: Host, stack: AsyncExitStack) -> Client:
    # With the handshake of 2025-11-25 a server may ask while a tool runs, and in its answer; with the later
    # one only in that.
    callback = host.elicitation_callback
    if isinstance(server, FrontMCP):
        return await stack.enter_async_context(server.connect(mode="legacy", elicitation_callback=callback))
    if isinstance(server, StdioServerParameters):
        client = Client(server, mode="legacy", elicitation_callback=callback)
        return await stack.enter_async_context(client)
    # A tool may take as long as it needs; connecting may not.
    http = await stack.enter_async_context(httpx2.AsyncClient(timeout=httpx2.Timeout(None, connect=10)))

    def over_http(mode: Literal["legacy", "auto"]) -> Client:
        transport = streamable_http_client(server.mcp, http_client=http)
        return Client(transport, mode=mode, elicitation_callback=callback)

    try:
        return await stack.enter_async_context(over_http("legacy"))
    except Exception:
        # It may speak the later protocol alone; if it does not, this says what is wrong.
        return await stack.enter_async_context(over_http("auto"))


def _name_of(server: _Server) -> str:
    if isinstance(server, FrontMCP):
        return server.name
    return server.command if isinstance(server, StdioServerParameters) else server.mcp


async def _run(
    server: _Server,
    config: HostConfig,
    batch: Batch,
    screen: _Screen,
    terminal: Terminal | None,
    report: Callable[[_Outcome], None],
    *,
    approve: bool,
) -> _Outcome:
    outcome = _Outcome(batch.calls)
    host = Host(
        config,
        approve=terminal.approve if approve and terminal is not None else None,
        question=decline if terminal is None else terminal.question,
        on_state=outcome.timeline,
    )
    finishing: asyncio.Task[None] | None = None
    with _Telling(outcome, screen, report) as telling:
        try:
            async with _connected(server, host) as client:
                await _learn_tools(host, client)
                # In a task of its own: a connection that breaks cancels the one that has opened it.
                finishing = asyncio.create_task(_finish(host.start(batch, call=client), outcome))
                # Before the connection is closed, which takes as long as a tool that cannot be stopped.
                await telling.when_done(finishing)
        except Exception:
            if finishing is None:
                raise
            await telling.when_done(finishing)
    return outcome


class _Telling:
    """What came of a batch, told once. Stdout is for that alone, whatever tools and their processes print."""

    def __init__(self, outcome: _Outcome, screen: _Screen, report: Callable[[_Outcome], None]) -> None:
        self._outcome = outcome
        self._screen = screen
        self._report = report
        self._diverted = ExitStack()
        self._is_told = False

    def __enter__(self) -> _Telling:
        self._diverted.enter_context(targets.stdout_to_stderr())
        return self

    def __exit__(self, *error: object) -> None:
        self._diverted.close()

    async def when_done(self, finishing: asyncio.Task[None]) -> None:
        """Show how it goes, and then tell, unless it is told."""
        if self._is_told:
            return
        with self._screen.showing(self._outcome.timeline):
            await asyncio.shield(finishing)
        self._diverted.close()
        with _whoever_reads_may_go():
            self._report(self._outcome)
        self._is_told = True
        self._diverted.enter_context(targets.stdout_to_stderr())


@contextmanager
def _whoever_reads_may_go() -> Generator[None]:
    """A reader of stdout that is gone, such as `head`, ends what is written and not the command."""
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):
        # rich makes the second of the first.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


async def _learn_tools(host: Host, client: Client) -> None:
    """Look for tools that the configuration means, and for those that have an argument `ops` themselves."""
    if not host.config.tools:
        return
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        try:
            listed = await client.list_tools(cursor=cursor)
        except MCPError as error:
            complain(f"the server does not tell its tools, so their names cannot be checked: {error}")
            return
        tools += listed.tools
        cursor = listed.next_cursor
        if cursor is None:
            break
    host.advertise(tools)
    for sentence in host.config.strangers([tool.name for tool in tools]).values():
        complain(sentence)


async def _finish(handle: BatchHandle, outcome: _Outcome) -> None:
    """Wait for the batch's results, or for a signal that cancels it."""
    loop = asyncio.get_running_loop()
    parked: set[tuple[int, int | None]] = set()

    def interrupt(number: int) -> None:
        outcome.signal = number
        parked.update(
            (entry.position, _index(entry.call))
            for entry in handle.entries
            if entry.state in ("queued", "awaiting-permission")
        )
        handle.cancel("The user has interrupted it.")
        complain("interrupted; once more ends it at once")
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    try:
        results = await handle.results()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    if outcome.signal is not None:
        await handle.ended(within=HOST_FAREWELL)
    unfinished = {position for position, _ in parked}
    outcome.results = results
    outcome.kept = [each for place, each in enumerate(results) if place not in unfinished] + [
        entry.result
        for entry in handle.entries
        if entry.result is not None
        and entry.position in unfinished
        and (entry.position, _index(entry.call)) not in parked
    ]


def _index(call: ToolCall) -> int | None:
    return call.index if isinstance(call, Operation) else None


# -------------------------------------------------------------------------------------------- what is shown


class _Screen:
    """The timeline in a terminal, redrawn while the batch runs. Elsewhere nothing is drawn."""

    def __init__(self) -> None:
        self._console = stderr()
        self._live: Live | None = None
        self._timeline: Timeline | None = None
        self._is_paused = False

    @contextmanager
    def showing(self, timeline: Timeline) -> Generator[None]:
        """Draw it in this block."""
        if not self._console.is_terminal:
            yield
            return
        self._timeline = timeline
        drawing = asyncio.get_running_loop().create_task(self._redraw())
        try:
            yield
        finally:
            drawing.cancel()
            self._stop()

    @contextmanager
    def pause(self) -> Generator[None]:
        """Draw nothing in this block: somebody is asked."""
        self._stop()
        self._is_paused = True
        try:
            yield
        finally:
            # Not drawn at once: the next question may be due.
            self._is_paused = False

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    async def _redraw(self) -> None:
        loop = asyncio.get_running_loop()
        took = 0.0
        while True:
            # A server that runs in this process is to have most of its time.
            await asyncio.sleep(max(_REDRAWN_EVERY_S, 10 * took))
            if self._is_paused:
                continue
            began = loop.time()
            if self._live is None:
                self._live = Live(console=self._console, transient=True, auto_refresh=False)
                self._live.start()
            self._live.update(self._picture(), refresh=True)
            took = loop.time() - began

    def _picture(self) -> Text:
        if self._timeline is None:
            return Text()
        return Text("\n").join(_window(self._timeline, self._console.width - 1, self._console.height - 2))


def _window(timeline: Timeline, width: int, height: int) -> list[Text]:
    """As many lines as fit: from the first row that is not completed on."""
    # Below the rows stand how many are left out, the axis, and a legend of a line or more.
    footer = len(timeline.draw(width, 0).footer)
    drawing = timeline.draw(width, max(1, height - footer - 1))
    lines = _coloured(drawing)
    if drawing.before or drawing.after:
        left = Text(f"{drawing.before} before, {drawing.after} after", style="dim")
        lines.insert(len(drawing.lines), left)
    return lines


def _coloured(drawing: Drawing) -> list[Text]:
    lines: list[Text] = []
    for line in drawing.lines:
        text = Text(f"{line.label} ")
        for mark, same in groupby(line.bar):
            text.append("".join(same), _COLOURS.get(mark))
        lines.append(text.append(f" {line.took}"))
    return [*lines, *(Text(each, style="dim") for each in drawing.footer)]


def _show(outcome: _Outcome, *, full: bool) -> None:
    console = stdout()
    if not outcome.results:
        say("no calls")
        return
    for line in _coloured(outcome.timeline.draw(console.width)):
        _print(console, line)
    for call, result in zip(outcome.calls, outcome.results, strict=True):
        say("")
        label, style = _printable(call.label), _STYLES.get(result.status, "yellow")
        _print(console, Text(f"{label}: ").append(result.status, style))
        for text in _shortened(result.text, full=full):
            say(f"  {text}")


def _show_json(outcome: _Outcome) -> None:
    say_json(
        {
            "results": [each.as_dict() for each in outcome.kept],
            "timeline": [row.as_dict() for row in outcome.timeline.rows],
        }
    )


def _shortened(text: str, *, full: bool) -> list[str]:
    """The lines of a result, harmless for a terminal, and cut."""
    lines = [_printable(line) for line in text.splitlines()]
    if full:
        return lines
    shown = [line if len(line) <= _CHARACTERS else f"{line[:_CHARACTERS]}…" for line in lines[:_LINES]]
    if len(lines) > _LINES:
        shown.append(f"… {len(lines) - _LINES} more lines; --full prints all")
    return shown


def _printable(line: str) -> str:
    return "".join(
        mark if mark.isprintable() or mark == "\t" else mark.encode("unicode_escape").decode("ascii")
        for mark in line
    )


def _print(console: Console, line: Text) -> None:
    console.print(line, no_wrap=True, overflow="ignore", crop=False)
