"""Who calls? From a request of the SDK to a `Caller`, with what the server itself could verify.

Nobody gets around a limit by not signing in, by a new session header or by a forged address: what is not
verified is left out, and who has nothing shares a count with everybody else who has nothing.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote

from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken, principal_components
from mcp.server.context import ServerRequestContext
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from frontmcp_py.address import parse_address
from frontmcp_py.call import Caller

SESSIONS_ARE_CHECKED: Final = "frontmcp_sessions_are_checked"
"""The `app.state` name by which an HTTP app says that it checks the session ids of the handshake era."""

_SESSION_HEADER: Final = "mcp-session-id"


def caller_of(ctx: ServerRequestContext[Any, Any], local_transport: str) -> Caller:
    """Who sent this request.

    Args:
        ctx: The request, as the SDK hands it to handlers.
        local_transport: What requests that did not come over HTTP came over.
    """
    token = get_access_token()
    request = ctx.request
    peer = getattr(request, "client", None)
    address = parse_address(peer.host) if peer is not None else None
    return Caller(
        user_id=principal(token) if token is not None else None,
        client_id=token.client_id if token is not None else None,
        session_id=_session_id(ctx),
        client_ip=str(address) if address is not None else None,
        transport=local_transport if request is None else "streamable-http",
    )


def principal(token: AccessToken) -> str:
    """Whom an access token stands for: issuer and subject, else the client it was issued to.

    A subject is unique only for its issuer (RFC 9068, section 2.2), and two users of one client are two
    principals. Both parts are escaped, so that no two principals have one text.
    """
    client_id, issuer, subject = principal_components(token)
    if subject is None:
        return quote(client_id, safe="", errors="surrogatepass")
    return "|".join(quote(part or "", safe="", errors="surrogatepass") for part in (issuer, subject))


def _session_id(ctx: ServerRequestContext[Any, Any]) -> str | None:
    """The session's id, if the transport has checked it.

    Only stateful HTTP of the handshake era has sessions; anywhere else the header is the caller's invention.
    """
    request = ctx.request
    if request is None or ctx.protocol_version not in HANDSHAKE_PROTOCOL_VERSIONS:
        return None
    app = request.scope.get("app")
    if app is None or not getattr(app.state, SESSIONS_ARE_CHECKED, False):
        return None
    session_id = request.headers.get(_SESSION_HEADER)
    return session_id if isinstance(session_id, str) else None
