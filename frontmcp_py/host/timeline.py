"""A batch as it ran: who waited, who was asked, who ran, and for how long."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Final, NamedTuple

from frontmcp_py.clock import Clock, SystemClock

from .calls import Operation, ToolCall
from .entries import State

MARKS: Final[dict[State, str]] = {
    "queued": "·",
    "awaiting-permission": "?",
    "awaiting-input": "?",
    "running": "█",
    "awaiting-review": "r",
}
"""How the states are drawn; what is completed is blank."""

_LEGEND: Final = ("· queued", "? awaiting permission or input", "█ running", "r awaiting review")
_NARROWEST: Final = 30
_NO_ROWS: Final = "no calls"
_SECOND: Final = 1_000_000_000

# Distances between the times of the axis, in nanoseconds: 1, 2, 5 times a power of ten up to half a minute,
# then whole minutes and hours.
_STEPS: Final = (
    *(first * 10**power for power in range(3, 10) for first in (1, 2, 5)),
    *(seconds * _SECOND for seconds in (10, 20, 30, 60, 120, 300, 600, 1200, 1800)),
    *(first * 10**power * 3600 * _SECOND for power in range(6) for first in (1, 2, 5)),
)


@dataclass(frozen=True, slots=True)
class Span:
    """How long an entry was in one state.

    Attributes:
        state: The state; never `completed`.
        start: When it began, in seconds since the timeline's first change.
        end: When it ended, likewise; if it has not, now.
    """

    state: State
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of a timeline: a call, or an operation below its call.

    Attributes:
        label: What it is called: `name#id`, for an operation `name#id#index`.
        call: The call, or the `Operation`.
        spans: Its states in order, without gaps. Those that took no time are there, too. Empty for a call
            whose result was there before its batch began.
        is_completed: Whether it has its result.
        ran: Seconds that it ran, its tool's questions included; `None` if it has not been released.
    """

    label: str
    call: ToolCall
    spans: tuple[Span, ...]
    is_completed: bool
    ran: float | None

    def as_dict(self) -> dict[str, object]:
        """The row as plain data, without the call's arguments."""
        index = self.call.index if isinstance(self.call, Operation) else None
        return {
            "label": self.label,
            "id": self.call.id,
            "name": self.call.name,
            "operation": index,
            "is_completed": self.is_completed,
            "ran": self.ran,
            "spans": [{"state": each.state, "start": each.start, "end": each.end} for each in self.spans],
        }


class Line(NamedTuple):
    """One row, drawn.

    Attributes:
        label: What the row is called, cut and filled up to the width of its column.
        bar: One mark of `MARKS` or a blank per column.
        took: How long it ran.
        is_completed: Whether it has its result.
    """

    label: str
    bar: str
    took: str
    is_completed: bool


class Drawing(NamedTuple):
    """A timeline at one moment, drawn.

    Attributes:
        lines: One per row that is shown, in order.
        footer: The axis of time, and what the marks mean.
        before: How many rows are not shown above the lines.
        after: How many are not shown below them.
    """

    lines: tuple[Line, ...]
    footer: tuple[str, ...]
    before: int = 0
    after: int = 0


