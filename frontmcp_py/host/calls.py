"""What a model asks for and what it is told: calls, their operations, and results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, Self, TypeAlias, cast, get_args

from mcp_types import (
    AudioContent,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

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
* `unknown`: the connection was lost while it ran, or no answer came that can be read. It may have run.
"""

STATUSES: Final[tuple[Status, ...]] = get_args(Status)

_BLOCKS: Final[TypeAdapter[list[ContentBlock]]] = TypeAdapter(list[ContentBlock])
_BLOCK_TYPES: Final = (TextContent, ImageContent, AudioContent, ResourceLink, EmbeddedResource)


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
        """Accept what a model may write: no arguments at all, or something that is no object.

        Raises:
            ConfigurationError: The id or the name is no text.
        """
        for field_name, value in (("id", self.id), ("name", self.name)):
            if not isinstance(cast("object", value), str):
                raise not_allowed(f"ToolCall.{field_name}", value, "text")
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
        """How it is written in a line of text: `name#id`, of an operation `name#id#index`."""
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

    def __hash__(self) -> int:
        return hash((self.id, self.name))

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
        position: The place of the call in its batch, from 0, if the result comes from one. It tells calls
            with one id apart when a batch is resumed, and makes no difference when results are compared.
    """

    id: str
    name: str
    status: Status = "ok"
    content: Sequence[ContentBlock] = ()
    structured_content: Any = None
    meta: Mapping[str, Any] | None = None
    operations: Sequence[ToolResult] = ()
    position: int | None = field(default=None, compare=False)

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
        return "\n".join(formats.text_of(block) for block in self.content)

    @classmethod
    def of(cls, call: ToolCall, value: object) -> ToolResult:
        """The result of a call from what a function returned.

        Args:
            call: What was called.
            value: A result of this package or of the SDK, text, a block of content, a list with blocks, or
                anything else, which becomes JSON as far as it has a form in it. `None` is no content.
        """
        if isinstance(value, ToolResult):
            return replace(value, id=call.id, name=call.name)
        if isinstance(value, CallToolResult):
            status: Status = "error" if value.is_error else "ok"
            content = value.content
            if not content and value.structured_content is not None:
                # A server need not write it twice, but this is all that the model reads.
                content = [TextContent(text=_as_text(value.structured_content))]
            if value.is_error and not any(formats.text_of(block).strip() for block in content):
                content = [*content, TextContent(text=f"{call.name} failed and does not say why")]
            return cls(call.id, call.name, status, content, value.structured_content, value.meta)
        blocks = _blocks_of_value(value)
        if blocks is not None:
            return cls(call.id, call.name, "ok", blocks)
        data = _as_data(value)
        structured = cast("object", data) if isinstance(data, dict) else None
        return cls(call.id, call.name, "ok", (TextContent(text=_as_text(value)),), structured)

    @classmethod
    def saying(cls, call: ToolCall, status: Status, text: str) -> ToolResult:
        """A result that is one sentence."""
        return cls(call.id, call.name, status, (TextContent(text=text),))

    def as_dict(self) -> dict[str, object]:
        """The result as plain data, for a transcript. `ToolResult.from_dict` reads it.

        Numbers that JSON does not have are null; `structured_content` or `meta` that has no form in JSON at
        all is left out.
        """
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
        if self.position is not None:
            data["position"] = self.position
        for name, value in (("structured_content", self.structured_content), ("meta", self.meta)):
            plain = _as_data(value)
            if plain is not None:
                data[name] = plain
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
        operations: object = data.get("operations") or ()
        if not isinstance(operations, list | tuple):
            raise not_allowed("operations of a result", operations, "a list of results")
        position: object = data.get("position")
        if position is not None and (not isinstance(position, int) or isinstance(position, bool)):
            raise not_allowed("position of a result", position, "the place of its call, from 0")
        meta: object = data.get("meta")
        if meta is not None and not isinstance(meta, Mapping):
            raise not_allowed("meta of a result", meta, "an object")
        return cls(
            data["id"],
            data["name"],
            status,
            data.get("content") or (),
            data.get("structured_content"),
            cast("Mapping[str, Any] | None", meta),
            [cls.from_dict(each) for each in cast("Sequence[Mapping[str, Any]]", operations)],
            position,
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


def _blocks_of_value(value: object) -> tuple[ContentBlock, ...] | None:
    """The blocks that a value is; `None` if it is data."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (TextContent(text=value),)
    if isinstance(value, _BLOCK_TYPES):
        return (value,)
    # Plain data is data, even if it looks like a block.
    items = cast("Sequence[object]", value if isinstance(value, list | tuple) else ())
    if not any(isinstance(item, _BLOCK_TYPES) for item in items):
        return None
    blocks: list[ContentBlock] = []
    for item in items:
        # Lists in lists are data.
        known = None if formats.kind_of(item) == "a list" else _blocks_of_value(item)
        blocks.extend((TextContent(text=_as_text(item)),) if known is None else known)
    return tuple(blocks)


def _as_json(value: object, indent: int | None = None) -> str:
    try:
        written = to_json(value, fallback=str, indent=indent, inf_nan_mode="null")
    except PydanticSerializationError:  # bytes that are no text, say
        written = to_json(value, fallback=str, indent=indent, inf_nan_mode="null", bytes_mode="base64")
    return written.decode()


def _as_text(value: object) -> str:
    """A value as JSON to be read; what has no form in it as Python shows it."""
    for show in (partial(_as_json, indent=2), repr):
        try:
            return show(value)
        except Exception:  # whatever a user's object does when it is asked
            continue
    return f"[{type(value).__name__}]"


def _as_data(value: object) -> object:
    """A value as JSON has it; `None` if it has no form there."""
    try:
        return json.loads(_as_json(value))
    except Exception:  # as above
        return None
