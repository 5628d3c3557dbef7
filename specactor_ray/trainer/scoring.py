"""Scoring of a rollout's rows with `reward.functions`, in the processes of training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np

from specactor_ray.config.fields import reject_values_not_allowed
from specactor_ray.config.schema import Config
from specactor_ray.core.errors import InputError
from specactor_ray.rollout.prompts import split_row
from specactor_ray.trainer.data import answer_text, has_reference
from specactor_ray.trainer.rewards import NEED_ANSWERS, RewardSample, Scorer, reward_work, try_rewards
from specactor_ray.trainer.workers import Outcome, WorkerPool


class RolloutScorer:
    """A `RowScorer`: the answer is the column `data.answer_key`, all others are metadata."""

    def __init__(self, config: Config, pool: WorkerPool) -> None:
        self._config, self._pool = config, pool

    def check(self, rows: Sequence[Any]) -> None:
        """Refuse rows without the answer that a reward needs, and own functions that score no made-up output."""
        config, samples = self._config, list[RewardSample]()
        needing = [term.name for term in config.reward.functions if term.name in NEED_ANSWERS]
        for number, row in enumerate(rows, start=1):
            prompt, columns = split_row(row)
            sample = self._sample({"prompt": prompt, "columns": columns, "text": "Yes."}, f"prompt {number}")
            if needing and not has_reference(sample.answer):
                raise InputError(
                    f"data.path: prompt {number} has no {config.data.answer_key!r} (data.answer_key), or an empty one, "
                    f"and the reward {needing[0]} compares with it. Fix: add it, choose another reward, or score "
                    "nothing (reward.functions=[])"
                )
            samples += [sample] * (number <= 2)
        try_rewards(config.reward, samples)

    def submit(self, row: Mapping[str, Any]) -> Future[Outcome]:
        return self._pool.submit(self._sample(row, "the row"))

    def _sample(self, row: Mapping[str, Any], where: str) -> RewardSample:
        columns, key = dict(row.get("columns", ())), self._config.data.answer_key
        answer = answer_text(columns.pop(key, None), where, key, np.float64)
        tokens, reason = tuple(row.get("token_ids", ())), row.get("finish_reason", "stop")
        most = self._config.sampling.max_tokens
        return RewardSample(row["prompt"], row["text"], answer, columns, tokens, reason, most)


@contextmanager
def row_scorer(config: Config) -> Iterator[RolloutScorer | None]:
    """The scorer of a rollout, None without `reward.functions`; its processes end with the context. Raises ConfigError
    for a function that is not available."""
    if not config.reward.functions:
        yield None
        return
    reject_values_not_allowed(config.reward, "reward.")
    for index, function in enumerate(config.reward.functions):
        reject_values_not_allowed(function, f"reward.functions.{index}.")
    Scorer(config.reward)
    with WorkerPool(reward_work(config.reward), config.reward.workers) as pool:
        yield RolloutScorer(config, pool)
