"""Stage `drafting`: cost of a token of a draft model with and without a captured step, one at a time and in bursts.

The proposer is the package's. `steps` runs the operations of the graph without a graph: its tokens must be the same.
Tokens of `eager` may differ where a kernel depends on the number of rows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import torch

from specactor_ray.bench.gpu_check.models import ragged_model
from specactor_ray.bench.gpu_check.settings import ModelShape
from specactor_ray.bench.gpu_check.stages import Stage
from specactor_ray.core.environment import fallbacks
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.burst import LONGEST, CudaCapturer
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.models.ragged_model import RaggedModel

_WINDOW = 200
"""Draft tokens of a window: more than the timed calls draft."""
WAYS = ("eager", "steps", "graph")


class Uncaptured:
    """A `Capturer` that launches every step from Python."""

    def capture(self, step: Callable[[], None]) -> Callable[[], object]:
        step()
        return step

    def fetch(self, tensor: torch.Tensor) -> np.ndarray:
        array: np.ndarray = tensor.cpu().numpy().copy()
        return array


def measure_drafting(stage: Stage) -> None:
    """Fill a point per shape and rows: ms of a token of all rows, one in an `extend` and `LONGEST`, for each way; and
    how many of 100 tokens differ from those of the graph. `figures`: why there is no graph, as in the log."""
    settings, models = stage.settings, dict[ModelShape, RaggedModel]()

    def measure(shape: ModelShape, rows: int) -> str:
        if shape not in models:
            models.clear()
            tokens = max(settings.drafting_rows) * (settings.prompt + 2 * _WINDOW + 512)
            with stage.uncounted():
                models[shape] = ragged_model(shape, settings.dtype, settings.device, tokens)
        columns, lines = dict[str, float](), dict[str, np.ndarray]()
        for way in WAYS:
            capturer = CudaCapturer() if way == "graph" and settings.device == "cuda" else Uncaptured()
            with stage.uncounted():
                drafter = DraftModelProposer(models[shape], max_batch=rows, capturer=capturer)
            if way == "eager":
                drafter._bursts = None
            for most in (1, LONGEST):
                columns[f"{way} x{most} ms"] = _token_ms(stage, drafter, shape, rows, most)
            lines[way] = drafter.mirrors.lines[:rows, settings.prompt : drafter.mirrors.ends[:rows].min()].copy()
            for slot in range(rows):
                drafter.close(slot, False)
        for way in WAYS[:2]:  # a faster variant drafts more in the time of a measurement
            both = min(lines[way].shape[1], lines["graph"].shape[1])
            columns[f"{way} differ %"] = 100 * float((lines[way][:, :both] != lines["graph"][:, :both]).mean())
        stage.point({"shape": shape.name, "rows": rows}, **columns)
        stage.entry["figures"]["fallbacks"] = fallbacks()
        return ", ".join(f"{name} {value:.3g}" for name, value in columns.items())

    stage.each(itertools.product(settings.drafting_shapes, settings.drafting_rows), measure)


def _token_ms(stage: Stage, drafter: DraftModelProposer, shape: ModelShape, rows: int, most: int) -> float:
    """Median ms of a token of every row, after random prompts."""
    rng, settings = random.Random(7), stage.settings
    for slot in range(rows):
        prompt = [rng.randrange(shape.vocab_size) for _ in range(settings.prompt)]
        drafter.open(slot, f"r{slot}", prompt, (), SamplingParams(1.0, max_tokens=4 * _WINDOW, seed=slot), _WINDOW)
    drafter.burst = 1
    with stage.uncounted():  # compiles, and captures graphs
        while (drafter.mirrors.ends[:rows] == settings.prompt).any():
            drafter.extend()
    drafter.burst = most
    return 1e3 * stage.median_s(drafter.extend) / most
