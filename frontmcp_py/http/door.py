"""The door of an HTTP app: whose request is it, and may that address call? Before anything else runs."""

from __future__ import annotations

import logging
from typing import Final

from mcp_types import INVALID_REQUEST
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from frontmcp_py.address import Address
from frontmcp_py.clock import Clock, SystemClock
from frontmcp_py.errors import IpBlocked, IpNotAllowed
from frontmcp_py.guard.ip_filter import refusal
from frontmcp_py.http.peer import (
    PEER,
    TrustedProxies,
    client_address,
    is_near,
    socket_address,
    unread_header,
)
from frontmcp_py.policy import IPFilter

PROBES: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""The paths that are not filtered: whoever watches a server is told how it is."""

LOG_INTERVAL: Final = 60
"""Seconds between two lines about refusals of one kind. A flood is to fill nobody's disk."""

_BILLION: Final = 10**9

# RFC 6455 has no status of its own for it; 1008 is "policy violation".
_POLICY_VIOLATION: Final = 1008

logger: logging.Logger = logging.getLogger("frontmcp_py.http")


class Door:
    """ASGI middleware, the outermost of an app: finds the client's address and asks the IP filter.

    `scope["client"]` says from here on who the client is, so that filter, limiter and access log see one
    address: behind a trusted proxy it is the address that this names and port 0, or `None`, and the proxy is
    kept under `PEER`.

    A refusal is a 403 whose body is a JSON-RPC error without an id, as MCP's HTTP transport provides for, so
    that a client can show its message; its `data` is what other refusals have as `_meta`.

    Args:
        app: What is behind it.
        ip_filter: Which addresses may call; `None`: all.
        trusted: The proxies that are believed about whom they forward.
        unfiltered: The paths that any address may ask for.
        clock: Tells when a refusal may be logged again.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        ip_filter: IPFilter | None = None,
        trusted: TrustedProxies | None = None,
        unfiltered: frozenset[str] = PROBES,
        clock: Clock | None = None,
    ) -> None:
        self._app = app
        self._filter = ip_filter
        self._trusted = trusted or TrustedProxies()
        self._unfiltered = unfiltered
        self._log = _RefusalLog(clock or SystemClock())
        self._has_warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        if scope["type"] in ("http", "websocket"):
            # Without a filter and proxies, addresses are looked at only by a warning that is still to come.
            if self._trusted or not self._has_warned:
                self._find_client(scope)
            if self._filter is not None and _path(scope) not in self._unfiltered:
                error = refusal(self._filter, socket_address(scope.get("client")))
                if error is not None:
                    self._log.add(error)
                    await _refuse(error, scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _find_client(self, scope: Scope) -> None:
        headers = scope["headers"]
        peer = socket_address(scope.get("client"))
        is_trusted = peer in self._trusted
        if not self._has_warned and peer is not None:
            self._warn(peer, unread_header(headers, is_trusted=is_trusted), is_trusted)
        if is_trusted:
            client = client_address(peer, headers, self._trusted)
            scope[PEER] = scope["client"]
            scope["client"] = None if client is None else (str(client), 0)

    def _warn(self, peer: Address, header: str | None, is_trusted: bool) -> None:
        if header is None:
            return
        if is_trusted:
            logger.warning(
                "the trusted proxy %s says in %s for whom it forwards. That is not read: its clients have "
                "no address. Let it write X-Forwarded-For, and let nothing through that clients say there",
                *(peer, header),
            )
        elif is_near(peer):
            logger.warning(
                "%s says in %s for whom it forwards, and is not believed: whoever is behind it counts as one "
                'address. If it is a proxy of yours, name it: trusted_proxies=["%s"]',
                *(peer, header, peer),
            )
        else:
            return
        self._has_warned = True


class _RefusalLog:
    """One line for each kind of refusal and interval."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next: dict[str, int] = {}
        self._untold: dict[str, int] = {}

    def add(self, error: IpBlocked | IpNotAllowed) -> None:
        now = self._clock.monotonic_ns()
        if now < self._next.get(error.code, now):
            self._untold[error.code] = self._untold.get(error.code, 0) + 1
            return
        self._next[error.code] = now + LOG_INTERVAL * _BILLION
        untold = self._untold.pop(error.code, 0)
        before = f" (and {untold} more before it)" if untold else ""
        logger.info("[%s] %s: %s%s", error.error_id, error.code, error.message, before)


async def _refuse(error: IpBlocked | IpNotAllowed, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        # Closing before it is accepted is a 403 as well, of the server's own.
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": error.message})
        return
    body = {"code": INVALID_REQUEST, "message": error.message, "data": error.meta()}
    answer = JSONResponse({"jsonrpc": "2.0", "id": None, "error": body}, status_code=403)
    await answer(scope, receive, send)


def _path(scope: Scope) -> str:
    """The path as the app's routes see it: without the prefix under which the app is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
