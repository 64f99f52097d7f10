"""Every refusal: what it says, what it carries, and that it survives being sent somewhere else."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from frontmcp_py import errors
from frontmcp_py.errors import (
    CODES,
    Cancelled,
    ConcurrencyLimit,
    ConfigurationError,
    ExecutionTimeout,
    GuardError,
    GuardStorageUnavailable,
    InternalError,
    IpBlocked,
    IpNotAllowed,
    LeaseLost,
    OutputLimit,
    Overloaded,
    PartitionError,
    QueueTimeout,
    RateLimitExceeded,
)

SAYS: dict[str, tuple[GuardError, str]] = {
    "rate limit": (
        RateLimitExceeded("x", 2_273_001, 2, "tool"),
        "Rate limit exceeded. Retry after 2274 seconds",
    ),
    "concurrency": (ConcurrencyLimit("x", 1, "tool"), 'Concurrency limit reached for "x" (max: 1)'),
    "waits for itself": (
        ConcurrencyLimit("x", 1, "key", waits_for_itself=True),
        'Concurrency limit reached for "x" (max: 1): it would wait for itself',
    ),
    "queue timeout": (
        QueueTimeout("x", 5000, 1, "tool"),
        'Queue timeout for "x" after waiting 5000ms for a concurrency slot',
    ),
    "execution timeout": (ExecutionTimeout("x", 500), 'Execution of "x" timed out after 500ms'),
    "overloaded": (Overloaded(48, 64), "Server overloaded: 48 calls running, 64 waiting. Try again shortly."),
    "overloaded, waited": (
        Overloaded(48, 64, waited_ms=30_000),
        "Server overloaded: waited 30000ms for a place (48 calls running, 64 waiting). Try again shortly.",
    ),
    "shutting down": (
        Overloaded(3, 0, shutting_down=True),
        "Server overloaded: shutting down. Try again shortly.",
    ),
    "cancelled": (Cancelled("x"), 'Call to "x" was cancelled'),
    "cancelled, no tool": (Cancelled(), "Call was cancelled"),
    "storage": (
        GuardStorageUnavailable(),
        "Service temporarily unavailable: the rate-limit store cannot be reached. Retry shortly.",
    ),
    "blocked": (IpBlocked("203.0.113.7"), 'IP address "203.0.113.7" is blocked'),
    "not allowed": (IpNotAllowed("203.0.113.7"), 'IP address "203.0.113.7" is not allowed'),
    "no address": (IpNotAllowed(None), 'IP address "unknown" is not allowed'),
    "result": (OutputLimit("x", 6_291_456), 'Result of "x" is larger than 6291456 bytes; the tool has run.'),
    "process": (
        OutputLimit("x", 4096, process=True),
        'Process output of "x" is larger than 4096 bytes; the process was ended.',
    ),
    "process, no tool": (
        OutputLimit(None, 4096, process=True),
        "Process output is larger than 4096 bytes; the process was ended.",
    ),
    "partition": (
        PartitionError("x"),
        'Call to "x" was refused: whose limit it counts against could not be told.',
    ),
    "lease": (LeaseLost("x"), 'Call to "x" lost its slot to other callers while it was running.'),
    "internal": (InternalError("x"), 'Call to "x" failed because of an internal error.'),
    "internal, no tool": (InternalError(), "Call failed because of an internal error."),
}
ERRORS = [error for error, _ in SAYS.values()]


class Quota(GuardError):
    """What a user of the package may write: a code of its own, and a constructor like no other."""

    code = "QUOTA"

    def __init__(self, *, account: str, left: int) -> None:
        super().__init__(f"{account} has {left} left", limit=left)
        self.account = account


class SofterRateLimit(RateLimitExceeded):
    """Keeps its parent's code."""


def pickled(error: GuardError, protocol: int) -> GuardError:
    twin = pickle.loads(pickle.dumps(error, protocol))
    assert isinstance(twin, GuardError)
    return twin


WAYS: dict[str, Callable[[GuardError], GuardError]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {n}": partial(pickled, protocol=n) for n in range(pickle.HIGHEST_PROTOCOL + 1)},
}


@pytest.mark.parametrize(("error", "message"), SAYS.values(), ids=SAYS)
def test_every_refusal_says_what_the_documentation_promises(error: GuardError, message: str) -> None:
    assert error.message == message
    assert str(error) == message


def test_every_code_has_exactly_one_class_named_after_it() -> None:
    named = {"".join(word.capitalize() for word in code.split("_")): code for code in CODES}
    classes = {
        name: value.code
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, GuardError) and not name.startswith("_")
    }
    del classes["GuardError"]
    assert classes == named
    assert len(set(CODES)) == len(CODES) == 13


def test_the_codes_are_those_of_the_documentation() -> None:
    assert CODES == (
        "RATE_LIMIT_EXCEEDED",
        "CONCURRENCY_LIMIT",
        "QUEUE_TIMEOUT",
        "EXECUTION_TIMEOUT",
        "OVERLOADED",
        "CANCELLED",
        "GUARD_STORAGE_UNAVAILABLE",
        "IP_BLOCKED",
        "IP_NOT_ALLOWED",
        "OUTPUT_LIMIT",
        "PARTITION_ERROR",
        "LEASE_LOST",
        "INTERNAL_ERROR",
    )


def test_a_refusal_can_be_caught_by_its_base_and_is_no_timeout_of_the_tool() -> None:
    assert all(isinstance(error, GuardError) for error in ERRORS)
    assert not any(isinstance(error, TimeoutError | ValueError) for error in ERRORS)
    assert not issubclass(ConfigurationError, GuardError)


