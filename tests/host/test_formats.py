"""Calls and results as models' providers write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic import BaseModel

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.host import Batch, Host, Status, ToolCall, ToolResult

PNG: Final = ImageContent(data="aGk=", mime_type="image/png")
SVG: Final = ImageContent(data="aGk=", mime_type="image/svg+xml")
SOUND: Final = AudioContent(data="aGk=", mime_type="audio/wav")
LINK: Final = ResourceLink(uri="file:///a.txt", name="a")
NOTE: Final = EmbeddedResource(resource=TextResourceContents(uri="file:///n.txt", text="a note"))
PDF: Final = EmbeddedResource(
    resource=BlobResourceContents(uri="file:///of/d.pdf", mime_type="application/pdf", blob="aGk=")
)
ZIP: Final = EmbeddedResource(
    resource=BlobResourceContents(uri="file:///z.zip", mime_type="application/zip", blob="aGk=")
)
PICTURE: Final = EmbeddedResource(
    resource=BlobResourceContents(uri="file:///p.webp", mime_type="image/webp", blob="aGk=")
)
STATUSES: Final[tuple[Status, ...]] = ("ok", "error", "skipped", "cancelled", "not_run", "unknown")


def as_objects(value: object) -> Any:
    """Plain data as the objects that a provider's package would make of it; arguments stay plain data."""
    if isinstance(value, Mapping):
        fields = {name: each if name == "input" else as_objects(each) for name, each in value.items()}
        return SimpleNamespace(**fields)
    return [as_objects(each) for each in value] if isinstance(value, list) else value


def result(*content: str | ContentBlock, status: Status = "ok", name: str = "t") -> ToolResult:
    blocks = [TextContent(text=each) if isinstance(each, str) else each for each in content]
    return ToolResult("id", name, status, blocks)


# ------------------------------------------------------------------------------- calls: Anthropic's messages

USES: Final = [
    {"type": "thinking", "thinking": "hm", "signature": "x"},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
    {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "echo", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": False, "content": []},
    {"type": "tool_use", "id": "toolu_2", "name": "write", "input": {}},
]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": USES},
        {"id": "msg", "type": "message", "role": "assistant", "content": USES, "stop_reason": "tool_use"},
        as_objects({"type": "message", "role": "assistant", "content": USES}),
        {"content": [as_objects(each) for each in USES]},
        USES,
        as_objects(USES),
        tuple(USES),
    ],
)
def test_the_calls_of_a_message_are_read_in_order(message: object) -> None:
    """Plain data or objects, the message or its content. What the provider runs itself is no call."""
    assert ToolCall.from_anthropic(message) == [
        ToolCall("toolu_1", "read", {"path": "a"}),
        ToolCall("toolu_2", "write"),
    ]


@pytest.mark.parametrize("message", [{"role": "assistant", "content": "Hello."}, {"content": []}, []])
def test_a_message_of_words_has_no_calls(message: object) -> None:
    """Nothing to run is nothing wrong."""
    assert ToolCall.from_anthropic(message) == []


@pytest.mark.parametrize(
    ("block", "read"),
    [
        ({"id": "1", "name": "t", "input": None}, ToolCall("1", "t")),
        ({"id": "1", "name": "t"}, ToolCall("1", "t")),
        ({"id": None, "name": "t", "input": {}}, ToolCall("", "t")),
        ({"name": "t", "input": {}}, ToolCall("", "t")),
        ({"id": 7, "name": "t", "input": {}}, ToolCall("7", "t")),
    ],
)
def test_what_a_call_can_do_without_is_not_missed(block: dict[str, Any], read: ToolCall) -> None:
    """No arguments are none, and without an id it is answered without one."""
    assert ToolCall.from_anthropic([{"type": "tool_use", **block}]) == [read]


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({"name": "t", "input": "{}"}, "the arguments must be an object, not text"),
        ({"name": "t", "input": [1]}, "the arguments must be an object, not a list"),
        ({"name": "t", "input": 1.5}, "the arguments must be an object, not a number"),
        ({"name": "t", "input": False}, "the arguments must be an object, not a boolean"),
        ({"name": "", "input": {}}, "the call names no tool"),
        ({"name": None, "input": {}}, "the call names no tool"),
        ({"input": {}}, "the call names no tool"),
        ({}, "the call names no tool"),
    ],
)
def test_a_broken_call_keeps_its_place_and_says_what_is_wrong(block: dict[str, Any], problem: str) -> None:
    """Those beside it are read as if it were whole."""
    good = {"type": "tool_use", "id": "g", "name": "good", "input": {}}
    calls = ToolCall.from_anthropic([good, {"type": "tool_use", "id": "b", **block}, good])
    assert [call.id for call in calls] == ["g", "b", "g"]
    assert [call.problem for call in calls] == [None, problem, None]
    assert calls[1].arguments == {}


