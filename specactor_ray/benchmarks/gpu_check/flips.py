"""Stage `flips`: how many sampled tokens depend on the shape of the forward, and how near those were to a tie.

One random model, run as the `hf` engine runs it. Every row has a fixed context and fixed next tokens, so all forwards
compute the same distributions; they differ in how many rows share a forward and how many positions of a row are in it.
Each way of computing makes its own keys and values of the compared positions, as an engine would.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch

from specactor_ray.benchmarks.gpu_check.models import ragged_model
from specactor_ray.benchmarks.gpu_check.stages import Stage
from specactor_ray.messages import SamplingParams
from specactor_ray.models.ragged_model import RowChunk
from specactor_ray.sampling.keyed import sample_rows

_PREFILLED_AT_ONCE = 2048
TEMPERATURES = (1.0, 0.0)
Tokens = dict[tuple[int, int], tuple[int, float]]
"""(row, position) → token, perturbed top-2 margin in nats."""


def measure_flips(stage: Stage) -> None:
    """Fill a point per batch, length and temperature: tokens flipped per 1,000 against batch 1 and length 1, and the
    reference's margins where it flipped. The first way is the reference once more: its flips are noise of the device."""
    grid, task = stage.settings.flips, _Task(stage)
    figures = {"shape": grid.shape.name, "dtype": stage.settings.dtype, "compared": grid.rows * grid.tokens}
    stage.entry["figures"] |= figures
    reference: dict[float, Tokens] = {}

    def measure(batch: int, length: int) -> str:
        if not reference:
            reference.update(task.sample(1, 1))
        sampled = task.sample(batch, length)
        found = {t: compare(reference[t], sampled[t]) for t in TEMPERATURES}
        for t, one in found.items():
            stage.point(batch=batch, length=length, T=t, **one)
        return ", ".join(f"{one['per 1,000']:.2f} flips per 1,000 at T={t:g}" for t, one in found.items())

    stage.each([(batch, length) for length in grid.lengths for batch in grid.batches], measure)


def compare(reference: Tokens, others: Tokens) -> dict[str, Any]:
    """Flips per 1,000 tokens, and the largest and all (50 at most) margins of the reference where the tokens differ."""
    flipped = sorted(margin for place, (token, margin) in reference.items() if token != others[place][0])
    result: dict[str, Any] = {"per 1,000": 1e3 * len(flipped) / len(reference)}
    if flipped:
        result |= {"margin": flipped[-1], "median": statistics.median(flipped), "margins": flipped[-50:]}
    return result


class _Task:
    """Contexts, next tokens and seeds that all ways share."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._grid = stage, stage.settings.flips
        grid, rows = self._grid, max(self._grid.rows, *self._grid.batches)
        longest = grid.context + grid.tokens
        self._model = ragged_model(grid.shape, stage.settings.dtype, stage.settings.device, 2 * rows * (longest + 256))
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(grid.shape.vocab, (rows, longest), generator=generator)
        self._next: list[list[int]] = tokens[:, grid.context :].tolist()
        self._rows: list[Any] = [self._model.cache.open(longest) for _ in range(rows)]
        chunks = [RowChunk(*pair, 0) for pair in zip(self._rows, tokens[:, : grid.context].tolist(), strict=True)]
        at_once = max(1, _PREFILLED_AT_ONCE // grid.context)
        for begin in range(0, rows, at_once):
            self._model.forward(chunks[begin : begin + at_once])

    def sample(self, batch: int, length: int) -> dict[float, Tokens]:
        """Temperature → tokens of all compared rows and positions."""
        grid, found, done = self._grid, {t: Tokens() for t in TEMPERATURES}, 0
        steps = -(-grid.rows // batch) * (grid.tokens // length)
        for row in range(0, grid.rows, batch):
            compared, rows = min(batch, grid.rows - row), self._rows[row : row + batch]
            for one in rows:
                one.truncate(grid.context)
            for position in range(0, grid.tokens, length):
                places = [(row + r, position + p) for r in range(compared) for p in range(length)]
                tokens = [one[position : position + length] for one in self._next[row : row + batch]]
                chunks = [RowChunk(*pair, length) for pair in zip(rows, tokens, strict=True)]
                self._stage.step(functools.partial(self._sample, chunks, places, found), done, steps)
                done += 1
        return found

    def _sample(self, chunks: list[RowChunk], places: list[tuple[int, int]], found: dict[float, Tokens]) -> None:
        logits = self._model.forward(chunks).logits[: len(places)]
        for temperature, tokens in found.items():
            params = [SamplingParams(temperature, seed=row) for row, _ in places]
            sampled = sample_rows(logits, params, [position for _, position in places], record_margins=True)
            tokens.update(zip(places, zip(sampled.token_ids, sampled.margins or [], strict=True), strict=True))
