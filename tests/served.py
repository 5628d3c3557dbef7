"""A server over a run of the tiny model, in a thread of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from specactor_ray import Rollout
from specactor_ray.serve.run import serving
from specactor_ray.serve.service import Service
from tests.tiny import tiny_target

SETTINGS: dict[str, Any] = {
    "mode": "coupled",
    "target": {"model": str(tiny_target()), "dtype": "float32", "max_batch": 8, "kv_cache_gb": 0.05},
    "drafters": [{"method": "suffix"}],
    "sampling": {"max_tokens": 48, "seed": 3},
    "trainer": {"weight_bucket_mb": 1},
    "cluster": {"pin_cores": False},
}


class Served(NamedTuple):
    service: Service
    url: str


@contextlib.contextmanager
def served(rollout: Rollout) -> Iterator[Served]:
    service = Service(rollout, "tiny")
    with serving(service) as url:
        yield Served(service, url)
