"""A named set of tools, resources and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.policy import names_options, not_allowed
from frontmcp_py.tool import Tool, ToolOptions, tool

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
CallableT = TypeVar("CallableT", bound=Callable[..., Any])


class App:
    """A named set of tools, resources and prompts, to be served by one server or several.

    Args:
        name: What it is called, in messages about its tools.
        tools: Tools to begin with; plain functions become tools without limits of their own.

    Once a server has been built from it, an app takes nothing more.
    """

    @names_options
    def __init__(self, name: str, tools: Iterable[Tool[..., Any] | Callable[..., Any]] = ()) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"App.name: {name!r} is not allowed; give text that is not empty")
        self.name = name
        self.tools: list[Tool[..., Any]] = as_tools(tools, f'app "{name}": tools')
        self._others: list[Callable[[MCPServer[Any]], None]] = []
        self._served_by: str | None = None

    @overload
    def tool(self, fn: Callable[P, R], /) -> Tool[P, R]: ...

    @overload
    def tool(
        self, fn: None = None, /, **options: Unpack[ToolOptions]
    ) -> Callable[[Callable[P, R]], Tool[P, R]]: ...

    def tool(self, fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """`@tool`, registered here at once; the options are those of `tool`."""
        self._check_open("tool")
        make = tool(**options)

        def register(function: Callable[..., Any]) -> Tool[..., Any]:
            self._check_open("tool")
            made = make(function)
            self.tools.append(made)
            return made

        return register if fn is None else register(fn)

    def resource(self, uri: str, **options: Any) -> Callable[[CallableT], CallableT]:
        """A resource, with the options and the meaning of the SDK. Resources are not limited."""
        if not isinstance(uri, str):
            raise TypeError("@app.resource needs the resource's URI: @app.resource('data://tickets')")
        return self._register("resource", lambda mcp: mcp.resource(uri, **options))

    def prompt(self, name: str | None = None, **options: Any) -> Callable[[CallableT], CallableT]:
        """A prompt, with the options and the meaning of the SDK. Prompts are not limited."""
        if name is not None and not isinstance(name, str):
            raise TypeError("@app.prompt is called, as in the SDK: @app.prompt()")
        return self._register("prompt", lambda mcp: mcp.prompt(name, **options))

    def serve(self, server: str, mcp: MCPServer[Any]) -> None:
        """Hand resources and prompts to a server that is being built; from now on the app is closed."""
        self._served_by = server
        for register in self._others:
            register(mcp)

    def _register(
        self, kind: str, decorator: Callable[[MCPServer[Any]], Any]
    ) -> Callable[[CallableT], CallableT]:
        self._check_open(kind)

        def register(fn: CallableT) -> CallableT:
            self._check_open(kind)
            self._others.append(lambda mcp: decorator(mcp)(fn))
            return fn

        return register

    def _check_open(self, kind: str) -> None:
        if self._served_by is not None:
            raise ConfigurationError(
                f'app "{self.name}": server "{self._served_by}" has been built from it, so it takes no '
                f"further {kind}; register it before the server is made, or with @server.tool"
            )


def as_tools(values: Iterable[Tool[..., Any] | Callable[..., Any]], field: str) -> list[Tool[..., Any]]:
    """Tools as they are, and plain functions made tools.

    Raises:
        ConfigurationError: It is no list of these.
    """
    made: list[Tool[..., Any]] = []
    for each in check_list(values, field, "tools and functions"):
        if callable(each):
            made.append(tool(each))
        else:
            raise not_allowed(field, each, "tools and functions")
    return made


def check_list(values: Iterable[T], field: str, of: str) -> Iterable[T]:
    """A list, or anything else that holds several.

    Raises:
        ConfigurationError: It is one thing.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise not_allowed(field, values, f"a list of {of}")
    return values
