"""Limits as values: which are accepted, what they become, and what is said about those that are not."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from functools import partial
from ipaddress import IPv4Address, ip_network
from typing import Any

import limits
import pytest

from frontmcp_py import policy
from frontmcp_py.call import Call, Caller
from frontmcp_py.errors import ConfigurationError
from frontmcp_py.policy import (
    UNSET,
    Admission,
    Concurrency,
    IPFilter,
    Policy,
    RateLimit,
    Throttle,
    Timeout,
    check_count,
    check_flag,
    check_text,
    concurrency_limits,
    from_mapping,
    names_options,
    naming,
    nearest,
    parse_duration,
    rate_limits,
)

Make = Callable[..., object]

NO_COUNT: list[object] = [
    -1,
    10**30,
    10**5000,
    "5",
    2.5,
    2.0,
    True,
    False,
    float("nan"),
    float("inf"),
    None,
    [1],
    1j,
]
NO_DURATION: list[object] = [
    -1,
    10**12,
    10**400,
    True,
    False,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "s",
    "1h30m",
    "1,5h",
    "-1s",
    "1e3s",
    "1H",
    "1 week",
    "NaNs",
    "٣s",
    "9" * 5000 + "s",
    timedelta(days=-1),
    Decimal(1),
    [1],
    b"1s",
]


def by_user(call: Call) -> str | None:
    return call.caller.user_id


async def by_looking_it_up(call: Call) -> str:
    return call.tool


def said(make: Callable[[], object]) -> str:
    """What a `ConfigurationError` says."""
    with pytest.raises(ConfigurationError) as caught:
        make()
    return str(caught.value)


def shown(value: object) -> str:
    """How a bad value stands in a message, or the beginning of it."""
    try:
        return repr(value)[:60]
    except ValueError:
        return "a value of type int"


def ids(values: Sequence[object]) -> list[str]:
    return [
        f"{index} {shown(value)[:20].encode('ascii', 'replace').decode()}"
        for index, value in enumerate(values)
    ]


class TestDurations:
    @pytest.mark.parametrize(
        ("value", "seconds"),
        [
            (2, 2.0),
            (0.25, 0.25),
            (timedelta(minutes=1, milliseconds=5), 60.005),
            ("250ms", 0.25),
            ("30s", 30.0),
            ("5m", 300.0),
            ("1.5h", 5400.0),
            ("1.1h", 3960.0),
            ("1d", 86_400.0),
            (" 2 h ", 7200.0),
        ],
        ids=str,
    )
    def test_a_duration_is_seconds_a_timedelta_or_one_number_and_a_unit(
        self, value: object, seconds: float
    ) -> None:
        read = parse_duration(value, field="x", low=0, high=86_400)
        assert read == seconds
        assert type(read) is float

    @pytest.mark.parametrize("value", NO_DURATION, ids=ids(NO_DURATION))
    def test_anything_else_is_refused_with_what_is_allowed(self, value: object) -> None:
        text = said(lambda: parse_duration(value, field="Timeout.execute", low=0.001, high=86_400))
        assert text.startswith(f"Timeout.execute: {shown(value)}")
        assert "is not allowed; give seconds from 0.001 to 86400" in text
        assert "one number and ms, s, m, h or d" in text

    @pytest.mark.parametrize("value", ["30", "0.5", " 5 "])
    def test_text_without_a_unit_is_told_that_it_needs_one(self, value: str) -> None:
        text = said(lambda: parse_duration(value, field="RateLimit.window", low=0.1, high=60))
        assert text.startswith(f"RateLimit.window: {value!r} needs a unit; give ")

    def test_both_ends_of_a_range_belong_to_it(self) -> None:
        assert parse_duration(0.1, field="x", low=0.1, high=60) == 0.1
        assert parse_duration("1m", field="x", low=0.1, high=60) == 60.0
        said(lambda: parse_duration(0.0999, field="x", low=0.1, high=60))
        said(lambda: parse_duration(60.001, field="x", low=0.1, high=60))


class TestSingleValues:
    def test_counts_are_whole_numbers_in_a_range(self) -> None:
        assert [check_count(value, "x", 1, 3) for value in (1, 2, 3)] == [1, 2, 3]
        assert said(lambda: check_count(4, "worker_threads", 1, 3)) == (
            "worker_threads: 4 is not allowed; give an integer from 1 to 3"
        )

    @pytest.mark.parametrize("value", [1, 0, "true", None])
    def test_only_true_and_false_are_flags(self, value: object) -> None:
        assert said(lambda: check_flag(value, "Throttle.enabled")) == (
            f"Throttle.enabled: {value!r} is not allowed; give True or False"
        )

    @pytest.mark.parametrize("value", ["", "  ", None, 5, b"shell"])
    def test_text_is_not_blank(self, value: object) -> None:
        assert "give text that is not blank" in said(lambda: check_text(value, "Concurrency.key"))

    def test_a_message_never_shows_a_value_at_length(self) -> None:
        text = said(lambda: check_count("x" * 10_000, "worker_threads", 1, 3))
        assert len(text) < 200

    def test_a_value_that_cannot_be_shown_is_refused_all_the_same(self) -> None:
        class Broken:
            def __repr__(self) -> str:
                raise RuntimeError

        assert said(lambda: check_count(Broken(), "worker_threads", 1, 3)).startswith(
            "worker_threads: a value of type Broken is not allowed"
        )


COUNTS: dict[str, tuple[Make, int, int]] = {
    "RateLimit.max_requests": (RateLimit, 1, 10**9),
    "Concurrency.max_concurrent": (Concurrency, 0, 10**6),
    "Concurrency.max_queued": (lambda n: Concurrency(max_queued=n), 0, 10**6),
    "Admission.max_active": (lambda n: Admission(n, reserved=0), 2, 100_000),
    "Admission.reserved": (lambda n: Admission(10, n), 0, 9),
    "Admission.max_queued": (lambda n: Admission(max_queued=n), 0, 100_000),
    "Throttle.max_keys": (lambda n: Throttle(max_keys=n), 1, 10**9),
}
DURATIONS: dict[str, tuple[Make, float, float]] = {
    "RateLimit.window": (lambda s: RateLimit(1, s), 0.1, 366 * 86_400),
    "Concurrency.queue_timeout": (lambda s: Concurrency(queue_timeout=s), 0, 86_400),
    "Timeout.execute": (Timeout, 0.001, 86_400),
    "Timeout.cancel_after": (lambda s: Timeout(1, cancel_after=s), 0, 86_400),
    "Admission.queue_timeout": (lambda s: Admission(queue_timeout=s), 0.001, 600),
    "Throttle.storage_timeout": (lambda s: Throttle(storage_timeout=s), 0.01, 60),
    "Throttle.lease": (lambda s: Throttle(lease=s), 1, 3600),
}
OPTIONAL = {"Concurrency.max_queued", "Concurrency.queue_timeout", "Timeout.cancel_after"}


class TestRanges:
    """Bad numbers never reach a call: they are refused where they stand, with the field's name."""

    @pytest.mark.parametrize("value", NO_COUNT, ids=ids(NO_COUNT))
    @pytest.mark.parametrize("field", COUNTS)
    def test_a_bad_count_is_refused_by_name(self, field: str, value: object) -> None:
        make, low, high = COUNTS[field]
        if value is None and field in OPTIONAL:
            return
        assert said(lambda: make(value)) == (
            f"{field}: {shown(value)} is not allowed; give an integer from {low} to {high}"
        )

    @pytest.mark.parametrize("field", COUNTS)
    def test_a_count_may_be_at_both_ends_of_its_range_and_not_beyond(self, field: str) -> None:
        make, low, high = COUNTS[field]
        name = field.partition(".")[2]
        assert getattr(make(low), name) == low
        assert getattr(make(high), name) == high
        for beyond in (low - 1, high + 1):
            assert f"{field}: {beyond} is not allowed" in said(partial(make, beyond))

    @pytest.mark.parametrize("value", [*NO_DURATION, None, "30"], ids=ids([*NO_DURATION, None, "30"]))
    @pytest.mark.parametrize("field", DURATIONS)
    def test_a_bad_duration_is_refused_by_name(self, field: str, value: object) -> None:
        make, low, high = DURATIONS[field]
        if value is None and field in OPTIONAL:
            return
        text = said(lambda: make(value))
        assert text.startswith(f"{field}: {shown(value)}")
        assert f"give seconds from {low} to {high}" in text

    @pytest.mark.parametrize("field", DURATIONS)
    def test_a_duration_may_be_at_both_ends_of_its_range_and_not_beyond(self, field: str) -> None:
        make, low, high = DURATIONS[field]
        name = field.partition(".")[2]
        assert getattr(make(low), name) == low
        assert getattr(make(high), name) == high
        for beyond in (low - 0.0005, high + 0.0005):
            assert f"{field}: {beyond!r} is not allowed" in said(partial(make, beyond))

    @pytest.mark.parametrize("field", DURATIONS)
    def test_every_duration_may_be_text_or_a_timedelta(self, field: str) -> None:
        make, _, _ = DURATIONS[field]
        assert make("2s") == make(timedelta(seconds=2)) == make(2)

    @pytest.mark.parametrize("field", sorted(OPTIONAL))
    def test_what_may_be_unbounded_or_absent_may_be_none(self, field: str) -> None:
        make = (COUNTS | DURATIONS)[field][0]
        assert getattr(make(None), field.partition(".")[2]) is None


