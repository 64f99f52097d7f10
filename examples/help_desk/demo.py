"""What the help desk promises, tried over real HTTP: who ran when, who waited, and who was refused and why.

    python examples/help_desk/demo.py                         exits with 1 if a promise was broken
    python examples/help_desk/demo.py --serve [--port 8000]   and then stays up, for clients of your own

It starts `server.py` three times, on free ports of this machine: for users who sign in, for everybody, and
without limits. Each story below calls their tools as any client would and returns what it saw.
"""

import argparse
import asyncio
import io
import json
import math
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import httpx2
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, TextContent

try:
    from rich.console import Console, Group, RenderableType
    from rich.padding import Padding
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError:
    sys.exit("demo: the tables are drawn by rich, which is not installed; it comes with the extra [cli]")

SERVER = Path(__file__).resolve().with_name("server.py")
HOUR, MINUTE = 3600, 60
MERGES = {
    "at once": "merge_customers",
    "in turn": "merge_customers_in_turn",
    "hastily": "merge_customers_hastily",
}
T = TypeVar("T")


class CannotGoOn(Exception):
    """What keeps the demo from running, as one sentence."""


# -- the servers: processes of their own -------------------------------------------------------------------


class Server:
    """`server.py` over HTTP, in a process that begins and ends with this context."""

    def __init__(self, port: int, *options: str) -> None:
        self.url = f"http://127.0.0.1:{port}/mcp"
        self._command = [sys.executable, str(SERVER), "--http", str(port), *options]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __aexit__

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()
        self._log.close()

    async def ready(self) -> None:
        """Wait until it answers."""
        healthz = self.url.replace("/mcp", "/healthz")
        async with httpx2.AsyncClient(trust_env=False, timeout=5) as http:
            for _ in range(600):
                if self._process.returncode is not None:
                    raise CannotGoOn(self.said().strip().rpartition("\n")[2])
                with suppress(httpx2.TransportError):
                    if (await http.get(healthz)).is_success:
                        return
                await asyncio.sleep(0.1)
        raise CannotGoOn(f"the server does not answer at {healthz}")

    async def restart(self) -> None:
        """End it and start it anew: with it go its counts."""
        await self._stop()
        await self._start()
        await self.ready()

    async def ended(self) -> None:
        """Wait until it ends by itself."""
        await self._process.wait()
        raise CannotGoOn("the server has ended")

    def said(self) -> str:
        """What it has written to its log."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    async def _start(self) -> None:
        # Settings of the surroundings would change what is shown. A session of its own keeps Ctrl-C from the
        # server, so that it is ended once, by __aexit__.
        surroundings = {name: value for name, value in os.environ.items() if not name.startswith("FRONTMCP_")}
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=surroundings,
            start_new_session=True,
        )

    async def _stop(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), timeout=5)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def free_ports(*wanted: int) -> list[int]:
    """These ports if nobody listens there; for 0 any that is free."""
    with ExitStack() as stack:
        found = []
        for port in wanted:
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError as error:
                problem = os.strerror(error.errno or 0)
                raise CannotGoOn(f"port {port}: {problem}; give another one with --port") from None
            found.append(int(listener.getsockname()[1]))
        return found


@asynccontextmanager
async def connected(server: Server, token: str | None = None) -> AsyncIterator[Client]:
    """A client of the SDK, connected to a server."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # trust_env=False: what goes to this machine needs no proxy.
    async with (
        httpx2.AsyncClient(headers=headers, trust_env=False, timeout=30) as http,
        Client(streamable_http_client(server.url, http_client=http)) as client,
    ):
        yield client


# -- what is seen of a call --------------------------------------------------------------------------------


