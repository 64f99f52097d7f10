from __future__ import annotations

from ipaddress import IPv4Address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontmcp_py.address import parse_address
from frontmcp_py.errors import ConfigurationError
from frontmcp_py.http.peer import (
    PEER,
    TrustedProxies,
    client_address,
    hop_address,
    is_local,
    is_near,
    unread_header,
)

TRUSTED = TrustedProxies(["10.0.0.0/8", "2001:db8:ffff::/48"])
PROXY = parse_address("10.0.0.2")


def lines(*values: str, name: str = "x-forwarded-for") -> list[tuple[bytes, bytes]]:
    return [(b"host", b"mcp.example.com"), *((name.encode(), value.encode("latin-1")) for value in values)]


def client(peer: str | None, *values: str, trusted: TrustedProxies = TRUSTED) -> str | None:
    address = client_address(parse_address(peer), lines(*values), trusted)
    return None if address is None else str(address)


# ------------------------------------------------------------------------------------- whom the proxies name


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["198.51.100.5"], "198.51.100.5"),
        (["1.2.3.4, 198.51.100.5"], "198.51.100.5"),
        (["1.2.3.4, 198.51.100.5, 10.9.9.9"], "198.51.100.5"),
        (["1.2.3.4,198.51.100.5 ,\t10.9.9.9 "], "198.51.100.5"),
        (["10.3.3.3, 198.51.100.5"], "198.51.100.5"),
        (["198.51.100.5, 2001:db8:ffff::1"], "198.51.100.5"),
        (["2001:db8::1, ::ffff:10.0.0.9"], "2001:db8::1"),
    ],
)
def test_the_client_is_the_right_most_hop_that_is_no_trusted_proxy(values: list[str], expected: str) -> None:
    assert client("10.0.0.2", *values) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1.2.3.4", "198.51.100.5"], "198.51.100.5"),
        (["1.2.3.4, 198.51.100.5", "10.0.0.3"], "198.51.100.5"),
        (["1.2.3.4", "198.51.100.5", "10.0.0.3, 10.0.0.4"], "198.51.100.5"),
        (["garbage", "198.51.100.5"], "198.51.100.5"),
        (["198.51.100.5", "garbage"], None),
    ],
)
def test_several_header_lines_are_one_list_in_their_order(values: list[str], expected: str | None) -> None:
    assert client("10.0.0.2", *values) == expected


def test_if_every_hop_is_a_trusted_proxy_the_left_most_is_the_client() -> None:
    assert client("10.0.0.2", "10.1.1.1, 10.2.2.2", "10.3.3.3") == "10.1.1.1"


def test_a_proxy_that_forwards_for_nobody_is_the_client() -> None:
    assert client("10.0.0.2") == "10.0.0.2"


@pytest.mark.parametrize("peer", ["198.51.100.5", "127.0.0.1", "2001:db8::1", "11.0.0.1"])
def test_whoever_is_not_trusted_is_the_client_whatever_the_header_says(peer: str) -> None:
    assert client(peer, "1.2.3.4, 10.0.0.3") == peer


def test_nobody_is_trusted_unless_named() -> None:
    assert client("10.0.0.2", "1.2.3.4", trusted=TrustedProxies()) == "10.0.0.2"


def test_a_peer_without_an_address_has_none_whatever_the_header_says() -> None:
    everybody = TrustedProxies(["0.0.0.0/0", "::/0"])
    assert client(None, "1.2.3.4", trusted=everybody) is None
    assert client("testclient", "1.2.3.4", trusted=everybody) is None


def test_a_mapped_peer_is_the_ipv4_proxy() -> None:
    assert client("::ffff:10.0.0.2", "198.51.100.5") == "198.51.100.5"


@pytest.mark.parametrize(
    "garbage",
    [
        *(
            "",
            " ",
            ",",
            "1.2.3.4,",
            "1.2.3.4, ,",
            "unknown",
            "_hidden",
            "localhost",
            "{{7*7}}",
            "${jndi:ldap://x}",
        ),
        *("010.0.0.1", "0x0a000001", "10.1", "1.2.3.4.5", "for=1.2.3.4", '"1.2.3.4"', "1.2.3.4;5.6.7.8"),
        *("1.2.3.4:", "1.2.3.4:http", "1.2.3.4:123456", "[1.2.3.4]", "[2001:db8::1", "2001:db8::1]", "[]:80"),
        *("[2001:db8::1]:", "[2001:db8::1]80", "\x00\xff\xfe", "1.2.3.4\x00", "x" * 20_000, "," * 20_000),
        *("[" * 20_000, ":" * 20_000, "1." * 10_000, "[:" + "0" * 20_000),
    ],
)
def test_garbage_that_is_reached_is_no_address(garbage: str) -> None:
    assert client("10.0.0.2", f"198.51.100.5, {garbage}") is None
    assert client("10.0.0.2", garbage, "10.0.0.3") is None


