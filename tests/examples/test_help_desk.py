"""The help desk keeps what it promises: each story in virtual time, and the demo as a process of its own."""

import asyncio
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, TextContent
from rich.console import Console
from rich.text import Text

from examples.help_desk import demo
from examples.help_desk import server as example
from examples.help_desk.server import help_desk
from frontmcp_py import FrontMCP
from frontmcp_py.testing import VirtualClock, virtual_time

DEMO = Path(demo.__file__)


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch) -> example.Records:
    fresh = example.Records()
    monkeypatch.setattr(example, "records", fresh)
    return fresh


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[tuple[FrontMCP, Client]]:
    """A help desk whose day has just begun, and a client in this process."""
    desk = help_desk(**options)
    desk.guard.use_clock(VirtualClock())
    async with desk.connect() as client:
        yield desk, client
    end = desk.guard.statistics()
    assert (end.active, end.waiting, end.places) == (0, 0, 0)


async def merge(client: Client, tool: str, source: str, after: float = 0.0) -> tuple[str, float]:
    """What became of a merge, and at which moment of loop time that was known."""
    await asyncio.sleep(after)
    result = await client.call_tool(tool, {"source": source, "target": "C-1"})
    return code(result), asyncio.get_running_loop().time()


def code(result: CallToolResult) -> str:
    return str((result.meta or {}).get("code")) if result.is_error else "ok"


def text(result: CallToolResult) -> str:
    assert isinstance(result.content[0], TextContent)
    return result.content[0].text


# -- the stories, in virtual time --------------------------------------------------------------------------


@virtual_time
async def test_the_third_export_of_an_hour_is_refused_until_the_next_hour() -> None:
    async with opened() as (_, client):
        results = [await client.call_tool("export_tickets", {}) for _ in range(3)]
        assert [code(each) for each in results] == ["ok", "ok", "RATE_LIMIT_EXCEEDED"]
        assert text(results[2]) == "Rate limit exceeded. Retry after 3600 seconds"
        await asyncio.sleep(3599.9)
        assert (
            text(await client.call_tool("export_tickets", {})) == "Rate limit exceeded. Retry after 1 seconds"
        )
        await asyncio.sleep(0.1)
        assert code(await client.call_tool("export_tickets", {})) == "ok"


@virtual_time
async def test_anonymous_callers_share_two_exports_whatever_connection_they_come_by() -> None:
    async with opened() as (desk, _):
        codes = []
        for _ in range(3):
            async with desk.connect() as stranger:
                codes.append(code(await stranger.call_tool("export_tickets", {})))
    assert codes == ["ok", "ok", "RATE_LIMIT_EXCEEDED"]


@virtual_time
async def test_each_user_has_two_exports_of_their_own_and_nobody_comes_in_without_a_token() -> None:
    desk = help_desk(sign_in=True)
    desk.guard.use_clock(VirtualClock())
    web, url = desk.http_app(), "http://127.0.0.1:8000/mcp"
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(web.router.lifespan_context(web))

        async def http(**headers: str) -> httpx2.AsyncClient:
            client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=web), headers=headers)
            return await stack.enter_async_context(client)

        for token in example.USERS:
            transport = streamable_http_client(url, http_client=await http(Authorization=f"Bearer {token}"))
            client = await stack.enter_async_context(Client(transport))
            codes = [code(await client.call_tool("export_tickets", {})) for _ in range(3)]
            assert codes == ["ok", "ok", "RATE_LIMIT_EXCEEDED"]
        assert (await (await http()).post(url)).status_code == 401
        assert (await (await http(Authorization="Bearer forged")).post(url)).status_code == 401


@virtual_time
async def test_a_second_merge_is_refused_while_one_runs(records: example.Records) -> None:
    async with opened() as (_, client):
        first, second = await asyncio.gather(
            merge(client, "merge_customers", "C-2"), merge(client, "merge_customers", "C-3", after=0.1)
        )
        assert (first, second) == (("ok", 0.4), ("CONCURRENCY_LIMIT", 0.1))
        assert await merge(client, "merge_customers", "C-3") == ("ok", 0.8)
    assert records.most_merges_at_once == 1


@virtual_time
async def test_merges_that_may_wait_run_in_the_order_of_their_arrival(records: example.Records) -> None:
    async with opened() as (_, client):
        outcomes = await asyncio.gather(
            *(merge(client, "merge_customers_in_turn", f"C-{nth}", after=nth / 20) for nth in range(4))
        )
    assert outcomes == [("ok", 0.4), ("ok", 0.8), ("ok", 1.2), ("QUEUE_TIMEOUT", 1.15)]
    assert [each.source for each in records.merges] == ["C-0", "C-1", "C-2"]
    assert records.most_merges_at_once == 1