class TestRateLimit:
    def test_its_defaults_are_a_fixed_minute_for_everybody(self) -> None:
        limit = RateLimit(2)
        assert (limit.max_requests, limit.window, limit.partition_by, limit.strategy) == (
            2,
            60.0,
            "global",
            "fixed-window",
        )

    @pytest.mark.parametrize(
        ("window", "milliseconds"),
        [
            (0.1, 100),
            (1.001, 1001),
            (0.1 + 0.2, 300),
            (1.1 * 3, 3300),
            ("1h", 3_600_000),
            ("366d", 31_622_400_000),
            (timedelta(days=365, milliseconds=1), 31_536_000_001),
            (31_622_399.999, 31_622_399_999),
        ],
    )
    def test_a_window_is_whole_milliseconds_whatever_floats_make_of_it(
        self, window: float | str | timedelta, milliseconds: int
    ) -> None:
        limit = RateLimit(2, window)
        assert limit.window_ms == milliseconds
        assert limit.window == milliseconds / 1000

    @pytest.mark.parametrize(
        "window", [0.1005, 1.0001, 1_000_000.0005, timedelta(seconds=1, microseconds=500)]
    )
    def test_a_window_with_a_broken_millisecond_is_refused(self, window: float | timedelta) -> None:
        text = said(lambda: RateLimit(2, window))
        assert text.startswith(f"RateLimit.window: {window!r} is not allowed; give whole milliseconds")

    def test_a_moving_window_remembers_at_most_ten_thousand_calls(self) -> None:
        assert RateLimit(10_000, strategy="moving-window").max_requests == 10_000
        assert said(lambda: RateLimit(10_001, strategy="moving-window")) == (
            "RateLimit.max_requests: 10001 is not allowed; give at most 10000 with 'moving-window', "
            "which remembers every call"
        )

    def test_the_longer_name_of_the_sliding_window_in_limits_is_understood(self) -> None:
        assert RateLimit(2, strategy="sliding-window-counter") == RateLimit(2, strategy="sliding-window")

    @pytest.mark.parametrize(
        ("strategy", "meant"),
        [
            ("fixed_window", "fixed-window"),
            ("Moving-Window", "moving-window"),
            ("token-bucket", None),
            (None, None),
        ],
    )
    def test_an_unknown_strategy_is_refused_with_the_nearest_one(
        self, strategy: Any, meant: str | None
    ) -> None:
        assert said(lambda: RateLimit(2, strategy=strategy)) == (
            f"RateLimit.strategy: {strategy!r} is not allowed; "
            "give 'fixed-window', 'moving-window' or 'sliding-window'"
            + (f"; did you mean {meant!r}?" if meant else "")
        )

    def test_its_label_names_what_is_counted_and_how(self) -> None:
        limit = RateLimit(2, "1h", "user_id", "sliding-window")
        assert limit.label == "2/3600000ms/sliding-window/user_id"
        assert RateLimit(2, partition_by=by_user).label == "2/60000ms/fixed-window/function"

    def test_limits_with_other_numbers_have_other_labels(self) -> None:
        labels = [
            RateLimit(2).label,
            RateLimit(3).label,
            RateLimit(2, "61s").label,
            RateLimit(2, "60.001s").label,
            RateLimit(2, partition_by="ip").label,
            RateLimit(2, strategy="moving-window").label,
        ]
        assert len(set(labels)) == len(labels)

    def test_it_reads_well(self) -> None:
        assert repr(RateLimit(2, "1h", "user_id")) == (
            "RateLimit(max_requests=2, window=3600.0, partition_by='user_id', strategy='fixed-window')"
        )


