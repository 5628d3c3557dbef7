"""What makes a trained drafter: everything that a result depends on, checked before anything is loaded."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from specactor_ray.config.validate import DTYPES
from specactor_ray.errors import InputError

DEVICES = ("cpu", "cuda")
LEARNING_RATES = {"draft_model": 1e-3, "eagle": 3e-3}
"""Trainable method → learning rate. A head is one layer, most of it untrained, and takes larger steps."""
METHODS = tuple(LEARNING_RATES)


@dataclass(frozen=True, slots=True)
class CorpusRecipe:
    """What the recorded rollouts depend on."""

    target: str
    """A local directory, a Hugging Face id or a built-in name."""
    temperature: float = 1.0
    """Of the training rollouts, and of the loss; 0 is greedy, with a loss at temperature 1."""
    samples: int = 1
    """Rollouts of every prompt."""
    max_tokens: int = 192
    """Most output tokens of one."""
    seed: int = 0
    """Of the rollouts' noise and of the order of training."""
    chat: bool = True
    """Wrap prompts in the target's chat template."""
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class TrainRecipe:
    """How a drafter is trained."""

    corpus: CorpusRecipe
    method: str = "draft_model"
    tokens: int = 40_000
    """Output tokens to train on."""
    layers: str = "6"
    """`draft_model`: how many of the target's layers to keep (the outer ones), or which: `6`, or `0,1,15,28,29`."""
    draft_vocab: int = 8192
    """`eagle`: token ids the head can say, the most frequent ones; at most the target's vocabulary."""
    depths: int = 4
    """`eagle`: how many tokens ahead it is trained on its own predictions (training-time test)."""
    minutes: float | None = 15.0
    """Training ends after this time; collecting rollouts comes on top."""
    epochs: float | None = None
    """Training ends after this many passes over the corpus."""
    learning_rate: float = 1e-3
    """At its highest; `LEARNING_RATES` says what suits a method."""
    warmup_steps: int = 10
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    batch_tokens: int = 512
    """Most positions of one batch, prompts and padding included."""
    dtype: str = "float32"
    """Arithmetic of training; weights are float32."""

    def facts(self) -> dict[str, Any]:
        """As plain data; two recipes with equal facts give the same drafter."""
        return asdict(self)


def check(recipe: TrainRecipe) -> None:
    """Refuse what cannot be trained.

    Raises:
        InputError: The first option that is wrong, with what is allowed.
    """
    if recipe.method not in METHODS:
        raise InputError(f"--method: {recipe.method!r} cannot be trained; use one of {', '.join(METHODS)}")
    if recipe.minutes is None and recipe.epochs is None:
        raise InputError("--minutes or --epochs must say when training ends")
    check_corpus(recipe.corpus)
    for name, value, good, allowed in _ranges(recipe):
        if value is not None and not good(value):
            raise InputError(f"--{name.replace('_', '-')}: {value!r} is out of range; use {allowed}")
    if recipe.dtype not in DTYPES:
        raise InputError(f"--dtype: {recipe.dtype!r} is not known; use one of {', '.join(DTYPES)}")
    parse_layers(recipe.layers)


def check_corpus(recipe: CorpusRecipe) -> None:
    """Refuse rollouts that cannot be made. Raises InputError."""
    if not 0.0 <= recipe.temperature < math.inf:
        raise InputError(f"--temperature: {recipe.temperature!r} is out of range; use 0 or more")
    for name in ("samples", "max_tokens"):
        if getattr(recipe, name) < 1:
            raise InputError(f"--{name.replace('_', '-')}: {getattr(recipe, name)} is too small; use 1 or more")
    if not 0 <= recipe.seed < 2**64:
        raise InputError(f"--seed: {recipe.seed} is out of range; use 0 to 2**64 - 1")


def _ranges(recipe: TrainRecipe) -> tuple[tuple[str, float | None, Callable[[float], bool], str], ...]:
    def positive(value: float) -> bool:
        return 0.0 < value < math.inf

    return (
        ("tokens", recipe.tokens, lambda value: value >= 1, "1 or more"),
        ("minutes", recipe.minutes, positive, "a number above 0"),
        ("epochs", recipe.epochs, positive, "a number above 0"),
        ("learning_rate", recipe.learning_rate, positive, "a number above 0"),
        ("batch_tokens", recipe.batch_tokens, lambda value: value >= 1, "1 or more"),
        ("draft_vocab", recipe.draft_vocab, lambda value: value >= 2, "2 or more"),
        ("depths", recipe.depths, lambda value: 1 <= value <= 16, "1 to 16"),
    )


def parse_layers(text: str) -> int | tuple[int, ...]:
    """`6` → 6; `0,4,29` → (0, 4, 29).

    Raises:
        InputError: It is neither a number nor a rising list of numbers, or a number below 2.
    """
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise InputError(f"--layers: {text!r} is neither a number of layers nor a list of layers such as 0,1,15,28,29")
    numbers = tuple(int(part) for part in text.split(","))
    if len(numbers) > 1:
        if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
            raise InputError(f"--layers: the layers {text} must rise, each named once")
        return numbers
    if numbers[0] < 2:
        raise InputError(
            f"--layers: {numbers[0]} is too few; the first and the last layer are always kept: use 2 or more"
        )
    return numbers[0]


def choose_layers(num_layers: int, wanted: int | tuple[int, ...]) -> tuple[int, ...]:
    """Which of the target's layers (0 to num_layers - 1) to keep: the outer ones, as many from the front as from the
    back (one more from the front if the number is odd), or those that are named.

    Middle layers change their input least; without them the rest still fits together better than evenly spaced layers
    do, and training is the shorter for it (measured: docs/design/drafter-training.md).

    Raises:
        InputError: The target has not so many.
    """
    if isinstance(wanted, tuple):
        if wanted[-1] >= num_layers:
            raise InputError(f"--layers: there is no layer {wanted[-1]}; the target has layers 0 to {num_layers - 1}")
        chosen = wanted
    elif wanted < num_layers:
        back = wanted // 2
        chosen = (*range(wanted - back), *range(num_layers - back, num_layers))
    else:
        chosen = tuple(range(num_layers))
    if len(chosen) >= num_layers:
        raise InputError(
            f"--layers: {wanted if isinstance(wanted, int) else len(wanted)} of the target's {num_layers} layers would "
            f"draft no faster than the target; use 2 to {num_layers - 1}"
        )
    return chosen
