"""Questions of running tools: which call asks, and who answers.

A server asks over the connection, not over the call. Which call it is about is known from the number that
servers of this package repeat in it, from the context in which the SDK hands the question on (in process and
over HTTP), or because one call alone is running. Else nobody knows, and `question` is told `None`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast

from mcp.client.session import ClientRequestContext
from mcp_types import INTERNAL_ERROR, INVALID_REQUEST, ElicitRequestParams, ElicitResult, ErrorData

from frontmcp_py.policy import CALL_META

from .calling import CallOption, is_session, session_of
from .calls import ToolCall
from .prompts import Order, Prompts, Question, answer_of

if TYPE_CHECKING:
    from .entries import Work
    from .handle import BatchHandle

logger: logging.Logger = logging.getLogger("frontmcp_py.host")

# Questions that nobody can tell the call of come after those of which the place is known.
_LAST: Final = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class Asker:
    """A call that runs, and may ask."""

    owner: Questions
    handle: BatchHandle
    entry: Work
    session: object
    """The session that it runs over, if it does."""

    context: Context
    """The context variables of the call."""

    outer: Asker | None
    """The call from within which it was started, of whatever host."""

    @property
    def is_running(self) -> bool:
        """Whether it may still ask."""
        return self.entry.is_executing


_CURRENT: Final[ContextVar[Asker | None]] = ContextVar("frontmcp_py.host.asker", default=None)


class Questions:
    """What the running calls of a host ask.

    Args:
        prompts: Where people are asked.
        hook: The host's `question`.
    """

    def __init__(self, prompts: Prompts, hook: Question | None) -> None:
        self._prompts = prompts
        self._hook = hook
        self._running: dict[str, Asker] = {}
        # Numbers of this host are told from those of others, and cannot be guessed by a server.
        self._mark = secrets.token_hex(8)
        self._count = count(1)

    def clear(self) -> None:
        """Forget every call: they ended with their event loop."""
        self._running.clear()

    @contextmanager
    def of_call(
        self, handle: BatchHandle, entry: Work, call: CallOption
    ) -> Generator[Mapping[str, object] | None]:
        """A call runs in this block. What it yields is sent along as the call's `_meta`."""
        number = f"{self._mark}-{next(self._count)}"
        context = copy_context()
        asker = self._running[number] = Asker(self, handle, entry, session_of(call), context, _CURRENT.get())
        # Never taken back: the task of the call ends with it, and its context with the task.
        _CURRENT.set(asker)
        context.run(_CURRENT.set, asker)
        try:
            yield {CALL_META: number} if self._hook is not None and is_session(call) else None
        finally:
            self._running.pop(number, None)

    def current(self) -> Work | None:
        """The entry in whose context this is called, if one of this host is running there."""
        asker = self._here()
        return None if asker is None else asker.entry

    async def ask(self, request: object) -> object:
        """A function asks, in the context of its call.

        Raises:
            RuntimeError: The host has nobody to ask, or the call has ended.
        """
        if self._hook is None:
            raise RuntimeError("this host has no `question` to ask")
        asker = self._here()
        # Whoever asks here may be somebody who is asked: that is in this context alone.
        return await self._answer([] if asker is None else [_running(asker)], request, copy_context())

    async def elicited(
        self, context: ClientRequestContext, params: ElicitRequestParams
    ) -> ElicitResult | ErrorData:
        """A server asks: the `elicitation_callback` of a client."""
        if self._hook is None:
            return ErrorData(code=INVALID_REQUEST, message="The host has nobody to ask")
        try:
            return _as_result(await self._answer(self._askers_of(context, params), params))
        except Cancelled:
            return ElicitResult(action="cancel")
        except Exception:
            logger.exception("a question could not be answered")
            return ErrorData(code=INTERNAL_ERROR, message="The host could not answer the question")

    def _askers_of(self, context: ClientRequestContext, params: ElicitRequestParams) -> Sequence[Asker]:
        """The call that a question is about, or all that it may be about, in the order in which they began.

        Raises:
            Cancelled: It has ended.
        """
        number = cast("Mapping[str, object]", params.meta or {}).get(CALL_META)
        if isinstance(number, str) and number.startswith(self._mark):
            return [_running(self._running.get(number))]
        here = self._here()
        if here is not None and (here.is_running or here.session is context.session):
            return [_running(here)]
        # A connection that was opened within a call keeps the context of that one for ever.
        return [
            each for each in self._running.values() if each.is_running and each.session is context.session
        ]

    def _here(self) -> Asker | None:
        """The call of this host in whose context this is called."""
        asker = _CURRENT.get()
        while asker is not None and asker.owner is not self:
            asker = asker.outer
        return asker

    async def _answer(
        self, askers: Sequence[Asker], request: object, context: Context | None = None
    ) -> object:
        if context is None:
            # A question comes in the context of the connection. Of several calls, the one that began last may
            # have been started by somebody who is asked now, and waits for this.
            context = askers[-1].context if askers else copy_context()
        if len(askers) != 1:
            return await self._prompt(context, (_LAST, 0), None, request)
        (asker,) = askers
        entry = asker.entry
        asker.handle.asks(entry, 1)
        asking = self._prompt(context, entry.order, entry.call, request)
        entry.when_settled.append(asking.cancel)
        try:
            return await asking
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Cancelled("the call that asks was given up before it was answered") from None
        finally:
            entry.when_settled.remove(asking.cancel)
            asker.handle.asks(entry, -1)

    def _prompt(
        self, context: Context, order: Order, call: ToolCall | None, request: object
    ) -> asyncio.Task[object]:
        """Ask in a task of its own, which is cancelled when nobody wants to know any more."""

        async def ask() -> object:
            async with self._prompts.turn(order):
                return await answer_of(cast("Callable[..., object]", self._hook), call, request)

        return asyncio.get_running_loop().create_task(ask(), context=context.copy())


class Cancelled(RuntimeError):
    """The call that asks has ended, or was given up."""


def _running(asker: Asker | None) -> Asker:
    if asker is None or not asker.is_running:
        raise Cancelled("the call that asks has ended, so nobody is asked about it")
    return asker


def _as_result(answer: object) -> ElicitResult | ErrorData:
    """What a server is answered."""
    if isinstance(answer, ElicitResult | ErrorData):
        # What cannot be written would end the connection.
        answer.model_dump_json(by_alias=True)
        return answer
    if answer is None or answer is False:
        return ElicitResult(action="decline")
    if answer is True:
        return ElicitResult(action="accept", content={})
    if isinstance(answer, Mapping):
        return _as_result(ElicitResult(action="accept", content=dict(cast("Mapping[str, Any]", answer))))
    raise TypeError(
        f"question answered {answer!r}; it must answer an ElicitResult, the content as a mapping, or None to "
        "decline"
    )
