"""A plain model of how a host runs batches, random batches, and a player that runs them through a real host.

The model knows nothing of tasks: it looks through all entries for what happens next, and follows the rules
as they are written. Moments are random enough that no two things happen at one of them by chance.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from random import Random
from typing import Any, Final

from frontmcp_py.host import (
    Batch,
    BatchHandle,
    Complete,
    Decision,
    Host,
    Run,
    Skip,
    State,
    ToolCall,
    ToolResult,
)

PARKED: Final = "Cancelled before it ran."
STOPPED: Final = "Cancelled while it ran, so part of it may have happened. Check before calling again."
WITHHELD: Final = "The tool has run. Its result is withheld"

Outcome = tuple[str, str]
"""The status and text of a result."""


# ------------------------------------------------------------------------------------------------ what is run


@dataclass(frozen=True)
class Part:
    """A call, or an operation of one: what happens with it when nobody interferes. Times in seconds."""

    label: str
    tool: str
    works: tuple[float, ...]  # how long the tool works: before its first question, between them, at last
    answers: tuple[float, ...]  # how long people take to answer them
    fails: bool
    lingers: float  # how long it goes on after it was cancelled
    permission: float  # how long people take to decide whether it may run
    decision: str  # run, change, skip, complete, fail (with a known result), break (the hook raises)
    review: float
    judgement: str  # keep, hide, break

    @property
    def arguments(self) -> dict[str, object]:
        return {"as": self.label}

    @property
    def said(self) -> Outcome:
        """What the tool says."""
        if self.fails:
            return "error", f"{self.tool} failed: ValueError: {self.label} is broken"
        return "ok", f"{self.label} is done"

    def reviewed(self) -> Outcome:
        status, text = self.said
        if self.judgement == "hide":
            return status, f"{WITHHELD}."
        return status, f"{WITHHELD}, as reviewing it failed." if self.judgement == "break" else text

    def decided(self) -> Outcome | None:
        return {
            "skip": ("skipped", "Not permitted. It has not run."),
            "complete": ("ok", "it is known"),
            "fail": ("error", "there is no such file"),
            "break": (
                "error",
                f"{self.tool} was not run, as asking for permission failed: OSError: no terminal",
            ),
        }.get(self.decision)


@dataclass(frozen=True)
class Written:
    """A call as the model wrote it. One without parts cannot be read."""

    id: str
    tool: str
    parts: tuple[Part, ...]
    is_fan: bool

    def call(self) -> ToolCall:
        if self.is_fan:
            return ToolCall(self.id, self.tool, {"ops": [part.arguments for part in self.parts]})
        return ToolCall(self.id, self.tool, self.parts[0].arguments)


@dataclass(frozen=True)
class Plan:
    """A batch: when it starts and what stands in it, and when it is cancelled."""

    at: float
    written: tuple[Written, ...]
    cancelled: float = inf
    turns: int = 0  # how many turns of the loop later, within the same moment

    @property
    def calls(self) -> list[ToolCall]:
        return [each.call() for each in self.written]


@dataclass(frozen=True)
class Lane:
    """What holds for a tool."""

    key: str | None
    limit: int
    stops: bool


@dataclass(frozen=True)
class Setting:
    """Everything that is random about a run."""

    lanes: Mapping[str, Lane]
    approves: bool
    reviews: bool
    plans: tuple[Plan, ...]

    @property
    def config(self) -> dict[str, dict[str, object]]:
        config: dict[str, dict[str, object]] = {}
        for tool, lane in self.lanes.items():
            config[tool] = {"fan_out": {"on_error": "stop"} if lane.stops else True}
            if lane.key is not None:
                config[tool]["concurrency"] = {"key": lane.key, "limit": lane.limit}
        return config

    @property
    def parts(self) -> Iterator[Part]:
        for plan in self.plans:
            for written in plan.written:
                yield from written.parts


class Dice:
    """Makes random settings."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        chance = self._rng.random
        self.asks, self.fails, self.lingers = chance() * 0.5, chance() * 0.4, chance() * 0.5
        self.refused, self.judged = chance() * 0.4, chance() * 0.4
        self.fans = chance()
        self.approves, self.reviews = chance() < 0.5, chance() < 0.5
        self.unlimited = chance() * 0.5
        self.stops = chance()

    def lanes(self) -> dict[str, Lane]:
        limits = {key: self._rng.randint(1, 3) for key in ("shared", "one", "two", "three")}
        lanes: dict[str, Lane] = {}
        for tool in ("one", "two", "three", "four"):
            if self._rng.random() < self.unlimited:
                lanes[tool] = Lane(None, 0, stops=False)
            else:
                key = self._rng.choice(["shared", "shared", "one", tool if tool in limits else "two"])
                lanes[tool] = Lane(key, limits[key], stops=self._rng.random() < self.stops)
        return lanes

    def seconds(self, most: float) -> float:
        """At most this long, and never twice the same."""
        # Whole multiples of 10 ns, so that sums can be compared.
        return round(self._rng.uniform(0.001, most), 8)

    def part(self, label: str, tool: str) -> Part:
        chance, choice = self._rng.random, self._rng.choice
        questions = 0 if chance() > self.asks else self._rng.randint(1, 2)
        return Part(
            label,
            tool,
            works=tuple(self.seconds(3) for _ in range(questions + 1)),
            answers=tuple(self.seconds(2) for _ in range(questions)),
            fails=chance() < self.fails,
            lingers=self.seconds(4) if chance() < self.lingers else 0,
            permission=self.seconds(1),
            decision=choice(["change", "skip", "complete", "fail", "break"])
            if chance() < self.refused
            else "run",
            review=self.seconds(2),
            judgement=choice(["hide", "break"]) if chance() < self.judged else "keep",
        )

    def written(self, label: str, tool: str) -> Written:
        if self._rng.random() < 0.05:
            return Written(label, tool, (), is_fan=True)
        if self._rng.random() >= self.fans:
            return Written(label, tool, (self.part(label, tool),), is_fan=False)
        count = self._rng.randint(1, 4)
        return Written(label, tool, tuple(self.part(f"{label}.{n}", tool) for n in range(count)), is_fan=True)

    def plan(self, number: int, cancels: float) -> Plan:
        at = self.seconds(3)
        tools = ["one", "two", "three", "four"]
        count = self._rng.randint(1, 6)
        written = [self.written(f"b{number}c{place}", self._rng.choice(tools)) for place in range(count)]
        cancelled = at + self.seconds(10) if self._rng.random() < cancels else inf
        return Plan(at, tuple(written), cancelled)

    def setting(self, batches: int = 3, cancels: float = 0.4) -> Setting:
        count = self._rng.randint(1, batches)
        # The host counts batches in the order in which they are started.
        plans = sorted((self.plan(number, cancels) for number in range(count)), key=lambda plan: plan.at)
        return Setting(self.lanes(), self.approves, self.reviews, tuple(plans))