@pytest.mark.parametrize(
    "message", [None, 5, "text", {}, {"content": None}, {"content": 5}, {"tool_calls": []}, object()]
)
def test_what_is_no_message_of_anthropics_is_refused(message: object) -> None:
    """For calls and for results."""
    for read in (ToolCall.from_anthropic, ToolResult.from_anthropic):
        with pytest.raises(ConfigurationError, match="give a message of Anthropic's"):
            read(message)


def test_a_list_of_messages_is_refused_since_its_calls_would_be_lost() -> None:
    """One response is one batch; which message is meant is for the caller to say."""
    message = {"role": "assistant", "content": USES}
    for read in (ToolCall.from_anthropic, ToolResult.from_anthropic):
        for listed in ([message], [as_objects({"type": "message", **message})]):
            with pytest.raises(ConfigurationError, match="one message, not a list of them"):
                read(listed)
    chat: dict[str, object] = {"role": "assistant", "content": None, "tool_calls": []}
    for listed in ([chat], [as_objects(chat)]):
        with pytest.raises(ConfigurationError, match="one message, not a list of them"):
            ToolCall.from_openai(listed)


USE: Final = {"type": "tool_use", "id": "a", "name": "t", "input": {}}
ANSWER: Final = {"type": "tool_result", "tool_use_id": "a", "content": "done"}
CHAT_CALL: Final = {"type": "function", "id": "a", "function": {"name": "t", "arguments": "{}"}}
ITEM: Final = {"type": "function_call", "call_id": "a", "name": "t", "arguments": "{}"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "I look.", "tool_calls": [CHAT_CALL]},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}], "tool_calls": [CHAT_CALL]},
        {"role": "assistant", "content": "I look.", "function_call": {"name": "t", "arguments": "{}"}},
        {"content": "I look.", "output": [ITEM]},
        [CHAT_CALL],
        [{"type": "reasoning"}, ITEM],
    ],
    ids=["chat", "parts", "function_call", "response", "calls", "items"],
)
def test_a_message_of_openais_is_not_one_of_anthropics_without_calls(message: object) -> None:
    """It would look as if the model was done."""
    for form in (message, as_objects(message)):
        with pytest.raises(ConfigurationError, match=r"read this one with ToolCall\.from_openai"):
            ToolCall.from_anthropic(form)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, USE]},
        {"role": "user", "content": [ANSWER]},
        [{"type": "text", "text": "I look."}, USE],
        [ANSWER],
    ],
    ids=["message", "answer", "content", "content of an answer"],
)
def test_a_message_of_anthropics_is_not_one_of_openais_without_calls(message: object) -> None:
    for form in (message, as_objects(message)):
        with pytest.raises(ConfigurationError, match=r"read this one with ToolCall\.from_anthropic"):
            ToolCall.from_openai(form)


def test_a_call_in_the_form_of_an_older_api_is_refused_and_not_missed() -> None:
    message = {"role": "assistant", "content": None, "function_call": {"name": "t", "arguments": "{}"}}
    for form in (message, as_objects(message)):
        with pytest.raises(ConfigurationError, match="function_call is of an older API"):
            ToolCall.from_openai(form)
    # Objects of the package have the field all the same.
    assert ToolCall.from_openai({**message, "tool_calls": [CHAT_CALL], "function_call": None})[0].id == "a"


