"""From a `tools/call` of the SDK to the guard, and back.

One `Extension` asks the guard about every call; one subclass of `MCPServer` keeps the plans of its tools,
gives them their context, and turns what they raise into results. Everything else is the SDK's.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, TypeVar

import anyio.to_thread
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.server.mcpserver.resolve import find_resolved_parameters
from mcp.server.mcpserver.tools import Tool as SdkTool
from mcp.server.mcpserver.utilities.context_injection import find_context_parameter
from mcp.server.session import ServerSession
from mcp.server.subscriptions import InMemorySubscriptionBus, SubscriptionBus
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ElicitRequest,
    Icon,
    InputRequiredResult,
    LoggingLevel,
    RequestId,
    ServerNotification,
    ServerRequest,
    TextContent,
    ToolAnnotations,
)
from pydantic import BaseModel
from starlette.applications import Starlette

from frontmcp_py import results
from frontmcp_py.call import Call, Caller
from frontmcp_py.config import Settings, ToolInForce
from frontmcp_py.context import ToolContext
from frontmcp_py.errors import ConfigurationError, GuardError, InternalError
from frontmcp_py.guard import Guard, Limits, Plan, Run
from frontmcp_py.guard.deadline import CancelledItself
from frontmcp_py.guard.describe import META_KEY, as_data, describe
from frontmcp_py.http.door import PROBES, Door
from frontmcp_py.http.gate import Arrivals, Gate
from frontmcp_py.http.peer import TrustedProxies
from frontmcp_py.identity import SESSIONS_ARE_CHECKED, caller_of
from frontmcp_py.policy import CALL_META, UNSET, Policy
from frontmcp_py.signal import AbortSignal
from frontmcp_py.tool import Tool, is_async, made_already

logger: logging.Logger = logging.getLogger("frontmcp_py.server")

ResultT = TypeVar("ResultT", bound=BaseModel)

_NOBODY: Final = Caller()
_RUN: Final[contextvars.ContextVar[tuple[Guard, Run] | None]] = contextvars.ContextVar(
    "frontmcp_py.run", default=None
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered tool, and how its calls are handled."""

    name: str
    owner: str
    """Where it was registered, for messages."""
    plan: Plan
    is_bare: bool
    """It takes no context and needs no thread: the request is passed on as it is."""
    is_inline: bool
    """Its body may run in the request's own task."""
    needs_caller: bool
    """It matters who calls."""


