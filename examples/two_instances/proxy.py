"""A load balancer in a few lines: it hands requests to several servers in turn, and says to which.

python examples/two_instances/proxy.py --port 8000 a=http://127.0.0.1:8001 b=http://127.0.0.1:8002

Its answers have a header, `X-Served-By`, with the name of the instance. It is here to be read: for your own
servers, use one that is made for it, such as nginx.
"""

import argparse
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

SERVED_BY = "X-Served-By"

# What belongs to one connection is not passed on to the next. `Host` has to be the one that is called.
OWN = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


def balancer(instances: Mapping[str, str]) -> Starlette:
    """An app that passes every request on to one of the instances.

    Each method of the protocol goes round by itself, so that calls alternate whatever is asked between them.

    Args:
        instances: The addresses by name.
    """
    turns: defaultdict[str, Iterator[str]] = defaultdict(lambda: itertools.cycle(instances))
    # No timeout: how long a call may take is for its tool to say. trust_env: this machine needs no proxy.
    http = httpx2.AsyncClient(timeout=None, trust_env=False)

    async def pass_on(request: Request) -> Response:
        body = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in OWN}
        turn = turns[request.headers.get("mcp-method", "")]
        for name in itertools.islice(turn, len(instances)):
            url = instances[name] + request.url.path
            try:
                answer = await http.send(
                    http.build_request(request.method, url, headers=headers, content=body), stream=True
                )
            except httpx2.ConnectError:
                continue  # nobody has seen this call, so another may have it
            except httpx2.TransportError:
                # It may have run, in whole or in part. Only who called it can know whether to call it again.
                return failed(502, f"instance {name} is gone; what it was doing may have been done", name)
            kept = {key: value for key, value in answer.headers.items() if key not in OWN}
            return StreamingResponse(
                answer.aiter_raw(),
                answer.status_code,
                {**kept, SERVED_BY: name},
                background=BackgroundTask(answer.aclose),
            )
        return failed(503, "no instance can be reached")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with http:
            yield

    return Starlette(
        routes=[Route("/{path:path}", pass_on, methods=["GET", "POST", "DELETE"])], lifespan=lifespan
    )


def failed(status: int, message: str, name: str | None = None) -> Response:
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": message}}
    return JSONResponse(error, status, {SERVED_BY: name} if name else None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Hand requests to several servers in turn.")
    parser.add_argument("--port", type=int, required=True, help="where to listen on 127.0.0.1")
    parser.add_argument("instances", nargs="+", metavar="NAME=URL", help="a server")
    options = parser.parse_args()
    instances = dict(each.split("=", 1) for each in options.instances)
    uvicorn.run(balancer(instances), port=options.port, log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