PARTITIONED: dict[str, Make] = {
    "RateLimit": lambda by: RateLimit(2, partition_by=by),
    "Concurrency": lambda by: Concurrency(2, partition_by=by),
}


@pytest.mark.parametrize("kind", PARTITIONED)
class TestPartitionBy:
    @pytest.mark.parametrize("by", ["global", "ip", "session", "user_id"])
    def test_four_answers_are_ready_made(self, kind: str, by: str) -> None:
        limit = PARTITIONED[kind](by)
        assert isinstance(limit, RateLimit | Concurrency)
        assert limit.partition_by == by

    @pytest.mark.parametrize("by", [by_user, lambda call: "x", partial(by_user), str])
    def test_a_plain_function_is_kept_as_it_is(self, kind: str, by: Callable[[Call], str | None]) -> None:
        limit = PARTITIONED[kind](by)
        assert isinstance(limit, RateLimit | Concurrency)
        assert limit.partition_by is by

    @pytest.mark.parametrize(
        ("by", "meant"),
        [
            ("userId", "user_id"),
            ("user", "user_id"),
            ("IP", "ip"),
            ("sessions", "session"),
            ("header", None),
            ("", None),
            (None, None),
            (5, None),
        ],
    )
    def test_anything_else_is_refused_with_the_nearest_answer(
        self, kind: str, by: object, meant: str | None
    ) -> None:
        assert said(lambda: PARTITIONED[kind](by)) == (
            f"{kind}.partition_by: {by!r} is not allowed; "
            "give 'global', 'ip', 'session' or 'user_id', or a function of the call"
            + (f"; did you mean {meant!r}?" if meant else "")
        )

    def test_an_async_function_is_refused(self, kind: str) -> None:
        class AsyncCallable:
            async def __call__(self, call: Call) -> str:
                return call.tool

        async def generator(call: Call) -> Any:
            yield call.tool

        for by in (by_looking_it_up, partial(by_looking_it_up), AsyncCallable(), generator):
            text = said(partial(PARTITIONED[kind], by))
            assert text.startswith(f"{kind}.partition_by: ")
            assert "is async; give a plain function of the call" in text

    def test_a_callable_that_cannot_be_hashed_is_refused(self, kind: str) -> None:
        class Unhashable:
            __hash__ = None  # type: ignore[assignment]

            def __call__(self, call: Call) -> str:
                return call.tool

        assert "that can be hashed" in said(lambda: PARTITIONED[kind](Unhashable()))


