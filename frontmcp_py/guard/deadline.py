"""How long may it run? Answer, abort, and let the work end.

A timeout ends the call, not the work: the caller is answered and the signal aborted, while the body keeps its
places until it has really ended. So a body runs in a task of its own, and the caller only waits for the
answer. A body that nothing could ask to stop early, except by cancelling its caller, stays in the caller's
task.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Callable, Coroutine
from types import CoroutineType
from typing import Any

from frontmcp_py.errors import Cancelled, ExecutionTimeout, GuardError

from .run import Ending, Outcome, Run
from .timers import Timers

logger: logging.Logger = logging.getLogger("frontmcp_py.guard")


class CancelledItself(RuntimeError):
    """A body raised a cancellation that nobody had asked for: the tool has failed."""


class Deadlines:
    """Runs the bodies of calls that have started.

    Args:
        loop: Where they run.
        give_back: Told when a call's work has really ended.
        shut_down: Makes the answer of a call that a stopping server ends.
        abandoned: Told when a call has been answered whose work goes on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        give_back: Callable[[Run], None],
        shut_down: Callable[[Run], GuardError],
        abandoned: Callable[[Run], None],
    ) -> None:
        self._loop = loop
        self._give_back = give_back
        self._shut_down = shut_down
        self._abandoned = abandoned
        self._timers: Timers[Run] = Timers(loop, self._due)
        self.running: dict[Run, None] = {}
        """The calls whose work has not ended, the oldest first."""
        self.peak_active: int = 0
        self._idle: asyncio.Future[None] | None = None

    @property
    def oldest_s(self) -> float:
        """Seconds since the oldest of these calls started; 0 when there is none."""
        for run in self.running:
            return self._loop.time() - run.began_at
        return 0.0

    async def in_callers_task(self, run: Run) -> Any:
        """Run the body right here."""
        self._track(run)
        run.task = asyncio.current_task(self._loop)
        try:
            result = await run.body(run)
        except asyncio.CancelledError as error:
            return self._cancelled_here(run, error)
        except BaseException:
            self._record(run, Outcome.FAILED)
            raise
        else:
            if getattr(result, "is_error", False):
                self._record(run, Outcome.FAILED)
            elif run.outcome is None:
                run.outcome = Outcome.COMPLETED
                run.plan.row.completed += 1
            return result
        finally:
            if run.was_cancelled and run.outcome is not Outcome.CANCELLED and run.task is not None:
                # The body has swallowed the shutdown's cancel; its caller's task goes on without it.
                run.task.uncancel()
            run.has_ended = True
            self._let_go(run)

    async def in_own_task(self, run: Run) -> Any:
        """Run the body in a task of its own and wait for the answer, whichever comes first."""
        self._track(run)
        loop = self._loop
        answer = run.answer = loop.create_future()
        if run.plan.timeout_s is not None:
            self._timers.set(run.plan.timeout_s, run)
        run.task = _start(self._work(run), loop)
        try:
            return await answer
        except BaseException:
            if not loop.is_closed():
                self._caller_gone(run)
            raise

    def _caller_gone(self, run: Run) -> None:
        """The wait for the answer has ended: with an error that was the answer, or without one."""
        task, answer = run.task, run.answer
        assert task is not None and answer is not None
        if run.outcome is None:
            self._conclude(run, min(run.ending or Ending.CANCELLED, Ending.CANCELLED))
        if task.cancelled() and not run.has_ended:
            # Cancelled before its first step, so that nothing in it has run.
            self._finish(run, Outcome.CANCELLED, None, None)
        if answer.done() and not answer.cancelled():
            # Nobody is left to hear of it.
            answer.exception()

    def end(self, run: Run, ending: Ending) -> None:
        """Answer a running call early, unless its result comes in this very turn of the loop."""
        if run.ending is None:
            run.ending = ending
            self._loop.call_soon(self._end, run)
        else:
            run.ending = min(run.ending, ending)

    def pause(self, run: Run) -> None:
        """The tool waits for a person: its clock stands still."""
        run.questions += 1
        if run.questions == 1 and run.plan.timeout_s is not None:
            left = self._timers.drop(run.plan.timeout_s, run)
            if run.killer is not None and not run.is_answered:
                left = max(0.0, run.killer.when() - self._loop.time())
                run.killer.cancel()
                run.killer = None
            run.time_left = left or 0.0

    def resume(self, run: Run) -> None:
        """The person has answered: the clock goes on."""
        run.questions -= 1
        if (
            run.questions == 0
            and run.plan.timeout_s is not None
            and not run.has_ended
            and not run.is_answered
        ):
            run.killer = self._loop.call_later(run.time_left, self._due, run)

    def thread_began(self, run: Run) -> None:
        """A worker thread works for this call; its places are taken until the thread itself has ended."""
        run.threads += 1

    def thread_ended(self, run: Run) -> None:
        """The thread has given itself back."""
        run.threads -= 1
        if run.has_ended and not run.threads:
            self._let_go(run)

    async def drain(self, grace: float, last_call: float) -> bool:
        """Wait for running work; after `grace` seconds answer, abort and cancel it, and wait a bit more.

        Returns:
            Whether that is over; if not, it was recalled.
        """
        if await self._until_idle(grace):
            return not self.running
        for run in list(self.running):
            if run.is_answered:
                self._cancel(run)
            else:
                self.end(run, Ending.SHUTDOWN)
        return not await self._until_idle(last_call) or not self.running

    def stop(self) -> None:
        """There is no time: answer, abort and cancel whoever runs."""
        for run in list(self.running):
            if run.is_answered:
                self._cancel(run)
            else:
                self._conclude(run, Ending.SHUTDOWN)

    def recall(self) -> None:
        """Drain no longer: running work goes on."""
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def close(self) -> None:
        """The loop is closing: whoever still works is no longer waited for."""
        self._timers.close()
        for run in list(self.running):
            self._record(run, Outcome.CANCELLED)
            if run.answer is not None and not self._loop.is_closed():
                run.answer.cancel()
            self._let_go(run)

    # -- parts ---------------------------------------------------------------------------------

    def _track(self, run: Run) -> None:
        run.began_at = self._loop.time()
        self.running[run] = None
        if len(self.running) > self.peak_active:
            self.peak_active = len(self.running)

    async def _work(self, run: Run) -> None:
        try:
            result = await run.body(run)
        except asyncio.CancelledError as error:
            assert run.answer is not None
            if run.was_cancelled or run.answer.done():
                # Cancelled from outside, perhaps because the loop shuts down: that is never swallowed.
                self._finish(run, Outcome.CANCELLED, None, None)
                raise
            self._finish(run, Outcome.FAILED, None, _own_cancellation(run, error))
        except BaseException as error:
            if self._loop.is_closed():
                # Nobody is there to be told; whoever takes the guard over frees the places.
                raise
            if isinstance(error, StopIteration):
                # As in any coroutine; a future would not take it.
                error = RuntimeError("coroutine raised StopIteration")
            self._finish(run, Outcome.FAILED, None, error)
            if isinstance(error, KeyboardInterrupt):
                raise
        else:
            failed = getattr(result, "is_error", False)
            self._finish(run, Outcome.FAILED if failed else Outcome.COMPLETED, result, None)

    def _finish(self, run: Run, outcome: Outcome, result: object, error: BaseException | None) -> None:
        """The body's coroutine has ended: record how, answer if nobody has yet, free what it held."""
        run.has_ended = True
        if run.outcome is None:
            self._record(run, outcome)
            answer = run.answer
            assert answer is not None
            if not answer.done():
                if outcome is Outcome.CANCELLED:
                    answer.cancel()
                elif error is not None:
                    answer.set_exception(error)
                else:
                    answer.set_result(result)
        elif error is not None:
            logger.debug('"%s" failed after it had been answered', run.plan.tool, exc_info=error)
        if run.plan.timeout_s is not None:
            self._timers.drop(run.plan.timeout_s, run)
        if run.killer is not None:
            run.killer.cancel()
        if not run.threads:
            self._let_go(run)
        else:
            self._abandon(run)

    def _abandon(self, run: Run) -> None:
        """Its caller has been answered, and its work goes on."""
        if not run.is_abandoned and run in self.running:
            run.is_abandoned = True
            self._abandoned(run)

    def _let_go(self, run: Run) -> None:
        if run in self.running:
            del self.running[run]
            self._give_back(run)
            if self._idle is not None and not self.running and not self._idle.done():
                self._idle.set_result(None)

    async def _until_idle(self, seconds: float) -> bool:
        """Whether nothing runs any more within so many seconds, or whoever waits for that is recalled."""
        if not self.running:
            return True
        idle = self._idle = self._loop.create_future()
        try:
            await asyncio.wait((idle,), timeout=seconds)
            return idle.done()
        finally:
            if self._idle is idle:
                self._idle = None

    def _due(self, run: Run) -> None:
        if not run.is_answered:
            self.end(run, Ending.DEADLINE)
        elif run.plan.cancel_after_s is not None and not run.was_cancelled:
            # Its caller went before; the work is cancelled when it would have been anyway.
            run.killer = self._loop.call_later(run.plan.cancel_after_s, self._cancel, run)

    def _end(self, run: Run) -> None:
        if run.outcome is None and not run.has_ended:
            assert run.ending is not None
            self._conclude(run, run.ending)

    def _conclude(self, run: Run, ending: Ending) -> None:
        """Answer a call whose work goes on, and tell the work."""
        tool = run.plan.tool
        if ending is Ending.DEADLINE:
            error = ExecutionTimeout(tool, timeout_ms=(run.plan.timeout_s or 0.0) * 1000)
            cancel_after = run.plan.cancel_after_s
            self._answer_early(run, Outcome.TIMED_OUT, error, cancel=cancel_after == 0)
            if cancel_after:
                run.killer = self._loop.call_later(cancel_after, self._cancel, run)
        elif ending is Ending.CANCELLED:
            self._answer_early(run, Outcome.CANCELLED, Cancelled(tool), cancel=run.plan.cancels)
        elif run.answer is not None:
            self._answer_early(run, Outcome.CANCELLED, self._shut_down(run), cancel=True)
        else:
            self._cancel(run)

    def _answer_early(self, run: Run, outcome: Outcome, error: Exception, *, cancel: bool) -> None:
        self._record(run, outcome)
        # The work is told first: if it stops at once, its places are free by the time its caller comes again.
        run.abort(error)
        if cancel:
            self._cancel(run)
        if run.answer is not None and not run.answer.done():
            run.answer.set_exception(error)
        self._abandon(run)

    def _cancel(self, run: Run) -> None:
        run.killer = None
        task = run.task
        if task is None or run.has_ended:
            return
        run.was_cancelled = True
        task.cancel()
        work = task.get_coro()
        if isinstance(work, CoroutineType) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            # A task that has not made its first step never makes one, so nothing in it will tell of its end.
            self._finish(run, Outcome.CANCELLED, None, None)

    def _record(self, run: Run, outcome: Outcome) -> None:
        """How the call was answered; the first one stands."""
        if run.outcome is not None:
            return
        run.outcome = outcome
        row = run.plan.row
        if outcome is Outcome.COMPLETED:
            row.completed += 1
        elif outcome is Outcome.FAILED:
            row.failed += 1
        elif outcome is Outcome.TIMED_OUT:
            row.timed_out += 1
        else:
            row.cancelled += 1

    def _cancelled_here(self, run: Run, error: asyncio.CancelledError) -> Any:
        """A body in its caller's task was cancelled: by itself, by us, or because its caller was."""
        task = run.task
        assert task is not None
        if run.was_cancelled and task.uncancel() == 0:
            self._record(run, Outcome.CANCELLED)
            raise self._shut_down(run) from None
        if not task.cancelling():
            self._record(run, Outcome.FAILED)
            raise _own_cancellation(run, error) from error
        self._record(run, Outcome.CANCELLED)
        raise error


def _own_cancellation(run: Run, error: asyncio.CancelledError) -> CancelledItself:
    failure = CancelledItself(f'"{run.plan.tool}" cancelled itself')
    failure.__cause__ = error
    return failure


if sys.version_info >= (3, 12):

    def _start(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
        # The body runs up to its first wait at once: one turn of the loop less for a call that never waits.
        return asyncio.Task(work, loop=loop, eager_start=True)

else:

    def _start(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
        return loop.create_task(work)