@dataclass
class Called:
    """One call as its client saw it, and its work if the server has a log of it. Times are epoch seconds."""

    label: str
    tool: str
    arguments: dict[str, str]
    sent: float
    answered: float
    result: CallToolResult
    began: float | None = None
    ended: float | None = None

    @property
    def code(self) -> str:
        """`ok`, or the code of the refusal."""
        meta: dict[str, Any] = dict(self.result.meta or {})
        return str(meta.get("code", "failed")) if self.result.is_error else "ok"

    @property
    def waited(self) -> float:
        """Seconds that it stood in a queue, at the only tool that has one."""
        if self.tool != MERGES["in turn"]:
            return 0.0
        seconds = (self.began or self.answered) - self.sent
        return seconds if seconds > 0.03 else 0.0  # what is shorter was the way there

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.result.content if isinstance(block, TextContent))


async def call(client: Client, label: str, tool: str, *, after: float = 0.0, **arguments: str) -> Called:
    """Call a tool, `after` seconds from now."""
    await asyncio.sleep(after)
    sent = time.time()
    result = await client.call_tool(tool, arguments)
    return Called(label, tool, arguments, sent, time.time(), result)


async def merge(client: Client, how: str, source: str, *, after: float = 0.0) -> Called:
    tool = MERGES[how]
    return await call(client, f"{source}, {how}", tool, after=after, source=source, target="C-1")


async def ask(client: Client, tool: str) -> dict[str, Any]:
    """What the tools that keep a log say."""
    result = await client.call_tool(tool, {})
    log: dict[str, Any] | None = result.structured_content
    if log is None:
        raise CannotGoOn(f"{tool} gives no answer: {result.content}")
    return log


async def look_up_merges(client: Client, calls: Sequence[Called]) -> int:
    """Note when these merges really ran; gives how many merges ever ran at once."""
    log = await ask(client, "merge_log")
    for called in calls:
        for each in log["merges"]:
            if each["source"] == called.arguments.get("source"):
                called.began, called.ended = each["began"], each["ended"]
    return int(log["most_at_once"])


async def undivided(
    window: int,
    series: Callable[[], Awaitable[T]],
    *servers: Server,
    now: Callable[[], float] = time.time,
) -> T:
    """Make a series of calls within one window of a rate limit.

    Windows line up with the clock. Of a series that straddles a full hour the third export would rightly be
    let through, since a new hour has begun. So the last seconds of a window are waited out; and if the window
    has turned all the same, on a machine that was busy elsewhere, the series is made again, on servers that
    have counted nothing yet.
    """
    while True:
        left = window - now() % window
        if left < 5:
            print(
                f"(waiting {left:.1f} s for the next window, so that all calls of this story fall into one)\n"
            )
            await asyncio.sleep(left + 0.1)
        before = now() // window
        seen = await series()
        if now() // window == before:
            return seen
        for server in servers:
            await server.restart()


# -- the stories -------------------------------------------------------------------------------------------


@dataclass
class Servers:
    everybody: Server
    signed_in: Server
    unlimited: Server


@dataclass
class Story:
    """What a story shows: a picture, and every promise with whether it was kept."""

    title: str
    tool: str
    picture: RenderableType
    promises: list[tuple[str, bool]] = field(default_factory=list)

    def promise(self, what: str, kept: bool) -> None:
        self.promises.append((what, kept))

    @property
    def kept(self) -> int:
        return sum(kept for _, kept in self.promises)

    @property
    def is_kept(self) -> bool:
        return self.kept == len(self.promises)


