"""Settings of a trained EAGLE head, checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from specactor_ray.config.schema import DTYPES
from specactor_ray.core.errors import InputError

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class CorpusRecipe:
    """Settings that determine the recorded rollouts."""

    target: str
    """A local directory, a Hugging Face id or a built-in name."""
    temperature: float = 1.0
    """Temperature of the training rollouts and of the loss; 0 is greedy, with a loss at temperature 1."""
    samples: int = 1
    """Number of rollouts of every prompt."""
    max_tokens: int = 192
    """Most output tokens of one rollout."""
    seed: int = 0
    """Seed of the rollouts' noise and of the order of training."""
    chat: bool = True
    """Wrap prompts in the target's chat template."""
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class TrainRecipe:
    """Settings of the training of a head."""

    corpus: CorpusRecipe
    tokens: int = 40_000
    """Number of output tokens to train on."""
    draft_vocab: int = 8192
    """Size of the head's vocabulary, the most frequent token ids; at most the target's."""
    depths: int = 4
    """Tokens ahead that the head is trained on its own predictions (training-time test)."""
    minutes: float | None = 15.0
    """Time after which training ends, without the collection of rollouts."""
    epochs: float | None = None
    """Number of passes over the corpus after which training ends."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    warmup_steps: int = 10
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    batch_tokens: int = 512
    """Most positions of one batch, including prompts and padding."""
    dtype: str = "float32"
    """Arithmetic of training; weights are float32."""


def check(recipe: TrainRecipe) -> None:
    """Raise InputError for the first invalid option, with its allowed values."""
    if recipe.minutes is None and recipe.epochs is None:
        raise InputError("--minutes or --epochs must say when training ends")
    check_corpus(recipe.corpus)

    def positive(value: float) -> bool:
        return 0.0 < value < math.inf

    ranges: tuple[tuple[str, Callable[[float], bool], str], ...] = (
        ("tokens", lambda value: value >= 1, "1 or more"),
        ("minutes", positive, "a number above 0"),
        ("epochs", positive, "a number above 0"),
        ("learning_rate", positive, "a number above 0"),
        ("batch_tokens", lambda value: value >= 1, "1 or more"),
        ("draft_vocab", lambda value: value >= 2, "2 or more"),
        ("depths", lambda value: 1 <= value <= 16, "1 to 16"),
    )
    for name, good, allowed in ranges:
        value = getattr(recipe, name)
        if value is not None and not good(value):
            raise InputError(f"--{name.replace('_', '-')}: {value!r} is out of range; use {allowed}")
    if recipe.dtype not in DTYPES:
        raise InputError(f"--dtype: {recipe.dtype!r} is not known; use one of {', '.join(DTYPES)}")


def check_corpus(recipe: CorpusRecipe) -> None:
    """Refuse rollouts that cannot be made. Raises InputError."""
    if not 0.0 <= recipe.temperature < math.inf:
        raise InputError(f"--temperature: {recipe.temperature!r} is out of range; use 0 or more")
    for name in ("samples", "max_tokens"):
        if getattr(recipe, name) < 1:
            raise InputError(f"--{name.replace('_', '-')}: {getattr(recipe, name)} is too small; use 1 or more")
    if not 0 <= recipe.seed < 2**64:
        raise InputError(f"--seed: {recipe.seed} is out of range; use 0 to 2**64 - 1")
