"""What an operator asks over HTTP, past the guard: no limit is consumed, no token needed, no address refused.

* `/healthz`: does the process live? A watchdog restarts it when not. Overload is no reason.
* `/readyz`: should more calls be sent here? A load balancer asks.
* `/metrics`: what happens, for people and for Prometheus.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from frontmcp_py.guard import Counts, Guard
from frontmcp_py.http import prometheus
from frontmcp_py.http.gate import Arrivals
from frontmcp_py.http.peer import is_local

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

MetricsAccess: TypeAlias = Literal["local", "public"] | bool
"""Who may read `/metrics`: `local` (or `True`), this machine; `public`, everybody; `False`, nobody: it is not
there."""

METRICS_ACCESS: Final[tuple[Literal["local", "public"], ...]] = ("local", "public")
"""Who may read `/metrics`, where somebody may."""

# What is true now is not true in a cache.
_FRESH: Final = {"cache-control": "no-store"}

_LOCAL_ONLY: Final = (
    "metrics are for this machine only, under its loopback name; FrontMCP(metrics='public') opens them"
)
_NO_TEXT: Final = "this server has no Prometheus text: pip install 'frontmcp-py[metrics]' adds it"


def healthz(service: str) -> Endpoint:
    """`GET /healthz`: 200 while the process lives, overloaded or not."""

    async def answer(_: Request) -> Response:
        return JSONResponse({"ok": True, "service": service}, headers=_FRESH)

    return answer


def readyz(service: str, guard: Guard) -> Endpoint:
    """`GET /readyz`: 200 if more calls should be sent here, else 503; the body says how the server is."""

    async def answer(_: Request) -> Response:
        health = guard.health()
        admission = health.admission
        body = {
            "ok": health.is_ready,
            "service": service,
            "status": health.status,
            "active": health.active,
            "queued": health.waiting,
            "places": health.places,
            "max_active": admission.max_active if admission else None,
            "max_queued": admission.max_queued if admission else None,
        }
        return JSONResponse(body, status_code=200 if health.is_ready else 503, headers=_FRESH)

    return answer


def metrics(service: str, guard: Guard, arrivals: Arrivals, *, public: bool) -> Endpoint:
    """`GET /metrics`: compact JSON, or the text of Prometheus when `Accept` asks for it.

    Args:
        service: The server's name.
        guard: Whose numbers these are.
        arrivals: Requests that have not been let in yet.
        public: Whether anybody may read them, not only who is on this machine.
    """

    async def answer(request: Request) -> Response:
        if not public and not is_local(request.scope):
            return JSONResponse({"ok": False, "error": _LOCAL_ONLY}, status_code=403, headers=_FRESH)
        accept = request.headers.get("accept", "")
        if prometheus.is_asked_for(accept):
            if not prometheus.is_installed():
                return JSONResponse({"ok": False, "error": _NO_TEXT}, status_code=406, headers=_FRESH)
            text, media_type = prometheus.text(guard, arrivals, accept)
            return Response(text, headers={**_FRESH, "content-type": media_type, "vary": "accept"})
        return JSONResponse(snapshot(service, guard, arrivals), headers={**_FRESH, "vary": "accept"})

    return answer


def snapshot(service: str, guard: Guard, arrivals: Arrivals) -> dict[str, Any]:
    """The numbers of `/metrics` as data."""
    now = guard.statistics()
    admission = guard.admission
    return {
        "service": service,
        "status": guard.health().status,
        "limits": {
            "max_active": admission.max_active if admission else None,
            "reserved": admission.reserved if admission else None,
            "max_queued": admission.max_queued if admission else None,
            "queue_timeout_s": admission.queue_timeout if admission else None,
            "worker_threads": guard.worker_threads,
        },
        "active": now.active,
        "running": now.running,
        "abandoned": now.abandoned,
        "queued": now.waiting,
        "asking": now.asking,
        "arriving": arrivals.waiting,
        "places": now.places,
        "peaks": {"active": now.peak_active, "queued": now.peak_waiting, "places": now.peak_places},
        "counters": _counters(now.counts),
        "oldest_running_s": round(now.oldest_running_s, 3),
        "keys": {
            key: {"limit": use.limit, "active": use.active, "queued": use.waiting, "peak": use.peak}
            for key, use in now.keys.items()
        },
        "tools": {
            tool: {"priority": plan.priority, "keys": list(plan.keys), **_counters(now.tools[tool])}
            for tool, plan in guard.plans.items()
        },
        "unknown": now.unknown,
        "storage": {"status": now.storage, "outages": now.outages},
    }


def _counters(counts: Counts) -> Mapping[str, Any]:
    return {
        "submitted": counts.submitted,
        "accepted": counts.accepted,
        "started": counts.started,
        "completed": counts.completed,
        "failed": counts.failed,
        "rejected": dict(counts.rejected),
        "timed_out": counts.timed_out,
        "cancelled": counts.cancelled,
        "cancelled_waiting": counts.cancelled_waiting,
        "would_wait": counts.would_wait,
        "would_reject": dict(counts.would_reject),
    }
