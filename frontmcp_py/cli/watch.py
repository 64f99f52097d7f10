"""What is seen of a server while it is flooded: its three probes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, cast

import httpx2

from frontmcp_py.cli.here import Place
from frontmcp_py.cli.promises import Metrics, Probe, Seen

PROBE_WITHIN_S: Final = 5.0
"""A probe that takes longer has not been answered: who asks, a watchdog or a load balancer, has given up."""

_PROBES_EVERY_S: Final = 0.25
_REST_WITHIN_S: Final = 10.0


class Watch:
    """Asks the three probes."""

    def __init__(self, place: Place, http: httpx2.AsyncClient, seen: Seen) -> None:
        self.place = place
        self.seen = seen
        self._http = http

    async def look_and_look(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(_PROBES_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Ask each once."""
        health, ready, metrics = await asyncio.gather(
            self._probe("/healthz"), self._probe("/readyz"), self._metrics()
        )
        self.seen.health.append(health)
        self.seen.ready.append(ready)
        if metrics is not None:
            self.seen.metrics.append(metrics)

    async def rest(self) -> None:
        """Wait until the server has come to rest, or for long enough."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _REST_WITHIN_S
        before = self.seen.ready_before.status if self.seen.ready_before else ""
        while True:
            health, ready, metrics = await asyncio.gather(
                self._probe("/healthz"), self._probe("/readyz"), self._metrics()
            )
            still = metrics is None or not (metrics.get("active") or metrics.get("queued"))
            is_fine = ready.answered == 200 and ready.status in ("ready", before)
            if (still and is_fine) or loop.time() > until:
                break
            await asyncio.sleep(_PROBES_EVERY_S)
        self.seen.health.append(health)
        self.seen.ready_after = ready
        if metrics is not None:
            self.seen.metrics.append(metrics)

    async def _probe(self, path: str) -> Probe:
        status, body, took = await self._get(path)
        return Probe(status, took, str(body.get("status", "")))

    async def _metrics(self) -> Metrics | None:
        status, body, _ = await self._get("/metrics")
        return body if status == 200 and "counters" in body else None

    async def _get(self, path: str) -> tuple[int | None, Mapping[str, Any], float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(PROBE_WITHIN_S):
                answer = await self._http.get(
                    f"{self.place.base}{path}", headers={"accept": "application/json"}
                )
        except (httpx2.HTTPError, TimeoutError):
            return None, {}, loop.time() - began
        took = loop.time() - began
        try:
            body: object = answer.json()
        except ValueError:
            body = None
        return answer.status_code, cast("dict[str, Any]", body) if isinstance(body, dict) else {}, took
