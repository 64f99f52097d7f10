from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from pydantic import AnyHttpUrl
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontmcp_py import FrontMCP, IPFilter, Throttle
from frontmcp_py.errors import ConfigurationError
from frontmcp_py.http.door import LOG_INTERVAL, Door
from frontmcp_py.http.peer import PEER, TrustedProxies
from frontmcp_py.testing import FakeClock

NOBODY = IPFilter(default="deny")
PROXIES = TrustedProxies(["10.0.0.0/8"])


class Inside:
    """What is behind the door: keeps the scopes that come in."""

    def __init__(self) -> None:
        self.seen: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append(scope)
        if scope["type"] == "http":
            await PlainTextResponse("inside")(scope, receive, send)

    @property
    def client(self) -> object:
        """Whom the last scope names as the client."""
        return self.seen[-1]["client"]


def scope(
    path: str = "/mcp",
    client: str | None = "203.0.113.7",
    headers: Mapping[str, str] | None = None,
    **more: Any,
) -> Scope:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "scheme": "http",
        "http_version": "1.1",
        "server": ("127.0.0.1", 8000),
        "client": None if client is None else (client, 50_000),
        "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
        **more,
    }


async def ask(app: ASGIApp, asked: Scope) -> list[Message]:
    """What is answered to a request whose body nobody may read."""
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    await app(asked, receive, send)
    return sent


async def status(app: ASGIApp, asked: Scope) -> int:
    return int((await ask(app, asked))[0]["status"])


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "frontmcp_py.http" and record.levelno == level
    ]


# ------------------------------------------------------------------------------------------------ refusals


async def test_a_refusal_is_a_403_with_a_json_body_and_nothing_behind_the_door_runs() -> None:
    inside = Inside()
    start, body = await ask(Door(inside, ip_filter=IPFilter(deny=["203.0.113.0/24"])), scope())
    answer = json.loads(body["body"])
    assert start["status"] == 403
    assert dict(start["headers"])[b"content-type"] == b"application/json"
    error_id = answer["error"]["data"]["errorId"]
    assert error_id.startswith("err_")
    assert answer == {
        "jsonrpc": "2.0",
        "id": None,
        "error": {
            "code": -32600,
            "message": 'IP address "203.0.113.7" is blocked',
            "data": {"errorId": error_id, "code": "IP_BLOCKED"},
        },
    }
    assert inside.seen == []


async def test_who_is_in_no_list_is_told_so() -> None:
    _, body = await ask(Door(Inside(), ip_filter=NOBODY), scope(client=None))
    error = json.loads(body["body"])["error"]
    assert error["message"] == 'IP address "unknown" is not allowed'
    assert error["data"]["code"] == "IP_NOT_ALLOWED"


async def test_who_may_call_comes_in() -> None:
    inside = Inside()
    assert await status(Door(inside, ip_filter=IPFilter(deny=["198.51.100.0/24"])), scope()) == 200
    assert inside.client == ("203.0.113.7", 50_000)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_the_probes_are_not_filtered(path: str) -> None:
    door = Door(Inside(), ip_filter=NOBODY)
    assert await status(door, scope(path)) == 200
    assert await status(door, scope(f"/below{path}", root_path="/below")) == 200


@pytest.mark.parametrize(
    ("path", "root"),
    [
        *((path, "") for path in ("", "/", "/healthz/", "//healthz", "/healthz\n", "/HEALTHZ", "/healthz/x")),
        *((path, "") for path in ("/mcp/healthz", "/metrics/mcp", "/metricsx", "healthz", "/healthz;x")),
        *(("/below/healthz", root) for root in ("", "/bel", "/other", "/below/")),
        *((path, "/healthz") for path in ("/healthz", "/healthz/", "/healthz/mcp")),
    ],
)
async def test_paths_that_only_look_like_probes_are_filtered(path: str, root: str) -> None:
    assert await status(Door(Inside(), ip_filter=NOBODY), scope(path, root_path=root)) == 403


