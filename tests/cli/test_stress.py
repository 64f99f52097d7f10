"""`frontmcp stress` against real servers: those that keep their promises, and those that do not."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

from tests.cli.conftest import COMMAND, Done, command, environment
from tests.cli.test_run import port_in

Run = Callable[..., Done]

# The flood is larger than what fits: 6 calls run and 4 wait.
LOAD = ("--connections", "24", "--seconds", "1")

SERVER = '''
"""A small server that is easily flooded."""

import asyncio
import os
import sys

from frontmcp_py import Admission, Concurrency, FrontMCP, Throttle

server = FrontMCP(
    "small", throttle=Throttle(admission=Admission(max_active=8, reserved=2, max_queued=4)), **OPTIONS
)


@server.tool(read_only=True, concurrency=Concurrency(2, key="crm", queue_timeout=None))
async def slow() -> str:
    """Take a while."""
    await asyncio.sleep(0.3)
    return "done"


@server.tool(read_only=True)
async def quick() -> str:
    """Take no time."""
    return "done"


@server.tool(destructive=True)
async def destroy() -> str:
    """Must not be called unasked."""
    os._exit(1)


@server.tool(read_only=True)
async def find(what: str, limit: int = 1) -> str:
    """Must not be called unasked: it needs to be told what."""
    assert (what, limit) == ("7", 7)
    await asyncio.sleep(0.3)
    return what


@server.tool(priority="control", read_only=True)
async def status() -> str:
    """How is it?"""
    return "fine"


@server.tool(priority="control")
async def reset() -> str:
    """Must not be called unasked."""
    os._exit(1)
'''

# What stands in front of the server and spoils what it does.
SPOILED = """
import asyncio
import json
import sys

import uvicorn

from small import server

app = server.http_app()
spoils = sys.argv[1]
seen = {"posts": 0}


async def spoiled(scope, receive, send):
    path = scope.get("path")
    if spoils == "health" and path == "/healthz":
        seen["health"] = seen.get("health", 0) + 1
        if seen["health"] % 3 == 0:
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})
            return
    if spoils == "answers" and scope["type"] == "http" and scope["method"] == "POST":
        seen["posts"] += 1
        if seen["posts"] > 60 and seen["posts"] % 7 == 0:
            await send({"type": "http.response.start", "status": 502, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})
            return
    if spoils == "counters" and path == "/metrics":

        async def forget(message):
            if message["type"] == "http.response.start":
                message["headers"] = [each for each in message["headers"] if each[0] != b"content-length"]
            elif message.get("body"):
                told = json.loads(message["body"])
                told["counters"]["completed"] += 1
                told["keys"]["crm"]["peak"] = 3
                message["body"] = json.dumps(told).encode()
            await send(message)

        return await app(scope, receive, forget)
    await app(scope, receive, send)


if spoils == "no guard":
    from mcp.server.mcpserver import MCPServer
    from mcp_types import ToolAnnotations

    bare = MCPServer("bare")

    @bare.tool(annotations=ToolAnnotations(read_only_hint=True))
    async def slow() -> str:
        await asyncio.sleep(0.3)
        return "done"

    spoiled = bare.streamable_http_app()

