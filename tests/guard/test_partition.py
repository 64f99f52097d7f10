from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontmcp_py.call import Call, Caller
from frontmcp_py.errors import PartitionError
from frontmcp_py.guard.partition import escape, subject
from frontmcp_py.policy import LONGEST_SUBJECT, Concurrency, Partition, PartitionBy, Policy, RateLimit
from frontmcp_py.testing import virtual_time
from tests.guard.support import hold, new_guard, once, refusal


def of(partition_by: PartitionBy, **caller: Any) -> str:
    return subject(partition_by, Call("x", {}, Caller(**caller)))


# ---------------------------------------------------------------------------------------- ready-made answers


def test_global_is_everybody() -> None:
    assert (
        of("global", user_id="ann") == of("global", session_id="s", client_ip="203.0.113.7") == of("global")
    )


def test_users_are_told_apart_and_all_who_are_not_signed_in_share_one_count() -> None:
    assert of("user_id", user_id="ann") != of("user_id", user_id="bob")
    anonymous = of("user_id")
    assert anonymous == of("user_id", session_id="s1") == of("user_id", client_ip="203.0.113.7")
    assert anonymous == of("user_id", user_id="") == of("user_id", client_id="c")


def test_sessions_are_told_apart_whoever_is_in_them() -> None:
    assert of("session", session_id="s1", user_id="ann") == of("session", session_id="s1")
    assert of("session", session_id="s1") != of("session", session_id="s2")


def test_who_has_no_session_is_counted_as_the_user_and_else_with_all_who_have_none() -> None:
    assert of("session", user_id="ann") != of("session", user_id="bob")
    assert of("session", user_id="ann") == of("session", user_id="ann", session_id="")
    assert of("session") == of("session", client_ip="203.0.113.7") != of("session", user_id="ann")


def test_addresses_are_told_apart() -> None:
    assert of("ip", client_ip="203.0.113.7") != of("ip", client_ip="203.0.113.8")
    assert of("ip", client_ip="203.0.113.7") == of(
        "ip", client_ip="203.0.113.7", user_id="ann", session_id="s"
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("::ffff:cb00:7107", "203.0.113.7"),
        ("fe80::1%eth0", "fe80::1"),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff:ffff:ffff:ffff"),
        ("2001:DB8::1", "2001:db8:0:0:0:0:0:1"),
        (" 203.0.113.7 ", "203.0.113.7"),
    ],
)
def test_two_ways_to_write_an_address_are_one_client(one: str, other: str) -> None:
    assert of("ip", client_ip=one) == of("ip", client_ip=other) != of("ip")


def test_two_ipv6_networks_of_64_bits_are_two_clients() -> None:
    assert of("ip", client_ip="2001:db8:1:2::1") != of("ip", client_ip="2001:db8:1:3::1")


@pytest.mark.parametrize(
    "address", [None, "", "unknown", "203.0.113", "0x7f.1", "[2001:db8::1", "::1::", "a" * 1000]
)
def test_who_has_no_readable_address_is_counted_as_the_user_and_else_with_all_who_have_none(
    address: str | None,
) -> None:
    assert of("ip", client_ip=address) == of("ip")
    assert of("ip", client_ip=address, user_id="ann") == of("ip", user_id="ann") != of("ip")


def test_nobody_is_named_like_those_without_a_name() -> None:
    nameless = {of("user_id"), of("session"), of("ip"), of(lambda _: None)}
    assert len(nameless) == 3
    for name in ("anonymous", "unresolved", "overflow", "user:ann", "session:s", "by:", "ip:203.0.113.7"):
        named = {of(lambda call: call.caller.user_id, user_id=name), of("session", session_id=name)}
        named |= {of("user_id", user_id=name), of("session", user_id=name), of("ip", user_id=name)}
        assert len(named) == 3
        assert not named & nameless


identities = st.fixed_dictionaries(
    {},
    optional={
        "user_id": st.text(min_size=1),
        "session_id": st.text(min_size=1),
        "client_ip": st.ip_addresses(v=4).map(str),
    },
)


@given(st.sampled_from(["user_id", "session", "ip"]), identities, identities)
def test_two_callers_share_a_count_exactly_if_they_are_the_same_one(
    partition: Partition, one: dict[str, str], other: dict[str, str]
) -> None:
    known_by = {"user_id": ["user_id"], "session": ["session_id", "user_id"], "ip": ["client_ip", "user_id"]}

    def who(caller: dict[str, str]) -> tuple[str, str] | None:
        return next(((name, caller[name]) for name in known_by[partition] if name in caller), None)

    assert (of(partition, **one) == of(partition, **other)) == (who(one) == who(other))


# ------------------------------------------------------------------------------------------------- functions


def test_a_function_sees_the_whole_call_and_says_who_shares_a_count() -> None:
    seen: list[Call] = []

    def customer(call: Call) -> str:
        seen.append(call)
        return str(call.arguments["customer"])

    call = Call("merge", {"customer": 7}, Caller(user_id="ann"))
    assert subject(customer, call) == subject(customer, Call("merge", {"customer": "7"}))
    assert seen[0] is call


