"""Every algorithm learns: the tiny model, sampled by itself, with the real experience, updater and engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

import pytest
import torch

from specactor_ray.config.load import from_mapping
from specactor_ray.config.recipes import make_recipe, uses_values
from specactor_ray.config.training_schema import AlgorithmName
from specactor_ray.core.types import SamplingParams
from specactor_ray.learner.engine import PolicyModel, TorchEngine
from specactor_ray.learner.update import PolicyUpdater
from specactor_ray.models.loading import load_model
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.trainer.data import Task
from tests.fakes.trajectories import trajectory
from tests.tiny import tiny_prompt_ids, tiny_target
from tests.unit.trainer.test_experience import maker_of

TOKENS, STEPS, PROMPTS = 8, 10, tiny_prompt_ids(8)


class Sampling:
    """A rollout by the policy itself, in this process: `TOKENS` tokens of each output."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy

    @torch.no_grad()
    def stream(self, prompts: Sequence[Any], sampling: SamplingParams, n: int) -> Iterator[Trajectory]:
        generator = torch.Generator().manual_seed(sampling.seed % 2**63)
        for index, number in enumerate(prompts):
            prompt = PROMPTS[int(number)]
            ids, logprobs = torch.tensor([prompt] * n), torch.zeros(n, 0)
            for _ in range(TOKENS):
                log_p = self._policy.model(input_ids=ids).logits[:, -1].float().log_softmax(-1)
                token = torch.multinomial(log_p.exp(), 1, generator=generator)
                ids, logprobs = torch.cat([ids, token], 1), torch.cat([logprobs, log_p.gather(1, token)], 1)
            for place in range(n):
                output = ids[place, len(prompt) :].tolist()
                values = {"prompt_token_ids": prompt, "logprobs": tuple(logprobs[place].tolist())}
                even = sum(one % 2 == 0 for one in output)
                yield trajectory(output, (index, place), text=str(even / TOKENS), **values)


def curve(algorithm: str, seed: int) -> list[float]:
    """Mean reward of each step: the share of even token ids."""
    sections = {
        "algorithm": {"name": algorithm, "dynamic_sampling": False, "overlong_buffer": 0},
        "sampling": {"max_tokens": TOKENS, "seed": seed},
        "trainer": {"prompts_per_step": 4, "learning_rate": 2e-3, "mini_batches": 2, "micro_batch_tokens": 512},
        "reward": {"functions": [{"name": "tests.fakes.reward_functions:number_or_raises"}]},
        "data": {"n": 8},
        "target": {"dtype": "float32"},
    }
    config = from_mapping({"mode": "plain", **sections})
    recipe = make_recipe(config)
    policy = PolicyModel(load_model(str(tiny_target())).requires_grad_(True), 1.0, uses_values(recipe))
    updater = PolicyUpdater(TorchEngine(policy, config.trainer), recipe, config)
    maker = maker_of(config, [Task(number, str(number)) for number in range(len(PROMPTS))])
    rewards = []
    for step in range(STEPS):
        experience = maker.collect(Sampling(policy), config.sampling, step)
        rewards.append(mean(experience.rewards))
        assert updater.update(experience.samples, step, seed + step)["skipped"] == 0
    return rewards


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("algorithm", [one.value for one in AlgorithmName])
def test_the_reward_rises(algorithm: str, seed: int) -> None:
    rewards = curve(algorithm, seed)
    assert mean(rewards[-3:]) > mean(rewards[:2]) + 0.12, rewards
