"""Who shares a count: users, sessions and addresses that the server knows, never those a caller makes up."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.flow.wires import ALL, HTTP, Kind, Server, Servers, Wire, http_client, over, text

SIGNED_IN = [kind for kind in HTTP if kind.name in ("sse-2026", "sse-2025")]
WITH_SESSIONS = [kind for kind in HTTP if not kind.is_modern and not kind.is_stateless]
WITHOUT_SESSIONS = [kind for kind in HTTP if kind.is_modern or kind.is_stateless]


def code(result: Any) -> object:
    return (result.meta or {}).get("code")


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@contextlib.asynccontextmanager
async def held(wire: Wire, tool: str, case: str) -> AsyncIterator[None]:
    """While this is so, the caller of this wire has its one slot of a tool taken."""
    call = wire.start(tool, case=case)
    await wire.said(case, "started")
    yield
    await wire.let_go(case)
    assert text(await call) == "done"


async def assert_shares(wire: Wire, other: Wire, tool: str, case: str) -> None:
    async with held(wire, tool, case):
        assert code(await other.call(tool, case=f"{case}-other")) == "CONCURRENCY_LIMIT"


async def assert_does_not_share(wire: Wire, other: Wire, tool: str, case: str) -> None:
    async with held(wire, tool, case), held(other, tool, f"{case}-other"):
        pass


@contextlib.asynccontextmanager
async def two(
    server: Server, first: dict[str, Any], second: dict[str, Any]
) -> AsyncIterator[tuple[Wire, Wire]]:
    """Two connections to one server."""
    async with server.connect(**first) as one, server.connect(**second) as other:
        yield one, other


# ----------------------------------------------------------------------------------------------- anybody


async def test_a_caller_is_what_the_server_could_verify(wire: Wire) -> None:
    caller = (await wire.call("who")).structured_content
    assert caller is not None
    kind = wire.kind
    assert caller["user_id"] is None
    assert caller["client_id"] is None
    assert caller["client_ip"] == ("127.0.0.1" if kind.transport == "http" else None)
    assert caller["transport"] == {"http": "streamable-http"}.get(kind.transport, kind.transport)
    assert (caller["session_id"] is not None) == (kind in WITH_SESSIONS)


@pytest.mark.parametrize("tool", ["hold_by_user_id", "hold_by_session", "hold_by_ip"])
@over([kind for kind in ALL if kind.transport != "http"])
async def test_who_has_nothing_to_be_known_by_shares_with_everybody_else(
    wire: Wire, case: str, tool: str
) -> None:
    await assert_shares(wire, wire, tool, case)


# ----------------------------------------------------------------------------------------------- sessions


@pytest.mark.parametrize("kind", WITH_SESSIONS, ids=str)
async def test_sessions_that_the_server_handed_out_are_told_apart(
    servers: Servers, kind: Kind, case: str
) -> None:
    async with two(servers.of(kind), {}, {}) as (one, other):
        await assert_shares(one, one, "hold_by_session", case)
        await assert_does_not_share(one, other, "hold_by_session", f"{case}-2")


@pytest.mark.parametrize("kind", WITHOUT_SESSIONS, ids=str)
async def test_a_session_header_that_nobody_checks_gives_no_fresh_budget(
    servers: Servers, kind: Kind, case: str
) -> None:
    forged = [{"headers": {"Mcp-Session-Id": f"forged-{case}-{number}"}} for number in (1, 2)]
    async with two(servers.of(kind), *forged) as (one, other):
        await assert_shares(one, other, "hold_by_session", case)
        # It was really sent.
        assert one.http.headers["mcp-session-id"] == f"forged-{case}-1"


@pytest.mark.parametrize("kind", WITH_SESSIONS, ids=str)
async def test_a_session_that_the_server_does_not_know_calls_nothing(servers: Servers, kind: Kind) -> None:
    async with servers.of(kind).connect() as wire, http_client() as client:
        await wire.call("restart")
        before = await wire.statistics()
        request = wire.http.call("restart", {}, 9999)
        request.headers["mcp-session-id"] = "0123456789abcdef0123456789abcdef"
        assert (await client.send(request)).status_code == 404
        assert (await wire.statistics())["counts"] == before["counts"]


# ---------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize("kind", HTTP, ids=str)
async def test_a_forwarding_header_gives_no_fresh_budget(servers: Servers, kind: Kind, case: str) -> None:
    forged = [
        {
            "headers": {
                "X-Forwarded-For": f"203.0.113.{number}",
                "Forwarded": f"for=203.0.113.{number}",
                "X-Real-IP": f"203.0.113.{number}",
            }
        }
        for number in (1, 2)
    ]
    async with two(servers.of(kind), *forged) as (one, other):
        assert ((await one.call("who")).structured_content or {})["client_ip"] == "127.0.0.1"
        await assert_shares(one, other, "hold_by_ip", case)


@pytest.mark.parametrize("kind", HTTP, ids=str)
async def test_addresses_are_told_apart_by_the_socket(servers: Servers, kind: Kind, case: str) -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.2", 0))
        except OSError:
            pytest.skip("this system has one loopback address only")
    async with two(servers.of(kind), {}, {"local_address": "127.0.0.2"}) as (one, other):
        await assert_does_not_share(one, other, "hold_by_ip", case)
        assert ((await other.call("who")).structured_content or {})["client_ip"] == "127.0.0.2"


# -------------------------------------------------------------------------------------------------- users


@pytest.mark.parametrize("kind", SIGNED_IN, ids=str)
@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        ("desk:alice:1", "desk:bob:1", False),
        ("desk:alice:1", "desk:alice:2", True),
        ("desk:alice:1", "phone:alice:2", True),
        ("desk::1", "desk::2", True),
        ("desk::1", "phone::1", False),
        ("desk:desk:1", "desk::1", False),
    ],
)
async def test_users_are_told_apart_whatever_client_and_token_they_use(
    servers: Servers, kind: Kind, case: str, first: str, second: str, shares: bool
) -> None:
    options = [{"headers": bearer(token)} for token in (first, second)]
    async with two(servers.of(kind, auth=True), *options) as (one, other):
        check = assert_shares if shares else assert_does_not_share
        await check(one, other, "hold_by_user_id", case)


@pytest.mark.parametrize("kind", SIGNED_IN, ids=str)
async def test_a_fresh_token_or_session_gives_a_user_no_fresh_budget(
    servers: Servers, kind: Kind, case: str
) -> None:
    server = servers.of(kind, auth=True)
    answers = []
    for token in (f"desk:{case}:1", f"desk:{case}:2", f"phone:{case}:3"):
        async with server.connect(headers=bearer(token)) as wire:
            answers.append(code(await wire.call("once_for_each_user")))
    assert answers == [None, "RATE_LIMIT_EXCEEDED", "RATE_LIMIT_EXCEEDED"]
    async with server.connect(headers=bearer(f"desk:{case}-other:1")) as wire:
        assert text(await wire.call("once_for_each_user")) == "counted"


@pytest.mark.parametrize("kind", SIGNED_IN, ids=str)
async def test_a_caller_who_signed_in_is_known_by_issuer_and_subject(servers: Servers, kind: Kind) -> None:
    async with servers.of(kind, auth=True).connect(headers=bearer("desk:a|b/c:1")) as wire:
        caller = (await wire.call("who")).structured_content or {}
        assert caller["user_id"] == "https%3A%2F%2Fissuer.example|a%7Cb%2Fc"
        assert caller["client_id"] == "desk"


@pytest.mark.parametrize("kind", [kind for kind in SIGNED_IN if kind in WITHOUT_SESSIONS], ids=str)
async def test_who_has_no_session_is_counted_by_user(servers: Servers, kind: Kind, case: str) -> None:
    options = [{"headers": {**bearer(f"desk:{case}:1"), "Mcp-Session-Id": f"forged-{n}"}} for n in (1, 2)]
    async with two(servers.of(kind, auth=True), *options) as (one, other):
        await assert_shares(one, other, "hold_by_session", case)
    options[1] = {"headers": bearer(f"desk:{case}-other:1")}
    async with two(servers.of(kind, auth=True), *options) as (one, other):
        await assert_does_not_share(one, other, "hold_by_session", f"{case}-2")


@pytest.mark.parametrize("kind", SIGNED_IN, ids=str)
async def test_who_has_not_signed_in_calls_nothing(servers: Servers, kind: Kind) -> None:
    async with servers.of(kind, auth=True).connect(headers=bearer("desk:alice:1")) as wire:
        await wire.call("restart")
        before = await wire.statistics()
        for authorization in (None, "Bearer :nobody:1", "Basic desk:alice:1"):
            request = wire.http.call("restart", {}, 9999)
            del request.headers["authorization"]
            if authorization is not None:
                request.headers["authorization"] = authorization
            async with http_client() as client:
                assert (await client.send(request)).status_code == 401
        assert (await wire.statistics())["counts"] == before["counts"]