config = uvicorn.Config(spoiled, port=0, log_level="warning")
listener = config.bind_socket()
sys.stderr.write(f"Listening on 127.0.0.1 port {listener.getsockname()[1]}\\n")
sys.stderr.flush()
uvicorn.Server(config).run(sockets=[listener])
"""


def write(folder: Path, options: str = "") -> None:
    text = SERVER.replace("**OPTIONS", options)
    (folder / "small.py").write_text(text, encoding="utf-8")


def stress(folder: Path, *words: str) -> tuple[int, dict[str, Any], dict[str, dict[str, str]]]:
    """The exit status, what was told as JSON, and its promises by name."""
    done = command("stress", *words, "--json", cwd=folder)
    assert done.out, done.err
    told = json.loads(done.out)
    return done.status, told, {each["name"]: each for each in told["promises"]}


def broken(promises: dict[str, dict[str, str]]) -> set[str]:
    return {name for name, each in promises.items() if each["verdict"] == "broken"}


@contextlib.contextmanager
def spoiled(folder: Path, how: str) -> Iterator[str]:
    write(folder)
    (folder / "spoiled.py").write_text(SPOILED, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, "spoiled.py", how],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            yield f"http://127.0.0.1:{port_in(process.stderr)}"
        finally:
            process.kill()


@pytest.mark.slow
def test_a_server_that_keeps_its_promises(tmp_path: Path) -> None:
    """Started for this and ended again, with a picture; nothing is called that nobody asked for."""
    write(tmp_path)
    status, told, promises = stress(tmp_path, "small.py", *LOAD, "--picture", "flood.svg")
    assert {name: each for name, each in promises.items() if each["verdict"] != "kept"} == {}
    assert len(promises) == 10
    assert (status, told["kept"]) == (0, True)
    flood, control = told["calls"]["flood"], told["calls"]["control"]
    assert set(flood["outcomes"]) == {"ok", "OVERLOADED"}
    assert sum(flood["outcomes"].values()) == flood["number"]
    assert set(flood["tools"]) == {"slow", "quick"}
    assert set(control["tools"]) == {"status"}
    assert promises["shared keys stay bounded"]["says"] == "crm at most 2 of 2"
    assert ElementTree.parse(tmp_path / "flood.svg").getroot().tag.endswith("svg")


@pytest.mark.slow
def test_a_server_that_runs_already_is_left_running(tmp_path: Path) -> None:
    with spoiled(tmp_path, "nothing") as url:
        words = ("--call", "find what=7 limit=7", "--call", 'find {"what": "7", "limit": 7}')
        status, told, promises = stress(tmp_path, f"{url}/mcp", *LOAD, *words, "--control", "quick")
        assert urllib.request.urlopen(f"{url}/healthz", timeout=20).status == 200
    assert set(told["calls"]["flood"]["tools"]) == {"find"}
    assert "failed" not in told["calls"]["flood"]["outcomes"]
    # A tool without the priority of control calls is refused like any other, and that shows.
    assert broken(promises) == {"control calls are answered meanwhile"}
    assert status == 1
    assert len(promises) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("health", {"/healthz stays 200"}),
        ("answers", {"every call is answered"}),
        ("counters", {"the counters add up", "shared keys stay bounded"}),
    ],
)
def test_a_server_that_breaks_a_promise_is_found_out(tmp_path: Path, how: str, expected: set[str]) -> None:
    with spoiled(tmp_path, how) as url:
        status, told, promises = stress(tmp_path, url, *LOAD)
    assert (status, told["kept"]) == (1, False)
    assert expected <= broken(promises)
    assert broken(promises) <= expected | {"control calls are answered meanwhile"}


@pytest.mark.slow
def test_a_server_without_a_guard_breaks_what_it_never_promised(tmp_path: Path) -> None:
    with spoiled(tmp_path, "no guard") as url:
        status, _, promises = stress(tmp_path, url, *LOAD)
    assert status == 1
    assert broken(promises) == {
        "a flood is answered with OVERLOADED",
        "/healthz stays 200",
        "/readyz answers, and is ready again",
    }
    not_judged = {name for name, each in promises.items() if each["verdict"] == "not judged"}
    assert "the counters add up" in not_judged
    assert promises["every call is answered"]["verdict"] == "kept"


@pytest.mark.slow
def test_a_flood_of_which_nothing_is_refused_proves_nothing(tmp_path: Path) -> None:
    write(tmp_path, "metrics=False")
    load = ("small.py", "--call", "quick", "--connections", "2", "--seconds", "0.3")
    status, _, promises = stress(tmp_path, *load)
    assert (status, broken(promises)) == (1, {"a flood is answered with OVERLOADED"})
    status, told, promises = stress(tmp_path, *load, "--allow-no-overload")
    assert (status, told["kept"]) == (0, True)
    # Without metrics it is said what nobody can know.
    assert {name for name, each in promises.items() if each["verdict"] == "not judged"} == {
        "a flood is answered with OVERLOADED",
        "never more calls than max_active",
        "shared keys stay bounded",
        "control calls are answered meanwhile",
        "the counters add up",
    }


@pytest.mark.slow
def test_a_server_that_dies_is_found_out(tmp_path: Path) -> None:
    write(tmp_path)
    began = time.monotonic()
    status, _, promises = stress(tmp_path, "small.py", *LOAD, "--call", "destroy")
    assert status == 1
    assert {"every call is answered", "/healthz stays 200", "/readyz answers, and is ready again"} <= broken(
        promises
    )
    assert time.monotonic() - began < 45


@pytest.mark.slow
def test_a_person_is_shown_tables_and_bars(tmp_path: Path) -> None:
    write(tmp_path)
    done = command("stress", "small:server", *LOAD, cwd=tmp_path)
    assert (done.status, done.err) == (0, "")
    for each in (
        "OVERLOADED",
        "p50",
        "p99",
        "flood: how long answers took",
        "█",
        "kept",
        "/healthz stays 200",
    ):
        assert each in done.out


def test_no_other_machine_is_asked_for_anything(frontmcp: Run) -> None:
    done = frontmcp("stress", "http://192.0.2.1:8000/mcp")
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        "frontmcp: 192.0.2.1 (192.0.2.1) is not this machine; only servers of this machine are flooded\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["http://127.0.0.1:1/mcp"], "http://127.0.0.1:1/mcp does not list its tools: "),
        (["http://127.0.0.1:1/mcp", "--config", "x"], "--config is for a server that is started here"),
        (["http://127.0.0.1:1/mcp", "--header", "x"], "--header: 'x' is no header; give 'NAME: VALUE'"),
        (["http://127.0.0.1:1/mcp", "--picture", "no/where.svg"], "there is no folder "),
        (["127.0.0.1:8000"], "'127.0.0.1:8000': '8000' is no name of an object"),
        (["nowhere.py"], "there is no file nowhere.py"),
        (["http://127.0.0.1:1/mcp", "--connections", "0"], "Invalid value for '--connections'"),
        (["http://127.0.0.1:1/mcp", "--seconds", "1e9"], "Invalid value for '--seconds'"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(frontmcp: Run, words: list[str], said: str) -> None:
    done = frontmcp("stress", *words)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(f"frontmcp: {said}")


@pytest.mark.slow
def test_tools_that_do_not_exist_or_must_be_named_are_one_sentence(tmp_path: Path) -> None:
    write(tmp_path)
    done = command("stress", "small.py", "--call", "quik", cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert done.err == "frontmcp: the server has no tool 'quik'; did you mean 'quick'?\n"
    text = (tmp_path / "small.py").read_text().replace("read_only=True", "read_only=False")
    (tmp_path / "small.py").write_text(text)
    done = command("stress", "small.py", cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("frontmcp: no tool may be called unasked: ")


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_canary_that_is_ended_leaves_nobody_behind(
    tmp_path: Path, end: signal.Signals, status: int
) -> None:
    with canary(tmp_path) as (process, server, clients):
        process.send_signal(end)
        _, said = process.communicate(timeout=30)
        assert (process.returncode, said) == (status, "")
        _, alive = psutil.wait_procs([server, *clients], timeout=10)
        assert alive == []


@pytest.mark.slow
def test_a_canary_whose_clients_die_says_so_and_leaves_nobody_behind(tmp_path: Path) -> None:
    with canary(tmp_path) as (process, server, clients):
        clients[0].kill()
        _, said = process.communicate(timeout=30)
        assert process.returncode == 2
        assert said == "frontmcp: a process of clients has ended unexpectedly\n"
        _, alive = psutil.wait_procs([server, *clients], timeout=10)
        assert alive == []


@contextlib.contextmanager
def canary(folder: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process, list[psutil.Process]]]:
    """One that runs for long, its server, and its clients."""
    write(folder)
    with subprocess.Popen(
        [*COMMAND, "stress", "small.py", "--connections", "24", "--seconds", "50"],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            clients: list[psutil.Process] = []
            while not clients:
                assert process.poll() is None
                time.sleep(0.05)
                children = psutil.Process(process.pid).children()
                clients = [each for each in children if "frontmcp_py.cli.flood" in each.cmdline()]
            (server,) = [each for each in children if each not in clients]
            yield process, server, clients
        finally:
            process.kill()


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    text = SERVER.replace("**OPTIONS", "") + "\nif 'run' in sys.argv:\n    raise ValueError('no database')\n"
    (tmp_path / "small.py").write_text(text)
    done = command("stress", "small.py", cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(
        "frontmcp: the server does not start: small.py cannot be imported: ValueError: no database"
    )
