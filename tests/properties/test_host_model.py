"""Random batches: a host runs them as the model does, to the last state and moment."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator

import pytest

from frontmcp_py.testing import run_virtual
from tests.properties.host_model import Nest, check_against_model, check_rules


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hooks that fail are part of random batches, and need no traceback."""
    logging.getLogger("frontmcp_py.host").disabled = True
    yield
    logging.getLogger("frontmcp_py.host").disabled = False


async def all_of(check: Callable[[int], Awaitable[None]], seeds: range) -> None:
    for seed in seeds:
        await check(seed)


def test_a_host_runs_random_batches_as_the_model_does() -> None:
    run_virtual(all_of, check_against_model, range(300))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_a_host_runs_twenty_thousand_random_batches_as_the_model_does(chunk: int) -> None:
    run_virtual(all_of, check_against_model, range(1_000 + 2_000 * chunk, 3_000 + 2_000 * chunk))


def test_however_much_happens_at_one_moment_the_rules_hold() -> None:
    run_virtual(all_of, check_rules, range(150))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(5))
def test_however_much_happens_at_one_moment_the_rules_hold_in_ten_thousand_batches(chunk: int) -> None:
    run_virtual(all_of, check_rules, range(1_000 + 2_000 * chunk, 3_000 + 2_000 * chunk))


async def nest_all(seeds: range) -> list[int]:
    return [await Nest(seed).run() for seed in seeds]


def test_batches_within_batches_never_wait_for_ever() -> None:
    refused = run_virtual(nest_all, range(100))
    # Some have to be refused, and in most nothing has to be.
    assert 0 < sum(count > 0 for count in refused) < 100


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(5))
def test_ten_thousand_times_batches_within_batches_never_wait_for_ever(chunk: int) -> None:
    run_virtual(nest_all, range(1_000 + 2_000 * chunk, 3_000 + 2_000 * chunk))