async def exports(servers: Servers) -> Story:
    async def series() -> tuple[dict[str, list[Called]], int]:
        calls: dict[str, list[Called]] = {}
        for user in ("ada", "grace"):
            async with connected(servers.signed_in, f"token-of-{user}") as client:
                calls[f"{user}, signed in"] = [await call(client, user, "export_tickets") for _ in range(3)]
        calls["anonymous, 3 connections"] = strangers = []
        for _ in range(3):
            async with connected(servers.everybody) as client:
                strangers.append(await call(client, "anonymous", "export_tickets"))
        async with httpx2.AsyncClient(trust_env=False) as http:
            return calls, (await http.post(servers.signed_in.url)).status_code

    calls, status = await undivided(HOUR, series, servers.signed_in, servers.everybody)
    table = Table("caller", "1st", "2nd", "3rd", "what the third was told", box=None)
    for caller, three in calls.items():
        table.add_row(caller, *(verdict(each) for each in three), three[2].text)
    table.add_row("no token, where one is asked for", str(status), "", "", "turned away by the SDK")

    story = Story("Two exports an hour, counted for each user", "export_tickets", table)
    ada, grace, anonymous = (tuple(each.code for each in three) for three in calls.values())
    two = ("ok", "ok", "RATE_LIMIT_EXCEEDED")
    story.promise("ada and grace get two exports each, and the third is refused", ada == grace == two)
    story.promise("all anonymous callers share two, whatever connection they come by", anonymous == two)
    refusal = calls["ada, signed in"][2]
    wait = int((refusal.result.meta or {}).get("retryAfterMs", 0))
    says = f"Rate limit exceeded. Retry after {max(1, math.ceil(wait / 1000))} seconds"
    story.promise(
        f"the refusal says how long this hour still is: {wait} ms, in seconds in its text",
        refusal.text == says and 0 < wait <= HOUR * 1000,
    )
    story.promise("nobody gets in without a token where sign-in is required (401)", status == 401)
    return story


async def one_at_a_time(servers: Servers) -> Story:
    async with connected(servers.everybody) as client:
        calls = await asyncio.gather(
            merge(client, "at once", "C-2"),
            merge(client, "at once", "C-3", after=0.1),
        )
        most = await look_up_merges(client, calls)
    story = Story("One merge at a time", "merge_customers", time_line(calls))
    story.promise(
        "the second merge is refused at once while the first runs",
        [each.code for each in calls] == ["ok", "CONCURRENCY_LIMIT"],
    )
    story.promise(f"never two merges at once (most: {most})", most == 1)
    return story


async def in_turn(servers: Servers) -> Story:
    async with connected(servers.everybody) as client:
        calls = await asyncio.gather(
            *(merge(client, "in turn", f"C-{4 + nth}", after=nth * 0.05) for nth in range(4))
        )
        most = await look_up_merges(client, calls)
    story = Story("One merge at a time, with a queue", "merge_customers_in_turn", time_line(calls))
    codes = [each.code for each in calls]
    story.promise("merges that find the slot taken wait, and run in their turn", codes[:2] == ["ok", "ok"])
    story.promise(
        "who has waited for one second without a turn is told so",
        "QUEUE_TIMEOUT" in codes and set(codes) == {"ok", "QUEUE_TIMEOUT"},
    )
    story.promise(f"never two merges at once (most: {most})", most == 1)
    return story


async def slow_crm(servers: Servers) -> Story:
    async with connected(servers.everybody) as client:
        calls = await asyncio.gather(
            *(call(client, who, "lookup_customer", customer=who) for who in ("C-1", "C-9"))
        )
    story = Story("A deadline for a CRM that is sometimes slow", "lookup_customer", time_line(calls))
    quick, slow = calls
    story.promise("C-1 is answered in time", quick.code == "ok")
    story.promise("C-9 is given up on after half a second", slow.code == "EXECUTION_TIMEOUT")
    return story


async def call_not_work(servers: Servers) -> Story:
    async with connected(servers.everybody) as client:
        hasty = await merge(client, "hastily", "C-10")
        calls = [
            hasty,
            *await asyncio.gather(
                merge(client, "at once", "C-11"),
                merge(client, "in turn", "C-12"),
            ),
        ]
        most = await look_up_merges(client, calls)
    story = Story("A timeout ends the call, not the work", "merge_customers_hastily", time_line(calls))
    _, refused, patient = calls
    story.promise("the call is answered when its 200 ms are over", hasty.code == "EXECUTION_TIMEOUT")
    story.promise(
        "the merge goes on all the same, to its end",
        hasty.ended is not None and hasty.ended > hasty.answered,
    )
    story.promise(
        "meanwhile its slot is taken: the next merge is refused", refused.code == "CONCURRENCY_LIMIT"
    )
    story.promise(
        "a merge that waits runs when the work has really ended",
        patient.code == "ok" and (patient.began or 0) >= (hasty.ended or math.inf),
    )
    story.promise(f"never two merges at once (most: {most})", most == 1)
    return story


