"""What several processes say that they did, and whether it kept every promise about shared slots.

Each process writes down, one JSON object a line, when a call asked, stood in line, began, ended, lost its
lease and was answered, by the clock that all processes of a machine share (`CLOCK_MONOTONIC`). Whoever stops,
kills and cuts off processes writes that down, too. From these lines alone the functions here tell what went
wrong.

**Who counts.** A call holds its slots from the moment its body began, which lies after the store's grant, to
the first of these:

* its body ended, which lies before its release;
* its signal was aborted with `LEASE_LOST`;
* its process was killed;
* its process began to stand still, or to be cut off from the store, for half a lease or longer. Leases are
  renewed three times in their life, so one that was alive then had half of it left at least; after that it
  may have ended, and the call counts no more, even if it was lucky. Spells with less than a quarter of a
  lease between them are one spell.

A call that begins after such a spell counts in full.
"""

from __future__ import annotations

import bisect
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

EVERYBODY: Final = "*"
"""Stands for all processes: what happens to the store happens to each of them."""

ANSWERS: Final = frozenset({"ok", "cancelled", "GUARD_STORAGE_UNAVAILABLE", "LEASE_LOST"})
"""What a caller may be told who is patient, and whose process lives."""


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        at: When, in seconds.
        who: The process, or `EVERYBODY`.
        what: `asked`, `queued`, `began`, `ended`, `lost`, `answered` of a call; `killed`, `stopped`,
            `went on` of a process; `still`: from `since` until `at` it did nothing, or reached nobody.
        call: The call, if it is about one.
        tool: What it called.
        code: What it was answered.
        since: When a spell began.
        is_narrow: Whether its process may lack a place for a call whose turn has come, so that it is passed.
    """

    at: float
    who: str
    what: str
    call: str = ""
    tool: str = ""
    code: str = ""
    since: float = 0.0
    is_narrow: bool = False


@dataclass
class Held:
    """A call that held its slots for some time."""

    call: str
    tool: str
    since: float
    until: float


@dataclass
class _Story:
    """One call."""

    who: str = ""
    tool: str = ""
    is_narrow: bool = False
    at: dict[str, float] = field(default_factory=dict[str, float])
    code: str = ""


@dataclass(frozen=True)
class Rules:
    """What was promised.

    Attributes:
        slots: How many calls may hold each slot at once.
        tools: The slots that a call of each tool takes.
        lease: Seconds.
    """

    slots: Mapping[str, int]
    tools: Mapping[str, Sequence[str]]
    lease: float


class History:
    """The events of one run, in any order."""

    def __init__(self, events: Iterable[Event], rules: Rules) -> None:
        self.events: list[Event] = sorted(events, key=lambda event: event.at)
        self._rules = rules
        self._stories: dict[str, _Story] = defaultdict(_Story)
        self._killed = {event.who: event.at for event in self.events if event.what == "killed"}
        for event in self.events:
            if event.call:
                self._tell(event)
        self._spells = {who: self._spells_of(who) for who in {story.who for story in self._stories.values()}}

    @classmethod
    def read(cls, files: Iterable[Path], rules: Rules, more: Iterable[Event] = ()) -> History:
        """What the processes wrote. A line that a killed process did not finish is left out."""
        events = list(more)
        for file in files:
            whole = file.read_text().rpartition("\n")[0]
            events += [Event(**json.loads(line)) for line in whole.splitlines()]
        return cls(events, rules)

    def violations(self) -> list[str]:
        """Every broken promise that can be proved, as sentences."""
        return [*self.over_the_limit(), *self.not_served(), *self.overtaken()]

    # -- never over a limit ---------------------------------------------------------------------

    def held(self) -> list[Held]:
        """Who held slots, as far as that is certain."""
        holders = []
        for call, story in self._stories.items():
            began = story.at.get("began")
            if began is None:
                continue
            ends = [story.at[what] for what in ("ended", "lost") if what in story.at]
            ends += [at for at in (self._killed.get(story.who),) if at is not None]
            ends += [since for since, until in self._spells[story.who] if until > began]
            until = min([end for end in ends if end > began], default=began)
            if not any(since <= began < until for since, until in self._spells[story.who]):
                holders.append(Held(call, story.tool, began, until if ends else self.events[-1].at))
        return holders

    def over_the_limit(self) -> list[str]:
        """More calls held a slot than it has places."""
        moments: dict[str, list[tuple[float, int, str]]] = defaultdict(list)
        for holder in self.held():
            for slot in self._rules.tools[holder.tool]:
                moments[slot] += [(holder.since, 1, holder.call), (holder.until, 0, holder.call)]
        found = []
        for slot, changes in moments.items():
            here: set[str] = set()
            for at, comes, call in sorted(changes):
                if comes:
                    here.add(call)
                else:
                    here.discard(call)
                if len(here) > self._rules.slots[slot]:
                    found.append(f"{sorted(here)} hold {slot} at {at:.4f}, of {self._rules.slots[slot]}")
        return found

    # -- everybody is served --------------------------------------------------------------------

    def not_served(self) -> list[str]:
        """Calls of living processes that got no answer, or one that a patient caller never gets."""
        found = []
        for call, story in self._stories.items():
            if story.who in self._killed:
                continue
            if not story.code:
                found.append(f"{call} ({story.tool}) was never answered")
            elif story.code not in ANSWERS:
                found.append(f"{call} ({story.tool}) was answered {story.code}")
            if "began" in story.at and "ended" not in story.at:
                found.append(f"{call} ({story.tool}) never ended")
        return found

    # -- first come, first served ---------------------------------------------------------------

    def overtaken(self) -> list[str]:
        """Calls that began before one that had stood in line when they asked.

        That is certain for a slot of one place: the first of its line keeps it. It is not for a call whose
        process stood still meanwhile (it may have lost its place), or lacks places of its own.
        """
        found = []
        for slot, capacity in self._rules.slots.items():
            if capacity != 1:
                continue
            here = {
                call: story for call, story in self._stories.items() if slot in self._rules.tools[story.tool]
            }
            later = sorted((story.at["asked"], call) for call, story in here.items() if "began" in story.at)
            for first, story in here.items():
                end = self._left_line(story)
                if end is None:
                    continue
                for asked, second in later[bisect.bisect(later, (story.at["queued"], "~")) :]:
                    if asked >= end:
                        break
                    if here[second].at["began"] < end:
                        found.append(f"{second} overtook {first} in the line of {slot}")
        return found

    def _left_line(self, story: _Story) -> float | None:
        """Until when a call was in line for certain; `None`: it is not certain that it was."""
        if "queued" not in story.at or story.is_narrow:
            return None
        ends = [story.at[what] for what in ("began", "answered") if what in story.at]
        if not ends or story.who in self._killed:
            return None
        # From when it asked: the answer that it stands in line may lie unread while its process stands still.
        since, until = story.at["asked"], min(ends)
        if any(begin < until and since < end for begin, end in self._spells[story.who]):
            return None
        return until

    # -- parts ----------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        story = self._stories[event.call]
        story.who = event.who
        story.tool = event.tool or story.tool
        story.is_narrow = story.is_narrow or event.is_narrow
        story.code = event.code or story.code
        story.at.setdefault(event.what, event.at)

    def _spells_of(self, who: str) -> list[tuple[float, float]]:
        """When a process stood still, or was cut off, for so long that its leases may have ended."""
        lease = self._rules.lease
        stops: list[tuple[float, float]] = []
        stopped: float | None = None
        for event in self.events:
            if event.who != who:
                continue
            if event.what == "stopped":
                stopped = event.at
            elif event.what == "went on" and stopped is not None:
                stops.append((stopped, event.at))
                stopped = None
        if stopped is not None:
            stops.append((stopped, self.events[-1].at))
        spells = list(stops)
        for event in self.events:
            if event.what == "still" and event.who in (who, EVERYBODY):
                # A process that was stopped notices only after it went on; what it began since then counts.
                within = [until for since, until in stops if event.since <= until <= event.at]
                spells.append((event.since, max(within, default=event.at)))
        merged: list[tuple[float, float]] = []
        for since, until in sorted(spells):
            if merged and since - merged[-1][1] < lease / 4:
                merged[-1] = merged[-1][0], max(until, merged[-1][1])
            else:
                merged.append((since, until))
        return [(since, until) for since, until in merged if until - since >= lease / 2]
