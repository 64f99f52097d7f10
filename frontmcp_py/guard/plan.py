"""What a tool's calls are asked: its own limits or the defaults, and the globals, bound once.

A plan is made when a tool is registered, so that a call only looks things up. Limits that share a slot must
agree about it, and a disagreement is found here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from frontmcp_py.call import Call
from frontmcp_py.errors import ConfigurationError
from frontmcp_py.policy import (
    Concurrency,
    PartitionBy,
    Policy,
    Priority,
    RateLimit,
    Throttle,
    Timeout,
    Unset,
)
from frontmcp_py.scheduler import Pool, Scheduler, Slot
from frontmcp_py.storage import RateRule, WindowCounts

from .events import Row
from .partition import EVERYBODY, subject
from .rates import BoundRate, bind_rates

T = TypeVar("T")

Needs: TypeAlias = tuple[Sequence[tuple[RateRule, str]], tuple[Slot, ...]]
"""The counts that a call is looked up and counted in, and the slots that it takes."""

GLOBAL = ("global",)
"""The slot of global concurrency; tools and keys are told apart from it by their length."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that are in force for one tool: what it declares, else the server's defaults."""

    rates: tuple[RateLimit, ...]
    slots: tuple[Concurrency, ...]
    timeout: Timeout | None
    global_rates: tuple[RateLimit, ...]
    global_slots: tuple[Concurrency, ...]

    @classmethod
    def of(cls, policy: Policy, throttle: Throttle | None, *, as_if_enabled: bool = False) -> Limits:
        """What is in force for a tool of this policy under this throttle.

        Without a throttle a tool's own limits hold; a disabled one leaves only the tool's own timeout.
        """
        enabled = throttle is None or throttle.enabled or as_if_enabled
        preset = throttle if enabled and policy.priority != "control" else None
        own = enabled
        return cls(
            rates=_first(policy.rate_limits, preset.default_rate_limit if preset else ()) if own else (),
            slots=_first(policy.concurrency_limits, preset.default_concurrency if preset else ())
            if own
            else (),
            timeout=_first(policy.deadline, preset.default_timeout if preset else None),
            global_rates=preset.global_rate_limit if preset else (),
            global_slots=preset.global_concurrency if preset else (),
        )

    def waiting_at_most(self, seconds: float) -> Limits:
        """The same limits, with waits that end when admission's does."""

        def capped(slots: tuple[Concurrency, ...]) -> tuple[Concurrency, ...]:
            return tuple(
                slot
                if slot.queue_timeout is not None and slot.queue_timeout <= seconds
                else replace(slot, queue_timeout=seconds)
                for slot in slots
            )

        return replace(self, slots=capped(self.slots), global_slots=capped(self.global_slots))


def _first(own: T | Unset, preset: T) -> T:
    return preset if isinstance(own, Unset) else own


class BoundSlot:
    """One concurrency limit where it applies.

    Attributes:
        limit: The limit.
        name: What its slots are known by, before the subject.
        scope: `tool`, `key` or `global`.
    """

    __slots__ = ("everybody", "limit", "name", "scope")

    def __init__(
        self, limit: Concurrency, name: tuple[object, ...], scope: str, scheduler: Scheduler
    ) -> None:
        self.limit: Concurrency = limit
        self.name: tuple[object, ...] = name
        self.scope: str = scope
        self.everybody: Slot | None = None
        if limit.partition_by == "global":
            self.everybody = scheduler.slot((*name, EVERYBODY), limit.max_concurrent, lasting=True)

    def key(self, call: Call) -> tuple[object, ...]:
        """What the slot that `call` needs is known by."""
        return (*self.name, subject(self.limit.partition_by, call))


