"""The operator's file: limits that are changed without touching code, and where each one in force comes from.

`Settings.of` reads what the code says, then the file, then the environment; the later wins, whole value per
kind. For the way of a value:

* `Overrides` is a file by itself: `[throttle]`, `[concurrency]` and `[tools.NAME]`, checked before it meets
  any code.
* `Settings` is what is in force for a server: its throttle, and what the file says about its tools.
* `ToolInForce` is what is in force for one tool, each part with its `Origin`; `frontmcp list` prints it.
* `translated` reads FrontMCP's `throttle` object, as its JSON has it.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar, cast
from urllib.parse import quote

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.guard import Limits
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
    ThrottleOption,
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

T = TypeVar("T")

logger: logging.Logger = logging.getLogger("frontmcp_py.server")

FILE_NAME: Final = "frontmcp.toml"
"""The file that a command looks for beside the module that it loads."""

ConfigOption: TypeAlias = str | os.PathLike[str] | Mapping[str, object] | None
"""What the option `config` takes: the path of a file (TOML, or JSON if it ends in `.json`), or what such a
file holds as a mapping. `None`: nothing was said."""

# ------------------------------------------------------------------------------------------ what is in force

Layer: TypeAlias = Literal["built-in", "code", "file", "environment"]
"""Who said it. The later wins."""

Via: TypeAlias = Literal["own", "key", "default", "global", "off"]
"""On which way it reaches a tool: said of it by name, of a key that it names, of all tools without a limit of
their own, of all tools together; or the throttle is off, so that nothing holds."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value in force comes from; as text `code`, `file`, `default`, `default (file)` and so on."""

    layer: Layer
    """Who said it."""

    via: Via = "own"
    """On which way it reaches the tool."""

    def __str__(self) -> str:
        if self.via == "own":
            return self.layer
        # What the code says of all its tools goes without saying.
        return self.via if self.layer in ("built-in", "code") else f"{self.via} ({self.layer})"


@dataclass(frozen=True, slots=True)
class Ruling(Generic[T]):
    """A value that is in force, and where it comes from."""

    value: T
    origin: Origin


@dataclass(frozen=True, slots=True)
class ToolInForce:
    """What is in force for one tool, as it is enforced and told to the model.

    An empty tuple, or a timeout of `None`, is no limit of this kind; its origin says who decided that. With
    `mode="observe"` these are the limits that are counted, though nothing is refused for them.
    """

    name: str
    owner: str
    """Where it was registered, such as `app "help-desk"`."""

    enabled: Ruling[bool]
    """`False`: not served and not listed."""

    rate_limit: Ruling[tuple[RateLimit, ...]]
    concurrency: Ruling[tuple[Concurrency, ...]]
    """Its own slots and those of the keys that it names, waits capped by admission's."""

    timeout: Ruling[Timeout | None]
    global_rate_limit: Ruling[tuple[RateLimit, ...]]
    global_concurrency: Ruling[tuple[Concurrency, ...]]
    priority: Ruling[Priority]
    on_cancel: Ruling[OnCancel]
    describe_limits: Ruling[bool]
    keys_from_file: tuple[str, ...] = ()
    """The keys among its slots whose number the file has set, lifted ones (0) included."""


# --------------------------------------------------------------------------------------- what one file says


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
            rate_limit=_first(self.rate_limits, policy.rate_limits),
            concurrency=_first(self.concurrency_limits, policy.concurrency_limits),
            timeout=_first(self.deadline, policy.deadline),
            priority=_first(self.priority, policy.priority),
            on_cancel=_first(self.on_cancel, policy.on_cancel),
        )


_NOTHING: Final = ToolOverride()


