"""What time is it? The one module that reads a clock.

Everything else is given a `Clock`, so that a test decides what time it is. Timers are the event loop's own.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time, in whole nanoseconds so that sums stay exact."""

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch (UTC), for what lines up with the calendar. May jump."""
        ...

    def monotonic_ns(self) -> int:
        """Nanoseconds since some fixed moment, for durations. Never goes back."""
        ...


class SystemClock:
    """The machine's clocks."""

    __slots__ = ()

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch (UTC)."""
        return time.time_ns()

    def monotonic_ns(self) -> int:
        """Nanoseconds of the machine's monotonic clock."""
        return time.monotonic_ns()


def suspended_s() -> float:
    """Seconds that the machine was suspended since it was booted; 0 where the system does not tell.

    Linux' monotonic clock, and so the event loop's, stands still meanwhile. The clocks of others do not.
    """
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
