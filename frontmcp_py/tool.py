"""`@tool`: a function and what holds for its calls, as one object that stays callable."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar, Unpack, cast, overload

from mcp_types import Icon, ToolAnnotations

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.policy import (
    UNSET,
    ConcurrencyOption,
    OnCancel,
    Policy,
    Priority,
    RateLimitOption,
    TimeoutOption,
    Unset,
    names_options,
    naming,
    not_allowed,
)

P = ParamSpec("P")
R = TypeVar("R")


class ToolOptions(TypedDict, total=False):
    """The options of `tool`, for everything that passes them on."""

    name: str | None
    title: str | None
    description: str | None
    read_only: bool | None
    destructive: bool | None
    idempotent: bool | None
    open_world: bool | None
    annotations: ToolAnnotations | None
    icons: Sequence[Icon] | None
    meta: Mapping[str, Any] | None
    structured_output: bool | None
    rate_limit: RateLimitOption | Unset
    concurrency: ConcurrencyOption | Unset
    timeout: TimeoutOption | Unset
    priority: Priority
    on_cancel: OnCancel | Unset
    describe_limits: bool | None


class Tool(Generic[P, R]):
    """A function as an MCP tool, with the limits that hold for its calls.

    Made by `@tool`, `@app.tool` or `@server.tool`. Calling it calls the plain function: no server, no limits.
    One tool may be given to several servers, and each counts for itself.

    Attributes:
        fn: The plain function.
        name: What clients call it.
        title: What people read.
        description: What the model reads; the limits' sentence is added by the server.
        annotations: Hints such as `readOnlyHint`.
        icons: Pictures of it.
        meta: The tool's own `_meta`.
        structured_output: As in the SDK; `None` is by the return annotation.
        policy: Its limits.
        describe_limits: Whether the model is told of them; `None` is as the server says.
        is_async: Whether the function is a coroutine function; others run in a worker thread.
    """

    @names_options
    def __init__(
        self,
        fn: Callable[P, R],
        *,
        name: str | None = None,
        title: str | None = None,
        description: str | None = None,
        annotations: ToolAnnotations | None = None,
        icons: Sequence[Icon] | None = None,
        meta: Mapping[str, Any] | None = None,
        structured_output: bool | None = None,
        policy: Policy | None = None,
        describe_limits: bool | None = None,
    ) -> None:
        self.fn = fn
        self.name: str = _name_of(fn) if name is None else name
        with naming(f'tool "{self.name}"'):
            _check_optional("title", title, str, "text")
            _check_optional("description", description, str, "text")
            _check_optional("annotations", annotations, ToolAnnotations, "a ToolAnnotations")
            _check_optional("icons", icons, Sequence, "a list of Icon objects")
            _check_optional("meta", meta, Mapping, "a mapping")
            _check_optional("structured_output", structured_output, bool, "True or False")
            _check_optional("describe_limits", describe_limits, bool, "True or False")
        self.title = title
        self.description: str = (
            (inspect.getdoc(_without_partial(fn)) or "") if description is None else description
        )
        self.annotations = annotations
        self.icons: list[Icon] | None = list(icons) if icons is not None else None
        self.meta: dict[str, Any] | None = dict(meta) if meta is not None else None
        self.structured_output = structured_output
        self.policy: Policy = policy or Policy()
        self.describe_limits = describe_limits
        self.is_async: bool = is_async(fn)
        functools.update_wrapper(self, fn, updated=())
        self._check()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the plain function."""
        return self.fn(*args, **kwargs)

    def __get__(self, owner: object, kind: type | None = None) -> Tool[..., R]:
        """A tool declared in a class is, on an instance, the tool of the bound method."""
        if owner is None:
            return cast("Tool[..., R]", self)
        return Tool(
            self.fn.__get__(owner, kind),
            name=self.name,
            title=self.title,
            description=self.description,
            annotations=self.annotations,
            icons=self.icons,
            meta=self.meta,
            structured_output=self.structured_output,
            policy=self.policy,
            describe_limits=self.describe_limits,
        )

    def __repr__(self) -> str:
        return f"<Tool {self.name!r}>"

    @property
    def is_read_only(self) -> bool:
        """Whether it says that it changes nothing."""
        return bool(self.annotations and self.annotations.read_only_hint)

    @property
    def cancels(self) -> bool:
        """Whether a cancelled call cancels its body, or only aborts its signal. A thread can only be told."""
        if not self.is_async:
            return False
        on_cancel = self.policy.on_cancel
        return self.is_read_only if on_cancel is UNSET else on_cancel == "cancel"

    def _check(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"tool name: {self.name!r} is not allowed; give text that is not empty")
        if self.name == "<lambda>":
            raise ConfigurationError("a lambda has no name; give the tool one: tool(name=...)")
        body = _body_of(self.fn)
        if inspect.isasyncgenfunction(body) or inspect.isgeneratorfunction(body):
            raise ConfigurationError(
                f'tool "{self.name}": a generator is not allowed; an MCP tool returns one result, '
                "so collect it and return it (progress goes through ctx.report_progress)"
            )
        deadline = self.policy.deadline
        if not self.is_async and deadline is not UNSET and deadline and deadline.cancel_after is not None:
            raise ConfigurationError(
                f'tool "{self.name}": timeout.cancel_after: {deadline.cancel_after!r} is not allowed on a '
                '"def" tool, whose thread can only be told; leave it out, or make the tool async'
            )
        if not self.is_async and self.policy.on_cancel == "cancel":
            raise ConfigurationError(
                f'tool "{self.name}": on_cancel: \'cancel\' is not allowed on a "def" tool, whose thread '
                "can only be told; give 'abort', or make the tool async"
            )


@overload
def tool(fn: Callable[P, R], /) -> Tool[P, R]: ...


