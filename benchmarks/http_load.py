"""Callers over HTTP that do as little as a client can for a call, so that the server is measured.

python -m benchmarks.http_load PORT      connections that call `work` again as soon as they are answered

It reads orders from its standard input, `start CONNECTIONS` and `stop`, and prints what has come of each.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from mcp_types import CLIENT_CAPABILITIES_META_KEY, CLIENT_INFO_META_KEY, PROTOCOL_VERSION_META_KEY

OVERDUE_S: Final = 60.0
"""A call that has not been answered by then counts as lost."""

FIRST_NUMBER: Final = 100_000_000
"""Numbers of calls have the same length, so that a request is a template."""

_VERSION: Final = "2026-07-28"
_META: Final = {
    PROTOCOL_VERSION_META_KEY: _VERSION,
    CLIENT_CAPABILITIES_META_KEY: {},
    CLIENT_INFO_META_KEY: {"name": "flood", "version": "1"},
}
_LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_CODE: Final = re.compile(rb'"code":"([A-Z_]+)"')


def _template(tool: str, port: int) -> bytes:
    params = {"name": tool, "arguments": {"number": FIRST_NUMBER}, "_meta": _META}
    call = {"jsonrpc": "2.0", "id": FIRST_NUMBER, "method": "tools/call", "params": params}
    body = json.dumps(call, separators=(",", ":"))
    head = (
        "POST /mcp HTTP/1.1",
        f"host: 127.0.0.1:{port}",
        "content-type: application/json",
        "accept: application/json, text/event-stream",
        f"mcp-protocol-version: {_VERSION}",
        "mcp-method: tools/call",
        f"mcp-name: {tool}",
        f"content-length: {len(body)}",
    )
    return ("\r\n".join((*head, "", body))).encode()


@dataclass
class Callers:
    """Connections to a server, each with one call on its way until they are told to stop.

    Attributes:
        port: Where the server listens, on loopback.
        tool: What they call.
        outcomes: How many calls were answered, by `ok` or the code of a refusal, and how many were `lost`.
        seconds: How long each answer took, in the order of the answers.
    """

    port: int
    tool: str
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    _open: list[_Connection] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(FIRST_NUMBER))
    _calling: bool = False

    async def start(self, connections: int) -> None:
        """Open the connections, and return when each has been answered once."""
        self._calling = True
        loop = asyncio.get_running_loop()
        for _ in range(connections):
            _, connection = await loop.create_connection(lambda: _Connection(self), "127.0.0.1", self.port)
            self._open.append(connection)
        # Not before: a server that is busy is slow to accept, and this would measure a trickle.
        for connection in self._open:
            connection.call()
        await asyncio.gather(*(connection.answered for connection in self._open))

    async def stop(self) -> None:
        """Ask nothing more, wait for the answers that are due, and close the connections."""
        self._calling = False
        if self._open:
            await asyncio.wait([connection.idle for connection in self._open], timeout=OVERDUE_S)
        for connection in self._open:
            connection.lose()
            connection.close()
        self._open.clear()

    def request(self) -> tuple[bytes, bytes]:
        """The next call, and what its answer begins with."""
        number = b"%d" % next(self._numbers)
        return self._request.replace(b"%d" % FIRST_NUMBER, number), b'{"jsonrpc":"2.0","id":%b,' % number

    def note(self, answer: bytes, took: float) -> bool:
        """An answer has come. Is another call to follow?"""
        self.seconds.append(took)
        if b'"isError":false' in answer:
            self.outcomes["ok"] += 1
        else:
            code = _CODE.search(answer)
            self.outcomes[code[1].decode() if code else "error"] += 1
        return self._calling

    def __post_init__(self) -> None:
        self._request = _template(self.tool, self.port)


class _Connection(asyncio.Protocol):
    """A kept connection, which calls again in the moment in which it is answered."""

    def __init__(self, callers: Callers) -> None:
        loop = asyncio.get_running_loop()
        self.answered: asyncio.Future[None] = loop.create_future()
        self.idle: asyncio.Future[None] = loop.create_future()
        self._callers = callers
        self._transport: Any = None
        self._received = self._answer = b""
        self._began = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def call(self) -> None:
        self._received = b""
        self._began = time.perf_counter()
        request, self._answer = self._callers.request()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        length = _LENGTH.search(head + b"\r\n")
        if not head.startswith(b"HTTP/1.1 200 ") or length is None:
            raise AssertionError(f"an answer that this client does not know: {self._received!r}")
        if len(body) < int(length[1]):
            return
        if not body.startswith(self._answer):
            raise AssertionError(f"an answer to another call: {body!r}")
        again = self._callers.note(body, time.perf_counter() - self._began)
        if not self.answered.done():
            self.answered.set_result(None)
        if again:
            self.call()
        else:
            self.idle.set_result(None)

    def close(self) -> None:
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lose()

    def lose(self) -> None:
        """Whatever has not been answered by now is lost."""
        if self.idle.done():
            return
        self._callers.outcomes["lost"] += 1
        self.idle.set_result(None)
        if not self.answered.done():
            self.answered.set_result(None)


async def obey(port: int) -> None:
    """Start and stop as the standard input says, until it ends."""
    callers = Callers(port, "work")
    while order := (await asyncio.to_thread(sys.stdin.readline)).split():
        if order[0] == "start":
            callers = Callers(port, "work")
            await callers.start(int(order[1]))
            said = Counter[str]()
        else:
            await callers.stop()
            said = callers.outcomes
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    asyncio.run(obey(int(sys.argv[1])))
