"""Has it been called too often? A rate limit, bound to one tool or to all of them."""

from __future__ import annotations

from collections.abc import Sequence

from frontmcp_py.call import Call
from frontmcp_py.errors import RateLimitExceeded
from frontmcp_py.policy import RateLimit
from frontmcp_py.storage import RateRefusal, WindowCounts, Windows

from .partition import EVERYBODY, escape, subject

_MILLISECOND_NS = 1_000_000


class BoundRate:
    """One rate limit where it applies: its counts live per limit, tool (or `global`) and subject.

    Args:
        limit: What is counted.
        owner: The tool's name, or `None` for all tools together.
        nth: Which one of several limits with the same numbers it is; they do not share a count.
        counts: Where the counts live.
    """

    __slots__ = ("_prefix", "everybody", "limit", "most", "overflow", "scope", "windows")

    def __init__(self, limit: RateLimit, owner: str | None, nth: int, counts: WindowCounts) -> None:
        self.limit: RateLimit = limit
        self.scope = "global" if owner is None else "tool"
        place = "global" if owner is None else f"tool:{escape(owner)}"
        self._prefix = f"{place}|{limit.label}.{nth}|"
        self.overflow: str = f"{self._prefix}overflow"
        self.most: int = limit.max_requests
        self.windows: Windows = counts.windows(limit.strategy, limit.window_ms * _MILLISECOND_NS)
        self.everybody: str | None = self._prefix + EVERYBODY if limit.partition_by == "global" else None
        """The one key of a limit that is not partitioned."""

    def key(self, call: Call) -> str:
        """The key that `call` is counted under."""
        return self.everybody or self._prefix + subject(self.limit.partition_by, call)


def bind_rates(limits: Sequence[RateLimit], owner: str | None, counts: WindowCounts) -> tuple[BoundRate, ...]:
    """The limits, each with counts of its own."""
    seen: dict[str, int] = {}
    bound: list[BoundRate] = []
    for limit in limits:
        nth = seen[limit.label] = seen.get(limit.label, -1) + 1
        bound.append(BoundRate(limit, owner, nth, counts))
    return tuple(bound)


def too_often(tool: str, refusal: RateRefusal) -> RateLimitExceeded:
    """What the caller is told: the wait is exact, so that a lone retry after it is admitted."""
    return RateLimitExceeded(
        tool,
        retry_after_ms=-(-refusal.wait_ns // _MILLISECOND_NS),
        limit=refusal.rule.limit.max_requests,
        scope=refusal.rule.scope,
    )
