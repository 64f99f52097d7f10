"""Runs every benchmark and writes docs/benchmarks.md."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import environment

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"

INTRODUCTION = """\
# Benchmarks

What the guard costs, as ratios of two things measured in turn in one run: `scripts/benchmarks` measures
all of it and writes this page. The machines that run it are shared and noisy, so the seconds beside a ratio
belong to one day and one machine; the range is the middle half of all rounds. No test asserts a time.
"""


def main() -> int:
    """Measure, and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "pytest", "-q", "benchmarks", f"--benchmark-json={results}"]
        status = subprocess.run([*command, "--timeout=600"], cwd=ROOT, check=False).returncode
        if status:
            return status
        measured = json.loads(results.read_text(encoding="utf-8"))["benchmarks"]
    PAGE.write_text(page([each["extra_info"] for each in measured]), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


def page(results: list[dict[str, Any]]) -> str:
    """The page, from what the benchmarks have recorded."""
    ratios = [each for each in results if "ratio" in each]
    others = [each for each in results if "ratio" not in each]
    lines = [
        INTRODUCTION,
        "## Ratios",
        "",
        "| what | ratio | middle half | budget | took, against |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {each['name']} | **{each['ratio']:.2f}** | {each['low']:.2f} to {each['high']:.2f} "
        f"| {each['budget']} | {each['subject_us']:.1f} µs, {each['baseline_us']:.1f} µs |"
        for each in ratios
    ]
    lines += ["", "## Figures", "", "| what | measured | budget |", "|---|---|---|"]
    lines += [f"| {each['name']} | {figures(each)} | {each['budget']} |" for each in others]
    lines += ["", "## Environment", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in environment().items()]
    return "\n".join(lines) + "\n"


def figures(result: dict[str, Any]) -> str:
    """Whatever a benchmark has recorded beside a ratio, in words."""
    own = {name: value for name, value in result.items() if name not in ("name", "budget")}
    return ", ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in own.items())


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " and ".join(f"{count} {name}" for name, count in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
