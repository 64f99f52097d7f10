"""A batch as a file: a message of a model's provider, or plain calls; and the results of an earlier run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from frontmcp_py.cli.output import Failure
from frontmcp_py.errors import ConfigurationError
from frontmcp_py.host import Batch, ToolCall, ToolResult
from frontmcp_py.policy import naming, not_allowed
from frontmcp_py.tables import check_names

STDIN: Final = "-"
FORMS: Final = (
    'a message of Anthropic\'s, a message or response of OpenAI\'s, or a list of {"id", "name", "arguments"}'
)

_FIELDS: Final = ("id", "name", "arguments")
# What an item of a list has that OpenAI's APIs wrote.
_OPENAI_TYPES: Final = frozenset({"function", "function_call", "custom"})


def read_calls(file: str) -> list[ToolCall]:
    """The calls of a file, in the written order.

    Args:
        file: Its path; `-` is stdin.

    Raises:
        Failure: It cannot be read, or holds no batch; the message has the line if there is one to blame.
    """
    text = _text(file, "--batch")
    place = _place(file)
    data = _json(text, place)
    try:
        with naming(place):
            return _calls(data)
    except _BadCall as error:
        line = _line_of(text, error.index)
        raise Failure(f"{place}, line {line}: {error.why}") from None
    except ConfigurationError as error:
        raise Failure(str(error)) from None


def read_results(file: str, calls: Sequence[ToolCall]) -> Batch:
    """The batch of which a file has results: what `--json` printed, or a list of results.

    Args:
        file: Its path.
        calls: All calls of the batch.

    Raises:
        Failure: It cannot be read, or holds results of other calls.
    """
    place = _place(file)
    data = _json(_text(file, "--results"), place)
    try:
        with naming(place):
            return _resumed(data, calls)
    except ConfigurationError as error:
        raise Failure(str(error)) from None


class _BadCall(Exception):
    """The call at `index` of a list is not as it has to be."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index
        self.why = why


def _place(file: str) -> str:
    return "stdin" if file == STDIN else file


def _text(file: str, option: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Failure(f"{_place(file)}: not UTF-8: {error.reason} at byte {error.start}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Failure(f"{option} {_place(file)}: cannot be read: {why}") from None


def _json(text: str, place: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Failure(f"{place}, line {error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise Failure(f"{place}: not JSON: {error}") from None


# ----------------------------------------------------------------------------------------------------- calls


def _calls(data: object) -> list[ToolCall]:
    given: object = data
    if isinstance(given, list):
        return _of_list(cast("list[object]", given))
    if isinstance(given, Mapping):
        message = cast("Mapping[str, Any]", given)
        if "choices" in message:
            return ToolCall.from_openai(_first_choice(message["choices"]))
        if "tool_calls" in message or "output" in message:
            return ToolCall.from_openai(message)
        if "content" in message:
            return ToolCall.from_anthropic(message)
    raise not_allowed("the batch", data, FORMS)


def _first_choice(choices: object) -> object:
    given: object = choices
    items = cast("list[object]", given) if isinstance(given, list) else []
    first = items[0] if items else None
    message = cast("Mapping[str, object]", first).get("message") if isinstance(first, Mapping) else None
    if message is None:
        raise not_allowed("choices", choices, "a list of choices with a message each")
    return message


def _of_list(items: list[object]) -> list[ToolCall]:
    tables = [cast("Mapping[str, object]", item) for item in items if isinstance(item, Mapping)]
    if any("role" in each for each in tables):
        raise ConfigurationError("this is a list of messages; give the one message whose calls are to run")
    if any("function" in each or each.get("type") in _OPENAI_TYPES for each in tables):
        return ToolCall.from_openai(items)
    if any("type" in each for each in tables):
        return ToolCall.from_anthropic(items)
    return [_plain(index, item) for index, item in enumerate(items)]


def _plain(index: int, item: object) -> ToolCall:
    try:
        if not isinstance(item, Mapping):
            raise not_allowed("a call", item, 'an object {"id", "name", "arguments"}')
        call = cast("Mapping[str, object]", item)
        check_names(call, _FIELDS)
        call_id, name, arguments = (call.get(field) for field in _FIELDS)
        if isinstance(call_id, bool) or not isinstance(call_id, str | int):
            raise not_allowed("id", call_id, "text or an integer")
        if not isinstance(name, str) or not name:
            raise not_allowed("name", name, "the name of a tool")
        if arguments is not None and not isinstance(arguments, Mapping):
            raise not_allowed("arguments", arguments, "an object")
    except ConfigurationError as error:
        raise _BadCall(index, str(error)) from None
    return ToolCall(str(call_id), name, cast("Mapping[str, object]", arguments or {}))


def _line_of(text: str, index: int) -> int:
    """The line in which an item of a list begins."""
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        while text[at].isspace() or text[at] == ",":
            at += 1
        if not index:
            return text.count("\n", 0, at) + 1
        _, at = decoder.raw_decode(text, at)
        index -= 1


# --------------------------------------------------------------------------------------------------- results


def _resumed(data: object, calls: Sequence[ToolCall]) -> Batch:
    document = cast("Mapping[str, object]", data) if isinstance(data, Mapping) else {"results": data}
    given = document.get("results")
    if not isinstance(given, list):
        raise not_allowed("results", given, "what --json has printed, or a list of results")
    return Batch.resume(calls, [_result(*each) for each in enumerate(cast("list[object]", given))])


def _result(index: int, given: object) -> ToolResult | None:
    if given is None:
        return None
    with naming(f"results[{index}]"):
        return ToolResult.from_dict(cast("Mapping[str, Any]", given))