def _first(said: T | Unset, otherwise: T) -> T:
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
        if not is_toml and _is_bare_throttle(document):
            document = {"throttle": document}
        with naming(source) if source else _unnamed():
            for section, content in document.items():
                if section == "throttle":
                    self._read_throttle(content)
                elif section == "concurrency":
                    self._read_concurrency(content)
                elif section == "tools":
                    self._read_tools(content)
                else:
                    raise ConfigurationError(
                        f"there is no section {section!r}; {nearest(str(section), _SECTIONS)}"
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
        table = _table(content, "[throttle]")
        with naming("[throttle]"):
            given = translated(table)
            self.trusts_a_proxy = bool(given.pop(_TRUSTS, False))
            if "admission" in given:
                raise ConfigurationError("there is no field 'admission'; give the section [concurrency]")
            _check_names(given, [each.name for each in fields(Throttle) if each.name != "admission"])
            for name, value in given.items():
                said = None if name in _LIFTED and _lifts(value) else _opened(value)
                self.throttle[name] = getattr(Throttle(**cast("dict[str, Any]", {name: said})), name)

    def _read_concurrency(self, content: object) -> None:
        if _lifts(content):
            self.admission = None
            return
        given = dict(_table(content, "[concurrency]"))
        keys = _table(given.pop("keys", {}), "[concurrency.keys]")
        with naming("[concurrency]"):
            _check_names(given, [*(each.name for each in fields(Admission)), "keys"])
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
        for name, section in _table(content, "[tools]").items():
            place = f"[tools.{_quoted(check_text(name, '[tools]: the name of a tool'))}]"
            table = _table(section, place)
            with naming(place):
                _check_names(table, _TOOL_FIELDS)
                said: dict[str, Any] = {}
                for field, value in table.items():
                    attribute, read = _TOOL_FIELDS[field]
                    said[attribute] = read(value, field)
                self.tools[name] = ToolOverride(**said)


_SECTIONS: Final = ("throttle", "concurrency", "tools")

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


def _table(content: object, place: str) -> Mapping[str, object]:
    if not isinstance(content, Mapping):
        raise not_allowed(place, content, "a table")
    return cast("Mapping[str, object]", content)


def _check_names(given: Iterable[object], valid: Iterable[str]) -> None:
    valid = tuple(valid)
    for name in given:
        if name not in valid:
            raise ConfigurationError(f"there is no field {name!r}; {nearest(str(name), valid)}")


def _quoted(name: str) -> str:
    """A name as a TOML header has it."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def _parsed(text: str, path: Path, *, is_toml: bool) -> Mapping[str, object]:
    if is_toml:
        # Servers without a file do not pay for its parser.
        import tomllib

        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path}: not TOML: {error}") from None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not JSON: {error}") from None
    return _table(document, str(path))


@contextmanager
def _unnamed() -> Generator[None]:
    yield


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


# ---------------------------------------------------------------------------------- code, file, environment


class Settings:
    """What is in force for a server: code, then file, then environment; the later wins.

    Args:
        throttle: The server's throttle; `None` if nobody said anything about it.
        origins: Where the fields of the throttle come from that are not built-in.
        overrides: What the file says.

    Attributes:
        throttle: The server's throttle, or `None`.
        origins: Where each field of the throttle comes from, by its name; admission's fields stand there as
            `admission.max_active` and so on, too.
        overrides: What the file says.
    """

    def __init__(
        self,
        throttle: Throttle | None = None,
        origins: Mapping[str, Origin] | None = None,
        overrides: Overrides | None = None,
    ) -> None:
        self.throttle: Throttle | None = throttle
        known = dict.fromkeys(
            [each.name for each in fields(Throttle)]
            + [f"admission.{each.name}" for each in fields(Admission)],
            Origin("built-in"),
        )
        self.origins: Mapping[str, Origin] = MappingProxyType({**known, **(origins or {})})
        self.overrides: Overrides = overrides or Overrides({})

    @classmethod
    def of(
        cls, throttle: ThrottleOption = None, config: ConfigOption = None, *, trusts_proxies: bool = False
    ) -> Settings:
        """Read the code's throttle, the file and the environment.

        Args:
            throttle: What the code says; a mapping may be FrontMCP's.
            config: The file that the code names.
            trusts_proxies: Whether the server names proxies that it trusts, as FrontMCP's `trustProxy` needs.

        Raises:
            ConfigurationError: One of them says something that is not allowed.
        """
        trusts = False
        if isinstance(throttle, Mapping):
            with naming("FrontMCP.throttle"):
                given = translated(throttle)
            trusts = bool(given.pop(_TRUSTS, False))
            throttle = given
        code = Throttle.of(throttle, "FrontMCP.throttle")
        overrides = Overrides.load(config)
        for place, needs in (
            ("FrontMCP.throttle", trusts),
            (overrides.in_place("throttle"), overrides.trusts_a_proxy),
        ):
            if needs and not trusts_proxies:
                raise ConfigurationError(
                    f"{place}: ipFilter.trustProxy: True does not say whom to trust; name the networks "
                    "of the proxies: FrontMCP(trusted_proxies=[...])"
                )
        origins = _differences(code)
        merged = _with_file(code, overrides, origins)
        if os.environ.get("FRONTMCP_THROTTLE", "").strip().lower() == "off":
            # What is not switched off with it stays as it was given.
            merged = replace(merged or Throttle(), enabled=False)
            origins["enabled"] = Origin("environment")
        return cls(merged, origins, overrides)

    def policy_of(self, tool: str, policy: Policy) -> Policy:
        """A tool's policy as the file leaves it: its own section first, then the numbers of keys.

        `[concurrency.keys]` changes the number of every limit that names the key, and of the one that a tool
        of that name has; partition, wait and queue stay the tool's own.

        Raises:
            ConfigurationError: The section cannot hold for this tool.
        """
        with naming(self.overrides.in_place(f"tools.{_quoted(tool)}")):
            policy = self.overrides.tool(tool).over(policy)
        slots = Limits.of(policy, self.throttle, as_if_enabled=True).slots
        numbered = self._numbered(tool, slots)
        if numbered == slots:
            return policy
        return Policy(policy.rate_limits, numbered, policy.deadline, policy.priority, policy.on_cancel)

    def _numbered(self, tool: str, slots: tuple[Concurrency, ...]) -> tuple[Concurrency, ...]:
        keys = self.overrides.keys
        names = _names(tool, slots)
        return tuple(
            replace(slot, max_concurrent=keys[name]) if name in keys else slot
            for name, slot in zip(names, slots, strict=True)
        )

    def check_thread(self, tool: str, policy: Policy) -> None:
        """Refuse what cannot be done to a tool that runs in a thread, where the decorator could not see it.

        Raises:
            ConfigurationError: The file, or the server's default, would cancel it.
        """
        said = self.overrides.tool(tool)
        place = self.overrides.in_place(f"tools.{_quoted(tool)}")
        deadline = Limits.of(policy, self.throttle, as_if_enabled=True).timeout
        if deadline is not None and deadline.cancel_after is not None:
            cancels = f"cancel_after: {deadline.cancel_after!r} {_NOT_ON_DEF}"
            if said.deadline is not UNSET:
                raise ConfigurationError(f"{place}: timeout.{cancels}; leave it out")
            default = "Throttle.default_timeout"
            if self.origins["default_timeout"].layer == "file":
                default = f"{self.overrides.in_place('throttle')}: default_timeout"
            raise ConfigurationError(
                f'tool "{tool}": {default}.{cancels}; give the tool a timeout of its own, or make it async'
            )
        if said.on_cancel == "cancel":
            raise ConfigurationError(f"{place}: on_cancel: 'cancel' {_NOT_ON_DEF}; give 'abort'")

    def problems(self, tools: Iterable[str], keys: Iterable[str]) -> list[str]:
        """What the file says about tools and keys that a server does not have, one sentence each.

        Args:
            tools: The server's tools, disabled ones included.
            keys: The keys that they name.
        """
        tools, keys = tuple(tools), tuple(keys)
        found = [
            f"{self.overrides.in_place(f'tools.{_quoted(name)}')}: the server has no tool {name!r}; "
            + (nearest(name, tools) if tools else "it has none")
            for name in self.overrides.tools
            if name not in tools
        ]
        for key in self.overrides.keys:
            if key in keys:
                continue
            if key in tools:
                hint = f"to limit the tool of that name, give [tools.{_quoted(key)}] concurrency"
            else:
                hint = nearest(key, keys) if keys else "no tool names any"
            place = self.overrides.in_place("concurrency.keys")
            found.append(f"{place}: no tool names the key {key!r}; {hint}")
        return found

    def in_force(
        self,
        name: str,
        owner: str,
        *,
        declared: Policy,
        policy: Policy,
        limits: Limits,
        cancels: bool,
        describes: bool | None,
        describes_by_default: bool,
    ) -> ToolInForce:
        """What is in force for a tool, and where it comes from.

        Args:
            name: The tool's name.
            owner: Where it was registered.
            declared: What the code says of it.
            policy: What the file leaves of that.
            limits: What is enforced of both.
            cancels: Whether a cancelled call cancels its body.
            describes: Whether the code says that the model is told of limits.
            describes_by_default: Whether the server does.
        """
        said = self.overrides.tool(name)
        from_file = self._from_file(name, policy)
        slots = self._whence(said.concurrency_limits, declared.concurrency_limits, policy, "concurrency")
        if from_file and slots.via != "off":
            slots = Origin("file", "key")
        on_cancel: Origin = _own(said.on_cancel, declared.on_cancel, UNSET)
        return ToolInForce(
            name=name,
            owner=owner,
            enabled=Ruling(said.enabled is not False, _own(said.enabled, True, True)),
            rate_limit=Ruling(
                limits.rates, self._whence(said.rate_limits, declared.rate_limits, policy, "rate_limit")
            ),
            concurrency=Ruling(limits.slots, slots),
            timeout=Ruling(limits.timeout, self._whence(said.deadline, declared.deadline, policy, "timeout")),
            global_rate_limit=Ruling(limits.global_rates, self._of_all(policy, "global_rate_limit")),
            global_concurrency=Ruling(limits.global_slots, self._of_all(policy, "global_concurrency")),
            priority=Ruling(policy.priority, _own(said.priority, declared.priority, "normal")),
            on_cancel=Ruling("cancel" if cancels else "abort", on_cancel),
            describe_limits=self._describes(said.describe_limits, describes, describes_by_default),
            keys_from_file=from_file,
        )

    def _from_file(self, tool: str, policy: Policy) -> tuple[str, ...]:
        slots = Limits.of(policy, self.throttle, as_if_enabled=True).slots
        return tuple(name for name in _names(tool, slots) if name is not None and name in self.overrides.keys)

    @property
    def _is_off(self) -> bool:
        return self.throttle is not None and not self.throttle.enabled

    def _whence(self, said: object, declared: object, policy: Policy, kind: str) -> Origin:
        is_own = said is not UNSET or declared is not UNSET
        if self._is_off and not (is_own and kind == "timeout"):
            return Origin(self.origins["enabled"].layer, "off")
        if is_own:
            return Origin("code" if said is UNSET else "file")
        return self._preset(policy, f"default_{kind}", "default")

    def _of_all(self, policy: Policy, field: str) -> Origin:
        if self._is_off:
            return Origin(self.origins["enabled"].layer, "off")
        return self._preset(policy, field, "global")

    def _preset(self, policy: Policy, field: str, via: Via) -> Origin:
        layer = self.origins[field].layer
        # Control calls are exempt, whatever is preset for others.
        exempt = policy.priority == "control"
        return Origin("built-in") if exempt or layer == "built-in" else Origin(layer, via)

    def _describes(self, said: bool | Unset, own: bool | None, preset: bool) -> Ruling[bool]:
        if not isinstance(said, Unset):
            return Ruling(said, Origin("file"))
        if own is not None:
            return Ruling(own, Origin("code"))
        return Ruling(preset, Origin("built-in") if preset else Origin("code", "default"))


_NOT_ON_DEF: Final = 'is not allowed on a "def" tool, whose thread can only be told'


def _own(said: object, declared: object, built_in: object) -> Origin:
    if said is not UNSET:
        return Origin("file")
    return Origin("built-in") if declared == built_in else Origin("code")


def _names(tool: str, slots: Iterable[Concurrency]) -> list[str | None]:
    """What each of a tool's slots can be named by: its key, or for the first without one the tool's name."""
    names: list[str | None] = []
    has_own = False
    for slot in slots:
        names.append(slot.key if slot.key is not None or has_own else tool)
        has_own = has_own or slot.key is None
    return names


def _differences(code: Throttle | None) -> dict[str, Origin]:
    """The fields that the code has given values of its own."""
    if code is None:
        return {}
    preset = Throttle()
    said = {each.name for each in fields(Throttle) if getattr(code, each.name) != getattr(preset, each.name)}
    said |= {
        f"admission.{each.name}"
        for each in fields(Admission)
        if code.admission and getattr(code.admission, each.name) != getattr(preset.admission, each.name)
    }
    return dict.fromkeys(said, Origin("code"))


def _with_file(code: Throttle | None, overrides: Overrides, origins: dict[str, Origin]) -> Throttle | None:
    """The code's throttle with each field that the file gives; a field of admission counts as one, too."""
    changes: dict[str, Any] = dict(overrides.throttle)
    if overrides.admission is None:
        changes["admission"] = None
    elif overrides.admission:
        base = code.admission if code is not None else Admission()
        with naming(overrides.in_place("concurrency")):
            changes["admission"] = replace(base or Admission(), **cast("dict[str, Any]", overrides.admission))
        origins |= dict.fromkeys([f"admission.{name}" for name in overrides.admission], Origin("file"))
    if not changes:
        return code
    origins |= dict.fromkeys(changes, Origin("file"))
    with naming(overrides.source) if overrides.source else _unnamed():
        return replace(code or Throttle(), **changes)


# ------------------------------------------------------------------------------------------ FrontMCP's names

_TRUSTS: Final = "trustProxy"

# FrontMCP's fields of `throttle` that have another name here, with the fields of what stands there.
_RATE_NAMES: Final = {"maxRequests": "max_requests", "windowMs": "window", "partitionBy": "partition_by"}
_SLOT_NAMES: Final = {
    "maxConcurrent": "max_concurrent",
    "queueTimeoutMs": "queue_timeout",
    "partitionBy": "partition_by",
}
_TIMEOUT_NAMES: Final = {"executeMs": "execute"}
_FILTER_NAMES: Final = {"allowList": "allow", "denyList": "deny", "defaultAction": "default"}
_THROTTLE_NAMES: Final = {
    "keyPrefix": "key_prefix",
    "global": "global_rate_limit",
    "globalConcurrency": "global_concurrency",
    "defaultRateLimit": "default_rate_limit",
    "defaultConcurrency": "default_concurrency",
    "defaultTimeout": "default_timeout",
    "ipFilter": "ip_filter",
}
_NESTED_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "global_rate_limit": _RATE_NAMES,
    "global_concurrency": _SLOT_NAMES,
    "default_rate_limit": _RATE_NAMES,
    "default_concurrency": _SLOT_NAMES,
    "default_timeout": _TIMEOUT_NAMES,
}


