"""What an operator meets over HTTP: the probe, and a port that is taken."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.flow.wires import HTTP, Kind, Servers, http_client, text

ALIVE = {"ok": True, "service": "flow"}


@pytest.mark.parametrize("auth", [False, True])
@pytest.mark.parametrize("kind", HTTP[:1], ids=str)
async def test_the_probe_answers_anybody_and_counts_towards_nothing(
    servers: Servers, kind: Kind, auth: bool
) -> None:
    server = servers.of(kind, auth=auth)
    async with server.connect(headers={"authorization": "Bearer desk:alice:1"}) as wire:
        before = await wire.statistics()
        async with http_client(base_url=server.address) as client:
            answer = await client.get("/healthz")
            foreign = await client.get("/healthz", headers={"host": "example.com"})
        assert (answer.status_code, answer.json()) == (200, ALIVE)
        assert answer.headers["content-type"] == "application/json"
        assert (foreign.status_code, foreign.json()) == (200, ALIVE)
        assert await wire.statistics() == before


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "BREW"])
@pytest.mark.parametrize("kind", HTTP[:1], ids=str)
async def test_the_probe_allows_no_other_method(servers: Servers, kind: Kind, method: str) -> None:
    async with http_client(base_url=servers.of(kind).address) as client:
        answer = await client.request(method, "/healthz")
    assert answer.status_code == 405
    assert {each.strip() for each in answer.headers["allow"].split(",")} == {"GET", "HEAD"}


@pytest.mark.parametrize("kind", HTTP[:1], ids=str)
async def test_the_probe_answers_while_the_server_is_overloaded(
    servers: Servers, kind: Kind, case: str
) -> None:
    server = servers.of(kind)
    async with server.connect() as wire, http_client(base_url=server.address) as client:
        holding = [wire.start("hold", case=case) for _ in range(44)]
        await wire.said(case, "started", 40)
        await wire.statistics("waiting", 4)
        answer = await client.get("/healthz")
        assert (answer.status_code, answer.json()) == (200, ALIVE)
        await wire.let_go(case)
        assert {text(held) for held in await asyncio.gather(*holding)} == {"held"}


def test_a_port_that_is_taken_is_one_sentence_and_an_exit_status(servers: Servers) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, said = servers.fail_to_serve(port=port)
    assert status == 1
    assert said.splitlines() == [
        f"frontmcp_py: port {port} on 127.0.0.1 is in use; "
        "stop what listens there, or give another port (0: any free one)"
    ]
