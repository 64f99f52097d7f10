"""A host on whose stage every call does what its arguments say, and what happened there, in order."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec

from frontmcp_py.host import BatchHandle, Host, HostConfigOption, State, Status, ToolCall, ToolResult
from frontmcp_py.testing import settle, virtual_time

P = ParamSpec("P")

_STAGES: list[Stage] = []


def staged(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test in virtual time. Every stage that it makes has to be empty at the end."""

    @functools.wraps(test)
    async def run(*args: P.args, **kwargs: P.kwargs) -> None:
        _STAGES.clear()
        await test(*args, **kwargs)
        await settle()
        for stage in _STAGES:
            assert_all_free(stage.host)
            assert stage.faults == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    return virtual_time(run)


def assert_all_free(host: Host) -> None:
    """Nobody has a place, waits for one, is asked or may still ask."""
    assert host.lanes.is_idle
    assert host.prompts.is_idle
    assert not host.questions._running


class Stage:
    """A host, and a record of what it does.

    A tool that is called as `call(...)` says takes `takes` seconds, asks `asks` before that, goes on for
    `stubborn` seconds after it was cancelled, and fails or answers its label.

    Args:
        config: What the host is told about its tools.
        hooks: The hooks of the host.

    Attributes:
        log: What happened, in order: `+a` when the tool called as `a` starts, `-a` when it ends; whatever
            else a test notes.
        at: When each of these happened.
        states: The states of each call and operation, by its id, in order.
        arguments: What each tool was called with, by its label.
        running: Who runs now.
        peak: The most that ran at once.
        faults: What a hook or a tool has seen that must not be. Raised there, it would be a result.
    """

    def __init__(self, config: HostConfigOption = None, **hooks: Any) -> None:
        self.log: list[str] = []
        self.at: dict[str, float] = {}
        self.states: dict[str, list[State]] = {}
        self.arguments: dict[str, dict[str, Any]] = {}
        self.running: list[str] = []
        self.peak: int = 0
        self.faults: list[str] = []
        self.host: Host = Host(config, self._call, **{"on_state": self._on_state, **hooks})
        _STAGES.append(self)

    def note(self, what: str) -> None:
        """Something has happened now."""
        self.log.append(what)
        self.at[what] = asyncio.get_running_loop().time()

    def _on_state(self, call: ToolCall, state: State) -> None:
        self.states.setdefault(call.id, []).append(state)

    async def _call(self, name: str, arguments: dict[str, Any]) -> object:
        label = str(arguments.get("as", name))
        self.arguments[label] = arguments
        self.note(f"+{label}")
        self.running.append(label)
        self.peak = max(self.peak, len(self.running))
        try:
            if "asks" in arguments:
                self.note(f"{label} is answered {await self.host.ask(arguments['asks'])}")
            try:
                await asyncio.sleep(arguments.get("takes", 0))
            except asyncio.CancelledError:
                if "stubborn" not in arguments:
                    raise
                await asyncio.sleep(arguments["stubborn"])
            if arguments.get("fails"):
                raise ValueError(f"{label} is broken")
            return f"{label} is done"
        finally:
            self.running.remove(label)
            self.note(f"-{label}")

    @property
    def starts(self) -> list[str]:
        """Who has started, in order."""
        return [what[1:] for what in self.log if what.startswith("+")]

    def start(self, *calls: ToolCall) -> BatchHandle:
        """Start a batch."""
        return self.host.start(calls)

    async def run(self, *calls: ToolCall) -> list[ToolResult]:
        """Run a batch to its end."""
        return await self.host.run(calls)


def call(tool: str, label: str, **arguments: Any) -> ToolCall:
    """A call with the id `label`."""
    return ToolCall(label, tool, {"as": label, **arguments})


def fan(tool: str, label: str, *operations: dict[str, Any]) -> ToolCall:
    """A call of several operations, which are called `label#0`, `label#1` and so on."""
    ops = [{"as": f"{label}#{index}", **each} for index, each in enumerate(operations)]
    return ToolCall(label, tool, {"ops": ops})


def result(call_id: str, status: Status, text: str) -> ToolResult:
    """A result of one sentence, of the tool `t`."""
    return ToolResult.saying(ToolCall(call_id, "t"), status, text)


def statuses(results: Sequence[ToolResult]) -> list[str]:
    """The status of each result."""
    return [result.status for result in results]


def operations_of(result: ToolResult) -> list[str]:
    """The status of each operation of a result."""
    return statuses(result.operations)
