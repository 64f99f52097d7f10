"""One call that is several operations: the envelope a model writes, and the one result it is told.

The envelope is `{"ops": [{...}, {...}]}`, each operation being arguments of the tool. The folded result has a
frame of one line per operation, `[i/n] ok`, and under it what the operation said. A line of that which looks
like a frame is marked with a backslash, so that no tool can speak for another operation.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final, cast
from urllib.parse import unquote, urldefrag, urljoin

from mcp_types import ContentBlock, EmbeddedResource, TextContent, TextResourceContents

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
    ops = call.arguments[OPS]
    if len(call.arguments) > 1 or not isinstance(ops, list | tuple):
        return None
    listed = cast("Sequence[Mapping[str, Any]]", ops)
    if not 0 < len(listed) <= MAX_OPERATIONS or not all(isinstance(each, Mapping) for each in listed):
        return None
    try:
        is_valid = _validity(schema)
        return list(listed) if all(is_valid(each) for each in listed) else None
    except Exception:
        # Servers write schemas that no validator can use. Then it is the call as the model wrote it.
        return None


def _validity(schema: Mapping[str, Any]) -> Callable[[object], bool]:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from referencing.jsonschema import EMPTY_REGISTRY

    # With a registry of its own nothing is fetched, whatever a server's schema refers to.
    validator = validator_for(schema, default=Draft202012Validator)(dict(schema), registry=EMPTY_REGISTRY)
    return cast("Callable[[object], bool]", validator.is_valid)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return cast("Mapping[str, Any]", properties) if isinstance(properties, Mapping) else {}


# ------------------------------------------------------------------------------------------------- schema

# What belongs to a document as a whole, not to a part of it.
_OF_THE_DOCUMENT: Final = ("$schema", "$id", "$defs", "definitions", "$vocabulary")
# Keywords under which names that somebody chose lead to schemas; what is called "$ref" there is a name.
_OF_NAMES: Final = (
    "$defs",
    "definitions",
    "dependencies",
    "dependentSchemas",
    "patternProperties",
    "properties",
)
# Keywords under which data stands.
_OF_DATA: Final = ("const", "default", "enum", "example", "examples")


def envelope_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of the envelope for a tool with this schema, to be advertised instead of it.

    Definitions move to the root, where references to them go on pointing; references to other places of the
    tool's schema are written anew.
    """
    document = deepcopy(dict(schema))
    item = cast("dict[str, Any]", _Moved(document).schema(document))
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


