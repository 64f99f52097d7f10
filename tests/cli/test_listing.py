"""`frontmcp list` tells which limits are in force and who said so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Done

Run = Callable[..., Done]

FILE = """
[throttle]
global_rate_limit = "100/minute"
default_concurrency = 7

[concurrency]
max_active = 20

[concurrency.keys]
crm = 2

[tools.export_tickets]
rate_limit = "off"

[tools.status]
enabled = false
"""


def table(text: str) -> list[list[str]]:
    """The cells of a table, whose columns are two blanks apart."""
    lines = text.partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def test_the_limits_of_the_code(frontmcp: Run, desk: Path) -> None:
    done = frontmcp("list", "desk.py")
    assert (done.status, done.err) == (0, "")
    assert table(done.out) == [
        ["tool", "rate limit", "at once", "timeout", "priority"],
        ["export_tickets", "2 per h by user_id [code]", "-", "30 s [default]", "normal"],
        ["look_up", "-", "3, key crm, waits 5 s [code]", "2 s [code]", "normal"],
        ["status", "-", "-", "-", "control [code]"],
    ]
    assert done.out.rstrip().endswith(
        "admission: 48 at once, 8 of these for control calls; 64 wait, 30 s at most"
    )


def test_a_shared_store_is_told_without_its_password(frontmcp: Run, tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text(
        "from frontmcp_py import FrontMCP\n"
        'uri = "redis://user:secret@127.0.0.1:1/0"\n'
        'server = FrontMCP("desk", throttle={"storage": uri, "fallback": "error"})\n'
    )
    done = frontmcp("list", "shared.py")
    last = "shared in redis://127.0.0.1:1/0 [code]; while it is away, calls are refused"
    assert done.out.rstrip().splitlines()[-1] == last
    assert "secret" not in done.out


def test_the_limits_of_the_file_beside_a_server(frontmcp: Run, desk: Path, tmp_path: Path) -> None:
    (tmp_path / "frontmcp.toml").write_text(FILE)
    done = frontmcp("list", "desk.py")
    assert table(done.out)[1:] == [
        ["export_tickets", "- [file]", "7 [default (file)]", "30 s [default]", "normal"],
        ["look_up", "-", "2, key crm, waits 5 s [key (file)]", "2 s [code]", "normal"],
        ["status (off, file)", "-", "-", "-", "control [code]"],
    ]
    assert done.out.rstrip().splitlines()[-2:] == [
        "all tools together: 100 per min [global (file)]",
        "admission: 20 at once, 8 of these for control calls; 64 wait, 30 s at most [file]",
    ]


def test_a_file_that_is_named_comes_before_the_one_of_the_environment(
    frontmcp: Run, desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named.toml").write_text("[tools.look_up]\ntimeout = 3\n")
    (tmp_path / "variable.toml").write_text("[tools.look_up]\ntimeout = 4\n")
    monkeypatch.setenv("FRONTMCP_CONFIG", str(tmp_path / "variable.toml"))
    assert "4 s [file]" in frontmcp("list", "desk.py").out
    assert "3 s [file]" in frontmcp("list", "desk.py", "--config", "named.toml").out


def test_json_has_every_limit_with_its_origin(frontmcp: Run, desk: Path, tmp_path: Path) -> None:
    (tmp_path / "limits.toml").write_text(FILE)
    told = json.loads(frontmcp("list", "desk.py", "--config", "limits.toml", "--json").out)
    assert (told["service"], told["config"]) == ("desk", "limits.toml")
    assert told["admission"] == {"max_active": 20, "reserved": 8, "max_queued": 64, "queue_timeout": 30}
    tools = {tool["name"]: tool for tool in told["tools"]}
    slot = {
        "max_concurrent": 2,
        "key": "crm",
        "partition_by": "global",
        "queue_timeout": 5,
        "max_queued": None,
    }
    assert tools["look_up"]["concurrency"] == {"value": [slot], "from": "key (file)"}
    assert tools["look_up"]["timeout"] == {"value": {"execute": 2, "cancel_after": None}, "from": "code"}
    assert tools["status"]["enabled"] == {"value": False, "from": "file"}
    assert tools["export_tickets"]["rate_limit"] == {"value": [], "from": "file"}


def test_a_partition_function_is_told_by_its_name(frontmcp: Run, desk: Path) -> None:
    desk.write_text(
        desk.read_text()
        .replace('partition_by="user_id"', "partition_by=tenant")
        .replace('app = App("desk")', 'app = App("desk")\n\n\ndef tenant(call):\n    return "one"\n')
    )
    assert "2 per h by function [code]" in frontmcp("list", "desk.py").out
    told = json.loads(frontmcp("list", "desk.py", "--json").out)
    assert told["tools"][0]["rate_limit"]["value"][0]["partition_by"] == "tenant"


def test_without_a_throttle_nothing_holds_but_own_timeouts(
    frontmcp: Run, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRONTMCP_THROTTLE", "off")
    done = frontmcp("list", "desk.py")
    off = "- [off (environment)]"
    assert table(done.out)[2] == ["look_up", off, off, "2 s [code]", "normal"]
    assert "the throttle is off [environment]: no limits but tools' own timeouts" in done.out


def test_limits_that_are_only_observed_and_admission_that_is_off_are_said(
    frontmcp: Run, desk: Path, tmp_path: Path
) -> None:
    (tmp_path / "frontmcp.toml").write_text('concurrency = "off"\n[throttle]\nmode = "observe"\n')
    lines = frontmcp("list", "desk.py").out.splitlines()
    assert lines[-2:] == [
        "admission: off [file]",
        "nothing is refused: the limits are only observed [file]",
    ]


def test_a_file_that_names_what_the_server_does_not_have_is_an_error(
    frontmcp: Run, desk: Path, tmp_path: Path
) -> None:
    (tmp_path / "frontmcp.toml").write_text("[tools.lookup]\ntimeout = 3\n")
    done = frontmcp("list", "desk.py")
    assert (done.status, done.out) == (2, "")
    assert "the server has no tool 'lookup'; did you mean 'look_up'?" in done.err
