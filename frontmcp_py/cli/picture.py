"""What became of a flood, drawn: bars for the terminal, and an SVG file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from frontmcp_py.cli.flood import FAILED, OK, Record

QUANTILES: Final = {"p50": 0.50, "p90": 0.90, "p99": 0.99, "max": 1.0}

# Upper ends of the bars of latencies, in milliseconds: from what no one notices to what a client gives up on.
_STEPS: Final = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000)
_BAR: Final = 40
_EIGHTHS: Final = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
_COLOURS: Final = {OK: "#2e8b57", "OVERLOADED": "#d2691e", FAILED: "#b22222", "lost": "#000000"}
_OTHERS: Final = ("#4682b4", "#9370db", "#b8860b", "#708090", "#c71585")
_TERMINAL: Final = {OK: "green", "OVERLOADED": "dark_orange", FAILED: "red", "lost": "bold red"}


def outcome(record: Record) -> str:
    """What a call is counted under: `ok`, `failed`, a code, or `lost`."""
    return "lost" if record.lost else record.code


def outcomes(records: Sequence[Record]) -> dict[str, int]:
    """How many calls ended how: what was admitted first, then the most frequent."""
    counts = Counter(outcome(each) for each in records)
    return dict(sorted(counts.items(), key=lambda each: (each[0] != OK, -each[1], each[0])))


def latencies(records: Sequence[Record]) -> dict[str, float] | None:
    """Quantiles of the answers' latencies in milliseconds, by nearest rank; `None` without answers."""
    took = sorted(each.took * 1000 for each in records if not each.lost)
    if not took:
        return None
    return {name: round(took[math.ceil(len(took) * part) - 1], 1) for name, part in QUANTILES.items()}


def histogram(records: Sequence[Record]) -> dict[str, int]:
    """How many answers took how long; from the first bar that is not empty to the last."""
    counts = [0] * (len(_STEPS) + 1)
    for each in records:
        if not each.lost:
            counts[next((at for at, step in enumerate(_STEPS) if each.took * 1000 <= step), len(_STEPS))] += 1
    filled = [at for at, count in enumerate(counts) if count]
    if not filled:
        return {}
    labels = [f"≤ {_length(step)}" for step in _STEPS] + [f"> {_length(_STEPS[-1])}"]
    return {labels[at]: counts[at] for at in range(filled[0], filled[-1] + 1)}


def drawn(groups: Mapping[str, Sequence[Record]]) -> RenderableType:
    """Tables and bars for a terminal.

    Args:
        groups: The calls, by what they are called.
    """
    parts: list[RenderableType] = [_table(groups)]
    for name, records in groups.items():
        if bars := histogram(records):
            parts += [Text(f"\n{name}: how long answers took", style="bold"), _bars(bars)]
    return Group(*parts)


def _table(groups: Mapping[str, Sequence[Record]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("calls")
    table.add_column("outcome")
    table.add_column("number", justify="right")
    for name in QUANTILES:
        table.add_column(name, justify="right")
    table.add_column("")
    most = max((count for each in groups.values() for count in outcomes(each).values()), default=1)
    for name, records in groups.items():
        label = name
        for code, count in outcomes(records).items():
            times = latencies([each for each in records if outcome(each) == code])
            shown = [_length(times[each]) if times else "" for each in QUANTILES]
            bar = Text(_blocks(count, most), style=_TERMINAL.get(code, "cyan"))
            table.add_row(label, code, str(count), *shown, bar)
            label = ""
    return table


def _bars(counts: Mapping[str, int]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    most = max(counts.values())
    for label, count in counts.items():
        table.add_row(label, str(count), Text(_blocks(count, most), style="cyan"))
    return table


def _blocks(count: int, most: int) -> str:
    """A bar of at most `_BAR` characters, in eighths of them; what is there is never invisible."""
    eighths = max(1, round(count / most * _BAR * 8)) if count else 0
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8]


def _length(milliseconds: float) -> str:
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.3g} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.2g} ms"


# ------------------------------------------------------------------------------------------------------- SVG

_WIDTH: Final = 860
_LEFT: Final = 70
_PLOT: Final = 160
_SLICES: Final = 40


