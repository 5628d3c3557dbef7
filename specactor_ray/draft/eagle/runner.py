"""Packed forwards of an EAGLE head over a paged cache: the drafter's side of `draft/eagle/head.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from specactor_ray.draft.eagle.head import EagleHead
from specactor_ray.errors import ModelLoadError
from specactor_ray.models.packed_linear import assign_weights, can_pack, pack_linears
from specactor_ray.models.paged_cache import LayerShape, PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch, ragged_attention


class EagleRunner:
    """Runs a head. Not thread-safe.

    Args:
        head: Owned by the runner; its linears may be packed.
        cache_bytes: Memory budget of keys and values.

    Raises:
        ModelLoadError: The budget holds not even one page.
    """

    def __init__(self, head: EagleHead, cache_bytes: int) -> None:
        self.head = head.eval().requires_grad_(False)
        self.config = head.config
        weight = head.fc.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.token_ids = head.draft_token_ids()
        attention: Any = head.layers[0].self_attn
        shape = LayerShape(attention.kv_heads, attention.head_dim, attention.head_dim)
        if can_pack(self.device, self.dtype):
            pack_linears(head)
        self.cache = PagedCache([shape], cache_bytes, self.dtype, self.device)
        if self.cache.pages == 0:
            raise ModelLoadError(f"a key/value cache of {cache_bytes} bytes holds no page; give more (kv_cache_gb)")

    @torch.inference_mode()
    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Features of the target's hidden states `(n, feature_size)`."""
        return self.head.fuse(states.to(self.device, self.dtype))

    @torch.inference_mode()
    def forward(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        counts: np.ndarray,
        token_ids: np.ndarray,
        features: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append positions to rows, which must have room; the last position of each row predicts.

        Args:
            rows: int `(n,)` rows of the cache.
            positions: `(sum(counts),)` sequence positions, row by row; a row may begin anywhere.
            counts: int64 `(n,)` positions of each row, at least 1.
            token_ids: `(sum(counts),)`: the token after each position.
            features: `(sum(counts), hidden)`: fused, or the head's own outputs.

        Returns:
            Outputs `(n, hidden)` and logits `(n, vocab)` of the last position of each row. Logits are over the
            target's vocabulary, -inf for tokens outside of the draft vocabulary.
        """
        batch = RaggedBatch(self.cache, rows, counts, (token_ids.astype(np.int64), positions, np.cumsum(counts) - 1))
        tokens, places, last = batch.arrays

        def attend(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return ragged_attention(module, q, k, v, None, ragged_batch=batch)[0].flatten(2)

        outputs = self.head(features[None], tokens[None], places[None], attend)[0].index_select(0, last)
        self.cache.lengths[rows] += counts
        return outputs, self._over_target_vocabulary(self.head.logits(outputs))

    def load_weights(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Replace the trained weights (`checkpoint.trained_weights`); embedding and vocabulary stay.

        Raises:
            InputError: A name or shape does not fit; nothing was changed.
        """
        kept = {"embed_tokens.weight": self.head.embed_tokens.weight}
        assign_weights(self.head, {**kept, **state_dict}, {})

    def _over_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        full = logits.new_full((len(logits), self.config.vocab_size), float("-inf"))
        full[:, self.token_ids] = logits
        return full
