"""The system's clock."""

from __future__ import annotations

import time

from frontmcp_py.clock import Clock, SystemClock


def test_the_wall_clock_counts_nanoseconds_since_the_epoch() -> None:
    clock: Clock = SystemClock()
    before = time.time_ns()
    assert before <= clock.wall_ns() <= time.time_ns()


def test_the_monotonic_clock_is_the_one_of_event_loops() -> None:
    clock: Clock = SystemClock()
    before = time.monotonic_ns()
    assert before <= clock.monotonic_ns() <= time.monotonic_ns()