def translated(throttle: Mapping[Any, object]) -> dict[str, object]:
    """The fields of a `Throttle`, from a mapping that may have FrontMCP's names for them.

    What FrontMCP has and this package has not is an error, with what to give instead.

    Args:
        throttle: The mapping, which is not changed. Names that FrontMCP does not have stay as they are.

    Raises:
        ConfigurationError: A field has no counterpart here, or both names for one were given.
    """
    fields_given = _renamed(throttle, _THROTTLE_NAMES)
    is_theirs = any(name in _THROTTLE_NAMES for name in throttle)
    for name, names in _NESTED_NAMES.items():
        value = fields_given.get(name)
        if isinstance(value, Mapping):
            with naming(_their_name(name, throttle)):
                fields_given[name] = _renamed(cast("Mapping[str, object]", value), names)
    if isinstance(filtering := fields_given.get("ip_filter"), Mapping):
        with naming(_their_name("ip_filter", throttle)):
            fields_given["ip_filter"] = _filter(cast("Mapping[str, object]", filtering), fields_given)
    if is_theirs and isinstance(prefix := fields_given.get("key_prefix"), str):
        fields_given["key_prefix"] = prefix.rstrip(":")
    if isinstance(store := fields_given.get("storage"), Mapping):
        with naming("storage"):
            _store(cast("Mapping[str, object]", store), fields_given)
    return fields_given


