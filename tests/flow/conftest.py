"""Servers for the whole session, one connection of each kind, and a look at what each test leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import pytest

from tests.flow.wires import ALL, Servers, Wire

_NUMBERS: Final = itertools.count()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("flow"))
    yield servers
    servers.close()


@pytest.fixture(scope="session", params=ALL, ids=str)
async def connection(request: pytest.FixtureRequest, servers: Servers) -> AsyncIterator[Wire]:
    """One connection of each kind, for all tests that do not end it."""
    async with servers.of(request.param).connect() as wire:
        yield wire


@pytest.fixture
async def wire(connection: Wire) -> AsyncIterator[Wire]:
    """A connection of each kind, whose server has nothing left to do when the test is over."""
    yield connection
    assert_clean(await connection.end())


@pytest.fixture
def case() -> str:
    """What nobody else shares a limit with."""
    return f"case-{next(_NUMBERS)}"


def assert_clean(left: dict[str, Any]) -> None:
    """Nothing runs or waits, nothing is held, and the counters add up."""
    assert [left[name] for name in ("active", "waiting", "places", "live_slots")] == [0, 0, 0, 0]
    for tool, counts in left["tools"].items():
        ended = ("completed", "failed", "timed_out", "cancelled")
        assert counts["started"] == sum(counts[name] for name in ended), tool
        refused = sum(counts["rejected"].values())
        assert counts["submitted"] == refused + counts["cancelled_waiting"] + counts["started"], tool