NEVER_BEGAN = {"began": None, "ended": None, "pages_read": 0, "stopped_by": None}


async def listening(servers: Servers) -> Story:
    tools = {"listens": "export_archive", "does not listen": "export_archive_regardless"}
    async with connected(servers.everybody) as client:
        calls = await asyncio.gather(*(call(client, who, tool) for who, tool in tools.items()))
        records: dict[str, Any] = {}
        for _ in range(100):
            stats = (await ask(client, "export_stats"))["result"]
            records = dict.fromkeys(tools.values(), NEVER_BEGAN) | {each["tool"]: each for each in stats}
            if all(each["ended"] for each in records.values()):
                break
            await asyncio.sleep(0.2)
    for called in calls:
        record = records[tools[called.label]]
        called.began, called.ended = record["began"], record["ended"]
    story = Story("Work that listens to its signal stops", "export_archive", time_line(calls))
    stops, regardless = (records[tool] for tool in tools.values())
    story.promise("both calls time out after 350 ms", all(each.code == "EXECUTION_TIMEOUT" for each in calls))
    story.promise(
        f"the export that listens stops: it has read {stops['pages_read']} of 10 pages",
        stops["pages_read"] < 10 and stops["stopped_by"] == calls[0].text,
    )
    story.promise(
        f"the one that does not goes on for nobody: it has read {regardless['pages_read']} of 10 pages",
        regardless["pages_read"] == 10,
    )
    return story


async def defaults(servers: Servers) -> Story:
    async def series() -> list[Called]:
        async with connected(servers.everybody) as client:
            return [await call(client, "list_tickets", "list_tickets") for _ in range(61)]

    async with connected(servers.everybody) as client:
        calls = await asyncio.gather(
            *(
                call(client, f"look-up {nth}", "lookup_customer", after=nth / 50, customer="C-9")
                for nth in range(1, 7)
            )
        )
    often = await undivided(MINUTE, series, servers.everybody)
    story = Story("Limits for every tool that has none of its own", "list_tickets", time_line(calls))
    codes = [each.code for each in calls]
    story.promise(
        "five look-ups at once, though lookup_customer itself says only how long one may take",
        codes.count("EXECUTION_TIMEOUT") == 5 and codes.count("CONCURRENCY_LIMIT") == 1,
    )
    story.promise(
        f"60 calls of list_tickets a minute; then: {often[60].text}",
        [each.code for each in often] == ["ok"] * 60 + ["RATE_LIMIT_EXCEEDED"],
    )
    async with connected(servers.everybody) as client:
        limits = {
            each.name: (each.meta or {})["frontmcp/limits"] for each in (await client.list_tools()).tools
        }
    story.promise(
        "30 seconds for a tool that says nothing, its own 500 ms for lookup_customer",
        (limits["list_tickets"]["timeoutMs"], limits["lookup_customer"]["timeoutMs"]) == (30_000, 500),
    )
    return story


async def limits_off(servers: Servers) -> Story:
    await servers.unlimited.ready()
    async with connected(servers.unlimited) as client:
        calls = await asyncio.gather(
            *(call(client, f"export {nth}", "export_tickets", after=nth / 20) for nth in range(1, 5)),
            merge(client, "at once", "C-2"),
            merge(client, "at once", "C-3"),
            call(client, "archive", "export_archive"),
        )
        most = await look_up_merges(client, calls)
        said = " ".join(each.description or "" for each in (await client.list_tools()).tools)
    story = Story("Limits off, for a test run on your own machine", "", time_line(calls))
    story.promise("four exports in an hour", [each.code for each in calls[:4]] == ["ok"] * 4)
    story.promise(f"two merges at once (most: {most})", most == 2)
    story.promise("a tool's own timeout stays", calls[-1].code == "EXECUTION_TIMEOUT")
    story.promise("the descriptions promise nothing that is not enforced", "at most" not in said)
    story.promise("the log warns of it", "the throttle is off" in servers.unlimited.said())
    return story


