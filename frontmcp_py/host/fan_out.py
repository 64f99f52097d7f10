"""One call that is several operations: the envelope a model writes, and the one result it is told.

The envelope is `{"ops": [{...}, {...}]}`, each operation being arguments of the tool. The folded result has a
frame of one line per operation, `[i/n] ok`, and under it what the operation said. A line of that which looks
like a frame is marked with a backslash, so that no tool can speak for another operation.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final, cast

from mcp_types import ContentBlock, TextContent

from frontmcp_py.policy import MAX_OPERATIONS

from .calls import Status, ToolCall, ToolResult
from .formats import kind_of

OPS: Final = "ops"

BATCHING: Final = (
    'Several operations go into one call as {"ops": [{...}, {...}]}: each is run with its own arguments, in '
    "the order in which they stand there."
)
"""What the description of a tool that is fanned out says about it."""


class EnvelopeError(ValueError):
    """An envelope cannot be read. Nothing of it runs."""


# ------------------------------------------------------------------------------------------------- reading


def operations_of(call: ToolCall, schema: Mapping[str, Any] | None) -> list[Mapping[str, object]] | None:
    """The operations of a call, or `None` if it is an ordinary one.

    Args:
        call: A call of a tool that is fanned out.
        schema: What the tool's own arguments look like, if that is known. It matters only for a tool that
            has an argument `ops` itself: its call is an envelope if every operation is valid.

    Raises:
        EnvelopeError: There is an `ops` that is not a list of one object or more, or something beside it.
    """
    if OPS not in call.arguments:
        return None
    if schema is not None and OPS in _properties(schema):
        return _operations_of_namesake(call, schema)
    others = [repr(name) for name in call.arguments if name != OPS]
    if others:
        raise EnvelopeError(f"{call.name}: {', '.join(others)} must stand in the operations, not beside ops")
    ops = call.arguments[OPS]
    if not isinstance(ops, list | tuple):
        raise EnvelopeError(f"{call.name}: ops must be a list of operations, not {kind_of(ops)}")
    listed = cast("Sequence[object]", ops)
    if not listed:
        raise EnvelopeError(f"{call.name}: ops is empty; give one operation or more")
    if len(listed) > MAX_OPERATIONS:
        raise EnvelopeError(
            f"{call.name}: ops has {len(listed)} operations; at most {MAX_OPERATIONS} are allowed"
        )
    for index, operation in enumerate(listed):
        if not isinstance(operation, Mapping):
            raise EnvelopeError(
                f"{call.name}: ops[{index}] must be an object with the arguments of one operation, "
                f"not {kind_of(operation)}"
            )
    return cast("list[Mapping[str, object]]", list(listed))


def _operations_of_namesake(call: ToolCall, schema: Mapping[str, Any]) -> list[Mapping[str, object]] | None:
    from jsonschema import Draft202012Validator

    ops = call.arguments[OPS]
    if len(call.arguments) > 1 or not isinstance(ops, list | tuple):
        return None
    listed = cast("Sequence[Mapping[str, Any]]", ops)
    is_valid = cast("Callable[[object], bool]", Draft202012Validator(dict(schema)).is_valid)
    if not 0 < len(listed) <= MAX_OPERATIONS or not all(
        isinstance(each, Mapping) and is_valid(each) for each in listed
    ):
        return None
    return list(listed)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return cast("Mapping[str, Any]", properties) if isinstance(properties, Mapping) else {}


# ------------------------------------------------------------------------------------------------- schema

# What belongs to a document as a whole, not to a part of it.
_OF_THE_DOCUMENT: Final = ("$schema", "$id", "$defs", "definitions", "$vocabulary")


def envelope_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of the envelope for a tool with this schema, to be advertised instead of it.

    Definitions move to the root, where references to them go on pointing; references to other places of the
    tool's schema are written anew.
    """
    item = cast("dict[str, Any]", _repointed(deepcopy(dict(schema))))
    root: dict[str, Any] = {name: item.pop(name) for name in _OF_THE_DOCUMENT if name in item}
    ops = {
        "type": "array",
        "description": "The operations, in the order in which they are to start.",
        "minItems": 1,
        "maxItems": MAX_OPERATIONS,
        "items": item,
    }
    return {
        **root,
        "type": "object",
        "properties": {OPS: ops},
        "required": [OPS],
        "additionalProperties": False,
    }


def _repointed(part: object) -> object:
    if isinstance(part, dict):
        table = cast("dict[str, object]", part)
        return {
            name: _pointer(value) if name in ("$ref", "$dynamicRef") else _repointed(value)
            for name, value in table.items()
        }
    if isinstance(part, list):
        return [_repointed(each) for each in cast("list[object]", part)]
    return part


def _pointer(reference: object) -> object:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return reference
    first = reference[2:].partition("/")[0]
    return reference if first in _OF_THE_DOCUMENT else f"#/properties/{OPS}/items{reference[1:]}"


# ------------------------------------------------------------------------------------------------- folding


def fold(call: ToolCall, results: Sequence[ToolResult]) -> ToolResult:
    """One result out of those of all operations: as it is if there is only one, else in frames.

    It is an error only if no operation succeeded.
    """
    if len(results) == 1:
        only = results[0]
        return ToolResult(call.id, call.name, only.status, only.content, only.structured_content, only.meta)
    content: list[ContentBlock] = []
    lines: list[str] = []
    for number, result in enumerate(results, 1):
        lines.append(f"[{number}/{len(results)}] {_headline(result)}")
        texts: list[str] = []
        for block in () if result.status == "not_run" else result.content:
            if isinstance(block, TextContent):
                texts.append(block.text)
                continue
            content.extend(_text([*lines, *_unframed(texts)]))
            content.append(block)
            lines, texts = [], []
        lines += _unframed(texts)
    content.extend(_text(lines))
    return ToolResult(call.id, call.name, _status(results), content, operations=results)


def stopped_after(index: int) -> str:
    """What an operation is told that does not run since the one at `index` failed."""
    return f"not run (stopped after operation {index + 1} failed)"


def _headline(result: ToolResult) -> str:
    if result.status == "not_run":
        # The words are this package's, or those of a transcript: one line of them.
        return next(iter(result.text.splitlines()), "") or "not run"
    return result.status


def _status(results: Sequence[ToolResult]) -> Status:
    statuses = {result.status for result in results}
    if "ok" in statuses:
        return "ok"
    return results[0].status if len(statuses) == 1 else "error"


def _text(lines: Sequence[str]) -> Iterator[TextContent]:
    if lines:
        yield TextContent(text="\n".join(lines))


# What a reader takes for a frame, in whatever script its marks and digits are written.
_FRAME: Final = re.compile(r"\\*\[\d+[/\u2044\u2215]\d+\]")
# What draws nothing: marks of formatting, controls, combining characters.
_INVISIBLE: Final = ("Cf", "Cc", "Mn", "Me")


def _unframed(texts: Sequence[str]) -> list[str]:
    """Texts whose lines that look like a frame are marked."""
    lines = "\n".join(texts).splitlines(keepends=True)
    text = "".join(f"\\{line}" if _looks_like_a_frame(line) else line for line in lines)
    return [text.removesuffix("\n")] if texts else []


def _looks_like_a_frame(line: str) -> bool:
    if "[" not in line and line.isascii():
        return False
    plain = unicodedata.normalize("NFKC", line)
    return _FRAME.match("".join(mark for mark in plain if not _is_invisible(mark))) is not None


def _is_invisible(mark: str) -> bool:
    return mark.isspace() or unicodedata.category(mark) in _INVISIBLE
