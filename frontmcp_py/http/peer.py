"""Who is the client? What the socket says, or what a trusted proxy says in `X-Forwarded-For`.

Anybody can write that header. So it is read only when the socket's peer is in a network that the operator
has named, and from the right: each proxy appends whom it was asked by, and the first hop that is not a
trusted proxy itself is the last one that nobody could forge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, MutableMapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, Final

from frontmcp_py.address import Address, parse_address
from frontmcp_py.policy import IPNetwork, parse_networks

Header = tuple[bytes, bytes]
"""A header line of an ASGI scope; the name is in lower case."""

PEER: Final = "frontmcp.peer"
"""The scope's key for the socket's peer, set if that is a trusted proxy; `client` is whom it forwards for."""

_FORWARDED_FOR: Final = b"x-forwarded-for"

_UNREAD: Final = frozenset({b"forwarded", b"x-real-ip"})

# By these, and by what begins with that, a request that came through a proxy is known, whoever wrote them.
_TRACES: Final = frozenset({*_UNREAD, b"via"})
_TRACE: Final = b"x-forwarded-"

# An IPv6 address in brackets, with or without a port, or an IPv4 address with one.
_HOP: Final = re.compile(r"\[([^][\s]*:[^][\s]*)\](?::\d{1,5})?|([^][\s:]+):\d{1,5}", re.ASCII)

# An IPv6 address has at most 45 characters; the rest is for a zone, brackets and a port.
_LONGEST_HOP: Final = 100

_HOST: Final = re.compile(
    r"(?:(localhost)|\[([^][]*:[^][]*)\]|([0-9.]+))(?::\d{1,5})?", re.ASCII | re.IGNORECASE
)

# Where a proxy of one's own is likely to be: loopback, private (RFC 1918, RFC 4193), shared (RFC 6598) and
# link-local networks. `is_private` means something else, and not the same in every Python.
_NEAR: Final[tuple[IPv4Network | IPv6Network, ...]] = tuple(
    ip_network(network)
    for network in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16"),
        *("::1/128", "fc00::/7", "fe80::/10"),
    )
)


class TrustedProxies:
    """The networks of the proxies in front of a server, which are believed about whom they forward.

    Args:
        rules: Addresses and networks, as in `IPFilter`. None: nobody is believed.
        field: What the option is called, for the error.

    Raises:
        ConfigurationError: A rule cannot be read; it is named.

    Attributes:
        networks: What was given, read.
    """

    __slots__ = ("networks",)

    def __init__(self, rules: object = (), field: str = "trusted_proxies") -> None:
        self.networks: tuple[IPNetwork, ...] = parse_networks(rules, field)

    def __bool__(self) -> bool:
        return bool(self.networks)

    def __contains__(self, address: Address | None) -> bool:
        return bool(self.networks) and address is not None and any(address in each for each in self.networks)


def client_address(
    peer: Address | None, headers: Iterable[Header], trusted: TrustedProxies
) -> Address | None:
    """The address of the client, or `None` if nobody can tell it.

    A peer that is not trusted is the client, whatever the headers say, and so is a trusted one that forwards
    for nobody. Else it is the right-most hop of all `X-Forwarded-For` lines that is no trusted proxy, or the
    left-most if all are. A hop that is no address and is reached on the way says nothing, and neither does a
    proxy that writes only `Forwarded` or `X-Real-IP`: then there is no address.

    Args:
        peer: Whom the socket is connected to; `None`: there is no address, as on a Unix socket.
        headers: The header lines of the request, in order.
        trusted: Who is believed.
    """
    if peer not in trusted:
        return peer
    lines: list[bytes] = []
    is_unread = False
    for name, value in headers:
        if name == _FORWARDED_FOR:
            lines.append(value)
        elif name in _UNREAD:
            is_unread = True
    address: Address | None = None if is_unread else peer
    for hop in _from_the_right(lines):
        address = hop_address(hop)
        if address not in trusted:
            break
    return address


def hop_address(hop: str) -> Address | None:
    """The address that an entry of `X-Forwarded-For` names, without a port and brackets; `None`: garbage."""
    hop = hop.strip()
    if len(hop) > _LONGEST_HOP:
        return None
    address = parse_address(hop)
    if address is None and (found := _HOP.fullmatch(hop)):
        address = parse_address(found[1] or found[2])
    return address


def unread_header(headers: Iterable[Header], *, is_trusted: bool) -> str | None:
    """A header by which a proxy says for whom it forwards, and which is not read; `None`: there is none.

    Args:
        headers: The header lines of a request.
        is_trusted: Whether it came from a trusted proxy, of which `X-Forwarded-For` is read.
    """
    found: str | None = None
    for name, _ in headers:
        if name == _FORWARDED_FOR:
            return None if is_trusted else "X-Forwarded-For"
        if name in _UNREAD:
            found = "Forwarded" if name == b"forwarded" else "X-Real-IP"
    return found


def is_near(address: Address) -> bool:
    """Whether an address is one of this machine or of a private network, where proxies of one's own are."""
    return any(address in network for network in _NEAR)


def is_local(scope: MutableMapping[str, Any]) -> bool:
    """Whether a request was made on this machine, for this machine.

    The socket's peer and the client have to be loopback addresses, and the one `Host` header has to name
    loopback, with any port or none, so that a web page cannot get here by letting its own name resolve to
    this machine (DNS rebinding). Whoever comes through a proxy that is not trusted is not local, wherever
    the proxy is.

    Args:
        scope: The request's, of an app with or without a `Door`.
    """
    headers: list[Header] = list(scope["headers"])
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) != 1 or not _is_loopback_host(hosts[0]):
        return False
    if not _is_loopback(scope.get("client")):
        return False
    if PEER in scope:
        # The client is whom the proxy named, if that wrote `X-Forwarded-For`, and without an address if it
        # wrote only another header that says whom it forwards.
        names = {name for name, _ in headers}
        return _is_loopback(scope[PEER]) and (_FORWARDED_FOR in names or not any(map(_is_trace, names)))
    return not any(_is_trace(name) for name, _ in headers)


def socket_address(client: tuple[str, int] | None) -> Address | None:
    """The address in a scope's `client`; `None`: there is none, or it cannot be read."""
    return None if client is None else parse_address(client[0])


def _from_the_right(lines: list[bytes]) -> Iterator[str]:
    """The entries of header lines, last first. Takes no more of a line apart than is asked for."""
    for line in reversed(lines):
        end = len(line)
        while end >= 0:
            begin = line.rfind(b",", 0, end) + 1
            yield line[begin:end].decode("latin-1")
            end = begin - 1


def _is_trace(name: bytes) -> bool:
    return name in _TRACES or name.startswith(_TRACE)


def _is_loopback(client: tuple[str, int] | None) -> bool:
    address = socket_address(client)
    return address is not None and address.is_loopback


def _is_loopback_host(value: bytes) -> bool:
    found = _HOST.fullmatch(value.decode("latin-1").strip())
    if found is None:
        return False
    address = parse_address(found[2] or found[3])
    return found[1] is not None or (address is not None and address.is_loopback)
