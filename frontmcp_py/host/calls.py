"""What a model asks for and what it is told: calls, their operations, and results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self, TypeAlias, cast, get_args

from mcp_types import CallToolResult, ContentBlock, EmbeddedResource, TextContent, TextResourceContents
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_json

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.policy import check_choice, not_allowed

from . import formats

Status: TypeAlias = Literal["ok", "error", "skipped", "cancelled", "not_run", "unknown"]
"""How a call ended.

* `ok`: it has run, and says so.
* `error`: it has run and failed, or was refused (an unknown tool, bad arguments).
* `skipped`: whoever was asked for permission said no. It has not run.
* `cancelled`: the batch was cancelled before it had ended.
* `not_run`: an operation before it failed, or there was no connection to send it over. It has not run.
* `unknown`: the connection was lost while it ran. It may have run.
"""

STATUSES: Final[tuple[Status, ...]] = get_args(Status)

_BLOCKS: Final[TypeAdapter[list[ContentBlock]]] = TypeAdapter(list[ContentBlock])


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, as the model wrote it.

    Attributes:
        id: What the model calls it by. Ids of one batch may repeat: results are told apart by their place.
        name: The tool's name.
        arguments: What it is called with.
        problem: Why it cannot be run, if what the model wrote cannot be read; it is answered with that.
    """

    id: str
    name: str
    arguments: Mapping[str, object] = field(default_factory=dict[str, object])
    problem: str | None = None

    def __post_init__(self) -> None:
        """Accept what a model may write: no arguments at all, or something that is no object."""
        arguments = cast("object", self.arguments)
        if arguments is None:
            object.__setattr__(self, "arguments", {})
        elif not isinstance(arguments, Mapping):
            object.__setattr__(self, "arguments", {})
            if self.problem is None:
                kind = formats.kind_of(arguments)
                object.__setattr__(self, "problem", f"the arguments must be an object, not {kind}")

    def __hash__(self) -> int:
        # Arguments may hold lists, which have no hash. Equal calls have equal ones.
        return hash((self.id, self.name))

    @property
    def label(self) -> str:
        """How the call is written in a line of text: `name#id`."""
        return f"{self.name}#{self.id}"

    @classmethod
    def from_anthropic(cls, message: object) -> list[ToolCall]:
        """The calls of a message of Anthropic's Messages API, in the written order.

        Args:
            message: The message or its `content`, as an object of their package or as plain data.

        Raises:
            ConfigurationError: It is no such message. A single call that cannot be read is not an error: it
                is a call with a `problem`.
        """
        return [ToolCall(*read) for read in formats.calls_of_anthropic(message)]

    @classmethod
    def from_openai(cls, message: object) -> list[ToolCall]:
        """The calls of a message of OpenAI's Chat Completions or Responses API, in the written order.

        Args:
            message: The message (`tool_calls`) or the response (`output`), as an object of their package or
                as plain data.

        Raises:
            ConfigurationError: It is no such message. A single call that cannot be read (arguments that are
                not JSON, say) is not an error: it is a call with a `problem`.
        """
        return [ToolCall(*read) for read in formats.calls_of_openai(message)]


@dataclass(frozen=True, slots=True)
class Operation(ToolCall):
    """One operation of a call that was fanned out.

    Its `id` is that of the call, `#` and the index; its `arguments` are its own.

    Attributes:
        call: The whole call.
        index: Its place among the operations, from 0.
    """

    call: ToolCall = field(kw_only=True)
    index: int = field(kw_only=True)

    __hash__ = ToolCall.__hash__

    @property
    def label(self) -> str:
        """How the operation is written in a line of text: `name#id#index`."""
        return f"{self.name}#{self.id}"

    @classmethod
    def of(cls, call: ToolCall, index: int, arguments: Mapping[str, object]) -> Operation:
        """The operation at `index` of a call."""
        return cls(operation_id(call.id, index), call.name, arguments, call=call, index=index)