# ------------------------------------------------------------------------ calls: OpenAI's chat and responses

CHAT: Final = [
    {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "write", "arguments": "{}"}},
]
OUTPUT: Final = [
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "read",
        "arguments": '{"path": "a"}',
    },
    {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hm."}],
    },
    {"type": "custom_tool_call", "id": "ct_1", "call_id": "call_9", "name": "shell", "input": "ls"},
    {"type": "function_call", "id": "fc_2", "call_id": "call_2", "name": "write", "arguments": "{}"},
]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": CHAT},
        as_objects({"role": "assistant", "content": None, "tool_calls": CHAT}),
        {"tool_calls": tuple(CHAT)},
        CHAT,
        as_objects(CHAT),
        {"id": "resp", "object": "response", "output": OUTPUT},
        as_objects({"id": "resp", "output": OUTPUT}),
        OUTPUT,
        as_objects(OUTPUT),
    ],
)
def test_the_calls_of_chat_and_responses_are_read_in_order(message: object) -> None:
    """Plain data or objects, the message or its list. Other items of a response are no calls."""
    assert ToolCall.from_openai(message) == [
        ToolCall("call_1", "read", {"path": "a"}),
        ToolCall("call_2", "write"),
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "Hello."},
        {"role": "assistant", "content": "Hello.", "tool_calls": None},
        {"role": "assistant", "tool_calls": []},
        {"output": []},
        {"output": [{"type": "message", "role": "assistant", "content": []}]},
        [],
    ],
)
def test_words_of_a_model_are_no_calls(message: object) -> None:
    """In either API."""
    assert ToolCall.from_openai(message) == ToolCall.from_openai(as_objects(message)) == []


ARGUMENTS: Final[list[tuple[object, str | None]]] = [
    ("", None),
    ("  \n", None),
    (None, None),
    ({"already": "an object"}, None),
    ('{"a": 1', "the arguments are not JSON: "),
    ("{'a': 1}", "the arguments are not JSON: "),
    ("oops", "the arguments are not JSON: "),
    ('{"a": NaN}', "the arguments are not JSON: NaN"),
    ('{"a": -Infinity}', "the arguments are not JSON: -Infinity"),
    ("[" * 100_000, "the arguments are not JSON: "),
    ('{"a": ' + "1" * 10_000 + "}", "the arguments are not JSON: "),
    ("null", None),
    ("[]", "the arguments must be an object, not a list"),
    ('"{}"', "the arguments must be an object, not text"),
    ("3", "the arguments must be an object, not a number"),
    ("true", "the arguments must be an object, not a boolean"),
    ([1], "the arguments must be an object, not a list"),
    (b"{}", "the arguments must be an object, not a bytes"),
]


@pytest.mark.parametrize(("arguments", "problem"), ARGUMENTS, ids=lambda each: str(each)[:20])
def test_arguments_that_cannot_be_read_are_the_problem_of_their_call(
    arguments: object, problem: str | None
) -> None:
    """It keeps its place in both APIs, and what is empty is no arguments."""
    good = {"name": "good", "arguments": "{}"}
    bad = {"name": "bad", "arguments": arguments}
    chat = ToolCall.from_openai(
        {"tool_calls": [{"id": "1", "type": "function", "function": each} for each in (good, bad)]}
    )
    output = ToolCall.from_openai(
        {"output": [{"type": "function_call", "call_id": "1", **each} for each in (good, bad)]}
    )
    assert chat == output
    assert [call.name for call in chat] == ["good", "bad"]
    assert chat[0].problem is None
    if problem is None:
        assert chat[1].problem is None
        assert chat[1].arguments == (arguments if isinstance(arguments, dict) else {})
    else:
        assert str(chat[1].problem).startswith(problem)
        assert chat[1].arguments == {}


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"id": "b"},
        {"id": "b", "type": "function"},
        {"id": "b", "type": "function", "function": None},
        {"id": "b", "type": "function", "function": {}},
        {"id": "b", "type": "function", "function": {"name": None, "arguments": "{}"}},
        {"id": "b", "type": "function", "function": "read"},
        {"id": "b", "type": "something new", "name": "read"},
        {"id": "b", "type": "custom", "custom": {"name": "shell", "input": "ls"}},
        None,
        "read",
        7,
    ],
)
def test_every_item_of_tool_calls_is_a_call(broken: object) -> None:
    """However broken: results are told apart by their place, so none may get lost."""
    good = CHAT[0]
    calls = ToolCall.from_openai({"role": "assistant", "tool_calls": [good, broken, good]})
    assert [call.name for call in calls][::2] == ["read", "read"]
    assert len(calls) == 3
    assert calls[1].problem is not None