class CoarseDice(Dice):
    """Makes settings in which much happens at the same moment, and much takes no time at all."""

    def seconds(self, most: float) -> float:
        return float(self._rng.choice([0, 0, 1, 2]))

    def plan(self, number: int, cancels: float) -> Plan:
        return replace(super().plan(number, cancels), turns=self._rng.randint(0, 9))


# ------------------------------------------------------------------------------------------------- the model


class Entry:
    """Where a part stands in the model."""

    def __init__(self, part: Part, call: Call, order: tuple[int, int]) -> None:
        self.part = part
        self.call = call
        self.order = order
        self.state: State = "queued"
        self.result: Outcome | None = None
        self.asked = 0
        self.wants_prompt = False
        self.is_decided = False
        self.is_parked = False
        self.next = inf  # when its tool has worked, or a cancelled one ends


class Call:
    """A call in the model."""

    def __init__(self, written: Written, batch: int, places: Iterator[int]) -> None:
        self.written = written
        self.batch = batch
        self.entries = [Entry(part, self, (batch, next(places))) for part in written.parts]

    def result(self) -> tuple[Outcome, list[Outcome]]:
        """What it is answered with, and its operations."""
        if not self.entries:
            text = f"{self.written.tool}: ops is empty; give one operation or more. Nothing was run."
            return ("error", text), []
        results = [entry.result for entry in self.entries if entry.result is not None]
        assert len(results) == len(self.entries), "not done"
        if len(results) == 1:
            return results[0], []
        statuses = {status for status, _ in results}
        status = "ok" if "ok" in statuses else statuses.pop() if len(statuses) == 1 else "error"
        return (status, ""), results