def _is_bare_throttle(document: Mapping[str, object]) -> bool:
    names = {*_THROTTLE_NAMES, "enabled", "storage"}
    return not any(section in document for section in _SECTIONS) and any(name in names for name in document)


def _their_name(name: str, given: Mapping[Any, object]) -> str:
    """A field as the mapping that was given calls it."""
    known = (theirs for theirs, ours in _THROTTLE_NAMES.items() if ours == name and theirs in given)
    return next(known, name)


def _renamed(given: Mapping[Any, object], names: Mapping[str, str]) -> dict[str, object]:
    fields_given: dict[str, object] = {}
    for name, value in given.items():
        ours = names.get(name, name)
        if ours != name and ours in given:
            raise ConfigurationError(f"{name!r} and {ours!r} are two names for one field; give one of them")
        if ours != name:
            value = _theirs(name, value)
        fields_given[ours] = value
    return fields_given


def _theirs(name: str, value: object) -> object:
    """A value as FrontMCP writes it: milliseconds, and `userId`."""
    if name.endswith("Ms"):
        # JSON has one kind of number, so 500.0 is whole there. Nothing here lasts 10¹⁵ milliseconds.
        number = None if isinstance(value, bool) or not isinstance(value, int | float) else value
        if number is None or not abs(number) < 10**15 or number % 1:
            raise not_allowed(name, value, "whole milliseconds")
        return number / 1000
    return "user_id" if (name, value) == ("partitionBy", "userId") else value


