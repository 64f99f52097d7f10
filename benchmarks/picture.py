"""docs/assets/latency.svg: what a control call takes, by the number of connections that flood the server."""

from __future__ import annotations

import math
from typing import Any, Final

_LEFT: Final = 84
_RIGHT: Final = 650
_TOP: Final = 62
_BOTTOM: Final = 300

_STYLE: Final = """\
    text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1e293b; }
    .small { font-size: 12px; fill: #475569; }
    .mid { text-anchor: middle; } .end { text-anchor: end; }
    .bold { font-weight: 600; }
    .panel { fill: #f8fafc; stroke: #cbd5e1; }
    .grid { stroke: #cbd5e1; }
    .axis { stroke: #64748b; }
    .p50 { fill: none; stroke: #4f46e5; stroke-width: 2; }
    .p99 { fill: none; stroke: #d97706; stroke-width: 2; }
    .p50dot { fill: #4f46e5; } .p99dot { fill: #d97706; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e2e8f0; }
      .small { fill: #a8b3c4; }
      .panel { fill: #14181f; stroke: #334155; }
      .grid { stroke: #334155; }
      .axis { stroke: #94a3b8; }
      .p50 { stroke: #a5b4fc; } .p50dot { fill: #a5b4fc; }
      .p99 { stroke: #f59e0b; } .p99dot { fill: #f59e0b; }
    }"""


def digits(value: float) -> str:
    """A number with three digits, or with all that stand before its point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def picture(growth: list[dict[str, Any]]) -> str:
    """The picture, from the rows of the table beside it."""
    most: int = max(row["connections"] for row in growth)
    slowest: float = max(row["p99_ms"] for row in growth)
    step = _step(slowest)
    top = step * math.ceil(slowest / step)

    def x(connections: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * connections / most, 1)

    def y(milliseconds: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * milliseconds / top, 1)

    drawn = ['  <text class="bold" x="24" y="34">A control call, in milliseconds</text>']
    for mark in range(round(top / step) + 1):
        height = y(mark * step)
        drawn.append(f'  <path class="{"grid" if mark else "axis"}" d="M{_LEFT} {height}H{_RIGHT}"/>')
        drawn.append(f'  <text class="small end" x="{_LEFT - 10}" y="{height + 4:g}">{mark * step:g}</text>')
    drawn += [
        f'  <text class="small mid" x="{x(connections)}" y="{_BOTTOM + 20}">{connections}</text>'
        for connections in (row["connections"] for row in growth)
    ]
    drawn.append(
        f'  <text class="small mid" x="{x(most / 2)}" y="{_BOTTOM + 44}">connections in the flood</text>'
    )
    ends = {name: y(growth[-1][f"{name}_ms"]) for name in ("p50", "p99")}
    # Two labels side by side in height would cover each other.
    ends["p50"] = max(ends["p50"], ends["p99"] + 18)
    for name, end in ends.items():
        points = [(x(row["connections"]), y(row[f"{name}_ms"])) for row in growth]
        drawn.append(f'  <path class="{name}" d="M{"L".join(f"{at} {height}" for at, height in points)}"/>')
        drawn += [f'  <circle class="{name}dot" cx="{at}" cy="{height}" r="3.5"/>' for at, height in points]
        label = f"{name}: {digits(growth[-1][f'{name}_ms'])} ms"
        drawn.append(f'  <text class="small" x="{_RIGHT + 12}" y="{end + 4:g}">{label}</text>')
    return _framed(drawn, _described(growth))


def _step(most: float) -> float:
    """The distance of the lines across: 1, 2 or 5 and zeros, so that there are three to six of them."""
    size: float = 10 ** math.floor(math.log10(most / 3))
    return next(size * each for each in (1, 2, 5, 10) if most / (size * each) <= 5)


def _described(growth: list[dict[str, Any]]) -> str:
    first, last = growth[0], growth[-1]
    return (
        f"With nobody else calling, a control call took {digits(first['p50_ms'])} ms in the median and "
        f"{digits(first['p99_ms'])} ms at the 99th percentile; while {last['connections']} connections "
        f"called without a pause, {digits(last['p50_ms'])} and {digits(last['p99_ms'])} ms."
    )


def _framed(drawn: list[str], description: str) -> str:
    return "\n".join(
        (
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 364" role="img"'
            ' aria-labelledby="title desc">',
            '  <title id="title">Control calls under a flood</title>',
            f'  <desc id="desc">{description}</desc>',
            f"  <style>\n{_STYLE}\n  </style>",
            '  <rect class="panel" x="0.5" y="0.5" width="759" height="363" rx="8"/>',
            *drawn,
            "</svg>\n",
        )
    )
