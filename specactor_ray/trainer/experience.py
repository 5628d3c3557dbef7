"""From tasks to samples: roll out, score, compute advantages.

The experience of later steps may be made while the trainer updates (`AheadMaker`).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specactor_ray.config.recipes import smallest_group
from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import AlgorithmConfig
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.types import SamplingParams
from specactor_ray.learner.algorithms import rewarded_group, step_advantages
from specactor_ray.learner.batching import Sample
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.sampling.seeds import derive_seed, sample_of
from specactor_ray.trainer.data import Task, TaskStream
from specactor_ray.trainer.groups import Episode, Group, GroupStream
from specactor_ray.trainer.rewards import RewardPool, Score, Scoring, reward_sample
from specactor_ray.trainer.workers import WorkerPool

_Placed = tuple[Task, tuple[int, int]]
"""A task, and the data's position behind it."""
_REMEMBERED = 8
"""Number of steps whose shares of informative groups give the one that a step expects."""


@dataclass(slots=True)
class Experience:
    """Samples of one training step, and observations of their making."""

    samples: list[Sample] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    """All trajectories of the step, with those of groups that were replaced."""
    tasks: list[Task] = field(default_factory=list)
    """Task of each trajectory."""
    scores: list[Score | None] = field(default_factory=list)
    """Score of each trajectory, from functions or an environment; None if it is left out (`reward.failure_value`)."""
    zero_variance_groups: int = 0
    """Number of groups with equal rewards, before or after the overlong punishment."""
    groups: int = 0
    """Number of all groups up to the last one that is trained on."""
    discarded_samples: int = 0
    """Number of samples of later groups, which were begun; like the next, it may depend on time."""
    discarded_tokens: int = 0
    """Number of sampled tokens that no trajectory of the step has."""
    failures: dict[str, Counter[str]] = field(default_factory=lambda: {"reward": Counter(), "rollout": Counter()})
    """Part that failed → reason → number of samples."""
    scored: int = 0
    """Number of trajectories with a reward of their own."""
    turns: int = 0
    """Number of turns of `trajectories`, with an environment."""
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """`outputs`, `rewards` → times of the first and of the last one that ended, by `time.perf_counter`."""
    reward_wait_s: float = 0.0
    """Seconds between the last output and the last reward."""
    environment_s: float = 0.0
    """Total seconds that conversations waited for their environments."""
    skipped_tasks: int = 0
    """Number of tasks skipped because their prompt is too long or cannot be encoded."""
    first_skip: str = ""
    """Place and reason of the first of them."""
    position: tuple[int, int] = (0, 0)
    """Numbers of tasks taken from the data up to this step, and of skipped tasks."""

    @property
    def rewards(self) -> list[float]:
        """Rewards of the trajectories that have one."""
        return [score.reward for score in self.scores if score is not None]

    @property
    def is_unusable(self) -> bool:
        """Whether no group has the rewards that are compared, or all of them are `reward.failure_value`."""
        return not self.samples or (self.scored == 0 and bool(self.failures["reward"]))


class Outputs:
    """Episodes without an environment: one output each, scored by a `RewardPool` while others are rolled out."""

    def __init__(self, config: Config, pool: RewardPool, n: int) -> None:
        self._scoring, self._most, self.close = Scoring(pool, n), config.sampling.max_tokens, pool.close

    async def play(self, stream: GroupStream, episode: Episode) -> None:
        """Roll out and score an episode; a failure of its reward is in it."""
        output, (index, number) = await stream.generate(episode.prompt, episode.sampling), episode.place
        sample = reward_sample(episode.task, output.text, output.token_ids, output.finish_reason, self._most)
        episode.error = output.error or ("it was aborted" if output.finish_reason == "abort" else "")
        if is_scored := not episode.error and bool(output.token_ids):
            episode.trajectory = replace(output, prompt_index=index, sample_index=number, prompt=episode.task.prompt)
        if submitted := self._scoring.add(episode, index, number, sample if is_scored else None):
            outcomes = await asyncio.shield(asyncio.wrap_future(submitted[1]))
            for one, (score, failure) in zip(submitted[0], outcomes, strict=True):
                one.failure = failure
                if score is not None:
                    one.reward, one.rewards = score.reward, dict(score.rewards)


