"""Prometheus metrics of the server, in a separate registry: Ray has one in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specactor_ray.core.metrics import Kind

if TYPE_CHECKING:
    from specactor_ray.serve.service import Service

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ServerMetrics:
    """Counts requests and times streams; reads the run's metrics when `text` is called."""

    def __init__(self, service: Service) -> None:
        self._service, self._registry = service, CollectorRegistry()
        histogram = partial(Histogram, registry=self._registry, buckets=_SECONDS)
        self._requests = Counter("specactor_requests", "HTTP requests.", ["path", "status"], registry=self._registry)
        self._first = histogram("specactor_time_to_first_token_seconds", "Of streams.")
        self._between = histogram(
            "specactor_time_between_tokens_seconds", "Of streams; tokens that come together share their time."
        )
        self._duration = histogram("specactor_request_seconds", "From request to answer.", ["path"])
        paused = Gauge("specactor_paused", "Whether the server is paused.", registry=self._registry)
        paused.set_function(lambda: service.control.is_paused)
        self._registry.register(self)  # type: ignore[arg-type]

    def arrived(self, seconds: float, tokens: int, first: bool) -> None:
        """Record tokens of a stream that arrived together, `seconds` after the request or the previous tokens."""
        if first:
            self._first.observe(seconds)
        else:
            for _ in range(tokens):
                self._between.observe(seconds / tokens)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Record an answered HTTP request; `path` is a route, so that the number of labels is bounded."""
        self._requests.labels(path, str(status)).inc()
        self._duration.labels(path).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Metrics of the run (`core.metrics`); called by Prometheus."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for row in self._service.rollout.metric_rows():
            if row.name not in families:
                family = CounterMetricFamily if row.kind is Kind.COUNTER else GaugeMetricFamily
                families[row.name] = family(row.name, row.help, labels=list(row.labels))
            families[row.name].add_metric(list(row.labels.values()), row.value)
        yield from families.values()

    async def text(self) -> bytes:
        """All metrics in Prometheus's text form."""
        return await asyncio.to_thread(generate_latest, self._registry)
