"""Scoring outputs in worker processes. A sample without a score is not scored as wrong; see `reward.failure_value`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from specactor_ray.config.training_schema import RewardConfig
from specactor_ray.trainer.rewards import RewardSample, RewardWork
from specactor_ray.trainer.worker_pool import ATTEMPTS, WorkerPool

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Scores:
    """Rewards in the order of the samples, and the failures."""

    rewards: list[float | None]
    """Reward per sample; None without a score: the sample is left out of training."""
    failures: Counter[str] = field(default_factory=Counter)
    """Reason → number of samples without a score; their reward is `reward.failure_value`."""


class RewardRunner:
    """Scores samples in `reward.workers` processes at once; a context manager. Raises ConfigError if a function is not
    available."""

    def __init__(self, config: RewardConfig) -> None:
        work = RewardWork(config)
        work.open()
        self._config, self._pool = config, WorkerPool(work, config.workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.__exit__(kind, error, trace)

    def score(self, samples: Sequence[RewardSample]) -> Scores:
        """Reward of every sample; never raises for errors of a reward function, or for the end of its process."""
        scores = Scores([self._config.failure_value] * len(samples))
        for index, outcome in enumerate(self._pool.map(samples)):
            reward, reason = outcome or (None, f"its process died {ATTEMPTS} times")
            if reward is not None:
                scores.rewards[index] = reward
                continue
            scores.failures[reason] += 1
            if scores.failures[reason] == 1:
                answer = samples[index].answer
                logger.warning("a reward failed: %s (sample %d, reference answer %.80r)", reason, index, answer)
        return scores
