"""The watchdog restarts what does not answer three times in a row, at most three times an hour."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from frontmcp_py.cli import watchdog
from tests.cli.conftest import Done

UNIT = "desk.service"
ASKS = f"--user is-active --quiet {UNIT}"
RESTARTS = f"--user --no-block try-restart {UNIT}"


@contextlib.contextmanager
def server(status: int) -> Iterator[str]:
    """A server that answers every question alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_address[1]}/healthz"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


@pytest.fixture
def dead() -> str:
    """An address where nobody answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/healthz"


class Machine:
    """What the watchdog meets: a folder that outlives it, and a `systemctl` that notes what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "run" / "state.json"
        self.state.parent.mkdir()
        self._asked = folder / "asked"
        self._inactive = folder / "inactive"
        self._refuses = folder / "refuses"
        self._path = folder / "bin"
        self._path.mkdir()
        systemctl = self._path / "systemctl"
        systemctl.write_text(
            "#!/bin/sh\n"
            f"echo \"$*\" >>'{self._asked}'\n"
            f"case $* in *is-active*) no='{self._inactive}' ;; *) no='{self._refuses}' ;; esac\n"
            'test ! -e "$no"\n'
        )
        systemctl.chmod(0o755)

    def stop(self) -> None:
        self._inactive.touch()

    def refuse(self) -> None:
        self._refuses.touch()

    def asked(self) -> list[str]:
        """What systemctl was asked since this was last asked."""
        lines = self._asked.read_text().splitlines() if self._asked.exists() else []
        self._asked.unlink(missing_ok=True)
        return lines

    def look(self, url: str, *command: str) -> tuple[int, str]:
        """One look, as the unit has it done."""
        command = command or (
            *(sys.executable, "-I", watchdog.__file__),
            *("--url", url, "--unit", UNIT, "--user"),
        )
        done = subprocess.run(
            command,
            env={"PATH": f"{self._path}:{os.environ['PATH']}", "RUNTIME_DIRECTORY": str(self.state.parent)},
            cwd=self.state.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stderr

    def age(self, seconds: float) -> None:
        """Let the restarts have been so much longer ago."""
        kept = json.loads(self.state.read_text())
        kept["restarts"] = [each - seconds for each in kept["restarts"]]
        self.state.write_text(json.dumps(kept))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_server_that_answers_is_left_alone(machine: Machine) -> None:
    with server(200) as url:
        for _ in range(4):
            assert machine.look(url) == (0, "")
    assert machine.asked() == []


def test_the_third_failure_in_a_row_restarts_the_unit(machine: Machine, dead: str) -> None:
    for failure in (1, 2):
        status, said = machine.look(dead)
        assert status == 0
        assert said.startswith(f"{dead}: no answer: ")
        assert f"(failure {failure} of 3)" in said
        assert machine.asked() == []
    status, said = machine.look(dead)
    assert (status, said.splitlines()[-1]) == (0, "restarting desk.service")
    assert machine.asked() == [ASKS, RESTARTS]
    # It counts anew: the server has time to start.
    machine.look(dead)
    machine.look(dead)
    assert machine.asked() == []
    machine.look(dead)
    assert machine.asked() == [ASKS, RESTARTS]


def test_one_answer_in_between_makes_good_for_failures(machine: Machine, dead: str) -> None:
    with server(200) as url:
        for each in (dead, dead, url, dead, dead, url):
            machine.look(each)
    assert machine.asked() == []


@pytest.mark.parametrize("status", [500, 503, 404, 302, 204])
def test_every_answer_but_200_is_a_failure(status: int) -> None:
    with server(status) as url:
        assert watchdog.look(url) == f"the answer is {status}"


def test_what_is_no_http_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            with listening.accept()[0] as connection:
                connection.sendall(b"hello\r\n\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        said = watchdog.look(f"http://127.0.0.1:{listening.getsockname()[1]}/healthz")
        thread.join()
    assert said is not None
    assert said.startswith("no answer")


@pytest.mark.slow
@pytest.mark.parametrize("drips", [False, True])
def test_a_server_that_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch, drips: bool) -> None:
    """A socket's own timeout would begin anew with every byte."""
    monkeypatch.setattr(watchdog, "PATIENCE_S", 1)
    gone = threading.Event()

    def drip() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            while not gone.wait(0.2):
                connection.sendall(b"HTTP/1.1 200 OK\r\n"[:1] if drips else b"")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip)
        thread.start()
        said = watchdog.look(f"http://127.0.0.1:{listening.getsockname()[1]}/healthz")
        gone.set()
        thread.join()
    assert said == "no answer: not within 1 seconds"


def test_a_unit_that_is_not_running_is_not_started(machine: Machine, dead: str) -> None:
    machine.stop()
    for _ in range(3):
        status, said = machine.look(dead)
    assert (status, said.splitlines()[-1]) == (0, "desk.service is not active; it is left alone")
    assert machine.asked() == [ASKS]


@pytest.mark.slow
def test_the_fourth_restart_within_an_hour_does_not_happen(machine: Machine, dead: str) -> None:
    for _ in range(9):
        machine.look(dead)
    assert machine.asked().count(RESTARTS) == 3
    for _ in range(4):
        status, said = machine.look(dead)
    assert status == 0
    assert (
        said.splitlines()[-1] == "desk.service was restarted 3 times within the last hour; it is left alone"
    )
    assert RESTARTS not in machine.asked()
    machine.age(3000)
    machine.look(dead)
    assert RESTARTS not in machine.asked()
    machine.age(601)
    machine.look(dead)
    assert machine.asked() == [ASKS, RESTARTS]


def test_a_restart_that_is_refused_is_a_failure_of_the_watchdog(machine: Machine, dead: str) -> None:
    machine.refuse()
    statuses = [machine.look(dead)[0] for _ in range(3)]
    assert statuses == [0, 0, 1]


@pytest.mark.parametrize("kept", ["", "{", "[]", '{"failures": "many", "restarts": []}', '{"failures": 2}'])
def test_a_count_that_cannot_be_read_begins_anew(machine: Machine, dead: str, kept: str) -> None:
    machine.state.write_text(kept)
    status, said = machine.look(dead)
    assert status == 0
    assert "(failure 1 of 3)" in said
    assert json.loads(machine.state.read_text()) == {"failures": 1, "restarts": []}


def test_restarts_of_a_time_to_come_do_not_count(machine: Machine, dead: str) -> None:
    """They are of another boot, whose clock had gone on for longer."""
    machine.state.write_text('{"failures": 2, "restarts": [1e12, 1e12, 1e12]}')
    machine.look(dead)
    assert machine.asked() == [ASKS, RESTARTS]


def test_the_command_of_the_unit_does_this(
    frontmcp: Callable[..., Done], desk: Path, machine: Machine, dead: str
) -> None:
    from tests.cli.test_systemd import section, units, words

    port = dead.rpartition(":")[2].removesuffix("/healthz")
    told = units(frontmcp("systemd", "desk.py", "--port", port, "--user").out)
    command = words(section(told["desk-watchdog.service"], "Service")["ExecStart"])
    for _ in range(3):
        assert machine.look(dead, *command)[0] == 0
    assert machine.asked() == [ASKS, RESTARTS]
