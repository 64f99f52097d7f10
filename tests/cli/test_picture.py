"""What a flood looks like."""

from __future__ import annotations

import io
from xml.etree import ElementTree

from rich.console import Console

from frontmcp_py.cli.flood import Record
from frontmcp_py.cli.picture import drawn, histogram, latencies, outcomes, svg

SVG = "{http://www.w3.org/2000/svg}"


def record(code: str = "ok", took: float = 0.1, *, lost: bool = False, at: float = 0.0) -> Record:
    return Record("work", code, lost, at, took)


def test_what_was_admitted_comes_first_and_then_the_most_frequent() -> None:
    records = [
        record("failed"),
        *[record("OVERLOADED")] * 3,
        record(),
        record("protocol error: x", lost=True),
    ]
    assert list(outcomes(records).items()) == [("ok", 1), ("OVERLOADED", 3), ("failed", 1), ("lost", 1)]


def test_quantiles_are_values_that_were_seen() -> None:
    records = [record(took=each / 1000) for each in range(1, 101)]
    assert latencies(records) == {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert latencies([record(took=0.007)]) == {"p50": 7, "p90": 7, "p99": 7, "max": 7}


def test_what_was_lost_has_no_latency() -> None:
    assert latencies([record("no answer", 60, lost=True)]) is None
    assert histogram([record("no answer", 60, lost=True)]) == {}


def test_bars_go_from_the_first_that_is_not_empty_to_the_last() -> None:
    records = [record(took=0.01), record(took=0.011), record(took=0.02), record(took=0.09), record(took=31)]
    bars = histogram(records)
    assert list(bars.items())[:4] == [("≤ 10 ms", 1), ("≤ 20 ms", 2), ("≤ 50 ms", 0), ("≤ 100 ms", 1)]
    assert list(bars.items())[-1] == ("> 30 s", 1)
    assert sum(bars.values()) == len(records)


def test_the_terminal_shows_numbers_and_bars() -> None:
    console = Console(file=io.StringIO(), width=110)
    console.print(drawn({"flood": [record()] * 99 + [record("OVERLOADED", 0.004)], "control": [record()]}))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[1][:5] == ["flood", "ok", "99", "100", "ms"]
    assert lines[1][-1] == "█" * 40
    # One of a hundred is little, but it is there.
    assert lines[2][:4] == ["OVERLOADED", "1", "4", "ms"]
    assert lines[2][-1] == "▍"
    assert ["control:", "how", "long", "answers", "took"] in lines


def test_the_file_is_svg_with_every_call_in_it() -> None:
    records = [record(at=each / 10) for each in range(50)] + [record("OVERLOADED", at=1)] * 7
    groups = {"flood": records, "control": [record()], "nothing": []}
    picture = ElementTree.fromstring(svg('<desk> & "co"', groups))
    texts = [each.text or "" for each in picture.iter(f"{SVG}text")]
    assert '<desk> & "co"' in texts
    assert "flood: answers over time" in texts
    assert "nothing: answers over time" not in texts
    titles = [each.text or "" for each in picture.iter(f"{SVG}title")]
    for code, number in (("ok", 51), ("OVERLOADED", 7)):
        told = [int(each.rpartition(": ")[2]) for each in titles if each.startswith(f"{code}: ")]
        assert sum(told) == number
    for rectangle in picture.iter(f"{SVG}rect"):
        assert float(rectangle.get("height", 0)) >= 0
        assert float(rectangle.get("y", 0)) >= 0


def test_a_flood_without_calls_can_be_drawn() -> None:
    assert ElementTree.fromstring(svg("nothing", {})).tag == f"{SVG}svg"
