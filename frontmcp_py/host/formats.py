"""How models' providers write calls and results: Anthropic's messages, OpenAI's chat and responses.

Messages may be plain data or objects of the providers' packages, none of which is imported. What a model
wrote wrongly inside one call is that call's problem and not an error: the others run, and it is answered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
# What a document is called whose name is not known.
_UNNAMED: Final = "document.pdf"
_DATA_URL: Final = re.compile(r"data:([^;,]+);base64,(.*)", re.DOTALL)


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
    words: list[str] = [block.type]
    if isinstance(block, ImageContent | AudioContent):
        words.append(block.mime_type)
    elif isinstance(block, ResourceLink):
        words = ["resource", block.uri]
    elif isinstance(block, EmbeddedResource):
        words += [block.resource.uri, block.resource.mime_type or ""]
    # A tool chose these words, and they might have line breaks.
    return f"[{' '.join(' '.join(words).split())}]"


def text_of(block: ContentBlock) -> str:
    """A block as text: its text, or what it is in brackets."""
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
        return block.resource.text
    return described(block)


# --------------------------------------------------------------------------------------------------- reading


def calls_of_anthropic(message: object) -> Iterator[ReadCall]:
    """The `tool_use` blocks of a message, in order. What the provider runs itself is no call to be run."""
    _check_whose(message, _is_openais, "ToolCall.from_openai")
    for block in _content_of(message):
        if _get(block, "type") == "tool_use":
            yield _call(_get(block, "id"), _get(block, "name"), _get(block, "input"))


def calls_of_openai(message: object) -> Iterator[ReadCall]:
    """The `tool_calls` of a chat message, or the `function_call` items of a response, in order."""
    _check_whose(message, _is_anthropics, "ToolCall.from_anthropic")
    if _get(message, "function_call") is not None:
        raise not_allowed("the message", message, "one with tool_calls; function_call is of an older API")
    items, are_calls = _openai_items(message)
    for item in items:
        kind, function = _get(item, "type"), _get(item, "function")
        if kind == "function_call":
            yield _call(_get(item, "call_id"), _get(item, "name"), _json(_get(item, "arguments")))
        elif kind == "custom":
            named = _get(_get(item, "custom"), "name")
            yield _call(_get(item, "id"), named, _Broken("custom tools take text, which no MCP tool does"))
        elif are_calls or function is not None or kind in ("function", None):
            # In a list of calls every item is one, be it ever so broken.
            yield _call(_get(item, "id"), _get(function, "name"), _json(_get(function, "arguments")))


def results_of_anthropic(message: object) -> Iterator[ReadResult]:
    """The `tool_result` blocks of a message, in order."""
    for block in _content_of(message):
        if _get(block, "type") == "tool_result":
            failed = bool(_get(block, "is_error"))
            content = [_anthropic_block(part) for part in _parts(_get(block, "content"))]
            yield _id(block, "tool_use_id"), "", "error" if failed else "ok", content


def results_of_openai(messages: object) -> Iterator[ReadResult]:
    """The `tool` messages and `function_call_output` items of a list, in order."""
    for message in cast("Sequence[object]", messages) if _is_list(messages) else (messages,):
        if _get(message, "role") == "tool":
            content = [_openai_block(part) for part in _parts(_get(message, "content"))]
            yield _id(message, "tool_call_id"), "", "ok", content
        elif _get(message, "type") == "function_call_output":
            content = [_openai_block(part) for part in _parts(_get(message, "output"))]
            yield _id(message, "call_id"), "", "ok", content
        elif _get(message, "role") is None and _get(message, "type") is None:
            raise not_allowed("a message", message, "a message of OpenAI's Chat Completions or Responses API")


def _check_whose(message: object, is_the_others: Callable[[object], bool], reader: str) -> None:
    """Refuse a message of another provider: it would look like one without calls."""
    if is_the_others(message):
        raise not_allowed("the message", message, f"one of the other API, or read this one with {reader}")


def _is_anthropics(message: object) -> bool:
    content = message if _is_list(message) else _get(message, "content")
    return _is_list(content) and any(
        _get(block, "type") in ("tool_use", "tool_result") for block in cast("Sequence[object]", content)
    )


def _is_openais(message: object) -> bool:
    if _is_list(message):
        items = cast("Sequence[object]", message)
        return any(_get(item, "type") in ("function", "function_call", "custom") for item in items)
    return any(_get(message, name) for name in ("tool_calls", "function_call", "output"))


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
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return _Broken(f"the arguments are not JSON: {error}")


def _no_constant(name: str) -> object:
    # Python's reader takes `NaN` and `Infinity`, which no server does.
    raise ValueError(f"{name} is no number of JSON")


def _content_of(message: object) -> Sequence[object]:
    content = message if _is_list(message) else _get(message, "content")
    if isinstance(content, str) and not isinstance(message, str):
        return ()
    if not _is_list(content):
        raise not_allowed("the message", message, "a message of Anthropic's with a list of content blocks")
    return _no_messages(content)


def _no_messages(items: object, *but: str) -> Sequence[object]:
    """The items of a list, unless there are whole messages among them, whose calls would be lost."""
    listed = cast("Sequence[object]", items)
    if any(_get(item, "role") is not None and _get(item, "type") not in but for item in listed):
        raise not_allowed("the message", listed, "one message, not a list of them")
    return listed


def _openai_items(message: object) -> tuple[Sequence[object], bool]:
    """The items, and whether every one of them is a call."""
    if _is_list(message):
        # Among the items of a response the words of the model are one, too.
        return _no_messages(message, "message"), False
    for name in ("tool_calls", "output"):
        items = _get(message, name)
        if _is_list(items):
            return cast("Sequence[object]", items), name == "tool_calls"
    if _get(message, "role") is None:
        raise not_allowed(
            "the message", message, "a message with tool_calls, or a response with output, of OpenAI's"
        )
    return (), True


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _get(item: object, name: str) -> object:
    """A field of plain data or of an object."""
    if isinstance(item, Mapping):
        return cast("Mapping[str, object]", item).get(name)
    return getattr(item, name, None)


def _id(item: object, name: str) -> str:
    value = _get(item, name)
    if not isinstance(value, str):
        raise not_allowed(f"{name} of a result", value, "text")
    return value


def _parts(content: object) -> Sequence[object]:
    """The parts that the content of a result has; text is one part."""
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,)
    if not _is_list(content):
        raise not_allowed("the content of a result", content, "text or a list of content blocks")
    return cast("Sequence[object]", content)


def _anthropic_block(part: object) -> ContentBlock:
    if isinstance(part, str):
        return TextContent(text=part)
    kind, source = _get(part, "type"), _get(part, "source")
    text, data, media_type = _get(part, "text"), _get(source, "data"), _get(source, "media_type")
    if isinstance(text, str):
        return TextContent(text=text)
    if isinstance(data, str):
        if _get(source, "type") == "text":
            return TextContent(text=data)
        if kind == "image" and isinstance(media_type, str):
            return ImageContent(data=data, mime_type=media_type)
        if kind == "document" and media_type == _PDF:
            return EmbeddedResource(resource=BlobResourceContents(uri=_UNNAMED, mime_type=_PDF, blob=data))
    return _remark(kind, _get(source, "url") or _get(source, "file_id") or _get(part, "source"))


def _openai_block(part: object) -> ContentBlock:
    text = part if isinstance(part, str) else _get(part, "text")
    if isinstance(text, str):
        return TextContent(text=text)
    url, file = _get(part, "image_url"), _get(part, "file_data")
    if isinstance(url, str) and (image := _DATA_URL.fullmatch(url)) is not None:
        return ImageContent(data=image[2], mime_type=image[1])
    if isinstance(file, str) and (data := _DATA_URL.fullmatch(file)) is not None:
        name = _get(part, "filename")
        uri = name if isinstance(name, str) else _UNNAMED
        return EmbeddedResource(resource=BlobResourceContents(uri=uri, mime_type=data[1], blob=data[2]))
    return _remark(_get(part, "type"), url or _get(part, "file_url") or _get(part, "file_id"))


def _remark(kind: object, where: object) -> TextContent:
    """What a part is that MCP has no block for."""
    words = [str(word) for word in (kind, where) if isinstance(word, str)]
    return TextContent(text=f"[{' '.join(words) or 'content'}]")


# --------------------------------------------------------------------------------------------------- writing


def anthropic_block(result: ToolResult) -> dict[str, Any]:
    """The `tool_result` block for a result.

    The API refuses text without a visible character, and errors that are empty or have anything but text.
    """
    parts = [_anthropic_part(each, only_text=result.is_error) for each in result.content]
    parts = [part for part in parts if part["type"] != "text" or part["text"].strip()]
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": result.id}
    if result.is_error:
        parts = parts or [{"type": "text", "text": _nothing_said(result)}]
        block["is_error"] = True
    if parts:
        block["content"] = parts
    return block


def openai_message(result: ToolResult) -> dict[str, Any]:
    """The `tool` message for a result, whose content is text in this API."""
    return {"role": "tool", "tool_call_id": result.id, "content": _openai_text(result)}


def openai_output(result: ToolResult) -> dict[str, Any]:
    """The `function_call_output` item for a result: text, or parts if it has images or documents."""
    output: str | list[dict[str, Any]] = _openai_text(result)
    parts = [_openai_part(each) for each in result.content]
    if any(part["type"] != "input_text" for part in parts):
        lead = [{"type": "input_text", "text": "Error:"}] if result.is_error else []
        output = [*lead, *(part for part in parts if part.get("text") != "")]
    return {"type": "function_call_output", "call_id": result.id, "output": output}


def _openai_text(result: ToolResult) -> str:
    text = _whole(result.text)
    if not result.is_error:
        return text
    # Nothing else in these messages says that a call failed. Frames of operations begin a line.
    return f"Error:{chr(10) if result.operations else ' '}{text if text.strip() else _nothing_said(result)}"


def _nothing_said(result: ToolResult) -> str:
    return f"{result.name or 'The call'}: {result.status.replace('_', ' ')}, without a word of why"


def _anthropic_part(block: ContentBlock, *, only_text: bool) -> dict[str, Any]:
    if isinstance(block, ImageContent) and block.mime_type in _IMAGES and not only_text:
        source = {"type": "base64", "media_type": block.mime_type, "data": block.data}
        return {"type": "image", "source": source}
    if isinstance(block, EmbeddedResource) and not only_text:
        resource = block.resource
        if isinstance(resource, BlobResourceContents) and resource.mime_type in (_PDF, *_IMAGES):
            kind = "document" if resource.mime_type == _PDF else "image"
            source = {"type": "base64", "media_type": resource.mime_type, "data": resource.blob}
            return {"type": kind, "source": source}
    return {"type": "text", "text": _text(block)}


def _openai_part(block: ContentBlock) -> dict[str, Any]:
    if isinstance(block, ImageContent) and block.mime_type in _IMAGES:
        return _openai_image(block.mime_type, block.data)
    if isinstance(block, EmbeddedResource) and isinstance(block.resource, BlobResourceContents):
        kind, data = block.resource.mime_type, block.resource.blob
        if kind in _IMAGES:
            return _openai_image(kind, data)
        if kind == _PDF:
            name = block.resource.uri.rpartition("/")[2] or _UNNAMED
            return {"type": "input_file", "filename": name, "file_data": f"data:{_PDF};base64,{data}"}
    return {"type": "input_text", "text": _text(block)}


def _openai_image(kind: str, data: str) -> dict[str, Any]:
    return {"type": "input_image", "detail": "auto", "image_url": f"data:{kind};base64,{data}"}


def _text(block: ContentBlock) -> str:
    return _whole(text_of(block))


def _whole(text: str) -> str:
    """A text that can be sent: JSON can write half a character, which UTF-8 cannot."""
    return text.encode(errors="replace").decode()
