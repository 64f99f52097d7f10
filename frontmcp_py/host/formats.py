"""How models' providers write calls and results: Anthropic's messages, OpenAI's chat and responses.

Messages may be plain data or objects of the providers' packages, none of which is imported. What a model
wrote wrongly inside one call is that call's problem and not an error: the others run, and it is answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from frontmcp_py.policy import not_allowed

if TYPE_CHECKING:
    from .calls import ToolResult

ReadCall: TypeAlias = tuple[str, str, Mapping[str, object], str | None]
"""The id, name, arguments and problem of a call."""

ReadResult: TypeAlias = tuple[str, str, "Any", Sequence[ContentBlock]]
"""The id, name, status and content of a result."""

# What Anthropic's API takes as an image in a result.
_IMAGES: Final = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
_PDF: Final = "application/pdf"


def kind_of(value: object) -> str:
    """What JSON calls a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"


def described(block: ContentBlock) -> str:
    """A block that is no text, in one line that says what it is."""
    if isinstance(block, ImageContent):
        return f"[image {block.mime_type}]"
    if isinstance(block, AudioContent):
        return f"[audio {block.mime_type}]"
    if isinstance(block, ResourceLink):
        return f"[resource {block.uri}]"
    if isinstance(block, EmbeddedResource):
        kind = block.resource.mime_type
        return f"[resource {block.resource.uri}{f' {kind}' if kind else ''}]"
    return f"[{block.type}]"


# --------------------------------------------------------------------------------------------------- reading


def calls_of_anthropic(message: object) -> Iterator[ReadCall]:
    """The `tool_use` blocks of a message, in order."""
    for block in _content_of(message, "a message of Anthropic's with a list of content blocks"):
        if _get(block, "type") == "tool_use":
            yield _call(_get(block, "id"), _get(block, "name"), _get(block, "input"))


def calls_of_openai(message: object) -> Iterator[ReadCall]:
    """The `tool_calls` of a chat message, or the `function_call` items of a response, in order."""
    for item in _openai_items(message):
        function = _get(item, "function")
        if function is not None:
            yield _call(_get(item, "id"), _get(function, "name"), _json(_get(function, "arguments")))
        elif _get(item, "type") == "function_call":
            yield _call(_get(item, "call_id"), _get(item, "name"), _json(_get(item, "arguments")))
        elif _get(item, "type") == "custom":
            named = _get(_get(item, "custom"), "name")
            yield _call(_get(item, "id"), named, _Broken("custom tools take text, which no MCP tool does"))


def results_of_anthropic(message: object) -> Iterator[ReadResult]:
    """The `tool_result` blocks of a message, in order."""
    for block in _content_of(message, "a message of Anthropic's with a list of content blocks"):
        if _get(block, "type") == "tool_result":
            failed = bool(_get(block, "is_error"))
            content = _anthropic_content(_get(block, "content"))
            yield str(_get(block, "tool_use_id")), "", "error" if failed else "ok", content


def results_of_openai(messages: object) -> Iterator[ReadResult]:
    """The `tool` messages and `function_call_output` items of a list, in order."""
    for message in cast("Sequence[object]", messages) if _is_list(messages) else (messages,):
        if _get(message, "role") == "tool":
            yield str(_get(message, "tool_call_id")), "", "ok", _openai_content(_get(message, "content"))
        elif _get(message, "type") == "function_call_output":
            yield str(_get(message, "call_id")), "", "ok", _openai_content(_get(message, "output"))
        elif _get(message, "role") is None and _get(message, "type") is None:
            raise not_allowed("a message", message, "a message of OpenAI's Chat Completions or Responses API")


class _Broken:
    """Arguments that cannot be read, and why."""

    def __init__(self, why: str) -> None:
        self.why = why


def _call(call_id: object, name: object, arguments: object) -> ReadCall:
    problem = None
    if not isinstance(name, str) or not name:
        name, problem = str(name or ""), "the call names no tool"
    elif isinstance(arguments, _Broken):
        problem = arguments.why
    elif arguments is not None and not isinstance(arguments, Mapping):
        problem = f"the arguments must be an object, not {kind_of(arguments)}"
    read = cast("Mapping[str, object]", arguments if isinstance(arguments, Mapping) else {})
    return str(call_id if call_id is not None else ""), name, read, problem


