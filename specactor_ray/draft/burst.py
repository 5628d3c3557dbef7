"""Bursts: several tokens of the same chains by captured steps (`models/captured.py`).

The first step reads what each row has not read. Every step draws a token of each row, the input of the next one. The
host launches a step per token, and waits once. Rows that have drafted their share write to a page that no chain holds.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from specactor_ray.models.captured import MOST_ROWS, Captured, CudaCapturer, StaticBatch
from specactor_ray.models.paged_cache import PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch
from specactor_ray.sampling.candidates import Candidates, candidates_on_device, unpacked

LONGEST = 8
"""Most tokens of a burst."""


class Runner(Protocol):
    """A model and its cache: `RaggedModel` or `EagleRunner`."""

    model: Any
    cache: PagedCache
    dtype: torch.dtype
    vocab_size: int
    max_positions: int
    ids: np.ndarray | None  # see `candidates`
    feature_size: int
    """Input numbers of a position beside its token, and output numbers for the next position; 0 except for EAGLE."""

    def step(
        self, batch: RaggedBatch, tokens: torch.Tensor, positions: torch.Tensor, features: torch.Tensor,
        last: torch.Tensor | None, /,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Logits `(n, V)` and features of the next tokens, after all positions or those at `last`: tokens `(N,)`,
        sequence positions `(N,)`, features `(N, feature_size)`. Nothing waits for the device."""


class Bursts(Captured):
    """Bursts of up to `rows` rows that read up to `tokens` tokens and hold up to `longest`, with `most` candidates."""

    def __init__(self, runner: Runner, capturer: CudaCapturer, rows: int, tokens: int, longest: int, most: int) -> None:
        cache, rows = runner.cache, min(rows, MOST_ROWS, tokens)
        self._runner, self._most = runner, most
        width, size = 5 if most == 1 else 4 + most, runner.feature_size
        self._drawn = torch.zeros(LONGEST, rows, width, dtype=torch.int64, device=cache.device)
        self._outputs = torch.zeros(LONGEST, rows, size, dtype=runner.dtype, device=cache.device)
        self._features = self._outputs.new_zeros(tokens, size)
        super().__init__(cache, capturer, "Drafting", rows, tokens, longest, np.zeros((5, rows), np.int64))
        """By row: tokens in the cache after its share; offsets from the place of a token in the cache to its sequence
        position, and to the index in the line of the token drawn from it; number of the step, and of rows."""

    @torch.inference_mode()
    def run(
        self, first: StaticBatch, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray, places: np.ndarray,
        ends: np.ndarray, shares: np.ndarray, rules: np.ndarray, features: torch.Tensor,
    ) -> tuple[list[Candidates], torch.Tensor]:  # fmt: skip
        """Draft the `shares` of rows of the cache, 1 to `LONGEST` tokens, for which they have room; `ends`: index of
        the first one in the line, `(n,)` each. The `first` step was found for `counts`, int64 `(n,)`: tokens that each
        row reads first, with their `places` in the sequence and `features`. Lengths in the cache then include all but
        the newest token. Returns the draws of all rows in each step, undefined past their shares; and the features of
        the next tokens, `(steps, n, feature_size)`."""
        cache, n, steps = self._cache, len(rows), int(shares.max())
        following = self.find(np.ones(first.rows, np.int64)) or first
        newest, extra = cache.lengths[rows] + counts - 1, np.zeros((5, n), np.int64)
        filled, positions = newest + shares, places[counts.cumsum() - 1]
        extra[:3], extra[4] = (filled, positions - newest, ends - newest), n
        self.load(first, rows, counts, tokens, places, filled, rules, extra)
        self._features[: len(tokens)] = features
        for step in (first, *[following] * (steps - 1)):
            step.replay()
        cache.lengths[rows] = filled
        packed = self._capturer.fetch(self._drawn[:steps, :n])
        return [unpacked(one, self._most) for one in packed], self._outputs[:steps, :n]

    def _step(self, batch: StaticBatch) -> None:
        """Read the tokens of each row, draw the next one, and make it the input of the next step."""
        rows, size, starts, keys = batch.rows, self._cache.page_size, batch.device_starts, batch.device_lengths
        ends, offsets, draws, number, real = batch.extras[0][:, :rows]
        last = None if rows == batch.num_tokens else (starts[1:].long() - 1).clamp_(min=0)
        newest, features = (keys.long() - 1).clamp_(min=0), self._features[: batch.num_tokens]
        logits, features = self._runner.step(batch, batch.tokens, batch.positions, features, last)
        drawn = candidates_on_device(logits, newest + draws, batch.sampling, self._most, ids=self._runner.ids)
        self._drawn[:, :rows].index_copy_(0, number[:1], drawn[None])
        self._outputs[:, :rows].index_copy_(0, number[:1], features[None])
        self._features[:rows].copy_(features)
        number.add_(1)
        place = torch.minimum(newest + 1, ends - 1).clamp_(min=0)
        slots = batch.device_pages.gather(1, (place // size)[:, None])[:, 0] * size + place % size
        batch.slots[:rows].copy_(torch.where(newest + 1 < ends, slots, batch.unused))
        batch.tokens[:rows].copy_(drawn[:, 2].clamp(min=0))
        batch.positions[:rows].copy_(place + offsets)
        keys.copy_(place + 1)
        starts.copy_(torch.arange(rows + 1, device=starts.device).minimum(real[0]))
