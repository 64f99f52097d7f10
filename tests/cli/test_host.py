"""`frontmcp host run`: a batch from a file, its timeline and its results."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mcp_types import ElicitRequestFormParams, ElicitRequestURLParams, ElicitResult

from frontmcp_py.cli.host import _window
from frontmcp_py.cli.terminal import Terminal
from frontmcp_py.host import Timeline, ToolCall
from tests.cli.conftest import COMMAND, Done, command, environment
from tests.cli.test_run import serving
from tests.servers import SOON

Run = Callable[..., Done]

OFFICE = '''
import asyncio
import subprocess
import time
from pathlib import Path

from mcp.server.mcpserver import Context
from pydantic import BaseModel

from frontmcp_py import FrontMCP

server = FrontMCP("office")


def note(line: str) -> None:
    with Path("ran").open("a") as ran:
        ran.write(line + "\\n")


class Sure(BaseModel):
    really: bool


@server.tool
async def write(path: str, wait: float = 0) -> str:
    """Write."""
    note(path)
    await asyncio.sleep(wait)
    return f"wrote {path}"


@server.tool
def shout() -> str:
    """Shout."""
    print("noise of a tool")
    subprocess.run(["echo", "noise of a child"])
    return "done"


@server.tool
async def delete(path: str, ctx: Context) -> str:
    """Delete."""
    answer = await ctx.elicit(f"Delete {path}?", Sure)
    return f"{path}: {answer.action}"


@server.tool
def say(text: str) -> str:
    """Say."""
    return text


@server.tool
def join(ops: list[str]) -> str:
    """Join."""
    return ",".join(ops)


@server.tool
def sleep(seconds: float) -> str:
    """Sleep, and let nobody wake it."""
    note("asleep")
    time.sleep(seconds)
    return "slept"
'''

LIMITS = """
[write]
concurrency = 1
fan_out = true