def test_a_function_call_without_an_id_or_a_name_keeps_its_place_in_a_response() -> None:
    """The id is empty then, and the name is the problem."""
    calls = ToolCall.from_openai({"output": [{"type": "function_call"}, *OUTPUT]})
    assert [call.problem for call in calls] == ["the call names no tool", None, None]
    assert [call.id for call in calls] == ["", "call_1", "call_2"]


def test_ids_may_repeat_or_be_missing() -> None:
    """Some servers give every call the same id, or none."""
    items = [{"type": "function", "function": {"name": str(n), "arguments": ""}} for n in range(3)]
    assert [(call.id, call.name) for call in ToolCall.from_openai(items)] == [("", "0"), ("", "1"), ("", "2")]
    same = [{"id": "x", **each} for each in items]
    assert [(call.id, call.name) for call in ToolCall.from_openai(same)] == [
        ("x", "0"),
        ("x", "1"),
        ("x", "2"),
    ]


@pytest.mark.parametrize("message", [None, 5, "text", {}, {"output": None}, {"choices": [{}]}, object()])
def test_what_is_no_message_of_openais_is_refused(message: object) -> None:
    """A whole completion has to be asked for one of its choices."""
    with pytest.raises(ConfigurationError, match="a message with tool_calls, or a response with output"):
        ToolCall.from_openai(message)


async def test_broken_calls_are_answered_in_their_place_and_the_others_run() -> None:
    """What was written between good calls is refused with its reason; nothing of it runs."""
    ran: list[Mapping[str, object]] = []

    async def call(name: str, arguments: dict[str, Any]) -> str:
        ran.append(arguments)
        return "done"

    items = [
        {"id": "a", "function": {"name": "t", "arguments": '{"n": 1}'}},
        {"id": "b", "function": {"name": "t", "arguments": '{"n": 2'}},
        {"id": "c", "function": {"name": "", "arguments": "{}"}},
        {"id": "a", "function": {"name": "t", "arguments": '{"n": 4}'}},
    ]
    results = await Host({"t": {"concurrency": 1}}, call).run(ToolCall.from_openai({"tool_calls": items}))
    assert [each.id for each in results] == ["a", "b", "c", "a"]
    assert [each.status for each in results] == ["ok", "error", "error", "ok"]
    assert "not JSON" in results[1].text
    assert "names no tool" in results[2].text
    assert ran == [{"n": 1}, {"n": 4}]


# ----------------------------------------------------------------------------- results: Anthropic's messages


def test_a_result_becomes_the_block_that_answers_the_call() -> None:
    """With everything that the API takes as it is, and the rest as text that says what it is."""
    block = result("text", PNG, PDF, PICTURE, NOTE, SVG, SOUND, LINK, ZIP).to_anthropic()
    source = {"type": "base64", "data": "aGk="}
    assert block == {
        "type": "tool_result",
        "tool_use_id": "id",
        "content": [
            {"type": "text", "text": "text"},
            {"type": "image", "source": {**source, "media_type": "image/png"}},
            {"type": "document", "source": {**source, "media_type": "application/pdf"}},
            {"type": "image", "source": {**source, "media_type": "image/webp"}},
            {"type": "text", "text": "a note"},
            {"type": "text", "text": "[image image/svg+xml]"},
            {"type": "text", "text": "[audio audio/wav]"},
            {"type": "text", "text": "[resource file:///a.txt]"},
            {"type": "text", "text": "[resource file:///z.zip application/zip]"},
        ],
    }


