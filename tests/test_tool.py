from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from limits import RateLimitItemPerHour
from mcp_types import Icon, ToolAnnotations

from frontmcp_py import Concurrency, ConfigurationError, RateLimit, Timeout, Tool, tool
from frontmcp_py.policy import UNSET, Policy
from frontmcp_py.tool import is_async


async def export_tickets(status: str = "open") -> dict[str, str]:
    """Export tickets as CSV."""
    return {"status": status}


def merge(source: str, target: str) -> str:
    """Merge two customers.

    Whatever the source had, the target has.
    """
    return f"{source}>{target}"


class Desk:
    """What answers."""

    def __init__(self, name: str) -> None:
        self.name = name

    @tool(rate_limit="5/minute", read_only=True)
    async def answer(self, question: str) -> str:
        """Answer a question."""
        return f"{self.name}: {question}"

    def close(self) -> str:
        """Close the desk."""
        return f"{self.name} is closed"

    @tool
    @staticmethod
    async def hours() -> str:
        """Opening hours."""
        return "always"


class Called:
    """Something that can be called."""

    async def __call__(self, number: int) -> int:
        return number + 1


class CalledInAThread:
    def __call__(self, number: int) -> int:
        return number + 1


# -------------------------------------------------------------------------------------- bare and with options


async def test_bare_it_makes_a_tool_of_a_function_that_stays_callable() -> None:
    made = tool(export_tickets)
    assert isinstance(made, Tool)
    assert (made.name, made.description, made.is_async) == ("export_tickets", "Export tickets as CSV.", True)
    assert await made("closed") == await made(status="closed") == {"status": "closed"}
    assert made.policy == Policy()
    assert repr(made) == "<Tool 'export_tickets'>"


def test_a_plain_function_is_called_as_it_is() -> None:
    @tool()
    def add(a: int, b: int = 2) -> int:
        return a + b

    assert (add(1), add(1, b=5), add.is_async, add.description) == (3, 6, False, "")


def test_it_looks_like_the_function() -> None:
    made = tool(merge)
    assert (made.__name__, made.__doc__, made.__wrapped__) == ("merge", merge.__doc__, merge)  # type: ignore[attr-defined]
    assert inspect.signature(made) == inspect.signature(merge)
    assert made.description == "Merge two customers.\n\nWhatever the source had, the target has."


def test_options_replace_what_the_function_says() -> None:
    icon = Icon(src="data:,")
    made = tool(
        name="merge_customers",
        title="Merge",
        description="Merges.",
        icons=[icon],
        meta={"team": "crm"},
        structured_output=False,
        describe_limits=False,
    )(merge)
    assert (made.name, made.title, made.description, made.icons) == (
        "merge_customers",
        "Merge",
        "Merges.",
        [icon],
    )
    assert (made.meta, made.structured_output, made.describe_limits) == ({"team": "crm"}, False, False)
    assert made("a", "b") == "a>b"


def test_an_empty_description_stays_empty() -> None:
    assert tool(description="")(merge).description == ""


def test_one_decorator_makes_two_independent_tools_of_two_functions() -> None:
    limited = tool(rate_limit="2/hour", concurrency=1, meta={"team": "crm"})
    one, other = limited(export_tickets), limited(merge)
    assert (one.name, other.name) == ("export_tickets", "merge")
    assert one.policy == other.policy
    assert one.meta == other.meta
    assert one.meta is not other.meta


def test_hints_become_annotations() -> None:
    made = tool(read_only=True, destructive=False, idempotent=True, open_world=False)(merge)
    assert made.annotations == ToolAnnotations(
        read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
    )
    assert tool(merge).annotations is None
    whole = ToolAnnotations(title="Merge", read_only_hint=True)
    assert tool(annotations=whole)(merge).annotations == whole


# ------------------------------------------------------------------------------------------ its limits


@pytest.mark.parametrize(
    ("rate_limit", "expected"),
    [
        (RateLimit(2, "1h"), (RateLimit(2, 3600),)),
        ("10/minute; 100/day", (RateLimit(10, 60), RateLimit(100, "1d"))),
        (RateLimitItemPerHour(2, 3), (RateLimit(2, "3h"),)),
        ({"max_requests": 2, "window": "1h", "partition_by": "user_id"}, (RateLimit(2, "1h", "user_id"),)),
        (["2/hour", RateLimit(1, 1)], (RateLimit(2, 3600), RateLimit(1, 1))),
        (None, ()),
    ],
)
def test_a_rate_limit_in_every_form(rate_limit: Any, expected: tuple[RateLimit, ...]) -> None:
    assert tool(rate_limit=rate_limit)(merge).policy.rate_limits == expected


