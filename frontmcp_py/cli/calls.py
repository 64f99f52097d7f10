"""Which tools are called, and with what: as it was written, or those that may be called unasked."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from mcp_types import Tool

from frontmcp_py.cli.output import Failure
from frontmcp_py.policy import nearest


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool and its arguments."""

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, text: str, tools: Mapping[str, Tool]) -> ToolCall:
        """Read `TOOL`, `TOOL key=value ...` or `TOOL {"key": "value"}`.

        A value is JSON if it can be, unless the tool wants text.

        Args:
            text: What was written.
            tools: The tools that there are, by name.

        Raises:
            Failure: It is none of these, or there is no such tool.
        """
        name, _, rest = text.strip().partition(" ")
        if name not in tools:
            raise Failure(
                f"the server has no tool {name!r}; {nearest(name, tools) if tools else 'it has none'}"
            )
        rest = rest.strip()
        if rest.startswith("{"):
            return cls(name, _object(text, rest))
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise Failure(f"{text!r}: {error}") from None
        arguments: dict[str, Any] = {}
        for word in words:
            key, equals, value = word.partition("=")
            if not equals or not key:
                raise Failure(f"{text!r}: {word!r} is no argument; give key=value, or one JSON object")
            arguments[key] = _value(value, tools[name].input_schema, key)
        return cls(name, arguments)


def unasked(tools: Mapping[str, Tool], without: Collection[str] = ()) -> list[ToolCall]:
    """The calls that nobody has to ask for: of tools that only read and need no arguments."""
    return [ToolCall(name) for name, tool in tools.items() if name not in without and is_harmless(tool)]


def is_harmless(tool: Tool) -> bool:
    """Whether a tool says that it only reads, and needs no arguments."""
    hints = tool.annotations
    reads = hints is not None and hints.read_only_hint is True and hints.destructive_hint is not True
    return reads and not tool.input_schema.get("required")


def _object(text: str, written: str) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", json.loads(written))
    except ValueError as error:
        raise Failure(f"{text!r}: the arguments are not JSON: {error}") from None


def _value(text: str, schema: Mapping[str, Any], key: str) -> Any:
    wanted = schema.get("properties", {}).get(key, {})
    if _takes_text(wanted):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _takes_text(schema: Mapping[str, Any]) -> bool:
    kinds: Sequence[Mapping[str, Any]] = (schema, *schema.get("anyOf", ()))
    return any(each.get("type") == "string" or "string" in (each.get("type") or ()) for each in kinds)
