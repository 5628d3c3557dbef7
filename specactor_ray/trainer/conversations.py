"""Samples that are conversations: turns of the model, which are requests, and replies of an environment between them.

Each sample is a coroutine. The seed of a turn depends on that of the sample and its number, so no token depends on the
time of turns.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from specactor_ray.config.schema import Config
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.detokenizer import decoded
from specactor_ray.rollout.prompts import ChatTurns
from specactor_ray.rollout.queue import RequestQueue
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.sampling.seeds import derive_seed
from specactor_ray.trainer.data import Task
from specactor_ray.trainer.environment import Environment, EnvironmentWorker, find_environment
from specactor_ray.trainer.rewards import reward_sample
from specactor_ray.trainer.workers import WorkerPool
from specactor_ray.transport.messages import RequestStats

logger = logging.getLogger(__name__)

_WAKE_S = 0.5
"""Longest uninterrupted wait; signals are handled between two."""


@dataclass(slots=True)
class Episode:
    """One sample: its messages, and its reward."""

    place: tuple[int, int]
    """Index of the task, and of the sample."""
    task: Task
    sampling: SamplingParams
    """Sampling parameters with the seed of this sample."""
    prompt: tuple[int, ...] = ()
    """Token ids of the first messages."""
    parts: list[Trajectory | Sequence[int]] = field(default_factory=list)
    """What follows the prompt: turns of the model, and the token ids between two turns."""
    reward: float = 0.0
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Values of the reward functions, for the last turn that was scored."""
    finish_reason: str = "error"
    error: str = ""
    """Reason of a failed turn; empty otherwise."""
    failure: str = ""
    """Reason of a failure of its environment; empty otherwise."""
    environment_s: float = 0.0
    """Seconds of waiting for its environment."""

    @property
    def turns(self) -> list[Trajectory]:
        """Turns of the model."""
        return [part for part in self.parts if isinstance(part, Trajectory)]

    @property
    def output(self) -> list[int]:
        """Token ids after the prompt."""
        return [token for part in self.parts for token in (part.token_ids if isinstance(part, Trajectory) else part)]

    @property
    def own_token_ids(self) -> tuple[int, ...]:
        """Tokens that the model sampled."""
        return tuple(token for turn in self.turns for token in turn.token_ids)

    def trajectory(self, text: str) -> Trajectory:
        """The whole episode as one output; `text` is the decoded output."""
        logprobs, own, versions = list[float](), list[bool](), list[tuple[int, int]]()
        for part in self.parts:
            if isinstance(part, Trajectory):
                versions += [(version, len(own) + tokens) for version, tokens in part.versions]
                logprobs += part.logprobs
                own += [True] * len(part.token_ids)
                versions.append((part.weight_version, len(own)))
            else:
                logprobs += [0.0] * len(part)
                own += [False] * len(part)
        last = versions[-1][0] if versions else 0
        return Trajectory(
            request_id=f"{self.place[0]}-{self.place[1]}",
            prompt_index=self.place[0],
            sample_index=self.place[1],
            prompt_token_ids=self.prompt,
            token_ids=tuple(self.output),
            logprobs=tuple(logprobs),
            text=text,
            finish_reason=self.finish_reason,
            sampling=self.sampling,
            stats=RequestStats.total(turn.stats for turn in self.turns),
            error=self.error,
            prompt=self.task.prompt,
            weight_version=last,
            versions=tuple(one for one, after in itertools.pairwise(versions) if one[0] != after[0]),
            loss_mask=tuple(own),
        )


