"""May this address call?"""

from __future__ import annotations

from frontmcp_py.address import Address
from frontmcp_py.errors import IpBlocked, IpNotAllowed
from frontmcp_py.policy import IPFilter


def refusal(ip_filter: IPFilter, address: Address | None) -> IpBlocked | IpNotAllowed | None:
    """Why an address may not call, or `None` if it may.

    Whole addresses are compared, also IPv6 ones. An IPv4 rule never matches an IPv6 address nor the other way
    round, so `0.0.0.0/0` and `::/0` name one family each.

    Args:
        ip_filter: The rules.
        address: Who calls, as `parse_address` reads it, so that an IPv4 address that was mapped into IPv6 is
            an IPv4 address; `None`: it is missing or cannot be read, and gets the filter's default.
    """
    if address is not None:
        if any(address in network for network in ip_filter.deny):
            return IpBlocked(str(address))
        if any(address in network for network in ip_filter.allow):
            return None
    if ip_filter.default == "allow":
        return None
    return IpNotAllowed(None if address is None else str(address))