class Model:
    """Runs a setting by the rules.

    Args:
        setting: What is run.
        known: The results of parts that are known before it starts, by their label.

    Attributes:
        starts: When each part starts to run, in order.
        asked: Whom people are asked about, and what, in order.
        states: The states of each part, by its label, and when it entered them.
    """

    def __init__(self, setting: Setting, known: Mapping[str, Outcome] | None = None) -> None:
        self.setting = setting
        self.known = dict(known or {})
        self.now = 0.0
        self.starts: list[tuple[float, str]] = []
        self.asked: list[tuple[str, str]] = []
        self.states: dict[str, list[tuple[float, State]]] = {}
        self.batches: list[list[Call]] = [[] for _ in setting.plans]
        self._begun: set[int] = set()
        self._cancelled: set[int] = set()
        self._released: set[int] = set()
        self._queue: list[Entry] = []  # released, in that order, and parked
        self._running: list[Entry] = []  # those who hold a place, or would if their tool had a limit
        self._prompt: tuple[Entry, float] | None = None  # who is asked about, and until when

    def run(self) -> Model:
        """Run it to the end."""
        while (event := self._next()) is not None:
            self.now, happens = event
            happens()
            self._ask()
        return self

    def results(self, batch: int) -> list[tuple[Outcome, list[Outcome]]]:
        return [call.result() for call in self.batches[batch]]

    def _next(self) -> tuple[float, Callable[[], None]] | None:
        """What happens next."""
        events: list[tuple[float, Callable[[], None]]] = []
        for number, plan in enumerate(self.setting.plans):
            if number not in self._begun:
                events.append((plan.at, partial(self._begin, number)))
            elif number not in self._cancelled and plan.cancelled < inf:
                events.append((plan.cancelled, partial(self._cancel, number)))
        if self._prompt is not None:
            events.append((self._prompt[1], self._answered))
        working = [entry for entry in self._running if entry.next < inf]
        events.extend((entry.next, partial(self._worked, entry)) for entry in working)
        return min(events, key=lambda event: event[0], default=None)

    def _entries(self, number: int) -> list[Entry]:
        return [entry for call in self.batches[number] for entry in call.entries]

    def _enter(self, entry: Entry, state: State) -> None:
        entry.state = state
        self.states.setdefault(entry.part.label, []).append((self.now, state))

    def _settle(self, entry: Entry, result: Outcome) -> None:
        entry.result, entry.wants_prompt, entry.is_parked = result, False, False
        if self._prompt is not None and self._prompt[0] is entry:
            self._prompt = None
        self._enter(entry, "completed")

    # -- before it runs

    def _begin(self, number: int) -> None:
        self._begun.add(number)
        places = iter(range(10_000))
        self.batches[number] = [
            Call(written, number, places) for written in self.setting.plans[number].written
        ]
        for entry in self._entries(number):
            entry.result = self.known.get(entry.part.label)
            entry.is_decided = not self.setting.approves or entry.result is not None
            self._enter(entry, "queued" if entry.result is None else "completed")
        for entry in self._entries(number):
            if not entry.is_decided:
                self._enter(entry, "awaiting-permission")
                entry.wants_prompt = True
        self._release(number)

    def _release(self, number: int) -> None:
        """Once everything is approved or settled, in the written order whatever may start."""
        entries = self._entries(number)
        if number in self._released or not all(entry.is_decided for entry in entries):
            return
        self._released.add(number)
        for call in self.batches[number]:
            for entry in call.entries:
                if entry.result is None:
                    entry.is_parked = True
                    self._queue.append(entry)
                elif self._stops(entry, entry.result):
                    self._stop_after(entry)
                    break
        self._start_eligible()

    def _stops(self, entry: Entry, outcome: Outcome) -> bool:
        return self.setting.lanes[entry.part.tool].stops and outcome[0] in ("error", "not_run")

    def _stop_after(self, entry: Entry) -> None:
        """No later operation of its call starts."""
        index = entry.call.entries.index(entry)
        for other in entry.call.entries[index + 1 :]:
            if other.result is None and other not in self._running and other.state == "queued":
                if other in self._queue:
                    self._queue.remove(other)
                self._settle(other, ("not_run", f"not run (stopped after operation {index + 1} failed)"))

    def _start_eligible(self) -> None:
        for entry in list(self._queue):
            lane = self.setting.lanes[entry.part.tool]
            holders = [each for each in self._running if self.setting.lanes[each.part.tool].key == lane.key]
            if lane.key is None or len(holders) < lane.limit:
                # Nobody with its key comes before it: there was no place for them, either.
                self._queue.remove(entry)
                self._running.append(entry)
                entry.is_parked = False
                entry.next = self.now + entry.part.works[0]
                self.starts.append((self.now, entry.part.label))
                self._enter(entry, "running")

    # -- people

    def _ask(self) -> None:
        due = [
            entry
            for number in self._begun
            for entry in self._entries(number)
            if entry.wants_prompt and entry.result is None
        ]
        if self._prompt is None and due:
            entry = min(due, key=lambda each: each.order)
            kinds = {"awaiting-permission": "permission", "awaiting-input": "question"}
            kind = kinds.get(entry.state, "review")
            takes = {
                "permission": entry.part.permission,
                "question": entry.part.answers[entry.asked] if kind == "question" else 0,
                "review": entry.part.review,
            }[kind]
            entry.wants_prompt = False
            self.asked.append((kind, entry.part.label))
            self._prompt = (entry, self.now + takes)

    def _answered(self) -> None:
        assert self._prompt is not None
        entry, _ = self._prompt
        self._prompt = None
        if entry.state == "awaiting-permission":
            entry.is_decided = True
            settled = entry.part.decided()
            if settled is None:
                self._enter(entry, "queued")
            else:
                self._settle(entry, settled)
            self._release(entry.order[0])
        elif entry.state == "awaiting-input":
            entry.asked += 1
            entry.next = self.now + entry.part.works[entry.asked]
            self._enter(entry, "running")
        else:
            self._settle(entry, entry.part.reviewed())

    # -- while it runs

    def _worked(self, entry: Entry) -> None:
        entry.next = inf
        if entry.result is None and entry.asked < len(entry.part.answers):
            self._enter(entry, "awaiting-input")
            entry.wants_prompt = True
            return
        self._running.remove(entry)
        if entry.result is None:
            if self.setting.reviews:
                self._enter(entry, "awaiting-review")
                entry.wants_prompt = True
            else:
                self._settle(entry, entry.part.said)
            if self._stops(entry, entry.part.said):
                self._stop_after(entry)
        self._start_eligible()

    # -- cancelled

    def _cancel(self, number: int) -> None:
        self._cancelled.add(number)
        pending = [entry for entry in self._entries(number) if entry.result is None]
        for entry in pending:
            if entry in self._queue:
                self._queue.remove(entry)
        for entry in pending:
            if entry.state == "awaiting-review":
                result = entry.part.said[0], f"{WITHHELD}, as the batch was cancelled before it was reviewed."
            else:
                result = "cancelled", STOPPED if entry in self._running else PARKED
            self._settle(entry, result)
            entry.is_decided = True
            if entry in self._running:
                if entry.part.lingers:
                    entry.next = self.now + entry.part.lingers
                else:
                    self._running.remove(entry)
        self._released.add(number)
        self._start_eligible()


