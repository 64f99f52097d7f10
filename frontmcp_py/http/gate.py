"""The gate of an HTTP app: requests come in one after the other, and control calls pass.

Under a flood the time of a server does not go into the guard, but into reading requests and writing answers:
each takes a few turns of the event loop, and with hundreds of them in it a turn is long. Whoever comes then
stands behind all of them, and so would a control call, which is there for that very moment. So only one
request is let in for every few turns of the loop. Turns stay short, and what passes the gate is answered
almost as soon as on an idle server. The others pay for it: they stand in a line that none of their limits
times. So it moves by the clock where turns are long because of what tools do, and it has an end.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, cast

from mcp.shared.inbound import decode_header_value
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontmcp_py.clock import Clock, SystemClock

TURNS: Final = 8
"""Turns of the loop between two requests: about as many as it takes to answer one. With 2 the turns of a
flood get long again, with 4 or 16 nothing changes."""

PACE_MS: Final = 10
"""Milliseconds after which a request is let in, however few turns have passed. Longer than one takes on a
busy machine, or they would pile up behind the gate; shorter than anybody minds."""

MOST_IN_LINE: Final = 1024
"""Requests that wait at most; at this pace for ten seconds. Further ones come in at once."""

MOST_AT_ONCE: Final = 4
"""Requests that are let in in one turn which was that long: after a stop of the process, not all of them."""

PEEK_BYTES: Final = 16 * 1024
"""The largest message that is read to find out whether it is a control call, where no header says so."""

_PACE_NS: Final = PACE_MS * 10**6

_CALL: Final = "tools/call"
_CANCEL: Final = "notifications/cancelled"


class Arrivals:
    """How many requests stand before the gates of a server."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: int = 0


class Gate:
    """ASGI middleware: lets one request in for every few turns of the loop, in order, and some at once.

    At once come: calls of control tools, cancellations, answers to questions of the server, and whatever is
    not posted to the path where tools are called. The first request of a quiet time is not held up either.
    A small message is read before it waits, so that a slow client holds up nobody, and one whose client
    leaves before it is complete is not let in at all.

    Args:
        app: What is behind it.
        path: Where tools are called.
        is_control: Whether a tool of this name is a control tool.
        arrivals: Where those who wait are counted.
        clock: Tells how long turns are.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        path: str,
        is_control: Callable[[str], bool],
        arrivals: Arrivals | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._app = app
        self._path = path
        self._is_control = is_control
        self._line: deque[asyncio.Future[None]] = deque()
        # The loop whose turns are being counted, while they are.
        self._turning: asyncio.AbstractEventLoop | None = None
        self._arrivals = arrivals or Arrivals()
        self._clock = clock or SystemClock()
        self._let_in_ns = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, in its turn."""
        if scope["type"] != "http" or scope["method"] != "POST" or not self._is_for_tools(scope):
            await self._app(scope, receive, send)
            return
        method, name = _headers(scope)
        if method is not None and self._comes_at_once(method, name):
            await self._app(scope, receive, send)
            return
        read = await _read(receive)
        if read[-1]["type"] == "http.disconnect":
            return
        if method is not None or not self._is_urgent(read):
            await self._turn()
        await self._app(scope, _replaying(read, receive), send)

    def _is_for_tools(self, scope: Scope) -> bool:
        path: str = scope["path"]
        root: str = scope.get("root_path", "")
        return path.removeprefix(root) == self._path or path == self._path

    def _comes_at_once(self, method: object, name: object) -> bool:
        return method == _CANCEL or (method == _CALL and isinstance(name, str) and self._is_control(name))

    def _is_urgent(self, read: list[Message]) -> bool:
        """Whether a message of the protocol of 2025, whose headers do not tell, comes in at once."""
        body = b"".join(message.get("body", b"") for message in read)
        if len(body) > PEEK_BYTES or read[-1].get("more_body", False):
            return False
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            # The server will say what is wrong with it, in its turn.
            return False
        fields = _table(message)
        if "method" not in fields:
            return "result" in fields or "error" in fields
        return self._comes_at_once(fields["method"], _table(fields.get("params")).get("name"))

    async def _turn(self) -> None:
        """Wait for the turn of a request."""
        loop = asyncio.get_running_loop()
        if self._turning is not loop:
            # Nobody has come just now; or another loop has ended with some in its line, who are gone.
            self._turning = loop
            self._line.clear()
            self._count_turns(loop)
            return
        if len(self._line) >= MOST_IN_LINE:
            return
        turn = loop.create_future()
        self._line.append(turn)
        self._arrivals.waiting += 1
        try:
            await turn
        finally:
            self._arrivals.waiting -= 1

    def _count_turns(self, loop: asyncio.AbstractEventLoop) -> None:
        """Somebody was let in: from now on turns are counted for the next one."""
        self._let_in_ns = self._clock.monotonic_ns()
        loop.call_soon(self._pass, loop, TURNS)

    def _pass(self, loop: asyncio.AbstractEventLoop, turns: int) -> None:
        """One turn of the loop has passed."""
        due = (self._clock.monotonic_ns() - self._let_in_ns) // _PACE_NS
        if turns > 1 and not due:
            loop.call_soon(self._pass, loop, turns - 1)
        elif self._let_in(min(max(due, 1), MOST_AT_ONCE)):
            self._count_turns(loop)
        else:
            self._turning = None

    def _let_in(self, most: int) -> int:
        """Let in so many, if there are so many; how many these are."""
        let_in = 0
        while self._line and let_in < most:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                let_in += 1
        return let_in


def _table(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value) if isinstance(value, dict) else {}


def _headers(scope: Scope) -> tuple[str | None, str | None]:
    """The method and the tool of a request, where its headers tell.

    They do in the protocol of 2026, where the server refuses a request whose headers say something else than
    its message. In that of 2025 anybody may write anything there.
    """
    headers = dict(scope["headers"])
    version = headers.get(b"mcp-protocol-version", b"").decode("latin-1")
    method, name = headers.get(b"mcp-method"), headers.get(b"mcp-name")
    if method is None or not version or version in HANDSHAKE_PROTOCOL_VERSIONS:
        return None, None
    return method.decode("latin-1"), None if name is None else decode_header_value(name.decode("latin-1"))


async def _read(receive: Receive) -> list[Message]:
    """What there is to read of a request, up to the end or the end of patience with large ones."""
    read = [await receive()]
    size = len(read[0].get("body", b""))
    while read[-1].get("more_body", False) and size <= PEEK_BYTES:
        read.append(await receive())
        size += len(read[-1].get("body", b""))
    return read


def _replaying(read: list[Message], receive: Receive) -> Receive:
    """What was read, and then the rest."""
    messages = deque(read)

    async def replay() -> Message:
        return messages.popleft() if messages else await receive()

    return replay
