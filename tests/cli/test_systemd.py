"""`frontmcp systemd` prints units that systemd accepts and whose commands do what they should."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from frontmcp_py.cli.systemd import stop_seconds
from tests.cli.conftest import Done, environment, write_desk

Run = Callable[..., Done]

GUARDRAILS = {
    "TasksMax": "512",
    "LimitNOFILE": "65536",
    "MemoryHigh": "6G",
    "MemoryMax": "9G",
    "CPUWeight": "80",
    "TimeoutStopSec": "5",
    "Restart": "on-failure",
}


def units(text: str) -> dict[str, str]:
    """The units that were printed, by their names."""
    parts = re.split(r"^# (\S+\.(?:service|timer))\n", text, flags=re.MULTILINE)
    assert parts[0] == ""
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def section(unit: str, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit)
    return dict(parser[name])


def words(command: str) -> list[str]:
    """A command line as systemd reads it, which has a meaning of its own for every `%`, `$` and backslash."""
    assert not re.search(r"""\\[^\\"]""", command.replace("\\\\", "")), (
        "an escape that stands for something else"
    )
    return [literal(literal(word, "%"), "$") for word in shlex.split(command)]


def literal(word: str, mark: str) -> str:
    parts = word.split(mark * 2)
    assert not any(mark in part for part in parts), f"a {mark} that stands for something else"
    return mark.join(parts)