class Timeline:
    """Records what a `Host` is doing, and draws it.

    An instance is what the host's `on_state` takes: `Host(config, on_state=timeline)`. It keeps the calls of
    every batch that it is told of, so a host that lives long needs a new one from time to time.

    Args:
        clock: Where the time comes from; `None`: the machine's monotonic clock.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = SystemClock() if clock is None else clock
        self._began: int | None = None
        self._calls: list[_Track] = []
        # Ids of calls may repeat, and equal calls are equal. What tells them apart is the object.
        self._tracks: dict[int, list[_Track]] = {}

    def __call__(self, call: ToolCall, state: State) -> None:
        """Record a change.

        Args:
            call: What has changed: the call, or the operation.
            state: Where it stands now.
        """
        now = self._clock.monotonic_ns()
        if self._began is None:
            self._began = now
        self._track(call, state).enter(state, now)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The entries in the written order, the operations of a call below it."""
        began, now = self._times()
        return tuple(track.row(began, now) for track in self._in_order())

    def render(self, width: int = 100) -> str:
        """The timeline as text: a line per entry, an axis of time, and what the marks mean.

        A line has the entry's name, its bar, and how long it ran. What ran is visible, however short it was.

        Args:
            width: Columns of the longest line; less than 30 counts as 30. Characters of scripts that are
                twice as wide count twice.
        """
        drawing = self.draw(width)
        if not drawing.lines:
            return _NO_ROWS
        lines = (f"{line.label} {line.bar} {line.took}" for line in drawing.lines)
        return "\n".join([*lines, *drawing.footer])

    def draw(self, width: int = 100, rows: int | None = None) -> Drawing:
        """What `render` makes its text of: for a picture in colour, or of some of the rows.

        Args:
            width: Columns of the longest line, with a blank between its parts; less than 30 counts as 30.
            rows: How many rows are shown at most, from the first that is not completed on; `None`: all.
        """
        width = max(width, _NARROWEST)
        tracks, (began, now) = list(self._in_order()), self._times()
        until = max((now if track.end is None else track.end for track in tracks), default=began)
        labels = [track.label for track in tracks]
        took = ["-" if (ran := track.ran(now)) is None else _length(ran) for track in tracks]
        of_took = max((len(each) for each in took), default=0)
        free = width - of_took - 2
        # A label has two fifths at most.
        of_label = min(max((_width(each) for each in labels), default=0), free * 2 // 5)
        of_bar = free - of_label
        first, last = _shown(tracks, rows)
        lines = (
            Line(
                _filled(_cut(label, of_label), of_label),
                _bar(track, began, until, now, of_bar),
                length.rjust(of_took),
                track.is_completed,
            )
            for track, label, length in islice(zip(tracks, labels, took, strict=True), first, last)
        )
        axis = f"{' ' * of_label} {_axis(until - began, of_bar, width - of_label - 1)}"
        return Drawing(tuple(lines), (axis, *_wrapped(_LEGEND, width)), first, len(tracks) - last)

    def _times(self) -> tuple[int, int]:
        now = self._clock.monotonic_ns()
        return (now if self._began is None else self._began), now

    def _in_order(self) -> Iterator[_Track]:
        for track in self._calls:
            yield track
            yield from track.operations

    def _track(self, call: ToolCall, state: State) -> _Track:
        """Of whom this is told. One call may stand in a batch, or in several batches, more than once."""
        known = self._tracks.setdefault(id(call), [])
        for track in known:
            if not track.is_completed and track.state != state:
                return track
        if isinstance(call, Operation):
            track = _Track(call)
            self._call_of(call).operations.append(track)
            known.append(track)
            return track
        return self._add(call)

    def _call_of(self, operation: Operation) -> _Track:
        known = self._tracks.setdefault(id(operation.call), [])
        if known and len(known[-1].operations) <= operation.index:
            return known[-1]
        return self._add(operation.call)

    def _add(self, call: ToolCall) -> _Track:
        track = _Track(call)
        self._calls.append(track)
        self._tracks.setdefault(id(call), []).append(track)
        return track


class _Track:
    """What is recorded of one entry; times in nanoseconds of the clock."""

    __slots__ = ("call", "changes", "end", "label", "operations")

    def __init__(self, call: ToolCall) -> None:
        self.call = call
        self.label = _label(call)
        self.changes: list[tuple[State, int]] = []
        self.end: int | None = None
        self.operations: list[_Track] = []

    @property
    def state(self) -> State | None:
        return self.changes[-1][0] if self.changes else None

    @property
    def is_completed(self) -> bool:
        return self.end is not None

    def enter(self, state: State, now: int) -> None:
        if state == "completed":
            self.end = now
        else:
            self.changes.append((state, now))

    def spans(self, now: int) -> Iterator[tuple[State, int, int]]:
        end = now if self.end is None else self.end
        ends = [start for _, start in self.changes[1:]]
        for (state, start), until in zip(self.changes, [*ends, end], strict=False):
            yield state, start, until

    def ran(self, now: int) -> int | None:
        took = [
            end - start for state, start, end in self.spans(now) if state in ("running", "awaiting-input")
        ]
        return sum(took) if took else None

    def row(self, began: int, now: int) -> Row:
        spans = (
            Span(state, (start - began) / _SECOND, (end - began) / _SECOND)
            for state, start, end in self.spans(now)
        )
        ran = self.ran(now)
        seconds = None if ran is None else ran / _SECOND
        return Row(self.call.label, self.call, tuple(spans), self.is_completed, seconds)


# ------------------------------------------------------------------------------------------------ the picture


def _shown(tracks: Sequence[_Track], rows: int | None) -> tuple[int, int]:
    """From which to which row."""
    if rows is None or len(tracks) <= rows:
        return 0, len(tracks)
    first = next((at for at, track in enumerate(tracks) if not track.is_completed), len(tracks))
    first = min(first, len(tracks) - rows)
    return first, first + rows


def _bar(track: _Track, began: int, until: int, now: int, columns: int) -> str:
    """What took most of a column's time stands there; what ran, and what took time, stands somewhere."""
    total = until - began
    spans = [(MARKS[state], start - began, end - began) for state, start, end in track.spans(now)]
    bar = _shares(spans, total, columns) if total else [" "] * columns
    for mark in ("r", "?", "█"):
        mine = [(start, end) for each, start, end in spans if each == mark and (mark == "█" or start < end)]
        if mine and mark not in bar:
            start = max(mine, key=lambda each: each[1] - each[0])[0]
            bar[min(start * columns // total, columns - 1) if total else 0] = mark
    return "".join(bar)


def _shares(spans: Iterable[tuple[str, int, int]], total: int, columns: int) -> list[str]:
    bar = [" "] * columns
    partly: dict[int, dict[str, int]] = {}
    for mark, start, end in spans:
        # In units of which a column has `total`, so that nothing is rounded.
        first, last = start * columns, end * columns
        begin, until = -(-first // total), last // total
        bar[begin:until] = mark * (until - begin)
        for at in {first // total, until}:
            share = min(last, (at + 1) * total) - max(first, at * total)
            if 0 < share < total:
                shares = partly.setdefault(at, {})
                shares[mark] = shares.get(mark, 0) + share
    for at, shares in partly.items():
        if 2 * sum(shares.values()) >= total:
            bar[at] = max(shares, key=shares.__getitem__)
    return bar


def _axis(total: int, columns: int, room: int) -> str:
    """Times at regular distances, each behind a stroke at its column; the last may need more room."""
    if not total:
        return "|0"
    for step in _STEPS:
        if total // step > columns:
            continue
        labels = [(time * columns // total, f"|{_length(time)}") for time in range(0, total + 1, step)]
        if all(at + len(label) < after for (at, label), (after, _) in pairwise(labels)):
            break
    else:
        labels = [(0, "|0")]
    line = ""
    for at, label in labels:
        if at + len(label) <= room:
            line = line.ljust(at) + label
    return line


def _length(nanoseconds: int) -> str:
    if not nanoseconds:
        return "0"
    if nanoseconds < 999_500_000:
        return f"{nanoseconds / 1_000_000:.3g} ms"
    if nanoseconds < 59_950_000_000:
        return f"{nanoseconds / _SECOND:.3g} s"
    seconds = round(nanoseconds / _SECOND)
    if seconds < 3600:
        return f"{seconds // 60} min" + (f" {seconds % 60} s" if seconds % 60 else "")
    minutes = round(seconds / 60)
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


def _label(call: ToolCall) -> str:
    """The name on one line: control characters are escaped."""
    label = f"  #{call.index}" if isinstance(call, Operation) else call.label
    return "".join(
        mark if mark.isprintable() else mark.encode("unicode_escape").decode("ascii") for mark in label
    )


def _cut(text: str, columns: int) -> str:
    """The text without its middle, if it is too long: its end tells calls of one tool apart."""
    if _width(text) <= columns:
        return text
    of_tail = (columns - 1) // 2
    return f"{_begin(text, columns - 1 - of_tail)}…{_begin(text[::-1], of_tail)[::-1]}"


def _begin(text: str, columns: int) -> str:
    end, used = 0, 0
    for mark in text:
        used += _width(mark)
        if used > columns:
            break
        end += 1
    return text[:end]


def _filled(text: str, columns: int) -> str:
    return text + " " * (columns - _width(text))


def _width(text: str) -> int:
    """Columns of a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(mark) else 2 if unicodedata.east_asian_width(mark) in "WF" else 1
        for mark in text
    )


def _wrapped(parts: Iterable[str], width: int) -> list[str]:
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f"   {part}"
        else:
            lines.append(part)
    return lines
