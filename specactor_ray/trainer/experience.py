"""From tasks to samples: roll out, score, compute advantages; sample again if groups give no gradient.

The experience of later steps may be made while the trainer updates (`AheadMaker`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specactor_ray.config.recipes import smallest_group
from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import AlgorithmConfig
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.types import SamplingParams
from specactor_ray.learner.algorithms import RewardedGroup, rewarded_group, step_advantages
from specactor_ray.learner.batching import Sample
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.sampling.seeds import derive_seed
from specactor_ray.trainer.conversations import Conversations
from specactor_ray.trainer.data import Task, TaskStream
from specactor_ray.trainer.rewards import RewardPool, Score, Scoring, Submitted, reward_sample
from specactor_ray.trainer.workers import Outcome, WorkerPool

Group = list[tuple[Trajectory, float]]
"""The samples of one prompt that have a reward."""
Compared = tuple[Group, RewardedGroup]


@dataclass(slots=True)
class Experience:
    """Samples of one training step, and observations of their making."""

    samples: list[Sample] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    """All trajectories of the step, including those that were sampled and dropped."""
    tasks: list[Task] = field(default_factory=list)
    """Task of each trajectory."""
    scores: list[Score | None] = field(default_factory=list)
    """Score of each trajectory, from functions or an environment; None if it is left out (`reward.failure_value`)."""
    zero_variance_groups: int = 0
    """Number of groups with equal rewards, before or after the overlong punishment."""
    groups: int = 0
    """Number of all groups."""
    rounds: int = 1
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

    def mark(self, what: str) -> None:
        """Extend a span to the present time."""
        now = time.perf_counter()
        self.spans[what] = self.spans.get(what, (now, now))[0], now

    @property
    def rewards(self) -> list[float]:
        """Rewards of the trajectories that have one."""
        return [score.reward for score in self.scores if score is not None]

    @property
    def is_unusable(self) -> bool:
        """Whether no group has the rewards that are compared, or all of them are `reward.failure_value`."""
        return not self.samples or (self.scored == 0 and bool(self.failures["reward"]))


class ExperienceMaker:
    """Makes the samples of a step; a function of the weights, the data's position, the step and the seed. `workers`
    are `Conversations`, or a `RewardPool`."""

    def __init__(self, config: Config, recipe: AlgorithmConfig, stream: TaskStream, workers: WorkerPool) -> None:
        self._config, self._recipe, self.stream, self._workers = config, recipe, stream, workers

    def collect(self, rollout: Any, sampling: SamplingParams, step: int) -> Experience:
        """Roll out and score the prompts of one step. Under dynamic sampling, further prompts replace groups with equal
        rewards, for at most `algorithm.max_sampling_rounds` rounds; if no group is left, those of the last round are
        used: they have no advantages, but may have a divergence, an entropy and values to train."""
        wanted, dynamic = self._config.trainer.prompts_per_step, bool(self._recipe.dynamic_sampling)
        experience, kept, alike = Experience(), list[Compared](), list[Compared]()
        skipped, self.stream.first_skip = self.stream.skipped, ""
        for number in range(self._recipe.max_sampling_rounds if dynamic else 1):
            seed = derive_seed(sampling.seed, step, number)
            tasks = self.stream.take(wanted - len(kept))
            found = self._roll_out(rollout, replace(sampling, seed=seed), tasks, self._config.data.n, experience)
            groups = [group for group in found if len(group) >= smallest_group(self._recipe)]
            experience.rounds = number + 1
            experience.groups += len(groups)
            alike.clear()
            for group in groups:
                most = self._config.sampling.max_tokens
                rewards, lengths = [reward for _, reward in group], [one.num_own_tokens for one, _ in group]
                rewarded = rewarded_group(self._recipe, rewards, lengths, most)
                (kept if rewarded.informative or not dynamic else alike).append((group, rewarded))
                experience.zero_variance_groups += not rewarded.informative
            if len(kept) >= wanted:
                break
        experience.samples = self._samples(kept or alike)
        experience.position = (self.stream.position, self.stream.skipped)
        experience.skipped_tasks, experience.first_skip = self.stream.skipped - skipped, self.stream.first_skip
        return experience

    def evaluate(self, rollout: Any) -> Experience:
        """Roll out and score the held-out tasks, beside the rollouts of a step if there are any; without samples for
        the update. Seeds depend on task and sample alone: evaluations of equal weights are equal."""
        section, sampling, experience = self._config.evaluation, self._config.sampling, Experience()
        warmth = sampling.temperature if section.temperature is None else section.temperature
        own = replace(sampling, seed=section.seed, temperature=warmth)
        self._roll_out(rollout, own, self.stream.held_out, section.n, experience)
        return experience

    def _roll_out(
        self, rollout: Any, sampling: SamplingParams, tasks: Sequence[Task], n: int, experience: Experience
    ) -> list[Group]:
        """Add the trajectories of these tasks to the experience, each with its score. Returns a group per task."""
        outputs = self._episodes if isinstance(self._workers, Conversations) else self._single_outputs
        groups: list[Group] = [[] for _ in tasks]
        failed = None if (value := self._config.reward.failure_value) is None else Score(value)
        for trajectory, (score, problem) in outputs(rollout, sampling, tasks, n, experience):
            experience.scored += not problem
            if problem:
                experience.failures["reward"][problem] += 1
                score = failed
            if not trajectory.token_ids:  # it failed before its first turn
                continue
            experience.trajectories.append(trajectory)
            experience.tasks.append(tasks[trajectory.prompt_index])
            experience.scores.append(score)
            if score is not None:
                groups[trajectory.prompt_index].append((trajectory, score.reward))
        return groups

    def _single_outputs(
        self, rollout: Any, sampling: SamplingParams, tasks: Sequence[Task], n: int, experience: Experience
    ) -> Iterable[tuple[Trajectory, Outcome]]:
        """Outputs and their rewards; without those of failed requests. An output is scored while others are rolled
        out."""
        assert isinstance(self._workers, RewardPool)
        most, groups = self._config.sampling.max_tokens, list[Submitted]()
        scoring = Scoring(self._workers, n)
        for one in rollout.stream([task.prompt for task in tasks], sampling, n):
            experience.mark("outputs")
            if one.error:
                experience.failures["rollout"][one.error] += 1
            sample = reward_sample(tasks[one.prompt_index], one.text, one.token_ids, one.finish_reason, most)
            is_scored = not one.error and bool(one.token_ids)
            if group := scoring.add(one, one.prompt_index, one.sample_index, sample if is_scored else None):
                group[1].add_done_callback(lambda _: experience.mark("rewards"))
                groups.append(group)
        begin = SYSTEM.now()
        scored = list[tuple[Trajectory, Outcome]]()
        for ended, future in groups:
            outcomes = SYSTEM.result(future, math.inf)
            scored += zip(ended, outcomes, strict=True)
        experience.reward_wait_s += SYSTEM.now() - begin
        return sorted(scored, key=lambda pair: (pair[0].prompt_index, pair[0].sample_index))

    def _episodes(
        self, rollout: Any, sampling: SamplingParams, tasks: Sequence[Task], n: int, experience: Experience
    ) -> Iterable[tuple[Trajectory, Outcome]]:
        """Conversations and their rewards; without those of failed turns."""
        assert isinstance(self._workers, Conversations)
        for episode in self._workers.run(rollout, tasks, sampling, n):
            experience.environment_s += episode.environment_s
            if episode.error:
                experience.failures["rollout"][episode.error] += 1
            else:
                experience.turns += len(episode.turns)
                score = Score(episode.reward, episode.rewards)
                yield self._workers.trajectory(episode), (score, episode.failure)

    def _samples(self, groups: Sequence[Compared]) -> list[Sample]:
        """The samples of a step, with advantages over all its groups; without those of `algorithm.mask_truncated`."""
        advantages = step_advantages([rewarded for _, rewarded in groups], self._recipe)
        return [
            Sample(
                prompt=np.asarray(trajectory.prompt_token_ids, dtype=np.int64),
                output=np.asarray(trajectory.token_ids, dtype=np.int64),
                rollout_logprobs=np.asarray(trajectory.logprobs, dtype=np.float32),
                reward=float(reward),
                advantage=advantage[:length].numpy() if advantage.dim() else float(advantage),
                loss_mask=np.asarray(trajectory.loss_mask or [True] * len(trajectory.token_ids), dtype=np.bool_),
            )
            for (group, rewarded), of_group in zip(groups, advantages, strict=True)
            for (trajectory, _), reward, length, advantage in zip(
                group, rewarded.rewards, rewarded.lengths, of_group, strict=True
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