@pytest.mark.parametrize(
    ("concurrency", "expected"),
    [
        (Concurrency(2, queue_timeout=5), (Concurrency(2, queue_timeout=5),)),
        (3, (Concurrency(3),)),
        ({"max_concurrent": 2, "key": "shell"}, (Concurrency(2, key="shell"),)),
        ([1, Concurrency(8, key="shell")], (Concurrency(1), Concurrency(8, key="shell"))),
        (None, ()),
        (0, ()),
    ],
)
def test_a_concurrency_limit_in_every_form(concurrency: Any, expected: tuple[Concurrency, ...]) -> None:
    assert tool(concurrency=concurrency)(merge).policy.concurrency_limits == expected


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        (Timeout(5, cancel_after=1), Timeout(5, cancel_after=1)),
        (30, Timeout(30)),
        (0.5, Timeout(0.5)),
        ("250ms", Timeout(0.25)),
        (timedelta(minutes=1), Timeout(60)),
        ({"execute": 5, "cancel_after": 0}, Timeout(5, cancel_after=0)),
        (None, None),
    ],
)
def test_a_timeout_in_every_form(timeout: Any, expected: Timeout | None) -> None:
    assert tool(timeout=timeout)(export_tickets).policy.deadline == expected


def test_what_is_not_given_is_left_to_the_server() -> None:
    policy = tool(merge).policy
    assert (policy.rate_limits, policy.concurrency_limits, policy.deadline) == (UNSET, UNSET, UNSET)
    assert (policy.priority, policy.on_cancel) == ("normal", UNSET)


# ------------------------------------------------------------------------------------- what a cancel does


@pytest.mark.parametrize(
    ("options", "cancels"),
    [
        ({}, False),
        ({"read_only": False}, False),
        ({"read_only": True}, True),
        ({"annotations": ToolAnnotations(read_only_hint=True)}, True),
        ({"read_only": True, "on_cancel": "abort"}, False),
        ({"on_cancel": "cancel"}, True),
        ({"read_only": False, "on_cancel": "cancel"}, True),
    ],
)
def test_a_tool_that_only_reads_is_cancelled_and_others_are_told(
    options: dict[str, Any], cancels: bool
) -> None:
    assert tool(**options)(export_tickets).cancels == cancels


def test_a_thread_is_only_told() -> None:
    assert not tool(read_only=True)(merge).cancels
    assert not tool(read_only=True, on_cancel="abort")(merge).cancels
    with pytest.raises(
        ConfigurationError, match='tool "merge": on_cancel: \'cancel\' is not allowed on a "def" tool'
    ):
        tool(on_cancel="cancel")(merge)


@pytest.mark.parametrize("cancel_after", [0, 5])
def test_cancelling_a_thread_after_its_deadline_is_a_mistake(cancel_after: float) -> None:
    with pytest.raises(
        ConfigurationError, match=r'tool "merge": timeout\.cancel_after: .* not allowed on a "def" tool'
    ):
        tool(timeout=Timeout(5, cancel_after=cancel_after))(merge)


# -------------------------------------------------------------------------------- what it can be made of


async def test_a_method_in_a_class_is_the_tool_of_the_bound_method_on_an_instance() -> None:
    one, other = Desk("one"), Desk("other")
    assert isinstance(Desk.answer, Tool)
    assert await one.answer("why?") == "one: why?"
    assert await other.answer("why?") == "other: why?"
    bound = one.answer
    assert (bound.name, bound.description, bound.is_async) == ("answer", "Answer a question.", True)
    assert bound.policy == Policy("5/minute")
    assert bound.is_read_only
    assert list(inspect.signature(bound).parameters) == ["question"]


def test_a_bound_method_can_be_made_a_tool() -> None:
    made = tool(concurrency=1)(Desk("one").close)
    assert (made(), made.name, made.description) == ("one is closed", "close", "Close the desk.")


async def test_so_can_a_static_one() -> None:
    assert Desk.hours.is_async
    assert await Desk("one").hours() == "always"


class Counter:
    count = 0

    @classmethod
    @tool(name="count", concurrency=1)
    async def add(cls, number: int) -> int:
        cls.count += number
        return cls.count


async def test_so_can_one_of_the_class() -> None:
    made = tool(Counter.add)
    assert (made.name, made.policy, made.is_async) == ("count", Policy(concurrency=1), True)
    assert await made(2) == await made(0) == 2
    assert list(inspect.signature(made).parameters) == ["number"]


def test_a_tool_is_one_already() -> None:
    made = tool(rate_limit="2/hour")(merge)
    assert tool(made) is made
    assert tool()(made) is made
    for options in (
        {"rate_limit": "3/hour"},
        {"name": "other"},
        {"priority": "control"},
        {"read_only": False},
    ):
        with pytest.raises(ConfigurationError, match='tool "merge": it is a tool already'):
            tool(**options)(made)


