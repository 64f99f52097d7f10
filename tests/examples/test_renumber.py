"""Calls that build on each other go wrong without limits and right with them, every time, on real files."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp_types import CallToolResult, TextContent

from examples.renumber import main as example
from examples.renumber import server as documents
from examples.renumber.server import AT_ONCE, GitHub, fill, rfd_server
from frontmcp_py.host import Host, HostConfig, ToolCall
from frontmcp_py.testing import VirtualClock, run_virtual, virtual_time
from tests.docs.pages import blocks

MAIN = Path(example.__file__)
ROOT = MAIN.parents[2]
README = MAIN.parent / "README.md"

PROMISES = [
    "without limits, 005 does not become 008, which was not free yet",
    "and three drafts begin under one number, which an older document has got, too",
    "with the key, all seven calls succeed",
    "they ran one at a time, in the written order",
    "every document has a number of its own",
    "without a limit, the API refuses some of ten questions with 429",
    "with it, it never has more than 4 at once, from both tools together, and answers all",
    "in one call, the operations after one that fails are not run, and it says so",
    "a call of its own runs after it, all the same",
    "the files of the operations that were not run are there",
]
KEPT = [f"  ✓ {each}" for each in PROMISES]


# -- the tools, in virtual time ----------------------------------------------------------------------------


async def called(folder: Path, tool: str, **arguments: Any) -> tuple[bool, str]:
    """Whether a call failed, and what it says."""
    async with rfd_server(folder).connect() as client:
        result = await client.call_tool(tool, arguments)
    return result.is_error, text(result)


def text(result: CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "drafts"
    fill(made)
    return made


@virtual_time
async def test_a_draft_gets_the_number_after_the_last(folder: Path) -> None:
    assert await called(folder, "rfd_draft", slug="quotas") == (False, "quotas is 009")
    assert (folder / "009-quotas.md").read_text() == "# Quotas\n"


@virtual_time
async def test_the_first_draft_of_an_empty_folder_is_001(tmp_path: Path) -> None:
    assert await called(tmp_path, "rfd_draft", slug="quotas") == (False, "quotas is 001")


@virtual_time
async def test_a_document_moves_to_a_number_that_is_free(folder: Path) -> None:
    assert await called(folder, "rfd_renumber", id="008", new="011") == (False, "008 is 011 now")
    assert sorted(each.name for each in folder.iterdir())[-1] == "011-exports.md"
    assert (await called(folder, "rfd_show", id="011"))[1] == "# Exports\n"


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("rfd_renumber", {"id": "005", "new": "008"}, "008 is taken"),
        ("rfd_renumber", {"id": "004", "new": "009"}, "There is no 004"),
        ("rfd_show", {"id": "009"}, "There is no 009"),
        ("rfd_show", {"id": "9"}, "String should match pattern"),
        ("rfd_draft", {"slug": "../quotas"}, "String should match pattern"),
        ("fs_delete_file", {"path": "009-quotas.md"}, "There is no file 009-quotas.md"),
        ("fs_delete_file", {"path": "../secret.md"}, "There is no file ../secret.md"),
        ("fs_delete_file", {"path": "link.md"}, "There is no file link.md"),
        ("fs_delete_file", {"path": "."}, "There is no file ."),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(
    folder: Path, tool: str, arguments: dict[str, Any], said: str
) -> None:
    secret = folder.parent / "secret.md"
    secret.touch()
    (folder / "link.md").symlink_to(secret)
    before = sorted(folder.parent.rglob("*"))

    async def refused() -> None:
        failed, answer = await called(folder, tool, **arguments)
        assert failed
        assert said in answer

    run_virtual(refused)
    assert sorted(folder.parent.rglob("*")) == before


@virtual_time
async def test_documents_that_share_a_number_are_not_mistaken_for_each_other(folder: Path) -> None:
    (folder / "008-quotas.md").touch()
    failed, said = await called(folder, "rfd_renumber", id="008", new="009")
    assert failed
    assert "008 is 2 documents: 008-exports.md, 008-quotas.md" in said


@virtual_time
async def test_a_server_without_a_folder_has_one_until_it_ends() -> None:
    server = rfd_server()
    async with server.connect() as client:
        listed = await client.call_tool("rfd_list", {})
        host = Host(None, client)
        (pulls,) = await host.run([ToolCall("1", "github_pulls", {"label": "search"})])
    assert listed.structured_content == {"result": list(documents.DOCUMENTS)}
    assert pulls.text == "nothing open in /repos/initech/rfds/pulls/search"


# -- the API, over real connections ------------------------------------------------------------------------


async def test_the_api_answers_four_at_once_and_refuses_a_fifth() -> None:
    async with GitHub() as api, httpx2.AsyncClient(base_url=api.url, trust_env=False) as http:
        patient = [asyncio.create_task(http.get("/x")) for _ in range(AT_ONCE)]
        while api.most < AT_ONCE:  # noqa: ASYNC110 - nobody tells when a request has come
            await asyncio.sleep(0)
        refused = await http.get("/x")
        answered = [(await each).status_code for each in patient]
        again = await http.get("/x")
    assert (refused.status_code, answered, again.status_code) == (429, [200] * AT_ONCE, 200)
    assert (api.most, api.refused) == (AT_ONCE + 1, 1)


async def test_the_api_survives_whoever_hangs_up() -> None:
    async with GitHub() as api, httpx2.AsyncClient(base_url=api.url, trust_env=False) as http:
        _, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
        writer.write(b"GET /x HTTP")
        writer.close()
        await writer.wait_closed()
        assert (await http.get("/x")).status_code == 200
    assert api.most == 1


# -- the stories, in virtual time --------------------------------------------------------------------------


def told(folder: Path) -> int:
    async def tell() -> int:
        return await example.tell(folder, clock=VirtualClock())

    return run_virtual(tell)


def test_every_promise_is_kept_and_the_page_shows_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(tmp_path) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if "✓" in line or "✗" in line] == KEPT
    assert printed.endswith("\nAll 10 promises were kept.\n")
    assert max(map(len, printed.splitlines())) <= 100
    shown = [block.code for block in blocks(README) if block.language == "text" and not block.info]
    assert len(shown) == 3
    for code in shown:
        assert timeless(code) in timeless(printed)


def timeless(printed: str) -> str:
    """What of the output does not depend on how long anything takes."""
    printed = re.sub(r"^ *\|0.*\n", "", printed, flags=re.MULTILINE)
    printed = re.sub(r"\b[\d.]+ m?s\b", "TIME", printed)
    return re.sub(r"([·█ ])\1+", r"\1", re.sub(r"^ +", "", printed, flags=re.MULTILINE))


def test_what_does_not_depend_on_time_is_compared() -> None:
    waits = "  rfd#1 ·····███  41.2 ms\n    |0   |10 ms\n"
    assert timeless(waits) == timeless("rfd#1 ··██  0.3 s\n |0 |1 s\n") == "rfd#1 ·█ TIME\n"
    assert timeless(waits) != timeless("  rfd#1 █████  41.2 ms\n")


def test_the_limits_are_those_that_the_page_tells_of() -> None:
    limits = HostConfig.of(example.LIMITS).tools
    assert {(each.key, each.limit) for each in limits.values()} == {
        ("rfd", 1),
        ("github", AT_ONCE),
        ("fs_delete_file", 1),
    }
    assert {name for name, each in limits.items() if each.fan_out and each.stops} == {"fs_delete_file"}


@pytest.mark.parametrize(
    ("limits", "broken"),
    [
        (
            '[fs_delete_file]\nconcurrency = 1\nfan_out = { on_error = "stop" }\n',
            [*PROMISES[2:5], PROMISES[6]],
        ),
        (
            '[rfd_draft]\nconcurrency = { key = "rfd" }\n[rfd_renumber]\nconcurrency = { key = "rfd" }\n'
            "[github_issues]\nconcurrency = 4\n[github_pulls]\nconcurrency = 4\n"
            "[fs_delete_file]\nconcurrency = 1\nfan_out = true\n",
            [PROMISES[6], PROMISES[7], PROMISES[8], PROMISES[9]],
        ),
    ],
    ids=["no keys", "no shared key, no stop"],
)
def test_with_other_limits_the_example_says_which_promises_are_broken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    limits: str,
    broken: list[str],
) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(limits)
    monkeypatch.setattr(example, "LIMITS", file)
    assert told(tmp_path / "stories") == 1
    printed = capsys.readouterr().out
    assert re.findall("✗ BROKEN: (.*)", printed) == broken
    assert printed.endswith(f"\n{len(broken)} of 10 promises were broken.\n")


def test_if_every_call_waits_for_the_one_before_it_nothing_goes_wrong_without_limits_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first story shows what comes of starting calls at once, and not a fault of single tools."""
    one_by_one = Host.run

    async def run(host: Host, batch: list[ToolCall], **_: Any) -> list[Any]:
        return [result for call in batch for result in await one_by_one(host, [call])]

    monkeypatch.setattr(Host, "run", run)
    assert told(tmp_path) == 1
    broken = re.findall("✗ BROKEN: (.*)", capsys.readouterr().out)
    assert broken == [*PROMISES[:2], PROMISES[5], PROMISES[6]]


