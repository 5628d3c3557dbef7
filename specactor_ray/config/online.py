"""Keys of a drafter that is trained during RL training, and checks of their values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from specactor_ray.config.ranges import at_least, limited, positive
from specactor_ray.core.errors import ConfigError

if TYPE_CHECKING:
    from specactor_ray.config.schema import Config, DrafterConfig


class OnlineWhere(str, Enum):
    """Part of the run that trains a drafter during training."""

    off = "off"
    """No training: the drafter stays as it was loaded."""
    trainer = "trainer"
    """The trainer's first rank, after each policy update."""


@dataclass
class OnlineConfig:
    """Training of an EAGLE head beside the policy, on the samples of each step."""

    where: OnlineWhere = OnlineWhere.off
    """`off`, or `trainer`: the trainer trains the head on the samples of each step, after the policy update."""
    learning_rate: float = positive(1.0e-4, fix="use a number above 0; 1e-4 is the default.")
    """Learning rate of AdamW."""
    buffer_tokens: int = at_least(2, default=8192)
    """Most positions used in one step; if its samples have more, they are chosen at random. The hidden states of one
    position take 4 bytes x three layers x the target's hidden size."""
    batch_tokens: int = at_least(2, default=256)
    """Most positions of one optimizer step of the head."""
    passes: int = at_least(1, default=4)
    """Number of passes over each position."""
    steps_per_version: int = at_least(1, default=16)
    """Optimizer steps of the head after which its weights become a new version, with a number that is one higher."""
    depths: int = limited(lambda value: 1 <= value <= 16, "is out of range.", "use 1 to 16.", default=3)
    """Tokens ahead that are trained, which is how often the head's own predictions are fed back."""


def taught_by_trainer(config: Config) -> DrafterConfig | None:
    """The drafter that the trainer trains, if there is one and it is in use."""
    if config.mode.value == "plain":
        return None
    return next((drafter for drafter in config.drafters if drafter.online.where is OnlineWhere.trainer), None)


def reject_batch_above_buffer(drafter: DrafterConfig, key: str) -> None:
    online = drafter.online
    if online.batch_tokens > online.buffer_tokens:
        problem = f"{online.batch_tokens} positions a step, but only {online.buffer_tokens} are kept."
        raise ConfigError(f"{key}.online.batch_tokens", problem, f"raise {key}.online.buffer_tokens, or lower it.")


def reject_two_sources_of_weights(drafter: DrafterConfig, key: str) -> None:
    if drafter.online.where is not OnlineWhere.off and drafter.follow_policy:
        problem = "true, but the drafter has weights of its own, which are learned online."
        raise ConfigError(f"{key}.follow_policy", problem, f"use false, or {key}.online.where=off.")
