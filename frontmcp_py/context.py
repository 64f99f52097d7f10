"""What a tool is given to talk to its caller and to the guard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from mcp.server.mcpserver.context import Context
from mcp_types import CallToolResult

from frontmcp_py.call import Caller
from frontmcp_py.signal import AbortSignal

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext
    from mcp.server.mcpserver import MCPServer
    from mcp.server.subscriptions import SubscriptionBus
    from mcp_types import InputResponseRequestParams


class CallInProgress(Protocol):
    """What the context needs of the call that it belongs to."""

    @property
    def signal(self) -> AbortSignal:
        """Aborted when the call should stop."""
        ...

    @property
    def caller(self) -> Caller:
        """Who calls."""
        ...

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call another tool from within this call."""
        ...


class ToolContext(Context[Any, Any]):
    """The SDK's `Context`, and what the guard adds to it.

    A tool asks for it by annotating a parameter; the parameter's name does not matter, and it is not part of
    the tool's schema. Everything of the SDK's `Context` is there too. While the tool asks its client
    something, the clock of its timeout stands still; after the call has been answered, progress and log
    messages go nowhere.
    """

    _progressing: CallInProgress

    def __init__(
        self,
        progressing: CallInProgress,
        *,
        request_context: ServerRequestContext[Any, Any] | None = None,
        mcp_server: MCPServer[Any] | None = None,
        input_params: InputResponseRequestParams | None = None,
        subscriptions: SubscriptionBus | None = None,
    ) -> None:
        super().__init__(
            request_context=request_context,
            mcp_server=mcp_server,
            input_params=input_params,
            subscriptions=subscriptions,
        )
        self._progressing = progressing

    @property
    def signal(self) -> AbortSignal:
        """Aborted when the call should stop: its deadline, its caller, or the server's end."""
        return self._progressing.signal

    @property
    def caller(self) -> Caller:
        """Who calls, as far as the server could verify."""
        return self._progressing.caller

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None) -> CallToolResult:
        """Call another tool of this server within this call.

        The other tool's own limits (or the defaults) and its timeout apply, under this call's caller; global
        limits and admission count the outer call only. When this call is aborted, so is that one.

        Args:
            name: The tool.
            arguments: Its arguments, as a client would send them.

        Returns:
            Its result. A refusal is a result too, with `is_error` and a `code` in its `_meta`.
        """
        return await self._progressing.call_tool(name, arguments or {})
