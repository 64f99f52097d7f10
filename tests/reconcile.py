"""The equations that the counters of a guard fulfil at every moment."""

from __future__ import annotations

from frontmcp_py.guard import Counts, Guard


def adds_up(guard: Guard) -> None:
    """The counters of every tool, and of all of them, add up."""
    statistics = guard.statistics()
    assert _is_sum(statistics.counts, waiting=statistics.waiting, running=statistics.running)
    assert statistics.active == statistics.running + statistics.abandoned
    assert 0 <= statistics.abandoned_places <= statistics.places
    for counts in statistics.tools.values():
        assert 0 <= counts.accepted <= counts.submitted
    for name in ("submitted", "accepted", "started", "completed", "failed", "timed_out", "cancelled"):
        assert getattr(statistics.counts, name) == sum(
            getattr(each, name) for each in statistics.tools.values()
        )


def _is_sum(counts: Counts, *, waiting: int, running: int) -> bool:
    arrived = sum(counts.rejected.values()) + counts.cancelled_waiting + counts.started + waiting
    ended = counts.completed + counts.failed + counts.timed_out + counts.cancelled + running
    return counts.submitted == arrived and counts.started == ended
