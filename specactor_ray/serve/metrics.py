"""Prometheus metrics of the server, in a separate registry: Ray has one in the same process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from specactor_ray.rollout.trajectory import Trajectory
    from specactor_ray.serve.service import Service

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_DRAFTERS_S = 10.0
"""Shortest time between two requests for the drafters' figures."""
_COUNTERS = {
    "steps": "Steps of all verifiers.",
    "row_steps": "Requests that committed, summed over steps.",
    "committed_tokens": "Output tokens, drafted or not.",
    "drafted_tokens": "Draft tokens that were verified.",
    "accepted_tokens": "Draft tokens that were right.",
    "supplied_tokens": "Usable draft tokens that were there.",
}
"""Counters of `RolloutMetrics`."""


class ServerMetrics:
    """Counts requests and times streams; reads the rollout's counters when `text` is called."""

    def __init__(self, service: Service) -> None:
        self._service, self._registry = service, CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry, buckets=_SECONDS)
        self._requests = counter("specactor_requests", "HTTP requests.", ["path", "status"])
        self._prompt_tokens = counter("specactor_prompt_tokens", "Tokens of prompts, once a choice.")
        self._output_tokens = counter("specactor_output_tokens", "Tokens of ended outputs.")
        self._finished = counter("specactor_outputs", "Ended outputs.", ["finish_reason"])
        self._first = histogram("specactor_time_to_first_token_seconds", "Of streams.")
        self._between = histogram(
            "specactor_time_between_tokens_seconds", "Of streams; tokens that come together share their time."
        )
        self._duration = histogram("specactor_request_seconds", "From request to answer.", ["path"])
        for name, what, read in (
            ("specactor_outputs_open", "Outputs that run or wait.", lambda: service.open_choices),
            (
                "specactor_outputs_waiting",
                "Outputs that wait for a verifier.",
                lambda: service.rollout.dispatcher.waiting,
            ),
            ("specactor_paused", "Whether the server is paused.", lambda: service.control.is_paused),
            ("specactor_weight_version", "Version of the weights.", lambda: service.rollout.weight_version),
        ):
            Gauge(name, what, registry=self._registry).set_function(read)
        self._drafters: list[Metric] = []
        self._asked = float("-inf")
        self._registry.register(self)  # type: ignore[arg-type]

    def began(self, prompts: Sequence[Sequence[int]], n: int) -> None:
        """Record submitted choices."""
        self._prompt_tokens.inc(n * sum(map(len, prompts)))

    def arrived(self, seconds: float, tokens: int, first: bool) -> None:
        """Record tokens of a stream that arrived together, `seconds` after the request or the previous tokens."""
        if first:
            self._first.observe(seconds)
        else:
            for _ in range(tokens):
                self._between.observe(seconds / tokens)

    def ended(self, output: Trajectory) -> None:
        """Record a choice that has ended."""
        self._output_tokens.inc(len(output.token_ids))
        self._finished.labels(output.finish_reason).inc()

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Record an answered HTTP request; `path` is a route, so that the number of labels is bounded."""
        self._requests.labels(path, str(status)).inc()
        self._duration.labels(path).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Counters of the rollout and its drafters; called by Prometheus."""
        counters = self._service.rollout.metrics()
        for name, what in _COUNTERS.items():
            yield CounterMetricFamily(f"specactor_rollout_{name}", what, value=getattr(counters, name))
        length = "Tokens committed per request and step."
        yield GaugeMetricFamily("specactor_rollout_acceptance_length", length, value=counters.acceptance_length)
        if time.monotonic() - self._asked > _DRAFTERS_S:
            self._asked = time.monotonic()
            self._drafters = list(self._figures_of_drafters())
        yield from self._drafters

    async def text(self) -> bytes:
        """All figures in Prometheus's text form."""
        return await asyncio.to_thread(generate_latest, self._registry)

    def _figures_of_drafters(self) -> Iterator[Metric]:
        drafters, labels = self._service.rollout.drafters(), ["drafter", "method"]
        for family, key, what in (
            (CounterMetricFamily, "tried", "Draft tokens that were verified."),
            (CounterMetricFamily, "right", "Draft tokens that were right."),
            (GaugeMetricFamily, "alarm", "No draft is right any more."),
        ):
            name = f"specactor_drafter_{key}" if key == "alarm" else f"specactor_drafter_{key}_tokens"
            figure = family(name, what, labels=labels)
            for one in drafters:
                figure.add_metric([str(one["id"]), str(one["method"])], float(one[key]))
            yield figure
