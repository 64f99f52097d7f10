"""What operators ask over HTTP: does it live, should it get more calls, what happens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.applications import Starlette

from frontmcp_py import Admission, Concurrency, ConfigurationError, FrontMCP, IPFilter, Throttle
from frontmcp_py.http import prometheus
from frontmcp_py.testing import settle, virtual_time
from tests.cases.asgi import Request, call, code_of_call, serving

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
PROBES = ["/healthz", "/readyz", "/metrics"]


async def ask(
    app: Starlette,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    client: str = "127.0.0.1",
) -> Request:
    request = Request(app, path, method=method, headers={"accept": "*/*", **(headers or {})}, client=client)
    await request.task
    return request


async def body_of(app: Starlette, path: str, **options: Any) -> tuple[int | None, Any]:
    answer = await ask(app, path, **options)
    return answer.status, json.loads(answer.body)


def holding_server(**options: Any) -> tuple[FrontMCP, asyncio.Event]:
    """A server whose tools run until the event."""
    server, gate = FrontMCP("probed", **options), asyncio.Event()

    @server.tool
    async def hold() -> str:
        await gate.wait()
        return "held"

    @server.tool(priority="control", concurrency=Concurrency(3, key="ops"))
    async def look() -> str:
        return "seen"

    return server, gate


SMALL = Throttle(admission=Admission(max_active=2, reserved=1, max_queued=1, queue_timeout=60))


@virtual_time
async def test_an_overloaded_server_lives_is_not_ready_and_tells_so() -> None:
    server, gate = holding_server(throttle=SMALL)
    async with serving(server) as app:
        assert await body_of(app, "/readyz") == (
            200,
            {
                "ok": True,
                "service": "probed",
                "status": "ready",
                "active": 0,
                "queued": 0,
                "places": 0,
                "max_active": 2,
                "max_queued": 1,
            },
        )
        calls = [call(app, "hold") for _ in range(2)]
        await settle()
        status, body = await body_of(app, "/readyz")
        assert (status, body["ok"], body["status"], body["queued"], body["places"]) == (
            503,
            False,
            "overloaded",
            1,
            1,
        )
        assert await body_of(app, "/healthz") == (200, {"ok": True, "service": "probed"})
        status, body = await body_of(app, "/metrics")
        assert (status, body["status"], body["active"], body["queued"]) == (200, "overloaded", 1, 1)
        assert await code_of_call(call(app, "hold")) == "OVERLOADED"
        assert await code_of_call(call(app, "look")) == "ok"
        gate.set()
        assert [await code_of_call(each) for each in calls] == ["ok", "ok"]
        assert (await body_of(app, "/readyz"))[1]["status"] == "ready"


@virtual_time
async def test_metrics_tell_the_limits_the_peaks_the_keys_and_every_tool() -> None:
    server, gate = holding_server(throttle=SMALL, worker_threads=7)
    async with serving(server) as app:
        calls = [call(app, "hold") for _ in range(3)]
        await asyncio.sleep(1.5)
        assert await code_of_call(call(app, "look")) == "ok"
        _, body = await body_of(app, "/metrics")
        assert body["oldest_running_s"] == 1.5
        gate.set()
        for each in calls:
            await each.task
        await call(app, 'no "such" tool').task
        status, body = await body_of(app, "/metrics")
    assert status == 200
    counters = {
        "accepted": 2,
        "cancelled": 0,
        "cancelled_waiting": 0,
        "completed": 2,
        "failed": 0,
        "rejected": {"OVERLOADED": 1},
        "started": 2,
        "submitted": 3,
        "timed_out": 0,
        "would_reject": {},
        "would_wait": 0,
    }
    looked = {**counters, "accepted": 1, "completed": 1, "rejected": {}, "started": 1, "submitted": 1}
    assert body == {
        "service": "probed",
        "status": "ready",
        "limits": {
            "max_active": 2,
            "reserved": 1,
            "max_queued": 1,
            "queue_timeout_s": 60.0,
            "worker_threads": 7,
        },
        "active": 0,
        "running": 0,
        "abandoned": 0,
        "queued": 0,
        "asking": 0,
        "arriving": 0,
        "places": 0,
        "peaks": {"active": 2, "queued": 1, "places": 2},
        "counters": {**counters, "accepted": 3, "completed": 3, "started": 3, "submitted": 4},
        "oldest_running_s": 0.0,
        "keys": {"ops": {"limit": 3, "active": 0, "queued": 0, "peak": 1}},
        "tools": {
            "hold": {"priority": "normal", "keys": [], **counters},
            "look": {"priority": "control", "keys": ["ops"], **looked},
        },
        "unknown": 1,
        "storage": {"status": None, "outages": 0},
    }


@virtual_time
async def test_a_switched_off_throttle_has_no_limits_to_tell() -> None:
    server, _ = holding_server(throttle=False)
    async with serving(server) as app:
        status, body = await body_of(app, "/readyz")
        assert (status, body["status"], body["max_active"], body["max_queued"]) == (
            200,
            "unguarded",
            None,
            None,
        )
        _, body = await body_of(app, "/metrics")
        assert body["limits"]["max_active"] is body["limits"]["reserved"] is None


@virtual_time
@pytest.mark.parametrize("path", PROBES)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_a_probe_answers_other_methods_with_what_it_allows(path: str, method: str) -> None:
    server, _ = holding_server()
    async with serving(server) as app:
        answer = await ask(app, path, method=method)
    assert answer.status == 405
    assert sorted(answer.headers["allow"].split(", ")) == ["GET", "HEAD"]


@virtual_time
@pytest.mark.parametrize("path", PROBES)
async def test_a_probe_may_be_asked_for_its_headers_and_is_not_cached(path: str) -> None:
    server, _ = holding_server()
    async with serving(server) as app:
        answer = await ask(app, path, method="HEAD")
    assert answer.status == 200
    assert answer.headers["cache-control"] == "no-store"


@virtual_time
@pytest.mark.parametrize(
    ("client", "headers", "status"),
    [
        ("127.0.0.1", {"host": "localhost:8000"}, 200),
        ("127.0.0.1", {"host": "127.0.0.1"}, 200),
        ("::1", {"host": "[::1]:8000"}, 200),
        ("203.0.113.9", {"host": "localhost:8000"}, 403),
        ("127.0.0.1", {"host": "evil.example"}, 403),
        ("127.0.0.1", {"host": "localhost.evil.example"}, 403),
        ("127.0.0.1", {"host": "localhost", "x-forwarded-for": "203.0.113.9"}, 403),
    ],
)
async def test_metrics_are_for_this_machine_unless_they_are_public(
    client: str, headers: dict[str, str], status: int
) -> None:
    server, _ = holding_server()
    public, _ = holding_server(metrics="public")
    async with serving(server) as app:
        answer = await ask(app, "/metrics", client=client, headers=headers)
        assert answer.status == status
        assert ("frontmcp" if status == 403 else "counters") in answer.body.decode().lower()
        # Who watches from elsewhere still learns whether it lives.
        assert (await ask(app, "/healthz", client=client, headers=headers)).status == 200
        assert (await ask(app, "/readyz", client=client, headers=headers)).status == 200
    async with serving(public) as app:
        assert (await ask(app, "/metrics", client=client, headers=headers)).status == 200


@virtual_time
async def test_a_server_need_not_have_metrics() -> None:
    server, _ = holding_server(metrics=False)
    async with serving(server) as app:
        assert (await ask(app, "/metrics")).status == 404
        assert (await ask(app, "/readyz")).status == 200


@pytest.mark.parametrize("value", ["publik", 1, "", None, "all"])
def test_who_may_read_metrics_is_checked(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"FrontMCP\.metrics: .*'local' or 'public', True or False"):
        FrontMCP("checked", metrics=value)


@virtual_time
async def test_probes_pass_the_guard_and_the_filter_and_consume_nothing() -> None:
    throttle = Throttle(
        admission=Admission(max_active=2, reserved=0, max_queued=0),
        global_rate_limit="2/hour",
        ip_filter=IPFilter(default="deny"),
    )
    server, gate = holding_server(throttle=throttle)
    held = [asyncio.create_task(_call_in_process(server)) for _ in range(2)]
    async with serving(server) as app:
        await settle()
        before = server.guard.statistics()
        assert before.places == 2
        for path, expected in zip(PROBES, (200, 503, 200), strict=True):
            for _ in range(100):
                assert (await ask(app, path)).status == expected
        assert server.guard.statistics() == before
        assert (await ask(app, "/mcp", method="POST")).status == 403
        gate.set()
        await asyncio.gather(*held)


async def _call_in_process(server: FrontMCP) -> None:
    async with server.connect() as client:
        await client.call_tool("hold", {})


# ------------------------------------------------------------------------------ the text of Prometheus


@virtual_time
@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        ("*/*", "application/json"),
        ("application/json", "application/json"),
        ("application/json, text/plain;q=0.5", "application/json"),
        ("text/html, */*", "application/json"),
        ("text/plain;q=0", "application/json"),
        ("text/plain;q=many", "application/json"),
        ("text/plain", "text/plain"),
        ("text/plain;version=0.0.4;q=0.5, */*;q=0.1", "text/plain"),
        ("application/openmetrics-text", "application/openmetrics-text"),
        (PROMETHEUS, "application/openmetrics-text"),
    ],
)
async def test_metrics_are_text_for_who_asks_for_text(accept: str, media_type: str) -> None:
    server, _ = holding_server()
    async with serving(server) as app:
        answer = await ask(app, "/metrics", headers={"accept": accept})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith(media_type)
    assert answer.headers["vary"] == "accept"


@virtual_time
async def test_the_text_says_what_the_json_says() -> None:
    server, gate = holding_server(throttle=SMALL)
    async with serving(server) as app:
        calls = [call(app, "hold") for _ in range(3)]
        await settle()
        for accept, parse in (("text/plain", parse_text), (PROMETHEUS, parse_openmetrics)):
            answer = await ask(app, "/metrics", headers={"accept": accept})
            samples = {
                (sample.name, *sorted(sample.labels.items())): sample.value
                for family in parse(answer.body.decode())
                for sample in family.samples
            }
            hold = ("tool", "hold")
            assert samples["frontmcp_active",] == 1
            assert samples["frontmcp_waiting",] == 1
            assert samples["frontmcp_limit", ("name", "max_active")] == 2
            assert samples["frontmcp_key_limit", ("key", "ops")] == 3
            assert samples["frontmcp_calls_submitted_total", hold] == 3
            assert samples["frontmcp_calls_started_total", hold] == 1
            assert samples["frontmcp_calls_rejected_total", ("code", "OVERLOADED"), hold] == 1
            assert samples["frontmcp_calls_ended_total", ("outcome", "completed"), hold] == 0
        gate.set()
        for each in calls:
            await each.task


@virtual_time
async def test_no_caller_can_make_series() -> None:
    """100 addresses, and 1,000 names that are no tools, with quotes in them: as many series as before."""
    server, gate = holding_server(
        throttle=Throttle(default_rate_limit={"max_requests": 1, "partition_by": "ip"})
    )
    gate.set()
    async with serving(server) as app:

        async def series() -> int:
            answer = await ask(app, "/metrics", headers={"accept": "text/plain"})
            return sum(len(family.samples) for family in parse_text(answer.body.decode()))

        for client in ("10.0.0.1", "10.0.0.1"):
            await call(app, "hold", client=client).task
        before = await series()
        for number in range(100):
            await call(app, "hold", client=f"10.1.0.{number}").task
        for number in range(1000):
            await call(app, f'tool "{number}"}} 1').task
        assert await series() == before
        _, body = await body_of(app, "/metrics")
        assert body["unknown"] == 1000


@virtual_time
async def test_without_the_extra_text_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prometheus, "is_installed", lambda: False)
    server, _ = holding_server()
    async with serving(server) as app:
        status, body = await body_of(app, "/metrics", headers={"accept": "text/plain"})
        assert status == 406
        assert "pip install 'frontmcp-py[metrics]'" in body["error"]
        assert (await body_of(app, "/metrics"))[0] == 200
