"""Calls, operations and results as values: what they are made from, and what they are as plain data."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
import json
import pickle
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic import BaseModel

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.host import Host, Operation, Status, ToolCall, ToolResult

CALL: Final = ToolCall("c", "t", {"a": 1})
TEXT: Final = TextContent(text="said")
IMAGE: Final = ImageContent(data="aGk=", mime_type="image/png")
BLOCKS: Final[list[ContentBlock]] = [
    TEXT,
    IMAGE,
    AudioContent(data="aGk=", mime_type="audio/wav"),
    ResourceLink(uri="file:///a", name="a", title="A", size=3),
    EmbeddedResource(resource=TextResourceContents(uri="file:///b", text="b", mime_type="text/plain")),
    EmbeddedResource(resource=BlobResourceContents(uri="file:///c", blob="aGk=")),
]
STATUSES: Final[tuple[Status, ...]] = ("ok", "error", "skipped", "cancelled", "not_run", "unknown")


# ----------------------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (None, None),
        ({}, None),
        ([1], "the arguments must be an object, not a list"),
        ("{}", "the arguments must be an object, not text"),
        (7, "the arguments must be an object, not a number"),
        (True, "the arguments must be an object, not a boolean"),
    ],
)
def test_arguments_that_are_no_object_are_the_problem_of_the_call(
    arguments: Any, problem: str | None
) -> None:
    """A call is never refused for what a model wrote; it is answered with the problem."""
    call = ToolCall("c", "t", arguments)
    assert (call.arguments, call.problem) == ({}, problem)


def test_a_problem_that_is_known_already_is_kept() -> None:
    """What was wrong first is what the model is told."""
    assert ToolCall("c", "t", [1], "not JSON").problem == "not JSON"  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("id", None), ("id", 7), ("name", None), ("name", ["t"])])
def test_a_call_has_an_id_and_a_name_that_are_text(field: str, value: object) -> None:
    """They are looked up and compared, so anything else is the caller's mistake."""
    fields: dict[str, Any] = {"id": "c", "name": "t", field: value}
    with pytest.raises(ConfigurationError, match=f"ToolCall.{field}: .* is not allowed; give text"):
        ToolCall(**fields)


def test_calls_are_values() -> None:
    """Equal ones hash alike, though arguments may hold lists; they can be copied and pickled."""
    one, same = ToolCall("c", "t", {"a": [1]}), ToolCall("c", "t", {"a": [1]})
    assert one == same == copy.deepcopy(one) == pickle.loads(pickle.dumps(one))
    assert len({one, same, ToolCall("c", "t", {"a": [2]})}) == 2
    assert one.label == "t#c"
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.id = "d"  # type: ignore[misc]


def test_an_operation_is_known_by_its_call_and_its_place() -> None:
    """Its arguments are its own."""
    operation = Operation.of(CALL, 3, {"b": 2})
    assert (operation.id, operation.name, operation.arguments) == ("c#3", "t", {"b": 2})
    assert (operation.call, operation.index, operation.label) == (CALL, 3, "t#c#3")
    assert len({operation, Operation.of(CALL, 3, {"b": 2})}) == 1


# -------------------------------------------------------------------------- results: what they are made from


def test_a_result_takes_text_or_blocks_or_their_plain_data() -> None:
    """What is unmistakable is taken; ids and names are the caller's."""
    for content in ("said", [TEXT], (TEXT,), [{"type": "text", "text": "said"}]):
        assert ToolResult("c", "t", content=content).content == (TEXT,)  # type: ignore[arg-type]
    assert ToolResult("c", "t").content == ()
    assert ToolResult("c", "t", content=BLOCKS).content == tuple(BLOCKS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (5, "ToolResult.content: 5"),
        (None, "ToolResult.content: None"),
        ([TEXT, 5], "ToolResult.content[1]: 5"),
        ([{"type": "film"}], "ToolResult.content[0]: "),
        ({"type": "text", "text": "x"}, "ToolResult.content[0]: 'type'"),
        (b"x", "ToolResult.content[0]: 120"),
    ],
)
def test_content_that_is_none_is_refused_with_its_place(content: Any, words: str) -> None:
    """A result is made by a program, so this is its mistake."""
    with pytest.raises(ConfigurationError) as caught:
        ToolResult("c", "t", content=content)
    assert words in str(caught.value)


def test_a_status_that_does_not_exist_is_refused() -> None:
    """The nearest one is named."""
    with pytest.raises(ConfigurationError, match="'cancelled'"):
        ToolResult("c", "t", "canceled")  # type: ignore[arg-type]


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_but_ok_is_an_error(status: Status) -> None:
    """The model is told that it has not succeeded."""
    assert ToolResult("c", "t", status).is_error == (status != "ok")


