"""What is in force for a tool, and who said so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

from frontmcp_py.policy import Concurrency, OnCancel, Priority, RateLimit, Timeout

T = TypeVar("T")

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
