"""Packed forwards of an EAGLE head over a paged cache: the drafter's side of `draft/eagle/head.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.draft.eagle.head import EagleHead
from specactor_ray.models.cpu_layers import fuse
from specactor_ray.models.packed_linear import assign_weights, can_pack, pack_linears
from specactor_ray.models.paged_cache import LayerShape, PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch, ragged_attention

_TRIED = 6
"""Positions of the forward that tests compiled layers."""


class EagleRunner:
    """Runs a head. Not thread-safe.

    Args:
        head: Owned by the runner; its linears may be packed.
        cache_bytes: Memory budget of keys and values.

    Raises:
        ModelLoadError: The budget is too small for one page.
    """

    def __init__(self, head: EagleHead, cache_bytes: int) -> None:
        self.head = head.eval().requires_grad_(False)
        self.config = head.config
        weight = head.fc.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.vocab_size, self.feature_size = self.config.vocab_size, self.config.hidden_size
        self.max_positions = int(self.config.layer.get("max_position_embeddings", 1 << 30))
        self._token_ids = head.draft_token_ids()
        ordered = bool((self._token_ids.diff() > 0).all())
        self.ids = self._token_ids.numpy().astype(np.uint32) if ordered and self.device.type == "cpu" else None
        """uint32 `(draft_vocab,)`: tokens of the logits; None: logits are over the target's vocabulary."""
        attention: Any = head.layers[0].self_attn
        shape = LayerShape(attention.kv_heads, attention.head_dim, attention.head_dim)
        if can_pack(self.device, self.dtype):
            pack_linears(head)
        self.cache = PagedCache([shape], cache_bytes, self.dtype, self.device)
        if self.cache.pages == 0:
            raise ModelLoadError(f"a key/value cache of {cache_bytes} bytes holds no page; give more (kv_cache_gb)")
        if self.device.type == "cpu":
            fuse(head, self._try_out)
        else:
            self._try_out()  # compiles attention

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
        """Append positions to rows, which must have room; the last position of each row gives a prediction.

        Args:
            rows: int `(n,)` rows of the cache.
            positions: `(sum(counts),)` sequence positions, row by row; a row may begin anywhere.
            counts: int64 `(n,)` positions of each row, at least 1.
            token_ids: `(sum(counts),)`: the token after each position.
            features: `(sum(counts), hidden)`: fused features, or the head's own outputs.

        Returns:
            Outputs `(n, hidden)` of the last position of each row, and logits `(n, draft_vocab)`, or `(n, vocab)` with
            -inf for tokens outside of the draft vocabulary; see `ids`.
        """
        batch = RaggedBatch(self.cache, rows, counts, (token_ids.astype(np.int64), positions, np.cumsum(counts) - 1))
        tokens, places, last = batch.arrays
        logits, outputs = self.step(batch, tokens, places, features, last)
        self.cache.lengths[rows] += counts
        return outputs, logits

    def step(
        self,
        batch: RaggedBatch,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor,
        last: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and outputs of all positions, or of those at `last`. Nothing waits for the device."""
        outputs = self.head(features[None], tokens[None], positions[None], _attend, ragged_batch=batch)[0]
        outputs = outputs if last is None else outputs.index_select(0, last)
        logits = self.head.logits(outputs)
        return logits if self.ids is not None else self._over_target_vocabulary(logits), outputs

    def _try_out(self) -> None:
        """Run all modules once."""
        (row, count), size = (self.cache.open(_TRIED), _TRIED), self.config.feature_size
        assert row is not None  # they fit into a page
        states = torch.linspace(-1.0, 1.0, count * size).sin().view(count, size)
        self.forward(np.array([row]), np.arange(count), np.array([count]), np.arange(count), self.fuse(states))
        self.cache.free(row)

    def load_weights(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Replace the trained weights (`checkpoint.trained_weights`); embedding and vocabulary stay.

        Raises:
            InputError: A name or shape does not match; nothing was changed.
        """
        kept = {"embed_tokens.weight": self.head.embed_tokens.weight}
        assign_weights(self.head, {**kept, **state_dict}, {})

    def _over_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        full = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        return full.index_copy_(1, self._token_ids, logits)


def _attend(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, ragged_batch: RaggedBatch
) -> torch.Tensor:
    return ragged_attention(module, q, k, v, None, ragged_batch=ragged_batch)[0].flatten(2)