class TestRateLimitOption:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (None, []),
            (RateLimit(2, "1h"), [RateLimit(2, 3600)]),
            ("2/hour", [RateLimit(2, 3600)]),
            ("10/minute; 100/day", [RateLimit(10, 60), RateLimit(100, 86_400)]),
            ("10/minute, 100/day | 5/second", [RateLimit(10, 60), RateLimit(100, 86_400), RateLimit(5, 1)]),
            ("10 per 5 minute", [RateLimit(10, 300)]),
            ("10 PER 5 Minutes", [RateLimit(10, 300)]),
            ("100/10 minutes", [RateLimit(100, 600)]),
            ("1/month", [RateLimit(1, 30 * 86_400)]),
            (limits.RateLimitItemPerMinute(10, 5), [RateLimit(10, 300)]),
            ({"max_requests": 2, "window": "1h"}, [RateLimit(2, 3600)]),
            ({"max_requests": 2, "partition_by": "ip"}, [RateLimit(2, partition_by="ip")]),
            (
                ["2/hour; 9/day", RateLimit(3), limits.RateLimitItemPerSecond(4), {"max_requests": 5}],
                [RateLimit(2, 3600), RateLimit(9, 86_400), RateLimit(3), RateLimit(4, 1), RateLimit(5)],
            ),
            (("2/hour",), [RateLimit(2, 3600)]),
        ],
        ids=ids(range(14)),
    )
    def test_every_form_is_read_into_limits_in_order(self, value: object, expected: list[RateLimit]) -> None:
        assert rate_limits(value) == tuple(expected)

    @pytest.mark.parametrize("value", [None, "2/hour; 9/day", RateLimit(2)], ids=["none", "text", "object"])
    def test_what_was_read_can_be_read_again(self, value: object) -> None:
        read = rate_limits(value)
        assert rate_limits(read) == read

    @pytest.mark.parametrize(
        "text",
        [
            "abc/m",
            "60/d",
            "10/0s",
            "10/-5s",
            "",
            "10",
            "10/minute;",
            "-1/minute",
            "2.5/minute",
            "10/5 fortnights",
            "10/0 minute",
            "10 per 00 minutes",
            "5/second; 10/0 minute",
            "9" * 5000 + "/minute",
        ],
        ids=ids(range(14)),
    )
    def test_text_that_is_no_limit_is_refused_with_an_example(self, text: str) -> None:
        said_text = said(lambda: rate_limits(text))
        assert said_text.startswith(f"rate_limit: {shown(text)}")
        assert "is not allowed; give calls per second, minute, hour, day, month or year" in said_text
        assert "'10 per 5 minutes'" in said_text

    @pytest.mark.parametrize("text", ["0/minute", "1000000001/minute", "10/minute; 0/day"])
    def test_a_number_out_of_range_in_text_is_refused_with_the_text(self, text: str) -> None:
        said_text = said(lambda: rate_limits(text))
        assert said_text.startswith(f"rate_limit: {text!r}: RateLimit.max_requests: ")
        assert said_text.endswith("is not allowed; give an integer from 1 to 1000000000")

    def test_a_window_out_of_range_in_text_or_an_item_is_refused_with_it(self) -> None:
        assert said(lambda: rate_limits("1/2 years")).startswith(
            "rate_limit: '1/2 years': RateLimit.window: "
        )
        item = limits.RateLimitItemPerMinute(1, -5)
        assert said(lambda: rate_limits(item)).startswith(f"rate_limit: {item!r}: RateLimit.window: ")

    @pytest.mark.parametrize(
        "value", [5, True, False, 2.5, b"2/hour", {1}, object(), Concurrency(1)], ids=ids(range(8))
    )
    def test_what_is_no_limit_at_all_is_refused_with_all_forms(self, value: object) -> None:
        assert said(lambda: rate_limits(value)) == (
            f"rate_limit: {value!r} is not allowed; give text such as '2/hour', '10 per 5 minutes' or "
            "'10/minute; 100/day', a RateLimitItem, a RateLimit or a mapping of its fields"
        )

    def test_an_empty_list_is_refused(self) -> None:
        assert said(lambda: rate_limits([])) == (
            "rate_limit: [] is not allowed; give at least one limit, or None for no limit of this kind"
        )

    @pytest.mark.parametrize("entry", [None, [], ["2/hour"], "x"], ids=["none", "empty", "nested", "text"])
    def test_a_bad_entry_of_a_list_is_named_by_its_place(self, entry: object) -> None:
        assert said(lambda: rate_limits(["2/hour", entry])).startswith(
            f"rate_limit[1]: {entry!r} is not allowed"
        )

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (
                {"max_requests": -1},
                "rate_limit: RateLimit.max_requests: -1 is not allowed; give an integer from 1 to 1000000000",
            ),
            (
                {"max_request": 2},
                "rate_limit: RateLimit has no field 'max_request'; did you mean 'max_requests'?",
            ),
            (
                {"maxRequests": 2},
                "rate_limit: RateLimit has no field 'maxRequests'; did you mean 'max_requests'?",
            ),
            (
                {"max_requests": 2, "colour": 1},
                "rate_limit: RateLimit has no field 'colour'; "
                "valid options: max_requests, window, partition_by, strategy",
            ),
            (
                {5: 2},
                "rate_limit: RateLimit has no field 5; "
                "valid options: max_requests, window, partition_by, strategy",
            ),
            ({"window": "1h"}, "rate_limit: RateLimit needs a value for 'max_requests'"),
            ({}, "rate_limit: RateLimit needs a value for 'max_requests'"),
        ],
        ids=ids(range(7)),
    )
    def test_a_bad_mapping_is_refused_with_its_field(self, value: Mapping[object, object], text: str) -> None:
        assert said(lambda: rate_limits(value)) == text

    def test_errors_name_the_option_they_are_about(self) -> None:
        assert said(lambda: rate_limits(5, "Throttle.global_rate_limit")).startswith(
            "Throttle.global_rate_limit: 5"
        )


class TestConcurrencyOption:
    def test_its_defaults_are_one_at_a_time_without_a_queue(self) -> None:
        limit = Concurrency()
        assert (limit.max_concurrent, limit.key, limit.partition_by) == (1, None, "global")
        assert (limit.queue_timeout, limit.max_queued) == (0.0, None)

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (None, []),
            (0, []),
            (3, [Concurrency(3)]),
            (Concurrency(2, queue_timeout="5s"), [Concurrency(2, queue_timeout=5)]),
            (Concurrency(0), []),
            (Concurrency(0, key="shell"), [Concurrency(0, key="shell")]),
            ({}, [Concurrency(1)]),
            ({"key": "shell", "queue_timeout": None}, [Concurrency(key="shell", queue_timeout=None)]),
            (
                [1, Concurrency(8, key="shell"), {"max_concurrent": 2}],
                [Concurrency(1), Concurrency(8, key="shell"), Concurrency(2)],
            ),
            ([0, 2], [Concurrency(2)]),
        ],
        ids=ids(range(10)),
    )
    def test_every_form_is_read_into_limits_in_order(
        self, value: object, expected: list[Concurrency]
    ) -> None:
        assert concurrency_limits(value) == tuple(expected)
        assert concurrency_limits(concurrency_limits(value)) == tuple(expected)

    @pytest.mark.parametrize("value", [True, False, "5", 2.5, float("nan"), b"1", {1}], ids=ids(range(7)))
    def test_what_is_no_limit_at_all_is_refused_with_all_forms(self, value: object) -> None:
        assert said(lambda: concurrency_limits(value)) == (
            f"concurrency: {value!r} is not allowed; "
            "give an integer from 0 to 1000000, a Concurrency or a mapping of its fields"
        )

    def test_a_number_out_of_range_is_refused(self) -> None:
        assert said(lambda: concurrency_limits(-1)) == (
            "concurrency: Concurrency.max_concurrent: -1 is not allowed; give an integer from 0 to 1000000"
        )

    def test_an_empty_list_is_refused(self) -> None:
        assert "give at least one limit" in said(lambda: concurrency_limits([]))

    def test_a_bad_entry_of_a_list_is_named_by_its_place(self) -> None:
        assert said(lambda: concurrency_limits([1, {"max_concurent": 2}])) == (
            "concurrency[1]: Concurrency has no field 'max_concurent'; did you mean 'max_concurrent'?"
        )

    def test_a_key_named_twice_in_one_list_is_refused(self) -> None:
        twice = [Concurrency(1, key="shell"), Concurrency(1, key="shell", queue_timeout=5)]
        assert said(lambda: concurrency_limits(twice)) == (
            "concurrency[1]: the key 'shell' is named twice; give every key once"
        )

    @pytest.mark.parametrize("key", ["", " ", 5, True])
    def test_a_key_is_text(self, key: Any) -> None:
        assert said(lambda: Concurrency(key=key)) == (
            f"Concurrency.key: {key!r} is not allowed; give text that is not blank"
        )