class GuardedServer(MCPServer[Any]):
    """The SDK's server, with the guard in front of every tool.

    Args:
        guard: Decides about calls.
        production: Whether what a tool raises unforeseen is kept from its client.
        describe_limits: Whether the model is told of limits, where a tool does not say so itself.
        max_result_bytes: The largest result, serialised.
        config: What is in force for the server, and what the operator's file says about its tools.
        trusted: The proxies that are believed about whom they forward.
        options: The options of `MCPServer`.

    Attributes:
        config: The same.
        in_force: What is in force for every tool that was registered, disabled ones included, in that order.
        arrivals: How many requests have not been let in yet, over HTTP.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        production: bool,
        describe_limits: bool,
        max_result_bytes: int,
        config: Settings | None = None,
        trusted: TrustedProxies | None = None,
        tools: Iterable[SdkTool] = (),
        extensions: Iterable[Extension] = (),
        subscriptions: SubscriptionBus | None = None,
        **options: Any,
    ) -> None:
        # The SDK's constructor registers tools of extensions, so what registering needs comes first.
        self.guard = guard
        self.entries: dict[str, Entry] = {}
        self.config: Settings = config or Settings(guard.throttle)
        self.in_force: dict[str, ToolInForce] = {}
        # Also of tools that are gone: the file is not wrong because one of them was removed.
        self._known_tools: dict[str, None] = {}
        self._known_keys: dict[str, None] = {}
        self.arrivals: Arrivals = Arrivals()
        self.local_transport = "in-process"
        self.max_result_bytes = max_result_bytes
        self._trusted = trusted
        self._production = production
        self._describe_limits = describe_limits
        self._bus = subscriptions or InMemorySubscriptionBus()
        ready = [taken for tool in tools if (taken := self._take_in(tool)) is not None]
        super().__init__(
            tools=ready, extensions=[_Guarding(self), *extensions], subscriptions=self._bus, **options
        )

    # -- serving over HTTP ---------------------------------------------------------------------

    def streamable_http_app(self, **http: Any) -> Starlette:
        """The SDK's app; before it a gate, and before that the door that asks who comes from where."""
        app = super().streamable_http_app(**http)
        setattr(app.state, SESSIONS_ARE_CHECKED, not http.get("stateless_http", False))
        path = http.get("streamable_http_path", "/mcp")
        app.add_middleware(Gate, path=path, is_control=self._is_control, arrivals=self.arrivals)
        return self._behind_door(app, path)

    def sse_app(self, **http: Any) -> Starlette:
        """The SDK's app for the transport of 2024, behind the same door."""
        return self._behind_door(super().sse_app(**http), http.get("sse_path", "/sse"))

    def _is_control(self, tool: str) -> bool:
        entry = self.entries.get(tool)
        return entry is not None and entry.plan.control

    def _behind_door(self, app: Starlette, path: str) -> Starlette:
        throttle = self.guard.throttle
        ip_filter = None if throttle is None else throttle.ip_filter
        # A probe is not filtered, but tools are, wherever they are served.
        app.add_middleware(Door, ip_filter=ip_filter, trusted=self._trusted, unfiltered=PROBES - {path})
        return app

    # -- registering ---------------------------------------------------------------------------

    def register(self, tool: Tool[..., Any], owner: str) -> None:
        """Serve a tool, as the operator's file leaves it: changed, or not at all.

        Raises:
            ConfigurationError: Its name is taken, its limits disagree with another tool's, the file says of
                it what cannot be, or the SDK cannot make a schema of its signature.
        """
        fn = _callable_of(tool)
        policy = self._enter(
            tool.name,
            owner,
            tool.policy,
            fn,
            is_async=tool.is_async,
            reads=tool.is_read_only,
            describes=tool.describe_limits,
        )
        if policy is None:
            return
        try:
            super().add_tool(
                fn,
                name=tool.name,
                title=tool.title,
                description=self._description(tool.description, tool.name, policy),
                annotations=tool.annotations,
                icons=tool.icons,
                meta=self._meta(tool.meta, tool.name, policy),
                structured_output=tool.structured_output,
            )
        except Exception as error:
            self._drop(tool.name)
            raise ConfigurationError(f'tool "{tool.name}": {error}') from error

    def add_tool(
        self,
        fn: Callable[..., Any],
        name: str | None = None,
        title: str | None = None,
        description: str | None = None,
        annotations: ToolAnnotations | None = None,
        icons: list[Icon] | None = None,
        meta: dict[str, Any] | None = None,
        structured_output: bool | None = None,
    ) -> None:
        """Serve a tool of the SDK's own kind: the globals, the defaults and admission apply to it."""
        tool = made_already(fn)
        if tool is not None:
            self.register(tool, "server.mcp")
            return
        known_as = name or fn.__name__
        policy = self._enter_foreign(known_as, fn, annotations, is_async=is_async(fn))
        if policy is None:
            return
        try:
            super().add_tool(
                fn if is_async(fn) else _threaded(fn, known_as),
                name=name,
                title=title,
                description=self._description(description or inspect.getdoc(fn) or "", known_as, policy),
                annotations=annotations,
                icons=icons,
                meta=self._meta(meta, known_as, policy),
                structured_output=structured_output,
            )
        except Exception:
            self._drop(known_as)
            raise

    def remove_tool(self, name: str) -> None:
        """Serve a tool no longer."""
        super().remove_tool(name)
        self._drop(name)

    def check_config(self) -> None:
        """Refuse an operator's file that names tools or keys which the server does not have.

        Asked when the server is about to be used, as tools may be registered until then.

        Raises:
            ConfigurationError: It does; the nearest names are given.
        """
        problems = self.config_problems()
        if problems:
            raise ConfigurationError("; ".join(problems))

    def config_problems(self, config: Settings | None = None) -> list[str]:
        """What the operator's file says of tools and keys that the server does not have, a sentence each.

        Args:
            config: What another file says, instead of the one that is in force.
        """
        return (config or self.config).problems(self._known_tools, self._known_keys)

    # -- calling -------------------------------------------------------------------------------

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Run a tool past the guard.

        Without a context this is the SDK's method. Within a request, what a tool raises unforeseen becomes a
        result: in production it carries an id only, and the log has the traceback under the same id.
        """
        if context is None:
            return await super().call_tool(name, arguments)
        try:
            session = context.session
        except ValueError:
            # A context that somebody made outside of a request.
            return await super().call_tool(name, arguments, context)
        if isinstance(session, _CallSession):
            context = ToolContext(
                session.progress,
                request_context=context.request_context,
                mcp_server=self,
                input_params=session.params,
                subscriptions=self._bus,
            )
        try:
            return await super().call_tool(name, arguments, context)
        except UnexpectedToolError as error:
            return results.of_exception(name, error, production=self._production)
        except SystemExit as error:
            # A library that calls sys.exit() ends its call, not the server.
            return results.failure(name, error, production=self._production)

    async def nested_call(
        self, parent: Run, ctx: ServerRequestContext[Any, Any], name: str, arguments: Mapping[str, Any]
    ) -> CallToolResult:
        """A tool calls another one: its own limits apply, and the parent's caller and abort."""
        entry = self.entries.get(name)
        if entry is None:
            self.guard.count_unknown()
            return CallToolResult(
                content=[TextContent(type="text", text=f"Unknown tool: {name}")], is_error=True
            )
        given = dict(arguments)
        call = Call(name, given, parent.call.caller)
        params = CallToolRequestParams(name=name, arguments=given)

        async def body(run: Run) -> HandlerResult:
            _RUN.set((self.guard, run))
            session = _CallSession(self, run, ctx, params)
            context: Context[Any, Any] = Context(
                request_context=replace(ctx, session=session), mcp_server=self, subscriptions=self._bus
            )
            try:
                answer = await self.call_tool(name, given, context)
            except ToolError as error:
                answer = results.of_exception(name, error, production=self._production)
            return results.within(answer, name, self.max_result_bytes)

        # A parent whose work has ended holds nothing that others wait for: then it is a call like any other.
        within = None if parent.has_ended else parent
        try:
            answer = await self.guard.call(entry.plan, call, body, signal=parent.signal, parent=within)
        except Exception as error:
            return self.answer_to(name, error)
        if isinstance(answer, CallToolResult):
            return answer
        message = f'Tool "{name}" asks its client something, which it cannot do from within another call'
        return CallToolResult(content=[TextContent(type="text", text=message)], is_error=True)

    def answer_to(self, name: str, error: Exception) -> CallToolResult:
        """The result of a call that the guard ended; only the SDK's protocol errors are raised."""
        if isinstance(error, GuardError):
            return results.refusal(error)
        if isinstance(error, MCPError):
            raise error
        if isinstance(error, CancelledItself):
            return results.failure(name, error, production=self._production)
        ours = InternalError(name)
        logger.error("[%s] the guard failed on a call of %r", ours.error_id, name, exc_info=error)
        return results.refusal(ours)

    # -- parts ---------------------------------------------------------------------------------

    def _take_in(self, tool: SdkTool) -> SdkTool | None:
        """A ready tool of the SDK that was given to the constructor; `None` if it is not to be served."""
        policy = self._enter_foreign(tool.name, tool.fn, tool.annotations, is_async=tool.is_async)
        if policy is None:
            return None
        return tool.model_copy(
            update={
                "fn": tool.fn if tool.is_async else _threaded(tool.fn, tool.name),
                "is_async": True,
                "description": self._description(tool.description, tool.name, policy),
                "meta": self._meta(tool.meta, tool.name, policy),
            }
        )

    def _enter_foreign(
        self, name: str, fn: Callable[..., Any], annotations: ToolAnnotations | None, *, is_async: bool
    ) -> Policy | None:
        reads = bool(annotations and annotations.read_only_hint)
        return self._enter(name, "server.mcp", Policy(), fn, is_async=is_async, reads=reads, describes=None)

    def _enter(
        self,
        name: str,
        owner: str,
        declared: Policy,
        fn: Callable[..., Any],
        *,
        is_async: bool,
        reads: bool,
        describes: bool | None,
    ) -> Policy | None:
        """Bind a tool's limits; its policy as the operator's file leaves it, or `None`: it is not served."""
        taken = self.in_force.get(name)
        if taken is not None:
            raise ConfigurationError(
                f'two tools are called "{name}": one of {taken.owner} and one of {owner}; '
                "give one of them another name: tool(name=...)"
            )
        policy = self.config.policy_of(name, declared)
        if not is_async:
            self.config.check_thread(name, policy)
        # A thread can only be told.
        cancels = is_async and (reads if policy.on_cancel is UNSET else policy.on_cancel == "cancel")
        plan: Plan | None = None
        with self.config.naming_file():
            if self.config.overrides.tool(name).enabled is False:
                self.guard.declare(name, policy)
            else:
                plan = self.guard.bind(name, policy, threads=not is_async, cancels=cancels)
        self._known_tools[name] = None
        self._known_keys |= dict.fromkeys(_keys_of(policy))
        self.in_force[name] = self.config.in_force(
            name,
            owner,
            declared=declared,
            policy=policy,
            limits=self._limits_in_force(policy),
            cancels=cancels,
            describes=describes,
            describes_by_default=self._describe_limits,
        )
        if plan is None:
            return None
        is_bare = is_async and find_context_parameter(fn) is None and not find_resolved_parameters(fn)
        self.entries[name] = Entry(
            name=name,
            owner=owner,
            plan=plan,
            is_bare=is_bare,
            is_inline=cancels and is_bare,
            needs_caller=plan.is_partitioned or not is_bare,
        )
        return policy

    def _limits_in_force(self, policy: Policy) -> Limits:
        throttle = self.guard.throttle
        if throttle is not None and throttle.mode == "observe":
            # Nothing is refused for them, but they are what is being tried out.
            return Limits.of(policy, throttle)
        return self.guard.limits_of(policy)

    def _drop(self, name: str) -> None:
        if self.entries.pop(name, None) is not None:
            del self.in_force[name]
            self.guard.unbind(name)

    def _description(self, description: str, name: str, policy: Policy) -> str:
        tells = self.in_force[name].describe_limits.value
        return describe(description, self.guard.limits_of(policy) if tells else None)

    def _meta(self, meta: Mapping[str, Any] | None, name: str, policy: Policy) -> dict[str, Any] | None:
        tells = self.in_force[name].describe_limits.value
        data = as_data(self.guard.limits_of(policy)) if tells else {}
        told = {META_KEY: data} if data else {}
        return {**(meta or {}), **told} or None