def svg(title: str, groups: Mapping[str, Sequence[Record]]) -> str:
    """The picture as an SVG file: answers over time by outcome, and how long they took.

    Args:
        title: What stands above it.
        groups: The calls, by what they are called.
    """
    rows = [each for each in groups.items() if each[1]]
    y = 40
    parts = [f'<text x="20" y="24" font-size="16" font-weight="bold">{escape(title)}</text>']
    for name, records in rows:
        parts += _over_time(y, name, records)
        parts += _how_long(y, name, records)
        y += _PLOT + 90
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}" '
        'font-family="sans-serif" font-size="11">\n'
        f'<rect width="{_WIDTH}" height="{y}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _over_time(y: int, name: str, records: Sequence[Record]) -> list[str]:
    codes = list(outcomes(records))
    colours = _colours(codes)
    end = max(each.at + each.took for each in records) or 1.0
    slices = [Counter[str]() for _ in range(_SLICES)]
    for each in records:
        slices[min(_SLICES - 1, int((each.at + each.took) / end * _SLICES))][outcome(each)] += 1
    most = max(each.total() for each in slices)
    width = 430 / _SLICES
    bottom = y + 20 + _PLOT
    parts = [f'<text x="{_LEFT}" y="{y + 8}" font-weight="bold">{escape(name)}: answers over time</text>']
    for at, counts in enumerate(slices):
        top = float(bottom)
        for code in codes:
            height = counts[code] / most * _PLOT
            top -= height
            if height:
                parts.append(
                    _rect(_LEFT + at * width, top, width - 1, height, colours[code], code, counts[code])
                )
    parts += _axis(_LEFT, bottom, 430, f"{most} per {end / _SLICES:.2g} s", "0 s", f"{end:.3g} s")
    x = _LEFT
    for code in codes:
        label = f"{code} {outcomes(records)[code]}"
        parts.append(f'<rect x="{x}" y="{bottom + 26}" width="9" height="9" fill="{colours[code]}"/>')
        parts.append(f'<text x="{x + 13}" y="{bottom + 35}">{escape(label)}</text>')
        x += 30 + 7 * len(label)
    return parts


def _how_long(y: int, name: str, records: Sequence[Record]) -> list[str]:
    counts = histogram(records)
    left, bottom = _LEFT + 500, y + 20 + _PLOT
    parts = [f'<text x="{left}" y="{y + 8}" font-weight="bold">{escape(name)}: how long they took</text>']
    if not counts:
        return parts
    most = max(counts.values())
    width = 270 / len(counts)
    for at, (label, count) in enumerate(counts.items()):
        height = count / most * _PLOT
        x = left + at * width
        parts.append(_rect(x, bottom - height, width - 2, height, _OTHERS[0], label, count))
        # In two lines, so that neighbours do not write over each other.
        middle, line = x + width / 2, bottom + 12 + at % 2 * 10
        parts.append(
            f'<text x="{middle:.1f}" y="{line}" text-anchor="middle" font-size="8">{escape(label)}</text>'
        )
    return [*parts, *_axis(left, bottom, 270, str(most), "", "")]


def _axis(x: int, bottom: int, width: int, most: str, first: str, last: str) -> list[str]:
    return [
        f'<path d="M{x} {bottom - _PLOT}V{bottom}H{x + width}" fill="none" stroke="#444444"/>',
        f'<text x="{x - 4}" y="{bottom - _PLOT + 4}" text-anchor="end" font-size="9">{escape(most)}</text>',
        f'<text x="{x}" y="{bottom + 12}" font-size="9">{first}</text>',
        f'<text x="{x + width}" y="{bottom + 12}" text-anchor="end" font-size="9">{last}</text>',
    ]


def _rect(x: float, y: float, width: float, height: float, colour: str, label: str, count: int) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}">'
        f"<title>{escape(label)}: {count}</title></rect>"
    )


def _colours(codes: Sequence[str]) -> dict[str, str]:
    others = [code for code in codes if code not in _COLOURS]
    return {**_COLOURS, **{code: _OTHERS[at % len(_OTHERS)] for at, code in enumerate(others)}}
