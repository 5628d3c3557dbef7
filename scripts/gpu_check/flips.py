"""Stage `flips`: tokens that differ between plain decoding and verifying, with and without `target.batch_invariant`."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import torch

from gpu_check.models import STEP_TOKENS, random_prompts, random_weights
from gpu_check.stage import Stage
from gpu_check.target import forward_s
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.models.shapes import token_bytes
from specactor_ray.sampling.keyed import sample_rows

_LENGTH = 16
"""Tokens that each row decodes."""
_MOST_FORWARDS = 64
"""Most forwards in which they are read again for a point."""


def measure_flips(stage: Stage) -> None:
    """Fill a point per number of rows and of draft tokens, for the usual kernels and for batch-invariant ones: of 1,000
    sampled tokens the ones that differ when the tokens of plain decoding, by the most rows, are verified; and ms of
    such a forward (on a GPU as a CUDA graph). All modes read the same tokens before. `figures`: differing tokens and
    all of them, over the points. Raises RuntimeError if a token differs with batch-invariant kernels."""
    settings = stage.settings
    model = random_weights(settings.target, settings.dtype, settings.device)
    tokens = 2 * max(settings.rows) * (settings.target_prompt + 512)
    size = token_bytes(model.config, model.dtype.itemsize)
    ragged = RaggedModel(model, tokens * size, batch_invariant=True)
    kernels = {"usual": contextlib.nullcontext(), "invariant": ragged._kernels}
    decoded: dict[str, Decoded] = {}
    totals = {kind: np.zeros(2, np.int64) for kind in kernels}

    def measure(kind: str, rows: int, drafts: int) -> str:
        ragged._kernels = kernels[kind]
        if kind not in decoded:
            while decoded:
                decoded.popitem()[1].close()
            decoded[kind] = Decoded(stage, ragged)
        different, compared = decoded[kind].verified(rows, 1 + drafts)
        ms = 1e3 * forward_s(stage, ragged, rows, 1 + drafts)
        figures = {f"{kind} tokens": compared, f"{kind} flips": 1000 * different / compared, f"{kind} ms": ms}
        totals[kind] += different, compared
        stage.entry["figures"][f"{kind}, differing of all tokens"] = totals[kind].tolist()
        point = stage.point({"rows": rows, "drafts": drafts}, **figures)
        if kind == "invariant" and "usual ms" in point:
            point["price ms"] = ms - point["usual ms"]
        return f"{different} of {compared} tokens differ, {ms:.3g} ms"

    stage.each(itertools.product(kernels, settings.rows, settings.drafts), measure)
    if wrong := [point for point in stage.entry["points"] if point.get("invariant flips")]:
        raise RuntimeError(f"tokens differ with batch-invariant kernels: {wrong[0]}")


class Decoded:
    """Random prompts in the cache of a model, and the tokens that plain decoding samples after them."""

    def __init__(self, stage: Stage, model: RaggedModel) -> None:
        self._stage, self._model = stage, model
        prompts = np.array(random_prompts(stage.settings, max(stage.settings.rows)), np.int64)
        self._length, count = prompts.shape[1], max(1, STEP_TOKENS // prompts.shape[1])
        self._rows = np.array([model.cache.open(self._length + _LENGTH) for _ in prompts])
        every = range(0, len(prompts), count)
        logits = torch.cat([self._read(self._rows[i : i + count], prompts[i : i + count], 1) for i in every])
        self._tokens = np.zeros((len(prompts), _LENGTH), np.int64)
        self._tokens[:, 0] = self._sampled(logits, np.arange(len(prompts)), 0)[:, 0]
        for place in range(1, _LENGTH):
            logits = self._read(self._rows, self._tokens[:, place - 1 : place], 1)
            self._tokens[:, place] = self._sampled(logits, np.arange(len(prompts)), place)[:, 0]
        self._forget(self._rows)

    def verified(self, group: int, width: int) -> tuple[int, int]:
        """(tokens that differ, tokens compared) in forwards of `group` rows with `width` positions each."""
        different = compared = 0
        groups = max(1, _MOST_FORWARDS * width // _LENGTH)
        for first in range(0, len(self._rows), group)[:groups]:
            rows = np.arange(first, min(first + group, len(self._rows)))
            for begin in range(0, _LENGTH - 1, width):
                given = self._tokens[rows, begin : min(begin + width, _LENGTH - 1)]
                found = self._sampled(self._read(self._rows[rows], given, given.shape[1]), rows, begin + 1)
                wanted = self._tokens[rows, begin + 1 : begin + 1 + given.shape[1]]
                different, compared = different + int((found != wanted).sum()), compared + found.size
            self._forget(self._rows[rows])
        return different, compared

    def close(self) -> None:
        """Free the rows."""
        self._model.cache.free_rows(self._rows)

    def _read(self, rows: np.ndarray, tokens: np.ndarray, logits: int) -> torch.Tensor:
        """Logits of the last positions of each row, after a forward with `(rows, n)` more tokens."""
        counts, kept = np.full(len(rows), tokens.shape[1], np.int64), np.full(len(rows), logits, np.int64)
        self._stage.require_time()
        return self._model.forward(rows, counts, tokens.ravel(), kept).clone()

    def _sampled(self, logits: torch.Tensor, rows: np.ndarray, begin: int) -> np.ndarray:
        """`(rows, n)`: tokens at the places from `begin` on, at temperature 1."""
        width = len(logits) // len(rows)
        params = [SamplingParams(seed=int(row)) for row in np.repeat(rows, width)]
        places = np.tile(np.arange(begin, begin + width), len(rows))
        return sample_rows(logits, params, places.tolist()).tokens[:, 0].reshape(len(rows), width)

    def _forget(self, rows: np.ndarray) -> None:
        self._model.cache.truncate(rows, self._length)
