"""The equations that the counters of a guard fulfil at every moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields

from frontmcp_py.guard import Counts, Guard


def adds_up(guard: Guard) -> None:
    """The counters of every tool, and of all of them, add up."""
    statistics = guard.statistics()
    waiting = statistics.waiting + statistics.asking
    assert _is_sum(statistics.counts, waiting=waiting, running=statistics.running)
    assert statistics.active == statistics.running + statistics.abandoned
    assert 0 <= statistics.abandoned_places <= statistics.places
    for counts in statistics.tools.values():
        assert 0 <= counts.accepted <= counts.submitted
    for field in fields(Counts):
        whole = getattr(statistics.counts, field.name)
        parts = [getattr(each, field.name) for each in statistics.tools.values()]
        assert whole == (sum(parts) if isinstance(whole, int) else _sum(parts)), field.name


def _sum(parts: Iterable[Mapping[str, int]]) -> Counter[str]:
    whole: Counter[str] = Counter()
    for part in parts:
        whole.update(part)
    return whole


def _is_sum(counts: Counts, *, waiting: int, running: int) -> bool:
    arrived = sum(counts.rejected.values()) + counts.cancelled_waiting + counts.started + waiting
    ended = counts.completed + counts.failed + counts.timed_out + counts.cancelled + running
    return counts.submitted == arrived and counts.started == ended
