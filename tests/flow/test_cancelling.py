"""What becomes of a call whose caller no longer wants it, as far as each transport lets a server notice.

`NOTICED` says which those are. Where nothing is noticed a call runs to its end, or to its time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx2
import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError

from tests.flow.wires import (
    ALL,
    HTTP,
    IN_PROCESS,
    STDIO,
    Kind,
    Server,
    Servers,
    Wire,
    http_client,
    over,
    text,
)

GIVES_UP: Final = "its caller gives up"
TIMES_OUT: Final = "its client's read timeout passes"
NOTIFIES: Final = "notifications/cancelled arrives"
HANGS_UP: Final = "the connection breaks"
LEAVES: Final = "the session is ended"

# A caller in this process is the one that runs the call, so it alone can end it.
_CALLER: Final = frozenset({GIVES_UP, TIMES_OUT})
_EVERYTHING: Final = frozenset({GIVES_UP, TIMES_OUT, NOTIFIES, HANGS_UP, LEAVES})
# A client of the protocol of 2026-07-28 cancels by breaking the connection, over HTTP.
_CONNECTION: Final = frozenset({GIVES_UP, TIMES_OUT, HANGS_UP})
# A client of the older one says so; that the connection breaks is no cancellation.
_MESSAGES: Final = frozenset({GIVES_UP, TIMES_OUT, NOTIFIES, LEAVES})

NOTICED: Final = {
    "inprocess-2026": _CALLER,
    "inprocess-2025": _EVERYTHING,
    "stdio-2026": _EVERYTHING,
    "stdio-2025": _EVERYTHING,
    "sse-2026": _CONNECTION,
    "sse-2025": _MESSAGES,
    # An answer that is one document: nobody watches the connection until it is written.
    "json-2026": frozenset[str](),
    "json-2025": _MESSAGES,
    # A request that is not there for any other request cannot be cancelled by one.
    "stateless-sse-2025": frozenset({HANGS_UP}),
    "stateless-json-2025": frozenset[str](),
}


with_notifications = over([kind for kind in ALL if kind.transport != "in-process" or not kind.is_modern])
"""For tests of what a client says: in this process one of 2026-07-28 says nothing."""


def notices(kind: Kind, event: str) -> bool:
    return event in NOTICED[kind.name]


async def give_up(call: asyncio.Task[Any]) -> None:
    """Be done with a call that has no answer yet, or never has one."""
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call


async def notify(wire: Wire, request_id: str) -> None:
    """Send the cancellation of a request, whatever the protocol of the connection thinks of it."""
    if wire.kind.transport == "http":
        async with http_client() as client:
            assert (await client.send(wire.http.cancel(request_id))).status_code == 202
    else:
        params = types.CancelledNotificationParams(request_id=int(request_id))
        await wire.client.session.send_notification(types.CancelledNotification(params=params))


async def id_of(wire: Wire, case: str) -> str:
    """The id of the request that a tool of this case was called by."""
    said = await wire.said(case, "started")
    return next(entry for entry in said if entry.startswith("request ")).removeprefix("request ")


async def assert_cancelled(wire: Wire, case: str, tool: str) -> None:
    """A call of `tool` that runs has been cancelled: what that does depends on the tool."""
    if tool.startswith("read"):
        said = await wire.said(case, "over")
        assert "cancelled" in said
        assert ("aborted: CANCELLED" in said) == (tool == "read")
    elif tool == "wind_up":
        assert "done" not in await wire.said(case, "wound up")
    else:
        # Stopping halfway can be worse than finishing, and a thread can only be told.
        said = await wire.said(case, "aborted: CANCELLED")
        assert "over" not in said
        await assert_its_slot_is_taken(wire, case)
        await wire.let_go(case)
        assert "cancelled" not in await wire.said(case, "done")
    await assert_its_slot_is_free(wire, case)


async def assert_unharmed(wire: Wire, case: str) -> None:
    """A call that runs has noticed nothing, and goes on."""
    await assert_its_slot_is_taken(wire, case)
    await wire.let_go(case)
    said = await wire.said(case, "done")
    assert not {"cancelled", "aborted: CANCELLED"} & set(said)
    await assert_its_slot_is_free(wire, case)


async def assert_its_slot_is_taken(wire: Wire, case: str) -> None:
    assert ((await wire.call("knock", case=case)).meta or {})["code"] == "CONCURRENCY_LIMIT"


async def assert_its_slot_is_free(wire: Wire, case: str) -> None:
    assert text(await wire.call("enter", case=case)) == "inside"


async def assert_as_noticed(wire: Wire, case: str, tool: str, event: str) -> None:
    if notices(wire.kind, event):
        await assert_cancelled(wire, case, tool)
    else:
        await assert_unharmed(wire, case)


# --------------------------------------------------------------------------------------- calls that run


@pytest.mark.parametrize("tool", ["read", "read_inline", "change", "grind", "wind_up"])
async def test_a_running_call_whose_caller_gives_up(wire: Wire, case: str, tool: str) -> None:
    call = wire.start(tool, case=case)
    await wire.said(case, "started")
    before = (await wire.statistics())["tools"][tool]["cancelled"]
    await give_up(call)
    await assert_as_noticed(wire, case, tool, GIVES_UP)
    after = (await wire.statistics())["tools"][tool]["cancelled"]
    assert after == before + notices(wire.kind, GIVES_UP)


@over([kind for kind in ALL if notices(kind, GIVES_UP)])
async def test_a_call_that_a_cancelled_call_has_made(wire: Wire, case: str) -> None:
    inner = f"{case}-inner"
    call = wire.start("delegate", case=case, tool="read", arguments={"case": inner})
    await wire.said(inner, "started")
    await give_up(call)
    # The outer tool is told and may finish; the inner one changes nothing.
    await assert_cancelled(wire, inner, "read")
    await assert_its_slot_is_free(wire, case)


async def test_a_running_call_whose_client_has_waited_long_enough(wire: Wire, case: str) -> None:
    cases = await start_and_time_out(wire, case, ("read", "change"))
    for tool, its_case in cases.items():
        await assert_as_noticed(wire, its_case, tool, TIMES_OUT)


async def start_and_time_out(wire: Wire, case: str, tools: tuple[str, ...]) -> dict[str, str]:
    """Calls that have started when their client stops waiting; by tool, their cases."""
    # How long the server takes to start them nobody knows, only that it is not ten seconds.
    for seconds in (0.15, 1.0, 10.0):
        cases = {tool: f"{case}-{tool}-{seconds}" for tool in tools}
        answers = await asyncio.gather(
            *(
                wire.client.call_tool(tool, {"case": its_case}, read_timeout_seconds=seconds)
                for tool, its_case in cases.items()
            ),
            return_exceptions=True,
        )
        assert [getattr(answer, "code", answer) for answer in answers] == [types.REQUEST_TIMEOUT] * len(tools)
        if all([("started" in await wire.said(its_case)) for its_case in cases.values()]):
            return cases
        for its_case in cases.values():
            await wire.let_go(its_case)
    raise AssertionError("calls that do not start within ten seconds")


@pytest.mark.parametrize("tool", ["read", "change", "grind"])
@with_notifications
async def test_a_running_call_that_a_notification_cancels(wire: Wire, case: str, tool: str) -> None:
    call = wire.start(tool, case=case)
    await notify(wire, await id_of(wire, case))
    await assert_as_noticed(wire, case, tool, NOTIFIES)
    await assert_answered_as_noticed(wire, call)


async def assert_answered_as_noticed(wire: Wire, call: asyncio.Task[types.CallToolResult]) -> None:
    if not notices(wire.kind, NOTIFIES):
        assert text(await call) == "done"
    elif wire.kind.transport == "http":
        # The protocol has no answer to this, but the transport owes one.
        with pytest.raises(MCPError, match="Request cancelled"):
            await call
    else:
        assert not call.done()
        await give_up(call)


@pytest.mark.parametrize("tool", ["read", "change", "grind"])
@over(HTTP)
async def test_a_running_call_whose_connection_breaks(wire: Wire, case: str, tool: str) -> None:
    async with connection_of_its_own(wire, tool, case) as call:
        await wire.said(case, "started")
        await give_up(call)
    await assert_as_noticed(wire, case, tool, HANGS_UP)


@contextlib.asynccontextmanager
async def connection_of_its_own(
    wire: Wire, tool: str, case: str
) -> AsyncIterator[asyncio.Task[httpx2.Response]]:
    """A call that the client sends, but over a connection that nothing else uses."""
    await wire.call("restart")
    async with http_client() as client:
        yield asyncio.create_task(client.send(wire.http.call(tool, {"case": case}, 9999)))


@pytest.mark.parametrize("tool", ["read", "change"])
@pytest.mark.parametrize("kind", [kind for kind in HTTP if LEAVES in NOTICED[kind.name]], ids=str)
async def test_a_running_call_whose_session_is_ended(
    servers: Servers, kind: Kind, case: str, tool: str
) -> None:
    server = servers.of(kind)
    async with server.connect() as wire, server.connect() as leaving:
        call = leaving.start(tool, case=case)
        await wire.said(case, "started")
        async with http_client() as client:
            assert (await client.send(leaving.http.leave())).status_code == 200
        await assert_as_noticed(wire, case, tool, LEAVES)
        with pytest.raises(MCPError):
            await call


@pytest.mark.parametrize("tool", ["read", "read_inline", "change", "grind", "wind_up"])
@pytest.mark.parametrize("kind", [kind for kind in IN_PROCESS if not kind.is_modern], ids=str)
async def test_a_running_call_whose_client_in_this_process_goes(
    servers: Servers, kind: Kind, case: str, tool: str
) -> None:
    server = servers.of(kind)
    async with server.connect() as wire:
        async with server.connect() as leaving:
            call = leaving.start(tool, case=case)
            await wire.said(case, "started")
        await assert_as_noticed(wire, case, tool, HANGS_UP)
        with pytest.raises((MCPError, asyncio.CancelledError)):
            await call


@pytest.mark.slow
async def test_calls_of_clients_on_stdio_that_go_have_their_grace(servers: Servers, case: str) -> None:
    # Together, as both really wait.
    await asyncio.gather(*(go_from_stdio(servers.of_its_own(kind, f"{kind}-{case}"), case) for kind in STDIO))


async def go_from_stdio(server: Server, case: str) -> None:
    tools = ("read", "wind_up", "change")
    async with server.connect() as wire:
        calls = [wire.start(tool, case=f"{case}-{tool}") for tool in tools]
        for tool in tools:
            await wire.said(f"{case}-{tool}", "started")
    await asyncio.gather(*calls, return_exceptions=True)
    said = server.journal.read_text().splitlines()
    assert said.count("started") == 3
    # One is cancelled, one ends when it is told to, and one is told and has its grace, as nothing lets it go.
    assert said.count("aborted: CANCELLED") == 2
    assert said.count("wound up") == 1
    assert said.count("cancelled") == 3
    assert said[-2:] == ["cancelled", "over"]


# --------------------------------------------------------------------------------------- calls that wait


@contextlib.asynccontextmanager
async def one_runs(wire: Wire, case: str) -> AsyncIterator[None]:
    """The slot of a case is taken, until the case is let go within."""
    holder = wire.start("wind_up", case=case)
    await wire.said(case, "started")
    yield
    assert text(await holder) == "done"


async def assert_as_noticed_while_waiting(wire: Wire, case: str, tool: str, event: str) -> None:
    if notices(wire.kind, event):
        # It has left the queue, and is not there when its turn would have come.
        assert (await wire.statistics("waiting", 0))["tools"][tool]["cancelled_waiting"] >= 1
        await wire.let_go(case)
        await assert_its_slot_is_free(wire, case)
        assert (await wire.said(case)).count("started") == 1
    else:
        await wire.statistics("waiting", 1)
        await wire.let_go(case)
        assert (await wire.said(case, "done", 2)).count("started") == 2


@pytest.mark.parametrize("tool", ["read_inline", "change", "grind"])
async def test_a_waiting_call_whose_caller_gives_up(wire: Wire, case: str, tool: str) -> None:
    async with one_runs(wire, case):
        call = wire.start(tool, case=case)
        await wire.statistics("waiting", 1)
        await give_up(call)
        await assert_as_noticed_while_waiting(wire, case, tool, GIVES_UP)


async def test_a_waiting_call_whose_client_has_waited_long_enough(wire: Wire, case: str) -> None:
    async with one_runs(wire, case):
        call = asyncio.create_task(wire.client.call_tool("change", {"case": case}, read_timeout_seconds=0.25))
        await wire.statistics("waiting", 1)
        with pytest.raises(MCPError) as error:
            await call
        assert error.value.code == types.REQUEST_TIMEOUT
        await assert_as_noticed_while_waiting(wire, case, "change", TIMES_OUT)


@with_notifications
async def test_a_waiting_call_that_a_notification_cancels(wire: Wire, case: str) -> None:
    # Who waits cannot tell the id of its request. A client numbers them, and these two follow each other.
    running, waiting = wire.start("change", case=case), wire.start("change", case=case)
    number = int(await id_of(wire, case))
    await wire.statistics("waiting", 1)
    if wire.kind.transport == "http" and number == wire.http.body["id"]:
        # The second has overtaken the first.
        number, running, waiting = number - 2, waiting, running
    await notify(wire, str(number + 1))
    await assert_as_noticed_while_waiting(wire, case, "change", NOTIFIES)
    assert text(await running) == "done"
    await assert_answered_as_noticed(wire, waiting)


@pytest.mark.parametrize("tool", ["read_inline", "change"])
@over(HTTP)
async def test_a_waiting_call_whose_connection_breaks(wire: Wire, case: str, tool: str) -> None:
    async with one_runs(wire, case), connection_of_its_own(wire, tool, case) as call:
        await wire.statistics("waiting", 1)
        await give_up(call)
        await assert_as_noticed_while_waiting(wire, case, tool, HANGS_UP)


@pytest.mark.parametrize("kind", [kind for kind in IN_PROCESS if not kind.is_modern], ids=str)
async def test_a_waiting_call_whose_client_in_this_process_goes(
    servers: Servers, kind: Kind, case: str
) -> None:
    server = servers.of(kind)
    async with server.connect() as wire, one_runs(wire, case):
        async with server.connect() as leaving:
            call = leaving.start("change", case=case)
            await wire.statistics("waiting", 1)
        await assert_as_noticed_while_waiting(wire, case, "change", HANGS_UP)
        with pytest.raises((MCPError, asyncio.CancelledError)):
            await call
