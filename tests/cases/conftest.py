"""Every test here runs in virtual time, and leaves a clean desk and nothing that still runs."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from frontmcp_py import Throttle
from frontmcp_py.testing import VirtualTimeLoop, settle
from tests.cases.desk import Desk, other_tasks
from tests.servers import own_valkey as own_valkey
from tests.servers import valkey as valkey


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": VirtualTimeLoop}


@pytest.fixture
async def open_desk() -> AsyncIterator[Callable[..., Desk]]:
    """Makes desks; when the test is over, each of them has to be clean."""
    known = asyncio.all_tasks()
    desks: list[Desk] = []

    def open_desk(throttle: Throttle | None = None) -> Desk:
        desks.append(Desk(throttle))
        return desks[-1]

    yield open_desk
    for desk in desks:
        await desk.everybody()
    await settle()
    for desk in desks:
        desk.assert_clean()
    assert other_tasks(known) == set()


@pytest.fixture
async def desk(open_desk: Callable[..., Desk]) -> Desk:
    """A desk without a throttle, which has to be clean when the test is over."""
    return open_desk()


@pytest.fixture(autouse=True)
def nothing_unretrieved() -> Iterator[None]:
    """An error that nobody has asked for, or a task that nobody has waited for, is reported here."""
    yield
    gc.collect()
    # What is left (modules, validators, caches) stays, and need not be looked at after each test to come.
    gc.freeze()
