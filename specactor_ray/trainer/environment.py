"""Interface of environments: they answer the model between its turns, give rewards and end the conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specactor_ray.rollout.prompts import Message
from specactor_ray.trainer.data import Task


@dataclass(frozen=True, slots=True)
class Turn:
    """One output of the model."""

    text: str
    """Decoded output without special tokens."""
    token_ids: tuple[int, ...]
    number: int
    """Number of the turn, from 0."""
    is_last: bool
    """Whether no other turn can follow: `environment.max_turns` or `sampling.max_tokens` is reached."""
    finish_reason: str
    """`stop` or `length`."""
    score: Callable[[], float]
    """Function that returns the reward of the text by `reward.functions`; raises their errors."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of an environment to a turn."""

    messages: Sequence[Message] = ()
    """Chat messages, at least one unless `done`; none has the role `assistant`."""
    reward: float = 0.0
    """Reward of the turn; the reward of a sample is the sum over its turns."""
    done: bool = False
    """Whether the conversation has ended; messages are ignored then."""


class Environment:
    """The environment of one sample.

    It is created with `environment.options` as keyword arguments. `reset` and `step` run in any of several processes,
    each call in a separate event loop; between two calls the instance is kept as its pickle. Their results must be a
    function of task, seed and turns, otherwise a resumed run differs. Methods may be coroutines or plain functions.
    """

    role = "user"
    """Role of its messages; the chat template is tested with it before a run starts."""

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Begin the conversation. Returns the messages that the model answers first; by default the prompt of the task.

        Args:
            task: The row of the data: `prompt`, `answer`, and all other keys as `metadata`.
            seed: Seed of this sample, for randomness.
        """
        return prompt_messages(task)

    async def step(self, turn: Turn) -> Reply:
        """Answer a turn of the model."""
        raise NotImplementedError

    async def close(self) -> None:
        """Free resources outside of the instance. Called at the end of a sample, but not if the run ends before."""


def prompt_messages(task: Task) -> list[Message]:
    """The prompt of a task as chat messages."""
    if isinstance(task.prompt, str):
        return [{"role": "user", "content": task.prompt}]
    return list(task.prompt)  # type: ignore[arg-type]