class TestTimeoutOption:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (None, None),
            (30, Timeout(30)),
            (0.5, Timeout(0.5)),
            ("500ms", Timeout(0.5)),
            (timedelta(minutes=1), Timeout(60)),
            (Timeout(1, cancel_after=0), Timeout(1, 0)),
            ({"execute": "1m", "cancel_after": 2}, Timeout(60, 2)),
        ],
        ids=ids(range(7)),
    )
    def test_every_form_is_read(self, value: object, expected: Timeout | None) -> None:
        assert Timeout.of(value) == expected

    @pytest.mark.parametrize("value", [True, False, 0, -1, float("nan"), "30s30s"], ids=ids(range(6)))
    def test_a_bad_duration_is_refused(self, value: object) -> None:
        text = said(lambda: Timeout.of(value))
        assert text.startswith(
            f"timeout: Timeout.execute: {value!r} is not allowed; give seconds from 0.001 to 86400"
        )

    @pytest.mark.parametrize("value", [[30], Concurrency(1), b"1s"], ids=ids(range(3)))
    def test_what_is_no_timeout_at_all_is_refused_with_all_forms(self, value: object) -> None:
        assert said(lambda: Timeout.of(value)) == (
            f"timeout: {value!r} is not allowed; give a number of seconds, text such as '30s', a timedelta, "
            "a Timeout or a mapping of its fields"
        )

    def test_a_mapping_names_its_bad_fields(self) -> None:
        assert said(lambda: Timeout.of({"executeMs": 5})) == (
            "timeout: Timeout has no field 'executeMs'; did you mean 'execute'?"
        )
        assert said(lambda: Timeout.of({"cancel_after": 5})) == "timeout: Timeout needs a value for 'execute'"


class TestPolicy:
    def test_what_is_not_given_is_left_to_the_server(self) -> None:
        given = Policy()
        assert given.rate_limits is given.concurrency_limits is given.deadline is given.on_cancel is UNSET
        assert given.priority == "normal"
        assert repr(UNSET) == "UNSET"

    def test_none_means_no_limit_of_this_kind(self) -> None:
        given = Policy(rate_limit=None, concurrency=None, timeout=None)
        assert (given.rate_limits, given.concurrency_limits, given.deadline) == ((), (), None)
        assert Policy(concurrency=0).concurrency_limits == ()

    def test_every_form_of_a_limit_is_read(self) -> None:
        given = Policy("10/minute", 1, "30s", "control", "abort")
        assert given.rate_limits == (RateLimit(10),)
        assert given.concurrency_limits == (Concurrency(1),)
        assert given.deadline == Timeout(30)
        assert (given.priority, given.on_cancel) == ("control", "abort")

    def test_one_policy_can_be_made_from_the_parts_of_another(self) -> None:
        for one in (Policy(), Policy(None, None, None), Policy("2/hour", [1, 2], 30, on_cancel="abort")):
            parts = (one.rate_limits, one.concurrency_limits, one.deadline, one.priority, one.on_cancel)
            assert Policy(*parts) == one

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"rate_limit": []}, "rate_limit: [] is not allowed"),
            ({"concurrency": True}, "concurrency: True is not allowed"),
            ({"timeout": 0}, "timeout: Timeout.execute: 0 is not allowed"),
            (
                {"priority": "controll"},
                "priority: 'controll' is not allowed; give 'normal' or 'control'; did you",
            ),
            ({"priority": None}, "priority: None is not allowed; give 'normal' or 'control'"),
            (
                {"on_cancel": "abrt"},
                "on_cancel: 'abrt' is not allowed; give 'cancel' or 'abort'; did you mean 'abort'?",
            ),
            ({"on_cancel": None}, "on_cancel: None is not allowed; give 'cancel' or 'abort'"),
        ],
        ids=ids(range(7)),
    )
    def test_errors_name_the_option(self, options: dict[str, Any], text: str) -> None:
        assert said(lambda: Policy(**options)).startswith(text)

    def test_it_can_be_read_from_a_mapping(self) -> None:
        assert from_mapping(Policy, {"rate_limit": "2/hour"}, "tools.export") == Policy("2/hour")
        assert said(lambda: from_mapping(Policy, {"ratelimit": "2/hour"}, "tools.export")) == (
            "tools.export: Policy has no field 'ratelimit'; did you mean 'rate_limit'?"
        )


class TestAdmission:
    def test_its_defaults(self) -> None:
        assert Admission() == Admission(48, 8, 64, 30)

    def test_it_cannot_reserve_all_places(self) -> None:
        assert said(lambda: Admission(8)) == (
            "Admission.reserved: 8 is not allowed; give an integer from 0 to 7"
        )