class ExperienceMaker:
    """Makes the samples of a step; a function of the weights, the data's position, the step and the seed. `workers`
    are `Conversations`, or a `RewardPool`."""

    def __init__(self, config: Config, recipe: AlgorithmConfig, stream: TaskStream, workers: WorkerPool) -> None:
        self._config, self._recipe, self.stream, self._workers = config, recipe, stream, workers
        self._shares: dict[int, float] = {}
        """Step → share of its groups that were informative."""

    def collect(self, rollout: Any, sampling: SamplingParams, step: int) -> Experience:
        """Roll out and score the prompts of one step. Under dynamic sampling, further prompts replace groups with equal
        rewards, up to `algorithm.max_sampling_rounds` times as many; if no group is left, the first ones are used: they
        have no advantages, but may have a divergence, an entropy and values to train."""
        wanted, dynamic = self._config.trainer.prompts_per_step, bool(self._recipe.dynamic_sampling)
        most = wanted * (self._recipe.max_sampling_rounds if dynamic else 1)
        recent = [self._shares[at] for at in range(step - _REMEMBERED, step) if dynamic and at in self._shares]
        size = wanted, most, max(sum(recent) / len(recent), wanted / most) if recent else 1.0
        skipped, self.stream.first_skip = self.stream.skipped, ""
        sampling = replace(sampling, seed=derive_seed(sampling.seed, step, 0))
        experience, groups = self._roll_out(rollout, sampling, self._tasks(), self._config.data.n, size)
        self._shares[step] = sum(group.is_informative is True for group in groups) / len(groups)
        compared = [group for group in groups if group.rewarded is not None]
        kept = [group for group in compared if group.is_informative or not dynamic]
        experience.samples = self._samples(kept or compared[:wanted])
        experience.zero_variance_groups = len(compared) - sum(group.is_informative is True for group in compared)
        self.stream.position, self.stream.skipped = experience.position = groups[-1].position
        experience.skipped_tasks = self.stream.skipped - skipped
        experience.first_skip = self.stream.first_skip if experience.skipped_tasks else ""
        return experience

    def evaluate(self, rollout: Any) -> Experience:
        """Roll out and score the held-out tasks, beside the rollouts of a step if there are any; without samples for
        the update. Seeds depend on task and sample alone: evaluations of equal weights are equal."""
        section, sampling, held_out = self._config.evaluation, self._config.sampling, self.stream.held_out
        warmth = sampling.temperature if section.temperature is None else section.temperature
        own, tasks = replace(sampling, seed=section.seed, temperature=warmth), ((task, (0, 0)) for task in held_out)
        return self._roll_out(rollout, own, tasks, section.n, (len(held_out), len(held_out), 1.0))[0]

    def _tasks(self) -> Iterator[_Placed]:
        while True:
            (task,) = self.stream.take(1)
            yield task, (self.stream.position, self.stream.skipped)

    def _roll_out(
        self, rollout: Any, sampling: SamplingParams, tasks: Iterator[_Placed], n: int, size: tuple[int, int, float]
    ) -> tuple[Experience, list[Group]]:
        """The groups that count, and an experience with their trajectories, each with its score, but no samples."""
        workers = self._workers
        player = Outputs(self._config, workers, n) if isinstance(workers, RewardPool) else workers

        def make(index: int) -> Group:
            task, position = next(tasks)
            prompt = rollout.queue.encoded(task.prompt) if player is not workers else ()
            samplings = [sample_of(sampling, index, number) for number in range(n)]
            return Group([Episode((index, k), task, one, prompt) for k, one in enumerate(samplings)], position)

        stream = GroupStream(rollout, player, self._compare)
        groups, others = stream.run(make, *size)
        experience = Experience(groups=len(groups), spans=stream.spans)
        for episode in (episode for group in groups for episode in group.episodes):
            self._add(experience, episode)
        experience.discarded_samples = n * len(others)
        own = sum(trajectory.num_own_tokens for trajectory in experience.trajectories)
        experience.discarded_tokens = stream.tokens - own
        if {"outputs", "rewards"} <= stream.spans.keys():
            experience.reward_wait_s = stream.spans["rewards"][1] - stream.spans["outputs"][1]
        return experience, groups

    def _add(self, experience: Experience, episode: Episode) -> None:
        """Add what an episode came to."""
        experience.environment_s += episode.environment_s
        if episode.error:
            experience.failures["rollout"][episode.error] += 1
            return
        experience.turns += len(episode.turns)
        if episode.failure:
            experience.failures["reward"][episode.failure] += 1
        if episode.trajectory is not None:
            experience.scored += not episode.failure
            experience.trajectories.append(episode.trajectory)
            experience.tasks.append(episode.task)
            experience.scores.append(self._score(episode))

    def _score(self, episode: Episode) -> Score | None:
        """Score of an episode; None if it is left out."""
        if not episode.failure:
            return Score(episode.reward, episode.rewards)
        return None if (value := self._config.reward.failure_value) is None else Score(value)

    def _compare(self, group: Group) -> None:
        """Compare the rewards of a group whose episodes have ended."""
        scored = [(episode.trajectory, self._score(episode)) for episode in group.episodes]
        group.members = [(one, score.reward) for one, score in scored if one is not None and score is not None]
        group.is_informative = False
        if len(group.members) >= smallest_group(self._recipe):
            rewards, lengths = [reward for _, reward in group.members], [one.num_own_tokens for one, _ in group.members]
            most = self._config.sampling.max_tokens
            group.rewarded = rewarded_group(self._recipe, rewards, lengths, most)
            group.is_informative = group.rewarded.informative

    def _samples(self, groups: Sequence[Group]) -> list[Sample]:
        """The samples of a step, with advantages over all its groups; without those of `algorithm.mask_truncated`."""
        rewarded = [group.rewarded for group in groups if group.rewarded is not None]
        advantages = step_advantages(rewarded, self._recipe)
        return [
            Sample(
                prompt=np.asarray(trajectory.prompt_token_ids, dtype=np.int64),
                output=np.asarray(trajectory.token_ids, dtype=np.int64),
                rollout_logprobs=np.asarray(trajectory.logprobs, dtype=np.float32),
                reward=float(reward),
                advantage=advantage[:length].numpy() if advantage.dim() else float(advantage),
                loss_mask=np.asarray(trajectory.loss_mask or [True] * len(trajectory.token_ids), dtype=np.bool_),
            )
            for group, one, of_group in zip(groups, rewarded, advantages, strict=True)
            for (trajectory, _), reward, length, advantage in zip(
                group.members, one.rewards, one.lengths, of_group, strict=True
            )
            if not (self._recipe.mask_truncated and trajectory.finish_reason == "length")
        ]


