"""The `frontmcp` command: one file per command.

`main` needs nothing but the standard library until it knows that the extra `[cli]` is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

_EXTRA: Final = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and end the process with its exit status.

    Args:
        arguments: What stands behind the command's name; by default, what the process was given.

    Raises:
        SystemExit: Always. The status is 0 when all is well, 1 when `check` or `stress` have found something
            or a call of `host run` has not succeeded, 2 for an error, which is one sentence on stderr, and
            128 and the signal's number when it was interrupted.
    """
    try:
        from frontmcp_py.cli.app import invoke
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        sys.stderr.write(
            f'frontmcp: the command line needs {missing}; pip install "frontmcp-py[cli]" brings it\n'
        )
        sys.exit(2)
    sys.exit(invoke(list(sys.argv[1:] if arguments is None else arguments)))
