"""A flood over real HTTP: everybody is answered, control calls pass it, and the server is well afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from mcp_types import CLIENT_CAPABILITIES_META_KEY, CLIENT_INFO_META_KEY, PROTOCOL_VERSION_META_KEY

from tests.flow.wires import ROOT, SOON, logged

CONNECTIONS: Final = 200

VERSION: Final = "2026-07-28"

META: Final = {
    PROTOCOL_VERSION_META_KEY: VERSION,
    CLIENT_CAPABILITIES_META_KEY: {},
    CLIENT_INFO_META_KEY: {"name": "flood", "version": "1"},
}


@dataclass
class Flooded:
    """A server in a process of its own, and many connections to it.

    Attributes:
        address: Where it listens.
        process: Its process.
        journal: The numbers of the calls that have begun there.
        answers: How each call was answered, by its number: `ok`, a code, or `lost`.
        sent: The numbers of all calls, in order.
    """

    address: str
    process: asyncio.subprocess.Process
    journal: Path
    answers: dict[str, str] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def call(self, http: httpx2.AsyncClient, tool: str) -> str:
        """One call, over a connection that is kept."""
        number = f"{tool}-{next(self._numbers)}"
        self.sent.append(number)
        headers = {
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": VERSION,
            "mcp-method": "tools/call",
            "mcp-name": tool,
        }
        params = {"name": tool, "arguments": {"number": number}, "_meta": META}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        try:
            response = await http.post(f"{self.address}/mcp", json=body, headers=headers)
        except httpx2.TransportError:
            answer = "lost"
        else:
            answer = _answer(response, number)
        self.answers[number] = answer
        return answer

    async def probe(self, http: httpx2.AsyncClient, path: str) -> tuple[int, Any]:
        response = await http.get(f"{self.address}{path}")
        return response.status_code, response.json()

    def begun(self) -> list[str]:
        return self.journal.read_text().split() if self.journal.exists() else []


def _answer(response: httpx2.Response, number: str) -> str:
    assert response.status_code == 200, response.text
    found = re.findall(r'"text":"([^"]*)"', response.text)
    if '"isError":true' not in response.text:
        assert found == [number], response.text
        return "ok"
    [code] = re.findall(r'"code":"([A-Z_]+)"', response.text)
    return str(code)


@pytest.fixture
async def flooded(tmp_path: Path) -> AsyncIterator[Flooded]:
    log = tmp_path / "log"
    with log.open("w") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.flow.flooded",
            os.fspath(tmp_path / "journal"),
            cwd=ROOT,
            stdout=file,
            stderr=file,
        )
    try:
        port = await logged(log, r"Listening on 127\.0\.0\.1 port (\d+)")
        yield Flooded(f"http://127.0.0.1:{port}", process, tmp_path / "journal")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    assert "Traceback" not in log.read_text()


@contextlib.asynccontextmanager
async def connections(number: int) -> AsyncIterator[list[httpx2.AsyncClient]]:
    """Clients with one connection each."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(verify=False), timeout=3 * SOON)
            )
            for _ in range(number)
        ]


async def test_a_flood_of_200_connections_is_answered_and_control_calls_pass_it(flooded: Flooded) -> None:
    over, seen = asyncio.Event(), Counter[tuple[str, int]]()

    async def watch(http: httpx2.AsyncClient) -> None:
        while not over.is_set():
            for path in ("/healthz", "/readyz", "/metrics"):
                status, _ = await flooded.probe(http, path)
                seen[path, status] += 1
            assert await flooded.call(http, "look") == "ok"
            if seen["/readyz", 503] == 3:
                # Nothing has come to its end yet, so that the queue is full whatever this machine is like.
                assert await flooded.call(http, "let_go") == "ok"

    async def flood(http: httpx2.AsyncClient, tools: list[str]) -> None:
        for tool in tools:
            await flooded.call(http, tool)

    async with connections(CONNECTIONS + 1) as [watcher, *clients]:
        watching = asyncio.create_task(watch(watcher))
        tools = [["work", "work", "shell"], ["shell", "work", "work"]]
        await asyncio.gather(*(flood(http, tools[nth % 2]) for nth, http in enumerate(clients)))
        over.set()
        await watching
        status, ready = await flooded.probe(watcher, "/readyz")
        _, metrics = await flooded.probe(watcher, "/metrics")

    answers = Counter(flooded.answers.values())
    assert answers.keys() == {"ok", "OVERLOADED"}
    assert answers.total() == len(flooded.answers) >= 3 * CONNECTIONS
    # What began was answered with its result, and nothing else began.
    assert {*flooded.begun()} == {
        number
        for number, answer in flooded.answers.items()
        if answer == "ok" and number.startswith(("work", "shell"))
    }
    assert {path for path, status in seen if status == 200} == {"/healthz", "/readyz", "/metrics"}
    assert seen["/readyz", 503] > 0
    assert {status for path, status in seen if path != "/readyz"} == {200}

    assert (status, ready["status"], ready["active"], ready["queued"]) == (200, "ready", 0, 0)
    assert metrics["peaks"]["places"] <= 48
    assert metrics["peaks"]["queued"] == 64
    assert metrics["keys"]["shell"]["peak"] == 8
    counters = metrics["counters"]
    assert counters["submitted"] == len(flooded.answers)
    assert counters["completed"] == answers["ok"] == counters["started"]
    assert counters["rejected"] == {"OVERLOADED": answers["OVERLOADED"]}


@pytest.mark.slow
async def test_a_signal_in_the_middle_of_a_flood_loses_no_call_that_has_begun(flooded: Flooded) -> None:
    told = asyncio.Event()

    async def flood(http: httpx2.AsyncClient) -> None:
        while await flooded.call(http, "work") != "lost":
            if len(flooded.answers) > 300:
                told.set()

    async with connections(CONNECTIONS // 2) as clients:
        await flooded.call(clients[0], "let_go")
        flooding = asyncio.gather(*map(flood, clients))
        await told.wait()
        under_way = set(flooded.sent)
        flooded.process.send_signal(signal.SIGTERM)
        await flooding
        assert await flooded.process.wait() == -signal.SIGTERM
    begun = flooded.begun()
    assert len(begun) > 48
    # The grace is longer than the work: whoever has begun has got the result, not a refusal.
    assert {flooded.answers[number] for number in begun} == {"ok"}
    # So has whoever was under way; others were refused in words, until nobody was there any more.
    assert {flooded.answers[number] for number in under_way} <= {"ok", "OVERLOADED"}
    assert Counter(flooded.answers.values())["OVERLOADED"] > 0


async def test_idle_connections_are_no_load(flooded: Flooded) -> None:
    async with connections(100) as clients:
        for http in clients:
            assert (await flooded.probe(http, "/readyz"))[0] == 200
        _, ready = await flooded.probe(clients[0], "/readyz")
        assert (ready["active"], ready["places"]) == (0, 0)
        assert await flooded.call(clients[0], "let_go") == "ok"
        assert await flooded.call(clients[1], "work") == "ok"