class TestIPFilter:
    def test_it_lets_everybody_in_by_default(self) -> None:
        assert (IPFilter().allow, IPFilter().deny, IPFilter().default) == ((), (), "allow")

    def test_an_empty_list_names_nobody(self) -> None:
        assert IPFilter(allow=[], deny=[], default="deny").allow == ()

    def test_rules_are_addresses_and_networks_of_both_families(self) -> None:
        rules = ["10.0.0.0/8", "192.0.2.1", "2001:db8::/32", "::1", "10.1.0.0/255.255.0.0"]
        assert IPFilter(allow=rules).allow == (
            ip_network("10.0.0.0/8"),
            ip_network("192.0.2.1/32"),
            ip_network("2001:db8::/32"),
            ip_network("::1/128"),
            ip_network("10.1.0.0/16"),
        )

    def test_rules_may_be_objects(self) -> None:
        assert IPFilter(deny=[ip_network("10.0.0.0/8"), IPv4Address("192.0.2.1")]) == IPFilter(
            deny=["10.0.0.0/8", "192.0.2.1"]
        )

    @pytest.mark.parametrize(
        ("rule", "network"),
        [
            ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
            ("::ffff:192.0.2.1", "192.0.2.1/32"),
            ("::ffff:0:0/96", "0.0.0.0/0"),
            ("fe80::1%eth0", "fe80::1/128"),
            ("fe80::%eth0/64", "fe80::/64"),
            ("::/0", "::/0"),
        ],
    )
    def test_rules_are_written_as_the_addresses_they_are_compared_with(self, rule: str, network: str) -> None:
        assert IPFilter(deny=[rule]).deny == (ip_network(network),)

    @pytest.mark.parametrize("field", ["allow", "deny"])
    @pytest.mark.parametrize(
        "rule",
        [
            "10.0.0.0/33",
            "example.com",
            "",
            " 10.0.0.1",
            "10.0.0.1\n",
            "010.0.0.0/8",
            "0x0a000001",
            "10.1",
            "10.0.0.1%eth0",
            "1:2:3",
            5,
            True,
            None,
            b"\x0a\x00\x00\x01",
            ("10.0.0.0", 8),
        ],
        ids=ids(range(15)),
    )
    def test_a_rule_that_cannot_be_read_is_named(self, field: str, rule: Any) -> None:
        options: dict[str, Any] = {field: ["192.0.2.1", rule]}
        assert said(lambda: IPFilter(**options)) == (
            f"IPFilter.{field}[1]: {rule!r} is not allowed; "
            "give an IPv4 or IPv6 address or network such as '10.0.0.0/8' or '2001:db8::/32'"
        )

    @pytest.mark.parametrize(
        ("rule", "meant"), [("10.0.0.1/8", "10.0.0.0/8"), ("2001:db8::1/32", "2001:db8::/32")]
    )
    def test_a_network_with_host_bits_is_refused_with_the_network(self, rule: str, meant: str) -> None:
        text = said(lambda: IPFilter(allow=[rule]))
        assert text.startswith(f"IPFilter.allow[0]: {rule!r} is not allowed")
        assert text.endswith(f"did you mean {meant!r}?")

    @pytest.mark.parametrize(
        "rules", ["10.0.0.0/8", None, 5, {"10.0.0.0/8"}], ids=["text", "none", "number", "set"]
    )
    def test_the_rules_are_a_list(self, rules: Any) -> None:
        assert said(lambda: IPFilter(deny=rules)) == (
            f"IPFilter.deny: {rules!r} is not allowed; give a list of addresses and networks"
        )

    def test_an_unknown_default_is_refused(self) -> None:
        default: Any = "denied"
        assert said(lambda: IPFilter(default=default)) == (
            "IPFilter.default: 'denied' is not allowed; give 'allow' or 'deny'; did you mean 'deny'?"
        )