def operation_id(call_id: str, index: int) -> str:
    """What the operation at `index` of a call is called by."""
    return f"{call_id}#{index}"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What became of one call.

    Attributes:
        id: The call's.
        name: The tool's name.
        status: How it ended.
        content: What the model is told, as blocks of MCP: text, images, resources.
        structured_content: What programs are told, if the tool has such a result.
        meta: The result's `_meta`, such as the `code` of a refusal.
        operations: For a call that was fanned out, the result of each operation, in the written order and
            with its content as it was. Empty for a plain call, and for a call of one operation, which is the
            same.
    """

    id: str
    name: str
    status: Status = "ok"
    content: Sequence[ContentBlock] = ()
    structured_content: Mapping[str, Any] | None = None
    meta: Mapping[str, Any] | None = None
    operations: Sequence[ToolResult] = ()

    def __post_init__(self) -> None:
        """Take content in any form that is unmistakable."""
        check_choice(self.status, "ToolResult.status", STATUSES)
        object.__setattr__(self, "content", tuple(_blocks(self.content)))
        object.__setattr__(self, "operations", tuple(self.operations))

    @property
    def is_error(self) -> bool:
        """Whether the model is told that the call has not succeeded. Every status but `ok` is one."""
        return self.status != "ok"

    @property
    def text(self) -> str:
        """The content as text; what is no text stands there by its kind, such as `[image image/png]`."""
        return "\n".join(text_of(block) for block in self.content)

    @classmethod
    def of(cls, call: ToolCall, value: object) -> ToolResult:
        """The result of a call from what a function returned.

        Args:
            call: What was called.
            value: A result of this package or of the SDK, text, a block of content or a list of them, or
                anything that has a form in JSON. `None` is no content.
        """
        if isinstance(value, ToolResult):
            return replace(value, id=call.id, name=call.name)
        if isinstance(value, CallToolResult):
            status: Status = "error" if value.is_error else "ok"
            content = value.content
            if value.is_error and not any(text_of(block).strip() for block in content):
                content = [*content, TextContent(text=f"{call.name} failed and does not say why")]
            return cls(call.id, call.name, status, content, value.structured_content, value.meta)
        blocks = _blocks_of_value(value)
        structured = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None
        return cls(call.id, call.name, "ok", blocks, structured)

    @classmethod
    def saying(cls, call: ToolCall, status: Status, text: str) -> ToolResult:
        """A result that is one sentence."""
        return cls(call.id, call.name, status, (TextContent(text=text),))

    def as_dict(self) -> dict[str, object]:
        """The result as plain data, for a transcript. `ToolResult.from_dict` reads it."""
        data: dict[str, object] = {
            "id": self.id,
            "name": self.name,
            "status": self.status,
            "is_error": self.is_error,
            "content": [
                block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in self.content
            ],
            "text": self.text,
        }
        if self.structured_content is not None:
            data["structured_content"] = json.loads(to_json(self.structured_content, fallback=str))
        if self.meta is not None:
            data["meta"] = json.loads(to_json(self.meta, fallback=str))
        if self.operations:
            data["operations"] = [each.as_dict() for each in self.operations]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The result that `as_dict` has written down.

        Raises:
            ConfigurationError: Something is missing or not as it has to be.
        """
        given: object = data
        if not isinstance(given, Mapping):
            raise not_allowed("a result", given, "an object with id, name, status and content")
        for name in ("id", "name"):
            if not isinstance(data.get(name), str):
                raise not_allowed(f"{name} of a result", data.get(name), "text")
        status: Status = data.get("status") or ("error" if data.get("is_error") else "ok")
        return cls(
            data["id"],
            data["name"],
            status,
            data.get("content", ()),
            data.get("structured_content"),
            data.get("meta"),
            [cls.from_dict(each) for each in data.get("operations", ())],
        )

    def to_anthropic(self) -> dict[str, Any]:
        """The `tool_result` block of Anthropic's Messages API that answers the call."""
        return formats.anthropic_block(self)

    def to_openai(self) -> dict[str, Any]:
        """The `tool` message of OpenAI's Chat Completions API that answers the call."""
        return formats.openai_message(self)

    def to_openai_output(self) -> dict[str, Any]:
        """The `function_call_output` item of OpenAI's Responses API that answers the call."""
        return formats.openai_output(self)

    @classmethod
    def from_anthropic(cls, message: object) -> list[ToolResult]:
        """The results in a message of a transcript, for `Batch.resume`.

        Args:
            message: The message with `tool_result` blocks or its `content`, as plain data or as an object.
                It does not say which tool answered: that is taken from the call with the same id.

        Raises:
            ConfigurationError: It is no such message.
        """
        return [cls(*read) for read in formats.results_of_anthropic(message)]

    @classmethod
    def from_openai(cls, messages: object) -> list[ToolResult]:
        """The results among messages or items of a transcript, for `Batch.resume`.

        Args:
            messages: One `tool` message or `function_call_output` item, or a list in which they stand.
                Nothing there says whether a tool failed.

        Raises:
            ConfigurationError: It is no such message.
        """
        return [cls(*read) for read in formats.results_of_openai(messages)]


# ------------------------------------------------------------------------------------------------ content


def text_of(block: ContentBlock) -> str:
    """A block as text: its text, or what it is in brackets."""
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
        return block.resource.text
    return formats.described(block)


def _blocks(content: object) -> Iterator[ContentBlock]:
    if isinstance(content, str):
        yield TextContent(text=content)
        return
    if not isinstance(content, Iterable):
        raise not_allowed("ToolResult.content", content, "text or a list of content blocks")
    items = list(cast("Iterable[object]", content))
    try:
        yield from _BLOCKS.validate_python(items)
    except ValidationError:
        for index, item in enumerate(items):
            try:
                _BLOCKS.validate_python([item])
            except ValidationError:
                raise not_allowed(f"ToolResult.content[{index}]", item, "a content block of MCP") from None
        raise ConfigurationError("ToolResult.content is no list of content blocks") from None


def _blocks_of_value(value: object) -> tuple[ContentBlock, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (TextContent(text=value),)
    items = cast("Sequence[object]", value if isinstance(value, list | tuple) else (value,))
    # Plain data is data, even if it looks like a block.
    if items and all(isinstance(item, BaseModel) for item in items):
        try:
            return tuple(_blocks(items))
        except ConfigurationError:
            pass
    return (_json_block(value),)


def _json_block(value: object) -> TextContent:
    return TextContent(text=to_json(value, fallback=str, indent=2).decode(errors="replace"))
