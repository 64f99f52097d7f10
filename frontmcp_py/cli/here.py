"""Is an address this machine's own? Nobody else's server is to be flooded."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from frontmcp_py.cli.output import Failure

MCP_PATH = "/mcp"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is asked.

    Attributes:
        mcp: The URL of its tools.
        base: What `/healthz`, `/readyz` and `/metrics` follow.
    """

    mcp: str
    base: str

    @classmethod
    def of(cls, url: str) -> Place:
        """Read a URL; without a path, the tools are at `/mcp`, and the probes are beside them.

        Raises:
            Failure: It is no URL of HTTP.
        """
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as error:
            raise Failure(f"{url!r} is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Failure(f"{url!r} is no URL; give one such as http://127.0.0.1:8000/mcp")
        path = parts.path if parts.path.strip("/") else MCP_PATH
        origin = f"{parts.scheme}://{parts.netloc}"
        return cls(f"{origin}{path}", origin + path.rstrip("/").rpartition("/")[0])


def refuse_elsewhere(url: str) -> None:
    """Make sure that a URL leads to this machine.

    Raises:
        Failure: One of the addresses that its host stands for is not this machine's, or there is none.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        found = socket.getaddrinfo(host, parts.port or 80, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Failure(f"{host} is not known: {error}") from None
    for family, _, _, _, address in found:
        if not _is_own(family, address):
            raise Failure(
                f"{host} ({address[0]}) is not this machine; only servers of this machine are flooded"
            )


def _is_own(family: int, address: tuple[object, ...]) -> bool:
    literal = ip_address(str(address[0]).partition("%")[0])
    if literal.is_loopback:
        return True
    # What can be bound is one's own; groups and broadcasts can be, too, and are not.
    if literal.is_multicast or str(literal) == "255.255.255.255":
        return False
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True
