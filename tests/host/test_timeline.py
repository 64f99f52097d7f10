"""The timeline of a batch: every state of every entry with its times, and a picture of them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import unicodedata
from collections import Counter
from itertools import pairwise
from random import Random
from typing import Any, get_args

import pytest

from frontmcp_py.host import Batch, Decision, Host, State, Timeline, ToolCall, ToolResult
from frontmcp_py.host.timeline import MARKS, Row
from frontmcp_py.testing import VirtualClock, virtual_time

LEGEND = "· queued   ? awaiting permission or input   █ running   r awaiting review"


async def sleeps(name: str, arguments: dict[str, Any]) -> str:
    await asyncio.sleep(arguments.get("s", 1))
    return name


def spans(row: Row) -> list[tuple[State, float, float]]:
    return [(each.state, each.start, each.end) for each in row.spans]


class Hand:
    """A clock that is set by hand, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def wall_ns(self) -> int:
        raise AssertionError("durations are not measured with the time of day")

    def monotonic_ns(self) -> int:
        return round(self.now * 1_000_000_000)


def told(*changes: tuple[float, ToolCall, State], until: float) -> Timeline:
    """A timeline that was told this, each after so many seconds."""
    clock = Hand()
    timeline = Timeline(clock)
    for at, call, state in changes:
        clock.now = 100 + at
        timeline(call, state)
    clock.now = 100 + until
    return timeline


@virtual_time
async def test_every_state_of_every_call_is_recorded_with_its_times() -> None:
    timeline = Timeline(VirtualClock())

    async def approve(call: ToolCall) -> Decision:
        await asyncio.sleep(0.25)
        return call.id != "c3"

    async def question(_: ToolCall | None, __: object) -> None:
        await asyncio.sleep(2)

    async def review(*_: object) -> None:
        await asyncio.sleep(0.5)

    async def asks(name: str, arguments: dict[str, Any]) -> str:
        await asyncio.sleep(1)
        if arguments:
            await host.ask("Sure?")
            await asyncio.sleep(1)
        return name

    config = {"edit": {"concurrency": 1}}
    host = Host(config, asks, approve=approve, question=question, review=review, on_state=timeline)
    calls = [ToolCall("c1", "edit", {"ask": True}), ToolCall("c2", "edit"), ToolCall("c3", "edit")]
    await host.run(calls)

    assert [row.label for row in timeline.rows] == ["edit#c1", "edit#c2", "edit#c3"]
    assert [spans(row) for row in timeline.rows] == [
        [
            ("queued", 0, 0),
            ("awaiting-permission", 0, 0.25),
            ("queued", 0.25, 0.75),
            ("running", 0.75, 1.75),
            ("awaiting-input", 1.75, 3.75),
            ("running", 3.75, 4.75),
            ("awaiting-review", 4.75, 5.25),
        ],
        [
            ("queued", 0, 0),
            ("awaiting-permission", 0, 0.5),
            ("queued", 0.5, 4.75),
            ("running", 4.75, 5.75),
            ("awaiting-review", 5.75, 6.25),
        ],
        [("queued", 0, 0), ("awaiting-permission", 0, 0.75)],
    ]
    assert [row.ran for row in timeline.rows] == [4, 1, None]
    assert all(row.is_completed for row in timeline.rows)


@virtual_time
async def test_operations_stand_below_their_call_in_the_written_order() -> None:
    timeline = Timeline(VirtualClock())
    config = {"edit": {"concurrency": 1, "fan_out": True}}
    calls = [
        ToolCall("c1", "read"),
        ToolCall("c2", "edit", {"ops": [{"s": 2}, {"s": 1}]}),
        ToolCall("c3", "edit"),
    ]
    await Host(config, sleeps, on_state=timeline).run(calls)
    assert [(row.label, row.ran) for row in timeline.rows] == [
        ("read#c1", 1),
        ("edit#c2", 3),
        ("edit#c2#0", 2),
        ("edit#c2#1", 1),
        ("edit#c3", 1),
    ]
    assert [row.call for row in timeline.rows][:2] == calls[:2]
    assert timeline.render(52).splitlines() == [
        "read#c1 ██████████                               1 s",
        "edit#c2 ██████████████████████████████           3 s",
        "  #0    ████████████████████                     2 s",
        "  #1    ····················██████████           1 s",
        "edit#c3 ······························██████████ 1 s",
        "        |0        |1 s      |2 s      |3 s      |4 s",
        "· queued   ? awaiting permission or input",
        "█ running   r awaiting review",
    ]


