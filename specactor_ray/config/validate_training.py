"""Ranges and contradictions that only matter for training. Each function rejects one thing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from operator import attrgetter

from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import AlgorithmName, TrainerBackend
from specactor_ray.config.validate import reject_below
from specactor_ray.errors import ConfigError, clipped, clipped_text

SMALLEST = {
    "algorithm.max_sampling_rounds": 1,
    "algorithm.overlong_buffer": 0,
    "reward.workers": 1,
    "trainer.ranks": 1,
    "trainer.cores": 1,
    "trainer.gpus": 0,
    "trainer.steps": 1,
    "trainer.prompts_per_step": 1,
    "trainer.warmup_steps": 0,
    "trainer.mini_batches": 1,
    "trainer.epochs": 1,
    "trainer.micro_batch_tokens": 1,
    "trainer.max_bad_steps": 1,
    "trainer.weight_bucket_mb": 1,
    "checkpoint.every": 1,
    "checkpoint.keep_last": 1,
}
# Dotted key → (above, up to); null is allowed where the type allows it.
RANGES = {
    "algorithm.clip_low": (0.0, 1.0),
    "algorithm.clip_high": (0.0, math.inf),
    "algorithm.value_clip": (0.0, math.inf),
    "algorithm.gamma": (0.0, 1.0),
    "algorithm.gae_lambda": (0.0, 1.0),
    "algorithm.importance_cap": (0.0, math.inf),
    "algorithm.max_logprob_gap": (0.0, math.inf),
    "reward.timeout_s": (0.0, math.inf),
    "trainer.learning_rate": (0.0, 1.0),
    "trainer.max_grad_norm": (0.0, math.inf),
    "trainer.stall_timeout_s": (0.0, math.inf),
}
NOT_NEGATIVE = (
    "algorithm.entropy_coef",
    "algorithm.kl_coef",
    "algorithm.overlong_penalty",
    "algorithm.value_coef",
    "trainer.weight_decay",
)


def validate_training(config: Config) -> None:
    """Check what `validate` leaves out because a rollout does without it.

    Raises:
        ConfigError: The first thing found wrong, with its key and the fix.
    """
    for check in CHECKS:
        check(config)


def reject_too_small_counts(config: Config) -> None:
    for key, smallest in SMALLEST.items():
        reject_below(key, attrgetter(key)(config), smallest)


def reject_numbers_out_of_range(config: Config) -> None:
    for key, (above, up_to) in RANGES.items():
        value = attrgetter(key)(config)
        if value is not None and not (above < value <= up_to and math.isfinite(value)):
            limit = "" if up_to == math.inf else f" and at most {up_to:g}"
            raise ConfigError(key, f"{value!r} is out of range.", f"use a number above {above:g}{limit}.")
    for key in NOT_NEGATIVE:
        value = attrgetter(key)(config)
        if not 0.0 <= value < math.inf:
            raise ConfigError(key, f"{value!r} is out of range.", "use 0 or more.")


def reject_betas_out_of_range(config: Config) -> None:
    for key in ("trainer.beta1", "trainer.beta2"):
        value = attrgetter(key)(config)
        if not 0.0 <= value < 1.0:
            raise ConfigError(key, f"{value!r} is out of range.", "use 0 to below 1.")


def reject_a_reward_that_is_no_number(config: Config) -> None:
    value = config.reward.failure_value
    if value is not None and not math.isfinite(value):
        fix = "use a finite number, or null to leave such samples out."
        raise ConfigError("reward.failure_value", f"{value!r} is out of range.", fix)


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


def reject_ranks_of_a_single_process(config: Config) -> None:
    trainer = config.trainer
    if trainer.backend is TrainerBackend.torch and trainer.ranks > 1:
        problem = f"{trainer.ranks} ranks, but trainer.backend=torch is a single process."
        raise ConfigError("trainer.ranks", problem, "use trainer.backend=deepspeed, or 1 rank.")


def reject_unknown_stage_or_dtype(config: Config) -> None:
    trainer = config.trainer
    if trainer.zero_stage not in (1, 2, 3):
        raise ConfigError("trainer.zero_stage", f"{trainer.zero_stage} is not a ZeRO stage.", "use 1, 2 or 3.")
    if trainer.dtype not in ("float32", "bfloat16"):
        raise ConfigError("trainer.dtype", f"{clipped(trainer.dtype)} is not known.", "use float32 or bfloat16.")
    if trainer.gpus > 1:
        problem = f"{trainer.gpus} GPUs, but a rank computes on one."
        raise ConfigError("trainer.gpus", problem, "use 1 and raise trainer.ranks (trainer.backend=deepspeed).")


def reject_warmup_longer_than_the_run(config: Config) -> None:
    trainer = config.trainer
    if trainer.warmup_steps > trainer.steps:
        problem = f"{trainer.warmup_steps} steps are more than trainer.steps ({trainer.steps})."
        raise ConfigError("trainer.warmup_steps", problem, "lower it, or train longer.")


CHECKS: tuple[Callable[[Config], None], ...] = (
    reject_too_small_counts,
    reject_numbers_out_of_range,
    reject_betas_out_of_range,
    reject_a_reward_that_is_no_number,
    reject_an_answer_pattern_that_does_not_compile,
    reject_groups_without_a_baseline,
    reject_greedy_rollouts,
    reject_ranks_of_a_single_process,
    reject_unknown_stage_or_dtype,
    reject_warmup_longer_than_the_run,
)
