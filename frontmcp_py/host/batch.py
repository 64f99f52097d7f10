"""A batch: the calls of one response, and what a transcript already has of their results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from frontmcp_py.policy import MAX_OPERATIONS, not_allowed

from .calls import ToolCall, ToolResult


class Batch:
    """The calls of one response, in the order the model wrote them.

    Args:
        calls: The calls. Their ids may repeat.

    Attributes:
        calls: The calls, in order.
        known: The results that are there already, by the place of their call.
        known_operations: Of calls without a result, those of single operations, by their place.
    """

    def __init__(self, calls: Iterable[ToolCall]) -> None:
        if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Iterable):
            raise not_allowed("a batch", cast("object", calls), "a list of ToolCall")
        self.calls: tuple[ToolCall, ...] = tuple(calls)
        for index, call in enumerate(cast("tuple[object, ...]", self.calls)):
            if not isinstance(call, ToolCall):
                raise not_allowed(f"calls[{index}]", call, "a ToolCall")
        self.known: dict[int, ToolResult] = {}
        self.known_operations: dict[int, dict[int, ToolResult]] = {}

    @classmethod
    def resume(cls, calls: Iterable[ToolCall], results: Iterable[ToolResult | None]) -> Batch:
        """The batch of a transcript: only calls without a result are prepared again, in the written order.

        Everything is derived from what is given here. What an earlier run of the batch may still say goes to
        that run, and changes nothing here.

        Args:
            calls: All calls of the response, as the model wrote them.
            results: The results that the transcript has: by place, with `None` where there is none, or in any
                order. Then each is for the call at its `position`, or if it has none, for the first call with
                its id that has no result yet. A result of an operation (its id is the call's, `#` and the
                index) counts for that operation alone.

        Raises:
            ConfigurationError: A result belongs to no call.
        """
        batch = cls(calls)
        listed: list[object] = list(results)
        by_place = None in listed
        if by_place and len(listed) != len(batch.calls):
            raise not_allowed(
                "results", listed, f"as many as there are calls ({len(batch.calls)}), or no None among them"
            )
        for index, result in enumerate(listed):
            if result is None:
                continue
            if not isinstance(result, ToolResult):
                raise not_allowed(f"results[{index}]", result, "a ToolResult or None")
            batch._add(index if by_place else result.position, result)
        return batch

    def _add(self, place: int | None, result: ToolResult) -> None:
        places = range(len(self.calls)) if place is None else (place,)
        call_id, _, number = result.id.rpartition("#")
        open_places = [
            index for index in places if index in range(len(self.calls)) and index not in self.known
        ]
        for index in open_places:
            call = self.calls[index]
            if call.id == result.id:
                self.known[index] = ToolResult.of(call, result)
                self.known_operations.pop(index, None)
                return
        for index in open_places:
            operations = self.known_operations.get(index, {})
            if self.calls[index].id == call_id and _is_index(number) and int(number) not in operations:
                self.known_operations[index] = {**operations, int(number): result}
                return
        raise not_allowed(
            "the id of a result",
            result.id,
            "that of a call that has no result yet, or of one of its operations",
        )


def _is_index(text: str) -> bool:
    return text.isdecimal() and len(text) <= len(str(MAX_OPERATIONS)) and text == str(int(text))
