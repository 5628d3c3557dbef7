"""The samples of a step in one stream of requests: groups without an advantage are replaced while others still run.

A step is trained on the shortest beginning of its tasks, in their order, that has the wanted number of informative
groups. So it depends on no time: a later group that ends earlier takes no place, and all behind the beginning is
cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specactor_ray.core.types import SamplingParams
from specactor_ray.learner.algorithms import RewardedGroup
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.trainer.data import Task
from specactor_ray.transport.messages import RequestStats

_WAKE_S = 0.5
"""Longest uninterrupted wait; signals are handled between two."""


@dataclass(slots=True)
class Episode:
    """One sample: an output, or a conversation, and its reward."""

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
    """Reason why its reward or its environment failed; empty otherwise."""
    environment_s: float = 0.0
    """Seconds of waiting for its environment."""
    state: bytes | None = None
    """The instance of its environment, once there is one."""
    trajectory: Trajectory | None = None
    """The whole episode as one output, at its end; None without a token."""

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

    def joined(self, text: str) -> Trajectory:
        """The turns and what is between them as one output; `text` is the decoded output."""
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


@dataclass(slots=True)
class Group:
    """The samples of one task."""

    episodes: list[Episode]
    position: tuple[int, int]
    """Numbers of tasks taken from the data, and of skipped ones, with this task."""
    is_informative: bool | None = None
    """Whether its rewards differ; None until all of its episodes have ended."""
    members: list[tuple[Trajectory, float]] = field(default_factory=list)
    """The samples with a reward."""
    rewarded: RewardedGroup | None = None
    """Their rewards; None if they are too few to be compared."""


class GroupStream:
    """Rolls out the groups of a step as one stream of a `Rollout`. `player` is an `Outputs` or `Conversations`: its
    `play` takes this stream and an episode. `compare` sets `is_informative` of a group whose episodes have ended."""

    def __init__(self, rollout: Any, player: Any, compare: Callable[[Group], None]) -> None:
        self._rollout, self._player, self._compare = rollout, player, compare
        self._number, self._is_over = 0, False
        """Number of the stream of requests, and whether no further one begins."""
        self.tokens = 0
        """Number of output tokens of the requests that have ended."""
        self.spans: dict[str, tuple[float, float]] = {}
        """`outputs`, `rewards` → times of the first and of the last one that ended, by `time.perf_counter`."""

    def run(
        self, make: Callable[[int], Group], wanted: int, most: int, share: float = 1.0
    ) -> tuple[list[Group], list[Group]]:
        """The groups that count, in the order of their tasks, and the others that were begun. Raises ActorLostError if
        no verifier was available.

        Args:
            make: Makes the group of a task's number.
            wanted: Number of informative groups that complete a step.
            most: Number of groups that complete it, whatever they are.
            share: Expected share of informative groups: so many run ahead of the need. Which count does not depend on
                it.
        """
        self._rollout.queue.wake_verifiers()
        with self._rollout.queue.opening_stream() as self._number:
            return asyncio.run(self._run(make, wanted, most, share))

    async def generate(self, prompt: Sequence[int], sampling: SamplingParams, session: str | None = None) -> Trajectory:
        """Output of a request. If this is cancelled, the request is, too, and has ended when this ends."""
        if self._is_over:
            raise asyncio.CancelledError
        handle = await self._rollout.queue.begin(prompt, sampling, session=session, stream=self._number)
        try:
            output: Trajectory = await handle
        except asyncio.CancelledError:
            handle.drop()
            output = await handle
            self.tokens += len(output.token_ids)
            raise
        self.tokens += len(output.token_ids)
        self._mark("outputs")
        return output

    async def _run(
        self, make: Callable[[int], Group], wanted: int, most: int, share: float
    ) -> tuple[list[Group], list[Group]]:
        groups, running = list[Group](), set[asyncio.Task[None]]()
        self._rollout.progress = (0, 0)
        try:
            while not (counted := _complete(groups, wanted, most)):
                missing = wanted - sum(group.is_informative is True for group in groups)
                undecided = sum(group.is_informative is None for group in groups)
                for _ in range(min(math.ceil(missing / share) - undecided, most - len(groups))):
                    groups.append(make(len(groups)))
                    running.add(asyncio.create_task(self._play(groups[-1])))
                done, running = await asyncio.wait(running, timeout=_WAKE_S, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    one.result()
            self._is_over = True
            for one in running:
                one.cancel()
            others = asyncio.all_tasks() - {asyncio.current_task()}  # a group does not await those of its episodes
            await asyncio.gather(*others, return_exceptions=True)
        except BaseException:  # an interruption does not wait for rewards and environments
            self._player.close()
            raise
        return groups[:counted], groups[counted:]

    async def _play(self, group: Group) -> None:
        async def play(episode: Episode) -> None:
            await self._player.play(self, episode)
            self._mark("rewards")
            self._rollout.progress = (self._rollout.progress[0] + 1, self._rollout.progress[1])

        self._rollout.progress = (self._rollout.progress[0], self._rollout.progress[1] + len(group.episodes))
        try:
            await asyncio.gather(*map(play, group.episodes))
        except KeyboardInterrupt:  # the loop has it already; raised again it would end the cancellation of the others
            raise asyncio.CancelledError from None
        self._compare(group)

    def _mark(self, what: str) -> None:
        """Extend a span to the present time."""
        now = time.perf_counter()
        self.spans[what] = self.spans.get(what, (now, now))[0], now


def _complete(groups: Sequence[Group], wanted: int, most: int) -> int:
    """Number of the first groups that complete a step; 0 while that is not decided."""
    informative = 0
    for number, group in enumerate(groups, start=1):
        if group.is_informative is None:
            return 0
        informative += group.is_informative
        if informative == wanted or number == most:
            return number
    return 0
