"""Every algorithm learns: the tiny model, sampled by itself, with the real experience, updater and engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
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
    """A rollout and its queue, by the policy itself in this process: `TOKENS` tokens of each output."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy, self.queue, self.progress = policy, self, (0, 0)
        self._begun: list[tuple[tuple[int, ...], SamplingParams, asyncio.Future[Trajectory]]] = []

    def wake_verifiers(self) -> None:
        pass

    def encoded(self, prompt: str) -> tuple[int, ...]:
        return tuple(PROMPTS[int(prompt)])

    @contextlib.contextmanager
    def opening_stream(self) -> Iterator[int]:
        yield 1

    async def begin(self, prompt: tuple[int, ...], sampling: SamplingParams, **_: Any) -> asyncio.Future[Trajectory]:
        loop = asyncio.get_running_loop()
        if not self._begun:
            loop.call_soon(self._sample)
        self._begun.append((prompt, sampling, loop.create_future()))
        return self._begun[-1][2]

    @torch.no_grad()
    def _sample(self) -> None:
        """Sample all outputs that were begun, those of a prompt together, each with its own seed."""
        begun, self._begun = self._begun, []
        for prompt in dict.fromkeys(one[0] for one in begun):
            group = [one for one in begun if one[0] == prompt]
            generators = [torch.Generator().manual_seed(one.seed % 2**63) for _, one, _ in group]
            ids, logprobs = torch.tensor([prompt] * len(group)), torch.zeros(len(group), 0)
            for _ in range(TOKENS):
                log_p = self._policy.model(input_ids=ids).logits[:, -1].float().log_softmax(-1)
                rows = zip(log_p.exp(), generators, strict=True)
                token = torch.stack([torch.multinomial(row, 1, generator=own) for row, own in rows])
                ids, logprobs = torch.cat([ids, token], 1), torch.cat([logprobs, log_p.gather(1, token)], 1)
            for row, (_, _, future) in enumerate(group):
                output = ids[row, len(prompt) :].tolist()
                values = {"prompt_token_ids": prompt, "logprobs": tuple(logprobs[row].tolist())}
                even = sum(one % 2 == 0 for one in output)
                future.set_result(trajectory(output, text=str(even / TOKENS), **values))


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
