from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp_types import CallToolResult, ImageContent, TextContent

from frontmcp_py import results
from frontmcp_py.errors import OutputLimit, RateLimitExceeded

KIB = 1024


def text_of(result: CallToolResult) -> str:
    [block] = result.content
    assert isinstance(block, TextContent)
    return block.text


def size(result: CallToolResult) -> int:
    return len(result.model_dump_json(by_alias=True, exclude_none=True).encode())


def result_of(value: Any) -> CallToolResult:
    """What the SDK makes of a value that a tool with a return type returns."""
    structured = value if isinstance(value, dict) else {"result": value}
    items = value if isinstance(value, list) else [value]
    texts = [
        item if isinstance(item, str) else json.dumps(item, indent=2, ensure_ascii=False) for item in items
    ]
    return CallToolResult(
        content=[TextContent(type="text", text=text) for text in texts], structured_content=structured
    )


def plain(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)])


# ----------------------------------------------------------------------------------- refusals and failures


def test_a_refusal_is_a_message_for_the_model_and_a_code_for_programs() -> None:
    error = RateLimitExceeded("x", retry_after_ms=2273_500, limit=2)
    result = results.refusal(error)
    assert result.is_error
    assert text_of(result) == "Rate limit exceeded. Retry after 2274 seconds"
    assert result.meta == {
        "errorId": error.error_id,
        "code": "RATE_LIMIT_EXCEEDED",
        "retryAfterMs": 2_273_500,
        "limit": 2,
        "scope": "tool",
    }


def test_a_tools_own_error_is_told_as_it_is() -> None:
    result = results.of_exception("x", ToolError("No such ticket"), production=True)
    assert (result.is_error, text_of(result), result.meta) == (True, "No such ticket", None)


@pytest.mark.parametrize("production", [True, False])
def test_a_refusal_that_a_tool_lets_through_keeps_its_code(production: bool) -> None:
    refusal = RateLimitExceeded("other", retry_after_ms=1, limit=1)
    wrapped = UnexpectedToolError("Error executing tool x")
    wrapped.__cause__ = refusal
    for error in (refusal, wrapped):
        result = results.of_exception("x", error, production=production)
        assert text_of(result) == str(refusal)
        assert result.meta is not None
        assert result.meta["code"] == "RATE_LIMIT_EXCEEDED"


@pytest.mark.parametrize("production", [True, False])
def test_anything_else_is_masked_in_production_and_logged_under_the_id_that_the_client_sees(
    production: bool, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped = UnexpectedToolError("Error executing tool x")
    wrapped.__cause__ = LookupError("the password is swordfish")
    for error in (wrapped, LookupError("the password is swordfish")):
        caplog.clear()
        result = results.of_exception("x", error, production=production)
        assert result.is_error
        assert ("swordfish" in text_of(result)) != production
        assert result.meta is not None
        error_id = result.meta["errorId"]
        assert not production or error_id in text_of(result)
        [record] = caplog.records
        assert record.levelno == logging.ERROR
        assert error_id in record.getMessage()
        assert record.exc_info is not None
        assert isinstance(record.exc_info[1], LookupError)


# ------------------------------------------------------------------------------------------ too large


def test_what_is_not_too_large_is_passed_on_as_it_is() -> None:
    for value in ("x", "x" * 300, 7, {"a": 1}, ["a", "b"], None):
        result = result_of(value)
        assert results.within(result, "x", KIB) is result
    other: Any = {"anything": "else"}
    assert results.within(other, "x", KIB) is other


def test_the_limit_is_on_the_serialised_bytes() -> None:
    fits = plain("")
    fits = plain("x" * (KIB - size(fits)))
    assert size(fits) == KIB
    assert results.within(fits, "x", KIB) is fits
    with pytest.raises(OutputLimit):
        results.within(plain(text_of(fits) + "x"), "x", KIB)
    # Characters of several bytes, and characters that are escaped.
    for text in ("é" * 600, "\x00" * 200, '"' * 600):
        with pytest.raises(OutputLimit):
            results.within(plain(text), "x", KIB)


def test_the_error_says_how_large_it_may_be_and_that_the_tool_has_run() -> None:
    with pytest.raises(OutputLimit) as caught:
        results.within(plain("x" * KIB), "export", KIB)
    assert str(caught.value) == 'Result of "export" is larger than 1024 bytes; the tool has run.'


@pytest.mark.parametrize(
    "value",
    [
        "x" * 600,
        {"csv": "x" * 600},
        {"result": "x" * 600},
        ["x" * 100] * 6,
        [{"name": "x" * 80}] * 6,
        [["x" * 80] * 3, ["y" * 80] * 3],
        "é" * 300,
        {"quoted": '"' * 250},
    ],
    ids=["text", "object", "a result", "list of texts", "list of objects", "nested lists", "wide", "escaped"],
)
def test_text_that_repeats_the_structured_content_is_shortened_with_a_note(value: Any) -> None:
    result = result_of(value)
    if isinstance(value, list) and isinstance(value[0], list):
        texts = [item for each in value for item in each]
        result = result.model_copy(
            update={"content": [TextContent(type="text", text=text) for text in texts]}
        )
    assert size(result) > KIB
    shortened = results.within(result, "x", KIB)
    assert isinstance(shortened, CallToolResult)
    assert shortened.structured_content == result.structured_content
    assert not shortened.is_error
    assert size(shortened) <= KIB
    assert "shortened" in text_of(shortened)
    assert "structured content" in text_of(shortened)
    begin = result.content[0]
    assert isinstance(begin, TextContent)
    assert text_of(shortened)[:10] == begin.text[:10]


def test_as_much_of_the_text_is_kept_as_fits() -> None:
    result = result_of("x" * 600)
    shortened = results.within(result, "x", KIB)
    assert isinstance(shortened, CallToolResult)
    assert size(shortened) == KIB


@pytest.mark.parametrize(
    "result",
    [
        result_of("x" * KIB),
        plain("x" * KIB),
        CallToolResult(
            content=[TextContent(type="text", text="something else " * 100)], structured_content={"a": 1}
        ),
        CallToolResult(
            content=[
                TextContent(type="text", text='{"a": 1}'),
                ImageContent(type="image", data="QUJD" * 300, mime_type="image/png"),
            ],
            structured_content={"a": 1},
        ),
        CallToolResult(content=[], structured_content={"result": "x" * KIB}),
        CallToolResult(content=[], _meta={"large": "x" * KIB}),
    ],
    ids=["structured is too large itself", "no structured", "other text", "image", "no text", "meta"],
)
def test_what_is_too_large_for_another_reason_is_refused(result: CallToolResult) -> None:
    with pytest.raises(OutputLimit):
        results.within(result, "x", KIB)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=400),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


@given(values)
def test_nothing_that_is_let_through_is_too_large(value: Any) -> None:
    result = result_of(value)
    try:
        passed = results.within(result, "x", KIB)
    except OutputLimit:
        assert size(result) > KIB
    else:
        assert isinstance(passed, CallToolResult)
        assert size(passed) <= KIB
        assert passed.structured_content == result.structured_content
        assert (passed is result) == (size(result) <= KIB)