STORIES = (exports, one_at_a_time, in_turn, slow_crm, call_not_work, listening, defaults, limits_off)


# -- the pictures ------------------------------------------------------------------------------------------

BAR = 30
WAITS, RUNS, RUNS_ON, REFUSED = "░", "█", "▒", "×"


def verdict(called: Called) -> Text:
    return Text("ok", "green") if called.code == "ok" else Text("refused", "red")


def time_line(calls: Sequence[Called]) -> Table:
    """A row for each call: when it waited, ran, and ran on after it had been answered."""
    start = min(each.sent for each in calls)
    span = max(max(each.answered, each.ended or 0) for each in calls) - start
    table = Table(box=None)
    table.add_column("call", no_wrap=True)
    table.add_column(axis(span), no_wrap=True)
    table.add_column("what its client got")
    for each in calls:
        outcome = Text(outcome_of(each), "green" if each.code == "ok" else "red")
        table.add_row(each.label, bar(each, start, span), outcome)
    return table


def axis(span: float) -> Text:
    step = next((each for each in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if span / each <= 5), span)
    marks = ""
    for nth in range(math.ceil(span / step)):
        marks = f"{marks:<{int(nth * step / span * BAR)}}{round(nth * step * 1000)} "
    return Text(f"{marks}ms".ljust(BAR), "dim")


def bar(called: Called, start: float, span: float) -> Text:
    def cell(moment: float) -> int:
        return min(BAR - 1, int((moment - start) / span * BAR))

    ran = called.began is not None or called.code in ("ok", "EXECUTION_TIMEOUT")
    began = (called.began or called.sent) if ran else called.answered
    ended = called.ended or called.answered
    text = Text(" " * cell(called.sent))
    text.append((WAITS if called.waited else " ") * (cell(began) - cell(called.sent)), "yellow")
    if not ran:
        return text.append(REFUSED, "bold red")
    text.append(RUNS * max(1, cell(min(ended, called.answered)) - cell(began)), "green")
    return text.append(RUNS_ON * (cell(ended) - cell(called.answered)), "red")


def outcome_of(called: Called) -> str:
    if called.code != "ok":
        return called.text
    turn = f", {called.waited * 1000:.0f} of them for its turn" if called.waited else ""
    return f"ok after {(called.answered - called.sent) * 1000:.0f} ms{turn}"


async def what_models_are_told(server: Server) -> dict[str, str]:
    """The limits in the tools' descriptions: nobody wrote them there."""
    async with connected(server) as client:
        tools = (await client.list_tools()).tools
    return {each.name: (each.description or "").partition("Limits: ")[2] for each in tools}


def show(console: Console, number: int, story: Story, told: str) -> None:
    console.print(Rule(Text(f"{number}  {story.title}", "bold"), align="left", style="dim"))
    if told:
        console.print(Padding.indent(Text(f"{story.tool} tells the model: {told}", "italic"), 1))
    console.print()
    console.print(story.picture)
    console.print()
    promises = Table.grid(padding=(0, 1))
    for what, kept in story.promises:
        promises.add_row("", Text("✓", "green") if kept else Text("✗ BROKEN", "bold red"), what)
    console.print(promises)
    console.print()


def summary(stories: Sequence[Story], seconds: float) -> RenderableType:
    table = Table("", "story", "promises kept", box=None)
    for number, each in enumerate(stories, start=1):
        style = "green" if each.is_kept else "bold red"
        table.add_row(str(number), each.title, Text(f"{each.kept} of {len(each.promises)}", style))
    promises, kept = sum(len(each.promises) for each in stories), sum(each.kept for each in stories)
    if kept == promises:
        outcome = Text(f"All {promises} promises were kept, in {seconds:.1f} s.", "bold green")
    else:
        outcome = Text(f"{promises - kept} of {promises} promises were broken.", "bold red")
    return Group(table, "", Padding.indent(outcome, 1))


