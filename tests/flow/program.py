"""The server that the tests of this folder talk to: in this process, over stdio or over HTTP.

Its tools wait until they are let go, and write down what happens to them. Both is reached through resources,
which are not limited and consume nothing, so looking at the server does not change what is looked at.

    python -m tests.flow.program JOURNAL     serves stdio; what happens is also appended to the file JOURNAL
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import unquote

from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver.resolve import Elicit, Resolve
from pydantic import AnyHttpUrl, BaseModel

from frontmcp_py import (
    Admission,
    App,
    Call,
    Concurrency,
    FrontMCP,
    GuardError,
    Overloaded,
    RateLimit,
    Throttle,
    Timeout,
    ToolContext,
    ToolError,
)

PATIENCE: Final = 20.0
"""Seconds after which a tool or a reader that waits gives up; no test needs nearly as long."""

SECRET: Final = "the password is swordfish"
"""What the tool that fails says, and nobody should read in production."""

MAX_RESULT_BYTES: Final = 64 * 1024

_YEAR: Final = "366d"


class Case:
    """What happens to the calls of one test, and the gate at which they wait."""

    def __init__(self, journal: Path | None) -> None:
        self.said: list[str] = []
        self._journal = journal
        self._is_open = asyncio.Event()
        self._is_open_to_threads = threading.Event()
        self._news = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def say(self, what: str) -> None:
        """Write down what has happened; from any thread."""
        self.said.append(what)
        if self._journal is not None:
            with self._journal.open("a", encoding="utf-8") as file:
                file.write(f"{what}\n")
        # Whoever begins to wait only now sees what was said.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._news.set)

    async def until(self, what: str, times: int) -> list[str]:
        """Everything that was said, once `what` was said so many times, or nobody says it any more."""
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE / 2):
                while self.said.count(what) < times:
                    self._news.clear()
                    await self._news.wait()
        return list(self.said)

    def let_go(self) -> None:
        """Open the gate, for good."""
        self._is_open.set()
        self._is_open_to_threads.set()

    async def gate(self) -> None:
        """Wait for the gate."""
        await asyncio.wait_for(self._is_open.wait(), PATIENCE)

    def gate_in_thread(self) -> None:
        """Wait for the gate, in a thread."""
        if not self._is_open_to_threads.wait(PATIENCE):
            raise TimeoutError


class Cases(dict[str, Case]):
    """All cases; one begins when somebody first asks for it."""

    def __init__(self, journal: Path | None) -> None:
        self._journal = journal

    def __missing__(self, name: str) -> Case:
        return self.setdefault(name, Case(self._journal))


class Users:
    """Verifies tokens that say who they are: `client:subject:anything`, or `client::anything`."""

    async def verify_token(self, token: str) -> AccessToken | None:
        client, _, rest = token.partition(":")
        subject, _, _ = rest.partition(":")
        if not client:
            return None
        claims = {"iss": "https://issuer.example"}
        return AccessToken(token=token, client_id=client, scopes=[], subject=subject or None, claims=claims)


class Ticket(BaseModel):
    """Something with a schema."""

    number: int
    titles: list[str]


def by_case(call: Call) -> str:
    return str(call.arguments.get("case"))


def by_nothing(call: Call) -> str:
    raise LookupError(SECRET)


def build(*, production: bool = False, auth: bool = False, journal: Path | None = None) -> FrontMCP:
    """A server with every tool that the tests need."""
    cases = Cases(journal)
    app = App("flow")
    for declare in (_limited, _working, _late, _failing, _calling, _identifying, _running_commands):
        declare(app, cases)
    resource = AuthSettings(
        issuer_url=AnyHttpUrl("https://issuer.example"),
        resource_server_url=AnyHttpUrl("http://127.0.0.1/mcp"),
        validate_token_resource=False,
    )
    server = FrontMCP(
        "flow",
        version="1.0",
        apps=[app],
        throttle=Throttle(
            admission=Admission(max_active=48, reserved=8, max_queued=4, queue_timeout=PATIENCE)
        ),
        production=production,
        max_result_bytes=MAX_RESULT_BYTES,
        shutdown_grace=1,
        auth=resource if auth else None,
        token_verifier=Users() if auth else None,
    )
    _observable(server, cases)
    return server


def _observable(server: FrontMCP, cases: Cases) -> None:
    @server.mcp.resource("flow://said/{case}/{what}/{times}")
    async def said(case: str, what: str, times: str) -> str:
        return json.dumps(await cases[case].until(unquote(what), int(times)))

    @server.mcp.resource("flow://let-go/{case}")
    async def let_go(case: str) -> str:
        cases[case].let_go()
        return "null"

    @server.mcp.resource("flow://statistics/{field}/{number}")
    async def statistics(field: str, number: str) -> str:
        """The guard's statistics, once a field of them has a number, or it is too late for that."""
        return json.dumps(await _statistics(server, field, int(number)))

    @server.mcp.resource("flow://end")
    async def end() -> str:
        """The guard's statistics, once all cases have been let go and nothing runs any more."""
        for case in cases.values():
            case.let_go()
        return json.dumps(await _statistics(server, "active", 0))


