from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontmcp_py.address import address_block, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("203.0.113.7", IPv4Address("203.0.113.7")),
        (" 203.0.113.7\t", IPv4Address("203.0.113.7")),
        ("2001:db8::1", IPv6Address("2001:db8::1")),
        ("2001:DB8:0:0::0001", IPv6Address("2001:db8::1")),
        ("::ffff:203.0.113.7", IPv4Address("203.0.113.7")),
        ("::FFFF:cb00:7107", IPv4Address("203.0.113.7")),
        ("::ffff:203.0.113.7%eth0", IPv4Address("203.0.113.7")),
        ("fe80::1%eth0", IPv6Address("fe80::1")),
        ("fe80::1%", IPv6Address("fe80::1")),
        ("::1", IPv6Address("::1")),
    ],
)
def test_an_address_is_read(text: str, address: IPv4Address | IPv6Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *(
            None,
            "",
            " ",
            "unknown",
            "_hidden",
            "localhost",
            "example.com",
            "127.1",
            "0177.0.0.1",
            "0x7f.0.0.1",
        ),
        *(
            "2130706433",
            "203.0.113.256",
            "203.0.113.7:80",
            "[2001:db8::1]",
            "[2001:db8::1]:80",
            "1.2.3",
            "1.2.3.4.5",
        ),
        *(
            "203.0.113.007",
            ":::",
            "2001:db8::1::",
            "2001:db8:::1",
            "12345::",
            "203.0.113.7/32",
            "\uff12\uff10\uff13.0.113.7",
        ),
        *("203.0.113.7\x00", "203.0.113.7, 198.51.100.1", "::ffff:203.0.113", "x" * 10_000, "1" * 10_000),
    ],
)
def test_garbage_is_no_address(text: str | None) -> None:
    assert parse_address(text) is None


@given(st.ip_addresses())
def test_every_address_is_read_as_itself_or_as_the_ipv4_address_that_it_maps(
    address: IPv4Address | IPv6Address,
) -> None:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    assert parse_address(str(address)) == (mapped or address)


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_stands_for_itself_however_it_is_written(address: IPv4Address) -> None:
    mapped = parse_address(f"::ffff:{address}")
    assert mapped is not None
    assert address_block(mapped) == address_block(address) == str(address)


@given(st.ip_addresses(v=6), st.ip_addresses(v=6))
def test_ipv6_addresses_stand_for_their_64(one: IPv6Address, other: IPv6Address) -> None:
    same = int(one) >> 64 == int(other) >> 64
    assert (address_block(one) == address_block(other)) == same
    assert one in ip_network(address_block(one))
    neighbour = IPv6Address((int(one) >> 64 << 64) + (int(other) & (2**64 - 1)))
    assert address_block(neighbour) == address_block(one)