class _Guarding(Extension):
    """Puts the guard in front of `tools/call`."""

    identifier = "dev.frontmcp/guard"

    def __init__(self, server: GuardedServer) -> None:
        self._server = server

    async def intercept_tool_call(
        self, params: CallToolRequestParams, ctx: ServerRequestContext[Any, Any], call_next: CallNext
    ) -> HandlerResult:
        server, name = self._server, params.name
        guard, max_bytes = server.guard, server.max_result_bytes
        entry = server.entries.get(name)
        if entry is None:
            guard.count_unknown()
            return await call_next(ctx)
        caller = caller_of(ctx, server.local_transport) if entry.needs_caller else _NOBODY
        # A partition function looks at the arguments; it must not change what the tool is given.
        arguments = params.arguments or {}
        call = Call(name, MappingProxyType(arguments) if entry.needs_caller else arguments, caller)

        if entry.is_bare:

            async def body(run: Run) -> HandlerResult:
                return results.within(await call_next(ctx), name, max_bytes)

        else:

            async def body(run: Run) -> HandlerResult:
                _RUN.set((guard, run))
                seen = replace(ctx, session=_CallSession(server, run, ctx, params))
                return results.within(await call_next(seen), name, max_bytes)

        try:
            return await guard.call(entry.plan, call, body, inline=entry.is_inline)
        except Exception as error:
            return server.answer_to(name, error)