@virtual_time
async def test_a_slow_crm_is_given_up_on_after_half_a_second() -> None:
    loop = asyncio.get_running_loop()
    async with opened() as (_, client):
        quick = await client.call_tool("lookup_customer", {"customer": "C-1"})
        assert (quick.structured_content or {})["name"] == "Initech"
        assert loop.time() == 0.05
        slow = await client.call_tool("lookup_customer", {"customer": "C-9"})
        assert text(slow) == 'Execution of "lookup_customer" timed out after 500ms'
        assert loop.time() == 0.55


@virtual_time
async def test_a_merge_that_has_timed_out_goes_on_and_keeps_its_slot(records: example.Records) -> None:
    async with opened() as (_, client):
        assert await merge(client, "merge_customers_hastily", "C-10") == ("EXECUTION_TIMEOUT", 0.2)
        assert await merge(client, "merge_customers", "C-11") == ("CONCURRENCY_LIMIT", 0.2)
        # It waits until the work of the first has ended, at 0.8 s, and then takes 0.4 s itself.
        assert await merge(client, "merge_customers_in_turn", "C-12") == ("ok", 1.2)
    assert [each.source for each in records.merges] == ["C-10", "C-12"]
    assert all(each.ended for each in records.merges)
    assert records.most_merges_at_once == 1


@virtual_time
async def test_an_export_that_listens_to_its_signal_stops_and_another_reads_on(
    records: example.Records,
) -> None:
    loop = asyncio.get_running_loop()
    async with opened() as (_, client):
        for tool in ("export_archive", "export_archive_regardless"):
            began = loop.time()
            result = await client.call_tool(tool, {})
            assert code(result) == "EXECUTION_TIMEOUT"
            assert loop.time() - began == pytest.approx(0.35)
            await asyncio.sleep(2)
    stops, regardless = records.exports
    assert stops.pages_read == 4
    assert stops.stopped_by == 'Execution of "export_archive" timed out after 350ms'
    assert (regardless.pages_read, regardless.stopped_by) == (10, None)


@virtual_time
async def test_tools_without_limits_of_their_own_have_the_defaults() -> None:
    async with opened() as (_, client):
        look_up = [client.call_tool("lookup_customer", {"customer": "C-9"}) for _ in range(6)]
        codes = [code(each) for each in await asyncio.gather(*look_up)]
        assert sorted(codes) == ["CONCURRENCY_LIMIT"] + ["EXECUTION_TIMEOUT"] * 5
        codes = [code(await client.call_tool("list_tickets", {})) for _ in range(61)]
        assert codes == ["ok"] * 60 + ["RATE_LIMIT_EXCEEDED"]
        await asyncio.sleep(60)
        assert code(await client.call_tool("list_tickets", {})) == "ok"


@virtual_time
async def test_every_tool_tells_the_model_of_its_limits() -> None:
    async with opened() as (_, client):
        tools = {each.name: each for each in (await client.list_tools()).tools}
    for tool in tools.values():
        assert "Limits: at most " in (tool.description or "")
        assert "gives up after" in (tool.description or "")
        assert "timeoutMs" in (tool.meta or {})["frontmcp/limits"]
    assert "at most 2 calls per hour for each signed-in caller" in (tools["export_tickets"].description or "")
    assert (tools["list_tickets"].meta or {})["frontmcp/limits"]["timeoutMs"] == 30_000


@virtual_time
async def test_with_limits_off_only_a_tools_own_timeout_stays(records: example.Records) -> None:
    async with opened(throttle=False) as (_, client):
        exports = [await client.call_tool("export_tickets", {}) for _ in range(5)]
        assert [code(each) for each in exports] == ["ok"] * 5
        merges = (merge(client, "merge_customers", source) for source in ("C-2", "C-3"))
        assert await asyncio.gather(*merges) == [("ok", 0.4), ("ok", 0.4)]
        assert code(await client.call_tool("lookup_customer", {"customer": "C-9"})) == "EXECUTION_TIMEOUT"
        described = [each.description or "" for each in (await client.list_tools()).tools]
    assert records.most_merges_at_once == 2
    assert not any("at most" in each for each in described)


# -- the demo ----------------------------------------------------------------------------------------------


