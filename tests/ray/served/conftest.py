"""One rollout for all tests of this folder: of its queue, of the server over it, and of trainers that use the server.
A test leaves it with the weights that it began with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from specactor_ray import Rollout
from specactor_ray.config.load import from_mapping
from tests.served import SETTINGS, Served, served


@pytest.fixture(scope="package")
def rollout() -> Iterator[Rollout]:
    ray.init(address="local", num_cpus=3, include_dashboard=False, namespace="specactor", logging_level="ERROR")
    with Rollout(from_mapping(SETTINGS)) as rollout:
        yield rollout
    ray.shutdown()


@pytest.fixture(scope="package")
def server(rollout: Rollout) -> Iterator[Served]:
    with served(rollout) as server:
        yield server
