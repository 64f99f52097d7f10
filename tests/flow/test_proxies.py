"""Who is the client behind a reverse proxy, and may it call? Over real sockets, through a real proxy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Literal

import pytest
import uvicorn
from mcp import MCPError
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.transport_security import TransportSecuritySettings

from frontmcp_py import FrontMCP, IPFilter, RateLimit, Throttle, ToolContext
from tests.flow.wires import SOON, http_client, text

HERE: Final = "127.0.0.1"
ONE: Final = "127.0.0.2"
OTHER: Final = "127.0.0.3"
DENIED: Final = "127.0.0.66"

Mode = Literal["auto", "legacy"]

both_protocols = pytest.mark.parametrize("mode", ["auto", "legacy"])


@pytest.fixture(autouse=True, scope="module")
def many_loopback_addresses() -> None:
    with socket.socket() as probe:
        try:
            probe.bind((ONE, 0))
        except OSError:
            pytest.skip("this system has one loopback address only")


def desk(**options: Any) -> FrontMCP:
    """A server that says who calls, and lets each address call a tool twice."""
    server = FrontMCP("desk", **options)

    @server.tool
    async def who(ctx: ToolContext) -> str:
        return str(ctx.caller.client_ip)

    @server.tool(rate_limit=RateLimit(2, "366d", partition_by="ip"))
    async def twice() -> str:
        return "done"

    return server


def listen(family: socket.AddressFamily = socket.AF_INET, host: str = HERE) -> socket.socket:
    listener = socket.socket(family)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.bind((host, 0))
    listener.listen()
    listener.setblocking(False)
    return listener


@contextlib.asynccontextmanager
async def serving(server: FrontMCP, listener: socket.socket | None = None, **http: Any) -> AsyncIterator[int]:
    """The port on which a server answers."""
    with listener or listen() as listener:
        app = server.http_app(**http)
        config = uvicorn.Config(app, log_config=None, proxy_headers=False, timeout_graceful_shutdown=1)
        runner = uvicorn.Server(config)
        task = asyncio.create_task(runner.serve(sockets=[listener]))
        # It need not have started: who connects to the listener is answered then.
        address = listener.getsockname()
        try:
            yield address[1] if isinstance(address, tuple) else 0
        finally:
            runner.should_exit = True
            await task


class Proxy:
    """A reverse proxy that appends its peer to `X-Forwarded-For`, as they all do.

    Args:
        upstream: The port that it forwards to.
        address: The address that it forwards from.
        own_line: It appends a header line, not an entry to the last one.
        with_port: It writes the peer's port, too.
    """

    def __init__(
        self, upstream: int, *, address: str = HERE, own_line: bool = False, with_port: bool = False
    ) -> None:
        self._upstream = upstream
        self._address = address
        self._own_line = own_line
        self._with_port = with_port

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[int]:
        """The port on which it listens."""
        server = await asyncio.start_server(self._forward, HERE, 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()

    async def _forward(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        upstream: asyncio.StreamWriter | None = None
        try:
            head = await client.readuntil(b"\r\n\r\n")
            host, port = answer.get_extra_info("peername")[:2]
            server, upstream = await asyncio.open_connection(
                HERE, self._upstream, local_addr=(self._address, 0)
            )
            upstream.write(self._add(head, f"{host}:{port}" if self._with_port else host))
            async with asyncio.TaskGroup() as both_ways:
                sending = both_ways.create_task(_pump(client, upstream))
                await _pump(server, answer)
                sending.cancel()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            answer.close()
            if upstream is not None:
                upstream.close()

    def _add(self, head: bytes, peer: str) -> bytes:
        lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        # One request for each connection, so that nothing but a request's head has to be understood.
        lines = [line for line in lines if not line.lower().startswith(b"connection:")] + [
            b"Connection: close"
        ]
        forwarded = [n for n, line in enumerate(lines) if line.lower().startswith(b"x-forwarded-for:")]
        if forwarded and not self._own_line:
            lines[forwarded[-1]] += b", " + peer.encode()
        else:
            lines.append(b"X-Forwarded-For: " + peer.encode())
        return b"\r\n".join(lines) + b"\r\n\r\n"


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def calling(
    port: int, *, mode: Mode = "auto", address: str = ONE, forged: str | None = None, host: str = HERE
) -> AsyncIterator[Client]:
    """A client that calls from an address."""
    headers = {} if forged is None else {"X-Forwarded-For": forged}
    async with (
        asyncio.timeout(2 * SOON),
        http_client(local_address=address, headers=headers) as http,
        Client(streamable_http_client(f"http://{host}:{port}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


def code(result: Any) -> object:
    return (result.meta or {}).get("code")


async def who(port: int, **options: Any) -> str:
    async with calling(port, **options) as client:
        return text(await client.call_tool("who"))


# ------------------------------------------------------------------------------------------- whom it names


@both_protocols
@pytest.mark.parametrize("own_line", [False, True])
@pytest.mark.parametrize("with_port", [False, True])
async def test_behind_a_trusted_proxy_the_client_is_whom_it_names(
    mode: Mode, own_line: bool, with_port: bool
) -> None:
    async with serving(desk(trusted_proxies=[HERE])) as port:
        async with Proxy(port, own_line=own_line, with_port=with_port).open() as proxy:
            assert await who(proxy, mode=mode) == ONE
            assert await who(proxy, mode=mode, forged="203.0.113.9, 127.0.0.1") == ONE
            assert await who(proxy, mode=mode, forged="garbage,") == ONE
        # Past the proxy nobody is believed.
        assert await who(port, mode=mode, forged="203.0.113.9") == ONE


@both_protocols
async def test_behind_a_proxy_that_is_not_trusted_everybody_has_its_address(
    mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(desk()) as port, Proxy(port).open() as proxy:
        assert await who(proxy, mode=mode) == HERE
        assert await who(proxy, mode=mode, address=OTHER) == HERE
    warnings = [each for each in caplog.records if "trusted_proxies" in each.getMessage()]
    assert [each.levelno for each in warnings] == [logging.WARNING]


async def test_the_access_log_names_the_client(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "uvicorn.access")
    server = desk(trusted_proxies=[HERE])
    async with serving(server) as port, Proxy(port).open() as proxy, http_client(local_address=ONE) as client:
        await client.get(f"http://{HERE}:{proxy}/healthz")
    (line,) = [each.getMessage() for each in caplog.records if each.name == "uvicorn.access"]
    assert line.startswith(f"{ONE}:0 ")


async def test_behind_two_proxies_both_have_to_be_trusted() -> None:
    for trusted, expected in (([HERE, "127.0.0.9"], ONE), ([HERE], "127.0.0.9")):
        async with (
            serving(desk(trusted_proxies=trusted)) as port,
            Proxy(port).open() as inner,
            Proxy(inner, address="127.0.0.9").open() as outer,
        ):
            assert await who(outer, forged="203.0.113.9") == expected


async def test_on_a_socket_for_both_families_ipv4_proxies_and_clients_are_known_by_ipv4_addresses() -> None:
    if not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    ip_filter = IPFilter(deny=[DENIED])
    server = desk(trusted_proxies=[HERE], throttle=Throttle(ip_filter=ip_filter))
    async with serving(server, listen(socket.AF_INET6, "::")) as port:
        async with Proxy(port).open() as proxy:
            assert await who(proxy) == ONE
        assert await who(port) == ONE
        async with http_client(local_address=DENIED) as client:
            assert (await client.post(f"http://{HERE}:{port}/mcp")).status_code == 403


async def test_behind_a_proxy_on_a_unix_socket_nobody_has_an_address(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "desk"))
    listener.listen()
    listener.setblocking(False)
    everybody = ["0.0.0.0/0", "::/0"]
    server = desk(trusted_proxies=everybody, throttle=Throttle(ip_filter=IPFilter(everybody, default="deny")))
    async with serving(server, listener):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "desk"))
        writer.write(
            b"POST /mcp HTTP/1.1\r\nHost: desk\r\nX-Forwarded-For: 1.2.3.4\r\nConnection: close\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b'IP address \\"unknown\\" is not allowed' in answer


# ----------------------------------------------------------------------------------- limiter and filter


@both_protocols
async def test_each_client_behind_a_trusted_proxy_has_a_count_of_its_own(mode: Mode) -> None:
    async with serving(desk(trusted_proxies=[HERE])) as port, Proxy(port).open() as proxy:

        async def codes(address: str, times: int) -> list[object]:
            answers = []
            for number in range(times):
                # A fresh lie each time gives no fresh count.
                forged = f"203.0.113.{number}"
                async with calling(proxy, mode=mode, address=address, forged=forged) as client:
                    answers.append(code(await client.call_tool("twice")))
            return answers

        assert await codes(ONE, 3) == [None, None, "RATE_LIMIT_EXCEEDED"]
        assert await codes(OTHER, 3) == [None, None, "RATE_LIMIT_EXCEEDED"]


def is_blocked(error: MCPError) -> bool:
    told = error.error
    return (told.message, told.data["code"]) == (f'IP address "{DENIED}" is blocked', "IP_BLOCKED")


@both_protocols
async def test_a_client_that_is_denied_is_refused_behind_the_proxy_and_past_it(mode: Mode) -> None:
    server = desk(trusted_proxies=[HERE], throttle=Throttle(ip_filter=IPFilter(deny=[DENIED])))
    async with serving(server) as port, Proxy(port).open() as proxy:
        for where in (proxy, port):
            # An address that is not denied, forged, does not help.
            with pytest.RaisesGroup(pytest.RaisesExc(MCPError, check=is_blocked), flatten_subgroups=True):
                await who(where, mode=mode, address=DENIED, forged=ONE)
            # The forged address of one who is denied does no harm either.
            assert await who(where, mode=mode, forged=DENIED) == ONE
            async with http_client(local_address=DENIED) as client:
                assert (await client.get(f"http://{HERE}:{where}/healthz")).status_code == 200
                refused = await client.get(f"http://{HERE}:{where}/anything")
                assert (refused.status_code, refused.json()["error"]["data"]["code"]) == (403, "IP_BLOCKED")
    assert server.guard.statistics().counts.rejected == {}


async def test_a_large_body_of_one_who_is_refused_is_not_waited_for() -> None:
    server = desk(throttle=Throttle(ip_filter=IPFilter(deny=[DENIED])))
    async with serving(server) as port, asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection(HERE, port, local_addr=(DENIED, 0))
        writer.write(b"POST /mcp HTTP/1.1\r\nHost: desk\r\nContent-Length: 1000000\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 403 ")
        writer.close()


# ------------------------------------------------------------------------------------------- the host's name


async def test_a_proxy_that_passes_the_hosts_name_on_needs_it_to_be_allowed() -> None:
    named = {"Host": "mcp.example.com", "Content-Type": "application/json"}
    allowed = TransportSecuritySettings(allowed_hosts=["mcp.example.com"])
    for security, expected in ((None, 421), (allowed, 400)):
        async with (
            serving(desk(trusted_proxies=[HERE]), transport_security=security) as port,
            Proxy(port).open() as proxy,
            http_client(headers=named) as client,
        ):
            answer = await client.post(f"http://{HERE}:{proxy}/mcp", content=b"{}")
            assert answer.status_code == expected
