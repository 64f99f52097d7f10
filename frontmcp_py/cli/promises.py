"""What a server promises for a flood, and whether it kept it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from frontmcp_py.cli.flood import Record

Verdict = Literal["kept", "broken", "not judged"]
Metrics = Mapping[str, Any]

OVERLOADED: Final = "OVERLOADED"

MEMORY_GROWTH_MIB: Final = 256
"""How much a flood may make the process grow. Two hundred connections take about 20 MiB."""

_NO_METRICS: Final = "GET /metrics does not answer here"


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise.

    Attributes:
        name: What is promised.
        verdict: Whether it was kept.
        says: The numbers that show it.
    """

    name: str
    verdict: Verdict
    says: str


@dataclass(frozen=True, slots=True)
class Probe:
    """One answer of `/healthz` or `/readyz`.

    Attributes:
        answered: The status code; `None` if there was no answer.
        took: Seconds.
        status: What `/readyz` says, such as `ready`.
    """

    answered: int | None
    took: float
    status: str = ""


@dataclass(slots=True)
class Seen:
    """Everything that was seen of a server, before, during and after the flood.

    Attributes:
        connections: How many clients were to call.
        unconnected: How many of them could not connect, and why the first could not.
        calls: The flood.
        control: Calls of control tools meanwhile.
        controls: The names of these tools.
        health: The answers of `/healthz`.
        ready: The answers of `/readyz` during the flood.
        ready_before: That before it.
        ready_after: That when it had been over for a while.
        metrics: The answers of `/metrics`, the last from when the server had come to rest.
        memory_mib: Memory of the process before the flood, and the most it had; if it is known.
        ended: Seconds that the process took to end, `None` if it did not, and how long it may take; if it was
            started here.
    """

    connections: int = 0
    unconnected: tuple[int, str] = (0, "")
    calls: list[Record] = field(default_factory=list[Record])
    control: list[Record] = field(default_factory=list[Record])
    controls: tuple[str, ...] = ()
    health: list[Probe] = field(default_factory=list[Probe])
    ready: list[Probe] = field(default_factory=list[Probe])
    ready_before: Probe | None = None
    ready_after: Probe | None = None
    metrics: list[Metrics] = field(default_factory=list[Metrics])
    memory_mib: tuple[float, float] | None = None
    ended: tuple[float | None, float] | None = None


def judge(seen: Seen, *, needs_overload: bool = True) -> list[Promise]:
    """Every promise, in the order in which they are shown.

    Args:
        seen: What was seen.
        needs_overload: A flood of which nothing was refused has shown nothing, and is a broken promise.
    """
    promises = [
        _answered(seen),
        _overload(seen, needs_overload),
        _places(seen),
        _keys(seen),
        _control(seen),
        _health(seen),
        _readiness(seen),
        _sums(seen),
    ]
    if seen.memory_mib is not None:
        promises.append(_memory(*seen.memory_mib))
    if seen.ended is not None:
        promises.append(_ending(*seen.ended))
    return promises


def contradictions(metrics: Metrics) -> list[str]:
    """The sums of one answer of `/metrics` that do not add up."""
    queued, running = int(metrics.get("queued", 0)), int(metrics.get("running", 0))
    rows: dict[str, tuple[Mapping[str, Any], int | None, int | None]] = {
        "": (_table(metrics, "counters"), queued, running)
    }
    rows |= {f"{name}: ": (row, None, None) for name, row in _table(metrics, "tools").items()}
    wrong: list[str] = []
    for name, (row, waiting, runs) in rows.items():
        counts = {each: int(row.get(each, 0)) for each in _COUNTERS}
        refused = sum(int(number) for number in _table(row, "rejected").values())
        # Of one tool it is not said how many wait or run, only that they are not fewer than none.
        rest = counts["submitted"] - refused - counts["cancelled_waiting"] - counts["started"]
        if rest != waiting if waiting is not None else rest < 0:
            wrong.append(
                f"{name}{counts['submitted']} submitted, of which {rest} are neither refused nor started"
            )
        rest = counts["started"] - sum(counts[each] for each in _ENDINGS)
        if rest != runs if runs is not None else rest < 0:
            wrong.append(f"{name}{counts['started']} started, of which {rest} have not ended")
        if not counts["started"] <= counts["accepted"] <= counts["submitted"]:
            wrong.append(f"{name}{counts['accepted']} accepted of {counts['submitted']} submitted")
    active, abandoned = int(metrics.get("active", 0)), int(metrics.get("abandoned", 0))
    if active != running + abandoned:
        wrong.append(f"{active} active, but {running} running and {abandoned} abandoned")
    return wrong


