from __future__ import annotations

from collections.abc import Iterator

import pytest

from frontmcp_py.guard import Guard
from tests.guard.support import every_guard_ends_clean
from tests.servers import own_valkey as own_valkey
from tests.servers import valkey as valkey


@pytest.fixture(autouse=True)
def guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Guard]]:
    """Every guard that the test makes. Each must have nothing left when the test has ended."""
    with every_guard_ends_clean(monkeypatch) as made:
        yield made
