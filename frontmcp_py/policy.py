"""How often, how many at once, for how long: the limits as values, and nothing that enforces them.

Everything here is inert, checked when it is made, and frozen. The decorator, the server's defaults and the
operator's file share this vocabulary; nobody else parses durations or limits:

* `RateLimit`, `Concurrency`, `Timeout` say what one limit is, `Policy` what one tool asks for.
* `Throttle` says what holds for a whole server, with its `Admission` and `IPFilter`.
* `rate_limits`, `concurrency_limits` and the `of` methods read every form in which limits may be written.
* `parse_duration`, `check_count` and the other `check_…` functions hold the rules for single values.

Every constant of the product stands here, once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from enum import Enum
from fractions import Fraction
from functools import wraps
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_interface
from typing import TYPE_CHECKING, Final, Literal, ParamSpec, TypeAlias, TypeVar, cast, get_args

from limits import RateLimitItem, parse_many

from frontmcp_py.errors import ConfigurationError

if TYPE_CHECKING:
    from frontmcp_py.call import Call

# ------------------------------------------------------------------------------------- ranges and constants

_DAY: Final = 86_400.0

MAX_REQUESTS_RANGE: Final = (1, 10**9)
"""Calls per window. With none a tool is switched off, not limited; nobody counts beyond a billion."""

WINDOW_RANGE: Final = (0.1, 366 * _DAY)
"""Seconds of a window. A shorter one is a concurrency limit in disguise; the longest is a whole leap year."""

MOVING_WINDOW_MAX_REQUESTS: Final = 10_000
"""Calls per moving window, since each is remembered by its time: about 150 bytes a call and subject."""

MAX_CONCURRENT_RANGE: Final = (0, 10**6)
"""Calls at once; 0 limits nothing."""

MAX_QUEUED_RANGE: Final = (0, 10**6)
"""Waiters of one limit; 0 lets nobody wait."""

QUEUE_TIMEOUT_RANGE: Final = (0.0, _DAY)
"""Seconds of waiting for a slot; 0 refuses at once. No client waits longer than a day."""

EXECUTE_RANGE: Final = (0.001, _DAY)
"""Seconds of running. No request outlives a day; longer work belongs in a job that a tool starts."""

CANCEL_AFTER_RANGE: Final = (0.0, _DAY)
"""Seconds between the deadline and cancelling the body; 0 cancels at once."""

MAX_ACTIVE_RANGE: Final = (2, 100_000)
"""Places of admission: two at least, so that one can be kept for control calls."""

ADMISSION_MAX_QUEUED_RANGE: Final = (0, 100_000)
"""Calls that may wait for a place; each costs memory and an open request."""

ADMISSION_QUEUE_TIMEOUT_RANGE: Final = (0.001, 600.0)
"""Seconds of waiting for a place. A caller that waited ten minutes has long given up."""

STORAGE_TIMEOUT_RANGE: Final = (0.01, 60.0)
"""Seconds one question to the store may take: a round trip needs some, and every call waits for it."""

LEASE_RANGE: Final = (1.0, 3600.0)
"""Seconds until a crashed instance's slots are free: renewals must fit in, and somebody waits for it."""

MAX_KEYS_RANGE: Final = (1, 10**9)
"""Subjects whose counts are held at once."""

MAX_KEYS: Final = 1_000_000
"""Subjects held unless told otherwise: under 300 MB when all are live. Beyond, new ones share one count."""

MAX_OPERATIONS: Final = 1000
"""Operations of one call that a host fans out: far more than a model writes on purpose."""

MAX_ROUNDS: Final = 10
"""Times that a server may answer a call with questions before a host gives up, as the SDK's client does."""

FIRST_ROUND_DELAY: Final = 0.05
"""Seconds until a host comes again when a server asks nothing and wants it to; doubled every time."""

LAST_ROUND_DELAY: Final = 0.25
"""Seconds that this delay grows to."""

HOST_FAREWELL: Final = 1.0
"""Seconds that running calls of a cancelled batch are given to tell their servers."""

CALL_META: Final = "dev.frontmcp/call"
"""Where a host puts the number of a call in `_meta`, and a server repeats it in what the call's tool asks."""

LONGEST_SUBJECT: Final = 128
"""Characters of a subject's escaped name in a key; a longer one is digested, so that keys stay small."""

WORKER_THREADS_RANGE: Final = (1, 1000)
"""Threads for `def` tools; each reserves a stack."""

DEFAULT_WORKER_THREADS: Final = 40
"""Threads unless told otherwise: as many as `anyio` runs, which is what authors of servers are used to."""

DEFAULT_RESERVED_THREADS: Final = 8
"""Threads beyond these for control calls, where there is no admission whose `reserved` says how many."""

SHUTDOWN_GRACE_RANGE: Final = (0.0, 600.0)
"""Seconds that running calls are given at shutdown; service managers lose patience sooner than 10 minutes."""

DEFAULT_SHUTDOWN_GRACE: Final = 2.0
"""Seconds of grace unless told otherwise: most calls are answered, and a restart is hardly noticed."""