_ENDINGS: Final = ("completed", "failed", "timed_out", "cancelled")
_COUNTERS: Final = ("submitted", "accepted", "started", "cancelled_waiting", *_ENDINGS)


def _answered(seen: Seen) -> Promise:
    name = "every call is answered"
    every = [*seen.calls, *seen.control]
    lost = [each for each in every if each.lost]
    problems: list[str] = []
    if seen.unconnected[0]:
        problems.append(
            f"{seen.unconnected[0]} of {seen.connections} clients could not connect ({seen.unconnected[1]})"
        )
    if lost:
        (reason, _), *_ = Counter(each.code for each in lost).most_common(1)
        problems.append(f"{len(lost)} of {len(every)} calls were lost ({reason})")
    if not every and not problems:
        problems.append("no call was made")
    return _promise(name, problems, f"{len(every)} calls, none lost")


def _overload(seen: Seen, needed: bool) -> Promise:
    name = "a flood is answered with OVERLOADED"
    refused = sum(each.code == OVERLOADED for each in seen.calls)
    if refused:
        return Promise(name, "kept", f"{refused} of {len(seen.calls)} calls")
    room = _room(seen.metrics[-1]) if seen.metrics else None
    if room is not None and seen.connections <= room:
        hint = f"{seen.connections} connections find room for {room} calls; give more --connections"
    else:
        hint = "no call was refused for it; name slower tools with --call, or give more --connections"
    return Promise(name, "broken" if needed else "not judged", f"not shown: {hint}")


def _room(metrics: Metrics) -> int | None:
    """How many normal calls run and wait at most."""
    limits = _table(metrics, "limits")
    if limits.get("max_active") is None:
        return None
    return int(limits["max_active"]) - int(limits.get("reserved") or 0) + int(limits.get("max_queued") or 0)


def _places(seen: Seen) -> Promise:
    name = "never more calls than max_active"
    if not seen.metrics:
        return Promise(name, "not judged", _NO_METRICS)
    most = _table(seen.metrics[-1], "limits").get("max_active")
    if most is None:
        return Promise(name, "not judged", "the server has no admission")
    peak = max(int(_table(each, "peaks").get("places", 0)) for each in seen.metrics)
    says = f"at most {peak} of {most} places were taken"
    return Promise(name, "kept" if peak <= int(most) else "broken", says)


def _keys(seen: Seen) -> Promise:
    name = "shared keys stay bounded"
    if not seen.metrics:
        return Promise(name, "not judged", _NO_METRICS)
    keys = _table(seen.metrics[-1], "keys")
    if not keys:
        return Promise(name, "not judged", "no tools share a key")
    used = {key: row for key, row in keys.items() if int(row["peak"])}
    if not used:
        return Promise(name, "not judged", f"no call used {', '.join(keys)}; name a tool of one with --call")
    over = [key for key, row in used.items() if int(row["peak"]) > int(row["limit"])]
    shown = ", ".join(f"{key} at most {row['peak']} of {row['limit']}" for key, row in used.items())
    return Promise(name, "broken" if over else "kept", shown)


