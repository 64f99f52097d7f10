"""One look at a server's liveness, and a restart after the third failure in a row.

`frontmcp systemd` writes units that run this file every 15 seconds, as a program of its own that needs
nothing but the standard library: it has to work when the server's environment does not, and starting it must
be cheap. It asks `/healthz`, which answers while the process lives, and never `/readyz`: a busy server is
healthy.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from urllib.parse import urlsplit

FAILURES = 3
"""Failures in a row before a restart."""

APART_S = 15
"""Seconds from one look to the next; the timer's business."""

RESTARTS = 3
"""Restarts within `WITHIN_S`. What three of them have not cured, a fourth will not."""

WITHIN_S = 3600.0

PATIENCE_S = 5
"""Seconds that one look may take, the whole answer included."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Look once.

    The count of failures and the times of restarts are kept in the folder that `$RUNTIME_DIRECTORY` names.

    Returns:
        The exit status: 0, or 1 if the restart could not be asked for.
    """
    parser = argparse.ArgumentParser(description="Restart a unit whose server does not answer.")
    parser.add_argument("--url", required=True, help="the server's /healthz")
    parser.add_argument("--unit", required=True, help="the unit to restart")
    parser.add_argument("--user", action="store_true", help="it is a unit of the user's service manager")
    options = parser.parse_args(arguments)
    place = Path(os.environ.get("RUNTIME_DIRECTORY", ".")) / "state.json"
    failures, restarts = _remembered(place)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    restarts = [each for each in restarts if now - WITHIN_S < each <= now]
    problem = look(options.url)
    status = 0
    if problem is None:
        failures = 0
    else:
        failures += 1
        _log(f"{options.url}: {problem} (failure {failures} of {FAILURES})")
    if failures >= FAILURES:
        systemctl = ["systemctl", *(["--user"] if options.user else [])]
        if subprocess.run([*systemctl, "is-active", "--quiet", options.unit], check=False).returncode:
            # Somebody has stopped it, or it is being started or stopped right now.
            _log(f"{options.unit} is not active; it is left alone")
            failures = 0
        elif len(restarts) >= RESTARTS:
            _log(f"{options.unit} was restarted {RESTARTS} times within the last hour; it is left alone")
        else:
            _log(f"restarting {options.unit}")
            failures = 0
            restarts.append(now)
            asked = subprocess.run([*systemctl, "--no-block", "try-restart", options.unit], check=False)
            status = 1 if asked.returncode else 0
    _remember(place, failures, restarts)
    return status


def look(url: str) -> str | None:
    """Ask once.

    Returns:
        `None` if the answer is 200, else what is wrong.
    """
    parts = urlsplit(url)
    before = signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(PATIENCE_S)
    try:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        try:
            connection.request("GET", parts.path)
            answer = connection.getresponse()
            answer.read()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        return f"no answer: {str(error) or type(error).__name__}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return None if answer.status == 200 else f"the answer is {answer.status}"


def _too_late(_: int, __: FrameType | None) -> NoReturn:
    raise TimeoutError(f"not within {PATIENCE_S} seconds")


def _remembered(place: Path) -> tuple[int, list[float]]:
    try:
        kept: Any = json.loads(place.read_text(encoding="utf-8"))
        return int(kept["failures"]), [float(each) for each in kept["restarts"]]
    except (OSError, ValueError, TypeError, KeyError):
        return 0, []


def _remember(place: Path, failures: int, restarts: list[float]) -> None:
    # Written aside and moved, so that a half-written file is never read.
    aside = place.with_suffix(".new")
    aside.write_text(json.dumps({"failures": failures, "restarts": restarts}), encoding="utf-8")
    aside.replace(place)


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