async def test_a_websocket_is_refused_before_it_is_accepted() -> None:
    inside = Inside()
    door = Door(inside, ip_filter=NOBODY)
    asked = {**scope("/mcp"), "type": "websocket"}
    assert [message["type"] for message in await ask(door, dict(asked))] == ["websocket.close"]
    can_answer = {**asked, "extensions": {"websocket.http.response": {}}}
    start, body = await ask(door, can_answer)
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 403)
    assert json.loads(body["body"])["error"]["data"]["code"] == "IP_NOT_ALLOWED"
    assert inside.seen == []
    await ask(Door(inside), asked)
    assert [each["type"] for each in inside.seen] == ["websocket"]


async def test_what_is_no_request_passes() -> None:
    inside = Inside()
    await ask(Door(inside, ip_filter=NOBODY, trusted=PROXIES), {"type": "lifespan"})
    assert inside.seen == [{"type": "lifespan"}]


async def test_a_flood_of_refusals_is_one_line_for_each_kind_and_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    ip_filter = IPFilter(deny=["203.0.113.0/24"], default="deny")
    door = Door(Inside(), ip_filter=ip_filter, clock=clock)
    caplog.set_level(logging.INFO)
    bodies = []
    for _ in range(5):
        bodies.append((await ask(door, scope()))[1]["body"])
        await ask(door, scope(client="198.51.100.5\nforged"))
    blocked, unknown = said(caplog, logging.INFO)
    first = json.loads(bodies[0])["error"]["data"]["errorId"]
    assert blocked == f'[{first}] IP_BLOCKED: IP address "203.0.113.7" is blocked'
    assert unknown.endswith('IP_NOT_ALLOWED: IP address "unknown" is not allowed')
    clock.advance(LOG_INTERVAL - 0.001)
    await ask(door, scope())
    assert len(said(caplog, logging.INFO)) == 2
    clock.advance(0.001)
    await ask(door, scope())
    await ask(door, scope())
    again = said(caplog, logging.INFO)[2:]
    assert len(again) == 1
    assert again[0].endswith("is blocked (and 5 more before it)")
    clock.advance(LOG_INTERVAL)
    await ask(door, scope())
    assert said(caplog, logging.INFO)[-1].endswith("is blocked (and 1 more before it)")


# ------------------------------------------------------------------------------------------------- proxies


async def test_behind_a_trusted_proxy_everybody_inside_sees_whom_it_names() -> None:
    inside = Inside()
    door = Door(inside, ip_filter=IPFilter(deny=["203.0.113.0/24"]), trusted=PROXIES)
    forwarded = {"x-forwarded-for": "1.2.3.4, [2001:db8::1]:443"}
    assert await status(door, scope(client="10.0.0.2", headers=forwarded)) == 200
    assert inside.client == ("2001:db8::1", 0)
    assert inside.seen[-1][PEER] == ("10.0.0.2", 50_000)
    forwarded = {"x-forwarded-for": "2001:db8::1, 203.0.113.9"}
    assert await status(door, scope(client="10.0.0.2", headers=forwarded)) == 403


async def test_who_is_not_behind_one_stays_as_the_socket_says() -> None:
    inside = Inside()
    door = Door(inside, trusted=PROXIES)
    await ask(door, scope(client="203.0.113.7", headers={"x-forwarded-for": "1.2.3.4"}))
    assert inside.client == ("203.0.113.7", 50_000)
    assert PEER not in inside.seen[-1]


async def test_a_client_that_its_proxy_cannot_name_has_no_address() -> None:
    inside = Inside()
    forwarded = scope(client="10.0.0.2", headers={"x-forwarded-for": "1.2.3.4, unknown"})
    assert await status(Door(inside, trusted=PROXIES), dict(forwarded)) == 200
    assert inside.client is None
    assert await status(Door(inside, trusted=PROXIES, ip_filter=NOBODY), dict(forwarded)) == 403
    denies_all = IPFilter(deny=["0.0.0.0/0", "::/0"])
    assert await status(Door(inside, trusted=PROXIES, ip_filter=denies_all), dict(forwarded)) == 200