class _Progress:
    """What a context knows of the call that it belongs to."""

    __slots__ = ("_ctx", "_run", "_server")

    def __init__(self, server: GuardedServer, run: Run, ctx: ServerRequestContext[Any, Any]) -> None:
        self._server = server
        self._run = run
        self._ctx = ctx

    @property
    def tool(self) -> str:
        return self._run.plan.tool

    @property
    def signal(self) -> AbortSignal:
        return self._run.signal

    @property
    def caller(self) -> Caller:
        return self._run.call.caller

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        return await self._server.nested_call(self._run, self._ctx, name, arguments)


class _CallSession(ServerSession):
    """The session of one call: questions stop its clock, and after the answer it says nothing more."""

    def __init__(
        self,
        server: GuardedServer,
        run: Run,
        ctx: ServerRequestContext[Any, Any],
        params: CallToolRequestParams,
    ) -> None:
        # The same session, seen from one call: it has the channels of the original.
        vars(self).update(vars(ctx.session))
        self.params = params
        self.progress = _Progress(server, run, ctx)
        self._guard = server.guard
        self._run = run
        # That of the request, also if another tool has called this one.
        self._number: object = (ctx.meta or {}).get(CALL_META)

    async def send_request(
        self,
        request: ServerRequest,
        result_type: type[ResultT],
        request_read_timeout_seconds: float | None = None,
        metadata: ServerMessageMetadata | None = None,
        progress_callback: ProgressFnT | None = None,
    ) -> ResultT:
        request = self._naming_the_call(request)
        self._guard.pause(self._run)
        try:
            # Who has cancelled the call, or been answered, does not answer questions about it.
            async with self._run.signal.scope():
                return await super().send_request(
                    request, result_type, request_read_timeout_seconds, metadata, progress_callback
                )
        finally:
            self._guard.resume(self._run)

    def _naming_the_call(self, request: ServerRequest) -> ServerRequest:
        # A question travels over the connection; a host that runs several calls wants to know whose it is.
        if self._number is None or not isinstance(request, ElicitRequest):
            return request
        meta: Any = {**(request.params.meta or {}), CALL_META: self._number}
        params = request.params.model_copy(update={"meta": meta})
        return request.model_copy(update={"params": params})

    async def send_notification(
        self, notification: ServerNotification, related_request_id: RequestId | None = None
    ) -> None:
        if not self._run.is_answered:
            await super().send_notification(notification, related_request_id)

    async def send_log_message(
        self,
        level: LoggingLevel,
        data: Any,
        logger: str | None = None,
        related_request_id: RequestId | None = None,
    ) -> None:
        if not self._run.is_answered:
            await super().send_log_message(level, data, logger, related_request_id)

    async def report_progress(
        self, progress: float, total: float | None = None, message: str | None = None
    ) -> None:
        if not self._run.is_answered:
            await super().report_progress(progress, total, message)