class Plan:
    """Everything that is fixed about a tool's calls.

    Attributes:
        tool: The tool's name.
        rates: Its rate limits, the global ones first.
        slots: Its concurrency limits, the global one first.
        pools: Admission and worker threads, as far as it needs them.
        control: Whether it may use reserved places.
        timeout_s: Seconds it may run, if bounded.
        cancel_after_s: Seconds after the deadline at which its task is cancelled too.
        cancels: Whether a cancelled call cancels its task, or only aborts its signal.
        row: Where its calls are counted.
        nested: The plan of its nested calls: without globals and admission.
        everybody: What all its calls need alike, when nothing is partitioned.
    """

    __slots__ = (
        "cancel_after_s",
        "cancels",
        "control",
        "everybody",
        "nested",
        "pools",
        "rates",
        "row",
        "slots",
        "timeout_s",
        "tool",
    )

    def __init__(
        self,
        tool: str,
        rates: tuple[BoundRate, ...],
        slots: tuple[BoundSlot, ...],
        pools: tuple[Pool, ...],
        *,
        timeout: Timeout | None,
        control: bool,
        cancels: bool,
        row: Row,
    ) -> None:
        self.tool: str = tool
        self.rates: tuple[BoundRate, ...] = rates
        self.slots: tuple[BoundSlot, ...] = slots
        self.pools: tuple[Pool, ...] = pools
        self.control: bool = control
        self.cancels: bool = cancels
        self.row: Row = row
        self.nested: Plan = self
        self.timeout_s: float | None = timeout.execute if timeout else None
        self.cancel_after_s: float | None = timeout.cancel_after if timeout else None
        self.everybody: Needs | None = _for_everybody(rates, slots)

    def needs(self, call: Call, scheduler: Scheduler) -> Needs:
        """The counts and the slots of one call; where nothing is partitioned, `everybody` holds them.

        Raises:
            PartitionError: A partition function failed.
        """
        rates = tuple((rate, rate.key(call)) for rate in self.rates)
        # All keys first: a partition function that fails must leave no slot behind.
        keys = [(slot.key(call), slot.limit.max_concurrent) for slot in self.slots]
        return rates, tuple(scheduler.slot(key, capacity) for key, capacity in keys)

    @property
    def priority(self) -> Priority:
        """Whether its calls are control calls."""
        return "control" if self.control else "normal"

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the slots that it shares with others."""
        return tuple(str(slot.name[0]) for slot in self.slots if slot.scope == "key")

    @property
    def is_partitioned(self) -> bool:
        """Whether it matters who calls."""
        return self.everybody is None


def _for_everybody(rates: Iterable[BoundRate], slots: Iterable[BoundSlot]) -> Needs | None:
    """The needs of every call alike, when nothing is partitioned."""
    pairs: list[tuple[RateRule, str]] = []
    places: list[Slot] = []
    for rate in rates:
        if rate.everybody is None:
            return None
        pairs.append((rate, rate.everybody))
    for slot in slots:
        if slot.everybody is None:
            return None
        places.append(slot.everybody)
    return tuple(pairs), tuple(places)


class Plans:
    """Makes plans, and sees to it that everybody who shares a slot agrees about it."""

    def __init__(
        self,
        throttle: Throttle | None,
        counts: WindowCounts,
        scheduler: Scheduler,
        admission: Pool | None,
        threads: Pool,
    ) -> None:
        self._throttle = throttle
        self._counts = counts
        self._scheduler = scheduler
        self._admission = admission
        self._threads = threads
        self._declared: dict[str, list[tuple[str, Concurrency]]] = {}
        self._global_rates: tuple[BoundRate, ...] | None = None
        self.made: dict[str, Plan] = {}
        """The plan of each tool that is served."""

    def keys(self) -> dict[str, Slot]:
        """The slots that tools share by key, where everybody shares one."""
        return {
            str(bound.name[0]): bound.everybody
            for plan in self.made.values()
            for bound in plan.slots
            if bound.scope == "key" and bound.everybody is not None
        }

    def make(self, tool: str, policy: Policy, *, threads: bool, cancels: bool, row: Row) -> Plan:
        """Bind a tool's limits.

        Raises:
            ConfigurationError: It disagrees with another tool about a shared slot, or nothing would bound
                how long its calls may wait.
        """
        limits = Limits.of(policy, self._throttle)
        if self._throttle is not None:
            self._throttle.check_waits(limits.slots, f'tool "{tool}": concurrency')
        # Whatever may be refused comes before anything is remembered.
        named_slots = _name_slots(tool, limits.slots)
        self.declare(tool, policy)
        own_rates = bind_rates(limits.rates, tool, self._counts)
        own_slots = tuple(
            BoundSlot(limit, name, "tool" if limit.key is None else "key", self._scheduler)
            for name, limit in named_slots
        )
        worker = (self._threads,) if threads else ()
        control = policy.priority == "control"

        def plan(rates: tuple[BoundRate, ...], slots: tuple[BoundSlot, ...], pools: tuple[Pool, ...]) -> Plan:
            return Plan(
                tool, rates, slots, pools, timeout=limits.timeout, control=control, cancels=cancels, row=row
            )

        admission = (self._admission,) if self._admission else ()
        made = plan(
            self._bind_global_rates(limits) + own_rates,
            self._bind_global_slots(limits) + own_slots,
            admission + worker,
        )
        made.nested = plan(own_rates, own_slots, worker)
        self.made[tool] = made
        return made

    def declare(self, tool: str, policy: Policy) -> None:
        """Hear what a tool says about the slots that it shares, whether it is served or not.

        Raises:
            ConfigurationError: Another tool says something else.
        """
        # A disagreement must not hide while limits are switched off.
        declared = Limits.of(policy, self._throttle, as_if_enabled=True).slots
        self._agree(tool, _declarations(tool, declared))

    def forget(self, tool: str) -> None:
        """A tool is gone: its declarations bind nobody any more."""
        self.made.pop(tool, None)
        for declared in self._declared.values():
            declared[:] = [each for each in declared if each[0] != tool]

    def _bind_global_rates(self, limits: Limits) -> tuple[BoundRate, ...]:
        if not limits.global_rates:
            return ()
        if self._global_rates is None:
            self._global_rates = bind_rates(limits.global_rates, None, self._counts)
        return self._global_rates

    def _bind_global_slots(self, limits: Limits) -> tuple[BoundSlot, ...]:
        return tuple(
            BoundSlot(limit, (*GLOBAL, nth, None), "global", self._scheduler)
            for nth, limit in enumerate(limits.global_slots)
            if limit.max_concurrent
        )

    def _agree(self, tool: str, declarations: Sequence[tuple[str, Concurrency]]) -> None:
        for name, limit in declarations:
            others = self._declared.get(name, [])
            for other, theirs in others:
                if _numbers(theirs) != _numbers(limit):
                    everybody = ", ".join(
                        f'"{each}"' for each in sorted({tool, *(each for each, _ in others)})
                    )
                    raise ConfigurationError(
                        f'concurrency key "{name}": tools {everybody} disagree about it: '
                        f'"{other}" says {_describe(theirs)}, "{tool}" says {_describe(limit)}; '
                        "all declarations of a key must give the same max_concurrent and partition_by"
                    )
        for name, limit in declarations:
            declared = self._declared.setdefault(name, [])
            if all(other != tool for other, _ in declared):
                declared.append((tool, limit))


def _name_slots(tool: str, limits: Sequence[Concurrency]) -> list[tuple[tuple[str, int], Concurrency]]:
    """What the slots of these limits are known by."""
    named: dict[tuple[str, int], Concurrency] = {}
    nth = 0
    for limit in limits:
        if limit.key is None:
            name = (tool, nth)
            nth += 1
        else:
            name = (limit.key, 0)
        if not limit.max_concurrent:
            continue
        if name in named:
            raise ConfigurationError(f'tool "{tool}": concurrency names the slot "{name[0]}" twice')
        named[name] = limit
    return list(named.items())


def _declarations(tool: str, limits: Sequence[Concurrency]) -> list[tuple[str, Concurrency]]:
    """The names whose slots these limits say something about: keys, and the tool's own name."""
    declared = [(limit.key, limit) for limit in limits if limit.key is not None]
    first = next((limit for limit in limits if limit.key is None), None)
    return [*declared, (tool, first)] if first is not None else declared


def _numbers(limit: Concurrency) -> tuple[int, PartitionBy]:
    return limit.max_concurrent, limit.partition_by


def _describe(limit: Concurrency) -> str:
    partition = limit.partition_by
    if callable(partition):
        name = getattr(partition, "__qualname__", repr(partition))
        return (
            f"max_concurrent={limit.max_concurrent}, partition_by={name} (the function at {id(partition):#x})"
        )
    name = partition
    return f"max_concurrent={limit.max_concurrent}, partition_by={name}"
