"""The guard's numbers in the text format of Prometheus, by `prometheus-client` (the extra `metrics`).

Series exist for tools that are served and for the guard's own codes, so no caller can make new ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, get_args

from frontmcp_py.guard import Guard, Statistics
from frontmcp_py.guard.health import Status
from frontmcp_py.http.gate import Arrivals

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_TEXT: Final = ("text/plain", "application/openmetrics-text")
_JSON: Final = "application/json"

_GAUGES: Final = (
    ("active", "Calls whose work has not ended."),
    ("running", "Calls that run and have not been answered."),
    ("abandoned", "Calls that have been answered, but whose work goes on."),
    ("waiting", "Calls in the queue."),
    ("asking", "Calls that have a place and await the answer of the store that instances share."),
    ("places", "Places taken in admission."),
    ("peak_active", "The most calls active at once."),
    ("peak_waiting", "The most calls in the queue at once."),
    ("peak_places", "The most places taken in admission at once."),
)

_OF_KEYS: Final = (
    ("limit", "How many calls may hold a shared slot."),
    ("active", "Calls that hold a shared slot."),
    ("waiting", "Calls that stand in the line of a shared slot."),
    ("peak", "The most calls that held a shared slot at once."),
)

# An outcome of a call that has started, and the name of its counter.
_OUTCOMES: Final = ("completed", "failed", "timed_out", "cancelled")


def is_asked_for(accept: str) -> bool:
    """Whether an `Accept` header prefers the text of Prometheus to JSON."""
    best = {_JSON: 0.0, "text": 0.0}
    for entry in accept.split(","):
        media_type, *parameters = (part.strip().lower() for part in entry.split(";"))
        kind = "text" if media_type in _TEXT else media_type
        if kind in best:
            best[kind] = max(best[kind], _quality(parameters))
    return best["text"] > best[_JSON]


@cache
def is_installed() -> bool:
    """Whether the extra `metrics` is there."""
    return find_spec("prometheus_client") is not None


def text(guard: Guard, arrivals: Arrivals, accept: str) -> tuple[bytes, str]:
    """The numbers as text, and its media type."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    # A registry of its own: the process's global one is the author's.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(guard, arrivals))
    encode, media_type = choose_encoder(accept)
    return encode(registry), media_type


class _Collector:
    def __init__(self, guard: Guard, arrivals: Arrivals) -> None:
        self._guard = guard
        self._arrivals = arrivals

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._guard.statistics()
        for name, help_text in _GAUGES:
            yield GaugeMetricFamily(f"frontmcp_{name}", help_text, value=getattr(now, name))
        yield GaugeMetricFamily(
            "frontmcp_oldest_running_seconds",
            "Seconds since the oldest of the active calls started.",
            value=now.oldest_running_s,
        )
        yield CounterMetricFamily(
            "frontmcp_unknown_calls", "Calls of tools that do not exist.", value=now.unknown
        )
        yield GaugeMetricFamily(
            "frontmcp_arriving",
            "HTTP requests that have not been let in yet.",
            value=self._arrivals.waiting,
        )
        if now.storage is not None:
            yield GaugeMetricFamily(
                "frontmcp_storage_up",
                "1 if the store that instances share answers.",
                value=now.storage == "up",
            )
            yield CounterMetricFamily(
                "frontmcp_storage_outages", "How often that store has stopped answering.", value=now.outages
            )
        health = self._guard.health()
        status = GaugeMetricFamily(
            "frontmcp_status", "1 for the state that the server is in.", labels=["status"]
        )
        for state in get_args(Status):
            status.add_metric([state], health.status == state)
        yield status
        yield GaugeMetricFamily(
            "frontmcp_ready", "1 if more calls should be sent here.", value=health.is_ready
        )
        limits = GaugeMetricFamily("frontmcp_limit", "The limits of the process.", labels=["name"])
        admission = self._guard.admission
        if admission is not None:
            for name in ("max_active", "reserved", "max_queued"):
                limits.add_metric([name], getattr(admission, name))
            limits.add_metric(["queue_timeout_seconds"], admission.queue_timeout)
        limits.add_metric(["worker_threads"], self._guard.worker_threads)
        yield limits
        yield from self._keys(now)
        yield from self._tools(now)

    def _keys(self, now: Statistics) -> Iterable[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        for name, help_text in _OF_KEYS:
            family = GaugeMetricFamily(f"frontmcp_key_{name}", help_text, labels=["key"])
            for key, use in now.keys.items():
                family.add_metric([key], getattr(use, name))
            yield family

    def _tools(self, now: Statistics) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily

        submitted = CounterMetricFamily("frontmcp_calls_submitted", "Calls that arrived.", labels=["tool"])
        accepted = CounterMetricFamily(
            "frontmcp_calls_accepted", "Calls that were not refused on arrival.", labels=["tool"]
        )
        started = CounterMetricFamily("frontmcp_calls_started", "Calls that began to run.", labels=["tool"])
        ended = CounterMetricFamily(
            "frontmcp_calls_ended",
            "Calls that had started, by how they were answered.",
            labels=["tool", "outcome"],
        )
        rejected = CounterMetricFamily(
            "frontmcp_calls_rejected", "Calls that were refused, by code.", labels=["tool", "code"]
        )
        left = CounterMetricFamily(
            "frontmcp_calls_cancelled_waiting", "Calls that were cancelled in the queue.", labels=["tool"]
        )
        would_wait = CounterMetricFamily(
            "frontmcp_calls_would_wait", "In observe mode, calls that would have waited.", labels=["tool"]
        )
        would_reject = CounterMetricFamily(
            "frontmcp_calls_would_reject",
            "In observe mode, calls that would have been refused, by code.",
            labels=["tool", "code"],
        )
        for tool in self._guard.plans:
            counts = now.tools[tool]
            submitted.add_metric([tool], counts.submitted)
            accepted.add_metric([tool], counts.accepted)
            started.add_metric([tool], counts.started)
            for outcome in _OUTCOMES:
                ended.add_metric([tool, outcome], getattr(counts, outcome))
            for code, number in counts.rejected.items():
                rejected.add_metric([tool, code], number)
            left.add_metric([tool], counts.cancelled_waiting)
            would_wait.add_metric([tool], counts.would_wait)
            for code, number in counts.would_reject.items():
                would_reject.add_metric([tool, code], number)
        yield from (submitted, accepted, started, ended, rejected, left, would_wait, would_reject)


def _quality(parameters: Iterable[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0