async def test_a_partial_or_an_object_needs_a_name() -> None:
    partial = functools.partial(merge, "a")
    made = tool(name="merge_a")(partial)
    assert (made("b"), made.is_async, made.description) == (
        "a>b",
        False,
        merge.__doc__ and inspect.getdoc(merge),
    )
    assert tool(name="open")(functools.partial(export_tickets, "open")).is_async
    called = tool(name="next")(Called())
    assert (called.is_async, await called(1)) == (True, 2)
    assert not tool(name="next")(CalledInAThread()).is_async
    for nameless in (partial, Called(), CalledInAThread()):
        with pytest.raises(
            ConfigurationError, match=r"has no name of its own; give the tool one: tool\(name=\.\.\.\)"
        ):
            tool(nameless)


def test_a_lambda_needs_a_name() -> None:
    with pytest.raises(ConfigurationError, match="a lambda has no name"):
        tool(lambda: 1)
    assert tool(name="one")(lambda: 1)() == 1


async def counts() -> AsyncIterator[int]:
    yield 1


def counts_in_a_thread() -> Iterator[int]:
    yield 1


class Counts:
    async def __call__(self) -> AsyncIterator[int]:
        yield 1


@pytest.mark.parametrize(
    "function",
    [counts, counts_in_a_thread, functools.partial(counts), Counts(), Counts().__call__],
    ids=["async", "def", "partial", "object", "method"],
)
def test_a_generator_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match='tool "counts": a generator is not allowed'):
        tool(name="counts")(function)


@pytest.mark.parametrize("what", ["merge", 7, None, {"name": "x"}])
def test_what_cannot_be_called_is_no_tool(what: Any) -> None:
    with pytest.raises(TypeError, match=r"tool\(\) decorates a function"):
        tool()(what)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (export_tickets, True),
        (merge, False),
        (Called(), True),
        (Called, False),
        (CalledInAThread(), False),
        (functools.partial(functools.partial(export_tickets)), True),
        (Desk("one").close, False),
        (staticmethod(export_tickets), True),
        (len, False),
    ],
    ids=[*("async", "def", "object", "class", "object of a def", "partial", "method", "static", "built-in")],
)
def test_whether_a_call_gives_a_coroutine(function: Callable[..., Any], expected: bool) -> None:
    assert is_async(function) == expected


# -------------------------------------------------------------------------------------------- bad values

HINTS = ("read_only", "destructive", "idempotent", "open_world")
BAD: dict[str, list[Any]] = {
    "rate_limit": [
        *(True, 5, "often", "10/0 minute", [], {"max_request": 2}, {}, ["2/hour", 7]),
        *({"max_requests": number} for number in (0, -1, True, 2.5, float("nan"), 10**9 + 1)),
    ],
    "concurrency": [True, -1, 1.5, float("inf"), "1", [], {"limit": 2}, 10**6 + 1],
    "timeout": [True, 0, -1, float("nan"), float("inf"), "30", "soon", [], {"cancel": 1}],
    "priority": ["high", None, True],
    "on_cancel": ["stop", None, True],
    **{hint: [1, "yes"] for hint in HINTS},
    "annotations": [{"readOnlyHint": True}, True],
    "title": [7, b"t"],
    "description": [7, ["text"]],
    "icons": [7, "icon.png"],
    "meta": [7, ["team"], "team"],
    "structured_output": [1, "yes"],
    "describe_limits": [0, "no"],
}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        pytest.param(option, value, id=f"{option}-{number}")
        for option, values in BAD.items()
        for number, value in enumerate(values)
    ],
)
def test_a_bad_value_names_the_tool_the_option_and_what_is_allowed(option: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        tool(**{option: value})(export_tickets)
    message = str(caught.value)
    assert message.startswith('tool "export_tickets": ')
    assert option in message
    assert any(word in message for word in ("give ", "did you mean", "needs a value", "valid options"))


def test_a_bad_value_in_a_list_is_named_with_its_place() -> None:
    with pytest.raises(ConfigurationError, match=r'tool "merge": rate_limit\[1\]'):
        tool(rate_limit=["2/hour", "often"])(merge)


@pytest.mark.parametrize("name", ["", 7, b"merge"])
def test_a_bad_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"name: .* is not allowed; give text"):
        tool(name=name)(merge)


def test_hints_and_annotations_do_not_go_together() -> None:
    with pytest.raises(
        ConfigurationError, match='tool "merge": read_only: not allowed together with annotations'
    ):
        tool(read_only=True, annotations=ToolAnnotations())(merge)


@pytest.mark.parametrize(
    ("option", "meant"),
    [("rate_limits", "rate_limit"), ("conccurency", "concurrency"), ("readonly", "read_only")],
)
def test_an_unknown_option_names_the_nearest_one(option: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"tool\(\) has no option '{option}'; did you mean '{meant}'\?"):
        tool(**{option: 1})  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"Tool\(\) has no option 'names'; did you mean 'name'\?"):
        Tool(merge, names="x")  # type: ignore[call-arg]


def test_an_unknown_field_of_a_mapping_names_the_nearest_one() -> None:
    with pytest.raises(
        ConfigurationError, match="RateLimit has no field 'max_request'; did you mean 'max_requests'"
    ):
        tool(rate_limit={"max_request": 2})(merge)