def test_a_row_is_plain_data() -> None:
    call = ToolCall("c1", "edit", {"path": "a"})
    row = told((0, call, "queued"), (0.5, call, "running"), (2, call, "completed"), until=9).rows[0]
    data = {
        "label": "edit#c1",
        "id": "c1",
        "name": "edit",
        "operation": None,
        "is_completed": True,
        "ran": 1.5,
        "spans": [
            {"state": "queued", "start": 0, "end": 0.5},
            {"state": "running", "start": 0.5, "end": 2},
        ],
    }
    assert row.as_dict() == data
    assert json.loads(json.dumps(row.as_dict())) == data


@virtual_time
async def test_what_has_not_ended_goes_on_until_now() -> None:
    timeline = Timeline(VirtualClock())
    host = Host({"edit": {"concurrency": 1}}, sleeps, on_state=timeline)
    handle = host.start([ToolCall("c1", "edit", {"s": 4}), ToolCall("c2", "edit")])
    for now in (1, 3):
        await asyncio.sleep(now - asyncio.get_running_loop().time())
        first, second = timeline.rows
        assert (spans(first)[-1], first.is_completed) == (("running", 0, now), False)
        assert (spans(second)[-1], second.is_completed) == (("queued", 0, now), False)
        assert timeline.render(40).splitlines()[0] == f"edit#c1 {'█' * 28} {now} s"
    await handle.results()
    assert [row.ran for row in timeline.rows] == [4, 1]


@virtual_time
async def test_calls_with_the_same_id_have_a_row_each() -> None:
    timeline = Timeline(VirtualClock())
    host = Host({"edit": {"concurrency": 1}}, sleeps, on_state=timeline)
    await host.run([ToolCall("c1", "edit"), ToolCall("c1", "edit"), ToolCall("c1", "read", {"s": 5})])
    assert [spans(row)[-1] for row in timeline.rows] == [
        ("running", 0, 1),
        ("running", 1, 2),
        ("running", 0, 5),
    ]


@virtual_time
async def test_one_call_that_stands_in_a_batch_twice_has_two_rows() -> None:
    timeline = Timeline(VirtualClock())
    config = {"edit": {"concurrency": 1, "fan_out": True}}
    call = ToolCall("c1", "edit", {"ops": [{"s": 1}, {"s": 2}]})
    await Host(config, sleeps, on_state=timeline).run([call, call])
    assert [row.label for row in timeline.rows] == ["edit#c1", "edit#c1#0", "edit#c1#1"] * 2
    assert [row.ran for row in timeline.rows] == [3, 1, 2] * 2
    assert [spans(row)[-1][2] for row in timeline.rows] == [3, 1, 3, 6, 4, 6]


@virtual_time
async def test_a_batch_that_comes_later_is_added_with_its_own_times() -> None:
    timeline = Timeline(VirtualClock())
    host = Host(None, sleeps, on_state=timeline)
    call = ToolCall("c1", "read")
    await host.run([call])
    await asyncio.sleep(1)
    await host.run([call])
    assert [spans(row)[-1] for row in timeline.rows] == [("running", 0, 1), ("running", 2, 3)]


@virtual_time
async def test_calls_that_have_their_result_from_before_have_an_empty_row() -> None:
    timeline = Timeline(VirtualClock())
    config = {"edit": {"concurrency": 1, "fan_out": True}}
    calls = [ToolCall("c1", "read"), ToolCall("c2", "edit", {"ops": [{}, {}]})]
    results = [ToolResult("c1", "read"), ToolResult("c2#0", "edit")]
    await Host(config, sleeps, on_state=timeline).run(Batch.resume(calls, results))
    assert [(row.label, row.ran, row.is_completed) for row in timeline.rows] == [
        ("read#c1", None, True),
        ("edit#c2", 1, True),
        ("edit#c2#0", None, True),
        ("edit#c2#1", 1, True),
    ]
    assert timeline.render(40).splitlines()[0].split() == ["read#c1", "-"]


@virtual_time
async def test_a_batch_that_is_cancelled_ends_then() -> None:
    timeline = Timeline(VirtualClock())
    host = Host({"edit": {"concurrency": 1}}, sleeps, on_state=timeline)
    handle = host.start([ToolCall("c1", "edit", {"s": 9}), ToolCall("c2", "edit")])
    await asyncio.sleep(2)
    handle.cancel()
    await asyncio.sleep(5)
    assert [spans(row)[-1] for row in timeline.rows] == [("running", 0, 2), ("queued", 0, 2)]
    assert all(row.is_completed for row in timeline.rows)


