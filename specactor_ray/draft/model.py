"""`draft_model`: a smaller transformers model with the target's vocabulary drafts token by token, in batches.

It samples with the target's keyed noise (same seed, same position): P[match] >= (1 - TV) / (1 + TV) for total variation
TV between the two distributions (Daliri, Musco, Suresh, arXiv 2408.07978); independent draws match with sum p(v) q(v).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch

from specactor_ray.config.methods import BUILT_IN, DrafterSpec
from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.ragged import places
from specactor_ray.draft.branches import Chains
from specactor_ray.draft.model_proposer import ModelProposer
from specactor_ray.models.cache_size import device_bytes, drafter_cache_bytes
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import RaggedModel


class DraftModelProposer(ModelProposer):
    """`Proposer` over a `RaggedModel`.

    Args:
        model: The small model with its cache; owned by the proposer.
        arguments, options: See `ModelProposer`.
    """

    method = "draft_model"
    traits = BUILT_IN[method].traits

    def __init__(self, model: RaggedModel, *arguments: Any, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        self._model = model

    @classmethod
    def from_config(cls, config: DrafterSpec, target: TargetConfig, device: str) -> Self:
        assert config.model is not None  # validated
        model = load_model(config.model, dtype=config.dtype, device=device, trust_remote_code=config.trust_remote_code)
        total = None if device == "cpu" else device_bytes(device)
        cache = drafter_cache_bytes(config, model.config.get_text_config(), model.dtype.itemsize, total)
        return cls(RaggedModel(model, cache), config.max_batch, config.shared_noise, config.branches)

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        self._model.load_weights(state_dict)
        self.mirrors.ends[:] = self.mirrors.known
        self._cache.free_rows(self.branches.release(np.flatnonzero(self._placed)))
        self._cache.truncate(self._rows[self._placed], 0)

    def _advance(self, slots: np.ndarray, same: np.ndarray) -> None:
        placed = self._placed[slots]
        np.minimum.at(self._cache.lengths, self._rows[slots[placed]], same[placed])

    def _ready(self) -> Chains:
        backlogs = self.mirrors.ends - self._cache.lengths[self._rows]
        reading = backlogs > 1
        return self._plan(self._placed & reading, self._placed & ~reading, backlogs)

    def _run(
        self, chains: Chains, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray, complete: np.ndarray
    ) -> torch.Tensor:
        return self._model.forward(rows, counts, tokens, complete.astype(np.int64)).logits

    def _begin(self, chains: Chains, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        return places(self._cache.lengths[rows], counts), torch.empty(len(rows), 0)