# ------------------------------------------------------------------------------------------------ the player


class Player:
    """Runs a setting through a real host, and notes what the model notes.

    Args:
        setting: What is run.
        told: Told of every change, after it was noted.
    """

    def __init__(self, setting: Setting, told: Callable[[], None] = lambda: None) -> None:
        self.setting = setting
        self.begin = asyncio.get_running_loop().time()
        self.starts: list[tuple[float, str]] = []
        self.ends: list[tuple[float, str]] = []
        self.asked: list[tuple[str, str]] = []
        self.log: list[tuple[str, str]] = []  # begins, returned or failed (not cancelled), judged: and who
        self.states: dict[str, list[tuple[float, State]]] = {}
        self.holders: dict[str, int] = {}
        self.handles: list[BatchHandle] = []
        self.faults: list[str] = []
        self._parts = {part.label: part for part in setting.parts}
        self._told = told
        self._asking = 0
        # What fails in a callback of the loop is told to nobody else.
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: self.check(False, f"{context['message']}: {context.get('exception')!r}")
        )
        self.host = Host(
            setting.config,
            self._call,
            approve=self._approve if setting.approves else None,
            review=self._review if setting.reviews else None,
            question=self._question,
            on_state=self._on_state,
        )

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time() - self.begin

    async def until(self, moment: float) -> None:
        await asyncio.sleep(moment - self.now)

    async def play(self, plan: Plan) -> list[ToolResult]:
        """Run one batch, and cancel it when it is to be."""
        await self.until(plan.at)
        handle = self.host.start(plan.calls)
        self.handles.append(handle)
        if plan.cancelled < inf:
            await self.until(plan.cancelled)
            for _ in range(plan.turns):
                await asyncio.sleep(0)
            handle.cancel()
        results = await handle.results()
        await handle.ended()
        return results

    async def play_all(self) -> list[list[ToolResult]]:
        return list(await asyncio.gather(*[self.play(plan) for plan in self.setting.plans]))

    def check(self, holds: bool, fault: str) -> None:
        """An error that a tool or a hook raises would be a result like any other."""
        if not holds:
            self.faults.append(f"{fault} at {self.now}")

    def _part(self, call: ToolCall) -> Part:
        return self._parts[str(call.arguments["as"])]

    def _on_state(self, call: ToolCall, state: State) -> None:
        if "as" in call.arguments:
            self.states.setdefault(str(call.arguments["as"]), []).append((self.now, state))
        self._told()

    async def _think(self, kind: str, call: ToolCall, seconds: float) -> None:
        self.asked.append((kind, self._part(call).label))
        self._asking += 1
        self.check(self._asking == 1, "people are asked two things at once")
        try:
            await asyncio.sleep(seconds)
        finally:
            self._asking -= 1

    async def _approve(self, call: ToolCall) -> Decision:
        part = self._part(call)
        await self._think("permission", call, part.permission)
        if part.decision == "break":
            raise OSError("no terminal")
        decisions: dict[str, Decision] = {
            "run": True,
            "change": Run({**call.arguments, "changed": True}),
            "skip": Skip(),
            "complete": Complete("it is known"),
            "fail": Complete(ToolResult.saying(call, "error", "there is no such file")),
        }
        return decisions[part.decision]

    async def _question(self, call: ToolCall | None, request: object) -> object:
        assert call is not None
        assert isinstance(request, int)
        await self._think("question", call, self._part(call).answers[request])
        return request

    async def _review(self, call: ToolCall, result: ToolResult) -> bool | None:
        part = self._part(call)
        self.check((result.status, result.text) == part.said, "another result is reviewed than the tool's")
        await self._think("review", call, part.review)
        self.log.append(("judged", part.label))
        if part.judgement == "break":
            raise OSError("no terminal")
        return False if part.judgement == "hide" else None

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        part = self._parts[arguments["as"]]
        changed = {"changed": True} if self.setting.approves and part.decision == "change" else {}
        self.check(part.tool == tool, "another tool is called")
        self.check(arguments == {**part.arguments, **changed}, "it is called with other arguments")
        lane = self.setting.lanes[tool]
        self.starts.append((self.now, part.label))
        self.log.append(("begins", part.label))
        if lane.key is not None:
            self.holders[lane.key] = self.holders.get(lane.key, 0) + 1
            self.check(self.holders[lane.key] <= lane.limit, "more run at once than the limit allows")
        try:
            return await self._work(part)
        finally:
            if lane.key is not None:
                self.holders[lane.key] -= 1
            self.ends.append((self.now, part.label))

    async def _work(self, part: Part) -> str:
        try:
            await asyncio.sleep(part.works[0])
            for index, work in enumerate(part.works[1:]):
                self.check(await self.host.ask(index) == index, "the answer is that of another question")
                await asyncio.sleep(work)
        except asyncio.CancelledError:
            if not part.lingers:
                raise
            await asyncio.sleep(part.lingers)
        else:
            self.log.append(("failed" if part.fails else "returned", part.label))
        if part.fails:
            raise ValueError(f"{part.label} is broken")
        return f"{part.label} is done"