def test_a_subclass_without_a_code_answers_with_its_parents() -> None:
    assert SofterRateLimit("x", 1000, 2).code == "RATE_LIMIT_EXCEEDED"
    assert GuardError("something").code in CODES


@pytest.mark.parametrize(
    ("milliseconds", "seconds"),
    [(0, 1), (1, 1), (1000, 1), (1001, 2), (59_999, 60), (31_622_400_000, 31_622_400)],
)
def test_the_wait_of_a_rate_limit_is_told_in_whole_seconds_rounded_up(
    milliseconds: int, seconds: int
) -> None:
    error = RateLimitExceeded("x", milliseconds, 2)
    assert error.message.endswith(f"Retry after {seconds} seconds")


@pytest.mark.parametrize("milliseconds", [1, 999, 1001, 2_273_001, 12_345_678_901, 31_622_399_999])
def test_the_wait_of_a_rate_limit_is_exact_as_data(milliseconds: int) -> None:
    error = RateLimitExceeded("x", milliseconds, 2)
    assert error.retry_after == milliseconds / 1000
    assert error.meta()["retryAfterMs"] == milliseconds
    assert type(error.meta()["retryAfterMs"]) is int


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(500, "500"), (500.0, "500"), (1.5, "1.5"), (0.29 * 1000, "290"), (1 / 3, "0.333")],
)
def test_milliseconds_are_told_without_needless_digits(milliseconds: float, text: str) -> None:
    assert f"after {text}ms" in ExecutionTimeout("x", milliseconds).message
    assert f"waiting {text}ms" in QueueTimeout("x", milliseconds, 1).message
    assert f"waited {text}ms" in Overloaded(1, 0, waited_ms=milliseconds).message


def test_meta_tells_programs_what_refused_and_when_to_try_again() -> None:
    error = RateLimitExceeded("export_tickets", retry_after_ms=2500, limit=2, scope="global")
    assert error.meta() == {
        "errorId": error.error_id,
        "code": "RATE_LIMIT_EXCEEDED",
        "retryAfterMs": 2500,
        "limit": 2,
        "scope": "global",
    }


def test_meta_leaves_out_what_does_not_apply() -> None:
    error = Cancelled("x")
    assert error.meta() == {"errorId": error.error_id, "code": "CANCELLED"}


def test_a_limit_or_wait_of_zero_is_told() -> None:
    assert ConcurrencyLimit("x", 0).meta()["limit"] == 0
    assert GuardError("x", retry_after=0.0).meta()["retryAfterMs"] == 0


@pytest.mark.parametrize(
    ("error", "limit", "scope"),
    [
        (ConcurrencyLimit("x", 3, "key"), 3, "key"),
        (QueueTimeout("x", 10, 4, "global"), 4, "global"),
        (ExecutionTimeout("x", 500), 500, "tool"),
        (Overloaded(48, 64, limit=48), 48, "admission"),
        (OutputLimit("x", 1024), 1024, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, GuardError) else None,
)
def test_a_refusal_carries_the_number_that_refused_and_whose_it_is(
    error: GuardError, limit: int, scope: str | None
) -> None:
    assert (error.limit, error.scope) == (limit, scope)


def test_refusals_carry_what_their_messages_say() -> None:
    overloaded = Overloaded(48, 64, waited_ms=30_000, tool="x")
    assert (overloaded.running, overloaded.waiting, overloaded.waited_ms) == (48, 64, 30_000)
    assert not overloaded.shutting_down
    assert overloaded.tool == "x"
    assert ConcurrencyLimit("x", 1, waits_for_itself=True).waits_for_itself
    assert QueueTimeout("x", 5000, 1).waited_ms == 5000
    assert ExecutionTimeout("x", 500).timeout_ms == 500
    assert OutputLimit("x", 1024).max_bytes == 1024
    assert IpBlocked("10.0.0.1").address == "10.0.0.1"


def test_callers_of_an_overloaded_server_are_not_all_asked_back_at_once() -> None:
    waits = [Overloaded(1, 0).retry_after for _ in range(200)]
    assert all(wait is not None and 0.8 <= wait <= 1.2 for wait in waits)
    assert len(set(waits)) > 10
    assert Overloaded(1, 0, retry_after=3).meta()["retryAfterMs"] == 3000


@pytest.mark.parametrize("error", ERRORS, ids=SAYS)
def test_an_error_id_is_made_once_and_is_different_for_every_error(error: GuardError) -> None:
    assert re.fullmatch(r"err_[0-9a-f]{16}", error.error_id)
    assert error.error_id == error.error_id == error.meta()["errorId"]
    assert error.error_id != GuardError("x").error_id


@pytest.mark.parametrize("duplicate", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    "error",
    [*ERRORS, Quota(account="acme", left=3), SofterRateLimit("x", 1500, 2)],
    ids=[*SAYS, "a user's own", "a user's subclass"],
)
def test_errors_keep_everything_when_copied_or_pickled(
    error: GuardError, duplicate: Callable[[GuardError], GuardError]
) -> None:
    twin = duplicate(error)
    assert twin is not error
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert twin.args == error.args
    assert vars(twin) == vars(error)
    assert twin.meta() == error.meta()


def test_an_id_that_nobody_had_asked_for_is_the_same_in_a_copy() -> None:
    error = Cancelled("x")
    twin = pickle.loads(pickle.dumps(error))
    assert twin.error_id == error.error_id


def test_notes_survive_pickling() -> None:
    error = Cancelled("x")
    error.add_note("while exporting")
    twin: Any = pickle.loads(pickle.dumps(error))
    assert twin.__notes__ == ["while exporting"]


def test_a_configuration_error_is_a_value_error_that_survives_pickling() -> None:
    error = ConfigurationError("RateLimit.window: 0 is not allowed")
    assert isinstance(error, ValueError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
