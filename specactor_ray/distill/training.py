"""Training of an EAGLE head: from a corpus, with checkpoints, and beside the policy, from the samples of each RL step.

Weights after n steps are a function of recipe and examples, also if training was interrupted: between two steps the
state is complete, and a checkpoint holds all of it.

Beside the policy the head learns the sampled tokens of the target; the target's distributions, which training from a
corpus uses, would take a hundred times the space of the hidden states, and are not available. A sampled token is an
unbiased estimate of the distribution, so the gradient of the cross entropy is right on average.
"""

from __future__ import annotations

import logging
import math
import pickle
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.config.training_schema import OnlineConfig
from specactor_ray.core.errors import InputError
from specactor_ray.core.files import replacing
from specactor_ray.core.signals import signals_deferred
from specactor_ray.distill.card import DrafterRecipe
from specactor_ray.distill.corpus import CorpusRecord
from specactor_ray.distill.eagle import (
    FROZEN,
    EagleExample,
    example_of,
    expected_counts,
    make_batch,
    new_head,
    unroll_loss,
)
from specactor_ray.draft.eagle.checkpoint import load_head, trained_weights
from specactor_ray.draft.eagle.head import EagleHead
from specactor_ray.learner.batching import cut_by_tokens
from specactor_ray.learner.engine import autocast, clipped_step, parameter_groups

logger = logging.getLogger(__name__)

CHECKPOINT_FILE = "checkpoint.pt"
_MAX_GRAD_NORM, _WEIGHT_DECAY, _WARMUP_STEPS = 1.0, 0.01, 10
_CHECKPOINT_S = 120.0
"""Seconds between two checkpoints."""
_COUNTED_ROLLOUTS = 128
"""Number of rollouts with distributions that choose the draft vocabulary."""


class HeadTrainer:
    """A trainable head (float32) with its optimizer, trained `depths` tokens ahead; embedding and output layer, which
    are the target's, are not trained."""

    def __init__(
        self,
        head: EagleHead,
        depths: int,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = _WEIGHT_DECAY,
        dtype: str = "float32",
    ) -> None:
        self.head, self._device = head.train(), head.fc.weight.device
        for name, weight in head.named_parameters():
            weight.requires_grad_(name not in FROZEN)
        self.optimizer = torch.optim.AdamW(parameter_groups(head, weight_decay), lr=learning_rate, betas=betas)
        self._rate = learning_rate
        self.steps = 0
        """Number of completed optimizer steps."""
        self.skipped = 0
        """Number of steps left out because the loss or a gradient was not finite."""
        self._depths, self._dtype = depths, dtype

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights for `EagleRunner.load_weights`; the trainer's own tensors, which the next step changes."""
        return trained_weights(self.head)

    def step(self, examples: Sequence[EagleExample], learning_rate: float | None = None) -> float | None:
        """One optimizer step on one batch. Returns the loss per position, summed over depths; None, without any change,
        if none of the tokens is in the draft vocabulary."""
        batch = make_batch(examples, self.head)
        with torch.enable_grad(), autocast(self._device, self._dtype):
            loss = unroll_loss(self.head, batch, self._depths)
        if not loss.requires_grad:
            return None
        loss.backward()
        norm = clipped_step(self.optimizer, _MAX_GRAD_NORM, self._rate if learning_rate is None else learning_rate)
        if math.isfinite(norm):
            self.steps += 1
        else:
            self.skipped += 1
            logger.warning("a step is left out: its loss or gradient is not finite")
        return float(loss.detach())


# ---- from a corpus ----


def head_for(model: Any, recipe: DrafterRecipe, records: Sequence[CorpusRecord]) -> EagleHead:
    """A new head for the target. Its draft vocabulary follows the target's distributions along the rollouts."""
    counts = torch.zeros(int(model.config.get_text_config().vocab_size))
    for record in records[:_COUNTED_ROLLOUTS]:
        counts += expected_counts(model, example_of(record))
    for record in records:
        counts += torch.bincount(torch.tensor(record.output_token_ids), minlength=len(counts))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return new_head(model, recipe.target, counts, recipe.draft_vocab).to(recipe.device)


