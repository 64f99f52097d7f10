"""Taking turns: two things are measured alternately in one run, and only their ratio is kept."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import Any

Round = Callable[[int], Awaitable[Any]]
"""Makes so many calls, one after the other."""


@dataclass(frozen=True)
class Ratio:
    """How much longer `subject` takes than `baseline`: medians over rounds taken in turn."""

    subject_us: float
    baseline_us: float
    ratio: float
    low: float
    high: float


async def take_turns(subject: Round, baseline: Round, *, rounds: int, calls: int) -> Ratio:
    """Measure both in turn. Each round is compared with the mean of the baseline's rounds around it."""
    await subject(calls)
    await baseline(calls)
    subjects: list[float] = []
    baselines: list[float] = [await _timed(baseline, calls)]
    for _ in range(rounds):
        subjects.append(await _timed(subject, calls))
        baselines.append(await _timed(baseline, calls))
    around = [(before + after) / 2 for before, after in pairwise(baselines)]
    ratios = sorted(mine / theirs for mine, theirs in zip(subjects, around, strict=True))
    quarter = len(ratios) // 4
    return Ratio(
        subject_us=statistics.median(subjects) * 1e6,
        baseline_us=statistics.median(baselines) * 1e6,
        ratio=statistics.median(ratios),
        low=ratios[quarter],
        high=ratios[-1 - quarter],
    )


async def _timed(work: Round, calls: int) -> float:
    gc.collect()
    gc.disable()
    try:
        began = time.perf_counter()
        await work(calls)
        return (time.perf_counter() - began) / calls
    finally:
        gc.enable()


def record(benchmark: Any, name: str, budget: str, measured: dict[str, Any]) -> None:
    """Keep a result where `pytest-benchmark` and the report find it."""
    benchmark.extra_info.update(name=name, budget=budget, **measured)


def run_once(benchmark: Any, work: Callable[[], Awaitable[Any]]) -> Any:
    """Run an async measurement as one round of `pytest-benchmark`; its own rounds take turns inside."""
    return benchmark.pedantic(lambda: asyncio.run(_as_coroutine(work)), rounds=1, iterations=1)


async def _as_coroutine(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


def environment() -> dict[str, str]:
    """What the figures stand with."""
    return {
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "Platform": f"{platform.system()} {platform.machine()}",
        "Cores": str(os.cpu_count()),
        "mcp": version("mcp"),
        "limits": version("limits"),
        "anyio": version("anyio"),
        "pydantic": version("pydantic"),
        "Event loop": "asyncio",
        "Build": "debug" if hasattr(sys, "gettotalrefcount") else "release",
    }
