"""Samples that are conversations: turns of the model through the engine, and replies of an environment between them.

Each sample is a generator that yields futures (a turn, a step of its environment) and is resumed in the driver's thread
when they are done. The seed of a turn depends on that of the sample and its number, so no token depends on the time of
turns.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from specactor_ray.config.schema import Config
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.handle import Generates
from specactor_ray.rollout.prompts import encode_prompt
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.rollout.turns import ChatTurns, Message
from specactor_ray.sampling.seeds import derive_seed
from specactor_ray.trainer.data import Task
from specactor_ray.trainer.environment import Environment, EnvironmentWorker, Reply, find_environment
from specactor_ray.trainer.rewards import RewardSample
from specactor_ray.trainer.workers import Work, WorkerPool
from specactor_ray.transport.messages import RequestStats

logger = logging.getLogger(__name__)

Place = tuple[int, int]
"""Index of the task, and of the sample."""


@dataclass(slots=True)
class Episode:
    """One sample: its messages, and its reward."""

    place: Place
    task: Task
    sampling: SamplingParams
    """Sampling parameters with the seed of this sample."""
    prompt: tuple[int, ...] = ()
    """Token ids of the first messages."""
    output: list[int] = field(default_factory=list)
    """Token ids after the prompt: turns, and the tokens between them."""
    logprobs: list[float] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    """Whether each token of `output` was sampled by the model."""
    turns: list[Trajectory] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Versions of the weights, each with the number of output tokens at its end."""
    reward: float = 0.0
    finish_reason: str = "error"
    error: str = ""
    """Reason of a failed turn; empty otherwise."""
    failure: str = ""
    """Reason of a failure of its environment; empty otherwise."""
    environment_s: float = 0.0
    """Seconds of waiting for its environment."""

    @property
    def num_own_tokens(self) -> int:
        return sum(self.own)

    def add_turn(self, turn: Trajectory) -> None:
        """Append a turn of the model."""
        begin = len(self.output)
        self.versions += [(version, begin + tokens) for version, tokens in turn.versions]
        self.output += turn.token_ids
        self.logprobs += turn.logprobs
        self.own += [True] * len(turn.token_ids)
        self.versions.append((turn.weight_version, len(self.output)))
        self.turns.append(turn)

    def add_context(self, token_ids: Sequence[int]) -> None:
        """Append tokens between two turns."""
        self.output += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.own += [False] * len(token_ids)

    def trajectory(self, text: str) -> Trajectory:
        """The whole episode as one output; `text` is the decoded output."""
        versions = [
            one for one, after in zip(self.versions, [*self.versions[1:], (None, 0)], strict=True) if one[0] != after[0]
        ]
        return Trajectory(
            request_id=f"{self.place[0]}-{self.place[1]}",
            prompt_index=self.place[0],
            sample_index=self.place[1],
            prompt_token_ids=self.prompt,
            token_ids=tuple(self.output),
            logprobs=tuple(self.logprobs),
            text=text,
            finish_reason=self.finish_reason,
            sampling=self.sampling,
            stats=_added([turn.stats for turn in self.turns]),
            error=self.error,
            prompt=self.task.prompt,
            weight_version=versions[-1][0] if versions else 0,
            versions=tuple(versions[:-1]),
            loss_mask=tuple(self.own),
        )