# ------------------------------------------------------------------------------------------------ the picture


def test_a_bar_shows_the_states_in_proportion() -> None:
    call, other = ToolCall("1", "a"), ToolCall("2", "b")
    timeline = told(
        (0, call, "queued"),
        (0, other, "awaiting-permission"),
        (2, call, "awaiting-permission"),
        (4, call, "queued"),
        (5, call, "running"),
        (7, call, "awaiting-input"),
        (8, call, "running"),
        (9, call, "awaiting-review"),
        (10, call, "completed"),
        (20, other, "completed"),
        until=50,
    )
    lines = timeline.draw(48).lines
    assert [line.bar for line in lines] == ["····????··████??██rr" + " " * 20, "?" * 40]
    assert [line.label for line in lines] == ["a#1", "b#2"]
    assert [line.took.strip() for line in lines] == ["4 s", "-"]


@pytest.mark.parametrize("seed", range(50))
def test_a_column_shows_what_took_most_of_its_time(seed: int) -> None:
    states: list[State] = ["queued", "awaiting-permission", "queued", "running", "awaiting-review"]
    times = sorted(Random(seed).sample(range(1000), len(states) + 1))
    whole, call = ToolCall("1", "a"), ToolCall("2", "b")
    changes: list[tuple[float, ToolCall, State]] = [
        (0, whole, "running"),
        *((at, call, state) for at, state in zip(times, [*states, "completed"], strict=True)),
        (1000, whole, "completed"),
    ]
    bar = told(*changes, until=1000).draw(48).lines[1].bar
    columns = len(bar)
    for column, mark in enumerate(bar):
        if mark != " " and bar.count(mark) == 1:
            # What was short is seen nevertheless, at the cost of its neighbour.
            continue
        took: Counter[str] = Counter()
        for state, (start, end) in zip(states, pairwise(times), strict=True):
            share = min(end * columns, (column + 1) * 1000) - max(start * columns, column * 1000)
            took[MARKS[state]] += max(0, share)
        if 2 * took.total() < 1000:
            assert mark == " "
        else:
            assert took[mark] == max(took.values())


def test_what_ran_is_seen_however_short_it_was() -> None:
    long, short, none = (ToolCall(str(nth), "a") for nth in range(3))
    timeline = told(
        *((0, call, "queued") for call in (long, short, none)),
        (0, long, "running"),
        (500, short, "running"),
        (500.001, short, "completed"),
        (999, none, "running"),
        (999, none, "completed"),
        (1000, long, "completed"),
        until=1000,
    )
    bars = [line.bar for line in timeline.draw(60).lines]
    columns = len(bars[0])
    assert bars[0] == "█" * columns
    assert bars[1].count("█") == bars[2].count("█") == 1
    assert bars[1].index("█") == columns // 2
    assert bars[2].endswith("█")


def test_a_batch_that_took_no_time_is_drawn() -> None:
    ran, waits, skipped = (ToolCall(str(nth), "a") for nth in range(3))
    timeline = told(
        *((0, call, "queued") for call in (ran, waits, skipped)),
        (0, ran, "running"),
        (0, ran, "completed"),
        (0, skipped, "completed"),
        until=0,
    )
    lines, footer, *_ = timeline.draw(40)
    assert [line.bar.strip() for line in lines] == ["█", "", ""]
    assert [line.took for line in lines] == ["0", "-", "-"]
    assert footer[0].strip() == "|0"


def test_a_timeline_of_nothing_says_so() -> None:
    assert Timeline().rows == ()
    assert Timeline().render() == "no calls"


def test_below_the_bars_stand_an_axis_and_a_legend() -> None:
    call = ToolCall("1", "a")
    timeline = told((0, call, "running"), (4, call, "completed"), until=4)
    assert timeline.render(48).splitlines()[1:] == [
        "    |0        |1 s      |2 s      |3 s      |4 s",
        "· queued   ? awaiting permission or input",
        "█ running   r awaiting review",
    ]
    assert timeline.render(100).splitlines()[-1] == LEGEND


