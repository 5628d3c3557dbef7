"""Samples that are conversations: turns of the model, which are requests, and replies of an environment between them.

The seed of a turn depends on that of the sample and its number, so no token depends on the time of turns.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import Any

from specactor_ray.config.schema import Config
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import InputError
from specactor_ray.rollout.detokenizer import decoded
from specactor_ray.rollout.prompts import ChatTurns
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.sampling.seeds import derive_seed
from specactor_ray.trainer.environment import Environment, EnvironmentWorker, find_environment
from specactor_ray.trainer.groups import Episode, GroupStream
from specactor_ray.trainer.rewards import reward_sample
from specactor_ray.trainer.workers import WorkerPool

logger = logging.getLogger(__name__)


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

    async def play(self, stream: GroupStream, episode: Episode) -> None:
        """Play an episode; a failure of its environment is in it. That is closed at the end, also of a cancelled
        one."""
        try:
            await self._converse(stream, episode)
        except InputError as error:
            episode.failure = f"{self._config.name}: {error}"
        finally:
            if self._closes and episode.state is not None and not self.closed:
                _, problem = await asyncio.wrap_future(self.submit(("close", (episode.state,))))
                if problem:
                    logger.warning("an environment was not closed: %s: %s", self._config.name, problem)
        if episode.parts and not episode.error:
            episode.trajectory = episode.joined(decoded(self._tokenizer, episode.output))

    async def _converse(self, stream: GroupStream, episode: Episode) -> None:
        episode.state, messages = await self._ask(episode, "reset", episode.task, episode.sampling.seed)
        turns = self._turns.now()
        episode.prompt = turns.begin(messages)
        for number in range(self._config.max_turns):
            turn = await self._turn(stream, episode, number)
            if turn.error or turn.finish_reason == "abort":
                episode.error = turn.error or "a turn was aborted"
                return
            episode.parts.append(turn)
            is_last = number + 1 == self._config.max_turns or self._room(episode) < 1
            own, most = episode.own_token_ids, episode.sampling.max_tokens
            sample = reward_sample(episode.task, turn.text, own, turn.finish_reason, most)
            arguments = (episode.state, sample, turn.token_ids, number, is_last)
            episode.state, reply, rewards = await self._ask(episode, "step", *arguments)
            episode.reward += reply.reward
            episode.rewards.update(rewards)
            episode.finish_reason = turn.finish_reason if reply.done else "length"
            if reply.done or is_last:
                return
            between = turns.between(reply.messages, turn.token_ids)
            if len(episode.prompt) + len(episode.output) + len(between) >= self._context:
                return
            episode.parts.append(between)

    def _room(self, episode: Episode) -> int:
        """Most tokens of the next turn."""
        left = episode.sampling.max_tokens - len(episode.own_token_ids)
        room = min(left, self._context - len(episode.prompt) - len(episode.output))
        return room if self._config.turn_tokens is None else min(room, self._config.turn_tokens)

    async def _turn(self, stream: GroupStream, episode: Episode, number: int) -> Trajectory:
        """Run a turn of the model. The first one is equal to the sample without an environment."""
        room = self._room(episode)
        if room < 1:
            raise InputError(f"a prompt of {len(episode.prompt)} tokens leaves no room for an output")
        seed = derive_seed(episode.sampling.seed, number, 0) if number else episode.sampling.seed
        sampling = replace(episode.sampling, seed=seed, max_tokens=room)
        session = f"{episode.place}-{episode.sampling.seed}"
        return await stream.generate([*episode.prompt, *episode.output], sampling, session)

    async def _ask(self, episode: Episode, method: str, *arguments: Any) -> Any:
        """Answer of the environment. Raises InputError if it fails."""
        begin, call = SYSTEM.now(), asyncio.wrap_future(self.submit((method, arguments)))
        try:
            answer, problem = await asyncio.shield(call)
        except asyncio.CancelledError:
            if not self._closes:
                raise
            answer, problem = await call  # an instance to close; the stream begins no further turn
        episode.environment_s += SYSTEM.now() - begin
        if problem:
            raise InputError(problem)
        return answer