class AheadMaker:
    """Makes the experience of later steps, up to the last of `steps`, in a separate thread while the trainer updates.

    The experience of step t begins when the weights have version `t - max_staleness` or a newer one: the steps collect
    the experience of step t at version t.
    """

    def __init__(self, maker: ExperienceMaker, max_staleness: int, steps: int) -> None:
        self._maker, self._ahead, self._steps = maker, max_staleness, steps
        self._thread = ThreadPoolExecutor(1, "rollouts ahead")
        self._futures: dict[int, Future[Experience]] = {}

    def collect(self, rollout: Any, sampling: SamplingParams, step: int) -> Experience:
        """The experience of this step; the weights have had as many updates. Re-raises the error of its making."""
        for later in range(step, min(step + self._ahead + 1, self._steps)):
            if later not in self._futures:
                self._futures[later] = self._thread.submit(self._make, rollout, sampling, later)
        experience = SYSTEM.result(self._futures[step], math.inf)
        del self._futures[step]
        return experience

    def close(self) -> None:
        """Begin no further step; the one in progress ends with the rollout."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make(self, rollout: Any, sampling: SamplingParams, step: int) -> Experience:
        if (before := self._futures.get(step - 1)) is not None:
            before.result()  # an error ends the steps after it, too
        return self._maker.collect(rollout, sampling, step)
