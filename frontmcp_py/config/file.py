"""The operator's file by itself: `[throttle]`, `[concurrency]`, `[tools.NAME]`, before it meets any code."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, cast

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.policy import (
    MAX_CONCURRENT_RANGE,
    ON_CANCEL,
    PRIORITIES,
    UNSET,
    Admission,
    Concurrency,
    OnCancel,
    Policy,
    Priority,
    RateLimit,
    Throttle,
    Timeout,
    Unset,
    check_choice,
    check_count,
    check_flag,
    check_text,
    concurrency_limits,
    naming,
    nearest,
    not_allowed,
    rate_limits,
)
from frontmcp_py.tables import as_table, check_names, parse_toml, quoted

from .frontmcp_json import SECTIONS, TRUSTS, is_bare_throttle, translated

T = TypeVar("T")

logger: logging.Logger = logging.getLogger("frontmcp_py.server")

FILE_NAME: Final = "frontmcp.toml"
"""The file that a command looks for beside the module that it loads."""

ConfigOption: TypeAlias = str | os.PathLike[str] | Mapping[str, object] | None
"""What the option `config` takes: the path of a file (TOML, or JSON if it ends in `.json`), or what such a
file holds as a mapping. `None`: nothing was said."""


@dataclass(frozen=True, slots=True)
class ToolOverride:
    """What a file says about one tool. What it leaves `UNSET` is as the code says."""

    rate_limits: tuple[RateLimit, ...] | Unset = UNSET
    concurrency_limits: tuple[Concurrency, ...] | Unset = UNSET
    deadline: Timeout | Unset | None = UNSET
    priority: Priority | Unset = UNSET
    on_cancel: OnCancel | Unset = UNSET
    describe_limits: bool | Unset = UNSET
    enabled: bool | Unset = UNSET

    def over(self, policy: Policy) -> Policy:
        """A tool's policy under this override: what is said here replaces its kind, whole."""
        return Policy(
            rate_limit=first(self.rate_limits, policy.rate_limits),
            concurrency=first(self.concurrency_limits, policy.concurrency_limits),
            timeout=first(self.deadline, policy.deadline),
            priority=first(self.priority, policy.priority),
            on_cancel=first(self.on_cancel, policy.on_cancel),
        )


_NOTHING: Final = ToolOverride()


def first(said: T | Unset, otherwise: T) -> T:
    """What was said, if anything was."""
    return otherwise if isinstance(said, Unset) else said


class Overrides:
    """What one file says, checked by itself.

    Args:
        document: The file's content: `throttle`, `concurrency` and `tools`; or, as FrontMCP's JSON may be, a
            `throttle` object alone.
        source: The file's name, for messages; empty when there is none.
        is_toml: It must have sections.

    Raises:
        ConfigurationError: A section, field or value is not allowed; file, section and field are named.

    Attributes:
        source: The file's name.
        throttle: The fields of `Throttle` that it gives, checked.
        admission: The fields of `Admission` that it gives; `None` turns admission off.
        keys: The numbers that it gives keys; 0 lifts a key's limit.
        tools: What it says about tools, by name.
        trusts_a_proxy: It is FrontMCP's and has `trustProxy`, which needs networks to trust.
    """

    def __init__(self, document: Mapping[str, object], source: str = "", *, is_toml: bool = False) -> None:
        self.source: str = source
        self.throttle: dict[str, object] = {}
        self.admission: dict[str, object] | None = {}
        self.keys: dict[str, int] = {}
        self.tools: dict[str, ToolOverride] = {}
        self.trusts_a_proxy: bool = False
        if not is_toml and is_bare_throttle(document):
            document = {"throttle": document}
        with naming(source) if source else nullcontext():
            for section, content in document.items():
                if section == "throttle" and content is None:
                    # JSON's null is not "off": nothing was said, and nobody loses all limits by it.
                    continue
                if section == "throttle":
                    self._read_throttle(content)
                elif section == "concurrency":
                    self._read_concurrency(content)
                elif section == "tools":
                    self._read_tools(content)
                else:
                    raise ConfigurationError(
                        f"there is no section {section!r}; {nearest(str(section), SECTIONS)}"
                    )

    @classmethod
    def load(cls, config: ConfigOption = None) -> Overrides:
        """The file of `--config`, else of `FRONTMCP_CONFIG`, else of the code, else the one beside TARGET.

        A file that is not there says nothing; if somebody named it, a warning does.

        Raises:
            ConfigurationError: It cannot be read, or says something that is not allowed.
        """
        loading = _LOADING.get()
        variable = os.environ.get("FRONTMCP_CONFIG", "").strip()
        if loading is not None and loading.named is not None:
            return cls._read(loading.named, "--config")
        if variable:
            return cls._read(variable, "FRONTMCP_CONFIG")
        if isinstance(config, Mapping):
            return cls(config, "config")
        if isinstance(config, str | os.PathLike):
            check_text(os.fspath(config), "FrontMCP.config")
            return cls._read(config, "config")
        if config is not None:
            raise not_allowed("FrontMCP.config", config, "the path of a file, or a mapping of what it holds")
        return cls({}) if loading is None or loading.beside is None else cls._read(loading.beside, None)

    @classmethod
    def _read(cls, path: str | os.PathLike[str], named_by: str | None) -> Overrides:
        path = Path(path)
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except FileNotFoundError:
            if named_by is not None:
                logger.warning("%s names %s, which is not there: limits are as the code says", named_by, path)
            return cls({})
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{path}: the file is not UTF-8 (byte {error.start + 1})") from None
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigurationError(f"{path}: the file cannot be read: {why}") from None
        is_toml = path.suffix.lower() != ".json"
        return cls(_parsed(text, path, is_toml=is_toml), str(path), is_toml=is_toml)

    def in_place(self, section: str) -> str:
        """A section of this file, to stand in front of a message about it."""
        return f"{self.source}: [{section}]" if self.source else f"[{section}]"

    def tool(self, name: str) -> ToolOverride:
        """What it says about a tool."""
        return self.tools.get(name, _NOTHING)

    # -- sections ------------------------------------------------------------------------------

    def _read_throttle(self, content: object) -> None:
        if _lifts(content) or isinstance(content, bool):
            self.throttle["enabled"] = content is True
            return
        table = as_table(content, "[throttle]")
        with naming("[throttle]"):
            given = translated(table)
            self.trusts_a_proxy = bool(given.pop(TRUSTS, False))
            if "admission" in given:
                raise ConfigurationError("there is no field 'admission'; give the section [concurrency]")
            check_names(given, [each.name for each in fields(Throttle) if each.name != "admission"])
            for name, value in given.items():
                said = None if name in _LIFTED and _lifts(value) else _opened(value)
                self.throttle[name] = getattr(Throttle(**cast("dict[str, Any]", {name: said})), name)

    def _read_concurrency(self, content: object) -> None:
        if _lifts(content):
            self.admission = None
            return
        given = dict(as_table(content, "[concurrency]"))
        keys = as_table(given.pop("keys", {}), "[concurrency.keys]")
        with naming("[concurrency]"):
            check_names(given, [*(each.name for each in fields(Admission)), "keys"])
            is_off = "max_active" in given and _lifts(given["max_active"])
            if is_off:
                del given["max_active"]
            # What contradicts the code's numbers is found with them; here, what is wrong in itself.
            Admission(**cast("dict[str, Any]", {"max_active": 100_000, "reserved": 0, **given}))
            self.admission = None if is_off else given
        with naming("[concurrency.keys]"):
            for key, number in keys.items():
                check_text(key, "the name of a key")
                self.keys[key] = 0 if _lifts(number) else check_count(number, key, *MAX_CONCURRENT_RANGE)

    def _read_tools(self, content: object) -> None:
        for name, section in as_table(content, "[tools]").items():
            place = f"[tools.{quoted(check_text(name, '[tools]: the name of a tool'))}]"
            table = as_table(section, place)
            with naming(place):
                check_names(table, _TOOL_FIELDS)
                said: dict[str, Any] = {}
                for field, value in table.items():
                    attribute, read = _TOOL_FIELDS[field]
                    said[attribute] = read(value, field)
                self.tools[name] = ToolOverride(**said)


