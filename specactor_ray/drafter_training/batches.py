"""Batches of recorded rollouts. Their order is a function of (records, seed, epoch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specactor_ray.drafter_training.corpus import Record

if TYPE_CHECKING:
    import torch

_BUCKET = 16
"""Batches' worth of records that are sorted by length together: less padding, and still a new mix every epoch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rollouts of one training step."""

    records: tuple[Record, ...]
    states: tuple[torch.Tensor, ...]
    """Hidden states of the target per record, `(tokens - 1, width)`; see `EagleStudent.hidden_layers`."""


def load_batch(records: Sequence[Record], states: Callable[[int], torch.Tensor]) -> Batch:
    """A batch with the states that `states(record index)` reads."""
    return Batch(tuple(records), tuple(states(record.index) for record in records))


def add_sums(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Add `part` to `total`, name by name."""
    for name, value in part.items():
        total[name] = total.get(name, 0.0) + value


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """Sums over tokens → means per token, without `tokens` itself."""
    tokens = max(sums.get("tokens", 0.0), 1.0)
    return {name: value / tokens for name, value in sums.items() if name != "tokens"}


def batches_of_epoch(records: Sequence[Record], max_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices into `records`, each once, in batches of similar lengths.

    Args:
        max_tokens: Most positions of a batch, padding included; a longer record has a batch of its own.
        seed, epoch: Of the order.
    """
    rng = np.random.default_rng([seed, epoch])
    order = [int(i) for i in rng.permutation(len(records))]
    mean = sum(record.num_tokens for record in records) / max(len(records), 1)
    size = max(int(_BUCKET * max_tokens / max(mean, 1.0)), 1)
    batches: list[list[int]] = []
    for begin in range(0, len(order), size):
        bucket = sorted(order[begin : begin + size], key=lambda i: (records[i].num_tokens, i))
        batches += cut(records, bucket, max_tokens)
    return [batches[int(i)] for i in rng.permutation(len(batches))]


def cut(records: Sequence[Record], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    """`order`, shortest record first, in groups whose padded size stays within `max_tokens`."""
    groups: list[list[int]] = []
    for index in order:
        if groups and (len(groups[-1]) + 1) * records[index].num_tokens <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
