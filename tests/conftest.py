"""What every test may rely on: no settings from outside, asyncio, and in CI the same examples every time.

After each of them the counters of every guard in this process add up, whatever it did.
"""

import functools
import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from frontmcp_py import Guard
from tests.reconcile import adds_up

# No deadline: tests never assert a time. In CI the same examples are drawn in every run, so that a red run is
# one that anybody can repeat; elsewhere new ones are, and those that failed are kept in .hypothesis.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_configure() -> None:
    for name in [name for name in os.environ if name.startswith("FRONTMCP_")]:
        del os.environ[name]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


# Every guard there is, and what it had been through when its counters were looked at last.
_GUARDS: "weakref.WeakKeyDictionary[Guard, object]" = weakref.WeakKeyDictionary()
_make_guard = Guard.__init__


@functools.wraps(_make_guard)
def _remember_guard(self: Guard, *args: Any, **options: Any) -> None:
    _make_guard(self, *args, **options)
    _GUARDS[self] = None


Guard.__init__ = _remember_guard  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def the_counters_of_every_guard_add_up() -> Iterator[None]:
    yield
    for guard, seen in list(_GUARDS.items()):
        now = [(row.submitted, row.started, row.completed) for row in guard._rows.values()]
        if now != seen:
            adds_up(guard)
            _GUARDS[guard] = now


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
