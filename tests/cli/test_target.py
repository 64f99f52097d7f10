"""TARGET: what is found, and what is said when it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from frontmcp_py.cli.output import Failure
from frontmcp_py.cli.target import Target
from tests.cli.conftest import Done, command

Run = Callable[..., Done]

FINE = "3 tools"


def complaint(done: Done) -> str:
    """The one line that a failed command says."""
    assert (done.status, done.out) == (2, "")
    assert done.err.count("\n") == 1
    return done.err.removeprefix("frontmcp: ").rstrip("\n")


@pytest.mark.parametrize("target", ["desk.py:server", "desk.py", "desk:server", "desk", "./desk.py:server"])
def test_a_server_is_named_by_its_file_or_its_module(frontmcp: Run, desk: Path, target: str) -> None:
    done = frontmcp("check", target)
    assert (done.status, done.err) == (0, "")
    assert FINE in done.out


def test_an_object_may_be_an_attribute_of_another(frontmcp: Run, desk: Path) -> None:
    desk.write_text(f"{desk.read_text()}\nclass place:\n    inside = server\n")
    assert FINE in frontmcp("check", "desk:place.inside").out


def test_the_folder_of_a_file_is_importable(frontmcp: Run, tmp_path: Path) -> None:
    folder = tmp_path / "else where"
    folder.mkdir()
    (folder / "names.py").write_text('NAME = "from beside"\n')
    (folder / "main.py").write_text(
        "from frontmcp_py import FrontMCP\nfrom names import NAME\nserver = FrontMCP(NAME)\n"
    )
    assert "from beside" in frontmcp("check", "else where/main.py").out


def test_a_file_may_have_the_name_of_a_module_that_is_loaded_already(frontmcp: Run, desk: Path) -> None:
    import json

    desk.rename(desk.with_name("json.py"))
    assert FINE in frontmcp("check", "json.py").out
    assert json.dumps({}) == "{}"


def test_one_server_under_two_names_is_one_server(frontmcp: Run, desk: Path) -> None:
    desk.write_text(f"{desk.read_text()}\nsame = server\n")
    assert frontmcp("check", "desk.py").status == 0


def test_of_two_servers_one_has_to_be_named(frontmcp: Run, desk: Path) -> None:
    desk.write_text(f"{desk.read_text()}\nother = FrontMCP('other')\n")
    assert (
        complaint(frontmcp("list", "desk.py"))
        == "desk.py: there is more than one server in it; its servers: server, other"
    )
    assert frontmcp("list", "desk.py:other").status == 0


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere.py", "there is no file nowhere.py"),
        ("nowhere", "there is no module 'nowhere' in {here} or on Python's path"),
        ("nowhere.at.all:server", "there is no module 'nowhere' in {here} or on Python's path"),
        ("desk:nothing", "desk:nothing: there is no 'nothing' in it; its servers: server"),
        (
            "desk:server.nothing",
            "desk:server.nothing: there is no 'server.nothing' in it; its servers: server",
        ),
        ("desk:app", "desk:app: 'app' is of type App, not FrontMCP; its servers: server"),
        ("json", "json: there is no FrontMCP server in it"),
        ("http://127.0.0.1:8000", "'http://127.0.0.1:8000' is an address; give a server as {forms}"),
        ("127.0.0.1:8000", "'127.0.0.1:8000': '8000' is no name of an object; give {forms}"),
        ("my server", "'my server' is no server; give {forms}"),
        ("", "'' is no server; give {forms}"),
    ],
)
def test_what_is_not_there_is_said_in_one_sentence(
    frontmcp: Run, desk: Path, tmp_path: Path, target: str, said: str
) -> None:
    expected = said.format(here=tmp_path, forms="module:object or path.py:object")
    assert complaint(frontmcp("check", target)) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere' ({file}, line 1)"),
        ("x = 1\nx / 0", "ZeroDivisionError: division by zero ({file}, line 2)"),
        ("x = (", "SyntaxError: '(' was never closed ({file}, line 1)"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines ({file}, line 1)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_the_line(
    frontmcp: Run, tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    for target in ("broken.py", "broken"):
        expected = f"{target} cannot be imported: {said.format(file=file)}"
        assert complaint(frontmcp("list", target)) == expected


def test_a_module_that_ends_the_process_is_told_how_not_to(frontmcp: Run, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(0)\n")
    assert complaint(frontmcp("list", "ends.py")) == (
        "importing ends.py ended the process; what it does when it is run belongs under "
        'if __name__ == "__main__":'
    )


def test_the_traceback_is_shown_on_demand(frontmcp: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\nx / 0\n")
    done = frontmcp("--debug", "list", "broken.py")
    assert done.status == 2
    assert "Traceback (most recent call last)" in done.err
    assert done.err.splitlines()[-1].startswith("frontmcp: broken.py cannot be imported")


@pytest.mark.slow
def test_what_a_module_prints_while_it_is_imported_stays_out_of_the_result(
    tmp_path: Path, desk: Path
) -> None:
    noise = "import subprocess\nprint('noise of python')\nsubprocess.run(['echo', 'noise of a child'])\n"
    desk.write_text(noise + desk.read_text())
    done = command("list", "desk.py", "--json", cwd=tmp_path)
    assert done.status == 0
    assert done.out.startswith("{")
    assert "noise" not in done.out
    assert "noise of python" in done.err
    assert "noise of a child" in done.err


def test_a_target_for_another_folder_is_written_with_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Target.of("a/b.py:c").absolute == f"{tmp_path}/a/b.py:c"
    assert Target.of("a/b.py").absolute == f"{tmp_path}/a/b.py"
    assert Target.of("a.b:c").absolute == "a.b:c"
    with pytest.raises(Failure, match="no name of an object"):
        Target.of("a/b.py:")
