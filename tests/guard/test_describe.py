from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontmcp_py.call import Call
from frontmcp_py.guard import Guard, Limits
from frontmcp_py.guard.describe import as_data, describe, sentence
from frontmcp_py.policy import Admission, Concurrency, Policy, RateLimit, Throttle, Timeout


def limits(policy: Policy, throttle: Throttle | None = None) -> Limits:
    return Limits.of(policy, throttle)


def said(*rates: RateLimit, slots: object = None, timeout: float | None = None) -> str:
    return sentence(limits(Policy(list(rates) or None, slots, timeout)))  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------- one sentence


def test_all_limits_of_a_tool_are_one_sentence() -> None:
    policy = Policy(RateLimit(2, "1h", "user_id"), Concurrency(1, queue_timeout=5), 30)
    assert sentence(limits(policy)) == (
        "Limits: at most 2 calls per hour for each signed-in caller, and 2 for all anonymous callers "
        "together; one at a time, waiting up to 5 seconds for a turn; gives up after 30 seconds."
    )


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (RateLimit(1, 1), "at most 1 call per second"),
        (RateLimit(10, 60), "at most 10 calls per minute"),
        (RateLimit(10, "5m"), "at most 10 calls per 5 minutes"),
        (RateLimit(3, "7h"), "at most 3 calls per 7 hours"),
        (RateLimit(3, "1d"), "at most 3 calls per day"),
        (RateLimit(3, "90s"), "at most 3 calls per 90 seconds"),
        (RateLimit(3, "1500ms"), "at most 3 calls per 1.5 seconds"),
        (RateLimit(3, 0.1), "at most 3 calls per 100 milliseconds"),
        (RateLimit(3, timedelta(days=366)), "at most 3 calls per 366 days"),
        (RateLimit(3, 60, strategy="moving-window"), "at most 3 calls in any 1 minute"),
        (RateLimit(3, 60, strategy="sliding-window"), "at most 3 calls per minute"),
        (RateLimit(3, 60, "ip"), "at most 3 calls per minute for each client address"),
        (
            RateLimit(3, 60, "session"),
            "at most 3 calls per minute for each session, "
            "and 3 for all anonymous callers without one together",
        ),
        (RateLimit(3, 60, lambda call: call.tool), "at most 3 calls per minute for each group of callers"),
    ],
)
def test_a_rate_limit_in_words(rate: RateLimit, expected: str) -> None:
    assert said(rate) == f"Limits: {expected}."


@pytest.mark.parametrize(
    ("slot", "expected"),
    [
        (Concurrency(1), "one at a time"),
        (Concurrency(4), "at most 4 at a time"),
        (Concurrency(1, queue_timeout=None), "one at a time, waiting for a turn"),
        (Concurrency(1, queue_timeout=0.25), "one at a time, waiting up to 250 milliseconds for a turn"),
        (Concurrency(2, partition_by="ip"), "at most 2 at a time for each client address"),
        (
            Concurrency(1, partition_by="user_id"),
            "one at a time for each signed-in caller, and one for all anonymous callers together",
        ),
        (
            Concurrency(1, key="shell", queue_timeout=60),
            "one at a time, shared with other tools, waiting up to 1 minute for a turn",
        ),
    ],
)
def test_a_concurrency_limit_in_words(slot: Concurrency, expected: str) -> None:
    assert said(slots=slot) == f"Limits: {expected}."


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        (30, "30 seconds"),
        (1, "1 second"),
        (0.5, "500 milliseconds"),
        (0.0015, "1.5 milliseconds"),
        (3600, "1 hour"),
    ],
)
def test_a_timeout_in_words(timeout: float, expected: str) -> None:
    assert said(timeout=timeout) == f"Limits: gives up after {expected}."


def test_no_length_of_time_is_rounded_away() -> None:
    assert said(RateLimit(3, 1234.567)) == "Limits: at most 3 calls per 1234.567 seconds."
    assert said(timeout=86399.999) == "Limits: gives up after 86399.999 seconds."


def test_what_limits_nothing_is_not_told() -> None:
    assert said(slots=[Concurrency(0, key="k")]) == ""
    assert sentence(limits(Policy(None, 0, None))) == ""
    assert as_data(limits(Policy(concurrency=Concurrency(0, key="k")))) == {}


def test_it_names_no_other_tool() -> None:
    policy = Policy(concurrency=[Concurrency(1, key="export_tickets"), Concurrency(2)])
    assert "export" not in sentence(limits(policy))
    assert "export" not in str(as_data(limits(policy)))


# ------------------------------------------------------------------------------- what is really enforced


def test_defaults_and_globals_are_told_where_they_hold() -> None:
    throttle = Throttle(
        global_rate_limit="100/hour", global_concurrency=9, default_rate_limit="5/minute", default_timeout=30
    )
    assert sentence(limits(Policy("1/day"), throttle)) == (
        "Limits: at most 1 call per day; at most 100 calls per hour over all tools; "
        "at most 9 at a time over all tools; gives up after 30 seconds."
    )
    assert sentence(limits(Policy(priority="control"), throttle)) == ""
    assert sentence(limits(Policy(None, None, None), throttle)) == (
        "Limits: at most 100 calls per hour over all tools; at most 9 at a time over all tools."
    )