@virtual_time
async def test_the_demo_makes_a_series_again_when_its_window_has_turned_meanwhile() -> None:
    loop = asyncio.get_running_loop()
    began = []

    async def series() -> int:
        began.append(loop.time())
        await asyncio.sleep(30 if len(began) == 1 else 0)
        return len(began)

    await asyncio.sleep(40)
    assert await demo.undivided(60, series, now=loop.time) == 2
    assert began == [40, 70]


@virtual_time
async def test_the_demo_waits_out_the_last_seconds_of_a_window(capsys: pytest.CaptureFixture[str]) -> None:
    loop = asyncio.get_running_loop()

    async def series() -> float:
        return loop.time()

    await asyncio.sleep(57)
    assert await demo.undivided(60, series, now=loop.time) > 60
    assert "(waiting 3.0 s for the next window" in capsys.readouterr().out


def test_a_broken_promise_is_shown_as_one() -> None:
    story = demo.Story("a story", "", Text("its picture"))
    story.promise("this was kept", True)
    story.promise("this was not", False)
    console = Console(file=io.StringIO(), width=100)
    demo.show(console, 1, story, told="")
    console.print(demo.summary([story], 1.0))
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert re.search("✓ +this was kept", printed)
    assert re.search("✗ BROKEN +this was not", printed)
    assert "1 of 2 promises were broken." in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nope"], "unrecognized arguments: --nope"),
        (["--port", "no"], "argument --port: 'no' is not allowed; give a number from 1024 to 65535"),
        (["--port", "70000"], "argument --port: '70000' is not allowed; give a number from 1024 to 65535"),
    ],
)
def test_arguments_that_make_no_sense_are_answered_with_one_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"demo: {sentence}\n"


def test_a_port_in_use_is_named_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["demo.py", "--serve", "--port", str(port)])
        assert demo.main() == 1
    assert re.fullmatch(
        f"demo: port {port}: .*in use.*; give another one with --port\n", capsys.readouterr().err
    )


VERDICTS = [
    "ada and grace get two exports each, and the third is refused",
    "all anonymous callers share two, whatever connection they come by",
    "the second merge is refused at once while the first runs",
    "merges that find the slot taken wait, and run in their turn",
    "who has waited for one second without a turn is told so",
    "never two merges at once (most: 1)",
    "C-9 is given up on after half a second",
    "the merge goes on all the same, to its end",
    "meanwhile its slot is taken: the next merge is refused",
    "the export that listens stops: it has read 4 of 10 pages",
    "the one that does not goes on for nobody: it has read 10 of 10 pages",
    "five look-ups at once, though lookup_customer itself says only how long one may take",
    "30 seconds for a tool that says nothing, its own 500 ms for lookup_customer",
    "two merges at once (most: 2)",
    "the log warns of it",
]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_keeps_every_promise() -> None:
    with started() as process:
        printed, problems = process.communicate()
    assert (process.returncode, problems) == (0, ""), printed
    for each in VERDICTS:
        assert re.search(f"✓ +{re.escape(each)}", printed), each
    assert "BROKEN" not in printed
    assert re.search(r"All \d+ promises were kept", printed)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_demo_stays_open_for_clients_of_ones_own_until_ctrl_c() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with started("--serve", "--port", str(port)) as process:
        assert process.stdout is not None
        how = ""
        while "Ctrl-C closes it." not in how:
            line = process.stdout.readline()
            assert line, how
            how += line

        command = shlex.split(how[how.index("\ncurl -H") : how.index("Ctrl-C")])
        curl = subprocess.run(command, capture_output=True, check=True)
        assert json.loads(curl.stdout)["result"]["_meta"]["code"] == "EXECUTION_TIMEOUT"
        config = json.loads(how[how.index("\n{") : how.index("\n}") + 2])
        answer = asyncio.run(_list_tickets(config["mcpServers"]["help-desk"]))
        assert "Cannot log in" in answer

        process.send_signal(signal.SIGINT)
        rest, problems = process.communicate()
    assert (process.returncode, problems) == (0, "")
    assert rest.strip() == "The help desk has closed."
    with socket.create_server(("127.0.0.1", port)):
        pass


async def _list_tickets(how: dict[str, Any]) -> str:
    async with Client(StdioServerParameters(**how)) as client:
        return text(await client.call_tool("list_tickets", {}))


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The demo as a process, which is told to stop if a test fails while it runs."""
    process = subprocess.Popen(
        [sys.executable, str(DEMO), *arguments],
        cwd=DEMO.parents[2],
        env={**os.environ, "PYTHONPATH": str(DEMO.parents[2])},
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
