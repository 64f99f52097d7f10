"""Requests are let in one after the other, and what must not wait passes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from mcp.shared.inbound import encode_header_value
from starlette.types import Message, Receive, Scope, Send

from frontmcp_py.http import gate
from frontmcp_py.http.gate import MOST_AT_ONCE, PACE_MS, PEEK_BYTES, TURNS, Arrivals, Gate
from frontmcp_py.testing import FakeClock, run_virtual, virtual_time


class Inside:
    """What is behind the gate: notes who came in, in which turn of the loop, and with which body."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.turns: list[int] = []
        self.bodies: list[bytes] = []
        self.turn = 0
        self.clock = FakeClock()
        self.turn_ms = 0.0
        self._counting = asyncio.get_running_loop().call_soon(self._count)

    def _count(self) -> None:
        self.turn += 1
        self.clock.advance(self.turn_ms / 1000)
        if self.turn < 10_000:
            self._counting = asyncio.get_running_loop().call_soon(self._count)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.came.append(scope["who"])
        self.turns.append(self.turn)
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        self.bodies.append(body)

    def stop(self) -> None:
        self._counting.cancel()


class Line:
    """A gate, what is behind it, and the requests before it."""

    def __init__(self) -> None:
        self.inside = Inside()
        self.arrivals = Arrivals()
        self.gate = Gate(
            self.inside,
            path="/mcp",
            is_control=lambda tool: tool in ("look", "schau nach: größe"),
            arrivals=self.arrivals,
            clock=self.inside.clock,
        )
        self.tasks: list[asyncio.Task[None]] = []

    def ask(
        self,
        who: str,
        *,
        tool: str = "work",
        method: str | None = "tools/call",
        version: str = "2026-07-28",
        body: Iterable[bytes] | bytes = b"{}",
        scope: dict[str, Any] | None = None,
        leaves: bool = False,
    ) -> asyncio.Task[None]:
        headers = [(b"mcp-protocol-version", version.encode())]
        if method is not None:
            name = encode_header_value(tool)
            headers += [(b"mcp-method", method.encode()), (b"mcp-name", name.encode())]
        asked = {"type": "http", "method": "POST", "path": "/mcp", "headers": headers, "who": who}
        chunks = [body] if isinstance(body, bytes) else [*body]
        messages: list[Message] = [
            {"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks
        ]
        messages[-1]["more_body"] = False
        if leaves:
            messages[-1] = {"type": "http.disconnect"}

        async def receive() -> Message:
            return messages.pop(0)

        async def send(_: Message) -> None:
            raise AssertionError("the gate itself answers nobody")

        task = asyncio.ensure_future(self.gate({**asked, **(scope or {})}, receive, send))
        self.tasks.append(task)
        return task

    async def all(self) -> list[str]:
        """Who came in, in order, when all have."""
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.inside.stop()
        return self.inside.came


def called(tool: str, **fields: Any) -> bytes:
    """A call of the protocol of 2025, whose headers say nothing."""
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool}, **fields}
    return json.dumps({name: value for name, value in message.items() if value is not None}).encode()


@virtual_time
async def test_requests_come_in_in_order_and_some_turns_apart() -> None:
    line = Line()
    for number in range(5):
        line.ask(str(number))
    assert await line.all() == ["0", "1", "2", "3", "4"]
    turns = line.inside.turns
    # Who is let in comes in in the turn after.
    assert [later - earlier for earlier, later in pairwise(turns)] == [TURNS + 1, *[TURNS] * 3]


@virtual_time
@pytest.mark.parametrize(
    ("turn_ms", "gaps"),
    [
        (PACE_MS / TURNS - 0.1, [TURNS] * 4),
        (PACE_MS * 0.4, [3] * 4),
        (PACE_MS, [1] * 4),
        (PACE_MS * 2, [0, 1, 0, 1]),
        (PACE_MS * 1000, [*[0] * (MOST_AT_ONCE - 1), 1]),
    ],
    ids=["short turns", "two fifths of the pace", "the pace", "twice the pace", "a stop"],
)
async def test_where_turns_are_long_requests_come_in_by_the_clock(turn_ms: float, gaps: list[int]) -> None:
    line = Line()
    line.inside.turn_ms = turn_ms
    for number in range(6):
        line.ask(str(number))
    assert await line.all() == [str(number) for number in range(6)]
    assert [later - earlier for earlier, later in pairwise(line.inside.turns[1:])] == gaps


@virtual_time
async def test_the_first_request_of_a_quiet_time_is_not_held_up() -> None:
    line = Line()
    for number in range(3):
        before = line.inside.turn
        await line.ask(str(number))
        assert line.inside.turns[-1] - before <= 2
        for _ in range(TURNS + 1):
            await asyncio.sleep(0)
    line.inside.stop()