MAX_RESULT_BYTES_RANGE: Final = (1024, 1024**3)
"""Bytes of a serialised result: an error message fits in the least, memory holds the most."""

DEFAULT_MAX_RESULT_BYTES: Final = 6 * 1024**2
"""Bytes of a result unless told otherwise: far more than a model reads."""

MAX_OUTPUT_RANGE: Final = (1024, 1024**3)
"""Bytes a command may write: an error message fits in the least, memory holds the most."""

DEFAULT_MAX_OUTPUT: Final = 4 * 1024**2
"""Bytes a command may write unless told otherwise: less than a result may have, more than a model reads."""

DEFAULT_QUEUE_TIMEOUT: Final = 30.0
"""Seconds of waiting for a place unless told otherwise, and for what else is held up (worker threads, nested
calls) where admission is off: well within the minute that common clients wait."""

# ----------------------------------------------------------------------------------------------- vocabulary

Duration: TypeAlias = float | timedelta | str
"""Seconds, a `timedelta`, or text of one number and `ms`, `s`, `m`, `h` or `d`, such as `"1.5h"`."""

PartitionFunction: TypeAlias = "Callable[[Call], str | None]"
"""Names the subject that a call counts against; `None` and `""` are one shared subject."""

Partition: TypeAlias = Literal["global", "ip", "session", "user_id"]
"""The ready-made answers to who shares a count."""

PartitionBy: TypeAlias = "Partition | PartitionFunction"
"""Who shares a count: one of the ready-made answers or a function of the call."""

Strategy: TypeAlias = Literal["fixed-window", "moving-window", "sliding-window"]
"""How a window is counted."""

Priority: TypeAlias = Literal["normal", "control"]
"""`control`: comes before others, may use reserved places, and is exempt from globals and defaults."""

OnCancel: TypeAlias = Literal["cancel", "abort"]
"""What a client's cancel does to a running body: cancel its task, or only tell it through the signal."""

Mode: TypeAlias = Literal["enforce", "observe"]
"""`observe`: count what would have been refused, and refuse nothing."""

Fallback: TypeAlias = Literal["error", "memory"]
"""What happens without the store: calls are refused, or each instance counts on its own."""

FilterDefault: TypeAlias = Literal["allow", "deny"]
"""What an IP filter does with an address that no rule names."""

STRATEGIES: Final[tuple[Strategy, ...]] = get_args(Strategy)
PARTITIONS: Final[tuple[Partition, ...]] = get_args(Partition)
PRIORITIES: Final[tuple[Priority, ...]] = get_args(Priority)
ON_CANCEL: Final[tuple[OnCancel, ...]] = get_args(OnCancel)
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
FALLBACKS: Final[tuple[Fallback, ...]] = get_args(Fallback)
FILTER_DEFAULTS: Final[tuple[FilterDefault, ...]] = get_args(FilterDefault)


class Unset(Enum):
    """The type of `UNSET`."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET
"""Not given, so that the server's default applies. `None` is something else: no limit of this kind."""

# -------------------------------------------------------------------------------------- what a refusal says

_T = TypeVar("_T")
_P = ParamSpec("_P")
_Word = TypeVar("_Word", bound=str)
_Named = TypeVar("_Named", bound=Callable[..., object])

_SHOWN_AT_MOST: Final = 120


def not_allowed(field: str, value: object, allowed: str) -> ConfigurationError:
    """The error for a value that a field may not have.

    Args:
        field: The field's name as its author wrote it, such as `RateLimit.window`.
        value: What was given.
        allowed: What may be given, to follow the word "give".
    """
    return ConfigurationError(f"{field}: {_shown(value)} is not allowed; give {allowed}")