@pytest.mark.parametrize(
    ("seconds", "took", "axis"),
    [
        (0.000_002, "0.002 ms", ["0", "0.001 ms", "0.002 ms"]),
        (0.25, "250 ms", ["0", "50 ms", "100 ms", "150 ms", "200 ms", "250 ms"]),
        (0.9999, "1 s", ["0", "200 ms", "400 ms", "600 ms", "800 ms"]),
        (59.96, "1 min", ["0", "10 s", "20 s", "30 s", "40 s", "50 s"]),
        (150, "2 min 30 s", ["0", "1 min", "2 min"]),
        (7260, "2 h 1 min", ["0", "1 h", "2 h"]),
        (500 * 3600, "500 h", ["0", "100 h", "200 h", "300 h", "400 h", "500 h"]),
    ],
)
def test_times_are_told_in_fitting_units(seconds: float, took: str, axis: list[str]) -> None:
    call = ToolCall("1", "a")
    timeline = told((0, call, "running"), (seconds, call, "completed"), until=seconds)
    line, first, *_ = timeline.render(60).splitlines()
    assert line.endswith(f"█ {took}")
    assert [each.strip() for each in first.split("|")[1:]] == axis


@pytest.mark.parametrize("width", [-1, 0, 30, 31, 47, 80, 200])
def test_no_line_is_longer_than_the_width_or_thirty(width: int) -> None:
    calls = [
        ToolCall("1", "a"),
        ToolCall("2", "a_very_long_name_" * 9),
        ToolCall("3" * 100, "x"),
        ToolCall("4", "日本語の名前" * 9),
        ToolCall("5", "e\u0301" * 50),
    ]
    timeline = told(
        *((0, call, "running") for call in calls), *((61, call, "completed") for call in calls), until=70
    )
    for line in timeline.render(width).splitlines():
        assert columns(line) <= max(width, 30)
    assert all("█" in line.bar for line in timeline.draw(width).lines)
    starts = {columns(line.label) for line in timeline.draw(width).lines}
    assert len(starts) == 1


def columns(text: str) -> int:
    """The columns of a terminal, by another way than the one that is tested."""
    plain = [mark for mark in text if not unicodedata.combining(mark)]
    return len(plain) + sum(unicodedata.east_asian_width(mark) in ("W", "F") for mark in plain)


def test_a_long_name_keeps_its_beginning_and_its_end() -> None:
    call = ToolCall("call_42", "a_tool_with_a_very_long_name")
    line = told((0, call, "running"), until=1).draw(50).lines[0]
    assert line.label == "a_tool_wi…#call_42"


def test_control_characters_of_a_name_are_not_printed() -> None:
    call = ToolCall("1\n2", "a\x1b[31m\u202eb\ud800")
    drawn = told((0, call, "running"), until=1).render(100)
    assert r"a\x1b[31m\u202eb\ud800#1\n2" in drawn
    assert all(mark.isprintable() for line in drawn.splitlines() for mark in line)
    assert len(drawn.splitlines()) == 3


def test_hundreds_of_rows_are_drawn() -> None:
    calls = [ToolCall(str(nth), "a") for nth in range(700)]
    changes: list[tuple[float, ToolCall, State]] = [(0, call, "queued") for call in calls]
    for nth, call in enumerate(calls):
        changes += [(nth, call, "running"), (nth + 1, call, "completed")]
    bars = [line.bar for line in told(*changes, until=700).draw(110).lines]
    assert len(bars) == 700
    assert bars[0][0] == bars[-1][-1] == "█"
    assert all(bar.count("█") == 1 for bar in bars)
    marks = [bar.index("█") for bar in bars]
    assert marks == sorted(marks)


def test_of_many_rows_some_are_drawn_from_the_first_that_is_not_completed_on() -> None:
    calls = [ToolCall(str(nth), "a") for nth in range(10)]
    queued: list[tuple[float, ToolCall, State]] = [(0, call, "queued") for call in calls]

    def shown(completed: int, rows: int | None) -> tuple[list[str], int, int]:
        ended: list[tuple[float, ToolCall, State]] = [(1, call, "completed") for call in calls[:completed]]
        drawing = told(*queued, *ended, until=1).draw(60, rows)
        return [line.label for line in drawing.lines], drawing.before, drawing.after

    names = [call.label for call in calls]
    assert shown(3, None) == shown(3, 10) == shown(3, 11) == (names, 0, 0)
    assert shown(0, 4) == (names[:4], 0, 6)
    assert shown(3, 4) == (names[3:7], 3, 3)
    assert shown(8, 4) == shown(10, 4) == (names[6:], 6, 0)
    assert shown(3, 0) == ([], 3, 7)


def test_every_state_but_the_last_has_a_mark() -> None:
    assert set(MARKS) == set(get_args(State)) - {"completed"}


def test_a_timeline_needs_no_terminal_library() -> None:
    program = "import sys, frontmcp_py.host; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