@pytest.mark.parametrize("kind", ["image/jpeg", "image/png", "image/gif", "image/webp"])
def test_images_of_the_kinds_that_are_allowed_stay_images(kind: str) -> None:
    """For both providers that take any."""
    image = result(ImageContent(data="aGk=", mime_type=kind))
    assert image.to_anthropic()["content"][0]["source"]["media_type"] == kind
    (part,) = image.to_openai_output()["output"]
    assert part == {"type": "input_image", "detail": "auto", "image_url": f"data:{kind};base64,aGk="}


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_but_ok_is_an_error_to_anthropic(status: Status) -> None:
    """`is_error` is there only then."""
    block = result("said", status=status).to_anthropic()
    assert block.get("is_error") == (None if status == "ok" else True)
    assert block["content"] == [{"type": "text", "text": "said"}]


def test_an_error_is_text_only() -> None:
    """The API refuses anything else in one."""
    block = result(PNG, PDF, "broken", status="error").to_anthropic()
    assert [part["text"] for part in block["content"]] == [
        "[image image/png]",
        "[resource file:///of/d.pdf application/pdf]",
        "broken",
    ]


@pytest.mark.parametrize("blank", [(), ("",), (" \n\t",), ("", "\n")])
def test_blank_text_is_left_out(blank: tuple[str, ...]) -> None:
    """The API refuses it: a result without content has none, and an error says that it says nothing."""
    assert result(*blank).to_anthropic() == {"type": "tool_result", "tool_use_id": "id"}
    assert [part["type"] for part in result(*blank, PNG, *blank).to_anthropic()["content"]] == ["image"]
    for status in STATUSES[1:]:
        ((part),) = result(*blank, status=status).to_anthropic()["content"]
        assert part["text"].startswith(f"t: {status.replace('_', ' ')}")


@settings(max_examples=100)
@given(
    st.lists(
        st.one_of(
            st.text(st.characters(codec=None), max_size=5),
            st.sampled_from([PNG, SVG, SOUND, LINK, NOTE, PDF, ZIP]),
        ),
        max_size=4,
    ),
    st.sampled_from(STATUSES),
    st.sampled_from(["", "t"]),
)
def test_no_result_is_one_that_an_api_refuses(content: list[Any], status: Status, name: str) -> None:
    """No blank text, no empty error, nothing but text in one, and nothing that UTF-8 cannot write."""
    each = result(*content, status=status, name=name)
    block, message, output = each.to_anthropic(), each.to_openai(), each.to_openai_output()
    for said in (block, message, output):
        json.dumps(said, ensure_ascii=False, allow_nan=False).encode()
    assert block.get("content") != []
    for part in block.get("content", []):
        assert part["type"] in (["text"] if each.is_error else ["text", "image", "document"])
        assert part["type"] != "text" or part["text"].strip()
    assert isinstance(message["content"], str)
    if each.is_error:
        assert block["content"]
        assert message["content"].removeprefix("Error:").strip()
    if isinstance(output["output"], list):
        assert all(part.get("text") != "" for part in output["output"])


# ---------------------------------------------------------------------- results: OpenAI's chat and responses


def test_a_result_becomes_the_message_and_the_item_that_answer_the_call() -> None:
    """Text in both."""
    assert result("a", "b").to_openai() == {"role": "tool", "tool_call_id": "id", "content": "a\nb"}
    assert result("a", "b").to_openai_output() == {
        "type": "function_call_output",
        "call_id": "id",
        "output": "a\nb",
    }
    assert result().to_openai()["content"] == result().to_openai_output()["output"] == ""


@pytest.mark.parametrize("status", STATUSES[1:])
def test_an_error_says_so_in_its_text(status: Status) -> None:
    """Nothing else in these messages does; one without a word says what happened."""
    assert result("gone", status=status).to_openai()["content"] == "Error: gone"
    assert result("gone", status=status).to_openai_output()["output"] == "Error: gone"
    assert (
        result(" ", status=status).to_openai()["content"].startswith(f"Error: t: {status.replace('_', ' ')}")
    )
    pictured = result(PNG, "gone", status=status).to_openai_output()["output"]
    assert pictured[0] == {"type": "input_text", "text": "Error:"}


