"""`draft_model`: a smaller transformers model with the target's vocabulary drafts token by token, batched.

It samples with the target's own keyed noise (same seed, same position), so it agrees with the target far more
often than a drafter with draws of its own: P[match] >= (1 - TV) / (1 + TV) for total variation TV between the
two distributions (Daliri, Musco, Suresh, arXiv 2408.07978). Independent draws match with sum_v p(v) q(v) only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.draft.cached import CachedProposer
from specactor_ray.draft.registry import BUILT_IN
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.sampling.keyed import warm_up


class DraftModelProposer(CachedProposer):
    """`Proposer` over a `RaggedModel`.

    Args:
        model: The small model with its cache; owned by the proposer from now on.
        max_batch: Most requests drafted for at once; those beyond it are answered with "no guess" until one ends.
        shared_noise: Sample with the target's noise; without it with independent noise, to measure what sharing gains.
    """

    method = "draft_model"
    traits = BUILT_IN[method].traits

    def __init__(self, model: RaggedModel, max_batch: int = 64, shared_noise: bool = True) -> None:
        super().__init__(model.cache, model.max_positions, max_batch, shared_noise)
        self._model = model
        self.vocab_size: int | None = model.vocab_size
        warm_up(model.device, model.dtype)

    @classmethod
    def from_config(cls, config: DrafterConfig, target: TargetConfig, device: str) -> Self:
        assert config.model is not None  # validated
        model = load_model(config.model, dtype=config.dtype, device=device, trust_remote_code=config.trust_remote_code)
        return cls(RaggedModel(model, int(config.kv_cache_gb * 2**30)), config.max_batch, config.shared_noise)

    def extend(self) -> np.ndarray:
        drafted = np.zeros(0, np.int64)
        while not len(drafted) and len(slots := np.flatnonzero(self._extendable())):
            drafted = self._forward(slots)
        extendable = self._extendable()
        answered = self._unanswered & ~extendable
        answered[drafted] = True
        self._unanswered[answered] = extendable[answered]
        return np.flatnonzero(answered).astype(np.int32)

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        self._model.load_weights(state_dict)
        self.mirrors.ends[:] = self.mirrors.known
        self._cached[:] = 0

    def _advance(self, slots: np.ndarray, same: np.ndarray) -> None:
        np.minimum.at(self._cached, slots, same)

    def _extendable(self) -> np.ndarray:
        """bool `(slots,)`: requests whose tails have room."""
        return self._placed & (self.mirrors.ends < np.minimum(self.mirrors.limits, self.max_len))

    def _forward(self, slots: np.ndarray) -> np.ndarray:
        """Run one forward, shortest backlogs first. Returns the slots that got a token."""
        mirrors = self.mirrors
        slots = slots[np.argsort(mirrors.ends[slots] - self._cached[slots], kind="stable")]
        slots, ends, rows = self._reserve(slots, mirrors.ends[slots])
        if not len(rows):
            return slots
        complete = ends == mirrors.ends[slots]
        counts = ends - self._cached[slots]
        tokens = mirrors.tokens(slots, self._cached[slots], counts)
        logits = self._model.forward(rows, counts, tokens, complete.astype(np.int64)).logits
        self._cached[slots] = ends
        slots = slots[complete]
        tokens = self._sample(slots, logits, mirrors.ends[slots])
        mirrors.append(slots[tokens >= 0], tokens[tokens >= 0])
        return slots
