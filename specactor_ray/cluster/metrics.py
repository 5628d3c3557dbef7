"""Export of metrics through Ray: the metrics agent of each node serves those of its processes to Prometheus."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge

from specactor_ray.cluster.names import run_and_actor
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.metrics import METRICS, Row

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Least seconds between two exports of a process."""


class RayMetrics:
    """Exports the metrics of this process. For any thread."""

    def __init__(self) -> None:
        self._run = ""
        self._metrics: dict[str, Any] = {}
        self._last: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        """The last value of each counter."""
        self._exported_at = float("-inf")
        self._failed = False
        self._lock = threading.Lock()

    def export(self, rows: Callable[[], Iterable[Row]], run: str = "") -> None:
        """Export these values, unless others were exported less than `INTERVAL_S` ago. `run`: a label of every series;
        default: the run of this actor."""
        with self._lock:
            now = SYSTEM.now()
            if self._failed or now - self._exported_at < INTERVAL_S or not ray.is_initialized():
                return
            self._exported_at = now
            try:
                self._run = self._run or run or run_and_actor(ray.get_runtime_context().get_actor_name() or "")[0]
                for row in rows():
                    self._record(row)
            except Exception:  # a failed export must not fail the actor's health check
                logger.exception("metrics of this process are not exported any more")
                self._failed = True

    def _record(self, row: Row) -> None:
        metric = self._metrics.get(row.name)
        if metric is None:
            kind: Any = Counter if row.is_counter else Gauge
            text, labels = METRICS[row.name]
            metric = kind(row.name, text, (*labels, "run")).set_default_tags({"run": self._run})
            self._metrics[row.name] = metric
        if not row.is_counter:
            metric.set(row.value, dict(row.labels))
            return
        place = row.name, tuple(sorted(row.labels.items()))
        last, self._last[place] = self._last.get(place, 0.0), row.value
        more = row.value - last if row.value >= last else row.value  # after a reset the whole value
        if more > 0.0:
            metric.inc(more, dict(row.labels))
