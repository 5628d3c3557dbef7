"""From tasks to samples: roll out, score, compute advantages; sample again if groups give no gradient.

The experience of later steps may be made while the trainer updates (`AheadMaker`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from specactor_ray.config.schema import Config
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.types import SamplingParams
from specactor_ray.learner.algorithms import SAME_REWARD, Recipe
from specactor_ray.learner.batching import Sample
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.sampling.seeds import derive_seed
from specactor_ray.trainer.conversations import Conversations
from specactor_ray.trainer.data import Task, TaskStream
from specactor_ray.trainer.rewards import RewardRunner, RewardSample


@dataclass(slots=True)
class Group:
    """The samples of one prompt that have a reward."""

    trajectories: list[Trajectory] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    @property
    def informative(self) -> bool:
        """Whether its rewards differ, so that its advantages are not all zero (DAPO eq. 11)."""
        return len(self.rewards) > 1 and max(self.rewards) - min(self.rewards) > SAME_REWARD


@dataclass(slots=True)
class Experience:
    """Samples of one training step, and observations of their making."""

    samples: list[Sample]
    trajectories: list[Trajectory]
    """All trajectories of the step, including those that were sampled and dropped."""
    rewards: list[float]
    """Rewards from functions and environments; samples left out (`reward.failure_value`) have none."""
    dull_groups: int = 0
    """Number of groups whose rewards are all equal."""
    rounds: int = 1
    reward_failures: Counter[str] = field(default_factory=Counter)
    """Reason → number of trajectories that no function scored."""
    rollout_failures: Counter[str] = field(default_factory=Counter)
    environment_failures: Counter[str] = field(default_factory=Counter)
    """Reason → number of conversations whose environment failed."""
    scored: int = 0
    """Number of trajectories with a reward of their own."""
    turns: int = 0
    """Number of turns of `trajectories`, with an environment."""
    environment_s: float = 0.0
    """Total seconds that conversations waited for their environments."""
    position: tuple[int, int] = (0, 0)
    """Numbers of tasks taken from the data up to this step, and of skipped tasks."""

    @property
    def unscored(self) -> bool:
        """Whether there were outputs, but none of them could be scored."""
        return self.scored == 0 and bool(self.reward_failures or self.environment_failures)


class ExperienceMaker:
    """Makes the samples of a step; a function of the weights, the data's position, the step and the seed.

    Args:
        timed: Context manager for a named phase (`rollout`, `reward`), for the time records.
        conversations: Rolls out with an environment; it also gives the rewards.
    """

    def __init__(
        self,
        config: Config,
        recipe: Recipe,
        stream: TaskStream,
        rewards: RewardRunner,
        timed: Callable,
        conversations: Conversations | None = None,
    ) -> None:
        self._config, self._recipe, self._stream = config, recipe, stream
        self._rewards, self._timed, self._conversations = rewards, timed, conversations

    def collect(self, rollout: Any, sampling: SamplingParams, step: int) -> Experience:
        """Roll out and score the prompts of one step.

        Under dynamic sampling, dull groups are replaced by further prompts, for at most
        `algorithm.max_sampling_rounds` rounds; if no group at all is left, the dull ones are used.
        """
        wanted, recipe = self._config.trainer.prompts_per_step, self._recipe
        experience = Experience([], [], [])
        kept: list[Group] = []
        dull: list[Group] = []
        rounds = self._config.algorithm.max_sampling_rounds if recipe.dynamic_sampling else 1
        for number in range(rounds):
            seed = derive_seed(sampling.seed, step, number)
            groups = self._roll_out(rollout, replace(sampling, seed=seed), wanted - len(kept), experience)
            experience.rounds = number + 1
            for group in groups:
                (kept if group.informative or not recipe.dynamic_sampling else dull).append(group)
                experience.dull_groups += not group.informative
            if len(kept) >= wanted:
                break
        used = kept or dull
        experience.samples = [sample for group in used for sample in self._samples(group)]
        experience.position = (self._stream.position, self._stream.skipped)
        return experience

    def _roll_out(self, rollout: Any, sampling: SamplingParams, count: int, experience: Experience) -> list[Group]:
        tasks = self._stream.take(count)
        if self._conversations is None:
            scored = self._single_outputs(rollout, sampling, tasks, experience)
        else:
            scored = self._episodes(rollout, sampling, tasks, experience)
        groups = [Group() for _ in tasks]
        for trajectory, reward in scored:
            experience.trajectories.append(trajectory)
            if reward is not None:
                experience.rewards.append(reward)
                groups[trajectory.prompt_index].trajectories.append(trajectory)
                groups[trajectory.prompt_index].rewards.append(reward)
        smallest = 1 if self._recipe.uses_values else 2  # a group of one has no baseline
        return [group for group in groups if len(group.rewards) >= smallest]

    def _single_outputs(
        self, rollout: Any, sampling: SamplingParams, tasks: Sequence[Task], experience: Experience
    ) -> Iterable[tuple[Trajectory, float | None]]:
        """Outputs and their rewards; without those of failed requests."""
        with self._timed("rollout"):
            trajectories = rollout.generate([task.prompt for task in tasks], sampling, self._config.data.n)
        sound = [trajectory for trajectory in trajectories if not trajectory.error and trajectory.token_ids]
        experience.rollout_failures.update(trajectory.error for trajectory in trajectories if trajectory.error)
        with self._timed("reward"):
            scores = self._rewards.score([self._reward_sample(tasks[t.prompt_index], t) for t in sound])
        experience.reward_failures.update(scores.failures)
        experience.scored += len(sound) - scores.failures.total()
        return zip(sound, scores.rewards, strict=True)

    def _episodes(
        self, rollout: Any, sampling: SamplingParams, tasks: Sequence[Task], experience: Experience
    ) -> Iterator[tuple[Trajectory, float | None]]:
        """Conversations and their rewards; without those that have no output."""
        assert self._conversations is not None
        with self._timed("rollout"):
            episodes = self._conversations.run(rollout, tasks, sampling, self._config.data.n)
        for episode in episodes:
            experience.environment_s += episode.environment_s
            if episode.error:
                experience.rollout_failures[episode.error] += 1
                continue
            if episode.failure:
                experience.environment_failures[episode.failure] += 1
            else:
                experience.scored += 1
            if episode.turns:
                experience.turns += len(episode.turns)
                reward = self._config.reward.failure_value if episode.failure else episode.reward
                yield self._conversations.trajectory(episode), reward

    def _reward_sample(self, task: Task, trajectory: Trajectory) -> RewardSample:
        return RewardSample(
            task.prompt,
            trajectory.text,
            task.answer,
            task.metadata,
            trajectory.token_ids,
            trajectory.finish_reason,
            self._config.sampling.max_tokens,
        )

    def _samples(self, group: Group) -> Iterable[Sample]:
        lengths = [trajectory.num_own_tokens for trajectory in group.trajectories]
        rewards = self._recipe.shaped(group.rewards, lengths, self._config.sampling.max_tokens)
        advantages: torch.Tensor = self._recipe.advantages(rewards[None])[0]
        for trajectory, reward, advantage in zip(group.trajectories, rewards, advantages, strict=True):
            yield Sample(
                prompt=np.asarray(trajectory.prompt_token_ids, dtype=np.int64),
                output=np.asarray(trajectory.token_ids, dtype=np.int64),
                rollout_logprobs=np.asarray(trajectory.logprobs, dtype=np.float32),
                reward=float(reward),
                advantage=float(advantage),
                loss_mask=np.asarray(trajectory.loss_mask or [True] * len(trajectory.token_ids), dtype=np.bool_),
            )


class AheadMaker:
    """Makes the experience of later steps in a separate thread while the trainer updates.

    The experience of step t begins when the weights have version `t - max_staleness` or a newer one: the steps collect
    the experience of step t at version t.

    Args:
        maker: Makes the experience of one step after the other.
        max_staleness: Largest number of versions to run ahead, at least 1.
        steps: Number of steps of the whole run; no later ones are made.
    """

    def __init__(self, maker: ExperienceMaker, max_staleness: int, steps: int) -> None:
        self._maker, self._ahead, self._steps = maker, max_staleness, steps
        self._thread = ThreadPoolExecutor(1, "rollouts ahead")
        self._futures: dict[int, Future[Experience]] = {}
        self._begun = 0
        """Number of steps whose experience was requested."""
        self._problem: BaseException | None = None

    def collect(self, rollout: Any, sampling: SamplingParams, step: int) -> Experience:
        """The experience of this step; the weights have had as many updates. Re-raises the error of its making."""
        self._begun = max(self._begun, step)
        while self._begun < min(step + self._ahead + 1, self._steps):
            self._futures[self._begun] = self._thread.submit(self._make, rollout, sampling, self._begun)
            self._begun += 1
        experience = SYSTEM.result(self._futures[step], math.inf)
        del self._futures[step]
        return experience

    def close(self) -> None:
        """Begin no further step; the one in progress ends with the rollout."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make(self, rollout: Any, sampling: SamplingParams, step: int) -> Experience:
        if self._problem is not None:
            raise self._problem
        try:
            return self._maker.collect(rollout, sampling, step)
        except BaseException as error:
            self._problem = error
            raise