# -- the command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nope"], "unrecognized arguments: --nope"),
        (["--folder", "HERE"], "HERE: File exists; give a folder that is not there yet"),
    ],
)
def test_arguments_that_make_no_sense_are_answered_with_one_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [each.replace("HERE", str(tmp_path)) for each in arguments]
    monkeypatch.setattr(sys, "argv", ["main.py", *given])
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"renumber: {sentence.replace('HERE', str(tmp_path))}\n"


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("run", range(30))
def test_in_real_time_it_goes_wrong_and_right_on_every_run(
    run: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asyncio.run(example.tell(tmp_path)) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("arguments", [[], ["--stdio"]], ids=["in process", "stdio"])
def test_the_command_keeps_every_promise_and_prints_nothing_else(
    arguments: list[str], tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    with started(*arguments, "--folder", str(kept)) as process:
        printed, problems = process.communicate()
    assert (process.returncode, problems) == (0, ""), printed
    assert [line for line in printed.splitlines() if "✓" in line or "✗" in line] == KEPT
    assert sorted(each.name for each in kept.iterdir()) == [
        "api",
        "deleted",
        "with-limits",
        "without-limits",
    ]
    assert [name[:3] for name in documents.documents(kept / "without-limits")].count("009") == 4


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_it_ends_quietly_when_nobody_reads_on(tmp_path: Path) -> None:
    with started() as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Four documents")
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("without", "status", "numbers"),
    [
        ("", 0, ["008", "009", "010", "011", "012", "013", "014"]),
        ("--config examples/renumber/limits.toml", 1, ["005", "009", "009", "009", "009", "010", "011"]),
    ],
    ids=["as it is", "without its limits"],
)
def test_the_command_line_of_the_page_does_what_the_page_says(
    tmp_path: Path, without: str, status: int, numbers: list[str]
) -> None:
    (script,) = [block.code for block in blocks(README) if "frontmcp host run" in block.code]
    assert without in script
    script = script.replace(without, "") if without else script
    command = f'frontmcp() {{ "{sys.executable}" -m frontmcp_py.cli "$@"; status=$?; }}'
    done = subprocess.run(
        ["bash", "-c", f"{command}\n{script}\nexit $status"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "TMPDIR": str(tmp_path)},
        capture_output=True,
        check=False,
        encoding="utf-8",
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (status, ""), done.stdout
    assert [line[:3] for line in done.stdout.splitlines() if line.endswith(".md")] == numbers


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The example as a process, which is stopped if a test fails while it runs."""
    process = subprocess.Popen(
        [sys.executable, str(MAIN), *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONIOENCODING": "utf-8",
            "PYTHONUNBUFFERED": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