async def _statistics(server: FrontMCP, field: str, number: int) -> dict[str, Any]:
    """The guard's statistics as data, once a field has a number, or it is too late for that."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE / 2):
            # The guard does not tell when something changes, so this looks again and again.
            while field != "-" and getattr(server.guard.statistics(), field) != number:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    now = server.guard.statistics()
    return {
        "active": now.active,
        "abandoned": now.abandoned,
        "waiting": now.waiting,
        "places": now.places,
        "unknown": now.unknown,
        "live_slots": server.guard._scheduler.live_slots,
        "counts": _counts(now.counts),
        "tools": {tool: _counts(counts) for tool, counts in now.tools.items()},
    }


def _counts(counts: Any) -> dict[str, Any]:
    names = [name for name in counts.__dataclass_fields__ if name not in ("rejected", "would_reject")]
    return {**{name: getattr(counts, name) for name in names}, "rejected": dict(counts.rejected)}


# --------------------------------------------------------------------------------------------------- tools


def _limited(app: App, cases: Cases) -> None:
    """Tools that are refused."""

    @app.tool(rate_limit=RateLimit(1, window=_YEAR, partition_by=by_case), concurrency=None, timeout=5)
    async def once(case: str, number: int = 7) -> Ticket:
        """Gives a ticket."""
        return Ticket(number=number, titles=["ä", "b\n"])

    # Calls of one case share a slot, whatever the tool; what tells them apart is how long they wait for it.
    @app.tool(concurrency=Concurrency(1, key="slot", partition_by=by_case))
    async def knock(case: str) -> Ticket:
        return Ticket(number=1, titles=[])

    @app.tool(concurrency=Concurrency(1, key="slot", partition_by=by_case, queue_timeout="50ms"))
    async def knock_patiently(case: str) -> str:
        return "open"

    @app.tool(concurrency=Concurrency(1, key="slot", partition_by=by_case, queue_timeout=PATIENCE))
    async def enter(case: str) -> str:
        return "inside"

    @app.tool(rate_limit=RateLimit(5, partition_by=by_nothing))
    async def unaccountable(case: str) -> Ticket:
        return Ticket(number=1, titles=[])

    @app.tool
    async def large(size: int) -> Ticket:
        return Ticket(number=size, titles=["x" * size])

    @app.tool
    async def hold(case: str) -> str:
        cases[case].say("started")
        await cases[case].gate()
        cases[case].say("ended")
        return "held"

    @app.tool(priority="control")
    async def restart() -> str:
        return "restarted"


def _listening(case: Case, ctx: ToolContext) -> Case:
    case.say(f"request {ctx.request_id}")
    ctx.signal.add_callback(lambda: case.say(f"aborted: {getattr(ctx.signal.reason, 'code', '?')}"))
    return case


async def _work(case: Case) -> str:
    case.say("started")
    try:
        await case.gate()
    except asyncio.CancelledError:
        case.say("cancelled")
        raise
    finally:
        case.say("over")
    case.say("done")
    return "done"


def _work_in_thread(case: Case) -> str:
    case.say("started")
    try:
        case.gate_in_thread()
    finally:
        case.say("over")
    case.say("done")
    return "done"


def _working(app: App, cases: Cases) -> None:
    """Tools that are cancelled while they run or wait. One of a case runs, the others wait."""
    slot = Concurrency(1, key="slot", partition_by=by_case, queue_timeout=PATIENCE)

    @app.tool(read_only=True, concurrency=slot)
    async def read(case: str, ctx: ToolContext) -> str:
        return await _work(_listening(cases[case], ctx))

    @app.tool(read_only=True, concurrency=slot)
    async def read_inline(case: str) -> str:
        return await _work(cases[case])

    @app.tool(concurrency=slot)
    async def change(case: str, ctx: ToolContext) -> str:
        return await _work(_listening(cases[case], ctx))

    @app.tool(read_only=True, concurrency=slot)
    def grind(case: str, ctx: ToolContext) -> str:
        return _work_in_thread(_listening(cases[case], ctx))

    @app.tool(concurrency=slot, timeout=Timeout(PATIENCE))
    async def wind_up(case: str, ctx: ToolContext) -> str:
        """Ends when it is told to."""
        try:
            async with ctx.signal.scope():
                return await _work(cases[case])
        finally:
            cases[case].say("wound up")


def _late(app: App, cases: Cases) -> None:
    """Tools that take longer than they may."""
    slot = Concurrency(1, key="slot", partition_by=by_case)

    @app.tool(timeout="50ms", concurrency=slot)
    async def late(case: str, ctx: ToolContext) -> Ticket:
        await _work(_listening(cases[case], ctx))
        return Ticket(number=1, titles=[])

    @app.tool(timeout="50ms", concurrency=slot)
    def late_in_thread(case: str, ctx: ToolContext) -> Ticket:
        _work_in_thread(_listening(cases[case], ctx))
        return Ticket(number=1, titles=[])

    @app.tool(timeout=Timeout("100ms", cancel_after=0), concurrency=slot)
    async def late_and_cancelled(case: str, ctx: ToolContext) -> str:
        return await _work(_listening(cases[case], ctx))

    @app.tool(timeout="50ms", concurrency=slot)
    async def late_and_failing(case: str) -> str:
        await cases[case].gate()
        raise ZeroDivisionError(SECRET)

    @app.tool(timeout="200ms")
    async def talkative(case: str, ctx: ToolContext) -> str:
        await ctx.report_progress(1, 2, "early")
        await ctx.log("info", "early")
        await ctx.signal.wait()
        await cases[case].gate()
        await ctx.report_progress(2, 2, "late")
        await ctx.log("info", "late")
        await ctx.session.send_log_message("info", "late")
        cases[case].say("over")
        return "done"

    @app.tool(timeout="250ms", concurrency=slot)
    async def ask(case: str, ctx: ToolContext, hang: bool = False) -> str:
        cases[case].say("asks")
        try:
            answer = await ctx.elicit("Really?", schema=Answer)
        except GuardError as error:
            cases[case].say(f"not told: {error.code}")
            raise
        cases[case].say(f"told: {answer.action}")
        if hang:
            await ctx.signal.wait()
            await cases[case].gate()
            await ask(case, ctx)
        return str(answer.action)

    @app.tool(concurrency=slot)
    async def book(case: str, answer: Annotated[Answer, Resolve(confirmation)]) -> str:
        return f"really: {answer.really}"


class Answer(BaseModel):
    """What a person is asked for."""

    really: bool


async def confirmation(case: str) -> Elicit[Answer]:
    """Asks before the tool runs, in whichever way the protocol has for it."""
    return Elicit("Really?", Answer)


def _failing(app: App, cases: Cases) -> None:
    """Tools that fail."""

    @app.tool
    async def fail(how: str) -> str:
        raise _FAILURES[how]()

    @app.tool
    def fail_in_thread(how: str) -> str:
        raise _FAILURES[how]()


_FAILURES: Final[dict[str, Callable[[], BaseException]]] = {
    "deliberately": lambda: ToolError("No such ticket: 7"),
    "with a bug": lambda: ZeroDivisionError(SECRET),
    "with a timeout of its own": lambda: TimeoutError(SECRET),
    "by cancelling itself": lambda: asyncio.CancelledError(SECRET),
    "by leaving the process": lambda: SystemExit(SECRET),
    "with a refusal": lambda: Overloaded(running=3, waiting=4, retry_after=1.5, limit=5),
}


def _calling(app: App, cases: Cases) -> None:
    """Tools that call other tools."""

    @app.tool(concurrency=Concurrency(1, key="slot", partition_by=by_case))
    async def delegate(case: str, tool: str, arguments: dict[str, Any], ctx: ToolContext) -> dict[str, Any]:
        result = await ctx.call_tool(tool, arguments)
        return result.model_dump(mode="json", by_alias=True, exclude_none=True)

    @app.tool(timeout="250ms")
    async def delegate_soon(case: str, tool: str, arguments: dict[str, Any], ctx: ToolContext) -> str:
        result = await ctx.call_tool(tool, arguments)
        return str(getattr(result.content[0], "text", ""))


def _identifying(app: App, cases: Cases) -> None:
    """Tools that look at who calls."""

    @app.tool
    async def who(ctx: ToolContext) -> dict[str, str | None]:
        return asdict(ctx.caller)

    def hold_for(partition_by: Any) -> None:
        @app.tool(name=f"hold_by_{partition_by}", concurrency=Concurrency(1, partition_by=partition_by))
        async def hold(case: str) -> str:
            return await _work(cases[case])

    for partition_by in ("ip", "session", "user_id"):
        hold_for(partition_by)

    @app.tool(rate_limit=RateLimit(1, window=_YEAR, partition_by="user_id"))
    async def once_for_each_user() -> str:
        return "counted"


def _running_commands(app: App, cases: Cases) -> None:
    """Tools that run a script."""
    slot = Concurrency(1, key="slot", partition_by=by_case)

    async def run(ctx: ToolContext, case: str, script: str, **options: Any) -> dict[str, Any]:
        try:
            return asdict(await ctx.run_process("sh", "-c", script, **options))
        except BaseException as error:
            cases[case].say(type(error).__name__)
            raise
        finally:
            cases[case].say("over")

    @app.tool(concurrency=slot)
    async def shell(case: str, script: str, ctx: ToolContext, timeout: float | None = None) -> dict[str, Any]:
        return await run(ctx, case, script, timeout=timeout, max_output=4096)

    @app.tool(concurrency=slot, timeout=1)
    async def shell_in_time(case: str, script: str, ctx: ToolContext) -> dict[str, Any]:
        return await run(ctx, case, script)

    @app.tool(concurrency=slot, read_only=True)
    async def shell_that_reads(case: str, script: str, ctx: ToolContext) -> dict[str, Any]:
        return await run(ctx, case, script)


# ------------------------------------------------------------------------------------------------- serving


def log_to(path: Path) -> None:
    """Write what the process logs, and what it would say on stderr, to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    _log_plainly()


def _log_plainly() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", force=True)


def serve_http(log: Path, options: dict[str, Any], http: dict[str, Any]) -> None:
    """Serve over HTTP, in a process that was made for it."""
    log_to(log)
    build(**options).run("http", **http)


def main(arguments: Iterable[str]) -> None:
    """Serve over stdio."""
    (journal,) = arguments
    _log_plainly()
    build(journal=Path(journal)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