async def test_a_probe_sees_the_client_too() -> None:
    inside = Inside()
    door = Door(inside, ip_filter=NOBODY, trusted=PROXIES)
    assert await status(door, scope("/metrics", "10.0.0.2", {"x-forwarded-for": "203.0.113.7"})) == 200
    assert inside.client == ("203.0.113.7", 0)


# ------------------------------------------------------------------------------------------------- warning


def forwarding(client: str, header: str = "x-forwarded-for") -> Scope:
    return scope(client=client, headers={header: "198.51.100.5"})


@pytest.mark.parametrize("trusted", [None, PROXIES])
@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "192.168.1.2", "fd00::1"])
@pytest.mark.parametrize(
    ("header", "name"),
    [("x-forwarded-for", "X-Forwarded-For"), ("forwarded", "Forwarded"), ("x-real-ip", "X-Real-IP")],
)
async def test_a_proxy_nearby_that_nobody_has_named_is_warned_about_once(
    caplog: pytest.LogCaptureFixture, trusted: TrustedProxies | None, peer: str, header: str, name: str
) -> None:
    door = Door(Inside(), trusted=trusted)
    for _ in range(3):
        await ask(door, forwarding(peer, header))
        await ask(door, forwarding("192.168.7.7", header))
    assert said(caplog, logging.WARNING) == [
        f"{peer} says in {name} for whom it forwards, and is not believed: whoever is behind it counts as "
        f'one address. If it is a proxy of yours, name it: trusted_proxies=["{peer}"]'
    ]


async def test_trusted_proxies_are_believed_after_a_warning_too() -> None:
    inside = Inside()
    door = Door(inside, trusted=PROXIES)
    await ask(door, forwarding("127.0.0.1"))
    await ask(door, forwarding("10.0.0.2"))
    assert inside.client == ("198.51.100.5", 0)


