"""What is in force for a server: code, then file, then environment; the later wins, whole value per kind."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, Final, cast

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.guard import Limits
from frontmcp_py.policy import (
    UNSET,
    Admission,
    Concurrency,
    Policy,
    Throttle,
    ThrottleOption,
    Unset,
    naming,
    nearest,
)
from frontmcp_py.tables import quoted

from .file import ConfigOption, Overrides
from .frontmcp_json import TRUSTS, translated
from .in_force import Origin, Ruling, ToolInForce, Via

logger: logging.Logger = logging.getLogger("frontmcp_py.server")


class Settings:
    """What is in force for a server: code, then file, then environment; the later wins.

    Args:
        throttle: The server's throttle; `None` if nobody said anything about it.
        origins: Where the fields of the throttle come from that are not built-in.
        overrides: What the file says.
        code_names: The file that the code names, in force or not.

    Attributes:
        throttle: The server's throttle, or `None`.
        origins: Where each field of the throttle comes from, by its name; admission's fields stand there as
            `admission.max_active` and so on, too.
        overrides: What the file says.
        code_names: The file that the code names, in force or not.
    """

    def __init__(
        self,
        throttle: Throttle | None = None,
        origins: Mapping[str, Origin] | None = None,
        overrides: Overrides | None = None,
        *,
        code_names: ConfigOption = None,
    ) -> None:
        self.throttle: Throttle | None = throttle
        known = dict.fromkeys(
            [each.name for each in fields(Throttle)]
            + [f"admission.{each.name}" for each in fields(Admission)],
            Origin("built-in"),
        )
        self.origins: Mapping[str, Origin] = MappingProxyType({**known, **(origins or {})})
        self.overrides: Overrides = overrides or Overrides({})
        self.code_names: ConfigOption = code_names

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
            trusts = bool(given.pop(TRUSTS, False))
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
        switch = os.environ.get("FRONTMCP_THROTTLE", "").strip()
        if switch and switch.lower() != "off":
            logger.warning("FRONTMCP_THROTTLE: %r says nothing; 'off' switches the throttle off", switch)
        if switch.lower() == "off":
            # What is not switched off with it stays as it was given.
            merged = replace(merged or Throttle(), enabled=False)
            origins["enabled"] = Origin("environment")
        return cls(merged, origins, overrides, code_names=config)

    @contextmanager
    def naming_file(self) -> Generator[None]:
        """Name the file in errors that it may have caused together with the code."""
        says = self.overrides
        try:
            yield
        except ConfigurationError as error:
            if says.source and (says.throttle or says.admission != {} or says.keys or says.tools):
                raise ConfigurationError(f"{error} (limits are changed by {says.source})") from None
            raise

    def policy_of(self, tool: str, policy: Policy) -> Policy:
        """A tool's policy as the file leaves it: its own section first, then the numbers of keys.

        `[concurrency.keys]` changes the number of every limit that names the key, and of the one that a tool
        of that name has; partition, wait and queue stay the tool's own.

        Raises:
            ConfigurationError: The section cannot hold for this tool.
        """
        with naming(self.overrides.in_place(f"tools.{quoted(tool)}")):
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
        place = self.overrides.in_place(f"tools.{quoted(tool)}")
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
            f"{self.overrides.in_place(f'tools.{quoted(name)}')}: the server has no tool {name!r}; "
            + (nearest(name, tools) if tools else "it has none")
            for name in self.overrides.tools
            if name not in tools
        ]
        for key in self.overrides.keys:
            if key in keys:
                continue
            if key in tools:
                hint = f"to limit the tool of that name, give [tools.{quoted(key)}] concurrency"
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
        # Asked of what the keys' numbers were put into: a slot that one has lifted may be gone by now.
        from_file = self._from_file(name, said.over(declared))
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
    with naming(overrides.source) if overrides.source else nullcontext():
        return replace(code or Throttle(), **changes)
