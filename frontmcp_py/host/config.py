"""What a host is told about its tools: which are enabled, how many at once, and what a fan-out does.

Limits are laid down for the resource that they protect: tools that name one key share one limit. Everything
is checked when the configuration is read, also for tools that are not enabled, so that enabling one never
turns a valid configuration into an invalid one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias, cast

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.policy import (
    MAX_CONCURRENT_RANGE,
    check_choice,
    check_count,
    check_flag,
    check_text,
    did_you_mean,
    naming,
    nearest,
    not_allowed,
)
from frontmcp_py.tables import as_table, check_names, parse_toml

Layer: TypeAlias = str | os.PathLike[str] | Mapping[str, object]
"""One source of a configuration: TOML text (with a line break or an `=`), the path of a TOML file, or what
such a file holds as a mapping."""

HostConfigOption: TypeAlias = "HostConfig | Layer | Sequence[Layer] | None"
"""What the option `config` takes: one layer or several, of which later ones override earlier ones per key."""

EVERY_TOOL: Final = "*"
"""The table whose `enabled` holds for tools that do not say it themselves."""

_LAYER: Final = "TOML text, the path of a TOML file, or a mapping"
_FIELDS: Final = ("enabled", "concurrency", "fan_out")
_ON_ERROR: Final = ("continue", "stop")
_CONCURRENCY: Final = (
    f"an integer from {MAX_CONCURRENT_RANGE[0]} (no limit) to {MAX_CONCURRENT_RANGE[1]}, or a table "
    '{ key = "...", limit = ... }'
)


@dataclass(frozen=True, slots=True)
class ToolConfig:
    """What holds for one tool of a host.

    Attributes:
        enabled: Whether calls of it may run.
        key: Which limit its executions count against; `None`: they are unbounded.
        limit: How many executions of all tools with that key run at once; 0: as many as come.
        fan_out: Whether a call may be several operations: `{"ops": [{...}, ...]}`.
        stops: Whether no further operation of a call starts after one has failed.
    """

    enabled: bool = True
    key: str | None = None
    limit: int = 0
    fan_out: bool = False
    stops: bool = False


@dataclass(frozen=True, slots=True)
class HostConfig:
    """What holds for the tools of a host. Made by `HostConfig.of`.

    Attributes:
        tools: The tools that were named, by the name that a model calls them by.
        enabled: Whether tools that say nothing about it may run.
    """

    tools: Mapping[str, ToolConfig] = field(default_factory=lambda: MappingProxyType({}))
    enabled: bool = True

    @classmethod
    def of(cls, config: HostConfigOption) -> HostConfig:
        """Read a configuration.

        Args:
            config: One layer or several; `None` names no tool.

        Raises:
            ConfigurationError: A field does not exist or has a value that is not allowed, tools give one key
                different limits, `on_error = "stop"` has nothing to stop, or a file cannot be read. The
                message names what is wrong, and what is allowed.
        """
        if isinstance(config, HostConfig):
            return config
        merged: dict[str, dict[str, object]] = {}
        for layer in _layers(config):
            for name, fields in layer.items():
                _merge(merged.setdefault(name, {}), fields)
        everywhere = bool(merged.pop(EVERY_TOOL, {}).get("enabled", True))
        tools: dict[str, ToolConfig] = {}
        for name, fields in merged.items():
            with naming(f"tool {name!r}"):
                tools[name] = _resolve(name, fields, everywhere)
        _check_agreement(tools)
        return cls(MappingProxyType(tools), everywhere)

    def tool(self, name: str) -> ToolConfig:
        """What holds for the tool of this name, whether it was named or not."""
        return self.tools.get(name) or ToolConfig(self.enabled)

    def strangers(self, names: Sequence[str]) -> dict[str, str]:
        """The configured tools that do not exist, each with a sentence that says so.

        The limit of a name that is misspelt protects nothing.

        Args:
            names: All tools that there are.
        """
        said: dict[str, str] = {}
        for name in self.tools:
            if name not in names:
                hint = did_you_mean(name, names)
                sentence = f"the configuration names a tool {name!r}, and there is none"
                said[name] = f"{sentence}; {hint}" if hint else sentence
        return said


# ----------------------------------------------------------------------------------------------- one layer


def _layers(config: Layer | Sequence[Layer] | None) -> Iterable[dict[str, dict[str, object]]]:
    """What each layer says of each tool, the lowest first."""
    if config is None:
        return
    if isinstance(config, str | os.PathLike | Mapping):
        yield _read(config)
    elif isinstance(config, Sequence) and not isinstance(config, bytes | bytearray | memoryview):
        for index, layer in enumerate(config):
            with naming(f"config[{index}]"):
                yield _read(layer)
    else:
        raise not_allowed("config", config, f"{_LAYER}, or a list of these")


def _read(layer: Layer) -> dict[str, dict[str, object]]:
    """What a layer says of each tool, with every value checked by itself."""
    if isinstance(layer, Mapping):
        return _tables(layer)
    if isinstance(layer, str) and (not layer.strip() or "\n" in layer or "=" in layer):
        return _tables(parse_toml(layer, "the text"))
    if not isinstance(layer, str | os.PathLike):
        raise not_allowed("a layer", layer, _LAYER)
    path = Path(os.fsdecode(layer))
    try:
        # Some editors put a byte order mark in front, which is not part of the text.
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        hint = "; TOML text has a line break or an =" if isinstance(layer, str) else ""
        raise ConfigurationError(f"{path}: cannot be read: {why}{hint}") from None
    document = parse_toml(text, str(path))
    with naming(str(path)):
        return _tables(document)


def _tables(document: Mapping[str, object]) -> dict[str, dict[str, object]]:
    tools: dict[str, dict[str, object]] = {}
    for name, table in _tools(document).items():
        check_text(name, "the name of a tool")
        with naming(f"tool {name!r}"):
            tools[name] = _checked(name, as_table(table, "a tool"))
    return tools


def _tools(document: Mapping[str, object]) -> Mapping[str, object]:
    """The tables of the tools: under `conversation.tools` or at the top."""
    given = document.get("conversation")
    if not isinstance(given, Mapping):
        return document
    conversation = cast("Mapping[str, object]", given)
    if "tools" not in conversation:
        # A tool may have that name, too.
        with naming("conversation"):
            check_names(conversation, ("tools", *_FIELDS))
        return document
    if len(document) > 1:
        others = ", ".join(repr(name) for name in document if name != "conversation")
        raise ConfigurationError(
            f"{others}: tables of tools stand either under conversation.tools or at the top, not in both"
        )
    with naming("conversation"):
        check_names(conversation, ("tools",))
    return as_table(conversation["tools"], "conversation.tools")


def _checked(name: str, table: Mapping[str, object]) -> dict[str, object]:
    """The fields of one table, each in one form: `concurrency` a limit or a table, `fan_out` a table."""
    for given, value in table.items():
        if given not in _FIELDS and isinstance(value, Mapping) and not did_you_mean(str(given), _FIELDS):
            raise ConfigurationError(
                f"there is no field {given!r}; {nearest(str(given), _FIELDS)}. Tables of tools stand under "
                "conversation.tools or at the top, not within another; a name with a dot needs quotes: "
                f"[{json.dumps(f'{name}.{given}')}]"
            )
    check_names(table, _FIELDS)
    fields: dict[str, object] = {}
    if "enabled" in table:
        fields["enabled"] = check_flag(table["enabled"], "enabled")
    if name == EVERY_TOOL:
        for own in ("concurrency", "fan_out"):
            if own in table:
                raise ConfigurationError(
                    f"{own} is not allowed for all tools at once; give it to each tool that needs it, since "
                    "it depends on what a tool does"
                )
    if "concurrency" in table:
        fields["concurrency"] = _concurrency(table["concurrency"])
    if "fan_out" in table:
        fields["fan_out"] = _fan_out(table["fan_out"])
    return fields


def _concurrency(value: object) -> int | dict[str, object]:
    if not isinstance(value, Mapping):
        if isinstance(value, bool) or not isinstance(value, int):
            raise not_allowed("concurrency", value, _CONCURRENCY)
        return check_count(value, "concurrency", *MAX_CONCURRENT_RANGE)
    table = cast("Mapping[str, object]", value)
    with naming("concurrency"):
        check_names(table, ("key", "limit"))
    fields: dict[str, object] = {}
    if "key" in table:
        fields["key"] = check_text(table["key"], "concurrency.key")
    if "limit" in table:
        fields["limit"] = check_count(table["limit"], "concurrency.limit", *MAX_CONCURRENT_RANGE)
    return fields


def _fan_out(value: object) -> dict[str, object]:
    if isinstance(value, bool):
        return {"enabled": value}
    if not isinstance(value, Mapping):
        raise not_allowed("fan_out", value, 'true, false, or a table { enabled = ..., on_error = "stop" }')
    table = cast("Mapping[str, object]", value)
    if "concurrency" in table:
        raise ConfigurationError(
            "fan_out.concurrency is not allowed; give the tool a concurrency of its own, which counts "
            "separate calls and operations alike"
        )
    with naming("fan_out"):
        check_names(table, ("enabled", "on_error"))
    fields: dict[str, object] = {}
    if "enabled" in table:
        fields["enabled"] = check_flag(table["enabled"], "fan_out.enabled")
    if "on_error" in table:
        fields["on_error"] = check_choice(table["on_error"], "fan_out.on_error", _ON_ERROR)
    return fields


# ------------------------------------------------------------------------------------ all layers together


def _merge(below: dict[str, object], above: Mapping[str, object]) -> None:
    """Lay one table over another: tables key by key, everything else as a whole."""
    for name, value in above.items():
        there = below.get(name)
        if isinstance(there, dict) and isinstance(value, dict):
            cast("dict[str, object]", there).update(cast("dict[str, object]", value))
        else:
            below[name] = value


def _resolve(name: str, fields: Mapping[str, object], everywhere: bool) -> ToolConfig:
    concurrency = fields.get("concurrency", 0)
    if isinstance(concurrency, dict):
        table = cast("dict[str, object]", concurrency)
        if "key" not in table:
            raise ConfigurationError(f"concurrency: {table!r} has no key; give {_CONCURRENCY}")
        key: str | None = str(table["key"])
        limit = cast("int", table.get("limit", 1))
    else:
        limit = cast("int", concurrency)
        key = name if limit else None
    fan_out = cast("dict[str, object]", fields.get("fan_out", {}))
    stops = fan_out.get("on_error") == "stop"
    if stops and not limit:
        raise ConfigurationError(
            'fan_out.on_error = "stop" is not allowed without a limit, as every operation starts at once and '
            'there is nothing to stop; give concurrency = 1 or more, or on_error = "continue"'
        )
    return ToolConfig(
        enabled=bool(fields.get("enabled", everywhere)),
        key=key,
        limit=limit,
        fan_out="fan_out" in fields and bool(fan_out.get("enabled", True)),
        stops=stops,
    )


def _check_agreement(tools: Mapping[str, ToolConfig]) -> None:
    """One limit per key."""
    keys: dict[str, dict[int, list[str]]] = {}
    for name, tool in tools.items():
        if tool.key is not None:
            keys.setdefault(tool.key, {}).setdefault(tool.limit, []).append(name)
    for key, limits in keys.items():
        if len(limits) > 1:
            said = "; ".join(
                f"{limit} by {', '.join(repr(name) for name in names)}" for limit, names in limits.items()
            )
            raise ConfigurationError(
                f"the concurrency key {key!r} is given different limits: {said}. Give all of them the same, "
                "whether they are enabled or not"
            )