@contextmanager
def naming(place: str) -> Generator[None]:
    """Put `place` (a tool, an option, an entry of a list) in front of what a `ConfigurationError` says."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}") from None


def nearest(name: str, options: Iterable[str]) -> str:
    """The end of a message about an unknown name: the option that was probably meant, else all of them."""
    options = tuple(options)
    return did_you_mean(name, options) or f"valid options: {', '.join(options)}"


def did_you_mean(name: str, options: Sequence[str]) -> str:
    """The end of a message about an unknown name: the option that is like it, or nothing."""
    near = get_close_matches(name.lower(), options, n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def names_options(target: _Named) -> _Named:
    """Decorate a class or function so that an unknown option is answered with the nearest valid one.

    `RateLimit(max_request=2)` raises `TypeError("RateLimit() has no option 'max_request'; did you mean
    'max_requests'?")`. Signature and types stay as they are; what takes `**options` anyway is left alone.
    A class must have an `__init__` of its own.
    """
    options = _options(target)
    if any(option.kind is option.VAR_KEYWORD for option in options.values()):
        return target
    decorated: object = target
    if isinstance(decorated, type):
        init = cast("Callable[..., None]", vars(decorated)["__init__"])
        type.__setattr__(decorated, "__init__", _checked(init, decorated.__name__, tuple(options)))
        return target
    # A decorated `__init__` speaks for its class: "App.__init__" for App().
    label = target.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    return cast("_Named", _checked(target, label, tuple(options)))


def _checked(function: Callable[_P, _T], label: str, options: tuple[str, ...]) -> Callable[_P, _T]:
    @wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for name in kwargs:
            if name not in options:
                raise TypeError(f"{label}() has no option {name!r}; {nearest(name, options)}")
        return function(*args, **kwargs)

    return checked


def _options(target: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """What may be given by name, in the order of the signature."""
    unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(target).parameters
    return {
        name: option for name, option in parameters.items() if option.kind not in unnamed and name != "self"
    }


def _shown(value: object) -> str:
    """The value as a message shows it: whatever it is, and never at length."""
    try:
        text = repr(value)
    except Exception:  # an integer of 5000 digits has no repr, and a user's object may have a broken one
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_AT_MOST else f"{text[: _SHOWN_AT_MOST - 1]}…"


def _either(words: Iterable[str]) -> str:
    *others, last = (repr(word) for word in words)
    return f"{', '.join(others)} or {last}" if others else last


# --------------------------------------------------------------------------------- rules for a single value

_UNITS: Final = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86_400),
}
# Bounded, so that no text makes an integer too long to read; fifteen digits are more than any range here has.
_DURATION: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) *(ms|s|m|h|d)?")

# How far from whole milliseconds a float may be: what arithmetic such as 0.1 + 0.2 loses, but never a
# microsecond, or half a millisecond of a long window would be rounded away.
_RELATIVE_ERROR: Final = 1e-9
_ABSOLUTE_ERROR_MS: Final = 1e-3


def parse_duration(value: object, *, field: str, low: float, high: float) -> float:
    """Seconds from a number of seconds, a `timedelta` or text (see `Duration`).

    Args:
        value: What was given.
        field: The field's name, for the error.
        low: The least number of seconds that is allowed.
        high: The most that is allowed.

    Raises:
        ConfigurationError: It is none of these, text without a unit, or out of range.
    """
    allowed = (
        f"seconds from {low:.15g} to {high:.15g}, a timedelta, or text of one number and ms, s, m, h or d "
        "such as '250ms'"
    )
    seconds = value
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        number, unit = match.groups()
        if unit is None:
            raise ConfigurationError(f"{field}: {value!r} needs a unit; give {allowed}")
        seconds = float(Fraction(number) * _UNITS[unit])
    # `True` is an int to Python; NaN fails the comparison.
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not low <= seconds <= high:
        raise not_allowed(field, value, allowed)
    return float(seconds)


def check_count(value: object, field: str, low: int, high: int) -> int:
    """A whole number from `low` to `high`.

    Raises:
        ConfigurationError: It is anything else; `True`, `2.0` and `"2"` are no whole numbers.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise not_allowed(field, value, f"an integer from {low} to {high}")
    return int(value)


def check_flag(value: object, field: str) -> bool:
    """`True` or `False`.

    Raises:
        ConfigurationError: It is anything else; 1 is not `True`.
    """
    if not isinstance(value, bool):
        raise not_allowed(field, value, "True or False")
    return value


def check_choice(value: object, field: str, choices: Sequence[_Word], otherwise: str = "") -> _Word:
    """One of the given words.

    Args:
        value: What was given.
        field: The field's name, for the error.
        choices: The words that are allowed.
        otherwise: What else the field allows, to follow the words in the error.

    Raises:
        ConfigurationError: It is none of them; the nearest one is named.
    """
    for choice in choices:
        if isinstance(value, str) and value == choice:
            return choice
    meant = isinstance(value, str) and did_you_mean(value, choices)
    raise not_allowed(field, value, f"{_either(choices)}{otherwise}" + (f"; {meant}" if meant else ""))


def check_text(value: object, field: str) -> str:
    """Text that is not blank.

    Raises:
        ConfigurationError: It is anything else.
    """
    if not isinstance(value, str) or not value.strip():
        raise not_allowed(field, value, "text that is not blank")
    return value


def check_partition(value: object, field: str) -> PartitionBy:
    """One of the ready-made partitions, or a function of the call that is not async.

    Raises:
        ConfigurationError: It is anything else.
    """
    if not callable(value):
        return check_choice(value, field, PARTITIONS, otherwise=", or a function of the call")
    if _is_async(value) or _is_async(type(value).__call__):
        raise ConfigurationError(
            f"{field}: {_shown(value)} is async; give a plain function of the call, "
            "since who shares a count is decided in a step that waits for nothing"
        )
    if not isinstance(value, Hashable):
        # Policies are compared and looked up by their values.
        raise not_allowed(field, value, "a function, or a callable object that can be hashed")
    return cast("PartitionFunction", value)


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _seconds(value: object, field: str, bounds: tuple[float, float]) -> float:
    low, high = bounds
    return parse_duration(value, field=field, low=low, high=high)


def _window(value: object) -> float:
    seconds = _seconds(value, "RateLimit.window", WINDOW_RANGE)
    milliseconds = round(seconds * 1000)
    if abs(seconds * 1000 - milliseconds) > min(milliseconds * _RELATIVE_ERROR, _ABSOLUTE_ERROR_MS):
        raise not_allowed("RateLimit.window", value, "whole milliseconds, such as 0.1 or '1500ms'")
    return milliseconds / 1000


