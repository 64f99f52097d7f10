"""`frontmcp check` finds everything that is wrong, at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Done

Run = Callable[..., Done]


def test_a_server_that_is_right_is_one_line(frontmcp: Run, desk: Path) -> None:
    assert frontmcp("check", "desk.py") == Done(0, "desk: 3 tools, no file: all is well\n", "")


def test_the_file_beside_a_server_is_checked_too(frontmcp: Run, desk: Path, tmp_path: Path) -> None:
    (tmp_path / "frontmcp.toml").write_text("[tools.status]\nenabled = false\n")
    done = frontmcp("check", "desk.py")
    assert done == Done(0, f"desk: 2 tools, {tmp_path}/frontmcp.toml: all is well\n", "")


def test_every_error_of_a_file_is_found_at_once(frontmcp: Run, desk: Path, tmp_path: Path) -> None:
    (tmp_path / "limits.toml").write_text(
        """
[throttle]
default_timeout = "30 parsecs"
defualt_rate_limit = "1/minute"

[concurrency]
max_active = 4
reserved = 9

[concurrency.keys]
crm = -3
crn = 2

[tools.look_up]
timout = 3
concurrency = -1

[tools.look_at]
timeout = 3

[surprises]
"""
    )
    done = frontmcp("check", "desk.py", "--config", "limits.toml")
    assert (done.status, done.out) == (1, "")
    lines = [line.removeprefix("frontmcp: limits.toml: ") for line in done.err.splitlines()]
    beginnings = [
        "[throttle]: Throttle.default_timeout",
        "[throttle]: there is no field 'defualt_rate_limit'; did you mean 'default_rate_limit'?",
        "[concurrency]: Admission.reserved",
        "[concurrency.keys]: crm: -3 is not allowed",
        "[tools.look_up]: there is no field 'timout'; did you mean 'timeout'?",
        "[tools.look_up]: concurrency",
        "there is no section 'surprises'",
        "[tools.look_at]: the server has no tool 'look_at'; did you mean 'look_up'?",
        "[concurrency.keys]: no tool names the key 'crn'; did you mean 'crm'?",
    ]
    assert [line[: len(begin)] for line, begin in zip(lines, beginnings, strict=True)] == beginnings


def test_errors_of_the_code_are_found_beside_those_of_the_file(
    frontmcp: Run, desk: Path, tmp_path: Path
) -> None:
    desk.write_text(desk.read_text().replace("timeout=2", "timeout=-2"))
    (tmp_path / "frontmcp.toml").write_text("[throtle]\n")
    done = frontmcp("check", "desk.py", "--json")
    assert done.status == 1
    told = json.loads(done.out)
    assert told["ok"] is False
    assert told["config"] == f"{tmp_path}/frontmcp.toml"
    in_file, in_code = told["problems"]
    assert "there is no section 'throtle'; did you mean 'throttle'?" in in_file
    assert "-2 is not allowed" in in_code
    assert "look_up" in in_code


def test_a_file_that_cannot_be_read_at_all_is_one_error(frontmcp: Run, desk: Path, tmp_path: Path) -> None:
    (tmp_path / "frontmcp.toml").write_text("[throttle\n")
    done = frontmcp("check", "desk.py")
    assert (done.status, done.out, done.err.count("\n")) == (1, "", 1)
    assert "not TOML" in done.err


def test_a_file_that_only_disagrees_with_the_code_is_an_error(
    frontmcp: Run, desk: Path, tmp_path: Path
) -> None:
    (tmp_path / "frontmcp.toml").write_text('[tools.export_tickets]\non_cancel = "cancel"\n')
    done = frontmcp("check", "desk.py")
    assert done.status == 1
    assert "whose thread can only be told" in done.err


def test_a_file_that_was_named_has_to_be_there(frontmcp: Run, desk: Path) -> None:
    done = frontmcp("check", "desk.py", "--config", "nowhere.toml")
    assert (done.status, done.err) == (2, "frontmcp: there is no file nowhere.toml\n")


def test_json_says_that_all_is_well(frontmcp: Run, desk: Path) -> None:
    done = frontmcp("check", "desk.py", "--json")
    assert done.status == 0
    assert json.loads(done.out) == {"ok": True, "problems": [], "config": None}


def test_the_file_that_the_code_names_is_the_one_that_is_checked(
    frontmcp: Run, desk: Path, tmp_path: Path
) -> None:
    text = desk.read_text()
    assert text.count("FrontMCP(") == 1
    desk.write_text(text.replace("FrontMCP(", f'FrontMCP(config="{tmp_path}/other.toml", name=', 1))
    (tmp_path / "frontmcp.toml").write_text("[throtle]\n")
    (tmp_path / "other.toml").write_text('[tools.export_tickets]\ntimeout = "soon"\nenabled = 7\n')
    told = json.loads(frontmcp("check", "desk.py", "--json").out)
    assert told["config"] == f"{tmp_path}/other.toml"
    assert len(told["problems"]) == 2
    assert all("other.toml" in problem for problem in told["problems"])