def how_to_connect(server: Server) -> str:
    """What to type elsewhere; each line works as it stands."""
    desktop: dict[str, Any] = {"command": sys.executable, "args": [str(SERVER)]}
    if "PYTHONPATH" in os.environ:  # the package is not installed, but found by that
        desktop["env"] = {"PYTHONPATH": str(SERVER.parents[2])}
    version = "2026-07-28"
    meta = "io.modelcontextprotocol"
    request = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {
            "name": "lookup_customer",
            "arguments": {"customer": "C-9"},
            "_meta": {f"{meta}/protocolVersion": version, f"{meta}/clientCapabilities": {}},
        },
    }
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": version,
        "Mcp-Method": "tools/call",
        "Mcp-Name": "lookup_customer",
    }
    curl = ["curl", *(part for each in headers.items() for part in ("-H", ": ".join(each)))]
    return f"""\
The help desk is open to everybody at {server.url}, and has counted nothing yet.

Claude Desktop starts one of its own, over stdio; in claude_desktop_config.json:
{json.dumps({"mcpServers": {"help-desk": desktop}}, indent=2)}

MCP Inspector:
npx @modelcontextprotocol/inspector --transport http --server-url {server.url}

curl (try it with C-1, too):
{shlex.join(curl)} \\
  -d {shlex.quote(json.dumps(request))} {server.url}

Ctrl-C closes it."""


# -- all of it ---------------------------------------------------------------------------------------------


async def demo(console: Console, port: int, serve: bool) -> int:
    began = time.monotonic()
    ports = free_ports(port, 0, 0)
    async with Server(ports[0]) as everybody:
        async with Server(ports[1], "--sign-in") as signed_in:
            with console.status("The help desk opens …"):
                await asyncio.gather(everybody.ready(), signed_in.ready())
            # This one is needed last, and gets ready while the first stories are told.
            async with Server(ports[2], "--no-limits") as unlimited:
                stories = await tell_all(console, Servers(everybody, signed_in, unlimited))
        console.print(summary(stories, time.monotonic() - began))
        if serve:
            with console.status("It opens anew, for you …"):
                await everybody.restart()
            print(how_to_connect(everybody), flush=True)
            with suppress(asyncio.CancelledError):
                await everybody.ended()
            print("\nThe help desk has closed.")
    return 0 if all(each.is_kept for each in stories) else 1


async def tell_all(console: Console, servers: Servers) -> list[Story]:
    told = await what_models_are_told(servers.everybody)
    console.print(f" {WAITS} waits   {RUNS} runs   {RUNS_ON} runs on after its answer   {REFUSED} refused\n")
    stories: list[Story] = []
    for number, tell in enumerate(STORIES, start=1):
        with console.status("…"):
            try:
                story = await tell(servers)
            except Exception as problem:
                story = Story(tell.__name__, "", Text(f"{type(problem).__name__}: {problem}"))
                story.promise("the story comes to its end", False)
        show(console, number, story, told.get(story.tool, ""))
        stories.append(story)
    return stories


class OneSentence(argparse.ArgumentParser):
    """Says what is wrong with its arguments, and no more."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"demo: {message}\n")


def port_number(text: str) -> int:
    if not re.fullmatch("[0-9]{4,5}", text) or not 1024 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give a number from 1024 to 65535")
    return int(text)


async def until_told_to_stop(work: Awaitable[int]) -> int:
    """Ctrl-C and SIGTERM end the servers before this process."""
    task = asyncio.ensure_future(work)
    for each in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(each, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return 130


def main() -> int:
    parser = OneSentence(description="Try what the help desk promises, over real HTTP.", allow_abbrev=False)
    parser.add_argument("--serve", action="store_true", help="stay up afterwards, for clients of your own")
    parser.add_argument("--port", type=port_number, help="where to stay up (default: 8000)")
    options = parser.parse_args()
    port = options.port or (8000 if options.serve else 0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where a terminal has no such characters
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    try:
        return asyncio.run(until_told_to_stop(demo(console, port, options.serve)))
    except CannotGoOn as problem:
        print(f"demo: {problem}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