def test_the_text_of_a_result_says_what_is_no_text() -> None:
    """By its kind and address, a line each."""
    assert ToolResult("c", "t", content=BLOCKS).text.splitlines() == [
        "said",
        "[image image/png]",
        "[audio audio/wav]",
        "[resource file:///a]",
        "b",
        "[resource file:///c]",
    ]


# ------------------------------------------------------------------------- results: what a function returned


class Model(BaseModel):
    """A user's data."""

    x: int = 1
    at: datetime.date = datetime.date(2026, 1, 2)


@dataclasses.dataclass
class Data:
    """A user's data, too."""

    x: int = 1


class Colour(enum.StrEnum):
    """A user's words."""

    RED = "red"


@pytest.mark.parametrize(
    ("value", "text", "structured"),
    [
        (None, "", None),
        ("", "", None),
        ("said", "said", None),
        (Colour.RED, "red", None),
        ({"x": 1}, '{\n  "x": 1\n}', {"x": 1}),
        ({}, "{}", {}),
        ([], "[]", None),
        ([1, "a", None], '[\n  1,\n  "a",\n  null\n]', None),
        ((1,), "[\n  1\n]", None),
        (True, "true", None),
        (7, "7", None),
        (1.5, "1.5", None),
        (Decimal("1.5"), '"1.5"', None),
        (float("nan"), "null", None),
        ({"x": float("inf")}, '{\n  "x": null\n}', {"x": None}),
        (Model(), '{\n  "x": 1,\n  "at": "2026-01-02"\n}', {"x": 1, "at": "2026-01-02"}),
        ([Model()], '[\n  {\n    "x": 1,\n    "at": "2026-01-02"\n  }\n]', None),
        (Data(), '{\n  "x": 1\n}', {"x": 1}),
        (b"bytes", '"bytes"', None),
        (b"\xff", '"_w=="', None),
        ({"x": b"\xff"}, '{\n  "x": "_w=="\n}', {"x": "_w=="}),
        (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"', None),
        (Path("a/b"), '"a/b"', None),
        (datetime.timedelta(seconds=90), '"PT1M30S"', None),
        ({1: "a", None: "b", (1, 2): "c"}, None, {"1": "a", "None": "b", "1,2": "c"}),
        ({"type": "text", "text": "x"}, None, {"type": "text", "text": "x"}),
    ],
    ids=repr,
)
def test_what_a_function_returns_becomes_text_and_data(
    value: object, text: str | None, structured: object
) -> None:
    """Text as it is, everything else as JSON; what is an object there is data for programs, too."""
    result = ToolResult.of(CALL, value)
    assert (result.id, result.name, result.status) == ("c", "t", "ok")
    assert text is None or result.text == text
    assert result.structured_content == structured
    if structured is not None:
        assert json.loads(result.text) == structured


class Mute:
    """Cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def endless_list() -> object:
    circle: list[object] = []
    circle.append(circle)
    return circle


def endless_dict() -> object:
    circle: dict[str, object] = {}
    circle["a"] = circle
    return circle


def deep() -> object:
    value: object = []
    for _ in range(100_000):
        value = [value]
    return value


def endless_model() -> object:
    class Node(BaseModel):
        next: Any = None

    node = Node()
    node.next = node
    return node


HOPELESS: Final[dict[str, tuple[Callable[[], object], str]]] = {
    "an object": (object, "<object object at"),
    "an object in a list": (lambda: [object()], "<object object at"),
    "a function": (lambda: print, "<built-in function print>"),
    "an exception": (lambda: ValueError("why"), "why"),
    "an object as a key": (lambda: {object(): 1}, "<object object at"),
    "a list in itself": (endless_list, "[[...]]"),
    "a mapping in itself": (endless_dict, "{'a': {...}}"),
    "a model in itself": (endless_model, "next"),
    "a list too deep": (deep, "[list]"),
    "an object that cannot be shown": (Mute, "[Mute]"),
    "one within a mapping": (lambda: {"a": Mute()}, "[dict]"),
    "half a character as a key": (lambda: {"\ud800": 1}, "\\ud800"),
    "a number too long to be shown": (lambda: 10**5000, "1000"),
    "a generator": (lambda: (each for each in [1, 2]), ""),
    "a set": (lambda: {1, 2}, "1"),
    "a range": (lambda: range(3), ""),
    "a block and an object": (lambda: [IMAGE, Mute()], "[Mute]"),
    "a block and a list in itself": (lambda: [IMAGE, endless_list()], "[[...]]"),
}


@pytest.mark.parametrize(("make", "words"), HOPELESS.values(), ids=HOPELESS)
def test_what_has_no_form_in_json_is_shown_as_it_is(make: Callable[[], object], words: str) -> None:
    """Nothing that a function returns raises, here or on its way to a model or a transcript."""
    result = ToolResult.of(CALL, make())
    assert result.status == "ok"
    assert words in result.text
    assert ToolResult.from_dict(json.loads(json.dumps(result.as_dict()))).text == result.text
    for written in (result.to_anthropic(), result.to_openai(), result.to_openai_output()):
        json.dumps(written, allow_nan=False)


@pytest.mark.parametrize(
    "block", BLOCKS, ids=["text", "image", "audio", "link", "resource", "binary resource"]
)
def test_a_block_is_content_alone_or_in_a_list(block: ContentBlock) -> None:
    """It is not turned into JSON."""
    for value in (block, [block], (block,)):
        result = ToolResult.of(CALL, value)
        assert result.content == (block,)
        assert result.structured_content is None
    assert ToolResult.of(CALL, BLOCKS).content == tuple(BLOCKS)


def test_in_a_list_with_a_block_every_item_is_content() -> None:
    """Text as text, nothing for `None`, data as JSON, and lists in it as data."""
    result = ToolResult.of(CALL, ["look:", IMAGE, {"x": 1}, None, Model(x=2), [IMAGE.mime_type, 1], [TEXT]])
    assert [each.type for each in result.content] == ["text", "image", *["text"] * 4]
    assert result.content[:2] == (TextContent(text="look:"), IMAGE)
    said = [json.loads(each.text) for each in result.content[2:] if isinstance(each, TextContent)]
    assert said[:3] == [{"x": 1}, {"x": 2, "at": "2026-01-02"}, ["image/png", 1]]
    assert said[3][0]["text"] == "said"


def test_what_was_returned_can_change_without_changing_the_result() -> None:
    """Data for programs is a copy."""
    value = {"x": [1]}
    result = ToolResult.of(CALL, value)
    value["x"].append(2)
    assert result.structured_content == {"x": [1]}


def test_a_result_of_the_sdk_is_taken_with_its_data_and_meta() -> None:
    """Its content as blocks, its `is_error` as the status."""
    result = ToolResult.of(
        CALL,
        CallToolResult(content=BLOCKS, structured_content={"x": 1}, _meta={"code": "RATE"}, is_error=True),
    )
    assert result == ToolResult("c", "t", "error", BLOCKS, {"x": 1}, {"code": "RATE"})
    assert ToolResult.of(CALL, CallToolResult(content=[])) == ToolResult("c", "t")


@pytest.mark.parametrize("content", [[], [TextContent(text="")], [TextContent(text=" \n")]])
def test_an_error_of_the_sdk_that_says_nothing_gets_a_sentence(content: list[ContentBlock]) -> None:
    """A model that reads of an error wants to know whose."""
    result = ToolResult.of(CALL, CallToolResult(content=content, is_error=True))
    assert result.text.strip() == "t failed and does not say why"


@pytest.mark.parametrize(("structured", "text"), [({"x": 1}, '{\n  "x": 1\n}'), ([1], "[\n  1\n]"), (0, "0")])
def test_data_without_content_is_what_the_model_is_told(structured: Any, text: str) -> None:
    """A server may leave the content to its client."""
    result = ToolResult.of(CALL, CallToolResult(content=[], structured_content=structured))
    assert result.text == text
    assert result.structured_content == structured
    with_content = CallToolResult(content=[TEXT], structured_content=structured)
    assert ToolResult.of(CALL, with_content).content == (TEXT,)


@pytest.mark.parametrize("status", STATUSES)
def test_a_result_of_this_package_is_kept_but_for_whose_it_is(status: Status) -> None:
    """A function may decide its own status."""
    given = ToolResult("other", "u", status, [IMAGE], {"x": 1}, {"y": 2}, [ToolResult("other#0", "u")])
    assert ToolResult.of(CALL, given) == dataclasses.replace(given, id="c", name="t")


async def test_no_value_of_a_function_ends_a_batch() -> None:
    """Each is a result in its place."""
    values = [None, Mute(), endless_dict(), deep(), {"x": object()}, b"\xff", [IMAGE, Mute()], "said"]

    async def call(name: str, arguments: dict[str, Any]) -> object:
        return values[arguments["n"]]

    results = await Host(None, call).run([ToolCall(str(n), "t", {"n": n}) for n in range(len(values))])
    assert [each.id for each in results] == [str(n) for n in range(len(values))]
    assert {each.status for each in results} == {"ok"}
    assert results[-1].text == "said"


# ------------------------------------------------------------------------------------- results as plain data


def whole(status: Status) -> ToolResult:
    """A result with everything."""
    operations = [
        ToolResult(f"c#{n}", "t", each, [IMAGE], {"n": n}, position=n) for n, each in enumerate(STATUSES)
    ]
    return ToolResult("c", "t", status, BLOCKS, {"x": [1, None]}, {"code": "RATE"}, operations, position=4)


@pytest.mark.parametrize("status", STATUSES)
def test_a_result_is_the_same_after_it_was_written_down(status: Status) -> None:
    """With images, data, meta, place and operations, through JSON."""
    result = whole(status)
    written = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    read = ToolResult.from_dict(written)
    assert read == result
    assert read.position == 4
    assert [each.position for each in read.operations] == list(range(len(STATUSES)))
    assert read.as_dict() == written


def test_what_is_written_down_can_be_read_by_people_and_programs() -> None:
    """The text and `is_error` stand there, and what is not there is left out."""
    assert ToolResult("c", "t", "skipped", "no").as_dict() == {  # type: ignore[arg-type]
        "id": "c",
        "name": "t",
        "status": "skipped",
        "is_error": True,
        "content": [{"type": "text", "text": "no"}],
        "text": "no",
    }
    image = ImageContent(data="aGk=", mime_type="image/png", _meta={"a": None})
    assert ToolResult("c", "t", content=[image]).as_dict()["content"] == [
        {"type": "image", "data": "aGk=", "mimeType": "image/png", "_meta": {"a": None}}
    ]


def test_what_has_no_form_in_json_is_left_out_of_a_transcript() -> None:
    """Numbers that JSON does not have are null; the rest of the result is there."""
    result = ToolResult("c", "t", "ok", [TEXT], endless_dict(), {"mute": Mute()})
    assert set(result.as_dict()) == {"id", "name", "status", "is_error", "content", "text"}
    assert ToolResult("c", "t", structured_content={"x": float("nan")}).as_dict()["structured_content"] == {
        "x": None
    }


def test_an_older_or_shorter_transcript_is_read_too() -> None:
    """Without a status, `is_error` decides; content may be text."""
    assert ToolResult.from_dict({"id": "c", "name": "t"}) == ToolResult("c", "t")
    assert ToolResult.from_dict({"id": "c", "name": "t", "is_error": True}).status == "error"
    assert ToolResult.from_dict({"id": "c", "name": "t", "content": "said"}).content == (TEXT,)
    nothing = {
        "content": None,
        "operations": None,
        "meta": None,
        "structured_content": None,
        "position": None,
    }
    assert ToolResult.from_dict({"id": "c", "name": "t", **nothing}) == ToolResult("c", "t")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"id": None}, "id of a result: None"),
        ({"id": 7}, "id of a result: 7"),
        ({"name": ["t"]}, "name of a result"),
        ({"status": "fine"}, "ToolResult.status: 'fine'"),
        ({"status": 5}, "ToolResult.status: 5"),
        ({"content": 5}, "ToolResult.content: 5"),
        ({"content": [{"type": "film"}]}, "ToolResult.content[0]"),
        ({"meta": 5}, "meta of a result: 5"),
        ({"operations": 5}, "operations of a result: 5"),
        ({"operations": {"id": "x"}}, "operations of a result"),
        ({"operations": [5]}, "a result: 5"),
        ({"operations": [{"id": "x"}]}, "name of a result: None"),
        ({"position": "1"}, "position of a result: '1'"),
        ({"position": True}, "position of a result: True"),
    ],
)
def test_a_transcript_that_is_wrong_is_refused_and_says_where(fields: dict[str, Any], words: str) -> None:
    """Whatever stands there."""
    with pytest.raises(ConfigurationError) as caught:
        ToolResult.from_dict({"id": "c", "name": "t", **fields})
    assert words in str(caught.value)


@pytest.mark.parametrize("data", [None, 5, "text", [], [("id", "c")]])
def test_what_is_no_result_at_all_is_refused(data: Any) -> None:
    """With what it should be."""
    with pytest.raises(ConfigurationError, match="give an object with id, name, status and content"):
        ToolResult.from_dict(data)


_JSON: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(_JSON)
def test_plain_data_reads_the_same_for_models_and_programs(value: object) -> None:
    """And after it was written down."""
    result = ToolResult.of(CALL, value)
    if isinstance(value, str):
        assert result.text == value
    elif value is not None:
        assert json.loads(result.text) == value
    assert result.structured_content == (value if isinstance(value, dict) else None)
    assert ToolResult.from_dict(json.loads(json.dumps(result.as_dict()))) == result