def test_garbage_that_is_not_reached_is_not_looked_at() -> None:
    assert client("10.0.0.2", "garbage, , 198.51.100.5, 10.0.0.3") == "198.51.100.5"


def test_five_hundred_hops_are_walked() -> None:
    assert client("10.0.0.2", "198.51.100.5, " + ", ".join(["10.0.0.3"] * 500)) == "198.51.100.5"
    assert client("10.0.0.2", ", ".join(f"1.2.3.{n % 256}" for n in range(500))) == "1.2.3.243"


@pytest.mark.parametrize("name", ["forwarded", "x-real-ip"])
def test_of_a_trusted_proxy_only_x_forwarded_for_is_read(name: str) -> None:
    other = lines("for=198.51.100.7", name=name)
    assert client_address(PROXY, other, TRUSTED) is None
    both = [*other, *lines("198.51.100.5"), *other]
    assert client_address(PROXY, both, TRUSTED) == IPv4Address("198.51.100.5")


# Hops that a list is made of: proxies, clients and garbage.
hops = st.sampled_from(["10.0.0.3", "10.0.0.4:80", "198.51.100.5", "[2001:db8::1]:443", "unknown", "", " "])


@given(st.lists(hops, min_size=1, max_size=6), st.lists(st.booleans(), min_size=6, max_size=6))
def test_how_a_list_is_spread_over_lines_changes_nothing(chain: list[str], breaks: list[bool]) -> None:
    values = [chain[0]]
    for hop, breaks_here in zip(chain[1:], breaks, strict=False):
        if breaks_here:
            values.append(hop)
        else:
            values[-1] += f", {hop}"
    expected = PROXY
    for hop in reversed(chain):
        expected = hop_address(hop)
        if expected not in TRUSTED:
            break
    assert client_address(PROXY, lines(*values), TRUSTED) == expected


@given(st.text(st.characters(max_codepoint=255), max_size=60), st.ip_addresses())
def test_what_a_client_writes_never_changes_whom_its_proxy_names(forged: str, named: Any) -> None:
    named = parse_address(str(named))
    if named in TRUSTED:
        return
    for values in ([f"{forged}, {named}"], [forged, str(named)]):
        assert client_address(PROXY, lines(*values), TRUSTED) == named


# -------------------------------------------------------------------------------------------------- one hop


@pytest.mark.parametrize(
    ("hop", "expected"),
    [
        ("1.2.3.4", "1.2.3.4"),
        (" 1.2.3.4\t", "1.2.3.4"),
        ("10.0.0.1\n", "10.0.0.1"),
        ("1.2.3.4:5678", "1.2.3.4"),
        ("2001:db8::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:db8::1]:443", "2001:db8::1"),
        ("[::ffff:1.2.3.4]:80", "1.2.3.4"),
        ("::ffff:1.2.3.4", "1.2.3.4"),
        ("fe80::1%eth0", "fe80::1"),
        (
            "[0000:0000:0000:0000:0000:ffff:203.113.255.255%interface.with.a.long.name]:65535",
            "203.113.255.255",
        ),
        ("[fe80::1%eth0]:80", "fe80::1"),
        # Without brackets the port would be a part of the address, and is taken for one.
        ("2001:db8::1:443", "2001:db8::1:443"),
    ],
)
def test_a_hop_is_read_without_its_port_and_brackets(hop: str, expected: str) -> None:
    assert str(hop_address(hop)) == expected


@given(st.ip_addresses(), st.integers(0, 65_535))
def test_every_address_is_read_with_a_port_and_without(address: Any, port: int) -> None:
    expected = parse_address(str(address))
    in_brackets = f"[{address}]" if address.version == 6 else str(address)
    assert hop_address(str(address)) == expected
    assert hop_address(in_brackets) == expected
    assert hop_address(f"{in_brackets}:{port}") == expected