def test_chat_is_told_what_is_no_text_in_words() -> None:
    """Its tool messages are text alone."""
    assert result(PNG, PDF, NOTE).to_openai()["content"] == (
        "[image image/png]\n[resource file:///of/d.pdf application/pdf]\na note"
    )


def test_responses_are_given_images_and_documents_as_parts() -> None:
    """Among text parts, in order."""
    assert result("a", PNG, "", PDF, SVG).to_openai_output()["output"] == [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,aGk="},
        {"type": "input_file", "filename": "d.pdf", "file_data": "data:application/pdf;base64,aGk="},
        {"type": "input_text", "text": "[image image/svg+xml]"},
    ]


def test_half_a_character_is_replaced() -> None:
    """JSON can write one, UTF-8 cannot, and one letter is no reason to lose a conversation."""
    half = result("a\ud83d", EmbeddedResource(resource=TextResourceContents(uri="u", text="\udc00b")))
    assert half.to_openai()["content"] == "a?\n?b"
    assert [part["text"] for part in half.to_anthropic()["content"]] == ["a?", "?b"]


# ------------------------------------------------------------------------------- results out of a transcript


def test_results_are_read_back_from_a_message_of_anthropics() -> None:
    """Whether text or blocks; other blocks of the message are none."""
    content = [
        {"type": "tool_result", "tool_use_id": "1", "content": "plain"},
        {
            "type": "tool_result",
            "tool_use_id": "2",
            "is_error": True,
            "content": [{"type": "text", "text": "gone"}],
        },
        {"type": "tool_result", "tool_use_id": "3"},
        {"type": "text", "text": "And now?"},
        {"type": "web_search_tool_result", "tool_use_id": "x", "content": []},
    ]
    for message in ({"role": "user", "content": content}, as_objects({"content": content}), content):
        assert ToolResult.from_anthropic(message) == [
            ToolResult("1", "", "ok", [TextContent(text="plain")]),
            ToolResult("2", "", "error", [TextContent(text="gone")]),
            ToolResult("3", ""),
        ]
    assert ToolResult.from_anthropic({"role": "user", "content": "Hello."}) == []


