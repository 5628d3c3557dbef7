"""Ranges and contradictions that matter only for training. Each function rejects one problem."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable

from specactor_ray.config.ranges import reject_values_not_allowed
from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import AlgorithmName, TrainerBackend
from specactor_ray.config.validate import TRAINING_SECTIONS
from specactor_ray.core.errors import ConfigError, clipped, clipped_text


def validate_training(config: Config) -> None:
    """Check the parts that `validate` leaves out because a rollout does not need them.

    Raises:
        ConfigError: The first problem found, with its key and the fix.
    """
    for check in CHECKS:
        check(config)


def reject_values_outside_their_ranges(config: Config) -> None:
    for name in TRAINING_SECTIONS:
        reject_values_not_allowed(getattr(config, name), f"{name}.")


def reject_an_answer_pattern_that_does_not_compile(config: Config) -> None:
    pattern = config.reward.answer_pattern
    if pattern is not None:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            problem = f"{clipped(pattern)} is not a regular expression ({clipped_text(str(error))})."
            raise ConfigError("reward.answer_pattern", problem, "correct it (syntax: Python's re).") from None


def reject_groups_without_a_baseline(config: Config) -> None:
    name = config.algorithm.name
    if name is not AlgorithmName.ppo and config.data.n < 2:
        problem = f"{config.data.n} sample per prompt: {name.value} compares the samples of a prompt with each other."
        raise ConfigError("data.n", problem, "use 2 or more (8 is common), or algorithm.name=ppo.")


def reject_greedy_rollouts(config: Config) -> None:
    if config.sampling.temperature == 0.0:
        problem = "0 gives the same output for every sample of a prompt, and no gradient."
        raise ConfigError("sampling.temperature", problem, "use a temperature above 0, such as 1.")


def reject_an_environment_without_chat(config: Config) -> None:
    if config.environment.name is not None and not config.data.chat:
        problem = "an environment answers with chat messages, and data.chat is false."
        raise ConfigError("environment.name", problem, "use data.chat=true, or no environment.")


def reject_ranks_of_a_single_process(config: Config) -> None:
    trainer = config.trainer
    if trainer.backend is TrainerBackend.torch and trainer.ranks > 1:
        problem = f"{trainer.ranks} ranks, but trainer.backend=torch is a single process."
        raise ConfigError("trainer.ranks", problem, "use trainer.backend=deepspeed, or 1 rank.")


def reject_deepspeed_that_is_not_installed(config: Config) -> None:
    if config.trainer.backend is TrainerBackend.deepspeed and importlib.util.find_spec("deepspeed") is None:
        fix = "pip install deepspeed, or use trainer.backend=torch."
        raise ConfigError("trainer.backend", "DeepSpeed is not installed.", fix)


def reject_several_gpus_of_a_rank(config: Config) -> None:
    trainer = config.trainer
    if trainer.gpus > 1:
        problem = f"{trainer.gpus} GPUs, but a rank computes on one."
        raise ConfigError("trainer.gpus", problem, "use 1 and raise trainer.ranks (trainer.backend=deepspeed).")


def reject_offload_beside_rollouts(config: Config) -> None:
    if config.trainer.max_staleness and config.trainer.offload:
        problem = (
            "verifiers give up their caches during updates, and with trainer.max_staleness they generate meanwhile."
        )
        raise ConfigError("trainer.offload", problem, "use trainer.offload=false, or trainer.max_staleness=0.")


def reject_warmup_longer_than_the_run(config: Config) -> None:
    trainer = config.trainer
    if trainer.warmup_steps > trainer.steps:
        problem = f"{trainer.warmup_steps} steps are more than trainer.steps ({trainer.steps})."
        raise ConfigError("trainer.warmup_steps", problem, "lower it, or train longer.")


CHECKS: tuple[Callable[[Config], None], ...] = (
    reject_values_outside_their_ranges,
    reject_an_answer_pattern_that_does_not_compile,
    reject_groups_without_a_baseline,
    reject_greedy_rollouts,
    reject_an_environment_without_chat,
    reject_ranks_of_a_single_process,
    reject_deepspeed_that_is_not_installed,
    reject_several_gpus_of_a_rank,
    reject_offload_beside_rollouts,
    reject_warmup_longer_than_the_run,
)
