"""Sampling rules of an engine's requests: one entry of numbers per row, written when a request begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specactor_ray.core.device import to_device
from specactor_ray.core.ragged import enlarged
from specactor_ray.core.types import SamplingParams
from specactor_ray.sampling.cpu import GREEDY_BELOW

if TYPE_CHECKING:  # lookups draw noise without torch
    import torch

_RULE = np.dtype([("seed", "u8"), ("temperature", "f8"), ("top_k", "i8"), ("top_p", "f8"), ("base", "i8")])
"""Data type of a rule: five words of 8 bytes, in the order of `sampling.gpu.RULE_FIELDS`."""


class Rules:
    """Seed, temperature, top_k, top_p and position base of an engine's rows, by slot.

    The position in the noise is a row's base plus the position that a call passes, so an engine may pass positions in
    the sequence and set the base to minus the length of the prompt.

    Args:
        slots: Initial number of rows; `write` makes room for more.
        device: Device of `words`.
    """

    def __init__(self, slots: int, device: torch.device | None = None) -> None:
        self.table = np.zeros(slots, _RULE)
        """Structured array `(slots,)`: seed, temperature, top_k, top_p, base."""
        self.any_filtered = False
        """Whether top-k or top-p may leave out tokens of some slot; a call on the device then has one more kernel."""
        self.tops = np.zeros(slots, np.int32)
        """int32 `(slots,)`: number of most probable tokens with requested log-probabilities."""
        self.any_tops = False
        self._device = device
        self._words: torch.Tensor | None = None

    @classmethod
    def over(cls, words: torch.Tensor) -> Rules:
        """Rules in a tensor, int64 `(slots, 5)`, that the caller writes; any may filter. On a GPU `table` is unset."""
        rules = cls(len(words), words.device)
        rules._words, rules.any_filtered = words, True
        if words.device.type == "cpu":
            rules.table = words.numpy().view(_RULE)[:, 0]
        return rules

    def write(self, slots: Sequence[int], params: Sequence[SamplingParams], bases: Sequence[int]) -> None:
        """Set the rules of `slots`; the `first_position` of each request is added to its base."""
        most = 1 + max(slots, default=-1)
        if most > len(self.table):
            self.table = enlarged(self.table, 0, max(2 * len(self.table), most))
            self.tops = enlarged(self.tops, 0, len(self.table))
        for slot, one, base in zip(slots, params, bases, strict=True):
            self.table[slot] = (one.seed, one.temperature, one.top_k, one.top_p, base + one.first_position)
            self.tops[slot] = one.logprobs
        self.any_tops = bool(self.tops.any())
        self.any_filtered, self._words = bool(filtered(self.table).any()), None

    @property
    def words(self) -> torch.Tensor:
        """int64 `(slots, 5)` on the device; copied there after rules were written."""
        if self._words is None:
            assert self._device is not None  # the host form reads `table`
            [self._words] = to_device([self.table.view(np.int64).reshape(-1, 5)], self._device)
        return self._words


def filtered(rules: np.ndarray) -> np.ndarray:
    """bool `(n,)`: whether each rule of a table may leave out tokens."""
    found: np.ndarray = ((rules["top_k"] > 0) | (rules["top_p"] < 1.0)) & (rules["temperature"] >= GREEDY_BELOW)
    return found
