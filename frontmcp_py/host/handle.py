"""A batch that runs: each thing in it, from what the model wrote to what it is told.

An *entry* is one thing to run: a call, or one operation of a call. Its way, and where each step is decided:

    queued ─► awaiting-permission ─► queued ─► running ⇄ awaiting-input ─► awaiting-review ─► completed
              `_approve`             `_release`  `questions`  `_executed`    `_review`          `_settle`

Nothing is released before every entry is approved or settled. Then entries are released in the written order:
one without a key at once, one with a key when `lanes` has a place for it. The place is free when the
execution has ended, so before a review. A result that is there is never taken back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

from frontmcp_py.errors import ConfigurationError

from .batch import Batch
from .calling import CallOption, outcome, said
from .calls import Operation, ToolCall, ToolResult
from .config import ToolConfig
from .entries import Entry, Item, State, Work
from .fan_out import EnvelopeError, fold, operations_of, stopped_after
from .prompts import answer_of, decided, reviewed, withheld

if TYPE_CHECKING:
    from . import Host

T = TypeVar("T")

logger: logging.Logger = logging.getLogger("frontmcp_py.host")

_PARKED: Final = "Cancelled before it ran."
_STOPPED: Final = "Cancelled while it ran, so part of it may have happened. Check before calling again."
_UNREVIEWED: Final = "as the batch was cancelled before it was reviewed"
_REVIEW_FAILED: Final = "as reviewing it failed"


class BatchHandle:
    """A batch that runs. Made by `Host.start`.

    What has to be done goes on by itself, whether or not somebody waits for it here.
    """

    def __init__(self, host: Host, batch: Batch, call: CallOption, number: int, parent: Work | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._host = host
        self._call = call
        self._parent = parent
        # Who gives up a place must not lend its context to who gets it.
        self._context = copy_context()
        self._done = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_cancelled = False
        self._reason = ""
        self._items: list[Item] = []
        places = count()
        for position, each in enumerate(batch.calls):
            item = Item(each, position, batch.known.get(position))
            for part, config in () if item.result is not None else self._read(item):
                item.add(Work(item, part, config, (number, next(places)), parent))
            self._items.append(item)
            for index, known in batch.known_operations.get(position, {}).items():
                self._take_known(item, index, known)
        self._left = sum(item.result is None for item in self._items)
        host.running.add(self)
        self._finish_if_done()
        # Nobody but a loop that is being closed cancels this one.
        self._watching = self._start(self._done.wait())
        self._preparing = self._start(self._prepare())
        self._preparing.add_done_callback(self._prepared)

    # -- what it shows -------------------------------------------------------------------------

    @property
    def states(self) -> tuple[State, ...]:
        """Where each call stands. One with several operations stands where it most needs to be seen."""
        return tuple(item.state for item in self._items)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Where each entry stands: the calls, and in place of one that is fanned out its operations."""
        shown: list[Entry] = []
        for item in self._items:
            if not item.entries:
                shown.append(Entry(item.call, item.position, "completed", item.result))
            shown.extend(Entry(each.call, item.position, each.state, each.result) for each in item.entries)
        return tuple(shown)

    @property
    def is_done(self) -> bool:
        """Whether every call has its result."""
        return self._done.is_set()

    def results_so_far(self) -> list[ToolResult]:
        """The results that are there: of calls, and of single operations of calls that are not complete.

        With the calls this is all that `Batch.resume` needs. Each knows the place of its call.
        """
        found: list[ToolResult] = []
        for item in self._items:
            if item.result is not None:
                found.append(item.result)
            elif item.is_fanned_out:
                found.extend(entry.result for entry in item.entries if entry.result is not None)
        return found

    async def results(self) -> list[ToolResult]:
        """Wait until every call has its result. Giving up waiting does not cancel the batch.

        Returns:
            One result per call, in the written order.
        """
        await self._done.wait()
        return [item.result for item in self._items if item.result is not None]

    async def ended(self, within: float | None = None) -> None:
        """Wait until nothing of the batch runs any more.

        That is later than `results` if the batch was cancelled and a tool's function does not stop at once:
        it holds its place until it has ended.

        Args:
            within: Seconds to wait at most; `None` waits without an end.
        """
        now = self._loop.time
        until = None if within is None else now() + within
        while self._tasks and (until is None or until > now()):
            await asyncio.wait(self._tasks, timeout=None if until is None else until - now())

    def cancel(self, reason: str = "") -> None:
        """Give up whatever has no result yet. Results that are there are kept.

        Calls that wait never run. Running ones are cancelled and have their result at once; the place that
        one holds is free when it has really ended. Cancelling again, or a batch that is done, does nothing.

        Args:
            reason: What the model is told besides.
        """
        if self._is_cancelled or self.is_done:
            return
        self._is_cancelled = True
        self._reason = reason
        self._preparing.cancel()
        pending = [entry for item in self._items for entry in item.entries if entry.result is None]
        for entry in pending:
            # Who waits leaves first: nobody of this batch gets the place of another that gives up.
            if entry.is_waiting:
                self._leave_lane(entry)
        for entry in pending:
            # What a closing loop has cancelled may be cleaning up.
            if entry.task is not None and not (self._is_torn_down and entry.task.cancelling()):
                entry.task.cancel()
            self._settle(entry, self._given_up(entry))
        for item in self._items:
            self._complete(item)
        self._finish_if_done()

    @property
    def _is_torn_down(self) -> bool:
        """Whether the event loop is being closed."""
        return self._watching.cancelling() > 0

    def _given_up(self, entry: Work) -> ToolResult:
        finished = entry.finished
        if finished is not None:
            # It has ended in this turn of the loop, and nobody has heard of it yet.
            is_told = entry.outcome is not None or not self._is_reviewed(finished)
            return finished if is_told else withheld(finished, _UNREVIEWED)
        if entry.outcome is not None:
            return withheld(entry.outcome, _UNREVIEWED)
        text = _STOPPED if entry.is_sent else _PARKED
        return ToolResult.saying(entry.call, "cancelled", f"{text} {self._reason}".rstrip())

    # -- reading what the model wrote ------------------------------------------------------------

    def _read(self, item: Item) -> list[tuple[ToolCall, ToolConfig]]:
        """What there is to run of a call; nothing, and a result, if it cannot be run."""
        call = item.call
        config = self._host.config.tool(call.name)
        operations, why = None, None
        if call.problem is not None:
            why = f"{call.name or 'call'}: {call.problem}"
        elif not config.enabled:
            why = f"{call.name}: this tool is disabled"
        elif config.fan_out:
            try:
                operations = operations_of(call, self._host.schemas.get(call.name))
            except EnvelopeError as error:
                why = str(error)
        if why is not None:
            refused = ToolResult.saying(call, "error", f"{why}. Nothing was run.")
            item.result = replace(refused, position=item.position)
            return []
        if operations is None:
            return [(call, config)]
        return [(Operation.of(call, index, each), config) for index, each in enumerate(operations)]

    def _take_known(self, item: Item, index: int, result: ToolResult) -> None:
        """A transcript has the result of an operation.

        Raises:
            ConfigurationError: The call has no such operation.
        """
        if not item.is_fanned_out or index >= len(item.entries):
            has = "no operations now" if not item.is_fanned_out else f"{len(item.entries)} operations"
            why = "" if item.result is None else f" ({item.result.text})"
            raise ConfigurationError(
                f"the result {result.id!r} belongs to no operation: {item.call.label} has {has}{why}; leave "
                "the result out to resume without it"
            )
        entry = item.entries[index]
        entry.result = replace(ToolResult.of(entry.call, result), position=item.position)
        item.move(entry, "completed")

    # -- before anything runs --------------------------------------------------------------------

    async def _prepare(self) -> None:
        # Whoever is told of one may cancel the batch, and then the others have been told of.
        before = {entry: entry.state for item in self._items for entry in item.entries}
        for item in self._items:
            for entry in item.entries:
                if entry.state == before[entry]:
                    self._tell(entry.call, entry.state)
            self._tell_of(item)
        approve = self._host.approve
        if approve is not None:
            pending = [entry for item in self._items for entry in item.entries if entry.result is None]
            for entry in pending:
                self._enter(entry, "awaiting-permission")
            for entry in pending:
                async with self._host.prompts.turn(entry.order):
                    if entry.result is None:
                        await self._approve(entry, approve)
        self._release_all()

    def _prepared(self, task: asyncio.Task[None]) -> None:
        # Cancelled from outside, as by a loop that is being closed: nothing would ever be released.
        if task.cancelled():
            self.cancel()
        elif (error := task.exception()) is not None:
            logger.error("a batch could not be prepared", exc_info=error)
            self.cancel()

    async def _approve(self, entry: Work, approve: Callable[[ToolCall], object]) -> None:
        try:
            entry.arguments, settled = decided(entry.call, await answer_of(approve, entry.call))
        except Exception as error:
            logger.exception("asking for permission to run %s failed", entry.call.label)
            text = f"{entry.call.name} was not run, as asking for permission failed: {said(error)}"
            settled = ToolResult.saying(entry.call, "error", text)
        if settled is None:
            self._enter(entry, "queued")
        else:
            self._settle(entry, settled)

    def _release_all(self) -> None:
        for item in self._items:
            failed: int | None = None
            for entry in item.entries:
                if entry.result is None and failed is not None:
                    self._settle(entry, ToolResult.saying(entry.call, "not_run", stopped_after(failed)))
                elif entry.result is None:
                    self._release(entry)
                if failed is None and entry.result is not None and _stops_others(entry, entry.result):
                    failed = entry.index
            self._complete(item)
        self._finish_if_done()

    def _release(self, entry: Work) -> None:
        key, limit = entry.config.key, entry.config.limit
        if self._parent is not None:
            self._parent.children.add(entry)
        if key is None or not limit:
            self._begin(entry)
        else:
            entry.ticket = self._host.lanes.enter(key, limit, entry, partial(self._begin, entry))
        if entry.is_waiting and self._parent is not None and self._host.lanes.is_stuck(entry):
            text = f"{entry.call.name} was not run: it would wait for itself (concurrency key {key!r})"
            self._leave_lane(entry)
            self._settle(entry, ToolResult.saying(entry.call, "error", text))

    # -- while it runs, and after ----------------------------------------------------------------

    def _begin(self, entry: Work) -> None:
        entry.task = self._start(self._execute(entry))
        entry.task.add_done_callback(partial(self._executed, entry))
        self._enter(entry, "running")

    async def _execute(self, entry: Work) -> ToolResult:
        if entry.config.stops:
            for other in entry.item.entries[: entry.index]:
                # It failed in this turn of the loop, and nobody has heard of it yet.
                if other.finished is not None and _stops_others(other, other.finished):
                    return ToolResult.saying(entry.call, "not_run", stopped_after(other.index))
        entry.is_sent = True
        with self._host.questions.of_call(self, entry, self._call) as meta:
            return await outcome(self._call, entry.call, entry.arguments, meta)

    def _executed(self, entry: Work, task: asyncio.Task[ToolResult]) -> None:
        """The execution has ended. What came of it stands before anybody else has its place."""
        try:
            if entry.result is None:
                entry.task = None
                self._hear(entry, self._outcome_of(entry, task))
        finally:
            self._leave_lane(entry)

    def _leave_lane(self, entry: Work) -> None:
        if entry.parent is not None:
            entry.parent.children.discard(entry)
        if entry.ticket is not None:
            self._host.lanes.leave(entry.ticket)

    def _outcome_of(self, entry: Work, task: asyncio.Task[ToolResult]) -> ToolResult:
        if task.cancelled():
            # Not by the batch, which would have settled it.
            if not self._is_torn_down:
                return ToolResult.saying(
                    entry.call, "error", f"{entry.call.name} failed: its task was cancelled"
                )
            for batch in tuple(self._host.running):
                # Or whoever waits for this place would begin, and be torn down as well.
                batch.cancel()
            return self._given_up(entry)
        error = task.exception()
        if error is None:
            return task.result()
        return ToolResult.saying(entry.call, "error", f"{entry.call.name} failed: {said(error)}")

    def _hear(self, entry: Work, outcome: ToolResult) -> None:
        entry.outcome = outcome
        review = self._host.review
        if review is None or not self._is_reviewed(outcome):
            self._settle(entry, outcome)
        else:
            entry.task = self._start(self._review(entry, outcome, review))
            entry.task.add_done_callback(partial(self._reviewed, entry))
            self._enter(entry, "awaiting-review")
        if _stops_others(entry, outcome):
            self._stop_after(entry)

    def _is_reviewed(self, outcome: ToolResult) -> bool:
        return self._host.review is not None and outcome.status in ("ok", "error")

    def _stop_after(self, entry: Work) -> None:
        for other in entry.item.entries[entry.index + 1 :]:
            if other.result is None and not other.is_sent:
                if other.task is None:
                    self._leave_lane(other)
                else:
                    # It was released in this turn of the loop. Its place is free when the task has ended.
                    other.task.cancel()
                self._settle(other, ToolResult.saying(other.call, "not_run", stopped_after(entry.index)))

    async def _review(
        self, entry: Work, told: ToolResult, review: Callable[[ToolCall, ToolResult], object]
    ) -> ToolResult:
        async with self._host.prompts.turn(entry.order):
            try:
                return reviewed(told, await answer_of(review, entry.call, told))
            except Exception:
                logger.exception("reviewing the result of %s failed", entry.call.label)
                return withheld(told, _REVIEW_FAILED)

    def _reviewed(self, entry: Work, task: asyncio.Task[ToolResult]) -> None:
        if entry.result is None:
            failed = task.cancelled() or task.exception() is not None
            self._settle(entry, self._given_up(entry) if failed else task.result())

    # -- where things stand ----------------------------------------------------------------------

    def _enter(self, entry: Work, state: State) -> None:
        if entry.state != state and entry.result is None:
            entry.item.move(entry, state)
            self._tell(entry.call, state)
            self._tell_of(entry.item)

    def asks(self, entry: Work, questions: int) -> None:
        """A question of an entry's tool begins (1) or has ended (-1)."""
        entry.questions += questions
        if entry.is_executing:
            self._enter(entry, "awaiting-input" if entry.questions else "running")

    def _settle(self, entry: Work, result: ToolResult) -> None:
        if entry.result is not None:
            return
        entry.result = replace(result, position=entry.item.position)
        entry.item.move(entry, "completed")
        for callback in entry.when_settled:
            callback()
        # Whoever is told finds the result.
        self._complete(entry.item)
        self._tell(entry.call, "completed")
        self._tell_of(entry.item)
        self._finish_if_done()

    def _complete(self, item: Item) -> None:
        if item.result is None and item.state == "completed":
            results = [entry.result for entry in item.entries if entry.result is not None]
            if item.is_fanned_out:
                item.result = replace(fold(item.call, results), position=item.position)
            else:
                (item.result,) = results
            self._left -= 1

    def _finish_if_done(self) -> None:
        if self._left == 0:
            self._done.set()
            self._host.running.discard(self)

    def _tell_of(self, item: Item) -> None:
        """Tell of a call whose entries are not the call itself."""
        if (item.is_fanned_out or not item.entries) and item.state != item.told:
            item.told = item.state
            self._tell(item.call, item.state)

    def _tell(self, call: ToolCall, state: State) -> None:
        if self._host.on_state is not None and not self._loop.is_closed():
            try:
                self._host.on_state(call, state)
            except KeyboardInterrupt:
                raise
            except BaseException:
                logger.exception("on_state failed for %s, %s", call.label, state)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        # Not by the loop, whose tasks may be eager: then it would begin before it is known to have begun.
        task = asyncio.Task(work, loop=self._loop, context=self._context.copy())
        # A loop alone does not keep its tasks alive.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _stops_others(entry: Work, result: ToolResult) -> bool:
    """Whether an operation that ended like this is the last that starts."""
    return entry.config.stops and result.status in ("error", "unknown", "not_run")
