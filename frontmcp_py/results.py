"""What the client gets: refusals, failures and results that are too large, as ordinary tool results."""

from __future__ import annotations

import json
import logging
from typing import Any, Final, cast

from mcp.server.context import HandlerResult
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp_types import CallToolResult, TextContent

from frontmcp_py.errors import GuardError, InternalError, OutputLimit

logger: logging.Logger = logging.getLogger("frontmcp_py.server")

# In JSON a character takes six bytes at most (as `\u0000`).
_BYTES_PER_CHARACTER: Final = 6
# More than everything around one text takes: field names, `isError`, the brackets.
_FRAME_BYTES: Final = 512
_NOTE: Final = "\n… (shortened: the whole result is in the structured content)"


def refusal(error: GuardError) -> CallToolResult:
    """What the guard says, as the result of the call: a message for the model, a code for programs."""
    return CallToolResult(content=[_text(error.message)], is_error=True, _meta=error.meta())


def failure(tool: str, error: BaseException, *, production: bool) -> CallToolResult:
    """A tool has failed unforeseen. The log has the traceback, under the id that the client sees."""
    error_id = InternalError(tool).error_id
    logger.error('[%s] tool "%s" failed', error_id, tool, exc_info=error)
    if production:
        said = f"Error executing tool {tool}. Error id: {error_id}"
    else:
        said = f"Error executing tool {tool}: {type(error).__name__}: {error}"
    return CallToolResult(content=[_text(said)], is_error=True, _meta={"errorId": error_id})


def of_exception(tool: str, error: Exception, *, production: bool) -> CallToolResult:
    """The result of a call that ended with an exception: a refusal, a deliberate failure or another one."""
    cause = error.__cause__ if isinstance(error, ToolError) else error
    if isinstance(cause, GuardError):
        return refusal(cause)
    if isinstance(error, ToolError) and not isinstance(error, UnexpectedToolError):
        logger.info("tool %r failed: %r", tool, str(error))
        return CallToolResult(content=[_text(str(error))], is_error=True)
    return failure(tool, cause or error, production=production)


def within(result: HandlerResult, tool: str, max_bytes: int) -> HandlerResult:
    """`result`, if it is not larger than `max_bytes` when it is serialised.

    The text that repeats the structured content is shortened when it alone is what makes the result too
    large.

    Raises:
        OutputLimit: It is larger.
    """
    if (
        not isinstance(result, CallToolResult)
        or _is_surely_small(result, max_bytes)
        or _size(result) <= max_bytes
    ):
        return result
    shortened = _shortened(result, max_bytes)
    if shortened is None:
        raise OutputLimit(tool, max_bytes)
    return shortened


def _is_surely_small(result: CallToolResult, max_bytes: int) -> bool:
    """Whether a glance is enough: serialising every result to measure it would cost more than the guard."""
    content = result.content
    structured = result.structured_content
    if len(content) != 1 or result.meta is not None:
        return False
    block = content[0]
    if not isinstance(block, TextContent) or block.meta is not None:
        return False
    characters = len(block.text)
    if structured is not None:
        # Only what the SDK makes of a plain return value: `{"result": value}`, the value being the text.
        value = structured.get("result") if len(structured) == 1 else None
        if isinstance(value, str):
            characters += len(value)
        elif not isinstance(value, (int, float)):
            return False
    return characters * _BYTES_PER_CHARACTER + _FRAME_BYTES <= max_bytes


def _size(result: CallToolResult) -> int:
    return len(result.model_dump_json(by_alias=True, exclude_none=True).encode())


def _shortened(result: CallToolResult, max_bytes: int) -> CallToolResult | None:
    blocks = [block for block in result.content if isinstance(block, TextContent)]
    structured = result.structured_content
    if not blocks or len(blocks) != len(result.content) or structured is None:
        return None
    texts = [block.text for block in blocks]
    if not _repeat(texts, structured):
        return None
    without = result.model_copy(update={"content": [blocks[0].model_copy(update={"text": _NOTE})]})
    room = max_bytes - _size(without)
    if room < 0:
        return None
    text = "\n".join(texts)[:room]
    # Characters of several bytes, or escaped ones: take less until it fits.
    while len(json.dumps(text, ensure_ascii=False).encode()) - 2 > room:
        text = text[: len(text) // 2]
    return result.model_copy(update={"content": [blocks[0].model_copy(update={"text": text + _NOTE})]})


def _repeat(texts: list[str], structured: dict[str, Any]) -> bool:
    """Whether the texts only say again what the structured content says."""
    # The SDK wraps what is no object as `{"result": value}`, and makes one text of each item of a list.
    value = structured["result"] if list(structured) == ["result"] else structured
    if len(texts) == 1 and (_says(texts[0], value) or _says(texts[0], structured)):
        return True
    items = _items(value)
    return len(items) == len(texts) and all(map(_says, texts, items))


def _says(text: str, value: object) -> bool:
    if text == value:
        return True
    try:
        return bool(json.loads(text) == value)
    except ValueError:
        return False


def _items(value: object) -> list[object]:
    if not isinstance(value, list):
        return [value]
    return [item for each in cast("list[object]", value) for item in _items(each)]


def _text(text: str) -> TextContent:
    return TextContent(type="text", text=text)
