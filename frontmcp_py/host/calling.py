"""How one call reaches its tool, and what came of it, whatever happens on the way.

A host is given a client of the SDK or a function. Whatever a function raises or returns becomes a result: one
call's failure is that call's result and nobody else's trouble.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, TypeGuard, cast

import anyio
from mcp.client.client import Client
from mcp.client.session import ClientRequestContext, ClientSession
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    PARSE_ERROR,
    REQUEST_TIMEOUT,
    CallToolRequestParams,
    ErrorData,
    InputRequest,
    InputRequiredResult,
    InputResponse,
)

from frontmcp_py.policy import FIRST_ROUND_DELAY, LAST_ROUND_DELAY, MAX_ROUNDS

from .calls import ToolCall, ToolResult


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
_LOST: Final = (
    ConnectionError,
    EOFError,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.EndOfStream,
)
# The same in libraries that need not be installed, and are not imported to find out.
_LOST_OVER_HTTP: Final = frozenset(
    {("httpx2", "TransportError"), ("httpx", "TransportError"), ("aiohttp", "ClientConnectionError")}
)
# What the SDK says when there is no answer, by code. Servers use the same codes for answers of their own.
_SAID_OF_LOST: Final = {CONNECTION_CLOSED: ("Connection closed", "SSE stream ")}
_SAID_OF_UNANSWERED: Final = {
    REQUEST_TIMEOUT: ("Request ", "Timed out "),
    PARSE_ERROR: ("Failed to parse JSON response", "Failed to parse SSE message"),
    INVALID_REQUEST: ("Unexpected content type", "server answered a request with 202"),
    # A status of HTTP, such as that of a gateway whose server takes too long.
    INTERNAL_ERROR: ("Server returned an error response",),
}

UNKNOWN: Final = (
    "The connection was lost while this call ran, so it may have run. Check before calling again."
)
UNANSWERED: Final = "There is no usable answer ({}), so this call may have run. Check before calling again."
NOT_SENT: Final = "not run (the connection was lost before it was sent; it may be called again)"
NOT_CONNECTED: Final = "not run (there is no connection: the client was not entered, or has been left)"


class _UnsendableError(Exception):
    """The call would break the connection; the message says why."""


class _NotSentError(Exception):
    """Nothing of the call can have left; the message says why."""


def is_session(call: object) -> TypeGuard[Session]:
    """Whether tools are called through a method of this object."""
    return hasattr(call, "call_tool")


def session_of(call: CallOption) -> ClientSession | None:
    """The session of the SDK that is called through; `None` if it is another thing, or not connected."""
    if isinstance(call, Client):
        try:
            return call.session
        except RuntimeError:
            return None
    return call if isinstance(call, ClientSession) else None


def check_call(call: object) -> None:
    """Refuse what nobody can be called through.

    Raises:
        TypeError: It is neither a session nor a function.
    """
    if not is_session(call) and not callable(call):
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
        return ToolResult.of(asked, await _called(call, asked.name, _own(arguments), meta))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return ToolResult.saying(asked, "error", f"{asked.name} failed: it was cancelled from within")
    except _UnsendableError as error:
        return ToolResult.saying(asked, "error", f"{asked.name} was not sent: {error}")
    except _NotSentError as error:
        return ToolResult.saying(asked, "not_run", str(error))
    except BaseException as error:
        # `SystemExit` too: a tool does not end its host.
        if _is_lost(error):
            return ToolResult.saying(asked, "unknown", UNKNOWN)
        if _is_unanswered(error):
            return ToolResult.saying(asked, "unknown", UNANSWERED.format(said(error)))
        return ToolResult.saying(asked, "error", f"{asked.name} failed: {said(error)}")


async def _called(
    call: CallOption, name: str, arguments: dict[str, Any], meta: Mapping[str, object] | None
) -> object:
    if is_session(call):
        return await _through_session(call, name, arguments, meta)
    answer: object = cast("CallFunction", call)(name, arguments)
    if inspect.isasyncgen(answer) or inspect.isgenerator(answer):
        raise TypeError(
            "the call function returned a generator, which is no result; it must be async and return one"
        )
    # A function that is not async has run by now; what it says is better than that it ought to be.
    return await answer if inspect.isawaitable(answer) else answer


def _own(arguments: Mapping[str, object]) -> dict[str, Any]:
    """Arguments that a function may change without changing what the model wrote."""
    try:
        return deepcopy(dict(arguments))
    except Exception:  # a program may pass what cannot be copied
        return dict(arguments)


async def _through_session(
    session: Session, name: str, arguments: dict[str, Any], meta: Mapping[str, object] | None
) -> object:
    _check_sendable(name, arguments)
    has_turned: list[None] = []
    # What leaves is handed to other tasks, and none of them runs before the loop has turned.
    turn = asyncio.get_running_loop().call_soon(has_turned.append, None)
    more: dict[str, Any] = {} if meta is None else {"meta": dict(meta)}
    try:
        if isinstance(session, ClientSession):
            return await _round_by_round(session, name, arguments, more)
        return await session.call_tool(name, arguments, **more)
    except MCPError as error:
        if error.code == CONNECTION_CLOSED and not has_turned:
            raise _NotSentError(NOT_SENT) from error
        raise
    except RuntimeError as error:
        if isinstance(session, Client | ClientSession) and not has_turned:
            raise _NotSentError(NOT_CONNECTED) from error
        raise
    finally:
        turn.cancel()


def _check_sendable(name: str, arguments: dict[str, Any]) -> None:
    """Keep back what would break the connection, and with it the other calls.

    Raises:
        _UnsendableError: It has no form in JSON and UTF-8: half a character, say, which a model can write.
    """
    try:
        CallToolRequestParams(name=name, arguments=arguments).model_dump_json(by_alias=True)
    except (ValueError, RecursionError) as error:
        raise _UnsendableError(f"its arguments have no form in JSON ({error})") from None


async def _round_by_round(
    session: ClientSession, name: str, arguments: dict[str, Any], more: Mapping[str, Any]
) -> object:
    """Call a tool, and answer what it asks before it runs, which a `Client` does by itself."""
    call = partial(session.call_tool, name, arguments, allow_input_required=True, **more)
    result = await call()
    rounds, delay = 0, FIRST_ROUND_DELAY
    while isinstance(result, InputRequiredResult):
        rounds += 1
        if rounds > MAX_ROUNDS:
            raise RuntimeError(f"the server asked {MAX_ROUNDS} times, and still wants to know more")
        answers: dict[str, InputResponse] | None = None
        if result.input_requests:
            answers = {
                key: await _answered(session, f"{rounds}-{key}", request)
                for key, request in result.input_requests.items()
            }
        else:
            # It only says to come again.
            await asyncio.sleep(delay)
            delay = min(2 * delay, LAST_ROUND_DELAY)
        result = await call(input_responses=answers, request_state=result.request_state)
    return result


async def _answered(session: ClientSession, number: str, request: InputRequest) -> InputResponse:
    meta = None if request.params is None else request.params.meta
    context = ClientRequestContext(session=session, request_id=number, meta=meta)
    answer = await session.dispatch_input_request(context, request)
    if isinstance(answer, ErrorData):
        raise MCPError.from_error_data(answer)
    return answer


def _is_lost(error: BaseException) -> bool:
    """Whether an error tells that the connection was lost, or one of those in a group does."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_lost, cast("BaseExceptionGroup[BaseException]", error).exceptions))
    if isinstance(error, MCPError):
        return error.message.startswith(_SAID_OF_LOST.get(error.code, ()))
    return isinstance(error, _LOST) or any(
        (kind.__module__.partition(".")[0], kind.__name__) in _LOST_OVER_HTTP for kind in type(error).__mro__
    )


def _is_unanswered(error: BaseException) -> bool:
    """Whether an error tells that no answer came in time, or none that can be read."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_unanswered, cast("BaseExceptionGroup[BaseException]", error).exceptions))
    if isinstance(error, MCPError):
        return error.message.startswith(_SAID_OF_UNANSWERED.get(error.code, ()))
    return isinstance(error, TimeoutError)


def said(error: BaseException) -> str:
    """What an exception says, never nothing."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return "; ".join(said(each) for each in group.exceptions)
    try:
        text = str(error).strip()
    except Exception:
        text = ""
    if isinstance(error, MCPError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