@overload
def tool(**options: Unpack[ToolOptions]) -> Callable[[Callable[P, R]], Tool[P, R]]: ...


@names_options
def tool(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    title: str | None = None,
    description: str | None = None,
    read_only: bool | None = None,
    destructive: bool | None = None,
    idempotent: bool | None = None,
    open_world: bool | None = None,
    annotations: ToolAnnotations | None = None,
    icons: Sequence[Icon] | None = None,
    meta: Mapping[str, Any] | None = None,
    structured_output: bool | None = None,
    rate_limit: RateLimitOption | Unset = UNSET,
    concurrency: ConcurrencyOption | Unset = UNSET,
    timeout: TimeoutOption | Unset = UNSET,
    priority: Priority = "normal",
    on_cancel: OnCancel | Unset = UNSET,
    describe_limits: bool | None = None,
) -> Any:
    """Make a function an MCP tool, and say how often it may run, how many at once, and for how long.

    Works bare and with options, on `async def`, on `def` (which runs in a worker thread) and on methods.

    Args:
        fn: The function, when used bare.
        name: What clients call it; by default the function's name.
        title: What people read.
        description: What the model reads; by default the docstring. The limits' sentence is added at its end,
            or where it says `{limits}`.
        read_only: It changes nothing. A cancelled call then cancels its body, unless `on_cancel` says
            otherwise.
        destructive: It may destroy something.
        idempotent: Calling it again with the same arguments changes nothing more.
        open_world: It talks to the world outside.
        annotations: The same four hints, and more, as one object; not together with them.
        icons: Pictures of it.
        meta: The tool's `_meta`.
        structured_output: As in the SDK; by default by the return annotation.
        rate_limit: How often: a `RateLimit`, text such as `"10/minute; 100/day"`, a mapping, or a list of
            these.
        concurrency: How many at once: a `Concurrency`, a number, a mapping, or a list of these.
        timeout: How long: a `Timeout`, seconds, text such as `"30s"`, or a mapping.
        priority: `control` calls go first and may use reserved places.
        on_cancel: What a cancelled call does to a running body: `cancel` its task, or `abort` its signal
            only.
        describe_limits: Whether the model is told of the limits; by default as the server says.

    For each of `rate_limit`, `concurrency` and `timeout`: not given, the server's default applies; `None`,
    there is no limit of this kind (`0` says the same for `concurrency`).

    Raises:
        ConfigurationError: A value is not allowed; tool, field, value and what is allowed are named.
        TypeError: There is no such option; the nearest one is named.
    """
    hints = (read_only, destructive, idempotent, open_world)
    plain = (name, title, description, *hints, annotations, icons, meta, structured_output, describe_limits)
    limits = (rate_limit, concurrency, timeout, on_cancel)
    says_something = (
        any(each is not None for each in plain)
        or any(each is not UNSET for each in limits)
        or priority != "normal"
    )

    def make(function: Callable[..., Any]) -> Tool[..., Any]:
        made = made_already(function)
        if made is not None:
            if says_something:
                raise ConfigurationError(
                    f'tool "{made.name}": it is a tool already, with options of its own; '
                    "give them all in one place"
                )
            return made
        if not callable(function):
            raise TypeError(
                f"tool() decorates a function, not {function!r}; give options by name: tool(name=...)"
            )
        with naming(f'tool "{_name_of(function) if name is None else name}"'):
            policy = Policy(rate_limit, concurrency, timeout, priority, on_cancel)
            together = _annotations(hints, annotations)
        return Tool(
            function,
            name=name,
            title=title,
            description=description,
            annotations=together,
            icons=icons,
            meta=meta,
            structured_output=structured_output,
            policy=policy,
            describe_limits=describe_limits,
        )

    return make if fn is None else make(fn)


def _annotations(hints: tuple[bool | None, ...], whole: ToolAnnotations | None) -> ToolAnnotations | None:
    for name, hint in zip(("read_only", "destructive", "idempotent", "open_world"), hints, strict=True):
        if hint is not None and not isinstance(hint, bool):
            raise ConfigurationError(f"{name}: {hint!r} is not allowed; give True or False")
        if hint is not None and whole is not None:
            raise ConfigurationError(f"{name}: not allowed together with annotations; give it there")
    if whole is not None or all(hint is None for hint in hints):
        return whole
    read_only, destructive, idempotent, open_world = hints
    return ToolAnnotations(
        read_only_hint=read_only,
        destructive_hint=destructive,
        idempotent_hint=idempotent,
        open_world_hint=open_world,
    )


def made_already(value: object) -> Tool[..., Any] | None:
    """The tool that `value` is: itself, or a tool of a class behind `@classmethod`."""
    if isinstance(value, MethodType):
        behind: object = value.__func__
        if isinstance(behind, Tool):
            value = cast("Tool[..., Any]", behind).__get__(value.__self__)
    return cast("Tool[..., Any]", value) if isinstance(value, Tool) else None


def _name_of(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__name__", None)
    if name is None:
        raise ConfigurationError(f"{fn!r} has no name of its own; give the tool one: tool(name=...)")
    return str(name)


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling `fn` gives a coroutine; anything else runs in a worker thread."""
    return inspect.iscoroutinefunction(_body_of(fn))


def _without_partial(fn: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _body_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function whose body runs when `fn` is called: of an object, its `__call__`."""
    fn = _without_partial(fn)
    if isinstance(fn, staticmethod):
        fn = fn.__func__
    return fn if inspect.isroutine(fn) or isinstance(fn, type) else type(fn).__call__


def _check_optional(option: str, value: object, kind: type, allowed: str) -> None:
    if value is not None and (not isinstance(value, kind) or (kind is Sequence and isinstance(value, str))):
        raise not_allowed(option, value, allowed)
