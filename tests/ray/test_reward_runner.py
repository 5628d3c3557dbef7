"""Rewards in processes of their own: what raises or hangs costs one sample, never the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from specactor_ray.config.training_schema import RewardConfig, RewardFunctionConfig
from specactor_ray.errors import ConfigError
from specactor_ray.training import reward_runner
from specactor_ray.training.reward_runner import RewardRunner
from specactor_ray.training.rewards import RewardSample

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="specactor", logging_level="ERROR")
    yield
    ray.shutdown()


def samples(count: int) -> list[RewardSample]:
    return [RewardSample("p", "x", "x", token_ids=tuple(range(i + 1)), max_tokens=count) for i in range(count)]


def config(*names: str, **values: float | None) -> RewardConfig:
    return RewardConfig(functions=[RewardFunctionConfig(name) for name in names], **values)  # type: ignore[arg-type]


def test_rewards_come_in_the_order_of_the_samples() -> None:
    scores = RewardRunner(config("length", workers=3)).score(samples(20))
    assert scores.rewards == [(i + 1) / 20 for i in range(20)]
    assert not scores.failures


@pytest.mark.parametrize("value", [None, -1.0])
def test_what_raises_costs_its_own_sample_only(value: float | None) -> None:
    runner = RewardRunner(config("tests.reward_functions:raises_on_even_length", failure_value=value))
    scores = runner.score(samples(6))
    assert scores.rewards == [1.0, value, 1.0, value, 1.0, value]
    assert dict(scores.failures) == {"RuntimeError: even": 3}


def test_what_hangs_is_interrupted() -> None:
    scores = RewardRunner(config("tests.reward_functions:hangs", timeout_s=0.2)).score(samples(4))
    assert scores.rewards == [None] * 4
    assert sum(scores.failures.values()) == 4 and "reward.timeout_s" in next(iter(scores.failures))


def test_what_cannot_be_interrupted_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_runner, "_GRACE_S", 1.0)
    monkeypatch.setattr(reward_runner, "_START_S", 4.0)
    runner = RewardRunner(config("tests.reward_functions:hangs_hard", timeout_s=0.2))
    scores = runner.score(samples(2))
    assert scores.rewards == [None] * 2
    assert sum(scores.failures.values()) == 2
    assert RewardRunner(config("length")).score(samples(2)).rewards == [0.5, 1.0]  # the pool still works


def test_a_process_that_dies_is_replaced_a_few_times(tmp_path: Path) -> None:
    """The first sample's process dies once, the second's always."""
    metadata = [{"marks": str(tmp_path), "times": times} for times in (1, 99)]
    dying = [RewardSample("p", "x", str(i), metadata=entry) for i, entry in enumerate(metadata)]
    done: list[None] = []
    scores = RewardRunner(config("tests.reward_functions:dies")).score(dying, lambda: done.append(None))
    assert scores.rewards == [1.0, None]
    assert dict(scores.failures) == {"its process died 3 times": 1}
    assert len(list(tmp_path.glob("1-*"))) == 3
    assert len(done) == 2


def test_a_function_that_is_not_there_is_found_at_once() -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        RewardRunner(config("tests.reward_functions:nothing"))
