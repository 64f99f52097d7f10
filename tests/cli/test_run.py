"""`frontmcp run` serves, and nothing but the protocol is on stdout; the command as a whole."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters

from tests.cli.conftest import COMMAND, ROOT, Done, command, environment

Run = Callable[..., Done]

NOISY = '''
import subprocess
from frontmcp_py import FrontMCP
print("noise while it is imported")
server = FrontMCP("noisy")

@server.tool
def shout() -> str:
    """Shout."""
    print("noise of a tool")
    subprocess.run(["echo", "noise of a child"])
    return "done"

def main() -> None:
    raise SystemExit("nobody calls this")

if __name__ == "__main__":
    main()
'''


@contextlib.contextmanager
def serving(*words: str, cwd: Path, **more: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server that the command runs over HTTP, and its port."""
    with subprocess.Popen(
        [*COMMAND, "run", "--http", "--port", "0", *words],
        cwd=cwd,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            yield process, port_in(process.stderr)
        finally:
            process.kill()


def port_in(log: IO[str]) -> int:
    said: list[str] = []
    for line in log:
        said.append(line)
        if found := re.search(r"Listening on \S+ port (\d+)", line):
            return int(found[1])
    raise AssertionError("".join(said))


def get(port: int, path: str) -> dict[str, object]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
        told: dict[str, object] = json.loads(answer.read())
        return told


async def test_over_stdio_a_client_is_not_disturbed_by_what_is_printed(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    log = tmp_path / "log"
    script = f"exec {' '.join(COMMAND)} run noisy.py 2>{log}"
    server = StdioServerParameters(command="sh", args=["-c", script], cwd=tmp_path, env=environment())
    async with Client(server) as client:
        result = await client.call_tool("shout", {})
    assert result.structured_content == {"result": "done"}
    noise = log.read_text()
    for each in ("noise while it is imported", "noise of a tool", "noise of a child"):
        assert each in noise


def test_over_http_it_serves_until_it_is_told_to_stop(tmp_path: Path, desk: Path) -> None:
    with serving("desk.py", cwd=tmp_path) as (process, port):
        assert get(port, "/healthz") == {"ok": True, "service": "desk"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM


@pytest.mark.slow
def test_the_file_that_is_named_is_in_force(tmp_path: Path, desk: Path) -> None:
    (tmp_path / "limits.toml").write_text("[concurrency]\nmax_active = 20\n")
    with serving("desk:server", "--config", "limits.toml", cwd=tmp_path) as (_, port):
        assert get(port, "/readyz")["max_active"] == 20


@pytest.mark.slow
def test_an_address_in_use_is_one_sentence(tmp_path: Path, desk: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = command("run", "desk.py", "--http", "--port", str(port), cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert done.err.splitlines()[-1].startswith(f"frontmcp: port {port} on 127.0.0.1 is in use")


@pytest.mark.slow
@pytest.mark.parametrize("transport", [(), ("--http", "--port", "0")], ids=["stdio", "http"])
def test_a_store_that_cannot_be_reached_is_one_sentence(
    frontmcp: Run, tmp_path: Path, transport: tuple[str, ...]
) -> None:
    (tmp_path / "shared.py").write_text(
        "from frontmcp_py import FrontMCP\n"
        'uri = "redis://user:secret@127.0.0.1:1/0"\n'
        'server = FrontMCP("desk", throttle={"storage": uri, "fallback": "error"})\n'
    )
    done = frontmcp("run", "shared.py", *transport)
    assert done.status == 2
    said = done.err.splitlines()[-1]
    assert said.startswith("frontmcp: Throttle.storage: redis://127.0.0.1:1/0 cannot be reached (")
    assert said.endswith("or set fallback='memory' so that each instance counts alone without it")
    assert "secret" not in done.err
    assert "Traceback" not in done.err


def test_an_address_is_for_http_only(frontmcp: Run, desk: Path) -> None:
    for words in (["--port", "0"], ["--host", "::1"]):
        done = frontmcp("run", "desk.py", *words)
        assert (done.status, done.err) == (2, "frontmcp: --host and --port are for HTTP; add --http\n")


def test_limits_that_cannot_be_are_one_sentence(frontmcp: Run, desk: Path, tmp_path: Path) -> None:
    (tmp_path / "frontmcp.toml").write_text("[throttle]\nmode = 'lax'\n")
    done = frontmcp("run", "desk.py")
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert "[throttle]: Throttle.mode: 'lax' is not allowed" in done.err


def test_words_that_are_not_understood_are_one_sentence(frontmcp: Run) -> None:
    for words, said in (
        (["runn", "desk.py"], "No such command 'runn'"),
        (["run", "desk.py", "--htp"], "No such option: --htp"),
        (["run"], "Missing argument 'TARGET'"),
        (["run", "desk.py", "--http", "--port", "many"], "Invalid value for '--port'"),
        (["run", "desk.py", "--http", "--port", "70000"], "Invalid value for '--port'"),
    ):
        done = frontmcp(*words)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.err.startswith(f"frontmcp: {said}")


def test_the_commands_are_listed(frontmcp: Run) -> None:
    for words in ([], ["--help"]):
        done = frontmcp(*words)
        assert (done.status, done.err) == (0, "")
        for name in ("run", "check", "list", "stress", "systemd"):
            assert re.search(rf"^  {name} ", done.out, re.MULTILINE)
    assert frontmcp("--version").out.startswith("frontmcp")


@pytest.mark.slow
def test_without_its_extra_the_command_says_what_to_install() -> None:
    for missing in ("typer", "rich"):
        program = f"""
import sys
sys.modules[{missing!r}] = None
from frontmcp_py.cli import main
main(["check", "x"])
"""
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f'frontmcp: the command line needs {missing}; pip install "frontmcp-py[cli]" brings it\n'
        )


def test_the_installed_command_is_this_one() -> None:
    import tomllib

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"frontmcp": "frontmcp_py.cli:main"}
