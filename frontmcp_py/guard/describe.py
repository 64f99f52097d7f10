"""Telling the model: the limits that are really enforced, as one sentence and as data.

A model that knows the rule can plan around it instead of finding out from a refusal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from frontmcp_py.policy import Concurrency, PartitionBy, RateLimit

from .plan import Limits

META_KEY: Final = "frontmcp/limits"
PLACEHOLDER: Final = "{limits}"

_UNITS: Final = ((86_400_000, "day"), (3_600_000, "hour"), (60_000, "minute"), (1000, "second"))
_OVER_ALL_TOOLS: Final = " over all tools"


def describe(description: str, limits: Limits | None) -> str:
    """`description` with the limits' sentence at its end, or where it says `{limits}`.

    Without limits (or with `None`: they are not to be told) a placeholder becomes empty.
    """
    told = sentence(limits) if limits is not None else ""
    if PLACEHOLDER in description:
        return description.replace(PLACEHOLDER, told).strip()
    if not told or not description:
        return description or told
    return f"{description}{_gap(description)}{told}"


def sentence(limits: Limits) -> str:
    """The limits in one sentence, or nothing when there are none."""
    parts = [*_parts(limits)]
    return f"Limits: {'; '.join(parts)}." if parts else ""


def as_data(limits: Limits) -> dict[str, Any]:
    """The limits as data, for the tool's `_meta`; empty when there are none."""
    data: dict[str, Any] = {}
    if rates := [_rate_data(rate) for rate in (*limits.rates, *limits.global_rates)]:
        data["rateLimits"] = rates
    if slots := [_slot_data(slot) for slot in (*limits.slots, *limits.global_slots) if slot.max_concurrent]:
        data["concurrency"] = slots
    if limits.timeout is not None:
        data["timeoutMs"] = _milliseconds(limits.timeout.execute)
    return data


def _parts(limits: Limits) -> Iterator[str]:
    yield from (_rate(rate, "") for rate in limits.rates)
    yield from (_rate(rate, _OVER_ALL_TOOLS) for rate in limits.global_rates)
    yield from (_slot(slot, "") for slot in limits.slots if slot.max_concurrent)
    yield from (_slot(slot, _OVER_ALL_TOOLS) for slot in limits.global_slots if slot.max_concurrent)
    if limits.timeout is not None:
        yield f"gives up after {_duration(limits.timeout.execute * 1000)}"


def _rate(rate: RateLimit, over: str) -> str:
    calls = "1 call" if rate.max_requests == 1 else f"{rate.max_requests} calls"
    length = _duration(rate.window_ms)
    window = f"in any {length}" if rate.strategy == "moving-window" else f"per {length.removeprefix('1 ')}"
    return f"at most {calls} {window}{over}{_whose(rate.partition_by, str(rate.max_requests))}"


def _slot(slot: Concurrency, over: str) -> str:
    many = "one" if slot.max_concurrent == 1 else f"at most {slot.max_concurrent}"
    shared = ", shared with other tools" if slot.key is not None else ""
    if slot.queue_timeout is None:
        wait = ", waiting for a turn"
    elif slot.queue_timeout:
        wait = f", waiting up to {_duration(slot.queue_timeout * 1000)} for a turn"
    else:
        wait = ""
    return f"{many} at a time{over}{_whose(slot.partition_by, many)}{shared}{wait}"


def _whose(partition_by: PartitionBy, number: str) -> str:
    if partition_by == "global":
        return ""
    if partition_by == "user_id":
        return f" for each signed-in caller, and {number} for all anonymous callers together"
    if partition_by == "session":
        return f" for each session, and {number} for all anonymous callers without one together"
    if partition_by == "ip":
        return " for each client address"
    return " for each group of callers"


def _duration(milliseconds: float) -> str:
    for size, name in _UNITS:
        if milliseconds >= size and milliseconds % size == 0:
            count = int(milliseconds // size)
            return f"{count} {name}" if count == 1 else f"{count} {name}s"
    if milliseconds > 1000:
        return f"{milliseconds / 1000:.12g} seconds"
    return f"{milliseconds:.12g} milliseconds"


def _rate_data(rate: RateLimit) -> dict[str, Any]:
    return {
        "maxRequests": rate.max_requests,
        "windowMs": rate.window_ms,
        "partitionBy": _partition(rate.partition_by),
        "strategy": rate.strategy,
    }


def _slot_data(slot: Concurrency) -> dict[str, Any]:
    data: dict[str, Any] = {"maxConcurrent": slot.max_concurrent}
    if slot.queue_timeout is not None:
        data["queueTimeoutMs"] = _milliseconds(slot.queue_timeout)
    return {**data, "partitionBy": _partition(slot.partition_by)}


def _partition(partition_by: PartitionBy) -> str:
    return partition_by if isinstance(partition_by, str) else "function"


def _milliseconds(seconds: float) -> int | float:
    milliseconds = round(seconds * 1000, 3)
    return int(milliseconds) if milliseconds == int(milliseconds) else milliseconds


def _gap(description: str) -> str:
    return "\n\n" if "\n" in description else " "
