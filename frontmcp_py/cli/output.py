"""What the commands say, and where: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any, Final

from rich.console import Console

# Wide enough for a table in a pipe or a log, which have no width of their own.
_WIDTH_WITHOUT_TERMINAL: Final = 110


class Failure(Exception):
    """The command cannot do what it was asked; the message is one sentence.

    Args:
        message: What is wrong.
        status: The process's exit status.
    """

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status: int = status


def stdout() -> Console:
    """Where results go."""
    return _console(stderr=False)


def stderr() -> Console:
    """Where progress goes."""
    return _console(stderr=True)


def say(line: str) -> None:
    """One line of a result, as it is."""
    sys.stdout.write(f"{line}\n")


def complain(line: str) -> None:
    """One line about what is wrong."""
    sys.stderr.write(f"frontmcp: {one_line(line)}\n")


def say_json(data: Any) -> None:
    """A result for programs."""
    say(json.dumps(data, indent=2, ensure_ascii=False))


def one_line(text: object) -> str:
    """The text without line breaks and control characters."""
    return " ".join("".join(mark if mark.isprintable() else " " for mark in str(text)).split())


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = _WIDTH_WITHOUT_TERMINAL
    return console
