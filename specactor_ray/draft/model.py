"""`draft_model`: a smaller transformers model with the target's vocabulary drafts token by token, batched.

It samples with the target's keyed noise (same seed, same position): P[match] >= (1 - TV) / (1 + TV) for total variation
TV between the two distributions (Daliri, Musco, Suresh, arXiv 2408.07978); independent draws match with sum p(v) q(v).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.draft.model_proposer import ModelProposer
from specactor_ray.draft.registry import BUILT_IN
from specactor_ray.models.cache_size import device_bytes, drafter_cache_bytes
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import RaggedModel


class DraftModelProposer(ModelProposer):
    """`Proposer` over a `RaggedModel`.

    Args:
        model: The small model with its cache; owned by the proposer.
        max_batch, shared_noise: See `ModelProposer`.
    """

    method = "draft_model"
    traits = BUILT_IN[method].traits

    def __init__(self, model: RaggedModel, max_batch: int = 64, shared_noise: bool = True) -> None:
        super().__init__(model.cache, model.dtype, model.vocab_size, model.max_positions, max_batch, shared_noise)
        self._model = model

    @classmethod
    def from_config(cls, config: DrafterConfig, target: TargetConfig, device: str) -> Self:
        assert config.model is not None  # validated
        model = load_model(config.model, dtype=config.dtype, device=device, trust_remote_code=config.trust_remote_code)
        total = None if device == "cpu" else device_bytes(device)
        cache = drafter_cache_bytes(config, model.config.get_text_config(), model.dtype.itemsize, total)
        return cls(RaggedModel(model, cache), config.max_batch, config.shared_noise)

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        self._model.load_weights(state_dict)
        self.mirrors.ends[:] = self.mirrors.known
        self._cache.truncate(self._rows[self._placed], 0)

    def _advance(self, slots: np.ndarray, same: np.ndarray) -> None:
        placed = self._placed[slots]
        np.minimum.at(self._cache.lengths, self._rows[slots[placed]], same[placed])

    def _ready(self) -> np.ndarray:
        mirrors = self.mirrors
        slots = np.flatnonzero(self._placed & (mirrors.ends < np.minimum(mirrors.limits, self.max_len)))
        backlogs = mirrors.ends[slots] - self._cached(slots)
        return slots[np.argsort(backlogs, kind="stable")] if backlogs.max(initial=1) > 1 else slots

    def _forward(self, slots: np.ndarray) -> np.ndarray:
        mirrors = self.mirrors
        slots, rows, counts = self._reserve(slots, mirrors.ends[slots] - self._cached(slots))
        if not len(slots):
            return slots
        begins = self._cached(slots)
        ends, tokens = begins + counts, mirrors.tokens(slots, begins, counts)
        complete = ends == mirrors.ends[slots]
        logits = self._model.forward(rows, counts, tokens, complete.astype(np.int64)).logits
        if not complete.all():
            slots, ends = slots[complete], ends[complete]
        tokens = self._sample(slots, logits, ends)
        drawn = tokens >= 0
        mirrors.append(slots[drawn], tokens[drawn])
        return slots
