"""Asking people: one at a time, of those due the first in the written order; and what they may decide."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter
from typing import Any, Final, TypeAlias, cast

from mcp_types import CallToolResult

from .calling import said
from .calls import ToolCall, ToolResult

Order: TypeAlias = tuple[int, int]
"""Whose turn it is first: the number of the batch, and of the entry in it."""


@dataclass(frozen=True, slots=True)
class Run:
    """The call may run.

    Attributes:
        arguments: What it runs with instead of what the model wrote; `None`: as it was written.
    """

    arguments: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Skip:
    """The call does not run.

    Attributes:
        reason: What the model is told; `None`: only that it was not permitted.
    """

    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Complete:
    """The call does not run, as its result is known.

    Attributes:
        result: In any form that a tool's function may return it in.
    """

    result: object


NOT_PERMITTED: Final = "Not permitted. It has not run."
WITHHELD: Final = "The tool has run. Its result is withheld"

Decision: TypeAlias = Run | Skip | Complete | bool
"""What `approve` answers. `True` is `Run()`, and `False` is `Skip()`."""

Approve: TypeAlias = "Callable[[ToolCall], Decision | Awaitable[Decision]]"
"""Asked of every call and operation, in the written order, before anything runs."""

Question: TypeAlias = "Callable[[ToolCall | None, Any], object]"
"""Asked when a tool asks something while it runs: the call, if it can be told, and the request."""

Review: TypeAlias = "Callable[[ToolCall, ToolResult], object]"
"""Asked what the model is told, when a tool has run: `None` or `True`, the result as it is; `False`, only
that there is one; a result or text, that instead. It may be async."""


class _Turn:
    """Somebody is asked, or will be."""

    __slots__ = ("granted", "is_over", "order", "outer", "owner")

    def __init__(self, owner: Prompts, order: Order, number: int, outer: _Turn | None) -> None:
        self.owner: Prompts = owner
        self.order: tuple[Order, int] = (order, number)
        self.outer: _Turn | None = outer
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over: bool = False

    @property
    def around(self) -> _Turn | None:
        """The turn in the same place that it is a part of, as long as that one is not over."""
        turn = self.outer
        while turn is not None and (turn.is_over or turn.owner is not self.owner):
            turn = turn.outer
        return turn


# Whoever is asked here may ask on, and does not wait for themselves.
_INSIDE: Final[ContextVar[_Turn | None]] = ContextVar("frontmcp_py.host.turn", default=None)


class Prompts:
    """The one place where people are asked, shared by all batches of a host."""

    def __init__(self) -> None:
        self._due: list[tuple[tuple[Order, int], _Turn]] = []
        # What became due within a turn, which waits for nobody outside of it.
        self._due_inside: list[_Turn] = []
        # The last one is asked now; those before it wait for what they have asked on.
        self._taken: list[_Turn] = []
        self._numbers = count()

    @property
    def is_idle(self) -> bool:
        """Whether nobody is asked, and nothing is due."""
        return not self._taken and not self._due_inside and all(turn.is_over for _, turn in self._due)

    def clear(self) -> None:
        """Forget everybody: they ended with their event loop."""
        for line in (self._due, self._due_inside, self._taken):
            line.clear()

    @asynccontextmanager
    async def turn(self, order: Order) -> AsyncGenerator[None]:
        """Wait until nobody else is asked and nobody due comes before."""
        loop = asyncio.get_running_loop()
        outer = _INSIDE.get()
        turn = _Turn(self, order, next(self._numbers), outer)
        if turn.around is None:
            heappush(self._due, (turn.order, turn))
        else:
            self._due_inside.append(turn)
        # Not at once, here and below: who becomes due in the same turn of the loop is compared.
        loop.call_soon(self._grant)
        try:
            await turn.granted
            _INSIDE.set(turn)
            yield
        finally:
            _INSIDE.set(outer)
            turn.is_over = True
            for line in (self._due_inside, self._taken):
                if turn in line:
                    line.remove(turn)
            if not loop.is_closed():
                loop.call_soon(self._grant)

    def _grant(self) -> None:
        asked = self._taken[-1] if self._taken else None
        ready = [turn for turn in self._due_inside if turn.around is asked and not turn.granted.done()]
        if asked is None:
            # Who is cancelled knows of it before it is over.
            while self._due and self._due[0][1].granted.done():
                heappop(self._due)
            ready += [turn for _, turn in self._due[:1]]
        if ready:
            first = min(ready, key=attrgetter("order"))
            if first in self._due_inside:
                self._due_inside.remove(first)
            else:
                heappop(self._due)
            self._taken.append(first)
            first.granted.set_result(None)


async def answer_of(hook: Callable[..., object], *asked: object) -> object:
    """What a hook answers, whether it is async or not.

    Raises:
        asyncio.CancelledError: The task that asks was cancelled.
        RuntimeError: The hook was cancelled, and not by who asks, or raised what would end a program.
    """
    try:
        answer = hook(*asked)
        return await cast("Awaitable[object]", answer) if inspect.isawaitable(answer) else answer
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("it was cancelled from within") from None
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(said(error)) from error


def decided(call: ToolCall, answer: object) -> tuple[Mapping[str, object], ToolResult | None]:
    """What `approve` has decided: what the call runs with, or its result if it does not run.

    Raises:
        TypeError: It is no decision.
    """
    match answer:
        case Run(None) | True:
            return call.arguments, None
        case Run(arguments) if isinstance(arguments, Mapping):
            return arguments, None
        case Skip(None) | False:
            return call.arguments, ToolResult.saying(call, "skipped", NOT_PERMITTED)
        case Skip(reason):
            return call.arguments, ToolResult.saying(call, "skipped", f"{NOT_PERMITTED} {reason}")
        case Complete(result):
            return call.arguments, ToolResult.of(call, result)
        case _:
            raise TypeError(
                f"approve answered {answer!r}; it must answer Run(), Run(arguments), Skip(reason), "
                "Complete(result), True or False"
            )


def reviewed(result: ToolResult, answer: object) -> ToolResult:
    """What the model is told after `review` has answered."""
    if answer is None or answer is True:
        return result
    if answer is False:
        return withheld(result)
    if isinstance(answer, ToolResult | CallToolResult):
        return ToolResult.of(_call_of(result), answer)
    told = ToolResult.of(_call_of(result), answer)
    return replace(result, content=told.content, structured_content=told.structured_content)


def withheld(result: ToolResult, why: str = "") -> ToolResult:
    """A result of which the model is told only that there is one."""
    text = f"{WITHHELD}, {why}." if why else f"{WITHHELD}."
    return ToolResult.saying(_call_of(result), result.status, text)


def _call_of(result: ToolResult) -> ToolCall:
    return ToolCall(result.id, result.name)
