"""Runs every benchmark, and writes docs/benchmarks.md and its picture.

python -m benchmarks.report               everything, as it is to be published; wants a machine that is quiet
python -m benchmarks.report --short FILE  the page is printed, not written; --short: less time over HTTP
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import environment
from benchmarks.picture import digits, picture

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "assets" / "latency.svg"

INTRODUCTION = """\
# Benchmarks

What the guard and a host cost, as ratios of two things measured in turn in one run: `scripts/benchmarks`
measures all of it and writes this page. The machines that run it are shared and noisy, so the seconds
beside a ratio belong to one day and one machine; the range is the middle half of all rounds. No test
asserts a time.
"""


GROWTH = """\
## Control calls under a flood

One process serves HTTP, a second one floods it with calls of a tool that takes 50 ms, and a third one makes
control calls, one at a time. Whoever is answered or refused calls again in that moment; nobody waits as
long as a refusal asks for. The loads took turns: {rounds} rounds of {round_s:g} s for each. The processes
share the cores, so what the callers take, the server lacks.
"""


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("parts", nargs="*", metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "pytest", "-q", *(options.parts or ["benchmarks"])]
        command += [f"--benchmark-json={results}", "--timeout=600"]
        short = {"BENCHMARKS_SHORT": "1"} if options.short else {}
        status = subprocess.run(command, cwd=ROOT, check=False, env=os.environ | short).returncode
        if status:
            return status
        measured = [
            each["extra_info"] for each in json.loads(results.read_text(encoding="utf-8"))["benchmarks"]
        ]
    if options.short or options.parts:
        print(page(measured))
        return 0
    PAGE.write_text(page(measured), encoding="utf-8")
    for each in measured:
        if "growth" in each:
            PICTURE.write_text(picture(each["growth"]), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}, {PICTURE.relative_to(ROOT)}")
    return 0


def page(results: list[dict[str, Any]]) -> str:
    """The page, from what the benchmarks have recorded."""
    ratios = [each for each in results if "ratio" in each]
    others = [each for each in results if not {"ratio", "growth"} & each.keys()]
    others += [each["figures"] for each in ratios if "figures" in each]
    lines = [
        INTRODUCTION,
        "## Ratios",
        "",
        "| what | ratio | middle half | budget | took, against |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {each['name']} | **{each['ratio']:.2f}** | {each['low']:.2f} to {each['high']:.2f} "
        f"| {each['budget']} | {_time(each['subject_us'])}, {_time(each['baseline_us'])} |"
        for each in ratios
    ]
    lines += ["", "## Figures", "", "| what | measured | budget |", "|---|---|---|"]
    lines += [f"| {each['name']} | {figures(each)} | {each['budget']} |" for each in others]
    for each in results:
        if "growth" in each:
            lines += ["", *under_load(each)]
    lines += ["", "## Environment", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in environment().items()]
    return "\n".join(lines) + "\n"


def under_load(result: dict[str, Any]) -> list[str]:
    """What the control calls took, by the size of the flood."""
    growth = result["growth"]
    first, last = growth[0], growth[-1]
    alt = (
        f"Milliseconds by connections: {digits(first['p50_ms'])} in the median and {digits(first['p99_ms'])} "
        f"at the 99th percentile with none, {digits(last['p50_ms'])} and {digits(last['p99_ms'])} with "
        f"{last['connections']}"
    )
    rows = [
        f"| {row['connections']} | {digits(row['p50_ms'])} ms | {digits(row['p99_ms'])} ms "
        f"| {row['control_calls']} | {row['answered_per_s']:.0f} a second |"
        for row in growth
    ]
    return [
        GROWTH.format_map(result),
        f"![{alt}](assets/{PICTURE.name})",
        "",
        "| connections | control p50 | p99 | control calls | answers to the flood |",
        "|---|---|---|---|---|",
        *rows,
    ]


def figures(result: dict[str, Any]) -> str:
    """Whatever a benchmark has recorded beside a ratio, in words."""
    own = {name: value for name, value in result.items() if name not in ("name", "budget")}
    return ", ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in own.items())


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " and ".join(f"{count} {name}" for name, count in value.items())
    return digits(value) if isinstance(value, float) else str(value)


def _time(microseconds: float) -> str:
    return f"{microseconds:.1f} µs" if microseconds < 10_000 else f"{microseconds / 1000:.1f} ms"


if __name__ == "__main__":
    raise SystemExit(main())
