"""What an environment is: it answers the model between its turns, gives rewards and ends the conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specactor_ray.rollout.turns import Message
from specactor_ray.training.data import Task


@dataclass(frozen=True, slots=True)
class Turn:
    """One output of the model."""

    text: str
    """Special tokens left out."""
    token_ids: tuple[int, ...]
    number: int
    """From 0."""
    is_last: bool
    """No other turn can follow: `environment.max_turns` or `sampling.max_tokens` is reached."""
    finish_reason: str
    """`stop` or `length`."""
    score: Callable[[], float]
    """The reward that `reward.functions` give to the text; raises what they raise."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment answers."""

    messages: Sequence[Message] = ()
    """Chat messages, at least one unless `done`; none has the role `assistant`."""
    reward: float = 0.0
    """The reward of a sample is the sum over its turns."""
    done: bool = False
    """The conversation has ended; messages are ignored."""


class Environment:
    """The environment of one sample.

    It is made with `environment.options` as keyword arguments. `reset` and `step` run in any of some processes, each
    call in an event loop of its own; between two calls the instance is kept as its pickle. What they return must be a
    function of task, seed and turns, or a resumed run is not the same. Methods may be coroutines or plain.
    """

    role = "user"
    """Role of the messages that it answers with; the chat template is tested with it before a run starts."""

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Begin. Returns the messages that the model answers first; here the prompt of the task.

        Args:
            task: The row of the data: `prompt`, `answer`, and all other keys as `metadata`.
            seed: Of this sample, for randomness.
        """
        return prompt_messages(task)

    async def step(self, turn: Turn) -> Reply:
        """Answer a turn of the model."""
        raise NotImplementedError

    async def close(self) -> None:
        """Free what lives outside of the instance. Called at the end of a sample, but not where the run ends before."""


def prompt_messages(task: Task) -> list[Message]:
    """The prompt of a task as chat messages."""
    if isinstance(task.prompt, str):
        return [{"role": "user", "content": task.prompt}]
    return list(task.prompt)  # type: ignore[arg-type]