@pytest.fixture
def verify() -> Callable[[Path], None]:
    """Let systemd read units: it must have nothing to say about them."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        reason = "systemd-analyze is not installed (Debian: systemd), so units cannot be verified"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)

    def read(folder: Path) -> None:
        files = sorted(str(file) for file in folder.iterdir())
        assert files
        done = subprocess.run([tool, "verify", *files], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    return read


def test_the_service_has_every_guardrail(frontmcp: Run, desk: Path, tmp_path: Path) -> None:
    done = frontmcp("systemd", "desk.py")
    assert (done.status, done.err) == (0, "")
    service = section(units(done.out)["desk.service"], "Service")
    assert GUARDRAILS.items() <= service.items()
    assert service["WorkingDirectory"] == str(tmp_path)
    assert section(units(done.out)["desk.service"], "Install") == {"WantedBy": "multi-user.target"}


def test_no_unit_depends_on_another_ones_life(frontmcp: Run, desk: Path) -> None:
    for text in units(frontmcp("systemd", "desk.py").out).values():
        assert not re.search(r"^(Requires|BindsTo|PartOf|Requisite|Wants)=", text, re.MULTILINE)


@pytest.mark.parametrize(("grace", "stop"), [(0, 5), (2, 5), (2.1, 6), (10, 13), (600, 603)])
def test_the_service_manager_waits_longer_than_the_server_needs(
    frontmcp: Run, tmp_path: Path, grace: float, stop: int
) -> None:
    assert stop_seconds(grace) == stop
    write_desk(tmp_path / "desk.py", shutdown_grace=grace)
    service = section(units(frontmcp("systemd", "desk.py").out)["desk.service"], "Service")
    assert service["TimeoutStopSec"] == str(stop)


def test_the_watchdog_asks_whether_the_server_lives_and_not_whether_it_is_busy(
    frontmcp: Run, desk: Path
) -> None:
    told = units(frontmcp("systemd", "desk.py", "--port", "8123").out)
    assert list(told) == ["desk.service", "desk-watchdog.service", "desk-watchdog.timer"]
    watchdog = section(told["desk-watchdog.service"], "Service")
    assert watchdog["Type"] == "oneshot"
    assert "readyz" not in "".join(told.values())
    command = words(watchdog["ExecStart"])
    assert command[-4:] == ["--url", "http://127.0.0.1:8123/healthz", "--unit", "desk.service"]
    assert watchdog["RuntimeDirectory"] == "desk-watchdog"
    assert watchdog["RuntimeDirectoryPreserve"] == "yes"
    timer = section(told["desk-watchdog.timer"], "Timer")
    assert (timer["OnUnitActiveSec"], timer["AccuracySec"]) == ("15s", "1s")


@pytest.mark.parametrize(
    ("host", "asked"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("::1", "[::1]"),
        ("localhost", "localhost"),
    ],
)
def test_the_watchdog_asks_where_the_server_listens(frontmcp: Run, desk: Path, host: str, asked: str) -> None:
    told = units(frontmcp("systemd", "desk.py", "--host", host).out)
    assert f"--url http://{asked}:8000/healthz " in told["desk-watchdog.service"].replace('"', "")


def test_the_watchdog_can_be_left_out(frontmcp: Run, desk: Path) -> None:
    assert list(units(frontmcp("systemd", "desk.py", "--no-watchdog").out)) == ["desk.service"]


def test_units_of_a_user_are_the_users(frontmcp: Run, desk: Path) -> None:
    told = units(frontmcp("systemd", "desk.py", "--user").out)
    assert section(told["desk.service"], "Install") == {"WantedBy": "default.target"}
    assert words(section(told["desk-watchdog.service"], "Service")["ExecStart"])[-1] == "--user"
    done = frontmcp("systemd", "desk.py", "--user", "--run-as", "mcp")
    assert (done.status, done.out) == (2, "")
    told = units(frontmcp("systemd", "desk.py", "--run-as", "mcp").out)
    assert section(told["desk.service"], "Service")["User"] == "mcp"


def test_a_unit_is_named_after_the_server_or_as_one_likes(frontmcp: Run, desk: Path) -> None:
    desk.write_text(desk.read_text().replace('FrontMCP("desk"', 'FrontMCP("Help Desk: 50 % (\\n new)"'))
    told = units(frontmcp("systemd", "desk.py").out)
    assert next(iter(told)) == "Help-Desk-50-new.service"
    unit = section(told["Help-Desk-50-new.service"], "Unit")
    assert unit["Description"] == "Help Desk: 50 %% ( new), an MCP server"
    assert list(units(frontmcp("systemd", "desk.py", "--name", "mcp.service", "--no-watchdog").out)) == [
        "mcp.service"
    ]
    done = frontmcp("systemd", "desk.py", "--name", "../x")
    assert (done.status, done.out) == (2, "")


def test_the_operators_file_is_named_with_its_whole_path(
    frontmcp: Run, desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "limits.toml").write_text("")
    told = units(frontmcp("systemd", "desk.py", "--config", "limits.toml").out)
    command = words(section(told["desk.service"], "Service")["ExecStart"])
    assert command[-4:] == ["--config", f"{tmp_path}/limits.toml", "--", f"{tmp_path}/desk.py"]
    # A unit does not see the variable.
    monkeypatch.setenv("FRONTMCP_CONFIG", "limits.toml")
    assert units(frontmcp("systemd", "desk.py").out) == told


def test_a_server_that_is_wrong_gets_no_unit(frontmcp: Run, desk: Path, tmp_path: Path) -> None:
    (tmp_path / "frontmcp.toml").write_text("[throttle]\nmode = 'lax'\n")
    done = frontmcp("systemd", "desk.py")
    assert (done.status, done.out) == (2, "")


NAMES = [
    "desk.py",
    "a folder/my desk.py",
    "100%/50%n.py",
    'quo"te.py',
    "it's.py",
    "$HOME/${x}.py",
    "b\\a.py",
    "é;.py",
]


@pytest.mark.parametrize("name", NAMES)
def test_systemd_accepts_the_units_of_every_target(
    frontmcp: Run, tmp_path: Path, verify: Callable[[Path], None], name: str
) -> None:
    file = write_desk(tmp_path / "made here" / name)
    done = frontmcp("systemd", f"{file}:server", "--output", "units", "--name", "verified")
    assert (done.status, done.out) == (0, "")
    assert sorted(each.name for each in (tmp_path / "units").iterdir()) == [
        "verified-watchdog.service",
        "verified-watchdog.timer",
        "verified.service",
    ]
    verify(tmp_path / "units")
    unit = (tmp_path / "units" / "verified.service").read_text()
    assert words(section(unit, "Service")["ExecStart"])[-1] == f"{file}:server"


def test_systemd_is_asked_in_earnest(tmp_path: Path, verify: Callable[[Path], None]) -> None:
    (tmp_path / "wrong.service").write_text('[Service]\nExecStart=/bin/true "%y"\nTaskMax=5\n')
    with pytest.raises(AssertionError):
        verify(tmp_path)


def test_a_folder_that_cannot_be_written_to_is_one_sentence(
    frontmcp: Run, desk: Path, tmp_path: Path
) -> None:
    (tmp_path / "units").write_text("a file")
    done = frontmcp("systemd", "desk.py", "--output", "units")
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)


@pytest.mark.slow
def test_the_command_of_the_unit_starts_the_server(
    frontmcp: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "50% of $it"
    write_desk(folder / "my desk.py")
    monkeypatch.chdir(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = units(frontmcp("systemd", "my desk.py", "--port", str(port)).out)
    service = section(told["desk.service"], "Service")
    process = subprocess.Popen(
        words(service["ExecStart"]),
        cwd=service["WorkingDirectory"].replace("%%", "%"),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert answers(f"http://127.0.0.1:{port}/healthz", process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(float(service["TimeoutStopSec"])) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Wait until a server that has just been started answers."""
    while process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            time.sleep(0.1)
    return False
