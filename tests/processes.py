"""The process table, for tests that look for what a command has left behind."""

from __future__ import annotations

import os
from pathlib import Path


def alive(word: str) -> list[int]:
    """The processes that have this in their arguments, without this one; a zombie has none."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            is_another = entry.name.isdigit() and int(entry.name) != os.getpid()
            if is_another and word.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            # It has gone.
            continue
    return found


def is_sleep(pid: int) -> bool:
    """Whether a process has come as far as to be a `sleep`."""
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    except OSError:
        return False
