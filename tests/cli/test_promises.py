"""Each promise is kept by a flood that went well, and broken by what breaks it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from frontmcp_py.cli.flood import Record
from frontmcp_py.cli.promises import Probe, Promise, Seen, contradictions, judge

ROW: dict[str, Any] = {
    "submitted": 10,
    "accepted": 8,
    "started": 6,
    "completed": 3,
    "failed": 1,
    "timed_out": 1,
    "cancelled": 1,
    "cancelled_waiting": 1,
    "rejected": {"OVERLOADED": 2, "QUEUE_TIMEOUT": 1},
}
METRICS: dict[str, Any] = {
    "limits": {"max_active": 8, "reserved": 2, "max_queued": 4},
    "active": 0,
    "running": 0,
    "abandoned": 0,
    "queued": 0,
    "places": 0,
    "peaks": {"places": 8},
    "counters": ROW,
    "keys": {"shell": {"limit": 2, "peak": 2}},
    "tools": {"work": dict(ROW)},
}


def before() -> dict[str, Any]:
    zero: dict[str, Any] = {name: {} if name == "rejected" else 0 for name in ROW}
    return {**copy.deepcopy(METRICS), "counters": zero, "tools": {"work": dict(zero)}}


def flood() -> Seen:
    """What is seen of a server that keeps every promise."""
    return Seen(
        connections=20,
        calls=[
            Record("work", code, False, 0.0, 0.1) for code in ["ok"] * 5 + ["OVERLOADED"] * 2 + ["failed"]
        ],
        control=[Record("status", "ok", False, 0.0, 0.01)] * 2,
        controls=("status",),
        health=[Probe(200, 0.01)] * 5,
        ready=[Probe(200, 0.01, "ready"), Probe(503, 0.01, "overloaded")],
        ready_before=Probe(200, 0.01, "ready"),
        ready_after=Probe(200, 0.01, "ready"),
        metrics=[before(), copy.deepcopy(METRICS)],
        memory_mib=(80.0, 100.0),
        ended=(1.2, 5.0),
    )


def verdicts(promises: list[Promise]) -> dict[str, str]:
    return {each.name: each.verdict for each in promises}


def broken(seen: Seen) -> list[Promise]:
    return [each for each in judge(seen) if each.verdict != "kept"]


def test_a_flood_that_went_well_keeps_every_promise() -> None:
    promises = judge(flood())
    assert len(promises) == 10
    assert set(verdicts(promises).values()) == {"kept"}
    assert [each.says for each in promises] == [
        "10 calls, none lost",
        "2 of 8 calls",
        "at most 8 of 8 places were taken",
        "shell at most 2 of 2",
        "2 of status, the slowest in 10 ms",
        "5 of 5, the slowest in 10 ms",
        "1 of 2 were 503, afterwards ready",
        "in each of 2 answers; 10 calls were counted",
        "20 MiB more than 80 MiB",
        "1.2 s after SIGTERM",
    ]


def lose_a_call(seen: Seen) -> None:
    seen.calls.append(Record("work", "no answer within 60 s", True, 0.0, 60.0))


def lose_a_client(seen: Seen) -> None:
    seen.unconnected = 3, "ConnectError"


def refuse_nothing(seen: Seen) -> None:
    seen.calls = [each for each in seen.calls if each.code != "OVERLOADED"]


def run_too_many(seen: Seen) -> None:
    seen.metrics[0]["peaks"] = {"places": 9}  # type: ignore[index]


def share_too_much(seen: Seen) -> None:
    seen.metrics[1]["keys"]["shell"]["peak"] = 3


def refuse_control(seen: Seen) -> None:
    seen.control[0] = Record("status", "OVERLOADED", False, 0.0, 0.1)


def answer_no_control(seen: Seen) -> None:
    seen.control = []


def be_unhealthy(seen: Seen) -> None:
    seen.health.append(Probe(500, 0.1))


def be_silent(seen: Seen) -> None:
    seen.health.append(Probe(None, 5.0))


def never_say_ready(seen: Seen) -> None:
    seen.ready.append(Probe(404, 0.1))


def stay_busy(seen: Seen) -> None:
    seen.ready_after = Probe(200, 0.1, "stuck")


def stay_unready(seen: Seen) -> None:
    seen.ready_after = Probe(503, 0.1, "overloaded")


def miscount(seen: Seen) -> None:
    seen.metrics[1]["counters"]["completed"] += 1


def undercount(seen: Seen) -> None:
    seen.calls += seen.calls


def keep_a_place(seen: Seen) -> None:
    seen.metrics[1]["places"] = 1  # type: ignore[index]


def grow(seen: Seen) -> None:
    seen.memory_mib = 80.0, 400.0


def live_on(seen: Seen) -> None:
    seen.ended = None, 5.0


@pytest.mark.parametrize(
    ("harm", "name", "says"),
    [
        (lose_a_call, "every call is answered", "1 of 11 calls were lost (no answer within 60 s)"),
        (lose_a_client, "every call is answered", "3 of 20 clients could not connect (ConnectError)"),
        (
            refuse_nothing,
            "a flood is answered with OVERLOADED",
            "not shown: no call was refused for it; name",
        ),
        (run_too_many, "never more calls than max_active", "at most 9 of 8 places were taken"),
        (share_too_much, "shared keys stay bounded", "shell at most 3 of 2"),
        (refuse_control, "control calls are answered meanwhile", "1 of 2 were OVERLOADED (status)"),
        (answer_no_control, "control calls are answered meanwhile", "none was answered (status)"),
        (be_unhealthy, "/healthz stays 200", "1 of 6 were not 200 (500)"),
        (be_silent, "/healthz stays 200", "1 of 6 were not 200 (no answer)"),
        (never_say_ready, "/readyz answers, and is ready again", "1 of 3 were no answers (404)"),
        (stay_busy, "/readyz answers, and is ready again", "afterwards it says 200 stuck"),
        (stay_unready, "/readyz answers, and is ready again", "afterwards it says 503 overloaded"),
        (miscount, "the counters add up", "6 started, of which -1 have not ended"),
        (undercount, "the counters add up", "18 calls were answered, but 10 counted"),
        (keep_a_place, "the counters add up", "afterwards there are still 1 places"),
        (grow, "memory stays bounded", "320 MiB more than 80 MiB"),
        (live_on, "it ends when it is told to", "not within 5 s of SIGTERM"),
    ],
)
def test_each_harm_breaks_its_promise_and_no_other(
    harm: Callable[[Seen], None], name: str, says: str
) -> None:
    seen = flood()
    harm(seen)
    (promise,) = broken(seen)
    assert (promise.name, promise.verdict) == (name, "broken")
    assert promise.says.startswith(says)


def test_a_flood_that_finds_room_has_shown_nothing() -> None:
    seen = flood()
    refuse_nothing(seen)
    seen.connections = 10
    (promise,) = broken(seen)
    assert promise.says == "not shown: 10 connections find room for 10 calls; give more --connections"
    assert verdicts(judge(seen, needs_overload=False))[promise.name] == "not judged"


def test_without_metrics_only_what_can_be_seen_from_outside_is_judged() -> None:
    seen = flood()
    seen.metrics = []
    assert [each.name for each in judge(seen) if each.verdict == "not judged"] == [
        "never more calls than max_active",
        "shared keys stay bounded",
        "the counters add up",
    ]
    assert "broken" not in verdicts(judge(seen)).values()


def test_without_admission_keys_and_control_tools_there_is_nothing_to_judge() -> None:
    seen = flood()
    seen.controls, seen.control = (), []
    for metrics in seen.metrics:
        metrics["limits"]["max_active"] = None
        metrics["keys"].clear()
    assert len([each for each in judge(seen) if each.verdict == "not judged"]) == 3


def test_a_key_that_no_call_used_proves_nothing() -> None:
    seen = flood()
    for metrics in seen.metrics:
        metrics["keys"]["crm"] = {"limit": 1, "peak": 0}
    assert broken(seen) == []
    for metrics in seen.metrics:
        metrics["keys"]["shell"]["peak"] = 0
    (promise,) = broken(seen)
    assert promise.verdict == "not judged"
    assert promise.says == "no call used shell, crm; name a tool of one with --call"


def test_a_server_that_was_degraded_before_need_not_be_better_afterwards() -> None:
    seen = flood()
    seen.ready_before = seen.ready_after = Probe(200, 0.1, "degraded")
    assert broken(seen) == []
    seen.ready_before = seen.ready_after = Probe(200, 0.1, "stuck")
    assert len(broken(seen)) == 1


def test_a_server_that_was_started_elsewhere_is_not_ended_or_weighed() -> None:
    seen = flood()
    seen.memory_mib = seen.ended = None
    assert len(judge(seen)) == 8


@pytest.mark.parametrize(
    "name", ["submitted", "accepted", "started", "failed", "timed_out", "cancelled_waiting"]
)
def test_every_counter_is_part_of_a_sum(name: str) -> None:
    assert contradictions(METRICS) == []
    wrong = copy.deepcopy(METRICS)
    wrong["counters"][name] += 3
    assert contradictions(wrong)


def test_active_calls_run_or_are_abandoned() -> None:
    assert contradictions({**METRICS, "active": 2, "abandoned": 1}) == [
        "2 active, but 0 running and 1 abandoned"
    ]


def test_of_a_single_tool_no_more_may_have_ended_than_started() -> None:
    wrong = copy.deepcopy(METRICS)
    wrong["tools"]["work"]["completed"] += 1
    assert contradictions(wrong) == ["work: 6 started, of which -1 have not ended"]
