"""Asking whoever sits at the terminal: may it run? what does a tool want to know?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import termios
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, Self, cast

from jsonschema import Draft202012Validator
from mcp_types import ElicitRequestFormParams, ElicitRequestURLParams, ElicitResult

from frontmcp_py.cli.output import complain, one_line
from frontmcp_py.host import ToolCall

# Of the arguments of a call that is to be approved, in characters.
_SHOWN: Final = 2000


class Terminal:
    """A terminal with somebody before it.

    Args:
        reads: The descriptor that answers are read from.
        pause: Whatever is drawn there meanwhile stands aside in this block.
    """

    def __init__(self, reads: int, pause: Callable[[], AbstractContextManager[object]]) -> None:
        self._reads = reads
        self._pause = pause

    @classmethod
    def find(cls, pause: Callable[[], AbstractContextManager[object]], *, stdin_is_used: bool) -> Self | None:
        """The terminal of this process, if somebody can be asked there.

        Args:
            pause: See the class.
            stdin_is_used: Stdin holds something else; then the terminal itself is asked.
        """
        if not sys.stderr.isatty():
            return None
        if not stdin_is_used:
            return cls(sys.stdin.fileno(), pause) if sys.stdin.isatty() else None
        try:
            # Kept until the process ends.
            return cls(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY), pause)
        except OSError:
            return None

    async def approve(self, call: ToolCall) -> bool:
        """May it run?"""
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False, default=str)
        shown = arguments if len(arguments) <= _SHOWN else f"{arguments[:_SHOWN]}…"
        with self._pause():
            return await self._agrees(f"run {call.label} {shown}?") is True

    async def question(
        self, call: ToolCall | None, request: ElicitRequestFormParams | ElicitRequestURLParams
    ) -> ElicitResult | None:
        """What a tool asks: a form, field by field, or a page to open. End of input declines."""
        with self._pause():
            self._say(f"{_who(call)} asks: {request.message}")
            if isinstance(request, ElicitRequestURLParams):
                self._say(f"open {request.url}")
                return ElicitResult(action="accept") if await self._agrees("done?") else None
            content = await self._form(request.requested_schema)
        return None if content is None else ElicitResult(action="accept", content=content)

    async def _form(self, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        properties = cast("Mapping[str, Mapping[str, Any]]", schema.get("properties") or {})
        if not properties:
            return {} if await self._agrees("accept?") else None
        content: dict[str, Any] = {}
        for name, field in properties.items():
            while True:
                written = await self._ask(f"  {_prompt(name, field)}: ")
                if written is None:
                    return None
                try:
                    _fill(content, name, field, written.strip(), name in schema.get("required", ()))
                except ValueError as error:
                    self._say(f"  {error}")
                else:
                    break
        return content

    async def _agrees(self, text: str) -> bool | None:
        """Yes or no; `None` at the end of input."""
        while True:
            written = await self._ask(f"{text} [y/n] ")
            if written is None:
                return None
            if (answer := _yes_or_no(written.strip())) is not None:
                return answer

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{_harmless(text)}\n")

    async def _ask(self, prompt: str) -> str | None:
        """One line; `None` at the end of input."""
        # What was typed before the question was there is no answer to it.
        with contextlib.suppress(termios.error):
            termios.tcflush(self._reads, termios.TCIFLUSH)
        sys.stderr.write(f"{_harmless(prompt)} ")
        sys.stderr.flush()
        loop = asyncio.get_running_loop()
        line: asyncio.Future[bytes] = loop.create_future()
        # Not in a thread: nobody could wake that when the batch is cancelled.
        loop.add_reader(self._reads, self._read, line)
        try:
            written = await line
        except BaseException:
            sys.stderr.write("\n")
            raise
        finally:
            loop.remove_reader(self._reads)
        if not written:
            sys.stderr.write("\n")
            return None
        return written.decode(errors="replace")

    def _read(self, line: asyncio.Future[bytes]) -> None:
        try:
            # A terminal gives one line at a time.
            written = os.read(self._reads, 65_536)
        except OSError:
            written = b""
        if not line.done():
            line.set_result(written)


def decline(call: ToolCall | None, request: ElicitRequestFormParams | ElicitRequestURLParams) -> None:
    """The answer to what a tool asks where there is nobody to answer."""
    complain(f"{_who(call)} asks {request.message!r}; declined, as there is no terminal")


def _harmless(text: str) -> str:
    """One line, indented as it was."""
    return " " * (len(text) - len(text.lstrip(" "))) + one_line(text)


def _who(call: ToolCall | None) -> str:
    return "a tool" if call is None else call.label


def _prompt(name: str, field: Mapping[str, Any]) -> str:
    said = field.get("description") or field.get("title")
    about = f" ({said})" if said and str(said).replace(" ", "_").lower() != name.lower() else ""
    options = _options(field)
    choice = f" [{'/'.join(str(each) for each in options)}]" if options else ""
    if not options and _kind(field) == "boolean":
        choice = " [y/n]"
    default = f" [default: {field['default']}]" if field.get("default") is not None else ""
    return f"{name}{about}{choice}{default}"


def _fill(content: dict[str, Any], name: str, field: Mapping[str, Any], written: str, required: bool) -> None:
    """Take a field as it was written.

    Raises:
        ValueError: The field cannot be that.
    """
    if not written:
        if "default" in field:
            content[name] = field["default"]
        elif required:
            raise ValueError(f"{name} is needed; Ctrl-D declines")
        return
    value = _value(field, written)
    validator: Any = Draft202012Validator(field)
    problem = next(validator.iter_errors(value), None)
    if problem is not None:
        raise ValueError(problem.message)
    content[name] = value


def _value(field: Mapping[str, Any], written: str) -> object:
    kind = _kind(field)
    if kind == "boolean":
        answer = _yes_or_no(written)
        if answer is None:
            raise ValueError("give y or n")
        return answer
    if kind == "array":
        return [part.strip() for part in written.split(",")]
    if kind in ("integer", "number"):
        try:
            return int(written) if kind == "integer" else float(written)
        except ValueError:
            raise ValueError(f"{written!r} is no {kind}") from None
    return written


def _kind(field: Mapping[str, Any]) -> str:
    for each in (field, *field.get("anyOf", ())):
        if isinstance(each.get("type"), str) and each["type"] != "null":
            return str(each["type"])
    return "string"


def _options(field: Mapping[str, Any]) -> list[object]:
    """The values among which a field is chosen."""
    field = field.get("items") or field
    if isinstance(field.get("enum"), list):
        return list(field["enum"])
    named = field.get("oneOf") or field.get("anyOf") or ()
    return [each["const"] for each in named if "const" in each]


def _yes_or_no(written: str) -> bool | None:
    return {"y": True, "yes": True, "n": False, "no": False}.get(written.lower())
