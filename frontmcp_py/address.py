"""A client's address: one reading of it for limiter and filter alike."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

Address = IPv4Address | IPv6Address

# The longest text of an IPv6 address with an embedded IPv4 one, without a zone.
_LONGEST = 45


def parse_address(text: str | None) -> Address | None:
    """The address that `text` names, or `None` when it names none.

    Blanks around it and a zone (`fe80::1%eth0`) are dropped, and an IPv4 address that is mapped into IPv6
    (`::ffff:203.0.113.7`) is the IPv4 address. Short, octal or hexadecimal IPv4 forms are no addresses:
    different readers take them for different hosts.
    """
    if text is None:
        return None
    bare, _, _ = text.strip().partition("%")
    # Only what is short is remembered: whoever writes a header chooses its length.
    return _parse(bare) if len(bare) <= _LONGEST else None


@lru_cache(maxsize=4096)
def _parse(bare: str) -> Address | None:
    try:
        address = ip_address(bare)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def address_block(address: Address) -> str:
    """Whom an address stands for when calls are counted: itself for IPv4, its /64 for IPv6.

    One IPv6 customer is given a whole /64 (RFC 6177), so counting single addresses would count nothing.
    """
    if isinstance(address, IPv4Address):
        return str(address)
    return str(ip_network((int(address), 64), strict=False))
