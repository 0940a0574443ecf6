"""Figures for Prometheus: requests, sockets, queue, jobs, node times, cache hits, memory by owner.

Every server has a registry of its own; nothing is global. What can be asked is asked when the page
is read, the rest is counted as events pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from comfy_execution.events import Event, ExecutionCached, NodeFigures

if TYPE_CHECKING:
    from comfy_server.prompt_server import PromptServer

PREFIX = "latentloom"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RESULTS = {
    "execution_success": "success",
    "execution_error": "error",
    "execution_interrupted": "interrupted",
}
NODE_SECONDS = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
SWITCHING_PROTOCOLS = 101
REQUEST_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)


class _Current(Collector):
    """Gauges that are read off the server when the page is asked for."""

    def __init__(self, server: PromptServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        server = self._server
        running, pending = server.prompt_queue.get_current_queue()
        yield GaugeMetricFamily(f"{PREFIX}_queue_pending", "Prompts that wait.", len(pending))
        yield GaugeMetricFamily(f"{PREFIX}_queue_running", "Prompts that run.", len(running))
        sockets = len(server.hub.clients)
        yield GaugeMetricFamily(f"{PREFIX}_sockets", "Open WebSockets.", sockets)
        dropped = sum(client.outbox.dropped for client in list(server.hub.clients.values()))
        yield GaugeMetricFamily(
            f"{PREFIX}_previews_dropped", "Previews not sent to sockets open now.", dropped
        )
        memory = GaugeMetricFamily(f"{PREFIX}_memory_bytes", "Memory by owner.", labels=["owner"])
        for owner, size in server.services.metrics().get("memory_bytes", {}).items():
            memory.add_metric([str(owner)], float(size))
        yield memory


class Metrics:
    """Counters of one server; methods may be called from any thread."""

    def __init__(self, server: PromptServer) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Current(server))
        self.requests = Counter(
            f"{PREFIX}_http_requests",
            "HTTP requests.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            f"{PREFIX}_http_request_seconds",
            "Time to answer.",
            ["route"],
            buckets=REQUEST_SECONDS,
            registry=self.registry,
        )
        self.jobs = Counter(
            f"{PREFIX}_jobs", "Finished prompts.", ["result"], registry=self.registry
        )
        self.nodes = Histogram(
            f"{PREFIX}_node_seconds",
            "Time a node ran.",
            ["class_type"],
            buckets=NODE_SECONDS,
            registry=self.registry,
        )
        self.cached = Counter(
            f"{PREFIX}_cache_hits", "Node results taken from the cache.", registry=self.registry
        )
        self.ran = Counter(
            f"{PREFIX}_cache_misses", "Nodes that had to run.", registry=self.registry
        )

    def count_event(self, event: Event) -> None:
        """Counts how prompts end, what they found in the cache, and what their nodes took."""
        if isinstance(event, ExecutionCached):
            self.cached.inc(len(event.nodes))
        elif isinstance(event, NodeFigures):
            self._count_nodes(event)
        result = RESULTS.get(event.name)
        if result is not None and not (result == "error" and _is_blocked(event)):
            self.jobs.labels(result).inc()

    def _count_nodes(self, finished: NodeFigures) -> None:
        for figures in finished.nodes.values():
            if "wall_ms" in figures:
                self.ran.inc()
                self.nodes.labels(figures["class_type"]).observe(figures["wall_ms"] / 1000)

    def page(self) -> bytes:
        """The figures in Prometheus' text form."""
        return generate_latest(self.registry)


def _is_blocked(event: Event) -> bool:
    """A blocked node reports an error without ending the prompt; it then has no timestamp."""
    return getattr(event, "timestamp", 0) is None


def _route(request: web.Request) -> str:
    """The route's pattern: a label must not take any value a stranger can think of."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical


def measure(metrics: Callable[[], Metrics]) -> Middleware:
    """Counts and times requests; sockets are left out of the times."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.perf_counter()
        status: Any = 500
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            route = _route(request)
            method = request.method if request.method in METHODS else "other"
            metrics().requests.labels(method, route, str(status)).inc()
            if status != SWITCHING_PROTOCOLS:
                metrics().request_seconds.labels(route).observe(time.perf_counter() - started)

    return count