def _json(text: object) -> object:
    if not isinstance(text, str):
        return text
    if not text.strip():
        return {}
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return _Broken(f"the arguments are not JSON: {error}")


def _content_of(message: object, allowed: str) -> Sequence[object]:
    content = message if _is_list(message) else _get(message, "content")
    if isinstance(content, str):
        return ()
    if not _is_list(content):
        raise not_allowed("the message", message, allowed)
    return cast("Sequence[object]", content)


def _openai_items(message: object) -> Sequence[object]:
    if _is_list(message):
        return cast("Sequence[object]", message)
    for name in ("tool_calls", "output"):
        items = _get(message, name)
        if _is_list(items):
            return cast("Sequence[object]", items)
    if _get(message, "role") is None:
        raise not_allowed(
            "the message", message, "a message with tool_calls, or a response with output, of OpenAI's"
        )
    return ()


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _get(item: object, name: str) -> object:
    """A field of plain data or of an object."""
    if isinstance(item, Mapping):
        return cast("Mapping[str, object]", item).get(name)
    return getattr(item, name, None)


def _anthropic_content(content: object) -> list[ContentBlock]:
    if content is None:
        return []
    if isinstance(content, str):
        return [TextContent(text=content)]
    blocks: list[ContentBlock] = []
    for block in cast("Iterable[object]", content):
        source = _get(block, "source")
        if _get(block, "type") == "text":
            blocks.append(TextContent(text=str(_get(block, "text"))))
        elif _get(block, "type") == "image" and _get(source, "type") == "base64":
            data, kind = str(_get(source, "data")), str(_get(source, "media_type"))
            blocks.append(ImageContent(data=data, mime_type=kind))
        else:
            blocks.append(TextContent(text=f"[{_get(block, 'type')}]"))
    return blocks


def _openai_content(content: object) -> list[ContentBlock]:
    if content is None:
        return []
    if isinstance(content, str):
        return [TextContent(text=content)]
    return [TextContent(text=str(_get(part, "text") or "")) for part in cast("Iterable[object]", content)]


# --------------------------------------------------------------------------------------------------- writing


def anthropic_block(result: ToolResult) -> dict[str, Any]:
    """The `tool_result` block for a result."""
    block: dict[str, Any] = {
        "type": "tool_result",
        "tool_use_id": result.id,
        "content": [_anthropic_part(each) for each in result.content],
    }
    if result.is_error:
        block["is_error"] = True
    return block


def openai_message(result: ToolResult) -> dict[str, Any]:
    """The `tool` message for a result, whose content is text in this API."""
    return {"role": "tool", "tool_call_id": result.id, "content": _openai_text(result)}


def openai_output(result: ToolResult) -> dict[str, Any]:
    """The `function_call_output` item for a result."""
    return {"type": "function_call_output", "call_id": result.id, "output": _openai_text(result)}


def _openai_text(result: ToolResult) -> str:
    # Nothing else in these messages says that a call failed.
    return f"Error: {result.text}" if result.is_error else result.text


def _anthropic_part(block: ContentBlock) -> dict[str, Any]:
    if isinstance(block, ImageContent) and block.mime_type in _IMAGES:
        source = {"type": "base64", "media_type": block.mime_type, "data": block.data}
        return {"type": "image", "source": source}
    if isinstance(block, EmbeddedResource):
        resource = block.resource
        if isinstance(resource, BlobResourceContents) and resource.mime_type == _PDF:
            source = {"type": "base64", "media_type": _PDF, "data": resource.blob}
            return {"type": "document", "source": source}
        if isinstance(resource, TextResourceContents):
            return {"type": "text", "text": resource.text}
    if isinstance(block, TextContent):
        return {"type": "text", "text": block.text}
    return {"type": "text", "text": described(block)}
