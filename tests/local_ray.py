"""The Ray cluster of a test file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray


def local_ray(num_cpus: int, autouse: bool = True, **options: Any) -> Any:
    """A fixture `cluster` of a module: Ray on this machine with so many CPUs, to which this process is connected."""

    @pytest.fixture(scope="module", autouse=autouse, name="cluster")
    def cluster() -> Iterator[None]:
        common = {"include_dashboard": False, "namespace": "specactor", "logging_level": "ERROR"}
        ray.init(address="local", num_cpus=num_cpus, **common, **options)
        yield
        ray.shutdown()

    return cluster
