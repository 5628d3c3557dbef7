"""Environments in worker processes: a request holds the pickled instance, an answer the instance after the step.

So any process can execute any step, and a step whose process died is repeated from the same state.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specactor_ray.config.methods import import_named
from specactor_ray.config.training_schema import EnvironmentConfig, RewardConfig
from specactor_ray.core.errors import ConfigError, clipped, clipped_text
from specactor_ray.rollout.prompts import Message
from specactor_ray.trainer.data import Task
from specactor_ray.trainer.environment import Environment, Reply, Turn
from specactor_ray.trainer.rewards import RewardSample, Scorer
from specactor_ray.trainer.shipped_environments import Calculator, Retry

ENVIRONMENTS: dict[str, type[Environment]] = {"calculator": Calculator, "retry": Retry}
_KEY = "environment.name"


@dataclass(frozen=True, slots=True)
class Reset:
    """Request for a new instance. The answer is its pickle and the first messages."""

    task: Task
    seed: int


@dataclass(frozen=True, slots=True)
class TurnStep:
    """Request for a step with one turn. The answer is the pickle of the instance and its `Reply`."""

    state: bytes
    sample: RewardSample
    """The turn's text, and the data of the task."""
    token_ids: tuple[int, ...]
    number: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Close:
    """Request to close the instance, at the end of the sample."""

    state: bytes


class BadEnvironmentError(Exception):
    """An environment violates its protocol."""


def find_environment(name: str) -> type[Environment]:
    """The environment with this name, or the user's own `package.module:Class`.

    Raises:
        ConfigError: It does not exist, or lacks a method.
    """
    if ":" not in name:
        if name not in ENVIRONMENTS:
            known = ", ".join(sorted(ENVIRONMENTS))
            raise ConfigError(_KEY, f"{clipped(name)} is not known.", f"use one of {known}, or package.module:Class.")
        return ENVIRONMENTS[name]
    found = import_named(name, _KEY)
    lacking = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or lacking:
        problem = f"{name} is no environment: it has no {lacking[0]}." if lacking else f"{name} is not a class."
        raise ConfigError(_KEY, problem, "derive a class from specactor_ray.trainer.environment.Environment.")
    return found


def make_environment(config: EnvironmentConfig) -> Environment:
    """Create an instance with the options of the configuration.

    Raises:
        ConfigError: The environment does not exist, or refuses the options.
    """
    assert config.name is not None
    kind = find_environment(config.name)
    try:
        return kind(**config.options)
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        problem = f"{config.name} refuses them ({type(error).__name__}: {clipped_text(str(error))})."
        names = list(inspect.signature(kind).parameters)
        fix = f"its options are {', '.join(names)}." if names else "it has no options; leave them out."
        raise ConfigError("environment.options", problem, fix) from None


@dataclass(frozen=True)
class EnvironmentWork:
    """Work of environment processes: `Reset`, `Step` or `Close` → its answer."""

    config: EnvironmentConfig
    reward: RewardConfig
    name = "environment"

    @property
    def timeout_s(self) -> float:
        return self.config.timeout_s

    def open(self) -> Callable[[Any], Any]:
        """Raises ConfigError if the environment or a reward function is not available."""
        make_environment(self.config)
        scorer = Scorer(self.reward)

        def respond(request: Reset | TurnStep | Close) -> Any:
            return asyncio.run(_respond(self.config, scorer, request))

        return respond


async def _respond(config: EnvironmentConfig, scorer: Scorer, request: Reset | TurnStep | Close) -> Any:
    if isinstance(request, Reset):
        instance = make_environment(config)
        messages = checked_messages(await _called(instance.reset, request.task, request.seed), "reset")
        return _pickled(instance), messages
    instance = pickle.loads(request.state)
    if isinstance(request, Close):
        return await _called(instance.close)
    sample = request.sample
    turn = Turn(
        sample.text,
        request.token_ids,
        request.number,
        request.is_last,
        sample.finish_reason,
        lambda: scorer(sample),
    )
    reply = checked_reply(await _called(instance.step, turn))
    return _pickled(instance), reply


async def _called(method: Callable[..., Any], *arguments: Any) -> Any:
    result = method(*arguments)
    return await result if inspect.isawaitable(result) else result


def _pickled(instance: Environment) -> bytes:
    try:
        return pickle.dumps(instance)
    except Exception as error:  # noqa: BLE001 - its attributes may raise anything
        raise BadEnvironmentError(
            f"an instance cannot be kept between its steps ({error}). Fix: plain data in its attributes, or "
            "__getstate__ and __setstate__ that leave out and restore the rest"
        ) from None


def checked_messages(messages: Any, method: str) -> list[Message]:
    """Messages of an environment as plain data. Raises BadEnvironmentError if they have another type."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise BadEnvironmentError(f"{method} returned {clipped(messages)} where a list of chat messages belongs")
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise BadEnvironmentError(
                f'{method} returned {clipped(message)} where {{"role": text, "content": text}} belongs'
            )
        if role == "assistant" and method == "step":
            raise BadEnvironmentError("step returned a message of the role assistant, which is the model's")
    try:
        plain: list[Message] = json.loads(json.dumps(list(messages)))
    except (TypeError, ValueError) as error:
        raise BadEnvironmentError(f"{method} returned messages that are no plain data ({error})") from None
    return plain


def checked_reply(reply: Any) -> Reply:
    """A reply as plain data. Raises BadEnvironmentError if it has another type."""
    if not isinstance(reply, Reply):
        raise BadEnvironmentError(f"step returned {clipped(reply)} where a Reply belongs")
    try:
        reward = float(reply.reward)
    except (TypeError, ValueError):
        raise BadEnvironmentError(f"step returned the reward {clipped(reply.reward)}, which is no number") from None
    if not math.isfinite(reward):
        raise BadEnvironmentError(f"step returned the reward {reward}")
    done = bool(reply.done)
    return Reply([] if done else checked_messages(reply.messages, "step"), reward, done)