# --------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("rules", ["10.0.0.0/8", b"10.1.0.0/16", None, 10, {"10.0.0.0/8"}])
def test_a_list_is_asked_for(rules: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TrustedProxies(rules, "FrontMCP.trusted_proxies")
    assert str(caught.value).startswith("FrontMCP.trusted_proxies: ")
    assert str(caught.value).endswith("is not allowed; give a list of addresses and networks")


@pytest.mark.parametrize("rule", ["*", "localhost", "10.0.0.1/8", "10.0.0.0/33", "", "010.0.0.0/8", 10, True])
def test_a_rule_that_cannot_be_read_is_named(rule: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TrustedProxies(["::1", rule], "FrontMCP.trusted_proxies")
    assert str(caught.value).startswith(f"FrontMCP.trusted_proxies[1]: {rule!r} is not allowed; give an IPv4")


def test_none_is_trusted_without_rules() -> None:
    assert not TrustedProxies()
    assert PROXY not in TrustedProxies()
    assert TRUSTED
    assert PROXY in TRUSTED


# -------------------------------------------------------------------------------------- what is not believed


@pytest.mark.parametrize(
    ("names", "untrusted", "trusted"),
    [
        ([], None, None),
        (["host", "via", "x-forwarded-proto"], None, None),
        (["x-forwarded-for"], "X-Forwarded-For", None),
        (["forwarded"], "Forwarded", "Forwarded"),
        (["x-real-ip"], "X-Real-IP", "X-Real-IP"),
        (["forwarded", "x-forwarded-for"], "X-Forwarded-For", None),
    ],
)
def test_a_header_that_is_not_read_is_found(
    names: list[str], untrusted: str | None, trusted: str | None
) -> None:
    headers = [(name.encode(), b"198.51.100.5") for name in names]
    assert unread_header(headers, is_trusted=False) == untrusted
    assert unread_header(headers, is_trusted=True) == trusted


@pytest.mark.parametrize(
    ("address", "near"),
    [
        *(
            (near, True)
            for near in ("127.0.0.1", "127.9.9.9", "::1", "10.0.0.1", "172.16.0.1", "172.31.255.255")
        ),
        *((near, True) for near in ("192.168.1.1", "100.64.0.1", "169.254.1.1", "fd00::1", "fe80::1")),
        *((far, False) for far in ("203.0.113.7", "198.51.100.1", "172.32.0.1", "100.128.0.1", "8.8.8.8")),
        *((far, False) for far in ("2001:db8::1", "2606:4700::1", "::2")),
        ("::ffff:192.168.1.1", True),
    ],
)
def test_near_are_this_machine_and_private_networks(address: str, near: bool) -> None:
    read = parse_address(address)
    assert read is not None
    assert is_near(read) == near


# ----------------------------------------------------------------------------------------------------- local


def scope(
    client: str | None = "127.0.0.1",
    host: str | None = "127.0.0.1:8000",
    proxy: str | None = None,
    **headers: str,
) -> dict[str, Any]:
    given = {"host": host, **headers} if host is not None else headers
    made: dict[str, Any] = {
        "client": None if client is None else (client, 5),
        "headers": [
            (name.replace("_", "-").encode(), value.encode())
            for name, value in given.items()
            if value is not None
        ],
    }
    if proxy is not None:
        made[PEER] = (proxy, 7)
    return made


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LocalHost", "localhost:8000", "127.0.0.1", "127.0.0.1:80", "127.8.8.8:1"),
        *("[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]"),
    ],
)
def test_who_asks_this_machine_from_this_machine_is_local(address: str, host: str) -> None:
    assert is_local(scope(address, host))


@pytest.mark.parametrize(
    "host",
    [
        *(None, "", "example.com", "localhost.example.com", "localhost.", "127.0.0.1.example.com", "0.0.0.0"),
        *("::1", "[::2]", "[::1", "localhost:", "localhost:http", "user@localhost", "127.1", "2130706433"),
        *(
            "127.0.0.1, example.com",
            "localhost/",
            "10.0.0.1",
            "[fe80::1]:8000",
            "0177.0.0.1",
            "localhost:8000:1",
        ),
    ],
)
def test_another_host_is_not_local(host: str | None) -> None:
    assert not is_local(scope(host=host))


def test_two_hosts_are_not_local() -> None:
    asked = scope()
    asked["headers"].append((b"host", b"localhost"))
    assert not is_local(asked)


@pytest.mark.parametrize("address", [None, "", "testclient", "10.0.0.1", "203.0.113.7", "::", "0.0.0.0"])
def test_another_peer_is_not_local(address: str | None) -> None:
    assert not is_local(scope(address))


@pytest.mark.parametrize(
    "header", ["x_forwarded_for", "forwarded", "x_real_ip", "via", "x_forwarded_host", "x_forwarded_proto"]
)
def test_who_comes_through_a_proxy_that_is_not_trusted_is_not_local(header: str) -> None:
    assert not is_local(scope(**{header: "127.0.0.1"}))
    # A trusted one has to say for whom it forwards.
    assert is_local(scope(proxy="127.0.0.1", **{header: "127.0.0.1"})) == (header == "x_forwarded_for")


def test_who_comes_from_this_machine_through_a_trusted_proxy_here_is_local() -> None:
    assert is_local(scope(proxy="::1", x_forwarded_for="127.0.0.1", x_forwarded_proto="https"))
    assert is_local(scope(proxy="::1"))
    assert not is_local(scope("203.0.113.7", proxy="::1", x_forwarded_for="203.0.113.7"))
    assert not is_local(scope(None, proxy="::1", x_forwarded_for="garbage"))
    assert not is_local(scope(proxy="10.0.0.2", x_forwarded_for="127.0.0.1"))
    assert not is_local(scope(host="example.com", proxy="::1", x_forwarded_for="127.0.0.1"))
