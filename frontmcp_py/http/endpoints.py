"""What an operator asks over HTTP, past the guard: no limit is consumed and no token needed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response


def healthz(service: str) -> Callable[[Request], Awaitable[Response]]:
    """`GET /healthz`: 200 while the process lives, overloaded or not."""

    async def answer(_: Request) -> Response:
        return JSONResponse({"ok": True, "service": service})

    return answer
