"""Training of an EAGLE head beside the policy: short steps of a copy of it on the samples of each RL step.

The head learns the sampled tokens of the target; the target's distributions, which training from a corpus uses, would
take a hundred times the space of the hidden states, and are not available. A sampled token is an unbiased estimate of
the distribution, so the gradient of the cross entropy is right on average.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.config.training_schema import OnlineConfig
from specactor_ray.distill.eagle import EagleExample, make_batch
from specactor_ray.distill.eagle_unroll import unroll_loss
from specactor_ray.draft.eagle.checkpoint import load_head, trained_weights
from specactor_ray.draft.eagle.head import EagleHead

_MAX_GRAD_NORM = 1.0
_FROZEN = ("embed_tokens.weight", "lm_head.weight")


class EagleLearner:
    """A trainable head with its optimizer. Not thread-safe; independent of Ray and of clocks.

    The result is a function of the initial weights, the examples in their order, and the seed.

    Args:
        head: Float32; owned by the learner from now on. Embedding and output layer, which are the target's, are not
            trained.
        seed: Seed of the order of the examples.
    """

    def __init__(self, head: EagleHead, config: OnlineConfig, seed: int = 0) -> None:
        self._head, self._config = head.train(), config
        self._device = head.fc.weight.device
        for name, weight in head.named_parameters():
            weight.requires_grad_(name not in _FROZEN)
        self._trained = [weight for weight in head.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=config.learning_rate, weight_decay=0.0)
        self._random = random.Random(seed)
        self.steps = 0
        """Number of completed optimizer steps."""
        self.skipped = 0
        """Number of steps left out because the loss or a gradient was not finite."""

    @property
    def version(self) -> int:
        """Version of the weights for drafters: one more after every `steps_per_version` steps."""
        return self.steps // self._config.steps_per_version

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights for `EagleRunner.load_weights`; the learner's own tensors, which the next step changes."""
        return trained_weights(self._head)

    def batches(self, examples: Iterable[EagleExample]) -> Iterator[list[EagleExample]]:
        """Batches of these examples for the training steps: all of their output, in parts, `passes` times over, each
        time in another order; a batch has at most `batch_tokens` positions, including padding."""
        most = self._config.batch_tokens
        parts = [part for example in examples for part in _parts(example, most)]
        for _ in range(self._config.passes):
            self._random.shuffle(parts)
            batch, longest = list[EagleExample](), 0
            for part in parts:
                longest = max(longest, len(part))
                if longest * (len(batch) + 1) > most:
                    yield batch
                    batch, longest = [], len(part)
                batch.append(part)
            if batch:
                yield batch

    def step(self, examples: Sequence[EagleExample]) -> dict[str, float] | None:
        """One optimizer step on one batch.

        Returns:
            `loss` (per position, summed over depths), `overlap` (the head's probability of the sampled token, one token
            ahead), `grad_norm` and `tokens`; None, without any change, if none of the tokens is in the draft
            vocabulary.
        """
        batch = make_batch(examples, self._head).to(self._device)
        with torch.enable_grad():
            loss, overlaps = unroll_loss(self._head, batch, self._config.depths)
        if not loss.requires_grad:
            return None
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained, _MAX_GRAD_NORM))
        if math.isfinite(norm) and math.isfinite(float(loss.detach())):
            self._optimizer.step()
            self.steps += 1
        else:
            self.skipped += 1
        self._optimizer.zero_grad(set_to_none=True)
        tokens = float(len(batch.teacher))
        return {"loss": float(loss.detach()), "overlap": overlaps[0], "grad_norm": norm, "tokens": tokens}


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
    """A learner of the configured head.

    Raises:
        ModelLoadError: The head cannot be loaded.
    """
    assert drafter.model is not None  # validated
    head = load_head(drafter.model, target.model, device=device, trust_remote_code=target.trust_remote_code)
    return EagleLearner(head, drafter.online)