@pytest.mark.parametrize(
    ("queue_timeout", "admission", "told"),
    [
        (5, Admission(queue_timeout=9), "waiting up to 5 seconds for a turn"),
        (60, Admission(queue_timeout=9), "waiting up to 9 seconds for a turn"),
        (None, Admission(queue_timeout=9), "waiting up to 9 seconds for a turn"),
        (60, None, "waiting up to 1 minute for a turn"),
    ],
)
def test_nobody_is_told_of_a_longer_wait_than_admission_lets(
    queue_timeout: float | None, admission: Admission | None, told: str
) -> None:
    slot = Concurrency(1, queue_timeout=queue_timeout)
    guard = Guard(Throttle(admission=admission, global_concurrency=None if queue_timeout is None else slot))
    limits = guard.limits_of(Policy(concurrency=slot))
    assert sentence(limits).count(told) == 1 + len(limits.global_slots)
    times = {each.get("queueTimeoutMs") for each in as_data(limits)["concurrency"]}
    assert times == {limits.slots[0].queue_timeout and limits.slots[0].queue_timeout * 1000}


def test_with_the_throttle_off_a_tools_own_timeout_is_still_told() -> None:
    off = Guard(Throttle(enabled=False, default_timeout=9))
    assert off.limits_of(Policy("1/day", 1, 30)) == Limits((), (), Timeout(30), (), ())
    assert sentence(off.limits_of(Policy("1/day", 1))) == ""


def test_while_observing_only_timeouts_are_told_since_only_they_are_enforced() -> None:
    guard = Guard(
        Throttle(mode="observe", global_rate_limit="1/day", default_concurrency=1, default_timeout=9)
    )
    assert sentence(guard.limits_of(Policy("1/day"))) == "Limits: gives up after 9 seconds."
    assert as_data(guard.limits_of(Policy("1/day", timeout=5))) == {"timeoutMs": 5000}


# ----------------------------------------------------------------------------------------------- as data


def test_the_same_as_data() -> None:
    def customer(call: Call) -> str:
        return str(call.arguments)

    policy = Policy(
        [RateLimit(2, "1h", "user_id"), RateLimit(5, 60, customer, "moving-window")],
        [
            Concurrency(1, queue_timeout=2.5),
            Concurrency(8, key="shell", queue_timeout=None, partition_by="ip"),
        ],
        0.0015,
    )
    assert as_data(limits(policy)) == {
        "rateLimits": [
            {"maxRequests": 2, "windowMs": 3_600_000, "partitionBy": "user_id", "strategy": "fixed-window"},
            {"maxRequests": 5, "windowMs": 60_000, "partitionBy": "function", "strategy": "moving-window"},
        ],
        "concurrency": [
            {"maxConcurrent": 1, "queueTimeoutMs": 2500, "partitionBy": "global"},
            {"maxConcurrent": 8, "partitionBy": "ip"},
        ],
        "timeoutMs": 1.5,
    }


def test_whole_milliseconds_are_integers() -> None:
    data = as_data(limits(Policy(concurrency=Concurrency(1, queue_timeout=0.1 + 0.2), timeout=30)))
    assert (repr(data["concurrency"][0]["queueTimeoutMs"]), repr(data["timeoutMs"])) == ("300", "30000")


# ------------------------------------------------------------------------------------ in the description

HOURLY = limits(Policy("2/hour"))
NONE = limits(Policy())
SAID = "Limits: at most 2 calls per hour."


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("Export tickets.", f"Export tickets. {SAID}"),
        ("", SAID),
        ("Export.\n\n{limits}\n\nMore.", f"Export.\n\n{SAID}\n\nMore."),
        ("{limits} Export.", f"{SAID} Export."),
        ("{limits}", SAID),
        ("Braces {like} these.", f"Braces {{like}} these. {SAID}"),
    ],
)
def test_the_sentence_stands_at_the_end_or_where_it_is_asked_for(description: str, expected: str) -> None:
    assert describe(description, HOURLY) == expected


def test_a_description_of_several_paragraphs_ends_with_one_more() -> None:
    assert describe("Export tickets.\n\n- one\n- two", HOURLY) == f"Export tickets.\n\n- one\n- two\n\n{SAID}"


@pytest.mark.parametrize("nothing", [NONE, None], ids=["no limits", "not to be told"])
def test_where_there_is_nothing_to_say_nothing_is_said(nothing: Limits | None) -> None:
    assert describe("Export tickets.", nothing) == "Export tickets."
    assert describe("Export tickets.\n\n{limits}", nothing) == "Export tickets."
    assert describe("Export {limits} tickets.", nothing) == "Export  tickets."
    assert describe("{limits}", nothing) == ""
    assert describe("", nothing) == ""


policies = st.builds(
    Policy,
    st.lists(st.builds(RateLimit, st.integers(1, 9), st.sampled_from([1, 60, 3600])), min_size=1, max_size=3),
    st.lists(
        st.builds(Concurrency, st.integers(1, 9), queue_timeout=st.sampled_from([0, 5, None])), min_size=1
    ),
    st.sampled_from([1, 0.5, None]),
)


@given(policies, policies)
def test_it_says_the_same_of_the_same_limits_and_other_things_of_others(one: Policy, other: Policy) -> None:
    again = Policy(one.rate_limits, one.concurrency_limits, one.deadline)
    assert sentence(limits(one)) == sentence(limits(again))
    assert as_data(limits(one)) == as_data(limits(again))
    assert (sentence(limits(one)) == sentence(limits(other))) == (limits(one) == limits(other))
    assert (as_data(limits(one)) == as_data(limits(other))) == (limits(one) == limits(other))