class Conversations(WorkerPool):
    """Rolls out tasks as conversations of at most `context` tokens, including the prompt. Raises ConfigError if the
    environment or a reward function is not available, InputError if the chat template has no conversations."""

    def __init__(self, config: Config, tokenizer: Any, context: int) -> None:
        section = config.environment
        open_environment = partial(EnvironmentWorker, section, config.reward)
        super().__init__("environment", section.timeout_s, open_environment, section.workers)
        assert section.name is not None
        self._closes = getattr(find_environment(section.name), "close", None) is not Environment.close
        self._config, self._tokenizer, self._context = section, tokenizer, context
        self._turns = ChatTurns(tokenizer, section.keep_outputs)

    def run(self, rollout: Any, tasks: Sequence[Task], sampling: SamplingParams, n: int) -> list[Episode]:
        """`n` episodes of each task, ordered by task and sample; failures of an environment are in them. `rollout` is a
        `Rollout`. Raises ActorLostError if no verifier was available."""
        episodes = [
            Episode((index, number), task, replace(sampling, seed=derive_seed(sampling.seed, index, number)))
            for index, task in enumerate(tasks)
            for number in range(n)
        ]
        rollout.progress = (0, len(episodes))
        try:
            asyncio.run(self._run(rollout, episodes))
        except BaseException:  # an interruption does not wait for environments
            self.close()
            raise
        return episodes

    def trajectory(self, episode: Episode) -> Trajectory:
        """An episode as one output."""
        return episode.trajectory(decoded(self._tokenizer, episode.output))

    async def _run(self, rollout: Any, episodes: Sequence[Episode]) -> None:
        room = asyncio.Semaphore(max(rollout.queue.max_waiting // 2, 1))  # an evaluation may run beside a rollout ahead

        async def play(episode: Episode) -> None:
            async with room:
                await self._play(rollout.queue, episode)
            rollout.progress = (rollout.progress[0] + 1, len(episodes))

        playing = {asyncio.ensure_future(play(episode)) for episode in episodes}
        while playing:
            done, playing = await asyncio.wait(playing, timeout=_WAKE_S, return_when=asyncio.FIRST_EXCEPTION)
            for one in done:
                one.result()

    # ---- one sample ----

    async def _play(self, queue: RequestQueue, episode: Episode) -> None:
        state = None
        try:
            state, messages = await self._ask(episode, "reset", episode.task, episode.sampling.seed)
            turns = self._turns.now()
            episode.prompt = turns.begin(messages)
            for number in range(self._config.max_turns):
                turn = await self._turn(queue, episode, number)
                if turn.error or turn.finish_reason == "abort":
                    episode.error = turn.error or "a turn was aborted"
                    break
                episode.parts.append(turn)
                is_last = number + 1 == self._config.max_turns or self._room(episode) < 1
                own, most = episode.own_token_ids, episode.sampling.max_tokens
                sample = reward_sample(episode.task, turn.text, own, turn.finish_reason, most)
                state, reply, rewards = await self._ask(episode, "step", state, sample, turn.token_ids, number, is_last)
                episode.reward += reply.reward
                episode.rewards.update(rewards)
                episode.finish_reason = turn.finish_reason if reply.done else "length"
                if reply.done or is_last:
                    break
                between = turns.between(reply.messages, turn.token_ids)
                if len(episode.prompt) + len(episode.output) + len(between) >= self._context:
                    break
                episode.parts.append(between)
        except InputError as error:
            episode.failure = f"{self._config.name}: {error}"
        if self._closes and state is not None:
            _, problem = await asyncio.wrap_future(self.submit(("close", (state,))))
            if problem:
                logger.warning("an environment was not closed: %s: %s", self._config.name, problem)

    def _room(self, episode: Episode) -> int:
        """Most tokens of the next turn."""
        left = episode.sampling.max_tokens - len(episode.own_token_ids)
        room = min(left, self._context - len(episode.prompt) - len(episode.output))
        return room if self._config.turn_tokens is None else min(room, self._config.turn_tokens)

    async def _turn(self, queue: RequestQueue, episode: Episode, number: int) -> Trajectory:
        """Run a turn of the model. The first one is equal to the sample without an environment."""
        room = self._room(episode)
        if room < 1:
            raise InputError(f"a prompt of {len(episode.prompt)} tokens leaves no room for an output")
        seed = derive_seed(episode.sampling.seed, number, 0) if number else episode.sampling.seed
        sampling = replace(episode.sampling, seed=seed, max_tokens=room)
        session = f"{episode.place}-{episode.sampling.seed}"
        return await queue.generate([*episode.prompt, *episode.output], sampling, session=session)

    async def _ask(self, episode: Episode, method: str, *arguments: Any) -> Any:
        """Answer of the environment. Raises InputError if it fails."""
        begin = SYSTEM.now()
        answer, problem = await asyncio.wrap_future(self.submit((method, arguments)))
        episode.environment_s += SYSTEM.now() - begin
        if problem:
            raise InputError(problem)
        return answer