class TestThrottle:
    def test_its_defaults(self) -> None:
        throttle = Throttle()
        assert throttle.enabled
        assert throttle.mode == "enforce"
        assert throttle.global_rate_limit == throttle.default_rate_limit == ()
        assert throttle.global_concurrency == throttle.default_concurrency == ()
        assert throttle.default_timeout is None
        assert throttle.ip_filter is None
        assert throttle.storage is None
        assert throttle.fallback is None
        assert throttle.admission == Admission(max_active=48, reserved=8, max_queued=64, queue_timeout=30)
        assert (throttle.storage_timeout, throttle.lease) == (0.2, 10.0)
        assert (throttle.key_prefix, throttle.max_keys) == ("frontmcp", 1_000_000)

    def test_its_limits_may_be_given_in_every_form(self) -> None:
        throttle = Throttle(
            global_rate_limit="100/second; 1000/minute",
            global_concurrency=10,
            default_rate_limit={"max_requests": 60, "partition_by": "ip"},
            default_concurrency=[5, {"max_concurrent": 1, "partition_by": "user_id"}],
            default_timeout="30s",
            admission={"max_active": 4, "reserved": 1},
            ip_filter={"deny": ["10.0.0.0/8"]},
        )
        assert throttle.global_rate_limit == (RateLimit(100, 1), RateLimit(1000, 60))
        assert throttle.global_concurrency == (Concurrency(10),)
        assert throttle.default_rate_limit == (RateLimit(60, partition_by="ip"),)
        assert throttle.default_concurrency == (Concurrency(5), Concurrency(1, partition_by="user_id"))
        assert throttle.default_timeout == Timeout(30)
        assert throttle.admission == Admission(4, 1)
        assert throttle.ip_filter == IPFilter(deny=["10.0.0.0/8"])

    def test_single_values_can_be_replaced(self) -> None:
        throttle = Throttle(default_rate_limit="2/hour", admission=None, ip_filter=IPFilter())
        changed = dataclasses.replace(throttle, lease=20)
        assert changed.lease == 20.0
        assert dataclasses.replace(changed, lease=10) == throttle

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"enabled": 1}, "Throttle.enabled: 1 is not allowed; give True or False"),
            (
                {"mode": "observ"},
                "Throttle.mode: 'observ' is not allowed; give 'enforce' or 'observe'; did you mean",
            ),
            ({"global_rate_limit": 5}, "Throttle.global_rate_limit: 5 is not allowed; give text such as"),
            ({"default_rate_limit": []}, "Throttle.default_rate_limit: [] is not allowed; give at least one"),
            ({"default_rate_limit": ["2/hour", "x"]}, "Throttle.default_rate_limit[1]: 'x' is not allowed"),
            ({"global_concurrency": True}, "Throttle.global_concurrency: True is not allowed"),
            (
                {"default_concurrency": -1},
                "Throttle.default_concurrency: Concurrency.max_concurrent: -1 is not allowed; give an",
            ),
            (
                {"default_timeout": 0},
                "Throttle.default_timeout: Timeout.execute: 0 is not allowed; give seconds",
            ),
            (
                {"admission": True},
                "Throttle.admission: True is not allowed; give None, an Admission or a mapping",
            ),
            (
                {"admission": {"max_activ": 4}},
                "Throttle.admission: Admission has no field 'max_activ'; did you mean 'max_active'?",
            ),
            (
                {"ip_filter": ["10.0.0.1"]},
                "Throttle.ip_filter: ['10.0.0.1'] is not allowed; give None, an IPFilter",
            ),
            (
                {"ip_filter": {"deny": ["x"]}},
                "Throttle.ip_filter: IPFilter.deny[0]: 'x' is not allowed; give an IPv4",
            ),
            ({"storage": ""}, "Throttle.storage: '' is not allowed; give None or a URI such as 'redis://"),
            ({"storage": 5}, "Throttle.storage: 5 is not allowed"),
            ({"storage": "localhost:6379"}, "Throttle.storage: 'localhost:6379' is not allowed"),
            (
                {"fallback": "memroy"},
                "Throttle.fallback: 'memroy' is not allowed; "
                "give 'error' or 'memory', or None; did you mean 'memory'?",
            ),
            ({"key_prefix": ""}, "Throttle.key_prefix: '' is not allowed; give text"),
            (
                {"key_prefix": "a{b}"},
                "Throttle.key_prefix: 'a{b}' is not allowed; give text without blanks and braces",
            ),
            ({"key_prefix": "a b"}, "Throttle.key_prefix: 'a b' is not allowed"),
        ],
        ids=ids(range(19)),
    )
    def test_errors_name_the_field(self, options: dict[str, Any], text: str) -> None:
        assert said(lambda: Throttle(**options)).startswith(text)

    @pytest.mark.parametrize("field", ["global_concurrency", "default_concurrency"])
    def test_globals_and_defaults_take_no_key(self, field: str) -> None:
        options: dict[str, Any] = {field: Concurrency(8, key="shell")}
        assert said(lambda: Throttle(**options)) == (
            f"Throttle.{field}: the key 'shell' is not allowed; give limits without a key, "
            "since only a tool can share its slots by name"
        )

    def test_a_password_is_shown_neither_by_repr_nor_by_errors(self) -> None:
        assert "hunter2" not in repr(Throttle(storage="redis://:hunter2@localhost:6379/0"))
        text = said(lambda: Throttle(storage="user:hunter2@localhost:6379"))
        assert text.startswith("Throttle.storage: '***@localhost:6379' is not allowed")

    @pytest.mark.parametrize(
        "uri", ["redis://localhost:6379/0", "redis+sentinel://h:26379", "async+redis://h", "rediss://h"]
    )
    def test_any_uri_names_a_storage(self, uri: str) -> None:
        assert Throttle(storage=uri).storage == uri

    @pytest.mark.parametrize("field", ["global_concurrency", "default_concurrency"])
    def test_nobody_may_wait_without_an_end(self, field: str) -> None:
        options: dict[str, Any] = {field: Concurrency(1, queue_timeout=None)}
        assert said(lambda: Throttle(admission=None, **options)) == (
            f"Throttle.{field}: queue_timeout None is not allowed with admission off, "
            "since nothing would bound the wait; give seconds, or an admission"
        )
        Throttle(**options)
        Throttle(admission=None, enabled=False, **options)
        Throttle(admission=None, mode="observe", **options)

    def test_the_waits_of_a_tool_are_checked_against_it(self) -> None:
        endless = (Concurrency(1), Concurrency(8, key="shell", queue_timeout=None))
        Throttle().check_waits(endless, "concurrency")
        Throttle(admission=None).check_waits(endless[:1], "concurrency")
        Throttle(admission=None).check_waits(
            (Concurrency(0, key="shell", queue_timeout=None),), "concurrency"
        )
        text = said(lambda: Throttle(admission=None).check_waits(endless, 'tool "export": concurrency'))
        assert text.startswith('tool "export": concurrency: queue_timeout None is not allowed')

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (None, None),
            (True, Throttle()),
            (False, Throttle(enabled=False)),
            (Throttle(lease=5), Throttle(lease=5)),
            ({}, Throttle()),
            ({"default_timeout": 30}, Throttle(default_timeout=30)),
        ],
        ids=ids(range(6)),
    )
    def test_every_form_of_the_option_is_read(self, value: object, expected: Throttle | None) -> None:
        assert Throttle.of(value) == expected

    @pytest.mark.parametrize("value", [1, 0, "off", [Throttle()]], ids=["one", "zero", "text", "list"])
    def test_what_is_no_throttle_at_all_is_refused(self, value: object) -> None:
        text = said(lambda: Throttle.of(value))
        assert text.startswith("throttle: ")
        assert text.endswith("is not allowed; give True, False, a Throttle or a mapping of its fields")

    def test_a_mapping_names_its_bad_fields(self) -> None:
        assert said(lambda: Throttle.of({"admission": {"max_active": 1}})) == (
            "throttle: Throttle.admission: Admission.max_active: 1 is not allowed; "
            "give an integer from 2 to 100000"
        )
        assert said(lambda: Throttle.of({"defaultTimeout": 30})) == (
            "throttle: Throttle has no field 'defaultTimeout'; did you mean 'default_timeout'?"
        )