class TrainLoop:
    """Trains a head on recorded rollouts, with a checkpoint from time to time. `on_progress` is called after every step
    with its loss.

    Attributes:
        step: Number of finished steps.
        seconds: Seconds of training so far.
        tokens: Number of output tokens trained on so far, including repetitions.
    """

    def __init__(
        self,
        trainer: HeadTrainer,
        recipe: DrafterRecipe,
        records: Sequence[CorpusRecord],
        folder: Path,
        on_progress: Callable[[float], None],
    ) -> None:
        self.trainer, self.step, self.seconds, self.tokens = trainer, 0, 0.0, 0
        self._recipe, self._records = recipe, records
        self._path, self._show = folder / CHECKPOINT_FILE, on_progress
        batches = cut_by_tokens([record.num_tokens for record in records], recipe.batch_tokens)
        rng = random.Random(recipe.seed)
        self._plan: list[list[int]] = []
        """Indices of the records of every step: batches of similar lengths, in another order each epoch."""
        for epoch in range(math.ceil(recipe.epochs)):
            rng.shuffle(batches)
            self._plan += batches[: math.ceil((recipe.epochs - epoch) * len(batches))]

    def resume(self) -> bool:
        """Continue from the checkpoint in the folder; False if there is none. Raises InputError if it is unreadable."""
        if not self._path.is_file():
            return False
        try:
            saved = torch.load(self._path, map_location="cpu", weights_only=True)
            if saved["head"].keys() != self.trainer.weights().keys():
                raise ValueError("it holds the weights of another head")
            self.trainer.head.load_state_dict(saved["head"], strict=False)
            self.trainer.optimizer.load_state_dict(saved["optimizer"])
            self.step, self.seconds, self.tokens = (saved["state"][name] for name in ("step", "seconds", "tokens"))
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"{self._path} cannot be read ({reason}). Fix: remove it; training then begins anew"
            ) from None
        return True

    def run(self) -> None:
        """Train for `epochs` passes; an interruption, which has effect between two steps, saves a checkpoint."""
        saved_at = self.seconds
        begin = time.monotonic() - saved_at
        try:
            for batch in self._plan[self.step :]:
                with signals_deferred():
                    self._step(batch)
                    self.seconds = time.monotonic() - begin
                if self.seconds - saved_at >= _CHECKPOINT_S:
                    self.save()
                    saved_at = self.seconds
        except KeyboardInterrupt:
            self.save()
            raise
        self.save()

    @property
    def fraction(self) -> float:
        """Share of the finished steps, 0 to 1."""
        return self.step / len(self._plan)

    def save(self) -> None:
        """Write the checkpoint; the previous one stays until the new one is complete."""
        with signals_deferred():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            optimizer = self.trainer.optimizer.state_dict()
            state = {"step": self.step, "seconds": self.seconds, "tokens": self.tokens}
            content = {"head": self.trainer.weights(), "optimizer": optimizer, "state": state}
            with replacing(self._path, self._path.with_suffix(".partial")) as partial:
                torch.save(content, partial)

    def _step(self, batch: Sequence[int]) -> None:
        rate = learning_rate(self._recipe.learning_rate, self.step, self.fraction)
        records = [self._records[index] for index in batch]
        loss = self.trainer.step([example_of(record) for record in records], rate)
        assert loss is not None  # the target's distributions are known for all tokens
        self.step += 1
        self.tokens += sum(len(record.output_token_ids) for record in records)
        self._show(loss)


def learning_rate(peak: float, step: int, fraction: float) -> float:
    """Learning rate of a step (from 0): a linear warm-up, times half a cosine to 0 at the end."""
    warm_up = min(1.0, (step + 1) / _WARMUP_STEPS)
    return peak * warm_up * 0.5 * (1.0 + math.cos(math.pi * min(fraction, 1.0)))


# ---- beside the policy ----


class EagleLearner(HeadTrainer):
    """A head that learns from the samples of RL steps. The result is a function of the initial weights, the examples in
    their order, and the seed, which orders the batches."""

    def __init__(self, head: EagleHead, config: OnlineConfig, seed: int = 0) -> None:
        super().__init__(head, config.depths, config.learning_rate, betas=(0.9, 0.999), weight_decay=0.0)
        self._config, self._random = config, random.Random(seed)

    @property
    def version(self) -> int:
        """Version of the weights for drafters: one more after every `steps_per_version` steps."""
        return self.steps // self._config.steps_per_version

    def batches(self, examples: Iterable[EagleExample]) -> Iterator[list[EagleExample]]:
        """Batches of these examples for the training steps: all of their output, in parts, `passes` times over, each
        time in another order; a batch has at most `batch_tokens` positions, including padding."""
        most = self._config.batch_tokens
        parts = [part for example in examples for part in _parts(example, most)]
        groups = cut_by_tokens(list(map(len, parts)), most)
        for _ in range(self._config.passes):
            self._random.shuffle(groups)
            yield from ([parts[index] for index in group] for group in groups)


def _parts(example: EagleExample, size: int) -> list[EagleExample]:
    """The example in parts of at most `size` positions, in their order; parts that are all prompt are left out.

    A part begins without the context before it, like a head whose drafter joins late. So the last part is a whole one,
    and the first part holds the shorter rest.
    """
    output_begin, parts = max(example.num_prompt - 1 - example.first, 0), list[EagleExample]()
    for end in range(len(example), output_begin, -size):
        begin = max(end - size, 0)
        parts.append(replace(example, states=example.states[begin:end], first=example.first + begin))
    return parts[::-1]


def choose_samples(lengths: Sequence[int], max_tokens: int, seed: int) -> list[int]:
    """Indices of the samples to train on if there are too many: chosen at random, up to `max_tokens` tokens, and at
    least one. A function of its arguments, ascending."""
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    chosen, total = list[int](), 0
    for index in order:
        if not chosen or total + lengths[index] <= max_tokens:
            chosen.append(index)
            total += lengths[index]
    return sorted(chosen)


def load_learner(drafter: DrafterConfig, target: TargetConfig, device: str) -> EagleLearner:
    """A learner of the configured head. Raises ModelLoadError."""
    assert drafter.model is not None  # validated
    head = load_head(drafter.model, target.model, device=device, trust_remote_code=target.trust_remote_code)
    return EagleLearner(head, drafter.online)