# -------------------------------------------------------------------------- one value, a mapping, or a list


def from_mapping(cls: type[_T], value: Mapping[object, object], field: str) -> _T:
    """An object of one of the classes here, from a mapping of its constructor's options.

    Args:
        cls: The class.
        value: What was given.
        field: The option's name, for errors.

    Raises:
        ConfigurationError: A field is unknown (the nearest valid one is named), missing, or has a bad value.
    """
    options = _options(cls)
    for name in value:
        if name not in options:
            near = nearest(str(name), options)
            raise ConfigurationError(f"{field}: {cls.__name__} has no field {_shown(name)}; {near}")
    for name, option in options.items():
        if option.default is option.empty and name not in value:
            raise ConfigurationError(f"{field}: {cls.__name__} needs a value for {name!r}")
    make = cast("Callable[..., _T]", cls)
    with naming(field):
        return make(**{str(name): given for name, given in value.items()})


def _instance(cls: type[_T], value: object, field: str, otherwise: str = "") -> _T:
    if isinstance(value, cls):
        return value
    if isinstance(value, Mapping):
        return from_mapping(cls, cast("Mapping[object, object]", value), field)
    article = "an" if cls.__name__[0] in "AI" else "a"
    raise not_allowed(field, value, f"{otherwise}{article} {cls.__name__} or a mapping of its fields")


def _fill(policy: object, **fields: object) -> None:
    """Give a frozen object its values; for constructors alone."""
    for name, value in fields.items():
        object.__setattr__(policy, name, value)


def _entries(value: object, field: str) -> Iterator[tuple[str, object]]:
    """The entries of a list, each with its place in it; or the one value that is no list."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        yield field, value
        return
    entries = cast("Sequence[object]", value)
    # "No limit" is read as the empty tuple; an empty list is somebody's mistake.
    if not entries and not isinstance(value, tuple):
        raise not_allowed(field, entries, "at least one limit, or None for no limit of this kind")
    for index, entry in enumerate(entries):
        yield f"{field}[{index}]", entry


# ---------------------------------------------------------------------------------------------- rate limits


@names_options
@dataclass(frozen=True, slots=True, init=False)
class RateLimit:
    """At most so many calls start in a window of time, for everybody or for each who shares a count.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    max_requests: int
    """How many calls may start in one window: 1 to 10⁹, for a moving window to 10,000."""

    window: float
    """The window's length in seconds: 0.1 to 366 days, in whole milliseconds. Any `Duration` may be given."""

    partition_by: PartitionBy
    """Who shares a count: `global`, `ip`, `session`, `user_id` or a function of the call."""

    strategy: Strategy
    """How calls are counted, by the names of the `limits` package.

    `fixed-window`: windows follow each other from the Unix epoch on, in UTC. `moving-window`: at most
    `max_requests` in any span of `window`. `sliding-window` (to `limits` `sliding-window-counter`, which may
    be given too): this window's count plus the last one's, weighted with how much of it the span covers.
    """

    def __init__(
        self,
        max_requests: int,
        window: Duration = 60.0,
        partition_by: PartitionBy = "global",
        strategy: Strategy | Literal["sliding-window-counter"] = "fixed-window",
    ) -> None:
        if strategy == "sliding-window-counter":
            strategy = "sliding-window"
        _fill(
            self,
            max_requests=check_count(max_requests, "RateLimit.max_requests", *MAX_REQUESTS_RANGE),
            window=_window(window),
            partition_by=check_partition(partition_by, "RateLimit.partition_by"),
            strategy=check_choice(strategy, "RateLimit.strategy", STRATEGIES),
        )
        if self.strategy == "moving-window" and self.max_requests > MOVING_WINDOW_MAX_REQUESTS:
            raise not_allowed(
                "RateLimit.max_requests",
                max_requests,
                f"at most {MOVING_WINDOW_MAX_REQUESTS} with 'moving-window', which remembers every call",
            )

    @property
    def window_ms(self) -> int:
        """The window's length in milliseconds, exactly."""
        return round(self.window * 1000)

    @property
    def label(self) -> str:
        """The limit as text for the keys of its counts: the same in every process, other for other numbers.

        Functions all read `function`: they have no name that two processes would agree on. So limits of one
        tool that differ in their functions alone have to be told apart by their place in its list.
        """
        partition = self.partition_by if isinstance(self.partition_by, str) else "function"
        return f"{self.max_requests}/{self.window_ms}ms/{self.strategy}/{partition}"


_OneRateLimit: TypeAlias = RateLimit | RateLimitItem | str | Mapping[str, object]

RateLimitOption: TypeAlias = _OneRateLimit | Sequence[_OneRateLimit] | None
"""What the option `rate_limit` takes: a limit, text such as `"10/minute; 100/day"`, a `RateLimitItem` of the
`limits` package, a mapping of a limit's fields, or a list of these. `None`: no limit of this kind."""