VALUES: dict[str, Callable[[], object]] = {
    "RateLimit": lambda: RateLimit(2, "1h", by_user, "moving-window"),
    "Concurrency": lambda: Concurrency(2, key="shell", partition_by="ip", queue_timeout=None, max_queued=3),
    "Timeout": lambda: Timeout("30s", 0),
    "Policy": lambda: Policy(["2/hour", RateLimit(3)], 1, None, "control", "abort"),
    "unset Policy": Policy,
    "Admission": lambda: Admission(4, 1, 0, 5),
    "IPFilter": lambda: IPFilter(["10.0.0.0/8"], ["::1"], "deny"),
    "Throttle": lambda: Throttle(
        default_rate_limit="2/hour", ip_filter={"deny": ["::1"]}, storage="redis://h"
    ),
}


@pytest.mark.parametrize("kind", VALUES)
class TestEveryPolicy:
    def test_equal_values_make_equal_and_equally_hashed_objects(self, kind: str) -> None:
        one, other = VALUES[kind](), VALUES[kind]()
        assert one == other
        assert hash(one) == hash(other)
        assert one != RateLimit(999)

    def test_it_survives_copying_and_pickling(self, kind: str) -> None:
        value = VALUES[kind]()
        assert copy.copy(value) == copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value

    def test_it_cannot_be_changed(self, kind: str) -> None:
        value: Any = VALUES[kind]()
        field = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, None)
        assert not hasattr(value, "__dict__")

    def test_every_field_has_a_docstring(self, kind: str) -> None:
        source = inspect.getsource(type(VALUES[kind]())).splitlines()
        for field in dataclasses.fields(VALUES[kind]()):  # type: ignore[arg-type]
            (place,) = [n for n, line in enumerate(source) if line.startswith(f"    {field.name}: ")]
            assert source[place + 1].startswith('    """')


class TestNames:
    @pytest.mark.parametrize(
        ("kind", "option", "answer"),
        [
            (RateLimit, "max_request", "did you mean 'max_requests'?"),
            (Concurrency, "queueTimeout", "did you mean 'queue_timeout'?"),
            (Timeout, "colour", "valid options: execute, cancel_after"),
            (Throttle, "enable", "did you mean 'enabled'?"),
            (Admission, "max_activ", "did you mean 'max_active'?"),
            (IPFilter, "alow", "did you mean 'allow'?"),
            (Policy, "rate_limits", "did you mean 'rate_limit'?"),
        ],
    )
    def test_an_unknown_option_is_answered_with_the_nearest_one(
        self, kind: Make, option: str, answer: str
    ) -> None:
        with pytest.raises(TypeError) as caught:
            kind(**{option: 1})
        assert str(caught.value) == f"{kind.__name__}() has no option {option!r}; {answer}"

    def test_type_checkers_know_the_options_too(self) -> None:
        with pytest.raises(TypeError):
            RateLimit(2, windows=60)  # type: ignore[call-arg]

    def test_a_function_speaks_under_its_own_name(self) -> None:
        @names_options
        def tool(name: str, *, timeout: float = 1) -> str:
            """Make one."""
            return f"{name} {timeout}"

        assert tool("x", timeout=2) == "x 2"
        assert tool.__doc__ == "Make one."
        assert list(inspect.signature(tool).parameters) == ["name", "timeout"]
        with pytest.raises(TypeError, match=r"^tool\(\) has no option 'time_out'; did you mean 'timeout'\?$"):
            tool("x", time_out=2)  # type: ignore[call-arg]

    def test_a_constructor_speaks_for_its_class_and_never_offers_self(self) -> None:
        class App:
            @names_options
            def __init__(self, name: str) -> None:
                self.name = name

        assert App(name="help-desk").name == "help-desk"
        with pytest.raises(TypeError, match=r"^App\(\) has no option 'colour'; valid options: name$"):
            App("help-desk", colour=1)  # type: ignore[call-arg]

    def test_a_method_speaks_under_its_own_name(self) -> None:
        class App:
            @names_options
            def tool(self, *, timeout: float = 1) -> float:
                return timeout

        with pytest.raises(TypeError, match=r"^tool\(\) has no option 'selff'; valid options: timeout$"):
            App().tool(selff=1)  # type: ignore[call-arg]

    def test_python_says_itself_what_else_is_wrong_with_a_call(self) -> None:
        with pytest.raises(TypeError, match="max_requests"):
            RateLimit()  # type: ignore[call-arg]

    def test_what_takes_any_option_is_left_alone(self) -> None:
        def anything(**options: object) -> object:
            return options

        assert names_options(anything) is anything

    def test_nearest_lists_everything_when_nothing_is_near(self) -> None:
        assert nearest("rateLimit", ["rate_limit", "timeout"]) == "did you mean 'rate_limit'?"
        assert nearest("colour", ["rate_limit", "timeout"]) == "valid options: rate_limit, timeout"

    def test_naming_puts_a_place_in_front_of_an_error(self) -> None:
        def make() -> None:
            with naming('tool "export"'), naming("timeout"):
                Timeout(0)

        assert said(make).startswith('tool "export": timeout: Timeout.execute: 0 is not allowed')


def test_a_partition_function_is_typed_and_called_with_the_call() -> None:
    limit = RateLimit(
        2, partition_by=lambda call: call.caller.user_id or call.caller.client_ip or "anonymous"
    )
    assert callable(limit.partition_by)
    assert limit.partition_by(Call("x", caller=Caller(client_ip="192.0.2.1"))) == "192.0.2.1"


def test_every_constant_is_explained() -> None:
    source = inspect.getsource(policy).splitlines()
    constants = [n for n, line in enumerate(source) if line[:1].isupper() and ": Final = " in line]
    assert len(constants) > 20
    for place in constants:
        assert source[place + 1].startswith('"""'), source[place]
