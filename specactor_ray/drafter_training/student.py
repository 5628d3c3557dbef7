"""What a draft method brings to training: its weights, its loss, and how it is saved. The loop is the same for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from specactor_ray.config.named import import_named
from specactor_ray.drafter_training.corpus import Record
from specactor_ray.drafter_training.recipe import TrainRecipe


@dataclass(frozen=True, slots=True)
class Batch:
    """Rollouts to learn from."""

    records: tuple[Record, ...]
    states: tuple[torch.Tensor, ...]
    """Per record the target's hidden states, `(tokens - 1, width)`; see `Student.hidden_layers`."""

    def output_states(self) -> torch.Tensor:
        """`(output tokens, width)` float32: states of the positions that predicted the output tokens."""
        pairs = zip(self.records, self.states, strict=True)
        return torch.cat([states[-len(record.output_token_ids) :].float() for record, states in pairs])


class Student(Protocol):
    """A drafter that is being trained, on its device."""

    method: str

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Target states that are recorded with the rollouts, as in `RaggedModel(hidden_layers=...)`."""

    @property
    def module(self) -> nn.Module:
        """Holds what is trained; parameters that are frozen require no gradient. There after `prepare`."""

    def prepare(self, records: Sequence[Record], states: Callable[[int], torch.Tensor]) -> None:
        """The rollouts to learn from are there; called once, before training begins or goes on."""

    def backward(self, batch: Batch) -> dict[str, float]:
        """Add the gradient of the batch's mean loss per output token to the parameters.

        Returns:
            Sums over the output tokens: `tokens`, `loss`, and what else the method reports.
        """

    def held_out(self, batch: Batch) -> dict[str, float]:
        """Without gradients, sums over the output tokens: `tokens`, `loss`, and `matches`, how often the drafter's
        next token after the recorded prefix, sampled with the target's noise, is the recorded one."""

    def trained(self) -> dict[str, torch.Tensor]:
        """Name → trained weight."""

    def load_trained(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over what `trained` returned."""

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the drafter as its proposer loads it.

        Returns:
            Facts about it, for its `drafter.json`.
        """


_STUDENTS = {"draft_model": "distill:DraftModelStudent", "eagle": "eagle_student:EagleStudent"}


def student_of(recipe: TrainRecipe, device: str) -> Student:
    """The student of a checked recipe, on a device (`cpu` or `cuda`)."""
    student: Student = import_named(f"{__package__}.{_STUDENTS[recipe.method]}", "--method").from_recipe(recipe, device)
    return student


def add_sums(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Add `part` to `total`, name by name."""
    for name, value in part.items():
        total[name] = total.get(name, 0.0) + value


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """Sums over tokens → means per token; `tokens` itself is left out."""
    tokens = max(sums.get("tokens", 0.0), 1.0)
    return {name: value / tokens for name, value in sums.items() if name != "tokens"}


def load_batch(records: Sequence[Record], states: Callable[[int], torch.Tensor]) -> Batch:
    """A batch with the states that `states(record index)` reads."""
    return Batch(tuple(records), tuple(states(record.index) for record in records))