_RATE_TEXT: Final = "'2/hour', '10 per 5 minutes' or '10/minute; 100/day'"
# `limits` reads a multiple of zero as one.
_ZERO_MULTIPLE: Final = re.compile(r"(?:/|per)\s*0+\s*[a-z]", re.IGNORECASE)


def rate_limits(value: object, field: str = "rate_limit") -> tuple[RateLimit, ...]:
    """All rate limits that an option names (see `RateLimitOption`), in order; none for `None`.

    What this returns it also reads, so the empty tuple means none too.

    Args:
        value: What was given.
        field: The option's name, for errors.

    Raises:
        ConfigurationError: It is nothing of that kind, a bad value, or an empty list.
    """
    if value is None:
        return ()
    return tuple(limit for place, entry in _entries(value, field) for limit in _rate_limits_of(entry, place))


def _rate_limits_of(value: object, field: str) -> list[RateLimit]:
    if isinstance(value, str):
        items = _items(value, field)
    elif isinstance(value, RateLimitItem):
        items = [value]
    else:
        return [_instance(RateLimit, value, field, otherwise=f"text such as {_RATE_TEXT}, a RateLimitItem, ")]
    with naming(f"{field}: {_shown(value)}"):
        return [RateLimit(item.amount, window=item.get_expiry()) for item in items]


def _items(text: str, field: str) -> list[RateLimitItem]:
    try:
        if not _ZERO_MULTIPLE.search(text):
            return parse_many(text)
    except ValueError:
        pass
    raise not_allowed(
        field,
        text,
        f"calls per second, minute, hour, day, month or year, or per some (1 or more) of these: {_RATE_TEXT}",
    )


# ---------------------------------------------------------------------------------------------- concurrency


@names_options
@dataclass(frozen=True, slots=True, init=False)
class Concurrency:
    """At most so many calls run at once, in one tool or in all that name the same key.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    max_concurrent: int
    """How many calls may run at once: 0 to 10⁶, where 0 limits nothing."""

    key: str | None
    """The name of a slot shared by every tool that names it, or by the tool whose name it is."""

    partition_by: PartitionBy
    """Who shares a slot: `global`, `ip`, `session`, `user_id` or a function of the call."""

    queue_timeout: float | None
    """Seconds that a call may wait for a slot: 0 (refused at once) to 86,400. `None`: as long as admission
    lets it. Any `Duration` may be given."""

    max_queued: int | None
    """How many calls may wait for this limit: 0 to 10⁶; `None`: as many as admission lets."""

    def __init__(
        self,
        max_concurrent: int = 1,
        *,
        key: str | None = None,
        partition_by: PartitionBy = "global",
        queue_timeout: Duration | None = 0.0,
        max_queued: int | None = None,
    ) -> None:
        if queue_timeout is not None:
            queue_timeout = _seconds(queue_timeout, "Concurrency.queue_timeout", QUEUE_TIMEOUT_RANGE)
        if max_queued is not None:
            max_queued = check_count(max_queued, "Concurrency.max_queued", *MAX_QUEUED_RANGE)
        _fill(
            self,
            max_concurrent=check_count(max_concurrent, "Concurrency.max_concurrent", *MAX_CONCURRENT_RANGE),
            key=None if key is None else check_text(key, "Concurrency.key"),
            partition_by=check_partition(partition_by, "Concurrency.partition_by"),
            queue_timeout=queue_timeout,
            max_queued=max_queued,
        )


_OneConcurrency: TypeAlias = Concurrency | int | Mapping[str, object]

ConcurrencyOption: TypeAlias = _OneConcurrency | Sequence[_OneConcurrency] | None
"""What the option `concurrency` takes: a limit, how many calls may run at once, a mapping of a limit's
fields, or a list of these. `None` or `0`: no limit of this kind."""


def concurrency_limits(value: object, field: str = "concurrency") -> tuple[Concurrency, ...]:
    """All concurrency limits that an option names (see `ConcurrencyOption`), in order; none for `None`.

    A limit of 0 without a key limits nothing and is left out; with a key it stays, since all who name a key
    have to agree on its number. What this returns it also reads, so the empty tuple means none too.

    Args:
        value: What was given.
        field: The option's name, for errors.

    Raises:
        ConfigurationError: It is nothing of that kind, a bad value, an empty list, or a list that names one
            key twice: a call holds one slot of a key.
    """
    if value is None:
        return ()
    limits: list[Concurrency] = []
    for place, entry in _entries(value, field):
        limit = _concurrency(entry, place)
        if limit.key is not None and any(limit.key == other.key for other in limits):
            raise ConfigurationError(f"{place}: the key {limit.key!r} is named twice; give every key once")
        if limit.max_concurrent or limit.key is not None:
            limits.append(limit)
    return tuple(limits)


def _concurrency(value: object, field: str) -> Concurrency:
    if isinstance(value, int) and not isinstance(value, bool):
        with naming(field):
            return Concurrency(value)
    low, high = MAX_CONCURRENT_RANGE
    return _instance(Concurrency, value, field, otherwise=f"an integer from {low} to {high}, ")


# ------------------------------------------------------------------------------------------------- timeouts


@names_options
@dataclass(frozen=True, slots=True, init=False)
class Timeout:
    """How long a call may take. It ends the call, not the work: a body that does not listen runs on.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    execute: float
    """Seconds from the start of a call until its caller is answered: 0.001 to 86,400. Any `Duration`
    may be given."""

    cancel_after: float | None
    """Seconds from then until the body's task is cancelled: 0 (at once) to 86,400; `None`: never. Only for
    `async def` tools, since a thread can only be told. Any `Duration` may be given."""

    def __init__(self, execute: Duration, cancel_after: Duration | None = None) -> None:
        if cancel_after is not None:
            cancel_after = _seconds(cancel_after, "Timeout.cancel_after", CANCEL_AFTER_RANGE)
        _fill(self, execute=_seconds(execute, "Timeout.execute", EXECUTE_RANGE), cancel_after=cancel_after)

    @classmethod
    def of(cls, value: object, field: str = "timeout") -> Timeout | None:
        """The timeout that an option names (see `TimeoutOption`), or `None` for no timeout.

        Args:
            value: What was given.
            field: The option's name, for errors.

        Raises:
            ConfigurationError: It is nothing of that kind or a bad value.
        """
        if value is None:
            return None
        if isinstance(value, int | float | str | timedelta):
            with naming(field):
                return cls(value)
        return _instance(
            cls, value, field, otherwise="a number of seconds, text such as '30s', a timedelta, "
        )