def test_none_and_empty_text_share_one_count_that_is_nobody_elses() -> None:
    assert of(lambda _: None) == of(lambda _: "")
    assert of(lambda _: "None") != of(lambda _: None)


def test_what_the_contract_suggests_works() -> None:
    def whoever(call: Call) -> str:
        return call.caller.user_id or call.caller.client_ip or "anonymous"

    assert of(whoever, user_id="ann", client_ip="203.0.113.7") == of(whoever, user_id="ann")
    assert of(whoever, client_ip="203.0.113.7") == of(whoever, user_id="203.0.113.7")
    assert of(whoever) == of(whoever, user_id="anonymous")


@pytest.mark.parametrize("answer", [7, 7.0, True, b"ann", ["ann"], object()])
def test_a_function_that_returns_no_text_refuses_the_call(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(PartitionError) as caught:
        of(lambda _: answer)
    error = caught.value
    assert error.code == "PARTITION_ERROR"
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert error.error_id in record.getMessage()
    assert "'x'" in record.getMessage()
    assert type(answer).__name__ in record.getMessage()


def test_a_function_that_fails_refuses_the_call_and_is_logged_with_the_same_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def customer(call: Call) -> str:
        return str(call.arguments["customer"])

    with pytest.raises(PartitionError) as caught:
        of(customer)
    [record] = caplog.records
    assert caught.value.error_id in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)
    # The caller is told nothing of it.
    assert "customer" not in str(caught.value)


@pytest.mark.parametrize("failure", [SystemExit, KeyboardInterrupt])
def test_what_ends_the_process_is_not_the_functions_failure(failure: type[BaseException]) -> None:
    def leave(_: Call) -> str:
        raise failure

    with pytest.raises(failure):
        of(leave)


def broken(_: Call) -> str:
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    "policy",
    [
        Policy(RateLimit(5, 60, broken)),
        Policy(concurrency=Concurrency(1, partition_by=broken)),
        Policy([RateLimit(5, 60), RateLimit(5, 60, broken)], [Concurrency(1, partition_by="user_id")]),
        Policy(concurrency=[Concurrency(1, partition_by="user_id"), Concurrency(2, partition_by=broken)]),
    ],
)
@virtual_time
async def test_a_call_that_a_function_refuses_consumes_nothing(policy: Policy) -> None:
    guard = new_guard()
    error = await refusal(once(guard, "x", policy))
    assert str(error) == 'Call to "x" was refused: whose limit it counts against could not be told.'
    counts = guard.statistics().counts
    assert (counts.submitted, counts.accepted, dict(counts.rejected)) == (1, 0, {"PARTITION_ERROR": 1})
    assert guard._memory.counts.held == 0
    assert guard._scheduler.live_slots == 0


# ---------------------------------------------------------------------------------------------------- keys


@given(st.text(), st.text())
def test_escaped_texts_differ_where_the_texts_do(one: str, other: str) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@given(st.text())
def test_an_escaped_text_is_short_and_holds_no_separator(text: str) -> None:
    escaped = escape(text)
    assert len(escaped) <= LONGEST_SUBJECT
    assert not set("|/{} \t\n") & set(escaped)
    assert escaped.isascii()


@pytest.mark.parametrize(
    "text", ["x" * 129, "é" * 50, "\ud800" * 100, "x" * 10**6], ids=["just", "escaped", "lone", "very"]
)
def test_a_long_text_is_digested(text: str) -> None:
    assert escape(text).startswith("sha256:")
    assert len(escape(text)) <= LONGEST_SUBJECT
    assert escape(text) != escape(f"{text}.")


def test_nobody_can_be_named_like_a_digest() -> None:
    digest = escape("x" * 1000)
    assert escape(digest) != digest


def test_the_longest_text_that_is_not_digested_is_itself() -> None:
    assert escape("x" * LONGEST_SUBJECT) == "x" * LONGEST_SUBJECT


# ------------------------------------------------------------------------------- slots are partitioned alike


@virtual_time
async def test_each_subject_has_slots_of_its_own() -> None:
    guard = new_guard()
    policy = Policy(concurrency=Concurrency(1, partition_by="user_id"))
    ann = await hold(guard, "x", policy, caller=Caller(user_id="ann"))
    bob = await hold(guard, "x", policy, caller=Caller(user_id="bob"))
    error = await refusal(once(guard, "x", policy, caller=Caller(user_id="ann")))
    assert error.code == "CONCURRENCY_LIMIT"
    assert (ann.runs, bob.runs) == (True, True)
    await ann.end()
    await once(guard, "x", policy, caller=Caller(user_id="ann"))
    await bob.end()


@virtual_time
async def test_the_slots_of_a_subject_are_forgotten_when_nobody_uses_them() -> None:
    guard = new_guard()
    policy = Policy(concurrency=Concurrency(1, partition_by="user_id", queue_timeout=5))
    for number in range(100):
        await once(guard, "x", policy, caller=Caller(user_id=str(number)))
    assert guard._scheduler.live_slots == 0
