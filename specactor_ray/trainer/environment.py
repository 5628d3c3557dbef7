"""Environments: they answer the model between its turns, give rewards and end the conversation."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import logging
import math
import pickle
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from specactor_ray.config.fields import reject_unlisted
from specactor_ray.config.methods import import_named, is_named
from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import EnvironmentConfig, RewardConfig
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import ConfigError, clipped, clipped_text, counted_by_kind
from specactor_ray.rollout.prompts import Message, plain_messages
from specactor_ray.trainer.data import Task
from specactor_ray.trainer.rewards import RewardSample, Scorer, checked_reward, finite_number, made_up_samples
from specactor_ray.trainer.workers import Outcome, WorkerPool

logger = logging.getLogger(__name__)
_KEY = "environment.name"


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
        if isinstance(task.prompt, str):
            return [{"role": "user", "content": task.prompt}]
        return list(task.prompt)  # type: ignore[arg-type]

    async def step(self, turn: Turn) -> Reply:
        """Answer a turn of the model."""
        raise NotImplementedError

    async def close(self) -> None:
        """Free resources outside of the instance. Called at the end of a sample, but not if the run ends before."""


# ---- shipped environments ----

_CALLS = {"calc": r"<calc>(.*?)</calc>", "tool_call": r"<tool_call>\s*(\{.*?\})\s*</tool_call>"}
"""Format → pattern of a call; its group is the expression, or the JSON object with it."""
_MOST_CALLS = 4
"""Number of calls of a turn that are answered."""
_LONGEST, _LARGEST = 200, 10.0**30
"""Longest expression in characters, and largest value."""
_OPERATORS = (ast.UAdd, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_ARITHMETIC = (ast.Expression, ast.Constant, ast.UnaryOp, ast.BinOp, *_OPERATORS)


class Calculator(Environment):
    """Evaluates arithmetic expressions in calls of the model. A turn without a call is the answer, which
    `reward.functions` score.

    Args:
        call: `calc`, `<calc>2 * (3 + 4)</calc>`; or `tool_call`, the format of many chat templates:
            `<tool_call>{"name": "calculator", "arguments": {"expression": "2 * 3"}}</tool_call>`.
        role: Role of the messages with results: `tool` if the chat template has it.
    """

    def __init__(self, call: str = "calc", role: str = "user") -> None:
        if call not in _CALLS:
            raise ValueError(f"call is {call!r}; use one of {', '.join(_CALLS)}")
        self.call, self.role = call, role

    async def step(self, turn: Turn) -> Reply:
        calls = re.findall(_CALLS[self.call], turn.text, re.DOTALL)
        if not calls or turn.is_last:
            return Reply(reward=turn.score(), done=True)
        results = [self._result(text) for text in calls[:_MOST_CALLS]]
        texts = results if self.role == "tool" else ["\n".join(results)]
        return Reply([{"role": self.role, "content": text} for text in texts])

    def _result(self, text: str) -> str:
        try:
            if self.call == "tool_call":
                request = json.loads(text)
                if request["name"] != "calculator":
                    return f"error: there is no tool {clipped(request['name'])}"
                text = request["arguments"]["expression"]
                if not isinstance(text, str):
                    raise TypeError
            return evaluate(text)
        except ZeroDivisionError:
            return "error: division by zero"
        except (ValueError, KeyError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError):
            return "error: not an arithmetic expression"


def evaluate(expression: str) -> str:
    """The value of an arithmetic expression. Raises ValueError or SyntaxError if it is none, too long or too large, and
    ZeroDivisionError."""
    if len(expression) > _LONGEST:
        raise ValueError("too long")
    tree = ast.parse(expression.strip(), mode="eval")
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    if not all(isinstance(node, _ARITHMETIC) for node in ast.walk(tree)) or {*map(type, constants)} - {int, float}:
        raise ValueError("not arithmetic")
    value = eval(compile(tree, "expression", "eval"))  # numbers and operators alone
    if not abs(value) <= _LARGEST:
        raise ValueError("too large")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return f"{value:.10g}" if isinstance(value, float) else str(value)


class Retry(Environment):
    """Scores each turn by `reward.functions`; after a wrong answer its message has the number of tries left.

    Args:
        tries: Most answers of the model.
        discount: Factor of the reward for each previous wrong answer, one with a reward below 1.
    """

    def __init__(self, tries: int = 3, discount: float = 1.0) -> None:
        if tries < 1:
            raise ValueError("tries must be 1 or more")
        if not 0.0 <= discount <= 1.0:
            raise ValueError("discount must be from 0 to 1")
        self.tries, self.discount = tries, discount

    async def step(self, turn: Turn) -> Reply:
        reward, left = turn.score(), self.tries - turn.number - 1
        if reward >= 1.0 or left <= 0 or turn.is_last:
            return Reply(reward=reward * self.discount**turn.number, done=True)
        text = f"That is not right. Tries left: {left}. Give another answer."
        return Reply([{"role": self.role, "content": text}])


ENVIRONMENTS: dict[str, type[Environment]] = {"calculator": Calculator, "retry": Retry}


def find_environment(name: str) -> type[Environment]:
    """The environment with this name, or the user's own `package.module:Class`. Raises ConfigError."""
    if ":" not in name:
        reject_unlisted(_KEY, name, (*sorted(ENVIRONMENTS), "package.module:Class"))
        return ENVIRONMENTS[name]
    found = import_named(name, _KEY)
    lacking = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or lacking:
        problem = f"{name} is no environment: it has no {lacking[0]}." if lacking else f"{name} is not a class."
        raise ConfigError(_KEY, problem, "derive a class from specactor_ray.trainer.environment.Environment.")
    return found