# --------------------------------------------------------------------------------------------- comparing them


def rounded(noted: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    return [(round(moment, 8), what) for moment, what in noted]


def outcomes(results: Sequence[ToolResult]) -> list[tuple[Outcome, list[Outcome]]]:
    """The results as the model has them."""
    return [
        (
            (each.status, "" if each.operations else each.text),
            [(operation.status, operation.text) for operation in each.operations],
        )
        for each in results
    ]


async def check_against_model(seed: int) -> None:
    """Run a random setting through a host and through the model, which have to agree on everything."""
    setting = Dice(seed).setting()
    player, model = Player(setting), Model(setting).run()
    results = await player.play_all()
    about = f"seed {seed}"
    assert player.faults == [], about
    for number, told in enumerate(results):
        assert outcomes(told) == model.results(number), about
        assert [each.id for each in told] == [each.id for each in setting.plans[number].written], about
    assert sorted(rounded(player.starts)) == sorted(rounded(model.starts)), about
    # A cancellation may free several places at once, and their order is nobody's business ...
    if all(plan.cancelled == inf for plan in setting.plans):
        assert [label for _, label in player.starts] == [label for _, label in model.starts], about
    for key in {lane.key for lane in setting.lanes.values()}:
        # ... but that of those who wait for one of them.
        tools = [tool for tool, lane in setting.lanes.items() if lane.key == key and key is not None]
        labels = {part.label for part in setting.parts if part.tool in tools}
        mine = [label for _, label in player.starts if label in labels]
        assert mine == [label for _, label in model.starts if label in labels], about
    assert player.asked == model.asked, about
    assert {label: rounded(noted) for label, noted in player.states.items()} == {
        label: rounded(noted) for label, noted in model.states.items()
    }, about
    assert sorted(label for _, label in player.ends) == sorted(label for _, label in player.starts), about
    assert player.host.lanes.is_idle, about


async def check_rules(seed: int) -> None:
    """Run a random setting in which much happens at once: no model knows in which order, but rules hold.

    That no more run at once than may, and that people are asked one thing at a time, the player sees to.
    """
    setting = CoarseDice(seed).setting()
    player = Player(setting)
    watching = asyncio.create_task(_watch(player))
    results = await player.play_all()
    watching.cancel()
    about = f"seed {seed}"
    assert player.faults == [], about
    started = [label for _, label in player.starts]
    assert len(set(started)) == len(started), about
    assert sorted(label for _, label in player.ends) == sorted(started), about
    for plan, told in zip(setting.plans, results, strict=True):
        assert [each.id for each in told] == [each.id for each in plan.written], about
        parts = [part for written in plan.written for part in written.parts]
        for key in {lane.key for lane in setting.lanes.values()}:
            mine = [part.label for part in parts if setting.lanes[part.tool].key == key]
            assert [label for label in started if label in mine] == [
                label for label in mine if label in started
            ], about
        for written, (whole, operations) in zip(plan.written, outcomes(told), strict=True):
            if written.parts:
                _check_outcomes(setting, written, operations or [whole], player.log, about)
    for states in player.states.values():
        assert [state for _, state in states].count("completed") == 1, about
        assert states[-1][1] == "completed", about
    assert player.host.lanes.is_idle, about


def _check_outcomes(
    setting: Setting, written: Written, told: Sequence[Outcome], log: Sequence[tuple[str, str]], about: str
) -> None:
    """What the parts of a call did, and what is told of them, agree."""
    happened = set(log)
    for part, outcome in zip(written.parts, told, strict=True):
        begins = ("begins", part.label) in happened
        assert (outcome[0] in ("skipped", "not_run")) <= (not begins), about
        if happened & {("returned", part.label), ("failed", part.label)}:
            # What has ended by itself is never called cancelled, whatever else happens at that moment.
            assert outcome[0] == part.said[0], about
            assert setting.reviews or outcome == part.said, about
            assert ("judged", part.label) not in happened or outcome == part.reviewed(), about
    if written.is_fan and setting.lanes[written.tool].stops:
        for index, part in enumerate(written.parts):
            decided = ("begins", part.label) not in happened and told[index][0] == "error"
            if decided or ("failed", part.label) in happened:
                since = -1 if decided else log.index(("failed", part.label))
                later = [("begins", other.label) for other in written.parts[index + 1 :]]
                assert not set(later) & set(log[since + 1 :]), about


async def _watch(player: Player) -> None:
    """Between the moments at which things happen: nobody waits for a place that is free."""
    while True:
        await asyncio.sleep(0.25)
        for handle in player.handles:
            entries = handle.entries
            if any(entry.state == "awaiting-permission" for entry in entries):
                continue
            for entry in entries:
                if entry.state == "queued":
                    lane = player.setting.lanes[entry.call.name]
                    is_full = lane.key is not None and player.holders.get(lane.key, 0) == lane.limit
                    player.check(is_full, f"{entry.call.label} waits for a place that is free")
        await asyncio.sleep(0.75)


# ------------------------------------------------------------------------------------- batches within batches


class Nest:
    """Calls whose tools start batches, whose tools start batches.

    Args:
        seed: What the batches are made of.
    """

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self.limits = {tool: self._rng.randint(0, 2) for tool in "tuv"}
        self.about = f"seed {seed}"
        self.running: dict[str, int] = {}
        self.refused = 0
        self.faults: list[str] = []
        self.host = Host({tool: {"concurrency": limit} for tool, limit in self.limits.items()}, self._call)

    def calls(self, depth: int) -> list[ToolCall]:
        return [
            ToolCall(f"{depth}.{number}", self._rng.choice("tuv"), self._arguments(depth))
            for number in range(self._rng.randint(1, 3))
        ]

    def _arguments(self, depth: int) -> dict[str, object]:
        count = self._rng.choice([0, 1, 1, 2]) if depth < 3 else 0
        return {
            "takes": self._rng.choice([0, 0, 1, 2]),
            "batches": [self.calls(depth + 1) for _ in range(count)],
            "together": self._rng.random() < 0.5,
        }

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> None:
        self.running[tool] = self.running.get(tool, 0) + 1
        if self.running[tool] > self.limits[tool] > 0:
            self.faults.append(f"{self.running[tool]} of {tool} run at once")
        try:
            await asyncio.sleep(arguments["takes"])
            batches = arguments["batches"]
            if arguments["together"]:
                for results in await asyncio.gather(*[self.host.run(batch) for batch in batches]):
                    self._count(results)
            else:
                for batch in batches:
                    self._count(await self.host.run(batch))
        finally:
            self.running[tool] -= 1

    def _count(self, results: Sequence[ToolResult]) -> None:
        for result in results:
            if result.status == "error" and "it would wait for itself" in result.text:
                self.refused += 1
            elif result.status != "ok":
                self.faults.append(f"{result.status}: {result.text}")

    async def run(self) -> int:
        """Run it to its end, which it must have.

        Returns:
            How many calls were refused, as they would have waited for themselves.
        """
        handles = [self.host.start(self.calls(0)) for _ in range(2)]
        async with asyncio.timeout(10_000):
            for handle in handles:
                # Calls that no other has started cannot wait for themselves.
                assert {each.status for each in await handle.results()} == {"ok"}, self.about
        assert self.faults == [], self.about
        assert self.host.lanes.is_idle, self.about
        return self.refused


# ------------------------------------------------------------------------------------------------- restarting


class Restarts:
    """Runs one batch, and resumes it after every change, each time on a new host, while the first goes on.

    Args:
        seed: What the batch is made of.
        as_messages: Whether what is known goes through messages of a provider, which tell success from
            failure and nothing else; otherwise through plain data.
        one_id: Whether all calls of the batch have one id.
    """

    def __init__(self, seed: int, *, as_messages: bool = False, one_id: bool = False) -> None:
        self.about = f"seed {seed}"
        self.setting = Dice(seed).setting(batches=1, cancels=0.2)
        (plan,) = self.setting.plans
        if one_id:
            plan = replace(plan, written=tuple(replace(each, id="x") for each in plan.written))
            self.setting = replace(self.setting, plans=(plan,))
        self.plan = plan
        self.as_messages = as_messages
        self._seen: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Run it all.

        Returns:
            How often the batch was resumed.
        """
        player = Player(self.setting, self._changed)
        await player.until(self.plan.at)
        self._handle = player.host.start(self.plan.calls)
        if self.plan.cancelled < inf:
            await player.until(self.plan.cancelled)
            self._handle.cancel()
        results = await self._handle.results()
        for task in self._tasks:
            await task
        await self._handle.ended()
        # The first run has not been disturbed.
        assert outcomes(results) == Model(self.setting).run().results(0), self.about
        return len(self._tasks)

    def _changed(self) -> None:
        text = self._transcript()
        if text not in self._seen:
            self._seen.add(text)
            known = {
                str(entry.call.arguments["as"]): self._as_known(entry.result)
                for entry in self._handle.entries
                if entry.result is not None and "as" in entry.call.arguments
            }
            self._tasks.append(asyncio.create_task(self._resume(text, known)))

    def _transcript(self) -> str:
        """What a host would have written down by now."""
        results = self._handle.results_so_far()
        if self.as_messages:
            return json.dumps([each.to_anthropic() for each in results])
        return json.dumps([each.as_dict() for each in results])

    def _read(self, text: str) -> list[ToolResult]:
        if self.as_messages:
            return ToolResult.from_anthropic({"role": "user", "content": json.loads(text)})
        return [ToolResult.from_dict(each) for each in json.loads(text)]

    def _as_known(self, result: ToolResult) -> Outcome:
        status = "error" if self.as_messages and result.is_error else result.status
        return status, result.text

    async def _resume(self, text: str, known: Mapping[str, Outcome]) -> None:
        setting = replace(self.setting, plans=(replace(self.plan, at=0, cancelled=inf),))
        player, model = Player(setting), Model(setting, known).run()
        told = await player.host.run(Batch.resume(self.plan.calls, self._read(text)))
        assert [each.id for each in told] == [each.id for each in self.plan.written], self.about
        assert [each.name for each in told] == [each.tool for each in self.plan.written], self.about
        for written, mine, expected in zip(self.plan.written, outcomes(told), model.results(0), strict=True):
            if (
                self.as_messages
                and len(written.parts) > 1
                and known.keys() >= {part.label for part in written.parts}
            ):
                # The operations of a call that was complete are text now.
                assert mine[0][0] == expected[0][0], self.about
            else:
                assert mine == expected, self.about
        assert rounded(player.starts) == rounded(model.starts), self.about
        assert not {label for _, label in player.starts} & known.keys(), self.about
        assert player.asked == model.asked, self.about
        assert player.faults == [], self.about