def _keys_of(policy: Policy) -> list[str]:
    slots = () if policy.concurrency_limits is UNSET else policy.concurrency_limits
    return [slot.key for slot in slots if slot.key is not None]


def _callable_of(tool: Tool[..., Any]) -> Callable[..., Any]:
    """The function that the SDK calls: a coroutine function with the tool's own signature."""
    fn = tool.fn
    if tool.is_async and inspect.iscoroutinefunction(fn):
        return fn

    if not tool.is_async:
        return _threaded(fn, tool.name)

    async def call(*args: Any, **kwargs: Any) -> Any:
        return await fn(*args, **kwargs)

    functools.update_wrapper(call, fn)
    call.__name__ = tool.name
    return call


def _threaded(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A `def` function as a coroutine function that runs it in the worker thread its call has a place for."""

    async def call(*args: Any, **kwargs: Any) -> Any:
        work = functools.partial(fn, *args, **kwargs)
        current = _RUN.get()
        if current is None:
            result = await anyio.to_thread.run_sync(work)
        else:
            guard, run = current
            result = await guard.in_thread(run, work)
        if inspect.iscoroutine(result):
            result.close()
            raise TypeError(
                f'tool "{name}" is a "def" function that returned a coroutine; make it "async def"'
            )
        return result

    functools.update_wrapper(call, fn)
    call.__name__ = name
    return call
