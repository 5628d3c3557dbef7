"""Rewards beside a Ray cluster that the driver is connected to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from specactor_ray.config.training_schema import RewardConfig, RewardFunctionConfig
from specactor_ray.trainer.rewards import RewardRunner, RewardSample

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="specactor", logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.parametrize(("name", "reward"), [("forks", 1.0), ("asks_ray", 0.0)])
def test_a_function_cannot_touch_the_cluster(name: str, reward: float, tmp_path: Path) -> None:
    config = RewardConfig(functions=[RewardFunctionConfig(f"tests.fakes.reward_functions:{name}")])
    forking = [RewardSample("p", "x", what, metadata={"marks": str(tmp_path)}) for what in ("raises", "comes back")]
    with RewardRunner(config) as runner:
        assert runner.score(forking) == [(reward, "")] * 2
    assert ray.get(ray.remote(lambda: 1).remote()) == 1
