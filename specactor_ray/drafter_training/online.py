"""Training an EAGLE head while it is in use: a copy of it that learns, in short steps, from rollouts as they end.

The tokens that the target sampled are what the head learns to say; the target's distributions, which training from a
corpus uses, would be a hundred times what the hidden states take, and they are not at hand. A sampled token is an
unbiased estimate of the distribution, so the gradient of the cross entropy is right on average.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specactor_ray.config.online import OnlineConfig
from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.drafter_training.eagle import EagleExample, make_batch
from specactor_ray.drafter_training.eagle_unroll import unroll_loss
from specactor_ray.drafters.eagle import EagleProposer
from specactor_ray.modeling.eagle_checkpoint import load_head, trained_weights
from specactor_ray.modeling.eagle_head import EagleHead

_MAX_GRAD_NORM = 1.0
_FROZEN = ("embed_tokens.weight", "lm_head.weight")


@dataclass(slots=True, eq=False)
class _Kept:
    """An example of at most one step's size, and how often it may still be learned from."""

    example: EagleExample
    left: int
    place: float
    """Random; orders the examples that have been learned from equally often."""


class EagleLearner:
    """A trainable head with its optimizer and what it learns from. Not thread-safe; knows no Ray and no clock.

    A function of the weights it begins with, the examples in their order, and the seed.

    Args:
        head: Float32; owned by the learner from now on. Embedding and output layer, which are the target's, stay as
            they are.
        config: Rates and sizes.
        version: Version of the weights it begins with.
        seed: Of the order of the examples.
    """

    def __init__(self, head: EagleHead, config: OnlineConfig, version: int = 0, seed: int = 0) -> None:
        self._head, self._config, self._first_version = head.train(), config, version
        self._device = head.fc.weight.device
        for name, weight in head.named_parameters():
            weight.requires_grad_(name not in _FROZEN)
        self._trained = [weight for weight in head.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=config.learning_rate, weight_decay=0.0)
        self._random = random.Random(seed)
        self._kept: list[_Kept] = []
        self.tokens = 0
        """Positions that are kept to learn from."""
        self.steps = 0
        """Optimizer steps that were done."""
        self.skipped = 0
        """Steps that were left out because the loss or a gradient was not finite."""

    @property
    def version(self) -> int:
        """Of the weights that others should have: one more after every `steps_per_version` steps."""
        return self._first_version + self.steps // self._config.steps_per_version

    def weights(self) -> dict[str, torch.Tensor]:
        """What `EagleRunner.load_weights` takes; the learner's own tensors, which the next step changes."""
        return trained_weights(self._head)

    def add(self, example: EagleExample) -> None:
        """Learn from this example too; the oldest ones make room for it."""
        self._kept += [
            _Kept(part, self._config.passes, self._random.random())
            for part in _parts(example, self._config.batch_tokens)
        ]
        self.tokens = sum(len(kept.example) for kept in self._kept)
        while self.tokens > self._config.buffer_tokens:
            self.tokens -= len(self._kept.pop(0).example)

    def step(self) -> dict[str, float] | None:
        """One optimizer step on at most `batch_tokens` positions; those that were learned from least come first.

        Returns:
            `loss` (per position, summed over depths), `overlap` (probability that the head gave to the sampled token,
            one token ahead), `grad_norm` and `tokens`; None, and nothing was changed, when there is nothing to learn.
        """
        while examples := self.next_examples():
            batch = make_batch(examples, self._head).to(self._device)
            with torch.enable_grad():
                loss, overlaps = unroll_loss(self._head, batch, self._config.depths)
            if loss.requires_grad:  # else none of the tokens is in the draft vocabulary
                return self._update(loss, overlaps[0], len(batch.teacher))
        return None

    def next_examples(self) -> list[EagleExample]:
        """What the next step learns from, of at most `batch_tokens` padded positions; counts as one pass over it."""
        chosen, longest = list[_Kept](), 0
        for kept in sorted(self._kept, key=lambda one: (-one.left, one.place)):
            longest = max(longest, len(kept.example))
            if longest * (len(chosen) + 1) > self._config.batch_tokens:
                break
            chosen.append(kept)
        for kept in chosen:
            kept.left -= 1
            kept.place = self._random.random()
        self._kept = [kept for kept in self._kept if kept.left]
        self.tokens = sum(len(kept.example) for kept in self._kept)
        return [kept.example for kept in chosen]

    def _update(self, loss: torch.Tensor, overlap: float, tokens: int) -> dict[str, float]:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained, _MAX_GRAD_NORM))
        if math.isfinite(norm) and math.isfinite(float(loss.detach())):
            self._optimizer.step()
            self.steps += 1
        else:
            self.skipped += 1
        self._optimizer.zero_grad(set_to_none=True)
        return {"loss": float(loss.detach()), "overlap": overlap, "grad_norm": norm, "tokens": float(tokens)}


def _parts(example: EagleExample, size: int) -> list[EagleExample]:
    """The example in parts of at most `size` positions, in their order; those that are all prompt are left out.

    A part begins without the context before it, as a head does whose drafter joins late. So the last part is a whole
    one: it is the first that is short of the rest.
    """
    output_begin, parts = max(example.num_prompt - 1 - example.first, 0), list[EagleExample]()
    for end in range(len(example), output_begin, -size):
        begin = max(end - size, 0)
        parts.append(replace(example, states=example.states[begin:end], first=example.first + begin))
    return parts[::-1]


def choose_samples(lengths: Sequence[int], max_tokens: int, seed: int) -> list[int]:
    """Which of so long samples to learn from where there are too many: any, up to `max_tokens` tokens, and at least
    one. A function of its arguments, rising."""
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    chosen, total = list[int](), 0
    for index in order:
        if not chosen or total + lengths[index] <= max_tokens:
            chosen.append(index)
            total += lengths[index]
    return sorted(chosen)


def load_learner(
    drafter: DrafterConfig,
    target: TargetConfig,
    device: str,
    proposer: EagleProposer | None = None,
    version: int = 0,
    weights: Mapping[str, Any] | None = None,
) -> EagleLearner:
    """A learner of the configured head.

    Args:
        drafter: Names the head, and says how to learn.
        target: What it drafts for.
        device: `cpu` or `cuda`.
        proposer: Runs the same head in this process; its embedding, the largest part, serves both.
        version: Version of `weights`.
        weights: Where to begin (`EagleRunner.load_weights`); None: with those of the checkpoint.

    Raises:
        ModelLoadError: The head cannot be loaded.
    """
    assert drafter.model is not None  # validated
    trust = target.trust_remote_code
    head = load_head(drafter.model, target.model, device=device, trust_remote_code=trust)
    if proposer is not None:
        head.embed_tokens = proposer.embedding
    if weights is not None:
        head.load_state_dict({name: tensor.clone() for name, tensor in weights.items()}, strict=False)
    return EagleLearner(head, drafter.online, version)