def _filter(given: Mapping[str, object], throttle: dict[str, object]) -> dict[str, object]:
    filtering = _renamed(given, _FILTER_NAMES)
    trusts = check_flag(filtering.pop(_TRUSTS, False), _TRUSTS)
    depth = filtering.pop("trustedProxyDepth", 1)
    check_count(depth, "trustedProxyDepth", 1, 1000)
    if trusts:
        throttle[_TRUSTS] = True
    return filtering


# Fields of FrontMCP's storage that say where a Redis is, in whichever place they stand.
_REDIS_FIELDS: Final = ("url", "host", "port", "password", "db", "tls", "username")


def _store(given: Mapping[str, object], throttle: dict[str, object]) -> None:
    """FrontMCP's storage as a URI, a fallback and a prefix, put into the throttle's fields."""
    store = dict(given)
    kind = store.pop("type", None) or store.pop("provider", None) or ("redis" if "redis" in store else "auto")
    if "fallback" in store:
        throttle["fallback"] = store.pop("fallback")
    prefixes = [store.pop("prefix", "")]
    if kind == "memory":
        throttle["storage"] = None
        _memory(store.pop("memory", {}))
    elif kind == "redis":
        redis = _flat(store)
        prefixes.insert(0, redis.pop("keyPrefix", ""))
        throttle["storage"] = _redis_uri(redis)
    else:
        raise not_allowed("type", kind, "'memory' or 'redis', which this package has")
    if store:
        # What is left over belongs to no store, or to another one than is meant.
        raise ConfigurationError(f"there is no field {next(iter(store))!r} for {kind!r}")
    parts = [*prefixes, throttle.get("key_prefix", "")]
    if any(prefixes):
        throttle["key_prefix"] = ":".join(str(part).strip(":") for part in parts if part)


