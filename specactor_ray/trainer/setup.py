"""All checks of a training run that need no cluster."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from specactor_ray.config import Config
from specactor_ray.config.rules import validate_training
from specactor_ray.config.training_schema import RewardFunctionConfig
from specactor_ray.core.console import say
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.models.cache_size import available_bytes
from specactor_ray.models.loading import load_tokenizer
from specactor_ray.rollout.memory import MemoryItem, check_memory, gib, memory_lines
from specactor_ray.rollout.preflight import max_prompt_tokens, start_notes
from specactor_ray.rollout.prompts import ChatTurns, Prompt, encode_prompt
from specactor_ray.runs.training import TrainingRun
from specactor_ray.trainer.conversations import Conversations
from specactor_ray.trainer.data import TaskOrder, TaskStream, open_source
from specactor_ray.trainer.environment import Environment
from specactor_ray.trainer.environment_work import make_environment
from specactor_ray.trainer.memory import FIXES, plan_memory
from specactor_ray.trainer.rewards import NEED_ANSWERS, Scorer


def prepare(config: Config) -> None:
    """Set values that depend on other sections, and refuse what cannot work.

    Raises:
        ConfigError: A value is out of range, or a reward function or the environment is missing or does not fit.
    """
    validate_training(config)
    generated = (config.data.path or "").startswith("reasoning_gym:")
    if not config.reward.functions:
        config.reward.functions = [RewardFunctionConfig("reasoning_gym" if generated else "exact_match")]
    Scorer(config.reward)
    if config.environment.name is not None:
        make_environment(config.environment)
    if not generated and any(term.name == "reasoning_gym" for term in config.reward.functions):
        problem = f"reasoning_gym scores its own tasks only, and data.path is {config.data.path}."
        raise ConfigError("reward.functions", problem, "use exact_match, math, or package.module:function.")


def checked_tasks(config: Config) -> TaskStream:
    """The tasks in their order, from the first one on; at least one of them fits the model.

    Raises:
        ConfigError, InputError: See `open_source`; or there is no room for prompts, no prompt fits, or the chat
            template does not support the environment.
    """
    target, data = config.target, config.data
    source = open_source(data, config.sampling.seed)  # its errors are reported before the tokenizer is loaded
    needs_answer = [term.name for term in config.reward.functions if term.name in NEED_ANSWERS]
    if needs_answer and source[0].answer is None:
        raise InputError(
            f"data.path: task 1 of {data.path} has no {data.answer_key!r} (data.answer_key), and the reward "
            f"{needs_answer[0]} compares with it. Fix: add it, or choose another reward.functions"
        )
    tokenizer = load_tokenizer(target.model, trust_remote_code=target.trust_remote_code)
    limit = max_prompt_tokens(config)
    if config.environment.name is not None:
        role = getattr(make_environment(config.environment), "role", Environment.role)
        ChatTurns(tokenizer).between([{"role": role, "content": "Answer"}], ())

    def count_tokens(prompt: Prompt) -> int:
        return len(encode_prompt(tokenizer, prompt, data.chat))

    def stream() -> TaskStream:
        order = TaskOrder(len(source), config.sampling.seed, data.shuffle)
        return TaskStream(source, order, count_tokens, limit)

    stream().take(1)
    return stream()


def open_conversations(config: Config) -> Conversations | None:
    """Object that rolls out conversations; None without an environment."""
    if config.environment.name is None:
        return None
    tokenizer = load_tokenizer(config.target.model, trust_remote_code=config.target.trust_remote_code)
    return Conversations(config, tokenizer, max_prompt_tokens(config) + config.sampling.max_tokens)


def checked_memory(config: Config) -> list[MemoryItem]:
    """Memory of the run. Raises ConfigError with the numbers if it cannot fit this machine's memory."""
    plan = plan_memory(config)
    check_memory(config, plan, available_bytes(), FIXES)
    return plan


def announce(config: Config, run: TrainingRun, memory: Sequence[MemoryItem], console: Console) -> None:
    """Print the run, the checkpoint it continues from, and its memory need."""
    for item in memory:
        say(console, f"memory: {item.owner}, {item.what}: {gib(item.num_bytes)}")
    for line in memory_lines(config, memory):
        say(console, line)
    samples = config.trainer.prompts_per_step * config.data.n
    what = f"{config.algorithm.name.value}, {config.trainer.steps} steps of {samples} samples"
    say(console, f"run {config.run.name}: {what}, mode {config.mode.value}; results go to {run.folder}")
    for note in start_notes(config):
        say(console, note)
    if run.checkpoint is not None:
        say(console, f"run {config.run.name}: continues from {run.checkpoint} (step {run.state.step})")
