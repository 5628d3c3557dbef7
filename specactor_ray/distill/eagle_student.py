"""An EAGLE head in training: it learns to predict, several tokens ahead, the target's own distributions.

Loss per depth: cross entropy against the target's own distribution over the draft vocabulary, plus the distance between
the inputs of the head's output layer and of the target's. The second term makes small data sufficient: every position
provides `hidden` numbers instead of one distribution (EAGLE, arXiv 2401.15077, regresses features; EAGLE-3, arXiv
2503.01840, drops it for large corpora and unrolls the head over its own predictions, as done here).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specactor_ray.core.errors import InputError
from specactor_ray.distill.corpus import CorpusRecord
from specactor_ray.distill.eagle import EagleExample, expected_counts, make_batch, new_head
from specactor_ray.distill.eagle_unroll import EagleBatch, unroll, unroll_loss
from specactor_ray.distill.recipe import TrainRecipe
from specactor_ray.draft.eagle.checkpoint import save_head, trained_weights
from specactor_ray.draft.eagle.head import EagleHead, default_aux_layers
from specactor_ray.learner.engine import autocast
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import HEAD_INPUT
from specactor_ray.sampling.keyed import sample_rows

Batch = Sequence[tuple[CorpusRecord, torch.Tensor]]
"""Records with the target's hidden states, `(tokens - 1, width)`; see `EagleStudent.hidden_layers`."""
_COUNTED_ROLLOUTS = 128
"""Number of rollouts whose distributions choose the draft vocabulary."""


class EagleStudent:
    """A new head for the recipe's target, on its device.

    Args:
        recipe: Target, draft vocabulary, depths and seed.

    Raises:
        InputError: The target's layers are not of the Llama family.
        ModelLoadError: The target cannot be loaded.
    """

    module: EagleHead
    """The head, after `prepare`."""

    def __init__(self, recipe: TrainRecipe, device: str) -> None:
        self._target: Any = load_model(recipe.corpus.target, trust_remote_code=recipe.corpus.trust_remote_code)
        reject_foreign_layers(self._target, recipe.corpus.target)
        layers = int(self._target.config.get_text_config().num_hidden_layers)
        self.hidden_layers: tuple[int, ...] = (*(layer - 1 for layer in default_aux_layers(layers)), HEAD_INPUT)
        self._recipe, self._device = recipe, torch.device(device)

    def prepare(self, records: Sequence[CorpusRecord], states: Callable[[int], torch.Tensor]) -> None:
        """Choose the draft vocabulary from the target's distributions along the rollouts, create the head, and release
        the target."""
        counts = torch.zeros(int(self._target.config.get_text_config().vocab_size))
        for record in records[:_COUNTED_ROLLOUTS]:
            counts += expected_counts(self._target, _example(record, states(record.index)))
        for record in records:
            counts += torch.bincount(torch.tensor(record.output_token_ids), minlength=len(counts))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._recipe.corpus.seed)
            head = new_head(self._target, self._recipe.corpus.target, counts, self._recipe.draft_vocab)
        self.module, self._target = head.to(self._device), None

    def backward(self, batch: Batch) -> dict[str, float]:
        """Add the gradient of the batch's mean loss per output token; returns sums: `tokens`, `loss`, `overlap`."""
        examples = self._examples(batch)
        with autocast(self._device, self._recipe.dtype):
            loss, overlaps = unroll_loss(self.module, examples, self._recipe.depths)
        loss.backward()
        count = float(len(examples.teacher))
        return {"tokens": count, "loss": float(loss.detach()) * count, "overlap": overlaps[0] * count}

    @torch.no_grad()
    def held_out(self, batch: Batch) -> dict[str, float]:
        """Sums over the output tokens: `tokens`, `loss`, `overlap`, and `matches`, the number of tokens that the head
        samples equal to the target's, with the target's noise after the recorded prefix."""
        examples, head = self._examples(batch), self.module
        loss, overlaps = unroll_loss(head, examples, self._recipe.depths)
        outputs, rows = next(unroll(head, examples, 1))
        logits = torch.full((len(rows), head.config.vocab_size), float("-inf"))
        logits[:, head.draft_token_ids().cpu()] = head.lm_head(outputs).float().cpu()
        records = [record for record, _ in batch]
        tokens = [token for record in records for token in record.output_token_ids]
        samplings = [record.sampling for record in records for _ in record.output_token_ids]
        places = [place for record in records for place in range(len(record.output_token_ids))]
        chosen = rows.tolist()
        sampled = sample_rows(logits, [samplings[i] for i in chosen], [places[i] for i in chosen]).token_ids
        matches = sum(token == tokens[i] for token, i in zip(sampled, chosen, strict=True))
        count = float(len(chosen))
        sums = {"loss": float(loss) * count, "matches": float(matches), "overlap": overlaps[0] * count}
        return {"tokens": count, **sums}

    def trained(self) -> dict[str, torch.Tensor]:
        """Name → trained weight."""
        return trained_weights(self.module)

    def load_trained(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load the result of `trained`. Raises ValueError for weights of another head."""
        own = self.trained()
        if own.keys() != weights.keys():
            raise ValueError(f"the weights are those of {len(weights)} parameters, and {len(own)} are trained")
        self.module.load_state_dict(dict(weights), strict=False)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the head in the format of its proposer; returns facts for `drafter.json`."""
        save_head(self.module, folder)
        config = self.module.config
        trained = sum(weight.numel() for weight in self.module.parameters() if weight.requires_grad)
        return {
            "draft_vocab": config.draft_vocab_size,
            "layers_read": list(config.exported_layers),
            "parameters": sum(weight.numel() for weight in self.trained().values()),
            "parameters_trained": trained,
        }

    def _examples(self, batch: Batch) -> EagleBatch:
        return make_batch([_example(*one) for one in batch], self.module).to(self._device)


def _example(record: CorpusRecord, states: torch.Tensor) -> EagleExample:
    """A recorded rollout; its states are those of `EagleStudent.hidden_layers`, the input of the output layer last."""
    hidden = states.shape[1] // 4
    tokens = (*record.prompt_token_ids, *record.output_token_ids)
    temperature = record.sampling.temperature or 1.0
    return EagleExample(tokens, len(record.prompt_token_ids), states[:, :-hidden], states[:, -hidden:], temperature)


def reject_foreign_layers(model: Any, name: str) -> None:
    """Check the target's last layer, which a head copies at its start. Raises InputError for another architecture."""
    layers = getattr(model.get_decoder(), "layers", None)
    last = layers[-1] if layers is not None else nn.Module()
    norms = ("input_layernorm", "post_attention_layernorm")
    for wanted in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", *norms):
        try:
            last.get_submodule(wanted)
        except AttributeError:
            raise InputError(
                f"--target: a head cannot be made for {name} ({type(model).__name__}): its layers have no {wanted}. "
                "Fix: a target of the Llama family (Llama, Qwen, Mistral, SmolLM)"
            ) from None