class _Moved:
    """A schema as it reads when it stands under `#/properties/ops/items`.

    Args:
        document: The schema as it was.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._root = _based("", document)

    def schema(self, part: object, base: str = "") -> object:
        """A schema, or a list of some, whose references are relative to `base`."""
        if isinstance(part, list):
            return [self.schema(each, base) for each in cast("list[object]", part)]
        if not isinstance(part, dict):
            return part
        table = cast("dict[str, object]", part)
        base = _based(base, table)
        moved: dict[str, object] = {}
        for name, value in table.items():
            if name in _OF_NAMES and isinstance(value, dict):
                named = cast("dict[str, object]", value)
                moved[name] = {each: self.schema(below, base) for each, below in named.items()}
            elif name in ("$ref", "$dynamicRef") and isinstance(value, str):
                moved[name] = self._reference(value, base)
            elif name == "$recursiveRef" and base == self._root:
                # It can only say "#", which is the envelope now.
                moved["$ref"] = _ITEM
            else:
                moved[name] = value if name in _OF_DATA else self.schema(value, base)
        return moved

    def _reference(self, reference: str, base: str) -> str:
        target, pointer = urldefrag(_joined(base, reference))
        if target != self._root or (pointer and not pointer.startswith("/")):
            # Another document, or an anchor, which is found wherever it stands.
            return reference
        first = unquote(pointer[1:].partition("/")[0])
        return f"#{pointer}" if first in _OF_THE_DOCUMENT else f"{_ITEM}{pointer}"


_ITEM: Final = f"#/properties/{OPS}/items"


def _based(base: str, schema: Mapping[str, object]) -> str:
    """What references in a schema are relative to."""
    own = schema.get("$id")
    # In older drafts it may be a fragment, which names a place as `$anchor` does now and changes nothing.
    return urldefrag(_joined(base, own)).url if isinstance(own, str) else base


def _joined(base: str, reference: str) -> str:
    # `urljoin` knows only some schemes, and a `urn:` is none of them.
    return f"{base}{reference}" if reference.startswith("#") else urljoin(base, reference)


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
        headline, body = _framed(result)
        lines.append(f"[{number}/{len(results)}] {headline}")
        texts: list[str] = []
        for block in body:
            if isinstance(block, TextContent):
                texts.append(block.text)
                continue
            content.extend(_text([*lines, *_unframed(texts)]))
            content.append(_unframed_block(block))
            lines, texts = [], []
        lines += _unframed(texts)
    content.extend(_text(lines))
    return ToolResult(call.id, call.name, _status(results), content, operations=results)


_NOT_RUN: Final = "not run"


def stopped_after(index: int) -> str:
    """What an operation is told that does not run since the one at `index` failed."""
    return f"{_NOT_RUN} (stopped after operation {index + 1} failed)"


def _framed(result: ToolResult) -> tuple[str, Sequence[ContentBlock]]:
    """What the frame of an operation says, and what stands under it."""
    if result.status != "not_run":
        return result.status, result.content
    lines = result.text.splitlines()
    if len(lines) == 1 and len(result.content) == 1 and lines[0].startswith(_NOT_RUN):
        return lines[0], ()
    return _NOT_RUN, result.content


def _status(results: Sequence[ToolResult]) -> Status:
    statuses = {result.status for result in results}
    if "ok" in statuses:
        return "ok"
    return results[0].status if len(statuses) == 1 else "error"


def _text(lines: Sequence[str]) -> Iterator[TextContent]:
    if lines:
        yield TextContent(text="\n".join(lines))


def _unframed_block(block: ContentBlock) -> ContentBlock:
    """A block that is no text, but may hold one."""
    if not isinstance(block, EmbeddedResource) or not isinstance(block.resource, TextResourceContents):
        return block
    text = _marked(block.resource.text)
    return block.model_copy(update={"resource": block.resource.model_copy(update={"text": text})})


def _unframed(texts: Sequence[str]) -> list[str]:
    """Texts as lines under a frame."""
    return [_marked("\n".join(texts)).removesuffix("\n")] if texts else []


def _marked(text: str) -> str:
    """A text in which every line that looks like a frame begins with a backslash."""
    if not text.isascii() or "[" in text:
        lines = text.splitlines(keepends=True)
        return "".join(f"\\{line}" if _looks_like_a_frame(line) else line for line in lines)
    return text


# What a reader takes for the marks of a frame, in whatever script they are written.
_OPENING: Final = frozenset("[\u2045\u27e6\u27ec\u2772\u298b\u298d\u298f\u3010\u3014\u3016\u3018\u301a")
_SLASH: Final = frozenset("/\u2044\u2215\u2571\u27cb\u29f8")
_CLOSING: Final = frozenset("]\u2046\u27e7\u27ed\u2773\u298c\u298e\u2990\u3011\u3015\u3017\u3019\u301b")
# What draws nothing: marks of formatting, controls, combining characters, halves and holes of Unicode.
_INVISIBLE: Final = ("Cf", "Cc", "Cn", "Cs", "Mn", "Me")
_BLANKS: Final = frozenset("\u115f\u1160\u2800")


def _looks_like_a_frame(line: str) -> bool:
    marks = _visible(line)
    mark = next(marks, "")
    while mark == "\\":
        mark = next(marks, "")
    if mark not in _OPENING:
        return False
    for end in (_SLASH, _CLOSING):
        digits = 0
        while (mark := next(marks, "")).isdecimal():
            digits += 1
        if not digits or mark not in end:
            return False
    return True


def _visible(line: str) -> Iterator[str]:
    """The marks of a line that draw something, each in its plainest form."""
    for written in line:
        for mark in written if written.isascii() else unicodedata.normalize("NFKC", written):
            if not (mark.isspace() or mark in _BLANKS or unicodedata.category(mark) in _INVISIBLE):
                yield mark