def _memory(options: object) -> None:
    table = _table(options, "memory")
    if "maxEntries" in table:
        raise ConfigurationError(
            "memory.maxEntries drops live counts; give max_keys, beyond which new subjects share one"
        )
    with naming("memory"):
        # The sweeper has no counterpart: nothing is left behind here that would have to be swept.
        _check_names(table, ("enableSweeper", "sweepIntervalSeconds"))


def _flat(store: dict[str, object]) -> dict[str, object]:
    """All that is said about a Redis, taken out of the places where it may stand."""
    redis: dict[str, object] = {name: store.pop(name) for name in _REDIS_FIELDS if name in store}
    nested = dict(_table(store.pop("redis", {}), "redis"))
    redis.update(_table(nested.pop("config", {}), "redis.config"))
    redis.update(nested)
    return redis


def _redis_uri(redis: Mapping[str, object]) -> str:
    _check_names(redis, _REDIS_FIELDS)
    if "url" in redis:
        if len(redis) > 1:
            raise ConfigurationError("redis: the url says where it is; leave out host, port, db and so on")
        return check_text(redis["url"], "url")
    host = check_text(redis.get("host", "localhost"), "host")
    port = check_count(redis.get("port", 6379), "port", 1, 65_535)
    database = check_count(redis.get("db", 0), "db", 0, 10**6)
    scheme = "rediss" if check_flag(redis.get("tls", False), "tls") else "redis"
    user, password = (quote(str(redis.get(name) or ""), safe="") for name in ("username", "password"))
    login = f"{user}:{password}@" if user or password else ""
    return f"{scheme}://{login}{f'[{host}]' if ':' in host else host}:{port}/{database}"