TimeoutOption: TypeAlias = Timeout | Duration | Mapping[str, object] | None
"""What the option `timeout` takes: a `Timeout`, a `Duration`, or a mapping of its fields. `None`: none."""


# ------------------------------------------------------------------------------------------ a tool's policy


@names_options
@dataclass(frozen=True, slots=True, init=False)
class Policy:
    """What one tool asks for. What it leaves `UNSET` is the server's to decide.

    Args:
        rate_limit: How often it may run.
        concurrency: How many calls of it may run at once.
        timeout: How long a call may take.
        priority: Whether its calls are control calls.
        on_cancel: What a client's cancel does to a running body.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    rate_limits: tuple[RateLimit, ...] | Unset
    """All of these must have room; the empty tuple: none, the server's default included."""

    concurrency_limits: tuple[Concurrency, ...] | Unset
    """A call holds a slot of each; the empty tuple: none, the server's default included."""

    deadline: Timeout | Unset | None
    """How long a call may take; `None`: no timeout, the server's default included."""

    priority: Priority
    """`control` calls come first, may use reserved places, and are exempt from globals and defaults."""

    on_cancel: OnCancel | Unset
    """`cancel` cancels the body's task, `abort` only tells it. Unset: `cancel` for tools that only read."""

    def __init__(
        self,
        rate_limit: RateLimitOption | Unset = UNSET,
        concurrency: ConcurrencyOption | Unset = UNSET,
        timeout: TimeoutOption | Unset = UNSET,
        priority: Priority = "normal",
        on_cancel: OnCancel | Unset = UNSET,
    ) -> None:
        if on_cancel is not UNSET:
            on_cancel = check_choice(on_cancel, "on_cancel", ON_CANCEL)
        _fill(
            self,
            rate_limits=UNSET if rate_limit is UNSET else rate_limits(rate_limit),
            concurrency_limits=UNSET if concurrency is UNSET else concurrency_limits(concurrency),
            deadline=UNSET if timeout is UNSET else Timeout.of(timeout),
            priority=check_choice(priority, "priority", PRIORITIES),
            on_cancel=on_cancel,
        )


# --------------------------------------------------------------------------------------- the whole server's