class Conversations(WorkerPool):
    """Rolls out tasks as conversations.

    Args:
        tokenizer: Tokenizer of the target.
        context: Most tokens of a conversation, including the prompt.

    Raises:
        ConfigError: The environment or a reward function is not available.
        InputError: The chat template does not support conversations.
    """

    def __init__(self, config: Config, tokenizer: Any, context: int) -> None:
        section = config.environment
        open_environment = partial(EnvironmentWorker, section, config.reward)
        super().__init__(Work("environment", section.timeout_s, open_environment), section.workers)
        assert section.name is not None
        self._closes = getattr(find_environment(section.name), "close", None) is not Environment.close
        self._config, self._tokenizer, self._context = section, tokenizer, context
        self._turns = ChatTurns(tokenizer)

    def run(self, rollout: Any, tasks: Sequence[Task], sampling: SamplingParams, n: int) -> list[Episode]:
        """`n` episodes of each task, ordered by task and sample. Never raises for failures of an environment.

        Args:
            rollout: The `Rollout`.

        Raises:
            ActorLostError: No verifier was available.
        """
        places = [(index, number) for index in range(len(tasks)) for number in range(n)]
        episodes = [
            Episode(place, tasks[place[0]], replace(sampling, seed=derive_seed(sampling.seed, *place)))
            for place in places
        ]
        waiting, live = deque(episodes), dict[Place, Generator[Future[Any], None, None]]()
        ready, is_ready = deque[Place](), SYSTEM.event()
        rollout.progress = (0, len(episodes))

        def put(place: Place) -> None:
            ready.append(place)
            is_ready.set()

        def resume(place: Place) -> None:
            try:
                future = next(live[place])
            except StopIteration:
                del live[place]
                rollout.progress = (rollout.progress[0] + 1, len(episodes))
            else:
                future.add_done_callback(lambda _: put(place))

        try:
            while waiting or live:
                while waiting and len(live) < rollout.engine.max_waiting:
                    episode = waiting.popleft()
                    live[episode.place] = self._play(rollout.engine, episode)
                    resume(episode.place)
                if live:
                    is_ready.wait()
                    is_ready.clear()
                    while ready:
                        resume(ready.popleft())
        except BaseException:  # an interruption does not wait for environments
            self.close()
            raise
        finally:
            for one in live.values():
                one.close()
        return episodes

    def trajectory(self, episode: Episode) -> Trajectory:
        """An episode as one output."""
        return episode.trajectory(self._tokenizer.decode(episode.output, skip_special_tokens=True))

    # ---- one sample ----

    def _play(self, engine: Generates, episode: Episode) -> Generator[Future[Any], None, None]:
        begun = yield from self._ask(episode, "reset", episode.task, episode.sampling.seed)
        if begun is None:
            return
        state = yield from self._converse(engine, episode, *begun)
        if self._closes:
            future = self.submit(("close", (state,)))
            yield future
            if problem := future.result()[1]:
                logger.warning("an environment was not closed: %s", self._named(problem))

    def _converse(
        self, engine: Generates, episode: Episode, state: bytes, messages: Sequence[Message]
    ) -> Generator[Future[Any], None, bytes]:
        """Run all turns. Returns the last state of the environment."""
        try:
            episode.prompt = encode_prompt(self._tokenizer, list(messages), chat=True)
        except InputError as error:
            episode.failure = self._named(str(error))
            return state
        for number in range(self._config.max_turns):
            room = self._room(episode)
            if room < 1:
                episode.failure = self._named(f"a prompt of {len(episode.prompt)} tokens leaves no room for an output")
                return state
            turn = yield from self._turn(engine, episode, number, room)
            if turn.error or turn.finish_reason == "abort":
                episode.error = turn.error or "a turn was aborted"
                return state
            episode.add_turn(turn)
            is_last = number + 1 == self._config.max_turns or self._room(episode) < 1
            sample = self._sample(episode, turn)
            answered = yield from self._ask(episode, "step", state, sample, turn.token_ids, number, is_last)
            if answered is None:
                return state
            reply: Reply
            state, reply = answered
            episode.reward += reply.reward
            episode.finish_reason = turn.finish_reason if reply.done else "length"
            if reply.done or is_last:
                break
            try:
                between = self._turns.between(reply.messages, turn.token_ids)
            except InputError as error:
                episode.failure = self._named(str(error))
                return state
            if len(episode.prompt) + len(episode.output) + len(between) >= self._context:
                break
            episode.add_context(between)
        return state

    def _room(self, episode: Episode) -> int:
        """Most tokens of the next turn."""
        left = episode.sampling.max_tokens - episode.num_own_tokens
        room = min(left, self._context - len(episode.prompt) - len(episode.output))
        return room if self._config.turn_tokens is None else min(room, self._config.turn_tokens)

    def _turn(
        self, engine: Generates, episode: Episode, number: int, room: int
    ) -> Generator[Future[Any], None, Trajectory]:
        """Run a turn of the model. The first one is equal to the sample without an environment."""
        seed = derive_seed(episode.sampling.seed, number, 0) if number else episode.sampling.seed
        sampling = replace(episode.sampling, seed=seed, max_tokens=room)
        prompt = [*episode.prompt, *episode.output]
        handle = engine.submit(prompt, sampling, session=f"{episode.place}-{episode.sampling.seed}")
        try:
            yield handle.future
            return handle.result()
        finally:
            engine.drop(handle)

    def _sample(self, episode: Episode, turn: Trajectory) -> RewardSample:
        """Input of the reward functions, if the environment calls them for this turn."""
        task = episode.task
        own = tuple(token for token, is_own in zip(episode.output, episode.own, strict=True) if is_own)
        return RewardSample(
            task.prompt, turn.text, task.answer, task.metadata, own, turn.finish_reason, episode.sampling.max_tokens
        )

    def _ask(self, episode: Episode, method: str, *arguments: Any) -> Generator[Future[Any], None, Any]:
        """Answer of the environment; None, with the episode's `failure` set, if it fails."""
        begin = SYSTEM.now()
        future = self.submit((method, arguments))
        yield future
        episode.environment_s += SYSTEM.now() - begin
        answer, problem = future.result()
        if problem:
            episode.failure = self._named(problem)
        return answer

    def _named(self, problem: str) -> str:
        return f"{self._config.name}: {problem}"


def _added(stats: Sequence[RequestStats]) -> RequestStats:
    """Sum of the counters of several requests."""
    methods: dict[str, tuple[int, int]] = {}
    for one in stats:
        for method, (tried, right) in one.by_method.items():
            before = methods.get(method, (0, 0))
            methods[method] = (before[0] + tried, before[1] + right)
    steps, drafted, accepted = (sum(getattr(one, name) for one in stats) for name in ("steps", "drafted", "accepted"))
    return RequestStats(steps, drafted, accepted, methods)