[join]
fan_out = true
"""


@pytest.fixture
def office(tmp_path: Path) -> Path:
    """A folder with a server, and limits for its tools."""
    (tmp_path / "office.py").write_text(OFFICE)
    (tmp_path / "limits.toml").write_text(LIMITS)
    return tmp_path


def write_batch(folder: Path, *calls: tuple[str, dict[str, Any]], name: str = "batch.json") -> None:
    """A file with plain calls, whose ids count from 1."""
    batch = [
        {"id": str(nth), "name": tool, "arguments": arguments}
        for nth, (tool, arguments) in enumerate(calls, 1)
    ]
    (folder / name).write_text(json.dumps(batch))


def ran(folder: Path) -> list[str]:
    """What the tools of the office have noted."""
    return (folder / "ran").read_text().split() if (folder / "ran").exists() else []


WORDS = ("host", "run", "--config", "limits.toml", "--batch", "batch.json", "office.py")


def test_the_timeline_and_every_result_are_printed(frontmcp: Run, office: Path) -> None:
    write_batch(office, ("write", {"ops": [{"path": "a"}, {"path": "b"}]}), ("say", {"text": "one\ntwo"}))
    done = frontmcp(*WORDS)
    assert (done.status, done.err) == (0, "")
    picture, _, results = done.out.partition("\n\n")
    lines = picture.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["write#1", "#0", "#1", "say#2"]
    assert all("█" in line for line in lines[:4])
    assert lines[5].startswith("· queued")
    assert results == (
        "write#1: ok\n  [1/2] ok\n  wrote a\n  [2/2] ok\n  wrote b\n\nsay#2: ok\n  one\n  two\n"
    )
    assert ran(office) == ["a", "b"]


@pytest.mark.parametrize(
    "wrong",
    [("write", {"pth": "a"}), ("wrote", {}), ("fails", {"text": 3})],
    ids=["arguments", "name", "types"],
)
def test_a_call_that_is_not_ok_makes_the_status_1_and_the_others_run(
    frontmcp: Run, office: Path, wrong: tuple[str, dict[str, Any]]
) -> None:
    write_batch(office, wrong, ("write", {"path": "b"}))
    done = frontmcp(*WORDS)
    assert done.status == 1
    assert f"\n{wrong[0]}#1: error\n" in done.out
    assert "\nwrite#2: ok\n  wrote b\n" in done.out


def test_json_has_the_results_and_the_rows_of_the_timeline(frontmcp: Run, office: Path) -> None:
    write_batch(office, ("write", {"path": "a", "wait": 0.05}), ("write", {"path": "b"}), ("say", {}))
    done = frontmcp(*WORDS, "--json")
    told = json.loads(done.out)
    assert done.status == 1
    assert [(each["id"], each["name"], each["status"]) for each in told["results"]] == [
        ("1", "write", "ok"),
        ("2", "write", "ok"),
        ("3", "say", "error"),
    ]
    assert told["results"][0]["text"] == "wrote a"
    assert [row["label"] for row in told["timeline"]] == ["write#1", "write#2", "say#3"]
    first, second, _ = told["timeline"]
    assert [span["state"] for span in second["spans"]] == ["queued", "running"]
    # The limit of the configuration holds: the second has waited for the first.
    assert first["spans"][-1]["end"] <= second["spans"][-1]["start"]


def test_without_a_configuration_nothing_is_limited(frontmcp: Run, office: Path) -> None:
    write_batch(office, ("write", {"path": "a", "wait": 0.05}), ("write", {"path": "b"}))
    told = json.loads(frontmcp("host", "run", "--batch", "batch.json", "office.py", "--json").out)
    first, second = (row["spans"][-1] for row in told["timeline"])
    assert second["start"] < first["end"]


def test_what_tools_print_goes_to_stderr(frontmcp: Run, office: Path) -> None:
    write_batch(office, ("shout", {}))
    done = frontmcp(*WORDS, "--json")
    assert json.loads(done.out)["results"][0]["text"] == "done"
    assert set(done.err.splitlines()) == {"noise of a tool", "noise of a child"}


ANTHROPIC = {
    "role": "assistant",
    "content": [
        {"type": "text", "text": "I write."},
        {"type": "tool_use", "id": "c1", "name": "write", "input": {"path": "a"}},
    ],
}
FUNCTION = {"name": "write", "arguments": '{"path": "a"}'}
CHAT = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": FUNCTION}]}
RESPONSE = {"output": [{"type": "reasoning"}, {"type": "function_call", "call_id": "c1", **FUNCTION}]}


@pytest.mark.parametrize(
    "batch",
    [
        [{"id": "c1", "name": "write", "arguments": {"path": "a"}}],
        ANTHROPIC,
        ANTHROPIC["content"],
        CHAT,
        CHAT["tool_calls"],
        {"choices": [{"message": CHAT}]},
        RESPONSE,
        RESPONSE["output"],
    ],
    ids=["plain", "message", "content", "chat", "tool calls", "completion", "response", "output"],
)
def test_a_batch_is_read_as_providers_write_it(
    frontmcp: Run, office: Path, monkeypatch: pytest.MonkeyPatch, batch: object
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(json.dumps(batch).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    done = frontmcp("host", "run", "--batch", "-", "office.py")
    assert (done.status, done.err) == (0, "")
    assert "\nwrite#c1: ok\n  wrote a\n" in done.out


def test_a_call_that_a_model_wrote_wrongly_is_answered_and_is_no_error_of_use(
    frontmcp: Run, office: Path
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "write", "arguments": '{"pa'}}
    (office / "batch.json").write_text(json.dumps({"role": "assistant", "tool_calls": [call]}))
    done = frontmcp(*WORDS)
    assert done.status == 1
    assert "write#c1: error\n  write: the arguments are not JSON" in done.out


def test_a_tools_own_argument_ops_is_told_from_operations(frontmcp: Run, office: Path) -> None:
    write_batch(office, ("join", {"ops": ["a", "b"]}), ("join", {"ops": [{"ops": ["c"]}, {"ops": ["d"]}]}))
    done = frontmcp(*WORDS)
    assert done.status == 0
    assert "\njoin#1: ok\n  a,b\n\njoin#2: ok\n  [1/2] ok\n  c\n  [2/2] ok\n  d\n" in done.out


def test_a_configured_tool_that_the_server_does_not_have_is_complained_about(
    frontmcp: Run, office: Path
) -> None:
    """Its limit would protect nothing; the batch runs all the same, and so do its results."""
    (office / "limits.toml").write_text("[wriet]\nconcurrency = 1\n\n[say]\nconcurrency = 1\n")
    write_batch(office, ("write", {"path": "a"}))
    done = frontmcp(*WORDS)
    assert done.status == 0
    assert "write#1: ok" in done.out
    (line,) = done.err.splitlines()
    assert "the configuration names a tool 'wriet', and there is none; did you mean 'write'?" in line


def test_an_empty_batch_is_no_error(frontmcp: Run, office: Path) -> None:
    (office / "batch.json").write_text("[]")
    done = frontmcp(*WORDS)
    assert (done.status, done.out) == (0, "no calls\n")
    assert json.loads(frontmcp(*WORDS, "--json").out) == {"results": [], "timeline": []}


def test_long_texts_are_cut_unless_all_is_wanted(frontmcp: Run, office: Path) -> None:
    text = "\n".join(["x" * 400, *(f"line {nth}" for nth in range(1, 40))])
    write_batch(office, ("say", {"text": text}))
    cut = frontmcp(*WORDS).out.partition("say#1: ok\n")[2].splitlines()
    assert cut[0] == f"  {'x' * 300}…"
    assert cut[1:] == [*(f"  line {nth}" for nth in range(1, 10)), "  … 30 more lines; --full prints all"]
    full = frontmcp(*WORDS, "--full").out.partition("say#1: ok\n")[2].splitlines()
    assert full == [f"  {line}" for line in text.splitlines()]


def test_control_characters_of_a_result_are_not_printed(frontmcp: Run, office: Path) -> None:
    write_batch(office, ("say", {"text": "\x1b]0;title\x07\x1b[2Jgone\ta\u202eb"}))
    out = frontmcp(*WORDS, "--full").out
    assert "  \\x1b]0;title\\x07\\x1b[2Jgone\ta\\u202eb\n" in out


def test_questions_of_tools_are_declined_where_there_is_no_terminal(frontmcp: Run, office: Path) -> None:
    write_batch(office, ("delete", {"path": "a"}))
    done = frontmcp(*WORDS)
    assert (done.status, done.out.partition("delete#1: ")[2]) == (0, "ok\n  a: decline\n")
    assert done.err == "frontmcp: delete#1 asks 'Delete a?'; declined, as there is no terminal\n"


def test_with_the_results_of_an_earlier_run_only_what_has_none_runs(frontmcp: Run, office: Path) -> None:
    ops = {"ops": [{"path": "b1"}, {"path": "b2"}]}
    write_batch(office, ("write", {"path": "a"}), ("write", ops), ("write", {"path": "c"}))
    told = json.loads(frontmcp(*WORDS, "--json").out)
    first, second, _ = told["results"]
    assert ran(office) == ["a", "b1", "b2", "c"]
    told["results"] = [first, second["operations"][0]]
    (office / "earlier.json").write_text(json.dumps(told))

    done = frontmcp(*WORDS, "--results", "earlier.json", "--json")
    assert [each["status"] for each in json.loads(done.out)["results"]] == ["ok", "ok", "ok"]
    assert (done.status, ran(office)) == (0, ["a", "b1", "b2", "c", "b2", "c"])

    # A list of results alone is enough.
    (office / "earlier.json").write_text(json.dumps(json.loads(done.out)["results"]))
    assert frontmcp(*WORDS, "--results", "earlier.json").status == 0
    assert len(ran(office)) == 6


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ('[\n{"id": "1", "name": "write",}]', "batch.json, line 2: not JSON: "),
        (
            '[{"id": "1", "name": "a"},\n\n{"id": "2", "nam": "a"}]',
            "batch.json, line 3: there is no field 'nam'",
        ),
        ('[\n{"name": "a"}]', "batch.json, line 2: id: None is not allowed; give text or an integer"),
        ('[\n{"id": 1, "name": ""}]', "batch.json, line 2: name: '' is not allowed; give the name of a tool"),
        ('[\n{"id": 1, "name": "a", "arguments": [1]}]', "batch.json, line 2: arguments: [1] is not allowed"),
        ("[\n3]", "batch.json, line 2: a call: 3 is not allowed; give an object"),
        (
            '{"calls": []}',
            "batch.json: the batch: {'calls': []} is not allowed; give a message of Anthropic's",
        ),
        ('"write"', "batch.json: the batch: 'write' is not allowed; give a message of Anthropic's"),
        ('{"content": 3}', "batch.json: the message: {'content': 3} is not allowed"),
        ('{"choices": []}', "batch.json: choices: [] is not allowed; give a list of choices"),
        ('[{"role": "user", "content": []}]', "batch.json: this is a list of messages; give the one message"),
        ("\udcff", "batch.json: not UTF-8"),
    ],
)
def test_what_is_no_batch_is_one_sentence_with_the_line(
    frontmcp: Run, office: Path, batch: str, said: str
) -> None:
    (office / "batch.json").write_bytes(batch.encode(errors="surrogateescape"))
    done = frontmcp(*WORDS)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(f"frontmcp: {said}")
    assert ran(office) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["office.py"], "Missing option '--batch'"),
        (["--batch", "batch.json"], "Missing argument 'TARGET'"),
        (["--batch", "none.json", "office.py"], "--batch none.json: cannot be read: No such file"),
        (["--batch", ".", "office.py"], "--batch .: cannot be read: Is a directory"),
        (["--batch", "batch.json", "none.py"], "there is no file none.py"),
        (["--batch", "batch.json", "office.py", "more"], "'more' is one argument too many; give one TARGET"),
        (["--batch", "batch.json", "--config", "none.toml", "office.py"], "none.toml: cannot be read"),
        (
            ["--batch", "batch.json", "--config", "wrong.toml", "office.py"],
            "wrong.toml: tool 'write': there is",
        ),
        (["--batch", "batch.json", "--approve", "office.py"], "--approve asks on the terminal, and there is"),
        (["--batch", "batch.json", "--results", "none", "office.py"], "--results none: cannot be read"),
        (["--batch", "batch.json", "--results", "wrong.toml", "office.py"], "wrong.toml, line 1: not JSON"),
        (
            ["--batch", "batch.json", "--results", "other.json", "office.py"],
            "other.json: the id of a result: '9'",
        ),
        (["--batch", "batch.json", "--results", "odd.json", "office.py"], "odd.json: results[0]: "),
        (
            ["--batch", "batch.json", "--results", "number.json", "office.py"],
            "number.json: results: 3 is not",
        ),
        (["--batch", "batch.json", "http://:0/mcp"], "'http://:0/mcp' is no URL"),
        (
            ["--batch", "batch.json", "http://127.0.0.1:1/mcp"],
            "http://127.0.0.1:1/mcp cannot be connected to",
        ),
        (
            ["--batch", "batch.json", "--stdio", "--", "no-such-command"],
            "no-such-command cannot be connected",
        ),
    ],
)
def test_errors_of_use_are_one_sentence(frontmcp: Run, office: Path, words: list[str], said: str) -> None:
    write_batch(office, ("write", {"path": "a"}))
    (office / "wrong.toml").write_text("[write]\nconcurency = 1\n")
    (office / "other.json").write_text('[{"id": "9", "name": "write", "status": "ok"}]')
    (office / "odd.json").write_text('[{"id": "1", "name": "write", "status": "fine"}]')
    (office / "number.json").write_text('{"results": 3}')
    done = frontmcp("host", "run", *words)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(f"frontmcp: {said}")
    assert ran(office) == []


def test_the_group_alone_tells_its_commands(frontmcp: Run) -> None:
    for words in (["host"], ["host", "--help"]):
        done = frontmcp(*words)
        assert (done.status, done.err) == (0, "")
        assert re.search(r"^  run ", done.out, re.MULTILINE)
    assert "--results FILE" in frontmcp("host", "run", "--help").out


def test_of_more_rows_than_fit_those_are_shown_that_are_not_completed() -> None:
    timeline = Timeline()
    calls = [ToolCall(str(nth), "a") for nth in range(100)]
    for call in calls:
        timeline(call, "queued")
    for call in calls[:60]:
        timeline(call, "completed")
    footer = len(timeline.draw(60).footer)
    rows = 20 - footer - 1
    shown = [line.plain for line in _window(timeline, 60, 20)]
    assert [line.split()[0] for line in shown[:rows]] == [f"a#{nth}" for nth in range(60, 60 + rows)]
    assert shown[rows] == f"60 before, {40 - rows} after"
    assert len(shown) == 20
    assert len(_window(timeline, 60, 200)) == 100 + footer


# --------------------------------------------------------------------------------------------- a terminal


@dataclass
class Keyboard:
    """A terminal in this process, and the keyboard before it."""

    terminal: Terminal
    keyboard: int
    said: pytest.CaptureFixture[str]

    async def ask(self, asking: Any, *answers: str) -> Any:
        """Ask, and type one answer after the other, each when it is waited for; Ctrl-D is an empty one."""
        task = asyncio.ensure_future(asking)
        for answer in answers:
            before = len(self.seen)
            async with asyncio.timeout(SOON):
                while len(self.seen) == before or not self.seen.endswith(" "):
                    self.seen += self.said.readouterr().err
                    await asyncio.sleep(0)
            os.write(self.keyboard, f"{answer}\n".encode() if answer else b"\x04")
        async with asyncio.timeout(SOON):
            return await task

    seen: str = field(default="")

    @property
    def told(self) -> str:
        """All that was said there."""
        self.seen += self.said.readouterr().err
        return self.seen


@pytest.fixture
def seat(capsys: pytest.CaptureFixture[str]) -> Iterator[Keyboard]:
    keyboard, reads = os.openpty()
    yield Keyboard(Terminal(reads, nullcontext), keyboard, capsys)
    os.close(keyboard)
    os.close(reads)


@pytest.mark.parametrize(
    ("answers", "may"),
    [(["y"], True), (["YES"], True), (["n"], False), ([""], False), (["perhaps", " y "], True)],
    ids=["yes", "word", "no", "end", "again"],
)
async def test_a_call_is_approved_by_name_and_arguments(
    seat: Keyboard, answers: list[str], may: bool
) -> None:
    call = ToolCall("c1", "write", {"path": "a\x1b[2J", "n": 1})
    assert await seat.ask(seat.terminal.approve(call), *answers) is may
    question = 'run write#c1 {"path": "a\\u001b[2J", "n": 1}? [y/n] '
    assert seat.told.count(question) == len(answers)


FORM = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "Which file?", "minLength": 2},
        "really": {"type": "boolean", "title": "Really"},
        "how": {"type": "string", "enum": ["soft", "hard"], "default": "soft"},
        "copies": {"type": "integer", "minimum": 1},
        "share": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
        "age": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
    },
    "required": ["path", "really", "copies"],
}


async def test_a_form_is_asked_field_by_field_until_each_is_as_it_has_to_be(seat: Keyboard) -> None:
    request = ElicitRequestFormParams(message="Delete?", requested_schema=FORM)
    answers = (" ", "x", "ab", "maybe", "y", "hardd", " ", "0", "many", "2", " ", "a,c", "a, b", " ")
    result = await seat.ask(seat.terminal.question(ToolCall("c1", "delete"), request), *answers)
    content: dict[str, Any] = {
        "path": "ab",
        "really": True,
        "how": "soft",
        "copies": 2,
        "tags": ["a", "b"],
        "age": None,
    }
    assert result == ElicitResult(action="accept", content=content)
    lines = [line.strip() for line in seat.told.replace(": ", ":\n").splitlines()]
    for said in (
        "delete#c1 asks:",
        "path (Which file?):",
        "path is needed; Ctrl-D declines",
        "really [y/n]:",
        "give y or n",
        "'many' is no integer",
        "tags [a/b]:",
    ):
        assert said in lines
    assert "how [soft/hard] [default: soft]: " in seat.told


async def test_the_end_of_input_declines_a_form(seat: Keyboard) -> None:
    request = ElicitRequestFormParams(message="Delete?", requested_schema=FORM)
    assert await seat.ask(seat.terminal.question(None, request), "ab", "") is None
    assert seat.told.startswith("a tool asks: Delete?\n")


@pytest.mark.parametrize(("answer", "action"), [("y", "accept"), ("n", None), ("", None)])
async def test_a_form_without_fields_is_accepted_or_not(
    seat: Keyboard, answer: str, action: str | None
) -> None:
    request = ElicitRequestFormParams(message="Go on?", requested_schema={"type": "object", "properties": {}})
    result = await seat.ask(seat.terminal.question(None, request), answer)
    assert (result and (result.action, result.content)) == (action and (action, {}))


@pytest.mark.parametrize(("answer", "action"), [("y", "accept"), ("n", None), ("", None)])
async def test_an_address_is_shown_to_be_opened(seat: Keyboard, answer: str, action: str | None) -> None:
    request = ElicitRequestURLParams(message="Log in", url="https://example.org/x", elicitation_id="1")
    result = await seat.ask(seat.terminal.question(None, request), answer)
    assert (result and result.action) == action
    assert "\nopen https://example.org/x\n" in seat.told


async def test_what_was_typed_before_the_question_is_no_answer(seat: Keyboard) -> None:
    os.write(seat.keyboard, b"y\n")
    await asyncio.sleep(0.05)
    assert await seat.ask(seat.terminal.approve(ToolCall("c1", "write")), "n") is False


async def test_a_question_that_is_given_up_leaves_the_terminal_to_the_next(seat: Keyboard) -> None:
    call = ToolCall("c1", "write")
    given_up = asyncio.ensure_future(seat.terminal.approve(call))
    await asyncio.sleep(0)
    given_up.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await given_up
    assert given_up.cancelled()
    assert await seat.ask(seat.terminal.approve(call), "y") is True


# ------------------------------------------------------------------------------------------------ processes


@contextlib.contextmanager
def in_terminal(*words: str, cwd: Path) -> Iterator[Seat]:
    """The command in a terminal of its own."""
    pid, ours = pty.fork()
    if not pid:
        os.chdir(cwd)
        os.execvpe(COMMAND[0], [*COMMAND, *words], environment(TERM="xterm", COLUMNS="100", LINES="30"))
    try:
        yield Seat(pid, ours)
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(ours)


@dataclass
class Seat:
    """Before a terminal in which the command runs."""

    pid: int
    ours: int
    seen: str = ""
    read_up_to: int = 0

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + 2 * SOON
        while (at := self.seen.find(text, self.read_up_to)) < 0:
            assert self._read(end - time.monotonic()), f"no {text!r} in {self.seen!r}"
        self.read_up_to = at + len(text)

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def end(self) -> int:
        """The exit status."""
        end = time.monotonic() + 2 * SOON
        while self._read(end - time.monotonic()):
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self, within: float) -> bool:
        if not select.select([self.ours], [], [], max(0, within))[0]:
            raise AssertionError(f"nothing more in time: {self.seen!r}")
        try:
            said = os.read(self.ours, 65_536)
        except OSError:
            return False
        self.seen += said.decode(errors="replace")
        return bool(said)


@pytest.mark.slow
def test_in_a_terminal_people_are_asked_and_the_picture_moves(office: Path) -> None:
    write_batch(
        office,
        ("write", {"path": "a"}),
        ("write", {"path": "b", "wait": 1}),
        ("delete", {"path": "c"}),
    )
    with in_terminal(*WORDS, "--approve", cwd=office) as seat:
        for question, answer in (("run write#1", "n"), ("run write#2", "y"), ("run delete#3", "y")):
            seat.wait_for(question)
            seat.wait_for("[y/n] ")
            seat.type(f"{answer}\n")
        seat.wait_for("delete#3 asks: Delete c?")
        seat.wait_for("really [y/n]: ")
        seat.type("y\n")
        # It is drawn while the second call runs, and once more at the end.
        for _ in range(3):
            seat.wait_for("\x1b[32m█")
        seat.wait_for("write#1: ")
        assert seat.end() == 1
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seat.seen).replace("\r", "")
    assert "\nwrite#1: skipped\n  Not permitted. It has not run.\n" in plain
    assert "\nwrite#2: ok\n  wrote b\n\ndelete#3: ok\n  c: accept\n" in plain
    assert ran(office) == ["b"]


@pytest.mark.slow
def test_ctrl_c_at_a_question_cancels_the_batch(office: Path) -> None:
    write_batch(office, ("write", {"path": "a"}), ("write", {"path": "b"}))
    with in_terminal(*WORDS, "--approve", cwd=office) as seat:
        seat.wait_for("run write#1")
        seat.wait_for("[y/n] ")
        seat.type("y\n")
        seat.wait_for("run write#2")
        seat.wait_for("[y/n] ")
        seat.type("\x03")
        assert seat.end() == 130
    assert seat.seen.count("Cancelled before it ran. The user has interrupted it.") == 2
    assert ran(office) == []


@pytest.mark.slow
def test_people_are_asked_although_the_batch_is_on_stdin(office: Path) -> None:
    write_batch(office, ("write", {"path": "a"}))
    pid, ours = pty.fork()
    if not pid:
        os.chdir(office)
        line = f"cat batch.json | {' '.join(COMMAND)} host run --batch - --approve --json office.py >out"
        os.execvpe("sh", ["sh", "-c", line], environment())
    seat = Seat(pid, ours)
    try:
        seat.wait_for("run write#1")
        seat.wait_for("[y/n] ")
        seat.type("y\n")
        assert seat.end() == 0
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(ours)
    assert json.loads((office / "out").read_text())["results"][0]["status"] == "ok"


def wait_until_ran(folder: Path, *lines: str) -> None:
    end = time.monotonic() + 2 * SOON
    while ran(folder) != list(lines):
        assert time.monotonic() < end, ran(folder)
        time.sleep(0.01)


@contextlib.contextmanager
def running(*words: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """The command as a process that may be interrupted."""
    with subprocess.Popen(
        [*COMMAND, *words],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_batch_that_is_interrupted_tells_what_there_is_and_can_be_resumed(
    office: Path, number: signal.Signals, status: int
) -> None:
    write_batch(
        office,
        ("write", {"path": "first"}),
        ("write", {"ops": [{"path": "a"}, {"path": "b", "wait": 60}, {"path": "c"}]}),
        ("write", {"path": "d"}),
    )
    with running(*WORDS, "--json", cwd=office) as process:
        wait_until_ran(office, "first", "a", "b")
        process.send_signal(number)
        out, err = process.communicate(timeout=2 * SOON)
    assert (process.returncode, err) == (status, "frontmcp: interrupted; once more ends it at once\n")
    told = json.loads(out)
    assert [(each["position"], each["id"], each["status"]) for each in told["results"]] == [
        (0, "1", "ok"),
        (1, "2#0", "ok"),
        (1, "2#1", "cancelled"),
    ]
    assert "may have happened" in told["results"][2]["text"]
    assert all(row["is_completed"] for row in told["timeline"])

    (office / "earlier.json").write_text(out)
    done = command(*WORDS, "--results", "earlier.json", cwd=office)
    assert (done.status, ran(office)) == (0, ["first", "a", "b", "c", "d"])
    assert "[1/3] ok\n  wrote a\n  [2/3] cancelled\n" in done.out
    assert done.out.endswith("\nwrite#3: ok\n  wrote d\n")


@pytest.mark.slow
def test_what_there_is_is_told_before_a_tool_ends_that_does_not_stop(office: Path) -> None:
    write_batch(office, ("sleep", {"seconds": 60}))
    with running(*WORDS, cwd=office) as process:
        wait_until_ran(office, "asleep")
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("sleep#1: cancelled"):
                break
        else:
            pytest.fail("no result")
        process.send_signal(signal.SIGINT)
        assert process.wait(SOON) == -signal.SIGINT


@pytest.mark.slow
def test_a_server_is_reached_over_http_and_over_stdio(office: Path) -> None:
    write_batch(office, ("write", {"ops": [{"path": "a"}, {"path": "b"}]}), ("write", {"path": "c"}))
    expected = "write#1: ok\n  [1/2] ok\n  wrote a\n  [2/2] ok\n  wrote b\n\nwrite#2: ok\n  wrote c\n"
    with serving("office.py", cwd=office) as (_, port):
        for url in (f"http://127.0.0.1:{port}", f"http://localhost:{port}/mcp"):
            done = command(*WORDS[:-1], url, cwd=office)
            assert (done.status, done.out.partition("\n\n")[2]) == (0, expected)
    done = command(*WORDS[:-1], "--stdio", "--", *COMMAND, "run", "office.py", cwd=office)
    assert (done.status, done.out.partition("\n\n")[2]) == (0, expected)
    assert ran(office) == ["a", "b", "c"] * 3


@pytest.mark.slow
def test_tools_of_a_server_at_a_url_may_ask(office: Path) -> None:
    """Without a terminal the question is declined, and the call is answered; not: there is no way to ask."""
    write_batch(office, ("delete", {"path": "a"}), ("say", {"text": "b"}))
    with serving("office.py", cwd=office) as (_, port):
        done = command(*WORDS[:-1], f"http://127.0.0.1:{port}/mcp", "--json", cwd=office)
    assert done.status == 0
    assert [each["text"] for each in json.loads(done.out)["results"]] == ["a: decline", "b"]
    assert "delete#1" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stdio", "http"])
def test_a_call_that_cannot_be_written_breaks_no_other(office: Path, way: str) -> None:
    write_batch(office, ("write", {"path": "a"}), ("write", {"path": "\ud83d"}), ("write", {"path": "c"}))
    with contextlib.ExitStack() as stack:
        if way == "stdio":
            words = ["--stdio", "--", *COMMAND, "run", "office.py"]
        else:
            _, port = stack.enter_context(serving("office.py", cwd=office))
            words = [f"http://127.0.0.1:{port}"]
        done = command("host", "run", "--json", "--batch", "batch.json", *words, cwd=office)
    results = json.loads(done.out)["results"]
    assert (done.status, [each["status"] for each in results]) == (1, ["ok", "error", "ok"])
    assert "was not sent" in results[1]["text"]
    assert ran(office) == ["a", "c"]


@pytest.mark.slow
def test_a_server_that_dies_leaves_calls_that_may_have_run(office: Path) -> None:
    write_batch(office, ("write", {"path": "first"}), ("write", {"path": "a", "wait": 60}))
    with (
        serving("office.py", cwd=office) as (server, port),
        running(*WORDS[:-1], f"http://127.0.0.1:{port}", "--json", cwd=office) as process,
    ):
        wait_until_ran(office, "first", "a")
        server.kill()
        out, _ = process.communicate(timeout=2 * SOON)
    assert process.returncode == 1
    assert [each["status"] for each in json.loads(out)["results"]] == ["ok", "unknown"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["for people", "for programs"])
def test_a_reader_that_goes_ends_what_is_written_and_not_the_command(office: Path, flags: list[str]) -> None:
    write_batch(office, *[("write", {"path": str(number)}) for number in range(50)])
    unread, written = os.pipe()
    os.close(unread)
    try:
        done = subprocess.run(
            [*COMMAND, *WORDS, *flags],
            cwd=office,
            env={**environment(), "PYTHONUNBUFFERED": "1"},
            stdout=written,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SOON,
            check=False,
        )
    finally:
        os.close(written)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(ran(office)) == 50