@names_options
@dataclass(frozen=True, slots=True, init=False)
class Admission:
    """How many calls a server runs at once, whatever they are, and how many more may wait.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    max_active: int
    """How many calls run at most: 2 to 100,000."""

    reserved: int
    """How many of these places only control calls may use: 0 to `max_active` - 1."""

    max_queued: int
    """How many calls may wait for a place: 0 to 100,000."""

    queue_timeout: float
    """Seconds that a call may wait for a place: 0.001 to 600. Any `Duration` may be given."""

    def __init__(
        self,
        max_active: int = 48,
        reserved: int = 8,
        max_queued: int = 64,
        queue_timeout: Duration = DEFAULT_QUEUE_TIMEOUT,
    ) -> None:
        max_active = check_count(max_active, "Admission.max_active", *MAX_ACTIVE_RANGE)
        _fill(
            self,
            max_active=max_active,
            reserved=check_count(reserved, "Admission.reserved", 0, max_active - 1),
            max_queued=check_count(max_queued, "Admission.max_queued", *ADMISSION_MAX_QUEUED_RANGE),
            queue_timeout=_seconds(queue_timeout, "Admission.queue_timeout", ADMISSION_QUEUE_TIMEOUT_RANGE),
        )


# One object, as it never changes: what a server has that says nothing about admission.
_DEFAULT_ADMISSION: Final = Admission()

IPNetwork: TypeAlias = IPv4Network | IPv6Network

IPRule: TypeAlias = str | IPv4Address | IPv6Address | IPNetwork
"""An address or a network, as text such as `10.0.0.0/8` or as an object of `ipaddress`."""


@names_options
@dataclass(frozen=True, slots=True, init=False)
class IPFilter:
    """Which addresses may call over HTTP: `deny` wins, then `allow`, then the default.

    An empty list names nobody. So `IPFilter(default="deny")` refuses everybody, and an `allow` list matters
    only with that default. Rules for IPv4-mapped addresses (`::ffff:10.0.0.1`, RFC 4291 section 2.5.5.2) are
    rules for the IPv4 addresses, and zones (`fe80::1%eth0`, RFC 4007) are dropped, as they are from the
    addresses that a rule is compared with.

    Raises:
        ConfigurationError: A rule cannot be read (it is named), or has bits set right of its prefix, such as
            `10.0.0.1/8`: one address or a whole network may have been meant.
    """

    allow: tuple[IPNetwork, ...]
    """Who may call when the default is `deny`."""

    deny: tuple[IPNetwork, ...]
    """Who may not call, whatever else is said."""

    default: FilterDefault
    """What holds for an address in neither list, and for one that is missing or cannot be read."""

    def __init__(
        self,
        allow: Sequence[IPRule] = (),
        deny: Sequence[IPRule] = (),
        default: FilterDefault = "allow",
    ) -> None:
        _fill(
            self,
            allow=parse_networks(allow, "IPFilter.allow"),
            deny=parse_networks(deny, "IPFilter.deny"),
            default=check_choice(default, "IPFilter.default", FILTER_DEFAULTS),
        )


_RULE: Final = "an IPv4 or IPv6 address or network such as '10.0.0.0/8' or '2001:db8::/32'"
_MAPPED_PREFIX: Final = 96
_ZONE: Final = re.compile(r"%[^/]*")


def parse_networks(rules: object, field: str) -> tuple[IPNetwork, ...]:
    """Networks from a list of addresses and networks (see `IPRule`).

    Args:
        rules: What was given.
        field: The field's name, for the error.

    Raises:
        ConfigurationError: It is no list, or a rule cannot be read or has bits set right of its prefix.
    """
    if isinstance(rules, str | bytes) or not isinstance(rules, Sequence):
        raise not_allowed(field, rules, "a list of addresses and networks")
    return tuple(
        _network(rule, f"{field}[{index}]") for index, rule in enumerate(cast("Sequence[object]", rules))
    )


def _network(rule: object, field: str) -> IPNetwork:
    if not isinstance(rule, IPRule):
        raise not_allowed(field, rule, _RULE)
    text = str(rule)
    try:
        interface = ip_interface(_ZONE.sub("", text) if ":" in text else text)
    except ValueError:
        raise not_allowed(field, rule, _RULE) from None
    network = interface.network
    if interface.ip != network.network_address:
        raise not_allowed(field, rule, f"{_RULE}; did you mean {str(network)!r}?")
    mapped = network.network_address.ipv4_mapped if isinstance(network, IPv6Network) else None
    if mapped is not None and network.prefixlen >= _MAPPED_PREFIX:
        return IPv4Network((mapped, network.prefixlen - _MAPPED_PREFIX))
    return network


@names_options
@dataclass(frozen=True, slots=True, init=False)
class Throttle:
    """What holds for a whole server: limits over all tools, defaults for each, and where counts live.

    Every limit may be given in any form that the option of a tool takes.

    Raises:
        ConfigurationError: A value is not allowed, a default or global limit has a key, or a call could wait
            for a slot for ever (`check_waits`).
    """

    enabled: bool
    """`False` ignores rate limits, concurrency, admission and `default_timeout`. A tool's own timeout and the
    IP filter stay."""

    mode: Mode
    """`observe` counts what would have been refused or would have waited, and refuses nothing of it."""

    global_rate_limit: tuple[RateLimit, ...]
    """Counted over all tools together. Control calls are exempt."""

    global_concurrency: tuple[Concurrency, ...]
    """One slot for all tools together. Control calls are exempt."""

    default_rate_limit: tuple[RateLimit, ...]
    """For tools without rate limits of their own, and counted for each of them."""

    default_concurrency: tuple[Concurrency, ...]
    """For tools without concurrency limits of their own; each has its own slots."""

    default_timeout: Timeout | None
    """For tools without a timeout of their own."""

    admission: Admission | None
    """How many calls the process runs at once; `None`: as many as come."""

    ip_filter: IPFilter | None
    """Which addresses may call over HTTP; `None`: all."""

    storage: str | None = field(repr=False)
    """Where counts and slots live, as a storage URI of the `limits` package; `None`: in the process. Left out
    of the `repr`, as it may hold a password."""

    storage_timeout: float
    """Seconds that one question to the store may take: 0.01 to 60. Any `Duration` may be given."""

    lease: float
    """Seconds until the slots of a crashed instance are free: 1 to 3,600. Any `Duration` may be given."""

    fallback: Fallback | None
    """What happens without the store. `None`: `error` in production, else `memory`."""

    key_prefix: str
    """What every key in the store begins with: text without blanks or braces, which mark Redis hash tags."""

    max_keys: int
    """How many subjects' counts are held: 1 to 10⁹. Beyond that, new subjects share one count per limit."""

    def __init__(
        self,
        enabled: bool = True,
        mode: Mode = "enforce",
        global_rate_limit: RateLimitOption = None,
        global_concurrency: ConcurrencyOption = None,
        default_rate_limit: RateLimitOption = None,
        default_concurrency: ConcurrencyOption = None,
        default_timeout: TimeoutOption = None,
        admission: Admission | Mapping[str, object] | None = _DEFAULT_ADMISSION,
        ip_filter: IPFilter | Mapping[str, object] | None = None,
        storage: str | None = None,
        storage_timeout: Duration = 0.2,
        lease: Duration = 10.0,
        fallback: Fallback | None = None,
        key_prefix: str = "frontmcp",
        max_keys: int = MAX_KEYS,
    ) -> None:
        if admission is not None:
            admission = _instance(Admission, admission, "Throttle.admission", otherwise="None, ")
        if ip_filter is not None:
            ip_filter = _instance(IPFilter, ip_filter, "Throttle.ip_filter", otherwise="None, ")
        if fallback is not None:
            fallback = check_choice(fallback, "Throttle.fallback", FALLBACKS, otherwise=", or None")
        _fill(
            self,
            enabled=check_flag(enabled, "Throttle.enabled"),
            mode=check_choice(mode, "Throttle.mode", MODES),
            global_rate_limit=rate_limits(global_rate_limit, "Throttle.global_rate_limit"),
            global_concurrency=_keyless(global_concurrency, "Throttle.global_concurrency"),
            default_rate_limit=rate_limits(default_rate_limit, "Throttle.default_rate_limit"),
            default_concurrency=_keyless(default_concurrency, "Throttle.default_concurrency"),
            default_timeout=Timeout.of(default_timeout, "Throttle.default_timeout"),
            admission=admission,
            ip_filter=ip_filter,
            storage=_storage(storage),
            storage_timeout=_seconds(storage_timeout, "Throttle.storage_timeout", STORAGE_TIMEOUT_RANGE),
            lease=_seconds(lease, "Throttle.lease", LEASE_RANGE),
            fallback=fallback,
            key_prefix=_key_prefix(key_prefix),
            max_keys=check_count(max_keys, "Throttle.max_keys", *MAX_KEYS_RANGE),
        )
        self.check_waits(self.global_concurrency, "Throttle.global_concurrency")
        self.check_waits(self.default_concurrency, "Throttle.default_concurrency")

    @classmethod
    def of(cls, value: object, field: str = "throttle") -> Throttle | None:
        """The throttle that an option names (see `ThrottleOption`), or `None` if none was given.

        Args:
            value: What was given.
            field: The option's name, for errors.

        Raises:
            ConfigurationError: It is nothing of that kind or a bad value.
        """
        if value is None:
            return None
        if isinstance(value, bool):
            return cls(enabled=value)
        return _instance(cls, value, field, otherwise="True, False, ")

    def check_waits(self, limits: Iterable[Concurrency], field: str) -> None:
        """Refuse limits that let a call wait for ever under this throttle.

        A `queue_timeout` of `None` leaves it to admission how long a call waits, so without admission nothing
        would bound the wait. Where nobody waits (`enabled=False` or `mode="observe"`), everything is allowed.

        Args:
            limits: Concurrency limits that are in force together with this throttle.
            field: Where they stand, for the error.

        Raises:
            ConfigurationError: One of them waits as long as admission lets it, and admission is off.
        """
        if self.admission is not None or not self.enabled or self.mode == "observe":
            return
        if any(limit.queue_timeout is None and limit.max_concurrent for limit in limits):
            raise ConfigurationError(
                f"{field}: queue_timeout None is not allowed with admission off, since nothing would bound "
                "the wait; give seconds, or an admission"
            )


ThrottleOption: TypeAlias = Throttle | bool | Mapping[str, object] | None
"""What the option `throttle` takes: a `Throttle`, a mapping of its fields, `True` for its defaults, or
`False` to turn limits off. `None`: nothing was said."""


def _keyless(value: object, field: str) -> tuple[Concurrency, ...]:
    limits = concurrency_limits(value, field)
    for limit in limits:
        if limit.key is not None:
            raise ConfigurationError(
                f"{field}: the key {limit.key!r} is not allowed; give limits without a key, "
                "since only a tool can share its slots by name"
            )
    return limits


def _storage(value: object) -> str | None:
    if value is None or (isinstance(value, str) and re.match(r"[a-z][a-z0-9+.-]*://", value)):
        return value
    shown = re.sub(r".*@", "***@", value) if isinstance(value, str) else value  # a password may stand there
    raise not_allowed("Throttle.storage", shown, "None or a URI such as 'redis://localhost:6379/0'")


def _key_prefix(value: object) -> str:
    prefix = check_text(value, "Throttle.key_prefix")
    if re.search(r"[\s{}]", prefix):
        raise not_allowed("Throttle.key_prefix", prefix, "text without blanks and braces")
    return prefix
