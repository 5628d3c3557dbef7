"""Stage 5: how many sampled tokens depend on the shape of the forward, and how near those were to a tie.

One random model, its logits spread like those of a trained one. Every row has a fixed context and fixed next tokens,
so all forwards compute the same distributions; they differ in how many rows share a forward and how many positions of
a row are in it. Each way of computing keeps its own keys and values of the compared positions, as an engine would.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from specactor_ray.benchmarks.gpu_check.spreading import spread_head
from specactor_ray.benchmarks.gpu_check.stages import Stage
from specactor_ray.benchmarks.gpu_check.static_model import KVCache, StaticModel
from specactor_ray.messages import SamplingParams
from specactor_ray.sampling.keyed import sample_rows

_SAMPLED_AT_ONCE = 512
_PREFILLED_AT_ONCE = 8
TEMPERATURES = (1.0, 0.0)


def measure_flips(stage: Stage) -> None:
    """Fill `ways`: for each batch and length tokens flipped per 1,000 against batch 1 and length 1, at T=1 and T=0, and
    the reference's perturbed top-2 margins where it flipped. The first way is the reference once more: what flips there
    is noise of the device."""
    grid = stage.settings.flips
    device, dtype = torch.device(stage.settings.device), getattr(torch, stage.settings.dtype)
    task = _Task(stage, StaticModel.random(grid.shape, dtype, device))
    stage.figures |= {
        "shape": grid.shape.name,
        "dtype": stage.settings.dtype,
        "context": grid.context,
        "weights": "random, variance 1/inputs",
        "logits": task.spread,
        "compared": grid.rows * grid.tokens,
        "ways": [],
    }
    reference = task.sample(1, 1)
    stage.figures["near_ties"] = {
        str(temperature): _near_ties(reference[temperature][1]) for temperature in TEMPERATURES
    }
    ways = [(batch, length) for length in grid.lengths for batch in grid.batches]
    for batch, length in ways:
        stage.check(f"batch {batch}, length {length}")
        way: dict[str, Any] = {"batch": batch, "length": length}
        sampled = task.sample(batch, length)
        for temperature in TEMPERATURES:
            way[str(temperature)] = compare(*reference[temperature], sampled[temperature][0])
        stage.figures["ways"].append(way)
        rates = ", ".join(f"{way[str(t)]['flips_per_1000']:.2f} at T={t:g}" for t in TEMPERATURES)
        stage.note(f"batch {batch}, {length} positions a row: flips per 1,000 {rates}")


def compare(tokens: list[int], margins: list[float], others: list[int]) -> dict[str, Any]:
    """Flips per 1,000 tokens, and the margins of the reference where the tokens differ (perturbed scores, nats)."""
    flipped = sorted(margins[i] for i, token in enumerate(tokens) if token != others[i])
    result: dict[str, Any] = {"flips": len(flipped), "flips_per_1000": 1e3 * len(flipped) / len(tokens)}
    if flipped:
        result |= {"margin_median": statistics.median(flipped), "margin_max": flipped[-1], "margins": flipped[-50:]}
    return result


def _near_ties(margins: list[float]) -> dict[str, float]:
    """Share of the reference's tokens whose margin is below a bound."""
    return {f"below {bound}": sum(margin < bound for margin in margins) / len(margins) for bound in (0.01, 0.03, 0.1)}


class _Task:
    """Contexts, next tokens and seeds that all ways share."""

    def __init__(self, stage: Stage, model: StaticModel) -> None:
        grid, self._stage, self._model = stage.settings.flips, stage, model
        self._grid, rows = grid, max(grid.rows, *grid.batches)
        generator = torch.Generator().manual_seed(1)
        shape = (rows, grid.context + grid.tokens)
        tokens = torch.randint(grid.shape.vocab, shape, generator=generator).to(model.device)
        self._next = tokens[:, grid.context :]
        self._cache = KVCache.random(grid.shape, *shape, model.dtype, model.device)
        for begin in range(0, rows, _PREFILLED_AT_ONCE):
            end = begin + _PREFILLED_AT_ONCE
            model.hidden(tokens[begin:end, : grid.context], self._cache.rows(begin, end), 0)
        first = model.hidden(self._next[: grid.rows, :1], self._cache.rows(0, grid.rows), grid.context)
        logits = model.logits(first)
        self.spread = spread_head(model.head, logits)

    def sample(self, batch: int, length: int) -> dict[float, tuple[list[int], list[float]]]:
        """Temperature → tokens and margins of all compared rows and positions, row by row."""
        tokens: dict[float, dict[tuple[int, int], tuple[int, float]]] = {t: {} for t in TEMPERATURES}
        pending: list[tuple[Tensor, list[tuple[int, int]]]] = []
        for row in range(0, self._grid.rows, batch):
            compared = min(batch, self._grid.rows - row)
            self._stage.check(f"rows from {row} on of batch {batch}, length {length}")
            for position in range(0, self._grid.tokens, length):
                places = [(row + r, position + p) for r in range(compared) for p in range(length)]
                logits = self._forward(row, batch, position, length)
                pending.append((logits[: len(places)], places))
                if sum(len(places) for _, places in pending) >= _SAMPLED_AT_ONCE:
                    self._draw(pending, tokens)
        self._draw(pending, tokens)
        order = [(row, position) for row in range(self._grid.rows) for position in range(self._grid.tokens)]
        return {
            t: ([found[place][0] for place in order], [found[place][1] for place in order])
            for t, found in tokens.items()
        }

    def _forward(self, row: int, batch: int, position: int, length: int) -> Tensor:
        inputs = self._next[row : row + batch, position : position + length]
        cache = self._cache.rows(row, row + batch)
        return self._model.logits(self._model.hidden(inputs, cache, self._grid.context + position))

    def _draw(self, pending: list[tuple[Tensor, list[tuple[int, int]]]], tokens: dict[float, Any]) -> None:
        if not pending:
            return
        logits, places = torch.cat([rows for rows, _ in pending]), [place for _, ps in pending for place in ps]
        pending.clear()
        for temperature, found in tokens.items():
            params = [SamplingParams(temperature, seed=row) for row, _ in places]
            sampled = sample_rows(logits, params, [position for _, position in places], record_margins=True)
            assert sampled.margins is not None
            found.update(zip(places, zip(sampled.token_ids, sampled.margins, strict=True), strict=True))
