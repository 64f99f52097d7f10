"""`frontmcp check`: is the configuration right?"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from frontmcp_py.cli import target as targets
from frontmcp_py.cli.configured import CONFIG_HELP, file_of, load, named_file
from frontmcp_py.cli.output import Failure, complain, one_line, say, say_json
from frontmcp_py.config import Overrides, Settings, is_bare_throttle
from frontmcp_py.errors import ConfigurationError
from frontmcp_py.server import FrontMCP

_KEYS = "keys"


def check(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=targets.HELP, show_default=False)],
    config: Annotated[Path | None, typer.Option(metavar="FILE", help=CONFIG_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find errors in a server's limits and in its operator's file; exit with 1 if there are any."""
    place = targets.Target.of(target)
    if config is not None and not config.exists():
        raise Failure(f"there is no file {config}")
    # Without a file the code's own errors can be found, whatever the file says.
    of_code: list[str] = []
    server = _loaded(place, Path(os.devnull), of_code)
    file = named_file(config) or file_of(place, server)
    if file is not None and not file.exists():
        file = None
    document = _document(file) if file is not None else None
    problems = [] if file is None or document is None else list(problems_of_file(file, document))
    problems += of_code
    if file is not None and not problems:
        server = _loaded(place, config, problems)
    if server is not None:
        names = Settings(overrides=Overrides(_names(document or {}), str(file))) if problems else None
        problems += server.mcp.config_problems(names)
    if as_json:
        say_json({"ok": not problems, "problems": problems, "config": None if file is None else str(file)})
    elif problems:
        for problem in problems:
            complain(problem)
    elif server is not None:
        tools = len(server.mcp.entries)
        counted = "1 tool" if tools == 1 else f"{tools} tools"
        say(one_line(f"{server.name}: {counted}, {'no file' if file is None else file}: all is well"))
    if problems:
        raise typer.Exit(1)


def problems_of_file(file: Path, document: Mapping[str, Any]) -> Iterator[str]:
    """Every error of an operator's file by itself: each field is read apart from the others.

    Args:
        file: Its path, for the messages.
        document: What it holds.
    """
    found: dict[str, None] = {}
    for piece in _pieces(document):
        try:
            Overrides(piece, str(file))
        except ConfigurationError as error:
            found[str(error)] = None
    yield from found


def _document(file: Path) -> Mapping[str, Any] | None:
    """What a file holds; `None` if it cannot be read at all, which is one error that loading it tells."""
    read: Callable[[str], object] = json.loads if file.suffix.lower() == ".json" else tomllib.loads
    try:
        document = read(file.read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    return cast("Mapping[str, Any]", document) if isinstance(document, Mapping) else None


def _names(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tools and keys that a file names, and nothing that it says about them."""
    tools = _table(document.get("tools"))
    keys = _table(_table(document.get("concurrency")).get(_KEYS))
    return {
        "tools": {name: {} for name in tools if name},
        "concurrency": {_KEYS: {key: 0 for key in keys if key}},
    }


def _table(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _pieces(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The file in the smallest parts that can be read by themselves."""
    if is_bare_throttle(document):
        document = {"throttle": document}
    for section, content in document.items():
        fields = _table(content)
        if section == "tools" and fields:
            for name, table in fields.items():
                said = _table(table)
                yield from ({section: {name: {field: said[field]}}} for field in said)
                if not said:
                    yield {section: {name: table}}
        elif section == "throttle" and fields:
            yield from ({section: {field: value}} for field, value in fields.items())
        elif section == "concurrency" and fields:
            keys = fields.get(_KEYS, {})
            # The numbers of admission must agree with each other, so they stay together.
            yield {section: {name: value for name, value in fields.items() if name != _KEYS}}
            yield from ({section: {_KEYS: {key: number}}} for key, number in _table(keys).items())
            if not _table(keys):
                yield {section: {_KEYS: keys}}
        else:
            yield {section: content}


def _loaded(place: targets.Target, config: Path | None, problems: list[str]) -> FrontMCP | None:
    try:
        return load(place, config)
    except ConfigurationError as error:
        problems.append(str(error))
        return None