@virtual_time
async def test_what_must_not_wait_passes_those_that_do() -> None:
    line = Line()
    for number in range(10):
        line.ask(str(number))
    line.ask("control", tool="look")
    line.ask("encoded", tool="schau nach: größe")
    line.ask("cancel", method="notifications/cancelled")
    line.ask("old control", method=None, body=called("look"))
    line.ask("old cancel", method=None, body=called("", method="notifications/cancelled", id=None))
    line.ask("old answer", method=None, body=b'{"jsonrpc": "2.0", "id": 1, "result": {}}')
    line.ask("old refusal", method=None, body=b'{"jsonrpc": "2.0", "id": 1, "error": {"code": 1}}')
    line.ask("stream", scope={"method": "GET"})
    line.ask("elsewhere", scope={"path": "/healthz"})
    line.ask("websocket", scope={"type": "websocket"})
    came = await line.all()
    assert line.arrivals.waiting == 0
    assert came[-9:] == [str(number) for number in range(1, 10)]
    assert {*came[:-9]} == {
        *("0", "control", "encoded", "cancel", "old control", "old cancel", "old answer", "old refusal"),
        *("stream", "elsewhere", "websocket"),
    }


@virtual_time
@pytest.mark.parametrize(
    "body",
    [
        called("work"),
        called("look", method="tools/list"),
        called("look", params=["look"]),
        called("look", params=None),
        called("", params={"name": ["look"]}),
        called("look", method="notifications/progress"),
        b"[" + called("look") + b"]",
        b"look",
        b"",
        b"\xff",
        b"[" * 9_000,
        b" " * PEEK_BYTES + called("look"),
    ],
    ids=[
        *("another tool", "another method", "params are a list", "no params", "a list for a name"),
        *("another notification", "a batch", "no JSON", "nothing", "no text", "too deep", "too long"),
    ],
)
async def test_whatever_else_a_message_says_it_waits(body: bytes) -> None:
    line = Line()
    line.ask("0")
    line.ask("1")
    line.ask("message", method=None, body=body)
    line.ask("control", tool="look")
    assert await line.all() == ["0", "control", "1", "message"]
    assert body in line.inside.bodies


@virtual_time
@pytest.mark.parametrize("version", ["2025-11-25", "2024-11-05", ""])
async def test_headers_are_not_believed_where_the_server_does_not_look_at_them(version: str) -> None:
    line = Line()
    line.ask("0")
    line.ask("1")
    line.ask("says look, calls work", tool="look", version=version, body=called("work"))
    line.ask("says cancel", method="notifications/cancelled", version=version, body=called("work"))
    line.ask("says work, calls look", tool="work", version=version, body=called("look"))
    assert await line.all() == ["0", "says work, calls look", "1", "says look, calls work", "says cancel"]


@virtual_time
async def test_a_full_line_is_passed_by_who_comes_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MOST_IN_LINE", 3)
    line = Line()
    for number in range(6):
        line.ask(str(number))
    for _ in range(2):
        await asyncio.sleep(0)
    assert line.arrivals.waiting == 3
    assert await line.all() == ["0", "4", "5", "1", "2", "3"]
    assert line.arrivals.waiting == 0


@virtual_time
async def test_a_message_comes_in_as_it_was_sent() -> None:
    line = Line()
    parts = [b"a" * 1000, b"", b"b" * PEEK_BYTES, b"c" * PEEK_BYTES, b"d"]
    line.ask("0", body=parts)
    line.ask("1", method=None, body=parts)
    await line.all()
    assert line.inside.bodies == [b"".join(parts)] * 2


@virtual_time
async def test_a_mounted_app_has_a_gate_too() -> None:
    line = Line()
    mounted = {"path": "/desk/mcp", "root_path": "/desk"}
    for number in range(3):
        line.ask(str(number), scope=mounted)
    line.ask("control", tool="look", scope=mounted)
    assert await line.all() == ["0", "control", "1", "2"]


@virtual_time
async def test_who_leaves_before_all_is_said_is_not_let_in() -> None:
    line = Line()
    line.ask("0")
    line.ask("left", leaves=True)
    line.ask("left later", body=[b"a", b"b"], leaves=True)
    line.ask("1")
    assert await line.all() == ["0", "1"]


@virtual_time
async def test_who_says_it_slowly_holds_up_nobody() -> None:
    line = Line()
    rest: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    async def slowly() -> Message:
        return await rest

    async def send(_: Message) -> None:
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": "/mcp", "headers": [], "who": "slow"}
    slow = asyncio.ensure_future(line.gate(scope, slowly, send))
    for number in range(3):
        line.ask(str(number))
    await asyncio.gather(*line.tasks)
    assert line.inside.came == ["0", "1", "2"]
    rest.set_result({"type": "http.request", "body": b"{}", "more_body": False})
    await slow
    assert (await line.all())[-1] == "slow"


@virtual_time
async def test_who_is_cancelled_in_the_line_costs_no_turn() -> None:
    line = Line()
    tasks = [line.ask(str(number)) for number in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for gone in (tasks[1], tasks[2], tasks[3]):
        gone.cancel()
    assert await line.all() == ["0", "4"]
    first, second = line.inside.turns
    assert second - first == TURNS + 1


def test_a_gate_goes_on_on_the_next_loop_whoever_stood_in_its_line_on_the_last() -> None:
    gates: list[Gate] = []

    async def leave_some_in_the_line() -> None:
        line = Line()
        gates.append(line.gate)
        for number in range(4):
            line.ask(str(number))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        line.inside.stop()

    async def come_again() -> None:
        line = Line()
        gates[0]._app = line.inside
        line.gate = gates[0]
        for number in range(3):
            line.ask(str(number))
        assert await line.all() == ["0", "1", "2"]

    run_virtual(leave_some_in_the_line)
    run_virtual(come_again)