def make_environment(config: EnvironmentConfig) -> Environment:
    """Create an instance with the options of the configuration. Raises ConfigError."""
    assert config.name is not None
    kind = find_environment(config.name)
    try:
        return kind(**config.options)
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        problem = f"{config.name} refuses them ({type(error).__name__}: {clipped_text(str(error))})."
        names = list(inspect.signature(kind).parameters)
        fix = f"its options are {', '.join(names)}." if names else "it has no options; leave them out."
        raise ConfigError("environment.options", problem, fix) from None


def check_environment(config: Config, tasks: Sequence[Task]) -> None:
    """Check that an environment of the user's own answers made-up outputs for one of these tasks, in a process as in
    training. Raises ConfigError; with `reward.failure_value`, the reward of a sample that fails, it is logged."""
    section, reasons = config.environment, Counter[str]()
    if not is_named(section.name or ""):
        return
    with WorkerPool("environment", section.timeout_s, partial(EnvironmentWorker, section, config.reward), 1) as pool:
        for task in tasks:
            for sample in made_up_samples(task, config.sampling.max_tokens):
                if not (problem := _try_once(pool, task, sample)):
                    return
                reasons[problem] += 1
    problem = f"{section.name} failed on the first tasks with made-up outputs: {counted_by_kind(reasons)}."
    if config.reward.failure_value is None:
        raise ConfigError(_KEY, problem, "reset and step that work for any task and output (docs/environments.md).")
    logger.warning("%s: %s", _KEY, problem)


def _try_once(pool: WorkerPool, task: Task, sample: RewardSample) -> str:
    """Play up to two turns. Returns why one failed; empty if none did."""

    def ask(*request: Any) -> Outcome:
        return SYSTEM.result(pool.submit(request), math.inf)

    begun, problem = ask("reset", (task, 0))
    if problem:
        return problem
    state = begun[0]
    for number, is_last in enumerate((False, True)):
        taken, problem = ask("step", (state, sample, sample.token_ids, number, is_last))
        if problem:
            break
        state, reply, _ = taken
        if reply.done:
            break
    ask("close", (state,))
    return problem


# ---- in worker processes ----


class EnvironmentWorker:
    """Environments in a worker process: a request is the name of a method and its arguments.

    A request holds the pickled instance, an answer the instance after the step. So any process can execute any step,
    and a step whose process died is repeated from the same state.
    """

    def __init__(self, config: EnvironmentConfig, reward: RewardConfig) -> None:
        make_environment(config)  # the imports are part of the process's start
        self._config, self._scorer = config, Scorer(reward)

    def __call__(self, request: tuple[str, tuple[Any, ...]]) -> Any:
        method, arguments = request
        return asyncio.run(getattr(self, method)(*arguments))

    async def reset(self, task: Task, seed: int) -> tuple[bytes, list[Message]]:
        """A new instance, and the first messages."""
        instance = make_environment(self._config)
        messages = checked_messages(await _called(instance.reset, task, seed), "reset")
        return _pickled(instance), messages

    async def step(
        self, state: bytes, sample: RewardSample, token_ids: tuple[int, ...], number: int, is_last: bool
    ) -> tuple[bytes, Reply, dict[str, float | None]]:
        """The instance after a turn, its reply, and the values of the reward functions if it called them. `sample`
        holds the text of the turn and the data of the task."""
        instance, rewards = pickle.loads(state), dict[str, float | None]()

        def score() -> float:
            found = self._scorer.score(sample)
            rewards.update(found.rewards)
            return found.reward

        turn = Turn(sample.text, token_ids, number, is_last, sample.finish_reason, score)
        reply = checked_reply(await _called(instance.step, turn))
        return _pickled(instance), reply, rewards

    async def close(self, state: bytes) -> None:
        """Close the instance, at the end of the sample."""
        await _called(pickle.loads(state).close)


async def _called(method: Callable[..., Any], *arguments: Any) -> Any:
    result = method(*arguments)
    return await result if inspect.isawaitable(result) else result


def _pickled(instance: Environment) -> bytes:
    try:
        return pickle.dumps(instance)
    except Exception as error:  # noqa: BLE001 - its attributes may raise anything
        raise ValueError(
            f"an instance cannot be kept between its steps ({error}). Fix: plain data in its attributes, or "
            "__getstate__ and __setstate__ that leave out and restore the rest"
        ) from None


def checked_messages(messages: Any, method: str) -> list[Message]:
    """Messages of an environment as plain data. Raises ValueError or InputError if they have another type."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"{method} returned {clipped(messages)} where a list of chat messages belongs")
    plain: list[Message] = plain_messages(messages)
    if method == "step" and any(message["role"] == "assistant" for message in plain):
        raise ValueError("step returned a message of the role assistant, which is the model's")
    return plain


def checked_reply(reply: Any) -> Reply:
    """A reply as plain data. Raises ValueError or InputError if it has another type."""
    if not isinstance(reply, Reply):
        raise ValueError(f"step returned {clipped(reply)} where a Reply belongs")
    reward = checked_reward(finite_number(reply.reward, "step returned the reward"))
    return Reply([] if reply.done else checked_messages(reply.messages, "step"), reward, bool(reply.done))
