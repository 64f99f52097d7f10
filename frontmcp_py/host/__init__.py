"""The host's side: a model's batch of calls, in the order it was written.

A model writes several calls in one response, and it writes them in an order. A host that starts them all at
once breaks those that build on each other; one that starts them one by one is slow. This one is told which
tools share a resource, and how many may use it at once:

    config ─► Host ─► handle ─► calling ─► a client session of the SDK, or a function
                        ├ fan_out    is it one call or several operations?
                        ├ prompts    may it run? what is the model told? (one question at a time)
                        ├ lanes      whose turn is it? (the scheduler that the guard uses, too)
                        └ questions  what does a running tool ask, and which one asks?

`calls` holds calls and results, `entries` where each stands, `batch` what a transcript has of them, `formats`
how providers write them, `timeline` how a batch went. Nothing here needs a server of this package.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any, TypeAlias

from mcp.client.session import ElicitationFnT
from mcp_types import Tool

from frontmcp_py.policy import HOST_FAREWELL

from .batch import Batch
from .calling import CallFunction, CallOption, check_call
from .calls import Operation, Status, ToolCall, ToolResult
from .config import HostConfig, HostConfigOption, Layer, ToolConfig
from .entries import Entry, State
from .fan_out import BATCHING, envelope_schema
from .handle import BatchHandle
from .lanes import Lanes
from .prompts import Approve, Complete, Decision, Prompts, Question, Review, Run, Skip
from .questions import Questions
from .timeline import Timeline

__all__ = [
    "Approve",
    "Batch",
    "BatchHandle",
    "CallFunction",
    "CallOption",
    "Complete",
    "Decision",
    "Entry",
    "Host",
    "HostConfig",
    "HostConfigOption",
    "Layer",
    "OnState",
    "Operation",
    "Question",
    "Review",
    "Run",
    "Skip",
    "State",
    "Status",
    "Timeline",
    "ToolCall",
    "ToolConfig",
    "ToolResult",
]

logger: logging.Logger = logging.getLogger("frontmcp_py.host")

OnState: TypeAlias = Callable[[ToolCall, State], object]
"""Told of every change, in the order in which they happen."""


class Host:
    """Runs the calls of a model's responses. Limits hold over all batches of one host.

    Args:
        config: Which tools are limited, and how: TOML text, the path of a TOML file, a mapping, or several of
            these, of which later ones override earlier ones. `None`: nothing is limited.
        call: A `Client` or `ClientSession` of the SDK, or `async (name, arguments) -> result`. `None`: `run`
            and `start` are told.
        approve: Asked of every call and operation before anything of its batch runs: `approve(call)` answers
            `Run()`, `Run(arguments)`, `Skip(reason)`, `Complete(result)`, or `True` or `False`. `None`:
            everything may run.
        question: Asked what a running tool asks: `question(call, request)`. See `elicitation_callback`.
        review: Asked what the model is told of a tool that has run: `review(call, result)`.
        on_state: Told of every change: `on_state(call, state)`. A plain function that does not block.

    All but `on_state` may be async. Of a call that is fanned out, each operation is asked and told about as
    an `Operation`, and changes of the call as a whole are told, too. People are asked one thing at a time: of
    what is due, the first in the written order.

    Raises:
        ConfigurationError: The configuration is not as it has to be.
        TypeError: A hook or `call` cannot be called, or `on_state` is async.
    """

    def __init__(
        self,
        config: HostConfigOption = None,
        call: CallOption | None = None,
        *,
        approve: Approve | None = None,
        question: Question | None = None,
        review: Review | None = None,
        on_state: OnState | None = None,
    ) -> None:
        hooks = {"approve": approve, "question": question, "review": review, "on_state": on_state}
        for name, hook in hooks.items():
            if hook is not None and not callable(hook):
                raise TypeError(f"{name}: {hook!r} is not a function")
        if inspect.iscoroutinefunction(on_state) or inspect.iscoroutinefunction(type(on_state).__call__):
            raise TypeError("on_state must be a plain function: it is told in a step that waits for nothing")
        if call is not None:
            check_call(call)
        self.config: HostConfig = HostConfig.of(config)
        self.approve: Approve | None = approve
        self.review: Review | None = review
        self.on_state: OnState | None = on_state
        self.question: Question | None = question
        self.schemas: dict[str, Mapping[str, Any]] = {}
        self._warned: set[str] = set()
        self._call = call
        self._loop: asyncio.AbstractEventLoop | None = None
        self.running: set[BatchHandle] = set()
        self.lanes: Lanes = Lanes()
        self.prompts: Prompts = Prompts()
        self.questions: Questions = Questions(self.prompts, question)
        self._numbers = count(1)

    async def run(
        self, batch: Batch | Iterable[ToolCall], *, call: CallOption | None = None
    ) -> list[ToolResult]:
        """Run a batch to its end.

        If the caller is cancelled, so is the batch, and running calls are given a second at most to end.

        Args:
            batch: The calls of one response, or what `Batch.resume` made of a transcript.
            call: Through what its tools are called, instead of what the host was made with.

        Returns:
            One result per call, in the written order. Nothing that a tool or a hook does makes this raise.
        """
        handle = self.start(batch, call=call)
        try:
            return await handle.results()
        finally:
            if not handle.is_done:
                handle.cancel()
                await handle.ended(within=HOST_FAREWELL)

    def start(self, batch: Batch | Iterable[ToolCall], *, call: CallOption | None = None) -> BatchHandle:
        """Start a batch and come back at once. Needs a running event loop.

        Args:
            batch: The calls of one response, or what `Batch.resume` made of a transcript.
            call: Through what its tools are called, instead of what the host was made with.

        Raises:
            ConfigurationError: The batch is no list of calls, or resumes an operation that no call has.
            TypeError: There is nothing to call tools through.
            RuntimeError: No event loop is running, or batches of this host run on another one.
        """
        call = self._call if call is None else call
        if call is None:
            raise TypeError("this host was made without `call`; give run() or start() one")
        check_call(call)
        batch = batch if isinstance(batch, Batch) else Batch(batch)
        self._adopt(asyncio.get_running_loop())
        return BatchHandle(self, batch, call, next(self._numbers), self.questions.current())

    def _adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run on this loop from now on; what a closed one has left behind will never end."""
        if self._loop is not loop:
            if self._loop is not None and self._loop.is_closed():
                for part in (self.running, self.lanes, self.prompts, self.questions):
                    part.clear()
            elif self.running:
                raise RuntimeError("batches of this host run on another event loop")
            self._loop = loop

    @property
    def elicitation_callback(self) -> ElicitationFnT:
        """What a `Client` takes as its `elicitation_callback`: servers' questions reach `question`.

        The hook answers an `ElicitResult`, the content of an accepted form as a mapping, or `None` to
        decline. Its first argument is the call that asks; `None` if several run on a connection that does
        not tell which.
        """
        return self.questions.elicited

    async def ask(self, request: object) -> object:
        """Ask `question` from inside a function that this host calls; the call keeps its place meanwhile.

        Args:
            request: Handed to the hook as it is.

        Returns:
            What the hook answers.

        Raises:
            RuntimeError: The host has no `question`, or the call that asks has ended.
        """
        return await self.questions.ask(request)

    def schema(self, tool: Tool) -> dict[str, Any]:
        """What to tell the model of a tool's arguments: its own schema, or that of the envelope.

        The tool's schema is remembered, since a tool that has an argument `ops` itself needs it to tell an
        envelope from an ordinary call.
        """
        self.schemas[tool.name] = tool.input_schema
        fans_out = self.config.tool(tool.name).fan_out
        return envelope_schema(tool.input_schema) if fans_out else dict(tool.input_schema)

    def advertise(self, tools: Iterable[Tool]) -> list[Tool]:
        """The tools as a model is to see them: without disabled ones, and with envelopes.

        A tool that the configuration names and that is not among them is warned about, once: its limit would
        protect nothing.

        Args:
            tools: All tools of the host, of one server or several.
        """
        tools = list(tools)
        for name, sentence in self.config.strangers([tool.name for tool in tools]).items():
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("%s", sentence)
        shown: list[Tool] = []
        for tool in tools:
            config = self.config.tool(tool.name)
            if config.enabled:
                changes: dict[str, Any] = {"input_schema": self.schema(tool)}
                if config.fan_out:
                    changes["description"] = f"{tool.description or ''} {BATCHING}".strip()
                shown.append(tool.model_copy(update=changes))
        return shown
