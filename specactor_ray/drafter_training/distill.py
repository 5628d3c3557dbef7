"""`draft_model`: the target with most layers left out, trained to say what the target says.

Loss: KL(target || draft) at the sampling temperature, at the positions of the target's own outputs. The target's side
needs no forward of the target: its states in front of the output layer were recorded with the rollouts, and the
output layer, which both share, turns them into exact logits. Embeddings, last norm and output layer stay frozen, so
that stays true while the draft learns, and on small models they are where most of the weights are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specactor_ray.drafter_training.corpus import Record
from specactor_ray.drafter_training.pruning import num_layers, prune_layers
from specactor_ray.drafter_training.recipe import TrainRecipe, choose_layers, parse_layers
from specactor_ray.drafter_training.student import Batch
from specactor_ray.learner.engines.torch_engine import autocast
from specactor_ray.models.builtin import quiet_transformers
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import HEAD_INPUT
from specactor_ray.sampling.keyed import sample_rows

_CHUNK = 256
"""Positions whose logits exist at once: with a vocabulary of 50k one copy of them is 50 MB."""


class DraftModelStudent:
    """`Student` over a pruned target.

    Args:
        model: The pruned model, on its device.
        kept: Which of the target's layers it has.
        temperature: Of the target's distribution; 0 counts as 1.
        dtype: Arithmetic of the layers: float32, bfloat16 or float16.
    """

    method = "draft_model"
    hidden_layers: tuple[int, ...] = (HEAD_INPUT,)

    def __init__(self, model: Any, kept: Sequence[int], temperature: float = 1.0, dtype: str = "float32") -> None:
        self.model, self.kept = model, tuple(kept)
        self.module: nn.Module = model
        self._temperature, self._dtype = temperature or 1.0, dtype
        self._trunk, self._head = model.base_model, head_of(model)
        self._device = model.device
        model.eval()  # no dropout: what is learnt is then a function of the batches
        model.requires_grad_(False)
        _layers(self._trunk, len(self.kept)).requires_grad_(True)

    @classmethod
    def from_recipe(cls, recipe: TrainRecipe, device: str) -> DraftModelStudent:
        """Prune the target as the recipe says.

        Raises:
            InputError: The target has not the layers.
            ModelLoadError: It cannot be loaded or pruned.
        """
        corpus = recipe.corpus
        target = load_model(corpus.target, device=device, trust_remote_code=corpus.trust_remote_code)
        kept = choose_layers(num_layers(target), parse_layers(recipe.layers))
        return cls(prune_layers(target, kept), kept, corpus.temperature, recipe.dtype)

    def prepare(self, records: Sequence[Record], states: Callable[[int], torch.Tensor]) -> None:
        """Nothing here depends on the rollouts beforehand."""

    def backward(self, batch: Batch) -> dict[str, float]:
        states = self._states(batch.records)
        leaf = states.detach().requires_grad_()
        teacher = batch.output_states().to(self._device)
        loss, gradients = 0.0, []
        for begin in range(0, len(leaf), _CHUNK):
            part = leaf[begin : begin + _CHUNK]
            logits = self._head(part)
            with torch.no_grad():
                divergence, slope = self._divergence(logits, self._head(teacher[begin : begin + _CHUNK]))
            gradients.append(torch.autograd.grad(logits, part, slope / len(leaf))[0])
            loss += float(divergence.sum())
        states.backward(torch.cat(gradients).to(states.dtype))
        return {"tokens": float(len(leaf)), "loss": loss}

    @torch.no_grad()
    def held_out(self, batch: Batch) -> dict[str, float]:
        states, teacher = self._states(batch.records), batch.output_states().to(self._device)
        tokens = [token for record in batch.records for token in record.output_token_ids]
        samplings = [record.sampling for record in batch.records for _ in record.output_token_ids]
        positions = [i for record in batch.records for i in range(len(record.output_token_ids))]
        loss, matches = 0.0, 0
        for begin in range(0, len(tokens), _CHUNK):
            span = slice(begin, begin + _CHUNK)
            logits = self._head(states[span])
            sampled = sample_rows(logits.float(), samplings[span], positions[span]).token_ids
            matches += sum(ours == theirs for ours, theirs in zip(sampled, tokens[span], strict=True))
            loss += float(self._divergence(logits, self._head(teacher[span]))[0].sum())
        return {"tokens": float(len(tokens)), "loss": loss, "matches": float(matches)}

    def trained(self) -> dict[str, torch.Tensor]:
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    def load_trained(self, weights: Mapping[str, torch.Tensor]) -> None:
        own = self.trained()
        if own.keys() != weights.keys():
            raise ValueError(f"the weights are those of {len(weights)} parameters, and {len(own)} are trained")
        with torch.no_grad():
            for name, weight in own.items():
                weight.copy_(weights[name])

    def save(self, folder: Path) -> dict[str, Any]:
        with quiet_transformers():
            self.model.save_pretrained(folder)
        trained = sum(weight.numel() for weight in self.trained().values())
        return {
            "layers_kept": list(self.kept),
            "parameters": sum(weight.numel() for weight in self.model.parameters()),
            "parameters_trained": trained,
        }

    def _states(self, records: Sequence[Record]) -> torch.Tensor:
        """What enters the output layer where output tokens are predicted: `(output tokens, hidden)` float32."""
        ids, mask, rows, positions = _pad(records, self._device)
        with autocast(self._device, self._dtype):
            states = self._trunk(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return states[rows, positions].float()

    def _divergence(self, logits: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """KL(target || draft) per position, `(N,)`, and its gradient in the draft's logits, `(N, vocab)`.

        The gradient is written out, (softmax(draft) - softmax(target)) / T: that spares a vocabulary-wide graph.
        """
        ours = torch.log_softmax(logits.float() / self._temperature, dim=-1)
        theirs = torch.log_softmax(teacher.float() / self._temperature, dim=-1)
        probabilities = theirs.exp()
        divergence = torch.linalg.vecdot(probabilities, theirs.sub_(ours))
        slope = ours.exp_().sub_(probabilities).div_(self._temperature)
        return divergence, slope.to(logits.dtype)


class _PassOn(nn.Module):
    """Stands where a model's layers were: what enters comes out as the last states."""

    def forward(self, *ignored: Any, inputs_embeds: torch.Tensor, **also_ignored: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        output: Any = BaseModelOutputWithPastAndCrossAttentions
        return output(last_hidden_state=inputs_embeds)


class Head(nn.Module):
    """States in front of a model's output layer `(N, hidden)` → its logits `(N, vocab)`.

    It runs the model's own forward around layers that do nothing, so that what a model does to its logits afterwards
    (scaling, soft-capping) is not lost. The weights are the model's.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        shell = copy.copy(model)
        shell._modules = dict(model._modules)
        setattr(shell, model.base_model_prefix, _PassOn())
        self._shell = shell

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self._shell(inputs_embeds=states[None], use_cache=False).logits[0]


def head_of(model: Any) -> Head:
    """The output side of a transformers causal language model."""
    return Head(model)


def _layers(trunk: nn.Module, count: int) -> nn.ModuleList:
    return next(m for m in trunk.modules() if isinstance(m, nn.ModuleList) and len(m) == count)


def _pad(records: Sequence[Record], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Right-padded `(rows, length)` ids and mask; row and position of the state that predicts each output token."""
    length = max(record.num_tokens for record in records)
    ids = torch.zeros((len(records), length), dtype=torch.long)
    mask = torch.zeros((len(records), length), dtype=torch.long)
    rows, positions = list[int](), list[int]()
    for row, record in enumerate(records):
        begin, count = len(record.prompt_token_ids), len(record.output_token_ids)
        ids[row, : begin + count] = torch.tensor([*record.prompt_token_ids, *record.output_token_ids])
        mask[row, : begin + count] = 1
        rows += [row] * count
        positions += range(begin - 1, begin - 1 + count)
    return ids.to(device), mask.to(device), torch.tensor(rows, device=device), torch.tensor(positions, device=device)
