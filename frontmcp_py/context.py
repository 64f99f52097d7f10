"""What a tool is given to talk to its caller and to the guard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from mcp.server.mcpserver.context import Context
from mcp_types import CallToolResult

from frontmcp_py import process
from frontmcp_py.call import Caller
from frontmcp_py.errors import OutputLimit
from frontmcp_py.policy import DEFAULT_MAX_OUTPUT, Duration
from frontmcp_py.process import ProcessResult
from frontmcp_py.signal import AbortSignal

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext
    from mcp.server.mcpserver import MCPServer
    from mcp.server.subscriptions import SubscriptionBus
    from mcp_types import InputResponseRequestParams


class CallInProgress(Protocol):
    """What the context needs of the call that it belongs to."""

    @property
    def tool(self) -> str:
        """The tool that was called."""
        ...

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

    @overload
    async def run_process(
        self,
        *argv: str | os.PathLike[str],
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        input: str | bytes | None = None,
        timeout: Duration | None = None,
        max_output: int = DEFAULT_MAX_OUTPUT,
        text: Literal[True] = True,
        shell: bool = False,
    ) -> ProcessResult[str]: ...

    @overload
    async def run_process(
        self,
        *argv: str | os.PathLike[str],
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        input: str | bytes | None = None,
        timeout: Duration | None = None,
        max_output: int = DEFAULT_MAX_OUTPUT,
        text: Literal[False],
        shell: bool = False,
    ) -> ProcessResult[bytes]: ...

    async def run_process(
        self,
        *argv: str | os.PathLike[str],
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        input: str | bytes | None = None,
        timeout: Duration | None = None,
        max_output: int = DEFAULT_MAX_OUTPUT,
        text: bool = True,
        shell: bool = False,
    ) -> ProcessResult[str] | ProcessResult[bytes]:
        """Run a command, and end it with everything it has started when this call should stop.

        It listens to the call's signal: at the call's deadline, when its client cancels (whatever the tool's
        `on_cancel` says) and when the server shuts down, the command is ended, and this raises the signal's
        reason. No process of the command's group is left when this returns or raises. POSIX only.

        Args:
            argv: The program and its arguments, each on its own.
            cwd: The folder to run it in.
            env: All of its environment; by default the server's.
            input: What it reads from standard input, which is empty by default. Text is encoded as UTF-8.
            timeout: How long it may take, as a `Duration` of a millisecond to a day.
            max_output: How many bytes it may write, to standard output and standard error together.
            text: Whether the result has `str`, from UTF-8 with what cannot be read replaced, or `bytes`.
            shell: Whether `argv` is one text for `/bin/sh`. Never put into it what a caller has sent.

        Returns:
            Its exit status, which may be any, and its output.

        Raises:
            ProcessTimeout: It took longer than `timeout`.
            OutputLimit: It wrote more than `max_output`.
            GuardError: The call should stop: the signal's reason.
            OSError: It could not be started; `filename` is the program or folder that is missing.
            ConfigurationError: A value that no command can be run with.
            TypeError: An argument that is something else than it has to be.
            NotImplementedError: This system has no process groups.
        """
        run = partial(
            process.run,
            *argv,
            cwd=cwd,
            env=env,
            input=input,
            timeout=timeout,
            max_output=max_output,
            shell=shell,
            signal=self.signal,
        )
        try:
            # For type checkers only: each of the two values of `text` has an overload of its own.
            return await (run(text=False) if text is False else run(text=text))
        except OutputLimit as error:
            raise OutputLimit(self._progressing.tool, error.max_bytes, process=True) from None
