"""Where the things of a batch stand: each call, and each operation of one that is fanned out."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from frontmcp_py.scheduler import Ticket

from .calls import Operation, ToolCall, ToolResult
from .config import ToolConfig
from .prompts import Order

State: TypeAlias = Literal[
    "queued", "awaiting-permission", "running", "awaiting-input", "awaiting-review", "completed"
]
"""Where an entry stands. `queued` is also one that is approved and waits for its turn."""

# Of a call with several operations, the state that most needs to be seen.
_SHOWN_FIRST: Final[tuple[State, ...]] = (
    "awaiting-permission",
    "awaiting-input",
    "running",
    "awaiting-review",
    "queued",
    "completed",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a batch shows of one thing that it runs.

    Attributes:
        call: The call, or the `Operation` of one.
        position: The place of the call in the batch, from 0.
        state: Where it stands.
        result: What came of it, when it is completed.
    """

    call: ToolCall
    position: int
    state: State
    result: ToolResult | None


class Item:
    """One call of a batch: the entries that it consists of, and its result."""

    __slots__ = ("call", "counts", "entries", "position", "result", "told")

    def __init__(self, call: ToolCall, position: int, result: ToolResult | None) -> None:
        self.call: ToolCall = call
        self.position: int = position
        self.entries: list[Work] = []
        self.result: ToolResult | None = result
        self.counts: Counter[State] = Counter()
        self.told: State | None = None

    def add(self, entry: Work) -> None:
        """Take an entry in."""
        self.entries.append(entry)
        self.counts[entry.state] += 1

    def move(self, entry: Work, state: State) -> None:
        """One of the entries enters a state."""
        self.counts[entry.state] -= 1
        self.counts[state] += 1
        entry.state = state

    @property
    def is_fanned_out(self) -> bool:
        """Whether its entries are operations."""
        return bool(self.entries) and isinstance(self.entries[0].call, Operation)

    @property
    def state(self) -> State:
        """Where the call stands as a whole."""
        for state in _SHOWN_FIRST:
            if self.counts[state]:
                return state
        return "completed"


class Work:
    """One entry on its way.

    Attributes:
        item: The call that it is, or is a part of.
        call: The call, or the operation.
        config: What holds for its tool.
        order: Whose turn it is before others when people are asked.
        parent: The entry whose tool started this batch, if one did.
        children: Entries of batches that its tool started, while they run or wait for a place.
        arguments: What it runs with.
        state: Where it stands.
        result: What came of it.
        outcome: What the tool said, while that is reviewed.
        ticket: Its claim to a place, if its tool has a limit.
        task: What is going on for it: its execution, then its review.
        is_sent: Whether the tool was called.
        questions: How many questions its tool waits for.
        when_settled: Called when its result is there: what is asked for it ends then.
    """

    __slots__ = (
        "arguments",
        "call",
        "children",
        "config",
        "is_sent",
        "item",
        "order",
        "outcome",
        "parent",
        "questions",
        "result",
        "state",
        "task",
        "ticket",
        "when_settled",
    )

    def __init__(
        self, item: Item, call: ToolCall, config: ToolConfig, order: Order, parent: Work | None
    ) -> None:
        self.item: Item = item
        self.call: ToolCall = call
        self.config: ToolConfig = config
        self.order: Order = order
        self.parent: Work | None = parent
        self.children: set[Work] = set()
        self.arguments: Mapping[str, object] = call.arguments
        self.state: State = "queued"
        self.result: ToolResult | None = None
        self.outcome: ToolResult | None = None
        self.ticket: Ticket | None = None
        self.task: asyncio.Task[ToolResult] | None = None
        self.is_sent: bool = False
        self.questions: int = 0
        self.when_settled: list[Callable[[], object]] = []

    @property
    def index(self) -> int:
        """Its place among the operations of its call."""
        return self.call.index if isinstance(self.call, Operation) else 0

    @property
    def finished(self) -> ToolResult | None:
        """What the task that goes on for it has come to, if it has ended by itself."""
        task = self.task
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    @property
    def is_executing(self) -> bool:
        """Whether its tool runs, as far as the batch is concerned."""
        return self.is_sent and self.result is None and self.outcome is None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for a place."""
        return self.ticket is not None and self.ticket.is_waiting