async def test_two_apps_warn_each(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        await ask(Door(Inside()), forwarding("127.0.0.1"))
    assert len(said(caplog, logging.WARNING)) == 2


@pytest.mark.parametrize("peer", ["203.0.113.7", "2001:db8::1", "testclient", None])
async def test_who_forges_from_afar_is_not_worth_a_line(
    caplog: pytest.LogCaptureFixture, peer: str | None
) -> None:
    door = Door(Inside())
    await ask(door, scope(client=peer, headers={"x-forwarded-for": "198.51.100.5"}))
    assert said(caplog, logging.WARNING) == []
    # And it does not use up the line about a proxy that is really there.
    await ask(door, forwarding("127.0.0.1"))
    assert len(said(caplog, logging.WARNING)) == 1


async def test_a_trusted_proxy_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    door = Door(Inside(), trusted=PROXIES)
    await ask(door, forwarding("10.0.0.2"))
    await ask(door, scope(client="10.0.0.2"))
    await ask(door, scope(client="127.0.0.1"))
    assert said(caplog, logging.WARNING) == []


async def test_a_trusted_proxy_that_writes_another_header_only_is_warned_about_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = Door(Inside(), trusted=PROXIES)
    for _ in range(2):
        await ask(door, forwarding("10.0.0.2", "forwarded"))
    (warning,) = said(caplog, logging.WARNING)
    assert warning.startswith("the trusted proxy 10.0.0.2 says in Forwarded for whom it forwards.")


# -------------------------------------------------------------------------------------------------- an app


class NoTokens:
    """Would be asked if a request came as far as that."""

    async def verify_token(self, token: str) -> AccessToken | None:
        raise AssertionError("the token was looked at")


def desk(deny: Iterable[str] = ("203.0.113.0/24",), **options: Any) -> FrontMCP:
    return FrontMCP("desk", throttle=Throttle(ip_filter=IPFilter(deny=list(deny))), **options)


async def test_an_app_refuses_before_it_looks_at_host_token_and_body() -> None:
    settings = AuthSettings(issuer_url=AnyHttpUrl("https://issuer.example"), resource_server_url=None)
    server = desk(auth=settings, token_verifier=NoTokens())

    @server.tool(priority="control")
    async def look() -> str:
        return "seen"

    app = server.http_app()
    headers = {"host": "evil.example", "authorization": "Bearer x", "content-length": "999999999"}
    assert await status(app, scope(headers=headers)) == 403
    assert await status(app, scope("/nowhere", headers=headers)) == 403
    # Whom the door lets in is read, and what is behind the gate is asked.
    with pytest.raises(AssertionError, match="the body was read"):
        await ask(app, scope(client="198.51.100.5", headers=headers))
    control = {**headers, "mcp-method": "tools/call", "mcp-name": "look"}
    control["mcp-protocol-version"] = "2026-07-28"
    with pytest.raises(AssertionError, match="the token was looked at"):
        await ask(app, scope(client="198.51.100.5", headers=control))


async def test_an_app_answers_probes_to_everybody() -> None:
    app = desk(["0.0.0.0/0", "::/0"]).http_app()
    assert await status(app, scope("/healthz", method="GET")) == 200
    assert await status(app, scope("/mcp", method="GET")) == 403


async def test_tools_that_are_served_where_a_probe_would_be_are_filtered() -> None:
    assert await status(desk().http_app(streamable_http_path="/metrics"), scope("/metrics")) == 403


async def test_an_app_below_another_filters_its_own_paths_only() -> None:
    outer = Starlette(
        routes=[Route("/", PlainTextResponse("outer"), methods=["POST"]), Mount("/desk", desk().http_app())]
    )
    assert await status(outer, scope("/")) == 200
    assert await status(outer, scope("/desk/mcp")) == 403
    assert await status(outer, scope("/desk/healthz", method="GET")) == 200


@pytest.mark.parametrize("off", [{"enabled": False}, {"mode": "observe"}])
async def test_the_filter_stays_when_the_throttle_is_off_or_observes(off: dict[str, Any]) -> None:
    throttle = Throttle(ip_filter=NOBODY, **off)
    assert await status(FrontMCP("desk", throttle=throttle).http_app(), scope()) == 403


async def test_the_filter_stays_when_the_environment_turns_the_throttle_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FRONTMCP_THROTTLE", "off")
    assert await status(FrontMCP("desk", throttle=Throttle(ip_filter=NOBODY)).http_app(), scope()) == 403


async def test_an_app_believes_the_proxies_that_its_server_names() -> None:
    app = desk(trusted_proxies=["10.0.0.0/8", "::1"]).http_app()
    forwarded = {"x-forwarded-for": "203.0.113.7"}
    assert await status(app, scope(client="10.0.0.2", headers=forwarded)) == 403
    assert await status(app, scope(client="::1", headers=forwarded)) == 403
    assert await status(app, scope("/nowhere", client="192.168.0.1", headers=forwarded)) == 404


@pytest.mark.parametrize("rules", ["10.0.0.0/8", None, ["10.0.0.1/8"], ["localhost"]])
def test_a_server_does_not_start_with_proxies_that_cannot_be_read(rules: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^FrontMCP\.trusted_proxies"):
        FrontMCP("desk", trusted_proxies=rules)


@pytest.mark.parametrize("make", ["streamable_http_app", "sse_app"])
async def test_the_apps_of_the_sdks_own_server_are_behind_the_door_too(make: str) -> None:
    server = FrontMCP("doors", throttle=Throttle(ip_filter=IPFilter(default="deny")))
    app = getattr(server.mcp, make)()
    for path in ("/mcp", "/sse", "/messages/"):
        assert await status(app, scope(path)) == 403
    assert await status(app, scope("/healthz")) != 403
