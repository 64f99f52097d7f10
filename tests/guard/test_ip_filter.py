from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontmcp_py.address import parse_address
from frontmcp_py.guard.ip_filter import refusal
from frontmcp_py.policy import IPFilter


def verdict(ip_filter: IPFilter, text: str | None) -> str | None:
    """The code of a refusal, or `None`."""
    error = refusal(ip_filter, parse_address(text))
    return None if error is None else error.code


DENY_WINS = IPFilter(allow=["10.0.0.0/8"], deny=["10.1.0.0/16"], default="deny")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.1.2.3", "IP_BLOCKED"),
        ("10.2.2.3", None),
        ("11.0.0.1", "IP_NOT_ALLOWED"),
        (None, "IP_NOT_ALLOWED"),
    ],
)
def test_deny_wins_then_allow_then_the_default(address: str | None, expected: str | None) -> None:
    assert verdict(DENY_WINS, address) == expected


def test_an_allow_list_means_nothing_while_the_default_allows() -> None:
    assert verdict(IPFilter(allow=["10.0.0.0/8"]), "203.0.113.7") is None


def test_empty_lists_name_nobody() -> None:
    assert verdict(IPFilter(), "203.0.113.7") is None
    assert verdict(IPFilter(allow=[], deny=[], default="deny"), "203.0.113.7") == "IP_NOT_ALLOWED"


@pytest.mark.parametrize("text", [None, "", "not-an-ip", "10.1", "010.0.0.1", "0x0a000001"])
def test_a_missing_or_unreadable_address_gets_the_default_whatever_the_lists_say(text: str | None) -> None:
    everybody = ["0.0.0.0/0", "::/0"]
    assert verdict(IPFilter(deny=everybody), text) is None
    assert verdict(IPFilter(allow=everybody, default="deny"), text) == "IP_NOT_ALLOWED"


@pytest.mark.parametrize("text", ["::ffff:203.0.113.7", "::FFFF:cb00:7107", "0:0:0:0:0:ffff:203.0.113.7"])
def test_a_mapped_address_is_the_ipv4_address(text: str) -> None:
    assert verdict(IPFilter(deny=["203.0.113.0/24"]), text) == "IP_BLOCKED"
    assert verdict(IPFilter(deny=["::ffff:203.0.113.0/120"]), text) == "IP_BLOCKED"
    assert verdict(IPFilter(deny=["::/0"]), text) is None


def test_a_rule_for_every_ipv4_address_names_no_ipv6_address() -> None:
    assert verdict(IPFilter(deny=["0.0.0.0/0"]), "2001:db8::1") is None
    assert verdict(IPFilter(deny=["0.0.0.0/0"]), "::1") is None


def test_zones_are_ignored() -> None:
    assert verdict(IPFilter(deny=["fe80::/10"]), "fe80::1%eth0") == "IP_BLOCKED"
    assert verdict(IPFilter(deny=["fe80::1%eth1"]), "fe80::1%eth0") == "IP_BLOCKED"


def test_whole_addresses_are_compared_also_within_one_customers_network() -> None:
    blocked = IPFilter(deny=["2001:db8::1"])
    assert verdict(blocked, "2001:db8::1") == "IP_BLOCKED"
    assert verdict(blocked, "2001:db8::2") is None


def test_a_refusal_says_whom_it_refuses() -> None:
    blocked = refusal(IPFilter(deny=["::ffff:203.0.113.7"]), parse_address("::ffff:203.0.113.7"))
    assert str(blocked) == 'IP address "203.0.113.7" is blocked'
    unknown = refusal(IPFilter(default="deny"), None)
    assert str(unknown) == 'IP address "unknown" is not allowed'
    assert unknown is not None
    assert unknown.address is None


networks = st.builds(
    lambda address, length: (
        str(ip_network((int(address), length % (address.max_prefixlen + 1)), strict=False))
        if int(address) > 2**32
        else str(address)
    ),
    st.ip_addresses(),
    st.integers(0, 128),
)


@given(
    st.lists(networks, max_size=4),
    st.lists(networks, max_size=4),
    st.booleans(),
    st.ip_addresses(),
    st.booleans(),
)
def test_the_first_list_that_names_an_address_decides(
    allow: list[str], deny: list[str], allows: bool, address: IPv4Address | IPv6Address, is_named: bool
) -> None:
    if is_named:
        allow = [*allow, str(address)]
    ip_filter = IPFilter(allow, deny, "allow" if allows else "deny")
    read = parse_address(str(address))
    assert read is not None

    def names(rules: tuple[object, ...]) -> bool:
        return any(
            net.version == read.version and net.network_address <= read <= net.broadcast_address  # type: ignore[attr-defined]
            for net in rules
        )

    if names(ip_filter.deny):
        expected = "IP_BLOCKED"
    elif names(ip_filter.allow) or allows:
        expected = None
    else:
        expected = "IP_NOT_ALLOWED"
    assert verdict(ip_filter, str(address)) == expected
