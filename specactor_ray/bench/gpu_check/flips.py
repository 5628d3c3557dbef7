"""Stage `flips`: number of sampled tokens that depend on the shape of the forward, and how near a tie these were.

One random model, run as the `hf` engine runs it. Every row has a fixed context and fixed next tokens, so all forwards
compute the same distributions; they differ in how many rows share a forward and how many positions of a row are in it.
Each way of computing makes its own keys and values of the compared positions, as an engine would.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch

from specactor_ray.bench.gpu_check.models import ragged_model
from specactor_ray.bench.gpu_check.stages import Stage
from specactor_ray.core.types import SamplingParams
from specactor_ray.sampling.keyed import sample_rows

_PREFILLED_AT_ONCE = 4
TEMPERATURES = (1.0, 0.0)
Sampled = dict[float, np.ndarray]
"""Temperature → float64 `(2, rows, tokens)`: tokens, and their perturbed top-2 margins in nats."""


def measure_flips(stage: Stage) -> None:
    """Fill a point per batch and length (positions): tokens flipped per 1,000 against batch 1 and length 1, and the
    largest margin of the reference there. The first way is the reference again: its flips are the device's noise."""
    settings, reference = stage.settings, Sampled()
    with stage.uncounted():
        task = _Task(stage)

    def measure(length: int, batch: int) -> str:
        if not reference:
            reference.update(task.sample(1, 1))
        sampled = task.sample(batch, length)
        for temperature in TEMPERATURES:
            rate, margin = compare(reference[temperature], sampled[temperature])
            columns = {f"T={temperature:g} flips": rate, f"T={temperature:g} margin": margin}
            stage.point({"batch": batch, "length": length}, **columns)
        return f"{rate:.2f} flips per 1,000 at T=0"

    stage.each(itertools.product(settings.flip_lengths, settings.flip_batches), measure)


def compare(reference: np.ndarray, sampled: np.ndarray) -> tuple[float, float | None]:
    """Flips per 1,000 tokens, and the largest margin of the reference where the tokens differ."""
    flipped = reference[1][reference[0] != sampled[0]]
    return 1e3 * flipped.size / reference[0].size, float(flipped.max()) if flipped.size else None


class _Task:
    """Contexts, next tokens and seeds that all ways share."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._settings, s = stage, stage.settings, stage.settings
        rows, longest = max(s.flip_rows, *s.flip_batches), s.flip_context + s.flip_tokens
        self._model = ragged_model(s.shapes[-1], s.dtype, s.device, rows * (longest + 256))
        self._rows = np.array([self._model.cache.open(longest) for _ in range(rows)])
        self._tokens = np.random.default_rng(1).integers(s.shapes[-1].vocab_size, size=(rows, longest))
        for begin in range(0, rows, _PREFILLED_AT_ONCE):
            self._forward(slice(begin, begin + _PREFILLED_AT_ONCE), 0, s.flip_context)
        self._sample(slice(0, 1), 0, 1, self._nothing())  # compiles the sampler, which takes too long for a step

    def sample(self, batch: int, length: int) -> Sampled:
        """Tokens of all compared rows and positions."""
        s = self._settings
        found = self._nothing()
        self._model.cache.truncate(self._rows, s.flip_context)
        parts = list(itertools.product(range(0, s.flip_rows, batch), range(0, s.flip_tokens, length)))
        for done, (row, position) in enumerate(parts):
            rows = slice(row, row + batch)
            self._stage.step(functools.partial(self._sample, rows, position, length, found), done, len(parts))
        return found

    def _nothing(self) -> Sampled:
        return {t: np.zeros((2, self._settings.flip_rows, self._settings.flip_tokens)) for t in TEMPERATURES}

    def _sample(self, rows: slice, position: int, length: int, found: Sampled) -> None:
        logits = self._forward(rows, self._settings.flip_context + position, length)
        span, seeds = slice(position, position + length), range(self._settings.flip_rows)[rows]
        at = [*range(position, position + length)] * len(seeds)
        for temperature, out in found.items():
            params = [SamplingParams(temperature, seed=row) for row in seeds for _ in range(length)]
            sampled = sample_rows(logits[: len(at)], params, at, record_margins=True)
            out[:, rows, span] = np.array([sampled.token_ids, sampled.margins]).reshape(2, -1, length)

    def _forward(self, rows: slice, begin: int, count: int) -> torch.Tensor:
        tokens, n = self._tokens[rows, begin : begin + count], len(self._rows[rows])
        counts = np.full(n, count, np.int64)
        return self._model.forward(self._rows[rows], counts, tokens.ravel(), counts if begin else 0 * counts).logits