def _control(seen: Seen) -> Promise:
    name = "control calls are answered meanwhile"
    if not seen.controls:
        return Promise(name, "not judged", "no control tool may be called unasked; name one with --control")
    shown = ", ".join(seen.controls)
    refused = [each.code for each in seen.control if each.code == OVERLOADED]
    lost = [each.code for each in seen.control if each.lost]
    problems: list[str] = []
    if not seen.control:
        problems.append(f"none was answered ({shown})")
    if refused:
        problems.append(f"{len(refused)} of {len(seen.control)} were OVERLOADED ({shown})")
    if lost:
        problems.append(f"{len(lost)} of {len(seen.control)} were lost ({lost[0]})")
    slowest = max((each.took for each in seen.control), default=0.0)
    return _promise(name, problems, f"{len(seen.control)} of {shown}, the slowest in {slowest * 1000:.0f} ms")


def _health(seen: Seen) -> Promise:
    bad = [each for each in seen.health if each.answered != 200]
    problems = [f"{len(bad)} of {len(seen.health)} were not 200 ({_shown(bad[0])})"] if bad else []
    if not seen.health:
        problems.append("it was never asked")
    slowest = max((each.took for each in seen.health), default=0.0)
    says = f"{len(seen.health)} of {len(seen.health)}, the slowest in {slowest * 1000:.0f} ms"
    return _promise("/healthz stays 200", problems, says)


def _readiness(seen: Seen) -> Promise:
    name = "/readyz answers, and is ready again"
    bad = [each for each in seen.ready if each.answered not in (200, 503)]
    problems = [f"{len(bad)} of {len(seen.ready)} were no answers ({_shown(bad[0])})"] if bad else []
    after = seen.ready_after
    # A server that was degraded before need not be better afterwards.
    before = seen.ready_before.status if seen.ready_before is not None else ""
    fine = {"ready", before} - {"overloaded", "draining", "stuck", "busy", ""}
    if after is None or after.answered != 200 or after.status not in fine:
        problems.append(f"afterwards it says {'nothing' if after is None else _shown(after)}")
    busy = sum(each.answered == 503 for each in seen.ready)
    ends = after.status if after is not None else ""
    return _promise(name, problems, f"{busy} of {len(seen.ready)} were 503, afterwards {ends}")


def _sums(seen: Seen) -> Promise:
    name = "the counters add up"
    if not seen.metrics:
        return Promise(name, "not judged", _NO_METRICS)
    problems = [wrong for each in seen.metrics for wrong in contradictions(each)]
    first, last = seen.metrics[0], seen.metrics[-1]
    counted = int(_table(last, "counters").get("submitted", 0)) - int(
        _table(first, "counters").get("submitted", 0)
    )
    made = sum(not each.lost for each in [*seen.calls, *seen.control])
    if counted < made:
        problems.append(f"{made} calls were answered, but {counted} counted")
    at_rest = {each: int(last.get(each, 0)) for each in ("active", "queued", "places")}
    if any(at_rest.values()):
        left = ", ".join(f"{number} {each}" for each, number in at_rest.items() if number)
        problems.append(f"afterwards there are still {left}")
    return _promise(
        name, problems[:2], f"in each of {len(seen.metrics)} answers; {counted} calls were counted"
    )


def _memory(before: float, most: float) -> Promise:
    grown = most - before
    verdict: Verdict = "kept" if grown <= MEMORY_GROWTH_MIB else "broken"
    return Promise("memory stays bounded", verdict, f"{grown:.0f} MiB more than {before:.0f} MiB")


def _ending(took: float | None, allowed: float) -> Promise:
    name = "it ends when it is told to"
    if took is None:
        return Promise(name, "broken", f"not within {allowed:g} s of SIGTERM")
    return Promise(name, "kept", f"{took:.1f} s after SIGTERM")


def _promise(name: str, problems: Sequence[str], says: str) -> Promise:
    return Promise(name, "broken", "; ".join(problems)) if problems else Promise(name, "kept", says)


def _shown(probe: Probe) -> str:
    if probe.answered is None:
        return "no answer"
    return f"{probe.answered} {probe.status}".rstrip()


def _table(metrics: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = metrics.get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}
