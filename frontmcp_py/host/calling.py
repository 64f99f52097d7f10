"""How one call reaches its tool, and what came of it, whatever happens on the way.

A host is given a client of the SDK or a function. Whatever a function raises or returns becomes a result: one
call's failure is that call's result and nobody else's trouble.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias, cast, runtime_checkable

import anyio
from mcp.client.client import Client
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

from .calls import ToolCall, ToolResult


@runtime_checkable
class Session(Protocol):
    """What is used of a client session of the SDK: its `call_tool`."""

    @property
    def call_tool(self) -> Callable[..., Awaitable[object]]:
        """Call a tool on the server."""
        ...


CallFunction: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[object]]
"""`async (name, arguments) -> result`, the result in any form that `ToolResult.of` takes."""

CallOption: TypeAlias = "Client | ClientSession | CallFunction | Session"
"""What the option `call` takes: a `Client` or `ClientSession` of the SDK, or an async function."""

# Whoever raises these does not know what became of the call.
_LOST: Final = (ConnectionError, EOFError, TimeoutError, anyio.BrokenResourceError, anyio.ClosedResourceError)
_LOST_CODES: Final = (CONNECTION_CLOSED, REQUEST_TIMEOUT)

UNKNOWN: Final = (
    "The connection was lost while this call ran, so it may have run. Check before calling again."
)
NOT_SENT: Final = "not run (the connection was lost before it was sent; it may be called again)"


class _NotSentError(Exception):
    """The connection was closed before the call left."""


def check_call(call: object) -> None:
    """Refuse what nobody can be called through.

    Raises:
        TypeError: It is neither a session nor a function.
    """
    if not isinstance(call, Session) and not callable(call):
        raise TypeError(
            f"call: {call!r} cannot be called; give a Client or ClientSession of the SDK, or an async "
            "function of a name and arguments"
        )


async def outcome(
    call: CallOption, asked: ToolCall, arguments: Mapping[str, object], meta: Mapping[str, object] | None
) -> ToolResult:
    """Call a tool and say what came of it.

    Args:
        call: The session or function.
        asked: What the model wrote.
        arguments: What the tool is called with.
        meta: Sent along to a server as `_meta`.

    Raises:
        asyncio.CancelledError: The task was cancelled, not only the call.
        KeyboardInterrupt: As it says.
    """
    try:
        return ToolResult.of(asked, await _called(call, asked.name, dict(arguments), meta))
    except KeyboardInterrupt:
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return ToolResult.saying(asked, "error", f"{asked.name} failed: it was cancelled from within")
    except _NotSentError:
        return ToolResult.saying(asked, "not_run", NOT_SENT)
    except BaseException as error:
        # `SystemExit` too: a tool does not end its host.
        if _is_lost(error):
            return ToolResult.saying(asked, "unknown", UNKNOWN)
        return ToolResult.saying(asked, "error", f"{asked.name} failed: {said(error)}")


async def _called(
    call: CallOption, name: str, arguments: dict[str, Any], meta: Mapping[str, object] | None
) -> object:
    if isinstance(call, Session):
        return await _through_session(call, name, arguments, meta)
    answer = call(name, arguments)
    if not inspect.isawaitable(answer):
        raise TypeError(f"the call function returned {type(answer).__name__}; it must be async")
    return await answer


async def _through_session(
    session: Session, name: str, arguments: dict[str, Any], meta: Mapping[str, object] | None
) -> object:
    has_turned: list[None] = []
    # What leaves is handed to other tasks, and none of them runs before the loop has turned.
    turn = asyncio.get_running_loop().call_soon(has_turned.append, None)
    more: dict[str, Any] = {} if meta is None else {"meta": dict(meta)}
    try:
        return await session.call_tool(name, arguments, **more)
    except MCPError as error:
        if error.code == CONNECTION_CLOSED and not has_turned:
            raise _NotSentError from error
        raise
    finally:
        turn.cancel()


def _is_lost(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_is_lost(each) for each in cast("BaseExceptionGroup[BaseException]", error).exceptions)
    return isinstance(error, _LOST) or (isinstance(error, MCPError) and error.code in _LOST_CODES)


def said(error: BaseException) -> str:
    """What an exception says, never nothing."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return "; ".join(said(each) for each in group.exceptions)
    text = str(error).strip()
    if isinstance(error, MCPError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
