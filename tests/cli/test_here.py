"""Only servers of this machine are flooded."""

from __future__ import annotations

import socket

import pytest

from frontmcp_py.cli.here import Place, refuse_elsewhere
from frontmcp_py.cli.output import Failure


@pytest.mark.parametrize(
    ("url", "mcp", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/mcp", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/mcp", "http://127.0.0.1:8000"),
        ("http://[::1]:8000/mcp", "http://[::1]:8000/mcp", "http://[::1]:8000"),
        ("https://localhost/desk/mcp/", "https://localhost/desk/mcp/", "https://localhost/desk"),
    ],
)
def test_probes_are_beside_the_tools(url: str, mcp: str, base: str) -> None:
    assert Place.of(url) == Place(mcp, base)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/", "http://", "http:///mcp", "http://127.0.0.1:many/"])
def test_what_is_no_url_of_http_is_one_sentence(url: str) -> None:
    with pytest.raises(Failure, match="is no URL"):
        Place.of(url)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000/mcp", "http://127.8.9.10/", "http://localhost:1/", "http://0.0.0.0:8000/"]
)
def test_this_machine_may_be_flooded(url: str) -> None:
    refuse_elsewhere(url)


def test_so_may_its_own_addresses_in_a_network() -> None:
    """The address that packets would go out from; none are sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        own = probe.getsockname()[0]
    refuse_elsewhere(f"http://{own}:8000/mcp")


@pytest.mark.parametrize(
    "host", ["192.0.2.1", "198.51.100.7", "[2001:db8::1]", "224.0.0.1", "255.255.255.255", "[ff02::1]"]
)
def test_no_other_machine_is_flooded(host: str) -> None:
    with pytest.raises(Failure, match=r"only servers of this machine are flooded|is not known"):
        refuse_elsewhere(f"http://{host}:8000/mcp")


def test_a_name_with_one_foreign_address_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> list[object]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 80)) for each in ("127.0.0.1", "192.0.2.1")
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(Failure, match=r"both\.example \(192\.0\.2\.1\) is not this machine"):
        refuse_elsewhere("http://both.example/mcp")