def test_results_are_read_back_from_messages_of_openais() -> None:
    """From one, or from a list in which they stand."""
    chat = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": None, "tool_calls": CHAT},
        {"role": "tool", "tool_call_id": "call_1", "content": "plain"},
        {
            "role": "tool",
            "tool_call_id": "call_2",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
    ]
    items = [
        *OUTPUT,
        {"type": "function_call_output", "call_id": "call_1", "output": "plain"},
        {
            "type": "function_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
    ]
    expected = [
        ToolResult("call_1", "", "ok", [TextContent(text="plain")]),
        ToolResult("call_2", "", "ok", [TextContent(text="a"), TextContent(text="b")]),
    ]
    for messages in (chat, items, as_objects(chat), as_objects(items)):
        assert ToolResult.from_openai(messages) == expected
    assert ToolResult.from_openai(chat[2]) == ToolResult.from_openai(items[-2]) == expected[:1]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "tool_result", "content": "x"},
        {"type": "tool_result", "tool_use_id": 5, "content": "x"},
        {"type": "tool_result", "tool_use_id": "1", "content": 5},
        {"type": "tool_result", "tool_use_id": "1", "content": {"type": "text"}},
    ],
)
def test_a_broken_result_of_anthropics_is_refused(block: Mapping[str, object]) -> None:
    """A transcript that cannot be read is not guessed at."""
    with pytest.raises(ConfigurationError, match=r"of a result: .* is not allowed"):
        ToolResult.from_anthropic([block])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x"},
        {"role": "tool", "tool_call_id": None, "content": "x"},
        {"role": "tool", "tool_call_id": "1", "content": 5},
        {"type": "function_call_output", "output": "x"},
        {"type": "function_call_output", "call_id": "1", "output": {}},
        {},
        None,
        "x",
        5,
        [{}],
        ["x"],
    ],
)
def test_a_broken_result_of_openais_is_refused(message: object) -> None:
    """And so is what is no message at all."""
    with pytest.raises(ConfigurationError, match="is not allowed"):
        ToolResult.from_openai(message)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}, "[image https://a/b.png]"),
        ({"type": "image", "source": {"type": "file", "file_id": "file_1"}}, "[image file_1]"),
        (
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}},
            "words",
        ),
        (
            {"type": "search_result", "source": "https://a", "title": "t", "content": []},
            "[search_result https://a]",
        ),
        ({"type": "tool_reference", "tool_name": "x"}, "[tool_reference]"),
        ({"type": "text"}, "[text]"),
        ({"type": "image"}, "[image]"),
        ({}, "[content]"),
        (None, "[content]"),
        (5, "[content]"),
        ("bare", "bare"),
    ],
)
def test_a_part_that_mcp_has_no_block_for_says_what_it_is(part: object, text: str) -> None:
    """Whatever providers add, reading a transcript does not fail."""
    (read,) = ToolResult.from_anthropic([{"type": "tool_result", "tool_use_id": "1", "content": [part]}])
    assert read.text == text
    (bare,) = ToolResult.from_openai({"role": "tool", "tool_call_id": "1", "content": [part]})
    assert bare.text


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "input_image", "image_url": "https://a/b.png"}, "[input_image https://a/b.png]"),
        ({"type": "input_image", "file_id": "file_1"}, "[input_image file_1]"),
        ({"type": "input_file", "file_url": "https://a"}, "[input_file https://a]"),
        ({"type": "refusal"}, "[refusal]"),
    ],
)
def test_a_part_of_openais_that_mcp_has_no_block_for_says_what_it_is(part: object, text: str) -> None:
    """Addresses are kept, so that a person can follow them."""
    (read,) = ToolResult.from_openai({"type": "function_call_output", "call_id": "1", "output": [part]})
    assert read.text == text


def test_what_was_written_for_a_provider_reads_back_and_writes_the_same_again() -> None:
    """Text, images and documents survive in each API that has them."""
    for status in ("ok", "error"):
        each = result("a", PNG, PDF, NOTE, SVG, status=status)
        block = each.to_anthropic()
        (read,) = ToolResult.from_anthropic([block])
        assert read.to_anthropic() == block
        assert read.is_error == each.is_error
        (item, message) = (each.to_openai_output(), each.to_openai())
        (again,) = ToolResult.from_openai([item])
        assert again.to_openai_output() == item
        (said,) = ToolResult.from_openai(message)
        assert said.to_openai() == message


def test_objects_of_a_provider_that_write_themselves_are_read_like_plain_data() -> None:
    """Their fields are attributes, whether or not they have more methods."""

    class Function(BaseModel):
        name: str
        arguments: str

    class Call(BaseModel):
        id: str
        type: str = "function"
        function: Function

    class Message(BaseModel):
        role: str = "assistant"
        content: str | None = None
        tool_calls: list[Call] | None = None

    message = Message(tool_calls=[Call(id="1", function=Function(name="t", arguments='{"a": 1}'))])
    assert (
        ToolCall.from_openai(message)
        == ToolCall.from_openai(message.model_dump())
        == [ToolCall("1", "t", {"a": 1})]
    )
    assert ToolCall.from_openai(Message()) == []


async def test_a_transcript_is_resumed_from_what_a_provider_was_sent() -> None:
    """Calls that have an answer there do not run again, and are answered as they were."""
    ran: list[str] = []

    async def call(name: str, arguments: dict[str, Any]) -> str:
        ran.append(name)
        return f"{name} ran"

    calls = ToolCall.from_anthropic({"content": USES})
    known = ToolResult.from_anthropic(
        {"role": "user", "content": [result("before").to_anthropic() | {"tool_use_id": "toolu_1"}]}
    )
    results = await Host(None, call).run(Batch.resume(calls, known))
    assert [(each.name, each.text) for each in results] == [("read", "before"), ("write", "write ran")]
    assert ran == ["write"]