# Fields of a throttle that `None` lifts; in a file, `0` and `"off"` say it.
_LIFTED: Final = frozenset(
    {
        "global_rate_limit",
        "global_concurrency",
        "default_rate_limit",
        "default_concurrency",
        "default_timeout",
        "ip_filter",
        "storage",
        "fallback",
    }
)
# Fields of a limit that may be `None`, which a file says as `"off"`; a 0 there is a number like others.
_OPEN: Final = frozenset({"queue_timeout", "max_queued", "cancel_after"})


def _lifts(value: object) -> bool:
    """Whether a value lifts a limit; `null` is how JSON says `None`."""
    is_zero = isinstance(value, int | float) and not isinstance(value, bool) and value == 0
    return value is None or is_zero or value == "off"


def _opened(value: object) -> object:
    """A limit as a file gives it, or a list of them, with `None` for what is `"off"` in it."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        return {name: None if name in _OPEN and said == "off" else said for name, said in table.items()}
    if isinstance(value, list):
        return [_opened(each) for each in cast("list[object]", value)]
    return value


def _limits_reader(read: Callable[[object, str], T]) -> Callable[[object, str], T]:
    return lambda value, field: read(None if _lifts(value) else _opened(value), field)


_TOOL_FIELDS: Final[Mapping[str, tuple[str, Callable[[Any, str], object]]]] = {
    "rate_limit": ("rate_limits", _limits_reader(rate_limits)),
    "concurrency": ("concurrency_limits", _limits_reader(concurrency_limits)),
    "timeout": ("deadline", _limits_reader(Timeout.of)),
    "priority": ("priority", lambda value, field: check_choice(value, field, PRIORITIES)),
    "on_cancel": ("on_cancel", lambda value, field: check_choice(value, field, ON_CANCEL)),
    "describe_limits": ("describe_limits", check_flag),
    "enabled": ("enabled", check_flag),
}


def _parsed(text: str, path: Path, *, is_toml: bool) -> Mapping[str, object]:
    if is_toml:
        return parse_toml(text, str(path))
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not JSON: {error}") from None
    return as_table(document, str(path))


# ------------------------------------------------------------------------------------ while a command loads


@dataclass(frozen=True, slots=True)
class _Loading:
    named: str | os.PathLike[str] | None
    beside: Path | None


_LOADING: Final[ContextVar[_Loading | None]] = ContextVar("frontmcp_py.loading", default=None)


@contextmanager
def for_target(
    folder: str | os.PathLike[str] | None, config: str | os.PathLike[str] | None = None
) -> Generator[None]:
    """Servers that are made in this block take the file of a command line.

    Args:
        folder: The folder of the module that is loaded; `frontmcp.toml` there is taken if nothing else is
            named.
        config: What `--config` says; it wins over `FRONTMCP_CONFIG` and over what the code names.
    """
    token = _LOADING.set(_Loading(config, None if folder is None else Path(folder) / FILE_NAME))
    try:
        yield
    finally:
        _LOADING.reset(token)
